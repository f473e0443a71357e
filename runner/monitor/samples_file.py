"""Read and write gpu.csv; rows may be incomplete or damaged."""

from __future__ import annotations

import csv
import math
import os
import sys
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from runner.base.errors import DataError, InputMissing
from runner.host.dirfd import open_parent
from runner.monitor.samples import (
    COLUMNS,
    GPU_COLUMNS,
    MACHINE_COLUMNS,
    MachineSamples,
    Readings,
    SampledGpu,
)


class SamplesFile:
    """Appends samples to gpu.csv, one write per sample; stops after the first error.

    on_loss            called once with the reason if samples are missing from the file
    num_earlier_bytes  size of a file with earlier rows; 0 for a new one
    """

    def __init__(self, path: Path | None, on_loss: Callable[[str], None]) -> None:
        self.num_earlier_bytes = 0
        self._size = 0
        self._path, self._on_loss = path, on_loss
        self._file: int | None = None
        if path is not None:
            self._open(path)

    def add(
        self, timestamp: float, span_s: float, phase: str, devices: Mapping[str, SampledGpu], sample: Readings
    ) -> None:
        """Add a row for each GPU, or one for the CPU if there is none."""
        if self._file is None:
            return
        machine = {name: _format_cell(sample.get(metric)) for name, metric in MACHINE_COLUMNS.items()}
        shared_cells = {"timestamp": f"{timestamp:.3f}", "phase": _escape(phase), "span_s": f"{span_s:.3f}", **machine}
        lines = []
        for gpu, device in (devices or {"cpu": SampledGpu("", "")}).items():
            cells = {name: _format_cell(sample.get(f"{gpu}/{metric}")) for name, metric in GPU_COLUMNS.items()}
            cells |= shared_cells | {"device": gpu, "uuid": device.uuid, "name": _escape(device.name)}
            lines.append(",".join(cells.get(column, "") for column in COLUMNS) + "\n")
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
        if header != list(COLUMNS):
            self._on_loss(f"{path} is not a table of this version of the monitor, so no rows are added; move it away")
            self.close()
            return
        self.num_earlier_bytes = self._size
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
    """Return the samples of a gpu.csv, without damaged rows.

    Raises InputMissing if the file cannot be read, DataError if it was not written by the monitor.
    """
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            # Without the zero bytes that a crash of the machine leaves in unwritten blocks.
            rows = csv.DictReader(line.replace("\0", "") for line in file)
            return _parse_rows(path, rows)
    except FileNotFoundError:
        raise InputMissing("there is no such file", where=str(path), fix="use monitor=on to record it") from None
    except csv.Error as error:
        fix = "remove lines that the monitor did not write"
        raise DataError(f"is damaged: {error}", where=str(path), fix=fix) from None
    except OSError as error:
        fix = "make it readable, or name another run"
        raise InputMissing(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from None


def _parse_rows(path: Path, rows: csv.DictReader[str]) -> MachineSamples:
    import numpy as np  # the monitor of a run, which only writes, does not load it

    if missing := [name for name in ("timestamp", "span_s", "device") if name not in (rows.fieldnames or ())]:
        what = f"is not a table of the monitor: it has no column {missing[0]}"
        raise DataError(what, where=str(path), fix="name a gpu.csv")
    times, spans, phases = array("d"), array("d"), list[str]()
    values: dict[str, array[float]] = {}
    devices: dict[str, SampledGpu] = {}
    num_damaged = 0
    for row in rows:
        try:
            time_s, span_s, readings = _parse_row(row)
        except ValueError:
            num_damaged += 1
            continue
        if not times or time_s != times[-1]:  # the rows of one time are one sample
            times.append(time_s)
            spans.append(span_s)
            phases.append(sys.intern(row.get("phase", "")))
        if row["device"].startswith("gpu"):
            devices[row["device"]] = SampledGpu(sys.intern(row.get("name", "")), sys.intern(row.get("uuid", "")))
        for metric, value in readings.items():
            column = values.setdefault(metric, array("d"))
            if len(column) < len(times):  # each row of a sample repeats the readings of the machine
                _pad(column, len(times) - 1)
                column.append(value)
    for column in values.values():
        _pad(column, len(times))
    notes = (f"{num_damaged} damaged rows of {path.name} were left out",) if num_damaged else ()
    arrays = {metric: np.frombuffer(column) for metric, column in values.items()}
    in_order = dict(sorted(devices.items(), key=lambda device: int(device[0].removeprefix("gpu"))))
    return MachineSamples(np.frombuffer(times), np.frombuffer(spans), tuple(phases), arrays, in_order, notes)


def _parse_row(row: Mapping[str | None, str | None]) -> tuple[float, float, dict[str, float]]:
    """Return time, span and readings. Raises ValueError for missing, surplus and invalid cells."""
    if None in row or None in row.values():
        raise ValueError("the row has more or fewer cells than the header")
    columns = _columns_of_device(str(row["device"]))
    readings = {metric: float(cell) for metric, name in columns.items() if (cell := row.get(name))}
    time_s, span_s = float(row["timestamp"] or ""), float(row["span_s"] or "")
    if not all(map(math.isfinite, (time_s, span_s, *readings.values()))):
        raise ValueError("a number is not finite")
    return time_s, span_s, readings


@cache
def _columns_of_device(device: str) -> dict[str, str]:
    """Return metric -> name of its column, for the rows of a device."""
    machine = {metric: name for name, metric in MACHINE_COLUMNS.items()}
    if not device.startswith("gpu"):
        return machine
    int(device.removeprefix("gpu"))  # raises ValueError for a damaged name
    return machine | {f"{device}/{metric}": name for name, metric in GPU_COLUMNS.items()}


def _pad(column: array[float], size: int) -> None:
    """Fill a column with missing values up to this size."""
    column.extend([math.nan] * (size - len(column)))


def _format_cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")


def _escape(text: str) -> str:
    return text.replace(",", " ").replace("\n", " ")
