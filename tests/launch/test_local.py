"""The local launcher forks ranks from one process and supervises them. In these tests, every rank is a real process."""

from __future__ import annotations

import atexit
import ctypes
import errno
import json
import os
import platform
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.utils.data

from runner.base.errors import AccelRunError, ConfigError, DataError, Exit, Problem, RankLost, SystemLimit
from runner.base.rank_env import RankInfo
from runner.distributed import join
from runner.distributed.join import join_process_group
from runner.distributed.peer_loss import is_peer_loss
from runner.distributed.timeouts import call_with_timeout
from runner.distributed.world import World
from runner.durable.signals import StopRequest
from runner.launch import local
from runner.launch.local import Failure, LaunchResult, to_error
from tests.waiting import wait_until

EXIT_OF_A_THREAD = {"x86_64": 60, "aarch64": 93}[platform.machine()]  # the number of the system call
IS_OVER_NCCL = os.environ.get("RANKS_OVER") == "nccl"
LONG_S = 100.0  # a grace period in which no rank is killed
GIVES_UP_S = 0.2  # a timeout for waiting for ranks that do not come


@pytest.fixture
def tmp_path(short: Path) -> Path:
    return short


@pytest.fixture(autouse=True)
def _nobody_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves processes or temporary folders of its ranks."""
    torch.set_num_threads(1)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    before = family()
    yield
    assert family() <= before
    assert list((tmp_path / "tmp").iterdir()) == []


def _raise(text: str) -> None:
    raise ValueError(text)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("act", "exited_early"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), True),
        (lambda: os._exit(0), True),
        (partial(_raise, "was ended by SIGKILL, exited early"), False),
    ],
)
def test_a_rank_exits_early_unless_it_reports_an_error(act: Callable[[], object], exited_early: bool) -> None:
    """The text of a task's exception does not matter."""
    failures: list[Failure | None] = []
    local.run_ranks(on_rank(1, act), 2, grace_s=0.1, on_notice=lambda _, failure: failures.append(failure))
    assert [failure is None or failure.exited_early for failure in failures] == [exited_early]


def family() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def run_ranks(main: Callable[[RankInfo], tuple[int, Any]], num_ranks: int = 2, *, grace_s: float = 0.5) -> LaunchResult:
    notices: list[str] = []
    ending = local.run_ranks(main, num_ranks, grace_s=grace_s, on_notice=lambda text, _: notices.append(text))
    assert len(notices) == (ending.cause is not None), notices  # a single notice, or none
    if ending.cause is not None:
        assert notices[0].startswith(f"rank {ending.cause.rank} of {num_ranks} {ending.cause.what}, after ")
    return ending


def on_rank(chosen: int, act: Callable[[], Any], other: Callable[[RankInfo], Any] = lambda member: None) -> Any:
    """Return a main function in which rank `chosen` calls `act`, and all other ranks call `other`."""

    def main(member: RankInfo) -> tuple[int, Any]:
        if member.rank == chosen:
            act()
        else:
            other(member)
        return 0, member.rank

    return main


def in_world(
    act: Callable[[World], Any], *, timeout_s: float = 600.0 if IS_OVER_NCCL else 30.0
) -> Callable[[RankInfo], tuple[int, Any]]:
    """Return a main function that joins the process group over gloo or the NCCL of the stand-in (tests/stand_ins)."""

    def main(member: RankInfo) -> tuple[int, Any]:
        device = torch.device("cuda", member.rank) if IS_OVER_NCCL else torch.device("cpu")
        with join_process_group(member, device, timeout_s=timeout_s) as world:
            return 0, act(world)

    return main


def reduce_once(world: World) -> None:
    world.sum(torch.ones(1000, device=world.device)).sum().item()


def reduce_for_ever(world: World) -> None:
    while True:
        reduce_once(world)


# ---------------------------------------------------------------- results and exit codes


def test_results_of_ranks_are_returned_in_order(tmp_path: Path) -> None:
    def main(member: RankInfo) -> tuple[int, Any]:
        if member.rank < 2:  # the last rank ends first
            wait_until(lambda: has_ended(tmp_path, member.rank + 1))
        note_pid(tmp_path, member)
        return 0, asdict(member) | {"text": "é" * 100_000}

    ending = run_ranks(main, 3)
    assert (ending.code, ending.cause, ending.failures, ending.killed, ending.stop) == (0, None, (), (), None)
    for rank, info in enumerate(ending.results):
        assert info.pop("store").startswith("file:///")
        assert info == {
            "rank": rank, "local_rank": rank, "world_size": 3, "num_local_ranks": 3, "attempt": 0,
            "text": "é" * 100_000,
        }  # fmt: skip


def test_ranks_rendezvous_in_the_private_folder() -> None:
    def main(member: RankInfo) -> tuple[int, Any]:
        folder = Path(member.store.removeprefix("file://")).parent
        mode = folder.stat().st_mode & 0o777
        with join_process_group(member, torch.device("cpu"), timeout_s=30.0) as world:
            return 0, [mode, world.sum(torch.ones(1)).item()]

    assert run_ranks(main).results == ([0o700, 2.0], [0o700, 2.0])


def test_ranks_end_even_if_destroying_the_group_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may hang if another rank does not answer at the end."""
    limits_s = []

    def call_briefly(limit_s: float, call: Callable[[], Any]) -> Any:
        limits_s.append(limit_s)
        return call_with_timeout(0.01, call)

    def main(member: RankInfo) -> tuple[int, Any]:
        code, _ = in_world(reduce_once, timeout_s=123.0)(member)
        return code, limits_s

    monkeypatch.setattr(join, "call_with_timeout", call_briefly)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", threading.Event().wait)
    ending = run_ranks(main)
    assert (ending.code, ending.results) == (0, ([123.0], [123.0]))


@pytest.mark.slow
@pytest.mark.parametrize("code", [3, 78, 255])
@pytest.mark.parametrize("leave", [sys.exit, os._exit, None], ids=["sys.exit", "os._exit", "return"])
def test_exit_codes_of_ranks_are_kept(code: int, leave: Callable[[int], Any] | None) -> None:
    def main(member: RankInfo) -> tuple[int, Any]:
        if member.rank == 0:
            return 0, "fine"
        if leave is not None:
            leave(code)
        return code, "lost"

    ending = run_ranks(main)
    assert ending.cause is not None
    assert (ending.code, ending.cause.rank, ending.cause.exit_code, ending.cause.signal) == (code, 1, code, None)
    assert ending.results == ("fine", None)
    assert ("test_local.py" in ending.cause.traceback) == (leave is sys.exit)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGRTMIN])
def test_the_signal_that_ended_a_rank_is_named(number: int) -> None:
    if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("these tests run under nohup, where ranks ignore it")
    ending = run_ranks(on_rank(1, lambda: os.kill(os.getpid(), number)))
    assert ending.cause is not None
    assert ending.code == ending.cause.exit_code == 128 + number
    name = {signal.SIGRTMIN: "SIGRTMIN"}.get(number) or signal.Signals(number).name
    assert ending.cause.signal == name
    assert name in to_error(ending).problems[0].what
    assert to_error(ending).exit_code == Exit.RANK_LOST


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(("codes", "together"), [((0, 0), 0), ((75, 75), 75), ((0, 75), 75), ((75, 3), 3), ((3, 0), 3)])
def test_exit_codes_of_ranks_are_combined_into_one(codes: tuple[int, int], together: int) -> None:
    ending = run_ranks(lambda member: (codes[member.rank], "told"))
    assert ending.code == together
    assert ending.results == tuple("told" if code in (0, 75) else None for code in codes)


def test_a_rank_may_end_long_before_the_others(tmp_path: Path) -> None:
    def outlive() -> None:
        wait_until(lambda: has_ended(tmp_path, 0))
        linger()

    assert run_ranks(on_rank(1, outlive, partial(note_pid, tmp_path)), grace_s=0.0).code == 0


def test_a_result_must_be_json() -> None:
    ending = run_ranks(lambda member: (0, {1} if member.rank else None))
    assert ending.code == Exit.SOFTWARE
    assert ending.cause is not None
    assert "TypeError" in ending.cause.what


def test_an_unstorable_result_is_a_failure() -> None:
    def main(member: RankInfo) -> tuple[int, Any]:
        if member.rank:
            Path(member.store.removeprefix("file://")).with_name("report-1").mkdir()
        return 0, None

    assert run_ranks(main).code == Exit.INPUT_OUTPUT


def test_ranks_run_no_exit_handler_of_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "note"
    touch = atexit.register(note.touch)
    try:
        with (tmp_path / "out").open("w") as out:
            monkeypatch.setattr(sys, "stdout", out)
            print("before", end="")
            assert run_ranks(lambda member: (0, print("rank", member.rank))).code == 0
            monkeypatch.undo()
    finally:
        atexit.unregister(touch)
    assert not note.exists()
    text = (tmp_path / "out").read_text()
    # the text has been flushed, and is not repeated
    assert text.count("before") == text.count("rank 0") == text.count("rank 1") == 1


# ---------------------------------------------------------------- causes and victims


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6))
def test_a_killed_rank_is_named_and_leaves_no_process(seed: int) -> None:
    chance = random.Random(seed)
    chosen, moment_s = chance.randrange(3), chance.uniform(0.0, 0.2)

    def main(member: RankInfo) -> tuple[int, Any]:
        if member.rank == chosen:
            threading.Timer(moment_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        return in_world(reduce_for_ever)(member)

    before = family()
    ending = run_ranks(main, 3)
    assert family() == before
    assert ending.cause is not None
    assert (ending.code, ending.cause.rank, ending.cause.signal) == (137, chosen, "SIGKILL")
    assert all(failure.is_victim for failure in ending.failures if failure.rank != chosen)
    assert len(ending.failures) + len(ending.killed) == 3


def test_a_raising_rank_is_named_and_waiting_ranks_are_victims() -> None:
    """The traceback of the rank is reported."""

    def act(world: World) -> None:
        reduce_once(world)
        if world.rank == 1:
            raise ValueError("odd")
        reduce_for_ever(world)

    # NCCL does not report a lost peer; over gloo, the grace period is long enough to detect it.
    ending = run_ranks(in_world(act), grace_s=0.5 if IS_OVER_NCCL else LONG_S)
    assert ending.cause is not None
    assert (ending.code, ending.cause.rank, ending.cause.is_victim) == (Exit.SOFTWARE, 1, False)
    assert "in act\n" in ending.cause.traceback
    victims = [failure for failure in ending.failures if failure.rank == 0]
    if IS_OVER_NCCL:
        assert (victims, ending.killed) == ([], (0,))
    else:
        assert victims[0].is_victim
        assert "all_reduce" in victims[0].traceback
    error = to_error(ending)
    assert error.exit_code == Exit.SOFTWARE
    assert "ValueError: odd" in error.problems[0].what


def wait_for_other(folder: Path, member: RankInfo, first: int = 1) -> None:
    """Return immediately in rank `first`; in the other rank, wait until rank `first` has ended."""
    note_pid(folder, member)
    if member.rank != first:
        wait_until(lambda: has_ended(folder, first))


def test_the_first_of_two_failures_is_the_cause(tmp_path: Path) -> None:
    def main(member: RankInfo) -> tuple[int, Any]:
        wait_for_other(tmp_path, member)
        raise ValueError(f"rank {member.rank} had enough")

    ending = run_ranks(main, grace_s=LONG_S)
    assert ending.cause is not None
    assert [failure.rank for failure in ending.failures] == [1, 0]
    assert ending.cause.rank == 1


def test_a_victim_exiting_first_is_not_the_cause(tmp_path: Path) -> None:
    def act(world: World) -> None:
        reduce_once(world)
        if world.rank == 1:
            (tmp_path / "joined").touch()
            raise ZeroDivisionError
        wait_until((tmp_path / "joined").exists)
        # the name before torch 2.14
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(timedelta(seconds=GIVES_UP_S))
        reduce_for_ever(world)

    def main(member: RankInfo) -> tuple[int, Any]:
        try:
            return in_world(act)(member)
        finally:
            wait_for_other(tmp_path, member, first=0)  # like a tracker that still has rows to send

    ending = run_ranks(main, grace_s=LONG_S)
    assert ending.failures[0].rank == 0
    assert ending.cause is not None
    assert ending.cause.rank == 1
    assert "ZeroDivisionError" in ending.cause.what


def test_a_failing_rank_does_not_wait_for_a_hanging_one() -> None:
    ending = run_ranks(on_rank(1, partial(sys.exit, 3), hang), grace_s=0.1)
    assert (ending.code, ending.killed, ending.results) == (3, (0,), (None, None))


def test_other_ranks_can_finish_writing_after_a_failure(tmp_path: Path) -> None:
    def main(member: RankInfo) -> tuple[int, Any]:
        wait_for_other(tmp_path, member)
        return (3 if member.rank else 0), member.rank

    ending = run_ranks(main, grace_s=LONG_S)
    assert (ending.code, ending.killed, ending.results) == (3, (), (0, None))


def test_a_failure_before_a_kill_has_its_own_time(tmp_path: Path) -> None:
    """The rank fails before the launcher kills it."""
    seen_s: list[float] = []

    def main(member: RankInfo) -> tuple[int, Any]:
        wait_for_other(tmp_path, member)
        raise ValueError(member.rank)

    def say(text: str, _: Failure | None) -> None:
        wait_until(lambda: has_ended(tmp_path, 0))
        seen_s.append(time.monotonic())
        linger()

    began = time.monotonic()
    ending = local.run_ranks(main, 2, grace_s=0.0, on_notice=say)
    assert ([failure.exit_code for failure in ending.failures], ending.killed) == ([70, 70], ())
    # lint-tests: clock: which of two moments came first, not how long something took
    assert began + ending.failures[1].seconds <= seen_s[0]


def test_a_rank_stopped_by_sigstop_does_not_delay_the_end(tmp_path: Path) -> None:
    def main(member: RankInfo) -> tuple[int, Any]:
        note_pid(tmp_path, member)
        if member.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_until(lambda: status_of(tmp_path, 0) == psutil.STATUS_STOPPED)
        raise ValueError("no")

    ending = run_ranks(main, grace_s=0.1)
    assert ending.cause is not None
    assert (ending.cause.rank, ending.killed) == (1, (0,))


def test_a_silent_rank_is_named_among_consequences() -> None:
    """The errors of all other ranks are consequences."""

    def act(world: World) -> None:
        world.sum(torch.ones(1))
        if world.rank == 1:
            _close_connections()
            os.kill(os.getpid(), signal.SIGSTOP)
        reduce_for_ever(world)

    ending = run_ranks(in_world(act), grace_s=0.1)
    assert ending.cause is not None
    assert (ending.cause.rank, ending.cause.is_victim, ending.killed) == (0, True, (1,))
    assert "rank 1" in to_error(ending).problems[0].what
    assert to_error(ending).exit_code == Exit.RANK_LOST


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("crash", "name"), [(partial(ctypes.string_at, 0), "SIGSEGV"), (os.abort, "SIGABRT")])
def test_the_traceback_of_a_crashed_rank_is_reported(crash: Callable[[], object], name: str) -> None:
    def crashing_function() -> None:
        crash()

    ending = run_ranks(on_rank(1, crashing_function))
    assert ending.cause is not None
    assert ending.cause.signal == name
    assert "in crashing_function" in ending.cause.traceback
    assert "in crashing_function" in str(to_error(ending))


def test_problems_of_a_rank_have_its_number_and_exit_code() -> None:
    problems = (Problem("is 4", "model.depth", "use 3"), Problem("is missing"))

    def fail() -> None:
        error = ConfigError(problems)
        raise error

    ending = run_ranks(on_rank(1, fail))
    error = to_error(ending)
    assert ending.code == error.exit_code == Exit.CONFIG
    assert error.problems == (
        Problem("is 4", "rank 1: model.depth", "use 3"),
        Problem("is missing", "rank 1", ""),
    )


def _raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as raised:
        return raised


CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9612."
LATE = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(CLOSED), True),
        (RuntimeError(LATE), True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (torch.distributed.DistNetworkError("The client socket has timed out after 60000ms"), True),
        (torch.distributed.DistStoreError("wait timeout after 1000ms, keys: /x"), True),
        (torch.distributed.DistBackendError("NCCL error: unhandled cuda error"), False),
        (_raised(SystemLimit("cannot meet the others"), RuntimeError(CLOSED)), True),
        (_raised(RuntimeError(CLOSED), ValueError("before that")), False),
        (RankLost("the others are gone"), True),
        (DataError("a file is damaged: timeout"), False),
        (RuntimeError("DataLoader timed out after 5 seconds"), False),
        (RuntimeError("CUDA error: the launch timed out and was terminated"), False),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/x.cc:1] op.preamble.length <= op.nbytes. 16 vs 8"), False),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=lambda value: str(value)[-50:],
)
def test_a_victim_is_a_rank_that_only_lost_a_peer(error: BaseException, expected: bool) -> None:
    assert is_peer_loss(error) is expected


def test_an_error_caused_by_itself_can_be_reported() -> None:
    error = ValueError("round")
    error.__cause__ = error
    assert not is_peer_loss(error)


def test_a_rank_that_cannot_join_is_a_victim() -> None:
    meets = in_world(lambda world: None, timeout_s=GIVES_UP_S)
    ending = run_ranks(lambda member: hang() if member.rank else meets(member), grace_s=0.1)
    assert ending.cause is not None
    assert (ending.code, ending.cause.is_victim, ending.killed) == (Exit.SYSTEM, True, (1,))


# ---------------------------------------------------------------- processes started by ranks


@pytest.mark.slow
def test_processes_of_a_rank_do_not_outlive_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "OTHERS_S", 0.3)

    def start() -> None:
        _read_with_workers()
        for own_session in (False, True):
            subprocess.Popen(["sleep", "60"], start_new_session=own_session)
        if os.fork() == 0:  # leaves an orphan
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                hang()
            os._exit(0)
        (tmp_path / "started").write_text(json.dumps(sorted(family())))
        os.kill(os.getpid(), signal.SIGKILL)

    before = family()
    ending = run_ranks(on_rank(1, start), grace_s=0.1)
    assert ending.code == 137
    assert len(json.loads((tmp_path / "started").read_text())) >= 4
    assert family() == before


def test_a_process_in_its_own_session_may_outlive_the_run() -> None:
    """The run must succeed."""

    def main(member: RankInfo) -> tuple[int, Any]:
        return 0, [subprocess.Popen(["sleep", "60"], start_new_session=own).pid for own in (True, False)]

    ending = run_ranks(main, 1)
    own, shared = ending.results[0]
    assert _is_alive(own)
    assert not _is_alive(shared)
    os.kill(own, signal.SIGKILL)
    os.waitpid(own, 0)  # this process has adopted it


def test_a_process_without_its_main_thread_is_killed_too(tmp_path: Path) -> None:
    """The kernel reports it as a zombie while its other threads run, and it cannot be reaped."""

    def start() -> None:
        if os.fork() == 0:
            threading.Thread(target=hang).start()
            (tmp_path / "pid").write_text(str(os.getpid()))
            ctypes.CDLL(None).syscall(EXIT_OF_A_THREAD, 0)
        pid = int(wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        assert psutil.Process(pid).num_threads() == 2

    before = family()
    assert run_ranks(on_rank(0, start), 1).code == 0
    assert family() == before
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("is_at_once", [True, False])
@pytest.mark.parametrize("of_rank", [0, 1])
def test_a_signal_while_a_rank_starts_leaves_no_rank(
    of_rank: int, is_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example is the time limit of a test. Until fork has returned, the PID is unknown.

    A signal to this thread is blocked; if another thread receives it, its handler runs in this thread at once.
    """
    opened: list[int] = []

    def interrupted(pid: int) -> int:
        opened.append(pid)
        if len(opened) == of_rank + 1:
            if is_at_once:
                raise TooLateError
            # keeps the signal from another thread of this process
            signal.pthread_kill(threading.get_ident(), signal.SIGALRM)
        return pidfd_open(pid)

    def too_late(number: int, frame: object) -> NoReturn:
        raise TooLateError

    pidfd_open = os.pidfd_open
    monkeypatch.setattr(os, "pidfd_open", interrupted)
    before, handler = family(), signal.signal(signal.SIGALRM, too_late)
    try:
        with pytest.raises(TooLateError):
            run_ranks(lambda member: hang())
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert len(opened) == of_rank + 1
    assert family() == before


def test_foreign_processes_are_not_killed() -> None:
    with subprocess.Popen(["sleep", "60"]) as mine:
        assert run_ranks(on_rank(1, partial(sys.exit, 3))).code == 3
        assert mine.poll() is None
        mine.kill()


@pytest.mark.parametrize("reads", [False, True])
def test_no_process_outlives_a_killed_supervisor(reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils.worker, "MP_STATUS_CHECK_INTERVAL", 0.5)  # the default is 5 s

    def main(member: RankInfo) -> tuple[int, Any]:
        if reads:
            _read_with_workers()
        pids = [os.getpid(), *family()]
        (tmp_path / f".{member.rank}").write_text(json.dumps(pids))
        (tmp_path / f".{member.rank}").rename(tmp_path / f"pids-{member.rank}")
        hang()

    with supervisor(main, tmp_path) as pid:
        wait_until(lambda: len(list(tmp_path.glob("pids-*"))) == 2)
        pids = [one for path in tmp_path.glob("pids-*") for one in json.loads(path.read_text())]
        assert len(pids) == (4 if reads else 2)
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(_is_alive(one) for one in pids))
    for folder in (tmp_path / "tmp").iterdir():  # the killed supervisor cannot remove the folder
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


# ---------------------------------------------------------------- signals


def save_when_asked(folder: Path, *, deaf: bool = False, gate: str = "") -> Callable[[RankInfo], tuple[int, Any]]:
    """Return a main function that appends a line to its file at each save, and then stops with 75.

    deaf  installs the handler only after a first request was lost
    gate  file to wait for before stopping
    """

    def main(member: RankInfo) -> tuple[int, Any]:
        if deaf:
            lost: list[int] = []
            signal.signal(signal.SIGUSR1, lambda number, _: lost.append(number))
            (folder / f"listens-{member.rank}").touch()
            wait_until(lambda: lost)  # as if the process were still importing
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        with StopRequest() as stop:
            bell, rope = os.pipe2(os.O_NONBLOCK)
            signal.set_wakeup_fd(rope)
            (folder / f"listens-{member.rank}").touch()
            wait_until(lambda: stop.requested is not None)
            with (folder / f"saved-{member.rank}").open("a") as file:
                file.write(f"{stop.requested}\n")
            rung: list[bytes] = []
            wait_until(lambda: rung.append(_read(bell)) or len(b"".join(rung)) > 2, "reminders arrive during the save")
            wait_until(lambda: not gate or (folder / gate).exists())
            signal.set_wakeup_fd(-1)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN, "later signals must not kill the rank"
        return 75, member.rank

    return main


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1)
    except BlockingIOError:
        return b""


def all_there(folder: Path, name: str) -> Callable[[], bool]:
    return lambda: len(list(folder.glob(f"{name}-*"))) == 2


@pytest.fixture
def often_reminded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "REMINDER_S", 0.02)


@pytest.mark.slow_beyond(2)
@pytest.mark.usefixtures("often_reminded")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("whole_group", [False, True], ids=["one", "group"])
def test_a_stop_signal_makes_every_rank_save_once(number: signal.Signals, whole_group: bool, tmp_path: Path) -> None:
    """The ranks exit with 75."""
    with supervisor(save_when_asked(tmp_path), tmp_path) as pid:
        wait_until(all_there(tmp_path, "listens"))
        (os.killpg if whole_group else os.kill)(pid, number)  # Ctrl-C in a terminal sends the signal to the whole group
    ending = json.loads((tmp_path / "ending").read_text())
    assert (ending["code"], ending["results"], ending["stop"]) == (75, [0, 1], number.name)
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["SIGUSR1\n"] * 2


@pytest.mark.usefixtures("often_reminded")
def test_a_stop_signal_reaches_ranks_without_a_handler(tmp_path: Path) -> None:
    """The ranks install their handlers later."""
    with supervisor(save_when_asked(tmp_path, deaf=True), tmp_path) as pid:
        wait_until(all_there(tmp_path, "listens"))
        os.kill(pid, signal.SIGINT)
    assert json.loads((tmp_path / "ending").read_text())["code"] == 75


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("first", "second"), [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
def test_a_second_stop_signal_kills_all_ranks_immediately(
    first: signal.Signals, second: signal.Signals, tmp_path: Path
) -> None:
    """The exit code is 130."""

    def main(member: RankInfo) -> tuple[int, Any]:
        signal.signal(signal.SIGUSR1, lambda *_: (tmp_path / f"asked-{member.rank}").touch())
        (tmp_path / f"listens-{member.rank}").touch()
        hang()

    with supervisor(main, tmp_path) as pid:
        wait_until(all_there(tmp_path, "listens"))
        os.kill(pid, first)
        wait_until(all_there(tmp_path, "asked"))
        os.kill(pid, second)
    ending = json.loads((tmp_path / "ending").read_text())
    assert (ending["code"], ending["killed"], ending["cause"]) == (130, [0, 1], None)


@pytest.mark.usefixtures("often_reminded")
def test_a_warning_signal_is_not_the_first_stop_signal(tmp_path: Path) -> None:
    with supervisor(save_when_asked(tmp_path, gate="go"), tmp_path) as pid:
        wait_until(all_there(tmp_path, "listens"))
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
            os.kill(pid, number)
            wait_until(all_there(tmp_path, "saved"))
            wait_until(lambda: not _is_pending(pid))
        (tmp_path / "go").touch()
    assert json.loads((tmp_path / "ending").read_text())["code"] == 75


def test_a_suspended_run_continues(tmp_path: Path) -> None:
    def main(member: RankInfo) -> tuple[int, Any]:
        note_pid(tmp_path, member)
        wait_until((tmp_path / "go").exists)
        return 0, member.rank

    with supervisor(main, tmp_path) as pid:
        wait_until(lambda: all((tmp_path / f"pid-{rank}").is_file() for rank in (0, 1)))
        all_pids = [pid, *(int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1))]
        os.kill(pid, signal.SIGTSTP)
        wait_until(lambda: {psutil.Process(one).status() for one in all_pids} == {psutil.STATUS_STOPPED})
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: psutil.STATUS_STOPPED not in {psutil.Process(one).status() for one in all_pids})
        (tmp_path / "go").touch()
    assert json.loads((tmp_path / "ending").read_text())["results"] == [0, 1]


def test_handlers_and_process_attributes_are_restored() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGTSTP, signal.SIGCHLD)

    def state() -> list[Any]:
        reaper = ctypes.c_int()
        ctypes.CDLL(None).prctl(37, ctypes.byref(reaper), 0, 0, 0)
        bell = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(bell)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        return [
            [signal.getsignal(number) for number in numbers],
            reaper.value,
            bell,
            mask,
            len(list(Path("/proc/self/fd").iterdir())),
        ]

    def shout(text: str, _: Failure | None) -> None:
        raise ZeroDivisionError(text)

    before = state()
    run_ranks(lambda member: (0, None))
    assert state() == before
    with pytest.raises(ZeroDivisionError):
        local.run_ranks(on_rank(1, partial(sys.exit, 3), hang), 2, on_notice=shout)
    assert state() == before


# ---------------------------------------------------------------- refusals


def test_a_process_with_threads_does_not_fork_ranks() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="debugger-7")
    thread.start()
    try:
        with pytest.raises(SystemLimit, match=r"debugger-7(.|\n)*torchrun"):
            run_ranks(lambda member: (0, None))
    finally:
        gate.set()
        thread.join()


def test_ranks_are_not_forked_from_another_thread() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(SystemLimit, match="torchrun"):
        pool.submit(run_ranks, lambda member: (0, None)).result()


def test_a_process_that_initialized_cuda_does_not_fork_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(SystemLimit, match="torchrun"):
        run_ranks(lambda member: (0, None))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("refused", "number"), [("fork", 4), ("pidfd_open", 3)])  # the first fork only checks limits
def test_no_rank_is_left_if_some_cannot_start(refused: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = getattr(os, refused), []

    def limited(*given: int) -> Any:
        calls.append(given)
        if len(calls) == number:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return real(*given)

    monkeypatch.setattr(os, refused, limited)
    before = family()
    with pytest.raises(SystemLimit, match="rank 2 of 3 cannot be started: Resource temporarily unavailable"):
        run_ranks(hang, 3)
    assert family() == before


def test_a_low_limit_on_open_files_is_reported() -> None:
    def join_with_files(free: int) -> Exit:
        """Join two ranks in a fork that may open `free` more files."""
        pid = os.fork()
        if pid == 0:
            code = Exit.SOFTWARE
            try:
                # a number above those of all open files; every number below it is taken next, so that `free` are left
                os.dup2(0, 200)
                while os.dup(0) < 200:
                    pass
                resource.setrlimit(resource.RLIMIT_NOFILE, (202 + free, 202 + free))
                code = Exit(run_ranks(in_world(reduce_once)).code)
            except SystemLimit as error:
                code = error.exit_code
            finally:
                os._exit(code)
        return Exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    endings = [join_with_files(free) for free in (4, 8, 10, 11, 12, 13, 14, 16)]
    assert set(endings) == {Exit.SYSTEM, Exit.DONE}
    assert endings == sorted(endings, reverse=True)  # a limit higher than a sufficient one is sufficient, too


def test_a_rank_reports_reaching_the_open_file_limit() -> None:
    def main(member: RankInfo) -> NoReturn:
        if member.rank == 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        while True:
            signal.pause()

    ended = run_ranks(main)
    assert ended.code == Exit.SYSTEM
    assert to_error(ended).problems[0].fix


def test_a_missing_temporary_folder_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(AccelRunError, match="the processes of a run share cannot be created: No such file") as caught:
        run_ranks(lambda member: (0, None))
    assert caught.value.exit_code == Exit.CANNOT_CREATE


# ---------------------------------------------------------------- helpers


@contextmanager
def supervisor(main: Callable[[RankInfo], tuple[int, Any]], folder: Path) -> Iterator[int]:
    """Run two ranks from a process that leads a group; it writes its result to folder/ending."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            ending = local.run_ranks(main, 2, grace_s=0.3, on_notice=lambda *_: None)
            (folder / "ending").write_text(json.dumps(asdict(ending)))
        except BaseException as error:
            (folder / "ending").write_text(repr(error))
        finally:
            os._exit(0)
    try:
        yield pid
        wait_until(lambda: os.waitpid(pid, os.WNOHANG) != (0, 0), "the end of the supervisor")
    except BaseException:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise


def _read_with_workers() -> None:
    """Start a data worker, and leave it idle."""
    loader = torch.utils.data.DataLoader(range(10**6), num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
    globals()["_iterator"] = iter(loader)
    next(globals()["_iterator"])


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_pending(pid: int) -> bool:
    """Return whether the process has a pending signal."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return any(int(lines[key], 16) for key in ("SigPnd", "ShdPnd"))


def _close_connections() -> None:
    """Shut down every connection of this process."""
    for link in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError), socket.socket(fileno=os.dup(int(link.name))) as copy:
            if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                copy.shutdown(socket.SHUT_RDWR)


class TooLateError(Exception):
    """Raised by a time limit."""


def hang(member: RankInfo | None = None) -> NoReturn:
    while True:
        signal.pause()


def linger() -> None:
    """Give a faulty implementation time to fail. A correct one does not need this time."""
    time.sleep(0.3)  # lint-tests: sleep: orders nothing


def note_pid(folder: Path, member: RankInfo) -> None:
    (folder / f".pid-{member.rank}").write_text(str(os.getpid()))
    (folder / f".pid-{member.rank}").rename(folder / f"pid-{member.rank}")


def status_of(folder: Path, rank: int) -> str | None:
    """Return the psutil status of a rank that has noted its PID. An ended rank is a zombie until all have ended."""
    file = folder / f"pid-{rank}"
    return psutil.Process(int(file.read_text())).status() if file.exists() else None


def has_ended(folder: Path, rank: int) -> bool:
    return status_of(folder, rank) == psutil.STATUS_ZOMBIE
