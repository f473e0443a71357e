"""Retry an update after out of memory, from the state before its first attempt.

All state that a forward or backward pass may change is restored: gradients, random generators, buffers of the model
(statistics of batch norms) and the loss scale. The same samples are read again, in smaller micro-batches. If some state
cannot be restored, the run resumes from its last checkpoint instead of continuing with wrong numbers.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from runner.axes.precision import Precision
from runner.base.accelerator import get_accelerator
from runner.base.bitwise import bitwise_equal
from runner.base.oom_errors import COMMUNICATION, OomCause, find_oom_cause
from runner.base.optimizer_state import StepChangeDetector
from runner.distributed.parallel import Discarded
from runner.engine.gradients import clear
from runner.engine.loop import StepInfo, UpdateWrapper

Place = tuple[nn.Module, str]  # place of a buffer: its module, and its name in it


class RetryPolicy(Protocol):
    """Callbacks of the retry: report the error and reduce the micro-batch size."""

    def record_usage(self, shortage: OomCause, error: Exception) -> None:
        """Record memory usage before anything is freed, and the error to report."""

    def reduce(self, shortage: OomCause | None, obstacle: str) -> None:
        """Agree on smaller micro-batches across all ranks, and provide the samples of the update again.

        shortage  the error of this rank; None if another rank failed
        obstacle  state that could not be restored on this rank; empty: all state was restored
        Raises if the run cannot continue.
        """

    def report_step_retry(self, shortage: OomCause) -> None:
        """Report that an optimizer step failed without changing anything and was retried."""


class OomRetry(UpdateWrapper):
    """Retry an update with smaller micro-batches after out of memory.

    is_alone  no other rank depends on the result of an update
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer,
        precision: Precision, device: torch.device, guide: RetryPolicy, *, is_alone: bool,
    ) -> None:  # fmt: skip
        self.parameters, self.optimizer, self.precision = parameters, optimizer, precision
        self.device, self.guide, self.is_alone = device, guide, is_alone
        self.snapshot, self.steps = UpdateSnapshot(model, device), StepChangeDetector(optimizer)
        self._shortage: OomCause | None = None
        self._is_applying = False  # the optimizer step has started
        self._is_as_before = True  # the optimizer step has changed nothing

    def run(self, update: Callable[[], StepInfo]) -> StepInfo:
        while True:
            self.snapshot.keep()
            self._shortage, self._is_applying = None, False
            try:
                step = update()
            except Discarded:
                pass
            except Exception as error:
                if not self.is_alone:  # other ranks have continued, or block in a collective
                    raise
                self.failed(error)
            else:
                self.snapshot.learn()
                return step
            self._restore_and_reduce()

    def failed(self, error: Exception) -> None:
        if self._shortage is None:
            shortage = find_oom_cause(error)
            if shortage is None or shortage.place == COMMUNICATION:
                raise error
            self.guide.record_usage(shortage, error)
            self._shortage = shortage
        clear(self.parameters)

    def apply(self, step: Callable[[], None]) -> None:
        """Apply the gradients; retry a step that ran out of memory before changing anything.

        The allocator cache is released before the retry. Other ranks are unaffected: the gradients are complete.
        """
        self.snapshot.passed()
        self._is_applying = self._is_as_before = True
        self.steps.begin()
        try:
            step()
            return
        except Exception as error:
            shortage = find_oom_cause(error)
            if shortage is None:
                raise
            self._is_as_before = self.steps.is_unchanged()
            if not self._is_as_before:
                raise
        release(self.device)
        try:
            step()
        except Exception:
            self._is_as_before = self.steps.is_unchanged()
            raise
        self.guide.report_step_retry(shortage)

    def _restore_and_reduce(self) -> None:
        """Restore the state before the update; call it outside any `except`, which would keep activations alive."""
        clear(self.parameters)
        self.precision.discard()
        obstacle = self.snapshot.restore()
        if self._is_applying and not self._is_as_before:
            obstacle = "weights, which the optimizer step had started to change"
        if self._shortage is not None and "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # frees compiled code for larger micro-batches and the memory of its CUDA graphs
        release(self.device)
        self.guide.reduce(self._shortage, obstacle)


def release(device: torch.device) -> None:
    """Release unused memory to the system."""
    gc.collect()
    get_accelerator(device).empty_cache()


class UpdateSnapshot:
    """Snapshot of the state that forward and backward passes may change, taken at the start of the update.

    Most models change nothing but torch's generators; a few change buffers. The first update shows which: only those
    are copied later, into the same memory each time. If other state has changed, `restore` reports it.
    A snapshot must never make an update fail: buffers may be added, removed, resized and of any kind.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self._accelerator = get_accelerator(device)
        self._is_first = True
        self._draws_torch = self._draws_numpy = self._draws_python = True  # until the first update shows which are used
        self._places: list[Place] = []  # of buffers that updates change or replace
        self._buffers: list[Tensor | None] = []  # their values when the update begins
        self._sources: list[Tensor] = []  # the same, with the copy in place of a buffer that is None
        self._kept: list[Tensor] = []  # copies of the values
        self._others: list[Place] = []  # of buffers that the first update did not change
        self._constant: list[Tensor | None] = []  # tensors of these when the update begins
        self._weights: list[Tensor] = []
        self._seen: list[Tensor] = []  # some of their elements, during the first update
        self._hides_changes = False  # weights change without a version increment

    def keep(self) -> None:
        """Start an update."""
        if self._is_first:
            self._find_buffers()
        if self._draws_torch:
            self._torch = torch.get_rng_state()
        self._of_device = self._accelerator.generator_state()
        if self._draws_numpy:
            self._numpy: Any = np.random.get_state(legacy=False)
        if self._draws_python:
            self._python = random.getstate()
        self._keep_buffers()
        self._constant = [module._buffers.get(name) for module, name in self._others]
        self._versions = self._counts()

    def _keep_buffers(self) -> None:
        now = [module._buffers.get(name) for module, name in self._places]
        if len(now) != len(self._sources) or any(
            one is not other for one, other in zip(now, self._sources, strict=True)
        ):
            for index, (buffer, kept) in enumerate(zip(now, self._kept, strict=True)):
                if buffer is not None and (buffer.shape, buffer.dtype) != (kept.shape, kept.dtype):
                    self._kept[index] = torch.empty_like(buffer)
            self._sources = [kept if one is None else one for one, kept in zip(now, self._kept, strict=True)]
        self._buffers = now
        if now:
            with torch.no_grad():
                torch._foreach_copy_(self._kept, self._sources)

    def passed(self) -> None:
        """Check before the optimizer step whether weights have changed unnoticed by torch."""
        if self._is_first and not self._hides_changes:
            now = _samples_of(self._weights)
            self._hides_changes = len(now) != len(self._seen) or not all(map(bitwise_equal, self._seen, now))

    def learn(self) -> None:
        """Finish an update; the first one shows which state must be saved for later updates."""
        if not self._is_first:
            return
        self._is_first = False
        self._draws_torch = not torch.equal(self._torch, torch.get_rng_state())
        self._draws_numpy = not _are_equal(self._numpy, np.random.get_state(legacy=False))
        self._draws_python = self._python != random.getstate()
        before = dict(zip(self._places, zip(self._buffers, self._kept, strict=True), strict=True))
        self._places, self._others, self._kept, self._seen = [], [], [], []
        for place, now in self._found().items():
            was, kept = before.get(place, (None, now))
            is_same = now is was and bitwise_equal(now, kept) and not isinstance(place[0], _NormBase)
            if is_same or not _is_plain(now):
                self._others.append(place)
            else:
                self._places.append(place)
                self._kept.append(torch.empty_like(now))

    def restore(self) -> str:
        """Restore the state; return what could not be restored, or ""."""
        if not self._draws_torch and not torch.equal(self._torch, torch.get_rng_state()):
            return "torch's random generator of the host, from which the first update did not draw"
        torch.set_rng_state(self._torch)
        if self._of_device is not None:
            self._accelerator.set_generator_state(self._of_device)
        if not self._draws_numpy and not _are_equal(self._numpy, np.random.get_state(legacy=False)):
            return "numpy's random generator, from which the first update did not draw"
        if not self._draws_python and self._python != random.getstate():
            return "Python's random generator, from which the first update did not draw"
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        if self._counts() != self._versions:
            return "a parameter, or a buffer that the first update did not change"
        self.passed()
        if self._hides_changes:
            return "a parameter, which the forward or backward pass changes"
        constant = [module._buffers.get(name) for module, name in self._others]
        if any(now is not before for now, before in zip(constant, self._constant, strict=True)):
            return "a buffer, which the first update did not replace"
        if not self._found().keys() <= {*self._places, *self._others}:
            return "a buffer that did not exist before"
        for (module, name), buffer, kept in zip(self._places, self._buffers, self._kept, strict=True):
            now = module._buffers.get(name)
            if now is not buffer:
                if now is None or buffer is None or now.shape != buffer.shape:
                    return "a buffer that grew"  # and the module may know of it elsewhere
                module._buffers[name] = buffer
            if buffer is not None and not bitwise_equal(buffer, kept):
                with torch.no_grad():
                    buffer.copy_(kept)
        return ""

    def _find_buffers(self) -> None:
        """Find the buffers and allocate memory for a copy of each on the host, because device memory may be full."""
        found = self._found()
        self._places = [place for place, buffer in found.items() if _is_plain(buffer)]
        self._others = [place for place, buffer in found.items() if not _is_plain(buffer)]
        self._kept = [torch.empty_like(found[place], device="cpu") for place in self._places]
        self._weights = [weight for weight in self.model.parameters() if not (weight.is_meta or weight.is_inference())]
        self._seen = _samples_of(self._weights)

    def _found(self) -> dict[Place, Tensor]:
        return {
            (module, name): buffer
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_meta
        }

    def _counts(self) -> list[int]:
        """Return torch's version counters of tensors that must not change."""
        constant = [one for one in self._constant if one is not None and not one.is_inference()]
        return [tensor._version for tensor in (*self._weights, *constant)]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether its bits can be copied: not sparse, quantized, a subclass or an inference tensor."""
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_inference()
    return type(tensor) in (Tensor, nn.Parameter) and is_dense


def _samples_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of at most 64 elements of each plain tensor, spread over its memory."""
    found = []
    for tensor in filter(_is_plain, tensors):
        numel, nbytes = tensor.numel(), tensor.untyped_storage().nbytes()
        count = min(64, numel)
        if count and nbytes >= (tensor.storage_offset() + numel) * tensor.element_size():  # else it is an expanded view
            found.append(tensor.detach().as_strided((count,), (numel // count,)).clone())
    return found


def _are_equal(one: Any, other: Any) -> bool:
    """Return True if two states of numpy's generator are equal."""
    return (
        one["state"]["pos"] == other["state"]["pos"]
        and (one["has_gauss"], one["gauss"]) == (other["has_gauss"], other["gauss"])
        and np.array_equal(one["state"]["key"], other["state"]["key"])
    )
