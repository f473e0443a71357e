"""The chart that shows how work is divided between ranks."""

from __future__ import annotations

import numpy as np

from runner.base.picture import COLORS, new_figure
from runner.base.stopwatch import BETWEEN, PARTS
from runner.tools.report.chart_parts import PART_COLORS, SIZE, Drawing, format_axes
from runner.tools.report.run_data import RunData
from runner.tools.report.svg import GRID


def ranks(run: RunData) -> Drawing | str:
    """Draw the seconds of each rank by part, and the samples of each rank if their numbers changed."""
    of_ranks = run.evidence.ranks_s if run.evidence is not None else ()
    rows = [dict(seconds) for seconds in of_ranks]
    if len(rows) < 2:
        if not run.plan.is_known:
            return _NO_PLAN
        return "a single process trained" if len(run.plan.ranks) < 2 else "the ranks reported no times"
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
    axes.set_xlabel("seconds of all updates")
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
    return Drawing(figure, description, "wait: time spent waiting for the other ranks, including communication")


_NO_PLAN = "plan.json is missing or damaged"
_MAX_NUMBERED = 16
