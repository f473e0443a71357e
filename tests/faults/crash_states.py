"""States that a crash can leave on disk after any operation of a recording, under two models of a file system.

strict  What POSIX guarantees, and no more (IEEE Std 1003.1-2017, fsync and rename, with the rationale of fsync; in
        practice: Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). The content of a file is durable
        as of its last fsync, the names in a folder as of the last fsync of the folder. Each later change may or may not
        survive, independently and in any order: a name without its content, a file of the new length whose new blocks
        hold zeros or garbage, a later name without an earlier one. A rename is atomic. The fsync of a file does not
        make its name durable.
ext4    ext4 with data=ordered and delayed allocation (kernel documentation, filesystems/ext4: "data=ordered" and
        "delalloc"; fs/ext4/fsync.c, ext4_fsync_commit). All changes of names and lengths are in one journal, of which a
        prefix survives a crash. The prefix reaches at least to the last change of any file or folder that was synced.
        If a synced file had new data, it reaches to the time of the sync, because writing data out allocates blocks.
        Data not yet synced are complete up to some length and missing after it: with delayed allocation the length on
        disk grows with the data written out, so a name may refer to an empty file. If a shorter length is not yet in
        the journal, the last block may already contain zeros. The model does not rely on `auto_da_alloc`, which mount
        options can turn off.

In both models, data that a failed fsync should have written stay uncertain: the kernel marks the pages clean, and a
later fsync of the same file reports no error (Rebello et al., "Can Applications Recover from fsync Failures?", USENIX
ATC 2020). This is not modelled for names and lengths: a file system that cannot write its journal stops.

Blocks have 64 bytes, smaller than on any disk, so that small files have several.
"""

from __future__ import annotations

import itertools
import operator
import os
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.recording import (
    ROOT_NODE,
    Acknowledge,
    Content,
    Make,
    Operation,
    Remove,
    Rename,
    Sync,
    SyncFailed,
    Truncate,
    Write,
)

BLOCK = 64
_NUM_DRAWS = 6  # minimum per point and round; a point with hardly any new state is dropped
Tree = dict[str, bytes | None]  # path below the root -> content; None for a folder
Naming = Make | Rename | Remove


@dataclass(frozen=True)
class State:
    """One state of the disk after a crash.

    after         number of operations before the crash
    acknowledged  what the product had promised by then
    choice        how the state was chosen, to reproduce it
    """

    model: str
    after: int
    acknowledged: Mapping[str, Any]
    choice: str
    tree: Tree

    @property
    def identity(self) -> tuple[object, ...]:
        """Key of states that the product and the oracle cannot distinguish."""
        return (frozenset(self.tree.items()), frozenset((key, repr(value)) for key, value in self.acknowledged.items()))

    def put(self, root: Path) -> None:
        """Write the state to the new folder `root`."""
        root.mkdir()
        for path in sorted(self.tree):  # a folder comes before its content
            content = self.tree[path]
            if content is None:
                (root / path).mkdir(0o700)
            else:
                descriptor = os.open(f"{root}/{path}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                os.write(descriptor, content)
                os.close(descriptor)

    def __str__(self) -> str:
        listed = ", ".join(
            f"{path}{'/' if data is None else f' {len(data)} B'}" for path, data in sorted(self.tree.items())
        )
        return (
            f"{self.model}, crash after operation {self.after}, {self.choice}, "
            f"acknowledged {dict(self.acknowledged)}: {listed or 'nothing'}"
        )


def states(
    start: Mapping[int, Content],
    operations: Sequence[Operation],
    count: int,
    seed: object,
    *,
    points: Collection[int] | None = None,
) -> Iterator[State]:
    """Yield up to `count` different states that a crash after any of the operations can leave.

    The extreme states of every point come first and are never left out; further ones are drawn with `seed`.

    points  numbers of operations before the crash; None: all
    """
    seen: set[tuple[object, ...]] = set()
    live = set(range(len(operations) + 1) if points is None else points)
    for index, disk in _points(start, operations):
        if index in live:
            yield from _filter_new(_extreme_states(index, disk), seen)
    for number in itertools.count():  # only points whose last draws found new states
        each = max(_NUM_DRAWS, (count - len(seen)) // max(1, len(live)))
        for index, disk in _points(start, operations):
            if len(seen) >= count or not live:
                return
            if index in live:
                num_seen = len(seen)
                drawn = _draw_states(index, disk, random.Random(f"{seed} {index} {number}"))
                yield from itertools.islice(_filter_new(itertools.islice(drawn, each), seen), count - len(seen))
                if len(seen) - num_seen <= each // 40:
                    live.remove(index)


def _filter_new(result: Iterator[State], seen: set[tuple[object, ...]]) -> Iterator[State]:
    for state in result:
        if state.identity not in seen:
            seen.add(state.identity)
            yield state


def after_all(start: Mapping[int, Content], operations: Sequence[Operation]) -> Tree:
    """Return the tree without a crash."""
    *_, (_, disk) = _points(start, operations)
    return disk.strict(Choice("everything", lambda _: True, _everything))


# Choices


@dataclass(frozen=True)
class Choice:
    """Which uncertain names survive, and what remains of an uncertain write."""

    description: str
    keeps: Callable[[int], bool]  # index among the uncertain changes of names and lengths -> it survives
    leaves: Callable[[bytearray, Write], None]  # applies what remains of a write to the content


def _none(content: bytearray, write: Write) -> None:
    """Keep nothing of the write."""


def _everything(content: bytearray, write: Write) -> None:
    """Keep the complete write."""
    _grow(content, write)
    content[write.offset : write.offset + len(write.data)] = write.data


def _zeros(content: bytearray, write: Write) -> None:
    """Keep the new length of the file; the blocks are zeros."""
    _grow(content, write)


def _half(content: bytearray, write: Write) -> None:
    """Keep the first half; the file ends after it."""
    _everything(content, Write(write.node, write.offset, write.data[: len(write.data) // 2]))


def _garbage(content: bytearray, write: Write) -> None:
    """Keep the new length of the file; the blocks hold stale data."""
    _everything(content, Write(write.node, write.offset, bytes((37 * i + 11) % 256 for i in range(len(write.data)))))


def _some_blocks(chance: random.Random) -> Callable[[bytearray, Write], None]:
    """Keep each block, or replace it with zeros or garbage."""

    def leave(content: bytearray, write: Write) -> None:
        _grow(content, write)
        for begin in range(0, len(write.data), BLOCK):
            block = write.data[begin : begin + BLOCK]
            kind = chance.random()
            if kind < 0.5:
                content[write.offset + begin : write.offset + begin + len(block)] = block
            elif kind < 0.75:
                content[write.offset + begin : write.offset + begin + len(block)] = chance.randbytes(len(block))

    return leave


def _some_prefix(chance: random.Random) -> Callable[[bytearray, Write], None]:
    """Keep the write up to some byte or some block."""

    def leave(content: bytearray, write: Write) -> None:
        length = chance.randint(0, len(write.data))
        if chance.random() < 0.5:
            length -= length % BLOCK
        if length:
            _everything(content, Write(write.node, write.offset, write.data[:length]))

    return leave


def _any(
    chance: random.Random, ways: Sequence[Callable[[bytearray, Write], None]]
) -> Callable[[bytearray, Write], None]:
    def leave(content: bytearray, write: Write) -> None:
        chance.choice(ways)(content, write)

    return leave


def _grow(content: bytearray, write: Write) -> None:
    content.extend(bytes(max(0, write.offset + len(write.data) - len(content))))


DATA = {"no data": _none, "all data": _everything, "half of the data": _half}
STRICT_DATA = DATA | {"zeros": _zeros, "garbage": _garbage}


def _extreme_states(index: int, disk: _Disk) -> Iterator[State]:
    """Yield states in which all uncertain changes are treated alike, or all but one name."""
    for messages, leaves in STRICT_DATA.items():
        yield _strict(index, disk, Choice(f"all names, {messages}", lambda _: True, leaves))
        yield _strict(index, disk, Choice(f"no names, {messages}", lambda _: False, leaves))
    for messages, leaves in DATA.items():
        for one in range(disk.num_uncertain):
            yield _strict(index, disk, Choice(f"only name {one}, {messages}", partial(operator.eq, one), leaves))
            yield _strict(index, disk, Choice(f"all names but {one}, {messages}", partial(operator.ne, one), leaves))
        for length in disk.lengths:
            yield _ext4(
                index, disk, Choice(f"{length} of the journal, {messages}", partial(operator.gt, length), leaves)
            )


def _draw_states(index: int, disk: _Disk, chance: random.Random) -> Iterator[State]:
    """Yield an infinite sequence of random states."""
    for number in itertools.count():
        kept = chance.choice((0.1, 0.5, 0.9))
        names = [chance.random() < kept for _ in range(disk.num_uncertain)]
        ways = [_none, _everything, _zeros, _some_blocks(chance), _some_prefix(chance)]
        yield _strict(index, disk, Choice(f"draw {number}", names.__getitem__, _any(chance, ways)))
        length = chance.choice(disk.lengths)
        ways = [_none, _everything, _some_prefix(chance)]
        messages = f"draw {number}, {length} of the journal"
        yield _ext4(index, disk, Choice(messages, partial(operator.gt, length), _any(chance, ways)))


def _strict(index: int, disk: _Disk, choice: Choice) -> State:
    return State("strict", index, dict(disk.acknowledged), choice.description, disk.strict(choice))


def _ext4(index: int, disk: _Disk, choice: Choice) -> State:
    return State("ext4", index, dict(disk.acknowledged), choice.description, disk.ext4(choice))


# The disk model


@dataclass
class _Change:
    """A change, and whether it is durable."""

    what: Naming | Write | Truncate
    place: int = -1  # index in the journal of names and lengths
    is_certain: bool = False
    is_uncertain: bool = False  # a sync of the change failed, so later syncs do not make it durable


@dataclass
class _File:
    """The initial content of a file, and its changes."""

    base: bytes
    changes: list[_Change] = field(default_factory=list)


class _Disk:
    """The changes up to one moment, from which crash states are built."""

    def __init__(self, start: Mapping[int, Content]) -> None:
        self.acknowledged: dict[str, Any] = {}
        self.num_committed = 0  # length of the journal on disk, in the ext4 model
        self.journal: list[_Change] = []
        self._folders: dict[int, dict[str, int]] = {n: dict(c) for n, c in start.items() if isinstance(c, dict)}
        self._files: dict[int, _File] = {node: _File(c) for node, c in start.items() if isinstance(c, bytes)}
        self._reaches: dict[int, int] = {}  # node -> length of the journal that includes all its changes

    @property
    def lengths(self) -> range:
        """The lengths of the journal that a crash can leave in the ext4 model."""
        return range(self.num_committed, len(self.journal) + 1)

    @property
    def num_uncertain(self) -> int:
        """Number of uncertain changes of names and lengths in the strict model."""
        return sum(not change.is_certain for change in self.journal)

    def do(self, operation: Operation) -> None:
        """Apply an operation."""
        match operation:
            case Acknowledge(key, value):
                self.acknowledged[key] = value
            case Make(node, folder, _, is_folder):
                if is_folder:
                    self._folders[node] = {}
                else:
                    self._files[node] = _File(b"")
                self._record(operation, folder, node)
            case Rename(node, folder) | Remove(node, folder):
                self._record(operation, folder, node)
            case Truncate(node):
                self._files[node].changes.append(self._record(operation, node))
            case Write(node):
                self._files[node].changes.append(_Change(operation))
            case Sync(node):
                self._sync(node)
            case SyncFailed(node):
                for change in self._files[node].changes if node in self._files else ():
                    change.is_uncertain |= isinstance(change.what, Write) and not change.is_certain

    def strict(self, choice: Choice) -> Tree:
        """Return the tree in which each uncertain change survives or not, independently."""
        uncertain = [id(change) for change in self.journal if not change.is_certain]
        kept = {change for place, change in enumerate(uncertain) if choice.keeps(place)}
        return self._tree(choice, lambda change: change.is_certain or id(change) in kept)

    def ext4(self, choice: Choice) -> Tree:
        """Return the tree after the prefix of the journal that `choice` keeps."""
        return self._tree(choice, lambda change: choice.keeps(change.place), is_ordered=True)

    def _tree(self, choice: Choice, is_there: Callable[[_Change], bool], *, is_ordered: bool = False) -> Tree:
        folders = {node: dict(names) for node, names in self._folders.items()}
        for change in self.journal:
            if not isinstance(change.what, Truncate) and is_there(change):
                _apply(folders, change.what)
        tree: Tree = {}

        def walk(node: int, path: str) -> None:
            for name, inner in folders[node].items():
                if inner in folders:
                    tree[path + name] = None
                    walk(inner, f"{path}{name}/")
                else:
                    tree[path + name] = _content(self._files[inner], choice, is_there, is_ordered=is_ordered)

        walk(ROOT_NODE, "")
        return tree

    def _record(self, operation: Naming | Truncate, *concerned: int) -> _Change:
        change = _Change(operation, place=len(self.journal))
        self.journal.append(change)
        self._reaches |= dict.fromkeys(concerned, len(self.journal))
        return change

    def _sync(self, node: int) -> None:
        if node in self._files:
            waiting = [c for c in self._files[node].changes if not c.is_certain and not c.is_uncertain]
            if any(isinstance(change.what, Write) for change in waiting):
                self._reaches[node] = len(self.journal)  # blocks are allocated only now, after all earlier changes
            for change in waiting:
                change.is_certain = True
        for change in self.journal:
            if not isinstance(change.what, Write | Truncate) and change.what.folder == node:
                change.is_certain = True
        self.num_committed = max(self.num_committed, self._reaches.get(node, 0))


def _content(file: _File, choice: Choice, is_there: Callable[[_Change], bool], *, is_ordered: bool) -> bytes:
    """Return the content of the file. If `is_ordered`, nothing survives after missing data."""
    content, longest, is_short = bytearray(file.base), 1 << 40, False
    for change in file.changes:
        match change.what:
            case Truncate(_, length):
                if change.is_certain or is_there(change):
                    del content[length:]
                    content.extend(bytes(length - len(content)))
                elif length < len(content) and choice.leaves is not _none:
                    content[length:] = bytes(len(content) - length)  # zeros are written to the last block early
                    longest = len(content) if is_ordered else longest
            case Write() as write:
                if change.is_certain:
                    _everything(content, write)
                elif not is_short:
                    choice.leaves(content, write)
                    is_short = is_ordered and len(content) < write.offset + len(write.data)
        del content[longest:]
    return bytes(content)


def _apply(folders: Mapping[int, dict[str, int]], naming: Naming) -> None:
    match naming:
        case Make(node, folder, name):
            folders[folder][name] = node
        case Rename(node, folder, name, new_name):
            if folders[folder].get(name) == node:
                del folders[folder][name]
            folders[folder][new_name] = node
        case Remove(node, folder, name):
            if folders[folder].get(name) == node:
                del folders[folder][name]


def _points(start: Mapping[int, Content], operations: Sequence[Operation]) -> Iterator[tuple[int, _Disk]]:
    """Yield (number of operations, the disk after them). The disk is the same object, updated in place."""
    disk = _Disk(start)
    yield 0, disk
    for number, operation in enumerate(operations, 1):
        disk.do(operation)
        yield number, disk
