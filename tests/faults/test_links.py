"""Links that replace files and folders between check and use (TOCTOU) do not affect anything outside of the run.

By default, a seed selects the operations before which a link appears, and a few runs compete with a process that
creates links; with ACCEL_RUN_FAULTS=long, all operations and thousands of runs.
"""

# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH211
# os functions, because each is a single system call

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from runner.base.errors import AccelRunError
from runner.durable import files
from runner.durable.checkpoint import Snapshot, checkpoint_path, load, recover, retain, save
from runner.durable.directory import RunDirectory
from runner.durable.system import System
from tests.faults import saver
from tests.faults.tallies import Tally


class Trusting(System):
    """Follows links in every path, as if folders were not pinned."""

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


def fill_with_bait(outside: Path) -> list[tuple[str, bytes]]:
    """Fill a folder with names that the product would write, rename or delete; return its content."""
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
def flip_link(path: Path, outside: Path, seed: int) -> Iterator[None]:
    """Run a process that replaces `path` by a link to `outside` and restores it, as fast as possible."""
    pid = os.fork()
    if pid == 0:
        rng, going = random.Random(seed), [True]
        signal.signal(signal.SIGTERM, lambda *_: going.clear())
        try:
            while going:
                put(path, outside)
                pause(rng)
                restore(path)
                pause(rng)
        finally:
            restore(path)
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def hidden_path(path: Path) -> Path:
    return path.parent.parent / f"hidden-{path.name}"


def put(path: Path, outside: Path) -> None:
    """Replace `path` by a link to `outside` if `path` exists."""
    with suppress(OSError):
        os.rename(path, hidden_path(path))
        os.symlink(outside, path)


def restore(path: Path) -> None:
    """Remove the link and restore `path`."""
    with suppress(OSError):
        os.unlink(path)
    with suppress(OSError):
        os.rename(hidden_path(path), path)


def pause(rng: random.Random) -> None:
    """Let other processes run, mostly for an instant."""
    for _ in range(int(rng.random() ** 4 * 2000)):
        os.sched_yield()


@contextmanager
def place_link(path: Path, outside: Path, first: int, last: int, real: System) -> Iterator[saver.Interrupted]:
    """Replace `path` by a link from operation `first` of the system until before operation `last`."""

    def before(number: int) -> None:
        if number == first:
            put(path, outside)
        if number == last:
            restore(path)

    system = saver.Interrupted(lambda: None, -1, "before", real, before)
    with files.use_system(system):
        yield system
    restore(path)


def work(root: Path, times: int = 1) -> tuple[int, int]:
    """Perform the file operations of a run several times; return how many succeeded and how many were refused."""
    done = messages = 0
    for update in range(1, times + 1):
        try:
            with RunDirectory.create_or_open(root, "run") as run:
                run.write("run.json", "{}")
                save(run.checkpoints, snapshot(update))
                retain(run.checkpoints, 2)
                run.write("predictions/answer.txt", "x")
                with files.AppendLog(run.metrics) as metrics:
                    metrics.write("{}")
                files.remove_temporary_files(run.checkpoints)
                with suppress(AccelRunError):
                    recover(run.checkpoints)
            done += 1
        except AccelRunError:
            messages += 1
    return done, messages


TARGETS = ("run", "run/checkpoints", "run/predictions")


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[Path, Path, list[tuple[str, bytes]]]:
    """A run, a folder outside of it for links to point to, and the content of that folder."""
    root, outside = tmp_path / "outputs", tmp_path / "outside"
    root.mkdir()
    known = fill_with_bait(outside)
    work(root)
    return root, outside, known


Prepared = tuple[Path, Path, list[tuple[str, bytes]]]
Amount = Callable[[int, int], int]


def attacks(num_operations: int, count: int, seed: object) -> list[tuple[int, int]]:
    """Return operations before which a link appears and disappears; at most `count`."""
    chance = random.Random(str(seed))
    first = chance.sample(range(1, num_operations + 1), min(count, num_operations))
    return [(one, one + chance.choice((1, 1, 2, 5, 1000))) for one in first]


def num_operations(root: Path, outside: Path, real: System) -> int:
    with place_link(root / "run", outside, -1, -1, real) as system:
        work(root)
    return system.count


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("target", TARGETS)
def test_a_link_that_appears_before_an_operation_changes_nothing_outside(
    prepared: Prepared, target: str, amount: Amount, seed: int, tally: Tally
) -> None:
    root, outside, known = prepared
    count = num_operations(root, outside, System())
    for first, last in attacks(count, amount(12, count), f"{seed} {target}"):
        with place_link(root / target, outside, first, last, System()):
            _, messages = work(root)
        assert seen_in(outside) == known, f"seed {seed}: a link is at {target} before operations {first} to {last}"
        tally.tried += 1
        tally.notes[f"refused at {target}"] = int(tally.notes.get(f"refused at {target}", 0)) + messages


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_racing_links_change_nothing_outside(
    prepared: Prepared, target: str, amount: Amount, seed: int, tally: Tally
) -> None:
    root, outside, known = prepared
    with flip_link(root / target, outside, seed):
        done, messages = work(root, amount(20, 3000))
    assert seen_in(outside) == known, f"seed {seed}"
    tally.tried += done + messages
    tally.notes[f"refused at {target}"] = messages
    with RunDirectory.create_or_open(root, "run") as run:  # the next save works
        assert load(save(run.checkpoints, snapshot(10**6))).update == 10**6


def test_the_test_detects_a_program_that_follows_links(prepared: Prepared, seed: int) -> None:
    """Without pinned folders, the same attack writes, renames or removes files outside."""
    root, outside, known = prepared
    count = num_operations(root, outside, Trusting())
    for first, last in attacks(count, count, f"{seed} trusting"):
        with place_link(root / "run/checkpoints", outside, first, last, Trusting()):
            work(root)
        if seen_in(outside) != known:
            return
    pytest.fail("no attack fell between the check of a path and its use")


@pytest.mark.parametrize("name", ["checkpoints", "predictions", "plots", "export", "profile"])
def test_links_in_place_of_run_folders_are_rejected(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "outputs" / "run").mkdir(parents=True)
    (tmp_path / "outputs" / "run" / name).symlink_to(outside)
    with pytest.raises(AccelRunError) as caught, RunDirectory.create_or_open(tmp_path / "outputs", "run") as run:
        run.write(f"{name}/x", "x")
    assert caught.value.exit_code == 89
    assert caught.value.problems[0].where == f"{tmp_path}/outputs/run/{name}"
    assert list(outside.iterdir()) == []


def test_the_output_root_can_be_a_link_but_a_run_cannot(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "outputs").symlink_to(tmp_path / "disk")
    with RunDirectory.create_or_open(tmp_path / "outputs", "run") as run:
        save(run.checkpoints, snapshot(1))
    assert checkpoint_path(tmp_path / "disk" / "run" / "checkpoints", 1).is_dir()
    (tmp_path / "disk" / "other").symlink_to(tmp_path)
    with pytest.raises(AccelRunError) as caught:
        RunDirectory.create_or_open(tmp_path / "outputs", "other")
    assert caught.value.exit_code == 89


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
def test_locks_other_than_regular_files_are_rejected(tmp_path: Path, kind: str) -> None:
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
