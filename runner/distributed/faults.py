"""Propagate an error of one rank to all ranks before any of them blocks on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runner.base.errors import AccelRunError, RankLost
from runner.base.world import World


def caught(function: Callable[[], Any]) -> Exception | None:
    """Return what the function raised: it is raised again once the other ranks know."""
    try:
        function()
    except Exception as error:  # whatever it is, the others must hear of it
        return error
    return None


def raise_of_any(failure: Exception | None, world: World, where: str) -> None:
    """Raise this rank's failure, or RankLost with that of another one; all ranks must ask."""
    texts = world.gather(None if failure is None else described(failure))
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text is not None:
            raise RankLost(f"rank {rank} cannot go on: {text}", where=where)


def described(error: Exception) -> str:
    """Return an error in a line."""
    return str(error).splitlines()[0] if isinstance(error, AccelRunError) else f"{type(error).__name__}: {error}"
