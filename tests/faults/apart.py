"""Run a function in a fresh process that has one thread, so that it may fork and have mounts of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def apart(function: Callable[..., T], *arguments: object) -> T:
    """Return what `function`, which must be importable, returns in a process of its own; what it raises is raised."""
    context, usual = multiprocessing.get_context("spawn"), multiprocessing.get_start_method()
    with ProcessPoolExecutor(1, mp_context=context, initializer=_start_others, initargs=(usual,)) as pool:
        return pool.submit(function, *arguments).result()


def _start_others(method: str) -> None:
    """The children of this process start theirs by `method`, not as it was started itself."""
    multiprocessing.set_start_method(method, force=True)
