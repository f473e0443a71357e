"""Plots of the machine show readings at the right place, and gaps as gaps."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.monitor import machine_plots
from runner.monitor.machine_plots import GPU_PANELS, MACHINE_PANELS, PlotLine, draw_png_files, thin_line
from runner.monitor.samples import MachineSamples, SampledGpu

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.usefixtures("full_resolution")
NAN = math.nan


def samples_of(
    count: int, gpus: int = 1, *, times: Any = None, phases: tuple[str, ...] = (), **columns: Any
) -> MachineSamples:
    """Return samples of GPUs at 50 % utilization, a second apart; `gpu0_util=...` sets a column."""
    values: dict[str, Any] = {"cpu/percent": np.full(count, 40.0), "ram/percent": np.full(count, 60.0)}
    for gpu in range(gpus):
        values |= {
            f"gpu{gpu}/{name}": np.full(count, value)
            for name, value in {
                "util": 50.0, "memory_gib": 4.0, "memory_total_gib": 8.0, "temperature_c": 60.0, "power_w": 100.0,
            }.items()
        }  # fmt: skip
    values |= {name.replace("_", "/", 1): np.array(value) for name, value in columns.items()}
    devices = {f"gpu{gpu}": SampledGpu(f"Card {gpu}", f"GPU-{gpu}") for gpu in range(gpus)}
    moments = np.arange(count, dtype=float) if times is None else np.array(times, dtype=float)
    return MachineSamples(1.7e9 + moments, np.ones(count), phases or ("train",) * count, values, devices)


def figures_of(samples: MachineSamples, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the figures instead of writing PNG files."""
    monkeypatch.setattr(machine_plots, "encode_png", lambda figure: figure)
    return dict(draw_png_files(samples))


def lines_in(axes: Any) -> list[Any]:
    return [line for line in axes.lines if line.get_linestyle() == "-"]


def words_of(figure: Any) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("gpus", "names"),
    [(0, {"machine.png"}), (1, {"gpu0.png", "machine.png"}), (2, {"gpu0.png", "gpu1.png", "gpus.png", "machine.png"})],
)
def test_each_gpu_all_gpus_and_the_machine_have_plots(gpus: int, names: set[str]) -> None:
    result = draw_png_files(samples_of(3, gpus))
    assert set(result) == names
    assert all(min(size_of(png)) >= 500 for png in result.values())


def test_without_samples_there_is_no_plot() -> None:
    assert draw_png_files(samples_of(0)) == {}


def test_one_sample_is_a_visible_point(monkeypatch: pytest.MonkeyPatch) -> None:
    for axes in figures_of(samples_of(1), monkeypatch)["gpu0.png"].axes:
        assert any(line.get_marker() == "o" for line in axes.lines)


def test_panels_have_titles_and_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The title of a figure names the GPU."""
    result = figures_of(samples_of(5), monkeypatch)
    for name, panels in {"gpu0.png": GPU_PANELS, "machine.png": MACHINE_PANELS}.items():
        axes = result[name].axes
        assert [each.get_title(loc="left") for each in axes] == [panel.title for panel in panels]
        assert all(unit in each.get_ylabel() for each, unit in zip(axes, _UNITS[name], strict=True))
        assert axes[-1].get_xlabel().endswith("(s)")
    assert result["gpu0.png"].get_suptitle() == "GPU 0: Card 0"


def test_lines_pass_through_the_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    util = [10.0, 90.0, 40.0]
    figure = figures_of(samples_of(3, gpu0_util=util), monkeypatch)["gpu0.png"]
    (line,) = lines_in(figure.axes[0])
    assert line.get_xdata().tolist() == [0, 1, 2]
    assert line.get_ydata().tolist() == util


def test_missing_readings_and_pauses_interrupt_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [0, 1, 2, 3, 4, 100, 101]
    samples = samples_of(7, times=times, gpu0_util=[50, 50, NAN, 50, 50, 50, 50])
    figure = figures_of(samples, monkeypatch)["gpu0.png"]
    (line,) = lines_in(figure.axes[0])
    assert np.isnan(line.get_ydata()).tolist() == [False, False, True, False, False, True, False, False]
    assert "not monitored" in words_of(figure)
    assert "not monitored" not in words_of(figures_of(samples_of(7), monkeypatch)["gpu0.png"])


def test_a_reading_between_two_gaps_has_a_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    util = np.full(200, 50.0)
    util[99], util[101] = NAN, NAN
    axes = figures_of(samples_of(200, gpu0_util=util), monkeypatch)["gpu0.png"].axes[0]
    assert any(line.get_marker() == "o" and 100 / 60 in line.get_xdata() for line in axes.lines)


def test_a_metric_without_readings_is_labelled_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = figures_of(samples_of(5, gpu0_power_w=[NAN] * 5), monkeypatch)["gpu0.png"]
    power = figure.axes[3]
    assert not lines_in(power)
    assert [text.get_text() for text in power.texts] == ["no reading"]
    assert not any(text.get_text() == "no reading" for axes in figure.axes[:3] for text in axes.texts)


def test_memory_capacity_is_a_line_above_the_used_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = figures_of(samples_of(5), monkeypatch)["gpu0.png"]
    memory = figure.axes[1]
    assert any(list(line.get_ydata()) == [8.0, 8.0] for line in memory.lines if line not in lines_in(memory))
    assert memory.get_ylim()[1] > 8
    assert "memory capacity, 8 GiB" in words_of(figure)


def test_phases_are_shaded_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = figures_of(samples_of(20, phases=("lora",) * 10 + ("router",) * 10), monkeypatch)["gpu0.png"]
    assert {"phase lora", "phase router"} <= set(words_of(figure))
    assert [text.get_text() for text in figure.axes[0].texts] == ["lora", "router"]
    nameless = figures_of(samples_of(20, phases=("",) * 20), monkeypatch)["gpu0.png"]
    assert not any("phase" in text for text in words_of(nameless))


@pytest.mark.slow
def test_a_thousand_phases_are_drawn_with_few_artists(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = figures_of(samples_of(2000, phases=("train", "evaluate") * 1000), monkeypatch)["gpu0.png"]
    assert all(len(axes.collections) <= 4 for axes in figure.axes)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("gpus", "is_mixed"), [(1, False), (2, True), (8, False), (8, True)])
def test_legend_and_panels_do_not_overlap(gpus: int, is_mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = samples_of(20, gpus, phases=("warm up", "training", "evaluation", "test") * 5)
    name = "NVIDIA RTX 6000 Ada Generation Laptop GPU (Max-Q)"
    devices = {f"gpu{gpu}": SampledGpu(f"{name} {gpu if is_mixed else ''}", f"GPU-{gpu}") for gpu in range(gpus)}
    figures = figures_of(replace(samples, devices=devices), monkeypatch)
    for figure in [figures["gpu0.png"], figures.get("gpus.png", figures["gpu0.png"]), figures["machine.png"]]:
        figure.draw_without_rendering()
        legends = [legend.get_window_extent() for legend in figure.legends]
        panels = [axes.get_tightbbox() for axes in figure.axes]
        for box in [*legends, *panels]:
            assert figure.bbox.x0 - 1 <= box.x0 < box.x1 <= figure.bbox.x1 + 1
            assert figure.bbox.y0 - 1 <= box.y0 < box.y1 <= figure.bbox.y1 + 1
        assert all(box.y1 <= panel.y0 for box in legends for panel in panels)
        assert all(axes.get_window_extent().height > figure.dpi for axes in figure.axes[: len(GPU_PANELS)]), (
            "a panel is too low"
        )


def test_a_name_shared_by_all_gpus_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = replace(samples_of(3, 2), devices={f"gpu{gpu}": SampledGpu("Tesla T4", str(gpu)) for gpu in range(2)})
    figure = figures_of(samples, monkeypatch)["gpus.png"]
    assert figure.get_suptitle() == "2 GPUs: Tesla T4"
    assert [text for text in words_of(figure) if "GPU" in text] == ["GPU 0", "GPU 1"]


@pytest.mark.slow
def test_eight_gpus_have_different_lines_and_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = figures_of(samples_of(100, 8), monkeypatch)["gpus.png"]
    for axes in figure.axes:
        assert len({line.get_color() for line in lines_in(axes)}) == 8
    assert [text for text in words_of(figure) if text.startswith("GPU")] == [f"GPU {n}: Card {n}" for n in range(8)]


def test_thinning_keeps_mean_extremes_and_gaps() -> None:
    generator = np.random.default_rng(0)
    x, y = np.arange(100_000.0), generator.uniform(0, 100, 100_000)
    y[5000], y[70_000:80_000] = 1000.0, NAN
    after_gap = np.zeros(100_000, dtype=bool)
    after_gap[50_000] = True
    line = thin_line(x, y, after_gap)
    assert 900 < len(line.x) < 1100
    assert np.nanmax(line.high) == 1000.0
    assert np.nanmin(line.low) == np.nanmin(y)
    assert np.nanmean(line.mean) == pytest.approx(np.nanmean(y), rel=1e-3)
    missing = line.x[np.isnan(line.mean)]
    assert any(49_000 < moment < 51_000 for moment in missing), "the pause must still be a break"
    assert ((missing > 70_000) & (missing < 80_000)).sum() > 90, "missing readings must still be missing"


@pytest.mark.parametrize("count", [1, 2, 3, 999, 1000, 1001])
def test_few_samples_are_all_drawn(count: int) -> None:
    values = np.arange(float(count))
    line = thin_line(values, values, np.zeros(count, dtype=bool))
    assert isinstance(line, PlotLine)
    if count <= 1000:
        assert line.mean.tolist() == line.low.tolist() == line.high.tolist() == values.tolist()
    assert float(np.nanmin(line.low)) == 0
    assert float(np.nanmax(line.high)) == count - 1


@pytest.mark.slow
def test_time_axes_have_readable_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, unit in {100: "s", 1000: "min", 20_000: "h", 500_000: "days"}.items():
        figure = figures_of(samples_of(11, times=np.linspace(0, seconds, 11)), monkeypatch)["gpu0.png"]
        assert figure.axes[-1].get_xlabel().endswith(f"({unit})")


@pytest.mark.slow
def test_pyplot_state_is_not_changed(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np, warnings; warnings.simplefilter('error')\n"
        "from runner.monitor.samples import MachineSamples\nfrom runner.monitor.machine_plots import draw_png_files\n"
        "draw_png_files(MachineSamples(np.arange(3.0), np.ones(3), ('',) * 3, {'cpu/percent': np.ones(3)}))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\nassert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


_UNITS = {"gpu0.png": ("%", "GiB", "°C", "W"), "machine.png": ("%", "%", "%", "%")}
