"""Non-blocking standard output and standard error.

If a terminal is stopped with Ctrl-S, ssh hangs, or the reader of a pipe sleeps, write(2) blocks every caller: the
training loop, a data worker, the supervisor of the ranks. Here, a write sends what the reader accepts and buffers the
rest, which a thread writes as soon as the reader accepts more. The buffer holds at most MAX_BUFFERED_BYTES; beyond
that, the oldest lines are dropped and replaced with a line that states their number. An active reader
receives everything, in order. Secrets are redacted in complete lines, unless a line is flushed before its end.

While the reader is active, no thread is used: output from a thread could appear after what C code or a subprocess
prints later to the same descriptor, and a process with threads cannot safely fork ranks.
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

from runner.base.secret import redact_message

MAX_BUFFERED_BYTES = 8 << 20  # per terminal or pipe; 10 minutes of a progress bar are 0.5 MB
FINISH_S = 2.0  # at exit: stop waiting if the reader makes no progress for this time
STALLED_S = 1.0  # after this time without progress, writes by C code and subprocesses do not block either
POLL_MS = 100


@contextmanager
def nonblocking_streams() -> Iterator[None]:
    """Make sys.stdout and sys.stderr non-blocking; on exit, wait at most FINISH_S for a reader that makes no progress.

    Text that a closed pipe or a full disk does not accept is dropped without an error. Nested use is a no-op.
    """
    before = sys.stdout, sys.stderr
    if any(isinstance(stream, (_Stream, _BestEffortStream)) for stream in before):
        yield
        return
    targets: dict[tuple[int, ...], _OutputTarget] = {}
    sys.stdout, sys.stderr = (stream and cast(TextIO, _wrap(stream, targets)) for stream in before)
    try:
        yield
    finally:
        finish()
        sys.stdout, sys.stderr = before
        for target in targets.values():
            target.close()


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error, including that of C code and forked ranks.

    For commands that print JSON, so that a task's output does not end up in it.
    """
    before = sys.stdout
    before.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        yield
    finally:
        sys.stdout.flush()
        before.flush()  # a task may have kept the original stream
        sys.stdout = before
        os.dup2(saved, 1)
        os.close(saved)


def make_streams_nonblocking() -> None:
    """Enter `nonblocking_streams` until this process exits; for processes started by multiprocessing."""
    from multiprocessing import util

    _PROCESS_LIFETIME.enter_context(nonblocking_streams())
    # Not atexit: multiprocessing ends its processes by os._exit, which skips the handlers of atexit.
    util.Finalize(None, finish, (STALLED_S,), exitpriority=0)


def open_closed_streams() -> None:
    """Open /dev/null for each standard stream that the parent process has closed.

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
    for target in list(_OUTPUT_TARGETS):
        target.finish(limit_s)


def stop_threads() -> None:
    """Stop the threads of this module, so that the process may fork; the next write restarts one if needed."""
    for target in list(_OUTPUT_TARGETS):
        target.stop_threads()


def write_if_ready(text: str) -> None:
    """Write a line to standard error if that does not block; for signal handlers just before the process exits."""
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode(errors="replace"))


def _wrap(stream: TextIO, targets: dict[tuple[int, ...], _OutputTarget]) -> _Stream | _BestEffortStream:
    """Wrap the descriptor of `stream`; streams of the same file share one target, which preserves their order."""
    try:
        descriptor = stream.fileno()
        with suppress(OSError):
            stream.flush()
        place = _file_identity(descriptor)
        if place not in targets:
            targets[place] = _OutputTarget(descriptor)
        target = targets[place]
        target.descriptors.append(descriptor)
    except (OSError, ValueError, AttributeError):  # in-memory streams, as in tests and notebooks
        return _BestEffortStream(stream)
    return _Stream(stream, target, descriptor)


class _BestEffortStream:
    """A stream that ignores write errors."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(redact_message(text))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Stream:
    """A line-buffered text stream for a target. Other attributes (isatty, fileno, ...) are those of the original."""

    def __init__(self, stream: TextIO, target: _OutputTarget, descriptor: int) -> None:
        self._stream, self._target, self._descriptor = stream, target, descriptor
        self._place = _file_identity(descriptor)
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
        with self._target.lock:
            data, self._line = bytes(self._line), bytearray()
        self._send(redact_message(data.decode(errors="surrogateescape")).encode(errors="surrogateescape"))

    def add(self, data: bytes) -> None:
        with self._target.lock:
            self._line += data
        if b"\n" in data or b"\r" in data or len(self._line) > select.PIPE_BUF:
            self.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _send(self, data: bytes) -> None:
        try:
            is_redirected = _file_identity(self._descriptor) != self._place
        except OSError:
            return
        if is_redirected:  # the task has redirected the descriptor
            with suppress(OSError):
                _write_all(self._descriptor, data)
            return
        self._target.put(data)


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


class _OutputTarget:
    """One terminal, pipe, socket or file, and the output that its reader has not accepted yet.

    descriptors  the descriptors of standard output and standard error that refer to it
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptors: list[int] = []
        self.lock = threading.RLock()  # reentrant: a signal handler may print during a write
        self._original = os.dup(descriptor)
        self._nonblocking = _reopen_nonblocking(self._original)
        self._try_write = _nonblocking_writer(self._original, self._nonblocking)
        self._buffered: deque[bytes] = deque()
        self._num_buffered = self._num_dropped = 0  # in bytes; in lines
        self._stalled_since: float | None = None  # inherited by forked processes
        self._is_guarded = self._is_closed = False
        self._thread: threading.Thread | None = None
        self._stop_thread = threading.Event()
        _OUTPUT_TARGETS.add(self)

    def put(self, data: bytes) -> None:
        """Write as much of the buffer and then of `data` as the reader accepts now, and buffer the rest."""
        with self.lock:
            if data and not self._is_closed:
                self._buffered.append(data)
                self._num_buffered += len(data)
            self._write_available()
            self._drop_oldest()
            if self._buffered:
                self._start()

    def finish(self, limit_s: float) -> None:
        """Wait until the buffer is empty or the reader has accepted nothing for `limit_s` seconds; drop the rest."""
        with self.lock:
            self._write_available()
        while self._buffered and self._stalled_s() < limit_s:
            self._wait()
            with self.lock:
                self._write_available()
        with self.lock:
            self._discard()
        self.stop_threads()

    def close(self) -> None:
        self.stop_threads()
        self._is_closed = True
        _OUTPUT_TARGETS.discard(self)
        for descriptor in {self._original, self._nonblocking} - {None}:
            with suppress(OSError):
                os.close(cast(int, descriptor))

    def stop_threads(self) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._stop_thread.set()
            thread.join()
        self._thread = None
        self._guard(False)

    # ------------------------------------------------------------ around a fork

    def before_fork(self) -> None:
        self.stop_threads()
        self.lock.acquire()

    def after_fork_in_parent(self) -> None:
        if self._buffered:
            self._start()
        self.lock.release()

    def after_fork_in_child(self) -> None:
        # The parent writes its buffer. If the child wrote its copy, too, the text would appear twice.
        self.lock, self._thread = threading.RLock(), None
        self._discard()

    # ------------------------------------------------------------ writing

    def _write_available(self) -> None:
        try:
            while self._buffered:
                data = self._note_of_dropped() + self._buffered[0]
                written = self._try_write(data)
                if written < len(data) and (written or self._stalled_since is None):
                    self._stalled_since = time.monotonic()
                if not written:
                    return
                rest, self._num_dropped = data[written:], 0
                self._num_buffered += len(rest) - len(self._buffered.popleft())
                if rest:
                    self._buffered.appendleft(rest)
                    return
                self._stalled_since = None
        except OSError as error:  # the reader is gone; or the disk is full, which may be temporary
            self._discard()
            self._is_closed = error.errno not in (errno.ENOSPC, errno.EDQUOT)

    def _note_of_dropped(self) -> bytes:
        if not self._num_dropped:
            return b""
        lines = f"{self._num_dropped} line{'s' * (self._num_dropped > 1)}"
        return f"\n({lines} dropped here: the reader of this output had stopped)\n".encode()

    def _stalled_s(self) -> float:
        return 0.0 if self._stalled_since is None else time.monotonic() - self._stalled_since

    def _drop_oldest(self) -> None:
        while self._num_buffered > MAX_BUFFERED_BYTES and len(self._buffered) > 1:
            data = self._buffered.popleft()
            self._num_buffered -= len(data)
            self._num_dropped += data.count(b"\n")

    def _discard(self) -> None:
        self._buffered.clear()
        self._num_buffered = self._num_dropped = 0

    def _start(self) -> None:
        if self._thread is None:
            self._stop_thread.clear()
            thread = threading.Thread(target=self._drain, name="output", daemon=True)
            with suppress(RuntimeError):  # no thread can be started: the next write flushes the buffer
                thread.start()
                self._thread = thread

    def _drain(self) -> None:
        while not self._stop_thread.is_set():
            self._wait()
            with self.lock:
                self._write_available()
                self._guard(self._stalled_s() > STALLED_S)
                if not self._buffered:
                    self._thread = None
                    return

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._original, select.POLLOUT)
        before = self._num_buffered
        if poll.poll(POLL_MS):
            with self.lock:
                self._write_available()
            if self._num_buffered == before:  # poll reports space, but it is too small for a write
                time.sleep(POLL_MS / 1000)

    def _guard(self, is_stalled: bool) -> None:
        """Make the descriptors non-blocking while the reader is stalled, so that C code and subprocesses get EAGAIN."""
        if is_stalled == self._is_guarded or self._nonblocking is None:
            return
        place = _file_identity(self._original)
        if _file_identity(self._nonblocking) != place:  # /dev/tty, which `_send` would mistake for a redirection
            return
        self._is_guarded = is_stalled
        for descriptor in self.descriptors:
            with suppress(OSError):
                if _file_identity(descriptor) == place:
                    os.dup2(self._nonblocking if is_stalled else self._original, descriptor)


def _reopen_nonblocking(descriptor: int) -> int | None:
    """Return a non-blocking descriptor of the same terminal or pipe; None if it cannot be opened.

    Opens it again, because O_NONBLOCK belongs to the open file description, which the shell shares.
    """
    if not (stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor)):
        return None
    # The terminal of another user, as under sudo, can only be opened as /dev/tty, and only if it controls this process.
    for path in (f"/proc/self/fd/{descriptor}", *(("/dev/tty",) if _is_controlling_terminal(descriptor) else ())):
        with suppress(OSError):
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return None


def _is_controlling_terminal(descriptor: int) -> bool:
    try:
        return os.tcgetpgrp(descriptor) >= 0
    except OSError:
        return False


def _nonblocking_writer(descriptor: int, nonblocking: int | None) -> Callable[[bytes], int]:
    """Return a function that writes as many bytes as the reader accepts without blocking, and returns their number."""
    mode = os.fstat(descriptor).st_mode

    def write_nonblocking(data: bytes) -> int:
        try:
            return os.write(cast(int, nonblocking), data)
        except BlockingIOError:
            return 0

    def write_to_socket(data: bytes) -> int:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as line:
                return line.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def write_chunks(data: bytes) -> int:
        num_written = 0
        while num_written < len(data) and select.select([], [descriptor], [], 0)[1]:
            num_written += os.write(descriptor, data[num_written : num_written + select.PIPE_BUF])
        return num_written

    def write_to_file(data: bytes) -> int:
        _write_all(descriptor, data)
        return len(data)

    if nonblocking is not None:
        return write_nonblocking
    if stat.S_ISSOCK(mode):
        return write_to_socket
    return write_chunks if stat.S_ISFIFO(mode) or os.isatty(descriptor) else write_to_file


def _write_all(descriptor: int, data: bytes) -> None:
    num_written = 0
    while num_written < len(data):
        num_written += os.write(descriptor, data[num_written:])


def _file_identity(descriptor: int) -> tuple[int, ...]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_rdev


_PROCESS_LIFETIME = ExitStack()
_OUTPUT_TARGETS: weakref.WeakSet[_OutputTarget] = weakref.WeakSet()


def _before_fork() -> None:
    for target in list(_OUTPUT_TARGETS):
        target.before_fork()


def _after_fork_in_parent() -> None:
    for target in list(_OUTPUT_TARGETS):
        target.after_fork_in_parent()


def _after_fork_in_child() -> None:
    for target in list(_OUTPUT_TARGETS):
        target.after_fork_in_child()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
