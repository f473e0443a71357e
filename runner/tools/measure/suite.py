"""Shared parts of the suites of `accel-run benchmark`: request, arguments, tables, comparisons, JSON files."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.base.json_values import replace_nonfinite
from runner.base.stopwatch import PARTS
from runner.base.text import format_table
from runner.config.request import Request
from runner.durable.files import atomic_write, make_directory
from runner.tools.measure.compare import MIN_ROUNDS, CallFunction, CompareLimits, LogFunction
from runner.tools.measure.comparison_result import ComparisonResult, Variant, VariantResult, as_json
from runner.tools.measure.measurement_context import MeasurementContext, open_context
from runner.tools.measure.results import hardware
from runner.tools.measure.selection import Confirmation, Selection, select

Value = str | float | int | None
Replies = list[dict[str, Any]]
Columns = Mapping[str, Callable[[VariantResult], Value]]


@dataclass(frozen=True)
class SuiteRequest:
    """The arguments of a suite.

    request     settings of the training run that is measured
    positional  arguments without a value, such as `plots` or names of techniques, in order
    options     key=value arguments that the suite declares
    folder      folder for results and plots
    prefix      first letters of the names of these files
    budget_s    approximate total time in seconds
    """

    request: Request
    positional: tuple[str, ...]
    options: Mapping[str, str]
    folder: Path
    prefix: str
    budget_s: float
    log: LogFunction = print

    def file(self, name: str) -> Path:
        """Return the path of a file in the folder, with the prefix."""
        return self.folder / f"{self.prefix}{name}"

    def parse_numbers(self, key: str, least: int = 1) -> tuple[int, ...]:
        """Parse `key=1,2,4`; return the numbers in order, without duplicates. Raises ConfigError."""
        values = _split_list(self.options[key])
        if not all(value.isascii() and value.isdigit() and int(value) >= least for value in values):
            what = f"must be integers of at least {least}, separated by commas"
            fix = f"use {key}={least},{2 * max(least, 1)}"
            raise ConfigError(Problem(what, f"{key}={self.options[key]}", fix))
        return tuple(dict.fromkeys(map(int, values)))

    def parse_choices(self, key: str, known: Sequence[str]) -> tuple[str, ...]:
        """Parse `key=a,b`; return the values in order, without duplicates. Raises ConfigError for an unknown one."""
        values = _split_list(self.options[key])
        unknown = [value for value in values if value not in known]
        if unknown:
            what = f"must be values from {', '.join(known)}, but {unknown[0] or 'an empty value'} is not one of them"
            problem = Problem(what, f"{key}={self.options[key]}", f"use {key}={','.join(known)}")
            raise ConfigError(problem, of_known_keys=True)
        return tuple(dict.fromkeys(values))

    def refuse_positional(self) -> None:
        """Raise ConfigError for an argument without `=`."""
        if self.positional:
            known = ", ".join(f"{key}=" for key in self.options)
            what, fix = "is not an argument of this suite", f"use {known}, or a setting"
            raise ConfigError(Problem(what, self.positional[0], fix))

    def limits(self, share: float = 1.0) -> CompareLimits:
        """Return the limits of a comparison with this share of the budget."""
        return CompareLimits(budget_s=share * self.budget_s, rounds=ROUNDS, block_s=BLOCK_S)


def _split_list(text: str) -> list[str]:
    return [value.strip() for value in text.strip("[]").split(",")]


# ---------------------------------------------------------------- report


@dataclass(frozen=True)
class SuiteTable:
    """A table; column names include the unit, as in `update, ms`. None: not measured."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]


@dataclass(frozen=True)
class SuiteReport:
    """The result of a suite.

    headline  one sentence that answers the question of the suite
    skipped   name of what was not measured -> reason
    data      all measurements, JSON-serializable
    files     written files, in order
    """

    headline: str
    tables: Sequence[SuiteTable] = ()
    notes: Sequence[str] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[Path] = ()


def make_table(title: str, columns: Columns, rows: Iterable[VariantResult]) -> SuiteTable:
    """Return a table with one row per variant; each column computes its value from the variant."""
    return SuiteTable(title, tuple(columns), [[value(row) for value in columns.values()] for row in rows])


def screen(report: SuiteReport, columns: int = 0) -> list[str]:
    """Return the lines to print.

    columns  width of the terminal: a wider table is printed in several parts, each with the first column; 0: no limit
    """
    lines: list[str] = []
    for table in report.tables:
        cells = [[_format_cell(value) for value in row] for row in table.rows]
        is_text = [any(isinstance(row[at], str) for row in table.rows) for at in range(len(table.columns))]
        alignment = "".join("<" if left else ">" for left in is_text)
        parts = _split_table([[*table.columns], *cells], alignment, columns)
        for number, (rows, sides) in enumerate(parts):
            title = table.title if number == 0 else f"{table.title} (continued)"
            lines += [title, *format_table(rows, sides, indent="  "), ""]
    if report.skipped:
        lines += ["not measured", *format_table([*report.skipped.items()], indent="  "), ""]
    lines += [f"note: {note}" for note in report.notes]
    lines += [report.headline] if report.headline else []
    return [*lines, *(f"written      {file}" for file in report.files)]


def _split_table(rows: list[list[str]], sides: str, columns: int) -> Iterator[tuple[list[list[str]], str]]:
    """Yield tables that fit the width, with the alignment of their columns; each has the first column."""
    widths = [2 + max(map(len, column)) for column in zip(*rows, strict=True)]
    part, used = [0], widths[0]
    for at, width in list(enumerate(widths))[1:]:
        if columns and len(part) > 1 and used + width > columns:
            yield [[row[i] for i in part] for row in rows], "".join(sides[i] for i in part)
            part, used = [0], widths[0]
        part.append(at)
        used += width
    yield [[row[i] for i in part] for row in rows], "".join(sides[i] for i in part)


def _format_cell(value: Value) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def save_report(
    suite_request: SuiteRequest, name: str, report: SuiteReport, result: ComparisonResult | None = None
) -> SuiteReport:
    """Write the data of the report to `<prefix><name>.json`, and return the report with that file."""
    origin = {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "hardware": hardware()}
    measurements = as_json(result) if result is not None else {}
    text = {"headline": report.headline, "notes": list(report.notes), "skipped": dict(report.skipped)}
    tables = [dataclasses.asdict(table) for table in report.tables]
    data = replace_nonfinite({"suite": name, **origin, **measurements, **text, "tables": tables, **report.data})
    make_directory(suite_request.folder)
    file = suite_request.file(f"{name}.json")
    atomic_write(file, json.dumps(data, indent=2) + "\n")
    return dataclasses.replace(report, data=data, files=(*report.files, file))


# ---------------------------------------------------------------- comparisons


@contextmanager
def open_suite_context(suite_request: SuiteRequest) -> Iterator[MeasurementContext]:
    """Open the measurement context of a suite. Raises ConfigError for an unknown argument."""
    suite_request.refuse_positional()
    with open_context(suite_request.request) as context:
        yield context


def compare_variants(
    context: MeasurementContext, variants: Sequence[Variant], suite_request: SuiteRequest, share: float = 1.0
) -> ComparisonResult:
    """Measure the variants in this share of the budget."""
    return context.comparison.compare(variants, suite_request.limits(share), suite_request.log)


def select_variant(
    context: MeasurementContext,
    variants: Sequence[Variant],
    suite_request: SuiteRequest,
    may_win: Callable[[VariantResult], bool] = lambda _: True,
) -> Selection:
    """Measure the variants and select the best."""
    return select(
        lambda variants, limits: context.comparison.compare(variants, limits, suite_request.log),
        variants,
        suite_request.limits(),
        may_win=may_win,
        confirmation=Confirmation(log=lambda name: suite_request.log(f"measuring {name} again")),
    )


def format_verdict(result: ComparisonResult, trial: VariantResult) -> str:
    return "baseline" if trial is result.baseline else result.outcome(trial).verdict


def format_gain(result: ComparisonResult, trial: VariantResult) -> str:
    """Format the gain of a variant with its interval; empty for the baseline."""
    ratio = None if trial is result.baseline else result.ratio(trial)
    return "" if ratio is None else str(ratio)


def data_wait_percent(trial: VariantResult) -> float | None:
    """Return the share of the time of updates that a variant waited for data, in percent; None if unknown."""
    seconds = sum(trial.parts_s.get(part, 0.0) for part in PARTS)
    return 100 * trial.parts_s.get("data", 0.0) / seconds if seconds else None


def call_interleaved(
    context: MeasurementContext,
    variants: Sequence[Variant],
    suite_request: SuiteRequest,
    command: Mapping[str, Any],
    budget_s: float,
) -> dict[str, Replies | str]:
    """Send a command to all variants, interleaved; return the replies of each, one per round, or why there are none.

    Use it for measurements other than blocks of updates. All variants are alive, and one computes at a time.
    """
    deadline = time.monotonic() + budget_s
    replies: dict[str, Replies | str] = {}
    with ExitStack() as stack:
        calls: dict[str, CallFunction] = {}
        for variant in variants:
            suite_request.log(f"starting {variant.name}")
            try:
                calls[variant.name], _ = stack.enter_context(
                    context.comparison.open_variant(variant, suite_request.limits())
                )
            except AccelRunError as error:
                replies[variant.name] = error.problems[0].what
        shuffle = random.Random(0)
        for number in range(1, CALL_ROUNDS_FACTOR * ROUNDS[0] + 1):
            names = list(calls)
            shuffle.shuffle(names)
            for name in names:
                try:
                    received = replies.setdefault(name, [])
                    assert isinstance(received, list)
                    received.append(calls[name](command))
                except AccelRunError as error:
                    replies[name] = error.problems[0].what
                    del calls[name]
            if time.monotonic() > deadline and number > MIN_ROUNDS:
                break
    return replies


CALL_ROUNDS_FACTOR = 2  # more rounds than for blocks of updates, because each reply is a single measurement
ROUNDS = (6, 60)  # minimum and maximum number of blocks of a variant
BLOCK_S = 0.4
