"""What suites share: where their cells take turns, the best of them, tried twice, and how it is shown and kept."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.base.json_values import finite
from runner.base.stopwatch import PARTS
from runner.durable.files import atomic_write, make_directory
from runner.tools.measure.compare import LEAST_ROUNDS, Asked, CompareLimits, enough
from runner.tools.measure.comparison_result import ComparisonResult, Variant, VariantResult, as_json
from runner.tools.measure.measuring_place import MeasuringPlace, measuring
from runner.tools.measure.results import hardware
from runner.tools.measure.statistics import Ratio
from runner.tools.measure.suite import SuiteReport, SuiteRequest

# Words of a person


def whole_numbers(options: Mapping[str, str], key: str, least: int = 1) -> tuple[int, ...]:
    """Return the numbers of `key=1,2,4`, each once, in the order given. Raises ConfigError."""
    text = options[key]
    words = [word.strip() for word in text.strip("[]").split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) >= least for word in words):
        what = f"must be whole numbers from {least} on, with commas between them"
        raise ConfigError(Problem(what, f"{key}={text}", f"use {key}={least},{2 * max(least, 1)}"))
    return tuple(dict.fromkeys(map(int, words)))


def some_of(options: Mapping[str, str], key: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the words of `key=a,b`, each once, in the order given. Raises ConfigError where one is not known."""
    words = [word.strip() for word in options[key].strip("[]").split(",")]
    wrong = [word for word in words if word not in known]
    if wrong:
        what = f"must be some of {', '.join(known)}, but {wrong[0] or 'nothing'} is none of them"
        raise ConfigError(Problem(what, f"{key}={options[key]}", f"use {key}={','.join(known)}"), of_known_keys=True)
    return tuple(dict.fromkeys(words))


def refuse_words(wanted: SuiteRequest) -> None:
    """Raise ConfigError for a word without `=`: these suites know none."""
    if wanted.words:
        known = ", ".join(f"{key}=" for key in wanted.options) or "no words of its own"
        raise ConfigError(Problem("is no word of this suite", wanted.words[0], f"it knows {known}, and settings"))


# Cells


@contextmanager
def place_of(wanted: SuiteRequest) -> Iterator[MeasuringPlace]:
    """Open the place in which the variants of a suite are measured. Raises ConfigError for an unknown argument."""
    refuse_words(wanted)
    with measuring(wanted.request) as place:
        yield place


def measured_in(
    place: MeasuringPlace, cells: Sequence[Variant], wanted: SuiteRequest, share: float
) -> ComparisonResult:
    """Return the cells measured in turns in this share of the budget; a note says which one would do if it does not."""
    trials = place.arena.compare(cells, limits_of(share * wanted.budget_s), wanted.say)
    if trials.needs_s:
        trials.notes.append(f"there was no time to try every setting; {enough(trials.needs_s / share, trials)}")
    return trials


def limits_of(budget_s: float) -> CompareLimits:
    """Return how long and how finely a suite measures."""
    return CompareLimits(budget_s=budget_s, rounds=ROUNDS, block_s=BLOCK_S)


@dataclass(frozen=True)
class SuiteComparison:
    """Cells that were measured, and the best of them.

    best  clearly faster than the baseline in two trials, and computes the same; None: no clear change
    gain  of the best in the second trial: the rounds that chose it flatter it
    """

    trials: ComparisonResult
    best: VariantResult | None
    gain: Ratio | None

    def as_good_as_any(self, what: str) -> str:
        """Return the sentence for where no other cell is better than what there is."""
        others = [cell for cell in self.trials.cells[1:] if self.trials.ratio(cell) and not cell.is_untried]
        said = f"no clear change: {what} is as good as any that was measured"
        return said if others else f"nothing was compared with {what}"


def contest(
    place: MeasuringPlace,
    cells: Sequence[Variant],
    wanted: SuiteRequest,
    may_win: Callable[[VariantResult], bool] = lambda _: True,
) -> SuiteComparison:
    """Measure all cells in turns against the first, then the best of them once more against it alone.

    Among many cells that change nothing some interval leaves 1 out by chance: what the second trial does not find
    too is no clear change.
    """
    until = time.monotonic() + wanted.budget_s
    trials = measured_in(place, cells, wanted, SHARE_OF_FIRST)
    best = max(
        (cell for cell in trials.cells[1:] if is_faster(trials, cell) and may_win(cell)),
        key=lambda cell: _middle(trials.ratio(cell)),
        default=None,
    )
    if best is None:
        return SuiteComparison(trials, None, None)
    wanted.say(f"tries {best.cell.name} once more")
    left_s = max(LEAST_S, until - time.monotonic())
    again = place.arena.compare([cells[0], best.cell], limits_of(left_s), lambda _: None)
    holds = is_faster(again, again.of(best.cell.name))
    gain = again.ratio(again.of(best.cell.name))
    return SuiteComparison(trials, best if holds else None, gain if holds else None)


def is_faster(trials: ComparisonResult, cell: VariantResult) -> bool:
    """True where the updates of a cell are clearly faster than the baseline's and compute the same."""
    ratio, numerics = trials.ratio(cell), trials.numerics(cell)
    is_better = ratio is not None and ratio.verdict == "better"
    return is_better and not cell.why_not and not (numerics is not None and numerics.differ)


def verdict_of(trials: ComparisonResult, cell: VariantResult, ratio: Ratio | None) -> str:
    """Return what is sure of a cell, in words."""
    if cell is trials.baseline:
        return "baseline"
    numerics = trials.numerics(cell)
    said = "not known" if ratio is None else ratio.verdict
    return f"{said}; other numbers: {numerics}" if numerics is not None and numerics.differ else said


def times(ratio: Ratio | None, factor: float) -> Ratio | None:
    """Return the ratio of what a setting does per update, where an update of it does `factor` times as much."""
    if ratio is None:
        return None
    return Ratio(ratio.middle * factor, ratio.low * factor, ratio.high * factor, ratio.num)


def peak_gib(measured: VariantResult) -> float | None:
    """Return the most memory that was used: of the GPU, or of the host where there is none."""
    found = measured.report.get("peak_device_gib", measured.report.get("peak_host_gib"))
    return None if found is None else float(found)


def skipped_of(trials: ComparisonResult) -> dict[str, str]:
    """Return the cells that could not be measured, or not to the end, with why."""
    return {cell.cell.name: cell.why_not for cell in trials.cells if cell.why_not}


def waits(measured: VariantResult) -> float | None:
    """Return the share of its updates in which a cell waited for data; None where that is not known."""
    seconds = sum(measured.parts_s.get(part, 0.0) for part in PARTS)
    return measured.parts_s.get("data", 0.0) / seconds if seconds else None


def _middle(ratio: Ratio | None) -> float:
    return ratio.middle if ratio else 0.0


Answers = list[dict[str, Any]]


def in_turns(
    place: MeasuringPlace,
    cells: Sequence[Variant],
    wanted: SuiteRequest,
    order: Callable[[VariantResult], Mapping[str, Any]],
    budget_s: float,
) -> dict[str, Answers | str]:
    """Return what each cell answered to the order in every round, or why it could not; for what is no block of updates.

    order  from what is known of a cell. All cells are open, and only the one that is asked computes
    """
    until = time.monotonic() + budget_s
    found: dict[str, Answers | str] = {}
    with ExitStack() as stack:
        asked: dict[str, tuple[Asked, VariantResult]] = {}
        for cell in cells:
            wanted.say(f"starts {cell.name}")
            try:
                asked[cell.name] = stack.enter_context(place.arena.alone(cell, limits_of(budget_s)))
            except AccelRunError as error:
                found[cell.name] = error.problems[0].what
        shuffle = random.Random(0)
        for number in range(1, ROUNDS[1] + 1):
            names = list(asked)
            shuffle.shuffle(names)
            for name in names:
                ask, measured = asked[name]
                try:
                    answer = ask(order(measured))
                except AccelRunError as error:
                    found[name] = error.problems[0].what
                    del asked[name]
                    continue
                answers = found.setdefault(name, [])
                assert isinstance(answers, list)
                answers.append(answer)
            if time.monotonic() > until and number > LEAST_ROUNDS:
                break
            if number >= LEAST_ANSWERS * ROUNDS[0]:
                break
    return found


# Results


def kept(wanted: SuiteRequest, name: str, report: SuiteReport, trials: ComparisonResult | None = None) -> SuiteReport:
    """Return the report with its data written to `<prefix><name>.json`; a file of that name is replaced as a whole."""
    said = {"headline": report.headline, "notes": list(report.notes), "skipped": dict(report.skipped)}
    tables = [dataclasses.asdict(table) for table in report.tables]
    measured = as_json(trials) if trials is not None else {}
    made = {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "hardware": hardware()}
    data = finite({"suite": name, **made, **measured, **said, "tables": tables, **report.data})
    make_directory(wanted.folder)
    file = wanted.file(f"{name}.json")
    atomic_write(file, json.dumps(data, indent=2) + "\n")
    return dataclasses.replace(report, data=data, files=(*report.files, file))


LEAST_ANSWERS = 2  # times the fewest rounds are made where nothing is timed more finely
ROUNDS = (6, 60)  # fewest and most blocks of a cell
BLOCK_S = 0.4
SHARE_OF_FIRST = 0.7  # of the budget, for all cells; the rest is for the best one
LEAST_S = 10.0  # for the second trial, however small the budget
