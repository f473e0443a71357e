"""Weight sketches preserve lengths and angles for weights of any order, shape and number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runner.tools.measure import weight_sketch as module
from runner.tools.measure.comparison_result import relative_distance
from runner.tools.measure.weight_sketch import NUM_SUMS, sketch
from tests.rounding import assert_close


def weights(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(300, 200), (7,), (), (64, 3, 5, 5), (0, 4)]
    return [scale * torch.randn(shape, generator=generator) for shape in shapes]


def flat(given: list[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in given]).double()


def test_a_sketch_is_linear() -> None:
    one, other = weights(0), weights(1)
    both = [2 * a - b for a, b in zip(one, other, strict=True)]

    num_terms = sum(weight.numel() for weight in one) / NUM_SUMS  # terms of each sum
    assert_close(sketch(both), 2 * sketch(one) - sketch(other), num_terms, dtype=torch.float32)
    assert sketch(one).shape == (NUM_SUMS,)


@pytest.mark.parametrize("scale", [-1.0, 0.1, 1.0, 3.0])
def test_sketches_preserve_distances(scale: float) -> None:
    one, other = weights(0), [scale * a + 0.3 * b for a, b in zip(weights(0), weights(1), strict=True)]
    true = float((flat(other) - flat(one)).norm() / flat(one).norm())

    assert relative_distance(sketch(one).tolist(), sketch(other).tolist()) == pytest.approx(true, rel=0.15)


def test_equal_values_do_not_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = [torch.ones(50_000), torch.ones(1000, 3)]
    result = sketch(ones)
    monkeypatch.setattr(module, "CHUNK", 4 * NUM_SUMS)

    assert float(result.norm()) == pytest.approx(math.sqrt(53_000), rel=0.15)
    assert torch.equal(sketch(ones), result)


def test_memory_layout_has_no_effect() -> None:
    images = [torch.randn(8, 3, 4, 4)]

    assert torch.equal(sketch(images), sketch([images[0].to(memory_format=torch.channels_last)]))


def test_unchanged_or_nan_weights_have_infinite_distance() -> None:
    assert relative_distance([0.0, 0.0], [1.0, 0.0]) == math.inf
    assert relative_distance([1.0, 0.0], [math.nan, 0.0]) == math.inf
    assert relative_distance([3.0, 4.0], [3.0, 4.0]) == 0.0
    assert relative_distance([3.0, 4.0], None) is None
    assert sketch([]).tolist() == [0.0] * NUM_SUMS
