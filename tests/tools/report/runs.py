"""Run folders for tests of the report, created without training."""

# ruff: noqa: E501 - tables

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner.monitor.samples import COLUMNS

PARTS = ("data", "forward", "backward", "optimizer", "wait")


def rows(count: int, phase: str = "train", ranks: int = 0) -> Iterator[dict[str, Any]]:
    """Yield `count` rows of metrics.jsonl, ten updates apart, and an evaluation after every tenth row."""
    for number in range(1, count + 1):
        at = 10 * number
        row: dict[str, Any] = {
            "update": at,
            "phase": phase,
            "lr": 0.01 / number,
            "train/loss": 2 + math.cos(number) / number,
        }
        row |= {"train/grad_norm": 1.5 / number, "perf/items_per_s": 900.0 + number % 7, "perf/step_time_ms": 11.0}
        row |= {f"perf/{part}_ms": 1.0 + number % 3 for part in PARTS} | {
            "process/memory_gib": 0.5,
            "memory/peak_gib": 3.0,
        }
        row |= {f"rank{rank}/{part}_ms": 1.0 + rank for rank in range(ranks) for part in PARTS}
        yield row
        if number % 10 == 0:
            yield {"update": at, "phase": phase, "val/loss": 2.1, "val/accuracy": 1 - 1 / number}


def record(name: str, **more: Any) -> dict[str, Any]:
    """Return the run.json of a finished run."""
    return {
        "name": name, "state": "done", "exit_code": 0, "task": "gpt", "task_file": None, "config_dir": None,
        "overrides": ["task=gpt", f"run={name}"], "command": f"accel-run train task=gpt run={name}", "host": "there",
        "started": "2026-01-31T10:00:00.000+00:00", "metrics": {"val/loss": 2.1, "val/accuracy": 0.9},
        "baselines": {"val/accuracy": 0.25},
        "phases": {"train": {"kind": "train", "updates": 300, "total": 300, "finished": True, "seconds": 9.0}},
        "evidence": {
            "task": "gpt", "device": "cuda:0", "device_name": "Card", "seconds": 10.0, "updates": 300, "num_samples": 4000,
            "global_batch_size": 16, "num_parameters": 1000, "num_trainable": 800, "items_per_s": 900.0, "step_time_ms": 11.0,
            "step_time_low_ms": 10.0, "step_time_high_ms": 14.0, "parts_s": {"starting": 1.0, "data": 2.0, "forward": 3.0, "backward": 4.0},
            "ranks_s": [dict.fromkeys(PARTS, 1.0), dict.fromkeys(PARTS, 2.0)], "host_peak_gib": 2.0, "host_total_gib": 64.0,
            "device_peak_gib": 3.0, "device_total_gib": 16.0, "phases": [],
        },
        **more,
    }  # fmt: skip


def plan(parallelism: str = "pipeline") -> dict[str, Any]:
    """Return the part of a plan.json that the report reads."""
    names = {"precision": "bf16", "optimizer": "adamw", "parallelism": parallelism, "task": "gpt"}
    choices = {group: {"name": name, "function": name, "options": {}} for group, name in names.items()}
    choices["parallelism"]["options"] = {"schedule": "1f1b"}
    return {
        "device": "cuda:0", "device_name": "Card", "updates": 300, "choices": choices, "reasons": {"precision": "auto: native"},
        "ranks": [{"device": "cuda:0"}, {"device": "cuda:1"}],
        "batch": {"global_batch_size": 16, "micro_batch_size": 4, "shares": [10, 6]},
    }  # fmt: skip


ENVIRONMENT = {
    "accel-run": "0.1.0",
    "python": "3.11",
    "inventory": {
        "torch_version": "2.13",
        "devices": [{"kind": "cuda", "index": 0, "name": "Card", "memory_bytes": 16 << 30}],
        "cpu": {"name": "Chip", "logical_cores": 8, "memory_bytes": 64 << 30},
    },
}


def make_run(folder: Path, name: str, **files: Any) -> Path:
    """Create a folder with these files: dicts as JSON, lists of dicts as lines of JSON, other content as text."""
    path = folder / name
    (path / "checkpoints").mkdir(parents=True)
    for file, content in files.items():
        lines = "".join(f"{json.dumps(row)}\n" for row in content) if isinstance(content, list) else content
        text = json.dumps(lines) if isinstance(lines, dict) else lines
        (path / file.replace("__", ".")).write_text(text)
    return path


def full_run(folder: Path, name: str = "full", *, metrics: list[dict[str, Any]] | None = None) -> Path:
    """Create a run with two phases, two GPUs, a pipeline, ranks, events and a damaged checkpoint."""
    some = [*rows(30, ranks=2), *rows(10, "tune", ranks=2), {"update": 100, "phase": "tune", "balance/shares": [9, 7]}]
    path = make_run(
        folder, name, run__json=record(name), plan__json=plan(), environment__json=ENVIRONMENT,
        config__yaml="updates: 300\nmax_grad_norm: 1.0\noptimizer:\n  option: adamw\n  lr: 0.5\nprecision:\n  option: auto\n",
        metrics__jsonl=metrics or some, gpu__csv=watched(60), command__sh="#!/bin/sh\n",
        events__jsonl=[{"time": "2026-01-31T10:00:00Z", "kind": "warning", "text": "rank 0 slows down the others"}],
    )  # fmt: skip
    damaged = path / "checkpoints" / "update-0000000300"
    damaged.mkdir()
    (damaged / "model.safetensors").write_bytes(bytes(4000))
    (damaged / "optimizer.safetensors").write_bytes(bytes(8000))
    return path


def watched(count: int, gpus: int = 2) -> str:
    """Return a gpu.csv of `count` seconds, with a gap of a minute in the middle."""
    lines = [",".join(COLUMNS)]
    for second in range(count):
        moment = 1.7e9 + second + (60 if second > count // 2 else 0)
        for gpu in range(gpus):
            known = {
                "timestamp": f"{moment:.3f}", "phase": "train" if second < count // 2 else "tune", "device": f"gpu{gpu}",
                "uuid": f"GPU-{gpu}", "name": "Card", "span_s": "1.0", "util_percent": "50", "memory_used_gib": "4",
                "memory_total_gib": "16", "cpu_percent": "40", "ram_percent": "60", "power_w": "100", "temperature_c": "60",
            }  # fmt: skip
            lines.append(",".join(known.get(column, "") for column in COLUMNS))
    return "\n".join(lines) + "\n"
