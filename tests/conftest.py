"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forkserver import ForkServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Report tests that need a GPU as skipped where there is none."""
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """accel-run in processes of its own, without importing torch each time."""
    made = ForkServer()
    yield made
    made.close()
