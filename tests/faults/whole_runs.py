"""Run accel-run in forked processes, kill it at random, and check what must hold afterwards.

This module runs in a fork of the fork server.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runner.durable import checkpoint, files
from runner.durable.system import System
from tests.faults import saver
from tests.waiting import wait_until

NAME = "mine"
TASK = Path(__file__).with_name("task_of_faults.py")
WORDS = ("train", "--task", str(TASK), f"run={NAME}", "device=cpu", "monitor=off")
UPDATES = 60


@dataclass(frozen=True)
class KilledCommand:
    """How a command ended; `code` is negative for a signal.

    acknowledged  the last checkpoint that was on disk
    pids          the processes of the command when it was killed; the first one leads their session
    """

    code: int
    out: str
    acknowledged: int
    pids: tuple[int, ...]


class Acknowledging(System):
    """Reports each checkpoint that is on disk, which means that it was renamed and its folder was synced."""

    def __init__(self, acknowledge: Callable[[str, int], None]) -> None:
        self._acknowledge = acknowledge
        self._renamed = 0

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        result = re.fullmatch(r"update-(\d+)", Path(target).name)
        self._renamed = int(result[1]) if result else self._renamed

    def fsync(self, descriptor: int) -> None:
        super().fsync(descriptor)
        if self._renamed and Path(f"/proc/self/fd/{descriptor}").readlink().name == "checkpoints":
            self._acknowledge("saved", self._renamed)
            self._renamed = 0


@dataclass(frozen=True)
class End:
    """When and how a command is killed.

    at, moment  at this file operation, counted from 1; 0: at none
    after_operation  by another process, once this operation has started (0: immediately); None: never
    environment  environment variables for the task
    whole_group  kill the workers together with the command; otherwise they become orphans
    """

    at: int = 0
    moment: str = "before"
    after_operation: int | None = None
    environment: Mapping[str, str] | None = None
    whole_group: bool = True


NEVER = End()


def run(
    args: tuple[str, ...],
    folder: Path,
    end: End = NEVER,
    cut: Callable[[], None] | None = None,
    before: int = 0,
    output: Path | None = None,
) -> KilledCommand:
    """Run a command in `folder` to completion, or kill it at `end`, after calling `cut` if given.

    output  file for its output, if not beside the folder
    """
    output = output or Path(f"{folder}.out")
    here = os.getpid()

    def die() -> None:
        if cut is not None:
            cut()
        os.killpg(os.getpid(), signal.SIGKILL) if end.whole_group else os.kill(os.getpid(), signal.SIGKILL)

    def work(report: Callable[[str, int], None]) -> None:
        assert os.getpid() != here
        real = Acknowledging(report)
        system = saver.Interrupted(die, end.at, end.moment, real, reports_operations=end.after_operation is not None)
        system.report = lambda number: report("operations", number)
        with files.use_system(system):
            code = _main(args, folder, output, end.environment or {})
        (output.with_suffix(".operations")).write_text(str(system.count))
        os._exit(code)

    pid, listener = saver.start(work, System(), before)
    pids = (pid,)
    if end.after_operation is not None:
        listener.wait_for("operations", end.after_operation)
        pids = (pid, *session_of(pid))
        listener.receive()
        if cut is not None:
            cut()
        if end.whole_group:
            with suppress(ProcessLookupError):  # an early process does not lead a session yet
                os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if end.after_operation is None:
        listener.receive()
    listener.close()
    text = output.read_text(errors="replace") if output.exists() else ""
    code = os.waitstatus_to_exitcode(status)
    return KilledCommand(code, text, listener.acknowledged.saved, pids)


def session_of(leader: int) -> list[int]:
    """Return the processes of the session that `leader` leads, including itself."""
    result = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                result.append(int(process.name))
    return result


def num_operations(folder: Path) -> int:
    """Return the number of file operations of the last command in `folder` that was not killed."""
    return int(Path(f"{folder}.operations").read_text())


def assert_same(uninterrupted: Path, other: Path) -> None:
    """Assert bitwise equal weights, optimizer state, random state and rows."""
    ours, theirs = (_final(folder) for folder in (other, uninterrupted))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), f"{name} differs"
    assert metric_rows(other) == metric_rows(uninterrupted), "metrics.jsonl has other rows"


def assert_tidy(folder: Path) -> None:
    """Assert that the run is done and unlocked, its logs have complete lines, and no temporary files are left."""
    path = folder / "outputs" / NAME
    state = json.loads((path / "run.json").read_text())
    assert state["state"] == "done", state
    assert not list(path.rglob(f"{files.TEMPORARY}*")), "temporary files are left"
    assert not list(path.rglob("damaged-*")), "a checkpoint was damaged"
    for name in ("events.jsonl", "metrics.jsonl"):
        for line in (path / name).read_text().splitlines():
            assert isinstance(json.loads(line), dict), f"{name}: {line!r}"
    for line in (path / "console.log").read_bytes().split(b"\n"):
        assert b"\0" not in line
    with (path / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def assert_gone(pids: tuple[int, ...]) -> None:
    """Assert that no process of the session is left, and no shared memory that they created."""
    wait_until(
        lambda: not session_of(pids[0]), f"the end of the processes of session {pids[0]}, which outlive their run"
    )
    segments = [path.name for path in Path("/dev/shm").iterdir() if any(f"_{pid}_" in path.name for pid in pids)]
    assert not segments, f"shared memory is left: {segments}"


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the rows of events.jsonl of this kind, without rows that a power cut has torn."""
    return [row for row in files.read_rows(folder / "outputs" / NAME / "events.jsonl") if row.get("kind") == kind]


def starts(folder: Path) -> list[dict[str, Any]]:
    """Return the starts and resumes, oldest first. A command that finds a finished run adds none."""
    return sorted(events(folder, "start") + events(folder, "resume"), key=lambda row: row["time"])


def resumed_at(folder: Path, num_before: int, acknowledged: int) -> int:
    """Return the update at which the last command started; `acknowledged` if it found a finished run.

    num_before  starts before this command
    """
    later = starts(folder)[num_before:]
    return later[-1].get("update", 0) if later else acknowledged


def metric_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without times."""
    text = (folder / "outputs" / NAME / "metrics.jsonl").read_text()
    rows = (json.loads(line) for line in text.splitlines())
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def random_end(generator: random.Random, operations: int) -> tuple[str, End]:
    """Return a random time at which to kill a command with this number of operations, and its description."""
    kind = generator.choice(("operation", "operation", "operation", "other", "other", "evaluation", "update"))
    whole_group = generator.random() < 0.5
    if kind == "operation":
        end = End(generator.randint(1, operations), generator.choice(saver.MOMENTS), whole_group=whole_group)
        return f"operation {end.at} {end.moment}", end
    if kind == "other":
        end = End(after_operation=generator.randint(0, operations), whole_group=whole_group)
        return f"other process, operation {end.after_operation} begun", end
    number = generator.choice((1, 2, 3, 11, 30))
    return f"{kind} {number}", End(environment={"ACCEL_RUN_END": f"{kind} {number}"}, whole_group=whole_group)


def _final(folder: Path) -> dict[str, torch.Tensor]:
    loaded = checkpoint.load(checkpoint.checkpoint_path(folder / "outputs" / NAME / "checkpoints", UPDATES))
    return {f"{stem}/{name}": tensor for stem in loaded.stems for name, tensor in loaded.tensors(stem).items()}


def _main(args: tuple[str, ...], folder: Path, output: Path, environment: Mapping[str, str]) -> int:
    """Run the command in a new session, with `output` as stdout and stderr."""
    import runner.cli

    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv = ["accel-run", *args]
    try:
        return runner.cli.main(list(args))
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
