"""How much of the wait for a core the benchmark attributes to another job: seconds beside a job on the same core.

The thread computes on one core that another process keeps busy. All that it waits is the other job's doing, so the
share that is found should be near 1 and at least 0.5.
Run: python scripts/measure/run_queue.py
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from runner.tools.measure.run_queue import RunQueueWait

LEAST = 0.5  # of the wait


def compute(seconds: float) -> None:
    """Use this many seconds of CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(1000))


def main() -> int:
    """Print the wait and the part of it that is found; return 1 where that is too little."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="of CPU time to compute")
    seconds = parser.parse_args().seconds
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    starter = os.fork()  # its child is not a process of ours
    if starter == 0:
        if os.fork() == 0:
            compute(20.0 * seconds)
        os._exit(0)
    os.waitpid(starter, 0)
    waits = RunQueueWait()
    before = waits.sample(begins=True)
    compute(seconds)
    after = waits.sample(begins=False)
    if before is None or after is None:
        print("this process has a CPU quota, or the kernel does not count")
        return 0
    waited_s = after.wait_s - before.wait_s
    found_s = waits.wait_for_others_s(before, after)
    share = found_s / waited_s if waited_s else 0.0
    print(
        f"waited {waited_s:.2f} s for {seconds:g} s of CPU time; found {found_s:.2f} s: {share:.2f} (at least {LEAST})"
    )
    return int(waited_s > 0 and share < LEAST)


if __name__ == "__main__":
    sys.exit(main())
