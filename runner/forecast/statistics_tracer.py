"""Trace a phase that fits statistics: its state, its batches, and what adding a batch to the state allocates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.batch import MicroBatch, map_tensors
from runner.base.noise import without_samples
from runner.base.task import Progress
from runner.engine.parts.assemble import Parts
from runner.engine.parts.phase_kinds import StatisticsPhase
from runner.engine.update.loop import Position
from runner.forecast.cuda_autocast import GpuAutocastMode
from runner.forecast.fake_mode import FakeRun, record_layers
from runner.forecast.phase_tracer import NUM_UPDATES, PhaseTracer, find_peak
from runner.plan.memory_trace import ComputeCost, Traced
from runner.plan.run_plan import PhasePlan


class StatisticsTracer(PhaseTracer):
    """Trace one phase of kind fit with one micro-batch size.

    device  the GPU of the run: everything on it is fake, because `Fit.add` may compute differently there, such as in
            float64. None: a CPU, where batches and state are real, so that operations may depend on their values

    The results of the statistics are not computed: `Fit.finish` needs values that a trace does not have.
    """

    def __init__(
        self, parts: Parts, phase: PhasePlan, fake_run: FakeRun, prefetches: bool, device: torch.device | None
    ) -> None:
        super().__init__(parts, phase, fake_run, prefetches)
        self.device = device

    def trace(self) -> Traced:
        """Trace two updates and return their demand, without the time, which depends on the data loader."""
        with ExitStack() as stack:
            if self.device is not None:
                stack.enter_context(self._on_gpu(self.device))
            order, fetcher = self._open_phase()
            stack.enter_context(self.fake_run)
            stack.enter_context(record_layers(self.recorder, self.parts.bare))
            stack.enter_context(without_samples())
            self.recorder.kind = "statistics"
            position = Position(self.phase.name)
            self.work = StatisticsPhase(self.phase, self.parts, order, position)
            self.recorder.kind = "temporary"
            batches = self._prefetch(self._read(order, fetcher))
            stack.enter_context(self.fake_run.without_values())
            for _ in range(min(NUM_UPDATES, self.work.total)):
                self.parts.task.begin_update(Progress(self.phase.name, position.update, NUM_UPDATES, 0.0))
                self.recorder.convolved.clear()
                next(self.work.updates(batches))
                self.convolved.append(set(self.recorder.convolved))
                self._record_state()
                self.after_update()
            self._check_traceable()
            return self._make_statistics()

    def _make_statistics(self) -> Traced:
        events, why_not = tuple(self.recorder.events), self._why_not()
        peak = find_peak(events, self.recorder.blocks)
        return Traced(
            phase=self.phase.name,
            micro_batch_size=self.phase.batch.micro_batch_size,
            accumulation_steps=self.phase.batch.accumulation_steps,
            peak=peak,
            events=events,
            layers=(),
            blocks=(),
            work=ComputeCost(),
            step=ComputeCost(),
            model=dataclasses.replace(
                self._measure_model(), shapes_repeat=all(shapes == self.convolved[0] for shapes in self.convolved)
            ),
            without_gradients_bytes=peak.total,
            is_exact=not why_not,
            why_not=why_not,
        )

    def move(self, item: MicroBatch) -> MicroBatch:
        """Return the micro-batch on the GPU; the previous one has been added to the state."""
        self._record_state()
        device = self.device
        return item if device is None else item._replace(batch=map_tensors(lambda value: value.to(device), item.batch))

    def _record_state(self) -> None:
        for value in self.work.gathered.values():
            self.recorder.record_tensor(value, "statistics")

    @contextmanager
    def _on_gpu(self, device: torch.device) -> Iterator[None]:
        """Use fake tensors of the GPU for the model, and its autocast for `Fit.add`."""
        parts = self.parts
        precision: Any = _GpuPrecision(parts.precision.dtype)
        world = dataclasses.replace(parts.world, device=device)
        self.parts = dataclasses.replace(parts, world=world, precision=precision)
        try:
            with self.fake_run.on_gpu(), _moved_to(parts.bare, device, self.fake_run):
                yield
        finally:
            self.parts = parts


class _GpuPrecision:
    """The forward context of a precision on a GPU."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def forward(self) -> GpuAutocastMode:
        return GpuAutocastMode(self.dtype)


@contextmanager
def _moved_to(model: nn.Module, device: torch.device, fake_run: FakeRun) -> Iterator[None]:
    """Replace parameters and buffers by fake tensors of the device; those that are shared stay shared."""
    places: list[tuple[Any, str, Tensor]] = [
        (owner, name, tensor)
        for module in model.modules()
        for owner in (module._parameters, module._buffers)
        for name, tensor in owner.items()
        if tensor is not None
    ]
    moved: dict[Tensor, Any] = {}
    with fake_run:
        for _, _, tensor in places:
            if tensor not in moved:
                value = tensor.detach().to(device)
                is_parameter = isinstance(tensor, nn.Parameter)
                moved[tensor] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    for owner, name, tensor in places:
        owner[name] = moved[tensor]
    try:
        yield
    finally:
        for owner, name, tensor in places:
            owner[name] = tensor
