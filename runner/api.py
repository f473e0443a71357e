"""Use accel-run from Python: the settings, the plan, the run directory and the results of the command line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.errors import AccelRunError, ConfigError, Exit, Problem
from runner.base.json_values import none_to_nan

if TYPE_CHECKING:
    from torch import nn

    from runner.durable.directory import RunDirectory


def train(*words: str, **settings: Any) -> Run:
    """Train as `accel-run train WORDS` does, and return the run.

    The run is a separate process, whose output appears in sys.stdout and sys.stderr. Its signal handlers and global
    switches of torch do not affect this one. KeyboardInterrupt lets it save and stop; it is raised again afterwards.

    Args:
        words: arguments of the command: "task=gpt", "--task", "my_task.py", "updates=200".
        settings: further settings; `__` stands for a dot: optimizer__lr=3e-4. Strings are taken literally.

    Raises:
        AccelRunError: with the message and the exit code of the command.
    """
    from runner.commands.arguments import read
    from runner.config.configuration import compose
    from runner.config.request import override_of
    from runner.durable.directory import default_name
    from runner.host.command_process import run_command

    given = build_argv(words, settings)
    if {"-m", "--multirun"} & set(given):
        fix = "call train in a loop, or in the objective of a search"
        raise ConfigError(Problem("train() trains one run, not a sweep", "-m", fix))
    configuration = compose(read(given).request)
    name = configuration.settings.run or default_name(configuration.choices["task"].name)
    ended = run_command(["train", *given, *([] if configuration.settings.run else [override_of("run", name)])])
    _check(ended.code, "train", allowed=(Exit.DONE, Exit.PREEMPTED))
    return Run([override_of("run", name), override_of("output_root", str(configuration.settings.root))])


def evaluate(*words: str, **settings: Any) -> dict[str, float]:
    """Evaluate as `accel-run evaluate WORDS` does; return the metrics, such as {"test/loss": 0.4}.

    Args:
        words: arguments of the command: a run ("last" by default) and settings, such as "first", "split=test".
        settings: further settings: split="test", checkpoint="best".

    A metric without items is NaN. Raises as `train` does.
    """
    from runner.host.command_process import run_command

    ended = run_command(["evaluate", *build_argv(words, settings), "--json"], relay_output=False)
    _check(ended.code, "evaluate", allowed=(Exit.DONE,))
    return none_to_nan(json.loads(ended.out)["metrics"])


def open_run(*words: str, **settings: Any) -> Run:
    """Return an existing run: the last one, or one by name or directory.

    Args:
        words: as for `accel-run status`: "first", "outputs/first", "output_root=DIR"; "--task", FILE for a run from
            elsewhere, whose directory alone never decides which code is executed.
        settings: further settings.

    Raises:
        InputMissing: if there is no such run.
    """
    return Run(build_argv(words, settings))


class Run:
    """A run: its metrics, its models and its directory. Reads the files of the run when asked, so it is never stale."""

    def __init__(self, words: list[str]) -> None:
        from runner.commands.arguments import read_of_a_run
        from runner.durable.run_request import find_run

        self._request = read_of_a_run(words)
        self._directory: RunDirectory = find_run(self._request, lambda _: None)[0]
        self.name, self.path = self._directory.name, self._directory.path.absolute()

    @property
    def state(self) -> str:
        """State of the run: running, finished, preempted, interrupted, failed, killed or unknown."""
        from runner.durable.record_files import read_record
        from runner.durable.run_state import state_of

        return state_of(read_record(self.path)).word

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last evaluation, such as {"val/loss": 0.4}; NaN for one without items."""
        evaluations = ({key: value for key, value in row.items() if key.startswith("val/")} for row in self.history())
        return next((values for values in reversed(list(evaluations)) if values), {})

    def history(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, oldest first; NaN for what was not measured."""
        from runner.durable.files import read_rows

        return [
            {key: math.nan if value is None else value for key, value in row.items()}
            for row in read_rows(self._directory.metrics)
        ]

    def model(self, checkpoint: str | int | None = None) -> nn.Module:
        """Return the model with the weights of a checkpoint, on the CPU, in float32 and eval mode.

        Args:
            checkpoint: "best", "last" or an update; None: the best one if there is one, else the last one.

        The averaged weights are loaded where evaluation uses them. This process runs the code of the task.

        Raises:
            InputMissing: if there is no such checkpoint.
            DataError: if it is damaged.
        """
        from runner.durable.checkpoint_choice import is_choice
        from runner.engine.trained_run import load_trained_model

        wanted = None if checkpoint is None else str(checkpoint)
        if wanted is not None and not is_choice(wanted):
            what = f"must be best, last or the number of an update, but is {wanted}"
            raise ConfigError(Problem(what, "checkpoint", 'use run.model("best")'))
        return load_trained_model(self._directory, self._request, wanted)

    def plot(self, *names: str) -> Any:
        """Return a matplotlib Figure of metrics by update, which a notebook shows.

        Args:
            names: columns of `history`, such as "val/loss"; none: all losses.
        """
        from runner.base.picture import COLORS, notebook_figure

        rows = self.history()
        known = list(dict.fromkeys(key for row in rows for key in row if "/" in key))
        chosen = names or [name for name in known if name.endswith("loss")]
        figure = notebook_figure()
        axes = figure.subplots()
        for number, name in enumerate(chosen):
            points = [(row["update"], row[name]) for row in rows if name in row]
            if not points:
                raise ConfigError(Problem(f"the run has no metric {name}", "plot", f"use one of {', '.join(known)}"))
            axes.plot(*zip(*points, strict=True), label=name, color=COLORS[number % len(COLORS)])
        axes.set_xlabel("update")
        axes.set_title(self.name)
        if chosen:
            axes.legend()
        return figure

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.state})"


def build_argv(words: tuple[str, ...], settings: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a call as those of the command line."""
    return [*words, *(f"{key.replace('__', '.')}={_text(value)}" for key, value in settings.items())]


def _text(value: Any) -> str:
    """Return a value as the command line takes it; a string stands for exactly this text."""
    from runner.config.request import override_of

    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, str | Path):
        return override_of("", str(value)).removeprefix("=")
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_text(str(key))}:{_text(item)}" for key, item in value.items()) + "}"
    return repr(value.item() if hasattr(value, "item") else value)  # a number, also one of NumPy or of a search


def _check(code: int, command: str, allowed: tuple[Exit, ...]) -> None:
    """Raise AccelRunError for a command that ended without a report: killed, or by an error of the program."""
    if code in tuple(map(int, allowed)):
        return
    how = (
        f"was ended by signal {code - 128}"
        if code > 128 and code != Exit.INTERRUPTED
        else f"ended with exit code {code}"
    )
    error = AccelRunError(f"accel-run {command} {how}", fix="its output above has the reason")
    error.exit_code = Exit(code) if code in tuple(map(int, Exit)) else Exit.SOFTWARE
    raise error
