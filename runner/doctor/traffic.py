"""What is moved: between the host's memory and GPUs, from workers, and between processes that train together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from runner.base.rank_env import RankInfo
from runner.doctor.findings import CheckContext, CheckResult, failed, ok, skip, warn
from runner.plan.inventory import Device

if TYPE_CHECKING:
    import torch

MIB = 2**20
SumAs = Callable[[int, tuple[str, ...], str], tuple[float, float, float]]
BATCH_BYTES = 16 * MIB


def bandwidth(context: CheckContext) -> Iterator[CheckResult]:
    """How fast the host copies memory, and how fast pinned memory goes to each GPU and back."""
    import torch

    context.begin("host")
    size = 128 * MIB
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    rate = size / _best(lambda: target.copy_(source)) / 1e9
    yield ok("host", f"{rate:.1f} GB/s, memory to memory", gb_per_s=rate)
    if not context.gpus:
        yield skip("pinned", "needs a GPU")
    for device in context.each(context.gpus, lambda device: device.torch_name):
        yield _copied(device) if device.kind == "cuda" else skip(device.torch_name, "shares the host's memory")


def loader(context: CheckContext) -> Iterator[CheckResult]:
    """A worker of a DataLoader hands over batches of 16 MiB through shared memory, and they arrive whole."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return _BATCHES

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((BATCH_BYTES,), index, dtype=torch.uint8)

    made = DataLoader(Numbers(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=_PATIENCE_S)
    began = time.perf_counter()
    try:
        for index, batch in enumerate(made):
            if index == 0:
                began = time.perf_counter()
            if int(batch[0]) != index or int(batch[-1]) != index:
                yield failed(
                    "", f"batch {index} arrived damaged", "dataloader.num_workers=0; and see that the memory is sound"
                )
                return
    except RuntimeError as error:
        yield failed("", str(error).splitlines()[0], _MORE_SHARED_MEMORY)
        return
    rate = BATCH_BYTES * (_BATCHES - 1) / (time.perf_counter() - began) / 1e9
    yield ok("", f"a worker hands batches of 16 MiB over at {rate:.1f} GB/s", gb_per_s=rate)


def allreduce(context: CheckContext) -> Iterator[CheckResult]:
    """Two processes add a tensor over gloo; as many as there are GPUs over NCCL."""
    wanted: list[tuple[str, tuple[str, ...]]] = [("gloo", ("cpu", "cpu"))] if context.device in ("auto", "cpu") else []
    gpus = tuple(device.torch_name for device in context.gpus if device.kind == "cuda")
    if len(gpus) > 1:
        wanted.append(("nccl", gpus))
    else:
        yield skip("nccl", f"needs two GPUs, and there {'is one' if gpus else 'are none'}")
    for name, devices in context.each(wanted, lambda pair: pair[0]):
        yield sum_over_processes(name, devices, context.scratch)


# ---------------------------------------------------------------- host and GPU


def _copied(device: Device) -> CheckResult:
    import torch

    where, size = torch.device(device.torch_name), 128 * MIB
    pinned = torch.arange(size // 8).pin_memory()
    there = torch.empty_like(pinned, device=where)
    back = torch.empty_like(pinned).pin_memory()
    pageable = pinned.clone()

    def wait() -> None:
        torch.accelerator.synchronize(where)

    to = size / _best(lambda: there.copy_(pinned, non_blocking=True), wait) / 1e9
    fro = size / _best(lambda: back.copy_(there, non_blocking=True), wait) / 1e9
    plain = size / _best(lambda: there.copy_(pageable), wait) / 1e9
    seen = f"pinned {to:.1f} GB/s there, {fro:.1f} back; not pinned {plain:.1f} there"
    rates = {"to_gb_per_s": to, "from_gb_per_s": fro, "pageable_gb_per_s": plain}
    if not torch.equal(back, pinned):
        fix = "do not train on it: nvidia-smi -q -d ECC; dmesg | grep -i xid"
        return failed(device.torch_name, f"{seen}; what came back is not what was sent", fix, figures=rates)
    if to < _SLOW_PCIE_GB_PER_S:
        fix = "nvidia-smi -q | grep -A4 'GPU Link'; see that it sits in a slot of full width"
        return warn(device.torch_name, seen, fix, "batches wait for the bus", rates)
    return ok(device.torch_name, seen, **rates)


# ---------------------------------------------------------------- ranks


def sum_over_processes(name: str, devices: tuple[str, ...], scratch: Path, sum_as: SumAs | None = None) -> CheckResult:
    """All-reduce with one process per device; this one is rank 0, the others are forked from it.

    name    the backend, gloo or nccl
    sum_as  what each rank runs: (rank, devices, store) -> error, seconds of a small sum, bytes/s of a large one
    """
    sum_as = sum_as or _rank
    store = f"file://{scratch}/store-{name}"
    fork = get_context("fork")
    told = fork.SimpleQueue()

    def tell(rank: int) -> None:
        told.put((rank, sum_as(rank, devices, store)[0]))

    others = {rank: fork.Process(target=tell, args=(rank,), daemon=True) for rank in range(1, len(devices))}
    for other in others.values():
        other.start()
    error, latency_s, rate = sum_as(0, devices, store)
    for other in others.values():
        other.join()
    errors = {0: error}
    while not told.empty():
        number, wrong_by = told.get()
        errors[number] = wrong_by
    for rank, other in others.items():
        if other.exitcode or rank not in errors:
            return failed(name, f"process {rank} of {len(devices)} left with exit code {other.exitcode}", _ON_ONE)
    wrong = [f"by {each:g} in process {rank}" for rank, each in sorted(errors.items()) if each]  # also of NaN
    if wrong:
        return failed(name, f"the sum over {len(devices)} processes is wrong {', '.join(wrong)}", _ON_ONE)
    speed = f"{latency_s * 1000:.2f} ms for 4 bytes, {rate / 1e9:.2f} GB/s for {BATCH_BYTES // MIB} MiB"
    return ok(name, f"{len(devices)} processes: {speed}", latency_ms=latency_s * 1000, gb_per_s=rate / 1e9)


def _rank(rank: int, devices: tuple[str, ...], store: str) -> tuple[float, float, float]:
    """Return what the sum is wrong by, seconds for a small one, and bytes per second for a large one."""
    import torch

    from runner.distributed.join import joined

    if rank:
        torch.set_num_threads(1)
    member = RankInfo(rank, rank, len(devices), len(devices), store)
    with joined(member, torch.device(devices[rank]), timeout_s=_MEETING_S) as world:
        small = torch.full((1,), float(rank + 1), device=world.device)
        large = torch.full((BATCH_BYTES // 4,), float(rank + 1), device=world.device)
        expected = sum(range(1, len(devices) + 1))
        error = sum(abs(float(each.max()) - expected) + abs(float(each.min()) - expected)
                    for each in (world.sum(small), world.sum(large)))  # fmt: skip
        latency_s = _best_of_all(lambda: world.sum(small), world.synchronize, _SMALL_SUMS)
        took_s = _best_of_all(lambda: world.sum(large), world.synchronize, _LARGE_SUMS)
    return error, latency_s, BATCH_BYTES / took_s


def _best_of_all(call: Callable[[], object], wait: Callable[[], None], repeats: int) -> float:
    """Return the seconds of the quickest call; all ranks make the same number."""
    best = math.inf
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        wait()
        best = min(best, time.perf_counter() - began)
    return best


def _best(call: Callable[[], object], wait: Callable[[], None] = lambda: None) -> float:
    """Return the seconds of the quickest of a few calls; the first one, which touches new memory, does not count."""
    call()
    wait()
    return _best_of_all(call, wait, 4)


_BATCHES = 6
_PATIENCE_S, _MEETING_S = 10.0, 30.0
_SMALL_SUMS, _LARGE_SUMS = 20, 4
_ON_ONE = "do not train on several devices"
_SLOW_PCIE_GB_PER_S = 3.0  # a slot of four lanes of the third generation, or a full one that fell back to the first
_MORE_SHARED_MEMORY = "docker run --shm-size=8g, or mount -o remount,size=50% /dev/shm; or dataloader.num_workers=0"
