"""`accel-run monitor`: monitor the machine live, or show the recorded metrics of a run."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from runner.base.errors import (
    CannotCreate,
    ConfigError,
    DataError,
    DeviceMissing,
    InputMissing,
    Problem,
    StorageError,
    readable,
)
from runner.base.paths import as_path
from runner.base.secret import fit_to_show
from runner.base.values import Interval, Place, Positive
from runner.commands.arguments import teller

if TYPE_CHECKING:
    from runner.durable.directory import RunDirectory
    from runner.monitor.alerts import Alert
    from runner.monitor.machine_display import Display
    from runner.monitor.machine_sample import GpuUser
    from runner.monitor.machine_screen import Use, View
    from runner.monitor.monitor_thread import Monitor, NoMonitor
    from runner.monitor.samples import MachineSamples, Summary

HELP = """usage: accel-run monitor [seconds=N] [interval_s=N] [log_dir=DIR] [--once] [--json] [run=NAME]

Shows GPUs, CPU, RAM and the processes on each GPU until Ctrl-C. Does not train. Without a GPU it shows the rest and the
reason. At the end it prints minimum, mean and maximum of each metric with an assessment, and writes gpu.csv,
monitor.json and plots to a new folder in gpu_logs. In a pipe it prints one line per sample.

  seconds=30          duration; default: until Ctrl-C
  interval_s=1        seconds between samples
  log_dir=DIR         where that folder is created; null: write nothing
  --once              print one sample as text and write nothing
  --json              print a JSON object per sample on standard output, and all messages on standard error
  run=last|NAME|DIR   show the recorded metrics of a run, finished or not, and write plots to its folder; with --json:
                      print the summary as one object. output_root=DIR is the folder of the runs; log_dir=DIR writes
                      summary and plots of each machine to a new folder there instead

examples
  accel-run monitor
  accel-run monitor seconds=30
  accel-run monitor --once
  accel-run monitor --json log_dir=null | jq '.readings["gpu0/util"]'
  accel-run monitor run=last
"""


@dataclass(frozen=True)
class MonitorOptions:
    """Options of the form key=value."""

    seconds: Positive | None = None
    interval_s: Interval = 1.0
    log_dir: Place | None = "gpu_logs"
    run: str | None = None
    output_root: Place = "outputs"


def run(words: list[str]) -> int:
    """Monitor the machine, or show recorded metrics."""
    options, given, flags = read_words(words)
    root = as_path(options.output_root)
    if options.run is not None:
        return _of_run(root, options, as_json="--json" in flags, in_its_folder="log_dir" not in given)
    if "--once" in flags:
        return _once(RunningRuns(root), options, as_json="--json" in flags)
    folder = _new_folder(options.log_dir, by_name="log_dir" in given) if options.log_dir else None
    return _live(RunningRuns(root), options, folder, as_json="--json" in flags)


# ---------------------------------------------------------------- live


def _once(runs: RunningRuns, options: MonitorOptions, *, as_json: bool) -> int:
    from runner.monitor.machine_display import as_object
    from runner.monitor.machine_screen import View, lines_of

    with _asked_to_stop() as stop, _monitor(None, options) as monitor:
        until = time.monotonic() + _PATIENCE_S
        while not monitor.latest() and not stop.is_set() and time.monotonic() < until:
            stop.wait(0.01)
    view = View(interval_s=options.interval_s)
    _take(view, monitor.latest(), monitor, runs)
    if not view.latest:
        raise _nothing(monitor)
    if as_json:
        print(json.dumps(as_object(view)))
    else:
        view.history.clear()  # a single sample has no curve
        columns, _ = os.get_terminal_size(1) if sys.stdout.isatty() else (120, 0)
        lines = lines_of(view, columns, 10_000, ascii_only=_prints_only_ascii())
        print(fit_to_show("\n".join(line.plain.rstrip() for line in lines[1:])))
    return 0


def _live(runs: RunningRuns, options: MonitorOptions, folder: Path | None, *, as_json: bool) -> int:
    """Show each sample until the end, then a summary."""
    from runner.monitor.machine_display import make_display
    from runner.monitor.machine_screen import View
    from runner.monitor.samples_file import read_samples

    say = _say_aside if as_json else _say
    view = View(interval_s=options.interval_s)
    display = make_display(sys.stdout, sys.stderr, as_json=as_json)
    try:
        with _asked_to_stop() as stop, _monitor(folder, options) as monitor:
            _follow(monitor, view, display, stop, options.seconds, runs)
        if monitor.latest() is not view.latest:
            _take(view, monitor.latest(), monitor, runs)
            display.sample(view)
    finally:
        display.close()
    if not view.latest:
        raise _nothing(monitor)
    troubles = tuple(notice.text for notice in view.troubles)
    summary = replace(monitor.summary(), notes=(*troubles, *view.missing))
    _tell(summary, say, view.troubles, of_run=False)
    if folder is not None:
        _leave(folder, {"": summary}, say, lambda: {"": read_samples(folder / "gpu.csv")}, monitor.lost)
    return 0


def _follow(
    monitor: NoMonitor, view: View, display: Display, stop: threading.Event, seconds: float | None, runs: RunningRuns
) -> None:
    begun = drawn = time.monotonic()
    tick = min(0.1, view.interval_s / 4)
    while not stop.is_set() and not display.is_gone:
        now = time.monotonic()
        view.seconds = now - begun
        if seconds is not None:
            view.remaining = max(0.0, seconds - view.seconds)
            if view.seconds >= seconds + min(0.15, view.interval_s / 2):  # leave time for the last sample
                break
        readings = monitor.latest()
        if readings and readings is not view.latest:
            _take(view, readings, monitor, runs)
            display.sample(view)
            drawn = now
        elif display.is_resized() or now - drawn >= 1.0:
            _hear(monitor, view)
            view.waits = not view.latest and view.seconds > _SLOW_S
            display.draw(view)
            drawn = now
        stop.wait(tick)


def _take(view: View, readings: Mapping[str, float], monitor: NoMonitor, runs: RunningRuns) -> None:
    """Add the sample to the view, if there is one."""
    if not readings:
        return
    view.add(readings)
    view.gpus = [readable(device.name, _NAME) for device in monitor.devices().values()]
    view.uuids = [device.uuid for device in monitor.devices().values()]
    view.uses = _uses(monitor.users(), runs)
    _hear(monitor, view)


def _nothing(monitor: NoMonitor) -> DeviceMissing:
    why = "; ".join(monitor.notes) or "the driver does not respond"
    fix = "to find the reason, run accel-run doctor"
    return DeviceMissing(f"the machine cannot be monitored: {why}", where="monitor", fix=fix)


def _uses(users: Mapping[str, Sequence[GpuUser]], runs: RunningRuns) -> list[Use] | None:
    """Return the processes on each GPU, None if the driver does not report them."""
    from runner.monitor.machine_screen import Use

    if not users:
        return None
    owners = runs.by_pid() if any(users.values()) else {}
    return [
        Use(
            int(gpu.removeprefix("gpu")), user.pid, readable(user.user, _NAME), readable(user.name, _NAME),
            user.memory_gib, owners.get(user.pid, ""),
        )
        for gpu, found in users.items()
        for user in found
    ]  # fmt: skip


class RunningRuns:
    """Maps processes to active runs on this machine; refreshed every 10 s."""

    SELDOM_S = 10.0

    def __init__(self, root: Path) -> None:
        self._root = root
        self._found: dict[int, str] = {}
        self._next_s = 0.0

    def by_pid(self) -> Mapping[int, str]:
        """Return PID -> name of its run."""
        if time.monotonic() >= self._next_s:
            self._found = dict(self._look())
            self._next_s = time.monotonic() + self.SELDOM_S
        return self._found

    def _look(self) -> Iterator[tuple[int, str]]:
        import psutil  # type: ignore[import-untyped]

        from runner.durable.directory import runs
        from runner.durable.files import read_object
        from runner.durable.record_files import read_record
        from runner.host.process_identity import process_identity

        for path in runs(self._root)[:_NEWEST]:
            process = read_record(path).process
            pid, birth = process.pid, process.birth
            if process.state == "running" and pid is not None and birth and process_identity(pid) == birth:
                ranks = read_object(path / "plan.json").get("ranks")
                several = isinstance(ranks, list) and len(ranks) > 1
                with suppress(psutil.Error):
                    root = psutil.Process(pid)
                    root = (root.parent() or root) if several else root  # the launcher of all ranks
                    yield from ((each.pid, path.name) for each in [root, *root.children(recursive=True)])


def _hear(monitor: NoMonitor, view: View) -> None:
    """Add notices about missing metrics and GPU errors to the view; GPU processes are shown separately."""
    for notice in monitor.news():
        if notice.level == "debug":
            view.unsaid.append(notice.text)
        elif notice.kind in _TROUBLES and notice.level == "warning":
            view.troubles.append(notice)
        elif notice.kind not in _SHOWN_ANYWAY:
            view.missing.append(notice.text)
    if monitor.latest():
        lead = "" if monitor.devices() else "GPUs are not monitored: "
        view.missing += [lead + text for text in view.unsaid]
        view.unsaid.clear()


def _monitor(folder: Path | None, options: MonitorOptions) -> Monitor:
    from runner.monitor.monitor_thread import Monitor

    return Monitor(folder / "gpu.csv" if folder else None, options.interval_s)


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT, SIGTERM or SIGHUP sets; a second signal has its previous effect."""
    stop = threading.Event()
    before: dict[int, Any] = {}

    def handle(*_: object) -> None:
        stop.set()
        put_back()

    def put_back() -> None:
        while before:
            number, handler = before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup, or in the background of a shell
            before[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        put_back()


# ---------------------------------------------------------------- at the end


def _of_run(root: Path, options: MonitorOptions, *, as_json: bool, in_its_folder: bool) -> int:
    """Show the recorded metrics of a run; write plots to its folder, or to a new one in log_dir."""
    from runner.durable.directory import LAST, RunDirectory
    from runner.durable.files import read_object
    from runner.durable.run_request import say_skipped
    from runner.monitor.samples import Summary
    from runner.monitor.samples_file import read_samples

    directory = RunDirectory.find(root, options.run or LAST)
    say_skipped(directory, teller("monitor"))
    samples = read_samples(directory.gpu_csv)
    if not len(samples):
        what = "contains no samples yet"
        raise InputMissing(what, where=str(directory.gpu_csv), fix="wait until the run has started")
    say = _say_aside if as_json else _say
    summary = Summary.of(samples)
    others = {path: read_samples(path) for path in sorted(directory.path.glob("gpu-rank*.csv"), key=_rank)}
    others = {path: seen for path, seen in others.items() if len(seen)}
    summaries = {path: Summary.of(seen) for path, seen in others.items()}
    if as_json:
        beside = {f"rank{_rank(path)}": found.to_json() for path, found in summaries.items()}
        print(json.dumps(summary.to_json() | ({"machines": beside} if beside else {})))
    say(f"{directory.name}: {directory.shown / 'gpu.csv'}")
    on_gpu = not str(read_object(directory.path / "plan.json").get("device", "")).startswith("cpu")
    _tell(summary, say, _reported(directory.events), of_run=True, on_gpu=on_gpu)
    for path, found in summaries.items():
        say(f"\nmachine of rank {_rank(path)}: {directory.shown / path.name}")
        reported = _reported(directory.path / f"events-rank{_rank(path)}.jsonl")
        _tell(found, say, reported, of_run=True, on_gpu=on_gpu)
    machines = {"": samples} | {f"rank{_rank(path)}-": seen for path, seen in others.items()}
    if in_its_folder:
        say("")
        place = directory.shown / "plots"
        faults = []
        for lead, seen in machines.items():
            faults += _draw(seen, partial(_write_plot, directory, lead), place, say, lead)
        _judge(faults, place)
    elif options.log_dir and (folder := _new_folder(options.log_dir, by_name=True)):
        _leave(folder, dict(zip(machines, [summary, *summaries.values()], strict=True)), say, lambda: machines)
    return 0


def _write_plot(directory: RunDirectory, lead: str, name: str, content: bytes) -> None:
    directory.write(f"plots/{lead}{name}", content)


def _rank(path: Path) -> int:
    """Return the number in gpu-rank8.csv."""
    digits = path.stem.removeprefix("gpu-rank")
    return int(digits) if digits.isdecimal() else 0


def _reported(events: Path) -> list[Alert]:
    """Return the GPU errors that the driver reported during the run."""
    from runner.durable.files import read_rows
    from runner.monitor.alerts import Alert

    rows = [row for row in read_rows(events) if row.get("kind") == "machine" and row.get("what") in _TROUBLES]
    return [Alert(str(row["what"]), str(row.get("text", "")), "warning", row) for row in rows]


def _tell(
    summary: Summary,
    say: Callable[[str], None],
    notices: Sequence[Alert],
    *,
    of_run: bool,
    on_gpu: bool = True,
) -> None:
    """Print the figures and their assessment."""
    from runner.monitor import health_rules

    is_ascii = _prints_only_ascii()

    def put(text: str) -> None:
        say(text.replace("°", "") if is_ascii else text)

    seconds, count = summary.whole.seconds, summary.whole.samples
    length = f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
    put(f"monitored for {length} s, {count:,} sample{'' if count == 1 else 's'}\n")
    for line in [*health_rules.table(summary), *health_rules.phases(summary)]:
        put(line)
    found = health_rules.verdicts(summary, notices, of_run=of_run, on_gpu=on_gpu)
    for verdict in found:
        put(
            "\n" + _wrapped(f"{verdict.level:<5} {verdict.subject}: {verdict.says}") + "\n" + " " * 6 + verdict.evidence
        )
    said = {notice.text for notice in notices}
    notes = [note for note in summary.notes if note not in said]
    if notes:
        put("")
    for note in notes:
        put(_wrapped(f"note  {note}"))


def _wrapped(text: str) -> str:
    """Wrap a paragraph to the width of the terminal."""
    if not sys.stdout.isatty():
        return text
    columns = max(30, os.get_terminal_size(1).columns or 80)
    return textwrap.fill(text, columns, subsequent_indent=" " * 6, drop_whitespace=True, break_on_hyphens=False)


def _leave(
    folder: Path,
    summaries: Mapping[str, Summary],
    say: Callable[[str], None],
    samples: Callable[[], Mapping[str, MachineSamples]],
    lost: str = "",
) -> None:
    """Write summary and plots of each machine; the keys are prefixes of the file names, empty for the first machine.

    samples  returns the samples to draw, by the same keys
    lost     why gpu.csv in the folder lacks samples
    Raises StorageError after everything else is written, if a file cannot be written.
    """
    from runner.durable import files

    say("")
    faults = [lost] if lost else []
    written = ["gpu.csv"] if files.exists(folder / "gpu.csv") and not lost else []
    for lead, summary in summaries.items():
        name = f"monitor-{lead[:-1]}.json" if lead else "monitor.json"
        try:
            files.atomic_write(folder / name, json.dumps(summary.to_json(), indent=2) + "\n")
            written.append(name)
        except StorageError as error:
            faults.append(f"{name} was not written: {error.problems[0].what}")
    if written:
        say(f"written to {folder}: {', '.join(written)}")
    try:
        drawn = samples()
    except (InputMissing, DataError) as error:
        faults.append(f"no plots: gpu.csv: {error.problems[0].what}")
        drawn = {}
    for lead, seen in drawn.items():
        faults += _draw(seen, partial(_write_into, folder, lead), folder, say, lead)
    _judge(faults, folder)


def _write_into(folder: Path, lead: str, name: str, content: bytes) -> None:
    from runner.durable import files

    files.atomic_write(folder / f"{lead}{name}", content)


def _judge(faults: Sequence[str], folder: Path) -> None:
    """Raise StorageError if a file could not be written."""
    if faults:
        fix = "free space there, or use log_dir=DIR; missing samples are lost, but the figures above are complete"
        raise StorageError("; ".join(faults), where=str(folder), fix=fix)


def _draw(
    samples: MachineSamples,
    write: Callable[[str, bytes], object],
    place: Path,
    say: Callable[[str], None],
    lead: str = "",
) -> list[str]:
    """Write the plots and print where; return the errors.

    lead  prefix of the file names
    """
    from runner.monitor.machine_plots import pictures

    faults, written = [], []
    for name, content in pictures(samples).items():
        try:
            write(name, content)
            written.append(f"{lead}{name}")
        except StorageError as error:
            faults.append(f"{lead}{name} was not written: {error.problems[0].what}")
    if written:
        say(f"plots in {place}: {', '.join(written)}")
    return faults


def _new_folder(log_dir: str, *, by_name: bool) -> Path | None:
    """Return a new folder in `log_dir`, named by the time.

    Failure is an error if log_dir was given, otherwise a message: monitoring works without the folder.
    """
    from runner.durable import files

    parent = as_path(log_dir)
    moment = time.strftime("%Y%m%d-%H%M%S")
    try:
        files.make_directory(parent.absolute())
        for number in range(1, 1000):
            folder = parent / (moment if number == 1 else f"{moment}-{number}")
            if not files.exists(folder):
                files.new_directory(folder)
                return folder
    except StorageError as error:
        if by_name:
            raise CannotCreate(error.problems[0].what, where=error.problems[0].where, fix=_ELSEWHERE) from error
        _say_aside(f"no files are written: {error.problems[0].where}: {error.problems[0].what}")
    return None


# ---------------------------------------------------------------- words


def read_words(words: Sequence[str]) -> tuple[MonitorOptions, set[str], set[str]]:
    """Return the options, the given keys, and the flags. Raises ConfigError listing all problems."""
    from runner.config.schema import fault, settings_keys

    keys, problems = settings_keys(MonitorOptions), []
    values: dict[str, Any] = {}
    flags: set[str] = set()
    for word in words:
        key, has_value, text = word.partition("=")
        if word in FLAGS:
            flags.add(word)
        elif key in keys and has_value:
            value = _typed(text) if key in _NUMBERS else None if text in ("null", "none", "") else text
            wrong = fault(keys[key].type, value)
            problems += [Problem(wrong, word)] if wrong else []
            values[key] = value
            if word == "run=":
                problems.append(Problem("names no run", word, "use run=last, or the name of a run"))
        else:
            problems.append(Problem(*_slip(word, keys)))
    with_run = [word for word in ("seconds", "interval_s") if word in values] + (
        ["--once"] if "--once" in flags else []
    )
    if values.get("run") is not None and with_run:
        problems.append(Problem(f"leave it out: run={values['run']} shows recorded metrics", ", ".join(with_run)))
    elif "--once" in flags and (idle := [key for key in ("seconds", "log_dir") if values.get(key) is not None]):
        problems.append(Problem("leave it out: --once prints one sample and writes nothing", ", ".join(idle)))
    if problems:
        raise ConfigError(problems)
    return MonitorOptions(**values), set(values), flags


def _slip(word: str, keys: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the problem with an argument, the argument, and a suggestion."""
    from runner.config.schema import did_you_mean, nearest

    key, has_value, value = word.partition("=")
    if word.startswith("-"):
        plain = key.lstrip("-").replace("-", "_")
        near = f"use {plain}={value or '...'}" if plain in keys else did_you_mean(word, FLAGS)
        return "unknown option", word, near or f"options are {', '.join(FLAGS)} and key=value"
    if has_value:
        return "unknown key", word, did_you_mean(key, keys) or f"known: {', '.join(keys)}"
    meant = nearest(f"--{word}", FLAGS, cutoff=0.8)
    if word in keys:
        meant = f"{word}={_EXAMPLES[word]}"
    elif meant is None:
        meant = f"{'run' if isinstance(_typed(word), str) else 'seconds'}={word}"
    return "is not a setting; settings have the form key=value", word, f"use {meant}"


def _typed(text: str) -> Any:
    """Return the number, None for null, else the text."""
    if text in ("null", "none"):
        return None
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _prints_only_ascii() -> bool:
    return not (sys.stdout.encoding or "").lower().startswith("utf")


def _say(text: str) -> None:
    _print(text, sys.stdout)


def _say_aside(text: str) -> None:
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    with suppress(BrokenPipeError):  # on a broken pipe the files are still written
        print(fit_to_show(text), file=stream, flush=True)


FLAGS = ("--once", "--json")
_EXAMPLES = {"seconds": "30", "interval_s": "1", "log_dir": "gpu_logs", "run": "last", "output_root": "outputs"}
_NUMBERS = ("seconds", "interval_s")
_PATIENCE_S = 30.0  # for the one sample of --once
_SLOW_S = 5.0
_SHOWN_ANYWAY = ("slowed", "shared")  # kinds of notices already visible in the figures and the process table
_TROUBLES = ("lost", "xid", "ecc")  # kinds of notices about a GPU itself
_ELSEWHERE = "set log_dir to a writable folder, or to null"
_NAME = 60  # maximum length of a name in characters
_NEWEST = 20  # number of runs searched for active ones
