"""`suite=batch`: samples per second by micro-batch size, and by samples per update."""

from __future__ import annotations

from collections.abc import Iterator

from runner.base.errors import AccelRunError, Exit
from runner.tools.measure.comparison_result import BASELINE_NAME, ComparisonResult, Variant, VariantResult
from runner.tools.measure.measurement_context import MeasurementContext
from runner.tools.measure.selection import Selection
from runner.tools.measure.statistics import Ratio
from runner.tools.measure.suite import (
    Columns,
    SuiteReport,
    SuiteRequest,
    format_verdict,
    make_table,
    open_suite_context,
    save_report,
    select_variant,
)


def run(suite_request: SuiteRequest) -> SuiteReport:
    """Measure samples per second of each size, and recommend a micro-batch size.

    Recommends only sizes with the same number of samples per update, because a different number changes the training.
    Raises ConfigError for sizes that are not integers above 0.
    """
    for key, default in (("micro", "auto"), ("global", "same")):
        if suite_request.options[key] != default:
            suite_request.parse_numbers(key)
    with open_suite_context(suite_request) as context:
        variants, skipped = _make_variants(suite_request, context)
        selection = _select(context, variants, suite_request, skipped)
    return save_report(suite_request, "batch", _make_report(context, selection, skipped), selection.result)


def _select(
    context: MeasurementContext, variants: list[Variant], suite_request: SuiteRequest, skipped: dict[str, str]
) -> Selection:
    """Compare the variants with the first one that fits in memory; skip those before it."""
    update_samples = max(context.phase.batch.shares)
    while True:
        try:
            return select_variant(
                context,
                variants,
                suite_request,
                lambda trial: _samples_per_update(trial) == update_samples and not trial.opened["has_batch_norm"],
            )
        except AccelRunError as error:
            if error.exit_code not in (Exit.GPU_MEMORY, Exit.HOST_MEMORY) or len(variants) == 1:
                raise
            skipped[variants.pop(0).name] = error.problems[0].what


def _make_variants(suite_request: SuiteRequest, context: MeasurementContext) -> tuple[list[Variant], dict[str, str]]:
    """Return the variants, the current settings first, and impossible sizes with the reason."""
    update_samples, used = max(context.phase.batch.shares), context.phase.batch.micro_batch_size
    totals = (update_samples,) if suite_request.options["global"] == "same" else suite_request.parse_numbers("global")
    variants, skipped = [Variant(BASELINE_NAME)], {}
    for total in totals:
        for size in (
            halve_repeatedly(total)
            if suite_request.options["micro"] == "auto"
            else suite_request.parse_numbers("micro")
        ):
            name = f"micro {size}" if total == update_samples else f"micro {size}, global {total}"
            if size > total:
                skipped[name] = f"a micro-batch of {size} samples exceeds the {total} samples of an update"
            elif total % size:
                skipped[name] = f"{size} does not divide the {total} samples of an update"
            elif (size, total) != (used, update_samples):
                variants.append(Variant(name, (f"micro_batch_size={size}", f"global_batch_size={total}")))
    return variants, skipped


def halve_repeatedly(total: int) -> Iterator[int]:
    """Yield total, total / 2, total / 4, ... as long as they are whole, at most MAX_AUTO_SIZES."""
    for shift in range(MAX_AUTO_SIZES):
        if total % 2**shift:
            return
        yield total // 2**shift


def _samples_per_update(trial: VariantResult) -> int:
    return int(trial.opened["global_batch_size"])


def _columns(result: ComparisonResult) -> Columns:
    def gain(trial: VariantResult) -> Ratio | None:
        """Return the gain in samples per second."""
        ratio = None if trial is result.baseline else result.ratio(trial)
        return ratio and ratio.scale(_samples_per_update(trial) / _samples_per_update(result.baseline))

    def verdict(trial: VariantResult) -> str:
        ratio = gain(trial)
        is_other = ratio is not None and _samples_per_update(trial) != _samples_per_update(result.baseline)
        return ratio.verdict if ratio is not None and is_other else format_verdict(result, trial)

    return {
        "micro-batch": lambda trial: int(trial.opened["micro_batch_size"]),
        "of an update": _samples_per_update,
        "micro-batches": lambda trial: int(trial.opened["accumulation_steps"]),
        "update, ms": lambda trial: trial.median_ms,
        "samples/s": lambda trial: 1e3 * _samples_per_update(trial) / trial.median_ms,
        "gain": lambda trial: str(gain(trial) or ""),
        "peak memory, GiB": lambda trial: trial.peak_gib,
        "sure": verdict,
    }


def _make_report(context: MeasurementContext, selection: Selection, skipped: dict[str, str]) -> SuiteReport:
    result, best = selection.result, selection.best
    rows = [trial for trial in result.variants if trial.blocks]
    rows.sort(key=lambda trial: (_samples_per_update(trial), int(trial.opened["micro_batch_size"])))
    notes = [*context.notes, *result.notes]
    if any(
        _samples_per_update(trial) != _samples_per_update(result.baseline) for trial in result.variants if trial.opened
    ):
        notes.append("a different number of samples per update changes the training: the gain is in samples per second")
    if result.baseline.opened["has_batch_norm"]:
        notes.append("the statistics of batch norms depend on the micro-batch: a different size changes the results")
    now = int(result.baseline.opened["micro_batch_size"])
    size = now if best is None else int(best.opened["micro_batch_size"])
    headline = selection.describe_no_gain(f"micro_batch_size={now}")
    if best is not None:
        headline = f"micro_batch_size={size} runs the same updates faster than {now}: {selection.outcome.ratio}"
    if BASELINE_NAME in skipped:
        headline = f"the current settings do not fit in memory; {headline}"
    table = make_table("samples per second by batch size", _columns(result), rows)
    data = {"recommended_micro_batch_size": size, "is_clear": best is not None}
    return SuiteReport(headline, (table,), notes, skipped | result.skipped, data)


MAX_AUTO_SIZES = 6
