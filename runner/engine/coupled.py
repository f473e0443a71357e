"""Gradients of a loss that couples all samples of an update, such as a contrastive loss.

An update embeds all micro-batches, computes the loss and its gradient with respect to the embeddings once, and then
runs backward per micro-batch: forward again with the same random numbers, and backward from the stored gradient.
Activations of one micro-batch are held at a time; inputs and embeddings of the whole update are held throughout.
Source: Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, RepL4NLP 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.base import noise
from runner.base.batch import BatchSamples, MicroBatch
from runner.base.bitwise import bitwise_equal, is_dense
from runner.base.errors import ConfigError, Problem, TaskFault
from runner.base.module_buffers import is_writable
from runner.base.sample_rng import global_generators, seeded_generators
from runner.base.task import Sum, Task
from runner.config.configuration import Choice
from runner.distributed.parallel import Discarded, ForwardPasses, Parallel, Sums
from runner.distributed.row_gather import RowSpec, gather_rows
from runner.engine.contract_checks import Number, describe_value, validate_loss
from runner.engine.error_diagnosis import locate_definition
from runner.engine.gradient_source import ForwardWrapper, GradientSource

_Place = tuple[nn.Module, str]  # place of a buffer
_Buffers = dict[_Place, Tensor]
EMBED_FIX = "return a tensor with one row per sample, or a tuple or dictionary of such tensors"


class Embedding(NamedTuple):
    """What `embed` returned: its tensors in order, and how they were packed.

    kind  "tensor", "tuple", or the keys of a dictionary
    """

    tensors: tuple[Tensor, ...]
    kind: str | tuple[str, ...]

    @property
    def structure(self) -> Any:
        """The tensors in the structure that `embed` returned."""
        if self.kind == "tensor":
            return self.tensors[0]
        return self.tensors if self.kind == "tuple" else dict(zip(self.kind, self.tensors, strict=True))


def is_coupled(task: Task, phase: str) -> bool:
    """Return whether the loss of a phase is given by `embed` and `couple`. Raises TaskFault if only one is defined."""
    kind = type(task)
    defined = {name: getattr(kind, name) is not getattr(Task, name) for name in ("embed", "couple", "loss")}
    if not defined["embed"] and not defined["couple"]:
        return False
    if not (defined["embed"] and defined["couple"]):
        missing, there = ("couple", "embed") if defined["embed"] else ("embed", "couple")
        raise TaskFault(f"{kind.__name__} defines {there} but not {missing}", fix=f"define {missing}, too")
    if defined["loss"] and phase not in task.losses:
        raise TaskFault(f"{kind.__name__} defines both loss and embed", fix="remove loss, or embed and couple")
    return phase not in task.losses


def check_strategy(parallel: Parallel, choice: Choice) -> None:
    """Raise ConfigError for a strategy that runs collectives inside forward and backward passes."""
    if parallel.in_step or not parallel.splits_batch:
        is_norm = choice.options.get("batch_norm") == "sync"
        raise ConfigError(
            Problem(
                "cannot train a loss defined by embed and couple: its passes contain collectives",
                "parallelism.batch_norm=sync" if is_norm else f"parallelism={choice.name}",
                "use parallelism.batch_norm=per_rank" if is_norm else "use parallelism=ddp or parallelism=single",
            )
        )


def validate_embedding(answer: Any, embed: Callable[..., Any], source: Path, *, sync: bool = False) -> Embedding:
    """Return what `embed` returned. Raises TaskFault for anything but rows, or without gradient while enabled."""
    where = locate_definition(embed, source)
    if isinstance(answer, Tensor):
        found = Embedding((answer,), "tensor")
    elif isinstance(answer, Mapping):
        found = Embedding(tuple(answer.values()), tuple(answer))
    elif isinstance(answer, (tuple, list)):
        found = Embedding(tuple(answer), "tuple")
    else:
        raise TaskFault(f"embed must return tensors, but returned {describe_value(answer)}", where=where, fix=EMBED_FIX)
    parts: tuple[Any, ...] = found.tensors
    for tensor in parts:
        if not isinstance(tensor, Tensor) or not tensor.dim() or tensor.layout is not torch.strided:
            what = (
                f"embed must return tensors whose first dimension is the samples, but one is {describe_value(tensor)}"
            )
            raise TaskFault(what, where=where, fix=EMBED_FIX)
    if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in found.tensors):
        what = "embed must return a tensor that has a gradient, but none has one"
        raise TaskFault(what, where=where, fix="compute it from model(...), without detach, item or no_grad")
    return found


def check_rows(found: Embedding, samples: BatchSamples | None, embed: Callable[..., Any], source: Path) -> None:
    """Raise TaskFault if a tensor has more rows than the batch has samples.

    Two views of each sample, concatenated, would come in another order with other micro-batches. Fewer rows are fine:
    `collate` may drop samples.
    """
    if samples is None:
        return
    number = len(samples.indices)
    for tensor in found.tensors:
        if len(tensor) > number:
            raise TaskFault(
                f"embed must return one row per sample, but returned {len(tensor)} rows for {number} samples",
                where=locate_definition(getattr(embed, "loss", embed), source),
                fix="return several views as a tuple, such as z.chunk(2), and concatenate them in couple",
            )


@dataclass
class CoupledSource(GradientSource):
    """Gradients of `couple` applied to the embeddings of the whole update.

    embed    (model, batch) -> Embedding
    couple   task method: embeddings of the whole update -> (loss sum, number of items)
    update   returns the number of the update; seeds random draws of `couple`, which are the same on all ranks
    """

    embed: Callable[[nn.Module, Any], Embedding]
    couple: Callable[[Any], Sum]
    source: Path
    seed: int
    update: Callable[[], int]
    changing: set[_Place] | None = None  # buffers that forward passes change; None: not known yet

    def accumulate(self, parallel: Parallel, passes: ForwardPasses, batches: Iterator[MicroBatch]) -> Sums:
        update = _CoupledUpdate(self, parallel, passes)
        # Inside of `accumulate`, so that buffers, failures and overlapped communication are handled as for any loss.
        resumed = passes._replace(loss=update.resumed, backward=torch.autograd.backward)
        sums = parallel.accumulate(resumed, update.micros(batches))
        update.close()
        if sums.failed or not parallel.world.is_first:
            return sums
        return sums._replace(loss_sum=sums.loss_sum + update.total, items=sums.items + update.count)

    def wrap_forward(self, wrapper: ForwardWrapper) -> GradientSource:
        return CoupledSource(wrapper(self.embed), self.couple, self.source, self.seed, self.update)

    def coupled(self, packed: Any) -> Sum:
        """Return the loss of these embeddings; random draws depend on seed and update only."""
        with noise.without_samples(), seeded_generators(self.seed, "couple", self.update()):
            return validate_loss(self.couple(packed), self.couple, self.source, name="couple")


@dataclass
class _Pass:
    """A micro-batch, and the state in which it was embedded.

    tensors  its embeddings; those of the last micro-batch keep their graph
    marks    state of the global generators
    buffers  of the model, those that forward passes change
    """

    micro: MicroBatch
    tensors: tuple[Tensor, ...] = ()
    marks: list[bytes] = field(default_factory=list)
    buffers: _Buffers = field(default_factory=dict)
    gradients: tuple[Tensor | None, ...] = ()


class _CoupledUpdate:
    """One update of one rank."""

    def __init__(self, source: CoupledSource, parallel: Parallel, passes: ForwardPasses) -> None:
        self.source, self.parallel, self.passes = source, parallel, passes
        self.world = parallel.world
        self.passed: list[_Pass] = []
        self.kind: str | tuple[str, ...] | None = None
        self.has_gradient: list[bool] = []
        self.total = self.world.zeros()
        self.count: Number = 0
        self._kept: _Pass | None = None  # whose activations are still there
        self._marks: list[bytes] = []
        self._buffers: dict[_Place, tuple[Tensor, Tensor]] = {}

    def micros(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Embed all micro-batches and compute the gradients; then yield each one for `resumed`."""
        failed = False
        try:
            self._embed_all(batches)
        except Exception as error:
            if self.world.world_size == 1:
                raise
            self.passes.failed(error)  # raises the error if the update cannot be discarded
            failed = True
        if failed:  # outside of `except`, whose exception keeps activations alive
            self.passed, self._kept = [], None
        self._couple(failed=failed)
        self.parallel.watch.lap("forward")
        self._marks = [generator.mark() for generator in global_generators()]
        self._buffers = {place: (now, now.clone()) for place, now in _found(self._places()).items()}
        # The last one first: its activations are there already. A buffer that it saved for backward is unchanged yet.
        order = [*self.passed[-1:], *self.passed[:-1]]
        for number, each in enumerate(order):
            yield each.micro._replace(batch=each, last=number == len(order) - 1)

    def resumed(self, model: nn.Module, each: _Pass) -> tuple[Tensor, int]:
        """Return a scalar whose backward pass propagates the gradients of the embeddings of this micro-batch."""
        tensors = each.tensors
        if each is not self._kept:
            _write(each.buffers)
            _put_back(each.marks)
            noise.start_pass(each.micro.samples)
            tensors = self.source.embed(model, each.micro.batch).tensors
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(tensors, each.gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        self._kept, each.tensors, each.gradients = None, (), ()
        return _propagated([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]), 0

    def close(self) -> None:
        """Restore what recomputed forward passes changed: generators and buffers, as after the first passes."""
        if len(self.passed) > 1:
            _put_back(self._marks)
            for (module, key), (tensor, after) in self._buffers.items():
                module._buffers[key] = tensor
                with torch.no_grad():
                    tensor.copy_(after)

    def _embed_all(self, batches: Iterator[MicroBatch]) -> None:
        watch, model = self.parallel.watch, self.passes.model
        changing: set[_Place] = set()
        last = False
        while not last:
            micro = next(batches)
            watch.lap("data")
            last = micro.last
            each = _Pass(micro)
            self.passed.append(each)
            if not micro.counts:
                continue
            each.marks = [generator.mark() for generator in global_generators()]
            before = {} if last else _states(_found(self._places()))
            # With gradients, although most graphs are dropped: forward passes are the same when they are repeated.
            with self.passes.forward():
                found = self.source.embed(model, micro.batch)
            each.buffers = {place: state.copy for place, state in before.items() if state.is_changed(place)}
            changing |= each.buffers.keys()
            check_rows(found, micro.samples, self.source.embed, self.source.source)
            self._expect(found)
            each.tensors = found.tensors if last else tuple(tensor.detach().clone() for tensor in found.tensors)
            del found
            watch.lap("forward")
        if len(self.passed) > 1:
            self.source.changing = changing if self.source.changing is None else self.source.changing
        self._kept = self.passed[-1] if self.passed[-1].micro.counts else None

    def _places(self) -> Iterable[_Place]:
        """Return the buffers that forward passes may change: all buffers, until the first update shows which change."""
        if self.source.changing is not None:
            return self.source.changing
        return [(module, key) for module in self.passes.model.modules() for key in module._buffers]

    def _expect(self, found: Embedding) -> None:
        """Raise TaskFault if the embeddings of another micro-batch have another structure."""
        if self.kind is not None and self.kind != found.kind:
            what = f"embed returned {self.kind} for a micro-batch and {found.kind} for another one"
            raise TaskFault(what, where=str(self.source.source), fix=EMBED_FIX)
        self.kind, self.has_gradient = found.kind, [tensor.requires_grad for tensor in found.tensors]

    def _couple(self, *, failed: bool) -> None:
        """Compute the loss of the embeddings of all ranks, and its gradient by those of this one."""
        there = [each for each in self.passed if each.tensors]
        mine = [torch.cat([each.tensors[k].detach() for each in there]) for k in range(len(self.has_gradient))]
        specs = [RowSpec.of(rows, flag) for rows, flag in zip(mine, self.has_gradient, strict=True)] if there else None
        gathered = self.world.gather([failed, self.kind, specs])
        self.parallel.watch.lap("wait")
        if any(failed_there for failed_there, _, _ in gathered):
            raise Discarded
        of_ranks = [None if there is None else [RowSpec(*each) for each in there] for _, _, there in gathered]
        known = next((each for each in of_ranks if each is not None), None)
        if known is None:  # the update has no items, and the loop refuses it
            return
        kind = next(kind for _, kind, there in gathered if there is not None)
        leaves, starts = [], []
        for k, spec in enumerate(known):
            of_tensor = [None if specs is None else specs[k] for specs in of_ranks]
            rows = gather_rows(mine[k] if mine else None, of_tensor, self.world)
            leaves.append(rows.requires_grad_(spec.has_gradient))
            starts.append(sum(0 if each is None else each.size for each in of_tensor[: self.world.rank]))
        gradients = self._gradients(Embedding(tuple(leaves), kind if isinstance(kind, str) else tuple(kind)))
        for each in there:
            slices = [slice(start, start + len(rows)) for start, rows in zip(starts, each.tensors, strict=True)]
            each.gradients = tuple(
                None if gradient is None else gradient[part] for gradient, part in zip(gradients, slices, strict=True)
            )
            starts = [part.stop for part in slices]

    def _gradients(self, whole: Embedding) -> list[Tensor | None]:
        leaves = whole.tensors
        with self.passes.forward():
            total, self.count = self.source.coupled(whole.structure)
        self.total = total.detach()
        scaled = self.passes.scale(total)
        if self.world.is_first:  # once: every rank computes the same gradients of parameters that `couple` uses
            torch.autograd.backward(scaled)
            return [leaf.grad for leaf in leaves]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(scaled, wanted, allow_unused=True))
        return [next(found) if leaf.requires_grad else None for leaf in leaves]


class _State(NamedTuple):
    """A buffer before a forward pass: the tensor, its version and a copy."""

    tensor: Tensor
    version: int
    copy: Tensor

    def is_changed(self, place: _Place) -> bool:
        now = place[0]._buffers.get(place[1])
        if now is not self.tensor or now._version != self.version:
            return True
        # A norm's kernel increments no version. Values of fake tensors, in a forecast, cannot be compared.
        return type(now) is Tensor and not bitwise_equal(now, self.copy)


def _states(found: Mapping[_Place, Tensor]) -> dict[_Place, _State]:
    return {place: _State(tensor, tensor._version, tensor.clone()) for place, tensor in found.items()}


def _found(places: Iterable[_Place]) -> dict[_Place, Tensor]:
    """Return the dense buffers at these places."""
    there = {(module, key): module._buffers.get(key) for module, key in places}
    return {place: tensor for place, tensor in there.items() if tensor is not None and is_dense(tensor)}


def _write(buffers: _Buffers) -> None:
    for (module, key), before in buffers.items():
        now = module._buffers.get(key)
        if now is None or now.shape != before.shape or not is_writable(now):
            module._buffers[key] = before
            continue
        with torch.no_grad():
            now.copy_(before)


def _put_back(marks: Sequence[bytes]) -> None:
    for generator, mark in zip(global_generators(), marks, strict=True):
        generator.restore(mark)


class _Propagate(torch.autograd.Function):
    """A zero whose backward pass starts from given gradients of its inputs; they are scaled already."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *ctx.gradients


def _propagated(tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros((), requires_grad=True)
    found: Tensor = _Propagate.apply(gradients, *tensors)  # type: ignore[no-untyped-call]
    return found
