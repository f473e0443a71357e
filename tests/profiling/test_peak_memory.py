"""Metrics and notes about the counters of torch's allocator."""

from __future__ import annotations

from runner.profiling.peak_memory import allocator_metrics, allocator_notes

GIB = 2**30


def test_rows_have_fragmentation_and_allocation_retries() -> None:
    stats = {
        "allocated_bytes.all.current": 2 * GIB, "allocated_bytes.all.peak": 3 * GIB,
        "reserved_bytes.all.current": 4 * GIB, "inactive_split_bytes.all.current": GIB,
        "num_alloc_retries": 5, "num_ooms": 1,
    }  # fmt: skip
    result = allocator_metrics(stats)
    assert result == {
        "memory/allocated_gib": 2, "memory/reserved_gib": 4, "memory/peak_gib": 3, "memory/fragmentation": 0.25,
        "memory/retries": 5, "memory/ooms": 1,
    }  # fmt: skip
    assert allocator_metrics({})["memory/fragmentation"] == 0, "nothing was allocated yet"


def test_the_end_summary_reports_memory_problems_with_a_fix() -> None:
    assert allocator_notes(None, None, None) == allocator_notes(0, 0.1, 4.0) == []
    assert not allocator_notes(0, 1.0, 0.004), "no setting must be suggested for a few MiB"
    retried, fragmented = allocator_notes(3, 0.25, 4.0)
    assert "3 times" in retried
    assert "25% of the 4.00 GiB" in fragmented
    assert "memory.allocator=expandable_segments:True" in fragmented
