"""The results of the ladder: a JSON record per column, and the step times as a CSV table.

A column that was measured later than others keeps its ratio to the baseline beside which it was measured. Times of
different dates must not be compared, even on the same machine, because its load and clocks differ.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from runner.base.errors import ConfigError, DataError, InputMissing, Problem
from runner.base.json_converter import INLINE, decode, encode
from runner.base.json_values import as_dict, parse_object, to_json
from runner.base.text import abbreviate
from runner.durable import files
from runner.plan.environment import collect_environment
from runner.plan.inventory import take_inventory
from runner.tools.doctor.storage import nearest_existing
from runner.tools.measure.comparison_result import TrialOutcome, encode_outcome
from runner.tools.measure.statistics import Ratio
from runner.tools.measure.technique import STEP, is_valid_name

PICTURES = ("steps.png", "heatmap.png", "speedup.png")


@dataclass(frozen=True)
class Usage:
    """Resource usage of an update.

    peak_gib   peak memory of the GPU, or of the process if there is no GPU
    attention  attention kernels that ran; empty if unknown: compiled models hide them
    """

    peak_gib: float | None = None
    optimizer_mib: float | None = None
    attention: str = ""
    device: str = ""
    device_name: str = ""


@dataclass(frozen=True)
class LadderRow:
    """The record of one column.

    members     techniques on the baseline, without those that a later one replaced
    own         speed relative to the previous row of the stack
    start_s     seconds until the run is built
    compile_s   extra seconds of its first updates
    updates_ms  milliseconds of its steps
    """

    mode: str = ""
    members: tuple[str, ...] = ()
    update_ms: float = math.nan
    outcome: TrialOutcome = field(default=TrialOutcome(), metadata=INLINE)
    own: Ratio | None = None
    start_s: float = math.nan
    compile_s: float = math.nan
    usage: Usage = field(default=Usage(), metadata=INLINE)
    updates_ms: tuple[float, ...] = ()
    task: str = ""
    date: str = ""
    hardware: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Return the verdict on its speed, and whether its numerical results differ."""
        ratio = self.outcome.ratio
        wrong = ", but wrong" if self.outcome.is_wrong else ""
        return f"{ratio.verdict}{wrong}" if ratio else ""

    def as_json(self) -> dict[str, Any]:
        """Return the record without its step times."""
        record = {key: value for key, value in encode(self).items() if key not in ("updates_ms", "hardware")}
        return record | encode_outcome(self.outcome) | {"verdict": self.verdict, "is_wrong": self.outcome.is_wrong}


class Results:
    """The files `<prefix>results.json` and `<prefix>results.csv` in a folder, and the plots beside them.

    csv     column `step`, 1 to N, then a column per variant in milliseconds; shorter columns end with empty cells.
            Written for other programs, and not read
    Raises ConfigError if file names cannot begin with the prefix.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        if (folder / f"{prefix}{STEP}").name != f"{prefix}{STEP}":
            problem = Problem("must be the beginning of a file name", f"prefix={prefix}", "use the folder in folder=")
            raise ConfigError(problem)
        self.folder, self.prefix = folder, prefix
        self.csv, self.json = self.file("results.csv"), self.file("results.json")

    def file(self, name: str) -> Path:
        """Return the path of a file in the folder, with the prefix."""
        return self.folder / f"{self.prefix}{name}"

    def check(self) -> None:
        """Raise ConfigError if the folder is not writable. Call it before measuring."""
        existing = nearest_existing(self.folder)
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            what = f"must be a writable folder, but {existing} is not"
            raise ConfigError(Problem(what, f"folder={self.folder}", "choose another folder="))

    def rows(self) -> dict[str, LadderRow]:
        """Return the columns in the order of the table.

        Raises InputMissing if there are no results, DataError if they are damaged, StorageError.
        """
        if not files.exists(self.json):
            raise InputMissing("there are no results yet", where=str(self.json), fix="run accel-run benchmark first")
        content = parse_object(files.read(self.json, at_most=_MAX_BYTES))
        rows = {
            name: decode(LadderRow, as_dict(record)).value
            for name, record in as_dict((content or {}).get("techniques")).items()
        }
        is_valid = content is not None and isinstance(content.get("techniques"), dict)
        if not is_valid or not all(is_valid_name(name) and _are_times(row.updates_ms) for name, row in rows.items()):
            fix = "remove the file, or empty the table: accel-run benchmark reset"
            raise DataError("is damaged, or was written by an earlier version", where=str(self.json), fix=fix)
        return rows

    def put(self, rows: Mapping[str, LadderRow]) -> None:
        """Write these columns, replacing earlier ones with the same names. Each file is replaced atomically.

        Raises DataError, without changes, if the results are damaged, and StorageError.
        """
        assert all(is_valid_name(name) and _are_times(row.updates_ms) for name, row in rows.items())
        now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        before = self.rows() if files.exists(self.json) else {}
        self._write(before | {name: replace(row, date=now, hardware=hardware()) for name, row in rows.items()})

    def init(self) -> None:
        """Create an empty table. Raises ConfigError if there are results, DataError if they are damaged."""
        rows = self.rows() if files.exists(self.json) else {}
        if rows:
            fix = "to delete them: accel-run benchmark reset; to keep them, choose another prefix="
            raise ConfigError(Problem(f"has results already: {abbreviate(list(rows))}", str(self.csv), fix))
        self._write({})

    def reset(self) -> None:
        """Empty the table and remove its plots."""
        self._write({})
        self._remove(PICTURES)

    def clean(self) -> list[Path]:
        """Remove the table, its plots, and their temporary files after a crash; return the removed files."""
        return self._remove(("results.csv", "results.json", *PICTURES)) if files.exists(self.folder) else []

    def _remove(self, names: tuple[str, ...]) -> list[Path]:
        names = tuple(self.file(name).name for name in names)
        temporary = tuple(f"{files.TEMPORARY}{name}-" for name in names)
        paths = [
            self.folder / name for name in files.list_names(self.folder) if name in names or name.startswith(temporary)
        ]
        for path in paths:
            files.remove(path)
        return paths

    def _write(self, rows: Mapping[str, LadderRow]) -> None:
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([STEP, *rows])
        steps: Iterator[tuple[Any, ...]] = zip_longest(*(row.updates_ms for row in rows.values()), fillvalue="")
        writer.writerows([number, *values] for number, values in enumerate(steps, 1))
        records = {
            name: row.as_json() | {"hardware": row.hardware, "updates_ms": list(row.updates_ms)}
            for name, row in rows.items()
        }
        files.make_directory(self.folder)
        files.atomic_write(self.json, to_json({"hardware": hardware(), "techniques": records}, 1))
        files.atomic_write(self.csv, text.getvalue())


def _are_times(values: tuple[float, ...]) -> bool:
    return bool(values) and all(0 < value < math.inf for value in values)


@cache
def hardware() -> dict[str, Any]:
    """Return the machine and its software versions, as in environment.json of a run. Imports torch."""
    return collect_environment(take_inventory())


_MAX_BYTES = 256 << 20  # a thousand columns of ten thousand steps
