"""Invariants of the model of torch's CUDA allocator for any sequence of allocations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.plan.cuda_allocator import MIB, AllocatorSettings, replay

ALLOCATORS = (AllocatorSettings(), AllocatorSettings(expandable=True))
Steps = list[tuple[int, int]]
SIZES = st.one_of(st.integers(1, 2 * MIB), st.integers(MIB, 64 * MIB))
STEPS = st.lists(st.tuples(st.integers(0, 12), SIZES), max_size=30)


def events_of(steps: Steps) -> list[tuple[int, int]]:
    """Return the steps as events: a step allocates a block, or frees it if it is allocated."""
    there: set[int] = set()
    events = []
    for block, size in steps:
        if block in there:
            there.remove(block)
            events.append((block, 0))
        else:
            there.add(block)
            events.append((block, size))
    return events


@given(STEPS, st.sampled_from(ALLOCATORS))
@settings(max_examples=25)
def test_allocations_are_disjoint_and_within_reserved_memory(steps: Steps, allocator: AllocatorSettings) -> None:
    events = events_of(steps)
    held = replay(events, allocator)
    assert held.live <= held.allocated <= held.reserved
    live: dict[int, int] = {}
    most = 0
    for block, size in events:
        live[block] = size
        most = max(most, sum(live.values()))
    assert held.live == most
    for stop in range(0, len(events), 7):
        earlier = replay(events[:stop], allocator)
        assert earlier.reserved <= held.reserved, "peaks only grow"
        assert earlier.allocated <= held.allocated


@given(STEPS, st.sampled_from(ALLOCATORS))
@settings(max_examples=20)
def test_freed_memory_can_be_reused(steps: Steps, allocator: AllocatorSettings) -> None:
    """Adjacent free blocks of a segment are merged."""
    events = events_of(steps)
    freed = [*events, *((block, 0) for block in range(13))]
    again = [
        step for block, size in enumerate(size for _, size in events if size) for step in ((block, size), (block, 0))
    ]
    assert replay([*freed, *again], allocator).reserved == replay(events, allocator).reserved


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([513, MIB], 1024 + MIB, 2 * MIB),
        ([MIB] * 3, 3 * MIB, 4 * MIB),
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([3 * MIB] * 6, 18 * MIB, 20 * MIB),
        ([3 * MIB] * 7, 21 * MIB, 40 * MIB),
        ([10 * MIB - 512], 10 * MIB - 512, 20 * MIB),
        ([10 * MIB], 10 * MIB, 10 * MIB),
        ([11 * MIB + 1], 12 * MIB, 12 * MIB),  # 1 MiB minus 512 bytes is too small to be split off
        ([11 * MIB - 512], 11 * MIB - 512, 12 * MIB),
    ],
)
def test_segments_have_the_sizes_of_torch(sizes: list[int], allocated: int, reserved: int) -> None:
    held = replay(list(enumerate(sizes)))
    assert (held.live, held.allocated, held.reserved) == (sum(sizes), allocated, reserved)


def test_replayed_sizes_equal_those_computed_by_hand() -> None:
    """12 and 15 MiB fit into the freed 30 MiB, 2 MiB into the remaining 3 MiB, and 31 MiB need a new segment."""
    m = MIB
    events = [(0, 30 * m), (0, 0), (1, 12 * m), (2, 15 * m), (3, 2 * m), (4, 31 * m), (1, 0), (2, 0), (5, 27 * m)]
    held = replay(events)
    assert held.reserved == (30 + 32) * m, "the freed 12 and 15 MiB are adjacent, so 27 MiB fit"
    assert held.allocated == (3 + 32 + 27) * m, "a remainder that is too small to be split off belongs to the block"


def test_expandable_segments_grow_by_pages() -> None:
    m, expandable = MIB, AllocatorSettings(expandable=True)
    assert replay([(0, 30 * m), (1, 30 * m)], expandable).reserved == 60 * m, "two pages, then one more for the rest"
    assert replay([(0, 30 * m), (0, 0), (1, 50 * m)], expandable).reserved == 60 * m, "the free end is reused"
    assert replay([(0, 30 * m), (0, 0), (1, 50 * m)]).reserved == 80 * m


def test_allocator_settings_are_parsed() -> None:
    text = "expandable_segments:True,per_process_memory_fraction:0.5"
    assert AllocatorSettings.parse(text) == AllocatorSettings(expandable=True, fraction=0.5)
    assert AllocatorSettings.parse(None) == AllocatorSettings()


@pytest.mark.parametrize("text", ["backend:cudaMallocAsync", "roundup_power2_divisions:[256:8,512:4,>:1]"])
def test_unknown_allocator_settings_are_reported_as_not_modelled(text: str) -> None:
    assert not AllocatorSettings.parse(text).is_modelled
