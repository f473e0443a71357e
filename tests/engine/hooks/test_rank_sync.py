"""All ranks receive the same requests, and the times and samples of every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.base.stopwatch import PARTS
from runner.engine.hooks.hook import Wants
from runner.engine.hooks.rank_sync import Exchange, StepStatus


class Work:
    """An all-reduce that completes when it is waited for."""

    def __init__(self, world: Ranks, vector: torch.Tensor) -> None:
        self.world, self.vector, self.num_waits = world, vector, 0

    def wait(self) -> None:
        if not self.num_waits:
            self.vector += self.world.others
        self.num_waits += 1


class Ranks:
    """A world whose other ranks send `others`."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.others = torch.zeros(1)
        self.works: list[Work] = []

    def sum_async(self, vector: torch.Tensor) -> Work:
        self.works.append(Work(self, vector))
        return self.works[-1]


class Carrier:
    """A strategy that, if `carries`, sends the vector with its gradients."""

    def __init__(self, *, carries: bool, others: torch.Tensor) -> None:
        self.carries, self.others = carries, others
        self.attached: torch.Tensor | None = None
        self.sums: torch.Tensor | None = None

    def attach_numbers(self, numbers: torch.Tensor | None) -> bool:
        self.attached, self.sums = numbers, None
        return self.carries

    def attached_sums(self) -> torch.Tensor | None:
        return self.sums

    def reduce(self) -> None:
        if self.attached is not None and self.carries:
            self.sums = self.attached + self.others


def sent_vector(rank: int, world_size: int, wants: Wants, num_bad: int, seconds: Any, samples: int) -> torch.Tensor:
    """Return the vector that a rank sends."""
    world = Ranks(rank, world_size)
    parallel: Any = SimpleNamespace(attached_sums=lambda: None, attach_numbers=lambda _: False)
    Exchange(world, parallel)(wants, num_bad=num_bad, seconds=seconds, samples=samples)  # type: ignore[arg-type]
    return world.works[0].vector


TIMES = {part: float(number) for number, part in enumerate(PARTS, start=1)}
HALVES = {part: number / 2 for part, number in TIMES.items()}


@pytest.mark.parametrize("carries", [True, False])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_status_of_an_update_is_received_after_the_next_update(rank: int, carries: bool) -> None:
    own = Wants(stop=False, save=True), 2, TIMES, 5
    rows = [(Wants(), 1, HALVES, 7), (Wants(stop=rank == 1, save=True), 0, None, 0)]
    world = Ranks(rank, 3)
    world.others = sum(
        (sent_vector(other, 3, *row) for other, row in zip([n for n in range(3) if n != rank], rows, strict=True)),
        start=torch.zeros(3 + 3 * (2 + len(PARTS)), dtype=torch.float64),
    )
    carrier = Carrier(carries=carries, others=world.others)
    exchange = Exchange(world, carrier)  # type: ignore[arg-type]
    wants, num_bad, seconds, samples = own
    assert exchange(wants, num_bad=num_bad, seconds=seconds, samples=samples) is None
    carrier.reduce()
    status = exchange(Wants(), num_bad=0, seconds=None, samples=0)
    of_ranks: list[Any] = [HALVES, None]
    num_samples = [7, 0]
    of_ranks.insert(rank, TIMES)
    num_samples.insert(rank, 5)
    assert status == StepStatus(Wants(stop=rank == 1, save=True), 3, tuple(of_ranks), tuple(num_samples))
    assert [work.num_waits for work in world.works] == ([] if carries else [1, 0])
    exchange.settle()
    exchange.close()
    assert carrier.attached is None
    assert all(work.num_waits for work in world.works)
    assert exchange(Wants(), num_bad=0, seconds=None, samples=0) is None, "a closed exchange starts again"


def test_a_part_without_a_measurement_is_sent_as_zero() -> None:
    vector = sent_vector(0, 1, Wants(), 0, {PARTS[0]: 0.25}, 1)
    assert vector[3:].tolist() == [1, 1, 0.25, *[0.0] * (len(PARTS) - 1)]
