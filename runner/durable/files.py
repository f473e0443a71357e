"""File system access for the run directory: each write either survives a crash completely or leaves no trace.

Files are created with mode 0600 and folders with 0700, links are never followed, and a system error becomes a
StorageError with the path and the reason. All modifications go through `runner.durable.system`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from runner.base.errors import StorageError
from runner.base.json_values import parse_object
from runner.base.secret import redact
from runner.durable.hash_thread import BLOCK, HashThread, split_into_blocks
from runner.durable.system import System
from runner.durable.system_errors import count_call, storage_errors
from runner.host.dirfd import open_parent

TEMPORARY = ".tmp-"  # prefix of incomplete files; removed when a run is opened


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` atomically and durably; a crash leaves either the old content or the new.

    Secrets in text are redacted; bytes are written unchanged.
    Raises StorageError; the old content then remains.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")
    write_new(temporary, [redact(data).encode() if isinstance(data, str) else data])
    try:
        rename(temporary, path)
    except StorageError:
        with suppress(OSError):
            _system.unlink(temporary)
        raise
    fsync_directory(path.parent)


def atomic_write_all(contents: Mapping[Path, bytes | str]) -> None:
    """Write each path atomically and durably, like `atomic_write`, with one sync for all of them.

    Syncing a thousand small files one by one waits for the disk a thousand times, but syncing the file system writes
    the data of all programs. So the files are synced one by one if there are at most two, or if there is no syncfs.
    Raises StorageError; each file then has either its old content or its new, as after a crash.
    """
    temporaries: dict[Path, Path] = {}
    folders = list(dict.fromkeys(path.parent for path in contents))
    with ExitStack() as stack:
        # Opened before any write: a sync reports only write errors since its descriptor was opened.
        descriptors = [stack.enter_context(_open(folder)) for folder in folders]
        try:
            for path, data in contents.items():
                temporaries[path] = temporary = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")
                write_new(temporary, [redact(data).encode() if isinstance(data, str) else data], is_synced=False)
            is_synced = len(contents) > _MAX_SINGLE_SYNCS and all(_sync_file_system(*opened) for opened in descriptors)
            if not is_synced:
                for temporary in temporaries.values():
                    with (
                        _open(temporary, os.O_RDWR | os.O_NOFOLLOW) as (_, descriptor),
                        storage_errors("sync", temporary),
                    ):
                        _system.fsync(descriptor)
            for path in contents:  # after the sync: a name never exists without its content
                rename(temporaries[path], path)
                del temporaries[path]
        finally:
            for temporary in temporaries.values():
                with suppress(OSError):
                    _system.unlink(temporary)
        for folder in folders:
            fsync_directory(folder)


@contextmanager
def _open(path: Path, flags: int = os.O_RDONLY | os.O_DIRECTORY) -> Iterator[tuple[Path, int]]:
    with storage_errors("open", path):
        descriptor = _system.open(path, flags)
    try:
        yield path, descriptor
    finally:
        _system.close(descriptor)


def _sync_file_system(folder: Path, descriptor: int) -> bool:
    with storage_errors("sync the file system of", folder):
        try:
            _system.sync_file_system(descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):  # unsupported, or refused by a sandbox
                raise
            return False
    return True


def write_new(
    path: Path, chunks: Sequence[bytes | bytearray | memoryview], *, is_synced: bool = True
) -> tuple[int, str]:
    """Create the file `path` with the content of `chunks` and sync it; return its size in bytes and its SHA-256.

    The hash is computed from the chunks, not from the file, in parallel with writing if they are large; the chunks
    must not change meanwhile. The name is durable only after `fsync_directory`. Raises StorageError if the name
    exists, even as a link; an incomplete file is removed.
    """
    views = [memoryview(chunk).cast("B") for chunk in chunks]
    with closing(HashThread(views)) as hash_thread:
        with _create_file(path) as descriptor:
            # Starting write-back early shortens the final sync: 1.2 GB were durable after 0.3 s instead of 0.5 s
            # (scripts/measure/save.py).
            size = flushed = 0
            for block in split_into_blocks(views):
                _write_all(descriptor, block)
                count_call()
                hash_thread.update(block)
                size += len(block)
                end = size - size % _PAGE  # a page that still grows would be written twice
                if end - flushed >= BLOCK:
                    with suppress(OSError):  # only a hint
                        _system.begin_write_back(descriptor, flushed, end - flushed)
                    flushed = end
            if is_synced:
                _system.fsync(descriptor)
        return size, hash_thread.hexdigest()


def write_stream(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Create the file `path` with the content of `chunks` and sync it, like `write_new` for content not in memory."""
    with _create_file(path) as descriptor:
        for chunk in chunks:
            _write_all(descriptor, memoryview(chunk))
            count_call()
        _system.fsync(descriptor)


@contextmanager
def _create_file(path: Path) -> Iterator[int]:
    """Yield the descriptor of a new file, which is removed if the context fails."""
    with storage_errors("write", path):
        descriptor = _system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        try:
            try:
                yield descriptor
            finally:
                _system.close(descriptor)
        except Exception:
            with suppress(OSError):
                _system.unlink(path)
            raise


def make_directory(path: Path) -> None:
    """Create the folder `path` and missing parents with mode 0700, and sync their names."""
    if _is_directory(path):
        _sync_if_readable(path.parent)  # the creator of `path` may not have synced its name yet
        return
    make_directory(path.parent)
    with storage_errors("create the folder", path):
        try:
            _system.mkdir(path)
        except FileExistsError:
            if not _is_directory(path):  # else another process created it concurrently
                raise
    _sync_if_readable(path.parent)


def new_directory(path: Path) -> None:
    """Create the folder `path` with mode 0700; its name is durable only after `fsync_directory`."""
    with storage_errors("create the folder", path):
        _system.mkdir(path)


def sync_ancestors(path: Path) -> None:
    """Sync the name of `path`, whose creator may have been killed, and those of its parents on the same file system."""
    device = _get_device(path)
    for folder in path.absolute().parents:
        if _get_device(folder) != device or not _sync_if_readable(folder):
            return


def _sync_if_readable(folder: Path) -> bool:
    """Sync the names in a folder. A folder that cannot be opened belongs to another user and is assumed durable."""
    try:
        fsync_directory(folder)
    except StorageError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        return False
    return True


def _get_device(path: Path) -> int:
    with storage_errors("access", path):
        return path.stat().st_dev


def fsync_directory(path: Path) -> None:
    """Sync the names in the folder `path`.

    A no-op on file systems that cannot sync folders (EINVAL, ENOTSUP: some network and FUSE mounts).
    """
    with storage_errors("sync the folder", path):
        descriptor = _system.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _system.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            _system.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename `source` to `target`; durable only after `fsync_directory`."""
    with storage_errors("rename", source):
        _system.rename(source, target)


def remove(path: Path) -> None:
    """Remove `path`: a file, a link (not its target) or a folder with its content."""
    with storage_errors("remove", path):
        _remove(path)


def remove_temporary_files(directory: Path) -> tuple[tuple[str, str], ...]:
    """Remove incomplete files that a crash left in `directory`; return (name, reason) of those that remain."""
    not_removed = []
    # Their temporary names must be durable first: a partly removed folder must not reappear under its original name.
    is_hidden = False
    for name in list_names(directory):
        if name.startswith(TEMPORARY):
            try:
                if not is_hidden:
                    fsync_directory(directory)
                    is_hidden = True
                remove(directory / name)
            except StorageError as error:
                not_removed.append((name, error.problems[0].what))
    return tuple(not_removed)


def list_names(directory: Path) -> list[str]:
    """Return the sorted names in `directory`, empty if it does not exist."""
    with storage_errors("list", directory):
        try:
            return _list_names(directory)
        except FileNotFoundError:
            return []


def is_plain_directory(path: Path) -> bool:
    """Return whether `path` is a folder and not a link to one."""
    return stat.S_ISDIR(_get_mode(path))


def is_plain_file(path: Path) -> bool:
    """Return whether `path` is a regular file: no link, pipe or device."""
    return stat.S_ISREG(_get_mode(path))


def exists(path: Path) -> bool:
    """Return whether the name exists, even as a broken link."""
    return _get_mode(path) != 0


def file_size(path: Path) -> int:
    """Return the size of the file `path` in bytes."""
    with storage_errors("read", path):
        return _lstat(path).st_size


def read(path: Path, *, at_most: int | None = None) -> bytes:
    """Return the content of the regular file `path`. Raises StorageError if it exceeds `at_most` bytes."""
    with storage_errors("read", path), open(open_regular(path), "rb") as file:
        if at_most is None:
            return file.read()
        # Do not request `at_most` bytes: Python allocates the requested size, which may exceed the address space limit.
        expected = max(os.fstat(file.fileno()).st_size, 1 << 16)
        content = file.read(min(expected, at_most) + 1)
        if len(content) > at_most:
            raise OSError(errno.EFBIG, f"must be at most {at_most} bytes")
        return content


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of the regular file `path` as hexadecimal digits."""
    with storage_errors("read", path), open(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`, an empty one if it is missing, damaged or not an object."""
    try:
        return parse_object(read(path, at_most=_MAX_OBJECT_BYTES)) or {}
    except StorageError:
        return {}


def read_rows(path: Path, key: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of the file `path`, skipping other lines; none if it does not exist.

    With `key`, yield only rows that have this key; lines without its text are not parsed, which takes most of the time.
    Reads regular files only, and no line of more than a megabyte: the file may be untrusted.
    """
    text = b"" if key is None else json.dumps(key).encode()
    return (row for row in read_lines(path, text) if row is not None and (key is None or key in row))


def read_lines(path: Path, text: bytes = b"") -> Iterator[dict[str, Any] | None]:
    """Yield rows as `read_rows` does, but None for each invalid line, except a last line without a line end.

    Such a line may be incomplete because a run is writing it. Lines that do not contain `text` are skipped.
    """
    with suppress(OSError), open(open_regular(path), "rb") as file:
        while line := file.readline(_MAX_LINE_BYTES):
            row = parse_object(line) if text in line else None
            if row is not None or (text in line and line.endswith(b"\n")):
                yield row


def read_last_row(path: Path, key: str | None = None, start: int = 0, *, lead: str = "") -> dict[str, Any]:
    """Return the last JSON object in the lines of the file `path`, reading only its end; empty if there is none.

    key    required key with a value other than null; `lead`: required prefix of some key
    start  offset in bytes before which lines are ignored
    """
    with suppress(OSError), open(open_regular(path), "rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - _MAX_LINE_BYTES))
        lines = (line for line in reversed(file.read(_MAX_LINE_BYTES).splitlines()) if f'"{lead}'.encode() in line)
        rows = (row for line in lines if (row := parse_object(line)) and any(name.startswith(lead) for name in row))
        return next((row for row in rows if key is None or row.get(key) is not None), {})
    return {}


class AppendLog:
    """An append-only file of lines. Rows are buffered in memory and written as complete lines.

    An incomplete last line, left by a crash, is removed on opening. Thread-safe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[bytes] = []
        self._guard = threading.Lock()
        self._sync_error: StorageError | None = None
        self._may_be_torn = False  # part of a row may follow `_length`
        with storage_errors("open", path):
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            self._descriptor = _require_regular(_system.open(path, flags))
            size = os.fstat(self._descriptor).st_size
            self._length = _find_last_line_end(self._descriptor, size)
            if self._length < size:
                _system.truncate(self._descriptor, self._length)
        if size == 0:  # possibly new: its name must be as durable as its lines
            fsync_directory(path.parent)

    @property
    def length(self) -> int:
        """Size of the file in bytes, without buffered rows."""
        return self._length

    @property
    def pending_length(self) -> int:
        """Size of the file in bytes once all rows are flushed."""
        with self._guard:
            return self._length + sum(map(len, self._rows))

    def write(self, row: str) -> None:
        """Buffer `row`, with secrets redacted, as a line of the next flush."""
        row = redact(row)
        line = row if row.endswith("\n") else row + "\n"
        with self._guard:
            self._rows.append(line.encode())

    def flush(self) -> None:
        """Write all buffered rows to the file.

        Raises StorageError; the file then ends with a complete line, and the rows are kept for the next flush.
        """
        with self._guard, storage_errors("append to", self.path):
            if self._rows:
                self._repair()
                data = b"".join(self._rows)
                self._may_be_torn = True
                try:
                    _write_all(self._descriptor, memoryview(data))
                except OSError:
                    with suppress(OSError):  # retried before the next write
                        self._repair()
                    raise
                self._may_be_torn = False
                self._length += len(data)
                self._rows.clear()

    def sync(self) -> None:
        """Sync all rows to disk. Other threads can write meanwhile.

        Raises StorageError; every later call raises it too, because the kernel drops pages that it could not write, and
        a second sync would succeed without them.
        """
        if self._sync_error is not None:
            raise self._sync_error
        self.flush()
        try:
            with storage_errors("sync", self.path):
                _system.fsync(self._descriptor)  # outside of the lock: the disk may be busy for seconds
        except StorageError as error:
            self._sync_error = error
            raise

    def cut(self, length: int) -> None:
        """Truncate the file to the complete lines of its first `length` bytes, and drop buffered rows."""
        with self._guard, storage_errors("cut", self.path):
            self._rows.clear()
            if length < self._length:  # never longer: that would append zeros
                length = _find_last_line_end(self._descriptor, length)
                _system.truncate(self._descriptor, length)
                self._length, self._may_be_torn = length, False
                _system.fsync(self._descriptor)

    def close(self) -> None:
        """Flush and close the file; a no-op the second time."""
        if self._descriptor < 0:
            return
        try:
            self.flush()
        finally:
            descriptor, self._descriptor = self._descriptor, -1
            with storage_errors("close", self.path):
                _system.close(descriptor)

    def _repair(self) -> None:
        if self._may_be_torn:
            _system.truncate(self._descriptor, self._length)

    def __enter__(self) -> AppendLog:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with suppress(StorageError) if kind else nullcontext():  # the first error takes precedence
            self.close()


class LockHeld(Exception):
    """Another process has the lock; `note` is the content of the lock file."""

    def __init__(self, note: str) -> None:
        super().__init__("another process holds the lock")
        self.note = note


class Lock:
    """An exclusive lock on the file `path` until `release` or exit, with a note for other processes.

    Uses `flock`, which the system releases even if the process is killed. Forked children (data workers) close
    their copy at once, so a worker that outlives its parent does not keep the run locked.
    Raises LockHeld if another process has the lock, and StorageError if locking fails.
    """

    def __init__(self, path: Path, note: str) -> None:
        with storage_errors("lock", path):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            with open_parent(path) as (folder, name):
                descriptor = os.open(name, flags, 0o600, dir_fd=folder)
            try:
                # Not a POSIX record lock, which is released when this process closes any other descriptor of the file.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, 0)
                os.write(descriptor, note.encode())  # informative only; need not survive a crash
            except BlockingIOError:
                holder = os.read(descriptor, 4096).decode(errors="replace")
                os.close(descriptor)
                raise LockHeld(holder) from None
            except OSError:
                os.close(descriptor)
                raise
        self._descriptor = descriptor
        _held_locks.add(descriptor)

    def holds(self, path: Path) -> bool:
        """Return whether the locked file is still at `path`: a removed lock file excludes no other process."""
        with suppress(OSError):
            status, own_status = _lstat(path), os.fstat(self._descriptor)
            return (status.st_dev, status.st_ino) == (own_status.st_dev, own_status.st_ino)
        return False

    def release(self) -> None:
        """Release the lock; a no-op the second time and in a forked child."""
        if self._descriptor in _held_locks:
            _held_locks.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = -1


@contextmanager
def use_system(system: System) -> Iterator[None]:
    """Use `system` for all modifications of files inside the context; for tests."""
    global _system
    previous, _system = _system, system
    try:
        yield
    finally:
        _system = previous


def _remove(path: Path) -> None:
    if not stat.S_ISDIR(_lstat(path).st_mode):
        _system.unlink(path)
        return
    for name in _list_names(path):
        _remove(path / name)
    _system.rmdir(path)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[_system.write(descriptor, data) :]


def _get_mode(path: Path) -> int:
    with storage_errors("access", path):
        try:
            return _lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0


def _lstat(path: Path) -> os.stat_result:
    with open_parent(path) as (folder, name):
        return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _is_directory(path: Path) -> bool:
    """Return whether `path` is a folder, or a link to one."""
    with suppress(OSError, ValueError), open_parent(path) as (folder, name):
        return stat.S_ISDIR(os.stat(name, dir_fd=folder).st_mode)
    return False


def _list_names(path: Path) -> list[str]:
    with open_parent(path) as (folder, name):
        if folder is None:
            return sorted(os.listdir(path))
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            return sorted(os.listdir(descriptor))
        finally:
            os.close(descriptor)


def open_regular(path: Path) -> int:
    """Return a descriptor for reading a regular file. Raises OSError for another type, without blocking on a pipe."""
    with open_parent(path) as (folder, name):
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    return _require_regular(descriptor)


def _require_regular(descriptor: int) -> int:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "must be a regular file")
    return descriptor


def _find_last_line_end(descriptor: int, size: int) -> int:
    while size:
        start = max(0, size - _SEARCH_BYTES)
        position = os.pread(descriptor, size - start, start).rfind(b"\n")
        if position >= 0:
            return start + position + 1
        size = start
    return 0


def close_inherited_locks() -> None:
    """Close the lock files in a forked child: an flock is held as long as any process has its descriptor open."""
    for descriptor in _held_locks:
        with suppress(OSError):
            os.close(descriptor)
    _held_locks.clear()


_system = System()
_held_locks: set[int] = set()
os.register_at_fork(after_in_child=close_inherited_locks)

_PAGE = 4096
_MAX_SINGLE_SYNCS = 2  # up to this number, files are synced one by one
_SEARCH_BYTES = 1 << 20
_MAX_OBJECT_BYTES = 64 << 20  # run.json and plan.json have a few thousand bytes
_MAX_LINE_BYTES = 1 << 20
