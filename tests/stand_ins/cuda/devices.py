"""Descriptions of the stand-in's devices, which processes receive in an environment variable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

VARIABLE = "STAND_IN_DEVICES"
GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A GPU, as in torch.cuda.get_device_properties.

    memory_gib   total memory, as the driver reports it
    context_gib  memory of the context and loaded kernels before the first tensor
    number       index in the machine, which CUDA_VISIBLE_DEVICES does not change
    mig_uuid     UUID of a MIG instance, of which a process sees only one; empty for a full GPU
    """

    name: str
    capability: tuple[int, int]
    memory_gib: float
    multiprocessors: int
    context_gib: float = 0.4
    number: int = 0
    mig_uuid: str = ""

    @property
    def uuid(self) -> str:
        """Return the UUID in NVML's format."""
        return self.mig_uuid or f"GPU-00000000-0000-4000-8000-{self.number:012d}"

    @property
    def memory(self) -> int:
        return int(self.memory_gib * GIB)


T4 = Device("Tesla T4", (7, 5), 14.56, 40)
RTX_3050_TI = Device("NVIDIA GeForce RTX 3050 Ti Laptop GPU", (8, 6), 3.81, 20)
RTX_2080_TI = Device("NVIDIA GeForce RTX 2080 Ti", (7, 5), 10.57, 68)
RTX_3070 = Device("NVIDIA GeForce RTX 3070", (8, 6), 7.79, 46)
A100 = Device("NVIDIA A100-SXM4-40GB", (8, 0), 39.39, 108)
MIG = tuple(
    Device(
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0), 39.25, 42, mig_uuid=f"MIG-0000{which}-1111-5000-8000-000000000000"
    )
    for which in ("aaaa", "bbbb")
)
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 79.11, 132)

MACHINES: dict[str, tuple[Device, ...]] = {
    "t4": (T4,),
    "rtx3050ti": (RTX_3050_TI,),
    "pair": (RTX_2080_TI, RTX_3070),  # 11 GB + 8 GB
    "a100": (A100,),
    "a100x2": (A100, A100),
    "a100mig": MIG,
    "h100": (H100,),
    "h100x8": (H100,) * 8,
}


def encode(devices: Sequence[Device]) -> str:
    return json.dumps([{**asdict(device), "number": number} for number, device in enumerate(devices)])


def decode(text: str) -> tuple[Device, ...]:
    return tuple(Device(**{**each, "capability": tuple(each["capability"])}) for each in json.loads(text))
