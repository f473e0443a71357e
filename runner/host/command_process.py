"""Run a command of accel-run in a subprocess: its output is relayed, and its error is raised here."""

from __future__ import annotations

import codecs
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from runner.base import errors
from runner.base.errors import AccelRunError, Exit, Problem, rebuild_error
from runner.host.parent_death import child_command

Write = Callable[[str], object]


@dataclass(frozen=True)
class CommandResult:
    """Exit code of a command, and its standard output if that was not relayed."""

    code: int
    out: str = ""


def run_command(args: Sequence[str], *, relay_output: bool = True) -> CommandResult:
    """Run `accel-run ARGS` in a subprocess and wait for it.

    It needs a separate process, because a run installs signal handlers, forks ranks, changes torch's global settings,
    and may call os._exit, none of which may happen in a notebook or another program. The process has a separate
    session, so that it does not receive Ctrl-C itself: the first KeyboardInterrupt in this process makes the run save
    and stop, the second one ends it. The run also saves and stops if this process is killed.

    relay_output  write its standard output to sys.stdout, which may be a notebook's; False: return it
    Raises the AccelRunError that ended the command, with its message and exit code, and KeyboardInterrupt.
    """
    error_fd, child_error_fd = os.pipe()
    try:
        process = subprocess.Popen(
            child_command(args, signal.SIGTERM, child_error_fd),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[child_error_fd],
            start_new_session=True,
        )  # fmt: skip
    except BaseException:
        os.close(error_fd)
        raise
    finally:
        os.close(child_error_fd)
    assert process.stdout is not None
    assert process.stderr is not None
    captured: list[str] = []
    error_parts: list[str] = []
    sinks: dict[int, Write] = {
        process.stdout.fileno(): _make_writer(sys.stdout) if relay_output else captured.append,
        process.stderr.fileno(): _make_writer(sys.stderr),
        error_fd: error_parts.append,
    }
    num_interrupts = 0
    try:
        relay = _Relay(process, sinks)
        while True:
            try:
                relay.run()
                break
            except KeyboardInterrupt:
                num_interrupts += 1
                process.send_signal(signal.SIGTERM)  # handled like SIGINT, which background jobs ignore
    except BaseException:  # for example, because sys.stdout is that of a closed notebook
        process.send_signal(signal.SIGTERM)
        raise
    finally:
        process.stdout.close()
        process.stderr.close()
        os.close(error_fd)
    code = process.wait()
    if num_interrupts:
        raise KeyboardInterrupt
    if text := "".join(error_parts):
        raise _decode_error(text)
    return CommandResult(code if code >= 0 else 128 - code, "".join(captured))


def send_error(descriptor: int, error: AccelRunError) -> None:
    """Send the error that ended a command to the process that started it."""
    content = {
        "kind": type(error).__name__,
        "problems": [dataclasses.asdict(problem) for problem in error.problems],
        "exit_code": int(error.exit_code),
        "place": dict(error.place),
        "notes": list(getattr(error, "__notes__", ())),
    }
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file, default=str)


def _make_writer(stream: TextIO | None) -> Write:
    """Return a function that writes and flushes; otherwise, a program's log file would lag behind by kilobytes.

    stream  None: the output is dropped, because the program has no such stream (a service, or under pythonw)
    """
    flush = getattr(stream, "flush", lambda: None)  # print() does not need it, so a replaced sys.stdout may lack it

    def write(text: str) -> None:
        if stream is not None:
            stream.write(text)
            flush()

    return write


class _Relay:
    """Forwards the output of a process until it exits; its descendants may keep the pipes open for longer."""

    def __init__(self, process: subprocess.Popen[bytes], sinks: dict[int, Write]) -> None:
        self._process = process
        self._selector = selectors.DefaultSelector()
        for descriptor, write in sinks.items():
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self._selector.register(descriptor, selectors.EVENT_READ, (decoder, write))

    def run(self) -> None:
        while self._selector.get_map():
            ready = self._selector.select(POLL_S)
            if not ready and self._process.poll() is not None:
                break
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                decoder, write = key.data
                text = decoder.decode(data, final=not data)
                if not data:
                    self._selector.unregister(key.fd)
                if text:
                    write(text)
        self._process.wait()
        self._selector.close()


def _decode_error(text: str) -> AccelRunError:
    content: dict[str, Any] = json.loads(text)
    kind = vars(errors).get(content["kind"], AccelRunError)  # a task may define another error class
    problems = tuple(Problem(**problem) for problem in content["problems"])
    error = rebuild_error(kind, problems, Exit(content["exit_code"]), content["place"])
    for note in content["notes"]:
        error.add_note(note)
    return error


POLL_S = 0.1
