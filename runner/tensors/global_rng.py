"""Seed, save and restore the global random generators of torch, numpy and Python together."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from runner.base.accelerator import cuda_is_available, get_accelerator


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, numpy and Python."""
    # torch.manual_seed records a stack trace for each device type that is not initialized: 0.3 ms. A pipeline
    # seeds before each micro-batch of each stage.
    if torch.accelerator.is_available() or cuda_is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # user tasks may draw from the global generator
    random.seed(seed)


def random_state(device: torch.device) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state of every global generator: tensors, and a JSON-serializable rest."""
    tensors = {"torch": torch.get_rng_state()}
    device_state = get_accelerator(device).generator_state()
    if device_state is not None:
        tensors[device.type] = device_state
    name, keys, *rest = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    assert isinstance(keys, np.ndarray)
    return tensors, {"numpy": [name, keys.tolist(), *rest], "python": [version, list(internal), gauss]}


def restore_random_state(tensors: Mapping[str, torch.Tensor], rest: Mapping[str, Any], device: torch.device) -> None:
    """Restore the state returned by `random_state`."""
    torch.set_rng_state(tensors["torch"])
    if device.type in tensors:
        get_accelerator(device).set_generator_state(tensors[device.type])
    name, keys, *numbers = rest["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *numbers))
    version, internal, gauss = rest["python"]
    random.setstate((version, tuple(internal), gauss))
