"""`suite=batch`: samples per second by micro-batch size, and by samples per update."""

from __future__ import annotations

from collections.abc import Iterator

from runner.base.errors import AccelRunError, Exit
from runner.tools.measure.comparison_result import BASELINE_NAME, ComparisonResult, Variant, VariantResult
from runner.tools.measure.measuring_place import MeasuringPlace
from runner.tools.measure.selection import Selection
from runner.tools.measure.statistics import Ratio
from runner.tools.measure.suite import (
    Columns,
    SuiteReport,
    SuiteRequest,
    place_of,
    saved,
    selected,
    table_of,
    verdict_of,
)


def run(wanted: SuiteRequest) -> SuiteReport:
    """Return samples per second of each size, and the micro-batch to use.

    Only sizes with the same update are recommended: another number of samples per update is a different training.
    Raises ConfigError for sizes that are not whole numbers above 0.
    """
    for key, default in (("micro", "auto"), ("global", "same")):
        if wanted.options[key] != default:
            wanted.numbers(key)
    with place_of(wanted) as place:
        variants, skipped = _variants(wanted, place)
        found = _measured(place, variants, wanted, skipped)
    return saved(wanted, "batch", _report(place, found, skipped), found.trials)


def _measured(
    place: MeasuringPlace, variants: list[Variant], wanted: SuiteRequest, skipped: dict[str, str]
) -> Selection:
    """Compare the variants with the first one that fits in memory; those before it are skipped."""
    own = max(place.phase.batch.shares)
    while True:
        try:
            return selected(
                place, variants, wanted, lambda each: _samples(each) == own and not each.opened["has_batch_norm"]
            )
        except AccelRunError as error:
            if error.exit_code not in (Exit.GPU_MEMORY, Exit.HOST_MEMORY) or len(variants) == 1:
                raise
            skipped[variants.pop(0).name] = error.problems[0].what


def _variants(wanted: SuiteRequest, place: MeasuringPlace) -> tuple[list[Variant], dict[str, str]]:
    """Return the variants, the current settings first, and impossible sizes with the reason."""
    own, used = max(place.phase.batch.shares), place.phase.batch.micro_batch_size
    totals = (own,) if wanted.options["global"] == "same" else wanted.numbers("global")
    variants, skipped = [Variant(BASELINE_NAME)], {}
    for total in totals:
        for size in halves(total) if wanted.options["micro"] == "auto" else wanted.numbers("micro"):
            name = f"micro {size}" if total == own else f"micro {size}, global {total}"
            if size > total:
                skipped[name] = f"a micro-batch of {size} samples is more than the {total} of an update"
            elif total % size:
                skipped[name] = f"the {total} samples of an update are not a multiple of {size}"
            elif (size, total) != (used, own):
                variants.append(Variant(name, (f"micro_batch_size={size}", f"global_batch_size={total}")))
    return variants, skipped


def halves(total: int) -> Iterator[int]:
    """Yield the number and its halves, while they are whole."""
    for number in range(AUTO):
        if total % 2**number:
            return
        yield total // 2**number


def _samples(measured: VariantResult) -> int:
    return int(measured.opened["global_batch_size"])


def _columns(trials: ComparisonResult) -> Columns:
    def gain(each: VariantResult) -> Ratio | None:
        """Return the gain in samples per second."""
        ratio = None if each is trials.baseline else trials.ratio(each)
        return ratio and ratio.scaled(_samples(each) / _samples(trials.baseline))

    def sure(each: VariantResult) -> str:
        ratio = gain(each)
        is_other = ratio is not None and _samples(each) != _samples(trials.baseline)
        return ratio.verdict if ratio is not None and is_other else verdict_of(trials, each)

    return {
        "micro-batch": lambda each: int(each.opened["micro_batch_size"]),
        "of an update": _samples,
        "micro-batches": lambda each: int(each.opened["accumulation_steps"]),
        "update, ms": lambda each: each.median_ms,
        "samples/s": lambda each: 1e3 * _samples(each) / each.median_ms,
        "gain": lambda each: str(gain(each) or ""),
        "peak memory, GiB": lambda each: each.peak_gib,
        "sure": sure,
    }


def _report(place: MeasuringPlace, found: Selection, skipped: dict[str, str]) -> SuiteReport:
    trials, best = found.trials, found.best
    rows = [each for each in trials.variants if each.blocks]
    rows.sort(key=lambda each: (_samples(each), int(each.opened["micro_batch_size"])))
    notes = [*place.notes, *trials.notes]
    if any(_samples(each) != _samples(trials.baseline) for each in trials.variants if each.opened):
        notes.append("another number of samples per update is another training: its gain counts samples, not progress")
    if trials.baseline.opened["has_batch_norm"]:
        notes.append("the statistics of batch norms depend on the micro-batch: another size computes something else")
    now = int(trials.baseline.opened["micro_batch_size"])
    size = now if best is None else int(best.opened["micro_batch_size"])
    headline = found.no_better(f"micro_batch_size={now}")
    if best is not None:
        headline = f"micro_batch_size={size} runs the same updates faster than {now}: {found.outcome.ratio}"
    if BASELINE_NAME in skipped:
        headline = f"the current settings do not fit in memory; {headline}"
    table = table_of("samples per second by batch size", _columns(trials), rows)
    data = {"recommended_micro_batch_size": size, "is_clear": best is not None}
    return SuiteReport(headline, (table,), notes, skipped | trials.skipped, data)


AUTO = 6  # micro-batch sizes that are tried by default
