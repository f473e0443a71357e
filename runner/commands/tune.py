"""`accel-run tune`: the settings with which updates are fastest here, as a hardware profile."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from runner.base.configuration import Request, compose
from runner.base.errors import AccelRunError
from runner.base.secret import fit_to_show
from runner.base.words import for_terminal
from runner.commands.arguments import budget, own_words, read, teller

if TYPE_CHECKING:
    from runner.measure.tune import Tuned

HELP = """usage: accel-run tune [task=NAME] [key=value ...] [budget_s=600] [profile=NAME] [--json]

Finds the settings with which the updates of a training are fastest on this machine, and writes them as a hardware
profile: data loader, micro-batch, precision, compile, attention, kernels of the optimizer, threads. What an update
computes stays: the samples of an update, the optimizer, its learning rate and the length of the training are not
touched, and losses must agree. What you say on the command line stays as you said it.

Settings take turns with the best that is known; what is found at last is measured once more against the settings as
they are, in fresh rounds, and only where it is clearly faster there the profile holds it.

  task=NAME, ...      the training, as for train
  budget_s=600        seconds for all of it, about
  profile=NAME        the name of the profile (default: the task's name and _tuned), in conf/hardware, or in the folder
                      of --config-dir
  --json              everything as JSON

examples
  accel-run tune task=gpt
  accel-run tune task=nmt precision=fp32 budget_s=1800 profile=mine
  accel-run tune --task ./my_task.py
"""
OWN = {"budget_s": "600", "profile": ""}


def run(words: list[str]) -> int:
    """Search, tell and write the profile."""
    from runner.measure.hardware_profile import check_profile, write_profile
    from runner.measure.tune import as_json, profile_of, tune

    request, budget_s, name, is_json = read_words(words)
    check_profile(request, name)
    tuned = tune(request, budget_s, teller("tune"))
    if not is_json:  # before anything is written: what was measured must not be lost with it
        print(for_terminal(fit_to_show("\n".join(screen(tuned)))), flush=True)
    written, refused = None, None
    try:
        if tuned.found.has_tried:  # else a profile of that name may know more
            written = write_profile(profile_of(tuned), request, name)
    except AccelRunError as error:
        refused = error
    if is_json:
        profile = None if written is None else {"file": str(written[0]), "command": written[1]}
        print(json.dumps(as_json(tuned) | {"profile": profile}, indent=2), flush=True)
    if refused is not None:
        raise refused
    if written is not None and not is_json:
        print(f"\nwritten      {written[0]}\nnext         {fit_to_show(written[1])}")
    return 0


def read_words(words: list[str]) -> tuple[Request, float, str, bool]:
    """Return the training, the seconds, the name of the profile, and whether as JSON. Raises ConfigError."""
    own, rest, is_json = own_words(words, OWN)
    budget_s = budget(own["budget_s"], OWN["budget_s"])
    request = read(rest, own=own).request
    task = compose(request).choices["task"].name  # slips in the settings are said before anything is measured
    return request, budget_s, own["profile"] or f"{task}_tuned", is_json


def screen(tuned: Tuned) -> list[str]:
    """Return what a person reads."""
    found = tuned.found
    lines = [f"{tuned.task} on {tuned.device_name}: an update takes {tuned.update_ms:.4g} ms as it is", ""]
    if found.adopted:
        lines.append("found: each clearly faster than what stands above it, with losses that agree")
        lines += [f"  {each.rule:<18}{each.candidate.name}   {each.told}" for each in found.adopted]
        lines += [f"  {'':<18}it rounds otherwise: {each.numerics}" for each in found.adopted if each.rounds_otherwise]
    if found.words and found.proof is not None:
        lines.append(f"all of it, in fresh rounds against the settings as they are: {found.proof.told}")
    elif found.proof is not None:
        lines.append(f"in fresh rounds against the settings as they are: {found.proof.reason}")
        lines.append("the profile holds none of it")
    else:
        what = "no setting that was tried is clearly faster, and the profile holds none"
        lines.append(f"found: nothing; {what if found.has_tried else 'there was no time to try a setting'}")
    others = {f"{each.rule}: {each.candidate.name}": each for each in found.tried if each not in found.adopted}
    untried = {name: each.reason.removeprefix("not tried: ") for name, each in others.items() if each.is_untried}
    for title, rows in (
        ("tried, and not taken", {name: each.reason for name, each in others.items() if not each.is_untried}),
        ("not tried", {**untried, **found.left}),
    ):
        if rows:
            width = max(map(len, rows))
            lines += ["", title, *(f"  {name:<{width}}  {why}" for name, why in rows.items())]
    if found.needs_s:
        lines += ["", f"note: there was no time to try all; about budget_s={found.needs_s:.0f} tries all"]
    return [*lines, *(f"note: {note}" for note in tuned.notes)]
