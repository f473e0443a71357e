"""Charts of the machine: memory, and what the monitor sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.base.picture import COLORS, new_figure
from runner.base.text import format_gib
from runner.monitor import machine_plots
from runner.tools.report.chart_parts import LEGEND, SIZE, Drawing, binned, dress, from_to, no_rows
from runner.tools.report.run_data import RunData, fit
from runner.tools.report.svg import GRID


def memory(story: RunData) -> Drawing | str:
    """The most memory in use by what it held, against what there is, and memory over updates."""
    bars = _memory_bars(story)
    lines = {
        name: story.curves[key]
        for key, name in (
            ("memory/peak_gib", "device, peak"),
            ("memory/reserved_gib", "device, reserved by torch"),
            ("memory/allocated_gib", "device, allocated"),
            ("process/memory_gib", "host, all processes of the run"),
        )
        if np.isfinite(story.curves[key].y).any()
    }
    if not bars and not lines:
        return no_rows(story, "the run did not measure its memory")
    strips = [strip for bar in bars for strip in _strips(bar)]
    heights = [0.3 + 0.6 * len(strips)] * bool(strips) + [2.0] * bool(lines)
    figure = new_figure(SIZE[0], sum(heights) + 0.4)
    panels = list(np.ravel(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)))
    said = []
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
            said.append(f"{title} ({', '.join(inner)})" if inner else title)
        axes.set_xlim(0, 1)
        axes.set_ylim(len(strips) - 0.7, -0.8)
        axes.set_axis_off()
        figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=3, **LEGEND)
    if lines:
        axes = panels.pop(0)
        for number, (name, curve) in enumerate(lines.items()):
            line = binned(curve)
            mark = {"marker": "o", "markersize": 4} if np.isfinite(line.mean).sum() == 1 else {}
            axes.plot(line.x, line.mean, color=COLORS[number], linewidth=1.6, label=name, **mark)
        dress(axes, story, "GiB")
        axes.set_ylim(0, 1.15 * max(np.nanmax(binned(curve).high) for curve in lines.values()) or 1.0)
        axes.legend(fontsize=9, loc="lower right")
        said += [from_to(f"{name} (GiB)", curve) for name, curve in lines.items()]
    of_parts = any(len(bar.parts) > 1 for bar in bars)
    note = _HELD if of_parts else ""
    return Drawing(figure, "; ".join(said), note)


def machine(story: RunData) -> Drawing | str:
    """GPU, CPU and RAM over time."""
    return _of_samples(story, ("machine.png",))


def gpus(story: RunData) -> Drawing | str:
    """Utilisation, memory, temperature and power of every GPU over time."""
    if story.samples is not None and not story.samples.devices:
        return "no GPU was watched"
    return _of_samples(story, ("gpus.png", "gpu0.png"))


@dataclass(frozen=True)
class _Bar:
    name: str
    parts: Mapping[str, float]
    capacity: float | None


def _memory_bars(story: RunData) -> list[_Bar]:
    """Return the peak of the device, if it is no CPU, and of the host, in GiB by part."""
    seen = story.evidence
    if seen is None:
        return []
    held = _held(story)
    bars = []
    if seen.device_peak_gib is not None:
        bars.append(_Bar(fit(seen.device_name or "device"), _split(seen.device_peak_gib, held), seen.device_total_gib))
        held = {}
    if seen.host_peak_gib is not None:
        bars.append(_Bar("host", _split(seen.host_peak_gib, held), seen.host_total_gib))
    return bars


def _strips(bar: _Bar) -> list[tuple[str, dict[str, float]]]:
    """Return the rows of a bar, each a title and shares of its width: the peak against all there is, then its parts."""
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


def _split(peak: float, held: Mapping[str, float]) -> dict[str, float]:
    """Return the parts that are known, and the rest up to the peak; the peak alone where they are more than that."""
    rest = peak - sum(held.values())
    return {**held, "all else": rest} if held and rest >= 0 else {"in use": peak}


def _held(story: RunData) -> dict[str, float]:
    """Return GiB of weights, gradients and optimizer state; nothing where ranks share them, or none is known."""
    if story.plan.choice("parallelism").function in ("fsdp", "pipeline") or story.evidence is None:
        return {}
    newest = story.checkpoints[-1].files if story.checkpoints else {}
    weights, optimizer = newest.get("model.safetensors"), newest.get("optimizer.safetensors")
    total, trainable = story.evidence.num_parameters, story.evidence.num_trainable
    if not weights or optimizer is None or not total or trainable is None:
        return {}
    gib = 2**30
    return {"weights": weights / gib, "gradients": weights * trainable / total / gib, "optimizer": optimizer / gib}


def _of_samples(story: RunData, names: Sequence[str]) -> Drawing | str:
    if story.samples is None:
        return story.missing.get("machine", "not monitored")
    drawn = machine_plots.figures(story.samples, _MACHINE_POINTS, each=False)
    found = next((drawn[name] for name in names if name in drawn), None)
    if found is None:
        return "no GPU was watched"
    known = {"cpu/percent": "CPU", "ram/percent": "RAM"} | {
        f"{gpu}/util": f"{gpu} utilisation" for gpu in story.samples.devices
    }
    means = []
    for key, words in known.items():
        values = story.samples.values.get(key)
        if values is not None and np.isfinite(values).any():
            means.append(f"{words} {np.nanmean(values):.0f} % on average, at most {np.nanmax(values):.0f} %")
    gaps = int(story.samples.gaps().sum())
    note = f"hatched: not monitored ({gaps} time{'s' * (gaps > 1)})" if gaps else ""
    return Drawing(found, "; ".join(means) or "over time", note)


_HELD = (
    "weights and optimizer: the size of their files in the newest checkpoint; gradients: as many bytes as the weights "
    "that are trained"
)
_MACHINE_POINTS = 200
_MEMORY_COLORS = {
    "weights": COLORS[0],
    "gradients": COLORS[5],
    "optimizer": COLORS[2],
    "all else": COLORS[4],
    "in use": COLORS[3],
}
