"""Plots of the results of the ladder suite: step times, a heat map of slow steps, and speedups."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colors, ticker
from matplotlib.patches import Patch

from runner.base.errors import InputMissing
from runner.base.picture import COLORS, encode_png, new_figure
from runner.base.text import abbreviate
from runner.durable import files
from runner.tools.measure.results import PICTURES, LadderRow, Results, session_baseline
from runner.tools.measure.statistics import CONFIDENCE, Ratio
from runner.tools.measure.technique import BASELINE

Rows = Mapping[str, LadderRow]


def draw_plots(results: Results, plotted: Results | None = None) -> list[Path]:
    """Write the plots of the results into their folder; return the paths.

    An earlier plot that can no longer be drawn is removed. Raises InputMissing if there are no results.

    plotted  determines folder and prefix of the plots; None: those of the results
    """
    plotted = plotted or results
    images = {name: encode_png(figure) for name, figure in make_figures(results).items()}
    for name in PICTURES:
        path = plotted.file(name)
        if name in images:
            files.atomic_write(path, images[name])
        elif files.exists(path):
            files.remove(path)
    return [plotted.file(name) for name in PICTURES if name in images]


def make_figures(results: Results) -> dict[str, Any]:
    """Return plot name -> matplotlib Figure. Raises InputMissing if there are no results."""
    rows = results.rows()
    if not rows:
        fix = "measure first, with accel-run benchmark"
        raise InputMissing("there are no results to plot", where=str(results.csv), fix=fix)
    rows = {name.replace("$", r"\$"): row for name, row in rows.items()}  # not a formula
    figures = {
        "steps.png": _draw_by_session(rows, _steps_height, _draw_steps),
        "heatmap.png": _draw_by_session(rows, _heatmap_height, _draw_heatmap),
        "speedup.png": _draw_speedup(rows),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


# ---------------------------------------------------------------- data


def describe_origin(rows: Rows) -> str:
    """Return task, machine and dates of the measurements."""
    tasks = dict.fromkeys(row.task for row in rows.values() if row.task)
    machines = list(dict.fromkeys(filter(None, map(_describe_machine, rows.values()))))
    days = sorted({row.date[: len("2026-01-31")] for row in rows.values()} - {""})
    several = "on different machines: " if len(machines) > 1 else ""
    parts = [f"task {', '.join(tasks)}" if tasks else "", several + abbreviate(machines, separator="; ")]
    return ", ".join(part for part in (*parts, " to ".join(days[:1] + days[1:][-1:])) if part).replace("$", r"\$")


def _describe_machine(row: LadderRow) -> str:
    try:
        inventory = row.hardware["inventory"]
        return f"{row.usage.device_name or inventory['cpu']['name']}, torch {inventory['torch_version']}"
    except (KeyError, TypeError):
        return ""


def _limit_ms(rows: Rows) -> float:
    """Return the upper limit of the time axis; longer steps are outliers, such as those that compile."""
    return SCALE_LIMIT * max(statistics.median_low(row.updates_ms) for row in rows.values())


def _is_wide(rows: Rows) -> bool:
    """Return True if only the slowest variant would be visible on a linear scale."""
    medians = [statistics.median_low(row.updates_ms) for row in rows.values()]
    return max(medians) > LOG_SCALE_RATIO * statistics.median_low(medians)


def _describe_outliers(rows: Rows) -> str:
    """Return a note that lists the steps above the limit of the time axis."""
    limit = _limit_ms(rows)
    outliers = [
        (ms, name, step) for name, row in rows.items() for step, ms in enumerate(row.updates_ms, 1) if ms > limit
    ]
    texts = [f"{name} step {step}: {_format_ms(ms)} ms" for ms, name, step in sorted(outliers, reverse=True)]
    return f"off scale (compilation, or the machine was busy): {abbreviate(texts)}" if texts else ""


def compute_ratios(rows: Rows) -> dict[str, Ratio]:
    """Return variant -> speedup relative to the baseline of its session.

    Without a measured ratio, it is the ratio of the median step times.
    """
    baselines = {row.session: row for name, row in rows.items() if name in (BASELINE, session_baseline(row.session))}
    ratios: dict[str, Ratio] = {}
    for name, row in rows.items():
        base = baselines.get(row.session)
        if row is base:
            continue
        if row.outcome.ratio is not None and 0 < row.outcome.ratio.middle < math.inf:
            ratios[name] = row.outcome.ratio
        elif base is not None:
            ratios[name] = Ratio(statistics.median(base.updates_ms) / statistics.median(row.updates_ms))
    return ratios


# ---------------------------------------------------------------- plots


def _draw_by_session(rows: Rows, height_of: Callable[[Rows], float], draw_in: Callable[[Any, Rows, str], None]) -> Any:
    """Return a figure with separate axes for each session, because their times must not be compared."""
    ordered = sorted(rows, key=lambda name: rows[name].session)
    parts = {
        session: {name: rows[name] for name in names}
        for session, names in groupby(ordered, lambda name: rows[name].session)
    }
    heights = [height_of(part) for part in parts.values()]
    figure = new_figure(11.0, sum(heights))
    inner = [figure] if len(parts) == 1 else figure.subfigures(len(parts), 1, height_ratios=heights)
    for (session, part), place in zip(parts.items(), inner, strict=True):
        draw_in(place, part, f", session {session}" if len(parts) > 1 else "")
    return figure


def _steps_height(rows: Rows) -> float:
    return max(5.0, 1.6 + 0.19 * sum(_format_label(name, rows).count("\n") + 1 for name in rows))


def _draw_steps(figure: Any, rows: Rows, session: str) -> None:
    limit, axes, lines = _limit_ms(rows), figure.subplots(), {}
    for number, (name, row) in enumerate(rows.items()):
        column = row.updates_ms
        style = {
            "color": COLORS[number % _NUM_COLORS],
            "linestyle": _LINE_STYLES[number // _NUM_COLORS % len(_LINE_STYLES)],
        }
        marker = {"marker": "o", "markersize": 3} if len(column) <= _MAX_MARKED_STEPS else {}
        (lines[name],) = axes.plot(range(1, len(column) + 1), column, linewidth=1.4, **style, **marker)
    shown = [ms for row in rows.values() for ms in row.updates_ms if ms <= limit]
    if _is_wide(rows):
        axes.set_yscale("log")
        axes.set_ylim(0.9 * min(shown), 1.15 * max(shown))
        _use_plain_numbers(axes.yaxis)
    else:
        axes.set_ylim(0, 1.08 * max(shown))
    axes.set(xlabel="step", ylabel="time of a step (ms)")
    axes.grid(visible=True, color="0.88", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    _use_integer_ticks(axes)
    _set_title(figure, axes, f"Time of each step{session}", (describe_origin(rows), _describe_outliers(rows)), 0.7)
    order = sorted(rows, key=lambda name: -statistics.median(rows[name].updates_ms))
    figure.legend(
        [lines[name] for name in order], [_format_label(name, rows) for name in order], loc="outside right upper",
        frameon=False, fontsize=8, title="median of steps", title_fontsize=8, alignment="left",
    )  # fmt: skip


def _heatmap_height(rows: Rows) -> float:
    return 2.2 + 0.34 * len(rows)


def _draw_heatmap(figure: Any, rows: Rows, session: str) -> None:
    """Draw one row per variant and one cell per group of consecutive steps; darker is slower."""
    num = max(len(row.updates_ms) for row in rows.values())
    size = math.ceil(num / _MAX_GROUPS)
    starts = range(0, num, size)
    grid = [
        [
            statistics.median_low(row.updates_ms[at : at + size]) if at < len(row.updates_ms) else math.nan
            for at in starts
        ]
        for row in rows.values()
    ]
    shown = [value for values in grid for value in values if value <= _limit_ms(rows)]
    low, high = min(*shown, _MIN_COLOR_RANGE * max(shown)), max(shown)
    is_cut = any(value > high for values in grid for value in values)
    is_ragged = any(math.isnan(value) for values in grid for value in values)
    norm = colors.LogNorm(low, high) if _is_wide(rows) else colors.Normalize(low, high)
    axes = figure.subplots()
    axes.patch.set(facecolor="#EDEDED", hatch="////", edgecolor="0.75")  # background of missing steps
    edges = [*(at + 0.5 for at in starts), num + 0.5]
    mesh = axes.pcolormesh(
        edges, np.arange(len(grid) + 1) - 0.5, np.ma.masked_invalid(grid), cmap=COLOR_MAP, norm=norm, edgecolor="white",
        linewidth=0.3,
    )  # fmt: skip
    axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    _use_integer_ticks(axes)
    axes.set_xlabel("step" if size == 1 else f"step (the median of {size} steps)")
    bar = figure.colorbar(mesh, ax=axes, extend="max" if is_cut else "neither", pad=0.01, label="time of a step (ms)")
    bar.outline.set_visible(False)
    if _is_wide(rows):
        _use_plain_numbers(bar.ax.yaxis)
    notes = (
        describe_origin(rows),
        _describe_outliers(rows) if is_cut else "",
        "hatched: not measured" if is_ragged else "",
    )
    _set_title(figure, axes, f"Where steps were slow{session}", notes)


def _draw_speedup(rows: Rows) -> Any | None:
    """Draw one bar per variant with its confidence interval, fastest first; None if no variant has a ratio."""
    ratios = compute_ratios(rows)
    if not ratios:
        return None
    bars = dict(sorted({**ratios, BASELINE: _BASELINE_RATIO}.items(), key=lambda item: -item[1].middle))
    figure = new_figure(10.0, 2.2 + 0.34 * len(bars))
    axes = figure.subplots()
    kinds = {name: _classify(ratio) for name, ratio in bars.items()}
    wrong = {name for name, row in rows.items() if row.outcome.is_wrong and name in bars}
    for at, (name, ratio) in enumerate(bars.items()):
        hatch = "xx" if name in wrong else None
        axes.barh(
            at, ratio.middle, 0.7, color=_COLORS_BY_CLASS[kinds[name]], hatch=hatch, edgecolor="white", linewidth=0
        )
        if _has_interval(ratio):
            half = (ratio.high - ratio.low) / 2
            axes.errorbar(ratio.low + half, at, xerr=half, fmt="none", ecolor="#222222", capsize=3, elinewidth=1.3)
        axes.annotate(
            _format_ratio(ratio), (1.0, at), xycoords=axes.get_yaxis_transform(), xytext=(6, 0),
            textcoords="offset points", va="center", fontsize=8, annotation_clip=False,
        )  # fmt: skip
    longest = max(ratio.middle for ratio in bars.values())
    highest = max([ratio.high for ratio in bars.values() if _has_interval(ratio)], default=longest)
    axes.set_yticks(range(len(bars)), list(bars), fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set(ylim=(len(bars) - 0.4, -0.6), xlabel="times as fast as the baseline")
    axes.set_xlim(0, 1.05 * max(longest, min(highest, 1.5 * longest)))  # a wide interval must not shrink the bars
    axes.axvline(1.0, color="0.25", linewidth=1.0, linestyle=(0, (4, 3)))
    axes.grid(visible=True, axis="x", color="0.88", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    sessions = len({row.session for row in rows.values()})
    has_interval = any(_has_interval(ratio) for ratio in bars.values())
    notes = (
        describe_origin(rows),
        f"{sessions} sessions: each technique against the baseline of the same session" if sessions > 1 else "",
        f"error bar and brackets: {CONFIDENCE:.0%} interval of the ratio of interleaved blocks" if has_interval else "",
    )
    _set_title(figure, axes, "Times as fast as the baseline", notes)
    legend = {kind: Patch(color=color) for kind, color in _COLORS_BY_CLASS.items() if kind in kinds.values()}
    legend |= {_WRONG_LABEL: Patch(facecolor="0.7", edgecolor="white", hatch="xx")} if wrong else {}
    columns = len(legend) if len(legend) <= _MAX_LEGEND_COLUMNS else 3
    figure.legend(
        list(legend.values()), list(legend), loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )
    return figure


# ---------------------------------------------------------------- parts


def _set_title(figure: Any, axes: Any, title: str, notes: Sequence[str], room: float = 1.0) -> None:
    """Set the title and the notes below it.

    room  fraction of the figure's width to which the notes are wrapped
    """
    width = int(room * figure.bbox.width / figure.dpi * _LETTERS_PER_INCH)
    lines = [line for note in notes if note for line in textwrap.wrap(note, width)]
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    axes.set_title("\n".join(lines), loc="left", fontsize=8, color="0.35")


def _use_integer_ticks(axes: Any) -> None:
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def _use_plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers such as 200, 500 and 1000."""
    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(ticker.NullLocator())


def _format_label(name: str, rows: Rows) -> str:
    """Return the label for the legend: name, median, and the number of steps if it differs between variants."""
    column = rows[name].updates_ms
    several = len({len(row.updates_ms) for row in rows.values()}) > 1
    text = f"{_format_ms(statistics.median(column))} ms" + (f", {len(column)} steps" if several else "")
    return f"{name}\n  {text}" if len(name) + len(text) > _MAX_LABEL_LETTERS else f"{name}  {text}"


def _format_ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _format_ratio(ratio: Ratio) -> str:
    if ratio is _BASELINE_RATIO:
        return f"{ratio.middle:.2f}"
    interval = f"[{ratio.low:.2f}, {ratio.high:.2f}]" if _has_interval(ratio) else "(no interval)"
    return f"{ratio.middle:.2f} {interval}"


def _has_interval(ratio: Ratio) -> bool:
    return ratio is not _BASELINE_RATIO and 0 < ratio.low <= ratio.high < math.inf


def _classify(ratio: Ratio) -> str:
    if ratio is _BASELINE_RATIO:
        return BASELINE
    return {"better": "faster", "worse": "slower"}.get(ratio.verdict, ratio.verdict)


SCALE_LIMIT = 2.0  # upper limit of the time axis, as a multiple of the slowest variant's median
LOG_SCALE_RATIO = 4.0  # use a log scale if the slowest variant exceeds this multiple of the median one
COLOR_MAP = "Blues"
_BASELINE_RATIO = Ratio(1.0, 1.0, 1.0, 0)
_COLORS_BY_CLASS = {
    BASELINE: "#444444", "faster": COLORS[0], "slower": COLORS[1], "no clear change": "#999999",
}  # fmt: skip
_WRONG_LABEL = "cross-hatched: its numerical results differ from the baseline's"
_NUM_COLORS = 7  # colors of COLORS used for lines; gray is too similar to black
_LINE_STYLES = ("-", "--", ":", "-.")
_MAX_MARKED_STEPS = 60  # lines with more steps have no markers
_MAX_GROUPS = 50  # maximum number of cells in a row of the heat map
_MIN_COLOR_RANGE = 0.9  # upper limit of lowest / highest value of the color scale, so that noise has low contrast
_MAX_LEGEND_COLUMNS = 5
_MAX_LABEL_LETTERS = 30  # maximum number of letters in one line of the legend
_LETTERS_PER_INCH = 13  # in text of 8 points
