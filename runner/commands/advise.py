"""`accel-run advise`: find settings that make a run faster, verified by measurement."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.base.secret import fit_to_show
from runner.base.text import aligned, for_terminal
from runner.commands.arguments import budget, own_arguments, read_of_a_run, teller
from runner.config.configuration import compose
from runner.config.request import Request

if TYPE_CHECKING:
    from runner.tools.measure.advisor import Advice, AdviceInputs, Entry

HELP = """usage: accel-run advise [run=last|NAME|DIR] [key=value ...] [budget_s=120] [apply=true] [--json]

Finds the bottleneck of a finished run, or of a task that is not trained yet, and tries settings that may help. Each
candidate trains in a separate process, interleaved with the current settings. Only settings that were clearly faster
are recommended, with the measured gain and its interval: `tried: +34 % [31, 37]`. The run itself is not changed.

  run=last|NAME|DIR   a finished run: uses its measurements and settings; key=value overrides its settings
  task=NAME, ...      without a run: settings as for train; starts with a short measurement
  budget_s=120        approximate total time in seconds
  apply=true          write the recommended settings as a hardware profile; settings that change results are left out
  profile=NAME        name of that profile (default: the task's name and _advised)
  --json              print everything as JSON

examples
  accel-run advise
  accel-run advise run=first budget_s=300
  accel-run advise --task ./my_task.py global_batch_size=64
  accel-run advise task=gpt apply=true
"""


OWN = {"budget_s": "120", "apply": "false", "profile": ""}


def run(words: list[str]) -> int:
    """Print the advice."""
    from runner.tools.measure.advisor import advise, as_json, profile_of
    from runner.tools.measure.hardware_profile import check_profile, write_profile

    wish = _wish(words)
    if wish.applies:
        check_profile(wish.request, wish.profile or f"{compose(wish.request).choices['task'].name}_advised")
    advice = advise(wish.request, wish.run, wish.budget_s, teller("advise"))
    notes = [*wish.notes, *advice.notes]
    chosen = advice.to_apply
    if not wish.as_json:  # before writing: measurements must not be lost if writing fails
        print(for_terminal(fit_to_show("\n".join(screen(replace(advice, notes=tuple(notes)))))), flush=True)
    written, refused = None, None
    if wish.applies and chosen is not None:
        try:
            name = wish.profile or f"{advice.task}_advised"
            written = write_profile(profile_of(advice, chosen), wish.request, name)
        except AccelRunError as error:
            refused = error
    if wish.as_json:
        profile = None if written is None else {"file": str(written[0]), "command": written[1]}
        print(json.dumps(as_json(advice) | {"profile": profile, "notes": notes}, indent=2), flush=True)
    if refused is not None:
        raise refused
    if wish.as_json:
        return 0
    if written is not None:
        print(f"\nwritten      {written[0]}\nnext         {fit_to_show(written[1])}")
    elif wish.applies:
        print("\nno profile written: no setting was clearly faster")
    elif chosen is not None:
        print(
            f"\nnext         accel-run advise {fit_to_show(shlex.join(words))} apply=true".replace("  apply", " apply")
        )
    return 0


@dataclass(frozen=True)
class _Wish:
    """The parsed arguments."""

    request: Request
    run: AdviceInputs
    budget_s: float
    applies: bool
    profile: str | None
    as_json: bool
    notes: tuple[str, ...]


def _wish(words: list[str]) -> _Wish:
    """Parse the arguments. Raises ConfigError, and InputMissing if the run does not exist."""
    from runner.tools.measure.advisor import AdviceInputs

    own, rest, as_json = own_arguments(words, OWN)
    budget_s, problems = 0.0, list[Problem]()
    try:
        budget_s = budget(own["budget_s"], OWN["budget_s"])
    except ConfigError as error:
        problems += error.problems
    if own["apply"].lower() not in ("true", "false"):
        problems.append(Problem("must be true or false", f"apply={own['apply']}", "use apply=true"))
    if problems:
        raise ConfigError(problems)
    given = read_of_a_run(rest, own)
    names_a_run = any(word.startswith("run=") for word in given.overrides)
    is_of_a_run = names_a_run or not (given.overrides or given.task_file)
    request, recorded, notes = _of_run(given) if is_of_a_run else (given, AdviceInputs(), ())
    return _Wish(request, recorded, budget_s, own["apply"].lower() == "true", own["profile"] or None, as_json, notes)


def _of_run(given: Request) -> tuple[Request, AdviceInputs, tuple[str, ...]]:
    """Return the settings of a run with the given overrides, and its own measurements."""
    from runner.durable.record_files import read_record
    from runner.durable.run_request import find_run, origin_of
    from runner.tools.measure.advisor import AdviceInputs
    from runner.tools.measure.facts import monitored

    directory, root = find_run(given, teller("advise"))
    own = tuple(word for word in given.overrides if not word.startswith(("run=", "output_root=")))
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
    together = advice.trials.together
    if together is not None and together.outcome.ratio is not None:
        lines += ["", f"  together: {together.candidate.name}   tried: {together.outcome.summary}"]
    others = [each for each in advice.trials.tried if each not in advice.advised]
    if others:
        rows = [(each.candidate.name, each.outcome.reason) for each in others]
        lines += ["", "tried, not recommended", *aligned(rows, indent="  ")]
    lines += ["", *_criteria(advice)]
    lines += ["", "quick checks"]
    for check in advice.checks:
        fine = "unknown" if check.fine is None else "ok" if check.fine else "look"
        lines.append(f"  {fine:<9}  {check.name} {check.value}, expected {check.expected}")
    lines += ["", *(f"note: {note}" for note in advice.notes)] if advice.notes else []
    return lines


def _advice(entry: Entry) -> str:
    if entry.tried is not None:
        return f"{entry.what}   tried: {entry.tried.outcome.summary}"
    more = 100 * ((entry.gain or 1.0) - 1)
    predicted = f"   predicted: at most {more:+.0f} %" if more > 0.5 else ""
    return f"manual change: {entry.what}{predicted}"


def _criteria(advice: Advice) -> list[str]:
    """Return the table of rules of thumb, followed by the measurement."""
    rows: list[tuple[str, str, str, str]] = [("GPU or CPU?", "here", "rule of thumb", "result")]
    rows += [
        (row.name, "-" if row.value is None else f"{row.value:,.6g}", row.rule or "-", row.verdict if row.rule else "-")
        for row in advice.criteria
    ]
    from runner.tools.measure.advisor import NOT_MEASURED
    from runner.tools.measure.criteria import rule_of_thumb

    measured = advice.device_verdict
    if not measured.startswith(NOT_MEASURED):
        measured = f"measured: {measured}"
    return [*aligned(rows), f"rule of thumb: {rule_of_thumb(advice.criteria) or 'unknown'}", measured]
