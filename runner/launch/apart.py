"""A question answered in a process of its own, which leaves neither CUDA nor threads in the one that asks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

from runner.base.parent import die_with_parent

Answer = TypeVar("Answer")


def apart(function: Callable[..., Answer], *given: Any) -> Answer:
    """Return what the function returns in a forked process.

    Raises what it raises, and BrokenProcessPool where the process dies.
    """
    with ProcessPoolExecutor(1, get_context("fork"), initializer=_settle_in, initargs=(os.getpid(),)) as process:
        return process.submit(function, *given).result()


def _settle_in(parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to both, and one answer is enough
