"""Inspect the code of a task: its slowest function, samples, shapes, terms of the loss.

Inspection slows the code down, so its times are not those of updates.
"""

from __future__ import annotations

import cProfile
import time
from pathlib import Path
from types import CodeType
from typing import Any

from torch import Tensor

from runner.base.batch import are_equal, map_tensors
from runner.base.order import MicroBatchKey
from runner.base.task import Task
from runner.engine.phase import Phase
from runner.engine.run import TrainingRun
from runner.loading.fetcher import Fetcher

SECONDS = 1.0  # for each inspection
BATCHES = 64  # whose shapes are inspected
SAMPLES = 16
Reply = dict[str, Any]


def probe(run: TrainingRun, phase: Phase) -> Reply:
    """Inspect the task; keys that do not apply are absent."""
    source = run.parts.source
    result: Reply = {
        "source": str(source),
        "has_begin_update": type(run.parts.task).begin_update is not Task.begin_update,
    }
    result |= _inspect_samples(phase.loader.fetcher, source)
    shapes: set[tuple[tuple[int, ...], ...]] = set()  # of full micro-batches; those at the end of an epoch are shorter
    began, num = time.perf_counter(), 0
    full_size = phase.planned.batch.micro_batch_size
    for number, micro in enumerate(phase.order.from_update(0)):
        if len(micro.indices) == full_size:
            shapes.add(tuple(_get_shapes(phase.loader.fetcher[micro].batch)))
            num += 1
        if number >= BATCHES or time.perf_counter() - began > SECONDS:
            break
    result |= {"num_shapes": len(shapes), "batches_looked_at": num}
    return result | inspect_batch(phase)


# ---------------------------------------------------------------- samples


def _inspect_samples(fetcher: Fetcher, source: Path) -> Reply:
    """Return the cost of reading samples as the run does, and the slowest function of the task's file."""
    num, seconds, busy = 1, 0.0, 0.0
    while seconds < SECONDS / 20 and num <= SAMPLES:  # a batch: a dataset may read its samples together
        num = min(2 * num, len(fetcher)) if num < len(fetcher) else num
        began, busy = time.perf_counter(), time.process_time()
        batch = fetcher[_first_samples(num)].batch
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
        if num == len(fetcher):
            break
    again = fetcher[_first_samples(num)._replace(epoch=1)].batch  # random draws of a dataset repeat within an epoch
    with cProfile.Profile(time.perf_counter) as profile:
        fetcher[_first_samples(num)]
    sizes: list[int] = []
    map_tensors(lambda tensor: sizes.append(tensor.nbytes), batch)
    result: Reply = {
        "sample_ms": 1e3 * seconds / num,
        "sample_busy": min(1.0, busy / max(seconds, 1e-9)),  # CPU share of the time
        "sample_bytes": sum(sizes) / num,
        "same_when_read_again": are_equal(batch, again),
        "changes_with_epoch": fetcher.set_epoch is not None,
    }
    slowest = find_slowest_function(profile, source)
    if slowest is not None:
        result["slow_function"] = slowest | {"ms": 1e3 * slowest["seconds"] / num}
    return result


def _first_samples(num: int) -> MicroBatchKey:
    return MicroBatchKey(0, list(range(num)), last=True)


# ---------------------------------------------------------------- batches


def _get_shapes(batch: Any, *, floating: bool = False) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors of a batch; with `floating`, only of floating-point tensors."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, batch)
    return [tuple(tensor.shape) for tensor in tensors if tensor.is_floating_point() or not floating]


def inspect_batch(phase: Phase) -> Reply:
    """Return the shape of the model's input and the number of terms of its loss."""
    batch = next(phase.feed).batch
    shapes = _get_shapes(batch, floating=True)
    result: Reply = {"input_shape": max(shapes, key=len)} if shapes else {}
    with phase.run.parts.precision.forward():
        total, _ = phase.work.training.loss(phase.work.training.model, batch)  # type: ignore[attr-defined]
    result["loss_terms"] = _count_terms(total.grad_fn)
    return result


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


# ---------------------------------------------------------------- functions


def find_slowest_function(profile: cProfile.Profile, source: Path) -> Reply | None:
    """Return the function of the file with the most time, without other functions of the file that it calls."""
    own_s: dict[CodeType, float] = {}
    for entry in profile.getstats():
        if isinstance(entry.code, CodeType) and entry.code.co_filename == str(source):
            inner = (call for call in entry.calls or () if getattr(call.code, "co_filename", "") == str(source))
            own_s[entry.code] = entry.totaltime - sum(call.totaltime for call in inner)
    if not own_s:
        return None
    code = max(own_s, key=lambda code: own_s[code])
    return {"file": str(source), "line": code.co_firstlineno, "function": code.co_name, "seconds": own_s[code]}
