"""Report an out-of-memory error: the requested size, the memory in use, the largest tensors and possible fixes."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn

from runner.base.accelerator import get_accelerator
from runner.base.oom_errors import OomCause, halve
from runner.base.text import dtype_name, format_bytes
from runner.host.cgroup import cgroup_memory_limit
from runner.monitor.gpu_driver import open_driver
from runner.plan.run_plan import Plan

NUM_LARGEST = 25
NUM_OTHERS = 5


@dataclass(frozen=True)
class MemoryHolder:
    """Another process with memory on the GPU; bytes are None if the driver does not report them."""

    pid: int
    name: str
    held_bytes: int | None

    def __str__(self) -> str:
        held = "an unknown amount" if self.held_bytes is None else format_bytes(self.held_bytes)
        return f"{self.name} (process {self.pid}) {held}"


@dataclass(frozen=True)
class MemoryAccount:
    """Memory usage at an out-of-memory error; bytes are None if unknown.

    samples           number of samples of the current micro-batch
    shape             shape of its first tensor
    held_bytes        used by this process
    in_tensors_bytes  part of held_bytes in tensors, on a GPU
    others            other processes with memory on the GPU
    """

    shortage: OomCause
    samples: int
    shape: str
    free_bytes: int | None
    total_bytes: int | None
    held_bytes: int | None
    in_tensors_bytes: int | None = None
    others: tuple[MemoryHolder, ...] = ()

    def __str__(self) -> str:
        """Return the numbers in one line."""
        requested = self.shortage.requested_bytes
        parts = [f"{format_bytes(requested)} requested" if requested is not None else self.shortage.text]
        if self.samples:
            plural, shape = "s" * (self.samples != 1), f" {self.shape}" if self.shape else ""
            parts.append(f"for a micro-batch of {self.samples} sample{plural}{shape}")
        if self.free_bytes is not None and self.total_bytes is not None:
            parts.append(f"with {format_bytes(self.free_bytes)} free of {format_bytes(self.total_bytes)}")
        text = " ".join(parts)
        if self.held_bytes is not None:
            tensors = (
                f", {format_bytes(self.in_tensors_bytes)} of it in tensors" if self.in_tensors_bytes is not None else ""
            )
            text += f"; this process holds {format_bytes(self.held_bytes)}{tensors}"
        if self.others:
            text += f"; others: {', '.join(map(str, self.others))}"
        return text

    @property
    def is_fragmented(self) -> bool:
        """True if the memory that this process has cached but not used is larger than the requested size."""
        if self.held_bytes is None or self.in_tensors_bytes is None or self.shortage.requested_bytes is None:
            return False
        return self.held_bytes - self.in_tensors_bytes > self.shortage.requested_bytes


def measure_memory(shortage: OomCause, device: torch.device, uuid: str, samples: int, shape: str) -> MemoryAccount:
    """Return the current memory usage. `uuid` identifies the GPU to the driver."""
    accelerator = get_accelerator(device)
    memory, held = accelerator.free_memory(), accelerator.current_memory()
    if shortage.side == "device" and memory is not None and held is not None:
        return MemoryAccount(shortage, samples, shape, *memory, held.reserved, held.allocated, _other_processes(uuid))
    machine = psutil.virtual_memory()
    free, total = int(machine.available), int(machine.total)
    grant = cgroup_memory_limit()
    if grant is not None and grant.amount < total:
        total = int(grant.amount)
        free = min(free, max(0, total - (grant.memory_bytes() or 0)))
    return MemoryAccount(shortage, samples, shape, free, total, int(psutil.Process().memory_info().rss))


def _other_processes(uuid: str) -> tuple[MemoryHolder, ...]:
    with open_driver() as nvml:
        gpu = nvml.find(uuid) if uuid else None
        processes = (nvml.processes(gpu) if gpu is not None else None) or ()
    holders = []
    for process in processes:
        if process.pid != os.getpid():
            name = "a process"
            with suppress(psutil.Error):
                name = psutil.Process(process.pid).name()
            holders.append(MemoryHolder(process.pid, name, process.used_bytes))
    holders.sort(key=lambda holder: holder.held_bytes or 0, reverse=True)
    return tuple(holders[:NUM_OTHERS])


def suggest_settings(plan: Plan, found: MemoryAccount | None, samples: int) -> list[str]:
    """Return settings to change, most effective and least costly first, ready to paste."""
    is_device = found is None or found.shortage.side == "device"
    choices = plan.choices
    lines = []
    if samples > 1:
        lines.append(f"micro_batch_size={halve(samples)} (the update stays the same; automatic with on_oom=retry)")
    if is_device:
        if found is not None and found.others:
            lines.append(f"end other processes on this GPU: {', '.join(map(str, found.others))}")
        if found is not None and found.is_fragmented and not choices["memory"].options.get("allocator"):
            lines.append("memory.allocator=expandable_segments:True (free memory is fragmented)")
        if choices["precision"].uses("fp32", "tf32") and "cuda" in plan.device:
            lines.append("precision=auto (half of the memory for activations)")
        if choices["memory"].uses("none"):
            lines.append("memory=checkpoint (activations are recomputed in the backward pass, about a third slower)")
        if choices["optimizer"].uses("adamw", "adam"):
            lines.append("optimizer=adamw8bit (a quarter of the optimizer state)")
        if not choices["parallelism"].uses("fsdp"):
            lines.append("parallelism=fsdp (with several GPUs: weights, gradients and optimizer state are sharded)")
    else:
        if found is not None and found.shortage.place == "reading":
            lines.append("dataloader.bad_samples=skip (if a single sample is too large)")
        if plan.num_workers:
            loader = "" if "num_workers" in choices["dataloader"].options else "dataloader=default "
            lines.append(f"{loader}dataloader.num_workers=0 (each worker holds batches)")
        if choices["dataloader"].options.get("cache") not in (None, "none"):
            lines.append("dataloader.cache=none")
        if choices["memory"].uses("none") and plan.device == "cpu":
            lines.append("memory=checkpoint (activations are recomputed in the backward pass)")
    lines.append(
        "accel-run plan, with the arguments of this run, lists settings that fit, with predicted memory and time"
    )
    return [*lines, "a smaller model"]


def format_report(
    found: MemoryAccount, model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device
) -> str:
    """Return the full report: summary line, largest tensors by name, and torch's memory table of a GPU."""
    rows = sorted(_all_tensors(model, optimizer), key=lambda row: row[0], reverse=True)
    lines = [found.shortage.text, str(found), f"in {found.shortage.place}", ""]
    lines += [f"{'bytes':>16}  {'where':<8} {'type':<10} {'shape':<24} what"]
    for nbytes, tensor, name in rows[:NUM_LARGEST]:
        dtype = dtype_name(tensor.dtype)
        lines.append(f"{nbytes:>16,}  {tensor.device!s:<8} {dtype:<10} {tuple(tensor.shape)!s:<24} {name}")
    rest = rows[NUM_LARGEST:]
    if rest:
        lines.append(f"{sum(row[0] for row in rest):>16,}  {len(rest)} more")
    lines.append(f"{sum(row[0] for row in rows):>16,}  all tensors that have a name or a Python object")
    if table := get_accelerator(device).memory_table():
        lines += ["", table]
    return "\n".join(lines) + "\n"


def _all_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[int, Tensor, str]]:
    """Yield (bytes, tensor, name), each storage once, named tensors first."""
    seen: set[int] = set()
    for tensor, name in (*_named_tensors(model, optimizer), *_unnamed_tensors()):
        with suppress(Exception):  # a tensor without memory, such as a meta tensor
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            if key and key not in seen:
                seen.add(key)
                yield storage.nbytes(), tensor, name


def _named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[Tensor, str]]:
    names: dict[Tensor, str] = {}
    for name, weight in model.named_parameters():
        names[weight] = name
        yield weight, name
        if weight.grad is not None:
            yield weight.grad, f"gradient of {name}"
    yield from ((buffer, name) for name, buffer in model.named_buffers())
    states: Mapping[Any, Any] = optimizer.state if optimizer is not None else {}
    for owner, state in states.items():  # an optimizer may also keep state under keys that are not parameters
        for key, value in state.items() if isinstance(state, Mapping) else [("state", state)]:
            if isinstance(value, Tensor):
                yield value, f"{key} of {owner if isinstance(owner, str) else names.get(owner, 'a parameter')}"


def _unnamed_tensors() -> Iterator[tuple[Tensor, str]]:
    for value in gc.get_objects():
        if issubclass(type(value), Tensor):  # not isinstance, which may run code of the object
            yield value, "intermediate"
