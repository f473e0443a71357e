"""A trained run, opened to be used: its model with the weights of the newest valid checkpoint."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from runner.base.configuration import Request, compose, merge_overrides
from runner.base.errors import DataError, InputMissing, SecurityRefusal
from runner.base.task import Progress
from runner.durable.checkpoint import load_newest, verify
from runner.durable.directory import RunDirectory, default_name
from runner.durable.files import read_object
from runner.engine.assemble import Parts, assemble
from runner.engine.resume import load_model
from runner.engine.state import check_state
from runner.engine.weights import begin_with
from runner.observe.events import Console
from runner.plan.plan import Plan, plan_here


@dataclass(frozen=True)
class Trained:
    """What using a run needs: where it lies, how it was planned for this machine, its parts, and the updates made."""

    directory: RunDirectory
    plan: Plan
    parts: Parts
    update: int


def open_trained(request: Request, console: Console, stack: ExitStack) -> Trained:
    """Return the run that the request names, built anew and with its weights; torch's switches go back with `stack`.

    The run's own settings hold, so the model is the one that was trained; those of the request come on top.
    Raises InputMissing where there is no such run or no checkpoint in it, DataError where all are damaged.
    """
    if any(word.partition("=")[0] == "weights" for word in request.overrides):
        return _open_weights(request, console, stack)
    settings = compose(_where_only(request)).settings
    directory = RunDirectory.find(settings.root, settings.run or "last")
    plan, _ = plan_here(compose(_as_trained(request, directory, settings.root)))
    found = load_newest(directory.checkpoints)
    if found is None:
        where = str(directory.checkpoints)
        if directory.checkpoints.is_dir() and any(directory.checkpoints.iterdir()):
            fix = f"accel-run status run={directory.name}"
            raise DataError("no checkpoint of this run is valid", where=where, fix=fix)
        raise InputMissing("this run has no checkpoint yet", where=where, fix="train it first: accel-run train")
    for newer in sorted(directory.checkpoints.glob("update-*")):
        if newer.name > found.path.name:
            console.warning(f"checkpoint {newer.name} is passed over: {'; '.join(verify(newer))}")
    parts = assemble(plan, stack)
    gc.enable()  # off while everything was imported and built, see cli.py
    checkpoint = check_state(found)
    load_model(parts.bare, checkpoint, parts.parallel)
    state = checkpoint.state
    parts.task.begin_phase(state["phase"])
    parts.task.begin_update(Progress(state["phase"], state["phase_update"], state["total"], state["epoch"]))
    device, precision = f"{plan.device} ({plan.reason('device')})", plan.choices["precision"].name
    console.info(f"{directory.name}: {found.path.name}, on {device}, precision {precision}")
    return Trained(directory, plan, parts, checkpoint.update)


def _open_weights(request: Request, console: Console, stack: ExitStack) -> Trained:
    """Return a new run that was never trained: the task with the weights of a file."""
    configuration = compose(request)
    settings = configuration.settings
    name = settings.run or default_name(configuration.choices["task"].name)
    plan, _ = plan_here(configuration)
    parts = assemble(plan, stack)
    gc.enable()
    said = begin_with(Path(str(settings.weights)).expanduser(), parts.bare, parts.parallel)
    directory = stack.enter_context(RunDirectory.create_or_open(settings.root, name))
    console.info(f"{directory.name}: {said}")
    return Trained(directory, plan, parts, 0)


def _where_only(request: Request) -> Request:
    """Return the words that say which run is meant; the others can be judged only by that run's task."""
    return Request(
        tuple(word for word in request.overrides if word.partition("=")[0] in ("run", "output_root")),
        None,
        request.config_dir,
    )


def _refuse_foreign(task_file: Path, directory: RunDirectory, root: Path) -> None:
    """Raise SecurityRefusal where a run that may come from elsewhere says which Python file is to be run."""
    inside = root.resolve()
    ways = (task_file.resolve(), Path(os.path.normpath(task_file.absolute())))  # a link leads out of what was unpacked
    if directory.path.resolve().parent == inside and not any(
        way.is_relative_to(folder) for way in ways for folder in (inside, root.absolute())
    ):
        return
    raise SecurityRefusal(
        f"this run says that its task is {task_file}; a folder from elsewhere does not decide what code is run",
        where=str(directory.path),
        fix=f"read that file, and where you trust it say --task {task_file}",
    )


def _as_trained(request: Request, directory: RunDirectory, root: Path) -> Request:
    """Return the request that trained the run, with the new one's overrides on top.

    Raises DataError where the run's record is none, SecurityRefusal where it names code and is not one of `root`.
    """
    record = read_object(directory.run_json)
    overrides, named = record.get("overrides"), [record.get(key) for key in ("task_file", "config_dir")]
    is_ours = isinstance(overrides, list) and all(isinstance(word, str) for word in overrides)
    if not is_ours or not all(value is None or isinstance(value, str) for value in named):
        what = "must be a JSON object with the overrides, the task_file and the config_dir of the run, but is not"
        raise DataError(what, where=str(directory.run_json), fix="name a run that was trained here")
    assert isinstance(overrides, list)
    kept = [word for word in overrides if word.partition("=")[0] not in ("run", "resume")]
    task_file, config_dir = (Path(value) if value else None for value in named)
    if request.task_file is None and task_file is not None:
        _refuse_foreign(task_file, directory, root)
    task_file, config_dir = request.task_file or task_file, request.config_dir or config_dir
    return Request(merge_overrides(kept, request.overrides), task_file, config_dir)
