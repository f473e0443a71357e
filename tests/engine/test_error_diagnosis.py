"""How exceptions during a run are classified."""

from __future__ import annotations

import multiprocessing.connection
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import pytest
import torch

from runner.base.errors import AccelRunError, DataError, DataWorkerLost, DeviceMemoryError, HostMemoryError, TaskFault
from runner.base.task import Task
from runner.engine.error_diagnosis import explain, locate_definition


def test_a_worker_that_dies_while_sending_a_batch_is_a_lost_worker() -> None:
    ours, theirs = multiprocessing.connection.Pipe()
    theirs.close()
    with pytest.raises(EOFError) as caught:
        ours.recv()
    assert isinstance(explain(caught.value, Path("mine.py"), "update 3", 4), DataWorkerLost)


def test_a_foreign_connection_error_is_not_a_lost_worker() -> None:
    with pytest.raises(ConnectionResetError) as caught:
        raise ConnectionResetError
    assert explain(caught.value, Path("mine.py"), "update 3", 4) is None


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.AcceleratorError("CUDA error: out of memory"), DeviceMemoryError),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), DeviceMemoryError),
        (OSError(12, "Cannot allocate memory"), HostMemoryError),
    ],
)
def test_out_of_memory_is_not_a_broken_device(error: Exception, wanted: type[AccelRunError]) -> None:
    assert isinstance(explain(error, Path("mine.py"), "update 3", 4), wanted)


def test_a_sample_that_exceeds_memory_is_named() -> None:
    error = DataError("sample 7 cannot be read: MemoryError")
    error.__cause__ = MemoryError()
    result = explain(error, Path("mine.py"), "update 3", 4)
    assert isinstance(result, HostMemoryError)
    assert "sample 7" in str(result)


def _graph_used_twice() -> None:
    loss = torch.ones(2, requires_grad=True).exp().sum()
    loss.backward()
    loss.backward()


def _tensor_changed_in_place() -> None:
    weight = torch.ones(2, requires_grad=True)
    result = weight.exp()
    result += 1
    result.sum().backward()


@pytest.mark.parametrize("mistake", [_graph_used_twice, _tensor_changed_in_place])
def test_a_graph_freed_by_the_task_is_an_error_of_the_task(mistake: Callable[[], None]) -> None:
    with pytest.raises(RuntimeError) as caught:
        mistake()
    assert isinstance(explain(caught.value, Path("mine.py"), "update 3", 4), TaskFault)


class Own(Task):
    def loss(self, model: object, batch: object) -> object:  # type: ignore[override]
        return None


def test_a_place_is_a_line_of_the_task_and_never_one_of_a_library() -> None:
    here = Path(__file__)
    task = Own()
    file, _, line = locate_definition(task.loss, here).rpartition(":")
    assert (file, int(line) > 1) == (str(here), True)
    assert locate_definition(wraps(task.loss)(lambda: None), here) == locate_definition(task.loss, here)
    assert locate_definition(task.sample_weights, here) == str(here)
    assert locate_definition(torch.nn.Linear.forward, here) == str(here)
