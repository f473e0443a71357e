"""Failing ranks over NCCL: run the tests for gloo again, on the stand-in's devices and its NCCL.

NCCL fails differently: a lost peer gives no error, destroying a process group waits for kernels that the lost rank
never joins, and errors surface late. The tests come from other folders; only the fork server is replaced.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner.distributed import join
from runner.launch import local
from tests.end_to_end import test_ranks as whole_runs
from tests.end_to_end.test_ranks import expected, folder, one_process
from tests.faults import test_numeric as numeric
from tests.faults import test_out_of_memory as shortages
from tests.faults import test_ranks as faults
from tests.faults.conftest import amount, seed, tally
from tests.faults.test_ranks import curves
from tests.forkserver import CompletedCommand, ForkServer
from tests.stand_ins.cuda.build import why_not
from tests.stand_ins.cuda.devices import MACHINES, VARIABLE, encoded
from tests.stand_ins.cuda.environment import ROOT
from tests.stand_ins.forked import DESCRIBE, StandIn

__all__ = ["amount", "curves", "expected", "folder", "one_process", "seed", "tally"]  # fixtures

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built"),
    pytest.mark.timeout(300),
]
MACHINE = {VARIABLE: encoded(MACHINES["h100x8"])}
EXACT = "precision=fp32"  # like the CPU, because losses are compared


@dataclass(frozen=True)
class OnDevices:
    """A fork server whose commands train on the stand-in's devices, so that ranks use NCCL."""

    server: ForkServer

    def start(self, args: list[str], folder: Path, env: Mapping[str, str] | None = None, before: str = "") -> int:
        given = [*(word for word in args if word != "device=cpu"), "device=cuda", EXACT]
        if not any(word.startswith("micro_batch_size=") for word in args):
            given.append("micro_batch_size=2")  # skips tracing
        return self.server.start(given, folder, {**MACHINE, **(env or {})}, DESCRIBE + before)

    def wait(self) -> CompletedCommand:
        return self.server.wait()

    def run(
        self, args: str | list[str], folder: Path, env: Mapping[str, str] | None = None, before: str = ""
    ) -> CompletedCommand:
        self.start(args.split() if isinstance(args, str) else args, folder, env, before)
        return self.wait()


@pytest.fixture(scope="session")
def server(stand_in: StandIn) -> OnDevices:
    """Overrides the fork server of the CPU tests."""
    return OnDevices(stand_in.server)


COPIED: set[Callable[..., None]] = set()


def copied(test: Callable[..., None], *marks: pytest.MarkDecorator) -> Callable[..., None]:
    """Return a test of another file with its parameters and new marks."""

    @functools.wraps(test)
    def over_nccl(**fixtures: Any) -> None:
        test(**fixtures)

    COPIED.add(test)
    kept = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    return functools.reduce(lambda function, mark: mark(function), marks, _with_marks(over_nccl, kept))


def _with_marks(function: Callable[..., None], marks: Sequence[pytest.Mark]) -> Callable[..., None]:
    function.pytestmark = list(marks)  # type: ignore[attr-defined]
    return function


ONE, LONG = pytest.mark.sampled(1), pytest.mark.long
# SIGKILL, an exception on one rank, an early exit, SIGSTOP, a slow rank, a collective that one rank calls alone.
test_ranks = copied(faults.test_ranks, ONE)
test_a_killed_rank = copied(whole_runs.test_a_killed_rank_is_named_and_the_others_resume, ONE)
test_an_exception = copied(whole_runs.test_an_error_of_a_task_ends_the_run_with_its_own_message)
test_an_early_exit = copied(whole_runs.test_a_rank_that_exits_during_training_is_lost, LONG)
test_a_loss_that_is_not_finite = copied(whole_runs.test_a_loss_that_is_not_finite_ends_all_ranks_with_82, LONG)
test_a_signal = copied(whole_runs.test_a_stopped_run_saves_and_resumes, ONE)
test_a_second_signal = copied(whole_runs.test_a_second_signal_exits_immediately_with_130, LONG)
test_a_killed_launcher = copied(whole_runs.test_no_process_is_left_when_the_launcher_is_killed, LONG)
test_out_of_memory = copied(shortages.test_ranks_that_cannot_agree_restart_with_smaller_micro_batches, ONE)
test_a_fresh_run = copied(whole_runs.test_a_fresh_run_that_loses_a_rank_resumes_instead_of_restarting, LONG)
test_fewer_stages = copied(whole_runs.test_a_pipeline_with_a_given_split_resumes_with_fewer_stages, LONG)
test_bad_samples = copied(whole_runs.test_a_rank_with_only_bad_samples_continues_without_them, LONG)
test_a_killed_run = copied(whole_runs.test_a_resumed_run_of_two_ranks_is_the_same_bit_for_bit, LONG)
test_not_finite = copied(numeric.test_ranks_stop_together_and_the_rank_is_named, LONG)
test_a_pipeline_that_is_not_finite = copied(numeric.test_the_samples_of_a_pipeline_are_searched, LONG)

# Tests in these files without failing ranks, which do not run over NCCL.
NO_FAILURE = {
    whole_runs.test_one_and_two_ranks_by_any_strategy_have_the_same_curve,
    whole_runs.test_a_run_of_two_ranks_resumes_with_one_rank_fsdp_and_a_pipeline,
    whole_runs.test_gpt_has_the_same_curve_on_any_number_of_ranks,
    whole_runs.test_ranks_started_by_torchrun_train_the_same_run,
    whole_runs.test_a_model_trained_on_ranks_is_used_by_one_process,
    whole_runs.test_the_straggler_is_named,
    whole_runs.test_bad_samples_of_any_rank_are_listed,
    whole_runs.test_phases_of_statistics_are_merged_over_ranks,
    whole_runs.test_the_time_limit_saves_one_checkpoint_and_not_two,
    whole_runs.test_buffers_of_any_type_and_layout_start_equal,
    whole_runs.test_a_fit_may_call_the_model,
    whole_runs.test_a_checkpoint_in_parts_is_exported_as_one_file,
    whole_runs.test_checkpoints_in_parts_resume_on_any_number_of_ranks_by_any_strategy,
    whole_runs.test_ranks_resume_from_a_mirror_in_an_empty_folder,
    whole_runs.test_impossible_configurations_are_reported_before_anything_starts,
}
OTHERWISE = {
    faults.test_ranks_of_torchrun,  # its interpreters do not load the stand-in
    # The count of items is on the device and not read before the update: the run fails one update later, as non-finite.
    whole_runs.test_an_update_without_items_ends_the_run_before_it_is_saved,
}


def test_every_test_of_failing_ranks_runs_over_nccl_too() -> None:
    result = {value for file in (whole_runs, faults) for name, value in vars(file).items() if name.startswith("test_")}
    assert result == (COPIED & result) | NO_FAILURE | OTHERWISE


LAUNCHED = """
import os, pytest
os.chdir({root!r})
os.environ["RANKS_OVER"] = "nccl"
assert pytest.main({words}) == 0
"""


def test_launched_ranks_that_raise_or_are_killed_are_named_and_no_process_is_left(stand_in: StandIn) -> None:
    args = ["-q", "--assert=plain", "-p", "no:cacheprovider", "--timeout=0", "tests/launch/test_local.py"]
    args += ["-k", "test_a_killed_rank_is_named or test_a_raising_rank_is_named"]
    out = stand_in.program("h100x8", LAUNCHED.format(root=str(ROOT), words=args))
    (passed,) = re.findall(r"(\d+) passed", out)
    assert int(passed) >= 2
    assert "failed" not in out


def test_waits_after_a_failure_add_up_to_less_than_12_s() -> None:
    """The sum of the grace period, the wait for processes that outlive their rank, and one reminder."""
    grace_s = inspect.signature(local.run_ranks).parameters["grace_s"].default
    assert grace_s + local.OTHERS_S + local.REMINDER_S < 12
    assert join.ABORT_S < 12
