"""Find the module in which an update became non-finite: run its samples again and check the values of each module."""

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

from runner.axes.precision import NotFinite
from runner.base import noise
from runner.base.batch import map_tensors
from runner.base.errors import AccelRunError, NumericError, TaskFault
from runner.base.fetcher import Fetcher
from runner.base.order import MicroBatchKey
from runner.base.text import abbreviate, error_line
from runner.engine.assemble import Parts
from runner.engine.error_diagnosis import locate_definition
from runner.engine.loop import Training

UNREACHED_FIX = (
    "values that the loss does not depend on keep their initial values: initialize them, or do not train them"
)
STATISTICS_FIX = (
    "these buffers were finite at the start of the phase; accumulated statistics, as of batch norms, are not finite"
)


class NonFiniteOrigin(NamedTuple):
    """Result of the search on one rank.

    kind         a key of _FIXES
    what         description; empty if everything was finite in the repetition
    items        number of items of its losses; None if unknown
    samples      samples that are not finite themselves
    micro_batch  samples of the micro-batch in which it was found
    """

    kind: str
    what: str
    items: float | None = None
    samples: Sequence[int] = ()
    micro_batch: Sequence[int] = ()


@dataclass(frozen=True)
class ReplayedUpdate:
    """Update that can be run again.

    number      number in its phase, from 1
    micros      its micro-batches on this rank
    is_applied  it has changed the parameters, because its values were checked only afterwards
    last_batch  its last micro-batch, None if unknown
    """

    phase: str
    number: int
    micros: Sequence[MicroBatchKey]
    fetcher: Fetcher
    training: Training
    is_applied: bool = False
    last_batch: Any = None

    def indices(self, micro: MicroBatchKey) -> list[int]:
        """Return the samples of a micro-batch in the data set."""
        return self.fetcher.dataset_indices(micro.indices)


def locate_error(error: NotFinite, update: ReplayedUpdate, parts: Parts) -> AccelRunError:
    """Return the error with the module in which the numbers became non-finite; a collective, equal on all ranks.

    It is a TaskFault if the losses of the update count no items, which causes a division by zero.
    """
    try:
        local = _search(update, parts)
    except Exception as failure:  # must not hide the original error
        local = NonFiniteOrigin("unknown", f"the search for the module failed: {error_line(failure)}", None)
    results = [NonFiniteOrigin(*result) for result in parts.world.gather([*local])]
    counts = [result.items for result in results]
    if None not in counts and not sum(filter(None, counts)):
        return TaskFault(
            f"loss returned a count of 0 for all micro-batches (update {update.number})",
            fix="return (the sum, the number of items); or are all its samples bad? events.jsonl lists them",
        )
    samples = [number for result in results for number in result.samples]
    rank, worst = min(enumerate(results), key=lambda pair: (not pair[1].what, list(_FIXES).index(pair[1].kind)))
    prefix = f"rank {rank}: " if len(results) > 1 and worst.what else ""
    cause = (
        worst.what
        or "a repetition was finite: the cause is random, such as dropout or augmentation, or only the sum over"
        " micro-batches is not finite"
    )
    note = f"; samples that are not finite: {abbreviate(samples)}" if samples and worst.kind != "samples" else ""
    what = f"{error.problems[0].what} at update {update.number}: {prefix}{cause}{note}"
    located = NumericError(what, where=f"phase {update.phase}", fix=error.problems[0].fix or _FIXES[worst.kind])
    located.place = {"update": update.number}
    if samples or worst.micro_batch:
        located.place = {**located.place, "samples": samples or list(worst.micro_batch)}
    return located


def check_finite(tensors: Iterable[tuple[str, Tensor]], where: str, fix: str = UNREACHED_FIX) -> None:
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
    results: list[bool] = []

    def check(tensor: Tensor) -> Tensor:
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a sharded tensor, the local shard
        if tensor.is_floating_point() or tensor.is_complex():
            # A sum needs one pass at memory speed. The exact check needs ten, and is used only if the sum overflows.
            total = tensor.detach().sum()
            results.append(bool(torch.isfinite(total)) or bool(torch.isfinite(tensor.detach()).all()))
        return tensor

    map_tensors(check, _unpack(value))
    return all(results)


# ---------------------------------------------------------------- the search of one rank


def _search(update: ReplayedUpdate, parts: Parts) -> NonFiniteOrigin:
    training, parallel = update.training, parts.parallel
    # Parameters of other pipeline stages are on the meta device.
    parameters = [(name, weight) for name, weight in parts.bare.named_parameters() if not weight.is_meta]
    bad = [name for name, weight in parameters if not is_finite(weight)]
    if bad:
        kind, what = "parameters", f"the parameters were not finite before it: {abbreviate(bad)}"
        if update.is_applied:
            kind, what = "applied", f"the update had changed {abbreviate(bad)} before its values were checked"
        return _join_collectives(update, parts, NonFiniteOrigin(kind, what, samples=_find_bad_samples(update)))
    if not parallel.splits_batch:
        return _search_samples(update, parts, "the stages of a pipeline are not searched; its samples are finite")
    runs_backward = not parallel.is_lockstep  # otherwise backward passes contain collectives
    items = 0.0
    first: NonFiniteOrigin | None = None
    with ExitStack() as stack:
        stack.enter_context(_run_eagerly())
        if not runs_backward:
            stack.enter_context(parallel.gather_parameters(parts.model))
            stack.enter_context(torch.no_grad())
        calls = stack.enter_context(record_calls(parts.bare))
        for micro, batch in _read_batches(update, parts):
            calls.begin()
            with parts.precision.forward():
                loss, count = training.loss(training.model, batch)
            if micro.counts:
                items += float(count)
                first = first or _check_forward(calls, loss, batch, micro, update, parts)
            calls.end()
            if runs_backward and first is None:
                for weight in training.parameters:
                    weight.grad = None
                parts.precision.backward(loss, training.per_item)
                first = _check_backward(calls, micro, update)
            if first and runs_backward:
                break  # otherwise the other ranks continue, and this one must join their collectives
    if first is None and not is_finite(update.last_batch):
        micro = update.micros[-1]
        first = NonFiniteOrigin(
            "random",
            f"the batch was not finite, and is finite when it is read again; {_format_samples(update, micro)}",
            micro_batch=update.indices(micro),
        )
    note = "" if runs_backward else "its forward passes are finite; backward passes are not searched"
    return first or NonFiniteOrigin("unknown", note, items)


def _join_collectives(update: ReplayedUpdate, parts: Parts, origin: NonFiniteOrigin) -> NonFiniteOrigin:
    """Run the forward passes, because other ranks' passes have collectives; return `origin`."""
    if parts.parallel.is_lockstep and parts.parallel.splits_batch:
        with parts.parallel.gather_parameters(parts.model), torch.no_grad():
            for _, batch in _read_batches(update, parts):
                with parts.precision.forward():
                    update.training.loss(update.training.model, batch)
    return origin


def _search_samples(update: ReplayedUpdate, parts: Parts, note: str) -> NonFiniteOrigin:
    """Search only the samples; `note` describes the result if they are finite."""
    for micro, batch in _read_batches(update, parts):
        if not is_finite(batch):
            return _blame_samples(update, micro)
    return NonFiniteOrigin("unknown", note)


def _read_batches(update: ReplayedUpdate, parts: Parts) -> Iterator[tuple[MicroBatchKey, Any]]:
    """Yield the micro-batches that the model receives, on the device."""
    micros = [micro for micro in update.micros if micro.counts or parts.parallel.is_lockstep]
    read = parts.prefetch(iter([update.fetcher[micro] for micro in micros]))
    for micro, micro_batch in zip(micros, read, strict=True):
        if micro_batch.batch is not None:
            noise.start_pass(micro_batch.samples)
            yield micro, micro_batch.batch


def _check_forward(
    calls: ModuleCalls, loss: Tensor, batch: Any, micro: MicroBatchKey, update: ReplayedUpdate, parts: Parts
) -> NonFiniteOrigin | None:
    """Return the origin in the forward pass; None if its loss is finite, because other values are then harmless."""
    if is_finite(loss):
        return None
    culprit, has_bad_samples = calls.find_culprit(), not is_finite(batch)
    if culprit is not None:
        inputs = "have no NaN" if culprit.input_any_inf else "are finite"
        what = (
            f"first in the output of {_describe_call(culprit)}, whose inputs {inputs}; {_format_samples(update, micro)}"
        )
        bad = _find_bad_samples(update, micro) if has_bad_samples else ()
        return NonFiniteOrigin("module", what, samples=bad, micro_batch=update.indices(micro))
    if has_bad_samples:
        return _blame_samples(update, micro)
    place = locate_definition(getattr(update.training.loss, "loss", update.training.loss), parts.source)
    what = f"all modules are finite, but the loss is not ({place}); {_format_samples(update, micro)}"
    return NonFiniteOrigin("loss", what, micro_batch=update.indices(micro))


def _check_backward(calls: ModuleCalls, micro: MicroBatchKey, update: ReplayedUpdate) -> NonFiniteOrigin | None:
    """Return the origin in the backward pass, None if all gradients are finite."""
    culprit, names = calls.find_backward_culprit(), _format_samples(update, micro)
    if culprit is not None:
        what = f"first in the backward pass of {culprit}, whose forward pass is finite; {names}"
        return NonFiniteOrigin("module", what, micro_batch=update.indices(micro))
    gradients = [weight.grad for weight in update.training.parameters if weight.grad is not None]
    if calls.any_bad or not is_finite(gradients):
        what = f"the forward pass is finite, but the gradient of the loss with respect to its output is not; {names}"
        return NonFiniteOrigin("loss", what, micro_batch=update.indices(micro))
    if gradients and not is_finite(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))):
        what = f"every gradient is finite, but their norm overflows {gradients[0].dtype}; {names}"
        return NonFiniteOrigin("overflow", what, micro_batch=update.indices(micro))
    return None


def _blame_samples(update: ReplayedUpdate, micro: MicroBatchKey) -> NonFiniteOrigin:
    """Return samples, instead of a module, as the origin."""
    bad = _find_bad_samples(update, micro)
    what = (
        f"samples that are not finite: {abbreviate(bad)}"
        if bad
        else f"the data are not finite; {_format_samples(update, micro)}"
    )
    return NonFiniteOrigin("samples", what, samples=bad, micro_batch=update.indices(micro))


def _find_bad_samples(update: ReplayedUpdate, *micros: MicroBatchKey) -> list[int]:
    """Return the non-finite samples of these micro-batches, or of all; each is read separately."""
    bad = []
    for micro in micros or update.micros:
        for index in micro.indices:
            with suppress(Exception):  # collate needs more than one sample
                if not is_finite(update.fetcher[micro._replace(indices=[index])].batch):
                    bad += update.fetcher.dataset_indices([index])
    return bad


def _format_samples(update: ReplayedUpdate, micro: MicroBatchKey) -> str:
    return f"samples {abbreviate(update.indices(micro))}"


@contextmanager
def _run_eagerly() -> Iterator[None]:
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

    input_nan      an input has NaN
    input_inf      an input has infinities other than those of a mask
    input_any_inf  an input has infinities
    new_nan        the output has NaN although no input does
    new_inf        the output has infinities although no input has NaN or infinities
    bad_top        the call is the outermost one, and its output is not finite
    bad_outside    a gradient by the output is not finite
    bad_inside     a gradient by an input is not finite
    """

    name: str
    module: nn.Module
    input_nan: bool
    input_inf: bool
    input_any_inf: bool
    new_nan: bool = False
    new_inf: bool = False
    bad_top: bool = False
    bad_outside: bool = False
    bad_inside: bool = False


@dataclass
class ModuleCalls:
    """Record the module calls of a forward pass, in order of completion."""

    completed: list[_Call] = field(default_factory=list)
    _open: list[_Call] = field(default_factory=list)
    _is_over: bool = True

    def begin(self) -> None:
        """Start a forward pass."""
        self._is_over = False
        self.completed.clear()
        self._open.clear()

    def end(self) -> None:
        """End the forward pass: later calls are recomputations for the backward pass."""
        self._is_over = True

    @property
    def first(self) -> str | None:
        """The module found by `find_culprit`, as "name (Kind)"."""
        culprit = self.find_culprit()
        return _describe_call(culprit) if culprit else None

    def find_culprit(self) -> _Call | None:
        """Return the first call that produced NaN, or the call whose infinities became NaN in another call.

        Without NaN: the call that produced the infinities in the model's output. Masks contain -inf, and logits may, so
        modules that produce those are not taken for the cause of NaN elsewhere.
        """
        producers: list[_Call] = []
        for call in self.completed:
            if call.new_nan and (producers or not call.input_inf):
                return producers[-1] if call.input_inf else call
            if call.new_inf:
                producers.append(call)
        return producers[-1] if producers and any(call.bad_top for call in self.completed) else None

    @property
    def any_bad(self) -> bool:
        """True if a non-finite gradient was seen."""
        return any(call.bad_outside or call.bad_inside for call in self.completed)

    def find_backward_culprit(self) -> str | None:
        """Return the innermost module nearest to the loss that received finite gradients and returned others."""
        candidates = [
            call for call in self.completed if not call.bad_outside and (call.bad_inside or _has_bad_gradient(call))
        ]
        if not candidates:
            return None
        call = candidates[-1]
        while inner := [other for other in candidates if _is_inside(other.name, call.name)]:
            call = inner[-1]
        return _describe_call(call)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_over:
            return
        nan, inf, masks = _classify_values((args, kwargs))
        call = _Call(name, module, nan, inf, inf or masks)
        self._open.append(call)
        _watch_gradients((args, kwargs), partial(_mark, call, "bad_inside"))

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._is_over or not self._open:
            return
        call = self._open.pop()
        self.completed.append(call)
        nan, inf, masks = _classify_values(output)
        call.new_nan = nan and not call.input_nan
        call.new_inf = (inf or masks) and not (call.input_nan or call.input_any_inf)
        call.bad_top = not self._open and (nan or inf or masks)
        _watch_gradients(output, partial(_mark, call, "bad_outside"))


@contextmanager
def record_calls(model: nn.Module) -> Iterator[ModuleCalls]:
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


def _watch_gradients(value: Any, note: Callable[[Tensor], None]) -> None:
    """Register `note` as a gradient hook on every tensor in `value`."""

    def add_hook(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(note)  # type: ignore[no-untyped-call]
        return tensor

    map_tensors(add_hook, _unpack(value))


def _classify_values(value: Any) -> tuple[bool, bool, bool]:
    """Return whether the value contains NaN, infinities that are not of a mask, and infinities of a mask.

    A mask is a constant or, without gradients, a tensor whose only infinities are negative.
    """
    nan = inf = masks = False

    def check(tensor: Tensor) -> Tensor:
        nonlocal nan, inf, masks
        if not is_finite(tensor):
            local = getattr(tensor, "_local_tensor", tensor).detach()
            nan = nan or bool(local.isnan().any())
            if bool(local.isinf().any()):
                is_mask = not tensor.requires_grad and not bool((local.real == math.inf).any())
                inf, masks = inf or not is_mask, masks or is_mask
        return tensor

    map_tensors(check, _unpack(value))
    return nan, inf, masks


def _unpack(value: Any) -> Any:
    """Return the value with nested dataclasses converted to mappings of their fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _unpack(getattr(value, item.name, None)) for item in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_unpack(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _unpack(item) for key, item in value.items()}
    return value


def _mark(call: _Call, side: str, gradient: Tensor) -> None:
    if not is_finite(gradient):
        setattr(call, side, True)


def _has_bad_gradient(call: _Call) -> bool:
    weights = call.module.parameters(recurse=False)
    return not is_finite([weight.grad for weight in weights if weight.grad is not None])


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and (outer == "" or name.startswith(f"{outer}."))


def _describe_call(call: _Call) -> str:
    kind = type(call.module).__name__
    return f"{call.name} ({kind})" if call.name else f"the model itself ({kind})"


_FIXES = {  # most informative first
    "samples": "fix these samples, or let the dataset raise an error for them and use dataloader.bad_samples=skip",
    "random": "fix the random draws of the dataset, such as augmentation: some of them are not finite",
    "module": "lower optimizer.lr, raise scheduler.warmup or set max_grad_norm, as resume_allow permits; or fix it",
    "loss": "fix the loss, or lower optimizer.lr, as resume_allow permits",
    "parameters": "lower optimizer.lr, as resume_allow permits",
    "applied": "use optimizer.kernel=fused: it detects the overflow before the step, and the run names the module",
    "overflow": "scale the loss down: the squares of gradients of this size overflow",
    "unknown": "lower optimizer.lr, raise scheduler.warmup or set max_grad_norm, as resume_allow permits",
}
