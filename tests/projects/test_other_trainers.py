"""The projects of with_lightning and with_trainer train like the plain loops, so their lines of code are comparable.

`scripts/measure/projects.py` counts them.
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
from torch.utils.data import RandomSampler

from runner.base.order import permutation
from scripts.measure.projects import table
from tests.projects import local_files, plain_loops
from tests.projects.test_projects import (
    HERE,
    OF_FLOAT32,
    PROJECTS,
    SEED,
    TOLERANCE,
    assert_equal,
    by_hand,
    float64,
    read,
    task_of,
)

NOISY = ("dcgan", "unet_diffusion", "vae")
AVERAGED = ("unet_diffusion",)  # at the end, Lightning has replaced the weights by their average
CASES = [
    pytest.param(folder, file.stem, id=f"{folder}-{file.stem}")
    for folder in ("with_lightning", "with_trainer")
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
    """Let the noise of an update depend on its number only, in the plain loop and in the LightningModule."""
    updates, steps = itertools.count(), itertools.count()
    (kind,) = (kind for kind in vars(script).values() if isinstance(kind, type) and kind.__name__.startswith("Lit"))
    training_step = kind.training_step  # type: ignore[attr-defined]

    def noise(batch: Tensor) -> Any:
        torch.manual_seed(next(updates))
        return SimpleNamespace(
            uniform=lambda: torch.rand(len(batch)), normal=lambda *shape: torch.randn(len(batch), *shape)
        )

    def seeded(self: Any, batch: Tensor, batch_index: int) -> Any:
        torch.manual_seed(next(steps))
        return training_step(self, batch, batch_index)

    monkeypatch.setattr(plain_loops, "per_sample_noise", noise)
    monkeypatch.setattr(kind, "training_step", seeded)


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return the weights under the names of the plain loop; peft keeps a copy of a module that is trained in full."""
    return {
        key.replace("modules_to_save.default.", ""): tensor.detach()
        for key, tensor in model.state_dict().items()
        if "original_module" not in key
    }


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `shuffle=True` yield the order of the runner."""
    epochs = itertools.count()

    def indices(sampler: RandomSampler) -> Iterator[int]:
        return iter(permutation(SEED, next(epochs), len(sampler.data_source)).tolist())  # type: ignore[arg-type]

    monkeypatch.setattr(RandomSampler, "__iter__", indices)
    accelerate = pytest.importorskip("accelerate.data_loader", reason="the package accelerate is not installed")
    monkeypatch.setattr(accelerate.SeedableRandomSampler, "__iter__", indices)


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize(("folder", "name"), CASES)
def test_the_same_project_of_another_trainer_equals_the_plain_loop(
    folder: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process, one batch per update: what Lightning and the Trainer compute, too."""
    needed = "lightning" if folder == "with_lightning" else "transformers"
    for package in (needed, *PROJECTS[name]):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    prepare = getattr(local_files, name, None)
    if prepare is not None:
        prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the other trainers
        script = script_of(folder, name)
        if name in NOISY:
            draw_by_update(monkeypatch, script)
        wanted, metrics = by_hand(name, tmp_path / "data")
        tolerance = OF_FLOAT32.get(name, TOLERANCE)
        with float64():
            task = task_of(name, tmp_path / "data")
            script.fit(task, str(tmp_path / "out"))
            if name in AVERAGED:
                dataset = task.dataset("val")
                held = read(task, dataset, "val", 0, list(range(len(dataset))), 0)
                total, count = task.loss(task.model.eval(), held)
                assert total.item() / count == pytest.approx(metrics["val/loss"], rel=tolerance)
            else:
                assert_equal(weights_of(task.model), wanted, tolerance)


def test_the_table_of_lines_in_the_documentation_is_current() -> None:
    page = (HERE.parents[1] / "docs" / "own-task.md").read_text(encoding="utf-8")
    assert table() in page
