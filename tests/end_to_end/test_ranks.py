"""Runs on several ranks have the losses of one process, and lose no work after crashes, signals and lost ranks."""

from __future__ import annotations

import json
import os
import re
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from runner.cli import main
from runner.durable.checkpoint import load
from runner.tensors.stored_tensor import StoredTensor
from tests.faults.tallies import IS_LONG
from tests.forkserver import CompletedCommand, ForkServer
from tests.rounding import PROMISED, allowed
from tests.waiting import ON_DISK_AT_ONCE, wait_until

TASK = '''
import os, signal, time
import torch, torch.nn.functional as F
from torch import nn
from runner import Task
from runner.engine.checkpoints import save_policy
from tests.waiting import until_asked_to_stop

class Seen(torch.utils.data.Dataset):
    """Samples that are written down when they are read."""
    def __init__(self, bad=False):
        g = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(90, 6, generator=g), torch.randint(3, (90,), generator=g)
        self.bad = {3, 40, 77} if bad else ()
    def __len__(self): return 90
    def __getitem__(self, index):
        if index in self.bad: raise ValueError("unreadable")
        return self.x[index], self.y[index], index

def rank():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

class Small(Task):
    item = "sample"
    def __init__(self, dropout, fault, at, rank, bad, odd):
        self.bad, self.odd = bad, odd
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))
        self.fault, self.at, self.rank, self.update = fault, at, rank, 0
        if odd:
            self.model.register_buffer("expanded", torch.ones(4).expand(512, 4))
            self.model.register_buffer("sliced", torch.arange(20.0).view(4, 5)[:, ::2])
            self.model.register_buffer("small", torch.arange(3, dtype=torch.int16))
            self.model.register_buffer("empty", torch.zeros(0))
    def begin_update(self, progress):
        self.update = progress.update
        if "CLOCK" in os.environ: save_policy.time.now += 1.0
    def dataset(self, split): return Seen(self.bad and split == "train")
    def loss(self, model, batch):
        x, y, index = batch
        if model.training and "SEEN" in os.environ:
            with open(os.environ["SEEN"], "a") as file:
                file.write(f"{self.update} {' '.join(map(str, index.tolist()))}\\n")
        if model.training and self.fault and self.update == self.at and rank() == self.rank:
            marker = os.environ.get("ONCE", "")
            if not marker or not os.path.exists(marker):
                if marker:
                    open(marker, "w").close()
                if self.fault == "kill": os.kill(os.getpid(), signal.SIGKILL)
                if self.fault == "raise": raise ValueError("no such thing")
                if self.fault == "exit": os._exit(0)
                if self.fault == "hang":
                    while True: signal.pause()
                if self.fault == "stop": until_asked_to_stop()
                if self.fault == "deaf":
                    until_asked_to_stop()
                    open("signaled", "w").close()
                    while True: signal.pause()
                if self.fault == "infinite": return F.cross_entropy(model(x), y, reduction="sum") * float("nan"), len(y)
        if model.training and self.fault == "nothing" and self.update == self.at: return model(x).sum() * 0.0, 0
        if model.training and self.fault == "slow": time.sleep(0.00025 * len(y) * (10 if rank() == self.rank else 1))
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

def build(*, dropout: float = 0.0, fault: str = "", at: int = 5, rank: int = 1, bad: bool = False,
          odd: bool = False) -> Task:
    return Small(dropout, fault, at, rank, bad, odd)
'''
BASE = (
    "train --task task.py run=r updates=12 global_batch_size=32 log_every=1 evaluate.every=6 monitor=off"
    " scheduler=constant"
)
TWO = "parallelism=ddp parallelism.world_size=2"
SAME_CURVE = allowed(torch.float32, terms=32, growth=12)  # each of the 12 updates sums 32 samples in a different order


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path


def rows(folder: Path, run: str = "r") -> list[dict[str, Any]]:
    lines = (folder / "outputs" / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(folder: Path, run: str = "r") -> dict[int, float]:
    return {row["update"]: row["train/loss"] for row in rows(folder, run) if "train/loss" in row}


def assert_success(result: CompletedCommand) -> CompletedCommand:
    assert result.code == 0, result.err
    assert not re.search(r"\w+Warning\b|deprecat|\[W\d", result.err), "of a library"
    return result


@pytest.fixture(scope="module")
def one_process(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run of one process."""
    samples_of_update = tmp_path_factory.mktemp("one")
    (samples_of_update / "task.py").write_text(TASK)
    assert_success(server.run(BASE, samples_of_update))
    return samples_of_update


@pytest.fixture(scope="module")
def expected(one_process: Path) -> dict[int, float]:
    """The losses of the run of one process."""
    return losses(one_process)


PIPED, SHARDED = TWO.replace("ddp", "pipeline"), TWO.replace("ddp", "fsdp")


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "args",
    [
        TWO, f"{TWO} parallelism.shares=[19,13] micro_batch_size=5", f"{TWO} parallelism.shares=speed",
        f"{TWO} dataloader.num_workers=1", SHARDED, f"{SHARDED} micro_batch_size=3", PIPED,
        f"{PIPED} parallelism.schedule=gpipe micro_batch_size=5", f"{PIPED} parallelism.split=[1,3]",
    ],
)  # fmt: skip
def test_two_ranks_match_one_process(
    args: str, server: ForkServer, folder: Path, one_process: Path, expected: dict[int, float]
) -> None:
    assert len(expected) == 12
    assert_success(server.run(f"{BASE} {args}", folder))
    assert losses(folder) == pytest.approx(expected, rel=SAME_CURVE)
    assert rows(folder)[-1]["val/loss"] == pytest.approx(rows(one_process)[-1]["val/loss"], rel=SAME_CURVE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "args", ["parallelism=fsdp parallelism.shard_size=2", "parallelism=pipeline parallelism.stages=2"]
)
def test_copies_of_a_split_model_match_one_process(
    args: str, server: ForkServer, folder: Path, expected: dict[int, float]
) -> None:
    assert_success(server.run(f"{BASE} {args} parallelism.world_size=4", folder))
    assert losses(folder) == pytest.approx(expected, rel=SAME_CURVE)


@pytest.mark.slow
def test_ddp_runs_resume_with_other_strategies(server: ForkServer, folder: Path, expected: dict[int, float]) -> None:
    again = BASE.replace("run=r", "run=again")
    assert_success(server.run(f"{again} {TWO}".replace("updates=12", "updates=4"), folder))
    assert_success(server.run(f"{again} resume_allow=[updates]".replace("updates=12", "updates=8"), folder))
    sharded = TWO.replace("ddp", "fsdp")
    piped = TWO.replace("ddp", "pipeline")
    assert_success(server.run(f"{again} {sharded} resume_allow=[updates]".replace("updates=12", "updates=9"), folder))
    assert_success(server.run(f"{again} {piped} resume_allow=[updates]".replace("updates=12", "updates=10"), folder))
    assert_success(server.run(f"{again} {TWO} parallelism.shares=[20,12] resume_allow=[updates]", folder))
    assert losses(folder, "again") == pytest.approx(expected, rel=SAME_CURVE)


@pytest.mark.slow
def test_sharded_checkpoints_resume_with_other_strategies(
    server: ForkServer, folder: Path, expected: dict[int, float]
) -> None:
    again, parts = f"{BASE.replace('run=r', 'run=again')} resume_allow=[updates]", "parallelism.checkpoint=parts"
    for updates, args in ((4, f"{SHARDED} {parts}"), (7, ""), (9, f"{SHARDED} {parts}"), (12, TWO)):
        assert_success(server.run(f"{again} {args}".replace("updates=12", f"updates={updates}"), folder))
        newest = max((folder / "outputs" / "again" / "checkpoints").glob("update-*"))
        assert (newest / "model-part00001.safetensors").exists() == (parts in args)
    assert losses(folder, "again") == pytest.approx(expected, rel=SAME_CURVE)


@pytest.mark.slow
def test_ranks_resume_from_a_mirror_in_an_empty_folder(server: ForkServer, folder: Path) -> None:
    args = f"{BASE} {SHARDED} parallelism.checkpoint=parts checkpoint.mirror=file://{folder}/mirror"
    assert_success(server.run(args.replace("updates=12", "updates=4"), folder))
    (folder / "outputs").rename(folder / "lost")
    assert_success(server.run(f"{args} resume_allow=[updates]", folder))
    (before, after) = (
        json.loads((folder / each / "r" / "run.json").read_text())["uid"] for each in ("lost", "outputs")
    )
    assert before == after, "the run was downloaded, not trained again"
    assert [*losses(folder)] == [*range(1, 13)], "rows of updates before the download must exist"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # dcp.load in one process
def test_sharded_checkpoints_are_exported_by_tensor(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = f"{GPT} {SHARDED} parallelism.checkpoint=parts".replace(f"updates={UPDATES}", "updates=2")
    assert_success(server.run(args, tmp_path))
    newest = max((tmp_path / "outputs" / "r" / "checkpoints").glob("update-*"))
    saved = load(newest).tensors("model")
    sizes: list[int] = []

    def read(tensor: StoredTensor, *rows: int) -> Tensor:
        result = original(tensor, *rows)
        sizes.append(result.nbytes)
        return result

    original = StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", read)
    monkeypatch.chdir(tmp_path)
    assert main(["export", "r", "format=safetensors"]) == 0
    assert max(sizes) == max(tensor.nbytes for tensor in saved.values())
    exported = load_file(next((tmp_path / "outputs" / "r" / "export").glob("*.safetensors")))
    assert all(torch.equal(tensor, saved[name]) for name, tensor in exported.items())
    assert exported.keys() == saved.keys(), "this model has no weights with two names"
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader("outputs/r/export"), no_dist=True)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.items())
    started = args.replace("run=r", "run=started").replace("updates=2", "updates=1")
    rate = 1e-30  # about the change of a weight by one step of Adam
    assert_success(server.run(f"{started.replace('0.0003', str(rate))} weights=r", tmp_path))
    newest = max((tmp_path / "outputs" / "started" / "checkpoints").glob("update-*"))
    for name, tensor in load(newest).tensors("model").items():
        assert torch.allclose(tensor, saved[name], rtol=0.0, atol=10 * rate), name


@pytest.mark.slow
def test_a_constructor_that_reads_weights_gets_real_tensors(server: ForkServer, folder: Path) -> None:
    text = (folder / "task.py").read_text()
    (folder / "task.py").write_text(
        text.replace("self.fault, self.at", "self.bias = torch.zeros(9000).numpy()\n        self.fault, self.at")
    )
    args = BASE.replace("updates=12", "updates=1")
    assert server.run(f"{args} {SHARDED} parallelism.init=meta", folder).code == 78
    for run, more in (("whole", f"{SHARDED} parallelism.init=auto"), ("alone", "")):
        assert_success(server.run(f"{args.replace('run=r', f'run={run}')} {more}", folder))
    assert losses(folder, "whole") == pytest.approx(losses(folder, "alone"), rel=SAME_CURVE)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "args",
    [
        "parallelism=ddp", "parallelism=ddp parallelism.shares=[19,13]", "parallelism=ddp parallelism.shares=speed",
        "parallelism=fsdp", "parallelism=pipeline", "parallelism=pipeline parallelism.schedule=gpipe",
    ],
)  # fmt: skip
def test_gpt_on_ranks_matches_one_process(
    args: str, server: ForkServer, gpt_curve: dict[int, float], tmp_path: Path
) -> None:
    assert_success(server.run(f"{GPT} {args}", tmp_path))
    assert losses(tmp_path) == pytest.approx(gpt_curve, rel=SAME_CURVE)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["rx", "svdd"])
def test_a_hyperspectral_pipeline_matches_one_process(head: str, server: ForkServer, tmp_path: Path) -> None:
    sizes = "task.num_cubes=16 task.height=12 task.width=12 task.channels=6"
    args = f"train task=hyperspectral task.head={head} task.data=synthetic {sizes} epochs=2 log_every=1 monitor=off"
    for run, more in (("one", ""), ("two", "parallelism=pipeline parallelism.world_size=2")):
        assert_success(server.run(f"{args} run={run} {more}", tmp_path))
    one, two = (losses(tmp_path, run) for run in ("one", "two"))
    assert len(one) == 4
    assert two == pytest.approx(one, rel=SAME_CURVE)
    fits = [[row for row in rows(tmp_path, run) if row["phase"] == "fit"][-1] for run in ("one", "two")]
    keys = [key for key in fits[0] if key.startswith("val/")]
    assert keys
    assert [fits[1][key] for key in keys] == pytest.approx([fits[0][key] for key in keys], rel=SAME_CURVE)


# The learning rate keeps training stable. In unstable training, rounding errors grow until curves differ, even between
# numbers of threads in one process. With short samples, curves agree as well (2e-7) as with samples of 64 tokens.
UPDATES = 50 if IS_LONG else 12
GPT = (
    f"train task=gpt task.size=tiny task.block_size=16 run=r updates={UPDATES} global_batch_size=32 optimizer.lr=0.0003"
    " log_every=1 evaluate.every=0 evaluate.samples=32 monitor=off"
)


@pytest.fixture(scope="module")
def gpt_curve(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("gpt")
    assert_success(server.run(GPT, folder))
    result = losses(folder)
    assert len(result) == UPDATES
    return result


def test_a_resumed_run_of_two_ranks_is_bitwise_equal(server: ForkServer, folder: Path) -> None:
    """The model uses dropout, so every rank must continue with its own random numbers."""
    args = f"{BASE} {TWO} task.dropout=0.3"
    assert_success(server.run(args, folder))
    expected = losses(folder)
    again = args.replace("run=r", "run=again") + " checkpoint.every=5updates"
    again += " task.fault=hang task.at=8"
    pid = server.start(again.split(), folder, {"ONCE": str(folder / "once")})
    wait_until((folder / "outputs/again/checkpoints/update-0000000005/MANIFEST.json").exists)
    wait_until((folder / "once").exists)
    os.kill(pid, signal.SIGKILL)
    server.wait()
    wait_until(lambda: not live_processes(folder))
    assert_success(server.run(again, folder, {"ONCE": str(folder / "once")}))
    assert losses(folder, "again") == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("args", ["", "parallelism.shares=[20,12]"])
def test_remaining_ranks_resume_after_a_kill(
    server: ForkServer, folder: Path, args: str, expected: dict[int, float]
) -> None:
    again = f"{BASE} {TWO} {args} task.fault=kill task.at=7 checkpoint.every=3updates".replace("run=r", "run=again")
    seen = folder / "seen"
    result = assert_success(server.run(again.split(), folder, {"ONCE": str(folder / "once"), "SEEN": str(seen)}))
    assert "SIGKILL" in result.err
    assert len(plan(folder, "again")["ranks"]) == 1
    assert losses(folder, "again") == pytest.approx(expected, rel=SAME_CURVE)
    assert sorted(samples_of_first_epoch(seen)) == list(range(90))


def samples_of_first_epoch(seen: Path) -> list[int]:
    """Return the samples of updates 0 to 2. If an update was repeated, the last repetition counts."""
    samples_of_update: dict[int, list[int]] = {}
    previous = -1
    for line in seen.read_text().splitlines():
        update, *samples = map(int, line.split())
        if update < previous - 1:  # the run resumed from an earlier update
            samples_of_update = {key: value for key, value in samples_of_update.items() if key < update}
        samples_of_update.setdefault(update, []).extend(samples)
        previous = update
    return [index for update in range(3) for index in samples_of_update[update]]


@pytest.mark.slow
def test_a_task_error_ends_the_run_with_its_message(server: ForkServer, folder: Path) -> None:
    result = server.run(f"{BASE} {TWO} task.fault=raise", folder)
    assert result.code == 70
    assert "Traceback" not in result.err
    error = json.loads((folder / "outputs/r/error.json").read_text())
    assert "ValueError" in error["cause"]
    assert json.loads((folder / "outputs/r/run.json").read_text())["state"] == "failed"


def test_a_non_finite_loss_ends_all_ranks(server: ForkServer, folder: Path) -> None:
    result = server.run(f"{BASE} {TWO} task.fault=infinite", folder)
    assert result.code == 82, result.err
    assert json.loads((folder / "outputs/r/error.json").read_text())["exit_code"] == 82


@pytest.mark.slow
def test_an_exited_rank_is_reported_as_lost(server: ForkServer, folder: Path) -> None:
    result = server.run(f"{BASE} {TWO} task.fault=exit", folder)
    assert result.code == 84, result.err
    assert not live_processes(folder)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_stopped_run_saves_and_resumes(
    server: ForkServer, folder: Path, number: int, expected: dict[int, float]
) -> None:
    again = f"{BASE} {TWO} task.fault=stop".replace("run=r", "run=again")
    pid = server.start(again.split(), folder, {"ONCE": str(folder / "once")})
    wait_until((folder / "once").exists)
    os.kill(pid, number)
    result = server.wait()
    assert result.code == 75, result.err
    assert not live_processes(folder)
    assert max(losses(folder, "again")) < 12
    assert_success(server.run(again.split(), folder, {"ONCE": str(folder / "once")}))
    assert losses(folder, "again") == pytest.approx(expected, rel=SAME_CURVE)


def test_ranks_started_by_torchrun_train_the_same_run(
    server: ForkServer, folder: Path, expected: dict[int, float]
) -> None:
    args = f"{BASE} parallelism=ddp".replace("run=r", "run=again").split()
    assert server.call(torchrun, args, folder) == {0: 0, 1: 0}
    assert losses(folder, "again") == pytest.approx(expected, rel=SAME_CURVE)
    assert (folder / "out").read_text().count("12 of 12 updates") == 1, "only one rank prints"


def torchrun(args: list[str], folder: Path) -> dict[int, int]:
    """Return the exit codes by rank. torchrun's agent starts the ranks, in this test by fork."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.chdir(folder)
    os.dup2(os.open("out", os.O_WRONLY | os.O_CREAT), 1)
    config = LaunchConfig(
        1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="test", max_restarts=0, start_method="fork"
    )
    return {rank: int(code) for rank, code in elastic_launch(config, main)(args).items()}


def test_one_process_can_use_a_model_trained_on_ranks(server: ForkServer, folder: Path) -> None:
    task = Path(__file__).with_name("task_with_everything.py")
    assert_success(server.run(f"both --task {task} run=r updates=2 inference.samples=1 monitor=off {TWO}", folder))
    assert (folder / "outputs/r/predictions/summary.json").is_file()


@pytest.mark.slow
def test_the_straggler_is_reported(server: ForkServer, folder: Path) -> None:
    """One rank takes ten times as long, whether the machine is idle or busy."""
    args = f"{BASE} {TWO} task.fault=slow".replace("updates=12", "updates=60").replace("size=32", "size=30")
    assert_success(server.run(args, folder))
    (result,) = events(folder, "slow rank")
    assert (result["rank"], result["part"]) == (1, "forward")
    assert any("rank1/forward_ms" in row for row in rows(folder))
    assert_success(server.run(f"{args} parallelism.shares=speed".replace("run=r", "run=again"), folder))
    first = events(folder, "shares", "again")[0]["shares"]
    assert sum(first) == 30
    assert first[1] < 15


@pytest.mark.slow
def test_bad_samples_of_any_rank_are_listed(server: ForkServer, folder: Path) -> None:
    args = f"{BASE} {TWO} task.bad=true dataloader.bad_samples=skip".replace("updates=12", "epochs=1")
    assert_success(server.run(args, folder))
    listed = [(event["update"], event["index"]) for event in events(folder, "bad sample")]
    assert sorted(index for _, index in listed) == [3, 40, 77]
    assert_success(server.run(args.replace(TWO, "").replace("run=r", "run=one"), folder))
    alone = [(event["update"], event["index"]) for event in events(folder, "bad sample", "one")]
    assert listed == alone, "the same updates as in one process"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_statistics_of_a_fit_phase_are_merged_over_ranks(strategy: str, server: ForkServer, tmp_path: Path) -> None:
    """The task, from test_phases_as_data.py, has a fit phase and phases that train different parameters."""
    task = Path(__file__).parent / "task_of_phases.py"
    result = []
    for run, args in (("one", ""), ("two", TWO.replace("ddp", strategy))):
        assert_success(server.run(f"train --task {task} run={run} monitor=off {args}", tmp_path))
        record = json.loads((tmp_path / "outputs" / run / "run.json").read_text())
        result.append({name: phase["metrics"] for name, phase in record["phases"].items()})
    one, two = result
    assert two.keys() == one.keys()  # values of later phases differ, because each rank draws its own dropout masks
    assert two["statistics"]["fit/mean"] == pytest.approx(one["statistics"]["fit/mean"], rel=PROMISED[torch.float64])
    assert two["statistics"]["val/loss"] == pytest.approx(one["statistics"]["val/loss"], rel=SAME_CURVE)


def test_a_second_signal_exits_immediately_with_130(server: ForkServer, folder: Path) -> None:
    pid = server.start(f"{BASE} {TWO} task.fault=deaf".split(), folder, {"ONCE": str(folder / "once")})
    wait_until((folder / "once").exists)
    os.kill(pid, signal.SIGINT)
    wait_until((folder / "signaled").exists, "the first signal")
    os.kill(pid, signal.SIGINT)
    result = server.wait()
    assert result.code == 130, result.err
    assert "Traceback" not in result.err
    assert not live_processes(folder)


@pytest.mark.slow
def test_a_fresh_run_resumes_after_losing_a_rank(server: ForkServer, folder: Path) -> None:
    assert_success(server.run(BASE, folder))
    expected = losses(folder)
    args = f"{BASE} {TWO} resume=fresh task.fault=kill task.at=9 checkpoint.every=3updates"
    result = assert_success(server.run(args.split(), folder, {"ONCE": str(folder / "once")}))
    aside = list((folder / "outputs/r/checkpoints").glob("earlier-*"))
    assert len(aside) == 1, "only checkpoints of the previous run are set aside"
    assert result.code == 0
    assert losses(folder) == pytest.approx(expected, rel=SAME_CURVE)


@pytest.mark.slow
def test_a_pipeline_with_an_explicit_split_loses_a_stage(
    server: ForkServer, folder: Path, expected: dict[int, float]
) -> None:
    three = "parallelism=pipeline parallelism.world_size=3 parallelism.split=[1,1,2]"
    args = f"{BASE} {three} task.fault=kill task.rank=2 task.at=7 checkpoint.every=3updates".replace(
        "run=r", "run=again"
    )
    result = assert_success(server.run(args.split(), folder, {"ONCE": str(folder / "once")}))
    assert result.code == 0
    assert len(plan(folder, "again")["ranks"]) == 2
    assert losses(folder, "again") == pytest.approx(expected, rel=SAME_CURVE)


@pytest.mark.slow
def test_a_lost_rank_ends_only_its_pipeline(server: ForkServer, folder: Path, expected: dict[int, float]) -> None:
    """With stages=auto, the plan takes the number of stages from the split."""
    four = "parallelism=pipeline parallelism.world_size=4 parallelism.split=[2,2]"
    args = f"{BASE} {four} task.fault=kill task.at=7 checkpoint.every=3updates"
    assert_success(server.run(args.replace("run=r", "run=again"), folder, {"ONCE": str(folder / "once")}))
    assert len(plan(folder, "again")["ranks"]) == 2, "only the ranks of the other pipeline remain"
    assert losses(folder, "again") == pytest.approx(expected, rel=SAME_CURVE)


# A virtual clock for checkpoint intervals. Each update advances it by a second.
CLOCK = """
from runner.engine.checkpoints import save_policy
class Clock:
    now = 1e9
    def monotonic(self): return self.now
save_policy.time = Clock()
"""


@pytest.mark.slow
def test_each_checkpoint_interval_saves_once(server: ForkServer, folder: Path) -> None:
    args = f"{BASE} {TWO} checkpoint.every=0.2min checkpoint.keep=100".replace("updates=12", "updates=40")
    args = args.replace("evaluate.every=6", "evaluate.every=0")
    assert_success(server.run(args.split(), folder, {"CLOCK": "1"}, CLOCK + ON_DISK_AT_ONCE))
    kept = sorted(int(path.name[-10:]) for path in (folder / "outputs/r/checkpoints").glob("update-*"))
    # a checkpoint is due after 12 updates, and ranks agree on it one update later
    assert [later - earlier for earlier, later in pairwise(kept[:-1])] == [13, 13], kept


@pytest.mark.slow
def test_a_rank_may_have_only_bad_samples(server: ForkServer, folder: Path) -> None:
    args = f"{BASE} {TWO} task.bad=true dataloader.bad_samples=skip parallelism.shares=[31,1]"
    assert_success(server.run(args.replace("updates=12", "epochs=30"), folder))
    assert len(events(folder, "bad sample")) == 90


@pytest.mark.slow
def test_an_update_without_items_is_not_saved(server: ForkServer, folder: Path) -> None:
    result = server.run(f"{BASE} {TWO} task.fault=nothing task.at=3 checkpoint.every=2updates log_every=100", folder)
    assert result.code == 70
    names = [path.name for path in (folder / "outputs/r/checkpoints").glob("update-*")]
    assert names == ["update-0000000002"]


@pytest.mark.slow
def test_initial_buffers_are_equal_on_all_ranks(server: ForkServer, folder: Path, expected: dict[int, float]) -> None:
    assert_success(server.run(f"{BASE} {TWO} task.odd=true".replace("run=r", "run=again"), folder))
    assert losses(folder, "again") == pytest.approx(expected, rel=SAME_CURVE)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [33, 1])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_a_fit_can_call_the_model(strategy: str, size: int, server: ForkServer, folder: Path) -> None:
    """In the last update, one rank has no data. The other ranks must not hang."""
    (folder / "fit.py").write_text(FIT)
    result = []
    for run, args in (("one", ""), ("two", TWO.replace("ddp", strategy))):
        line = f"train --task fit.py run={run} task.samples={size} global_batch_size=8 monitor=off {args}"
        assert_success(server.run(line, folder))
        result.append(json.loads((folder / "outputs" / run / "run.json").read_text())["phases"]["fit"]["metrics"])
    assert result[1]["fit/mean"] == pytest.approx(result[0]["fit/mean"], rel=allowed(torch.float32, size))


FIT = """
import torch
from torch import nn
from runner import Fit, Task
PHASES = {"fit": {"kind": "fit"}}
class Mean(Fit):
    def start(self): return {"sum": torch.zeros((), dtype=torch.float64), "count": torch.zeros((), dtype=torch.float64)}
    def add(self, model, state, batch):
        x = batch[0]
        return {"count": state["count"] + len(x), "sum": state["sum"] + model(x).double().sum()}, len(x)
    def merge(self, one, other): return {name: one[name] + other[name] for name in one}
    def finish(self, model, state): return {"mean": float(state["sum"] / state["count"])}
class Small(Task):
    def __init__(self, size):
        self.size = size
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))
    @property
    def fits(self): return {"fit": Mean()}
    def blocks(self): return list(self.model)[::2]
    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(self.size, 6, generator=torch.Generator().manual_seed(0)))
    def evaluate(self, model, batch): return {"mean": (model(batch[0]).double().sum(), len(batch[0]))}
def build(*, samples: int = 33) -> Task: return Small(samples)
"""


def test_no_process_remains_after_the_launcher_is_killed(server: ForkServer, folder: Path) -> None:
    args = f"{BASE} {TWO} dataloader.num_workers=1 task.fault=hang"
    pid = server.start(args.split(), folder, {"ONCE": str(folder / "once")})
    wait_until((folder / "once").exists)
    assert len(live_processes(folder)) >= 5, "the launcher, two ranks and their data workers"
    os.kill(pid, signal.SIGKILL)
    server.wait()
    wait_until(lambda: not live_processes(folder))


@pytest.mark.parametrize(
    ("args", "where"),
    [("parallelism.shares=[1,2,3]", "parallelism.shares"), ("global_batch_size=1", "global_batch_size")],
)
def test_impossible_configurations_are_reported_before_ranks_start(
    args: str, where: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(f"{BASE} {TWO} {args}".split()) == 78
    assert where in capsys.readouterr().err
    assert not (folder / "outputs").exists()


def plan(folder: Path, run: str) -> dict[str, Any]:
    return dict(json.loads((folder / "outputs" / run / "plan.json").read_text()))


def events(folder: Path, kind: str, run: str = "r") -> list[dict[str, Any]]:
    lines = (folder / "outputs" / run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def live_processes(folder: Path) -> list[int]:
    """Return the PIDs of live processes whose working directory is `folder`, as it is for all processes of a run."""
    result = []
    for process in psutil.process_iter(["cwd", "status"]):
        if process.info["cwd"] == str(folder) and process.info["status"] != psutil.STATUS_ZOMBIE:
            result.append(process.pid)
    return result
