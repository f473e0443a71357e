"""A failing rank is reported in one message, no process remains, and the same command resumes.

By default, two of the faults are each injected into one rank of a run with two or three ranks and a random strategy.
The seed selects the faults, the strategy, the number of ranks, the rank and the update.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.faults.tallies import Tally
from tests.forkserver import CompletedCommand, ForkServer
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(0)

TASK = """
import os, signal, threading
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from runner import Task

class Small(Task):
    item = "sample"
    def __init__(self, fault, at, rank):
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))
        self.fault, self.at, self.rank = fault, at, rank
    def begin_update(self, progress):
        if "IMPORT_FIRST" in os.environ:
            from tests.engine.virtual_watchdog import pass_time
            pass_time(0.5)
        if not self.fault or not dist.is_initialized(): return  # memory is traced in a process without ranks
        if dist.get_rank() != self.rank or progress.update < self.at: return
        if self.fault == "slow": torch.linalg.svd(torch.ones(400, 400))
        if progress.update > self.at or os.path.exists("once"): return
        open("once", "w").close()
        if self.fault == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "raise": raise ValueError("no such thing")
        if self.fault == "exit": os._exit(0)
        if self.fault == "stop": os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault == "collective":
            open("hangs", "w").close()
            if self.at % 2: dist.all_reduce(torch.ones(3, device=self.model[0].weight.device))
            dist.barrier()
    def dataset(self, split):
        g = torch.Generator().manual_seed(0)
        return torch.utils.data.TensorDataset(torch.randn(90, 6, generator=g), torch.randint(3, (90,), generator=g))
    def loss(self, model, batch): return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

def build(*, fault: str = "", at: int = 5, rank: int = 1) -> Task: return Small(fault, at, rank)
"""
UPDATES = 12
EVALUATED = 6  # updates between evaluations
BASE = (
    f"train --task task.py run=RUN updates={UPDATES} global_batch_size=32 log_every=1 evaluate.every={EVALUATED}"
    " monitor=off checkpoint.every=3updates"
)
LIMITS = " watchdog.update_s=30 watchdog.data_s=30 watchdog.checkpoint_s=60"  # for faults that hang
HANGING = ("stop", "collective")
HANGS, STOPS = "hangs", "stops"  # virtual time passes once one of these files exists
IN_PARTS = "fsdp parallelism.checkpoint=parts"  # each rank writes its shards
VIRTUAL = {"IMPORT_FIRST": "tests.engine.virtual_watchdog"}  # time passes only after the fault
# fault -> exit codes, and text of the message about the rank
FAULTS = {
    "kill": ({84}, ("rank {rank} of {size} was ended by SIGKILL",)),
    "raise": ({70}, ("no such thing",)),
    "exit": ({84}, ("rank {rank} of {size} exited early with exit code 0",)),
    "stop": ({83}, ("rank {rank} of {size} is stopped (SIGSTOP) in update",)),
    "slow": ({0}, ()),
    # gloo detects different sizes and aborts the process or raises; with equal sizes, the ranks wait for each other
    "collective": ({83, 70, 84}, ("rank ",)),
}


@pytest.fixture(scope="module")
def curves(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, float]]:
    """Return a function of (strategy, number of ranks) that returns the rows of an uninterrupted run."""
    known: dict[tuple[str, int], dict[str, float]] = {}

    def of(strategy: str, size: int) -> dict[str, float]:
        if (strategy, size) not in known:
            folder = tmp_path_factory.mktemp("curve")
            (folder / "task.py").write_text(TASK)
            result = server.run(arguments("whole", strategy, size), folder)
            assert result.code == 0, result.err
            known[strategy, size] = rows(folder, "whole")
        return known[strategy, size]

    return of


def arguments(run: str, strategy: str, size: int) -> str:
    return f"{BASE} parallelism={strategy} parallelism.world_size={size} parallelism.restarts=0".replace("RUN", run)


def rows(folder: Path, run: str) -> dict[str, float]:
    result: dict[str, float] = {}
    for text in (folder / "outputs" / run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(text)
        result |= {f"{row['update']} {name}": row[name] for name in ("train/loss", "val/loss") if name in row}
    return result


def processes(word: str) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if word in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_rank_is_reported_and_the_run_resumes(
    fault: str,
    server: ForkServer,
    curves: Callable[[str, int], dict[str, float]],
    tmp_path: Path,
    seed: int,
    amount: Callable[[int, int], int],
    tally: Tally,
) -> None:
    chance = random.Random(f"{seed} {fault}")
    for number in range(amount(1, 100)):
        strategy = chance.choice(["ddp", "fsdp", IN_PARTS, "pipeline"])
        size = chance.choice([2, 3])
        # The watchdog allows minutes for the first update, so hangs start later.
        rank, at = chance.randrange(size), chance.randrange(2 if fault in HANGING else 0, UPDATES)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "task.py").write_text(TASK)
        args = f"{arguments(f'{fault}{number}', strategy, size)} task.fault={fault} task.rank={rank} task.at={at}"
        args += LIMITS if fault in HANGING else ""
        code = _inject_fault(fault, args, rank, size, at, folder, server, curves(strategy, size))
        tally.tried += 1
        tally.notes[f"ended_{code}"] = int(tally.notes.get(f"ended_{code}", 0)) + 1


def _inject_fault(
    fault: str, args: str, rank: int, size: int, at: int, folder: Path, server: ForkServer, whole: dict[str, float]
) -> int:
    """Inject one fault, check the outcome, and return the exit code.

    tests/engine/process/test_watchdog.py tests how soon a hang is reported.
    """
    run = next(word for word in args.split() if word.startswith("run=")).removeprefix("run=")
    pid = server.start(args.split(), folder, {"TMPDIR": str(folder), **(VIRTUAL if fault in HANGING else {})})
    if fault == "stop":
        wait_until(lambda: _has_stopped(pid), "a stopped rank")
        (folder / STOPS).touch()
    result = server.wait()
    messages = f"{args}\n{result.code}\n{result.err}"
    codes, output = FAULTS[fault]
    assert result.code in codes, messages
    _leaves_nothing(run, folder, messages)
    if fault != "slow":
        hangs = fault in HANGING and result.code == 83
        assert f"rank {rank} of {size}" in result.err or fault in ("raise", "collective"), messages
        for text in output:
            assert text.format(rank=rank, size=size) in result.err, messages
        assert "Traceback" not in result.err, messages
        assert len(result.err.splitlines()) < 40, messages
        error = json.loads((folder / "outputs" / run / "error.json").read_text())
        assert error["exit_code"] == result.code, messages
        if fault in ("kill", "exit", "stop"):
            assert error["reached"] == at, messages
            assert error["place"]["rank"] == rank, messages
        if hangs:
            _shows_the_stacks(folder / "outputs" / run / "stacks.txt", size, messages)
        _assert_success(server.run(args, folder), messages)
    actual = rows(folder, run)
    assert actual == whole, (
        messages,
        {key: (actual.get(key), whole[key]) for key in whole if actual.get(key) != whole[key]},
    )
    return result.code


def _has_stopped(pid: int) -> bool:
    return any(process.status() == psutil.STATUS_STOPPED for process in psutil.Process(pid).children(recursive=True))


def _assert_success(result: CompletedCommand, messages: str) -> None:
    assert result.code == 0, (messages, result.err)


def _leaves_nothing(run: str, folder: Path, messages: str) -> None:
    wait_until(lambda: not processes(f"run={run}"), f"no process is left of {messages}")
    allowed = {"task.py", "once", STOPS, HANGS, "outputs", ".out", ".err", "__pycache__"}
    assert {path.name for path in folder.iterdir()} <= allowed, messages


def _shows_the_stacks(path: Path, size: int, messages: str) -> None:
    text = path.read_text()
    for rank in range(size):
        assert f"==== rank {rank} of {size}" in text, messages


@pytest.mark.long  # three new interpreters that import torch
def test_a_hanging_rank_of_torchrun_reports_itself(
    tmp_path: Path, seed: int, amount: Callable[[int, int], int], tally: Tally
) -> None:
    """No process supervises all ranks: the hanging rank reports itself by number and exits with 83."""
    chance = random.Random(f"{seed} torchrun")
    for number in range(amount(1, 10)):
        rank, at = chance.randrange(2), chance.randrange(2, UPDATES)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "task.py").write_text(
            TASK.replace('if self.fault == "stop": os.kill', "threading.Event().wait(); os.kill")
        )
        args = f"{BASE}{LIMITS} parallelism=ddp task.fault=stop task.rank={rank} task.at={at}"
        args = args.replace("RUN", "r").split()
        start = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "runner"]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", *start, *args],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        messages = f"{args}\n{done.stderr}"
        assert f"accel-run: rank {rank} of 2: task.py:" in done.stderr, messages
        assert re.search(rf"rank +: {rank} .*\n +exitcode +: 83 ", done.stderr), messages
        name = f"stacks-rank{rank}.txt" if rank else "stacks.txt"
        assert "begin_update" in (folder / "outputs/r" / name).read_text(), messages
        tally.tried += 1
