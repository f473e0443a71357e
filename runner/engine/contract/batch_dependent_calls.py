"""Find calls outside of torch's modules whose result depends on how an update is divided into micro-batches."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from runner.base.paths import PACKAGE


class BatchDependentCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the lines that draw from a global generator of torch, or that normalize over the batch, while active.

    Three kinds of calls are excluded: batch norms and dropouts of torch.nn, which `describe_dependence` names; draws of
    accel-run itself, which depend only on the samples; and draws from a generator that the caller passes.

    found  file:line -> "batch norm" or "random numbers"
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, str] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch must not wrap `__torch_dispatch__` in `disable`, which would import the compiler."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kind := _kind_of(function, args, kwargs):
            place = _calling_place()
            if place:
                self.found.setdefault(place, kind)
        return function(*args, **kwargs)


def _kind_of(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    is_norm = function._schema.name in _NORMS
    if not is_norm and torch.Tag.nondeterministic_seeded not in function.tags:
        return ""
    arguments = function._schema.arguments
    values = {argument.name: argument.default_value for argument in arguments}
    values |= {**dict(zip(values, args, strict=False)), **kwargs}
    if is_norm:
        return "batch norm" if values.get("training", True) else ""
    # The tag is not enough: attention kernels have it even without dropout, and rrelu even outside of training.
    draws = values.get("generator") is None and values.get("dropout_p", 1) != 0 and values.get("training", True)
    return "random numbers" if draws else ""


def _calling_place() -> str:
    """Return file:line of the innermost frame outside of torch; empty for excluded calls."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(f"{PACKAGE}/") or code.co_name == "instance_norm":
            return ""
        if not code.co_filename.startswith(_TORCH):
            _, is_installed, file = code.co_filename.rpartition("site-packages/")
            return f"{file if is_installed else Path(file).name}:{frame.f_lineno}"
        if isinstance(frame.f_locals.get("self"), _NAMED):
            return ""
        frame = frame.f_back
    return ""


_TORCH = f"{Path(torch.__file__).parent}/"
_NAMED = (_BatchNorm, _DropoutNd, nn.RNNBase, nn.MultiheadAttention)
_NORMS = {
    f"aten::{name}"
    for name in ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm",
                 "miopen_batch_norm", "batch_norm_stats")
}  # fmt: skip
