"""In complete runs, random draws of samples depend only on the seed, in every kind of phase."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from runner.durable.checkpoint import load, newest_valid
from tests.end_to_end.task_of_draws import NAMES
from tests.forkserver import ForkServer
from tests.rounding import PROMISED

TASK = Path(__file__).with_name("task_of_draws.py")
COMMAND = ["both", "--task", str(TASK), "run=mine", "device=cpu", "monitor=off", "dataloader.num_workers=0"]
AGAIN = ["inference", "mine"]
TOLERANCE = PROMISED[torch.float64]  # sums of 26 numbers in a different order, in six updates
CUTS = {
    "workers": ("dataloader.num_workers=2",),
    "micro-batches": ("micro_batch_size=4", "dataloader.num_workers=1"),
    "sharded ranks": ("parallelism=fsdp", "parallelism.world_size=2", "dataloader.num_workers=1"),
    "ranks": ("parallelism=ddp", "parallelism.world_size=2", "parallelism.shares=[5,3]"),
}


@dataclass(frozen=True)
class Outcome:
    """The means of training draws, the losses, the means of validation draws, and the predictions of a run."""

    fitted: torch.Tensor
    losses: list[float]
    evaluations: list[list[float]]
    predictions: Mapping[str, bytes]


@pytest.fixture(scope="module")
def base(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The run without data workers, on one rank, with seed 0."""
    folder = tmp_path_factory.mktemp("base")
    return folder, outcome(server, folder)


def outcome(server: ForkServer, folder: Path, *args: str) -> Outcome:
    keys = {word.partition("=")[0] for word in args}
    result = server.run([*(word for word in COMMAND if word.partition("=")[0] not in keys), *args], folder)
    assert result.code == 0, result.err
    run = folder / "outputs" / "mine"
    path = newest_valid(run / "checkpoints")
    assert path is not None
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        fitted=load(path).tensors("model")["mean"],
        losses=[row["train/loss"] for row in rows if "train/loss" in row],
        evaluations=[[row[f"val/{name}"] for name in NAMES] for row in rows if "val/torch" in row],
        predictions=predictions(folder),
    )


def predictions(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "outputs" / "mine" / "predictions").glob("*.npy")}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cut", CUTS)
def test_workers_resumes_and_ranks_do_not_change_samples(
    cut: str, base: tuple[Path, Outcome], server: ForkServer, tmp_path: Path
) -> None:
    _, wanted = base
    result = outcome(server, tmp_path, *CUTS[cut])
    assert torch.allclose(result.fitted, wanted.fitted, rtol=TOLERANCE, atol=TOLERANCE)
    assert result.losses == pytest.approx(wanted.losses, rel=TOLERANCE)
    assert np.allclose(result.evaluations, wanted.evaluations, rtol=TOLERANCE, atol=TOLERANCE)
    assert result.predictions == wanted.predictions


def test_evaluations_do_not_change_training_draws(
    base: tuple[Path, Outcome], server: ForkServer, tmp_path: Path
) -> None:
    _, wanted = base
    result = outcome(server, tmp_path, "evaluate.every=1")
    assert len(result.evaluations) > len(wanted.evaluations)
    assert result.losses == wanted.losses


def test_another_seed_changes_the_draws_of_every_split(
    base: tuple[Path, Outcome], server: ForkServer, tmp_path: Path
) -> None:
    _, wanted = base
    result = outcome(server, tmp_path, "seed=1")
    assert (result.fitted != wanted.fitted).all()
    assert all(one != other for one, other in zip(result.evaluations[0], wanted.evaluations[0], strict=True))
    assert all(evaluation == result.evaluations[0] for evaluation in result.evaluations)


def test_predictions_depend_only_on_seed_and_index(base: tuple[Path, Outcome], server: ForkServer) -> None:
    folder, wanted = base
    assert len(set(wanted.predictions.values())) == 3
    assert server.run([*AGAIN, "inference.samples=4"], folder).code == 0
    more = predictions(folder)
    assert {name: more[name] for name in wanted.predictions} == wanted.predictions
    assert server.run([*AGAIN, "inference.seed=1"], folder).code == 0
    other = predictions(folder)
    assert all(other[name] != content for name, content in wanted.predictions.items())
