"""Implement the kinds of training phases, gradient descent and statistics fits, behind one interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.axes.optimizer import build_optimizer
from runner.axes.precision import Precision
from runner.axes.scheduler import Schedule, build_schedule
from runner.base.batch import MicroBatch
from runner.base.errors import ConfigError, IncompatibleResume, NumericError, Problem, TaskFault
from runner.base.order import Order
from runner.base.task import Fit, State
from runner.base.text import abbreviate
from runner.config.module_names import module_prefixes, unmatched_problems
from runner.distributed.parallel import Copy
from runner.durable.checkpoint import LoadedCheckpoint
from runner.engine.contract.contract_checks import describe_value
from runner.engine.contract.error_diagnosis import locate_definition
from runner.engine.contract.task_loading import CheckedLoss
from runner.engine.parts.assemble import Parts
from runner.engine.parts.gradient_record import GradientRecord
from runner.engine.update.coupled import CoupledSource, is_coupled, validate_embedding
from runner.engine.update.extra_metrics import ExtraMetrics
from runner.engine.update.gradients import GradientSource
from runner.engine.update.loop import Position, StepInfo, Training, UpdateInputs, UpdateWrapper, train_updates
from runner.engine.update.objectives import ObjectiveSpec
from runner.engine.update.oom_retry import OomRetry, RetryPolicy
from runner.engine.update.parameter_selection import resolve_names, select_parameters
from runner.engine.update.sharpness import with_sharpness
from runner.plan.run_plan import PhasePlan
from runner.tensors.optimizer_state import SHARED_STATE, expected_state_bytes, export_state, import_state, state_bytes

Tensors = Mapping[str, Mapping[str, Tensor]]
BeforeStep = Callable[[Mapping[str, nn.Parameter], str], None]  # (parameters by name, objective), see `Hook`


def no_hooks(parameters: Mapping[str, nn.Parameter], objective: str) -> None:
    """Call nothing before an optimizer step."""


class PhaseKind:
    """Base class of phase kinds, with no-op methods; `position` counts its updates.

    total  number of updates until the phase is complete
    owned  parameters updated by this rank, by name
    """

    total: int
    owned: Mapping[str, nn.Parameter] = {}
    has_interim_evaluation = True  # an evaluation before the last update is meaningful

    @property
    def location(self) -> str:
        """Return file:line of the loss, for messages; "" if there is none."""
        return ""

    @property
    def attention(self) -> Mapping[tuple[str, str], int]:
        """Return the attention kernels that `CheckedLoss` recorded in the first forward pass."""
        return {}

    @property
    def batch_dependent(self) -> Mapping[str, str]:
        """Return the places of batch-dependent calls that `CheckedLoss` recorded in the first forward pass."""
        return {}

    def updates(self, batches: Iterator[MicroBatch]) -> Iterator[StepInfo]:
        """Run the remaining updates."""
        raise NotImplementedError

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an evaluation."""

    def observed_metrics(self) -> Mapping[str, str]:
        """Return setting -> metric for the metrics on which learning rates depend."""
        return {}

    def close(self) -> Mapping[str, float]:
        """Store the result in the model after the last update; return numbers to show."""
        return {}

    def state(self, copy: Copy) -> tuple[Tensors, dict[str, Any]]:
        """Return the checkpoint state besides the model: copies of tensors by file, and JSON-serializable data."""
        raise NotImplementedError

    def load(self, start: LoadedCheckpoint) -> None:
        """Restore what `state` returned."""
        raise NotImplementedError

    def release(self) -> None:
        """Undo temporary changes to the model, such as hooks, keep its values, and free the state of the phase.

        Other objects may keep a finished phase alive, but the next phase needs its memory.
        """

    def precision_values(self) -> dict[str, float]:
        """Return values of the precision to log, see `Precision.values`; each objective has its own loss scale."""
        return {}

    def start_lines(self) -> list[str]:
        """Return the lines to print at the start of the phase."""
        return []

    def first_gradients(self) -> dict[str, bool]:
        """Return, for each trained parameter of this rank, whether it received a gradient in the first update.

        Call once, because it removes hooks.
        """
        return {}

    @property
    def trained_names(self) -> Collection[str]:
        """Names of the parameters that the phase changes, on any rank."""
        return ()

    @property
    def untrained_with_gradient(self) -> Sequence[str]:
        """Names of the parameters that have received a gradient although the phase does not train them."""
        return ()

    def state_bytes(self) -> tuple[int, int]:
        """Return the optimizer state size in bytes: expected from the parameter dtype, and actual."""
        return 0, 0


class GradientPhase(PhaseKind):
    """Training with gradients: what phases with one loss and with several objectives share.

    task_losses  the losses of an update by objective; a single loss has the name ""
    task_loss    the first or only one of `task_losses`
    loss         `task_loss` with checks, as the loop calls it; for a coupled loss, `embed` with checks
    trained      the parameters that the phase trains, on any rank, by name
    prefixes     name prefixes that select `trained`; None: all parameters
    is_additive  the loss is the sum over its samples
    """

    coupled: CoupledSource | None = None
    loss: CheckedLoss
    task_losses: Mapping[str, Callable[[nn.Module, Any], Any]]
    trained: Mapping[str, nn.Parameter]
    prefixes: Sequence[str] | None

    def __init__(
        self,
        phase: PhasePlan,
        parts: Parts,
        order: Order,
        position: Position,
        retry_policy: RetryPolicy | None = None,
        *,
        before_step: BeforeStep = no_hooks,
    ) -> None:
        self.parts, self.position, self.before_step = parts, position, before_step
        self.total = phase.updates or count_updates(phase.epochs or 1, order.updates_per_epoch)
        self.is_additive = parts.task.loss_is_additive
        # Kernels are recorded with a dispatch mode, which does not work with torch.compile.
        self.records_operations = parts.plan.choices["compile"].uses("off")
        self.per_item, self.retry_policy = weight_per_item(phase, parts, order), retry_policy
        self._required_grad = {name: weight.requires_grad for name, weight in parts.bare.named_parameters()}
        self._select(phase)
        self.task_loss = next(iter(self.task_losses.values()))
        self._train_only(self.trained)
        parts.parallel.begin(list(self.owned.values()))
        self._build(phase)

    def _select(self, phase: PhasePlan) -> None:
        """Set `task_losses`, `trained` and `prefixes`."""
        raise NotImplementedError

    def _build(self, phase: PhasePlan) -> None:
        """Build the optimizers and schedules, after the trained parameters require gradients."""
        raise NotImplementedError

    @property
    def training(self) -> Training:
        """The training of the loss, or of the current objective."""
        raise NotImplementedError

    @property
    def trainings(self) -> Mapping[str, Training]:
        """The training of each objective by name; that of a single loss has the name ""."""
        raise NotImplementedError

    @property
    def inputs(self) -> UpdateInputs:
        """The inputs of the training loop."""
        raise NotImplementedError

    def _make_training(
        self,
        chosen: PhasePlan | ObjectiveSpec,
        loss: CheckedLoss,
        weights: Mapping[str, nn.Parameter],
        position: Position,
        precision: Precision,
        *,
        total: int,
        gradients: GradientSource,
        objective: str = "",
    ) -> Training:
        """Return the training of these weights, with the optimizer and the schedule of a phase or an objective."""
        parts, parameters, extra = self.parts, list(weights.values()), ExtraMetrics()
        loss.observe = extra.add
        named = {name: weight for name, weight in weights.items() if name in self.owned}
        options = resolve_names(chosen.optimizer.options, parts.bare, self.trained, named)
        optimizer = build_optimizer(chosen.optimizer.function, [*weights.items()], options)
        wrapper = UpdateWrapper()
        if self.retry_policy is not None:
            has_one_rank, device = parts.world.world_size == 1, parts.world.device
            wrapper = OomRetry(
                parts.bare, parameters, optimizer, precision, device, self.retry_policy, has_one_rank=has_one_rank
            )
        wrapper.before_step = partial(self.before_step, named, objective)
        return Training(
            position=position,
            model=parts.model,
            loss=loss,
            parameters=parameters,
            optimizer=optimizer,
            schedule=build_schedule(chosen.scheduler.function, total, chosen.scheduler.options),
            precision=precision,
            parallel=parts.parallel,
            per_item=self.per_item,
            max_grad_norm=chosen.max_grad_norm,
            gradients=with_sharpness(parts.plan.choices["sharpness"], gradients, parameters, extra),
            extra=extra,
            update_wrapper=wrapper,
            location=self.location,
        )

    def _train_only(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Require gradients of these parameters only, and record which of them receive one."""
        parts = self.parts
        for name, weight in parts.bare.named_parameters():
            weight.requires_grad_(name in trained)
        self._updated = parts.parallel.owned_parameters(trained)
        # Without the placeholder of a pipeline stage that has no trained parameters: only its optimizer needs it.
        self.owned = {name: weight for name, weight in self._updated.items() if name in trained}
        self._gradient_record = GradientRecord(parts.bare, trained.keys(), self.owned)

    @property
    def location(self) -> str:
        method = self.coupled.couple if self.coupled else self.task_loss
        return locate_definition(method, self.parts.source)

    def _load_schedule(self, schedule: Schedule, saved: Mapping[str, Any], start: LoadedCheckpoint) -> None:
        """Restore a schedule, unless `resume_allow` has permitted a different one whose state has other keys."""
        try:
            schedule.load(saved)
        except IncompatibleResume:
            before, now = (  # of the run, its phases and objectives
                {key: name for key, name in values.items() if key.endswith("scheduler")}
                for values in (start.state["values"], self.parts.plan.values())
            )
            if before == now:
                raise

    @property
    def attention(self) -> Mapping[tuple[str, str], int]:
        return self.loss.attention

    @property
    def batch_dependent(self) -> Mapping[str, str]:
        losses = [self.loss, *(training.loss for training in self.trainings.values())]
        calls = (loss.batch_dependent for loss in losses if isinstance(loss, CheckedLoss))
        return {place: kind for found in calls for place, kind in found.items()}

    def updates(self, batches: Iterator[MicroBatch]) -> Iterator[StepInfo]:
        return train_updates(self.inputs, batches, self.total)

    def observe(self, metrics: Mapping[str, float]) -> None:
        for training in self.trainings.values():
            if training.schedule.metric in metrics:
                training.schedule.observe(metrics[training.schedule.metric], training.position.update)

    def observed_metrics(self) -> Mapping[str, str]:
        return {
            f"OBJECTIVES[{name}] scheduler.metric" if name else "scheduler.metric": training.schedule.metric
            for name, training in self.trainings.items()
            if training.schedule.is_observing
        }

    def close(self) -> Mapping[str, float]:
        """Raise NumericError if every update of the phase or of an objective was skipped."""
        for name, training in self.trainings.items():
            position = training.position
            if training.precision.num_skipped() - position.skipped_before >= position.update > 0:
                of_objective = f" of objective {name}" if name else ""
                raise NumericError(
                    f"every update{of_objective} of phase {position.phase} was skipped, because gradients overflowed"
                    " float16; nothing was learned",
                    where="precision=fp16",
                    fix="use precision.init_scale=1024, or precision=bf16 or fp32",
                )
        return {}

    def precision_values(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, training in self.trainings.items():
            is_shared = training.precision is self.parts.precision
            lead = "precision/" if is_shared else f"precision/{name}/"
            values |= {lead + key.removeprefix("precision/"): item for key, item in training.precision.values().items()}
        return values

    def release(self) -> None:
        for optimizer in self.inputs.optimizers:
            optimizer.state.clear()
        self._gradient_record.close()
        self.parts.parallel.end()
        for name, weight in self.parts.bare.named_parameters():
            weight.requires_grad_(self._required_grad.get(name, weight.requires_grad))
            weight.grad = None

    def first_gradients(self) -> dict[str, bool]:
        self._gradient_record.stop_recording_trained()
        added = dict(self.parts.bare.named_parameters()).keys() - self._required_grad.keys()
        if added:
            raise TaskFault(
                f"the model has new parameters after the first update: {abbreviate(sorted(added))}",
                where=str(self.parts.source),
                fix="register all parameters in build: the optimizer does not train those that are added later",
            )
        return {name: name in self._gradient_record.trained for name in self.owned}

    @property
    def trained_names(self) -> Collection[str]:
        return self.trained.keys()

    @property
    def untrained_with_gradient(self) -> Sequence[str]:
        return self._gradient_record.untrained

    def state_bytes(self) -> tuple[int, int]:
        optimizers = self.inputs.optimizers
        return sum(map(expected_state_bytes, optimizers)), sum(map(state_bytes, optimizers))


class LossPhase(GradientPhase):
    """Training of one loss, with one optimizer and one schedule."""

    def _select(self, phase: PhasePlan) -> None:
        self.task_losses = {"": self.parts.task.losses.get(phase.name, self.parts.task.loss)}
        self.trained, self.prefixes = _select_parameters(self.parts.bare, phase), phase.trains

    def _build(self, phase: PhasePlan) -> None:
        parts, position = self.parts, self.position
        checked = self.loss = CheckedLoss(self.task_loss, parts.source, records_operations=self.records_operations)
        gradients = GradientSource()
        if is_coupled(parts.task, phase.name):
            self.is_additive = False
            self.loss = CheckedLoss(
                parts.task.embed, parts.source, records_operations=self.records_operations, check=validate_embedding
            )
            seed = parts.plan.settings.seed
            gradients = self.coupled = CoupledSource(
                self.loss, parts.task.couple, parts.source, seed, lambda: position.update
            )
        self._training = self._make_training(
            phase, checked, self._updated, position, parts.precision, total=self.total, gradients=gradients
        )

    @property
    def training(self) -> Training:
        return self._training

    @property
    def trainings(self) -> Mapping[str, Training]:
        return {"": self._training}

    @property
    def inputs(self) -> UpdateInputs:
        return self._training

    def state(self, copy: Copy) -> tuple[Tensors, dict[str, Any]]:
        tensors, numbers = export_state(self.training.optimizer)
        gathered = self.parts.world.gather(numbers["numbers"])  # ranks may own different parameters
        named = {*self.trained, SHARED_STATE}
        numbers["numbers"] = {
            name: value
            for rank_numbers in gathered
            for name, value in rank_numbers.items()
            if not named.isdisjoint(module_prefixes([name]))
        }
        optimizer_tensors = {"optimizer": self.parts.parallel.checkpoint_tensors(tensors, copy)}
        return optimizer_tensors, {"optimizer": numbers, "schedule": self.training.schedule.state()}

    def load(self, start: LoadedCheckpoint) -> None:
        not_owned = {name for name in self.trained if name not in self.owned}

        def select_owned(saved: Mapping[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in saved.items() if not_owned.isdisjoint(module_prefixes([key]))}

        saved = start.state["optimizer"]
        saved = {**saved, "numbers": select_owned(saved["numbers"])}
        import_state(self.training.optimizer, select_owned(start.stored("optimizer")), saved)
        self._load_schedule(self.training.schedule, start.state["schedule"], start)

    def start_lines(self) -> list[str]:
        if self.prefixes is None:
            return []
        sizes = [
            f"{prefix} ({sum(weight.numel() for weight in select_parameters(self.parts.bare, [prefix]).values()):,})"
            for prefix in self.prefixes
        ]
        count = sum(weight.numel() for weight in self.trained.values())
        total = sum(weight.numel() for weight in self.parts.bare.parameters())
        return [f"trains {', '.join(sizes)}: {count:,} of {total:,} parameters ({count / total:.1%})"]


class StatisticsPhase(PhaseKind):
    """Fit statistics: one gradient-free pass over the training data, with state that is accumulated and merged."""

    has_interim_evaluation = False

    def __init__(
        self, phase: PhasePlan, parts: Parts, order: Order, position: Position, retry_policy: RetryPolicy | None = None
    ) -> None:
        self.parts, self.position, self.total = parts, position, order.updates_per_epoch
        self._num_states = max(1, len(order.shares))  # each rank with a share of the samples has a state
        self.fit = find_fit(parts, phase.name)
        start = _check_state(self.fit.start(), self.fit.start, parts.source)
        self.gathered: State = {name: value.to(parts.world.device) for name, value in start.items()}

    def updates(self, batches: Iterator[MicroBatch]) -> Iterator[StepInfo]:
        world, parallel, model = self.parts.world, self.parts.parallel, self.parts.model
        stopwatch = parallel.stopwatch
        while self.position.update < self.total:
            stopwatch.lap("hooks")
            items: Tensor | int = 0
            bad: tuple[tuple[int, str], ...] = ()
            last = False
            # Gather, because ranks may run different numbers of batches, and `add` may call any part of the model.
            with parallel.buffer_update(), parallel.gather_parameters(model), torch.no_grad():
                while not last:
                    batch, last, skipped, is_counted, *_ = next(batches)
                    stopwatch.lap("data")
                    bad += skipped if parallel.counts_samples else ()
                    if is_counted:
                        with self.parts.precision.forward():
                            added = self.fit.add(model, self.gathered, batch)
                        self.gathered, count = _check_added(added, self.fit, self.parts.source)
                        items = items + count
                    del batch  # before the next is read, so that one fewer batch is in memory
                    stopwatch.lap("forward")
            self.position.update += 1
            total_items = items
            if world.world_size > 1:
                total_items = world.sum(world.zeros() + (items if parallel.counts_samples else 0))
            stopwatch.lap("wait" if world.world_size > 1 else "forward")
            stopwatch.stop(self.position.update)
            yield StepInfo(self.position.update, None, total_items, None, None, bad)

    def close(self) -> Mapping[str, float]:
        state = self._merge_ranks()
        with torch.no_grad(), self.parts.parallel.edit_parameters(self.parts.bare):
            result = self.fit.finish(self.parts.bare, state) or {}
        try:
            return {str(name): float(value) for name, value in result.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise TaskFault(
                f"finish() must return a mapping of names to numbers, but returned {type(result).__name__}",
                where=locate_definition(self.fit.finish, self.parts.source),
                fix='return {"mean": float(mean)}, or nothing',
            ) from error

    def state(self, copy: Copy) -> tuple[Tensors, dict[str, Any]]:
        """Return the merged state, and that of each rank, so that a resumed run sums in the same order."""
        own_states: list[State] = []
        has_own_states = self._num_states > 1 and self.position.update < self.total

        def add_copy(state: State) -> None:
            if has_own_states and self.parts.world.is_first:
                own_states.append({name: copy(value) for name, value in state.items()})

        def merge(one: State, other: State) -> State:
            add_copy(other)
            return self._merge(one, other)

        add_copy(self.gathered)
        merged = self.parts.parallel.merge_state(merge, self.gathered)
        tensors = {"fit": self.parts.parallel.gather_full(merged, copy)}
        if own_states:
            named = ((f"{rank}/{name}", value) for rank, own in enumerate(own_states) for name, value in own.items())
            tensors["fit_of_ranks"] = dict(named)
        return tensors, {"fit_states": len(own_states)}

    def load(self, start: LoadedCheckpoint) -> None:
        """Restore the state of this rank; with another number of ranks, the merged state on rank 0."""
        if self._num_states > 1 and start.state.get("fit_states") == self._num_states:
            prefix, saved = f"{self.parts.parallel.batch_rank}/", start.tensors("fit_of_ranks")
            saved = {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
        elif self.parts.world.is_first:
            saved = start.tensors("fit")
        else:
            return
        self.gathered = {name: value.to(self.parts.world.device) for name, value in saved.items()}

    def release(self) -> None:
        self.gathered = {}

    def _merge_ranks(self) -> State:
        return self.parts.parallel.merge_state(self._merge, self.gathered)

    def _merge(self, one: State, other: State) -> State:
        return _check_state(self.fit.merge(one, other), self.fit.merge, self.parts.source)


def weight_per_item(phase: PhasePlan, parts: Parts, order: Order) -> float:
    """Return the factor that scales a loss sum before its backward pass: about 1 / (items of an update)."""
    return 1.0 / (min(phase.batch.global_batch_size, order.num_samples) * parts.task.items_per_sample)


def count_updates(epochs: float, updates_per_epoch: int) -> int:
    """Return the smallest number of updates that covers `epochs`, evaluated as the decimal number in the settings.

    The float 1.1 is slightly above 1.1, and 100 updates per epoch times that would round up to 111.
    """
    return math.ceil(Fraction(repr(epochs)) * updates_per_epoch)


def check_parameters(phases: Iterable[PhasePlan], model: nn.Module) -> None:
    """Raise ConfigError before any phase starts if a phase trains parameters that the model lacks."""
    for phase in phases:
        if phase.kind == "train":
            _select_parameters(model, phase)


def find_fit(parts: Parts, phase: str) -> Fit:
    """Return the statistics to collect in a phase of kind fit. Raises TaskFault if the task defines none for it."""
    fit = parts.task.fits.get(phase)
    if fit is None:
        raise TaskFault(
            f"phase {phase} is of kind fit, but the task defines no fit of this name (it defines:"
            f" {', '.join(parts.task.fits) or 'none'})",
            where=str(parts.source),
            fix=f'return {{"{phase}": MyFit()}} from the property fits',
        )
    return fit


def _check_state(state: Any, method: Callable[..., Any], source: Path) -> State:
    """Return a state that a method of a Fit returned. Raises TaskFault unless it is a dict of names to tensors."""
    entries = state.items() if isinstance(state, dict) else [("", state)]
    for name, value in entries:
        if not isinstance(name, str) or not name or not isinstance(value, Tensor):
            entry = f"entry {name!r} is {describe_value(value)}" if isinstance(state, dict) else describe_value(state)
            raise TaskFault(
                f"{method.__name__}() must return a state that is a dict of names to tensors, but returned"
                f" {'a dict whose ' if isinstance(state, dict) else ''}{entry}",
                where=locate_definition(method, source),
                fix='return tensors of the same shapes and types in each state, such as {"sum": torch.zeros(3)}',
            )
    return dict(state)


def _check_added(added: Any, fit: Fit, source: Path) -> tuple[State, Tensor | int]:
    if (
        isinstance(added, tuple)
        and len(added) == 2
        and isinstance(added[0], dict)
        and (isinstance(added[1], int) or (isinstance(added[1], Tensor) and added[1].numel() == 1))
    ):
        return _check_state(added[0], fit.add, source), added[1]
    raise TaskFault(
        f"add() must return (the state including this batch, number of items), but returned {describe_value(added)}",
        where=locate_definition(fit.add, source),
        fix="return {**state, ...}, len(x)",
    )


def _select_parameters(model: nn.Module, phase: PhasePlan) -> dict[str, nn.Parameter]:
    """Return the phase's parameters by name. Raises ConfigError for a prefix that matches none."""
    if phase.trains is not None:
        named = dict(model.named_parameters(remove_duplicate=False))
        trainable = [name for name, weight in named.items() if weight.requires_grad]
        frozen = [name for name, weight in named.items() if not weight.requires_grad]
        problems = unmatched_problems(phase.trains, trainable, f"phase.{phase.name}.trains", frozen=frozen)
        if problems or not phase.trains:
            raise ConfigError(problems or Problem("must name a parameter", f"phase.{phase.name}.trains=[]"))
    return select_parameters(model, phase.trains)
