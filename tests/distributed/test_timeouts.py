"""A call with a timeout returns, raises or is abandoned."""

from __future__ import annotations

import threading

import pytest

from runner.distributed.timeouts import call_with_timeout


def test_the_result_or_error_of_a_call_is_returned() -> None:
    assert call_with_timeout(60.0, lambda: 7) == 7
    assert call_with_timeout(60.0, lambda: None) is None
    with pytest.raises(KeyError, match="mine"):
        call_with_timeout(60.0, lambda: {}["mine"])


def test_a_hanging_call_is_abandoned() -> None:
    """This also holds at exit, where Python joins threads that are not daemons."""
    released, before = threading.Event(), set(threading.enumerate())
    try:
        with pytest.raises(TimeoutError):
            call_with_timeout(0.0, released.wait)
        (abandoned,) = set(threading.enumerate()) - before
        assert abandoned.daemon
    finally:
        released.set()
