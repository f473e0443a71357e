"""What the ranks tell each other after every update, so that all of them do the same next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runner.base.stopwatch import PARTS
from runner.base.world import World


@dataclass(frozen=True)
class Word:
    """What all ranks said of an update.

    stop     somebody was asked to stop
    save     rank 0 finds it is time to save
    num_bad  samples that were left out
    seconds  part -> seconds, for each rank, of the last update it knows of; None where it knows none yet
    samples  samples that each rank had in that update
    """

    stop: bool
    save: bool
    num_bad: int
    seconds: tuple[Mapping[str, float] | None, ...]
    samples: tuple[int, ...]


class Council:
    """Sends one small vector after each update and reads the one before it, so that nobody waits."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._sent: tuple[torch.Tensor, Any] | None = None

    def hear(
        self, *, stop: bool, save: bool, num_bad: int, seconds: Mapping[str, float] | None, samples: int
    ) -> Word | None:
        """Say how it stands after an update; return what all said of the one before, None after the first."""
        mine = [samples, seconds is not None, *(seconds.get(part, 0.0) if seconds else 0.0 for part in PARTS)]
        others = [0.0] * _WIDTH
        rows = [mine if rank == self.world.rank else others for rank in range(self.world.world_size)]
        numbers = [stop, save, num_bad, *(number for row in rows for number in row)]
        vector = torch.tensor(numbers, dtype=torch.float64)
        before, self._sent = self._sent, (vector, self.world.sum_later(vector))
        return None if before is None else self._read(*before)

    def settle(self) -> None:
        """What was said last has reached all; it is read later."""
        if self._sent is not None:
            self._sent[1].wait()

    def close(self) -> None:
        """Nothing is under way any more."""
        if self._sent is not None:
            self._sent[1].wait()
            self._sent = None

    def _read(self, vector: torch.Tensor, work: Any) -> Word:
        work.wait()
        stop, save, num_bad, *rest = vector.tolist()
        rows = [rest[start : start + _WIDTH] for start in range(0, len(rest), _WIDTH)]
        return Word(
            stop > 0,
            save > 0,
            int(num_bad),
            tuple(dict(zip(PARTS, row[2:], strict=True)) if row[1] else None for row in rows),
            tuple(int(row[0]) for row in rows),
        )


_WIDTH = 2 + len(PARTS)
