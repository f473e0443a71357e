"""The charts of a run: each is drawn from what it left, or says in words why there is nothing to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from runner.base.json_values import is_number
from runner.base.picture import COLORS, new_figure
from runner.base.stopwatch import BETWEEN, PARTS
from runner.base.text import error_line
from runner.console import bottleneck
from runner.monitor.machine_plots import PlotLine
from runner.tools.report.chart_parts import (
    MARKED,
    PART_COLORS,
    SIZE,
    Chart,
    Drawing,
    Kind,
    Missing,
    binned,
    dress,
    from_to,
    interpolated,
    no_rows,
    over_updates,
    smoothed_by_phase,
)
from runner.tools.report.machine_charts import gpus, machine, memory
from runner.tools.report.rank_charts import pipeline, ranks
from runner.tools.report.run_data import Curve, RunData, fit
from runner.tools.report.svg import GRID, MUTED, as_svg, drawing


def charts_of(story: RunData, kinds: Sequence[Kind]) -> tuple[list[Chart], list[Missing]]:
    """Return the charts of a run, and those that cannot be drawn with the reason."""
    found: list[Chart] = []
    missing: list[Missing] = []
    with drawing():
        for kind in kinds:
            try:
                drawn = kind.draw(story)
                if isinstance(drawn, str):
                    missing.append(Missing(kind.title, drawn))
                    continue
                svg = as_svg(drawn, kind.id, kind.title)
            except (ArithmeticError, ValueError) as error:  # figures that no run has written
                missing.append(Missing(kind.title, fit(f"cannot be drawn: {error_line(error)}")))
                continue
            found.append(Chart(kind.id, kind.title, drawn.described, svg, drawn.note, kind.wide))
    return found, missing


# ---------------------------------------------------------------- over updates


def loss(story: RunData) -> Drawing | str:
    """The loss of every row, smoothed, and that of evaluations."""
    curves = story.curves
    raw, val = curves["train/loss"], curves["val/loss"]
    if not len(raw) and not len(val):
        return no_rows(story, "no rows with a loss")
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    said = []
    if len(raw):
        line = binned(raw)
        axes.fill_between(line.x, line.low, line.high, color=COLORS[0], alpha=0.18, linewidth=0)
        mark = {"marker": "o", "markersize": 4} if len(raw) == 1 else {}
        axes.plot(line.x, line.mean, color=COLORS[0], linewidth=0.8, alpha=0.45, label="training, each row", **mark)
        smooth = binned(smoothed_by_phase(story, raw))
        axes.plot(smooth.x, smooth.mean, color=COLORS[0], linewidth=2.0, label="training, smoothed")
        said.append(from_to("training loss", raw))
    if len(val):
        mark = {"marker": "o", "markersize": 4} if len(val) <= MARKED else {}
        line = binned(val)
        axes.plot(line.x, line.mean, color=COLORS[1], linewidth=1.6, label="validation", **mark)
        said.append(from_to("validation loss", val))
    dress(axes, story, "loss")
    axes.legend(loc="upper right", fontsize=9)
    bad = sum(not math.isfinite(value) for value in raw.y)
    note = f"{bad:,} rows without a finite loss are gaps" if bad else ""
    return Drawing(figure, "; ".join(said), note)


def metrics(story: RunData) -> Drawing | str:
    """The metrics of evaluations besides the loss, each with that of a trivial model."""
    names = [name for name in story.curves.of if name.startswith("val/") and name != "val/loss"]
    if not names:
        return no_rows(story, "only the loss was evaluated")
    shown = names[:_MOST_METRICS]
    columns = 1 if len(shown) == 1 else 2
    rows = -(-len(shown) // columns)
    figure = new_figure(SIZE[0], SIZE[1] if rows == 1 else 1.9 * rows)
    for axes, name in zip(np.ravel(figure.subplots(rows, columns, squeeze=False)), shown, strict=False):
        curve = story.curves[name]
        mark = {"marker": "o", "markersize": 4} if len(curve) <= MARKED else {}
        line = binned(curve)
        axes.plot(line.x, line.mean, color=COLORS[2], linewidth=1.6, **mark)
        baseline = story.baselines.get(name)
        if baseline is not None:
            axes.axhline(baseline, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.1, label="trivial model")
            axes.legend(fontsize=8)
        dress(axes, story, "", with_names=columns == 1)
        axes.tick_params(labelsize=9 if columns == 1 else 8)
        axes.set_title(name.removeprefix("val/"), loc="left", fontsize=10)
    for axes in figure.axes[len(shown) :]:
        axes.set_axis_off()
    said = [from_to(name, story.curves[name]) for name in shown]
    left_out = f"{len(names) - len(shown)} more are in the table" if len(names) > len(shown) else ""
    return Drawing(figure, "; ".join(said), left_out)


def learning_rate(story: RunData) -> Drawing | str:
    """The learning rate of each row."""
    return over_updates(story, "lr", "learning rate", COLORS[3], from_0=True)


def gradient_norm(story: RunData) -> Drawing | str:
    """The norm of the gradients before they are clipped, with the norm that they are clipped to."""
    drawn = over_updates(story, "train/grad_norm", "gradient norm", COLORS[4], from_0=True)
    given = story.settings.used.get("max_grad_norm")
    limit = float(given) if given is not None and is_number(given) else None
    if isinstance(drawn, Drawing) and limit is not None:
        axes = drawn.figure.axes[0]
        above = sum(value > limit for value in story.curves["train/grad_norm"].y)
        share = above / max(1, len(story.curves["train/grad_norm"]))
        low, high = axes.get_ylim()
        if limit < _IN_SIGHT * high:
            axes.axhline(limit, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.1)
            axes.set_ylim(low, max(high, 1.08 * limit))
            note = f"dashed: max_grad_norm={limit:g}, to which {share:.0%} of the rows were clipped"
        else:
            note = f"no gradient norm is close to max_grad_norm={limit:g}: nothing was clipped"
        return Drawing(drawn.figure, f"{drawn.described}; {note}", note)
    return drawn


def throughput(story: RunData) -> Drawing | str:
    """Items per second."""
    return over_updates(story, "perf/items_per_s", "items/s", COLORS[2], from_0=True)


def step_time(story: RunData) -> Drawing | str:
    """Milliseconds of an update, stacked by part."""
    known = {part: story.curves[f"perf/{part}_ms"] for part in (*PARTS, *BETWEEN)}
    known = {part: curve for part, curve in known.items() if len(curve)}
    if not known:
        return no_rows(story, "no rows with times by part")
    x = np.array(sorted({update for curve in known.values() for update in curve.x}))
    rows = {part: interpolated(x, curve) for part, curve in known.items()}
    total = sum(row.sum() for row in rows.values()) or 1.0
    small = [part for part, row in rows.items() if row.sum() < _LEAST_SHARE * total]
    stacked = {part: row for part, row in rows.items() if part not in small}
    if small:
        stacked["other"] = np.sum([rows[part] for part in small], axis=0)
    lines = {part: binned(Curve(x.tolist(), row.tolist()), _STACK_POINTS) for part, row in stacked.items()}
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
    dress(axes, story, "ms per update")
    axes.set_ylim(0, None)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=8)
    shares = sorted(((row.sum() / total, part) for part, row in rows.items()), reverse=True)
    said = ", ".join(f"{part} {share:.0%}" for share, part in shares if share >= _LEAST_SHARE)
    note = f"other: {', '.join(small)}" if small else ""
    curves = {part: Curve(at.tolist(), line.mean.tolist()) for part, line in lines.items()}
    return Drawing(figure, f"time of updates by part: {said}", note, curves)


# ---------------------------------------------------------------- where time and memory went


def where_time_went(story: RunData) -> Drawing | str:
    """The whole time in one bar, by kind of work."""
    parts, total = story.parts_s, story.total_s
    if not parts or total <= 0:
        return no_rows(story, "the run did not measure its time")
    spent = {kind: sum(parts.get(part, 0.0) for part in own) for kind, own in bottleneck.KINDS.items()}
    spent["not accounted for"] = max(0.0, total - sum(spent.values()))
    shown = {
        kind: seconds for kind, seconds in sorted(spent.items(), key=lambda each: -each[1]) if seconds >= 0.005 * total
    }
    figure = new_figure(SIZE[0], 1.3 + 0.2 * (len(shown) // 4))
    axes = figure.subplots()
    begin = 0.0
    for number, (kind, seconds) in enumerate(shown.items()):
        color = COLORS[number % 6] if kind != "not accounted for" else GRID
        share = seconds / total
        axes.barh(0, share, left=begin, color=color, label=f"{kind} {share:.0%}", edgecolor="white", linewidth=1.0)
        begin += share
    axes.set_xlim(0, max(begin, 1.0))
    axes.set_axis_off()
    figure.legend(loc="outside lower center", ncols=min(3, len(shown)), fontsize=10, handlelength=1.0)
    said = ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in shown.items())
    return Drawing(figure, f"{total:.1f} s: {said}")


_IN_SIGHT = 2.0  # as many times as high as the curve may a limit be that is drawn beside it
_STACK_POINTS = 160
_MOST_METRICS = 6
_LEAST_SHARE = 0.01
TIME = Kind("time", "Where the time went", where_time_went)
CHARTS: tuple[Kind, ...] = (
    Kind("loss", "Loss", loss),
    Kind("metrics", "Validation metrics", metrics),
    Kind("throughput", "Throughput", throughput),
    Kind("steps", "Time of an update by part", step_time),
    Kind("lr", "Learning rate", learning_rate),
    Kind("norm", "Gradient norm", gradient_norm),
    Kind("memory", "Memory", memory),
    Kind("ranks", "Balance of the ranks", ranks),
    Kind("pipeline", "Pipeline", pipeline, wide=True),
    Kind("machine", "Machine over time", machine, wide=True),
    Kind("gpus", "GPUs over time", gpus, wide=True),
)
