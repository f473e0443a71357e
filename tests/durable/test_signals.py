"""Signal handlers request a stop, and are restored afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runner.base.errors import Exit
from runner.durable.signals import StopRequest
from runner.sweeps.pool import LocalPool

ROOT = Path(__file__).parents[2]
CHILD = """
import sys, time
from runner.durable.signals import StopRequest
with StopRequest(before_exit=lambda: sys.stderr.write("restored\\n")) as stop:
    print("ready", flush=True)
    while stop.requested is None:
        time.sleep(0.01)
    print(stop.requested, flush=True)
    print("buffered", end="")
    time.sleep(20)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_only_sets_a_flag(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number.name


def test_old_handlers_are_always_restored() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(ZeroDivisionError), StopRequest():
        assert [signal.getsignal(number) for number in numbers] != before
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("requests", [StopRequest, LocalPool])
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_an_ignored_signal_stays_ignored_and_others_are_handled(
    number: signal.Signals, requests: type[StopRequest | LocalPool]
) -> None:
    """`nohup` starts programs with SIGHUP ignored, and a shell script starts background jobs with SIGINT ignored."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with requests() as stop:

            def is_stopped() -> bool:
                return bool(stop.requested if isinstance(stop, StopRequest) else stop.is_stopped)

            os.kill(os.getpid(), number)
            assert not is_stopped()
            os.kill(os.getpid(), signal.SIGTERM)
            assert is_stopped()
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_warning_signal_is_not_the_first_stop_request() -> None:
    with StopRequest() as stop:
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.requested == "SIGUSR1"


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_exits_immediately_with_130(first: signal.Signals, second: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(first)
        assert child.stdout.readline() == f"{first.name}\n"
        child.send_signal(second)
        out, err = child.communicate(timeout=60)
        assert child.returncode == Exit.INTERRUPTED
        assert out in ("", "buffered")
        assert err.startswith("restored\n")
        assert "without saving" in err
        assert "Traceback" not in err


def test_handlers_can_only_be_installed_in_the_main_thread() -> None:
    caught: list[BaseException] = []

    def listen() -> None:
        try:
            StopRequest().__enter__()
        except AssertionError as error:
            caught.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert len(caught) == 1
