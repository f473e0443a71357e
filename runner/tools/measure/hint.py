"""The line at the end of a run that recommends `accel-run advise`, if its evidence suggests a gain."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.base.secret import fit_to_show
from runner.durable.record_files import read_record
from runner.engine.job import Job
from runner.plan.inventory import Inventory
from runner.plan.run_plan import Plan
from runner.tools.measure.facts import Facts, device_of, monitored
from runner.tools.measure.rules import RuleFinding, findings

WORTH = 1.15  # possible speedup from which the line is printed
WORTH_S = 1.0  # seconds of this run that could have been saved: milliseconds are no evidence


def hint(job: Job) -> str:
    """Return the line for a finished run; empty if no rule finds a gain, or a file is missing or damaged."""
    with suppress(Exception):
        facts = facts_of(job.folder)
        seen = worth_a_line(facts) if facts else []
        if seen:
            root = job.configuration.settings.output_root
            words = [f"run={job.name}"] if root == "outputs" else [f"run={job.name}", f"output_root={root}"]
            return fit_to_show(f"{seen[0].evidence}\ntry          accel-run advise {shlex.join(words)}")
    return ""


def worth_a_line(facts: Facts) -> list[RuleFinding]:
    """Return the findings that could have saved a noticeable part of the run."""
    seconds = facts.seconds() or 0.0
    return [
        finding
        for finding in findings(facts)
        if (most := finding.at_most or 1.0) >= WORTH and seconds * (1 - 1 / most) >= WORTH_S
    ]


def facts_of(run_dir: Path) -> Facts | None:
    """Return the facts of a finished run; None if it has no evidence."""
    evidence = read_record(run_dir).evidence
    if evidence is None:
        return None
    plan = Plan.from_json((run_dir / "plan.json").read_text(encoding="utf-8"))
    environment: dict[str, Any] = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))
    inventory = Inventory.from_json(json.dumps(environment["inventory"]))
    means, throttled = monitored(run_dir)
    gpu = device_of(inventory, evidence.device)
    return Facts(evidence, plan.values(), inventory.cpu, inventory.usable, gpu, {}, means, throttled)
