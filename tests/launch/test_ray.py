"""launcher=ray on a local Ray cluster of two nodes: training, lost nodes, stop requests, failures and sweeps.

Skipped without Ray, which takes half a gigabyte of disk space: pip install "accel-run[ray]".
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.rounding import allowed
from tests.waiting import wait_until

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")

UPDATES, SAMPLES = 40, 8
# Each update sums its samples in another order. The rounding errors of updates add up like a random walk.
SAME_CURVE = allowed(torch.float32, SAMPLES, growth=UPDATES**0.5)

TASK = """
import os
import signal
import time
from pathlib import Path
import torch
from torch import nn
from runner import Task


class Fit(Task):
    def __init__(self):
        Path(f"rank-{os.getpid()}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        Path("ray-" + os.environ.get("RAY_JOB_ID", "none") + f"-{os.getpid()}").touch()
        self.calls = 0
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def dataset(self, split):
        points = torch.linspace(-1, 1, 256).view(64, 4)
        return torch.utils.data.TensorDataset(points, points.sum(1, keepdim=True).sin())

    def loss(self, model, batch):
        self.calls += 1  # of this process
        points, values = batch
        return (model(points) - values).square().sum(), len(points)


def build():
    return Fit()
"""


# Training waits after some updates, so that it has not ended when the test intervenes.
HOLD = """self.calls += 1
        while self.calls > 10 and {condition}:
            time.sleep(0.01)
"""
UNTIL_STOPPED = HOLD.format(condition="not signal.getsignal(signal.SIGUSR1).__self__.requested")
FOREVER = HOLD.format(condition="True")
UNTIL_RELEASED = HOLD.format(condition="not Path('released').exists()")
FAIL = """self.calls += 1
        if os.environ["RANK"] == "1" and "ONLY_FOR_THE_COMMAND" not in os.environ:
            raise ValueError("RANK_1_FAILS")
"""


def change_loss(loss: str) -> str:
    """Return the task with `loss` as the first statement of its loss."""
    return TASK.replace("self.calls += 1  # of this process", loss)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster that has only a head, without CPUs."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def nodes(cluster: Any) -> list[Any]:
    return [cluster.add_node(num_cpus=1) for _ in range(2)]


def command(folder: Path, name: str, *args: str, task: str = TASK) -> list[str]:
    (folder / "fit.py").write_text(task)
    settings = [
        "device=cpu",
        f"updates={UPDATES}",
        f"global_batch_size={SAMPLES}",
        "dataloader.num_workers=0",
        "log_every=1",
    ]
    settings += ["checkpoint.every=5", "evaluate.every=0", f"run={name}", "monitor=off"]
    return [sys.executable, "-m", "runner", "train", "--task", str(folder / "fit.py"), *settings, *args]


def start_run(cluster: Any, folder: Path, name: str, *args: str, task: str = TASK) -> subprocess.Popen[str]:
    words = command(folder, name, "launcher=ray", f"launcher.address={cluster.address}", *args, task=task)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ONLY_FOR_THE_COMMAND": "x"}
    return subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def losses(folder: Path, name: str) -> dict[int, float]:
    lines = (folder / "outputs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    found = [(row["update"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert len(dict(found)) == len(found), "an update has two rows"
    return dict(found)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run(command(folder, "alone"), cwd=folder, check=True, capture_output=True)
    return losses(folder, "alone")


TWO = ("launcher.nodes=2", "parallelism=ddp")


def test_two_nodes_train_like_one_process(
    cluster: Any, nodes: list[Any], alone: dict[int, float], tmp_path: Path
) -> None:
    run = start_run(cluster, tmp_path, "pair", *TWO)
    out, _ = run.communicate()
    assert run.returncode == 0, out
    assert losses(tmp_path, "pair") == pytest.approx(alone, rel=SAME_CURVE)


def test_after_a_node_is_lost_the_run_resumes_on_another(
    cluster: Any, nodes: list[Any], alone: dict[int, float], tmp_path: Path
) -> None:
    run = start_run(cluster, tmp_path, "moved", *TWO, task=change_loss(UNTIL_RELEASED))
    try:
        wait_until(lambda: any((tmp_path / "outputs/moved/checkpoints").glob("update-*")), "the first checkpoint")
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        nodes.append(cluster.add_node(num_cpus=1))
        (tmp_path / "released").touch()
        out, _ = run.communicate()
    finally:
        run.kill()
    assert run.returncode == 0, out
    assert "restart 1 of 3" in out
    assert losses(tmp_path, "moved") == pytest.approx(alone, rel=SAME_CURVE)


def test_a_stopped_run_is_resumed_by_the_same_command(
    cluster: Any, nodes: list[Any], alone: dict[int, float], tmp_path: Path
) -> None:
    run = start_run(cluster, tmp_path, "stopped", *TWO, task=change_loss(UNTIL_STOPPED))
    try:
        wait_until(lambda: any((tmp_path / "outputs/stopped/checkpoints").glob("update-*")), "the first checkpoint")
        run.terminate()
        out, _ = run.communicate()
        assert run.returncode == 75, out
        again = start_run(cluster, tmp_path, "stopped", *TWO)
        out, _ = again.communicate()
    finally:
        run.kill()
    assert again.returncode == 0, out
    assert losses(tmp_path, "stopped") == pytest.approx(alone, rel=SAME_CURVE)


def test_a_second_signal_leaves_no_rank(cluster: Any, nodes: list[Any], tmp_path: Path) -> None:
    run = start_run(cluster, tmp_path, "forced", *TWO, task=change_loss(FOREVER))
    try:
        wait_until(lambda: any((tmp_path / "outputs/forced/checkpoints").glob("update-*")), "the first checkpoint")
        pids = [int(path.name.removeprefix("rank-")) for path in tmp_path.glob("rank-*")]
        assert len(pids) == 2
        assert all(map(psutil.pid_exists, pids))
        run.send_signal(signal.SIGTERM)
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate()
    finally:
        run.kill()
    assert run.returncode == 130, out
    wait_until(lambda: not any(map(is_running, pids)), "all ranks have ended")


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_exit_code_is_that_of_the_failed_rank(cluster: Any, nodes: list[Any], tmp_path: Path) -> None:
    run = start_run(cluster, tmp_path, "failing", *TWO, task=change_loss(FAIL))
    out, _ = run.communicate()
    assert run.returncode == 70, out
    assert "RANK_1_FAILS" in out
    assert "restart 1" not in out


def test_trials_of_a_sweep_run_on_the_cluster(cluster: Any, nodes: list[Any], tmp_path: Path) -> None:
    words = command(tmp_path, "grid", "-m", "optimizer.lr=0.1,0.01", "updates=5", "launcher=ray", "together=2")
    words += [f"launcher.address={cluster.address}"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    for number in (1, 2):
        assert len(losses(tmp_path, f"grid/grid-{number}")) == 5
    assert_trials_are_tasks_of_ray(tmp_path)


def test_trials_of_a_search_run_on_the_cluster(cluster: Any, nodes: list[Any], tmp_path: Path) -> None:
    words = command(tmp_path, "best", "optimizer.lr=log(0.01,0.1)", "updates=5", "evaluate.every=5", "launcher=ray")
    words += [f"launcher.address={cluster.address}", "trials=2", "together=2"]
    words[words.index("train")] = "search"
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    for number in (1, 2):
        assert len(losses(tmp_path, f"best/best-{number}")) == 5
    assert_trials_are_tasks_of_ray(tmp_path)


def test_a_trial_of_a_lost_node_resumes_on_another(
    cluster: Any, nodes: list[Any], alone: dict[int, float], tmp_path: Path
) -> None:
    trials = [tmp_path / f"outputs/cut/cut-{number}" for number in (1, 2)]
    sweep = start_run(cluster, tmp_path, "cut", "-m", "seed=0,1", "together=2", task=change_loss(UNTIL_RELEASED))
    try:
        for trial in trials:
            wait_until(lambda trial=trial: any((trial / "checkpoints").glob("update-*")), "a checkpoint of each trial")
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        nodes.append(cluster.add_node(num_cpus=1))
        (tmp_path / "released").touch()
        out, _ = sweep.communicate()
    finally:
        sweep.kill()
    assert sweep.returncode == 0, out
    kept, moved = sorted((starts(trial) for trial in trials), key=len)
    assert kept == [0]
    assert len(moved) == 2
    assert moved[1] > 0, "the trial must not start from scratch"
    assert losses(tmp_path, "cut/cut-1") == pytest.approx(alone, rel=SAME_CURVE)
    assert len(losses(tmp_path, "cut/cut-2")) == UPDATES


def starts(run: Path) -> list[int]:
    """Return the update at which the run started, followed by those at which it resumed."""
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event["update"] for event in events if event["kind"] in ("start", "resume")]


def assert_trials_are_tasks_of_ray(folder: Path) -> None:
    """Ray sets RAY_JOB_ID in its workers, and the processes of a trial inherit it."""
    jobs = [path.name.split("-")[1] for path in folder.glob("ray-*")]
    assert len(jobs) == 2
    assert "none" not in jobs


def test_ranks_of_a_node_see_the_reserved_gpus(cluster: Any, alone: dict[int, float], tmp_path: Path) -> None:
    """The ranks train on the CPU, because the GPUs exist only for Ray."""
    node = cluster.add_node(num_cpus=2, num_gpus=2)
    try:
        run = start_run(cluster, tmp_path, "gpus", "launcher.gpus_per_node=2", "parallelism=ddp")
        out, _ = run.communicate()
    finally:
        cluster.remove_node(node)
    assert run.returncode == 0, out
    assert [path.read_text() for path in tmp_path.glob("rank-*")] == ["0,1", "0,1"]
    assert losses(tmp_path, "gpus") == pytest.approx(alone, rel=SAME_CURVE)


def test_an_address_without_a_cluster_is_reported(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # binds the port, but does not listen
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        words = command(tmp_path, "nowhere", "launcher=ray", f"launcher.address={address}", *TWO)
        done = subprocess.run(words, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 71, done.stderr
    assert "launcher.address" in done.stderr
    assert done.stderr.count("gcs_client.cc") == 2, "Ray prints a line for each attempt, and two are made"
