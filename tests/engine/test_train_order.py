"""The description of a stream states how many processes read each shard."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from runner.base.order import Order
from runner.base.stream_order import StreamSampler
from runner.engine.train_order import describe_reading


def describe(lengths: tuple[int, ...], *, shares: tuple[int, ...] = (), workers: int = 0, ranks: int = 1) -> list[str]:
    """Describe a stream with shards of these lengths, whose updates have 4 samples of all shards."""
    sampler = StreamSampler(lengths, len(lengths), len(lengths), 4)
    order = Order(sum(lengths), 4, 2, 0, shares=shares, sampler=sampler)
    stream: Any = SimpleNamespace(lengths=lengths, source=SimpleNamespace(num_shards=len(lengths)))
    plan: Any = SimpleNamespace(num_workers=workers, world_size=ranks)
    return describe_reading(order, stream, plan)


@pytest.mark.parametrize(
    ("lengths", "shares", "workers", "ranks", "readers"),
    [
        ((16,), (), 2, 1, 2.0),  # workers take turns with the micro-batches
        ((16,), (2, 2), 2, 2, 4.0),
        ((16,), (2, 2), 0, 4, 4.0),  # two stages of a pipeline, which read the same samples
        ((4, 8), (), 2, 1, 1.5),  # of 12 samples the last four are all of the second shard
        ((16, 16), (3, 1), 0, 2, 1.5),  # the first rank reads the first shard and half of the second one
        ((4, 8), (2, 2), 0, 4, 3.0),
    ],
)
def test_the_number_of_processes_that_read_a_shard_is_stated(
    lengths: tuple[int, ...], shares: tuple[int, ...], workers: int, ranks: int, readers: float
) -> None:
    line, hint = describe(lengths, shares=shares, workers=workers, ranks=ranks)
    assert [float(number) for number in re.findall(r"[\d.]+", line)] == [sum(lengths), len(lengths), readers]
    assert "data.shards" in hint


@pytest.mark.parametrize("workers", [0, 1])
def test_of_a_stream_with_one_reader_only_its_size_is_stated(workers: int) -> None:
    (line,) = describe((16, 16), workers=workers)
    assert [float(number) for number in re.findall(r"[\d.]+", line)] == [32, 2]
