"""Charts of the machine: memory, and what the monitor sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from runner.base.picture import COLORS, new_figure
from runner.base.text import format_gib
from runner.monitor import machine_plots
from runner.tools.report.chart_parts import (
    SIZE,
    Drawing,
    bin_curve,
    describe_range,
    format_axes,
    missing_reason,
)
from runner.tools.report.run_data import RunData, make_printable


def memory(run: RunData) -> Drawing | str:
    """Draw the memory over updates; the note has the peaks relative to the capacity."""
    lines = {
        name: run.curves[key]
        for key, name in (
            ("memory/peak_gib", "device, peak"),
            ("memory/reserved_gib", "device, reserved by torch"),
            ("memory/allocated_gib", "device, allocated"),
            ("process/memory_gib", "host, all processes of the run"),
        )
        if np.isfinite(run.curves[key].y).any()
    }
    if not lines:
        return missing_reason(run, "the run did not measure its memory")
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    for number, (name, curve) in enumerate(lines.items()):
        line = bin_curve(curve)
        mark = {"marker": "o", "markersize": 4} if np.isfinite(line.mean).sum() == 1 else {}
        axes.plot(line.x, line.mean, color=COLORS[number], linewidth=1.6, label=name, **mark)
    format_axes(axes, run, "GiB")
    axes.set_ylim(0, 1.15 * max(np.nanmax(bin_curve(curve).high) for curve in lines.values()) or 1.0)
    axes.legend(fontsize=9, loc="lower right")
    descriptions = [describe_range(f"{name} (GiB)", curve) for name, curve in lines.items()]
    return Drawing(figure, "; ".join(descriptions), "; ".join(_describe_peaks(run)))


def _describe_peaks(run: RunData) -> Iterator[str]:
    evidence = run.evidence
    if evidence is None:
        return
    for name, peak, total in (
        (make_printable(evidence.device_name or "device"), evidence.device_peak_gib, evidence.device_total_gib),
        (evidence.host_label, evidence.host_peak_gib, evidence.host_total_gib),
    ):
        if peak is not None:
            capacity = f" of {format_gib(total)}, {peak / total:.0%}" if total else ""
            yield f"{name}: peak {format_gib(peak)}{capacity}"


def machine(run: RunData) -> Drawing | str:
    """Draw GPU, CPU and RAM over time."""
    return _draw_samples(run, ("machine.png",))


def gpus(run: RunData) -> Drawing | str:
    """Draw utilization, memory, temperature and power of every GPU over time."""
    if run.samples is not None and not run.samples.devices:
        return "no GPU was monitored"
    return _draw_samples(run, ("gpus.png", "gpu0.png"))


def _draw_samples(run: RunData, names: Sequence[str]) -> Drawing | str:
    if run.samples is None:
        return run.missing.get("machine", "not monitored")
    figures = machine_plots.draw_figures(run.samples, _MAX_POINTS, per_gpu=False)
    found = next((figures[name] for name in names if name in figures), None)
    if found is None:
        return "no GPU was monitored"
    labels = {"cpu/percent": "CPU", "ram/percent": "RAM"} | {
        f"{gpu}/util": f"{gpu} utilization" for gpu in run.samples.devices
    }
    means = []
    for key, label in labels.items():
        values = run.samples.values.get(key)
        if values is not None and np.isfinite(values).any():
            highest = np.nanmax(run.samples.ranges[key][2])
            means.append(f"{label} {run.samples.mean(key):.0f} % on average, at most {highest:.0f} %")
    gaps = int(run.samples.gaps().sum())
    note = f"hatched: not monitored ({gaps} time{'s' * (gaps > 1)})" if gaps else ""
    return Drawing(found, "; ".join(means) or "over time", note)


_MAX_POINTS = 200
