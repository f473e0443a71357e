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

from runner.base.errors import ConfigError, InputMissing, Problem
from runner.base.json_values import replace_nonfinite
from runner.config.configuration import Configuration, compose
from runner.config.request import Request, merge_overrides
from runner.tools.measure import plots
from runner.tools.measure.compare import LEAST_ROUNDS, Interrupted, enough
from runner.tools.measure.comparison_result import ComparisonResult, TrialOutcome, Variant, VariantResult
from runner.tools.measure.measuring_place import MeasuringPlace
from runner.tools.measure.results import LadderRow, Results, Usage
from runner.tools.measure.suite import ROUNDS, SuiteReport, SuiteRequest, SuiteTable, Value, place_of
from runner.tools.measure.suites import MODES, SUITES
from runner.tools.measure.technique import BASELINE, Technique, chosen, stacked, techniques


@dataclass(frozen=True)
class LadderRequest:
    """What is to be measured, validated."""

    request: Request
    configuration: Configuration
    base: Technique
    members: tuple[Technique, ...]
    modes: tuple[str, ...]
    steps: int
    rounds: int

    def variant(self, name: str, members: Iterable[Technique]) -> Variant:
        """Return the variant with these techniques on top of each other."""
        return Variant(name, stacked(members, self.base, self.configuration))

    def effective(self, members: Sequence[Technique]) -> tuple[Technique, ...]:
        """Return the techniques whose settings all remain when they are combined."""
        words = set(stacked(members, self.base, self.configuration))
        return tuple(technique for technique in members if words.issuperset(technique.overrides))


def run(wanted: SuiteRequest) -> SuiteReport:
    """Measure the ladder, or perform the action that is named. Raises AccelRunError."""
    results = Results(wanted.folder, wanted.prefix)
    actions = [word for word in wanted.words if word in ACTIONS]
    if actions:
        others = list(wanted.words)
        others.remove(actions[0])
        if others:
            what = f"must be the only argument, but there is also {' '.join(others)}"
            raise ConfigError(Problem(what, actions[0], "run one after the other"))
        action = ACTIONS[actions[0]]
        return action(results)
    asked = requested(wanted)
    task = asked.configuration.choices["task"].name
    _refuse_other_task(task, results)
    is_main = not wanted.words or bool({BASELINE, "all"} & set(wanted.words))
    session: int | None = None

    def keep(rows: Mapping[str, LadderRow]) -> None:
        nonlocal session
        measured = {name: dataclasses.replace(row, task=task) for name, row in rows.items() if row.updates_ms}
        if measured:
            session = results.put(measured, session=session, is_main=is_main)

    with place_of(dataclasses.replace(wanted, request=asked.request, words=())) as place:
        ladder = Ladder(asked, wanted, place, keep)
        try:
            ladder.measure()
        except KeyboardInterrupt:
            if ladder.rows:
                wanted.say(f"stopped; what was measured so far is in {results.csv}")
            raise
    drawn = plots.draw(results) if "all" in wanted.words else []
    return dataclasses.replace(ladder.report(), files=(results.csv, results.json, *drawn))


class Ladder:
    """Measures each technique alone, and then those that helped on top of each other.

    keep  receives the new rows at the end of each stage, also of an interrupted one
    """

    def __init__(
        self,
        asked: LadderRequest,
        wanted: SuiteRequest,
        place: MeasuringPlace,
        keep: Callable[[Mapping[str, LadderRow]], None],
    ) -> None:
        self.asked, self.wanted, self.place, self.keep = asked, wanted, place, keep
        self.rows: dict[str, LadderRow] = {}
        lacks = {each.name: each.why_not(asked.configuration, place.plan.device) for each in asked.members}
        self.skipped = {name: why for name, why in lacks.items() if why}
        self.notes = [*place.notes]
        self.deadline = time.monotonic() + wanted.budget_s

    def measure(self) -> None:
        """Run both stages, as requested."""
        members = self._left(self.asked.members)
        self.place.comparison.prepare(Variant(BASELINE))
        if "isolated" in self.asked.modes or not members:
            with self._kept():
                self.measure_isolated(members)
            members = self._left(members)
            if "cumulative" in self.asked.modes:
                members = self._without_rivals(members)
        if self._is_impossible():
            why = "; ".join(f"{name}: {why}" for name, why in self.skipped.items())
            raise ConfigError(Problem(f"none can be measured here: {why}", "techniques", "use techniques=all"))
        if "cumulative" in self.asked.modes and members:
            if self.rows and self.deadline - time.monotonic() < LEAST_S:
                self.notes.append("stack: not tried: the time was over; use a larger budget_s=")
                return
            with self._kept():
                self.measure_stack(self.startable(members))

    def _is_impossible(self) -> bool:
        """Return whether no technique can be measured, whatever the budget."""
        names = [each.name for each in self.asked.members]
        has_time = [name for name in names if not (name in self.rows and self.rows[name].outcome.is_untried)]
        return bool(names) and has_time == names and set(names) <= self.skipped.keys()

    def _left(self, members: Sequence[Technique]) -> tuple[Technique, ...]:
        return tuple(technique for technique in members if technique.name not in self.skipped)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Store the rows of a stage at its end, even if it fails."""
        before = set(self.rows)
        try:
            yield
        finally:
            if not self._is_impossible():
                self.keep({name: row for name, row in self.rows.items() if name not in before})

    def measure_isolated(self, members: Sequence[Technique]) -> None:
        """Measure each technique alone against the baseline."""
        self.wanted.say(f"measures each alone: {', '.join(_names(members)) or BASELINE}")
        share = SHARE_ALONE if "cumulative" in self.asked.modes else 1.0
        trials = self._measured("isolated", [self.asked.variant(each.name, [each]) for each in members], share)
        for technique in members:
            self._add(trials, technique.name, "isolated", (technique.name,))

    def measure_stack(self, members: Sequence[Technique]) -> None:
        """Measure the techniques on top of each other."""
        steps = {f"up to {last.name}": members[: place + 1] for place, last in enumerate(members)}
        variants: dict[tuple[str, ...], Variant] = {}
        names: dict[str, str] = {}  # variants with the same overrides are measured once
        for name, those in steps.items():
            variant = self.asked.variant(name, those)
            names[name] = variants.setdefault(variant.overrides, variant).name
        self.wanted.say(f"measures them on top of each other: {', '.join(steps)}")
        trials = self._measured("stack", list(variants.values()), 1.0)
        before = trials.baseline
        for name, those in steps.items():
            measured = trials.of(names[name])
            row = self._add(trials, name, "cumulative", _names(self.asked.effective(those)), measured)
            if row.outcome.ratio:
                self.rows[name] = dataclasses.replace(row, own=trials.ratio(measured, before))
            before = measured

    def _without_rivals(self, members: Sequence[Technique]) -> tuple[Technique, ...]:
        """Return the techniques to stack: the fastest of those that exclude each other, none with other results."""
        kept: list[Technique] = []
        for technique in members:
            row = self.rows.get(technique.name)
            if row is None or row.outcome.is_wrong:
                self.notes.append(f"{technique.name} computes something else, and is not stacked")
                continue
            rival = next((each for each in kept if len(self.asked.effective((each, technique))) < 2), None)
            if rival is None:
                kept.append(technique)
                continue
            faster = max(rival, technique, key=lambda each: self.rows[each.name].outcome.gain)
            kept[kept.index(rival)] = faster
            self.notes.append(f"{rival.name} and {technique.name} exclude each other; {faster.name} was faster")
        return tuple(sorted(kept, key=list(members).index))

    def startable(self, members: Sequence[Technique]) -> tuple[Technique, ...]:
        """Return the techniques to stack, without one that gains nothing and whose starts would use most of the time.

        Each variant starts from scratch, so a technique that compiles for a minute does so in every stack.
        """
        left_s = self.deadline - time.monotonic()
        for technique in members:
            row = self.rows.get(technique.name)
            if row is None or row.outcome.ratio is None or row.outcome.is_faster:
                continue
            starts_s = (row.start_s + row.compile_s) * len(members)
            if starts_s > SHARE_OF_STARTS * left_s and len(members) > 1:
                what = f"{row.verdict} alone, and its starts in the stack would take {starts_s:.0f} s"
                self.skipped[f"up to {technique.name}"] = f"{what}; use a larger budget_s="
                members = tuple(each for each in members if each != technique)
        return tuple(members)

    def _measured(self, stage: str, variants: Sequence[Variant], share: float) -> ComparisonResult:
        """Compare variants with the baseline in this share of the remaining time."""
        least = min(ROUNDS[0], self.asked.rounds)
        budget_s = max(LEAST_S, share * (self.deadline - time.monotonic()))
        limits = dataclasses.replace(
            self.wanted.limits(),
            budget_s=budget_s,
            rounds=(least, self.asked.rounds),
            min_updates=math.ceil(self.asked.steps / least),
            start_s=max(LEAST_START_S, SHARE_OF_START * budget_s),
        )
        if self.place.plan.device.startswith("cpu"):  # float16 is ten times slower there: it starts last
            variants = sorted(variants, key=lambda each: "precision=fp16" in each.overrides)
        try:
            with _interruptible():
                given = [Variant(BASELINE, self.asked.base.overrides), *variants]
                trials = self.place.comparison.compare(given, limits, self.wanted.say)
        except Interrupted as stopped:
            self._keep_complete(stopped.trials, stage)
            raise
        if trials.needs_s:
            needed = self.wanted.budget_s * trials.needs_s / budget_s
            self.notes.append(f"{stage}: there was no time to try every variant; {enough(needed, trials)}")
        self.notes += [f"{stage}: {note}" for note in trials.notes]
        if BASELINE not in self.rows:
            if not trials.baseline.blocks:
                what = "must be longer: the time was over before the first block"
                raise ConfigError(Problem(what, f"budget_s={self.wanted.budget_s:g}", "or name fewer techniques="))
            self._add(trials, BASELINE, BASELINE, ())
        return trials

    def _keep_complete(self, trials: ComparisonResult, stage: str) -> None:
        """Add the rows of an interrupted stage that do not depend on other variants."""
        for measured in trials.variants:
            name, is_baseline = measured.name, measured is trials.baseline
            is_complete = len(measured.blocks) >= LEAST_ROUNDS and name not in self.rows
            if is_complete and (is_baseline or stage == "isolated"):
                self._add(trials, name, BASELINE if is_baseline else stage, () if is_baseline else (name,))

    def _add(
        self, trials: ComparisonResult, name: str, mode: str, members: tuple[str, ...],
        measured: VariantResult | None = None,
    ) -> LadderRow:  # fmt: skip
        """Add the row of a variant."""
        row = _row(trials, measured or trials.of(name), mode, members, self.asked.steps)
        self.rows[name] = row
        if row.outcome.why_not:
            self.skipped[name] = row.outcome.why_not
        return row

    def report(self) -> SuiteReport:
        """Return what to print."""
        there = {name: row for name, row in self.rows.items() if row.update_ms > 0}
        notes = tuple(dict.fromkeys(self.notes))
        rows = [replace_nonfinite({"variant": name, **row.as_json()}) for name, row in self.rows.items()]
        data = {"rows": rows, "skipped": self.skipped, "notes": notes}
        return SuiteReport(self._headline(), _tables(there), notes, self.skipped, data)

    def _headline(self) -> str:
        faster = [row for row in self.rows.values() if row.outcome.is_faster]
        if not any(row.outcome.ratio for name, row in self.rows.items() if name != BASELINE):
            return "nothing was compared with the baseline"
        if not faster:
            return "nothing is clearly faster than the baseline and computes the same"
        best = max(faster, key=lambda row: row.outcome.gain)
        return f"fastest: {' + '.join(best.members)}, {best.outcome.ratio} more updates in the same time"


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGINT and SIGTERM, so that what was measured is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- request


def requested(wanted: SuiteRequest) -> LadderRequest:
    """Return what is to be measured. Raises ConfigError with all problems of the arguments."""
    options, problems = wanted.options, list[Problem]()
    defaults = SUITES["ladder"].options
    numbers = {}
    for key in ("steps", "rounds", "batch"):
        text = options[key]
        if key == "batch" and not text:
            continue
        numbers[key] = int(text) if text.isdecimal() and len(text) < 10 else 0
        if numbers[key] < 1:
            fix = f"use {key}={defaults[key] or 64}"
            problems.append(Problem("must be a whole number above 0", f"{key}={text}", fix))
    if problems:
        raise ConfigError(problems)
    words = [word for word in wanted.words if word != "all"]
    known = techniques(wanted.request.config_dir)
    if words and options["techniques"] != defaults["techniques"]:
        what = f"cannot be combined with {' '.join(words)}, which also name techniques"
        raise ConfigError(Problem(what, f"techniques={options['techniques']}", "use one of them"))
    listed = [word.strip() for word in options["techniques"].strip("[]").split(",") if word.strip()]
    names = words or (list(known) if listed == ["all"] else listed)
    members = chosen(names, known)
    if not members and BASELINE not in names:
        raise ConfigError(Problem("must name a technique to be compared with the baseline", "techniques"))
    wanted = dataclasses.replace(
        wanted, options={**options, "modes": options["modes"] or ("isolated" if words else "all")}
    )
    request = wanted.request
    if "batch" in numbers:
        overrides = merge_overrides(request.overrides, [f"global_batch_size={numbers['batch']}"])
        request = dataclasses.replace(request, overrides=overrides)
    return LadderRequest(
        request,
        compose(request),
        known[BASELINE],
        tuple(members),
        MODES if wanted.options["modes"] == "all" else wanted.some_of("modes", MODES),
        numbers["steps"],
        numbers["rounds"],
    )


def _refuse_other_task(task: str, results: Results) -> None:
    """Raise ConfigError if the table has columns of another task, and DataError if it is damaged."""
    try:
        others = {row.task for row in results.rows().values() if row.task} - {task}
    except InputMissing:
        return
    if others:
        what = f"contains measurements of task {', '.join(sorted(others))}, and this is task {task}"
        fix = f"use prefix={task}-, or another folder=, or clear it first: accel-run benchmark clean"
        raise ConfigError(Problem(what, str(results.csv), fix))


# ---------------------------------------------------------------- results


def _row(
    trials: ComparisonResult, measured: VariantResult, mode: str, members: tuple[str, ...], steps: int
) -> LadderRow:
    """Return the row of a variant."""
    if not measured.blocks:
        return LadderRow(mode, members, outcome=TrialOutcome(why_not=measured.why_not or "the time was over"))
    report = measured.report
    joules = [block.joules for block in measured.blocks.values() if block.joules is not None]
    usage = Usage(
        measured.peak_gib,
        report["optimizer_bytes"][1] / 2**20 if report.get("optimizer_bytes") else None,
        ", ".join(sorted({kernel for _, kernel, _ in report.get("attention", [])})),
        sum(joules) / len(joules) if joules else None,
        measured.opened["device"],
        measured.opened["device_name"],
    )
    return LadderRow(
        mode,
        members,
        measured.median_ms,
        TrialOutcome(why_not=measured.why_not) if measured is trials.baseline else trials.outcome(measured),
        start_s=measured.startup.start_s,
        compile_s=max(0.0, measured.opening_s - measured.startup.start_s),
        usage=usage,
        updates_ms=evenly_spaced(
            [ms for _, block in sorted(measured.blocks.items()) for ms in block.updates_ms], steps
        ),
    )


def evenly_spaced(values: Sequence[float], num: int) -> tuple[float, ...]:
    """Return so many of the values, from beginning to end."""
    if len(values) <= num:
        return tuple(values)
    return tuple(values[place * len(values) // num] for place in range(num))


Columns = Mapping[str, Callable[[str, LadderRow], Value]]
SPEED: Columns = {
    "variant": lambda name, _: name,
    "on the baseline": lambda _, row: " + ".join(row.members) or "nothing",
    "update, ms": lambda _, row: row.update_ms,
    "against the baseline": lambda _, row: str(row.outcome.ratio or ""),
    "verdict": lambda _, row: row.verdict,
    "by itself": lambda _, row: str(row.own or ""),
    "start, s": lambda _, row: row.start_s,
    "compile, s": lambda _, row: row.compile_s,
    "pays after, updates": lambda _, row: row.outcome.pays_at if row.outcome.is_faster else None,
}


def _percent(get: Callable[[Any], float | None]) -> Callable[[str, LadderRow], Value]:
    def value(_: str, row: LadderRow) -> Value:
        found = None if row.outcome.numerics is None else get(row.outcome.numerics)
        return None if found is None else 100 * found

    return value


def _computes(_: str, row: LadderRow) -> str:
    return "" if row.outcome.numerics is None else "something else" if row.outcome.is_wrong else "the same"


COSTS: Columns = {
    "variant": lambda name, _: name,
    "peak memory, GiB": lambda _, row: row.usage.peak_gib,
    "optimizer, MiB": lambda _, row: row.usage.optimizer_mib,
    "loss off, %": _percent(lambda numerics: max(numerics.loss, numerics.later)),
    "gradient off, %": _percent(lambda numerics: numerics.grad_norm),
    "weights off, %": _percent(lambda numerics: numerics.moved),
    "computes": _computes,
    "attention": lambda _, row: row.usage.attention,
    "energy, J": lambda _, row: row.usage.update_j,
}


def _tables(rows: Mapping[str, LadderRow]) -> list[SuiteTable]:
    tables = {"speed": SPEED, "an update: memory, numbers against the baseline, kernels": COSTS}
    return [
        SuiteTable(title, tuple(columns), [[get(name, row) for get in columns.values()] for name, row in rows.items()])
        for title, columns in tables.items()
    ]


def _names(members: Iterable[Technique]) -> tuple[str, ...]:
    return tuple(technique.name for technique in members)


def _init(results: Results) -> SuiteReport:
    results.init()
    return SuiteReport("created an empty table", files=(results.csv,))


def _reset(results: Results) -> SuiteReport:
    results.reset()
    return SuiteReport("removed all results; the table is empty", files=(results.csv,))


def _clean(results: Results) -> SuiteReport:
    removed = results.clean()
    return SuiteReport(f"removed: {', '.join(map(str, removed))}" if removed else "there was nothing to remove")


def _plots(results: Results) -> SuiteReport:
    return SuiteReport("", files=tuple(plots.draw(results)))


ACTIONS: Mapping[str, Callable[[Results], SuiteReport]] = {
    "init": _init, "reset": _reset, "clean": _clean, "plots": _plots,
}  # fmt: skip
SHARE_ALONE = 0.5  # of the time, for each technique alone: the stack depends on it
SHARE_OF_STARTS = 0.6  # of the time of the stack, for the starts of one technique that gains nothing
SHARE_OF_START = 0.3  # of a stage, for one start: compilation must not use the time of the others
LEAST_START_S = 20.0
LEAST_S = 10.0  # for a stage
