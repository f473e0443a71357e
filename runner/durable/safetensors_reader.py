"""Read safetensors files in bounded memory: only the header at first, then tensors or rows of them.

safetensors' own reader maps the file into memory: a file that is truncated meanwhile would kill the process (SIGBUS),
and all pages that were read count as memory of the process until the file is closed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from runner.base.errors import DataError
from runner.base.text import dtype_name
from runner.durable import files
from runner.durable.safetensors_header import InvalidFormat, invalid_header, read_header, read_into
from runner.durable.safetensors_writer import DTYPES, view_bytes
from runner.tensors.stored_tensor import StoredTensor


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name, in the order of the file; reads only the header.

    Raises InvalidFormat if the header is invalid, StorageError if the file cannot be read.
    """
    size = files.file_size(path)
    header, position = read_header(path)
    try:
        spans = sorted((*entry["data_offsets"], name) for name, entry in header.items())
        tensors: dict[str, StoredTensor] = {}
        end = 0
        for start, stop, name in spans:
            entry = header[name]
            shape = entry["shape"]
            if not all(type(length) is int and 0 <= length < 1 << 63 for length in shape):
                raise ValueError(f"invalid shape {shape}")
            dtype = _TORCH_DTYPES[entry["dtype"]]
            row_bytes = math.prod(shape[1:]) * dtype.itemsize
            tensor = StoredTensor(torch.Size(shape), dtype, partial(_fill, path, position + start, row_bytes))
            if start != end or stop - start != tensor.nbytes:
                raise InvalidFormat(f"{name} has {tensor.nbytes} bytes, but its offsets are {start} to {stop}")
            tensors[name], end = tensor, stop
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise invalid_header(error) from error
    if position + end != size:
        raise InvalidFormat(f"its tensors have {end} bytes, but the file has {size - position} after the header")
    return tensors


def _fill(path: Path, offset: int, row_bytes: int, start: int, rows: Tensor) -> None:
    read_into(path, offset + start * row_bytes, view_bytes(rows))


def join_parts(parts: Sequence[dict[str, StoredTensor]], where: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint in several files, `parts`: each has some rows of each tensor.

    A tensor may also be in one part only. Raises DataError if the parts are inconsistent.
    """
    tensors: dict[str, StoredTensor] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        pieces = [part[name] for part in parts if name in part]
        problem = ""
        if len(pieces) not in (1, len(parts)):
            problem = f"it is in {len(pieces)} of {len(parts)} parts"
        elif len({(piece.dtype, piece.shape[1:], len(piece.shape)) for piece in pieces}) > 1:
            problem = "they have different shapes or dtypes"
        elif len(pieces) > 1 and not pieces[0].shape:
            problem = "it is a scalar in several parts"
        if problem:
            raise DataError(
                f"cannot join the parts of {name}: {problem}",
                where=str(where),
                fix="use another checkpoint, or copy this one again with all its parts",
            )
        tensors[name] = _join(pieces)
    return tensors


def _join(pieces: Sequence[StoredTensor]) -> StoredTensor:
    if len(pieces) == 1:
        return pieces[0]
    num_rows = sum(piece.shape[0] for piece in pieces)

    def fill(start: int, rows: Tensor) -> None:
        begin = 0
        for piece in pieces:
            first, last = max(start, begin), min(start + len(rows), begin + piece.shape[0])
            if first < last and rows.numel():
                piece.fill(first - begin, rows[first - start : last - start])
            begin += piece.shape[0]

    return StoredTensor(torch.Size((num_rows, *pieces[0].shape[1:])), pieces[0].dtype, fill)


_TORCH_DTYPES = {
    DTYPES[dtype_name(dtype)]: dtype
    for dtype in (
        torch.uint64, torch.int64, torch.float64, torch.complex64, torch.float32, torch.uint32, torch.int32,
        torch.bfloat16, torch.float16, torch.uint16, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip
