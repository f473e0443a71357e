"""The page that compares several runs: key figures, overlaid curves, and different settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from runner.base.picture import COLORS, new_figure
from runner.base.text import NOT_MEASURED, abbreviate, format_metric
from runner.tools.report.chart_parts import Chart, Drawing, MissingPart, bin_curve, label_axes, smooth
from runner.tools.report.comparison_noise import describe_noise
from runner.tools.report.page import Page, PageHead, PageTable, Step
from runner.tools.report.page_tables import format_value
from runner.tools.report.page_tiles import make_tiles
from runner.tools.report.run_data import Curve, RunData
from runner.tools.report.svg import make_chart, page_style


def make_comparison_page(runs: Sequence[RunData]) -> Page:
    """Make the page that compares runs, in the order of the command line."""
    names = [run.name for run in runs]
    labels = [run.display_path if names.count(run.name) > 1 else run.name for run in runs]
    charts, missing = _draw_charts(runs, labels)
    missing += [
        MissingPart(f"{label}: {subject}", why)
        for label, run in zip(labels, runs, strict=True)
        for subject, why in run.missing.items()
    ]
    differ = _make_differences_table(runs, labels)
    problems = [
        f"{label} is not finished: {run.state.sentence}."
        for label, run in zip(labels, runs, strict=True)
        if run.state.word not in ("finished", "unknown")
    ]
    devices = {name for run in runs if (name := run.plan.device_name)}
    if len(devices) > 1:
        problems.append(
            f"The runs used different devices, so their speeds are not comparable: {', '.join(sorted(devices))}."
        )
    return Page(
        head=PageHead(
            name=f"Comparison of {len(runs)} runs",
            title=f"{abbreviate(labels)} · accel-run report",
            lines=[abbreviate(labels, _MAX_LISTED, " · ")],
        ),
        problems=problems,
        first=[_make_figures_table(runs, labels), differ],
        charts=charts,
        repeat=[
            Step(label, run.record.origin.command)
            for label, run in zip(labels, runs, strict=True)
            if run.record.origin.command
        ],
        missing=missing,
    )


def _make_figures_table(runs: Sequence[RunData], labels: Sequence[str]) -> PageTable:
    figures = [
        {"state": run.state.word, "task": run.task, "device": run.plan.device_name}
        | {tile.label: tile.value for tile in make_tiles(run)}
        | {name: format_metric(value, 5) for name, value in run.metrics.items()}
        for run in runs
    ]
    names = dict.fromkeys(name for of_run in figures for name, text in of_run.items() if text)
    rows = [(name, *(of_run.get(name) or "-" for of_run in figures)) for name in names]
    return _transpose_if_wide(PageTable("figures", "Figures", ("", *labels), rows, describe_noise(runs, labels)))


def _make_differences_table(runs: Sequence[RunData], labels: Sequence[str]) -> PageTable:
    """Return the table of settings that differ between the runs, without the name of the run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = []
    for key in keys:
        values = [format_value(run.settings[key]) if key in run.settings else "absent" for run in runs]
        if len(set(values)) > 1 and key not in ("run", "output_root", "resume"):
            rows.append((key, *values))
    unknown = [label for label, run in zip(labels, runs, strict=True) if not run.settings]
    note = f"the configuration of {', '.join(unknown)} is unknown" if unknown else ""
    note = note or ("" if rows else "the settings are the same")
    return _transpose_if_wide(PageTable("differences", "Different settings", ("key", *labels), rows, note))


def _transpose_if_wide(table: PageTable) -> PageTable:
    """Return the table with a row per run if there are more runs than columns that fit on a screen."""
    if len(table.head) - 1 <= _MAX_COLUMNS or not table.rows:
        return table
    head, *rows = zip(table.head, *table.rows, strict=True)
    return replace(table, head=("run", *head[1:]), rows=rows)


def _draw_charts(runs: Sequence[RunData], labels: Sequence[str]) -> tuple[list[Chart], list[MissingPart]]:
    names = dict.fromkeys(name for run in runs for name in run.curves.of if name.startswith("val/"))
    rows = [
        *_CURVE_CHARTS,
        *(
            (name, name.removeprefix("val/"), f"Validation: {name.removeprefix('val/')}", False)
            for name in list(names)[:_MAX_METRICS]
        ),
    ]
    charts: list[Chart] = []
    missing: list[MissingPart] = []
    with page_style():
        for number, (key, axis, title, is_noisy) in enumerate(rows):
            curves = {label: run.curves[key] for label, run in zip(labels, runs, strict=True)}
            is_named = not charts or len(labels) <= _MAX_NAMED_LINES
            drawing = _draw_overlay(curves, axis, is_noisy=is_noisy, is_named=is_named)
            if drawing is None:
                missing.append(MissingPart(title, f"no run has {key}"))
                continue
            charts.append(make_chart(drawing, f"chart{number}", title))
    return charts, missing


def _draw_overlay(curves: dict[str, Curve], axis: str, *, is_noisy: bool, is_named: bool) -> Drawing | None:
    """Draw a line for each run that has the metric; None if no run has it.

    is_named  add a legend; with many runs, only the first chart has one
    """
    known = {label: curve for label, curve in curves.items() if any(map(math.isfinite, curve.y))}
    columns = max(1, min(3, _LEGEND_LETTERS // (max(map(len, curves)) + 6)))
    points = 320 if len(curves) <= _MAX_NAMED_LINES else 120
    if not known:
        return None
    lines = -(-len(curves) // columns) if is_named else 0
    figure = new_figure(6.2, 3.1 + 0.17 * lines)
    axes = figure.subplots()
    descriptions, unfinished = [], []
    for number, (label, curve) in enumerate(curves.items()):
        if label not in known:
            continue
        style = {"color": COLORS[number % 6], "linestyle": _LINE_STYLES[number // 6 % len(_LINE_STYLES)]}
        if is_noisy and len(curves) <= _MAX_NAMED_LINES:
            raw = bin_curve(curve)
            axes.plot(raw.x, raw.mean, linewidth=0.7, alpha=0.3, **style)
        line = bin_curve(smooth(curve) if is_noisy else curve, points)
        mark = {"marker": "o", "markersize": 3} if len(curve) <= (1 if is_noisy else _MAX_MARKED_POINTS) else {}
        axes.plot(line.x, line.mean, linewidth=1.7, label=label, **style, **mark)
        descriptions.append(f"{label} ends at {curve.y[-1]:.4g}")
        if not math.isfinite(curve.y[-1]):
            unfinished.append(label)
    label_axes(axes, "update", axis)
    if is_named:
        figure.legend(loc="outside lower center", ncols=columns, fontsize=9, handlelength=2.6)
    without = [label for label in curves if label not in known]
    notes = ["" if is_named else "the lines are named in the first chart"]
    notes += [
        f"{what}: {abbreviate(names, _MAX_LISTED)}" if names else ""
        for what, names in ((NOT_MEASURED, without), ("not finite at the end", unfinished))
    ]
    return Drawing(figure, "; ".join(descriptions), "; ".join(filter(None, notes)))


# key of metrics.jsonl, axis label, title, and whether its rows are noisy
_CURVE_CHARTS = (
    ("train/loss", "loss", "Training loss", True),
    ("perf/items_per_s", "items/s", "Throughput", True),
    ("lr", "learning rate", "Learning rate", False),
    ("train/grad_norm", "gradient norm", "Gradient norm", True),
)
_MAX_METRICS, _MAX_MARKED_POINTS = 6, 60
_MAX_COLUMNS, _MAX_NAMED_LINES, _MAX_LISTED = 5, 6, 8
_LEGEND_LETTERS = 84  # number of letters that fit into one line below a chart
_LINE_STYLES = ("-", "--", ":", "-.", (0, (1, 3)), (0, (6, 2, 1, 2, 1, 2)))
