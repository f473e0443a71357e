"""Save checkpoints of a phase in the background: schedule, cost, remaining time and retention."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from runner.durable.checkpoint import Snapshot
from runner.durable.checkpoint_writer import NoWriter, Writer
from runner.durable.tensors import HostBuffer
from runner.engine.run_screen import Screen
from runner.engine.save_policy import AT_RISK_S, SaveCost, SavePolicy


@dataclass(frozen=True)
class HeldBest:
    """The best checkpoint so far, in host memory, because writing it now would exceed the cost limit.

    number  number of the checkpoint; value: its metric
    copy_s  seconds for which the copy blocked training
    since   time of the copy, by `time.monotonic`
    """

    number: int
    value: float
    snapshot: Snapshot
    buffer: HostBuffer
    kept: Callable[[], Collection[Path]]
    copy_s: float
    since: float


class Saver:
    """Pass snapshots to the writer, which writes them to disk during training.

    save_cost     cost of saving, over all phases of the run
    host_buffers  for two copies: the one being written, and the best one not written yet
    on_disk       number of the newest existing checkpoint, None if there is none
    bests         (metric, number) of the best saved checkpoints of the phase, best first

    With `checkpoint.every=auto` a best checkpoint is written at once only if that does not exceed the cost limit of
    saves. Otherwise it is held in memory, where a better one replaces it, until the limit allows it, AT_RISK_S have
    passed, or the phase ends.
    """

    def __init__(
        self,
        policy: SavePolicy,
        writer: Writer | NoWriter,
        save_cost: SaveCost,
        host_buffers: tuple[HostBuffer, HostBuffer],
        screen: Screen,
        *,
        on_disk: int | None,
        bests: Sequence[tuple[float, int]] = (),
    ) -> None:
        self.policy, self.writer, self.save_cost, self.host_buffers, self.screen = (
            policy,
            writer,
            save_cost,
            host_buffers,
            screen,
        )
        self.buffer = host_buffers[0]  # for the next copy
        self.held: HeldBest | None = None
        self._writer_buffer = host_buffers[1]
        self._on_disk = on_disk
        self.bests = list(bests)
        self._bests_before = self.bests  # without the checkpoint being written
        self._number: int | None = None  # number of that checkpoint
        self._is_writing = False  # a checkpoint was being written at the end of the last update
        self._told: set[str] = set()  # messages that were printed; each is printed once
        self.adapt()

    def prepare(self, nbytes: int, device: torch.device) -> None:
        """Allocate memory for a copy of `nbytes` bytes before the first save is due."""
        if self.policy.saves_on_the_way and isinstance(self.writer, Writer):
            self.buffer.prepare(nbytes, device)

    def is_best(self, value: float) -> bool:
        """Return True if a checkpoint with this metric value would be among the best ones."""
        bests = self._ranked(self.held.value, self.held.number) if self.held else self.bests
        is_full = len(bests) >= self.policy.keep_best
        return math.isfinite(value) and self.policy.is_better(value, bests[-1][0] if is_full else None)

    def has_no_budget(self) -> bool:
        """Return True if writing a best checkpoint now would exceed the cost limit, so it must be held in memory."""
        return self.policy.is_auto and isinstance(self.writer, Writer) and not self.save_cost.has_budget()

    def join(self, value: float, number: int) -> None:
        """Add the checkpoint to the best ones, replacing the worst of them if the list is full."""
        self.bests = self._ranked(value, number)

    def _ranked(self, value: float, number: int) -> list[tuple[float, int]]:
        ranked = sorted([*self.bests, (value, number)], reverse=self.policy.better == "max")
        return ranked[: self.policy.keep_best]

    def hold(
        self, number: int, take: Callable[[], Snapshot], *, value: float, kept: Callable[[], Collection[Path]]
    ) -> None:
        """Keep the snapshot returned by `take`, of one of the best checkpoints, in memory until it is written."""
        if self.policy.keep_best > 1:  # otherwise the new one replaces it
            self.write_held()
        began = time.perf_counter()
        self._choose_buffer()
        before = self.bests
        self.join(value, number)  # the snapshot must include itself among the best; others must not until it is written
        try:
            snapshot = take()
        finally:
            self.bests = before
        snapshot = replace(snapshot, state=copy.deepcopy(snapshot.state))  # training continues to change the originals
        copy_s = time.perf_counter() - began
        self.held = HeldBest(number, value, snapshot, self.buffer, kept, copy_s, time.monotonic())
        self.save_cost.copied(copy_s)

    def write_held(self) -> None:
        """Start writing the best checkpoint held in memory, if any.

        Raises StorageError if the last three saves failed.
        """
        held, self.held = self.held, None
        if held is None:
            return
        began = time.perf_counter()
        self.writer.wait()
        self.count_written()
        self._number, self._bests_before = held.number, self.bests
        self.join(held.value, held.number)
        self._writer_buffer = held.buffer
        self.writer.submit(held.snapshot, best=held.kept())
        self._is_writing = True
        self.save_cost.held(held.copy_s + time.perf_counter() - began, known=held.copy_s)

    def _drop_displaced(self) -> None:
        """Discard the held checkpoint if it is no longer among the best."""
        held = self.held
        if held is not None and (held.value, held.number) not in self._ranked(held.value, held.number):
            self.held = None

    def _choose_buffer(self) -> None:
        """Choose a buffer that neither the writer nor the held checkpoint uses.

        If both are in use, that of the held one is reused, and this copy replaces it.
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
        take: Callable[[], Snapshot],
        *,
        value: float | None = None,
        kept: Callable[[], Collection[Path]],
        is_waited_for: bool,
        overwrite: bool = False,
    ) -> float:
        """Start writing the snapshot returned by `take`; return the seconds that training was blocked.

        value          metric, if it is saved as one of the best; a failed save is not among them
        kept           returns the checkpoints to keep regardless of age; called once the best ones are known
        is_waited_for  another update follows, so the time counts as a cost of saving
        overwrite      replace an existing checkpoint of the same update
        Raises StorageError if the last three saves failed, and what `take` raises.
        """
        began = time.perf_counter()
        self.writer.wait()  # the buffer is in use until then
        self.count_written()
        waited = time.perf_counter() - began
        if self.held is not None and self.held.number == number:  # this save writes the held checkpoint
            value, self.held = self.held.value, None
        self._choose_buffer()
        self._number, self._bests_before = number, self.bests
        if value is not None:
            self.join(value, number)
        try:
            snapshot = take()
        except BaseException:  # the held one is still the best
            self.bests = self._bests_before
            raise
        if value is not None:
            self._drop_displaced()
        self._writer_buffer = self.buffer
        self.writer.submit(snapshot, best=kept(), overwrite=overwrite)
        self._is_writing = True
        self.policy.saved()
        held = time.perf_counter() - began
        if is_waited_for:
            self.save_cost.held(held)
            if waited > max(_WAIT_S, 0.5 * held):
                self._warn_once(
                    "disk",
                    "checkpoints are requested faster than the disk can write them: training waited"
                    f" {waited:.1f} s at checkpoint {snapshot.update}; {self.policy.advice}",
                )
        return held

    def is_late(self) -> bool:
        """Return True if a save is due and the disk is ready; waiting for the disk would block training.

        A message reports a write that has lasted longer than the interval between saves.
        """
        if not self.policy.is_late():
            return False
        busy_s = self.writer.busy_s
        if busy_s is None:
            return True
        interval_s = self.policy.seconds or _WAIT_S
        if busy_s > interval_s:
            self._warn_once(
                "disk",
                f"checkpoints are requested faster than the disk can write them: one is due every {interval_s:.0f} s,"
                f" but the previous one has been written for {busy_s:.1f} s; {self.policy.advice}",
            )
        return False

    def updated(self, seconds: float) -> None:
        """Record the time of an update and, once a checkpoint is written, its cost."""
        self.save_cost.updated(seconds, writing=self._is_writing)
        self.count_written()
        if self.held is not None and self.writer.busy_s is None:
            is_at_risk = time.monotonic() - self.held.since >= AT_RISK_S
            if is_at_risk or self.save_cost.has_budget():
                self.write_held()

    def count_written(self) -> None:
        """After a write completes or fails, update the save schedule and the list of best checkpoints."""
        if not self._is_writing or self.writer.busy_s is not None:
            return
        self._is_writing = False
        is_saved = self.writer.acknowledged == self._number
        if is_saved and self._number is not None:
            self._on_disk = max(self._number, self._on_disk or 0)
        else:
            self.bests = self._bests_before
        self.policy.ended(well=is_saved)
        known = self.save_cost.last
        self.save_cost.written(self.writer.last)
        last, before = self.save_cost.last, self.policy.seconds
        if last is None or last is known or self.writer.last is None:
            return
        self.adapt()
        every = self.policy.seconds
        if known is None or (before and every and not 0.9 < every / before < 1.1):
            self.screen.record_event("saving", update=self.writer.last.update, every_s=every, **asdict(last))

    def newest_number(self) -> int | None:
        """Wait for the writer; return the number of the newest checkpoint of the phase, or None."""
        known = (self.writer.wait(), self._on_disk)
        return max((number for number in known if number is not None), default=None)

    def deadline_problem(self, asked_at: float | None, num_saves: int = 1) -> str | None:
        """Return why `num_saves` saves cannot finish before the kill deadline, or None if they can.

        asked_at  time of the stop request, by `time.monotonic`; None if unknown
        """
        grace_s, one_s = self.policy.grace_s, self.save_cost.expected_s()
        if grace_s is None or asked_at is None or one_s is None:
            return None
        save_s = num_saves * one_s
        busy_s = self.writer.busy_s
        before_s = 0.0 if busy_s is None else max(0.0, one_s - busy_s)
        left_s = asked_at + grace_s - time.monotonic()
        if before_s + save_s <= left_s:
            return None
        return (
            f"not saved: a save takes {before_s + save_s:.1f} s, but of checkpoint.grace_s={grace_s:g}"
            f" only {max(0.0, left_s):.1f} s are left"
        )

    def adapt(self) -> None:
        """Set the save interval from the measured cost."""
        last = self.save_cost.last
        if last is not None:
            problem = self.policy.adapt(self.save_cost.cost_s, last.write_s, self.save_cost.update_s)
            if problem:
                self._warn_once("cost", problem)

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self._told:
            self._told.add(about)
            self.screen.warn(text)


_WAIT_S = 0.1  # time that training may wait for the disk before a message is printed
