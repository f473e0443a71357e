"""Cut the power of a saving process repeatedly and check which data are left. Runs in forks of the fork server."""

from __future__ import annotations

import io
import os
import random
import signal
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from runner.durable.system import System
from tests.faults import saver, whole_runs
from tests.faults.disk import Disk, power_on

CUTS_PER_DISK = 20
DISKS = [
    (options, block_size)
    for options in (
        "", "noauto_da_alloc", "data=writeback", "data=journal", "nodelalloc", "noauto_da_alloc,nodelalloc",
    )
    for block_size in (4096, 1024)
]  # fmt: skip


class WithoutSync(System):
    """Turns every sync into a no-op."""

    def fsync(self, descriptor: int) -> None:
        pass


class WithoutFileSync(System):
    """Syncs only folders."""

    def fsync(self, descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.fsync(descriptor)


class WithoutFolderSync(System):
    """Syncs only files."""

    def fsync(self, descriptor: int) -> None:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.fsync(descriptor)


SYSTEMS: dict[str, type[System]] = {
    "real": System, "no fsync": WithoutSync, "no fsync of files": WithoutFileSync,
    "no fsync of folders": WithoutFolderSync,
}  # fmt: skip


@dataclass
class Campaign:
    """Counts of a campaign. lost: failed checks, with what is needed to reproduce them."""

    cuts: int = 0
    inside: int = 0
    saves: int = 0
    lost: list[str] = field(default_factory=list)
    slowest_recovery_s: float = 0.0
    disks: Counter[str] = field(default_factory=Counter)


def cut_saves(count: int, seed: int, system: str = "real", num_lost: int | None = None) -> Campaign:
    """Cut the power `count` times while checkpoints, rows and run.json are written through `system`.

    num_lost  stop after this number of cuts with data loss; None: never
    """
    campaign = Campaign()
    with tempfile.TemporaryDirectory() as folder, power_on(Path(folder)) as disk:
        for first in range(0, count, CUTS_PER_DISK):
            if num_lost is None or len(campaign.lost) < num_lost:
                last = min(count, first + CUTS_PER_DISK)
                _cut_one_disk(disk, range(first, last), seed, system, campaign, num_lost)
    return campaign


def _cut_one_disk(disk: Disk, numbers: range, seed: int, system: str, campaign: Campaign, num_lost: int | None) -> None:
    options, block_size = random.Random(f"{seed} disk {numbers[0]}").choice(DISKS)
    campaign.disks[f"{options or 'defaults'} {block_size}"] += len(numbers)
    disk.format(options, block_size)
    update = saver.assert_recovers(disk.path, saver.Acknowledged())
    for number in numbers:
        if len(campaign.lost) == num_lost:
            break
        generator = random.Random(f"{seed} cut {number}")
        acknowledged, how = _cut_once(disk, update, generator, SYSTEMS[system]())
        campaign.cuts += 1
        campaign.inside += how.startswith("operation")
        campaign.saves += acknowledged.saved - update
        disk.unmount()
        disk.mount()
        began = time.perf_counter()
        try:
            update = saver.assert_recovers(disk.path, acknowledged, garbage="writeback" in options)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            campaign.lost.append(f"seed {seed}, cut {number} ({how}; mounted with {options!r}): {cause}")
            disk.format(options, block_size)
            update = saver.assert_recovers(disk.path, saver.Acknowledged())
        campaign.slowest_recovery_s = max(campaign.slowest_recovery_s, time.perf_counter() - began)
    disk.unmount()


def _cut_once(disk: Disk, update: int, generator: random.Random, real: System) -> tuple[saver.Acknowledged, str]:
    """Cut the power of a saving process. Half of the cuts are at an operation, the others at any time."""
    in_operation = generator.random() < 0.5
    at, moment = generator.randint(1, 160), generator.choice(saver.MOMENTS)
    written_back = frozenset(generator.sample(range(1, 161), generator.choice((0, 0, 2, 12))))

    def end() -> None:
        disk.cut()
        os._exit(0)

    def before_each(number: int) -> None:
        if number in written_back:
            disk.write_back()

    system = saver.Interrupted(
        end, at if in_operation else -1, moment, real, before_each, reports_operations=not in_operation
    )
    pid, listener = saver.start(partial(saver.save_endlessly, disk.path, update + 1), system, update)
    how = f"operation {at} {moment}, written back at {sorted(written_back)}"
    if not in_operation:
        how = f"from outside, operation {at} begun"
        listener.wait_for("operations", at - 1)
        _cut_and_kill(disk, pid, listener)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"the saving process ended with {code} ({how})"
    if in_operation:
        listener.receive()
    listener.close()
    return listener.acknowledged, how


def _cut_and_kill(disk: Disk, pid: int, listener: saver.Listener) -> None:
    """Cut the power and kill the process; later acknowledgments do not count.

    The process survives the power cut for an instant, and an fsync that is running during the ioctl may return 0 even
    though the data are lost (2 of 100 cuts at random times on Linux 6.18, always an append).
    """
    listener.receive()
    disk.cut()
    os.kill(pid, signal.SIGKILL)


def cut_runs(count: int, seed: int) -> Campaign:
    """Cut the power of complete runs `count` times; the same command must resume each and reach the same end."""
    campaign = Campaign()
    with (
        tempfile.TemporaryDirectory() as name,
        tempfile.TemporaryDirectory() as elsewhere,
        power_on(Path(name)) as disk,
    ):
        uninterrupted, output = Path(elsewhere) / "straight", Path(elsewhere) / "disk.out"
        uninterrupted.mkdir()
        reference = whole_runs.run(whole_runs.WORDS, uninterrupted)
        assert reference.code == 0, reference.out
        operations = whole_runs.num_operations(uninterrupted)
        for number in range(count):
            generator = random.Random(f"{seed} cut of a run {number}")
            options, block_size = generator.choice(DISKS)
            disk.format(options, block_size)
            ends = [options]
            try:
                _cut_one_run(disk, output, generator, operations, ends, campaign)
                whole_runs.assert_same(uninterrupted, disk.path)
            except Exception as error:
                campaign.lost.append(f"seed {seed}, run {number} ({'; '.join(ends)}): {type(error).__name__}: {error}")
    return campaign


def _cut_one_run(
    disk: Disk,
    output: Path,
    generator: random.Random,
    operations: int,
    ends: list[str],
    campaign: Campaign,
) -> None:
    acknowledged = 0
    for _ in range(generator.choice((1, 2))):
        kind = generator.random() < 0.7
        end = whole_runs.End(generator.randint(1, operations), generator.choice(saver.MOMENTS))
        end = end if kind else whole_runs.End(after_operation=generator.randint(0, operations))
        ends.append(str(end))
        result = whole_runs.run(whole_runs.WORDS, disk.path, end, disk.cut, acknowledged, output)
        acknowledged = result.acknowledged
        campaign.cuts += result.code != 0
        campaign.inside += result.code != 0 and kind
        disk.unmount()
        disk.mount()
    num_before = len(whole_runs.starts(disk.path))
    last = whole_runs.run(whole_runs.WORDS, disk.path, before=acknowledged, output=output)
    assert last.code == 0, f"exit {last.code}: {last.out}"
    assert "Traceback" not in last.out, last.out
    update = whole_runs.resumed_at(disk.path, num_before, acknowledged)
    assert update >= acknowledged, f"update {acknowledged} was on disk, but the run resumed at {update}"


def cut_saves_in_place(count: int, seed: int, write: Callable[[Path, bytes], None]) -> Campaign:
    """Cut the power `count` times while `write` puts the output of `torch.save` into one file."""
    campaign = Campaign()
    with tempfile.TemporaryDirectory() as folder, power_on(Path(folder)) as disk:
        for number in range(count):
            disk.format("", 4096)
            file = disk.path / "checkpoint.pt"

            def work(report: Callable[[str, int], None], file: Path = file) -> None:
                for update in range(1, 1000):
                    write(file, _pickled(update))
                    report("saved", update)

            pid, listener = saver.start(work, System())
            listener.wait_for("saved", random.Random(f"{seed} in place {number}").randint(1, 6))
            _cut_and_kill(disk, pid, listener)
            os.waitpid(pid, 0)
            listener.close()
            acknowledged = listener.acknowledged
            disk.unmount()
            disk.mount()
            campaign.cuts += 1
            campaign.saves += acknowledged.saved
            try:
                result = int(torch.load(file, weights_only=True)["update"])
                assert result >= acknowledged.saved, (
                    f"update {acknowledged.saved} was acknowledged, but {result} was found"
                )
            except Exception as error:
                campaign.lost.append(f"cut {number}: {type(error).__name__}: {error}".splitlines()[0])
            disk.unmount()
    return campaign


def write_in_place(path: Path, content: bytes) -> None:
    """Overwrite the file, as torch.save to a path does."""
    path.write_bytes(content)


def write_and_rename(path: Path, content: bytes) -> None:
    """Write another file and rename it, without fsync."""
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").replace(path)


def _pickled(update: int) -> bytes:
    buffer = io.BytesIO()
    torch.save({"update": update, "weight": torch.full((20_000,), float(update))}, buffer)
    return buffer.getvalue()
