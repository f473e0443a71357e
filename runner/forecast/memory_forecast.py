"""Predict the memory and time of training without the device, by running the training code on fake weights."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from runner.axes.memory import recompute_blocks
from runner.axes.optimizer import build_optimizer, is_under
from runner.base.batch import MicroBatch, map_tensors
from runner.base.division import Batch
from runner.base.errors import AccelRunError, TaskFault
from runner.base.noise import without_samples
from runner.base.optimizer_state import expected_state_bytes, state_tensors
from runner.base.order import MicroBatchKey, Order
from runner.base.task import Progress
from runner.base.text import first_line, format_bytes
from runner.config.configuration import Choice, Configuration
from runner.config.options import task_source
from runner.distributed.parallel import ForwardPasses, Parallel, Sums
from runner.distributed.reducer import bucket_sizes
from runner.engine.assemble import Parts, assemble
from runner.engine.coupled import is_coupled
from runner.engine.cuda_autocast import CudaAutocastMode
from runner.engine.error_diagnosis import make_task_fault
from runner.engine.loop import Position, train_updates
from runner.engine.objective_phase import make_phase_kind
from runner.engine.phase_kinds import GradientPhase
from runner.engine.train_order import make_order
from runner.forecast.fake_mode import CONVOLUTIONS, AllocationLedger, FakeRun, NotTraceable, StorageBlock, record_layers
from runner.plan.inventory import Inventory, read_cpu
from runner.plan.memory_fit import tensor_capacity
from runner.plan.memory_trace import (
    Blocks,
    Bytes,
    ComputeCost,
    Event,
    Layer,
    ModelSizes,
    Traced,
    choose_recomputed_blocks,
)
from runner.plan.planner import make_plan
from runner.plan.run_plan import PhasePlan, Plan

NUM_MEASURED = 2  # samples of a real run if a task cannot be traced
PASS_KINDS = ("activations", "temporary")
MIN_GROWTH_BYTES = 1024  # less may be losses and norms
NUM_UPDATES = 2  # the first update creates the optimizer state


def forecast(configuration: Configuration, inventory: Inventory, micro_batch_sizes: Sequence[int]) -> list[Traced]:
    """Return the demand of a single process on a device of the inventory, per training phase and micro-batch size.

    Precision, optimizer kernel and similar options are those planned for the device; the kernels run on a CPU and
    nothing is compiled. Raises the exceptions of the task. Call it in a subprocess.
    """
    with Forecast(configuration, inventory) as prediction:
        return [traced for size in micro_batch_sizes for traced in prediction.trace(size)]


class Forecast:
    """Trace of a configuration, built once for any number of micro-batch sizes. Exit the context to free its memory.

    A model that cannot be traced on fake weights is built with real ones and measured with few samples if the machine
    has enough memory; otherwise only parameter sizes are known. Both cases are marked in the result.
    """

    def __init__(self, configuration: Configuration, inventory: Inventory) -> None:
        full_plan = make_plan(configuration, inventory)
        self.shares = {phase.name: max(phase.batch.shares) for phase in full_plan.phases}
        plan = make_plan(single_process(configuration), inventory)
        self.prefetches = plan.choices["prefetch"].function == "stream"
        is_gpu = plan.device.startswith("cuda")
        self.autocast: Callable[[], AbstractContextManager[Any]] = CudaAutocastMode if is_gpu else nullcontext
        self.plan = plan_for_host(plan)
        self.limit = _budget_limit(full_plan)
        self.has_buckets = full_plan.choices["parallelism"].function == "ddp" and full_plan.world_size > 1
        self.phases = [phase for phase in self.plan.selected if phase.kind == "train"]
        self._stack = ExitStack()
        self._parts: Parts | None = None
        self._fake_run = FakeRun(AllocationLedger())
        self._why_not = ""
        self._is_too_large = False  # measured on this machine

    def __enter__(self) -> Forecast:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts = None
        self._stack.close()

    def trace(self, micro_batch_size: int, names: Collection[str] | None = None) -> list[Traced]:
        """Return the demand of each training phase, or of those with these names, with this micro-batch size.

        With a memory budget, all phases are traced, because the same blocks are recomputed in each of them.
        """
        if not self.limit:
            phases = self.phases if names is None else [phase for phase in self.phases if phase.name in names]
            return self._trace_phases(phases, micro_batch_size)
        known: dict[Blocks, list[Traced]] = {}

        def trace_with(blocks: Blocks) -> list[Traced]:
            if blocks not in known:
                known[blocks] = self._trace_phases(self.phases, micro_batch_size, blocks)
            return known[blocks]

        def takes(blocks: Blocks) -> int:
            return max(traced.peak.total + traced.model.trained * self.has_buckets for traced in trace_with(blocks))

        largest = max(trace_with(()), key=lambda traced: traced.peak.total)
        chosen = choose_recomputed_blocks(largest.blocks, takes, self.limit)
        return [dataclasses.replace(traced, recompute=chosen) for traced in trace_with(chosen)]

    def _trace_phases(self, phases: Sequence[PhasePlan], size: int, recompute: Blocks = ()) -> list[Traced]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not self._why_not:
                try:
                    return [self._trace_phase(phase, size, recompute) for phase in phases]
                except Exception as error:
                    if isinstance(error, AccelRunError) and not isinstance(error, TaskFault):
                        raise  # the real run would raise it too
                    self._why_not = _describe_failure(error, self._source)
                    if self._parts is not None and not has_room(self._parts.bare):
                        self._is_too_large = True
                    else:
                        self.__exit__()
            if self._is_too_large:
                return [self._count_parameters(phase, size) for phase in phases]
            return [self._measure_phase(phase, size, recompute) for phase in phases]

    @property
    def least(self) -> int:
        """Smallest batch size that can be traced, once the model is built."""
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
        if is_coupled(parts.task, phase.name):  # inputs and embeddings of all micro-batches are held
            caveat = "the loss also takes the embeddings of other ranks" if self.has_buckets else ""
        else:
            steps = min(2, steps)  # further micro-batches use no more memory than two
        batch = Batch(size * steps, size, (size * steps,))
        phase = dataclasses.replace(phase, batch=batch, updates=NUM_UPDATES, epochs=None)
        with recompute_blocks(parts.bare, parts.task.blocks(), recompute), self.autocast():
            return PhaseTracer(parts, phase, self._fake_run, self.prefetches, caveat).trace()

    def _measure_phase(self, phase: PhasePlan, size: int, recompute: Blocks) -> Traced:
        """Measure a few samples and scale the result to the requested size."""
        measured = min(size, NUM_MEASURED)
        why_not = f"{self._why_not}; measured with {measured} sample{'s' * (measured > 1)} and multiplied"
        return scale_trace(self._trace_phase(phase, measured, recompute), size / measured, size, why_not)

    def _count_parameters(self, phase: PhasePlan, size: int) -> Traced:
        """Return the known part of the demand: parameters, gradients and optimizer state."""
        model = self._build().bare
        trained = [
            (name, weight)
            for name, weight in model.named_parameters()
            if weight.requires_grad and (phase.trains is None or any(is_under(name, prefix) for prefix in phase.trains))
        ]
        optimizer = build_optimizer(phase.optimizer.function, trained, phase.optimizer.options)
        sizes = {
            "parameters": sum(weight.nbytes for weight in model.parameters()),
            "buffers": sum(buffer.nbytes for buffer in model.buffers()),
            "gradients": sum(weight.nbytes for _, weight in trained),
            "optimizer": expected_state_bytes(optimizer),
        }
        if _keeps_average(self.plan):
            sizes["optimizer"] += sizes["gradients"]
        why_not = f"{self._why_not}; the model is too large to be measured here, so activations are not counted"
        events = tuple((number, taken) for number, taken in enumerate(sizes.values()) if taken)
        known = Traced(
            phase.name, size, 1, Bytes(**sizes), events, (), (), ComputeCost(), ComputeCost(),
            is_exact=False, why_not=why_not,
        )  # fmt: skip
        without = known.peak.total - known.peak.gradients
        found = _measure_model(model, self._build().task.blocks(), [weight for _, weight in trained])
        return dataclasses.replace(known, without_gradients_bytes=without, model=found)


def min_batch_size(model: nn.Module) -> int:
    """Return the smallest batch size for training the model: batch norm over vectors needs two samples."""
    return 2 if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()) else 1


class PhaseTracer:
    """Trace one phase with one micro-batch size."""

    def __init__(self, parts: Parts, phase: PhasePlan, fake_run: FakeRun, prefetches: bool, caveat: str = "") -> None:
        self.caveat = caveat  # why a run may need more than what is traced
        self.parts, self.phase, self.fake_run, self.prefetches = parts, phase, fake_run, prefetches
        self.ledger = fake_run.ledger = AllocationLedger()
        self.saved_blocks: list[StorageBlock] = []  # activations of the latest forward pass
        self.trained: list[nn.Parameter] = []
        self.kept_bytes: list[int] = []  # of tensors created in passes that are alive after each update
        self.batches: list[int] = []  # bytes of each batch
        self.convolved: list[set[tuple[str, tuple[int, ...]]]] = []  # layers with the shapes they convolve, by update

    def trace(self) -> Traced:
        """Trace two updates and return their demand."""
        parts, phase, ledger = self.parts, self.phase, self.ledger
        self.fake_run.untraceable = ""
        for kind, tensors in (("parameters", parts.bare.parameters()), ("buffers", parts.bare.buffers())):
            for tensor in tensors:
                if tensor.device.type != "meta":  # tensors of other pipeline stages are on meta
                    ledger.record_tensor(tensor, kind)
        parts.task.begin_phase(phase.name)
        fetcher = parts.fetcher("train")
        micro = phase.batch.micro_batch_size
        order = dataclasses.replace(
            make_order(parts, phase, fetcher), micro_batch_size=micro, shares=(), rank=0, is_lockstep=False
        )
        position = Position(phase.name)

        def read() -> Iterator[MicroBatch]:
            for key in self._micro_batches(order):
                with _disable_current_modes():
                    item = fetcher[key]
                size = self._record_inputs(item.batch)
                if len(key.indices) == phase.batch.micro_batch_size:
                    self.batches.append(size)
                yield item
                del item

        with self.fake_run, record_layers(ledger, parts.bare), without_samples(), ExitStack() as stack:
            ledger.kind = "optimizer"
            work = make_phase_kind(phase, parts, order, position)
            assert isinstance(work, GradientPhase), "phases without gradients are not traced"
            self.trained = [*work.owned.values()]
            averages = [weight.detach().clone() for weight in self.trained] if _keeps_average(parts.plan) else []
            ledger.kind = "temporary"
            stack.callback(averages.clear)
            stack.callback(work.release)
            for weight in self.trained:
                hook = weight.register_post_accumulate_grad_hook(self._record_gradient)  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
            training = work.inputs.wrap_forward(self._wrap_loss)
            stack.enter_context(self._mark_update(parts.parallel))
            batches = self._prefetch(read())
            for _ in range(NUM_UPDATES):
                ledger.work.clear()
                ledger.layer_flops.clear()
                ledger.convolved.clear()
                ledger.stage = "forward"
                parts.task.begin_update(Progress(phase.name, position.update, NUM_UPDATES, 0.0))
                next(train_updates(training, batches, position.update + 1))
                for tensor in (tensor for optimizer in training.optimizers for tensor in state_tensors(optimizer)):
                    ledger.record_tensor(tensor, "optimizer")
                self.convolved.append(set(ledger.convolved))
                self.after_update()
            # The task caught the exception, so it took a path that a real run would not take.
            if self.fake_run.untraceable:
                raise NotTraceable(self.fake_run.untraceable)
            return self._make_result(tuple(ledger.events))

    def _micro_batches(self, order: Order) -> Iterator[MicroBatchKey]:
        """Yield the micro-batches to trace: one is enough for the first update, which creates the optimizer state."""
        update = 0
        if not is_coupled(self.parts.task, self.phase.name):
            first = next(order.micro_batches(update))
            yield first._replace(last=True)
            update += 1
        yield from order.from_update(update)

    def _record_inputs(self, batch: Any) -> int:
        blocks: list[StorageBlock | None] = []
        map_tensors(lambda tensor: blocks.append(self.ledger.record_tensor(tensor, "inputs")), batch)
        return sum(block.size for block in blocks if block)

    def after_update(self) -> None:
        """Record which tensors of the update's passes are still alive."""
        self.kept_bytes.append(sum(block.size for block in self.ledger.blocks_in_use() if block.kind in PASS_KINDS))

    def _prefetch(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the batches and keep each alive until the next is requested, as prefetching does."""
        batch = next(batches)
        while True:
            following = next(batches) if self.prefetches else None
            yield batch
            batch = following or next(batches)

    def _wrap_loss(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def wrapped(model: Any, batch: Any) -> Any:
            with self.forward():
                return loss(model, batch)

        return wrapped

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record tensors created inside that are alive at exit as saved for the backward pass."""
        first = len(self.ledger.blocks)
        self.ledger.stage, self.fake_run.answers_zero = "forward", False
        try:
            yield
        finally:
            self.fake_run.answers_zero = True
        self.saved_blocks = [
            b for b in self.ledger.blocks_in_use() if b.number >= first and b.kind in ("temporary", "activations")
        ]
        for block in self.saved_blocks:
            block.kind = "activations"
        self.ledger.stage = "backward"

    @contextmanager
    def _mark_update(self, parallel: Parallel) -> Iterator[None]:
        """After the passes of the strategy, attribute the work inside to the update."""
        prediction = parallel.accumulate

        def accumulate(passes: ForwardPasses, batches: Iterator[MicroBatch]) -> Sums:
            sums = prediction(passes, batches)
            self.ledger.stage = "update"
            return sums

        vars(parallel)["accumulate"] = accumulate
        try:
            yield
        finally:
            del vars(parallel)["accumulate"]

    def _record_gradient(self, weight: Tensor) -> None:
        if weight.grad is not None:
            self.ledger.record_tensor(weight.grad, "gradients")

    def _make_result(self, events: tuple[Event, ...]) -> Traced:
        ledger, steps = self.ledger, self.phase.batch.accumulation_steps
        by_layer: dict[str, int] = dict.fromkeys(ledger.layer_flops, 0)
        for block in self.saved_blocks:
            by_layer[block.layer] = by_layer.get(block.layer, 0) + block.size
        layers = tuple(Layer(name, size, ledger.layer_flops.get(name, 0) // steps) for name, size in by_layer.items())
        names = {module: name for name, module in self.parts.bare.named_modules()}
        units = {names.get(block, "?"): block for block in self.parts.task.blocks()}
        try:
            num_layers: int | None = len(self.parts.task.layers())
        except NotImplementedError:
            num_layers = None
        others = [event for event in events if ledger.blocks[event[0]].kind != "gradients"]
        passes = ledger.work["forward"] + ledger.work["backward"]
        why_not = self._why_not()
        return Traced(
            phase=self.phase.name,
            micro_batch_size=self.phase.batch.micro_batch_size,
            accumulation_steps=steps,
            peak=find_peak(events, ledger.blocks),
            events=events,
            layers=layers,
            blocks=tuple(_sum_submodules(name, layers) for name in units),
            work=passes.merge(passes, lambda total, _: total // steps),
            step=ledger.work["update"],
            model=dataclasses.replace(
                _measure_model(self.parts.bare, list(units.values()), self.trained, num_layers),
                shapes_repeat=all(shapes == self.convolved[0] for shapes in self.convolved),
            ),
            without_gradients_bytes=find_peak(others, ledger.blocks).total,
            is_exact=not why_not,
            why_not=why_not,
        )

    def _why_not(self) -> str:
        scaled = self.kept_bytes[-1] - self.kept_bytes[0] if self.kept_bytes else 0
        if scaled > MIN_GROWTH_BYTES:
            return f"after each update, the task keeps {format_bytes(scaled)} more than after the previous one"
        least, most = min(self.batches, default=0), max(self.batches, default=0)
        if least < most:
            samples = self.phase.batch.micro_batch_size
            sizes = f"batches of {samples} have {format_bytes(least)} to {format_bytes(most)}"
            return f"{sizes}, and larger ones than the traced batch need more"
        return self.caveat


def _measure_model(
    model: nn.Module, blocks: Sequence[nn.Module], trained: Sequence[nn.Parameter], num_layers: int | None = None
) -> ModelSizes:
    own = [block for block in blocks if block is not model]
    inside = {weight for block in own for weight in block.parameters()}
    return ModelSizes(
        block=max((sum(weight.nbytes for weight in block.parameters()) for block in own), default=0),
        outside=sum(weight.nbytes for weight in model.parameters() if weight not in inside),
        row=sum(weight.nbytes // max(1, len(weight) if weight.dim() else 1) for weight in model.parameters()),
        trained=sum(weight.nbytes for weight in trained),
        widest=max((weight.nbytes for weight in trained), default=0),
        num_layers=num_layers,
        buckets=bucket_sizes(trained),
        num_convolutions=sum(isinstance(module, CONVOLUTIONS) for module in model.modules()),
    )


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
        is_exact=False,
        why_not=why_not,
    )


def _sum_submodules(name: str, layers: Sequence[Layer]) -> Layer:
    inside = [layer for layer in layers if layer.name == name or layer.name.startswith(f"{name}.")]
    return Layer(name, sum(layer.activations for layer in inside), sum(layer.flops for layer in inside))


def _describe_failure(error: BaseException, source: Path) -> str:
    fault = error if isinstance(error, TaskFault) else make_task_fault(error, source, "tracing it")
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    where = f"{Path(fault.problems[0].where).name}: " if fault is not None and fault.problems[0].where else ""
    return f"{where}{first_line(str(root)) or type(root).__name__}"


def has_room(model: nn.Module) -> bool:
    """Return True if gradients and state of the model fit into half of this machine's memory."""
    memory = read_cpu()[0].memory_bytes
    return not memory or 4 * sum(weight.nbytes for weight in model.parameters()) <= memory // 2


def find_peak(events: Sequence[Event], blocks: Sequence[StorageBlock]) -> Bytes:
    """Return the blocks in use at the moment of peak memory."""
    most = size = moment = 0
    alive: dict[int, int] = {}
    for number, (block, change) in enumerate(events):
        size += change or -alive.pop(block)
        if change:
            alive[block] = change
            if size > most:
                most, moment = size, number
    alive.clear()
    for block, change in events[: moment + 1]:
        if change:
            alive[block] = change
        else:
            del alive[block]
    kinds = dict.fromkeys((field.name for field in dataclasses.fields(Bytes)), 0)
    for block, size in alive.items():
        kinds[blocks[block].kind] += size
    return Bytes(**kinds)


def single_process(configuration: Configuration) -> Configuration:
    """Return the configuration of a single process without distributed options."""
    choices = {**configuration.choices, "parallelism": Choice("single", "single", {})}
    return dataclasses.replace(configuration, choices=choices, sources={})


def _budget_limit(plan: Plan) -> int:
    memory = plan.choices["memory"]
    if memory.function != "budget" or memory.options["recompute"] != "auto":
        return 0
    known = [tensor_capacity(rank) for rank in plan.ranks if rank.capacity_bytes]
    return min(known, default=0)


def _keeps_average(plan: Plan) -> bool:
    return plan.choices["averaging"].function != "none"


def plan_for_host(plan: Plan) -> Plan:
    """Return the plan with the same numerics, for a single process on a CPU."""
    replaced = {"compile": Choice("off", "off", {}), "prefetch": Choice("none", "none", {})}
    memory = plan.choices["memory"]
    options = {**memory.options, "fraction": None, "allocator": None}
    if options.get("recompute") == "auto":
        options["recompute"] = []  # tried one after another
    memory = dataclasses.replace(memory, options=options)
    rank = dataclasses.replace(plan.ranks[0], device="cpu")
    return dataclasses.replace(plan, ranks=(rank,), choices={**plan.choices, **replaced, "memory": memory})
