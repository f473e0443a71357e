"""Explain the numbered errors (XID) of the NVIDIA driver and what to do about them.

Source: NVIDIA, XID Errors (docs.nvidia.com/deploy/xid-errors), told in fewer words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Xid:
    """What a number means, and what to do."""

    meaning: str
    advice: str


def explain(number: int) -> Xid:
    """Return what an XID means, also for a number that is not in the table."""
    return XIDS.get(number, Xid("an error that is not in accel-run's table", _LOOK_IT_UP))


_LOOK_IT_UP = "look it up at docs.nvidia.com/deploy/xid-errors; the kernel log (dmesg) has its details"
_OWN_CODE = "run again with CUDA_LAUNCH_BLOCKING=1, then under compute-sanitizer; hardware only if another GPU is well"
_RESET = "stop what runs there and reset the GPU (nvidia-smi --gpu-reset) or restart the machine; replace it if needed"
_SOON = "the run may go on; reset the GPU when it ends, so that the bad memory is taken out of use"
_NVLINK = "restart the machine; if it recurs, have the bridge or the NVLink connection checked"
_RESEAT = "restart the machine; check seating, power cables and temperature, and the slot with another GPU"
_DRIVER = "restart the machine; if it recurs, take a newer driver, then have the GPU checked"

XIDS: Mapping[int, Xid] = {
    8: Xid("the GPU stopped working on a program", "start the program again"),
    11: Xid("commands for the GPU were damaged on the way", _DRIVER),
    13: Xid("a kernel did what is not allowed, such as an access out of bounds", _OWN_CODE),
    31: Xid("a kernel touched memory that is not its own", _OWN_CODE),
    32: Xid("commands for the GPU were damaged on the way", _RESEAT),
    38: Xid("the driver's firmware failed", _DRIVER),
    43: Xid("a program made a fault and its work on the GPU was ended; the GPU is well", _OWN_CODE),
    44: Xid("the GPU failed while it changed between programs", _RESET),
    45: Xid("a program's work on the GPU was ended, stopped or after another error", "see the error before"),
    46: Xid("the GPU stopped working", _RESET),
    48: Xid("the GPU's memory has an error that cannot be corrected (two bits)", _RESET),
    54: Xid("the auxiliary power cable is missing", "plug it in"),
    61: Xid("the GPU's own controller stopped at a warning", _RESET),
    62: Xid("the GPU's own controller halted", _RESET),
    63: Xid("a bad place of the GPU's memory was noted, to be taken out of use", _SOON),
    64: Xid("a bad place of the GPU's memory could not be taken out of use", _RESET),
    68: Xid("the video decoder failed", _DRIVER),
    69: Xid("a kernel asked for what the GPU does not know", _OWN_CODE),
    74: Xid("an NVLink connection has errors", _NVLINK),
    79: Xid("the GPU has fallen off the bus: the machine no longer sees it", _RESEAT),
    92: Xid("the GPU's memory has many errors that were corrected (one bit)", "have the GPU checked when the run ends"),
    94: Xid("the GPU's memory has an error that was contained: only the program that met it is ended", _SOON),
    95: Xid("the GPU's memory has an error that was not contained: all programs on the GPU are hit", _RESET),
    109: Xid("the GPU took too long to change between programs", _RESET),
    110: Xid("the GPU refused something for its safety", _DRIVER),
    119: Xid("the GPU's system processor (GSP) did not answer the driver in time", _RESET),
    120: Xid("the GPU's system processor (GSP) failed", _RESET),
    121: Xid("the connection of CPU and GPU (C2C) corrected an error", "reset the GPU when the run ends"),
    122: Xid("the driver could not read the GPU's own memory of settings", _DRIVER),
    123: Xid("the driver could not reach the GPU's power management", _DRIVER),
    140: Xid("the GPU's memory has an error that was not recovered from", _RESET),
    143: Xid("the GPU did not start", _DRIVER),
    **dict.fromkeys(range(144, 151), Xid("an NVLink connection has errors", _NVLINK)),
    154: Xid("the driver now asks for another way to recover", "nvidia-smi -q names it under GPU Recovery Action"),
    160: Xid("a bad place of the GPU's memory was marked for repair", _SOON),
    171: Xid("the GPU's main memory has an error that cannot be corrected", _RESET),
    172: Xid("the GPU's inner memory has an error that cannot be corrected", _RESET),
}  # fmt: skip
