"""Trace a training phase on fake weights with one micro-batch size."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from runner.base.batch import MicroBatch, map_tensors
from runner.base.errors import ConfigError
from runner.base.noise import replace_dropout_keys, without_samples
from runner.base.order import MicroBatchKey, Order
from runner.base.task import Progress
from runner.base.text import format_bytes
from runner.distributed.parallel import ForwardPasses, Parallel, Sums
from runner.distributed.reducer import bucket_sizes
from runner.engine.parts.assemble import Parts
from runner.engine.parts.objective_phase import make_phase_kind
from runner.engine.parts.phase_kinds import GradientPhase
from runner.engine.parts.train_order import make_order
from runner.engine.update.coupled import is_coupled
from runner.engine.update.loop import Position, train_updates
from runner.forecast.fake_mode import (
    CONVOLUTIONS,
    AllocationRecorder,
    FakeRun,
    NotTraceable,
    StorageBlock,
    record_layers,
)
from runner.loading.fetcher import Fetcher
from runner.plan.memory_trace import Bytes, ComputeCost, Event, Layer, ModelSizes, Traced
from runner.plan.run_plan import PhasePlan
from runner.tensors.optimizer_state import state_tensors

GROWING_KINDS = ("activations", "temporary", "statistics")  # kinds of the tensors that an update creates
MIN_GROWTH_BYTES = 1024  # smaller growth may be losses and norms, which a run keeps
NUM_UPDATES = 2  # the first update creates the optimizer state


class PhaseTracer:
    """Trace one phase with one micro-batch size."""

    def __init__(self, parts: Parts, phase: PhasePlan, fake_run: FakeRun, prefetches: bool, caveat: str = "") -> None:
        self.caveat = caveat  # why a run may need more memory than is traced
        self.parts, self.phase, self.fake_run, self.prefetches = parts, phase, fake_run, prefetches
        self.recorder = fake_run.recorder = AllocationRecorder()
        self.saved_blocks: list[StorageBlock] = []  # activations of the latest forward pass
        self.trained: list[nn.Parameter] = []
        self.kept_bytes: list[int] = []  # after each update, bytes of tensors from its passes that are still alive
        self.batches: list[int] = []  # bytes of each batch
        self.read_s: list[float] = []  # reading time per sample of each micro-batch, in seconds
        self.convolved: list[set[tuple[str, tuple[int, ...]]]] = []  # layers with the shapes they convolve, by update

    def trace(self) -> Traced:
        """Trace two updates and return their memory and work."""
        parts, phase, recorder = self.parts, self.phase, self.recorder
        order, fetcher = self._open_phase()
        position = Position(phase.name)
        with self.fake_run, record_layers(recorder, parts.bare), without_samples(), ExitStack() as stack:
            recorder.kind = "optimizer"
            work = make_phase_kind(phase, parts, order, position)
            assert isinstance(work, GradientPhase), "see StatisticsTracer"
            self.trained = [*work.owned.values()]
            is_averaged = not parts.plan.choices["averaging"].uses("none")
            averages = [weight.detach().clone() for weight in self.trained if is_averaged]
            recorder.kind = "temporary"
            stack.callback(averages.clear)
            stack.callback(work.release)
            for weight in self.trained:
                hook = weight.register_post_accumulate_grad_hook(self._record_gradient)  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
            stack.enter_context(replace_dropout_keys(self.fake_run.hide_dropout_mask))
            training = work.inputs.wrap_forward(self._wrap_loss)
            stack.enter_context(self._mark_update(parts.parallel))
            batches = self._prefetch(self._read(order, fetcher))
            for _ in range(NUM_UPDATES):
                # Only the operations of the last update count, because the first one also creates the optimizer state.
                recorder.work.clear()
                recorder.layer_flops.clear()
                recorder.convolved.clear()
                recorder.stage = "forward"
                parts.task.begin_update(Progress(phase.name, position.update, NUM_UPDATES, 0.0))
                next(train_updates(training, batches, position.update + 1))
                for tensor in (tensor for optimizer in training.optimizers for tensor in state_tensors(optimizer)):
                    recorder.record_tensor(tensor, "optimizer")
                self.convolved.append(set(recorder.convolved))
                self.after_update()
            self._check_traceable()
            return self._make_result()

    def _open_phase(self) -> tuple[Order, Fetcher]:
        """Record the model and begin the phase; return the order of the samples and their source."""
        parts, phase = self.parts, self.phase
        self.fake_run.untraceable = ""
        for kind, tensors in (("parameters", parts.bare.parameters()), ("buffers", parts.bare.buffers())):
            for tensor in tensors:
                if tensor.device.type != "meta":  # tensors of other pipeline stages are on meta
                    self.recorder.record_tensor(tensor, kind)
        parts.task.begin_phase(phase.name)
        fetcher = parts.splits.fetcher("train")
        order = dataclasses.replace(
            make_order(parts, phase, fetcher),
            micro_batch_size=phase.batch.micro_batch_size,
            shares=(),
            rank=0,
            is_lockstep=False,
        )
        return order, fetcher

    def _read(self, order: Order, fetcher: Fetcher) -> Iterator[MicroBatch]:
        """Yield the micro-batches to trace."""
        for key in self._micro_batches(order):
            # Reading data is not traced. `_disable_current_modes` is private to torch.
            with _disable_current_modes():
                began = time.perf_counter()
                item = fetcher[key]
                self.read_s.append((time.perf_counter() - began) / len(key.indices))
            self.before_batch()
            size = self._record_inputs(item.batch)
            if len(key.indices) == self.phase.batch.micro_batch_size:
                self.batches.append(size)
            yield item
            del item  # this frame must not keep the batch alive

    def before_batch(self) -> None:
        """Do nothing: a hook for subclasses, called before each micro-batch is recorded."""

    def _check_traceable(self) -> None:
        """Raise NotTraceable again if the task caught it, because a real run would not take the same path."""
        if self.fake_run.untraceable:
            raise NotTraceable(self.fake_run.untraceable)

    def _micro_batches(self, order: Order) -> Iterator[MicroBatchKey]:
        """Yield the micro-batches to trace; the first update, which creates the optimizer state, needs only one."""
        update = 0
        if not is_coupled(self.parts.task, self.phase.name):
            first = next(order.micro_batches(update))
            yield first._replace(last=True)
            update += 1
        yield from order.from_update(update)

    def _record_inputs(self, batch: Any) -> int:
        blocks: list[StorageBlock | None] = []
        map_tensors(lambda tensor: blocks.append(self.recorder.record_tensor(tensor, "inputs")), batch)
        return sum(block.size for block in blocks if block)

    def after_update(self) -> None:
        """Record how many bytes of the update's passes are still alive."""
        self.kept_bytes.append(
            sum(block.size for block in self.recorder.blocks_in_use() if block.kind in GROWING_KINDS)
        )

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
        """Record tensors that are created in the context and alive at its exit as saved for the backward pass."""
        first = len(self.recorder.blocks)
        self.recorder.stage = "forward"
        with self.fake_run.without_values():
            yield
        self.saved_blocks = [
            b for b in self.recorder.blocks_in_use() if b.number >= first and b.kind in ("temporary", "activations")
        ]
        for block in self.saved_blocks:
            block.kind = "activations"
        self.recorder.stage = "backward"

    @contextmanager
    def _mark_update(self, parallel: Parallel) -> Iterator[None]:
        """Within the context, attribute the work that follows the strategy's passes to the optimizer step."""
        original = parallel.accumulate

        def accumulate(passes: ForwardPasses, batches: Iterator[MicroBatch]) -> Sums:
            sums = original(passes, batches)
            self.recorder.stage = "update"
            return sums

        vars(parallel)["accumulate"] = accumulate
        try:
            yield
        finally:
            del vars(parallel)["accumulate"]

    def _record_gradient(self, weight: Tensor) -> None:
        if weight.grad is not None:
            self.recorder.record_tensor(weight.grad, "gradients")

    def _make_result(self) -> Traced:
        parts, recorder, steps = self.parts, self.recorder, self.phase.batch.accumulation_steps
        events, work = tuple(recorder.events), recorder.work
        names = {module: name for name, module in parts.bare.named_modules()}
        by_layer: dict[str, int] = dict.fromkeys(recorder.layer_flops, 0)
        for block in self.saved_blocks:
            by_layer[block.layer] = by_layer.get(block.layer, 0) + block.size
        layers = tuple(Layer(name, size, recorder.layer_flops.get(name, 0) // steps) for name, size in by_layer.items())
        others = [event for event in events if recorder.blocks[event[0]].kind != "gradients"]
        passes = work.get("forward", ComputeCost()) + work.get("backward", ComputeCost())
        return Traced(
            phase=self.phase.name,
            micro_batch_size=self.phase.batch.micro_batch_size,
            accumulation_steps=steps,
            peak=find_peak(events, recorder.blocks),
            events=events,
            layers=layers,
            blocks=tuple(_sum_submodules(names.get(block, "?"), layers) for block in parts.task.blocks()),
            work=passes.merge(passes, lambda total, _: total // steps),
            step=work.get("update", ComputeCost()),
            model=self.measure_model(),
            without_gradients_bytes=find_peak(others, recorder.blocks).total,
            why_not=self._why_not(),
            # The first read may open files. The fastest of the others is the least disturbed by other processes.
            read_s=min(self.read_s[1:], default=None),
        )

    def measure_model(self) -> ModelSizes:
        """Return the sizes in bytes from which the memory of each strategy is computed."""
        try:
            num_layers: int | None = len(self.parts.task.layers())
        except NotImplementedError:
            num_layers = None
        except ConfigError:  # the task refuses pipelines
            num_layers = 0
        model, trained = self.parts.bare, self.trained
        own = [block for block in self.parts.task.blocks() if block is not model]
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
            shapes_repeat=all(shapes == self.convolved[0] for shapes in self.convolved),
        )

    def _why_not(self) -> str:
        growth = self.kept_bytes[-1] - self.kept_bytes[0] if self.kept_bytes else 0
        if growth > MIN_GROWTH_BYTES:
            return f"after each update, the task keeps {format_bytes(growth)} more than after the previous one"
        least, most = min(self.batches, default=0), max(self.batches, default=0)
        if least < most:
            samples = self.phase.batch.micro_batch_size
            sizes = f"batches of {samples} take {format_bytes(least)} to {format_bytes(most)}"
            return f"{sizes}, and batches larger than the traced one need more memory"
        return self.caveat


def _sum_submodules(name: str, layers: Sequence[Layer]) -> Layer:
    inside = [layer for layer in layers if layer.name == name or layer.name.startswith(f"{name}.")]
    return Layer(name, sum(layer.activations for layer in inside), sum(layer.flops for layer in inside))


def find_peak(events: Sequence[Event], blocks: Sequence[StorageBlock]) -> Bytes:
    """Return the bytes in use by kind at the moment of peak memory."""
    most = size = moment = 0
    alive: dict[int, int] = {}
    for number, (block, change) in enumerate(events):
        size += change or -alive.pop(block)
        if change:
            alive[block] = change
            if size > most:
                most, moment = size, number
    alive.clear()  # replay until the peak: copies of `alive` at each new maximum would take quadratic time
    for block, change in events[: moment + 1]:
        if change:
            alive[block] = change
        else:
            del alive[block]
    kinds = dict.fromkeys((field.name for field in dataclasses.fields(Bytes)), 0)
    for block, size in alive.items():
        kinds[blocks[block].kind] += size
    return Bytes(**kinds)
