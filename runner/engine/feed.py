"""Micro-batches on their way to an update; the watchdog sees what is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from runner.base import noise
from runner.base.batch import MicroBatch, first_shape
from runner.engine.loop import Position
from runner.engine.watchdog import DATA, UPDATE, Pulse


class Feed:
    """Micro-batches, which report to the watchdog.

    shapes  those of the first tensor of each batch are added here
    shape   that of the last one
    last    what was given last, where it is kept: on a CPU, where numbers are looked at in the update they are of
    """

    def __init__(
        self, batches: Iterator[MicroBatch], pulse: Pulse, position: Position, shapes: set[object], *, keeps: bool
    ) -> None:
        self.batches, self.pulse, self.position = batches, pulse, position
        self.shapes, self.keeps, self.last = shapes, keeps, None
        self.shape: object = None

    def __iter__(self) -> Feed:
        return self

    def peek(self) -> MicroBatch:
        """Return the next batch, which stays the next one."""
        self.pulse.now = (DATA, self.position.update + 1)
        first = next(self.batches)
        self.batches = chain([first], self.batches)
        self.pulse.now = (UPDATE, self.position.update + 1)
        return first

    def __next__(self) -> MicroBatch:
        self.pulse.now = (DATA, self.position.update + 1)
        batch = next(self.batches)
        self.pulse.done.add(DATA)
        self.pulse.now = (UPDATE, self.position.update + 1)
        self.last = batch.batch if self.keeps else None
        self.shape = first_shape(batch.batch)
        self.shapes.add(self.shape)
        noise.start_pass(batch.samples)  # here and not around the loss: backward passes may compute it again
        return batch
