"""Stop requests: signal handlers only set a flag; a second signal exits at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from runner.base.errors import Exit
from runner.host.output import write_if_ready


class StopRequest:
    """Turn SIGINT, SIGTERM, SIGHUP and SIGUSR1 into stop requests while this context is open.

    SIGHUP is sent when the terminal closes. SIGUSR1 is the signal that SLURM sends before the time limit. A second
    SIGINT or SIGTERM exits at once with code 130, which is safe at any time: files with a final name are complete.
    Neither SIGUSR1 nor SIGHUP counts as the first signal: SLURM sends SIGTERM after SIGUSR1 while the run is still
    saving, and SIGHUP accompanies a SIGTERM when a session ends. After `begin_shutdown` a third signal is required,
    because the exit code is known, and 130 would hide it.
    Can be opened only in the main thread.

    at_once       message of a run that exits at once
    before_exit   called before such an exit
    requested     name of the first signal, such as "SIGTERM", or None if there was none
    requested_at  time of the first signal, by `time.monotonic`
    """

    def __init__(
        self,
        at_once: str = "Stopped immediately, without saving; earlier checkpoints are intact.",
        before_exit: Callable[[], object] = lambda: None,
    ) -> None:
        self._at_once, self._before_exit = at_once, before_exit
        self.requested: str | None = None
        self.requested_at: float | None = None
        self._num_stop_signals = 0
        self._is_ending = False

    def begin_shutdown(self) -> None:
        """Mark training as complete; what remains takes seconds at most."""
        self._is_ending = True

    def __enter__(self) -> StopRequest:
        assert threading.current_thread() is threading.main_thread(), "signals reach the main thread only"
        self._previous = install_handler(STOP_SIGNALS, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        restore_handlers(self._previous)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested is None:
            self.requested, self.requested_at = signal.Signals(number).name, time.monotonic()
        self._num_stop_signals += number not in (signal.SIGUSR1, signal.SIGHUP)  # a session that ends sends SIGHUP too
        if self._num_stop_signals > 1 + self._is_ending:
            self._exit_now()

    def _exit_now(self) -> None:
        # Restore the default handling first: if flushing blocks on a full pipe, a third signal ends the process.
        restore_handlers(dict.fromkeys(STOP_SIGNALS, signal.SIG_DFL))
        with suppress(Exception):
            self._before_exit()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the signal may have interrupted a print
                stream.flush()
        write_if_ready(f"\n{self._at_once}\n")
        os._exit(Exit.INTERRUPTED)


def install_handler(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> dict[signal.Signals, Any]:
    """Handle these signals; return the previous handlers, for `restore_handlers`.

    Signals that are ignored stay ignored: SIGHUP under nohup, and SIGINT in a background job of a shell script, because
    Ctrl-C is meant for the foreground.
    """
    ignorable = (signal.SIGHUP, signal.SIGINT, signal.SIGTSTP)
    return {
        number: signal.signal(number, handler)
        for number in numbers
        if number not in ignorable or signal.getsignal(number) != signal.SIG_IGN
    }


def restore_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    """Restore signal handlers that were replaced."""
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
