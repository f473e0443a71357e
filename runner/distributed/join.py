"""Initialize and destroy torch's process groups, on the network interface that reaches the other ranks."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.utils._python_dispatch import TorchDispatchMode

from runner.base.accelerator import get_accelerator
from runner.base.errors import DeviceMissing, SystemLimit
from runner.base.rank_env import RankInfo
from runner.distributed.timeouts import call_with_timeout
from runner.distributed.world import TIMEOUT_S, World

RENDEZVOUS_S = 120.0  # s, plus 0.5 s per rank: timeout of the rendezvous
ABORT_S = 10.0  # s to abort the kernels of a process group


@contextmanager
def join_process_group(
    rank_info: RankInfo,
    device: torch.device,
    *,
    timeout_s: float = TIMEOUT_S,
    rendezvous_s: float | None = None,
    watchdog_s: float = 0.0,
) -> Iterator[World]:
    """Initialize the process group of `rank_info` and return its world; destroy the group on exit.

    rendezvous_s  timeout of the rendezvous, at most `timeout_s`; None: RENDEZVOUS_S plus 0.5 s per rank
    watchdog_s    time within which the run's watchdog reports a hang; GPU collectives do not time out earlier

    CPU tensors use gloo, and CUDA tensors use NCCL. After an error, and if destroying the group takes longer than
    `timeout_s`, the group is abandoned.
    Raises SystemLimit if the ranks cannot connect, DeviceMissing if ranks share a GPU, which NCCL does not support.
    """
    has_own_launcher = rank_info.store.startswith("file:")  # other launchers end all ranks when one exits
    folder = Path(rank_info.store.removeprefix("file://")).parent if has_own_launcher else None
    # NCCL aborts the rank that waits, without naming the one that hangs. The watchdog's report must come first.
    collective_s = max(timeout_s, watchdog_s) if device.type == "cuda" else timeout_s
    world = World(
        device, rank_info.rank, rank_info.local_rank, rank_info.world_size, rank_info.num_local_ranks, folder,
        timeout_s=collective_s,
    )  # fmt: skip
    get_accelerator(device).activate()  # calls that name no device must not initialize the first GPU
    if rank_info.world_size == 1:
        yield world
        return
    choose_interface(rank_info)
    if rendezvous_s is None:  # grows with the number of ranks, because NCCL connects them pairwise
        rendezvous_s = RENDEZVOUS_S + 0.5 * rank_info.world_size
    rendezvous_s = min(timeout_s, rendezvous_s)
    try:
        if has_own_launcher:
            _init_group(rank_info, device, collective_s, rendezvous_s)
        else:  # with a timeout, because the port may belong to another program
            call_with_timeout(rendezvous_s + 5.0, partial(_init_group, rank_info, device, collective_s, rendezvous_s))
    except (RuntimeError, OSError) as error:
        if "Duplicate GPU" in str(error):
            raise DeviceMissing(
                f"rank {rank_info.rank} of {rank_info.world_size} uses the same GPU as another rank: {device}",
                fix="start one rank per GPU, or use device=cpu",
            ) from error
        reason = str(error).splitlines()[0]
        raise SystemLimit(
            f"rank {rank_info.rank} of {rank_info.world_size} cannot connect to the others: {reason}",
            where=rank_info.store,
            fix="check that every rank was started and that the port is free, or use another one: MASTER_PORT=29501",
        ) from error
    try:
        yield world
    except BaseException:
        # Destroying an NCCL group waits for collectives that this rank never joins, until their timeout, and hides the
        # cause. Ranks started by accel-run end by os._exit; under torchrun or srun, kernels must be aborted first.
        if not has_own_launcher:
            with suppress(Exception):
                call_with_timeout(ABORT_S, dist.distributed_c10d._abort_process_group)
        raise
    gc.collect()  # drop remaining references to the group before it is destroyed
    # NCCL may wait here for a rank that does not answer, and no watchdog runs any more. The results are complete, so
    # give up after the timeout.
    with suppress(TimeoutError):
        call_with_timeout(timeout_s, partial(_destroy_group, device))


def current_rank() -> tuple[int, int]:
    """Return the number of this rank and the number of ranks; (0, 1) if there is no process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _destroy_group(device: torch.device) -> None:
    get_accelerator(device).activate()  # the current device is per thread
    dist.destroy_process_group()


@contextmanager
def simulated_world(rank: int, world_size: int) -> Iterator[World]:
    """Return a simulated world on the CPU: data sent to other ranks is dropped, and received values are constant.

    Used to trace the computation of one rank on fake tensors. All other ranks are assumed to agree with it.
    """
    # Private, checked on torch 2.13: the backend "fake", with which torch tests strategies without other processes.
    import torch.distributed._tools.fake_collectives  # implements collectives for fake tensors
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with _AgreeingRanks():  # type: ignore[no-untyped-call]
            yield _SimulatedWorld(torch.device("cpu"), rank, rank, world_size, world_size)
    finally:
        gc.collect()
        dist.destroy_process_group()


class _AgreeingRanks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fill received tensors, which are otherwise uninitialized.

    Integers are 1: in torch's pipeline, ranks use them to report that they know their shapes. Other numbers are 0, so
    that gradients with actual values are finite: those of a single linear layer do not depend on any fake weight.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.recv_.default:
            for tensor in args[0]:
                tensor.fill_(0 if tensor.is_floating_point() else 1)
        return func(*args, **(kwargs or {}))


class _SimulatedWorld(World):
    @property
    def is_simulated(self) -> bool:
        return True

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def gather_on_first(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def broadcast(self, value: Any) -> Any:
        return value

    def any(self, flag: bool) -> bool:
        return flag


def _init_group(rank_info: RankInfo, device: torch.device, timeout_s: float, rendezvous_s: float) -> None:
    """Create the process group. Raises RuntimeError or OSError."""
    get_accelerator(device).activate()  # the current device is per thread, and NCCL initializes on it
    store = _open_store(rank_info, timedelta(seconds=rendezvous_s))
    # The store of torchrun's agent outlives the ranks, so the prefix contains the number of the attempt. If rank 0
    # hosts a new store for each attempt, the prefix must not contain this number: each agent counts its own restarts,
    # and a node that rejoins starts at 0, so ranks would use different prefixes.
    is_new = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(
            f"of-{rank_info.world_size}" if is_new else f"attempt-{rank_info.attempt}-of-{rank_info.world_size}", store
        ),
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,  # connects NCCL here, not in the first collective
    )
    # Barrier: otherwise a rank that is still connecting would report a connection error if another rank fails first.
    # The tensor is on the CPU, so gloo is used.
    dist.all_reduce(torch.zeros(()))


def _open_store(rank_info: RankInfo, timeout: timedelta) -> Store:
    """Return the rendezvous store: a file for one machine, rank 0's port for several."""
    kind, _, place = rank_info.store.partition("://")
    if kind == "file":
        return FileStore(place, rank_info.world_size)
    host, _, port = place.rpartition(":")
    hosted_elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        host,
        int(port),
        rank_info.world_size,
        is_master=rank_info.rank == 0 and not hosted_elsewhere,
        timeout=timeout,
        multi_tenant=True,
    )


def choose_interface(rank_info: RankInfo) -> None:
    """Set gloo's network interface to the one that reaches the other ranks, unless `GLOO_SOCKET_IFNAME` is set.

    On a single machine that is the loopback interface, so that no port is open to other machines. Otherwise it is the
    interface towards rank 0. By default gloo uses the address of the host name, which is 127.0.0.1 on many systems, so
    the ranks of other machines could not connect.
    """
    name = find_interface(rank_info)
    if not name:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if _is_on_one_machine(rank_info):
        # NCCL's bootstrap listens on a network card even if all ranks are on this machine. The prefix = requires an
        # exact match. On several machines NCCL finds its interfaces itself, and may use several.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def find_interface(rank_info: RankInfo) -> str:
    """Return the name of the interface, empty if the routes do not determine it."""
    if _is_on_one_machine(rank_info):
        return _interface_name("127.0.0.1")
    host, _, port = rank_info.store.partition("://")[2].rpartition(":")
    address = _route_address(host, int(port))
    if not address or ip_address(address).is_loopback:  # rank 0 resolved its own host name
        address = _route_address(_EXTERNAL_ADDRESS, int(port))
    return _interface_name(address)


def _is_on_one_machine(rank_info: RankInfo) -> bool:
    return rank_info.num_local_ranks == rank_info.world_size or rank_info.store.startswith("file:")


def _route_address(host: str, port: int) -> str:
    """Return this machine's address on the route to a host; sends nothing."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _interface_name(address: str) -> str:
    names = [name for name, rows in psutil.net_if_addrs().items() if any(row.address == address for row in rows)]
    return names[0] if names else ""


_EXTERNAL_ADDRESS = "192.0.2.1"  # reserved for documentation (RFC 5737), so it is reached by the default route
