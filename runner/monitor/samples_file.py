"""Read gpu.csv: rows of a file that may be cut short, in disorder, or of several formats."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from runner.base.errors import DataError, InputMissing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
from runner.monitor.samples import (
    GPU_COLUMNS,
    MACHINE_COLUMNS,
    Column,
    MachineSamples,
    SampledGpu,
    free_names,
    renamed,
)

MEND = "remove what is no row of the monitor's"


def read_samples(path: Path) -> MachineSamples:
    """Return what a gpu.csv holds, also one of an older version with fewer columns, or one that a crash left torn.

    Raises InputMissing where there is no such file, DataError where it is not a table of the monitor.
    """
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            return _samples(path, csv.reader(_without_nul(file)))
    except FileNotFoundError:
        raise InputMissing("there is no such file", where=str(path), fix="use monitor=on to have it written") from None
    except csv.Error as error:
        raise DataError(f"is damaged: {error}", where=str(path), fix=MEND) from None
    except OSError as error:
        fix = "make it readable, or name another run"
        raise InputMissing(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from None


def read_rows(path: Path, lines: Iterable[bytes]) -> MachineSamples:
    """Return what these lines of a gpu.csv hold, the first of which is its head. Raises DataError."""
    try:
        return _samples(path, csv.reader(_without_nul(line.decode(errors="replace") for line in lines)))
    except csv.Error as error:
        raise DataError(f"is damaged: {error}", where=str(path), fix=MEND) from None


def _samples(path: Path, rows: Iterator[list[str]]) -> MachineSamples:
    import numpy as np

    header = next(rows, [])
    if not {"timestamp", "device"} <= set(header):
        raise DataError(
            "is not a table of the monitor: it has no columns timestamp and device",
            where=str(path),
            fix="name a gpu.csv",
        )
    place = {name: index for index, name in enumerate(header)}
    table = _Table(
        [(place[column.name], column) for column in (*GPU_COLUMNS, *MACHINE_COLUMNS) if column.name in place]
    )
    num_damaged = 0
    for row in rows:
        try:
            if len(row) != len(header):
                raise ValueError
            table.take(row, place)
        except ValueError:
            num_damaged += 1
    names, devices, notes = table.named()
    if num_damaged:
        notes.append(f"{num_damaged} damaged rows of {path.name} were left out")
    times = np.array(table.times, dtype=np.float64)
    spans = np.array(table.spans, dtype=np.float64)
    if np.isnan(spans).any():  # an older version: a sample stands for the time since the one before, if that was near
        apart = np.diff(times, prepend=times[:1])
        usual = float(np.median(apart[1:])) if len(apart) > 1 else 0.0
        spans = np.where(np.isnan(spans), np.clip(apart, 0.0, 3 * max(usual, 0.0)), spans)
    times, set_back = _in_order(times, spans)
    notes += set_back
    values = {renamed(name, names): np.array(column, dtype=np.float64) for name, column in table.filled().items()}
    return MachineSamples(times, spans, tuple(table.phases), values, devices, tuple(notes))


def _in_order(times: Floats, spans: Floats) -> tuple[Floats, list[str]]:
    """Return times that only grow: what was sampled after the clock was set back comes after what was before, apart."""
    import numpy as np

    back = np.flatnonzero(np.diff(times) < 0) + 1
    notes = [
        f"the clock was set back by {times[at - 1] - times[at]:.0f} s: what follows is put after it" for at in back
    ]
    shifts = np.zeros(len(times))
    shifts[back] = times[back - 1] - times[back] + 2 * spans[back] + 1.0  # far enough to be a gap
    return times + np.cumsum(shifts), notes


class _Table:
    """Rows of one moment become one sample; a column that was never filled is none.

    A GPU is known by its UUID, under whatever number it was watched; by the number where it has none.
    """

    def __init__(self, columns: list[tuple[int, Column]]) -> None:
        machine = {column.name for column in MACHINE_COLUMNS}
        self.of_gpu = [(index, column) for index, column in columns if column.name not in machine]
        self.of_machine = [(index, column) for index, column in columns if column.name in machine]
        self.times: list[float] = []
        self.spans: list[float] = []
        self.phases: list[str] = []
        self.columns: dict[str, list[float]] = {}
        self._known: dict[str, SampledGpu] = {}  # by UUID
        self._at: dict[str, str] = {}  # UUID -> the number under which it was seen last
        self._last: dict[str, str] = {}  # number -> the UUID that was seen last under it
        self._changes: list[tuple[str, str, str]] = []  # number, the UUID before, the UUID after
        self._moment = ""

    def take(self, row: list[str], place: Mapping[str, int]) -> None:
        moment, device = row[place["timestamp"]], row[place["device"]]
        found, is_new = {}, moment != self._moment
        if is_new:
            time_s, span = _number(moment), row[place["span_s"]] if "span_s" in place else ""
            span_s = _number(span) if span else math.nan
            found = {column.metric: _number(row[index]) for index, column in self.of_machine if row[index]}
        if device.startswith("gpu"):
            key = row[place["uuid"]].replace("/", " ") if "uuid" in place else ""
            key = key or device
            found |= {f"{key}/{column.metric}": _number(row[index]) for index, column in self.of_gpu if row[index]}
            self._meet(key, device, row, place)
        if is_new:
            self._moment = moment
            self.times.append(time_s)
            self.spans.append(span_s)
            self.phases.append(row[place["phase"]] if "phase" in place else "")
        for name, value in found.items():
            column = self.columns.setdefault(name, [])
            column += [math.nan] * (len(self.times) - len(column))
            column[-1] = value

    def filled(self) -> dict[str, list[float]]:
        """Return the columns, as long as the table."""
        length = len(self.times)
        return {name: column + [math.nan] * (length - len(column)) for name, column in self.columns.items()}

    def named(self) -> tuple[dict[str, str], dict[str, SampledGpu], list[str]]:
        """Return UUID -> name, name -> device, and what changed in words: the number it had last, if still its own."""
        names = {key: device for key, device in self._at.items() if self._last[device] == key}
        free = free_names(set(names.values()))
        names |= {key: next(free) for key in self._at if key not in names}
        changes = [
            f"{device} was {before} and became {after}"
            + (f"; {before} is {names[before]} here" if names[before] != device else "")
            for device, before, after in self._changes
        ]
        return names, {name: self._known[key] for key, name in sorted(names.items(), key=_by_number)}, changes

    def _meet(self, key: str, device: str, row: list[str], place: Mapping[str, int]) -> None:
        before = self._last.get(device)
        if before == key:
            return
        if before is not None:
            self._changes.append((device, before, key))
        self._last[device], self._at[key] = key, device
        uuid = "" if key == device else key
        self._known[key] = SampledGpu(row[place["name"]] if "name" in place else "", uuid)


def _by_number(named: tuple[str, str]) -> tuple[int, str]:
    return len(named[1]), named[1]


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _without_nul(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines without what a crash of the machine leaves where nothing was written."""
    for line in lines:
        yield line.replace("\0", "")
