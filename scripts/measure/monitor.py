"""Measure the overhead of monitoring: CPU time of the monitor thread, time of a training loop, and number of rows.

NVML is the stub of the tests, which returns stored values.
Queries of a real driver also use CPU time: on a machine with a GPU, use --real, which monitors its GPUs.

sampler   CPU seconds of the monitor's thread per second, at one sample a second, with 2 and with 8 GPUs
loop      blocks of updates of the training loop, alternately with and without the monitor: median of the ratios of
          neighboring blocks. The noise of the machine may hide the overhead of one sample per second, so the loop also
          runs with fifty, and the overhead is divided by fifty
rows      rows per device in a run of d seconds: at least d - 2

Exits with 1 and prints each missed target: the sampler must use less than SAMPLER_SHARE of a core, an update must take
less than LOOP_SHARE longer, and no rows may be missing. The lower end of the confidence interval of the overhead is
compared with LOOP_SHARE, so that a busy machine alone does not fail.

Run: python scripts/measure/monitor.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SAMPLER_SHARE = 0.005  # maximum share of one core at one sample per second
LOOP_SHARE = 0.01  # maximum share of the time of an update at one sample per second

SAMPLER = """
import json, pathlib, sys, threading, time
from runner.monitor.monitor_thread import Monitor
seconds = float(sys.argv[1])
path = pathlib.Path(sys.argv[2])
started = time.monotonic()
with Monitor(path, 1.0) as monitor:
    while not monitor.latest():
        time.sleep(0.01)
    clock = time.pthread_getcpuclockid(next(t for t in threading.enumerate() if t.name == "accel-run monitor").ident)
    opened = time.clock_gettime(clock)
    began = time.monotonic()
    time.sleep(seconds)
    spent = time.clock_gettime(clock) - opened
    passed = time.monotonic() - began
rows = [line.split(",")[2] for line in path.read_text().splitlines()[1:]]
print(json.dumps({"cpu": spent / passed, "opening_s": opened, "run_s": time.monotonic() - started,
                  "rows": min(rows.count(name) for name in set(rows)), "devices": len(set(rows))}))
"""

LOOP = """
import contextlib, io, json, pathlib, sys, time
import torch
from runner.config.request import Request
from runner.engine.opening import open_phase
from runner.monitor.monitor_thread import Monitor
rounds, block_s, folder, interval_s = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], float(sys.argv[4])
settings = ("updates=10000000", "run=measured", f"output_root={folder}", "monitor=off", "checkpoint=off", "device=cpu",
            "task=gpt", "task.size=tiny", "evaluate.every=0", f"backend.threads={torch.get_num_threads()}")
with contextlib.redirect_stdout(io.StringIO()), open_phase(Request(settings)) as phase:
    updates = phase.updates()
    for _ in range(20):
        next(updates)
    def timed(monitor):
        made, began = 0, time.perf_counter()
        with monitor or contextlib.nullcontext():
            while time.perf_counter() - began < block_s:
                next(updates)
                made += 1
            spent = time.perf_counter() - began
        return spent / made
    found = {"off": [], "on": []}
    for number in range(rounds):
        for name in ("off", "on") if number % 2 else ("on", "off"):
            path = pathlib.Path(folder) / "gpu.csv"
            found[name].append(timed(Monitor(path, interval_s) if name == "on" else None))
print(json.dumps(found))
"""


def run(code: str, environment: dict[str, str], *words: object) -> Any:
    """Run the code in a new process; return its output as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def environments(folder: Path, *, real: bool) -> dict[str, dict[str, str]]:
    """Return name -> environment in which NVML reports this number of GPUs."""
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    if real:
        return {"the GPUs of this machine": here}
    sys.path.insert(0, str(ROOT))
    from tests.nvml_stub import T4, NvmlStub, build_stub

    found = {}
    for number in (2, 8):
        (folder / str(number)).mkdir()
        stub: NvmlStub = build_stub(folder / str(number))
        facts = {key.removeprefix("0."): value for key, value in T4.items() if key.startswith("0.")}
        state: dict[str, object] = {"driver": "580.0", "cuda": 13000, "count": number, "event_types": 11}
        for index in range(number):
            state |= {f"{index}.{key}": value for key, value in facts.items()}
            state |= {f"{index}.uuid": f"GPU-{index:08x}-0000-4000-8000-000000000000"}
        found[f"{number} GPUs"] = stub.environment(state)
    return found


def show_loop(environment: dict[str, str], rounds: int, block_s: float, folder: Path, interval_s: float) -> float:
    """Print the overhead per update at one sample per second; return the lower end of its interval."""
    found = run(LOOP, environment, rounds, block_s, folder, interval_s)
    ratios = sorted(on / off for on, off in zip(found["on"], found["off"], strict=True))
    same = sorted(later / earlier for earlier, later in itertools.pairwise(found["off"]))
    # A confidence interval from order statistics: the number of values below the median is binomially distributed.
    low, high = interval(ratios)
    middle, shown = statistics.median(ratios), 1.0 / interval_s
    print(
        f"loop     update {1e3 * statistics.median(found['off']):.2f} ms; {shown:.0f} samples per second: "
        f"x {middle:.4f} "
        f"[{low:.4f}, {high:.4f}], one per second {(middle - 1) / shown:+.2%} [{(low - 1) / shown:+.2%}, "
        f"{(high - 1) / shown:+.2%}] ({rounds} pairs of {block_s:g} s; without the monitor, neighbors differ by "
        f"x {same[0]:.3f} to {same[-1]:.3f})",
        flush=True,
    )
    return (low - 1) / shown


def missed(sampler: dict[str, float], loop: dict[str, float], rows: dict[str, tuple[int, float]]) -> list[str]:
    """Return a line for each missed target.

    sampler  monitored GPUs -> CPU seconds per second
    loop     samples per second -> lower end of the interval of the overhead of one sample per second
    rows     monitored GPUs -> rows per device, seconds of the run
    """
    found = [
        f"the sampler takes {share:.3%} of a core with {what}: less than {SAMPLER_SHARE:.1%} is allowed"
        for what, share in sampler.items()
        if share >= SAMPLER_SHARE
    ]
    found += [
        f"an update takes at least {share:.2%} longer, measured at {what}: less than {LOOP_SHARE:.0%} is allowed"
        for what, share in loop.items()
        if share >= LOOP_SHARE
    ]
    return found + [
        f"{count} rows per device of {what} in {seconds:.1f} s: a run of d seconds must have d - 2"
        for what, (count, seconds) in rows.items()
        if count < seconds - 2
    ]


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, by order statistics."""
    from math import comb

    n, out = len(values), 0
    while out + 1 < n / 2 and 2 * sum(comb(n, k) for k in range(out + 2)) / 2**n <= 0.05:
        out += 1
    return values[out], values[-1 - out]


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of the measurement of the sampler")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of blocks of the loop")
    parser.add_argument("--block", type=float, default=4.0, help="seconds of a block")
    parser.add_argument("--real", action="store_true", help="use the NVML of the driver")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, "
          f"load {os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shown = environments(folder, real=arguments.real)
        sampler, loop, rows = {}, {}, {}
        for what, environment in shown.items():
            found = run(SAMPLER, environment, arguments.seconds, folder / f"{len(what)}-{what.split()[0]}.csv")
            print(f"sampler  {what}: {found['cpu']:.3%} of one core; opening took {1e3 * found['opening_s']:.0f} ms")
            print(f"rows     {what}: {found['rows']} per device in {found['run_s']:.1f} s", flush=True)
            sampler[what], rows[what] = found["cpu"], (found["rows"], found["run_s"])
        for interval_s in (1.0, 0.02):
            first = next(iter(shown.values()))
            least = show_loop(first, arguments.rounds, arguments.block, folder, interval_s)
            loop[f"{1 / interval_s:.0f} samples per second"] = least
    failures = missed(sampler, loop, rows)
    for failure in failures:
        print(f"MISSED   {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
