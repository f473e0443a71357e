"""Non-blocking standard output and standard error.

A terminal stopped with Ctrl-S, a hung ssh or a pipe with a sleeping reader blocks write(2) for as long as that
lasts, and with it every caller: the training loop, a data worker, the supervisor of the ranks. Here a write passes
on what fits and buffers the rest, which a thread writes as soon as the reader accepts more. Up to KEPT_BYTES are
buffered; then the oldest lines are dropped and replaced by a line with their number. An active reader receives
everything, in order. Secrets are redacted on the way, in whole lines unless a line is flushed before its end.

Why not a thread for every write: even with an active reader, output would appear after what C code or a subprocess
prints to the same descriptor, and a process with threads cannot safely fork ranks.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TextIO, cast

from runner.base.secret import redacted_message

KEPT_BYTES = 8 << 20  # per terminal or pipe: 10 minutes of a progress bar are 0.5 MB
FINISH_S = 2.0  # at exit: stop after this time without progress of the reader
STALLED_S = 1.0  # after this time without progress, C code and subprocesses do not wait either
POLL_MS = 100


@contextmanager
def never_waiting() -> Iterator[None]:
    """Make sys.stdout and sys.stderr non-blocking; on exit, wait at most FINISH_S for a reader that makes no progress.

    Text for a closed pipe, or that a full disk refuses, is dropped without an error. A nested use is a
    no-op.
    """
    before = sys.stdout, sys.stderr
    if any(isinstance(stream, (_Stream, _Outlasting)) for stream in before):
        yield
        return
    outlets: dict[tuple[int, ...], _Outlet] = {}
    sys.stdout, sys.stderr = (stream and cast(TextIO, _wrapped(stream, outlets)) for stream in before)
    try:
        yield
    finally:
        finish()
        sys.stdout, sys.stderr = before
        for outlet in outlets.values():
            outlet.close()


def never_wait_again() -> None:
    """Enter `never_waiting` for the life of this process; for processes started by multiprocessing."""
    from multiprocessing import util

    _FOR_LIFE.enter_context(never_waiting())
    util.Finalize(None, finish, (STALLED_S,), exitpriority=0)


def open_closed_streams() -> None:
    """Redirect standard streams that the parent process has closed to /dev/null.

    Otherwise the next opened file, such as a lock or a checkpoint, gets their descriptor and receives the output.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, descriptor)
            if opened > 2:
                os.close(opened)
    sys.stdin = sys.stdin or os.fdopen(0, "r", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def finish(limit_s: float = FINISH_S) -> None:
    """Flush the buffers while the reader makes progress at least every `limit_s` seconds, and drop the rest."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a task may have replaced the streams
            stream.flush()
    for outlet in list(_OUTLETS):
        outlet.finish(limit_s)


def rest() -> None:
    """Stop the threads of this module, so that the process may fork; the next write restarts one if needed."""
    for outlet in list(_OUTLETS):
        outlet.rest()


def write_at_once(text: str) -> None:
    """Write a line to standard error if that does not block; for signal handlers just before the process exits."""
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode(errors="replace"))


def _wrapped(stream: TextIO, outlets: dict[tuple[int, ...], _Outlet]) -> _Stream | _Outlasting:
    """Wrap the descriptor of `stream`; streams of the same file share one outlet, which preserves their order."""
    try:
        descriptor = stream.fileno()
        with suppress(OSError):
            stream.flush()
        place = _identity(descriptor)
        if place not in outlets:
            outlets[place] = _Outlet(descriptor)
        outlet = outlets[place]
        outlet.descriptors.append(descriptor)
    except (OSError, ValueError, AttributeError):  # in-memory streams, as in tests and notebooks
        return _Outlasting(stream)
    return _Stream(stream, outlet, descriptor)


class _Outlasting:
    """A stream that ignores write errors."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(redacted_message(text))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Stream:
    """A line-buffered text stream for an outlet; other attributes (isatty, encoding, fileno) are the original's."""

    def __init__(self, stream: TextIO, outlet: _Outlet, descriptor: int) -> None:
        self._stream, self._outlet, self._descriptor = stream, outlet, descriptor
        self._place = _identity(descriptor)
        self._line = bytearray()
        self.buffer = _Bytes(self)

    def write(self, text: str) -> int:
        if self._stream.closed:
            raise ValueError("I/O operation on closed file.")
        self.add(text.encode(self._stream.encoding or "utf-8", self._stream.errors or "strict"))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write an incomplete line; does not block."""
        with self._outlet.lock:
            data, self._line = bytes(self._line), bytearray()
        self._send(redacted_message(data.decode(errors="surrogateescape")).encode(errors="surrogateescape"))

    def add(self, data: bytes) -> None:
        with self._outlet.lock:
            self._line += data
        if b"\n" in data or b"\r" in data or len(self._line) > select.PIPE_BUF:
            self.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _send(self, data: bytes) -> None:
        try:
            is_elsewhere = _identity(self._descriptor) != self._place
        except OSError:
            return
        if is_elsewhere:  # the task has redirected the descriptor
            with suppress(OSError):
                _write_all(self._descriptor, data)
            return
        self._outlet.put(data)


class _Bytes:
    """The binary side of a stream, like `sys.stdout.buffer`."""

    def __init__(self, stream: _Stream) -> None:
        self._text = stream

    def write(self, data: Any) -> int:
        self._text.add(bytes(data))
        return len(data)

    def flush(self) -> None:
        self._text.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text._stream.buffer, name)


class _Outlet:
    """One terminal, pipe, socket or file, and the output that its reader has not accepted yet.

    descriptors  those of standard output and standard error that refer to it
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptors: list[int] = []
        self.lock = threading.RLock()  # reentrant: a signal handler may print during a write
        self._original = os.dup(descriptor)
        self._unblocked = _reopened(self._original)
        self._attempt = _attempt_for(self._original, self._unblocked)
        self._kept: deque[bytes] = deque()
        self._num_kept = self._num_dropped = 0  # bytes; lines
        self._num_noted = 0  # lines of a note that is kept first, of which nothing was written yet
        self._refused_at: float | None = None  # since when the reader takes nothing; a forked process knows it too
        self._is_guarded = self._is_over = False
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()  # the thread, at its next look
        _OUTLETS.add(self)

    def put(self, data: bytes) -> None:
        """Write what fits now, after what is kept, and keep the rest."""
        with self.lock:
            if data and not self._is_over:
                self._kept.append(data)
                self._num_kept += len(data)
            self._hand_over()
            self._drop_oldest()
            if self._kept:
                self._start()

    def finish(self, limit_s: float) -> None:
        """Wait until nothing is kept, or the reader has taken nothing for `limit_s`, now or before; drop the rest."""
        with self.lock:
            self._hand_over()
        while self._kept and self._stalled_s() < limit_s:
            self._wait()
            with self.lock:
                self._hand_over()
        with self.lock:
            self._forget()
        self.rest()

    def close(self) -> None:
        """Give back what this holds of the system."""
        self.rest()
        self._is_over = True
        _OUTLETS.discard(self)
        for descriptor in {self._original, self._unblocked} - {None}:
            with suppress(OSError):
                os.close(cast(int, descriptor))

    def rest(self) -> None:
        """End the thread; what is kept waits for the next write."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._ends.set()
            thread.join()
        self._thread = None
        self._guard(False)

    # ------------------------------------------------------------ around a fork

    def before_fork(self) -> None:
        self.rest()
        self.lock.acquire()

    def after_fork_in_parent(self) -> None:
        if self._kept:
            self._start()
        self.lock.release()

    def after_fork_in_child(self) -> None:
        """What is kept is the parent's, which hands it over."""
        self.lock, self._thread = threading.RLock(), None
        self._forget()

    # ------------------------------------------------------------ handing over

    def _hand_over(self) -> None:
        """Write as much of what is kept as the reader takes without waiting."""
        try:
            while self._kept:
                if self._num_dropped:
                    lines = f"{self._num_dropped} line{'s' * (self._num_dropped > 1)}"
                    note = f"\n({lines} dropped here: the reader of this output had stopped)\n".encode()
                    self._kept.appendleft(note)
                    self._num_kept += len(note)
                    self._num_noted, self._num_dropped = self._num_dropped, 0
                data = self._kept[0]
                taken = self._attempt(data)
                if taken < len(data) and (taken or self._refused_at is None):
                    self._refused_at = time.monotonic()
                if not taken:
                    return
                self._kept.popleft()
                self._num_kept -= taken
                self._num_noted = 0
                if taken < len(data):
                    self._kept.appendleft(data[taken:])
                    return
                self._refused_at = None
        except OSError as error:  # the reader is gone, or the disk is full, which may pass
            self._forget()
            self._is_over = error.errno not in (errno.ENOSPC, errno.EDQUOT)

    def _stalled_s(self) -> float:
        """Return for how many seconds the reader has taken nothing."""
        return 0.0 if self._refused_at is None else time.monotonic() - self._refused_at

    def _drop_oldest(self) -> None:
        while self._num_kept > KEPT_BYTES and len(self._kept) > 1:
            data = self._kept.popleft()
            self._num_kept -= len(data)
            self._num_dropped += self._num_noted or data.count(b"\n")
            self._num_noted = 0

    def _forget(self) -> None:
        self._kept.clear()
        self._num_kept = self._num_dropped = self._num_noted = 0

    def _start(self) -> None:
        if self._thread is None:
            self._ends.clear()
            thread = threading.Thread(target=self._drain, name="output", daemon=True)
            with suppress(RuntimeError):  # no thread to be had: the next write hands over
                thread.start()
                self._thread = thread

    def _drain(self) -> None:
        """Hand over until nothing is kept."""
        while not self._ends.is_set():
            self._wait()
            with self.lock:
                self._hand_over()
                self._guard(self._stalled_s() > STALLED_S)
                if not self._kept:
                    self._thread = None
                    return

    def _wait(self) -> None:
        """Wait until the reader may take more, for a moment at most."""
        poll = select.poll()
        poll.register(self._original, select.POLLOUT)
        before = self._num_kept
        if poll.poll(POLL_MS):
            with self.lock:
                self._hand_over()
            if self._num_kept == before:  # it cannot take as much as it says
                time.sleep(POLL_MS / 1000)

    def _guard(self, is_stalled: bool) -> None:
        """While the reader is stalled, C code, a crash handler or a subprocess gets EAGAIN rather than wait with it."""
        if is_stalled == self._is_guarded or self._unblocked is None:
            return
        place = _identity(self._original)
        if _identity(self._unblocked) != place:  # /dev/tty: its descriptor would be taken for one of the task's own
            return
        self._is_guarded = is_stalled
        for descriptor in self.descriptors:
            with suppress(OSError):
                if _identity(descriptor) == place:
                    os.dup2(self._unblocked if is_stalled else self._original, descriptor)


def _reopened(descriptor: int) -> int | None:
    """Return a descriptor of the same terminal or pipe that does not block; None where that cannot be had.

    Opened again, since O_NONBLOCK belongs to the open file, which the shell and other processes share.
    """
    if not (stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor)):
        return None
    # A terminal of another user, as under sudo, is opened as /dev/tty only, and only where it controls this process.
    for path in (f"/proc/self/fd/{descriptor}", *(("/dev/tty",) if _controls_us(descriptor) else ())):
        with suppress(OSError):
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return None


def _controls_us(descriptor: int) -> bool:
    try:
        return os.tcgetpgrp(descriptor) >= 0
    except OSError:
        return False


def _attempt_for(descriptor: int, unblocked: int | None) -> Callable[[bytes], int]:
    """Return what writes as many of the bytes as the reader takes without waiting, and returns how many that were."""
    mode = os.fstat(descriptor).st_mode

    def reopened(data: bytes) -> int:
        try:
            return os.write(cast(int, unblocked), data)
        except BlockingIOError:
            return 0

    def to_socket(data: bytes) -> int:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as line:
                return line.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def in_pieces(data: bytes) -> int:
        done = 0
        while done < len(data) and select.select([], [descriptor], [], 0)[1]:
            done += os.write(descriptor, data[done : done + select.PIPE_BUF])
        return done

    def to_file(data: bytes) -> int:
        _write_all(descriptor, data)
        return len(data)

    if unblocked is not None:
        return reopened
    if stat.S_ISSOCK(mode):
        return to_socket
    return in_pieces if stat.S_ISFIFO(mode) or os.isatty(descriptor) else to_file


def _write_all(descriptor: int, data: bytes) -> None:
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])


def _identity(descriptor: int) -> tuple[int, ...]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_rdev


_FOR_LIFE = ExitStack()
_OUTLETS: weakref.WeakSet[_Outlet] = weakref.WeakSet()


def _before_fork() -> None:
    for outlet in list(_OUTLETS):
        outlet.before_fork()


def _after_fork_in_parent() -> None:
    for outlet in list(_OUTLETS):
        outlet.after_fork_in_parent()


def _after_fork_in_child() -> None:
    for outlet in list(_OUTLETS):
        outlet.after_fork_in_child()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
