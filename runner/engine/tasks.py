"""Loading a task: one of ours by name, or the file named on the command line; nobody else's code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from runner.axes.attention import observed_calls
from runner.base.configuration import task_source
from runner.base.errors import AccelRunError, TaskFault
from runner.base.places import cache_folder
from runner.base.schema import read_functions
from runner.base.task import Context, Task
from runner.engine.faults import fault_of
from runner.plan.plan import Plan


def load_task(plan: Plan) -> Task:
    """Build the task of the plan. Raises TaskFault, with the place in the task's file, if it raises."""
    choice = plan.choices["task"]
    file = Path(plan.task_file) if plan.task_file else None
    source = task_source(choice.name, file)
    module = _import(choice.name, file)
    path = plan.settings.data.path
    context = Context(
        seed=plan.settings.seed,
        data_path=Path(path).expanduser().absolute() if path else None,
        cache=cache_folder(),
    )
    given: tuple[Any, ...] = (context,) if read_functions(source)["build"].runner else ()
    with explained(source, "build"):
        task = module.build(*given, **choice.options)
    if not isinstance(task, Task):
        raise TaskFault(
            f"build must return a runner.Task, but returned {type(task).__name__}", where=str(source),
            fix="class MyTask(Task): ...; def build(*, ...): return MyTask(...)",
        )  # fmt: skip
    if not isinstance(getattr(task, "model", None), nn.Module):
        what = f"{type(task).__name__}.model must be a torch.nn.Module"
        raise TaskFault(what, where=str(source), fix="self.model = ...")
    return task


class explained:  # noqa: N801 - used as a statement: with explained(file, "loss"):
    """Turn an exception from the task's code into a TaskFault that names the line in the task's file."""

    def __init__(self, source: Path, what: str) -> None:
        self.source, self.what = source, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, AccelRunError) or not isinstance(error, Exception):
            return
        fault = fault_of(error, self.source, self.what)
        if fault is not None:
            raise fault from error


class CheckedLoss:
    """The task's loss, whose first answer is checked against the contract, and whose first call is watched.

    attention  kind of call -> kernel -> how often, in the first forward pass; empty where nothing was seen
    """

    def __init__(self, loss: Any, source: str, *, watch: bool) -> None:
        self.loss, self.source, self.watch = loss, source, watch
        self.checked = False
        self.attention: dict[tuple[str, str], int] = {}

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if self.checked:
            return self.loss(model, batch)
        self.checked = True
        answers: list[Any] = []
        if self.watch:
            self.attention = observed_calls(lambda: answers.append(self.loss(model, batch)))
        else:
            answers.append(self.loss(model, batch))
        answer = answers[0]
        total, count = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
        if not isinstance(total, Tensor) or total.numel() != 1 or not isinstance(count, (int, Tensor)):
            raise TaskFault(
                "loss must return (the sum over items as a scalar tensor, the number of items),"
                f" but returned {_described(answer)}",
                where=self.source,
                fix='return F.cross_entropy(logits, y, reduction="sum"), len(y)',
            )
        return answer


def _import(name: str, file: Path | None) -> ModuleType:
    if file is None:
        return importlib.import_module(f"runner.tasks.{name}.task")
    # Registered under its own name, and found from its own folder, so that data workers can import it too.
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise TaskFault("is not a Python file", where=str(file))
    if file.stem in sys.modules and getattr(sys.modules[file.stem], "__file__", None) != str(file):
        raise TaskFault(
            f"has the name of a module in use, {file.stem}", where=str(file), fix=f"call it my_{file.stem}.py"
        )
    sys.path.insert(0, str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    with explained(file, "the file"):
        spec.loader.exec_module(module)
    return module


def _described(answer: Any) -> str:
    if isinstance(answer, Tensor):
        return f"a tensor of shape {tuple(answer.shape)}"
    if isinstance(answer, tuple):
        return f"({', '.join(_described(item) for item in answer)})"
    return type(answer).__name__
