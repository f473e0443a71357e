"""accel-run: the user specifies what to train, and the program decides how to execute it on the available devices.

Importing this package is cheap: torch is loaded when the first name that needs it is accessed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.version import __version__

__all__ = [
    "Context",
    "Fit",
    "FunctionLayer",
    "GPUStats",
    "Gather",
    "Hook",
    "PipelineParallel",
    "Prediction",
    "Progress",
    "Run",
    "SampleNoise",
    "Task",
    "Wants",
    "__version__",
    "auto_parallelize",
    "evaluate",
    "open_run",
    "per_sample_noise",
    "sample_rng",
    "train",
]

if TYPE_CHECKING:
    from runner.api import Run, evaluate, open_run, train
    from runner.auto_parallel import PipelineParallel, auto_parallelize
    from runner.base.noise import SampleNoise, per_sample_noise
    from runner.base.task import Context, Fit, FunctionLayer, Gather, Prediction, Progress, Task, sample_rng
    from runner.engine.hooks.hook import Hook, Wants
    from runner.monitor.gpu_stats import GPUStats


class _TasksOfCheckout:
    """Finds the package `runner.tasks` in a checkout, where the folder tasks/ is next to this package.

    In a wheel, tasks/ is inside this package. In both cases its module name, `runner.tasks`, does not conflict with a
    folder `tasks` of the user. Adding the folder of the checkout to `__path__` instead would also make `runner.tests`
    and `runner.runner`, a second copy of this package, importable.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != f"{__name__}.tasks" or path is None:
            return None
        return PathFinder.find_spec(name, [str(Path(folder).parent) for folder in path])


if not (Path(__file__).parent / "tasks").is_dir():
    sys.meta_path.append(_TasksOfCheckout)


def __getattr__(name: str) -> Any:
    if name in ("Context", "Fit", "FunctionLayer", "Gather", "Prediction", "Progress", "Task", "sample_rng"):
        from runner.base import task

        return getattr(task, name)
    if name in ("Run", "evaluate", "open_run", "train"):
        from runner import api

        return getattr(api, name)
    if name in ("Hook", "Wants"):
        from runner.engine.hooks import hook

        return getattr(hook, name)
    if name in ("SampleNoise", "per_sample_noise"):
        from runner.base import noise

        return getattr(noise, name)
    if name in ("PipelineParallel", "auto_parallelize"):
        from runner import auto_parallel

        return getattr(auto_parallel, name)
    if name == "GPUStats":
        from runner.monitor.gpu_stats import GPUStats

        return GPUStats
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
