"""Find where the numbers of an update became non-finite by running its samples again and watching each module."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.axes.dataloader import Fetcher
from runner.axes.precision import NotFinite
from runner.base import noise
from runner.base.batch import map_tensors
from runner.base.errors import AccelRunError, NumericError, TaskFault
from runner.base.order import MicroBatchKey
from runner.base.text import abbreviate, error_line
from runner.engine.assemble import Parts
from runner.engine.error_diagnosis import locate_definition
from runner.engine.loop import Training

UNREACHED = "values that the loss does not depend on keep their initial values: initialize them, or do not train them"
GATHERED = (
    "these buffers were finite at the start of the phase; accumulated statistics, as of batch norms, are not finite"
)


class NonFiniteOrigin(NamedTuple):
    """Result of the search on one rank.

    sort     a key of _FIXES
    what     description; empty if everything was finite in the repetition
    items    number of items of its losses; None if unknown
    samples  samples that are not finite themselves
    passed   samples of the micro-batch in which it was found
    """

    sort: str
    what: str
    items: float | None = None
    samples: Sequence[int] = ()
    passed: Sequence[int] = ()


@dataclass(frozen=True)
class ReplayedUpdate:
    """Update that can be run again.

    number      number in its phase, from 1
    micros      its micro-batches on this rank
    is_applied  it has changed the parameters, because its values were checked later
    passed      its last micro-batch, None if unknown
    """

    phase: str
    number: int
    micros: Sequence[MicroBatchKey]
    fetcher: Fetcher
    training: Training
    is_applied: bool = False
    passed: Any = None

    def indices(self, micro: MicroBatchKey) -> list[int]:
        """Return the samples of a micro-batch in the data set."""
        return self.fetcher.real(micro.indices)


def named(found: NotFinite, update: ReplayedUpdate, parts: Parts) -> AccelRunError:
    """Return the error with the module in which the numbers became non-finite; a collective, equal on all ranks.

    It is a TaskFault if the losses of the update count no items: then the division was by zero.
    """
    try:
        mine = _search(update, parts)
    except Exception as error:  # must not hide the original error
        mine = NonFiniteOrigin("unknown", f"the search for the module failed: {error_line(error)}", None)
    of_ranks = [NonFiniteOrigin(*there) for there in parts.world.gather([*mine])]
    counts = [there.items for there in of_ranks]
    if None not in counts and not sum(filter(None, counts)):
        return TaskFault(
            f"the losses of a whole update count no items (update {update.number})",
            fix="return (the sum, the number of items); or are all its samples bad? events.jsonl lists them",
        )
    samples = [number for there in of_ranks for number in there.samples]
    rank, worst = min(enumerate(of_ranks), key=lambda pair: (not pair[1].what, list(_FIXES).index(pair[1].sort)))
    lead = f"rank {rank}: " if len(of_ranks) > 1 and worst.what else ""
    where = (
        worst.what
        or "a repetition was finite: the cause is random, such as dropout or augmentation, or only the sum over"
        " micro-batches is not finite"
    )
    beside = f"; samples that are not finite: {abbreviate(samples)}" if samples and worst.sort != "samples" else ""
    what = f"{found.problems[0].what} at update {update.number}: {lead}{where}{beside}"
    explained = NumericError(what, where=f"phase {update.phase}", fix=found.problems[0].fix or _FIXES[worst.sort])
    explained.place = {"update": update.number}
    if samples or worst.passed:
        explained.place = {**explained.place, "samples": samples or list(worst.passed)}
    return explained


def must_be_finite(tensors: Iterable[tuple[str, Tensor]], where: str, fix: str = UNREACHED) -> None:
    """Raise NumericError with the names of the tensors that contain non-finite values."""
    bad = [name for name, tensor in tensors if not is_finite(tensor)]
    if bad:
        raise NumericError(
            f"not finite, and therefore not saved: {abbreviate(bad)}",
            where=where,
            fix=fix,
        )


def finite_buffers(model: nn.Module) -> list[str]:
    """Return the names of floating-point buffers in checkpoints that are finite now."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
        and buffer.is_floating_point()
        and not buffer.is_meta
        and is_finite(buffer)
    ]


def is_finite(value: Any) -> bool:
    """Return True if all floating-point values in a tensor, or in nested tuples, lists and mappings, are finite."""
    found: list[bool] = []

    def look(tensor: Tensor) -> Tensor:
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a sharded tensor, the local shard
        if tensor.is_floating_point() or tensor.is_complex():
            # A sum needs one pass at memory speed. The exact check needs ten, and is used only if the sum overflows.
            total = tensor.detach().sum()
            found.append(bool(torch.isfinite(total)) or bool(torch.isfinite(tensor.detach()).all()))
        return tensor

    map_tensors(look, _opened(value))
    return all(found)


# ---------------------------------------------------------------- the search of one rank


def _search(update: ReplayedUpdate, parts: Parts) -> NonFiniteOrigin:
    training, parallel = update.training, parts.parallel
    held = [
        (name, weight) for name, weight in parts.bare.named_parameters() if not weight.is_meta
    ]  # parameters of this stage
    broken = [name for name, weight in held if not is_finite(weight)]
    if broken:
        sort, what = "parameters", f"the parameters were not finite before it: {abbreviate(broken)}"
        if update.is_applied:
            sort, what = "applied", f"the update had changed {abbreviate(broken)} before its values were checked"
        return _join_collectives(update, parts, NonFiniteOrigin(sort, what, samples=_bad_samples(update)))
    if not parallel.splits_batch:
        return _search_samples(update, parts, "the stages of a pipeline are not searched; its samples are finite")
    runs_backward = not parallel.in_step  # otherwise backward passes contain collectives
    items = 0.0
    first: NonFiniteOrigin | None = None
    with ExitStack() as stack:
        stack.enter_context(_as_written())
        if not runs_backward:
            stack.enter_context(parallel.gather_parameters(parts.model))
            stack.enter_context(torch.no_grad())
        calls = stack.enter_context(watched(parts.bare))
        for micro, batch in _read(update, parts):
            calls.begin()
            with parts.precision.forward():
                loss, count = training.loss(training.model, batch)
            if micro.counts:
                items += float(count)
                first = first or _forward(calls, loss, batch, micro, update, parts)
            calls.end()
            if runs_backward and first is None:
                for weight in training.parameters:
                    weight.grad = None
                parts.precision.backward(loss * training.per_item)
                first = _backward(calls, micro, update)
            if first and runs_backward:
                break  # otherwise the other ranks continue, and this one must join their collectives
    if first is None and not is_finite(update.passed):
        micro = update.micros[-1]
        first = NonFiniteOrigin(
            "drawn",
            f"the batch was not finite, and is when read once more; {_samples(update, micro)}",
            passed=update.indices(micro),
        )
    otherwise = "" if runs_backward else "its forward passes are finite; backward passes are not searched"
    return first or NonFiniteOrigin("unknown", otherwise, items)


def _join_collectives(update: ReplayedUpdate, parts: Parts, found: NonFiniteOrigin) -> NonFiniteOrigin:
    """Join the collectives of other ranks' passes, and return the finding so far."""
    if parts.parallel.in_step and parts.parallel.splits_batch:
        with parts.parallel.gather_parameters(parts.model), torch.no_grad():
            for _, batch in _read(update, parts):
                with parts.precision.forward():
                    update.training.loss(update.training.model, batch)
    return found


def _search_samples(update: ReplayedUpdate, parts: Parts, otherwise: str) -> NonFiniteOrigin:
    for micro, batch in _read(update, parts):
        if not is_finite(batch):
            return _blamed(update, micro)
    return NonFiniteOrigin("unknown", otherwise)


def _read(update: ReplayedUpdate, parts: Parts) -> Iterator[tuple[MicroBatchKey, Any]]:
    """Yield the micro-batches of the model, on the device."""
    passed = [micro for micro in update.micros if micro.counts or parts.parallel.in_step]
    read = parts.prefetch(iter([update.fetcher[micro] for micro in passed]))
    for micro, there in zip(passed, read, strict=True):
        if there.batch is not None:
            noise.start_pass(there.samples)
            yield micro, there.batch


def _forward(
    calls: ModuleCalls, loss: Tensor, batch: Any, micro: MicroBatchKey, update: ReplayedUpdate, parts: Parts
) -> NonFiniteOrigin | None:
    """Return the finding of the forward pass; None if its loss is finite, since other values then do no harm."""
    if is_finite(loss):
        return None
    culprit, has_bad_samples = calls.culprit(), not is_finite(batch)
    if culprit is not None:
        inputs = "hold no NaN" if culprit.any_inf else "are finite"
        what = f"first in the output of {_described(culprit)}, whose inputs {inputs}; {_samples(update, micro)}"
        bad = _bad_samples(update, micro) if has_bad_samples else ()
        return NonFiniteOrigin("module", what, samples=bad, passed=update.indices(micro))
    if has_bad_samples:
        return _blamed(update, micro)
    place = locate_definition(getattr(update.training.loss, "loss", update.training.loss), parts.source)
    what = f"all modules are finite, the loss made of them is not ({place}); {_samples(update, micro)}"
    return NonFiniteOrigin("loss", what, passed=update.indices(micro))


def _backward(calls: ModuleCalls, micro: MicroBatchKey, update: ReplayedUpdate) -> NonFiniteOrigin | None:
    """Return the finding of the backward pass, None if all gradients are finite."""
    culprit, names = calls.nearest_to_the_loss(), _samples(update, micro)
    if culprit is not None:
        what = f"first in the backward pass of {culprit}, whose forward pass is finite; {names}"
        return NonFiniteOrigin("module", what, passed=update.indices(micro))
    gradients = [weight.grad for weight in update.training.parameters if weight.grad is not None]
    if calls.any_bad or not is_finite(gradients):
        what = f"the forward pass is finite, the gradient of the loss by the model's output is not; {names}"
        return NonFiniteOrigin("loss", what, passed=update.indices(micro))
    if gradients and not is_finite(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))):
        what = f"every gradient is finite, but their norm overflows {gradients[0].dtype}; {names}"
        return NonFiniteOrigin("overflow", what, passed=update.indices(micro))
    return None


def _blamed(update: ReplayedUpdate, micro: MicroBatchKey) -> NonFiniteOrigin:
    """Return the finding that samples, and no module, are the cause."""
    bad = _bad_samples(update, micro)
    what = (
        f"samples that are not finite: {abbreviate(bad)}"
        if bad
        else f"the data are not finite; {_samples(update, micro)}"
    )
    return NonFiniteOrigin("samples", what, samples=bad, passed=update.indices(micro))


def _bad_samples(update: ReplayedUpdate, *micros: MicroBatchKey) -> list[int]:
    """Return the non-finite samples of these micro-batches, or of all; each is read separately."""
    bad = []
    for micro in micros or update.micros:
        for index in micro.indices:
            with suppress(Exception):  # collate needs more than one sample
                if not is_finite(update.fetcher[micro._replace(indices=[index])].batch):
                    bad += update.fetcher.real([index])
    return bad


def _samples(update: ReplayedUpdate, micro: MicroBatchKey) -> str:
    return f"samples {abbreviate(update.indices(micro))}"


@contextmanager
def _as_written() -> Iterator[None]:
    """Run compiled modules eagerly inside the context, because compiled code does not call hooks."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


# ---------------------------------------------------------------- live modules


@dataclass
class _Call:
    """One call of a module: non-finite values of its inputs, output and gradients.

    given_nan, given_inf   an input has NaN; infinities other than those of a mask
    made_nan, made_inf     the output has them although no input does
    """

    name: str
    module: nn.Module
    given_nan: bool
    given_inf: bool
    any_inf: bool
    made_nan: bool = False
    made_inf: bool = False
    bad_top: bool = False
    bad_outside: bool = False
    bad_inside: bool = False


@dataclass
class ModuleCalls:
    """Record the module calls of a forward pass, in order of completion."""

    ended: list[_Call] = field(default_factory=list)
    _open: list[_Call] = field(default_factory=list)
    _is_over: bool = True

    def begin(self) -> None:
        """Start a forward pass."""
        self._is_over = False
        self.ended.clear()
        self._open.clear()

    def end(self) -> None:
        """End the forward pass: later calls are recomputations for the backward pass."""
        self._is_over = True

    @property
    def first(self) -> str | None:
        """The first module that caused the result of the pass, as "name (Kind)"."""
        culprit = self.culprit()
        return _described(culprit) if culprit else None

    def culprit(self) -> _Call | None:
        """Return the first call that produced NaN, or the infinities that became NaN in another call.

        Without NaN: the call that produced the infinities in the model's output. Masks contain -inf and logits may;
        modules that produce those are not the cause of NaN elsewhere.
        """
        makers: list[_Call] = []
        for call in self.ended:
            if call.made_nan and (makers or not call.given_inf):
                return makers[-1] if call.given_inf else call
            if call.made_inf:
                makers.append(call)
        return makers[-1] if makers and any(call.bad_top for call in self.ended) else None

    @property
    def any_bad(self) -> bool:
        """True if a non-finite gradient was seen."""
        return any(call.bad_outside or call.bad_inside for call in self.ended)

    def nearest_to_the_loss(self) -> str | None:
        """Return the module that turned finite gradients into non-finite ones: innermost, and nearest to the loss."""
        found = [call for call in self.ended if not call.bad_outside and (call.bad_inside or _has_bad_gradient(call))]
        if not found:
            return None
        call = found[-1]
        while inner := [other for other in found if _is_inside(other.name, call.name)]:
            call = inner[-1]
        return _described(call)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_over:
            return
        nan, inf, masks = _kinds((args, kwargs))
        call = _Call(name, module, nan, inf, inf or masks)
        self._open.append(call)
        _watch((args, kwargs), partial(_mark, call, "bad_inside"))

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._is_over or not self._open:
            return
        call = self._open.pop()
        self.ended.append(call)
        nan, inf, masks = _kinds(output)
        call.made_nan = nan and not call.given_nan
        call.made_inf = (inf or masks) and not (call.given_nan or call.any_inf)
        call.bad_top = not self._open and (nan or inf or masks)
        _watch(output, partial(_mark, call, "bad_outside"))


@contextmanager
def watched(model: nn.Module) -> Iterator[ModuleCalls]:
    """Record every module call of the model inside the context."""
    calls = ModuleCalls()
    hooks = []
    for name, module in model.named_modules():
        hooks.append(
            module.register_forward_pre_hook(
                lambda module, args, kwargs, name=name: calls._enter(name, module, args, kwargs), with_kwargs=True
            )
        )
        hooks.append(
            module.register_forward_hook(
                lambda module, args, kwargs, output, name=name: calls._leave(name, module, args, kwargs, output),
                with_kwargs=True,
            )
        )
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _watch(value: Any, note: Callable[[Tensor], None]) -> None:
    """Register `note` as a gradient hook on every tensor in `value`."""

    def watch(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(note)  # type: ignore[no-untyped-call]
        return tensor

    map_tensors(watch, _opened(value))


def _kinds(value: Any) -> tuple[bool, bool, bool]:
    """Return whether the value has NaN, has infinities, and has tensors whose only infinities are those of a mask.

    A mask is a constant or, without gradients, a tensor whose only infinities are negative.
    """
    nan = inf = masks = False

    def look(tensor: Tensor) -> Tensor:
        nonlocal nan, inf, masks
        if not is_finite(tensor):
            there = getattr(tensor, "_local_tensor", tensor).detach()
            nan = nan or bool(there.isnan().any())
            if bool(there.isinf().any()):
                is_mask = not tensor.requires_grad and not bool((there.real == math.inf).any())
                inf, masks = inf or not is_mask, masks or is_mask
        return tensor

    map_tensors(look, _opened(value))
    return nan, inf, masks


def _opened(value: Any) -> Any:
    """Return the value with nested dataclasses converted to mappings of their fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: _opened(getattr(value, one.name, None)) for one in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_opened(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _opened(item) for key, item in value.items()}
    return value


def _mark(call: _Call, side: str, gradient: Tensor) -> None:
    if not is_finite(gradient):
        setattr(call, side, True)


def _has_bad_gradient(call: _Call) -> bool:
    own = call.module.parameters(recurse=False)
    return not is_finite([weight.grad for weight in own if weight.grad is not None])


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and (outer == "" or name.startswith(f"{outer}."))


def _described(call: _Call) -> str:
    kind = type(call.module).__name__
    return f"{call.name} ({kind})" if call.name else f"the model itself ({kind})"


_FIXES = {  # most informative first
    "samples": "fix these samples, or let the dataset raise an error for them and use dataloader.bad_samples=skip",
    "drawn": "fix the random draws of the dataset, such as augmentation: they sometimes give non-finite values",
    "module": "lower optimizer.lr, raise scheduler.warmup or set max_grad_norm, as resume_allow permits; or fix it",
    "loss": "fix the loss, or lower optimizer.lr, as resume_allow permits",
    "parameters": "lower optimizer.lr, as resume_allow permits",
    "applied": "use optimizer.kernel=fused: it detects the overflow before the step, and the run names the module",
    "overflow": "scale the loss down: the squares of gradients of this size overflow",
    "unknown": "lower optimizer.lr, raise scheduler.warmup or set max_grad_norm, as resume_allow permits",
}
