"""After a crash at any operation, recovery finds what was promised, and the run can continue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.crash_states import after_all, states
from tests.faults.histories import BY_NAME, HISTORIES, History, check
from tests.faults.tallies import Tally


@pytest.mark.sampled(2)
@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.name)
def test_every_crash_state_fulfills_the_guarantees(
    history: History, memory: Path, seed: int, amount: Callable[[int, int], int], tally: Tally
) -> None:
    _check_crash_states(history, memory, seed, amount(2_400, 110_000) // len(HISTORIES), tally)


@pytest.mark.slow
def test_every_crash_state_of_saves_in_parts_fulfills_the_guarantees(
    memory: Path, seed: int, amount: Callable[[int, int], int], tally: Tally
) -> None:
    """This case is not sampled, because no other fault test saves in parts."""
    _check_crash_states(BY_NAME["saves in parts"], memory, seed, amount(2_400, 110_000) // len(HISTORIES), tally)


def _check_crash_states(history: History, memory: Path, seed: int, count: int, tally: Tally) -> None:
    recording = history.record(memory / "recorded")
    for state in states(recording.start, recording.operations, count, f"{history.name} {seed}"):
        check(history, state, memory / "state")
        tally.tried += 1
        tally.notes[state.model] = int(tally.notes.get(state.model, 0)) + 1
    tally.notes["operations"] = len(recording.operations)


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.name)
def test_replaying_recorded_operations_gives_the_files_on_disk(history: History, memory: Path) -> None:
    recording = history.record(memory / "recorded")
    there = {
        str(path.relative_to(recording.root)): None if path.is_dir() else path.read_bytes()
        for path in recording.root.rglob("*")
        if path.name != ".lock"  # the lock is not written through the system
    }
    modelled = after_all(recording.start, recording.operations)
    modelled.pop("runs/one/.lock", None)
    assert modelled == there
