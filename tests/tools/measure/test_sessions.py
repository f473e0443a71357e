"""Results of different sessions are never shown as if they had been measured together."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runner.base.errors import DataError
from runner.tools.measure import results as module
from runner.tools.measure.plots import compute_ratios, make_figures
from runner.tools.measure.results import LadderRow, Results, session_baseline
from runner.tools.measure.technique import BASELINE

pytest.importorskip("matplotlib")

NAMES = ("bf16", "compile", "up to compile", "best")
# (techniques, whether the run uses the name `baseline`, whether it is stored in two stages)
runs = st.lists(st.tuples(st.sets(st.sampled_from(NAMES)), st.booleans(), st.booleans()), min_size=1, max_size=5)


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hardware", dict)


def times(run: int, name: str) -> list[float]:
    """Return step times that identify the run and the technique. Each run is ten times slower than the previous one."""
    base = 10.0**run
    return [base, base] if name == BASELINE else [base / (2 + NAMES.index(name))] * 2


def measure(folder: Path, run: int, names: set[str], *, is_main: bool, in_stages: bool) -> None:
    """Store a run as the ladder does: each stage starts from the files of the previous one."""
    stages = [[BASELINE, *sorted(names)[:1]], sorted(names)[1:]] if in_stages else [[BASELINE, *sorted(names)]]
    session = None
    for stage in filter(None, stages):
        rows = {name: LadderRow(str(run), updates_ms=tuple(times(run, name))) for name in stage}
        session = Results(folder).put(rows, session=session, is_main=is_main)


def columns_of(rows: dict[str, LadderRow]) -> dict[str, list[float]]:
    return {name: list(row.updates_ms) for name, row in rows.items()}


def run_of(column: list[float]) -> int:
    return next(run for run in range(10) if 10.0**run / 10 < column[0] <= 10.0**run)


def lines_of(axes: Any) -> list[list[float]]:
    return [list(line.get_ydata()) for line in axes.lines if len(line.get_ydata()) > 1]


@pytest.mark.slow
@settings(max_examples=25)
@given(runs)
@example([({"bf16", "compile"}, True, False), ({"bf16"}, False, False)])
@example([({"bf16", "compile"}, True, False), ({"bf16"}, True, True)])
def test_every_column_keeps_the_baseline_of_its_session(given_runs: list[tuple[set[str], bool, bool]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder, newest = Path(place), {}
        for run, (names, is_main, in_stages) in enumerate(given_runs):
            measure(folder, run, names, is_main=is_main, in_stages=in_stages)
            newest |= dict.fromkeys(names, run)
        results = Results(folder)
        rows = results.rows()
        columns, sessions = columns_of(rows), {name: row.session for name, row in rows.items()}

        assert {name: run_of(columns[name]) for name in newest} == newest, "the last measurement must be stored"
        for name in newest:
            names = [BASELINE, session_baseline(sessions[name])]
            (own,) = [columns[each] for each in names if sessions.get(each) == sessions[name]]
            assert statistics.median(own) / statistics.median(columns[name]) == pytest.approx(2 + NAMES.index(name))
        assert all(row.mode == str(run_of(columns[name])) for name, row in rows.items())


@pytest.mark.slow
@settings(max_examples=8)
@given(runs)
@example([({"bf16", "compile"}, True, False), ({"bf16"}, False, False)])
@example([({"bf16", "compile"}, True, False), ({"bf16"}, True, True)])
def test_sessions_do_not_share_axes_or_baselines(
    given_runs: list[tuple[set[str], bool, bool]],
) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for run, (names, is_main, in_stages) in enumerate(given_runs):
            measure(folder, run, names, is_main=is_main, in_stages=in_stages)
        results = Results(folder)
        drawn, columns = make_figures(results), columns_of(results.rows())

        shown = [lines_of(axes) for axes in drawn["steps.png"].axes]
        assert sorted(line for lines in shown for line in lines) == sorted(columns.values())
        assert all(len({run_of(line) for line in lines}) == 1 for lines in shown)
        cells = [axes.collections[0].get_array() for axes in drawn["heatmap.png"].axes[::2]]
        assert all(len({run_of([cell]) for cell in part.ravel()}) == 1 for part in cells)
        if "speedup.png" in drawn:
            (axes,) = drawn["speedup.png"].axes
            labels = [label.get_text() for label in axes.get_yticklabels()]
            lengths = dict(zip(labels, (bar.get_width() for bar in axes.patches), strict=True))
            of_techniques = {name: 2.0 + NAMES.index(name) for name in columns if name in NAMES}
            assert lengths == pytest.approx(of_techniques | {BASELINE: 1.0})


@settings(max_examples=25)
@given(runs)
@example([({"bf16", "compile"}, True, False), ({"bf16"}, False, False)])
@example([({"bf16", "compile"}, True, False), ({"bf16"}, True, True)])
def test_the_csv_contains_the_baseline_of_each_column(given_runs: list[tuple[set[str], bool, bool]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for run, (names, is_main, in_stages) in enumerate(given_runs):
            measure(folder, run, names, is_main=is_main, in_stages=in_stages)
        results = Results(folder)
        expected = {name: ratio.middle for name, ratio in compute_ratios(results.rows()).items()}
        results.json.unlink()
        rows = results.rows()

        ratios = {name.partition(" (")[0]: ratio.middle for name, ratio in compute_ratios(rows).items()}
        assert ratios == expected
        assert len({(row.session, run_of(list(row.updates_ms))) for row in rows.values()}) == len(
            {row.session for row in rows.values()}
        )


def test_columns_of_unknown_sessions_are_not_plotted(tmp_path: Path) -> None:
    """An earlier version marked only baselines, so bf16 may belong to either session."""
    results = Results(tmp_path)
    results.csv.write_text("step,baseline,bf16,baseline (session 2)\n1,8.0,4.0,4.0\n")
    with pytest.raises(DataError, match="bf16"):
        results.rows()


def test_unused_baselines_are_removed(tmp_path: Path) -> None:
    results = Results(tmp_path)
    for number in range(3):
        rows = {BASELINE: LadderRow(updates_ms=(4.0 + number,)), "bf16": LadderRow(updates_ms=(2.0,))}
        results.put(rows, is_main=False)

    result = columns_of(results.rows())
    assert list(result) == [BASELINE, "bf16", session_baseline(3)]
    assert (result[BASELINE], result[session_baseline(3)]) == ([4.0], [6.0])
