"""`suite=devices`: two devices compared by phase, and from which batch or sample size which of them is faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.base.values import MAX_THREADS
from runner.config.request import merge_overrides
from runner.config.schema import did_you_mean
from runner.plan.inventory import Inventory
from runner.records.evidence import Evidence
from runner.tools.measure.compare import CompareLimits
from runner.tools.measure.comparison_result import ComparisonResult, Variant
from runner.tools.measure.criteria import Criterion, criteria
from runner.tools.measure.facts import Facts
from runner.tools.measure.measuring_place import MeasuringPlace
from runner.tools.measure.statistics import ONE_EACH, Ratio, paired
from runner.tools.measure.suite import (
    Answers,
    SuiteReport,
    SuiteRequest,
    SuiteTable,
    Value,
    asked_in_turns,
    compared,
    place_of,
    saved,
    verdict_of,
)

Devices = Mapping[str, tuple[str, ...]]  # name -> overrides
Point = tuple[int, int]  # samples per update, side in pixels


def run(wanted: SuiteRequest) -> SuiteReport:
    """Compare two devices in both phases of `hyperspectral`.

    Raises ConfigError for an unknown device, invalid numbers, and another task.
    """
    batches, sides = (tuple(sorted(wanted.numbers(key))) for key in ("batches", "sides"))
    kinds = wanted.some_of("by", tuple(UNITS))
    wanted = _of_the_task(wanted)
    with place_of(wanted) as place:
        devices = devices_of(wanted.options["devices"], place.inventory)
        series: dict[str, list[Point]] = {
            "batch": [(batch, sides[0]) for batch in batches], "size": [(batches[0], side) for side in sides],
        }  # fmt: skip
        series = {kind: series[kind] for kind in kinds}
        ends = {"small": (batches[0], sides[0])}
        ends |= {"large": (batches[0], sides[-1])} if len(sides) > 1 else {}
        points = dict.fromkeys([*(point for of_kind in series.values() for point in of_kind), *ends.values()])
        trials = compared(place, [each for point in points for each in _pair(devices, point)], wanted, SHARE)
        budget_s = (1 - SHARE) * wanted.budget_s / len(ends)
        passes, rules = {}, {}
        for size, point in ends.items():
            pair = _pair(devices, point)
            passes[size] = asked_in_turns(place, pair, wanted, {"do": "fit"}, budget_s)
            rules[size] = _criteria(place, pair)
    first, second = devices
    rows = _phases(devices, trials, ends, passes)
    faster = {kind: crossover(devices, [_ratio(trials, devices, point) for point in of_kind], UNITS[kind],
                              [point[0] if kind == "batch" else point[1] for point in of_kind])
              for kind, of_kind in series.items()}  # fmt: skip
    columns = ("phase", "side, pixels", f"{first}, ms", f"{second}, ms", f"{second} against {first}", "sure")
    tables = [
        SuiteTable(f"{second} against {first}: one statistics pass, one gradient update", columns, rows),
        _series(devices, trials, series),
        _rules(rules),
    ]
    skipped = trials.skipped | {
        f"statistics, {name}": why for found in passes.values() for name, why in found.items() if isinstance(why, str)
    }
    notes = [*place.notes, *trials.notes, *(f"by {kind}: {sentence}" for kind, sentence in faster.items())]
    data = {"crossovers": faster, "verdicts": {row[0]: row[5] for row in rows}, "statistics": passes}
    report = SuiteReport(_headline(devices, rows, faster), tables, notes, skipped, data)
    return saved(wanted, "devices", report, trials)


def _of_the_task(wanted: SuiteRequest) -> SuiteRequest:
    """Return the request for the task with both phases. Raises ConfigError for another task."""
    request = wanted.request
    other = [word for word in request.overrides if word.startswith("task=") and word != f"task={TASK}"]
    if request.task_file or other:
        what = f"is not measured by this suite: its phases are those of {TASK}"
        raise ConfigError(Problem(what, other[0] if other else "--task", f"use task={TASK}"))
    own = merge_overrides((f"task={TASK}", "task.data=synthetic"), request.overrides)
    return dataclasses.replace(wanted, request=dataclasses.replace(request, overrides=own))


def devices_of(text: str, inventory: Inventory) -> Devices:
    """Return two devices. Raises ConfigError."""
    gpus, cores = [gpu.torch_name for gpu in inventory.usable], inventory.cpu.logical_cores
    if text == "auto":
        if not gpus and cores < 2:
            what = "there is one device with one core: nothing to compare"
            raise ConfigError(Problem(what, "devices=auto", "use devices=cpu:1,cpu:2"))
        names = ["cpu", gpus[0]] if gpus else ["cpu:1", f"cpu:{cores}"]
    else:
        first = next((gpu for gpu in gpus if gpu.startswith("cuda")), "cuda")
        names = [first if word.strip() == "cuda" else word.strip() for word in text.strip("[]").split(",")]
    if len(set(names)) != 2 or len(names) != 2:
        raise ConfigError(Problem("must be two different devices", f"devices={text}", "use devices=cpu:1,cpu:2"))
    return {name: _overrides_of(name, gpus, text) for name in names}


def _overrides_of(name: str, gpus: Sequence[str], text: str) -> tuple[str, ...]:
    kind, has_number, number = name.partition(":")
    is_count = number.isascii() and number.isdigit() and 0 < int(number[:9]) <= MAX_THREADS
    if kind == "cpu" and (not has_number or is_count):
        return ("device=cpu", *([f"backend.threads={number}"] if has_number else []))
    if name in gpus:
        return (f"device={name}",)
    here = ", ".join(["cpu", f"cpu:THREADS (at most {MAX_THREADS})", *gpus])
    what = f"{name or 'nothing'} is not a device of this machine, which has {here}"
    fix = did_you_mean(name, ["cpu", "cuda", *gpus]) or "use devices=cpu:1,cpu:2"
    raise ConfigError(Problem(what, f"devices={text}", fix))


def _pair(devices: Devices, point: Point) -> list[Variant]:
    """Return the variants of both devices, the second compared with the first."""
    batch, side = point
    sizes = (f"global_batch_size={batch}", f"micro_batch_size={batch}", f"task.height={side}", f"task.width={side}")
    first, second = (Variant(_name(device, point), (*words, *sizes)) for device, words in devices.items())
    return [first, dataclasses.replace(second, against=first.name)]


def _name(device: str, point: Point) -> str:
    return f"{device}, batch {point[0]}, side {point[1]}"


# ---------------------------------------------------------------- results


def _ratio(trials: ComparisonResult, devices: Devices, point: Point) -> Ratio | None:
    """Return how many times as fast the second device is."""
    return trials.ratio(trials.of(_name([*devices][1], point)))


def crossover(devices: Sequence[str] | Devices, ratios: Sequence[Ratio | None], unit: str, at: Sequence[int]) -> str:
    """Return from which size on which device is clearly faster, by the sizes that were measured.

    ratios  of the second device to the first; at: their sizes, increasing
    """
    first, second = devices
    known = [(size, ratio.verdict) for size, ratio in zip(at, ratios, strict=True) if ratio is not None]
    if len(known) < 2:
        return "too few sizes were measured"
    end = known[-1][1]
    verdicts = {verdict for _, verdict in known}
    if end == "no clear change" or verdicts == {"no clear change"}:
        return f"no clear change at {known[-1][0]:,} {unit}"
    winner = second if end == "better" else first
    start = next(at for at in range(len(known)) if all(verdict == end for _, verdict in known[at:]))
    if not start:
        return f"{winner} is faster from {known[0][0]:,} to {known[-1][0]:,} {unit}"
    is_other = known[start - 1][1] != "no clear change"
    before = f"{first if winner == second else second} up to {known[start - 1][0]:,}" if is_other else "unclear below"
    return f"{winner} is faster from {known[start][0]:,} {unit}, {before}"


def _phases(
    devices: Devices,
    trials: ComparisonResult,
    ends: Mapping[str, Point],
    passes: Mapping[str, Mapping[str, Answers | str]],
) -> list[tuple[Value, ...]]:
    """Return the rows of both phases, for small and large samples."""
    rows: list[tuple[Value, ...]] = []
    for size, point in ends.items():
        found = [passes[size].get(_name(device, point), "") for device in devices]
        times = [[] if isinstance(each, str) else [1e3 * sum(a["seconds"].values()) for a in each] for each in found]
        num = min(map(len, times))
        ratio = paired(times[0][:num], times[1][:num], half=ONE_EACH) if num else None
        ms = [median(each) if num else None for each in times]
        sure: str = ratio.verdict if ratio else "not measured"
        rows.append((f"statistics, {size}", point[1], *ms, str(ratio or ""), sure))
    for size, point in ends.items():
        one, two = (trials.of(_name(device, point)) for device in devices)
        ratio = trials.ratio(two)
        ms = [each.median_ms if each.blocks else None for each in (one, two)]
        sure = verdict_of(trials, two) if ratio else "not measured"
        rows.append((f"gradients, {size}", point[1], *ms, str(ratio or ""), sure))
    return rows


def _series(devices: Devices, trials: ComparisonResult, series: Mapping[str, Sequence[Point]]) -> SuiteTable:
    """Return an update on both devices by batch and by sample size."""
    rows: list[list[Value]] = []
    for kind, points in series.items():
        for point in points:
            ms = [each.median_ms for each in (trials.of(_name(device, point)) for device in devices)]
            ratio = _ratio(trials, devices, point)
            rows.append([kind, *point, *ms, str(ratio or ""), ratio.verdict if ratio else "not measured"])
    first, second = devices
    columns = ("by", "samples", "side, pixels", f"{first}, ms", f"{second}, ms", f"{second} against {first}", "sure")
    return SuiteTable("an update by batch and sample size", columns, rows)


def _criteria(place: MeasuringPlace, pair: Sequence[Variant]) -> list[Criterion]:
    """Return the thresholds with the values of the first variant that can be opened."""
    for variant in pair:
        with suppress(AccelRunError), place.comparison.alone(variant, CompareLimits()) as (ask, measured):
            opened: Mapping[str, Any] = measured.opened
            evidence = Evidence(
                num_samples=opened["num_samples"],
                global_batch_size=opened["global_batch_size"],
                num_parameters=opened["parameters"],
                epochs=opened["epochs"],
            )
            probe = {**ask({"do": "batch"}), "trained_layers": opened["trained_layers"]}
            return criteria(Facts(evidence, {}, place.inventory.cpu, probe=probe))
    return []


def _rules(found: Mapping[str, Sequence[Criterion]]) -> SuiteTable:
    """Return the thresholds with values and verdicts for small and large samples."""
    columns, rows = ["rule of thumb", ""], dict[str, list[Value]]()
    for size, of_size in found.items():
        columns += [size, f"result, {size}"]
        for row in of_size:
            shown = rows.setdefault(row.name, [row.name, row.rule or "-"])
            shown += [row.value, row.verdict if row.rule else "-"]
    complete = [row for row in rows.values() if len(row) == len(columns)]
    return SuiteTable("GPU or CPU? Rules of thumb; the measurement decides", columns, complete)


def _headline(devices: Devices, rows: Sequence[Sequence[Value]], faster: Mapping[str, str]) -> str:
    first, second = devices
    of = {
        shown: [str(row[0]) for row in rows if str(row[5]).partition(";")[0] == verdict]
        for shown, verdict in (("faster", "better"), ("slower", "worse"), ("no clear change", "no clear change"))
    }
    parts = [f"{shown} in {' and '.join(names)}" for shown, names in of.items() if names]
    return ". ".join([f"{second} against {first}: {', '.join(parts) or 'not measured'}", *faster.values()])


TASK = "hyperspectral"
UNITS = {"batch": "samples per update", "size": "pixels of a side"}
SHARE = 0.65  # of the budget for updates; the rest is for statistics passes
