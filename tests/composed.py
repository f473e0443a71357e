"""Cache Hydra's compositions of the shipped files for the whole test run: composing takes half of a short run.

Results are cached in this process and its forks, and in a folder shared with all other processes. Compositions that
include files of a user's folder (--config-dir) are looked up by the content of that folder.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
import stat
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from runner.base.paths import shipped_path
from runner.config import config_files

FOLDER = "COMPOSED_FOR_TESTS"  # environment variable
MOST_FILES, MOST_BYTES = 20, 1 << 14  # limits of a user's folder whose compositions are cached


class Composed(MutableMapping[Any, Any]):
    """Caches compositions of the shipped files until the tests end; `files_unchanged` caches them only temporarily."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._kept: dict[Any, Any] = {}
        config_files._cache = self  # lint-tests: private: the public files_unchanged caches only inside its context

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, tuple):
            return False
        if (found := _by_content(key)) is None:
            return False
        if found not in self._kept:
            # If the file cannot be read, compose: the process may lack descriptors or memory, or run as another user.
            with suppress(Exception):
                self._kept[found] = pickle.loads(self._file(found).read_bytes())
        return found in self._kept

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        return self._kept[_by_content(key)]

    def __setitem__(self, key: tuple[Any, ...], made: Any) -> None:
        found = _by_content(key)
        self._kept[found] = made
        if found is not None and self.folder is not None:
            file = self._file(found)
            with suppress(Exception):
                written = file.with_suffix(f".{os.getpid()}")
                written.write_bytes(pickle.dumps(made))
                written.rename(file)

    def __delitem__(self, key: tuple[Any, ...]) -> None:
        del self._kept[_by_content(key)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    @contextmanager
    def unshared(self) -> Iterator[None]:
        """Neither read nor write cache files inside the context."""
        folder, self.folder = self.folder, None
        try:
            yield
        finally:
            self.folder = folder

    def _file(self, key: tuple[Any, ...]) -> Path:
        assert self.folder is not None
        return self.folder / hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()


def _by_content(key: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Replace the user's folder, the last part of a key, by its content; None unless it has a few small files."""
    *parts, folder = key
    shipped = str(shipped_path("conf"))
    if folder is None:
        return *parts, shipped
    if parts[0] == "file":  # reading one file is cheaper than reading all of them
        return None
    with suppress(OSError):
        inside = list(itertools.islice(folder.rglob("*"), MOST_FILES + 1))
        files = [path for path in inside if not path.is_dir()]
        if len(inside) <= MOST_FILES and all(map(_is_small, files)):
            return *parts, shipped, *sorted((str(file.relative_to(folder)), file.read_bytes()) for file in files)
    return None


def _is_small(file: Path) -> bool:
    state = file.lstat()
    return stat.S_ISREG(state.st_mode) and state.st_size <= MOST_BYTES


@cache
def composed() -> Composed:
    """Return the cache of this process; the first call installs it."""
    folder = os.environ.get(FOLDER)
    return Composed(Path(folder) if folder else None)


@contextmanager
def folder_for_all() -> Iterator[None]:
    """Share results with processes started inside the context; an environment variable names the folder."""
    if FOLDER in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="composed-") as name:
        os.environ[FOLDER] = name
        try:
            yield
        finally:
            del os.environ[FOLDER]
