"""A run from its configuration to its exit code: directory, plan, resume, training, and what is left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import __version__
from runner.base.configuration import Configuration, Request, compose, task_source, to_yaml
from runner.base.errors import AccelRunError, Exit, InputMissing, StorageError
from runner.base.ranks import starter
from runner.durable.directory import RunDirectory, check_name, default_name
from runner.durable.files import read_object
from runner.plan.inventory import Inventory, take_inventory
from runner.plan.plan import Plan, make_plan
from runner.plan.ranks import RankDevice
from runner.plan.strategy import Footprint

if TYPE_CHECKING:
    from runner.base.world import World
    from runner.durable.checkpoint import Loaded
    from runner.engine.screen import Screen
    from runner.engine.train import Phase, TrainingRun


@dataclass(frozen=True)
class Job:
    """What every rank of a run must know before it joins the others: all of it is decided once."""

    request: Request
    configuration: Configuration
    plan: Plan
    inventory: Inventory
    name: str
    footprint: Footprint | None = None

    @property
    def folder(self) -> Path:
        """Return where the run directory lies."""
        return Path(self.configuration.settings.output_root) / self.name


def name_of(configuration: Configuration) -> str:
    """Return the name of the run. Raises ConfigError for one that cannot be."""
    name = configuration.settings.run or default_name(configuration.choices["task"].name)
    check_name(name)
    return name


@dataclass(frozen=True)
class Ended:
    """How a rank's part of a run ended; the same on all of them.

    asked_to_stop  somebody did, perhaps only with the last update
    dropped        ranks without which the run goes on faster: it was saved, and wants to be started again without them
    """

    code: Exit
    asked_to_stop: bool = False
    dropped: tuple[int, ...] = ()


def take_part(job: Job, world: World) -> Ended:
    """Train as one of the ranks of the job; return how it ended.

    Raises AccelRunError; the same is then in error.json of the run directory, if there is one.
    """
    return _lead(job, world) if world.is_first else _follow(job, world)


def _lead(job: Job, world: World) -> Ended:
    """Train as rank 0, which writes and speaks."""
    from runner.engine.screen import Screen  # needs torch, which wrong settings must not wait for

    request, plan = job.request, job.plan
    directory = RunDirectory.create_or_open(job.folder.parent, job.name)
    began = time.time()
    with directory, Screen(directory) as screen, _warnings_on(screen):
        record: dict[str, Any] = {
            "name": job.name,
            "state": "running",
            "task": plan.choices["task"].name,
            "task_file": plan.task_file,
            "config_dir": str(request.config_dir) if request.config_dir else None,
            "overrides": list(request.overrides),
            "command": shlex.join(["accel-run", *sys.argv[1:]]),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started_by": starter(),
            "started": _now(),
        }
        previous = read_object(directory.run_json)
        record["tracker_id"] = previous.get("tracker_id")
        # Only once nothing stands against going on: a refused attempt must not change what the run is.
        leave_traces = partial(_leave_traces, directory, job.configuration, plan, job.inventory, record)
        try:
            try:
                ended = _train(job, world, directory, screen, record, leave_traces)
            except SystemExit as left:
                raise _left(left, plan) from left
        except BaseException as error:
            is_written = _end_badly(error, directory, record, began)
            if is_written and isinstance(error, Exception) and not isinstance(error, AccelRunError):
                raise _fault_of_ours(error, directory) from error
            raise
        state = "preempted" if ended.code == Exit.PREEMPTED else "done"
        record |= {"state": state, "exit_code": int(ended.code), "ended": _now()}
        directory.write("run.json", _json(record))
    return ended


def _follow(job: Job, world: World) -> Ended:
    """Train as any other rank: in step with rank 0, and in silence."""
    with ExitStack() as stack:
        run, start = _open_silently(job, world, stack)
        try:
            outcome = run.train(start)
        except SystemExit as left:
            raise _left(left, job.plan) from left
        return Ended(outcome.exit_code, run.stop.requested is not None, run.dropped)


def _open_silently(job: Job, world: World, stack: ExitStack) -> tuple[TrainingRun, Loaded | None]:
    """Build what `_open` builds, for a rank that neither writes nor speaks; rank 0 tells where it goes on."""
    from runner.durable.checkpoint import load
    from runner.durable.signals import StopRequest
    from runner.engine.assemble import assemble
    from runner.engine.screen import Screen
    from runner.engine.train import TrainingRun, silent

    stop = stack.enter_context(StopRequest())
    found = world.from_first(None)
    start = load(Path(found)) if found else None
    directory = RunDirectory.join(job.folder)
    screen = stack.enter_context(Screen(directory, speaks=False))
    stack.enter_context(_warnings_on(screen))
    parts = assemble(job.plan, stack, world)
    return TrainingRun(job.plan, parts, directory, silent(screen), stop), start


def record_failure(job: Job, error: AccelRunError, began: float) -> None:
    """Write error.json and the state of the run for ranks that could not do it themselves, where they had begun.

    began  seconds since 1970 when the ranks were started
    """
    if not job.folder.is_dir():
        return
    with suppress(AccelRunError), RunDirectory.create_or_open(job.folder.parent, job.name) as directory:
        record = read_object(directory.run_json)
        if record and datetime.fromisoformat(record["started"]).timestamp() >= began - 0.001:
            _end_badly(error, directory, record, began)


@contextmanager
def _warnings_on(screen: Screen) -> Iterator[None]:
    """Python's warnings, ours and torch's, are said as everything else is, without the place in the code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: screen.warn(str(message))
        yield


def _train(
    job: Job,
    world: World,
    directory: RunDirectory,
    screen: Screen,
    record: dict[str, Any],
    leave_traces: Callable[[], None],
) -> Ended:
    """Open the run, train, and say how it ended."""
    with ExitStack() as stack:
        run, start = _open(job.plan, world, directory, screen, record, stack, leave_traces)
        screen.report_start(job.plan, run.parts, job.inventory, start)
        exit_code = 1
        try:
            outcome = run.train(start)
            exit_code = int(outcome.exit_code)
        finally:
            run.observers.tracker.finish(timeout_s=30.0 if exit_code == 0 else 5.0, exit_code=exit_code)
        result = run.observers.benchmark.result()
        if result is not None:
            directory.write("benchmark.json", _json(result))
        record |= {
            "update": outcome.update,
            "metrics": dict(outcome.metrics),
            "baselines": run.baselines,
            "phases": {name: dataclasses.asdict(phase) for name, phase in run.records.items()},
        }
        screen.report_end(run, outcome)
        return Ended(outcome.exit_code, run.stop.requested is not None, run.dropped)


def _open(
    plan: Plan,
    world: World,
    directory: RunDirectory,
    screen: Screen,
    record: dict[str, Any],
    stack: ExitStack,
    leave_traces: Callable[[], None],
) -> tuple[TrainingRun, Loaded | None]:
    """Build everything a run needs, and find where it goes on; what was opened closes with `stack`."""
    from runner.base.choice import make
    from runner.durable.files import AppendLog
    from runner.durable.signals import StopRequest
    from runner.engine.assemble import assemble
    from runner.engine.train import Observers, TrainingRun
    from runner.observe.benchmark import BENCHMARKS
    from runner.observe.monitor import MONITORS
    from runner.observe.profiler import PROFILERS
    from runner.observe.trackers import TRACKERS

    def made(table: Mapping[str, Any], group: str, *given: Any) -> Any:
        choice = plan.choices[group]
        return make(table, choice.function, *given, **choice.options)

    stop = stack.enter_context(StopRequest())
    metrics = stack.enter_context(AppendLog(directory.metrics))
    start = _where_to_go_on(plan, directory, screen, metrics)
    goes_on = start is not None and start.path.parent == directory.checkpoints
    known = record["tracker_id"] if goes_on else None  # rows of a run that is started anew are another run's
    tracker = made(TRACKERS, "tracker", directory.path, directory.name, plan.values(), known)
    record["tracker_id"] = tracker.id
    leave_traces()
    world.from_first(str(start.path) if start else None)
    monitor = made(MONITORS, "monitor", directory.gpu_csv, [rank.uuid for rank in plan.ranks if rank.uuid] or None)
    stack.callback(monitor.stop)
    parts = assemble(plan, stack, world)
    profiler = made(PROFILERS, "profiler", directory.profile)
    observers = Observers(metrics, tracker, monitor, profiler, made(BENCHMARKS, "benchmark", parts.world), screen)
    return TrainingRun(plan, parts, directory, observers, stop, tracker_id=tracker.id if goes_on else None), start


@contextmanager
def open_phase(request: Request, world: World | None = None) -> Iterator[Phase]:
    """Give the first phase of a new run, ready to make updates: for measuring what training costs.

    world  the ranks that open it together; None: this process alone
    """
    from runner.engine.train import Phase

    with ExitStack() as stack:
        run, start = _opened(request, world, stack)
        with Phase(run, run.plan.selected[0], start) as phase:
            yield phase


def _opened(request: Request, world: World | None, stack: ExitStack) -> tuple[TrainingRun, Loaded | None]:
    import torch

    from runner.base.world import World
    from runner.engine.screen import Screen

    configuration, inventory = compose(request), take_inventory()
    ranks = [RankDevice.of(None, inventory)] * world.world_size if world else None
    job = Job(request, configuration, make_plan(configuration, inventory, ranks), inventory, name_of(configuration))
    world = world or World(torch.device(job.plan.device))
    if world.is_first:
        directory = stack.enter_context(RunDirectory.create_or_open(job.folder.parent, job.name))
        screen = stack.enter_context(Screen(directory))
        return _open(job.plan, world, directory, screen, {"tracker_id": None}, stack, lambda: None)
    return _open_silently(job, world, stack)


def _where_to_go_on(plan: Plan, directory: RunDirectory, screen: Screen, metrics: Any) -> Any:
    """Return the checkpoint to start from, or None; the metrics are cut to its length."""
    from runner.durable.checkpoint import load, recover, set_aside
    from runner.engine.train import check_resume, phases_to_walk

    wanted = plan.settings.resume
    if wanted == "fresh":
        phases_to_walk(plan, None, directory)  # raises before anything is put aside
        if set_aside(directory.checkpoints):
            screen.say("resume=fresh: the earlier checkpoints were put aside, in checkpoints/earlier-*")
        _put_aside(directory, metrics)
        return None
    found = recover(directory.checkpoints)
    for name, reasons in found.skipped:
        screen.warn(f"checkpoint {name} was passed over: {'; '.join(reasons)}")
    start = found.checkpoint
    if start is None and wanted != "auto":
        path = _checkpoint_of(wanted, plan)
        start = load(path)
        screen.say(f"starts from {path}")
        check_resume(plan, start, screen.say)
        phases_to_walk(plan, start, directory)
        metrics.cut(0)
        return start
    if start is None:
        phases_to_walk(plan, None, directory)
        metrics.cut(0)
        return None
    check_resume(plan, start, screen.say)
    phases_to_walk(plan, start, directory)
    known = int(start.manifest["metrics_bytes"])
    if metrics.length < known:  # the weights are whole: rows that a power cut took are no reason to stop
        screen.warn(f"metrics.jsonl has lost its last rows: {metrics.length} of {known} bytes are there")
    repeated = _updates_in(directory.metrics) - int(start.state["phase_update"])
    metrics.cut(known)
    lost = f"; {repeated} updates after it are repeated" if repeated > 0 else ""
    screen.say(f"resumes at update {start.state['phase_update']} from {start.path.name}{lost}")
    return start


def _checkpoint_of(wanted: str, plan: Plan) -> Path:
    """Return the checkpoint meant by resume=: that folder itself, or the newest valid one of a run."""
    from runner.durable.checkpoint import MANIFEST, newest_valid

    given = Path(wanted).expanduser()
    if (given / MANIFEST).is_file():
        return given.absolute()
    other = RunDirectory.find(Path(plan.settings.output_root), wanted)
    path = newest_valid(other.checkpoints)
    if path is None:
        raise InputMissing(f"run {other.name} has no valid checkpoint", where=f"resume={wanted}")
    return path


def _put_aside(directory: RunDirectory, metrics: Any) -> None:
    """Keep the rows of the run that is started anew under another name."""
    if metrics.length:
        number = 1
        while (directory.path / f"metrics-earlier-{number}.jsonl").exists():
            number += 1
        directory.write(f"metrics-earlier-{number}.jsonl", directory.metrics.read_bytes())
        metrics.cut(0)


def _leave_traces(
    directory: RunDirectory, configuration: Configuration, plan: Plan, inventory: Inventory, record: Mapping[str, Any]
) -> None:
    """Write what the run can be understood and repeated from."""
    directory.write("config.yaml", to_yaml(configuration))
    words = "".join(f"- {json.dumps(word)}\n" for word in configuration.request.overrides)
    directory.write("overrides.yaml", words or "[]\n")
    directory.write("plan.json", plan.to_json())
    directory.write("environment.json", _json(_environment(inventory)))
    directory.write("run.json", _json(record))


def _environment(inventory: Inventory) -> dict[str, Any]:
    return {
        "accel-run": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "git": _git_state(Path.cwd()),
        "inventory": json.loads(inventory.to_json()),
    }


def _git_state(folder: Path) -> dict[str, str] | None:
    """Return commit and branch of the user's checkout, read from .git without starting git."""
    for parent in (folder, *folder.parents):
        head = parent / ".git" / "HEAD"
        try:
            text = head.read_text().strip()
            if not text.startswith("ref: "):
                return {"commit": text}
            reference = text[5:]
            loose = parent / ".git" / reference
            if loose.is_file():
                return {"branch": reference, "commit": loose.read_text().strip()}
            packed = (parent / ".git" / "packed-refs").read_text().splitlines()
            return {"branch": reference, "commit": next(line.split()[0] for line in packed if line.endswith(reference))}
        except (OSError, StopIteration):
            if head.exists():
                return None
    return None


def _end_badly(error: BaseException, directory: RunDirectory, record: dict[str, Any], began: float) -> bool:
    """Write error.json and the state of the run, if the disk lets us; never in the way of the error itself."""
    from runner.durable.checkpoint import newest_valid

    code = int(error.exit_code) if isinstance(error, AccelRunError) else int(Exit.SOFTWARE)
    problems = error.problems if isinstance(error, AccelRunError) else ()
    try:
        last = newest_valid(directory.checkpoints)
        content = {
            "cause": problems[0].what if problems else f"{type(error).__name__}: {error}",
            "where": problems[0].where if problems else "",
            "fix": problems[0].fix if problems else "",
            "problems": [dataclasses.asdict(problem) for problem in problems],
            "exit_code": code,
            "last_checkpoint": last.name if last else None,
            "traceback": "".join(traceback.format_exception(error)),
            "time": _now(),
            "seconds": time.time() - began,
        }
        directory.write("error.json", _json(content))
        known = read_object(directory.run_json)
        if not known or known.get("started") == record["started"]:  # a refused attempt leaves the run as it was
            directory.write("run.json", _json({**record, "state": "failed", "exit_code": code, "ended": _now()}))
        return True
    except StorageError:
        return False


def _fault_of_ours(error: Exception, directory: RunDirectory) -> AccelRunError:
    """Return in one line what nobody foresaw; the traceback is in error.json."""
    cause = f"{type(error).__name__}: {error}".splitlines()[0]
    return AccelRunError(cause, fix=f"this is a fault of accel-run, not yours; please report it with {directory.error}")


def _left(error: SystemExit, plan: Plan) -> AccelRunError:
    """Return the fault of a task that calls sys.exit: nobody would see why the run ended."""
    from runner.engine.faults import fault_of

    source = task_source(plan.choices["task"].name, Path(plan.task_file) if plan.task_file else None)
    return fault_of(error, source, "the task") or AccelRunError(f"the program was left by sys.exit({error.code})")


def _updates_in(metrics: Path) -> int:
    """Return the update of the last row that can be read."""
    last = 0
    try:
        for line in metrics.read_text(encoding="utf-8").splitlines():
            last = max(last, int(json.loads(line).get("update", 0)))
    except (OSError, ValueError, AttributeError):
        pass
    return last


def _json(content: Any) -> str:
    return json.dumps(content, indent=2) + "\n"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
