"""Load the examples of docs/examples for a plain loop, or train them with the command, optionally with faults."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.base.task import Context
from runner.durable.checkpoint import load, newest_valid
from tests.forkserver import ForkServer

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
ON_CPU = "run=mine device=cpu monitor=off dataloader.num_workers=0"
FAULT_POINT = """
    def begin_update(self, progress):
        from tests.faults.ending import reached

        reached('update', progress.update + 1)
"""


def build(name: str, seed: int) -> Any:
    """Return the task of an example."""
    return module_of(name).build(Context(seed, None, Path("unused")))


def module_of(name: str) -> Any:
    """Return the module of an example."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018 - for mypy
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(
    server: ForkServer,
    folder: Path,
    name: str,
    args: str,
    faults: tuple[dict[str, Any] | None, ...] = (None,),
    *,
    point: str = FAULT_POINT,
) -> tuple[dict[str, Tensor], Path]:
    """Train an example on the CPU, once per fault (None: without a fault). Return its weights and its run directory.

    The last class of the example, its task, gets a fault point in each update.

    point  code with the fault point, appended to the example
    """
    (folder / f"{name}.py").write_text((EXAMPLES / f"{name}.py").read_text(encoding="utf-8") + point)
    for fault in faults:
        env = {"IMPORT_FIRST": "tests.faults.ending", "FAULT": json.dumps(fault or {})}
        result = server.run(f"train --task {name}.py {ON_CPU} {args}", folder, env)
        assert result.code == (70 if fault else 0), result.err
    directory = folder / "outputs" / "mine"
    path = newest_valid(directory / "checkpoints")
    assert path is not None
    return load(path).tensors("model"), directory
