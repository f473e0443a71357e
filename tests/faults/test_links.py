"""Links put in the place of folders and files between a look and its use: nothing outside of the run is touched."""

# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH211
# the system calls themselves

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from runner.base.errors import AccelRunError
from runner.durable import files
from runner.durable.checkpoint import Snapshot, load, path_of, recover, retain, save
from runner.durable.directory import RunDirectory
from runner.durable.system import System
from tests.faults.tallies import Tally


class Trusting(System):
    """What every path leads to is believed, as it was before folders were pinned."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path, 0o700)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)


def snapshot(update: int) -> Snapshot:
    tensors = {"model": {"weight": torch.full((16,), float(update))}}
    return Snapshot(update, tensors, {"a": 1}, {"epoch": 0})


def seen_in(folder: Path) -> list[tuple[str, bytes]]:
    return [(str(path), b"" if path.is_dir() else path.read_bytes()) for path in sorted(folder.rglob("*"))]


def baited(outside: Path) -> list[tuple[str, bytes]]:
    """Fill a folder with names that the product would write to, rename or sweep away; return what is in it."""
    for inner in (outside, outside / "checkpoints"):
        inner.mkdir()
        for name in ("run.json", "metrics.jsonl", ".lock", "notes.txt"):
            (inner / name).write_text("outside\n")
        for name in (".tmp-old", "update-0000000001", "update-0000000002", ".tmp-old-update-0000000001-aa"):
            (inner / name).mkdir()
            for file in ("MANIFEST.json", "state.json", "model.safetensors", "notes.txt"):
                (inner / name / file).write_text("outside\n")
    return seen_in(outside)


@contextmanager
def flipping(path: Path, outside: Path, seed: int) -> Iterator[None]:
    """Another process puts a link to `outside` in the place of `path` and takes it away again, as fast as it can."""
    hidden = path.parent.parent / f"hidden-{path.name}"
    pid = os.fork()
    if pid == 0:
        rng, going = random.Random(seed), [True]
        signal.signal(signal.SIGTERM, lambda *_: going.clear())
        try:
            while going:
                with suppress(OSError):
                    os.rename(path, hidden)
                    os.symlink(outside, path)
                time.sleep(rng.random() ** 4 * 5e-3)
                with suppress(OSError):
                    os.unlink(path)
                with suppress(OSError):
                    os.rename(hidden, path)
                time.sleep(rng.random() ** 4 * 5e-3)
            with suppress(OSError):
                os.unlink(path)
            with suppress(OSError):
                os.rename(hidden, path)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def work(root: Path, until: Callable[[], bool]) -> tuple[int, int]:
    """Do what a run does with its folder, again and again; return how often it went well, and how often it was told."""
    done = told = update = 0
    while not until():
        update += 1
        try:
            with RunDirectory.create_or_open(root, "run") as run:
                run.write("run.json", "{}")
                save(run.checkpoints, snapshot(update))
                retain(run.checkpoints, 2)
                run.write("predictions/answer.txt", "x")
                with files.AppendLog(run.metrics) as metrics:
                    metrics.write("{}")
                files.sweep(run.checkpoints)
                with suppress(AccelRunError):
                    recover(run.checkpoints)
            done += 1
        except AccelRunError:
            told += 1
    return done, told


def is_over(ends: float) -> bool:
    return time.monotonic() > ends


TARGETS = ("run", "run/checkpoints", "run/predictions")


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_outside_is_touched_while_links_come_and_go(
    tmp_path: Path, target: str, amount: Callable[[int, int], int], seed: int, tally: Tally
) -> None:
    root, outside = tmp_path / "outputs", tmp_path / "outside"
    root.mkdir()
    known = baited(outside)
    work(root, iter([False, True]).__next__)
    ends = time.monotonic() + amount(2, 60)
    with flipping(root / target, outside, seed):
        done, told = work(root, partial(is_over, ends))
    assert seen_in(outside) == known, f"seed {seed}"
    tally.tried += done + told
    tally.notes[f"refused at {target}"] = told
    with RunDirectory.create_or_open(root, "run") as run:  # the next save works
        assert load(save(run.checkpoints, snapshot(10**6))).update == 10**6


def test_a_program_that_believes_paths_is_caught(tmp_path: Path, seed: int) -> None:
    """Without the pinned folder the same attack writes, renames or removes outside: within seconds."""
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        root, outside = folder / "outputs", folder / "outside"
        root.mkdir(parents=True)
        known = baited(outside)
        work(root, iter([False, True]).__next__)
        ends = time.monotonic() + 1.0
        with files.through(Trusting()), flipping(root / "run/checkpoints", outside, seed + attempt):
            work(root, partial(is_over, ends))
        if seen_in(outside) != known:
            return
        shutil.rmtree(folder)
    pytest.fail("the attack never came between a look and its use")


@pytest.mark.parametrize("name", ["checkpoints", "predictions", "plots", "export", "profile"])
def test_a_folder_of_the_run_that_is_a_link_is_refused(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "outputs" / "run").mkdir(parents=True)
    (tmp_path / "outputs" / "run" / name).symlink_to(outside)
    with pytest.raises(AccelRunError) as caught, RunDirectory.create_or_open(tmp_path / "outputs", "run") as run:
        run.write(f"{name}/x", "x")
    assert caught.value.exit_code == 89
    assert str(caught.value).startswith(f"{tmp_path}/outputs/run/{name}: must be a folder of the run, but is a link")
    assert list(outside.iterdir()) == []


def test_an_output_root_that_is_a_link_is_followed_and_a_run_that_is_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "outputs").symlink_to(tmp_path / "disk")
    with RunDirectory.create_or_open(tmp_path / "outputs", "run") as run:
        save(run.checkpoints, snapshot(1))
    assert path_of(tmp_path / "disk" / "run" / "checkpoints", 1).is_dir()
    (tmp_path / "disk" / "other").symlink_to(tmp_path)
    with pytest.raises(AccelRunError) as caught:
        RunDirectory.create_or_open(tmp_path / "outputs", "other")
    assert caught.value.exit_code == 89


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
def test_a_hostile_lock_is_told(tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "canary"
    outside.write_text("untouched")
    lock = tmp_path / "outputs" / "run" / ".lock"
    lock.parent.mkdir(parents=True)
    if kind == "link":
        lock.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    elif os.geteuid():
        pytest.skip("only root makes devices")
    else:
        os.mknod(lock, 0o600 | 0o020000, os.makedev(1, 7))
    with pytest.raises(AccelRunError) as caught:
        RunDirectory.create_or_open(tmp_path / "outputs", "run")
    assert caught.value.exit_code in (73, 77)
    assert outside.read_text() == "untouched"
