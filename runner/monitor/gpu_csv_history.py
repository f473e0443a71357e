"""Summarize the rows of a gpu.csv from before this run resumed, without blocking the run.

monitor.json beside it has the sums of the rows that an orderly end has counted; only those after them are read.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from runner.monitor.samples import Covered, EarlierSamples, SampledGpu, SampleTally
from runner.monitor.samples_file import read_rows

PIECE = 1000  # rows per read
SHARE = 0.1  # maximum share of one core


def sum_up(path: Path, size: int, stopping: threading.Event) -> EarlierSamples | None:
    """Return a summary of the first `size` bytes of a gpu.csv, or None if stopped before their end.

    Raises OSError, and DataError if the file was not written by the monitor.
    """
    with path.open("rb") as file:
        header, first = file.readline(), _time_of(file.readline())
        earlier = _counted(path, first, size)
        file.seek(earlier.covered.bytes if earlier.covered else len(header))
        tally, devices, before_s = SampleTally(), dict[str, SampledGpu](), None
        for rows in _pieces(file, size):
            began = time.thread_time()
            samples = read_rows(path, [header, *rows])
            if any(devices.get(name, device) != device for name, device in samples.devices.items()):
                earlier = earlier.then(tally, devices)
                tally, devices, before_s = SampleTally(), {}, None
            tally.take(samples, after_s=before_s)
            devices.update(samples.devices)
            before_s = float(samples.times_s[-1]) if len(samples) else before_s
            if file.tell() < size and stopping.wait((time.thread_time() - began) / SHARE):
                return None
    earlier = earlier.then(tally, devices)
    return EarlierSamples(earlier.tally, earlier.devices, Covered(first, size))


def sums_beside(path: Path) -> Path:
    """Return the summary file of this gpu.csv: monitor.json, or monitor-2.json for gpu-2.csv."""
    return path.with_name(f"monitor{path.stem.removeprefix('gpu')}.json")


def first_time(head: bytes) -> str:
    """Return the time in the first row of the head of a gpu.csv, or "" if it has none."""
    rows = head.split(b"\n")
    return _time_of(rows[1]) if len(rows) > 2 else ""


def _counted(path: Path, first: str, size: int) -> EarlierSamples:
    """Return the sums from an orderly shutdown, if they belong to this file."""
    try:
        earlier = EarlierSamples.from_json(json.loads(sums_beside(path).read_bytes()))
    except (OSError, ValueError):
        return EarlierSamples()
    covered = earlier.covered
    return earlier if covered and covered.first == first and 0 < covered.bytes <= size else EarlierSamples()


def _pieces(file: BinaryIO, size: int) -> Iterator[list[bytes]]:
    """Yield rows up to `size` bytes in order; rows of one timestamp stay together."""
    rows: list[bytes] = []
    while file.tell() < size and (row := file.readline()):
        if len(rows) >= PIECE and _time_of(row) != _time_of(rows[-1]):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def _time_of(row: bytes) -> str:
    return row.partition(b",")[0].decode(errors="replace").strip()
