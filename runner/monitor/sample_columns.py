"""Parse and summarize samples by columns: a run of ten days has a million samples, too many for a loop over rows."""

from __future__ import annotations

import csv
import itertools
import math
import sys
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from runner.base.errors import DataError, InputMissing
from runner.monitor.nvml import decode_throttle_reasons
from runner.monitor.samples import (
    COUNTERS,
    GPU_COLUMNS,
    MACHINE_COLUMNS,
    MachineSamples,
    PhaseSums,
    SampledGpu,
    SampleTally,
    Summary,
    rename_device,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]
Cells = Mapping[str, Sequence[bytes]]  # column -> a cell per row

BLOCK_BYTES = 1 << 16  # the cells of a block fit in a core's cache; larger blocks are slower
PIECE_SAMPLES = 1 << 13
MAX_LINE_BYTES = 1 << 17
METRICS = frozenset(column.metric for column in (*GPU_COLUMNS, *MACHINE_COLUMNS))


# ---------------------------------------------------------------- summaries


def summarize_samples(samples: MachineSamples) -> Summary:
    """Return the same summary as calling `SampleTally.add` for each sample."""
    tally = SampleTally()
    add_samples(tally, samples)
    return tally.summary(samples.devices, samples.notes)


def add_samples(tally: SampleTally, samples: MachineSamples) -> None:
    """Add samples to a tally, with the same result as calling `SampleTally.add` for each of them."""
    if not len(samples):
        return
    phases = np.array(samples.phases, dtype=object)
    # Samples between two gaps form a segment. Each array begins with an additional element for the earlier samples:
    # segment 0, and the last value of a counter.
    segments = np.append(0, np.cumsum(samples.gaps(), dtype=np.intp))
    missing = np.full(len(samples), math.nan)
    names = dict.fromkeys([*tally.counters, *(name for name in samples.values if name.rpartition("/")[2] in COUNTERS)])
    counters = {
        name: np.append(tally.counters.get(name, math.nan), samples.values.get(name, missing)) for name in names
    }
    increases = {name: _find_increases(column, segments)[1:] for name, column in counters.items()}
    counted = {name: _has_counter(column, segments)[1:] for name, column in counters.items()}
    for phase in dict.fromkeys(samples.phases):
        _add_columns(tally.of_phase(phase), samples, phases == phase, increases, counted)
    last = {name: column[~np.isnan(column)] for name, column in counters.items() if counted[name][-1]}
    tally.counters = {name: float(known[-1]) for name, known in last.items()}


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
    """Return the increase of a counter at each sample, NaN if unknown: at the first of a segment, or after a reset."""
    increases = np.full(len(column), math.nan)
    known = np.flatnonzero(~np.isnan(column))
    changes = np.diff(column[known])
    is_known = (np.diff(segments[known]) == 0) & (changes >= 0)
    increases[known[1:][is_known]] = changes[is_known]
    return increases


def _has_counter(column: Floats, segments: Ints) -> Bools:
    """Return for each sample whether the counter was read at this sample, or earlier in its segment."""
    last = np.maximum.accumulate(np.where(np.isnan(column), -1, np.arange(len(column))))
    has_counter: Bools = (last >= 0) & (segments[last] == segments)
    return has_counter


# ---------------------------------------------------------------- the file


class SampleReader:
    """Reads a file in pieces of limited size.

    A GPU is named after its last number in the file, which is known only at the end; the pieces use temporary names.

    names    after the last piece: temporary name of a GPU -> final name
    devices  after the last piece: final name -> the GPU, in the order of the names
    notes    after the last piece: problems of the file
    """

    def __init__(self, path: Path, blocks: Iterator[bytes], metrics: Collection[str] = METRICS) -> None:
        """Raises DataError if the columns of the monitor are missing.

        blocks   the file in blocks of complete lines, the first of which is the header
        metrics  metrics to read; damaged cells of other metrics are not detected
        """
        header, _, first_rows = next(blocks, b"").partition(b"\n")
        columns = next(csv.reader([header.decode(errors="replace")]), [])
        if not {"timestamp", "device"} <= set(columns):
            what = "was not written by the monitor: it has no columns timestamp and device"
            raise DataError(what, where=str(path), fix="use a gpu.csv")
        self.names: Mapping[str, str] = {}
        self.devices: Mapping[str, SampledGpu] = {}
        self.notes: list[str] = []
        self._path, self._blocks, self._table = (
            path,
            itertools.chain([first_rows], blocks),
            _SampleTable(columns, metrics),
        )
        self._last_s: float | None = None  # time of the last sample so far, as in the file
        self._intervals = np.empty(0)  # seconds between the last PIECE_SAMPLES samples
        self._shift_s = 0.0  # added to later times, because the clock was set back

    def pieces(self) -> Iterator[MachineSamples]:
        """Yield the samples, about PIECE_SAMPLES at a time, and at least one piece."""
        num_damaged = 0
        clock_notes: list[str] = []
        previous_s = None
        is_last = False
        while not is_last:
            block = next(self._blocks, None)
            is_last = block is None
            num_damaged += self._table.add(block) if block else 0
            if not is_last and len(self._table.times) <= PIECE_SAMPLES:
                continue
            times, spans, phases, values = self._table.take(with_last=is_last)
            times = self._make_ascending(times, self._fill_spans(times, spans), clock_notes)
            yield MachineSamples(times, spans, tuple(phases), values, previous_s=previous_s)
            previous_s = float(times[-1]) if len(times) else previous_s
        devices, self.notes = self._table.devices()
        if num_damaged:
            self.notes.append(f"{num_damaged} damaged rows of {self._path.name} were skipped")
        self.notes += clock_notes
        self.names = {gpu: name for gpu, (name, _) in devices.items()}
        in_order = sorted(devices.values(), key=lambda device: (len(device[0]), device[0]))
        self.devices = dict(in_order)

    def _fill_spans(self, times: Floats, spans: Floats) -> Floats:
        """Fill in spans that an older version did not write: time since the previous sample, at most 3 intervals."""
        intervals = np.diff(times, prepend=times[:1] if self._last_s is None else self._last_s)
        known = intervals[1:] if self._last_s is None else intervals
        self._intervals = np.append(self._intervals, known)[-PIECE_SAMPLES:]
        if np.isnan(spans).any():
            usual_interval = float(np.median(self._intervals)) if len(self._intervals) else 0.0
            spans[:] = np.where(np.isnan(spans), np.clip(intervals, 0.0, 3 * max(usual_interval, 0.0)), spans)
        return spans

    def _make_ascending(self, times: Floats, spans: Floats, notes: list[str]) -> Floats:
        """Return times that only increase: if the clock was set back, later samples are moved behind a gap."""
        if not len(times):
            return times
        before = np.append(times[0] if self._last_s is None else self._last_s, times[:-1])
        back = np.flatnonzero(times < before)
        notes += [
            f"the clock was set back by {before[at] - times[at]:.0f} s; the times of later samples are shifted"
            for at in back
        ]
        shifts = np.zeros(len(times))
        shifts[back] = before[back] - times[back] + 2 * spans[back] + 1.0  # far enough to be a gap
        shifts[0] += self._shift_s
        shifts = np.cumsum(shifts)
        self._last_s, self._shift_s = float(times[-1]), float(shifts[-1])
        ascending: Floats = times + shifts
        return ascending


@contextmanager
def open_reader(path: Path, metrics: Collection[str] = METRICS) -> Iterator[SampleReader]:
    """Open a gpu.csv. Raises InputMissing if it cannot be read, DataError if the monitor did not write it."""
    try:
        with path.open("rb") as file:
            yield SampleReader(path, _read_blocks(path, file), metrics)
    except FileNotFoundError:
        raise InputMissing("there is no such file", where=str(path), fix="use monitor=on to record it") from None
    except csv.Error as error:
        raise _report_damage(path, str(error)) from None
    except OSError as error:
        fix = "make it readable, or use another run"
        raise InputMissing(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from None


def _read_blocks(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield the file in blocks of complete lines. Raises DataError for a line that the monitor cannot have written."""
    parts: list[bytes] = []
    while block := file.read(BLOCK_BYTES):
        # Remove the zero bytes that a crash of the machine leaves in unwritten blocks.
        lines, newline, rest = block.replace(b"\0", b"").rpartition(b"\n")
        if newline:
            yield b"".join([*parts, lines, newline])
            parts.clear()
        parts.append(rest)
        if sum(map(len, parts)) > MAX_LINE_BYTES:
            raise _report_damage(path, f"field larger than field limit ({MAX_LINE_BYTES})")
    if last := b"".join(parts):
        yield last + b"\n"


def _report_damage(path: Path, what: str) -> DataError:
    return DataError(f"is damaged: {what}", where=str(path), fix="remove lines that the monitor did not write")


def join_samples(reader: SampleReader) -> MachineSamples:
    """Return all samples of a file."""
    pieces = list(reader.pieces())
    missing = {len(piece): np.full(len(piece), math.nan) for piece in pieces}
    names = dict.fromkeys(name for piece in pieces for name in piece.values)
    return MachineSamples(
        np.concatenate([piece.times_s for piece in pieces]),
        np.concatenate([piece.spans_s for piece in pieces]),
        tuple(itertools.chain.from_iterable(piece.phases for piece in pieces)),
        {
            rename_device(name, reader.names): np.concatenate(
                [piece.values.get(name, missing[len(piece)]) for piece in pieces]
            )
            for name in names
        },
        reader.devices,
        tuple(reader.notes),
    )


class _SampleTable:
    """Collects rows; rows with the same time form one sample. A GPU is identified by its UUID, or else by its number.

    times    times of the samples that `take` has not returned yet
    """

    def __init__(self, header: list[str], metrics: Collection[str]) -> None:
        self.times, self.spans = array("d"), array("d")
        self.phases: list[str] = []
        self._columns: dict[str, Floats] = {}  # metric -> values; NaN after the last sample
        self._header = header
        self._gpu_columns = [one for one in GPU_COLUMNS if one.name in header and one.metric in metrics]
        self._machine_columns = [one for one in MACHINE_COLUMNS if one.name in header and one.metric in metrics]
        self._gpus: dict[bytes, tuple[str, SampledGpu]] = {}  # GPU -> its last number
        self._ids: dict[bytes, str] = {}  # GPU -> its temporary name in the pieces
        self._numbers: dict[str, bytes] = {}  # number -> its last GPU
        self._changes: list[tuple[str, bytes, bytes]] = []  # number, GPU before, GPU after
        self._time = math.nan

    def add(self, block: bytes) -> int:
        """Add the rows of a block; return the number of damaged ones."""
        columns, num_damaged = _split_columns(block, len(self._header))
        cells = dict(zip(self._header, columns, strict=True))
        try:
            self._add_intact(cells)
        except ValueError:
            rows = list(zip(*columns, strict=True))
            intact = list(self._drop_damaged(rows))
            self._add_intact(dict(zip(self._header, zip(*intact, strict=True), strict=True)) if intact else {})
            num_damaged += len(rows) - len(intact)
        return num_damaged

    def take(self, *, with_last: bool) -> tuple[Floats, Floats, list[str], dict[str, Floats]]:
        """Remove and return times, spans, phases and values of the samples.

        with_last  include the last sample; before the end of the file, the next row may belong to it
        """
        end = len(self.times)
        num = end - (not with_last)
        # Columns without new readings, such as those of a GPU that vanished, may have too little space.
        values = {name: self._find_column(name, end)[:num].copy() for name in self._columns}
        taken = np.array(self.times[:num]), np.array(self.spans[:num]), self.phases[:num], values
        del self.times[:num], self.spans[:num], self.phases[:num]
        for column in self._columns.values():
            column[: end - num] = column[num:end]
            column[end - num :] = math.nan
        return taken

    def _drop_damaged(self, rows: Sequence[tuple[bytes, ...]]) -> Iterator[tuple[bytes, ...]]:
        """Yield the rows in which all required cells are intact; other cells are emptied, because they may be damaged.

        Cells with readings of the machine are required only in the first row of a sample, those of a GPU only in a row
        of a GPU.
        """
        before = self._time
        for row in rows:
            cells = dict(zip(self._header, row, strict=True))
            unread = [] if cells["device"].startswith(b"gpu") else list(self._gpu_columns)
            try:
                time = float(cells["timestamp"])
                unread += self._machine_columns if time == before else []
                cells |= {column.name: b"" for column in unread}
                self._parse({name: (cell,) for name, cell in cells.items()})
            except ValueError:
                continue
            before = time
            yield tuple(cells.values())

    def _parse(self, cells: Cells) -> dict[str, Floats]:
        """Return the numbers of each column; empty columns are left out.

        Raises ValueError if a cell is not a finite number, or a time is missing.
        """
        names = ["timestamp", "span_s", *(column.name for column in (*self._machine_columns, *self._gpu_columns))]
        parsed = {name: _parse_cells(cells[name]) for name in names if name in cells}
        numbers = {name: column for name, column in parsed.items() if column is not None}
        if "timestamp" not in numbers or np.isnan(numbers["timestamp"]).any():
            raise ValueError("a row has no time")
        return numbers

    def _add_intact(self, cells: Cells) -> None:
        num_rows = len(cells.get("timestamp", ()))
        if not num_rows:
            return
        numbers = self._parse(cells)
        times = numbers["timestamp"]
        is_new = times != np.append(self._time, times[:-1])
        self._time = float(times[-1])
        new = np.flatnonzero(is_new)
        begin, end = len(self.times), len(self.times) + len(new)
        places = begin - 1 + np.cumsum(is_new)  # the sample of each row
        self.times.frombytes(times[new].tobytes())
        self.spans.frombytes(numbers.get("span_s", np.full(num_rows, math.nan))[new].tobytes())
        self.phases += _pick_texts(cells.get("phase", ()), new)
        for column in self._machine_columns:
            if column.name in numbers:
                self._find_column(column.metric, end)[begin:end] = numbers[column.name][new]
        gpus = self._identify(cells)
        for gpu in filter(None, dict.fromkeys(gpus)):
            is_sole = len(new) == num_rows == gpus.count(gpu)  # each row is a sample of this GPU: a slice is faster
            rows = np.flatnonzero([one == gpu for one in ([] if is_sole else gpus)])
            for column in self._gpu_columns:
                if column.name not in numbers:
                    continue
                values, name = numbers[column.name], f"{self._ids[gpu]}/{column.metric}"
                if is_sole:
                    self._find_column(name, end)[begin:end] = values
                elif len(known := rows[~np.isnan(values[rows])]):  # a missing value does not replace a reading
                    self._find_column(name, end)[places[known]] = values[known]

    def _find_column(self, name: str, num_samples: int) -> Floats:
        """Return the values of a metric, with space for this number of samples."""
        column = self._columns.get(name, np.empty(0))
        if len(column) < num_samples:
            larger = np.full(num_samples + PIECE_SAMPLES, math.nan)
            larger[: len(column)] = column
            self._columns[name] = column = larger
        return column

    def _identify(self, cells: Cells) -> Sequence[bytes]:
        """Return the GPU of each row, empty if it has none; record the number of each GPU."""
        numbers = cells["device"]
        uuids = cells.get("uuid") or numbers
        names = cells.get("name") or [b""] * len(numbers)
        if numbers.count(numbers[0]) == uuids.count(uuids[0]) == len(numbers):
            return [self._note_gpu(numbers[0], uuids[0], names[0])] * len(numbers)
        return [self._note_gpu(*row) for row in zip(numbers, uuids, names, strict=True)]

    def _note_gpu(self, number: bytes, uuid: bytes, name: bytes) -> bytes:
        """Return the GPU of a row, empty if it has none; record that the GPU has this number."""
        if not number.startswith(b"gpu"):
            return b""
        gpu, as_text = uuid or number, _decode(number)
        before = self._numbers.get(as_text)
        if before != gpu:
            self._changes += [(as_text, before, gpu)] if before else []
            self._numbers[as_text] = gpu
            self._ids.setdefault(gpu, f"id{len(self._ids)}")
            self._gpus[gpu] = as_text, SampledGpu(_decode(name), _decode(uuid) if "uuid" in self._header else "")
        return gpu

    def devices(self) -> tuple[dict[str, tuple[str, SampledGpu]], list[str]]:
        """Return temporary name in the pieces -> (final name, GPU), and notes on GPUs that changed their number.

        A GPU is named after its last number, or after a free one if another GPU has taken that number.
        """
        used_names = set(self._numbers)
        free = (name for index in itertools.count() if (name := f"gpu{index}") not in used_names)
        named = {
            gpu: (number if self._numbers[number] == gpu else next(free), device)
            for gpu, (number, device) in self._gpus.items()
        }
        notes = [
            f"{number} changes from {_decode(before)} to {_decode(after)}"
            + (f"; {_decode(before)} is shown as {named[before][0]}" if named[before][0] != number else "")
            for number, before, after in self._changes
        ]
        return {self._ids[gpu]: device for gpu, device in named.items()}, notes


def _split_columns(block: bytes, num_columns: int) -> tuple[Sequence[Sequence[bytes]], int]:
    """Return the cells of each column, and the number of rows that were left out: they have more or fewer cells."""
    cells = block.replace(b"\n", b"\n,").split(b",")
    cells.pop()
    last = cells[num_columns - 1 :: num_columns]
    is_escaped = b'"' in block or b"\r" in block
    # If each cell of the last column, and no other one, ends a line, every line has this number of cells.
    is_intact = len(cells) == len(last) * num_columns and b"".join(last).count(b"\n") == block.count(b"\n") == len(last)
    if is_intact and not is_escaped:
        cells[num_columns - 1 :: num_columns] = [cell[:-1] for cell in last]
        return [cells[column::num_columns] for column in range(num_columns)], 0
    if is_escaped:  # another program has rewritten the file, with quotes or CRLF; Latin-1 has a character for each byte
        texts = csv.reader(block.decode("latin-1").split("\n")[:-1])
        rows = [[cell.encode("latin-1") for cell in row] for row in texts]
    else:
        rows = [line.split(b",") for line in block.splitlines()]
    intact = [row for row in rows if len(row) == num_columns]
    columns = list(zip(*intact, strict=True)) if intact else [()] * num_columns
    return columns, len(rows) - len(intact)


def _parse_cells(cells: Sequence[bytes]) -> Floats | None:
    """Return numbers, NaN for empty cells; None if all are empty.

    Raises ValueError for other text, and for infinite numbers.
    """
    if cells[0] == cells[-1] and cells.count(cells[0]) == len(cells):  # faster, and many columns are constant
        if not cells[0]:
            return None
        numbers = np.full(len(cells), float(cells[0]))
        num_empty = 0
    elif num_empty := cells.count(b""):
        numbers = np.array([float(cell) if cell else math.nan for cell in cells])
    else:
        numbers = np.array(list(map(float, cells)))
    if np.isfinite(numbers).sum() != len(cells) - num_empty:
        raise ValueError("a number is not finite")
    return numbers


def _pick_texts(cells: Sequence[bytes], rows: Ints) -> list[str]:
    """Return the strings in these rows; equal strings are the same object."""
    if not cells or cells.count(cells[0]) == len(cells):
        return [_decode(cells[0]) if cells else ""] * len(rows)
    return [_decode(cells[row]) for row in rows.tolist()]


def _decode(cell: bytes) -> str:
    return sys.intern(cell.decode(errors="replace"))
