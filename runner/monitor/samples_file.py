"""Read and write gpu.csv; rows may be incomplete, damaged, out of order, or of an older version."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

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
        """Add a row for each GPU, or one row if there is no GPU."""
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
            self._on_loss(
                f"{path} was not written by the monitor, so no rows are appended; to record samples, move the file"
            )
            self.close()
            return
        self._columns, self.num_earlier_bytes = header, self._size
        if missing := [column for column in COLUMNS if column not in header]:
            self._on_note(
                f"{path} was created by an older version and keeps its {len(header)} columns, without "
                f"{abbreviate(missing, 3)}; to record all columns, move the file"
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
    """Return the samples of a gpu.csv, which may be of an older version or have damaged rows.

    Raises InputMissing if the file does not exist, DataError if it was not written by the monitor.
    """
    from runner.monitor.sample_columns import join_samples, open_reader  # numpy

    with open_reader(path) as reader:
        return join_samples(reader)


def _format_cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")


def _escape(text: str) -> str:
    return text.replace(",", " ").replace("\n", " ")
