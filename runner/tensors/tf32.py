"""TensorFloat-32: the only module that sets torch's flags for float32 matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from runner.base.errors import TaskFault

Level = Literal["highest", "high", "medium"]


@contextmanager
def float32_matmul(level: Level, cudnn: bool) -> Iterator[None]:
    """Set the precision of float32 matrix products inside the context, and restore it on exit.

    level  highest: float32; high: TF32 with 10 bits of mantissa; medium: bfloat16 if torch has such kernels
    cudnn  whether cuDNN's convolutions and recurrent layers may use TF32 (torch's default: yes)
    Raises TaskFault if torch's newer `fp32_precision` flags have been set.
    """
    before = _read()
    _write(level, cudnn)
    try:
        yield
    finally:
        _write(*before)


# torch has two sets of switches: the older functions below, and the newer `fp32_precision` attributes. Use the older
# set with torch 2.9 to 2.13, because Inductor reads it, and reading it raises "mix of the legacy and new APIs" if only
# the newer one was written (pytorch issues 166387 and 189955). When torch removes the older set, only these two
# functions have to change.


def _read() -> tuple[str, bool]:
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError as error:
        raise TaskFault(
            "torch's float32 switches must not be changed by a task, but fp32_precision was set: "
            + str(error).split("\n", 1)[0],
            fix="remove torch.backends.*.fp32_precision from the task and use precision=fp32 or precision=tf32",
        ) from error


def _write(level: str, cudnn: bool) -> None:
    torch.set_float32_matmul_precision(level)
    torch.backends.cudnn.allow_tf32 = cudnn
