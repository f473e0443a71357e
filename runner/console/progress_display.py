"""Progress of a phase: a bar on a terminal, plain lines elsewhere. Drawing is rate-limited, so calls are cheap."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TextIO

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from runner.base.text import wrap_for_terminal

Values = Mapping[str, float | None]

DRAW_EVERY_S = 0.25
LINE_EVERY_S = 30.0
PACE_WINDOW_S = 30.0
PACE = "it_per_s"
MIN_BAR_COLUMNS, MAX_BAR_COLUMNS = 6, 24
MAX_PRIORITY_BEFORE_BAR = 3  # figures with priority 0 (most important) to 3 are shown even if the bar is not


class ProgressDisplay:
    """Interface of progress displays; the base class shows nothing, for ranks that do not print."""

    def start(self, total_updates: int, done: int = 0) -> None:
        """Start at update `done` of `total_updates`."""

    def due(self, update: int) -> bool:
        """Return whether `update` would show something now; if not, the caller need not read values from the device.

        Costs one clock read.
        """
        return False

    def update(self, update: int, values: Values, monitor: str = "") -> None:
        """Show the state after `update` if it is due; values that are None are omitted.

        values   metric name -> value; `train/loss` is shown as `loss`. data_wait is a fraction, memory_gib in GiB;
                 it_per_s replaces the displayed pace; the ETA uses the pace of the last 30 s, and is unknown before the
                 second update of a process
        monitor  one line about the machine, shown below
        """

    def note(self, text: str) -> None:
        """Print a permanent line above the bar."""

    def finish(self) -> None:
        """Leave the last state on the screen and release the terminal."""


def make_progress(stream: TextIO | None, item: str = "item") -> ProgressDisplay:
    """Return a bar for a terminal, lines for a pipe or a file, nothing for None.

    item  unit of the throughput in a bar, such as "token"
    """
    if stream is None:
        return ProgressDisplay()
    drawable = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return Bar(stream, item=item) if drawable else ProgressLines(stream)


class Pace:
    """Updates per second over the last 30 s, without the first update of a process, which includes start-up work."""

    def __init__(self, update: int, now: float) -> None:
        self._first_update = update + 1
        self._marks = deque([(now, update)])

    def mark(self, update: int, now: float) -> float | None:
        """Record `update` and return the pace; None while it is unknown."""
        if update == self._first_update:
            self._marks.clear()
        self._marks.append((now, update))
        while len(self._marks) > 2 and now - self._marks[0][0] > PACE_WINDOW_S:
            self._marks.popleft()
        since, first = self._marks[0]
        return (update - first) / (now - since) if update > first and now > since else None


class ProgressLines(ProgressDisplay):
    """Plain `key=value` lines after the first and the tenth update, then every 30 s, and after the last."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._total = self._done = 0
        self._next_s = float("inf")
        self._pace = Pace(0, 0.0)

    def start(self, total_updates: int, done: int = 0) -> None:
        self._total, self._done = total_updates, done
        self._next_s = self._clock() + LINE_EVERY_S
        self._pace = Pace(done, self._clock())

    def due(self, update: int) -> bool:
        return self._clock() >= self._next_s or update == self._total or update - self._done in (1, 10)

    def update(self, update: int, values: Values, monitor: str = "") -> None:
        if not self.due(update):
            return
        now = self._clock()
        self._next_s = now + LINE_EVERY_S
        pace = self._pace.mark(update, now)
        fields: dict[str, float | None] = {"update": update, "total": self._total, PACE: pace}
        fields.update(values)
        fields["eta_s"] = round((self._total - update) / pace) if pace else None
        pairs = [f"{name}={_format_field(name, value)}" for name, value in fields.items() if value is not None]
        self.note(" ".join([*pairs, f'monitor="{monitor}"'] if monitor else pairs))

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader has exited, or the stream is closed
            print(_replace_unencodable(text, self._stream.encoding), file=self._stream, flush=True)


class Bar(ProgressDisplay):
    """A progress bar with figures, and a line about the machine below it; drawn at most four times a second.

    On a narrow terminal the least important figures are dropped first.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic, *, item: str = "item") -> None:
        # force_terminal: `make_progress` has checked `stream`; rich would also consult the environment (FORCE_COLOR).
        self._console = TerminalConsole(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._clock, self._item = clock, item
        self._live: Live | None = None
        self._total = 0
        self._next_s = float("inf")
        self._pace = Pace(0, 0.0)
        self._widths: dict[str, int] = {}  # maximum width of each figure so far, so that figures keep their places

    def start(self, total_updates: int, done: int = 0) -> None:
        self._total = total_updates
        self._widths = {}
        self._next_s = self._clock()
        self._pace = Pace(done, self._clock())
        # No refresh thread: drawing happens only inside `update`.
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._draw(lambda live: live.start())

    def due(self, update: int) -> bool:
        return self._clock() >= self._next_s or update == self._total

    def update(self, update: int, values: Values, monitor: str = "") -> None:
        if not self.due(update):
            return
        now = self._clock()
        self._next_s = now + DRAW_EVERY_S
        pace = self._pace.mark(update, now)
        self._draw(lambda live: live.update(self._frame(update, pace, values, monitor), refresh=True))

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            text = wrap_for_terminal(_replace_unencodable(text, self._console.encoding), self._console.file)
            self._console.print(text, soft_wrap=True)

    def finish(self) -> None:
        self._draw(lambda live: live.stop())
        self._live, self._next_s = None, float("inf")

    def _draw(self, do: Callable[[Live], None]) -> None:
        """Draw, or do nothing if the terminal is gone."""
        if self._live is not None and not self._console.draw(partial(do, self._live)):
            self._live, self._next_s = None, float("inf")

    def _frame(self, update: int, pace: float | None, values: Values, monitor: str) -> Group:
        fraction = min(1.0, update / self._total) if self._total else 1.0
        figures = [(f"{update:>{len(str(self._total))}}/{self._total}", 0)]
        displayed_pace = values.get(PACE) or pace
        if displayed_pace:
            figures.append(
                self._pad_figure(
                    "pace",
                    (f"{displayed_pace:.1f} it/s" if displayed_pace >= 1 else f"{1 / displayed_pace:.1f} s/it", 3),
                )
            )
        for name, value in values.items():
            if value is not None and name != PACE:
                text, priority = _format_figure(name.rpartition("/")[2], value)
                figures.append(self._pad_figure(name, (text.replace("items/s", f"{self._item}s/s"), priority)))
        if pace or "ETA" in self._widths:  # its space is kept after the last update
            eta = f"ETA {_format_duration((self._total - update) / pace)}" if pace and update < self._total else ""
            figures.append(self._pad_figure("ETA", (eta, 1)))
        # Some terminals wrap a line that fills the last column.
        percent, width = f"{fraction:4.0%}", self._console.width - 1
        # The width of the bar depends only on the terminal, so that the bar does not shrink when figures become known.
        columns = max(MIN_BAR_COLUMNS, min(MAX_BAR_COLUMNS, width // 10))
        while len(figures) > 1:
            least_important = max(figures, key=lambda figure: figure[1])
            bar = columns + 1 if least_important[1] > MAX_PRIORITY_BEFORE_BAR else 0
            if _total_width(percent, figures) + bar <= width:
                break
            figures.remove(least_important)
        line = Text(no_wrap=True, overflow="crop").append(percent, style="bold")
        if _total_width(percent, figures) + 1 + columns <= width:
            done, empty = ("█", "░") if self._console.encoding.lower().startswith("utf") else ("#", ".")
            filled = int(fraction * columns)
            line.append(" ").append(done * filled, style="green").append(empty * (columns - filled), style="dim")
        line.append(("  " + "  ".join(text for text, _ in figures)).rstrip())
        machine = _replace_unencodable(monitor, self._console.encoding)
        return Group(line, Text(machine, style="dim", no_wrap=True, overflow="crop")) if monitor else Group(line)

    def _pad_figure(self, name: str, figure: tuple[str, int]) -> tuple[str, int]:
        """Pad the figure to the width of its widest text so far."""
        text, priority = figure
        self._widths[name] = max(self._widths.get(name, 0), len(text))
        return text.ljust(self._widths[name]), priority


class TerminalConsole(Console):
    """A console with the size of its terminal. It never hides the cursor, as a killed run could not show it again."""

    def fit(self) -> None:
        """Use the size of this terminal; rich would use the size of a standard stream."""
        columns, rows = os.get_terminal_size(self.file.fileno())
        self.size = ConsoleDimensions(columns or 80, rows or 24)

    def draw(self, do: Callable[[], None]) -> bool:
        """Draw at the current size of the terminal; return False if it is gone."""
        try:
            self.fit()
            do()
        except (OSError, ValueError):
            return False
        return True

    def show_cursor(self, show: bool = True) -> bool:
        return False


def _format_figure(name: str, value: float) -> tuple[str, int]:
    if name not in FIGURES:
        return f"{name} {value:.4g}", 9
    pattern, priority = FIGURES[name]
    return pattern.format(value), priority


def _total_width(percent: str, figures: list[tuple[str, int]]) -> int:
    return len(percent) + sum(2 + len(text) for text, _ in figures)


def _format_field(name: str, value: object) -> str:
    if name == "data_wait":
        return f"{value:.0%}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _format_duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _replace_unencodable(text: str, encoding: str | None) -> str:
    return text.encode(encoding or "utf-8", errors="replace").decode(encoding or "utf-8")


FIGURES: Mapping[str, tuple[str, int]] = {
    "loss": ("loss {:.4g}", 2),
    "items_per_s": ("{:,.0f} items/s", 4),
    "lr": ("lr {:.2e}", 5),
    "grad_norm": ("grad_norm {:.3g}", 8),
    "memory_gib": ("mem {:.1f} GiB", 7),
    "data_wait": ("data wait {:.0%}", 6),
}
