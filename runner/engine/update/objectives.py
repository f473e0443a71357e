"""Several objectives in one update: each has its parameters, loss, optimizer, loss scale and frequency.

All objectives of an update see the same samples, in order: the second one sees the parameters that the first one
updated, as the generator of a GAN sees the discriminator.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.batch import MicroBatch
from runner.base.errors import ConfigError, Problem
from runner.base.task import Task
from runner.config.configuration import Choice
from runner.config.module_names import unmatched_problems
from runner.config.options import find_signature, implemented_options, option_reference, unknown_option
from runner.config.phases import PHASE_GROUPS
from runner.config.schema import default_values, describe_mismatch, did_you_mean
from runner.distributed.parallel import Parallel
from runner.engine.update.gradients import ForwardWrapper, SharedSamples
from runner.engine.update.loop import Position, StepInfo, Training, UpdateWrapper
from runner.engine.update.parameter_selection import select_parameters
from runner.plan.run_plan import PhasePlan

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")  # a name is part of keys and of metric names
KEYS = ("trains", "shares", "every", "max_grad_norm", *PHASE_GROUPS)


@dataclass(frozen=True)
class ObjectiveSpec:
    """An objective as the task declares it.

    trains  names or prefixes of its parameters
    shares  names or prefixes of parameters that other objectives train, too
    every   interval in updates: the objective is part of one update in `every`
    """

    name: str
    trains: tuple[str, ...]
    shares: tuple[str, ...]
    every: int
    optimizer: Choice
    scheduler: Choice
    max_grad_norm: float | None

    def select_parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters by name; a shared parameter has the first of its names, see `select_parameters`."""
        return select_parameters(model, self.trains)


def parse_objectives(task: Task, phase: PhasePlan) -> list[ObjectiveSpec]:
    """Return the objectives that the task declares for a phase; none if the phase has a single loss.

    Raises ConfigError with all problems: unknown keys, no parameters, parameters shared without `shares`.
    """
    if phase.name in task.losses:
        return []
    problems: list[Problem] = []
    specs = []
    declared = {
        name: _override_keys(content, phase.objectives.get(name, {})) for name, content in task.objectives.items()
    }
    location = getattr(sys.modules.get(type(task).__module__), "__file__", None)
    file = Path(location) if location else None
    for name, content in declared.items():
        where = f"OBJECTIVES[{name!r}]"
        if not isinstance(content, Mapping):
            problems.append(Problem("must be a mapping of keys to values", where))
            continue
        new: list[Problem] = []
        if not _NAME.fullmatch(str(name)):
            new.append(Problem("the name must be a string of letters, digits, _ and -", where, 'as in "generator"'))
        for key in content:
            if key not in KEYS and key.partition(".")[0] not in PHASE_GROUPS:
                new.append(Problem(f"unknown key {key}", where, did_you_mean(str(key), KEYS)))
        every, norm = content.get("every", 1), content.get("max_grad_norm", phase.max_grad_norm)
        if describe_mismatch(int, every) or every < 1:
            new.append(Problem(f"the value of every must be an integer of at least 1, but is {every!r}", where))
        if norm is not None and (describe_mismatch(float, norm) or norm <= 0):
            new.append(Problem(f"the value of max_grad_norm must be None or a number above 0, but is {norm!r}", where))
        trains, shares = content.get("trains", []), content.get("shares", [])
        if describe_mismatch(list[str], trains) or describe_mismatch(list[str], shares) or not trains:
            new.append(
                Problem(
                    'the value of trains must be a list of names of parameters or modules, such as ["generator"]', where
                )
            )
        optimizer, scheduler = (_choose(group, content, getattr(phase, group), file, new) for group in PHASE_GROUPS)
        problems += [replace(problem, where=where) for problem in new]
        if not new:
            specs.append(ObjectiveSpec(name, tuple(trains), tuple(shares), every, optimizer, scheduler, norm))
    if not problems and specs:
        problems = list(_check_parameters(specs, task.model))
    if problems:
        raise ConfigError(problems)
    return specs


def unsupported_error(parallelism: str) -> ConfigError:
    """Return the error for a strategy that cannot train several objectives."""
    what = "cannot train several objectives in one update"
    return ConfigError(Problem(what, f"parallelism={parallelism}", "use parallelism=ddp or parallelism=single"))


def _choose(
    group: str, content: Mapping[str, Any], default: Choice, file: Path | None, problems: list[Problem]
) -> Choice:
    """Return the option of a group that the objective names, by default the phase's, with the keys of the objective.

    default   option of the phase
    file      task file, which may define options
    problems  receives invalid names and keys
    """
    name = content.get(group, default.name)
    function = default.function if name == default.name else option_reference(group, str(name), file)
    signature = find_signature(group, function, file)
    if signature is None:
        problems.append(unknown_option(group, name, implemented_options(group, file), ""))
        return default
    keys = {key.partition(".")[2]: value for key, value in content.items() if key.startswith(f"{group}.")}
    for key, value in keys.items():
        reason = describe_mismatch(signature.keys[key].type, value) if key in signature.keys else "unknown key"
        if reason:
            hint = "" if key in signature.keys else did_you_mean(key, signature.keys)
            problems.append(Problem(f"{group}.{key}: {reason}", "", hint))
    options = default.options if name == default.name else default_values(signature.keys)
    return Choice(name, function, {**options, **keys})


def _override_keys(content: Any, overrides: Mapping[str, Any]) -> Any:
    """Return a declared objective with the keys given on the command line; those of a replaced option are dropped."""
    if not isinstance(content, Mapping) or not overrides:
        return content
    replaced = {group for group in PHASE_GROUPS if overrides.get(group, content.get(group)) != content.get(group)}
    kept = {key: value for key, value in content.items() if key.partition(".")[0] not in replaced}
    return {**kept, **{key: value for key, value in overrides.items() if value is not None}}


def _check_parameters(specs: Sequence[ObjectiveSpec], model: nn.Module) -> Iterator[Problem]:
    named = dict(model.named_parameters(remove_duplicate=False))
    names = [name for name, weight in named.items() if weight.requires_grad]
    frozen = [name for name, weight in named.items() if not weight.requires_grad]
    owners: dict[str, list[ObjectiveSpec]] = {}
    for spec in specs:
        where = f"OBJECTIVES[{spec.name!r}]"
        yield from unmatched_problems((*spec.trains, *spec.shares), names, where, frozen=frozen)
        for name in spec.select_parameters(model):
            owners.setdefault(name, []).append(spec)
    for name, several in owners.items():
        undeclared = [spec for spec in several if name not in select_parameters(model, spec.shares)]
        if len(several) > 1 and undeclared:
            others = ", ".join(spec.name for spec in several)
            yield Problem(
                f"parameter {name} is trained by several objectives: {others}",
                f"OBJECTIVES[{undeclared[0].name!r}]",
                f'train it in one of them, or write "shares": ["{name.partition(".")[0]}"] in each',
            )
            return
    if all(spec.every > 1 for spec in specs):
        yield Problem("no objective is part of every update", "OBJECTIVES", 'set "every": 1 in one of them')


class ObjectivePosition(Position):
    """Position of an objective: it counts one update in `every` of the phase."""

    def __init__(self, phase_position: Position, every: int, *, keeps_precision: bool) -> None:
        self.phase_position, self.every, self.keeps_precision = phase_position, every, keeps_precision
        self.phase = phase_position.phase

    @property
    def skipped_before(self) -> int:  # type: ignore[override]
        """Updates skipped in earlier phases; 0 with a separate precision, which counts from 0 in each phase."""
        return self.phase_position.skipped_before if self.keeps_precision else 0

    @property
    def update(self) -> int:  # type: ignore[override]
        """Number of completed updates of this objective."""
        return -(-self.phase_position.update // self.every)  # rounded up: all objectives take part in update 0


@dataclass
class Objectives:
    """Inputs of the training loop for several objectives.

    parts           specification and training of each objective, in order
    update_wrapper  wraps the whole update; each objective is retried separately
    """

    position: Position
    model: nn.Module
    parallel: Parallel
    parts: Sequence[tuple[ObjectiveSpec, Training]]
    update_wrapper: UpdateWrapper = field(default_factory=UpdateWrapper)
    current: int = 0  # index of the current objective, or of the last one between updates

    @property
    def current_training(self) -> Training:
        """The training of the current objective, or of the last one; for error reports."""
        return self.parts[self.current][1]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, in the order of the objectives."""
        return [training.optimizer for _, training in self.parts]

    def wrap_forward(self, wrapper: ForwardWrapper) -> Objectives:
        """Return a copy with `wrapper` applied to every forward pass."""
        return replace(self, parts=[(spec, training.wrap_forward(wrapper)) for spec, training in self.parts])

    def updater(self, batches: Iterator[MicroBatch]) -> Callable[[], StepInfo]:
        """Return a function that runs one update."""
        samples = SharedSamples(batches)

        def update() -> StepInfo:
            number = self.position.update
            due = [index for index, (spec, _) in enumerate(self.parts) if number % spec.every == 0]
            steps: dict[str, StepInfo] = {}
            try:
                for index in due:
                    spec, _ = self.parts[index]
                    steps[spec.name] = self._step(index, samples, keep=index != due[-1])
            finally:
                samples.end()
            return combine_steps(number + 1, steps)

        return update

    def _step(self, index: int, samples: SharedSamples, *, keep: bool) -> StepInfo:
        self.current = index
        training = self.current_training
        # Backward passes must not add to the gradients of other objectives, such as those of a discriminator. All are
        # disabled before those of this objective are enabled, because a parameter may belong to several objectives.
        for _, other in self.parts:
            for weight in other.parameters:
                weight.requires_grad_(False)
        for weight in training.parameters:
            weight.requires_grad_(True)
        self.parallel.select_group(index)
        attempts = 0

        def attempt() -> StepInfo:
            nonlocal attempts
            attempts += 1
            return training.updater(samples.read(again=attempts > 1, keep=keep))()

        return training.update_wrapper.run(attempt)


def combine_steps(update: int, steps: Mapping[str, StepInfo]) -> StepInfo:
    """Combine the results of the objectives: the loss is the sum of their means, the item count is that of the first.

    The loss, gradient norm and learning rate of each objective are additional metrics under its name.
    """
    first = next(iter(steps.values()))
    mean: Any = 0.0
    squares: list[Tensor] = []
    extra: dict[str, tuple[Any, Any]] = {}
    bad: dict[tuple[int, str], None] = {}
    for name, step in steps.items():
        assert step.loss_sum is not None, "an objective has a loss"
        mean = mean + step.loss_sum / step.items
        extra[f"{name}/loss"] = (step.loss_sum, step.items)
        if step.grad_norm is not None:
            squares.append(step.grad_norm.square())
            extra[f"{name}/grad_norm"] = (step.grad_norm, 1)
        extra[f"{name}/lr"] = (math.nan if step.lr is None else step.lr, 1)
        extra |= {f"{name}/{key}": pair for key, pair in step.extra.items()}
        bad |= dict.fromkeys(step.bad)
    norm = torch.stack([square.float() for square in squares]).sum().sqrt() if squares else None
    return StepInfo(update, mean * first.items, first.items, norm, first.lr, tuple(bad), extra)
