"""With `checkpoint.every=auto`, best checkpoints stay within the save budget, and only a kill can lose them."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from runner.durable import checkpoint
from runner.durable.checkpoint import Snapshot, checkpoint_path
from runner.durable.checkpoint_choice import find_best_checkpoints
from runner.durable.checkpoint_writer import CheckpointWriter
from runner.durable.run_identity import generate_uid
from runner.durable.safetensors_writer import HostBuffer
from runner.engine.checkpoints import checkpoint_saver as saver_module
from runner.engine.checkpoints import save_policy
from runner.engine.checkpoints.checkpoint_saver import Saver
from runner.engine.checkpoints.save_policy import MAX_OVERHEAD, SaveCost, SavePolicy, default, off
from tests.forkserver import ForkServer
from tests.opened import opened, saving_of
from tests.rounding import allowed

TASK = Path(__file__).parents[1] / "end_to_end" / "task_with_everything.py"
RUN = ["train", "--task", str(TASK), "run=mine", "device=cpu", "monitor=off", "updates=40", "evaluate.every=4"]
RUN += ["checkpoint.every=auto", "optimizer.lr=0.5"]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Screen:
    def __init__(self) -> None:
        self.warned: list[str] = []

    def warn(self, text: str) -> None:
        self.warned.append(text)

    def record_event(self, kind: str, **facts: Any) -> None:
        pass


class Training:
    """A simulated training run: updates take one second, the test calls `evaluate`, and saves have a given cost."""

    def __init__(self, folder: Path, clock: Clock, policy: SavePolicy, *, copy_s: float, slowed_s: float) -> None:
        self.clock, self.copy_s, self.slowed_s = clock, copy_s, slowed_s
        self.folder, self.update, self.saved = folder, 0, []  # type: tuple[Path, int, list[int]]
        self.weights = torch.zeros(4)
        self.save_cost = SaveCost()
        writer = CheckpointWriter(folder, keep_last=2, on_saved=lambda path: self.saved.append(int(path.name[-10:])))
        self.saver = Saver(
            policy, writer, self.save_cost, (HostBuffer(), HostBuffer()), cast(Any, Screen()), on_disk=None
        )

    def take(self) -> Snapshot:
        self.clock.now += self.copy_s
        weights = self.saver.buffer.copy(self.weights)
        return Snapshot(self.update, {"model": {"weights": weights}}, self.state(), {})

    def state(self) -> dict[str, Any]:
        policy = self.saver.policy
        values = {"checkpoint.best": policy.best, "checkpoint.best_is": policy.best_is}
        return {"bests": self.saver.bests, "values": values}

    def kept(self) -> list[Path]:
        return [checkpoint_path(self.folder, number) for _, number in self.saver.bests]

    def run_update(self) -> None:
        seconds = 1.0 + (self.slowed_s if self.is_written() else 0.0)
        self.clock.now += seconds
        self.update += 1
        self.weights.fill_(self.update)
        self.saver.record_update(seconds)

    def is_written(self) -> bool:
        """Wait for the writer thread; return whether a checkpoint was written during this update."""
        before = len(self.saved)
        self.saver.writer.close()  # type: ignore[union-attr]
        result, self._seen = len(self.saved) > getattr(self, "_seen", 0), len(self.saved)
        return result or before < len(self.saved)

    def evaluate(self, value: float) -> None:
        if not self.saver.is_best(value):
            return
        if self.saver.has_no_budget():
            self.saver.hold(self.update, self.take, value=value, kept=self.kept)
        else:
            self.save(value)

    def save(self, value: float | None = None, *, counts_as_cost: bool = True) -> None:
        self.saver.save(self.update, self.take, value=value, kept=self.kept, counts_as_cost=counts_as_cost)

    def end(self) -> None:
        self.saver.write_held()
        self.save(counts_as_cost=False)
        self.saver.writer.wait()
        self.saver.poll_writer()

    @property
    def cost_s(self) -> float:
        return self.save_cost.held_s + self.save_cost.slowed_s

    def on_disk(self) -> dict[int, float]:
        """Return the weights of each checkpoint; fails if one of them is not valid."""
        result = [checkpoint.load(path) for path in sorted(self.folder.glob("update-*"))]
        return {each.update: float(each.tensors("model")["weights"][0]) for each in result}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (save_policy, saver_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, perf_counter=clock))
    return clock


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("num_updates", [20, 200, 2000])
@pytest.mark.parametrize("slowed_s", [0.05, 0.5, 3.0])
def test_best_checkpoints_stay_within_the_save_budget(
    num_updates: int, slowed_s: float, tmp_path: Path, clock: Clock
) -> None:
    training = Training(tmp_path, clock, default(), copy_s=0.001, slowed_s=slowed_s)
    for update in range(num_updates):
        training.run_update()
        if update % (num_updates // 10) == 0:
            training.evaluate(-float(update))
    copies_s = 10 * 0.001
    unknown_s = slowed_s  # the cost of the first save is known only afterwards
    most_s = MAX_OVERHEAD * (clock.now - 1000.0) + copies_s + unknown_s
    assert training.cost_s <= most_s * (1 + allowed(torch.float64, num_updates))
    if num_updates == 20:
        assert training.saved == []
        assert training.cost_s <= copies_s
    best = num_updates - num_updates // 10 + 1
    training.end()
    assert training.on_disk()[best] == best, "must contain the weights of its update"
    assert training.saver.bests == [(-float(best - 1), best)]
    assert sorted(training.on_disk()) == sorted({best, num_updates} | set(training.saved[-2:]))


def test_a_saved_checkpoint_does_not_refer_to_a_held_one(tmp_path: Path, clock: Clock) -> None:
    """The run may be killed before the held checkpoint is written."""
    training = Training(tmp_path, clock, default(), copy_s=0.001, slowed_s=0.0)
    training.run_update()
    training.evaluate(1.0)
    training.run_update()
    training.save()
    training.saver.writer.wait()
    assert training.on_disk() == {2: 2.0}
    assert checkpoint.load(checkpoint_path(tmp_path, 2)).state["bests"] == []
    training.run_update()
    training.end()
    assert training.on_disk() == {1: 1.0, 2: 2.0, 3: 3.0}
    assert checkpoint.load(checkpoint_path(tmp_path, 1)).state["bests"] == [[1.0, 1]]
    assert checkpoint.load(checkpoint_path(tmp_path, 3)).state["bests"] == [[1.0, 1]]
    assert training.saver.newest_number() == 3


@pytest.mark.parametrize(("keep_best", "bests"), [(1, [(1.0, 2)]), (2, [(1.0, 2), (3.0, 1)])])
def test_a_best_checkpoint_written_after_a_newer_one_is_found_on_resume(
    tmp_path: Path, clock: Clock, keep_best: int, bests: list[tuple[float, int]]
) -> None:
    """The best checkpoint was held while a newer one was saved; then the run failed or was killed."""
    training = Training(tmp_path, clock, default(keep_best=keep_best), copy_s=1.0, slowed_s=0.0)
    training.run_update()
    training.save(3.0)
    training.saver.writer.wait()
    training.run_update()
    training.evaluate(1.0)
    training.run_update()
    training.save()
    training.saver.write_held()
    training.saver.writer.wait()
    newest = checkpoint.load(checkpoint_path(tmp_path, 3))
    assert newest.state["bests"] == [[3.0, 1]]
    assert find_best_checkpoints(newest, training.saver.policy.ranking) == bests
    of_another = default(best="val/accuracy", best_is="max")
    assert find_best_checkpoints(newest, of_another.ranking) == [], "values of another metric are not compared"
    two = checkpoint.load(checkpoint_path(tmp_path, 2))
    tensors = {stem: two.tensors(stem) for stem in two.stems}
    shutil.rmtree(two.path)
    checkpoint.save(tmp_path, checkpoint.Snapshot(2, tensors, two.state, {"run_uid": generate_uid()}))
    assert find_best_checkpoints(newest, training.saver.policy.ranking) == bests[1:], (
        "a checkpoint of another run is ignored"
    )
    shutil.rmtree(checkpoint_path(tmp_path, 2))
    assert find_best_checkpoints(newest, training.saver.policy.ranking) == bests[1:], "a lost checkpoint is ignored"


def test_a_failed_save_keeps_the_held_checkpoint(tmp_path: Path, clock: Clock) -> None:
    training = Training(tmp_path, clock, default(), copy_s=0.001, slowed_s=0.0)
    training.run_update()
    training.evaluate(1.0)
    training.run_update()

    def failing() -> Snapshot:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        training.saver.save(training.update, failing, value=0.5, kept=training.kept, counts_as_cost=True)
    training.saver.write_held()
    training.saver.writer.wait()
    assert sorted(training.on_disk()) == [1]
    assert training.saver.bests == [(1.0, 1)]


def test_only_a_better_checkpoint_replaces_a_held_one(tmp_path: Path, clock: Clock) -> None:
    training = Training(tmp_path, clock, default(), copy_s=0.001, slowed_s=0.0)
    for value in (3.0, math.nan, 4.0, 2.0, 2.5):
        training.run_update()
        training.evaluate(value)
    training.run_update()
    training.end()
    assert training.saver.bests == [(2.0, 4)]
    assert sorted(training.on_disk()) == [4, 6]


def test_saving_the_update_of_a_held_checkpoint_replaces_it(tmp_path: Path, clock: Clock) -> None:
    training = Training(tmp_path, clock, default(), copy_s=0.001, slowed_s=0.0)
    training.run_update()
    training.evaluate(1.0)
    training.save()
    assert training.saver.bests == [(1.0, 1)]
    for _ in range(3):
        training.run_update()
        training.save()
    training.run_update()
    training.end()
    assert sorted(training.on_disk()) == [1, 4, 5]
    assert training.saved.count(1) == 1


def test_several_best_checkpoints_are_kept(tmp_path: Path, clock: Clock) -> None:
    training = Training(tmp_path, clock, default(keep_best=3), copy_s=0.001, slowed_s=0.0)
    for value in (5.0, 4.0, 3.0, 6.0, 2.0):
        training.run_update()
        training.evaluate(value)
    training.run_update()
    training.end()
    assert [number for _, number in training.saver.bests] == [5, 3, 2]
    assert {5, 3, 2} <= set(training.on_disk())


def test_a_held_checkpoint_is_written_after_ten_minutes_at_any_cost(tmp_path: Path, clock: Clock) -> None:
    training = Training(tmp_path, clock, default(), copy_s=0.001, slowed_s=30.0)
    for _ in range(70):
        training.run_update()
    training.evaluate(2.0)  # the first save costs 30 s
    training.run_update()
    training.run_update()
    training.evaluate(1.0)
    assert training.saved == [70]
    held_at = training.update
    for _ in range(599):
        training.run_update()
    assert training.saved == [70]
    for _ in range(3):
        training.run_update()
    assert training.saved == [70, held_at]


@pytest.mark.parametrize("policy", [default(every=1000), off(best="val/loss")], ids=["by updates", "off"])
def test_checkpoints_requested_by_settings_are_written_immediately(
    policy: SavePolicy, tmp_path: Path, clock: Clock
) -> None:
    training = Training(tmp_path, clock, policy, copy_s=0.001, slowed_s=1.0)
    for value in (3.0, 2.0, 1.0):
        training.run_update()
        training.evaluate(value)
    training.saver.writer.wait()
    assert training.saved == [1, 2, 3]


# ---------------------------------------------------------------- complete runs


def bests_of(run: Path) -> tuple[list[str], list[Any]]:
    """Return the checkpoints of a run, which must all be valid, and the best ones according to the newest."""
    paths = sorted((run / "checkpoints").glob("update-*"))
    return [path.name for path in paths], list([checkpoint.load(path) for path in paths][-1].state["bests"])


def rows(run: Path) -> dict[int, float]:
    result = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["update"]: row["val/loss"] for row in result if "val/loss" in row}


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("end", ["done", "failed"])
def test_a_short_run_saves_its_best_and_its_last_checkpoint(server: ForkServer, tmp_path: Path, end: str) -> None:
    args = [*RUN, *(["task.fail_at=35"] if end == "failed" else [])]
    result = server.run(args, tmp_path)
    assert result.code == (0 if end == "done" else 70), result.err
    run = tmp_path / "outputs" / "mine"
    values = rows(run)
    best = min(values, key=lambda update: values[update])
    names, bests = bests_of(run)
    assert f"update-{best:010}" in names
    assert bests == [[values[best], best]]
    assert len(names) <= 2, "nothing was written during training"
    again = server.run([*args, "updates=60", "resume_allow=[updates]"], tmp_path, {"NO_KILL": "1"})
    assert again.code == 0, again.err
    values = rows(run)
    best = min(values, key=lambda update: values[update])
    assert bests_of(run)[1] == [[values[best], best]]


@pytest.mark.slow
def test_new_checkpoints_are_not_compared_with_a_lost_best_checkpoint(server: ForkServer, tmp_path: Path) -> None:
    result = server.run(RUN, tmp_path)
    assert result.code == 0, result.err
    run = tmp_path / "outputs" / "mine"
    names, bests = bests_of(run)
    lost, best = bests[0][0], f"update-{bests[0][1]:010}"
    assert best != names[-1], "the test requires that the last checkpoint is not the best"
    shutil.rmtree(run / "checkpoints" / best)
    again = server.run([*RUN, "updates=60", "resume_allow=[updates]"], tmp_path)
    assert again.code == 0, again.err
    values = {update: value for update, value in rows(run).items() if update > 40}
    later = min(values, key=lambda update: values[update])
    names, bests = bests_of(run)
    assert values[later] > lost, "the test requires that the new best is worse than the lost one"
    assert bests == [[values[later], later]]
    assert f"update-{later:010}" in names


def test_a_stop_with_time_for_only_one_save_saves_the_current_update(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, "checkpoint.grace_s=30") as phase:
        updates = phase.updates()
        next(updates)
        saving_of(phase).save()
        saving_of(phase).saver.writer.wait()
        next(updates)
        monkeypatch.setattr(saving_of(phase).saver.save_cost, "has_budget", lambda: False)
        saving_of(phase).save_if_best({"val/loss": 1.0})
        next(updates)
        monkeypatch.setattr(saving_of(phase).saver.save_cost, "expected_s", lambda: 20.0)
        signal.raise_signal(signal.SIGUSR1)
        phase.close()
        assert saving_of(phase).newest_number == 3
        assert not saving_of(phase).is_unsaved
        folder = phase.run.directory.checkpoints
    assert sorted(path.name for path in folder.glob("update-*")) == ["update-0000000001", "update-0000000003"]
    assert checkpoint.load(checkpoint_path(folder, 3)).state["bests"] == []
    messages = capfd.readouterr()
    assert "update 2" in messages.out + messages.err
