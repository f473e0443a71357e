"""Requests and results for tests of suites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from runner.config.request import Request
from runner.tools.measure.comparison_result import Block
from runner.tools.measure.suite import SuiteRequest
from runner.tools.measure.suites import SUITES


def asked(suite: str, folder: Path, task: Path | None, *settings: str, **options: str) -> SuiteRequest:
    """Return a request to a suite, with default options except for those given."""
    own = dict(SUITES[suite].options)
    return SuiteRequest(Request(settings, task), (), own | options, folder, "", 300.0, lambda _: None)


def blocks(ms: Iterable[float] | Mapping[int, float], process: int = 0) -> dict[int, Block]:
    """Return blocks with these times in milliseconds, by round."""
    rounds = ms if isinstance(ms, Mapping) else dict(enumerate(ms))
    return {number: Block(each, process=process) for number, each in rounds.items()}
