"""Load a task from a task file, or by the name of a built-in task or of one in an installed package."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from runner.axes.attention import count_calls
from runner.base.errors import AccelRunError, ConfigError, Problem, TaskFault
from runner.base.packages import check_installed
from runner.base.paths import cache_folder
from runner.base.task import Context, Task
from runner.config.custom_options import packaged_task_module
from runner.config.option_table import import_packaged, load_file
from runner.config.options import task_source
from runner.config.task_file import find_changed_declarations
from runner.distributed.deferred_init import DeferredInit
from runner.distributed.parallel import Parallel
from runner.distributed.world import World
from runner.engine.contract.batch_dependent_calls import BatchDependentCalls
from runner.engine.contract.contract_checks import (
    Number,
    check_members,
    describe_value,
    expand_metrics,
    validate_loss,
    validate_metrics,
)
from runner.engine.contract.error_diagnosis import explain, locate_definition
from runner.engine.contract.lora import make_adapter
from runner.plan.run_plan import Plan
from runner.tensors.global_rng import seed_everything


def load_task(plan: Plan) -> Task:
    """Build the task of the plan.

    Raises TaskFault, with the place in the task's file, if build() raises or returns something invalid; ConfigError if
    a declaration that was parsed differs in the executed file.
    """
    choice = plan.choices["task"]
    file = Path(plan.task_file) if plan.task_file else None
    source = task_source(choice.name, file)
    module = _import(choice.name, file)
    if changed := [*find_changed_declarations(vars(module), source)]:
        what = (
            f"{changed[0]} is read without executing the file, so it must be a literal, but code imports or changes it"
        )
        raise ConfigError(
            Problem(what, str(source), f"write all entries into {changed[0]} at the top level of the file")
        )
    path = plan.settings.data.path
    context = Context(
        seed=plan.settings.seed,
        data_path=Path(path).expanduser().absolute() if path else None,
        cache=cache_folder(),
    )
    with task_errors(source, "build()"):
        task = module.build(*_context_argument(module.build, context, source), **choice.options)
    if not isinstance(task, Task):
        what = f"build() must return a runner.Task, but returned {type(task).__name__}"
        fix = "class MyTask(Task): ...; def build(*, ...): return MyTask(...)"
        raise TaskFault(what, where=locate_definition(module.build, source), fix=fix)
    model = getattr(task, "model", None)
    if not isinstance(model, nn.Module):
        what = f"{type(task).__name__}.model must be a torch.nn.Module, not {describe_value(model)}"
        fix = "assign the module in __init__ of the task: self.model = ..."
        raise TaskFault(what, where=locate_definition(type(task), source), fix=fix)
    check_members(task, source)
    if hasattr(module, "OBJECTIVES") and type(task).objectives is Task.objectives and "objectives" not in vars(task):
        vars(task)["objectives"] = module.OBJECTIVES  # the class may be defined in another file
    make_adapter(plan.choices["adapter"]).add_to(task)
    return task


def check_packages(task: Task, uses: Iterable[str], source: Path) -> None:
    """Raise MissingPackage if a package that one of `uses` needs is not installed.

    uses  names of phases, or "infer"
    """
    with task_errors(source, "packages"):
        needed = {module: extra for use in uses for module, extra in task.packages.get(use, {}).items()}
    for module, extra in needed.items():
        check_installed(module, extra)


def _context_argument(build: Callable[..., Any], context: Context, source: Path) -> tuple[Context, ...]:
    """Return the positional arguments for build: none, or the context. Raises TaskFault for settings before `*`."""
    positional = [item for item in inspect.signature(build).parameters.values() if item.kind is not item.KEYWORD_ONLY]
    if len(positional) > 1 or any(item.default is not item.empty for item in positional):
        names = ", ".join(item.name for item in positional)
        what = f"the settings of build() must come after *, but {names} come before it"
        raise TaskFault(what, where=locate_definition(build, source), fix="def build(*, size: int = 64) -> Task:")
    return (context,) if positional else ()


class task_errors:  # noqa: N801 - used as a statement: with task_errors(file, "loss"):
    """Convert an exception from the task's code into a TaskFault that names the line in the task's file.

    allow             exceptions that are part of the contract, and are not converted
    micro_batch_size  for the advice after an out-of-memory error
    """

    def __init__(
        self,
        source: Path,
        what: str,
        allow: type[Exception] | tuple[type[Exception], ...] = (),
        *,
        micro_batch_size: int = 1,
    ) -> None:
        self.source, self.what, self.allow, self.micro_batch_size = source, what, allow, micro_batch_size

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, (AccelRunError, self.allow)):
            return
        fault = explain(error, self.source, self.what, self.micro_batch_size)
        if fault is not None:
            raise fault from error


class CheckedLoss:
    """Calls the task's loss or embedding, checks what it returns, and records operations of the first call.

    records_operations  whether to record the attention kernels and the calls that depend on the batch
    check               (returned value, method, source, sync=) -> checked value
    objective           name of the objective, for messages
    attention           (kind of call, kernel) -> number of calls in the first forward pass; empty if not recorded
    batch_dependent     file:line -> what depends on the batch there, see `BatchDependentCalls`; empty if not recorded
    first_call_context  context of the first call, such as one that detects changed attributes
    observe             receives the metrics that a loss returns as its third value
    """

    first_call_context: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(
        self,
        loss: Callable[..., Any],
        source: Path,
        *,
        records_operations: bool,
        check: Callable[..., Any] = validate_loss,
        objective: str = "",
    ) -> None:
        self.loss, self.source, self.records_operations = loss, source, records_operations
        self.check = partial(validate_loss, objective=objective) if objective else check
        self.returns_metrics = check is validate_loss
        self.checked = False
        self.observe: Callable[[Mapping[str, tuple[Number, Number]]], None] = _discard_metrics
        self.attention: dict[tuple[str, str], int] = {}
        self.batch_dependent: dict[str, str] = {}

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if self.checked:
            return self._check(self.loss(model, batch))
        answers: list[Any] = []
        with self.first_call_context():
            if self.records_operations:
                calls = BatchDependentCalls()

                def call_loss() -> None:
                    with calls:  # inside count_calls, whose mode would hide the caller's frame
                        answers.append(self.loss(model, batch))

                self.attention = count_calls(call_loss)
                self.batch_dependent = calls.found
            else:
                answers.append(self.loss(model, batch))
        answer = self._check(answers[0], sync=True)
        self.checked = True  # only after success: a first call that runs out of memory is repeated
        return answer

    def check_next_call(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        """Treat the next call as the first one, inside `context`; operations are not recorded again."""
        self.checked, self.records_operations, self.first_call_context = False, False, context

    def _check(self, answer: Any, *, sync: bool = False) -> Any:
        if self.returns_metrics and isinstance(answer, tuple) and len(answer) == 3:
            value = "the third value of loss()"
            metrics = expand_metrics(validate_metrics(answer[2], self.loss, self.source, value=value))
            for name in metrics.keys() & _RESERVED_METRICS:
                what = (
                    f"the third value of loss() must not contain {name}, because the metric train/{name} already exists"
                )
                raise TaskFault(what, where=locate_definition(self.loss, self.source), fix="choose another name")
            self.observe(metrics)
        return self.check(answer, self.loss, self.source, sync=sync)


_RESERVED_METRICS = {"loss", "grad_norm", "lr"}  # names of metrics that updates and objectives report themselves


def _discard_metrics(_: Mapping[str, tuple[Number, Number]]) -> None:
    """Discard additional metrics, for callers that report none."""


def _import(name: str, file: Path | None) -> ModuleType:
    package_module = packaged_task_module(name) if file is None else None
    if file is None and package_module is None:
        return importlib.import_module(f"runner.tasks.{name}.task")
    if package_module is not None:
        return import_packaged(package_module)
    with task_errors(task_source(name, file), "the file"):
        return load_file(task_source(name, file))


def build_task(plan: Plan, parallel: Parallel, world: World, loaded: Collection[str]) -> tuple[Task, list[str]]:
    """Seed the generators and build the task; return it with notes for the start report. A collective.

    loaded  names of tensors of the model that a checkpoint will replace

    With parallelism.init=meta, raises ConfigError if the task cannot be built without the values of its large tensors.
    """
    seed_everything(plan.settings.seed)
    if parallel.init == "full":
        return load_task(plan), []
    recording, task, why_not = DeferredInit(), None, ""
    try:
        with recording:
            task = load_task(plan)
        recording.replace_leaked(task.model)
    except Exception as error:  # an error that is not caused by deferred tensors is raised again below
        why_not = error.problems[0].what if isinstance(error, AccelRunError) else (str(error) or type(error).__name__)
        why_not = f"building the model without its large tensors failed: {why_not.splitlines()[0]}"
    results = world.gather([why_not, recording.digest()])
    why_not = next((reason for reason, _ in results if reason), "")
    if not why_not and any(result != results[0] for result in results):
        why_not = "the construction of the model differs between ranks"
    if task is not None and not why_not:
        from runner.distributed.shard_init import DeferredModel  # imports DTensors, which are slow to import

        parallel.deferred = DeferredModel(recording, loaded)
        return task, []
    if parallel.init == "meta":
        what = f"not possible: {why_not}"
        raise ConfigError(Problem(what, "parallelism.init=meta", "use parallelism.init=auto or full"))
    del recording, task
    seed_everything(plan.settings.seed)
    return load_task(plan), [f"each rank builds the whole model first: {why_not}"]
