"""Inference: the newest valid checkpoint of a run predicts, and what it took is measured."""

from __future__ import annotations

import gc
import io
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.base.configuration import Request, compose, merge_overrides
from runner.base.errors import DataError, Exit, InputMissing, TaskFault
from runner.durable.directory import RunDirectory
from runner.observe.events import Console
from runner.plan.plan import plan_here

if TYPE_CHECKING:
    from runner.base.task import Content


def infer(request: Request) -> Exit:
    """Predict with a run and write predictions/ in its folder.

    The run's own settings hold, so the model is the one that was trained; those of the request come on top.
    Raises InputMissing where there is no such run or no checkpoint in it, DataError where all are damaged.
    """
    console = Console()  # goes on when nobody reads any more, as in `| head`
    settings = compose(_where_only(request)).settings
    directory = RunDirectory.find(Path(settings.output_root), settings.run or "last")
    configuration = compose(_as_trained(request, directory))
    plan, _ = plan_here(configuration)

    import torch

    from runner.base.task import Progress
    from runner.durable.checkpoint import load, newest_valid, verify
    from runner.engine.assemble import assemble
    from runner.engine.evaluate import as_in_use
    from runner.engine.resume import load_model
    from runner.engine.tasks import explained

    path = newest_valid(directory.checkpoints)
    if path is None:
        where = str(directory.checkpoints)
        if directory.checkpoints.is_dir() and any(directory.checkpoints.iterdir()):
            fix = f"accel-run status run={directory.name}"
            raise DataError("no checkpoint of this run is valid", where=where, fix=fix)
        raise InputMissing("this run has no checkpoint yet", where=where, fix="train it first: accel-run train")
    for newer in sorted(directory.checkpoints.glob("update-*")):
        if newer.name > path.name:
            console.warning(f"checkpoint {newer.name} is passed over: {'; '.join(verify(newer))}")
    with ExitStack() as stack:
        parts = assemble(plan, stack)
        gc.enable()  # off while everything was imported and built, see cli.py
        checkpoint = load(path)
        load_model(parts.bare, checkpoint)
        state = checkpoint.state
        parts.task.begin_phase(state["phase"])
        parts.task.begin_update(Progress(state["phase"], state["phase_update"], state["total"], state["epoch"]))
        device, precision = f"{plan.device} ({plan.reason('device')})", plan.choices["precision"].name
        console.info(f"{directory.name}: {path.name}, on {device}, precision {precision}")
        options = {key: value for key, value in plan.inference.items() if key != "seed"}
        generator = torch.Generator(parts.world.device).manual_seed(int(plan.inference["seed"]))
        if parts.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(parts.world.device)
        latencies, items = [], 0
        with as_in_use(parts.bare, parts.world.device), torch.no_grad(), parts.precision.forward():
            with explained(parts.source, "predict"):
                predictions: Iterator[Any] = iter(parts.task.predict(parts.model, generator, **options))
            while True:
                began = time.perf_counter()
                with explained(parts.source, "predict"):
                    prediction = next(predictions, None)
                parts.world.synchronize()
                if prediction is None:
                    break
                latencies.append(time.perf_counter() - began)
                items += prediction.items
                for name, content in prediction.files.items():
                    directory.write(f"predictions/{name}", _as_bytes(name, content))
                for name, picture in prediction.plots.items():
                    directory.write(f"plots/{name}", picture)
                if prediction.text:
                    console.info(f"\n--- {', '.join(prediction.files)}\n{prediction.text}")
        if not latencies:
            raise TaskFault("predict yielded nothing", where=str(parts.source))
        summary = _summary(latencies, items, parts.task.item, checkpoint.update)
        if parts.world.device.type == "cuda":
            summary["peak_memory_gib"] = torch.cuda.max_memory_allocated(parts.world.device) / 2**30
    directory.write("predictions/summary.json", json.dumps(summary, indent=2) + "\n")
    console.info(
        f"\n{summary['predictions']} predictions, {summary['items_per_s']:.1f} {parts.task.item}s/s;"
        f" latency ms: mean {summary['latency_ms']['mean']:.1f}, median {summary['latency_ms']['median']:.1f},"
        f" p95 {summary['latency_ms']['p95']:.1f}, p99 {summary['latency_ms']['p99']:.1f}"
    )
    console.info(f"written to {directory.predictions}")
    return Exit.DONE


def _where_only(request: Request) -> Request:
    """Return the words that say which run is meant; the others can be judged only by that run's task."""
    return Request(
        tuple(word for word in request.overrides if word.partition("=")[0] in ("run", "output_root")),
        None,
        request.config_dir,
    )


def _as_trained(request: Request, directory: RunDirectory) -> Request:
    """Return the request that trained the run, with the new one's overrides on top."""
    try:
        record = json.loads(directory.run_json.read_text(encoding="utf-8"))
        overrides = [str(word) for word in record["overrides"]]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"cannot be read: {error}", where=str(directory.run_json)) from error
    kept = [word for word in overrides if word.partition("=")[0] not in ("run", "resume")]
    task_file = request.task_file or (Path(record["task_file"]) if record.get("task_file") else None)
    config_dir = request.config_dir or (Path(record["config_dir"]) if record.get("config_dir") else None)
    return Request(merge_overrides(kept, request.overrides), task_file, config_dir)


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
