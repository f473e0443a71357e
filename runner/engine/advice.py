"""Collect advice about the model and the data at the start of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from runner.base.batch import MicroBatch, map_tensors


def find_odd_sizes(model: nn.Module, device: torch.device, multiple: int = 8) -> list[str]:
    """Return a line for each weight matrix whose size prevents the use of tensor cores in half precision.

    Source: NVIDIA, Matrix Multiplication Background User's Guide, section on dimension quantization: sizes in
    multiples of 16 bytes, which is 8 numbers of 16 bits.
    """
    if device.type != "cuda":
        return []
    lines = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            odd = [size for size in module.weight.shape if size % multiple]
            if odd:
                better = ", ".join(f"{size} -> {-(-size // multiple) * multiple}" for size in odd)
                lines[tuple(odd)] = (
                    f"{name or 'the model'}: sizes in multiples of {multiple} are faster on a GPU: {better}"
                )
    return list(lines.values())


def watch_shapes(batches: Iterator[MicroBatch], warn: Callable[[str], None]) -> Iterator[MicroBatch]:
    """Yield the batches; warn once if their shapes vary: backend=fast searches for kernels for each new shape."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    warned = False
    for batch in batches:
        if not warned and batch.counts:
            shapes: list[tuple[int, ...]] = []

            def add_shape(tensor: Tensor, shapes: list[tuple[int, ...]] = shapes) -> None:
                shapes.append(tuple(tensor.shape))

            map_tensors(add_shape, batch.batch)
            seen.add(tuple(shapes))
            if len(seen) > 3:  # the usual shape, a smaller last micro-batch, and the last batch of an epoch
                warned = True
                warn("the shapes of the batches vary; backend=fast searches kernels for each: use backend=default")
        yield batch
