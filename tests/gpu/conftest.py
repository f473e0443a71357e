"""Fixtures and hooks for tests on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.base.loaded_torch import is_stand_in
from tests.forkserver import ROOT
from tests.gpu.runs import PIPES, GpuServer, Runs


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the stand-in, which computes on the CPU, mark all cases of a test except the first as slow."""
    tests: set[str] = set()
    for item in items if is_stand_in() else ():
        test = item.nodeid.partition("[")[0]
        if test in tests:
            item.add_marker(pytest.mark.slow)
        tests.add(test)


@pytest.fixture(scope="session")
def server() -> Iterator[GpuServer]:
    """A fork server that sees the GPUs of this process, either real or simulated by the stand-in."""
    if PIPES in os.environ:
        with GpuServer.connected(os.environ[PIPES].split()) as made:
            yield made
        return
    with GpuServer.started({"PYTHONPATH": os.environ.get("PYTHONPATH") or str(ROOT)}) as made:
        yield made


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return reference runs that tests share."""
    return {"folder": tmp_path_factory.mktemp("straight")}


@pytest.fixture
def runs(server: GpuServer, tmp_path: Path, known: dict[str, Path]) -> Runs:
    """Return runs of the small task in the temporary folder of the test."""
    return Runs(server, tmp_path, known)
