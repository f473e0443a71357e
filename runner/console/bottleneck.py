"""Find the bottleneck of a run from its time breakdown, as a table and as one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runner.base.stopwatch import OUTSIDE
from runner.base.text import format_table

LIMITING_SHARE = 0.10  # parts below this share of the time are not reported as a bottleneck
DOMINANT_SHARE = 0.50  # minimum share of a single bottleneck
IDLE_PERCENT = 50.0  # below this utilization, a computing GPU is waiting for the host
SHOWN_SHARE = 0.005  # smaller parts are combined in the table

Seconds = Mapping[str, float]


def describe_bottleneck(parts_s: Seconds, total_s: float, busy_percent: Mapping[str, float] | None = None) -> str:
    """Return the bottleneck of the run in one sentence, with the supporting numbers.

    A kind of work with at least half of the time is the bottleneck; other kinds are mentioned if they take at least a
    tenth. Start-up that takes at least a tenth, but less than half, is excluded, because its share falls in a longer
    run.

    parts_s       part -> seconds; the rest of `total_s` is unaccounted for
    busy_percent  GPU -> percent of the time in which it computed, if monitored
    """
    if total_s <= 0 or not parts_s:
        return "unknown: the time was not measured"
    seconds_by_kind, scope, startup_note = _sum_by_kind(parts_s, total_s), "", ""
    started_s = seconds_by_kind["start-up"]
    if LIMITING_SHARE * total_s <= started_s < DOMINANT_SHARE * total_s:
        del seconds_by_kind["start-up"]
        total_s -= started_s
        scope, startup_note = " after the first update", f"; starting and the first update took {started_s:.1f} s"
    (largest, seconds), *smaller = sorted(seconds_by_kind.items(), key=lambda kind: -kind[1])
    other_shares = [f"{kind} {spent / total_s:.0%}" for kind, spent in smaller if spent >= LIMITING_SHARE * total_s]
    utilization = _describe_utilization(busy_percent or {}, computes=largest == "compute")
    if seconds < DOMINANT_SHARE * total_s:
        shares = ", ".join([f"{largest} {seconds / total_s:.0%}", *other_shares])
        return f"no single bottleneck{scope}: {shares}{utilization}{startup_note}"
    explanation = MEANINGS.get(largest, "was not accounted for")
    summary = f"{largest}: {seconds / total_s:.0%} of the time{scope} ({seconds:.1f} of {total_s:.1f} s) {explanation}"
    part_shares = [
        f"{part} {parts_s[part] / total_s:.0%}"
        for part in KINDS.get(largest, ())
        if parts_s.get(part, 0.0) >= SHOWN_SHARE * total_s
    ]
    part_list = f" ({', '.join(part_shares).replace('_', ' ')})" if len(part_shares) > 1 else ""
    others_note = f"; also {', '.join(other_shares)}" if other_shares else ""
    return f"{summary}{part_list}{others_note}{utilization}{startup_note}"


def describe_share(kind: str, share: float) -> str:
    """Describe a kind of work that took this share of the time, for reports and advice."""
    return f"{share:.0%} of the time {MEANINGS[kind]}"


def summarize_shares(parts_s: Seconds, total_s: float) -> str:
    """Return the kinds of work with at least a tenth of the time, largest first: `compute 82%, data 12%`."""
    if total_s <= 0 or not parts_s:
        return ""
    kinds = sorted(_sum_by_kind(parts_s, total_s).items(), key=lambda kind: -kind[1])
    return ", ".join(f"{kind} {spent / total_s:.0%}" for kind, spent in kinds if spent >= LIMITING_SHARE * total_s)


def format_time_table(parts_s: Seconds, total_s: float, updates: int = 0) -> list[str]:
    """Return a line per part, largest first: share, seconds and, if each update has the part, milliseconds per update.

    updates  number of timed updates; 0: unknown
    """
    if total_s <= 0 or not parts_s:
        return []
    other_s = total_s - sum(parts_s.values())
    listed = {part: spent for part, spent in parts_s.items() if spent >= SHOWN_SHARE * total_s}
    other_s += sum(spent for part, spent in parts_s.items() if part not in listed)
    lines = sorted(listed.items(), key=lambda part: -part[1])
    lines += [("other", other_s)] if other_s >= SHOWN_SHARE * total_s else []
    rows = []
    for part, spent in lines:
        per_update = (
            "" if part in ONE_TIME_PARTS or not updates else f"{_format_ms(1e3 * spent / updates)} ms per update"
        )
        seconds = f"{spent:,.2f} s" if total_s < 1000 else f"{spent:,.0f} s"
        rows.append((part.replace("_", " "), f"{spent / total_s:.1%}", seconds, per_update))
    return format_table(rows, "<>")


def _format_ms(milliseconds: float) -> str:
    """Format milliseconds with three significant digits, and all digits above 1000."""
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _sum_by_kind(parts_s: Seconds, total_s: float) -> dict[str, float]:
    kinds = {kind: sum(parts_s.get(part, 0.0) for part in parts) for kind, parts in KINDS.items()}
    return {**kinds, "the rest": max(0.0, total_s - sum(parts_s.values()))}


def _describe_utilization(busy_percent: Mapping[str, float], *, computes: bool) -> str:
    """Return GPU utilization, and what it means if compute is the bottleneck."""
    if not busy_percent:
        return ""
    is_single = len(busy_percent) == 1
    gpus = "the GPU was" if is_single else f"{', '.join(busy_percent)} were"
    idle_note = "it waits" if is_single else "they wait"
    is_idle = computes and max(busy_percent.values()) < IDLE_PERCENT
    figures = ", ".join(f"{percent:.0f}%" for percent in busy_percent.values())
    return f"; {gpus} busy {figures} of the time" + (f": {idle_note} for the host's commands" if is_idle else "")


# Kind of work -> its parts.
KINDS: Mapping[str, Sequence[str]] = {
    "compute": ("forward", "backward", "optimizer"),
    "data": ("data",),
    "transfer": ("transfer",),
    "other ranks": ("wait",),
    "start-up": ("starting", "first_update"),
    "evaluation": ("evaluation",),
    "saving": ("saving",),
    "logging": ("logging", "drawing"),
    "hooks": ("hooks",),
    "the end": ("closing",),
}
MEANINGS: Mapping[str, str] = {
    "compute": "was spent computing",
    "data": "was spent waiting for the next batch",
    "transfer": "was spent copying batches to the device",
    "other ranks": "was spent waiting for other ranks and exchanging gradients",
    "start-up": "was spent before the second update, including one-time compilation and tuning",
    "evaluation": "was spent in evaluation",
    "saving": "was spent saving checkpoints",
    "logging": "was spent writing metrics and drawing progress",
    "hooks": "was spent between updates",
    "the end": "was spent closing the run",
}
ONE_TIME_PARTS = (*OUTSIDE, "evaluation", "saving", "other")  # not repeated with every update
