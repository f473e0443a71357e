"""Measure the CPU time and the memory of `accel-run report` for a run of many days.

    python scripts/measure/report.py [--days 10]

Trains a small model on the CPU for two updates, and replaces its gpu.csv by one with a sample per second, of a machine
without a GPU or with one whose readings are all present. Prints a line for a run of ten seconds, and for a run of many
days on each machine: the minimum CPU time (user and system) and the maximum peak resident memory of three reports.
Exit 0: all reports are below REPORT_S and REPORT_MB. 1: one is not.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from runner.monitor.samples import COLUMNS  # noqa: E402 - from this checkout

REPORT_S, REPORT_MB = 3.0, 150.0
SECONDS_PER_DAY = 86400
FIRST_S = 1.8e9  # time of the first sample, in seconds since 1970


def main() -> int:
    """Print the figures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=10.0, help="duration of the run")
    num_samples = int(parser.parse_args().days * SECONDS_PER_DAY)
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}", flush=True)
    is_over = False
    with tempfile.TemporaryDirectory() as folder:
        settings = ["updates=2", "run=long", "device=cpu", f"output_root={folder}"]
        measure("train", *settings)
        measured = [(10, False), (num_samples, False), (num_samples, True)]
        for num, has_gpu in measured:
            path = Path(folder) / "long" / "gpu.csv"
            with path.open("w", encoding="utf-8") as file:
                file.write(",".join(COLUMNS) + "\n")
                file.writelines(rows(num, has_gpu=has_gpu))
            figures = [measure("report", "long", f"output_root={folder}") for _ in range(3)]
            cpu_s, memory_mb = min(cpu_s for cpu_s, _ in figures), max(memory_mb for _, memory_mb in figures)
            print(
                f"{num:9,} samples, {'one GPU' if has_gpu else 'no GPU '}, {path.stat().st_size / 1e6:4.0f} MB: "
                f"{cpu_s:4.1f} s, {memory_mb:4.0f} MB",
                flush=True,
            )
            is_over |= cpu_s >= REPORT_S or memory_mb >= REPORT_MB
    return int(is_over)


def rows(num_samples: int, *, has_gpu: bool) -> Iterator[str]:
    """Yield the rows of gpu.csv, one sample per second, in three phases."""
    generator = random.Random(0)
    for index in range(num_samples):
        used = f"{generator.uniform(40, 100):.3f}"
        cells = {
            "timestamp": f"{FIRST_S + index:.3f}", "span_s": "1", "device": "cpu",
            "phase": ("tune", "train", "evaluate")[3 * index // num_samples],
            "cpu_percent": used, "ram_percent": "8.8", "process_cpu_percent": used, "process_memory_gib": "0.344",
            "disk_free_gib": "20.516", "disk_read_mb_s": "0", "disk_write_mb_s": f"{generator.uniform(0, 9):.3f}",
        }  # fmt: skip
        if has_gpu:
            cells |= {
                "device": "gpu0", "uuid": "GPU-5b2e2a55-92c7-4a3a-b3f1-0c5d6d7e8f90", "name": "NVIDIA L4",
                "util_percent": f"{generator.uniform(80, 100):.0f}", "memory_used_gib": "17.25",
                "memory_total_gib": "22.494", "temperature_c": f"{generator.uniform(60, 70):.0f}",
                "power_w": f"{generator.uniform(60, 72):.3f}", "clock_mhz": f"{generator.uniform(1500, 2040):.0f}",
                "memory_util_percent": f"{generator.uniform(40, 60):.0f}", "memory_reserved_gib": "0.5",
                "memory_free_gib": "4.744", "temperature_limit_c": "92", "power_limit_w": "72",
                "energy_j": f"{1e6 + 66.4 * index:.3f}", "memory_clock_mhz": "6251", "throttle_reasons": "4",
                "pcie_generation": "4", "pcie_width": "16", "ecc_corrected": "0", "ecc_uncorrected": "0",
                "other_processes": "0", "other_memory_gib": "0",
            }  # fmt: skip
        yield ",".join(cells.get(column, "") for column in COLUMNS) + "\n"


def measure(*args: str) -> tuple[float, float]:
    """Run a command; return its CPU time in seconds, and its peak resident memory in MB of 1000 kB."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "runner", *args]
    process = subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"accel-run {' '.join(args)}: exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    sys.exit(main())
