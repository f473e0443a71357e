"""The charts of a run. Each function returns a drawing, or the reason why there is nothing to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from runner.base.json_values import is_number
from runner.base.picture import COLORS, new_figure
from runner.base.stopwatch import BETWEEN, PARTS
from runner.base.text import error_line
from runner.monitor.machine_plots import PlotLine
from runner.tools.report.chart_parts import (
    MAX_MARKED_POINTS,
    PART_COLORS,
    SIZE,
    Chart,
    ChartSpec,
    Drawing,
    MissingPart,
    align_to,
    bin_curve,
    describe_range,
    draw_over_updates,
    format_axes,
    missing_reason,
    smooth_by_phase,
)
from runner.tools.report.machine_charts import gpus, machine, memory
from runner.tools.report.rank_charts import ranks
from runner.tools.report.run_data import Curve, RunData, make_printable, updates_per_row
from runner.tools.report.svg import GRID, MUTED, make_chart, page_style


def draw_charts(run: RunData, kinds: Sequence[ChartSpec]) -> tuple[list[Chart], list[MissingPart]]:
    """Return the charts of a run, and the reasons why others cannot be drawn."""
    charts: list[Chart] = []
    missing: list[MissingPart] = []
    with page_style():
        for kind in kinds:
            try:
                drawing = kind.draw(run)
                if isinstance(drawing, str):
                    missing.append(MissingPart(kind.title, drawing))
                    continue
                charts.append(make_chart(drawing, kind.id, kind.title, wide=kind.wide))
            except (ArithmeticError, ValueError) as error:  # caused by values that accel-run never writes
                missing.append(MissingPart(kind.title, make_printable(f"cannot be drawn: {error_line(error)}")))
    return charts, missing


# ---------------------------------------------------------------- over updates


def loss(run: RunData) -> Drawing | str:
    """Draw the training loss, of each row and smoothed, and the validation loss."""
    curves = run.curves
    raw, val = curves["train/loss"], curves["val/loss"]
    if not len(raw) and not len(val):
        return missing_reason(run, "no rows with a loss")
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    descriptions = []
    if len(raw):
        line = bin_curve(raw)
        axes.fill_between(line.x, line.low, line.high, color=COLORS[0], alpha=0.18, linewidth=0)
        mark = {"marker": "o", "markersize": 4} if len(raw) == 1 else {}
        axes.plot(line.x, line.mean, color=COLORS[0], linewidth=0.8, alpha=0.45, label="training, each row", **mark)
        smooth = bin_curve(smooth_by_phase(run, raw))
        axes.plot(smooth.x, smooth.mean, color=COLORS[0], linewidth=2.0, label="training, smoothed")
        descriptions.append(describe_range("training loss", raw))
    if len(val):
        mark = {"marker": "o", "markersize": 4} if len(val) <= MAX_MARKED_POINTS else {}
        line = bin_curve(val)
        axes.plot(line.x, line.mean, color=COLORS[1], linewidth=1.6, label="validation", **mark)
        descriptions.append(describe_range("validation loss", val))
    format_axes(axes, run, "loss")
    axes.legend(loc="upper right", fontsize=9)
    bad = sum(not math.isfinite(value) for value in raw.y)
    notes = [f"gaps: rows without a finite loss ({bad:,})"] if bad else []
    if any(count > 1 for count in updates_per_row(raw.x)):  # the training loss may then be above the validation loss
        notes.append("training: each point is the mean of the updates since the previous one")
    return Drawing(figure, "; ".join(descriptions), "; ".join(notes))


def metrics(run: RunData) -> Drawing | str:
    """Draw the validation metrics besides the loss, each with the value of a trivial model."""
    names = [name for name in run.curves.of if name.startswith("val/") and name != "val/loss"]
    if not names:
        return missing_reason(run, "only the loss was evaluated")
    shown = names[:_MAX_METRICS]
    columns = 1 if len(shown) == 1 else 2
    rows = -(-len(shown) // columns)
    figure = new_figure(SIZE[0], SIZE[1] if rows == 1 else 1.9 * rows)
    for axes, name in zip(np.ravel(figure.subplots(rows, columns, squeeze=False)), shown, strict=False):
        curve = run.curves[name]
        mark = {"marker": "o", "markersize": 4} if len(curve) <= MAX_MARKED_POINTS else {}
        line = bin_curve(curve)
        axes.plot(line.x, line.mean, color=COLORS[2], linewidth=1.6, **mark)
        baseline = run.baselines.get(name)
        if baseline is not None:
            axes.axhline(baseline, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.1, label="trivial model")
            axes.legend(fontsize=8)
        format_axes(axes, run, "", with_names=columns == 1)
        axes.tick_params(labelsize=9 if columns == 1 else 8)
        axes.set_title(name.removeprefix("val/"), loc="left", fontsize=10)
    for axes in figure.axes[len(shown) :]:
        axes.set_axis_off()
    descriptions = [describe_range(name, run.curves[name]) for name in shown]
    left_out = f"{len(names) - len(shown)} more are in the table" if len(names) > len(shown) else ""
    return Drawing(figure, "; ".join(descriptions), left_out)


def learning_rate(run: RunData) -> Drawing | str:
    """Draw the learning rate of each row."""
    return draw_over_updates(run, "lr", "learning rate", COLORS[3])


def gradient_norm(run: RunData) -> Drawing | str:
    """Draw the norm of the gradients before clipping, and the clipping threshold."""
    drawing = draw_over_updates(run, "train/grad_norm", "gradient norm", COLORS[4])
    limit = _clipping_norm(run)
    if isinstance(drawing, Drawing) and limit is not None:
        axes = drawing.figure.axes[0]
        norms = [norm for norm in run.curves["train/grad_norm"].y if not math.isnan(norm)]
        share = sum(norm > limit for norm in norms) / max(1, len(norms))
        low, high = axes.get_ylim()
        if limit < _MAX_LIMIT_RATIO * high:
            axes.axhline(limit, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.1)
            axes.set_ylim(low, max(high, 1.08 * limit))
            note = f"dashed: max_grad_norm={limit:g}, the gradients of {share:.0%} of the rows were clipped to it"
        else:
            note = f"no gradient norm is close to max_grad_norm={limit:g}: nothing was clipped"
        return Drawing(drawing.figure, f"{drawing.description}; {note}", note)
    return drawing


def _clipping_norm(run: RunData) -> float | None:
    """Return the clipping threshold of the phases that ran; None if there is none, or if they have different ones."""
    keys = [f"phase.{phase}.max_grad_norm" for phase in run.curves.phases]
    of_phases = [run.settings[key] for key in keys if key in run.settings]
    first, *others = of_phases or [run.settings.get("max_grad_norm")]
    return float(first) if is_number(first) and all(value == first for value in others) else None


def throughput(run: RunData) -> Drawing | str:
    """Draw the items per second."""
    return draw_over_updates(run, "perf/items_per_s", f"{run.item}s/s", COLORS[2])


def step_time(run: RunData) -> Drawing | str:
    """Draw the milliseconds of an update, stacked by part."""
    known = {part: run.curves[f"perf/{part}_ms"] for part in (*PARTS, *BETWEEN)}
    known = {part: curve for part, curve in known.items() if len(curve)}
    if not known:
        return missing_reason(run, "no rows with times by part")
    x = np.array(sorted({update for curve in known.values() for update in curve.x}))
    rows = {part: align_to(x, curve) for part, curve in known.items()}
    total = sum(row.sum() for row in rows.values()) or 1.0
    small = [part for part, row in rows.items() if row.sum() < _MIN_SHARE * total]
    stacked = {part: row for part, row in rows.items() if part not in small}
    if small:
        stacked["other"] = np.sum([rows[part] for part in small], axis=0)
    lines = {part: bin_curve(Curve(x.tolist(), row.tolist()), _STACK_POINTS) for part, row in stacked.items()}
    at = next(iter(lines.values())).x
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    if len(at) == 1:
        at = np.array([at[0] - 0.5, at[0] + 0.5])
        lines = {part: PlotLine(at, *(np.repeat(line.mean, 2),) * 3) for part, line in lines.items()}
    colors = [PART_COLORS.get(part, GRID) for part in lines]
    axes.stackplot(
        at, *(np.nan_to_num(line.mean) for line in lines.values()), colors=colors, labels=list(lines), linewidth=0
    )
    format_axes(axes, run, "ms per update")
    axes.set_ylim(0, None)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=8)
    shares = sorted(((row.sum() / total, part) for part, row in rows.items()), reverse=True)
    shares_text = ", ".join(f"{part} {share:.0%}" for share, part in shares if share >= _MIN_SHARE)
    note = f"other: {', '.join(small)}" if small else ""
    curves = {part: Curve(at.tolist(), line.mean.tolist()) for part, line in lines.items()}
    return Drawing(figure, f"time of updates by part: {shares_text}", note, curves)


_MAX_LIMIT_RATIO = 2.0  # the clipping threshold is drawn if it is below this multiple of the upper limit of the y axis
_STACK_POINTS = 160
_MAX_METRICS = 6
_MIN_SHARE = 0.01
CHARTS: tuple[ChartSpec, ...] = (
    ChartSpec("loss", "Loss", loss),
    ChartSpec("metrics", "Validation metrics", metrics),
    ChartSpec("throughput", "Throughput", throughput),
    ChartSpec("steps", "Time of an update by part", step_time),
    ChartSpec("lr", "Learning rate", learning_rate),
    ChartSpec("norm", "Gradient norm", gradient_norm),
    ChartSpec("memory", "Memory", memory),
    ChartSpec("ranks", "Balance of the ranks", ranks),
    ChartSpec("machine", "Machine over time", machine, wide=True),
    ChartSpec("gpus", "GPUs over time", gpus, wide=True),
)
