"""The reports at the start and at the end of a run, word for word."""

from __future__ import annotations

import dataclasses
import io

import pytest

from runner.observe.run_summary import (
    EndOfRun,
    MemoryLine,
    StartOfRun,
    TechniqueLine,
    end_summary,
    prints_only_ascii,
    start_report,
)

START = StartOfRun(
    run_name="gpt-20260102-030405",
    task="gpt",
    devices=("cuda:0 Tesla T4, 15.0 GiB, capability 7.5", "cuda:1 Tesla T4, 15.0 GiB, capability 7.5"),
    software={"torch": "2.13.0", "CUDA": "12.8", "cuDNN": "9.7"},
    techniques=(
        TechniqueLine("bf16 autocast", False, "a T4 computes bfloat16 by emulation"),
        TechniqueLine("fp16 autocast", True, "half the memory, tensor cores"),
    ),
    num_parameters=124_439_808,
    num_trainable=1_500,
    global_batch_size=64,
    micro_batch_size=8,
    accumulation_steps=4,
    world_size=2,
    run_dir="outputs/gpt-20260102-030405",
    notes=("resumed from update 200",),
)

END = EndOfRun(
    outcome="done",
    update=1000,
    total_updates=1000,
    total_s=754.0,
    loss=1.23456,
    metrics={"val/loss": 1.5, "val/accuracy": 0.75},
    baselines={"val/loss": 4.17},
    parts_s={
        "starting": 4.0,
        "data": 301.6,
        "transfer": 7.54,
        "forward": 140.0,
        "backward": 263.9,
        "optimizer": 10.8,
        "hooks": 0.5,
        "logging": 0.58,
        "evaluation": 14.0,
        "saving": 7.54,
    },
    updates_timed=999,
    items_per_s=43456.7,
    item="token",
    memory={
        "host": MemoryLine(1.25, total=31.5),
        "cuda:0": MemoryLine(8.214, 5.0, 9.126, 14.75),
        "cuda:1": MemoryLine(),
    },
    places={"checkpoint": "outputs/a/checkpoints/update-0000001000", "metrics": "outputs/a/metrics.jsonl"},
    notes=("wandb offline; upload with: wandb sync outputs/a/wandb/offline-run-1-b",),
    next_commands=("accel-run inference run=a", "accel-run report outputs/a"),
)


def test_the_start_report_in_full() -> None:
    assert start_report(START) == (
        "run         gpt-20260102-030405 (gpt)\n"
        "device      cuda:0 Tesla T4, 15.0 GiB, capability 7.5\n"
        "            cuda:1 Tesla T4, 15.0 GiB, capability 7.5\n"
        "software    torch 2.13.0, CUDA 12.8, cuDNN 9.7\n"
        "technique   ✓ fp16 autocast — half the memory, tensor cores\n"
        "            – bf16 autocast: a T4 computes bfloat16 by emulation\n"  # noqa: RUF001
        "parameters  124.4 M (124,439,808) total, 1.5 k (1,500) trainable\n"
        "batch       64 = 8 x 4 x 2 (micro-batch x accumulation x ranks)\n"
        "directory   outputs/gpt-20260102-030405\n"
        "note        resumed from update 200"
    )


def test_the_start_report_in_ascii_says_the_same() -> None:
    text = start_report(dataclasses.replace(START, notes=("51 °C",)), ascii_only=True)
    assert text.isascii()
    assert "+ fp16 autocast - half the memory" in text
    assert "- bf16 autocast: a T4" in text
    assert "51 ?C" in text


def test_unequal_ranks_are_shown_as_a_sum() -> None:
    start = dataclasses.replace(START, global_batch_size=32, batch_per_rank=(19, 13))
    assert "batch       32 = 19 + 13 (samples per rank)\n" in start_report(start)


def test_the_end_summary_in_full() -> None:
    assert end_summary(END) == (
        "done        1000 of 1000 updates in 12 min 34 s, 43,457 tokens/s\n"
        "loss        1.235\n"
        "validation  val/loss 1.5 (baseline 4.17)\n"
        "            val/accuracy 0.75\n"
        "time        data        40.0%     301.60 s     301.902 ms an update\n"
        "            backward    35.0%     263.90 s     264.164 ms an update\n"
        "            forward     18.6%     140.00 s     140.140 ms an update\n"
        "            evaluation   1.9%      14.00 s\n"
        "            optimizer    1.4%      10.80 s      10.811 ms an update\n"
        "            transfer     1.0%       7.54 s       7.548 ms an update\n"
        "            saving       1.0%       7.54 s\n"
        "            starting     0.5%       4.00 s\n"
        "            other        0.6%       4.62 s\n"
        "limited by  compute: 55% of the time (414.7 of 754.0 s) was spent computing (forward 19%, backward 35%,"
        " optimizer 1%); besides, data 40%\n"
        "memory      host: peak 1.25 GiB of 31.5 GiB\n"
        "            cuda:0: peak 8.21 GiB, allocated 5 GiB, reserved 9.13 GiB of 14.8 GiB\n"
        "checkpoint  outputs/a/checkpoints/update-0000001000\n"
        "metrics     outputs/a/metrics.jsonl\n"
        "note        wandb offline; upload with: wandb sync outputs/a/wandb/offline-run-1-b\n"
        "next        accel-run inference run=a\n"
        "            accel-run report outputs/a"
    )


def test_what_is_unknown_is_left_out() -> None:
    assert end_summary(EndOfRun("stopped by an error", update=3, total_updates=10, total_s=2.0)) == (
        "stopped by an error  3 of 10 updates in 2.0 s\nlimited by           unknown: the time was not measured"
    )


def test_a_long_run_is_told_in_hours() -> None:
    assert "in 2 h 3 min" in end_summary(dataclasses.replace(END, total_s=7_390.0))


@pytest.mark.parametrize(
    ("encoding", "only_ascii"), [("utf-8", False), ("ascii", True), ("latin-1", True), ("cp1252", True)]
)
def test_the_encoding_of_the_stream_decides_about_ticks(encoding: str, only_ascii: bool) -> None:
    assert prints_only_ascii(io.TextIOWrapper(io.BytesIO(), encoding=encoding)) is only_ascii
