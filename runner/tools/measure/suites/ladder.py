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
from runner.durable.signals import install_handler, restore_handlers
from runner.tools.measure import plots
from runner.tools.measure.compare import MIN_ROUNDS, ComparisonInterrupted
from runner.tools.measure.comparison_result import ComparisonResult, TrialOutcome, Variant, VariantResult
from runner.tools.measure.measurement_context import MeasurementContext
from runner.tools.measure.results import LadderRow, Results, Usage
from runner.tools.measure.suite import ROUNDS, SuiteReport, SuiteRequest, SuiteTable, Value, open_suite_context
from runner.tools.measure.suites import MODES, SUITES
from runner.tools.measure.technique import (
    BASELINE,
    STACK,
    Technique,
    load_techniques,
    select_techniques,
    stack_overrides,
)


@dataclass(frozen=True)
class LadderRequest:
    """The validated arguments of `suite=ladder`."""

    request: Request
    configuration: Configuration
    base: Technique
    members: tuple[Technique, ...]
    modes: tuple[str, ...]
    steps: int
    rounds: int

    def variant(self, name: str, members: Iterable[Technique]) -> Variant:
        return Variant(name, stack_overrides(members, self.base, self.configuration))

    def effective(self, members: Sequence[Technique]) -> tuple[Technique, ...]:
        """Return the techniques of a stack, except those whose settings a later one overrides."""
        overrides = set(stack_overrides(members, self.base, self.configuration))
        return tuple(technique for technique in members if overrides.issuperset(technique.overrides))


def run(suite_request: SuiteRequest) -> SuiteReport:
    """Measure the techniques, or perform the requested action, such as `plots`. Raises AccelRunError."""
    results = Results(suite_request.folder, suite_request.prefix)
    actions = [word for word in suite_request.positional if word in ACTIONS]
    if actions:
        others = list(suite_request.positional)
        others.remove(actions[0])
        if others:
            what = f"must be the only argument, but there is also {' '.join(others)}"
            raise ConfigError(Problem(what, actions[0], "run one after the other"))
        return ACTIONS[actions[0]](results)
    ladder_request = parse_request(suite_request)
    task = ladder_request.configuration.choices["task"].name
    _check_task(task, results)
    is_main = not suite_request.positional or bool({BASELINE, "all"} & set(suite_request.positional))
    session: int | None = None

    def keep(rows: Mapping[str, LadderRow]) -> None:
        nonlocal session
        measured = {name: dataclasses.replace(row, task=task) for name, row in rows.items() if row.updates_ms}
        if measured:
            session = results.put(measured, session=session, is_main=is_main)

    with open_suite_context(
        dataclasses.replace(suite_request, request=ladder_request.request, positional=())
    ) as context:
        ladder = Ladder(ladder_request, suite_request, context, keep)
        try:
            ladder.measure()
        except KeyboardInterrupt:
            if ladder.rows:
                suite_request.log(f"stopped; the measurements so far are in {results.csv}")
            raise
    plot_files = plots.draw_plots(results) if "all" in suite_request.positional else []
    return dataclasses.replace(ladder.report(), files=(results.csv, results.json, *plot_files))


class Ladder:
    """Measures each technique alone (the isolated stage), and then a stack of them (the cumulative stage).

    keep  called with the new rows at the end of each stage, even if the stage was interrupted
    """

    def __init__(
        self,
        ladder_request: LadderRequest,
        suite_request: SuiteRequest,
        context: MeasurementContext,
        keep: Callable[[Mapping[str, LadderRow]], None],
    ) -> None:
        self.request, self.suite_request, self.context, self.keep = ladder_request, suite_request, context, keep
        self.rows: dict[str, LadderRow] = {}
        obstacles = {
            technique.name: technique.why_not(ladder_request.configuration, context.plan.device)
            for technique in ladder_request.members
        }
        self.skipped = {name: why for name, why in obstacles.items() if why}
        self.notes = [*context.notes]
        self.deadline = time.monotonic() + suite_request.budget_s

    def measure(self) -> None:
        """Run the requested stages."""
        members = self._remaining(self.request.members)
        if "isolated" in self.request.modes or not members:
            with self._keep_rows():
                self.measure_isolated(members)
            members = self._remaining(members)
            if "cumulative" in self.request.modes:
                members = self._drop_exclusive(members)
        if self._is_impossible():
            why = "; ".join(f"{name}: {why}" for name, why in self.skipped.items())
            raise ConfigError(Problem(f"none can be measured here: {why}", "techniques", "use techniques=all"))
        if "cumulative" in self.request.modes and members:
            if self.rows and self.deadline - time.monotonic() < MIN_STAGE_S:
                self.notes.append("stack: not measured: the time budget was used up; use a larger budget_s=")
                return
            with self._keep_rows():
                self.measure_stack(self.drop_slow_starters(members))

    def _is_impossible(self) -> bool:
        """Return whether no technique can be measured here, not even with a larger budget."""
        names = [technique.name for technique in self.request.members]
        has_time = [name for name in names if not (name in self.rows and self.rows[name].outcome.is_untried)]
        return bool(names) and has_time == names and set(names) <= self.skipped.keys()

    def _remaining(self, members: Sequence[Technique]) -> tuple[Technique, ...]:
        return tuple(technique for technique in members if technique.name not in self.skipped)

    @contextmanager
    def _keep_rows(self) -> Iterator[None]:
        """Store the rows of a stage when it ends, even if it fails."""
        before = set(self.rows)
        try:
            yield
        finally:
            if not self._is_impossible():
                self.keep({name: row for name, row in self.rows.items() if name not in before})

    def measure_isolated(self, members: Sequence[Technique]) -> None:
        """Measure each technique alone against the baseline."""
        self.suite_request.log(f"measuring each alone: {', '.join(_get_names(members)) or BASELINE}")
        share = ISOLATED_SHARE if "cumulative" in self.request.modes else 1.0
        result = self._compare("isolated", [self.request.variant(each.name, [each]) for each in members], share)
        for technique in members:
            self._add_row(result, technique.name, "isolated", (technique.name,))

    def measure_stack(self, members: Sequence[Technique]) -> None:
        """Measure the techniques on top of each other."""
        stacks = {f"{STACK}{last.name}": members[: index + 1] for index, last in enumerate(members)}
        variants: dict[tuple[str, ...], Variant] = {}
        names: dict[str, str] = {}  # variants with the same overrides are measured once
        for name, stack in stacks.items():
            variant = self.request.variant(name, stack)
            names[name] = variants.setdefault(variant.overrides, variant).name
        self.suite_request.log(f"measuring them on top of each other: {', '.join(stacks)}")
        result = self._compare("stack", list(variants.values()), 1.0)
        before = result.baseline
        for name, stack in stacks.items():
            trial = result.of(names[name])
            row = self._add_row(result, name, "cumulative", _get_names(self.request.effective(stack)), trial)
            if row.outcome.ratio:
                self.rows[name] = dataclasses.replace(row, own=result.ratio(trial, before))
            before = trial

    def _drop_exclusive(self, members: Sequence[Technique]) -> tuple[Technique, ...]:
        """Drop techniques that change the numerical results; of mutually exclusive ones, keep only the fastest."""
        kept: list[Technique] = []
        # The results of each technique alone decide, because measuring all combinations would take too long.
        for technique in members:
            row = self.rows.get(technique.name)
            if row is None or row.outcome.is_wrong:
                self.notes.append(f"{technique.name} changes the numerical results, and is not stacked")
                continue
            rival = next((other for other in kept if len(self.request.effective((other, technique))) < 2), None)
            if rival is None:
                kept.append(technique)
                continue
            faster = max(rival, technique, key=lambda member: self.rows[member.name].outcome.gain)
            kept[kept.index(rival)] = faster
            self.notes.append(f"{rival.name} and {technique.name} exclude each other; {faster.name} was faster")
        return tuple(sorted(kept, key=list(members).index))

    def drop_slow_starters(self, members: Sequence[Technique]) -> tuple[Technique, ...]:
        """Drop techniques that gain nothing alone and whose start-up would use most of the remaining time.

        Each variant starts from scratch, so a technique that compiles for a minute does so in every stack.
        """
        left_s = self.deadline - time.monotonic()
        for technique in members:
            row = self.rows.get(technique.name)
            if row is None or row.outcome.ratio is None or row.outcome.is_faster:
                continue
            starts_s = (row.start_s + row.compile_s) * len(members)
            if starts_s > MAX_STARTS_SHARE * left_s and len(members) > 1:
                what = f"{row.verdict} alone, and its start-ups in the stack would take {starts_s:.0f} s"
                self.skipped[f"up to {technique.name}"] = f"{what}; use a larger budget_s="
                members = tuple(member for member in members if member != technique)
        return tuple(members)

    def _compare(self, stage: str, variants: Sequence[Variant], share: float) -> ComparisonResult:
        """Compare variants with the baseline, using this fraction of the remaining time."""
        min_rounds = min(ROUNDS[0], self.request.rounds)
        budget_s = max(MIN_STAGE_S, share * (self.deadline - time.monotonic()))
        limits = dataclasses.replace(
            self.suite_request.limits(),
            budget_s=budget_s,
            rounds=(min_rounds, self.request.rounds),
            min_updates=math.ceil(self.request.steps / min_rounds),
            start_s=max(MIN_START_S, MAX_START_SHARE * budget_s),
        )
        if self.context.plan.device.startswith("cpu"):  # float16 is ten times slower there, so it is measured last
            variants = sorted(variants, key=lambda variant: "precision=fp16" in variant.overrides)
        try:
            with _interruptible():
                variants = [Variant(BASELINE, self.request.base.overrides), *variants]
                result = self.context.comparison.compare(variants, limits, self.suite_request.log)
        except ComparisonInterrupted as stopped:
            self._keep_complete(stopped.result, stage)
            raise
        self.notes += [f"{stage}: {note}" for note in result.notes]
        if BASELINE not in self.rows:
            if not result.baseline.blocks:
                what = "is too short: the time budget was used up before the first block"
                raise ConfigError(
                    Problem(what, f"budget_s={self.suite_request.budget_s:g}", "or list fewer techniques=")
                )
            self._add_row(result, BASELINE, BASELINE, ())
        return result

    def _keep_complete(self, result: ComparisonResult, stage: str) -> None:
        """Add the complete rows of an interrupted stage, except rows of a stack, which depend on previous ones."""
        for trial in result.variants:
            name, is_baseline = trial.name, trial is result.baseline
            is_complete = len(trial.blocks) >= MIN_ROUNDS and name not in self.rows
            if is_complete and (is_baseline or stage == "isolated"):
                self._add_row(result, name, BASELINE if is_baseline else stage, () if is_baseline else (name,))

    def _add_row(
        self, result: ComparisonResult, name: str, mode: str, members: tuple[str, ...],
        trial: VariantResult | None = None,
    ) -> LadderRow:  # fmt: skip
        row = _make_row(result, trial or result.of(name), mode, members, self.request.steps)
        self.rows[name] = row
        if row.outcome.why_not:
            self.skipped[name] = row.outcome.why_not
        return row

    def report(self) -> SuiteReport:
        measured = {name: row for name, row in self.rows.items() if row.update_ms > 0}
        notes = tuple(dict.fromkeys(self.notes))
        rows = [replace_nonfinite({"variant": name, **row.as_json()}) for name, row in self.rows.items()]
        data = {"rows": rows, "skipped": self.skipped, "notes": notes}
        return SuiteReport(self._make_headline(), _make_tables(measured), notes, self.skipped, data)

    def _make_headline(self) -> str:
        faster = [row for row in self.rows.values() if row.outcome.is_faster]
        if not any(row.outcome.ratio for name, row in self.rows.items() if name != BASELINE):
            return "nothing was compared with the baseline"
        if not faster:
            return "no technique is clearly faster than the baseline with the same numerical results"
        best = max(faster, key=lambda row: row.outcome.gain)
        return f"fastest: {' + '.join(best.members)}, {best.outcome.ratio} updates per second"


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM, so that measurements are kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = install_handler((signal.SIGINT, signal.SIGTERM), signal.default_int_handler)
    try:
        yield
    finally:
        restore_handlers(before)


# ---------------------------------------------------------------- request


def parse_request(suite_request: SuiteRequest) -> LadderRequest:
    """Parse and validate the arguments of the suite. Raises ConfigError."""
    options, problems = suite_request.options, list[Problem]()
    defaults = SUITES["ladder"].options
    numbers = {}
    for key in ("steps", "rounds", "batch"):
        text = options[key]
        if key == "batch" and not text:
            continue
        numbers[key] = int(text) if text.isdecimal() and len(text) < 10 else 0
        if numbers[key] < 1:
            fix = f"use {key}={defaults[key] or 64}"
            problems.append(Problem("must be an integer above 0", f"{key}={text}", fix))
    if problems:
        raise ConfigError(problems)
    positional = [name for name in suite_request.positional if name != "all"]
    known = load_techniques(suite_request.request.config_dir, suite_request.request.task_file)
    if positional and options["techniques"] != defaults["techniques"]:
        what = f"cannot be combined with {' '.join(positional)}, which also select techniques"
        raise ConfigError(Problem(what, f"techniques={options['techniques']}", "use one of them"))
    listed = [name.strip() for name in options["techniques"].strip("[]").split(",") if name.strip()]
    names = positional or (list(known) if listed == ["all"] else listed)
    members = select_techniques(names, known)
    if not members and BASELINE not in names:
        raise ConfigError(Problem("must contain a technique to compare with the baseline", "techniques"))
    suite_request = dataclasses.replace(
        suite_request, options={**options, "modes": options["modes"] or ("isolated" if positional else "all")}
    )
    request = suite_request.request
    if "batch" in numbers:
        overrides = merge_overrides(request.overrides, [f"global_batch_size={numbers['batch']}"])
        request = dataclasses.replace(request, overrides=overrides)
    return LadderRequest(
        request,
        compose(request),
        known[BASELINE],
        tuple(members),
        MODES if suite_request.options["modes"] == "all" else suite_request.parse_choices("modes", MODES),
        numbers["steps"],
        numbers["rounds"],
    )


def _check_task(task: str, results: Results) -> None:
    """Raise ConfigError if the result files contain another task, and DataError if they are damaged."""
    try:
        others = {row.task for row in results.rows().values() if row.task} - {task}
    except InputMissing:
        return
    if others:
        what = f"contains measurements of task {', '.join(sorted(others))}, but this is task {task}"
        fix = f"use prefix={task}-, or another folder=DIR, or remove these results first with accel-run benchmark clean"
        raise ConfigError(Problem(what, str(results.csv), fix))


# ---------------------------------------------------------------- results


def _make_row(
    result: ComparisonResult, trial: VariantResult, mode: str, members: tuple[str, ...], steps: int
) -> LadderRow:
    if not trial.blocks:
        return LadderRow(mode, members, outcome=TrialOutcome(why_not=trial.why_not or "the time budget was used up"))
    report = trial.report
    usage = Usage(
        trial.peak_gib,
        report["optimizer_bytes"][1] / 2**20 if report.get("optimizer_bytes") else None,
        ", ".join(sorted({kernel for _, kernel, _ in report.get("attention", [])})),
        trial.opened["device"],
        trial.opened["device_name"],
    )
    return LadderRow(
        mode,
        members,
        trial.median_ms,
        TrialOutcome(why_not=trial.why_not) if trial is result.baseline else result.outcome(trial),
        start_s=trial.startup.start_s,
        compile_s=max(0.0, trial.startup_s - trial.startup.start_s),
        usage=usage,
        updates_ms=take_evenly_spaced(
            [ms for _, block in sorted(trial.blocks.items()) for ms in block.updates_ms], steps
        ),
    )


def take_evenly_spaced(values: Sequence[float], num: int) -> tuple[float, ...]:
    """Return at most `num` of the values, evenly spaced."""
    if len(values) <= num:
        return tuple(values)
    return tuple(values[index * len(values) // num] for index in range(num))


Columns = Mapping[str, Callable[[str, LadderRow], Value]]
SPEED_COLUMNS: Columns = {
    "variant": lambda name, _: name,
    "techniques": lambda _, row: " + ".join(row.members) or "none",
    "update, ms": lambda _, row: row.update_ms,
    "vs baseline": lambda _, row: str(row.outcome.ratio or ""),
    "verdict": lambda _, row: row.verdict,
    "vs previous": lambda _, row: str(row.own or ""),
    "start, s": lambda _, row: row.start_s,
    "compile, s": lambda _, row: row.compile_s,
    "pays after, updates": lambda _, row: row.outcome.pays_at if row.outcome.is_faster else None,
}


def _percent_column(get: Callable[[Any], float | None]) -> Callable[[str, LadderRow], Value]:
    def value(_: str, row: LadderRow) -> Value:
        share = None if row.outcome.numerics is None else get(row.outcome.numerics)
        return None if share is None else 100 * share

    return value


def _numerics_column(_: str, row: LadderRow) -> str:
    return "" if row.outcome.numerics is None else "different" if row.outcome.is_wrong else "same"


COST_COLUMNS: Columns = {
    "variant": lambda name, _: name,
    "peak memory, GiB": lambda _, row: row.usage.peak_gib,
    "optimizer, MiB": lambda _, row: row.usage.optimizer_mib,
    "loss diff, %": _percent_column(lambda numerics: max(numerics.loss, numerics.later)),
    "gradient diff, %": _percent_column(lambda numerics: numerics.grad_norm),
    "weights diff, %": _percent_column(lambda numerics: numerics.moved),
    "numerics": _numerics_column,
    "attention": lambda _, row: row.usage.attention,
}


def _make_tables(rows: Mapping[str, LadderRow]) -> list[SuiteTable]:
    tables = {"speed": SPEED_COLUMNS, "each update: memory, differences from the baseline, kernels": COST_COLUMNS}
    return [
        SuiteTable(title, tuple(columns), [[get(name, row) for get in columns.values()] for name, row in rows.items()])
        for title, columns in tables.items()
    ]


def _get_names(members: Iterable[Technique]) -> tuple[str, ...]:
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
    """Plot the results with this prefix, or those without a prefix if there are none, to files with the prefix."""
    unprefixed = Results(results.folder)
    measured = results if results.exists or not unprefixed.exists else unprefixed
    return SuiteReport("", files=tuple(plots.draw_plots(measured, results)))


ACTIONS: Mapping[str, Callable[[Results], SuiteReport]] = {
    "init": _init, "reset": _reset, "clean": _clean, "plots": _plots,
}  # fmt: skip
ISOLATED_SHARE = 0.5  # fraction of the time for the isolated stage
MAX_STARTS_SHARE = 0.6  # share of the remaining time; a technique without gain whose starts need more is dropped
MAX_START_SHARE = 0.3  # maximum share of the time of a stage for one start-up, so that other variants have time
MIN_START_S = 20.0
MIN_STAGE_S = 10.0
