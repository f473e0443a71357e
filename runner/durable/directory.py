"""The run directory: its name, its lock, and the paths of its contents."""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import secrets
import shlex
import socket
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from runner.base.errors import (
    AccelRunError,
    CannotCreate,
    ConfigError,
    Exit,
    InputMissing,
    Problem,
    RunInUse,
    SecurityRefusal,
    StorageError,
)
from runner.base.paths import is_elsewhere, path_for_user
from runner.base.text import abbreviate
from runner.config.request import format_override
from runner.durable import files
from runner.durable.record_files import read_record
from runner.durable.run_identity import RunIdentity, read_identity
from runner.durable.system_errors import storage_errors
from runner.host.dirfd import current_path, pin, unpin

LAST = "last"  # alias: the newest run
SWEEP = "sweep.json"  # in the folder of a sweep, which is beside the runs and contains those of its trials


class RunDirectory:
    """The folder of one run. The owner of its lock may write any file, others only files that can be recreated.

    Created by `create_or_open` (takes the lock), `join` (a rank whose launcher has the lock) or `find` (read-only).

    path   absolute: a task may change the working directory
    shown  path as given by the user; absolute if the working directory of this process is not the user's
    is_new the folder did not exist before
    lost_lock_file  the folder existed, but its lock file had been removed
    skipped  names of newer runs that `last` skipped
    """

    skipped: tuple[str, ...] = ()
    lost_lock_file = False

    def __init__(self, path: Path, *, writable: bool, lock: files.Lock | None = None, is_new: bool = False) -> None:
        self.path, self.shown = path.absolute(), path_for_user(path)
        self.name = path.name
        self.writable = writable
        self.is_new = is_new
        self._lock = lock
        self.config = self.path / "config.yaml"  # composed configuration
        self.command = self.path / "command.sh"  # reproduces the run
        self.plan = self.path / "plan.json"  # derived values with their reasons
        self.environment = self.path / "environment.json"  # hardware and versions
        self.run_json = self.path / "run.json"  # identity and state of the run
        self.metrics = self.path / "metrics.jsonl"  # a line per logged update: the source of displays and trackers
        self.gpu_csv = self.path / "gpu.csv"  # samples of the device monitor
        self.events = self.path / "events.jsonl"  # starts, saves, stops, errors
        self.console = self.path / "console.log"  # terminal output
        self.error = self.path / "error.json"  # the error that ended the run, if any
        self.report = self.path / "report.html"
        self.checkpoints = self.path / "checkpoints"
        self.predictions = self.path / "predictions"  # results of inference
        self.plots = self.path / "plots"

    @classmethod
    def create_or_open(cls, root: Path, name: str, *, for_sweep: bool = False) -> RunDirectory:
        """Create or open and lock the folder `name` in `root`, and remove incomplete files that a crash left.

        Existing names in it are synced, in case the process that created them was killed before it could.

        for_sweep  it contains the runs of a sweep and is not a run itself
        Raises ConfigError for an invalid name, or if a run would have the name of a sweep or vice versa;
        SecurityRefusal if the folder is a link; RunInUse if another process has the lock; AccelRunError with exit code
        77 if permission is missing; and CannotCreate if the folder cannot be created for another reason.
        """
        check_run_name(name)
        path = (root / name).absolute()
        if is_run(path) if for_sweep else is_sweep(path):
            what = "is the name of a run" if for_sweep else "is the name of a sweep, which train -m resumes"
            raise ConfigError(Problem(what, f"run={name}", "use another run=NAME"))
        try:
            with storage_errors("access", path):
                link_target = path.resolve() if path.is_symlink() else None
            if link_target is not None:
                raise SecurityRefusal(
                    f"the run directory must be in {root}, but is a link to {link_target}",
                    where=f"run={name}",
                    fix="remove the link, or set output_root to the parent folder of its target, and run to the name of"
                    " its target",
                )
            is_new = not files.exists(path)
            files.make_directory(path)
            with storage_errors("open", path):
                pin(path)
            has_lock = files.exists(path / _LOCK)  # before Lock creates it
            lock = files.Lock(path / _LOCK, json.dumps(_lock_note()))
        except files.LockHeld as held:
            unpin(path)
            raise _in_use_error(name, held.note) from None
        except StorageError as error:
            unpin(path)
            raise _creation_error(error) from error
        run = cls(root / name, writable=True, lock=lock, is_new=is_new)
        run.lost_lock_file = not is_new and not has_lock
        try:
            files.sync_ancestors(path)
            files.remove_temporary_files(path)
            if not for_sweep:
                files.fsync_directory(run.subfolder("checkpoints"))  # its creator may have been killed before it synced
        except SecurityRefusal:
            run.release()
            raise
        except StorageError as error:
            run.release()
            raise _creation_error(error) from error
        return run

    @classmethod
    def join(cls, path: Path) -> RunDirectory:
        """Return the directory for a rank of the run, whose launcher holds the lock until the rank exits."""
        return cls(path, writable=True)

    @classmethod
    def find(cls, root: Path, run: str = LAST, *, created: RunDirectory | None = None) -> RunDirectory:
        """Open an existing run for reading: the newest ("last"), one in `root` by name, or one by path.

        Runs of a sweep in `root` are found by name too. "last" is the newest run with an update, so that a failed start
        does not hide the run before it; `skipped` of the result then lists the newer ones. If no run has an update,
        "last" is the newest one. Raises InputMissing with the existing names.

        created  run of this process; if it is new, it is not one of the existing runs
        """
        existing = list_runs(root)
        if created is not None and created.is_new:
            existing = [path for path in existing if path != root / created.name]
        if run == LAST:
            if not existing:
                raise InputMissing(f"there is no run in {root} yet", where="run=last", fix=_START_HINT)
            index = next((index for index, path in enumerate(existing) if has_update(path)), 0)
            newest = cls(existing[index], writable=False)
            newest.skipped = tuple(path.name for path in existing[:index])
            return newest
        candidates = (root / run, *(path for path in existing if path.name == run)) if _NAME.fullmatch(run) else ()
        for path in (*candidates, Path(run).expanduser()):
            if is_run(path):
                return cls(path.resolve() if path.name in ("", "..") else path, writable=False)
        what = f"there is no run {run!r} in {root}"
        if sweep := find_sweep(root, run):
            trials = [path.name for path in list_runs(sweep)]
            fix = f"use one of its runs, newest first: {abbreviate(trials, _MAX_SUGGESTIONS)}; " if trials else ""
            fix += "the command that started the sweep resumes it"
            num_runs = f"{len(trials)} run{'s' * (len(trials) != 1)} so far"
            raise InputMissing(f"{run} is a sweep with {num_runs}", where=f"run={run}", fix=fix)
        if _is_folder(Path(run).expanduser()):
            what = f"the folder {run} is not a run: it has none of {', '.join(_RUN_FILES)}"
        raise InputMissing(what, where=f"run={run}", fix=_suggest_runs(run, existing))

    def argument(self, output_root: str) -> str:
        """Return the argument that names this run in a command of the user.

        output_root  folder of the runs, as a setting
        """
        if is_elsewhere():
            return shlex.quote(format_override("run", str(self.path)))
        root = "" if output_root == "outputs" else f" output_root={shlex.quote(output_root)}"
        return f"run={self.name}{root}"

    @property
    def owner(self) -> RunIdentity:
        """Identity of the run, by which its checkpoints are recognized; what run.json lacks is unknown."""
        return read_identity(read_record(self.path), self.name)

    def write(self, name: str, data: bytes | str) -> Path:
        """Write `data` durably to the file `name`, a path inside this directory; return its path.

        Without the lock only `report.html` and files in `predictions`, `plots`, `profile`, `export` and `evaluations`
        can be written.
        Raises StorageError.
        """
        path = self._resolve(name)
        self.subfolder(*name.split("/")[:-1])
        files.atomic_write(path, data)
        return path

    def write_all(self, contents: Mapping[str, bytes | str]) -> None:
        """Write files as `write` does, with a single sync. Raises as it does."""
        paths = {self._resolve(name): data for name, data in contents.items()}
        for folder in dict.fromkeys(tuple(name.split("/")[:-1]) for name in contents):
            self.subfolder(*folder)
        files.atomic_write_all(paths)

    def _resolve(self, name: str) -> Path:
        parts = name.split("/")
        assert is_safe_path(name), f"must be a plain path inside the run, but is {name!r}"
        assert self.writable or parts[0] in _RECREATABLE, f"{name} is written by the process that holds the lock"
        return self.path.joinpath(*parts)

    def subfolder(self, *parts: str) -> Path:
        """Create the folder with these names inside the run and return its path.

        Raises SecurityRefusal for a link that leads outside, and StorageError.
        """
        path = self.path
        for part in parts:
            path /= part
            files.make_directory(path)
            if not files.is_plain_directory(path):
                raise SecurityRefusal("must be a folder of the run, but is a link", where=str(path), fix="remove it")
        return path

    def check_location(self, warn: Callable[[str], None]) -> None:
        """Check before each save that the folder exists and that no other process can write to it.

        The run continues to write to a moved folder, because its descriptor follows it. A removed lock file is created
        again.

        warn  called with a message about each of these, each time
        Raises StorageError if the folder was deleted, RunInUse if another process has its lock.
        """
        if self._lock is None:
            return
        location = current_path(self.path)
        if location is None:
            what = "the run directory was deleted while the run was writing to it: nothing can be saved any more"
            raise StorageError(what, where=str(self.shown), fix="run the same command again")
        if location != self.path:
            warn(f"the run directory was moved to {location}: the run continues to write there")
        if not self._lock.holds(self.path / _LOCK):
            try:
                lock = files.Lock(self.path / _LOCK, json.dumps(_lock_note()))
            except files.LockHeld as held:
                raise _in_use_error(self.name, held.note) from None
            self._lock.release()
            self._lock = lock
            warn(f"{_LOCK} of the run directory was removed and is recreated: without it, two processes could write")

    def discard(self) -> None:
        """Remove the folder of a new run that failed to start, with all its content. Raises StorageError."""
        assert self.is_new, f"{self.path} existed before"
        for name in files.list_names(self.path):
            files.remove(self.path / name)
        unpin(self.path)  # a folder cannot be removed as "."
        files.remove(self.path)

    def release(self) -> None:
        """Release the lock; a no-op the second time."""
        if self._lock is not None:
            unpin(self.path)
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def generate_run_name(task: str) -> str:
    """Return a new run name such as `gpt-20260131-142530-ab12cd`: task, local time, and six random digits."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", task).strip("._-")[: _MAX_NAME_LENGTH // 2] or "run"
    return f"{plain}-{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def list_runs(root: Path, *, include_sweeps: bool = True) -> list[Path]:
    """Return the runs in `root`, including those of its sweeps, last modified first."""
    paths = [root / name for name in files.list_names(root)]
    if include_sweeps:
        paths += [sweep / name for sweep in paths if is_sweep(sweep) for name in files.list_names(sweep)]
    modified = sorted(((last_modified(path), path) for path in paths), reverse=True)
    return [path for time, path in modified if time > 0 or is_run(path)]


def list_sweeps(root: Path) -> list[Path]:
    """Return the folders of the sweeps in `root`."""
    return [root / name for name in files.list_names(root) if is_sweep(root / name)]


def find_sweep(root: Path, name: str) -> Path | None:
    """Return the folder of a sweep, in `root` by name or by path; None if it is not one."""
    return next((path for path in (root / name, Path(name).expanduser()) if is_sweep(path)), None)


def is_sweep(path: Path) -> bool:
    """Return whether the folder contains the runs of a sweep."""
    try:
        return _is_folder(path) and (path / SWEEP).exists()
    except OSError:
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # name too long, or no permission
        return False


def is_run(path: Path) -> bool:
    """Return whether the folder is a run directory."""
    try:
        return _is_folder(path) and any((path / name).exists() for name in _RUN_FILES)
    except OSError:
        return False


def last_modified(path: Path) -> float:
    """Return the last modification time of run.json or metrics.jsonl in `path`, 0 if neither exists."""
    time = 0.0
    for name in ("run.json", "metrics.jsonl"):
        try:
            time = max(time, (path / name).stat().st_mtime)
        except OSError:
            continue
    return time


def has_update(path: Path) -> bool:
    """Return whether the run in `path` has completed an update, even if it has written no row of metrics yet."""
    if files.read_last_row(path / "metrics.jsonl"):
        return True
    try:
        if any(name.startswith("update-") for name in files.list_names(path / "checkpoints")):
            return True
    except StorageError:
        return False
    return any(row.get("kind") == "first update" for row in files.read_rows(path / "events.jsonl"))


def is_run_name(name: str) -> bool:
    """Return whether the name is valid for a run."""
    return name != LAST and _NAME.fullmatch(name) is not None


def is_safe_path(name: str) -> bool:
    """Return whether the path is valid for a file in a run: letters, digits, '.', '_' and '-' between slashes."""
    return all(_NAME.fullmatch(part) and len(part) <= _MAX_NAME_LENGTH for part in name.split("/"))


def check_run_name(name: str) -> None:
    """Raise ConfigError if the name is not valid for a run."""
    if name == LAST:
        what, fix = "the name 'last' is reserved for the newest run", "choose another name"
    elif not _NAME.fullmatch(name):
        what = (
            "a run name may contain only letters, digits, '.', '_' and '-', and must begin with a letter or digit, but"
            f" is {name!r}"
        )
        suggestion = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")
        fix = f"use run={suggestion or 'first-try'}"
    elif len(name) > _MAX_NAME_LENGTH:
        what = f"a run name must have at most {_MAX_NAME_LENGTH} characters, but has {len(name):,}"
        fix = f"use, for example, run={name[:20]}"
    else:
        return
    raise ConfigError(Problem(what, where=f"run={name}", fix=fix))


def _lock_note() -> dict[str, object]:
    started = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": started}


def _in_use_error(name: str, note: str) -> RunInUse:
    try:
        holder = json.loads(note)
        pid, host, started = int(holder["pid"]), str(holder["host"]), str(holder["started"])
        holder_text = f"process {pid} on {host} since {started}"
    except (ValueError, KeyError, TypeError):  # the lock's owner has not written it yet
        holder_text = "another process"
    return RunInUse(
        f"the run directory is in use by {holder_text}",
        where=f"run={name}",
        fix="wait until it has finished, stop it, or use another run=NAME",
    )


def _creation_error(error: StorageError) -> AccelRunError:
    problem = error.problems[0]
    what = f"the run directory cannot be created: {problem.what}"
    error_number = error.__cause__.errno if isinstance(error.__cause__, OSError) else None
    if error_number in (errno.EACCES, errno.EPERM):
        permission_error = AccelRunError(
            what, where=problem.where, fix="set output_root to a folder that you may write to"
        )
        permission_error.exit_code = Exit.PERMISSION
        return permission_error
    if error.exit_code != StorageError.exit_code:  # a system limit, which applies to any other folder, too
        return error
    return CannotCreate(what, where=problem.where, fix=problem.fix or "set output_root to another folder")


def _suggest_runs(run: str, existing: list[Path]) -> str:
    if not existing:
        return f"there are no runs yet; {_START_HINT}"
    names = [path.name for path in existing]
    close = difflib.get_close_matches(run, names, n=1)
    return (
        f"did you mean {close[0]}? " if close else ""
    ) + f"runs, newest first: {abbreviate(names, _MAX_SUGGESTIONS)}"


# Names in predictions/ that inference uses itself; predictions of a task must have other names.
INCOMPLETE = "incomplete"  # folder for the parts of tables
INFERENCE_FILES = re.compile(rf"summary\.json|{INCOMPLETE}|(gpu|monitor|stacks)(-rank\d+)?\.(csv|json|txt)")
_LOCK = ".lock"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_NAME_LENGTH = 200  # systems allow 255, and the runs of a sweep are named NAME-1, NAME-2, ...
_RUN_FILES = ("run.json", "metrics.jsonl", "config.yaml", "checkpoints")
_RECREATABLE = frozenset({"report.html", "predictions", "plots", "profile", "export", "evaluations"})
_START_HINT = "start one with: accel-run train"
_MAX_SUGGESTIONS = 10
