"""If a thread ends before it runs, an error is raised where it is started."""

from __future__ import annotations

import threading

import pytest

from runner.host import thread_start

# the names in Python 3.13 and 3.11
START = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)  # monkeypatch restores it at the end
    monkeypatch.setattr(thread_start, "WAIT_S", 0.001)
    thread_start.limit_thread_starts()


def test_a_thread_that_never_runs_does_not_block_its_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, START, lambda *_args, **_options: None)
    thread = threading.Thread(target=print, daemon=True)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        thread.start()
    assert thread not in threading.enumerate()


def test_a_thread_can_be_started_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_start, "WAITS", 100_000)
    results: list[int] = []
    thread = threading.Thread(target=results.append, args=(1,))
    thread.start()
    thread.join()
    assert results == [1]
    with pytest.raises(RuntimeError, match="once"):
        thread.start()


def test_an_uninitialized_thread_is_rejected_as_by_python() -> None:
    class Incomplete(threading.Thread):
        def __init__(self) -> None:
            pass

    with pytest.raises(RuntimeError, match="__init__"):
        Incomplete().start()
