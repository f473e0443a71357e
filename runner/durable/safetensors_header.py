"""Read the header of a safetensors file, without torch, so that a wrong file is reported before torch is imported."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

from runner.base.errors import AccelRunError, DataError, SecurityRefusal
from runner.durable import files
from runner.durable.system_errors import storage_errors


class InvalidFormat(Exception):
    """A file that is not in the safetensors format."""


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the entries of the header by the names of the tensors, and the position of the first tensor.

    Raises InvalidFormat if the file has no valid header, StorageError if it cannot be read.
    """
    size = files.file_size(path)
    length = int.from_bytes(read_at(path, 0, min(8, size)), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise InvalidFormat(f"its header would have {length} bytes, but the file has {size}")
    text = read_at(path, 8, length)
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise invalid_header(error) from error
    return header, 8 + length


def invalid_header(error: Exception) -> InvalidFormat:
    """Return the error for a header whose parsing raised this exception."""
    return InvalidFormat(f"its header is invalid: {type(error).__name__}: {error}")


def refusal(file: Path, error: InvalidFormat, where: str) -> AccelRunError:
    """Return the error for a file of weights in another format: SecurityRefusal for a pickle, otherwise DataError.

    where  the setting that the error names
    """
    # Checked only after a failure: a valid file with a header of 640 bytes starts like a pickle.
    if read_at(file, 0, min(4, files.file_size(file))).startswith(_PICKLE_PREFIXES):
        return SecurityRefusal(
            "is a pickle, which may run code when it is read",
            where=where,
            fix=f"convert it to safetensors without executing it: accel-run import {shlex.quote(str(file))}",
        )
    fix = "it may be truncated: download it again" if file.suffix == ".safetensors" else "use a .safetensors file"
    return DataError(f"is not in the safetensors format: {error}", where=where, fix=fix)


def read_at(path: Path, position: int, size: int) -> bytes:
    """Return `size` bytes of a file. Raises DataError if it is shorter, StorageError if it cannot be read."""
    content = bytearray(size)
    read_into(path, position, memoryview(content))
    return bytes(content)


def read_into(path: Path, position: int, view: memoryview) -> None:
    """Fill the view with bytes of a file; raises as `read_at` does."""
    with storage_errors("read", path):
        descriptor = files.open_regular(path)
        try:
            while view:
                count = os.preadv(descriptor, [view], position)
                if not count:
                    raise DataError(
                        "became shorter while it was read",
                        where=str(path),
                        fix="run the command again while no other process changes the file",
                    )
                view, position = view[count:], position + count
        finally:
            os.close(descriptor)


_MAX_HEADER_BYTES = 100 << 20  # the limit of safetensors
_PICKLE_PREFIXES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
