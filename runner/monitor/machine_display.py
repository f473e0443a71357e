"""Display machine samples: full-screen on a terminal, as lines of text, or as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from rich.console import Group
from rich.live import Live

from runner.base.secret import fit_to_show
from runner.console.progress_display import TerminalConsole
from runner.monitor.machine_screen import WAITING, Use, View, lines_of
from runner.monitor.monitor_thread import as_line


class Display:
    """The verbs of every display, and the one that shows nothing."""

    @property
    def is_gone(self) -> bool:
        """Tell whether nobody can see it any more."""
        return False

    def sample(self, view: View) -> None:
        """A new sample is in the view."""

    def draw(self, view: View) -> None:
        """Time has passed, or the display has another size."""

    def is_resized(self) -> bool:
        """Tell whether it has another size than when it was drawn."""
        return False

    def close(self) -> None:
        """Give the terminal back; closing twice is harmless."""


def make_display(out: TextIO, aside: TextIO, *, as_json: bool) -> Display:
    """Return the whole screen for a terminal, lines for a pipe or a file, JSON where it is asked for.

    aside  where words go that are no sample
    """
    if as_json:
        return SampleLines(out, aside, lambda view: json.dumps(as_object(view)))
    drawable = out.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return FullScreen(out) if drawable else SampleLines(out, aside, lambda view: as_line(view.latest))


def as_object(view: View) -> dict[str, Any]:
    """Return a sample for JSON: a reading that is not known is not there, other things are null."""
    gpus = [
        {
            "name": name,
            "uuid": view.uuids[gpu] if gpu < len(view.uuids) else None,
            "processes": None if view.uses is None else [_as_object(use) for use in view.uses if use.gpu == gpu],
        }
        for gpu, name in enumerate(view.gpus)
    ]
    return {
        "time_unix_s": round(time.time(), 3),
        "readings": dict(view.latest),
        "gpus": gpus,
        "missing": [*(notice.text for notice in view.troubles), *view.missing],
    }


def _as_object(use: Use) -> dict[str, Any]:
    words = {"user": use.user, "name": use.name, "run": use.run}
    return {"pid": use.pid, "memory_gib": use.memory_gib, **{key: word or None for key, word in words.items()}}


class SampleLines(Display):
    """A line for each sample, at once; what is missing aside, once."""

    def __init__(self, out: TextIO, aside: TextIO, text: Callable[[View], str]) -> None:
        self._out, self._aside, self._text = out, aside, text
        self._told: set[str] = set()
        self._is_gone = False

    @property
    def is_gone(self) -> bool:
        return self._is_gone

    def sample(self, view: View) -> None:
        self.draw(view)
        try:
            print(fit_to_show(self._text(view)), file=self._out, flush=True)
        except BrokenPipeError:
            self._is_gone = True

    def draw(self, view: View) -> None:
        troubles = [notice.text for notice in view.troubles]
        for note in [*troubles, *view.missing, *([WAITING] if view.waits else [])]:
            if note not in self._told:
                self._told.add(note)
                with contextlib.suppress(OSError, ValueError):
                    print(fit_to_show(note), file=self._aside, flush=True)


class FullScreen(Display):
    """The view on the whole terminal, which comes back as it was at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._console = TerminalConsole(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._ascii = not self._console.encoding.lower().startswith("utf")
        self._live: Live | None = Live(console=self._console, screen=True, auto_refresh=False)
        self._size = (0, 0)
        self._draw(lambda live: live.start())

    @property
    def is_gone(self) -> bool:
        return self._live is None

    def is_resized(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            self._console.fit()
        return (self._console.width, self._console.height) != self._size

    def sample(self, view: View) -> None:
        self.draw(view)

    def draw(self, view: View) -> None:
        def show(live: Live) -> None:
            self._size = (self._console.width, self._console.height)
            # One column stays free: some terminals wrap a line that fills the last one.
            lines = lines_of(view, max(1, self._console.width - 1), self._console.height, ascii_only=self._ascii)
            live.update(Group(*lines), refresh=True)

        self._draw(show)

    def close(self) -> None:
        self._draw(lambda live: live.stop())
        self._live = None

    def _draw(self, do: Callable[[Live], None]) -> None:
        if self._live is not None and not self._console.draw(partial(do, self._live)):
            self._live = None
