"""Asynchronous saves: a checkpoint has the state of its update, and the disk does not block training."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.base.errors import StorageError
from runner.durable import checkpoint, checkpoint_writer, files
from runner.durable.system import System
from runner.engine.checkpoints import checkpoint_saver, save_policy
from runner.engine.checkpoints.save_policy import SaveCost
from tests.faults.recording import Faults
from tests.opened import opened, saving_of


class SlowDisk(System):
    """A disk whose fsync blocks until the gate is open."""

    def __init__(self) -> None:
        self.gate, self.reached = threading.Event(), threading.Event()

    def fsync(self, descriptor: int) -> None:
        self.reached.set()
        assert self.gate.wait(60)


def weights(phase: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in phase.run.parts.bare.state_dict().items()}


def test_checkpoints_on_a_slow_disk_have_the_state_of_their_update(tmp_path: Path) -> None:
    with opened(tmp_path, "checkpoint=off") as phase:
        updates = phase.updates()
        for _ in range(3):
            with files.use_system(disk := SlowDisk()):
                update = next(updates)
                saving_of(phase).save()
                saved = weights(phase)
                assert disk.reached.wait(60)
                for _ in range(5):
                    next(updates)  # would never return if the save blocked training
                assert not torch.equal(weights(phase)["0.weight"], saved["0.weight"])
                disk.gate.set()
                saving_of(phase).saver.writer.wait()
            loaded = checkpoint.load(checkpoint.checkpoint_path(phase.run.directory.checkpoints, update))
            there = loaded.tensors("model")
            assert all(torch.equal(there[name], tensor) for name, tensor in saved.items())


def test_a_second_save_does_not_change_a_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gate(System):
        """Blocks the writer thread before it creates a folder, until the gate is open."""

        def __init__(self) -> None:
            self.opened, self.reached = threading.Event(), threading.Event()

        def mkdir(self, path: Path) -> None:
            if threading.current_thread() is not threading.main_thread():
                self.reached.set()
                assert self.opened.wait(60)
            super().mkdir(path)

    with files.use_system(gate := Gate()), opened(tmp_path, "checkpoint=off") as phase:
        updates, expected = phase.updates(), {}
        for _ in range(2):
            update = next(updates)
            snapshot = saving_of(phase).snapshot()
            expected[update] = {
                stem: {name: tensor.clone() for name, tensor in tensors.items()}
                for stem, tensors in snapshot.tensors.items()
            }
            if len(expected) == 2:
                assert gate.reached.wait(60)
                monkeypatch.setattr(
                    saving_of(phase).saver.writer,
                    "wait",
                    after(gate.opened.set, saving_of(phase).saver.writer.wait),
                )
            saving_of(phase).save()
        saving_of(phase).saver.writer.wait()
        for update, stems in expected.items():
            loaded = checkpoint.load(checkpoint.checkpoint_path(phase.run.directory.checkpoints, update))
            assert set(loaded.stems) == set(stems)
            for stem, tensors in stems.items():
                there = loaded.tensors(stem)
                assert all(torch.equal(there[name], tensor) for name, tensor in tensors.items()), (update, stem)


def after(first: Callable[[], object], then: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that calls both and returns the result of the second."""

    def call() -> Any:
        first()
        return then()

    return call


class Broken(System):
    """A disk on which renaming a checkpoint to its final name fails."""

    def rename(self, source: Path, target: Path) -> None:
        if target.name.startswith("update-"):
            raise OSError(5, "broken")
        super().rename(source, target)


def test_an_unsaved_best_checkpoint_does_not_replace_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "RETRY_DELAYS_S", (0.0, 0.0))
    with opened(tmp_path, "checkpoint.every=1000", "checkpoint.keep=2") as phase:
        updates, folder = phase.updates(), phase.run.directory.checkpoints
        next(updates)
        saving_of(phase).save_if_best({"val/loss": 3.0})
        saving_of(phase).saver.writer.wait()
        next(updates)
        with files.use_system(Broken()):
            saving_of(phase).save_if_best({"val/loss": 2.0})
            saving_of(phase).saver.writer.wait()
        for _ in range(3):
            update = next(updates)
            saving_of(phase).save()
        saving_of(phase).saver.writer.wait()
        assert files.list_names(folder) == [f"update-{number:010}" for number in (1, update - 1, update)]
        assert checkpoint.load(checkpoint.checkpoint_path(folder, update)).state["bests"] == [[3.0, 1]]
        best = next(updates)
        saving_of(phase).save_if_best({"val/loss": 2.5})
        for _ in range(3):
            update = next(updates)
            saving_of(phase).save()
        saving_of(phase).saver.writer.wait()
        assert files.list_names(folder) == [f"update-{number:010}" for number in (best, update - 1, update)]


def test_a_failed_save_is_retried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "RETRY_DELAYS_S", (0.0, 0.0))
    monkeypatch.setattr(save_policy, "RETRY_S", 0.0)
    with opened(tmp_path, "checkpoint.every=1000") as phase:
        updates = phase.updates()
        next(updates)
        with files.use_system(Broken()):
            saving_of(phase).save()
            with suppress(StorageError):
                saving_of(phase).saver.writer.wait()
        result = [(next(updates), saving_of(phase).saved_at) for _ in range(4)]
    assert [saved_at for _, saved_at in result] == [2, 2, 2, 2], "retried once, not at every update"


def test_no_save_starts_without_enough_time(tmp_path: Path) -> None:
    with opened(tmp_path, "checkpoint.every=1", "checkpoint.grace_s=1e-9") as phase:
        updates, folder = phase.updates(), phase.run.directory.checkpoints
        next(updates)
        next(updates)
        saving_of(phase).saver.writer.wait()
        next(updates)
        saving_of(phase).saver.writer.wait()
        there = files.list_names(folder)
        signal.raise_signal(signal.SIGUSR1)
        next(updates)  # due by the number of updates
        saving_of(phase).save_if_best({"val/loss": 1.0})  # an evaluation that ended when the signal arrived
        phase.close()
        assert (
            saving_of(phase).saver.bests,
            saving_of(phase).is_unsaved,
            saving_of(phase).newest_number,
        ) == ([], True, 3)
        assert files.list_names(folder) == there


def test_a_stop_needs_no_save_if_the_current_update_is_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path, "checkpoint.every=1000", "checkpoint.grace_s=1e-9") as phase:
        updates = phase.updates()
        for _ in range(2):
            next(updates)
            saving_of(phase).save()
            saving_of(phase).saver.writer.wait()
        signal.raise_signal(signal.SIGUSR1)
        phase.close()
        assert (saving_of(phase).is_unsaved, saving_of(phase).newest_number) == (False, 2)
    messages = capfd.readouterr()
    assert "not saved" not in messages.out + messages.err


def test_the_writer_ends_before_the_run_is_closed_even_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(5, "the reader cannot be closed")

    writers: list[bool] = []
    disk = SlowDisk()
    disk.gate.set()
    with pytest.raises(ValueError, match="the cause"), files.use_system(disk):  # noqa: SIM117
        with opened(tmp_path, "checkpoint=off") as phase:
            next(phase.updates())
            disk.gate.clear()
            saving_of(phase).save()
            monkeypatch.setattr(phase.loader, "close", fail)
            writer = saving_of(phase).saver.writer
            # open the gate when the end of the phase waits for the writer
            monkeypatch.setattr(writer, "close", after(disk.gate.set, writer.close))
            metrics, close = phase.run.observers.metrics, phase.run.observers.metrics.close

            def closed() -> None:
                writers.append(any(thread.name == "checkpoint-writer" for thread in threading.enumerate()))
                disk.gate.set()
                close()

            monkeypatch.setattr(metrics, "close", closed)
            raise ValueError("the cause")
    assert writers == [False]


def test_rows_counted_by_a_checkpoint_are_synced_before_its_rename(tmp_path: Path) -> None:
    class Watched(System):
        def __init__(self) -> None:
            self.synced = 0
            self.at_rename: list[int] = []

        def fsync(self, descriptor: int) -> None:
            if os.path.samestat(os.fstat(descriptor), metrics.stat()):
                self.synced = metrics.stat().st_size

        def rename(self, source: Path, target: Path) -> None:
            if target.name.startswith("update-"):
                self.at_rename.append(self.synced)
            super().rename(source, target)

    with opened(tmp_path, "checkpoint=off") as phase:
        metrics, updates = phase.run.directory.metrics, phase.updates()
        with files.use_system(watched := Watched()):
            counted = []
            for _ in range(3):
                for _ in range(4):
                    next(updates)
                saving_of(phase).save()
                saving_of(phase).saver.writer.wait()
                path = checkpoint.checkpoint_path(phase.run.directory.checkpoints, phase.number)
                counted.append(int(checkpoint.load(path).manifest["metrics_bytes"]))
    assert counted[0] > 0
    assert counted == sorted(set(counted))
    assert all(synced >= bytes_ for synced, bytes_ in zip(watched.at_rename, counted, strict=True))


@pytest.mark.parametrize("args", ["checkpoint=off", "profiler=trace profiler.only=true"])
def test_rows_after_the_last_save_are_synced_before_a_phase_ends(args: str, tmp_path: Path) -> None:
    synced = []

    class Watched(System):
        def fsync(self, descriptor: int) -> None:
            if os.path.samestat(os.fstat(descriptor), metrics.stat()):
                synced.append(metrics.stat().st_size)

    with opened(tmp_path, *args.split()) as phase:
        metrics, saving = phase.run.directory.metrics, saving_of(phase)
        next(phase.updates())
        if not phase.run.observers.profiler.only:
            saving.save()
            saving.saver.writer.wait()
        with files.use_system(Watched()):
            phase.run.observers.write({"update": 1, "val/loss": 0.5})
            saving.end()
        assert synced[-1:] == [metrics.stat().st_size]


def test_saves_faster_than_the_disk_are_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, messages = [1000.0], list[str]()
    waits_s = itertools.cycle(
        [0.7, 0.0]
    )  # the wait for the previous save, then the wait when the next one is submitted

    def pass_time() -> None:
        now[0] += next(waits_s)

    with opened(tmp_path, "checkpoint.every=1") as phase:
        writer = saving_of(phase).saver.writer
        monkeypatch.setattr(
            checkpoint_saver, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
        )
        monkeypatch.setattr(writer, "wait", after(pass_time, writer.wait))
        monkeypatch.setattr(phase.run.observers.screen, "warn", messages.append)
        updates = phase.updates()
        for _ in range(5):
            next(updates)
    (text,) = messages
    assert "0.7 s" in text
    assert "checkpoint.every=auto" in text


def test_a_timed_save_waits_for_the_disk_instead_of_blocking_training(tmp_path: Path) -> None:
    with opened(tmp_path, "checkpoint.every=10min") as phase:
        updates = phase.updates()
        next(updates)
        with files.use_system(disk := SlowDisk()):
            saving_of(phase).saver.policy.seconds = 0.0  # always due
            next(updates)
            assert saving_of(phase).saver.writer.busy_s is not None
            first = saving_of(phase).saved_at
            for _ in range(5):
                next(updates)
            assert saving_of(phase).saved_at == first
            disk.gate.set()
            saving_of(phase).saver.writer.wait()
            next(updates)
            assert saving_of(phase).saved_at == first + 6
        assert saving_of(phase).saver.save_cost.last is not None
        assert saving_of(phase).saver.save_cost.num_saves == 2


def test_the_interval_follows_from_save_costs_and_is_restored_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as phase:
        assert (saving_of(phase).saver.policy.is_auto, saving_of(phase).saver.policy.seconds) == (
            True,
            60.0,
        )
        updates, updated = phase.updates(), saving_of(phase).saver.record_update
        # all updates take the same time
        monkeypatch.setattr(saving_of(phase).saver, "record_update", lambda _: updated(0.01))
        next(updates)
        saving_of(phase).save()
        saving_of(phase).saver.save_cost.record_pause(4.0)  # the cost of the last pause
        saving_of(phase).saver.writer.wait()
        next(updates)
        assert saving_of(phase).saver.policy.seconds == pytest.approx(400.0)
        saving_of(phase).save()
    with opened(tmp_path) as phase:
        assert saving_of(phase).saver.policy.seconds == pytest.approx(400.0)
        assert isinstance(saving_of(phase).saver.save_cost, SaveCost)
        assert saving_of(phase).saver.save_cost.expected_s() > 4.0


@pytest.mark.parametrize("measures_only", [False, True])
def test_metrics_are_durable_at_the_end_of_a_phase(
    measures_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Faults().active() as faults, opened(tmp_path, "checkpoint=off") as phase:
        monkeypatch.setattr(phase.run.observers.profiler, "only", measures_only)
        phase.run.observers.write({"update": 1})
        faults.trace.clear()
        saving_of(phase).end()
    assert ("fsync", str(phase.run.directory.metrics)) in faults.trace
