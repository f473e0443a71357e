"""Conversion of values that hooks log."""

from __future__ import annotations

import warnings

import torch

from runner.engine.evaluation.media import parse_number


def test_converting_a_tensor_that_requires_grad_does_not_warn() -> None:
    value = torch.tensor([0.5], requires_grad=True)
    is_always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # torch warns only once per process otherwise
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert parse_number("norm", value) == 0.5
    finally:
        torch.set_warn_always(is_always)
