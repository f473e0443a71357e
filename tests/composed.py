"""Hydra composes the same groups of the shipped files once in a run of the tests: it takes half of a short run.

Results are kept in this process and its forks, and in a folder for all other processes. Files of a user's folder
(--config-dir) are read each time.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from runner.base.paths import shipped_path
from runner.config import config_files

FOLDER = "COMPOSED_FOR_TESTS"  # name in the environment


class Composed(MutableMapping[Any, Any]):
    """Keeps the results of the shipped files until the tests end, as `files_unchanged` does for a while."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._kept: dict[Any, Any] = {}
        config_files._cache = self  # lint-tests: private: files_unchanged, the seam that the product has, ends

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, tuple) or key[-1] is not None:  # a folder of a user
            return False
        if (key, shipped_path("conf")) not in self._kept:
            # Any failure to read means composing: a process may have no descriptor, no memory or another user left.
            with suppress(Exception):
                self._kept[key, shipped_path("conf")] = pickle.loads(self._file(key).read_bytes())
        return (key, shipped_path("conf")) in self._kept

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        return self._kept[key, shipped_path("conf")]

    def __setitem__(self, key: tuple[Any, ...], made: Any) -> None:
        self._kept[key, shipped_path("conf")] = made
        if key[-1] is None and self.folder is not None:
            file = self._file(key)
            with suppress(Exception):
                written = file.with_suffix(f".{os.getpid()}")
                written.write_bytes(pickle.dumps(made))
                written.rename(file)

    def __delitem__(self, key: tuple[Any, ...]) -> None:
        del self._kept[key, shipped_path("conf")]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def _file(self, key: tuple[Any, ...]) -> Path:
        assert self.folder is not None
        name = repr((key, str(shipped_path("conf"))))
        return self.folder / hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


@cache
def composed() -> Composed:
    """Return what is composed in this process; from the first call on it is kept."""
    folder = os.environ.get(FOLDER)
    return Composed(Path(folder) if folder else None)


@contextmanager
def folder_for_all() -> Iterator[None]:
    """Share results between processes that start inside; they find the folder in their environment."""
    if FOLDER in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="composed-") as name:
        os.environ[FOLDER] = name
        try:
            yield
        finally:
            del os.environ[FOLDER]
