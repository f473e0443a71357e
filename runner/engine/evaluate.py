"""Metrics on held-out samples: sums and counts over all batches, divided once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from runner.axes.dataloader import Loader
from runner.axes.precision import Precision
from runner.axes.prefetch import Prefetch
from runner.base.generators import random_state, restore_random_state, seed_everything
from runner.base.order import Indices, Micro, seed_of_rank
from runner.base.task import Task
from runner.distributed.parallel import Parallel
from runner.engine.redo import release


@dataclass
class Sizes:
    """How many samples a batch of an evaluation has at most.

    asked     as batches are dealt to the ranks
    failed    (error, size) -> a smaller size to go on with; raises the error where there is none; None: always
    now       what this rank makes of them; less than asked where memory ran out
    of_ranks  (before the last evaluation, after it) of each rank
    """

    asked: int
    failed: Callable[[Exception, int], int] | None = None
    now: int = 0
    of_ranks: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = self.now or self.asked


def evaluate(
    task: Task,
    model: nn.Module,
    loader: Loader,
    prefetch: Prefetch,
    precision: Precision,
    parallel: Parallel,
    samples: Indices,
    sizes: Sizes,
    seed: int,
    stopped: Callable[[], bool] = lambda: False,
    all_measured: Callable[[], object] = lambda: None,
) -> dict[str, float] | None:
    """Return the task's metrics over `samples`, each counted once; None where `stopped` said so on some rank.

    sizes         of a batch
    stopped       called before each batch
    all_measured  called after the last one: what follows takes as long as the task's summary does

    Where memory runs out in it, this rank makes all of its batches again, smaller ones; no other rank waits for that.

    Random numbers are drawn from `seed` anew, so that metrics that sample can be compared. Afterwards the model is in
    train mode again, and the random generators are where they were.
    """
    world, before = parallel.world, sizes.now
    in_one = sizes.now if parallel.in_step else sizes.asked  # in step, all ranks make as many batches
    keys = [
        Micro(0, samples[first : first + in_one], last=first + in_one >= len(samples))
        for first in range(0, len(samples), in_one)
    ]
    mine = parallel.dealt(keys)

    def measured() -> tuple[bool, dict[str, list[Tensor]], dict[str, Tensor | int]]:
        sums: dict[str, list[Tensor]] = {}
        counts: dict[str, Tensor | int] = {}
        with as_in_use(model, world.device), parallel.gathered(model), torch.no_grad():
            seed_everything(seed_of_rank(seed, world.rank))
            for batch, _, _, counted in prefetch(iter(loader.batches(_cut(mine, sizes.now)))):
                if stopped() and not parallel.in_step:  # else the others would wait for this rank
                    return True, sums, counts
                with precision.forward():
                    found = task.evaluate(model, batch)
                for name, (total, count) in found.items() if counted else ():
                    sums.setdefault(name, []).append(total.detach().to(world.widest))
                    counts[name] = counts.get(name, 0) + count
        return False, sums, counts

    while True:
        try:
            is_stopped, sums, counts = measured()
            break
        except Exception as error:
            if parallel.in_step or sizes.failed is None:
                raise
            sizes.now = sizes.failed(error, sizes.now)
        release(world.device)  # out of the `except`, which holds what the batch made
    all_measured()
    found = {name: [float(sum(parts)), float(counts[name])] for name, parts in sums.items()}
    told = world.gather([is_stopped, found, [before, sizes.now]])
    sizes.of_ranks = [(old, new) for _, _, (old, new) in told]
    if any(stopped_there for stopped_there, _, _ in told):
        return None
    of_ranks = [there for _, there, _ in told]
    divided = {}
    for name in dict.fromkeys(name for there in of_ranks for name in there):
        pairs = [there[name] for there in of_ranks if name in there]
        divided[name] = sum(total for total, _ in pairs) / max(sum(count for _, count in pairs), 1e-30)
    return dict(task.summarize(divided))


def _cut(keys: Sequence[Micro], size: int) -> Iterator[Micro]:
    """Yield the batches in parts of at most `size` samples."""
    for key in keys:
        for first in range(0, len(key.indices), size):
            yield key._replace(
                indices=key.indices[first : first + size], last=key.last and first + size >= len(key.indices)
            )


@contextmanager
def as_in_use(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model in eval mode, and afterwards its mode and the state of all global generators back."""
    training = model.training
    tensors, rest = random_state(device)
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        restore_random_state(tensors, rest, device)
