"""Predict the memory and time of training without the device, by running the training code on fake weights."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
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
from runner.base.task import Progress
from runner.base.text import first_line, format_bytes
from runner.config.configuration import Choice, Configuration
from runner.config.options import task_source
from runner.distributed.parallel import ForwardPasses, Parallel, Sums
from runner.engine.assemble import Parts, assemble
from runner.engine.coupled import is_coupled
from runner.engine.cuda_autocast import CudaAutocastMode
from runner.engine.error_diagnosis import make_task_fault
from runner.engine.loop import Position, train_updates
from runner.engine.objective_phase import make_phase_kind
from runner.engine.phase_kinds import GradientPhase
from runner.engine.train_order import make_order
from runner.forecast.fake_mode import AllocationLedger, CheckpointedBlock, FakeRun, NotTraceable, in_layers
from runner.plan.inventory import Inventory, read_cpu
from runner.plan.memory_fit import tensors_within
from runner.plan.memory_trace import Bytes, ComputeCost, Event, Layer, ModelSizes, Traced
from runner.plan.planner import make_plan
from runner.plan.recompute_budget import Blocks, computed_again
from runner.plan.run_plan import PhasePlan, Plan

FEW = 2  # number of samples of a real run if a task cannot be traced
PASSING = ("activations", "temporary")
FEW_BYTES = 1024  # size of losses and norms, in bytes
UPDATES = 2  # the first update creates the optimizer state


def forecast(configuration: Configuration, inventory: Inventory, micro_batch_sizes: Sequence[int]) -> list[Traced]:
    """Return the demand of a single process on a device of the inventory, per training phase and micro-batch size.

    Precision, optimizer kernel and similar options are those planned for the device; the kernels run on a CPU and
    nothing is compiled. Raises what the task raises. Call it in a subprocess.
    """
    with Forecast(configuration, inventory) as made:
        return [traced for size in micro_batch_sizes for traced in made.of(size)]


class Forecast:
    """Trace of a configuration, built once for any number of micro-batch sizes. Exit the context to free its memory.

    A model that cannot be traced on fake weights is built for real and measured with few samples if the machine has
    enough memory; otherwise only parameter sizes are known. Both cases are marked in the result.
    """

    def __init__(self, configuration: Configuration, inventory: Inventory) -> None:
        of_ranks = make_plan(configuration, inventory)
        self.shares = {phase.name: max(phase.batch.shares) for phase in of_ranks.phases}
        plan = make_plan(alone(configuration), inventory)
        self.keeps_ahead = plan.choices["prefetch"].function == "stream"
        is_gpu = plan.device.startswith("cuda")
        self.autocast: Callable[[], AbstractContextManager[Any]] = CudaAutocastMode if is_gpu else nullcontext
        self.plan = on_the_host(plan)
        self.limit = _limit(of_ranks)
        self.has_buckets = of_ranks.choices["parallelism"].function == "ddp" and of_ranks.world_size > 1
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

    def of(self, micro_batch_size: int) -> list[Traced]:
        """Return the demand of each training phase with this micro-batch size."""
        if not self.limit:
            return self._all(micro_batch_size)
        known: dict[Blocks, list[Traced]] = {}

        def with_these(blocks: Blocks) -> list[Traced]:
            if blocks not in known:
                known[blocks] = self._all(micro_batch_size, blocks)
            return known[blocks]

        def takes(blocks: Blocks) -> int:
            return max(traced.peak.total + traced.model.trained * self.has_buckets for traced in with_these(blocks))

        largest = max(with_these(()), key=lambda traced: traced.peak.total)
        chosen = computed_again(largest.blocks, takes, self.limit)
        return [dataclasses.replace(traced, recompute=chosen) for traced in with_these(chosen)]

    def _all(self, size: int, recompute: Blocks = ()) -> list[Traced]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not self._why_not:
                try:
                    return [self._followed(phase, size, recompute) for phase in self.phases]
                except Exception as error:
                    if isinstance(error, AccelRunError) and not isinstance(error, TaskFault):
                        raise  # the real run would raise it too
                    self._why_not = _words(error, self._source)
                    if self._parts is not None and not has_room(self._parts.bare):
                        self._is_too_large = True
                    else:
                        self.__exit__()
            if self._is_too_large:
                return [self._of_parameters(phase, size) for phase in self.phases]
            return [self._measured(phase, size, recompute) for phase in self.phases]

    @property
    def least(self) -> int:
        """Smallest number of samples that is traced, once the model is built."""
        return 1 if self._parts is None else least_samples(self._parts.bare)

    @property
    def _source(self) -> Path:
        file = self.plan.task_file
        return task_source(self.plan.choices["task"].name, Path(file) if file else None)

    def _built(self) -> Parts:
        if self._parts is None:
            with self._fake_run, nullcontext() if self._why_not else self._fake_run.building():
                self._parts = assemble(self.plan, self._stack)
        return self._parts

    def _followed(self, phase: PhasePlan, size: int, recompute: Blocks) -> Traced:
        parts = self._built()
        steps = -(-self.shares[phase.name] // size)
        caveat = ""
        if is_coupled(parts.task, phase.name):  # inputs and embeddings of all micro-batches are held
            caveat = "the loss also takes the embeddings of other ranks" if self.has_buckets else ""
        else:
            steps = min(2, steps)  # further micro-batches use no more memory than two
        batch = Batch(size * steps, size, (size * steps,))
        phase = dataclasses.replace(phase, batch=batch, updates=UPDATES, epochs=None)
        blocks = list(dict.fromkeys(parts.task.blocks()))
        with recompute_blocks([blocks[number] for number in recompute]), self.autocast():
            return Follower(parts, phase, self._fake_run, self.keeps_ahead, caveat).follow()

    def _measured(self, phase: PhasePlan, size: int, recompute: Blocks) -> Traced:
        """Measure a few samples and scale the result to the requested size."""
        few = min(size, FEW)
        why_not = f"{self._why_not}; measured with {few} sample{'s' * (few > 1)} and multiplied"
        return times(self._followed(phase, few, recompute), size / few, size, why_not)

    def _of_parameters(self, phase: PhasePlan, size: int) -> Traced:
        """Return the known part of the demand: parameters, gradients and optimizer state."""
        model = self._built().bare
        trained = [
            (name, weight)
            for name, weight in model.named_parameters()
            if weight.requires_grad and (phase.trains is None or any(is_under(name, one) for one in phase.trains))
        ]
        optimizer = build_optimizer(phase.optimizer.function, trained, phase.optimizer.options)
        sizes = {
            "parameters": sum(weight.nbytes for weight in model.parameters()),
            "buffers": sum(buffer.nbytes for buffer in model.buffers()),
            "gradients": sum(weight.nbytes for _, weight in trained),
            "optimizer": expected_state_bytes(optimizer),
        }
        if _averages(self.plan):
            sizes["optimizer"] += sizes["gradients"]
        why_not = f"{self._why_not}; the model is too large to be measured here, so activations are not counted"
        events = tuple((number, taken) for number, taken in enumerate(sizes.values()) if taken)
        known = Traced(
            phase.name,
            size,
            1,
            Bytes(**sizes),
            events,
            (),
            (),
            ComputeCost(),
            ComputeCost(),
            is_exact=False,
            why_not=why_not,
        )
        without = known.peak.total - known.peak.gradients
        found = _sizes_of(model, self._built().task.blocks(), [weight for _, weight in trained])
        return dataclasses.replace(known, without_bytes=without, model=found)


def least_samples(model: nn.Module) -> int:
    """Return the smallest batch size for training the model: batch norm over vectors needs two samples."""
    return 2 if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()) else 1


class Follower:
    """Trace one phase with one micro-batch size."""

    def __init__(self, parts: Parts, phase: PhasePlan, phantom: FakeRun, keeps_ahead: bool, caveat: str = "") -> None:
        self.caveat = caveat  # why a run may need more than what is traced
        self.parts, self.phase, self.phantom, self.keeps_ahead = parts, phase, phantom, keeps_ahead
        self.ledger = phantom.ledger = AllocationLedger()
        self.kept: list[CheckpointedBlock] = []  # activations of the latest forward pass
        self.trained: list[nn.Parameter] = []
        self.left: list[int] = []  # bytes of tensors that were created in passes and are alive after each update
        self.batches: list[int] = []  # bytes of each batch

    def follow(self) -> Traced:
        """Trace two updates and return their demand."""
        parts, phase, ledger = self.parts, self.phase, self.ledger
        self.phantom.refused = ""
        for kind, tensors in (("parameters", parts.bare.parameters()), ("buffers", parts.bare.buffers())):
            for tensor in tensors:
                if tensor.device.type != "meta":  # tensors of other pipeline stages are on meta
                    ledger.saw(tensor, kind)
        parts.task.begin_phase(phase.name)
        fetcher = parts.fetcher("train")
        micro = phase.batch.micro_batch_size
        order = dataclasses.replace(
            make_order(parts, phase, fetcher), micro_batch_size=micro, shares=(), rank=0, in_step=False
        )
        position = Position(phase.name)

        def read() -> Iterator[MicroBatch]:
            for key in order.from_update(0):
                with _disable_current_modes():
                    item = fetcher[key]
                size = self._received(item.batch)
                if len(key.indices) == phase.batch.micro_batch_size:
                    self.batches.append(size)
                yield item
                del item

        with self.phantom, in_layers(ledger, parts.bare), without_samples(), ExitStack() as stack:
            ledger.kind = "optimizer"
            work = make_phase_kind(phase, parts, order, position)
            assert isinstance(work, GradientPhase), "phases without gradients are not traced"
            self.trained = [*work.owned.values()]
            averages = [weight.detach().clone() for weight in self.trained] if _averages(parts.plan) else []
            ledger.kind = "temporary"
            stack.callback(averages.clear)
            stack.callback(work.release)
            for weight in self.trained:
                hook = weight.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
            training = work.inputs.wrap_forward(self._watched)
            stack.enter_context(self._noticed(parts.parallel))
            batches = self._handed_out(read())
            for _ in range(UPDATES):
                ledger.work.clear()
                ledger.flops_of.clear()
                ledger.stage = "forward"
                parts.task.begin_update(Progress(phase.name, position.update, UPDATES, 0.0))
                next(train_updates(training, batches, position.update + 1))
                for tensor in (tensor for optimizer in training.optimizers for tensor in state_tensors(optimizer)):
                    ledger.saw(tensor, "optimizer")
                self.updated()
            if self.phantom.refused:  # the task caught the exception, so it took a path that a real run would not take
                raise NotTraceable(self.phantom.refused)
            return self._told(tuple(ledger.events))

    def _received(self, batch: Any) -> int:
        """Return the bytes of a batch, which count as inputs from now on."""
        blocks: list[CheckpointedBlock | None] = []
        map_tensors(lambda tensor: blocks.append(self.ledger.saw(tensor, "inputs")), batch)
        return sum(block.size for block in blocks if block)

    def updated(self) -> None:
        """Record which tensors of the update's passes are still alive."""
        self.left.append(sum(block.size for block in self.ledger.alive() if block.kind in PASSING))

    def _handed_out(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the batches and keep each alive until the next is requested, as prefetching does."""
        batch = next(batches)
        while True:
            following = next(batches) if self.keeps_ahead else None
            yield batch
            batch = following or next(batches)

    def _watched(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def watched(model: Any, batch: Any) -> Any:
            with self.forward():
                return loss(model, batch)

        return watched

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record tensors created inside that are alive at exit as saved for the backward pass."""
        first = len(self.ledger.blocks)
        self.ledger.stage, self.phantom.answers = "forward", False
        try:
            yield
        finally:
            self.phantom.answers = True
        self.kept = [b for b in self.ledger.alive() if b.number >= first and b.kind in ("temporary", "activations")]
        for block in self.kept:
            block.kind = "activations"
        self.ledger.stage = "backward"

    @contextmanager
    def _noticed(self, parallel: Parallel) -> Iterator[None]:
        """After the passes of the strategy, attribute the work inside to the update."""
        made = parallel.accumulate

        def accumulate(passes: ForwardPasses, batches: Iterator[MicroBatch]) -> Sums:
            sums = made(passes, batches)
            self.ledger.stage = "update"
            return sums

        vars(parallel)["accumulate"] = accumulate
        try:
            yield
        finally:
            del vars(parallel)["accumulate"]

    def _note_gradient(self, weight: Tensor) -> None:
        if weight.grad is not None:
            self.ledger.saw(weight.grad, "gradients")

    def _told(self, events: tuple[Event, ...]) -> Traced:
        ledger, steps = self.ledger, self.phase.batch.accumulation_steps
        by_layer: dict[str, int] = dict.fromkeys(ledger.flops_of, 0)
        for block in self.kept:
            by_layer[block.layer] = by_layer.get(block.layer, 0) + block.size
        layers = tuple(Layer(name, size, ledger.flops_of.get(name, 0) // steps) for name, size in by_layer.items())
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
            peak=peak_of(events, ledger.blocks),
            events=events,
            layers=layers,
            blocks=tuple(_all_inside(name, layers) for name in units),
            work=ComputeCost(passes.flops // steps, passes.moved_bytes // steps, passes.launches // steps),
            step=ledger.work["update"],
            model=_sizes_of(self.parts.bare, list(units.values()), self.trained, num_layers),
            without_bytes=peak_of(others, ledger.blocks).total,
            is_exact=not why_not,
            why_not=why_not,
        )

    def _why_not(self) -> str:
        """Return why other updates may need more than the traced ones, or nothing."""
        grown = self.left[-1] - self.left[0] if self.left else 0
        if grown > FEW_BYTES:
            return f"after each update, the task keeps {format_bytes(grown)} more than after the previous one"
        least, most = min(self.batches, default=0), max(self.batches, default=0)
        if least < most:
            samples = self.phase.batch.micro_batch_size
            said = f"batches of {samples} have {format_bytes(least)} to {format_bytes(most)}"
            return f"{said}, and larger ones than the traced batch need more"
        return self.caveat


def _sizes_of(
    model: nn.Module, blocks: Sequence[nn.Module], trained: Sequence[nn.Parameter], num_layers: int | None = None
) -> ModelSizes:
    """Return the sizes that depend on parameters only."""
    own = [block for block in blocks if block is not model]
    inside = {weight for block in own for weight in block.parameters()}
    return ModelSizes(
        block=max((sum(weight.nbytes for weight in block.parameters()) for block in own), default=0),
        outside=sum(weight.nbytes for weight in model.parameters() if weight not in inside),
        row=sum(weight.nbytes // max(1, len(weight) if weight.dim() else 1) for weight in model.parameters()),
        trained=sum(weight.nbytes for weight in trained),
        widest=max((weight.nbytes for weight in trained), default=0),
        num_layers=num_layers,
    )


def times(few: Traced, factor: float, size: int, why_not: str) -> Traced:
    """Scale a measurement of few samples by `factor`, and mark it as scaled."""

    def grown(number: int) -> int:
        return math.ceil(number * factor)

    peak = few.peak
    fixed = peak.parameters + peak.buffers + peak.optimizer
    return dataclasses.replace(
        few,
        without_bytes=fixed + grown(max(0, few.without_bytes - fixed)),
        micro_batch_size=size,
        peak=dataclasses.replace(
            peak,
            activations=grown(peak.activations),
            inputs=grown(peak.inputs),
            temporary=grown(peak.temporary),
        ),
        layers=tuple(Layer(one.name, grown(one.activations), grown(one.flops)) for one in few.layers),
        blocks=tuple(Layer(one.name, grown(one.activations), grown(one.flops)) for one in few.blocks),
        work=ComputeCost(grown(few.work.flops), grown(few.work.moved_bytes), few.work.launches),
        is_exact=False,
        why_not=why_not,
    )


def _all_inside(name: str, layers: Sequence[Layer]) -> Layer:
    """Return a module and all of its submodules."""
    inside = [one for one in layers if one.name == name or one.name.startswith(f"{name}.")]
    return Layer(name, sum(one.activations for one in inside), sum(one.flops for one in inside))


def _words(error: BaseException, source: Path) -> str:
    """Return which operation cannot be traced and the task line that calls it."""
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


def peak_of(events: Sequence[Event], blocks: Sequence[CheckpointedBlock]) -> Bytes:
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
    kinds = dict.fromkeys((one.name for one in dataclasses.fields(Bytes)), 0)
    for block, there in alive.items():
        kinds[blocks[block].kind] += there
    return Bytes(**kinds)


def alone(configuration: Configuration) -> Configuration:
    """Return the configuration of a single process without distributed options."""
    choices = {**configuration.choices, "parallelism": Choice("single", "single", {})}
    return dataclasses.replace(configuration, choices=choices, sources={})


def _limit(plan: Plan) -> int:
    """Return the byte limit for memory=budget, or 0 for other options."""
    memory = plan.choices["memory"]
    if memory.function != "budget" or memory.options["recompute"] != "auto":
        return 0
    known = [tensors_within(rank) for rank in plan.ranks if rank.capacity_bytes]
    return min(known, default=0)


def _averages(plan: Plan) -> bool:
    """Return True if an averaged copy of the trained weights is kept."""
    return plan.choices["averaging"].function != "none"


def on_the_host(plan: Plan) -> Plan:
    """Return the plan with the same numerics, for a single process on a CPU."""
    replaced = {
        "compile": Choice("off", "off", {}),
        "prefetch": Choice("none", "none", {}),
    }
    memory = plan.choices["memory"]
    options = {**memory.options, "fraction": None, "allocator": None}
    if options.get("recompute") == "auto":
        options["recompute"] = []  # tried one after another
    memory = dataclasses.replace(memory, options=options)
    rank = dataclasses.replace(plan.ranks[0], device="cpu")
    return dataclasses.replace(plan, ranks=(rank,), choices={**plan.choices, **replaced, "memory": memory})
