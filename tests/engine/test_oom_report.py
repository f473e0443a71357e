"""The line that describes an out-of-memory error contains every number that is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from runner.base.oom_errors import OomCause
from runner.base.text import format_bytes
from runner.engine.oom_report import MemoryAccount, MemoryHolder

GIB = 2**30
CAUSE = OomCause("device", "out of memory", 2 * GIB, "forward")
ACCOUNT = MemoryAccount(
    CAUSE, samples=8, shape="3x4", free_bytes=GIB, total_bytes=80 * GIB, held_bytes=70 * GIB, in_tensors_bytes=60 * GIB,
    others=(MemoryHolder(4711, "first", 5 * GIB), MemoryHolder(4712, "second", None)),
)  # fmt: skip


def test_every_known_number_is_in_the_line_and_no_unknown_one() -> None:
    numbers = {
        "free_bytes": format_bytes(GIB),
        "total_bytes": format_bytes(80 * GIB),
        "held_bytes": format_bytes(70 * GIB),
        "in_tensors_bytes": format_bytes(60 * GIB),
    }
    line = str(ACCOUNT)
    assert all(number in line for number in (*numbers.values(), format_bytes(2 * GIB), "3x4"))
    assert all(text in line for text in ("first", "4711", format_bytes(5 * GIB), "second", "4712"))
    for field, number in numbers.items():
        unknown: dict[str, Any] = {field: None}
        assert number not in str(dataclasses.replace(ACCOUNT, **unknown)), field
    assert "4711" not in str(dataclasses.replace(ACCOUNT, others=()))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"in_tensors_bytes": 68 * GIB}, False),
        ({"in_tensors_bytes": 68 * GIB - 1}, True),
        ({"in_tensors_bytes": None}, False),
        ({"held_bytes": None}, False),
        ({"shortage": dataclasses.replace(CAUSE, requested_bytes=None)}, False),
    ],
)
def test_memory_is_fragmented_if_more_is_cached_than_was_requested(changed: dict[str, Any], expected: bool) -> None:
    assert dataclasses.replace(ACCOUNT, **changed).is_fragmented == expected
