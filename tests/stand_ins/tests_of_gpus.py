"""Run the tests of tests/gpu on the stand-in, in one process with one fork server."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.forkserver import ROOT
from tests.gpu.runs import PIPES
from tests.nvml_stub import NvmlStub
from tests.stand_ins.commands_on_gpus import driver_of
from tests.stand_ins.forked import StandIn

MACHINE = "a100x2"
PASSED = "passed"
# --capture=sys, so that the message of an abort in C++ is not lost
OPTIONS = ("-q", "--assert=plain", "-p", "no:cacheprovider", "--timeout=0", "--capture=sys")
FILES = ("--continue-on-collection-errors", "tests/gpu")


def run_tests(stand_in: StandIn, nvml_stub: NvmlStub, marks: str) -> dict[str, str]:
    """Return node ID -> `passed`, `skipped` or the error, for all GPU tests with these marks.

    The driver of the NVML stub sees the same GPUs.
    """
    library = nvml_stub.folder / "new" / "libnvidia-ml.so.1"
    with stand_in.server.twin_at() as pipes:
        env = {PIPES: " ".join(pipes), "NVML_STUB": str(nvml_stub.write(driver_of(MACHINE, order=(0, 1))))}
        text = f"from tests.stand_ins.tests_of_gpus import main; main({marks!r}, {str(library)!r})"
        out = stand_in.program(MACHINE, text, env)
    result: dict[str, str] = json.loads(out.splitlines()[-1])
    return result


def main(marks: str, library: str) -> None:
    """Run the tests in this process and print their outcomes as a line of JSON."""
    os.chdir(ROOT)
    ctypes.CDLL(library)
    outcomes = Outcomes()
    pytest.main([*OPTIONS, *FILES, "-m", f"gpu and not long and {marks}"], plugins=[outcomes])
    print("\n" + json.dumps(outcomes.by_node))


class Outcomes:
    """A plugin of pytest that records the outcome of each test, and of each file that cannot be imported."""

    def __init__(self) -> None:
        self.by_node: dict[str, str] = {}

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.by_node[report.nodeid] = report.longreprtext

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.by_node[report.nodeid] = report.longreprtext
        elif report.when == "call" or report.skipped:
            self.by_node.setdefault(report.nodeid, report.outcome)


def file_of(node: str) -> str:
    return Path(node.partition("::")[0]).name


def name_of_test(node: str) -> str:
    return node.partition("::")[2].partition("[")[0]
