"""A complete run that receives a stop signal saves, exits with 75, leaves no process, and resumes with equal results.

The signal is sent as a terminal or a scheduler sends it: to the process group, or to every process of the run, data
workers included. By default, a seed selects one signal for a single process and one for ranks.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from runner.durable.checkpoint import load, newest_valid
from runner.durable.record_files import read_record
from tests.faults.tallies import IS_LONG, Tally
from tests.forkserver import CompletedCommand, ForkServer
from tests.rounding import allowed, distance
from tests.waiting import wait_until

TASK = Path(__file__).parents[1] / "end_to_end" / "task_with_everything.py"
NUM_UPDATES = 60
BASE = [
    "train", "--task", str(TASK), "device=cpu", "monitor=off", f"updates={NUM_UPDATES}", "evaluate.every=20",
    "log_every=1", "backend.threads=1", "task.sleep_s=0.02",
]  # fmt: skip
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
LOW_GRACE = "checkpoint.grace_s=0.0001"
Send = Callable[[int, signal.Signals], None]


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send the signal like a terminal and `timeout`."""
    os.killpg(pid, number)


def signal_every_process(pid: int, number: signal.Signals) -> None:
    """Send the signal like `scancel --full` and service managers."""
    for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def ranks(count: int) -> list[str]:
    return ["parallelism=ddp", f"parallelism.world_size={count}"] if count > 1 else []


@pytest.fixture(scope="module")
def straight(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, torch.Tensor]]:
    """Return a function of (number of ranks, overrides) that returns the final tensors of an uninterrupted run."""
    known: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}

    def of(count: int, *args: str) -> dict[str, torch.Tensor]:
        key = (*ranks(count), *args)
        if key not in known:
            folder = tmp_path_factory.mktemp("straight")
            done = server.run([*BASE, *key, "run=straight"], folder)
            assert done.code == 0, done.err
            known[key] = final_tensors(folder / "outputs" / "straight")
        return known[key]

    return of


def final_tensors(run: Path) -> dict[str, torch.Tensor]:
    path = newest_valid(run / "checkpoints")
    assert path is not None
    assert path.name.endswith(str(NUM_UPDATES))
    loaded = load(path)
    return {f"{stem}/{name}": tensor for stem in loaded.stems for name, tensor in loaded.tensors(stem).items()}


def last_update(run: Path) -> int:
    """Return the update of the last row of metrics.jsonl, or 0 if there is none."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return 0
    return max((int(json.loads(line)["update"]) for line in lines if line.endswith("}")), default=0)


def processes_of(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def stop_run(
    server: ForkServer, folder: Path, args: list[str], send: Callable[[int], None], at_update: int
) -> tuple[CompletedCommand, int]:
    """Start a run, send it a signal after an update, and wait until all its processes have ended."""
    run = folder / "outputs" / "mine"
    pid = server.start([*BASE, *args, "run=mine"], folder)
    wait_until(lambda: last_update(run) >= at_update, f"update {at_update} of {run}")
    processes = processes_of(pid)
    reached = last_update(run)
    send(pid)
    result = server.wait()
    wait_until(lambda: not [each for each in processes if is_alive(each)], "no process outlives the run")
    return result, reached


def assert_resumes(
    server: ForkServer, folder: Path, args: list[str], expected: dict[str, torch.Tensor]
) -> CompletedCommand:
    """Assert that the same command ends bitwise equal to a run that was never stopped."""
    done = server.run([*BASE, *args, "run=mine"], folder)
    assert done.code == 0, done.err
    result = final_tensors(folder / "outputs" / "mine")
    assert result.keys() == expected.keys()
    # Every save averages batch norm statistics over the ranks, which rounds once more.
    rounded = {name for name in result if "parallelism=ddp" in args and "running_" in name}
    different = [name for name in result.keys() - rounded if not torch.equal(result[name], expected[name])]
    tolerance = allowed(torch.float32, NUM_UPDATES)  # at most one save per update
    different += [name for name in rounded if not distance(expected[name], result[name]) <= tolerance]
    assert not different, different
    rows = [json.loads(line) for line in (folder / "outputs" / "mine" / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows if "train/loss" in row] == list(range(1, NUM_UPDATES + 1))
    return done


def assert_no_error(result: CompletedCommand) -> None:
    text = result.out + result.err
    assert "Traceback" not in text, text
    assert "Error" not in result.err, text


# target, signals, ranks, start method of data workers
PLANS: tuple[tuple[str, Send, tuple[signal.Signals, ...], int, str], ...] = (
    ("group", signal_group, (signal.SIGINT,), 1, "fork"),
    ("group", signal_group, (signal.SIGUSR1,), 1, "fork"),
    ("all", signal_every_process, (signal.SIGTERM,), 1, "fork"),
    ("all", signal_every_process, (signal.SIGTERM,), 2, "fork"),
    ("group", signal_group, (signal.SIGUSR1, signal.SIGTERM), 1, "spawn"),
    ("group", signal_group, (signal.SIGTERM,), 1, "fork"),
    ("all", signal_every_process, (signal.SIGINT,), 1, "fork"),
    ("all", signal_every_process, (signal.SIGUSR1,), 1, "fork"),
    ("all", signal_every_process, (signal.SIGINT,), 1, "spawn"),
    ("all", signal_every_process, (signal.SIGUSR1,), 1, "spawn"),
    ("all", signal_every_process, (signal.SIGTERM,), 1, "spawn"),
    ("group", signal_group, (signal.SIGINT,), 1, "spawn"),
    ("group", signal_group, (signal.SIGINT,), 2, "fork"),
    ("group", signal_group, (signal.SIGTERM,), 2, "fork"),
    ("group", signal_group, (signal.SIGUSR1,), 2, "fork"),
    ("all", signal_every_process, (signal.SIGINT,), 2, "fork"),
    ("all", signal_every_process, (signal.SIGUSR1,), 2, "fork"),
    ("all", signal_every_process, (signal.SIGUSR1, signal.SIGTERM), 2, "fork"),
    ("all", signal_every_process, (signal.SIGTERM,), 2, "spawn"),
)


@pytest.mark.slow
def test_a_run_saves_and_exits_with_75_after_stop_signals(
    server: ForkServer, tmp_path: Path, seed: int, amount: Any, tally: Tally, straight: Any
) -> None:
    generator = random.Random(seed)
    plans = PLANS
    if not IS_LONG:  # one with a single process, and one with ranks
        forked = [plan for plan in PLANS if plan[4] == "fork"]
        plans = tuple(generator.choice([plan for plan in forked if plan[3] == size]) for size in (1, 2))
    count = amount(2, 10 * len(PLANS))  # spawned workers take seconds and are tested in tests/axes/test_dataloader.py
    for number in range(count):
        where, send, signals, num_ranks, method = plans[number % len(plans)]
        at_update = generator.randint(1, 25)
        names = "+".join(one.name for one in signals)
        plan = f"{names} to the {where}, {num_ranks} ranks, {method}, update {at_update}, seed {seed}"
        folder = tmp_path / str(number)
        folder.mkdir()
        workers = ["dataloader.num_workers=1" if num_ranks > 1 else "dataloader.num_workers=2"]
        args = [*ranks(num_ranks), *workers, f"dataloader.start_method={method}"]

        def send_all(pid: int, send: Send = send, signals: tuple[signal.Signals, ...] = signals) -> None:
            for one in signals:
                send(pid, one)

        try:
            result, reached = stop_run(server, folder, args, send_all, at_update)
            assert result.code == 75, (result, "must be 75")
            assert_no_error(result)
            path = newest_valid(folder / "outputs" / "mine" / "checkpoints")
            assert path is not None
            saved = int(path.name.removeprefix("update-"))
            assert saved >= reached, (saved, reached)
            assert saved == last_update(folder / "outputs" / "mine"), "the last finished update is saved"
            assert json.loads((folder / "outputs" / "mine" / "run.json").read_text())["state"] == "preempted"
            assert_resumes(server, folder, ranks(num_ranks), straight(num_ranks))
        except AssertionError as error:
            raise AssertionError(f"{plan}: {error}") from error
        tally.tried += 1
        tally.notes["runs"] = tally.tried * 2


@pytest.mark.slow
def test_the_suite_would_detect_workers_that_exit_on_a_stop_signal(
    server: ForkServer, tmp_path: Path, straight: Any
) -> None:
    """If stop signals ended data workers, a run would end like this one, which loses a worker."""

    args = ["dataloader.num_workers=2", "dataloader.start_method=fork"]
    result, _ = stop_run(server, tmp_path, args, lambda pid: psutil.Process(pid).children()[0].kill(), 3)
    assert result.code == 85, result
    assert_resumes(server, tmp_path, [], straight(1))


# Saves without enough time


def run_and_send_sigterm(server: ForkServer, folder: Path, *args: str, at_update: int = 8) -> CompletedCommand:
    run = folder / "outputs" / "mine"
    pid = server.start([*BASE, "run=mine", *args], folder)
    wait_until(lambda: last_update(run) >= at_update, f"update {at_update} of {run}")
    os.kill(pid, signal.SIGTERM)
    return server.wait()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_save_that_cannot_finish_in_time_is_not_started(
    num_ranks: int, server: ForkServer, tmp_path: Path, straight: Any
) -> None:
    args = [*ranks(num_ranks), "checkpoint.every=5"]
    result = run_and_send_sigterm(server, tmp_path, *args, LOW_GRACE, at_update=12)
    assert result.code == 75, result
    assert_no_error(result)
    path = newest_valid(tmp_path / "outputs" / "mine" / "checkpoints")
    assert path is not None
    saved, reached = int(path.name.removeprefix("update-")), last_update(tmp_path / "outputs" / "mine")
    assert saved % 5 == 0
    text = " ".join((result.out + result.err).split())
    if saved == reached:  # everything was saved when the signal came
        assert "not saved" not in text
    else:
        assert "not saved" in text
        assert "checkpoint.grace_s=0.0001" in text
        assert f"{path.name}, and {reached - saved} updates" in text
    assert_resumes(server, tmp_path, args, straight(num_ranks, "checkpoint.every=5"))


@pytest.mark.slow
def test_a_save_of_unknown_duration_is_started(server: ForkServer, tmp_path: Path) -> None:
    result = run_and_send_sigterm(server, tmp_path, LOW_GRACE, "checkpoint=off")
    assert result.code == 75, result
    assert newest_valid(tmp_path / "outputs" / "mine" / "checkpoints") is not None


@pytest.mark.slow
def test_a_save_that_fits_the_time_is_written(server: ForkServer, tmp_path: Path, straight: Any) -> None:
    result = run_and_send_sigterm(server, tmp_path, "checkpoint.every=5", "checkpoint.grace_s=30", at_update=12)
    assert result.code == 75, result
    path = newest_valid(tmp_path / "outputs" / "mine" / "checkpoints")
    assert path is not None
    assert int(path.name.removeprefix("update-")) == last_update(tmp_path / "outputs" / "mine")
    assert_resumes(server, tmp_path, ["checkpoint.every=5"], straight(1, "checkpoint.every=5"))


def test_a_due_save_that_cannot_finish_in_time_is_not_started(server: ForkServer, tmp_path: Path) -> None:
    result = run_and_send_sigterm(server, tmp_path, "checkpoint.every=1", LOW_GRACE)
    assert result.code == 75, result
    path = newest_valid(tmp_path / "outputs" / "mine" / "checkpoints")
    assert path is not None
    missing = last_update(tmp_path / "outputs" / "mine") - int(path.name.removeprefix("update-"))
    assert missing in (0, 1), "0 if its save was in progress at the signal"
    assert ("not saved" in " ".join((result.out + result.err).split())) == (missing == 1)


@pytest.mark.slow
def test_a_stopped_run_without_a_checkpoint_exits_with_130(server: ForkServer, tmp_path: Path) -> None:
    first = run_and_send_sigterm(
        server, tmp_path, "checkpoint.every=5", at_update=12
    )  # measures the duration of a save
    assert first.code == 75
    (tmp_path / "outputs" / "mine").rename(tmp_path / "outputs" / "other")
    result = run_and_send_sigterm(server, tmp_path, "resume=other", "checkpoint=off", LOW_GRACE, at_update=20)
    assert result.code == 130, result
    assert_no_error(result)
    record = json.loads((tmp_path / "outputs" / "mine" / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("interrupted", 130)
    assert not list((tmp_path / "outputs" / "mine" / "checkpoints").glob("*"))


# ---------------------------------------------------------------- before the first update

STATES = {75: "preempted", 130: "interrupted"}
BLOCKED = """
import os
import torch
from torch import nn
from runner import Task

SETTINGS = {"updates": 2, "global_batch_size": 4}

def block(place):
    if os.environ.get("BLOCKS") == place:
        open("blocked", "w").close()
        os.read(os.pipe()[0], 1)

def build() -> Task:
    block("build")
    return Blocked()

def slow(read, requests):
    '''Wait before the first batch.'''
    block("loader")
    for request in requests:
        yield read(request)

DATALOADERS = {"slow": slow}

class Rows(torch.utils.data.Dataset):
    def __init__(self): block("dataset")
    def __len__(self): return 16
    def __getitem__(self, index):
        block("sample")
        return torch.ones(2) * index

class Blocked(Task):
    def __init__(self): self.model = nn.Linear(2, 1)
    def dataset(self, split): return Rows()
    def loss(self, model, batch):
        if model.training: block("loss")
        return model(batch).square().sum(), len(batch)
"""
PLACES = {
    "sample": "", "a worker": "dataloader.num_workers=1", "loader": "dataloader=slow", "build": "", "dataset": "",
    "loss": "", "a rank": "parallelism=ddp parallelism.world_size=2",
}  # fmt: skip


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("place", PLACES)
def test_a_stop_before_the_first_update_does_not_wait_for_that_update(
    place: str, server: ForkServer, tmp_path: Path, tally: Tally
) -> None:
    (tmp_path / "blocked.py").write_text(BLOCKED)
    args = f"train --task ./blocked.py run=mine device=cpu monitor=off {PLACES[place]}".split()
    blocks = {"BLOCKS": {"a worker": "sample", "a rank": "loss"}.get(place, place)}
    limit = "from runner.engine.process import watchdog\nfrom runner.launch import local\n"
    limit += "watchdog.STOP_TIMEOUT_S = local.STOP_TIMEOUT_S = 0.5"  # ranks that are not blocked stop earlier
    saved = tmp_path / "outputs" / "mine" / "checkpoints"
    for num_updates, code in ((0, 130), (2, 75)):
        if num_updates:
            assert server.run(args, tmp_path).code == 0
        (tmp_path / "blocked").unlink(missing_ok=True)
        allowed = ["updates=4", "resume_allow=[updates]"] if num_updates else []
        pid = server.start([*args, *allowed], tmp_path, blocks, limit)
        wait_until((tmp_path / "blocked").exists)
        os.kill(pid, signal.SIGTERM)
        result = server.wait()
        assert result.code == code, result
        assert len(list(saved.glob("update-*"))) == bool(num_updates)
        recorded = read_record(saved.parent).process
        assert (recorded.state, recorded.exit_code) in ((STATES[code], code), (None, None)), (
            "(None, None) if the run had not started yet"
        )
    assert server.run([*args, "updates=4", "resume_allow=[updates]"], tmp_path).code == 0
    tally.tried += 1


# ---------------------------------------------------------------- evaluation and inference

WAITING = """
import os
import torch
from torch import nn
from runner import Prediction, Task

SETTINGS = {"updates": 1, "global_batch_size": 4}

def build() -> Task:
    return Waiting()

def wait(rank):
    if os.environ.get("WAITS"):
        open(f"waits-{rank}", "w").close()
        os.read(os.pipe()[0], 1)

class Waiting(Task):
    def __init__(self): self.model = nn.Linear(2, 1)
    def dataset(self, split): return torch.utils.data.TensorDataset(torch.ones(8, 2))
    def loss(self, model, batch): return model(batch[0]).square().sum(), len(batch[0])
    def evaluate(self, model, batch):
        wait(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
        return {"loss": self.loss(model, batch)}
    def predict(self, model, generator, *, shard: int = 0, num_shards: int = 1):
        wait(shard)
        yield Prediction({f"{shard}.txt": "done"})
"""


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    ("command", "number"),
    [("inference", signal.SIGTERM), ("evaluate", signal.SIGTERM), ("evaluate", signal.SIGUSR1)],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_signal_immediately_ends_a_command_that_saves_no_state(
    num_ranks: int, command: str, number: signal.Signals, server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    trained = server.run(["train", "--task", "./waiting.py", "run=mine", "device=cpu", "monitor=off"], tmp_path)
    assert trained.code == 0, trained.err
    folder = tmp_path / "outputs" / "mine" / {"inference": "predictions", "evaluate": "evaluations"}[command]
    args = [command, "mine", *ranks(num_ranks)]
    assert server.run(args, tmp_path).code == 0
    (summary,) = folder.glob("*.json")
    if command == "evaluate":
        summary.unlink()
    pid = server.start(args, tmp_path, {"WAITS": "yes"})
    wait_until(lambda: len(list(tmp_path.glob("waits-*"))) == num_ranks, "all ranks wait")
    processes = processes_of(pid)
    os.kill(pid, number)
    result = server.wait()
    assert result.code == 130, result
    assert_no_error(result)
    wait_until(lambda: not [each for each in processes if is_alive(each)], "no process outlives the command")
    assert not summary.exists(), "incomplete results must have no summary"
    assert server.run(args, tmp_path).code == 0
    assert summary.exists()
