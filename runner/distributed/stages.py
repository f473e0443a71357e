"""Pipeline stages with the interface that torch's schedules expect; the call of the model in the loss is intercepted.

The first stage runs the loss only until it calls the model, to get the model's arguments. The last stage runs the loss
again and passes it the output of the pipeline as the result of that call.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from runner.base import noise
from runner.base.batch import MicroBatch, map_tensors
from runner.base.errors import RankLost, TaskFault
from runner.base.stopwatch import Stopwatch
from runner.base.text import dtype_name
from runner.distributed import p2p_messages
from runner.distributed.agreement import format_error_line
from runner.distributed.parallel import ForwardPasses
from runner.distributed.world import World
from runner.tensors.global_rng import seed_everything


class Call(NamedTuple):
    """Arguments of a call of the model."""

    inputs: tuple[Any, ...]
    named: Mapping[str, Any]


class ModelCalled(BaseException):
    """Raised when the loss calls the model; not an Exception, so that tasks do not catch it."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


@dataclass
class StageSums:
    """Sums over the micro-batches of an update; tensors stay on the device."""

    loss_sum: Tensor
    items: Tensor


class StageWork(NamedTuple):
    """Micro-batches of one step.

    inputs            arguments of the model for each micro-batch, on the rank of the first stage only
    before_last_pass  called before the last backward pass of the update
    """

    passes: ForwardPasses
    micros: Sequence[MicroBatch]
    inputs: Sequence[Call]
    seed: int
    tally: StageSums
    before_last_pass: Callable[[], object] = lambda: None


class Shapes(NamedTuple):
    """Shapes and dtypes of what a stage receives from the previous one: one tensor or a tuple of tensors.

    The first stage receives only the index of the micro-batch, so it has no shapes.
    """

    is_tuple: bool
    tensors: tuple[tuple[tuple[int, ...], str], ...]

    @classmethod
    def describe(cls, value: Any) -> list[Any]:
        """Return the value's shapes and dtypes, JSON-serializable."""
        tensors = value if isinstance(value, tuple) else (value,)
        return [
            isinstance(value, tuple),
            [[list(tensor.shape), dtype_name(tensor.dtype)] for tensor in tensors],
        ]

    @classmethod
    def from_description(cls, described: list[Any]) -> Shapes:
        """Restore the output of `describe`."""
        is_tuple, tensors = described
        return cls(is_tuple, tuple((tuple(shape), dtype) for shape, dtype in tensors))

    def meta_tensors(self) -> tuple[Tensor, ...]:
        """Return meta tensors of these shapes."""
        if not self.tensors:
            return (torch.empty(1, dtype=torch.int64, device="meta"),)
        return tuple(
            torch.empty(shape, dtype=getattr(torch, dtype), device="meta", requires_grad=True)
            for shape, dtype in self.tensors
        )


class Stage(nn.Module):
    """The layers of one stage, with the interface of torch's schedules."""

    def __init__(
        self,
        number: int,
        num_stages: int,
        layers: Sequence[nn.Module],
        model: nn.Module,
        world: World,
        stopwatch: Stopwatch,
    ) -> None:
        super().__init__()
        self.number, self.is_last = number, number == num_stages - 1
        self.layers = nn.ModuleList(layers)
        self.world, self.stopwatch = world, stopwatch
        self.failure: Exception | None = None
        self.failed_at = 0.0
        inner = set(model.modules())
        self._model = [model]  # in a list, so that it is not registered as a submodule
        self._helpers = [layer for layer in layers if layer not in inner]
        self._works_in_place = any(getattr(module, "inplace", False) for module in self.layers.modules())
        self._work: StageWork
        self._shapes: Sequence[Shapes]
        self._handle_calls: Callable[[Callable[..., Any]], AbstractContextManager[None]]
        self._next = 0

    def begin(
        self,
        work: StageWork,
        shapes: Sequence[Shapes],
        handle_calls: Callable[[Callable[..., Any]], AbstractContextManager[None]],
    ) -> None:
        """Set the micro-batches that the next calls of `forward` process, in order."""
        self._work, self._shapes, self._handle_calls, self._next = work, shapes, handle_calls, 0

    def before_last_pass(self) -> None:
        """Prepare for the last backward pass of the step."""
        self._work.before_last_pass()

    def end(self) -> None:
        """Release the micro-batches."""
        del self._work

    def forward(self, *received: Tensor) -> Any:
        """Return the output for the next micro-batch.

        After a failure the output is zero, because the other ranks still wait for the messages of all micro-batches.
        They learn of the failure after the last micro-batch.
        """
        number, self._next = self._next, self._next + 1
        if self.failure is None:
            try:
                return self._compute_micro_batch(received, number)
            except Exception as error:  # of any type, because the other ranks must be informed
                self.fail(error)
        return self._zero_output()

    def fail(self, error: Exception) -> None:
        """Record the error and its time: the earliest failure of all ranks is the one that is raised."""
        self.failure, self.failed_at = error, time.time()

    def _compute_micro_batch(self, received: tuple[Tensor, ...], number: int) -> Any:
        work = self._work
        seed_everything(micro_batch_seed(work.seed + number, self.number + 1))
        noise.switch_pass(work.micros[number].samples)
        value: Any = received if self._shapes[self.number].is_tuple else received[0]
        if self._works_in_place and self.number:
            value = map_tensors(lambda tensor: tensor.clone(), value)  # a leaf cannot be modified in place
        call = work.inputs[number] if self.number == 0 else None
        with work.passes.forward():
            output = self.compute(call, value)
        if self.is_last:
            return self._loss(output, work, number)
        return tuple(_sendable(tensor) for tensor in (output if isinstance(output, tuple) else (output,)))

    def _zero_output(self) -> Any:
        """Return zeros with the shapes of the output; no backward pass runs through them."""
        if self.is_last:
            return torch.zeros((), dtype=self.world.widest, device=self.world.device)
        shapes = self._shapes[self.number + 1].meta_tensors()
        return tuple(torch.zeros_like(tensor, device=self.world.device) for tensor in shapes)

    def compute(self, call: Call | None, value: Any) -> Any:
        """Apply the layers to the model's inputs, or to the output of the previous stage."""
        for helper in self._helpers:
            helper.training = self._model[0].training
        for number, layer in enumerate(self.layers):
            if number == 0 and self.number == 0:
                assert call is not None, "the first stage receives the arguments of the model"
                value = layer(*call.inputs, **call.named)
            else:
                value = layer(value)
        return value

    def _loss(self, output: Any, work: StageWork, number: int) -> Tensor:
        # The same seed as when the first stage ran the loss to get the model's arguments, so that the loss draws the
        # same random numbers.
        seed_everything(micro_batch_seed(work.seed + number))
        noise.switch_pass(work.micros[number].samples)
        once = ReplayedCall(output)
        with self._handle_calls(once), work.passes.forward():
            loss, count = work.passes.loss(work.passes.model, work.micros[number].batch)
        work.tally.loss_sum += loss.detach()
        work.tally.items += count.to(self.world.device) if isinstance(count, Tensor) else count
        return work.passes.scale(loss).to(self.world.widest).reshape(())


class TimedStage(PipelineStage):
    """A stage that times its passes; the time between them counts as idle."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        stage: Any = self.submod
        stage.stopwatch.lap("wait")
        output = super().forward_one_chunk(*args, **kwargs)
        stage.stopwatch.lap("forward")
        return output

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward pass; after a failure, return zero gradients."""
        stage: Any = self.submod
        if stage.failure is None:
            try:
                return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            except Exception as error:  # of any type, because the other ranks must be informed
                # torch 2.13 wraps the error in one that lists all shapes.
                is_wrapped = "Failed to run stage backward" in str(error)
                stage.fail(error.__cause__ if is_wrapped and isinstance(error.__cause__, Exception) else error)
        inputs = bwd_kwargs["input_values"]
        return tuple(torch.zeros_like(value) if value.requires_grad else None for value in inputs), None

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        stage: Any = self.submod
        stage.stopwatch.lap("wait")
        if kwargs["last_backward"]:  # the last one of this step; torch 2.13 passes the flag by keyword
            stage.before_last_pass()
        output = super().backward_one_chunk(*args, **kwargs)
        stage.stopwatch.lap("backward")
        return output


class ReplayedCall:
    """Handles a call of the model by returning an output computed elsewhere; a second call is an error."""

    def __init__(self, output: Any) -> None:
        self.output = [output]

    def __call__(self, *_: Any, **__: Any) -> Any:
        if not self.output:
            raise TaskFault(
                "in a pipeline, loss() must call the model once per batch, but calls it again",
                where="parallelism=pipeline",
                fix="call it once with a larger batch, or use parallelism=ddp",
            )
        return self.output.pop()


class PassOutcome(NamedTuple):
    """Result of a pass on this rank, and the description of the input of this rank's stage."""

    failure: Exception | None
    shapes: list[Any]


def run_stage(
    stage: Stage,
    world: World,
    call: Call,
    forward: Callable[[], AbstractContextManager[Any]],
    finish: Callable[[Any], None],
) -> PassOutcome:
    """Run one call of the model through this rank's stage: receive the input, compute, and send the output onward.

    finish  called with the model's output, on the last stage

    A stage that fails sends the error's text instead of an output, so that no rank blocks. The outcome then has the
    exception itself on the rank that failed, and RankLost with the text on later ranks.
    """
    failure: Exception | None = None
    value: Any = ()
    if stage.number:
        value = p2p_messages.receive(stage.number - 1, world, world.device)
        if isinstance(value, p2p_messages.RemoteFailure):
            failure, value = RankLost(value.text, where="parallelism=pipeline"), ()
    shapes = Shapes.describe(value)
    if failure is None:
        try:
            with forward():
                value = stage.compute(call, value)
            if stage.is_last:
                finish(value)
            else:
                tensors = value if type(value) is tuple else (value,)
                if not tensors or not all(isinstance(part, Tensor) and part.is_floating_point() for part in tensors):
                    raise TaskFault(
                        "the output of a stage must be a floating-point tensor or a tuple of such tensors, but is"
                        f" {_describe_type(value)} after stage {stage.number}",
                        where="parallelism=pipeline",
                        fix="split the model at other points in layers()",
                    )
        except Exception as error:  # of any type, because the other ranks must be informed
            failure = error
    if not stage.is_last:
        sent = value if failure is None else p2p_messages.RemoteFailure(format_error_line(failure))
        p2p_messages.send(sent, stage.number + 1, world, world.device)
    return PassOutcome(failure, shapes)


def micro_batch_seed(number: int, stage: int = 0) -> int:
    """Return the seed of a micro-batch for random numbers in the loss (`stage` 0) or in a stage's layers (from 1)."""
    return (number + stage * 0x9E3779B97F4A7C15) % 2**63


def hash_shapes(call: Call) -> int:
    """Return a hash of the shapes and dtypes of a call, the same in every process."""
    shapes: list[str] = []
    map_tensors(lambda tensor: shapes.append(f"{tuple(tensor.shape)} {tensor.dtype}"), [call.inputs, call.named])
    # 7 bytes, because the hash is sent as an int64. Not `hash`, which differs between processes for strings.
    return int.from_bytes(hashlib.blake2b("; ".join(shapes).encode(), digest_size=7).digest(), "big")


def _sendable(tensor: Tensor) -> Tensor:
    """Return a tensor that can be sent and that accepts a gradient, even if all layers before it are frozen."""
    tensor = tensor.contiguous()
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def _describe_type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    return f"a tuple ({', '.join(map(_describe_type, value))})" if type(value) is tuple else type(value).__name__
