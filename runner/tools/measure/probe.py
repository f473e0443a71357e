"""Inspect the samples and batches of a task.

An inspection disturbs the process, so its updates must not be timed afterwards.
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from runner.base.batch import are_equal, map_tensors
from runner.base.order import MicroBatchKey
from runner.base.task import Task
from runner.engine.phase import Phase
from runner.engine.run import TrainingRun
from runner.loading.fetcher import Fetcher

SECONDS = 1.0  # approximate duration of each inspection
BATCHES = 64  # number of batches whose shapes are inspected
SAMPLES = 16
Reply = dict[str, Any]


def probe(run: TrainingRun, phase: Phase) -> Reply:
    """Inspect the task."""
    samples = _inspect_samples(phase.loader.fetcher)
    shapes: set[tuple[tuple[int, ...], ...]] = set()  # of full micro-batches; those at the end of an epoch are shorter
    began = time.perf_counter()
    full_size = phase.planned.batch.micro_batch_size
    for number, micro in enumerate(phase.order.from_update(0)):
        if len(micro.indices) == full_size:
            shapes.add(tuple(_get_shapes(phase.loader.fetcher[micro].batch)))
        if number >= BATCHES or time.perf_counter() - began > SECONDS:
            break
    return {
        "has_begin_update": type(run.parts.task).begin_update is not Task.begin_update,
        **samples,
        "num_shapes": len(shapes),
    }


# ---------------------------------------------------------------- samples


def _inspect_samples(fetcher: Fetcher) -> Reply:
    """Read samples as the run does.

    Return their size, the share of the reading time that is spent on a CPU, and whether samples change when they are
    read again.
    """
    num, seconds, busy = 1, 0.0, 0.0
    while seconds < SECONDS / 20 and num <= SAMPLES:  # read in batches, because a dataset may read samples together
        num = min(2 * num, len(fetcher)) if num < len(fetcher) else num
        began, busy = time.perf_counter(), time.process_time()
        batch = fetcher[_first_samples(num)].batch
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
        if num == len(fetcher):
            break
    # From another epoch, because the random draws of a dataset repeat within an epoch.
    again = fetcher[_first_samples(num)._replace(epoch=1)].batch
    sizes: list[int] = []
    map_tensors(lambda tensor: sizes.append(tensor.nbytes), batch)
    return {
        "sample_busy": min(1.0, busy / max(seconds, 1e-9)),  # CPU share of the time
        "sample_bytes": sum(sizes) / num,
        "same_when_read_again": are_equal(batch, again),
        "changes_with_epoch": fetcher.set_epoch is not None,
    }


def _first_samples(num: int) -> MicroBatchKey:
    return MicroBatchKey(0, list(range(num)), last=True)


# ---------------------------------------------------------------- batches


def _get_shapes(batch: Any, *, floating: bool = False) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors of a batch; with `floating`, only of floating-point tensors."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, batch)
    return [tuple(tensor.shape) for tensor in tensors if tensor.is_floating_point() or not floating]


def inspect_batch(phase: Phase) -> Reply:
    """Return the input shape of the model (None if no tensor is floating-point) and the number of loss terms."""
    batch = next(phase.feed).batch
    with phase.run.parts.precision.forward():
        total, _ = phase.work.training.loss(phase.work.training.model, batch)  # type: ignore[attr-defined]
    shape = max(_get_shapes(batch, floating=True), key=len, default=None)
    return {"input_shape": shape, "loss_terms": _count_terms(total.grad_fn)}


def _count_terms(node: Any, depth: int = 0) -> int:
    """Count the summands at the root of an autograd graph, through additions and scaling."""
    if node is None or depth > 200:
        return 0
    name = type(node).__name__
    inner = [child for child, _ in node.next_functions]
    if name.startswith(("AddBackward", "SubBackward")):
        return sum(_count_terms(child, depth + 1) for child in inner)
    if name.startswith(
        ("MulBackward", "DivBackward", "NegBackward", "SumBackward", "ToCopyBackward", "SqueezeBackward")
    ):
        with_gradient = [child for child in inner if child is not None]
        return max(1, _count_terms(with_gradient[0], depth + 1)) if len(with_gradient) == 1 else 1
    return 1
