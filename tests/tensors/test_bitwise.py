"""Bitwise comparison of tensors of any dtype and memory layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runner.tensors.bitwise import bitwise_equal, view_bytes

NUMBERS = torch.arange(12.0).view(3, 4)
KINDS = {
    "empty": torch.zeros(0),
    "scalar": torch.tensor(3),
    "bool": NUMBERS > 3,
    "bfloat16": NUMBERS.bfloat16(),
    "complex": torch.complex(NUMBERS, -NUMBERS),
    "conjugated": torch.complex(NUMBERS, -NUMBERS).conj(),
    "negated": torch.complex(NUMBERS, NUMBERS)[0].conj().imag,
    "transposed": NUMBERS.T,
    "one row of a column": NUMBERS[:1, 0],
    "expanded": NUMBERS[:1].expand(3, -1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_has_the_same_bits_as_its_copy(kind: str) -> None:
    view: Tensor = KINDS[kind]
    copy = torch.empty(view.shape, dtype=view.dtype).copy_(view)
    assert bitwise_equal(view, copy)
    assert view_bytes(view).numel() == view.nbytes
    assert not view.numel() or not bitwise_equal(view, torch.empty_like(copy).copy_(view == 0))
