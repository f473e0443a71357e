"""Explain the numbered errors (XID) of the NVIDIA driver and what to do about them.

Source: NVIDIA, XID Errors (docs.nvidia.com/deploy/xid-errors), abridged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Xid:
    """The meaning of an XID, and the advice for it."""

    meaning: str
    advice: str


def explain_xid(number: int) -> Xid:
    """Return the meaning of an XID, also of a number that is not in the table."""
    return XIDS.get(number, Xid("an error that is not in accel-run's table", _LOOK_IT_UP))


_LOOK_IT_UP = "look it up at docs.nvidia.com/deploy/xid-errors; the kernel log (dmesg) has details"
_OWN_CODE = "run again with CUDA_LAUNCH_BLOCKING=1, then under compute-sanitizer; suspect hardware if another GPU works"
_RESET = (
    "stop all processes on it and reset it (nvidia-smi --gpu-reset) or restart the machine; replace it if it recurs"
)
_SOON = "the run may continue; reset the GPU when it ends, so that the faulty memory is retired"
_NVLINK = "restart the machine; if it recurs, have the bridge or the NVLink connection checked"
_RESEAT = "restart the machine; check seating, power cables and temperature, and try another GPU in the slot"
_DRIVER = "restart the machine; if it recurs, install a newer driver, then have the GPU checked"

XIDS: Mapping[int, Xid] = {
    8: Xid("the GPU stopped processing a program", "start the program again"),
    11: Xid("commands for the GPU were corrupted (push buffer)", _DRIVER),
    13: Xid("a kernel raised an exception, such as an out-of-bounds access", _OWN_CODE),
    31: Xid("a kernel accessed an invalid memory address (page fault)", _OWN_CODE),
    32: Xid("commands for the GPU were corrupted (push buffer)", _RESEAT),
    38: Xid("driver firmware error", _DRIVER),
    43: Xid("a program caused a fault and was stopped on the GPU; the GPU is healthy", _OWN_CODE),
    44: Xid("the GPU failed during a context switch", _RESET),
    45: Xid("the work of a program was stopped, on request or after another error", "see the previous error"),
    46: Xid("the GPU stopped processing", _RESET),
    48: Xid("uncorrectable (double-bit) ECC error in GPU memory", _RESET),
    54: Xid("auxiliary power is not connected", "connect the power cable"),
    61: Xid("the GPU's microcontroller stopped with a warning", _RESET),
    62: Xid("the GPU's microcontroller halted", _RESET),
    63: Xid("a faulty row or page of GPU memory was recorded for remapping or retirement", _SOON),
    64: Xid("remapping or retirement of faulty GPU memory failed", _RESET),
    68: Xid("video decoder exception", _DRIVER),
    69: Xid("a kernel used an unsupported operation (graphics engine class error)", _OWN_CODE),
    74: Xid("error of an NVLink connection", _NVLINK),
    79: Xid("the GPU has fallen off the bus: the machine no longer detects it", _RESEAT),
    92: Xid("high rate of corrected (single-bit) ECC errors", "have the GPU checked when the run ends"),
    94: Xid("contained memory error: only the program that accessed the memory is stopped", _SOON),
    95: Xid("uncontained memory error: all programs on the GPU are affected", _RESET),
    109: Xid("context switch timeout", _RESET),
    110: Xid("the GPU reported a security fault", _DRIVER),
    119: Xid("the GPU system processor (GSP) did not answer the driver in time", _RESET),
    120: Xid("the GPU system processor (GSP) failed", _RESET),
    121: Xid("corrected error of the connection between CPU and GPU (C2C)", "reset the GPU when the run ends"),
    122: Xid("the driver could not read the GPU's configuration memory (SPI)", _DRIVER),
    123: Xid("the driver could not communicate with the GPU's power management", _DRIVER),
    140: Xid("unrecovered ECC error", _RESET),
    143: Xid("GPU initialization failed", _DRIVER),
    **dict.fromkeys(range(144, 151), Xid("error of an NVLink connection", _NVLINK)),
    154: Xid("the recommended recovery action changed", "nvidia-smi -q shows it as GPU Recovery Action"),
    160: Xid("a faulty location of GPU memory was marked for repair", _SOON),
    171: Xid("uncorrectable error in the GPU's DRAM", _RESET),
    172: Xid("uncorrectable error in the GPU's SRAM", _RESET),
}  # fmt: skip
