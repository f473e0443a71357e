"""Read the request that started a run from its files, to use, measure or resume the run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from runner.base.errors import DataError, SecurityRefusal
from runner.base.paths import parse_path
from runner.base.text import abbreviate
from runner.config.configuration import compose
from runner.config.request import Request, format_override, merge_overrides
from runner.durable.directory import LAST, RunDirectory, is_sweep
from runner.durable.record_files import read_record

PATH_KEYS = ("data.path", "weights", "weights.source")


@dataclass(frozen=True)
class RunRequest:
    """The settings that started a run.

    folder  working directory of the command, to which relative paths refer; None if unknown
    """

    overrides: tuple[str, ...]
    task_file: Path | None
    config_dir: Path | None
    folder: Path | None = None

    def request(self, given: Request, without: Iterable[str] = ("run", "resume")) -> Request:
        """Return the run's request without the settings of the keys `without`, overridden by `given`."""
        kept = [override for override in self.overrides if override.partition("=")[0] not in without]
        task_file, config_dir = given.task_file or self.task_file, given.config_dir or self.config_dir
        overrides = merge_overrides(kept, given.overrides)
        return replace(given, overrides=overrides, task_file=task_file, config_dir=config_dir)

    def with_absolute_paths(self) -> RunRequest:
        """Return the request for use from another directory, with paths made absolute if they exist in `folder`."""
        return replace(self, overrides=tuple(map(self._make_absolute, self.overrides)))

    def _make_absolute(self, override: str) -> str:
        key, _, value = override.partition("=")
        if self.folder is None or key not in PATH_KEYS:
            return override
        path = self.folder / parse_path(value.strip("'\""))
        return format_override(key, str(path)) if path.exists() else override


def find_run(request: Request, report: Callable[[str], object]) -> tuple[RunDirectory, Path]:
    """Return the run that the request names, by default the last one, and the folder that was searched.

    Only run= and output_root= are read, because other settings can be checked only once the task of the run is known.

    report  called with the newer runs that `last` skipped
    """
    overrides = tuple(
        override for override in request.overrides if override.partition("=")[0] in ("run", "output_root")
    )
    settings = compose(Request(overrides, None, request.config_dir)).settings
    directory = RunDirectory.find(settings.root, settings.run or LAST)
    report_skipped(directory, report)
    return directory, settings.root


def report_skipped(directory: RunDirectory, report: Callable[[str], object]) -> None:
    """Report newer runs that `last` skipped because they have no update."""
    if directory.skipped:
        runs = "newer runs" if len(directory.skipped) > 1 else "a newer run"
        report(f"last run: {directory.name}; skipped {runs} without an update: {abbreviate(directory.skipped)}")


def load_run_request(directory: RunDirectory, root: Path, request: Request) -> RunRequest:
    """Return the settings that started a run.

    root     folder whose runs are trusted
    request  if it names a task file, the task file of the run is ignored
    Raises DataError if run.json is damaged, SecurityRefusal if an untrusted run specifies which code to execute.
    """
    record = read_record(directory.path)
    origin, overrides = record.origin, record.origin.overrides
    paths = (origin.task_file, origin.config_dir, origin.folder)
    is_wrong = any(name.partition(".")[0] in vars(origin) for name in record.wrong)
    arguments = (*(overrides or ()), *(path for path in paths if path is not None))
    if is_wrong or overrides is None or origin.task is None or not all(map(_is_valid_argument, arguments)):
        raise DataError(
            f"the settings of run {directory.name} are unknown: run.json is damaged",
            where=str(directory.shown),
            fix="pass the settings again: accel-run train run=NAME ..., or accel-run advise task=NAME",
        )
    task_file, config_dir, folder = (Path(path) if path else None for path in paths)
    if request.task_file is None and task_file is not None:
        _refuse_foreign(task_file, directory, root)
    return RunRequest(overrides, task_file, config_dir, folder)


def _refuse_foreign(task_file: Path, directory: RunDirectory, root: Path) -> None:
    inside, folder = root.resolve(), directory.path.resolve().parent
    # The path and the target of a link must both be outside of the runs: a link may lead out of a downloaded folder.
    locations = (task_file.resolve(), Path(os.path.normpath(task_file.absolute())))
    if inside in (folder, folder.parent if is_sweep(folder) else None) and not any(
        location.is_relative_to(folder) for location in locations for folder in (inside, root.absolute())
    ):
        return
    raise SecurityRefusal(
        f"this run was made with task file {task_file}; a run folder alone never decides which code runs",
        where=str(directory.path),
        fix=f"read that file; if you trust it, use --task {shlex.quote(str(task_file))}",
    )


def _is_valid_argument(value: object) -> bool:
    try:
        return isinstance(value, str) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False
