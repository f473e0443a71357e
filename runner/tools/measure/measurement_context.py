"""The context in which a request is measured: the request reduced to one rank, the plan, the machine, the evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from runner.base.errors import ConfigError, Problem
from runner.config.configuration import Configuration, compose
from runner.config.request import Request, merge_overrides
from runner.host.subprocesses import run_in_subprocess
from runner.plan.inventory import Inventory, take_inventory
from runner.plan.planner import make_plan
from runner.plan.run_plan import PhasePlan, Plan
from runner.records.evidence import Evidence
from runner.tools.measure.compare import CallFunction, Comparison
from runner.tools.measure.comparison_result import VariantResult
from runner.tools.measure.facts import Facts, find_device


@dataclass(frozen=True)
class MeasurementContext:
    """The comparison of variants of a request, with its plan and the machine.

    request  request that one rank runs
    cores    number of cores of that rank; 0: all
    notes    limits of the measurement, for the user
    """

    comparison: Comparison
    request: Request
    plan: Plan
    inventory: Inventory
    cores: int
    notes: list[str]

    @property
    def phase(self) -> PhasePlan:
        """The phase whose updates are measured. Raises ConfigError if there is no training phase."""
        for phase in (*self.plan.selected, *self.plan.phases):
            if phase.kind == "train":
                return phase
        name = f"task={self.plan.choices['task'].name}"
        raise ConfigError(
            Problem("has no training phase, so there are no updates to measure", name, "use another task=NAME")
        )

    def facts(self, evidence: Evidence, opened: VariantResult, probe: Mapping[str, Any], **monitored: Any) -> Facts:
        """Return the facts for rules and proposals.

        monitored  fields of Facts that a monitor recorded
        """
        cpu = self.inventory.cpu
        return Facts(
            evidence=evidence,
            values=opened.opened["values"],
            cpu=dataclasses.replace(cpu, logical_cores=self.cores) if self.cores else cpu,
            gpus=self.inventory.usable,
            gpu=find_device(self.inventory, opened.opened["device"]),
            probe=probe,
            **monitored,
        )


@contextmanager
def open_context(request: Request) -> Iterator[MeasurementContext]:
    """Plan the request and open its measurement context, reduced to one rank."""
    plan, inventory = run_in_subprocess(plan_on_this_machine, compose(request))
    one_rank, cores, notes = reduce_to_one_rank(request, plan, inventory)
    with Comparison(one_rank, cores) as comparison:
        yield MeasurementContext(comparison, one_rank, plan, inventory, cores, notes)


def plan_on_this_machine(configuration: Configuration) -> tuple[Plan, Inventory]:
    """Return the plan for this machine and its inventory.

    It initializes the devices in torch, so call it in a subprocess.
    """
    inventory = take_inventory()
    return make_plan(configuration, inventory), inventory


def reduce_to_one_rank(request: Request, plan: Plan, inventory: Inventory) -> tuple[Request, int, list[str]]:
    """Return the request for one rank's share of an update, its number of cores (0: all), and a note.

    Settings that are `auto` are fixed to the values that the ranks use, because `auto` would choose others for
    fewer cores.
    """
    if plan.world_size == 1:
        return request, 0, []
    share, all_cores = max(plan.batch.shares), inventory.cpu.logical_cores
    cores = max(1, all_cores // min(plan.world_size, len(inventory.usable) or plan.world_size))
    fixed = ["parallelism=single", f"global_batch_size={share}"]
    if plan.choices["backend"].options.get("threads") == "auto":
        fixed.append(f"backend.threads={cores}")
    loader = plan.choices["dataloader"].options
    fixed += [f"dataloader.{key}={loader[key]}" for key in ("num_workers", "workers_above_ms") if key in loader]
    note = (
        f"measured on one of {plan.world_size} ranks, with its share of {share} samples per update on {cores}"
        f" of {all_cores} cores; communication is not measured"
    )
    return dataclasses.replace(request, overrides=merge_overrides(request.overrides, fixed)), cores, [note]


def measure_evidence(call: CallFunction, opened: VariantResult, plan: Plan) -> tuple[Evidence, dict[str, Any]]:
    """Measure updates for a few seconds and inspect the task's code; return the evidence and the probe."""
    updates, num, seconds, parts_s = 0, 1, 0.0, dict[str, float]()
    while seconds < INSPECTION_S and (updates < MIN_UPDATES or seconds < INSPECTION_S / 4):
        reply = call({"do": "run", "updates": num})
        updates, seconds = updates + num, seconds + reply["seconds"]
        for part, part_s in reply["parts_s"].items():
            parts_s[part] = parts_s.get(part, 0.0) + part_s
        num = max(1, min(1000, int(updates / max(seconds, 1e-3) * INSPECTION_S / 4)))
    report, run = call({"do": "report"}), opened.opened
    periods = run["periods"]
    evidence = Evidence(
        task=plan.choices["task"].name,
        device=run["device"],
        device_name=run["device_name"],
        num_threads=run["threads"],
        num_parameters=run["parameters"],
        num_trainable=run["trainable"],
        num_samples=run["num_samples"],
        global_batch_size=run["global_batch_size"],
        micro_batch_size=run["micro_batch_size"],
        accumulation_steps=run["accumulation_steps"],
        epochs=run["epochs"],
        seconds=seconds,
        parts_s=parts_s,
        updates=updates,
        num_evaluations=_count_events(updates, periods["evaluation"]),
        num_saves=_count_events(updates, periods["checkpoint"]),
        device_total_gib=report.get("total_gib"),
        device_peak_gib=report.get("peak_device_gib"),
        device_peak_reserved_gib=report.get("reserved_gib"),
        host_peak_gib=report.get("peak_host_gib"),
    )
    probe = call({"do": "probe"})
    evidence = dataclasses.replace(evidence, has_begin_update=probe["has_begin_update"])
    return evidence, {**probe, "has_batch_norm": run["has_batch_norm"]}


def _count_events(updates: int, period: int | None) -> int | None:
    return updates // period if period else None


def complete_evidence(recorded: Evidence | None, now: Evidence) -> Evidence:
    """Return the evidence of a run, with current measurements for missing values.

    The recorded measurements of updates are used all together or not at all. They are not used if no update was
    recorded, or if the run has several training phases, of which only one is measured now.
    """
    if recorded is None:
        return now
    values = {name: value for name, value in vars(recorded).items() if value is not None and value != {}}
    if recorded.unfinished:
        values.pop("epochs", None)  # counted only until the failure
    has_several_phases = sum(phase.kind == "train" for phase in recorded.phases) > 1
    if not recorded.updates or not recorded.parts_s or has_several_phases:
        values = {name: value for name, value in values.items() if name not in UPDATE_FIELDS}
    return Evidence(**{**vars(now), **values})


UPDATE_FIELDS = (
    "seconds", "parts_s", "ranks_s", "updates", "step_time_ms", "step_time_low_ms", "step_time_high_ms", "items_per_s",
    "items_per_update", "data_wait", "transfer", "num_saves", "num_evaluations", "num_rows", "num_batch_shapes",
    "num_samples", "epochs", "global_batch_size", "micro_batch_size", "accumulation_steps", "phases",
)  # fmt: skip
INSPECTION_S = 3.0  # maximum seconds of measured updates
MIN_UPDATES = 20  # minimum number of measured updates, unless they take too long
