"""Plots of results show the measured values, and all text is readable."""

from __future__ import annotations

import csv
import json
import math
import shutil
import statistics
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.base.errors import DataError, InputMissing
from runner.base.picture import encode_png
from runner.cli import main
from runner.tools.measure import results as module
from runner.tools.measure.comparison_result import Numerics, TrialOutcome
from runner.tools.measure.plots import COLOR_MAP, draw_plots, make_figures
from runner.tools.measure.results import PICTURES, LadderRow, Results, Usage
from runner.tools.measure.statistics import Ratio
from runner.tools.measure.technique import BASELINE

matplotlib = pytest.importorskip("matplotlib")
FigureCanvasAgg = pytest.importorskip("matplotlib.backends.backend_agg").FigureCanvasAgg

INVENTORY = {
    "torch_version": "2.13.0",
    "cpu": {"name": "a processor"},
    "devices": [],
}
COLUMNS = {
    BASELINE: [100.0, 101.0, 99.0, 100.0],
    "bf16": [51.0, 50.0, 49.0, 50.0],
    "compile": [9000.0, 40.0, 41.0],
    "8bit": [110.0, 111.0],
}
RATIOS = {"bf16": (2.0, 1.9, 2.2), "compile": (2.5, 2.4, 2.6), "8bit": (0.9, 0.85, 0.95)}
LONG = "bf16_max-autotune_flash_fused_number"


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hardware", lambda: {"inventory": INVENTORY})


def row(column: Sequence[float], *ratio: float, is_wrong: bool = False, task: str = "") -> LadderRow:
    """Return a row with these times and the ratio (middle, low, high)."""
    numerics = Numerics(1.0, 1.0, 1.0, tolerance=0.1) if is_wrong else None
    outcome = TrialOutcome(Ratio(*ratio, num=10) if ratio else None, numerics)
    return LadderRow(outcome=outcome, usage=Usage(device_name="a card"), updates_ms=tuple(column), task=task)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    made = Results(tmp_path, "nmt-")
    made.put({name: row(column, *RATIOS.get(name, (1.0, 0.9, 1.1)), task="nmt") for name, column in COLUMNS.items()})
    return made


@pytest.fixture
def crowd(tmp_path: Path) -> Results:
    """Twenty techniques with long names, columns of different lengths, and a slow first step, as with compilation."""
    made = Results(tmp_path, "crowd-")
    names = [BASELINE, *(f"{LONG}{number}" if number % 2 else f"t{number}" for number in range(19))]
    columns = {name: [1e4, *[100.0 / (1 + number)] * (10 + 7 * number)] for number, name in enumerate(names)}
    made.put(
        {
            name: row(column, 1.0 + number, 0.9 + number, 1.3 + number)
            for number, (name, column) in enumerate(columns.items())
        }
    )
    return made


@pytest.fixture
def sessions(results: Results) -> Results:
    """A table in which one technique was measured again, in a later session with a new baseline."""
    rows = {BASELINE: row([60.0] * 4, task="nmt"), "bf16": row([50.0] * 4, 1.2, 1.1, 1.3, task="nmt")}
    results.put(rows, is_main=False)
    return results


def size_of(picture: bytes) -> tuple[int, int]:
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", picture[16:24])
    return width, height


def bars(axes: Any) -> list[tuple[float, float]]:
    """Return (center of the row, length) of each bar, from the top."""
    result = [(patch.get_y() + patch.get_height() / 2, patch.get_width()) for patch in axes.patches]
    return sorted(result)


def whiskers(axes: Any) -> dict[float, tuple[float, float]]:
    """Return row -> interval."""
    segments = [segment for result in axes.collections for segment in result.get_segments()]
    return {float(a[1]): (float(a[0]), float(b[0])) for a, b in segments}


def labels(axes: Any) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def values(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def notes(axes: Any) -> str:
    return " ".join(axes.get_title(loc="left").split())


def legend_of(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


# ---------------------------------------------------------------- files


@pytest.mark.slow
@pytest.mark.usefixtures("full_resolution")
def test_plots_are_written_to_the_folder_of_the_results(results: Results) -> None:
    drawn = draw_plots(results)

    assert drawn == [results.folder / f"nmt-{name}" for name in PICTURES]
    for path in drawn:
        width, height = size_of(path.read_bytes())
        assert 800 < width < 2000
        assert 300 < height < 2000


def test_plots_name_the_task_if_known(results: Results, tmp_path: Path) -> None:
    for figure in make_figures(results).values():
        assert "task nmt" in notes(figure.axes[0])
    bare = Results(tmp_path / "bare")
    bare.put({name: row(column) for name, column in COLUMNS.items()})
    for figure in make_figures(bare).values():
        assert "task" not in notes(figure.axes[0])


@pytest.mark.slow
def test_an_outdated_plot_is_removed(results: Results) -> None:
    draw_plots(results)
    results.clean()
    results.file("speedup.png").write_bytes(b"an earlier one")
    results.put({"bf16": row([2.0])})  # there is no speedup without a baseline
    draw_plots(results)

    assert not results.file("speedup.png").exists()


def test_the_benchmark_command_is_suggested_without_results(tmp_path: Path) -> None:
    empty = Results(tmp_path)
    with pytest.raises(InputMissing, match="there are no results yet"):
        draw_plots(empty)
    empty.init()
    with pytest.raises(InputMissing, match="accel-run benchmark"):
        draw_plots(empty)


def test_techniques_without_a_baseline_have_no_bars(tmp_path: Path) -> None:
    alone = Results(tmp_path)
    alone.put({"bf16": row([3.0])})

    assert [path.name for path in draw_plots(alone)] == ["steps.png", "heatmap.png"]


# ---------------------------------------------------------------- lines


def test_each_technique_has_a_line_of_all_steps(results: Results) -> None:
    figure = make_figures(results)["steps.png"]
    (axes,) = figure.axes

    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines if line.get_linestyle() != "None"]

    assert drawn == [(list(range(1, len(column) + 1)), column) for column in COLUMNS.values()]
    assert axes.get_ylabel().endswith("(ms)")


def test_the_legend_is_sorted_by_speed(results: Results) -> None:
    assert legend_of(make_figures(results)["steps.png"]) == [
        "8bit  110 ms, 2 steps", "baseline  100 ms, 4 steps", "bf16  50 ms, 4 steps", "compile  41 ms, 3 steps",
    ]  # fmt: skip


def test_a_compiled_step_is_off_scale_and_labelled(results: Results) -> None:
    (axes,) = make_figures(results)["steps.png"].axes
    bottom, top = axes.get_ylim()

    assert bottom == 0
    assert 111 < top < 200
    assert "compile step 1: 9,000 ms" in notes(axes)


def test_a_scale_without_outliers_has_no_note(tmp_path: Path) -> None:
    even = Results(tmp_path)
    even.put({BASELINE: row([10.0, 12.0]), "bf16": row([5.0, 15.0])})

    (axes,) = make_figures(even)["steps.png"].axes

    assert "beyond" not in notes(axes)
    assert axes.get_ylim()[1] > 15


def test_lines_of_twenty_techniques_look_different(crowd: Results) -> None:
    (axes,) = make_figures(crowd)["steps.png"].axes
    lines = [line for line in axes.lines if line.get_linestyle() != "None"]

    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines) == 20


# ---------------------------------------------------------------- heat map


def test_missing_steps_of_the_heat_map_are_empty(results: Results) -> None:
    axes, bar = make_figures(results)["heatmap.png"].axes
    cells = axes.collections[0].get_array().reshape(len(COLUMNS), -1)

    for row, column in zip(cells, COLUMNS.values(), strict=True):
        assert row.compressed().tolist() == column
    assert labels(axes) == list(COLUMNS)
    assert bar.get_ylabel().endswith("(ms)")
    assert "hatched: " in notes(axes)
    assert "compile step 1: 9,000 ms" in notes(axes)
    assert axes.collections[0].get_clim()[1] == 111


def test_many_steps_are_binned_without_loss(tmp_path: Path) -> None:
    long = Results(tmp_path)
    column = [10.0 + step % 7 for step in range(333)]
    long.put({BASELINE: row(column)})

    axes, _ = make_figures(long)["heatmap.png"].axes
    mesh = axes.collections[0]
    edges = mesh.get_coordinates()[0, :, 0]

    assert edges[0] == 0.5
    assert edges[-1] == 333.5
    assert mesh.get_array().size == len(edges) - 1 <= 50
    for cell, (begin, end) in zip(mesh.get_array().ravel(), pairwise(edges), strict=True):
        assert cell == statistics.median_low(column[int(begin) : int(end)])
    assert "median of 7" in axes.get_xlabel()


def test_heat_map_colors_darken_monotonically_in_one_hue() -> None:
    colors = matplotlib.colormaps[COLOR_MAP](np.linspace(0, 1, 64))[:, :3]
    light = colors @ [0.2126, 0.7152, 0.0722]
    hues = matplotlib.colors.rgb_to_hsv(colors)[:, 0]

    assert (np.diff(light) < 0).all()
    assert np.ptp(hues) < 0.1


def test_noise_of_one_percent_has_low_contrast(tmp_path: Path) -> None:
    even = Results(tmp_path)
    even.put({BASELINE: row([100.0, 101.0])})

    low, high = make_figures(even)["heatmap.png"].axes[0].collections[0].get_clim()

    assert (101 - 100) / (high - low) < 0.15


# ---------------------------------------------------------------- ratios


def test_bars_are_the_ratios_and_whiskers_the_intervals(results: Results) -> None:
    (axes,) = make_figures(results)["speedup.png"].axes

    assert labels(axes) == ["compile", "bf16", BASELINE, "8bit"]
    assert bars(axes) == [pytest.approx(row) for row in ((0, 2.5), (1, 2.0), (2, 1.0), (3, 0.9))]
    assert whiskers(axes) == {
        0.0: pytest.approx((2.4, 2.6)), 1.0: pytest.approx((1.9, 2.2)), 3.0: pytest.approx((0.85, 0.95)),
    }  # fmt: skip
    assert values(axes) == ["2.50 [2.40, 2.60]", "2.00 [1.90, 2.20]", "1.00", "0.90 [0.85, 0.95]"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first technique is at the top"
    assert "95% interval" in notes(axes)


def test_bar_colors_show_significance(results: Results, screen: Callable[..., None]) -> None:
    results.put(
        {
            "nothing": row([100.0], 1.02, 0.98, 1.06), "wrong": row([10.0], 9.0, 8.0, 10.0, is_wrong=True),
            "short": row([50.0], 2.0, 0.0, math.inf), "bare": row([50.0]),
        },
    )  # fmt: skip
    figure = make_figures(results)["speedup.png"]
    (axes,) = figure.axes
    colors = dict(zip(labels(axes), (patch.get_facecolor() for patch in axes.patches), strict=True))
    hatched = [name for name, patch in zip(labels(axes), axes.patches, strict=True) if patch.get_hatch()]

    kinds = [{"bf16", "compile", "wrong"}, {"8bit"}, {"nothing", "short"}, {BASELINE}]
    assert [{name for name in colors if colors[name] == colors[next(iter(kind))]} for kind in kinds] == kinds
    assert hatched == ["wrong"]
    screen("\n".join(legend_of(figure)))


def test_bars_use_medians_without_measured_ratios(tmp_path: Path) -> None:
    bare = Results(tmp_path)
    bare.put({name: row(column) for name, column in COLUMNS.items()})

    (axes,) = make_figures(bare)["speedup.png"].axes

    result = dict(zip(labels(axes), (length for _, length in bars(axes)), strict=True))
    assert result == {name: pytest.approx(100 / statistics.median(column)) for name, column in COLUMNS.items()}
    assert not whiskers(axes)
    assert "2.00 (no interval)" in values(axes)


def test_a_wide_interval_does_not_hide_the_bars(results: Results) -> None:
    results.put({"few": row([50.0], 2.0, 0.01, 400.0)})

    (axes,) = make_figures(results)["speedup.png"].axes

    assert axes.get_xlim()[1] < 5
    assert "2.00 [0.01, 400.00]" in values(axes)


# ---------------------------------------------------------------- outliers


def test_a_very_slow_technique_does_not_hide_the_others(tmp_path: Path) -> None:
    made = Results(tmp_path)
    columns = {BASELINE: [100.0, 110.0], "bf16": [60.0, 70.0], "fused": [90.0, 95.0], "fp16": [1000.0, 1100.0]}
    made.put({name: row(column) for name, column in columns.items()})

    drawn = make_figures(made)

    (axes,) = drawn["steps.png"].axes
    assert axes.get_yscale() == "log"
    low, high = axes.get_ylim()
    assert low < 60
    assert high > 1100
    norm = drawn["heatmap.png"].axes[0].collections[0].norm
    assert norm(110.0) - norm(60.0) > 0.2, "they stay distinguishable, although the maximum is 1100"


# ---------------------------------------------------------------- readability


def boxes(figure: Any) -> Iterator[tuple[str, Any]]:
    """Yield each visible text with its bounding box."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    out_of_view = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        for label in (tick.label1, tick.label2)
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    for text in figure.findobj(matplotlib.text.Text):
        if text.get_visible() and text.get_text().strip() and text not in out_of_view:
            yield text.get_text(), text.get_window_extent(renderer)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.usefixtures("full_resolution")
@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("which", ["results", "crowd", "sessions"])
def test_labels_do_not_overlap_or_leave_the_plot(request: pytest.FixtureRequest, which: str, name: str) -> None:
    of = make_figures(request.getfixturevalue(which))
    if name not in of:
        pytest.skip("nothing to draw")
    size_of(encode_png(of[name]))

    result = list(boxes(of[name]))

    frame = of[name].bbox
    for text, box in result:
        assert frame.x0 - 1 <= box.x0 <= box.x1 <= frame.x1 + 1, text
        assert frame.y0 - 1 <= box.y0 <= box.y1 <= frame.y1 + 1, text
    for (first, a), (second, b) in combinations(result, 2):
        width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert width < 1 or height < 1, f"{first!r} overlaps {second!r}"


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from([BASELINE, "a", "b", "up to b"]),
        st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=70),
        min_size=1,
    ),
    st.none() | st.builds(Ratio, st.floats(), st.floats(), st.floats(), st.integers()),
    st.dictionaries(st.sampled_from(["inventory", "cpu"]), st.none() | st.text(max_size=3)),
)
def test_any_times_and_any_facts_can_be_drawn(
    tmp_path: Path, columns: dict[str, list[float]], ratio: Ratio | None, hardware: dict[str, Any]
) -> None:
    results = Results(tmp_path)
    results.reset()
    results.put({name: LadderRow(outcome=TrialOutcome(ratio), updates_ms=tuple(ms)) for name, ms in columns.items()})
    content = json.loads(results.json.read_text())
    for each in content["techniques"].values():
        each["hardware"] = hardware
    results.json.write_text(json.dumps(content))

    for figure in make_figures(results).values():
        assert figure.axes


@pytest.mark.slow
def test_a_prefix_applies_to_plots_of_other_results(tmp_path: Path) -> None:
    Results(tmp_path).put({name: row(column) for name, column in COLUMNS.items()})
    assert main(["benchmark", "plots", f"folder={tmp_path}", "prefix=mine-"]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.png")) == sorted(f"mine-{name}" for name in PICTURES)


def test_plots_of_a_published_csv_need_no_json(tmp_path: Path) -> None:
    measured = Results(tmp_path)
    measured.put({name: row(column) for name, column in COLUMNS.items()})
    times = {name: found.updates_ms for name, found in measured.rows().items()}
    measured.json.unlink()
    assert {name: found.updates_ms for name, found in measured.rows().items()} == times
    assert set(make_figures(measured)) == set(PICTURES)


@pytest.mark.parametrize(
    ("text", "column"),
    [("step,baseline\n1,fast\n", "baseline"), ("step,baseline,all but a\n1,3,-2\n", "all but a"),
     ("step,a,a\n1,2,3\n", "'a'"), ("step,a\n1,inf\n", "'a'"), ("n,a\n1,2\n", "step"), ("step,a\n1,2,3\n", "csv"),
     ("step,a\n1,\x00\n", "csv")],
)  # fmt: skip
def test_a_csv_without_times_is_rejected(tmp_path: Path, text: str, column: str) -> None:
    found = Results(tmp_path)
    found.csv.write_text(text)
    with pytest.raises(DataError, match=column):
        found.rows()


@pytest.mark.parametrize("name", ["all but bf16", "2 GPUs, bf16", "$\\frac$", "größer"])
def test_a_csv_may_have_any_column_names(tmp_path: Path, name: str) -> None:
    found = Results(tmp_path)
    with found.csv.open("w", newline="") as file:
        csv.writer(file).writerows([["step", "baseline", name], [1, 4.0, 2.0], [2, 4.0, ""]])
    assert found.rows()[name].updates_ms == (2.0,)
    for figure in make_figures(found).values():
        encode_png(figure)


PUBLISHED = sorted((Path(__file__).parents[3] / "docs" / "results").glob("*/results.csv"))


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda path: path.parent.name)
def test_the_published_tables_can_be_plotted(tmp_path: Path, published: Path) -> None:
    shutil.copy(published, tmp_path / "results.csv")
    assert set(make_figures(Results(tmp_path))) == set(PICTURES)
