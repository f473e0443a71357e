"""Translate an exception during a run into an error with cause and fix, or None for an internal error."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runner.base.errors import (
    AccelRunError,
    DataError,
    DataWorkerLost,
    DeviceMemoryError,
    DeviceMissing,
    HostMemoryError,
    RankLost,
    StorageError,
    SystemLimit,
    TaskFault,
)
from runner.base.oom_errors import OomCause, find_oom_cause
from runner.base.paths import PACKAGE
from runner.base.task import Task
from runner.base.text import ExceptionInfo, SourceLine, describe_exception, first_line
from runner.distributed.peer_loss import is_peer_loss


def explain(error: BaseException, source: Path, what: str, micro_batch_size: int) -> AccelRunError | None:
    """Return the user-facing error for `error`, raised while doing `what` with the task in `source`.

    Only exception messages of torch and of the system are matched, never the text of a task's own exceptions.
    """
    cause = find_oom_cause(error)
    if isinstance(error, AccelRunError) and not (cause is not None and isinstance(error, DataError)):
        return error
    info = describe_exception(error)
    if not isinstance(error, Exception) or _is_raised_by_task(error, info, source):
        return make_task_fault(error, source, what)
    translated = _memory_error(cause, what, micro_batch_size) or _hardware_error(error, info, what)
    if translated is None:
        return make_task_fault(error, source, what) or _autograd_fault(info, source, what) or _disk_error(error, what)
    task_frames = _task_frames(info, source)
    if task_frames:  # add the task line that allocated the memory
        (problem,) = translated.problems
        translated.problems = (replace(problem, fix=f"{problem.fix}\n{_format_frame(task_frames[-1])}"),)
    return translated


def _is_raised_by_task(error: Exception, info: ExceptionInfo, source: Path) -> bool:
    """Return True if a raise or assert statement of the task raised the exception."""
    is_system_error = isinstance(error, torch.OutOfMemoryError) or not {"OSError", "MemoryError"}.isdisjoint(info.bases)
    if is_system_error or not info.frames:
        return False
    return is_task_file(info.frames[-1].file, source) and info.frames[-1].text.startswith(("raise", "assert"))


def _memory_error(cause: OomCause | None, what: str, micro_batch_size: int) -> AccelRunError | None:
    if cause is None:
        return None
    can_halve = micro_batch_size > 1
    smaller = f"micro_batch_size={micro_batch_size // 2}" if can_halve else "a smaller model"
    if cause.side == "device":
        note = " (the update stays the same)" if can_halve else ""
        fix = f"use {smaller}{note}, or memory=checkpoint, or precision=auto"
        return DeviceMemoryError(f"the GPU is out of memory: {cause.text}", where=what, fix=fix)
    fix = f"use {smaller}, or reduce dataloader.num_workers"
    return HostMemoryError(f"the machine is out of memory: {cause.text}", where=what, fix=fix)


def _hardware_error(error: Exception, info: ExceptionInfo, what: str) -> AccelRunError | None:
    text, lower, line = info.message, info.message.lower(), first_line(info.message)
    if is_peer_loss(error):
        fix = "fix the error of the rank that failed first, then run the same command again"
        return RankLost(f"another rank has exited or does not respond: {line}", where=what, fix=fix)
    if "AcceleratorError" in info.bases or "CUDA error" in text:
        fix = "check nvidia-smi and dmesg, then run the same command again; to train without a GPU, use device=cpu"
        if "device-side assert" in lower:  # a kernel has checked its arguments; the device itself is fine
            fix = _ASSERT_FIX
        return DeviceMissing(f"the device failed: {line}", where=what, fix=fix)
    if "too many open files" in lower:
        fix = "raise the limit with ulimit -n, or reduce dataloader.num_workers"
        return SystemLimit(f"too many files are open: {line}", where=what, fix=fix)
    if _is_shared_memory_full(info, lower):
        fix = "make /dev/shm larger (docker: --shm-size=8g), or use dataloader.num_workers=0"
        return SystemLimit("the shared memory for batches of data workers is full", where=what, fix=fix)
    if "can't start new thread" in lower or ("temporarily unavailable" in lower and _is_from_multiprocessing(info)):
        fix = "raise the limit with ulimit -u (in a container: pids), or reduce dataloader.num_workers"
        return SystemLimit(f"no more threads or processes can be started: {line}", where=what, fix=fix)
    if "DataLoader worker (pid" in text or _is_broken_worker_pipe(info):  # torch's message
        fix = "run the command again; if memory was short, use a smaller dataloader.num_workers"
        return DataWorkerLost(f"a data worker died: {line or info.kind}", where=what, fix=fix)
    return None


def _is_shared_memory_full(info: ExceptionInfo, lower: str) -> bool:
    """Return True if /dev/shm was full when a batch was written or the locks of a queue were created."""
    if "no space left on device" in lower and "OSError" in info.bases and _is_from_multiprocessing(info):
        return True
    return any(message in lower for message in _SHM_FULL_MESSAGES) or (
        "dataloader worker" in lower and "shared memory" in lower
    )


def _is_broken_worker_pipe(info: ExceptionInfo) -> bool:
    """Return True if a worker died while sending a batch: the socket to it is broken."""
    is_broken = not {"ConnectionError", "EOFError", "FileNotFoundError"}.isdisjoint(info.bases)
    return is_broken and _is_from_multiprocessing(info)


def _is_from_multiprocessing(info: ExceptionInfo) -> bool:
    return any("multiprocessing" in Path(frame.file).parts for frame in info.frames)


def _autograd_fault(info: ExceptionInfo, source: Path, what: str) -> TaskFault | None:
    """Return the fault for an autograd error in the runner's backward pass that an operation of the task caused."""
    where = f"{what}: {source}"
    for message, cause, fix in _AUTOGRAD_MESSAGES:
        if info.kind == "RuntimeError" and message in info.message:
            return TaskFault(cause, where=where, fix=fix)
    # An error in a Python hook or autograd Function does not match: it has a frame below this one.
    if info.frames and info.frames[-1].function == "_engine_run_backward":
        return TaskFault(
            f"the backward pass raised {info.kind}: {first_line(info.message)}", where=where, fix=_SHOW_LINE
        )
    return None


def _disk_error(error: Exception, what: str) -> AccelRunError | None:
    """Return the error for a failed file operation that the task did not cause, if its fix is known."""
    if not isinstance(error, OSError) or error.errno not in _DISK_FIXES:
        return None
    where = f"{what}: {error.filename}" if error.filename else what
    return StorageError(f"a file operation failed: {error.strerror}", where=where, fix=_DISK_FIXES[error.errno])


def make_task_fault(error: BaseException, source: Path, what: str) -> TaskFault | None:
    """Return the TaskFault for an exception that passed through the task's files, or None for any other.

    Only task lines are shown, including those of the exception's causes; error.json has the full traceback.
    """
    info = describe_exception(error)
    if isinstance(error, NotImplementedError) and info.frames[-1].file == inspect.getfile(Task):
        return TaskFault(
            info.message, where=str(source), fix="accel-run new my_task.py writes an example of a task file"
        )
    task_exception = _first_task_exception(info, source)
    if task_exception is None:
        return None
    task_frames = _task_frames(task_exception, source)
    return TaskFault(
        f"{what} raised {task_exception}",
        where=f"{task_frames[-1].file}:{task_frames[-1].line}",
        fix="\n".join([*_format_traceback(task_exception, source), *_suggest_import(error, source)]),
    )


def _suggest_import(error: BaseException, source: Path) -> Iterator[str]:
    """Suggest absolute imports, and renaming a task module called runner: an import finds this package instead."""
    if isinstance(error, ImportError) and "no known parent package" in error.msg:  # Python's message
        yield (
            "a task file is not part of a package: use absolute imports, such as import data; modules are searched in"
            " the folder of the task file and in those of PYTHONPATH"
        )
    top = __name__.partition(".")[0]
    if not isinstance(error, ImportError) or (error.name or "").partition(".")[0] != top:
        return
    candidates = (path for parent in source.parents for path in (parent / top, parent / f"{top}.py"))
    found = next((path for path in candidates if path.exists() and path != PACKAGE), None)
    if found is not None:
        yield (
            f"{found} has the name of accel-run's own package, which Python finds first: rename it, e.g. to"
            f" my_{found.name}"
        )


def _first_task_exception(info: ExceptionInfo, source: Path) -> ExceptionInfo | None:
    """Return the exception, or the first of its causes, that passed through the task's files."""
    while not _task_frames(info, source):
        if info.cause is None or not info.is_from:  # raised while handling another exception, which may be internal
            return None
        info = info.cause
    while info.kind == "RuntimeError" and info.cause is not None and info.cause.kind == "StopIteration":
        info = info.cause  # Python wraps StopIteration when it leaves a generator
    return info if _task_frames(info, source) else None


def _format_traceback(info: ExceptionInfo, source: Path) -> Iterator[str]:
    """Yield the task lines that an exception passed through, then those of its group members and causes."""
    lines: list[str] = []
    for frame in _task_frames(info, source):
        text = _format_frame(frame)
        lines += [text] if text not in lines[-1:] else []
    omitted = len(lines) - _MAX_TRACEBACK_LINES
    yield from (
        lines if omitted <= 0 else [*lines[:2], f"... ({omitted} more lines)", *lines[2 - _MAX_TRACEBACK_LINES :]]
    )
    for number, part in enumerate(info.parts, 1):
        yield f"{number}. {part}"
        yield from (f"   {line}" for line in _format_traceback(part, source))
    if info.cause is not None:
        yield f"{'from' if info.is_from else 'while handling'} {info.cause}"
        yield from (f"   {line}" for line in _format_traceback(info.cause, source))


def _format_frame(frame: SourceLine) -> str:
    return f"{Path(frame.file).name}:{frame.line} in {frame.function}: {frame.text}"


def _task_frames(info: ExceptionInfo, source: Path) -> list[SourceLine]:
    return [frame for frame in info.frames if is_task_file(frame.file, source)]


def locate_definition(function: object, source: Path) -> str:
    """Return file:line of a function or class of the task, or the task's file if it is defined elsewhere.

    Definitions in accel-run or an installed package, such as torchmetrics, are excluded: the user cannot change them.
    """
    with suppress(TypeError, OSError):
        inner: Any = inspect.unwrap(function)  # type: ignore[arg-type]
        file = inspect.getsourcefile(inner)
        if file is not None and not is_library_file(file, source):
            return f"{file}:{inspect.getsourcelines(inner)[1]}"
    return str(source)


def is_task_file(file: str, source: Path) -> bool:
    """Return True if a file is in the task's folder and is neither part of accel-run nor an installed package."""
    return file == str(source) or (file.startswith(f"{source.parent}/") and not is_library_file(file, source))


def is_library_file(file: str, source: Path) -> bool:
    """Return True if a file is part of accel-run or of an installed package that the task is not part of."""
    is_own_file = file.startswith(f"{PACKAGE}/") and not str(source).startswith(f"{PACKAGE}/")
    return file != str(source) and (is_own_file or "site-packages/" in file.removeprefix(f"{source.parent}/"))


_MAX_TRACEBACK_LINES = 12
_SHM_FULL_MESSAGES = (  # torch's messages for a full /dev/shm
    "unable to write to file </",
    "unable to open shared memory object",
    "unable to allocate shared memory",
    "bus error",
)
_ASSERT_FIX = """an index is probably out of range: check class labels, token IDs, and indices of gather and scatter;
CUDA errors are reported asynchronously, so the operation may have failed before the named line: to find it, run the
same command with the environment variable CUDA_LAUNCH_BLOCKING=1, or with device=cpu"""
_SHOW_LINE = "add torch.autograd.set_detect_anomaly(True) to the task to find the line"
_AUTOGRAD_MESSAGES = (  # (text of torch's message, cause, fix)
    (
        "backward through the graph a second time",
        "the graph of this loss was already used by a backward pass",
        (
            "return a loss of this batch only: detach what the task keeps between batches (kept = kept.detach()),\n"
            "and do not call backward(), because accel-run does"
        ),
    ),
    (
        "modified by an inplace operation",
        "a tensor that the gradient needs was changed in place",
        f"use x = x + y instead of x += y, or change a copy: x.clone();\n{_SHOW_LINE}",
    ),
)
_DISK_FIXES = {
    errno.ENOSPC: "free some space there, then run the same command again: it resumes",
    errno.EDQUOT: "free some space there, then run the same command again: it resumes",
    errno.EROFS: "remount it writable, then run the same command again: it resumes",
    errno.EACCES: "check its permissions; run the same command again",
    errno.EPERM: "check its permissions; run the same command again",
    errno.EIO: "see dmesg; run the same command again",
    errno.ESTALE: "check that the network disk is mounted; run the same command again",
    errno.EFBIG: "raise the limit with ulimit -f, then run the same command again: it resumes",
}
