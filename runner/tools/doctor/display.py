"""Print findings as they arrive, and a summary with fixes at the end."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from runner.base.secret import sanitize
from runner.tools.doctor.findings import CheckResult

REDRAW_INTERVAL_S = 0.2


class DoctorDisplay:
    """Prints one line per finding, colored on a terminal, and below them a status line with the running check.

    out   stream for findings
    live  stream for the status line; None: no status line
    """

    def __init__(self, out: TextIO, live: TextIO | None = None) -> None:
        self._out, self._live = out, live if live is not None and _is_drawable(live) else None
        self._console = Console(file=out, highlight=False, markup=False, emoji=False) if _is_drawable(out) else None
        self._drawn_at, self._is_drawn, self._last = 0.0, False, ""

    def show(self, finding: CheckResult) -> None:
        """Print one finding."""
        self.clear_status()
        text = _format_finding(finding)
        took = f"{finding.took_s:.1f} s" if finding.took_s >= _MIN_SHOWN_S else ""
        if self._console is None:
            line = f"{finding.state:<4}  {finding.check:<{_NAME_WIDTH}}  {text}" + (f"  ({took})" if took else "")
            print(line, file=self._out, flush=True)
            return
        row = _grid()
        name = finding.check if finding.check != self._last else ""
        row.add_row(
            Text(finding.state, _STATE_STYLES[finding.state]),
            Text(name),
            Text(text, "dim" if finding.state == "skip" else ""),
            Text(took, "dim"),
        )
        self._last = finding.check
        self._console.print(row)

    def show_status(self, check: str, subject: str, took_s: float) -> None:
        """Redraw the status line with the running check, a few times a second."""
        now = time.monotonic()
        if self._live is None or now - self._drawn_at < REDRAW_INTERVAL_S:
            return
        self._drawn_at, self._is_drawn = now, True
        columns = os.get_terminal_size(self._live.fileno()).columns or 80
        text = sanitize(f"      {check:<{_NAME_WIDTH}}  {subject + ' ' if subject else ''}... {took_s:.0f} s")
        print(f"\r\x1b[K{text[: columns - 1]}", end="", file=self._live, flush=True)

    def clear_status(self) -> None:
        """Clear the status line."""
        if self._is_drawn and self._live is not None:
            print("\r\x1b[K", end="", file=self._live, flush=True)
        self._is_drawn = False

    def show_summary(self, findings: Sequence[CheckResult], took_s: float) -> None:
        """Print the fixes, failures first, and the number of findings by state."""
        self.clear_status()
        for state in ("FAIL", "warn"):
            for finding in findings:
                if finding.state == state:
                    self._print_fix(finding)
        self._print(f"\n{count_states(findings)}, in {took_s:.1f} s")

    def _print_fix(self, finding: CheckResult) -> None:
        rows = [("why", finding.why), ("fix", finding.fix)]
        head = f"{finding.check}: {_format_finding(finding)}"
        if self._console is None:
            print(f"\n{finding.state}  {head}", file=self._out)
            for lead, text in rows:
                print(f"      {lead}  {sanitize(text)}", file=self._out)
            return
        lines = Table.grid(padding=(0, 2))
        lines.add_row(Text(finding.state, _STATE_STYLES[finding.state]), Text(head))
        for lead, text in rows:
            inner = Table.grid(padding=(0, 2))
            inner.add_row(Text(lead, "dim"), Text(sanitize(text), "bold" if lead == "fix" else ""))
            lines.add_row("", inner)
        self._console.print(Padding(lines, (1, 0, 0, 0)))

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def count_states(findings: Iterable[CheckResult]) -> str:
    """Return the number of findings by state: "20 ok, 2 warn, 0 FAIL, 3 skip"."""
    counts = Counter[str](finding.state for finding in findings)
    return ", ".join(f"{counts[state]} {state}" for state in _STATE_STYLES)


def _format_finding(finding: CheckResult) -> str:
    """Return subject and result; for a skip also the fix, because the summary lists only failures and warnings."""
    lead = f"{finding.subject}: " if finding.subject else ""
    fix = f"; {finding.fix}" if finding.fix and finding.state == "skip" else ""
    return sanitize(f"{lead}{finding.seen}{fix}")


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(width=4)
    grid.add_column(width=_NAME_WIDTH)
    grid.add_column(ratio=1, overflow="fold")
    grid.add_column(width=7, justify="right")
    return grid


def _is_drawable(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


_NAME_WIDTH = 13
_MIN_SHOWN_S = 0.1
_STATE_STYLES = {"ok": "green", "warn": "yellow", "FAIL": "bold red", "skip": "dim"}
