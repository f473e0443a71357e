"""What a process that forks runs of accel-run does once, so that none of them does it again."""

from __future__ import annotations

import gc
import importlib
from contextlib import suppress


def warm() -> None:
    """All that a run imports is imported, a configuration has been composed, and no thread was started."""
    import_all()
    import torch

    from runner.config.configuration import compose
    from runner.config.request import Request
    from tests.composed import composed

    torch.set_num_threads(1)
    composed()
    compose(Request(("updates=3", "device=cpu")))  # Hydra's parser learns its grammar from the first words: 0.1 s
    gc.collect()
    gc.freeze()  # else each fork's first collection touches, and so copies, all that it shares with this process


def import_all() -> None:
    """What a run imports is imported, here and in the forks of this process."""
    for name in IMPORTED:
        importlib.import_module(name)
    with suppress(ImportError):  # an extra
        importlib.import_module("matplotlib.backends.backend_agg")


IMPORTED = (
    "hydra", "numpy.testing", "rich.live", "runner.cli", "runner.commands.explain", "runner.commands.inference",
    "runner.commands.plan", "runner.commands.runs", "runner.commands.status", "runner.commands.train",
    "runner.distributed.join", "runner.distributed.pipelined", "runner.engine.assemble", "runner.engine.infer",
    "runner.engine.opening", "runner.engine.run_screen", "runner.engine.session", "runner.engine.training",
    "runner.engine.pickle_import", "runner.engine.weights",
    "runner.forecast.demand", "runner.forecast.memory_forecast", "runner.forecast.stage_memory",
    "runner.launch.hangs", "runner.launch.local", "runner.launch.rank_process", "runner.launch.start",
    "runner.plan.planner", "runner.sweeps.sweep", "runner.tools.measure.facts",
    "safetensors.torch", "tests.waiting", "torch._dynamo", "torch.profiler._cupti_monitor",
)  # fmt: skip
