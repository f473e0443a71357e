"""`accel-run doctor`: check what training needs on this machine, and suggest fixes."""

from __future__ import annotations

import difflib
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.base.errors import ConfigError, DeviceMissing, Exit, Problem
from runner.commands.arguments import read
from runner.config.configuration import compose
from runner.config.request import Request
from runner.version import __version__

HELP = """usage: accel-run doctor [--quick] [--json] [device=DEVICE] [checks=[NAME,...]] [output_root=DIR]
       accel-run doctor first_contact [--json] [device=DEVICE] [output_root=DIR] [key=value ...]

Checks what training needs on this machine: matrix products against float64, attention kernels, compile, all-reduce
between processes, workers, limits, disk, packages, driver. Each check prints ok, warn, FAIL or skip with its result,
and below it why it matters and how to fix it. A check that crashes or hangs counts as FAIL; the remaining checks still
run. To measure how fast the machine is, use accel-run benchmark suite=machine.

first_contact compares the program's predictions for a GPU (formats, kernels, memory, times, waits) with measurements,
in at most five minutes. Use it for a kind of GPU that accel-run has not been tested on. It writes first_contact.json
and first_contact.md, a page to send, to output_root. Settings of train select another model.

  --quick           skip compile and the packages of the extras
  --json            print one JSON object: findings, counts, hardware
  device=DEVICE     auto (all devices), cpu, cuda, cuda:1, mps
  checks=[NAME,..]  run only these checks and those they depend on; list them with accel-run doctor checks=help
  output_root=DIR   the folder for runs (outputs)

Exit codes: 0 if no check fails (warnings included), 69 if any check FAILs.

examples
  accel-run doctor
  accel-run doctor --quick
  accel-run doctor checks=[matmul,attention] device=cuda:1
  accel-run doctor --json > doctor.json
  accel-run doctor first_contact device=cuda:1
"""


def run(words: list[str]) -> int:
    """Run the checks and print their findings; the exit code tells whether any failed."""
    from runner.tools.doctor.checks import CHECKS
    from runner.tools.doctor.display import DoctorDisplay
    from runner.tools.doctor.examine import Examination
    from runner.tools.doctor.findings import CheckResult

    if words[:1] == [CONTACT]:
        return _first_contact(words[1:])
    settings, flags = read_words(words)
    if settings.get("checks") == "help":
        print("\n".join(f"{name:<15}{check.tries}" for name, check in CHECKS.items()))
        return int(Exit.DONE)
    names = chosen_checks(settings.get("checks"), "--quick" in flags)
    root = Path(settings.get("output_root", "outputs")).expanduser().absolute()
    examination = Examination(names, settings.get("device", "auto"), root)
    is_json = "--json" in flags
    screen = DoctorDisplay(sys.stdout, sys.stderr if is_json else sys.stdout)
    began = time.monotonic()
    findings: list[CheckResult] = []
    for finding in examination.findings(screen.watch):
        findings.append(finding)
        if not is_json:
            screen.show(finding)
    took_s = time.monotonic() - began
    code = Exit.NO_DEVICE if any(finding.state == "FAIL" for finding in findings) else Exit.DONE
    if is_json:
        screen.wipe()
        hardware = json.loads(examination.inventory.to_json()) if examination.inventory else None
        print(_shown({"version": __version__, "exit_code": int(code), "seconds": round(took_s, 1),
                      "counts": {state: sum(finding.state == state for finding in findings) for state in _STATES},
                      "findings": [finding.to_json() for finding in findings], "hardware": hardware}))  # fmt: skip
    else:
        screen.conclude(findings, took_s)
    return int(code)


def _first_contact(words: list[str]) -> int:
    """Compare predictions with the GPU that is here, and write the page."""
    from runner.durable.files import atomic_write, make_directory
    from runner.tools.doctor.display import DoctorDisplay
    from runner.tools.doctor.examine import Examination
    from runner.tools.doctor.findings import CheckResult
    from runner.tools.doctor.first_contact import contact_checks, page, report

    own, request, is_json = read_contact(words)
    root = Path(own["output_root"]).expanduser().absolute()
    checks = contact_checks(request)
    examination = Examination(checks, own["device"], root, checks=checks)
    screen = DoctorDisplay(sys.stdout, sys.stderr if is_json else sys.stdout)
    began, findings = time.monotonic(), list[CheckResult]()
    for finding in examination.findings(screen.watch):
        findings.append(finding)
        if not is_json:
            screen.show(finding)
    if not any(finding.check not in ("torch", "gpus") for finding in findings):
        raise DeviceMissing(
            "there is no GPU here that torch can use, so nothing can be compared",
            where=f"device={own['device']}",
            fix="accel-run doctor shows why; tests/stand_ins/README.md says how to rehearse without a GPU",
        )
    hardware = json.loads(examination.inventory.to_json()) if examination.inventory else {"devices": []}
    content = json.loads(_shown(report(findings, hardware, request.overrides, __version__)))
    make_directory(root)
    atomic_write(root / f"{CONTACT}.json", json.dumps(content, indent=1) + "\n")
    atomic_write(root / f"{CONTACT}.md", page(content))
    screen.wipe()
    if is_json:
        print(json.dumps(content, indent=1))
    else:
        screen.conclude(findings, time.monotonic() - began)
        print(f"{own['output_root']}/{CONTACT}.md is the page to send, with {CONTACT}.json")
    return int(Exit.NO_DEVICE if any(finding.state == "FAIL" for finding in findings) else Exit.DONE)


def read_contact(words: list[str]) -> tuple[dict[str, str], Request, bool]:
    """Return doctor's own settings, those of the run, and whether JSON is wanted. Raises ConfigError."""
    rest = read([word for word in words if word != "--json"]).request
    own = {"device": "auto", "output_root": "outputs"}
    given = dict(word.split("=", 1) for word in rest.overrides if word.partition("=")[0] in own and "=" in word)
    others = tuple(word for word in rest.overrides if word.partition("=")[0] not in own)
    _check_device({**own, **given}["device"])
    compose(replace(rest, overrides=others))
    return {**own, **given}, replace(rest, overrides=others), "--json" in words


def _check_device(device: str) -> None:
    if not re.fullmatch(_DEVICES, device):
        raise ConfigError([Problem(f"must be {_DEVICE_NAMES}, but is {device}", "device")])


def read_words(words: list[str]) -> tuple[dict[str, str], set[str]]:
    """Return settings and flags. Raises ConfigError listing all unknown arguments."""
    settings: dict[str, str] = {}
    flags, problems = set[str](), list[Problem]()
    for word in words:
        key, has_value, value = word.partition("=")
        if word in _FLAGS:
            flags.add(word)
        elif has_value and key in OWN:
            settings[key] = value
        else:
            problems.append(Problem("unknown argument", word, _meant(key)))
    device = settings.get("device", "auto")
    if not re.fullmatch(_DEVICES, device):
        problems.append(Problem(f"must be {_DEVICE_NAMES}, but is {device}", "device"))
    if problems:
        raise ConfigError(problems)
    return settings, flags


def _meant(word: str) -> str:
    """Return a suggestion for an unknown argument."""
    from runner.tools.doctor.checks import CHECKS

    if word in CHECKS:
        return f"use checks=[{word}]"
    close = difflib.get_close_matches(word, [*_FLAGS, *OWN], n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else "see accel-run doctor --help"


def chosen_checks(text: str | None, is_quick: bool) -> list[str]:
    """Return the names of the checks to run; text None: all, or all quick ones.

    Raises ConfigError for an unknown name, an empty list, and a check that --quick skips.
    """
    from runner.tools.doctor.checks import CHECKS

    if text is None:
        return [name for name, check in CHECKS.items() if check.is_quick or not is_quick]
    names = [name.strip() for name in text.strip().removeprefix("[").removesuffix("]").split(",") if name.strip()]
    problems = []
    for name in dict.fromkeys(names):
        if name not in CHECKS:
            close = difflib.get_close_matches(name, CHECKS, n=1, cutoff=0.5)
            fix = f"did you mean {close[0]}?" if close else f"available: {', '.join(CHECKS)}"
            problems.append(Problem(f"unknown check {name}", "checks", fix))
        elif is_quick and not CHECKS[name].is_quick:
            problems.append(Problem(f"includes {name}, which --quick skips", "checks", "remove one of them"))
    if not names:
        problems.append(Problem("names no check", "checks", "leave it out to run all checks"))
    if problems:
        raise ConfigError(problems)
    return names


def _shown(value: Any) -> str:
    """Return JSON without secrets and terminal control characters."""
    from runner.base.secret import fit_to_show

    return fit_to_show(json.dumps(value, indent=1))


CONTACT = "first_contact"
_DEVICES = r"auto|cpu|mps|cuda(:\d+)?"
_DEVICE_NAMES = "auto, cpu, cuda, cuda:N or mps"
_FLAGS = ("--quick", "--json")
OWN = ("checks", "device", "output_root")
_STATES = ("ok", "warn", "FAIL", "skip")
