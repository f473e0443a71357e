"""The rank of a process is detected from the environment of torchrun or srun."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from runner.base.errors import ConfigError, Exit, RepeatedConfigError
from runner.base.rank_env import RankInfo, detect_rank, expand_hosts, expand_tasks

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
# as set by Slurm 22.05 for `srun -N2 --ntasks-per-node=2` in a batch script
SRUN = {
    "SLURM_JOB_ID": "60007",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_STEP_NODELIST": "n[1-2]",
}


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def test_a_process_without_rank_variables_is_not_a_rank() -> None:
    assert detect_rank({}) is None
    assert detect_rank({"WORLD_SIZE": "8", "MASTER_ADDR": "a", "HOME": "/root"}) is None


def test_ranks_of_torchrun_are_read_from_its_variables() -> None:
    assert detect_rank(TORCHRUN) == RankInfo(3, 1, 4, 2, "tcp://node-a:29500", 2)


def test_a_single_process_of_torchrun_is_a_rank() -> None:
    """torchrun may add more processes later."""
    alone = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    assert detect_rank(alone) == RankInfo(0, 0, 1, 1, "tcp://node-a:29500", 2)


def test_ranks_of_srun_are_read_from_its_variables() -> None:
    """The port depends on the job ID."""
    assert detect_rank(SRUN) == RankInfo(2, 0, 4, 2, "tcp://n1:20007", 0)


def test_a_requeued_job_is_another_attempt() -> None:
    assert detect_rank({**SRUN, "SLURM_RESTART_COUNT": "3"}) == RankInfo(2, 0, 4, 2, "tcp://n1:20007", 3)


def test_master_variables_override_the_defaults_of_srun() -> None:
    member = detect_rank({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"})
    assert member is not None
    assert member.store == "tcp://10.0.0.1:29501"


def test_variables_of_the_step_override_those_of_the_job() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n2"}
    assert detect_rank({**SRUN, **step, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}) == RankInfo(
        1, 1, 2, 2, "tcp://n2:20007", 0
    )


def test_the_last_machine_may_have_fewer_tasks() -> None:
    uneven = {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "n[1-4]"}
    last = detect_rank({**SRUN, **uneven, "SLURM_PROCID": "6", "SLURM_NODEID": "3"})
    assert last == RankInfo(6, 0, 7, 1, "tcp://n1:20007", 0)


def test_tasks_per_node_are_also_read_from_older_variables() -> None:
    old = without(SRUN, "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
    assert detect_rank(old) == detect_rank(SRUN)
    asked = {**without(old, "SLURM_TASKS_PER_NODE"), "SLURM_NTASKS_PER_NODE": "2"}
    assert detect_rank(asked) == detect_rank(SRUN)


def test_the_shell_of_a_batch_script_is_not_a_rank() -> None:
    assert detect_rank(without(SRUN, "SLURM_STEP_ID")) is None
    assert detect_rank({**SRUN, "SLURM_STEP_ID": "4294967291"}) is None, "SLURM_BATCH_SCRIPT"
    assert detect_rank({**SRUN, "SLURM_STEP_ID": "4294967290"}) is None, "SLURM_INTERACTIVE_STEP"
    assert detect_rank({"SLURM_JOB_ID": "5", "SLURM_NTASKS": "4"}) is None, "the shell of salloc is not a rank"


def test_a_step_of_one_task_is_a_single_process() -> None:
    one = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert detect_rank({**SRUN, **one}) is None


def test_torchrun_started_by_srun_is_torchrun() -> None:
    assert detect_rank({**SRUN, **TORCHRUN}) == detect_rank(TORCHRUN)


@pytest.mark.parametrize(
    ("environment", "where"),
    [
        ({**TORCHRUN, "RANK": "4"}, "RANK"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK"),
        ({**TORCHRUN, "WORLD_SIZE": "many"}, "WORLD_SIZE"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, "LOCAL_WORLD_SIZE"),
        ({"RANK": "0"}, "WORLD_SIZE, LOCAL_WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({**SRUN, "SLURM_PROCID": "4"}, "SLURM_PROCID"),
        ({**SRUN, "SLURM_LOCALID": "2"}, "SLURM_LOCALID"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "4x"}, "SLURM_STEP_NUM_TASKS"),
        ({**SRUN, "SLURM_RESTART_COUNT": "no"}, "SLURM_RESTART_COUNT"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT"),
    ],
)
def test_contradictory_variables_are_reported(environment: dict[str, str], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detect_rank(environment)
    assert caught.value.exit_code == Exit.CONFIG
    (problem,) = caught.value.problems
    assert problem.where == where
    assert problem.fix


@pytest.mark.parametrize(
    ("environment", "changes"),
    [
        (TORCHRUN, {"RANK": "x", "MASTER_PORT": "99999"}),
        (TORCHRUN, {"WORLD_SIZE": "many", "LOCAL_RANK": "2", "TORCHELASTIC_RESTART_COUNT": "-1"}),
        (SRUN, {"SLURM_STEP_NUM_TASKS": "4x", "SLURM_NODEID": "7", "SLURM_STEP_NODELIST": "n["}),
        (SRUN, {"SLURM_JOB_ID": "a", "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_PROCID": "9"}),
    ],
)
def test_only_and_all_invalid_variables_are_reported(environment: dict[str, str], changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        detect_rank({**environment, **changes})
    assert {problem.where for problem in caught.value.problems} == changes.keys()
    assert all(changes[problem.where] in problem.what for problem in caught.value.problems)
    assert [bool(problem.fix) for problem in caught.value.problems] == [False] * (len(changes) - 1) + [True]


@pytest.mark.parametrize(("environment", "local_rank"), [(TORCHRUN, "LOCAL_RANK"), (SRUN, "SLURM_LOCALID")])
def test_one_rank_per_machine_reports_a_common_error(environment: dict[str, str], local_rank: str) -> None:
    def is_silent(**changes: str) -> bool:
        with pytest.raises(ConfigError) as caught:
            detect_rank({**environment, "TORCHELASTIC_RUN_ID": "none", **changes})
        return isinstance(caught.value, RepeatedConfigError)

    assert not is_silent(**{"MASTER_PORT": "99999", local_rank: "0"})
    assert is_silent(**{"MASTER_PORT": "99999", local_rank: "1"})
    assert not is_silent(**{"MASTER_PORT": "99999", local_rank: "x"}), "only this rank has the invalid value"


def test_ranks_started_by_hand_report_their_own_errors() -> None:
    with pytest.raises(ConfigError) as caught:
        detect_rank({**TORCHRUN, "MASTER_PORT": "99999", "RANK": "1", "LOCAL_RANK": "1"})
    assert not isinstance(caught.value, RepeatedConfigError), (
        "it is unknown whether another rank reports the same error"
    )


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-2,5]", ["n1", "n2", "n5"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("a-1.b,rack[1-2]n[3,4],z", ["a-1.b", "rack1n3", "rack1n4", "rack2n3", "rack2n4", "z"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
    ],
)
def test_slurm_node_lists_are_parsed(nodelist: str, hosts: list[str]) -> None:
    assert expand_hosts(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["", "n[1-2", "n]", "n[]", "n[a-b]", "a b", "n[1,]", "a,,b", "$(id)"])
def test_an_invalid_node_list_is_rejected(nodelist: str) -> None:
    with pytest.raises(ValueError):
        expand_hosts(nodelist)


def test_slurm_tasks_per_node_are_parsed() -> None:
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks("4") == [4]
    for wrong in ("", "2(x)", "2x3", "2,,1"):
        with pytest.raises(ValueError):
            expand_tasks(wrong)


def test_detecting_the_rank_does_not_import_torch() -> None:
    code = "import sys; from runner.base.rank_env import detect_rank; detect_rank({'RANK': '0'})"
    code = f"import sys\ntry: {code}\nexcept Exception as error: sys.exit(10 + ('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 10


@pytest.mark.parametrize(
    ("given", "exported", "expected"),
    [
        ({}, "1", "None"),  # the default of torchrun
        ({"OMP_NUM_THREADS": "1"}, "1", "1"),
        ({"OMP_NUM_THREADS": "4"}, "4", "4"),
    ],
)
def test_omp_num_threads_is_removed_only_if_set_by_torchrun(
    given: dict[str, str], exported: str, expected: str
) -> None:
    """The intermediate process exports the variable to its child, as torchrun does."""
    child = "import os; from runner.base.rank_env import remove_default_threads as call; call();"
    child += " print(os.environ.get('OMP_NUM_THREADS'))"
    agent = f"""
import os, subprocess, sys
os.environ.update(OMP_NUM_THREADS={exported!r}, TORCHELASTIC_RUN_ID="none")
raise SystemExit(subprocess.run([sys.executable, "-c", {child!r}]).returncode)
"""
    environment = {**without(dict(os.environ), "OMP_NUM_THREADS"), **given}
    done = subprocess.run([sys.executable, "-c", agent], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected
