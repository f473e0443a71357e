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

from runner.launch.trials import Trial
from runner.observe.events import Console


@dataclass(frozen=True)
class Slot:
    """A place for a trial.

    environment  what it has besides that of the sweep
    cores        numbers of the CPU threads that are its part: what it counts and may use; empty: all
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

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 let those under way save and stop; a second one ends them, a third kills them.
    A trial whose sweep was killed is asked to save, too. Only the main thread may open it.

    environment  what trials have besides that of the sweep, where nobody has set it
    """

    def __init__(self, slots: Sequence[Slot] = ALONE, environment: Mapping[str, str] | None = None) -> None:
        self.num_asked = 0
        self._environment = dict(environment or {})
        self._free = list(slots)
        self._is_alone = len(slots) == 1
        self._running: list[_Running] = []
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def is_stopped(self) -> bool:
        """Return whether a stop was requested."""
        return self.num_asked > 0

    @property
    def has_room(self) -> bool:
        """Tell whether another trial may be started."""
        return bool(self._free) and not self.is_stopped

    def __bool__(self) -> bool:
        return bool(self._running)

    def __enter__(self) -> Pool:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._hand_on)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()  # where something went wrong here, what the trials have is kept
        while self:
            self.wait()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def start(self, trial: Trial, words: Sequence[str]) -> None:
        """The trial is a process now. Alone it has the terminal, else each of its lines says whose it is."""
        slot = self._free.pop(0)
        kept = {key: value for key, value in os.environ.items() if key not in _OF_ONE_RUN}
        kept |= {key: value for key, value in self._environment.items() if not kept.get(key)}
        line = [sys.executable, "-P", "-c", TRIAL_MAIN, str(os.getpid()), *words]
        told: dict[str, Any] = {} if self._is_alone else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            line, stdin=None if self._is_alone else subprocess.DEVNULL, env={**kept, **slot.environment}, text=True,
            errors="replace", **told,
        )  # fmt: skip
        if slot.cores:
            with suppress(OSError, AttributeError):  # it has ended, or the system has no such call
                os.sched_setaffinity(process.pid, slot.cores)  # before it can have threads
        reader = None
        if process.stdout is not None:
            reader = threading.Thread(target=_tell, args=(trial.name, process.stdout), daemon=True)
            reader.start()
        self._running.append(_Running(trial, process, slot, reader))
        if self.is_stopped:  # between the caller's look and the process
            process.send_signal(signal.SIGUSR1)

    def wait(self) -> tuple[Trial, int]:
        """Wait until one of the trials ends; return it and its exit code, 128 + n for signal n."""
        while True:
            for running in self._running:
                code = running.process.poll()
                if code is None:
                    continue
                if running.reader is not None:
                    running.reader.join(timeout=_LAST_WORDS_S)  # a child of the trial's may hold the pipe
                self._running.remove(running)
                self._free.append(running.slot)
                return running.trial, code if code >= 0 else 128 - code
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        """Ask running trials to save and stop, once, and start no other."""
        if not self.is_stopped:
            self._hand_on()

    def _hand_on(self, number: int = 0, frame: FrameType | None = None) -> None:
        """A terminal or a scheduler may have signalled the trials too, which would leave at once at a second SIGTERM.

        SIGUSR1 asks them to save and stop, and does not count as a first.
        """
        self.num_asked += 1
        asked = _ASKING[min(self.num_asked, len(_ASKING)) - 1]
        for running in self._running:
            running.process.send_signal(asked)


def _tell(name: str, lines: IO[str]) -> None:
    """Print each line of a trial with its name."""
    say = Console().info
    with lines:
        for line in lines:
            say(f"{name} | {line.rstrip()}")


_LOOK_S = 0.05
_LAST_WORDS_S = 2.0
_ASKING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL)
# What wandb's agent gives to the one run it has started: with the same id trials would write over each other.
_OF_ONE_RUN = ("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")
# accel-run, in a process that is asked to save when the sweep is killed; -P: no runner.py of this folder is ours
TRIAL_MAIN = (
    "import signal, sys; from runner.base.parent_death import die_with_parent; "
    "die_with_parent(int(sys.argv.pop(1)), signal.SIGTERM); from runner.cli import main; sys.exit(main())"
)
