"""A system limit reached while a module is imported ends the run with a message and the exit code for system limits."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from runner.base.errors import Exit, find_system_limit

TASK = Path(__file__).with_name("task_to_attack.py")
LINE = ["train", "--task", str(TASK), "device=cpu", "monitor=off", "dataloader.num_workers=0", "updates=4", "run=mine"]
LIMITED = """
import resource, sys
from runner.cli import main
resource.setrlimit(resource.{name}, ({value}, {value}))
raise SystemExit(main())
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "value"), [("RLIMIT_NOFILE", 14), ("RLIMIT_AS", 400 << 20)], ids=["open files", "address space"]
)
def test_a_limit_reached_during_an_import_is_reported_as_one_problem(name: str, value: int, tmp_path: Path) -> None:
    program = [sys.executable, "-c", LIMITED.format(name=name, value=value), *LINE]
    result = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == Exit.SYSTEM, result.stderr
    assert "Traceback" not in result.stderr
    assert "ulimit" in result.stderr


def chain(cause: BaseException) -> BaseException:
    error = RuntimeError("a module cannot be loaded")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_limit"),
    [
        (OSError(errno.EMFILE, "Too many open files", "lazy.py"), True),
        (chain(OSError(errno.ENFILE, "Too many open files in system")), True),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), True),
        (ImportError("lib.so: cannot open shared object file: Too many open files"), True),
        (ImportError("lib.so: cannot open shared object file: No such file or directory"), False),
        (OSError(errno.ENOENT, "No such file or directory", "lazy.py"), False),
        (chain(ValueError("too many open files")), False),
    ],
    ids=str,
)
def test_only_system_limits_are_reported_as_such(error: BaseException, is_limit: bool) -> None:
    assert (find_system_limit(error) is not None) == is_limit
