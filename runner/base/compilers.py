"""Check without importing torch whether this machine has what TorchInductor, torch.compile's default backend, needs."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from runner.base.errors import Problem

MIN_CAPABILITY = (7, 0)  # minimum for Triton


def find_missing_compiler(kind: str) -> Problem | None:
    """Return a problem if this machine lacks what is needed to compile for a device type, else None.

    kind  torch's name of the device type; only `cpu` and `cuda` are checked
    """
    if kind == "cpu":
        return _check_cpp_compiler()
    return _check_triton() if kind == "cuda" else None


def check_capability(device: str, capability: tuple[int, int] | None) -> Problem | None:
    """Return a problem if the GPU is known to be too old for Triton, else None."""
    if capability is None or capability >= MIN_CAPABILITY:
        return None
    needed, actual = ("{}.{}".format(*version) for version in (MIN_CAPABILITY, capability))
    what = f"compiling for CUDA needs compute capability {needed}, but {device} has {actual}"
    return Problem(what, fix="use compile=off")


def _check_cpp_compiler() -> Problem | None:
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        what = f"compiling for the CPU needs the C++ compiler {compiler}, but it is not installed"
        return Problem(what, fix="run apt install g++, set CXX, or use compile=off")
    # TorchInductor's linker command contains the path without quotes (torch 2.13).
    torch = find_spec("torch")
    if torch is not None and torch.origin and " " in (folder := str(Path(torch.origin).parent)):
        what = f"TorchInductor cannot link with torch, because its path contains a space: {folder}"
        fix = "use compile=off, or install into another folder: ACCEL_RUN_VENV=FOLDER scripts/setup.sh"
        return Problem(what, fix=fix)
    return None


def _check_triton() -> Problem | None:
    if find_spec("triton") is None:
        return Problem("compiling for CUDA needs Triton", fix="run pip install triton, or use compile=off")
    header, set_compiler = Path(sysconfig.get_paths()["include"]) / "Python.h", os.environ.get("CC")
    if set_compiler and not shutil.which(set_compiler):
        missing, fix = f"the C compiler {set_compiler} (set by CC)", "set CC to an installed compiler"
    elif not (set_compiler or shutil.which("gcc") or shutil.which("clang")):
        missing, fix = "a C compiler (gcc or clang)", "run apt install gcc python3-dev"
    elif not header.is_file():
        missing, fix = f"the header {header}", "run apt install gcc python3-dev"
    else:
        return None
    what = f"compiling for CUDA needs {missing}, because Triton builds a launcher for each kernel"
    return Problem(what, fix=f"{fix}, or use compile=off")
