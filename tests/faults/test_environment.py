"""Failures of the disk, system limits, data workers and file names are reported, and the run can be resumed.

By default, a seed selects some cases of each kind; `scripts/test.sh --all` tests all of them.
tests/trackers/test_trackers.py tests that a tracker does not delay the start; scripts/measure/start.py measures it.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import socket
import stat
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runner.durable.checkpoint import newest_valid, verify
from tests.faults.tallies import Tally
from tests.forkserver import CompletedCommand, ForkServer
from tests.waiting import wait_until
from tests.wandb_server import MARK, marked, offline_rows

ROOT = Path(__file__).parents[2]
TASK = Path(__file__).parent / "task_in_environment.py"
BASE = ["train", "--task", str(TASK), "device=cpu", "monitor=off", "run=mine"]
LAST = 60
IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="mounting and changing the user need root")
Amount = Callable[[int, int], int]


# ---------------------------------------------------------------- the oracle


@pytest.fixture(scope="module")
def reference(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from task settings to the folder of an undisturbed run."""
    known: dict[str, Path] = {}

    def of(args: str = "") -> Path:
        if args not in known:
            folder = tmp_path_factory.mktemp("reference")
            result = server.run([*BASE, *args.split()], folder)
            assert result.code == 0, result.err
            known[args] = folder / "outputs" / "mine"
        return known[args]

    return of


Reference = Callable[[str], Path]


def assert_error(result: CompletedCommand, code: int, *causes: str) -> None:
    """Assert the exit code, the causes in the message, and no traceback."""
    assert result.code == code, f"exit {result.code}:\n{result.err}\n{result.out[-2000:]}"
    assert "Traceback" not in result.err + result.out, result.err
    for cause in causes:
        assert cause in result.err, f"{cause!r} is not in\n{result.err}"
    if code not in (0, 75):
        assert sum(line.startswith("accel-run: ") for line in result.err.splitlines()) == 1, result.err
        assert "\x1b" not in result.err


def error_of(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "error.json").read_text())
    return content


def assert_equals_reference(run: Path, reference: Path) -> None:
    """Assert that the run is done and bitwise equal to the undisturbed one."""
    record = json.loads((run / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("done", 0)
    assert not (run / "error.json").exists(), "an error.json although the state is done"
    assert not list(run.rglob(".tmp-*")), "temporary files are left"
    name = f"checkpoints/update-{LAST:010}"
    assert verify(run / name) == []
    for stem in ("model", "optimizer"):
        mine, theirs = (load_file(folder / name / f"{stem}.safetensors") for folder in (run, reference))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), f"{stem} differs"
    assert rows_of(run) == rows_of(reference)


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return updates, losses and gradient norms from metrics.jsonl."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("update", "train/loss", "train/grad_norm") if key in row} for row in rows]


def warnings_of(run: Path, text: str) -> list[str]:
    """Return the warnings of the run that contain this text."""
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [row["text"] for row in rows if row["kind"] == "warning" and text in row["text"]]


def assert_same_command_completes(
    server: ForkServer, args: list[str], folder: Path, run: Path, reference: Path, *, env: dict[str, str] | None = None
) -> None:
    """Assert that the same command, now undisturbed, ends like the reference."""
    before = newest_valid(run / "checkpoints") if run.is_dir() else None
    again = server.run(args, folder, env)
    assert_error(again, 0)
    if before is not None:
        assert f"from {before.name}" in again.out or "is finished" in again.out, again.out
    assert_equals_reference(run, reference)


# ---------------------------------------------------------------- disks


@contextmanager
def disk(folder: Path, mib: int = 8) -> Iterator[Path]:
    """Mount a small tmpfs."""
    place = folder / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def ballast(place: Path, left: int) -> None:
    """Fill the disk except for `left` bytes."""
    there = os.statvfs(place)
    with (place / "ballast").open("wb") as file:
        file.write(b"\0" * max(0, there.f_bavail * there.f_frsize - left))


BIG = "task.hidden=5000"  # checkpoints of 0.8 MB


@dataclass(frozen=True)
class FullDisk:
    """When the disk fills up, and the expected outcome.

    left   free bytes at the start; None: all
    act    what the task does to the disk, and at which update
    saved  update of the newest checkpoint afterwards, 0 for none
    """

    words: str
    code: int
    saved: int
    left: int | None = None
    act: tuple[str, int] = ("", -1)
    cause: str = "the disk is full (ENOSPC)"
    mib: int = 8


DISKS = {
    "before the first file": FullDisk("", 73, 0, left=0),
    "at the first save": FullDisk("", 74, 0, left=34_500, cause="3 saves in a row failed"),
    "at the third save": FullDisk(BIG, 74, 20, cause="3 saves in a row failed", mib=2),
    "while metrics are appended": FullDisk("log_every=1", 74, 20, act=("fill", 23), cause="3 saves in a row failed"),
    "at the end": FullDisk("log_every=60 checkpoint.every=50", 74, 50, act=("fill", 59)),
    "read-only for the rest of the run": FullDisk(
        "", 74, 20, act=("read-only", 22), cause="the file system is read-only (EROFS)"
    ),
}


@needs_root
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", DISKS)
def test_a_full_disk_loses_no_saved_update(
    name: str, server: ForkServer, reference: Reference, tmp_path: Path, tally: Tally
) -> None:
    case = DISKS[name]
    with disk(tmp_path, case.mib) as place:
        args = [*BASE, f"output_root={place}/runs", *case.words.split()]
        run = place / "runs" / "mine"
        if case.left is not None:
            ballast(place, case.left)
        act, at = case.act
        wait = str(run / "checkpoints" / f"update-{case.saved:010}")
        env = {"DISK": str(place), "ACT": act, "AT": str(at), "WAIT": wait}
        result = server.run(args, tmp_path, env if act else None)
        assert_error(result, case.code, case.cause)
        saved = newest_valid(run / "checkpoints") if run.is_dir() else None
        assert (int(saved.name[-10:]) if saved else 0) == case.saved
        if case.saved:
            assert f"last checkpoint: update {case.saved} (" in result.err
        if "saves in a row" in case.cause:
            assert len(warnings_of(run, "not saved")) == 3, "training continued after the first two failures"
        subprocess.run(["mount", "-o", "remount,rw,size=64m", str(place)], check=True)
        for path in place.glob("ballast*"):
            path.unlink()
        assert_same_command_completes(server, args, tmp_path, run, reference(case.words))
    tally.tried += 1


@pytest.mark.slow
@needs_root
def test_a_full_disk_freed_in_time_loses_nothing(
    server: ForkServer, reference: Reference, tmp_path: Path, tally: Tally
) -> None:
    with disk(tmp_path) as place:
        ballast(place, 40_000)
        args = [*BASE, f"output_root={place}/runs"]
        result = server.run(args, tmp_path, {"DISK": str(place), "ACT": "empty", "AT": "25"})
        assert_error(result, 0)
        messages = result.out + result.err
        assert "not saved: " in messages
        assert messages.count("kept in memory: ") == 1
        assert_equals_reference(place / "runs" / "mine", reference(""))
    tally.tried += 1


FAILING = """
import errno, os, random
from runner.durable import files
from runner.durable.system import System

chance, kind, dice = {chance}, errno.{kind}, random.Random({seed})

class Failing(System):
    pass

def failing(name):
    real = getattr(System, name)
    def call(self, *given):
        if dice.random() < chance:
            raise OSError(kind, os.strerror(kind))
        return real(self, *given)
    return call

for name in {names}:
    setattr(Failing, name, failing(name))
files._system = Failing()
"""


@pytest.mark.slow
def test_a_randomly_failing_disk_loses_no_saved_update(
    server: ForkServer, reference: Reference, tmp_path: Path, seed: int, amount: Amount, tally: Tally
) -> None:
    dice, whole = random.Random(f"{seed} disk"), reference("")
    ends: dict[int, int] = {}
    for number in range(amount(3, 2000)):
        kind = dice.choice(["ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES"])
        names = dice.sample(["open", "write", "fsync", "mkdir", "rename", "unlink", "truncate"], dice.randint(1, 4))
        chance = dice.choice([0.01, 0.05, 0.3])
        before = FAILING.format(chance=chance, kind=kind, seed=dice.randrange(1 << 30), names=names)
        folder = tmp_path / str(number)
        folder.mkdir()
        result = server.run(BASE, folder, None, before)
        try:
            assert result.code in (0, 73, 74, 77), result.err
            assert "Traceback" not in result.err, result.err
            run = folder / "outputs" / "mine"
            if result.code == 0:
                for path in run.rglob(".tmp-*"):  # the next start removes temporary files that could not be removed
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
                assert verify(run / "checkpoints" / f"update-{LAST:010}") == []
            else:
                assert_same_command_completes(server, BASE, folder, run, whole)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, number {number}:\n{before}\n{error}") from error
        shutil.rmtree(folder)
        ends[result.code] = ends.get(result.code, 0) + 1
        tally.tried += 1
    tally.notes["ends"] = str(ends)


ONCE = """
import errno, os
from pathlib import Path
from runner.durable import files
from runner.durable.system import System

class Once(System):
    left = 1

    def rename(self, source, target):
        if target.name.startswith("update-") and int(target.name[-10:]) {which}:
            self.left -= 1
            if self.left >= 0:
                raise OSError(errno.{kind}, os.strerror(errno.{kind}))
        super().rename(source, target)

files._system = Once()
"""


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
def test_the_last_save_is_retried_after_a_disk_error(
    kind: str, server: ForkServer, reference: Reference, tmp_path: Path, tally: Tally
) -> None:
    result = server.run(BASE, tmp_path, None, ONCE.format(kind=kind, which=f"== {LAST}"))
    assert_error(result, 0)
    assert (result.out + result.err).count("is retried: ") == 1
    assert_equals_reference(tmp_path / "outputs" / "mine", reference(""))
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    result = server.run(BASE, stopped, {"ACT": "hang-up", "AT": "23"}, ONCE.format(kind=kind, which="> 20"))
    assert_error(result, 75)
    assert (result.out + result.err).count("is retried: ") == 1
    path = newest_valid(stopped / "outputs" / "mine" / "checkpoints")
    assert path is not None
    assert path.name > "update-0000000020"
    assert_same_command_completes(server, BASE, stopped, stopped / "outputs" / "mine", reference(""))
    tally.tried += 2


# ---------------------------------------------------------------- limits


@dataclass(frozen=True)
class Limit:
    """What the task does to its own process at update 23, and the expected outcome."""

    act: str
    code: int
    cause: str
    words: str = ""


LIMITS = {
    "file descriptors": Limit("file-descriptors", 71, "too many files are open"),
    "file descriptors, with workers": Limit(
        "file-descriptors", 71, "too many files are open", "dataloader.num_workers=1"
    ),
    "file size": Limit("file-size", 74, "File too large"),
    "memory": Limit("memory", 81, "the machine is out of memory"),
    "memory for numpy": Limit("numpy-memory", 81, "the machine is out of memory"),
}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LIMITS)
def test_a_system_limit_is_reported(
    name: str, server: ForkServer, reference: Reference, tmp_path: Path, tally: Tally
) -> None:
    limit = LIMITS[name]
    args = [*BASE, *limit.words.split()]
    run = tmp_path / "outputs" / "mine"
    wait = str(run / "checkpoints" / "update-0000000020")
    result = server.run(args, tmp_path, {"ACT": limit.act, "AT": "23", "WAIT": wait})
    assert_error(result, limit.code, limit.cause)
    if limit.act != "memory":  # out of memory, the message may omit the checkpoint
        assert "last checkpoint: update 20 (" in result.err
    assert_same_command_completes(server, args, tmp_path, run, reference(""))
    tally.tried += 1


SMALL_SHM = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS: nobody else sees it
assert libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None) == 0  # MS_REC | MS_PRIVATE
assert libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size={}") == 0
"""


@pytest.mark.slow
@needs_root
@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", ["4k", "64k"])
def test_full_shared_memory_is_reported_instead_of_a_hang(
    size: str, server: ForkServer, reference: Reference, tmp_path: Path, tally: Tally
) -> None:
    args = [*BASE, "dataloader.num_workers=2", "dataloader.prefetch_factor=8"]
    result = server.run(args, tmp_path, None, SMALL_SHM.format(size))
    assert_error(result, 71, "the shared memory for batches of data workers is full", "/dev/shm")
    assert_same_command_completes(server, args, tmp_path, tmp_path / "outputs" / "mine", reference(""))
    tally.tried += 1


# ---------------------------------------------------------------- bad samples and data workers

SAMPLES = {
    "sample-raises": (65, "cannot be read: ValueError: this one is broken\n           and says so in two lines"),
    "sample-unprintable": (65, "cannot be read: Unprintable: (its __str__ raises RuntimeError)"),
    "sample-shape": (65, "samples cannot be collated into a batch: "),
    "sample-type": (65, "samples cannot be collated into a batch: "),
    "sample-nothing": (65, "samples cannot be collated into a batch: "),
    "sample-not-finite": (82, "samples that are not finite: "),
}


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("act", SAMPLES)
def test_a_bad_sample_is_reported(act: str, workers: int, server: ForkServer, tmp_path: Path, tally: Tally) -> None:
    code, cause = SAMPLES[act]
    result = server.run([*BASE, f"dataloader.num_workers={workers}"], tmp_path, {"ACT": act})
    assert_error(result, code, cause)
    error = error_of(tmp_path / "outputs" / "mine")
    if "cannot be read" in cause:
        assert error["place"]["samples"] in ([17], [77])
        assert error["where"].startswith(f"{TASK}:"), "must name the line of the dataset"
    tally.tried += 1


@pytest.mark.slow
def test_a_bad_sample_is_skipped_and_listed_on_request(server: ForkServer, tmp_path: Path, tally: Tally) -> None:
    result = server.run([*BASE, "dataloader.bad_samples=skip"], tmp_path, {"ACT": "sample-raises"})
    assert_error(result, 0)
    events = [json.loads(line) for line in (tmp_path / "outputs/mine/events.jsonl").read_text().splitlines()]
    bad = [(row["index"], row["reason"]) for row in events if row["kind"] == "bad sample"]
    assert {index for index, _ in bad} == {17, 77}
    assert len(bad) in (6, 7, 8), "once in each epoch"
    tally.tried += 1


WORKERS = {
    "worker-killed": (85, "a data worker died"),
    "worker-aborts": (85, "a data worker died"),
    "worker-calls-os-exit": (85, "a data worker died"),
    "worker-calls-sys-exit": (65, "SystemExit: 3"),
    "worker-raises": (65, "sample 77 cannot be read: Unpicklable: a"),
    "worker-out-of-memory": (81, "out of memory"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("act", WORKERS)
def test_a_failing_data_worker_is_reported(
    act: str, server: ForkServer, reference: Reference, tmp_path: Path, tally: Tally
) -> None:
    code, cause = WORKERS[act]
    args = [*BASE, "dataloader.num_workers=1"]
    result = server.run(args, tmp_path, {"ACT": act})
    assert_error(result, code, cause)
    assert_same_command_completes(server, args, tmp_path, tmp_path / "outputs" / "mine", reference(""))
    tally.tried += 1


# ---------------------------------------------------------------- permissions and paths


WITHOUT_RIGHTS = """
import ctypes
header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(header, nothing) == 0  # root without capabilities is an ordinary owner of its files
"""


@needs_root
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("root", "code"), [("closed/runs", 77), ("closed/deep/runs", 77), ("file/runs", 73)])
def test_a_folder_without_write_permission_is_reported(
    root: str, code: int, server: ForkServer, tmp_path: Path, tally: Tally
) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    (tmp_path / "file").write_text("")
    result = server.run([*BASE, f"output_root={root}"], tmp_path, None, WITHOUT_RIGHTS)
    assert_error(result, code, "the run directory cannot be created: ", "output_root")
    (tmp_path / "closed").chmod(0o700)
    tally.tried += 1


NOBODY = """
import os, pwd
def unknown(*_):
    raise KeyError("no such user")
pwd.getpwuid = pwd.getpwnam = unknown
for name in ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME", "PATH"):
    os.environ.pop(name, None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_unwritable_compile_cache_is_reported_before_the_first_update(
    num_ranks: int, server: ForkServer, tmp_path: Path, tally: Tally
) -> None:
    (tmp_path / "file").write_text("")
    ranks = ["parallelism=ddp", f"parallelism.world_size={num_ranks}"] if num_ranks > 1 else []
    args = [*BASE, *ranks, "updates=1"]
    for variable, compiles, code in (
        ("TORCHINDUCTOR_CACHE_DIR", "default", 73),
        ("TORCHINDUCTOR_CACHE_DIR", "off", 0),
        ("TRITON_CACHE_DIR", "off", 0),  # used only by GPUs
    ):
        result = server.run([*args, f"compile={compiles}"], tmp_path, {variable: str(tmp_path / "file" / "cache")})
        assert result.code == code, result
        assert (variable in result.err) == (compiles != "off")
        assert newest_valid(tmp_path / "outputs" / "mine" / "checkpoints") is None or not code
        shutil.rmtree(tmp_path / "outputs")
        tally.tried += 1


@pytest.mark.slow
def test_a_user_without_home_name_or_temporary_folder_can_train(
    server: ForkServer, reference: Reference, tmp_path: Path, tally: Tally
) -> None:
    result = server.run([*BASE, "dataloader.num_workers=1"], tmp_path, {"TMPDIR": "/nowhere"}, NOBODY)
    assert_error(result, 0)
    assert_equals_reference(tmp_path / "outputs" / "mine", reference(""))
    tally.tried += 1


@pytest.mark.slow
def test_data_workers_support_a_long_temporary_path(
    server: ForkServer, reference: Reference, tmp_path: Path, tally: Tally
) -> None:
    """The path of a socket inside the temporary folder would be too long for workers to send batches."""
    folder = tmp_path / ("l" * 100)
    folder.mkdir()
    result = server.run([*BASE, "dataloader.num_workers=1"], tmp_path, {"TMPDIR": str(folder)})
    assert_error(result, 0)
    assert_equals_reference(tmp_path / "outputs" / "mine", reference(""))
    assert list(folder.iterdir()) == []
    tally.tried += 1


def test_run_files_are_private_with_umask_0(server: ForkServer, tmp_path: Path, tally: Tally) -> None:
    result = server.run(BASE, tmp_path, None, "import os; os.umask(0)")
    assert_error(result, 0)
    run = tmp_path / "outputs" / "mine"
    open_to_all = [path for path in (run, *run.rglob("*")) if stat.S_IMODE(path.lstat().st_mode) & 0o077]
    assert open_to_all == []
    tally.tried += 1


LONG = "l" * 200
PLACES = {
    "spaces": "with two  spaces", "quotes": "it's \"quoted\"", "unicode": "größe-日本-🚀", "newline": "two\nlines",
    "escape": "a\x1b[31mred", "percent": "100%{x}", "dollar": "$HOME", "long": f"{LONG}/{LONG}/{LONG}",
    "slash": "runs/", "dots": "./a/../b", "link": "link", "home": "~/runs", "comma": "a,b=c", "bytes": "b\udcff",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PLACES)
def test_the_output_root_can_have_any_printable_name(
    name: str, server: ForkServer, tmp_path: Path, tally: Tally
) -> None:
    place = PLACES[name]
    (tmp_path / "behind").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("behind")
    escaped = place.replace("\\", "\\\\").replace('"', '\\"')
    args = [*BASE, f'output_root="{escaped}"', "updates=10"]
    env = {"HOME": str(tmp_path / "home")}
    result = server.run(args, tmp_path, env)
    if name in ("newline", "escape"):  # such characters would end a line of a script or control a terminal
        assert result.code == 78, result.err
        assert "output_root=" in result.err
        return
    if name == "bytes":  # not UTF-8: the configuration might not be writable
        assert result.code in (0, 78), result.err
        assert "Traceback" not in result.err
        return
    assert_error(result, 0)
    run = Path(str(tmp_path / place).replace("~", "home", 1) if name == "home" else tmp_path / place) / "mine"
    assert json.loads((run / "run.json").read_text())["state"] == "done"
    again = server.run(args, tmp_path, env)
    assert "is finished" in again.out, again.err
    shown = server.run(["status", "mine", args[-2]], tmp_path, env)
    assert (shown.code, shown.err) == (0, "")
    assert "mine: finished" in shown.out
    tally.tried += 1


def test_a_name_that_is_too_long_is_reported(server: ForkServer, tmp_path: Path, tally: Tally) -> None:
    without_run = BASE[:-1]
    for arguments in (
        [*without_run, "run=" + 300 * "r"],
        [*BASE, "output_root=" + 300 * "r"],
        [*BASE, "output_root=" + "/r" * 3000],
    ):
        result = server.run(arguments, tmp_path)
        assert result.code in (73, 78), result.err
        assert "unknown command" not in result.err
        assert "Traceback" not in result.err
        tally.tried += 1


# ---------------------------------------------------------------- streams, signals, simultaneous starts

STREAMS = {
    "no input": "os.close(0)",
    "no output": "os.close(1)",
    "no errors": "os.close(2)",
    "nothing": "os.close(0); os.close(1); os.close(2)",
    "full output": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    "full errors": "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)",
    "no reader": "r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2)",
}


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STREAMS)
def test_closed_or_full_standard_streams_do_not_affect_a_run(
    name: str, server: ForkServer, reference: Reference, tmp_path: Path, tally: Tally
) -> None:
    result = server.run(BASE, tmp_path, None, f"import os; {STREAMS[name]}")
    assert result.code == 0, result.err
    assert_equals_reference(tmp_path / "outputs" / "mine", reference(""))
    tally.tried += 1


@pytest.mark.slow
def test_closing_the_terminal_saves_and_stops_the_run_unless_it_ignores_sighup(
    server: ForkServer, reference: Reference, tmp_path: Path, tally: Tally
) -> None:
    result = server.run(BASE, tmp_path, {"ACT": "hang-up", "AT": "23"})
    assert_error(result, 75)
    assert_same_command_completes(server, BASE, tmp_path, tmp_path / "outputs" / "mine", reference(""))
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"  # as with nohup
    (tmp_path / "again").mkdir()
    assert_error(server.run(BASE, tmp_path / "again", {"ACT": "hang-up", "AT": "23"}, ignoring), 0)
    tally.tried += 2


@pytest.fixture(scope="module")
def other(server: ForkServer) -> Iterator[ForkServer]:
    with server.twin() as twin:
        yield twin


TOGETHER = """
import os
from pathlib import Path
door = os.open(os.environ["GO"], os.O_RDWR)  # opening a pipe for reading and writing does not block
Path(os.environ["READY"]).touch()
os.read(door, 1)
"""


def test_only_one_of_two_simultaneous_starts_runs(
    server: ForkServer, other: ForkServer, tmp_path: Path, amount: Amount, tally: Tally
) -> None:
    first_won = 0
    for number in range(amount(3, 500)):
        place = tmp_path / str(number)
        folders = [place / side for side in "ab"]
        for folder in folders:
            folder.mkdir(parents=True)
        env = {"GO": str(place / "go"), "HOLD": str(place / "hold"), "ACT": "hold", "AT": "3"}
        os.mkfifo(place / "go")
        for one, folder in zip((server, other), folders, strict=True):
            args = [*BASE, f"output_root={place}/runs", "updates=5"]
            one.start(args, folder, {**env, "READY": str(folder / "ready")}, TOGETHER)
        wait_until(lambda: all((folder / "ready").exists() for folder in folders))  # noqa: B023 - called here
        (place / "go").write_bytes(b"12")
        outputs = {one.answers: one for one in (server, other)}
        ready, _, _ = select.select(list(outputs), [], [])
        lost = outputs[ready[0]]  # the other start waits for the file `hold`
        result = lost.wait()
        (place / "hold").touch()
        won = (other if lost is server else server).wait()
        assert (won.code, result.code) == (0, 87), f"start {number}: {won}\n{result}"
        assert_error(result, 87, "the run directory is in use by ")
        run = place / "runs" / "mine"
        assert json.loads((run / "run.json").read_text())["state"] == "done"
        assert not (run / "error.json").exists()
        first_won += lost is other
        tally.tried += 1
    tally.notes["first won"] = first_won


# ---------------------------------------------------------------- unusual environments


NO_PROC = """
import ctypes
libc = ctypes.CDLL(None)
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 16384, 1 << 18
assert libc.unshare(CLONE_NEWNS) == 0
assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
assert libc.mount(b"tmpfs", b"/proc", b"tmpfs", 0, None) == 0
"""


@needs_root
@pytest.mark.sampled(1)
@pytest.mark.parametrize("args", [[], ["parallelism=ddp", "parallelism.world_size=2"]], ids=["one", "ranks"])
def test_a_missing_proc_file_system_is_reported(
    args: list[str], server: ForkServer, tmp_path: Path, tally: Tally
) -> None:
    assert_error(server.run([*BASE, *args], tmp_path, before=NO_PROC), 71, "/proc")
    tally.tried += 1


@pytest.mark.slow
def test_a_run_works_in_a_minimal_environment_with_the_c_locale(
    reference: Reference, tmp_path: Path, tally: Tally
) -> None:
    """Runs in a new process, because Python reads these variables at startup."""
    env = {"PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "TMPDIR": "/nowhere"}
    env["OMP_NUM_THREADS"] = "1"
    args = [sys.executable, "-m", "runner", *BASE, 'output_root="größe-日本"']
    done = subprocess.run(args, cwd=tmp_path, env={**env, "PATH": os.defpath}, capture_output=True, check=False)
    out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    assert_error(CompletedCommand(done.returncode, out, err), 0)
    assert_equals_reference(tmp_path / "größe-日本" / "mine", reference(""))
    tally.tried += 1


# ---------------------------------------------------------------- trackers

KEY = "0123456789abcdef0123456789abcdef01234567"  # a fake key with the format of a real one
NO_WANDB = {
    "fails": "raise ImportError('a broken installation')\n",
    "ends": "import os\nos._exit(1)\n",
    "hangs": "import signal\nwhile True:\n    signal.pause()\n",
}


SHORT_LINGER = "from runner.trackers import tracker; tracker.LOCAL_LINGER_S = 3.0"  # instead of 60, to end soon


def run_with_wandb(server: ForkServer, folder: Path, env: dict[str, str], before: str = "") -> CompletedCommand:
    """Run with wandb and wait for the tracker processes to end."""
    mark = uuid.uuid4().hex
    result = server.run([*BASE, "tracker=wandb"], folder, {"HOME": str(folder), MARK: mark, **env}, before)
    wait_until(lambda: not marked(mark), "the tracker processes end by themselves")
    return result


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", NO_WANDB)
def test_no_row_is_lost_if_wandb_cannot_be_imported(
    how: str, server: ForkServer, reference: Reference, tmp_path: Path, tally: Tally
) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text(NO_WANDB[how])
    stop = {"ACT": "hang-up", "AT": "23"} if how == "hangs" else {}
    result = run_with_wandb(
        server, tmp_path, {"PYTHONPATH": f"{tmp_path}:{ROOT}", **stop}, SHORT_LINGER if stop else ""
    )
    assert_error(result, 75 if stop else 0)
    if stop:
        assert server.run(BASE, tmp_path).code == 0
    assert_equals_reference(tmp_path / "outputs" / "mine", reference(""))
    assert "metrics.jsonl" in result.out
    tally.tried += 1


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["refused", "black hole"])
def test_no_row_is_lost_or_duplicated_if_the_network_does_not_respond(
    how: str, server: ForkServer, reference: Reference, tmp_path: Path, tally: Tally
) -> None:
    pytest.importorskip("wandb")
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        port = listening.getsockname()[1]
        if how == "refused":
            listening.close()
        result = run_with_wandb(server, tmp_path, {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": KEY})
    assert_error(result, 0)
    run = tmp_path / "outputs" / "mine"
    assert_equals_reference(run, reference(""))
    actual = [int(row["update"]) for _, row in offline_rows(run)]
    assert len(set(actual)) == len(actual), "no row may be stored twice"
    missing = {row["update"] for row in rows_of(run)} - set(
        actual
    )  # if the machine is too busy to import wandb in time
    is_reported = f"{len(missing)} rows" in result.out or "every row" in result.out
    assert not missing or is_reported, "each missing row must be counted"
    assert all(KEY.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    tally.tried += 1
