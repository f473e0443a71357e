"""Open a run: build its parts and observers, and find the checkpoint that it resumes from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from runner.base.errors import AccelRunError
from runner.base.json_values import to_json
from runner.config.chosen_option import make_chosen
from runner.config.configuration import compose
from runner.config.request import Request, override_key
from runner.distributed.world import World
from runner.durable.checkpoint import LoadedCheckpoint, load
from runner.durable.directory import RunDirectory
from runner.durable.files import AppendLog
from runner.durable.signals import StopRequest
from runner.engine.checkpoints.checkpoint_state import check_state
from runner.engine.checkpoints.resumption import find_resume_point
from runner.engine.contract.lora import make_adapter
from runner.engine.evaluation.meter import UpdateClock
from runner.engine.parts.assemble import assemble
from runner.engine.parts.weights import load_initial_weights
from runner.engine.phase import Phase
from runner.engine.process.attempt import RunAttempt, UnrecordedAttempt
from runner.engine.process.job import Job, choose_run_name
from runner.engine.process.run_screen import Screen, warnings_on
from runner.engine.run import Observers, Provenance, Tally, TrainingRun, silent_observers
from runner.host.other_load import OtherLoad
from runner.host.run_queue import process_tree_cpu_s
from runner.monitor.monitor_thread import MONITORS, NoMonitor, monitored_gpus
from runner.plan.inventory import take_inventory
from runner.plan.planner import make_plan
from runner.plan.rank_devices import RankDevice
from runner.plan.run_plan import Plan
from runner.profiling.profiler import PROFILERS
from runner.trackers.tracker import TRACKERS


def open_first_rank(
    job: Job, world: World, attempt: RunAttempt, screen: Screen, stack: ExitStack, stop: StopRequest
) -> tuple[TrainingRun, LoadedCheckpoint | None]:
    """Build the run on rank 0; return it with the checkpoint to resume from.

    stack  closes the files and threads of the run
    """
    plan, directory = job.plan, attempt.directory

    clock = UpdateClock()
    metrics = stack.enter_context(AppendLog(directory.metrics))
    start = find_resume_point(plan, directory, screen, metrics)
    resumes = start is not None and start.path.parent == directory.checkpoints
    attempt.identify(directory.owner, start if resumes else None, is_new=plan.settings.resume == "fresh")
    if not resumes:  # run.json may contain the measurements of a previous run
        attempt.record = replace(attempt.record, tracker_id=None, evidence=None, changes=())
    tracker_id = attempt.record.tracker_id
    tracker = make_chosen(TRACKERS, plan.choices["tracker"], directory.path, directory.name, plan.values(), tracker_id)
    process = replace(attempt.record.process, metrics_bytes=metrics.length)
    attempt.record = replace(attempt.record, tracker_id=tracker.id, process=process)
    attempt.begin(job)
    world.broadcast(str(start.path) if start else None)
    monitor = _make_monitor(plan, world, directory.gpu_csv)
    stack.callback(_close_monitor, monitor, directory, screen)
    parts = assemble(plan, stack, world, loaded=start.names("model") if start else frozenset())
    profiler = make_chosen(
        PROFILERS, plan.choices["profiler"], lambda name, data: directory.write(f"profile/{name}", data)
    )
    observers = Observers(metrics, tracker, monitor, profiler, screen)
    if start is None and plan.settings.weights.source:
        screen.info(
            load_initial_weights(plan.settings, parts.bare, parts.parallel, make_adapter(plan.choices["adapter"]))
        )
    resumed = tracker.id if resumes else None
    origin = Provenance(attempt.record.uid, resumed)
    return TrainingRun(
        plan,
        parts,
        directory,
        observers,
        stop,
        provenance=origin,
        tally=Tally(clock, OtherLoad(partial(process_tree_cpu_s, _local_root(world)))),
    ), start


def open_other_rank(
    job: Job, world: World, stack: ExitStack, stop: StopRequest
) -> tuple[TrainingRun, LoadedCheckpoint | None]:
    """Build the run on a rank other than 0, which does not print; rank 0 decides from which checkpoint it resumes.

    On each additional machine, one rank writes the measurements of the local GPUs.
    """
    path = world.broadcast(None)
    start = check_state(load(Path(path), hashes_tensors=False)) if path else None
    directory = RunDirectory.join(job.folder)
    screen = stack.enter_context(Screen(directory, speaks=False, machine=world.machine_name))
    stack.enter_context(warnings_on(screen))
    parts = assemble(job.plan, stack, world, loaded=start.names("model") if start else frozenset())
    if start is None and job.plan.settings.weights.source:
        load_initial_weights(job.plan.settings, parts.bare, parts.parallel, make_adapter(job.plan.choices["adapter"]))
    observers = silent_observers(screen, make_chosen(PROFILERS, job.plan.choices["profiler"], None))
    if world.machine_name:
        observers.monitor = _make_monitor(job.plan, world, directory.path / f"gpu-{world.machine_name}.csv")
        stack.callback(_close_monitor, observers.monitor, directory, screen, f"monitor-{world.machine_name}.json")
    return TrainingRun(job.plan, parts, directory, observers, stop), start


@contextmanager
def open_phase(request: Request, world: World | None = None) -> Iterator[Phase]:
    """Yield the first phase of a new run, ready to train, for measurements.

    world  the ranks that open the run together; None: this process opens it alone
    """
    with ExitStack() as stack:
        run, start = _open(request, world, stack)
        with Phase(run, run.plan.selected[0], start) as phase:
            yield phase


@contextmanager
def open_new_run(request: Request, world: World | None = None) -> Iterator[TrainingRun]:
    """Yield a new run, ready for any of its phases.

    world  the ranks that open the run together; None: this process opens it alone
    """
    with ExitStack() as stack:
        yield _open(request, world, stack)[0]


def _open(request: Request, world: World | None, stack: ExitStack) -> tuple[TrainingRun, LoadedCheckpoint | None]:
    # Measurements do not depend on the initial weights, whose file may no longer exist.
    overrides = tuple(
        override for override in request.overrides if override_key(override).partition(".")[0] != "weights"
    )
    request = replace(request, overrides=overrides)
    configuration, inventory = compose(request), take_inventory()
    ranks = [RankDevice.of(None, inventory)] * world.world_size if world else None
    job = Job(
        request, configuration, make_plan(configuration, inventory, ranks), inventory, choose_run_name(configuration)
    )
    world = world or World(torch.device(job.plan.device))
    stop = stack.enter_context(StopRequest())
    if world.is_first:
        directory = stack.enter_context(RunDirectory.create_or_open(job.folder.parent, job.name))
        screen = stack.enter_context(Screen(directory))
        return open_first_rank(job, world, UnrecordedAttempt(directory), screen, stack, stop)
    return open_other_rank(job, world, stack, stop)


def _local_root(world: World) -> int | None:
    """Return the PID of the process that started the ranks of this machine; None if it has one rank."""
    return os.getppid() if world.num_local_ranks > 1 else None


def _make_monitor(plan: Plan, world: World, path: Path) -> NoMonitor:
    """Return the monitor of this machine, which watches the GPUs of the local ranks, in the order of the ranks."""
    first, choice = world.rank - world.local_rank, plan.choices["monitor"]
    uuids = [rank.uuid for rank in plan.ranks[first : first + world.num_local_ranks] if rank.uuid]
    root = _local_root(world)
    gpus = monitored_gpus(uuids, world.device.type)
    monitor: NoMonitor = make_chosen(MONITORS, choice, path, gpus, root)
    return monitor


def _close_monitor(monitor: NoMonitor, directory: RunDirectory, screen: Screen, name: str = "monitor.json") -> None:
    monitor.stop()
    summary = monitor.summary()
    screen.show_alerts(monitor.new_alerts())
    if summary.whole.samples:
        try:
            directory.write(name, to_json(summary.to_json()))
        except AccelRunError as error:  # a full disk, for example, must not change how the run ends
            screen.warn(f"{name} was not written: {error.problems[0]}")
