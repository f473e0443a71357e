"""Functions in a subprocess: results, errors, notices of long waits, and no fork after CUDA initialization."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from runner.host.subprocesses import run_in_subprocess


def answer(value: float) -> float:
    return value


def late() -> None:
    raise TimeoutError("its own")


def test_a_long_wait_is_reported_once() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as notices, os.fdopen(writing, "wb", buffering=0) as tell:
        assert run_in_subprocess(notices.read, 1, on_wait=lambda: tell.write(b"x"), notify_after_s=0.0) == b"x"
        tell.close()
        assert notices.read() == b"", "the wait must be reported once"


def test_a_short_wait_is_not_reported() -> None:
    notices: list[int] = []

    assert run_in_subprocess(answer, 0.0, on_wait=lambda: notices.append(1), notify_after_s=120.0) == 0.0
    assert notices == []


def test_an_error_in_the_function_is_raised_in_the_caller() -> None:
    with pytest.raises(TimeoutError, match="its own"):
        run_in_subprocess(late, on_wait=lambda: None, notify_after_s=0.0)


def test_no_process_is_forked_after_cuda_initialization(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork(*_: Any, **__: Any) -> None:
        raise AssertionError("forked")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr("os.fork", fork)
    with pytest.raises(RuntimeError, match="CUDA"):
        run_in_subprocess(answer, 1.0)
