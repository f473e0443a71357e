"""Track state that forward passes change besides weights and buffers: frozen parameters, non-persistent buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.base.bitwise import bitwise_equal, is_dense, view_bytes
from runner.base.errors import TaskFault
from runner.base.module_buffers import is_writable
from runner.base.text import abbreviate
from runner.durable.checkpoint import Loaded
from runner.engine.assemble import Parts
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.loop import StepInfo

FROZEN = "frozen"
_BUFFER = "buffer."  # prefix of tensor names in a checkpoint, so that no buffer has the name of another entry


class _Seen(NamedTuple):
    """A tensor of a module, and its version: torch counts in-place changes."""

    module: nn.Module
    key: str
    tensor: Tensor
    version: int

    @property
    def is_changed(self) -> bool:
        """Whether it was changed in place or replaced."""
        now = getattr(self.module, self.key, None)
        return now is not self.tensor or self.tensor._version != self.version


class ForwardState(Hook):
    """Detects after the first update what forward passes change, and again at each evaluation and checkpoint.

    A frozen parameter that a forward pass changes in place becomes a buffer of its module: it is then synchronized
    over ranks and restored after evaluations. Non-persistent buffers that training changes are saved; a cache whose
    shape changes is not, because its module may record its length elsewhere.
    """

    name = "forward_state"

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self._names = phase.run_.forward_state
        self._is_first = True
        self._copies: dict[str, Tensor] = {}  # copies of non-persistent buffers, during the first update
        # Before the phase freezes the parameters that it does not train: other phases train them.
        self._frozen = {name: seen for name, seen in _parameters(phase.parts.bare) if not seen.tensor.requires_grad}
        self._buffers: dict[str, _Seen] = {}

    def begin(self) -> None:
        self._look()
        self._copies = {name: seen.tensor.detach().to("cpu", copy=True) for name, seen in self._buffers.items()}

    def after_update(self, step: StepInfo) -> None:
        if not self._is_first:
            return
        self._is_first = False
        # torch does not count a write through .data, so the bits are compared.
        hidden = [name for name, before in self._copies.items() if not self._is_same(name, before)]
        self._names.buffers.update(hidden)
        self._copies = {}
        if self._adopt_changed():
            with self.phase.parts.parallel.update_of_buffers():  # this update changed them on every rank
                pass
        self._note()

    @contextmanager
    def during_evaluation(self) -> Iterator[None]:
        self._note()
        yield
        changed = self._changed()
        if changed:
            raise TaskFault(
                f"an evaluation changes frozen parameters, which training does not: {abbreviate(changed)}",
                where=str(self.phase.parts.source),
                fix=_as_buffer(self._frozen[changed[0]].key),
            )
        self._look()  # buffers were changed and restored, which also increments versions

    def state_dict(self) -> dict[str, Any]:
        self._note()
        tensors = {
            _BUFFER + name: buffer
            for name, buffer in _non_persistent(self.phase.parts.bare)
            if name in self._names.buffers
        }
        return {FROZEN: sorted(self._names.frozen), **tensors}

    def load_state_dict(self, state: Any) -> None:
        if state is None:
            return
        self._adopt(state[FROZEN])
        self._names.buffers |= {name.removeprefix(_BUFFER) for name in state if name.startswith(_BUFFER)}
        for name in _load(self.phase.parts.bare, state):
            self.phase.run_.observers.screen.warn(
                f"buffer {name} of the checkpoint has another shape, and is not restored"
            )

    @staticmethod
    def load_for_inference(parts: Parts, checkpoint: Loaded) -> None:
        if ForwardState.name in checkpoint.stems:
            _load(parts.bare, checkpoint.tensors(ForwardState.name))

    # ------------------------------------------------------------ detecting changes

    def _look(self) -> None:
        self._frozen = {name: _seen(*seen[:3]) for name, seen in self._frozen.items()}
        self._buffers = {
            name: _seen(module, key, buffer) for name, module, key, buffer in _places(self.phase.parts.bare)
        }

    def _is_same(self, name: str, before: Tensor) -> bool:
        seen = self._buffers[name]
        now = seen.module._buffers.get(seen.key)
        return now is None or now.shape != before.shape or bitwise_equal(now, before)

    def _changed(self) -> list[str]:
        """Return the frozen parameters that changed since the last check, on any rank."""
        mine = [name for name, seen in self._frozen.items() if seen.is_changed]
        return sorted({name for there in self.phase.parts.world.gather(mine) for name in there})

    def _note(self) -> None:
        """Record what has changed since the last check."""
        for name, seen in self._buffers.items():
            now = seen.module._buffers.get(seen.key)
            if seen.is_changed and now is not None and now.shape == seen.tensor.shape:
                self._names.buffers.add(name)
        changed = self._adopt_changed()
        if changed and not self.phase.has_one_rank:  # ranks did not synchronize them in earlier updates
            self._must_be_equal(changed)
        self._look()

    def _adopt_changed(self) -> list[str]:
        changed = self._changed()
        replaced = [name for name in changed if name in self._frozen and self._is_replaced(self._frozen[name])]
        if replaced:
            raise TaskFault(
                f"a forward pass replaces frozen parameters: {abbreviate(replaced)}",
                where=str(self.phase.parts.source),
                fix=_as_buffer(self._frozen[replaced[0]].key),
            )
        self._adopt(changed)
        return changed

    @staticmethod
    def _is_replaced(seen: _Seen) -> bool:
        return getattr(seen.module, seen.key, None) is not seen.tensor

    def _adopt(self, names: Collection[str]) -> None:
        """Convert these parameters to buffers, so that evaluations and ranks treat them as such."""
        for name in names:
            seen = self._frozen.pop(name, None)
            if seen is not None:
                for module in self.phase.parts.bare.modules():  # several modules may share it
                    for key in [key for key, weight in module._parameters.items() if weight is seen.tensor]:
                        module._buffers[key] = module._parameters.pop(key)
        self._names.frozen.update(names)

    def _must_be_equal(self, names: Collection[str]) -> None:
        tensors = {name: tensor for name, tensor in self.phase.parts.bare.named_buffers() if name in names}
        bits = {
            name: hashlib.sha256(view_bytes(tensor).cpu().numpy().data).hexdigest()
            for name, tensor in tensors.items()
            if is_dense(tensor)
        }
        found: dict[str, set[str]] = {}
        for of_rank in self.phase.parts.world.gather(bits):
            for name, digest in of_rank.items():
                found.setdefault(name, set()).add(digest)
        different = [name for name, digests in found.items() if len(digests) > 1]
        if different:
            raise TaskFault(
                f"frozen parameters differ between ranks; forward passes changed them: {abbreviate(different)}",
                where=str(self.phase.parts.source),
                fix=_as_buffer(different[0].rpartition(".")[2]),
            )


def _as_buffer(key: str) -> str:
    return f'register it as a buffer and change it in place: self.register_buffer("{key}", ...)'


def _seen(module: nn.Module, key: str, tensor: Tensor) -> _Seen:
    return _Seen(module, key, tensor, tensor._version)


def _parameters(model: nn.Module) -> Iterator[tuple[str, _Seen]]:
    """Yield the plain parameters by name; a strategy may have sharded others or moved them to another rank."""
    for name, weight in model.named_parameters():
        prefix, _, key = name.rpartition(".")
        if type(weight) is nn.Parameter and is_dense(weight) and not weight.is_inference():
            yield name, _seen(model.get_submodule(prefix), key, weight)


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield name, module, key and tensor of the non-persistent buffers."""
    for prefix, module in model.named_modules():
        for key in module._non_persistent_buffers_set:
            buffer = module._buffers.get(key)
            if buffer is not None and is_dense(buffer) and not buffer.is_inference():
                yield f"{prefix}.{key}" if prefix else key, module, key, buffer


def _non_persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, buffer) for name, _, _, buffer in _places(model))


def _load(model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """Load the saved buffers into the model; return the names that the model lacks."""
    left = {name.removeprefix(_BUFFER): value for name, value in saved.items() if name.startswith(_BUFFER)}
    with torch.no_grad():
        for name, module, key, buffer in [*_places(model)]:
            if name in left and left[name].shape == buffer.shape:
                value = left.pop(name).to(buffer.device, buffer.dtype, copy=True)
                if is_writable(buffer):
                    buffer.copy_(value)
                else:
                    module._buffers[key] = value
    here = {name for name, *_ in _places(model)}
    return [name for name in left if name in here]
