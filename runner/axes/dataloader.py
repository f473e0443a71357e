"""Data loader options, and the cache of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from runner.base.batch import MicroBatch, are_equal, map_tensors
from runner.base.errors import ConfigError, DataError, Problem
from runner.base.order import MicroBatchKey
from runner.base.sample_rng import NoSeeding
from runner.base.values import Count, NonNegative, PositiveInt
from runner.loading.auto_loader import AutoLoader
from runner.loading.cached_dataset import CachedDataset, ComposedDataset, FixedPart, concatenate_batches
from runner.loading.dataset_access import has_fixed_part
from runner.loading.fetcher import Fetcher
from runner.loading.loaders import Loader, PinnedLoader, ThreadLoader, WorkerLoader, identity


def default(
    fetcher: Fetcher,
    device: torch.device,
    *,
    num_workers: Count | Literal["auto"] = "auto",
    workers_above_ms: NonNegative | Literal["auto"] = "auto",
    pin_memory: bool | Literal["auto"] = "auto",
    prefetch_factor: PositiveInt = 2,
    start_method: Literal["fork", "spawn"] = "fork",
    drop_last: bool = False,
    cache: Literal["none", "memory", "device"] = "none",
    bad_samples: Literal["stop", "skip"] = "stop",
) -> Loader:
    """Load in worker processes, or in this process if there are none.

    num_workers       worker processes; 0 reads in this process; auto: chosen by device and number of cores
    workers_above_ms  start workers only if reading a batch takes more than this many ms, as measured at the start;
                      0: always start them; auto: 1 with num_workers=auto, else 0
    pin_memory        copy batches to page-locked memory, from which copies to a GPU can overlap with computation; auto:
                      if there is a GPU
    prefetch_factor   batches each worker reads ahead
    start_method      how workers start; fork: fast, shares the dataset's memory; spawn: slow, imports all modules again
                      and copies the dataset; for libraries that do not support fork
    drop_last         drop the last, smaller update of each epoch (training only)
    cache             memory: read every sample once and keep it in host memory; device: keep it in device memory
    bad_samples       stop: end the run at a sample that cannot be read; skip: skip and list the sample
    """
    assert num_workers != "auto", "the plan resolves it"
    assert pin_memory != "auto", "the plan resolves it"
    fetcher = cache_samples(fetcher, cache, device)
    inline = PinnedLoader(fetcher) if pin_memory and cache != "device" else Loader(fetcher)
    if num_workers == 0:
        return inline
    workers = WorkerLoader(
        fetcher,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
        start_method=start_method,
    )
    if workers_above_ms in (0, "auto") or fetcher.is_sequential:  # the plan resolves auto if it chose num_workers
        return workers
    return AutoLoader(workers, inline, limit_s=float(workers_above_ms) / 1e3)


def thread(
    fetcher: Fetcher,
    device: torch.device,
    *,
    depth: PositiveInt = 2,
    pin_memory: bool | Literal["auto"] = "auto",
    drop_last: bool = False,
    cache: Literal["none", "memory", "device"] = "none",
    bad_samples: Literal["stop", "skip"] = "stop",
) -> Loader:
    """Prefetch samples in one thread if they are cached; otherwise, or with load_fixed, in one worker process.

    depth        batches read ahead
    pin_memory   copy batches to page-locked memory; auto: if there is a GPU
    drop_last    drop the last, smaller update of each epoch (training only)
    cache        memory: read every sample once and keep it in host memory; device: keep it in device memory
    bad_samples  stop: end the run at a sample that cannot be read; skip: skip and list the sample
    """
    assert pin_memory != "auto", "the plan resolves it"
    cached = cache_samples(fetcher, cache, device)
    if cache == "none" or has_fixed_part(fetcher.dataset):
        # The threads of a process share its random generators: a dataset read in a thread would draw from them while
        # the model does, and neither would be reproducible. See docs/decisions/0019.
        return WorkerLoader(cached, num_workers=1, pin_memory=pin_memory, prefetch_factor=depth, start_method="fork")
    return ThreadLoader(cached, depth=depth, pin_memory=pin_memory and cache != "device")


def cache_samples(fetcher: Fetcher, where: str, device: torch.device) -> Fetcher:
    """Read all samples once and return a fetcher that keeps them as one tensor per field.

    For a dataset with `load_fixed`, only the parts that `load_fixed` returns are kept.
    """
    if where == "none":
        return fetcher
    if has_fixed_part(fetcher.dataset):
        return _cache_fixed_part(fetcher, where)
    if fetcher.set_epoch is not None:
        raise _changing_samples("the dataset has set_epoch", where)
    parts = _read_twice(fetcher, len(fetcher), where)
    if any(part.bad for part in parts):
        bad = [index for part in parts for index, _ in part.bad]
        fix = "use dataloader.cache=none, or remove the bad samples from the dataset"
        raise DataError(f"bad samples cannot be cached: {bad}", where=f"dataloader.cache={where}", fix=fix)
    samples = _rows([part.batch for part in parts], len(fetcher), where)
    kept = CachedDataset(
        map_tensors(lambda tensor: tensor.to(device), samples) if where == "device" else samples, len(fetcher)
    )
    cached = Fetcher(kept, identity, bad_samples="stop")
    cached.source = fetcher.dataset
    cached.streams = NoSeeding()
    cached.is_cached = True
    return cached


def _cache_fixed_part(fetcher: Fetcher, where: str) -> Fetcher:
    """Return a fetcher that composes batches from cached rows.

    The rows of all samples are cached, even beyond `num_samples`, because `compose` may read any of them.
    """
    if where == "device":
        raise ConfigError(
            Problem(
                "is not supported for a dataset with load_fixed, which composes its batches in host memory",
                f"dataloader.cache={where}",
                "use dataloader.cache=memory",
            )
        )
    dataset: Any = fetcher.dataset
    loader = Fetcher(FixedPart(dataset), identity, bad_samples="stop")
    parts = _read_twice(loader, len(dataset), where)
    kept = CachedDataset(_rows([part.batch for part in parts], len(dataset), where), len(dataset))
    cached = Fetcher(
        ComposedDataset(dataset, kept),
        fetcher.collate,
        bad_samples="stop",  # all fixed parts have been read
        num_samples=fetcher.num_samples,
        model=fetcher.model,
        split=fetcher.streams.split,
    )
    cached.is_cached = True
    return cached


def _read_twice(fetcher: Fetcher, num_samples: int, where: str) -> list[MicroBatch]:
    """Return all samples in batches of 1024. Raises DataError if random numbers change them between epochs."""
    keys = [
        MicroBatchKey(0, list(range(first, min(first + 1024, num_samples))), last=False)
        for first in range(0, num_samples, 1024)
    ]
    parts = [fetcher[key] for key in keys]
    if fetcher.streams.has_drawn:
        # A dataset may seed the generators itself and draw the same numbers each time: compare two epochs.
        for key, part in zip(keys, parts, strict=True):
            if not are_equal(part.batch, fetcher[key._replace(epoch=1)].batch):
                raise _changing_samples("they use random numbers", where)
    return parts


def _rows(batches: list[Any], num_samples: int, where: str) -> Any:
    """Concatenate batches with a row per sample."""
    place, fix = f"dataloader.cache={where}", "use dataloader.cache=none"
    try:
        samples = concatenate_batches(batches)
    except (RuntimeError, TypeError) as error:
        raise DataError(f"cached samples must have the same shape: {error}", where=place, fix=fix) from error
    lengths: list[int] = []  # number of rows of each tensor
    map_tensors(lambda tensor: lengths.append(len(tensor) if tensor.dim() else 0), samples)
    if not lengths:
        raise DataError("only tensors can be cached, but a batch contains none", where=place, fix=fix)
    if (rows := next((length for length in lengths if length != num_samples), None)) is not None:
        what = f"a batch must have one row per sample, but a tensor has {rows} rows for {num_samples} samples"
        raise DataError(what, where=place, fix=f"{fix}, or define load_fixed and compose the samples in the dataset")
    return samples


def _changing_samples(why: str, where: str) -> DataError:
    return DataError(
        f"the samples change from epoch to epoch ({why}), so they cannot be cached",
        where=f"dataloader.cache={where}",
        fix="use dataloader.cache=none",
    )


DATALOADERS: Mapping[str, Callable[..., Loader]] = {"default": default, "thread": thread}
