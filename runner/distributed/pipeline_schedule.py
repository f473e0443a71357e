"""The schedule of a pipeline: torch's schedule for each number of micro-batches, and the idle time of devices."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from runner.base import partition
from runner.base.stopwatch import Stopwatch
from runner.base.world import World
from runner.distributed.stages import Shapes, Stage, TimedStage


class PipelineSchedule:
    """Order the forward and backward passes of the micro-batches of an update.

    kind  see `Pipelined`
    """

    def __init__(self, world: World, kind: partition.Schedule) -> None:
        self.world, self.kind, self.num_stages = world, kind, world.world_size
        self._steps: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._counts: list[int] = []  # micro-batches of each step of the update

    def clear(self) -> None:
        """Forget the steps: another phase may have another loss."""
        self._steps.clear()

    def begin_update(self) -> None:
        """Count the steps of a new update."""
        self._counts = []

    def step(self, stage: Stage, count: int, key: int, shapes: Sequence[Shapes]) -> Any:
        """Return torch's schedule for `count` micro-batches; `key` identifies their shapes."""
        if (count, key) not in self._steps:
            self._steps[count, key] = self._build_step(stage, count, shapes)
            while len(self._steps) > KEPT_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end((count, key))
        self._counts.append(count)
        return self._steps[count, key]

    def _build_step(self, stage: Stage, count: int, shapes: Sequence[Shapes]) -> Any:
        timed = TimedStage(
            stage,
            stage.number,
            self.num_stages,
            self.world.device,
            input_args=shapes[stage.number].meta_tensors(),
            output_args=self._output_shapes(shapes, stage.number),
        )

        def loss(output: Tensor, _: Any) -> Tensor:
            return output  # computed by the last stage

        all_forward_first = self.kind == "gpipe" or count < self.num_stages
        schedule = ScheduleGPipe if all_forward_first else Schedule1F1B
        return schedule(timed, count, loss_fn=loss, scale_grads=False)

    def _output_shapes(self, shapes: Sequence[Shapes], number: int) -> tuple[Tensor, ...]:
        if number == self.num_stages - 1:
            return (torch.empty((), dtype=self.world.widest, device="meta", requires_grad=True),)
        return shapes[number + 1].meta_tensors()

    def bubble(self, stopwatch: Stopwatch) -> partition.Bubble | None:
        """Return the idle fractions of the devices in the last timed update; collective.

        None before the first update, or if it had no steps.
        """
        last = stopwatch.last
        mine = [last.seconds.get(part, 0.0) for part in _BUSY] if last and self._counts else None
        per_rank = self.world.gather(mine)
        if not all(per_rank):
            return None
        num_micro_batches = sum(self._counts)
        busy = sum(forward + backward for forward, backward, _ in per_rank)
        if not busy:
            return None
        spent = max(sum(parts) for parts in per_rank)
        forward = [seconds / num_micro_batches for seconds, _, _ in per_rank]
        backward = [seconds / num_micro_batches for _, seconds, _ in per_rank]
        simulated = ideal = 0.0  # seconds, summed over steps
        for count in self._counts:
            seconds = math.fsum([*forward, *backward]) * count / self.world.world_size
            ideal += seconds / (1 - partition.ideal_bubble(self.world.world_size, count))
            simulated += partition.simulated_seconds(self.kind, forward, backward, count)
        work = busy / self.world.world_size
        return partition.Bubble(1 - work / spent, 1 - work / ideal, 1 - work / simulated)


_BUSY = ("forward", "backward", "wait")
KEPT_STEPS = 8  # cached schedules, with receive buffers: one per shape and number of micro-batches
