"""Runs on several ranks: the same numbers, and nothing lost, whoever dies, stops or is left."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forkserver import Ended, ForkServer

TASK = '''
import os, signal, time
import torch, torch.nn.functional as F
from torch import nn
from runner import Task

class Seen(torch.utils.data.Dataset):
    """Samples that are written down when they are read."""
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(90, 6, generator=g), torch.randint(3, (90,), generator=g)
    def __len__(self): return 90
    def __getitem__(self, index): return self.x[index], self.y[index], index

def rank():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

class Small(Task):
    item = "sample"
    def __init__(self, dropout, fault, at, rank):
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))
        self.fault, self.at, self.rank, self.update = fault, at, rank, 0
    def begin_update(self, progress): self.update = progress.update
    def dataset(self, split): return Seen()
    def loss(self, model, batch):
        x, y, index = batch
        if model.training and "SEEN" in os.environ:
            with open(os.environ["SEEN"], "a") as file:
                file.write(f"{self.update} {' '.join(map(str, index.tolist()))}\\n")
        if model.training and self.fault and self.update == self.at and rank() == self.rank:
            marker = os.environ.get("ONCE", "")
            if not marker or not os.path.exists(marker):
                if marker:
                    open(marker, "w").close()
                if self.fault == "kill": os.kill(os.getpid(), signal.SIGKILL)
                if self.fault == "raise": raise ValueError("no such thing")
                if self.fault == "exit": os._exit(0)
                if self.fault == "infinite": return F.cross_entropy(model(x), y, reduction="sum") * float("nan"), len(y)
        if model.training and "SLEEP" in os.environ: time.sleep(float(os.environ["SLEEP"]))
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

def build(*, dropout: float = 0.0, fault: str = "", at: int = 5, rank: int = 1) -> Task:
    return Small(dropout, fault, at, rank)
'''
BASE = (
    "train --task task.py run=r updates=12 global_batch_size=32 log_every=1 evaluate.every=6 monitor=off"
    " scheduler=constant"
)
TWO = "parallelism=ddp parallelism.world_size=2"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path


def rows(folder: Path, run: str = "r") -> list[dict[str, Any]]:
    lines = (folder / "outputs" / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(folder: Path, run: str = "r") -> dict[int, float]:
    return {row["update"]: row["train/loss"] for row in rows(folder, run) if "train/loss" in row}


def well(ended: Ended) -> Ended:
    assert ended.code == 0, ended.err
    return ended


def test_one_rank_two_equal_and_two_unequal_make_the_same_curve(server: ForkServer, folder: Path) -> None:
    well(server.run(BASE, folder))
    expected, held_out = losses(folder), rows(folder)[-1]["val/loss"]
    assert len(expected) == 12
    unequal = f"{TWO} parallelism.shares=[19,13] micro_batch_size=5"
    sharded = TWO.replace("ddp", "fsdp")
    for number, words in enumerate(
        (TWO, unequal, f"{TWO} parallelism.shares=speed", sharded, f"{sharded} micro_batch_size=3")
    ):
        well(server.run(f"{BASE} {words}".replace("run=r", f"run=r{number}"), folder))
        assert losses(folder, f"r{number}") == pytest.approx(expected, rel=1e-5)
        assert rows(folder, f"r{number}")[-1]["val/loss"] == pytest.approx(held_out, rel=1e-5)


def test_two_ranks_go_on_as_one_as_two_shards_and_as_two_again(server: ForkServer, folder: Path) -> None:
    well(server.run(BASE, folder))
    expected = losses(folder)
    again = BASE.replace("run=r", "run=again")
    well(server.run(f"{again} {TWO}".replace("updates=12", "updates=4"), folder))
    well(server.run(f"{again} resume_allow=[updates]".replace("updates=12", "updates=8"), folder))
    sharded = TWO.replace("ddp", "fsdp")
    well(server.run(f"{again} {sharded} resume_allow=[updates]".replace("updates=12", "updates=10"), folder))
    well(server.run(f"{again} {TWO} parallelism.shares=[20,12] resume_allow=[updates]", folder))
    assert losses(folder, "again") == pytest.approx(expected, rel=1e-5)


def test_a_resumed_run_of_two_ranks_is_the_same_bit_for_bit(server: ForkServer, folder: Path) -> None:
    """With dropout: every rank goes on with its own random numbers."""
    words = f"{BASE} {TWO} task.dropout=0.3"
    well(server.run(words, folder))
    expected = losses(folder)
    again = words.replace("run=r", "run=again") + " checkpoint.every=5updates"
    pid = server.start(again.split(), folder, {"SLEEP": "0.02"})
    wait_until((folder / "outputs/again/checkpoints/update-0000000005/MANIFEST.json").exists)
    os.kill(pid, signal.SIGKILL)
    server.wait()
    wait_until(lambda: not of_run("run=again"))
    well(server.run(again, folder))
    assert losses(folder, "again") == expected


@pytest.mark.parametrize("words", ["", "parallelism.shares=[20,12]"])
def test_a_killed_rank_is_named_and_the_rest_goes_on(server: ForkServer, folder: Path, words: str) -> None:
    well(server.run(BASE, folder))
    expected = losses(folder)
    again = f"{BASE} {TWO} {words} task.fault=kill task.at=7 checkpoint.every=3updates".replace("run=r", "run=again")
    seen = folder / "seen"
    ended = well(server.run(again.split(), folder, {"ONCE": str(folder / "once"), "SEEN": str(seen)}))
    assert "rank 1" in ended.err
    assert "SIGKILL" in ended.err
    assert "goes on from the last checkpoint with 1 rank" in ended.out
    assert losses(folder, "again") == pytest.approx(expected, rel=1e-5)
    assert sorted(samples_of_first_epoch(seen)) == list(range(90))


def samples_of_first_epoch(seen: Path) -> list[int]:
    """Return the samples of updates 0 to 2 of the history that survived: of each update the last time it was made."""
    made: dict[int, list[int]] = {}
    previous = -1
    for line in seen.read_text().splitlines():
        update, *samples = map(int, line.split())
        if update < previous - 1:  # the run went on from an older update
            made = {key: value for key, value in made.items() if key < update}
        made.setdefault(update, []).extend(samples)
        previous = update
    return [index for update in range(3) for index in made[update]]


def test_the_fault_of_a_task_ends_the_run_with_its_own_words(server: ForkServer, folder: Path) -> None:
    ended = server.run(f"{BASE} {TWO} task.fault=raise", folder)
    assert ended.code == 70
    assert "ValueError: no such thing" in ended.err
    assert "rank 1" in ended.err
    assert "Traceback" not in ended.err
    error = json.loads((folder / "outputs/r/error.json").read_text())
    assert "no such thing" in error["cause"]
    assert json.loads((folder / "outputs/r/run.json").read_text())["state"] == "failed"


def test_a_loss_that_is_not_finite_ends_all_ranks_with_82(server: ForkServer, folder: Path) -> None:
    ended = server.run(f"{BASE} {TWO} task.fault=infinite", folder)
    assert ended.code == 82, ended.err
    assert "the loss is not finite at update 6" in ended.err


def test_a_rank_that_leaves_in_the_middle_is_lost(server: ForkServer, folder: Path) -> None:
    began = time.monotonic()
    ended = server.run(f"{BASE} {TWO} task.fault=exit", folder)
    assert ended.code == 84, ended.err
    assert time.monotonic() - began < 15
    assert not of_run("run=r")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_later(server: ForkServer, folder: Path, number: int) -> None:
    well(server.run(BASE, folder))
    expected = losses(folder)
    again = f"{BASE} {TWO}".replace("run=r", "run=again")
    pid = server.start(again.split(), folder, {"SLEEP": "0.05"})
    wait_until(lambda: (folder / "outputs/again/metrics.jsonl").exists() and len(losses(folder, "again")) > 3)
    os.kill(pid, number)
    ended = server.wait()
    assert ended.code == 75, ended.err
    assert not of_run("run=again")
    stopped_at = max(losses(folder, "again"))
    assert stopped_at < 12
    well(server.run(again, folder))
    assert losses(folder, "again") == pytest.approx(expected, rel=1e-5)


def test_nobody_is_left_when_the_launcher_is_killed(server: ForkServer, folder: Path) -> None:
    pid = server.start(f"{BASE} {TWO} dataloader.num_workers=1".split(), folder, {"SLEEP": "0.2"})
    wait_until(lambda: (folder / "outputs/r/metrics.jsonl").exists() and len(losses(folder)) > 1)
    os.kill(pid, signal.SIGKILL)
    server.wait()
    wait_until(lambda: not of_run("run=r"), limit_s=10)


def test_what_cannot_be_is_said_before_anything_starts(server: ForkServer, folder: Path) -> None:
    for words, said in (
        ("parallelism.shares=[1,2,3]", "must have one number per rank (2), but has 3"),
        ("global_batch_size=1", "must be at least the number of ranks (2), but is 1"),
    ):
        ended = server.run(f"{BASE} {TWO} {words}", folder)
        assert ended.code == 78
        assert said in ended.err
        assert not (folder / "outputs").exists()


def of_run(word: str) -> list[int]:
    """Return the processes of a run that are alive."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        if word in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def wait_until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.01)
