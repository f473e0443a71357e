"""Call the functions of a task in checks without affecting training."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from runner.base import noise
from runner.base.batch import BatchSamples
from runner.engine.parts.assemble import Parts
from runner.tensors.global_rng import random_state, restore_random_state, seed_everything
from runner.tensors.module_buffers import restore_buffers


@contextmanager
def without_effects(parts: Parts) -> Iterator[None]:
    """Compute without gradients; restore attributes of the model and the task, and the generators, on exit."""
    tensors, rest = random_state(parts.world.device)
    with (
        _restore_attributes([parts.task, *parts.bare.modules()]),
        torch.no_grad(),
        noise.without_samples(),
        # Calls in eval mode and with half batches must not trigger a compilation.
        torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext(),
    ):
        try:
            yield
        finally:
            restore_random_state(tensors, rest, parts.world.device)


@contextmanager
def repeatable_pass(parts: Parts, samples: BatchSamples | None, seed: int) -> Iterator[None]:
    """Run a forward pass whose random numbers depend only on the samples and the seed; restore the buffers on exit."""
    noise.start_pass(samples)
    seed_everything(seed)
    with restore_buffers(parts.bare.modules()):
        yield


@contextmanager
def _restore_attributes(objects: Sequence[object]) -> Iterator[None]:
    """Restore numbers, flags and strings in the attributes of objects, because a loss may count its calls."""
    saved = [(vars(obj), dict(vars(obj))) for obj in objects]
    try:
        yield
    finally:
        for attributes, before in saved:
            for name in [name for name, value in attributes.items() if isinstance(value, _PLAIN_TYPES)]:
                if name not in before:  # attribute created by the first call
                    del attributes[name]
            attributes.update({name: value for name, value in before.items() if isinstance(value, _PLAIN_TYPES)})


_PLAIN_TYPES = (bool, int, float, str, type(None))
