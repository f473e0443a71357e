"""Metrics on held-out samples: sums and counts over all batches, divided once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from runner.axes.dataloader import Loader
from runner.axes.precision import Precision
from runner.axes.prefetch import Prefetch
from runner.base.generators import random_state, restore_random_state, seed_everything
from runner.base.order import Indices, Micro, seed_of_rank
from runner.base.task import Task
from runner.distributed.parallel import Parallel


def evaluate(
    task: Task,
    model: nn.Module,
    loader: Loader,
    prefetch: Prefetch,
    precision: Precision,
    parallel: Parallel,
    samples: Indices,
    batch_size: int,
    seed: int,
    stopped: Callable[[], bool] = lambda: False,
    all_measured: Callable[[], object] = lambda: None,
) -> dict[str, float] | None:
    """Return the task's metrics over `samples`, each counted once; None where `stopped` said so on some rank.

    stopped       called before each batch
    all_measured  called after the last one: what follows takes as long as the task's summary does

    Random numbers are drawn from `seed` anew, so that metrics that sample can be compared. Afterwards the model is in
    train mode again, and the random generators are where they were.
    """
    world = parallel.world
    keys = [
        Micro(0, samples[first : first + batch_size], last=first + batch_size >= len(samples))
        for first in range(0, len(samples), batch_size)
    ]
    sums: dict[str, list[Tensor]] = {}
    counts: dict[str, Tensor | int] = {}
    mine = parallel.dealt(keys)
    is_stopped = False
    with as_in_use(model, world.device), parallel.gathered(model), torch.no_grad():
        seed_everything(seed_of_rank(seed, world.rank))
        for batch, _, _, counted in prefetch(iter(loader.batches(mine))):
            if stopped() and not parallel.in_step:  # else the others would wait for this rank
                is_stopped = True
                break
            with precision.forward():
                measured = task.evaluate(model, batch)
            for name, (total, count) in measured.items() if counted else ():
                sums.setdefault(name, []).append(total.detach().to(world.widest))
                counts[name] = counts.get(name, 0) + count
    all_measured()
    found = {name: [float(sum(parts)), float(counts[name])] for name, parts in sums.items()}
    of_ranks = world.gather([is_stopped, found])
    if any(stopped_there for stopped_there, _ in of_ranks):
        return None
    divided = {}
    for name in dict.fromkeys(name for _, there in of_ranks for name in there):
        pairs = [there[name] for _, there in of_ranks if name in there]
        divided[name] = sum(total for total, _ in pairs) / max(sum(count for _, count in pairs), 1e-30)
    return dict(task.summarize(divided))


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
