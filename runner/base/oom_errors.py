"""Detect out-of-memory errors: the requested size, and whether host or device memory was exhausted."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from runner.base.errors import DataError, exception_chain
from runner.base.text import RemoteError, error_message, first_line

Side = Literal["device", "host"]


@dataclass(frozen=True)
class OomCause:
    """An allocation that failed for lack of memory.

    side             memory that was exhausted: of the GPU or of the host
    text             the error message, in one line
    requested_bytes  size of the failed allocation; None if unknown
    place            operation that failed: reading, compiling, forward, backward, optimizer, or COMMUNICATION if NCCL
                     could not allocate its buffers (its communicator is then unusable); BETWEEN for anything else
    """

    side: Side
    text: str
    requested_bytes: int | None
    place: str


def find_oom_cause(error: BaseException) -> OomCause | None:
    """Return the failed allocation behind an error or one of its causes; None for other errors.

    Only messages of torch's allocators, known libraries and the system count: a task's own errors may look similar.
    """
    for kinds, message in _classes_and_messages(error):
        side = _detect_side(kinds, message)
        if side is not None:
            text = _unreadable_sample(error) or first_line(message) or "MemoryError"
            place = COMMUNICATION if "NCCL" in message else _find_place(error)
            return OomCause(side, text, _requested_bytes(message), place)
    return None


def halve(size: int) -> int | None:
    """Return half of a micro-batch size, rounded up; None if it cannot be reduced."""
    return -(-size // 2) if size > 1 else None


def _unreadable_sample(error: BaseException) -> str:
    if isinstance(error, RemoteError):
        return first_line(error.info.message) if DataError.__name__ in error.info.bases else ""
    return error.problems[0].what if isinstance(error, DataError) else ""


def _classes_and_messages(error: BaseException) -> Iterator[tuple[Sequence[str], str]]:
    for exception in exception_chain(error):
        remote = exception.info if isinstance(exception, RemoteError) else None
        if remote is None:  # by class, not by name: a task may define another OutOfMemoryError
            yield [name for name, kind in _KINDS.items() if isinstance(exception, kind)], error_message(exception)
        while remote is not None:
            yield remote.bases, remote.message
            remote = remote.cause


def _detect_side(kinds: Sequence[str], text: str) -> Side | None:
    if "torch.OutOfMemoryError" in kinds:
        return "device"
    if "MemoryError" in kinds or ("OSError" in kinds and text.startswith(_ENOMEM)):
        return "host"
    if "RuntimeError" in kinds and "shared memory" not in text:  # /dev/shm has a separate limit
        if any(message in text for message in _DEVICE_MESSAGES):
            return "device"
        if any(message in text for message in _HOST_MESSAGES):
            return "host"
    return None


def _requested_bytes(text: str) -> int | None:
    match = _REQUESTED.search(text)
    return int(float(match[1].replace(",", "")) * _UNITS[match[2].lower()]) if match else None


def _find_place(error: BaseException) -> str:
    trace, place = error.__traceback__, BETWEEN
    while trace is not None:
        code = trace.tb_frame.f_code
        call = f"{code.co_filename}:{code.co_name}"
        if any(part in call for part in _MODEL_CALLERS):
            place = "forward"
        elif place != BETWEEN:
            place = next((name for part, name in _PLACES if part in call), place)
        trace = trace.tb_next
    return place


_KINDS = {
    "torch.OutOfMemoryError": torch.OutOfMemoryError,
    "MemoryError": MemoryError,
    "OSError": OSError,
    "RuntimeError": RuntimeError,
}
_ENOMEM = f"[Errno {errno.ENOMEM}]"
_DEVICE_MESSAGES = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "MPS backend out of memory",
    "Failed to CUDA calloc",  # NCCL, like the next ones
    "Failed to CUDA host alloc",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
)
_HOST_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "Cannot allocate memory",  # system error message, e.g. from mmap
    "std::bad_alloc",
)
_REQUESTED = re.compile(r"(?:ried to allocate|nable to allocate)\s+([\d.,]+)\s*(bytes|[KMGT]i?B)", re.IGNORECASE)
_UNITS = {"bytes": 1} | {
    f"{letter}{more}": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1) for more in ("b", "ib")
}
BETWEEN = "between updates"
COMMUNICATION = "communication"
_MODEL_CALLERS = (
    "runner/engine/update/loop.py:",
    "runner/engine/parts/phase_kinds.py:updates",
    "runner/engine/evaluation/evaluate.py:",
    "runner/distributed/parallel.py:accumulate",
    "runner/distributed/replicated.py:accumulate",
)
_PLACES = (
    ("torch/_dynamo/convert_frame", "compiling"),
    ("torch/_inductor/compile", "compiling"),
    ("torch/autograd/graph", "backward"),
    ("torch/optim/", "optimizer"),
    ("runner/axes/dataloader", "reading"),
    ("runner/loading/", "reading"),
    ("runner/axes/prefetch", "reading"),
)
