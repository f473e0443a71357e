"""Charts of the division of work: balance of the ranks, and the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from runner.base import partition
from runner.base.picture import COLORS, new_figure
from runner.base.stopwatch import BETWEEN, PARTS
from runner.tools.report.chart_parts import PART_COLORS, SIZE, Drawing, format_axes
from runner.tools.report.run_data import RunData, make_printable
from runner.tools.report.svg import GRID


def ranks(run: RunData) -> Drawing | str:
    """Seconds of each rank by part, and the samples of each rank if they changed."""
    of_ranks = run.evidence.ranks_s if run.evidence is not None else ()
    rows = [dict(seconds) for seconds in of_ranks] or _mean_rank_times(run)
    if len(rows) < 2:
        if not run.plan.is_known:
            return _NO_PLAN
        return "a single process trained" if _world_size(run) < 2 else "the ranks reported no times"
    changes = run.curves.shares
    parts = [part for part in (*PARTS, *BETWEEN) if any(row.get(part) for row in rows)]
    heights = [max(1.3, 0.34 * len(rows)), *([1.8] if changes else [])]
    figure = new_figure(SIZE[0], sum(heights) + 0.9)
    panels = np.ravel(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False))
    axes = panels[0]
    for row, seconds in enumerate(rows):
        begin = 0.0
        for part in parts:
            spent = seconds.get(part, 0.0)
            axes.barh(row, spent, 0.7, left=begin, color=PART_COLORS.get(part, GRID), label=part if row == 0 else None)
            begin += spent
    shares = run.plan.batch.shares
    labels = [
        f"rank {n}" + (f"\n{shares[n]} samples" if len(shares) == len(rows) and not changes else "")
        for n in range(len(rows))
    ]
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("seconds of all updates" if of_ranks else "ms per update, mean of the rows")
    axes.grid(visible=True, axis="x")
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=6, fontsize=8, handlelength=1.0)
    if changes:
        for rank in range(len(rows)):
            curve = [(at, shares_then[rank]) for at, shares_then in changes if rank < len(shares_then)]
            panels[1].step(
                [at for at, _ in curve],
                [samples for _, samples in curve],
                where="post",
                color=COLORS[rank % 6],
                label=f"rank {rank}",
                marker="o",
                markersize=3,
            )
        format_axes(panels[1], run, "samples per update")
        if len(rows) <= _MAX_NUMBERED:
            panels[1].legend(fontsize=8, ncols=-(-len(rows) // 6))
    waits = [row.get("wait", 0.0) / (sum(row.values()) or 1.0) for row in rows]
    description = ", ".join(f"rank {number} waited {share:.0%} of its time" for number, share in enumerate(waits))
    return Drawing(figure, description, "wait: for the other ranks, including communication")


def pipeline(run: RunData) -> Drawing | str:
    """The timeline of an update on each device, with the measured times of the stages."""
    choice = run.plan.choice("parallelism")
    if not choice.name:
        return _NO_PLAN
    if choice.function != "pipeline":
        return f"the run did not use a pipeline (parallelism={choice.name})"
    rows = [dict(seconds) for seconds in run.evidence.ranks_s] if run.evidence is not None else []
    rows = rows or _mean_rank_times(run)
    batch, options = run.plan.batch, choice.options
    schedule = options.get("schedule", "1f1b")
    if not batch.global_batch_size or not batch.micro_batch_size:
        return "plan.json does not contain the micro-batches of an update"
    count = -(-batch.global_batch_size // batch.micro_batch_size)
    if len(rows) < 2 or not all(row.get("forward") for row in rows):
        return "the stages reported no times"
    if count < 1:
        return "plan.json does not contain the micro-batches of an update"
    if count > _MAX_MICRO_BATCHES:
        return f"{count} micro-batches are too many to draw"
    updates = (run.evidence.updates if run.evidence is not None else None) or 1
    each_ms = 1e3 / (updates * count) if run.evidence and run.evidence.ranks_s else 1.0 / count
    forward = [each_ms * row.get("forward", 0.0) for row in rows]
    backward = [each_ms * row.get("backward", 0.0) for row in rows]
    try:
        timeline = partition.timeline(schedule, forward, backward, count)
    except (AssertionError, IndexError, ValueError):
        return f"unknown schedule {make_printable(str(schedule))}"
    figure = _draw_timeline(timeline, is_numbered=count <= _MAX_NUMBERED)
    idle = partition.simulated_bubble(schedule, forward, backward, count)
    measured = run.curves.last("pipeline/measured")
    description = f"{schedule}, {count} micro-batches: devices idle {idle:.0%} of an update with these times"
    description += f", {measured:.0%} measured, including transfers between devices" if measured is not None else ""
    return Drawing(figure, description, description)


def _draw_timeline(timeline: Sequence[Sequence[partition.Work]], *, is_numbered: bool) -> Figure:
    """Draw a row per device, with the number of the micro-batch in each forward and backward pass."""
    figure = new_figure(10.0, 1.1 + 0.5 * len(timeline))
    axes = figure.subplots()
    for device, works in enumerate(timeline):
        for kind, color, label in (("F", COLORS[5], "forward"), ("B", COLORS[0], "backward")):
            spans = [(begin, end - begin) for work, _, _, begin, end in works if work == kind]
            axes.broken_barh(
                spans,
                (device - 0.38, 0.76),
                facecolor=color,
                edgecolor="white",
                linewidth=0.8,
                label=label if device == 0 else None,
            )
        if is_numbered:
            for kind, _, number, begin, end in works:
                axes.text(
                    (begin + end) / 2,
                    device,
                    str(number),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if kind == "B" else _DARK_TEXT,
                )
    axes.set_yticks(range(len(timeline)), [f"device {number}" for number in range(len(timeline))], fontsize=9)
    axes.set_ylim(len(timeline) - 0.4, -0.6)
    axes.set_xlabel("ms per update")
    figure.legend(loc="outside upper right", ncols=2, fontsize=8)
    return figure


def _mean_rank_times(run: RunData) -> list[dict[str, float]]:
    """Return the mean milliseconds of each rank by part, from the rows."""
    rows: list[dict[str, float]] = []
    while True:
        keys = {part: run.curves[f"rank{len(rows)}/{part}_ms"] for part in (*PARTS, *BETWEEN)}
        row = {part: float(np.nanmean(curve.y)) for part, curve in keys.items() if len(curve)}
        if not row or len(rows) >= _MAX_RANKS:
            return rows
        rows.append(row)


def _world_size(run: RunData) -> int:
    return len(run.plan.ranks) or 1


_NO_PLAN = "plan.json is missing or damaged"
_DARK_TEXT = "#10202c"  # text on a color that is light in the light and the dark theme
_MAX_RANKS = 64
_MAX_MICRO_BATCHES = 64
_MAX_NUMBERED = 16
