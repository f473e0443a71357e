"""Measure step times of a run during training, synchronizing with the device only between blocks."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from runner.base.accelerator import accelerator_of
from runner.base.values import Count, PositiveInt
from runner.base.world import World


class Benchmark:
    """Benchmark called after each update; this one does nothing."""

    note = ""

    def __call__(self, update: int) -> None:
        """Record the end of an update."""

    def result(self) -> dict[str, Any] | None:
        """Return the measurements, or None if there are none."""
        return None


class Blocks(Benchmark):
    """Time blocks of updates after a warm-up; report the median block and the spread."""

    def __init__(self, world: World, *, warmup: int, block: int) -> None:
        self.world, self.warmup, self.block = world, warmup, block
        self._made = 0
        self._edge = 0.0
        self._times_ms: list[float] = []

    def __call__(self, update: int) -> None:
        self._made += 1
        after = self._made - self.warmup
        if after >= 0 and after % self.block == 0:
            self.world.synchronize()
            now = time.perf_counter()
            if after:
                self._times_ms.append(1e3 * (now - self._edge) / self.block)
                self.note = (
                    f"step time {statistics.median(self._times_ms):.3f} ms (median of {len(self._times_ms)} blocks)"
                )
            self._edge = now

    def result(self) -> dict[str, Any] | None:
        if not self._times_ms:
            return None
        accelerator = accelerator_of(self.world.device)
        peak = accelerator.peak()
        return {
            "step_time_ms": {
                "median": statistics.median(self._times_ms),
                "min": min(self._times_ms),
                "max": max(self._times_ms),
                "blocks": self._times_ms,
            },
            "warmup_updates": self.warmup,
            "updates_per_block": self.block,
            "peak_memory_bytes": None if peak is None else peak.allocated,
            "device": accelerator.name() or platform.processor() or "cpu",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }

    def to_json(self) -> str:
        """Return the result as a JSON-serializable dictionary."""
        return json.dumps(self.result(), indent=2) + "\n"


def none(world: World) -> Benchmark:
    """No benchmark."""
    return Benchmark()


def blocks(world: World, *, warmup: Count = 10, block: PositiveInt = 10) -> Benchmark:
    """Measure the time of blocks of updates and write benchmark.json into the run directory.

    warmup  warm-up updates that are not measured
    block   updates per block; the device is synchronized between blocks
    """
    return Blocks(world, warmup=warmup, block=block)


BENCHMARKS: Mapping[str, Callable[..., Benchmark]] = {"none": none, "blocks": blocks}
