"""Several runs on one page: their figures in a table, their curves over each other, and what they differ in."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from runner.base.picture import COLORS, new_figure
from runner.base.text import (
    NOT_MEASURED,
    abbreviate,
    format_bytes,
    format_duration,
    format_gib,
    format_metric,
    format_rate,
)
from runner.tools.report.chart_parts import Chart, Drawing, Missing, binned, smoothed
from runner.tools.report.page import Page, PageHead, PageTable, Step
from runner.tools.report.page_tables import word_of
from runner.tools.report.run_data import Curve, RunData
from runner.tools.report.svg import as_svg, drawing


def comparison_of(stories: Sequence[RunData]) -> Page:
    """Return the page about several runs, in the order in which they were named."""
    labels = _labels(stories)
    charts, missing = _charts(stories, labels)
    missing += [
        Missing(f"{label}: {subject}", why)
        for label, story in zip(labels, stories, strict=True)
        for subject, why in story.missing.items()
    ]
    differ = _differences(stories, labels)
    problems = [
        f"{label} is not finished: {story.standing.sentence}."
        for label, story in zip(labels, stories, strict=True)
        if story.standing.word not in ("finished", "unknown")
    ]
    devices = {name for story in stories if (name := story.plan.device_name)}
    if len(devices) > 1:
        problems.append(
            f"They ran on different devices, so their speeds are not comparable: {', '.join(sorted(devices))}."
        )
    return Page(
        head=PageHead(
            name=f"Comparison of {len(stories)} runs",
            title=f"{abbreviate(labels)} · accel-run report",
            lines=[abbreviate(labels, _NAMED, " · ")],
        ),
        problems=problems,
        first=[_figures(stories, labels), differ],
        charts=charts,
        repeat=[
            Step(label, story.record.origin.command)
            for label, story in zip(labels, stories, strict=True)
            if story.record.origin.command
        ],
        missing=missing,
    )


def _labels(stories: Sequence[RunData]) -> list[str]:
    """Return a name for each: that of the run, or its path where two have the same."""
    names = [story.name for story in stories]
    return [story.shown if names.count(story.name) > 1 else story.name for story in stories]


def _figures(stories: Sequence[RunData], labels: Sequence[str]) -> PageTable:
    """Return a row per figure and a column per run, or the other way round; see `_beside`."""
    metrics = dict.fromkeys(name for story in stories for name in story.metrics)
    reached: list[tuple[str, Callable[[RunData], str]]] = [(name, functools.partial(_metric, name)) for name in metrics]
    rows = []
    for name, tell in (*_RESULTS, *reached, *_FIGURES):
        told = [tell(story) for story in stories]
        if any(told):
            rows.append((name, *(words or "-" for words in told)))
    return _beside(PageTable("figures", "Figures", ("", *labels), rows))


def _differences(stories: Sequence[RunData], labels: Sequence[str]) -> PageTable:
    """Return the settings that are not the same in all runs; the name of the run is none."""
    keys = dict.fromkeys(key for story in stories for key in story.settings.used)
    rows = []
    for key in keys:
        words = [word_of(story.settings.used[key]) if key in story.settings.used else "not there" for story in stories]
        if len(set(words)) > 1 and key not in ("run", "output_root", "resume"):
            rows.append((key, *words))
    unknown = [label for label, story in zip(labels, stories, strict=True) if not story.settings.used]
    note = f"the configuration of {', '.join(unknown)} is unknown" if unknown else ""
    note = note or ("" if rows else "the settings are the same")
    title, some = "Different settings", rows or [("-",) * (len(labels) + 1)]
    return _beside(PageTable("differences", title, ("key", *labels), some, note))


def _beside(table: PageTable) -> PageTable:
    """Return the table with a row per run if there are more runs than fit side by side on a screen."""
    if len(table.head) - 1 <= _SIDE_BY_SIDE:
        return table
    head, *rows = zip(table.head, *table.rows, strict=True)
    return replace(table, head=("run", *head[1:]), rows=rows)


def _charts(stories: Sequence[RunData], labels: Sequence[str]) -> tuple[list[Chart], list[Missing]]:
    names = dict.fromkeys(name for story in stories for name in story.curves.of if name.startswith("val/"))
    rows = [
        *_CURVES,
        *(
            (name, name.removeprefix("val/"), f"Validation: {name.removeprefix('val/')}", False)
            for name in list(names)[:_MOST]
        ),
    ]
    charts: list[Chart] = []
    missing: list[Missing] = []
    with drawing():
        for number, (key, axis, title, is_noisy) in enumerate(rows):
            curves = {label: story.curves[key] for label, story in zip(labels, stories, strict=True)}
            drawn = _overlaid(curves, axis, is_noisy=is_noisy, is_named=not charts or len(labels) <= _ALL_NAMED)
            if drawn is None:
                missing.append(Missing(title, f"no run has {key}"))
                continue
            name = f"chart{number}"
            charts.append(
                Chart(
                    name,
                    title,
                    drawn.described,
                    as_svg(drawn, name, title),
                    drawn.note,
                    wide=False,
                )
            )
    return charts, missing


def _overlaid(curves: dict[str, Curve], axis: str, *, is_noisy: bool, is_named: bool) -> Drawing | None:
    """Return a line for each run that has the figure; of many runs the first chart alone names the lines."""
    known = {label: curve for label, curve in curves.items() if any(map(math.isfinite, curve.y))}
    columns = max(1, min(3, _LEGEND_LETTERS // (max(map(len, curves)) + 6)))
    points = 320 if len(curves) <= _ALL_NAMED else 120
    if not known:
        return None
    lines = -(-len(curves) // columns) if is_named else 0
    figure = new_figure(6.2, 3.1 + 0.17 * lines)
    axes = figure.subplots()
    said, unfinished = [], []
    for number, (label, curve) in enumerate(curves.items()):
        if label not in known:
            continue
        style = {"color": COLORS[number % 6], "linestyle": _DASHES[number // 6 % len(_DASHES)]}
        if is_noisy and len(curves) <= _ALL_NAMED:
            raw = binned(curve)
            axes.plot(raw.x, raw.mean, linewidth=0.7, alpha=0.3, **style)
        line = binned(smoothed(curve) if is_noisy else curve, points)
        mark = {"marker": "o", "markersize": 3} if len(curve) <= (1 if is_noisy else _MARKED) else {}
        axes.plot(line.x, line.mean, linewidth=1.7, label=label, **style, **mark)
        said.append(f"{label} ends at {curve.y[-1]:.4g}")
        if not math.isfinite(curve.y[-1]):
            unfinished.append(label)
    axes.set_xlabel("update")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel(axis)
    axes.grid(visible=True)
    axes.set_axisbelow(True)
    if is_named:
        figure.legend(loc="outside lower center", ncols=columns, fontsize=9, handlelength=2.6)
    without = [label for label in curves if label not in known]
    notes = ["" if is_named else "the lines are named in the first chart"]
    notes += [
        f"{what}: {abbreviate(names, _NAMED)}" if names else ""
        for what, names in ((NOT_MEASURED, without), ("not finite at the end", unfinished))
    ]
    return Drawing(figure, "; ".join(said), "; ".join(filter(None, notes)))


def _metric(name: str, story: RunData) -> str:
    if name not in story.metrics:
        return ""
    return format_metric(story.metrics[name], 5)


def _loss(story: RunData) -> str:
    value = story.curves.last("train/loss")
    return "" if value is None else f"{value:.5g}"


def _speed(story: RunData) -> str:
    return "" if story.throughput is None else format_rate(story.throughput)


def _step(story: RunData) -> str:
    seen = story.evidence
    if seen is None or seen.step_time_ms is None:
        return ""
    low, high = seen.step_time_low_ms, seen.step_time_high_ms
    return f"{seen.step_time_ms:.4g} ms" + (
        f" ({low:.4g} to {high:.4g})" if low is not None and high is not None else ""
    )


def _peak(story: RunData) -> str:
    seen = story.evidence
    value = None if seen is None else seen.device_peak_gib if seen.device_peak_gib is not None else seen.host_peak_gib
    return "" if value is None else format_gib(value)


def _checkpoints(story: RunData) -> str:
    found = story.checkpoints
    return f"{len(found)}, {format_bytes(sum(each.bytes for each in found))}" if found else ""


def _updates(story: RunData) -> str:
    made: Iterable[int] = (end for _, end in story.curves.phases.values())
    return f"{max(made):,}" if story.curves.phases else ""


# what a run reached; its metrics follow
_RESULTS: tuple[tuple[str, Callable[[RunData], str]], ...] = (
    ("state", lambda story: story.standing.word),
    ("training loss", _loss),
)
_FIGURES: tuple[tuple[str, Callable[[RunData], str]], ...] = (
    ("task", lambda story: story.task),
    ("device", lambda story: story.plan.device_name),
    ("updates", _updates),
    ("time", lambda story: format_duration(story.total_s) if story.total_s else ""),
    ("items per second, first update excluded", _speed),
    ("update time (8 of 10 rows)", _step),
    ("peak memory", _peak),
    ("checkpoints", _checkpoints),
)
# key of metrics.jsonl, axis label, title, and whether its rows are noisy
_CURVES = (
    ("train/loss", "loss", "Training loss", True),
    ("perf/items_per_s", "items/s", "Throughput", True),
    ("lr", "learning rate", "Learning rate", False),
    ("train/grad_norm", "gradient norm", "Gradient norm", True),
)
_MOST, _MARKED = 6, 60
_SIDE_BY_SIDE, _ALL_NAMED, _NAMED = 5, 6, 8
_LEGEND_LETTERS = 84  # that have room beside each other below a chart
_DASHES = ("-", "--", ":", "-.", (0, (1, 3)), (0, (6, 2, 1, 2, 1, 2)))
