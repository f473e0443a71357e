"""Inspect the code of a task: slow lines, device synchronizations, samples, shapes, terms of the loss.

Inspection slows the code down, so nothing here is a measurement of updates.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from runner.axes.dataloader import Fetcher
from runner.base.batch import are_equal, map_tensors
from runner.base.order import MicroBatchKey
from runner.base.task import Task
from runner.engine.error_diagnosis import is_task_file
from runner.engine.phase import Phase
from runner.engine.run import TrainingRun
from runner.profiling.device_waits import DeviceWaits, Line

SECONDS = 1.0  # for each inspection
UPDATES = 3
BATCHES = 64  # whose shapes are inspected
SAMPLES = 16
Answer = dict[str, Any]


def probe(run: TrainingRun, phase: Phase, updates: Iterator[int]) -> Answer:
    """Return what was found; what could not be inspected is absent."""
    source = run.parts.source
    found: Answer = {
        "source": str(source),
        "has_begin_update": type(run.parts.task).begin_update is not Task.begin_update,
    }
    found |= _samples(phase.loader.fetcher, source)
    found |= _shapes(phase)
    found |= batch_of(phase)
    if run.parts.world.device.type == "cuda":
        found["waits"] = _waits(run, updates)
    return found


# ---------------------------------------------------------------- samples


def _samples(fetcher: Fetcher, source: Path) -> Answer:
    """Return the cost of reading samples as the run does, and the slowest line of the task's file in it."""
    num, seconds, busy = 1, 0.0, 0.0
    while seconds < SECONDS / 20 and num <= SAMPLES:  # several at once: a dataset may read them together
        num = min(2 * num, len(fetcher)) if num < len(fetcher) else num
        began, busy = time.perf_counter(), time.process_time()
        batch = fetcher[_first(num)].batch
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
        if num == len(fetcher):
            break
    again = fetcher[_first(num)._replace(epoch=1)].batch  # random draws of a dataset repeat within an epoch
    with timed_lines(source) as lines:
        fetcher[_first(num)]
    found: Answer = {
        "sample_ms": 1e3 * seconds / num,
        "sample_busy": min(1.0, busy / max(seconds, 1e-9)),  # share in which this process computed instead of waiting
        "sample_bytes": _nbytes(batch) / num,
        "same_when_read_again": are_equal(batch, again),
        "changes_with_epoch": fetcher.set_epoch is not None,
    }
    line = max(lines, key=lambda line: lines[line], default=None)
    if line is not None:
        found["slow_line"] = {"file": line[0], "line": line[1], "ms": 1e3 * lines[line] / num}
    return found


def _first(num: int) -> MicroBatchKey:
    return MicroBatchKey(0, list(range(num)), last=True)


def _nbytes(batch: Any) -> int:
    sizes: list[int] = []
    map_tensors(lambda tensor: sizes.append(tensor.nbytes), batch)
    return sum(sizes)


# ---------------------------------------------------------------- batches


def _shapes(phase: Phase) -> Answer:
    """Return how many shapes complete micro-batches have; shorter ones at the end of an epoch do not count."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    began, num = time.perf_counter(), 0
    whole = phase.planned.batch.micro_batch_size
    for number, micro in enumerate(phase.order.from_update(0)):
        if len(micro.indices) == whole:
            seen.add(tuple(_shapes_of(phase.loader.fetcher[micro].batch)))
            num += 1
        if number >= BATCHES or time.perf_counter() - began > SECONDS:
            break
    return {"num_shapes": len(seen), "batches_looked_at": num}


def _shapes_of(batch: Any, *, floating: bool = False) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors of a batch; with `floating`, only of floating-point tensors."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, batch)
    return [tuple(tensor.shape) for tensor in tensors if tensor.is_floating_point() or not floating]


def batch_of(phase: Phase) -> Answer:
    """Return the shape of the model's input and the number of terms of its loss."""
    given = next(phase.feed).batch
    shapes = _shapes_of(given, floating=True)
    found: Answer = {"input_shape": max(shapes, key=len)} if shapes else {}
    with phase.run_.parts.precision.forward():
        total, _ = phase.work.training.loss(phase.work.training.model, given)  # type: ignore[attr-defined]
    found["loss_terms"] = _terms(total.grad_fn)
    return found


def _terms(node: Any, depth: int = 0) -> int:
    """Return the number of summands at the root of an autograd graph, through additions and scaling."""
    if node is None or depth > 200:
        return 0
    name = type(node).__name__
    inner = [child for child, _ in node.next_functions]
    if name.startswith(("AddBackward", "SubBackward")):
        return sum(_terms(child, depth + 1) for child in inner)
    if name.startswith(
        ("MulBackward", "DivBackward", "NegBackward", "SumBackward", "ToCopyBackward", "SqueezeBackward")
    ):
        with_gradient = [child for child in inner if child is not None]
        return max(1, _terms(with_gradient[0], depth + 1)) if len(with_gradient) == 1 else 1
    return 1


# ---------------------------------------------------------------- lines


def _waits(run: TrainingRun, updates: Iterator[int]) -> list[Answer]:
    """Return the lines of the task at which the host waits for the device, with the number per update."""
    waits = DeviceWaits(run.parts.bare, partial(is_task_file, source=run.parts.source))
    waits.start()
    try:
        for _ in _some(updates, UPDATES):
            waits.update()
    finally:
        waits.stop()
    return [{"file": file, "line": number, "times": times} for (file, number), times in waits.lines().items()]


def _some(updates: Iterator[int], most: int) -> Iterator[int]:
    """Yield at least one update, and no more than SECONDS allow."""
    began = time.perf_counter()
    for number, update in enumerate(updates, 1):
        yield update
        if number == most or time.perf_counter() - began >= SECONDS:
            return


@contextmanager
def timed_lines(source: Path) -> Iterator[dict[Line, float]]:
    """Fill the mapping with the seconds of each line of that file, including calls.

    The cost of tracing is subtracted.
    """
    seconds: dict[Line, float] = {}
    counts: Counter[Line] = Counter()
    wanted = str(source)
    stack: list[FrameType] = []
    last: list[Any] = [None, 0.0]  # current line, since when

    def account(now: float, line: Line | None) -> None:
        if last[0] is not None:
            seconds[last[0]] = seconds.get(last[0], 0.0) + now - last[1]
            counts[last[0]] += 1
        last[0] = line

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        now = time.perf_counter()
        if event == "line":
            account(now, (wanted, frame.f_lineno))
        elif event == "return":
            stack.pop()
            outer = stack[-1] if stack else None
            account(now, (wanted, outer.f_lineno) if outer is not None else None)
        last[1] = time.perf_counter()
        return local

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != wanted or _is_generator(frame.f_code):
            return None
        stack.append(frame)
        return local

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield seconds
    finally:
        sys.settrace(before)
        cost = _tracing_cost() if counts else 0.0
        for line, number in counts.items():
            seconds[line] = max(0.0, seconds[line] - cost * number)


def _is_generator(code: CodeType) -> bool:
    return bool(
        code.co_flags & 0x20
    )  # inspect.CO_GENERATOR: it is left and entered again, which the stack cannot follow


def _tracing_cost() -> float:
    """Return the seconds that the interpreter takes to trace a line, outside of `local`."""
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
