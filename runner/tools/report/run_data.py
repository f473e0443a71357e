"""What a run has left, read for its page: nothing is taken for granted, and what cannot be read has its reason.

Every text that leaves here is without secrets and without characters that steer: a stranger may have written it.
"""

from __future__ import annotations

import functools
import math
import shlex
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.base.errors import AccelRunError
from runner.base.json_values import is_number
from runner.base.secret import is_secret, sanitize
from runner.base.stopwatch import BETWEEN, PARTS, THROUGHPUT
from runner.config.configuration import compose, to_yaml
from runner.config.guarded_yaml import read_guarded
from runner.config.request import Request
from runner.durable import files
from runner.durable.checkpoint import verify
from runner.durable.checkpoint_choice import label_checkpoints
from runner.durable.directory import RunDirectory, is_run_name
from runner.durable.record_files import read_error, read_plan, read_record
from runner.durable.run_state import RunState, derive_state
from runner.monitor.samples import MachineSamples
from runner.monitor.samples_file import read_samples
from runner.records.evidence import Evidence, throughput
from runner.records.plan_record import PlanRecord
from runner.records.run_record import ErrorRecord, RunRecord


@dataclass(frozen=True)
class Curve:
    """A figure of metrics.jsonl over the updates of the whole run: x (N,) updates, y (N,)."""

    x: Sequence[float]
    y: Sequence[float]

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Curves:
    """Everything in metrics.jsonl.

    phases   name -> first and last update of it, counted over the whole run
    shares   (update, samples of each rank) when they changed
    damaged  lines that are no row
    """

    of: Mapping[str, Curve] = field(default_factory=dict)
    phases: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    shares: Sequence[tuple[int, tuple[int, ...]]] = ()
    num_rows: int = 0
    damaged: int = 0

    def __getitem__(self, key: str) -> Curve:
        return self.of.get(key, Curve((), ()))

    def last(self, key: str) -> float | None:
        """Return the last value that is a number, None where there is none."""
        return next((value for value in reversed(self[key].y) if math.isfinite(value)), None)


@dataclass(frozen=True)
class Checkpoint:
    """A folder of checkpoints/.

    problems  None if the checkpoints are too large to be verified for a page
    marks     what it is called: best or last, and its metric
    """

    name: str
    bytes: int
    files: Mapping[str, int]
    problems: tuple[str, ...] | None
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class UsedSettings:
    """The configuration of a run, and that of its task without overrides; both flat, empty if unknown."""

    used: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunData:
    """A run as its page shows it. An empty value is unknown; `missing` has the reason: subject -> reason."""

    name: str
    shown: str
    path: Path
    record: RunRecord
    plan: PlanRecord
    environment: Mapping[str, Any]
    error: ErrorRecord | None
    standing: RunState
    curves: Curves
    settings: UsedSettings
    samples: MachineSamples | None
    events: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[Checkpoint]
    missing: Mapping[str, str]

    @property
    def evidence(self) -> Evidence | None:
        """Its measurements."""
        return self.record.evidence

    @property
    def task(self) -> str:
        """The task's name."""
        return str(self.record.origin.task or self.plan.choice("task").name or "unknown")

    @property
    def said(self) -> str:
        """What stands behind run= for this run in a line to be pasted: its name, or its path if it lies elsewhere."""
        is_usual = self.path == (Path(_USUAL_ROOT) / self.path.name).absolute() and is_run_name(self.path.name)
        return self.name if is_usual else fit(shlex.quote(str(self.path)))

    @property
    def baselines(self) -> Mapping[str, float]:
        """Metric -> value of a trivial model."""
        return self.record.result.baselines

    @property
    def metrics(self) -> dict[str, float | None]:
        """Each metric of evaluation as run.json has it; None: without items, or not finite. Else its last value."""
        found = {name: self.curves.last(name) for name in self.curves.of if name.startswith("val/")}
        return {name: value for name, value in found.items() if value is not None} | dict(self.record.result.metrics)

    @property
    def throughput(self) -> float | None:
        """Items per second."""
        return throughput(self.evidence, {THROUGHPUT: self.curves.last(THROUGHPUT)})

    @property
    def parts_s(self) -> dict[str, float]:
        """Part -> seconds, as the run summed them up; of one that has not ended as its rows tell."""
        if self.evidence is not None and self.evidence.parts_s:
            return dict(self.evidence.parts_s)
        found = {}
        for part in (*PARTS, *BETWEEN):
            curve = self.curves[f"perf/{part}_ms"]
            if len(curve):
                found[part] = 1e-3 * sum(ms * n for ms, n in zip(curve.y, _between(curve.x), strict=True) if ms >= 0)
        return found

    @property
    def total_s(self) -> float:
        """Seconds that the parts are of."""
        known = self.evidence.seconds if self.evidence is not None else None
        return known or sum(self.parts_s.values())


def read_story(directory: RunDirectory) -> RunData:
    """Return what this run has left."""
    missing: dict[str, str] = {}
    path = directory.path
    record, plan = read_record(path, _clean), read_plan(path, _clean)
    if plan.problem:
        missing["plan"] = f"{directory.plan.name} {plan.problem}"
    if record.problem:
        missing["record"] = f"{directory.run_json.name} {record.problem}"
    environment = _object(directory.environment, missing, "environment")
    events = [_clean(row) for row in files.read_rows(directory.events)]
    if not events:
        missing["events"] = f"{directory.events.name} is missing or empty"
    config = _config(directory, missing)
    return RunData(
        name=fit(directory.name),
        shown=fit(str(directory.shown)),
        path=path,
        record=record,
        plan=plan,
        environment=environment,
        error=read_error(path, _clean),
        standing=derive_state(record),
        curves=_curves(directory, missing),
        settings=UsedSettings(config, _defaults(record, missing) if config else {}),
        samples=_samples(directory, missing),
        events=events,
        checkpoints=tuple(_checkpoints(directory, missing)),
        missing=missing,
    )


def fit(text: str) -> str:
    """Return the text without secrets, without what steers a terminal and without what no page can hold."""
    shown = sanitize(text)
    if shown.isprintable():
        return shown
    return "".join(char if char in "\t\n" or char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown)


def flat(tree: Mapping[str, Any], lead: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves with dotted names, the option of a group under the name by which it is typed."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{lead}{key}.")
        else:
            yield f"{lead}{key}".removesuffix(".option"), value


# ---------------------------------------------------------------- files


def _object(path: Path, missing: dict[str, str], subject: str) -> dict[str, Any]:
    found = files.read_object(path)
    if not found:
        is_there = path.is_file()
        missing[subject] = f"{path.name} is {'damaged' if is_there else 'missing'}"
    cleaned: dict[str, Any] = _clean(found)
    return cleaned


def _clean(value: Any, key: str = "") -> Any:
    """Return the value with texts fit to be shown; what stands under the name of a secret is not shown at all."""
    if isinstance(value, dict):
        return {fit(str(name)): _clean(item, str(name)) for name, item in value.items()}
    if is_secret(key, value):
        return "(secret)"
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return cut(fit(value), _MOST_LETTERS) if isinstance(value, str) else value


def cut(text: str, letters: int) -> str:
    """Return the beginning of a text that is longer than that, and how much more of it there is."""
    return text if len(text) <= letters + _NOTED else f"{text[:letters]} … ({len(text) - letters:,} letters more)"


def _curves(directory: RunDirectory, missing: dict[str, str]) -> Curves:
    """Return what is in metrics.jsonl; the updates of a phase are counted on from those of the phases before it."""
    columns: dict[str, tuple[array[float], array[float]]] = {}
    phases: dict[str, tuple[int, int]] = {}
    shares: list[tuple[int, tuple[int, ...]]] = []
    num_rows = damaged = position = 0
    given: Any = ""
    phase = ""
    for row in files.read_lines(directory.metrics):
        update = row.get("update") if row is not None else None
        if row is None or type(update) is not int or not 0 <= update < 2**53:
            damaged += 1
            continue
        num_rows += 1
        if row.get("phase") != given:  # rows of a phase follow each other, and to clean a text takes its time
            given, phase = row.get("phase"), fit(str(row.get("phase", "")))
        if phase not in phases:
            position = max((end for _, end in phases.values()), default=0)
            phases[phase] = (position, position)
        at = phases[phase][0] + update
        phases[phase] = (phases[phase][0], max(phases[phase][1], at))
        if isinstance(row.get("balance/shares"), list):
            shares.append((at, tuple(value for value in row["balance/shares"] if type(value) is int)))
        for key, value in row.items():
            if key not in ("update", "phase") and (key in columns or len(columns) < _MOST_KEYS) and is_number(value):
                x, y = columns.setdefault(key, (array("d"), array("d")))
                x.append(at)
                y.append(math.copysign(math.inf, value) if abs(value) > _LARGEST else value)
    if not num_rows:
        what = "has no rows yet" if directory.metrics.is_file() else "is missing"
        missing["metrics"] = f"{directory.metrics.name} {what}"
    if damaged:
        lines = "1 line" if damaged == 1 else f"{damaged:,} lines"
        missing["some metrics"] = f"{lines} of {directory.metrics.name} cannot be read, and {_are(damaged)} left out"
    of = {fit(key): Curve(x, y) for key, (x, y) in columns.items()}
    return Curves(of, phases, shares, num_rows, damaged)


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _config(directory: RunDirectory, missing: dict[str, str]) -> dict[str, Any]:
    """Return the configuration as the run resolved it, flat."""
    import yaml  # type: ignore[import-untyped]

    try:
        tree = yaml.safe_load(read_guarded(directory.config, directory.path))
    except AccelRunError as error:
        missing["configuration"] = fit(f"{directory.config.name}: {error.problems[0].what}")
        return {}
    if not isinstance(tree, dict):
        missing["configuration"] = f"{directory.config.name} is damaged"
        return {}
    return {key: _clean(value, key) for key, value in flat(_clean(tree))}


def _defaults(record: RunRecord, missing: dict[str, str]) -> dict[str, Any]:
    """Return what the configuration of that task would be if nothing had been said, flat."""
    words = tuple(word for word in record.origin.overrides or () if word.startswith("task="))
    task_file = record.origin.task_file
    file = Path(task_file) if task_file and Path(task_file).is_file() else None
    try:
        if task_file and file is None:
            raise FileNotFoundError(task_file)
        return dict(_defaults_of(words, file))
    except (AccelRunError, OSError):
        missing["defaults"] = f"the defaults of task {record.origin.task or 'unknown'} are not known here"
        return {}


@functools.cache
def _defaults_of(words: tuple[str, ...], file: Path | None) -> dict[str, Any]:
    import yaml

    return dict(flat(yaml.safe_load(to_yaml(compose(Request(words, file))))))


def _samples(directory: RunDirectory, missing: dict[str, str]) -> MachineSamples | None:
    if files.exists(directory.gpu_csv) and not files.is_plain_file(directory.gpu_csv):
        missing["machine"] = f"{directory.gpu_csv.name} is not a regular file"
        return None
    try:
        found = read_samples(directory.gpu_csv)
    except AccelRunError as error:
        missing["machine"] = fit(f"{directory.gpu_csv.name}: {error.problems[0].what}")
        return None
    if not len(found):
        missing["machine"] = f"{directory.gpu_csv.name} has no sample yet"
        return None
    return found


def _checkpoints(directory: RunDirectory, missing: dict[str, str]) -> Iterator[Checkpoint]:
    folder = directory.checkpoints
    names = [name for name in names_in(folder) if name.startswith("update-")]
    if not names:
        is_there = files.is_plain_directory(folder)
        missing["checkpoints"] = "no checkpoints" if is_there else "no checkpoints folder"
    found = {name: dict(_sizes(folder / name)) for name in names}
    run = directory.owner
    is_read = sum(sum(sizes.values()) for sizes in found.values()) <= _MOST_READ
    problems = {name: tuple(map(fit, verify(folder / name, run))) if is_read else None for name in found}
    known = label_checkpoints([folder / name for name, of_name in problems.items() if not of_name])
    for name, sizes in found.items():
        yield Checkpoint(fit(name), sum(sizes.values()), sizes, problems[name], tuple(map(fit, known.get(name, ()))))


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in a folder of the run; one that cannot be read, or is a link out of it, has none."""
    try:
        return files.list_names(folder) if files.is_plain_directory(folder) else []
    except AccelRunError:
        return []


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    try:
        for path in folder.iterdir():
            yield path.name, path.lstat().st_size
    except OSError:
        return


def _between(updates: Sequence[float]) -> Iterator[float]:
    """Yield how many updates each row stands for: those since the row before it."""
    before = 0.0
    for update in updates:
        yield update - before if update > before else 1.0
        before = update


_USUAL_ROOT = "outputs"  # where a name is searched without output_root=
_LARGEST = 1e100  # far beyond what float32 can hold: axes overflow where values come near the end of float64
_MOST_LETTERS, _NOTED = 4000, 30
_MOST_KEYS = 400  # of metrics.jsonl: what lies beyond is no metric of a run
_MOST_READ = 1 << 30  # bytes of checkpoints that are read to say whether they are whole
