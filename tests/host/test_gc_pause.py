"""Garbage collection is paused only until a run has started, and never after the command has ended."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner import cli
from runner.engine.process.run_screen import Screen
from runner.host.gc_pause import end_pause, paused_collection
from tests.opened import opened


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_the_pause_ends_when_the_context_exits_or_raises() -> None:
    with paused_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), paused_collection():
        raise KeyError
    assert gc.isenabled()


def test_an_inner_pause_does_not_end_the_outer_one() -> None:
    with paused_collection():
        with paused_collection():
            pass
        assert not gc.isenabled()
        end_pause()
        assert gc.isenabled()
    assert gc.isenabled()


def test_collection_disabled_by_the_user_stays_disabled() -> None:
    gc.disable()
    with paused_collection():
        end_pause()
        assert not gc.isenabled()
    assert not gc.isenabled()


@pytest.mark.parametrize("arguments", [["unknown"], ["plan", "--help"]])
def test_collection_is_enabled_again_when_a_command_ends(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(cli, "refuse_secrets", lambda *args: seen.append(gc.isenabled()))
    monkeypatch.setattr(sys, "argv", ["accel-run", *arguments])
    monkeypatch.setattr("os.umask", lambda mode: None)
    for name in ("open_closed_streams", "limit_thread_starts", "prepare_for_limit", "_end_daemons"):
        monkeypatch.setattr(cli, name, lambda: None)  # these functions change the process
    cli.main()
    assert seen == [False]
    assert gc.isenabled()


def test_collection_is_enabled_after_the_first_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collection does not depend on the screen."""
    shown: list[Any] = []
    monkeypatch.setattr(Screen, "show_first_update", lambda self, update, *args: shown.append(update))
    with paused_collection(), opened(tmp_path) as phase:
        tracker, starts = phase.run.observers.tracker, []
        monkeypatch.setattr(tracker, "start", lambda: starts.append(1))
        for update in phase.updates():
            assert phase.run.has_started
            assert gc.isenabled()
            if update == 3:
                break
        assert (shown, starts) == ([1], [1])
