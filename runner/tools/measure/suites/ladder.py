"""`suite=ladder`: the speedup of each technique, alone and on top of the previous ones."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from runner.base.errors import AccelRunError, ConfigError, InputMissing, Problem
from runner.base.json_values import finite
from runner.config.configuration import Configuration, compose
from runner.config.request import Request, merge_overrides
from runner.host.subprocesses import in_subprocess
from runner.plan.inventory import take_inventory
from runner.plan.planner import make_plan
from runner.tools.measure import plots
from runner.tools.measure.compare import LEAST_ROUNDS, Comparison, Interrupted, enough
from runner.tools.measure.comparison_result import ComparisonResult, Numerics, Variant, VariantResult
from runner.tools.measure.results import Results
from runner.tools.measure.statistics import Ratio
from runner.tools.measure.suite import SuiteReport, SuiteRequest, SuiteTable, Value
from runner.tools.measure.suite_common import LEAST_S, ROUNDS, limits_of, peak_gib, place_of, some_of
from runner.tools.measure.technique import BASELINE, Technique, chosen, stacked, techniques

MODES = ("isolated", "cumulative")
WORDS = ("all", "init", "reset", "clean", "plots")  # besides the names of techniques
# modes: all of them; where techniques are named by words, isolated
OPTIONS = {"techniques": "all", "modes": "", "steps": "50", "batch": "", "rounds": "60"}


@dataclass(frozen=True)
class LadderRow:
    """What is known of one cell of the ladder.

    members    techniques that are on the baseline, those that another one replaced left out
    ratio      times as fast as the baseline; None where it could not be measured: `why_not` says why
    own        times as fast as the previous row of the stack
    start_s    seconds until the run is built; compile_s: what its first updates take longer, and with it compilation
    pays_at    updates after which a later beginning is made up for; None where it begins no later, or gains nothing
    peak_gib   of the GPU where there is one, else of the process
    attention  kernels that really ran; empty where none was seen: a compiled model is not watched
    updates_ms of the updates in the CSV
    """

    name: str
    mode: str
    members: tuple[str, ...]
    update_ms: float = math.nan
    ratio: Ratio | None = None
    own: Ratio | None = None
    numerics: Numerics | None = None
    start_s: float = math.nan
    compile_s: float = math.nan
    pays_at: int | None = None
    peak_gib: float | None = None
    optimizer_mib: float | None = None
    attention: str = ""
    update_j: float | None = None
    device: str = ""
    device_name: str = ""
    why_not: str = ""
    updates_ms: tuple[float, ...] = ()

    @property
    def is_wrong(self) -> bool:
        """True where it computes something else than the baseline, however fast."""
        return self.numerics is not None and self.numerics.differ

    @property
    def is_better(self) -> bool:
        """True where it is clearly faster and computes the same."""
        return self.ratio is not None and self.ratio.verdict == "better" and not self.is_wrong

    @property
    def verdict(self) -> str:
        """Return what can be said of its speed, and whether it counts."""
        if self.ratio is None:
            return ""
        return f"{self.ratio.verdict}, but wrong" if self.is_wrong else self.ratio.verdict


@dataclass(frozen=True)
class LadderRequest:
    """What is to be measured, checked."""

    request: Request
    configuration: Configuration
    base: Technique
    members: tuple[Technique, ...]
    modes: tuple[str, ...]
    steps: int
    rounds: int

    def cell(self, name: str, members: Iterable[Technique]) -> Variant:
        """Return the cell of these techniques, one on top of the other."""
        return Variant(name, stacked(members, self.base, self.configuration))

    def in_it(self, members: Sequence[Technique]) -> tuple[Technique, ...]:
        """Return those whose settings are all left when they are put on top of each other."""
        words = set(stacked(members, self.base, self.configuration))
        return tuple(technique for technique in members if words.issuperset(technique.overrides))


def run(wanted: SuiteRequest) -> SuiteReport:
    """Measure the ladder, or do with its results what the word says. Raises AccelRunError."""
    results = Results(wanted.folder, wanted.prefix)
    actions = [word for word in wanted.words if word in ACTIONS]
    if actions:
        if len(wanted.words) > 1:
            others = list(wanted.words)
            others.remove(actions[0])
            what = f"must stand alone, but stands with {' '.join(others)}"
            raise ConfigError(Problem(what, actions[0], "run one after the other"))
        action = ACTIONS[actions[0]]
        return action(results, wanted)
    asked, kept = requested(wanted), _columns_of(results)  # both may be wrong, and then nothing is measured
    task = asked.configuration.choices["task"].name
    _must_be_of(task, results, kept)
    is_main = not wanted.words or bool({BASELINE, "all"} & set(wanted.words))
    session: int | None = None

    def keep(rows: Sequence[LadderRow]) -> None:
        nonlocal session
        columns = {row.name: row.updates_ms for row in rows if row.updates_ms}
        facts = {row.name: as_json(row) | {"task": task} for row in rows if row.name in columns}
        if columns:
            session = results.put(columns, facts, session=session, is_main=is_main)

    ladder = Ladder(asked, wanted, keep)
    try:
        ladder.climb()
    except KeyboardInterrupt:
        if ladder.rows:
            wanted.say(f"stopped; what was measured until now is in {results.csv}")
        raise
    drawn = plots.draw(results) if "all" in wanted.words else []
    return dataclasses.replace(ladder.report(), files=(results.csv, results.json, *drawn))


class Ladder:
    """Measures stage by stage: what a stage finds decides what the next one tries.

    keep  told the new rows at the end of each stage, and where one is interrupted: what was measured is never lost
    """

    def __init__(self, asked: LadderRequest, wanted: SuiteRequest, keep: Callable[[Sequence[LadderRow]], None]) -> None:
        self.asked, self.wanted, self.keep = asked, wanted, keep
        self.arena: Comparison
        self.is_on_cpu = False
        self.rows: list[LadderRow] = []
        self.skipped: dict[str, str] = {}
        self.notes: list[str] = []
        self.deadline = time.monotonic() + wanted.budget_s

    def climb(self) -> None:
        """Make all stages that are asked for."""
        self.skipped |= _impossible(self.asked)
        members = tuple(technique for technique in self.asked.members if technique.name not in self.skipped)
        if not members and self.asked.members:
            why = "; ".join(f"{name}: {why}" for name, why in self.skipped.items())
            raise ConfigError(Problem(f"nothing of it can be measured here: {why}", "techniques", "use techniques=all"))
        wanted = dataclasses.replace(self.wanted, request=self.asked.request, words=())  # its own are understood
        with place_of(wanted) as place:
            self.arena, self.is_on_cpu = place.arena, place.plan.device.startswith("cpu")
            self.arena.prepare(Variant(BASELINE))
            self.notes += place.notes
            if "isolated" in self.asked.modes or not members:
                with self._kept():
                    self.measure_isolated(members)
                members = tuple(technique for technique in members if technique.name not in self.skipped)
                if set(self.asked.modes) != {"isolated"}:
                    members = self._without_rivals(members)
            if "cumulative" in self.asked.modes and members and self._has_time("stack"):
                with self._kept():
                    self._stack(self.startable(members))

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """The rows of a stage are kept at its end, however it ends."""
        before = len(self.rows)
        try:
            yield
        finally:
            self.keep(self.rows[before:])

    def _has_time(self, stage: str) -> bool:
        if self.deadline - time.monotonic() >= LEAST_S or not self.rows:
            return True
        self.notes.append(f"{stage}: not tried: the time was over; budget_s= gives it more")
        return False

    def row(self, name: str) -> LadderRow | None:
        """Return what is known of the cell of that name; None where it was not tried."""
        return next((row for row in self.rows if row.name == name), None)

    def report(self) -> SuiteReport:
        """Return the lines to print."""
        there = [row for row in self.rows if row.update_ms > 0]
        tables = [_speeds(there), _costs(there)]
        rows = [{"cell": row.name, **as_json(row)} for row in self.rows]
        notes = tuple(dict.fromkeys(self.notes))
        data = {"rows": rows, "skipped": self.skipped, "notes": notes}
        return SuiteReport(self._headline(), tables, notes, self.skipped, data)

    def _headline(self) -> str:
        best = max((row for row in self.rows if row.is_better), key=_gain, default=None)
        if not any(row.ratio for row in self.rows if row.name != BASELINE):
            return "nothing was compared with the baseline"
        if best is None:
            return "nothing is clearly faster than the baseline and computes the same"
        return f"fastest: {' + '.join(best.members)}, {best.ratio} more updates in the same time than the baseline"

    def measure_isolated(self, members: Sequence[Technique]) -> None:
        """Measure each technique alone against the baseline; one that cannot be is skipped."""
        self.wanted.say(f"measures each alone: {', '.join(_names(members)) or BASELINE}")
        share = SHARE_ALONE if "cumulative" in self.asked.modes else 1.0
        trials = self._measured("isolated", [self.asked.cell(each.name, [each]) for each in members], share)
        for technique in members:
            self._add(trials, technique.name, "isolated", (technique.name,))

    def _stack(self, members: Sequence[Technique]) -> None:
        """Measure the techniques on top of each other."""
        steps = {f"up to {last.name}": members[: place + 1] for place, last in enumerate(members)}
        cells: dict[tuple[str, ...], Variant] = {}
        names: dict[str, str] = {}  # variants with the same overrides are measured once
        for name, those in steps.items():
            cell = self.asked.cell(name, those)
            names[name] = cells.setdefault(cell.overrides, cell).name
        self.wanted.say(f"measures them on top of each other: {', '.join(steps)}")
        trials = self._measured("stack", list(cells.values()), 1.0)
        before = trials.baseline
        for name, those in steps.items():
            self._add(trials, name, "cumulative", _names(self.asked.in_it(those)), names[name], against=before)
            before = trials.of(names[name])

    def _without_rivals(self, members: Sequence[Technique]) -> tuple[Technique, ...]:
        """Return the techniques to stack: the fastest of those that exclude each other, none with other results."""
        kept: list[Technique] = []
        for technique in members:
            row = self.row(technique.name)
            if row is None or row.is_wrong:
                self.notes.append(f"{technique.name} computes something else, and is not stacked")
                continue
            rival = next((each for each in kept if len(self.asked.in_it((each, technique))) < 2), None)
            if rival is None:
                kept.append(technique)
                continue
            faster = max(rival, technique, key=lambda each: _gain(self.row(each.name)))
            kept[kept.index(rival)] = faster
            self.notes.append(f"{rival.name} and {technique.name} exclude each other; {faster.name} was faster")
        return tuple(sorted(kept, key=list(members).index))

    def startable(self, members: Sequence[Technique]) -> tuple[Technique, ...]:
        """Return the techniques to stack: without one that gains nothing and whose starts would use most of the time.

        Each variant starts from scratch, so a technique that compiles for a minute does so in every stack.
        """
        left_s = self.deadline - time.monotonic()
        for technique in members:
            row = self.row(technique.name)
            if row is None or row.ratio is None or row.is_better or not math.isfinite(row.start_s + row.compile_s):
                continue
            starts_s = (row.start_s + row.compile_s) * len(members)
            if starts_s > SHARE_OF_STARTS * left_s and len(members) > 1:
                what = f"{row.verdict} alone, and would take {starts_s:.0f} s to begin on top of others"
                self.skipped[f"up to {technique.name}"] = f"{what}; budget_s= gives it more"
                members = tuple(each for each in members if each != technique)
        return tuple(members)

    def _measured(self, stage: str, cells: Sequence[Variant], share: float) -> ComparisonResult:
        """Measure cells against the baseline in this share of the time that is left."""
        least = min(ROUNDS[0], self.asked.rounds)
        budget_s = max(LEAST_S, share * (self.deadline - time.monotonic()))
        limits = dataclasses.replace(
            limits_of(budget_s),
            rounds=(least, self.asked.rounds),
            least=math.ceil(self.asked.steps / least),
            start_s=max(LEAST_START_S, SHARE_OF_START * budget_s),
        )
        if self.is_on_cpu:
            cells = sorted(cells, key=_is_half)
        try:
            with _raising_at_a_stop():
                given = [Variant(BASELINE, self.asked.base.overrides), *cells]
                trials = self.arena.compare(given, limits, self.wanted.say)
        except Interrupted as stopped:
            self._keep_some(stopped.trials, stage)
            raise
        if trials.needs_s:
            needed = self.wanted.budget_s * trials.needs_s / limits.budget_s
            self.notes.append(f"{stage}: there was no time to try every cell; {enough(needed, trials)}")
        self.notes += [f"{stage}: {note}" for note in trials.notes]
        if not trials.baseline.blocks_ms and self.row(BASELINE) is None:
            what = "must be longer: the time was over before the first block"
            raise ConfigError(Problem(what, f"budget_s={self.wanted.budget_s:g}", "or name fewer techniques="))
        if self.row(BASELINE) is None:
            self.rows.append(_row(trials, BASELINE, BASELINE, (), self.asked.steps))
        return trials

    def _keep_some(self, trials: ComparisonResult, stage: str) -> None:
        """Of a stage that was interrupted there are rows of what can be told of one cell alone."""
        for measured in trials.cells:
            name = measured.cell.name
            if len(measured.blocks_ms) >= LEAST_ROUNDS and self.row(name) is None:
                is_alone = stage == "isolated" and name != BASELINE
                members = (name,) if is_alone else ()
                if is_alone or name == BASELINE:
                    self.rows.append(_row(trials, name, stage if is_alone else BASELINE, members, self.asked.steps))

    def _add(
        self, trials: ComparisonResult, name: str, mode: str, members: tuple[str, ...], cell: str = "",
        *, against: VariantResult | None = None,
    ) -> LadderRow:  # fmt: skip
        """Keep what was measured of a cell."""
        row = _row(trials, cell or name, mode, members, self.asked.steps)
        own = trials.ratio(trials.of(cell or name), against) if against is not None and row.ratio else None
        row = dataclasses.replace(row, name=name, own=own)
        self.rows.append(row)
        if row.why_not:
            self.skipped[name] = row.why_not
        return row


def _is_half(cell: Variant) -> bool:
    """Tell whether a CPU needs ten times as long for its updates, and would take the time of the others to begin."""
    return "precision=fp16" in cell.overrides


@contextmanager
def _raising_at_a_stop() -> Iterator[None]:
    """The first SIGINT or SIGTERM raises KeyboardInterrupt here; a second one ends the program as it would have."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    heard = {number for number, handler in before.items() if handler is not signal.SIG_IGN}

    def restore() -> None:
        for number in heard:
            signal.signal(number, before[number])

    def stop(*_: object) -> None:
        restore()
        raise KeyboardInterrupt

    for number in heard:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()


# ---------------------------------------------------------------- what is asked


def requested(wanted: SuiteRequest) -> LadderRequest:
    """Return what is to be measured. Raises ConfigError with all that is wrong with the words."""
    options, problems = wanted.options, list[Problem]()
    numbers = {}
    for key in ("steps", "rounds", "batch"):
        text = options[key]
        if key == "batch" and not text:
            continue
        numbers[key] = int(text) if text.isdecimal() and len(text) < 10 else 0
        if numbers[key] < 1:
            fix = f"use {key}={OPTIONS[key] or 64}"
            problems.append(Problem("must be a whole number above 0", f"{key}={text}", fix))
    words = [word for word in wanted.words if word != "all"]
    if problems:
        raise ConfigError(problems)
    known = techniques(wanted.request.config_dir)
    modes = options["modes"] or ("isolated" if words else "all")
    if words and options["techniques"] != OPTIONS["techniques"]:
        what = f"stands beside {' '.join(words)}, which name techniques too"
        raise ConfigError(Problem(what, f"techniques={options['techniques']}", "use one of them"))
    names = words or (list(known) if options["techniques"] == "all" else _listed(options["techniques"]))
    members = chosen(names, known)
    if not members and BASELINE not in names:
        raise ConfigError(Problem("must name a technique to be compared with the baseline", "techniques"))
    request = wanted.request
    if "batch" in numbers:
        words_given = merge_overrides(request.overrides, [f"global_batch_size={numbers['batch']}"])
        request = dataclasses.replace(request, overrides=words_given)
    configuration = compose(request)
    return LadderRequest(
        request,
        configuration,
        known[BASELINE],
        tuple(members),
        MODES if modes == "all" else some_of({"modes": modes}, "modes", MODES),
        numbers["steps"],
        numbers["rounds"],
    )


def _listed(text: str) -> list[str]:
    """Return the words of `[a,b]` or `a,b`."""
    return [word.strip() for word in text.strip("[]").split(",") if word.strip()]


def _impossible(asked: LadderRequest) -> dict[str, str]:
    """Return technique -> why it cannot be planned here. Raises where the baseline itself cannot."""
    reasons = {each.name: why for each in asked.members if (why := each.why_not(asked.configuration))}
    cells = [asked.cell(each.name, [each]) for each in asked.members if each.name not in reasons]
    cells = [asked.cell(BASELINE, ()), *cells]
    found = in_subprocess(_refusals, asked.request, [cell.overrides for cell in cells])
    if found[0] is not None:
        raise found[0]
    return reasons | {
        cell.name: f"{error.problems[0].where}: {error.problems[0].what}"
        for cell, error in zip(cells, found, strict=True)
        if error is not None
    }


def _refusals(request: Request, cells: Sequence[tuple[str, ...]]) -> list[AccelRunError | None]:
    """Return for each cell the error of its plan, None where it can be planned."""
    inventory = take_inventory()
    found: list[AccelRunError | None] = []
    for words in cells:
        try:
            changed = dataclasses.replace(request, overrides=merge_overrides(request.overrides, words))
            make_plan(compose(changed), inventory)
            found.append(None)
        except AccelRunError as error:
            found.append(error)
    return found


# ---------------------------------------------------------------- what is found


def _row(trials: ComparisonResult, name: str, mode: str, members: tuple[str, ...], steps: int) -> LadderRow:
    """Return what the trials tell of the cell of that name."""
    measured, base = trials.of(name), trials.baseline
    if not measured.blocks_ms:
        return LadderRow(name, mode, members, why_not=measured.why_not or "it had no turn: the time was over")
    report, is_base = measured.report, measured is base
    later_s, gained_ms = trials.more_to_open_s(measured), base.median_ms - measured.median_ms
    ratio = None if is_base else trials.ratio(measured)
    is_faster = ratio is not None and ratio.verdict == "better"
    sizes = report.get("optimizer_bytes")
    calls = report.get("attention", [])
    return LadderRow(
        name,
        mode,
        members,
        update_ms=measured.median_ms,
        ratio=ratio,
        numerics=None if is_base else trials.numerics(measured),
        start_s=measured.start_s,
        compile_s=max(0.0, measured.opening_s - measured.start_s),
        pays_at=math.ceil(1e3 * later_s / gained_ms) if is_faster and later_s and later_s > NOTICED_S else None,
        peak_gib=peak_gib(measured),
        optimizer_mib=sizes[1] / 2**20 if sizes else None,
        attention=", ".join(sorted({kernel for _, kernel, _ in calls})),
        update_j=sum(measured.block_j.values()) / len(measured.block_j) if measured.block_j else None,
        device=measured.opened["device"],
        device_name=measured.opened["device_name"],
        why_not=measured.why_not,
        updates_ms=evenly_spaced(
            [ms for number in sorted(measured.updates_ms) for ms in measured.updates_ms[number]], steps
        ),
    )


def evenly_spaced(values: Sequence[float], num: int) -> tuple[float, ...]:
    """Return so many of the values, from beginning to end; all where there are fewer."""
    if len(values) <= num:
        return tuple(values)
    return tuple(values[place * len(values) // num] for place in range(num))


def _speeds(rows: Sequence[LadderRow]) -> SuiteTable:
    columns = (
        "cell", "on the baseline", "update, ms", "against the baseline", "verdict", "by itself", "start, s",
        "compile, s", "pays after, updates",
    )  # fmt: skip
    told: list[list[Value]] = []
    for row in rows:
        told.append(
            [
                row.name, " + ".join(row.members) or "nothing", _known(row.update_ms),
                str(row.ratio) if row.ratio else "", row.verdict, str(row.own) if row.own else "",
                _known(row.start_s), _known(row.compile_s), row.pays_at,
            ]
        )  # fmt: skip
    return SuiteTable("speed", columns, told)


def _costs(rows: Sequence[LadderRow]) -> SuiteTable:
    columns = (
        "cell", "peak memory, GiB", "optimizer, MiB", "loss off, %", "gradient off, %", "weights off, %", "computes",
        "attention", "energy, J",
    )  # fmt: skip
    told: list[list[Value]] = []
    for row in rows:
        off = row.numerics
        told.append(
            [
                row.name, row.peak_gib, row.optimizer_mib,
                None if off is None else 100 * max(off.loss, off.later), None if off is None else 100 * off.grad_norm,
                None if off is None or off.moved is None else 100 * off.moved,
                "" if off is None else "something else" if off.differ else "the same",
                row.attention, row.update_j,
            ]
        )  # fmt: skip
    return SuiteTable("an update: memory, numbers against the baseline, kernels", columns, told)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _names(members: Iterable[Technique]) -> tuple[str, ...]:
    return tuple(technique.name for technique in members)


def _gain(row: LadderRow | None) -> float:
    return row.ratio.middle if row is not None and row.ratio is not None else 0.0


def as_json(row: LadderRow) -> dict[str, Any]:
    """Return what is known of a cell, JSON-able, without the times that the CSV has."""
    found = dataclasses.asdict(row)
    del found["updates_ms"], found["name"]
    found |= {"verdict": row.verdict, "is_wrong": row.is_wrong}
    result: dict[str, Any] = finite(found)
    return result


# ---------------------------------------------------------------- the words


def _must_be_of(task: str, results: Results, kept: Mapping[str, Sequence[float]]) -> None:
    """Raise ConfigError where columns of another task would stand beside those that are measured now.

    Raises DataError where results.json is damaged, before anything is measured.
    """
    told = results.facts()["techniques"] if kept else {}
    others = {str(each["task"]) for each in told.values() if each.get("task")} - {task}
    if others:
        what = f"holds what was measured of task {', '.join(sorted(others))}, and this is task {task}"
        fix = f"use prefix={task}-, or another folder=, or clear it first: accel-run benchmark clean"
        raise ConfigError(Problem(what, str(results.csv), fix))


def _columns_of(results: Results) -> Mapping[str, Sequence[float]]:
    try:
        return results.columns()
    except InputMissing:
        return {}


def _init(results: Results, _: SuiteRequest) -> SuiteReport:
    results.init()
    return SuiteReport("the table is there, without results", files=(results.csv,))


def _reset(results: Results, _: SuiteRequest) -> SuiteReport:
    results.reset()
    return SuiteReport("all results are gone; the table is empty", files=(results.csv,))


def _clean(results: Results, _: SuiteRequest) -> SuiteReport:
    removed = results.clean()
    return SuiteReport(
        f"removed: {', '.join(str(path) for path in removed)}" if removed else "there was nothing to remove"
    )


def _plots(results: Results, _: SuiteRequest) -> SuiteReport:
    return SuiteReport("", files=tuple(plots.draw(results)))


ACTIONS: Mapping[str, Callable[[Results, SuiteRequest], SuiteReport]] = {
    "init": _init, "reset": _reset, "clean": _clean, "plots": _plots,
}  # fmt: skip
SHARE_ALONE = 0.5  # of the time, for each technique alone: what the others try stands on it
SHARE_OF_STARTS = 0.6  # of the time of a stage, that the starts of one technique may take where it gains nothing
SHARE_OF_START = 0.3  # of a stage, that one cell may take to begin: compilation must not take the others' time
LEAST_START_S = 20.0
NOTICED_S = 0.1  # that a run may begin later without anybody noticing
