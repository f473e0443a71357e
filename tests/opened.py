"""Open the first phase of a run in the test process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.config.request import Request
from runner.engine.hooks.checkpointing import Checkpointing
from runner.engine.opening import open_phase

TASK = Path(__file__).with_name("engine") / "task_that_is_saved.py"


@contextmanager
def opened(folder: Path, *args: str) -> Iterator[Any]:
    """Yield the first phase of a new run of a small task, ready to train, in this process."""
    settings = ("updates=1000", "global_batch_size=8", "device=cpu", "run=small", "monitor=off")
    settings = (*settings, f"output_root={folder}", "log_every=1", "backend.threads=1", *args)
    with open_phase(Request(settings, TASK)) as phase:
        yield phase


def saving_of(phase: Any) -> Checkpointing:
    result: Checkpointing = phase.hook(Checkpointing)
    return result
