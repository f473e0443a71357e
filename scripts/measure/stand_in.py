"""Measure times of the stand-in for a GPU, each with the load of the machine.

build    compile the stand-in
failure  a rank that is killed, raises or exits over the stand-in's NCCL: seconds until error.json names it and until
         the command has ended, and processes that are left
tests    tests/gpu on the stand-in: one case of each matrix, and all of them

Run: python scripts/measure/stand_in.py build|failure|tests [--repetitions 3]
CPU seconds include those of all processes; wall seconds mean something on an idle machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.faults.test_ranks import TASK, line, processes  # noqa: E402 - tests are not installed
from tests.stand_ins.cuda.build import built  # noqa: E402
from tests.stand_ins.forked import StandIn  # noqa: E402

TESTS = ("tests/stand_ins/test_cuda_paths.py", "-k", "test_all_tests_of_gpus_pass_on_the_stand_in")


def timed(name: str, call: Callable[[], object]) -> None:
    before, began = os.times(), time.perf_counter()
    call()
    after, wall_s = os.times(), time.perf_counter() - began
    cpu_s = sum(
        getattr(after, key) - getattr(before, key) for key in ("user", "system", "children_user", "children_system")
    )
    print(f"{name}: {cpu_s:.1f} s of CPU time, {wall_s:.1f} s, load {os.getloadavg()[0]:.1f}", flush=True)


def build() -> None:
    with tempfile.TemporaryDirectory() as folder:
        built(Path(folder))


def failure(repetitions: int) -> None:
    """Fail rank 1 of two in update 5, where the file `once` has the time."""
    with StandIn.started() as stand_in:
        for fault, strategy in product(("kill", "raise", "exit"), ("ddp", "fsdp", "pipeline")):
            named, ended, left = zip(*(_failed(stand_in, fault, strategy) for _ in range(repetitions)), strict=True)
            print(
                f"{fault} {strategy}: named after at most {max(named):.1f} s, ended after {max(ended):.1f} s, "
                f"{sum(left)} processes left, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )


def _failed(stand_in: StandIn, fault: str, strategy: str) -> tuple[float, float, int]:
    run = f"failed{time.monotonic_ns()}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.py").write_text(TASK)
        words = f"{line(run, strategy, 2)} task.fault={fault} device=cuda precision=fp32 micro_batch_size=2"
        done = stand_in.command("h100x8", words, folder)
        now, failed_at = time.time(), (folder / "once").stat().st_mtime
        report = folder / "outputs" / run / "error.json"
        assert json.loads(report.read_text())["exit_code"] == done.code, done.err
        return report.stat().st_mtime - failed_at, now - failed_at, len(processes(f"run={run}"))


def tests(size: str) -> None:
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    env = {**os.environ, "ACCEL_RUN_FAULTS": size, "OMP_NUM_THREADS": "1"}
    subprocess.run(argv, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "failure", "tests"))
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    if given.what == "build":
        for number in range(given.repetitions):
            timed(f"build {number + 1}", build)
    elif given.what == "failure":
        failure(given.repetitions)
    else:
        built()
        timed("tests/gpu, one case of each matrix", lambda: tests("short"))
        timed("tests/gpu, all cases", lambda: tests("long"))


if __name__ == "__main__":
    main()
