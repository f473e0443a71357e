"""The table of checks, in the order in which they run. The docstring of a check is its summary."""

from __future__ import annotations

from collections.abc import Mapping

from runner.tools.doctor import gpu_checks, host_checks, software, storage
from runner.tools.doctor.findings import DoctorCheck, late_check

CHECKS: Mapping[str, DoctorCheck] = {
    "python": DoctorCheck(software.python, "accel-run uses features that older versions lack"),
    "cpu": DoctorCheck(host_checks.cpu, "data loaders and all work outside the GPU run on CPU cores"),
    "memory": DoctorCheck(host_checks.memory, "a run that exceeds these limits is killed"),
    "limits": DoctorCheck(host_checks.limits, "a run that reaches a system limit ends with exit code 71"),
    "shm": DoctorCheck(
        storage.shared_memory, "workers pass batches through shared memory; they are killed when it is full"
    ),
    "disk": DoctorCheck(
        storage.disk, "checkpoints and metrics are written there and must survive a power failure", limit_s=30.0
    ),
    "environment": DoctorCheck(host_checks.environment, "such variables are often set temporarily and forgotten"),
    "driver": DoctorCheck(gpu_checks.driver, "required to use and monitor GPUs"),
    "processes": DoctorCheck(gpu_checks.processes, "they use the GPU's memory and time"),
    "packages": DoctorCheck(software.packages, "accel-run cannot start without them", limit_s=30.0),
    "torch": DoctorCheck(software.torch, "all computation uses torch", limit_s=60.0),
    "gpus": DoctorCheck(gpu_checks.gpus, "GPUs that torch cannot use are idle", limit_s=60.0, needs="torch"),
    "versions": DoctorCheck(
        gpu_checks.versions,
        "a driver that is older than torch's CUDA version cannot run torch's kernels",
        limit_s=30.0,
        needs="gpus",
    ),
    "numbering": DoctorCheck(gpu_checks.numbering, "device=cuda:1 must select the intended GPU", needs="gpus"),
    "compiler": DoctorCheck(gpu_checks.compiler, "compile=default and other modes need them on a GPU", needs="gpus"),
    "matmul": DoctorCheck(
        late_check("arithmetic", "matmul", "Matrix multiplication per device and format: accuracy against float64"),
        "most of the computation in training is matrix multiplication",
        limit_s=60.0,
        needs="gpus",
    ),
}
