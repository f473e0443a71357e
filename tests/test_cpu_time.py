"""The CPU time of tests includes children that serve many of them."""

from __future__ import annotations

import os
from multiprocessing import get_context
from multiprocessing.connection import Connection

from tests.cpu_time import used_cpu_s

USED_S = 0.3


def busy(connection: Connection) -> None:
    while os.times().user < USED_S:
        sum(range(1000))
    connection.send(os.times().user + os.times().system)
    connection.recv()


def test_running_and_ended_children_are_counted_once() -> None:
    context = get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=busy, args=(theirs,))
    before = used_cpu_s()
    child.start()
    used = ours.recv()
    running = used_cpu_s() - before
    ours.send(None)
    child.join()
    ended = used_cpu_s() - before
    assert used >= USED_S
    assert running >= used - 0.02, "two ticks of the kernel"
    assert ended - running < used
