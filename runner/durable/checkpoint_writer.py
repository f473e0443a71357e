"""Write checkpoints in a background thread, one at a time, with retries."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from runner.base.errors import StorageError
from runner.base.text import error_line
from runner.durable.checkpoint import Snapshot, retain, save, save_part, temporary_path
from runner.durable.checkpoint_parts import report_failure
from runner.durable.system_errors import completed_calls


@dataclass(frozen=True)
class SavedCheckpoint:
    """Time and size of a saved checkpoint.

    nbytes   size of its tensors
    write_s  seconds until it was durable under its name
    total_s  seconds until the checkpoints that it replaces were removed
    """

    path: Path
    update: int
    nbytes: int
    write_s: float
    total_s: float


class CheckpointWriter:
    """Save snapshots on a background thread, one at a time, while training continues.

    sync_first  syncs the files that a checkpoint depends on, before its final rename
    in_use      returns checkpoints that are being read and must not be removed

    A save is attempted three times, each time in a new folder. The first two failures are passed to `on_retry`, and
    the last one to `on_failure`; training then continues. After three failed saves in a row, `submit` and `wait` raise.
    If `check` raises, a snapshot is not saved. All callbacks run on the writer's thread. Any error except StorageError
    is raised by the next `submit` or `wait`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int = 2,
        on_saved: Callable[[Path], None] = lambda _: None,
        in_use: Callable[[], Collection[Path]] = tuple,
        on_retry: Callable[[StorageError], None] = lambda _: None,
        on_failure: Callable[[StorageError], None] = lambda _: None,
        sync_first: Callable[[], None] = lambda: None,
        check: Callable[[Snapshot], None] = lambda _: None,
    ) -> None:
        self.directory = directory
        self.keep_last = keep_last
        self.acknowledged: int | None = None  # last durable update
        self.last: SavedCheckpoint | None = None  # last checkpoint whose saving and retention have finished
        self.failures: list[StorageError] = []  # all of them, including those of retention
        self._consecutive_failures = 0
        self._on_saved = on_saved
        self._in_use = in_use
        self._on_retry = on_retry
        self._on_failure = on_failure
        self._sync_first = sync_first
        self._valid: set[Path] = set()
        self._started_s, self._update = 0.0, 0
        self._check = check
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, snapshot: Snapshot, *, best: Collection[Path] = (), overwrite: bool = False) -> None:
        """Start saving `snapshot`; blocks only while the previous one is written, or if no thread can be started.

        best  checkpoints to keep regardless of age; may include the new one
        overwrite  replace an existing checkpoint of the same update

        Raises StorageError if the last three saves failed; `snapshot` is then not saved.
        """
        self.wait()
        self._started_s, self._update = time.monotonic(), snapshot.update
        thread = threading.Thread(target=self._work, args=(snapshot, best, overwrite), name="checkpoint-writer")
        # Set before the start, so that the watchdog sees the write even while this thread waits for a core.
        self._thread = thread
        try:
            thread.start()
        except RuntimeError:  # no thread available: save synchronously
            self._thread = None
            self._work(snapshot, best, overwrite)

    @property
    def busy_s(self) -> float | None:
        """Return the seconds since the current write started, None if there is none."""
        is_alive = self._thread is not None and self._thread.is_alive()
        return time.monotonic() - self._started_s if is_alive else None

    @property
    def write_progress(self) -> tuple[int, int, int] | None:
        """Return the update being written, the writing thread, and how many system calls it has completed, or None."""
        thread = self._thread
        if thread is None or thread.ident is None or not thread.is_alive():
            return None
        return self._update, thread.ident, completed_calls(thread.ident)

    def wait(self) -> int | None:
        """Wait for pending writes; return the last durable update. Raises as `submit` does."""
        self.close()
        if self._error is not None:
            fault, self._error = self._error, None
            raise fault
        if self._consecutive_failures >= _MAX_FAILURES:
            last = self.failures[-1].problems[0]
            lasting = StorageError(
                f"{self._consecutive_failures} saves in a row failed; the last error: {last.what}",
                where=last.where,
                fix=last.fix or "check that the disk is writable, then run the same command again",
            )
            lasting.exit_code = self.failures[-1].exit_code
            raise lasting
        return self.acknowledged

    def close(self) -> None:
        """Stop the thread. Never raises, so that it can be called while another error propagates."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.wait()
        self.close()

    def _work(self, snapshot: Snapshot, best: Collection[Path], overwrite: bool) -> None:
        try:
            try:
                self._check(snapshot)
                path = self._save(snapshot, overwrite)
            except StorageError as error:
                self._consecutive_failures += 1
                self._report_failure(error)
                return
            self._consecutive_failures = 0
            self.acknowledged = snapshot.update
            self._valid.add(path)
            write_s = time.monotonic() - self._started_s
            self._on_saved(path)
            try:
                retain(self.directory, self.keep_last, (*best, *self._in_use()), verified=self._valid)
            except StorageError as error:  # superfluous checkpoints do not prevent the next save
                self._report_failure(error)
            nbytes = sum(tensor.nbytes for tensors in snapshot.tensors.values() for tensor in tensors.values())
            self.last = SavedCheckpoint(path, snapshot.update, nbytes, write_s, time.monotonic() - self._started_s)
        except BaseException as fault:  # re-raised in the training thread
            self._error = fault

    def _save(self, snapshot: Snapshot, overwrite: bool) -> Path:
        # A part is not retried, because the other ranks would have to write their parts again.
        for pause_s in RETRY_DELAYS_S if snapshot.part is None else ():
            try:
                return save(self.directory, snapshot, overwrite=overwrite, sync_first=self._sync_first)
            except StorageError as error:
                self._on_retry(error)
                time.sleep(pause_s)
        return save(self.directory, snapshot, overwrite=overwrite, sync_first=self._sync_first)

    def _report_failure(self, error: StorageError) -> None:
        self.failures.append(error)
        self._on_failure(error)


class PartWriter(CheckpointWriter):
    """Write the parts of checkpoints that a rank other than 0 saves, in the background.

    If that fails, the save of rank 0 fails too, and rank 0 handles the error.
    """

    def _work(self, snapshot: Snapshot, best: Collection[Path], overwrite: bool) -> None:
        part = snapshot.part
        assert part is not None
        self.acknowledged = snapshot.update
        try:
            self._check(snapshot)
            save_part(self.directory, snapshot)
        except BaseException as error:
            report_failure(temporary_path(self.directory, snapshot), part.rank, error_line(error))
            if not isinstance(error, StorageError):
                self._error = error


class NoWriter:
    """Writer that saves nothing, for ranks other than the one that writes."""

    failures: tuple[StorageError, ...] = ()
    last: SavedCheckpoint | None = None
    busy_s: float | None = None
    write_progress: tuple[int, int, int] | None = None

    def __init__(self) -> None:
        self.acknowledged: int | None = None

    def submit(self, snapshot: Snapshot, *, best: Collection[Path] = (), overwrite: bool = False) -> None:
        """Mark the snapshot as saved."""
        self.acknowledged = snapshot.update

    def wait(self) -> int | None:
        """Return the last update that was submitted."""
        return self.acknowledged

    def close(self) -> None:
        """Do nothing."""


_MAX_FAILURES = 3  # consecutive failures after which saving stops
RETRY_DELAYS_S = (0.5, 1.0)  # before the second and the third attempt of a save
