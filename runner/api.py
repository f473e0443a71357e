"""Use accel-run from Python: the settings, the plan, the run directory and the results of the command line."""

from __future__ import annotations

import json
import math
import os
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.errors import AccelRunError, ConfigError, Exit, InputMissing, Problem
from runner.base.json_values import none_to_nan
from runner.base.picture import COLORS, notebook_figure
from runner.base.secret import sanitize
from runner.commands.arguments import parse_arguments, parse_run_request
from runner.config.config_files import read_config_mapping
from runner.config.configuration import compose
from runner.config.custom_options import forget_parsed_files
from runner.config.option_table import executing_files
from runner.config.options import GROUPS
from runner.config.request import format_override, merge_overrides
from runner.durable.checkpoint_choice import is_choice
from runner.durable.directory import generate_run_name, has_update
from runner.durable.files import read_rows
from runner.durable.record_files import read_error, read_record
from runner.durable.run_request import find_run
from runner.durable.run_state import derive_state
from runner.host.command_process import run_command
from runner.records.run_record import ErrorRecord

if TYPE_CHECKING:
    from torch import nn

    from runner.durable.directory import RunDirectory


def train(*arguments: str | os.PathLike[str], **settings: Any) -> Run:
    """Train as `accel-run train ARGUMENTS` does, and return the run.

    The run is a separate process, whose output appears in sys.stdout and sys.stderr. Its signal handlers and its global
    torch settings do not affect the calling process. On KeyboardInterrupt the run saves a checkpoint and stops; the
    exception is then raised again.

    Args:
        arguments: arguments of the command: "task=gpt", "updates=200".
        settings: settings by name; `__` stands for a dot: optimizer__lr=3e-4. A string that is a number is parsed
            as a number, unless the type of the setting is string. `task` is required, unless the arguments or a
            configuration folder select it. It is a name or the path of a task file: task="gpt", task="./my_task.py".

    Raises:
        AccelRunError: if the command fails; contains its message and exit code.
    """
    argv = build_argv(arguments, settings)
    words = {Path(word.removeprefix("--task=")).expanduser().absolute() for word in argv}
    _refuse_recursion([file for file in executing_files if file in words])
    if any(isinstance(item, Run) for item in arguments):
        fix = "resume it with run=NAME and its settings, or start from its weights: train(task=..., weights=run)"
        raise ConfigError(Problem("train() does not accept a Run", "train", fix))
    if {"-m", "--multirun"} & set(argv):
        fix = "call train() once per combination of values"
        raise ConfigError(Problem("train() trains one run, not a sweep", "-m", fix))
    forget_parsed_files()
    configuration = compose(parse_arguments(argv).request)
    if configuration.request.task_file is None and "task" not in configuration.sources:
        # The command has a default task for a first try. In a notebook, it would start minutes of unwanted training.
        fix = 'pass your file, train(task="./my_task.py"), or the name of a task, train(task="gpt")'
        raise ConfigError(Problem("train() requires a task", "task", fix))
    name = configuration.settings.run or generate_run_name(configuration.choices["task"].name)
    result = run_command(["train", *argv, *([] if configuration.settings.run else [format_override("run", name)])])
    _raise_on_failure(result.code, "train", allowed=(Exit.DONE, Exit.PREEMPTED))
    return Run([format_override("run", name), format_override("output_root", str(configuration.settings.root))])


def evaluate(*arguments: str | os.PathLike[str], **settings: Any) -> dict[str, float]:
    """Evaluate as `accel-run evaluate ARGUMENTS` does; return the metrics, such as {"test/loss": 0.4}.

    Args:
        arguments: arguments of the command: a run ("last" by default) and settings, such as "first", "split=test".
        settings: settings by name: split="test", checkpoint="best"; task="./my_task.py" for a run directory that was
            copied here.

    A metric that was averaged over no items is NaN. Raises AccelRunError as `train` does.
    """
    _refuse_recursion(executing_files)  # the run, given by name, may use any of these files
    result = run_command(["evaluate", *build_argv(arguments, settings), "--json"], relay_output=False)
    _raise_on_failure(result.code, "evaluate", allowed=(Exit.DONE,))
    return none_to_nan(json.loads(result.out)["metrics"])


def open_run(*arguments: str | os.PathLike[str], **settings: Any) -> Run:
    """Return an existing run: the latest one, or the one with the given name or directory.

    Args:
        arguments: as for `accel-run status`: "first", "outputs/first", "output_root=DIR".
        settings: settings by name; task=FILE for a run directory that was copied here, because a run directory alone
            never decides which code is executed.

    Warns with RuntimeWarning if the run ended before its first update, and if newer runs are skipped because they have
    completed no update.

    Raises:
        InputMissing: if there is no such run.
    """
    forget_parsed_files()
    messages: list[str] = []
    run = Run(build_argv(arguments, settings), messages.append)
    if run.state in ("preempted", "interrupted", "failed", "killed") and not has_update(run.path):
        error = read_error(run.path) or ErrorRecord()
        cause = ": ".join(filter(None, (error.where, error.cause)))
        messages.append(f"run {run.name} ended before its first update ({run.state}){cause and f'; {cause}'}")
    for message in messages:
        warnings.warn(sanitize(message), RuntimeWarning, stacklevel=2)
    return run


class Run:
    """A run: its metrics, its models and its directory. Each access reads the files of the run again.

    A Run can be passed as an argument: evaluate(run), train(weights=run).
    """

    def __init__(self, arguments: list[str], report: Callable[[str], object] = lambda _: None) -> None:
        request = parse_run_request(arguments)
        self._directory: RunDirectory
        self._directory, root = find_run(request, report)
        self.name, self.path = self._directory.name, self._directory.path.absolute()
        # Store absolute paths now: the working directory, and which run is the latest one, may change later.
        root = root.absolute()
        run = self.name if self.path.parent == root else str(self.path)
        fixed = (format_override("output_root", str(root)), format_override("run", run))
        self._request = replace(request, overrides=merge_overrides(request.overrides, fixed))

    @property
    def state(self) -> str:
        """State of the run: running, finished, preempted, interrupted, failed, killed or unknown."""
        return derive_state(read_record(self.path)).word

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last evaluation, such as {"val/loss": 0.4}; NaN if averaged over no items."""
        evaluations = ({key: value for key, value in row.items() if key.startswith("val/")} for row in self.history())
        return next((values for values in reversed(list(evaluations)) if values), {})

    @property
    def settings(self) -> dict[str, Any]:
        """All settings as nested dictionaries, as in config.yaml: run.settings["optimizer"]["lr"].

        They are those of the process that last started or resumed the run. The name of the option of a group is under
        "option". Changing the dictionary does not change the run.

        Raises:
            InputMissing: if the run has not started.
        """
        file = self._directory.config
        if not file.is_file():
            what = f"run {self.name} has no config.yaml, because it has not started"
            raise InputMissing(what, where=str(self.path), fix="repeat the command that was to start it")
        return read_config_mapping(file, self.path)

    def history(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, oldest first; values that were not measured are NaN."""
        return [
            {key: math.nan if value is None else value for key, value in row.items()}
            for row in read_rows(self._directory.metrics)
        ]

    def model(self, checkpoint: str | int | None = None) -> nn.Module:
        """Return the model with the weights of a checkpoint, on the CPU, in float32 and eval mode.

        Args:
            checkpoint: "best", "last" or an update; None: the best one if there is one, else the last one.

        If the run evaluates averaged weights (such as an EMA), these are loaded. The code of the task runs in the
        calling process.

        Raises:
            InputMissing: if there is no such checkpoint.
            DataError: if the checkpoint is damaged.
        """
        drawn = random.getstate()
        from runner.trained.trained_run import load_trained_model

        random.setstate(drawn)  # importing rich draws from Python's global generator
        choice = None if checkpoint is None else str(checkpoint)
        if choice is not None and not is_choice(choice):
            what = f"must be best, last or the number of an update, but is {choice}"
            raise ConfigError(Problem(what, "checkpoint", 'use run.model("best")'))
        forget_parsed_files()
        return load_trained_model(self._directory, self._request, choice)

    def plot(self, *names: str) -> Any:
        """Return a matplotlib Figure of metrics by update, which a notebook shows.

        Args:
            names: columns of `history`, such as "val/loss"; without names, all losses are plotted.
        """
        rows = self.history()
        metrics = list(dict.fromkeys(key for row in rows for key in row if "/" in key))
        selected = names or [name for name in metrics if name.endswith("loss")]
        figure = notebook_figure()
        axes = figure.subplots()
        for number, name in enumerate(selected):
            points = [(row["update"], row[name]) for row in rows if name in row]
            if not points:
                raise ConfigError(Problem(f"the run has no metric {name}", "plot", f"use one of {', '.join(metrics)}"))
            axes.plot(*zip(*points, strict=True), label=name, color=COLORS[number % len(COLORS)])
        axes.set_xlabel("update")
        axes.set_title(self.name)
        if selected:
            axes.legend()
        return figure

    def arguments(self) -> list[str]:
        """Return the arguments that select this run."""
        return self._request.train_arguments()[1:]

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.state})"


def build_argv(arguments: Sequence[Any], settings: Mapping[str, Any]) -> list[str]:
    """Convert the arguments of a Python call to those of the command line. Raises ConfigError for unsupported types."""
    for argument in arguments:
        if not isinstance(argument, str | os.PathLike):
            what = f"must be a string or a path, but is of type {type(argument).__name__}"
            raise ConfigError(
                Problem(what, repr(argument)[:40], 'pass settings by name: train("task=gpt", updates=200)')
            )
    given = dict(settings)
    problems = [
        Problem(
            "is the name of an option; a dictionary of its keys is not supported",
            key,
            sanitize(f"use {', '.join(f'{key}__{name}={item!r}' for name, item in value.items())}"),
        )
        for key, value in given.items()
        if isinstance(value, Mapping) and key in GROUPS
    ]
    if problems:
        raise ConfigError(problems)
    task = given.get("task")
    is_file = isinstance(task, os.PathLike) or (isinstance(task, str) and task.endswith(".py"))
    if not is_file and not isinstance(task, str | None):
        what = f"must be a name or a path, but is of type {type(task).__name__}"
        raise ConfigError(Problem(what, "task", 'pass the file that defines build: task="./my_task.py"'))
    return [
        *(word for item in arguments for word in (item.arguments() if isinstance(item, Run) else [os.fspath(item)])),
        *(["--task", os.fspath(given.pop("task"))] if is_file else []),
        *(f"{key.replace('__', '.')}={_format_value(key, value)}" for key, value in given.items()),
    ]


def _refuse_recursion(files: Sequence[Path]) -> None:
    """Raise ConfigError if one of these task files makes the call while it is imported."""
    if files:
        what = "calls accel-run when it is imported, so each process that imports it would start another run"
        raise ConfigError(Problem(what, str(files[0]), 'call it under: if __name__ == "__main__":'))


def _format_value(key: str, value: Any) -> str:
    """Format a value for the command line; strings are quoted unless they are numbers or plain words."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, str | os.PathLike):
        return format_override("", os.fspath(value)).removeprefix("=")
    if isinstance(value, Sequence):
        return f"[{','.join(_format_value(key, item) for item in value)}]"
    if isinstance(value, Mapping):
        items = (f"{_format_value(key, str(name))}:{_format_value(key, item)}" for name, item in value.items())
        return "{" + ",".join(items) + "}"
    if hasattr(value, "tolist") and type(value.tolist()) is not type(value):  # a NumPy longdouble returns itself
        return _format_value(key, value.tolist())
    if not isinstance(value, int | float):
        what = f"must be a number, a string, a list or a dictionary, but is of type {type(value).__name__}"
        raise ConfigError(Problem(what, key.replace("__", ".")))
    return repr(value)


def _raise_on_failure(code: int, command: str, allowed: tuple[Exit, ...]) -> None:
    if code in tuple(map(int, allowed)):
        return
    outcome = (
        f"was terminated by signal {code - 128}"
        if code > 128 and code != Exit.INTERRUPTED
        else f"ended with exit code {code}"
    )
    error = AccelRunError(f"accel-run {command} {outcome}", fix="see its output above")
    error.exit_code = Exit(code) if code in tuple(map(int, Exit)) else Exit.SOFTWARE
    raise error
