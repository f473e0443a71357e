"""`accel-run new FILE`: write a complete task template to a new file."""

from __future__ import annotations

import keyword
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from runner.commands.arguments import parse_arguments

HELP = """usage: accel-run new my_task.py

Writes a complete task of under 40 lines to one file: edit the model, the data and the loss.
Then run: accel-run train --task ./my_task.py

All features work without changes: precision, accumulation, checkpoints and resume, workers, sweeps, inference, export.
"""

TEMPLATE = '''\
"""A task of my own: accel-run train --task ./{name}"""

import torch
import torch.nn.functional as F
from torch import nn

from runner import Task

SETTINGS = {{"updates": 200, "global_batch_size": 64, "optimizer.lr": 0.01}}  # defaults; arguments override them


def build(*, hidden: int = 64, depth: int = 2) -> Task:  # each is a setting: task.hidden=128
    return {task}(hidden, depth)


class {task}(Task):
    def __init__(self, hidden, depth):
        layers = [nn.Linear(2, hidden), nn.ReLU()]
        for _ in range(depth - 1):
            layers += [nn.Linear(hidden, hidden), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(hidden, 2))

    def dataset(self, split):  # "train" or "val": anything with len() and [index]
        generator = torch.Generator().manual_seed({{"train": 0, "val": 1}}[split])
        points = torch.rand(4096 if split == "train" else 512, 2, generator=generator) * 2 - 1
        inside = (points.norm(dim=1) < 0.7).long()
        return torch.utils.data.TensorDataset(points, inside)

    def loss(self, model, batch):  # the SUM over the samples, and how many there were
        points, inside = batch
        return F.cross_entropy(model(points), inside, reduction="sum"), len(points)

    def predict_batch(self, model, batch):  # a table with a row per sample: predictions/val.csv
        points, _ = batch
        scores = model(points).softmax(1)
        return {{"inside": scores.argmax(1), "probability": scores[:, 1]}}

    def example(self):  # for export: the arguments of one call of the model, with two samples
        return (torch.zeros(2, 2),)
'''


def run(argv: list[str]) -> int:
    """Write the file; never overwrite an existing one."""
    from runner.base.errors import AccelRunError, CannotCreate, ConfigError, Exit, Problem

    arguments = parse_arguments(argv, positional=1)
    if not arguments.positional or arguments.request.overrides:
        raise ConfigError(Problem("needs exactly one file name", "new", "use accel-run new my_task.py"))
    path = Path(arguments.positional[0])
    if path.suffix != ".py" or not path.stem.isidentifier() or keyword.iskeyword(path.stem):
        raise ConfigError(
            Problem("must end in .py and have a valid Python module name", str(path), "use accel-run new my_task.py")
        )
    if path.stem in sys.stdlib_module_names or _is_taken(path):
        fix = f"use accel-run new {shlex.quote(str(path.with_name(f'my_{path.name}')))}"
        raise ConfigError(
            Problem("has the name of an existing Python module and would shadow it or be shadowed", str(path), fix)
        )
    task = "".join(arg.capitalize() for arg in path.stem.split("_"))
    if task in _TAKEN_CLASSES or not task.isidentifier() or keyword.iskeyword(task):
        task = f"My{task}"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.format(name=path.name, task=task))
    except FileExistsError:
        error = AccelRunError("already exists and was not changed", where=str(path), fix="choose another name")
        error.exit_code = Exit.CANNOT_CREATE
        raise error from None
    except OSError as error:
        fix = "choose an existing folder with write permission"
        raise CannotCreate(f"cannot be written: {error.strerror}", where=str(path), fix=fix) from error
    shown = shlex.quote(str(path) if path.is_absolute() else f"./{path}")
    print(f"wrote {path}; try it: accel-run train --task {shown}")
    return 0


_TAKEN_CLASSES = ("F", "Prediction", "Task")  # names that the template imports


def _is_taken(path: Path) -> bool:
    """Return whether Python has another module of this name."""
    spec = find_spec(path.stem)
    locations = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec else []
    return any(Path(location).parent.resolve() != path.parent.resolve() for location in locations if location)
