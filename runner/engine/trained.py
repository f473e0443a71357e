"""A trained run, opened to be used: its model with the weights of the newest valid checkpoint."""

from __future__ import annotations

import gc
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from runner.base.configuration import Request, compose, merge_overrides
from runner.base.errors import DataError, InputMissing
from runner.base.task import Progress
from runner.durable.checkpoint import Loaded, load, newest_valid, verify
from runner.durable.directory import RunDirectory
from runner.engine.assemble import Parts, assemble
from runner.engine.resume import load_model
from runner.observe.events import Console
from runner.plan.plan import Plan, plan_here


@dataclass(frozen=True)
class Trained:
    """What using a run needs: where it lies, how it was planned for this machine, its parts, and its checkpoint."""

    directory: RunDirectory
    plan: Plan
    parts: Parts
    checkpoint: Loaded


def open_trained(request: Request, console: Console, stack: ExitStack) -> Trained:
    """Return the run that the request names, built anew and with its weights; torch's switches go back with `stack`.

    The run's own settings hold, so the model is the one that was trained; those of the request come on top.
    Raises InputMissing where there is no such run or no checkpoint in it, DataError where all are damaged.
    """
    settings = compose(_where_only(request)).settings
    directory = RunDirectory.find(Path(settings.output_root), settings.run or "last")
    plan, _ = plan_here(compose(_as_trained(request, directory)))
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
    parts = assemble(plan, stack)
    gc.enable()  # off while everything was imported and built, see cli.py
    checkpoint = load(path)
    load_model(parts.bare, checkpoint, parts.parallel)
    state = checkpoint.state
    parts.task.begin_phase(state["phase"])
    parts.task.begin_update(Progress(state["phase"], state["phase_update"], state["total"], state["epoch"]))
    device, precision = f"{plan.device} ({plan.reason('device')})", plan.choices["precision"].name
    console.info(f"{directory.name}: {path.name}, on {device}, precision {precision}")
    return Trained(directory, plan, parts, checkpoint)


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
