"""Folders that are pinned: what is named below one is found from the folder itself, through no link.

Between a look at a path and its use somebody else may put a link in the place of a folder on the way. A run's folder
is opened once; everything below is opened from there, one name at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_pinned: dict[Path, int] = {}


def pin(folder: Path) -> None:
    """Names below `folder` are found from the folder that has this path now. Raises OSError, for a link too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    unpin(folder)
    _pinned[folder] = descriptor


def unpin(folder: Path) -> None:
    """The folder is found by its path again; one that is not pinned stays so."""
    descriptor = _pinned.pop(folder, None)
    if descriptor is not None:
        with suppress(OSError):
            os.close(descriptor)


def unpin_all() -> None:
    """Every folder is found by its path again, as after the end of the process."""
    for folder in [*_pinned]:
        unpin(folder)


def place_of(folder: Path) -> Path | None:
    """Return where a pinned folder is now: it may have been moved. None where it was deleted.

    Where the system does not tell (no /proc), it is `folder`.
    """
    descriptor = _pinned[folder]
    found = os.fstat(descriptor)
    if found.st_nlink == 0:
        return None
    with suppress(OSError):
        there = folder.stat(follow_symlinks=False)
        if (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino):
            return folder
    with suppress(OSError):
        return Path(f"/proc/self/fd/{descriptor}").readlink()
    return folder


@contextmanager
def beside(path: Path) -> Iterator[tuple[int | None, Path | str]]:
    """Give (descriptor of the folder, name in it) for calls that take `dir_fd`; (None, path) outside of what is pinned.

    A pinned folder itself is "." in itself, so that it is found where it was moved to.
    Raises OSError where a folder between the pinned one and the name is a link, or not there.
    """
    if path in _pinned:
        yield _pinned[path], "."
        return
    root = next((parent for parent in path.parents if parent in _pinned), None)
    if root is None:
        yield None, path
        return
    descriptor, opened = _pinned[root], -1
    try:
        for part in path.relative_to(root).parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
            if opened >= 0:
                os.close(opened)
            descriptor = opened = inner
        yield descriptor, path.name
    finally:
        if opened >= 0:
            os.close(opened)
