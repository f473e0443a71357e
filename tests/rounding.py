"""How far two ways to add the same numbers may differ: from the number format and the length of the sum.

Processors, libraries and passes of other sizes add in other orders, so float32 results of two machines are not equal
bit for bit, and neither is the truth: compare each with a float64 result of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np
import torch

PROMISED = {torch.float64: 1e-12, torch.float32: 1e-6}  # of an update, whatever the shares: relative, at its scale


def allowed(dtype: torch.dtype, terms: float, growth: float = 1.0) -> float:
    """Return growth * eps * sqrt(terms), at most what is promised; relative to the largest of the numbers compared.

    terms   additions that a number went through. Each errs by eps/2 at most, and the errors of many add up like a
            random walk, so sqrt(terms) and not terms. Source: Higham and Mary, A New Approach to Probabilistic Rounding
            Error Analysis, SIAM J. Sci. Comput. 41 (2019), theorem 2.4.
    growth  by how much the function enlarges a relative error of its input, 3 for a cube
    An element may err by more than this relative to itself, where terms of both signs cancel; hence the scale of all.
    """
    return growth * min(PROMISED[dtype], torch.finfo(dtype).eps * sqrt(terms))


def distance(one: Any, other: Any) -> float:
    """Return the largest difference over the largest number in nested lists, arrays, or mappings of the same keys."""
    left, right = (np.concatenate([*_parts(value)]) for value in (one, other))
    assert left.shape == right.shape
    if isinstance(one, Mapping):
        assert one.keys() == other.keys()
    largest = float(np.abs(left).max())
    difference = float(np.abs(left - right).max())
    return difference / largest if difference else 0.0


def distance_of_each(one: Any, other: Any) -> float:
    """Return the largest of the distances of the values of mappings, each relative to its own largest number."""
    if not isinstance(one, Mapping):
        return distance(one, other)
    assert one.keys() == other.keys()
    return max(distance_of_each(value, other[name]) for name, value in one.items())


def _parts(value: Any) -> Iterator[np.ndarray[Any, np.dtype[np.float64]]]:
    if isinstance(value, Mapping):
        for name in sorted(value):
            yield from _parts(value[name])
    elif isinstance(value, Sequence) and any(isinstance(item, (Mapping, Sequence)) for item in value):
        for item in value:
            yield from _parts(item)
    else:
        yield np.asarray(value, dtype=np.float64).reshape(-1)
