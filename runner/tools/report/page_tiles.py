"""Key figures of a run: at the top of its page, and in a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from runner.base.text import NOT_MEASURED, format_bytes, format_duration, format_gib, format_rate
from runner.tools.report.page import Tile
from runner.tools.report.run_data import RunData


def make_tiles(run: RunData) -> Iterator[Tile]:
    """Yield the key figures of a run; unknown ones are omitted."""
    for make in (_loss_tile, _metric_tiles, _speed_tile, _memory_tile, _time_tile, _updates_tile, _checkpoints_tile):
        yield from make(run)


def _loss_tile(run: RunData) -> Iterable[Tile]:
    last = run.curves.last("train/loss")
    if last is not None:
        values = run.curves["train/loss"].y
        first = next((value for value in values if math.isfinite(value)), last)
        note = f"initially {first:.4g}" if first != last else ""
        note = note if math.isfinite(values[-1]) else f"the last row is {values[-1]:g}"
        yield Tile("training loss", f"{last:.4g}", note)


def _metric_tiles(run: RunData) -> Iterable[Tile]:
    for name, value in list(run.metrics.items())[:_METRIC_TILES]:
        baseline = run.baselines.get(name)
        if value is None:
            yield Tile(name, NOT_MEASURED, "no items, or not finite, in the last evaluation")
            continue
        note = "" if baseline is None else f"a trivial model reaches {baseline:.4g}"
        yield Tile(name, f"{value:.4g}", note)


def _speed_tile(run: RunData) -> Iterable[Tile]:
    evidence = run.evidence
    if run.throughput is not None:
        yield Tile("throughput", format_rate(run.throughput), f"{run.item}s per second, first update excluded")
    if evidence is not None and evidence.step_time_ms is not None:
        low, high = evidence.step_time_low_ms, evidence.step_time_high_ms
        note = f"median; {low:.4g} to {high:.4g} in 80% of rows" if low is not None and high is not None else "median"
        yield Tile("update time", f"{evidence.step_time_ms:.4g} ms", note)


def _memory_tile(run: RunData) -> Iterable[Tile]:
    evidence = run.evidence
    if evidence is None:
        return
    for name, peak, total in (
        ("device", evidence.device_peak_gib, evidence.device_total_gib),
        (evidence.host_label, evidence.host_peak_gib, evidence.host_total_gib),
    ):
        if peak is not None:
            yield Tile(f"peak memory, {name}", format_gib(peak), f"of {format_gib(total)}" if total else "")


def _time_tile(run: RunData) -> Iterable[Tile]:
    of_phases = [phase.seconds for phase in run.record.result.phases.values()]
    if sum(of_phases) > _SEVERAL_PROCESSES * run.total_s:  # resumed: `total_s` is the time of the last process
        yield Tile(
            "time", format_duration(sum(of_phases)), f"of which {format_duration(run.total_s)} in the last process"
        )
    elif run.total_s > 0:
        parts = run.parts_s
        start = parts.get("starting", 0.0) + parts.get("first_update", 0.0)
        yield Tile(
            "time", format_duration(run.total_s), f"{start:.1f} s until the end of the first update" if start else ""
        )


def _updates_tile(run: RunData) -> Iterable[Tile]:
    phases = run.curves.phases.items()
    reached = [run.record.num_updates(phase, {"update": end - begin}) for phase, (begin, end) in phases]
    if reached:
        planned = run.plan.updates if len(run.curves.phases) == 1 else None
        several = f"in {len(run.curves.phases)} phases" if len(run.curves.phases) > 1 else ""
        yield Tile("updates", f"{sum(reached):,}", f"of {planned:,}" if isinstance(planned, int) else several)


def _checkpoints_tile(run: RunData) -> Iterable[Tile]:
    size = sum(checkpoint.bytes for checkpoint in run.checkpoints)
    yield Tile("checkpoints", str(len(run.checkpoints)), format_bytes(size) if run.checkpoints else "none")


_METRIC_TILES = 3
_SEVERAL_PROCESSES = 1.1  # a run was resumed if its phases took more than this many times as long as its last process
