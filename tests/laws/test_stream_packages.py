"""Streams of three packages read each sample once, on ranks, in workers and after a resume."""

from __future__ import annotations

import gc
import io
import json
import os
import tarfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from runner.base.batch import MicroBatch
from runner.base.order import MicroBatchKey, Order
from runner.engine.hooks.stream_position import raise_if_invalid
from runner.engine.sources.stream_source import OpenShard, StreamSource, is_stream
from runner.loading.fetcher import Fetcher
from runner.loading.loaders import WorkerLoader
from runner.loading.stream_order import StreamSampler
from tests.laws.test_streams import BATCH, SEED, marks_after, read, verdict_of

SIZES = (17, 23, 5, 16, 10)
NUMBERS = list(range(sum(SIZES)))


@pytest.fixture(autouse=True)
def _files_left_open() -> Iterator[None]:
    """Close open files: webdataset leaves this to the garbage collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        gc.collect()


def files_of(folder: Path, write: Callable[[Path, list[int]], None], suffix: str) -> list[str]:
    first, result = 0, []
    for number, size in enumerate(SIZES):
        path = folder / f"part-{number}{suffix}"
        write(path, NUMBERS[first : first + size])
        first += size
        result.append(str(path))
    return result


def lines(path: Path, numbers: list[int]) -> None:
    path.write_text("".join(json.dumps({"number": number}) + "\n" for number in numbers))


def tar(path: Path, numbers: list[int]) -> None:
    with tarfile.open(path, "w") as archive:
        for number in numbers:
            content = str(number).encode()
            info = tarfile.TarInfo(f"{number:05}.cls")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def hugging_face(folder: Path, *, shuffle: bool) -> Any:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    files = files_of(folder, lines, ".jsonl")
    result = datasets.load_dataset(
        "json", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache")
    ).with_format("torch")
    return result.shuffle(seed=1, buffer_size=6) if shuffle else result


def web_dataset(folder: Path, *, shuffle: bool) -> Any:
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    result = webdataset.WebDataset(files_of(folder, tar, ".tar"), shardshuffle=False).decode()
    result = result.shuffle(6, seed=1) if shuffle else result
    return result.map(lambda sample: {"number": torch.tensor(sample["cls"])})


def nodes(folder: Path, *, shuffle: bool) -> Any:
    package = pytest.importorskip("torchdata.nodes", reason="torchdata is not installed")
    if shuffle:
        pytest.skip("a torchdata sampler is not a stream")
    source = package.Mapper(package.IterableWrapper(NUMBERS), lambda number: {"number": torch.tensor(number)})
    return package.Loader(source)


PACKAGES = {"datasets": hugging_face, "webdataset": web_dataset, "torchdata": nodes}
cases = [(name, num, shuffle) for name in PACKAGES for num in (1, 5, 2) for shuffle in (False, True)]


def numbers_of(updates: list[list[MicroBatch]]) -> list[list[int]]:
    return [[int(n) for micro in update if micro.is_counted for n in micro.batch["number"]] for update in updates]


@pytest.mark.parametrize(
    ("name", "num_shards", "shuffle"),
    [case for case in cases if case[0] != "torchdata" or case[1:] == (1, False)],
)
def test_streams_are_read_once_per_epoch(name: str, num_shards: int, shuffle: bool, tmp_path: Path) -> None:
    dataset = PACKAGES[name](tmp_path, shuffle=shuffle)
    assert is_stream(dataset)
    source = StreamSource("train", num_shards, dataset, limit=len(NUMBERS) if num_shards == 1 else None)
    verdict = verdict_of(source)
    raise_if_invalid(verdict, num_shards)
    order = Order(0, BATCH, 4, SEED, sampler=StreamSampler(source.lengths(), num_shards, num_shards, BATCH))
    whole = read(source, 12, order=order)
    expected = numbers_of(whole)
    if num_shards == 1:
        epoch = [number for update in expected[: order.updates_per_epoch] for number in update]
        assert sorted(epoch) == NUMBERS
        assert (epoch == NUMBERS) is not shuffle
    for start in (3, 10):
        marks = marks_after(whole[:start])
        assert numbers_of(read(source, 12 - start, start=start, marks=marks, order=order)) == expected[start:]
    ranks = [Order(0, BATCH, 4, SEED, sampler=order.sampler, shares=(5, 3), rank=rank) for rank in range(2)]
    parts = [numbers_of(read(source, 12, order=each, workers=rank)) for rank, each in enumerate(ranks)]
    assert [one + other for one, other in zip(*parts, strict=True)] == expected


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "num_shards"), [*((name, num) for name in PACKAGES for num in (1, 2, 5))][:7])
@pytest.mark.parametrize("shares", [(8,), (5, 3), (3, 1, 4)], ids=str)
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_ranks_and_workers_divide_the_updates(
    name: str, num_shards: int, shares: tuple[int, ...], workers: int, tmp_path: Path
) -> None:
    """There are five files, so two shards have different numbers of files and samples."""
    dataset = PACKAGES[name](tmp_path, shuffle=False)
    source = StreamSource("train", num_shards, dataset)
    sampler = StreamSampler(source.lengths(), num_shards, num_shards, BATCH)
    whole = numbers_of(read(source, 12, order=Order(0, BATCH, BATCH, SEED, sampler=sampler)))
    num_ranks = len(shares)
    ranks = [
        Order(0, BATCH, 2, SEED, sampler=sampler, shares=shares if num_ranks > 1 else (), rank=rank)
        for rank in range(num_ranks)
    ]
    parts = [numbers_of(read(source, 12, order=each, workers=workers)) for each in ranks]
    assert [[number for part in update for number in part] for update in zip(*parts, strict=True)] == whole


@pytest.mark.parametrize("name", PACKAGES)
def test_only_exact_states_are_used(name: str, tmp_path: Path) -> None:
    """States of `datasets` do not include the buffer of `shuffle`, so they cannot restore the position."""
    plain = verdict_of(StreamSource("train", 1, PACKAGES[name](tmp_path, shuffle=False)))
    assert (plain.has_state, plain.restore_error) == (name != "webdataset", "")
    if name == "datasets":
        assert verdict_of(StreamSource("train", 1, PACKAGES[name](tmp_path, shuffle=True))).restore_error


def test_the_shards_of_a_hugging_face_dataset_are_counted(tmp_path: Path) -> None:
    assert hugging_face(tmp_path, shuffle=False).num_shards == len(SIZES)


def test_packages_do_not_divide_streams_by_rank_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    opened = OpenShard(StreamSource("train", 1, web_dataset(tmp_path, shuffle=False)), 0, 0)
    assert [int(sample["number"]) for sample in iter(lambda: next(opened, None), None)] == NUMBERS
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")


def test_a_mosaicml_streaming_dataset_is_read_by_index(tmp_path: Path) -> None:
    """Iterating over it would divide the samples among processes that wait for each other."""
    streaming = pytest.importorskip("streaming", reason="mosaicml-streaming is not installed", exc_type=ImportError)
    with streaming.MDSWriter(out=str(tmp_path), columns={"number": "int"}, size_limit=200) as writer:
        for number in NUMBERS:
            writer.write({"number": number})
    dataset = streaming.StreamingDataset(local=str(tmp_path), batch_size=1)
    assert not is_stream(dataset)
    fetcher = Fetcher(dataset, default_collate, bad_samples="stop")
    loader = WorkerLoader(fetcher, num_workers=2, pin_memory=False, prefetch_factor=2, start_method="fork")
    keys = [MicroBatchKey(0, NUMBERS[first : first + 2], last=True) for first in NUMBERS[::-2]]
    found = [micro.batch["number"].tolist() for micro in loader.batches(keys)]
    loader.close()
    assert found == [key.indices for key in keys]
