"""Bounds for the rounding error between two orders of the same sum, from the number format and the number of terms.

Processors, libraries and other micro-batch sizes add in different orders, so float32 results of two machines differ in
their last bits, and neither is exact. Compare each with a float64 result of one process.

For the kernels of other processors, set ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE, or
avx2, AVX2 and AVX2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf, sqrt
from typing import Any

import numpy as np
import torch

PROMISED = {torch.float64: 1e-12, torch.float32: 1e-6}  # relative error of an update, however divided; docs/losses.md
PROMISED_OF_TASKS = 1e-9  # error of shipped tasks in float64, relative to the largest weight change; docs/own-task.md
# Relative error of weights trained by Adam in float64. Rounding errors are relative to the largest gradient, but Adam
# divides each gradient by its own magnitude. If its magnitude is a thousandth of the largest one, the relative error is
# a thousand times larger.
ADAPTIVE = 1e3 * PROMISED[torch.float64]


def allowed(dtype: torch.dtype, terms: float, growth: float = 1.0) -> float:
    """Return growth * eps * sqrt(terms), at most growth * PROMISED; relative to the largest of the compared numbers.

    terms   number of additions that give a result. Each has an error of at most eps/2, and errors add up like a random
    walk, hence sqrt(terms) and not terms. Source: Higham and Mary, A New Approach to Probabilistic Rounding
            Error Analysis, SIAM J. Sci. Comput. 41 (2019), theorem 2.4.
    growth  factor by which the function amplifies a relative error of its input, 3 for a cube
    Where terms of both signs cancel, the error relative to the element itself may be larger; hence the common scale.
    """
    return growth * min(PROMISED.get(dtype, inf), torch.finfo(dtype).eps * sqrt(terms))


def distance(one: Any, other: Any) -> float:
    """Return the largest difference, divided by the largest number, of nested lists, arrays, or mappings with equal
    keys.
    """
    left, right = (np.concatenate([*_parts(value)]) for value in (one, other))
    assert left.shape == right.shape
    if isinstance(one, Mapping):
        assert one.keys() == other.keys()
    largest = float(np.abs(left).max())
    difference = float(np.abs(left - right).max())
    return difference / largest if difference else 0.0


def distance_of_each(one: Any, other: Any) -> float:
    """Return the largest distance between values of two mappings, each relative to its own largest number."""
    if not isinstance(one, Mapping):
        return distance(one, other)
    assert one.keys() == other.keys()
    return max(distance_of_each(value, other[name]) for name, value in one.items())


def assert_close(
    result: Any, expected: Any, terms: float, growth: float = 1.0, dtype: torch.dtype | None = None
) -> None:
    """Assert that tensors, or sequences of them, differ by rounding only: each by at most `allowed`.

    dtype of the computation, if it differs from that of the tensors
    """
    for one, other in zip(_tensors(result), _tensors(expected), strict=True):
        assert one.shape == other.shape
        if one.numel():
            assert distance(one, other) <= allowed(dtype or one.dtype, terms, growth)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield torch.as_tensor(value)
    else:
        for item in value:
            yield from _tensors(item)


def _parts(value: Any) -> Iterator[np.ndarray[Any, np.dtype[np.float64]]]:
    if isinstance(value, Mapping):
        for name in sorted(value):
            yield from _parts(value[name])
    elif isinstance(value, Sequence) and any(isinstance(item, (Mapping, Sequence)) for item in value):
        for item in value:
            yield from _parts(item)
    else:
        content = value.detach().double().numpy() if isinstance(value, torch.Tensor) else value
        yield np.asarray(content, dtype=np.float64).reshape(-1)
