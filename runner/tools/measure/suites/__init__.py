"""The suites of `accel-run benchmark`. Each is declared here and implemented by `run` in the module of its name.

This file imports nothing of accel-run, because shell completion and help read it and must start fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SuiteDeclaration:
    """A suite.

    answers     description for the help: what the suite compares
    options     key=value arguments with their defaults
    positional  arguments without a value
    """

    answers: str
    options: Mapping[str, str] = field(default_factory=dict)
    positional: tuple[str, ...] = ()


MODES = ("isolated", "cumulative")
PARTS = ("matmul", "copies")
SUITES: Mapping[str, SuiteDeclaration] = {
    "ladder": SuiteDeclaration(
        "techniques, alone and combined",
        # modes: the default is all, or isolated if techniques are named as arguments
        {"techniques": "all", "modes": "", "steps": "50", "batch": "", "rounds": "60"},
        ("all", "init", "reset", "clean", "plots"),  # besides the names of techniques
    ),
    "machine": SuiteDeclaration(
        "the limits of the machine: matrix products, memory, copies",
        positional=PARTS,
    ),
    "batch": SuiteDeclaration(
        "micro-batch sizes: samples per second",
        # micro: sizes, auto = the global batch halved repeatedly. global: samples per update, same = as in the settings
        {"micro": "auto", "global": "same"},
    ),
    "loader": SuiteDeclaration(
        "data loader settings: workers, prefetch, pinned memory, cache",
        # workers: numbers or `thread`; auto: according to the number of cores. pin: auto tries both if there is a GPU
        {"workers": "auto", "prefetch": "2,4", "pin": "auto", "cache": "none,memory,device"},
    ),
    "before_after": SuiteDeclaration(
        "a plain training loop and the settings that accel-run chooses",
        {"biggest": "4096"},  # largest batch to try, in samples; 0: none
    ),
    "parallelism": SuiteDeclaration(
        "one rank, equal shares, measured shares, pipeline",
        # updates: minimum number of updates in a block
        {"forms": "single,equal,shares,pipeline", "ranks": "2", "updates": "20"},
    ),
    "devices": SuiteDeclaration(
        "CPU and GPU, or numbers of threads: by phase, batch and sample size",
        # devices: two of cpu, cpu:THREADS, cuda, cuda:N, mps; auto: CPU and GPU; without a GPU, 1 and all threads
        # batches: samples per update; sides: sides of cubes in pixels
        {"devices": "auto", "batches": "2,4,8,16", "sides": "32,64,96,128"},
    ),
}
