"""A resumed run equals an uninterrupted one, tested with one short run for each field of a checkpoint.

The resume matrix combines everything; here, each run is stopped where one field matters. By default, a seed selects two
of the fields; `scripts/test.sh --all` tests all of them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner.distributed.world import World
from runner.durable.checkpoint import checkpoint_path, load, newest_valid
from runner.engine.phase import restore_rank_random_state
from tests.distributed.ranks import CPU
from tests.faults.cells import Cell
from tests.faults.tallies import Tally
from tests.faults.test_resume_matrix import Matrix, find_differences, plain, read_result
from tests.forkserver import ForkServer


def killed_at(update: int, phase: str = "train", before: int = 0) -> dict[str, Any]:
    """Return the fault that kills a run after an update, once its checkpoint is on disk.

    before  number of updates in earlier phases
    """
    return {"at": "update", "number": update, "phase": phase, "by": "SIGKILL", "wait": before + update}


HELD: dict[str, tuple[Cell, list[dict[str, Any]]]] = {
    "generators of torch, NumPy and Python": (plain(saves="1"), [killed_at(6)]),
    "the best metric of early stopping": (plain(saves="1", optimizer="adamw early stop"), [killed_at(7)]),
    "the level of a plateau schedule": (plain(saves="1", optimizer="sgd plateau"), [killed_at(9)]),
    "a window of metrics that is not written yet": (plain(saves="1", optimizer="sgd multistep"), [killed_at(5)]),
    "the loss scale and skipped updates of earlier phases": (
        plain(saves="1", precision="fp16 overflowing", phases="three"),
        [killed_at(3, "head", 3 + 7)],
    ),
    "partially computed statistics": (plain(saves="1", phases="three", ranks="ddp 2"), [killed_at(2, "statistics")]),
    "the result of a finished phase": (
        plain(saves="1", phases="three"),
        [{**killed_at(0, "body", 3), "at": "begin"}],
    ),
    "generators of three ranks": (plain(saves="1", ranks="ddp 5+2+1"), [killed_at(6)]),
    "sharded weights and optimizer": (plain(saves="1", ranks="fsdp 5+3"), [killed_at(6)]),
    "stages of a pipeline": (plain(saves="1", ranks="pipeline 2"), [killed_at(6)]),
}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("held", HELD)
def test_a_resumed_run_equals_an_uninterrupted_run(held: str, server: ForkServer, memory: Path, tally: Tally) -> None:
    cell, ends = HELD[held]
    matrix = Matrix(server, memory, tally)
    matrix.check(cell, ends)
    matrix.assert_enough_interruptions(1)
    tally.tried += 1


def draw_random_numbers() -> tuple[float, float, float]:
    return torch.rand(()).item(), np.random.random(), random.random()


@pytest.mark.slow
def test_a_new_rank_draws_its_own_random_numbers(server: ForkServer, memory: Path, tally: Tally) -> None:
    """A run of two ranks resumes with four: the first two continue their draws, and all four draw different numbers."""
    cell = plain(ranks="ddp 2", saves="1")
    result = Matrix(server, memory, tally).attempt(cell, memory, cell.course(), {})
    assert result.code == 0, result.err
    path = newest_valid(memory / "outputs/mine/checkpoints")
    assert path is not None
    start = load(path)
    before = draw_random_numbers()
    actual = []
    for rank in (0, 1, 2, 3, 2):
        restore_rank_random_state(World(CPU, rank, rank, 4, 4), start, 0)
        actual.append(draw_random_numbers())
    assert actual[2] == actual.pop()  # deterministic
    assert before not in actual
    for kind in range(3):
        assert len({numbers[kind] for numbers in actual}) == 4
    # Expected states come from the files instead of the code under test.
    for rank, stem in ((0, "random"), (1, "random-rank00001")):
        assert stem in start.stems, start.stems
        generator = torch.Generator()
        generator.set_state(start.tensors(stem)["torch"])
        assert torch.rand((), generator=generator).item() == actual[rank][0]
    tally.tried += 1


TIMED = ("seconds", "parts_s", "peak_host_gib", "peak_device_gib", "peak_reserved_gib")


def without_times(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a checkpoint without measurements of its process."""
    records = {
        name: {key: value for key, value in record.items() if key not in TIMED}
        for name, record in state["records"].items()
    }
    return {key: value for key, value in state.items() if key != "saving"} | {"records": records}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("args", "phase", "before", "update"),
    [
        # Each run is stopped after an evaluation. The next checkpoint contains the result of that evaluation, and the
        # one after it contains the result of the following evaluation.
        ("three phases fp16", "head", 4 + 7, 3),
        ("early stopping", "train", 0, 4),
        ("plateau", "train", 0, 6),
    ],
)
def test_checkpoints_of_a_resumed_run_equal_those_without_interruption(
    args: str, phase: str, before: int, update: int, server: ForkServer, memory: Path, tally: Tally
) -> None:
    """Every later checkpoint is compared, because evaluations, saves and ends of phases replace state."""
    cell = {
        "three phases fp16": plain(precision="fp16 overflowing", phases="three", data="ragged"),
        "early stopping": plain(optimizer="adamw early stop"),
        "plateau": plain(optimizer="sgd plateau"),
    }[args]
    matrix = Matrix(server, memory, tally)
    course = [*cell.course(), "checkpoint.every=1", "checkpoint.keep=60", "checkpoint.keep_best=2"]
    uninterrupted, stopped = matrix.fresh(), memory / "stopped"
    stopped.mkdir()
    assert matrix.attempt(cell, uninterrupted, course, {}).code == 0
    assert matrix.attempt(cell, stopped, course, killed_at(update, phase, before)).code < 0
    newest = newest_valid(stopped / "outputs/mine/checkpoints")
    assert newest is not None
    begun = load(newest)
    assert matrix.attempt(cell, stopped, course, {}).code == 0
    held = {key for key in ("bests", "metrics", "kept") if begun.state[key]}
    assert held == {"bests", "metrics", *(["kept"] if before else [])}, "otherwise, the comparison below is vacuous"
    assert begun.state["data"]
    assert begun.state["code"]
    names = [path.name for path in sorted((stopped / "outputs/mine/checkpoints").glob("update-*"))]
    later = [name for name in names if name > newest.name]
    assert later
    assert (begun.state["phase"], begun.update, begun.state["evaluated_at"]) == (phase, before + update, update)
    for name in later:
        result, wanted = (load(folder / "outputs/mine/checkpoints" / name) for folder in (stopped, uninterrupted))
        mine, theirs = without_times(result.state), without_times(wanted.state)
        for key in theirs:
            assert mine[key] == theirs[key], f"{name}: {key}"
        assert result.stems == wanted.stems
        for stem in result.stems:
            one, other = result.tensors(stem), wanted.tensors(stem)
            assert all(torch.equal(one[key], other[key]) for key in other), f"{name}: {stem}"
        for key in ("epoch", "samples", "phase", "world_size", "precision", "config_hash", "run_id"):
            assert result.manifest[key] == wanted.manifest[key], f"{name}: {key}"
    uids = [load(stopped / "outputs/mine/checkpoints" / name).manifest["run_uid"] for name in names]
    assert set(uids) == {begun.manifest["run_uid"]}
    first = load(stopped / "outputs/mine/checkpoints" / later[0])
    assert first.state["saving"] == begun.state["saving"] != []  # unchanged: no save has finished since
    for name, record in begun.state["records"].items():
        now = first.state["records"][name]
        for key in ("seconds", "peak_host_gib"):
            assert now[key] >= record[key] > 0, f"{name}: {key}"
        assert all(now["parts_s"][part] >= spent for part, spent in record["parts_s"].items()), name
    tally.tried += 1


@pytest.mark.slow
def test_running_each_phase_in_its_own_process_gives_the_same_result(
    server: ForkServer, memory: Path, tally: Tally
) -> None:
    """A finished phase passes on weights, loss scale, skipped updates, generators and the best metric."""
    cell = plain(precision="fp16 overflowing", phases="three", saves="1")
    matrix = Matrix(server, memory, tally)
    at_once, folder = matrix.fresh(), memory / "one-by-one"
    folder.mkdir()
    assert matrix.attempt(cell, at_once, [*cell.course(), *cell.mechanics(0)], {}).code == 0
    wanted = read_result(at_once)
    args = [word for word in [*cell.course(), *cell.mechanics(0)] if not word.startswith("phases=")]
    for phase in ("statistics", "body", "head"):
        result = matrix.attempt(cell, folder, [*args, f"phases=[{phase}]"], {})
        assert result.code == 0, result.err
    actual = read_result(folder)
    assert list(find_differences(actual, wanted, keeps_best=True)) == []
    kept, expected = (
        sorted(path.name for path in (one / "outputs/mine/checkpoints").glob("update-*")) for one in (folder, at_once)
    )
    assert len(expected) >= 5  # the last two, and the best and the last one of each earlier phase
    assert kept == expected
    tally.tried += 1


@pytest.mark.slow
def test_training_time_after_the_last_checkpoint_is_counted(server: ForkServer, memory: Path, tally: Tally) -> None:
    """A failed run records its time in run.json; the resumed run continues from there."""
    cell = plain(saves="1")
    matrix = Matrix(server, memory, tally)
    folder, args = matrix.fresh(), [*cell.course(), *cell.mechanics(0)]
    assert matrix.attempt(cell, folder, args, {**killed_at(4), "by": "raise"}).code == 70
    path = folder / "outputs/mine/run.json"
    record = json.loads(path.read_text())
    (messages,) = record["evidence"]["phases"]
    assert messages["updates"] == 4
    messages["seconds"] += 1000.0  # more than any process takes, on any machine
    messages["parts_s"]["forward"] += 500.0
    path.write_text(json.dumps(record))
    assert matrix.attempt(cell, folder, args, {}).code == 0
    (after,) = json.loads(path.read_text())["evidence"]["phases"]
    assert after["seconds"] > messages["seconds"]
    assert after["parts_s"]["forward"] > 500.0  # lint-tests: measured: the test added 500 s to run.json
    tally.tried += 1


@pytest.mark.slow
def test_measured_shares_are_restored(server: ForkServer, memory: Path, tally: Tally) -> None:
    """Times of ranks are not reproducible: this only checks that a resumed run does not measure shares again."""
    matrix = Matrix(server, memory, tally)
    cell = plain(ranks="ddp 2", saves="1")
    args = [word for word in cell.course() if not word.startswith("updates=")]
    args += ["updates=24", "parallelism.shares=speed", "checkpoint.every=1", "checkpoint.keep=60"]
    assert matrix.attempt(cell, memory, args, killed_at(20)).code < 0
    assert matrix.attempt(cell, memory, args, {}).code == 0
    for update in (20, 21):
        shares = load(checkpoint_path(memory / "outputs/mine/checkpoints", update)).state["shares"]
        assert (shares["total"], sum(shares["current"]), len(shares["ranks"])) == (8, 8, 2)
        assert shares["known"]
    tally.tried += 1
