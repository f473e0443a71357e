"""Tests in workers are reported as if they ran in the process of pytest."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.forkserver import ForkServer

SHARED = """
import os
import pytest

@pytest.fixture(scope="module", autouse=True)
def module(request):
    with open(LOG, "a") as file:
        file.write(f"{request.path.stem} {os.getpid()} {os.getppid()}\\n")
"""
FILES = {
    "test_good": "def test_one(): ...\ndef test_two(capfd): print('seen')\n",
    "test_bad": "def test_fails():\n    print('said before')\n    assert 1 + 1 == 3\n"
    "def test_skipped(): pytest.skip('why')\n",
    "test_dies": "def test_before(): ...\ndef test_dies(): os._exit(3)\ndef test_after(): ...\n",
    "test_other": "def test_one(): ...\n",
}


class Reports:
    """A plugin that records the reports of a session."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, str]] = {}
        self.pids: set[int] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.found[report.nodeid] = (report.outcome, f"{report.longreprtext} {report.capstdout}")


def session_with_workers(folder: Path) -> tuple[int, dict[str, tuple[str, str]]]:
    """Run the files of a folder in two workers; return the exit code and (outcome, text) of each test."""
    reports = Reports()
    ForkServer.started = lambda: nullcontext(SimpleNamespace(twin=nullcontext))  # type: ignore[method-assign, assignment]
    args = ["-p", "no:cacheprovider", "--import-mode=importlib", "--workers=2", f"--rootdir={folder}", str(folder)]
    code = pytest.main(args, plugins=[conftest, reports])
    return int(code), reports.found


@pytest.fixture(scope="module")
def session(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("session")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    sampled\n    slow_beyond\n    slow\n    long\n")
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(SHARED.replace("LOG", repr(str(folder / "log"))) + text)
    code, result = server.call(session_with_workers, folder)
    log = [line.split() for line in (folder / "log").read_text().splitlines()]
    return SimpleNamespace(code=code, found=result, log=log)


@pytest.mark.slow
def test_outcomes_and_errors_in_workers_are_reported(session: Any) -> None:
    outcomes = {name: outcome for name, (outcome, _) in session.found.items()}
    assert outcomes["test_good.py::test_one"] == outcomes["test_good.py::test_two"] == "passed"
    assert outcomes["test_bad.py::test_fails"] == "failed"
    assert outcomes["test_bad.py::test_skipped"] == "skipped"
    text = session.found["test_bad.py::test_fails"][1]
    assert "assert (1 + 1) == 3" in text
    assert "said before" in text


@pytest.mark.slow
def test_other_files_run_if_a_test_kills_its_worker(session: Any) -> None:
    outcome, text = session.found["test_dies.py::test_dies"]
    assert outcome == "failed"
    assert "code 3" in text
    assert session.found["test_other.py::test_one"][0] == "passed"
    assert session.code == pytest.ExitCode.TESTS_FAILED


def test_each_file_runs_once_in_a_worker(session: Any) -> None:
    assert sorted(name for name, _, _ in session.log) == sorted(FILES)
    assert len({parent for _, _, parent in session.log}) == 1
    assert len({pid for _, pid, _ in session.log}) == 2
