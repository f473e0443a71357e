"""Measure by how much stalled output delays training, the reaction to SIGTERM, and the end of a run.

quiet     standard output and standard error are /dev/null
terminal  both are a terminal that was stopped with Ctrl-S
pipe      both are a pipe without an active reader
wandb     as quiet, with tracker=wandb and a server that refuses connections
disk      as quiet, with console.log on a full disk (every write to it fails)
both      terminal and wandb

updates/s  updates per second between two rows of metrics.jsonl, over `--seconds` of training
stop_s     seconds from SIGTERM to the row of the last update
end_s      seconds from the row of the last update to the exit; includes saving a checkpoint

All cases run in turn in each round; the figures are medians, the largest values are in brackets. The model is a small
MLP that logs each update. Run: python scripts/measure/stalled.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import pty
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = ("quiet", "terminal", "pipe", "wandb", "disk", "both")
TASK = ROOT / "tests" / "faults" / "task_of_words.py"
WARM_UP = 30  # updates before the measurement
START_S = 120.0  # limit for the first updates
FULL_DISK = """
import errno, os, sys
real = os.write
def write(descriptor, data):
    if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/console.log"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return real(descriptor, data)
os.write = write
from runner.cli import main
sys.exit(main(sys.argv[1:]))
"""


@contextlib.contextmanager
def opened(case: str) -> Iterator[int]:
    """Yield a descriptor for the output of a run."""
    with contextlib.ExitStack() as stack:
        if case in ("terminal", "both"):
            master, output = pty.openpty()
            stack.callback(os.close, master)
            termios.tcflow(output, termios.TCOOFF)
        elif case == "pipe":
            reader, output = os.pipe()
            stack.callback(os.close, reader)
        else:
            output = os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, output)
        yield output


def refusing_server() -> str:
    """Return the URL of a port of this machine on which nothing listens."""
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{line.getsockname()[1]}"


def last_update(run: Path) -> int:
    """Return the number of the last update in metrics.jsonl, 0 without rows."""
    try:
        rows = (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return 0
    return max((int(json.loads(row)["update"]) for row in rows if row.endswith("}") and "train/loss" in row), default=0)


def wait_for(run: Path, update: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the run has completed the update."""
    limit = time.monotonic() + START_S
    while last_update(run) < update:
        if time.monotonic() > limit or process.poll() is not None:
            sys.exit(f"no update {update} in {run}; exit code {process.poll()}")
        time.sleep(0.02)


def measure(case: str, seconds: float) -> tuple[float, float, float]:
    """Return updates per second, seconds from SIGTERM to the last update, and from there to the exit."""
    is_wandb = case in ("wandb", "both")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if is_wandb:
        environment |= {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": refusing_server()}
    with tempfile.TemporaryDirectory() as name, opened(case) as output:
        run = Path(name) / "outputs" / "mine"
        program = ["-c", FULL_DISK] if case == "disk" else ["-m", "runner"]
        tracker = f"tracker={'wandb' if is_wandb else 'none'}"
        settings = ["device=cpu", "monitor=off", "log_every=1", "updates=10000000", "run=mine", "evaluate.every=0",
                    "backend.threads=1", "dataloader.num_workers=0", tracker]  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, *program, "train", "--task", str(TASK), *settings], cwd=name, env=environment,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
        try:
            wait_for(run, WARM_UP, process)
            first, began = last_update(run), time.monotonic()
            time.sleep(seconds)
            rate = (last_update(run) - first) / (time.monotonic() - began)
            process.send_signal(signal.SIGTERM)
            stopped = changed = time.monotonic()
            seen = last_update(run)
            while process.poll() is None:
                if (update := last_update(run)) != seen:
                    seen, changed = update, time.monotonic()
                time.sleep(0.01)
            ended = time.monotonic()
        finally:
            process.kill()
            process.wait()
    if process.returncode != 75:
        sys.exit(f"{case}: exit code {process.returncode} instead of 75")
    return rate, changed - stopped, ended - changed


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of the measurement of the speed")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, "
          f"load {os.getloadavg()[0]:.1f}; {arguments.rounds} rounds of {arguments.seconds:g} s")  # fmt: skip
    found: dict[str, list[tuple[float, float, float]]] = {case: [] for case in CASES}
    for _ in range(arguments.rounds):
        for case in CASES:
            found[case].append(measure(case, arguments.seconds))
    print(f"{'':9} {'updates/s':>10} {'of quiet':>9} {'stop_s':>14} {'end_s':>14}")
    for case in CASES:
        rates, stops, ends = zip(*found[case], strict=True)
        share = statistics.median(rate / quiet[0] for rate, quiet in zip(rates, found["quiet"], strict=True))
        columns = [f"{statistics.median(values):.2f} [{max(values):.2f}]" for values in (stops, ends)]
        print(f"{case:9} {statistics.median(rates):10.0f} {share:9.2f} {columns[0]:>14} {columns[1]:>14}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
