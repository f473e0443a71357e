"""Sampling of large matrices and marks of slow tests, see scripts/test.sh."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import conftest
from tests.faults import tallies

FILE = """
import pytest

@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(10))
def test_matrix(number): ...

@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(2))
def test_small(number): ...

@pytest.mark.sampled(3)
@pytest.mark.parametrize("one", range(3))
@pytest.mark.parametrize("other", range(2))
def test_product(one, other): ...

@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind, case", [(case[:2], case) for case in "ax1 ax2 ax3 ax4 by1 cz1".split()])
def test_kinds(kind, case): ...

@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("number", range(5))
def test_costly(number): ...

@pytest.mark.slow
def test_slow(): ...

@pytest.mark.long
def test_long(): ...

def test_other(): ...
"""


class Collected:
    """A plugin that records the selected tests of a session, and the number of deselected ones."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.num_left_out = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.name for item in session.items]

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.num_left_out += len(items)

    def of(self, test: str) -> list[str]:
        return [name for name in self.names if name.partition("[")[0] == test]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tallies, "IS_LONG", False)
    monkeypatch.setattr(tallies, "SEED", 1)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    sampled\n    slow_beyond\n    slow\n    long\n")
    (tmp_path / "test_planted.py").write_text(FILE)
    return tmp_path / "test_planted.py"


def collected(file: Path, test: str = "", marks: str = "") -> Collected:
    result = Collected()
    args = [
        "-m",
        marks,
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        f"--rootdir={file.parent}",
    ]
    assert pytest.main([*args, f"{file}{test}"], plugins=[conftest, result]) == 0
    return result


def test_the_requested_number_of_cases_is_sampled(file: Path) -> None:
    result = collected(file)
    assert len(result.of("test_matrix")) == 3
    assert result.of("test_small") == ["test_small[0]", "test_small[1]"]
    assert result.of("test_other") == ["test_other"]
    assert result.of("test_long") == []
    assert result.num_left_out == 7 + 3 + 3 + 1


def test_slow_cases_and_tests_run_on_request(file: Path) -> None:
    assert len(collected(file).of("test_costly")) == 5
    assert len(collected(file).of("test_slow")) == 1
    without = collected(file, marks="not slow")
    assert len(without.of("test_costly")) == 2
    assert without.of("test_slow") == []
    assert len(without.of("test_matrix")) == 3


@pytest.mark.slow
def test_sampled_cases_depend_on_the_seed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = collected(file).names
    assert collected(file).names == first
    chosen = set()
    for seed in range(20):
        monkeypatch.setattr(tallies, "SEED", seed)
        chosen |= set(collected(file).of("test_matrix"))
    assert len(chosen) == 10


def test_all_cases_run_on_request(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tallies, "IS_LONG", True)
    result = collected(file)
    assert len(result.names) == 10 + 2 + 6 + 6 + 5 + 1 + 1 + 1
    assert result.num_left_out == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", ["test_long", *(f"test_matrix[{number}]" for number in range(10))])
def test_a_case_named_on_the_command_line_runs(case: str, file: Path) -> None:
    assert collected(file, f"::{case}").names == [case]


@pytest.mark.parametrize("seed", range(5))
def test_samples_cover_each_parameter_value(seed: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tallies, "SEED", seed)
    selected = collected(file)
    chosen = [name[len("test_product[") : -1].split("-") for name in selected.of("test_product")]
    assert {other for other, _ in chosen} == {"0", "1"}
    assert {one for _, one in chosen} == {"0", "1", "2"}
    kinds = [name.removeprefix("test_kinds[")[:2] for name in selected.of("test_kinds")]
    assert sorted(kinds) == ["ax", "by", "cz"]
