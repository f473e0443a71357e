"""Time of building the stand-in for a GPU, and of running tests/gpu on it: one case of each matrix, and all of them.

Run: python scripts/measure/stand_in.py [--builds 3]
CPU seconds include those of all processes; wall seconds mean something on an idle machine only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.stand_ins.cuda.build import built  # noqa: E402 - tests are no installed package

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


def tests(size: str) -> None:
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    env = {**os.environ, "ACCEL_RUN_FAULTS": size, "OMP_NUM_THREADS": "1"}
    subprocess.run(line, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--builds", type=int, default=3)
    for number in range(parser.parse_args().builds):
        timed(f"build {number + 1}", build)
    built()
    timed("tests/gpu, one case of each matrix", lambda: tests("short"))
    timed("tests/gpu, all cases", lambda: tests("long"))


if __name__ == "__main__":
    main()
