"""Format the results of a profile as text, CSV tables, a plot and JSON."""

from __future__ import annotations

import csv
import io
import json
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from runner.base.picture import new_figure, png
from runner.base.text import sized
from runner.profiling.device_waits import Wait
from runner.profiling.module_times import BESIDE, ModuleTime, TimeSpread
from runner.profiling.trace_file import MemoryTimeline

TOP = 10  # operators shown
ROWS = 20  # modules shown


@dataclass(frozen=True)
class Operator:
    """An operator in an update: milliseconds, `self` without what it calls; on the device, of the kernels it started.

    place  the line of the task that called it, "" where that is not known
    """

    name: str
    calls: float
    self_cpu_ms: float
    cpu_ms: float
    self_device_ms: float
    device_ms: float
    shapes: str = ""
    place: str = ""


@dataclass(frozen=True)
class Kernel:
    """What a device did in an update, kernels and copies: how often, and milliseconds."""

    name: str
    calls: float
    ms: float


@dataclass
class Findings:
    """What was found in a phase; what is empty or None was not measured.

    update_ms     part of the profile -> what an update took in it; num_updates -> how many of them
    device_calls  call of CUDA in which the host waits -> how often in an update
    table         torch's own, of operators
    """

    phase: str
    device: str
    ranks: int
    skipped: int
    update_ms: dict[str, float]
    num_updates: dict[str, int]
    sort_by: str
    num_recorded: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    data_share: float | None = None
    device_calls: dict[str, float] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    modules: list[ModuleTime] = field(default_factory=list)
    waits: list[Wait] | None = None
    memory: MemoryTimeline | None = None
    notes: list[str] = field(default_factory=list)
    trace: bytes = b""
    table: str = ""


def report(findings: Findings, folder: Path, width: int | None = None) -> str:
    """Return the text for the screen, no line longer than `width`, by default that of the terminal."""
    width = width or min(max(shutil.get_terminal_size((120, 24)).columns, 60), 140)
    of_rank = f", rank 0 of {findings.ranks}" if findings.ranks > 1 else ""
    parts = [
        [f"profile of phase {findings.phase} on {findings.device}{of_rank}", *_times(findings), *_shares(findings)],
        _operators(findings, width),
        _kernels(findings, width),
        _modules(findings, width),
        _waits(findings),
        _memory(findings),
        [f"note: {note}" for note in findings.notes],
        [f"files in {folder}", "  trace.json.gz opens in ui.perfetto.dev"]
        if findings.trace
        else [f"files in {folder}"],
    ]
    return "\n\n".join("\n".join(_fitted(line, width) for line in part) for part in parts if part)


def files(findings: Findings) -> dict[str, bytes]:
    """Return name -> content of what goes into profile/, besides the text."""
    found: dict[str, bytes] = {"summary.json": (json.dumps(summary(findings), indent=2) + "\n").encode()}
    if findings.trace:
        found["trace.json.gz"] = findings.trace
    if findings.operators:
        found["operators.txt"] = findings.table.encode()
        found["operators.csv"] = _csv([asdict(row) for row in findings.operators])
    if findings.kernels:
        found["kernels.csv"] = _csv([asdict(row) for row in findings.kernels])
    if findings.modules:
        found["modules.csv"] = _csv([_flat(row) for row in findings.modules])
    if findings.memory:
        found["memory.csv"] = _memory_csv(findings.memory)
        found["memory.png"] = _picture(findings, findings.memory.thinned(4000))
    return found


def summary(findings: Findings) -> dict[str, Any]:
    """Return the numbers by themselves, as JSON can hold them."""
    memory = findings.memory
    return {
        "phase": findings.phase,
        "device": findings.device,
        "torch": torch.__version__,
        "ranks": findings.ranks,
        "skipped_updates": findings.skipped,
        "num_updates": findings.num_updates,
        "update_ms": findings.update_ms,
        "shares": findings.shares,
        "data_share": findings.data_share,
        "device_calls_per_update": findings.device_calls,
        "operators": [asdict(row) for row in findings.operators[:TOP]],
        "kernels": [asdict(row) for row in findings.kernels[:TOP]],
        "modules": [asdict(row) for row in findings.modules],
        "waits": None if findings.waits is None else [asdict(row) for row in findings.waits],
        "memory_peak_bytes": memory.at_peak() if memory else None,
        "notes": findings.notes,
    }


# ---------------------------------------------------------------- text


def _times(findings: Findings) -> list[str]:
    plain = findings.update_ms.get(AS_IT_IS)
    lines = []
    for name, milliseconds in findings.update_ms.items():
        more = f"  ({_overhead(milliseconds / plain - 1)})" if plain and name != AS_IT_IS else ""
        updates = findings.num_updates[name]
        lines.append(
            f"  {name:<20}{milliseconds:>10.2f} ms per update{more:<16}  {updates} update{'s' * (updates > 1)}"
        )
    skipped = f", after {findings.skipped} that were skipped" if findings.skipped else ""
    if plain and any(milliseconds < plain for milliseconds in findings.update_ms.values()):
        lines.append(
            "  within noise: updates with that instrument took less time than without; the machine was busy, or the"
            " updates differ. Profile more updates, or close other programs."
        )
    return [f"time of an update with and without each instrument{skipped}", *lines] if lines else []


def _overhead(share: float) -> str:
    """Return what an instrument adds; one below 0 is impossible, so updates differ by more than it costs."""
    return f"{share:+.0%}" if share >= 0 else "within noise"


def _shares(findings: Findings) -> list[str]:
    if not findings.shares:
        return []
    words = ", ".join(f"{name} {share:.1%}" for name, share in findings.shares.items())
    line = f"  of the recorded time: {words}"
    if "idle" in findings.shares and findings.data_share is not None:
        line += f"; the host waited for data for {findings.data_share:.1%}"
    lines = [line]
    if findings.device_calls:
        calls = ", ".join(f"{name} {count:.1f}" for name, count in findings.device_calls.items())
        lines.append(f"  calls that wait for the device, per update: {calls}")
    return lines


def _operators(findings: Findings, width: int) -> list[str]:
    rows = findings.operators[:TOP]
    if not rows:
        return []
    has_device = bool(findings.kernels)
    total_cpu = sum(row.self_cpu_ms for row in findings.operators)
    total_device = sum(kernel.ms for kernel in findings.kernels)
    columns: list[tuple[str, list[str]]] = [("calls", [f"{row.calls:.1f}".removesuffix(".0") for row in rows])]
    if has_device:
        columns += [
            ("GPU self", [f"{row.self_device_ms:.3f}" for row in rows]),
            ("share", [f"{row.self_device_ms / total_device:.1%}" if total_device else "" for row in rows]),
            ("GPU total", [f"{row.device_ms:.3f}" for row in rows]),
        ]
    columns += [
        ("CPU self", [f"{row.self_cpu_ms:.3f}" for row in rows]),
        ("share", [f"{row.self_cpu_ms / total_cpu:.1%}" if total_cpu else "" for row in rows]),
        ("CPU total", [f"{row.cpu_ms:.3f}" for row in rows]),
    ]
    by = {"self": "their own time", "total": "their time with what they call", "calls": "calls"}[findings.sort_by]
    where = " on the GPU" if has_device and findings.sort_by != "calls" else ""
    table = _table("operator", [row.name for row in rows], columns, width)
    lines = [f"operators by {by}{where}: ms in an update, top {len(rows)} of {len(findings.operators)}", table[0]]
    for row, line in zip(rows, table[1:], strict=True):
        lines.append(line)
        lines += [f"      {text}" for text in (row.place, row.shapes) if text]
    return lines


def _kernels(findings: Findings, width: int) -> list[str]:
    rows = findings.kernels[:TOP]
    total = sum(kernel.ms for kernel in findings.kernels)
    if not total:
        return []
    columns = [
        ("calls", [f"{row.calls:.1f}".removesuffix(".0") for row in rows]),
        ("GPU", [f"{row.ms:.3f}" for row in rows]),
        ("share", [f"{row.ms / total:.1%}" for row in rows]),
    ]
    head = f"kernels and copies by their time: ms in an update, top {len(rows)} of {len(findings.kernels)}"
    return [head, *_table("kernel", [row.name for row in rows], columns, width)]


def _modules(findings: Findings, width: int) -> list[str]:
    """Return a tree of the modules that take most, with their share of the update."""
    modules = [row for row in findings.modules if row.path not in BESIDE]
    beside = [row for row in findings.modules if row.path in BESIDE]
    if not modules:
        return []
    whole = sum(row.own.mean for row in findings.modules) or 1.0
    most = sorted((row for row in modules if row.total.max), key=lambda row: -row.total.mean)[:ROWS]
    shown = [row for row in modules if row in most]  # in the order of the model
    names = [_tree_name(row) for row in shown] + [row.path for row in beside]
    rows = [*shown, *beside]

    def column(values: Iterable[float]) -> list[str]:
        return [_ms(value) for value in values]

    empty = [""] * len(beside)
    columns = [
        ("calls", [f"{row.calls:.1f}".removesuffix(".0") for row in shown] + empty),
        ("own", column(row.own.mean for row in rows)),
        ("forward", column(row.forward.mean for row in shown) + empty),
        ("backward", column(row.backward.mean for row in shown) + empty),
        ("total", column(row.total.mean for row in rows)),
        ("share", [f"{row.total.mean / whole:.1%}" for row in rows]),
    ]
    spread = [
        ("std", column(row.total.std for row in rows)),
        ("min", column(row.total.min for row in rows)),
        ("median", column(row.total.median for row in rows)),
        ("max", column(row.total.max for row in rows)),
    ]
    of_the_total = "; std to max: of the total" if findings.num_updates.get("modules timed", 1) > 1 else ""
    columns += spread if of_the_total else []
    left_out = f", {len(shown)} of {len(modules)}; all in modules.csv" if len(shown) < len(modules) else ""
    slowest = max(modules, key=lambda row: row.own.mean)
    share = slowest.own.mean / whole
    most_of_its_own = (
        f"{slowest.path or '(model)'} ({slowest.kind}), {_ms(slowest.own.mean)} ms, {share:.1%} of the update"
    )
    return [
        f"modules: ms in an update (own: without the modules inside{of_the_total}){left_out}",
        *_table("module", names, columns, width),
        *([f"  most time of its own: {most_of_its_own}"] if slowest.own.mean else []),
    ]


def _waits(findings: Findings) -> list[str]:
    if findings.waits is None:
        return []
    own = [row for row in findings.waits if row.in_task]
    others = [row for row in findings.waits if not row.in_task]
    lines = [f"lines of the task that wait for the device, per update: {'' if own else 'none found'}".rstrip()]
    lines += [f"  {row.place:<44} {row.per_update:g}" for row in own]
    if not own:
        lines.append(f"  not seen: {_UNSEEN}")
    if others:
        lines.append("lines beside the task that wait for the device, per update:")
        lines += [f"  {row.place:<44} {row.per_update:g}" for row in others[:5]]
    return lines


def _memory(findings: Findings) -> list[str]:
    if findings.memory is None:
        return []
    held = findings.memory.at_peak()
    when = findings.memory.times_ms[findings.memory.peak]
    parts = ", ".join(f"{kind} {sized(nbytes)}" for kind, nbytes in held.items())
    where = "memory of tensors" if findings.device == "cpu" else "GPU memory"
    return [f"{where} at its peak, {when:.1f} ms into an update: {sized(sum(held.values()))}", f"  {parts}"]


def _table(title: str, names: Sequence[str], columns: list[tuple[str, list[str]]], width: int) -> list[str]:
    """Return a head and a line per name, columns right-aligned; the last columns give way where there is no room."""
    columns = list(columns)

    def widths() -> list[int]:
        return [max(len(head), *map(len, cells)) for head, cells in columns]

    longest = max(len(title), *map(len, names))
    while len(columns) > 2 and min(longest, 24) + sum(size + 2 for size in widths()) + 2 > width:
        columns.pop()
    room = max(12, min(longest, width - 2 - sum(size + 2 for size in widths())))
    sizes = widths()
    lines = []
    for index in range(-1, len(names)):
        name = title if index < 0 else names[index]
        cells = [head if index < 0 else cells[index] for head, cells in columns]
        line = f"  {_shortened(name, room):<{room}}" + "".join(
            f"  {cell:>{size}}" for cell, size in zip(cells, sizes, strict=True)
        )
        lines.append(line.rstrip())
    return lines


def _tree_name(row: ModuleTime) -> str:
    name = row.path.rpartition(".")[2] or "(model)"
    depth = row.path.count(".") + 1 if row.path else 0
    return f"{'  ' * depth}{name} {row.kind}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds < 0.1 else f"{1e3 * seconds:.1f}"


def _fitted(line: str, width: int) -> str:
    return line if len(line) <= width else textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False)


def _shortened(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 3]}..."


# ---------------------------------------------------------------- tables and the picture


def _flat(row: ModuleTime) -> dict[str, Any]:
    spreads: Mapping[str, TimeSpread] = {
        "own": row.own, "forward": row.forward, "backward": row.backward, "total": row.total
    }  # fmt: skip
    found: dict[str, Any] = {"module": row.path, "class": row.kind, "calls": row.calls}
    for name, spread in spreads.items():
        found |= {f"{name}_{figure}_ms": 1e3 * value for figure, value in asdict(spread).items()}
    return found


def _csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _memory_csv(memory: MemoryTimeline) -> bytes:
    kinds = list(memory.held)
    rows = zip(memory.times_ms, *(memory.held[kind] for kind in kinds), strict=True)
    names = [f"{kind.replace(' ', '_')}_bytes" for kind in kinds]
    return _csv([dict(zip(["time_ms", *names], row, strict=True)) for row in rows])


def _picture(findings: Findings, memory: MemoryTimeline) -> bytes:
    """Return the bytes of a picture of who holds memory when."""
    unit, size = ("GiB", 2**30) if sum(memory.at_peak().values()) >= 2**30 else ("MiB", 2**20)
    figure = new_figure(9.0, 5.0)
    axes = figure.subplots()
    held = {kind: [value / size for value in row] for kind, row in memory.held.items()}
    axes.stackplot(
        memory.times_ms, *held.values(), labels=list(held), step="post", colors=[_COLORS[kind] for kind in held]
    )
    peak = memory.peak
    total = sum(row[peak] for row in held.values())
    axes.axhline(total, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(
        f"peak {total:.4g} {unit}",
        (memory.times_ms[peak], total),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
    )
    axes.set_xlim(0, memory.times_ms[-1])
    axes.set_ylim(0, total * 1.12)
    axes.set_xlabel("time since the beginning of the update, with every allocation recorded (ms)")
    axes.set_ylabel(f"memory of tensors ({unit})")
    axes.set_title(f"memory in one update of phase {findings.phase} on {findings.device}")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    return png(figure)


_UNSEEN = "what torch does not tell, as waits in torch.distributed and torch.sparse"
AS_IT_IS = "as it is"
_COLORS = {
    "parameters": "#4477aa", "optimizer state": "#66ccee", "gradients": "#228833", "inputs": "#ccbb44",
    "activations": "#ee6677", "temporaries": "#aa3377", "other": "#bbbbbb",
}  # fmt: skip
