"""Initialize and destroy torch's process groups."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.utils._python_dispatch import TorchDispatchMode

from runner.base.accelerator import accelerator_of
from runner.base.errors import SystemLimit
from runner.base.ranks import Member
from runner.base.world import World
from runner.distributed.interface import choose_interface
from runner.distributed.patience import within

MEETING_S = 120.0  # ranks that were not all there after that, and half a second for each, are not coming
ABORT_S = 10.0  # for aborting the kernels of a process group
TIMEOUT_S = 600.0  # a collective that takes longer is taken for a hang


@contextmanager
def joined(member: Member, device: torch.device, *, timeout_s: float = TIMEOUT_S) -> Iterator[World]:
    """The world of `member`, whose ranks have found each other; they part at the end.

    CPU tensors go through gloo, those of a GPU through NCCL. In an error the group is left, not destroyed.
    Raises SystemLimit where they cannot meet.
    """
    is_ours = member.store.startswith("file:")  # our own launcher's; others end all when one leaves
    folder = Path(member.store.removeprefix("file://")).parent if is_ours else None
    world = World(device, member.rank, member.local_rank, member.world_size, member.num_local_ranks, folder)
    accelerator_of(device).activate()  # what does not name a device must not start the first GPU
    if member.world_size == 1:
        yield world
        return
    choose_interface(member)
    try:
        if member.store.startswith("file:"):
            _meet(member, device, timeout_s)
        else:  # a port may be anybody's
            within(_meeting_s(member, timeout_s) + 5.0, lambda: _meet(member, device, timeout_s))
    except (RuntimeError, OSError) as error:
        raise SystemLimit(
            f"rank {member.rank} of {member.world_size} cannot meet the others: {str(error).splitlines()[0]}",
            where=member.store,
            fix="see that every rank was started, and that the port is free: MASTER_PORT=29501",
        ) from error
    try:
        yield world
    except BaseException:
        _leave(is_ours=is_ours)
        raise
    gc.collect()  # whatever still holds the group must let go of it before it ends
    dist.destroy_process_group()


def _leave(*, is_ours: bool) -> None:
    """Leave the process group in an error, while other ranks may be inside a collective that this one never joins.

    Destroying an NCCL group waits for the kernels of such collectives until their timeout, and the cause would be lost.
    A rank of our own launcher reports and ends by os._exit; the process of torchrun or srun first aborts its kernels.
    """
    if not is_ours:
        with suppress(Exception):
            within(ABORT_S, dist.distributed_c10d._abort_process_group)


@contextmanager
def imagined(rank: int, world_size: int) -> Iterator[World]:
    """The world of a rank whose others are not there, on the CPU: what is sent is lost, whole numbers received are 1.

    For following what a rank makes without content. All ranks are taken to say what this one does.
    """
    import torch.distributed._tools.fake_collectives  # what collectives return for tensors without content
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with _Agreeing():  # type: ignore[no-untyped-call]
            yield _Imagined(torch.device("cpu"), rank, rank, world_size, world_size)
    finally:
        gc.collect()
        dist.destroy_process_group()


class _Agreeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Says yes where torch's pipeline asks a rank that is not there whether it knows its shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.recv_.default:
            for tensor in args[0]:
                if not tensor.is_floating_point():
                    tensor.fill_(1)
        return func(*args, **(kwargs or {}))


class _Imagined(World):
    @property
    def is_imagined(self) -> bool:
        return True

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def from_first(self, value: Any) -> Any:
        return value

    def any(self, flag: bool) -> bool:
        return flag


def _meet(member: Member, device: torch.device, timeout_s: float) -> None:
    """The process group is there. Raises RuntimeError or OSError."""
    accelerator_of(device).activate()  # each thread has its own, and NCCL starts here on the current one
    store = _store(member, timedelta(seconds=_meeting_s(member, timeout_s)))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"attempt-{member.attempt}-of-{member.world_size}", store),
        rank=member.rank,
        world_size=member.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )


def _meeting_s(member: Member, timeout_s: float) -> float:
    """Return how long ranks wait for each other: NCCL connects them while they meet, which grows with their number."""
    return min(timeout_s, MEETING_S + 0.5 * member.world_size)


def _store(member: Member, timeout: timedelta) -> Store:
    """Return where the ranks meet: a file for one machine, rank 0's port for several."""
    kind, _, place = member.store.partition("://")
    if kind == "file":
        return FileStore(place, member.world_size)
    host, _, port = place.rpartition(":")
    hosted_elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        host,
        int(port),
        member.world_size,
        is_master=member.rank == 0 and not hosted_elsewhere,
        timeout=timeout,
        multi_tenant=True,
    )
