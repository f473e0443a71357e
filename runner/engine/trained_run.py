"""Open a trained run for use: its model with the weights of the newest valid checkpoint."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from runner.base.configuration import Request, compose
from runner.base.errors import DataError, InputMissing
from runner.base.task import Progress
from runner.durable.checkpoint import load_newest, verify
from runner.durable.directory import RunDirectory, default_name
from runner.durable.run_request import find_run, origin_of
from runner.engine.assemble import Parts, assemble
from runner.engine.checkpoint_state import check_state
from runner.engine.hooks import HOOKS
from runner.engine.resumption import load_model
from runner.engine.weights import begin_with
from runner.observe.events import Console
from runner.plan.planner import Plan, plan_here


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
    directory, root = find_run(request, console.info)
    plan, _ = plan_here(compose(origin_of(directory, root, request).request(request)))
    run = directory.owner
    found = load_newest(directory.checkpoints, run)
    if found is None:
        where = str(directory.checkpoints)
        if directory.checkpoints.is_dir() and any(directory.checkpoints.iterdir()):
            fix = f"accel-run status run={directory.name}"
            raise DataError("no checkpoint of this run is valid", where=where, fix=fix)
        raise InputMissing("this run has no checkpoint yet", where=where, fix="train it first: accel-run train")
    for newer in sorted(directory.checkpoints.glob("update-*")):
        if newer.name > found.path.name:
            console.warning(f"checkpoint {newer.name} is passed over: {'; '.join(verify(newer, run))}")
    parts = assemble(plan, stack)
    gc.enable()  # off while everything was imported and built, see cli.py
    checkpoint = check_state(found)
    load_model(parts.bare, checkpoint, parts.parallel)
    for hook in HOOKS:
        hook.load_for_use(parts, checkpoint)
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
