"""Run a function in a process of its own that has one thread, so that it may fork and have mounts of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def apart(function: Callable[..., T], *arguments: object) -> T:
    """Return what `function`, which must be importable, returns in a process of its own; what it raises is raised.

    The process is a fork of one that has torch and the runner imported, and has done nothing else: a fresh one would
    import them for seconds.
    """
    context, usual = multiprocessing.get_context("forkserver"), multiprocessing.get_start_method()
    context.set_forkserver_preload(["torch._dynamo", "runner.engine.assemble", "tests.faults.kills"])
    with ProcessPoolExecutor(1, mp_context=context, initializer=_start_others, initargs=(usual,)) as pool:
        return pool.submit(function, *arguments).result()


def _start_others(method: str) -> None:
    """The children of this process start theirs by `method`, not as it was started itself."""
    multiprocessing.set_start_method(method, force=True)
