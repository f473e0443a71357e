"""What all suites of `accel-run benchmark` share: what was wanted, and tables that are printed and kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.base.text import aligned
from runner.config.request import Request

Say = Callable[[str], None]
Value = str | float | int | None


@dataclass(frozen=True)
class SuiteRequest:
    """What a suite is asked to do.

    request   the settings of the training that is measured
    words     what to do, as `plots`, or which cells, in the order they were given; none: all of it
    options   key=value words that the suite itself declares in OPTIONS
    folder    where results and pictures go
    prefix    of their names
    budget_s  seconds for all of it, about
    """

    request: Request
    words: tuple[str, ...]
    options: Mapping[str, str]
    folder: Path
    prefix: str
    budget_s: float
    say: Say = print

    def file(self, name: str) -> Path:
        """Return the file of that name in the folder, with the prefix before it."""
        return self.folder / f"{self.prefix}{name}"


@dataclass(frozen=True)
class SuiteTable:
    """Rows under named columns; a unit belongs to the name, as in `update, ms`. None: not measured."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]


@dataclass(frozen=True)
class SuiteReport:
    """What a suite has to say.

    headline  one sentence that answers the question of the suite
    skipped   what cannot run here -> why
    data      all that was measured, JSON-able
    files     what was written, in order
    """

    headline: str
    tables: Sequence[SuiteTable] = ()
    notes: Sequence[str] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[Path] = ()


def screen(report: SuiteReport) -> list[str]:
    """Return the lines to print."""
    lines: list[str] = []
    for table in report.tables:
        lines += [table.title, *_lines(table), ""]
    if report.skipped:
        lines += ["not measured here", *aligned([*report.skipped.items()], indent="  "), ""]
    lines += [f"note: {note}" for note in report.notes]
    lines += [report.headline] if report.headline else []
    return [*lines, *(f"written      {file}" for file in report.files)]


def _lines(table: SuiteTable) -> list[str]:
    """Return header and rows: words to the left, numbers to the right."""
    cells = [[_text(value) for value in row] for row in table.rows]
    has_words = [any(isinstance(row[column], str) for row in table.rows) for column in range(len(table.columns))]
    return aligned([[*table.columns], *cells], "".join("<" if words else ">" for words in has_words), indent="  ")


def _text(value: Value) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
