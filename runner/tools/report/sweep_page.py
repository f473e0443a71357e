"""The page about a sweep or a search: the table of its trials, their results, and a comparison of the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from runner.base.picture import COLORS, new_figure
from runner.base.text import abbreviate
from runner.durable.directory import RunDirectory
from runner.records.sweep_record import Goal
from runner.sweeps.trials import (
    Result,
    Sweep,
    combination_rows,
    combine_repetitions,
    count_states,
    find_best,
    format_best,
    trial_rows,
)
from runner.tools.report.chart_parts import Chart, Drawing, MissingPart, label_axes
from runner.tools.report.comparison import make_comparison_page
from runner.tools.report.page import Page, PageHead, PageTable, Step
from runner.tools.report.run_data import make_printable, read_run_data
from runner.tools.report.svg import make_chart, page_style


def make_sweep_page(sweep: Sweep) -> Page:
    """Make the page about a sweep or a search from the current content of its folder."""
    results, goal = sweep.results(), sweep.goal
    best = find_best(results, goal)
    sign = 1 if goal.best_is == "min" else -1
    # The best first, trials without a value last.
    combinations = sorted(
        combine_repetitions(results, goal),
        key=lambda combination: math.inf if math.isnan(combination.mean) else sign * combination.mean,
    )
    order = [result for combination in combinations for result in combination.results]
    shown = [result for result in order if result.state != "waiting" and result.metrics][:_MAX_COMPARED]
    runs = [read_run_data(RunDirectory.find(sweep.folder, result.trial.name)) for result in shown]
    page = make_comparison_page(runs) if runs else Page()
    tables = [_make_table("Trials", trial_rows(results, goal), make_printable(sweep.record.together))]
    if goal.over:
        tables.insert(0, _make_table("Means", combination_rows(results, goal)))
    charts, missing = _draw_charts(results, goal)
    lines = [f"{sweep.record.kind} of {make_printable(sweep.record.task)}: {count_states(results)}"]
    lines += [f"{make_printable(key)}: {make_printable(value)}" for key, value in sweep.record.space.items()]
    if best is not None:
        lines.append(make_printable(format_best(best, goal)))
    if shown and len(shown) < len(results):
        what = f"{len(shown)} best trials are" if len(shown) > 1 else "best trial is"
        lines.append(f"below the table, only the {what} shown")
    failed = [
        f"{result.trial.name} has failed (exit {result.exit_code})" for result in results if result.state == "failed"
    ]
    name = make_printable(sweep.folder.name)
    return replace(
        page,
        head=PageHead(name=name, title=f"{name} · accel-run report", lines=lines),
        problems=[*([abbreviate(failed)] if failed else []), *page.problems],
        first=[*tables, *page.first],
        charts=[*charts, *page.charts],
        repeat=[Step("Whole sweep", make_printable(sweep.record.command))] if sweep.record.command else [],
        missing=[*missing, *page.missing],
    )


def _make_table(title: str, table: tuple[list[str], list[list[str]]], note: str = "") -> PageTable:
    head, rows = table
    return PageTable(title.lower(), title, head, [[make_printable(cell) for cell in row] for row in rows], note)


def _draw_charts(results: Sequence[Result], goal: Goal) -> tuple[list[Chart], list[MissingPart]]:
    known = [(result, result.value) for result in results if result.value is not None]
    if len(known) < 2:
        return [], [MissingPart(f"{goal.metric} over trials", "fewer than two finished trials have a finite value")]
    charts = []
    with page_style():
        for number, (title, drawing) in enumerate(
            [(f"{goal.metric} over trials", _draw_over_trials(known, goal)), *_draw_over_settings(known, goal)]
        ):
            charts.append(make_chart(drawing, f"trials{number}", make_printable(title)))
    return charts, []


def _draw_over_trials(known: Sequence[tuple[Result, float]], goal: Goal) -> Drawing:
    numbers = [result.trial.number for result, _ in known]
    values = [value for _, value in known]
    figure = new_figure(6.2, 3.1)
    axes = figure.subplots()
    axes.plot(numbers, values, "o", markersize=4, color=COLORS[0], label="a trial")
    label_axes(axes, "trial", goal.metric)
    if goal.over:  # the best of several repetitions is a matter of chance
        return Drawing(figure, f"{len(values)} trials, from {min(values):.4g} to {max(values):.4g}")
    best: list[float] = []
    for value in values:
        so_far = goal.best([*best[-1:], value])
        assert so_far is not None
        best.append(so_far)
    axes.plot(numbers, best, drawstyle="steps-post", linewidth=1.7, color=COLORS[1], label="best so far")
    axes.legend(loc="best", fontsize=9)
    return Drawing(figure, f"{len(values)} trials, the best {best[-1]:.4g}, the first {values[0]:.4g}")


def _draw_over_settings(known: Sequence[tuple[Result, float]], goal: Goal) -> list[tuple[str, Drawing]]:
    """Draw a chart for each setting that is numeric in every trial and has more than one value, except repetitions."""
    found = []
    winner = find_best([result for result, _ in known], goal)
    assert winner is not None
    for key in [key for key in known[0][0].trial.settings if key not in goal.over][:_MAX_KEYS]:
        points = [(_parse_number(result.trial.settings.get(key, "")), value) for result, value in known]
        if not all(math.isfinite(x) for x, _ in points) or len({x for x, _ in points}) < 2:
            continue
        x, y = zip(*sorted(points), strict=True)
        figure = new_figure(6.2, 3.1)
        axes = figure.subplots()
        axes.plot(x, y, "o", markersize=4, color=COLORS[0])
        label_axes(axes, key, goal.metric, is_whole=all(number.is_integer() for number in x))
        if x[0] > 0 and x[-1] / x[0] >= _LOG_SCALE_RATIO:
            axes.set_xscale("log")
        best = _parse_number(winner.settings[key])
        found.append(
            (f"{goal.metric} over {key}", Drawing(figure, f"from {x[0]:.4g} to {x[-1]:.4g}, best at {best:.4g}"))
        )
    return found


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


_MAX_COMPARED = 12  # more lines in a chart are not readable
_MAX_KEYS = 6
_LOG_SCALE_RATIO = 20.0  # ratio of the largest to the smallest value from which the scale is logarithmic
