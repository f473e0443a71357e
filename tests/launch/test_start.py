"""Ranks that torchrun or SLURM starts must agree on software and task before they begin."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.base.errors import ConfigError, Exit, SystemLimit
from runner.base.rank_env import RankInfo
from runner.cli import main
from runner.config.configuration import Choice
from runner.distributed import join
from runner.durable.record_files import read_record
from runner.launch.on_ranks import check_agreement, count_sharing, run_as_rank
from tests.launch.forked import CompletedFork, rank_function, run_forks

SAME = {"accel-run": "0.1.0", "torch": "2.13.0", "task": "gpt"}


def test_ranks_with_equal_software_and_task_pass_the_check() -> None:
    check_agreement([SAME, dict(SAME), dict(SAME)])


def test_different_software_is_reported_with_its_rank() -> None:
    with pytest.raises(ConfigError) as caught:
        check_agreement([SAME, {**SAME, "torch": "2.11.0"}, {**SAME, "task": "cape"}])
    assert caught.value.exit_code == Exit.CONFIG
    assert [problem.where for problem in caught.value.problems] == ["torch", "task"]
    for problem, named in zip(caught.value.problems, (("2.13.0", "2.11.0"), ("gpt", "cape")), strict=True):
        assert all(value in problem.what for value in named)
    assert "rank 1" in caught.value.problems[0].what
    assert "rank 2" in caught.value.problems[1].what


TASK = """
import torch, torch.nn.functional as F
from torch import nn
from runner import Task
class Small(Task):
    def __init__(self): self.model = nn.Sequential(nn.Linear(2, 4), nn.ACTIVATION(), nn.Linear(4, 2))
    def dataset(self, split): return torch.utils.data.TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.long))
    def loss(self, model, batch): return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])
def build() -> Task: return Small()
"""


TRAIN = ["train", "parallelism=ddp", "updates=2", "run=r", "device=cpu", "monitor=off"]


def ranks(
    folder: Path, *args: Sequence[str], line: Sequence[str] = TRAIN, num_local_ranks: int = 1
) -> list[CompletedFork]:
    """Run two ranks, each with its own arguments, as torchrun would. Each machine has its own folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    started = [
        rank_function([*line, *args[rank]], folder / f"n{rank // num_local_ranks}", rank, 2, address, num_local_ranks)
        for rank in (0, 1)
    ]
    return run_forks(started, folder)


def task(folder: Path, number: int, activation: str = "Tanh") -> list[str]:
    """Write the task file of a machine; return the arguments that select it."""
    (folder / f"n{number}").mkdir(exist_ok=True)
    (folder / f"n{number}" / "task.py").write_text(TASK.replace("ACTIVATION", activation))
    return ["--task", "task.py"]


def test_machines_with_different_task_files_exit_with_78(tmp_path: Path) -> None:
    result = ranks(tmp_path, task(tmp_path, 0), task(tmp_path, 1, "ReLU"))
    assert [rank.value for rank in result] == [Exit.CONFIG, Exit.CONFIG]
    assert "task's file" in result[0].err
    assert result[1].err == "", "an error of all ranks must be reported once"


def test_an_error_on_every_rank_is_reported_once(tmp_path: Path) -> None:
    args = [*task(tmp_path, 0), "optimizer.lrr=1"]
    result = ranks(tmp_path, args, args, num_local_ranks=2)
    assert [rank.value for rank in result] == [Exit.CONFIG, Exit.CONFIG]
    assert ["optimizer.lrr=1" in rank.err for rank in result] == [True, False]


def test_an_invalid_environment_variable_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The variable is invalid on every rank."""
    variables = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999",
        "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert main(["train"]) == Exit.CONFIG
        assert ("MASTER_PORT" in capsys.readouterr().err) == (rank == "0")


def test_ranks_with_different_affinity_do_not_share_cores() -> None:
    machines, cores = [0, 0, 0, 1], [{0, 1}, {0, 1}, {2, 3}, {0, 1}]
    assert [count_sharing(machines, cores, rank) for rank in range(4)] == [2, 2, 1, 1]


def test_a_wrong_number_of_ranks_is_reported_once(tmp_path: Path) -> None:
    args = [*task(tmp_path, 0), "parallelism.world_size=3"]
    result = ranks(tmp_path, args, args, num_local_ranks=2)
    assert [rank.value for rank in result] == [Exit.CONFIG, Exit.CONFIG]
    assert ["parallelism.world_size=3" in rank.err for rank in result] == [True, False]


def test_an_error_in_tracing_on_rank_0_ends_all_ranks(tmp_path: Path) -> None:
    """Otherwise, the other ranks would wait until the rendezvous times out."""
    args = [*task(tmp_path, 0, "NoSuchLayer"), "memory=budget"]
    result = ranks(tmp_path, args, args, num_local_ranks=2)
    assert [rank.value for rank in result] == [Exit.SOFTWARE, Exit.SOFTWARE]
    assert ["NoSuchLayer" in rank.err for rank in result] == [True, False]


def test_ranks_wait_while_rank_0_traces_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace reads the data of the task, which may take minutes."""
    monkeypatch.setattr(join, "RENDEZVOUS_S", 0.0)
    args = [*task(tmp_path, 0), "memory=budget"]
    result = ranks(tmp_path, args, args, num_local_ranks=2)
    assert [rank.value for rank in result] == [Exit.DONE, Exit.DONE], result[1].err


@pytest.mark.parametrize(
    ("device", "watchdog", "least_s"),
    [
        ("cuda:0", Choice("default", "default", {"first_update_s": 5000.0, "update_s": 700.0}), 5700.0),
        ("cuda:0", Choice("off", "off", {}), 60.0),
        ("cpu", Choice("default", "default", {"first_update_s": 5000.0}), 60.0),
    ],
)
def test_gpu_collectives_time_out_after_the_watchdog(
    device: str, watchdog: Choice, least_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, NCCL would abort the waiting rank with a message that does not name the hanging rank."""
    timeouts = []

    def refuse(*_: Any, timeout: timedelta, **__: Any) -> None:
        timeouts.append(timeout.total_seconds())
        raise RuntimeError("refused")

    monkeypatch.setattr("torch.distributed.init_process_group", refuse)
    monkeypatch.setattr(join, "choose_interface", lambda rank_info: None)
    monkeypatch.setattr(join, "get_accelerator", lambda device: SimpleNamespace(activate=lambda: None))
    choices = {"parallelism": Choice("ddp", "ddp", {"timeout_s": 60.0}), "watchdog": watchdog}
    plan: Any = SimpleNamespace(choices=choices, ranks=[SimpleNamespace(device=device)] * 2)
    with pytest.raises(SystemLimit):
        run_as_rank(plan, RankInfo(0, 0, 2, 2, f"file://{tmp_path}/store"), lambda world: None)
    assert timeouts[0] >= least_s
    assert (timeouts[0] == 60.0) == (least_s == 60.0)


def test_an_error_on_another_machine_is_reported_there(tmp_path: Path) -> None:
    """Local rank 0 of each machine reports errors before the rendezvous, because rank 0 cannot know them."""
    args = ["train", *task(tmp_path, 1), "parallelism=ddp", "optimizer.lrr=1"]
    (second,) = run_forks([rank_function(args, tmp_path / "n1", 1, 2, "127.0.0.1:29999")], tmp_path)
    assert second.value == Exit.CONFIG
    assert "optimizer.lrr=1" in second.err


RAISES = """
    def begin_update(self, progress):
        if progress.update == 1 and torch.distributed.get_rank() == 1: raise ValueError("planted")
def build"""


def test_the_error_of_a_rank_is_recorded_not_its_consequence(tmp_path: Path) -> None:
    """Another launcher may kill rank 0 before it reports the lost rank, so the failing rank writes the record."""
    args = task(tmp_path, 0)
    file = tmp_path / "n0/task.py"
    file.write_text(file.read_text().replace("def build", RAISES.lstrip("\n")))
    result = ranks(tmp_path, args, args, num_local_ranks=2)
    assert [rank.value for rank in result] == [Exit.RANK_LOST, Exit.SOFTWARE], result[0].err + result[1].err
    error = json.loads((tmp_path / "n0/outputs/r/error.json").read_text())
    assert (error["exit_code"], error["place"]["rank"]) == (Exit.SOFTWARE, 1)
    assert "planted" in error["cause"]
    process = read_record(tmp_path / "n0/outputs/r").process
    assert (process.state, process.exit_code) == ("failed", Exit.SOFTWARE)


WHOLE = "*, count: int = 5, first: int = 0, step: int = 1"
SHARDED = "*, count: int = 5, shard: int = 0, num_shards: int = 1"
PREDICT = """
    def predict(self, model, generator, PARAMETERS):
        for i in range(FIRST, count, STEP):
            yield Prediction({f"{i}.npy": model(torch.full((1, 2), float(i))).numpy()}, f"text {i}")
"""


def train_predictor(folder: Path, parameters: str) -> None:
    """Train run `r` of a task whose `predict` has the given parameters."""
    args = task(folder, 0)
    first, step = ("shard", "num_shards") if "shard" in parameters else ("first", "step")
    predict = PREDICT.replace("PARAMETERS", parameters).replace("FIRST", first).replace("STEP", step)
    file = folder / "n0" / "task.py"
    file.write_text(
        file.read_text().replace("import Task", "import Prediction, Task").replace("\ndef build", f"{predict}def build")
    )
    trained = ranks(folder, args, args, num_local_ranks=2)
    assert [rank.value for rank in trained] == [Exit.DONE, Exit.DONE], trained[0].err


def predictions(folder: Path) -> list[str]:
    return sorted(path.stem for path in (folder / "n0/outputs/r/predictions").glob("*.npy"))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("parameters", "world_size"), [(SHARDED, 2), (WHOLE, 1)])
def test_external_ranks_compute_each_prediction_once(parameters: str, world_size: int, tmp_path: Path) -> None:
    """Another launcher has started these ranks."""
    train_predictor(tmp_path, parameters)
    result = ranks(tmp_path, [], [], line=["inference", "r"], num_local_ranks=2)
    assert [rank.value for rank in result] == [Exit.DONE, Exit.DONE], result[0].err + result[1].err
    assert predictions(tmp_path) == ["0", "1", "2", "3", "4"]
    summary = json.loads((tmp_path / "n0/outputs/r/predictions/summary.json").read_text())
    assert (summary["predictions"], summary["model"]["calls"], summary["world_size"]) == (5, 5, world_size)
    assert (result[0].out.count("written to"), result[1].out.count("written to")) == (1, 0)


@pytest.mark.slow
def test_external_ranks_compute_their_requested_shards(tmp_path: Path) -> None:
    train_predictor(tmp_path, SHARDED)
    args = [[f"inference.shard={shard}", "inference.num_shards=3"] for shard in (0, 2)]
    result = ranks(tmp_path, *args, line=["inference", "r"], num_local_ranks=2)
    assert [rank.value for rank in result] == [Exit.DONE, Exit.DONE], result[0].err + result[1].err
    assert predictions(tmp_path) == ["0", "2", "3"]


@pytest.mark.slow
def test_rank_0_predicts_alone_after_training(tmp_path: Path) -> None:
    train_predictor(tmp_path, SHARDED)
    args = ["--task", "task.py"]
    result = ranks(tmp_path, args, args, line=["both", *TRAIN[1:]], num_local_ranks=2)
    assert [rank.value for rank in result] == [Exit.DONE, Exit.DONE], result[0].err + result[1].err
    assert predictions(tmp_path) == ["0", "1", "2", "3", "4"]
