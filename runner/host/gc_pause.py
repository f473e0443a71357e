"""Pause Python's garbage collection while modules are imported and a run is constructed.

Imported objects are never freed, and collection would take a quarter of the 2.5 s of importing torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_is_paused = False  # inherited by processes that are forked during the pause


@contextmanager
def paused_collection() -> Iterator[None]:
    """Disable garbage collection until `end_pause` is called or the context ends, whichever is first."""
    global _is_paused
    if not gc.isenabled():  # already disabled by the user or an outer context
        yield
        return
    _is_paused = True
    gc.disable()
    try:
        yield
    finally:
        end_pause()


def end_pause() -> None:
    """Enable garbage collection if `paused_collection` disabled it. Long-running code calls this after its setup."""
    global _is_paused
    if _is_paused:
        _is_paused = False
        gc.enable()
