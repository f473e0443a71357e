"""The statistics of phase 1 of hyperspectral can be merged, need constant memory, and equal those of numpy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from runner.tasks.hyperspectral.model import DeepSVDD, TrainableRX, principal
from runner.tasks.hyperspectral.statistics import CANDIDATES, NEVER, SAMPLE_SIZE, PixelStatistics, hash_int64
from torch import Tensor

from runner.base.errors import DataError
from runner.base.task import State
from tests.rounding import allowed, assert_close, distance

CHANNELS = 7


def make_batch(num_cubes: int = 10, height: int = 9, width: int = 11, offset: float = 0.0) -> dict[str, Tensor]:
    """Return correlated spectra with very different variances per channel."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(CHANNELS, CHANNELS, generator=generator) * torch.logspace(0, -2, CHANNELS)
    cube = torch.randn(num_cubes, height, width, CHANNELS, generator=generator) @ basis + offset
    mask = (torch.rand(num_cubes, height, width, generator=generator) < 0.1).to(torch.uint8)
    mask[:, 0] = 255
    return {"cube": cube, "mask": mask, "index": torch.arange(num_cubes)}


def rows_of(batch: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    return {name: values[rows] for name, values in batch.items()}


def gathered(fit: PixelStatistics, *batches: dict[str, Tensor]) -> State:
    state = fit.start()
    for batch in batches:
        state, items = fit.add(torch.nn.Identity(), state, batch)
        assert items == batch["mask"].numel()
    return state


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_merged_statistics_equal_those_of_one_pass(num_parts: int, offset: float, dtype: torch.dtype) -> None:
    batch, fit = make_batch(offset=offset), PixelStatistics(CHANNELS, dtype)
    whole = gathered(fit, batch)
    rows = list(range(len(batch["cube"])))
    parts = [gathered(fit, *(rows_of(batch, [row]) for row in rows[part::num_parts])) for part in range(num_parts)]
    for order in itertools.islice(itertools.permutations(parts), 0, None, 7):
        state = fit.start()
        for part in order:
            state = fit.merge(state, part)
        for name in ("count", "known", "targets", "low", "high", "keys", "sample"):
            assert torch.equal(state[name], whole[name]), name
        for name in ("mean", "comoment"):
            assert_close(state[name], whole[name], terms=1280, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_streaming_statistics_equal_those_of_numpy(dtype: torch.dtype) -> None:
    batch = make_batch(offset=3.0)
    state = gathered(PixelStatistics(CHANNELS, dtype), rows_of(batch, [4, 1, 0]), rows_of(batch, [2, 3, 5, 6, 7, 8, 9]))
    pixels = batch["cube"].reshape(-1, CHANNELS).double().numpy()
    covariance = np.cov(pixels.T, bias=True)
    assert state["count"] == len(pixels)
    assert_close(state["mean"], torch.from_numpy(pixels.mean(0)), terms=len(pixels), dtype=dtype)
    assert_close(state["comoment"] / state["count"], torch.from_numpy(covariance), terms=len(pixels), dtype=dtype)
    np.testing.assert_array_equal(state["low"], pixels.min(0))
    np.testing.assert_array_equal(state["high"], pixels.max(0))
    assert state["known"] == (batch["mask"] != 255).sum()
    assert state["targets"] == (batch["mask"] == 1).sum()


def test_autocast_does_not_change_the_statistics() -> None:
    batch, fit = make_batch(), PixelStatistics(CHANNELS)
    plain = gathered(fit, batch)
    with torch.autocast("cpu", torch.bfloat16):
        cast = gathered(fit, batch)
    for name, value in plain.items():
        assert torch.equal(cast[name], value), name


def test_statistics_need_constant_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, largest = PixelStatistics(CHANNELS), 0
    join = torch.cat

    def watched(parts: Any, *more: Any, **options: Any) -> Tensor:
        nonlocal largest
        result = join(parts, *more, **options)
        largest = max(largest, len(result))
        return result

    monkeypatch.setattr(torch, "cat", watched)
    sizes = set()
    for num_cubes in (1, 10, 100):
        state = gathered(fit, *(rows_of(make_batch(num_cubes), [row]) for row in range(num_cubes)))
        sizes.add(sum(value.numel() for value in state.values()))
    assert len(sizes) == 1
    assert largest == SAMPLE_SIZE + CANDIDATES < 100 * 99


def test_every_pixel_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.tasks.hyperspectral import statistics

    seen = []
    gram = statistics.gram

    def watched(rows: Tensor) -> Tensor:
        seen.append(len(rows))
        return gram(rows)

    monkeypatch.setattr(statistics, "gram", watched)
    batch = make_batch(height=50, width=90)  # 4500 pixels per cube: a full block and a partial one
    state = gathered(PixelStatistics(CHANNELS), batch)
    assert sum(seen) == batch["mask"].numel() == state["count"]
    assert len(seen) == 20, "pixels must be read in blocks"


def test_sampled_pixels_are_spread_over_cubes() -> None:
    batch = make_batch(num_cubes=100)
    batch["cube"][..., 0] = batch["index"][:, None, None].float()
    state = gathered(PixelStatistics(CHANNELS), batch)
    assert (state["keys"] < NEVER).all()
    assert (state["keys"].diff() > 0).all()
    per_cube = torch.bincount(state["sample"][:, 0].long(), minlength=100)
    assert per_cube.min() > 40
    assert per_cube.max() <= CANDIDATES


def test_the_hash_is_injective_and_uniform() -> None:
    keys = hash_int64(torch.arange(100_000))
    assert len(keys.unique()) == 100_000
    assert (keys > 0).double().mean().item() == pytest.approx(0.5, abs=0.01)
    # the first value of splitmix64 with seed 0, as published
    assert hash_int64(torch.tensor([0])).item() == 0xE220A8397B1DCDAF - 2**64


def fitted(model: Any, batch: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> Any:
    fit = PixelStatistics(CHANNELS, dtype)
    fit.finish(model, gathered(fit, batch))
    return model


def whitening_tolerance(pixels: np.ndarray[Any, Any]) -> float:
    """Return the bound on the relative error of squared norms of whitened float32 pixels.

    Whitening divides each principal direction by its standard deviation. This amplifies errors by up to the ratio of
    the largest standard deviation to the smallest, which is the square root of the condition number. Squaring doubles
    the relative error.
    """
    covariance = np.cov((pixels / np.ptp(pixels, axis=0)).T)
    return allowed(torch.float32, pixels.shape[1], growth=2 * float(np.linalg.cond(covariance)) ** 0.5)


def test_the_components_equal_the_eigenvectors_of_numpy() -> None:
    batch = make_batch()
    model = fitted(TrainableRX(CHANNELS, 3), batch)
    pixels = batch["cube"].reshape(-1, CHANNELS).double().numpy()
    normal = (pixels - pixels.min(0)) / np.ptp(pixels, axis=0)
    gate = CHANNELS * model.selection().detach().double().numpy()
    values, vectors = np.linalg.eig(np.cov((normal * gate).T, bias=True))
    order = np.argsort(values)[::-1][:3]
    cosines = np.abs((model.components.detach().numpy() * vectors[:, order].T).sum(1))
    np.testing.assert_allclose(cosines, 1, rtol=allowed(torch.float32, CHANNELS))
    np.testing.assert_allclose(model.scale.numpy() ** -2.0, values[order], rtol=allowed(torch.float32, 1, growth=2))
    with torch.no_grad():
        explained, whole = model.explained(batch["cube"])
    assert float(explained / whole) == pytest.approx(
        values[order].sum() / values.sum(), rel=allowed(torch.float32, normal.size, growth=2)
    )


def test_rx_equals_the_squared_mahalanobis_distance_of_numpy() -> None:
    batch = make_batch(offset=2.0)
    model = fitted(TrainableRX(CHANNELS, 3), batch)
    pixels = batch["cube"].reshape(-1, CHANNELS).double().numpy()
    away = pixels - pixels.mean(0)
    expected = np.einsum("nc,cd,nd->n", away, np.linalg.inv(np.cov(pixels.T, bias=True)), away)
    result = model.rx(batch["cube"]).reshape(-1).numpy()
    assert distance(expected, result) <= whitening_tolerance(pixels)
    assert expected.mean() == pytest.approx(CHANNELS)
    # with 1280 sampled pixels, the error of the standard deviation is about 3 %
    assert float(model.sigma) == pytest.approx(expected.std(), rel=0.1)
    assert float(model.threshold) == pytest.approx(CHANNELS + 2 * float(model.sigma))


def test_after_phase_1_the_model_is_rx() -> None:
    batch = make_batch()
    model = fitted(TrainableRX(CHANNELS, 3), batch)
    logits, _ = model(batch["cube"])
    pixels = batch["cube"].reshape(-1, CHANNELS).double().numpy()
    assert distance(model.rx_logit(batch["cube"]), logits) <= whitening_tolerance(pixels)
    result = (logits > 0).float().mean().item()
    assert 0 < result < 0.1


def test_statistics_initialize_selector_and_pos_weight() -> None:
    batch = make_batch()
    model = fitted(TrainableRX(CHANNELS, 3), batch)
    pixels = batch["cube"].reshape(-1, CHANNELS)
    variances = (pixels / (pixels.amax(0) - pixels.amin(0))).var(0)
    assert torch.equal(model.selector.argsort(), variances.argsort())
    targets, background = (batch["mask"] == 1).sum(), (batch["mask"] == 0).sum()
    assert float(model.pos_weight) == pytest.approx(float(background / targets))


def test_deep_svdd_starts_with_5_percent_outside_the_sphere() -> None:
    torch.manual_seed(0)
    batch = make_batch()
    model = fitted(DeepSVDD(CHANNELS), batch)
    logits, _ = model(batch["cube"])
    assert (logits > 0).float().mean().item() == pytest.approx(0.05, abs=0.02)


def test_constant_and_duplicated_channels_are_handled() -> None:
    batch = make_batch()
    batch["cube"][..., 2] = 5.0
    batch["cube"][..., 3] = batch["cube"][..., 4]
    model = fitted(TrainableRX(CHANNELS, 3), batch)
    logits, penalties = model(batch["cube"])
    assert torch.isfinite(logits).all()
    assert torch.isfinite(penalties).all()


def test_variances_are_sorted_in_descending_order() -> None:
    values, vectors = principal(torch.diag(torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64)))
    assert values.tolist() == pytest.approx([3.0, 1.0, 3e-9])
    assert vectors.abs().argmax(0).tolist() == [1, 0, 2]


def test_too_few_pixels_and_extreme_values_are_rejected() -> None:
    fit, batch = PixelStatistics(CHANNELS), make_batch()
    few = {name: values[:1, ..., :2, :2] if name == "mask" else values[:1] for name, values in batch.items()}
    few["cube"] = batch["cube"][:1, :2, :2]
    with pytest.raises(DataError, match="more than 7 pixels, but holds 4"):
        fit.finish(TrainableRX(CHANNELS, 3), gathered(fit, few))
    batch["cube"][3, 2, 1, 0] = float("nan")
    with pytest.raises(DataError, match="finite"):
        fit.finish(TrainableRX(CHANNELS, 3), gathered(fit, batch))
    batch["cube"][3, 2, 1, 0] = 1e30
    with pytest.raises(DataError, match=r"up to 1e\+30, .*\n.*task.statistics=float64"):
        fit.finish(TrainableRX(CHANNELS, 3), gathered(fit, batch))
    wide = PixelStatistics(CHANNELS, torch.float64)
    assert wide.finish(TrainableRX(CHANNELS, 3), gathered(wide, batch))
