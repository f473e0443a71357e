"""What an exception in the middle of a run is taken for."""

from __future__ import annotations

import multiprocessing.connection
from pathlib import Path

from runner.base.errors import DataWorkerLost
from runner.engine.faults import explain


def test_a_worker_that_dies_while_it_hands_over_a_batch_is_a_lost_worker() -> None:
    ours, theirs = multiprocessing.connection.Pipe()
    theirs.close()
    try:
        ours.recv()
    except EOFError as error:
        assert isinstance(explain(error, Path("mine.py"), "update 3", 4), DataWorkerLost)
    else:
        raise AssertionError("the other end is closed")


def test_a_connection_of_somebody_else_is_not() -> None:
    try:
        raise ConnectionResetError
    except ConnectionResetError as error:
        assert explain(error, Path("mine.py"), "update 3", 4) is None
