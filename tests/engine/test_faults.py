"""What an exception in the middle of a run is taken for."""

from __future__ import annotations

import multiprocessing.connection
from pathlib import Path

import pytest

from runner.base.errors import DataWorkerLost
from runner.engine.faults import explain


def test_a_worker_that_dies_while_it_hands_over_a_batch_is_a_lost_worker() -> None:
    ours, theirs = multiprocessing.connection.Pipe()
    theirs.close()
    with pytest.raises(EOFError) as caught:
        ours.recv()
    assert isinstance(explain(caught.value, Path("mine.py"), "update 3", 4), DataWorkerLost)


def test_a_connection_of_somebody_else_is_not() -> None:
    with pytest.raises(ConnectionResetError) as caught:
        raise ConnectionResetError
    assert explain(caught.value, Path("mine.py"), "update 3", 4) is None
