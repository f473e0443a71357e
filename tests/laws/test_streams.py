"""Updates of a stream depend neither on the numbers of ranks and workers nor on stops and resumes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.axes.dataloader import default
from runner.base.batch import MicroBatch, ShardMark
from runner.base.errors import DataError, TaskFault
from runner.base.json_state import decode_state, encode_state
from runner.base.order import Order
from runner.base.task import Task
from runner.engine.hooks.stream_position import StreamCheck, check_stream, raise_if_invalid
from runner.engine.sources.stream_reader import StreamFetcher, StreamSamples, read_all_samples
from runner.engine.sources.stream_source import StreamSource, is_stream, undivided
from runner.loading.loaders import Loader
from runner.loading.stream_order import RoundRobin, StreamSampler, decode_index
from tests.laws.streams import FILES, KINDS, NUMBERS, ByWorker, Files, Liar, Stateful, Undivided, Unseeded, WithLength

CPU = torch.device("cpu")
SEED, BATCH = 3, 8


def source_of(kind: type[Files], shards: int, **other: Any) -> StreamSource:
    return StreamSource("train", shards, make=lambda _, shard, num: kind(FILES[shard::num]), **other)


def fetcher_of(source: StreamSource) -> StreamFetcher:
    return StreamFetcher(StreamSamples(source, source.lengths(), SEED), Task.collate.__get__(Task()))


def order_of(source: StreamSource, micro: int = BATCH, together: int | None = None, **ranks: Any) -> Order:
    sampler = StreamSampler(source.lengths(), source.num_shards, together or source.num_shards, BATCH)
    return Order(sampler.num_samples, BATCH, micro, SEED, sampler=sampler, **ranks)


def read(
    source: StreamSource,
    updates: int,
    *,
    start: int = 0,
    marks: dict[int, ShardMark] | None = None,
    workers: int = 0,
    order: Order | None = None,
) -> list[list[MicroBatch]]:
    """Read a stream; return the micro-batches of each update of a rank."""
    fetcher, result = fetcher_of(source), [[]]
    fetcher.dataset.start_from(marks or {})
    reader = default(fetcher, CPU, num_workers=workers, pin_memory=False)
    try:
        for micro in reader.batches((order or order_of(source)).from_update(start)):
            result[-1].append(micro)
            if micro.last and len(result) == updates:
                return result
            if micro.last:
                result.append([])
    finally:
        reader.close()
    raise AssertionError("the order has no end")


def rows(updates: list[list[MicroBatch]]) -> list[torch.Tensor]:
    """Return the samples of each update."""
    return [
        torch.cat([micro.batch for micro in update if micro.is_counted] or [torch.empty(0, 4)]) for update in updates
    ]


def marks_after(updates: list[list[MicroBatch]]) -> dict[int, ShardMark]:
    """Return the marks that a checkpoint would store after these updates."""
    result = {shard: mark for update in updates for micro in update for shard, mark in micro.marks.items()}
    return {shard: ShardMark(*json.loads(json.dumps([*mark]))) for shard, mark in result.items()}


kinds = pytest.mark.parametrize("kind", KINDS)
shards = pytest.mark.parametrize(("num_shards", "together"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 5), (4, 1)])


# ---------------------------------------------------------------- order


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_round_robin_takes_each_element_once(lengths: list[int]) -> None:
    turns = RoundRobin(lengths)
    expected = sorted((item, which) for which, length in enumerate(lengths) for item in range(length))
    assert [turns.locate(position)[::-1] for position in range(turns.total)] == expected
    for position in range(turns.total + 1):
        taken = Counter(which for _, which in expected[:position])
        assert turns.counts_before(position) == [taken[which] for which in range(len(lengths))]


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any),
    groups=st.integers(1, 3),
    batch=st.integers(1, 12),
    drop_last=st.booleans(),
)
def test_every_sample_is_in_exactly_one_update(lengths: list[int], groups: int, batch: int, drop_last: bool) -> None:
    sampler = StreamSampler(lengths * groups, len(lengths) * groups, len(lengths), batch, drop_last=drop_last)
    drawn = [sampler.draw(0, 0, window) for window in range(sampler.updates_per_epoch)]
    counts = [0, *np.cumsum([len(each) for each in drawn]).tolist()]
    assert counts == [sampler.start(0, 0, window) for window in range(sampler.updates_per_epoch + 1)]
    result = Counter(decode_index(code, len(lengths) * groups) for each in drawn for code in each)
    expected = {(shard, item) for shard, length in enumerate(lengths * groups) for item in range(length)}
    assert set(result.values()) <= {1}
    assert result.keys() <= expected if drop_last else result.keys() == expected
    small = sum(len(each) < batch for each in drawn)
    assert small == 0 if drop_last else small <= groups


# ---------------------------------------------------------------- reading


@shards
@pytest.mark.parametrize("kind", ["length", "state_and_length", "shuffled"])
def test_each_sample_is_read_once_per_epoch(kind: str, num_shards: int, together: int) -> None:
    source = source_of(KINDS[kind], num_shards)
    order = order_of(source, together=together)
    result = rows(read(source, 2 * order.updates_per_epoch, order=order))
    for epoch in range(2):
        part = torch.cat(result[epoch * order.updates_per_epoch : (epoch + 1) * order.updates_per_epoch])
        assert sorted(part[:, 0].tolist()) == NUMBERS
        assert set(part[:, 1].tolist()) == {float(epoch)}


@pytest.mark.slow_beyond(2)
@shards
def test_streams_without_a_length_repeat_complete_shards(num_shards: int, together: int) -> None:
    source = source_of(Files, num_shards)
    updates = read(source, 40, order=order_of(source, together=together))
    assert all(len(each) == BATCH for each in rows(updates))
    drawn = torch.cat(rows(updates))
    for shard in range(num_shards):
        numbers = [*chain(*FILES[shard::num_shards])]
        mine = drawn[torch.isin(drawn[:, 0], torch.tensor(numbers, dtype=torch.float32))]
        for each in range(len(mine) // len(numbers)):
            part = mine[each * len(numbers) : (each + 1) * len(numbers)]
            assert part[:, 0].tolist() == numbers
            assert set(part[:, 1].tolist()) == {float(each)}


@pytest.mark.slow_beyond(2)
@pytest.mark.sampled(8)
@kinds
@shards
@pytest.mark.parametrize("shares", [(5, 3), (4, 1, 3)], ids=str)
@pytest.mark.parametrize("micro", [8, 2])
def test_ranks_divide_the_updates_of_one_process(
    kind: str, num_shards: int, together: int, shares: tuple[int, ...], micro: int
) -> None:
    source = source_of(KINDS[kind], num_shards)
    alone = rows(read(source, 20, order=order_of(source, together=together)))
    ranks = [order_of(source, micro, together, shares=shares, rank=rank) for rank in range(len(shares))]
    parts = [rows(read(source, 20, order=order)) for order in ranks]
    assert all(torch.equal(torch.cat(of_ranks), whole) for whole, *of_ranks in zip(alone, *parts, strict=True))


@pytest.mark.slow_beyond(2)
@pytest.mark.sampled(6)
@kinds
@pytest.mark.parametrize(("num_shards", "together"), [(1, 1), (3, 3), (4, 2)])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("micro", [8, 3])
def test_workers_read_the_same_samples(kind: str, num_shards: int, together: int, workers: int, micro: int) -> None:
    source = source_of(KINDS[kind], num_shards)
    order = order_of(source, micro, together)
    mine, theirs = (rows(read(source, 14, order=order, workers=number)) for number in (workers, 0))
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.slow_beyond(2)
@pytest.mark.sampled(10)
@kinds
@shards
@pytest.mark.parametrize("start", [1, 2, 5, 9, 12])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_stream_continues(kind: str, num_shards: int, together: int, start: int, workers: int) -> None:
    """The number of ranks may change: one process uses the marks of two ranks, and vice versa."""
    source = source_of(KINDS[kind], num_shards)
    whole = read(source, 18, order=order_of(source, together=together))
    ranks = [order_of(source, 2, together, shares=(5, 3), rank=rank) for rank in range(2)]
    before = [marks_after(read(source, start, order=order)) for order in ranks]
    merged = {shard: max(there.get(shard, mark) for there in before) for each in before for shard, mark in each.items()}
    order = order_of(source, together=together)
    result = rows(read(source, 18 - start, start=start, marks=merged, order=order, workers=workers))
    assert all(torch.equal(one, other) for one, other in zip(result, rows(whole)[start:], strict=True))
    marks = marks_after(whole[:start])
    parts = [rows(read(source, 18 - start, start=start, marks=marks, order=order)) for order in ranks]
    for number, whole_update in enumerate(rows(whole)[start:]):
        assert torch.equal(torch.cat([part[number] for part in parts]), whole_update)


def test_a_saved_state_avoids_rereading_earlier_samples() -> None:
    skipped: list[int] = []

    class Counting(Stateful):
        def __iter__(self) -> Any:
            skipped.append(self.position)
            return super().__iter__()

    source = source_of(Counting, 1)
    marks = marks_after(read(source, 5))
    skipped.clear()
    read(source, 1, start=5, marks=marks)
    assert skipped[-1] == 5 * BATCH - 1  # the last sample before the stop is read again and compared


def test_rewinding_reads_the_same_samples_again() -> None:
    fetcher, order = fetcher_of(source_of(Stateful, 2)), order_of(source_of(Stateful, 2))
    keys = [next(order.micro_batches(update)) for update in range(4)]
    first = [fetcher[key].batch for key in keys]
    again = [fetcher[key].batch for key in (keys[2], keys[0], keys[3])]
    assert all(torch.equal(one, first[number]) for one, number in zip(again, (2, 0, 3), strict=True))


def test_dummy_micro_batches_repeat_read_samples() -> None:
    source = source_of(Files, 1)
    fetcher = fetcher_of(source)
    fetcher.is_lockstep = True
    order = order_of(source, 2, shares=(7, 1), rank=1, is_lockstep=True)
    micros = list(islice((fetcher[key] for key in order.from_update(0)), 12))
    assert [micro.is_counted for micro in micros] == [True, False, False, False] * 3
    assert all(torch.equal(micros[first].batch, micros[first + 1].batch) for first in (0, 4, 8))


def test_reading_a_stream_does_not_advance_the_global_generators() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    read(source_of(KINDS["shuffled"], 2), 5)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_self_dividing_datasets_are_read_as_shards(num_shards: int, workers: int) -> None:
    source = StreamSource("train", num_shards, ByWorker())
    result = torch.cat(rows(read(source, 8, workers=workers)))
    assert len(set(result[:64, 0].tolist())) == 64


def test_a_limit_uses_the_first_samples_of_each_epoch() -> None:
    source = source_of(Files, 1, limit=20)
    order = order_of(source)
    assert order.updates_per_epoch == 3
    assert sorted(torch.cat(rows(read(source, 3)))[:, 0].tolist()) == NUMBERS[:20]
    assert sorted(torch.cat(rows(read(source, 6)))[20:, 0].tolist()) == NUMBERS[:20]


def test_evaluation_samples_are_read_once() -> None:
    source = source_of(Files, 1)
    assert [int(sample[0]) for sample in read_all_samples(source, None, SEED)] == NUMBERS
    assert len(read_all_samples(source, 7, SEED)) == 7


class Indexed(ByWorker):
    """Like StreamingDataset of MosaicML."""

    def __len__(self) -> int:
        return len(NUMBERS)

    def __getitem__(self, index: int) -> int:
        return NUMBERS[index]


def test_an_iterable_without_getitem_is_a_stream() -> None:
    assert not is_stream(Indexed())
    assert all(map(is_stream, (ByWorker(), Files(FILES))))
    assert not any(map(is_stream, ([1], torch.zeros(2), torch.utils.data.TensorDataset(torch.zeros(2)), 3)))


# ---------------------------------------------------------------- invalid streams


class Short(Files):
    def __len__(self) -> int:
        return 2 + sum(map(len, self.files))


class Long(Files):
    def __len__(self) -> int:
        return sum(map(len, self.files)) - 2


class Raising(Files):
    def __iter__(self) -> Any:
        yield from islice(super().__iter__(), 11)
        raise ValueError("cut off")


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "num_shards", "what"),
    [
        (Short, 1, "ended after 71 samples, but its length is 73"),
        (Long, 2, "has more samples than its length"),
        (Raising, 1, "sample 11 of the train stream cannot be read: ValueError: cut off"),
        (Files, 7, "shard 5 of the train stream has no samples"),
    ],
)
def test_violations_of_the_contract_are_reported(kind: Any, num_shards: int, what: str, workers: int) -> None:
    with pytest.raises(DataError, match=what):
        read(source_of(kind, num_shards), 12, workers=workers)


@pytest.mark.parametrize(("limit", "lengths"), [(0, (0, 0, 0)), (1, (1, 0, 0)), (2, (1, 1, 0)), (4, (2, 1, 1))])
def test_a_limit_is_divided_among_the_shards(limit: int, lengths: tuple[int, ...]) -> None:
    assert source_of(Files, 3, limit=limit).lengths() == lengths


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5), limit=st.integers(0, 70))
def test_a_limit_takes_more_samples_from_longer_shards(lengths: list[int], limit: int) -> None:
    source = StreamSource("train", len(lengths), make=lambda _, shard, __: [0] * lengths[shard], limit=limit)
    limited = source.lengths()
    assert limited is not None
    assert sum(limited) == min(limit, sum(lengths))
    incomplete = [limited[shard] for shard, length in enumerate(lengths) if limited[shard] < length]
    assert max(limited) <= min(incomplete, default=limit) + 1
    assert incomplete == sorted(incomplete, reverse=True)


def test_shards_too_short_for_a_limit_are_reported() -> None:
    with pytest.raises(DataError) as raised:
        read(source_of(Files, 3, limit=71), 12)
    assert "data.train_samples=71" in str(raised.value)


class RaisingLater(Files):
    """Fails in its second pass."""

    def __iter__(self) -> Any:
        yield from islice(super().__iter__(), 3 if self.epoch else None)
        if self.epoch:
            raise ValueError("cut off")


def test_unreadable_samples_are_reported_by_position() -> None:
    with pytest.raises(DataError, match=r"sample 3 of the train stream"):
        read(source_of(RaisingLater, 1), 12)


class EmptyLater(Files):
    """Has no samples after its first pass."""

    def __iter__(self) -> Any:
        return iter(()) if self.epoch else super().__iter__()


def test_a_pass_without_samples_is_rejected() -> None:
    with pytest.raises(DataError, match="no samples"):
        read(source_of(EmptyLater, 1), 12)


def verdict_of(source: StreamSource) -> StreamCheck:
    fetcher = fetcher_of(source)
    return check_stream(fetcher, Loader(fetcher))


class Few(WithLength):
    """Has fewer samples than the check reads before training."""

    def __iter__(self) -> Any:
        return islice(super().__iter__(), 10)


class Sixteen(Files):
    """Has more samples than its length."""

    def __len__(self) -> int:
        return 16


@pytest.mark.parametrize(("kind", "what"), [(Few, "ended after 10 samples"), (Sixteen, "has more samples")])
def test_a_wrong_length_is_rejected_before_training(kind: Any, what: str) -> None:
    with pytest.raises(DataError, match=what):
        verdict_of(source_of(kind, 1))


class OfLength(Files):
    length: Any

    def __len__(self) -> int:
        return self.length()  # type: ignore[no-any-return]


def unknown() -> int:
    raise TypeError("this stream has no length")


@pytest.mark.parametrize("length", [lambda: 71.0, lambda: None, lambda: -1, lambda: 1 << 70])
@pytest.mark.parametrize("is_divided", [True, False])
def test_invalid_lengths_are_rejected(length: Any, is_divided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid length must not count as unknown, because the stream would then be read again from the beginning."""
    monkeypatch.setattr(OfLength, "length", staticmethod(length), raising=False)
    source = source_of(OfLength, 2) if is_divided else StreamSource("train", 2, OfLength(FILES))
    with pytest.raises(DataError, match="length"):
        source.lengths()


def test_a_stream_may_declare_an_unknown_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OfLength, "length", staticmethod(unknown), raising=False)
    assert source_of(OfLength, 2).lengths() is None


@kinds
@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_stream_is_checked_before_training(kind: str, num_shards: int) -> None:
    verdict = verdict_of(source_of(KINDS[kind], num_shards))
    assert verdict.has_state == ("state" in kind)
    assert bool(verdict.restore_error) == (kind == "lying_state")
    raise_if_invalid(verdict, num_shards)


@pytest.mark.parametrize("dataset", [Undivided(), Unseeded()], ids=["undivided", "unseeded"])
def test_streams_that_repeat_or_miss_samples_are_rejected(dataset: Any) -> None:
    source = StreamSource("train", 2, dataset)
    with pytest.raises(DataError):
        raise_if_invalid(verdict_of(source), 2)
    if isinstance(dataset, Undivided):
        raise_if_invalid(verdict_of(StreamSource("train", 1, dataset)), 1)


def test_a_state_that_cannot_be_stored_is_reported() -> None:
    class Foreign(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position, "file": object()}

    assert "object" in verdict_of(source_of(Foreign, 1)).restore_error
    assert marks_after(read(source_of(Foreign, 1), 2))[0].state is None


def test_a_lost_state_does_not_change_the_samples() -> None:
    source = source_of(Liar, 1)
    updates = read(source, 4)
    resumed = read(source, 1, start=3, marks=marks_after(updates[:3]))
    assert torch.equal(rows(resumed)[0], rows(updates)[3])
    assert "load_state_dict" in resumed[0][0].marks[0].note


@pytest.mark.parametrize("kind", [WithLength, Stateful])
def test_different_samples_after_a_resume_are_rejected(kind: type[Files]) -> None:
    marks = marks_after(read(source_of(kind, 1), 3))
    changed = StreamSource("train", 1, make=lambda *_: kind([[number + 1 for number in NUMBERS]]))
    with pytest.raises(DataError, match="differs from the one read before"):
        read(changed, 1, start=3, marks=marks)


STATES: list[Any] = [
    {"a": [1, 2.5, None, True, "x"], "b": (1, (2,)), "c": {3, 4}, "d": frozenset("ab"), 5: "key"},
    {"bytes": b"\x00\xff", "inf": float("inf"), "~type": "mine", "nested": {("a", 1): [{}]}},
    {"array": np.arange(6, dtype=np.int16).reshape(2, 3), "scalar": np.float32(1.5), "bool": np.bool_(True)},
    {"tensor": torch.arange(4).view(2, 2), "half": torch.ones(3, dtype=torch.bfloat16), "empty": torch.empty(0)},
    {"generator": torch.Generator().manual_seed(1).get_state()},
]


@pytest.mark.parametrize("state", STATES, ids=range(len(STATES)))
def test_a_state_survives_serialization_to_json(state: Any) -> None:
    def same(one: Any, other: Any) -> bool:
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        if isinstance(one, (list, tuple)):
            return type(one) is type(other) and all(map(same, one, other))
        if isinstance(one, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        if isinstance(one, (np.ndarray, np.generic)):
            return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
        return type(one) is type(other) and bool(one == other)

    assert same(decode_state(json.loads(json.dumps(encode_state(state)))), state)


class _Divided(torch.utils.data.Dataset[int]):
    """A dataset whose length is the share of a rank, as in mosaicml-streaming."""

    epoch_size = 72

    def __len__(self) -> int:
        return 36

    def __getitem__(self, index: int) -> int:
        return index


_Divided.__module__, _Divided.__name__ = "streaming.base.dataset", "StreamingDataset"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda dataset: torch.utils.data.Subset(dataset, range(len(dataset))),
        lambda dataset: torch.utils.data.ConcatDataset([dataset, dataset]),
        lambda dataset: torch.utils.data.Subset(torch.utils.data.ConcatDataset([dataset]), range(3)),
    ],
    ids=["subset", "concatenated", "both"],
)
def test_datasets_limited_to_one_rank_are_completed_or_rejected(wrap: Callable[[Any], Any]) -> None:
    assert len(undivided(_Divided())) == 72
    with pytest.raises(TaskFault):
        undivided(wrap(_Divided()))
    plain = [1, 2, 3]
    assert undivided(plain) is plain
