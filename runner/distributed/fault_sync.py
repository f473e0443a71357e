"""Propagate an error of one rank to all ranks before any of them blocks on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runner.base.errors import AccelRunError, RankLost
from runner.base.world import World


def catch_exception(function: Callable[[], Any]) -> Exception | None:
    """Return the exception that the function raises, or None; the caller passes it to `raise_on_all_ranks`."""
    try:
        function()
    except Exception as error:  # of any type: the other ranks must be informed
        return error
    return None


def raise_on_all_ranks(failure: Exception | None, world: World, where: str) -> None:
    """Raise this rank's failure, or RankLost with that of another rank; collective."""
    texts = world.gather(None if failure is None else format_error_line(failure))
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text is not None:
            raise RankLost(f"rank {rank} failed: {text}", where=where)


def format_error_line(error: Exception) -> str:
    """Format an error as one line."""
    return str(error).splitlines()[0] if isinstance(error, AccelRunError) else f"{type(error).__name__}: {error}"
