"""All system calls that modify the files and folders of a run.

Tests replace them to record each call, to inject failures, or to enumerate the states that a crash may leave.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from pathlib import Path

from runner.base.pinned import beside


class System:
    """The real one. Every method is one call, and raises the OSError of that call.

    Below the folder of an open run no link is followed: see runner/base/pinned.py.
    """

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Return a descriptor of the file or folder `path`, which `os.O_CREAT` may make."""
        with beside(path) as (folder, name):
            return os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=folder)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Return how many of the bytes were taken."""
        return os.write(descriptor, data)

    def begin_write_back(self, descriptor: int, start: int, length: int) -> None:
        """The disk begins with these bytes of the file; nothing is promised, and nothing is waited for."""
        if hasattr(os, "posix_fadvise"):  # macOS has none
            os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)

    def truncate(self, descriptor: int, length: int) -> None:
        """The file has `length` bytes."""
        os.ftruncate(descriptor, length)

    def fsync(self, descriptor: int) -> None:
        """The content of the file, or the names in the folder, are on disk."""
        if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: its fsync leaves them in the memory of the drive
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)

    def sync_file_system(self, descriptor: int) -> None:
        """All files of the descriptor's file system are on disk. Raises OSError where there is no such call.

        syncfs(2) of Linux, which Python does not have; since Linux 5.8 it reports errors of writing.
        """
        syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
        if syncfs is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        if syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self, descriptor: int) -> None:
        """The descriptor is given back."""
        os.close(descriptor)

    def mkdir(self, path: Path) -> None:
        """The folder `path` is there, 0700. Raises FileExistsError where the name is taken."""
        with beside(path) as (folder, name):
            os.mkdir(name, 0o700, dir_fd=folder)

    def rename(self, source: Path, target: Path) -> None:
        """`source` is called `target`, in the place of a file of that name."""
        with beside(source) as (before, name), beside(target) as (after, other):
            os.rename(name, other, src_dir_fd=before, dst_dir_fd=after)

    def unlink(self, path: Path) -> None:
        """The file or link is gone."""
        with beside(path) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def rmdir(self, path: Path) -> None:
        """The empty folder is gone."""
        with beside(path) as (folder, name):
            os.rmdir(name, dir_fd=folder)
