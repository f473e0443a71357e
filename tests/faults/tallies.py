"""Counts of the fault suites, collected from all processes and printed at the end of the session."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

IS_LONG = os.environ.get("ACCEL_RUN_FAULTS") == "long"
SEED = int(os.environ.get("ACCEL_RUN_SEED", "1"))


@dataclass
class Tally:
    """Counts of a suite.

    tried    injections with a check afterwards
    skipped  reason -> injections that were impossible on this machine
    notes    other figures of the suite: files saved, longest recovery, ...
    """

    suite: str
    tried: int = 0
    num_bad: int = 0
    seconds: float = 0.0
    skipped: Counter[str] = field(default_factory=Counter)
    notes: dict[str, float | str] = field(default_factory=dict)

    def skip(self, reason: str, count: int = 1) -> None:
        """Count injections that are impossible on this machine."""
        self.skipped[reason] += count

    def __str__(self) -> str:
        parts = [f"{self.suite}: {self.tried} tried, {self.num_bad} bad"]
        parts += [f"{count} skipped ({reason})" for reason, count in self.skipped.items()]
        parts += [f"{name} {value}" for name, value in self.notes.items()]
        return ", ".join([*parts, f"seed {SEED}, {self.seconds:.0f} s"])

    def __add__(self, other: Tally) -> Tally:
        """Return the counts of two cases of one suite."""
        largest = {
            name: max(there.notes[name] for there in (self, other) if name in there.notes)
            for name in {**self.notes, **other.notes}
            if name.endswith("_s")
        }
        return Tally(
            self.suite, self.tried + other.tried, self.num_bad + other.num_bad, self.seconds + other.seconds,
            self.skipped + other.skipped, largest,
        )  # fmt: skip


TALLIES: list[Tally] = []  # of this process


def pack() -> list[dict[str, Any]]:
    """Return the counts of this process, to be passed to `unpack` in another one."""
    return [{**asdict(tally), "skipped": dict(tally.skipped)} for tally in TALLIES]  # built-in types can be sent


def unpack(there: Sequence[Mapping[str, Any]]) -> None:
    """Add the counts of another process."""
    TALLIES.extend(Tally(**{**tally, "skipped": Counter(tally["skipped"])}) for tally in there)


def show(write_line: Callable[[str], None]) -> None:
    """Print the counts of all suites, and append them to the file ACCEL_RUN_TALLY if set."""
    suites: dict[str, Tally] = {}
    for tally in TALLIES:  # one line for all cases of a suite
        name = tally.suite.partition("[")[0]
        suites[name] = suites[name] + tally if name in suites else replace(tally, suite=name)
    for suite in suites.values():
        write_line(str(suite))
    tried, num_bad = (sum(getattr(suite, what) for suite in suites.values()) for what in ("tried", "num_bad"))
    skipped = sum(sum(suite.skipped.values()) for suite in suites.values())
    write_line(f"all: {tried} tried, {num_bad} bad, {skipped} skipped")
    target = os.environ.get("ACCEL_RUN_TALLY")
    if target:
        with Path(target).open("a") as file:
            for tally in TALLIES:
                file.write(json.dumps({**vars(tally), "seed": SEED}) + "\n")
