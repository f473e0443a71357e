"""Detect frozen parameters and non-persistent buffers that forward passes change; synchronize and save them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.base.errors import TaskFault
from runner.base.text import abbreviate
from runner.distributed.agreement import find_unequal, find_unequal_sums
from runner.durable.checkpoint import LoadedCheckpoint
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.parts.assemble import Parts
from runner.engine.parts.phase_kinds import LossPhase
from runner.engine.update.loop import StepInfo
from runner.tensors.bitwise import bitwise_equal, is_dense
from runner.tensors.module_buffers import TensorVersion, buffers_of, is_writable, list_buffers, treat_as_buffer

if TYPE_CHECKING:  # `run` imports hooks
    from runner.engine.run import TrainingRun

FROZEN = "frozen"
_WITHOUT_GRAD = "without_grad"
_BUFFER_PREFIX = "buffer."  # prefix of tensor names in a checkpoint, so that no buffer has the name of another entry


class _TrackedTensor(NamedTuple):
    """A tensor of a module, and its version when it was recorded."""

    module: nn.Module
    key: str
    tensor: Tensor
    seen: TensorVersion

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was changed in place or replaced."""
        return self.seen.is_changed(getattr(self.module, self.key, None))


class ForwardState(Hook):
    """Detects what forward passes change: after the first update, and at each evaluation and checkpoint.

    A frozen parameter that a forward pass changes in place is treated as a buffer of its module: it is then
    synchronized across ranks and restored after evaluations. It does not appear in `buffers()` of the module,
    because a task may copy the buffers of one module to those of another, such as a momentum encoder.

    Non-persistent buffers are saved if training changes them, even if they have grown. A buffer that has shrunk is not
    restored: it may be a cache whose length the module also stores elsewhere.

    The names of trained parameters for which a hook or the task has set requires_grad=False are saved; it is set again
    on resume.
    """

    name = "forward_state"

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self._names = phase.run.forward_state
        self._is_first = True
        self._buffer_copies: dict[str, Tensor] = {}  # copies of non-persistent buffers, during the first update
        # Read requires_grad before this phase freezes the parameters that only other phases train.
        self._frozen = {
            name: tracked for name, tracked in _track_parameters(phase.parts.bare) if not tracked.tensor.requires_grad
        }
        self._buffers: dict[str, _TrackedTensor] = {}
        self._saved_without_grad: set[str] | None = None  # None: not known

    def begin(self) -> None:
        if self._saved_without_grad is not None:
            self._warn_of_changed_grad(self._saved_without_grad ^ {*self._find_without_grad()})
        self._record_versions()
        self._buffer_copies = {
            name: tracked.tensor.detach().to("cpu", copy=True) for name, tracked in self._buffers.items()
        }

    def after_update(self, step: StepInfo) -> None:
        if not self._is_first:
            return
        self._is_first = False
        # Writes through .data do not increment versions, so the bits are compared.
        uncounted = [name for name, before in self._buffer_copies.items() if not self._has_same_bits(name, before)]
        self._names.buffers.update(uncounted)
        self._buffer_copies = {}
        if self._convert_changed():
            with self.phase.parts.parallel.buffer_update():  # synchronizes them: each rank has changed its copy
                pass
        self._record_changes()
        if self.phase.run.plan.hooks and not self.phase.has_one_rank and self.phase.parts.parallel.splits_batch:
            self._warn_of_unequal_copies()

    def _warn_of_unequal_copies(self) -> None:
        parts = self.phase.parts
        weights = {name: tracked.tensor for name, tracked in _track_parameters(parts.bare)}
        different = find_unequal_sums(weights, parts.world)
        if different:
            self.phase.run.observers.screen.warn(
                f"parameters differ between ranks after the first update: {abbreviate(different)}. A hook that changes"
                " parameters or gradients must change them identically on every rank. The global random generators"
                " differ between ranks, so draw from a torch.Generator with a fixed seed"
            )

    @contextmanager
    def during_evaluation(self) -> Iterator[None]:
        self._record_changes()
        yield
        changed = self._find_changed_frozen()
        if changed:
            raise TaskFault(
                "an evaluation changes frozen parameters, which are restored only if training changes them too:"
                f" {abbreviate(changed)}",
                where=str(self.phase.parts.source),
                fix=_buffer_fix(self._frozen[changed[0]].key),
            )
        self._record_versions()  # changing and restoring buffers increments their versions

    def state_dict(self) -> dict[str, Any]:
        self._record_changes()
        tensors = {
            _BUFFER_PREFIX + name: buffer
            for name, _, _, buffer in _non_persistent_buffers(self.phase.parts.bare)
            if name in self._names.buffers
        }
        return {FROZEN: sorted(self._names.frozen), _WITHOUT_GRAD: self._find_without_grad(), **tensors}

    def load_state_dict(self, state: Any) -> None:
        if state is None:
            return
        self._convert_to_buffers(state[FROZEN])
        if _WITHOUT_GRAD in state:  # not in checkpoints of version 0.3 and earlier
            self._saved_without_grad = {*state[_WITHOUT_GRAD]}
            for name in state[_WITHOUT_GRAD]:
                self.phase.parts.bare.get_parameter(name).requires_grad_(False)
        self._names.buffers |= {name.removeprefix(_BUFFER_PREFIX) for name in state if name.startswith(_BUFFER_PREFIX)}
        for name in _load(self.phase.parts.bare, state):
            self.phase.run.observers.screen.warn(
                f"buffer {name} of the checkpoint is smaller than that of the model, and is not restored"
            )

    @staticmethod
    def load_finished_phase(run: TrainingRun, state: Any) -> None:
        """Restore the state of a finished phase; the next phase starts from the model of that phase.

        In an uninterrupted run, the next phase has this state too, and its checkpoints contain it.
        """
        if state is None:
            return
        for name in state[FROZEN]:
            _treat_as_buffer(run.parts.bare, run.parts.bare.get_parameter(name))
        run.forward_state.frozen.update(state[FROZEN])
        run.forward_state.buffers |= {
            name.removeprefix(_BUFFER_PREFIX) for name in state if name.startswith(_BUFFER_PREFIX)
        }
        _load(run.parts.bare, state)

    @staticmethod
    def load_for_inference(parts: Parts, checkpoint: LoadedCheckpoint) -> None:
        if ForwardState.name in checkpoint.stems:
            _load(parts.bare, checkpoint.tensors(ForwardState.name))

    # ------------------------------------------------------------ trained parameters without gradients

    def _find_without_grad(self) -> list[str]:
        """Return the trained parameters with requires_grad=False; none with objectives, where the loop sets it."""
        work = self.phase.work
        trained = work.trained if isinstance(work, LossPhase) else {}
        return sorted(name for name, weight in trained.items() if not weight.requires_grad)

    def _warn_of_changed_grad(self, changed: Collection[str]) -> None:
        if changed:
            self.phase.run.observers.screen.warn(
                f"requires_grad differs from the checkpoint: {abbreviate(sorted(changed))}. begin() of a hook, or"
                " begin_update, has changed it; in an uninterrupted run, begin() is not called again"
            )

    # ------------------------------------------------------------ detecting changes

    def _record_versions(self) -> None:
        self._frozen = {name: _track(*tracked[:3]) for name, tracked in self._frozen.items()}
        self._buffers = {
            name: _track(module, key, buffer)
            for name, module, key, buffer in _non_persistent_buffers(self.phase.parts.bare)
        }

    def _has_same_bits(self, name: str, before: Tensor) -> bool:
        tracked = self._buffers[name]
        now = buffers_of(tracked.module).get(tracked.key)
        return now is None or bitwise_equal(now, before)

    def _find_changed_frozen(self) -> list[str]:
        """Return the frozen parameters that changed since the last check, on any rank."""
        changed = [name for name, tracked in self._frozen.items() if tracked.is_changed]
        return sorted({name for names in self.phase.parts.world.gather(changed) for name in names})

    def _record_changes(self) -> None:
        """Record the buffers that have changed since the last check, and treat changed parameters as buffers."""
        for name, tracked in self._buffers.items():
            now = buffers_of(tracked.module).get(tracked.key)
            if tracked.is_changed and now is not None:
                self._names.buffers.add(name)
        changed = self._convert_changed()
        if changed and not self.phase.has_one_rank:  # ranks did not synchronize them in earlier updates
            buffers = {ref.name: ref.tensor for ref in list_buffers(self.phase.parts.bare) if ref.name in changed}
            tensors = {name: tensor for name, tensor in buffers.items() if tensor is not None and is_dense(tensor)}
            different = find_unequal(tensors, self.phase.parts.world)
            if different:
                raise TaskFault(
                    "frozen parameters differ between ranks, because forward passes changed them:"
                    f" {abbreviate(different)}",
                    where=str(self.phase.parts.source),
                    fix=_buffer_fix(different[0].rpartition(".")[2]),
                )
        self._record_versions()

    def _convert_changed(self) -> list[str]:
        changed = self._find_changed_frozen()
        replaced = [name for name in changed if name in self._frozen and self._is_replaced(self._frozen[name])]
        if replaced:
            raise TaskFault(
                f"a forward pass replaces frozen parameters: {abbreviate(replaced)}",
                where=str(self.phase.parts.source),
                fix=_buffer_fix(self._frozen[replaced[0]].key),
            )
        self._convert_to_buffers(changed)
        return changed

    @staticmethod
    def _is_replaced(tracked: _TrackedTensor) -> bool:
        return getattr(tracked.module, tracked.key, None) is not tracked.tensor

    def _convert_to_buffers(self, names: Collection[str]) -> None:
        """Treat these parameters as buffers: evaluations restore them, and ranks synchronize them."""
        for name in names:
            tracked = self._frozen.pop(name, None)
            if tracked is not None:
                _treat_as_buffer(self.phase.parts.bare, tracked.tensor)
        self._names.frozen.update(names)


def _treat_as_buffer(model: nn.Module, parameter: Tensor) -> None:
    for module in model.modules():  # several modules may share the parameter
        for key in [key for key, weight in module._parameters.items() if weight is parameter]:
            treat_as_buffer(module, key)


def _buffer_fix(key: str) -> str:
    return f'register it as a buffer and change it in place: self.register_buffer("{key}", ...)'


def _track(module: nn.Module, key: str, tensor: Tensor) -> _TrackedTensor:
    return _TrackedTensor(module, key, tensor, TensorVersion.of(tensor))


def _track_parameters(model: nn.Module) -> Iterator[tuple[str, _TrackedTensor]]:
    """Yield the plain parameters by name, except those that an earlier phase has treated as buffers.

    Parameters that a strategy has sharded or moved to another rank are not plain.
    """
    for name, weight in model.named_parameters():
        prefix, _, key = name.rpartition(".")
        module = model.get_submodule(prefix)
        is_plain = type(weight) is nn.Parameter and is_dense(weight) and not weight.is_inference()
        if is_plain and key not in buffers_of(module):
            yield name, _track(module, key, weight)


def _non_persistent_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for name, module, key, is_saved in list_buffers(model):
        buffer = buffers_of(module)[key]
        if not is_saved and buffer is not None and is_dense(buffer) and not buffer.is_inference():
            yield name, module, key, buffer


def _load(model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """Load the saved buffers into the model; skip those that are smaller than in the model, and return their names."""
    smaller = []
    with torch.no_grad():
        for name, module, key, buffer in [*_non_persistent_buffers(model)]:
            value = saved.get(_BUFFER_PREFIX + name)
            if value is None:
                continue
            if value.shape == buffer.shape and is_writable(buffer):
                buffer.copy_(value)
            elif value.numel() < buffer.numel():
                smaller.append(name)
            else:
                buffers_of(module)[key] = value.to(buffer.device, buffer.dtype, copy=True)
    return smaller
