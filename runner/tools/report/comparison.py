"""The page that compares several runs: key figures, overlaid curves, and different settings."""

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
from runner.tools.report.chart_parts import Chart, Drawing, MissingPart, bin_curve, smooth
from runner.tools.report.page import Page, PageHead, PageTable, Step
from runner.tools.report.page_tables import format_value
from runner.tools.report.run_data import Curve, RunData
from runner.tools.report.svg import page_style, render_svg


def make_comparison_page(runs: Sequence[RunData]) -> Page:
    """Make the page that compares runs, in the order of the command line."""
    labels = _make_labels(runs)
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
            f"They ran on different devices, so their speeds are not comparable: {', '.join(sorted(devices))}."
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


def _make_labels(runs: Sequence[RunData]) -> list[str]:
    """Return a label for each run: its name, or its path if the name is not unique."""
    names = [run.name for run in runs]
    return [run.display_path if names.count(run.name) > 1 else run.name for run in runs]


def _make_figures_table(runs: Sequence[RunData], labels: Sequence[str]) -> PageTable:
    """Return the table of key figures, a row per figure and a column per run; see `_transpose_if_wide`."""
    metrics = dict.fromkeys(name for run in runs for name in run.metrics)
    metric_rows: list[tuple[str, Callable[[RunData], str]]] = [
        (name, functools.partial(_format_metric_of, name)) for name in metrics
    ]
    rows = []
    for name, get_text in (*_RESULT_ROWS, *metric_rows, *_FIGURE_ROWS):
        texts = [get_text(run) for run in runs]
        if any(texts):
            rows.append((name, *(text or "-" for text in texts)))
    return _transpose_if_wide(PageTable("figures", "Figures", ("", *labels), rows))


def _make_differences_table(runs: Sequence[RunData], labels: Sequence[str]) -> PageTable:
    """Return the table of settings that differ between the runs, without the name of the run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = []
    for key in keys:
        values = [format_value(run.settings[key]) if key in run.settings else "not there" for run in runs]
        if len(set(values)) > 1 and key not in ("run", "output_root", "resume"):
            rows.append((key, *values))
    unknown = [label for label, run in zip(labels, runs, strict=True) if not run.settings]
    note = f"the configuration of {', '.join(unknown)} is unknown" if unknown else ""
    note = note or ("" if rows else "the settings are the same")
    title, some = "Different settings", rows or [("-",) * (len(labels) + 1)]
    return _transpose_if_wide(PageTable("differences", title, ("key", *labels), some, note))


def _transpose_if_wide(table: PageTable) -> PageTable:
    """Return the table with a row per run if there are more runs than columns fit on a screen."""
    if len(table.head) - 1 <= _MAX_COLUMNS:
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
            name = f"chart{number}"
            charts.append(
                Chart(
                    name,
                    title,
                    drawing.description,
                    render_svg(drawing, name, title),
                    drawing.note,
                    wide=False,
                )
            )
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
        f"{what}: {abbreviate(names, _MAX_LISTED)}" if names else ""
        for what, names in ((NOT_MEASURED, without), ("not finite at the end", unfinished))
    ]
    return Drawing(figure, "; ".join(descriptions), "; ".join(filter(None, notes)))


def _format_metric_of(name: str, run: RunData) -> str:
    if name not in run.metrics:
        return ""
    return format_metric(run.metrics[name], 5)


def _format_loss(run: RunData) -> str:
    value = run.curves.last("train/loss")
    return "" if value is None else f"{value:.5g}"


def _format_throughput(run: RunData) -> str:
    return "" if run.throughput is None else f"{format_rate(run.throughput)} {run.item}s/s"


def _format_update_time(run: RunData) -> str:
    evidence = run.evidence
    if evidence is None or evidence.step_time_ms is None:
        return ""
    low, high = evidence.step_time_low_ms, evidence.step_time_high_ms
    return f"{evidence.step_time_ms:.4g} ms" + (
        f" ({low:.4g} to {high:.4g})" if low is not None and high is not None else ""
    )


def _format_peak_memory(run: RunData) -> str:
    evidence = run.evidence
    value = (
        None
        if evidence is None
        else evidence.device_peak_gib
        if evidence.device_peak_gib is not None
        else evidence.host_peak_gib
    )
    return "" if value is None else format_gib(value)


def _format_checkpoints(run: RunData) -> str:
    checkpoints = run.checkpoints
    return (
        f"{len(checkpoints)}, {format_bytes(sum(checkpoint.bytes for checkpoint in checkpoints))}"
        if checkpoints
        else ""
    )


def _format_updates(run: RunData) -> str:
    last_updates: Iterable[int] = (end for _, end in run.curves.phases.values())
    return f"{max(last_updates):,}" if run.curves.phases else ""


# results; the metrics follow
_RESULT_ROWS: tuple[tuple[str, Callable[[RunData], str]], ...] = (
    ("state", lambda run: run.state.word),
    ("training loss", _format_loss),
)
_FIGURE_ROWS: tuple[tuple[str, Callable[[RunData], str]], ...] = (
    ("task", lambda run: run.task),
    ("device", lambda run: run.plan.device_name),
    ("updates", _format_updates),
    ("time", lambda run: format_duration(run.total_s) if run.total_s else ""),
    ("throughput", _format_throughput),
    ("update time (80% of rows)", _format_update_time),
    ("peak memory", _format_peak_memory),
    ("checkpoints", _format_checkpoints),
)
# key of metrics.jsonl, axis label, title, and whether its rows are noisy
_CURVE_CHARTS = (
    ("train/loss", "loss", "Training loss", True),
    ("perf/items_per_s", "items/s", "Throughput", True),
    ("lr", "learning rate", "Learning rate", False),
    ("train/grad_norm", "gradient norm", "Gradient norm", True),
)
_MAX_METRICS, _MAX_MARKED_POINTS = 6, 60
_MAX_COLUMNS, _MAX_NAMED_LINES, _MAX_LISTED = 5, 6, 8
_LEGEND_LETTERS = 84  # that fit into one line below a chart
_LINE_STYLES = ("-", "--", ":", "-.", (0, (1, 3)), (0, (6, 2, 1, 2, 1, 2)))
