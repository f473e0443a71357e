"""Global switches of torch are set in the context and restored after it, even after an error."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner.axes.backend import BACKENDS, default, deterministic, fast
from runner.base.errors import TaskFault
from runner.host import resources
from runner.host.cgroup import CgroupLimit
from runner.tensors.tf32 import float32_matmul


def switches() -> dict[str, Any]:
    return {
        "benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "threads": torch.get_num_threads(),
    }


@pytest.mark.parametrize("option", BACKENDS)
def test_every_switch_is_restored_even_after_an_error(option: str) -> None:
    before = switches()
    with pytest.raises(ZeroDivisionError), BACKENDS[option](1, threads=1):
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert switches() == before


def test_nested_contexts_restore_the_switches_of_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with deterministic(1, warn_only=True):
        before = switches()
        with fast(1):
            assert not torch.are_deterministic_algorithms_enabled()
            assert torch.backends.cudnn.benchmark
            assert not torch.backends.cudnn.deterministic
        assert switches() == before
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":0:0"


@pytest.mark.parametrize("option", BACKENDS)
def test_no_option_initializes_cuda(option: str) -> None:
    with BACKENDS[option](1):
        assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def test_deterministic_rejects_nondeterministic_operations() -> None:
    image = torch.randn(1, 1, 4, 4, requires_grad=True)
    pool = nn.MaxUnpool2d(2)
    pooled, where = nn.functional.max_pool2d(image, 2, return_indices=True)
    with deterministic(1), pytest.raises(RuntimeError, match="deterministic"):
        pool(pooled, where)
    with deterministic(1, warn_only=True), pytest.warns(UserWarning, match="deterministic"):
        pool(pooled, where)


def test_a_cublas_workspace_set_by_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic(1):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with deterministic(1):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize(
    ("quota", "num_ranks", "threads"), [(None, 1, 6), (4.5, 1, 4), (4.5, 2, 2), (0.5, 1, 1), (8, 2, 3)]
)
def test_threads_are_limited_by_the_cpu_quota(
    quota: float | None, num_ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    limit = None if quota is None else CgroupLimit(quota, Path("/"))
    monkeypatch.setattr(resources, "cgroup_cpu_limit", lambda root: limit)
    with default(1, threads=6), default(num_ranks):
        assert torch.get_num_threads() == threads


def test_ranks_on_one_machine_divide_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(resources, "cgroup_cpu_limit", lambda root: None)
    with default(1, threads=6):
        with default(2):
            assert torch.get_num_threads() == 3
        with default(100):
            assert torch.get_num_threads() == 1
        monkeypatch.setenv("OMP_NUM_THREADS", "6")
        with default(2):
            assert torch.get_num_threads() == 6


def tf32() -> tuple[str, bool, bool]:
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
    )


@pytest.mark.parametrize("level", ["highest", "high", "medium"])
@pytest.mark.parametrize("cudnn", [False, True])
def test_tf32_switches_are_set_and_restored(level: Any, cudnn: bool) -> None:
    before = tf32()
    with pytest.raises(ZeroDivisionError), float32_matmul(level, cudnn):
        assert tf32() == (level, cudnn, level != "highest")
        raise ZeroDivisionError
    assert tf32() == before


def test_tf32_contexts_can_be_nested() -> None:
    with float32_matmul("medium", cudnn=False):
        inner: AbstractContextManager[None] = float32_matmul("highest", cudnn=True)
        with inner:
            assert tf32() == ("highest", True, False)
        assert tf32() == ("medium", False, True)


def test_mixed_float32_switches_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def mix_switches() -> str:
        raise RuntimeError("PyTorch is checking whether allow_tf32 is enabled: mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mix_switches)
    with pytest.raises(TaskFault, match="must not be changed by a task"), float32_matmul("high", cudnn=True):
        pass
