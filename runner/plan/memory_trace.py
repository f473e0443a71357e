"""What a configuration takes of a device, memory and work: data, traced on the CPU and translated elsewhere.

Nothing here imports torch: the plan reads it for machines that are not here.
"""

from __future__ import annotations

from dataclasses import dataclass

Event = tuple[int, int]  # (number of a block of memory, its bytes; 0 where it is given back)


@dataclass(frozen=True)
class Bytes:
    """Bytes in use at one moment, by what they are for.

    parameters   of the model, trained or not
    buffers      of the model
    gradients    of the parameters, with the buckets in which ranks exchange them
    optimizer    state of the optimizer
    activations  what a forward pass made and the backward pass still wants; copies of weights in half formats too
    inputs       batches on the device
    temporary    what else is there at that moment: results under way, gradients of activations
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    inputs: int = 0
    temporary: int = 0

    @property
    def total(self) -> int:
        """Return their sum."""
        return (
            self.parameters
            + self.buffers
            + self.gradients
            + self.optimizer
            + self.activations
            + self.inputs
            + self.temporary
        )


@dataclass(frozen=True)
class Layer:
    """A part of the model that keeps activations: the smallest module in whose forward pass they are made.

    name         as in `model.named_modules()`; "" is the model itself and what the loss adds
    activations  bytes kept for the backward pass of one micro-batch
    flops        of its forward pass, for one micro-batch
    """

    name: str
    activations: int
    flops: int


@dataclass(frozen=True)
class Traced:
    """One phase that trains, followed on tensors without content over its construction and two updates.

    phase               which one
    micro_batch_size    samples of a pass
    accumulation_steps  passes of an update, as traced; more of them take no more memory than two
    peak                bytes at the moment of the most, in the second update
    events              allocations and their ends, in order: construction, then the second update
    layers              in the order of the forward pass
    blocks              the same for the task's own blocks, each with all that is inside it: units of recomputation
    flops               operations of a micro-batch's forward and backward pass
    moved_bytes         bytes read and written by these
    update_moved_bytes  bytes read and written by the optimizer's step, with clipping
    launches            operators of a micro-batch's forward and backward pass that compute, views left out: each one
                        launches a kernel of a GPU at least; update_launches: those of the optimizer's step
    block_bytes         of the parameters of the largest of these; outside_bytes of those that are in none
    row_bytes           of one row of each parameter: by so much the parts of ranks that cut them by rows are uneven
    trained_bytes       of the gradients of all that is trained; widest_bytes of the largest of them
    without_bytes       most at any moment of the second update, gradients not counted
    num_layers          layers between which a pipeline may split; None where the task does not tell
    recompute           numbers of the blocks that memory=budget computes again, so that this fits
    is_exact            True: equal to what the same run takes on a CPU, byte for byte
    why_not             what could not be traced, with its place; empty where all was
    """

    phase: str
    micro_batch_size: int
    accumulation_steps: int
    peak: Bytes
    events: tuple[Event, ...]
    layers: tuple[Layer, ...]
    blocks: tuple[Layer, ...]
    flops: int
    moved_bytes: int
    update_moved_bytes: int
    block_bytes: int = 0
    outside_bytes: int = 0
    row_bytes: int = 0
    trained_bytes: int = 0
    widest_bytes: int = 0
    without_bytes: int = 0
    num_layers: int | None = None
    launches: int = 0
    update_launches: int = 0
    recompute: tuple[int, ...] = ()
    is_exact: bool = True
    why_not: str = ""
