"""A question answered in a process of its own, which leaves neither CUDA nor threads in the one that asks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def apart(function: Callable[..., Answer], *given: Any) -> Answer:
    """Return what the function returns in a forked process.

    Raises what it raises, and BrokenProcessPool where the process dies.
    """
    ignoring = (signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to both, and one answer is enough
    with ProcessPoolExecutor(1, get_context("fork"), initializer=signal.signal, initargs=ignoring) as process:
        return process.submit(function, *given).result()
