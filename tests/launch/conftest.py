"""Ranks are forked from the process of the tests, which must have one thread."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """End the thread that tqdm leaves behind, where an earlier test has drawn a bar with it."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is not None and bars.monitor is not None:
        bars.monitor.exit()
        bars.monitor = None
