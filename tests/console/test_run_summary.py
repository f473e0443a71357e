"""The reports at the start and at the end of a run, compared verbatim."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from runner.console.run_summary import (
    MAX_METRICS,
    EndOfRun,
    LearnedMetrics,
    MemoryLine,
    OptionLine,
    StartOfRun,
    TimeSpent,
    format_end,
    format_start,
)
from runner.workload.division import Batch

START = StartOfRun(
    run_name="gpt-20260102-030405",
    task="gpt",
    devices=("cuda:0 Tesla T4, 15.0 GiB, capability 7.5", "cuda:1 Tesla T4, 15.0 GiB, capability 7.5"),
    software={"torch": "2.13.0", "CUDA": "12.8", "cuDNN": "9.7"},
    options=(
        OptionLine("bf16 autocast", False, "a T4 computes bfloat16 by emulation"),
        OptionLine("fp16 autocast", True, "half the memory, tensor cores"),
    ),
    num_parameters=124_439_808,
    num_trainable=1_500,
    batch=Batch(64, 8, (32, 32)),
    run_dir="outputs/gpt-20260102-030405",
    training=("adamw, lr 0.0003, weight_decay 0.1; cosine, warmup 0.02; max_grad_norm 1",),
    notes=("resumed from update 200",),
)

END = EndOfRun(
    outcome="finished",
    update=1000,
    total_updates=1000,
    learned=LearnedMetrics(1.23456, {"val/loss": 1.5, "val/accuracy": 0.75}, {"val/loss": 4.17}),
    time=TimeSpent(
        754.0,
        {
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
        999,
    ),
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


def test_a_model_without_frozen_parameters_has_one_count() -> None:
    report = format_start(dataclasses.replace(START, num_parameters=834_304, num_trainable=834_304))
    assert report.count("834,304") == 1


def test_the_start_report_matches_its_snapshot(screen: Callable[..., None]) -> None:
    screen(format_start(START))


def test_shares_of_unequal_ranks_are_shown_as_a_sum() -> None:
    start = dataclasses.replace(START, batch=Batch(32, 19, (19, 13)))
    assert "32 = 19 + 13" in format_start(start)


def test_the_end_summary_matches_its_snapshot(screen: Callable[..., None]) -> None:
    screen(format_end(END))


def test_unknown_values_are_omitted(screen: Callable[..., None]) -> None:
    screen(format_end(EndOfRun("failed", update=3, total_updates=10, time=TimeSpent(2.0))))


def test_a_metric_is_shown_next_to_its_baselines(screen: Callable[..., None]) -> None:
    metrics = {"val/bits": 4.665, "val/bits_per_byte": 4.0}
    baselines = {"val/bits_per_byte": 3.541, "val/bits_per_byte_unigram": 4.611, "val/other": 2.0}
    screen("\n".join(LearnedMetrics(None, metrics, baselines, "bigram model").lines()))


def test_metrics_that_decide_and_those_with_baselines_are_shown_first_if_there_are_many() -> None:
    metrics = {f"val/m{number}": 0.5 for number in range(50)}
    baselines = {"val/m48_unigram": 2.0}
    *lines, note = LearnedMetrics(None, metrics, baselines, first=("val/m49", "val/unknown")).lines()
    assert [line.split()[0] for line in lines] == ["val/m49", "val/m48", *(f"val/m{i}" for i in range(MAX_METRICS - 2))]
    assert re.findall(r"\d+", note) == [str(50 - MAX_METRICS)]
    few = dict(list(metrics.items())[:MAX_METRICS])
    assert [line.split()[0] for line in LearnedMetrics(None, few, first=("val/m9",)).lines()] == [*few]


def test_the_update_count_of_a_run_includes_all_phases() -> None:
    end = dataclasses.replace(END, phases=("fit", "train"), time=TimeSpent(2.0, num_updates=1012), items_per_s=None)
    assert re.findall(r"\d+", format_end(end).splitlines()[0]) == ["1000", "1000", "1012", "2", "2", "0"]


def test_a_long_run_is_shown_in_hours() -> None:
    assert "in 2 h 3 min" in format_end(dataclasses.replace(END, time=TimeSpent(7_390.0)))


def test_a_resumed_process_reports_its_own_updates_and_time() -> None:
    def figures(num_updates: int) -> list[str]:
        time = TimeSpent(125.0, num_updates=num_updates)
        return re.findall(r"\d+", format_end(dataclasses.replace(END, time=time, items_per_s=None)).splitlines()[0])

    assert figures(200) == ["1000", "1000", "200", "2", "5"]
    assert figures(1000) == ["1000", "1000", "2", "5"]


def test_a_process_without_updates_reports_no_bottleneck() -> None:
    for num_updates, num_lines in ((0, 0), (1, 1)):
        time = dataclasses.replace(END.time, num_updates=num_updates)
        assert format_end(dataclasses.replace(END, time=time)).count("limited by") == num_lines


def test_the_bottleneck_mentions_other_processes() -> None:
    time = TimeSpent(10.0, {"forward": 9.0}, other_load="planted")
    (line,) = [line for line in format_end(dataclasses.replace(END, time=time)).splitlines() if "limited by" in line]
    assert line.endswith("planted")
