"""Tests of both heads of hyperspectral: gradients, the effect of each loss term, and protection against collapse."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner.tasks.hyperspectral.metrics import UNKNOWN, auroc, detection
from runner.tasks.hyperspectral.model import DeepSVDD, TrainableRX
from runner.tasks.hyperspectral.task import AnomalyTask, build
from torch import Tensor

from runner.base.errors import ConfigError
from runner.base.task import Context, Progress
from tests.rounding import allowed, assert_close, distance

SMALL = {"data": "synthetic", "num_cubes": 8, "height": 20, "width": 24, "channels": 12}


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def task_of(**options: Any) -> AnomalyTask:
        torch.manual_seed(0)
        task = build(Context(0, None, tmp_path), **{**SMALL, **options})
        assert isinstance(task, AnomalyTask)
        return task

    return task_of


def run_fit(task: AnomalyTask) -> dict[str, Tensor]:
    """Run phase 1 and return all training samples as one batch."""
    fit, train = task.fits["fit"], task.dataset("train")
    batch = train.__getitems__(list(range(len(train))))
    state, items = fit.add(task.model, fit.start(), batch)
    assert items == len(train) * task.items_per_sample
    fit.finish(task.model, state)
    return batch


def gradients(task: AnomalyTask, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    task.model.zero_grad()
    total, count = task.loss(task.model, batch)
    (total / count).backward()
    result = {}
    for name, weight in task.model.named_parameters():
        assert weight.grad is not None, name
        result[name] = weight.grad.clone()
    return result


# Training


@pytest.mark.parametrize("head", ["rx", "svdd"])
@pytest.mark.parametrize("fitted", [True, False])
def test_every_parameter_gets_a_gradient(make: Any, head: str, fitted: bool) -> None:
    task = make(head=head)
    batch = run_fit(task) if fitted else task.dataset("train").__getitems__([0, 1])
    for name, gradient in gradients(task, batch).items():
        assert gradient.abs().sum() > 0, name


@pytest.mark.parametrize("head", ["rx", "svdd"])
def test_the_loss_is_a_sum_over_samples_and_pixels(make: Any, head: str) -> None:
    task = make(head=head)
    batch = run_fit(task)
    batch["mask"][2, :5] = UNKNOWN
    whole, items = task.loss(task.model, batch)
    parts = [task.loss(task.model, {name: values[i : i + 1] for name, values in batch.items()}) for i in range(8)]
    torch.testing.assert_close(whole, torch.stack([part for part, _ in parts]).sum())
    assert items == sum(count for _, count in parts)
    assert items == ((batch["mask"] != UNKNOWN) if head == "rx" else (batch["mask"] != 1)).sum()


@pytest.mark.parametrize("head", ["rx", "svdd"])
def test_an_ignored_pixel_does_not_change_the_loss(make: Any, head: str) -> None:
    task = make(head=head)
    batch = run_fit(task)
    batch["mask"][0, 0, 0] = UNKNOWN if head == "rx" else 1
    before, _ = task.loss(task.model, batch)
    batch["cube"][0, 0, 0] += 0.3
    after, _ = task.loss(task.model, batch)
    torch.testing.assert_close(after, before)
    batch["cube"][0, 0, 1:] += 0.3
    assert not torch.isclose(task.loss(task.model, batch)[0], before)


@pytest.mark.parametrize("head", ["rx", "svdd"])
def test_loss_is_float32_and_rx_exact_under_autocast(make: Any, head: str) -> None:
    task = make(head=head)
    batch = run_fit(task)
    exact = task.model(batch["cube"])[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert task.loss(task.model, batch)[0].dtype == torch.float32
        rough = task.model(batch["cube"])[0]
    if head == "rx":
        assert_close(rough, exact, terms=rough.shape[-1] ** 2)
    else:
        assert distance(rough, exact) <= 16 * torch.finfo(torch.bfloat16).eps


def train(task: AnomalyTask, batch: dict[str, Tensor], updates: int) -> None:
    optimizer = torch.optim.Adam(task.model.parameters(), lr=0.01)
    for update in range(updates):
        task.begin_update(Progress("train", update, updates, 40 * update / updates))
        total, count = task.loss(task.model, batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()


@pytest.mark.slow
def test_training_beats_rx_on_held_out_cubes(make: Any) -> None:
    task = make(num_cubes=24)
    train(task, run_fit(task), 150)
    val = task.dataset("val")
    with torch.no_grad():
        result = task.evaluate(task.model, val.__getitems__(list(range(len(val)))))
    figures = {name: float(total) / float(count) for name, (total, count) in result.items()}
    baselines = task.baselines()
    assert figures["auroc"] > baselines["auroc"] + 0.05
    assert figures["iou"] > 1.5 * baselines["iou"]
    assert 0 < figures["explained_variance"] <= 1


def test_baselines_are_the_metrics_after_phase_1(make: Any) -> None:
    task = make()
    assert task.baselines() == {}, "there are no baselines before phase 1"
    run_fit(task)
    val = task.dataset("val")
    with torch.no_grad():
        result = task.evaluate(task.model, val.__getitems__(list(range(len(val)))))
    for name, value in task.baselines().items():
        assert float(result[name][0]) / float(result[name][1]) == pytest.approx(
            value, rel=allowed(torch.float32, len(val) * 20 * 24, growth=4)
        )


# The terms


def test_the_temperature_follows_the_progress(make: Any) -> None:
    task = make()
    result = []
    for epoch in (0.0, 0.9, 1.0, 10.5, 37.0, 100.0):
        task.begin_update(Progress("train", 0, 1, epoch))
        result.append(float(task.model.temperature))
    assert result == pytest.approx([5.0, 5.0, 4.5, 5 * 0.9**10, 5 * 0.9**37, 0.1])


def test_lower_temperatures_select_more(make: Any) -> None:
    task = make()
    batch = run_fit(task)
    warm, logits = task.model.selection(), task.model(batch["cube"])[0]
    task.begin_update(Progress("train", 0, 1, 100.0))
    cold = task.model.selection()
    assert warm.sum().item() == pytest.approx(1.0)
    assert cold.sum().item() == pytest.approx(1.0)
    assert cold.max() > 1.5 * warm.max()
    assert not torch.allclose(task.model(batch["cube"])[0], logits)


def test_entropy_and_diversity_are_rewarded() -> None:
    model = TrainableRX(6, 2)
    penalties = {}
    for name, selector in (("even", torch.zeros(6)), ("uneven", torch.arange(6.0)), ("one", 1e4 * torch.eye(6)[0])):
        model.selector.data = selector
        model.selector.grad = None
        _, entropy, concentration = model.penalties()
        (entropy + concentration).backward()
        penalties[name] = (entropy.item(), concentration.item())
        if name == "uneven":
            assert model.selector.grad is not None
            assert model.selector.grad[5] > 0 > model.selector.grad[0], "gradient descent decreases the largest"
    assert penalties["even"] == pytest.approx((0, 0), abs=allowed(torch.float32, 6, growth=2))
    assert penalties["one"] == pytest.approx((1, 1), rel=allowed(torch.float32, 6, growth=2))
    assert all(0 < value < 1 for value in penalties["uneven"])


def test_non_orthogonal_components_are_penalized_with_a_gradient() -> None:
    model = TrainableRX(6, 3)
    assert model.penalties()[0].item() == pytest.approx(0, abs=allowed(torch.float32, 6)), (
        "the initial components are orthonormal"
    )
    model.components.data = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    before = model.penalties()[0]
    before.backward()
    gradient = model.components.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0
    model.components.data -= 0.01 * gradient
    assert model.penalties()[0] < before


def test_target_and_background_pixels_have_equal_total_weight(make: Any) -> None:
    task = make(orthogonality=0.0, entropy=0.0, diversity=0.0)
    batch = run_fit(task)
    weight = task.model.pos_weight
    logits = task.model(batch["cube"])[0].detach().requires_grad_()
    task.loss(lambda cubes: (logits, torch.zeros(1, 3)), batch)[0].backward()
    assert logits.grad is not None
    target = batch["mask"] == 1
    expected = torch.sigmoid(logits + weight.log())
    torch.testing.assert_close(logits.grad[~target], expected[~target])
    torch.testing.assert_close(logits.grad[target], (expected[target] - 1) * weight)
    assert float(weight * target.sum()) == pytest.approx(float((~target).sum()))


# Deep SVDD


@pytest.mark.slow
def test_deep_svdd_does_not_collapse(make: Any) -> None:
    task = make(head="svdd", num_cubes=16)
    model = task.model
    assert isinstance(model, DeepSVDD)
    assert not [name for name, _ in model.named_parameters() if "bias" in name]
    batch = run_fit(task)
    length, spread = model.centre.norm().item(), model.distance(batch["cube"]).std().item()
    centre = model.centre.clone()
    train(task, batch, 60)
    with torch.no_grad():
        assert model.centre.norm().item() == pytest.approx(length, rel=allowed(torch.float32, len(model.centre)))
        assert model.distance(batch["cube"]).std().item() > 0.2 * spread
        areas = auroc(model(batch["cube"])[0].flatten(1), batch["mask"].flatten(1))[0]
    assert not torch.equal(model.centre, centre)
    assert areas.mean() > 0.7


def test_the_center_is_a_moving_average_of_features() -> None:
    torch.manual_seed(0)
    model = DeepSVDD(5)
    model.reference.normal_()
    target = model.features(model.reference).mean(0).detach()
    length = model.centre.norm()
    expected = 0.95 * model.centre + 0.05 * target
    model.begin_update(Progress("train", 0, 9, 0.0))
    torch.testing.assert_close(model.centre, expected * length / expected.norm())


def test_the_center_moves_once_per_update(make: Any) -> None:
    task, resumed = make(head="svdd"), make(head="svdd")
    run_fit(task)
    model = task.model
    for update in (0, 1):
        before = model.centre.clone()
        with torch.no_grad():
            model.network[2].weight.mul_(1 + 0.1 * torch.rand_like(model.network[2].weight))
        task.begin_update(Progress("train", update, 9, 0.0))
        once = model.centre.clone()
        assert not torch.equal(once, before)
        resumed.model.load_state_dict(model.state_dict())
        for again in (task, resumed):
            again.begin_update(Progress("train", update, 9, 0.0))
            assert torch.equal(again.model.centre, once)
    task.begin_update(Progress("train", 0, 9, 0.0))  # a new run starts from these weights
    assert not torch.equal(model.centre, once)
    run_fit(task)
    assert int(model.moved_at) == -1


@pytest.mark.parametrize("head", ["rx", "svdd"])
def test_later_phases_do_not_change_earlier_results(make: Any, head: str) -> None:
    task = make(head=head)
    run_fit(task)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    task.begin_update(Progress("fit", 3, 3, 1.0))  # as inference does after epochs=0
    for name, value in task.model.state_dict().items():
        assert torch.equal(value, before[name]), name


# Metrics


def test_auroc_is_the_fraction_of_correctly_ordered_pairs() -> None:
    generator = np.random.default_rng(0)
    scores = np.round(generator.normal(size=(5, 40)), 1)  # with ties
    masks = generator.choice([0, 1, UNKNOWN], size=(5, 40), p=[0.6, 0.3, 0.1])
    masks[4][masks[4] == 1] = 0
    areas, both = auroc(torch.from_numpy(scores), torch.from_numpy(masks))
    assert both.tolist() == [True] * 4 + [False]
    for row in range(4):
        target, background = scores[row][masks[row] == 1], scores[row][masks[row] == 0]
        pairs = (target[:, None] > background).mean() + 0.5 * (target[:, None] == background).mean()
        assert areas[row].item() == pytest.approx(pairs)


def test_iou_and_f1_exclude_unknown_pixels() -> None:
    logits = torch.tensor([[[1.0, -1.0, 1.0, -1.0]], [[1.0, 1.0, 1.0, -1.0]]])
    mask = torch.tensor([[[1, 1, 0, 0]], [[1, UNKNOWN, UNKNOWN, 0]]], dtype=torch.uint8)
    whole = detection(logits, mask)
    assert [int(part) for part in whole["iou"]] == [2, 4]
    assert [int(part) for part in whole["f1"]] == [4, 6]
    parts = [detection(logits[i : i + 1], mask[i : i + 1]) for i in range(2)]
    for name, (total, count) in whole.items():
        assert total == sum(part[name][0] for part in parts)
        assert count == sum(part[name][1] for part in parts)


# The options


@pytest.mark.slow
@pytest.mark.parametrize("head", ["rx", "svdd"])
def test_the_model_is_traced_with_the_example(make: Any, head: str) -> None:
    task = make(head=head)
    run_fit(task)
    (cubes,) = task.example()
    assert cubes.shape == (2, 20, 24, 12)
    model = task.model.eval()
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(model, (cubes,), dynamic_shapes=({0: batch},)).module()
    for given in (cubes, cubes[:1]):
        for one, other in zip(program(given), model(given), strict=True):
            torch.testing.assert_close(one, other)
    for name, value in model.state_dict().items():  # a view of a larger tensor cannot be saved on its own
        assert value.untyped_storage().nbytes() == value.nbytes, name


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    "options", [{"components": 13}, {"channels": 2}, {"data": "photographs", "height": 400, "width": 64}]
)
def test_invalid_shapes_are_rejected(make: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make(**options)


def test_the_full_size_matches_the_large_workload(tmp_path: Path) -> None:
    task = build(Context(0, None, tmp_path), size="full", data="synthetic")
    assert isinstance(task, AnomalyTask)
    assert task.dataset("train").shape == (256, 256, 100)
    assert len(task.dataset("train")) == 1000
    model = task.model
    assert isinstance(model, TrainableRX)
    assert sum(weight.numel() for weight in model.parameters()) == 100 + 33 * 100 + 2 * 33 + 2
    assert dataclasses.is_dataclass(task)
