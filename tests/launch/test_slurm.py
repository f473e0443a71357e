"""launcher=slurm: submitted scripts, rejections before submission, and requeueing.

tests/slurm_stub.py stands in for the commands of SLURM; scripts/test_slurm.sh runs against a real SLURM.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.base.errors import ConfigError, Exit, InputMissing, MissingPackage, SystemLimit
from runner.config.configuration import compose
from runner.config.request import Request
from runner.launch.launcher import submit
from tests import slurm_stub


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a working directory, with the commands of a cluster on PATH."""
    slurm_stub.install(tmp_path, monkeypatch)
    return tmp_path


def launch(*args: str) -> int | None:
    return submit(compose(Request(args)))


def options(cluster: Path) -> dict[str, str]:
    """Return the options in the submitted script."""
    lines = (cluster / "script").read_text().splitlines()
    args = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH --")]
    return {word.partition("=")[0]: word.partition("=")[2] for word in args}


def run_script(cluster: Path, code: int, **environment: str) -> tuple[int, list[str]]:
    """Run the submitted script, whose ranks end with `code`; return its exit code and the arguments of srun."""
    result = subprocess.run(
        ["bash", str(cluster / "script")],
        env={**os.environ, "CODE": str(code), "SLURM_JOB_ID": "42", **environment},
        check=False,
        timeout=60,
    )
    return result.returncode, (cluster / "srun").read_text().splitlines()


def test_the_local_launcher_trains_in_this_process() -> None:
    assert launch() is None
    assert launch("launcher=local") is None


def test_the_command_to_follow_a_submitted_job_is_printed(
    cluster: Path, capsys: pytest.CaptureFixture[str], screen: Callable[..., None]
) -> None:
    args = ["launcher=slurm", "run=first", "parallelism=ddp", "launcher.nodes=2", "launcher.gpus_per_node=4"]
    assert launch(*args, "launcher.cpus_per_task=8", "launcher.partition=long", "launcher.mem_gb=64") == 0
    assert options(cluster) == {
        "cpus-per-task": "8",
        "gpus-per-node": "4",
        "job-name": "first",
        "mem": "64G",
        "nodes": "2",
        "ntasks-per-node": "4",
        "open-mode": "append",
        "output": f"{cluster}/outputs/first/slurm/%j_0_log.out",
        "partition": "long",
        "requeue": "",
        "signal": "USR1@120",
        "time": "60",
    }
    screen(capsys.readouterr().out)


def test_ranks_run_the_command_with_name_and_local_launcher(cluster: Path) -> None:
    launch("launcher=slurm", "launcher.time_min=30", "optimizer.lr=0.5", "task.size=tiny", "output_root=a b")
    code, given = run_script(cluster, 0)
    assert code == 0
    assert {"--open-mode=append", "--kill-on-bad-exit=0", "--wait=120"} <= set(given)
    begin = given.index(sys.executable)
    assert given[begin + 1 : begin + 4] == ["-m", "runner", "train"]
    *args, name, grace = given[begin + 4 :]
    assert args == ["optimizer.lr=0.5", "task.size=tiny", "output_root=a b", "launcher=local"]
    assert grace == "checkpoint.grace_s=120", "the grace period must be the time between the warning and the end"
    assert name.startswith("run=gpt-"), "the job must be requeued under its original name"
    assert (cluster / "a b" / name.removeprefix("run=") / "slurm").is_dir()


def test_a_given_time_limit_is_not_changed(cluster: Path) -> None:
    launch("launcher=slurm", "launcher.signal_s=300", "run=a", "checkpoint.grace_s=40")
    given = run_script(cluster, 0)[1]
    assert [word for word in given if word.startswith("checkpoint.")] == ["checkpoint.grace_s=40"]


def test_srun_gets_the_cores_of_the_job(cluster: Path) -> None:
    launch("launcher=slurm", "launcher.cpus_per_task=6", "run=a")
    assert "--cpus-per-task=6" in run_script(cluster, 0)[1]


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    ("code", "restarts", "is_queued"),
    [
        (75, "", True),
        (75, "1", True),
        (75, "2", False),
        (138, "", True),
        (0, "", False),
        (84, "", False),
        (130, "", False),
    ],
)
def test_a_preempted_run_is_requeued(code: int, restarts: str, is_queued: bool, cluster: Path) -> None:
    launch("launcher=slurm", "launcher.requeue_times=2", "run=a")
    environment = {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    assert run_script(cluster, code, **environment)[0] == code
    assert (cluster / "scontrol").exists() == is_queued
    if is_queued:
        assert (cluster / "scontrol").read_text() == "requeue 42\n"


def test_resume_fresh_becomes_auto_after_a_requeue(cluster: Path) -> None:
    launch("launcher=slurm", "resume=fresh", "run=a")
    assert run_script(cluster, 75)[1][-1] == "resume=fresh"
    assert run_script(cluster, 75, SLURM_RESTART_COUNT="1")[1][-1] == "resume=auto"


def test_no_value_is_executed_by_the_shell(cluster: Path) -> None:
    hostile = 'output_root="$(touch bad) ; `touch bad`"'
    launch("launcher=slurm", "run=a", hostile, "launcher.constraint='a100|(b&c)'")
    code, given = run_script(cluster, 0)
    assert code == 0
    assert hostile in given
    assert not (cluster / "bad").exists()
    for word in ("launcher.partition='a b'", "launcher.account='a\nb'", "launcher.qos='$(touch bad)'"):
        with pytest.raises(ConfigError, match="without spaces"):
            launch("launcher=slurm", word)
    with pytest.raises(ConfigError, match="unknown key"):
        launch("launcher=slurm", "launcher.setup=[reboot]")


def test_all_problems_are_reported_before_submission(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cluster))
    with pytest.raises(ConfigError) as caught:
        launch("launcher=slurm", "launcher.nodes=2", "launcher.time_min=1", "run=a")
    assert [problem.where for problem in caught.value.problems] == [
        "parallelism",
        "launcher.signal_s",
        "launcher=slurm",
    ]
    assert "launcher.nodes=1" in caught.value.problems[0].fix
    assert "launcher=local" in caught.value.problems[2].fix
    assert not (cluster / "outputs").exists()


def test_a_job_starts_the_requested_number_of_ranks(cluster: Path) -> None:
    args = ("launcher=slurm", "parallelism=ddp", "parallelism.world_size=4", "run=a")
    with pytest.raises(ConfigError) as caught:
        launch(*args, "launcher.nodes=2", "launcher.gpus_per_node=4")
    assert [problem.where for problem in caught.value.problems] == ["parallelism.world_size=4"]
    assert launch(*args, "launcher.nodes=2", "launcher.gpus_per_node=2") == 0
    assert launch(*args) == 0, "without launcher.nodes, one task must start the ranks itself"


def test_a_rank_does_not_submit_a_job(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ConfigError, match="must be local in a rank"):
        launch("launcher=slurm", "run=a")
    assert not (cluster / "script").exists()


def test_output_of_sbatch_is_printed_once(cluster: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No file is left."""
    says = (
        "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid partition\n"
    )
    (cluster / "says").write_text(says)
    with pytest.raises(ConfigError) as refused:
        launch("launcher=slurm", "run=a")
    assert [str(refused.value).count(line.partition("error: ")[2]) for line in says.splitlines()] == [1, 1]
    (cluster / "says").write_text("sbatch: error: Unable to contact slurm controller (connect failure)\n")
    with pytest.raises(SystemLimit, match="Unable to contact") as unreachable:
        launch("launcher=slurm", "run=a")
    assert unreachable.value.exit_code == Exit.SYSTEM
    assert capfd.readouterr() == ("", "")
    assert not list((cluster / "outputs").iterdir())


# output of sbatch from SLURM 22.05
NO_CONFIGURATION = """sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: error: _establish_config_source: failed to fetch config
sbatch: fatal: Could not establish a configuration source
"""
NO_CLUSTER_NAME = """sbatch: error: ClusterName needs to be specified
sbatch: fatal: Unable to process configuration file
"""
NO_ANSWER = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n"


@pytest.mark.parametrize(
    ("says", "begins", "way_out"),
    [
        (NO_CONFIGURATION, "Could not establish a configuration source; resolve_ctls", "SLURM_CONF="),
        (NO_CONFIGURATION.splitlines()[-1], "Could not establish a configuration source", "from a login node"),
        (NO_CLUSTER_NAME, "Unable to process configuration file; ClusterName", "SLURM_CONF="),
        (NO_ANSWER, "Batch job submission failed: Unable to contact", "scontrol ping"),
    ],
)
def test_an_unreachable_controller_is_no_configuration_error(
    says: str, begins: str, way_out: str, cluster: Path
) -> None:
    (cluster / "says").write_text(says)
    with pytest.raises(SystemLimit) as unreachable:
        launch("launcher=slurm", "run=a")
    assert unreachable.value.exit_code == Exit.SYSTEM
    (problem,) = unreachable.value.problems
    assert begins in problem.what
    assert way_out in problem.fix


def test_a_fatal_sbatch_error_is_a_configuration_error(cluster: Path) -> None:
    (cluster / "says").write_text("sbatch: fatal: Invalid --gpus-per-node specification\n")
    with pytest.raises(ConfigError, match="rejected the job: Invalid --gpus-per-node specification\n"):
        launch("launcher=slurm", "run=a")


def test_a_rejected_job_does_not_change_the_run(cluster: Path) -> None:
    """Other jobs do not change either."""
    launch("launcher=slurm", "run=a")
    before = sorted((cluster / "outputs").rglob("*"))
    (cluster / "says").write_text("sbatch: error: invalid partition specified: x\n")
    with pytest.raises(ConfigError):
        launch("launcher=slurm", "run=a")
    assert sorted((cluster / "outputs").rglob("*")) == before


def test_the_extra_for_a_missing_submitit_is_named(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(MissingPackage, match=r"pip install .accel-run\[slurm\]"):
        launch("launcher=slurm", "run=a")


def test_task_file_and_config_folder_are_passed_on(cluster: Path) -> None:
    (cluster / "my task.py").write_text("def build(*, hidden: int = 8): ...\n")
    (cluster / "conf" / "launcher").mkdir(parents=True)
    (cluster / "conf" / "launcher" / "ours.yaml").write_text("option: slurm\npartition: long\ntime_min: 600\n")
    request = Request(("launcher=ours", "run=a"), cluster / "my task.py", cluster / "conf")
    assert submit(compose(request)) == 0
    assert options(cluster)["partition"] == "long"
    given = run_script(cluster, 0)[1]
    start = given.index("--task")
    assert given[start:][:4] == ["--task", str(cluster / "my task.py"), "--config-dir", str(cluster / "conf")]
    with pytest.raises(InputMissing):
        compose(Request(("launcher=ours",), cluster / "none.py"))
