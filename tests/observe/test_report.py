"""The reports at the start and at the end of a run, word for word."""

from __future__ import annotations

import dataclasses
import io

import pytest

from runner.observe.report import (
    EndOfRun,
    StartOfRun,
    Technique,
    end_summary,
    limited_by,
    prints_only_ascii,
    start_report,
)

START = StartOfRun(
    run_name="gpt-20260102-030405",
    task="gpt",
    devices=("cuda:0 Tesla T4, 15.0 GiB, capability 7.5", "cuda:1 Tesla T4, 15.0 GiB, capability 7.5"),
    software={"torch": "2.13.0", "CUDA": "12.8", "cuDNN": "9.7"},
    techniques=(
        Technique("bf16 autocast", False, "a T4 computes bfloat16 by emulation"),
        Technique("fp16 autocast", True, "half the memory, tensor cores"),
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
    seconds={"data_wait": 301.6, "transfer": 7.54, "compute": 414.7, "hooks": 15.08, "checkpoint_wait": 7.54},
    items_per_s=43456.7,
    item="token",
    peak_memory_gib={"cuda:0": 8.214, "cuda:1": None},
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
        "done         1000 of 1000 updates in 12 min 34 s, 43,456.7 tokens/s\n"
        "loss         1.235\n"
        "validation   val/loss 1.5 (baseline 4.17)\n"
        "             val/accuracy 0.75\n"
        "time         compute 55%, data wait 40%, hooks 2%, transfer 1%, checkpoint wait 1%, other 1%\n"
        "limited by   the data loader: 40% of the time (301.6 of 754.0 s) was spent waiting for the next batch\n"
        "peak memory  cuda:0 8.21 GiB\n"
        "checkpoint   outputs/a/checkpoints/update-0000001000\n"
        "metrics      outputs/a/metrics.jsonl\n"
        "note         wandb offline; upload with: wandb sync outputs/a/wandb/offline-run-1-b\n"
        "next         accel-run inference run=a\n"
        "             accel-run report outputs/a"
    )


def test_what_is_unknown_is_left_out() -> None:
    assert end_summary(EndOfRun("stopped by an error", update=3, total_updates=10, total_s=2.0)) == (
        "stopped by an error  3 of 10 updates in 2.0 s\nlimited by           unknown: the time was not measured"
    )


def test_a_long_run_is_told_in_hours() -> None:
    assert "in 2 h 3 min" in end_summary(dataclasses.replace(END, total_s=7_390.0))


@pytest.mark.parametrize(
    ("seconds", "total", "says"),
    [
        ({"compute": 9.5, "data_wait": 0.5}, 10.0, "compute: 95% of the time (9.5 of 10.0 s) went into forward"),
        ({"compute": 9.0, "data_wait": 1.0}, 10.0, "the data loader: 10% of the time (1.0 of 10.0 s)"),
        ({"compute": 5.0, "data_wait": 1.0, "hooks": 3.0}, 10.0, "work between updates: 30%"),
        ({"compute": 5.0, "transfer": 3.0}, 10.0, "copies to the device: 30%"),
        ({"compute": 5.0, "checkpoint_wait": 3.0}, 10.0, "checkpoints: 30%"),
        ({"compute": 8.0, "collectives": 2.0}, 10.0, "collectives: 20% of the time (2.0 of 10.0 s) was spent there"),
        ({"compute": 10.0}, 10.0, "compute: 100%"),
        ({"data_wait": 0.1}, 10.0, "unknown: the time of compute was not measured"),
        ({"data_wait": 6.0}, 10.0, "the data loader: 60%"),
        ({}, 10.0, "unknown"),
        ({"compute": 1.0}, 0.0, "unknown"),
    ],
)
def test_the_limit_is_named_with_its_evidence(seconds: dict[str, float], total: float, says: str) -> None:
    assert limited_by(seconds, total).startswith(says)


@pytest.mark.parametrize(
    ("encoding", "only_ascii"), [("utf-8", False), ("ascii", True), ("latin-1", True), ("cp1252", True)]
)
def test_the_encoding_of_the_stream_decides_about_ticks(encoding: str, only_ascii: bool) -> None:
    assert prints_only_ascii(io.TextIOWrapper(io.BytesIO(), encoding=encoding)) is only_ascii
