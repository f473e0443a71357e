"""A sweep or a search on one page: the table of its trials, what they reached, and the best of them compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from runner.base.picture import COLORS, new_figure
from runner.base.text import abbreviate
from runner.durable.directory import RunDirectory
from runner.records.sweep_record import Goal
from runner.sweeps.trials import Result, Sweep, counted, rows_of, winner
from runner.tools.report.chart_parts import Chart, Drawing, Missing
from runner.tools.report.comparison import comparison_of
from runner.tools.report.page import Page, PageHead, PageTable, Step
from runner.tools.report.run_data import fit, read_story
from runner.tools.report.svg import as_svg, drawing


def page_of_sweep(sweep: Sweep) -> Page:
    """Return the page about a sweep or a search, from what its folder holds now."""
    results, goal = sweep.results(), sweep.goal
    best = winner(results, goal)
    shown = _shown(results, goal)
    stories = [read_story(RunDirectory.find(sweep.folder, each.trial.name)) for each in shown]
    page = comparison_of(stories) if stories else Page()
    head, rows = rows_of(results, goal)
    table = PageTable(
        "trials", "Trials", head, [[fit(cell) for cell in row] for row in rows], fit(sweep.record.together)
    )
    drawn, missing = _charts(results, goal)
    lines = [f"{sweep.record.kind} of {fit(sweep.record.task)}: {counted(results)}"]
    lines += [f"{fit(key)}: {fit(told)}" for key, told in sweep.record.space.items()]
    if best is not None:
        lines.append(fit(f"{goal.best_is} of {goal.metric}: {best.value:.5g}, {best.trial.label}"))
    if len(shown) < len(results):
        what = f"the {len(shown)} best are compared" if len(shown) > 1 else "is the best"
        lines.append(f"below the table {what}")
    failed = [f"{each.trial.name} has failed (exit {each.exit_code})" for each in results if each.state == "failed"]
    name = fit(sweep.folder.name)
    return replace(
        page,
        head=PageHead(name=name, title=f"{name} · accel-run report", lines=lines),
        problems=[*([abbreviate(failed)] if failed else []), *page.problems],
        first=[table, *page.first],
        charts=[*drawn, *page.charts],
        repeat=[Step("Whole sweep", fit(sweep.record.command))] if sweep.record.command else [],
        missing=[*missing, *page.missing],
    )


def _shown(results: Sequence[Result], goal: Goal) -> list[Result]:
    """Return the best trials, those without a value after them, as many as a page has room to compare."""
    sign = 1 if goal.best_is == "min" else -1
    evaluated = [each for each in results if each.state != "waiting" and each.metrics]
    order = sorted(evaluated, key=lambda each: math.inf if each.value is None else sign * each.value)
    return order[:_COMPARED]


def _charts(results: Sequence[Result], goal: Goal) -> tuple[list[Chart], list[Missing]]:
    """Return the metric over the number of the trial, and over each setting that is a number."""
    known = [(each, each.value) for each in results if each.value is not None]
    if len(known) < 2:
        return [], [Missing(f"{goal.metric} over trials", "fewer than two finished trials have a finite value")]
    charts = []
    with drawing():
        for number, (title, drawn) in enumerate(
            [(f"{goal.metric} over trials", _over_trials(known, goal)), *_over_settings(known, goal)]
        ):
            name = f"trials{number}"
            svg = as_svg(drawn, name, title)
            charts.append(Chart(name, fit(title), drawn.described, svg, drawn.note, wide=False))
    return charts, []


def _over_trials(known: Sequence[tuple[Result, float]], goal: Goal) -> Drawing:
    numbers = [each.trial.number for each, _ in known]
    values = [value for _, value in known]
    best: list[float] = []
    for value in values:
        so_far = goal.best([*best[-1:], value])
        assert so_far is not None
        best.append(so_far)
    figure = new_figure(6.2, 3.1)
    axes = figure.subplots()
    axes.plot(numbers, values, "o", markersize=4, color=COLORS[0], label="a trial")
    axes.plot(numbers, best, drawstyle="steps-post", linewidth=1.7, color=COLORS[1], label="best so far")
    _dress(axes, "trial", goal, is_whole=True)
    axes.legend(loc="best", fontsize=9)
    return Drawing(figure, f"{len(values)} trials, the best {best[-1]:.4g}, the first {values[0]:.4g}")


def _over_settings(known: Sequence[tuple[Result, float]], goal: Goal) -> list[tuple[str, Drawing]]:
    """Return a chart for each setting that has a number in every trial and more than one of them."""
    found = []
    for key in list(known[0][0].trial.settings)[:_MOST_KEYS]:
        points = [(_number(each.trial.settings.get(key, "")), value) for each, value in known]
        if not all(math.isfinite(x) for x, _ in points) or len({x for x, _ in points}) < 2:
            continue
        x, y = zip(*sorted(points), strict=True)
        figure = new_figure(6.2, 3.1)
        axes = figure.subplots()
        axes.plot(x, y, "o", markersize=4, color=COLORS[0])
        _dress(axes, key, goal, is_whole=all(number.is_integer() for number in x))
        if x[0] > 0 and x[-1] / x[0] >= _LOG_FROM:
            axes.set_xscale("log")
        best = x[y.index(goal.best(y))]
        found.append(
            (f"{goal.metric} over {key}", Drawing(figure, f"from {x[0]:.4g} to {x[-1]:.4g}, best at {best:.4g}"))
        )
    return found


def _dress(axes: Any, label: str, goal: Goal, *, is_whole: bool) -> None:
    axes.set_xlabel(label)
    axes.locator_params(axis="x", integer=is_whole, nbins=6)
    axes.set_ylabel(goal.metric)
    axes.grid(visible=True)
    axes.set_axisbelow(True)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


_COMPARED = 12  # more lines over each other tell nothing
_MOST_KEYS = 6
_LOG_FROM = 20.0  # the largest by the smallest from which a log scale shows more
