"""Out-of-memory errors at a chosen place, rank and size."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._dynamo.backends import registry
from torch.optim.optimizer import register_optimizer_step_pre_hook

HOST = "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@dataclass
class Shortage:
    """Micro-batches of more than `limit` samples run out of memory at `place` on rank `rank`, from update `at` on.

    times  number of failures; afterwards, memory is sufficient
    """

    place: str
    limit: int
    at: int = 0
    rank: int = 0
    times: int = 1000
    on_host: bool = False
    update: int = 0
    largest: int = 0
    struck: list[int] = field(default_factory=list)

    def strike(self, place: str, samples: int) -> None:
        """Raise if this is the place, the rank and the update."""
        here = dist.get_rank() if dist.is_initialized() else 0
        if (place, here) != (self.place, self.rank) or samples <= self.limit or self.update < self.at or not self.times:
            return
        self.times -= 1
        self.struck.append(samples)
        self.fail(samples)

    def fail(self, samples: int) -> None:
        """Raise the error that torch raises."""
        if self.on_host:
            raise RuntimeError(f"{HOST} {samples << 20} bytes. Error code 12 (Cannot allocate memory)")
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {samples}.00 MiB. GPU 0 is small.")


@dataclass
class Limited(Shortage):
    """Make a large allocation fail by limiting the address space of the process during it.

    library  the library that allocates: torch, numpy or Python
    """

    library: str = "torch"

    def fail(self, samples: int) -> None:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 20), before[1]))
        try:
            nbytes = samples << 28
            _ = {"torch": torch.empty, "numpy": np.empty, "Python": bytearray}[self.library](nbytes)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


planted: list[Shortage] = []


def strike(place: str, samples: int) -> None:
    """Fail here if a shortage is planted."""
    for each in planted:
        each.strike(place, samples)


def begin_update(update: int) -> None:
    """Mark the start of an update, or of a retry."""
    for each in planted:
        each.update, each.largest = update, 0


def record_samples(samples: int) -> None:
    """Record the number of samples of a micro-batch."""
    for each in planted:
        each.largest = max(each.largest, samples)


@contextmanager
def plant(*shortages: Shortage) -> Iterator[None]:
    """Plant these shortages within the context."""
    planted[:] = shortages
    hook = register_optimizer_step_pre_hook(
        lambda *_: strike("optimizer", max((each.largest for each in planted), default=0))
    )
    eager: Callable[..., Any] = registry.lookup_backend("eager")

    def compiled(graph: Any, inputs: Any, **options: Any) -> Any:
        given = [each for each in inputs if isinstance(each, torch.Tensor) and not isinstance(each, torch.nn.Parameter)]
        strike("compile", max((len(each) for each in given if each.dim() == 2), default=0))
        return eager(graph, inputs, **options)

    known = registry._COMPILER_FNS  # lint-tests: private: torch has no public way to replace a backend
    known["eager"] = compiled
    try:
        yield
    finally:
        known["eager"] = eager
        hook.remove()
        planted.clear()
