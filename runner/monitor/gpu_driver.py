"""Open the interface of the GPU driver: NVML, or AMD SMI on machines with AMD GPUs."""

from __future__ import annotations

from runner.monitor.amd_smi import open_amd_smi
from runner.monitor.nvml import Nvml, open_nvml


def open_driver() -> Nvml:
    """Return the machine's GPUs. Never raises: if there are none, `why_not` has the reason.

    The driver counts its users: call close() on each result.
    """
    nvml = open_nvml()
    if nvml.gpus or nvml.notes:
        return nvml
    amd = open_amd_smi()
    if amd is None or not (amd.gpus or amd.notes):
        return nvml
    nvml.close()
    return amd
