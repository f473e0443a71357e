"""`suite=devices`: compare two devices by phase, and find the batch size at which the faster one changes."""

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
from runner.tools.measure.criteria import Criterion, evaluate_criteria
from runner.tools.measure.facts import Facts
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


def run(suite_request: SuiteRequest) -> SuiteReport:
    """Compare two devices, or numbers of threads, by batch.

    A task with a phase of statistics is measured in both phases.
    Raises ConfigError for an unknown device and invalid numbers.
    """
    batches = sorted(suite_request.parse_numbers("batches"))
    suite_request = _apply_default_task(suite_request)
    with open_suite_context(suite_request) as context:
        devices = parse_devices(suite_request.options["devices"], context.inventory)
        has_statistics = context.plan.phases[0].kind == "fit"
        share = SHARE if has_statistics else 1.0
        variants = [each for batch in batches for each in _make_pair(devices, batch)]
        result = compare_variants(context, variants, suite_request, share)
        passes: dict[int, Replied] = {}
        rules = {}
        for batch in dict.fromkeys((batches[0], batches[-1])):
            pair = _make_pair(devices, batch)
            if has_statistics:
                budget_s = (1 - share) * suite_request.budget_s / 2
                passes[batch] = call_interleaved(context, pair, suite_request, {"do": "fit"}, budget_s)
            rules[batch] = _evaluate_criteria(context, pair)
    first, second = devices
    rows = _make_phase_rows(devices, result, batches, passes)
    ratios = [_ratio(result, devices, batch) for batch in batches]
    crossover = describe_crossover(devices, ratios, "samples per update", batches)
    columns = ("phase", "samples", f"{first}, ms", f"{second}, ms", f"{second} against {first}", "sure")
    measured = "one statistics pass, one gradient update" if passes else "one gradient update"
    tables = [
        SuiteTable(f"{second} against {first}: {measured}", columns, rows),
        _make_rules_table(rules),
    ]
    skipped = result.skipped | {
        f"statistics, {name}": why for found in passes.values() for name, why in found.items() if isinstance(why, str)
    }
    notes = [*context.notes, *result.notes]
    data = {"crossover": crossover, "verdicts": {f"{row[0]}, {row[1]}": row[5] for row in rows}, "statistics": passes}
    report = SuiteReport(_make_headline(devices, rows, crossover), tables, notes, skipped, data)
    return save_report(suite_request, "devices", report, result)


def _apply_default_task(suite_request: SuiteRequest) -> SuiteRequest:
    """Return the request, for a task with both phases unless it names one."""
    request = suite_request.request
    named = [word for word in request.overrides if word.startswith("task=")]
    if request.task_file or (named and named[-1] != f"task={TASK}"):
        return suite_request
    own = merge_overrides((f"task={TASK}", "task.data=synthetic"), request.overrides)
    return dataclasses.replace(suite_request, request=dataclasses.replace(request, overrides=own))


def parse_devices(text: str, inventory: Inventory) -> Devices:
    """Parse the names of two devices; return name -> overrides. Raises ConfigError."""
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


def _make_pair(devices: Devices, batch: int) -> list[Variant]:
    sizes = (f"global_batch_size={batch}", f"micro_batch_size={batch}")
    first, second = (Variant(_variant_name(device, batch), (*words, *sizes)) for device, words in devices.items())
    return [first, dataclasses.replace(second, against=first.name)]


def _variant_name(device: str, batch: int) -> str:
    return f"{device}, batch {batch}"


# ---------------------------------------------------------------- results


def _ratio(result: ComparisonResult, devices: Devices, batch: int) -> Ratio | None:
    """Return the speed of the second device relative to the first."""
    return result.ratio(result.of(_variant_name([*devices][1], batch)))


def describe_crossover(
    devices: Sequence[str] | Devices, ratios: Sequence[Ratio | None], unit: str, at: Sequence[int]
) -> str:
    """Describe from which size on which device is clearly faster.

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
    devices: Devices, result: ComparisonResult, batches: Sequence[int], passes: Mapping[int, Replied]
) -> list[tuple[Value, ...]]:
    """Return the table rows: statistics passes and gradient updates by batch."""
    rows: list[tuple[Value, ...]] = []
    for batch, replied in passes.items():
        found = [replied.get(_variant_name(device, batch), "") for device in devices]
        times = [[] if isinstance(each, str) else [1e3 * sum(a["seconds"].values()) for a in each] for each in found]
        num = min(map(len, times))
        ratio = paired_ratio(times[0][:num], times[1][:num], half_width=PRIOR_HALF_WIDTH) if num else None
        ms = [median(each) if num else None for each in times]
        sure: str = ratio.verdict if ratio else "not measured"
        rows.append(("statistics", batch, *ms, str(ratio or ""), sure))
    for batch in batches:
        one, two = (result.of(_variant_name(device, batch)) for device in devices)
        ratio = result.ratio(two)
        ms = [each.median_ms if each.blocks else None for each in (one, two)]
        sure = format_verdict(result, two) if ratio else "not measured"
        rows.append(("gradients", batch, *ms, str(ratio or ""), sure))
    return rows


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
            return evaluate_criteria(Facts(evidence, {}, context.inventory.cpu, probe=call({"do": "batch"})))
    return []


def _make_rules_table(found: Mapping[int, Sequence[Criterion]]) -> SuiteTable:
    columns, rows = ["rule of thumb", ""], dict[str, list[Value]]()
    for batch, of_batch in found.items():
        columns += [f"batch {batch}", f"result, batch {batch}"]
        for row in of_batch:
            shown = rows.setdefault(row.name, [row.name, row.rule])
            shown += [row.value, row.verdict]
    complete = [row for row in rows.values() if len(row) == len(columns)]
    return SuiteTable("GPU or CPU? Rules of thumb; the measurement decides", columns, complete)


def _make_headline(devices: Devices, rows: Sequence[Sequence[Value]], crossover: str) -> str:
    first, second = devices
    of = {
        shown: [f"{row[0]} of {row[1]}" for row in rows if str(row[5]).partition(";")[0] == verdict]
        for shown, verdict in (("faster", "better"), ("slower", "worse"), ("no clear change", "no clear change"))
    }
    parts = [f"{shown} in {' and '.join(names)}" for shown, names in of.items() if names]
    return f"{second} against {first}: {', '.join(parts) or 'not measured'}. {crossover}"


TASK = "hyperspectral"
SHARE = 0.65  # share of the budget for updates; the rest is for statistics passes
