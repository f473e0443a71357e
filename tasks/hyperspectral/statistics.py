"""Phase 1: mergeable moments, extremes and a uniform sample of all pixels, in one pass with bounded memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import DataError
from runner.base.task import Fit, State

from .metrics import UNKNOWN

SAMPLE_SIZE = 8192  # pixels in the sample; enough to estimate the sigma of the RX score to about 2 %, see sigma_of_rx
CANDIDATES = 128  # candidates per cube
ROWS = {"cpu": 4096}  # pixels per block; a block with 50 channels fits into the second-level cache of two cores
ROWS_ELSEWHERE = 2**20
NEVER = torch.iinfo(torch.int64).max  # key of an empty entry of the sample


class PixelStatistics(Fit):
    """Count, mean and co-moment of the spectra (Chan et al.), extremes per channel, fraction of targets, and a sample.

    Sums are float64, so that the order of reading and merging affects only the last digits.

    The sample serves to estimate the standard deviation of the RX score, which depends on fourth moments of all
    channels and cannot be accumulated exactly in bounded memory. Each cube has CANDIDATES candidate pixels. The key of
    a candidate is a bijective hash of the index of the cube and the number of the candidate, so that keys are unique.
    The position of a candidate in the cube is derived from its key. The sample consists of the pixels with the smallest
    keys. It is therefore the same however the cubes are divided among ranks and merged.

    dtype  dtype of the products within a block of pixels, see `moments`
    """

    def __init__(self, channels: int, dtype: torch.dtype = torch.float32) -> None:
        self.channels, self.dtype = channels, dtype

    def start(self) -> State:
        zero = torch.zeros((), dtype=torch.float64)
        return {
            "count": zero.clone(),
            "mean": zero.repeat(self.channels),
            "comoment": zero.repeat(self.channels, self.channels),
            "low": zero.repeat(self.channels) + math.inf,
            "high": zero.repeat(self.channels) - math.inf,
            "known": zero.clone(),
            "targets": zero.clone(),
            "keys": torch.full((SAMPLE_SIZE,), NEVER),
            "sample": torch.zeros(SAMPLE_SIZE, self.channels),
        }

    def add(self, model: nn.Module, state: State, batch: Mapping[str, Tensor]) -> tuple[State, int]:
        """Return the state with this batch: cube (B, H, W, C) float32, mask (B, H, W), index (B,)."""
        cubes, mask = batch["cube"].flatten(1, 2), batch["mask"]
        keys, sample = candidates(cubes, batch["index"])
        part = moments(cubes, self.dtype) | {
            "known": (mask != UNKNOWN).sum().double(),
            "targets": (mask == 1).sum().double(),
            "keys": keys,
            "sample": sample,
        }
        return self.merge(state, part), cubes.shape[0] * cubes.shape[1]

    def merge(self, one: State, other: State) -> State:
        keys, order = torch.cat([one["keys"], other["keys"]]).sort()
        return merge_moments(one, other, one["count"], other["count"]) | {
            "count": one["count"] + other["count"],
            "known": one["known"] + other["known"],
            "targets": one["targets"] + other["targets"],
            "keys": keys[:SAMPLE_SIZE],
            "sample": torch.cat([one["sample"], other["sample"]])[order[:SAMPLE_SIZE]],
        }

    def finish(self, model: Any, state: State) -> Mapping[str, float]:
        """Set normalization, components, whitening, selector and threshold of the model; return statistics to display.

        Raises DataError if there are not more pixels than channels, or if values or their squares are not finite.
        """
        pixels = int(state["count"])
        if pixels <= self.channels:
            raise DataError(f"the training data must hold more than {self.channels} pixels, but holds {pixels}")
        if not bool(torch.isfinite(state["comoment"]).all()):
            largest = float(torch.maximum(state["high"].abs(), state["low"].abs()).max())
            if not math.isfinite(largest):
                raise DataError("the cubes of the training data must hold finite numbers, but some are infinite or NaN")
            what = f"the training data has values of up to {largest:.3g}, whose squares are too large for {self.dtype}"
            raise DataError(what, fix="use task.statistics=float64, or scale the data")
        figures: Mapping[str, float] = model.set_statistics(state)
        return figures


def moments(cubes: Tensor, dtype: torch.dtype) -> State:
    """Return the number of pixels of cubes (B, N, C), and their mean, co-moment, minimum and maximum, in float64.

    dtype  dtype of the differences from the approximate mean of the cube, and of their products in a block of rows

    The blocks and the approximate mean depend only on the cube. So the moments of a cube are the same in any batch,
    even with the rounding of float32. Sums over blocks and cubes are float64.
    """
    num_cubes, num_pixels, channels = cubes.shape
    rows = min(ROWS.get(cubes.device.type, ROWS_ELSEWHERE), num_pixels)
    buffer = torch.empty(rows, channels, dtype=dtype, device=cubes.device)
    parts = [_cube_moments(cube, buffer) for cube in cubes]
    count = torch.full((), float(num_pixels), dtype=torch.float64, device=cubes.device)
    total = parts[0]
    for number, part in enumerate(parts[1:], start=1):
        total = merge_moments(total, part, count * number, count)
    return total | {"count": count * num_cubes}


def _cube_moments(pixels: Tensor, buffer: Tensor) -> State:
    """Return mean, co-moment, low and high of pixels (N, C); `buffer` (rows, C) is a work buffer."""
    shift = pixels[:: max(1, len(pixels) // 256)].mean(0).to(buffer.dtype)
    total = torch.zeros(len(shift), dtype=torch.float64, device=pixels.device)
    products = torch.outer(total, total)
    lows, highs = [], []
    for part in torch.split(pixels, len(buffer)):
        away = torch.sub(part, shift, out=buffer[: len(part)])
        fold = math.gcd(
            len(part), 64
        )  # few long rows, because a reduction over many short ones takes four times as long
        total += away.view(-1, fold * len(shift)).sum(0).view(fold, -1).sum(0)
        products += gram(away)
        wide = part.view(-1, fold * len(shift))
        lows.append(wide.amin(0).view(fold, -1).amin(0))
        highs.append(wide.amax(0).view(fold, -1).amax(0))
    return {
        "mean": shift + total / len(pixels),
        "comoment": products - torch.outer(total, total) / len(pixels),
        "low": torch.stack(lows).amin(0).double(),
        "high": torch.stack(highs).amax(0).double(),
    }


def merge_moments(one: State, other: State, first: Tensor, second: Tensor) -> State:
    """Return the merged mean, co-moment, low and high; `first` and `second` are the numbers of pixels.

    Source: Chan, Golub, LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
    """
    share = second / (first + second).clamp(min=1.0)
    apart = other["mean"] - one["mean"]
    return {
        "mean": one["mean"] + share * apart,
        "comoment": one["comoment"] + other["comoment"] + first * share * torch.outer(apart, apart),
        "low": torch.minimum(one["low"], other["low"]),
        "high": torch.maximum(one["high"], other["high"]),
    }


def gram(rows: Tensor) -> Tensor:
    """Return rows^T rows (C, C) in the precision of the rows on a CPU, else in float64.

    On other devices, a float32 product might be computed in TF32 or, under autocast, in half precision, with only three
    digits. numpy's syrk would be faster, but its threads and those of torch would wait for each other, for milliseconds
    per block.
    """
    with torch.autocast(rows.device.type, enabled=False):
        wide = rows if rows.device.type == "cpu" else rows.double()
        return wide.T @ wide


def candidates(pixels: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys (n,) and spectra (n, C) of the candidate pixels of cubes (B, HW, C) with indices (B,)."""
    turn = torch.arange(CANDIDATES, device=index.device)
    numbers = index.long()[:, None] * CANDIDATES + turn
    keys = hash_int64(numbers)
    places = hash_int64(keys) % pixels.shape[1]
    chosen = torch.take_along_dim(pixels, places[:, :, None], dim=1)
    return keys.flatten(), chosen.flatten(0, 1)


def hash_int64(number: Tensor) -> Tensor:
    """Return a bijective hash of int64 numbers; the order of the hashes is pseudorandom.

    Source: splitmix64; Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, figure 17.
    """
    number = number + _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        number = (number ^ ((number >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
    return number ^ ((number >> 31) & (2**33 - 1))


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
