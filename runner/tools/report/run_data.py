"""Read the files of a run for its page. Every file may be missing or damaged; the reason is recorded.

All texts are returned without secrets and control characters, because the files may come from an untrusted source.
"""

from __future__ import annotations

import math
import re
import shlex
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from runner.base.errors import AccelRunError
from runner.base.json_values import is_number
from runner.base.secret import is_secret, sanitize
from runner.base.stopwatch import BETWEEN, PARTS
from runner.config.guarded_yaml import read_guarded
from runner.durable import files
from runner.durable.checkpoint_choice import label_checkpoints
from runner.durable.directory import RunDirectory, is_run_name
from runner.durable.record_files import read_error, read_plan, read_record
from runner.durable.run_state import RunState, derive_state, read_throughput
from runner.monitor.thinning import ThinnedSamples, read_thinned
from runner.records.evidence import Evidence
from runner.records.plan_record import PlanRecord
from runner.records.run_record import ErrorRecord, RunRecord


@dataclass(frozen=True)
class Curve:
    """A metric from metrics.jsonl over all updates of the run: x (N,) updates, y (N,) values.

    A null loss, gradient norm or metric (not finite, or without items) is read as NaN. Other nulls, such as the
    throughput of a first update, were not measured, and are left out.
    """

    x: Sequence[float]
    y: Sequence[float]

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Curves:
    """The content of metrics.jsonl.

    of       metric -> curve
    phases   name -> first and last update, counted over all phases
    shares   (update, samples of each rank) at each change
    damaged  number of lines that are not rows
    """

    of: Mapping[str, Curve] = field(default_factory=dict)
    phases: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    shares: Sequence[tuple[int, tuple[int, ...]]] = ()
    num_rows: int = 0
    damaged: int = 0

    def __getitem__(self, key: str) -> Curve:
        return self.of.get(key, Curve((), ()))

    def last(self, key: str) -> float | None:
        """Return the last finite value; None if there is none."""
        return next((value for value in reversed(self[key].y) if math.isfinite(value)), None)


@dataclass(frozen=True)
class Checkpoint:
    """A folder in checkpoints/.

    labels  `best` and `last`, where they apply, and the tracked metric
    """

    name: str
    bytes: int
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunData:
    """The data of a run for its page. An empty value is unknown; `missing` has the reason by subject.

    settings  key -> value of the configuration, flat
    """

    name: str
    display_path: str
    path: Path
    record: RunRecord
    plan: PlanRecord
    environment: Mapping[str, Any]
    error: ErrorRecord | None
    state: RunState
    curves: Curves
    settings: Mapping[str, Any]
    samples: ThinnedSamples | None
    events: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[Checkpoint]
    missing: Mapping[str, str]

    @property
    def evidence(self) -> Evidence | None:
        """The measurements of the last process, or earlier ones if it has ended without running an update."""
        current, last = self.record.current_evidence, self.record.evidence
        if current is not None or last is None or self.record.process.state == "running":
            return current
        # After a rank was killed, only error.json has the number of updates.
        reached = self.error.reached if self.error is not None else 0
        return last if reached <= sum(phase.updates for phase in last.phases) else None

    @property
    def task(self) -> str:
        """The task's name."""
        return str(self.record.origin.task or self.plan.choice("task").name or "unknown")

    @property
    def reference(self) -> str:
        """The value of run= for this run in a command to paste: its name, or its path if it is in another folder."""
        is_default = self.path == (Path(_DEFAULT_ROOT) / self.path.name).absolute() and is_run_name(self.path.name)
        return self.name if is_default else make_printable(shlex.quote(str(self.path)))

    @property
    def baselines(self) -> Mapping[str, float]:
        """Metric -> value of a trivial model."""
        return self.record.result.baselines

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics of the last evaluation, from run.json or else metrics.jsonl. None: no items, or not finite."""
        last = {name: curve.y[-1] for name, curve in self.curves.of.items() if name.startswith("val/")}
        evaluated = {name: value if math.isfinite(value) else None for name, value in last.items()}
        return evaluated | dict(self.record.result.metrics)

    @property
    def item(self) -> str:
        """The unit of the throughput, such as "token"; "item" if unknown."""
        items = (row["item"] for row in reversed(self.events) if row.get("kind") == "phase" and row.get("item"))
        return str(next(items, "item"))

    @property
    def throughput(self) -> float | None:
        """Items per second."""
        return read_throughput(self.path, self.record)

    @property
    def parts_s(self) -> dict[str, float]:
        """Part -> seconds from the evidence of the run; for an unfinished run, from its rows."""
        if self.evidence is not None and self.evidence.parts_s:
            return dict(self.evidence.parts_s)
        parts_s = {}
        for part in (*PARTS, *BETWEEN):
            curve = self.curves[f"perf/{part}_ms"]
            if len(curve):
                rows = zip(curve.y, updates_per_row(curve.x), strict=True)
                parts_s[part] = 1e-3 * sum(ms * updates for ms, updates in rows if ms >= 0)
        return parts_s

    @property
    def total_s(self) -> float:
        """Total seconds of the parts."""
        recorded_s = self.evidence.seconds if self.evidence is not None else None
        return recorded_s or sum(self.parts_s.values())


def read_run_data(directory: RunDirectory) -> RunData:
    """Read the data of a run."""
    missing: dict[str, str] = {}
    path = directory.path
    record, plan = read_record(path, _clean), read_plan(path, _clean)
    if plan.problem:
        missing["plan"] = f"{directory.plan.name} {plan.problem}"
    if record.problem:
        missing["record"] = f"{directory.run_json.name} {record.problem}"
    content = files.read_object(directory.environment)
    if not content:
        missing["environment"] = (
            f"{directory.environment.name} is {'damaged' if directory.environment.is_file() else 'missing'}"
        )
    environment: dict[str, Any] = _clean(content)
    events = [_clean(row) for row in files.read_rows(directory.events)]
    if not events:
        missing["events"] = f"{directory.events.name} is missing or empty"
    return RunData(
        name=make_printable(directory.name),
        display_path=make_printable(str(directory.shown)),
        path=path,
        record=record,
        plan=plan,
        environment=environment,
        error=read_error(path, _clean),
        state=derive_state(record),
        curves=_read_curves(directory, missing),
        settings=_read_config(directory, missing),
        samples=_read_samples(directory, missing),
        events=events,
        checkpoints=tuple(_read_checkpoints(directory, missing)),
        missing=missing,
    )


def make_printable(text: str) -> str:
    """Return the text without secrets, escape sequences and unprintable characters."""
    clean = sanitize(text)
    if clean.isprintable():
        return clean
    return "".join(char if char in "\t\n" or char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in clean)


def flatten(tree: Mapping[str, Any], lead: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each leaf; the key of a selected option is the name of its group."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{lead}{key}.")
        else:
            yield f"{lead}{key}".removesuffix(".option"), value


def _clean(value: Any, key: str = "") -> Any:
    """Return the value with printable texts; values with the key of a secret are replaced."""
    if isinstance(value, dict):
        return {make_printable(str(name)): _clean(item, str(name)) for name, item in value.items()}
    if is_secret(key, value):
        return "(secret)"
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return truncate(make_printable(value), _MAX_LETTERS) if isinstance(value, str) else value


def truncate(text: str, letters: int) -> str:
    """Truncate a text to about this length, with a note on the number of omitted letters."""
    if len(text) <= letters + _NOTE_LETTERS:
        return text
    return f"{text[:letters]} … ({len(text) - letters:,} more characters)"


def _read_curves(directory: RunDirectory, missing: dict[str, str]) -> Curves:
    """Read metrics.jsonl; the updates of a phase are counted from the end of the previous phases."""
    columns: dict[str, tuple[array[float], array[float]]] = {}
    phases: dict[str, tuple[int, int]] = {}
    shares: list[tuple[int, tuple[int, ...]]] = []
    num_rows = damaged = position = 0
    raw_phase: Any = ""
    phase = ""
    for row in files.read_lines(directory.metrics):
        update = row.get("update") if row is not None else None
        if row is None or type(update) is not int or not 0 <= update < 2**53:
            damaged += 1
            continue
        num_rows += 1
        if row.get("phase") != raw_phase:  # cleaning the text of every row would be slow
            raw_phase, phase = row.get("phase"), make_printable(str(row.get("phase", "")))
        if phase not in phases:
            position = max((end for _, end in phases.values()), default=0)
            phases[phase] = (position, position)
        at = phases[phase][0] + update
        phases[phase] = (phases[phase][0], max(phases[phase][1], at))
        if isinstance(row.get("balance/shares"), list):
            shares.append((at, tuple(value for value in row["balance/shares"] if type(value) is int)))
        for key, value in row.items():
            number = math.nan if value is None and key.startswith(_COMPUTED) else value
            if key not in ("update", "phase") and (key in columns or len(columns) < _MAX_KEYS) and is_number(number):
                x, y = columns.setdefault(key, (array("d"), array("d")))
                x.append(at)
                y.append(math.copysign(math.inf, number) if abs(number) > _MAX_VALUE else number)
    if not num_rows:
        state = "has no rows yet" if directory.metrics.is_file() else "is missing"
        missing["metrics"] = f"{directory.metrics.name} {state}"
    if damaged:
        lines, verb = ("1 line", "is") if damaged == 1 else (f"{damaged:,} lines", "are")
        missing["some metrics"] = f"{lines} of {directory.metrics.name} cannot be read, and {verb} left out"
    of = {make_printable(key): Curve(x, y) for key, (x, y) in columns.items() if not all(map(math.isnan, y))}
    return Curves(of, phases, shares, num_rows, damaged)


def _read_config(directory: RunDirectory, missing: dict[str, str]) -> dict[str, Any]:
    """Return the resolved configuration of the run, flat."""
    try:
        tree = yaml.safe_load(read_guarded(directory.config, directory.path))
    except AccelRunError as error:
        missing["configuration"] = make_printable(f"{directory.config.name}: {error.problems[0].what}")
        return {}
    if not isinstance(tree, dict):
        missing["configuration"] = f"{directory.config.name} is damaged"
        return {}
    return {key: _clean(value, key) for key, value in flatten(_clean(tree))}


def _read_samples(directory: RunDirectory, missing: dict[str, str]) -> ThinnedSamples | None:
    if files.exists(directory.gpu_csv) and not files.is_plain_file(directory.gpu_csv):
        missing["machine"] = f"{directory.gpu_csv.name} is not a regular file"
        return None
    try:
        samples = read_thinned(directory.gpu_csv, MACHINE_METRICS)
    except AccelRunError as error:
        missing["machine"] = make_printable(f"{directory.gpu_csv.name}: {error.problems[0].what}")
        return None
    if not len(samples):
        missing["machine"] = f"{directory.gpu_csv.name} has no sample yet"
        return None
    return samples


def _read_checkpoints(directory: RunDirectory, missing: dict[str, str]) -> Iterator[Checkpoint]:
    folder = directory.checkpoints
    names = [name for name in names_in(folder) if re.fullmatch(r"update-\d+", name)]
    if not names:
        missing["checkpoints"] = "no checkpoints" if files.is_plain_directory(folder) else "no checkpoints folder"
    labels = label_checkpoints([folder / name for name in names])
    for name in names:
        yield Checkpoint(
            make_printable(name), _folder_bytes(folder / name), tuple(map(make_printable, labels.get(name, ())))
        )


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in a folder of the run; empty if it is a link or cannot be read."""
    try:
        return files.list_names(folder) if files.is_plain_directory(folder) else []
    except AccelRunError:
        return []


def _folder_bytes(folder: Path) -> int:
    try:
        return sum(path.lstat().st_size for path in folder.iterdir())
    except OSError:
        return 0


def updates_per_row(updates: Sequence[float]) -> Iterator[float]:
    """Yield the number of updates of each row: those since the previous row."""
    before = 0.0
    for update in updates:
        yield update - before if update > before else 1.0
        before = update


_DEFAULT_ROOT = "outputs"  # default of output_root=
_COMPUTED = ("train/", "val/")  # beginning of the names of losses, gradient norms and metrics
_MAX_VALUE = 1e100  # larger values are drawn as infinite, because axes overflow near the largest float64
_MAX_LETTERS, _NOTE_LETTERS = 4000, 30
_MAX_KEYS = 400  # maximum number of metrics that are read from metrics.jsonl
# Only metrics that charts and health rules use: reading the others of a long run would double the time of a report.
MACHINE_METRICS = (
    "util", "memory_gib", "memory_total_gib", "temperature_c", "power_w", "power_limit_w", "throttle_reasons",
    "ecc_uncorrected", "other_processes", "other_memory_gib", "cpu/percent", "ram/percent",
)  # fmt: skip
