"""Copy the checkpoints of a running run to its mirror, in a thread that never blocks training.

The thread has no queue. After each save it compares the local checkpoints with those it has copied, and copies the
newest missing one. So with a slow connection it skips checkpoints that were removed locally, and the mirror keeps what
the local disk keeps. A thread is enough: reading, hashing and sending release the GIL.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from runner.base.errors import AccelRunError, DataError, StorageError
from runner.base.json_values import to_json
from runner.base.text import abbreviate, error_line
from runner.durable import files
from runner.durable.checkpoint import newest_first
from runner.durable.directory import RunDirectory
from runner.durable.mirror import Mirror, OwnerChanged, mirrored_name, mirrored_update
from runner.durable.mirror_store import MirrorError
from runner.durable.record_files import MIRROR


@dataclass(frozen=True)
class MirrorState:
    """Checkpoints that this process has copied.

    copied   names of the local checkpoints that the mirror has, oldest first
    skipped  number of checkpoints that were removed from the local disk before they were copied
    failed   number of failed attempts
    problem  why copying does not work at the moment, or why it has ended; empty: it works
    """

    url: str
    copied: tuple[str, ...] = ()
    skipped: int = 0
    failed: int = 0
    problem: str = ""

    def to_json(self) -> str:
        """Return the content of mirror.json."""
        return to_json(asdict(self))


class NoMirror:
    """Copy nothing: used for checkpoint.mirror=null and on ranks that do not write."""

    def notify(self, path: Path) -> None:
        """Do nothing."""

    def in_use(self) -> Collection[Path]:
        """Return nothing."""
        return ()

    def finish(self, seconds: float, on_wait: Callable[[], None] = lambda: None) -> str:
        """Return an empty line."""
        return ""


@dataclass
class _Progress:
    """State of the thread; guarded by its condition.

    keys     local name -> name in the mirror, of checkpoints that are copied
    saved    local names of checkpoints that are not copied yet
    broken   local names of damaged checkpoints, which are not tried again
    """

    keys: dict[str, str] = field(default_factory=dict)
    saved: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    reading: Path | None = None
    is_awake: bool = True
    is_idle: bool = False
    is_stopped: bool = False


class MirrorThread(NoMirror):
    """Copies checkpoints until `finish`. Its errors are passed to `warn`, and never reach training.

    keep_last  number of newest checkpoints to keep in the mirror, besides those that the local disk has
    pauses_s   seconds before each retry; the last number is used for all further ones
    """

    def __init__(
        self,
        mirror: Mirror,
        run: RunDirectory,
        uid: str,
        *,
        keep_last: int,
        warn: Callable[[str], None],
        pauses_s: tuple[float, ...] = (1.0, 5.0, 30.0, 120.0),
    ) -> None:
        self.mirror, self.run, self.uid = mirror, run, uid
        self.keep_last, self._warn, self._pauses_s = keep_last, warn, pauses_s
        self.state = MirrorState(mirror.store.shown)
        self._writer = secrets.token_hex(8)
        self._is_claimed = False
        self._changed = threading.Condition()
        self._progress = _Progress(saved={path.name for path in newest_first(run.checkpoints)})
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def start(self, *, is_required: bool) -> None:
        """Claim the mirror for this process and start the thread.

        is_required  raise MirrorError if the mirror cannot be written; otherwise the thread tries again
        """
        try:
            self.mirror.claim(self.uid, self._writer)
            self._is_claimed = True
        except MirrorError as error:
            if is_required:
                raise
            self._handle_failure(error, pause_s=0.0)
        try:
            self._thread.start()
        except RuntimeError:  # no thread available
            self._stop("no thread can be started")

    def notify(self, path: Path) -> None:
        """Report that a checkpoint is on disk. Never blocks and never raises."""
        with self._changed:
            self._progress.saved.add(path.name)
            self._progress.keys.pop(path.name, None)  # it may have replaced a checkpoint that was copied
            self._progress.is_awake, self._progress.is_idle = True, False
            self._changed.notify_all()

    def in_use(self) -> Collection[Path]:
        """Return the checkpoint that is being copied, which must not be removed."""
        with self._changed:
            return () if self._progress.reading is None else (self._progress.reading,)

    def finish(self, seconds: float, on_wait: Callable[[], None] = lambda: None) -> str:
        """Wait until everything is copied, at most this long; stop the thread and return a summary.

        on_wait  called about once a second
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while not (self._progress.is_idle or self._progress.is_stopped):
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    break
                on_wait()
                self._changed.wait(min(remaining_s, _TICK_S))
            self._progress.is_stopped = True
            self._changed.notify_all()
        return self._summary()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._copy_all()
        except OwnerChanged:
            self._stop("another process has resumed this run from the mirror, and copies its checkpoints")
        except Exception as error:  # a failed copy must not end the run
            self._stop(error_line(error))

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not self._progress.is_awake and not self._progress.is_stopped:
                self._progress.is_idle = True
                self._changed.notify_all()
                self._changed.wait()
            self._progress.is_awake = False
            return not self._progress.is_stopped

    def _copy_all(self) -> None:
        try:
            if not self._is_claimed:
                self._claim_late()
            while (path := self._next_checkpoint()) is not None:
                self._copy(path)
            self.mirror.check_owner(self.uid, self._writer)
            self.mirror.prune(self.uid, self._progress.keys.values(), self.keep_last)
        except MirrorError as error:
            self._handle_failure(error)
        else:
            self._update_state(problem="")

    def _claim_late(self) -> None:
        """Claim a mirror that could not be reached at the start, unless another process has used it since."""
        owner = self.mirror.owner()
        local = newest_first(self.run.checkpoints)
        mirrored = self.mirror.checkpoints(self.uid)
        if owner.uid not in (None, self.uid) or (
            mirrored and (not local or mirrored_update(mirrored[0]) > mirrored_update(local[0].name))
        ):
            raise OwnerChanged
        self.mirror.claim(self.uid, self._writer)
        self._is_claimed = True

    def _next_checkpoint(self) -> Path | None:
        progress = self._progress
        with self._changed:
            saved_before = set(progress.saved)  # without those saved while the folder is listed
        local = newest_first(self.run.checkpoints)
        names = {path.name for path in local}
        with self._changed:
            removed = saved_before - names
            progress.saved -= removed
            progress.keys = {name: key for name, key in progress.keys.items() if name in names}
            missing = progress.saved - progress.broken
            progress.reading = next((path for path in local if path.name in missing), None)
            if progress.is_stopped:
                progress.reading = None
        if removed:
            self._update_state(skipped=self.state.skipped + len(removed))
        return self._progress.reading

    def _copy(self, path: Path) -> None:
        try:
            self.mirror.check_owner(self.uid, self._writer)
            key = mirrored_name(path)
            if not self.mirror.is_complete(self.uid, key):
                self.mirror.upload(path, self.run.metrics, self.uid)
        except StorageError as error:
            if files.exists(path):
                self._skip(path, error)
            return  # if it was removed meanwhile, `_next_checkpoint` counts it as skipped
        except DataError as error:
            self._skip(path, error)
            return
        finally:
            with self._changed:
                self._progress.reading = None
        with self._changed:
            if mirrored_name(path) == key:  # otherwise it was replaced meanwhile
                self._progress.keys[path.name] = key
                self._progress.saved.discard(path.name)
        self._update_state(problem="")

    def _skip(self, path: Path, error: AccelRunError) -> None:
        self._progress.broken.add(path.name)
        self._warn(f"mirror: {path.name} is not copied: {error.problems[0].what}")

    def _handle_failure(self, error: MirrorError, pause_s: float | None = None) -> None:
        what = error.problems[0].what
        if not self.state.problem:
            self._warn(f"mirror: {what}; training continues, and the copy will be retried")
        self._update_state(problem=what, failed=self.state.failed + 1)
        if pause_s is None:
            pause_s = self._pauses_s[min(self.state.failed, len(self._pauses_s)) - 1]
        with self._changed:
            self._progress.is_awake = True
            self._changed.wait_for(lambda: self._progress.is_stopped, pause_s)

    def _stop(self, reason: str) -> None:
        self._update_state(problem=f"ended: {reason}")
        with self._changed:
            was_stopped, self._progress.is_stopped = self._progress.is_stopped, True
            self._changed.notify_all()
        if not was_stopped:
            self._warn(f"mirror: no more checkpoints are copied: {reason}")

    def _update_state(
        self, *, problem: str | None = None, skipped: int | None = None, failed: int | None = None
    ) -> None:
        """Change the state, and record it for `accel-run status` while the run holds its lock."""
        with self._changed:
            copied = tuple(sorted(self._progress.keys))
        state = replace(
            self.state,
            copied=copied,
            problem=self.state.problem if problem is None else problem,
            skipped=self.state.skipped if skipped is None else skipped,
            failed=self.state.failed if failed is None else failed,
        )
        is_new, self.state = state != self.state, state
        if is_new and not self._progress.is_stopped:
            with suppress(AccelRunError):
                self.run.write(MIRROR, state.to_json())

    def _summary(self) -> str:
        with self._changed:
            saved = sorted(self._progress.saved & {path.name for path in newest_first(self.run.checkpoints)})
            state = replace(self.state, copied=tuple(sorted(self._progress.keys)))
            num_copied = len(state.copied)
        with suppress(AccelRunError):
            self.run.write(MIRROR, state.to_json())
        text = f"mirror {state.url}: has {num_copied} of {num_copied + len(saved)} checkpoints"
        text += f" ({state.skipped} were removed from the run before they were copied)" if state.skipped else ""
        if saved:
            text += f"; not copied: {abbreviate(saved, 5)}" + (f" ({state.problem})" if state.problem else "")
            text += ". Run the same command again to copy them"
        return text


_TICK_S = 1.0
