"""The charts of a run: each is drawn from what it left, or says in words why there is nothing to draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.base import partition
from runner.base.errors import AccelRunError
from runner.base.picture import COLORS, new_figure
from runner.base.text import is_number, sized_gib, words_of
from runner.durable.files import listed, mapped
from runner.measure import plots
from runner.measure.results import Results
from runner.observe import bottleneck, machine_plots
from runner.report.run_data import PARTS, Curve, RunData, fit
from runner.report.svg import GRID, MUTED, as_svg, drawing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Drawing:
    """A figure, and what it shows in a sentence with its numbers; `note` stands below it."""

    figure: Any
    described: str
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart as it stands on the page; a wide one has a row of its own."""

    id: str
    title: str
    described: str
    svg: str
    note: str
    wide: bool


@dataclass(frozen=True)
class Missing:
    """What is not on the page, and why."""

    title: str
    reason: str


@dataclass(frozen=True)
class Kind:
    """A row of CHARTS: `draw` returns a Drawing, or the reason why there is none."""

    id: str
    title: str
    draw: Callable[[RunData], Drawing | str]
    wide: bool = False


def charts_of(story: RunData, kinds: Sequence[Kind]) -> tuple[list[Chart], list[Missing]]:
    """Return the charts of a run, and those that cannot be drawn with the reason."""
    found: list[Chart] = []
    missing: list[Missing] = []
    with drawing():
        for kind in kinds:
            try:
                drawn = kind.draw(story)
                if isinstance(drawn, str):
                    missing.append(Missing(kind.title, drawn))
                    continue
                svg = as_svg(drawn.figure, kind.id, kind.title, drawn.described)
            except (ArithmeticError, ValueError) as error:  # figures that no run has written
                missing.append(Missing(kind.title, fit(f"cannot be drawn: {words_of(error)}")))
                continue
            found.append(Chart(kind.id, kind.title, drawn.described, svg, drawn.note, kind.wide))
    return found, missing


# ---------------------------------------------------------------- over updates


def loss(story: RunData) -> Drawing | str:
    """The loss of every row, smoothed, and that of evaluations."""
    curves = story.curves
    raw, val = curves["train/loss"], curves["val/loss"]
    if not len(raw) and not len(val):
        return _no_rows(story, "no rows with a loss")
    figure = new_figure(*_SIZE)
    axes = figure.subplots()
    said = []
    if len(raw):
        line = binned(raw)
        axes.fill_between(line.x, line.low, line.high, color=COLORS[0], alpha=0.18, linewidth=0)
        mark = {"marker": "o", "markersize": 4} if len(raw) == 1 else {}
        axes.plot(line.x, line.mean, color=COLORS[0], linewidth=0.8, alpha=0.45, label="training, each row", **mark)
        smooth = binned(_smoothed_by_phase(story, raw))
        axes.plot(smooth.x, smooth.mean, color=COLORS[0], linewidth=2.0, label="training, smoothed")
        said.append(_from_to("training loss", raw))
    if len(val):
        mark = {"marker": "o", "markersize": 4} if len(val) <= _MARKED else {}
        line = binned(val)
        axes.plot(line.x, line.mean, color=COLORS[1], linewidth=1.6, label="validation", **mark)
        said.append(_from_to("validation loss", val))
    _dress(axes, story, "loss")
    axes.legend(loc="upper right", fontsize=9)
    bad = sum(not math.isfinite(value) for value in raw.y)
    note = f"{bad:,} rows without a finite loss are gaps" if bad else ""
    return Drawing(figure, "; ".join(said), note)


def metrics(story: RunData) -> Drawing | str:
    """The metrics of evaluations besides the loss, each with that of a trivial model."""
    names = [name for name in story.curves.of if name.startswith("val/") and name != "val/loss"]
    if not names:
        return _no_rows(story, "only the loss was evaluated")
    shown = names[:_MOST_METRICS]
    columns = 1 if len(shown) == 1 else 2
    rows = -(-len(shown) // columns)
    figure = new_figure(_SIZE[0], _SIZE[1] if rows == 1 else 1.9 * rows)
    for axes, name in zip(np.ravel(figure.subplots(rows, columns, squeeze=False)), shown, strict=False):
        curve = story.curves[name]
        mark = {"marker": "o", "markersize": 4} if len(curve) <= _MARKED else {}
        line = binned(curve)
        axes.plot(line.x, line.mean, color=COLORS[2], linewidth=1.6, **mark)
        baseline = story.baselines.get(name)
        if baseline is not None:
            axes.axhline(baseline, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.1, label="trivial model")
            axes.legend(fontsize=8)
        _dress(axes, story, "", with_names=columns == 1)
        axes.tick_params(labelsize=9 if columns == 1 else 8)
        axes.set_title(name.removeprefix("val/"), loc="left", fontsize=10)
    for axes in figure.axes[len(shown) :]:
        axes.set_axis_off()
    said = [_from_to(name, story.curves[name]) for name in shown]
    left_out = f"{len(names) - len(shown)} more are in the table" if len(names) > len(shown) else ""
    return Drawing(figure, "; ".join(said), left_out)


def learning_rate(story: RunData) -> Drawing | str:
    """The learning rate of each row."""
    return _line(story, "lr", "learning rate", COLORS[3], from_0=True)


def gradient_norm(story: RunData) -> Drawing | str:
    """The norm of the gradients before they are clipped, with the norm that they are clipped to."""
    drawn = _line(story, "train/grad_norm", "gradient norm", COLORS[4], from_0=True)
    given = story.config.get("max_grad_norm")
    limit = float(given) if given is not None and is_number(given) else None
    if isinstance(drawn, Drawing) and limit is not None:
        axes = drawn.figure.axes[0]
        above = sum(value > limit for value in story.curves["train/grad_norm"].y)
        share = above / max(1, len(story.curves["train/grad_norm"]))
        low, high = axes.get_ylim()
        if limit < _IN_SIGHT * high:
            axes.axhline(limit, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.1)
            axes.set_ylim(low, max(high, 1.08 * limit))
            note = f"dashed: max_grad_norm={limit:g}, to which {share:.0%} of the rows were clipped"
        else:
            note = f"no gradient norm is close to max_grad_norm={limit:g}: nothing was clipped"
        return Drawing(drawn.figure, f"{drawn.described}; {note}", note)
    return drawn


def throughput(story: RunData) -> Drawing | str:
    """Items per second."""
    return _line(story, "perf/items_per_s", "items/s", COLORS[2], from_0=True)


def step_time(story: RunData) -> Drawing | str:
    """Milliseconds of an update, stacked by part."""
    known = {part: story.curves[f"perf/{part}_ms"] for part in PARTS}
    known = {part: curve for part, curve in known.items() if len(curve)}
    if not known:
        return _no_rows(story, "no rows with times by part")
    x = np.array(sorted({update for curve in known.values() for update in curve.x}))
    rows = {part: _on(x, curve) for part, curve in known.items()}
    total = sum(row.sum() for row in rows.values()) or 1.0
    small = [part for part, row in rows.items() if row.sum() < _LEAST_SHARE * total]
    stacked = {part: row for part, row in rows.items() if part not in small}
    if small:
        stacked["other"] = np.sum([rows[part] for part in small], axis=0)
    lines = {part: binned(Curve(x.tolist(), row.tolist()), _STACK_POINTS) for part, row in stacked.items()}
    at = next(iter(lines.values())).x
    figure = new_figure(*_SIZE)
    axes = figure.subplots()
    if len(at) == 1:
        at = np.array([at[0] - 0.5, at[0] + 0.5])
        lines = {part: ChartLine(at, *(np.repeat(line.mean, 2),) * 3) for part, line in lines.items()}
    colors = [_PART_COLORS.get(part, GRID) for part in lines]
    axes.stackplot(
        at, *(np.nan_to_num(line.mean) for line in lines.values()), colors=colors, labels=list(lines), linewidth=0
    )
    _dress(axes, story, "ms per update")
    axes.set_ylim(0, None)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=8)
    shares = sorted(((row.sum() / total, part) for part, row in rows.items()), reverse=True)
    said = ", ".join(f"{part} {share:.0%}" for share, part in shares if share >= _LEAST_SHARE)
    return Drawing(figure, f"time of updates by part: {said}", f"other: {', '.join(small)}" if small else "")


# ---------------------------------------------------------------- where time and memory went


def where_time_went(story: RunData) -> Drawing | str:
    """The whole time in one bar, by kind of work."""
    parts, total = story.parts_s, story.total_s
    if not parts or total <= 0:
        return _no_rows(story, "the run did not measure its time")
    spent = {kind: sum(parts.get(part, 0.0) for part in own) for kind, own in bottleneck.KINDS.items()}
    spent["not accounted for"] = max(0.0, total - sum(spent.values()))
    shown = {
        kind: seconds for kind, seconds in sorted(spent.items(), key=lambda each: -each[1]) if seconds >= 0.005 * total
    }
    figure = new_figure(_SIZE[0], 1.3 + 0.2 * (len(shown) // 4))
    axes = figure.subplots()
    begin = 0.0
    for number, (kind, seconds) in enumerate(shown.items()):
        color = COLORS[number % 6] if kind != "not accounted for" else GRID
        share = seconds / total
        axes.barh(0, share, left=begin, color=color, label=f"{kind} {share:.0%}", edgecolor="white", linewidth=1.0)
        begin += share
    axes.set_xlim(0, max(begin, 1.0))
    axes.set_axis_off()
    figure.legend(loc="outside lower center", ncols=min(3, len(shown)), fontsize=10, handlelength=1.0)
    said = ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in shown.items())
    return Drawing(figure, f"{total:.1f} s: {said}")


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
        return _no_rows(story, "the run did not measure its memory")
    strips = [strip for bar in bars for strip in _strips(bar)]
    heights = [0.3 + 0.6 * len(strips)] * bool(strips) + [2.0] * bool(lines)
    figure = new_figure(_SIZE[0], sum(heights) + 0.4)
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
        figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=3, **_LEGEND)
    if lines:
        axes = panels.pop(0)
        for number, (name, curve) in enumerate(lines.items()):
            line = binned(curve)
            mark = {"marker": "o", "markersize": 4} if np.isfinite(line.mean).sum() == 1 else {}
            axes.plot(line.x, line.mean, color=COLORS[number], linewidth=1.6, label=name, **mark)
        _dress(axes, story, "GiB")
        axes.set_ylim(0, 1.15 * max(np.nanmax(binned(curve).high) for curve in lines.values()) or 1.0)
        axes.legend(fontsize=9, loc="lower right")
        said += [_from_to(f"{name} (GiB)", curve) for name, curve in lines.items()]
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


def ranks(story: RunData) -> Drawing | str:
    """Seconds of each rank by part, and how the samples were dealt where that changed."""
    of_ranks = story.evidence.ranks_s if story.evidence is not None else ()
    rows = [dict(there) for there in of_ranks] or _ranks_of_rows(story)
    if len(rows) < 2:
        if not story.plan:
            return _NO_PLAN
        return "a single process trained" if _world_size(story) < 2 else "the ranks reported no times"
    dealt = story.curves.shares
    parts = [part for part in PARTS if any(row.get(part) for row in rows)]
    heights = [max(1.3, 0.34 * len(rows)), *([1.8] if dealt else [])]
    figure = new_figure(_SIZE[0], sum(heights) + 0.9)
    panels = np.ravel(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False))
    axes = panels[0]
    for row, seconds in enumerate(rows):
        begin = 0.0
        for part in parts:
            spent = seconds.get(part, 0.0)
            axes.barh(row, spent, 0.7, left=begin, color=_PART_COLORS.get(part, GRID), label=part if row == 0 else None)
            begin += spent
    shares = [share for share in listed(mapped(story.plan.get("batch")).get("shares")) if type(share) is int]
    labels = [
        f"rank {n}" + (f"\n{shares[n]} samples" if len(shares) == len(rows) and not dealt else "")
        for n in range(len(rows))
    ]
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("seconds of all updates" if of_ranks else "ms per update, mean of the rows")
    axes.grid(visible=True, axis="x")
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=6, fontsize=8, handlelength=1.0)
    if dealt:
        for rank in range(len(rows)):
            curve = [(at, there[rank]) for at, there in dealt if rank < len(there)]
            panels[1].step(
                [at for at, _ in curve],
                [samples for _, samples in curve],
                where="post",
                color=COLORS[rank % 6],
                label=f"rank {rank}",
                marker="o",
                markersize=3,
            )
        _dress(panels[1], story, "samples per update")
        if len(rows) <= _NUMBERED:
            panels[1].legend(fontsize=8, ncols=-(-len(rows) // 6))
    waits = [row.get("wait", 0.0) / (sum(row.values()) or 1.0) for row in rows]
    said = ", ".join(f"rank {number} waited {share:.0%} of its time" for number, share in enumerate(waits))
    return Drawing(figure, said, "wait: for the other ranks, including communication")


def pipeline(story: RunData) -> Drawing | str:
    """What each device does when in an update, with the times of the stages that were measured."""
    choice = _tree(story.plan, "choices", "parallelism")
    if not choice:
        return _NO_PLAN
    if choice.get("function") != "pipeline":
        return f"the run did not use a pipeline (parallelism={choice.get('name', 'unknown')})"
    rows = [dict(there) for there in story.evidence.ranks_s] if story.evidence is not None else []
    rows = rows or _ranks_of_rows(story)
    batch, options = _tree(story.plan, "batch"), _tree(story.plan, "choices", "parallelism", "options")
    schedule = options.get("schedule", "1f1b")
    try:
        chunks = int(options.get("chunks", 1)) if schedule == "interleaved" else 1
        count = -(-int(batch["global_batch_size"]) // int(batch["micro_batch_size"]))
    except (ArithmeticError, KeyError, TypeError, ValueError):
        return "plan.json does not contain the micro-batches of an update"
    if len(rows) < 2 or not all(row.get("forward") for row in rows):
        return "the stages reported no times"
    if count < 1 or not 1 <= chunks <= _MOST_MICRO:
        return "plan.json does not contain the micro-batches of an update"
    if count > _MOST_MICRO:
        return f"{count} micro-batches are too many to draw"
    updates = (story.evidence.updates if story.evidence is not None else None) or 1
    each_ms = 1e3 / (updates * count * chunks) if story.evidence and story.evidence.ranks_s else 1.0 / (count * chunks)
    stages = [rows[stage % len(rows)] for stage in range(len(rows) * chunks)]
    forward = [each_ms * row.get("forward", 0.0) for row in stages]
    backward = [each_ms * row.get("backward", 0.0) for row in stages]
    try:
        drawn = partition.timeline(schedule, forward, backward, count, chunks)
    except (AssertionError, IndexError, ValueError):
        return f"unknown schedule {fit(str(schedule))}"
    figure = new_figure(10.0, 1.1 + 0.5 * len(drawn))
    axes = figure.subplots()
    for device, works in enumerate(drawn):
        for kind, color, words in (("F", COLORS[5], "forward"), ("B", COLORS[0], "backward")):
            spans = [(begin, end - begin) for work, _, _, begin, end in works if work == kind]
            axes.broken_barh(
                spans,
                (device - 0.38, 0.76),
                facecolor=color,
                edgecolor="white",
                linewidth=0.8,
                label=words if device == 0 else None,
            )
        if count <= _NUMBERED:
            for kind, _, number, begin, end in works:
                axes.text(
                    (begin + end) / 2,
                    device,
                    str(number),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if kind == "B" else _ON_LIGHT,
                )
    axes.set_yticks(range(len(drawn)), [f"device {number}" for number in range(len(drawn))], fontsize=9)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    axes.set_xlabel("ms per update")
    figure.legend(loc="outside upper right", ncols=2, fontsize=8)
    idle = partition.simulated_bubble(schedule, forward, backward, count, chunks)
    measured = story.curves.last("pipeline/measured")
    said = f"{schedule}, {count} micro-batches: devices idle {idle:.0%} of an update with these times"
    said += f", {measured:.0%} measured, including transfers between devices" if measured is not None else ""
    return Drawing(figure, said, said)


def benchmark(story: RunData, folder: Path | None, which: str) -> Drawing | str:
    """A picture of `accel-run benchmark`, of results that lie in the folder of the run or in the one that is named."""
    places = [folder] if folder is not None else [story.path / "benchmarks", story.path]
    found = next((place for place in places if Results(place).csv.is_file()), None)
    if found is None:
        named = f"{folder} has no results.csv" if folder is not None else "its folder has no results"
        return f"{named}; accel-run benchmark task={story.task} creates them; benchmarks=DIR shows them"
    try:
        results = Results(found)
        drawn = plots.figures(results)
    except AccelRunError as error:
        return fit(str(error.problems[0]))
    figure = drawn.get(which)
    if figure is None:
        return "the results contain nothing to compare"
    return Drawing(figure, _BENCHMARKS[which], fit(f"from {found}"))


def kinds_of(benchmarks: Path | None) -> tuple[Kind, ...]:
    """Return CHARTS, and those of the results of a benchmark in that folder, or in the run's own."""
    bars = Kind("ladder", "Techniques measured", lambda story: benchmark(story, benchmarks, "speedup.png"), wide=True)
    heat = Kind("heat", "Where steps were slow", lambda story: benchmark(story, benchmarks, "heatmap.png"), wide=True)
    return (*CHARTS, bars, heat)


# ---------------------------------------------------------------- parts of charts


@dataclass(frozen=True)
class ChartLine:
    """Mean, lowest and highest of the values that make a point."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def binned(curve: Curve, points: int = 320) -> ChartLine:
    """Return a line of at most so many points; a value that is not finite is left out, a point of none is a gap."""
    x, y = np.asarray(curve.x, dtype=np.float64), np.asarray(curve.y, dtype=np.float64)
    y = np.where(np.isfinite(y), y, np.nan)
    size = max(1, -(-len(x) // points))
    if size == 1:
        return ChartLine(x, y, y, y)
    starts = np.arange(0, len(x), size)
    known = np.add.reduceat(np.isfinite(y).astype(np.float64), starts)
    count = np.diff(starts, append=len(x))
    mean = np.where(known > 0, np.add.reduceat(np.nan_to_num(y), starts) / np.maximum(known, 1), np.nan)
    low = np.minimum.reduceat(np.where(np.isnan(y), np.inf, y), starts)
    high = np.maximum.reduceat(np.where(np.isnan(y), -np.inf, y), starts)
    return ChartLine(
        np.add.reduceat(x, starts) / count, mean, np.where(known > 0, low, np.nan), np.where(known > 0, high, np.nan)
    )


def smoothed(curve: Curve, share: float = 0.04) -> Curve:
    """Return the exponential moving mean over this share of the rows, forth and back so that it does not lag behind."""
    keep = 1 - 1 / max(1.0, share * len(curve))
    forth, back = _moving(curve.y, keep), _moving(reversed(curve.y), keep)
    return Curve(curve.x, [(one + other) / 2 for one, other in zip(forth, reversed(back), strict=True)])


def _smoothed_by_phase(story: RunData, curve: Curve) -> Curve:
    """Return the smoothed curve of each phase, one after the other: what one ends with says nothing of the next."""
    ends = [end for _, end in story.curves.phases.values()]
    edges = [0, *np.searchsorted(np.asarray(curve.x), ends, side="right").tolist(), len(curve)]
    parts = [Curve(curve.x[begin:end], curve.y[begin:end]) for begin, end in pairwise(edges) if end > begin]
    return Curve(curve.x, [value for part in parts for value in smoothed(part).y])


def _moving(values: Iterable[float], keep: float) -> list[float]:
    """Return the exponential moving mean without the pull of its first value; NaN before the first that is finite."""
    mean = weight = 0.0
    found = []
    for value in values:
        if math.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(mean / weight if weight else math.nan)
    return found


def _line(story: RunData, key: str, name: str, color: str, *, from_0: bool = False) -> Drawing | str:
    curve = story.curves[key]
    if not any(math.isfinite(value) for value in curve.y):
        return _no_rows(story, f"no row has {key}")
    figure = new_figure(*_SIZE)
    axes = figure.subplots()
    line = binned(curve)
    axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.2, linewidth=0)
    mark = {"marker": "o", "markersize": 3} if len(curve) <= _MARKED else {}
    axes.plot(line.x, line.mean, color=color, linewidth=1.6, **mark)
    _dress(axes, story, name)
    if from_0:
        axes.set_ylim(min(0.0, float(np.nanmin(line.low))), 1.08 * max(0.0, float(np.nanmax(line.high))) or 1.0)
    return Drawing(figure, _from_to(name, curve))


def _dress(axes: Any, story: RunData, label: str, *, with_names: bool = True) -> None:
    """Name the axes, and shade the phases where there are several, and name them where there is room."""
    axes.set_ylabel(label)
    axes.set_xlabel("update")
    axes.locator_params(axis="x", integer=True)
    axes.grid(visible=True)
    axes.set_axisbelow(True)
    phases = story.curves.phases
    whole = max((end for _, end in phases.values()), default=0) or 1
    axes.set_xlim(-0.02 * whole, 1.02 * whole)
    if len(phases) < 2:
        return
    for number, (name, (begin, end)) in enumerate(phases.items()):
        axes.axvspan(begin, end, color=_SHADES[number % len(_SHADES)], linewidth=0, zorder=0)
        if with_names and (end - begin) / whole > 0.012 * (len(name) + 1):
            axes.text(
                (begin + end) / 2,
                1.01,
                name,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontsize=8,
                color=MUTED,
            )


def _from_to(name: str, curve: Curve) -> str:
    known = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
    if not known:
        return f"{name}: no finite value"
    (first_x, first), (last_x, last) = known[0], known[-1]
    if len(known) == 1:
        return f"{name} {last:.4g} at update {last_x:.0f}"
    return f"{name} from {first:.4g} at update {first_x:.0f} to {last:.4g} at update {last_x:.0f}"


def _on(x: Floats, curve: Curve) -> Floats:
    """Return the values of the curve at these updates, 0 where it has none."""
    found = np.zeros(len(x))
    values = np.nan_to_num(np.asarray(curve.y, dtype=np.float64), posinf=0.0, neginf=0.0)
    found[np.searchsorted(x, np.asarray(curve.x, dtype=np.float64))] = np.maximum(values, 0.0)
    return found


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
        title = f"{bar.name}: peak {sized_gib(used)} of {sized_gib(bar.capacity)}, {share:.0%}"
        rows.append((title, {"in use": share, "free": 1 - share}))
    if len(bar.parts) > 1 and used:
        inner = {f"{part}: {sized_gib(gib)}": gib / used for part, gib in bar.parts.items()}
        rows.append(("composition of the peak", inner))
    return rows or [(f"{bar.name}: peak {sized_gib(used)}", {"in use": 1.0})]


def _split(peak: float, held: Mapping[str, float]) -> dict[str, float]:
    """Return the parts that are known, and the rest up to the peak; the peak alone where they are more than that."""
    rest = peak - sum(held.values())
    return {**held, "all else": rest} if held and rest >= 0 else {"in use": peak}


def _held(story: RunData) -> dict[str, float]:
    """Return GiB of weights, gradients and optimizer state; nothing where ranks share them, or none is known."""
    if _tree(story.plan, "choices", "parallelism").get("function") in ("fsdp", "pipeline") or story.evidence is None:
        return {}
    newest = story.checkpoints[-1].files if story.checkpoints else {}
    weights, optimizer = newest.get("model.safetensors"), newest.get("optimizer.safetensors")
    total, trainable = story.evidence.num_parameters, story.evidence.num_trainable
    if not weights or optimizer is None or not total or trainable is None:
        return {}
    gib = 2**30
    return {"weights": weights / gib, "gradients": weights * trainable / total / gib, "optimizer": optimizer / gib}


def _ranks_of_rows(story: RunData) -> list[dict[str, float]]:
    """Return the mean milliseconds of each rank by part over the rows."""
    found: list[dict[str, float]] = []
    while True:
        keys = {part: story.curves[f"rank{len(found)}/{part}_ms"] for part in PARTS}
        row = {part: float(np.nanmean(curve.y)) for part, curve in keys.items() if len(curve)}
        if not row or len(found) >= _MOST_RANKS:
            return found
        found.append(row)


def _of_samples(story: RunData, names: Sequence[str]) -> Drawing | str:
    if story.samples is None:
        return story.missing.get("machine", "nobody watched")
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


def _no_rows(story: RunData, otherwise: str) -> str:
    return story.missing.get("metrics", otherwise)


def _world_size(story: RunData) -> int:
    return len(listed(story.plan.get("ranks"))) or 1


def _tree(tree: Any, *keys: str) -> Mapping[str, Any]:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree if isinstance(tree, Mapping) else {}


_NO_PLAN = "plan.json is missing or damaged"
_ON_LIGHT = "#10202c"  # letters on a colour that is light in both lights of the page
_LEGEND: Mapping[str, Any] = {"fontsize": 8, "handlelength": 1.0, "columnspacing": 1.0}
_HELD = (
    "weights and optimizer: the size of their files in the newest checkpoint; gradients: as many bytes as the weights "
    "that are trained"
)
_SIZE = (6.2, 3.1)  # inches: letters of 10 points can be read where a telephone shows it
_MARKED = 60
_IN_SIGHT = 2.0  # as many times as high as the curve may a limit be that is drawn beside it
_STACK_POINTS = 160
_MACHINE_POINTS = 200
_MOST_METRICS = 6
_MOST_RANKS = 64
_MOST_MICRO = 64
_NUMBERED = 16
_LEAST_SHARE = 0.01
_SHADES = ("#E3EEF8", "#FCEBD8", "#E2F2DF", "#F5E1EE", "#EEEEEE", "#FCF6CF")
_PART_COLORS = {
    "data": COLORS[4],
    "transfer": COLORS[3],
    "forward": COLORS[5],
    "backward": COLORS[0],
    "optimizer": COLORS[2],
    "wait": COLORS[1],
    "evaluation": "#b07aa1",
    "saving": "#9c755f",
    "hooks": "#bab0ac",
    "other": COLORS[7],
}
_MEMORY_COLORS = {
    "weights": COLORS[0],
    "gradients": COLORS[5],
    "optimizer": COLORS[2],
    "all else": COLORS[4],
    "in use": COLORS[3],
}
_BENCHMARKS = {
    "speedup.png": "speedup of each technique over the baseline, with the confidence interval",
    "heatmap.png": "step times of each technique; darker is longer",
}
TIME = Kind("time", "Where the time went", where_time_went)
CHARTS: tuple[Kind, ...] = (
    Kind("loss", "Loss", loss),
    Kind("metrics", "Validation metrics", metrics),
    Kind("throughput", "Throughput", throughput),
    Kind("steps", "Time of an update by part", step_time),
    Kind("lr", "Learning rate", learning_rate),
    Kind("norm", "Gradient norm", gradient_norm),
    Kind("memory", "Memory", memory),
    Kind("ranks", "Balance of the ranks", ranks),
    Kind("pipeline", "Pipeline", pipeline, wide=True),
    Kind("machine", "Machine over time", machine, wide=True),
    Kind("gpus", "GPUs over time", gpus, wide=True),
)
