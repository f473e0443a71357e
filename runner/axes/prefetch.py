"""Copy batches to the device: synchronously, or one batch ahead on a separate stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from runner.base.batch import MicroBatch, map_tensors

Lap = Callable[[str], object]


def ignore_lap(part: str) -> None:
    """Do nothing; default for callers that do not time the parts."""


class Prefetch:
    """Copy each batch when it is requested; a no-op on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, batches: Iterator[MicroBatch], lap: Lap = ignore_lap) -> Iterator[MicroBatch]:
        """Yield the batches on the device, in the same order.

        lap  called with "data" once a batch has been read, and with "transfer" once it is on the device or its copy is
             queued; the time after that belongs to the consumer
        """
        return batches if self.device.type == "cpu" else self._move_batches(batches, lap)

    def _move_batches(self, batches: Iterator[MicroBatch], lap: Lap) -> Iterator[MicroBatch]:
        for item in batches:
            lap("data")
            moved = item._replace(batch=map_tensors(self._move, item.batch))
            lap("transfer")
            yield moved

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


class Streams(Protocol):
    """Stream operations of `CopyAhead`; tests substitute an implementation that records the calls."""

    def copying(self) -> AbstractContextManager[object]:
        """Return the context in which work is queued on the copy stream."""

    def join(self) -> None:
        """Make the compute stream wait for the copies started so far."""

    def hold(self, tensor: Tensor) -> None:
        """Keep the memory of `tensor` allocated until the compute stream is done with it."""


class DeviceStreams:
    """The copy stream and the compute stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.side = torch.Stream(device=device)
        self._index = self.side.device_index  # a number, because torch takes longer to look up a device

    def copying(self) -> AbstractContextManager[object]:
        return self.side

    def join(self) -> None:
        self._current_stream().wait_stream(self.side)

    def hold(self, tensor: Tensor) -> None:
        tensor.record_stream(self._current_stream())

    def _current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._index)


class CopyAhead(Prefetch):
    """Copy the next batch on a separate stream while the current one is computed.

    The order is: wait for the copy of this batch, hold its memory, start the next copy, yield this batch. The
    memory was allocated on the copy stream, so without `hold` the allocator could reuse it for a later copy
    while the model still reads it.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        super().__init__(device)
        self.streams = streams

    def __call__(self, batches: Iterator[MicroBatch], lap: Lap = ignore_lap) -> Iterator[MicroBatch]:
        source: MicroBatch | None = None

        def start() -> MicroBatch | None:
            nonlocal source
            following = next(batches, None)
            if following is None:
                return None
            with self.streams.copying():
                moved = following._replace(batch=map_tensors(self._move, following.batch))
            # This keeps the page-locked batch until its copy is complete. It is only a safeguard, because torch itself
            # does not reuse such memory earlier.
            source = following
            return moved

        next_batch = start()
        lap("data")
        failure: Exception | None = None
        while next_batch is not None:
            self.streams.join()
            lap("transfer")  # time that the computation waits for the copy, which started one batch earlier
            map_tensors(self.streams.hold, next_batch.batch)
            ready, previous_source = next_batch, source
            try:
                next_batch = start()
            except Exception as error:  # the next batch failed; the current one is complete, so its update can run
                next_batch, failure = None, error
            yield ready
            del previous_source
        if failure is not None:
            raise failure


def none(device: torch.device) -> Prefetch:
    """Copy each batch when it is needed."""
    return Prefetch(device)


def stream(device: torch.device) -> Prefetch:
    """Copy one batch ahead on a separate stream; on the CPU, which needs no copy, the same as none."""
    return Prefetch(device) if device.type == "cpu" else CopyAhead(device, DeviceStreams(device))


PREFETCHES: Mapping[str, Callable[..., Prefetch]] = {"none": none, "stream": stream}
