"""Set torch's global backend flags during a run: kernel search, determinism, threads.

Keys that several options share:

threads  CPU threads per rank; auto: PyTorch's default or, if smaller, the container's CPU quota, divided by the number
         of ranks that share these cores
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Literal

import torch

from runner.base.values import Threads
from runner.host.resources import granted_cores


def default(num_sharing: int, *, threads: Literal["auto"] | Threads = "auto") -> AbstractContextManager[None]:
    """Use torch's defaults: no kernel search, nondeterministic kernels allowed."""
    return _set_flags(num_sharing, threads)


def auto(num_sharing: int, *, threads: Literal["auto"] | Threads = "auto") -> AbstractContextManager[None]:
    """Let the plan choose: `fast` on a GPU for a model with convolutions whose shapes repeat, else `default`."""
    return default(num_sharing, threads=threads)


def fast(num_sharing: int, *, threads: Literal["auto"] | Threads = "auto") -> AbstractContextManager[None]:
    """Let cuDNN benchmark its convolution kernels for each new input shape and use the fastest.

    Worthwhile if shapes repeat; every new shape costs a search. Results may differ between runs in the last bits.

    Source: torch.backends.cudnn.benchmark.
    """
    return _set_flags(num_sharing, threads, benchmark=True)


def deterministic(
    num_sharing: int,
    *,
    warn_only: bool = False,
    threads: Literal["auto"] | Threads = "auto",
) -> AbstractContextManager[None]:
    """Use deterministic kernels only, so that repeated runs on one machine are bitwise equal.

    warn_only  warn about an operation without a deterministic kernel instead of stopping
    threads    CPU threads per rank; auto: PyTorch's default or, if smaller, the container's CPU quota, divided by the
               number of ranks that share these cores.
               The order of additions depends on this number, so it must be the same for all compared runs
    Sets CUBLAS_WORKSPACE_CONFIG, which cuBLAS reads when it is initialized, so the context must be entered before the
    first matrix product on a GPU.
    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    return _set_flags(num_sharing, threads, deterministic=True, warn_only=warn_only)


@contextmanager
def _set_flags(
    num_sharing: int,
    threads: Literal["auto"] | int,
    *,
    benchmark: bool = False,
    deterministic: bool = False,
    warn_only: bool = False,
) -> Iterator[None]:
    """Set all backend flags inside the context and restore them on exit. Does not initialize CUDA."""
    with ExitStack() as restore:
        cudnn = torch.backends.cudnn
        restore.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
        restore.callback(setattr, cudnn, "deterministic", cudnn.deterministic)
        cudnn.benchmark, cudnn.deterministic = benchmark, deterministic
        was_deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic or was_deterministic:  # the call imports Inductor, so skip it if not needed
            restore.callback(
                torch.use_deterministic_algorithms,
                was_deterministic,
                warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        if deterministic and os.environ.get(_CUBLAS) not in _REPRODUCIBLE_WORKSPACES:
            restore.callback(_set_environment, _CUBLAS, os.environ.get(_CUBLAS))
            os.environ[_CUBLAS] = _REPRODUCIBLE_WORKSPACES[0]
        restore.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(_threads_per_rank(num_sharing) if threads == "auto" else threads)
        yield


def _threads_per_rank(num_sharing: int) -> int:
    if "OMP_NUM_THREADS" in os.environ:  # already chosen by the user
        return torch.get_num_threads()
    # PyTorch counts the cores in the affinity mask. A quota grants less, and throttles all threads once it is used up.
    return max(1, min(torch.get_num_threads(), granted_cores() or torch.get_num_threads()) // num_sharing)


def _set_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_REPRODUCIBLE_WORKSPACES = (":4096:8", ":16:8")  # from NVIDIA's cuBLAS guide, section on reproducibility

BACKENDS: Mapping[str, Callable[..., AbstractContextManager[None]]] = {
    "default": default,
    "auto": auto,
    "fast": fast,
    "deterministic": deterministic,
}
