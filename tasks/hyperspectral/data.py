"""Hyperspectral cubes: the interface of a split, and the splits of a folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from runner.base.errors import DataError, InputMissing

from .envi import FORMATS, open_cube, open_mask
from .metrics import UNKNOWN

SPLITS = ("train", "val", "test")


class Cubes(Protocol):
    """Samples with cube (H, W, C) float32, mask (H, W) uint8 of 0, 1 and UNKNOWN, and their index."""

    shape: tuple[int, int, int]
    has_masks: bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Tensor]: ...

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the collated batch: cube (B, H, W, C), mask (B, H, W), index (B,)."""

    def title(self, index: int) -> str:
        """Return the title of a cube in plots."""

    def labeled(self) -> Cubes:
        """Return only the cubes with a mask."""


class Files:
    """The cubes of several files, which must all have `shape`.

    Raises DataError, naming the file, if a cube has a different shape. Reading a sample also raises DataError if its
    mask has a different shape, or a value of its cube is not finite as float32.
    """

    def __init__(self, files: Sequence[Path], shape: tuple[int, int, int]) -> None:
        self.files, self.shape = files, shape
        for file in files:
            if (found := open_cube(file).shape) != shape:
                what = f"must have height, width and channels {shape}, like the other cubes, but has {found}"
                raise DataError(what, where=str(file), fix=FORMATS)
        self.has_masks = any(mask_path(file).is_file() for file in files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        cubes = np.empty((len(indices), *self.shape), dtype=np.float32)
        masks = np.full((len(indices), *self.shape[:2]), UNKNOWN, dtype=np.uint8)
        for cube, mask, index in zip(cubes, masks, indices, strict=True):
            file = self.files[index]
            with np.errstate(over="ignore"):  # values that overflow float32 are reported below
                cube[:] = open_cube(file)
            if not (finite := np.isfinite(cube)).all():
                what = f"must hold finite numbers, but {np.count_nonzero(~finite)} of {cube.size} are not"
                raise DataError(what, where=str(file), fix="replace them with a neighboring value, or remove the file")
            if mask_path(file).is_file():
                mask[:] = open_mask(mask_path(file), self.shape[:2])
        return {"cube": torch.from_numpy(cubes), "mask": torch.from_numpy(masks), "index": torch.tensor(indices)}

    def title(self, index: int) -> str:
        return os.fsencode(self.files[index].stem).decode(errors="replace")  # a file name need not be valid text

    def labeled(self) -> Files:
        return Files([file for file in self.files if mask_path(file).is_file()], self.shape)


def open_folder(folder: Path, channels: int | None) -> dict[str, Files]:
    """Return the splits of a folder: its subfolders train, val and test; without these, val and test get a fifth each.

    channels  required number of channels; None: that of the first cube
    Raises InputMissing if the folder, its cubes or a split is missing, DataError if the shapes of cubes differ.
    """
    if not folder.is_dir():
        raise InputMissing(f"{folder} is not a folder", where="data.path", fix=FORMATS)
    named = {split: _cubes_in(folder / split) for split in SPLITS if (folder / split).is_dir()}
    members = named or _split_by_name(_cubes_in(folder))
    for split in SPLITS:
        if not members.get(split):
            found = ", ".join(f"{len(files)} in {name}" for name, files in members.items())
            what = f"{folder} has no cubes for {split} ({found}); at least three are needed: train, val, test"
            raise InputMissing(what, where="data.path", fix=FORMATS)
    first = members["train"][0]
    height, width, found = open_cube(first).shape
    if channels not in (None, found):
        raise DataError(
            f"must have {channels} channels (task.channels), but has {found}", where=str(first), fix=FORMATS
        )
    return {split: Files(files, (height, width, found)) for split, files in members.items()}


def mask_path(cube: Path) -> Path:
    """Return the path of the mask of a cube, which may not exist."""
    return cube.with_name(f"{cube.stem}_mask.npy")


def _cubes_in(folder: Path) -> list[Path]:
    files = (path for path in folder.iterdir() if path.suffix in (".npy", ".hdr") and not path.stem.endswith("_mask"))
    return sorted(files)


def _split_by_name(files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files by split, ordered by the hashes of their names, so that a new file changes few splits."""
    ordered = sorted(files, key=lambda file: hashlib.sha256(os.fsencode(file.name)).digest())
    held_out = max(1, len(files) // 5)
    return {
        "val": ordered[:held_out],
        "test": ordered[held_out : 2 * held_out],
        "train": sorted(ordered[2 * held_out :]),
    }
