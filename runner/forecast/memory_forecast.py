"""Predict the memory and time of training without the device, by running the training code on fake weights."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from runner.axes.memory import recompute_blocks
from runner.base.errors import AccelRunError, TaskFault
from runner.base.text import first_line
from runner.config.configuration import Choice, Configuration
from runner.config.options import task_source
from runner.engine.contract.error_diagnosis import make_task_fault
from runner.engine.parts.assemble import Parts, assemble
from runner.engine.update.coupled import is_coupled
from runner.forecast.cuda_autocast import CudaAutocastMode
from runner.forecast.fake_mode import AllocationRecorder, FakeRun, NotTraceable
from runner.forecast.phase_tracer import PhaseTracer
from runner.forecast.statistics_tracer import StatisticsTracer
from runner.plan.cuda_allocator import AllocatorSettings
from runner.plan.inventory import Inventory, read_cpu
from runner.plan.memory_fit import Demand, predict_memory
from runner.plan.memory_trace import Blocks, Bytes, ComputeCost, Layer, ModelSizes, Traced, choose_recomputed_blocks
from runner.plan.planner import make_plan
from runner.plan.rank_devices import RankDevice
from runner.plan.run_plan import PhasePlan, Plan, rank_part
from runner.workload.division import Batch

Result = TypeVar("Result")
NUM_MEASURED = 2  # samples that are computed with real weights if a task cannot be traced


def forecast(configuration: Configuration, inventory: Inventory, micro_batch_sizes: Sequence[int]) -> list[Traced]:
    """Return the demand of a single process on a device of the inventory, per phase and micro-batch size.

    Precision, optimizer kernel and similar options are those planned for the device; the kernels run on a CPU and
    nothing is compiled. Raises the exceptions of the task. Call it in a subprocess.
    """
    with Forecast(configuration, inventory) as prediction:
        return [traced for size in micro_batch_sizes for traced in prediction.trace(size)]


class _NeedsRealWeights(Exception):
    """A fork cannot trace the model on fake weights."""


class Forecast:
    """Trace a configuration with any number of micro-batch sizes; the model is built once.

    Exit the context to free the memory.

    If a model cannot be traced on fake weights, but the machine has enough memory, the model is built with real weights
    and measured with few samples, and the result states this. Otherwise, `trace` raises NotTraceable.
    """

    def __init__(
        self, configuration: Configuration, inventory: Inventory, ranks: Sequence[RankDevice] | None = None
    ) -> None:
        self.configuration = configuration
        full_plan = make_plan(configuration, inventory, ranks)
        self.shares = {phase.name: max(phase.batch.shares) for phase in full_plan.phases}
        # One process of the run, with the number format of all ranks.
        single = {"parallelism": Choice("single", "single", {}), "precision": full_plan.choices["precision"]}
        choices = {**configuration.choices, **single}
        sources = {key: source for key, source in configuration.sources.items() if not key.startswith("parallelism")}
        of_one = dataclasses.replace(configuration, choices=choices, sources=sources)
        plan = make_plan(of_one, inventory, ranks and ranks[:1])
        self.prefetches = plan.choices["prefetch"].uses("stream")
        self.is_gpu = plan.device.startswith("cuda")
        self.autocast: Callable[[], AbstractContextManager[Any]] = CudaAutocastMode if self.is_gpu else nullcontext
        self.plan = plan_for_host(plan)
        self.full_plan = full_plan
        self.has_budget = _has_budget(full_plan)
        self.has_buckets = full_plan.choices["parallelism"].uses("ddp") and full_plan.world_size > 1
        self.phases = self.plan.selected
        self._stack = ExitStack()
        self._parts: Parts | None = None
        self._fake_run = FakeRun(AllocationRecorder())
        self._why_not = ""
        self._in_fork = False

    def __enter__(self) -> Forecast:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts = None
        self._stack.close()

    def trace_in_fork(self, parts: Sequence[tuple[int, Collection[str]]]) -> list[list[Traced]] | None:
        """Call `trace` for each micro-batch size and phases, in a fork of the process that has built the model.

        Returns None if the model must be measured with real weights, which need memory in each fork.
        """
        torch.set_num_threads(1)  # a fork does not have the threads of its parent, and would wait for them
        self._in_fork = True
        try:
            return [self.trace(size, names) for size, names in parts]
        except _NeedsRealWeights:
            return None

    def trace(self, micro_batch_size: int, names: Collection[str] | None = None) -> list[Traced]:
        """Return the demand of each phase, or only of the phases in `names`, with this micro-batch size.

        With a memory budget, all training phases are traced, because the same blocks are recomputed in each of them.
        """
        phases = [phase for phase in self.phases if names is None or phase.name in names]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            statistics = [self._trace_statistics(phase, micro_batch_size) for phase in phases if phase.kind == "fit"]
        training = [phase for phase in phases if phase.kind == "train"]
        if training and self.has_budget:
            return [*statistics, *self._trace_with_budget(micro_batch_size)]
        return [*statistics, *self._trace_phases(training, micro_batch_size)]

    def _trace_with_budget(self, micro_batch_size: int) -> list[Traced]:
        phases = [phase for phase in self.phases if phase.kind == "train"]
        known: dict[Blocks, list[Traced]] = {}

        def trace_with(blocks: Blocks) -> list[Traced]:
            if blocks not in known:
                known[blocks] = self._trace_phases(phases, micro_batch_size, blocks)
            return known[blocks]

        def excess(blocks: Blocks) -> int:
            return max(map(self._excess_bytes, trace_with(blocks)))

        largest = max(trace_with(()), key=lambda traced: traced.peak.total)
        chosen = choose_recomputed_blocks(largest.blocks, excess, 0)
        return [dataclasses.replace(traced, recompute=chosen) for traced in trace_with(chosen)]

    def _excess_bytes(self, traced: Traced) -> int:
        """Return by how many bytes the predicted memory exceeds the device's; the maximum over all ranks.

        Options of fsdp that are `auto` are assumed to be those that need the least memory, which the plan would choose.
        """
        plan, choices = self.full_plan, self.configuration.choices
        demand = Demand.from_traces([traced], AllocatorSettings.parse(plan.choices["memory"].options.get("allocator")))
        phase = plan.phase(traced.phase)
        assert phase is not None, "phases of the plan are traced"
        part = rank_part(plan.choices["parallelism"], phase)
        automatic = {key for key, value in choices["parallelism"].options.items() if value == "auto"}
        part = dataclasses.replace(
            part,
            gathers_model=part.gathers_model and "evaluation" not in automatic,
            shards_gradients=part.shards_gradients or "gradients" in automatic,
        )
        predictions = [
            predict_memory(demand, traced.micro_batch_size, rank, part.for_rank(number))
            for number, rank in enumerate(plan.ranks)
        ]
        return max(prediction.total - prediction.capacity for prediction in predictions if prediction.capacity)

    def _trace_phases(self, phases: Sequence[PhasePlan], size: int, recompute: Blocks = ()) -> list[Traced]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = self._try_fake_weights(lambda: [self._trace_phase(phase, size, recompute) for phase in phases])
            if traced is not None:
                return traced
            return [self._measure_phase(phase, size, recompute) for phase in phases]

    def _try_fake_weights(self, call: Callable[[], Result]) -> Result | None:
        """Return the result of `call`, or None if it fails or an earlier call has failed.

        After a failure, the model is built with real weights. Raises NotTraceable if it is too large for that.
        """
        if self._why_not:
            return None
        try:
            return call()
        except Exception as error:
            if isinstance(error, AccelRunError) and not isinstance(error, TaskFault):
                raise  # the real run would raise it too
            if self._in_fork:
                raise _NeedsRealWeights from error
            self._why_not = _describe_failure(error, self._source)
            if self._parts is not None and not has_room(self._parts.bare):
                raise NotTraceable(f"{self._why_not}; the model is too large to be measured here") from None
            self.__exit__()
            return None

    @property
    def can_fork(self) -> bool:
        """Whether the model is built on fake weights, which need no memory in a fork."""
        return self._parts is not None and not self._why_not

    def build(self) -> None:
        """Build the model, on fake weights if possible."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._try_fake_weights(self._build)

    @property
    def least(self) -> int:
        """Smallest batch size that can be traced; 1 until the model is built."""
        return 1 if self._parts is None else min_batch_size(self._parts.bare)

    @property
    def _source(self) -> Path:
        file = self.plan.task_file
        return task_source(self.plan.choices["task"].name, Path(file) if file else None)

    def _build(self) -> Parts:
        if self._parts is None:
            with self._fake_run, nullcontext() if self._why_not else self._fake_run.fake_parameters():
                self._parts = assemble(self.plan, self._stack)
        return self._parts

    def _trace_phase(self, phase: PhasePlan, size: int, recompute: Blocks) -> Traced:
        parts = self._build()
        steps = -(-self.shares[phase.name] // size)
        caveat = ""
        if is_coupled(parts.task, phase.name):  # such an update holds the inputs and embeddings of all micro-batches
            caveat = "the loss also takes the embeddings of other ranks" if self.has_buckets else ""
        else:
            steps = min(2, steps)  # further micro-batches use no more memory than two
        batch = Batch(size * steps, size, (size * steps,))
        phase = dataclasses.replace(phase, batch=batch)
        with recompute_blocks(parts.bare, parts.task.blocks(), recompute), self.autocast():
            return PhaseTracer(parts, phase, self._fake_run, self.prefetches, caveat).trace()

    def _trace_statistics(self, phase: PhasePlan, size: int) -> Traced:
        """Trace a phase of kind fit as on a CPU, with real batches; on a GPU, `Fit.add` may compute differently.

        A model that needs real weights is not measured with few samples and scaled, because all samples can be computed
        if there is no backward pass. A failure must not hide the demand of other phases, so the result describes it.
        """
        parts = self._try_fake_weights(self._build) or self._build()
        steps = min(2, -(-self.shares[phase.name] // size))  # further micro-batches use no more memory than two
        phase = dataclasses.replace(phase, batch=Batch(size * steps, size, (size * steps,)))
        try:
            with self.autocast():
                traced = StatisticsTracer(parts, phase, self._fake_run, self.prefetches).trace()
        except Exception as error:
            why = f"phase {phase.name}: {_describe_failure(error, self._source)}"
        else:
            if not self.is_gpu:
                return traced
            why = traced.why_not or f"phase {phase.name} of kind fit is traced as on a CPU"
            return dataclasses.replace(traced, why_not=why)
        sizes = {
            "parameters": sum(weight.nbytes for weight in parts.bare.parameters()),
            "buffers": sum(buffer.nbytes for buffer in parts.bare.buffers()),
        }
        events = tuple(enumerate(sizes.values()))
        return Traced(
            phase.name, size, 1, Bytes(**sizes), events, (), (), ComputeCost(), ComputeCost(),
            ModelSizes(shapes_repeat=True), why_not=f"{why}; only the model is counted",
        )  # fmt: skip

    def _measure_phase(self, phase: PhasePlan, size: int, recompute: Blocks) -> Traced:
        """Measure a few samples and scale the result to the requested size."""
        measured = min(size, NUM_MEASURED)
        why_not = f"{self._why_not}; measured with {measured} sample{'s' * (measured > 1)} and scaled"
        return scale_trace(self._trace_phase(phase, measured, recompute), size / measured, size, why_not)


def min_batch_size(model: nn.Module) -> int:
    """Return the smallest batch size for training the model: batch norm over vectors needs two samples."""
    return 2 if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()) else 1


def scale_trace(measured: Traced, factor: float, size: int, why_not: str) -> Traced:
    """Scale a measurement of few samples by `factor`, and mark it as scaled."""

    def scaled(number: int) -> int:
        return math.ceil(number * factor)

    peak = measured.peak
    fixed = peak.parameters + peak.buffers + peak.optimizer
    return dataclasses.replace(
        measured,
        without_gradients_bytes=fixed + scaled(max(0, measured.without_gradients_bytes - fixed)),
        micro_batch_size=size,
        peak=dataclasses.replace(
            peak, activations=scaled(peak.activations), inputs=scaled(peak.inputs), temporary=scaled(peak.temporary)
        ),
        layers=tuple(Layer(one.name, scaled(one.activations), scaled(one.flops)) for one in measured.layers),
        blocks=tuple(Layer(one.name, scaled(one.activations), scaled(one.flops)) for one in measured.blocks),
        work=measured.work.scale(factor),
        why_not=why_not,
    )


def _describe_failure(error: BaseException, source: Path) -> str:
    fault = error if isinstance(error, TaskFault) else make_task_fault(error, source, "tracing it")
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    where = f"{Path(fault.problems[0].where).name}: " if fault is not None and fault.problems[0].where else ""
    return f"{where}{first_line(str(root)) or type(root).__name__}"


def has_room(model: nn.Module) -> bool:
    """Return True if the model with its gradients and optimizer state fits into half of this machine's memory."""
    memory = read_cpu()[0].memory_bytes
    return not memory or 4 * sum(weight.nbytes for weight in model.parameters()) <= memory // 2


def _has_budget(plan: Plan) -> bool:
    memory = plan.choices["memory"]
    is_automatic = memory.uses("budget") and memory.options["recompute"] == "auto"
    return is_automatic and any(rank.capacity_bytes for rank in plan.ranks)


def plan_for_host(plan: Plan) -> Plan:
    """Return the plan with the same numerics, for a single process on a CPU."""
    replaced = {"compile": Choice("off", "off", {}), "prefetch": Choice("none", "none", {})}
    memory = plan.choices["memory"]
    options = {**memory.options, "fraction": None, "allocator": None}
    if options.get("recompute") == "auto":
        options["recompute"] = []  # the blocks are chosen while the run is traced
    memory = dataclasses.replace(memory, options=options)
    rank = dataclasses.replace(plan.ranks[0], device="cpu")
    return dataclasses.replace(plan, ranks=(rank,), choices={**plan.choices, **replaced, "memory": memory})
