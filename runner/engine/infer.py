"""Inference: the newest valid checkpoint of a run predicts, and what it took is measured."""

from __future__ import annotations

import dataclasses
import io
import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.base.choice import make
from runner.base.configuration import Request
from runner.base.errors import AccelRunError, DeviceMemoryError, Exit, HostMemoryError, TaskFault
from runner.base.phases import INFERENCE
from runner.observe.events import Console, outlasting_readers
from runner.observe.memory import host_peak_gib, restart_host_peak
from runner.observe.monitor import MONITORS, gpus_of

if TYPE_CHECKING:
    from runner.base.task import Content, Prediction
    from runner.engine.assemble import Parts
    from runner.plan.plan import Plan


OWN_FILES = ("summary.json", "gpu.csv", "monitor.json", "stacks.txt")


def infer(request: Request) -> Exit:
    """Predict with a run and write predictions/ and plots/ in its folder.

    Raises InputMissing where there is no such run or no checkpoint in it, DataError where all are damaged.
    """
    console = Console()  # goes on when nobody reads any more, as in `| head`
    import torch

    from runner.engine.redo import release
    from runner.engine.trained import open_trained
    from runner.engine.watchdog import PREDICTION, watched

    with ExitStack() as stack:
        stack.enter_context(outlasting_readers())
        trained = open_trained(request, console, stack)
        directory, plan, parts = trained.directory, trained.plan, trained.parts
        if parts.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(parts.world.device)
        restart_host_peak()
        watch = plan.choices["monitor"]
        gpus = gpus_of([plan.device_uuid] if plan.device_uuid else [], parts.world.device.type)
        directory.inner("predictions")
        monitor = make(MONITORS, watch.function, directory.predictions / "gpu.csv", gpus, **watch.options)
        monitor.enter_phase(INFERENCE)
        stack.enter_context(monitor)
        pulse = stack.enter_context(
            watched(
                plan, parts.world, file="predictions/stacks.txt",
                keep=lambda stacks: directory.write("predictions/stacks.txt", stacks),
            )
        )  # fmt: skip

        latencies: list[float] = []

        def begins() -> None:
            pulse.now = (PREDICTION, len(latencies) + 1)

        def predicted(now: Plan) -> int:
            """Write all predictions; return the number of items."""
            items = 0
            latencies.clear()
            with closing(timed_predictions(now, parts, begins)) as predictions:
                for prediction, seconds in predictions:
                    pulse.done.add(PREDICTION)
                    latencies.extend([seconds] if prediction.items else [])
                    items += prediction.items
                    _refuse_taken(prediction.files, str(parts.source))
                    for name, content in prediction.files.items():
                        directory.write(f"predictions/{name}", _as_bytes(name, content))
                    for name, picture in prediction.plots.items():
                        directory.write(f"plots/{name}", picture)
                    if prediction.text:
                        console.info(f"\n--- {', '.join(prediction.files)}\n{prediction.text}")
            return items

        while True:
            try:
                items = predicted(plan)
                break
            except (DeviceMemoryError, HostMemoryError) as error:
                plan = _in_smaller_batches(plan, error, console)
            release(parts.world.device)
        if not latencies:
            raise TaskFault("predict yielded nothing", where=str(parts.source), fix="yield at least one Prediction")
        summary = _summary(latencies, items, parts.task.item, trained.update)
        summary["peak_host_gib"] = host_peak_gib()
        if parts.world.device.type == "cuda":
            summary["peak_memory_gib"] = torch.cuda.max_memory_allocated(parts.world.device) / 2**30
    monitor.stop()
    for notice in monitor.news():
        if notice.level == "warning":
            console.warning(notice.text)
    if monitor.latest():
        directory.write("predictions/monitor.json", json.dumps(monitor.summary().to_json(), indent=2) + "\n")
    directory.write("predictions/summary.json", json.dumps(summary, indent=2) + "\n")
    made = f"{len(latencies)} prediction{'s' * (len(latencies) > 1)}"
    console.info(
        f"\n{made}, {summary['items_per_s']:.1f} {parts.task.item}s/s;"
        f" latency ms: mean {summary['latency_ms']['mean']:.1f}, median {summary['latency_ms']['median']:.1f},"
        f" p95 {summary['latency_ms']['p95']:.1f}, p99 {summary['latency_ms']['p99']:.1f}"
    )
    console.info(f"written to {directory.shown / directory.predictions.name}")
    return Exit.DONE


def timed_predictions(
    plan: Plan, parts: Parts, begins: Callable[[], object] = lambda: None
) -> Generator[tuple[Prediction, float]]:
    """Yield what the task predicts with the model as it is, each with the seconds that it took.

    begins  called before each of them
    """
    import torch

    from runner.engine.evaluate import as_in_use
    from runner.engine.tasks import explained

    options = {key: value for key, value in plan.inference.items() if key != "seed"}
    generator = torch.Generator(parts.world.device).manual_seed(int(plan.inference["seed"]))
    with as_in_use(parts.bare, parts.world.device), torch.no_grad(), parts.precision.forward():
        with explained(parts.source, "predict"):
            predictions: Iterator[Prediction] = iter(parts.task.predict(parts.model, generator, **options))
        while True:
            begins()
            began = time.perf_counter()
            with explained(parts.source, "predict"):
                prediction = next(predictions, None)
            parts.world.synchronize()
            if prediction is None:
                return
            yield prediction, time.perf_counter() - began


def _in_smaller_batches(plan: Plan, error: AccelRunError, console: Console) -> Plan:
    """Return the plan with batches half as large; raises the error where there is nothing to halve, or to be halved."""
    from runner.base.shortage import halved

    size = plan.inference.get("batch_size")
    less = halved(size) if isinstance(size, int) else None
    if less is None or plan.settings.on_oom == "stop":
        raise error
    console.warning(
        f"{error.problems[0].what.rstrip('.')}. The predictions are made again with batch_size={less} instead of"
        f" {size}; say inference.batch_size={less} to begin so"
    )
    return dataclasses.replace(plan, inference={**plan.inference, "batch_size": less})


def _refuse_taken(names: Iterable[str], where: str) -> None:
    """Raise TaskFault for a file that the runner writes itself: it would be lost."""
    taken = [name for name in names if name in OWN_FILES]
    if taken:
        raise TaskFault(
            f"a prediction must not be named {taken[0]}, which is the runner's", where=where, fix="rename it"
        )


def _as_bytes(name: str, content: Content) -> bytes:
    if isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode()
    buffer = io.BytesIO()
    np.save(buffer, content, allow_pickle=False)
    return buffer.getvalue()


def _summary(latencies: list[float], items: int, item: str, update: int) -> dict[str, Any]:
    ms = 1e3 * np.array(latencies)
    return {
        "checkpoint_update": update,
        "predictions": len(latencies),
        "items": items,
        "item": item,
        "seconds": float(ms.sum() / 1e3),
        "items_per_s": items / max(float(ms.sum()) / 1e3, 1e-9),
        "latency_ms": {
            "mean": float(ms.mean()),
            "median": float(np.median(ms)),
            "p95": float(np.percentile(ms, 95)),
            "p99": float(np.percentile(ms, 99)),
        },
    }
