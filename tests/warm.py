"""Warm-up of a process that forks accel-run commands, so that no fork repeats it."""

from __future__ import annotations

import gc
import importlib
from contextlib import suppress


def warm() -> None:
    """Import everything that a run imports and compose a configuration, without starting a thread."""
    import_all()
    import torch

    from runner.config.configuration import compose
    from runner.config.request import Request
    from tests.composed import composed

    torch.set_num_threads(1)
    composed()
    compose(Request(("updates=3", "device=cpu")))  # Hydra's parser initializes its grammar at first use: 0.1 s
    gc.collect()
    gc.freeze()  # else the first garbage collection of each fork writes to, and so copies, the shared pages


def import_all() -> None:
    """Import everything that a run imports, for this process and its forks."""
    for name in IMPORTED:
        importlib.import_module(name)
    for name in ("matplotlib.backends.backend_agg", "torch.profiler._cupti_monitor"):
        with suppress(ImportError):  # an optional dependency, and a module that torch 2.11 does not have
            importlib.import_module(name)


IMPORTED = (
    "hydra", "numpy.testing", "rich.live", "runner.cli", "runner.commands.explain", "runner.commands.inference",
    "runner.commands.plan", "runner.commands.runs", "runner.commands.status", "runner.commands.train",
    "runner.distributed.join", "runner.distributed.pipelined", "runner.engine.assemble", "runner.engine.infer",
    "runner.engine.opening", "runner.engine.run_screen", "runner.engine.session", "runner.engine.training",
    "runner.engine.pickle_import", "runner.engine.weights",
    "runner.forecast.demand", "runner.forecast.memory_forecast", "runner.forecast.stage_memory",
    "runner.launch.hangs", "runner.launch.local", "runner.launch.rank_process", "runner.launch.start",
    "runner.plan.planner", "runner.sweeps.sweep", "runner.tools.measure.facts",
    "safetensors.torch", "tests.waiting", "torch._dynamo",
)  # fmt: skip
