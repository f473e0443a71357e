"""Train several objectives per update, and create the phase kind that a phase needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from runner.base.errors import TaskFault
from runner.base.order import Order
from runner.base.task import Task
from runner.base.text import abbreviate
from runner.distributed.parallel import Copy
from runner.durable.checkpoint import LoadedCheckpoint
from runner.engine.contract.contract_checks import check_arguments
from runner.engine.contract.task_loading import CheckedLoss
from runner.engine.parts.assemble import Parts
from runner.engine.parts.phase_kinds import (
    BeforeStep,
    GradientPhase,
    LossPhase,
    PhaseKind,
    StatisticsPhase,
    Tensors,
    no_hooks,
)
from runner.engine.update.gradients import GradientSource
from runner.engine.update.loop import Position, Training
from runner.engine.update.objectives import ObjectivePosition, Objectives, parse_objectives
from runner.engine.update.oom_retry import RetryPolicy
from runner.plan.run_plan import PhasePlan
from runner.tensors.optimizer_state import export_state, import_state


class ObjectivesPhase(GradientPhase):
    """Training with several objectives per update."""

    def _select(self, phase: PhasePlan) -> None:
        task, model = self.parts.task, self.parts.bare
        self.specs = parse_objectives(task, phase)
        self.parameters = {spec.name: spec.select_parameters(model) for spec in self.specs}
        self.task_losses = {spec.name: bind_objective(task, spec.name) for spec in self.specs}
        self.trained = {name: weight for weights in self.parameters.values() for name, weight in weights.items()}
        self.prefixes = [prefix for spec in self.specs for prefix in spec.trains]

    def _build(self, phase: PhasePlan) -> None:
        parts, position = self.parts, self.position
        parts.parallel.set_groups([list(weights.values()) for weights in self.parameters.values()])
        trainings = []
        for index, spec in enumerate(self.specs):
            precision = parts.precision if index == 0 else parts.precision.fork(parts.bare)
            loss = CheckedLoss(
                self.task_losses[spec.name],
                parts.source,
                records_operations=self.records_operations,
                objective=spec.name,
            )
            training = self._make_training(
                spec, loss, self.parameters[spec.name],
                ObjectivePosition(position, spec.every, keeps_precision=index == 0), precision,
                total=-(-self.total // spec.every), gradients=GradientSource(), objective=spec.name,
            )  # fmt: skip
            trainings.append((spec, training))
            if index == 0:
                self.loss = loss
        self.objectives = Objectives(position, parts.model, parts.parallel, trainings)

    @property
    def training(self) -> Training:
        return self.objectives.current_training

    @property
    def trainings(self) -> Mapping[str, Training]:
        return {spec.name: training for spec, training in self.objectives.parts}

    @property
    def inputs(self) -> Objectives:
        return self.objectives

    def state(self, copy: Copy) -> tuple[Tensors, dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        state: dict[str, Any] = {}
        for spec, training in self.objectives.parts:
            optimizer_tensors, numbers = export_state(training.optimizer)
            tensors |= {f"{spec.name}/{name}": tensor for name, tensor in optimizer_tensors.items()}
            # The precision of the first objective is saved by the run.
            precision = {} if training.precision is self.parts.precision else training.precision.state()
            state[spec.name] = {"optimizer": numbers, "schedule": training.schedule.state(), "precision": precision}
        return {"optimizer": self.parts.parallel.checkpoint_tensors(tensors, copy)}, {"objectives": state}

    def load(self, start: LoadedCheckpoint) -> None:
        tensors, state = start.stored("optimizer"), start.state["objectives"]
        for spec, training in self.objectives.parts:
            prefix, saved = f"{spec.name}/", state[spec.name]
            selected = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            import_state(training.optimizer, selected, saved["optimizer"])
            self._load_schedule(training.schedule, saved["schedule"], start)
            if training.precision is not self.parts.precision:
                training.precision.load(saved["precision"])

    def release(self) -> None:
        self.parts.parallel.set_groups([])
        super().release()

    def start_lines(self) -> list[str]:
        lines = []
        for spec, training in self.objectives.parts:
            count = sum(weight.numel() for weight in training.parameters)
            frequency = "every update" if spec.every == 1 else f"one update in {spec.every}"
            trains = f"{', '.join(spec.trains)} ({count:,} parameters)"
            lines.append(f"objective {spec.name}: {trains}, {frequency}, optimizer {spec.optimizer.name}")
        sizes = {
            name: weight.numel()
            for name, weight in self.parts.bare.named_parameters()
            if self._required_grad[name] and name not in self.trained
        }
        if sizes:
            lines.append(
                f"no objective trains {abbreviate([*sizes])}: {sum(sizes.values()):,} parameters remain unchanged"
            )
        return lines


def bind_objective(task: Task, objective: str) -> Callable[[nn.Module, Any], Any]:
    """Return the loss of an objective as a function of model and batch."""

    @wraps(task.loss)  # so that errors name the line of the task
    def loss(model: nn.Module, batch: Any) -> Any:
        return task.loss(model, batch, objective)  # type: ignore[call-arg]

    return loss


def make_phase_kind(
    phase: PhasePlan,
    parts: Parts,
    order: Order,
    position: Position,
    retry_policy: RetryPolicy | None = None,
    before_step: BeforeStep = no_hooks,
) -> PhaseKind:
    """Return the kind of a phase, ready to run updates."""
    if phase.kind == "fit":
        return StatisticsPhase(phase, parts, order, position, retry_policy)
    has_objectives = bool(parse_objectives(parts.task, phase))
    if phase.name not in parts.task.losses:
        check_loss_signature(parts.task, parts.source, has_objectives=has_objectives)
    kind = ObjectivesPhase if has_objectives else LossPhase
    return kind(phase, parts, order, position, retry_policy, before_step=before_step)


def check_loss_signature(task: Task, source: Path, *, has_objectives: bool) -> None:
    """Raise TaskFault if `loss` does not accept the arguments that it is called with.

    has_objectives  the task declares objectives
    """
    kind = type(task)
    if has_objectives and kind.embed is not Task.embed:
        what = f"{kind.__name__} defines embed and couple, which do not support OBJECTIVES"
        raise TaskFault(what, where=str(source), fix="remove OBJECTIVES, or define loss(model, batch, objective)")
    arguments = ("model", "batch", "objective")[: 3 if has_objectives else 2]
    fix = f"def loss(self, {', '.join(arguments)}):" + ("" if has_objectives else " or declare OBJECTIVES in the file")
    check_arguments(task.loss, "loss", arguments, source, fix=fix)
