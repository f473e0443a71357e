"""Parse and summarize samples by columns: a run of ten days has a million, too many for a loop over rows."""

from __future__ import annotations

import itertools
import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runner.base.errors import DataError
from runner.monitor.nvml import decode_throttle_reasons
from runner.monitor.samples import (
    COUNTERS,
    GPU_COLUMNS,
    MACHINE_COLUMNS,
    Column,
    MachineSamples,
    PhaseSums,
    SampledGpu,
    SampleTally,
    Summary,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]

CHUNK_ROWS = 1 << 9  # they fit in the cache of a core: larger chunks are slower


# ---------------------------------------------------------------- summaries


def summarize_samples(samples: MachineSamples) -> Summary:
    """Return the summary that `SampleTally.add` for each sample leads to."""
    tally = SampleTally()
    phases = np.array(samples.phases, dtype=object)
    segments = np.cumsum(samples.gaps(), dtype=np.intp)  # a number for the samples between two gaps
    counters = {name: column for name, column in samples.values.items() if name.rpartition("/")[2] in COUNTERS}
    increases = {name: _find_increases(column, segments) for name, column in counters.items()}
    counted = {name: _has_counter(column, segments) for name, column in counters.items()}
    for phase in dict.fromkeys(samples.phases):
        _add_columns(tally.of_phase(phase), samples, phases == phase, increases, counted)
    return tally.summary(samples.devices, samples.notes)


def _add_columns(
    sums: PhaseSums,
    samples: MachineSamples,
    selected: Bools,
    increases: Mapping[str, Floats],
    counted: Mapping[str, Bools],
) -> None:
    """Add the selected samples, (N,), to the sums of their phase.

    increases  counter -> (N,) its increase at each sample
    counted    counter -> (N,) whether it was read at the sample, or before
    """
    sums.seconds += _add_up(samples.spans_s[selected])
    sums.samples += int(selected.sum())
    for name, column in samples.values.items():
        device, _, metric = name.partition("/")
        rows = np.flatnonzero(selected & ~np.isnan(column))
        spans, values = samples.spans_s[rows], column[rows]
        if not len(rows):
            continue
        if metric in COUNTERS:
            known = increases[name][rows]
            if metric != "energy_j" or not np.isnan(known).all():
                sums.increases[name] += _add_up(np.nan_to_num(known))
        elif metric == "throttle_reasons":
            sums.known_s[device] += _add_up(spans)
            for bits in np.unique(values).tolist():
                for reason in decode_throttle_reasons(bits):
                    sums.slowed_s[device, reason] += _add_up(spans[values == bits])
        else:
            sums.add_value(name, _add_up(spans), _add_up(spans * values), float(values.min()), float(values.max()))
            energy = f"{device}/energy_j"
            if metric == "power_w":
                uncounted = ~counted[energy][rows] if energy in counted else np.full(len(rows), fill_value=True)
                if uncounted.any():
                    sums.increases[energy] += _add_up((spans * values)[uncounted])


def _add_up(values: Floats) -> float:
    """Return the sum in the order of the samples, as if they were added one by one."""
    return float(np.cumsum(values)[-1]) if len(values) else 0.0


def _find_increases(column: Floats, segments: Ints) -> Floats:
    """Return the increase of a counter at each sample, NaN if unknown: the first of a segment, or after a reset."""
    increases = np.full(len(column), math.nan)
    known = np.flatnonzero(~np.isnan(column))
    changes = np.diff(column[known])
    is_known = (np.diff(segments[known]) == 0) & (changes >= 0)
    increases[known[1:][is_known]] = changes[is_known]
    return increases


def _has_counter(column: Floats, segments: Ints) -> Bools:
    """Return for each sample whether the counter was read at it, or before it in its segment."""
    last = np.maximum.accumulate(np.where(np.isnan(column), -1, np.arange(len(column))))
    has_counter: Bools = (last >= 0) & (segments[last] == segments)
    return has_counter


# ---------------------------------------------------------------- the file


def parse_samples(path: Path, rows: Iterator[list[str]]) -> MachineSamples:
    """Return the samples of the rows of a file. Raises DataError without the columns of the monitor."""
    header = next(rows, [])
    if not {"timestamp", "device"} <= set(header):
        what = "is not a table of the monitor: it has no columns timestamp and device"
        raise DataError(what, where=str(path), fix="name a gpu.csv")
    table = _SampleTable(header)
    num_damaged = 0
    while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
        num_damaged += table.add(chunk)
    devices, notes = table.devices()
    if num_damaged:
        notes.append(f"{num_damaged} damaged rows of {path.name} were left out")
    times, spans = np.frombuffer(table.times), np.frombuffer(table.spans)
    if np.isnan(spans).any():  # an older version: the time since the previous sample, unless there is a gap
        intervals = np.diff(times, prepend=times[:1])
        usual_interval = float(np.median(intervals[1:])) if len(intervals) > 1 else 0.0
        spans = np.where(np.isnan(spans), np.clip(intervals, 0.0, 3 * max(usual_interval, 0.0)), spans)
    times, clock_notes = _make_ascending(times, spans)
    known = {name: gpu for gpu, (name, _) in devices.items()}
    values = {}
    for (gpu, metric), column in table.columns.items():
        _pad(column, len(times))
        values[f"{devices[gpu][0]}/{metric}" if gpu else metric] = np.frombuffer(column)
    in_order = {name: devices[known[name]][1] for name in sorted(known, key=lambda name: (len(name), name))}
    return MachineSamples(times, spans, tuple(table.phases), values, in_order, (*notes, *clock_notes))


def _make_ascending(times: Floats, spans: Floats) -> tuple[Floats, list[str]]:
    """Return times that only increase: samples after the clock was set back follow the earlier ones, after a gap."""
    back = np.flatnonzero(np.diff(times) < 0) + 1
    notes = [f"the clock was set back by {times[at - 1] - times[at]:.0f} s; later samples follow it" for at in back]
    shifts = np.zeros(len(times))
    shifts[back] = times[back - 1] - times[back] + 2 * spans[back] + 1.0  # far enough to be a gap
    return times + np.cumsum(shifts), notes


class _SampleTable:
    """Collects rows; the rows of one time are one sample. A GPU is identified by its UUID, or its number if unknown.

    columns  (GPU, metric), or ("", metric) for the machine -> values; shorter than `times` if the last are missing
    """

    def __init__(self, header: list[str]) -> None:
        self.times, self.spans = array("d"), array("d")
        self.phases: list[str] = []
        self.columns: dict[tuple[str, str], array[float]] = {}
        self._header = header
        self._gpu_columns = [column for column in GPU_COLUMNS if column.name in header]
        self._machine_columns = [column for column in MACHINE_COLUMNS if column.name in header]
        self._gpus: dict[str, tuple[str, SampledGpu]] = {}  # GPU -> its last number
        self._numbers: dict[str, str] = {}  # number -> its last GPU
        self._changes: list[tuple[str, str, str]] = []  # number, GPU before, GPU after
        self._time = ""

    def add(self, rows: Sequence[list[str]]) -> int:
        """Add rows, by columns because a run of ten days has a million; return the number of damaged ones."""
        intact = [row for row in rows if len(row) == len(self._header)]
        try:
            self._add_intact(intact)
        except ValueError:
            intact = list(self._mend(intact))
            self._add_intact(intact)
        return len(rows) - len(intact)

    def _mend(self, rows: Sequence[list[str]]) -> Iterator[list[str]]:
        """Yield the rows without damaged cells, leaving out rows that need them.

        Not needed are the cells of the machine in later rows of a sample, and those of a GPU in a row without one.
        """
        before = self._time
        for row in rows:
            cells = dict(zip(self._header, row, strict=True))
            unread = [] if cells["device"].startswith("gpu") else list(self._gpu_columns)
            unread += self._machine_columns if cells["timestamp"] == before else []
            intact_row = list((cells | {column.name: "" for column in unread}).values())
            try:
                self._parse([intact_row])
            except ValueError:
                continue
            before = cells["timestamp"]
            yield intact_row

    def _parse(self, rows: Sequence[list[str]]) -> tuple[dict[str, Sequence[str]], dict[str, Floats]]:
        """Return the cells and the numbers of each column; those of an empty column are left out.

        Raises ValueError if a cell is not a finite number, or a time is missing.
        """
        cells: dict[str, Sequence[str]] = dict(zip(self._header, zip(*rows, strict=True), strict=True))
        names = ["timestamp", "span_s", *(column.name for column in (*self._machine_columns, *self._gpu_columns))]
        numbers = {name: _parse_cells(cells[name]) for name in names if any(cells.get(name, ()))}
        if not all(cells["timestamp"]):
            raise ValueError("a row has no time")
        return cells, numbers

    def _add_intact(self, rows: Sequence[list[str]]) -> None:
        if not rows:
            return
        cells, numbers = self._parse(rows)
        times = cells["timestamp"]
        is_new = np.array([time != before for time, before in zip(times, (self._time, *times[:-1]), strict=True)])
        self._time = times[-1]
        places = len(self.times) - 1 + np.cumsum(is_new)  # the sample of each row
        new = np.flatnonzero(is_new)
        missing = np.full(len(rows), math.nan)
        self.times.extend(numbers["timestamp"][new].tolist())
        self.spans.extend(numbers.get("span_s", missing)[new].tolist())
        phases = cells.get("phase")
        self.phases += [sys.intern(phases[row]) for row in new.tolist()] if phases else [""] * len(new)
        self._set("", self._machine_columns, numbers, new, places)
        gpus = self._identify(cells)
        for gpu in dict.fromkeys(filter(None, gpus)):
            selected = np.flatnonzero(np.array([one == gpu for one in gpus]))
            self._set(gpu, self._gpu_columns, numbers, selected, places)

    def _set(
        self, gpu: str, columns: Sequence[Column], numbers: Mapping[str, Floats], rows: Ints, places: Ints
    ) -> None:
        """Store the numbers of these rows at their samples; missing ones do not replace others."""
        for column in columns:
            values = numbers.get(column.name)
            if values is None:
                continue
            known = rows[~np.isnan(values[rows])]
            if len(known):
                stored = self.columns.setdefault((gpu, column.metric), array("d"))
                _pad(stored, int(places[known[-1]]) + 1)
                np.frombuffer(stored)[places[known]] = values[known]

    def _identify(self, cells: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the GPU of each row, "" without one; note which GPUs have which numbers."""
        numbers, uuids = cells["device"], cells.get("uuid") or cells["device"]
        gpus = [
            (uuid or number) if number.startswith("gpu") else "" for number, uuid in zip(numbers, uuids, strict=True)
        ]
        names = cells.get("name") or [""] * len(gpus)
        for row, (number, gpu) in enumerate(zip(numbers, gpus, strict=True)):
            before = self._numbers.get(number)
            if gpu and before != gpu:
                self._changes += [(number, before, gpu)] if before else []
                self._numbers[number] = gpu
                self._gpus[gpu] = number, SampledGpu(names[row], uuids[row] if "uuid" in cells else "")
        return gpus

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


def _parse_cells(cells: Sequence[str]) -> Floats:
    """Return numbers, NaN for empty cells. Raises ValueError for other text, and for infinite numbers."""
    numbers = np.array([float(cell) if cell else math.nan for cell in cells])
    if np.isfinite(numbers).sum() != len(cells) - cells.count(""):
        raise ValueError("a number is not finite")
    return numbers


def _pad(column: array[float], size: int) -> None:
    """Fill a column with missing values up to this size."""
    column.extend(itertools.repeat(math.nan, size - len(column)))
