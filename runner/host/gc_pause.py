"""Pause Python's garbage collection while modules are imported and a run is constructed.

Imported objects live forever: collection would take a quarter of the 2.5 s that importing torch needs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_is_paused = False  # also in processes forked during the pause


@contextmanager
def paused_collection() -> Iterator[None]:
    """Disable garbage collection until `end_pause` or the end of the context, whichever is first."""
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
    """Enable garbage collection if `paused_collection` has disabled it; long-running code calls it once it is ready."""
    global _is_paused
    if _is_paused:
        _is_paused = False
        gc.enable()
