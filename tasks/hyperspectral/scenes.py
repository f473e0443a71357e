"""Generated cubes with implanted targets: photographs through a filter bank, or synthetic spectra.

A cube is the product of planes (H, W, P) and filters (P, C), plus noise. Targets and decoys are ellipses with
absorption lines: targets always at the same two wavelengths, decoys at others. So a decoy is as anomalous as a target.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.base.errors import ConfigError, InputMissing, Problem
from runner.base.packages import require
from runner.base.task import sample_rng

Array = np.ndarray[Any, np.dtype[np.float32]]

SPLITS = ("train", "val", "test")
PHOTOGRAPHS = {
    "train": ("astronaut.png", "coffee.png", "rocket.jpg", "hubble_deep_field.jpg"),
    "val": ("chelsea.png", "ihc.png"),
    "test": ("motorcycle_left.png", "retina.jpg"),
}
BLURS = (0.0, 0.7, 1.4, 2.8)  # sigma in pixels, by wavelength, like diffraction
LINES = (
    (0.33, 1.0),
    (0.62, 0.7),
)  # absorption lines of a target: position from 0 to 1 over the channels, and relative depth
LINE_WIDTH = 0.035
DEPTH = (0.06, 0.25)  # fraction of the light that is absorbed
NOISE = 0.01
ENDMEMBERS = 8
SEED = 20250301  # the data is the same in every run
VERSION = 1  # version of the planes in the cache


class Scenes:
    """Sample i of a split: cube (H, W, C) float32, mask (H, W) uint8 of 0 and 1, index; the same in every run."""

    def __init__(self, split: str, num_cubes: int, height: int, width: int, channels: int) -> None:
        self.split, self.num_cubes, self.shape = split, num_cubes, (height, width, channels)
        self.has_masks = True

    def __len__(self) -> int:
        return self.num_cubes

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the collated batch: cube (B, H, W, C), mask (B, H, W), index (B,)."""
        cubes = np.empty((len(indices), *self.shape), dtype=np.float32)
        masks = np.zeros((len(indices), *self.shape[:2]), dtype=np.uint8)
        for cube, mask, index in zip(cubes, masks, indices, strict=True):
            rng = sample_rng(SEED, SPLITS.index(self.split), int(index))
            np.matmul(self.planes(int(index), rng), self.filters(), out=cube)
            implant(cube, mask, rng)
            np.add(cube, NOISE * rng.standard_normal(cube.shape, dtype=np.float32), out=cube)
        return {"cube": torch.from_numpy(cubes), "mask": torch.from_numpy(masks), "index": torch.tensor(indices)}

    def planes(self, index: int, rng: np.random.Generator) -> Array:
        """Return the planes (H, W, P) of the cube."""
        raise NotImplementedError

    def filters(self) -> Array:
        """Return the weight of each plane in each channel, (P, C)."""
        raise NotImplementedError

    def title(self, index: int) -> str:
        """Return the title of a cube in plots."""
        raise NotImplementedError

    def labeled(self) -> Scenes:
        """Return only the cubes with a mask: all of them have one."""
        return self


class PhotographScenes(Scenes):
    """Crops of photographs that come with scikit-image; each photograph belongs to only one split."""

    def __init__(
        self, files: Sequence[Path], split: str, num_cubes: int, height: int, width: int, channels: int
    ) -> None:
        super().__init__(split, num_cubes, height, width, channels)
        self.files = files

    def planes(self, index: int, rng: np.random.Generator) -> Array:
        photograph = np.load(self.files[index % len(self.files)], mmap_mode="r")
        height, width, _ = self.shape
        top = rng.integers(photograph.shape[0] - height + 1)
        left = rng.integers(photograph.shape[1] - width + 1)
        crop: Array = np.ascontiguousarray(photograph[top : top + height, left : left + width])
        return crop

    def filters(self) -> Array:
        """Return the filter bank: each channel responds to its wavelength; longer wavelengths are blurrier."""
        wavelength = np.linspace(0, 1, self.shape[2])
        colour = np.exp(-0.5 * ((wavelength - np.array([[0.75], [0.45], [0.15]])) / 0.22) ** 2)
        place = wavelength * (len(BLURS) - 1)
        blur = np.clip(1 - np.abs(place - np.arange(len(BLURS))[:, None]), 0, None)
        bank = (blur[:, None] * (colour / colour.sum(0))).reshape(-1, self.shape[2])
        return np.asarray(bank, np.float32)

    def title(self, index: int) -> str:
        return f"{self.files[index % len(self.files)].stem}, crop {index}"


class SyntheticScenes(Scenes):
    """Smooth mixtures of a few smooth spectra: for speed measurements at any size."""

    def planes(self, index: int, rng: np.random.Generator) -> Array:
        height, width, _ = self.shape
        coarse = rng.standard_normal((9, 9, ENDMEMBERS), dtype=np.float32)
        mixtures = np.tensordot(
            _interpolation(height, 9), np.tensordot(_interpolation(width, 9), coarse, (1, 1)), (1, 1)
        )
        weights = np.exp(2 * mixtures)
        weights /= weights.sum(-1, keepdims=True)
        return weights

    def filters(self) -> Array:
        """Return the spectra: sums of three broad peaks."""
        rng = np.random.Generator(np.random.Philox(SEED))
        wavelength = np.linspace(0, 1, self.shape[2])
        middle, width, height = rng.random((3, ENDMEMBERS, 3, 1))
        peaks = (0.2 + height) * np.exp(-0.5 * ((wavelength - middle) / (0.08 + 0.2 * width)) ** 2)
        return np.asarray(0.1 + 0.4 * peaks.sum(1), np.float32)

    def title(self, index: int) -> str:
        return f"synthetic {index}"


def implant(cube: Array, mask: np.ndarray[Any, np.dtype[np.uint8]], rng: np.random.Generator) -> None:
    """Implant targets and as many decoys in cube (H, W, C), in place; mask (H, W) becomes 1 at targets."""
    height, width, channels = cube.shape
    wavelength = np.linspace(0, 1, channels)
    drawn = []
    for number in range(2 * int(rng.integers(2, 5))):
        is_target = number % 2 == 1
        lines = LINES if is_target else draw_decoy_lines(rng)
        drawn.append((is_target, lines, _ellipse(height, width, rng), rng.uniform(*DEPTH)))
    # Decoys first: a decoy on top of a target would add its lines to pixels that the mask assigns to the target.
    for is_target, lines, inside, depth in sorted(drawn, key=lambda each: each[0]):
        absorbed = sum(share * np.exp(-0.5 * ((wavelength - at) / LINE_WIDTH) ** 2) for at, share in lines)
        spectra = cube[inside]
        cube[inside] = spectra - ((spectra + 0.05) * (depth * absorbed)).astype(np.float32)
        mask[inside] = is_target


def photograph_scenes(cache: Path, split: str, num_cubes: int, height: int, width: int, channels: int) -> Scenes:
    """Return crops of the photographs of a split.

    Raises InputMissing if scikit-image does not contain them, ConfigError if crops are larger than a photograph.
    """
    files = [_prepared(cache, name) for name in PHOTOGRAPHS[split]]
    smallest = np.min([np.load(file, mmap_mode="r").shape[:2] for file in files], axis=0)
    problems = [
        Problem(f"must be at most {most}, the size of the smallest photograph, but is {wanted}", f"task.{name}")
        for name, wanted, most in zip(("height", "width"), (height, width), smallest, strict=True)
        if wanted > most
    ]
    if problems:
        raise ConfigError(problems)
    return PhotographScenes(files, split, num_cubes, height, width, channels)


def _prepared(cache: Path, name: str) -> Path:
    """Return the planes of a photograph as an array (H, W, 3 x blurs) float32 from 0 to 1, created once."""
    prepared = cache / f"planes-v{VERSION}" / f"{Path(name).stem}.npy"
    if prepared.exists():
        return prepared
    # Read from the folder of the package, because the functions of skimage.data download missing files.
    source = Path(require("skimage.data", "hyperspectral").__file__).parent / name
    if not source.is_file():
        what = f"{source} does not exist: this installation of scikit-image has no photographs"
        raise InputMissing(what, where="task.data", fix="install a complete scikit-image, or use task.data=synthetic")
    picture = require("skimage.io", "hyperspectral").imread(source)[..., :3].astype(np.float32) / 255
    smaller = max(1, min(picture.shape[:2]) // 400)
    rows, columns = (length // smaller for length in picture.shape[:2])
    picture = picture[: rows * smaller, : columns * smaller]
    picture = picture.reshape(rows, smaller, columns, smaller, 3).mean((1, 3))
    blurred = require("skimage.filters", "hyperspectral").gaussian
    planes = np.concatenate([blurred(picture, sigma, channel_axis=-1) for sigma in BLURS], axis=-1)
    prepared.parent.mkdir(parents=True, exist_ok=True)
    draft = prepared.with_name(f".{prepared.stem}-{os.getpid()}.npy")
    np.save(draft, planes.astype(np.float32))
    draft.replace(prepared)
    return prepared


def _ellipse(height: int, width: int, rng: np.random.Generator) -> Any:
    """Return which pixels (H, W) are inside an ellipse of random position, size and orientation."""
    size = min(height, width)
    along, across = rng.uniform(0.03, 0.09, 2) * size
    angle = rng.uniform(0, math.pi)
    y = np.arange(height)[:, None] - rng.uniform(0, height)
    x = np.arange(width) - rng.uniform(0, width)
    first, second = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
    return (first / along) ** 2 + (second / across) ** 2 <= 1


def draw_decoy_lines(rng: np.random.Generator) -> list[tuple[float, float]]:
    """Return two absorption lines that differ from those of a target."""
    places: list[float] = []
    while len(places) < 2:
        at = float(rng.uniform(0.05, 0.95))
        if all(abs(at - line) > 3 * LINE_WIDTH for line in [*(known for known, _ in LINES), *places]):
            places.append(at)
    return [(at, share) for at, (_, share) in zip(places, LINES, strict=True)]


def _interpolation(fine: int, coarse: int) -> Array:
    """Return the matrix (fine, coarse) of linear interpolation between coarse points."""
    place = np.linspace(0, coarse - 1, fine)
    return np.asarray(np.clip(1 - np.abs(place[:, None] - np.arange(coarse)), 0, None), np.float32)
