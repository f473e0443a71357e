"""Record and compare the datasets and code of a run, which its settings do not identify.

`engine/checkpoints/resumption.py` finds the settings that differ on resume. But settings do not show that the file
behind `data.path` has other samples, or that the task's file was edited.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runner.base.batch import MicroBatch
from runner.base.errors import IncompatibleResume, Problem
from runner.base.order import MicroBatchKey
from runner.base.paths import PACKAGE, shipped_path
from runner.base.sample_rng import seeded_generators
from runner.base.text import abbreviate
from runner.loading.fetcher import Fetcher
from runner.loading.loaders import Loader

Hashes = dict[str, str]  # index of a sample, or path of a file -> hash


def fingerprint_data(fetchers: Mapping[str, Fetcher], loader: Loader) -> tuple[dict[str, Any], list[str]]:
    """Return each split's length and hashes of its samples at `Fetcher.probe_indices`, and the names of varying splits.

    The first sample of a varying split differs when it is read again: it depends on something other than its index and
    the global random generators, which are seeded equally. If a sample is slow to read, the others are skipped,
    because training waits for these reads.
    """
    probed = _hash_samples(fetchers, {split: fetcher.probe_indices for split, fetcher in fetchers.items()}, loader)
    data = {
        split: {"samples": len(fetcher), "hashes": probed[split].hashes if split in probed else {}}
        for split, fetcher in fetchers.items()
    }
    return data, [split for split, samples in probed.items() if samples.varies]


class _ProbedSamples(NamedTuple):
    """Hashes of samples, and the hash of a second read of the first sample; None if it was not read twice."""

    hashes: Hashes
    second: str | None

    @property
    def varies(self) -> bool:
        return self.second is not None and self.second != next(iter(self.hashes.values()))


def _hash_samples(
    fetchers: Mapping[str, Fetcher], indices: Mapping[str, Sequence[int]], loader: Loader
) -> Mapping[str, _ProbedSamples]:
    """Return the hashes of samples per split, or none if reading fails: training reports that error itself.

    If training uses workers, a worker reads the samples. If this process read them, a dataset that opens a file at its
    first sample would open it here: workers forked afterwards would share the file position, and an open file cannot
    be sent to spawned workers.
    """
    reader = loader.new_like(_HashingFetcher(fetchers, indices))
    try:
        probed: Mapping[str, _ProbedSamples] = next(iter(reader.batches([MicroBatchKey(0, [0], last=True)]))).batch
        return probed
    except Exception:
        return {}
    finally:
        with suppress(Exception):
            reader.close()


class _HashingFetcher(Fetcher):
    """Fetcher that returns the hashes of the samples at `indices` of each split, for any key."""

    def __init__(self, fetchers: Mapping[str, Fetcher], indices: Mapping[str, Sequence[int]]) -> None:
        first = next(iter(fetchers.values()))
        super().__init__(first.dataset, first.collate, bad_samples="stop", model=first.model)
        self.fetchers, self.indices = fetchers, indices

    def __getitem__(self, key: MicroBatchKey) -> MicroBatch:
        return MicroBatch({split: self._hash_split(split) for split in self.indices}, key.last)

    def _hash_split(self, split: str) -> _ProbedSamples:
        hashes: Hashes = {}
        second: str | None = None
        deadline = time.monotonic() + _MAX_READ_S
        for index in self.indices[split]:
            if (value := hash_sample(self.fetchers[split], index)) is not None:
                hashes[str(index)] = value
            if time.monotonic() > deadline:
                break
            if len(hashes) == 1 and second is None:
                second = hash_sample(self.fetchers[split], index)
        return _ProbedSamples(hashes, second)


def hash_sample(fetcher: Fetcher, index: int) -> str | None:
    """Return the hash of a sample, read with seeded global generators; None for one that cannot be read.

    Reads the dataset even if its samples are cached: a cache returns tensors in a list, even for samples that are
    tuples of numbers, so the hash would depend on `dataloader.cache`.
    """
    with seeded_generators(0, "content", index):
        try:
            if fetcher.set_epoch is not None:
                fetcher.set_epoch(0)
            return hash_content(fetcher.source[index])
        except BaseException:  # a task may raise anything, including SystemExit
            return None


def hash_content(sample: Any, memo: dict[int, tuple[Any, str]] | None = None) -> str:
    """Return the hash of the content of a sample.

    memo  id -> (object, hash) of the objects hashed so far, for objects that many others share
    """
    if memo is not None and id(sample) in memo:
        return memo[id(sample)][1]
    digest = hashlib.blake2b(digest_size=16)
    _hash_value(digest, sample, memo)
    if memo is not None:
        memo[id(sample)] = sample, digest.hexdigest()
    return digest.hexdigest()


def check_lengths(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise IncompatibleResume if the length of a dataset changed, because the sample order then differs."""
    problems = [
        Problem(
            f"the dataset of split {split} had {before[split]['samples']:,} samples, but now has {data['samples']:,}",
            f'dataset("{split}")',
            "use the data that the run was trained with, or start a new run with another run=NAME",
        )
        for split, data in now.items()
        if split in before and before[split]["samples"] != data["samples"]
    ]
    if problems:
        error = IncompatibleResume(str(problems[0]))
        error.problems = tuple(problems)
        raise error


def check_sampler(before: str, now: str) -> None:
    """Raise IncompatibleResume if the weights or lengths that a sampler uses changed."""
    if before != now:
        raise IncompatibleResume(
            "the sampler's weights or lengths differ from the checkpoint's",
            where="sample_weights, sample_lengths",
            fix="use the data that the run was trained with, or start a new run with another run=NAME",
        )


def changed_samples(
    before: Mapping[str, Any], now: Mapping[str, Any], fetchers: Mapping[str, Fetcher], loader: Loader
) -> list[str]:
    """Return a description such as "train sample 50" for each sample whose content changed.

    Samples that differ between two reads, for example because they use their own random generator, are ignored.
    """
    previous = {split: before.get(split, {}).get("hashes", {}) for split in now}
    differing = {
        split: [int(index) for index, value in data["hashes"].items() if previous[split].get(index, value) != value]
        for split, data in now.items()
    }
    reread = _hash_samples(fetchers, differing, loader) if any(differing.values()) else {}
    return [
        f"{split} sample {index}"
        for split, probed in reread.items()
        for index, value in probed.hashes.items()
        if now[split]["hashes"][index] == value
    ]


def changed_files(before: Hashes, now: Hashes) -> list[str]:
    """Return the files that were edited."""
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])


def fingerprint_code(source: Path) -> Hashes:
    """Return the hash of the task's file and of all local modules that are loaded, by path relative to its folder.

    Local modules are neither installed (site-packages) nor part of Python or accel-run.
    """
    folder = f"{source.parent}{os.sep}"
    local = sorted(_LOCAL_MODULES.files(), key=lambda file: (not file.startswith(folder), file))
    hashes: Hashes = {}
    for file in [str(source), *local][:_MAX_FILES]:
        with suppress(OSError):
            content = Path(file).read_bytes()
            hashes[os.path.relpath(file, source.parent)] = hashlib.blake2b(content, digest_size=16).hexdigest()
    return hashes


class _LocalModules:
    """The loaded modules that are local. Each call examines only modules that were imported since the previous call.

    Thousands of modules are loaded, and in a forked process, examining one copies its memory pages.
    """

    def __init__(self) -> None:
        self._last: tuple[str, Any] = ("", None)  # name and module of the last examined entry of sys.modules
        self._num = 0  # of examined entries
        self._files: frozenset[str] = frozenset()

    def files(self) -> frozenset[str]:
        """Return the files of local modules. sys.modules is in import order, so new modules are at its end."""
        added = len(sys.modules) - self._num
        new = list(itertools.islice(reversed(sys.modules.items()), max(added, 0) + 1))  # no other thread runs meanwhile
        if added < 0 or new.pop() != self._last:  # the first call, or modules were removed
            new, self._num, self._files = list(reversed(list(sys.modules.items()))), 0, frozenset()
        if new:
            self._last, self._num = new[0], self._num + len(new)
            self._files |= {file for file in (_file_of(module) for _, module in new) if _is_local(file)}
        return self._files


_LOCAL_MODULES = _LocalModules()


def _file_of(module: Any) -> str:
    """Return the file of a loaded module; "" if there is none.

    Reads `__dict__`, because `getattr` calls the `__getattr__` of some of torch's modules if the attribute is missing.
    """
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else ""


def _is_local(file: str) -> bool:
    if not file.endswith(".py"):
        return False
    if file.startswith(_SHIPPED_TASKS):
        return True
    return not file.startswith(_INSTALLED) and "/site-packages/" not in file and "/dist-packages/" not in file


def describe_changes(files: Sequence[str], samples: Sequence[str]) -> str:
    """Describe the changes in one line."""
    parts = [f"code: {abbreviate(files)}"] if files else []
    parts += [f"data: {abbreviate(samples)}"] if samples else []
    return "; ".join(parts)


def _hash_value(digest: Any, value: Any, memo: dict[int, tuple[Any, str]] | None) -> None:
    """Add a sample to a hash: by content for known types, otherwise by type."""
    digest.update(f"{type(value).__name__};".encode())
    if isinstance(value, Tensor):
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        _hash_bytes(digest, plain.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype}{value.shape}".encode())
        _hash_bytes(digest, np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    elif isinstance(value, _SCALARS):
        digest.update(repr(value).encode(errors="surrogateescape"))
    elif isinstance(value, (type, ModuleType, FunctionType, BuiltinFunctionType)):
        digest.update(f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}".encode())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _hash_item(digest, key, memo)
            _hash_item(digest, item, memo)
    elif isinstance(value, Set):
        digest.update("".join(sorted(hash_content(item, memo) for item in value)).encode())
    elif isinstance(value, (list, tuple, deque, np.ndarray)):
        digest.update(str(len(value)).encode())
        for item in value:
            _hash_item(digest, item, memo)
    elif hasattr(value, "tobytes"):  # a PIL image
        _hash_bytes(digest, np.frombuffer(value.tobytes(), np.uint8))
    elif hasattr(value, "__dict__"):  # a dataclass
        _hash_item(digest, vars(value), memo)


def _hash_item(digest: Any, item: Any, memo: dict[int, tuple[Any, str]] | None) -> None:
    if memo is None or isinstance(item, _SCALARS):
        _hash_value(digest, item, memo)
    else:
        digest.update(hash_content(item, memo).encode())


def _hash_bytes(digest: Any, content: np.ndarray[Any, Any]) -> None:
    """Add bytes to a hash; if they exceed several megabytes, add only evenly spaced blocks."""
    if len(content) <= _BLOCK * _NUM_BLOCKS:
        digest.update(content)
        return
    for start in np.linspace(0, len(content) - _BLOCK, _NUM_BLOCKS, dtype=np.int64):
        digest.update(content[start : start + _BLOCK])


_SCALARS = (bool, int, float, complex, str, bytes, np.generic, type(None))
_MAX_READ_S = 0.25  # time limit for reading samples before the first update
_MAX_FILES = 200  # a library developed next to the task, such as a checkout of torch, has thousands of files
_BLOCK, _NUM_BLOCKS = 1 << 16, 64
_PYTHON_FOLDERS = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_INSTALLED = tuple(f"{folder}{os.sep}" for folder in (PACKAGE, *_PYTHON_FOLDERS))
_SHIPPED_TASKS = f"{shipped_path('tasks')}{os.sep}"
