"""Plots of the ladder: step times, where steps were slow, and speedups."""

from __future__ import annotations

import math
import statistics
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from runner.base.errors import InputMissing
from runner.base.picture import COLORS, encode_png, new_figure
from runner.base.text import abbreviate
from runner.durable import files
from runner.tools.measure.results import PICTURES, LadderRow, Results, session_baseline
from runner.tools.measure.statistics import CONFIDENCE, Ratio
from runner.tools.measure.technique import BASELINE

Rows = Mapping[str, LadderRow]


def draw(results: Results) -> list[Path]:
    """Draw the results into files beside them; return their paths.

    An earlier plot that can no longer be drawn is removed. Raises InputMissing if there are no results.
    """
    found = {name: png_of(figure) for name, figure in figures(results).items()}
    for name in PICTURES:
        path = results.file(name)
        if name in found:
            files.atomic_write(path, found[name])
        elif files.exists(path):
            files.remove(path)
    return [results.file(name) for name in PICTURES if name in found]


def figures(results: Results) -> dict[str, Any]:
    """Return plot name -> matplotlib Figure; raises as `draw` does."""
    rows = results.rows()
    if not rows:
        fix = "run them first: accel-run benchmark"
        raise InputMissing("there is no technique to draw", where=str(results.csv), fix=fix)
    drawn = {
        "steps.png": _by_session(rows, _steps_height, _draw_steps),
        "heatmap.png": _by_session(rows, _heatmap_height, _draw_heatmap),
        "speedup.png": _speedup(rows),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def png_of(figure: Any) -> bytes:
    """Encode a figure as PNG, even if the font lacks a letter of a name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        return encode_png(figure)


# ---------------------------------------------------------------- data


def origin(rows: Rows) -> str:
    """Return task, machine and dates of the measurements."""
    tasks = dict.fromkeys(row.task for row in rows.values() if row.task)
    machines = list(dict.fromkeys(filter(None, map(_machine, rows.values()))))
    days = sorted({row.date[: len("2026-01-31")] for row in rows.values()} - {""})
    several = "on different machines: " if len(machines) > 1 else ""
    parts = [f"task {', '.join(tasks)}" if tasks else "", several + abbreviate(machines, separator="; ")]
    return ", ".join(_plain(part) for part in (*parts, " to ".join(days[:1] + days[1:][-1:])) if part)


def _machine(row: LadderRow) -> str:
    try:
        inventory = row.hardware["inventory"]
        return f"{row.usage.device_name or inventory['cpu']['name']}, torch {inventory['torch_version']}"
    except (KeyError, TypeError):
        return ""


def _limit_ms(rows: Rows) -> float:
    """Return the end of the scale: steps above it are compilation or an accident."""
    return BEYOND * max(statistics.median_low(row.updates_ms) for row in rows.values())


def _is_wide(rows: Rows) -> bool:
    """Return whether a linear scale would show only the slowest variant."""
    medians = [statistics.median_low(row.updates_ms) for row in rows.values()]
    return max(medians) > WIDE * statistics.median_low(medians)


def _beyond(rows: Rows) -> str:
    """Return a note with the steps above the scale."""
    limit = _limit_ms(rows)
    found = [(ms, name, at) for name, row in rows.items() for at, ms in enumerate(row.updates_ms, 1) if ms > limit]
    texts = [f"{_plain(_shortened(name))} step {at}: {_ms(ms)} ms" for ms, name, at in sorted(found, reverse=True)]
    return f"beyond the scale (compilation, or the machine was busy): {abbreviate(texts)}" if texts else ""


def ratios(rows: Rows) -> dict[str, Ratio]:
    """Return variant -> ratio to the baseline of its session; of the medians, without interval, if not measured."""
    baselines = {row.session: row for name, row in rows.items() if name in (BASELINE, session_baseline(row.session))}
    found: dict[str, Ratio] = {}
    for name, row in rows.items():
        base = baselines.get(row.session)
        if row is base:
            continue
        if row.outcome.ratio is not None and 0 < row.outcome.ratio.middle < math.inf:
            found[name] = row.outcome.ratio
        elif base is not None:
            found[name] = Ratio(statistics.median(base.updates_ms) / statistics.median(row.updates_ms))
    return found


# ---------------------------------------------------------------- plots


def _by_session(rows: Rows, height_of: Callable[[Rows], float], draw_in: Callable[[Any, Rows, str], None]) -> Any:
    """Return a figure with separate axes for each session: their times must not be compared."""
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
    return max(5.0, 1.6 + 0.19 * sum(_label(name, rows).count("\n") + 1 for name in rows))


def _draw_steps(figure: Any, rows: Rows, session: str) -> None:
    """Draw a line per variant, milliseconds over steps."""
    limit, axes, lines = _limit_ms(rows), figure.subplots(), {}
    for number, (name, row) in enumerate(rows.items()):
        column = row.updates_ms
        style = {"color": COLORS[number % _NUM_COLORS], "linestyle": _DASHES[number // _NUM_COLORS % len(_DASHES)]}
        mark = {"marker": "o", "markersize": 3} if len(column) <= _MARKED else {}
        (lines[name],) = axes.plot(range(1, len(column) + 1), column, linewidth=1.4, **style, **mark)
    shown = [ms for row in rows.values() for ms in row.updates_ms if ms <= limit]
    if _is_wide(rows):
        axes.set_yscale("log")
        axes.set_ylim(0.9 * min(shown), 1.15 * max(shown))
        _plain_numbers(axes.yaxis)
    else:
        axes.set_ylim(0, 1.08 * max(shown))
    axes.set(xlabel="step", ylabel="time of a step (ms)")
    axes.grid(visible=True, color="0.88", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    _whole_numbers(axes)
    _title(figure, axes, f"Time of each step{session}", (origin(rows), _beyond(rows)), 0.7)
    order = sorted(rows, key=lambda name: -statistics.median(rows[name].updates_ms))
    figure.legend(
        [lines[name] for name in order], [_label(name, rows) for name in order], loc="outside right upper",
        frameon=False, fontsize=8, title="median of steps", title_fontsize=8, alignment="left",
    )  # fmt: skip


def _heatmap_height(rows: Rows) -> float:
    return 2.2 + 0.17 * sum(_wrapped(name).count("\n") + 2 for name in rows)


def _draw_heatmap(figure: Any, rows: Rows, session: str) -> None:
    """Draw a row per variant and a rectangle per group of steps; darker is longer."""
    from matplotlib import colors

    num = max(len(row.updates_ms) for row in rows.values())
    size = math.ceil(num / _GROUPS)
    starts = range(0, num, size)
    grid = [
        [
            statistics.median_low(row.updates_ms[at : at + size]) if at < len(row.updates_ms) else math.nan
            for at in starts
        ]
        for row in rows.values()
    ]
    shown = [value for values in grid for value in values if value <= _limit_ms(rows)]
    low, high = min(*shown, _LEAST_RANGE * max(shown)), max(shown)
    is_cut = any(value > high for values in grid for value in values)
    is_ragged = any(math.isnan(value) for values in grid for value in values)
    norm = colors.LogNorm(low, high) if _is_wide(rows) else colors.Normalize(low, high)
    axes = figure.subplots()
    axes.patch.set(facecolor="#EDEDED", hatch="////", edgecolor="0.75")  # where there are no steps
    edges = [*(at + 0.5 for at in starts), num + 0.5]
    mesh = axes.pcolormesh(
        edges, np.arange(len(grid) + 1) - 0.5, np.ma.masked_invalid(grid), cmap=HUE, norm=norm, edgecolor="white",
        linewidth=0.3,
    )  # fmt: skip
    axes.set_yticks(range(len(rows)), [_wrapped(name) for name in rows], fontsize=9)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    _whole_numbers(axes)
    axes.set_xlabel("step" if size == 1 else f"step (the median of {size} steps)")
    bar = figure.colorbar(mesh, ax=axes, extend="max" if is_cut else "neither", pad=0.01, label="time of a step (ms)")
    bar.outline.set_visible(False)
    if _is_wide(rows):
        _plain_numbers(bar.ax.yaxis)
    notes = (origin(rows), _beyond(rows) if is_cut else "", "hatched: no such step" if is_ragged else "")
    _title(figure, axes, f"Where steps were slow{session}", notes)


def _speedup(rows: Rows) -> Any | None:
    """Draw a bar per variant with the interval of its ratio; the fastest on top. None if nothing can be compared."""
    from matplotlib.patches import Patch

    found = ratios(rows)
    if not found:
        return None
    bars = dict(sorted({**found, BASELINE: _OF_BASELINE}.items(), key=lambda each: -each[1].middle))
    labels = [_wrapped(name) for name in bars]
    figure = new_figure(10.0, 2.2 + 0.17 * sum(label.count("\n") + 2 for label in labels))
    axes = figure.subplots()
    kinds = {name: _kind(ratio) for name, ratio in bars.items()}
    wrong = {name for name, row in rows.items() if row.outcome.is_wrong and name in bars}
    for at, (name, ratio) in enumerate(bars.items()):
        hatch = "xx" if name in wrong else None
        axes.barh(at, ratio.middle, 0.7, color=_KINDS[kinds[name]], hatch=hatch, edgecolor="white", linewidth=0)
        if _has_interval(ratio):
            half = (ratio.high - ratio.low) / 2
            axes.errorbar(ratio.low + half, at, xerr=half, fmt="none", ecolor="#222222", capsize=3, elinewidth=1.3)
        axes.annotate(
            _value(ratio), (1.0, at), xycoords=axes.get_yaxis_transform(), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=8, annotation_clip=False,
        )  # fmt: skip
    longest = max(ratio.middle for ratio in bars.values())
    reach = max([ratio.high for ratio in bars.values() if _has_interval(ratio)], default=longest)
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set(ylim=(len(labels) - 0.4, -0.6), xlabel="times as fast as the baseline")
    axes.set_xlim(0, 1.05 * max(longest, min(reach, 1.5 * longest)))  # a wide interval does not shrink the bars
    axes.axvline(1.0, color="0.25", linewidth=1.0, linestyle=(0, (4, 3)))
    axes.grid(visible=True, axis="x", color="0.88", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    sessions = len({row.session for row in rows.values()})
    has_interval = any(_has_interval(ratio) for ratio in bars.values())
    notes = (
        origin(rows),
        f"{sessions} sessions: each technique against the baseline of the same session" if sessions > 1 else "",
        f"whisker and brackets: {CONFIDENCE:.0%} interval of the ratio of interleaved blocks" if has_interval else "",
        f"{_BARE}: too few rounds, or the medians alone" if _BARE in kinds.values() else "",
    )
    _title(figure, axes, "Times as fast as the baseline", notes)
    legend = {kind: Patch(color=color) for kind, color in _KINDS.items() if kind in kinds.values()}
    legend |= {_WRONG: Patch(facecolor="0.7", edgecolor="white", hatch="xx")} if wrong else {}
    columns = len(legend) if len(legend) <= _MOST_IN_A_LINE else 3
    figure.legend(
        list(legend.values()), list(legend), loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )
    return figure


# ---------------------------------------------------------------- parts


def _title(figure: Any, axes: Any, title: str, notes: Sequence[str], room: float = 1.0) -> None:
    """Set the title, and below it the notes, in lines that fit in this share of the width."""
    width = int(room * figure.bbox.width / figure.dpi * _LETTERS_PER_INCH)
    lines = [line for note in notes if note for line in textwrap.wrap(note, width)]
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    axes.set_title("\n".join(lines), loc="left", fontsize=8, color="0.35")


def _whole_numbers(axes: Any) -> None:
    from matplotlib import ticker

    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def _plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with 200, 500 and 1000, not with powers."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(ticker.NullLocator())


def _label(name: str, rows: Rows) -> str:
    """Return the label of the legend: name, median, and the number of steps if they differ."""
    column = rows[name].updates_ms
    several = len({len(row.updates_ms) for row in rows.values()}) > 1
    text = f"{_ms(statistics.median(column))} ms" + (f", {len(column)} steps" if several else "")
    return f"{_wrapped(name)}\n  {text}" if len(name) + len(text) > _NAME_WIDTH else f"{_wrapped(name)}  {text}"


def _wrapped(name: str) -> str:
    return "\n".join(textwrap.wrap(_plain(_shortened(name, 2 * _NAME_WIDTH)), _NAME_WIDTH))


def _shortened(name: str, most: int = 30) -> str:
    """Return the name without its middle: long names often begin alike, and often end alike."""
    return name if len(name) <= most else f"{name[: most // 2 - 5]} ... {name[-(most // 2) :]}"


def _plain(text: str) -> str:
    """Return the text such that matplotlib shows it literally: "$" starts a formula, "_" hides a legend entry."""
    shown = text.replace("$", r"\$")
    return f"\N{HAIR SPACE}{shown}" if shown.startswith("_") else shown


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _value(ratio: Ratio) -> str:
    if ratio is _OF_BASELINE:
        return f"{ratio.middle:.2f}"
    interval = f"[{ratio.low:.2f}, {ratio.high:.2f}]" if _has_interval(ratio) else f"({_BARE})"
    return f"{ratio.middle:.2f} {interval}"


def _has_interval(ratio: Ratio) -> bool:
    return ratio is not _OF_BASELINE and 0 < ratio.low <= ratio.high < math.inf


def _kind(ratio: Ratio) -> str:
    if ratio is _OF_BASELINE:
        return BASELINE
    return {"better": "faster", "worse": "slower"}.get(ratio.verdict, ratio.verdict) if _has_interval(ratio) else _BARE


BEYOND = 2.0  # times the median of the slowest variant: longer steps are not shown
WIDE = 4.0  # times the middle median that the slowest variant takes where scales are logarithmic
HUE = "Blues"
_OF_BASELINE = Ratio(1.0, 1.0, 1.0, 0)
_BARE = "no interval"
_KINDS = {
    BASELINE: "#444444", "faster": COLORS[0], "slower": COLORS[1], "no clear change": "#999999", _BARE: "#CCCCCC",
}  # fmt: skip
_WRONG = "crossed: its numbers differ from the baseline's"
_NUM_COLORS = 7  # of COLORS; the gray one is too close to black for lines
_DASHES = ("-", "--", ":", "-.")
_MARKED = 60  # steps up to which each has a marker
_GROUPS = 50  # of steps in a row, at most
_LEAST_RANGE = 0.9  # of the longest time: the start of the color scale at the latest, so that noise has no contrast
_MOST_IN_A_LINE = 5  # entries of a legend
_NAME_WIDTH = 30  # letters
_LETTERS_PER_INCH = 13  # at 8 points
