"""Detect that ranks call a model different numbers of times.

Each call of the model runs collectives, so a rank that calls it more often than the others would wait for them forever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from runner.base.errors import RankLost
from runner.distributed.agreement import format_error_line
from runner.distributed.world import World


class UnmatchedCalls(RankLost):
    """A rank returned or raised an exception while another one called the model.

    On a rank that raised an exception, it is the `__cause__` of this error.
    """


@contextmanager
def matched_calls(model: nn.Module, world: World) -> Iterator[None]:
    """Raise UnmatchedCalls on every rank, unless all make the same number of calls and then all return or all fail.

    Without this check, the other ranks would wait inside the model for a rank that does not call it. An exception that
    all ranks raise after the same number of calls is passed on unchanged.
    """

    def compare(action: str) -> None:
        actions = world.gather(action)
        if len(set(map(_kind, actions))) > 1:
            for rank, of_rank in enumerate(actions):
                if _kind(of_rank) == _FAILS:
                    raise UnmatchedCalls(f"rank {world.global_rank(rank)} {of_rank}")
            other = next(of_rank for of_rank in actions if of_rank != actions[0])
            what = f"rank {world.global_rank(0)} {actions[0]} while another rank {other}"
            raise UnmatchedCalls(what, fix="call model(...) the same number of times on all ranks")

    def on_call(*_: Any) -> None:
        compare(_CALLS)

    handle = model.register_forward_pre_hook(on_call)
    try:
        yield
    except UnmatchedCalls:
        raise
    except Exception as error:
        try:
            compare(f"{_FAILS}: {format_error_line(error)}")
        except UnmatchedCalls as unmatched:
            raise unmatched from error
        raise
    else:
        compare(_RETURNS)
    finally:
        handle.remove()


_CALLS, _RETURNS, _FAILS = "calls the model", "returns", "failed"


def _kind(action: str) -> str:
    return action.partition(":")[0]
