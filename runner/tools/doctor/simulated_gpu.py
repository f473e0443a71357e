"""Run `accel-run doctor first_contact` on a simulated GPU, in a checkout on a machine without a GPU.

The simulation belongs to the tests, which an installed package does not have. It is only started as a command, so that
this package imports nothing from the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from runner.base.paths import PACKAGE

ROOT = PACKAGE.parent
STAND_IN = "tests.stand_ins.cuda"
MACHINE = "t4"  # the machine that is simulated; the tests also simulate others


def find_stand_in(root: Path) -> bool:
    """Return whether the folder is a checkout with the sources of the simulated GPU."""
    return root.joinpath(*STAND_IN.split("."), "__main__.py").is_file()


def build_stand_in(root: Path) -> str:
    """Compile the simulation, which takes 30 s the first time; return why that failed, or an empty string."""
    line = _stand_in_command("build")
    done = subprocess.run(line, env=_environment(root), capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""


def run_on_simulated_gpu(root: Path, argv: Sequence[str]) -> NoReturn:
    """Replace this process by `accel-run` with these arguments on the simulated GPU, so that signals reach it."""
    sys.stdout.flush()
    sys.stderr.flush()
    line = _stand_in_command(MACHINE, sys.executable, "-m", "runner", *argv)
    os.execve(line[0], line, _environment(root))


def _stand_in_command(*words: str) -> list[str]:
    return [sys.executable, "-m", STAND_IN, *words]


def _environment(root: Path) -> dict[str, str]:
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    # With PYTHONSAFEPATH, a folder named `tests` in the current directory does not hide that of the checkout.
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *inherited]), "PYTHONSAFEPATH": "1"}
