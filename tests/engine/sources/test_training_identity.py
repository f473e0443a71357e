"""Samples are hashed in the process in which training reads them, and the hash depends only on their content."""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runner.axes.dataloader import cache_samples
from runner.engine.sources.training_identity import (
    changed_files,
    changed_samples,
    fingerprint_code,
    fingerprint_data,
)
from runner.loading.fetcher import Fetcher
from runner.loading.loaders import Loader, WorkerLoader


class Opening:
    """Opens its file at the first sample, like datasets that must not share the file between workers."""

    def __init__(self, path: Path) -> None:
        self.path, self.opened = path, -1

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.opened < 0:
            self.opened = os.open(self.path, os.O_RDONLY)
        return torch.tensor(list(os.pread(self.opened, 1, index)))


class Failing:
    def __init__(self, how: Any) -> None:
        self.how = how

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return int(self.how(index))


@dataclass
class Pair:
    left: torch.Tensor
    right: str


def fetcher_of(dataset: Any, split: str = "train") -> Fetcher:
    return Fetcher(dataset, torch.utils.data.default_collate, bad_samples="stop", split=split)


def workers(fetcher: Fetcher, start_method: str) -> WorkerLoader:
    return WorkerLoader(fetcher, num_workers=2, pin_memory=False, prefetch_factor=2, start_method=start_method)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_hashing_leaves_no_open_file_for_workers_to_share(tmp_path: Path, start_method: str) -> None:
    (tmp_path / "data").write_bytes(bytes(range(9)))
    opening = Opening(tmp_path / "data")
    fetchers = {"train": fetcher_of(opening), "val": fetcher_of([1, 2, 3], "val")}
    result, _ = fingerprint_data(fetchers, workers(fetchers["train"], start_method))
    assert opening.opened < 0
    here, _ = fingerprint_data(fetchers, Loader(fetchers["train"]))
    os.close(opening.opened)
    assert result == here, "the hash does not depend on the reading process"
    assert {split: sorted(each["hashes"]) for split, each in result.items()} == {
        "train": ["0", "4", "8"],
        "val": ["0", "1", "2"],
    }


@pytest.mark.parametrize("where", ["memory", "device"])
def test_cached_samples_have_the_hashes_of_their_dataset(where: str) -> None:
    fetcher = fetcher_of([(torch.tensor([index, 0.5]), index) for index in range(5)])
    loader = Loader(fetcher)
    before, _ = fingerprint_data({"train": fetcher}, loader)
    cached = {"train": cache_samples(fetcher, where, torch.device("cpu"))}
    assert fingerprint_data(cached, Loader(cached["train"]))[0] == before
    other = fetcher_of([(torch.tensor([index, 1.5]), index) for index in range(5)])
    changed = {"train": cache_samples(other, where, torch.device("cpu"))}
    after, _ = fingerprint_data(changed, Loader(changed["train"]))
    assert len(changed_samples(before, after, changed, Loader(changed["train"]))) == 3


class Drawing:
    """Adds a random number to each sample."""

    def __init__(self, draw: Callable[[int], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> float:
        return index + self.draw(index)


KEPT = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("draw", "varies"),
    [
        (lambda index: 0.0, False),
        (lambda index: float(torch.rand(())) + np.random.random() + random.random(), False),
        (lambda index: np.random.default_rng(index).random(), False),
        (lambda index: np.random.default_rng().random(), True),
        (lambda index: KEPT.random(), True),
    ],
    ids=["none", "global", "seeded", "unseeded", "kept"],
)
def test_samples_that_draw_from_their_own_generator_are_detected(draw: Callable[[int], float], varies: bool) -> None:
    fetchers = {"train": fetcher_of(Drawing(draw)), "val": fetcher_of([1, 2, 3], "val")}
    data, varying = fingerprint_data(fetchers, Loader(fetchers["train"]))
    assert varying == (["train"] if varies else [])
    assert len(data["train"]["hashes"]) == 3


@pytest.mark.parametrize("has_workers", [False, True])
def test_unreadable_samples_have_no_hash(has_workers: bool) -> None:
    fetcher = fetcher_of(Failing(lambda index: 1 // (index - 2)))
    loader = workers(fetcher, "fork") if has_workers else Loader(fetcher)
    assert sorted(fingerprint_data({"train": fetcher}, loader)[0]["train"]["hashes"]) == ["0", "4"]


def test_a_worker_death_during_hashing_does_not_end_the_run() -> None:
    fetcher = fetcher_of(Failing(lambda index: os._exit(3)))
    data, varying = fingerprint_data({"train": fetcher}, workers(fetcher, "fork"))
    assert (data, varying) == ({"train": {"samples": 5, "hashes": {}}}, [])


@pytest.mark.parametrize(
    ("sample", "other"),
    [
        (torch.tensor([1.0, torch.nan]), torch.tensor([torch.nan, 1.0])),
        (torch.tensor(2.0), torch.tensor(3.0)),
        (torch.tensor([2.0], dtype=torch.bfloat16), torch.tensor([3.0], dtype=torch.bfloat16)),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j])),
        (torch.arange(6).view(2, 3).T, torch.arange(6).view(3, 2)),
        (torch.tensor([True]), torch.tensor([False])),
        (np.zeros(2, np.float32), np.zeros(2, np.int32)),
        (np.array("2020-01-01", "datetime64[D]"), np.array("2020-01-02", "datetime64[D]")),
        ({"a": "x"}, {"a": "y"}),
        (("a", 1), ("a", 2)),
        (Pair(torch.ones(2), "x"), Pair(torch.ones(2), "y")),
        (SimpleNamespace(tobytes=lambda: b"1"), SimpleNamespace(tobytes=lambda: b"2")),
    ],
)
def test_changed_content_is_detected_and_equal_content_is_not(sample: Any, other: Any) -> None:
    fetchers, changed = {"train": fetcher_of([sample])}, {"train": fetcher_of([other])}
    loader = Loader(fetchers["train"])
    before, _ = fingerprint_data(fetchers, loader)
    assert before["train"]["hashes"]
    assert changed_samples(before, fingerprint_data(fetchers, loader)[0], fetchers, loader) == []
    assert changed_samples(before, fingerprint_data(changed, loader)[0], changed, loader) == ["train sample 0"]


def test_a_module_loaded_by_importlib_is_part_of_the_code_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_by_name.py").write_text("import importlib\nimportlib.import_module('part' + '_by_name')")
    (tmp_path / "part_by_name.py").write_text("import deep_by_name")
    (tmp_path / "deep_by_name.py").write_text("VALUE = 1")
    (tmp_path / "unused_by_name.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with monkeypatch.context() as patch:
        for name in ("mine_by_name", "part_by_name", "deep_by_name"):
            patch.setitem(sys.modules, name, sys)  # removed when the test ends
            del sys.modules[name]
        importlib.import_module("mine_by_name")
        _check_by_name(tmp_path)


def _check_by_name(folder: Path) -> None:
    before = fingerprint_code(folder / "mine_by_name.py")
    below = {name for name in before if not name.startswith("..")}  # this test is also a local module
    assert below == {"mine_by_name.py", "part_by_name.py", "deep_by_name.py"}
    (folder / "part_by_name.py").write_text("import deep_by_name  # edited")
    assert changed_files(before, fingerprint_code(folder / "mine_by_name.py")) == ["part_by_name.py"]


def test_modules_of_the_same_name_in_different_folders_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part_twice.py").write_text("")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / name)
            patch.delitem(sys.modules, "part_twice", raising=False)
            importlib.import_module("part_twice")
            assert f"{name}/part_twice.py" in fingerprint_code(tmp_path / "task.py")
            del sys.modules["part_twice"]
            assert f"{name}/part_twice.py" not in fingerprint_code(tmp_path / "task.py")
