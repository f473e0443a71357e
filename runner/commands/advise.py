"""`accel-run advise`: find settings that make a run faster, verified by measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from runner.base.secret import sanitize
from runner.base.text import format_table, wrap_for_terminal
from runner.commands.arguments import JSON, parse_budget, parse_command_keys, parse_run_request, progress_printer
from runner.config.configuration import compose
from runner.config.request import Request

if TYPE_CHECKING:
    from runner.tools.measure.advisor import Advice, AdviceInputs, Entry

HELP = """usage: accel-run advise [run=last|NAME|DIR] [key=value ...] [budget_s=120] [--json]

Finds the bottleneck of a finished run, or of a task that is not trained yet, and tries settings that may help. Each
candidate trains in a separate process, interleaved with the current settings. Only settings that were clearly faster
are recommended, with the measured gain and its interval: `tried: +34 % [31, 37]`. The run itself is not changed. To
search all settings and to save the fastest as a hardware profile, use accel-run tune.

  run=last|NAME|DIR   a finished run: uses its measurements and settings; key=value overrides its settings
  task=NAME, ...      without a run: settings as for train; starts with a short measurement
  budget_s=120        approximate total time in seconds
  --json              print everything as JSON

examples
  accel-run advise
  accel-run advise run=first budget_s=300
  accel-run advise --task ./my_task.py global_batch_size=64
"""


COMMAND_KEYS = {"budget_s": "120"}


def run(argv: list[str]) -> int:
    from runner.tools.measure.advisor import AdviceInputs, advise, as_json

    keys, rest, is_json = parse_command_keys(argv, COMMAND_KEYS, JSON)
    budget_s = parse_budget(keys["budget_s"], COMMAND_KEYS["budget_s"])
    request = parse_run_request(rest, (*keys, JSON))
    is_run_named = any(arg.startswith("run=") for arg in request.overrides)
    uses_run = is_run_named or not (request.overrides or request.task_file)
    measured_request, inputs, notes = _load_run_request(request) if uses_run else (request, AdviceInputs(), ())
    compose(measured_request)  # report invalid settings before measuring
    advice = advise(measured_request, inputs, budget_s, progress_printer("advise"))
    advice = replace(advice, notes=(*notes, *advice.notes))
    text = (
        json.dumps(as_json(advice), indent=2)
        if is_json
        else wrap_for_terminal(sanitize("\n".join(format_advice(advice))))
    )
    print(text, flush=True)
    return 0


def _load_run_request(request: Request) -> tuple[Request, AdviceInputs, tuple[str, ...]]:
    from runner.durable.record_files import read_record
    from runner.durable.run_request import find_run, load_run_request
    from runner.tools.measure.advisor import AdviceInputs
    from runner.tools.measure.facts import read_monitor_summary

    directory, root = find_run(request, progress_printer("advise"))
    overrides = tuple(arg for arg in request.overrides if not arg.startswith(("run=", "output_root=")))
    origin = load_run_request(directory, root, request)
    merged = origin.request(replace(request, overrides=overrides), without=("run", "resume", "output_root"))
    evidence = read_record(directory.path).evidence
    if overrides:  # the run was measured with other settings
        return merged, AdviceInputs(), (f"run {directory.name} with {' '.join(overrides)}: measured again",)
    if evidence is None:
        return merged, AdviceInputs(), (f"run {directory.name} has no measurements, so it is measured now",)
    train_phases = [phase for phase in evidence.phases if phase.kind == "train"]
    longest = max(train_phases, key=lambda phase: phase.seconds or 0.0, default=None)
    notes = (f"run {directory.name} failed: its measurements up to that point are used",) if evidence.unfinished else ()
    return (
        merged,
        AdviceInputs(evidence, *read_monitor_summary(directory.path), longest.name if longest else None),
        notes,
    )


def format_advice(advice: Advice) -> list[str]:
    lines = [f"{advice.task} on {advice.device_name}: an update takes {advice.update_ms:.4g} ms", ""]
    if advice.entries:
        lines.append("advice, largest gain first")
        for number, entry in enumerate(advice.entries, 1):
            lines += [f"  {number}. {_format_entry(entry)}", f"     {entry.finding.evidence}"]
    if not advice.advised:
        lines.append(f"{'' if advice.entries else 'no advice: '}none of the settings tried is clearly faster")
    rejected = [tried for tried in advice.tried if tried not in advice.advised]
    if rejected:
        rows = [(tried.candidate.name, tried.outcome.reason) for tried in rejected]
        lines += ["", "tried, not recommended", *format_table(rows, indent="  ")]
    return [*lines, *([""] if advice.notes else []), *(f"note: {note}" for note in advice.notes)]


def _format_entry(entry: Entry) -> str:
    if entry.tried is not None:
        return f"{entry.what}   tried: {entry.tried.outcome.summary}"
    gain_percent = 100 * ((entry.gain or 1.0) - 1)
    predicted = f"   predicted: at most {gain_percent:+.0f} %" if gain_percent > 0.5 else ""
    return f"manual change: {entry.what}{predicted}"
