"""What an exception in the middle of a run means: one error with cause and way out, or None for a fault of ours."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path

import torch

from runner.base.errors import (
    AccelRunError,
    DataWorkerLost,
    DeviceMemoryError,
    HostMemoryError,
    RankLost,
    SystemLimit,
    TaskFault,
)
from runner.base.places import PACKAGE
from runner.base.task import Task
from runner.distributed.lost import is_of_a_lost_rank


def explain(error: Exception, source: Path, what: str, micro_batch_size: int) -> AccelRunError | None:
    """Return the error to show for `error`, which was raised while doing `what` with the task in `source`."""
    text = str(error)
    if isinstance(error, AccelRunError):
        return error
    if is_of_a_lost_rank(error):
        return RankLost(
            f"another rank has gone, or does not answer: {text.splitlines()[0]}",
            where=what,
            fix="the rank that failed first says why; the same command goes on from the last checkpoint",
        )
    if isinstance(error, torch.OutOfMemoryError):
        smaller = f"micro_batch_size={max(1, micro_batch_size // 2)}" if micro_batch_size > 1 else "a smaller model"
        return DeviceMemoryError(
            f"the GPU's memory is used up: {text.splitlines()[0]}",
            where=what,
            fix=f"say {smaller} (the update stays the same), or memory=checkpoint, or precision=auto",
        )
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return HostMemoryError(
            f"the machine's memory is used up: {text.splitlines()[0] if text else 'MemoryError'}",
            where=what,
            fix=f"say micro_batch_size={max(1, micro_batch_size // 2)}, or fewer dataloader.num_workers",
        )
    if "DataLoader worker" in text or "exited unexpectedly" in text or _lost_a_process(error):
        if "shared memory" in text or "bus error" in text.lower():
            return SystemLimit(
                "the shared memory through which data workers hand over batches is full",
                where=what,
                fix="make /dev/shm larger (docker: --shm-size=8g), or say dataloader.num_workers=0",
            )
        return DataWorkerLost(
            f"a data worker died: {(text or type(error).__name__).splitlines()[0]}",
            where=what,
            fix="the same command goes on from the last checkpoint; for want of memory? use fewer workers",
        )
    return fault_of(error, source, what)


def _lost_a_process(error: BaseException) -> bool:
    """Tell whether a worker died while it handed over a batch: the socket between the processes says so."""
    frames = traceback.extract_tb(error.__traceback__)
    is_broken = isinstance(error, (ConnectionError, EOFError))
    return is_broken and any("multiprocessing" in Path(frame.filename).parts for frame in frames)


def fault_of(error: BaseException, source: Path, what: str) -> TaskFault | None:
    """Return the TaskFault for an exception that passed through the task's own files, None for any other."""
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # what Python makes of it where it leaves a generator
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, NotImplementedError) and frames[-1].filename == inspect.getfile(Task):
        return TaskFault(str(error), where=str(source), fix="an example: accel-run new my_task.py")
    own = [frame for frame in frames if _is_of_task(frame.filename, source)]
    if not own:
        return None
    lines = [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}" for frame in own]
    return TaskFault(
        f"{what} raised {type(error).__name__}: {error}".rstrip(": "),
        where=f"{own[-1].filename}:{own[-1].lineno}",
        fix="\n    ".join(lines),
    )


def place_of(function: object, source: Path) -> str:
    """Return file:line of a function or class of the task, the task's file where that is unknown."""
    try:
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"  # type: ignore[arg-type]
    except (TypeError, OSError):
        return str(source)


def _is_of_task(file: str, source: Path) -> bool:
    """Tell whether a file lies beside the task's, and is neither ours nor of a package installed there."""
    if file == str(source):
        return True
    inner = file.removeprefix(f"{source.parent}/")
    ours = file.startswith(f"{PACKAGE}/") and not str(source).startswith(f"{PACKAGE}/")
    return inner != file and not ours and "site-packages/" not in inner
