"""What the runner brings: plain settings, as people write them by hand, against those that it chooses."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from statistics import fmean, median

from runner.base.errors import AccelRunError, Exit
from runner.config.configuration import Configuration, compose
from runner.config.options import function_of
from runner.config.request import key_of
from runner.monitor.gpu_driver import open_driver
from runner.monitor.nvml import Gpu, Nvml, everything
from runner.tools.measure.compare import LEAST_ROUNDS
from runner.tools.measure.comparison_result import ComparisonResult, Variant, VariantResult
from runner.tools.measure.measuring_place import MeasuringPlace
from runner.tools.measure.statistics import NEGLIGIBLE, ONE_EACH, paired
from runner.tools.measure.suite import SuiteReport, SuiteRequest, SuiteTable, Value
from runner.tools.measure.suite_common import (
    Answers,
    in_turns,
    is_faster,
    kept,
    limits_of,
    measured_in,
    peak_gib,
    place_of,
    skipped_of,
    verdict_of,
    whole_numbers,
)

# biggest: largest batch that is tried, in samples of one pass; 0: none is
OPTIONS: dict[str, str] = {"biggest": "4096"}


def run(wanted: SuiteRequest) -> SuiteReport:
    """Return the table of before and after for the settings that are asked for, on any task.

    Raises ConfigError for numbers that are none, AccelRunError where the plain settings cannot be measured.
    """
    biggest = whole_numbers(wanted.options, "biggest", 0)[0]
    with place_of(wanted) as place:
        cells = [Variant(BEFORE, plain(compose(wanted.request))), Variant(AFTER)]
        trials = measured_in(place, cells, wanted, 0.5)
        share_s = SHARE_OF_INFERENCE * wanted.budget_s
        order = {"do": "predict", "least_s": share_s / (2 * len(cells) * LEAST_ROUNDS)}
        inferred = in_turns(place, cells, wanted, lambda _: order, share_s)
        busy = _busy(place, trials, wanted)
        biggest_of = {cell.name: _biggest(place, cell, wanted, biggest) for cell in cells}
    report = _report(place, trials, inferred, busy, biggest_of)
    typed = [word for word in wanted.request.overrides if key_of(word).partition(".")[0] in GROUPS]
    if typed:
        note = f"set on the command line, so the same before and after: {' '.join(typed)}"
        report = dataclasses.replace(report, notes=[*report.notes, note])
    return kept(wanted, "before_after", report, trials)


def plain(configuration: Configuration) -> tuple[str, ...]:
    """Return the overrides that make the settings those of a loop written by hand, except what the user has typed.

    The mathematics stays as it is. What stands on the command line holds before and after: to drop backend.threads=1
    from one of them would measure another number of threads, and not what the runner chooses.
    """
    options = {group: choice.options for group, choice in configuration.choices.items()}
    words = ["precision=fp32", "prefetch=none", "compile=off", "attention=math", "backend=default", "memory=none"]
    words.append("memory.channels_last=false")
    loader = options["dataloader"]
    if "num_workers" not in loader:  # what the mathematics knows of the loader goes with it
        words += ["dataloader=default", *(f"dataloader.{key}={str(loader[key]).lower()}" for key in OF_DATA)]
    words += ["dataloader.num_workers=0", "dataloader.pin_memory=false", "dataloader.cache=none"]
    if "kernel" in options["optimizer"]:
        words.append("optimizer.kernel=for-loop")
    return tuple(_with_typed(words, configuration))


def _with_typed(words: Iterable[str], configuration: Configuration) -> Iterator[str]:
    """Yield the overrides that leave what the user has typed as it is."""
    typed = {key_of(word).lstrip("+"): word for word in configuration.request.overrides}
    options = {group: choice.name for group, choice in configuration.choices.items()}
    for word in words:
        key, _, value = word.partition("=")
        group, _, inner = key.partition(".")
        if key in typed:
            continue
        if not inner:
            own = [each for each in typed if each.startswith(f"{group}.")]
            if all(has_key(group, value, each.partition(".")[2]) for each in own):
                options[group] = value
                yield word
                yield from (typed[each] for each in own)  # another option would drop them
        elif has_key(group, options[group], inner):
            yield word


def has_key(group: str, option: str, key: str) -> bool:
    """Tell whether an option has that key."""
    signature = function_of(group, option)
    return signature is not None and key in signature.keys


@dataclass(frozen=True)
class Biggest:
    """The largest batch that made updates in one pass, and why none larger did.

    is_all  larger ones cannot be; False: nobody knows, it was not tried
    """

    size: int | None
    why: str
    is_all: bool = False


def _biggest(place: MeasuringPlace, cell: Variant, wanted: SuiteRequest, most: int) -> Biggest:
    """Return the largest doubling of the batch that made updates in one pass.

    On a CPU the next one is not tried where the growth so far says that the memory would not hold it: the system would
    end other processes too.
    """
    size, found, peaks = max(place.phase.batch.shares), None, list[float]()
    until = time.monotonic() + SHARE_OF_BIGGEST * wanted.budget_s
    for _ in count():
        if size > most and found is None:
            return Biggest(None, f"biggest={most} is less than the {size} samples of an update: none was tried")
        if size > most:
            return Biggest(found, f"no more than {most} samples were tried", is_all=True)
        if found is not None and time.monotonic() > until:
            return Biggest(found, "there was no time for larger ones")
        wanted.say(f"tries {size} samples in one pass, {cell.name}")
        own = Variant(
            f"{cell.name}, {size}", (*cell.overrides, f"global_batch_size={size}", f"micro_batch_size={size}")
        )
        try:
            with place.arena.alone(own, limits_of(1.0)) as (ask, opened):
                if opened.opened["micro_batch_size"] != size:
                    return Biggest(None, "the task's phases say their own batch size")
                report = ask({"do": "report"})
                found = size
                if size >= opened.opened["num_samples"]:
                    return Biggest(found, "these are all samples there are", is_all=True)
        except AccelRunError as error:
            is_full = error.exit_code in (Exit.GPU_MEMORY, Exit.HOST_MEMORY)
            return Biggest(found, f"{size}: {error.problems[0].what}", is_full)
        if "peak_device_gib" not in report:
            peaks.append(report["peak_host_gib"])
            grown = 2 * (peaks[-1] - peaks[-2]) if len(peaks) > 1 else 0.0
            if peaks[-1] + grown > place.inventory.cpu.memory_bytes / 2**30:
                return Biggest(found, f"{2 * size} would need about {peaks[-1] + grown:.1f} GiB", is_all=True)
        size *= 2
    raise AssertionError("there is no largest number")


def _busy(place: MeasuringPlace, trials: ComparisonResult, wanted: SuiteRequest) -> dict[str, float | None]:
    """Return cell -> percent of the time in which its updates keep the GPU busy; None where nobody tells."""
    nvml = open_driver()
    gpu = next((each for each in everything(nvml.gpus) if each.uuid == place.plan.device_uuid), None)
    busy: dict[str, float | None] = {cell.cell.name: None for cell in trials.cells}
    if gpu is None:
        return busy
    for measured in trials.cells:
        if not measured.blocks_ms:
            continue
        wanted.say(f"watches the GPU, {measured.cell.name}")
        with place.arena.alone(measured.cell, limits_of(1.0)) as (ask, _), watched(nvml, gpu) as seen:
            ask({"do": "make", "updates": max(1, round(1e3 * WATCHED_S / measured.median_ms))})
        busy[measured.cell.name] = fmean(seen) if seen else None
    return busy


@contextmanager
def watched(nvml: Nvml, gpu: Gpu) -> Iterator[list[float]]:
    """Give what the driver says of how busy the GPU is, percent, while the block lasts."""
    seen: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_EVERY_S):
            value = nvml.read(gpu, ["util_percent"])["util_percent"]
            if value is not None:
                seen.append(value)

    thread = threading.Thread(target=look, name="looks at the GPU", daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _report(
    place: MeasuringPlace,
    trials: ComparisonResult,
    inferred: Mapping[str, Answers | str],
    busy: Mapping[str, float | None],
    biggest: Mapping[str, Biggest],
) -> SuiteReport:
    before, after = trials.cells
    skipped = skipped_of(trials)
    ratio = trials.ratio(after)
    gain, sure = ("", "not measured") if ratio is None else (str(ratio), verdict_of(trials, after, ratio))
    rows: list[tuple[Value, ...]] = [
        ("time per epoch, s", _epoch_s(before), _epoch_s(after), gain, sure),
        ("updates per second", _per_second(before), _per_second(after), gain, sure),
        _once("GPU busy, %", busy[BEFORE], busy[AFTER]),
        _inference(inferred),
        largest_row(biggest[BEFORE], biggest[AFTER]),
        _once("peak memory, GiB", peak_gib(before), peak_gib(after), less_is_better=True),
    ]
    if busy[BEFORE] is None and busy[AFTER] is None:
        skipped["GPU busy"] = "there is no GPU whose driver tells"
    skipped |= {f"inference, {name}": told for name, told in inferred.items() if isinstance(told, str)}
    if rows[3][1] is None and "inference" not in " ".join(skipped):
        skipped["inference"] = "the task does not predict"
    tried = {name: each for name, each in biggest.items() if each.size is not None}
    skipped |= {f"biggest batch, {name}": each.why for name, each in biggest.items() if name not in tried}
    notes = [*place.notes, *trials.notes, *(f"biggest batch {name}: {each.why}" for name, each in tried.items())]
    notes.append("memory is a reading of one process each")
    notes += ["so is the biggest batch, of which doublings are tried"] if tried else []
    if after.why_not and not after.blocks_ms:
        headline = f"what the runner chooses could not be measured: {after.why_not}"
    elif is_faster(trials, after):
        headline = (
            f"the runner's settings make updates faster than plain ones: {gain};"
            f" an epoch takes {_epoch_s(after):.3g} s instead of {_epoch_s(before):.3g} s"
        )
    elif ratio is not None and ratio.verdict == "worse":
        headline = f"the runner's settings make updates slower than plain ones: {gain}"
    else:
        headline = f"{sure.partition(';')[0]}: {gain} against plain settings{sure.partition(';')[2]}"
    columns = ("quantity", BEFORE, AFTER, "improvement", "sure")
    differ = [
        (key, str(value), str(after.opened["values"].get(key, "-")))
        for key, value in before.opened["values"].items()
        if after.opened and after.opened["values"].get(key) != value and key != "output_root"
    ]
    tables = [
        SuiteTable(f"before and after, {place.plan.choices['task'].name}", columns, rows),
        SuiteTable("what differs", ("setting", BEFORE, AFTER), differ),
    ]
    data = {"inference": dict(inferred), "biggest": {name: dataclasses.asdict(told) for name, told in biggest.items()}}
    return SuiteReport(headline, tables, notes, skipped, data)


def _epoch_s(measured: VariantResult) -> float:
    """Return the seconds of the updates of an epoch; evaluations and saves are not in them."""
    if not measured.blocks_ms:
        return float("nan")
    return measured.median_ms / 1e3 * float(measured.opened["updates"]) / float(measured.opened["epochs"])


def _per_second(measured: VariantResult) -> float:
    return 1e3 / measured.median_ms


def _inference(told: Mapping[str, Answers | str]) -> tuple[Value, ...]:
    """Return the row of the time that inference takes for an item, of which the task says what it is."""
    answered = {name: answers for name, answers in told.items() if not isinstance(answers, str)}
    item = next((str(each["item"]) for answers in answered.values() for each in answers), "sample")
    per_item = {
        name: [1e3 * each["seconds"] / each["items"] for each in answers if each["items"]]
        for name, answers in answered.items()
    }
    before, after = per_item.get(BEFORE, []), per_item.get(AFTER, [])
    num = min(len(before), len(after))
    before, after = before[1:num], after[1:num]  # the first is not like the others
    if not before:
        return (f"inference, ms per {item}", None, None, "", "not measured")
    ratio = paired(before, after, half=ONE_EACH)
    return (f"inference, ms per {item}", median(before), median(after), str(ratio), ratio.verdict)


def largest_row(before: Biggest, after: Biggest) -> tuple[Value, ...]:
    """Return the row of the biggest batch; where the smaller one was only not tried further, nothing is known."""
    name, sizes = "biggest batch, samples", [each for each in (before, after) if each.size]
    if len(sizes) == 2 and not min(sizes, key=lambda each: (each.size or 0, each.is_all)).is_all:
        return (name, before.size, after.size, "", "not known: no time for larger ones")
    return _once(name, before.size, after.size)


def _once(name: str, before: float | None, after: float | None, *, less_is_better: bool = False) -> tuple[Value, ...]:
    """Return the row of what was read once: a small difference is no clear change."""
    if not before or not after:
        return (name, before, after, "", "not measured")
    change = before / after if less_is_better else after / before
    is_clear = abs(change - 1) > SMALL
    verdict = ("better" if change > 1 else "worse") if is_clear else "no clear change"
    return (name, before, after, f"{100 * (change - 1):+.0f} %", verdict)


BEFORE, AFTER = "before", "after"
GROUPS = ("precision", "prefetch", "compile", "attention", "backend", "memory", "dataloader", "optimizer")
OF_DATA = ("drop_last", "bad_samples")
SMALL = 10 * NEGLIGIBLE  # of readings that have no interval
SHARE_OF_BIGGEST = 0.1  # of the budget, for each of the two
SHARE_OF_INFERENCE = 0.15
WATCHED_S = 3.0
LOOK_EVERY_S = 0.1
