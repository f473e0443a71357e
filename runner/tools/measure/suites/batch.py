"""Which batch size: samples per second by micro-batch, at the same update, and by samples of an update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runner.base.errors import AccelRunError, Exit
from runner.tools.measure.comparison_result import Variant, VariantResult
from runner.tools.measure.measuring_place import MeasuringPlace
from runner.tools.measure.statistics import Ratio
from runner.tools.measure.suite import SuiteReport, SuiteRequest, SuiteTable, Value
from runner.tools.measure.suite_common import (
    SuiteComparison,
    contest,
    kept,
    peak_gib,
    place_of,
    skipped_of,
    times,
    verdict_of,
    whole_numbers,
)

# micro: samples of a pass, as 4,8,16; auto: halves of the samples of an update
# global: samples of an update, which change the mathematics; same: those of the settings
OPTIONS: dict[str, str] = {"micro": "auto", "global": "same"}


def run(wanted: SuiteRequest) -> SuiteReport:
    """Return samples per second of each size, and the micro-batch to take.

    Only sizes of the same update are recommended: another number of samples per update is another training.
    Raises ConfigError for sizes that are no whole numbers above 0.
    """
    for key, stands in OPTIONS.items():
        if wanted.options[key] != stands:
            whole_numbers(wanted.options, key)
    with place_of(wanted) as place:
        cells, skipped = _cells(wanted, place)
        found = _measured(place, cells, wanted, skipped)
    return kept(wanted, "batch", _report(place, found, skipped), found.trials)


def _measured(
    place: MeasuringPlace, cells: list[Variant], wanted: SuiteRequest, skipped: dict[str, str]
) -> SuiteComparison:
    """Return the cells measured against the first that the memory holds; those before it are skipped, with why."""
    own = _samples(None, place)
    while True:
        try:
            return contest(
                place, cells, wanted, lambda cell: _samples(cell) == own and not cell.opened["has_batch_norm"]
            )
        except AccelRunError as error:
            if error.exit_code not in (Exit.GPU_MEMORY, Exit.HOST_MEMORY) or len(cells) == 1:
                raise
            skipped[cells.pop(0).name] = error.problems[0].what


def _cells(wanted: SuiteRequest, place: MeasuringPlace) -> tuple[list[Variant], dict[str, str]]:
    """Return the cells, the settings as they are first, and the sizes that cannot be, with why."""
    own, used = _samples(None, place), place.phase.batch.micro_batch_size
    totals = (own,) if wanted.options["global"] == "same" else whole_numbers(wanted.options, "global")
    cells, skipped = [Variant(AS_IT_IS)], {}
    for total in totals:
        is_auto = wanted.options["micro"] == "auto"
        sizes = list(halves(total)) if is_auto else whole_numbers(wanted.options, "micro")
        for size in sizes:
            name = f"micro {size}" if total == own else f"micro {size}, global {total}"
            if size > total:
                skipped[name] = f"a pass of {size} samples is more than the {total} of an update"
            elif total % size:
                skipped[name] = f"{total} samples of an update are no multiple of {size}"
            elif (size, total) != (used, own):
                cells.append(Variant(name, (f"micro_batch_size={size}", f"global_batch_size={total}")))
    return cells, skipped


def halves(total: int) -> Iterator[int]:
    """Yield the samples of an update, half of them, and so on, as long as they are whole."""
    for number in range(AUTO):
        if total % 2**number:
            return
        yield total // 2**number


def _samples(cell: VariantResult | None, place: MeasuringPlace | None = None) -> int:
    """Return the samples of an update of a cell, or those of the settings, as one rank makes them."""
    if cell is not None:
        return int(cell.opened["global_batch_size"])
    assert place is not None
    return max(place.phase.batch.shares)


def _size(cell: VariantResult) -> tuple[int, int]:
    return _samples(cell), int(cell.opened["micro_batch_size"])


def _report(place: MeasuringPlace, found: SuiteComparison, skipped: dict[str, str]) -> SuiteReport:
    trials = found.trials
    measured = sorted((cell for cell in trials.cells if cell.blocks_ms), key=_size)
    rows = [_row(found, cell) for cell in measured]
    columns = (
        "samples of a pass", "of an update", "passes", "update, ms", "samples/s", "gain", "peak memory, GiB", "sure",
    )  # fmt: skip
    table = SuiteTable("samples per second by batch size", columns, rows)
    notes = [*place.notes, *trials.notes]
    if any(_samples(cell) != _samples(trials.baseline) for cell in trials.cells if cell.opened):
        notes.append("another number of samples per update is another training: its gain counts samples, not progress")
    if trials.baseline.opened["has_batch_norm"]:
        notes.append("batch norms take their statistics from a pass: another size computes something else")
    now, best = int(trials.baseline.opened["micro_batch_size"]), found.best
    recommended = now if best is None else int(best.opened["micro_batch_size"])
    if best is None:
        headline = found.as_good_as_any(f"micro_batch_size={now}")
    else:
        headline = f"micro_batch_size={recommended} makes the same updates faster than {now}: {found.gain}"
    if AS_IT_IS in skipped:
        headline = f"as it is it does not fit into the memory; {headline}"
    return SuiteReport(
        headline,
        (table,),
        notes,
        skipped | skipped_of(trials),
        {"recommended_micro_batch_size": recommended, "is_clear": best is not None},
    )


def _row(found: SuiteComparison, cell: VariantResult) -> Sequence[Value]:
    trials, samples = found.trials, _samples(cell)
    gain: Ratio | None = None
    if cell is not trials.baseline:
        gain = times(trials.ratio(cell), samples / _samples(trials.baseline))
    passes = cell.opened["accumulation_steps"]
    return (
        cell.opened["micro_batch_size"], samples, passes, cell.median_ms, 1e3 * samples / cell.median_ms,
        "" if gain is None else str(gain), peak_gib(cell), _sure(found, cell, gain),
    )  # fmt: skip


def _sure(found: SuiteComparison, cell: VariantResult, gain: Ratio | None) -> str:
    """Return what is sure; numbers of another update are not compared."""
    if gain is not None and _samples(cell) != _samples(found.trials.baseline):
        return gain.verdict
    return verdict_of(found.trials, cell, gain)


AS_IT_IS = "as it is"
AUTO = 6  # micro-batches that are tried when nobody says which
