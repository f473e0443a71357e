"""Inspect the code of a task: its slowest line, samples, shapes, terms of the loss.

Inspection slows the code down, so its times are not those of updates.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
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
Line = tuple[str, int]  # file, number


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
    """Return the cost of reading samples as the run does, and the slowest line of the task's file."""
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
    with time_lines(source) as lines:
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
    line = max(lines, key=lambda line: lines[line], default=None)
    if line is not None:
        result["slow_line"] = {"file": line[0], "line": line[1], "ms": 1e3 * lines[line] / num}
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


# ---------------------------------------------------------------- lines


@contextmanager
def time_lines(source: Path) -> Iterator[dict[Line, float]]:
    """Trace the block; yield a mapping that receives the seconds of each line of the file, including calls.

    The cost of tracing is subtracted.
    """
    seconds: dict[Line, float] = {}
    counts: Counter[Line] = Counter()
    filename = str(source)
    stack: list[FrameType] = []
    last: list[Any] = [None, 0.0]  # current line, and its start time

    def account(now: float, line: Line | None) -> None:
        if last[0] is not None:
            seconds[last[0]] = seconds.get(last[0], 0.0) + now - last[1]
            counts[last[0]] += 1
        last[0] = line

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        now = time.perf_counter()
        if event == "line":
            account(now, (filename, frame.f_lineno))
        elif event == "return":
            stack.pop()
            outer = stack[-1] if stack else None
            account(now, (filename, outer.f_lineno) if outer is not None else None)
        last[1] = time.perf_counter()
        return local

    def trace_call(frame: FrameType, event: str, argument: Any) -> Any:
        # Generators are not traced, because `stack` cannot follow frames that are suspended.
        if frame.f_code.co_filename != filename or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return None
        stack.append(frame)
        return local

    before = sys.gettrace()
    sys.settrace(trace_call)
    try:
        yield seconds
    finally:
        sys.settrace(before)
        cost = _tracing_cost() if counts else 0.0
        for line, number in counts.items():
            seconds[line] = max(0.0, seconds[line] - cost * number)


def _tracing_cost() -> float:
    """Return the overhead of the interpreter per traced line in seconds, outside of the trace function."""
    lines = 2000

    def work() -> float:
        began = time.perf_counter()
        for _ in range(lines):
            pass
        return time.perf_counter() - began

    def local(*_: Any) -> Callable[..., Any]:
        return local

    plain = work()
    before = sys.gettrace()
    sys.settrace(lambda frame, *_: local if frame.f_code is work.__code__ else None)
    try:
        traced = work()
    finally:
        sys.settrace(before)
    return max(0.0, traced - plain) / (2 * lines)
