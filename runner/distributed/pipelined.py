"""Pipeline parallelism: each rank has some layers of the model, and micro-batches pass through all ranks.

Several pipelines of equal size can train together: each has a copy of the model and processes its share of an update,
and the ranks of the same stage all-reduce their gradients during the last backward pass.

Built on torch.distributed.pipelining, which schedules the ranks. Its stages receive explicit shapes, and its steps
receive micro-batch indices instead of a batch to split. Therefore the loader's micro-batches are used unchanged,
whatever their type; consecutive ones with the same shapes form a step. Gradients are sums, as in all strategies.
Sources: Huang et al., GPipe, NeurIPS 2019; Narayanan et al., Efficient Large-Scale Language Model Training on GPU
Clusters, SC 2021.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from runner.base import noise
from runner.base.batch import MicroBatch, map_tensors
from runner.base.errors import AccelRunError, RankLost, TaskFault
from runner.base.order import MicroBatchKey
from runner.base.stopwatch import Stopwatch
from runner.base.task import State
from runner.distributed import p2p_messages
from runner.distributed.agreement import (
    broadcast_model,
    catch_exception,
    format_error_line,
    merge_states,
    raise_on_all_ranks,
)
from runner.distributed.buffer_sync import BufferSync, check_copies
from runner.distributed.layer_placement import (
    WHERE,
    Example,
    Placement,
    PlacementRequest,
    Tie,
    free_layers,
    layers_on_all_ranks,
    move_buffers,
    place_layers,
    shared_modules,
    shared_parameters,
)
from runner.distributed.parallel import Copy, ForwardPasses, ModelInit, Parallel, Sums, copy_to_host
from runner.distributed.rank_grid import split_ranks
from runner.distributed.stage_copies import StageCopies
from runner.distributed.stages import (
    Call,
    ModelCalled,
    PassOutcome,
    ReplayedCall,
    Shapes,
    Stage,
    StageSums,
    StageWork,
    TimedStage,
    hash_shapes,
    micro_batch_seed,
    run_stage,
)
from runner.distributed.world import World
from runner.tensors.global_rng import seed_everything
from runner.tensors.module_buffers import overwrite, restore_forward_state
from runner.tensors.stored_tensor import Saved, in_memory
from runner.workload import partition


class Pipelined(Parallel):
    """Contiguous stages of layers, one per rank.

    stages    number of stages, which divides the number of ranks; None: as many as ranks. Consecutive ranks form a
              pipeline
    schedule  1f1b: backward passes as early as possible; gpipe: all forward passes first, which keeps the activations
              of all micro-batches
    split     number of layers of each stage; None: determined by `balance`
    balance   memory: equal fraction of each device's memory; time: minimize the time of the slowest stage
    init      how the model is built, see Parallel
    """

    is_lockstep = True
    supports_groups = False
    splits_batch = False
    places_model = True

    def __init__(
        self,
        world: World,
        *,
        stages: int | None = None,
        schedule: partition.Schedule = "1f1b",
        split: Sequence[int] | None = None,
        balance: partition.Balance = "memory",
        init: ModelInit = "full",
    ) -> None:
        super().__init__(world)
        self.grid = split_ranks(world, stages or world.world_size)
        self.pipeline, self.replicas = self.grid.copy, self.grid.replicas
        self.batch_rank, self.counts_samples = self.replicas.rank, self.pipeline.is_first
        self.init = init
        self.schedule = PipelineSchedule(self.pipeline, schedule)
        self.num_stages = self.schedule.num_stages
        self.request = PlacementRequest(schedule, None, split, balance)
        self._example: Example | None = None
        self.placement: Placement
        self.stage: Stage  # of this rank
        self._parameters: set[nn.Parameter] = set()
        self._tied: list[Tie] = []
        self._shared_modules: list[nn.Module] = []
        self._forward: Callable[..., Any] = self._evaluate
        self._shapes: dict[int, list[Shapes]] = {}
        self._known_shapes: Sequence[Shapes] = ()
        self._buffers: BufferSync  # of modules outside of the layers
        self._copies: StageCopies

    @property
    def copy_ranks(self) -> World:
        return self.pipeline

    # ------------------------------------------------------------ the model

    def expect_inputs(self, example: Example, samples: int, num_microbatches: int) -> None:
        """Use this example to measure layers; without one, costs are estimated from parameters alone."""
        self._example = example
        self.request = replace(self.request, samples=samples, num_microbatches=num_microbatches)

    def wrap(
        self, model: nn.Module, layers: Callable[[], Sequence[nn.Module]], blocks: Sequence[nn.Module]
    ) -> nn.Module:
        """Keep this rank's layers of the model and free the others, in place; a call then runs the whole pipeline.

        The model may be on the CPU: only this rank's layers are moved to its device. All ranks raise the same error.
        """
        deferred = self.deferred
        if deferred:
            deferred.prepare(model, self.world.device)  # before layers(), which may use buffers that it replaces
        all_layers = layers_on_all_ranks(self.world, model, layers)
        if not self.world.is_simulated:
            broadcast_model(model, self.world)
        weights = deferred.materialized if deferred else None
        self.placement = place_layers(self.grid, model, all_layers, self.request, self._example, weights)
        own_layers = [all_layers[layer] for layer in self.placement.split.ranges[self.pipeline.rank]]
        if deferred:
            deferred.materialize(model, own_layers, self.world.device)
        self.stage = Stage(self.pipeline.rank, self.num_stages, own_layers, model, self.world, self.stopwatch)
        own_modules = {module for layer in own_layers for module in layer.modules()}
        self._parameters = set(self.stage.parameters())
        self._tied = shared_parameters(self.grid, model, all_layers, self.placement.split)
        self._shared_modules = shared_modules(model, all_layers, self.placement.split)
        layer_modules = {module for layer in all_layers for module in layer.modules()}
        free_layers(model, own_modules, self._parameters, layer_modules)
        move_buffers(model, layer_modules, self.world.device)
        # The loss runs on the last stage only, so the buffers of modules outside of the layers are taken from there.
        self._buffers = BufferSync(model, self.pipeline, self.num_stages - 1, others=layer_modules, averages=False)
        unchanged = layer_modules - own_modules if self.stage.is_last else set(model.modules()) - own_modules
        self._copies = StageCopies(self.replicas, model, unchanged)
        tensors = (*self.stage.parameters(), *self.stage.buffers())
        if any(tensor.device != self.world.device for tensor in tensors):  # fake tensors cannot be moved
            self.stage.to(self.world.device)
        model.forward = self._dispatch
        return model

    def set_shapes(self, shapes: Sequence[Shapes]) -> int:
        """Set the input shapes of each stage in advance; return the bytes that this rank receives per micro-batch."""
        self._known_shapes = shapes
        stage = self.stage
        received = [number for number in (stage.number, stage.number + 1) if 0 < number < self.num_stages]
        return sum(tensor.nbytes for number in received for tensor in shapes[number].meta_tensors())

    def describe_placement(self) -> list[str]:
        return str(self.placement).splitlines()

    def owned_parameters(self, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return this rank's parameters, or a constant zero if it has none, because optimizers require at least one."""
        mine = {name: weight for name, weight in named.items() if weight in self._parameters}
        if mine or not named:
            return mine
        dtype = next(iter(named.values())).dtype
        return {PLACEHOLDER: nn.Parameter(torch.zeros(1, dtype=dtype, device=self.world.device))}

    # ------------------------------------------------------------ an update

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        self._buffers.begin_phase()
        self._copies.begin([weight for weight in parameters if weight in self._parameters])
        self.schedule.clear()
        self._shapes.clear()

    def end(self) -> None:
        self._copies.end()
        self.schedule.clear()
        self._shapes.clear()

    def accumulate(self, passes: ForwardPasses, batches: Iterator[MicroBatch]) -> Sums:
        self._buffers.begin_update()
        self._copies.begin_update()
        self.stage.failure = None
        micros, bad, failure = _read_update(batches)
        noise.start_pass(None)  # passes overlap, so the samples are set for each micro-batch
        self.stopwatch.lap("data")
        seed = int(torch.randint(2**62, ()))
        inputs: list[Call] = []
        if failure is None and self.pipeline.is_first:
            failure = catch_exception(lambda: inputs.extend(self._model_calls(passes, micros, seed)))
        keys = self._agree(passes, micros, inputs, seed, failure)
        tally = StageSums(self.world.zeros(), self.world.zeros())
        self.schedule.begin_update()
        first = 0
        for key, group in groupby(keys.keys):
            count = len(list(group))
            part = slice(first, first + count)
            work = StageWork(passes, micros[part], inputs[part], keys.seed + first, tally)
            if first + count == len(micros):
                work = work._replace(before_last_pass=self._copies.begin_last_pass)
            step = self.schedule.step(self.stage, count, key, self._shapes[key])
            self.stage.begin(work, self._shapes[key], self._handle_calls)
            numbers = [torch.arange(count)] if self.pipeline.is_first else []
            target = torch.arange(count) if self.stage.is_last else None
            try:
                step.step(*numbers, target=target, return_outputs=False)
            except Exception:
                if self.stage.failure is not None:
                    raise self.stage.failure from None  # the cause, instead of a lost connection that follows from it
                raise
            finally:
                self.stage.end()
            self.stopwatch.lap("wait")
            first += count
        if self.world.any(self.stage.failure is not None):
            self._raise_first_failure()
        if not micros:
            with passes.forward():  # saves the state to restore if another pipeline, which has samples, overflows
                pass
        return Sums(tally.loss_sum, tally.items, bad if self.counts_samples else ())

    def _raise_first_failure(self) -> None:
        """Raise the earliest failure on all ranks, because the zeros sent after it may make other stages fail, too."""
        failure = self.stage.failure
        # Times of different machines are comparable only if their clocks are synchronized.
        times = self.world.gather(math.inf if failure is None else self.stage.failed_at)
        is_first = times.index(min(times)) == self.world.rank
        raise_on_all_ranks(failure if is_first else None, self.world, WHERE)

    def reduce(self, sums: Sums) -> Sums:
        assert isinstance(sums.items, Tensor)
        numbers = self._copies.reduce(torch.stack([sums.loss_sum, sums.items]))
        for tie in self._tied:
            tie.add()
        loss_sum, items = self.pipeline.sum(numbers)
        if self._buffers.modules:
            self._buffers.apply(self.pipeline.sum(self._buffers.flags()))
        self.stopwatch.lap("wait")
        return Sums(loss_sum, items, sums.bad)

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        # Never empty: a rank without gradients would skip the all-reduce of the norm, in which the others wait.
        return super().gradients(parameters) or [torch.zeros_like(weight) for weight in parameters[:1]]

    def global_norm(self, local: Tensor) -> Tensor:
        """Return the norm over all stages; a parameter shared by two stages counts once."""
        square = local.to(self.world.widest).square()
        counted_twice = [tie.weight.grad for tie in self._tied if not tie.counts_here and tie.weight.grad is not None]
        if counted_twice:
            twice = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(counted_twice)).to(square.dtype)).square()
            # infinite gradients remain infinite instead of becoming NaN
            square = torch.where(torch.isfinite(square), (square - twice).clamp(min=0), square)
        return self.pipeline.sum(square).sqrt().to(local.dtype)

    def any_overflow(self, overflow: Tensor) -> Tensor:
        return self.pipeline.max(overflow)

    # ------------------------------------------------------------ between updates

    @contextmanager
    def buffer_update(self) -> Iterator[None]:
        if self.replicas.world_size == 1:  # all stages see the same data
            yield
            return
        # On exit, the copies of each stage are synchronized first, then the buffers outside of layers in each pipeline.
        with self._buffers.update(), self._copies.buffer_update():
            yield

    def check_buffers(self) -> None:
        self._buffers.check()
        check_copies(self._buffers.model, self._shared_modules, self.pipeline)
        self._copies.check_buffers()

    def gather_full(self, tensors: Mapping[str, Tensor], copy: Copy = copy_to_host) -> dict[str, Tensor]:
        """Gather tensors by name from the stages of the first copy of the model.

        A tensor that several stages share is taken from the first of them.
        """
        if not self.replicas.is_first:
            return {}
        mine = {
            name: tensor
            for name, tensor in tensors.items()
            if not tensor.is_meta and not name.startswith(f"{PLACEHOLDER}.")
        }
        stages, host = self.pipeline, torch.device("cpu")
        names = stages.gather(list(mine))
        source = {name: rank for rank in reversed(range(self.num_stages)) for name in names[rank]}
        result = {name: copy(mine[name]) for name in mine if stages.is_first}
        for rank in range(1, self.num_stages):
            selected = [name for name in names[rank] if source[name] == rank]
            if stages.rank == rank:
                p2p_messages.send(tuple(mine[name].detach().cpu() for name in selected), 0, stages, host)
            elif stages.is_first:
                result |= zip(selected, p2p_messages.receive(rank, stages, host), strict=True)
        order = dict.fromkeys([*tensors, *source])
        return {name: result[name] for name in order if name in result}

    def load(self, model: nn.Module, saved: Saved) -> None:
        """Load this rank's tensors into the model."""
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if not tensor.is_meta and name in saved:
                    overwrite(tensor, in_memory(saved[name]))

    def merge_state(self, merge: Callable[[State, State], State], state: State) -> State:
        """Merge the states of the first stages only, because all stages of a pipeline see the same data.

        The first stage broadcasts its state to the others: after a resume, only rank 0 has the restored state.
        """
        result = {name: tensor.contiguous().clone() for name, tensor in state.items()}
        for tensor in result.values():
            self.pipeline.broadcast_tensor(tensor)
        return merge_states(merge, result, self.replicas) if self.replicas.world_size > 1 else result

    # ------------------------------------------------------------ evaluation

    def evaluation_batches(self, keys: Sequence[MicroBatchKey]) -> list[MicroBatchKey]:
        """Give each copy of the model its part of the batches; its first stage counts them."""
        mine = keys[self.replicas.rank :: self.replicas.world_size]
        return [key if self.counts_samples else key._replace(is_counted=False) for key in mine]

    # ------------------------------------------------------------ efficiency

    def idle_fractions(self) -> Mapping[str, float]:
        bubble = self.schedule.bubble(self.stopwatch)
        return {} if bubble is None else {f"pipeline/{name}": value for name, value in bubble._asdict().items()}

    # ------------------------------------------------------------ inside an update

    def _model_calls(self, passes: ForwardPasses, micros: Sequence[MicroBatch], seed: int) -> Iterator[Call]:

        def raise_call(*inputs: Any, **named: Any) -> Any:
            raise ModelCalled(Call(inputs, named))

        for number, micro in enumerate(micros):
            seed_everything(micro_batch_seed(seed + number))
            noise.switch_pass(micro.samples)
            try:
                with self._handle_calls(raise_call), passes.forward():
                    passes.loss(passes.model, micro.batch)
            except ModelCalled as interruption:
                yield map_tensors(lambda tensor: tensor.detach(), interruption.call)
            else:
                raise model_not_called_error()

    def _agree(
        self,
        passes: ForwardPasses,
        micros: Sequence[MicroBatch],
        inputs: Sequence[Call],
        seed: int,
        failure: Exception | None,
    ) -> _Keys:
        """Return the seed of the first stage and its hashes of micro-batch shapes.

        Infers the input shapes of all stages for each new hash. Raises on all ranks of all pipelines if a
        rank failed, as given by `failure` or while inferring shapes.
        """
        first, count = self.pipeline.is_first, len(micros)
        # The maxima of the count and of its negative give the largest and the smallest count in a single message.
        message = torch.tensor([int(failure is not None), count, -count, seed if first else -1])
        failed, most, least, seed = self.pipeline.max(message).tolist()
        keys = torch.tensor([hash_shapes(call) for call in inputs] if first else [0] * count, dtype=torch.int64)
        if not failed and most != -least:
            differs = f"ranks read different numbers of micro-batches, from {-least} to {most}"
            failed, failure = True, AccelRunError(differs)
        elif not failed and count:
            self.pipeline.broadcast_tensor(keys)
            calls = inputs or [Call((), {})] * count  # the first stage receives the arguments of the model
            for key, micro, call in zip(keys.tolist(), micros, calls, strict=True):
                if key not in self._shapes and not failed:
                    failed, failure = self._infer_shapes(passes, micro, call, key)
        # The stages of a pipeline agree on a failure by now, so asking the copies of one stage covers all pipelines.
        if self.replicas.any(bool(failed)):
            raise_on_all_ranks(failure, self.world, WHERE)
        self.stopwatch.lap("wait")
        return _Keys(seed, keys.tolist())

    def _infer_shapes(
        self, passes: ForwardPasses, micro: MicroBatch, call: Call, key: int
    ) -> tuple[bool, Exception | None]:
        """Infer the input shapes of each stage by running one micro-batch without gradients.

        Errors in layers and loss are found here, while no rank waits for another one. Returns whether a rank of this
        pipeline failed, and the failure of this rank.
        """
        if self._known_shapes:
            self._shapes[key] = [*self._known_shapes]
            return False, None
        modules = {*self.stage.modules(), *self._buffers.modules}

        def checked(output: Any) -> None:
            fresh = map_tensors(_as_leaf, output)
            with torch.enable_grad(), self._handle_calls(ReplayedCall(fresh)), passes.forward():
                noise.switch_pass(micro.samples)
                passes.loss(passes.model, micro.batch)

        def infer() -> None:
            noise.switch_pass(micro.samples)
            with torch.no_grad(), restore_forward_state(modules):
                outcomes.append(run_stage(self.stage, self.pipeline, call, passes.forward, checked))

        outcomes: list[PassOutcome] = []
        failure = catch_exception(infer) or outcomes[0].failure
        found = self.pipeline.gather([failure is not None, outcomes[0].shapes if outcomes else []])
        failed = any(has_failed for has_failed, _ in found)
        if not failed:
            self._shapes[key] = [Shapes.from_description(shapes) for _, shapes in found]
        return failed, failure

    # ------------------------------------------------------------ one pass through all stages

    def _evaluate(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's output on all ranks of this copy of the model; all of them must call it."""
        if torch.is_grad_enabled():
            raise TaskFault(
                "with gradients enabled, a pipelined model can be called only in the task's loss, once per batch",
                where=WHERE,
                fix="call it under torch.no_grad()",
            )
        outputs: list[Any] = []
        outcome = run_stage(self.stage, self.pipeline, Call(inputs, named), nullcontext, outputs.append)
        text = None if outcome.failure is None else format_error_line(outcome.failure)
        failure = outcome.failure or (
            catch_exception(lambda: p2p_messages.check_sendable(outputs[0])) if outputs else None
        )
        text = text or (None if failure is None else format_error_line(failure))
        shared = p2p_messages.RemoteFailure(text) if text is not None else (outputs[0] if outputs else None)
        output = p2p_messages.broadcast(shared, self.num_stages - 1, self.pipeline)
        if failure is not None:
            raise failure
        if isinstance(output, p2p_messages.RemoteFailure):
            raise RankLost(output.text, where=WHERE)
        return output

    def _dispatch(self, *inputs: Any, **named: Any) -> Any:
        """Pass a call of the model to the current handler."""
        return self._forward(*inputs, **named)

    @contextmanager
    def _handle_calls(self, forward: Callable[..., Any]) -> Iterator[None]:
        before, self._forward = self._forward, forward
        try:
            yield
        finally:
            self._forward = before


PLACEHOLDER = "pipeline.nothing"  # name of the constant parameter of a rank without parameters


class _Keys(NamedTuple):
    """Seed of an update, and a hash of the shapes of each micro-batch."""

    seed: int
    keys: list[int]


def _read_update(
    batches: Iterator[MicroBatch],
) -> tuple[list[MicroBatch], tuple[tuple[int, str], ...], Exception | None]:
    """Return all micro-batches of the update, skipped samples, and the error if reading failed."""
    micros: list[MicroBatch] = []
    bad: list[tuple[int, str]] = []

    def read() -> None:
        last = False
        while not last:
            micro = next(batches)
            last = micro.last
            bad.extend(micro.bad)
            if micro.is_counted:
                micros.append(micro)

    failure = catch_exception(read)
    return micros, tuple(bad), failure


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def model_not_called_error() -> TaskFault:
    """Return the error of a loss that does not call the model."""
    return TaskFault(
        "in a pipeline, loss() must call model(...), but does not",
        where=WHERE,
        fix="call the model that is passed to the loss, not its parts",
    )


class PipelineSchedule:
    """Order the forward and backward passes of the micro-batches of an update.

    kind  the argument `schedule` of `Pipelined`
    """

    def __init__(self, world: World, kind: partition.Schedule) -> None:
        self.world, self.kind, self.num_stages = world, kind, world.world_size
        self._steps: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._counts: list[int] = []  # micro-batches of each step of the update

    def clear(self) -> None:
        """Discard the steps: another phase may have a different loss."""
        self._steps.clear()

    def begin_update(self) -> None:
        """Reset the counts at the start of an update."""
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
            group=self.world.group,
            input_args=shapes[stage.number].meta_tensors(),
            output_args=self._output_shapes(shapes, stage.number),
        )

        def loss(output: Tensor, _: Any) -> Tensor:
            return output  # the output of the last stage is the loss

        # torch's 1F1B raises ValueError for fewer micro-batches than stages (2.13).
        all_forward_first = self.kind == "gpipe" or count < self.num_stages
        schedule = ScheduleGPipe if all_forward_first else Schedule1F1B
        return schedule(timed, count, loss_fn=loss, scale_grads=False)

    def _output_shapes(self, shapes: Sequence[Shapes], number: int) -> tuple[Tensor, ...]:
        if number == self.num_stages - 1:
            return (torch.empty((), dtype=self.world.widest, device="meta", requires_grad=True),)
        return shapes[number + 1].meta_tensors()

    def bubble(self, stopwatch: Stopwatch) -> partition.Bubble | None:
        """Return the idle fractions of the devices in the last timed update; collective.

        None before the first timed update, or if the last update had no steps.
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
