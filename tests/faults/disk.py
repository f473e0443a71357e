"""An ext4 file system of its own, on a disk in memory, whose power can be cut at any moment.

The disk is a memory file behind a loop device, mounted where only this process and its children see it: when they
end, however they end, nothing of it is left. A cut is the ioctl EXT4_IOC_SHUTDOWN with NOLOGFLUSH: what was not
committed and flushed is gone, as when the plug is pulled. Needs root, Linux and mkfs.ext4.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
NO_LOG_FLUSH = 2


class Disk:
    """The disk, mounted at `path` or not; made by `powered`."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self._descriptor = os.memfd_create("disk")
        self._num_bytes = num_bytes
        self._options = ""

    def format(self, options: str, block_size: int) -> None:
        """The disk holds an empty file system with these mount options and is mounted."""
        self.unmount()
        os.ftruncate(self._descriptor, 0)
        os.ftruncate(self._descriptor, self._num_bytes)
        self._options = options
        image = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        subprocess.run(["mkfs.ext4", "-q", "-F", "-b", str(block_size), image], check=True, capture_output=True)
        self.mount()

    def mount(self) -> None:
        """The file system is there again, its journal replayed."""
        number, loop = _attach(self._descriptor)
        try:
            _call("mount", f"/dev/loop{number}".encode(), bytes(self.path), b"ext4", 0, self._options.encode())
        finally:
            os.close(loop)  # it goes away with the mount

    def cut(self) -> None:
        """The power is gone: nothing reaches the disk any more, and what was not on it is lost."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def write_back(self) -> None:
        """What was written so far is on disk, as the kernel does by itself from time to time."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):
            _call("syncfs", descriptor)
        os.close(descriptor)

    def unmount(self) -> None:
        """The file system is not mounted."""
        if os.path.ismount(self.path):
            _call("umount2", bytes(self.path), 0)

    def close(self) -> None:
        """Nothing of the disk is left."""
        with suppress(OSError):
            _call("umount2", bytes(self.path), _MNT_DETACH)
        os.close(self._descriptor)


@contextmanager
def powered(path: Path, num_bytes: int = 64 << 20) -> Iterator[Disk]:
    """Give a disk to be formatted and mounted at the folder `path`, seen by this process and its children alone.

    The process stays in a mount namespace of its own, so this is for a process of its own.
    Raises OSError where the system does not let us.
    """
    if shutil.which("mkfs.ext4") is None:
        raise OSError(errno.ENOENT, "mkfs.ext4 is not installed")
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    disk = Disk(path, num_bytes)
    try:
        yield disk
    finally:
        disk.close()


def reason_against() -> str:
    """Return why no disk can be had here; empty where it can. For a fork of the fork server."""
    if os.geteuid() != 0:
        return "needs root for mount and loop devices"
    path = Path("/tmp") if Path("/tmp").is_dir() else Path("/")
    try:
        with powered(path) as disk:
            disk.format("", 4096)
            disk.cut()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no ext4 on a loop device here: {error}"
    return ""


def _attach(descriptor: int) -> tuple[int, int]:
    """Return the number of a loop device over the file, and a descriptor that keeps it until it is mounted."""
    for _ in range(100):
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
        finally:
            os.close(control)
        loop = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
        # struct loop_config: fd, block size, struct loop_info64 with nothing but its flags, eight reserved words
        info = struct.pack("5Q4I64s64s32s2Q", 0, 0, 0, 0, 0, 0, 0, 0, _LO_FLAGS_AUTOCLEAR, b"", b"", b"", 0, 0)
        try:
            fcntl.ioctl(loop, _LOOP_CONFIGURE, struct.pack("II", descriptor, 0) + info + bytes(64))
        except OSError as error:
            os.close(loop)
            if error.errno != errno.EBUSY:  # else another process was quicker
                raise
        else:
            return number, loop
    raise OSError(errno.EBUSY, "no loop device is free")


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
_MNT_DETACH = 2
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
