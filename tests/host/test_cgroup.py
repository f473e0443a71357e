"""Limits and usage of control groups, versions 1 and 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.host.cgroup import cgroup_cpu_limit, cgroup_limits, cgroup_memory_limit

GIB = 2**30


def system(root: Path, **files: str) -> Path:
    """Write the files of a small /proc and /sys; `__` in a name stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cgroup_v2_limits_are_the_minimum_over_parents(tmp_path: Path) -> None:
    root = system(tmp_path, proc__self__cgroup="0::/user/job/step\n")
    system(root / "sys/fs/cgroup/user", **{"memory.max": "max\n", "cpu.max": "max 100000\n"})
    system(root / "sys/fs/cgroup/user/job", **{"memory.max": "8589934592\n", "cpu.max": "250000 100000\n"})
    system(root / "sys/fs/cgroup/user/job/step", **{"memory.max": "max\n", "cpu.max": "400000 100000\n"})

    assert cgroup_limits(root) == (2.5, 8 * GIB)


def test_cgroup_v1_limits_are_found_in_a_container(tmp_path: Path) -> None:
    """The limits are below the mount of the container."""
    root = system(tmp_path, proc__self__cgroup="5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n3:pids:/\n")
    quota = {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"}
    system(root / "sys/fs/cgroup/cpu,cpuacct", **quota)
    system(root / "sys/fs/cgroup/memory", **{"memory.limit_in_bytes": "2147483648\n"})

    assert cgroup_limits(root) == (1.5, 2 * GIB)


def test_missing_cgroup_limits_are_none(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path) == (None, None)
    root = system(tmp_path, proc__self__cgroup="4:cpu:/\n0::/\n")
    system(root / "sys/fs/cgroup/cpu", **{"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"})
    assert cgroup_limits(root) == (None, None)


def test_usage_is_read_at_the_tightest_limit(tmp_path: Path) -> None:
    root = system(tmp_path, proc__self__cgroup="0::/job/step\n")
    job, step = root / "sys/fs/cgroup/job", root / "sys/fs/cgroup/job/step"
    stat = {
        "memory.stat": f"anon 5\ninactive_file {GIB // 2}\nactive_file {GIB // 2}\n",
        "memory.current": f"{3 * GIB}\n",
    }
    system(job, **{"cpu.max": "200000 100000\n", "cpu.stat": "usage_usec 1500000\nuser_usec 1\n"})
    system(job, **{"memory.max": f"{4 * GIB}\n"}, **stat)
    system(
        step, **{"cpu.max": "max 100000\n", "cpu.stat": "usage_usec 7\n", "memory.max": "max", "memory.current": "7"}
    )
    cpu, memory = cgroup_cpu_limit(root), cgroup_memory_limit(root)

    assert cpu is not None
    assert memory is not None
    assert (cpu.amount, cpu.cpu_seconds()) == (2, 1.5)
    assert (memory.amount, memory.memory_bytes()) == (4 * GIB, 2 * GIB), "the page cache must not count as used"


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
def test_cgroup_v1_counts_cpu_time_in_another_controller(tmp_path: Path, mount: str) -> None:
    root = system(tmp_path, proc__self__cgroup="".join(f"{at}:{name}:/\n" for at, name in enumerate([mount, "memory"])))
    system(root / "sys/fs/cgroup" / mount, **{"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"})
    system(root / "sys/fs/cgroup" / mount.replace("cpu", "cpuacct", 1) if mount == "cpu" else
           root / "sys/fs/cgroup" / mount, **{"cpuacct.usage": "2500000000\n"})  # fmt: skip
    system(root / "sys/fs/cgroup/memory", **{"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "900"})
    system(root / "sys/fs/cgroup/memory", **{"memory.stat": "inactive_file 1\ntotal_inactive_file 400\n"})
    cpu, memory = cgroup_cpu_limit(root), cgroup_memory_limit(root)

    assert cpu is not None
    assert memory is not None
    assert (cpu.amount, cpu.cpu_seconds(), memory.memory_bytes()) == (0.5, 2.5, 500)


def test_a_limit_without_usage_accounting_is_reported(tmp_path: Path) -> None:
    root = system(tmp_path, proc__self__cgroup="0::/\n")
    system(root / "sys/fs/cgroup", **{"cpu.max": "50000 100000\n", "memory.max": "1000\n"})
    cpu, memory = cgroup_cpu_limit(root), cgroup_memory_limit(root)

    assert cpu is not None
    assert memory is not None
    assert cpu.cpu_seconds() is None
    assert memory.memory_bytes() is None
