"""The projects in with_lightning and with_trainer train like the plain loops, so their lines of code are comparable.

`scripts/measure/projects.py` counts the lines.
"""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, RandomSampler

import runner
from runner.base.sample_rng import seeded_generators
from scripts.measure.projects import NOT_FOR_THE_TRAINER, table
from tests.projects import local_files, plain_loops
from tests.projects.test_projects import (
    HERE,
    OF_FLOAT32,
    PROJECTS,
    SEED,
    TOLERANCE,
    distance_of_weights,
    float64,
    module_of,
    order_of,
    read,
    run_plain_loop,
    task_of,
)

NOISY = ("dcgan", "unet_diffusion", "vae", "actor_critic")
DRAWN = ("resnet_augmented", "timm_resnet", "vit_mixup", "simclr", "webdataset_images")  # draws random samples
AVERAGED = ("unet_diffusion",)  # Lightning has replaced the weights by their average at the end
OTHERS = ("with_lightning", "with_trainer")
CASES = [
    pytest.param(folder, file.stem, id=f"{folder}-{file.stem}")
    for folder in OTHERS
    for file in sorted((HERE / folder).glob("*.py"))
]


def script_of(folder: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", HERE / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw_by_update(monkeypatch: pytest.MonkeyPatch, script: Any) -> None:
    """Make the noise of an update depend only on its number, both in the plain loop and in the other trainer."""
    updates, steps = itertools.count(), itertools.count()
    (kind,) = (kind for kind in vars(script).values() if isinstance(kind, type) and kind.__module__ == script.__name__)
    training_step = kind.training_step  # type: ignore[attr-defined]

    def noise(batch: Tensor) -> Any:
        torch.manual_seed(next(updates))
        return SimpleNamespace(
            uniform=lambda *shape: torch.rand(len(batch), *shape), normal=lambda *shape: torch.randn(len(batch), *shape)
        )

    def seeded(*args: Any) -> Any:
        torch.manual_seed(next(steps))
        return training_step(*args)

    monkeypatch.setattr(plain_loops, "per_sample_noise", noise)
    if hasattr(script, "LitActorCritic"):  # the plain loop calls a method of the task that draws numbers
        monkeypatch.setattr(runner, "per_sample_noise", noise)
    monkeypatch.setattr(kind, "training_step", seeded)


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return the weights under the names of the plain loop. peft copies modules that are trained in full."""
    return {
        key.replace("modules_to_save.default.", ""): tensor.detach()
        for key, tensor in model.state_dict().items()
        if "original_module" not in key
    }


class Seeded(Dataset):
    """Draw the random numbers of each sample as the runner does."""

    def __init__(self, samples: Any, split: str, order: Order) -> None:
        self.samples, self.split, self.order = samples, split, order

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        with seeded_generators(SEED, self.split, "sample", self.order.epoch, index):
            return self.samples[index]


class SeededStream(IterableDataset):
    """Draw the random numbers of each sample of a stream as the runner does."""

    def __init__(self, samples: Any, split: str) -> None:
        self.samples, self.split = samples, split

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.samples)
        for place in itertools.count():
            with seeded_generators(SEED, self.split, "sample", 0, place):
                sample = next(samples, None)
            if sample is None:
                return
            yield sample


class Order:
    """Make the sampler of a script yield samples in the runner's order."""

    def __init__(self) -> None:
        self.epoch, self._next = 0, itertools.count()

    def begin_epoch(self) -> int:
        self.epoch = next(self._next)
        return self.epoch

    def replace_in(self, script: Any, task: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the order of samplers that sort by length."""
        order, size = order_of(task.dataset("train"), settings), settings["global_batch_size"]
        if hasattr(script, "LengthGroupedSampler"):
            monkeypatch.setattr(script.LengthGroupedSampler, "__iter__", lambda _: iter(order(self.begin_epoch())))
        if hasattr(script, "Buckets"):

            def batches(_: Any) -> Iterator[list[int]]:
                indices = order(self.begin_epoch())
                return iter([indices[start : start + size] for start in range(0, len(indices), size)])

            monkeypatch.setattr(script.Buckets, "__iter__", batches)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Order:
    """Make `shuffle=True` yield samples in the runner's order."""
    order = Order()

    def indices(sampler: RandomSampler) -> Iterator[int]:
        return iter(order_of(sampler.data_source, {})(order.begin_epoch()).tolist())

    monkeypatch.setattr(RandomSampler, "__iter__", indices)
    accelerate = pytest.importorskip("accelerate.data_loader", reason="the package accelerate is not installed")
    monkeypatch.setattr(accelerate.SeedableRandomSampler, "__iter__", indices)
    return order


def seed_samples(task: Any, order: Order) -> None:
    """Seed the samples of a task with the random numbers of the runner."""
    dataset = task.dataset

    def seeded(split: str) -> Any:
        samples = dataset(split)
        return Seeded(samples, split, order) if hasattr(samples, "__len__") else SeededStream(samples, split)

    task.dataset = seeded


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("folder", "name"), CASES)
def test_a_project_for_another_trainer_matches_the_plain_loop(
    folder: str, name: str, order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning and the Trainer use one process and one batch per update, so the plain loop does, too."""
    needed = "lightning" if folder == "with_lightning" else "transformers"
    for package in (needed, *PROJECTS[name]):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    (tmp_path / "data").mkdir()
    prepare = getattr(local_files, name, None)
    if prepare is not None:
        prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the other trainers
        script = script_of(folder, name)
        if name in NOISY:
            draw_by_update(monkeypatch, script)
        undivided = {"data.shards": 1} if "data.shards" in module_of(name).SETTINGS else {}  # as one worker reads it
        wanted, metrics = run_plain_loop(name, tmp_path / "data", **undivided)
        tolerance = OF_FLOAT32.get(name, TOLERANCE)
        with float64():
            task = task_of(name, tmp_path / "data")
            if "sampler" in module_of(name).SETTINGS:
                order.replace_in(script, task, module_of(name).SETTINGS, monkeypatch)
            if name in DRAWN:
                seed_samples(task, order)
            script.fit(task, str(tmp_path / "out"))
            if name in AVERAGED:
                dataset = task.dataset("val")
                held = read(task, dataset, "val", 0, list(range(len(dataset))), 0)
                total, count = task.loss(task.model.eval(), held)
                assert total.item() / count == pytest.approx(metrics["val/loss"], rel=tolerance)
            else:
                assert distance_of_weights(weights_of(task.model), wanted) <= tolerance


def test_projects_are_written_for_other_trainers_or_have_a_reason() -> None:
    written = {folder: {file.stem for file in (HERE / folder).glob("*.py")} for folder in OTHERS}
    excluded = {name for names in NOT_FOR_THE_TRAINER for name in names}
    assert written["with_lightning"] == PROJECTS.keys()
    assert not written["with_trainer"] & excluded
    assert written["with_trainer"] | excluded == PROJECTS.keys()


def test_the_table_of_lines_in_the_documentation_is_current() -> None:
    page = (HERE.parents[1] / "docs" / "own-task.md").read_text(encoding="utf-8")
    assert table() in page
