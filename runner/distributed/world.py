"""The world: processes that train together; a single process is a world of size 1, not a special case."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runner.base.accelerator import widest_dtype

TIMEOUT_S = 600.0  # s: timeout of collectives


@dataclass(frozen=True)
class World:
    """Rank, size and device of this process, and the collectives that the engine needs.

    heartbeat_folder  folder for heartbeats of ranks started by our own launcher; None: started by another launcher
    group             process group, if this world consists of only some of the processes; None: all processes
    global_ranks      number of each rank among all processes, if this world has only some of them
    num_sharing      number of ranks, including this one, that share its CPU cores; None: all ranks of this machine
    timeout_s        timeout of collectives; it is also passed to new groups of ranks, which do not inherit it

    All ranks must call the collectives, in the same order. In a world of size 1 they communicate nothing. Ranks in
    arguments are ranks of this world.
    """

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    num_local_ranks: int = 1
    heartbeat_folder: Path | None = None
    group: Any = None
    global_ranks: Sequence[int] = ()
    num_sharing: int | None = None
    timeout_s: float = TIMEOUT_S

    @property
    def is_supervised(self) -> bool:
        """True if the launcher restarts the run with the remaining ranks when a rank exits."""
        return self.heartbeat_folder is not None

    @property
    def is_simulated(self) -> bool:
        """True if the other ranks do not exist; see runner.distributed.join."""
        return False

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes files and prints if the world consists of all processes."""
        return self.rank == 0

    def global_rank(self, rank: int) -> int:
        """Return the number of a rank among all processes, for messages."""
        return self.global_ranks[rank] if self.global_ranks else rank

    @property
    def machine_name(self) -> str:
        """`rank8` if rank 8 is the first rank of a machine without rank 0; empty on all other ranks."""
        return f"rank{self.rank}" if self.local_rank == 0 and not self.is_first else ""

    @property
    def widest(self) -> torch.dtype:
        """float64, or float32 if the device lacks it: the dtype for sums and counts."""
        return widest_dtype(self.device)

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros on this world's device, in its widest dtype."""
        return torch.zeros(shape, dtype=self.widest, device=self.device)

    def synchronize(self) -> None:
        """Wait until the device has completed all submitted work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def sum(self, tensor: Tensor) -> Tensor:
        """All-reduce the tensor in place (sum); return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def sum_async(self, tensor: Tensor) -> Any:
        """Start an all-reduce of the tensor in place (sum); call `wait()` on the result."""
        assert self.world_size > 1, "needs several ranks"
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def max(self, tensor: Tensor) -> Tensor:
        """All-reduce the tensor in place (maximum); return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def broadcast_tensor(self, tensor: Tensor, source: int = 0) -> None:
        """Copy the tensor of rank `source` into the tensor of every rank, which must have its shape and dtype."""
        if self.world_size > 1:
            dist.broadcast(tensor, group=self.group, group_src=source)

    def gather(self, value: Any) -> list[Any]:
        """All-gather a JSON-serializable value; return the list in rank order."""
        if self.world_size == 1:
            return [value]
        mine = _encode(value)
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(mine)
        dist.all_reduce(sizes, group=self.group)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(mine)] = mine
        rows = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(rows, padded, group=self.group)
        return [_decode(row[:size]) for row, size in zip(rows, sizes.tolist(), strict=True)]

    def gather_on_first(self, value: Any) -> list[Any]:
        """Gather a JSON-serializable value on rank 0; return the list in rank order there, and [] on other ranks.

        With n ranks, only rank 0 receives n values. With `gather`, every rank receives them, n * n in total.
        """
        if self.world_size == 1:
            return [value]
        mine = _encode(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)] if self.is_first else None
        dist.gather(torch.tensor([len(mine)]), sizes, group=self.group, group_dst=0)
        longest = self.max(torch.tensor([len(mine)]))
        padded = torch.zeros(int(longest), dtype=torch.uint8)
        padded[: len(mine)] = mine
        rows = [torch.empty_like(padded) for _ in range(self.world_size)] if self.is_first else None
        dist.gather(padded, rows, group=self.group, group_dst=0)
        return [_decode(row[: int(size)]) for row, size in zip(rows or (), sizes or (), strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Broadcast the JSON-serializable value of rank 0; the arguments of other ranks are ignored."""
        if self.world_size == 1:
            return value
        mine = _encode(value if self.is_first else None)
        size = torch.tensor([len(mine)])
        self.broadcast_tensor(size)
        content = mine if self.is_first else torch.empty(int(size), dtype=torch.uint8)
        self.broadcast_tensor(content)
        return _decode(content)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        if self.world_size == 1:
            return flag
        return bool(self.max(torch.tensor([int(flag)])).item())


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(content: Tensor) -> Any:
    return json.loads(content.numpy().tobytes())
