"""The tests of tests/gpu pass on the stand-in, so that they keep working on machines without a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from tests.nvml_stub import NvmlStub
from tests.stand_ins.cuda.build import why_not
from tests.stand_ins.cuda.environment import ROOT
from tests.stand_ins.forked import StandIn
from tests.stand_ins.tests_of_gpus import PASSED, file_of, name_of_test, run_tests

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built"),
    pytest.mark.timeout(1800),
]
LEFT_OUT = {"test_advice.py"}  # needs kernels that take time
FILES = sorted(path.name for path in (ROOT / "tests/gpu").glob("test_*.py") if path.name not in LEFT_OUT)


@pytest.fixture(scope="module")
def first_cases(stand_in: StandIn, nvml_stub: NvmlStub) -> Mapping[str, str]:
    return run_tests(stand_in, nvml_stub, "not slow")


@pytest.fixture(scope="module")
def other_cases(stand_in: StandIn, nvml_stub: NvmlStub) -> Mapping[str, str]:
    return run_tests(stand_in, nvml_stub, "slow")


@pytest.mark.parametrize("file", FILES)
def test_first_cases_of_gpu_tests_pass_on_the_stand_in(file: str, first_cases: Mapping[str, str]) -> None:
    """Only the first case of each test runs here."""
    outcomes = {name_of_test(node): outcome for node, outcome in first_cases.items() if file_of(node) == file}
    tests = re.findall(r"^def (test_\w+)", (ROOT / "tests/gpu" / file).read_text(), re.MULTILINE)
    assert outcomes == dict.fromkeys(tests, PASSED)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_other_cases_of_gpu_tests_pass_on_the_stand_in(file: str, other_cases: Mapping[str, str]) -> None:
    outcomes = {node: outcome for node, outcome in other_cases.items() if file_of(node) == file}
    assert set(outcomes.values()) <= {PASSED}, outcomes
    assert bool(outcomes) == ("parametrize" in (ROOT / "tests/gpu" / file).read_text())
