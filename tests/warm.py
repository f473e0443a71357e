"""Warm-up of a process that forks accel-run commands, so that no fork repeats it."""

from __future__ import annotations

import ctypes
import gc
import importlib
import re
from contextlib import suppress
from pathlib import Path

from tests.coarse_pictures import draw_coarsely


def warm() -> None:
    """Import everything that a run imports and compose a configuration, without starting a thread."""
    import_all()
    import torch

    from runner.base.paths import PACKAGE
    from runner.config.configuration import compose
    from runner.config.request import Request
    from runner.engine.sources.training_identity import fingerprint_code
    from runner.plan.overhead import get_overhead
    from tests.composed import composed

    torch.set_num_threads(1)
    composed()
    compose(Request(TYPICAL))  # fills the caches of Hydra's parser, which takes 0.1 s
    get_overhead("cpu", None)  # reads a file
    fingerprint_code(PACKAGE / "cli.py")  # examines all loaded modules
    freeze()


def freeze() -> None:
    """Prepare the memory of this process for forks, which then take less time."""
    gc.collect()
    gc.freeze()  # otherwise, the first garbage collection of each fork would copy shared pages by writing to them
    _use_huge_pages()


def _use_huge_pages() -> None:
    """Move the heap to huge pages, so that a fork copies fewer entries of the page table; needs Linux 6.1."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for begin, end in _HEAP.findall(Path("/proc/self/maps").read_text()):
        first, beyond = -(-int(begin, 16) // HUGE_PAGE) * HUGE_PAGE, int(end, 16) // HUGE_PAGE * HUGE_PAGE
        if first < beyond:
            libc.madvise(first, beyond - first, MADV_COLLAPSE)


def import_all() -> None:
    """Import everything that a run imports, for this process and its forks; they draw pictures coarsely."""
    for name in IMPORTED:
        importlib.import_module(name)
    for name in ("matplotlib.backends.backend_agg", "matplotlib.figure", "torch.profiler._cupti_monitor"):
        with suppress(ImportError):  # an optional dependency, and a module that torch 2.11 does not have
            importlib.import_module(name)
    with suppress(ImportError):
        draw_coarsely()


HUGE_PAGE = 2 << 20
MADV_COLLAPSE = 25  # linux/mman.h
_HEAP = re.compile(r"^(\w+)-(\w+) rw-p \w+ 00:00 0 +(?:\[heap\])?$", re.MULTILINE)

TYPICAL = (
    "updates=3", "device=cpu", "optimizer.lr=1e-3", "max_grad_norm=0.5", "run=some-name_1", "task.size=tiny",
    "checkpoint.every=5min", "checkpoint.keep=2", "evaluate.samples=null", "phases=[train]",
    "resume_allow=[optimizer.lr,seed]", "data.path=/some-path/file_1.x", "weights.strict=true",
    "output_root='out puts'", "optimizer.lr_scales={head: 0.1}", "++seed=1",
)  # fmt: skip

IMPORTED = (
    "hydra", "numpy.testing", "rich.live", "runner.cli", "runner.commands.explain", "runner.commands.inference",
    "runner.commands.plan", "runner.commands.runs", "runner.commands.status", "runner.commands.train",
    "runner.distributed.join", "runner.distributed.pipelined", "runner.engine.parts.assemble", "runner.trained.infer",
    "runner.config.yaml_text", "runner.engine.opening", "runner.engine.run_report", "runner.engine.process.run_screen",
    "runner.engine.session", "runner.engine.training",
    "runner.trained.pickle_import", "runner.engine.parts.weights",
    "runner.forecast.demand", "runner.forecast.memory_forecast", "runner.forecast.stage_memory",
    "runner.launch.hangs", "runner.launch.trained_ranks", "runner.launch.local", "runner.launch.rank_process",
    "runner.launch.start", "runner.launch.training_ranks",
    "runner.plan.planner", "runner.sweeps.sweep", "runner.tools.measure.facts",
    "safetensors.torch", "tests.waiting", "torch._dynamo", "torch.export._trace",
)  # fmt: skip
