"""Saving a phase beside its training: when, at what cost, whether there is time for one more, and what remains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path

from runner.durable.checkpoint import NoWriter, Snapshot, Writer
from runner.durable.tensors import Room
from runner.engine.saving import COST, SavePolicy, Toll
from runner.engine.screen import Screen


class Saver:
    """Hands snapshots to the writer, which puts them on disk while training goes on.

    toll     what saves cost, over all phases of the run
    room     memory for the copy that is being written
    on_disk  number of the newest checkpoint that is there already, None where there is none
    bests    (metric, number) of the best checkpoints of the phase, best first; that of one that is not saved is not
             among them
    """

    def __init__(
        self,
        policy: SavePolicy,
        writer: Writer | NoWriter,
        toll: Toll,
        room: Room,
        screen: Screen,
        on_disk: int | None,
        bests: Sequence[tuple[float, int]] = (),
    ) -> None:
        self.policy, self.writer, self.toll, self.room, self.screen = policy, writer, toll, room, screen
        self._on_disk = on_disk
        self.bests = list(bests)
        self._bests_before = self.bests  # without the checkpoint that is being written
        self._number: int | None = None  # of that checkpoint
        self._is_best = False  # that is why it was saved
        self._num_best, self._best_s, self._began = 0, 0.0, time.monotonic()  # what such saves have cost
        self._is_writing = False  # a checkpoint, when the last update ended
        self._told: set[str] = set()  # what is said once
        self._adapt()

    def prepare(self, nbytes: int, *, for_gpu: bool) -> None:
        """Memory for a copy of so many bytes is there when the first save is due."""
        if self.policy.saves_on_the_way and isinstance(self.writer, Writer):
            self.room.prepare(nbytes, for_gpu=for_gpu)

    def is_best(self, value: float) -> bool:
        """Tell whether a checkpoint of this value of the metric would be among the best ones."""
        is_full = len(self.bests) >= self.policy.keep_best
        return math.isfinite(value) and self.policy.is_better(value, self.bests[-1][0] if is_full else None)

    def join(self, value: float, number: int) -> None:
        """The checkpoint is among the best ones, in the place of the least of them where there were enough."""
        ranked = sorted([*self.bests, (value, number)], reverse=self.policy.better == "max")
        self.bests = ranked[: self.policy.keep_best]

    def save(
        self,
        number: int,
        take: Callable[[], Snapshot],
        *,
        value: float | None = None,
        kept: Callable[[], Collection[Path]],
        is_waited_for: bool,
        anew: bool = False,
    ) -> float:
        """The snapshot that `take` returns is being written; returns the seconds that this took.

        value          of the metric, where it is saved for being among the best; if it fails, it is not among them
        kept           checkpoints that are kept whatever their age; asked when it is known which are the best
        is_waited_for  another update is to follow: what this took is part of what saves cost
        anew           it takes the place of one of the same update
        Raises StorageError where the last three saves failed, and what `take` raises.
        """
        began = time.perf_counter()
        self.writer.wait()  # until then the memory is taken
        self.count_written()
        waited = time.perf_counter() - began
        self.room.clear()
        self._number, self._is_best, self._bests_before = number, value is not None, self.bests
        if value is not None:
            self.join(value, number)
        snapshot = take()
        self.writer.submit(snapshot, best=kept(), anew=anew)
        self._is_writing = True
        self.policy.saved()
        held = time.perf_counter() - began
        if is_waited_for:
            self.toll.held(held)
            if waited > max(_WAIT_S, 0.5 * held):
                self._warn_once(
                    "disk",
                    f"saves come faster than the disk writes: at checkpoint {snapshot.update} training waited"
                    f" {waited:.1f} s for the one before; {self.policy.advice}",
                )
        return held

    def is_late(self) -> bool:
        """Tell whether it is time to save, and the disk is ready: waiting for it would hold training up."""
        if not self.policy.is_late():
            return False
        busy_s = self.writer.busy_s
        if busy_s is None:
            return True
        self._warn_once(
            "disk",
            f"saves come faster than the disk writes: one is due, but the one before has taken {busy_s:.1f} s"
            f" until now; the next waits for it; {self.policy.advice}",
        )
        return False

    def updated(self, seconds: float) -> None:
        """Note what an update took, and once a checkpoint is written, what it cost."""
        self.toll.updated(seconds, writing=self._is_writing)
        self.count_written()

    def count_written(self) -> None:
        """Where a checkpoint is written by now, or failed, that decides when the next is due and which are the best."""
        if not self._is_writing or self.writer.busy_s is not None:
            return
        self._is_writing = False
        is_saved = self.writer.acknowledged == self._number
        if not is_saved:
            self.bests = self._bests_before
        self.policy.ended(well=is_saved)
        known = self.toll.last
        self.toll.written(self.writer.last)
        last, before = self.toll.last, self.policy.seconds
        if last is None or last is known or self.writer.last is None:
            return
        self._adapt()
        if self._is_best:
            self._count_best(last.held_s + last.slowed_s)
        every = self.policy.seconds
        if known is None or (before and every and not 0.9 < every / before < 1.1):
            self.screen.event("saving", update=self.writer.last.update, every_s=every, **asdict(last))

    def remains(self) -> int | None:
        """Wait for the writer; return the number of the newest checkpoint of the phase, None where it has none."""
        newest = self.writer.wait()
        return self._on_disk if newest is None else newest

    def why_too_late(self, asked_at: float | None) -> str | None:
        """Return why a save would not be done before the end by force, None where there is time.

        asked_at  when the run was asked to stop, by `time.monotonic`; None where that is not known here
        """
        grace_s, save_s = self.policy.grace_s, self.toll.expected_s()
        if grace_s is None or asked_at is None or save_s is None:
            return None
        busy_s = self.writer.busy_s
        before_s = 0.0 if busy_s is None else max(0.0, save_s - busy_s)
        left_s = asked_at + grace_s - time.monotonic()
        if before_s + save_s <= left_s:
            return None
        return (
            f"not saved: a save takes {before_s + save_s:.1f} s, but of checkpoint.grace_s={grace_s:g}"
            f" only {max(0.0, left_s):.1f} s are left"
        )

    def _adapt(self) -> None:
        """The time between saves follows from what they have cost so far."""
        last = self.toll.last
        if last is not None:
            problem = self.policy.adapt(self.toll.cost_s, last.write_s, self.toll.update_s)
            if problem:
                self._warn_once("cost", problem)

    def _count_best(self, cost_s: float) -> None:
        """What saves of the best checkpoints cost is said where it is more than saving may cost."""
        self._num_best, self._best_s = self._num_best + 1, self._best_s + cost_s
        share = self._best_s / max(time.monotonic() - self._began, 1e-9)
        if self.policy.is_auto and share > COST and self._best_s > _WORTH_A_WORD_S:
            self._warn_once(
                "best",
                f"{self._num_best} saves of the best checkpoint so far have cost {self._best_s:.1f} s, {share:.1%} of"
                f" the time, more than {COST:.0%}; raise evaluate.every, or say checkpoint.best=null",
            )

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self._told:
            self._told.add(about)
            self.screen.warn(text)


_WORTH_A_WORD_S = 1.0  # less is nothing to somebody who waits
_WAIT_S = 0.1  # what training may wait for the disk before a word is said
