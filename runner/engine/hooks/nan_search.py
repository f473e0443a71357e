"""Find the module in which an update became non-finite: run its samples again and check the values of each module."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from runner.axes.precision import NotFinite
from runner.base import noise
from runner.base.batch import MicroBatch
from runner.base.errors import AccelRunError, NumericError
from runner.base.order import MicroBatchKey
from runner.base.text import abbreviate, error_line
from runner.distributed.parallel import ForwardPasses
from runner.engine.contract.contract_checks import LOSSES_HAVE, invalid_count_fault, no_items_error
from runner.engine.contract.error_diagnosis import locate_definition
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.parts.phase_kinds import GradientPhase
from runner.engine.process.watchdog import SEARCH
from runner.engine.update.coupled import CoupledSource, CoupledUpdate, Embedding
from runner.engine.update.non_finite import ModuleCalls, is_finite, record_calls


class NanSearch(Hook):
    """Repeats a non-finite update, checking each module; the phase then ends without a save."""

    def on_error(self, error: BaseException) -> AccelRunError | None:
        if not isinstance(error, NotFinite):
            return None
        self.phase.loader.close()  # its worker threads must not read during the search
        update = self.phase.position.update + (0 if error.late else 1)
        with self.phase.progress_mark.doing(SEARCH, update):  # this process reads all samples again
            return _locate_error(error, _UpdateSearch(self.phase, update, is_late=error.late), self.phase)


class _Origin(NamedTuple):
    """Result of the search on one rank.

    kind         a key of _FIXES
    what         description; empty if everything was finite in the repetition
    items        number of items of the losses on this rank; None if unknown
    samples      samples that contain non-finite values
    micro_batch  samples of the micro-batch in which the origin was found
    """

    kind: str
    what: str
    items: float | None = None
    samples: Sequence[int] = ()
    micro_batch: Sequence[int] = ()


def _locate_error(error: NotFinite, search: _UpdateSearch, phase: PhaseView) -> AccelRunError:
    """Return the error with the module in which the numbers became non-finite; a collective, equal on all ranks.

    It is a TaskFault if the losses of the update have no items, which causes a division by zero.
    """
    try:
        local = search.run()
    except Exception as failure:  # must not hide the original error
        local = _Origin("unknown", f"the search for the module failed: {error_line(failure)}")
    results = [_Origin(*result) for result in phase.parts.world.gather([*local])]
    counts = [result.items for result in results]
    total = sum(count for count in counts if count is not None)
    has_no_items = None not in counts and not total
    if not math.isfinite(total) or (has_no_items and search.coupled):
        what, least = ("couple() returned", "above 0") if search.coupled else (LOSSES_HAVE, "at least 0")
        return invalid_count_fault(what, total, least, search.update, phase.work.location)
    if has_no_items:
        return no_items_error(search.update, phase.work.location)
    samples = [number for result in results for number in result.samples]
    rank, worst = min(enumerate(results), key=lambda pair: (not pair[1].what, list(_FIXES).index(pair[1].kind)))
    prefix = f"on rank {rank}, " if len(results) > 1 and worst.what else ""
    cause = (
        worst.what
        or "the update was finite when it was repeated: the cause is random, such as dropout, or only the sum"
        " over micro-batches is not finite"
    )
    note = f"; samples that are not finite: {abbreviate(samples)}" if samples and worst.kind != "samples" else ""
    what = f"{error.problems[0].what} at update {search.update}: {prefix}{cause}{note}"
    located = NumericError(what, where=f"phase {phase.name}", fix=error.problems[0].fix or _FIXES[worst.kind])
    located.place = {"update": search.update}
    if samples or worst.micro_batch:
        located.place = {**located.place, "samples": samples or list(worst.micro_batch)}
    return located


class _UpdateSearch:
    """The search of one rank.

    update   number of the update in its phase, from 1
    is_late  the values were checked only after the optimizer step
    """

    def __init__(self, phase: PhaseView, update: int, *, is_late: bool) -> None:
        assert isinstance(phase.work, GradientPhase), "a phase of kind fit has neither loss nor gradients"
        self.update, self.parts, self.training = update, phase.parts, phase.work.training
        self.coupled, self.fetcher = phase.work.coupled, phase.loader.fetcher
        # These hooks run after the norm is checked, so they may have made the parameters non-finite.
        hooks = [type(hook).__name__ for hook in phase.hooks_with("before_step")]
        self.note = f"; gradients are changed by hooks: {', '.join(hooks)}" if hooks else ""
        self.micros = list(phase.order.micro_batches(update - 1, phase.shares.of(update - 1)))
        self.is_applied = is_late and not getattr(self.training.optimizer, "_step_supports_amp_scaling", False)

    def run(self) -> _Origin:
        parallel = self.parts.parallel
        items = self._coupled_items()
        if items is not None and not math.isfinite(items):
            return _Origin("unknown", "", items)
        # Parameters of other pipeline stages are on the meta device.
        parameters = [(name, weight) for name, weight in self.parts.bare.named_parameters() if not weight.is_meta]
        bad = [name for name, weight in parameters if not is_finite(weight)]
        origin = None
        if bad:
            kind, what = "parameters", f"parameters were not finite before this update: {abbreviate(bad)}{self.note}"
            if self.is_applied:
                kind, what = "applied", f"the update had changed {abbreviate(bad)} before its values were checked"
            origin = _Origin(kind, what, samples=self._find_bad_samples(*self.micros))
        if self.coupled:
            return origin or self._search_coupled(self.coupled)._replace(items=items)
        if not parallel.splits_batch:
            return origin or self._search_samples()
        if origin is not None and not parallel.is_lockstep:
            return origin
        return self._search_modules(origin)

    def _coupled_items(self) -> float | None:
        """Return the number of items of a coupled loss, which is not the sum over the micro-batches; None: unknown."""
        count = self.coupled.counts.get(self.update - 1) if self.coupled else None
        return None if count is None else float(count)

    def _search_modules(self, first: _Origin | None) -> _Origin:
        """Repeat the passes of the update until the origin is found.

        If the passes contain collectives, all forward passes run, because other ranks wait for those of this rank.

        first  the origin if the parameters are not finite, else None
        """
        parts, training = self.parts, self.training
        runs_backward = not parts.parallel.is_lockstep  # otherwise backward passes contain collectives
        items = 0.0
        with ExitStack() as stack:
            if not runs_backward:
                stack.enter_context(parts.parallel.gather_parameters(parts.model))
                stack.enter_context(torch.no_grad())
            calls = stack.enter_context(self._recorded_calls())
            for micro, batch in self._read_batches():
                calls.begin()
                with training.precision.forward():
                    loss, count = training.loss(training.model, batch)
                calls.end()
                if micro.is_counted:
                    items += float(count)
                    first = first or self._check_forward(calls, loss, batch, micro, training.loss)
                if runs_backward and first is None:
                    for weight in training.parameters:
                        weight.grad = None
                    training.precision.backward(loss, training.per_item)
                    first = self._check_backward(calls, micro)
                if first and runs_backward:
                    break
        note = "" if runs_backward else "its forward passes are finite; backward passes are not searched"
        return first or _Origin("unknown", note, items)

    @contextmanager
    def _recorded_calls(self) -> Iterator[ModuleCalls]:
        # Compiled code does not call the forward hooks that record the calls.
        stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        with stance, record_calls(self.parts.bare) as calls:
            yield calls

    def _search_coupled(self, coupled: CoupledSource) -> _Origin:
        """Couple the embeddings of the whole update, as training does, because the loss of a part may be finite.

        A collective. A non-finite embedding is the origin only if the result of `couple` is not finite either.
        """
        parts, training, micros = self.parts, self.training, self.micros
        non_finite: list[_Origin] = []  # embeddings, which are harmless if `couple` masks them
        current: list[MicroBatchKey] = []

        def read() -> Iterator[MicroBatch]:
            read_batches = parts.prefetch(iter([self.fetcher[micro] for micro in micros]))
            for micro, micro_batch in zip(micros, read_batches, strict=True):
                noise.start_pass(micro_batch.samples)
                current[:] = [micro]
                yield micro_batch

        def embed(model: nn.Module, batch: Any) -> Embedding:
            calls.begin()
            embedding = coupled.embed(model, batch)
            calls.end()
            origin = self._check_forward(calls, embedding.tensors, batch, current[0], coupled.embed)
            non_finite.extend([origin] if origin else [])
            return embedding

        source = replace(coupled, embed=embed, update=lambda: self.update - 1)
        passes = ForwardPasses(
            training.model, training.loss, training.precision.forward, torch.autograd.backward,
            lambda loss: training.precision.scale_loss(loss * training.per_item), lambda _: None,
        )  # fmt: skip
        for weight in training.parameters:
            weight.grad = None
        update = CoupledUpdate(source, parts.parallel, passes)
        place = locate_definition(coupled.couple, parts.source)
        with self._recorded_calls() as calls:
            embedded = update.embed_and_yield(read())
            for micro, micro_batch in zip([*micros[-1:], *micros[:-1]], embedded, strict=True):
                if not is_finite(update.total):
                    loss = _Origin("loss", f"the outputs of all modules are finite, but couple() is not ({place})")
                    return non_finite[0] if non_finite else loss
                gradients = [gradient for gradient in micro_batch.batch.gradients if gradient is not None]
                weights = [weight.grad for weight in training.parameters if weight.grad is not None]
                if not is_finite([gradients, weights]):
                    return _Origin("loss", f"couple() is finite, but its gradient is not ({place})")
                current[:] = [micro]
                if micro.is_counted:
                    root, _ = update.recompute(training.model, micro_batch.batch)
                    torch.autograd.backward(root)
                    found = self._check_backward(calls, micro)
                    if found:
                        return found
        return _Origin("unknown", "")

    def _search_samples(self) -> _Origin:
        for micro, batch in self._read_batches():
            if not is_finite(batch):
                return self._blame_samples(micro)
        return _Origin("unknown", "all samples are finite; the modules of a pipeline are not searched")

    def _read_batches(self) -> Iterator[tuple[MicroBatchKey, Any]]:
        """Yield the micro-batches that the model receives, on the device."""
        micros = [micro for micro in self.micros if micro.is_counted or self.parts.parallel.is_lockstep]
        read = self.parts.prefetch(iter([self.fetcher[micro] for micro in micros]))
        for micro, micro_batch in zip(micros, read, strict=True):
            if micro_batch.batch is not None:
                noise.start_pass(micro_batch.samples)
                yield micro, micro_batch.batch

    def _check_forward(
        self, calls: ModuleCalls, result: Any, batch: Any, micro: MicroBatchKey, method: Any
    ) -> _Origin | None:
        """Return the origin in the forward pass; None if its result is finite: intermediate values are then harmless.

        result, method  the loss and the method that computes it, or the embeddings and `embed`
        """
        if is_finite(result):
            return None
        call, has_bad_samples = calls.find_origin(), not is_finite(batch)
        if call is not None:
            inputs = "have no NaN" if call.inputs.inf or call.inputs.mask else "are finite"
            origin = self._origin("module", f"first in the output of {call}, whose inputs {inputs}", micro)
            return origin._replace(samples=self._find_bad_samples(micro) if has_bad_samples else ())
        if has_bad_samples:
            return self._blame_samples(micro)
        place = locate_definition(getattr(method, "loss", method), self.parts.source)
        name = "the result of embed()" if self.coupled else "the loss"
        return self._origin("loss", f"the outputs of all modules are finite, but {name} is not ({place})", micro)

    def _check_backward(self, calls: ModuleCalls, micro: MicroBatchKey) -> _Origin | None:
        call = calls.find_backward_origin()
        if call is not None:
            what = f"first in the backward pass of {call}, whose forward pass is finite"
            return self._origin("module", what, micro)
        gradients = [weight.grad for weight in self.training.parameters if weight.grad is not None]
        if any(call.outside or call.inside for call in calls.completed) or not is_finite(gradients):
            what = "the forward pass is finite, but the gradient of the loss with respect to its output is not"
            return self._origin("loss", what, micro)
        if gradients and not is_finite(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))):
            what = f"every gradient is finite, but their norm overflows {gradients[0].dtype}"
            return self._origin("overflow", what, micro)
        return None

    def _origin(self, kind: str, what: str, micro: MicroBatchKey) -> _Origin:
        indices = self.fetcher.dataset_indices(micro.indices)
        return _Origin(kind, f"{what}; samples {abbreviate(indices)}", micro_batch=indices)

    def _blame_samples(self, micro: MicroBatchKey) -> _Origin:
        bad = self._find_bad_samples(micro)
        if not bad:
            return self._origin("samples", "the data are not finite", micro)
        indices = self.fetcher.dataset_indices(micro.indices)
        return _Origin("samples", f"samples that are not finite: {abbreviate(bad)}", samples=bad, micro_batch=indices)

    def _find_bad_samples(self, *micros: MicroBatchKey) -> list[int]:
        """Return the non-finite samples of these micro-batches; each is read separately."""
        bad = []
        for micro in micros:
            for index in micro.indices:
                with suppress(Exception):  # collate may need more than one sample
                    if not is_finite(self.fetcher[micro._replace(indices=[index])].batch):
                        bad += self.fetcher.dataset_indices([index])
        return bad


_CHANGE = "lower optimizer.lr (with resume_allow=[optimizer.lr]), raise scheduler.warmup or set max_grad_norm"
_FIXES = {  # most informative first
    "samples": "fix these samples, or let the dataset raise an error for them and use dataloader.bad_samples=skip",
    "module": f"{_CHANGE}; or fix the module",
    "loss": f"fix the loss; or {_CHANGE}",
    "parameters": "lower optimizer.lr, with resume_allow=[optimizer.lr]",
    "applied": (
        "use optimizer.kernel=fused, which detects the overflow before the step, so that the module can be found"
    ),
    "overflow": "scale the loss down, because the squares of gradients of this size overflow",
    "unknown": _CHANGE,
}
