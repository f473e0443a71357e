"""Print the reports at the start and at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from runner.base.task import Task
from runner.base.text import format_bytes, format_gib, format_metric
from runner.config.configuration import Choice
from runner.config.phases import INFERENCE
from runner.console import bottleneck
from runner.console.run_summary import (
    EndOfRun,
    LearnedMetrics,
    MemoryLine,
    OptionLine,
    StartOfRun,
    TimeSpent,
    format_end,
    format_start,
    select_metrics,
)
from runner.durable.checkpoint import LoadedCheckpoint
from runner.durable.checkpoint_choice import BEST, LAST, label_checkpoints
from runner.engine.checks.batch_dependence import describe_dependence
from runner.engine.mirroring import checkpoint_policy
from runner.engine.parts.assemble import Parts
from runner.engine.process.run_screen import Screen
from runner.engine.run import Outcome, TrainingRun
from runner.engine.update.objectives import parse_objectives
from runner.plan.inventory import Inventory
from runner.plan.prediction_text import summarize_memory
from runner.plan.run_plan import Plan, format_rank_table
from runner.profiling.peak_memory import allocator_notes
from runner.records.evidence import Evidence
from runner.records.phase_record import PhaseRecord


def report_start(
    screen: Screen, plan: Plan, parts: Parts, inventory: Inventory, start: LoadedCheckpoint | None
) -> None:
    """Print the configuration of the run before the first update."""
    screen.has_several_phases = len(plan.selected) > 1
    weights = list(parts.bare.parameters())
    versions = {
        "torch": torch.__version__, "CUDA": inventory.cuda_version, "cuDNN": inventory.cudnn_version,
        "driver": inventory.driver_version,
    }  # fmt: skip
    text = format_start(
        StartOfRun(
            run_name=screen.directory.name,
            task=f"task {plan.choices['task'].name}",
            devices=_devices(plan),
            software={name: str(version) for name, version in versions.items() if version},
            options=tuple(_describe_options(plan, parts.task)),
            num_parameters=sum(weight.numel() for weight in weights),
            num_trainable=sum(weight.numel() for weight in weights if weight.requires_grad),
            batch=plan.batch,
            run_dir=str(screen.directory.shown),
            training=tuple(_describe_training(plan, parts.task)),
            notes=(*plan.notes, *parts.notes, *_dependence_notes(plan, parts), *_checkpoint_notes(plan)),
            phases=tuple(map(str, plan.selected)) if plan.phase_keys else (),
            memory=tuple(summarize_memory(plan.memory)),
        ),
    )
    screen.info(text)
    if start is None:
        screen.events.record("start", update=0)
    else:
        screen.events.record("resume", update=start.state["phase_update"], checkpoint=start.path.name)


def report_end(screen: Screen, run: TrainingRun, outcome: Outcome, evidence: Evidence, *, runs_inference: bool) -> None:
    """Print how the run ended, its bottleneck and the possible next steps.

    runs_inference  the command also runs inference, unless training is stopped
    """
    if run.observers.profiler.only:  # a run that only profiles cannot be resumed
        screen.info(f"\n{run.observers.profiler.report or 'nothing was profiled: the run ended too early'}")
        screen.events.record("end", update=outcome.update, stopped_by=outcome.stopped_by)
        return
    plan, task, total = run.plan, run.parts.task, evidence.seconds or 0.0
    last = list(run.progress.records.values())[-1]
    memory = {evidence.host_label: MemoryLine(evidence.host_peak_gib, total=evidence.host_total_gib)}
    if evidence.device_total_gib is not None:
        memory[plan.device] = MemoryLine(
            evidence.device_peak_gib,
            evidence.device_allocated_gib,
            evidence.device_peak_reserved_gib,
            evidence.device_total_gib,
        )
    notes = []
    if run.observers.profiler.note:
        notes.append(run.observers.profiler.note)
    if not plan.choices["tracker"].uses("none"):
        notes.append(run.observers.tracker.note)
    if run.num_skipped:
        steps = "1 optimizer step was" if run.num_skipped == 1 else f"{run.num_skipped} optimizer steps were"
        notes.append(f"{steps} skipped because float16 overflowed")
    notes += [run.save_cost.summary(total)] if run.save_cost.num_saves else []
    notes += allocator_notes(evidence.num_alloc_retries, evidence.fragmentation, evidence.device_reserved_gib)
    notes += state_note(*run.tally.state_bytes)
    notes += _best_note(screen.directory.checkpoints)
    text = format_end(
        EndOfRun(
            outcome=f"{'saved' if outcome.is_saved else 'stopped'} ({outcome.stopped_by})"
            if outcome.stopped_by
            else "finished",
            update=outcome.update,
            total_updates=last.total,
            time=TimeSpent(
                total,
                evidence.parts_s,
                evidence.updates or 0,
                _busy_percent(run),
                run.tally.clock.num_updates,
                run.tally.load.describe(),
            ),
            learned=LearnedMetrics(
                run.tally.last_row.get("train/loss"),
                outcome.metrics,
                run.baselines,
                task.baseline_name,
                _deciding_metrics(plan, list(run.progress.records)[-1]),
            ),
            items_per_s=evidence.items_per_s,
            item=task.item,
            memory=memory,
            places={"run": str(screen.directory.shown), "metrics": str(screen.directory.shown / "metrics.jsonl")},
            notes=tuple(notes),
            next_commands=tuple(_next_commands(screen, plan, outcome, task, runs_inference=runs_inference)),
            phases=tuple(
                _phase_line(name, record, _deciding_metrics(plan, name))
                for name, record in run.progress.records.items()
            )
            if len(run.progress.records) > 1
            else (),
        ),
    )
    screen.info("\n" + text)
    screen.events.record("end", update=outcome.update, stopped_by=outcome.stopped_by)


def state_note(expected: int, actual: int) -> list[str]:
    """Return a note if the optimizer state has fewer bytes than expected, and the rounded sizes differ."""
    texts = format_bytes(actual), format_bytes(expected)
    return (
        [f"optimizer state: {texts[0]}, instead of {texts[1]} in the precision of the parameters"]
        if actual < expected and texts[0] != texts[1]
        else []
    )


def _best_note(checkpoints: Path) -> list[str]:
    """Return a note on the best checkpoint if it is not the last one, whose metrics the report shows."""
    return [
        f"best checkpoint: {name} ({labels[-1]}); inference, evaluate and export use it"
        for name, labels in label_checkpoints([*checkpoints.glob("update-*")]).items()
        if BEST in labels and LAST not in labels
    ]


def _next_commands(screen: Screen, plan: Plan, outcome: Outcome, task: Task, *, runs_inference: bool) -> list[str]:
    run = screen.directory.argument(plan.settings.output_root)
    if outcome.stopped_by:
        resumed = f"accel-run resume {run}   (resumes where it stopped)"
        # `resume` trains only, unless the run's own settings select inference.
        is_left = runs_inference and INFERENCE not in (plan.settings.phases or ())
        return [resumed, *([f"accel-run inference {run}   (afterwards)"] if is_left else [])]
    commands = ["inference"] if task.predicts else []
    return [f"accel-run {command} {run}" for command in [*commands, "report"]]


def _deciding_metrics(plan: Plan, phase: str) -> tuple[str, ...]:
    planned = plan.phase(phase)
    return planned.deciding_metrics if planned else ()  # the task may no longer have a phase that ran earlier


def _phase_line(name: str, record: PhaseRecord, first: tuple[str, ...]) -> str:
    updates = f"{record.updates} of {record.total}" if record.updates < record.total else str(record.updates)
    peak = "" if record.peak_device_gib is None else f", {format_gib(record.peak_device_gib)} on the GPU"
    share = bottleneck.summarize_shares(record.parts_s, record.seconds)
    spent = f"{record.seconds:.1f} s ({share})" if share else f"{record.seconds:.1f} s"
    shown, notes = select_metrics(record.metrics, first)
    texts = [f"{metric.removeprefix('val/')} {format_metric(record.metrics[metric])}" for metric in shown]
    metrics = "".join(f"  {text}" for text in [*texts, *notes])
    memory = f"peak {format_gib(record.peak_host_gib)} on the host{peak}"
    return f"{name} ({record.kind}): {updates} updates, {spent}, {memory}{metrics}"


def _busy_percent(run: TrainingRun) -> dict[str, float]:
    """Return GPU -> utilization percent, for the monitored GPUs that the run uses."""
    if run.parts.world.device.type != "cuda":  # any load on the GPUs comes from other processes
        return {}
    metrics = run.observers.monitor.summary().whole.metrics
    return {name.partition("/")[0]: stat.mean for name, stat in metrics.items() if name.endswith("/util")}


def _dependence_notes(plan: Plan, parts: Parts) -> list[str]:
    if all(phase.kind != "train" for phase in plan.selected):
        return []
    is_sync_norm = plan.choices["parallelism"].options.get("batch_norm") == "sync"
    note = describe_dependence(parts.bare, plan.batch, is_sync_norm=is_sync_norm)
    return [note] if note else []


def _checkpoint_notes(plan: Plan) -> list[str]:
    if plan.choices["profiler"].options.get("only"):
        return []
    policy = checkpoint_policy(plan)
    lines = [f"checkpoint interval: {policy}"]
    if policy.mirror is not None:
        lines.append(
            f"checkpoints are copied to {policy.mirror}; at its end, the run waits up to {policy.mirror_wait_s:g} s for"
            " the copies"
        )
    return lines


def _describe_options(plan: Plan, task: Task) -> list[OptionLine]:
    """Return a line per option; the optimizer of the run is omitted if no objective uses it."""
    phases = [parse_objectives(task, phase) for phase in plan.selected if phase.kind == "train"]
    optimizers = {spec.optimizer.name for specs in phases for spec in specs}
    is_unused = optimizers and all(phases) and plan.choices["optimizer"].name not in optimizers
    lines = []
    for group, off in _OFF_OPTIONS.items():
        if group == "optimizer" and is_unused:
            continue
        choice, reason = plan.choices[group], plan.reason(group)
        detail = ", ".join(f"{key} {_format_value(choice.options[key])}" for key in _KEYS if key in choice.options)
        why = "not requested" if reason == "default" and choice.name in off else reason
        if choice.name in off:
            lines.append(OptionLine(f"{group} {choice.name}" if choice.name != "off" else group, False, why))
        else:
            lines.append(OptionLine(f"{group} {choice.name}", True, "" if why == "default" else why, detail))
    return lines


def _describe_training(plan: Plan, task: Task) -> Iterator[str]:
    """Yield a line for each phase, or each of its objectives: optimizer, schedule, gradient clipping, techniques."""
    phases = [phase for phase in plan.selected if phase.kind == "train"]
    shared = "".join(
        f"; {group} {_describe_choice(plan.choices[group])}"
        for group in ("averaging", "adapter", "sharpness")
        if plan.choices[group].name != "none"
    )
    for phase in phases:
        owner = f"{phase.name}: " if len(phases) > 1 else ""
        for part in parse_objectives(task, phase) or (phase,):
            name = owner if part is phase else f"{owner}{part.name}: "
            clipping = "" if part.max_grad_norm is None else f"; max_grad_norm {part.max_grad_norm:g}"
            yield f"{name}{_describe_choice(part.optimizer)}; {_describe_choice(part.scheduler)}{clipping}{shared}"


def _describe_choice(choice: Choice) -> str:
    """Return the name of an optimizer or schedule with its settings, except kernel settings and those that are off."""
    settings = {key: value for key, value in choice.options.items() if key not in _KERNEL_KEYS and value}
    return ", ".join([choice.name, *(f"{key} {_format_value(value)}" for key, value in settings.items())])


def _format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# group -> options that turn it off
_OFF_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "precision": (),
    "optimizer": (),
    "dataloader": (),
    "attention": (),
    "backend": ("default",),
    "prefetch": ("none",),
    "compile": ("off",),
    "memory": ("none",),
    "tracker": ("none",),
}
_KERNEL_KEYS = ("kernel", "eps")  # they affect an update only by rounding
_KEYS = ("kernel", "num_workers", "pin_memory", "init_scale", "level", "cache")


def _devices(plan: Plan) -> tuple[str, ...]:
    """Return a line for the device, or for each rank with its share of an update."""
    if plan.world_size == 1:
        return (f"{plan.device}: {plan.device_name} — {plan.reason('device')}",)
    return tuple(format_rank_table(plan))
