"""Reject attributes that a forward pass changes and later passes use, because checkpoints do not contain them."""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from runner.base.batch import MicroBatch, copy_batch
from runner.base.errors import TaskFault
from runner.base.text import abbreviate
from runner.engine.checks.task_calls import repeatable_pass, without_effects
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.parts.phase_kinds import GradientPhase
from runner.engine.update.loop import StepInfo
from runner.tensors.bitwise import is_dense

Place = tuple[str | None, str]  # (module name, or None for the task; attribute name)


class _Value(NamedTuple):
    """A recorded attribute: the object itself, a copy of its content, and the version of a tensor."""

    value: Any
    copied: Any
    version: int


class _Weight(NamedTuple):
    """A recorded parameter: how and where it is stored, its version, and its norm."""

    format: tuple[torch.device, torch.dtype, tuple[int, ...]]
    address: int
    version: int
    norm: float


class AttributeCheck(Hook):
    """Compares attributes of modules and the task before and after the first forward pass and evaluation.

    Most models change no attributes, and are not checked further. Some store a result that no other pass reads, such
    as an attention map, an auxiliary loss or a cache. So the loss of the next batch is computed with the old and the
    new values: an attribute is state only if the loss depends on it. Such state is lost when a run resumes, and makes
    training depend on when it is evaluated. Containers are compared by the identity of their elements. Datasets that
    the task keeps, such as large arrays and memory maps, are not read: only their replacement is detected.

    Parameters of modules outside of the model are compared in the second update, too, because a teacher that starts as
    a copy of the student still has the same values after the first pass.
    """

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self._work: GradientPhase | None = None  # None: the check is off
        self._num_checked = 0  # number of updates that were checked
        self._is_evaluated = False
        self._before: Mapping[Place, _Value] = {}
        self._changed: list[Place] = []
        self._moved: list[str] = []  # changed parameters of modules outside of the model

    def begin(self) -> None:
        work, parallel = self.phase.work, self.phase.parts.parallel
        # A resumed run is not checked, so that it does not fail after hours of training. With collectives inside the
        # model, forward passes that only some ranks run would deadlock.
        if isinstance(work, GradientPhase) and not (
            self.phase.position.update or parallel.is_lockstep or parallel.places_model
        ):
            self._work, work.loss.first_call_context = work, self._record_changes

    def after_update(self, step: StepInfo) -> None:
        if self._work is None or self._num_checked == 2:
            return
        self._num_checked += 1
        if self._num_checked == 2:
            self._check_moved("a forward pass")
        else:
            self._check_changed(self._work, "a forward pass")
            untrained = [name for name, weight in self._outside_parameters() if weight.grad is not None]
            if untrained:
                self.phase.run.observers.screen.warn(
                    f"gradients reach parameters outside of the model, which are not trained: {abbreviate(untrained)}"
                )
            if self._record_weights():
                self._work.loss.check_next_call(self._record_moved)

    @contextmanager
    def during_evaluation(self) -> Iterator[None]:
        if self._is_evaluated or self._work is None:
            yield
            return
        self._is_evaluated = True
        with self._record_changes():
            yield
        self._check_changed(self._work, "an evaluation")

    @contextmanager
    def _record_changes(self) -> Iterator[None]:
        self._before = _record_attributes(self._holders())
        with self._record_moved():
            yield
        now = _record_attributes(self._holders())
        self._changed = [
            place for place in {**self._before, **now} if _is_changed(self._before.get(place), now.get(place))
        ]

    @contextmanager
    def _record_moved(self) -> Iterator[None]:
        before = self._record_weights()
        yield
        now = self._record_weights()
        self._moved = [name for name in before.keys() & now.keys() if _is_moved(before[name], now[name])]

    def _check_moved(self, what: str) -> None:
        """Raise TaskFault, on every rank, if parameters outside of the model have changed."""
        parts = self.phase.parts
        moved = sorted({str(name) for names in parts.world.gather(self._moved) for name in names})
        if moved:
            owner = moved[0].split(".")[1]
            raise TaskFault(
                f"{what} changes parameters outside of the model, which no checkpoint contains: {abbreviate(moved)}",
                where=str(parts.source),
                fix=f"make the module a part of the model, in __init__: self.model.{owner} ="
                f" {owner}.requires_grad_(False)",
            )

    def _check_changed(self, work: GradientPhase, what: str) -> None:
        """Raise TaskFault, on every rank, if the loss depends on a changed attribute."""
        self._check_moved(what)
        parts, changed = self.phase.parts, self._changed
        used = self._find_used(work, self.phase.feed.peek(), changed) if any(parts.world.gather(bool(changed))) else []
        self._before, self._changed = {}, []
        states = sorted(
            {
                ("task" if module is None else module, key)
                for places in parts.world.gather(used)
                for module, key in places
            }
        )
        if states:
            names = [f"{module}.{key}" if module else key for module, key in states]
            holder, key = states[0]
            owner = "self.model" if holder == "task" else "self"
            raise TaskFault(
                f"{what} changes attributes that later passes use but checkpoints do not contain: {abbreviate(names)}",
                where=str(parts.source),
                fix=f'register each as a buffer: {owner}.register_buffer("{key}", torch.zeros(...)) in __init__, and'
                f" change it in place, as {owner}.{key}.copy_(new)",
            )

    def _find_used(self, work: GradientPhase, batch: MicroBatch, changed: list[Place]) -> list[Place]:
        """Return the changed attributes on which the loss of a batch depends."""
        if not batch.is_counted or not changed:
            return []
        parts, holders = self.phase.parts, self._holders()
        now = {place: holders[place[0]].get(place[1], _ABSENT) for place in changed}
        before = {place: self._before[place].copied if place in self._before else _ABSENT for place in changed}
        current = {place: _copy(value) for place, value in now.items()}

        def loss(values: Mapping[Place, Any]) -> float:
            _set_attributes(holders, {place: _copy(value) for place, value in values.items()})
            with repeatable_pass(parts, batch.samples, seed=0), parts.precision.forward():
                total, *_ = work.task_loss(parts.model, copy_batch(batch.batch))
            return float(total)

        with without_effects(parts), suppress(Exception):  # the model may fail with old values, which proves nothing
            try:
                reference = loss(current)
                kernel_noise = 4 * abs(reference - loss(current))

                def differs(values: Mapping[Place, Any]) -> bool:
                    value = loss(values)
                    return math.isfinite(value) and abs(value - reference) > kernel_noise

                if differs(before):
                    tried = changed[:_MAX_CHECKED_ALONE]
                    alone = [place for place in tried if differs({**current, place: before[place]})]
                    return alone or changed
            finally:
                _set_attributes(holders, now)
        return []

    def _outside_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of modules that the task keeps outside of the model."""
        task = self.phase.parts.task
        inside = {*map(id, self.phase.parts.bare.parameters()), *map(id, task.model.parameters())}
        for key, value in vars(task).items():
            if isinstance(value, nn.Module):
                for name, weight in value.named_parameters(f"task.{key}"):
                    if id(weight) not in inside:
                        yield name, weight

    def _record_weights(self) -> dict[str, _Weight]:
        """Record the parameters outside of the model; norms reveal writes through `.data`, versions do not."""
        weights = {
            name: weight
            for name, weight in self._outside_parameters()
            if type(weight) is nn.Parameter
            and weight.is_floating_point()
            and weight.element_size() > 1
            and is_dense(weight)
        }
        norms = torch._foreach_norm([weight.detach() for weight in weights.values()]) if weights else ()
        return {
            name: _Weight(
                (weight.device, weight.dtype, weight.stride()), weight.data_ptr(), _version(weight), norm.item()
            )
            for (name, weight), norm in zip(weights.items(), norms, strict=True)
        }

    def _holders(self) -> dict[str | None, dict[str, Any]]:
        """Return the attributes of each module under its name, and those of the task under None."""
        modules = {name: vars(module) for name, module in self.phase.parts.bare.named_modules()}
        return {**modules, None: vars(self.phase.parts.task)}


def _record_attributes(holders: Mapping[str | None, Mapping[str, Any]]) -> dict[Place, _Value]:
    return {
        (name, key): _Value(value, _copy(value), _version(value))
        for name, attributes in holders.items()
        for key, value in attributes.items()
        if key not in _MODULE_ATTRIBUTES and isinstance(value, _CHECKED_TYPES)
    }


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _is_moved(before: _Weight, now: _Weight) -> bool:
    """Return whether the values changed; a conversion, as by `module.to(device)`, counts as no change."""
    if before.format != now.format:
        return False
    is_same_storage = before.address == now.address
    if is_same_storage and before.version != now.version:
        return True
    # With a different alignment, a norm is summed in a different order. `repr`, because NaN must equal NaN.
    tolerance = 0.0 if is_same_storage else 4 * torch.finfo(now.format[1]).eps
    return repr(before.norm) != repr(now.norm) and not math.isclose(before.norm, now.norm, rel_tol=tolerance)


def _is_changed(before: _Value | None, now: _Value | None) -> bool:
    if before is None or now is None:
        return before is not now
    old: Any = before.copied
    new: Any = now.value
    if type(old) is not type(new) or (before.value is not now.value and isinstance(new, Tensor | np.ndarray)):
        return True
    if isinstance(new, Tensor):
        return before.version != now.version
    if old is new:  # immutable, or not copied
        return False
    if isinstance(new, np.ndarray):
        with suppress(ValueError):  # elements of dtype object, such as arrays, may have no truth value
            return not np.array_equal(old, new, equal_nan=new.dtype.kind in "fc")
        return False
    if isinstance(new, Mapping):
        return old.keys() != new.keys() or any(old[key] is not new[key] for key in new)
    if isinstance(new, list | tuple | collections.deque):
        return len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True))
    return bool(old != new)  # sets, numbers and strings


def _copy(value: Any) -> Any:
    """Return a shallow copy of a value; large values and memory maps may be datasets, and are not copied."""
    if isinstance(value, Tensor):
        return value.detach().clone() if is_dense(value) and value.nbytes <= _MAX_COPIED_BYTES else value
    if isinstance(value, np.ndarray):
        return value if isinstance(value, np.memmap) or value.nbytes > _MAX_COPIED_BYTES else copy.copy(value)
    if isinstance(value, _CONTAINERS) and len(value) <= _MAX_COPIED_ITEMS:
        with suppress(Exception):  # a subclass may forbid copies
            return copy.copy(value)
    return value


def _set_attributes(holders: Mapping[str | None, dict[str, Any]], values: Mapping[Place, Any]) -> None:
    for (name, key), value in values.items():
        if value is _ABSENT:
            holders[name].pop(key, None)
        else:
            holders[name][key] = value


_ABSENT = object()
_CONTAINERS = (list, tuple, dict, set, collections.deque)
_CHECKED_TYPES = (bool, int, float, complex, str, type(None), Tensor, np.ndarray, *_CONTAINERS)
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_MAX_CHECKED_ALONE = 8  # number of changed attributes that are checked separately
_MAX_COPIED_BYTES, _MAX_COPIED_ITEMS = 1 << 26, 1 << 20
