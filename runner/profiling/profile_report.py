"""Format the results of a profile as text, CSV tables and JSON."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from runner.base.text import format_table
from runner.profiling.device_waits import Wait
from runner.profiling.module_times import NON_MODULES, ModuleTime

TOP = 10  # operators shown
ROWS = 20  # modules shown
KERNEL_NOISE = re.compile(r"^void |at::native::|\(anonymous namespace\)::|binary_internal::")  # not shown in names


@dataclass(frozen=True)
class Operator:
    """Calls and milliseconds of an operator per update; `self` excludes the operators that it calls.

    self_device_ms, device_ms  time of the kernels that it launches
    place                      line of the task that called it; "" if unknown
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
    """A kernel or copy on the device: calls and milliseconds per update."""

    name: str
    calls: float
    ms: float


@dataclass
class OperatorFindings:
    """The findings of torch's profiler; empty if nothing was recorded.

    sort_by  self, total or calls
    trace    Chrome trace, compressed
    """

    sort_by: str = "self"
    rows: list[Operator] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    trace: bytes = b""


@dataclass
class Findings:
    """The findings in a phase; a field is empty or None if it was not measured.

    skipped      warm-up updates before the profile
    update_ms    part of the profile -> milliseconds per update
    num_updates  part of the profile -> number of updates
    """

    phase: str
    device: str
    ranks: int
    skipped: int
    update_ms: dict[str, float]
    num_updates: dict[str, int]
    operators: OperatorFindings = field(default_factory=OperatorFindings)
    modules: list[ModuleTime] = field(default_factory=list)
    waits: list[Wait] | None = None
    notes: list[str] = field(default_factory=list)


def format_profile(findings: Findings, folder: Path, width: int | None = None) -> str:
    """Return the text for the screen in lines of at most `width` characters; None: chosen by the terminal's width."""
    width = width or min(max(shutil.get_terminal_size((120, 24)).columns, 60), 140)
    rank = f", rank 0 of {findings.ranks}" if findings.ranks > 1 else ""
    title = f"profile of phase {findings.phase} on {findings.device}{rank}"
    trace = ["  trace.json.gz opens in ui.perfetto.dev"] if findings.operators.trace else []
    parts = [
        [title, *_format_times(findings)],
        _format_operators(findings.operators, width),
        _format_kernels(findings, width),
        _format_modules(findings, width),
        _format_waits(findings.waits),
        [f"note: {note}" for note in findings.notes],
        [f"files in {folder}", *trace],
    ]
    return "\n\n".join("\n".join(_wrap_line(line, width) for line in part) for part in parts if part)


def make_files(findings: Findings) -> dict[str, bytes]:
    """Return name -> content of the files in profile/, except the text."""
    found: dict[str, bytes] = {"summary.json": (json.dumps(make_summary(findings), indent=2) + "\n").encode()}
    operators = findings.operators
    if operators.trace:
        found["trace.json.gz"] = operators.trace
    if operators.rows:
        found["operators.csv"] = _encode_csv([asdict(row) for row in operators.rows])
    if operators.kernels:
        found["kernels.csv"] = _encode_csv([asdict(row) for row in operators.kernels])
    if findings.modules:
        found["modules.csv"] = _encode_csv([_flatten(row) for row in findings.modules])
    return found


def make_summary(findings: Findings) -> dict[str, Any]:
    """Return the findings as JSON-serializable data."""
    operators = findings.operators
    return {
        "phase": findings.phase,
        "device": findings.device,
        "torch": torch.__version__,
        "ranks": findings.ranks,
        "skipped_updates": findings.skipped,
        "num_updates": findings.num_updates,
        "update_ms": findings.update_ms,
        "operators": [asdict(row) for row in operators.rows[:TOP]],
        "kernels": [asdict(row) for row in operators.kernels[:TOP]],
        "kernels_per_update": sum(row.calls for row in operators.kernels),
        "modules": [asdict(row) for row in findings.modules],
        "waits": None if findings.waits is None else [asdict(row) for row in findings.waits],
        "notes": findings.notes,
    }


def _format_times(findings: Findings) -> list[str]:
    plain = findings.update_ms.get(NO_INSTRUMENT)
    rows = []
    for name, ms in findings.update_ms.items():
        overhead = f"({ms / plain - 1:+.0%})" if plain and ms >= plain else "(within noise)"
        updates = findings.num_updates[name]
        note = overhead if plain and name != NO_INSTRUMENT else ""
        rows.append((name, f"{ms:.2f} ms per update", note, f"{updates} update{'s' * (updates > 1)}"))
    if not rows:
        return []
    skipped = f", after {findings.skipped} warm-up update{'s' * (findings.skipped > 1)}" if findings.skipped else ""
    return [f"time of an update with and without each instrument{skipped}", *format_table(rows, "<><<", indent="  ")]


def _format_operators(found: OperatorFindings, width: int) -> list[str]:
    rows = found.rows[:TOP]
    if not rows:
        return []
    cpu = sum(row.self_cpu_ms for row in found.rows)
    device = sum(kernel.ms for kernel in found.kernels)
    columns: dict[str, list[str]] = {"operator": [_truncate(row.name) for row in rows]}
    columns["calls"] = [_format_calls(row.calls) for row in rows]
    if found.kernels:
        columns["GPU self"] = [f"{row.self_device_ms:.3f}" for row in rows]
        columns["of GPU"] = [_format_share(row.self_device_ms, device) for row in rows]
        columns["GPU total"] = [f"{row.device_ms:.3f}" for row in rows]
    columns["CPU self"] = [f"{row.self_cpu_ms:.3f}" for row in rows]
    columns["of CPU"] = [_format_share(row.self_cpu_ms, cpu) for row in rows]
    columns["CPU total"] = [f"{row.cpu_ms:.3f}" for row in rows]
    by = {"self": "self time", "total": "total time, including what they call", "calls": "calls"}[found.sort_by]
    where = " on the GPU" if found.kernels and found.sort_by != "calls" else ""
    head, *table = _format_columns(columns, width)
    lines = [f"operators by {by}{where}: ms per update, top {len(rows)} of {len(found.rows)}", head]
    for row, line in zip(rows, table, strict=False):
        lines += [line, *(f"      {text}" for text in (row.place, row.shapes) if text)]
    return [*lines, *table[len(rows) :]]


def _format_kernels(findings: Findings, width: int) -> list[str]:
    kernels = findings.operators.kernels
    rows = kernels[:TOP]
    total = sum(kernel.ms for kernel in kernels)
    if not total:
        return []
    columns = {
        "kernel": [_truncate(KERNEL_NOISE.sub("", row.name), 60) for row in rows],
        "calls": [_format_calls(row.calls) for row in rows],
        "GPU": [f"{row.ms:.3f}" for row in rows],
        "share": [_format_share(row.ms, total) for row in rows],
    }
    plain = findings.update_ms.get(NO_INSTRUMENT)
    of_update = f", {total:.2f} ms in total, {total / plain:.0%} of an update" if plain else ""
    title = f"kernels and copies by time: ms per update, top {len(rows)} of {len(kernels)}{of_update}"
    return [title, *_format_columns(columns, width)]


def _format_modules(findings: Findings, width: int) -> list[str]:
    modules = [row for row in findings.modules if row.path not in NON_MODULES]
    if not modules:
        return []
    total = sum(row.own.mean for row in findings.modules)
    slowest = sorted((row for row in modules if row.total.max), key=lambda row: -row.total.mean)[:ROWS]
    selected = [row for row in modules if row in slowest]  # in the order of the model
    rows = [*selected, *(row for row in findings.modules if row.path in NON_MODULES)]
    columns = {
        "module": [_truncate(_tree_name(row)) for row in rows],
        "calls": [_format_calls(row.calls) if row in selected else "" for row in rows],
        "own": [_format_ms(row.own.mean) for row in rows],
        "forward": [_format_ms(row.forward.mean) if row in selected else "" for row in rows],
        "backward": [_format_ms(row.backward.mean) if row in selected else "" for row in rows],
        "total": [_format_ms(row.total.mean) for row in rows],
        "share": [_format_share(row.total.mean, total) for row in rows],
    }
    columns_note = ""
    if findings.num_updates.get("modules timed", 1) > 1:
        columns_note = "; std, min, median, max: of the total"
        for name in ("std", "min", "median", "max"):
            columns[name] = [_format_ms(asdict(row.total)[name]) for row in rows]
    omitted = f", {len(selected)} of {len(modules)}; all in modules.csv" if len(selected) < len(modules) else ""
    most = max(modules, key=lambda row: row.own.mean)
    most_text = (
        f"{most.path or '(model)'} ({most.kind}), {_format_ms(most.own.mean)} ms, {_format_share(most.own.mean, total)}"
    )
    return [
        f"modules: ms per update (own: without submodules{columns_note}){omitted}",
        *_format_columns(columns, width),
        *([f"  most self time: {most_text} of the update"] if most.own.mean else []),
    ]


def _format_waits(waits: Sequence[Wait] | None) -> list[str]:
    if waits is None:
        return []
    own, others = ([row for row in waits if row.in_task is in_task] for in_task in (True, False))
    lines = [f"lines of the task that wait for the device, per update: {'' if own else 'none found'}".rstrip()]
    lines += [f"  {row.place:<44} {row.per_update:g}" for row in own]
    if not own:
        lines.append("  not detected: waits that torch does not report, such as those in torch.distributed")
    if others:
        lines.append("other lines that wait for the device, per update:")
        lines += [f"  {row.place:<44} {row.per_update:g}" for row in others[:5]]
    return lines


def _format_columns(columns: Mapping[str, Sequence[str]], width: int) -> list[str]:
    """Return a header and a line per row; the last columns are dropped if there is no room."""
    rows = [tuple(columns), *zip(*columns.values(), strict=True)]
    return format_table(rows, "<>", droppable=list(columns)[:1:-1], columns=width - 2, indent="  ")


def _tree_name(row: ModuleTime) -> str:
    if row.path in NON_MODULES:
        return row.path
    depth = row.path.count(".") + 1 if row.path else 0
    return f"{'  ' * depth}{row.path.rpartition('.')[2] or '(model)'} {row.kind}"


def _format_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds < 0.1 else f"{1e3 * seconds:.1f}"


def _format_calls(calls: float) -> str:
    return f"{calls:.1f}".removesuffix(".0")


def _format_share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _wrap_line(line: str, width: int) -> str:
    return line if len(line) <= width else textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False)


def _truncate(text: str, width: int = 36) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _flatten(row: ModuleTime) -> dict[str, Any]:
    found: dict[str, Any] = {"module": row.path, "class": row.kind, "calls": row.calls}
    for name in ("own", "forward", "backward", "total"):
        found |= {f"{name}_{figure}_ms": 1e3 * value for figure, value in asdict(row)[name].items()}
    return found


def _encode_csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


NO_INSTRUMENT = "uninstrumented"
