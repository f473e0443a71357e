"""Exceptions during a run are classified by their cause."""

from __future__ import annotations

import multiprocessing.connection
import runpy
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.base.errors import (
    AccelRunError,
    DataError,
    DataWorkerLost,
    DeviceMemoryError,
    DeviceMissing,
    HostMemoryError,
    StorageError,
    SystemLimit,
    TaskFault,
)
from runner.base.task import Task
from runner.engine.contract.error_diagnosis import explain, locate_definition


def test_eof_from_a_worker_is_reported_as_a_lost_worker() -> None:
    ours, theirs = multiprocessing.connection.Pipe()
    theirs.close()
    with pytest.raises(EOFError) as caught:
        ours.recv()
    assert isinstance(explain(caught.value, Path("mine.py"), "update 3", 4), DataWorkerLost)


def test_an_unrelated_connection_error_is_not_reported_as_a_lost_worker() -> None:
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
def test_out_of_memory_is_reported_as_a_memory_error(error: Exception, wanted: type[AccelRunError]) -> None:
    assert isinstance(explain(error, Path("mine.py"), "update 3", 4), wanted)


def functions_of(text: str, file: Path) -> dict[str, Any]:
    """Return the functions that a file with this text would define; the file need not exist."""
    functions: dict[str, Any] = {}
    exec(compile(text, str(file), "exec"), functions)  # noqa: S102 - the text is in the test
    return functions


def raise_in(folder: str, error: Exception) -> Exception:
    """Raise the error in a function of a file in this folder, and return it with its traceback."""
    act = functions_of("def act(error):\n    raise error\n", Path(f"/x/{folder}/y.py"))["act"]
    with pytest.raises(type(error)) as caught:
        act(error)
    return caught.value


@pytest.mark.parametrize(
    ("error", "folder", "wanted"),
    [
        (torch.AcceleratorError("device-side assert triggered"), "torch", DeviceMissing),
        (RuntimeError("CUDA error: device-side assert"), "torch", DeviceMissing),
        (RuntimeError("Too many open files. Communication"), "torch", SystemLimit),
        (OSError(28, "No space left on device"), "multiprocessing", SystemLimit),
        (OSError(28, "No space left on device"), "torch", StorageError),
        (OSError(28, "No space left on device", "a.bin"), "torch", StorageError),
        (RuntimeError("DataLoader worker (pid 3) is killed by signal: Bus error, out of shared memory"), "torch",
         SystemLimit),
        (RuntimeError("unable to write to file </torch_1>: No space left on device"), "torch", SystemLimit),
        (RuntimeError("can't start new thread"), "torch", SystemLimit),
        (BlockingIOError(11, "Resource temporarily unavailable"), "multiprocessing", SystemLimit),
        (BlockingIOError(11, "Resource temporarily unavailable"), "torch", None),
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), "torch", DataWorkerLost),
        (EOFError(), "multiprocessing", DataWorkerLost),
        (FileNotFoundError(2, "No such file"), "multiprocessing", DataWorkerLost),
        (EOFError(), "torch", None),
        (RuntimeError("of the runner"), "torch", None),
    ],
)  # fmt: skip
def test_system_failures_are_classified_by_their_cause(
    error: Exception, folder: str, wanted: type[AccelRunError] | None
) -> None:
    result = explain(raise_in(folder, error), Path("mine.py"), "update 3", 4)
    assert type(result) is (type(None) if wanted is None else wanted)
    if result is not None:
        (problem,) = result.problems
        assert problem.where.startswith("update 3")
        assert problem.fix
        assert ("a.bin" in problem.where) == (getattr(error, "filename", None) == "a.bin")


@pytest.mark.parametrize(
    ("text", "is_assert"),
    [
        ("CUDA error: device-side assert triggered", True),
        ("HIP error: device-side assertion failed", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: unspecified launch failure", False),
    ],
)
def test_the_fix_for_a_failed_kernel_assertion_suggests_synchronous_launches(text: str, is_assert: bool) -> None:
    """Such an assertion usually checks an index, and the error may be raised at a later line."""
    result = explain(raise_in("torch", torch.AcceleratorError(text)), Path("mine.py"), "update 3", 4)
    assert isinstance(result, DeviceMissing)
    fix = result.problems[0].fix
    assert ("CUDA_LAUNCH_BLOCKING=1" in fix, "nvidia-smi" in fix) == (is_assert, not is_assert)
    assert "device=cpu" in fix


@pytest.mark.parametrize(("size", "suggested"), [(4, "micro_batch_size=2"), (2, "micro_batch_size=1"), (1, "model")])
def test_out_of_memory_fix_suggests_a_smaller_micro_batch_or_model(size: int, suggested: str) -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError()):
        result = explain(error, Path("mine.py"), "update 3", size)
        assert result is not None
        assert suggested in result.problems[0].fix


def test_out_of_memory_fix_names_the_allocating_line(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text("def loss(act):\n    act()\n")
    functions = functions_of(own.read_text(), own)

    def allocate() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        functions["loss"](allocate)
    result = explain(caught.value, own, "update 3", 4)
    assert isinstance(result, DeviceMemoryError)
    first, line = result.problems[0].fix.split("\n")
    assert "micro_batch_size=2" in first
    assert {"mine.py:2", "act()"} <= {*line.split()}


def test_causes_and_grouped_exceptions_are_shown_with_lines(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(
        "def first():\n    raise KeyError('inner')\n\n\ndef loss():\n    errors = []\n    try:\n        first()\n"
        "    except KeyError as error:\n        errors.append(error)\n        cause = error\n"
        "    raise ExceptionGroup('several', errors) from cause\n"
    )
    functions = functions_of(own.read_text(), own)
    with pytest.raises(ExceptionGroup) as caught:
        functions["loss"]()
    result = explain(caught.value, own, "update 3", 4)
    assert isinstance(result, TaskFault)
    assert result.problems[0].where == f"{own}:12"
    lines = result.problems[0].fix.split("\n")
    assert [line.split(":")[1].split()[0] for line in lines if "mine.py" in line] == ["12", "8", "2", "8", "2"]
    assert len([line for line in lines if "inner" in line and "raise" not in line]) == 2


def test_the_error_names_the_sample_that_exceeds_host_memory() -> None:
    error = DataError("sample 7 cannot be read: MemoryError")
    error.__cause__ = MemoryError()
    result = explain(error, Path("mine.py"), "update 3", 4)
    assert isinstance(result, HostMemoryError)
    assert "sample 7" in str(result)


def _use_graph_twice() -> None:
    loss = torch.ones(2, requires_grad=True).exp().sum()
    loss.backward()
    loss.backward()


def _change_tensor_in_place() -> None:
    weight = torch.ones(2, requires_grad=True)
    result = weight.exp()
    result += 1
    result.sum().backward()


def _use_undefined_gradient() -> None:
    x = torch.arange(4.0, requires_grad=True)
    hermitian = torch.complex(x[:, None] + x, x[:, None] - x)
    torch.linalg.eigh(hermitian).eigenvectors.real.sum().backward()


@pytest.mark.parametrize("mistake", [_use_graph_twice, _change_tensor_in_place, _use_undefined_gradient])
def test_an_autograd_error_is_attributed_to_the_task(mistake: Callable[[], None]) -> None:
    with pytest.raises(RuntimeError) as caught:
        mistake()
    assert isinstance(explain(caught.value, Path("mine.py"), "update 3", 4), TaskFault)


class Own(Task):
    def loss(self, model: object, batch: object) -> object:  # type: ignore[override]
        return None


def test_definitions_are_located_only_in_the_task_file() -> None:
    here = Path(__file__)
    task = Own()
    file, _, line = locate_definition(task.loss, here).rpartition(":")
    assert (file, int(line) > 1) == (str(here), True)
    assert locate_definition(wraps(task.loss)(lambda: None), here) == locate_definition(task.loss, here)
    assert locate_definition(task.sample_weights, here) == str(here)
    assert locate_definition(torch.nn.Linear.forward, here) == str(here)


def test_the_error_for_a_relative_import_names_the_search_path(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    for name, statement in (("__init__", ""), ("data", ""), ("task", "from .data import make")):
        (tmp_path / f"{name}.py").write_text(statement)
    with pytest.raises(ImportError) as raised:
        runpy.run_path(str(file))
    fault = explain(raised.value, file, "the file", 1)
    assert isinstance(fault, TaskFault)
    assert "PYTHONPATH" in str(fault)
