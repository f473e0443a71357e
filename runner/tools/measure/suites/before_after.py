"""`suite=before_after`: plain settings, as in a handwritten loop, against the settings that accel-run chooses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from runner.base.errors import AccelRunError, Exit
from runner.base.json_converter import encode
from runner.config.configuration import Configuration, compose
from runner.config.request import override_key
from runner.monitor.monitor_thread import Monitor
from runner.tools.measure.compare import MIN_ROUNDS, CompareLimits
from runner.tools.measure.comparison_result import ComparisonResult, Variant, VariantResult
from runner.tools.measure.measurement_context import MeasurementContext
from runner.tools.measure.statistics import NEGLIGIBLE, PRIOR_HALF_WIDTH, paired_ratio
from runner.tools.measure.suite import (
    Replies,
    SuiteReport,
    SuiteRequest,
    SuiteTable,
    Value,
    call_interleaved,
    compare_variants,
    format_gain,
    format_verdict,
    open_suite_context,
    save_report,
)


def run(suite_request: SuiteRequest) -> SuiteReport:
    """Compare plain settings with those that accel-run chooses.

    Raises ConfigError for invalid numbers, AccelRunError if the plain settings cannot be measured.
    """
    max_size = suite_request.parse_numbers("biggest", 0)[0]
    with open_suite_context(suite_request) as context:
        variants = [Variant(BEFORE, plain_overrides(compose(suite_request.request))), Variant(AFTER)]
        result = compare_variants(context, variants, suite_request, 0.5)
        share_s = SHARE_OF_INFERENCE * suite_request.budget_s
        command = {"do": "predict", "least_s": share_s / (2 * len(variants) * MIN_ROUNDS)}
        inferred = call_interleaved(context, variants, suite_request, command, share_s)
        busy = measure_gpu_busy(context, result, suite_request)
        biggest = {variant.name: _find_biggest(context, variant, suite_request, max_size) for variant in variants}
    notes = [*context.notes, *result.notes, *_make_notes(suite_request, biggest)]
    skipped = result.skipped | _list_skipped(inferred, busy, biggest)
    task = context.plan.choices["task"].name
    columns = ("quantity", BEFORE, AFTER, "improvement", "sure")
    tables = [
        SuiteTable(f"before and after, {task}", columns, _make_rows(result, inferred, busy, biggest)),
        SuiteTable("what differs", ("setting", BEFORE, AFTER), _list_differences(result)),
    ]
    data = {"inference": inferred, "biggest": encode(biggest)}
    return save_report(
        suite_request, "before_after", SuiteReport(_make_headline(result), tables, notes, skipped, data), result
    )


def plain_overrides(configuration: Configuration) -> tuple[str, ...]:
    """Return overrides for the settings of a handwritten loop, except for groups with a setting from the user.

    The mathematics does not change. Settings on the command line apply to both variants: dropping backend.threads=1
    from one of them would compare numbers of threads, not the choices of the runner.
    """
    options = {group: choice.options for group, choice in configuration.choices.items()}
    overrides = ["precision=fp32", "prefetch=none", "compile=off", "attention=math", "backend=default", "memory=none"]
    overrides.append("memory.channels_last=false")
    loader = options["dataloader"]
    if "num_workers" not in loader:  # replace the loader, but keep its mathematics
        overrides += ["dataloader=default", *(f"dataloader.{key}={str(loader[key]).lower()}" for key in DATA_KEYS)]
    overrides += ["dataloader.num_workers=0", "dataloader.pin_memory=false", "dataloader.cache=none"]
    if "kernel" in options["optimizer"]:
        overrides.append("optimizer.kernel=for-loop")
    typed = {_group(override) for override in configuration.request.overrides}
    return tuple(override for override in overrides if _group(override) not in typed)


def _group(override: str) -> str:
    return override_key(override).partition(".")[0]


# ---------------------------------------------------------------- largest batch


@dataclass(frozen=True)
class Biggest:
    """The largest micro-batch that ran, and why no larger one did.

    is_all  True: larger ones are impossible, or excluded by `biggest=`; False: unknown whether they are
    """

    size: int | None
    why: str
    is_all: bool = False


def _find_biggest(context: MeasurementContext, variant: Variant, suite_request: SuiteRequest, max_size: int) -> Biggest:
    """Double the batch until it does not fit in memory.

    On a CPU, the memory of the next size is extrapolated, and a size that would not fit is not tried, because the
    system might kill other processes.
    """
    size, found, peaks = max(context.phase.batch.shares), None, list[float]()
    deadline = time.monotonic() + SHARE_OF_BIGGEST * suite_request.budget_s
    while size <= max_size:
        if found is not None and time.monotonic() > deadline:
            return Biggest(found, "there was no time for larger ones")
        suite_request.log(f"trying {size} samples in one micro-batch, {variant.name}")
        sizes = (f"global_batch_size={size}", f"micro_batch_size={size}")
        sized_variant = Variant(f"{variant.name}, {size}", (*variant.overrides, *sizes))
        try:
            with context.comparison.open_variant(sized_variant, CompareLimits()) as (call, opened):
                if opened.opened["micro_batch_size"] != size:
                    return Biggest(None, "the phases of the task set their own batch size")
                report = call({"do": "report"})
        except AccelRunError as error:
            is_full = error.exit_code in (Exit.GPU_MEMORY, Exit.HOST_MEMORY)
            return Biggest(found, f"{size}: {error.problems[0].what}", is_full)
        found = size
        if size >= opened.opened["num_samples"]:
            return Biggest(found, "the dataset has no more samples", is_all=True)
        if "peak_device_gib" not in report:
            peaks.append(report["peak_host_gib"])
            expected = peaks[-1] + (2 * (peaks[-1] - peaks[-2]) if len(peaks) > 1 else 0.0)
            if expected > context.inventory.cpu.memory_bytes / 2**30:
                return Biggest(found, f"{2 * size} would need about {expected:.1f} GiB", is_all=True)
        size *= 2
    if found is None:
        return Biggest(None, f"biggest={max_size} is less than the {size} samples of an update: none was tried")
    return Biggest(found, f"no more than {max_size} samples were tried", is_all=True)


# ---------------------------------------------------------------- GPU utilization


def measure_gpu_busy(
    context: MeasurementContext, result: ComparisonResult, suite_request: SuiteRequest
) -> dict[str, float | None]:
    """Return the mean utilization of the GPU by variant in percent, None if unknown."""
    busy: dict[str, float | None] = dict.fromkeys(trial.name for trial in result.variants)
    uuid = context.plan.device_uuid
    for trial in result.variants if uuid else ():
        if trial.blocks:
            suite_request.log(f"measuring GPU utilization, {trial.name}")
            updates = max(1, round(1e3 * WATCHED_S / trial.median_ms))
            with (
                context.comparison.open_variant(trial.variant, CompareLimits()) as (call, _),
                Monitor(None, SAMPLE_INTERVAL_S, uuids=[uuid]) as monitor,
            ):
                call({"do": "run", "updates": updates})
            utilization = monitor.summary().whole.metrics.get("gpu0/util")
            busy[trial.name] = utilization.mean if utilization else None
    return busy


# ---------------------------------------------------------------- results


def _make_rows(
    result: ComparisonResult,
    inferred: Mapping[str, Replies | str],
    busy: Mapping[str, float | None],
    biggest: Mapping[str, Biggest],
) -> list[tuple[Value, ...]]:
    both = before, after = result.variants
    is_known = result.ratio(after) is not None
    sure = (format_gain(result, after), format_verdict(result, after) if is_known else "not measured")
    return [
        ("time per epoch, s", *map(_epoch_s, both), *sure),
        ("updates per second", *(1e3 / each.median_ms for each in both), *sure),
        _single_reading_row("GPU busy, %", busy[BEFORE], busy[AFTER]),
        _inference_row(inferred),
        largest_row(biggest[BEFORE], biggest[AFTER]),
        _single_reading_row("peak memory, GiB", before.peak_gib, after.peak_gib, less_is_better=True),
    ]


def _make_headline(result: ComparisonResult) -> str:
    before, after = result.variants
    outcome, ratio = result.outcome(after), result.ratio(after)
    if not after.blocks and after.why_not:
        return f"the settings of accel-run could not be measured: {after.why_not}"
    if outcome.is_faster:
        times = f"an epoch takes {_epoch_s(after):.3g} s instead of {_epoch_s(before):.3g} s"
        return f"the settings of accel-run are faster than plain ones: {ratio}; {times}"
    if ratio is not None and ratio.verdict == "worse":
        return f"the settings of accel-run are slower than plain ones: {ratio}"
    verdict, separator, more = outcome.verdict.partition(";")
    return f"{verdict}: {ratio or 'not measured'} against plain settings{separator}{more}"


def _list_differences(result: ComparisonResult) -> list[tuple[str, str, str]]:
    before, after = (each.opened.get("values", {}) for each in result.variants)
    return [
        (key, str(value), str(after.get(key, "-")))
        for key, value in before.items()
        if after and after.get(key) != value and key != "output_root"
    ]


def _list_skipped(
    inferred: Mapping[str, Replies | str], busy: Mapping[str, float | None], biggest: Mapping[str, Biggest]
) -> dict[str, str]:
    skipped = {f"inference, {name}": why for name, why in inferred.items() if isinstance(why, str)}
    if all(value is None for value in busy.values()):
        skipped["GPU busy"] = "there is no GPU with a driver that reports it"
    if not skipped.keys() & {f"inference, {name}" for name in inferred} and _inference_row(inferred)[1] is None:
        skipped["inference"] = "the task defines neither predict() nor predict_batch()"
    return skipped | {f"largest batch, {name}": each.why for name, each in biggest.items() if each.size is None}


def _make_notes(suite_request: SuiteRequest, biggest: Mapping[str, Biggest]) -> list[str]:
    notes = [f"largest batch {name}: {each.why}" for name, each in biggest.items() if each.size is not None]
    notes += ["the largest batch was measured once per variant, by doubling"] if notes else []
    notes.append("memory was measured once per variant")
    typed = [item for item in suite_request.request.overrides if _group(item) in VARIED_GROUPS]
    if typed:
        notes.append(f"set on the command line, so their groups are the same before and after: {' '.join(typed)}")
    return notes


def _epoch_s(trial: VariantResult) -> float:
    """Return the seconds of the updates of an epoch, without evaluations and checkpoints."""
    if not trial.blocks:
        return float("nan")
    return trial.median_ms / 1e3 * float(trial.opened["updates"]) / float(trial.opened["epochs"])


def _inference_row(inferred: Mapping[str, Replies | str]) -> tuple[Value, ...]:
    all_replies = {name: replies for name, replies in inferred.items() if not isinstance(replies, str)}
    item = next((str(reply["item"]) for replies in all_replies.values() for reply in replies), "sample")
    per_item = {
        name: [1e3 * reply["seconds"] / reply["items"] for reply in replies if reply["items"]]
        for name, replies in all_replies.items()
    }
    before, after = per_item.get(BEFORE, []), per_item.get(AFTER, [])
    num = min(len(before), len(after))
    before, after = before[1:num], after[1:num]  # drop the warm-up
    if not before:
        return (f"inference, ms per {item}", None, None, "", "not measured")
    ratio = paired_ratio(before, after, half_width=PRIOR_HALF_WIDTH)
    return (f"inference, ms per {item}", median(before), median(after), str(ratio), ratio.verdict)


def largest_row(before: Biggest, after: Biggest) -> tuple[Value, ...]:
    """Return the row of the largest batches; the verdict is unknown if the search for the smaller one ended early."""
    name, sizes = "largest batch, samples", [biggest for biggest in (before, after) if biggest.size]
    if len(sizes) == 2 and not min(sizes, key=lambda biggest: (biggest.size or 0, biggest.is_all)).is_all:
        return (name, before.size, after.size, "", "unknown: no time for larger ones")
    return _single_reading_row(name, before.size, after.size)


def _single_reading_row(
    name: str, before: float | None, after: float | None, *, less_is_better: bool = False
) -> tuple[Value, ...]:
    """Return a row of single measurements, for which only a large difference counts as a clear change."""
    if not before or not after:
        return (name, before, after, "", "not measured")
    change = before / after if less_is_better else after / before
    is_clear = abs(change - 1) > MIN_CHANGE
    verdict = ("better" if change > 1 else "worse") if is_clear else "no clear change"
    return (name, before, after, f"{100 * (change - 1):+.0f} %", verdict)


BEFORE, AFTER = "before", "after"
VARIED_GROUPS = ("precision", "prefetch", "compile", "attention", "backend", "memory", "dataloader", "optimizer")
DATA_KEYS = ("drop_last", "bad_samples")  # keys of data loaders that change which samples are trained
MIN_CHANGE = 10 * NEGLIGIBLE  # minimum relative change between single measurements
SHARE_OF_BIGGEST = 0.1  # share of the budget for each variant
SHARE_OF_INFERENCE = 0.15
WATCHED_S = 3.0
SAMPLE_INTERVAL_S = 0.1
