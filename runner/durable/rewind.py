"""Rewind a run to an earlier checkpoint, to resume from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from runner.base.errors import AccelRunError
from runner.durable import files
from runner.durable.checkpoint import LoadedCheckpoint, newest_name, restore_moved, set_aside_newer
from runner.durable.checkpoint_choice import choose_checkpoint
from runner.durable.directory import RunDirectory


@contextmanager
def rewind_run(run: RunDirectory, choice: str, report: Callable[[str], None]) -> Iterator[None]:
    """Set aside the checkpoints after the one that `choice` names, so that inside the context the run resumes from it.

    Nothing is removed: the checkpoints are renamed to `earlier-...`, and the metrics are copied to
    `metrics-earlier-N.jsonl`. If the settings are rejected, or the run fails before it has trained, checkpoints and
    metrics are restored.

    Raises InputMissing or DataError as `choose_checkpoint` does, and RunInUse if another process has the lock.
    """
    chosen = choose_checkpoint(run, choice)
    start = chosen.checkpoint
    labels = f" ({', '.join(chosen.labels)})" if chosen.labels else ""
    with RunDirectory.create_or_open(run.path.parent, run.name) as directory:
        is_last = newest_name(directory.checkpoints) == start.path.name
        copy = None if is_last else copy_metrics(directory)  # first, so that a kill between the two loses no rows
        moved = set_aside_newer(directory.checkpoints, start.update)
    later = f"; {len(moved)} later checkpoint{'s' * (len(moved) > 1)} renamed to checkpoints/earlier-*" if moved else ""
    report(f"returning to {start.path.name}{labels}{later}")
    try:
        yield
    except AccelRunError:
        if moved:
            with suppress(
                AccelRunError
            ):  # a second error must not hide the first; checkpoints that are not restored keep their new names
                if _undo_rewind(run, start, moved, copy):
                    report(f"the later checkpoints were restored; the newest one is {moved[0][0].name}")
        raise


def _undo_rewind(
    run: RunDirectory, start: LoadedCheckpoint, moved: Sequence[tuple[Path, Path]], copy: Path | None
) -> bool:
    with RunDirectory.create_or_open(run.path.parent, run.name) as directory:
        if newest_name(directory.checkpoints) != start.path.name:
            return False
        if copy is not None:
            size = files.file_size(directory.metrics)
            if size != files.file_size(copy) and size > start.manifest["metrics_bytes"]:  # rows were added
                return False
            files.rename(copy, directory.metrics)
            files.fsync_directory(directory.path)
        restore_moved(moved)
        return True


def copy_metrics(directory: RunDirectory) -> Path | None:
    """Copy metrics.jsonl to metrics-earlier-N.jsonl. Return the path of the copy, or None if there are no metrics."""
    if not files.exists(directory.metrics):
        return None
    number = 1
    while files.exists(directory.path / f"metrics-earlier-{number}.jsonl"):
        number += 1
    return directory.write(f"metrics-earlier-{number}.jsonl", files.read(directory.metrics))
