"""Query torch in processes that may not have loaded it. Importing this file does not import torch."""

from __future__ import annotations

import sys


def cuda_is_initialized() -> bool:
    """Return whether this process has initialized CUDA, HIP or XPU and must not be forked; never imports torch."""
    if "torch" not in sys.modules:
        return False
    from runner.base.accelerator import is_initialized

    return is_initialized()


def torch_uuids() -> list[str] | None:
    """Return the UUIDs of torch's GPUs without prefix, in order.

    None if CUDA is not initialized, or if a GPU has no UUID.
    """
    if not cuda_is_initialized():
        return None
    from runner.base.accelerator import device_uuids

    uuids = device_uuids()
    return uuids if all(uuids) else None


def is_stand_in() -> bool:
    """Return whether tests/stand_ins emulates the GPU: results are real, timings are those of the CPU."""
    return "_stand_in" in sys.modules
