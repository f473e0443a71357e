"""Run a configuration from start to exit code: directory, plan, resume, training and final records."""

from __future__ import annotations

import dataclasses
import json
import os
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

from runner.base.configuration import Configuration, Request, compose, task_source, to_yaml
from runner.base.errors import (
    AccelRunError,
    Exit,
    Hang,
    IncompatibleResume,
    InputMissing,
    MissingPackage,
    RunInUse,
    limit_of,
    number_of,
    where_it_goes_on,
)
from runner.base.json_numbers import finite
from runner.base.phases import INFERENCE
from runner.base.process_identity import birth_of
from runner.base.rank_env import member_of, starter
from runner.base.secret import fit_to_show
from runner.base.text import words_of
from runner.durable import files
from runner.durable.directory import RunDirectory, check_name, default_name
from runner.durable.files import read_object, read_rows
from runner.durable.run_identity import RunIdentity, new_uid, uid_of
from runner.durable.run_state import standing
from runner.engine import oom_history, repro_script
from runner.plan.environment import environment
from runner.plan.inventory import Inventory, take_inventory
from runner.plan.memory_fit import Needs
from runner.plan.planner import Plan, make_plan
from runner.plan.rank_devices import RankDevice

if TYPE_CHECKING:
    from runner.base.world import World
    from runner.durable.checkpoint import Loaded
    from runner.engine.phase import Phase
    from runner.engine.run import TrainingRun
    from runner.engine.run_screen import Screen
    from runner.observe.monitor_thread import NoMonitor


@dataclass(frozen=True)
class Job:
    """Settings that every rank needs before joining the process group, decided once.

    predicts  the same command runs inference afterwards
    """

    request: Request
    configuration: Configuration
    plan: Plan
    inventory: Inventory
    name: str
    needs: Needs | None = None
    predicts: bool = False

    @property
    def folder(self) -> Path:
        """Return the run directory."""
        return self.configuration.settings.root / self.name


def name_of(configuration: Configuration) -> str:
    """Return the name of the run. Raises ConfigError for an invalid name."""
    name = configuration.settings.run or default_name(configuration.choices["task"].name)
    check_name(name)
    return name


@dataclass(frozen=True)
class SessionEnd:
    """Result of a rank's part of a run; identical on all ranks.

    asked_to_stop  somebody did, perhaps only with the last update
    dropped        ranks without which the run goes on faster: it was saved, and wants to be started again without them
    """

    code: Exit
    asked_to_stop: bool = False
    dropped: tuple[int, ...] = ()


def take_part(job: Job, world: World) -> SessionEnd:
    """Train as one rank of the job; return the result.

    Raises AccelRunError; the same is then in error.json of the run directory, if there is one.
    """
    return _lead(job, world) if world.is_first else _follow(job, world)


def _lead(job: Job, world: World) -> SessionEnd:
    """Train as rank 0, which writes files and prints."""
    from runner.engine.run_screen import Screen  # needs torch, which wrong settings must not wait for

    request, plan = job.request, job.plan
    directory = RunDirectory.create_or_open(job.folder.parent, job.name)
    began = time.time()
    with directory, _only_writer(directory), Screen(directory) as screen, _warnings_on(screen), _spare() as spare:
        record: dict[str, Any] = {
            "name": job.name,
            "names": _names(directory),
            "state": "running",
            "task": plan.choices["task"].name,
            "task_file": plan.task_file,
            "config_dir": plan.config_dir,
            "folder": str(Path.cwd()),
            "overrides": list(request.overrides),
            # `resume run=first` does not tell what the run is; what it goes on with does.
            "command": shlex.join(["accel-run", *(repro_script.words_of(request) if _resumes() else sys.argv[1:])]),
            "pid": os.getpid(),
            "birth": birth_of(os.getpid()),
            "host": socket.gethostname(),
            "started_by": starter(),
            "started": _now(),
        }
        previous = read_object(directory.run_json)
        record["tracker_id"] = previous.get("tracker_id")
        if "evidence" in previous:  # until there is more of it, and where this process makes no update
            record["evidence"] = previous["evidence"]
        record["changes"] = files.listed(previous.get("changes"))
        record["adopted"] = files.listed(previous.get("adopted"))
        # Only once nothing stands against going on: a refused attempt must not change what the run is.
        leave_traces = partial(_leave_traces, directory, job.configuration, plan, job.inventory, record)
        before = _traces(directory)
        try:
            with _telling(plan):
                ended = _train(job, world, directory, screen, record, leave_traces, began)
        except BaseException as error:
            spare.close()
            if isinstance(error, MissingPackage) and directory.is_new and not record.get("reached"):
                with suppress(AccelRunError):
                    directory.discard()  # there is nothing to go on with, and `last` is the run before it
                raise
            if isinstance(error, IncompatibleResume) and before and not record.get("reached"):
                with suppress(AccelRunError):  # what differs was seen only once the task and its data were built
                    for name, content in before.items():
                        directory.write(name, content)
            limit = limit_of(error)
            if limit is not None:
                limit.__cause__ = error  # its traceback is for error.json
                _end_badly(limit, directory, record, began)
                raise limit from error
            is_written = _end_badly(error, directory, record, began)
            if is_written and not isinstance(error, (AccelRunError, KeyboardInterrupt)):
                raise _fault_of_ours(error, directory) from error
            raise
        state = {Exit.PREEMPTED: "preempted", Exit.INTERRUPTED: "interrupted"}.get(ended.code, "done")
        record.pop("reached")
        record |= {"state": state, "exit_code": int(ended.code), "ended": _now()}
        directory.write("run.json", _json(record))
        if files.exists(directory.error):  # of an earlier attempt: nothing is wrong any more
            files.remove(directory.error)
    return ended


def _follow(job: Job, world: World) -> SessionEnd:
    """Train as any other rank, without output."""
    from runner.engine.training import train
    from runner.engine.watchdog import watched

    directory = RunDirectory.join(job.folder)
    with ExitStack() as stack:
        name = f"stacks-rank{world.rank}.txt"
        pulse = stack.enter_context(
            watched(
                job.plan, world, checkpoints=directory.checkpoints, file=name,
                keep=lambda stacks: directory.write(name, stacks),  # rank 0 says how the run ended
            )
        )  # fmt: skip
        run, start = _open_silently(job, world, stack)
        run.pulse = pulse
        with _telling(job.plan):
            outcome = train(run, start)
        return SessionEnd(outcome.exit_code, run.stop.requested is not None, run.dropped)


def _open_silently(job: Job, world: World, stack: ExitStack) -> tuple[TrainingRun, Loaded | None]:
    """Build what `_open` builds, for a rank that neither writes nor speaks; rank 0 tells where it goes on."""
    from runner.base.option_table import make
    from runner.durable.checkpoint import load
    from runner.durable.signals import StopRequest
    from runner.engine.assemble import assemble
    from runner.engine.checkpoint_state import check_state
    from runner.engine.run import TrainingRun, silent
    from runner.engine.run_screen import Screen
    from runner.engine.weights import begin_with
    from runner.observe.profiler import PROFILERS

    stop = stack.enter_context(StopRequest())
    found = world.from_first(None)
    start = check_state(load(Path(found))) if found else None
    directory = RunDirectory.join(job.folder)
    machine = f"rank{world.rank}" if world.local_rank == 0 else ""  # the first rank of a machine of its own
    screen = stack.enter_context(Screen(directory, speaks=False, machine=machine))
    stack.enter_context(_warnings_on(screen))
    parts = assemble(job.plan, stack, world)
    if start is None and job.plan.settings.weights:
        begin_with(Path(job.plan.settings.weights).expanduser(), parts.bare, parts.parallel)
    choice = job.plan.choices["profiler"]
    observers = silent(screen, make(PROFILERS, choice.function, None, **choice.options))
    if machine:
        observers.monitor = _monitor_of(job.plan, world, directory.path / f"gpu-{machine}.csv")
        stack.callback(_close_monitor, observers.monitor, directory, screen, f"monitor-{machine}.json")
    return TrainingRun(job.plan, parts, directory, observers, stop), start


def record_failure(job: Job, error: AccelRunError, began: float, stacks: str = "", made: int = 0) -> None:
    """Write error.json and the state of the run for ranks that could not do it themselves, where they had begun.

    began   seconds since 1970 when the ranks were started
    stacks  of all ranks, where they hung; they become stacks.txt
    made    updates of all phases, saved or not; 0: not known
    """
    if not job.folder.is_dir():
        return
    with suppress(AccelRunError), RunDirectory.create_or_open(job.folder.parent, job.name) as directory:
        record = read_object(directory.run_json)
        if record and datetime.fromisoformat(record["started"]).timestamp() >= began - 0.001:
            if stacks:
                with suppress(AccelRunError):  # a full disk
                    directory.write("stacks.txt", stacks)
            if made:
                record["reached"] = made
            _end_badly(error, directory, record, began)


@contextmanager
def _spare() -> Iterator[ExitStack]:
    """Hold descriptors that can be closed for the end: with no file left to open, error.json could not be written."""
    with ExitStack() as held:
        with suppress(OSError):
            for _ in range(_NUM_SPARE):
                held.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield held


@contextmanager
def _warnings_on(screen: Screen) -> Iterator[None]:
    """Route Python warnings to the screen, without their code location."""
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
    began: float,
) -> SessionEnd:
    """Open the run, train, and report the result."""
    from runner.engine.evidence import better_known, evidence_in
    from runner.engine.run_evidence import evidence_of
    from runner.engine.run_report import report_end, report_start
    from runner.engine.task_loading import check_packages
    from runner.engine.training import train
    from runner.engine.watchdog import END, watched
    from runner.observe.trackers import FINISH_S

    def note(error: AccelRunError) -> None:
        if opened:
            record["reached"] = opened[0].reached
        _end_badly(error, directory, record, began)

    opened: list[TrainingRun] = []
    with ExitStack() as stack:
        pulse = stack.enter_context(
            watched(
                job.plan, world, checkpoints=directory.checkpoints, record=note,
                keep=lambda stacks: directory.write("stacks.txt", stacks),
            )
        )  # fmt: skip
        run, start = _open(job.plan, world, directory, screen, record, stack, leave_traces)
        run.pulse = pulse
        uses = [*(phase.name for phase in job.plan.selected), *([INFERENCE] if job.predicts else [])]
        check_packages(run.parts.task, uses, run.parts.source)
        before = evidence_in(record)
        run.left = {phase.name: phase for phase in before.phases} if before else {}
        run.on_change = partial(_record_changes, run, directory, record)
        opened.append(run)
        report_start(screen, job.plan, run.parts, job.inventory, start)
        exit_code = 1
        try:
            outcome = train(run, start)
            exit_code = int(outcome.exit_code)
        except BaseException:
            with suppress(Exception):  # the error itself must come through
                made = dataclasses.replace(evidence_of(run, job.inventory), unfinished=True)
                record["evidence"] = (better_known(before, made) if made.updates else before or made).to_json()
            raise
        finally:
            pulse.now = (END, pulse.now[1])
            pulse.ending.value = True
            run.stop.begin_end()
            record["reached"] = run.reached
            run.observers.tracker.finish(FINISH_S, exit_code=exit_code, leaves=True)
        evidence = evidence_of(run, job.inventory)
        result = run.observers.benchmark.result()
        if result is not None:
            directory.write("benchmark.json", _json(result))
        record |= {
            "update": outcome.update,
            "metrics": dict(outcome.metrics),
            "baselines": run.baselines,
            "phases": {name: dataclasses.asdict(phase) for name, phase in run.records.items()},
            "evidence": better_known(before, evidence).to_json(),
        }
        report_end(screen, run, outcome, evidence)
        return SessionEnd(outcome.exit_code, run.stop.requested is not None, run.dropped)


def _record_changes(run: TrainingRun, directory: RunDirectory, record: dict[str, Any]) -> None:
    """Write code and data changes to run.json immediately, because the run may be killed later."""
    record["changes"] = list(run.changes)
    directory.write("run.json", _json(record))


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
    from runner.base.option_table import make
    from runner.durable.files import AppendLog
    from runner.durable.signals import StopRequest
    from runner.engine.assemble import assemble
    from runner.engine.meter import UpdateClock
    from runner.engine.run import Observers, TrainingRun
    from runner.engine.weights import begin_with
    from runner.observe.profiler import PROFILERS
    from runner.observe.step_times import BENCHMARKS
    from runner.observe.trackers import TRACKERS

    def made(table: Mapping[str, Any], group: str, *given: Any) -> Any:
        choice = plan.choices[group]
        return make(table, choice.function, *given, **choice.options)

    clock = UpdateClock()
    stop = stack.enter_context(StopRequest())
    metrics = stack.enter_context(AppendLog(directory.metrics))
    start = resume_point(plan, directory, screen, metrics)
    goes_on = start is not None and start.path.parent == directory.checkpoints
    _identify(record, directory.owner, start if goes_on else None, is_anew=plan.settings.resume == "fresh")
    known = record["tracker_id"] if goes_on else None  # rows of a run that is started anew are another run's
    if not goes_on:
        record.pop("evidence", None)
        record["changes"] = []
    tracker = made(TRACKERS, "tracker", directory.path, directory.name, plan.values(), known)
    record["tracker_id"] = tracker.id
    leave_traces()
    world.from_first(str(start.path) if start else None)
    monitor = _monitor_of(plan, world, directory.gpu_csv)
    stack.callback(_close_monitor, monitor, directory, screen)
    parts = assemble(plan, stack, world)
    profiler = made(PROFILERS, "profiler", lambda name, data: directory.write(f"profile/{name}", data))
    observers = Observers(metrics, tracker, monitor, profiler, made(BENCHMARKS, "benchmark", parts.world), screen)
    if start is None and plan.settings.weights:
        screen.say(begin_with(Path(plan.settings.weights).expanduser(), parts.bare, parts.parallel))
    resumed = tracker.id if goes_on else None
    return TrainingRun(plan, parts, directory, observers, stop, clock, uid=record["uid"], tracker_id=resumed), start


def _identify(record: dict[str, Any], run: RunIdentity, start: Loaded | None, *, is_anew: bool) -> None:
    """Record the uid of the run: its own, that of its checkpoint where run.json has lost it, or a new one.

    start  checkpoint from which it continues; one of another run, which the user has accepted, is recorded as adopted
    """
    told = uid_of(start.manifest) if start else None
    record["uid"] = new_uid() if is_anew else run.uid or told or new_uid()
    if is_anew:
        record["adopted"] = []
    elif start is not None and run.has_other_uid(start.manifest):
        record["adopted"].append({"uid": told, "checkpoint": start.path.name, "time": _now()})


@contextmanager
def open_phase(request: Request, world: World | None = None) -> Iterator[Phase]:
    """Give the first phase of a new run, ready to make updates: for measuring what training costs.

    world  the ranks that open it together; None: this process alone
    """
    from runner.engine.phase import Phase

    with ExitStack() as stack:
        run, start = _opened(request, world, stack)
        with Phase(run, run.plan.selected[0], start) as phase:
            yield phase


@contextmanager
def open_run(request: Request) -> Iterator[TrainingRun]:
    """Give a new run of this process alone, built and ready for any of its phases."""
    with ExitStack() as stack:
        yield _opened(request, None, stack)[0]


def _opened(request: Request, world: World | None, stack: ExitStack) -> tuple[TrainingRun, Loaded | None]:
    import torch

    from runner.base.world import World
    from runner.engine.run_screen import Screen

    configuration, inventory = compose(request), take_inventory()
    ranks = [RankDevice.of(None, inventory)] * world.world_size if world else None
    job = Job(request, configuration, make_plan(configuration, inventory, ranks), inventory, name_of(configuration))
    world = world or World(torch.device(job.plan.device))
    if world.is_first:
        directory = stack.enter_context(RunDirectory.create_or_open(job.folder.parent, job.name))
        screen = stack.enter_context(Screen(directory))
        return _open(job.plan, world, directory, screen, {"tracker_id": None, "adopted": []}, stack, lambda: None)
    return _open_silently(job, world, stack)


def _monitor_of(plan: Plan, world: World, path: Path) -> NoMonitor:
    """Return the monitor of this machine, which watches the GPUs of the local ranks in their order."""
    from runner.base.option_table import make
    from runner.observe.monitor_thread import MONITORS, gpus_of

    first, choice = world.rank - world.local_rank, plan.choices["monitor"]
    uuids = [rank.uuid for rank in plan.ranks[first : first + world.num_local_ranks] if rank.uuid]
    root = os.getppid() if world.num_local_ranks > 1 else None  # who started the ranks here is an ancestor of all
    watched = gpus_of(uuids, world.device.type)
    monitor: NoMonitor = make(MONITORS, choice.function, path, watched, root, **choice.options)
    return monitor


def _close_monitor(monitor: NoMonitor, directory: RunDirectory, screen: Screen, name: str = "monitor.json") -> None:
    """Stop the monitor and write its summary to the file `name`."""
    monitor.stop()
    screen.tell(monitor.news())
    summary = monitor.summary()
    if summary.whole.samples:
        try:
            directory.write(name, _json(summary.to_json()))
        except AccelRunError as error:  # a full disk, a link: the run ends as it would without a monitor
            screen.warn(f"{name} was not written: {error.problems[0]}")


def resume_point(plan: Plan, directory: RunDirectory, screen: Screen, metrics: Any) -> Any:
    """Return the checkpoint to resume from, or None; metrics.jsonl is truncated to its length."""
    from runner.durable.checkpoint import recover, set_aside
    from runner.engine.checkpoint_state import check_state
    from runner.engine.training import check_resume, phases_to_walk

    wanted = plan.settings.resume
    if wanted == "fresh":
        phases_to_walk(plan, None, directory)  # raises before anything is put aside
        if set_aside(directory.checkpoints):
            screen.say("resume=fresh: the earlier checkpoints were put aside, in checkpoints/earlier-*")
        _put_aside(directory, metrics)
        oom_history.forget(directory)
        return None
    run, allows_others = directory.owner, _ANOTHER_RUN in plan.settings.resume_allow
    found = recover(directory.checkpoints, run, allows_others=allows_others)
    for name, reasons in found.skipped:
        screen.warn(f"checkpoint {name} was passed over: {'; '.join(reasons)}")
    start = found.checkpoint
    if start is None and wanted != "auto":
        start = check_state(_checkpoint_of(wanted, plan))
        screen.say(f"starts from {start.path}")
        check_resume(plan, start, screen.say)
        phases_to_walk(plan, start, directory)
        metrics.cut(0)
        return start
    if start is None:
        phases_to_walk(plan, None, directory)
        metrics.cut(0)
        return None
    if wanted != "auto":
        screen.say(f"resume={wanted} was for the beginning: this run has checkpoints of its own")
    check_resume(plan, check_state(start), screen.say)
    phases_to_walk(plan, start, directory)
    if run.has_other_uid(start.manifest):
        screen.warn(f"{start.path.name} is of another run, {uid_of(start.manifest)}; this run continues from it")
    known = int(start.manifest["metrics_bytes"])
    if metrics.length < known:  # the weights are whole: rows that a power cut took are no reason to stop
        screen.warn(f"metrics.jsonl has lost its last rows: {metrics.length} of {known} bytes are there")
    repeated = _updates_in(directory.metrics) - int(start.state["phase_update"])
    metrics.cut(known)
    lost = f"; {repeated} updates after it are repeated" if repeated > 0 else ""
    screen.say(f"resumes at update {start.state['phase_update']} from {start.path.name}{lost}")
    return start


def _checkpoint_of(wanted: str, plan: Plan) -> Loaded:
    """Return the checkpoint selected by resume=: the given folder, or the newest valid one of a run."""
    from runner.durable.checkpoint import MANIFEST, load, load_newest

    given = Path(wanted).expanduser()
    if (given / MANIFEST).is_file():
        return load(given.absolute())
    other = RunDirectory.find(plan.settings.root, wanted)
    found = load_newest(other.checkpoints, other.owner)
    if found is None:
        fix = f"accel-run status {other.name} shows what it has; accel-run runs lists the others"
        raise InputMissing(f"run {other.name} has no valid checkpoint", where=f"resume={wanted}", fix=fix)
    return found


def _put_aside(directory: RunDirectory, metrics: Any) -> None:
    """Rename the metrics of a run that is restarted from scratch."""
    if metrics.length:
        number = 1
        while (directory.path / f"metrics-earlier-{number}.jsonl").exists():
            number += 1
        directory.write(f"metrics-earlier-{number}.jsonl", directory.metrics.read_bytes())
        metrics.cut(0)


def _leave_traces(
    directory: RunDirectory, configuration: Configuration, plan: Plan, inventory: Inventory, record: Mapping[str, Any]
) -> None:
    """Write the files needed to understand and reproduce the run."""
    directory.write("config.yaml", to_yaml(configuration))
    words = "".join(f"- {json.dumps(word)}\n" for word in configuration.request.overrides)
    directory.write("overrides.yaml", words or "[]\n")
    directory.write("command.sh", _script(configuration.request, directory.name))
    directory.write("plan.json", plan.to_json())
    directory.write("environment.json", _json(environment(inventory)))
    directory.write("run.json", _json(record))


@contextmanager
def _only_writer(directory: RunDirectory) -> Iterator[None]:
    """Raise RunInUse if the process in run.json still writes the run and only its lock file was removed."""
    record = read_object(directory.run_json) if directory.lacked_lock else {}
    is_here = record.get("host") == socket.gethostname() and record.get("pid") != os.getpid()
    if is_here and standing(record).word == "running":
        raise RunInUse(
            f"process {record.get('pid')} still writes this run, though its lock file was removed",
            where=f"run={directory.name}",
            fix="wait for it or stop it, or take another name",
        )
    yield


def _traces(directory: RunDirectory) -> dict[str, bytes]:
    """Return the files that `_leave_traces` will replace; empty for a new run."""
    found = {}
    for name in ("config.yaml", "overrides.yaml", "command.sh", "plan.json", "environment.json", "run.json"):
        with suppress(AccelRunError):
            found[name] = files.read(directory.path / name, at_most=1 << 26)
    return found if "run.json" in found else {}


def _names(directory: RunDirectory) -> list[str]:
    """Return the names that this run has had: its checkpoints tell them, and a folder may be renamed."""
    return sorted({directory.name, *directory.owner.names})


def _resumes() -> bool:
    return sys.argv[1:2] == ["resume"]


def _script(request: Request, name: str) -> bytes:
    member = member_of(os.environ)
    elsewhere = member is not None and member.world_size > 1
    return repro_script.script(request, name, Path.cwd(), sys.executable, started_elsewhere=elsewhere)


def _end_badly(error: BaseException, directory: RunDirectory, record: dict[str, Any], began: float) -> bool:
    """Write error.json and the run state if possible; never mask the original error."""
    told = error if isinstance(error, AccelRunError) else None
    code = int(told.exit_code if told else Exit.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Exit.SOFTWARE)
    problems = told.problems if told else ()
    try:
        last = _last_checkpoint(error, directory)
        known, before = read_object(directory.run_json), read_object(directory.error)
        is_same = bool(before) and before.get("attempt") == record["started"]  # this end was told before, by a rank
        has_begun = known.get("started") == record["started"]
        made = record.pop("reached", None) or (before.get("reached") if is_same else 0) or number_of(last)
        if has_begun and (last or made) and not getattr(error, "__notes__", ()):  # a hang has it already
            error.add_note(where_it_goes_on(last, made))
        content = {
            "cause": problems[0].what if problems else words_of(error),
            "where": problems[0].where if problems else "",
            "fix": problems[0].fix if problems else "",
            "problems": [dataclasses.asdict(problem) for problem in problems],
            "exit_code": code,
            "place": {**(before.get("place") or {} if is_same else {}), **(told.place if told else {})},
            "last_checkpoint": last,
            "reached": made,
            "updates_repeated": max(0, made - number_of(last)),
            "traceback": "".join(traceback.format_exception(error)),
            "attempt": record["started"],
            "time": _now(),
            "seconds": time.time() - began,
        }
        directory.write("error.json", fit_to_show(_json(content)))
        if not known or has_begun:  # a refused attempt leaves the run as it was
            directory.write("run.json", _json({**record, "state": "failed", "exit_code": code, "ended": _now()}))
        return True
    except Exception:  # the disk is full, the memory is used up: the error itself must come through
        return False


def _last_checkpoint(error: BaseException, directory: RunDirectory) -> str | None:
    """Return the name of the newest checkpoint that is valid, or that has its name where it cannot be looked at now."""
    from runner.durable.checkpoint import newest, newest_valid

    if isinstance(error, Hang):  # there is no time to read all of it; it has its name only where it is whole
        return newest(directory.checkpoints)
    try:
        valid = newest_valid(directory.checkpoints, directory.owner)
    except Exception:  # no memory for it, or no thread
        return newest(directory.checkpoints)
    is_out = isinstance(error.__cause__, OSError) or getattr(error, "exit_code", 0) in (Exit.SYSTEM, Exit.INPUT_OUTPUT)
    return valid.name if valid else newest(directory.checkpoints) if is_out else None


@contextmanager
def _telling(plan: Plan) -> Iterator[None]:
    """Convert every exception inside into an AccelRunError, except internal errors."""
    try:
        yield
    except BaseException as error:  # a task may raise what it likes
        from runner.engine.error_diagnosis import explain

        source = task_source(plan.choices["task"].name, Path(plan.task_file) if plan.task_file else None)
        if isinstance(error, SystemExit):
            raise _left(error, source) from error
        shown = explain(error, source, "the run", plan.batch.micro_batch_size)
        if shown is None or shown is error:
            raise
        raise shown from error


def _fault_of_ours(error: BaseException, directory: RunDirectory) -> AccelRunError:
    """Return an internal error as one line; the traceback is in error.json."""
    fix = f"this is a fault of accel-run, not yours; please report it with {directory.shown / 'error.json'}"
    fault = AccelRunError(words_of(error), fix=fix)
    for note in getattr(error, "__notes__", ()):
        fault.add_note(note)
    return fault


def _left(error: SystemExit, source: Path) -> AccelRunError:
    """Return the TaskFault for a task that calls sys.exit, which would otherwise end the run without a reason."""
    from runner.engine.error_diagnosis import fault_of

    return fault_of(error, source, "the task") or AccelRunError(
        f"the program was left by sys.exit({error.code})", fix="let the task return, or raise what is wrong"
    )


def _updates_in(metrics: Path) -> int:
    """Return the update number of the last readable row."""
    updates = (row.get("update") for row in read_rows(metrics))
    return max((update for update in updates if isinstance(update, int)), default=0)


def _json(content: Any) -> str:
    return json.dumps(finite(content), indent=2, allow_nan=False) + "\n"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


_ANOTHER_RUN = "run"  # in resume_allow: a checkpoint of another run is accepted
_NUM_SPARE = 4  # a folder that is listed, a checkpoint that is read, a file that is written
