"""Assign devices to the ranks of a run, and shares of an update to the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

from runner.base.errors import ConfigError, DeviceMissing, Problem
from runner.base.shares import Shares, equal_shares, fixed_shares, split_proportionally
from runner.config.configuration import Choice
from runner.plan.inventory import Device, Inventory, Kind
from runner.plan.overhead import get_overhead

CPU_RANKS = 2


@dataclass(frozen=True)
class RankDevice:
    """The device of one rank, with torch's name on its machine: `cuda:1` or `cpu`.

    free_bytes           memory that other processes leave free; None if unknown, as for a device that is not present
    overhead_bytes       memory of libraries besides tensors
    communication_bytes  additional memory with several ranks
    unseen               workspaces of GPU kernels, which a trace on a CPU does not see, as a fraction of the tensors
    machine              number of the rank's machine, counted in the order of the ranks
    capability, architecture  as in `Device`; they determine its number formats
    """

    device: str
    name: str
    uuid: str = ""
    memory_bytes: int = 0
    free_bytes: int | None = None
    overhead_bytes: int = 0
    communication_bytes: int = 0
    unseen: float = 0.0
    machine: int = 0
    capability: tuple[int, int] | None = None
    architecture: str = ""

    @property
    def gpu(self) -> Device | None:
        """Return the rank's GPU, None for the CPU."""
        kind, _, index = self.device.partition(":")
        if kind == "cpu":
            return None
        return Device(
            cast(Kind, kind), int(index or 0), self.name, self.uuid, self.memory_bytes, self.free_bytes,
            self.capability, architecture=self.architecture,
        )  # fmt: skip

    @property
    def is_gpu(self) -> bool:
        """Return whether torch's caching allocator manages its memory."""
        return self.device.startswith("cuda")

    @property
    def capacity_bytes(self) -> int:
        """Return the memory available to a run in bytes; 0 if unknown."""
        return (
            self.memory_bytes if self.free_bytes is None else min(self.memory_bytes or self.free_bytes, self.free_bytes)
        )

    @staticmethod
    def of(gpu: Device | None, inventory: Inventory) -> RankDevice:
        """Return the rank's device for a GPU, or for the CPU if None."""
        if gpu is None:
            cpu = inventory.cpu
            cores = f"{cpu.logical_cores} core{'s' * (cpu.logical_cores != 1)}"
            return RankDevice(
                "cpu", f"CPU ({cpu.name}, {cores})", "", cpu.memory_bytes, None, get_overhead("cpu", None).libraries
            )
        overhead = get_overhead(gpu.kind, gpu.capability)
        return RankDevice(
            gpu.torch_name, gpu.name, gpu.uuid, gpu.memory_bytes, gpu.free_bytes,
            overhead.libraries, overhead.communication, overhead.unseen, gpu.machine, gpu.capability, gpu.architecture,
        )  # fmt: skip


def number_machines(ranks: Sequence[RankDevice], local_ranks: Sequence[int]) -> list[RankDevice]:
    """Return the devices with the numbers of their machines, which follow from the local ranks.

    A rank with local rank 0 starts a new machine, because launchers usually give consecutive numbers to the ranks of
    a machine. If a launcher does not, the machines appear to be unequal.
    """
    machines = accumulate(int(rank > 0 and local_rank == 0) for rank, local_rank in enumerate(local_ranks))
    return [replace(rank, machine=machine) for rank, machine in zip(ranks, machines, strict=True)]


def ranks_per_machine(ranks: Sequence[RankDevice]) -> tuple[int, ...]:
    """Return the number of ranks of each machine."""
    return tuple(Counter(rank.machine for rank in ranks).values())


def copy_sizes(count: int) -> tuple[int, ...]:
    """Return the numbers of ranks that can hold a copy of the model together: the divisors of `count` above 1."""
    return tuple(size for size in range(2, count + 1) if count % size == 0)


def find_wrong_world_size(parallelism: Choice, num_ranks: int) -> Problem | None:
    """Return a problem if the requested number of ranks differs from the number that another launcher started."""
    requested = parallelism.options.get("world_size", "auto")
    if num_ranks == 1 or requested in ("auto", num_ranks):  # a single process starts the requested number itself
        return None
    what = f"must equal the number of ranks that were started, {num_ranks}"
    fix = f"omit parallelism.world_size, or start {requested} rank{'s' * (requested != 1)}"
    return Problem(what, f"parallelism.world_size={requested}", fix)


def several_on_one(device: str, where: str) -> Problem:
    """Return the problem of several ranks on an Intel or Apple GPU, for which there are no tested collectives."""
    what = f"several ranks cannot use {device}: they need CUDA or ROCm GPUs, or the CPU"
    return Problem(what, where, "use parallelism=single, or device=cpu")


def assign_gpus(first: Device | None, requested: int | str, inventory: Inventory) -> tuple[list[Device | None], str]:
    """Return the GPU of each rank, None for the CPU, and the reason for the number of ranks.

    first      the GPU that was chosen for rank 0, None for the CPU
    requested  number of ranks, or auto: one for each GPU
    Raises DeviceMissing if there are more ranks than GPUs, and ConfigError for several ranks on another accelerator.
    """
    if first is not None and first.kind != "cuda" and requested != 1:
        raise ConfigError(several_on_one(first.torch_name, f"parallelism.world_size={requested}"))
    if first is None or first.kind != "cuda":
        if requested == "auto":
            return [first] * CPU_RANKS, f"auto: no GPUs; {CPU_RANKS} ranks for testing"
        return [first] * int(requested), ""
    gpus = [first, *(gpu for gpu in inventory.usable if gpu.kind == "cuda" and gpu.index != first.index)]
    if requested == "auto":
        return [*gpus], f"auto: one rank per GPU ({len(gpus)} GPUs)"
    if int(requested) > len(gpus):
        raise DeviceMissing(
            f"{requested} ranks need as many GPUs, but {len(gpus)} can be used: {', '.join(gpu.name for gpu in gpus)}",
            where=f"parallelism.world_size={requested}",
            fix=f"use parallelism.world_size={len(gpus)}, or device=cpu to run without GPUs",
        )
    return [*gpus[: int(requested)]], ""


def split_shares(
    requested: str | Sequence[int], total: int, ranks: Sequence[RankDevice]
) -> tuple[Shares | Problem, str]:
    """Return the samples of an update for each rank, or a Problem, and the reason."""
    if len(ranks) == 1:
        return (total,), "one rank processes all samples of an update"
    if isinstance(requested, (list, tuple)):
        return fixed_shares(requested, len(ranks), total), "as given"
    even = equal_shares(len(ranks), total)
    memories = [rank.capacity_bytes for rank in ranks]
    if requested == "equal" or isinstance(even, Problem):
        return even, "equal: as even as integers allow"
    if requested == "speed":
        return even, "speed: equal at first, then by measured speed"
    if not all(memories):
        return even, "memory: equal, because the memory of a device is unknown"
    sizes = " : ".join(f"{memory / 2**30:.3g}" for memory in memories)
    return split_proportionally(total, memories), f"memory: proportional to {sizes} GiB"
