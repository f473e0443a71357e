"""Compile the stand-in for the installed torch, and cache it under a hash of its sources and the version of torch."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "csrc"
MODULE = "_stand_in" + sysconfig.get_config_var("EXT_SUFFIX")
PRELOADED = "libaccelerator.so"
# The compiler needs 1.5 GiB. Its garbage collection would take a tenth of its time, and is disabled.
ALL_MEMORY = ("--param", "ggc-min-expand=10000", "--param", "ggc-min-heapsize=4000000")


class CannotBuildError(RuntimeError):
    """There is no compiler, or torch is not a CPU build."""


def why_not() -> str:
    """Return why the stand-in cannot be built here, or an empty text."""
    if sys.platform != "linux":
        return "the stand-in is preloaded into torch, which only Linux supports"
    version = _torch_version()
    if version["cuda"] or version["hip"]:
        return "the installed torch supports an accelerator, but the stand-in needs a CPU build"
    if not shutil.which("g++"):
        return "no C++ compiler (g++)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "no headers of Python"
    return ""


def built(root: Path | None = None) -> Path:
    """Return the folder of the compiled stand-in; compile it first if it is missing or stale."""
    if reason := why_not():
        raise CannotBuildError(reason)
    folder = (root or Path(tempfile.gettempdir()) / f"stand-in-cuda-{os.getuid()}") / _key()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of one test run build it only once
        if not (folder / ".done").exists():
            _compile(folder)
            (folder / ".done").touch()
    return folder


def _key() -> str:
    # The path of torch is no part of the key, so that all checkouts with the same version share the file.
    version = _torch_version()
    parts = (str(version["__version__"]), str(version["git_version"]), str(sysconfig.get_config_var("EXT_SUFFIX")))
    digest = hashlib.sha256(" ".join(parts).encode())
    for path in [*sorted(path for path in SOURCES.rglob("*") if path.is_file()), Path(__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _torch_version() -> dict[str, Any]:
    """Return the variables of torch.version without importing torch, which takes seconds."""
    return runpy.run_path(str(_torch_folder() / "version.py"))


def _compile(folder: Path) -> None:
    home = _torch_folder()
    flags = ["-std=c++20", "-O0", "-fPIC", "-w", "-DAT_PER_OPERATOR_HEADERS", *ALL_MEMORY]
    includes = [
        f"-I{SOURCES / 'lean'}", f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}",
        f"-I{sysconfig.get_paths()['include']}",
    ]  # fmt: skip
    _call(["g++", *flags, "-shared", str(SOURCES / "accelerator.cpp"), "-o", str(folder / PRELOADED), "-ldl"])
    # One translation unit, so that the headers of torch, which take most of the time, are parsed once.
    sources = [path for path in sorted(SOURCES.glob("*.cpp")) if path.name != "accelerator.cpp"]
    whole = folder / "whole.cpp"
    whole.write_text("".join(f'#include "{path}"\n' for path in sources))
    # No rpath, because torch is imported first, and the dynamic linker finds loaded libraries by name.
    libraries = [f"-L{home / 'lib'}", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    flags += ["-fvisibility=hidden", *includes, "-shared"]
    _call(["g++", *flags, str(whole), "-o", str(folder / MODULE), *libraries])


def _call(line: list[str]) -> None:
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuildError(f"{' '.join(line)}\n{done.stderr[-4000:]}")
