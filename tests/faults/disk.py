"""A private ext4 file system in memory, whose power can be cut at any time.

The disk is a memory file behind a loop device, mounted in a private mount namespace: it disappears with the process and
its children. A power cut is the ioctl EXT4_IOC_SHUTDOWN with NOLOGFLUSH: everything not committed and flushed is lost.
Needs root, Linux and mkfs.ext4.
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
    """The disk, which may be mounted at `path`; create it with `power_on`."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self._descriptor = os.memfd_create("disk")
        self._num_bytes = num_bytes
        self._options = ""

    def format(self, options: str, block_size: int) -> None:
        """Create an empty file system with these mount options and mount it."""
        self.unmount()
        os.ftruncate(self._descriptor, 0)
        os.ftruncate(self._descriptor, self._num_bytes)
        self._options = options
        image = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        subprocess.run(["mkfs.ext4", "-q", "-F", "-b", str(block_size), image], check=True, capture_output=True)
        self.mount()

    def mount(self) -> None:
        """Mount the file system; the kernel replays its journal."""
        number, loop = _attach(self._descriptor)
        try:
            _call("mount", f"/dev/loop{number}".encode(), bytes(self.path), b"ext4", 0, self._options.encode())
        finally:
            os.close(loop)  # released at unmount

    def cut(self) -> None:
        """Cut the power: nothing reaches the disk any more, and data that were not on it are lost."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def write_back(self) -> None:
        """Write dirty pages to disk, as the kernel does from time to time."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):
            _call("syncfs", descriptor)
        os.close(descriptor)

    def unmount(self) -> None:
        """Unmount the file system if it is mounted."""
        if os.path.ismount(self.path):
            _call("umount2", bytes(self.path), 0)

    def close(self) -> None:
        """Unmount and release the disk."""
        with suppress(OSError):
            _call("umount2", bytes(self.path), _MNT_DETACH)
        os.close(self._descriptor)


@contextmanager
def power_on(path: Path, num_bytes: int = 64 << 20) -> Iterator[Disk]:
    """Yield a disk to format and mount at the folder `path`, visible only to this process and its children.

    Call it in a subprocess, because the process stays in a separate mount namespace.
    Raises OSError if the system does not permit it.
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


def reason_to_skip() -> str:
    """Return why the disk cannot be used on this machine, or "" if it can. Call this in a fork of the fork server."""
    if os.geteuid() != 0:
        return "needs root for mount and loop devices"
    path = Path("/tmp") if Path("/tmp").is_dir() else Path("/")
    try:
        with power_on(path) as disk:
            disk.format("", 4096)
            disk.cut()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no ext4 on a loop device here: {error}"
    return ""


def _attach(descriptor: int) -> tuple[int, int]:
    """Attach a loop device to the file; return its number and a descriptor that keeps it until it is mounted."""
    for _ in range(100):
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
        finally:
            os.close(control)
        loop = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
        # struct loop_config: fd, block size, struct loop_info64 with only its flags set, eight reserved words
        info = struct.pack("5Q4I64s64s32s2Q", 0, 0, 0, 0, 0, 0, 0, 0, _LO_FLAGS_AUTOCLEAR, b"", b"", b"", 0, 0)
        try:
            fcntl.ioctl(loop, _LOOP_CONFIGURE, struct.pack("II", descriptor, 0) + info + bytes(64))
        except OSError as error:
            os.close(loop)
            if error.errno != errno.EBUSY:  # EBUSY: another process was faster
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
