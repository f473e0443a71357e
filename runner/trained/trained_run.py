"""Open a trained run for use: its model with the weights of one of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from runner.base.errors import ConfigError, IncompatibleResume, Problem
from runner.base.task import Progress, Task
from runner.config.configuration import Configuration, compose
from runner.config.request import Request, format_override, merge_overrides, override_key
from runner.distributed.world import World
from runner.durable.checkpoint import load
from runner.durable.checkpoint_choice import choose_checkpoint
from runner.durable.directory import RunDirectory, generate_run_name
from runner.durable.record_files import read_record
from runner.durable.run_request import find_run, load_run_request
from runner.engine.checkpoints.checkpoint_state import check_state
from runner.engine.contract.lora import make_adapter
from runner.engine.contract.task_loading import task_errors
from runner.engine.hooks import HOOKS, custom
from runner.engine.parts.assemble import Parts, assemble, begin_earlier_phases
from runner.engine.parts.frozen_base import load_weights
from runner.engine.parts.weights import load_initial_weights
from runner.host.gc_pause import end_pause
from runner.plan.planner import plan_this_process
from runner.plan.run_plan import PhasePlan, Plan
from runner.records.events import Console
from runner.tensors.global_rng import random_state, restore_random_state


@dataclass(frozen=True)
class ModelSource:
    """What to open: a run with one of its checkpoints, or the task on the command line with the weights of `weights=`.

    name        name of the run, or of the new run directory for results with `weights=`
    run         its directory, opened for reading; None with `weights=`
    checkpoint  its path; None with `weights=`
    labels      best or last, and its metric
    """

    configuration: Configuration
    name: str
    run: RunDirectory | None = None
    checkpoint: Path | None = None
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainedModel:
    """A trained model with its plan on this machine, its parts, and the directory for results.

    phase   phase that trained the model
    update  number of completed updates of all phases; 0 with `weights=`
    """

    directory: RunDirectory
    plan: Plan
    parts: Parts
    phase: str
    update: int

    @property
    def phase_plan(self) -> PhasePlan:
        """The plan of the phase. Raises IncompatibleResume if the task no longer has this phase."""
        found = self.plan.phase(self.phase)
        if found is None:
            raise IncompatibleResume(
                f"the checkpoint belongs to phase {self.phase}, which the task does not have",
                where="PHASES",
                fix="use the task that the run was trained with",
            )
        return found


def find_source(request: Request, console: Console, checkpoint: str | None = None) -> ModelSource:
    """Return what the request names: a run, by default the last one, or the weights of `weights=`.

    A run is opened with its recorded settings; those of the request override them. Recorded paths are relative to the
    working directory of the run, and paths of the request to the current one.

    checkpoint  best, last or an update; None: the best one if there is one, else the last one
    Raises InputMissing if there is no such run or checkpoint, DataError if it is damaged, ConfigError for `weights=`
    with the name of a trained run.
    """
    if any(override_key(override) in ("weights", "weights.source") for override in request.overrides):
        configuration = compose(request, has_updates=False)
        name = configuration.settings.run or generate_run_name(configuration.choices["task"].name)
        if read_record(configuration.settings.root / name).is_known:
            what = f"{name} is a trained run, whose settings cannot be combined with weights="
            fix = f"omit weights= to use its checkpoints, or use another folder for the results: run={name}-given"
            raise ConfigError(Problem(what, f"run={name}", fix))
        return ModelSource(configuration, name)
    directory, root = find_run(request, console.info)
    origin = load_run_request(directory, root, request).with_absolute_paths()
    configuration = compose(origin.request(request), has_updates=False)
    chosen = choose_checkpoint(directory, checkpoint, lambda text: console.warning(f"checkpoint {text}"))
    return ModelSource(configuration, directory.name, directory, chosen.checkpoint.path, chosen.labels)


def open_source(
    source: ModelSource,
    plan: Plan,
    console: Console,
    stack: ExitStack,
    world: World | None = None,
    *,
    owns_results: bool = True,
) -> TrainedModel:
    """Build the task and load its weights; torch's global settings are restored when `stack` closes.

    world         the ranks that use the model together; None: this process alone
    owns_results  False: with `weights=`, another process creates and locks the directory for results
    """
    checkpoint = check_state(load(source.checkpoint)) if source.run and source.checkpoint else None
    parts = assemble(plan, stack, world, loaded=checkpoint.names("model") if checkpoint else frozenset())
    end_pause()
    if source.run is None or source.checkpoint is None or checkpoint is None:
        directory = _open_results(source, plan, stack, owns_results=owns_results and parts.world.is_first)
        return _open_weights(source, plan, parts, console, directory)
    state = checkpoint.state
    _begin_phases(parts, state["records"], state["phase"])
    load_weights(parts, checkpoint)
    for hook in HOOKS:
        hook.load_for_inference(parts, checkpoint)
    custom.load_for_inference(parts, checkpoint)
    _begin_update(parts, Progress(state["phase"], state["phase_update"], state["total"], state["epoch"]))
    device, precision = f"{plan.device} ({plan.reason('device')})", plan.choices["precision"].name
    ranks = f" and {plan.world_size - 1} more" if plan.world_size > 1 else ""
    labels = f" ({', '.join(source.labels)})" if source.labels else ""
    console.info(f"{source.name}: {source.checkpoint.name}{labels}, on {device}{ranks}, precision {precision}")
    return TrainedModel(source.run, plan, parts, state["phase"], checkpoint.update)


def open_trained(request: Request, console: Console, stack: ExitStack, checkpoint: str | None = None) -> TrainedModel:
    """Find and open a model in this process alone; see `find_source`."""
    source = find_source(request, console, checkpoint)
    return open_source(source, plan_this_process(source.configuration)[0], console, stack)


def load_trained_model(directory: RunDirectory, request: Request, checkpoint: str | None) -> nn.Module:
    """Return the model of a run with the weights of a checkpoint, on the CPU, in float32 and eval mode.

    checkpoint  see `find_source`
    Global random generators and global settings of torch keep their state.
    """
    cpu = torch.device("cpu")
    tensors, rest = random_state(cpu)
    run = format_override("run", str(directory.path.absolute()))
    overrides = merge_overrides(request.overrides, (run,))
    with ExitStack() as stack:
        stack.callback(restore_random_state, tensors, rest, cpu)
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        console = Console(level="warning")
        source = find_source(replace(request, overrides=overrides), console, checkpoint)
        source = replace(source, configuration=_make_portable(source.configuration))
        trained = open_source(source, plan_this_process(source.configuration)[0], console, stack)
    return trained.parts.bare.eval()


def _make_portable(configuration: Configuration) -> Configuration:
    """Return the configuration for a plain model on the CPU, without the wrappers of the runner.

    A custom precision is kept, because its function may have changed the modules of the model.
    """
    portable = ["device=cpu", "parallelism=single", "compile=off", "memory=none", "prefetch=none"]
    if not configuration.choices["precision"].location:
        portable.append("precision=fp32")
    request = configuration.request
    return compose(replace(request, overrides=merge_overrides(request.overrides, portable)), has_updates=False)


def broadcast_name(source: ModelSource, world: World) -> ModelSource:
    """Return the source with the run name of rank 0: a generated name has a random part."""
    return replace(source, name=world.broadcast(source.name))


def _open_results(source: ModelSource, plan: Plan, stack: ExitStack, *, owns_results: bool) -> RunDirectory:
    """Return the directory for results with `weights=`: a run directory in which nothing is trained."""
    root = plan.settings.root
    if not owns_results:
        return RunDirectory.join(root / source.name)
    return stack.enter_context(RunDirectory.create_or_open(root, source.name))


def _open_weights(
    source: ModelSource, plan: Plan, parts: Parts, console: Console, directory: RunDirectory
) -> TrainedModel:
    """Load the weights of `weights=`."""
    settings = plan.settings
    load_given = partial(
        load_initial_weights, settings, parts.bare, parts.parallel, make_adapter(plan.choices["adapter"])
    )
    phase = plan.selected[-1]
    _begin_phases(parts, [each.name for each in plan.selected], phase.name)
    message = load_given()
    # The progress is that at the end of the phase, because a value such as a temperature then has its last value. Only
    # the unit in which the length is set is known here: the length in the other one would depend on the data.
    total = phase.updates or 1
    _begin_update(parts, Progress(phase.name, total, total, float(phase.epochs or 0)))
    if type(parts.task).begin_update is not Task.begin_update:
        load_given()  # again: if begin_update sets a buffer, the weights contain its trained value
    console.info(f"{source.name}: {message}")
    return TrainedModel(directory, plan, parts, phase.name, 0)


def _begin_phases(parts: Parts, phases: Iterable[str], last: str) -> None:
    """Call `begin_phase` as training does: before the weights are loaded, because it may change the model."""
    begin_earlier_phases(parts, phases, last)
    with task_errors(parts.source, "begin_phase()"):
        parts.task.begin_phase(last)


def _begin_update(parts: Parts, progress: Progress) -> None:
    with task_errors(parts.source, "begin_update()"):
        parts.task.begin_update(progress)
