"""The description of a stream, and the settings that a stream does not support."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.base.errors import ConfigError
from runner.base.order import Order
from runner.config.request import Request
from runner.engine.opening import open_phase
from runner.engine.parts.train_order import describe_reading
from runner.loading.stream_order import StreamSampler


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


# ---------------------------------------------------------------- settings that a stream does not support


STREAMS = Path(__file__).parents[2] / "end_to_end" / "task_of_streams.py"
SHARES = ("parallelism=ddp", "parallelism.world_size=1")
BY_EPOCH = ("updates=null", "epochs=1")


@contextmanager
def opened(folder: Path, *args: str, task: Path = STREAMS) -> Iterator[Any]:
    """Open the first phase of a task that trains on a stream of 4 shards."""
    settings = ("updates=8", "device=cpu", "monitor=off", f"output_root={folder}", "backend.threads=1", "data.shards=4")
    with open_phase(Request((*settings, *args), task)) as phase:
        yield phase


@pytest.mark.parametrize(
    ("args", "places"),
    [
        (("sampler=sequential",), ["sampler=sequential"]),
        (("data.shards_per_update=3",), ["data.shards_per_update=3"]),
        ((*SHARES, "parallelism.shares=speed"), ["parallelism.shares=speed"]),
        (BY_EPOCH, ["epochs=1"]),
        (
            (*BY_EPOCH, *SHARES, "parallelism.shares=speed", "data.shards_per_update=3", "sampler=sequential"),
            ["sampler=sequential", "data.shards_per_update=3", "parallelism.shares=speed", "epochs=1"],
        ),
        (("dataloader.cache=memory",), ["dataloader.cache=memory"]),
        (("dataloader.bad_samples=skip",), ["dataloader.bad_samples=skip"]),
        (
            ("dataloader.cache=memory", "dataloader.bad_samples=skip"),
            ["dataloader.cache=memory", "dataloader.bad_samples=skip"],
        ),
        (("dataloader=own", "dataloader.bad_samples=stop"), ["dataloader=own"]),
    ],
)
def test_settings_that_a_stream_does_not_support_are_reported_together(
    args: tuple[str, ...], places: list[str], tmp_path: Path
) -> None:
    own = tmp_path / "streaming.py"
    reads = "def own(read, requests):\n    yield from map(read, requests)\n\n\nDATALOADERS = {'own': own}\n"
    own.write_text(f"{STREAMS.read_text()}\n\n{reads}")
    with pytest.raises(ConfigError) as caught, opened(tmp_path, *args, task=own):
        pass
    assert [problem.where for problem in caught.value.problems] == places
    assert all(problem.fix for problem in caught.value.problems)


@pytest.mark.parametrize(
    "args",
    [
        ("data.shards_per_update=2",),
        (*SHARES, "parallelism.shares=equal"),
        ("task.kind=length", *BY_EPOCH),
        ("data.train_samples=24", *BY_EPOCH),
        ("dataloader=thread", "dataloader.cache=none"),
    ],
    ids=" ".join,
)
def test_other_settings_open_a_stream(args: tuple[str, ...], tmp_path: Path) -> None:
    with opened(tmp_path, *args) as phase:
        assert isinstance(phase.order.sampler, StreamSampler)
        per_update = 2 if "data.shards_per_update=2" in args else 4
        assert (phase.order.sampler.num_shards, phase.order.sampler.shards_per_update) == (4, per_update)
