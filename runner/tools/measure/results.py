"""The results of suite=ladder: a JSON record per variant, and the step times as a CSV table with a column per variant.

Variants that were measured together form a session with its own baseline. Times of different sessions must not be
compared, even on the same machine, because its load and clocks differ.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from runner.base.errors import ConfigError, DataError, InputMissing, Problem, RunInUse
from runner.base.json_converter import INLINE, decode, encode
from runner.base.json_values import as_dict, parse_object, to_json
from runner.base.text import abbreviate
from runner.durable import files
from runner.plan.environment import collect_environment
from runner.plan.inventory import take_inventory
from runner.tools.doctor.storage import nearest_existing
from runner.tools.measure.comparison_result import TrialOutcome, encode_outcome
from runner.tools.measure.statistics import Ratio
from runner.tools.measure.technique import BASELINE, STEP, is_valid_name

_TABLE_FIX = "use a file that `accel-run benchmark` has written"
PICTURES = ("steps.png", "heatmap.png", "speedup.png")


@dataclass(frozen=True)
class Usage:
    """Resource usage of an update.

    peak_gib   peak memory of the GPU, or of the process if there is no GPU
    attention  attention kernels that ran; empty if unknown, because compiled models hide them
    """

    peak_gib: float | None = None
    optimizer_mib: float | None = None
    attention: str = ""
    device: str = ""
    device_name: str = ""


@dataclass(frozen=True)
class LadderRow:
    """The record of one variant: a technique alone, or a stack of techniques.

    members     techniques that are added to the baseline, without those that a later one replaced
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
    session: int = 1
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
            With several sessions, each name ends in ` (session N)`, which selects the baseline of the column.
            Written for other programs; read only for plots of a CSV file without a JSON file, such as a published one
    Raises ConfigError if file names cannot begin with the prefix.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        if (folder / f"{prefix}{STEP}").name != f"{prefix}{STEP}":
            problem = Problem(
                "must be the beginning of a file name", f"prefix={prefix}", "set the folder with folder=DIR"
            )
            raise ConfigError(problem)
        self.folder, self.prefix = folder, prefix
        self.csv, self.json = self.file("results.csv"), self.file("results.json")

    def file(self, name: str) -> Path:
        """Return the path of a file in the folder, with the prefix."""
        return self.folder / f"{self.prefix}{name}"

    @property
    def exists(self) -> bool:
        """Return whether there is a table, which may be empty."""
        return files.exists(self.json) or files.exists(self.csv)

    def check(self) -> None:
        """Raise ConfigError if the folder is not writable. Call it before measuring."""
        existing = nearest_existing(self.folder)
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            what = f"must be a writable folder, but {existing} is not"
            raise ConfigError(Problem(what, f"folder={self.folder}", "use another folder=DIR"))

    def rows(self) -> dict[str, LadderRow]:
        """Return the columns in the order of the table; if there is only a CSV file, they have step times only.

        Raises InputMissing if there are no results, DataError if they are damaged, StorageError.
        """
        if not files.exists(self.json) and files.exists(self.csv):
            return self._read_csv()
        if not files.exists(self.json):
            raise InputMissing("there are no results yet", where=str(self.json), fix="run accel-run benchmark first")
        content = parse_object(files.read(self.json, at_most=_MAX_BYTES))
        rows = {
            name: decode(LadderRow, as_dict(record)).value
            for name, record in as_dict((content or {}).get("techniques")).items()
        }
        is_valid = content is not None and isinstance(content.get("techniques"), dict)
        if not is_valid or not all(_is_column(name) and _are_times(row.updates_ms) for name, row in rows.items()):
            fix = "remove the file, or empty the table with accel-run benchmark reset"
            raise DataError("is damaged, or was written by an earlier version", where=str(self.json), fix=fix)
        return rows

    def _read_csv(self) -> dict[str, LadderRow]:
        """Return the columns of the CSV file, under their names in the file and without those that are empty."""
        text = files.read(self.csv, at_most=_MAX_BYTES).decode("utf-8", errors="replace")
        try:
            columns = _parse_csv(text)
        except (csv.Error, ValueError) as error:
            what = f"is not a table of times in milliseconds: {error}"
            raise DataError(what, where=str(self.csv), fix=_TABLE_FIX) from None
        sessions = {name: int(found[1]) for name in columns if (found := _SESSION.search(name))}
        if unknown := [name for name in columns if sessions and name not in sessions]:  # written by an earlier version
            what = f"has columns of several sessions, but does not state the session of {abbreviate(unknown)}"
            fix = "use the results.json of the same measurements, or append (session N) to the name of each column"
            raise DataError(what, where=str(self.csv), fix=fix)
        return {name: LadderRow(updates_ms=times, session=sessions.get(name, 1)) for name, times in columns.items()}

    def put(self, rows: Mapping[str, LadderRow], *, session: int | None = None, is_main: bool = True) -> int:
        """Write these columns, replacing earlier ones with the same names; return the number of their session.

        A baseline is kept as long as any column of its session. If another session takes the name `baseline`, the
        earlier one is renamed to `session_baseline`.

        session  number of the session, from an earlier call; None: a new session
        is_main  False: an existing baseline keeps the name `baseline`, and the baseline of this session is renamed
        Each file is replaced atomically. Raises DataError, without changes, if the results are damaged, RunInUse if
        another process does not finish its change, and StorageError.
        """
        assert all(_is_column(name) and _are_times(row.updates_ms) for name, row in rows.items())
        now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        with self._locked():
            before = self.rows() if files.exists(self.json) else {}
            session = session or max((row.session for row in before.values()), default=0) + 1
            rows = {name: replace(row, session=session, date=now, hardware=hardware()) for name, row in rows.items()}
            earlier = before.get(BASELINE)
            if BASELINE in rows and earlier is not None and earlier.session != session:
                if is_main:
                    before = _rename_baseline(before, session_baseline(earlier.session))
                else:
                    rows = _rename_baseline(rows, session_baseline(session))
            after = before | dict(rows)
            used = {row.session for name, row in after.items() if name != session_baseline(row.session)}
            self._write({name: row for name, row in after.items() if row.session in used})
            return session

    def init(self) -> None:
        """Create an empty table. Raises ConfigError if there are results, DataError if they are damaged."""
        with self._locked():
            rows = self.rows() if files.exists(self.json) else {}
            if rows:
                fix = "to delete them, use accel-run benchmark reset; to keep them, use another prefix=NAME"
                raise ConfigError(Problem(f"already has results: {abbreviate(list(rows))}", str(self.csv), fix))
            self._write({})

    def reset(self) -> None:
        """Empty the table and remove its plots."""
        with self._locked():
            self._write({})
            self._remove(PICTURES)

    def clean(self) -> list[Path]:
        """Remove the table, its plots, and their temporary files after a crash; return the removed files."""
        if not files.exists(self.folder):
            return []
        with self._locked():
            removed = self._remove(("results.csv", "results.json", *PICTURES))
            files.remove(self._lock)
        return removed

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
        has_sessions = len({row.session for row in rows.values()}) > 1
        writer.writerow([STEP, *(_add_session(name, row) if has_sessions else name for name, row in rows.items())])
        steps: Iterator[tuple[Any, ...]] = zip_longest(*(row.updates_ms for row in rows.values()), fillvalue="")
        writer.writerows([number, *values] for number, values in enumerate(steps, 1))
        records = {
            name: row.as_json() | {"hardware": row.hardware, "updates_ms": list(row.updates_ms)}
            for name, row in rows.items()
        }
        files.atomic_write(self.json, to_json({"hardware": hardware(), "techniques": records}, 1))
        files.atomic_write(self.csv, text.getvalue())

    @property
    def _lock(self) -> Path:
        return self.folder / f".{self.prefix}results.lock"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the files. Raises RunInUse if another process holds the lock for too long."""
        files.make_directory(self.folder)
        note = f"{os.getpid()} {secrets.token_hex(8)}"
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                lock = files.Lock(self._lock, note)
            except files.LockHeld as held:
                if time.monotonic() > deadline:
                    what = f"process {held.note.partition(' ')[0]} is still changing the results"
                    raise RunInUse(
                        what, where=str(self.csv), fix="end the process, or use another prefix=NAME"
                    ) from None
                time.sleep(_RETRY_S)
                continue
            if lock.holds(self._lock):  # `clean` may have removed the file meanwhile
                break
            lock.release()
        try:
            yield
        finally:
            lock.release()


def session_baseline(session: int) -> str:
    """Return the name of a session's baseline while another session uses the name `baseline`."""
    return f"{BASELINE} (session {session})"


def _add_session(name: str, row: LadderRow) -> str:
    return name if _SESSION.search(name) else f"{name} (session {row.session})"


def _parse_csv(text: str) -> dict[str, tuple[float, ...]]:
    """Return column -> its times, without empty columns. Raises csv.Error, and ValueError if a cell is not a time."""
    head, *lines = [line for line in csv.reader(io.StringIO(text)) if line] or [[STEP]]
    if STEP not in head:
        raise ValueError(f"there is no column {STEP}")
    if len(set(head)) < len(head):
        raise ValueError(f"several columns are called {next(name for name in head if head.count(name) > 1)!r}")
    if lengths := {len(line) for line in lines} - {len(head)}:
        raise ValueError(f"a row has {min(lengths)} cells instead of {len(head)}")
    columns: dict[str, tuple[float, ...]] = {}
    for name, *cells in zip(head, *lines, strict=True):
        times = tuple(_parse_time(name, cell) for cell in cells if cell and name != STEP)
        columns |= {name: times} if times else {}
    return columns


def _parse_time(column: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not _are_times((value,)):
        raise ValueError(f"column {column!r} has the value {cell!r}, which is not a positive number")
    return value


def _rename_baseline(rows: Mapping[str, LadderRow], name: str) -> dict[str, LadderRow]:
    """Return the rows with the baseline under another name, at the same position."""
    return {name if key == BASELINE else key: row for key, row in rows.items()}


def _is_column(name: str) -> bool:
    return is_valid_name(_SESSION.sub("", name))


def _are_times(values: tuple[float, ...]) -> bool:
    return bool(values) and all(0 < value < math.inf for value in values)


@cache
def hardware() -> dict[str, Any]:
    """Return the machine and its software versions, as in environment.json of a run. Imports torch."""
    return collect_environment(take_inventory())


_SESSION = re.compile(r" \(session (\d{1,9})\)$")  # see session_baseline
LOCK_TIMEOUT_S = 30.0  # a change takes less than a second
_RETRY_S = 0.02
_MAX_BYTES = 256 << 20  # enough for a thousand columns of ten thousand steps
