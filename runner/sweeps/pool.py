"""Pools that run trials: the interface, and a pool of processes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any, ClassVar, Self

from runner.config.request import Request
from runner.durable.signals import STOP_SIGNALS, install_handler, restore_handlers
from runner.host.parent_death import child_command
from runner.records.events import Console
from runner.sweeps.trials import Trial
from runner.trackers.tracker import SINGLE_RUN_VARIABLES


@dataclass(frozen=True)
class Slot:
    """Resources for one trial at a time.

    environment  additional environment variables
    cores        CPU threads that the trial may use; empty: all
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    cores: Collection[int] = ()


ALONE = (Slot(),)


@dataclass
class _Running:
    trial: Trial
    process: subprocess.Popen[str]
    slot: Slot
    reader: threading.Thread | None


class TrialPool(ABC):
    """Runs trials concurrently. The context must be entered in the main thread.

    Inside the context, SIGINT, SIGTERM, SIGHUP and SIGUSR1 are stop requests, after which no other trial is started.

    stops_trials  whether a stop request also ends running trials
    """

    stops_trials: ClassVar[bool]

    def __init__(self) -> None:
        self.num_stop_requests = 0

    @property
    def is_stopped(self) -> bool:
        """Return whether a stop was requested."""
        return self.num_stop_requests > 0

    @property
    @abstractmethod
    def has_free_slot(self) -> bool:
        """Return whether another trial may be started."""

    @abstractmethod
    def __bool__(self) -> bool:
        """Return whether a trial is running."""

    @abstractmethod
    def start(self, trial: Trial, request: Request) -> None:
        """Start a trial with these settings. Raises AccelRunError."""

    @abstractmethod
    def wait(self) -> tuple[Trial, int] | None:
        """Wait until one of the trials ends; return it and its exit code, 128 + n for signal n.

        Returns None if a stop was requested and the running trials continue without this process.
        """

    def stop(self) -> None:
        """Request a stop, unless one was already requested."""
        if not self.is_stopped:
            self._on_stop()

    def __enter__(self) -> Self:
        self._previous = install_handler(STOP_SIGNALS, self._on_stop)
        return self

    def __exit__(self, *_: object) -> None:
        restore_handlers(self._previous)

    def _on_stop(self, signal_number: int = 0, frame: FrameType | None = None) -> None:
        self.num_stop_requests += 1


class LocalPool(TrialPool):
    """Runs trials in separate processes on this machine, one per slot.

    A stop request makes running trials save and stop; a second one ends them, a third kills them. If the sweep is
    killed, its trials also save and stop.

    environment  additional environment variables of trials, unless already set
    """

    stops_trials = True

    def __init__(self, slots: Sequence[Slot] = ALONE, environment: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._environment = dict(environment or {})
        self._free = list(slots)
        self._is_alone = len(slots) == 1
        self._running: list[_Running] = []

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free) and not self.is_stopped

    def __bool__(self) -> bool:
        return bool(self._running)

    def __exit__(self, *_: object) -> None:
        self.stop()  # after an error in the sweep, trials save their state
        while self:
            self.wait()
        super().__exit__()

    def start(self, trial: Trial, request: Request) -> None:
        """Start the process of a trial. With several slots, its name precedes each line of its output."""
        slot = self._free.pop(0)
        environment = {key: value for key, value in os.environ.items() if key not in SINGLE_RUN_VARIABLES}
        environment |= {key: value for key, value in self._environment.items() if not environment.get(key)}
        command = child_command(request.train_arguments(), signal.SIGTERM)  # so that it saves if the sweep is killed
        output: dict[str, Any] = {} if self._is_alone else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            command, stdin=None if self._is_alone else subprocess.DEVNULL, env={**environment, **slot.environment},
            text=True, errors="replace", **output,
        )  # fmt: skip
        if slot.cores:
            with suppress(OSError, AttributeError):  # the trial has exited, or the system lacks the call
                os.sched_setaffinity(process.pid, slot.cores)  # before it starts threads
        reader = None
        if process.stdout is not None:
            reader = threading.Thread(target=_print_lines, args=(trial.name, process.stdout), daemon=True)
            reader.start()
        self._running.append(_Running(trial, process, slot, reader))
        if self.is_stopped:  # a signal arrived before the process was registered
            process.send_signal(signal.SIGUSR1)

    def wait(self) -> tuple[Trial, int]:
        while True:
            for running in self._running:
                code = running.process.poll()
                if code is None:
                    continue
                if running.reader is not None:
                    running.reader.join(timeout=DRAIN_TIMEOUT_S)  # a child of the trial may keep the pipe open
                self._running.remove(running)
                self._free.append(running.slot)
                return running.trial, code if code >= 0 else 128 - code
            time.sleep(POLL_S)

    def _on_stop(self, signal_number: int = 0, frame: FrameType | None = None) -> None:
        """Forward a stop request to the trials.

        A terminal or scheduler may have signalled the trials, too, and a second SIGTERM would end them at once. So the
        first request is SIGUSR1, which makes them save and stop, but does not count as a first SIGTERM.
        """
        super()._on_stop()
        stop_signal = _STOP_SIGNALS[min(self.num_stop_requests, len(_STOP_SIGNALS)) - 1]
        for running in self._running:
            running.process.send_signal(stop_signal)


def _print_lines(name: str, lines: IO[str]) -> None:
    info = Console().info
    with lines:
        for line in lines:
            info(f"{name} | {line.rstrip()}")


POLL_S = 0.05
DRAIN_TIMEOUT_S = 2.0
_STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL)
