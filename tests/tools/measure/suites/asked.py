"""What tests of suites ask with."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from runner.config.request import Request
from runner.tools.measure.suite import SuiteRequest
from runner.tools.measure.suites import SUITES


def asked(suite: str, folder: Path, task: Path | None, *settings: str, **options: str) -> SuiteRequest:
    """Return what a suite is asked: its own options where the test says nothing."""
    own = import_module(f"runner.tools.measure.suites.{SUITES[suite][0]}").OPTIONS
    return SuiteRequest(Request(settings, task), (), own | options, folder, "", 300.0, lambda _: None)
