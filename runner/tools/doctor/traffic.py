"""What is passed between processes: batches from workers, sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

from runner.base.rank_env import RankInfo
from runner.tools.doctor.findings import CheckContext, CheckResult, failed, ok, skip

MIB = 2**20
SumAs = Callable[[int, tuple[str, ...], str], float]
BATCH_BYTES = 16 * MIB


def loader(context: CheckContext) -> Iterator[CheckResult]:
    """A DataLoader worker returns batches."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return _BATCHES

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((BATCH_BYTES,), index, dtype=torch.uint8)

    made = DataLoader(Numbers(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=_PATIENCE_S)
    try:
        for index, batch in enumerate(made):
            if int(batch[0]) != index or int(batch[-1]) != index:
                yield failed(
                    "", f"batch {index} arrived damaged", "dataloader.num_workers=0; and see that the memory is sound"
                )
                return
    except RuntimeError as error:
        yield failed("", str(error).splitlines()[0], _MORE_SHARED_MEMORY)
        return
    yield ok("", "a worker passes batches of 16 MiB")


def allreduce(context: CheckContext) -> Iterator[CheckResult]:
    """All-reduce over two processes with gloo, over all GPUs with NCCL."""
    wanted: list[tuple[str, tuple[str, ...]]] = [("gloo", ("cpu", "cpu"))] if context.device in ("auto", "cpu") else []
    gpus = tuple(device.torch_name for device in context.gpus if device.kind == "cuda")
    if len(gpus) > 1:
        wanted.append(("nccl", gpus))
    else:
        yield skip("nccl", f"needs two GPUs, and there {'is one' if gpus else 'are none'}")
    for name, devices in context.each(wanted, lambda pair: pair[0]):
        yield sum_over_processes(name, devices, context.scratch)


# ---------------------------------------------------------------- ranks


def sum_over_processes(name: str, devices: tuple[str, ...], scratch: Path, sum_as: SumAs | None = None) -> CheckResult:
    """All-reduce with one process per device; this one is rank 0, the others are forked from it.

    name    the backend, gloo or nccl
    sum_as  what each rank runs: (rank, devices, store) -> error of its sums
    """
    sum_as = sum_as or _rank
    store = f"file://{scratch}/store-{name}"
    fork = get_context("fork")
    told = fork.SimpleQueue()

    def tell(rank: int) -> None:
        told.put((rank, sum_as(rank, devices, store)))

    others = {rank: fork.Process(target=tell, args=(rank,), daemon=True) for rank in range(1, len(devices))}
    for other in others.values():
        other.start()
    error = sum_as(0, devices, store)
    for other in others.values():
        other.join()
    errors = {0: error}
    while not told.empty():
        number, wrong_by = told.get()
        errors[number] = wrong_by
    for rank, other in others.items():
        if other.exitcode or rank not in errors:
            return failed(name, f"process {rank} of {len(devices)} exited with code {other.exitcode}", _ON_ONE)
    wrong = [f"by {each:g} in process {rank}" for rank, each in sorted(errors.items()) if each]  # also of NaN
    if wrong:
        return failed(name, f"the sum over {len(devices)} processes is wrong {', '.join(wrong)}", _ON_ONE)
    return ok(name, f"the sums over {len(devices)} processes are correct")


def _rank(rank: int, devices: tuple[str, ...], store: str) -> float:
    """Return the error of a small and a large sum."""
    import torch

    from runner.distributed.join import joined

    if rank:
        torch.set_num_threads(1)
    member = RankInfo(rank, rank, len(devices), len(devices), store)
    with joined(member, torch.device(devices[rank]), timeout_s=_MEETING_S) as world:
        small = torch.full((1,), float(rank + 1), device=world.device)
        large = torch.full((BATCH_BYTES // 4,), float(rank + 1), device=world.device)
        expected = sum(range(1, len(devices) + 1))
        return sum(abs(float(each.max()) - expected) + abs(float(each.min()) - expected)
                   for each in (world.sum(small), world.sum(large)))  # fmt: skip


_BATCHES = 3
_PATIENCE_S, _MEETING_S = 10.0, 30.0
_ON_ONE = "do not train on several devices"
_MORE_SHARED_MEMORY = "docker run --shm-size=8g, or mount -o remount,size=50% /dev/shm; or dataloader.num_workers=0"
