"""Where a process stands among the processes that train together, before any of them has joined the others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """One rank of a run.

    rank             number among all ranks; 0 writes and speaks
    local_rank       number among the ranks of this machine
    store            where the ranks meet: file:///path for one machine, tcp://host:port for several; empty: alone
    attempt          how often the ranks were started before; those of another attempt must not be met
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    num_local_ranks: int = 1
    store: str = ""
    attempt: int = 0
