"""Save checkpoints of a phase in the background, within limits on their cost and on the time left before a kill."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from runner.durable.checkpoint import Snapshot
from runner.durable.checkpoint_writer import CheckpointWriter, NoWriter
from runner.durable.safetensors_writer import HostBuffer
from runner.engine.checkpoints.save_policy import MAX_AT_RISK_S, SaveCost, SavePolicy
from runner.engine.process.run_screen import Screen


@dataclass(frozen=True)
class HeldBest:
    """The best checkpoint so far, held in host memory because writing it now would exceed the cost limit.

    number      number of the checkpoint
    value       its value of the metric `checkpoint.best`
    kept        returns the checkpoints to keep regardless of age
    copy_s      seconds for which the copy blocked training
    held_since  `time.monotonic()` when it was copied
    """

    number: int
    value: float
    snapshot: Snapshot
    buffer: HostBuffer
    kept: Callable[[], Collection[Path]]
    copy_s: float
    held_since: float


class Saver:
    """Pass snapshots to the writer, which writes them to disk during training.

    save_cost     cost of saving, over all phases of the run
    host_buffers  memory for two copies of the state: the one being written, and the best one held in memory
    on_disk       number of the newest existing checkpoint, or None if there is none
    bests         (metric value, number) of the best saved checkpoints of the phase, best first

    With `checkpoint.every=auto`, a best checkpoint is written at once only if that does not exceed the cost limit of
    saves. Otherwise it is held in memory, where a better one replaces it, until the limit allows writing it,
    MAX_AT_RISK_S seconds have passed, or the phase ends.
    """

    def __init__(
        self,
        policy: SavePolicy,
        writer: CheckpointWriter | NoWriter,
        save_cost: SaveCost,
        host_buffers: tuple[HostBuffer, HostBuffer],
        screen: Screen,
        *,
        on_disk: int | None,
        bests: Sequence[tuple[float, int]] = (),
    ) -> None:
        self.policy, self.writer, self.save_cost = policy, writer, save_cost
        self.host_buffers, self.screen = host_buffers, screen
        self.buffer = host_buffers[0]  # for the next copy
        self.held: HeldBest | None = None
        self._writer_buffer = host_buffers[1]
        self._on_disk = on_disk
        self.bests = list(bests)
        self._bests_before = self.bests  # without the checkpoint being written; restored if writing fails
        self._number: int | None = None  # number of the checkpoint being written
        self._is_writing = False  # a checkpoint was being written at the end of the last update
        self._warned: set[str] = set()  # topics of printed warnings
        self.adapt()

    def prepare(self, nbytes: int, device: torch.device) -> None:
        """Allocate memory for a copy of `nbytes` bytes before the first save is due."""
        if self.policy.saves_during_phase and isinstance(self.writer, CheckpointWriter):
            self.buffer.prepare(nbytes, device)

    def is_best(self, value: float) -> bool:
        """Return True if a checkpoint with this metric value would be among the best ones."""
        bests = self._rank(self.held.value, self.held.number) if self.held else self.bests
        is_full = len(bests) >= self.policy.keep_best
        return math.isfinite(value) and self.policy.is_better(value, bests[-1][0] if is_full else None)

    def has_no_budget(self) -> bool:
        """Return True if writing a best checkpoint now would exceed the cost limit, so it must be held in memory."""
        return self.policy.is_auto and isinstance(self.writer, CheckpointWriter) and not self.save_cost.has_budget()

    def add_best(self, value: float, number: int) -> None:
        """Add a checkpoint to the best ones, replacing the worst of them if the list is full."""
        self.bests = self._rank(value, number)

    def _rank(self, value: float, number: int) -> list[tuple[float, int]]:
        return self.policy.ranking.select([*self.bests, (value, number)])

    def hold(
        self, number: int, take_snapshot: Callable[[], Snapshot], *, value: float, kept: Callable[[], Collection[Path]]
    ) -> None:
        """Keep the snapshot of one of the best checkpoints in memory until it is written."""
        if self.policy.keep_best > 1:  # with only one, the new checkpoint replaces the held one
            self.write_held()
        start = time.perf_counter()
        self._choose_buffer()
        bests = self.bests
        # This snapshot must list itself among the best. Other snapshots must not list it until it is written.
        self.add_best(value, number)
        try:
            snapshot = take_snapshot()
        finally:
            self.bests = bests
        copy_s = time.perf_counter() - start
        self.held = HeldBest(number, value, snapshot, self.buffer, kept, copy_s, time.monotonic())
        self.save_cost.record_copy(copy_s)

    def write_held(self) -> None:
        """Start writing the best checkpoint held in memory, if any.

        Raises StorageError if the last three saves failed.
        """
        held, self.held = self.held, None
        if held is None:
            return
        start = time.perf_counter()
        self.writer.wait()
        self.poll_writer()
        self._number, self._bests_before = held.number, self.bests
        self.add_best(held.value, held.number)
        self._writer_buffer = held.buffer
        self.writer.submit(held.snapshot, best=held.kept())
        self._is_writing = True
        self.save_cost.record_pause(held.copy_s + time.perf_counter() - start, counted_s=held.copy_s)

    def _drop_displaced(self) -> None:
        held = self.held
        if held is not None and (held.value, held.number) not in self._rank(held.value, held.number):
            self.held = None

    def _choose_buffer(self) -> None:
        """Choose a buffer that neither the writer nor the held checkpoint uses.

        If both are in use, the next copy overwrites the held checkpoint.
        """
        free = [
            buffer for buffer in self.host_buffers if self.writer.busy_s is None or buffer is not self._writer_buffer
        ]
        if self.held is not None:
            free.sort(key=lambda buffer: self.held is not None and buffer is self.held.buffer)
        self.buffer = free[0]
        self.buffer.clear()
        if self.held is not None and self.buffer is self.held.buffer:
            self.held = None

    def save(
        self,
        number: int,
        take_snapshot: Callable[[], Snapshot],
        *,
        value: float | None = None,
        kept: Callable[[], Collection[Path]],
        counts_as_cost: bool,
        overwrite: bool = False,
    ) -> None:
        """Take a snapshot and start writing it.

        value           metric value if this checkpoint is one of the best; a failed save removes it from `bests`
        kept            returns the checkpoints to keep regardless of age; called once the best ones are known
        counts_as_cost  another update follows, so the time of the save delays training and counts as cost
        overwrite       replace an existing checkpoint of the same update
        Raises StorageError if the last three saves failed. Exceptions of `take_snapshot` are passed on.
        """
        start = time.perf_counter()
        self.writer.wait()  # the buffer is in use until then
        self.poll_writer()
        waited_s = time.perf_counter() - start
        if self.held is not None and self.held.number == number:  # this save writes the held checkpoint
            value, self.held = self.held.value, None
        self._choose_buffer()
        self._number, self._bests_before = number, self.bests
        if value is not None:
            self.add_best(value, number)
        try:
            snapshot = take_snapshot()
        except BaseException:  # not saved, so not one of the best
            self.bests = self._bests_before
            raise
        if value is not None:
            self._drop_displaced()
        self._writer_buffer = self.buffer
        self.writer.submit(snapshot, best=kept(), overwrite=overwrite)
        self._is_writing = True
        self.policy.restart_interval()
        blocked_s = time.perf_counter() - start
        if counts_as_cost:
            self.save_cost.record_pause(blocked_s)
            if waited_s > max(_MAX_WAIT_S, 0.5 * blocked_s):
                self._warn_once(
                    "disk",
                    "checkpoints are requested faster than the disk can write them: training waited"
                    f" {waited_s:.1f} s at checkpoint {snapshot.update}; {self.policy.advice}",
                )

    def is_due_by_time(self) -> bool:
        """Return True if the save interval has elapsed and the writer is idle; waiting for it would block training.

        Warns once if a write takes longer than the interval between saves.
        """
        if not self.policy.is_due_by_time():
            return False
        busy_s = self.writer.busy_s
        if busy_s is None:
            return True
        interval_s = self.policy.seconds or _MAX_WAIT_S
        if busy_s > interval_s:
            self._warn_once(
                "disk",
                f"checkpoints are requested faster than the disk can write them: one is due every {interval_s:.0f} s,"
                f" but writing the previous one has already taken {busy_s:.1f} s; {self.policy.advice}",
            )
        return False

    def record_update(self, seconds: float) -> None:
        """Record the time of an update and the cost of a finished write; write the held checkpoint when due."""
        self.save_cost.record_update(seconds, writing=self._is_writing)
        self.poll_writer()
        if self.held is not None and self.writer.busy_s is None:
            is_at_risk = time.monotonic() - self.held.held_since >= MAX_AT_RISK_S
            if is_at_risk or self.save_cost.has_budget():
                self.write_held()

    def poll_writer(self) -> None:
        """After a write completes or fails, update the save schedule and the list of best checkpoints."""
        if not self._is_writing or self.writer.busy_s is not None:
            return
        self._is_writing = False
        is_saved = self.writer.acknowledged == self._number
        if is_saved and self._number is not None:
            self._on_disk = max(self._number, self._on_disk or 0)
        else:
            self.bests = self._bests_before
        self.policy.record_result(has_succeeded=is_saved)
        previous = self.save_cost.last
        self.save_cost.record_write(self.writer.last)
        current, old_interval_s = self.save_cost.last, self.policy.seconds
        if current is None or current is previous or self.writer.last is None:
            return
        self.adapt()
        interval_s = self.policy.seconds
        if previous is None or (old_interval_s and interval_s and not 0.9 < interval_s / old_interval_s < 1.1):
            self.screen.record_event("saving", update=self.writer.last.update, every_s=interval_s, **asdict(current))

    def newest_number(self) -> int | None:
        """Wait for the writer; return the number of the newest checkpoint of the phase, or None."""
        numbers = (self.writer.wait(), self._on_disk)
        return max((number for number in numbers if number is not None), default=None)

    def deadline_problem(self, stop_requested_at: float | None, num_saves: int = 1) -> str | None:
        """Return why `num_saves` saves cannot finish before the kill deadline, or None if they can.

        stop_requested_at  time of the stop request, by `time.monotonic`; None if unknown
        """
        grace_s, expected_s = self.policy.grace_s, self.save_cost.expected_s()
        if grace_s is None or stop_requested_at is None or expected_s is None:
            return None
        save_s = num_saves * expected_s
        busy_s = self.writer.busy_s
        pending_s = 0.0 if busy_s is None else max(0.0, expected_s - busy_s)
        left_s = stop_requested_at + grace_s - time.monotonic()
        if pending_s + save_s <= left_s:
            return None
        return (
            f"not saved: the remaining saves take {pending_s + save_s:.1f} s, but only {max(0.0, left_s):.1f} s of"
            f" checkpoint.grace_s={grace_s:g} remain"
        )

    def adapt(self) -> None:
        """Set the save interval from the measured cost."""
        last = self.save_cost.last
        if last is not None:
            problem = self.policy.adapt(self.save_cost.cost_s, last.write_s, self.save_cost.update_s)
            if problem:
                self._warn_once("cost", problem)

    def _warn_once(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            self.screen.warn(text)


_MAX_WAIT_S = 0.1  # time that training may wait for the disk before a message is printed
