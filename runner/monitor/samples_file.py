"""Read and write gpu.csv; rows may be incomplete, damaged, out of order, or of an older version."""

from __future__ import annotations

import csv
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from runner.base.errors import DataError, InputMissing
from runner.base.text import abbreviate
from runner.host.dirfd import open_parent
from runner.monitor.samples import (
    COLUMNS,
    FIRST_COLUMNS,
    GPU_COLUMNS,
    MACHINE_COLUMNS,
    MachineSamples,
    Readings,
    SampledGpu,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


class SamplesFile:
    """Appends samples to gpu.csv, one write per sample; stops after the first error.

    on_loss            called once with the reason if samples are missing from the file
    num_earlier_bytes  size of a file with earlier rows; 0 for a new one
    """

    def __init__(self, path: Path | None, on_note: Callable[[str], None], on_loss: Callable[[str], None]) -> None:
        self.num_earlier_bytes = 0
        self._size = 0
        self._path, self._on_note, self._on_loss = path, on_note, on_loss
        self._columns: Sequence[str] = COLUMNS
        self._file: int | None = None
        if path is not None:
            self._open(path)

    def add(
        self, timestamp: float, span_s: float, phase: str, devices: Mapping[str, SampledGpu], sample: Readings
    ) -> None:
        """Add a row for each GPU, or one for the CPU if there is none."""
        if self._file is None:
            return
        machine = {column.name: _format_cell(sample.get(column.metric)) for column in MACHINE_COLUMNS}
        shared_cells = {"timestamp": f"{timestamp:.3f}", "phase": _escape(phase), "span_s": f"{span_s:.3f}", **machine}
        lines = []
        for name, device in (devices or {"cpu": SampledGpu("", "")}).items():
            cells = {column.name: _format_cell(sample.get(f"{name}/{column.metric}")) for column in GPU_COLUMNS}
            cells |= shared_cells | {"device": name, "uuid": device.uuid, "name": _escape(device.name)}
            lines.append(",".join(cells.get(column, "") for column in self._columns) + "\n")
        self._write("".join(lines))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self, path: Path) -> None:
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            with open_parent(path) as (folder, name):
                self._file = os.open(name, flags, 0o600, dir_fd=folder)
        except OSError as error:
            self._on_loss(f"{path} is not written: {error.strerror}")
            return
        self._size = os.fstat(self._file).st_size
        if self._size == 0:
            self._write(",".join(COLUMNS) + "\n")
            return
        header = os.pread(self._file, 4096, 0).partition(b"\n")[0].decode(errors="replace").strip().split(",")
        if not set(FIRST_COLUMNS) <= set(header):
            self._on_loss(f"{path} is not a table of the monitor, so no rows are added; move it away")
            self.close()
            return
        self._columns, self.num_earlier_bytes = header, self._size
        if missing := [column for column in COLUMNS if column not in header]:
            self._on_note(
                f"{path} was started by an older version and keeps its {len(header)} columns, without "
                f"{abbreviate(missing, 3)}; move it away to get all of them"
            )
        if os.pread(self._file, 1, self._size - 1) != b"\n":  # the run was killed during a write
            self._write("\n")

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        content = rest = text.encode()
        try:
            while rest:  # a full disk may accept only part of a write
                rest = rest[os.write(self._file, rest) :]
            self._size += len(content)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            self._on_loss(
                f"{self._path} is no longer written: {error.strerror}; later samples are missing from it, "
                "even if space becomes available again"
            )
            self.close()


def read_samples(path: Path) -> MachineSamples:
    """Return the samples of a gpu.csv, including one of an older version or one with damaged rows.

    Raises InputMissing if the file does not exist, DataError if it was not written by the monitor.
    """
    try:
        with path.open("rb") as file:
            # Without the zero bytes that a crash of the machine leaves in unwritten blocks.
            lines = (line.decode(errors="replace").replace("\0", "") for line in file)
            return _parse_samples(path, csv.reader(lines))
    except FileNotFoundError:
        raise InputMissing("there is no such file", where=str(path), fix="use monitor=on to record it") from None
    except csv.Error as error:
        fix = "remove lines that the monitor did not write"
        raise DataError(f"is damaged: {error}", where=str(path), fix=fix) from None
    except OSError as error:
        fix = "make it readable, or name another run"
        raise InputMissing(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from None


def _parse_samples(path: Path, rows: Iterator[list[str]]) -> MachineSamples:
    import numpy as np

    header = next(rows, [])
    if not {"timestamp", "device"} <= set(header):
        what = "is not a table of the monitor: it has no columns timestamp and device"
        raise DataError(what, where=str(path), fix="name a gpu.csv")
    table = _Table(header)
    num_damaged = 0
    for row in rows:
        try:
            if len(row) != len(header):
                raise ValueError
            table.add(dict(zip(header, row, strict=True)))
        except ValueError:
            num_damaged += 1
    devices, notes = table.devices()
    if num_damaged:
        notes.append(f"{num_damaged} damaged rows of {path.name} were left out")
    times = np.array(table.times, dtype=np.float64)
    spans = np.array(table.spans, dtype=np.float64)
    if np.isnan(spans).any():  # an older version: the time since the previous sample, unless there is a gap
        intervals = np.diff(times, prepend=times[:1])
        usual_interval = float(np.median(intervals[1:])) if len(intervals) > 1 else 0.0
        spans = np.where(np.isnan(spans), np.clip(intervals, 0.0, 3 * max(usual_interval, 0.0)), spans)
    times, clock_notes = _make_ascending(times, spans)
    known = {name: gpu for gpu, (name, _) in devices.items()}
    values = {}
    for (gpu, metric), column in table.columns.items():
        missing = [math.nan] * (len(times) - len(column))
        values[f"{devices[gpu][0]}/{metric}" if gpu else metric] = np.array(column + missing, dtype=np.float64)
    in_order = {name: devices[known[name]][1] for name in sorted(known, key=lambda name: (len(name), name))}
    return MachineSamples(times, spans, tuple(table.phases), values, in_order, (*notes, *clock_notes))


def _make_ascending(times: Floats, spans: Floats) -> tuple[Floats, list[str]]:
    """Return times that only increase: samples after the clock was set back follow the earlier ones, after a gap."""
    import numpy as np

    back = np.flatnonzero(np.diff(times) < 0) + 1
    notes = [f"the clock was set back by {times[at - 1] - times[at]:.0f} s; later samples follow it" for at in back]
    shifts = np.zeros(len(times))
    shifts[back] = times[back - 1] - times[back] + 2 * spans[back] + 1.0  # far enough to be a gap
    return times + np.cumsum(shifts), notes


class _Table:
    """Collects rows; the rows of one time are one sample. A GPU is identified by its UUID, or its number if unknown.

    columns  (GPU, metric), or ("", metric) for the machine -> values; shorter than `times` if the last are missing
    """

    def __init__(self, header: list[str]) -> None:
        self.times: list[float] = []
        self.spans: list[float] = []
        self.phases: list[str] = []
        self.columns: dict[tuple[str, str], list[float]] = {}
        self._gpu_columns = [column for column in GPU_COLUMNS if column.name in header]
        self._machine_columns = [column for column in MACHINE_COLUMNS if column.name in header]
        self._gpus: dict[str, tuple[str, SampledGpu]] = {}  # GPU -> its last number
        self._numbers: dict[str, str] = {}  # number -> its last GPU
        self._changes: list[tuple[str, str, str]] = []  # number, GPU before, GPU after
        self._time = ""

    def add(self, row: dict[str, str]) -> None:
        number, is_new = row["device"], row["timestamp"] != self._time
        gpu = ""
        values = {}
        if is_new:
            time_s, span_s = _parse_number(row["timestamp"]), _parse_number(row.get("span_s") or "0")
            values = {
                ("", column.metric): _parse_number(row[column.name])
                for column in self._machine_columns
                if row[column.name]
            }
        if number.startswith("gpu"):
            gpu = row.get("uuid") or number
            values |= {
                (gpu, column.metric): _parse_number(row[column.name])
                for column in self._gpu_columns
                if row[column.name]
            }
        if is_new:
            self._time = row["timestamp"]
            self.times.append(time_s)
            self.spans.append(span_s if row.get("span_s") else math.nan)
            self.phases.append(row.get("phase", ""))
        for key, value in values.items():
            column = self.columns.setdefault(key, [])
            column += [math.nan] * (len(self.times) - len(column))
            column[-1] = value
        before = self._numbers.get(number)
        if gpu and before != gpu:
            self._changes += [(number, before, gpu)] if before else []
            self._numbers[number] = gpu
            self._gpus[gpu] = number, SampledGpu(row.get("name", ""), row.get("uuid", ""))

    def devices(self) -> tuple[dict[str, tuple[str, SampledGpu]], list[str]]:
        """Return GPU -> (name, description), and notes on changes.

        A GPU is named after its last number, or after a free one if another GPU has taken that number.
        """
        used_names = set(self._numbers)
        free = (name for index in itertools.count() if (name := f"gpu{index}") not in used_names)
        named = {
            gpu: (number if self._numbers[number] == gpu else next(free), device)
            for gpu, (number, device) in self._gpus.items()
        }
        notes = [
            f"{number} was {before} and became {after}"
            + (f"; {before} is {named[before][0]} here" if named[before][0] != number else "")
            for number, before, after in self._changes
        ]
        return named, notes


def _format_cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")


def _escape(text: str) -> str:
    return text.replace(",", " ").replace("\n", " ")


def _parse_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value
