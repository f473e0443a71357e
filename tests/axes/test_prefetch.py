"""Prefetching waits for, holds, copies and returns batches in this order, and does not change them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from runner.axes.prefetch import CopyAhead, Prefetch, none, stream
from runner.base.batch import MicroBatch

CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Recorded:
    """Streams that record their calls."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.said.append("copy")
        yield

    def join(self) -> None:
        self.said.append("join")

    def hold(self, tensor: Tensor) -> None:
        self.said.append(("hold", int(tensor)))


class Moving(CopyAhead):
    """A prefetcher that creates new tensors, as a copy to a device does."""

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


def batches(count: int) -> Iterator[MicroBatch]:
    for number in range(count):
        yield MicroBatch(torch.tensor(number), last=number % 2 == 1, bad=((number, "why"),) if number == 1 else ())


def test_a_batch_is_awaited_before_the_next_copy_starts() -> None:
    streams = Recorded()
    for item in CopyAhead(CPU, streams)(batches(3)):
        streams.said.append(("out", int(item.batch)))
    assert streams.said == [
        "copy",
        "join", ("hold", 0), "copy", ("out", 0),
        "join", ("hold", 1), "copy", ("out", 1),
        "join", ("hold", 2), ("out", 2),
    ]  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_prefetched_batches_equal_those_without_prefetch(count: int) -> None:
    plain = list(Prefetch(CPU)(batches(count)))
    ahead = Moving(CPU, Recorded())(batches(count))
    result = list(ahead)
    assert result == plain
    assert next(ahead, None) is None


def test_an_error_is_raised_after_the_current_batch() -> None:
    def read() -> Iterator[MicroBatch]:
        yield from batches(2)
        raise OSError("cannot read batch 2")

    received = []
    with pytest.raises(OSError, match="batch 2"):
        for item in CopyAhead(CPU, Recorded())(read()):
            received.append(int(item.batch))
    assert received == [0, 1]


def test_all_tensors_of_a_batch_are_copied_and_recorded() -> None:
    streams = Recorded()
    whole = {"pair": Pair(torch.tensor(1), torch.tensor(2)), "list": [torch.tensor(3), "text"], "none": None}
    (item,) = Moving(CPU, streams)(iter([MicroBatch(whole, True)]))
    assert [messages for messages in streams.said if messages[0] == "hold"] == [("hold", 1), ("hold", 2), ("hold", 3)]
    assert isinstance(item.batch["pair"], Pair)
    assert item.batch["pair"].x is not whole["pair"].x  # type: ignore[attr-defined]
    assert (item.batch["list"][1], item.batch["none"]) == ("text", None)


def test_only_one_batch_is_read_ahead() -> None:
    read: list[int] = []

    def read_batches() -> Iterator[MicroBatch]:
        for item in batches(5):
            read.append(int(item.batch))
            yield item

    ahead = Moving(CPU, Recorded())(read_batches())
    assert read == []
    for number in range(3):
        next(ahead)
        assert read == list(range(number + 2))


def test_the_source_is_kept_until_its_copy_is_complete() -> None:
    """Pinned memory that is freed during the copy would be overwritten by the next batch."""
    alive: dict[int, weakref.ref[Tensor]] = {}
    joined: list[list[int]] = []

    def sources() -> Iterator[MicroBatch]:
        for number in range(4):
            tensor = torch.tensor(number)
            alive[number] = weakref.ref(tensor)
            item = MicroBatch(tensor, last=True)
            del tensor
            yield item
            del item

    class Watching(Recorded):
        def join(self) -> None:
            joined.append([number for number, source in alive.items() if source() is not None])

    ahead = Moving(CPU, Watching())(sources())
    for number, _ in enumerate(ahead):
        assert alive[number]() is not None, "the source must be kept, because its copy may be in progress"
        assert number == 0 or alive[number - 1]() is None, "the source must be released after the wait"
    assert joined == [[0], [1], [2], [3]]


def test_closing_the_prefetcher_closes_its_source() -> None:
    closed = []

    def read_batches() -> Iterator[MicroBatch]:
        try:
            yield from batches(5)
        finally:
            closed.append(True)

    source = read_batches()
    ahead = Moving(CPU, Recorded())(source)
    next(ahead)
    ahead.close()  # type: ignore[attr-defined]
    del ahead, source
    assert closed == [True]


def test_an_error_in_the_source_is_raised() -> None:
    def broken() -> Iterator[MicroBatch]:
        yield from batches(1)
        raise ValueError("the disk is gone")

    with pytest.raises(ValueError, match="the disk is gone"):
        list(Moving(CPU, Recorded())(broken()))


def test_nothing_is_copied_on_a_cpu() -> None:
    source = batches(2)
    assert none(CPU)(source) is source
    assert stream(CPU)(source) is source


def test_reading_and_copying_are_timed_separately() -> None:
    laps: list[str] = []
    plain = Prefetch(torch.device("meta"))(batches(2), laps.append)
    assert [item.batch.device.type for item in plain] == ["meta", "meta"]
    assert laps == ["data", "transfer"] * 2
    streams = Recorded()
    for item in CopyAhead(CPU, streams)(batches(2), streams.said.append):
        streams.said.append(("out", int(item.batch)))
    assert streams.said == [
        "copy", "data",
        "join", "transfer", ("hold", 0), "copy", ("out", 0),
        "join", "transfer", ("hold", 1), ("out", 1),
    ]  # fmt: skip
