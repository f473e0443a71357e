"""The crash tests detect a save with an omitted sync or with two swapped steps.

Each operation of a recorded history is mutated in turn, and the crash states of the result are checked. Mutating
recorded operations instead of code works for any implementation of a save.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner.durable import checkpoint, files
from tests.faults import histories
from tests.faults.crash_states import State, states
from tests.faults.histories import BY_NAME, SHORT, History, check
from tests.faults.recording import (
    Acknowledge,
    Content,
    Make,
    Operation,
    Recording,
    Remove,
    Rename,
    Sync,
    Truncate,
    Write,
)
from tests.faults.tallies import Tally

NUM_STATES = 150  # crash states per mutant; extreme states are never left out


@dataclass(frozen=True)
class Mutant:
    """A recording with one change."""

    description: str
    place: int
    operations: Sequence[Operation]
    equivalent: str  # why no crash distinguishes it from the original; "" if the tests must detect it


class Judge:
    """Checks states and caches the verdicts, because the mutants of a history share most states."""

    def __init__(self, history: History, root: Path) -> None:
        self.history, self.root = history, root
        self.num_checked = 0
        self._verdicts: dict[tuple[object, ...], str] = {}

    def failure_of(self, state: State) -> str:
        """Return the failure of the history's check, or "" if there is none."""
        if state.identity not in self._verdicts:
            self.num_checked += 1
            try:
                check(self.history, state, self.root)
                self._verdicts[state.identity] = ""
            except AssertionError as error:
                self._verdicts[state.identity] = str(error)
        return self._verdicts[state.identity]

    def breaks_a_promise(self, start: Mapping[int, Content], mutant: Mutant, count: int) -> bool:
        """Return whether one of `count` crash states of the mutant breaks a promise."""
        later = range(mutant.place, len(mutant.operations) + 1)
        result = states(start, mutant.operations, count, 0, points=later)
        return any(self.failure_of(state) for state in result)


# The mutants


def mutants(recording: Recording) -> Iterator[Mutant]:
    """Yield the history without each sync, and with each pair of adjacent operations swapped if still executable."""
    names = Names(recording)
    done = recording.operations
    for place, operation in enumerate(done):
        if isinstance(operation, Sync):
            messages = f"without {names.of(operation)}, operation {place}"
            rest = [*done[:place], *done[place + 1 :]]
            yield Mutant(messages, place, rest, names.why_not_needed(place))
    for place, (first, second) in enumerate(itertools.pairwise(done)):
        swapped = [*done[:place], second, first, *done[place + 2 :]]
        if is_executable(recording.start, swapped):
            messages = f"{names.of(second)} before {names.of(first)}, operation {place}"
            yield Mutant(messages, place, swapped, names.why_either_order(place))


def is_executable(start: Mapping[int, Content], operations: Sequence[Operation]) -> bool:
    """Return whether every operation finds its file or folder."""
    folders = {node: dict(content) for node, content in start.items() if isinstance(content, dict)}
    created = set(start)
    for operation in operations:
        match operation:
            case Make(node, folder, name, is_folder):
                if folder not in folders or name in folders[folder]:
                    return False
                folders[folder][name] = node
                created.add(node)
                if is_folder:
                    folders[node] = {}
            case Rename(node, folder, name, new_name):
                if folders[folder].get(name) != node:
                    return False
                del folders[folder][name]
                folders[folder][new_name] = node
            case Remove(node, folder, name):
                if folders[folder].get(name) != node or folders.get(node):
                    return False
                del folders[folder][name]
            case Write(node) | Truncate(node) | Sync(node):
                if node not in created:
                    return False
            case _:
                pass
    return True


class Names:
    """Names of the nodes of a recording, and reasons why its mutants are equivalent."""

    def __init__(self, recording: Recording) -> None:
        self.done = recording.operations
        self.name = {0: "the root"}
        for content in recording.start.values():
            if isinstance(content, dict):
                self.name |= {node: name for name, node in content.items()}
        self.folders = {node for node, content in recording.start.items() if isinstance(content, dict)}
        for operation in self.done:
            if isinstance(operation, Make):
                self.name[operation.node] = operation.name
                self.folders |= {operation.node} if operation.is_folder else set()

    def of(self, operation: Operation) -> str:
        match operation:
            case Acknowledge(key, value):
                return f"the promise {key}={value}"
            case Rename(_, _, name, new_name):
                return f"the rename of {name} to {new_name}"
            case Sync(node) if node in self.folders:
                return f"the sync of the folder {self.name[node]}"
            case _:
                return f"{type(operation).__name__} of {self.name[operation.node]}"

    def why_not_needed(self, place: int) -> str:
        """Return why the sync can be omitted, or "" if it must not be omitted."""
        node = self.done[place].node  # type: ignore[union-attr]
        if self._is_transient(self.done[place]):
            return OF_REPORTS
        if not self._has_unsynced_changes(node, place):
            return "nothing changed since the previous sync; this one covers changes of a previous start"
        if self._is_synced_again(node, place):
            return "the node is synced again before anything is promised or removed"
        return ""

    def why_either_order(self, place: int) -> str:
        """Return why an operation and the next one can be swapped, or "" if they must not be swapped."""
        first, second = self.done[place], self.done[place + 1]
        if self._is_transient(first) or self._is_transient(second):
            return OF_REPORTS
        match first, second:
            case (Acknowledge(key, value), _):
                is_weaker = any(
                    isinstance(one, Acknowledge) and one.key == key and one.value > value for one in self.done[:place]
                )
                return "" if is_weaker else "operations after a promise may precede it"
            case (_, Acknowledge()):
                is_needed = isinstance(first, Sync) and self._has_unsynced_changes(first.node, place)
                return "" if is_needed else "the promise does not depend on the operation"
            case (Write(), Write()) | (Write(), Make()):
                return "neither is durable before a sync that follows both"
            case (Remove(), Remove()):
                return "the folder has a hidden name, which is durable"
            case (Sync(), Sync()):
                return "two consecutive syncs"
            case (Sync(node), other) | (other, Sync(node)):
                return self._why_sync_in_either_order(node, other, place)
        return ""

    def _why_sync_in_either_order(self, node: int, other: Operation, place: int) -> str:
        """Return why the sync of `node` can come before or after `other`, or "" if the order matters."""
        at = place if self.done[place] is not other else place + 1
        if self._touches(other, node):
            return self.why_not_needed(at) if at == place + 1 else "the change is synced later, before any promise"
        if isinstance(other, Rename) and other.new_name.startswith("replaced-"):
            return "a replaced checkpoint may be renamed earlier, because recovery restores its name"
        if isinstance(other, Rename | Remove) and self._has_unsynced_changes(node, at):
            return ""  # content must be durable before its name, and a name must be removed before its content
        return "they concern different files or folders, and no name is added or removed"

    def _touches(self, operation: Operation, node: int) -> bool:
        """Return whether the operation changes what a sync of `node` writes."""
        match operation:
            case Make(_, folder) | Rename(_, folder) | Remove(_, folder):
                return folder == node
            case Write(file) | Truncate(file):
                return file == node
        return False

    def _has_unsynced_changes(self, node: int, place: int) -> bool:
        """Return whether `node` has changes that are not synced yet."""
        for operation in reversed(self.done[:place]):
            if isinstance(operation, Sync) and operation.node == node:
                return False
            if self._touches(operation, node):
                return True
        return False

    def _is_synced_again(self, node: int, place: int) -> bool:
        for operation in self.done[place + 1 :]:
            if isinstance(operation, Acknowledge | Remove) and not self._is_transient(operation):
                return False
            if isinstance(operation, Sync) and operation.node == node:
                return True
        return False

    def _is_transient(self, operation: Operation) -> bool:
        """Return whether the operation is on a file that is removed before any promise and any rename of its folder."""
        node = getattr(operation, "node", None)
        created = next((at for at, one in enumerate(self.done) if isinstance(one, Make) and one.node == node), None)
        gone = next((at for at, one in enumerate(self.done) if isinstance(one, Remove) and one.node == node), None)
        if created is None or gone is None or node in self.folders:
            return False
        folder = self.done[created].folder  # type: ignore[union-attr]
        return not any(
            isinstance(one, Acknowledge) or (isinstance(one, Rename) and one.node == folder)
            for one in self.done[created:gone]
        )


OF_REPORTS = "the report of a rank's part is removed before anything is promised"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("history", SHORT, ids=lambda history: history.name)
def test_every_omitted_sync_and_every_swapped_step_is_detected(history: History, memory: Path, tally: Tally) -> None:
    recording = history.record(memory / "recorded")
    judge = Judge(history, memory / "state")
    wrong, counts = [], Counter[str]()
    for mutant in mutants(recording):
        is_detected = judge.breaks_a_promise(recording.start, mutant, NUM_STATES)
        tally.tried += 1
        counts["caught" if is_detected else "equivalent"] += 1
        if is_detected == bool(mutant.equivalent):
            wrong.append(f"{'caught' if is_detected else 'NOT CAUGHT'}: {mutant.description} ({mutant.equivalent})")
    assert not wrong, f"{history.name}:\n" + "\n".join(wrong)
    tally.notes |= {**counts, "states": judge.num_checked}


# Other save protocols


def without(*left_out: type[Operation], of_folders: bool | None = None) -> Callable[[Recording], list[Operation]]:
    """Return a change that removes all operations of these kinds; for syncs, only those of folders or of files."""

    def change(recording: Recording) -> list[Operation]:
        folders = Names(recording).folders
        return [
            one
            for one in recording.operations
            if not isinstance(one, left_out) or (of_folders is not None and (one.node in folders) != of_folders)  # type: ignore[union-attr]
        ]

    return change


def early_rename(recording: Recording) -> list[Operation]:
    """Move the first rename right after the creation of what it renames."""
    done = list(recording.operations)
    rename = next(one for one in done if isinstance(one, Rename))
    created = next(place for place, one in enumerate(done) if isinstance(one, Make) and one.node == rename.node)
    done.remove(rename)
    done.insert(created + 1, rename)
    return done


def manifest_first(recording: Recording) -> list[Operation]:
    """Write the manifest before the other files."""
    done = list(recording.operations)
    manifest = next(one.node for one in done if isinstance(one, Make) and one.name == checkpoint.MANIFEST)
    folder = next(one for one in done if isinstance(one, Make) and one.name.startswith(".tmp-update"))
    mine = [one for one in done if isinstance(one, Make | Write | Sync) and one.node == manifest]
    rest = [one for one in done if one not in mine]
    at = rest.index(folder) + 1
    return [*rest[:at], *mine, *rest[at:]]


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "change", "equivalent"),
    [
        ("no sync at all", without(Sync), ""),
        ("no sync of files", without(Sync, of_folders=False), ""),
        ("no sync of folders", without(Sync, of_folders=True), ""),
        ("the name before the files", early_rename, ""),
        ("the manifest first", manifest_first, "the name appears after all files are durable, in any order"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("history", SHORT[:3], ids=lambda history: history.name)
def test_incorrect_save_protocols_are_detected_and_equivalent_ones_are_not(
    history: History,
    name: str,
    change: Callable[[Recording], list[Operation]],
    equivalent: str,
    memory: Path,
) -> None:
    recording = history.record(memory / "recorded")
    mutant = Mutant(name, 0, change(recording), equivalent)
    assert is_executable(recording.start, mutant.operations)
    assert Judge(history, memory / "state").breaks_a_promise(recording.start, mutant, NUM_STATES) != bool(equivalent), (
        name
    )


def _retain_in_place(directory: Path, keep_last: int, *_: Any, **__: Any) -> None:
    for path in checkpoint.newest_first(directory)[max(2, keep_last) :]:
        files.remove(path)


def _write_in_place(path: Path, data: bytes | str) -> None:
    if files.exists(path):
        files.remove(path)
    files.write_new(path, [data if isinstance(data, bytes) else data.encode()])
    files.fsync_directory(path.parent)


def _make_without_sync(path: Path) -> None:
    if not path.is_dir():
        _make_without_sync(path.parent)
        files.new_directory(path)


CODE = [
    ("retention removes files of visible checkpoints", checkpoint, "retain", _retain_in_place, SHORT[0]),
    ("one checkpoint is kept", checkpoint, "_MIN_VALID", 1, SHORT[0]),
    (
        "hashes are not compared",
        checkpoint,
        "_file_problems",
        lambda *_, **__: (),
        BY_NAME["recovery from damaged checkpoints"],
    ),
    ("small files are written in place", files, "atomic_write", _write_in_place, BY_NAME["small files"]),
    ("a folder's name is not synced", files, "make_directory", _make_without_sync, BY_NAME["small files"]),
]


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "module", "attribute", "other", "history"), CODE, ids=[row[0] for row in CODE])
def test_replacing_a_function_with_faulty_code_is_detected(
    name: str,
    module: Any,
    attribute: str,
    other: Any,
    history: History,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, attribute, other)
    for borrower in (histories, sys.modules[__name__]):
        if hasattr(borrower, attribute):
            monkeypatch.setattr(borrower, attribute, other)
    recording = history.record(memory / "recorded")
    judge = Judge(history, memory / "state")
    assert judge.breaks_a_promise(recording.start, Mutant(name, 0, recording.operations, ""), NUM_STATES), name
