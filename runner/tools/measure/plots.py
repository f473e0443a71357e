"""Pictures of results: what steps took, where they were slow, and how many times as fast a technique is."""

from __future__ import annotations

import math
import statistics
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.base.errors import InputMissing
from runner.base.picture import COLORS, new_figure, png
from runner.base.text import shortened
from runner.durable import files
from runner.tools.measure.results import PICTURES, Results, session_baseline
from runner.tools.measure.statistics import CONFIDENCE, Ratio

if TYPE_CHECKING:
    from pathlib import Path

BASELINE = "baseline"
Height = Callable[["PlottedResults"], float]
Draw = Callable[[Any, "PlottedResults", str], None]


def draw(results: Results) -> list[Path]:
    """Draw the results into files beside them; return their paths.

    An earlier picture that can no longer be drawn is removed. Raises InputMissing where nothing was measured,
    and what Results raises.
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
    """Return the name of each picture -> its matplotlib Figure; raises as `draw` does."""
    columns = {name: column for name, column in results.columns().items() if column}
    if not columns:
        raise InputMissing(
            "there is no technique to draw", where=str(results.csv), fix="run them first: accel-run benchmark"
        )
    measured = PlottedResults(columns, results.facts()["techniques"], results.sessions())
    drawn = {
        "steps.png": steps(measured),
        "heatmap.png": heatmap(measured),
        "speedup.png": speedup(measured),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def png_of(figure: Any) -> bytes:
    """Return the PNG of a figure, also where its font lacks a letter of some name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        return png(figure)


@dataclass(frozen=True)
class PlottedResults:
    """What there is to draw.

    columns   technique -> milliseconds of its steps, at least one
    facts     technique -> what is known of it; not of each
    sessions  technique -> number of the session in which it was measured
    """

    columns: Mapping[str, Sequence[float]]
    facts: Mapping[str, Mapping[str, Any]]
    sessions: Mapping[str, int]

    def by_session(self) -> list[PlottedResults]:
        """Return what was measured in each session: times of different ones share no axes."""
        found = sorted({self.sessions[name] for name in self.columns})
        return [
            replace(self, columns={name: each for name, each in self.columns.items() if self.sessions[name] == session})
            for session in found
        ]

    @property
    def tasks(self) -> list[str]:
        """Return the tasks whose steps these are, as far as the results know them."""
        named = (self.facts.get(name, {}).get("task") for name in self.columns)
        return list(dict.fromkeys(task for task in named if isinstance(task, str) and task))

    @property
    def scale_ms(self) -> float:
        """Return where scales end: what is above is no longer a step but the compiler at work, or an accident."""
        return BEYOND * max(statistics.median_low(column) for column in self.columns.values())

    @property
    def is_wide(self) -> bool:
        """True where a linear scale would show the slowest technique only."""
        medians = [statistics.median_low(column) for column in self.columns.values()]
        return max(medians) > WIDE * statistics.median_low(medians)

    @property
    def beyond(self) -> list[tuple[str, int, float]]:
        """Return technique, number and milliseconds of the steps that no scale shows, the longest first."""
        limit = self.scale_ms
        found = [
            (name, number, value)
            for name, column in self.columns.items()
            for number, value in enumerate(column, 1)
            if value > limit
        ]
        return sorted(found, key=lambda each: -each[2])

    @property
    def left_out(self) -> str:
        """Return in words which steps no scale shows; empty where all are shown."""
        words = [
            f"{_name(_without_middle(name, _NAME_WIDTH))} step {number}: {_ms(value)} ms"
            for name, number, value in self.beyond
        ]
        return f"beyond the scale (compilation, or the machine was busy): {shortened(words)}" if words else ""

    @property
    def origin(self) -> str:
        """Return task, machines and days of what was measured, as far as they are known."""
        known = [self.facts[name] for name in self.columns if name in self.facts]
        machines = list(dict.fromkeys(filter(None, map(_machine, known))))
        days = sorted({str(each.get("date", ""))[: len("2026-01-31")] for each in known} - {""})
        several = "on different machines: " if len(machines) > 1 else ""
        parts = [
            f"task {', '.join(self.tasks)}" if self.tasks else "",
            several + shortened(machines, separator="; "),
            " to ".join(days[:1] + days[1:][-1:]),
        ]
        return ", ".join(_name(part) for part in parts if part)

    def ratio(self, name: str) -> Ratio | None:
        """Return how many times as fast a technique is as the baseline: of the paired blocks where they are known.

        Else of the medians, with an interval without ends; None where its session has no baseline.
        """
        told = self.facts.get(name, {}).get("ratio")
        if isinstance(told, Mapping):
            middle, low, high = (_positive(told.get(key)) for key in ("middle", "low", "high"))
            if middle is not None:
                return Ratio(middle, low or 0.0, high or math.inf, told.get("num") or 0)
        base = next((each for each in self.columns if self._is_baseline(each, self.sessions[name])), None)
        if base is None:
            return None
        middle = statistics.median(self.columns[base]) / statistics.median(self.columns[name])
        return Ratio(middle, 0.0, math.inf, 0)

    def _is_baseline(self, name: str, session: int) -> bool:
        return self.sessions[name] == session and name in (BASELINE, session_baseline(session))

    def ratios(self) -> dict[str, Ratio]:
        """Return technique -> its ratio to the baseline of its session, without baselines, the fastest first."""
        found = {name: self.ratio(name) for name in self.columns if not self._is_baseline(name, self.sessions[name])}
        known = {name: ratio for name, ratio in found.items() if ratio is not None}
        return dict(sorted(known.items(), key=lambda each: -each[1].middle))

    def is_wrong(self, name: str) -> bool:
        """Tell whether the technique is known to compute something else than the baseline."""
        return self.facts.get(name, {}).get("is_wrong") is True


# ---------------------------------------------------------------- pictures


def _by_session(measured: PlottedResults, height_of: Height, draw_in: Draw) -> Any:
    """Return a figure with a part for each session, each with its own axes: their times must not be compared."""
    parts = measured.by_session()
    heights = [height_of(part) for part in parts]
    figure = new_figure(11.0, sum(heights))
    if len(parts) == 1:
        draw_in(figure, measured, "")
        return figure
    for part, inner in zip(parts, figure.subfigures(len(parts), 1, height_ratios=heights), strict=True):
        draw_in(inner, part, f", session {part.sessions[next(iter(part.columns))]}")
    return figure


def steps(measured: PlottedResults) -> Any:
    """Return a line per technique, milliseconds over steps, up to where the scale ends."""
    return _by_session(
        measured,
        lambda part: max(5.0, 1.6 + 0.19 * sum(_lines(_label(name, part)) for name in part.columns)),
        _draw_steps,
    )


def _draw_steps(figure: Any, measured: PlottedResults, of_session: str) -> None:
    order = sorted(measured.columns, key=lambda name: -statistics.median(measured.columns[name]))
    limit = measured.scale_ms
    axes = figure.subplots()
    highest, drawn = 0.0, {}
    for number, name in enumerate(measured.columns):
        column = measured.columns[name]
        style = {"color": COLORS[number % _NUM_COLORS], "linestyle": _DASHES[number // _NUM_COLORS % len(_DASHES)]}
        mark = {"marker": "o", "markersize": 3} if len(column) <= _MARKED else {}
        (drawn[name],) = axes.plot(range(1, len(column) + 1), column, linewidth=1.4, zorder=3, **style, **mark)
        highest = max(highest, *(value for value in column if value <= limit))
    top = 1.08 * highest
    below: Counter[int] = Counter()  # marks of the same step are one below the other
    apart = min(0.03, 0.3 / (len(drawn) + 1)) * top
    for name, step, _ in measured.beyond:
        axes.plot(step, top - apart * below[step], "^", color=drawn[name].get_color(), clip_on=False, zorder=4)
        below[step] += 1
    if measured.is_wide:
        axes.set_yscale("log")
        axes.set_ylim(0.9 * min(map(min, measured.columns.values())), 1.15 * highest)
        _plain_numbers(axes.yaxis)
    else:
        axes.set_ylim(0, top)
    _dress(axes, "step", "time of a step (ms)")
    _count(axes)
    axes.margins(x=0.02)
    notes = [measured.origin, measured.left_out and f"▲ {measured.left_out}"]
    _title(figure, axes, f"Time of each step{of_session}", notes, 0.7)
    labels = [_label(name, measured) for name in order]
    figure.legend(
        [drawn[name] for name in order], labels, loc="outside right upper", frameon=False, fontsize=8,
        title="median of steps", title_fontsize=8, alignment="left",
    )  # fmt: skip


def heatmap(measured: PlottedResults) -> Any:
    """Return a row per technique and a cell per block of steps: the darker, the longer a step took."""
    return _by_session(
        measured, lambda part: 2.2 + 0.17 * sum(_lines(_wrapped(name)) + 1 for name in part.columns), _draw_heatmap
    )


def _draw_heatmap(figure: Any, measured: PlottedResults, of_session: str) -> None:
    num = max(map(len, measured.columns.values()))
    size = math.ceil(num / _BLOCKS)
    edges = [*range(0, num, size), num]
    rows = [
        [
            statistics.median_low(column[begin : begin + size]) if begin < len(column) else math.nan
            for begin in edges[:-1]
        ]
        for column in measured.columns.values()
    ]
    labels = [_wrapped(name) for name in measured.columns]
    axes = figure.subplots()
    axes.set_facecolor("#EDEDED")  # behind what has no cell
    axes.patch.set(hatch="////", edgecolor="0.75")
    shown = [value for row in rows for value in row if value <= measured.scale_ms]
    low, high = min(*shown, _LEAST_RANGE * max(shown)), max(shown)
    mesh = axes.pcolormesh(
        [edge + 0.5 for edge in edges], np.arange(len(rows) + 1) - 0.5, np.ma.masked_invalid(rows),
        cmap=HUE, norm=_norm(low, high, is_wide=measured.is_wide), edgecolor="white", linewidth=0.3,
    )  # fmt: skip
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    _count(axes)
    axes.set_xlabel("step" if size == 1 else f"step (a cell: the median of {size} steps)")
    is_cut = any(value > high for row in rows for value in row)
    bar = figure.colorbar(mesh, ax=axes, extend="max" if is_cut else "neither", pad=0.01)
    bar.set_label("time of a step (ms)")
    bar.outline.set_visible(False)
    if measured.is_wide:
        _plain_numbers(bar.ax.yaxis)
    is_ragged = any(math.isnan(value) for row in rows for value in row)
    notes = [measured.origin, measured.left_out if is_cut else "", "hatched: no such step" if is_ragged else ""]
    _title(figure, axes, f"Where steps were slow{of_session}", notes)


def speedup(measured: PlottedResults) -> Any | None:
    """Return a bar per technique, its length the ratio to the baseline, its whisker the interval; the fastest on top.

    None where nothing can be compared.
    """
    ratios = measured.ratios()
    if not ratios:
        return None
    bars = dict(sorted({**ratios, BASELINE: _OF_BASELINE}.items(), key=lambda each: -each[1].middle))
    kinds = {name: _kind(ratio) for name, ratio in bars.items()}
    labels = [_wrapped(name) for name in bars]
    figure = new_figure(10.0, 2.2 + 0.17 * sum(_lines(label) + 1 for label in labels))
    axes = figure.subplots()
    drawn: dict[str, Any] = {}
    for row, (name, ratio) in enumerate(bars.items()):
        hatch = "xx" if measured.is_wrong(name) else None
        (bar,) = axes.barh(
            row, ratio.middle, 0.7, color=_KINDS[kinds[name]], hatch=hatch, edgecolor="white", linewidth=0
        )
        drawn.setdefault(_WRONG if hatch else kinds[name], bar)
        _whisker(axes, row, ratio)
    texts = [_value(ratio) for name, ratio in bars.items()]
    _write_values(axes, dict(enumerate(texts)))
    _rows_of_bars(axes, labels, bars.values())
    has_interval = any(_has_interval(ratio) for ratio in ratios.values())
    interval = (
        f"whisker and brackets: {CONFIDENCE:.0%} interval of the ratio of blocks in turns" if has_interval else ""
    )
    bare = f"{_BARE}: too few rounds, or the medians alone" if not all(map(_has_interval, ratios.values())) else ""
    num = len(measured.by_session())
    several = f"{num} sessions: each technique against the baseline of its own session" if num > 1 else ""
    notes = [measured.origin, several, "; ".join(filter(None, (interval, bare)))]
    _title(figure, axes, "Times as fast as the baseline", notes)
    _legend_below(figure, {kind: drawn[kind] for kind in (*_KINDS, _WRONG) if kind in drawn})
    return figure


# ---------------------------------------------------------------- parts of pictures


def _title(figure: Any, axes: Any, title: str, notes: Sequence[str], room: float = 1.0) -> None:
    """Put the title above, and the notes below it in lines that fit in this share of the width."""
    width = int(room * figure.bbox.width / figure.dpi * _LETTERS_PER_INCH)
    lines = [line for note in notes if note for line in textwrap.wrap(note, width)]
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    axes.set_title("\n".join(lines), loc="left", fontsize=8, color="0.35")


def _dress(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, color="0.88", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _count(axes: Any) -> None:
    """Write whole numbers below the axis."""
    from matplotlib import ticker

    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def _norm(low: float, high: float, *, is_wide: bool) -> Any:
    """Return how times become colors: by their logarithm where one technique takes many times as long as others."""
    from matplotlib import colors

    return colors.LogNorm(low, high) if is_wide else colors.Normalize(low, high)


def _plain_numbers(axis: Any) -> None:
    """Write 200, 500 and 1000 at a logarithmic axis, and no powers."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(ticker.NullLocator())


def _rows_of_bars(axes: Any, labels: Sequence[str], ratios: Collection[Ratio]) -> None:
    """Scale and dress rows of ratios, the first on top; the axis ends where bars do, not where a wide interval may."""
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    longest = max(ratio.middle for ratio in ratios)
    reach = max([ratio.high for ratio in ratios if _has_interval(ratio)], default=longest)
    _dress(axes, "times as fast as the baseline", "")
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.05 * max(longest, min(reach, 1.5 * longest)))
    axes.axvline(1.0, color="0.25", linewidth=1.0, linestyle=(0, (4, 3)), zorder=4)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _whisker(axes: Any, row: float, ratio: Ratio) -> None:
    if _has_interval(ratio) and ratio is not _OF_BASELINE:
        center, half = (ratio.low + ratio.high) / 2, (ratio.high - ratio.low) / 2
        axes.errorbar(center, row, xerr=half, fmt="none", ecolor="#222222", capsize=3, elinewidth=1.3, zorder=5)


def _write_values(axes: Any, texts: Mapping[float, str]) -> None:
    """Write the values in a column beside the axes, where no whisker is."""
    for row, text in texts.items():
        axes.annotate(
            text, (1.0, row), xycoords=axes.get_yaxis_transform(), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=8, annotation_clip=False,
        )  # fmt: skip


def _legend_below(figure: Any, drawn: Mapping[str, Any]) -> None:
    columns = len(drawn) if len(drawn) <= _MOST_IN_A_LINE else 3
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def _label(name: str, measured: PlottedResults) -> str:
    """Return the words of the legend: the name, its median, and how many steps it has where others have more."""
    column = measured.columns[name]
    several = len(set(map(len, measured.columns.values()))) > 1
    words = f"{_ms(statistics.median(column))} ms" + (f", {len(column)} steps" if several else "")
    return f"{_wrapped(name)}\n  {words}" if len(name) + len(words) > _NAME_WIDTH else f"{_wrapped(name)}  {words}"


def _wrapped(name: str) -> str:
    """Return the name in lines that leave room for the picture."""
    return "\n".join(textwrap.wrap(_name(_without_middle(name, 2 * _NAME_WIDTH)), _NAME_WIDTH))


def _without_middle(name: str, most: int) -> str:
    """Return the name in at most so many letters: long ones often begin alike, and often end alike."""
    return name if len(name) <= most else f"{name[: most // 2 - 5]} ... {name[-(most // 2) :]}"


def _name(text: str) -> str:
    """Return the text as matplotlib shows it whole: "$" begins no formula, "_" hides no entry of a legend."""
    shown = text.replace("$", r"\$")
    return f"\N{HAIR SPACE}{shown}" if shown.startswith("_") else shown


def _lines(text: str) -> int:
    return text.count("\n") + 1


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _value(ratio: Ratio) -> str:
    if ratio is _OF_BASELINE:
        return f"{ratio.middle:.2f}"
    return (
        f"{ratio.middle:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        if _has_interval(ratio)
        else f"{ratio.middle:.2f} ({_BARE})"
    )


def _has_interval(ratio: Ratio) -> bool:
    return 0 < ratio.low <= ratio.high < math.inf


def _kind(ratio: Ratio) -> str:
    if ratio is _OF_BASELINE:
        return "baseline"
    return {"better": "faster", "worse": "slower"}.get(ratio.verdict, ratio.verdict) if _has_interval(ratio) else _BARE


def _positive(value: object) -> float | None:
    """Return a number above 0; None for all else that may be in a file."""
    return float(value) if isinstance(value, int | float) and 0 < value < math.inf else None


def _machine(facts: Mapping[str, Any]) -> str:
    """Return the device a technique ran on and the version of torch; empty where they are not known."""
    try:
        inventory = facts["hardware"]["inventory"]
        name = facts.get("device_name") or inventory["cpu"]["name"]
        return f"{name}, torch {inventory['torch_version']}"
    except (KeyError, TypeError):
        return ""


BEYOND = 2.0  # times the median of the slowest technique, that a step may take to be shown
WIDE = 4.0  # times as long as those in the middle, that a technique takes where scales are logarithmic
HUE = "Blues"
_OF_BASELINE = Ratio(1.0, 1.0, 1.0, 0)
_BARE = "no interval"
_KINDS = {
    "baseline": "#444444",
    "faster": COLORS[0],
    "slower": COLORS[1],
    "no clear change": "#999999",
    _BARE: "#CCCCCC",
}
_WRONG = "crossed: its numbers differ from the baseline's"
_NUM_COLORS = 7  # of COLORS; the grey one is too near to the black one for lines
_DASHES = ("-", "--", ":", "-.")
_MARKED = 60  # steps up to which each has a mark
_BLOCKS = 50  # cells of a row at most
_LEAST_RANGE = 0.9  # of the longest time: where the colors begin at the latest, so that noise is no contrast
_MOST_IN_A_LINE = 5  # entries of a legend
_NAME_WIDTH = 30  # letters
_LETTERS_PER_INCH = 13  # at 8 points
