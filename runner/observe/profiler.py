"""torch's profiler over a few updates: a trace for the browser and a table for the eye."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from runner.base.values import Count, PositiveInt


class Profiler:
    """Called after each update; this one does nothing."""

    note = ""

    def __call__(self, update: int) -> None:
        """Note that an update is done."""

    def close(self) -> None:
        """Write what was recorded."""


class Trace(Profiler):
    """Records `updates` updates after `skip` of them, then writes trace.json and operators.txt."""

    def __init__(self, folder: Path, *, skip: int, updates: int, with_stack: bool) -> None:
        self.folder, self.skip, self.updates, self.with_stack = folder, skip, updates, with_stack
        self._seen = 0
        self._profile: Any = None
        if skip == 0:
            self._start()

    def __call__(self, update: int) -> None:
        self._seen += 1
        if self._profile is None and self._seen == self.skip:
            self._start()
        elif self._profile is not None and self._seen == self.skip + self.updates:
            self.close()

    def close(self) -> None:
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.__exit__(None, None, None)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self.folder / "trace.json"))
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=by, row_limit=10)
        (self.folder / "operators.txt").write_text(table, encoding="utf-8")
        files = f"{self.folder}/trace.json (open in ui.perfetto.dev), operators.txt"
        self.note = f"profile of {self._seen - self.skip} updates: {files}"

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities, with_stack=self.with_stack)
        self._profile.__enter__()


def off(folder: Path) -> Profiler:
    """Profile nothing."""
    return Profiler()


def trace(folder: Path, *, skip: Count = 5, updates: PositiveInt = 10, with_stack: bool = False) -> Profiler:
    """Record operators on CPU and GPU for a few updates of the run.

    skip        updates that pass first, so that warm-up is not recorded
    updates     updates recorded
    with_stack  note the Python line of each operator too (slower, larger)
    """
    return Trace(folder, skip=skip, updates=updates, with_stack=with_stack)


PROFILERS: Mapping[str, Callable[..., Profiler]] = {"off": off, "trace": trace}
