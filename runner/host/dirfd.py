"""Access a folder through an open directory descriptor (dirfd), so that symbolic links below it are not followed.

Between the check of a path and its use, another process may replace a folder along the path with a symbolic link. A
run's folder is therefore opened once, and everything below it relative to that descriptor, one name at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_pinned: dict[Path, int] = {}


def pin(folder: Path) -> None:
    """Open `folder`, to resolve names below it relative to its descriptor. Raises OSError if it is a symbolic link."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    unpin(folder)
    _pinned[folder] = descriptor


def unpin(folder: Path) -> None:
    """Close the descriptor of a folder, which is then resolved by its path; a no-op if it is not pinned."""
    descriptor = _pinned.pop(folder, None)
    if descriptor is not None:
        with suppress(OSError):
            os.close(descriptor)


def unpin_all() -> None:
    """Unpin every folder."""
    for folder in [*_pinned]:
        unpin(folder)


def current_path(folder: Path) -> Path | None:
    """Return the current path of a pinned folder, which may have been moved, or None if it was deleted.

    Returns `folder` if /proc is missing.
    """
    descriptor = _pinned[folder]
    pinned = os.fstat(descriptor)
    if pinned.st_nlink == 0:
        return None
    with suppress(OSError):
        current = folder.stat(follow_symlinks=False)
        if (current.st_dev, current.st_ino) == (pinned.st_dev, pinned.st_ino):
            return folder
    with suppress(OSError):
        return Path(f"/proc/self/fd/{descriptor}").readlink()
    return folder


@contextmanager
def open_parent(path: Path) -> Iterator[tuple[int | None, Path | str]]:
    """Yield (directory descriptor, name) for calls that take `dir_fd`; (None, path) outside of pinned folders.

    The path of a pinned folder itself is yielded as ".", so that the folder is found after a move.
    Raises OSError if a folder between the pinned one and the name is missing or a symbolic link.
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
