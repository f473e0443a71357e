"""Save address space under a limit (`ulimit -v`), and raise an error if importing PyTorch would exceed the limit.

When the limit is reached, C code may not report an error: OpenBLAS exits with code 1, the C++ library aborts the
process, and threads wait for others that could not start. So a separate process tries the import first.
"""

from __future__ import annotations

import ctypes
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

from runner.base.errors import SystemLimit

MIB = 1 << 20
# Reserve for the run itself. A run of 58 weights on one thread needs about 50 MiB after the import (torch 2.13), so it
# may still fail just above the limits that are refused.
MARGIN_MIB = 40
IMPORT_TIMEOUT_S = 10.0
AMPLE_MIB = 8192  # above this limit, importing PyTorch cannot fail for lack of address space
_M_ARENA_MAX = -8  # malloc.h of glibc


def prepare_for_limit() -> None:
    """Save address space, and check it before torch is imported; does nothing if the limit is ample."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or limit > AMPLE_MIB * MIB:
        return
    with suppress(Exception):  # the C library is not glibc
        # Otherwise, malloc reserves 64 to 128 MiB of address space for each of the first threads.
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    sys.meta_path.insert(0, _TorchFinder())


class _TorchFinder(MetaPathFinder):
    """Checks the address space before torch is first imported; the other finders perform the import."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "torch" and self in sys.meta_path:
            sys.meta_path.remove(self)
            _require_space_for_torch()


def _require_space_for_torch() -> None:
    """Raise SystemLimit if a process as large as this one cannot import torch under this limit."""
    limit_mib = resource.getrlimit(resource.RLIMIT_AS)[0] // MIB
    # The size includes threads and modules that the test process does not have.
    num_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MARGIN_MIB * MIB
    try:
        result = subprocess.run(
            # -P: files in the current folder must not replace modules. The path of this process finds the same torch.
            [sys.executable, "-P", "-c", _PROGRAM, str(num_bytes), *sys.path],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            check=False, timeout=IMPORT_TIMEOUT_S,
        )  # fmt: skip
    except (subprocess.TimeoutExpired, OSError):
        return  # inconclusive: the disk is slow (at the limit, imports fail at once), or no process can be started
    was_killed = result.returncode in (-signal.SIGKILL, -signal.SIGXCPU)  # not for lack of address space
    if result.returncode and not was_killed:
        what = f"the limit on the address space, {limit_mib} MiB, is too small for PyTorch"
        raise SystemLimit(what, fix="raise the limit with ulimit -v, or remove it: ulimit -v unlimited")


_PROGRAM = """
import mmap, pathlib, sys
missing = int(sys.argv[1]) - int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
reserved = mmap.mmap(-1, missing, prot=0) if missing > 0 else None
sys.path[:] = sys.argv[2:]
try:
    import torch
except MemoryError:
    sys.exit(1)
except Exception as error:  # errors other than lack of memory: the actual import reports them
    text = str(error).lower()
    is_memory = any(cause in text for cause in ("failed to map", "cannot allocate", "cannot create"))
    sys.exit(is_memory and "static tls" not in text)
"""
