"""No row is lost or duplicated if a wandb server fails at random requests or a wandb process is killed.

tests/trackers/test_trackers.py tests that neither the start nor a row waits for wandb.
"""

from __future__ import annotations

import os
import random
import signal
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from runner.trackers.tracker import TRACKERS
from tests.faults.tallies import Tally
from tests.waiting import wait_until
from tests.wandb_server import KEY, MARK, Server, log_all, marked, offline_rows, rows

NUM_ROWS = 120


def test_no_row_is_lost_or_duplicated_if_wandb_fails_randomly(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    amount: Callable[[int, int], int],
    tally: Tally,
) -> None:
    pytest.importorskip("wandb")
    (tmp_path / "home").mkdir()
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    for number in range(amount(1, 150)):
        dice = random.Random(f"{seed} soak {number}")
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        mark = uuid.uuid4().hex
        monkeypatch.setenv(MARK, mark)
        try:
            assert_every_row_is_kept(folder, dice, mark, monkeypatch)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, number {number}: {error}") from error
        tally.tried += 1


def assert_every_row_is_kept(folder: Path, dice: random.Random, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = dice.choice([0.0, 0.1, 0.4, 0.9])

    def mood() -> tuple[int, float]:
        if dice.random() >= bad:
            return 200, 0.0
        return dice.choice([(200, dice.uniform(0.0, 1.5)), (500, 0.0), (429, 0.0), (401, 0.0), (0, 0.0)])

    with Server(mood=mood) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        tracker = TRACKERS["wandb"](folder, "a run", {}, None)
        tracker.start()
        first = dice.randrange(NUM_ROWS)
        log_all(tracker, rows(0, first))
        is_killed = dice.random() < 0.3
        if is_killed:
            kill_one(dice, mark)
        log_all(tracker, rows(first, NUM_ROWS))
        tracker.finish(5.0)
        sent = server.updates
    held = [step for step, _ in offline_rows(folder, "*run-*")]
    assert len(set(held)) == len(held), f"duplicate rows in the folders: {held}"
    assert len(set(sent)) == len(sent), f"duplicate rows at the server: {sent}"
    missing = set(range(NUM_ROWS)) - set(held) - set(sent)
    assert len(missing) <= tracker.num_dropped, f"{sorted(missing)} are missing, {tracker.num_dropped} counted"
    wait_until(lambda: not marked(mark), "the processes of the tracker end")


def kill_one(dice: random.Random, mark: str) -> None:
    """Kill a random process of the tracker: the subprocess of the run, or one of wandb's."""
    result = marked(mark)
    if result:
        with suppress(psutil.Error):
            dice.choice(result).send_signal(signal.SIGKILL)
