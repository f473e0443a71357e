"""`accel-run doctor`: check what training needs on this machine, and suggest fixes."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.errors import ConfigError, DeviceMissing, Exit, Problem
from runner.base.values import DeviceName, LocalPath
from runner.commands.arguments import parse_arguments, parse_options
from runner.config.configuration import compose
from runner.config.request import Request
from runner.config.schema import did_you_mean
from runner.version import __version__

if TYPE_CHECKING:
    from runner.tools.doctor.examine import Examination
    from runner.tools.doctor.findings import CheckResult

HELP = """usage: accel-run doctor [--json] [device=DEVICE] [checks=[NAME,...]] [output_root=DIR]
       accel-run doctor first_contact [--json] [device=DEVICE] [output_root=DIR] [key=value ...]

Tests whether this machine can train: packages, driver, versions, limits, disk, other processes on each GPU, matrix
products compared with float64. Each check prints ok, warn, FAIL or skip with its result. Problems are repeated at the
end, with the reason why they matter and a fix. A check that crashes or hangs counts as FAIL, and the other checks
continue.
To measure how fast the machine is, use accel-run benchmark suite=machine.

first_contact compares predictions for a GPU (formats, kernels, memory, times, waits) with measurements, in at most five
minutes. Use it on a kind of GPU that accel-run has not been tested on. It writes first_contact.json and
first_contact.md to output_root; please send both to the maintainers. To use another model, add settings as for train.

  --json            print one JSON object: findings, counts, hardware
  device=DEVICE     auto (all devices), cpu, cuda, cuda:1, mps
  checks=[NAME,..]  run only these checks and those they depend on; list them with accel-run doctor checks=help
  output_root=DIR   the folder for runs (outputs)

Exit codes: 0 if no check fails, even with warnings; 69 if any check FAILs.

examples
  accel-run doctor
  accel-run doctor checks=[matmul,disk] device=cuda:1
  accel-run doctor --json > doctor.json
  accel-run doctor first_contact device=cuda:1
"""


@dataclass(frozen=True)
class DoctorOptions:
    """Options of the form key=value."""

    checks: str | None = None
    device: DeviceName = "auto"
    output_root: LocalPath = "outputs"

    @property
    def root(self) -> Path:
        return Path(self.output_root).expanduser().absolute()


def run(argv: list[str]) -> int:
    """Run the checks and print their findings; the exit code is 69 if any failed."""
    from runner.tools.doctor.examine import Examination

    if argv[:1] == [CONTACT]:
        return _run_first_contact(argv[1:])
    options, flags = parse_doctor_arguments(argv)
    if options.checks == "help":
        from runner.tools.doctor.checks import CHECKS

        print("\n".join(f"{name:<15}{check.summary}" for name, check in CHECKS.items()))
        return int(Exit.DONE)
    names, is_json = select_checks(options.checks), "--json" in flags
    examination = Examination(names, options.device, options.root)
    findings, took_s, code = _run_checks(examination, is_json=is_json)
    if is_json:
        print(_format_json({"version": __version__, "exit_code": code, "seconds": round(took_s, 1),
                      "counts": {state: sum(finding.state == state for finding in findings) for state in _STATES},
                      "findings": [finding.to_json() for finding in findings],
                      "hardware": _hardware(examination)}))  # fmt: skip
    return code


def _run_first_contact(argv: list[str]) -> int:
    """Compare predictions with measurements on the GPU of this machine, and write the page."""
    from runner.durable.files import atomic_write, make_directory
    from runner.tools.doctor.examine import Examination
    from runner.tools.doctor.first_contact import contact_checks, format_page, make_report

    options, request, is_json = parse_contact_arguments(argv)
    checks = contact_checks(request)
    examination = Examination(checks, options.device, options.root, checks=checks)
    findings, _, code = _run_checks(examination, is_json=is_json)
    if not any(finding.check not in ("torch", "gpus") for finding in findings):
        raise DeviceMissing(
            "torch cannot use a GPU on this machine, so nothing can be compared",
            where=f"device={options.device}",
            fix="run accel-run doctor to find the reason",
        )
    hardware = _hardware(examination) or {"devices": []}
    content = json.loads(_format_json(make_report(findings, hardware, request.overrides, __version__)))
    make_directory(options.root)
    atomic_write(options.root / f"{CONTACT}.json", json.dumps(content, indent=1) + "\n")
    atomic_write(options.root / f"{CONTACT}.md", format_page(content))
    if is_json:
        print(json.dumps(content, indent=1))
    else:
        print(f"written to {options.output_root}/: {CONTACT}.md, the page to send, and {CONTACT}.json")
    return code


def _run_checks(examination: Examination, *, is_json: bool) -> tuple[list[CheckResult], float, int]:
    """Run the checks, and print the findings unless JSON is wanted; return them, their seconds, and the exit code."""
    from runner.tools.doctor.display import DoctorDisplay

    display = DoctorDisplay(sys.stdout, sys.stderr if is_json else sys.stdout)
    started_s = time.monotonic()
    findings: list[CheckResult] = []
    for finding in examination.findings(display.show_status):
        findings.append(finding)
        if not is_json:
            display.show(finding)
    took_s = time.monotonic() - started_s
    display.clear_status()
    if not is_json:
        display.show_summary(findings, took_s)
    return findings, took_s, int(Exit.NO_DEVICE if any(finding.state == "FAIL" for finding in findings) else Exit.DONE)


def _hardware(examination: Examination) -> Any:
    return json.loads(examination.inventory.to_json()) if examination.inventory else None


def parse_contact_arguments(argv: list[str]) -> tuple[DoctorOptions, Request, bool]:
    """Return doctor's own options, the settings of the run, and whether JSON is wanted. Raises ConfigError."""
    request = parse_arguments([arg for arg in argv if arg != "--json"]).request
    option_overrides = [arg for arg in request.overrides if arg.startswith(("device=", "output_root="))]
    options, _ = parse_doctor_arguments(option_overrides)
    settings = replace(request, overrides=tuple(arg for arg in request.overrides if arg not in option_overrides))
    compose(settings)
    return options, settings, "--json" in argv


def parse_doctor_arguments(argv: list[str]) -> tuple[DoctorOptions, set[str]]:
    """Return options and flags. Raises ConfigError listing all problems."""
    from runner.tools.doctor.checks import CHECKS

    def guess(arg: str) -> str:
        return f"checks=[{arg}]" if arg in CHECKS else ""

    parsed, problems = parse_options(argv, DoctorOptions, _FLAGS, guess)
    if problems:
        raise ConfigError(problems)
    return DoctorOptions(**parsed.given), parsed.flags


def select_checks(text: str | None) -> list[str]:
    """Return the names of the checks to run, all for None. Raises ConfigError for unknown names and an empty list."""
    from runner.tools.doctor.checks import CHECKS

    if text is None:
        return list(CHECKS)
    names = [name.strip() for name in text.strip().removeprefix("[").removesuffix("]").split(",") if name.strip()]
    problems = []
    for name in dict.fromkeys(names):
        if name not in CHECKS:
            fix = did_you_mean(name, CHECKS) or f"use one of {', '.join(CHECKS)}"
            problems.append(Problem(f"unknown check {name}", "checks", fix))
    if not names:
        problems.append(Problem("the list of checks is empty", "checks", "leave it out to run all checks"))
    if problems:
        raise ConfigError(problems)
    return names


def _format_json(value: Any) -> str:
    """Return JSON without secrets and terminal control characters."""
    from runner.base.secret import sanitize

    return sanitize(json.dumps(value, indent=1))


CONTACT = "first_contact"
_FLAGS = ("--json",)
COMMAND_KEYS = ("checks", "device", "output_root")
_STATES = ("ok", "warn", "FAIL", "skip")
