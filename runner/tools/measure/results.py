"""What techniques were measured to take: a CSV with a column of each, and beside it what is known of the columns.

The CSV is the truth, and may be read or corrected in a spreadsheet. What lies in the JSON belongs to a column as it was
measured: facts of a column that has changed since are not told.

Columns that were measured together form a session, with its own baseline. Times of different sessions must not be
compared, even on the same machine: its load and its clocks were others. So each column keeps the number of its session.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from runner.base.errors import ConfigError, DataError, InputMissing, Problem, RunInUse, StorageError
from runner.base.json_values import to_json
from runner.base.text import shortened
from runner.durable import files
from runner.plan.environment import environment
from runner.plan.inventory import take_inventory
from runner.tools.doctor.storage import nearest
from runner.tools.measure.technique import BASELINE, STEP, is_name

PICTURES = ("steps.png", "heatmap.png", "speedup.png")


class Results:
    """The files `<prefix>results.csv` and `<prefix>results.json` in a folder, and the pictures of them beside.

    csv     the first column is `step`, 1 to N; then a column per technique, milliseconds per step; the end of a column
            that is shorter than others is empty
    json    date and hardware, and for each technique its facts with its own date and hardware
    Raises ConfigError where the prefix cannot begin the name of a file.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        if (folder / f"{prefix}{STEP}").name != f"{prefix}{STEP}":
            problem = Problem("must be the beginning of a file's name", f"prefix={prefix}", "use the folder in folder=")
            raise ConfigError(problem)
        self.folder, self.prefix = folder, prefix
        self.csv, self.json = self.file("results.csv"), self.file("results.json")

    def file(self, name: str) -> Path:
        """Return the file of that name in the folder, with the prefix before it."""
        return self.folder / f"{self.prefix}{name}"

    def check(self) -> None:
        """Raise ConfigError where nothing can be written, as far as can be seen: what is measured would be lost."""
        there = nearest(self.folder)
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            what = f"must be a folder in which you may write, but {there} is none"
            raise ConfigError(Problem(what, f"folder={self.folder}", "choose another folder="))

    def columns(self) -> dict[str, list[float]]:
        """Return technique -> milliseconds of its steps, in the order of the CSV.

        Raises InputMissing where there is no CSV, DataError with line and column where it is damaged, StorageError.
        """
        if not files.exists(self.csv):
            raise InputMissing("there are no results yet", where=str(self.csv), fix=_RUN)
        return self._parsed(files.read(self.csv, at_most=_MOST_BYTES))

    def facts(self) -> dict[str, Any]:
        """Return `techniques`, what is known of each column, and `date` and `hardware` of the last measurement.

        `hardware` is as in environment.json of a run. Of a column that was changed by hand nothing is known, and
        nothing at all where there is no JSON. Raises as `columns` does, and DataError where the JSON is damaged.
        """
        columns = self.columns()
        kept = self._kept()
        told = {
            name: {key: value for key, value in each.items() if key != _DIGEST}
            for name, each in kept["techniques"].items()
            if name in columns and each.get(_DIGEST) == _digest(columns[name])
        }
        return {**kept, "techniques": told}

    def sessions(self) -> dict[str, int]:
        """Return for each column the number of the session in which it was measured. Raises as `facts` does."""
        return _sessions(self.columns(), self._kept()["techniques"])

    def put(
        self,
        columns: Mapping[str, Sequence[float]],
        facts: Mapping[str, Mapping[str, Any]],
        *,
        session: int | None = None,
        is_main: bool = True,
    ) -> int:
        """Write these columns, replacing earlier ones of the same names; return the number of their session.

        A baseline stays as long as a column of its session does: if the name `baseline` is given to that of another
        session, it is renamed to `session_baseline`.

        columns  technique -> milliseconds of its steps, all of them above 0
        facts    technique -> what is known of it, JSON-able; date, hardware and session are added
        session  what an earlier call returned, for columns that were measured together with those; None: a new one
        is_main  False: a baseline that is there keeps the name `baseline`, and that of this session is named after it
        A crash leaves each file as it was or as it will be. Raises DataError, with nothing changed, where a file is
        damaged, RunInUse where another process does not finish its own change, and StorageError.
        """
        assert facts.keys() <= columns.keys(), "facts are of columns"
        assert all(is_name(name) for name in columns), "a technique has a printable name"
        assert all(0 < value < math.inf for column in columns.values() for value in column), "times are above 0 ms"
        now = {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "hardware": hardware()}
        with self._alone():
            before = self.columns() if files.exists(self.csv) else {}
            kept = self._kept()["techniques"]
            earlier = _sessions(before, kept)
            session = session or max(earlier.values(), default=0) + 1
            told = {name: {**kept[name], _SESSION: earlier[name]} for name in before if name in kept}
            if BASELINE in columns and earlier.get(BASELINE, session) != session:
                which, other = (before, earlier[BASELINE]) if is_main else (columns, session)
                name = session_baseline(other)
                if which is before:
                    before, earlier, told = (_renamed(each, name) for each in (before, earlier, told))
                else:
                    columns, facts = _renamed(columns, name), _renamed(facts, name)
            told |= {
                name: {**facts.get(name, {}), **now, _SESSION: session, _DIGEST: _digest([*map(float, column)])}
                for name, column in columns.items()
            }
            of = earlier | dict.fromkeys(columns, session)
            alive = {of[name] for name in of if name != session_baseline(of[name])}
            after = {
                name: [float(value) for value in column]
                for name, column in (before | dict(columns)).items()
                if of[name] in alive
            }
            files.atomic_write(self.csv, _as_csv(after))
            content = {**now, "techniques": {name: told[name] for name in after if name in told}}
            files.atomic_write(self.json, to_json(content, 1))
            return session

    def init(self) -> None:
        """The CSV is there, with the column `step` only.

        Raises ConfigError where it has results already: those go with `reset` only. DataError where it is damaged.
        """
        with self._alone():
            there = self.columns() if files.exists(self.csv) else {}
            if there:
                what = f"has results already: {shortened(list(there))}"
                fix = "to start anew, with these lost: accel-run benchmark reset; to keep them, choose another prefix="
                raise ConfigError(Problem(what, str(self.csv), fix))
            self._begin_anew()

    def reset(self) -> None:
        """The CSV has the column `step` only, whatever it had before; what was known and drawn of it is gone."""
        with self._alone():
            self._begin_anew()
            for path in map(self.file, PICTURES):
                if files.exists(path):
                    files.remove(path)

    def clean(self) -> list[Path]:
        """What is written here is gone: CSV, JSON, pictures, and what a crash left of them; returns their paths.

        Other files of the folder, and those of other prefixes, stay.
        """
        if not files.exists(self.folder):
            return []
        ours = [path.name for path in (self.csv, self.json, *map(self.file, PICTURES))]
        torn = tuple(f"{files.TEMPORARY}{name}-" for name in ours)
        with self._alone():
            found = [self.folder / name for name in files.names(self.folder) if name in ours or name.startswith(torn)]
            for path in found:
                files.remove(path)
            files.remove(self._lock)
        return found

    def _begin_anew(self) -> None:
        files.atomic_write(self.csv, _as_csv({}))
        if files.exists(self.json):
            files.remove(self.json)

    @property
    def _lock(self) -> Path:
        return self.folder / f".{self.prefix}results.lock"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process changes the files meanwhile. Raises RunInUse where one does so for too long."""
        files.make_directory(self.folder)
        note = f"{os.getpid()} {secrets.token_hex(8)}"
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                lock = files.Lock(self._lock, note)
            except files.LockHeld as held:
                if time.monotonic() > deadline:
                    what = f"process {held.note.partition(' ')[0]} is changing them and does not finish"
                    raise RunInUse(what, where=str(self.csv), fix="end it, or choose another prefix=") from None
                time.sleep(_PAUSE_S)
                continue
            if self._is_ours(note):
                break
            lock.release()
        try:
            yield
        finally:
            lock.release()

    def _is_ours(self, note: str) -> bool:
        """Tell whether the lock has still its name: `clean` takes it away, and others may have made a new one since."""
        try:
            return files.read(self._lock) == note.encode()
        except StorageError:
            return False

    def _kept(self) -> dict[str, Any]:
        """Return what the JSON has, empty where there is none. Raises DataError, StorageError."""
        if not files.exists(self.json):
            return {"techniques": {}}
        try:
            content = json.loads(files.read(self.json, at_most=_MOST_BYTES))
            if all(isinstance(each, dict) for each in content["techniques"].values()):
                return dict(content)
            what = "must have an object for each technique"
        except (ValueError, RecursionError) as error:
            what = f"must be JSON, but {error}"
        except (KeyError, TypeError, AttributeError):
            what = "must be an object with the key techniques"
        fix = f"{_MEND}, or remove it: the times are in {self.csv.name}"
        raise DataError(f"{what}; it is left as it is", where=str(self.json), fix=fix)

    def _parsed(self, content: bytes) -> dict[str, list[float]]:
        """Return technique -> times of a CSV. Raises DataError with file, line and column of the first damage."""
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content[: error.start].count(b"\n") + 1
            raise self._damage("must be text in UTF-8, but has other bytes", line) from None
        rows = csv.reader(io.StringIO(text, newline=""), strict=True)
        try:
            header = next(rows, [])
            self._check_header(header)
            columns: dict[str, list[float]] = {name: [] for name in header[1:]}
            number = 0
            for row in rows:
                if row:
                    number += 1
                    self._add(columns, row, number, rows.line_num)
        except csv.Error as error:
            raise self._damage(f"cannot be read as CSV: {error}", rows.line_num) from None
        return columns

    def _check_header(self, header: list[str]) -> None:
        if header[:1] != [STEP]:
            what = f"the first column must be {STEP}, but is {header[0]}" if header else f"must begin with {STEP}"
            raise self._damage(what, 1)
        for name in header[1:]:
            if not is_name(name):
                raise self._damage("must have the name of a technique", 1, name or "without a name")
            if header.count(name) > 1:
                raise self._damage(f"must be there once, but is there {header.count(name)} times", 1, name)

    def _add(self, columns: dict[str, list[float]], row: list[str], number: int, line: int) -> None:
        """Add the cells of step `number` to the columns."""
        if row[0] != str(number):
            raise self._damage(f"must be {number}, but is {row[0] or 'empty'}", line, STEP)
        if len(row) != len(columns) + 1:
            raise self._damage(f"must have {len(columns) + 1} cells, but has {len(row)}", line)
        for (name, column), cell in zip(columns.items(), row[1:], strict=True):
            if not cell:
                continue
            if len(column) < number - 1:
                raise self._damage(f"must be empty, as the cell above is, but is {cell}", line, name)
            value = _number(cell)
            if not 0 < value < math.inf:
                raise self._damage(f"must be milliseconds above 0, but is {cell}", line, name)
            column.append(value)

    def _damage(self, what: str, line: int, column: str = "") -> DataError:
        where = f"{self.csv}, line {line}" + (f", column {column}" if column else "")
        fix = f"{_MEND}, or start anew, with all results lost: accel-run benchmark reset"
        return DataError(f"{what}; the file is left as it is", where=where, fix=fix)


def session_baseline(session: int) -> str:
    """Return the name of a session's baseline where another session has the name `baseline`."""
    return f"{BASELINE} (session {session})"


def _renamed(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the mapping with that of `baseline` under another name, in the same place."""
    return {name if key == BASELINE else key: value for key, value in found.items()}


def _sessions(columns: Iterable[str], kept: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Return column -> number of its session.

    Version 0.1 kept no sessions: there a technique alone whose date is not the baseline's was measured without it.
    Columns of which nothing is known count as measured together.
    """
    known = {name: each[_SESSION] for name, each in kept.items() if type(each.get(_SESSION)) is int}
    dates = {name: str(each.get("date", "")) for name, each in kept.items() if name not in known}
    first = dates.get(BASELINE, "")
    alone = {name: date for name, date in dates.items() if kept[name].get("mode") == "isolated" and date != first}
    later = sorted(set(alone.values())) if first else []
    return {
        name: known.get(name) or (2 + later.index(alone[name]) if name in alone and later else 1) for name in columns
    }


@cache
def hardware() -> dict[str, Any]:
    """Return the machine and the versions of what runs here, as environment.json of a run has them. Imports torch."""
    return environment(take_inventory())


def _as_csv(columns: Mapping[str, Sequence[float]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([STEP, *columns])
    steps: Iterable[tuple[Any, ...]] = zip_longest(*columns.values(), fillvalue="")
    writer.writerows([number, *row] for number, row in enumerate(steps, 1))
    return text.getvalue()


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _digest(column: Sequence[float]) -> str:
    """Return what tells a column from any other."""
    return hashlib.sha256(json.dumps(list(column)).encode()).hexdigest()


PATIENCE_S = 30.0  # that others may take for a change, which is made in less than one
_PAUSE_S = 0.02
_MOST_BYTES = 256 << 20  # a thousand columns of ten thousand steps
_DIGEST, _SESSION = "sha256", "session"
_RUN = "run the techniques first: accel-run benchmark"
_MEND = "put that right in an editor"
