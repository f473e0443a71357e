"""The table of checks, in the order in which they run: quick ones first."""

from __future__ import annotations

from collections.abc import Mapping

from runner.tools.doctor import arithmetic, gpu_checks, host_checks, kernels, software, storage, traffic
from runner.tools.doctor.findings import DoctorCheck

CHECKS: Mapping[str, DoctorCheck] = {
    "python": DoctorCheck(software.python, "Python version", "accel-run needs features of newer versions"),
    "cpu": DoctorCheck(
        host_checks.cpu,
        "vector instructions, cores, affinity, quota, load",
        "data loaders and all work outside the GPU run on its cores",
    ),
    "memory": DoctorCheck(host_checks.memory, "free memory, cgroup limits", "a run that needs more is killed"),
    "limits": DoctorCheck(
        host_checks.limits,
        "open files that workers need, processes that may be started",
        "a run that reaches a system limit ends with exit 71",
    ),
    "shm": DoctorCheck(
        storage.shared_memory, "space in /dev/shm", "workers pass batches through it; they are killed when it is full"
    ),
    "disk": DoctorCheck(
        storage.disk,
        "in the output folder: space, writing with fsync, replacing, locking",
        "checkpoints and metrics are written there and must survive a power failure",
        limit_s=30.0,
    ),
    "temp": DoctorCheck(
        storage.temporary, "temporary directory and cache", "processes of a run communicate through it; data is cached"
    ),
    "clock": DoctorCheck(host_checks.clock, "system clock", "certificates, records and the newest run depend on it"),
    "environment": DoctorCheck(
        host_checks.environment, "variables that slow torch down", "they are often set temporarily and forgotten"
    ),
    "driver": DoctorCheck(
        gpu_checks.driver, "NVML: driver, state of each GPU", "required for using and monitoring GPUs"
    ),
    "processes": DoctorCheck(gpu_checks.processes, "other processes on each GPU", "they use its memory and time"),
    "packages": DoctorCheck(
        software.packages,
        "required packages: import, version",
        "accel-run cannot start without them",
        limit_s=30.0,
    ),
    "configuration": DoctorCheck(
        software.configuration, "Hydra composes the shipped configuration", "every command starts with it", limit_s=20.0
    ),
    "wandb": DoctorCheck(
        software.wandb, "how tracker=wandb would log; no key is shown", "runs without a key are logged offline"
    ),
    "torch": DoctorCheck(software.torch, "torch: import, version", "all computation uses it", limit_s=60.0),
    "gpus": DoctorCheck(
        gpu_checks.gpus,
        "GPUs that torch can use, and reasons for the others",
        "GPUs that torch cannot use are idle",
        60.0,
        "torch",
    ),
    "versions": DoctorCheck(
        gpu_checks.versions,
        "CUDA version of the build and of the driver, cuDNN, NCCL",
        "a driver older than torch's CUDA version cannot run its kernels",
        needs="gpus",
        limit_s=30.0,
    ),
    "numbering": DoctorCheck(
        gpu_checks.numbering,
        "GPU indices in CUDA and NVML, by UUID",
        "device=cuda:1 must select the intended GPU",
        10.0,
        "gpus",
    ),
    "threads": DoctorCheck(
        host_checks.threads,
        "torch threads and cores, vector instructions in use",
        "too many threads wait for each other, too few leave cores idle",
        needs="gpus",
    ),
    "loader": DoctorCheck(
        traffic.loader,
        "a DataLoader worker returns batches",
        "data workers use this path",
        30.0,
        "gpus",
    ),
    "matmul": DoctorCheck(
        arithmetic.matmul,
        "matrix multiplication per device and format: accuracy against float64",
        "most of the computation in training",
        limit_s=60.0,
        needs="gpus",
    ),
    "attention": DoctorCheck(
        kernels.attention,
        "attention kernels on the shapes of GPT-2, with torch's reason if one does not run",
        "attention=auto uses the first kernel that runs",
        limit_s=60.0,
        needs="gpus",
    ),
    "allreduce": DoctorCheck(
        traffic.allreduce,
        "all-reduce over two processes with gloo, over all GPUs with NCCL",
        "ranks all-reduce gradients in every update",
        limit_s=40.0,
        needs="gpus",
    ),
    "extras": DoctorCheck(
        software.extras,
        "optional packages: import, version",
        "some options and tasks need them",
        limit_s=60.0,
        needs="torch",
        is_quick=False,
    ),
    "compile": DoctorCheck(
        kernels.compiling,
        "torch.compile of a small function, with a separate cache",
        "compile= speeds up most models on a GPU",
        limit_s=90.0,
        needs="gpus",
        is_quick=False,
    ),
}
