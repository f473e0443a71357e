"""An update in which memory runs out is made again, as if it had not begun: nothing of the first try is left.

What a pass may change is put back: gradients, the random generators, the buffers of the model (statistics of batch
norms), the loss scale. Samples are those of the update, read again by their numbers, in smaller passes. Where all
cannot be put back, the run goes on from its last checkpoint instead of from wrong numbers.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from runner.axes.optimizer import Steps
from runner.axes.precision import Precision
from runner.base.shortage import Shortage, shortage_of
from runner.distributed.parallel import Discarded
from runner.engine.gradients import clear

Made = TypeVar("Made")


class Once:
    """An update is made once: what goes wrong in it ends the run."""

    def made(self, update: Callable[[], Made]) -> Made:
        """Return what `update` returns; it is called again, from the same beginning, where memory runs out in it."""
        return update()

    def failed(self, error: Exception) -> None:
        """A pass raised this on a rank among others: return where the update can be discarded by all, else raise it."""
        raise error

    def apply(self, step: Callable[[], None]) -> None:
        """The gradients are applied."""
        step()


class Guide(Protocol):
    """Who knows the run: says what is to be said, and cuts passes smaller."""

    def note(self, shortage: Shortage, error: Exception) -> None:
        """Write down who holds the memory, while all is still held, and what is to be told of the error."""

    def go_on(self, shortage: Shortage | None, obstacle: str) -> None:
        """All ranks agree on smaller passes, and the samples of the update come again.

        shortage  this rank's, None where it was another's
        obstacle  what could not be put back on this rank; empty: all is as it was when the update began
        Raises where there is no way to go on.
        """

    def say_applied(self, shortage: Shortage) -> None:
        """Say that a step of the optimizer failed, changed nothing, and was made again."""


class Redo(Once):
    """An update in which memory runs out is made again with smaller passes.

    is_alone  no other rank waits for what follows from an update
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer,
        precision: Precision, device: torch.device, guide: Guide, *, is_alone: bool,
    ) -> None:  # fmt: skip
        self.parameters, self.optimizer, self.precision = parameters, optimizer, precision
        self.device, self.guide, self.is_alone = device, guide, is_alone
        self.beginning, self.steps = Beginning(model, device), Steps(optimizer)
        self._shortage: Shortage | None = None
        self._is_applying = False  # the step of the optimizer has begun
        self._is_as_before = True  # it has changed nothing

    def made(self, update: Callable[[], Made]) -> Made:
        while True:
            self.beginning.keep()
            self._shortage, self._is_applying = None, False
            try:
                made = update()
            except Discarded:
                pass
            except Exception as error:
                if not self.is_alone:  # the others have gone on, or wait inside of a pass
                    raise
                self.failed(error)
            else:
                self.beginning.learn()
                return made
            self._again()

    def failed(self, error: Exception) -> None:
        if self._shortage is None:
            shortage = shortage_of(error)
            if shortage is None:
                raise error
            self.guide.note(shortage, error)
            self._shortage = shortage
        clear(self.parameters)

    def apply(self, step: Callable[[], None]) -> None:
        """The gradients are applied; a step that changed nothing before memory ran out is made once more.

        By then all that was cached is given back. No other rank needs to know: the gradients are whole.
        """
        self._is_applying = self._is_as_before = True
        self.steps.begin()
        try:
            step()
            return
        except Exception as error:
            shortage = shortage_of(error)
            if shortage is None:
                raise
            self._is_as_before = self.steps.is_as_before()
            if not self._is_as_before:
                raise
        release(self.device)
        try:
            step()
        except Exception:
            self._is_as_before = self.steps.is_as_before()
            raise
        self.guide.say_applied(shortage)

    def _again(self) -> None:
        """Everything is as it was when the update began; outside of any `except`, which would hold the activations."""
        clear(self.parameters)
        self.precision.discard()
        obstacle = self.beginning.put_back()
        if self._is_applying and not self._is_as_before:
            obstacle = "the optimizer's step, which had begun to change weights"
        if "torch._dynamo" in sys.modules:  # programs of larger passes, and the memory of their CUDA graphs
            torch.compiler.reset()
        release(self.device)
        self.guide.go_on(self._shortage, obstacle)


def release(device: torch.device) -> None:
    """Memory that nobody uses is given back to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


class Beginning:
    """What passes may change, as it was when the update under way began.

    Most models change nothing but the state of torch's generators, a few change buffers. The first update shows which:
    only those are copied from then on, into the same memory again and again. Where something else turns out to have
    changed, `put_back` says so.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self._is_first = True
        self._draws_torch = self._draws_numpy = self._draws_python = True  # until the first update has shown it
        self._places: list[tuple[nn.Module, str]] = []  # of buffers that passes change, or replace
        self._buffers: list[Tensor] = []  # what is there when the update begins
        self._kept: list[Tensor] = []  # copies of it
        self._others: list[tuple[nn.Module, str, Tensor]] = []  # buffers that nothing changes
        self._counted: list[Tensor] = []  # what must not change: these, and the parameters

    def keep(self) -> None:
        """An update begins."""
        if self._is_first:
            self._look()
        if self._draws_torch:
            self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        if self._draws_numpy:
            self._numpy: Any = np.random.get_state(legacy=False)
        if self._draws_python:
            self._python = random.getstate()
        if self._places:
            self._buffers = [_buffer(*place) for place in self._places]
            with torch.no_grad():
                torch._foreach_copy_(self._kept, self._buffers)
        self._versions = [tensor._version for tensor in self._counted]

    def learn(self) -> None:
        """The update was made; the first one shows what has to be kept of those that follow."""
        if not self._is_first:
            return
        self._is_first = False
        self._draws_torch = not torch.equal(self._torch, torch.get_rng_state())
        self._draws_numpy = not _same(self._numpy, np.random.get_state(legacy=False))
        self._draws_python = self._python != random.getstate()
        changing, self._others = [], []
        for place, before, kept in zip(self._places, self._buffers, self._kept, strict=True):
            now = _buffer(*place)
            if now is not before or isinstance(place[0], _NormBase) or not _equal(now, kept):
                changing.append(place)
            else:
                self._others.append((*place, now))
        self._places = changing
        self._kept = [torch.empty_like(_buffer(*place)) for place in changing]
        self._counted += [buffer for _, _, buffer in self._others]

    def put_back(self) -> str:
        """All is as it was; returns what is not, empty where there is nothing."""
        if not self._draws_torch and not torch.equal(self._torch, torch.get_rng_state()):
            return "torch's random generator of the host, from which the first update did not draw"
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self.device)
        if not self._draws_numpy and not _same(self._numpy, np.random.get_state(legacy=False)):
            return "numpy's random generator, from which the first update did not draw"
        if not self._draws_python and self._python != random.getstate():
            return "Python's random generator, from which the first update did not draw"
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        with torch.no_grad():
            for (module, name), buffer in zip(self._places, self._buffers, strict=True):
                module._buffers[name] = buffer  # it may have been replaced
            if self._places:
                torch._foreach_copy_(self._buffers, self._kept)
        if any(module._buffers.get(name) is not buffer for module, name, buffer in self._others):
            return "a buffer, which the first update did not replace"
        if any(tensor._version != before for tensor, before in zip(self._counted, self._versions, strict=True)):
            return "a parameter, or a buffer that the first update did not change"
        return ""

    def _look(self) -> None:
        """Find the buffers, and take a place for a copy of each: on the host, for the device has no room to spare."""
        self._places = [
            (module, name)
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]
        self._kept = [torch.empty_like(_buffer(*place), device="cpu") for place in self._places]
        self._counted = [weight for weight in self.model.parameters() if not weight.is_meta]


def _buffer(module: nn.Module, name: str) -> Tensor:
    buffer = module._buffers[name]
    assert buffer is not None, f"{name} was there in the first update"
    return buffer


def _same(one: Any, other: Any) -> bool:
    """Tell whether two states of numpy's generator are the same."""
    return (
        one["state"]["pos"] == other["state"]["pos"]
        and (one["has_gauss"], one["gauss"]) == (other["has_gauss"], other["gauss"])
        and np.array_equal(one["state"]["key"], other["state"]["key"])
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors hold the same bits, NaN included."""
    left, right = (tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(left, right)
