"""Call a function in a forked subprocess, so that it neither initializes CUDA nor leaves threads in this process."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from runner.base.errors import SystemLimit
from runner.base.loaded_torch import cuda_is_initialized
from runner.host import output
from runner.host.parent_death import die_with_parent

Result = TypeVar("Result")
NOTIFY_AFTER_S = 3.0  # `on_wait` is called after this many seconds


class Subprocess(Generic[Result]):
    """A call of a function in a forked process. Exit the context to end the process.

    Does not use ProcessPoolExecutor, which needs two threads, and hangs if the system permits only one.

    Raises SystemLimit if the process cannot be started, and RuntimeError if this process has initialized CUDA, which a
    forked child cannot use.
    """

    def __init__(self, function: Callable[..., Result], *args: Any) -> None:
        if cuda_is_initialized():
            raise RuntimeError("CUDA is initialized in this process: a forked child cannot use it")
        context = get_context("fork")
        try:
            self._line, theirs = context.Pipe()
            self._process = context.Process(target=_call_and_send, args=(theirs, os.getpid(), function, args))
            self._process.start()
        except OSError as error:
            raise SystemLimit(
                f"cannot start a subprocess: {error.strerror}",
                fix="raise the limits on processes (ulimit -u; in a container: pids) and open files (ulimit -n)",
            ) from error
        theirs.close()

    def __enter__(self) -> Subprocess[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # it has sent its result, or the result is no longer needed
        self._process.join()
        self._line.close()

    def has_ended_within(self, seconds: float) -> bool:
        """Wait at most this long; return whether `result` would return at once."""
        return self._line.poll(seconds)

    def result(self) -> Result:
        """Wait for the result. Raises the exceptions of the function, or BrokenProcessPool if the process dies."""
        try:
            has_returned, value, trace = self._line.recv()
        except (EOFError, ConnectionError):
            raise BrokenProcessPool("the process died") from None
        if not has_returned:
            raise value from _RemoteTraceback(trace)
        return value  # type: ignore[no-any-return]


def run_in_subprocess(
    function: Callable[..., Result],
    *args: Any,
    on_wait: Callable[[], object] | None = None,
    notify_after_s: float = NOTIFY_AFTER_S,
) -> Result:
    """Run a function in a forked process and return its result.

    on_wait  called once if the result takes longer than `notify_after_s` seconds
    Raises the exceptions of `Subprocess`.
    """
    with Subprocess(function, *args) as process:
        if on_wait is not None and not process.has_ended_within(notify_after_s):
            on_wait()
        return process.result()


class _RemoteTraceback(Exception):
    """The traceback of an error in the subprocess."""


def _call_and_send(line: Connection, parent: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to both processes; the parent handles it
    try:
        line.send((True, function(*args), ""))
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        try:
            line.send((False, error, trace))
        except Exception:  # it cannot be pickled
            line.send((False, RuntimeError(f"{type(error).__name__}: {error}"), trace))
    output.finish()
    with suppress(EOFError, OSError):
        line.recv()  # wait to be killed: a thread of this process serves the tensors of the result to the parent
