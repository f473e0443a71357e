"""Stop requests: signal handlers only set a flag; a second signal exits at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from runner.base.errors import Exit
from runner.base.output import write_at_once


class StopRequest:
    """While this context is open, SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask the run to stop instead of ending it.

    SIGHUP comes when the terminal goes away; under nohup it is ignored, here too. SIGUSR1 is what SLURM is told to send
    before the time is up. A second SIGINT or SIGTERM leaves at once with 130, which is safe at any moment: nothing
    under a final name is ever half written. SIGUSR1 does not count as the first, since SLURM follows it with SIGTERM
    while the run is still saving, nor does SIGHUP, which comes with a SIGTERM where a session is ended. After
    `begin_end` it takes a third one: the exit code is known, and 130 would hide it.
    Only the main thread may open it.
    """

    def __init__(self) -> None:
        self._requested: str | None = None
        self._requested_at: float | None = None
        self._stops = 0
        self._is_ending = False
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> str | None:
        """The name of the first signal, such as "SIGTERM", or None as long as nobody asked."""
        return self._requested

    @property
    def requested_at(self) -> float | None:
        """When the first signal came, by `time.monotonic`."""
        return self._requested_at

    def begin_end(self) -> None:
        """Training is over, and what is left takes seconds at most."""
        self._is_ending = True

    def __enter__(self) -> StopRequest:
        assert threading.current_thread() is threading.main_thread(), "signals reach the main thread only"
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._put_back(self._previous)
        self._previous = {}

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._requested is None:
            self._requested, self._requested_at = signal.Signals(number).name, time.monotonic()
        self._stops += number not in (signal.SIGUSR1, signal.SIGHUP)  # a session that ends sends SIGHUP too
        if self._stops > 1 + self._is_ending:
            self._leave()

    def _leave(self) -> None:
        # First the system's own handling: should flushing block on a full pipe, a third signal ends it.
        self._put_back(dict.fromkeys(_SIGNALS, signal.SIG_DFL))
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the signal may have come in the middle of a print
                stream.flush()
        write_at_once("\nStopped at once, without saving; earlier checkpoints are whole.\n")
        os._exit(Exit.INTERRUPTED)

    @staticmethod
    def _put_back(handlers: dict[signal.Signals, Any]) -> None:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
