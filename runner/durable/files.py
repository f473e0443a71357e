"""The one door to the file system of the run directory: what was written here survives a crash, or is not there.

Files are made 0600 and folders 0700, links are never followed, and whatever the system refuses is a StorageError that
names the path and the reason.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from runner.base.errors import StorageError

TEMPORARY = ".tmp-"  # how the names begin of what a crash may leave behind; swept when a run is opened


def atomic_write(path: Path, data: bytes | str) -> None:
    """`path` holds `data` and is on disk; a crash at any moment leaves the old content or the new, whole.

    Raises StorageError; the old content is then still there.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")
    write_new(temporary, [data.encode() if isinstance(data, str) else data])
    try:
        rename(temporary, path)
    except StorageError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_directory(path.parent)


def write_new(path: Path, chunks: Iterable[bytes | bytearray | memoryview]) -> tuple[int, str]:
    """`path` is a new file with the content of `chunks`, synced; returns its size in bytes and its SHA-256.

    The hash is taken of what is handed to the system, not of what is read back. The name is durable only after
    `fsync_directory`. Raises StorageError where the name is taken, even by a link; a file half written is removed.
    """
    size, digest = 0, hashlib.sha256()
    with storage("write", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                for chunk in chunks:
                    view = memoryview(chunk).cast("B")
                    for start in range(0, len(view), _BLOCK):
                        block = view[start : start + _BLOCK]
                        digest.update(block)
                        _write_all(descriptor, block)
                    size += len(view)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except Exception:
            with suppress(OSError):
                os.unlink(path)
            raise
    return size, digest.hexdigest()


def make_directory(path: Path) -> None:
    """`path` is a folder, with missing parents, each new one 0700 and its name on disk."""
    if path.is_dir():
        return
    make_directory(path.parent)
    with storage("create the folder", path):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not path.is_dir():  # else another process was as quick
                raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """The names in the folder `path` are on disk.

    File systems that cannot sync folders (EINVAL, ENOTSUP: some network and FUSE mounts) promise nothing more.
    """
    with storage("sync the folder", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """`source` is called `target`; on disk only after `fsync_directory`."""
    with storage("rename", source):
        os.rename(source, target)


def remove(path: Path) -> None:
    """`path` is gone: a file, a link (not what it points to) or a folder with all that is in it."""
    with storage("remove", path):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def sweep(directory: Path) -> tuple[tuple[str, str], ...]:
    """What a crash left half made in `directory` is gone; returns (name, reason) of what could not be removed."""
    failed = []
    for name in names(directory):
        if name.startswith(TEMPORARY):
            try:
                remove(directory / name)
            except StorageError as error:
                failed.append((name, error.problems[0].what))
    return tuple(failed)


def names(directory: Path) -> list[str]:
    """Return the sorted names in `directory`; a folder that is not there has none."""
    with storage("list", directory):
        try:
            return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []


def is_plain_directory(path: Path) -> bool:
    """Tell whether `path` is a folder and not a link to one."""
    return stat.S_ISDIR(_mode(path))


def is_plain_file(path: Path) -> bool:
    """Tell whether `path` is a regular file: no link, pipe or device."""
    return stat.S_ISREG(_mode(path))


def exists(path: Path) -> bool:
    """Tell whether the name is taken, also by a link that leads nowhere."""
    return _mode(path) != 0


def size_of(path: Path) -> int:
    """Return the size of the file `path` in bytes."""
    with storage("read", path):
        return os.lstat(path).st_size


def read(path: Path, *, at_most: int | None = None) -> bytes:
    """Return the content of the regular file `path`; StorageError where it has more than `at_most` bytes."""
    with storage("read", path), open(_open_plain(path), "rb") as file:
        if at_most is None:
            return file.read()
        content = file.read(at_most + 1)
        if len(content) > at_most:
            raise OSError(errno.EFBIG, f"must have at most {at_most} bytes")
        return content


def digest_of(path: Path) -> str:
    """Return the SHA-256 of the regular file `path` in hexadecimal."""
    with storage("read", path), open(_open_plain(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`; an empty one where it is missing, damaged or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class AppendLog:
    """A file of lines that only grows. Rows are collected in memory and reach the file in whole lines.

    A last line that a crash left without its end is cut off on opening. Several threads may write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[bytes] = []
        self._guard = threading.Lock()
        with storage("open", path):
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o600)
            size = os.fstat(self._descriptor).st_size
            self._length = _end_of_last_line(self._descriptor, size)
            if self._length < size:
                os.ftruncate(self._descriptor, self._length)
        if size == 0:  # perhaps new: its name must outlive a power cut as its lines do
            fsync_directory(path.parent)

    @property
    def length(self) -> int:
        """The bytes that are in the file; rows not yet flushed do not count."""
        return self._length

    def write(self, row: str) -> None:
        """`row` will be a line of the file after the next flush."""
        line = row if row.endswith("\n") else row + "\n"
        with self._guard:
            self._rows.append(line.encode())

    def flush(self, *, sync: bool = False) -> None:
        """All rows are in the file, and with `sync` on disk.

        Raises StorageError; the file then ends with a whole line, and the rows are kept for the next flush.
        """
        with self._guard, storage("append to", self.path):
            if self._rows:
                data = b"".join(self._rows)
                try:
                    _write_all(self._descriptor, memoryview(data))
                except OSError:
                    with suppress(OSError):
                        os.ftruncate(self._descriptor, self._length)
                    raise
                self._length += len(data)
                self._rows.clear()
            if sync:
                os.fsync(self._descriptor)

    def cut(self, length: int) -> None:
        """The file has at most `length` bytes, and rows not yet flushed are forgotten."""
        with self._guard, storage("cut", self.path):
            self._rows.clear()
            if length < self._length:  # never longer: that would fill it with zeros
                os.ftruncate(self._descriptor, length)
                self._length = length
                os.fsync(self._descriptor)

    def close(self) -> None:
        """All rows are in the file, and it is closed; a second close does nothing."""
        if self._descriptor < 0:
            return
        try:
            self.flush()
        finally:
            descriptor, self._descriptor = self._descriptor, -1
            with storage("close", self.path):
                os.close(descriptor)

    def __enter__(self) -> AppendLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Held(Exception):
    """Another process holds the lock; `note` is what it wrote into the file."""

    def __init__(self, note: str) -> None:
        super().__init__("another process holds the lock")
        self.note = note


class Lock:
    """The lock file `path`, held by this process until `release` or its end, with a note for those who find it held.

    It is a `flock`: the system gives it back even when the process is killed. Forked children (data workers) close
    their copy at once, so a worker that outlives its parent does not keep the run locked.
    Raises Held where another process has it, and StorageError where it cannot be had at all.
    """

    def __init__(self, path: Path, note: str) -> None:
        with storage("lock", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, 0)
                _write_all(descriptor, memoryview(note.encode()))
            except BlockingIOError:
                holder = os.read(descriptor, 4096).decode(errors="replace")
                os.close(descriptor)
                raise Held(holder) from None
            except OSError:
                os.close(descriptor)
                raise
        self._descriptor = descriptor
        _held_locks.add(descriptor)

    def release(self) -> None:
        """Others may take the lock; a second release does nothing, nor does one in a forked child."""
        if self._descriptor in _held_locks:
            _held_locks.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = -1


@contextmanager
def storage(action: str, path: Path) -> Iterator[None]:
    """What the system refuses inside is a StorageError that says what was tried, where, and why it failed."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot {action}: {in_words(error)}", where=str(path), fix=_fix(error)) from error


def in_words(error: OSError) -> str:
    """Return why the system refused, as a person would say it."""
    number = error.errno or 0
    reason = _WORDS.get(number) or error.strerror or str(error)
    return f"{reason} ({errno.errorcode[number]})" if number in errno.errorcode else reason


def _fix(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space there, then run the same command again: it resumes"
    return ""


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _mode(path: Path) -> int:
    """Return the type and permissions of what is at `path` itself, 0 where nothing is."""
    with storage("look at", path):
        try:
            return os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0


def _open_plain(path: Path) -> int:
    # O_NONBLOCK: opening a named pipe would otherwise wait for a writer for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "must be a regular file")
    return descriptor


def _end_of_last_line(descriptor: int, size: int) -> int:
    end = size
    while end:
        start = max(0, end - _BLOCK)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _forget_locks() -> None:
    for descriptor in _held_locks:
        with suppress(OSError):
            os.close(descriptor)
    _held_locks.clear()


_held_locks: set[int] = set()
os.register_at_fork(after_in_child=_forget_locks)

_BLOCK = 1 << 20  # bytes hashed, then written while they are still in the processor's cache
_WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.EIO: "the disk reports an error",
    errno.ELOOP: "it is a link, and links are not followed",
    errno.EEXIST: "it exists already",
    errno.ENOENT: "it does not exist",
    errno.EMFILE: "too many files are open; raise the limit with ulimit -n",
}
