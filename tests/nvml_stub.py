"""Simulated GPUs for NVML: a libnvidia-ml.so.1 that answers from a JSON file, and states of common GPUs.

A loaded library cannot be unloaded, so each scenario runs in a separate process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tests" / "monitor" / "nvml_stub" / "nvml_stub.c"
GIB, MIB = 2**30, 2**20

State = dict[str, object]


@dataclass(frozen=True)
class NvmlStub:
    """A folder with three drivers (`new`, `old`, `none`) under which to run Python."""

    folder: Path

    def write(self, state: State) -> Path:
        """Replace the state file atomically, so that readers never see part of it."""
        path, fresh = self.folder / "state", self.folder / "state.new"
        fresh.write_text(as_text(state))
        return fresh.replace(path)

    def environment(self, state: State | None, *, driver: str = "new", **variables: str) -> dict[str, str]:
        """Return an environment in which NVML lists these GPUs. Without a state, there is no NVIDIA driver."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "NVIDIA_"))}
        result = {"LD_LIBRARY_PATH": str(self.folder / ("none" if state is None else driver)), "PYTHONPATH": str(ROOT)}
        return {**clean, **result, "NVML_STUB": str(self.write(state or {})), **variables}

    def run(self, code: str, state: State | None, *, driver: str = "new", **variables: str) -> Any:
        """Run Python code with these GPUs and return the JSON that it printed."""
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=self.environment(state, driver=driver, **variables),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def build_stub(folder: Path) -> NvmlStub:
    """Compile the library into `folder`; skip the test without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        pytest.skip("the NVML stub needs a C compiler, and neither gcc nor cc is installed")
    for driver, options in {"new": [], "old": ["-DOLD_DRIVER"]}.items():
        target = folder / driver / "libnvidia-ml.so.1"
        target.parent.mkdir()
        shared = ["-shared", "-fPIC", "-O1", "-D_GNU_SOURCE", "-pthread", "-Wl,-soname,libnvidia-ml.so.1"]
        subprocess.run([compiler, *shared, *options, "-o", target, SOURCE], check=True, capture_output=True)
    (folder / "none").mkdir()
    (folder / "none" / "libnvidia-ml.so.1").touch()  # cannot be loaded, and hides a real driver
    return NvmlStub(folder)


def change(values: State) -> None:
    """Change readings atomically, in a process that runs with the stub."""
    path = Path(os.environ["NVML_STUB"])
    fresh = path.with_suffix(".new")
    fresh.write_text(as_text(json.loads(path.read_text()) | values))
    fresh.replace(path)


def as_text(state: State) -> str:
    """Return the text of the state file: JSON with one member per line."""
    return json.dumps(state, indent=0)


def gpu(index: int, **values: object) -> dict[str, object]:
    """Return the members of one GPU."""
    return {f"{index}.{key}": value for key, value in values.items()}


DRIVER: State = {"driver": "580.159.03", "cuda": 13000}

T4: State = DRIVER | {"count": 1} | gpu(
    0, name="Tesla T4", uuid="GPU-7447a4c6-0000-4000-8000-000000000000", cc="7.5", bus="00000000:00:04.0",
    memory_total=15360 * MIB, memory_used=8 * GIB, memory_reserved=400 * MIB, util=85, temperature=61, power=54321,
    sm_clock=1590, throttle=4, energy=1234000, processes="4242:1073741824,77:-", memory_util=40, temperature_limit=93,
    power_limit=70000, memory_clock=5000, pcie_generation=3, pcie_width=16,
    ecc_corrected=0, ecc_uncorrected=0,
)  # fmt: skip

PAIR: State = DRIVER | {"count": 2} | gpu(
    0, name="NVIDIA GeForce RTX 2080 Ti", uuid="GPU-2080aaaa-1111-4000-8000-000000000000", cc="7.5",
    bus="00000000:01:00.0", memory_total=11264 * MIB, memory_used=2 * GIB, util=90, temperature=70, power=210000,
    sm_clock=1545, throttle=0, energy=5000,
) | gpu(
    1, name="NVIDIA GeForce RTX 3070", uuid="GPU-3070bbbb-2222-4000-8000-000000000000", cc="8.6",
    bus="00000000:02:00.0", memory_total=8192 * MIB, memory_used=1 * GIB, util=40, temperature=55, power=120000,
    sm_clock=1725, throttle=0, energy=4000,
)  # fmt: skip

SLICED: State = DRIVER | {"count": 1} | gpu(
    0, name="NVIDIA A100-SXM4-80GB", uuid="GPU-a100cccc-3333-4000-8000-000000000000", cc="8.0", bus="00000000:07:00.0",
    memory_total=81920 * MIB, memory_used=0, mig=1, mig_max=7, **{
        "mig.0.name": "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "mig.0.uuid": "MIG-0000aaaa-1111-5000-8000-000000000000",
        "mig.0.memory_total": 40192 * MIB, "mig.0.memory_used": 0, "mig.0.gi": 1, "mig.0.ci": 0,
        "mig.1.name": "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "mig.1.uuid": "MIG-0000bbbb-1111-5000-8000-000000000000",
        "mig.1.memory_total": 40192 * MIB, "mig.1.memory_used": 0, "mig.1.gi": 2, "mig.1.ci": 0,
    },
)  # fmt: skip
