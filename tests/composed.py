"""Cache Hydra's compositions of the shipped files for the whole test run: composing takes half of a short run.

Results are cached in this process and its forks, and in a folder shared with all other processes. Files in a user's
folder (--config-dir) are read every time.
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

FOLDER = "COMPOSED_FOR_TESTS"  # environment variable


class Composed(MutableMapping[Any, Any]):
    """Caches compositions of the shipped files until the tests end, where `files_unchanged` caches them temporarily."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._kept: dict[Any, Any] = {}
        config_files._cache = self  # lint-tests: private: the public files_unchanged caches only inside its context

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, tuple) or key[-1] is not None:  # a user's folder
            return False
        if (key, shipped_path("conf")) not in self._kept:
            # If the file cannot be read, compose: the process may lack descriptors or memory, or run as another user.
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
