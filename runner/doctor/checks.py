"""The table of checks, in the order in which they are made: quick ones first."""

from __future__ import annotations

from collections.abc import Mapping

from runner.doctor import arithmetic, gpus, kernels, machine, software, storage, traffic
from runner.doctor.findings import Check

CHECKS: Mapping[str, Check] = {
    "python": Check(software.python, "the version of Python", "accel-run needs what newer versions have"),
    "cpu": Check(
        machine.cpu, "vectors, cores, affinity, quota, load", "loaders and everything off the GPU run on its cores"
    ),
    "memory": Check(machine.memory, "memory that is free, limits of the cgroup", "a run that needs more is killed"),
    "limits": Check(
        machine.limits,
        "as many open files as workers need, processes that may be started",
        "a run that reaches a limit of the system ends with exit 71",
    ),
    "shm": Check(
        storage.shared_memory, "room in /dev/shm", "workers hand batches over in it; one that is full kills them"
    ),
    "disk": Check(
        storage.disk,
        "in the output folder: room, writing with fsync, replacing, locking",
        "checkpoints and metrics are written there, and must survive a power cut",
        limit_s=30.0,
    ),
    "temp": Check(
        storage.temporary, "the temporary folder and the cache", "processes of a run meet there, data is kept"
    ),
    "clock": Check(machine.clock, "the system's clock", "certificates, records and the newest run are told by it"),
    "environment": Check(
        machine.environment, "variables that slow torch down", "they are set for one afternoon and forgotten"
    ),
    "driver": Check(gpus.driver, "NVML: driver, each GPU's state", "without it there is no GPU, and nothing to watch"),
    "processes": Check(gpus.processes, "other processes on each GPU", "they take its memory and its time"),
    "packages": Check(
        software.packages,
        "each package that accel-run needs: imported, version in range",
        "accel-run cannot start without",
        limit_s=30.0,
    ),
    "configuration": Check(
        software.configuration, "hydra composes the shipped configuration", "every command begins with it", limit_s=20.0
    ),
    "wandb": Check(
        software.wandb, "how tracker=wandb would log; no key is shown", "runs without a key are logged offline"
    ),
    "torch": Check(software.torch, "torch: imported, version", "it computes everything", limit_s=60.0),
    "gpus": Check(
        gpus.gpus, "which GPUs torch can use, and why not others", "what torch cannot use stands idle", 60.0, "torch"
    ),
    "versions": Check(
        gpus.versions,
        "CUDA of the build against the driver, cuDNN, NCCL",
        "a driver older than the CUDA of torch cannot run its kernels",
        needs="gpus",
        limit_s=30.0,
    ),
    "numbering": Check(
        gpus.numbering,
        "numbers of GPUs in CUDA and NVML, by UUID",
        "device=cuda:1 must be the GPU that is meant",
        10.0,
        "gpus",
    ),
    "threads": Check(
        machine.threads,
        "threads of torch against cores, vectors it uses",
        "too many threads wait for each other, too few leave cores idle",
        needs="gpus",
    ),
    "loader": Check(
        traffic.loader,
        "a DataLoader's worker hands batches over",
        "data that workers read comes this way",
        30.0,
        "gpus",
    ),
    "matmul": Check(
        arithmetic.matmul,
        "a product of matrices per device and format: numbers against float64, rate",
        "products of matrices are nearly all that training computes",
        limit_s=60.0,
        needs="gpus",
    ),
    "conv": Check(
        arithmetic.convolution,
        "a convolution per device and format: numbers against float64, rate",
        "models of images are made of them; on a GPU they go through cuDNN",
        limit_s=60.0,
        needs="gpus",
    ),
    "attention": Check(
        kernels.attention,
        "attention kernels for a sample of GPT-2, with torch's reason where one does not run",
        "attention=auto takes the first of them that runs",
        limit_s=60.0,
        needs="gpus",
    ),
    "allreduce": Check(
        traffic.allreduce,
        "a sum over two processes by gloo, over all GPUs by NCCL",
        "ranks add their gradients this way at every update",
        limit_s=40.0,
        needs="gpus",
    ),
    "bandwidth": Check(
        traffic.bandwidth,
        "copies within the host, and of pinned memory to each GPU and back",
        "every batch goes this way",
        limit_s=40.0,
        needs="gpus",
        is_quick=False,
    ),
    "extras": Check(
        software.extras,
        "each package of the extras: imported, version in range",
        "options and tasks ask for them by name",
        limit_s=60.0,
        needs="torch",
        is_quick=False,
    ),
    "compile": Check(
        kernels.compiling,
        "torch.compile of a small function, in a cache of its own",
        "compile= makes most models faster on a GPU",
        limit_s=90.0,
        needs="gpus",
        is_quick=False,
    ),
}
