"""Out of memory: which sizes are tried and recorded, which error ends the phase, and what a resumed run reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.base.errors import AccelRunError, DeviceMemoryError, HostMemoryError, RankLost, TaskFault
from runner.base.oom_errors import BETWEEN, OomCause
from runner.distributed.world import World
from runner.durable.directory import RunDirectory
from runner.engine.checkpoints.oom_history import FILE, ReducedMicroBatch, read_reductions, write_reductions
from runner.engine.hooks.oom import OutOfMemory
from tests.opened import opened

GIB = 2**30
FORWARD = OomCause("device", "CUDA out of memory", 3 * GIB, "forward")
ON_HOST = OomCause("host", "out of host memory", 5 * GIB, "reading")
TORCH_ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
LINE = "mine.py:7 in loss: a @ b"
ROW = ReducedMicroBatch("train", 0, 0, 2, 4, 1)


class Ranks(World):
    """The first of several ranks; `gather` returns its value and those of the others."""

    def __init__(self, *others: Any) -> None:
        super().__init__(torch.device("cpu"), world_size=1 + len(others))
        self.others = others

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]


class Seen:
    """What the hook of a phase prints and records."""

    def __init__(self, phase: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.phase, self.hook = phase, phase.hook(OutOfMemory)
        self.warnings: list[str] = []
        self.infos: list[str] = []
        self.events: list[dict[str, Any]] = []
        screen = phase.run.observers.screen
        monkeypatch.setattr(screen, "warn", self.warnings.append)
        monkeypatch.setattr(screen, "info", self.infos.append)
        monkeypatch.setattr(screen, "record_event", lambda kind, **values: self.events.append({"kind": kind, **values}))

    @property
    def recorded(self) -> list[ReducedMicroBatch]:
        return read_reductions(self.phase.run.directory.path)

    def report(self, name: str = "memory.txt") -> Path:
        return Path(self.phase.run.directory.path / name)

    def reduce(self, cause: OomCause = FORWARD, obstacle: str = "") -> None:
        self.hook.record_usage(cause, TORCH_ERROR)
        self.hook.reduce(cause, obstacle)


@pytest.fixture
def opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that opens a phase with updates of 8 samples in micro-batches of 4."""

    @contextmanager
    def of(*args: str) -> Iterator[Seen]:
        with opened(tmp_path, "checkpoint=off", "micro_batch_size=4", *args) as phase:
            yield Seen(phase, monkeypatch)

    return of


# ---------------------------------------------------------------- in an update


def test_a_failed_update_halves_its_micro_batch_down_to_one_sample(opening: Any) -> None:
    with opening() as seen:
        for size in (2, 1):
            seen.reduce()
            assert seen.hook.smaller[-1] == (0, size)
            assert {len(micro.indices) for micro in seen.phase.order.micro_batches(0, seen.phase.shares.of(0))} == {
                size
            }
        assert seen.recorded == [ROW, replace(ROW, size=1)]
        assert [(event["update"], event["before"], event["size"]) for event in seen.events] == [(1, 4, 2), (1, 2, 1)]
        assert all("memory.txt" in text and "3 GiB" in text for text in seen.warnings)
        assert "forward" in seen.report().read_text()
        with pytest.raises(DeviceMemoryError) as caught:
            seen.reduce()
        assert seen.recorded == [], "no size helped"
        assert caught.value.place["micro_batch_size"] == 1


def test_a_run_without_restorable_state_resumes_with_half_the_size(opening: Any) -> None:
    with opening() as seen:
        with pytest.raises(DeviceMemoryError) as caught:
            seen.reduce(obstacle="stream-position")
        assert seen.recorded == [replace(ROW, in_place=False)]
        (problem,) = caught.value.problems
        assert "3 GiB" in problem.what
        assert caught.value.args == (str(problem),)
        assert {"1", "train,", "forward"} <= {*problem.where.split()}
        _, hint, first, second, *_ = problem.fix.split("\n")
        assert "stream-position" in hint
        assert "micro-batches of 2" in hint
        assert first.startswith("1. micro_batch_size=2")
        assert second.startswith("2. ")
        expected = {"place": "forward", "micro_batch_size": 4, "memory": "memory.txt"}
        assert caught.value.place == expected


def test_the_fix_ends_with_the_allocating_line_of_the_task(opening: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    translated = DeviceMemoryError("the GPU is out of memory: 3 GiB", where="x", fix=f"less\n{LINE}")
    with opening() as seen:
        monkeypatch.setattr(seen.phase, "explain_error", lambda _: translated)
        with pytest.raises(DeviceMemoryError) as caught:
            seen.reduce(obstacle="a generator")
        assert caught.value.problems[0].fix.split("\n")[-1] == LINE
        assert "less" not in caught.value.problems[0].fix.split("\n")


def test_out_of_host_memory_is_distinguished_from_out_of_device_memory(opening: Any) -> None:
    with opening() as seen, pytest.raises(HostMemoryError) as caught:
        seen.reduce(ON_HOST, "a generator")
    assert "5 GiB" in caught.value.problems[0].what
    assert caught.value.place["place"] == "reading"


@pytest.mark.parametrize("is_here", [True, False])
def test_every_rank_ends_if_one_cannot_reduce_its_micro_batch(is_here: bool, opening: Any) -> None:
    with opening() as seen:
        seen.hook.world = Ranks([[1, None, "forward", "all of it", "device"], ""])
        cause = FORWARD if is_here else None
        if is_here:
            seen.hook.record_usage(FORWARD, TORCH_ERROR)
        with pytest.raises(DeviceMemoryError if is_here else RankLost) as caught:
            seen.hook.reduce(cause, "")
        assert {"update", "1", "phase"} <= {*caught.value.problems[0].where.split()}
        assert is_here or "rank 1" in caught.value.problems[0].what


def test_a_rank_with_enough_memory_keeps_its_micro_batch_size(opening: Any) -> None:
    with opening() as seen:
        seen.hook.world = Ranks([[4, 2, "forward", "all of it", "device"], ""])
        seen.phase.order = replace(seen.phase.order, shares=(4, 4))
        seen.hook.reduce(None, "")
        assert seen.hook.smaller == ()
        assert seen.recorded == [replace(ROW, rank=1, world_size=2)]
        (warning,) = seen.warnings
        assert "rank 1" in warning
        assert "memory-rank1.txt" in warning


def test_memory_usage_outside_a_micro_batch_is_recorded_without_samples(opening: Any) -> None:
    with opening() as seen:
        for place, samples in (("forward", 4), ("optimizer", 0), (BETWEEN, 0)):
            seen.hook.record_usage(replace(FORWARD, place=place), TORCH_ERROR)
            assert seen.hook.memory.samples == samples
        seen.hook.report_step_retry(replace(FORWARD, place="optimizer"))
        (warning,) = seen.warnings
        assert "optimizer" in warning


# ---------------------------------------------------------------- errors that end the phase


def test_an_error_between_updates_does_not_suggest_a_smaller_micro_batch(opening: Any) -> None:
    with opening() as seen:
        error = seen.hook.on_error(TORCH_ERROR)
        assert isinstance(error, DeviceMemoryError)
        assert seen.recorded == []
        assert "micro_batch_size" not in error.problems[0].fix
        assert "3 GiB" in error.problems[0].what
        assert seen.report().exists()


def plant_cause(monkeypatch: pytest.MonkeyPatch, cause: OomCause | None = FORWARD) -> None:
    """Make the hook find this cause in every error."""
    monkeypatch.setattr("runner.engine.hooks.oom.find_oom_cause", lambda _: cause)


@pytest.mark.parametrize("why", ["", "on_oom=stop", "stopped"])
def test_a_run_resumes_with_half_the_size_unless_stopped(
    why: str, opening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_cause(monkeypatch)
    with opening(*([why] if "=" in why else [])) as seen:
        seen.phase.run.stop.requested = "SIGTERM" if why == "stopped" else None
        error = seen.hook.on_error(TORCH_ERROR)
        assert isinstance(error, DeviceMemoryError)
        assert seen.recorded == ([] if why else [replace(ROW, in_place=False)])
        assert ("micro-batches of 2" in error.problems[0].fix) == (not why)
        assert "micro_batch_size=2" in error.problems[0].fix


def test_memory_usage_is_measured_once_per_error(opening: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_cause(monkeypatch)
    with opening() as seen:
        seen.hook.record_error(TORCH_ERROR)
        seen.report().write_text("before")
        seen.hook.record_error(TORCH_ERROR)
        seen.hook.on_error(TORCH_ERROR)
        assert seen.report().read_text() == "before"
        plant_cause(monkeypatch, replace(FORWARD, requested_bytes=7 * GIB))
        seen.hook.record_error(TORCH_ERROR)
        assert "7 GiB" in seen.report().read_text(), "another error"


def test_other_errors_leave_no_memory_report(opening: Any) -> None:
    with opening() as seen:
        fault = TaskFault("is wrong", where="x", fix="y")
        for error, expected in ((fault, fault), (LookupError("of the runner"), None)):
            seen.hook.record_error(error)
            assert seen.hook.on_error(error) is expected
        assert not seen.report().exists()
        assert seen.recorded == []


@pytest.mark.parametrize("is_retried", [True, False])
def test_too_few_samples_in_a_retry_are_reported_as_out_of_memory(is_retried: bool, opening: Any) -> None:
    fault = TaskFault("too-few-values", where="x", fix="y")
    with opening() as seen:
        seen.reduce()
        if not is_retried:
            next(seen.phase.updates())
        error = seen.hook.on_error(fault)
        if not is_retried:
            assert error is fault
            assert seen.recorded == [ROW]
            return
        assert isinstance(error, DeviceMemoryError)
        assert any("too-few-values" in note and " 2 " in note for note in error.__notes__)
        assert "micro-batches of 1" not in error.problems[0].fix, "fewer samples do not help"
        assert seen.recorded == [], "the next start uses the requested size"


# ---------------------------------------------------------------- in an evaluation


def test_the_batch_of_a_failed_evaluation_is_halved(opening: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_cause(monkeypatch)
    with opening() as seen:
        seen.phase.is_evaluating = True
        assert seen.hook.sizes.on_error(TORCH_ERROR, 4) == 2
        assert seen.hook.memory.samples == 4
        seen.hook.sizes.current = 2
        for error, size, cause in ((TORCH_ERROR, 1, FORWARD), (ValueError("of the task"), 4, None)):
            plant_cause(monkeypatch, cause)
            with pytest.raises(type(error)) as caught:
                seen.hook.sizes.on_error(error, size)
            assert caught.value is error


def test_reduced_batches_of_an_evaluation_are_recorded_for_each_rank(opening: Any) -> None:
    with opening() as seen:
        seen.hook.sizes.by_rank = [(4, 2)]
        seen.hook.report_evaluation_reductions()
        assert seen.recorded == [replace(ROW, use="evaluation")]
        assert "rank" not in seen.warnings.pop()
        seen.hook.world = Ranks(None)
        seen.hook.sizes.by_rank = [(2, 2), (4, 1)]
        seen.hook.report_evaluation_reductions()
        assert seen.recorded[1:] == [ReducedMicroBatch("train", 0, 1, 1, 4, 2, "evaluation")]
        (warning,) = seen.warnings
        assert "rank 1" in warning


def test_after_a_failed_evaluation_a_run_resumes_with_half_the_batch_size(
    opening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_cause(monkeypatch)
    with opening() as seen:
        seen.phase.is_evaluating = True
        seen.hook.sizes.current = 3
        error = seen.hook.on_error(TORCH_ERROR)
        assert seen.recorded == [replace(ROW, use="evaluation", in_place=False)]
        assert isinstance(error, AccelRunError)
        assert error.place["micro_batch_size"] == 3
        seen.phase.is_evaluating = False


def test_on_oom_stop_disables_retries_of_evaluations(opening: Any) -> None:
    with opening("on_oom=stop") as seen:
        assert seen.hook.sizes.on_error is None


# ---------------------------------------------------------------- what a resumed run reads


def test_recorded_sizes_apply_only_to_their_settings_and_rank(tmp_path: Path, opening: Any) -> None:
    other = replace(ROW, update=3, size=1)
    evaluation = replace(ROW, use="evaluation", size=3)
    rows = [
        ROW, replace(other, phase="other"), replace(other, asked=8), replace(other, world_size=2),
        replace(other, rank=1), evaluation, replace(evaluation, size=2), replace(evaluation, rank=1, size=1),
        replace(ROW, update=5, size=1, rank=None),
    ]  # fmt: skip
    with RunDirectory.create_or_open(tmp_path, "small") as directory:
        write_reductions(directory, rows)
    with opening() as seen:
        assert seen.hook.rows == rows
        assert seen.hook.smaller == ((0, 2), (5, 1))
        assert seen.hook.sizes.current == 2
        seen.hook.begin()
        texts = [text for text in seen.infos if FILE in text]
        assert len(texts) == 3, "for updates 0 and 5, and for the other rank"
        assert all(text.startswith("train: ") for text in texts)
        seen.infos.clear()
        seen.phase.position.update = seen.phase.total
        seen.hook.begin()
        assert seen.infos == []
