"""Memory and work of a configuration, traced on the CPU. Other modules derive predictions for a device from them.

Does not import torch, because the plan also uses it for machines that are not present.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

Event = tuple[int, int]  # (number of a memory block, its bytes; 0: it is freed)


@dataclass(frozen=True)
class Bytes:
    """Bytes in use at one moment, by purpose.

    parameters   model parameters, trained or not
    buffers      model buffers
    gradients    gradients of the parameters, with the all-reduce buckets
    optimizer    optimizer state
    activations  saved for the backward pass, including weight copies in 16-bit formats
    inputs       batches on the device
    temporary    everything else: intermediate results, gradients of activations
    statistics   state of a phase that fits statistics
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    inputs: int = 0
    temporary: int = 0
    statistics: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Layer:
    """A module that saves activations: the innermost one whose forward pass computes them.

    name         as in `model.named_modules()`; "" is the model itself, including the loss
    activations  bytes kept for the backward pass of one micro-batch
    flops        floating-point operations of its forward pass, for one micro-batch
    """

    name: str
    activations: int
    flops: int


@dataclass(frozen=True)
class ComputeCost:
    """Work of the operators of a part of an update.

    flops          floating-point operations of matrix products, convolutions and attention
    moved_bytes    bytes read and written
    launches       number of operators other than views: each launches a GPU kernel
    product_bytes  the part of `moved_bytes` that matrix products, convolutions and attention read and write
    received       bytes that a pipeline stage receives from others
    """

    flops: int = 0
    moved_bytes: int = 0
    launches: int = 0
    product_bytes: int = 0
    received: int = 0

    def __add__(self, other: ComputeCost) -> ComputeCost:
        return ComputeCost(
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
            self.launches + other.launches,
            self.product_bytes + other.product_bytes,
            self.received + other.received,
        )

    def merge(self, other: ComputeCost, merge: Callable[[int, int], int]) -> ComputeCost:
        """Merge two costs field by field with the function `merge`."""
        return ComputeCost(*map(merge, vars(self).values(), vars(other).values()))

    def scale(self, factor: float) -> ComputeCost:
        """Return the cost for `factor` times the samples, or for a part of the layers; the launches stay the same."""
        scaled = (round(number * factor) for number in vars(self).values())
        return dataclasses.replace(ComputeCost(*scaled), launches=self.launches)


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model that do not depend on the batch, in bytes.

    block             parameters of the task's largest block; fsdp gathers one block at a time
    outside           parameters outside of blocks, which fsdp gathers for the whole pass
    row               one row of each parameter: the maximum imbalance of shards, which are split by rows
    trained           gradients of all trained parameters
    widest            the largest of these gradients
    num_layers        number of layers between which a pipeline may split; 0 if the task refuses pipelines, None if it
                      does not define layers
    buckets           bytes of the gradient buckets of ddp, in the order in which they are sent
    num_convolutions  number of convolution modules
    shapes_repeat     whether the inputs of convolutions have the same shapes in each update; None if unknown
    """

    block: int = 0
    outside: int = 0
    row: int = 0
    trained: int = 0
    widest: int = 0
    num_layers: int | None = None
    buckets: tuple[int, ...] = ()
    num_convolutions: int = 0
    shapes_repeat: bool | None = None


@dataclass(frozen=True)
class Traced:
    """A phase, traced on fake tensors: its construction and two updates.

    phase                    name of the phase
    micro_batch_size         samples of a micro-batch
    accumulation_steps       micro-batches of an update, as traced; more of them need no more memory than two
    peak                     bytes at the peak of the second update
    events                   allocations and frees, in order: construction, then the second update
    layers                   layers that save activations, in the order of the forward pass
    blocks                   sums over the layers in each of the task's blocks, which are the units of recomputation
    work                     cost of the forward and backward pass of a micro-batch
    step                     cost of the optimizer step, with clipping
    without_gradients_bytes  peak of the second update without gradients
    recompute                indices of the blocks that memory=budget recomputes so that the run fits
    why_not                  what could not be traced, and where; empty if everything was
    read_s                   measured seconds to read a sample in one process of this machine; None: not measured
    """

    phase: str
    micro_batch_size: int
    accumulation_steps: int
    peak: Bytes
    events: tuple[Event, ...]
    layers: tuple[Layer, ...]
    blocks: tuple[Layer, ...]
    work: ComputeCost
    step: ComputeCost
    model: ModelSizes = field(default_factory=ModelSizes)
    without_gradients_bytes: int = 0
    recompute: tuple[int, ...] = ()
    why_not: str = ""
    read_s: float | None = None

    @property
    def is_exact(self) -> bool:
        """Return whether the memory equals that of the same run on a CPU, byte for byte."""
        return not self.why_not


Blocks = tuple[int, ...]


def choose_recomputed_blocks(blocks: Sequence[Layer], peak_bytes: Callable[[Blocks], int], limit: int) -> Blocks:
    """Return the indices of the blocks to recompute so that the run needs at most `limit` bytes.

    Blocks that free the most bytes per recomputed operation come first. Ties go to the earlier block, because the
    backward pass reaches it later, when the activations of later blocks have been freed. Returns all blocks if the run
    exceeds the limit even then, although fewer blocks could have a lower peak.

    blocks      blocks in the order of the forward pass
    peak_bytes  block indices -> peak bytes if these are recomputed. A call traces the run, so the most frequent results
                are tried first: no block, then all blocks. The next two numbers of blocks are interpolated, which finds
                the result if the peak falls linearly with the saved activations; bisection chooses further numbers
    """
    costs = [block.flops / max(1, block.activations) for block in blocks]
    order = sorted(range(len(blocks)), key=costs.__getitem__)
    saved = [0, *accumulate(blocks[number].activations for number in order)]

    def take_first(count: int) -> Blocks:
        return tuple(sorted(order[:count]))

    def find_excess(count: int) -> int:
        return peak_bytes(take_first(count)) - limit

    low, high = 0, len(order)
    if (over := find_excess(low)) <= 0:
        return take_first(low)
    if (under := find_excess(high)) > 0:
        return take_first(high)
    num_guesses = 2
    while high - low > 1:  # recomputing `low` blocks exceeds the limit, `high` blocks do not
        middle = (low + high) // 2
        if num_guesses:
            num_guesses -= 1
            target = saved[low] + (saved[high] - saved[low]) * over / (over - under)
            middle = bisect_left(saved, target, low + 1, high - 1)
        excess = find_excess(middle)
        if excess > 0:
            low, over = middle, excess
        else:
            high, under = middle, excess
    return take_first(high)
