"""Time accounting of a run: every second is assigned to one part, the one in which it was spent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from runner.base.stopwatch import PARTS
from runner.base.text import format_rate
from runner.durable.record_files import read_record
from runner.engine.run_report import state_note
from runner.records.evidence import Evidence
from tests.forkserver import ForkServer

TASK = """
import collections, os, signal
import torch, torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from runner import Task
from tests.engine.virtual_time import sleep

# Not an attribute of the task: accel-run would check an attribute that the loss changes, and read a batch for it.
CALLS = collections.Counter()

class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        sleep(ctx.seconds)
        return gradient, None

class Samples(torch.utils.data.Dataset):
    def __init__(self, seconds, ragged): self.seconds, self.ragged = seconds, ragged
    def __len__(self): return 64
    def __getitem__(self, index): return torch.full((4 + index % 3 if self.ragged else 4,), 0.1 * index), index % 3
    def __getitems__(self, indices):
        sleep(self.seconds)
        return [self[index] for index in indices]

class Slow(Task):
    def __init__(self, ms, ragged, rank, fails_at, counts):
        self.counts, self.calls = counts, 0
        # from the environment: a resumed run can fail without a change of settings
        self.fails_at = fails_at or int(os.environ.get("FAILS_AT", "0"))
        self.s, self.ragged, self.rank = {part: each / 1e3 for part, each in ms.items()}, ragged, rank
        self.model = nn.Linear(4, 3)
        if ms["saving"]:
            self.model.register_state_dict_pre_hook(lambda *_: self.sleep("saving"))
        if ms["optimizer"]:
            register_optimizer_step_pre_hook(lambda *_: self.sleep("optimizer"))
    def sleep(self, part):
        here = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        sleep(self.s[part] if self.rank in (-1, here) else 0.0)
    def dataset(self, split): return Samples(self.s["data"] if split == "train" else 0.0, self.ragged)
    def collate(self, samples):
        length = max(len(x) for x, _ in samples)
        return torch.stack([F.pad(x, (0, length - len(x))) for x, _ in samples]), torch.tensor([y for _, y in samples])
    def begin_update(self, progress):
        self.sleep("hooks")
        if progress.update == int(os.environ.get("STOP_AT", "-1")): signal.raise_signal(signal.SIGTERM)
    def loss(self, model, batch):
        if torch.is_grad_enabled():  # the check of the loss before the first update is start-up
            CALLS["training"] += 1
            if CALLS["training"] == self.fails_at: raise ValueError("as planned")
            if CALLS["training"] == 1: self.sleep("first")
        self.calls += self.counts
        self.sleep("forward")
        x, y = batch
        return F.cross_entropy(SlowBackward.apply(model(x[:, :4]), self.s["backward"]), y, reduction="sum"), len(y)
    def evaluate(self, model, batch):
        self.sleep("evaluation")
        x, y = batch
        return {"loss": (F.cross_entropy(model(x[:, :4]), y, reduction="sum"), len(y))}

def build(*, data: float = 0, forward: float = 0, backward: float = 0, optimizer: float = 0, hooks: float = 0,
          evaluation: float = 0, saving: float = 0, first: float = 0, ragged: bool = False, rank: int = -1,
          fails_at: int = 0, counts: bool = False) -> Task:
    return Slow(dict(data=data, forward=forward, backward=backward, optimizer=optimizer, hooks=hooks,
                     evaluation=evaluation, saving=saving, first=first), ragged, rank, fails_at, counts)
"""
VIRTUAL = {"IMPORT_FIRST": "tests.engine.virtual_time"}
BASE = "train --task task.py run=r updates=12 global_batch_size=8 log_every=4 evaluate.every=0 monitor=off"
LAG_S = 0.02  # delay of the simulated device in device_on_host; the end of the run waits for it
TICKS_S = 5e-3  # per run, because virtual_time adds a microsecond at each reading of the clock
NUM_EVALUATED = 64 // 8  # batches of an evaluation


RAGGED = "global_batch_size=1 task.ragged=true"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path


def evidence_of(server: ForkServer, folder: Path, args: str, env: Mapping[str, str] | None = None) -> Evidence:
    result = server.run(f"{BASE} {args}", folder, {**VIRTUAL, **(env or {})})
    assert result.code == 0, result.err
    actual = read_record(folder / "outputs/r").evidence
    assert actual is not None
    return actual


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "outputs/r/metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("env", [VIRTUAL, {"IMPORT_FIRST": "tests.engine.device_on_host"}], ids=["host", "device"])
def test_each_part_is_charged_the_time_spent_in_it(server: ForkServer, folder: Path, env: dict[str, str]) -> None:
    slept_ms = {"data": 6, "forward": 9, "backward": 12, "optimizer": 15, "hooks": 18, "evaluation": 20, "saving": 40}
    args = " ".join(f"task.{part}={ms}" for part, ms in slept_ms.items())
    result = evidence_of(server, folder, f"{args} evaluate.every=6 checkpoint=off", env)
    assert result.updates == 11, "the first update is start-up"
    assert result.num_evaluations == 2
    assert result.num_saves == 1
    times = {
        "evaluation": 2 * NUM_EVALUATED,
        "saving": 1,
        "hooks": 12,
    }  # begin_update of the first update counts as hooks, not as first_update
    for part, ms in slept_ms.items():
        expected = times.get(part, 11) * ms / 1e3
        assert result.parts_s[part] == pytest.approx(expected, abs=TICKS_S), (
            f"the time of {part} differs from the time slept in it"
        )
    assert result.parts_s["first_update"] == pytest.approx((6 + 9 + 12 + 15) / 1e3, abs=0.03)
    assert result.seconds is not None
    assert sum(result.parts_s.values()) == pytest.approx(result.seconds)
    assert {"wait", "transfer"}.isdisjoint(result.parts_s), "these parts did not occur"
    assert result.transfer is None
    (phase,) = result.phases
    assert phase.seconds is not None
    assert sum(phase.parts_s.values()) == pytest.approx(phase.seconds, abs=TICKS_S + LAG_S), (
        "all of the time is assigned to a part"
    )
    for row in rows_of(folder):
        parts = [row.get(f"perf/{part}_ms", 0.0) for part in PARTS]
        assert sum(parts) == pytest.approx(row["perf/step_time_ms"], abs=1e-3)
        assert row["perf/data_wait"] == pytest.approx(row["perf/data_ms"] / row["perf/step_time_ms"], abs=1e-3)
        assert row["perf/forward_ms"] == pytest.approx(9, abs=0.1)


def test_checks_after_the_first_phase_update_count_as_start_up(server: ForkServer, folder: Path) -> None:
    """`loss` changes an attribute, so extra forward passes check it after the first update, and only then."""
    (folder / "task.py").write_text(TASK + 'PHASES = {"one": {}, "two": {}}\n')
    result = evidence_of(server, folder, "task.forward=50 task.counts=true checkpoint=off log_every=1")
    assert result.parts_s.get("hooks", 0.0) < TICKS_S
    assert all(row.get("perf/hooks_ms", 0.0) < 1 for row in rows_of(folder))
    assert result.items_per_s == pytest.approx(8 / 0.05, rel=0.01)


def test_each_phase_has_its_own_throughput(server: ForkServer, folder: Path) -> None:
    """The phases of a task may have different losses, so a mean over phases would describe none of them."""
    (folder / "task.py").write_text(
        TASK
        + """
PHASES = {"short": {}, "long": {}}
def slow(self, model, batch):
    sleep(0.1)
    return Slow.loss(self, model, batch)
Slow.losses = property(lambda self: {"short": self.loss, "long": lambda *args: slow(self, *args)})
"""
    )
    result = server.run(f"{BASE} task.forward=50", folder, VIRTUAL)
    assert result.code == 0, result.err
    ends = {row["phase"]: row["perf/throughput"] for row in rows_of(folder)}
    assert ends == pytest.approx({"short": 8 / 0.05, "long": 8 / 0.15}, rel=0.01)
    evidence = read_record(folder / "outputs/r").evidence
    assert evidence is not None
    assert evidence.items_per_s == ends["long"]
    (line,) = (line for line in result.out.splitlines() if line.startswith("finished "))
    assert re.findall(r"([\d.,]+) \w+s/s", line) == [format_rate(ends["long"])]


def test_a_stopped_run_records_its_items_per_update(server: ForkServer, folder: Path) -> None:
    result = server.run(f"{BASE} task.forward=50 updates=100", folder, {**VIRTUAL, "STOP_AT": "6"})
    assert result.code == 75, result.err
    evidence = read_record(folder / "outputs/r").evidence
    assert evidence is not None
    assert evidence.phases[0].updates in range(6, 8), "it was stopped between two rows"
    assert evidence.items_per_update == 8


def test_the_end_summary_names_the_bottleneck(server: ForkServer, folder: Path) -> None:
    plant_load = "from runner.host.other_load import OtherLoad\nOtherLoad.describe = lambda self: 'planted'\n"
    result = server.run(f"{BASE} task.data=60", folder, VIRTUAL, plant_load)
    assert result.code == 0
    (line,) = (line for line in result.out.splitlines() if line.startswith("limited by"))
    assert line.split(maxsplit=2)[2].startswith("data: "), line
    assert line.endswith("planted")
    assert "\nmemory      host: peak " in result.out


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["dataloader=thread", "dataloader.num_workers=1"])
def test_loading_hidden_behind_computation_is_not_data_wait(server: ForkServer, folder: Path, loader: str) -> None:
    hidden = evidence_of(server, folder, f"{loader} task.data=10 task.forward=40", {"READ_MS": "10"})
    assert hidden.data_wait == pytest.approx(0.0, abs=1e-3)
    args = f"{loader} task.data=60 task.forward=20 resume=fresh"
    waited = evidence_of(server, folder, args, {"READ_MS": "60"})
    assert waited.data_wait == pytest.approx(40 / 60, abs=0.05), (
        "computation hides 20 of 60 ms, and more in the first update"
    )


def test_the_data_wait_is_shown_before_the_first_row(server: ForkServer, folder: Path) -> None:
    result = server.run(f"{BASE} task.data=20 log_every=50", folder, VIRTUAL)
    assert result.code == 0
    progress = [line for line in result.out.splitlines() if line.startswith("update=")]
    lines = [dict(word.split("=", 1) for word in line.split()) for line in progress]
    assert "data_wait" not in lines[0], "the first update is start-up"
    for line in (lines[1], lines[-1]):
        assert line["data_wait"].endswith("%")
        assert float(line["data_wait"].removesuffix("%")) > 50


@pytest.mark.slow
def test_the_waiting_time_of_a_rank_is_reported(server: ForkServer, folder: Path) -> None:
    ranks = "parallelism=ddp parallelism.world_size=2 device=cpu"
    result = evidence_of(server, folder, f"{ranks} task.forward=30 task.rank=1")
    assert len(result.ranks_s) == 2
    mine, other = result.ranks_s
    assert other["forward"] >= 10 * 0.03
    assert mine["wait"] == pytest.approx(other["forward"], abs=TICKS_S)
    assert result.parts_s["wait"] == pytest.approx(11 * 0.03, abs=TICKS_S)
    row = rows_of(folder)[-1]
    assert row["rank1/forward_ms"] == pytest.approx(30, abs=0.1)
    assert row["perf/wait_ms"] == pytest.approx(30, abs=0.1)
    assert "rank0/transfer_ms" not in row


@pytest.mark.slow
def test_rank_times_exclude_the_first_update(server: ForkServer, folder: Path) -> None:
    ranks = "parallelism=ddp parallelism.world_size=2 device=cpu"
    result = evidence_of(server, folder, f"{ranks} task.first=2000")
    assert len(result.ranks_s) == 2
    assert result.parts_s["first_update"] == pytest.approx(2.0, abs=TICKS_S)
    assert all(sum(seconds.values()) < TICKS_S for seconds in result.ranks_s)


def test_save_costs_are_counted_across_a_resume(server: ForkServer, folder: Path) -> None:
    """A checkpoint does not contain the cost of its own save."""
    one = evidence_of(server, folder, "task.saving=300")
    other = evidence_of(server, folder, "task.saving=300 updates=16 resume_allow=[updates,task.saving]")
    (phase,) = other.phases
    assert one.parts_s["saving"] == pytest.approx(0.3, abs=TICKS_S)
    assert phase.parts_s["saving"] == pytest.approx(one.parts_s["saving"] + other.parts_s["saving"])
    assert phase.seconds == pytest.approx(sum(phase.parts_s.values()), abs=TICKS_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rank", ["", "parallelism=ddp parallelism.world_size=2 device=cpu"], ids=["one rank", "two ranks"]
)
def test_a_failed_run_keeps_its_measurements(server: ForkServer, folder: Path, rank: str) -> None:
    result = server.run(f"{BASE} task.forward=20 task.fails_at=7 checkpoint=off {rank}", folder, VIRTUAL)
    assert result.code not in (0, 75)
    actual = read_record(folder / "outputs/r").evidence
    assert actual is not None
    assert actual.unfinished
    assert actual.updates == 5, "six updates were run, and the first is start-up"
    assert actual.parts_s["forward"] == pytest.approx(5 * 0.02, abs=TICKS_S)
    assert actual.seconds == pytest.approx(sum(actual.parts_s.values()))
    (phase,) = actual.phases
    assert phase.updates == 6


def test_a_run_that_fails_immediately_keeps_earlier_measurements(server: ForkServer, folder: Path) -> None:
    before = evidence_of(server, folder, "")
    result = server.run(f"{BASE} updates=24 resume_allow=[updates]", folder, {**VIRTUAL, "FAILS_AT": "1"})
    assert result.code not in (0, 75)
    assert "as planned" in result.err, "the planned error ended the run"
    assert read_record(folder / "outputs/r").evidence == before


def test_measurements_continue_across_a_stop(server: ForkServer, folder: Path) -> None:
    result = server.run(f"{BASE} task.forward=50 updates=100 log_every=1", folder, {**VIRTUAL, "STOP_AT": "5"})
    assert result.code == 75, result.err
    first = read_record(folder / "outputs/r").evidence
    assert first is not None
    assert first.updates == first.phases[0].updates - 1
    assert first.updates < 7
    before = first.phases[0]
    assert before.updates
    more = f"updates={before.updates + 4} resume_allow=[updates]"
    again = evidence_of(server, folder, f"task.forward=50 log_every=1 {more}")
    assert again.updates == 3, "the evidence is from the newest process"
    (phase,) = again.phases
    expected = 0.05 * (before.updates + 2)
    assert phase.parts_s["forward"] == pytest.approx(expected, abs=TICKS_S), (
        "the record of the phase includes all processes"
    )
    assert phase.parts_s["first_update"] >= 0.1


@pytest.mark.slow
def test_varying_shapes_are_counted(server: ForkServer, folder: Path) -> None:
    assert evidence_of(server, folder, f"{RAGGED} updates=40").num_batch_shapes == 3
    assert evidence_of(server, folder, "resume=fresh").num_batch_shapes == 1


def test_the_parts_of_a_fit_phase_are_timed(server: ForkServer, folder: Path) -> None:
    (folder / "task.py").write_text(
        TASK
        + """
PHASES = {"statistics": {"kind": "fit"}, "train": {}}
class Mean:
    def start(self): return {"sum": torch.zeros(4)}
    def add(self, model, state, batch):
        sleep(0.02)
        return {"sum": state["sum"] + batch[0].sum(0)}, len(batch[0])
    def merge(self, one, other): return {"sum": one["sum"] + other["sum"]}
    def finish(self, model, state): return {}
Slow.fits = property(lambda self: {"statistics": Mean()})
Slow.losses = property(lambda self: {})
"""
    )
    result = evidence_of(server, folder, "task.data=10")
    fit, train = result.phases
    assert fit.parts_s["forward"] == pytest.approx(0.02 * 7, abs=TICKS_S), "the time of `add` counts as forward"
    assert fit.parts_s["data"] == pytest.approx(0.01 * 7, abs=TICKS_S)
    assert "first_update" in fit.parts_s
    assert "backward" not in fit.parts_s
    assert train.parts_s["backward"] > 0
    assert result.parts_s["data"] == pytest.approx(fit.parts_s["data"] + train.parts_s["data"])


def test_optimizer_state_of_the_expected_rounded_size_is_not_reported() -> None:
    assert len(state_note(2000, 1000)) == 1
    assert state_note(100 << 20, (100 << 20) - 1) == []
    assert state_note(1, 2) == []


RANKS = """
import torch.distributed
from runner.engine.hooks import timekeeping
timekeeping.host_peak_gib = lambda: 1.5 + torch.distributed.get_rank()
"""


def test_the_peak_of_host_memory_is_the_highest_of_all_ranks(server: ForkServer, folder: Path) -> None:
    result = server.run(f"{BASE} parallelism=ddp parallelism.world_size=2", folder, VIRTUAL, RANKS)
    assert result.code == 0, result.err
    assert "highest of 2 ranks" in result.out
    evidence = read_record(folder / "outputs/r").evidence
    assert evidence is not None
    assert evidence.host_peak_gib == 2.5


PEAK = """
import os
from runner.engine.hooks import timekeeping
timekeeping.host_peak_gib = lambda: float(os.environ["PEAK_GIB"])
"""


def test_peak_memory_is_that_of_the_newest_process(server: ForkServer, folder: Path) -> None:
    """A resumed run may use another device or smaller micro-batches; the record of the phase has the highest peak."""
    more = "updates=16 resume_allow=[updates]"
    for peak, args in (("8", ""), ("3", more)):
        result = server.run(f"{BASE} {args}", folder, {**VIRTUAL, "PEAK_GIB": peak}, PEAK)
        assert result.code == 0, result.err
    evidence = read_record(folder / "outputs/r").evidence
    assert evidence is not None
    assert evidence.host_peak_gib == 3.0
    assert evidence.phases[0].peak_host_gib == 8.0
