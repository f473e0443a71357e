"""Convert errors of the operating system into errors with the action, the path and what to do."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runner.base.errors import Exit, StorageError


@contextmanager
def storage_errors(action: str, path: Path) -> Iterator[None]:
    """Convert an OSError into a StorageError with the action, the path and the reason."""
    try:
        yield
    except OSError as error:
        out_of_inodes = error.errno == errno.ENOSPC and _has_no_inodes(path)
        reason, fix = (_NO_INODES, _REMOVE_FILES) if out_of_inodes else (describe_os_error(error), _suggest_fix(error))
        storage_error = StorageError(f"cannot {action}: {reason}", where=str(path), fix=fix)
        storage_error.exit_code = _EXIT_CODES.get(error.errno or 0, storage_error.exit_code)
        raise storage_error from error
    finally:
        count_call()


def completed_calls(thread: int) -> int:
    """Return the number of system calls that have returned in this thread (`ident`), to detect a hang."""
    return _call_counts.get(thread, 0)


def count_call() -> None:
    """Count a system call that has returned in this thread; see `completed_calls`."""
    thread = threading.get_ident()
    _call_counts[thread] = _call_counts.get(thread, 0) + 1


def describe_os_error(error: OSError) -> str:
    """Describe a system error for users."""
    number = error.errno or 0
    reason = _REASONS.get(number) or error.strerror or str(error)
    return f"{reason} ({errno.errorcode[number]})" if number in errno.errorcode else reason


def _has_no_inodes(path: Path) -> bool:
    """Return whether a write failed for lack of inodes: ENOSPC may mean that, although `df` shows free space.

    Some file systems (btrfs, many network mounts) have no fixed number of inodes and report 0 in total.
    """
    with suppress(OSError):
        folder = next((parent for parent in (path, *path.parents) if parent.is_dir()), None)
        if folder is not None:
            status = os.statvfs(folder)
            return status.f_files > 0 and status.f_favail == 0 and status.f_bavail > 0
    return False


def _suggest_fix(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space there, then run the same command again: it resumes"
    if error.errno == errno.EMFILE:
        return "raise the limit with ulimit -n, then run the same command again"
    return ""


_call_counts: dict[int, int] = {}
_NO_INODES = "the file system has free space but no free inodes (ENOSPC)"
_REMOVE_FILES = "remove files there (df -i shows how many it may hold), then run the same command again: it resumes"
_EXIT_CODES = {errno.EMFILE: Exit.SYSTEM, errno.ENFILE: Exit.SYSTEM, errno.ENOMEM: Exit.HOST_MEMORY}  # not disk errors
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is exceeded",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.EIO: "the disk reports an error",
    errno.ELOOP: "it is a link, and links are not followed",
    errno.EEXIST: "it already exists",
    errno.ENOENT: "it does not exist",
    errno.EMFILE: "too many files are open",
}
