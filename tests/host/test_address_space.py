"""With a limit on the address space, PyTorch fits or the command is rejected, and threads reserve little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runner.base.errors import Exit

TASK = Path(__file__).parents[1] / "faults" / "task_to_attack.py"
LINE = ["train", "--task", str(TASK), "device=cpu", "monitor=off", "updates=4", "run=mine", "backend.threads=1"]
PEAK = """
import pathlib, re, torch
print(re.search(r"VmPeak:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])
"""
LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_AS, ({value} << 20,) * 2)
from runner.cli import main
raise SystemExit(main())
"""


@pytest.fixture(scope="module")
def import_mib() -> int:
    """Return the address space of a process that has imported torch, which depends on the number of cores."""
    return int(subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout) >> 10


def run_within(mib: int, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return run_program(LIMITED.format(value=mib), folder, *args)


def run_program(program: str, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


MODULE = "import mmap\nreserved = mmap.mmap(-1, 256 << 20, prot=0)\n"
IMPORTS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({value} << 20,) * 2)
from runner.base.errors import SystemLimit
from runner.host.address_space import prepare_for_limit
prepare_for_limit()
try:
    import torch
except SystemLimit as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(("mib", "code"), [(200, Exit.SYSTEM), (1000, Exit.DONE)])
def test_torch_is_imported_only_if_it_fits(mib: int, code: Exit, tmp_path: Path) -> None:
    """A trial process must be able to import it. A module of 256 MiB replaces PyTorch, whose import takes seconds."""
    (tmp_path / "torch.py").write_text(MODULE)
    result = run_program(IMPORTS.format(value=mib), tmp_path)
    assert result.returncode == code, result.stderr
    assert (f"{mib} MiB" in result.stdout) == (code != Exit.DONE)


THREADS = """
import pathlib, resource, threading
from runner.host.address_space import prepare_for_limit
resource.setrlimit(resource.RLIMIT_AS, (4096 << 20,) * 2)
prepare_for_limit()
size = lambda: int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() >> 20
threading.stack_size(256 << 10)
together, before = threading.Barrier(5), size()
def allocate():
    held = bytes(10_000)
    together.wait()
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads: thread.start()
together.wait()
print(size() - before)
together.wait()
"""


def test_threads_share_a_malloc_arena(tmp_path: Path) -> None:
    """Otherwise, malloc would reserve at least 64 MiB for each thread."""
    result = run_program(THREADS, tmp_path)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 64


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [0.2, 0.66, 0.7, 0.8, 0.87, 0.92, 0.97, 1.0])
def test_limits_below_the_import_are_rejected_with_one_message(share: float, import_mib: int, tmp_path: Path) -> None:
    result = run_within(int(share * import_mib), tmp_path, *LINE, "dataloader.num_workers=0")
    assert result.returncode == Exit.SYSTEM, result.stderr
    assert f"{int(share * import_mib)} MiB" in result.stderr
    assert "ulimit -v" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_a_run_needs_little_more_address_space_than_the_import(import_mib: int, tmp_path: Path) -> None:
    # With a malloc arena per thread, the threads of the worker would take 64 MiB each, and others could not start.
    if torch.version.cuda:
        pytest.skip("a CUDA build loads more libraries in the first update")
    result = run_within(import_mib + 170, tmp_path, *LINE, "dataloader.num_workers=1")
    assert result.returncode == 0, result.stderr


def test_commands_without_torch_fit_into_a_small_limit(tmp_path: Path) -> None:
    assert run_within(120, tmp_path, "runs").returncode == 0


IGNORES = """
import multiprocessing, signal, sys, time
def wait(ready):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(600)
context = multiprocessing.get_context("fork")
ready = context.Event()
context.Process(target=wait, args=(ready,), daemon=True).start()
ready.wait()
from runner.cli import main
raise SystemExit(main())
"""


def test_a_command_ends_even_if_a_worker_ignores_sigterm(tmp_path: Path) -> None:
    program = [sys.executable, "-c", IGNORES, "runs"]
    assert subprocess.run(program, cwd=tmp_path, capture_output=True, timeout=300, check=False).returncode == 0
