"""`train` prints the name of the run before it imports torch, which takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0  # exceeded only if the command hangs
IMPORTED = "torch is imported"

# On import of torch, this code writes an unbuffered line and ends the process.
CUSTOMIZED = f"""
import importlib.machinery, os, sys

class Torch:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "torch" else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        os.write(1, b"{IMPORTED}\\n")
        os._exit(0)

sys.meta_path.insert(0, Torch())
"""
BUSY = """
import time
from runner.host import other_load
other_load.read_busy_s = lambda cores: 1000 * time.monotonic()
other_load.has_cpu_quota = lambda cores: False
"""
POLICY = "OMP_WAIT_POLICY"
RANK = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("environment", "num_lines"),
    [
        ({}, 1),
        ({"ACCEL_RUN_LOG_LEVEL": "warning"}, 0),
        (RANK | {"RANK": "0", "LOCAL_RANK": "0"}, 1),
        (RANK | {"RANK": "1", "LOCAL_RANK": "1"}, 0),
    ],
    ids=["one process", "warnings only", "rank 0", "rank 1"],
)
@pytest.mark.parametrize("command", ["train", "both"])
def test_the_first_line_is_printed_before_torch_is_imported(
    command: str, environment: dict[str, str], num_lines: int, tmp_path: Path
) -> None:
    """The test starts a real process, because the fork server has already imported torch."""
    (tmp_path / "sitecustomize.py").write_text(CUSTOMIZED)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "runner", command, "run=mine"], cwd=tmp_path, check=False, capture_output=True,
        text=True, timeout=LIMIT_S, env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    *lines, last = done.stdout.splitlines()
    assert (last, done.stderr) == (IMPORTED, "")
    assert len(lines) == num_lines
    assert all("mine" in line for line in lines)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("is_busy", [True, False])
def test_waiting_openmp_threads_sleep_on_a_busy_machine(is_busy: bool, tmp_path: Path) -> None:
    """The policy must be set before torch is imported."""
    reports_policy = CUSTOMIZED.replace(f'b"{IMPORTED}\\n"', f'os.environ.get("{POLICY}", "unset").encode()')
    idle = BUSY.replace("1000 * time.monotonic()", "0.0")
    (tmp_path / "sitecustomize.py").write_text(reports_policy + (BUSY if is_busy else idle))
    environment = {name: value for name, value in os.environ.items() if name != POLICY}
    environment |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "OMP_NUM_THREADS": "64"}
    done = subprocess.run(
        [sys.executable, "-m", "runner", "train", "run=mine"], cwd=tmp_path, check=False, capture_output=True,
        text=True, timeout=LIMIT_S, env=environment,
    )  # fmt: skip
    *lines, policy = done.stdout.splitlines()
    assert (policy, len(lines)) == (("passive", 2) if is_busy else ("unset", 1))
