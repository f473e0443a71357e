"""Stack traces of all threads of a process, written by faulthandler, even if it hangs in C code."""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runner.base.paths import PACKAGE, shipped_path

SIGNAL = signal.SIGUSR2
ANSWER_S = 2.0  # how long to wait for the stacks of a process
STOPPED = "is stopped (SIGSTOP)"


@dataclass(frozen=True)
class StackFrame:
    """A frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        place = f"{shorten_path(self.file)}:{self.line} in {self.function}"
        return f"{place}: {text}" if text else place


def dump() -> str:
    """Return the stacks of all threads of this process in the format of faulthandler, without writing a file."""
    main = threading.main_thread().ident or 0
    parts = []
    for thread in sorted(sys._current_frames(), key=lambda thread: thread == main):  # the main thread last
        calls = [f'  File "{call.file}", line {call.line} in {call.function}' for call in current_frames(thread)]
        parts.append("\n".join([f"Thread 0x{thread:016x} (most recent call first):", *calls]))
    return "\n\n".join(parts) + "\n"


def dump_on_signal(folder: Path) -> None:
    """Make this process write its stacks to a file in `folder` on request."""
    path = folder / f"{_FILE_PREFIX}{os.getpid()}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(SIGNAL, descriptor, all_threads=True)


def request_stacks(folder: Path, states: Mapping[int, str]) -> dict[int, str]:
    """Return PID -> stacks of the processes that have called `dump_on_signal` with this folder.

    For a process that is stopped or does not answer, a note replaces the stacks.
    states  PID -> process state
    """
    stacks: dict[int, str] = {}
    waiting: dict[int, Path] = {}
    for pid, state in states.items():
        path = folder / f"{_FILE_PREFIX}{pid}"
        if not path.exists():
            continue
        if state in "Tt":
            stacks[pid] = STOPPED if state == "T" else "is stopped by a debugger"
        else:
            path.write_bytes(b"")  # faulthandler appends
            with suppress(ProcessLookupError):
                os.kill(pid, SIGNAL)
                waiting[pid] = path
    limit = time.monotonic() + ANSWER_S
    before: dict[int, str] = {}
    while waiting and time.monotonic() < limit:
        time.sleep(0.05)
        for pid, path in list(waiting.items()):
            text = path.read_text(errors="replace")
            if text and text == before.get(pid):  # unchanged, so complete
                stacks[pid] = text
                del waiting[pid]
            before[pid] = text
    return stacks | {pid: before.get(pid) or "does not answer" for pid in waiting}


def parse_main_thread(text: str) -> list[StackFrame]:
    """Parse the frames of the main thread, which faulthandler writes last. Returns the innermost frame first."""
    last = re.split(r"^(?:Current thread|Thread) 0x.*$", text, flags=re.MULTILINE)[-1]
    return [StackFrame(file, int(line), function) for file, line, function in _FRAME.findall(last)]


def current_frames(thread: int) -> list[StackFrame]:
    """Return the frames of a thread of this process, innermost first."""
    frames, frame = [], sys._current_frames().get(thread)
    while frame is not None:
        frames.append(StackFrame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def waits_for_ranks(call: StackFrame) -> bool:
    """Return whether the innermost call waits for other ranks, or for a device that may be running a collective."""
    return call.function == "synchronize" or call.file in _DEVICE_WAITS or is_collective(call)


def is_collective(call: StackFrame) -> bool:
    """Return whether the innermost call is a collective."""
    return "/torch/distributed/" in call.file or call.file.startswith(_COLLECTIVES)


def is_debugger(file: str) -> bool:
    """Return whether a source file belongs to a debugger or to IPython."""
    return Path(file).name in _DEBUGGERS or "/pydevd" in file or "/debugpy/" in file or "/IPython/" in file


def user_frame(frames: list[StackFrame]) -> StackFrame | None:
    """Return the innermost frame in the user's code, outside of accel-run and libraries."""
    return next((frame for frame in frames if _is_user_code(frame.file)), None)


def format_summary(frames: list[StackFrame], count: int = 3) -> list[str]:
    """Format the innermost frames, and the innermost frame of the user's code, one per line."""
    shown = frames[:count]
    user = user_frame(frames)
    if user is not None and user not in shown:
        shown = [*shown, user]
    return [f"  {frame}" for frame in shown]


def join_stacks(by_name: Mapping[str, str]) -> str:
    """Join the stacks of several processes as one text."""
    return "\n\n".join(f"==== {name}\n{text.strip()}" for name, text in by_name.items()) + "\n"


def _is_user_code(file: str) -> bool:
    is_shipped_task = file.startswith(f"{shipped_path('tasks')}/")
    return is_shipped_task or not (file.startswith(_LIBRARIES) or file.startswith("<"))


def shorten_path(file: str) -> str:
    """Return the path of a source file, relative to accel-run, a library or the working directory if inside one."""
    for folder in (str(PACKAGE.parent), *sorted(_FOLDERS, key=len, reverse=True), str(Path.cwd())):
        if file.startswith(f"{folder}/"):
            return file[len(folder) + 1 :]
    return file


_FILE_PREFIX = "stacks-"
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_COLLECTIVES = tuple(
    str(PACKAGE / name) for name in ("distributed/", "distributed/world.py", "engine/hooks/rank_sync.py")
)
_DEVICE_WAITS = tuple(str(PACKAGE / name) for name in ("axes/precision.py", "tensors/async_copy.py"))
_DEBUGGERS = {"pdb.py", "bdb.py", "ipdb.py", "pudb.py"}
_FOLDERS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_LIBRARIES = (f"{PACKAGE}/", *(f"{folder}/" for folder in _FOLDERS))
