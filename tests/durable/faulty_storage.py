"""In-memory object storage that can inject faults, at `faulty://NAME`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

Fault = Callable[[str, str], None]  # function of (operation, path) that may raise


class FaultyStorage(MemoryFileSystem):
    """Record each read and write, and pass it to `fault`, which may raise an error.

    half     a write that fails stores the first half of the content
    changed  function of (path, content) that returns the content to store instead
    """

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    calls: ClassVar[list[tuple[str, str]]] = []
    fault: Fault = staticmethod(lambda operation, path: None)
    half = False
    changed: Callable[[str, bytes], bytes] = staticmethod(lambda path, data: data)

    @classmethod
    def reset(cls) -> None:
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.calls.clear()
        cls.fault = staticmethod(lambda operation, path: None)
        cls.half = False
        cls.changed = staticmethod(lambda path, data: data)

    def _record(self, operation: str, path: str) -> None:
        with _guard:
            self.calls.append((operation, path))
        type(self).fault(operation, path)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self._record("list", path)
        return super().ls(path, detail, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        self._record("info", path)
        return super().info(path, **kwargs)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "rb":
            self._record("read", path)
        return super().open(path, mode, **kwargs)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        data = type(self).changed(path, value)
        try:
            self._record("write", path)
        except Exception:
            if self.half:
                super().pipe_file(path, data[: len(data) // 2], mode, **kwargs)
            raise
        super().pipe_file(path, data, mode, **kwargs)

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def rm(self, path: str, *args: Any, **kwargs: Any) -> None:
        self._record("remove", path)
        super().rm(path, *args, **kwargs)


_guard = threading.Lock()
fsspec.register_implementation("faulty", FaultyStorage, clobber=True)
