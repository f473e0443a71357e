"""A strategy is an object with the settings of its option, and one rank needs no strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from runner.axes.parallelism import PARALLELISMS
from runner.distributed.parallel import Parallel
from runner.distributed.pipelined import Pipelined
from runner.distributed.replicated import Replicated
from runner.distributed.sharded import Sharded
from runner.distributed.world import World

CPU = torch.device("cpu")


def strategy(name: str, world_size: int = 2, **options: Any) -> Any:
    return PARALLELISMS[name](World(CPU, rank=world_size - 1, world_size=world_size), **options)


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "pipeline"])
def test_one_rank_needs_no_strategy(name: str) -> None:
    assert type(strategy(name, 1)) is Parallel


def test_several_ranks_use_the_selected_strategy() -> None:
    kinds = {"single": Parallel, "ddp": Replicated, "fsdp": Sharded, "pipeline": Pipelined}
    assert {name: type(strategy(name)) for name in kinds} == kinds


@pytest.mark.parametrize(("batch_norm", "is_lockstep"), [("per_rank", False), ("sync", True)])
def test_synchronized_batch_norms_keep_ranks_in_lockstep(batch_norm: str, is_lockstep: bool) -> None:
    assert strategy("ddp", batch_norm=batch_norm).is_lockstep == is_lockstep


SHARDED: Mapping[str, Any] = {
    "reshard_after_forward": True, "communicate": "float32", "shards_gradients": False, "num_parts": 1,
    "gathers_model": True, "init": "auto", "shard_size": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({}, {}),
        ({"reshard_after_forward": False}, {"reshard_after_forward": False}),
        ({"communicate": "bfloat16"}, {"communicate": "bfloat16"}),
        ({"gradients": "sharded"}, {"shards_gradients": True}),
        ({"gradients": "full"}, {}),
        ({"checkpoint": "parts"}, {"num_parts": 4}),
        ({"checkpoint": "parts", "shard_size": 2}, {"num_parts": 2, "shard_size": 2}),
        ({"evaluation": "sharded"}, {"gathers_model": False}),
        ({"evaluation": "whole"}, {}),
        ({"init": "meta"}, {"init": "meta"}),
        ({"shard_size": "all"}, {}),
        ({"shard_size": "auto"}, {}),
        ({"shard_size": 2}, {"shard_size": 2}),
        ({"timeout_s": 30.0}, {}),  # not a setting, but a property of the process group
    ],
    ids=str,
)
def test_fsdp_settings_are_passed_to_the_strategy(options: dict[str, Any], changed: dict[str, Any]) -> None:
    made = strategy("fsdp", 4, **options)
    assert {name: vars(made)[name] for name in SHARDED} == {**SHARDED, **changed}


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({}, {}),
        ({"stages": "all"}, {}),
        ({"schedule": "gpipe"}, {"schedule": "gpipe"}),
        ({"split": [3, 1]}, {"split": [3, 1]}),
        ({"balance": "time"}, {"balance": "time"}),
        ({"init": "full"}, {"init": "full"}),
        ({"stages": 2}, {}),
        ({"timeout_s": 30.0}, {}),  # not a setting, but a property of the process group
    ],
    ids=str,
)
def test_pipeline_settings_are_passed_to_the_strategy(options: dict[str, Any], changed: dict[str, Any]) -> None:
    made = strategy("pipeline", **options)
    actual = {
        "num_stages": made.num_stages, "schedule": made.request.schedule, "split": made.request.split,
        "balance": made.request.balance, "init": made.init,
    }  # fmt: skip
    default = {
        "num_stages": 2, "schedule": "1f1b", "split": None, "balance": "memory", "init": "auto",
    }  # fmt: skip
    assert actual == {**default, **changed}
