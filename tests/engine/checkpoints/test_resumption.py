"""A resumed run may change some settings; its model must match by name, shape and dtype."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from runner.base.errors import IncompatibleResume
from runner.distributed.parallel import Parallel
from runner.distributed.world import World
from runner.durable import checkpoint
from runner.durable.checkpoint import LoadedCheckpoint, Snapshot
from runner.engine.checkpoints.resumption import compare, count_repeated
from runner.engine.parts.frozen_base import load_model
from runner.engine.phase import restore_rank_random_state
from runner.tensors.global_rng import random_state, seed_everything

PARALLEL = Parallel(World(torch.device("cpu")))
BEFORE = {
    "seed": 1, "task": "gpt", "task.size": "tiny", "optimizer": "adamw", "optimizer.lr": 0.1,
    "optimizer.kernel": "fused",
    "phase.body.updates": 7, "phase.body.trains": ["5"], "precision": "fp32", "dataloader.num_workers": 2,
}  # fmt: skip


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def save_and_load(tensors: dict[str, Tensor], folder: Path) -> LoadedCheckpoint:
    path = checkpoint.save(folder, Snapshot(3, {"model": tensors}, {}, {}))
    return checkpoint.load(path)


def changed_state(**new: Any) -> dict[str, Tensor]:
    return {**{name: tensor + 1 for name, tensor in model().state_dict().items()}, **new}


def state_without(name: str) -> dict[str, Tensor]:
    return {other: tensor for other, tensor in changed_state().items() if other != name}


def test_only_updates_of_the_resumed_phase_count_as_repeated(tmp_path: Path) -> None:
    rows = [{"phase": "one", "update": update} for update in (3, 7)]
    rows += [{"phase": "two", "update": update} for update in (2, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    cases = [("two", 1), ("two", 4), ("two", 5), ("one", 3), ("three", 1)]
    counts = [count_repeated(tmp_path / "metrics.jsonl", phase, update) for phase, update in cases]
    assert [max(0, count) for count in counts] == [3, 0, 0, 4, 0]


def test_a_different_task_is_reported_as_the_only_problem() -> None:
    with pytest.raises(IncompatibleResume) as refused:
        compare(BEFORE, {"seed": 2, "task": "mine", "task.hidden": 8}, ["seed"])
    assert [problem.where for problem in refused.value.problems] == ["task"]


def test_weights_and_buffers_are_restored(tmp_path: Path) -> None:
    given, result = changed_state(), model()
    load_model(result, save_and_load(given, tmp_path), PARALLEL)
    assert all(torch.equal(tensor, given[name]) for name, tensor in result.state_dict().items())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (lambda: state_without("0.weight"), "0.weight"),
        (lambda: state_without("1.running_mean"), "1.running_mean"),
        (lambda: changed_state(**{"2.weight": torch.zeros(4)}), "2.weight"),
        (lambda: changed_state(**{"0.bias": torch.zeros(5)}), "0.bias"),
        (lambda: changed_state(**{"0.bias": torch.zeros(1)}), "0.bias"),  # would broadcast
        (lambda: changed_state(**{"0.bias": torch.zeros(4, dtype=torch.float64)}), "0.bias"),  # would be rounded
    ],
)
def test_mismatched_weights_are_rejected_without_changing_the_model(
    given: Callable[[], dict[str, Tensor]], name: str, tmp_path: Path
) -> None:
    result = model()
    before = {key: tensor.clone() for key, tensor in result.state_dict().items()}
    with pytest.raises(IncompatibleResume, match=name):
        load_model(result, save_and_load(given(), tmp_path), PARALLEL)
    assert all(torch.equal(tensor, before[key]) for key, tensor in result.state_dict().items())


@pytest.mark.parametrize("key", ["optimizer.kernel", "dataloader.num_workers"])
def test_settings_that_do_not_change_results_can_differ_on_resume(key: str) -> None:
    (difference,) = compare(BEFORE, BEFORE | {key: "other"}, ())
    assert (difference.key, difference.before, difference.now) == (key, BEFORE[key], "other")
    assert compare(BEFORE, BEFORE, ()) == []


@pytest.mark.parametrize("key", ["optimizer.lr", "phase.body.updates", "precision"])
@pytest.mark.parametrize("is_removed", [False, True])
def test_changes_that_affect_results_must_be_allowed_by_name(key: str, is_removed: bool) -> None:
    now = {other: value for other, value in BEFORE.items() if other != key} | ({} if is_removed else {key: 9})
    with pytest.raises(IncompatibleResume) as caught:
        compare(BEFORE, now, ["epochs", f"{key}s"])
    assert [problem.where for problem in caught.value.problems] == [key]
    short = key.removeprefix("phase.body.")
    for allowed in (key, short, short.partition(".")[0]):
        assert [difference.key for difference in compare(BEFORE, now, [allowed])] == [key]


@pytest.mark.parametrize("now", [{"optimizer.lr": 9}, {"optimizer.lr": None, "epochs": 2.0}])
def test_differences_of_the_last_process_need_no_second_permission(now: dict[str, Any]) -> None:
    last = {**BEFORE, **now}
    assert {difference.key for difference in compare(BEFORE, last, (), last=last)} == set(now)
    with pytest.raises(IncompatibleResume):
        compare(BEFORE, {**last, "optimizer.lr": 10}, (), last=last)
    with pytest.raises(IncompatibleResume):
        compare(BEFORE, {**last, "seed": 3}, (), last={**last, "seed": 3})


@pytest.mark.parametrize(("before", "now"), [("mine", "ddp"), ("ddp", "mine"), ("mine", "other"), ("mine", "single")])
def test_changing_from_or_to_a_custom_strategy_must_be_allowed_by_name(before: str, now: str) -> None:
    """Changes between built-in strategies are allowed, because they compute the same results."""
    old, new = ({**BEFORE, "parallelism": name, f"parallelism.{name}": 1} for name in (before, now))
    with pytest.raises(IncompatibleResume) as caught:
        compare(old, new, ())
    assert [problem.where for problem in caught.value.problems] == ["parallelism"]
    assert compare(old, new, ["parallelism"])


def test_changes_of_custom_strategy_settings_must_be_allowed_by_name() -> None:
    old = {**BEFORE, "parallelism": "mine", "parallelism.bits": 8, "parallelism.world_size": 2}
    with pytest.raises(IncompatibleResume) as caught:
        compare(old, old | {"parallelism.bits": 4, "parallelism.world_size": 3}, ())
    assert [problem.where for problem in caught.value.problems] == ["parallelism.bits"]
    for changed in ({"parallelism": "ddp"}, {"parallelism": "fsdp"}, {"parallelism.world_size": 3}):
        assert compare(old | {"parallelism": "single"}, old | {"parallelism": "single"} | changed, ())


@pytest.mark.parametrize("key", ["seed", "task", "task.size", "optimizer", "phase.body.trains"])
def test_changes_that_define_a_different_run_are_always_rejected(key: str) -> None:
    with pytest.raises(IncompatibleResume) as caught:
        compare(BEFORE, BEFORE | {key: "other"}, [key, key.partition(".")[0]])
    assert [problem.where for problem in caught.value.problems] == [key]


def test_all_rejected_differences_are_reported_together() -> None:
    now = BEFORE | {"seed": 2, "precision": "bf16", "optimizer.lr": 1.0, "dataloader.num_workers": 0}
    with pytest.raises(IncompatibleResume) as caught:
        compare(BEFORE, now, ["optimizer.lr"])
    assert sorted(problem.where for problem in caught.value.problems) == ["precision", "seed"]


def test_keys_of_a_changed_option_are_not_listed_separately() -> None:
    now = BEFORE | {"optimizer": "sgd", "optimizer.lr": 1.0, "optimizer.momentum": 0.9, "precision": "bf16"}
    with pytest.raises(IncompatibleResume) as caught:
        compare(BEFORE, now, ())
    assert [problem.where for problem in caught.value.problems] == ["optimizer", "precision"]


def test_one_fix_names_all_keys_that_must_be_allowed() -> None:
    now = BEFORE | {"optimizer.lr": 1.0, "precision": "bf16", "precision.init_scale": 2.0, "epochs": 2}
    with pytest.raises(IncompatibleResume) as caught:
        compare(BEFORE, now, ["epochs"])
    fixes = [problem.fix for problem in caught.value.problems]
    assert "resume_allow=[epochs,optimizer.lr,precision]" in fixes.pop()
    assert not any(fixes)
    assert compare(BEFORE, now, ["epochs", "optimizer.lr", "precision"])


def test_a_fixed_key_is_rejected_even_if_its_option_changes() -> None:
    old = BEFORE | {"dataloader": "default", "dataloader.drop_last": True}
    with pytest.raises(IncompatibleResume) as caught:
        compare(old, old | {"dataloader": "thread", "dataloader.drop_last": False}, ())
    assert [problem.where for problem in caught.value.problems] == ["dataloader.drop_last"]


def test_ranks_restore_the_cached_second_normal_number(tmp_path: Path) -> None:
    """NumPy and Python draw normal numbers in pairs, and cache the second one next to the state of their generator."""

    def draw() -> list[float]:
        return [np.random.standard_normal(), random.gauss(), torch.rand(()).item()]

    tensors, rests, expected = {}, [], []
    for rank in range(3):
        seed_everything(rank)
        for _ in range(rank):
            draw()
        stem = checkpoint.rank_stem("random", rank) if rank else "random"
        tensors[stem], rest = random_state(PARALLEL.world.device)
        rests.append(rest)
        expected.append(draw())
    state = {"random": rests[0], "random_of_ranks": rests[1:]}
    start = checkpoint.load(checkpoint.save(tmp_path, Snapshot(3, tensors, state, {})))
    for rank in (1, 0, 2):
        restore_rank_random_state(World(PARALLEL.world.device, rank, rank, 3, 3), start, 0)
        assert draw() == expected[rank]
