"""Gradient caching (GradCache) for losses that depend on all samples of an update, such as a contrastive loss.

An update has three steps:
1. Run a forward pass of each micro-batch and keep only its embeddings.
2. Compute the loss of all embeddings, and its gradient with respect to them.
3. For each micro-batch, repeat the forward pass with the same random numbers, and backpropagate the cached gradient.
Activations are kept for one micro-batch at a time; inputs and embeddings are kept for the whole update.
Source: Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, RepL4NLP 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.base import noise
from runner.base.batch import BatchSamples, MicroBatch, map_tensors
from runner.base.errors import ConfigError, Problem, TaskFault
from runner.base.sample_rng import global_generators, seeded_generators
from runner.base.task import Sum, Task
from runner.config.configuration import Choice
from runner.distributed.agreement import gather_tensors
from runner.distributed.parallel import Discarded, ForwardPasses, Parallel, Sums
from runner.engine.contract.contract_checks import Number, describe_value, validate_loss
from runner.engine.contract.error_diagnosis import locate_definition
from runner.engine.update.gradients import ForwardWrapper, GradientSource
from runner.engine.update.model_states import ModelState, ModelStates

EMBED_FIX = "return a tensor with one row per sample, or a tuple or dictionary of such tensors"


class Embedding(NamedTuple):
    """Return value of `embed`, flattened.

    tensors  in the order in which `embed` returned them
    kind     "tensor", "tuple", or the keys of the dictionary that `embed` returned
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
    """Return True if `embed` and `couple` define the loss of a phase. Raises TaskFault if only one is defined."""
    task_class = type(task)
    defined = {name: getattr(task_class, name) is not getattr(Task, name) for name in ("embed", "couple", "loss")}
    if not defined["embed"] and not defined["couple"]:
        return False
    if not (defined["embed"] and defined["couple"]):
        missing, defined_name = ("couple", "embed") if defined["embed"] else ("embed", "couple")
        raise TaskFault(
            f"{task_class.__name__} defines {defined_name} but not {missing}", fix=f"define {missing} as well"
        )
    if defined["loss"] and phase not in task.losses:
        raise TaskFault(f"{task_class.__name__} defines both loss and embed", fix="remove loss, or embed and couple")
    return phase not in task.losses


def check_strategy(parallel: Parallel, choice: Choice) -> None:
    """Raise ConfigError for a strategy that runs collectives inside forward and backward passes."""
    if parallel.is_lockstep or not parallel.splits_batch:
        is_sync_norm = choice.options.get("batch_norm") == "sync"
        raise ConfigError(
            Problem(
                "cannot train a loss defined by embed and couple: ranks communicate in each forward and backward pass",
                "parallelism.batch_norm=sync" if is_sync_norm else f"parallelism={choice.name}",
                "use parallelism.batch_norm=per_rank" if is_sync_norm else "use parallelism=ddp or parallelism=single",
            )
        )


def validate_embedding(
    result: Any, embed: Callable[..., Any], source: Path, *, sync: bool = False, name: str = "embed()"
) -> Embedding:
    """Return, as an Embedding, the value that `embed` or the method `name` returned.

    Raises TaskFault for anything but dense tensors with a batch dimension, or if gradients are enabled and no tensor
    requires grad.
    """
    where = locate_definition(embed, source)
    if isinstance(result, Tensor):
        embedding = Embedding((result,), "tensor")
    elif isinstance(result, Mapping):
        embedding = Embedding(tuple(result.values()), tuple(result))
    elif isinstance(result, (tuple, list)):
        embedding = Embedding(tuple(result), "tuple")
    else:
        raise TaskFault(
            f"{name} must return tensors, but returned {describe_value(result)}", where=where, fix=EMBED_FIX
        )
    tensors: tuple[Any, ...] = embedding.tensors
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or not tensor.dim() or tensor.layout is not torch.strided:
            found = describe_value(tensor)
            what = f"{name} must return tensors whose first dimension is the samples, but one is {found}"
            raise TaskFault(what, where=where, fix=EMBED_FIX)
    if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in embedding.tensors):
        what = "embed() must return a tensor that requires grad, but none does"
        raise TaskFault(what, where=where, fix="compute it from model(...), without detach, item or no_grad")
    return embedding


def check_rows(embedding: Embedding, samples: BatchSamples | None, embed: Callable[..., Any], source: Path) -> None:
    """Raise TaskFault if a tensor has more rows than the batch has samples.

    If `embed` concatenated two views of each sample, the order of the rows in `couple` would depend on the
    micro-batch size. Fewer rows than samples are allowed, because `collate` may drop samples.
    """
    if samples is None:
        return
    num_samples = len(samples.indices)
    for tensor in embedding.tensors:
        if len(tensor) > num_samples:
            raise TaskFault(
                f"embed() must return one row per sample, but returned {len(tensor)} rows for {num_samples} samples",
                where=locate_definition(getattr(embed, "loss", embed), source),
                fix="return several views as a tuple, such as z.chunk(2), and concatenate them in couple",
            )


def _versions(batch: Any) -> list[int]:
    """Return the number of in-place changes of each tensor of a batch."""
    versions: list[int] = []
    map_tensors(lambda tensor: versions.append(tensor._version), batch)
    return versions


@dataclass
class CoupledSource(GradientSource):
    """Gradients of `couple` applied to the embeddings of all samples of an update.

    embed    (model, batch) -> Embedding
    couple   task method: embeddings of all samples of the update -> (loss sum, number of items)
    seed     with `update`, seeds the random numbers that `couple` draws, so that they are the same on all ranks
    update   returns the number of the current update
    """

    embed: Callable[[nn.Module, Any], Embedding]
    couple: Callable[[Any], Sum]
    source: Path
    seed: int
    update: Callable[[], int]
    states: ModelStates = field(default_factory=ModelStates)
    counts: dict[int, Number] = field(default_factory=dict)  # of the last two updates, to be checked later

    def accumulate(self, parallel: Parallel, passes: ForwardPasses, batches: Iterator[MicroBatch]) -> Sums:
        update = CoupledUpdate(self, parallel, passes)
        # Embed inside `parallel.accumulate`, which handles buffers, failures and communication as for other losses.
        # The cached gradients are those of the scaled loss, so this backward pass must not scale them again.
        recomputing = passes._replace(loss=update.recompute, backward=torch.autograd.backward)
        sums = parallel.accumulate(recomputing, update.embed_and_yield(batches))
        update.close()
        if sums.failed or not parallel.world.is_first:
            return sums
        return sums._replace(loss_sum=sums.loss_sum + update.total, items=sums.items + update.count)

    def wrap_forward(self, wrapper: ForwardWrapper) -> GradientSource:
        return CoupledSource(wrapper(self.embed), self.couple, self.source, self.seed, self.update)

    def compute_loss(self, embeddings: Any) -> Sum:
        """Return the loss of these embeddings; random numbers depend only on the seed and the update."""
        with noise.without_samples(), seeded_generators(self.seed, "couple", self.update()):
            answer, update = self.couple(embeddings), self.update()
            total, count = validate_loss(
                answer, self.couple, self.source, sync=update == 0, name="couple", allows_zero=False
            )
        kept = count.detach() if isinstance(count, Tensor) else count
        self.counts = {**{number: old for number, old in self.counts.items() if number == update - 1}, update: kept}
        return total, count


@dataclass
class _EmbeddedBatch:
    """A micro-batch and the state before its embedding.

    tensors     its embeddings; those of the last micro-batch keep their autograd graph
    rng_states  states of the global random number generators before the forward pass
    state       buffers and frozen parameters before the forward pass
    gradients   gradients of the loss with respect to `tensors`
    """

    micro: MicroBatch
    tensors: tuple[Tensor, ...] = ()
    rng_states: list[bytes] = field(default_factory=list)
    state: ModelState = field(default_factory=dict)
    gradients: tuple[Tensor | None, ...] = ()


class CoupledUpdate:
    """The embeddings of an update, their loss, and its gradients with respect to them."""

    def __init__(self, source: CoupledSource, parallel: Parallel, passes: ForwardPasses) -> None:
        self.source, self.parallel, self.passes = source, parallel, passes
        self.world = parallel.world
        self.embedded: list[_EmbeddedBatch] = []
        self.kind: str | tuple[str, ...] | None = None
        self.has_gradient: list[bool] = []
        self.total = self.world.zeros()
        self.count: Number = 0
        self._with_graph: _EmbeddedBatch | None = None  # the micro-batch whose activations are kept
        self._rng_states: list[bytes] = []
        self._state: ModelState = {}

    def embed_and_yield(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Embed all micro-batches, compute gradients of the embeddings, then yield each micro-batch for `recompute`."""
        failed = False
        try:
            self._embed_all(batches)
        except Exception as error:
            if self.world.world_size == 1:
                raise
            self.passes.failed(error)  # raises the error if the update cannot be discarded
            failed = True
        if failed:  # outside of `except`, because the exception's traceback keeps activations alive
            self.embedded, self._with_graph = [], None
        self._compute_gradients(failed=failed)
        self.parallel.stopwatch.lap("forward")
        self._rng_states = [generator.get_state() for generator in global_generators()]
        if self._has_states:
            # `couple` may have changed the model.
            self._state = self.source.states.record(self.passes.model, after_passes=True)
            self.source.states.end_update()
        # The last micro-batch goes first: it needs no second forward pass, because its activations are kept. A second
        # forward pass of another micro-batch could change buffers that the graph saved for the backward pass.
        order = [*self.embedded[-1:], *self.embedded[:-1]]
        for number, batch in enumerate(order, 1):
            yield batch.micro._replace(batch=batch, last=number == len(order))

    def recompute(self, model: nn.Module, batch: _EmbeddedBatch) -> tuple[Tensor, int]:
        """Return a scalar whose backward pass backpropagates the gradients of this micro-batch's embeddings."""
        tensors = batch.tensors
        if batch is not self._with_graph:
            self.source.states.restore(batch.state)
            _restore_generators(batch.rng_states)
            noise.start_pass(batch.micro.samples)
            tensors = self.source.embed(model, batch.micro.batch).tensors
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(tensors, batch.gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        self._with_graph, batch.tensors, batch.gradients = None, (), ()
        return _make_backward_root([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]), 0

    def close(self) -> None:
        """Restore generators, buffers and frozen parameters to their state after the first forward passes."""
        if len(self.embedded) > 1:
            _restore_generators(self._rng_states)
            self.source.states.restore(self._state)

    @property
    def _has_states(self) -> bool:
        """Whether a state was recorded, which the last micro-batch does not need."""
        return any(batch.state for batch in self.embedded)

    def _embed_all(self, batches: Iterator[MicroBatch]) -> None:
        stopwatch, model = self.parallel.stopwatch, self.passes.model
        last = has_passed = False
        while not last:
            micro = next(batches)
            stopwatch.lap("data")
            last = micro.last
            batch = _EmbeddedBatch(micro)
            self.embedded.append(batch)
            if not micro.is_counted:
                continue
            batch.rng_states = [generator.get_state() for generator in global_generators()]
            batch.state = {} if last else self.source.states.record(model, after_passes=has_passed)
            versions = [] if last else _versions(micro.batch)
            # Only the last graph is used, but modules may behave differently under no_grad, and the second forward pass
            # must compute the same embeddings.
            with self.passes.forward():
                embedding = self.source.embed(model, micro.batch)
            has_passed = True
            if not last and versions != _versions(micro.batch):
                raise TaskFault(
                    "embed() is called twice for most micro-batches, but changes its batch in place",
                    where=locate_definition(getattr(self.source.embed, "loss", self.source.embed), self.source.source),
                    fix="compute new tensors, such as x = x / 255 instead of x /= 255",
                )
            check_rows(embedding, micro.samples, self.source.embed, self.source.source)
            if self.kind is not None and self.kind != embedding.kind:
                what = f"embed() returned {self.kind} for one micro-batch and {embedding.kind} for another"
                raise TaskFault(what, where=str(self.source.source), fix=EMBED_FIX)
            self.kind, self.has_gradient = embedding.kind, [tensor.requires_grad for tensor in embedding.tensors]
            tensors = embedding.tensors
            batch.tensors = tensors if last else tuple(tensor.detach().clone() for tensor in tensors)
            del embedding, tensors
            stopwatch.lap("forward")
        if self._has_states:
            self.source.states.record(model, after_passes=True)
        self._with_graph = self.embedded[-1] if self.embedded[-1].micro.is_counted else None

    def _compute_gradients(self, *, failed: bool) -> None:
        """Compute the loss of the embeddings of all ranks, and its gradient with respect to those of this rank."""
        batches = [batch for batch in self.embedded if batch.tensors]
        local = [torch.cat([batch.tensors[k].detach() for batch in batches]) for k in range(len(self.has_gradient))]
        gathered = self.world.gather([failed, self.kind, self.has_gradient if batches else None])
        self.parallel.stopwatch.lap("wait")
        if any(has_failed for has_failed, _, _ in gathered):
            raise Discarded
        described = [(kind, flags) for _, kind, flags in gathered if flags is not None]
        if not described:  # no rank has samples; the training loop raises an error for an update without items
            return
        kind, flags = described[0]
        rank_rows = gather_tensors(local, self.world)  # empty for a rank without samples
        leaves = [
            torch.cat([rows[k] for rows in rank_rows if rows]).requires_grad_(flag) for k, flag in enumerate(flags)
        ]
        starts = [sum(len(rows[k]) for rows in rank_rows[: self.world.rank] if rows) for k in range(len(flags))]
        gradients = self._differentiate(leaves, kind if isinstance(kind, str) else tuple(kind))
        for batch in batches:
            slices = [slice(start, start + len(rows)) for start, rows in zip(starts, batch.tensors, strict=True)]
            batch.gradients = tuple(
                None if gradient is None else gradient[part] for gradient, part in zip(gradients, slices, strict=True)
            )
            starts = [part.stop for part in slices]

    def _differentiate(self, leaves: Sequence[Tensor], kind: str | tuple[str, ...]) -> list[Tensor | None]:
        """Compute the loss; return its gradients with respect to the tensors of the embedding."""
        # Copies, because `couple` may change its inputs in place, which autograd forbids for leaves.
        copies = Embedding(tuple(leaf.clone() if leaf.requires_grad else leaf for leaf in leaves), kind)
        with self.passes.forward():
            total, self.count = self.source.compute_loss(copies.structure)
        self.total = total.detach()
        scaled = self.passes.scale(total)
        if self.world.is_first:  # all ranks compute the same gradients for parameters used in `couple`: count them once
            torch.autograd.backward(scaled)
            return [leaf.grad for leaf in leaves]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = iter(torch.autograd.grad(scaled, trained, allow_unused=True))
        return [next(gradients) if leaf.requires_grad else None for leaf in leaves]


def _restore_generators(rng_states: Sequence[bytes]) -> None:
    for generator, state in zip(global_generators(), rng_states, strict=True):
        generator.set_state(state)


class _StartBackward(torch.autograd.Function):
    """Return a zero whose backward pass returns the given gradients for its inputs; they include the loss scale."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *ctx.gradients


def _make_backward_root(tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros((), requires_grad=True)
    # Not torch.autograd.backward(tensors, gradients): the strategies call backward on the scalar that a loss returns.
    root: Tensor = _StartBackward.apply(gradients, *tensors)  # type: ignore[no-untyped-call]
    return root
