"""Key figures at the top of the page about a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from runner.base.text import NOT_MEASURED, format_bytes, format_duration, format_gib, format_rate
from runner.tools.report.page import Tile
from runner.tools.report.run_data import RunData


def _loss_tile(story: RunData) -> Iterable[Tile]:
    last = story.curves.last("train/loss")
    if last is not None:
        of_rows = story.curves["train/loss"].y
        first = next((value for value in of_rows if math.isfinite(value)), last)
        note = f"initially {first:.4g}" if first != last else ""
        note = note if math.isfinite(of_rows[-1]) else f"previously {of_rows[-1]:g}"
        yield Tile("training loss", f"{last:.4g}", note)


def _metric_tiles(story: RunData) -> Iterable[Tile]:
    for name, value in list(story.metrics.items())[:_METRIC_TILES]:
        baseline = story.baselines.get(name)
        if value is None:
            yield Tile(name, NOT_MEASURED, "no items, or not finite, in the last evaluation")
            continue
        note = "" if baseline is None else f"a trivial model reaches {baseline:.4g}"
        yield Tile(name, f"{value:.4g}", note)


def _speed_tile(story: RunData) -> Iterable[Tile]:
    seen = story.evidence
    if story.throughput is not None:
        yield Tile("throughput", format_rate(story.throughput), "items per second, first update excluded")
    if seen is not None and seen.step_time_ms is not None:
        low, high = seen.step_time_low_ms, seen.step_time_high_ms
        note = f"median; {low:.4g} to {high:.4g} in 8 of 10 rows" if low is not None and high is not None else "median"
        yield Tile("update time", f"{seen.step_time_ms:.4g} ms", note)


def _memory_tile(story: RunData) -> Iterable[Tile]:
    seen = story.evidence
    if seen is None:
        return
    for name, peak, total in (
        ("device", seen.device_peak_gib, seen.device_total_gib),
        ("host", seen.host_peak_gib, seen.host_total_gib),
    ):
        if peak is not None:
            yield Tile(f"peak memory, {name}", format_gib(peak), f"of {format_gib(total)}" if total else "")


def _time_tile(story: RunData) -> Iterable[Tile]:
    of_phases = [phase.seconds for phase in story.record.result.phases.values()]
    if sum(of_phases) > _SEVERAL_PROCESSES * story.total_s:  # the bottleneck is that of the last process
        yield Tile(
            "time", format_duration(sum(of_phases)), f"of which {format_duration(story.total_s)} in the last process"
        )
    elif story.total_s > 0:
        parts = story.parts_s
        start = parts.get("starting", 0.0) + parts.get("first_update", 0.0)
        yield Tile(
            "time", format_duration(story.total_s), f"{start:.1f} s until the end of the first update" if start else ""
        )


def _updates_tile(story: RunData) -> Iterable[Tile]:
    made = max((end for _, end in story.curves.phases.values()), default=None)
    if made is not None:
        wanted = story.plan.updates if len(story.curves.phases) == 1 else None
        several = f"in {len(story.curves.phases)} phases" if len(story.curves.phases) > 1 else ""
        yield Tile("updates", f"{made:,}", f"of {wanted:,}" if isinstance(wanted, int) else several)


def _checkpoints_tile(story: RunData) -> Iterable[Tile]:
    known = [each for each in story.checkpoints if each.problems is not None]
    damaged = sum(bool(each.problems) for each in known)
    state = f"{damaged} damaged" if damaged else "all valid" if known else "not read here"
    size = sum(each.bytes for each in story.checkpoints)
    yield Tile(
        "checkpoints", str(len(story.checkpoints)), f"{state}, {format_bytes(size)}" if story.checkpoints else "none"
    )


TILES: tuple[Callable[[RunData], Iterable[Tile]], ...] = (
    _loss_tile,
    _metric_tiles,
    _speed_tile,
    _memory_tile,
    _time_tile,
    _updates_tile,
    _checkpoints_tile,
)
_METRIC_TILES = 3
_SEVERAL_PROCESSES = 1.1  # times as long as the last process took
