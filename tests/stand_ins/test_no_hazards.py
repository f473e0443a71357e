"""Runs on GPUs have no races, no contexts on other devices and no early reads.

By default, a sample of the runs is tested; `--all` tests all of them. To check the detector, a test removes a wait from
accel-run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stand_ins.cuda.build import why_not
from tests.stand_ins.cuda.environment import ROOT
from tests.stand_ins.forked import StandIn, read

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built")

SMALL = f"--task {ROOT / 'tests/gpu/task_for_gpus.py'} global_batch_size=16 evaluate.samples=16"
GPT = "task=gpt evaluate.samples=16"
CAPE = "task=cape task.size=tiny global_batch_size=8 evaluate.samples=16"
DYNAMO = "task=dynamo phases=[pretrain] global_batch_size=16 evaluate.samples=16"  # only the first of four phases
NMT = "task=nmt task.size=tiny evaluate.samples=16"
MOCO, CLIP = (f"--task {ROOT / 'tests/projects'}/{name}.py micro_batch_size=2" for name in ("moco", "clip"))

# (machine, settings). On machines with two GPUs, two ranks have a context on their own device each.
RUNS = [
    ("t4", f"{GPT} +hardware=t4 prefetch=stream"),
    ("a100", f"{GPT} prefetch=stream dataloader.num_workers=2 memory=checkpoint"),
    ("a100x2", f"{GPT} parallelism=ddp prefetch=stream"),
    ("a100x2", f"{GPT} parallelism=fsdp precision=bf16"),
    ("pair", f"{GPT} parallelism=pipeline"),
    ("a100", f"{GPT} precision=fp16 micro_batch_size=2 prefetch=stream"),
    ("a100", f"{GPT} precision=bf16 dataloader=thread prefetch=stream"),
    ("a100", f"{GPT} precision=tf32 averaging=ema evaluate.every=1"),
    ("h100", f"{GPT} precision=bf16 memory=selective"),
    ("a100", f"{GPT} optimizer=sgd precision=fp32 prefetch=none"),
    ("a100", f"{GPT} backend=deterministic attention=math"),
    ("pair", f"{GPT} parallelism=ddp parallelism.shares=memory"),
    ("a100", f"{CAPE} prefetch=stream"),
    ("t4", f"{CAPE} precision=fp16 dataloader.num_workers=1"),
    ("a100x2", f"{CAPE} parallelism=ddp dataloader=thread"),
    ("a100", f"{DYNAMO} prefetch=stream"),
    ("a100", f"{NMT} prefetch=stream evaluate.every=2"),
    ("a100x2", f"{NMT} parallelism=fsdp precision=bf16"),
    ("a100", f"{SMALL} micro_batch_size=8 task.short_in=forward prefetch=stream"),
    ("a100", f"{SMALL} micro_batch_size=8 task.short_in=backward precision=fp16"),
    ("a100", f"{SMALL} micro_batch_size=8 task.short_in=optimizer checkpoint.every=1"),
    ("a100x2", f"{SMALL} micro_batch_size=8 task.short_in=backward task.rank=1 parallelism=ddp"),
    ("a100", f"{SMALL} task.dropout=0.5 task.batch_norm=true averaging=swa prefetch=stream"),
    ("a100x2", f"{SMALL} task.batch_norm=true parallelism=ddp parallelism.batch_norm=sync"),
    ("a100x2", f"{SMALL} parallelism=ddp parallelism.shares=[10,6] precision=fp16"),
    ("a100x2", f"{SMALL} parallelism=fsdp memory=checkpoint micro_batch_size=4 averaging=ema"),
    ("a100x2", f"{SMALL} parallelism=pipeline precision=fp16 max_grad_norm=1"),
    ("a100", f"{SMALL} checkpoint.every=1 prefetch=stream averaging=ema evaluate.every=1"),
    ("a100", f"{SMALL} scheduler=plateau evaluate.every=1 optimizer=adam max_grad_norm=1 log_every=1"),
    ("h100", f"{SMALL} micro_batch_size=2 precision=bf16 dataloader.num_workers=2 prefetch=stream"),
    ("a100", f"{MOCO} prefetch=stream"),
    ("a100x2", f"{CLIP} precision=fp16 parallelism=ddp parallelism.shares=[5,3]"),
]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(len(RUNS)))
def test_runs_have_no_race_and_one_context_per_process(number: int, stand_in: StandIn, tmp_path: Path) -> None:
    machine, args = RUNS[number]
    contexts = [[0], [1]] if "parallelism=" in args else [[0]]
    (tmp_path / "counted").mkdir()
    every = "" if "checkpoint.every" in args else "checkpoint.every=2"
    result = stand_in.command(
        machine, f"train {args} {every} run=r updates=4 device=cuda", tmp_path, tmp_path / "counted"
    )
    assert result.code == 0, result.out + result.err
    counted = read(tmp_path / "counted")
    assert [each["misuses"] for each in counted] == [{}] * len(contexts), args
    assert sorted(each["contexts"] for each in counted) == contexts
    assert list((tmp_path / "outputs/r/checkpoints").iterdir())


# kind that the stand-in must report: code that removes a wait from accel-run
REMOVED = {
    "read-after-write": "from runner.axes.prefetch import DeviceStreams as S; S.join = lambda self: None",
    "missing-record-stream": "from runner.axes.prefetch import DeviceStreams as S; S.hold = lambda self, tensor: None",
    "early-host-access": (  # removes the wait for copies of a checkpoint to the host
        "import torch; copy = torch.Tensor.copy_; "
        "torch.Tensor.copy_ = lambda self, other, non_blocking=False: copy(self, other, non_blocking=True)"
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", REMOVED)
def test_a_missing_synchronization_in_a_run_is_detected(kind: str, stand_in: StandIn, tmp_path: Path) -> None:
    (tmp_path / "counted").mkdir()
    args = f"{SMALL} run=r updates=4 device=cuda micro_batch_size=2 prefetch=stream task.width=256 monitor=off"
    stand_in.command("a100", f"train {args}", tmp_path, tmp_path / "counted", before=f"\n{REMOVED[kind]}\n")
    (counted,) = read(tmp_path / "counted")
    assert kind in {text.partition(":")[0] for text in counted["misuses"]}


def test_at_least_thirty_different_runs_are_tested() -> None:
    assert len(set(RUNS)) == len(RUNS) >= 30
