"""Feed micro-batches to an update, and report to the watchdog when the run waits for data."""

from __future__ import annotations

from collections.abc import Iterator

from runner.base import noise
from runner.base.batch import MicroBatch, ShardMark, first_shape
from runner.engine.process.watchdog import DATA, UPDATE, ProgressMark
from runner.engine.update.loop import Position


class Feed:
    """Iterator over micro-batches that reports each wait for data to the watchdog.

    shapes  shapes of the first tensor of each batch seen so far
    shape   shape of the first tensor of the last batch
    marks   positions in the shards of a stream after the batches read so far; a hook that reads `marks` clears it
    """

    def __init__(
        self, batches: Iterator[MicroBatch], progress_mark: ProgressMark, position: Position, shapes: set[object]
    ) -> None:
        self.batches, self.progress_mark, self.position = batches, progress_mark, position
        self.shapes = shapes
        self.shape: object = None
        self.marks: dict[int, ShardMark] = {}

    def __iter__(self) -> Feed:
        return self

    def peek(self) -> MicroBatch:
        """Return the next batch without consuming it."""
        self.progress_mark.advance(DATA, self.position.update + 1)
        first = next(self.batches)
        self.batches = _prepend([first], self.batches)
        self.progress_mark.advance(UPDATE, self.position.update + 1)
        return first

    def close(self) -> None:
        """Free the batches that were read ahead."""
        self.batches = iter(())

    def __next__(self) -> MicroBatch:
        self.progress_mark.advance(DATA, self.position.update + 1)
        batch = next(self.batches)
        self.progress_mark.completed_kinds.add(DATA)
        self.progress_mark.advance(UPDATE, self.position.update + 1)
        self.shape = first_shape(batch.batch)
        self.shapes.add(self.shape)
        if batch.marks:
            self.marks.update(batch.marks)
        noise.start_pass(batch.samples)  # not in the loss, which the backward pass may call again
        return batch


def _prepend(first: list[MicroBatch], batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield `first`, then the others. Unlike itertools.chain, do not keep the first batch in memory until the end."""
    yield first.pop()
    yield from batches
