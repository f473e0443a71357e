"""Run trials in separate processes, some of them concurrently, and forward stop signals to all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from runner.records.events import Console
from runner.sweeps.trials import Trial


@dataclass(frozen=True)
class Slot:
    """Resources for one trial at a time.

    environment  additional environment variables
    cores        CPU threads that it may use; empty: all
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


class Pool:
    """Runs trials in separate processes, one per slot.

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 make running trials save and stop; a second signal ends them, a third kills
    them. Trials of a killed sweep also save. The context must be entered in the main thread.

    environment  additional environment variables of trials, unless already set
    """

    def __init__(self, slots: Sequence[Slot] = ALONE, environment: Mapping[str, str] | None = None) -> None:
        self.num_stop_requests = 0
        self._environment = dict(environment or {})
        self._free = list(slots)
        self._is_alone = len(slots) == 1
        self._running: list[_Running] = []
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def is_stopped(self) -> bool:
        """Return whether a stop was requested."""
        return self.num_stop_requests > 0

    @property
    def has_free_slot(self) -> bool:
        """Return whether another trial may be started."""
        return bool(self._free) and not self.is_stopped

    def __bool__(self) -> bool:
        return bool(self._running)

    def __enter__(self) -> Pool:
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal_number == signal.SIGHUP and signal.getsignal(signal_number) == signal.SIG_IGN:
                continue
            self._previous[signal_number] = signal.signal(signal_number, self._forward_stop)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()  # after an error in the sweep, trials save their state
        while self:
            self.wait()
        for signal_number, handler in self._previous.items():
            signal.signal(signal_number, handler)

    def start(self, trial: Trial, args: Sequence[str]) -> None:
        """Start the process of a trial. A single trial uses the terminal; otherwise its name precedes each line."""
        slot = self._free.pop(0)
        environment = {key: value for key, value in os.environ.items() if key not in _SINGLE_RUN_VARIABLES}
        environment |= {key: value for key, value in self._environment.items() if not environment.get(key)}
        command = [sys.executable, "-P", "-c", TRIAL_MAIN, str(os.getpid()), *args]
        output: dict[str, Any] = {} if self._is_alone else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            command, stdin=None if self._is_alone else subprocess.DEVNULL, env={**environment, **slot.environment},
            text=True, errors="replace", **output,
        )  # fmt: skip
        if slot.cores:
            with suppress(OSError, AttributeError):  # it has exited, or the system lacks the call
                os.sched_setaffinity(process.pid, slot.cores)  # before it starts threads
        reader = None
        if process.stdout is not None:
            reader = threading.Thread(target=_print_lines, args=(trial.name, process.stdout), daemon=True)
            reader.start()
        self._running.append(_Running(trial, process, slot, reader))
        if self.is_stopped:  # a signal arrived before the process was registered
            process.send_signal(signal.SIGUSR1)

    def wait(self) -> tuple[Trial, int]:
        """Wait until one of the trials ends; return it and its exit code, 128 + n for signal n."""
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

    def stop(self) -> None:
        """Request running trials to save and stop, once, and start no other."""
        if not self.is_stopped:
            self._forward_stop()

    def _forward_stop(self, signal_number: int = 0, frame: FrameType | None = None) -> None:
        """Forward a stop request to the trials.

        A terminal or scheduler may have signalled the trials, too, and a second SIGTERM would end them at once. So the
        first request is SIGUSR1, which makes them save and stop and does not count.
        """
        self.num_stop_requests += 1
        stop_signal = _STOP_SIGNALS[min(self.num_stop_requests, len(_STOP_SIGNALS)) - 1]
        for running in self._running:
            running.process.send_signal(stop_signal)


def _print_lines(name: str, lines: IO[str]) -> None:
    """Print each line of a trial, preceded by its name."""
    info = Console().info
    with lines:
        for line in lines:
            info(f"{name} | {line.rstrip()}")


POLL_S = 0.05
DRAIN_TIMEOUT_S = 2.0
_STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL)
# Set by wandb's agent for a single run: with the same ID, trials would overwrite each other.
_SINGLE_RUN_VARIABLES = ("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")
# accel-run in a process that saves if the sweep is killed; -P: do not import a runner.py of the current folder
TRIAL_MAIN = (
    "import signal, sys; from runner.host.parent_death import die_with_parent; "
    "die_with_parent(int(sys.argv.pop(1)), signal.SIGTERM); from runner.cli import main; sys.exit(main())"
)
