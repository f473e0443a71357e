"""Show machine samples: on the full screen of a terminal, as lines of text, or as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from rich.constrain import Constrain
from rich.live import Live

from runner.base.secret import sanitize
from runner.console.progress_display import TerminalConsole
from runner.monitor.machine_sample import GpuUser
from runner.monitor.machine_screen import View, machine_screen
from runner.monitor.monitor_thread import format_line


class SampleLines:
    """Prints a line per sample, and each note once on another stream.

    is_gone  the reader has closed the stream
    """

    def __init__(self, out: TextIO, notes: TextIO, text: Callable[[View], str]) -> None:
        self._out, self._notes, self._text = out, notes, text
        self._printed_notes: set[str] = set()
        self.is_gone = False

    def sample(self, view: View) -> None:
        self.draw(view)
        try:
            print(sanitize(self._text(view)), file=self._out, flush=True)
        except BrokenPipeError:
            self.is_gone = True

    def draw(self, view: View) -> None:
        """Show a view without a new sample."""
        for note in [*(alert.text for alert in view.alerts), *view.notes]:
            if note not in self._printed_notes:
                self._printed_notes.add(note)
                with contextlib.suppress(OSError, ValueError):
                    print(sanitize(note), file=self._notes, flush=True)

    def is_resized(self) -> bool:
        """Return whether the size of the terminal has changed since the last draw."""
        return False

    def close(self) -> None:
        """Restore the terminal; a second call does nothing."""


def in_background(fd: int) -> bool:
    """Return whether another process group is in the foreground of the terminal, as for a job started with `&`."""
    try:
        return os.tcgetpgrp(fd) != os.getpgrp()
    except OSError:  # not the controlling terminal, so there is no job control
        return False


class FullScreen:
    """Shows the view on the whole terminal from the first draw to `close`, which restores it."""

    def __init__(self, stream: TextIO) -> None:
        self._console = TerminalConsole(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._live: Live | None = Live(console=self._console, screen=True, auto_refresh=False)
        self._size = (0, 0)
        self._is_started = False

    @property
    def is_gone(self) -> bool:
        return self._live is None

    def sample(self, view: View) -> None:
        self.draw(view)

    def draw(self, view: View) -> None:
        if not self._is_started:
            self._is_started = True
            self._draw(lambda live: live.start())

        def show(live: Live) -> None:
            self._size = (self._console.width, self._console.height)
            # The last column stays free: some terminals wrap a line that fills it.
            columns = max(1, self._console.width - 1)
            screen = machine_screen(view, columns, self._console.height)
            live.update(Constrain(screen, columns), refresh=True)

        self._draw(show)

    def is_resized(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            self._console.fit()
        return (self._console.width, self._console.height) != self._size

    def close(self) -> None:
        self._draw(lambda live: live.stop())
        self._live = None

    def _draw(self, action: Callable[[Live], None]) -> None:
        if self._live is not None and not self._console.draw(partial(action, self._live)):
            self._live = None


MachineDisplay = SampleLines | FullScreen


def make_display(out: TextIO, notes: TextIO, *, as_json: bool) -> MachineDisplay:
    """Return a display: full screen for a terminal, lines for a pipe, a file or a background job, or JSON.

    A background job of a shell script is in the foreground process group of the terminal; it is recognized because the
    shell makes it ignore SIGINT.

    notes  the stream for everything that is not a sample
    """
    if as_json:
        return SampleLines(out, notes, lambda view: json.dumps(to_json_object(view)))
    has_screen = out.isatty() and os.environ.get("TERM") not in ("dumb", "unknown") and out.encoding.lower() == "utf-8"
    if has_screen and not in_background(out.fileno()) and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        return FullScreen(out)
    return SampleLines(out, notes, lambda view: format_line(view.latest))


def to_json_object(view: View) -> dict[str, Any]:
    """Return a sample for JSON: unknown readings are absent, other unknown values are null."""

    def process(user: GpuUser) -> dict[str, Any]:
        return {
            "pid": user.pid, "memory_gib": user.memory_gib, "user": user.user or None, "name": user.name or None,
        }  # fmt: skip

    gpus = [
        {
            "name": device.name,
            "uuid": device.uuid or None,
            "processes": None if view.users is None else [process(user) for user in view.users.get(gpu, ())],
        }
        for gpu, device in view.gpus.items()
    ]
    return {
        "time_unix_s": round(time.time(), 3),
        "readings": dict(view.latest),
        "gpus": gpus,
        "missing": [*(alert.text for alert in view.alerts), *view.missing],
    }
