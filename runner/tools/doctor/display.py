"""Print findings as they arrive, and a summary with fixes at the end."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from runner.base.secret import sanitize
from runner.base.text import wrap_for_terminal
from runner.tools.doctor.findings import CheckResult

REDRAW_INTERVAL_S = 0.2


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled, as in `accel-run doctor | head`. rich would exit with 1."""
        raise  # noqa: PLE0704


class DoctorDisplay:
    """Prints one line per finding, colored on a terminal, and below them a status line with the running check.

    out   stream for findings
    live  stream for the status line; None: no status line
    """

    def __init__(self, out: TextIO, live: TextIO | None = None) -> None:
        self._live = live if live is not None and _is_drawable(live) else None
        self._console = _Console(file=out, highlight=False, soft_wrap=True, force_terminal=_is_drawable(out))
        self._drawn_at, self._is_drawn = 0.0, False

    def show(self, finding: CheckResult) -> None:
        """Print one finding."""
        self.clear_status()
        took = f"  ({finding.took_s:.1f} s)" if finding.took_s >= _MIN_SHOWN_S else ""
        self._print(finding.state, f"{finding.check:<{_NAME_WIDTH}}  {_format_finding(finding)}{took}")

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
        if self._is_drawn and self._live is not None:
            print("\r\x1b[K", end="", file=self._live, flush=True)
        self._is_drawn = False

    def show_summary(self, findings: Sequence[CheckResult], took_s: float) -> None:
        """Print the fixes, failures first, and the number of findings by state."""
        self.clear_status()
        for state in ("FAIL", "warn"):
            for finding in findings:
                if finding.state == state:
                    self._print("", "")
                    self._print(state, f"{finding.check}: {_format_finding(finding)}")
                    self._print("", f"why  {sanitize(finding.why)}")
                    self._print("", f"fix  {sanitize(finding.fix)}", is_command=True)
        self._console.print(f"\n{count_states(findings)}, in {took_s:.1f} s", markup=False)

    def _print(self, state: str, text: str, *, is_command: bool = False) -> None:
        """Print a line, wrapped to the terminal unless it has a command to paste."""
        line = f"{state:<4}  {text}".rstrip()
        line = line if is_command else wrap_for_terminal(line, self._console.file)
        self._console.print(
            Text().append(line[:4], _STATE_STYLES.get(state)).append(line[4:], "dim" if state == "skip" else None)
        )


def count_states(findings: Iterable[CheckResult]) -> str:
    """Return the number of findings by state: "20 ok, 2 warn, 0 FAIL, 3 skip"."""
    counts = Counter[str](finding.state for finding in findings)
    return ", ".join(f"{counts[state]} {state}" for state in _STATE_STYLES)


def _format_finding(finding: CheckResult) -> str:
    """Return subject and result; for a skip also the fix, because the summary lists only failures and warnings."""
    lead = f"{finding.subject}: " if finding.subject else ""
    fix = f"; {finding.fix}" if finding.fix and finding.state == "skip" else ""
    return sanitize(f"{lead}{finding.seen}{fix}")


def _is_drawable(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


_NAME_WIDTH = 13
_MIN_SHOWN_S = 0.1
_STATE_STYLES = {"ok": "green", "warn": "yellow", "FAIL": "bold red", "skip": "dim"}
