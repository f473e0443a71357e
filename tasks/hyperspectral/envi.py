"""Cubes in files: `.npy` arrays, and ENVI headers with raw data files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from runner.base.errors import DataError, InputMissing

FORMATS = (
    "data.path is a folder of cubes NAME.npy (H, W, C) or NAME.hdr with raw data beside it (ENVI), all of one shape,"
    " each with an optional NAME_mask.npy (H, W) of 0, 1 and 255 for unknown"
)
Array = np.ndarray[Any, Any]


def open_cube(path: Path) -> Array:
    """Return the cube (H, W, C) of a file, mapped into memory. Raises DataError or InputMissing, naming the file."""
    cube = open_envi(path) if path.suffix == ".hdr" else open_array(path)
    if cube.ndim != 3 or cube.dtype.kind not in "fiu":
        raise DataError(
            f"must be a cube (H, W, C) of real numbers, but is {_describe(cube)}", where=str(path), fix=FORMATS
        )
    return cube


def open_mask(path: Path, shape: tuple[int, int]) -> Array:
    """Return the mask (H, W) uint8 of a file. Raises DataError for a wrong shape, or values other than 0, 1 and 255."""
    mask = open_array(path)
    if mask.shape != shape or mask.dtype.kind not in "biu":
        what = f"must be a mask {shape} of integers, but is {_describe(mask)}"
        raise DataError(what, where=str(path), fix=FORMATS)
    if not np.isin(mask, (0, 1, 255)).all():
        found = f"values from {int(mask.min())} to {int(mask.max())}"
        what = f"must contain only 0 (background), 1 (target) and 255 (unknown), but has {found}"
        raise DataError(what, where=str(path), fix=FORMATS)
    return mask.astype(np.uint8)


def open_array(path: Path) -> Array:
    """Return the array of a .npy file, mapped into memory. Raises DataError if it is invalid."""
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"is not an array in .npy format: {error}", where=str(path), fix=FORMATS) from None
    return array


def open_envi(header: Path) -> Array:
    """Return the cube (H, W, C) that an ENVI header describes, mapped into memory.

    The data is in the folder of the header, under the same name without a suffix or with one of RAW_SUFFIXES. Any
    interleave is supported.
    Raises DataError if the header is invalid or does not match the data, InputMissing if the data is missing.
    """
    fields = read_header(header)
    try:
        lines, samples, bands = (int(fields[name]) for name in ("lines", "samples", "bands"))
        kind = np.dtype(DATA_TYPES[int(fields["data type"])])
        axes = INTERLEAVES[fields["interleave"].lower()]
        offset, order = int(fields.get("header offset", 0)), int(fields.get("byte order", 0))
    except (KeyError, ValueError) as error:
        what = "must have lines, samples, bands, a numeric data type and an interleave of bsq, bil or bip; invalid"
        raise DataError(f"{what}: {error}", where=str(header), fix=FORMATS) from None
    beside = [header.with_suffix(suffix) for suffix in RAW_SUFFIXES]
    raw = next((path for path in beside if path.is_file()), None)
    if raw is None:
        what = f"{header} has no data file: expected one of {', '.join(path.name for path in beside)}"
        raise InputMissing(what, where="data.path", fix=FORMATS)
    sizes = {"lines": lines, "samples": samples, "bands": bands}
    shape = tuple(sizes[axis] for axis in axes)
    needed = offset + math.prod(shape) * kind.itemsize
    if raw.stat().st_size < needed:
        what = f"must have {needed} bytes for {lines} x {samples} x {bands} {kind.name}, but has {raw.stat().st_size}"
        raise DataError(what, where=str(raw), fix=FORMATS)
    data = np.memmap(raw, kind.newbyteorder(">" if order else "<"), "r", offset, shape)
    return data.transpose([axes.index(axis) for axis in ("lines", "samples", "bands")])


def read_header(path: Path) -> Mapping[str, str]:
    """Return the fields of an ENVI header, names in lower case. Raises DataError if the file is not a header."""
    text = path.read_text(encoding="latin-1")
    if not text.startswith("ENVI"):
        raise DataError('is not an ENVI header: its first line must be "ENVI"', where=str(path), fix=FORMATS)
    fields = re.findall(r"^\s*([^=\n{}]+?)\s*=\s*(\{[^}]*\}|[^\n]*?)\s*$", text, flags=re.MULTILINE)
    return {name.lower(): value for name, value in fields}


def _describe(array: Array) -> str:
    return f"{array.shape} {array.dtype.name}"


RAW_SUFFIXES = ("", ".raw", ".img", ".dat", ".bin", ".bsq", ".bil", ".bip")
INTERLEAVES = {
    "bsq": ("bands", "lines", "samples"),
    "bil": ("lines", "bands", "samples"),
    "bip": ("lines", "samples", "bands"),
}
DATA_TYPES = {1: "u1", 2: "i2", 3: "i4", 4: "f4", 5: "f8", 12: "u2", 13: "u4", 14: "i8", 15: "u8"}
