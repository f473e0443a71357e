"""The folder that the processes of a start share beside the run directory; what a crash leaves, the next removes."""

from __future__ import annotations

import fcntl
import multiprocessing.process
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runner.base.errors import CannotCreate

PREFIX = "accelrun-"


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that is readable by its owner alone, gone at the end; the sockets of data workers lie in it.

    It is locked by this process and those that are forked from it. Where all of them were killed, the next start finds
    it without a lock and removes it. Raises CannotCreate.
    """
    _sweep()
    folder, lock = _made()
    settings = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    before = settings.get("tempdir")
    settings["tempdir"] = str(folder)  # inherited by data workers, forked or spawned; no finalizer runs in the killed
    try:
        yield folder
    finally:
        settings["tempdir"] = before
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def shared_folder() -> Path | None:
    """Return the private folder of the start that this process belongs to, if there is one."""
    found = multiprocessing.process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    return Path(found) if found else None


def _place() -> str:
    """Return where the folder lies: where temporary files do, or else where the sockets in it can be named.

    The name of a socket has 107 bytes at most (unix(7)); with a longer one data workers wait for ever.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) + len(f"/{PREFIX}01234567/listener-01234567") <= 107:
        return usual
    return next((place for place in ("/tmp", "/dev/shm") if os.access(place, os.W_OK | os.X_OK)), usual)


def _made() -> tuple[Path, int]:
    """Return a new folder and the descriptor that holds its lock."""
    for _ in range(100):
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_place()))
        except OSError as error:
            raise CannotCreate(
                f"the folder that the processes of a run share cannot be made: {error.strerror}",
                where=error.filename or _place(),
                fix="make room there, or name another place: TMPDIR=/path",
            ) from error
        lock = _locked(folder)
        if lock is not None:
            return folder, lock
    raise CannotCreate(
        "the folder that the processes of a run share is removed again and again",
        where=str(folder),
        fix="end what clears that place, or name another one: TMPDIR=/path",
    )


def _sweep() -> None:
    """Remove the folders whose owners were all killed."""
    with suppress(OSError):
        for folder in Path(_place()).glob(f"{PREFIX}*"):
            lock = _locked(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _locked(folder: Path) -> int | None:
    """Return a descriptor that holds the lock of our folder; None where another process has it, or it is gone."""
    descriptor = -1
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours, there = os.fstat(descriptor), os.lstat(folder)
        is_ours = ours.st_uid == os.getuid() and stat.S_IMODE(ours.st_mode) == 0o700
        if is_ours and (ours.st_ino, ours.st_dev) == (there.st_ino, there.st_dev):
            return descriptor
    except OSError:
        pass
    if descriptor >= 0:
        os.close(descriptor)
    return None
