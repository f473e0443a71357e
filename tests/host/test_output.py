"""Non-blocking output is complete and in order if it is read, and bounded if it is not."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from runner.host import output
from runner.host.output import nonblocking_streams
from tests.waiting import wait_until

LIMIT_S = 60.0  # exceeded only if there is a defect


class Pipe:
    """A standard output whose pipe is not read yet."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.stream: TextIO = os.fdopen(self.writer, "w", encoding="utf-8")

    def rest(self) -> bytes:
        """Return the data that can be read now."""
        os.set_blocking(self.reader, False)
        result = b""
        try:
            while data := os.read(self.reader, 1 << 20):
                result += data
        except BlockingIOError:
            pass
        return result

    def close(self) -> None:
        os.close(self.reader)
        self.stream.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


@contextmanager
def printing(to: Pipe | TextIO, *, is_read: bool = False) -> Iterator[None]:
    """Print to the stream without blocking. This is not a fixture, because pytest replaces the streams before the test.

    is_read  whether a thread reads; on a busy machine, it may pause for longer than a command waits at its end
    """
    with contextlib.redirect_stdout(to.stream if isinstance(to, Pipe) else to), nonblocking_streams():
        yield
        if is_read:
            output.finish(LIMIT_S)


def lines_of(number: int) -> list[str]:
    return [f"line {count} {'x' * 90}" for count in range(number)]


def read_slowly(pipe: Pipe, got: bytearray, piece: int = 3000) -> threading.Thread:
    """Read in small pieces until the other end is closed, and yield to the writer after each piece."""

    def read() -> None:
        while data := os.read(pipe.reader, piece):
            got.extend(data)
            os.sched_yield()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_slow_reader_gets_every_line_in_order(pipe: Pipe) -> None:
    written, got = lines_of(20_000), bytearray()
    with printing(pipe, is_read=True):
        reader = read_slowly(pipe, got)
        for line in written:
            print(line)
    pipe.stream.close()
    reader.join(LIMIT_S)
    assert got.decode().splitlines() == written


def test_a_resuming_reader_receives_the_queued_lines(pipe: Pipe) -> None:
    written, got = lines_of(5_000), bytearray()
    with printing(pipe, is_read=True):
        for line in written:
            print(line)  # all lines are printed before the first byte is read, without blocking
        reader = read_slowly(pipe, got, 1 << 16)
    pipe.stream.close()
    reader.join(LIMIT_S)
    assert got.decode().splitlines() == written


@pytest.mark.slow
def test_the_oldest_lines_beyond_the_bound_are_dropped(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped lines are counted."""
    monkeypatch.setattr(output, "MAX_BUFFERED_BYTES", 50_000)
    written, got = lines_of(5_000), bytearray()
    with printing(pipe, is_read=True):
        for line in written:
            print(line)
        reader = read_slowly(pipe, got, 1 << 16)
    pipe.stream.close()
    reader.join(LIMIT_S)
    shown = got.decode().splitlines()
    whole = [line for line in shown if line in set(written)]
    notes = [line for line in shown if line.startswith("(")]
    assert notes
    assert whole[-1] == written[-1]
    dropped = sum(int(note.strip("(").split()[0]) for note in notes)
    # A partially written line is not complete, and must not be counted as dropped.
    assert abs(len(written) - len(whole) - dropped) <= len(notes)
    assert whole == sorted(whole, key=written.index)
    assert sum(map(len, shown)) < 50_000 + (2 << 16)


def test_the_end_does_not_wait_for_a_stalled_reader(pipe: Pipe) -> None:
    """The wait would not end. The writer thread has to end, too."""
    with printing(pipe):
        for line in lines_of(5_000):
            print(line)
    assert "output" not in {thread.name for thread in threading.enumerate()}


def test_stdout_and_stderr_in_one_pipe_keep_their_order(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = os.fdopen(os.dup(pipe.writer), "w", encoding="utf-8")
    monkeypatch.setattr(sys, "stderr", twin)
    written, got = lines_of(3_000), bytearray()
    with printing(pipe, is_read=True):
        for number, line in enumerate(written):
            print(line, file=sys.stderr if number % 2 else sys.stdout)
        reader = read_slowly(pipe, got)
    twin.close()
    pipe.stream.close()
    reader.join(LIMIT_S)
    assert got.decode().splitlines() == written


def test_direct_writes_to_the_descriptor_do_not_block(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "STALLED_S", 0.0)
    with printing(pipe, is_read=True):
        print("x" * 200_000)
        wait_until(lambda: fcntl.fcntl(pipe.writer, fcntl.F_GETFL) & os.O_NONBLOCK, "the descriptor does not block")
        with pytest.raises(BlockingIOError):
            os.write(pipe.writer, b"y" * 4096)
        got = bytearray()
        reader = read_slowly(pipe, got, 1 << 16)
    assert not fcntl.fcntl(pipe.writer, fcntl.F_GETFL) & os.O_NONBLOCK, (
        "the descriptor must block again, because the shell also uses it"
    )
    pipe.stream.close()
    reader.join(LIMIT_S)
    assert got.decode() == "x" * 200_000 + "\n"


def test_a_forked_process_does_not_repeat_queued_lines(pipe: Pipe) -> None:
    got = bytearray()
    with printing(pipe, is_read=True):
        print("x" * 200_000)
        pid = os.fork()
        if pid == 0:
            print("from the child")
            output.finish(LIMIT_S)
            os._exit(0)
        reader = read_slowly(pipe, got, 1 << 16)
        assert os.waitpid(pid, 0)[1] == 0
    pipe.stream.close()
    reader.join(LIMIT_S)
    text = got.decode()
    assert text.count("x") == 200_000
    assert text.count("from the child") == 1


def test_a_reader_that_exits_does_not_end_the_run(pipe: Pipe) -> None:
    os.close(pipe.reader)
    with printing(pipe):
        print("x" * 200_000)
        print("y", flush=True)
    pipe.reader = os.open(os.devnull, os.O_RDONLY)


def test_a_terminal_of_another_user_does_not_block_the_end() -> None:
    """Under sudo, for example, the terminal cannot be opened by its name, and no process reads it."""
    pid, master = pty.fork()
    if pid == 0:
        opened = os.open

        def refuse(path: str, *given: int) -> int:
            if str(path).startswith("/proc/self/fd/"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return opened(path, *given)

        os.open = refuse  # type: ignore[assignment]
        with os.fdopen(1, "w") as stream, printing(stream):
            for line in lines_of(400):
                print(line)
        os._exit(0)
    status: list[int] = []

    def has_ended() -> bool:
        result, code = os.waitpid(pid, os.WNOHANG)
        status.extend([code] * (result == pid))
        return result == pid

    try:
        wait_until(has_ended, "the process has ended, although nobody reads its terminal")
    finally:
        if not status:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(master)
    assert status == [0]


@pytest.mark.slow
def test_output_to_a_socket_works() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, os.fdopen(theirs.fileno(), "w", closefd=False) as stream:
        ours.settimeout(LIMIT_S)
        with printing(stream):
            for line in lines_of(10_000):
                print(line)
            got = bytearray()
            while not got.endswith(f"{lines_of(10_000)[-1]}\n".encode()):
                got.extend(ours.recv(1 << 16))
    assert got.decode().splitlines() == lines_of(10_000)


def test_output_to_a_file_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    path.write_text("before\n")
    with path.open("a") as stream, printing(stream):
        print("now")
        sys.stdout.buffer.write(b"bytes\n")
        print("no end", end="")
    assert path.read_text().split("\n") == ["before", "now", "bytes", "no end"]


@pytest.mark.parametrize("refusal", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_drops_lines_until_space_is_free(
    refusal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, is_full, write = tmp_path / "out.log", [False], os.write

    def fill_disk(descriptor: int, data: bytes) -> int:
        if is_full[0]:
            raise OSError(refusal, os.strerror(refusal))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", fill_disk)
    with path.open("a") as stream, printing(stream):
        print("before")
        is_full[0] = True
        print("meanwhile")
        is_full[0] = False
        print("after")
    assert path.read_text() == "before\nafter\n"


def test_a_task_may_redirect_its_output(pipe: Pipe, tmp_path: Path) -> None:
    path = tmp_path / "elsewhere"
    with printing(pipe):
        print("first")
        kept = os.dup(pipe.writer)
        with path.open("w") as file:
            os.dup2(file.fileno(), pipe.writer)
            print("second", flush=True)
            os.dup2(kept, pipe.writer)
        os.close(kept)
        print("third")
    assert path.read_text() == "second\n"
    assert pipe.rest().decode() == "first\nthird\n"


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_descriptors_of_closed_streams_are_not_reused(closed: str, tmp_path: Path) -> None:
    """Otherwise, the next file that is opened would get the descriptor, and the printed text."""
    program = (
        "import os, sys\nfrom runner.host.output import open_closed_streams\nopen_closed_streams()\n"
        "number = os.open('data', os.O_WRONLY | os.O_CREAT)\nprint('words'); print('words', file=sys.stderr)\n"
        "assert number > 2; assert sys.stdin and sys.stdout and sys.stderr\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)}, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0
    assert (tmp_path / "data").read_bytes() == b""
