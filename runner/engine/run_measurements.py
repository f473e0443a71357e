"""Collect the measurements of a run after its phases have ended."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from runner.base.accelerator import get_accelerator
from runner.base.stopwatch import PARTS
from runner.base.task import Task
from runner.engine.parts.assemble import find_odd_sizes
from runner.engine.run import TrainingRun
from runner.plan.inventory import Inventory
from runner.records.evidence import Evidence, MemoryEvidence

GIB = 2**30


def collect_evidence(run: TrainingRun, inventory: Inventory) -> Evidence:
    """Return the measurements of this process after its phases have ended."""
    plan, parts, tally, parts_s = run.plan, run.parts, run.tally, run.tally.clock.all()
    phases = tuple(run.progress.records.values())
    weights = list(parts.bare.parameters())
    updates_s = sum(parts_s.get(part, 0.0) for part in PARTS)
    low, median, high = _spread(tally.step_times_ms)
    device = next((device for device in inventory.devices if device.torch_name == plan.device), None)
    return Evidence(
        task=plan.choices["task"].name,
        device=plan.device,
        device_name=plan.device_name or None,
        capability=device.capability if device else None,
        choices={group: choice.name for group, choice in plan.choices.items()},
        precision=plan.choices["precision"].name,
        world_size=plan.world_size,
        num_cores=inventory.cpu.logical_cores,
        num_threads=torch.get_num_threads(),
        num_workers=plan.num_workers if tally.num_workers is None else tally.num_workers,
        num_parameters=sum(weight.numel() for weight in weights),
        num_trainable=sum(weight.numel() for weight in weights if weight.requires_grad),
        **(vars(phases[-1].samples) if phases else {}),
        seconds=sum(parts_s.values()),
        parts_s=parts_s,
        ranks_s=tuple(
            {part: spent for part, spent in seconds.items() if spent or part in parts_s} for seconds in tally.ranks_s
        ),
        updates=tally.clock.updates,
        step_time_ms=median,
        step_time_low_ms=low,
        step_time_high_ms=high,
        items_per_s=tally.timed.throughput,
        items_per_update=tally.items_per_update,
        data_wait=parts_s.get("data", 0.0) / updates_s if updates_s else None,
        transfer=parts_s["transfer"] / updates_s if updates_s and "transfer" in parts_s else None,
        num_saves=tally.num_saves,
        num_evaluations=tally.num_evaluations,
        num_rows=tally.num_rows,
        num_batch_shapes=len(tally.batch_shapes) or None,
        has_begin_update=type(parts.task).begin_update is not Task.begin_update,
        odd_sizes=tuple(find_odd_sizes(parts.bare, parts.world.device)) if device else None,
        **vars(_memory(run, inventory)),
        monitor="monitor.json" if run.observers.monitor.latest() else None,
        phases=phases,
    )


def _memory(run: TrainingRun, inventory: Inventory) -> MemoryEvidence:
    peaks_gib, total = run.tally.peaks_gib, inventory.cpu.memory_bytes
    host = MemoryEvidence(
        host_peak_gib=peaks_gib.get("host"),
        host_total_gib=total / GIB if total else None,
    )
    accelerator = get_accelerator(run.parts.world.device)
    in_use, device_bytes, counts = accelerator.current_memory(), accelerator.total_bytes(), accelerator.memory_stats()
    if in_use is None or device_bytes is None:  # a CPU
        return host
    inactive_bytes = counts.get("inactive_split_bytes.all.current", 0)
    return replace(
        host,
        device_total_gib=device_bytes / GIB,
        device_allocated_gib=in_use.allocated / GIB,
        device_reserved_gib=in_use.reserved / GIB,
        device_peak_gib=peaks_gib.get("device"),
        device_peak_reserved_gib=peaks_gib.get("reserved"),
        num_alloc_retries=int(counts.get("num_alloc_retries", 0)),
        fragmentation=inactive_bytes / in_use.reserved if in_use.reserved else None,
    )


def _spread(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    if not values:
        return None, None, None
    ordered = sorted(values)
    return ordered[len(ordered) // 10], statistics.median(ordered), ordered[-1 - len(ordered) // 10]
