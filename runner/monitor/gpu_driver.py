"""Open the interface of the GPUs' driver: NVML, or AMD SMI where there are AMD GPUs."""

from __future__ import annotations

from runner.monitor.amd_smi import open_amd_smi
from runner.monitor.nvml import Nvml, open_nvml


def open_driver() -> Nvml:
    """Return the machine's GPUs, or an Nvml without GPUs that says why; never raises.

    Each call opens the driver once more, which it counts; close() what you opened.
    """
    nvml = open_nvml()
    if nvml.gpus or nvml.notes:
        return nvml
    amd = open_amd_smi()
    if amd is None or not (amd.gpus or amd.notes):
        return nvml
    nvml.close()
    return amd
