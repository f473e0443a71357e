"""Which of two devices: statistics and gradients, small and large, and from which batch or size on which is faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import numpy as np

from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.base.share_solver import RankTiming, fit
from runner.base.values import MOST_THREADS
from runner.config.request import merge_overrides
from runner.config.schema import did_you_mean
from runner.plan.inventory import Inventory
from runner.records.evidence import Evidence
from runner.tools.measure.comparison_result import ComparisonResult, Variant
from runner.tools.measure.criteria import Criterion, criteria
from runner.tools.measure.facts import Facts
from runner.tools.measure.measuring_place import MeasuringPlace
from runner.tools.measure.statistics import CONFIDENCE, ONE_EACH, Ratio, paired
from runner.tools.measure.suite import SuiteReport, SuiteRequest, SuiteTable, Value
from runner.tools.measure.suite_common import (
    Answers,
    in_turns,
    kept,
    limits_of,
    measured_in,
    place_of,
    skipped_of,
    some_of,
    verdict_of,
    whole_numbers,
)

# devices: two of cpu, cpu:THREADS, cuda, cuda:N, mps; auto: CPU and GPU, or one thread and all where there is no GPU
# batches: samples of an update
# sides: of a cube in pixels; the smallest is the small workload, the largest the large one
# by: what a crossover is looked for in
OPTIONS: dict[str, str] = {"devices": "auto", "batches": "2,4,8,16", "sides": "32,64,96,128", "by": "batch,size"}

Blocks = Mapping[int, Sequence[float]]
Overrides = tuple[str, ...]


def run(wanted: SuiteRequest) -> SuiteReport:
    """Return what two devices take for both phases of `hyperspectral`, and where they cross.

    Raises ConfigError for a device that is not here, a number that is none, and for another task.
    """
    batches, sides = (tuple(sorted(whole_numbers(wanted.options, key))) for key in ("batches", "sides"))
    kinds = some_of(wanted.options, "by", ("batch", "size"))
    request = wanted.request
    other = [word for word in request.overrides if word.startswith("task=") and word != f"task={TASK}"]
    if request.task_file or other:
        what = f"is not measured by this suite: its phases are those of {TASK}"
        raise ConfigError(Problem(what, other[0] if other else "--task", f"use task={TASK}"))
    own = merge_overrides((f"task={TASK}", "task.data=synthetic"), request.overrides)
    wanted = dataclasses.replace(wanted, request=dataclasses.replace(request, overrides=own))
    with place_of(wanted) as place:
        devices = devices_of(wanted.options["devices"], place.inventory)
        points = [(batch, sides[0]) for batch in batches] if "batch" in kinds else []
        points += [(batches[0], side) for side in sides] if "size" in kinds else []
        points = list(dict.fromkeys([(batches[0], sides[0]), *points, (batches[0], sides[-1])]))
        first, second = devices
        cells = [cell for point in points for cell in (
            _cell(first, devices[first], *point),
            dataclasses.replace(_cell(second, devices[second], *point), against=_name(first, *point)),
        )]  # fmt: skip
        trials = measured_in(place, cells, wanted, SHARE_OF_UPDATES)
        ends = list(dict.fromkeys((sides[0], sides[-1])))
        fits = {
            side: in_turns(
                place,
                [_cell(device, words, batches[0], side) for device, words in devices.items()],
                wanted, lambda _: {"do": "fit"}, (1 - SHARE_OF_UPDATES) * wanted.budget_s / len(ends),
            )
            for side in ends
        }  # fmt: skip
        rules = {
            side: _criteria(place, [_cell(device, words, batches[0], side) for device, words in devices.items()])
            for side in ends
        }
    lines: dict[str, dict[str, Blocks]] = {}
    if "batch" in kinds:
        of_batch = [(batch, sides[0]) for batch in batches]
        lines["batch"] = {device: blocks_of(trials, device, of_batch, 0) for device in devices}
    if "size" in kinds:
        of_size = [(batches[0], side) for side in sides]
        lines["size"] = {device: blocks_of(trials, device, of_size, 1) for device in devices}
    report = _report(place, list(devices), trials, fits, lines, batches[0])
    report = dataclasses.replace(report, tables=[*report.tables, _rules(rules)])
    return kept(wanted, "devices", report, trials)


# ---------------------------------------------------------------- what is measured


def devices_of(text: str, inventory: Inventory) -> dict[str, Overrides]:
    """Return name -> words of the configuration, of two devices. Raises ConfigError."""
    gpus, cores = [gpu.torch_name for gpu in inventory.usable], inventory.cpu.logical_cores
    if text == "auto":
        if not gpus and cores < 2:
            what = "there is one device here with one core: nothing to compare"
            raise ConfigError(Problem(what, "devices=auto", "use devices=cpu:1,cpu:2"))
        names = ["cpu", gpus[0]] if gpus else ["cpu:1", f"cpu:{cores}"]
    else:
        first = next((gpu for gpu in gpus if gpu.startswith("cuda")), "cuda")
        names = [first if word.strip() == "cuda" else word.strip() for word in text.strip("[]").split(",")]
    if len(set(names)) != 2 or len(names) != 2:
        raise ConfigError(Problem("must be two different devices", f"devices={text}", "use devices=cpu:1,cpu:2"))
    return {name: _words_of(name, gpus, text) for name in names}


def _words_of(name: str, gpus: Sequence[str], text: str) -> Overrides:
    kind, has_number, number = name.partition(":")
    is_count = number.isascii() and number.isdigit() and 0 < int(number[:DIGITS]) <= MOST_THREADS
    if kind == "cpu" and (not has_number or is_count):
        return ("device=cpu", *([f"backend.threads={number}"] if has_number else []))
    if name in gpus:
        return (f"device={name}",)
    here = ", ".join(["cpu", f"cpu:THREADS (at most {MOST_THREADS})", *gpus])
    what = f"{name or 'nothing'} is no device of this machine, which has {here}"
    fix = did_you_mean(name, ["cpu", "cuda", *gpus]) or "use devices=cpu:1,cpu:2"
    raise ConfigError(Problem(what, f"devices={text}", fix))


def _cell(device: str, words: Overrides, batch: int, side: int) -> Variant:
    own = (f"global_batch_size={batch}", f"micro_batch_size={batch}", f"task.height={side}", f"task.width={side}")
    return Variant(_name(device, batch, side), (*words, *own))


def _name(device: str, batch: int, side: int) -> str:
    return f"{device}, batch {batch}, side {side}"


def blocks_of(trials: ComparisonResult, device: str, points: Sequence[tuple[int, int]], which: int) -> Blocks:
    """Return seconds per update of each point: by samples, or by pixels of a sample.

    A point of which there was no time for the fewest blocks is none: what they say of their spread is too little.
    """
    found, (least, _) = {}, limits_of(1.0).rounds
    for point in points:
        cell = trials.of(_name(device, *point))
        if len(cell.blocks_ms) >= least and not cell.why_not:
            found[point[0] if which == 0 else point[1] ** 2] = [each / 1e3 for each in cell.blocks_ms.values()]
    return found


# ---------------------------------------------------------------- where they cross


@dataclass(frozen=True)
class Crossing:
    """Where the second device becomes faster than the first, or slower, by what t = a + c x says.

    at         None: not inside what was measured, or nobody can be sure
    low, high  the interval of it
    lines      of both devices; residuals: root mean square of their relative distances from the medians
    said       in words
    """

    at: float | None
    low: float | None
    high: float | None
    lines: tuple[RankTiming, RankTiming]
    residuals: tuple[float, float]
    said: str


def crossing(names: Sequence[str], first: Blocks, second: Blocks, unit: str) -> Crossing | None:
    """Return where the fitted lines of two devices cross; None where fewer than two points are known of both.

    The interval is that of the bootstrap over the blocks of each point. Where more than a twentieth of the lines that
    could be do not cross inside what was measured, or where a line does not fit, there is no crossing to speak of.
    """
    measured = sorted(first.keys() & second.keys())
    if len(measured) < 2:
        return None
    lines = (_line(first), _line(second))
    residuals = (_residual(lines[0], first), _residual(lines[1], second))
    low, high = measured[0], measured[-1]
    rng = np.random.default_rng(0)
    drawn = [_meeting(_line(_drawn(first, rng)), _line(_drawn(second, rng))) for _ in range(RESAMPLES)]
    inside = [at for at in drawn if at is not None and low <= at <= high]
    at = _meeting(*lines)
    off = [residual for residual in residuals if residual > FITS]
    if off:
        said = f"no clear change: a straight line does not fit ({max(off):.0%} off)"
        return Crossing(None, None, None, lines, residuals, said)
    if at is None or not low <= at <= high or len(inside) < CONFIDENCE * RESAMPLES:
        ahead = {lines[0].seconds(x) < lines[1].seconds(x) for x in (low, high)}
        is_clear = len(ahead) == 1 and len(inside) < (1 - CONFIDENCE) * RESAMPLES
        faster = names[0] if True in ahead else names[1]
        said = f"no crossing: {faster} is faster from {low:,} to {high:,} {unit}" if is_clear else "no clear change"
        return Crossing(None, None, None, lines, residuals, said)
    ends = np.quantile(inside, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    winner = names[1] if lines[1].per_sample_s < lines[0].per_sample_s else names[0]
    said = f"{winner} is faster from about {at:,.3g} {unit} on [{ends[0]:,.3g}, {ends[1]:,.3g}]"
    return Crossing(at, float(ends[0]), float(ends[1]), lines, residuals, said)


def _line(blocks: Blocks) -> RankTiming:
    return fit((x, median(seconds)) for x, seconds in blocks.items())


def _residual(line: RankTiming, blocks: Blocks) -> float:
    if len(blocks) < 3:  # a line goes through two points whatever they are
        return float("nan")
    off = [line.seconds(x) / median(seconds) - 1 for x, seconds in blocks.items()]
    return float(np.sqrt(np.mean(np.square(off))))


def _drawn(blocks: Blocks, rng: np.random.Generator) -> Blocks:
    return {x: list(rng.choice(np.asarray(seconds), len(seconds))) for x, seconds in blocks.items()}


def _meeting(first: RankTiming, second: RankTiming) -> float | None:
    slope = first.per_sample_s - second.per_sample_s
    return (second.fixed_s - first.fixed_s) / slope if slope else None


# ---------------------------------------------------------------- what is said


def _report(
    place: MeasuringPlace,
    devices: Sequence[str],
    trials: ComparisonResult,
    fits: Mapping[int, Mapping[str, Answers | str]],
    lines: Mapping[str, Mapping[str, Blocks]],
    batch: int,
) -> SuiteReport:
    first, second = devices
    sizes = dict(zip(sorted(fits), ("small", "large"), strict=False))
    rows: list[tuple[Value, ...]] = []
    skipped, verdicts = skipped_of(trials), dict[str, str]()
    for side, size in sizes.items():
        told, ratio = _fits_of(fits[side], devices, batch, side)
        name = f"statistics, {size}"
        verdicts[name] = "not measured" if ratio is None else ratio.verdict
        rows.append((name, side, *told, "" if ratio is None else str(ratio), verdicts[name]))
        skipped |= {f"statistics, {key}": why for key, why in fits[side].items() if isinstance(why, str)}
    for side, size in sizes.items():
        one, two = (trials.of(_name(device, batch, side)) for device in devices)
        ratio = trials.ratio(two)
        name = f"gradients, {size}"
        verdicts[name] = "not measured" if ratio is None else ratio.verdict
        times = tuple(None if not cell.blocks_ms else cell.median_ms for cell in (one, two))
        sure = "not measured" if ratio is None else verdict_of(trials, two, ratio)
        rows.append((name, side, *times, "" if ratio is None else str(ratio), sure))
    columns = ("phase", "side, pixels", f"{first}, ms", f"{second}, ms", f"{second} against {first}", "sure")
    tables = [SuiteTable(f"{second} against {first}: a pass of statistics, an update of gradients", columns, rows)]
    found = {
        by: crossing(devices, blocks[first], blocks[second], UNITS[by]) for by, blocks in lines.items()
    }  # fmt: skip
    fitted = [row for by, each in found.items() for row in _fit_rows(by, each, devices)]
    tables.append(SuiteTable("fits of an update, t = a + c x", FIT_COLUMNS, fitted))
    notes = [*place.notes, *trials.notes]
    notes += [f"by {by}: {each.said if each else 'not enough was measured for a line'}" for by, each in found.items()]
    headline = _headline(devices, verdicts, found)
    data = {
        "crossings": {by: None if each is None else dataclasses.asdict(each) for by, each in found.items()},
        "verdicts": verdicts,
        "statistics": {str(side): dict(told) for side, told in fits.items()},
    }
    return SuiteReport(headline, tables, notes, skipped, data)


def _fits_of(
    told: Mapping[str, Answers | str], devices: Sequence[str], batch: int, side: int
) -> tuple[tuple[Value, Value], Ratio | None]:
    """Return milliseconds of a pass on each device, and their ratio."""
    times = []
    for device in devices:
        answers = told.get(_name(device, batch, side), "")
        times.append([] if isinstance(answers, str) else [1e3 * sum(each["seconds"].values()) for each in answers])
    num = min(map(len, times))
    if not num:
        return (None, None), None
    return (median(times[0]), median(times[1])), paired(times[0][:num], times[1][:num], half=ONE_EACH)


def _fit_rows(by: str, found: Crossing | None, devices: Sequence[str]) -> list[tuple[Value, ...]]:
    if found is None:
        return []
    return [
        (by, device, 1e3 * line.fixed_s, 1e6 * line.per_sample_s, UNITS[by], 100 * residual)
        for device, line, residual in zip(devices, found.lines, found.residuals, strict=True)
    ]


def _criteria(place: MeasuringPlace, cells: Sequence[Variant]) -> list[Criterion]:
    """Return the thresholds that people go by with the values of the first cell that can be opened; none: no such."""
    for cell in cells:
        with suppress(AccelRunError), place.arena.alone(cell, limits_of(1.0)) as (ask, measured):
            told, there = ask({"do": "batch"}), measured.opened
            seen = Evidence(
                num_samples=there["num_samples"],
                global_batch_size=there["global_batch_size"],
                num_parameters=there["parameters"],
                epochs=there["epochs"],
            )
            probe = {**told, "trained_layers": there["trained_layers"]}
            return criteria(Facts(seen, {}, place.inventory.cpu, probe=probe))
    return []


def _rules(found: Mapping[int, Sequence[Criterion]]) -> SuiteTable:
    """Return the table of the thresholds: a column of values and one of verdicts for the small and the large cubes."""
    columns, rows = ["rule of thumb", ""], dict[str, list[Value]]()
    for size, criteria_of in zip(("small", "large"), found.values(), strict=False):
        columns += [size, f"{size} says"]
        for row in criteria_of:
            told = rows.setdefault(row.name, [row.name, row.rule or "-"])
            told += [row.value, row.verdict if row.rule else "-"]
    width = len(columns)
    return SuiteTable("GPU or CPU? Rules of thumb; the measurement decides", columns,
                 [row for row in rows.values() if len(row) == width])  # fmt: skip


def _headline(devices: Sequence[str], verdicts: Mapping[str, str], found: Mapping[str, Crossing | None]) -> str:
    first, second = devices
    of = {
        said: [name for name, verdict in verdicts.items() if verdict == known]
        for said, known in (("faster", "better"), ("slower", "worse"), ("no clear change", "no clear change"))
    }
    parts = [f"{said} in {' and '.join(names)}" for said, names in of.items() if names]
    crossings = [each.said for each in found.values() if each is not None and each.at is not None]
    return ". ".join([f"{second} against {first}: {', '.join(parts) or 'not measured'}", *crossings])


TASK = "hyperspectral"
UNITS = {"batch": "samples an update", "size": "pixels a sample"}
FIT_COLUMNS = ("by", "device", "a, ms", "c, us", "per", "residual, %")
RESAMPLES = 200
SHARE_OF_UPDATES = 0.65  # of the budget; the rest is for passes of statistics
DIGITS = 9  # more than these are more threads than any device has
FITS = 0.2  # root mean square of the relative residuals above which the times are no line
