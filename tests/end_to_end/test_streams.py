"""Runs on a stream give the same result after a kill, with data workers, and on ranks with unequal shares."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.base.batch import ShardMark
from runner.durable.checkpoint import load, newest_valid
from tests.forkserver import ForkServer
from tests.laws.streams import KINDS
from tests.rounding import PROMISED, distance

TASK = Path(__file__).with_name("task_of_streams.py")
TRAIN = f"train --task {TASK} run=mine device=cpu monitor=off checkpoint.every=1"
ON_RANKS = {
    "two ranks": "parallelism=ddp parallelism.world_size=2 parallelism.shares=[5,3] dataloader.num_workers=1",
    "three ranks": "parallelism=ddp parallelism.world_size=3 micro_batch_size=2 dataloader.num_workers=0",
    "lockstep": "parallelism=fsdp parallelism.world_size=2 parallelism.shares=[7,1] micro_batch_size=2",
}
KILL: dict[str, Any] = {"at": "update", "number": 7, "by": "SIGKILL"}
Result = tuple[dict[str, torch.Tensor], list[float]]


def trained(server: ForkServer, folder: Path, *lines: str) -> Result:
    """Start a run with each line in turn, killing all starts but the last. Return its weights and losses."""
    folder.mkdir()
    directory = folder / "outputs" / "mine"
    for number, args in enumerate(lines, 1):
        fault = KILL if number < len(lines) else {}
        env = {"IMPORT_FIRST": "tests.faults.ending", "FAULT": json.dumps(fault)}
        result = server.run(f"{TRAIN} {args}", folder, env)
        assert (result.code == 0) is not bool(fault), result.err
        if fault:  # ranks end after the killed launcher, and hold the lock until they end
            with (directory / ".lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
    path = newest_valid(directory / "checkpoints")
    assert path is not None
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return load(path).tensors("model"), [row["train/loss"] for row in rows if "train/loss" in row]


def assert_close(one: Result, other: Result) -> None:
    tolerance = 20 * PROMISED[torch.float32]
    assert len(one[1]) == len(other[1])
    assert distance(one[1], other[1]) <= tolerance
    assert all(distance(tensor.tolist(), other[0][name].tolist()) <= tolerance for name, tensor in one[0].items())


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "length" in kind or kind == "plain"])
@pytest.mark.parametrize("shards", ["data.shards=1", "data.shards=4 data.shards_per_update=2"])
@pytest.mark.parametrize("way", ON_RANKS)
def test_resumes_workers_and_ranks_do_not_change_results(
    kind: str, shards: str, way: str, server: ForkServer, tmp_path: Path
) -> None:
    length = "epochs=2" if "length" in kind else "updates=18"
    args = f"task.kind={kind} {shards} {length}"
    alone, ranks = f"{args} dataloader.num_workers=0", f"{args} {ON_RANKS[way]}"
    weights, losses = trained(server, tmp_path / "alone", alone)
    resumed, again = trained(server, tmp_path / "killed", f"{args} dataloader.num_workers=2", alone)
    assert again == losses
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights.items())
    assert_close((weights, losses), trained(server, tmp_path / "ranks", ranks))
    assert_close((weights, losses), trained(server, tmp_path / "fewer ranks", ranks, alone))


WRONG = [
    ("task.kind=plain epochs=1", 78, "epochs=1"),
    ("task.kind=plain updates=3 data.shards=4 data.shards_per_update=3", 78, "data.shards_per_update=3"),
    ("task.kind=plain updates=3 sampler=sequential", 78, "sampler=sequential"),
    ("task.kind=plain updates=3 dataloader.cache=memory", 78, "dataloader.cache=memory"),
    ("task.kind=plain updates=3 dataloader.bad_samples=skip", 78, "dataloader.bad_samples=skip"),
    ("task.kind=plain updates=9 data.shards=7", 65, "data.shards=7"),
    ("task.kind=undivided updates=3 data.shards=2", 65, "data.shards=2"),
    ("task.kind=unseeded updates=3", 65, "stream"),
    (f"task.kind=plain updates=3 {ON_RANKS['two ranks'].replace('[5,3]', 'speed')}", 78, "parallelism.shares=speed"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("args", "code", "named"), WRONG, ids=[row[0] for row in WRONG])
def test_unsupported_settings_are_rejected(
    args: str, code: int, named: str, server: ForkServer, tmp_path: Path
) -> None:
    result = server.run(f"{TRAIN} {args}", tmp_path)
    assert result.code == code, result.err
    assert named in result.err


@pytest.mark.slow
def test_the_number_of_shards_cannot_change_on_resume(server: ForkServer, tmp_path: Path) -> None:
    more = "updates=5 resume_allow=[updates]"
    result = [server.run(f"{TRAIN} {args}", tmp_path) for args in ("updates=3", f"{more} data.shards=2", more)]
    assert [each.code for each in result] == [0, 88, 0]


def test_incorrect_stream_states_are_reported(server: ForkServer, tmp_path: Path) -> None:
    replays, expected_s = {}, 0.0
    for folder, numbers in (("whole", [6]), ("stopped", [3, 6])):
        (tmp_path / folder).mkdir()
        for number in numbers:
            line = f"{TRAIN} task.kind=lying_state updates={number} resume_allow=[updates]"
            result = server.run(line, tmp_path / folder)
            assert result.code == 0, result.err
            assert ("load_state_dict" in result.out + result.err) == (number == numbers[0]), (
                "states are checked at the first start"
            )
            events = (tmp_path / folder / "outputs/mine/events.jsonl").read_text().splitlines()
            replays[folder, number] = [row for row in map(json.loads, events) if row["kind"] == "stream replay"]
            if number == 3:
                path = newest_valid(tmp_path / folder / "outputs/mine/checkpoints")
                assert path is not None
                shards = [ShardMark(*mark) for _, *mark in load(path).state["stream"]["shards"]]
                expected_s = sum((mark.item - mark.passed) * mark.sample_s for mark in shards)
    assert [key for key, rows in replays.items() if rows] == [("stopped", 6)]
    (replay,) = replays["stopped", 6]
    assert replay["samples"] == 24, "the samples of three updates are read again"
    assert replay["expected_s"] == expected_s > 0
    whole, resumed = (newest_valid(tmp_path / folder / "outputs/mine/checkpoints") for folder in ("whole", "stopped"))
    assert whole is not None
    assert resumed is not None
    weights = load(resumed).tensors("model")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in load(whole).tensors("model").items())


@pytest.mark.slow
def test_a_run_can_be_evaluated_on_its_stream(server: ForkServer, tmp_path: Path) -> None:
    lines = (f"{TRAIN} updates=3", "evaluate run=mine split=train evaluate.samples=20")
    assert [server.run(line, tmp_path).code for line in lines] == [0, 0]
