"""Exchange flags and timings after each update, so that every rank takes the same decision."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runner.base.stopwatch import PARTS
from runner.distributed.parallel import Parallel
from runner.distributed.world import World
from runner.engine.hooks.hook import Hook, PhaseView, Wants
from runner.engine.update.loop import StepInfo


@dataclass(frozen=True)
class StepStatus:
    """Merged status of all ranks after an update.

    wants    merged requests of all ranks
    num_bad  number of skipped samples
    seconds  for each rank, part -> seconds of the last update that the rank has timed; None before the first
    samples  number of samples that each rank had in that update
    """

    wants: Wants
    num_bad: int
    seconds: tuple[Mapping[str, float] | None, ...]
    samples: tuple[int, ...]


class Exchange:
    """All-reduces a small vector after each update and reads the result of the previous one, so that no rank waits.

    The strategy sends the vector together with the gradients of the next update if it can, else separately.
    """

    def __init__(self, world: World, parallel: Parallel) -> None:
        self.world, self.parallel = world, parallel
        self._pending: tuple[torch.Tensor, Any] | None = None

    def __call__(
        self, wants: Wants, *, num_bad: int, seconds: Mapping[str, float] | None, samples: int
    ) -> StepStatus | None:
        """Send the status of this rank; return the merged status after the previous update, or None for the first."""
        row = [samples, seconds is not None, *(seconds.get(part, 0.0) if seconds else 0.0 for part in PARTS)]
        zeros = [0.0] * _ROW_WIDTH
        # An all-gather as a sum, to which the other ranks add zeros, so that the gradients' all-reduce can carry it.
        rows = [row if rank == self.world.rank else zeros for rank in range(self.world.world_size)]
        numbers = [*wants, num_bad, *(number for row in rows for number in row)]
        vector = torch.tensor(numbers, dtype=torch.float64)
        carried = self.parallel.attached_sums()  # before attach_numbers, which discards them
        if self.parallel.attach_numbers(vector):
            return None if carried is None else self._decode(carried)
        before, self._pending = self._pending, (vector, self.world.sum_async(vector))
        if before is None:
            return None
        before[1].wait()
        return self._decode(before[0])

    def settle(self) -> None:
        """Wait until the last all-reduce is complete; its result is read later."""
        if self._pending is not None:
            self._pending[1].wait()

    def close(self) -> None:
        """Wait for the last all-reduce, and discard its result."""
        self.settle()
        self._pending = None
        self.parallel.attach_numbers(None)

    def _decode(self, vector: torch.Tensor) -> StepStatus:
        num = len(Wants._fields)
        numbers = vector.tolist()
        wants, num_bad, rest = numbers[:num], numbers[num], numbers[num + 1 :]
        rows = [rest[start : start + _ROW_WIDTH] for start in range(0, len(rest), _ROW_WIDTH)]
        return StepStatus(
            Wants(*(number > 0 for number in wants)),
            int(num_bad),
            tuple(dict(zip(PARTS, row[2:], strict=True)) if row[1] else None for row in rows),
            tuple(int(row[0]) for row in rows),
        )


class RankSync(Hook):
    """Merges the requests of all hooks, and then of all ranks, once per update.

    agreed        requests that take effect after this update; `agreed_at` is the update after which they were made
    status        merged status of the previous update; None for the first one, and with one rank
    stop_seen_at  time at which this rank learned of a stop request, by `time.monotonic`
    """

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self.exchange = Exchange(phase.parts.world, phase.parts.parallel)
        self.agreed, self.agreed_at = Wants(), 0
        self._requesting_hooks: list[Hook] = []
        self.status: StepStatus | None = None
        self.stop_seen_at: float | None = None

    def begin(self) -> None:
        self._requesting_hooks = self.phase.hooks_with("wants")

    def wants(self) -> Wants:
        return Wants(stop=self.phase.run.stop.requested is not None)

    def after_update(self, step: StepInfo) -> None:
        phase = self.phase
        wants = Wants(*map(any, zip(*(hook.wants() for hook in self._requesting_hooks), strict=True)))
        if phase.has_one_rank:
            self.agreed, self.agreed_at = wants, step.update
        else:
            lap = phase.stopwatch.last
            self.status = self.exchange(
                wants,
                num_bad=len(step.bad),
                seconds=lap.seconds if lap else None,
                samples=phase.shares.samples_per_rank(lap.update - 1)[phase.order.rank] if lap else 0,
            )
            self.agreed, self.agreed_at = self.status.wants if self.status else Wants(), step.update - 1
        if self.agreed.stop:
            phase.interrupt()
        if phase.must_stop and self.stop_seen_at is None:
            self.stop_seen_at = time.monotonic()

    def end(self) -> None:
        self.exchange.close()


_ROW_WIDTH = 2 + len(PARTS)
