"""`accel-run tune`: find the fastest settings for this machine and save them as a hardware profile."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from runner.base.errors import AccelRunError
from runner.base.secret import sanitize
from runner.base.text import format_table, wrap_for_terminal
from runner.commands.arguments import JSON, parse_arguments, parse_budget, parse_command_keys, progress_printer
from runner.config.configuration import compose
from runner.config.request import Request

if TYPE_CHECKING:
    from runner.tools.measure.tuner import TuneReport

HELP = """usage: accel-run tune [task=NAME] [key=value ...] [budget_s=600] [profile=NAME] [--json]

Finds the fastest settings for a training run on this machine and saves them as a hardware profile: data loader,
micro-batch, precision, compile, attention, optimizer kernels, threads. Results agree within rounding: samples per
update, optimizer, learning rate and length are kept, and losses are compared. Settings given on the command line
are not changed.

Candidates are interleaved with the best settings found so far. The final settings are measured once more against the
original ones. The profile contains them only if they are clearly faster.

  task=NAME, ...      settings of the run, as for train
  budget_s=600        approximate total time in seconds
  profile=NAME        name of the profile (default: the task's name and _tuned), in conf/hardware or in the folder of
                      --config-dir
  --json              print everything as JSON

examples
  accel-run tune task=gpt
  accel-run tune task=nmt precision=fp32 budget_s=1800 profile=mine
  accel-run tune --task ./my_task.py
"""
COMMAND_KEYS = {"budget_s": "600", "profile": ""}


def run(argv: list[str]) -> int:
    """Search, print the result and write the profile."""
    from runner.tools.measure.hardware_profile import check_profile, write_profile
    from runner.tools.measure.tuner import as_json, make_profile, tune

    request, budget_s, name, is_json = parse_tune_arguments(argv)
    check_profile(request, name)
    tuned = tune(request, budget_s, progress_printer("tune"))
    if not is_json:  # printed before writing, so that measurements are not lost if writing fails
        print(wrap_for_terminal(sanitize("\n".join(format_result(tuned)))), flush=True)
    profile_file, write_error = None, None
    try:
        if tuned.result.has_tried:  # otherwise keep an existing profile of that name
            profile_file = write_profile(make_profile(tuned), request, name)
    except AccelRunError as error:
        write_error = error
    if is_json:
        profile = None if profile_file is None else {"file": str(profile_file[0]), "command": profile_file[1]}
        print(json.dumps(as_json(tuned) | {"profile": profile}, indent=2), flush=True)
    if write_error is not None:
        raise write_error
    if profile_file is not None and not is_json:
        print(f"\nwritten      {profile_file[0]}\nnext         {sanitize(profile_file[1])}")
    return 0


def parse_tune_arguments(argv: list[str]) -> tuple[Request, float, str, bool]:
    """Return request, budget in seconds, profile name, and whether to print JSON. Raises ConfigError."""
    keys, rest, is_json = parse_command_keys(argv, COMMAND_KEYS, JSON)
    budget_s = parse_budget(keys["budget_s"], COMMAND_KEYS["budget_s"])
    request = parse_arguments(rest, command_keys=(*keys, JSON)).request
    task = compose(request).choices["task"].name  # report invalid settings before measuring
    return request, budget_s, keys["profile"] or f"{task}_tuned", is_json


def format_result(tuned: TuneReport) -> list[str]:
    search = tuned.result
    lines = [f"{tuned.task} on {tuned.device_name}: an update takes {tuned.update_ms:.4g} ms as configured", ""]
    if search.adopted:
        lines.append("found: each clearly faster than the previous line, with losses that agree")
        lines += [f"  {trial.rule:<18}{trial.candidate.name}   {trial.outcome.summary}" for trial in search.adopted]
        lines += [
            f"  {'':<18}different rounding: {trial.outcome.numerics}"
            for trial in search.adopted
            if trial.outcome.numerics is not None and trial.outcome.numerics.loss > 0
        ]
    if search.overrides and search.proof is not None:
        lines.append(f"all combined, measured once more against the current settings: {search.proof.outcome.summary}")
    elif search.proof is not None:
        lines.append(f"all combined, measured once more against the current settings: {search.proof.outcome.reason}")
        lines.append("the profile is empty")
    else:
        what = "none of the settings tried is clearly faster; the profile is empty"
        lines.append(what if search.has_tried else "no setting was tried, because the time budget was used up")
    others = {f"{trial.rule}: {trial.candidate.name}": trial for trial in search.tried if trial not in search.adopted}
    untried = {
        name: trial.outcome.reason.removeprefix("not tried: ")
        for name, trial in others.items()
        if trial.outcome.is_untried
    }
    for title, rows in (
        (
            "tried, not used",
            {name: trial.outcome.reason for name, trial in others.items() if not trial.outcome.is_untried},
        ),
        ("not tried", {**untried, **search.skipped}),
    ):
        if rows:
            lines += ["", title, *format_table([*rows.items()], indent="  ")]
    notes = [*tuned.notes, *(["not everything was tried; use a larger budget_s="] if untried else [])]
    return [*lines, *(f"note: {note}" for note in notes)]
