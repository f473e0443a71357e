"""`suite=devices`: compare two devices by phase, and find the batch or sample size at which the faster one changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.base.values import MAX_THREADS
from runner.config.request import merge_overrides
from runner.config.schema import did_you_mean
from runner.plan.inventory import Inventory
from runner.records.evidence import Evidence
from runner.tools.measure.compare import CompareLimits
from runner.tools.measure.comparison_result import ComparisonResult, Variant
from runner.tools.measure.facts import Criterion, evaluate_criteria
from runner.tools.measure.measurement_context import MeasurementContext
from runner.tools.measure.statistics import PRIOR_HALF_WIDTH, Ratio, paired_ratio
from runner.tools.measure.suite import (
    Replies,
    SuiteReport,
    SuiteRequest,
    SuiteTable,
    Value,
    call_interleaved,
    compare_variants,
    format_verdict,
    open_suite_context,
    save_report,
)

Devices = Mapping[str, tuple[str, ...]]  # name -> overrides
Replied = Mapping[str, Replies | str]  # variant -> replies, or why there are none


class Point(NamedTuple):
    """Samples per update, and side of an image cube in pixels; None: the task has no such setting."""

    batch: int
    side: int | None = None


@dataclass(frozen=True)
class Points:
    """The sizes that are measured.

    series    what varies, "batch" or "size" -> sizes
    extremes  "small" and "large" -> size at which both kinds of phases, statistics and gradients, are measured
    """

    series: Mapping[str, Sequence[Point]]
    extremes: Mapping[str, Point]

    @property
    def all(self) -> list[Point]:
        """All sizes, without duplicates."""
        return list(dict.fromkeys(chain(*self.series.values(), self.extremes.values())))


def run(suite_request: SuiteRequest) -> SuiteReport:
    """Compare two devices, or numbers of threads, by batch size; for a task with image cubes, also by the cubes' size.

    If the task has a statistics phase, that phase is measured, too.
    Raises ConfigError for an unknown device and invalid numbers.
    """
    batches, sides = (tuple(sorted(suite_request.parse_numbers(key))) for key in ("batches", "sides"))
    suite_request = _apply_default_task(suite_request)
    with open_suite_context(suite_request) as context:
        devices = parse_devices(suite_request.options["devices"], context.inventory)
        task = context.plan.choices["task"]
        has_cubes = {"height", "width"} <= set(task.options)
        points = _cube_points(batches, sides) if has_cubes else _batch_points(batches)
        has_statistics = context.plan.phases[0].kind == "fit"
        share = SHARE if has_statistics else 1.0
        variants = [each for point in points.all for each in _make_pair(devices, point)]
        result = compare_variants(context, variants, suite_request, share)
        budget_s = (1 - share) * suite_request.budget_s / len(points.extremes)
        passes: dict[str, Replied] = {}
        rules = {}
        for size, point in points.extremes.items():
            pair = _make_pair(devices, point)
            if has_statistics:
                passes[size] = call_interleaved(context, pair, suite_request, {"do": "fit"}, budget_s)
            rules[size] = _evaluate_criteria(context, pair)
    first, second = devices
    series = points.series
    rows = _make_phase_rows(devices, result, points, passes)
    faster = {kind: describe_crossover(devices, [_ratio(result, devices, point) for point in of_kind], UNITS[kind],
                              [point.side or point.batch if kind == "size" else point.batch for point in of_kind])
              for kind, of_kind in series.items()}  # fmt: skip
    unit = "side, pixels" if has_cubes else "samples"
    columns = ("phase", unit, f"{first}, ms", f"{second}, ms", f"{second} against {first}", "sure")
    measured = "one statistics pass, one gradient update" if passes else "one gradient update"
    tables = [
        SuiteTable(f"{second} against {first}: {measured}", columns, rows),
        _make_series_table(devices, result, series),
        _make_rules_table(rules),
    ]
    skipped = result.skipped | {
        f"statistics, {name}": why for found in passes.values() for name, why in found.items() if isinstance(why, str)
    }
    notes = [*context.notes, *result.notes, *(f"by {kind}: {sentence}" for kind, sentence in faster.items())]
    data = {"crossovers": faster, "verdicts": {row[0]: row[5] for row in rows}, "statistics": passes}
    report = SuiteReport(_make_headline(devices, rows, faster), tables, notes, skipped, data)
    return save_report(suite_request, "devices", report, result)


def _apply_default_task(suite_request: SuiteRequest) -> SuiteRequest:
    """Return the request with the default task, which has both kinds of phases, unless it names another task."""
    request = suite_request.request
    named = [word for word in request.overrides if word.startswith("task=")]
    if request.task_file or (named and named[-1] != f"task={TASK}"):
        return suite_request
    own = merge_overrides((f"task={TASK}", "task.data=synthetic"), request.overrides)
    return dataclasses.replace(suite_request, request=dataclasses.replace(request, overrides=own))


def _cube_points(batches: Sequence[int], sides: Sequence[int]) -> Points:
    """Return the sizes for a task with cubes: batches of the smallest cubes, and cubes in the smallest batch."""
    series = {
        "batch": [Point(batch, sides[0]) for batch in batches], "size": [Point(batches[0], side) for side in sides],
    }  # fmt: skip
    extremes = {"small": Point(batches[0], sides[0])}
    extremes |= {"large": Point(batches[0], sides[-1])} if len(sides) > 1 else {}
    return Points(series, extremes)


def _batch_points(batches: Sequence[int]) -> Points:
    """Return the sizes for a task whose samples have one size."""
    extremes = {"small": Point(batches[0])} | ({"large": Point(batches[-1])} if len(batches) > 1 else {})
    return Points({"batch": [Point(batch) for batch in batches]}, extremes)


def parse_devices(text: str, inventory: Inventory) -> Devices:
    """Parse the names of two devices; return name -> overrides. Raises ConfigError."""
    gpus, cores = [gpu.torch_name for gpu in inventory.usable], inventory.cpu.logical_cores
    if text == "auto":
        if not gpus and cores < 2:
            what = "there is only one device, with one core, so there is nothing to compare"
            raise ConfigError(Problem(what, "devices=auto", "use devices=cpu:1,cpu:2"))
        names = ["cpu", gpus[0]] if gpus else ["cpu:1", f"cpu:{cores}"]
    else:
        first = next((gpu for gpu in gpus if gpu.startswith("cuda")), "cuda")
        names = [first if word.strip() == "cuda" else word.strip() for word in text.strip("[]").split(",")]
    if len(set(names)) != 2 or len(names) != 2:
        raise ConfigError(Problem("must be two different devices", f"devices={text}", "use devices=cpu:1,cpu:2"))
    return {name: _device_overrides(name, gpus, text) for name in names}


def _device_overrides(name: str, gpus: Sequence[str], text: str) -> tuple[str, ...]:
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


def _make_pair(devices: Devices, point: Point) -> list[Variant]:
    """Return the variants of both devices; the second is compared with the first."""
    batch, side = point
    sizes: tuple[str, ...] = (f"global_batch_size={batch}", f"micro_batch_size={batch}")
    if side is not None:
        sizes += (f"task.height={side}", f"task.width={side}")
    first, second = (Variant(_variant_name(device, point), (*words, *sizes)) for device, words in devices.items())
    return [first, dataclasses.replace(second, against=first.name)]


def _variant_name(device: str, point: Point) -> str:
    return f"{device}, batch {point.batch}" + (f", side {point.side}" if point.side else "")


# ---------------------------------------------------------------- results


def _ratio(result: ComparisonResult, devices: Devices, point: Point) -> Ratio | None:
    """Return the speed of the second device relative to the first."""
    return result.ratio(result.of(_variant_name([*devices][1], point)))


def describe_crossover(
    devices: Sequence[str] | Devices, ratios: Sequence[Ratio | None], unit: str, at: Sequence[int]
) -> str:
    """Describe which device is clearly faster, and from which size on.

    ratios  speed of the second device relative to the first, by size
    at      increasing sizes
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


def _make_phase_rows(
    devices: Devices,
    result: ComparisonResult,
    points: Points,
    passes: Mapping[str, Replied],
) -> list[tuple[Value, ...]]:
    """Return the table rows of each phase, for the small and the large size."""
    rows: list[tuple[Value, ...]] = []
    for size in passes:
        point = points.extremes[size]
        found = [passes[size].get(_variant_name(device, point), "") for device in devices]
        times = [[] if isinstance(each, str) else [1e3 * sum(a["seconds"].values()) for a in each] for each in found]
        num = min(map(len, times))
        ratio = paired_ratio(times[0][:num], times[1][:num], half_width=PRIOR_HALF_WIDTH) if num else None
        ms = [median(each) if num else None for each in times]
        sure: str = ratio.verdict if ratio else "not measured"
        rows.append((f"statistics, {size}", point.side or point.batch, *ms, str(ratio or ""), sure))
    for size, point in points.extremes.items():
        one, two = (result.of(_variant_name(device, point)) for device in devices)
        ratio = result.ratio(two)
        ms = [each.median_ms if each.blocks else None for each in (one, two)]
        sure = format_verdict(result, two) if ratio else "not measured"
        rows.append((f"gradients, {size}", point.side or point.batch, *ms, str(ratio or ""), sure))
    return rows


def _make_series_table(devices: Devices, result: ComparisonResult, series: Mapping[str, Sequence[Point]]) -> SuiteTable:
    """Return the table of update times on both devices, by batch and by sample size."""
    rows: list[list[Value]] = []
    for kind, points in series.items():
        for point in points:
            ms = [each.median_ms for each in (result.of(_variant_name(device, point)) for device in devices)]
            ratio = _ratio(result, devices, point)
            rows.append([kind, *point, *ms, str(ratio or ""), ratio.verdict if ratio else "not measured"])
    first, second = devices
    columns = ("by", "samples", "side, pixels", f"{first}, ms", f"{second}, ms", f"{second} against {first}", "sure")
    return SuiteTable("an update by batch and sample size", columns, rows)


def _evaluate_criteria(context: MeasurementContext, pair: Sequence[Variant]) -> list[Criterion]:
    """Evaluate the rules of thumb for the first variant that starts."""
    for variant in pair:
        with suppress(AccelRunError), context.comparison.open_variant(variant, CompareLimits()) as (call, trial):
            opened: Mapping[str, Any] = trial.opened
            evidence = Evidence(
                num_samples=opened["num_samples"],
                global_batch_size=opened["global_batch_size"],
                num_parameters=opened["parameters"],
                epochs=opened["epochs"],
            )
            return evaluate_criteria(evidence, call({"do": "batch"}))
    return []


def _make_rules_table(found: Mapping[str, Sequence[Criterion]]) -> SuiteTable:
    """Return the table of rules of thumb with values and verdicts, for small and large samples."""
    columns, rows = ["rule of thumb", ""], dict[str, list[Value]]()
    for size, of_size in found.items():
        columns += [size, f"result, {size}"]
        for row in of_size:
            shown = rows.setdefault(row.name, [row.name, row.rule])
            shown += [row.value, row.verdict]
    complete = [row for row in rows.values() if len(row) == len(columns)]
    return SuiteTable("GPU or CPU? Rules of thumb; the measurement decides", columns, complete)


def _make_headline(devices: Devices, rows: Sequence[Sequence[Value]], faster: Mapping[str, str]) -> str:
    first, second = devices
    of = {
        shown: [str(row[0]) for row in rows if str(row[5]).partition(";")[0] == verdict]
        for shown, verdict in (("faster", "better"), ("slower", "worse"), ("no clear change", "no clear change"))
    }
    parts = [f"{shown} in {' and '.join(names)}" for shown, names in of.items() if names]
    return ". ".join([f"{second} against {first}: {', '.join(parts) or 'not measured'}", *faster.values()])


TASK = "hyperspectral"
UNITS = {"batch": "samples per update", "size": "pixels per side"}
SHARE = 0.65  # share of the budget for updates; the rest is for statistics passes
