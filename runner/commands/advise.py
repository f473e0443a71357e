"""`accel-run advise`: find settings that make a run faster, verified by measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from runner.base.secret import sanitize
from runner.base.text import format_table, wrap_for_terminal
from runner.commands.arguments import budget, own_arguments, read_of_a_run, teller
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


OWN = {"budget_s": "120"}


def run(argv: list[str]) -> int:
    """Print the advice."""
    from runner.tools.measure.advisor import AdviceInputs, advise, as_json

    own, rest, is_json = own_arguments(argv, OWN)
    budget_s = budget(own["budget_s"], OWN["budget_s"])
    given = read_of_a_run(rest, own)
    names_a_run = any(arg.startswith("run=") for arg in given.overrides)
    is_of_a_run = names_a_run or not (given.overrides or given.task_file)
    request, recorded, notes = _of_run(given) if is_of_a_run else (given, AdviceInputs(), ())
    compose(request)  # report invalid settings before measuring
    found = advise(request, recorded, budget_s, teller("advise"))
    found = replace(found, notes=(*notes, *found.notes))
    text = json.dumps(as_json(found), indent=2) if is_json else wrap_for_terminal(sanitize("\n".join(screen(found))))
    print(text, flush=True)
    return 0


def _of_run(given: Request) -> tuple[Request, AdviceInputs, tuple[str, ...]]:
    """Return the settings of a run with the given overrides, and its own measurements."""
    from runner.durable.record_files import read_record
    from runner.durable.run_request import find_run, origin_of
    from runner.tools.measure.advisor import AdviceInputs
    from runner.tools.measure.facts import monitored

    directory, root = find_run(given, teller("advise"))
    own = tuple(arg for arg in given.overrides if not arg.startswith(("run=", "output_root=")))
    origin = origin_of(directory, root, given)
    request = origin.request(replace(given, overrides=own), without=("run", "resume", "output_root"))
    evidence = read_record(directory.path).evidence
    if own:  # the run was measured with other settings
        return request, AdviceInputs(), (f"run {directory.name} with {' '.join(own)}: measured again",)
    if evidence is None:
        return request, AdviceInputs(), (f"run {directory.name} has no measurements: measured now",)
    trained = [phase for phase in evidence.phases if phase.kind == "train"]
    longest = max(trained, key=lambda phase: phase.seconds or 0.0, default=None)
    notes = (f"run {directory.name} failed: its measurements up to that point are used",) if evidence.unfinished else ()
    return request, AdviceInputs(evidence, *monitored(directory.path), longest.name if longest else None), notes


def screen(advice: Advice) -> list[str]:
    """Return the lines to print."""
    lines = [f"{advice.task} on {advice.device_name}: an update takes {advice.update_ms:.4g} ms", ""]
    if advice.entries:
        lines.append("advice, largest gain first")
        for number, entry in enumerate(advice.entries, 1):
            lines += [f"  {number}. {_advice(entry)}", f"     {entry.finding.evidence}"]
    if not advice.advised:
        lines.append(f"{'' if advice.entries else 'advice: nothing; '}no setting that was tried is clearly faster")
    others = [each for each in advice.tried if each not in advice.advised]
    if others:
        rows = [(each.candidate.name, each.outcome.reason) for each in others]
        lines += ["", "tried, not recommended", *format_table(rows, indent="  ")]
    return [*lines, *([""] if advice.notes else []), *(f"note: {note}" for note in advice.notes)]


def _advice(entry: Entry) -> str:
    if entry.tried is not None:
        return f"{entry.what}   tried: {entry.tried.outcome.summary}"
    more = 100 * ((entry.gain or 1.0) - 1)
    predicted = f"   predicted: at most {more:+.0f} %" if more > 0.5 else ""
    return f"manual change: {entry.what}{predicted}"
