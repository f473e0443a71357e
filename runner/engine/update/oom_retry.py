"""Retry an update after an out-of-memory error, from the state before its first attempt.

All state that a forward or backward pass may change is restored: gradients, random generators, buffers of the model
(statistics of batch norms) and the loss scale. The same samples are read again, in smaller micro-batches. If some state
cannot be restored, the run resumes from its last checkpoint instead of continuing with wrong numbers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from runner.axes.compile import nothing_was_compiled
from runner.axes.precision import Precision
from runner.base.accelerator import get_accelerator
from runner.base.oom_errors import COMMUNICATION, OomCause, find_oom_cause
from runner.base.sample_rng import global_generators
from runner.distributed.parallel import Discarded
from runner.engine.update.gradients import clear
from runner.engine.update.loop import StepInfo, UpdateWrapper
from runner.tensors.bitwise import bitwise_equal
from runner.tensors.module_buffers import buffers_of
from runner.tensors.optimizer_state import StepChangeDetector

Place = tuple[nn.Module, str]  # module of a buffer, and the buffer's name in the module


class RetryPolicy(Protocol):
    """Callbacks of the retry: report the error and reduce the micro-batch size."""

    def record_usage(self, shortage: OomCause, error: Exception) -> None:
        """Record the error to report, and the memory usage before anything is freed."""

    def reduce(self, shortage: OomCause | None, obstacle: str) -> None:
        """Agree with all ranks on smaller micro-batches, and read the samples of the update again.

        shortage  the error of this rank; None if another rank failed
        obstacle  state that could not be restored on this rank; empty: all state was restored
        Raises if the run cannot continue.
        """

    def report_step_retry(self, shortage: OomCause) -> None:
        """Report that an optimizer step failed without changing anything and was retried."""


class OomRetry(UpdateWrapper):
    """Retry an update with smaller micro-batches after an out-of-memory error.

    has_one_rank  no other rank depends on the result of an update
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer,
        precision: Precision, device: torch.device, retry_policy: RetryPolicy, *, has_one_rank: bool,
    ) -> None:  # fmt: skip
        self.parameters, self.optimizer, self.precision = parameters, optimizer, precision
        self.device, self.retry_policy, self.has_one_rank = device, retry_policy, has_one_rank
        self.snapshot, self.steps = UpdateSnapshot(model, device), StepChangeDetector(optimizer)
        self._shortage: OomCause | None = None
        self._is_applying = False  # the optimizer step has started
        self._is_unchanged = True  # the optimizer step has changed nothing

    def run(self, update: Callable[[], StepInfo]) -> StepInfo:
        while True:
            self.snapshot.begin()
            self._shortage, self._is_applying = None, False
            try:
                step = update()
            except Discarded:  # another rank ran out of memory; the state is restored outside of `except`
                pass
            except Exception as error:
                if not self.has_one_rank:  # other ranks have continued, or block in a collective
                    raise
                self.failed(error)
            else:
                self.snapshot.finish()
                return step
            self._restore_and_reduce()

    def failed(self, error: Exception) -> None:
        if self._shortage is None:
            shortage = find_oom_cause(error)
            if shortage is None or shortage.place == COMMUNICATION:
                raise error
            self.retry_policy.record_usage(shortage, error)
            self._shortage = shortage
        clear(self.parameters)

    def apply(self, step: Callable[[], None]) -> None:
        """Apply the gradients; retry a step that ran out of memory before changing anything.

        The allocator cache is released before the retry. Other ranks are unaffected: the gradients are complete.
        """
        self.snapshot.check_weights()
        self._is_applying = self._is_unchanged = True
        self.steps.begin()
        try:
            step()
            return
        except Exception as error:
            shortage = find_oom_cause(error)
            if shortage is None:
                raise
            self._is_unchanged = self.steps.is_unchanged()
            if not self._is_unchanged:
                raise
        release(self.device)
        try:
            step()
        except Exception:
            self._is_unchanged = self.steps.is_unchanged()
            raise
        self.retry_policy.report_step_retry(shortage)

    def _restore_and_reduce(self) -> None:
        """Restore the state before the update; call it outside any `except`, which would keep activations alive."""
        clear(self.parameters)
        self.precision.discard()
        obstacle = self.snapshot.restore()
        if self._is_applying and not self._is_unchanged:
            obstacle = "weights, which the optimizer step had started to change"
        # The reset frees compiled code for larger micro-batches and the memory of its CUDA graphs. On a GPU it imports
        # Inductor, which takes more than a second.
        if self._shortage is not None and not nothing_was_compiled():
            torch.compiler.reset()
        release(self.device)
        self.retry_policy.reduce(self._shortage, obstacle)


def release(device: torch.device) -> None:
    """Release unused memory to the system."""
    # Collect first: reference cycles, such as tracebacks, keep tensors in use, and only unused blocks are released.
    gc.collect()
    get_accelerator(device).empty_cache()


class UpdateSnapshot:
    """Snapshot of the state that forward and backward passes may change, taken at the start of the update.

    Most models change nothing but torch's generators; a few change buffers. The first update shows which: only those
    are copied later, into the same memory each time. If other state has changed, `restore` reports it.
    A snapshot must never make an update fail, even if buffers are of unusual types, or are added, removed or resized.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self._accelerator = get_accelerator(device)
        self._is_first = True
        self._generators = dict(zip(_HOST_GENERATORS, global_generators(), strict=False))
        self._used = set(self._generators)  # all, until the first update shows which are used
        self._rng_states: dict[str, Any] = {}  # states at the start of the last update that saved them
        self._places: list[Place] = []  # buffers that updates change or replace
        self._buffers: list[Tensor | None] = []  # the buffers at these places when the update begins
        self._sources: list[Tensor] = []  # `_buffers`, with the copy in place of a buffer that is None
        self._copies: list[Tensor] = []  # copies of the values
        self._constant_places: list[Place] = []  # buffers that the first update did not change
        self._constant_tensors: list[Tensor | None] = []  # buffers at these places when the update begins
        self._weights: list[Tensor] = []
        self._weight_samples: list[Tensor] = []  # some elements of the weights, during the first update
        self._hides_changes = False  # weights change without a version increment

    def begin(self) -> None:
        """Copy the state at the start of an update."""
        if self._is_first:
            self._find_buffers()
        for name in self._used:
            self._rng_states[name] = self._generators[name].get_state()
        self._device_rng = self._accelerator.generator_state()
        buffers = [buffers_of(module).get(name) for module, name in self._places]
        if len(buffers) != len(self._sources) or any(
            buffer is not source for buffer, source in zip(buffers, self._sources, strict=True)
        ):
            for index, (buffer, copy) in enumerate(zip(buffers, self._copies, strict=True)):
                if buffer is not None and (buffer.shape, buffer.dtype) != (copy.shape, copy.dtype):
                    self._copies[index] = torch.empty_like(buffer)
            self._sources = [
                copy if buffer is None else buffer for buffer, copy in zip(buffers, self._copies, strict=True)
            ]
        self._buffers = buffers
        if buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._sources)
        self._constant_tensors = [buffers_of(module).get(name) for module, name in self._constant_places]
        self._versions = self._version_counters()

    def check_weights(self) -> None:
        """Check before the optimizer step of the first update whether weights changed without a version increment."""
        if self._is_first and not self._hides_changes:
            samples = _sample_elements(self._weights)
            self._hides_changes = len(samples) != len(self._weight_samples) or not all(
                map(bitwise_equal, self._weight_samples, samples)
            )

    def finish(self) -> None:
        """Finish an update; the first one shows which state must be saved for later updates."""
        if not self._is_first:
            return
        self._is_first = False
        self._used = {name for name in self._generators if self._has_drawn(name)}
        before = dict(zip(self._places, zip(self._buffers, self._copies, strict=True), strict=True))
        self._places, self._constant_places, self._copies, self._weight_samples = [], [], [], []
        for place, buffer in self._find_all_buffers().items():
            previous, copy = before.get(place, (None, buffer))
            is_unchanged = buffer is previous and bitwise_equal(buffer, copy) and not isinstance(place[0], _NormBase)
            if is_unchanged or not _is_plain(buffer):
                self._constant_places.append(place)
            else:
                self._places.append(place)
                self._copies.append(torch.empty_like(buffer))

    def restore(self) -> str:
        """Restore the state; return what could not be restored, or ""."""
        for name, generator in self._generators.items():
            if name not in self._used and self._has_drawn(name):
                return f"{name}, from which the first update did not draw"
            generator.set_state(self._rng_states[name])
        if self._device_rng is not None:
            self._accelerator.set_generator_state(self._device_rng)
        if self._version_counters() != self._versions:
            return "a parameter, or a buffer that the first update did not change"
        self.check_weights()
        if self._hides_changes:
            return "a parameter, which the forward or backward pass changes"
        constant = [buffers_of(module).get(name) for module, name in self._constant_places]
        if any(now is not before for now, before in zip(constant, self._constant_tensors, strict=True)):
            return "a buffer, which the first update did not replace"
        if not self._find_all_buffers().keys() <= {*self._places, *self._constant_places}:
            return "a buffer that did not exist before"
        for (module, name), buffer, copy in zip(self._places, self._buffers, self._copies, strict=True):
            now = buffers_of(module).get(name)
            if now is not buffer:
                if now is None or buffer is None or now.shape != buffer.shape:
                    # Other attributes of the module may depend on its size.
                    return "a buffer that was resized or removed"
                buffers_of(module)[name] = buffer
            if buffer is not None and not bitwise_equal(buffer, copy):
                with torch.no_grad():
                    buffer.copy_(copy)
        return ""

    def _has_drawn(self, name: str) -> bool:
        return bool(self._generators[name].get_state() != self._rng_states[name])

    def _find_buffers(self) -> None:
        """Find the buffers and allocate memory for a copy of each on the host, because device memory may be full."""
        found = self._find_all_buffers()
        self._places = [place for place, buffer in found.items() if _is_plain(buffer)]
        self._constant_places = [place for place, buffer in found.items() if not _is_plain(buffer)]
        self._copies = [torch.empty_like(found[place], device="cpu") for place in self._places]
        self._weights = [weight for weight in self.model.parameters() if not (weight.is_meta or weight.is_inference())]
        self._weight_samples = _sample_elements(self._weights)

    def _find_all_buffers(self) -> dict[Place, Tensor]:
        return {
            (module, name): buffer
            for module in self.model.modules()
            for name, buffer in buffers_of(module).items()
            if buffer is not None and not buffer.is_meta
        }

    def _version_counters(self) -> list[int]:
        constant = [tensor for tensor in self._constant_tensors if tensor is not None and not tensor.is_inference()]
        return [tensor._version for tensor in (*self._weights, *constant)]  # private: no public version counter


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the bits of a tensor can be copied: not sparse, quantized, a subclass or an inference tensor."""
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_inference()
    return type(tensor) in (Tensor, nn.Parameter) and is_dense


def _sample_elements(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of at most 64 elements of each plain tensor, spread over its memory."""
    samples = []
    for tensor in filter(_is_plain, tensors):
        numel, nbytes = tensor.numel(), tensor.untyped_storage().nbytes()
        count = min(64, numel)
        if count and nbytes >= (tensor.storage_offset() + numel) * tensor.element_size():  # else it is an expanded view
            samples.append(tensor.detach().as_strided((count,), (numel // count,)).clone())
    return samples


_HOST_GENERATORS = (  # in the order of `global_generators`; the accelerator saves the generator of the device
    "torch's random generator of the host", "numpy's random generator", "Python's random generator",
)  # fmt: skip
