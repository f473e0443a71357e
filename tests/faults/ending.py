"""End an accel-run command at the place given by FAULT (environment, JSON). The fork server imports this module first.

at      "update" (during an update), "begin" (before one, or after the last), "evaluation", "build", "save", "recovery";
        or a way to break the product: "drops state", "restarts", "resumes older"
number  update of the phase; evaluation of this process; file operation since the start of the save or of the process
save    which save of this process
phase   for "update" and "begin"
by      SIGKILL also ends the launcher, "rank" only this rank; SIGTERM is sent to the launcher; "raise" raises an error
rank    rank that ends or raises
wait    wait for a checkpoint first; a number: for the checkpoint of this update
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.durable import files
from runner.durable.system import System
from tests.waiting import wait_until

FAULT: dict[str, Any] = json.loads(os.environ.get("FAULT") or "{}")
LAUNCHER = os.getpid()
MAX_WAIT_S = 3.0  # for a checkpoint that may never appear
CHECKPOINTS = Path("outputs/mine/checkpoints")


def reached(at: str, number: int, phase: str = "") -> None:
    """End the process if FAULT names this place."""
    if FAULT.get("at") == at and FAULT["number"] == number and FAULT.get("phase", phase) == phase and _is_mine():
        _end()


def _is_mine() -> bool:
    import torch.distributed as dist

    return FAULT.get("rank", 0) == (dist.get_rank() if dist.is_initialized() else 0)


def _end() -> None:
    wait = FAULT.get("wait", False)
    if wait is True:  # without a checkpoint, the test continues from scratch
        with suppress(AssertionError):
            wait_until(lambda: list(CHECKPOINTS.glob("update-*/MANIFEST.json")), timeout_s=MAX_WAIT_S)
    elif wait:
        wait_until(lambda: list(CHECKPOINTS.glob(f"update-{wait:010}/MANIFEST.json")), f"checkpoint {wait}")
    by = FAULT["by"]
    if by == "raise":
        raise KeyError("injected")
    if by == "SIGTERM":
        FAULT.clear()  # a second signal would stop the run immediately
        os.kill(LAUNCHER, signal.SIGTERM)
        return
    if by == "SIGKILL" and os.getpid() != LAUNCHER:
        os.kill(LAUNCHER, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class Counting(System):
    """Counts file operations since the start of the process and since the start of a save."""

    operations = saves = in_save = 0


def _count_calls(name: str) -> Any:
    real = getattr(System, name)

    def call(self: Counting, *given: Any) -> Any:
        self.operations += 1
        self.in_save += 1
        if name == "mkdir" and ".tmp-update" in str(given[0]):
            self.saves, self.in_save = self.saves + 1, 0
        if FAULT.get("at") == "recovery":
            reached("recovery", self.operations)
        elif FAULT.get("save") == self.saves:
            reached("save", self.in_save)
        return real(self, *given)

    return call


for _name in [name for name in vars(System) if not name.startswith("_")]:
    setattr(Counting, _name, _count_calls(_name))

if FAULT.get("at") in ("save", "recovery"):
    _through = files.use_system(Counting())
    _through.__enter__()


def _drop_state() -> None:
    """Do not restore the state of the random number generators."""
    import runner.engine.phase

    runner.engine.phase.restore_rank_random_state = lambda *_: None


def _delete_checkpoints(count: int | None) -> None:
    """Delete the newest `count` checkpoints (None: all) before the run looks for one to resume from."""
    from runner.engine import opening

    real = opening.find_resume_point

    def find_resume_point(*given: Any) -> Any:
        for path in sorted(CHECKPOINTS.glob("update-*"), reverse=True)[:count]:
            shutil.rmtree(path)
        return real(*given)

    opening.find_resume_point = find_resume_point


BROKEN = {
    "drops state": _drop_state,
    "restarts": lambda: _delete_checkpoints(None),
    "resumes older": lambda: _delete_checkpoints(1),
}
if FAULT.get("at") in BROKEN:
    BROKEN[FAULT["at"]]()
