"""Check the host: processor, threads, memory, limits, and environment variables that slow torch down."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator, Mapping

import psutil  # type: ignore[import-untyped]

from runner.host.resources import free_memory_bytes, memory_bytes
from runner.plan.inventory import GIB, read_cpu
from runner.tools.doctor.findings import CheckContext, CheckResult, failed, ok, warn

DESCRIPTORS_PER_WORKER = 64  # 4 batches of 8 tensors, each open in the worker and in the main process
DESCRIPTORS_BESIDES = 256  # modules, logs, sockets, shards of data, checkpoints


def cpu(context: CheckContext) -> Iterator[CheckResult]:
    """Vector instructions, cores, affinity, quota, load."""
    found, notes = read_cpu()
    vectors = ", ".join(found.flags) or "vector instructions unknown"
    yield ok("", f"{found.name}, cores: {found.physical_cores}, threads: {found.logical_cores}; {vectors}")
    for note in notes:
        if "memory" not in note:
            yield ok("share", note)
    if found.flags and not {"avx2", "asimd"} & set(found.flags):
        fix = "train on a GPU, or on a processor with AVX2"
        yield warn(
            "vectors", f"{found.name} has no AVX2", fix, "without wide vector instructions, it is several times slower"
        )
    load, num_threads, share = os.getloadavg()[0], os.cpu_count() or 1, _measure_core_share()
    seen = f"a busy loop got {share:.0%} of a core; load average {load:.1f} on {num_threads} threads"
    if load > num_threads + 0.5 or share < _MIN_CORE_SHARE:
        fix = "find the other processes with top; measure when they have ended"
        yield warn("load", seen, fix, _WHY_LOAD, {"load": load, "share": share})
    else:
        yield ok("load", seen, load=load, share=share)


def memory(context: CheckContext) -> Iterator[CheckResult]:
    """Free memory, cgroup limits."""
    physical, total, free = psutil.virtual_memory().total, memory_bytes(), free_memory_bytes()
    limited = f" (limited by the cgroup; the machine has {physical / GIB:.1f})" if total < physical else ""
    seen = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free{limited}"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        why = "CUDA and torch reserve far more address space than they use"
        yield warn("address space", f"ulimit -v is {limit // 1024}", "ulimit -v unlimited", why)
    if free < total / 10:
        fix = "find the processes that use it: ps aux --sort=-rss | head"
        yield warn("", seen, fix, figures={"free_gib": free / GIB})
    else:
        yield ok("", seen, free_gib=free / GIB)


def limits(context: CheckContext) -> Iterator[CheckResult]:
    """Open files that workers need."""
    found, _ = read_cpu()
    yield _open_files(found.logical_cores * DESCRIPTORS_PER_WORKER + DESCRIPTORS_BESIDES)


def environment(context: CheckContext) -> Iterator[CheckResult]:
    """Environment variables that slow torch down."""
    is_clean = True
    for name, (harmless, effect) in SLOWING_VARIABLES.items():
        value = os.environ.get(name, "")
        if value not in ("", *harmless):
            is_clean = False
            yield warn(name, f"{name}={value}: {effect}", f"unset {name}")
    if is_clean:
        yield ok("", "no variable that slows torch down or changes its results is set")


def _measure_core_share() -> float:
    """Return the share of a core that a busy loop gets; other processes or a CPU quota take the rest."""
    began, cpu_began = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < _BUSY_S:
        pass
    return min(1.0, (time.process_time() - cpu_began) / (time.perf_counter() - began))


# ---------------------------------------------------------------- limits


def _open_files(needed: int) -> CheckResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "ulimit -n is unlimited")
    if soft >= needed:
        return ok("open files", f"ulimit -n is {soft:,}", open_files=soft)
    seen = f"ulimit -n is {soft:,}; a worker per thread of this machine may need {needed:,}"
    can_raise = hard == resource.RLIM_INFINITY or hard >= needed
    allow = "raise the hard limit, too: in /etc/security/limits.conf, or with docker run --ulimit nofile=65536"
    fix = f"ulimit -n {max(needed, min(65536, hard) if hard > 0 else 65536)}" if can_raise else allow
    return (failed if soft < DESCRIPTORS_BESIDES else warn)("open files", seen, fix, _WHY_FILES, {"open_files": soft})


_BUSY_S, _MIN_CORE_SHARE = 0.25, 0.8  # the loop is longer than the 0.1 s after which a CPU quota is refilled
_WHY_LOAD = "torch slows down disproportionately on a busy processor, and measurements are unreliable"
_WHY_FILES = "each tensor from a data worker needs an open file on both sides; with too few, training ends with exit 71"
# variable -> (harmless values, effect of other values)
SLOWING_VARIABLES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "CUDA_LAUNCH_BLOCKING": (("0",), "the host waits for each kernel; meant for debugging"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("0",), "each tensor is allocated by the driver; meant for debugging"),
    "NVIDIA_TF32_OVERRIDE": ((), "overrides precision=: fp32 may be TF32, or TF32 is never used"),
    "TORCHDYNAMO_DISABLE": (("0",), "torch.compile does nothing"),
    "TORCH_COMPILE_DISABLE": (("0",), "torch.compile does nothing"),
    "ATEN_CPU_CAPABILITY": ((), "selects torch's vector instructions, regardless of the processor"),
    "PYTHONDEVMODE": (("0",), "Python runs additional checks"),
    "MALLOC_CHECK_": (("0",), "each allocation is checked"),
}
