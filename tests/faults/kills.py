"""Kill saving processes and complete runs at random operations and check the files. Runs in a fork of the fork server.

A process kills itself at its n-th file operation, or another process kills it when that operation is reported to it. No
test depends on a clock.
"""

from __future__ import annotations

import io
import os
import random
import signal
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runner.durable import files
from runner.durable.system import System
from tests.faults import saver, whole_runs
from tests.faults.power_cuts import WithoutSync


@dataclass
class Campaign:
    """Counts of a campaign. bad: failed checks, with what is needed to reproduce them."""

    kills: int = 0
    inside: int = 0
    saves: int = 0
    runs: int = 0
    bad: list[str] = field(default_factory=list)
    moments: Counter[str] = field(default_factory=Counter)


def kill_saves(folder: Path, count: int, seed: int) -> Campaign:
    """Kill a saving process `count` times, about half of them at an operation, the others from another process."""
    with files.use_system(WithoutSync()):  # written data survive a kill, whether on disk or not
        return _kill_saves(folder, count, seed)


def _kill_saves(folder: Path, count: int, seed: int) -> Campaign:
    campaign = Campaign()
    root = folder / "first"
    update = saver.assert_recovers(root, saver.Acknowledged())
    for number in range(count):
        generator = random.Random(f"{seed} kill {number}")
        acknowledged, how = _kill_once(root, update, generator)
        campaign.kills += 1
        campaign.inside += how.startswith("operation")
        campaign.saves += acknowledged.saved - update
        try:
            update = saver.assert_recovers(root, acknowledged)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            campaign.bad.append(f"seed {seed}, kill {number} ({how}): {cause}")
            root = folder / f"after-{number}"
            update = saver.assert_recovers(root, saver.Acknowledged())
    return campaign


def _kill_once(root: Path, update: int, generator: random.Random) -> tuple[saver.Acknowledged, str]:
    in_operation = generator.random() < 0.5
    at, moment = generator.randint(1, 160), generator.choice(saver.MOMENTS)
    real = System() if generator.random() < 0.1 else WithoutSync()
    system = saver.Interrupted(
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        at if in_operation else -1,
        moment,
        real,
        reports_operations=not in_operation,
    )
    pid, listener = saver.start(partial(saver.save_endlessly, root, update + 1), system, update)
    how = f"operation {at} {moment}"
    if not in_operation:
        how = f"by another process, operation {at} begun"
        listener.wait_for("operations", at - 1)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    listener.receive()
    listener.close()
    assert code == -signal.SIGKILL, f"the saving process ended with {code} ({how})"
    return listener.acknowledged, how


def kill_runs(folder: Path, count: int, seed: int, args: tuple[str, ...] = ()) -> Campaign:
    """Kill complete runs `count` times; the same command must resume each and reach the same end."""
    campaign = Campaign()
    args = (*whole_runs.WORDS, *args)
    uninterrupted = folder / "straight"
    uninterrupted.mkdir()
    reference = whole_runs.run(args, uninterrupted)
    assert reference.code == 0, reference.out
    operations = whole_runs.num_operations(uninterrupted)
    number = 0
    while campaign.kills < count:
        number += 1
        generator = random.Random(f"{seed} run {number} {args}")
        with tempfile.TemporaryDirectory(dir=folder) as name:
            ends: list[str] = []
            try:
                _kill_one_run(Path(name), uninterrupted, args, generator, operations, ends, campaign)
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                campaign.bad.append(f"seed {seed}, run {number} ({'; '.join(ends)}): {cause}")
        campaign.runs += 1
    return campaign


def _kill_one_run(
    folder: Path,
    uninterrupted: Path,
    args: tuple[str, ...],
    generator: random.Random,
    operations: int,
    ends: list[str],
    campaign: Campaign,
) -> None:
    acknowledged = 0
    for _ in range(generator.choice((1, 1, 2, 4))):
        how, end = whole_runs.random_end(generator, operations)
        ends.append(how)
        result = whole_runs.run(args, folder, end, before=acknowledged)
        acknowledged = result.acknowledged
        assert result.code in (0, -signal.SIGKILL), f"exit {result.code}: {result.out}"
        campaign.kills += result.code != 0
        campaign.moments[how.split()[0]] += result.code != 0
        whole_runs.assert_gone(result.pids)
    num_before = len(whole_runs.starts(folder))
    last = whole_runs.run(args, folder, before=acknowledged)
    assert last.code == 0, f"exit {last.code}: {last.out}"
    assert "Traceback" not in last.out, last.out
    actual = whole_runs.resumed_at(folder, num_before, acknowledged)
    assert actual >= acknowledged, f"update {acknowledged} was on disk, but the run resumed at {actual}"
    whole_runs.assert_same(uninterrupted, folder)
    whole_runs.assert_tidy(folder)


class Killing(io.FileIO):
    """A file that kills its process halfway through a given write, counted from 1."""

    def __init__(self, path: Path, at: int) -> None:
        super().__init__(path, "wb")
        self.left = at

    def write(self, data: Any) -> int:
        self.left -= 1
        if self.left == 0:
            super().write(bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(data)


def kill_in_place(folder: Path, count: int, seed: int) -> Campaign:
    """Kill a process `count` times while it overwrites its only checkpoint, as torch.save to a path does."""
    campaign = Campaign()
    file = folder / "checkpoint.pt"

    def save(update: int, at: int = -1) -> Killing:
        with Killing(file, at) as opened:
            torch.save({"update": update, "weight": torch.full((500_000,), float(update))}, opened)
        return opened

    num_writes = -1 - save(1).left
    for number in range(count):
        at = random.Random(f"{seed} in place {number}").randint(1, num_writes)
        save(1)
        pid, listener = saver.start(lambda report, at=at: save(2, at), System())  # type: ignore[misc]
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        listener.close()
        campaign.kills += 1
        try:
            torch.load(file, weights_only=True)
        except Exception as error:
            campaign.bad.append(f"kill {number} at write {at}: {type(error).__name__}: {error}".splitlines()[0])
    return campaign
