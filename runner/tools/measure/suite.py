"""What all suites of `accel-run benchmark` share: their request, arguments, tables, comparisons and JSON files."""

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
from runner.tools.measure.compare import LEAST_ROUNDS, Ask, CompareLimits, Say, enough
from runner.tools.measure.comparison_result import ComparisonResult, Variant, VariantResult, as_json
from runner.tools.measure.measuring_place import MeasuringPlace, measuring
from runner.tools.measure.results import hardware
from runner.tools.measure.selection import Confirmation, Selection, select

Value = str | float | int | None
Answers = list[dict[str, Any]]
Columns = Mapping[str, Callable[[VariantResult], Value]]


@dataclass(frozen=True)
class SuiteRequest:
    """What a suite is asked to do.

    request   the settings of the training that is measured
    words     arguments without a value, as `plots` or the names of techniques, in the order given
    options   key=value arguments that the suite declares
    folder    for results and plots
    prefix    of their names
    budget_s  approximate seconds for everything
    """

    request: Request
    words: tuple[str, ...]
    options: Mapping[str, str]
    folder: Path
    prefix: str
    budget_s: float
    say: Say = print

    def file(self, name: str) -> Path:
        """Return the file of that name in the folder, with the prefix."""
        return self.folder / f"{self.prefix}{name}"

    def numbers(self, key: str, least: int = 1) -> tuple[int, ...]:
        """Return the numbers of `key=1,2,4`, each once, in the order given. Raises ConfigError."""
        words = _listed(self.options[key])
        if not all(word.isascii() and word.isdigit() and int(word) >= least for word in words):
            what = f"must be whole numbers from {least} on, with commas between them"
            fix = f"use {key}={least},{2 * max(least, 1)}"
            raise ConfigError(Problem(what, f"{key}={self.options[key]}", fix))
        return tuple(dict.fromkeys(map(int, words)))

    def some_of(self, key: str, known: Sequence[str]) -> tuple[str, ...]:
        """Return the words of `key=a,b`, each once, in the order given. Raises ConfigError if one is unknown."""
        words = _listed(self.options[key])
        wrong = [word for word in words if word not in known]
        if wrong:
            what = f"must be some of {', '.join(known)}, but {wrong[0] or 'nothing'} is none of them"
            problem = Problem(what, f"{key}={self.options[key]}", f"use {key}={','.join(known)}")
            raise ConfigError(problem, of_known_keys=True)
        return tuple(dict.fromkeys(words))

    def refuse_words(self) -> None:
        """Raise ConfigError for an argument without `=`."""
        if self.words:
            known = ", ".join(f"{key}=" for key in self.options)
            what, fix = "is not an argument of this suite", f"use {known}, or a setting"
            raise ConfigError(Problem(what, self.words[0], fix))

    def limits(self, share: float = 1.0) -> CompareLimits:
        """Return the limits of a comparison in this share of the budget."""
        return CompareLimits(budget_s=share * self.budget_s, rounds=ROUNDS, block_s=BLOCK_S)


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.strip("[]").split(",")]


# ---------------------------------------------------------------- report


@dataclass(frozen=True)
class SuiteTable:
    """Rows under named columns; names include the unit, as in `update, ms`. None: not measured."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]


@dataclass(frozen=True)
class SuiteReport:
    """The result of a suite.

    headline  one sentence that answers the question of the suite
    skipped   what could not be measured -> reason
    data      everything that was measured, as JSON-serializable data
    files     written files, in order
    """

    headline: str
    tables: Sequence[SuiteTable] = ()
    notes: Sequence[str] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[Path] = ()


def table_of(title: str, columns: Columns, rows: Iterable[VariantResult]) -> SuiteTable:
    """Return a table with a row for each variant."""
    return SuiteTable(title, tuple(columns), [[value(row) for value in columns.values()] for row in rows])


def screen(report: SuiteReport) -> list[str]:
    """Return the lines to print."""
    lines: list[str] = []
    for table in report.tables:
        cells = [[_text(value) for value in row] for row in table.rows]
        is_text = [any(isinstance(row[at], str) for row in table.rows) for at in range(len(table.columns))]
        sides = "".join("<" if words else ">" for words in is_text)
        lines += [table.title, *format_table([[*table.columns], *cells], sides, indent="  "), ""]
    if report.skipped:
        lines += ["not measured", *format_table([*report.skipped.items()], indent="  "), ""]
    lines += [f"note: {note}" for note in report.notes]
    lines += [report.headline] if report.headline else []
    return [*lines, *(f"written      {file}" for file in report.files)]


def _text(value: Value) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def saved(wanted: SuiteRequest, name: str, report: SuiteReport, trials: ComparisonResult | None = None) -> SuiteReport:
    """Write the data of the report to `<prefix><name>.json`, and return the report with that file."""
    about = {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "hardware": hardware()}
    measured = as_json(trials) if trials is not None else {}
    shown = {"headline": report.headline, "notes": list(report.notes), "skipped": dict(report.skipped)}
    tables = [dataclasses.asdict(table) for table in report.tables]
    data = replace_nonfinite({"suite": name, **about, **measured, **shown, "tables": tables, **report.data})
    make_directory(wanted.folder)
    file = wanted.file(f"{name}.json")
    atomic_write(file, json.dumps(data, indent=2) + "\n")
    return dataclasses.replace(report, data=data, files=(*report.files, file))


# ---------------------------------------------------------------- comparisons


@contextmanager
def place_of(wanted: SuiteRequest) -> Iterator[MeasuringPlace]:
    """Open the place in which the variants of a suite are measured. Raises ConfigError for an unknown argument."""
    wanted.refuse_words()
    with measuring(wanted.request) as place:
        yield place


def compared(
    place: MeasuringPlace, variants: Sequence[Variant], wanted: SuiteRequest, share: float = 1.0
) -> ComparisonResult:
    """Measure the variants in this share of the budget; a note says how much would be enough."""
    trials = place.comparison.compare(variants, wanted.limits(share), wanted.say)
    if trials.needs_s:
        trials.notes.append(f"there was no time to try every setting; {enough(trials.needs_s / share, trials)}")
    return trials


def selected(
    place: MeasuringPlace,
    variants: Sequence[Variant],
    wanted: SuiteRequest,
    may_win: Callable[[VariantResult], bool] = lambda _: True,
) -> Selection:
    """Measure the variants and choose the best."""
    found = select(
        lambda variants, limits: place.comparison.compare(variants, limits, wanted.say),
        variants,
        wanted.limits(),
        may_win=may_win,
        confirmation=Confirmation(say=lambda name: wanted.say(f"measures {name} once more")),
    )
    trials = found.trials
    if trials.needs_s:
        trials.notes.append(f"there was no time to try every setting; {enough(trials.needs_s, trials)}")
    return found


def verdict_of(trials: ComparisonResult, measured: VariantResult) -> str:
    """Return what is certain about a variant."""
    return "baseline" if measured is trials.baseline else trials.outcome(measured).verdict


def gain_of(trials: ComparisonResult, measured: VariantResult) -> str:
    """Return the gain of a variant with its interval; empty for the baseline."""
    ratio = None if measured is trials.baseline else trials.ratio(measured)
    return "" if ratio is None else str(ratio)


def data_wait(measured: VariantResult) -> float | None:
    """Return the percentage of the updates in which a variant waited for data; None if unknown."""
    seconds = sum(measured.parts_s.get(part, 0.0) for part in PARTS)
    return 100 * measured.parts_s.get("data", 0.0) / seconds if seconds else None


def asked_in_turns(
    place: MeasuringPlace,
    variants: Sequence[Variant],
    wanted: SuiteRequest,
    order: Mapping[str, Any],
    budget_s: float,
) -> dict[str, Answers | str]:
    """Return each variant's answers to the order, one per round, or why it has none; for what is no block of updates.

    All variants are open, and only the one that is asked computes.
    """
    until = time.monotonic() + budget_s
    found: dict[str, Answers | str] = {}
    with ExitStack() as stack:
        asks: dict[str, Ask] = {}
        for variant in variants:
            wanted.say(f"starts {variant.name}")
            try:
                asks[variant.name], _ = stack.enter_context(place.comparison.alone(variant, wanted.limits()))
            except AccelRunError as error:
                found[variant.name] = error.problems[0].what
        shuffle = random.Random(0)
        for number in range(1, LEAST_ANSWERS * ROUNDS[0] + 1):
            names = list(asks)
            shuffle.shuffle(names)
            for name in names:
                try:
                    answers = found.setdefault(name, [])
                    assert isinstance(answers, list)
                    answers.append(asks[name](order))
                except AccelRunError as error:
                    found[name] = error.problems[0].what
                    del asks[name]
            if time.monotonic() > until and number > LEAST_ROUNDS:
                break
    return found


LEAST_ANSWERS = 2  # times the fewest rounds, where nothing is timed more finely
ROUNDS = (6, 60)  # fewest and most blocks of a variant
BLOCK_S = 0.4
