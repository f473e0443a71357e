"""Where a request is measured: one rank of it, with the plan and the machine, and what its updates consist of."""

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
from runner.tools.measure.compare import Ask, Comparison
from runner.tools.measure.comparison_result import VariantResult
from runner.tools.measure.facts import Facts, device_of


@dataclass(frozen=True)
class MeasuringPlace:
    """Where variants of a request are measured.

    request  what one rank runs of it
    cores    its share of the cores; 0: all
    notes    what a reader must know to trust the results
    """

    comparison: Comparison
    request: Request
    plan: Plan
    inventory: Inventory
    cores: int
    notes: list[str]

    @property
    def phase(self) -> PhasePlan:
        """The phase whose updates are measured. Raises ConfigError if no phase trains."""
        for phase in (*self.plan.selected, *self.plan.phases):
            if phase.kind == "train":
                return phase
        name = f"task={self.plan.choices['task'].name}"
        raise ConfigError(Problem("has no phase that trains, so no updates", name, "use another task="))

    def facts(self, evidence: Evidence, opened: VariantResult, probe: Mapping[str, Any], **monitored: Any) -> Facts:
        """Return what rules and proposals are based on; `monitored`: fields of Facts that a monitor recorded."""
        cpu = self.inventory.cpu
        return Facts(
            evidence=evidence,
            values=opened.opened["values"],
            cpu=dataclasses.replace(cpu, logical_cores=self.cores) if self.cores else cpu,
            gpus=self.inventory.usable,
            gpu=device_of(self.inventory, opened.opened["device"]),
            probe=probe,
            **monitored,
        )


@contextmanager
def measuring(request: Request) -> Iterator[MeasuringPlace]:
    """Plan the request and open the place in which its variants are measured; of several ranks, one is."""
    plan, inventory = run_in_subprocess(planned, compose(request))
    one_rank, cores, notes = of_one_rank(request, plan, inventory)
    with Comparison(one_rank, cores) as comparison:
        yield MeasuringPlace(comparison, one_rank, plan, inventory, cores, notes)


def planned(configuration: Configuration) -> tuple[Plan, Inventory]:
    """Return the plan for this machine, and the machine. It asks torch for devices: call it in a subprocess."""
    inventory = take_inventory()
    return make_plan(configuration, inventory), inventory


def of_one_rank(request: Request, plan: Plan, inventory: Inventory) -> tuple[Request, int, list[str]]:
    """Return the request for one rank's share of an update, its share of the cores (0: all), and a note about it.

    Values of `auto` are those of the ranks: they would differ with a share of the cores.
    """
    if plan.world_size == 1:
        return request, 0, []
    share, here = max(plan.batch.shares), inventory.cpu.logical_cores
    cores = max(1, here // min(plan.world_size, len(inventory.usable) or plan.world_size))
    own = ["parallelism=single", f"global_batch_size={share}"]
    if plan.choices["backend"].options.get("threads") == "auto":
        own.append(f"backend.threads={cores}")
    if "num_workers" in plan.choices["dataloader"].options:
        own.append(f"dataloader.num_workers={plan.choices['dataloader'].options['num_workers']}")
    note = (
        f"measured on one of {plan.world_size} ranks, with its {share} samples of an update on {cores} of {here} cores;"
        " exchange is not measured"
    )
    return dataclasses.replace(request, overrides=merge_overrides(request.overrides, own)), cores, [note]


def inspect(ask: Ask, opened: VariantResult, plan: Plan) -> tuple[Evidence, dict[str, Any]]:
    """Measure updates for a few seconds and inspect the task's code; return the evidence and the inspection."""
    made, num, seconds, parts_s = 0, 1, 0.0, dict[str, float]()
    while seconds < LOOK_S and (made < LEAST or seconds < LOOK_S / 4):
        answer = ask({"do": "run", "updates": num})
        made, seconds = made + num, seconds + answer["seconds"]
        for part, spent in answer["parts_s"].items():
            parts_s[part] = parts_s.get(part, 0.0) + spent
        num = max(1, min(1000, int(made / max(seconds, 1e-3) * LOOK_S / 4)))
    report, there = ask({"do": "report"}), opened.opened
    periods = there["periods"]
    evidence = Evidence(
        task=plan.choices["task"].name,
        device=there["device"],
        device_name=there["device_name"],
        num_threads=there["threads"],
        num_parameters=there["parameters"],
        num_trainable=there["trainable"],
        num_samples=there["num_samples"],
        global_batch_size=there["global_batch_size"],
        micro_batch_size=there["micro_batch_size"],
        accumulation_steps=there["accumulation_steps"],
        epochs=there["epochs"],
        seconds=seconds,
        parts_s=parts_s,
        updates=made,
        num_evaluations=_times(made, periods["evaluation"]),
        num_saves=_times(made, periods["checkpoint"]),
        device_total_gib=report.get("total_gib"),
        device_peak_gib=report.get("peak_device_gib"),
        device_peak_reserved_gib=report.get("reserved_gib"),
        num_alloc_retries=report.get("alloc_retries"),
        host_peak_gib=report.get("peak_host_gib"),
    )
    probe = ask({"do": "probe"})
    evidence = dataclasses.replace(evidence, has_begin_update=probe["has_begin_update"])
    return evidence, {**probe, **{key: there[key] for key in ("trained_layers", "has_batch_norm")}}


def _times(updates: int, period: int | None) -> int | None:
    return updates // period if period else None


def filled(known: Evidence | None, now: Evidence) -> Evidence:
    """Return the evidence of a run, with current measurements for what it lacks.

    The times of its updates are used completely or not at all: not if it ran none, and not if they are of several
    phases, one of which is measured now.
    """
    if known is None:
        return now
    there = {name: value for name, value in vars(known).items() if value is not None and value != {}}
    if known.unfinished:
        there.pop("epochs", None)  # only those until it failed
    several = sum(phase.kind == "train" for phase in known.phases) > 1
    if not known.updates or not known.parts_s or several:
        there = {name: value for name, value in there.items() if name not in _OF_UPDATES}
    return Evidence(**{**vars(now), **there})


_OF_UPDATES = (
    "seconds", "parts_s", "ranks_s", "updates", "step_time_ms", "step_time_low_ms", "step_time_high_ms", "items_per_s",
    "items_per_update", "data_wait", "transfer", "num_saves", "num_evaluations", "num_rows", "num_batch_shapes",
    "num_samples", "epochs", "global_batch_size", "micro_batch_size", "accumulation_steps", "phases",
)  # fmt: skip
LOOK_S = 3.0  # of updates, before anything is tried
LEAST = 20  # updates, unless they take too long
