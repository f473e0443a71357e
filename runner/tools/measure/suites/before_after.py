"""`suite=before_after`: plain settings, as in a handwritten loop, against those that accel-run chooses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median

from runner.base.errors import AccelRunError, Exit
from runner.base.json_converter import encode
from runner.config.configuration import Configuration, compose
from runner.config.options import find_signature
from runner.config.request import override_key
from runner.monitor.gpu_driver import open_driver
from runner.monitor.nvml import Gpu, Nvml, everything
from runner.tools.measure.compare import LEAST_ROUNDS, CompareLimits
from runner.tools.measure.comparison_result import ComparisonResult, Variant, VariantResult
from runner.tools.measure.measuring_place import MeasuringPlace
from runner.tools.measure.statistics import NEGLIGIBLE, ONE_EACH, paired
from runner.tools.measure.suite import (
    Answers,
    SuiteReport,
    SuiteRequest,
    SuiteTable,
    Value,
    asked_in_turns,
    compared,
    gain_of,
    place_of,
    saved,
    verdict_of,
)


def run(wanted: SuiteRequest) -> SuiteReport:
    """Return the table of before and after for the given settings.

    Raises ConfigError for invalid numbers, AccelRunError if the plain settings cannot be measured.
    """
    most = wanted.numbers("biggest", 0)[0]
    with place_of(wanted) as place:
        variants = [Variant(BEFORE, plain(compose(wanted.request))), Variant(AFTER)]
        trials = compared(place, variants, wanted, 0.5)
        share_s = SHARE_OF_INFERENCE * wanted.budget_s
        order = {"do": "predict", "least_s": share_s / (2 * len(variants) * LEAST_ROUNDS)}
        inferred = asked_in_turns(place, variants, wanted, order, share_s)
        busy = _busy(place, trials, wanted)
        biggest = {variant.name: _biggest(place, variant, wanted, most) for variant in variants}
    notes = [*place.notes, *trials.notes, *_notes(wanted, biggest)]
    skipped = trials.skipped | _skipped(inferred, busy, biggest)
    task = place.plan.choices["task"].name
    columns = ("quantity", BEFORE, AFTER, "improvement", "sure")
    tables = [
        SuiteTable(f"before and after, {task}", columns, _rows(trials, inferred, busy, biggest)),
        SuiteTable("what differs", ("setting", BEFORE, AFTER), _differences(trials)),
    ]
    data = {"inference": inferred, "biggest": encode(biggest)}
    return saved(wanted, "before_after", SuiteReport(_headline(trials), tables, notes, skipped, data), trials)


def plain(configuration: Configuration) -> tuple[str, ...]:
    """Return the overrides that make the settings those of a handwritten loop, except what the user has set.

    The mathematics stays. Settings on the command line apply before and after: dropping backend.threads=1 from one of
    them would compare numbers of threads, and not what the runner chooses.
    """
    options = {group: choice.options for group, choice in configuration.choices.items()}
    words = ["precision=fp32", "prefetch=none", "compile=off", "attention=math", "backend=default", "memory=none"]
    words.append("memory.channels_last=false")
    loader = options["dataloader"]
    if "num_workers" not in loader:  # the loader's mathematics is kept
        words += ["dataloader=default", *(f"dataloader.{key}={str(loader[key]).lower()}" for key in OF_DATA)]
    words += ["dataloader.num_workers=0", "dataloader.pin_memory=false", "dataloader.cache=none"]
    if "kernel" in options["optimizer"]:
        words.append("optimizer.kernel=for-loop")
    return tuple(_except_set(words, configuration))


def _except_set(words: Iterable[str], configuration: Configuration) -> Iterator[str]:
    """Yield the overrides that leave settings of the command line unchanged."""
    typed = {override_key(word).lstrip("+"): word for word in configuration.request.overrides}
    options = {group: choice.name for group, choice in configuration.choices.items()}
    for word in words:
        key, _, value = word.partition("=")
        group, _, inner = key.partition(".")
        if key in typed:
            continue
        if not inner:
            own = [each for each in typed if each.startswith(f"{group}.")]
            if all(_has_key(group, value, each.partition(".")[2]) for each in own):
                options[group] = value
                yield word
                yield from (typed[each] for each in own)  # another option would drop them
        elif _has_key(group, options[group], inner):
            yield word


def _has_key(group: str, option: str, key: str) -> bool:
    signature = find_signature(group, option)
    return signature is not None and key in signature.keys


# ---------------------------------------------------------------- biggest batch


@dataclass(frozen=True)
class Biggest:
    """The largest batch that ran in one micro-batch, and why no larger one did.

    is_all  larger ones are impossible; False: unknown, not tried
    """

    size: int | None
    why: str
    is_all: bool = False


def _biggest(place: MeasuringPlace, variant: Variant, wanted: SuiteRequest, most: int) -> Biggest:
    """Double the batch until it does not fit.

    On a CPU, a size that would not fit by the growth so far is not tried: the system would kill other processes too.
    """
    size, found, peaks = max(place.phase.batch.shares), None, list[float]()
    until = time.monotonic() + SHARE_OF_BIGGEST * wanted.budget_s
    while size <= most:
        if found is not None and time.monotonic() > until:
            return Biggest(found, "there was no time for larger ones")
        wanted.say(f"tries {size} samples in one micro-batch, {variant.name}")
        sizes = (f"global_batch_size={size}", f"micro_batch_size={size}")
        own = Variant(f"{variant.name}, {size}", (*variant.overrides, *sizes))
        try:
            with place.comparison.alone(own, CompareLimits()) as (ask, opened):
                if opened.opened["micro_batch_size"] != size:
                    return Biggest(None, "the phases of the task set their own batch size")
                report = ask({"do": "report"})
        except AccelRunError as error:
            is_full = error.exit_code in (Exit.GPU_MEMORY, Exit.HOST_MEMORY)
            return Biggest(found, f"{size}: {error.problems[0].what}", is_full)
        found = size
        if size >= opened.opened["num_samples"]:
            return Biggest(found, "the dataset has no more samples", is_all=True)
        if "peak_device_gib" not in report:
            peaks.append(report["peak_host_gib"])
            expected = peaks[-1] + (2 * (peaks[-1] - peaks[-2]) if len(peaks) > 1 else 0.0)
            if expected > place.inventory.cpu.memory_bytes / 2**30:
                return Biggest(found, f"{2 * size} would need about {expected:.1f} GiB", is_all=True)
        size *= 2
    if found is None:
        return Biggest(None, f"biggest={most} is less than the {size} samples of an update: none was tried")
    return Biggest(found, f"no more than {most} samples were tried", is_all=True)


# ---------------------------------------------------------------- GPU utilization


def _busy(place: MeasuringPlace, trials: ComparisonResult, wanted: SuiteRequest) -> dict[str, float | None]:
    """Return variant -> GPU utilization in percent; None if it is not known."""
    nvml = open_driver()
    gpu = next((each for each in everything(nvml.gpus) if each.uuid == place.plan.device_uuid), None)
    busy: dict[str, float | None] = dict.fromkeys(each.name for each in trials.variants)
    for measured in trials.variants if gpu is not None else ():
        if measured.blocks:
            wanted.say(f"measures GPU utilization, {measured.name}")
            updates = max(1, round(1e3 * WATCHED_S / measured.median_ms))
            with place.comparison.alone(measured.variant, CompareLimits()) as (ask, _), watched(nvml, gpu) as seen:
                ask({"do": "run", "updates": updates})
            busy[measured.name] = fmean(seen) if seen else None
    return busy


@contextmanager
def watched(nvml: Nvml, gpu: Gpu | None) -> Iterator[list[float]]:
    """Yield a list that receives the utilization of the GPU in percent while the block lasts."""
    seen: list[float] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(LOOK_EVERY_S):
            value = nvml.read(gpu, ["util_percent"])["util_percent"] if gpu else None
            if value is not None:
                seen.append(value)

    thread = threading.Thread(target=sample, name="GPU utilization", daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


# ---------------------------------------------------------------- results


def _rows(
    trials: ComparisonResult,
    inferred: Mapping[str, Answers | str],
    busy: Mapping[str, float | None],
    biggest: Mapping[str, Biggest],
) -> list[tuple[Value, ...]]:
    both = before, after = trials.variants
    is_known = trials.ratio(after) is not None
    sure = (gain_of(trials, after), verdict_of(trials, after) if is_known else "not measured")
    return [
        ("time per epoch, s", *map(_epoch_s, both), *sure),
        ("updates per second", *(1e3 / each.median_ms for each in both), *sure),
        _once("GPU busy, %", busy[BEFORE], busy[AFTER]),
        _inference(inferred),
        largest_row(biggest[BEFORE], biggest[AFTER]),
        _once("peak memory, GiB", before.peak_gib, after.peak_gib, less_is_better=True),
    ]


def _headline(trials: ComparisonResult) -> str:
    before, after = trials.variants
    outcome, ratio = trials.outcome(after), trials.ratio(after)
    if not after.blocks and after.why_not:
        return f"the runner's settings could not be measured: {after.why_not}"
    if outcome.is_faster:
        times = f"an epoch takes {_epoch_s(after):.3g} s instead of {_epoch_s(before):.3g} s"
        return f"the runner's settings are faster than plain ones: {ratio}; {times}"
    if ratio is not None and ratio.verdict == "worse":
        return f"the runner's settings are slower than plain ones: {ratio}"
    verdict, separator, more = outcome.verdict.partition(";")
    return f"{verdict}: {ratio or 'not measured'} against plain settings{separator}{more}"


def _differences(trials: ComparisonResult) -> list[tuple[str, str, str]]:
    before, after = (each.opened.get("values", {}) for each in trials.variants)
    return [
        (key, str(value), str(after.get(key, "-")))
        for key, value in before.items()
        if after and after.get(key) != value and key != "output_root"
    ]


def _skipped(
    inferred: Mapping[str, Answers | str], busy: Mapping[str, float | None], biggest: Mapping[str, Biggest]
) -> dict[str, str]:
    skipped = {f"inference, {name}": why for name, why in inferred.items() if isinstance(why, str)}
    if all(value is None for value in busy.values()):
        skipped["GPU busy"] = "there is no GPU whose driver reports it"
    if not skipped.keys() & {f"inference, {name}" for name in inferred} and _inference(inferred)[1] is None:
        skipped["inference"] = "the task does not predict"
    return skipped | {f"biggest batch, {name}": each.why for name, each in biggest.items() if each.size is None}


def _notes(wanted: SuiteRequest, biggest: Mapping[str, Biggest]) -> list[str]:
    notes = [f"biggest batch {name}: {each.why}" for name, each in biggest.items() if each.size is not None]
    notes += ["the biggest batch is one reading per variant, in doublings"] if notes else []
    notes.append("memory is one reading per variant")
    typed = [word for word in wanted.request.overrides if override_key(word).partition(".")[0] in GROUPS]
    return [*notes, f"set on the command line, so the same before and after: {' '.join(typed)}"] if typed else notes


def _epoch_s(measured: VariantResult) -> float:
    """Return the seconds of the updates of an epoch, without evaluations and checkpoints."""
    if not measured.blocks:
        return float("nan")
    return measured.median_ms / 1e3 * float(measured.opened["updates"]) / float(measured.opened["epochs"])


def _inference(inferred: Mapping[str, Answers | str]) -> tuple[Value, ...]:
    """Return the row of the inference time per item of the task."""
    answered = {name: answers for name, answers in inferred.items() if not isinstance(answers, str)}
    item = next((str(each["item"]) for answers in answered.values() for each in answers), "sample")
    per_item = {
        name: [1e3 * each["seconds"] / each["items"] for each in answers if each["items"]]
        for name, answers in answered.items()
    }
    before, after = per_item.get(BEFORE, []), per_item.get(AFTER, [])
    num = min(len(before), len(after))
    before, after = before[1:num], after[1:num]  # the first one warms up
    if not before:
        return (f"inference, ms per {item}", None, None, "", "not measured")
    ratio = paired(before, after, half=ONE_EACH)
    return (f"inference, ms per {item}", median(before), median(after), str(ratio), ratio.verdict)


def largest_row(before: Biggest, after: Biggest) -> tuple[Value, ...]:
    """Return the row of the biggest batch; unknown if the smaller one was not tried further."""
    name, sizes = "biggest batch, samples", [each for each in (before, after) if each.size]
    if len(sizes) == 2 and not min(sizes, key=lambda each: (each.size or 0, each.is_all)).is_all:
        return (name, before.size, after.size, "", "unknown: no time for larger ones")
    return _once(name, before.size, after.size)


def _once(name: str, before: float | None, after: float | None, *, less_is_better: bool = False) -> tuple[Value, ...]:
    """Return the row of single readings: a small difference is no clear change."""
    if not before or not after:
        return (name, before, after, "", "not measured")
    change = before / after if less_is_better else after / before
    is_clear = abs(change - 1) > SMALL
    verdict = ("better" if change > 1 else "worse") if is_clear else "no clear change"
    return (name, before, after, f"{100 * (change - 1):+.0f} %", verdict)


BEFORE, AFTER = "before", "after"
GROUPS = ("precision", "prefetch", "compile", "attention", "backend", "memory", "dataloader", "optimizer")
OF_DATA = ("drop_last", "bad_samples")
SMALL = 10 * NEGLIGIBLE  # of single readings
SHARE_OF_BIGGEST = 0.1  # of the budget, for each variant
SHARE_OF_INFERENCE = 0.15
WATCHED_S = 3.0
LOOK_EVERY_S = 0.1
