"""Predict the memory of each pipeline stage: assign the layers to ranks and trace each rank on fake weights.

The traced run uses torch's own schedule. The other ranks are simulated, so the tensors received from them are fake.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from runner.base.batch import count_samples, map_tensors
from runner.config.configuration import Choice
from runner.distributed.join import simulated_world
from runner.distributed.layer_costs import LayerCost, detach_inputs, estimate_costs, measure_saved_bytes
from runner.distributed.layer_placement import (
    Placement,
    PlacementRequest,
    check_layers,
    format_stage_device,
    plan_placement,
)
from runner.distributed.parallel import Sums
from runner.distributed.pipelined import Pipelined, model_not_called_error
from runner.distributed.stages import Call, ModelCalled, Shapes
from runner.engine.contract.contract_checks import validate_example, validate_modules
from runner.engine.contract.task_loading import task_errors
from runner.engine.parts.assemble import assemble
from runner.engine.parts.train_order import make_order
from runner.forecast.cuda_autocast import CudaAutocastMode
from runner.forecast.fake_mode import AllocationRecorder, FakeRun
from runner.forecast.memory_forecast import plan_for_host
from runner.forecast.phase_tracer import PhaseTracer
from runner.plan.memory_trace import ComputeCost, Traced
from runner.plan.run_plan import PhasePlan, Plan
from runner.workload import partition
from runner.workload.division import Batch

UNKNOWN_DEVICE_BYTES = 2**50  # assumed bytes of a device of unknown size


class StagePrediction:
    """Trace of a plan with parallelism=pipeline, stage by stage. Exit the context to free its memory."""

    def __init__(self, plan: Plan) -> None:
        choice = plan.choices["parallelism"]
        self.full_plan, self.options, self.count = plan, choice.options, plan.batch.stages
        self.phases = [phase for phase in plan.selected if phase.kind == "train"]
        self.prefetches = plan.choices["prefetch"].uses("stream")
        is_gpu = plan.device.startswith("cuda")
        self.autocast: Callable[[], AbstractContextManager[Any]] = CudaAutocastMode if is_gpu else nullcontext
        host = plan_for_host(plan)
        self.plan = dataclasses.replace(
            host, choices={**host.choices, "parallelism": Choice("single", "single", {})}
        )  # `_trace_rank` adds the pipeline
        self._stack = ExitStack()

    def __enter__(self) -> StagePrediction:
        """Build the model and measure its layers. Raises TaskFault if the task does not declare its layers."""
        self.fake_run = FakeRun(AllocationRecorder())
        with _ignore_warnings(), self.fake_run, self.fake_run.fake_parameters():
            self.parts = assemble(self.plan, self._stack)
        with task_errors(self.parts.source, "layers()"):
            self.layers = validate_modules(self.parts.task.layers(), self.parts.task.layers, self.parts.source)
        check_layers(self.parts.bare, self.layers)
        with _ignore_warnings(), self.fake_run:
            self.costs, self.num_samples = self._measure_costs()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def plan_placement(self, size: int) -> Placement:
        """Return the placement of the layers for micro-batches of this size. Raises ConfigError if none fits."""
        share = max(self.full_plan.batch.shares)
        costs = [
            dataclasses.replace(cost, activation_bytes=math.ceil(cost.activation_bytes * size / self.num_samples))
            for cost in self.costs
        ]
        ranks = self.full_plan.ranks
        devices = [
            partition.StageDevice(
                min(rank.memory_bytes or UNKNOWN_DEVICE_BYTES for rank in ranks[stage :: self.count]),
                1.0,
                format_stage_device(range(stage, len(ranks), self.count), ranks[stage].device),
            )
            for stage in range(self.count)
        ]
        options = self.options
        number = -(-share // size)
        request = PlacementRequest(options["schedule"], number, options["split"], options["balance"], samples=size)
        return plan_placement(costs, devices, request)

    def trace(self, phase: PhasePlan, size: int) -> list[Traced]:
        """Return a trace per stage for this phase and micro-batch size. Raises ConfigError if no placement fits."""
        split = self.plan_placement(size).split
        many = -(-max(phase.batch.shares) // size)
        few = min(many, self.count + 1)  # at most `count` micro-batches are in flight, and one more waits
        batch = Batch(few * size, size, (few * size,), stages=self.count)
        traced_phase = dataclasses.replace(phase, batch=batch)
        with _ignore_warnings(), self.autocast():
            shapes = self._find_shapes(traced_phase, split)
            return [self._trace_rank(traced_phase, split, shapes, rank, many) for rank in range(self.count)]

    def _measure_costs(self) -> tuple[list[LayerCost], int]:
        """Return the costs of the layers, measured on the task's example as in a run, and the example's sample count.

        `seconds` holds FLOPs, because a trace cannot be timed. Without an example, the costs are estimated.
        """
        model, task, costs = self.parts.bare, self.parts.task, []
        try:
            value: Any = validate_example(task.example(), task.example, self.parts.source)
        except NotImplementedError:
            return estimate_costs(model, self.layers), 1
        size = count_samples(value)
        recorder = self.fake_run.recorder
        for number, (cost, layer) in enumerate(zip(estimate_costs(model, self.layers), self.layers, strict=True)):
            recorder.stage = cost.name
            call = (lambda given, layer=layer: layer(*given)) if number == 0 else layer
            kept, value = measure_saved_bytes(layer, call, detach_inputs(value))
            done = recorder.work.get(recorder.stage)
            costs.append(dataclasses.replace(cost, activation_bytes=kept, seconds=float(done.flops if done else 0)))
        return costs, size

    def _find_shapes(self, phase: PhasePlan, split: partition.Split) -> list[Shapes]:
        task = self.parts.task
        fetcher = self.parts.splits.fetcher("train")
        order = dataclasses.replace(
            make_order(self.parts, phase, fetcher), micro_batch_size=phase.batch.micro_batch_size, is_lockstep=False
        )
        batch = fetcher[next(order.from_update(0))].batch
        starts = [stage.start for stage in split.ranges]
        shapes = []
        with self.fake_run, torch.no_grad(), self.parts.precision.forward():
            call = _capture_call(self.parts.bare, lambda model: task.losses.get(phase.name, task.loss)(model, batch))
            value: Any = ()
            for number, layer in enumerate(self.layers):
                if number in starts:
                    shapes.append(Shapes.from_description(Shapes.describe(value)))
                value = layer(value) if number else layer(*call.inputs, **call.named)
        return shapes

    def _trace_rank(
        self, phase: PhasePlan, split: partition.Split, shapes: Sequence[Shapes], rank: int, many: int
    ) -> Traced:
        fake_run = FakeRun(AllocationRecorder())
        with ExitStack() as stack:
            world = stack.enter_context(simulated_world(rank, self.count))
            with fake_run, fake_run.fake_parameters():
                parts = assemble(self.plan, stack, world)
                parallel = Pipelined(world, schedule=self.options["schedule"], split=split.sizes)
                model = parallel.wrap(parts.bare, parts.task.layers, [])
            parts = dataclasses.replace(parts, parallel=parallel, model=model)
            nbytes = parallel.set_shapes(shapes)
            received = ComputeCost(received=nbytes)
            tracer = StageTracer(parts, phase, fake_run, self.prefetches)
            traced = tracer.trace()
            traced = dataclasses.replace(traced, work=traced.work + received)
            if self.options["schedule"] == "gpipe":
                nbytes += sum(block.size for block in tracer.saved_blocks)
            return _add_micro_batches(traced, many - phase.batch.accumulation_steps, nbytes)


class StageTracer(PhaseTracer):
    """Trace the rank that runs a stage."""

    def trace(self) -> Traced:
        assert isinstance(self.parts.parallel, Pipelined)
        parallel = self.parts.parallel
        parallel.stage.forward = self._wrap_forward(parallel.stage.forward)  # type: ignore[method-assign]
        parallel.reduce = self._wrap_reduce(parallel)  # type: ignore[assignment, method-assign]
        return super().trace()

    def after_update(self) -> None:
        # The first traced update has only one micro-batch. Discard its schedule and receive buffers: a run has no such
        # update, and they would add to the peak.
        self.parts.parallel.begin([])

    def _wrap_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*received: Any) -> Any:
            with self.forward():
                return forward(*received)

        return wrapped

    def _wrap_reduce(self, parallel: Pipelined) -> Callable[[Sums], Sums]:
        reduce = parallel.reduce

        def wrapped(sums: Sums) -> Sums:
            reduced = reduce(sums)
            if not parallel.stage.is_last:  # gradients are divided by the items that the last stage counts
                reduced.items.fill_(1)  # type: ignore[union-attr]
            return reduced

        return wrapped


def _add_micro_batches(traced: Traced, others: int, nbytes: int) -> Traced:
    """Return the trace with `others` additional micro-batches of the traced size, which wait to be processed.

    nbytes  bytes that the stage receives for each of them, and with gpipe also those saved for its backward pass
    """
    inputs = others * (traced.peak.inputs // traced.accumulation_steps)
    peak = dataclasses.replace(
        traced.peak, inputs=traced.peak.inputs + inputs, temporary=traced.peak.temporary + others * nbytes
    )
    more = inputs + others * nbytes
    events = ((-1, more), *traced.events) if more else traced.events
    return dataclasses.replace(
        traced, peak=peak, events=events, without_gradients_bytes=traced.without_gradients_bytes + more
    )


def _capture_call(model: nn.Module, ask: Callable[[nn.Module], Any]) -> Call:
    def called(*inputs: Any, **named: Any) -> Any:
        raise ModelCalled(Call(inputs, named))

    own = vars(model).get("forward")
    vars(model)["forward"] = called
    try:
        ask(model)
    except ModelCalled as found:
        return map_tensors(lambda tensor: tensor.detach(), found.call)  # type: ignore[no-any-return]
    finally:
        del vars(model)["forward"]
        if own is not None:
            vars(model)["forward"] = own
    raise model_not_called_error()


@contextmanager
def _ignore_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
