"""Byte unigram and bigram baselines that a language model has to beat."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .data import read_tokens

Array = np.ndarray[Any, Any]


def unigram_bits_per_byte(train: Array, val: Array) -> float:
    """Return the bits per byte of `val`, without its first byte, given the byte frequencies of `train`.

    Add-one smoothing gives a byte that does not occur in `train` a finite cost.
    """
    counts = 1.0 + np.bincount(train, minlength=256)
    return float(-np.log2(counts / counts.sum())[val[1:]].mean())


def bigram_bits_per_byte(train: Array, val: Array) -> float:
    """Return the bits per byte of `val`, without its first byte, given the frequencies of byte pairs in `train`."""
    counts = 1.0 + np.bincount(_pairs(train), minlength=256 * 256).reshape(256, 256)
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    return float(bits.reshape(-1)[_pairs(val)].mean())


def bits_per_byte_baselines(text: Mapping[str, Path], cache: Path) -> dict[str, float]:
    """Return both baselines for the validation text; they are computed once and stored in `cache`."""
    stored = cache / "baselines.json"
    if stored.exists():
        return {name: float(value) for name, value in json.loads(stored.read_text(encoding="utf-8")).items()}
    train, val = read_tokens(text["train"], np.uint8), read_tokens(text["val"], np.uint8)
    figures = {"unigram": unigram_bits_per_byte(train, val), "bigram": bigram_bits_per_byte(train, val)}
    draft = cache / f".baselines-{os.getpid()}"
    draft.write_text(json.dumps(figures), encoding="utf-8")
    draft.replace(stored)
    return figures


def _pairs(tokens: Array) -> Array:
    return tokens[:-1].astype(np.int32) * 256 + tokens[1:]
