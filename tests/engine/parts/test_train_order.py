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
from runner.config.request import Request
from runner.engine.opening import open_phase
from runner.engine.parts.train_order import describe_stream
from runner.loading.stream_order import StreamSampler


@pytest.mark.parametrize(
    ("num_shards", "workers", "ranks", "numbers"),
    [(1, 0, 1, [16, 1]), (1, 2, 1, [16, 1, 2]), (4, 2, 2, [16, 4]), (2, 0, 4, [16, 2, 4])],
)
def test_the_description_of_a_stream_reports_too_few_shards(
    num_shards: int, workers: int, ranks: int, numbers: list[int]
) -> None:
    stream: Any = SimpleNamespace(
        lengths=[16 // num_shards] * num_shards, source=SimpleNamespace(num_shards=num_shards)
    )
    line = describe_stream(stream, SimpleNamespace(num_workers=workers, world_size=ranks))  # type: ignore[arg-type]
    assert [int(number) for number in re.findall(r"\d+", line)] == numbers


# ---------------------------------------------------------------- settings that a stream does not support


STREAMS = Path(__file__).parents[2] / "end_to_end" / "task_of_streams.py"
DDP = ("parallelism=ddp", "parallelism.world_size=1")
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
        ((*DDP, "parallelism.shares=speed"), ["parallelism.shares=speed"]),
        (BY_EPOCH, ["epochs=1"]),
        (
            (*BY_EPOCH, *DDP, "parallelism.shares=speed", "data.shards_per_update=3", "sampler=sequential"),
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
def test_settings_unsupported_by_a_stream_are_reported_together(
    args: tuple[str, ...], places: list[str], tmp_path: Path
) -> None:
    task_file = tmp_path / "streaming.py"
    loader_source = "def own(read, requests):\n    yield from map(read, requests)\n\n\nDATALOADERS = {'own': own}\n"
    task_file.write_text(f"{STREAMS.read_text()}\n\n{loader_source}")
    with pytest.raises(ConfigError) as caught, opened(tmp_path, *args, task=task_file):
        pass
    assert [problem.where for problem in caught.value.problems] == places
    assert all(problem.fix for problem in caught.value.problems)


@pytest.mark.parametrize(
    "args",
    [
        ("data.shards_per_update=2",),
        (*DDP, "parallelism.shares=equal"),
        ("task.kind=length", *BY_EPOCH),
        ("data.train_samples=24", *BY_EPOCH),
        ("dataloader=thread", "dataloader.cache=none"),
    ],
    ids=" ".join,
)
def test_supported_settings_open_a_stream(args: tuple[str, ...], tmp_path: Path) -> None:
    with opened(tmp_path, *args) as phase:
        assert isinstance(phase.order.sampler, StreamSampler)
        per_update = 2 if "data.shards_per_update=2" in args else 4
        assert (phase.order.sampler.num_shards, phase.order.sampler.shards_per_update) == (4, per_update)
