"""What all tests share."""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.base import configuration as configurations
from runner.base.configuration import Request
from tests.faults import tallies
from tests.forkserver import ForkServer

# The files that take longest, longest first: started last, one of them would keep one process busy and others waiting.
LONGEST = (
    "faults/test_resume_matrix.py", "faults/test_environment.py", "end_to_end/test_ranks.py", "commands/test_sweep.py",
    "launch/test_sweeps.py",
    "faults/test_errors.py", "measure/test_tune.py", "faults/test_damage.py", "faults/test_kills.py",
    "faults/test_power_cuts.py", "faults/test_crash_states.py", "faults/test_mutation.py", "commands/test_ends.py",
    "end_to_end/test_phases_as_data.py", "end_to_end/test_resume.py", "measure/test_suite_devices.py",
    "measure/test_trial.py", "faults/test_configuration_fuzz.py", "launch/test_two_nodes.py", "measure/test_ladder.py",
    "measure/test_advise.py", "commands/test_profile.py", "commands/test_observers.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files; report tests that need a GPU as skipped where there is none."""
    import torch

    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in places)
    items.sort(key=lambda item: places.get(item.path, len(places)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def pytest_collection_finish() -> None:
    """What was imported stays: no collection looks through it again, nor copies it in a fork."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """accel-run in processes of its own, without importing torch each time."""
    made = ForkServer()
    yield made
    made.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra composes the same groups of the shipped files once in a process; it takes nine tenths of the time."""
    real, loaded = configurations._compose_groups, configurations._load

    def compose_groups(groups: dict[str, str], request: Request, problems: list[Any]) -> Any:
        key, num_problems = (*sorted(groups.items()), request.task_file), len(problems)
        if request.config_dir or key not in _COMPOSED:
            found = real(groups, request, problems)
            if request.config_dir or len(problems) > num_problems:
                return found
            _COMPOSED[key] = found
        return copy.deepcopy(_COMPOSED[key])

    def load(group: str, option: str, config_dir: Path | None) -> Any:
        if config_dir:
            return loaded(group, option, config_dir)
        if (group, option) not in _LOADED:
            _LOADED[group, option] = loaded(group, option, None)
        return copy.deepcopy(_LOADED[group, option])

    monkeypatch.setattr(configurations, "_compose_groups", compose_groups)
    monkeypatch.setattr(configurations, "_load", load)


_COMPOSED: dict[tuple[Any, ...], Any] = {}
_LOADED: dict[tuple[str, str], Any] = {}


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder for TMPDIR: the names of sockets, which data workers make in it, have 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="test-") as name:
        yield Path(name)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of a process that has run a part of the tests."""
    tallies.unpack(getattr(node, "workeroutput", {}).get("tallies", []))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the counts of this process on, where it runs only a part of the tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tallies"] = tallies.packed()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what the fault suites have tried."""
    if tallies.TALLIES:
        terminalreporter.section("faults injected")
        tallies.show(terminalreporter.write_line)
