"""Fixtures that set the number and the seed of injected faults, and the table of counts at the end.

Environment variables: ACCEL_RUN_FAULTS=long selects the long form, with many more injections. ACCEL_RUN_SEED sets the
seed, ACCEL_RUN_COUNT one count for all suites. ACCEL_RUN_TALLY=FILE appends the counts as JSON lines.
`scripts/faults.sh` sets these variables.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.tallies import IS_LONG, SEED, TALLIES, Tally


@pytest.fixture
def seed() -> int:
    """The seed of every random choice of a suite."""
    return SEED


@pytest.fixture
def amount() -> Callable[[int, int], int]:
    """Return a function of (default count, count in the long form) that returns the number of injections."""

    def of(usual: int, on_demand: int) -> int:
        given = os.environ.get("ACCEL_RUN_COUNT")
        return int(given) if given else on_demand if IS_LONG else usual

    return of


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A temporary folder in /dev/shm if available, to spare the disk."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="accel-run-faults-", dir=shared) as folder:
        yield Path(folder)


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """The counts of this test, printed at the end of the session."""
    result = Tally(request.node.name.removeprefix("test_"))
    began = time.monotonic()
    yield result
    result.seconds = time.monotonic() - began
    report = getattr(request.node, "report_of_call", None)
    result.num_bad = int(report is not None and report.failed)
    if report is not None and report.skipped and not result.skipped:
        result.skip(report.longrepr[2].removeprefix("Skipped: "))
    TALLIES.append(result)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call":
        item.report_of_call = report  # type: ignore[attr-defined]
