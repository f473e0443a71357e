"""Charts of the machine: memory, and what the monitor sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.base.picture import COLORS, new_figure
from runner.base.text import format_gib
from runner.monitor import machine_plots
from runner.tools.report.chart_parts import (
    LEGEND,
    SIZE,
    Drawing,
    bin_curve,
    describe_range,
    format_axes,
    missing_reason,
)
from runner.tools.report.run_data import RunData, make_printable
from runner.tools.report.svg import GRID


def memory(run: RunData) -> Drawing | str:
    """Peak memory by its content and relative to the capacity, and memory over updates."""
    bars = _memory_bars(run)
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
    if not bars and not lines:
        return missing_reason(run, "the run did not measure its memory")
    strips = [strip for bar in bars for strip in _make_strips(bar)]
    heights = [0.3 + 0.6 * len(strips)] * bool(strips) + [2.0] * bool(lines)
    figure = new_figure(SIZE[0], sum(heights) + 0.4)
    panels = list(np.ravel(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)))
    descriptions = []
    if strips:
        axes = panels.pop(0)
        handles: dict[str, Any] = {}
        for row, (title, widths) in enumerate(strips):
            begin = 0.0
            for part, share in widths.items():
                color = _MEMORY_COLORS.get(part.partition(":")[0], GRID)
                handles[part] = axes.barh(row, share, 0.4, left=begin, color=color)
                begin += share
            axes.text(0, row - 0.27, title, fontsize=9.5, va="bottom")
            inner = [part for part in widths if ":" in part]
            descriptions.append(f"{title} ({', '.join(inner)})" if inner else title)
        axes.set_xlim(0, 1)
        axes.set_ylim(len(strips) - 0.7, -0.8)
        axes.set_axis_off()
        figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=3, **LEGEND)
    if lines:
        axes = panels.pop(0)
        for number, (name, curve) in enumerate(lines.items()):
            line = bin_curve(curve)
            mark = {"marker": "o", "markersize": 4} if np.isfinite(line.mean).sum() == 1 else {}
            axes.plot(line.x, line.mean, color=COLORS[number], linewidth=1.6, label=name, **mark)
        format_axes(axes, run, "GiB")
        axes.set_ylim(0, 1.15 * max(np.nanmax(bin_curve(curve).high) for curve in lines.values()) or 1.0)
        axes.legend(fontsize=9, loc="lower right")
        descriptions += [describe_range(f"{name} (GiB)", curve) for name, curve in lines.items()]
    of_parts = any(len(bar.parts) > 1 for bar in bars)
    note = _COMPOSITION_NOTE if of_parts else ""
    return Drawing(figure, "; ".join(descriptions), note)


def machine(run: RunData) -> Drawing | str:
    """GPU, CPU and RAM over time."""
    return _draw_samples(run, ("machine.png",))


def gpus(run: RunData) -> Drawing | str:
    """Utilization, memory, temperature and power of every GPU over time."""
    if run.samples is not None and not run.samples.devices:
        return "no GPU was monitored"
    return _draw_samples(run, ("gpus.png", "gpu0.png"))


@dataclass(frozen=True)
class _Bar:
    name: str
    parts: Mapping[str, float]
    capacity: float | None


def _memory_bars(run: RunData) -> list[_Bar]:
    """Return the peak memory of the GPU, if there is one, and of the host, in GiB by part."""
    evidence = run.evidence
    if evidence is None:
        return []
    held = _training_state_gib(run)
    bars = []
    if evidence.device_peak_gib is not None:
        name = make_printable(evidence.device_name or "device")
        bars.append(_Bar(name, _split_peak(evidence.device_peak_gib, held), evidence.device_total_gib))
        held = {}
    if evidence.host_peak_gib is not None:
        bars.append(_Bar("host", _split_peak(evidence.host_peak_gib, held), evidence.host_total_gib))
    return bars


def _make_strips(bar: _Bar) -> list[tuple[str, dict[str, float]]]:
    """Return the rows of a bar as (title, part -> share of the width): the peak and its parts."""
    used = sum(bar.parts.values())
    rows = []
    if bar.capacity:
        share = min(1.0, used / bar.capacity)
        title = f"{bar.name}: peak {format_gib(used)} of {format_gib(bar.capacity)}, {share:.0%}"
        rows.append((title, {"in use": share, "free": 1 - share}))
    if len(bar.parts) > 1 and used:
        inner = {f"{part}: {format_gib(gib)}": gib / used for part, gib in bar.parts.items()}
        rows.append(("composition of the peak", inner))
    return rows or [(f"{bar.name}: peak {format_gib(used)}", {"in use": 1.0})]


def _split_peak(peak: float, held: Mapping[str, float]) -> dict[str, float]:
    """Return the known parts and the rest up to the peak; only the peak if the parts exceed it."""
    rest = peak - sum(held.values())
    return {**held, "all else": rest} if held and rest >= 0 else {"in use": peak}


def _training_state_gib(run: RunData) -> dict[str, float]:
    """Return GiB of weights, gradients and optimizer state; empty if they are unknown or sharded over ranks."""
    if run.plan.choice("parallelism").function in ("fsdp", "pipeline") or run.evidence is None:
        return {}
    newest = run.checkpoints[-1].files if run.checkpoints else {}
    weights, optimizer = newest.get("model.safetensors"), newest.get("optimizer.safetensors")
    total, trainable = run.evidence.num_parameters, run.evidence.num_trainable
    if not weights or optimizer is None or not total or trainable is None:
        return {}
    gib = 2**30
    return {"weights": weights / gib, "gradients": weights * trainable / total / gib, "optimizer": optimizer / gib}


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
            means.append(f"{label} {np.nanmean(values):.0f} % on average, at most {np.nanmax(values):.0f} %")
    gaps = int(run.samples.gaps().sum())
    note = f"hatched: not monitored ({gaps} time{'s' * (gaps > 1)})" if gaps else ""
    return Drawing(found, "; ".join(means) or "over time", note)


_COMPOSITION_NOTE = (
    "weights and optimizer: the size of their files in the newest checkpoint; gradients: as many bytes as the weights "
    "that are trained"
)
_MAX_POINTS = 200
_MEMORY_COLORS = {
    "weights": COLORS[0],
    "gradients": COLORS[5],
    "optimizer": COLORS[2],
    "all else": COLORS[4],
    "in use": COLORS[3],
}
