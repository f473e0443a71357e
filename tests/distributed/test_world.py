"""The collectives of a world, and their equivalents in a single process."""

from __future__ import annotations

import math

import pytest
import torch

from runner.base.errors import SystemLimit
from runner.base.rank_env import RankInfo
from runner.distributed import join
from runner.distributed.agreement import find_unequal_sums
from runner.distributed.world import World
from tests.distributed.ranks import CPU, run_ranks


def collectives(world: World) -> list[object]:
    mine = torch.tensor([1.0 + world.rank, 10.0])
    return [
        world.gather({"rank": world.rank, "text": "x" * (5 * world.rank)}),
        world.gather_on_first({"rank": world.rank, "text": "x" * (5 * world.rank)}),
        world.broadcast(["first", world.rank]),
        world.sum(mine.clone()).tolist(),
        world.max(mine.clone()).tolist(),
        world.any(world.rank == 1),
        world.any(False),
    ]


def test_every_rank_receives_the_same_values() -> None:
    everything = [{"rank": rank, "text": "x" * (5 * rank)} for rank in range(3)]
    for number, got in enumerate(run_ranks(collectives, 3)):
        assert got == [
            everything, [] if number else everything, ["first", 0], [6.0, 30.0], [3.0, 10.0], True, False,
        ]  # fmt: skip


def test_collectives_in_a_single_process_return_their_input() -> None:
    alone = [{"rank": 0, "text": ""}]
    assert collectives(World(CPU)) == [alone, alone, ["first", 0], [1.0, 10.0], [1.0, 10.0], False, False]


def test_the_first_rank_of_each_machine_reports_its_name() -> None:
    """There are two machines with three ranks each."""
    ranks = [World(CPU, rank, rank % 3, 6, 3) for rank in range(6)]
    assert [rank.machine_name for rank in ranks] == ["", "", "", "rank3", "", ""]


def test_the_failed_rank_is_reported_not_its_peers() -> None:
    def broken(world: World) -> None:
        if world.rank == 1:
            raise ValueError("this one")
        world.sum(torch.zeros(1, device=world.device))

    with pytest.raises(AssertionError, match="this one"):
        run_ranks(broken, 2)


def test_the_rendezvous_timeout_grows_with_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects every pair of ranks."""
    limits_s = []

    def nobody_comes(limit_s: float, call: object) -> None:
        limits_s.append(limit_s)
        raise RuntimeError("nobody comes")

    monkeypatch.setattr(join, "call_with_timeout", nobody_comes)
    monkeypatch.setattr(join, "choose_interface", lambda member: None)
    for size in (2, 200):
        member = RankInfo(0, 0, size, 1, "tcp://127.0.0.1:29500")
        with pytest.raises(SystemLimit), join.join_process_group(member, CPU):
            pass
    few, many = limits_s
    assert many - few == pytest.approx(0.5 * 198)


def _names_of_unequal_sums(world: World) -> list[str]:
    noise = 1e-6 * world.rank * torch.randn(100, 50, generator=torch.Generator().manual_seed(1)).T
    values = torch.linspace(-1, 1, 5000)
    return find_unequal_sums(
        {
            "equal": values.bfloat16(),
            "counts": torch.arange(5),
            "nan": torch.tensor([math.nan, 1.0]),
            "infinite": torch.tensor([math.inf]),
            "noise": values.reshape(50, 100) + noise,
            "phase": torch.complex(values, values * (1 + world.rank)),
            "sign": values.abs() * (-1) ** world.rank,
            "one infinite": torch.tensor([math.inf if world.rank else 1.0]),
            **({"mine": values} if world.is_first else {}),
        },
        world,
    )


def test_checksums_detect_tensors_that_differ_between_ranks() -> None:
    assert run_ranks(_names_of_unequal_sums, 2) == [["noise", "phase", "sign", "one infinite"]] * 2
