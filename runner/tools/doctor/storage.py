"""Check the output folder and shared memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from runner.host.resources import affinity
from runner.tools.doctor.findings import CheckContext, CheckResult, failed, ok, warn

MIB, GIB = 2**20, 2**30
WRITTEN_BYTES = 4 * MIB


def disk(context: CheckContext) -> Iterator[CheckResult]:
    """Output folder: space, writing with fsync."""
    folder = nearest_existing(context.root)
    if not os.access(folder, os.W_OK | os.X_OK) or not folder.is_dir():
        yield failed("space", f"{folder} must be a folder that you can write to", _FIX_SPACE)
        return
    note = "" if folder == context.root else f" ({context.root} does not exist yet)"
    free = shutil.disk_usage(folder).free
    seen = f"{free / GIB:.1f} GiB free in {folder}{note}"
    if free < 64 * MIB:
        yield failed("space", seen, _FIX_SPACE, figures={"free_gib": free / GIB})
        return
    if free < 4 * GIB:
        why = "a checkpoint is written completely before an older one is removed"
        yield warn("space", seen, _FIX_SPACE, why, {"free_gib": free / GIB})
    else:
        yield ok("space", seen, free_gib=free / GIB)
    context.begin("write")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # has no name, so nothing is left if the check is killed
            file.write(os.urandom(WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield failed("write", f"{folder}: {error.strerror}", _FIX_SPACE)
    else:
        yield ok("write", "a file was written and synced")


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
        f"{seen}; {workers} workers, each with {_BATCHES_PER_WORKER} batches of {_IMAGES}, need {needed / GIB:.2f} GiB",
        "docker run --shm-size=8g, or mount -o remount,size=50% /dev/shm; or dataloader.num_workers=0",
        figures={"free_gib": usage.free / GIB},
    )


def nearest_existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists; it may be a file, or not accessible."""
    path = path.expanduser().absolute()
    return next((candidate for candidate in (path, *path.parents) if _exists(candidate)), Path("/"))


def _exists(path: Path) -> bool:
    """Return whether the path exists, even if it is not accessible."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


_FIX_SPACE = "accel-run train output_root=/path/on/a/larger/disk"
_IMAGES, _IMAGES_BYTES = "32 images of 224 x 224", 32 * 3 * 224 * 224 * 4
_BATCHES_PER_WORKER = 2  # torch's default prefetch_factor
