"""Gradients are scaled to those of the mean loss, and clipped to the maximum norm."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.engine.update.gradients import SharedSamples, clear, correct_and_clip
from tests.rounding import allowed

ROUNDED = allowed(torch.float64, 3 * 4 + 5 + 1, growth=3)  # a sum of this many squares, then three products


def gradients(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((3, 4), (5,), ())]


def norm_of(given: list[Tensor]) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in given))


@pytest.mark.parametrize("max_norm", [None, 0.5, 100.0])
@pytest.mark.parametrize("correction", [None, 1.0, 3.0, 0.25, "tensor"])
def test_gradients_are_unscaled_and_clipped_to_the_maximum_norm(
    correction: float | str | None, max_norm: float | None
) -> None:
    result, factor = gradients(), 0.125 if correction == "tensor" else float(correction or 1.0)
    given = torch.tensor(factor, dtype=torch.float32) if correction == "tensor" else correction
    norm = correct_and_clip(result, given, max_norm)  # type: ignore[arg-type]
    expected = factor * norm_of(gradients())
    scale = 1.0 if max_norm is None else min(1.0, max_norm / (expected + 1e-6))
    assert float(norm) == pytest.approx(expected, rel=ROUNDED)  # type: ignore[arg-type]
    for one, before in zip(result, gradients(), strict=True):
        torch.testing.assert_close(one, before * factor * scale, rtol=ROUNDED, atol=0.0)


def test_gradients_are_clipped_by_the_norm_over_all_ranks() -> None:
    result = gradients()
    norm = correct_and_clip(result, 2.0, 1.0, over_ranks=lambda mine: mine * 3)
    expected = 2.0 * 3 * norm_of(gradients())
    assert float(norm) == pytest.approx(expected, rel=ROUNDED)  # type: ignore[arg-type]
    assert norm_of(result) == pytest.approx(2.0 * norm_of(gradients()) / (expected + 1e-6), rel=ROUNDED)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_half_precision_gradients_keep_their_dtype_and_an_empty_list_has_no_norm(max_norm: float | None) -> None:
    result = gradients(torch.bfloat16)
    correct_and_clip(result, torch.tensor(0.5, dtype=torch.float64), max_norm)
    assert {one.dtype for one in result} == {torch.bfloat16}
    assert correct_and_clip([], 2.0, max_norm) is None


@pytest.mark.parametrize("max_norm", [None, 0.001])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_half_precision_gradient_does_not_change_the_scale_of_others(
    half: torch.dtype, max_norm: float | None
) -> None:
    """The correction is a number or, with several ranks, a tensor."""
    results = []
    for correction in (1 / 300, torch.tensor(1 / 300, dtype=torch.float64)):
        small, result = torch.tensor([2.0**-6], dtype=half), torch.randn(5, generator=torch.Generator().manual_seed(0))
        norm = correct_and_clip([small, result], correction, max_norm)
        results.append(result)
        assert norm is not None
        assert norm.dtype == torch.float32
    torch.testing.assert_close(*results, rtol=allowed(torch.float32, 4), atol=0.0)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_non_finite_gradient_makes_the_norm_non_finite(max_norm: float | None) -> None:
    result = gradients()
    result[1][2] = math.nan
    assert math.isnan(float(correct_and_clip(result, None, max_norm)))  # type: ignore[arg-type]


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("correction", [0.5, torch.tensor(0.5, dtype=torch.float64)])
def test_complex_gradients_have_a_real_norm(correction: Any, max_norm: float | None) -> None:
    result = [torch.tensor([3 + 4j]), torch.tensor([12.0])]
    norm = correct_and_clip(result, correction, max_norm)
    assert norm is not None
    assert norm.item() == 6.5
    scale = 0.5 if max_norm is None else 1 / 13
    assert torch.allclose(result[0], torch.tensor([3 + 4j]) * scale)
    assert torch.allclose(result[1], torch.tensor([12.0]) * scale)


def test_cleared_gradients_are_released() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    clear(model.parameters())
    assert all(weight.grad is None for weight in model.parameters())


def test_a_retried_update_repeats_only_batches_that_were_read_again() -> None:
    def batches(*names: str) -> Any:
        return [SimpleNamespace(name=name, last=name == names[-1], samples=None) for name in names]

    samples = SharedSamples(iter([*batches("failed", "not read"), *batches("one", "two"), *batches("next update")]))
    first = samples.read(again=False, keep=True)
    assert next(first).name == "failed"
    # like a feed that is rewound after an out-of-memory error: the rest of the failed attempt is not read again
    next(first)
    assert [micro.name for micro in samples.read(again=True, keep=True)] == ["one", "two"]
    assert [micro.name for micro in samples.read(again=False, keep=True)] == ["one", "two"]
    samples.end()
    assert [micro.name for micro in samples.read(again=False, keep=True)] == ["next update"]
