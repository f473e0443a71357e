"""Run the tests of failing ranks, which use gloo, again over the NCCL of the stand-in.

NCCL fails differently: a lost peer gives no error, destroying a process group waits for kernels that the lost rank
never joins, and errors are raised late. The tests come from other folders; only the fork server is replaced.
"""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner.base.errors import Exit
from runner.distributed import join
from runner.durable.record_files import read_error, read_record
from runner.launch import local
from tests.end_to_end import test_own_tables as own_tables
from tests.end_to_end import test_ranks as whole_runs
from tests.end_to_end.test_ranks import expected, folder, one_process
from tests.faults import test_errors as errors
from tests.faults import test_last_seconds as last_seconds
from tests.faults import test_numeric as numeric
from tests.faults import test_out_of_memory as shortages
from tests.faults import test_ranks as faults
from tests.faults import test_signals_of_runs as signals
from tests.faults import test_stalled_output as stalled
from tests.faults.conftest import amount, seed, tally
from tests.faults.test_ranks import curves
from tests.faults.test_signals_of_runs import straight
from tests.forkserver import CompletedCommand, ForkServer
from tests.stand_ins.cuda.build import why_not
from tests.stand_ins.cuda.devices import MACHINES, VARIABLE, encode
from tests.stand_ins.cuda.environment import ROOT, environment
from tests.stand_ins.failing_tests import find_failing
from tests.stand_ins.forked import DESCRIBE, StandIn, read

__all__ = ["amount", "curves", "expected", "folder", "one_process", "seed", "straight", "tally"]  # fixtures

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built"),
    pytest.mark.timeout(300),
]
MACHINE = {VARIABLE: encode(MACHINES["h100x8"])}
FAILING = Path(__file__).with_name("task_that_fails.py")
EXACT = "precision=fp32"  # computes like the CPU, because losses are compared


def share_of_two(args: Sequence[str], folder: Path) -> int:
    """Return the share that one of two ranks has of an update of the task file, at most 8."""
    texts = [*args, *((folder / word).read_text() for word in args if word.endswith(".py"))]
    sizes = [int(size) for text in texts for size in re.findall(r"global_batch_size(?:=|\": )(\d+)", text)]
    return min([*(size // 2 for size in sizes), 8])


@dataclass(frozen=True)
class OnDevices:
    """A fork server whose commands train on the stand-in's devices, so that ranks use NCCL."""

    server: ForkServer

    def start(self, args: list[str], folder: Path, env: Mapping[str, str] | None = None, before: str = "") -> int:
        given = [*(word for word in args if word != "device=cpu"), "device=cuda", EXACT]
        if not any(word.startswith("micro_batch_size=") for word in args):
            given.append(f"micro_batch_size={share_of_two(args, folder)}")  # skips tracing, because it is given
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
    """Override the fork server of the CPU tests."""
    return OnDevices(stand_in.server)


COPIED: set[Callable[..., None]] = set()


def copy_of(test: Callable[..., None], *marks: pytest.MarkDecorator) -> Callable[..., None]:
    """Return a test of another file with its parameters, except those that the new marks replace."""

    @functools.wraps(test)
    def over_nccl(**fixtures: Any) -> None:
        test(**fixtures)

    COPIED.add(test)
    new = {mark.args[0] for mark in marks if mark.name == "parametrize"}
    old = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    kept = [mark for mark in old if mark.args[0] not in new]
    return functools.reduce(lambda function, mark: mark(function), marks, _with_marks(over_nccl, kept))


def _with_marks(function: Callable[..., None], marks: Sequence[pytest.Mark]) -> Callable[..., None]:
    function.pytestmark = list(marks)  # type: ignore[attr-defined]
    return function


ONE, SLOW, LONG = pytest.mark.sampled(1), pytest.mark.slow, pytest.mark.long
HOURS = pytest.mark.timeout(7200)  # `--all` repeats the test with other moments of the fault
# These tests cover SIGKILL, an exception on one rank, an early exit, SIGSTOP, a slow rank, and a collective that only
# one rank calls.
test_ranks = copy_of(faults.test_a_failing_rank_is_reported_and_the_run_resumes, ONE, SLOW, HOURS)
test_a_killed_rank = copy_of(whole_runs.test_remaining_ranks_resume_after_a_kill, ONE, SLOW)
test_an_exception = copy_of(whole_runs.test_a_task_error_ends_the_run_with_its_message)
test_an_early_exit = copy_of(whole_runs.test_an_exited_rank_is_reported_as_lost, LONG)
test_a_loss_that_is_not_finite = copy_of(whole_runs.test_a_non_finite_loss_ends_all_ranks, LONG)
test_a_signal = copy_of(whole_runs.test_a_stopped_run_saves_and_resumes, ONE, SLOW)
test_a_second_signal = copy_of(whole_runs.test_a_second_signal_exits_immediately_with_130, LONG)
test_a_killed_launcher = copy_of(whole_runs.test_no_process_remains_after_the_launcher_is_killed, LONG)
test_out_of_memory = copy_of(shortages.test_ranks_that_cannot_agree_restart_with_smaller_micro_batches, ONE, SLOW)
test_a_fresh_run = copy_of(whole_runs.test_a_fresh_run_resumes_after_losing_a_rank, LONG)
test_fewer_stages = copy_of(whole_runs.test_a_pipeline_with_an_explicit_split_loses_a_stage, LONG)
test_a_lost_pipeline = copy_of(whole_runs.test_a_lost_rank_ends_only_its_pipeline, LONG)
test_bad_samples = copy_of(whole_runs.test_a_rank_may_have_only_bad_samples, LONG)
test_a_killed_run = copy_of(whole_runs.test_a_resumed_run_of_two_ranks_is_bitwise_equal, LONG)
test_an_exact_sum = copy_of(own_tables.test_an_exact_custom_all_reduce_equals_ddp, SLOW)
test_a_wrong_sum = copy_of(own_tables.test_incorrect_custom_all_reduces_end_the_run, SLOW)
test_a_sum_that_returns_its_result = copy_of(own_tables.test_a_custom_all_reduce_must_not_return_a_result, SLOW)
test_not_finite = copy_of(numeric.test_all_ranks_stop_and_the_failing_rank_is_reported, LONG)
test_a_pipeline_that_is_not_finite = copy_of(numeric.test_the_search_in_a_pipeline_covers_samples_but_not_modules, LONG)

test_signals = copy_of(signals.test_a_run_saves_and_exits_with_75_after_stop_signals, LONG, HOURS)
test_no_time_to_save = copy_of(
    signals.test_a_save_that_cannot_finish_in_time_is_not_started, LONG, pytest.mark.parametrize("num_ranks", [2])
)
test_a_late_signal = copy_of(
    last_seconds.test_a_second_signal_after_the_last_save_does_not_change_the_exit_code,
    LONG,
    pytest.mark.parametrize(("num_ranks", "watchdog"), [(2, "default"), (2, "off")]),
)
test_stalled_output = copy_of(
    stalled.test_a_stop_signal_is_handled_while_output_is_stalled, LONG, pytest.mark.parametrize("num_ranks", [2])
)
test_exit_code = copy_of(
    errors.test_a_command_reaches_each_exit_code, LONG, pytest.mark.parametrize("name", ["a rank that is killed"])
)
test_errors_of_a_task = copy_of(
    errors.test_task_errors_are_reported_only_with_lines_of_the_task,
    LONG,
    pytest.mark.parametrize("name", ["a BaseException, with ranks", "an exit in a sample, with ranks"]),
)

# Tests whose ranks are forks of the pytest process. They run over NCCL in a process with the stand-in.
IN_PROCESS = (
    "launch/test_local.py::test_a_killed_rank_is_named_and_leaves_no_process",
    "launch/test_local.py::test_a_raising_rank_is_named_and_waiting_ranks_are_victims",
    "launch/test_local.py::test_a_rank_that_cannot_join_is_a_victim",
    "distributed/test_world.py::test_the_failed_rank_is_reported_not_its_peers",
)
# tests of failing ranks that cannot run over NCCL: the reason
GLOO_ONLY = {
    "launch/test_local.py::test_a_low_limit_on_open_files_is_reported": "its ranks join over gloo",
    "faults/test_ranks.py::test_a_hanging_rank_of_torchrun_reports_itself": "see the test of torchrun over NCCL below",
    "launch/test_start.py::test_the_error_of_a_rank_is_recorded_not_its_consequence": (
        "forks of the tests, started as by torchrun: see the test of torchrun below"
    ),
    "end_to_end/test_ranks.py::test_an_update_without_items_is_not_saved": (
        "the count is on the device, not read before the update: the run fails one update later, as non-finite"
    ),
    "launch/test_local.py::test_a_victim_exiting_first_is_not_the_cause": (
        "gloo reports a lost peer after a timeout of 0.2 s; NCCL reports none"
    ),
    "launch/test_local.py::test_a_silent_rank_is_named_among_consequences": (
        "a rank closes the connections of gloo; NCCL would not report it to the other rank"
    ),
    "distributed/test_pipelined.py::test_an_error_of_one_rank_is_raised_on_all_ranks": (
        "its batches are on the CPU; whole pipelines fail over NCCL in test_ranks"
    ),
    "distributed/test_pipelined.py::test_an_error_in_a_scheduled_pass_is_raised_on_all_ranks": (
        "its batches are on the CPU; whole pipelines fail over NCCL in test_ranks"
    ),
    "distributed/test_pipeline_copies.py::test_an_error_in_one_pipeline_is_raised_on_all_ranks": (
        "its batches are on the CPU; whole pipelines fail over NCCL in test_ranks"
    ),
    "distributed/test_matched_calls.py::test_results_and_common_errors_are_passed_on": "compared over gloo",
    "distributed/test_matched_calls.py::test_ranks_with_different_numbers_of_calls_are_reported": "compared over gloo",
    "distributed/test_matched_calls.py::"
    "test_an_error_of_one_rank_is_raised_on_all_ranks": "compared over gloo in any case",
    "distributed/test_matched_calls.py::test_an_early_error_of_one_rank_ends_the_run": "compared over gloo in any case",
    "distributed/test_matched_calls.py::test_a_loss_failing_in_eval_mode_does_not_prevent_training": (
        "compared over gloo in any case"
    ),
    "launch/test_two_nodes.py::test_the_machines_share_only_the_network": "sockets of gloo, which NCCL does not use",
    "faults/test_signals_of_runs.py::test_a_signal_immediately_ends_a_command_that_saves_no_state": (
        "the launcher kills its ranks, which need not meet"
    ),
    "launch/test_two_nodes.py::test_a_machine_without_peers_times_out": "there is no process group yet",
    "launch/test_two_nodes.py::test_a_rank_reports_a_port_used_by_another_program": "there is no process group yet",
    "launch/test_start.py::test_machines_with_different_task_files_exit_with_78": "compared over gloo in any case",
    "launch/test_start.py::test_an_error_on_every_rank_is_reported_once": "there is no process group yet",
    "launch/test_start.py::test_a_wrong_number_of_ranks_is_reported_once": ("there is no process group yet"),
    "launch/test_start.py::test_an_error_in_tracing_on_rank_0_ends_all_ranks": ("shared over gloo in any case"),
    "distributed/test_network_interface.py::test_a_shared_gpu_is_not_reported_as_a_network_problem": (
        "there is no process group yet"
    ),
    "launch/test_start.py::test_an_error_on_another_machine_is_reported_there": "there is no process group yet",
    "faults/test_environment.py::test_a_missing_proc_file_system_is_reported": "there is no process group yet",
    "faults/test_limits.py::test_a_run_under_a_system_limit_completes_or_ends_with_a_message": (
        "limits of the host's memory, in which the stand-in keeps that of its devices"
    ),
    "faults/test_resume_matrix.py::test_every_interrupted_run_equals_an_uninterrupted_run": (
        "its ranks end as in test_ranks; it adds readers and state on disk, on which the group has no influence"
    ),
}
# Tests that `find_failing` finds, although no rank fails.
NO_FAILURE = {
    "faults/test_errors.py::test_every_exit_code_is_covered_by_a_test",
    "faults/test_out_of_memory.py::test_unrecoverable_out_of_memory_errors_name_the_task_line",
    "faults/test_out_of_memory.py::test_the_setting_on_oom_stop_ends_the_run",
    "faults/test_secrets.py::test_run_files_are_private_with_any_umask",
    "faults/test_secrets.py::test_run_files_and_output_contain_no_secrets",
    "faults/test_secrets.py::test_subprocesses_get_only_needed_secrets",
    "faults/test_signals_of_runs.py::test_a_save_that_fits_the_time_is_written",
    "faults/test_signals_of_runs.py::test_a_stop_before_the_first_update_does_not_wait_for_that_update",
    "faults/test_signals_of_runs.py::test_the_suite_would_detect_workers_that_exit_on_a_stop_signal",
    "distributed/test_pipelined.py::test_a_task_without_layers_is_reported",
    "end_to_end/test_ranks.py::test_a_hyperspectral_pipeline_matches_one_process",
    "distributed/test_sharded_evaluation.py::test_a_finished_rank_joins_calls_without_side_effects",
    "distributed/test_sharded_evaluation.py::test_failed_calls_leave_no_rank_waiting_or_weights_gathered",
    "distributed/test_sharded_evaluation.py::test_a_collective_after_other_ranks_finished_is_an_error",
    "distributed/test_sharded_evaluation.py::test_tasks_can_use_collectives_after_equal_numbers_of_calls",
    "distributed/test_sharded_evaluation.py::test_a_collective_during_other_ranks_calls_is_an_error",
    "distributed/test_sharded_evaluation.py::test_collectives_of_groups_without_this_rank_are_not_counted",
    "distributed/test_sharded_evaluation.py::test_calling_a_submodule_directly_is_an_error",
    "distributed/test_world.py::test_the_rendezvous_timeout_grows_with_the_number_of_ranks",
    "end_to_end/test_coupled_runs.py::test_a_resumed_run_is_bitwise_equal",
    "end_to_end/test_coupled_runs.py::test_unsupported_strategies_are_rejected",
    "end_to_end/test_objective_runs.py::test_a_resumed_run_is_bitwise_equal",
    "end_to_end/test_objective_runs.py::test_invalid_objectives_are_rejected",
    "end_to_end/test_mosaicml.py::test_ranks_and_resumes_do_not_change_training",
    "end_to_end/test_package_streams.py::test_ranks_and_resumes_do_not_change_training",
    "end_to_end/test_own_tables.py::test_custom_loaders_train_bitwise_equally",
    "end_to_end/test_own_tables.py::test_optimizer_state_without_parameter_is_restored",
    "end_to_end/test_phases.py::test_invalid_options_of_later_phases_are_reported_first",
    "end_to_end/test_own_tables.py::test_commands_know_custom_options",
} | {
    f"end_to_end/test_ranks.py::{test.__name__}"
    for test in (
        whole_runs.test_two_ranks_match_one_process,
        whole_runs.test_copies_of_a_split_model_match_one_process,
        whole_runs.test_ddp_runs_resume_with_other_strategies,
        whole_runs.test_one_process_can_use_a_model_trained_on_ranks,
        whole_runs.test_the_straggler_is_reported,
        whole_runs.test_bad_samples_of_any_rank_are_listed,
        whole_runs.test_each_checkpoint_interval_saves_once,
        whole_runs.test_initial_buffers_are_equal_on_all_ranks,
        whole_runs.test_a_fit_can_call_the_model,
        whole_runs.test_sharded_checkpoints_resume_with_other_strategies,
        whole_runs.test_impossible_configurations_are_reported_before_ranks_start,
    )
}


def test_tests_of_failing_ranks_also_run_over_nccl() -> None:
    """A test that cannot run over NCCL must have a reason."""
    tests = ROOT / "tests"
    run = {f"{Path(test.__code__.co_filename).relative_to(tests).as_posix()}::{test.__name__}" for test in COPIED}
    found = set(find_failing(tests, "faults", "launch", "distributed", "end_to_end"))
    assert found - run - set(IN_PROCESS) == GLOO_ONLY.keys() | NO_FAILURE
    assert found >= set(IN_PROCESS)


def test_a_new_test_of_failing_ranks_is_found(tmp_path: Path) -> None:
    """The search includes names of the same file that the test uses."""
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults/test_new.py").write_text(
        "WORDS = 'parallelism.world_size=2'\n"
        "def kill(pid): os.kill(pid, signal.SIGKILL)\n"
        "def test_killed(): kill(start(WORDS))\n"
        "def test_alone(): kill(start('device=cpu'))\n"
        "def test_alive(): start(WORDS)\n"
    )
    assert list(find_failing(tmp_path, "faults")) == ["faults/test_new.py::test_killed"]


LAUNCHED = """
import os, pytest
os.chdir({root!r})
os.environ["RANKS_OVER"] = "nccl"
assert pytest.main({args}) == 0
"""


@pytest.mark.slow
def test_forked_ranks_fail_in_the_same_way_over_nccl(stand_in: StandIn) -> None:
    args = ["-q", "--assert=plain", "-p", "no:cacheprovider", "--timeout=0"]
    args += [f"tests/{name}" for name in IN_PROCESS]
    out = stand_in.program("h100x8", LAUNCHED.format(root=str(ROOT), args=args))
    (passed,) = re.findall(r"(\d+) passed", out)
    assert int(passed) >= len(IN_PROCESS)
    assert "failed" not in out


@pytest.mark.long  # starts three interpreters that import torch, and waits 30 s until torchrun kills rank 0
@pytest.mark.timeout(600)
def test_errors_of_torchrun_ranks_are_recorded_over_nccl(tmp_path: Path) -> None:
    """NCCL does not report the lost rank, so torchrun kills rank 0 before it can record an error.

    The lost rank has a context only on its own GPU.
    """
    counted = tmp_path / "counted"
    counted.mkdir()
    start = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "runner"]
    args = f"train --task {FAILING} task.rank=1 updates=6 global_batch_size=16 micro_batch_size=8 run=r device=cuda"
    ended = subprocess.run(
        [sys.executable, "-m", *start, *args.split(), "parallelism=ddp", "monitor=off"],
        cwd=tmp_path, env={**environment(MACHINES["a100x2"], counted), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    error = read_error(tmp_path / "outputs/r")
    assert error is not None, ended.stderr
    assert (error.exit_code, error.place["rank"]) == (Exit.SOFTWARE, 1)
    assert "planted" in error.cause
    process = read_record(tmp_path / "outputs/r").process
    assert (process.state, process.exit_code) == ("failed", Exit.SOFTWARE)
    assert [each["contexts"] for each in read(counted)] == [[1]]


def test_waits_after_a_failure_take_less_than_12_s() -> None:
    """The waits are the grace period, the wait for processes that outlive their rank, and one reminder."""
    grace_s = inspect.signature(local.run_ranks).parameters["grace_s"].default
    assert grace_s + local.OTHERS_S + local.REMINDER_S < 12
    assert join.ABORT_S < 12
