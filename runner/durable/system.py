"""All system calls that modify the files and folders of a run.

Tests replace them to record each call, to inject failures, or to enumerate the states that a crash may leave.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from runner.host.dirfd import open_parent


class System:
    """The system calls. Each method is one call, and raises the OSError of that call.

    Below the folder of an open run no link is followed: see runner/host/dirfd.py.
    """

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Return a descriptor of the file or folder `path`; `os.O_CREAT` in `flags` creates a missing file."""
        with open_parent(path) as (folder, name):
            return os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=folder)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write to a descriptor; return the number of bytes written."""
        return os.write(descriptor, data)

    def begin_write_back(self, descriptor: int, start: int, length: int) -> None:
        """Start asynchronous write-back of these bytes of the file; only a hint."""
        # Linux starts to write dirty pages on this advice. Python has no sync_file_range, which is the direct call.
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)

    def truncate(self, descriptor: int, length: int) -> None:
        """Truncate the file to `length` bytes."""
        os.ftruncate(descriptor, length)

    def fsync(self, descriptor: int) -> None:
        """Sync the content of the file, or the names in the folder, to disk."""
        os.fsync(descriptor)

    def sync_file_system(self, descriptor: int) -> None:
        """Sync all files of the descriptor's file system. Raises OSError if there is no such call.

        Calls syncfs(2) of Linux, which Python does not expose; it reports write errors since Linux 5.8.
        """
        syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
        if syncfs is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        if syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self, descriptor: int) -> None:
        """Close the descriptor."""
        os.close(descriptor)

    def mkdir(self, path: Path) -> None:
        """Create the folder `path` with mode 0700. Raises FileExistsError if the name exists."""
        with open_parent(path) as (folder, name):
            os.mkdir(name, 0o700, dir_fd=folder)

    def rename(self, source: Path, target: Path) -> None:
        """Rename `source` to `target`, replacing a file of that name."""
        with open_parent(source) as (before, name), open_parent(target) as (after, other):
            os.rename(name, other, src_dir_fd=before, dst_dir_fd=after)

    def unlink(self, path: Path) -> None:
        """Remove the file or link."""
        with open_parent(path) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def rmdir(self, path: Path) -> None:
        """Remove the empty folder."""
        with open_parent(path) as (folder, name):
            os.rmdir(name, dir_fd=folder)
