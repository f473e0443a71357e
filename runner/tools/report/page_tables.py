"""Tables of the page about a run: phases, configuration, environment, checkpoints, events."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from runner.base.json_values import as_dict, as_list, is_number
from runner.base.text import format_bytes, format_duration, format_metric
from runner.console import bottleneck
from runner.tools.report.page import PageTable
from runner.tools.report.run_data import RunData


def parse_time(text: Any) -> datetime | None:
    """Parse a time of a record, in the time zone of this machine; None if it is invalid."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (TypeError, ValueError, OverflowError):
        return None


def phases(run: RunData) -> PageTable:
    rows = []
    for name, phase in run.record.result.phases.items():
        made = f"{phase.updates} of {phase.total}" if phase.total else "-"
        values = ", ".join(f"{key} {format_metric(value)}" for key, value in phase.metrics.items())
        peaks = [
            f"{where} {peak:.3g}"
            for where, peak in (("device", phase.peak_device_gib), ("host", phase.peak_host_gib))
            if peak
        ]
        mostly = bottleneck.summarize_shares(phase.parts_s, sum(phase.parts_s.values()))
        state = "finished" if phase.finished else "not finished"
        rows.append((name, phase.kind, state, made, format_duration(phase.seconds), mostly, ", ".join(peaks), values))
    head = ("phase", "kind", "state", "updates", "time", "mostly", "peak GiB", "last metrics")
    if not rows:
        rows = [
            (name or "-", "-", "-", f"{end - begin:,}", "-", "-", "-", "-")
            for name, (begin, end) in run.curves.phases.items()
        ]
    return PageTable("phases", "Phases", head, rows)


def configuration(run: RunData) -> PageTable:
    """Return a folded table of all settings with the values used and reasons."""
    decided: dict[str, Any] = {}  # values of the plan
    for group, choice in run.plan.choices.items():
        decided[group] = choice.name
        decided |= {f"{group}.{key}": value for key, value in choice.options.items()}
    size = run.plan.batch.micro_batch_size
    decided |= {"micro_batch_size": size} if size is not None else {}
    decided |= {"device": run.plan.device} if run.plan.device else {}
    reasons = run.plan.reasons
    rows = [
        (key, format_value(value), format_value(decided.get(key, value)), format_value(reasons.get(key, "")))
        for key, value in run.settings.items()
    ]
    return PageTable("settings", "Settings", ("key", "requested", "used", "why"), rows, folded=f"{len(rows)} keys")


def environment(run: RunData) -> PageTable:
    known = dict(run.environment)
    inventory = dict(as_dict(known.pop("inventory", None)))
    rows = [(key, "none" if value is None else format_value(value)) for key, value in known.items()]
    for device in as_list(inventory.pop("devices", None)):
        if isinstance(device, dict):
            gib = f", {device['memory_bytes'] / 2**30:.1f} GiB" if is_number(device.get("memory_bytes")) else ""
            rows.append((f"{device.get('kind', 'device')} {device.get('index', '')}", f"{device.get('name', '')}{gib}"))
    notes = as_list(inventory.pop("notes", None))
    cpu = inventory.pop("cpu", None)
    if isinstance(cpu, dict):
        memory = f", {cpu['memory_bytes'] / 2**30:.1f} GiB" if is_number(cpu.get("memory_bytes")) else ""
        rows.append(("CPU", f"{cpu.get('name')}, {cpu.get('logical_cores')} of its threads for this run{memory}"))
    for key, value in inventory.items():
        in_words = format_bytes(value) if key.endswith("_bytes") and is_number(value) else format_value(value)
        rows.append((key.removesuffix("_bytes").replace("_", " "), in_words if value is not None else "none"))
    rows += [("note", format_value(note)) for note in notes]
    rows += [("host", run.record.process.host)] if run.record.process.host else []
    return PageTable("environment", "Environment", ("", ""), rows)


def checkpoints(run: RunData) -> PageTable:
    rows = [
        (checkpoint.name, format_bytes(checkpoint.bytes), ", ".join(checkpoint.labels))
        for checkpoint in reversed(run.checkpoints)
    ]
    note = f"accel-run status run={run.reference} verifies them"
    return PageTable("checkpoints", "Checkpoints", ("checkpoint", "size", "label"), rows, note)


def events(run: RunData) -> PageTable:
    rows = []
    for row in run.events:
        when = parse_time(row.get("time"))
        text = row.get("text") or row.get("reason") or row.get("cause")
        others = ", ".join(
            f"{key} {format_value(value)}" for key, value in row.items() if key not in ("time", "kind", "unix_s")
        )
        rows.append(
            (f"{when:%m-%d %H:%M:%S}" if when else "-", format_value(row.get("kind")), str(text or others)[:400])
        )
    shown = rows[:_FIRST_EVENTS] + rows[-_LAST_EVENTS:] if len(rows) > _FIRST_EVENTS + _LAST_EVENTS else rows
    between = len(rows) - len(shown)
    note = f"{between:,} between the first {_FIRST_EVENTS} and these are in events.jsonl" if between else ""
    loud = sum(row[1] not in _QUIET_KINDS for row in rows)
    folded = f"{len(rows):,} event{'s' * (len(rows) != 1)}" if not loud else ""
    return PageTable("events", "Events and warnings", ("time", "kind", "what"), shown, note, folded)


def format_value(value: Any) -> str:
    """Format a value as on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_value(item)}" for key, item in value.items()) or "{}"
    return f"{value:g}" if isinstance(value, float) else str(value)


_QUIET_KINDS = ("start", "phase", "first update", "end", "saving", "saved", "machine")
_FIRST_EVENTS, _LAST_EVENTS = 10, 30
