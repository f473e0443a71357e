"""Systems for tests: one that records every change that a crash could undo, and one that injects failures."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from runner.durable import files
from runner.durable.system import System

Result = TypeVar("Result")
_OUTSIDE = -1
ROOT_NODE = 0  # the folder of the recording


@dataclass(frozen=True)
class Make:
    """The file or folder `node` was created."""

    node: int
    folder: int
    name: str
    is_folder: bool


@dataclass(frozen=True)
class Write:
    """`data` was written to the file `node`."""

    node: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Truncate:
    """The length of the file `node` was changed."""

    node: int
    length: int


@dataclass(frozen=True)
class Sync:
    """The content of a file, or the names in a folder, were synced."""

    node: int


@dataclass(frozen=True)
class SyncFailed:
    """A sync failed; a later sync of the same file does not write the pending data again."""

    node: int


@dataclass(frozen=True)
class Rename:
    """`node` was renamed in its folder, possibly over another file."""

    node: int
    folder: int
    name: str
    new_name: str


@dataclass(frozen=True)
class Remove:
    """A name was removed, and with it a file, a link or an empty folder."""

    node: int
    folder: int
    name: str


@dataclass(frozen=True)
class Acknowledge:
    """The product acknowledged something that must be durable from here on."""

    key: str
    value: Any


Operation = Make | Write | Truncate | Sync | SyncFailed | Rename | Remove | Acknowledge
Content = bytes | dict[str, int]  # of a file; or name -> node of a folder


class Recording(System):
    """A system that records every change below the folder `root`, in order.

    start       node -> its durable content before the recording
    operations  every later change; opening to read, closing and starting write-back change nothing
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.start: dict[int, Content] = {}
        self.operations: list[Operation] = []
        self._folders: dict[int, dict[str, int]] = {}
        self._descriptors: dict[int, tuple[int, bool]] = {}  # descriptor -> node, whether it appends
        self._offsets: dict[int, int] = {}
        self._guard = threading.RLock()
        self._num_nodes = 0
        self._scan(root)

    def acknowledge(self, key: str, value: Any) -> None:
        """Record that `value` must survive a crash from now on."""
        with self._guard:
            self.operations.append(Acknowledge(key, value))

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        with self._guard:
            is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
            descriptor = super().open(path, flags, mode)
            if not path.is_relative_to(self.root):  # to sync the names of the parent folders
                self._descriptors[descriptor] = (_OUTSIDE, False)
                return descriptor
            if is_new:
                self._make(self._node(path.parent), path.name, is_folder=False)
            assert not flags & os.O_TRUNC, "opening a file with O_TRUNC is not recorded"
            self._descriptors[descriptor] = (self._node(path), bool(flags & os.O_APPEND))
            self._offsets[descriptor] = 0
            return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        with self._guard:
            node, appends = self._descriptors[descriptor]
            offset = os.fstat(descriptor).st_size if appends else self._offsets[descriptor]
            taken = super().write(descriptor, data)
            self._offsets[descriptor] = offset + taken
            self.operations.append(Write(node, offset, bytes(data[:taken])))
            return taken

    def truncate(self, descriptor: int, length: int) -> None:
        with self._guard:
            super().truncate(descriptor, length)
            self.operations.append(Truncate(self._descriptors[descriptor][0], length))

    def fsync(self, descriptor: int) -> None:
        """Record the sync without syncing the disk."""
        with self._guard:
            if (node := self._descriptors[descriptor][0]) != _OUTSIDE:
                self.operations.append(Sync(node))

    def sync_file_system(self, descriptor: int) -> None:
        """Record a sync of each changed file; folders are made durable by a later fsync."""
        with self._guard:
            changed = [each.node for each in self.operations if isinstance(each, Write | Truncate)]
            self.operations += [Sync(node) for node in dict.fromkeys(changed)]

    def fsync_fails(self, descriptor: int) -> None:
        """Record a failed sync of this file or folder."""
        with self._guard:
            if (node := self._descriptors[descriptor][0]) != _OUTSIDE:
                self.operations.append(SyncFailed(node))

    def close(self, descriptor: int) -> None:
        with self._guard:
            self._descriptors.pop(descriptor, None)
            super().close(descriptor)

    def mkdir(self, path: Path) -> None:
        with self._guard:
            super().mkdir(path)
            self._make(*self._place(path), is_folder=True)

    def rename(self, source: Path, target: Path) -> None:
        with self._guard:
            super().rename(source, target)
            (folder, name), (other, new_name) = self._place(source), self._place(target)
            assert folder == other, "a rename between folders is not atomic in every model"
            node = self._folders[folder].pop(name)
            self._folders[folder][new_name] = node
            self.operations.append(Rename(node, folder, name, new_name))

    def unlink(self, path: Path) -> None:
        with self._guard:
            super().unlink(path)
            self._remove(*self._place(path))

    def rmdir(self, path: Path) -> None:
        with self._guard:
            super().rmdir(path)
            self._remove(*self._place(path))

    def _scan(self, path: Path) -> int:
        node, self._num_nodes = self._num_nodes, self._num_nodes + 1
        if path.is_dir():
            names = {entry.name: self._scan(entry) for entry in sorted(path.iterdir())}
            self._folders[node], self.start[node] = names, dict(names)
        else:
            self.start[node] = path.read_bytes()
        return node

    def _place(self, path: Path) -> tuple[int, str]:
        """Return the parent folder of `path`, and the name in it."""
        return self._node(path.parent), path.name

    def _node(self, path: Path) -> int:
        node = ROOT_NODE
        for name in path.relative_to(self.root).parts:
            node = self._folders[node][name]
        return node

    def _make(self, folder: int, name: str, *, is_folder: bool) -> None:
        node, self._num_nodes = self._num_nodes, self._num_nodes + 1
        self._folders[folder][name] = node
        if is_folder:
            self._folders[node] = {}
        self.operations.append(Make(node, folder, name, is_folder))

    def _remove(self, folder: int, name: str) -> None:
        self.operations.append(Remove(self._folders[folder].pop(name), folder, name))


class Quick(System):
    """The real system, without waiting for the disk."""

    def fsync(self, descriptor: int) -> None:
        os.fstat(descriptor)

    def sync_file_system(self, descriptor: int) -> None:
        os.fstat(descriptor)


class Killed(BaseException):
    """Raised where the process is killed."""


class Faults(System):
    """Counts the operations and injects faults into those numbered in `at`: number -> kind.

    A kind is the name of an errno (the operation fails), "killed before", "killed half way", "killed after" (the
    process ends), "short" (half of the bytes are written) or "link" (another process puts a link to `victim` at the
    path of a new file). `trace` has the name and the subject of each operation.
    """

    def __init__(
        self, at: Mapping[int, str] | None = None, inner: System | None = None, victim: Path | None = None
    ) -> None:
        self.at, self.inner, self.victim = at or {}, inner or Quick(), victim
        self.trace: list[tuple[str, str]] = []
        self.met: list[int] = []  # the numbers of `at` that were reached
        self.struck: list[int] = []  # number of recorded operations at each injected fault
        self._is_dead = False
        self._names: dict[int, str] = {}
        self._guard = threading.Lock()

    @contextmanager
    def active(self) -> Iterator[Faults]:
        """Use this system for all file operations within the context."""
        with files.use_system(self):
            yield self

    def restart(self) -> None:
        """Start a new process."""
        self._is_dead = False

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        kind = self._begin("open", str(path))
        if kind == "link" and self.victim is not None and flags & os.O_CREAT and not os.path.lexists(path):
            path.symlink_to(self.victim)
        descriptor = self._do(kind, lambda: self.inner.open(path, flags, mode))
        self._names[descriptor] = str(path)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        kind = self._begin("write", self._names[descriptor])
        if kind == "short" and len(data) > 1:
            return self.inner.write(descriptor, data[: len(data) // 2])
        if kind == "killed half way":
            self.inner.write(descriptor, data[: len(data) // 2])
            self._die()
        return self._do(kind, lambda: self.inner.write(descriptor, data))

    def begin_write_back(self, descriptor: int, start: int, length: int) -> None:
        kind = self._begin("begin_write_back", self._names[descriptor])
        self._do(kind, lambda: self.inner.begin_write_back(descriptor, start, length))

    def truncate(self, descriptor: int, length: int) -> None:
        kind = self._begin("truncate", self._names[descriptor])
        self._do(kind, lambda: self.inner.truncate(descriptor, length))

    def fsync(self, descriptor: int) -> None:
        kind = self._begin("fsync", self._names[descriptor])
        if kind.startswith("E") and isinstance(self.inner, Recording):
            self.inner.fsync_fails(descriptor)
        self._do(kind, lambda: self.inner.fsync(descriptor))

    def sync_file_system(self, descriptor: int) -> None:
        kind = self._begin("sync_file_system", self._names[descriptor])
        self._do(kind, lambda: self.inner.sync_file_system(descriptor))

    def close(self, descriptor: int) -> None:
        try:
            kind = self._begin("close", self._names[descriptor])
        finally:  # close always releases the descriptor, as does the end of the process
            self.inner.close(descriptor)
        self._do(kind, lambda: None)

    def mkdir(self, path: Path) -> None:
        self._do(self._begin("mkdir", str(path)), lambda: self.inner.mkdir(path))

    def rename(self, source: Path, target: Path) -> None:
        self._do(self._begin("rename", str(source)), lambda: self.inner.rename(source, target))

    def unlink(self, path: Path) -> None:
        self._do(self._begin("unlink", str(path)), lambda: self.inner.unlink(path))

    def rmdir(self, path: Path) -> None:
        self._do(self._begin("rmdir", str(path)), lambda: self.inner.rmdir(path))

    def _begin(self, operation: str, subject: str) -> str:
        """Record the operation; return the kind of its fault, or ""."""
        with self._guard:
            if self._is_dead:  # while the exception propagates, the killed program does nothing more
                raise Killed
            number = len(self.trace)
            self.trace.append((operation, subject))
        kind = self.at.get(number, "")
        if kind:
            self.met.append(number)
            self.struck.append(len(self.inner.operations) if isinstance(self.inner, Recording) else 0)
        if kind == "killed before":
            self._die()
        return kind

    def _do(self, kind: str, operation: Callable[[], Result]) -> Result:
        if kind.startswith("E"):
            code = getattr(errno, kind)
            raise OSError(code, os.strerror(code))
        result = operation()
        if kind.startswith("killed"):
            self._die()
        return result

    def _die(self) -> None:
        self._is_dead = True
        raise Killed
