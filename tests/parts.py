"""Objects of a run without a plan, for tests that need only a few of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from runner.axes.precision import fp32
from runner.base.task import Task
from runner.distributed.parallel import Parallel
from runner.distributed.world import World


def parts_of(task: Task, source: Path, world: World, *, seed: int = 0, **others: Any) -> Any:
    """Return the result of `assemble` for a task in float32 without prefetching; `others` replace single parts."""
    given: dict[str, Any] = {"model": task.model, "parallel": Parallel(world), "prefetch": lambda batches: batches}
    given |= {"precision": fp32(world, given["model"])} | others
    plan = SimpleNamespace(settings=SimpleNamespace(seed=seed))
    return SimpleNamespace(task=task, source=source, plan=plan, **given)
