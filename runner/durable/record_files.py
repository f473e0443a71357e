"""Read the records of a run from its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.base.errors import StorageError
from runner.durable import files
from runner.records.plan_record import PlanRecord
from runner.records.run_record import ErrorRecord, RunRecord

RUN, ERROR, PLAN = "run.json", "error.json", "plan.json"
MIRROR = "mirror.json"  # which checkpoints have been copied to checkpoint.mirror


def read_record(folder: Path, clean: Callable[[Any], Any] | None = None) -> RunRecord:
    """Return the record of the run in `folder`; values that cannot be read are unknown.

    clean  applied to the JSON object first, for example to redact it
    """
    return RunRecord.decode(_read_content(folder / RUN), clean)


def read_error(folder: Path, clean: Callable[[Any], Any] | None = None) -> ErrorRecord | None:
    """Return the error of the last attempt; None if it did not fail, or if the file cannot be read."""
    return ErrorRecord.decode(_read_content(folder / ERROR), clean)


def read_plan(folder: Path, clean: Callable[[Any], Any] | None = None) -> PlanRecord:
    """Return the plan of the run in `folder`; values that cannot be read are unknown."""
    return PlanRecord.decode(_read_content(folder / PLAN), clean)


def _read_content(path: Path) -> bytes | None:
    """Return the content; None if the file is missing, and b"", which is decoded as damaged, if it cannot be read."""
    try:
        return files.read(path, at_most=_MAX_BYTES) if files.exists(path) else None
    except StorageError:
        return b""


_MAX_BYTES = 64 << 20  # a larger file is damaged: run.json has a few KB
