"""Tables of the page about a run: phases, configuration, environment, checkpoints, events."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from runner.base.json_values import as_dict, as_list, is_number
from runner.base.text import format_bytes, format_duration, format_metric
from runner.console import bottleneck
from runner.tools.report.page import PageTable
from runner.tools.report.run_data import Checkpoint, RunData


def moment(text: Any) -> datetime | None:
    """Return a time of a record in the time zone of this machine; None for all else."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (TypeError, ValueError, OverflowError):
        return None


def phases(story: RunData) -> PageTable:
    rows = []
    for name, phase in story.record.result.phases.items():
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
            for name, (begin, end) in story.curves.phases.items()
        ]
    return PageTable("phases", "Phases", head, rows)


def configuration(story: RunData) -> list[PageTable]:
    """Return what differs from the defaults, and folded all of it with what was decided and why."""
    if not story.settings.used:
        return []
    differs = [
        (key, word_of(value), word_of(story.settings.defaults.get(key, "not there")))
        for key, value in story.settings.used.items()
        if story.settings.defaults and story.settings.defaults.get(key, _ABSENT) != value
    ]
    title = "Configuration"
    tables = []
    if story.settings.defaults:
        note = "" if differs else "no differences from the defaults of this task"
        rows = differs or [("-", "-", "-")]
        tables.append(
            PageTable("differences", f"{title}: differences from the defaults", ("key", "here", "default"), rows, note)
        )
    decided, reasons = _decided(story), story.plan.reasons
    every = [
        (key, word_of(value), word_of(decided.get(key, value)), word_of(reasons.get(key, "")))
        for key, value in story.settings.used.items()
    ]
    head = ("key", "asked for", "used", "why")
    tables.append(PageTable("settings", "All settings", head, every, folded=f"{len(every)} keys"))
    return tables


def _decided(story: RunData) -> dict[str, Any]:
    """Return key -> the value that the plan decided on."""
    found: dict[str, Any] = {}
    for group, choice in story.plan.choices.items():
        found[group] = choice.name
        found |= {f"{group}.{key}": value for key, value in choice.options.items()}
    size = story.plan.batch.micro_batch_size
    found |= {"micro_batch_size": size} if size is not None else {}
    found |= {"device": story.plan.device} if story.plan.device else {}
    return found


def environment(story: RunData) -> PageTable:
    known = dict(story.environment)
    inventory = dict(as_dict(known.pop("inventory", None)))
    rows = [(key, "none" if value is None else word_of(value)) for key, value in known.items()]
    for each in as_list(inventory.pop("devices", None)):
        if isinstance(each, dict):
            gib = f", {each['memory_bytes'] / 2**30:.1f} GiB" if is_number(each.get("memory_bytes")) else ""
            rows.append((f"{each.get('kind', 'device')} {each.get('index', '')}", f"{each.get('name', '')}{gib}"))
    told = as_list(inventory.pop("notes", None))
    cpu = inventory.pop("cpu", None)
    if isinstance(cpu, dict):
        memory = f", {cpu['memory_bytes'] / 2**30:.1f} GiB" if is_number(cpu.get("memory_bytes")) else ""
        rows.append(("CPU", f"{cpu.get('name')}, {cpu.get('logical_cores')} of its threads for this run{memory}"))
    for key, value in inventory.items():
        in_words = format_bytes(value) if key.endswith("_bytes") and is_number(value) else word_of(value)
        rows.append((key.removesuffix("_bytes").replace("_", " "), in_words if value is not None else "none"))
    rows += [("note", word_of(note)) for note in told]
    rows += [("host", story.record.process.host)] if story.record.process.host else []
    return PageTable("environment", "Environment", ("", ""), rows)


def checkpoints(story: RunData) -> PageTable:
    def state(each: Checkpoint) -> str:
        marks = f" ({', '.join(each.marks)})" if each.marks else ""
        if each.problems is None:
            return f"not verified here{marks}; accel-run status run={story.said}"
        return f"damaged: {'; '.join(each.problems)}" if each.problems else f"valid{marks}"

    rows = [(each.name, format_bytes(each.bytes), state(each)) for each in reversed(story.checkpoints)]
    return PageTable("checkpoints", "Checkpoints", ("checkpoint", "size", "state"), rows)


def events(story: RunData) -> PageTable:
    rows = []
    for row in story.events:
        when = moment(row.get("time"))
        words = row.get("text") or row.get("reason") or row.get("cause")
        others = ", ".join(
            f"{key} {word_of(value)}" for key, value in row.items() if key not in ("time", "kind", "unix_s")
        )
        rows.append((f"{when:%m-%d %H:%M:%S}" if when else "-", word_of(row.get("kind")), str(words or others)[:400]))
    shown = rows[:_FIRST_EVENTS] + rows[-_LAST_EVENTS:] if len(rows) > _FIRST_EVENTS + _LAST_EVENTS else rows
    between = len(rows) - len(shown)
    note = f"{between:,} between the first {_FIRST_EVENTS} and these are in events.jsonl" if between else ""
    loud = sum(row[1] not in _QUIET for row in rows)
    folded = f"{len(rows):,} event{'s' * (len(rows) != 1)}" if not loud else ""
    return PageTable("events", "Events and warnings", ("time", "kind", "what"), shown, note, folded)


def word_of(value: Any) -> str:
    """Return a value as it is typed on a command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(word_of, value))}]"
    if isinstance(value, dict):
        return ", ".join(f"{key} {word_of(item)}" for key, item in value.items()) or "{}"
    return f"{value:g}" if isinstance(value, float) else str(value)


_ABSENT = object()
_QUIET = ("start", "phase", "first update", "end", "saving", "saved", "machine")
_FIRST_EVENTS, _LAST_EVENTS = 10, 30
