"""The table of checks, in the order in which they run: quick ones first."""

from __future__ import annotations

from collections.abc import Mapping

from runner.doctor import arithmetic, gpus, kernels, machine, software, storage, traffic
from runner.doctor.findings import Check

CHECKS: Mapping[str, Check] = {
    "python": Check(software.python, "Python version", "accel-run needs features of newer versions"),
    "cpu": Check(
        machine.cpu,
        "vector instructions, cores, affinity, quota, load",
        "data loaders and all work outside the GPU run on its cores",
    ),
    "memory": Check(machine.memory, "free memory, cgroup limits", "a run that needs more is killed"),
    "limits": Check(
        machine.limits,
        "open files that workers need, processes that may be started",
        "a run that reaches a system limit ends with exit 71",
    ),
    "shm": Check(
        storage.shared_memory, "space in /dev/shm", "workers pass batches through it; they are killed when it is full"
    ),
    "disk": Check(
        storage.disk,
        "in the output folder: space, writing with fsync, replacing, locking",
        "checkpoints and metrics are written there and must survive a power failure",
        limit_s=30.0,
    ),
    "temp": Check(
        storage.temporary, "temporary directory and cache", "processes of a run communicate through it; data is cached"
    ),
    "clock": Check(machine.clock, "system clock", "certificates, records and the newest run depend on it"),
    "environment": Check(
        machine.environment, "variables that slow torch down", "they are often set temporarily and forgotten"
    ),
    "driver": Check(gpus.driver, "NVML: driver, state of each GPU", "required for using and monitoring GPUs"),
    "processes": Check(gpus.processes, "other processes on each GPU", "they use its memory and time"),
    "packages": Check(
        software.packages,
        "required packages: import, version",
        "accel-run cannot start without them",
        limit_s=30.0,
    ),
    "configuration": Check(
        software.configuration, "Hydra composes the shipped configuration", "every command starts with it", limit_s=20.0
    ),
    "wandb": Check(
        software.wandb, "how tracker=wandb would log; no key is shown", "runs without a key are logged offline"
    ),
    "torch": Check(software.torch, "torch: import, version", "all computation uses it", limit_s=60.0),
    "gpus": Check(
        gpus.gpus,
        "GPUs that torch can use, and reasons for the others",
        "GPUs that torch cannot use are idle",
        60.0,
        "torch",
    ),
    "versions": Check(
        gpus.versions,
        "CUDA version of the build and of the driver, cuDNN, NCCL",
        "a driver older than torch's CUDA version cannot run its kernels",
        needs="gpus",
        limit_s=30.0,
    ),
    "numbering": Check(
        gpus.numbering,
        "GPU indices in CUDA and NVML, by UUID",
        "device=cuda:1 must select the intended GPU",
        10.0,
        "gpus",
    ),
    "threads": Check(
        machine.threads,
        "torch threads and cores, vector instructions in use",
        "too many threads wait for each other, too few leave cores idle",
        needs="gpus",
    ),
    "loader": Check(
        traffic.loader,
        "a DataLoader worker returns batches",
        "data workers use this path",
        30.0,
        "gpus",
    ),
    "matmul": Check(
        arithmetic.matmul,
        "matrix multiplication per device and format: accuracy against float64, throughput",
        "most of the computation in training",
        limit_s=60.0,
        needs="gpus",
    ),
    "conv": Check(
        arithmetic.convolution,
        "convolution per device and format: accuracy against float64, throughput",
        "image models use it; on a GPU it runs in cuDNN",
        limit_s=60.0,
        needs="gpus",
    ),
    "attention": Check(
        kernels.attention,
        "attention kernels on the shapes of GPT-2, with torch's reason if one does not run",
        "attention=auto uses the first kernel that runs",
        limit_s=60.0,
        needs="gpus",
    ),
    "allreduce": Check(
        traffic.allreduce,
        "all-reduce over two processes with gloo, over all GPUs with NCCL",
        "ranks all-reduce gradients in every update",
        limit_s=40.0,
        needs="gpus",
    ),
    "bandwidth": Check(
        traffic.bandwidth,
        "copies within host memory, and of pinned memory to and from each GPU",
        "every batch is copied this way",
        limit_s=40.0,
        needs="gpus",
        is_quick=False,
    ),
    "extras": Check(
        software.extras,
        "optional packages: import, version",
        "some options and tasks need them",
        limit_s=60.0,
        needs="torch",
        is_quick=False,
    ),
    "compile": Check(
        kernels.compiling,
        "torch.compile of a small function, with a separate cache",
        "compile= speeds up most models on a GPU",
        limit_s=90.0,
        needs="gpus",
        is_quick=False,
    ),
}
