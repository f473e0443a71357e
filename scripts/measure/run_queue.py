"""Measure which fraction of the run-queue wait caused by another job the benchmark attributes to it.

The thread computes on a core that another process keeps busy. All of its run-queue wait is caused by that process, so
the attributed fraction should be close to 1, and at least 0.5.
Run: python scripts/measure/run_queue.py
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from runner.host.run_queue import RunQueueWait

MIN_SHARE = 0.5


def compute(seconds: float) -> None:
    """Compute for this many seconds of CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(1000))


def main() -> int:
    """Print the wait and the attributed fraction; return 1 if that is too small."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="CPU time of the computation")
    seconds = parser.parse_args().seconds
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    starter = os.fork()  # its child does not belong to this process
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
        print("this process has a CPU quota, or the kernel does not report the wait")
        return 0
    waited_s = after.wait_s - before.wait_s
    found_s = waits.wait_for_others_s(before, after)
    share = found_s / waited_s if waited_s else 0.0
    print(
        f"waited {waited_s:.2f} s for {seconds:g} s of CPU time; attributed {found_s:.2f} s: {share:.2f}"
        f" (at least {MIN_SHARE})"
    )
    return int(waited_s > 0 and share < MIN_SHARE)


if __name__ == "__main__":
    sys.exit(main())
