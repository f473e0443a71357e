"""Private temporary folder that the processes of a command share; folders of killed commands are removed."""

from __future__ import annotations

import errno
import fcntl
import getpass
import multiprocessing.process
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_sharer
from pathlib import Path

from runner.base.errors import CannotCreate, Exit
from runner.base.paths import cache_folder
from runner.base.rank_env import patched_environment

PREFIX = "accelrun-"
_EXIT_CODES = {
    errno.EMFILE: Exit.SYSTEM, errno.ENFILE: Exit.SYSTEM, errno.EACCES: Exit.PERMISSION, errno.EPERM: Exit.PERMISSION,
}  # fmt: skip


@contextmanager
def private_folder() -> Iterator[Path]:
    """Create a private temporary folder (mode 0700) and remove it at the end; it holds the sockets of data workers.

    It is locked by this process and its forked children. If all of them were killed, the next command finds
    it unlocked and removes it. Raises CannotCreate.
    """
    _remove_stale()
    folder, lock = _create_locked()
    settings = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    before = settings.get("tempdir")
    # Inherited by data workers, forked or spawned: separate folders of killed workers would never be removed.
    settings["tempdir"] = str(folder)
    try:
        yield folder
    finally:
        settings["tempdir"] = before
        # Remove the socket through which spawned workers get tensors; at exit, its folder would no longer exist.
        with suppress(OSError, EOFError):
            resource_sharer.stop()
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def check_compile_cache(variable: str) -> None:
    """Create the folder that the environment variable names, if any; raise CannotCreate if it is not writable.

    Otherwise Inductor or Triton would fail in the first update, after minutes, with an unclear message.
    """
    folder = _given_cache(variable)
    if not folder:
        return
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        what = f"compiled code cannot be stored there: {error.strerror}"
        raise _cannot_create(error, what, f"{variable}={folder}", f"use another folder, or unset {variable}") from error


def _cannot_create(error: OSError, what: str, where: str, fix: str) -> CannotCreate:
    refusal = CannotCreate(what, where=where, fix=fix)
    refusal.exit_code = _EXIT_CODES.get(error.errno or 0, refusal.exit_code)
    return refusal


@contextmanager
def private_compile_cache() -> Iterator[None]:
    """Inside the context, Inductor and Triton cache compiled code in a folder of mode 0700.

    Inductor's default is /tmp/torchinductor_USER, and it executes the code that it finds there: any user who creates
    that folder first controls what code a run executes. A TORCHINDUCTOR_CACHE_DIR set by the user is not changed. The
    folder is temporary if a private one cannot be created.
    """
    names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    names = {variable: name for variable, name in names.items() if not _given_cache(variable)}
    folder = cache_folder().resolve() / "compiled"
    if names and not _create_private(folder):
        folder = (shared_folder() or _create_locked()[0]) / "compiled"
    with patched_environment({variable: str(folder / name) for variable, name in names.items()}):
        yield


def _given_cache(variable: str) -> str:
    """Return the folder that the user has set; empty if there is none.

    Importing torch._dynamo sets TORCHINDUCTOR_CACHE_DIR to torch's default, in this process or in the notebook that
    started it. The default is computed here, because torch._inductor, which knows it, imports torch._dynamo.
    """
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    default = Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))
    folder = os.environ.get(variable, "")
    return "" if Path(folder) == default else folder


def _create_private(folder: Path) -> bool:
    """Create the folder if needed, restrict its mode, and return whether only this user can write to it.

    The mode is set explicitly: Inductor creates folders with the umask, which may allow others to write.
    """
    try:
        if not _is_private(folder):
            return False
        for path in [path for path in (*reversed(folder.parents), folder) if not path.exists()]:
            with suppress(FileExistsError):  # a concurrent command created it
                path.mkdir(mode=0o700)
        # A user who may write to the parent could rename the folder and create another one under its name.
        if not (_is_private(folder) and _is_private(folder.parent)):
            return False
        folder.chmod(0o700)
    except OSError:  # full or read-only disk
        return False
    return True


def _is_private(folder: Path) -> bool:
    """Return whether only this user can write to the folder, or to its nearest existing parent."""
    for path in (folder, *folder.parents):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        except OSError:
            return False
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return False


def shared_folder() -> Path | None:
    """Return the private folder of the command that this process belongs to, if any."""
    folder = multiprocessing.process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    return Path(folder) if folder else None


def _parent_folder() -> str:
    """Return where to create the private folder: the system's temporary folder, or one with a path short enough.

    A socket path has at most 107 bytes (unix(7)); with a longer path, data workers hang.
    """
    default = tempfile.gettempdir()
    if len(os.fsencode(default)) + len(f"/{PREFIX}01234567/listener-01234567") <= 107:
        return default
    return next((place for place in ("/tmp", "/dev/shm") if os.access(place, os.W_OK | os.X_OK)), default)


def _create_locked() -> tuple[Path, int]:
    for _ in range(100):
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_parent_folder()))
        except OSError as error:
            what = f"the folder that the processes of a run share cannot be created: {error.strerror}"
            fix = "free some space there, or use another folder: TMPDIR=/path"
            raise _cannot_create(error, what, str(error.filename or _parent_folder()), fix) from error
        lock = _try_lock(folder)
        if lock is not None:
            return folder, lock
    raise CannotCreate(
        "the folder that the processes of a run share is removed repeatedly",
        where=str(folder),
        fix="stop the program that removes it, or use another folder: TMPDIR=/path",
    )


def _remove_stale() -> None:
    """Remove unlocked folders, whose owners were all killed."""
    with suppress(OSError):
        for folder in Path(_parent_folder()).glob(f"{PREFIX}*"):
            lock = _try_lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """Return a descriptor with the lock of our folder; None if another process holds it or the folder is gone."""
    descriptor = -1
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another start may have removed the folder between `open` and `flock`: the lock would then exclude no process.
        opened, current = os.fstat(descriptor), os.lstat(folder)
        is_ours = opened.st_uid == os.getuid() and stat.S_IMODE(opened.st_mode) == 0o700
        if is_ours and (opened.st_ino, opened.st_dev) == (current.st_ino, current.st_dev):
            return descriptor
    except OSError:
        pass
    if descriptor >= 0:
        os.close(descriptor)
    return None
