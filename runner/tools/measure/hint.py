"""One line at the end of a run that points to advice, where its evidence says that there is some to be had."""

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

WORTH = 1.15  # times as fast, at most: below that nobody's time is saved by reading another line
WORTH_S = 1.0  # of this run that could have been saved, at most: what takes milliseconds is no evidence


def hint(job: Job) -> str:
    """Return the line on what was just trained, empty where no rule sees a gain in what it has measured.

    It reads a few files and computes nothing; whatever is wrong with them, it is silent.
    """
    with suppress(Exception):
        facts = facts_of(job.folder)
        seen = worth_a_line(facts) if facts else []
        if seen:
            root = job.configuration.settings.output_root
            words = [f"run={job.name}"] if root == "outputs" else [f"run={job.name}", f"output_root={root}"]
            return fit_to_show(f"{seen[0].evidence}\ntry          accel-run advise {shlex.join(words)}")
    return ""


def worth_a_line(facts: Facts) -> list[RuleFinding]:
    """Return the findings that could have saved a noticeable part of the run, and seconds of it."""
    seconds = facts.seconds() or 0.0
    return [
        finding
        for finding in findings(facts)
        if (most := finding.at_most or 1.0) >= WORTH and seconds * (1 - 1 / most) >= WORTH_S
    ]


def facts_of(run_dir: Path) -> Facts | None:
    """Return what a finished run has left; None where it has no evidence."""
    evidence = read_record(run_dir).evidence
    if evidence is None:
        return None
    plan = Plan.from_json((run_dir / "plan.json").read_text(encoding="utf-8"))
    environment: dict[str, Any] = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))
    inventory = Inventory.from_json(json.dumps(environment["inventory"]))
    means, throttled = monitored(run_dir)
    gpu = device_of(inventory, evidence.device)
    return Facts(evidence, plan.values(), inventory.cpu, inventory.usable, gpu, {}, means, throttled)
