"""What the person at the terminal sees of a run, and what console.log and events.jsonl keep of it."""

from __future__ import annotations

import math
import shlex
import socket
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from runner.axes.attention import Attention
from runner.base.choice import make
from runner.base.figures import metric_text
from runner.base.order import Order
from runner.base.words import sized_gib
from runner.durable.checkpoint import Loaded
from runner.durable.directory import RunDirectory
from runner.engine.evidence import Evidence
from runner.engine.saving import CHECKPOINTS, SavePolicy, Toll
from runner.observe import limits
from runner.observe.events import Console, Events, level_said
from runner.observe.memory import allocator_notes
from runner.observe.notices import Notice
from runner.observe.progress import Progress, make_progress
from runner.observe.report import (
    EndOfRun,
    Memory,
    StartOfRun,
    Technique,
    end_summary,
    prints_only_ascii,
    start_report,
)
from runner.plan.inventory import Inventory
from runner.plan.plan import Plan, rank_table
from runner.plan.sheet import short

if TYPE_CHECKING:
    from runner.engine.assemble import Parts
    from runner.engine.run import Outcome, PhaseRecord, TrainingRun


class Screen:
    """Progress while a phase runs, words before and after it; a copy of the words in the run directory.

    machine  `rank8`: rank 8 does not speak, but is the first of another machine, of which nobody else can tell
    """

    def __init__(self, directory: RunDirectory, *, speaks: bool = True, machine: str = "") -> None:
        self.directory = directory
        self.speaks = speaks
        self._level = level_said()
        self.console = Console(directory.console, level=self._level, speaks=speaks)
        of_machine = directory.path / f"events-{machine}.jsonl" if machine else None
        self.events = Events(directory.events if speaks else of_machine)
        self._of_machine = Console(level="warning") if machine and not speaks else self.console
        self.progress = Progress()
        self.first_update_is_due = True
        self._has_several = False  # phases, of which each is named where its bar is drawn
        self._due = self.progress.due
        self._ascii = prints_only_ascii(sys.stdout)

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self.console.close()
        self.events.close()

    def say(self, text: str) -> None:
        """Say one line."""
        self.console.info(text)

    def warn(self, text: str) -> None:
        """Say what the user may want to change."""
        self.console.warning(text)
        self.events.record("warning", text=text)

    def warn_once(self, text: str) -> None:
        """Warn, but not twice in the same words."""
        self.console.warn_once(text)

    def event(self, kind: str, **fields: Any) -> None:
        """Keep a row in events.jsonl; a bad sample is also said, once for all of them."""
        self.events.record(kind, **fields)
        if kind == "bad sample":
            self.console.warn_once("unreadable samples are skipped; events.jsonl lists them")

    def tell(self, notices: Iterable[Notice]) -> None:
        """Say what the monitor has seen, and keep it in events.jsonl."""
        for notice in notices:
            where = "" if self._of_machine is self.console else f"{socket.gethostname()}: "
            self._of_machine.say(notice.level, where + notice.text)
            self.events.record("machine", what=notice.kind, text=notice.text, **notice.facts)

    def begin(self, phase: str, done: int, total: int, order: Order) -> None:
        """A phase begins."""
        self.event("phase", phase=phase, update=done, total=total, samples=order.num_samples)
        epochs = total / order.updates_per_epoch
        left = f"{total - done} of {total}" if done else str(total)
        self.say(
            f"{phase}: {left} updates, {order.num_samples:,} samples, batch {order.global_batch_size}"
            f" ({epochs:.2g} epochs)"
        )
        is_terse = self._level not in ("debug", "info")
        draws = self.speaks and (sys.stdout.isatty() or not is_terse)
        self.progress = make_progress(sys.stdout if draws else None)
        if is_terse and self._has_several:
            self.progress.note(phase)
        self.console.speak_through(self.progress.note if draws else None)
        self.progress.start(total, done)
        self._due = self.progress.due

    def first_update(
        self, update: int, seconds: float, attention: Attention, calls: Mapping[tuple[str, str], int]
    ) -> None:
        """The first update of this process is made: say what only it could show."""
        self.first_update_is_due = False
        self.events.record("first update", update=update, unix_s=time.time(), seconds=seconds)
        if calls:
            ran = ", ".join(f"{number} x {kernel} ({kind})" for (kind, kernel), number in calls.items())
            self.say(f"attention kernels used: {ran}")
            if attention.kernels and not any(attention.name in kernel for _, kernel in calls):
                self.warn(
                    f"attention={attention.name} was requested but did not run"
                    + (f": {attention.reason}" if attention.reason else "")
                )
        if seconds > SLOW_START_S:
            self.say(f"the first update took {seconds:.1f} s, including one-time compilation and autotuning")

    def due(self, update: int) -> bool:
        """Tell whether something would be drawn now."""
        return self._due(update)

    def draw(self, update: int, values: Mapping[str, float], monitor: str = "") -> None:
        """Draw the progress with these values."""
        self.progress.update(update, {key: value for key, value in values.items() if not math.isnan(value)}, monitor)

    def evaluated(self, update: int, metrics: Mapping[str, float], empty: Collection[str] = ()) -> None:
        """Print the metrics of an evaluation; `empty` names those that had no items."""
        shown = (f"{name} {metric_text(value) if name in empty else f'{value:.4g}'}" for name, value in metrics.items())
        self.say(f"update {update}: " + "  ".join(shown))

    def end(self) -> None:
        """The phase is over: the terminal is free again."""
        self.progress.finish()
        self.progress = Progress()
        self.console.speak_through(None)

    def report_start(self, plan: Plan, parts: Parts, inventory: Inventory, start: Loaded | None) -> None:
        """Say what the run is made of, before the first update."""
        self._has_several = len(plan.selected) > 1
        weights = list(parts.bare.parameters())
        versions = {
            "torch": torch.__version__, "CUDA": inventory.cuda_version, "cuDNN": inventory.cudnn_version,
            "driver": inventory.driver_version,
        }  # fmt: skip
        text = start_report(
            StartOfRun(
                run_name=self.directory.name,
                task=f"task {plan.choices['task'].name}",
                devices=_devices(plan),
                software={name: str(version) for name, version in versions.items() if version},
                techniques=tuple(_techniques(plan)),
                num_parameters=sum(weight.numel() for weight in weights),
                num_trainable=sum(weight.numel() for weight in weights if weight.requires_grad),
                global_batch_size=plan.batch.global_batch_size,
                micro_batch_size=plan.batch.micro_batch_size,
                accumulation_steps=plan.batch.accumulation_steps,
                world_size=plan.batch.world_size,
                batch_per_rank=() if len(set(plan.batch.shares)) == 1 else plan.batch.shares,
                run_dir=str(self.directory.shown),
                notes=(*plan.notes, *parts.notes, *_saves(plan)),
                phases=tuple(map(str, plan.selected)) if plan.own_keys else (),
                memory=tuple(short(plan.memory)),
            ),
            ascii_only=self._ascii,
        )
        self.say(text)
        if start is None:
            self.events.record("start", update=0)
        else:
            self.events.record("resume", update=start.state["phase_update"], checkpoint=start.path.name)

    def report_end(self, run: TrainingRun, outcome: Outcome, evidence: Evidence) -> None:
        """Say how the run ended, what limited it, and what can be done next."""
        if run.observers.profiler.only:  # nothing was trained that one could go on with
            self.say(f"\n{run.observers.profiler.report or 'nothing was profiled: no update was run'}")
            self.events.record("end", update=outcome.update, stopped_by=outcome.stopped_by)
            return
        plan, total = run.plan, evidence.seconds or 0.0
        last = list(run.records.values())[-1]
        memory = {"host": Memory(evidence.host_peak_gib, total=evidence.host_total_gib)}
        if evidence.device_total_gib is not None:
            memory[plan.device] = Memory(
                evidence.device_peak_gib,
                evidence.device_allocated_gib,
                evidence.device_peak_reserved_gib,
                evidence.device_total_gib,
            )
        tracker, notes = run.observers.tracker.note, []
        if run.observers.profiler.note:
            notes.append(run.observers.profiler.note)
        if run.observers.benchmark.note:
            notes.append(run.observers.benchmark.note)
        if plan.choices["tracker"].name != "none":
            notes.append(tracker)
        if run.num_skipped:
            notes.append(f"{run.num_skipped} updates were skipped because float16 overflowed")
        notes += [_toll(run.toll, total)] if run.toll.num_saves else []
        notes += allocator_notes(evidence.num_alloc_retries, evidence.fragmentation, evidence.device_reserved_gib)
        before, after = run.state_bytes
        if after < before:
            notes.append(f"optimizer state {after / 2**20:.1f} MiB instead of {before / 2**20:.1f} MiB")
        baselines = run.baselines
        others = [f"{name} {value:.4g}" for name, value in baselines.items() if name not in outcome.metrics]
        notes += [f"baselines: {', '.join(others)}"] if others else []
        text = end_summary(
            EndOfRun(
                outcome=f"{'saved' if outcome.is_saved else 'stopped'} ({outcome.stopped_by})"
                if outcome.stopped_by
                else "done",
                update=outcome.update,
                total_updates=last.total,
                total_s=total,
                loss=run.last_row.get("train/loss"),
                metrics=outcome.metrics,
                baselines=baselines,
                parts_s=evidence.parts_s,
                updates_timed=evidence.updates or 0,
                busy_percent=_busy_percent(run),
                items_per_s=evidence.items_per_s,
                item=run.parts.task.item,
                memory=memory,
                places={"run": str(self.directory.shown), "metrics": str(self.directory.shown / "metrics.jsonl")},
                notes=tuple(notes),
                next_commands=tuple(self._next(plan, outcome)),
                phases=tuple(_phase_line(name, record) for name, record in run.records.items())
                if len(run.records) > 1
                else (),
            ),
            ascii_only=self._ascii,
        )
        self.say("\n" + text)
        self.events.record("end", update=outcome.update, stopped_by=outcome.stopped_by)

    def _next(self, plan: Plan, outcome: Outcome) -> list[str]:
        root = (
            "" if plan.settings.output_root == "outputs" else f" output_root={shlex.quote(plan.settings.output_root)}"
        )
        if outcome.stopped_by:
            return [f"accel-run resume run={self.directory.name}{root}   (resumes where it stopped)"]
        return [
            f"accel-run inference run={self.directory.name}{root}",
            f"accel-run status run={self.directory.name}{root}",
        ]


def _phase_line(name: str, record: PhaseRecord) -> str:
    """Return what a phase took, and its last metrics."""
    made = f"{record.updates} of {record.total}" if record.updates < record.total else str(record.updates)
    peak = "" if record.peak_device_gib is None else f", {sized_gib(record.peak_device_gib)} on the GPU"
    share = limits.mostly(record.parts_s, record.seconds)
    spent = f"{record.seconds:.1f} s ({share})" if share else f"{record.seconds:.1f} s"
    metrics = "".join(
        f"  {metric.removeprefix('val/')} {metric_text(value)}" for metric, value in record.metrics.items()
    )
    return f"{name} ({record.kind}): {made} updates, {spent}, {sized_gib(record.peak_host_gib)}{peak}{metrics}"


def _busy_percent(run: TrainingRun) -> dict[str, float]:
    """Return GPU -> percent of the time in which it computed, of those that the run uses and the monitor has seen."""
    if run.parts.world.device.type != "cuda":  # what GPUs did meanwhile is the work of others
        return {}
    metrics = run.observers.monitor.summary().whole.metrics
    return {name.partition("/")[0]: stat.mean for name, stat in metrics.items() if name.endswith("/util")}


def _saves(plan: Plan) -> list[str]:
    return [] if plan.choices["profiler"].options.get("only") else [f"checkpoint interval: {_policy(plan)}"]


def _policy(plan: Plan) -> SavePolicy:
    choice = plan.choices["checkpoint"]
    return make(CHECKPOINTS, choice.function, **choice.options)


def _toll(toll: Toll, total_s: float) -> str:
    """Return the cost of the checkpoints written during the run."""
    share = (toll.held_s + toll.slowed_s) / total_s
    saves = f"{toll.num_saves} checkpoint{'s' * (toll.num_saves > 1)}"
    text = f"{saves} paused training for {toll.held_s:.2f} s in total (overhead {share:.2%})"
    if toll.last is None:
        return text
    size, seconds = toll.last.nbytes / 1e6, toll.last.write_s
    return f"{text}; the last one ({size:,.1f} MB) took {seconds:.2f} s to write"


def _techniques(plan: Plan) -> list[Technique]:
    """Return each technique with what it does here, or why it is off."""
    found = []
    for group, off in _OFF.items():
        choice, reason = plan.choices[group], plan.reason(group)
        detail = ", ".join(f"{key} {_shown(choice.options[key])}" for key in _SHOWN if key in choice.options)
        why = "not requested" if reason == "default" and choice.name in off else reason
        if choice.name in off:
            found.append(Technique(f"{group} {choice.name}" if choice.name != "off" else group, False, why))
        else:
            found.append(Technique(f"{group} {choice.name}", True, f"{detail} ({why})" if detail else why))
    return found


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# group -> the options that mean nothing is gained
_OFF: Mapping[str, tuple[str, ...]] = {
    "precision": ("fp32",),
    "optimizer": (),
    "dataloader": (),
    "attention": (),
    "backend": (),
    "prefetch": ("none",),
    "compile": ("off",),
    "memory": ("none",),
    "tracker": ("none",),
}
_SHOWN = ("kernel", "num_workers", "pin_memory", "init_scale", "level", "cache")
SLOW_START_S = 5.0


def _devices(plan: Plan) -> tuple[str, ...]:
    """Return a line for the device, or for each rank and what it takes of an update."""
    if plan.world_size == 1:
        return (f"{plan.device}: {plan.device_name} — {plan.reason('device')}",)
    return tuple(rank_table(plan))
