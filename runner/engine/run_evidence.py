"""Collect the measurements of a run at its end."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from runner.base.accelerator import accelerator_of
from runner.base.stopwatch import PARTS
from runner.base.task import Task
from runner.engine.advice import odd_sizes
from runner.engine.run import TrainingRun
from runner.plan.inventory import Inventory
from runner.records.evidence import Evidence, PhaseEvidence


def evidence_of(run: TrainingRun, inventory: Inventory) -> Evidence:
    """Return the measurements of this process after its phases have ended."""
    plan, parts, tally, parts_s = run.plan, run.parts, run.tally, run.clock.all()
    phases = tuple(_of_phase(run, name) for name in run.records)
    last = phases[-1] if phases else None
    weights = list(parts.bare.parameters())
    updates_s = sum(parts_s.get(part, 0.0) for part in PARTS)
    low, median, high = _spread(tally.step_times_ms)
    device = next((each for each in inventory.devices if each.torch_name == plan.device), None)
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
        num_workers=plan.num_workers,
        num_parameters=sum(weight.numel() for weight in weights),
        num_trainable=sum(weight.numel() for weight in weights if weight.requires_grad),
        **({name: value for name, value in vars(last).items() if name in _OF_LAST} if last else {}),
        seconds=sum(parts_s.values()),
        parts_s=parts_s,
        ranks_s=tuple(
            {part: spent for part, spent in seconds.items() if spent or part in parts_s} for seconds in tally.ranks_s
        ),
        updates=run.clock.updates,
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
        odd_sizes=tuple(odd_sizes(parts.bare, parts.world.device)) if device else None,
        host_peak_gib=max((record.peak_host_gib for record in run.records.values()), default=None),
        host_total_gib=inventory.cpu.memory_bytes / 2**30 if inventory.cpu.memory_bytes else None,
        **_memory(run),
        monitor="monitor.json" if run.observers.monitor.latest() else None,
        phases=phases,
    )


def _of_phase(run: TrainingRun, name: str) -> PhaseEvidence:
    record, planned, num_samples = run.records[name], run.plan.phase(name), run.tally.num_samples.get(name)
    batch = planned.batch if planned else None
    return PhaseEvidence(
        name=name,
        kind=record.kind,
        updates=record.updates,
        seconds=record.seconds,
        parts_s=record.parts_s,
        num_samples=num_samples,
        epochs=record.updates * batch.global_batch_size / num_samples if batch and num_samples else None,
        global_batch_size=batch.global_batch_size if batch else None,
        micro_batch_size=batch.micro_batch_size if batch else None,
        accumulation_steps=batch.accumulation_steps if batch else None,
        peak_host_gib=record.peak_host_gib,
        peak_device_gib=record.peak_device_gib,
    )


def _memory(run: TrainingRun) -> dict[str, Any]:
    """Return the device memory statistics by the field names of `Evidence`; empty for a CPU."""
    accelerator, gib = accelerator_of(run.parts.world.device), 2**30
    held, total, known = accelerator.held(), accelerator.total_bytes(), accelerator.statistics()
    if held is None or total is None:
        return {}
    stuck = known.get("inactive_split_bytes.all.current", 0)
    peaks = [record.peak_device_gib for record in run.records.values() if record.peak_device_gib is not None]
    taken = [record.peak_reserved_gib for record in run.records.values() if record.peak_reserved_gib is not None]
    return {
        "device_total_gib": total / gib,
        "device_allocated_gib": held.allocated / gib,
        "device_reserved_gib": held.reserved / gib,
        "device_peak_gib": max(peaks, default=None),
        "device_peak_reserved_gib": max(taken, default=None),
        "num_alloc_retries": int(known.get("num_alloc_retries", 0)),
        "fragmentation": stuck / held.reserved if held.reserved else None,
    }


def _spread(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return the 10th percentile, the median and the 90th percentile, or None for each without values."""
    if not values:
        return None, None, None
    ordered = sorted(values)
    return ordered[len(ordered) // 10], statistics.median(ordered), ordered[-1 - len(ordered) // 10]


_OF_LAST = ("num_samples", "epochs", "global_batch_size", "micro_batch_size", "accumulation_steps")  # of the last phase
