"""Fixtures and hooks for tests on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.base.loaded_torch import is_stand_in
from tests.forkserver import ROOT, ForkServer
from tests.gpu.runs import PIPES, Runs


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the stand-in, which computes on the CPU, run one case of each matrix; with --all every case."""
    if is_stand_in():
        for item in items:
            if "[" in item.name:
                item.add_marker(pytest.mark.sampled(1))


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """A fork server with the GPUs of this process, real or of the stand-in."""
    if PIPES in os.environ:
        with ForkServer.connected(os.environ[PIPES].split()) as made:
            yield made
        return
    with ForkServer.started({"PYTHONPATH": os.environ.get("PYTHONPATH") or str(ROOT)}) as made:
        yield made


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reference runs that tests share."""
    return {"folder": tmp_path_factory.mktemp("straight")}


@pytest.fixture
def runs(server: ForkServer, tmp_path: Path, known: dict[str, Path]) -> Runs:
    """Runs of the small task in the test's temporary folder."""
    return Runs(server, tmp_path, known)
