"""Under system limits of any size, a run either completes or ends with a message, and no process remains.

The limits are those of processes and threads (pids of a cgroup), open files (RLIMIT_NOFILE) and address space
(RLIMIT_AS), with one and two ranks and up to three data workers. The default run tries some values;
`scripts/faults.sh --long limits` tries all. The tally shows the longest time until the last process of a run was gone,
over all runs, and over those that failed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from runner.base.errors import Exit
from tests.faults.tallies import Tally
from tests.forkserver import ForkServer
from tests.waiting import wait_until

TASK = Path(__file__).with_name("task_to_attack.py")
BASE = ["train", "--task", str(TASK), "device=cpu", "monitor=off", "run=mine", "updates=10", "backend.threads=1"]
LIMIT_S = 60.0  # reached only if a run hangs

# Processes of the fork server exit with os._exit; a normal process terminates and joins its children first.
ENDS = """
import multiprocessing.util, runner.cli
def main(words, real=runner.cli.main):
    code = real(words)
    multiprocessing.util._exit_function()
    return code
runner.cli.main = main
"""
NOFILE = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({value}, {value}))"
PIDS = "import os, pathlib; pathlib.Path({place!r}, 'cgroup.procs').write_text(str(os.getpid()))"
SPACE = """
import os, pathlib, resource
taken = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (taken + ({value} << 20),) * 2)
"""


@dataclass(frozen=True)
class Kind:
    """A limit: the values to try, and those at which runs once hung, failed differently or left workers behind."""

    values: tuple[int, ...]
    known: dict[tuple[int, int], tuple[int, ...]]  # (ranks, workers) -> values


KINDS = {
    "open files": Kind(tuple(range(3, 72)), {(1, 1): (26,), (1, 2): (8, 22, 28), (2, 1): (20,)}),
    "processes": Kind(tuple(range(1, 28)), {(1, 1): (5,), (1, 2): (3, 6, 9), (2, 1): (2, 3, 8)}),
    "address space": Kind((*range(0, 64, 4), *range(64, 1024, 16), 2048), {(1, 2): (16,), (2, 1): (0, 48)}),
}
SHAPES = ((1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3))
# Exit codes under a limit. Ranks may also be lost (84): system libraries abort a rank that gets no thread.
CODES = {Exit.DONE, Exit.SYSTEM, Exit.HOST_MEMORY}
CODES_OF_RANKS = CODES | {Exit.RANK_LOST}


@pytest.fixture
def group() -> Iterator[Callable[[int], Path]]:
    """Return a function that creates a cgroup with the given limit of processes and threads."""
    root = next((place for place in map(Path, ("/sys/fs/cgroup/pids", "/sys/fs/cgroup")) if _grants(place)), None)
    if root is None:
        pytest.skip("cannot create a cgroup that limits processes")
    groups: list[Path] = []

    def of(value: int) -> Path:
        groups.append(root / f"accel-run-test-{os.getpid()}-{len(groups)}")
        groups[-1].mkdir()
        (groups[-1] / "pids.max").write_text(str(value))
        return groups[-1]

    yield of
    for place in groups:
        place.rmdir()


def _grants(root: Path) -> bool:
    place = root / f"accel-run-test-{os.getpid()}"
    try:
        place.mkdir()
    except OSError:
        return False
    result = (place / "pids.max").exists()
    place.rmdir()
    return result


def processes_in(folder: Path) -> list[str]:
    """Return the processes with this working folder; ranks and workers lead their own sessions."""
    result = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                result.append(f"{process.pid} {process.name()}")
        except psutil.Error:
            continue
    return result


def plans(kind: Kind, seed: int, count: int) -> list[tuple[int, int, int]]:
    """Return (ranks, workers, value) of the runs: those that once failed, and `count` others."""
    known = [(*shape, value) for shape, values in kind.known.items() for value in values]
    others = [(*shape, value) for shape in SHAPES for value in kind.values]
    return known + random.Random(seed).sample(others, min(count, len(others)))


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("name", KINDS)
def test_a_run_under_a_system_limit_completes_or_ends_with_a_message(
    server: ForkServer, tmp_path: Path, seed: int, amount: Callable[[int, int], int], tally: Tally,
    request: pytest.FixtureRequest, name: str,
) -> None:  # fmt: skip
    group = request.getfixturevalue("group") if name == "processes" else None
    for number, (ranks, workers, value) in enumerate(plans(KINDS[name], seed, amount(1, 1 << 20))):
        folder = tmp_path / str(number)
        folder.mkdir()
        several = ["parallelism=ddp", f"parallelism.world_size={ranks}"] if ranks > 1 else []
        before = {"open files": NOFILE, "address space": SPACE}.get(name, PIDS)
        place = str(group(value)) if group else ""
        args = [*BASE, f"dataloader.num_workers={workers}", *several]
        began = time.monotonic()
        pid = server.start(args, folder, before=ENDS + before.format(value=value, place=place))
        timer = threading.Timer(LIMIT_S, os.kill, (pid, signal.SIGKILL))
        timer.start()
        result = server.wait()
        timer.cancel()
        plan = f"{name} {value}, {ranks} ranks, {workers} workers, seed {seed}"
        wait_until(lambda: not processes_in(folder), f"{plan}: no process outlives the run")  # noqa: B023 - called here
        taken_s = round(time.monotonic() - began, 1)
        for note in ("longest_s", "longest_failed_s") if result.code else ("longest_s",):
            tally.notes[note] = max(tally.notes.get(note, 0.0), taken_s)
        assert result.code in (CODES_OF_RANKS if ranks > 1 else CODES), f"{plan}: exit {result.code}\n{result.err}"
        assert result.code == 0 or "accel-run: " in result.err, f"{plan}: no message\n{result.err}"
        assert "Traceback" not in result.err, f"{plan}: {result.err}"
        tally.tried += 1
