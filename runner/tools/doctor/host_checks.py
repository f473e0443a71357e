"""The machine without its GPUs: processor, threads, memory, limits, and variables that slow torch down."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator, Mapping

from runner.host.cgroup import cgroup_process_limit
from runner.host.resources import free_memory_bytes, memory_bytes
from runner.plan.inventory import GIB, read_cpu
from runner.tools.doctor.findings import CheckContext, CheckResult, failed, ok, warn

DESCRIPTORS_PER_WORKER = 64  # 4 batches of 8 tensors, each of which is a descriptor on both sides
DESCRIPTORS_BESIDES = 256  # modules, logs, sockets, shards of data, checkpoints
PROCESSES_BESIDES = 64  # threads of arithmetic, loaders, watchdog and tracker count too


def cpu(context: CheckContext) -> Iterator[CheckResult]:
    """Vector instructions, cores, affinity, quota, load."""
    found, notes = read_cpu()
    vectors = ", ".join(found.flags) or "no flags known"
    yield ok("", f"{found.name}, cores: {found.physical_cores}, threads: {found.logical_cores}; {vectors}")
    for note in notes:
        if "memory" not in note:
            yield ok("share", note)
    if found.flags and not {"avx2", "asimd"} & set(found.flags):
        fix = "train on a GPU, or on a processor with AVX2"
        yield warn(
            "vectors", f"{found.name} has no AVX2", fix, "without wide vectors arithmetic is several times slower"
        )
    load, present, got = os.getloadavg()[0], os.cpu_count() or 1, _share_of_a_core()
    seen = f"a busy loop got {got:.0%} of a core; {load:.1f} of {present} threads were busy in the last minute"
    if load > present + 0.5 or got < _GOT_ENOUGH:
        yield warn("load", seen, "see who: top; measure when they are done", _WHY_LOAD, {"load": load, "share": got})
    else:
        yield ok("load", seen, load=load, share=got)


def threads(context: CheckContext) -> Iterator[CheckResult]:
    """Torch threads and cores, vector instructions in use."""
    import torch

    cpu, counted = context.here.cpu, torch.get_num_threads()
    set_by = next((f"{name}={os.environ[name]}" for name in _THREADS if os.environ.get(name)), "")
    granted, seen = cpu.logical_cores, f"torch computes with {counted} threads, {cpu.logical_cores} may be used"
    if counted > granted:
        yield warn("", f"{seen}{_because(set_by)}", f"export OMP_NUM_THREADS={granted}", figures={"threads": counted})
    elif counted == 1 < granted and set_by:
        yield warn("", f"{seen}{_because(set_by)}", f"unset {set_by.partition('=')[0]}", figures={"threads": counted})
    else:
        yield ok("", f"{seen}{_because(set_by)}", threads=counted)
    capability = cpu.capability
    if "avx2" in cpu.flags and capability == "DEFAULT":
        fix = "unset ATEN_CPU_CAPABILITY" if os.environ.get("ATEN_CPU_CAPABILITY") else "install another build of torch"
        yield warn("vectors", "torch uses no wide vectors, though this processor has AVX2", fix)
    else:
        yield ok("vectors", f"torch uses {capability or 'what the processor has'}")


def memory(context: CheckContext) -> Iterator[CheckResult]:
    """Free memory, cgroup limits."""
    import psutil  # type: ignore[import-untyped]

    whole, total, free = psutil.virtual_memory().total, memory_bytes(), free_memory_bytes()
    limited = f" (the cgroup grants no more; the machine has {whole / GIB:.1f})" if total < whole else ""
    seen = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free{limited}"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        why = "CUDA and torch reserve far more address space than they use"
        yield warn("address space", f"ulimit -v is {limit // 1024}", "ulimit -v unlimited", why)
    if free < total / 10:
        yield warn("", seen, "see who has it: ps aux --sort=-rss | head", figures={"free_gib": free / GIB})
    else:
        yield ok("", seen, free_gib=free / GIB)


def limits(context: CheckContext) -> Iterator[CheckResult]:
    """Open files that workers need, processes that may be started."""
    found, _ = read_cpu()
    yield _open_files(found.logical_cores * DESCRIPTORS_PER_WORKER + DESCRIPTORS_BESIDES)
    yield _processes(found.logical_cores * 2 + PROCESSES_BESIDES)


def environment(context: CheckContext) -> Iterator[CheckResult]:
    """Variables that slow torch down."""
    found = [(name, row) for name, row in SLOWING.items() if os.environ.get(name, "") not in ("", *row[0])]
    for name, (_, what) in found:
        yield warn(name, f"{name}={os.environ[name]}: {what}", f"unset {name}")
    if not found:
        yield ok("", "no variable is set that slows torch down or changes its numbers")


def _share_of_a_core() -> float:
    """Return how much of its time a busy loop was computing: the rest went to others, or was refused by a quota."""
    began, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < _BUSY_S:
        pass
    return min(1.0, (time.process_time() - used) / (time.perf_counter() - began))


# ---------------------------------------------------------------- limits


def _open_files(needed: int) -> CheckResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "ulimit -n is unlimited")
    opened, refused = _opened(min(needed, max(0, soft - 32)))
    seen = f"ulimit -n is {soft:,}; a worker per thread of this machine may need {needed:,}"
    if refused:
        return failed(
            "open files", f"after {opened:,} files the system refuses: {refused}", "close what has them: lsof"
        )
    if soft >= needed:
        return ok("open files", f"ulimit -n is {soft:,}, {needed:,} of which were opened", open_files=soft)
    can_raise = hard == resource.RLIM_INFINITY or hard >= needed
    allow = "the hard limit too: /etc/security/limits.conf, or docker run --ulimit nofile=65536"
    fix = f"ulimit -n {max(needed, min(65536, hard) if hard > 0 else 65536)}" if can_raise else allow
    return (failed if soft < DESCRIPTORS_BESIDES else warn)("open files", seen, fix, _WHY_FILES, {"open_files": soft})


def _opened(count: int) -> tuple[int, str]:
    """Return how many of `count` files could be open at once, and what the system said to the next one."""
    descriptors: list[int] = []
    try:
        for _ in range(count):
            descriptors.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return len(descriptors), str(error.strerror)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return count, ""


def _processes(needed: int) -> CheckResult:
    """Judge the processes and threads that this user, and this cgroup, may still start."""
    import psutil

    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    left: dict[str, int] = {}
    cgroup = cgroup_process_limit()
    if cgroup is not None:
        left["the cgroup's pids.max (docker run --pids-limit=N)"] = cgroup[0] - cgroup[1]
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # which does not hold for root
        mine = [each.info["num_threads"] or 1 for each in psutil.process_iter(["uids", "num_threads"])
                if each.info["uids"] and each.info["uids"].real == os.getuid()]  # fmt: skip
        left["ulimit -u"] = soft - sum(mine)
    if not left:
        return ok("processes", "no limit holds for this user")
    name, count = min(left.items(), key=lambda pair: pair[1])
    seen = f"{max(0, count):,} more processes and threads may be started ({name})"
    if count >= needed:
        return ok("processes", seen, processes_left=count)
    return (failed if count < 8 else warn)(
        "processes",
        f"{seen}; training may need {needed:,}",
        f"raise it: {name}; or end what runs",
        figures={"processes_left": count},
    )


def _because(set_by: str) -> str:
    return f" ({set_by})" if set_by else ""


_BUSY_S, _GOT_ENOUGH = 0.25, 0.8  # a quota is refilled every 0.1 s
_WHY_LOAD = "torch on a busy processor is slower by far more than its share, and no figure taken now is a good one"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_WHY_FILES = "each tensor that a worker hands over holds an open file on both sides: too few end training with exit 71"
# variable -> (values that do no harm, what the others do)
SLOWING: Mapping[str, tuple[tuple[str, ...], str]] = {
    "CUDA_LAUNCH_BLOCKING": (("0",), "each kernel is waited for; meant for debugging"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("0",), "each tensor asks the driver for memory; meant for debugging"),
    "NVIDIA_TF32_OVERRIDE": ((), "it overrules precision=: fp32 may be TF32, or TF32 never used"),
    "TORCHDYNAMO_DISABLE": (("0",), "torch.compile does nothing"),
    "TORCH_COMPILE_DISABLE": (("0",), "torch.compile does nothing"),
    "ATEN_CPU_CAPABILITY": ((), "it chooses torch's vectors in place of what the processor has"),
    "PYTHONDEVMODE": (("0",), "Python checks itself at every step"),
    "MALLOC_CHECK_": (("0",), "each allocation is checked"),
}
