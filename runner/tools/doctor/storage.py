"""Where runs are written and what is handed over in memory: tried with the functions that a run uses."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from runner.base.errors import StorageError
from runner.durable import files
from runner.host.resources import affinity
from runner.tools.doctor.findings import CheckContext, CheckResult, failed, ok, warn

MIB, GIB = 2**20, 2**30
WRITTEN_BYTES = 4 * MIB
TRIAL = f"{files.TEMPORARY}doctor-"  # how the folder begins in which things are tried


def disk(context: CheckContext) -> Iterator[CheckResult]:
    """In the output folder: space, writing with fsync, replacing, locking."""
    folder = nearest(context.root)
    if not os.access(folder, os.W_OK | os.X_OK) or not folder.is_dir():
        yield failed("room", f"{folder} must be a folder that this user may write", _ELSEWHERE)
        return
    beside = "" if folder == context.root else f" ({context.root} is still to be made)"
    free = shutil.disk_usage(folder).free
    room = f"{free / GIB:.1f} GiB free in {folder}{beside}"
    if free < 64 * MIB:
        yield failed("room", room, _ELSEWHERE, figures={"free_gib": free / GIB})
        return
    yield (ok if free >= 4 * GIB else _little)("room", room, free_gib=free / GIB)
    context.begin("write")
    trial = folder / f"{TRIAL}{os.getppid()}-{secrets.token_hex(4)}"
    try:
        files.new_directory(trial)
    except StorageError as error:
        yield failed("write", f"{folder}: {error.problems[0].what}", _ELSEWHERE)
        return
    try:
        yield from _written(trial, context)
    finally:
        files.remove(trial)


def shared_memory(context: CheckContext) -> Iterator[CheckResult]:
    """Space in /dev/shm."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield failed("", "there is no /dev/shm", "mount -t tmpfs tmpfs /dev/shm; or dataloader.num_workers=0")
        return
    usage = shutil.disk_usage(folder)
    workers = len(affinity())
    needed = workers * _BATCHES_PER_WORKER * _IMAGES_BYTES
    seen = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB are free"
    if usage.free >= needed:
        yield ok("", seen, free_gib=usage.free / GIB)
        return
    yield warn(
        "",
        f"{seen}; {workers} workers with {_BATCHES_PER_WORKER} batches each of {_IMAGES} take {needed / GIB:.2f}",
        "docker run --shm-size=8g, or mount -o remount,size=50% /dev/shm; or dataloader.num_workers=0",
        figures={"free_gib": usage.free / GIB},
    )


def nearest(path: Path) -> Path:
    """Return what has this path, or the first one above it that is there; it need not be a folder, nor open to us."""
    path = path.expanduser().absolute()
    return next((each for each in (path, *path.parents) if _is_there(each)), Path("/"))


def remove_trials(root: Path, pid: int) -> None:
    """What a check that was killed left in the folder for runs is gone; `pid`: the process that had it made."""
    folder = nearest(root)
    for name in files.list_names(folder):
        if name.startswith(f"{TRIAL}{pid}-"):
            files.remove(folder / name)


def _is_there(path: Path) -> bool:
    """Return whether the path exists, even if it is not accessible."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


# ---------------------------------------------------------------- the parts of a save


def _written(trial: Path, context: CheckContext) -> Iterator[CheckResult]:
    data = os.urandom(WRITTEN_BYTES)
    files.write_new(trial / "data", [data])
    files.fsync_directory(trial)
    if files.read(trial / "data") != data:
        yield failed("write", f"what was read back is not what was written, in {trial.parent}", _ELSEWHERE)
    else:
        yield ok("write", "a file is written, synced and read back")
    context.begin("replace")
    for content in ("old", "new"):
        files.atomic_write(trial / "state", content)
    yield ok("replace", "a file is replaced in one step")
    context.begin("lock")
    files.Lock(trial / "lock", "doctor").release()
    yield ok("lock", "a file can be locked against another process")
    ahead = (trial / "data").stat().st_mtime - time.time()
    if abs(ahead) > _SKEW_S:
        why = "the newest run is found by the times of its files"
        yield warn(
            "clock",
            f"the file system's clock is {ahead:+.0f} s from this machine's",
            "sudo timedatectl set-ntp true",
            why,
        )


def _little(subject: str, seen: str, **figures: float) -> CheckResult:
    return warn(subject, seen, _ELSEWHERE, "a checkpoint is written whole before an older one goes", figures)


_ELSEWHERE = "accel-run train output_root=/path/with/room"
_SKEW_S = 5.0
_IMAGES, _IMAGES_BYTES = "32 images of 224 x 224", 32 * 3 * 224 * 224 * 4
_BATCHES_PER_WORKER = 2  # torch's own prefetch_factor
