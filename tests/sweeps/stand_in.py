"""A stand-in for training: a process that writes the files of a run in a tenth of a second, without torch.

Like a real run, it writes a run's files and saves on request; tests/commands/test_sweep.py includes real runs.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TRIAL = (
    "import signal, sys; from runner.host.parent_death import die_with_parent; "
    "die_with_parent(int(sys.argv.pop(1)), signal.SIGTERM); from tests.sweeps.stand_in import trial; sys.exit(trial())"
)


def trial() -> int:
    """Act as a run of three updates with an evaluation after each one, and return the exit code."""
    from runner.durable import files
    from runner.durable.directory import RunDirectory
    from runner.host.process_tree import process_identity
    from tests.waiting import wait_until

    given = dict(word.partition("=")[::2] for word in sys.argv[2:] if "=" in word)
    act, seconds = given.get("task.act", ""), float(given.get("task.seconds", "0.1"))
    metric, asked = "val/accuracy" if act == "other" else "val/loss", list[int]()

    def ask(*_: object) -> None:
        asked.append(1)
        (Path(given["output_root"].strip('"')) / given["run"] / f"asked-{len(asked)}").touch()

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, ask)
    with RunDirectory.create_or_open(Path(given["output_root"].strip('"')), given["run"]) as run:
        record = files.read_object(run.run_json)
        made = int(record.get("made", 0))
        record |= {
            "name": run.name, "state": "running", "pid": os.getpid(), "birth": process_identity(os.getpid()),
            "metrics": {},
            "host": os.uname().nodename, "overrides": sys.argv[2:], "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "threads": os.environ.get("OMP_NUM_THREADS"), "cores": len(os.sched_getaffinity(0)),
            "began": [*record.get("began", []), made],
            "wandb": sorted(key for key in os.environ if key.startswith("WANDB_")), "since": time.time(),
        }  # fmt: skip

        def end(state: str, code: int) -> int:
            run.write("run.json", json.dumps({**record, "state": state, "exit_code": code, "until": time.time()}))
            return code

        run.write("run.json", json.dumps(record))
        print(f"trains {run.name}", flush=True)
        while made < 3:
            time.sleep(seconds / 3)  # lint-tests: sleep: the duration of training; no order depends on it
            if act == "meet":
                wait_until(lambda: len(list(run.path.parent.glob("*/run.json"))) > 1, "another trial")
            if act == "hang":
                wait_until(lambda: asked)
            if act == "deaf":
                wait_until(Path(os.environ["SAVED"]).exists)
            if act == "fail" and made == 1 and "MENDED" not in os.environ:
                return end("failed", 70)
            if act == "killed" and made == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if asked and act != "deaf":
                return end("preempted", 75)
            made += 1
            record["made"] = made
            value = (math.log10(float(given.get("optimizer.lr", "0.001"))) + 2.5) ** 2 + 1 / made
            value += abs(int(given.get("task.hidden", "8")) - 16) / 100
            value += int(given.get("seed", "0")) * int(given.get("task.hidden", "8")) / 1000
            value = math.nan if act == "bad" else value
            with run.metrics.open("a") as rows:
                rows.write(json.dumps({"update": made, "phase": "train", metric: value}) + "\n")
            record["metrics"] = {metric: value}
            run.write("run.json", json.dumps(record))
        record["phases"] = {"train": {"seconds": seconds}}
        return end("done", 0)


def trial_command(args: Sequence[str], by: signal.Signals) -> list[str]:
    """Return the command line of a stand-in that replaces a trial."""
    return [sys.executable, "-P", "-c", TRIAL, str(os.getpid()), *args]


def stand_in() -> None:
    """Replace the trials of this process with stand-ins, and skip planning."""
    from runner.sweeps import pool, sweep

    pool.child_command = trial_command
    sweep.check_plannable = lambda configurations: None
