"""Exit codes and the exceptions that end a run."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from runner.base.secret import find_secret_name


class Exit(IntEnum):
    """Stable exit codes, taken from sysexits.h where it defines a matching one."""

    DONE = 0
    USAGE = 64
    BAD_DATA = 65  # damaged data or checkpoint
    NO_INPUT = 66
    NO_DEVICE = 69
    SOFTWARE = 70  # a bug in the program or in the user's task
    SYSTEM = 71  # a system limit: shared memory, open files
    CANNOT_CREATE = 73  # the run directory
    INPUT_OUTPUT = 74
    PREEMPTED = 75  # checkpoint saved; run the same command again
    PERMISSION = 77
    CONFIG = 78
    GPU_MEMORY = 80
    HOST_MEMORY = 81
    NUMERIC = 82
    HANG = 83
    RANK_LOST = 84
    DATA_WORKER = 85
    IN_USE = 87  # another process has locked the run directory
    INCOMPATIBLE_RESUME = 88
    SECURITY = 89
    INTERRUPTED = 130  # stopped without saving


def to_one_line(text: str, limit: int) -> str:
    """Return the text as one line of at most about `limit` characters, shortened in the middle if necessary.

    Terminal control characters, bidirectional overrides, and characters that are invisible or cannot be encoded are
    escaped, because the text may be untrusted.
    """
    if len(text) > limit:
        text = f"{text[: limit * 2 // 3]} ... ({len(text):,} characters) ... {text[-limit // 4 :]}"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


@dataclass(frozen=True)
class Problem:
    """One problem: what was expected, what was found, where, and how to fix it."""

    what: str
    where: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        for name, text, limit in (("what", self.what, 2000), ("where", self.where, 400), ("fix", self.fix, 8000)):
            lines = [text] if name == "where" else text.split("\n")
            object.__setattr__(self, name, "\n".join(to_one_line(line, limit) for line in lines))

    def __str__(self) -> str:
        lead = f"{self.where}: " if self.where else ""
        return f"{lead}{self.what}" + (f"\n    {self.fix}" if self.fix else "")


class AccelRunError(Exception):
    """An expected failure, reported to the user as a message without a traceback.

    place  where it happened (rank, phase, update, samples; unknown ones are missing); written to error.json
    Notes (`add_note`) are printed below the suggested fix.
    """

    exit_code = Exit.SOFTWARE
    place: Mapping[str, Any] = {}

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.problems: tuple[Problem, ...] = (Problem(what, where, fix),)
        super().__init__(str(self.problems[0]))

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_error, (type(self), self.problems, self.exit_code, self.place)  # data workers pickle errors


def rebuild_error(
    kind: type[AccelRunError], problems: tuple[Problem, ...], exit_code: Exit, place: Mapping[str, Any] | None = None
) -> AccelRunError:
    """Rebuild an error that another process has pickled."""
    error = kind.__new__(kind)
    Exception.__init__(error, "\n".join(str(problem) for problem in problems))
    error.problems, error.exit_code, error.place = problems, exit_code, place or {}
    return error


def checkpoint_update(checkpoint: str | None) -> int:
    """Return the update number of a checkpoint name such as "update-0000000012"; 0 if there is no checkpoint."""
    return int(checkpoint.rpartition("-")[2]) if checkpoint else 0


def resume_note(last: str | None, completed: int) -> str:
    """Return the line below an error that states from which checkpoint the run resumes.

    last       name of the newest checkpoint, None if there is none
    completed  completed updates of all phases, saved or not
    """
    repeated = completed - checkpoint_update(last)
    again = "nothing is" if repeated <= 0 else "1 update is" if repeated == 1 else f"{repeated} updates are"
    if last is None:
        return f"no checkpoint yet ({again} repeated)"
    return f"last checkpoint: update {checkpoint_update(last)} ({again} repeated)"


def format_error(error: AccelRunError) -> str:
    """Format the error for the user: one paragraph per problem, numbered if there are several, then the notes."""
    many = len(error.problems) > 1
    lines = [f"accel-run: {len(error.problems)} problems"] if many else []
    for number, problem in enumerate(error.problems, 1):
        lead = f"  {number}. " if many else "accel-run: "
        lines.append(lead + _format_problem(problem, " " * len(lead)))
    lines += [" " * len("accel-run: ") + note for note in getattr(error, "__notes__", ())]
    return "\n".join(lines)


def _format_problem(problem: Problem, indent: str) -> str:
    """Return the problem without terminal control characters, with continuation lines indented."""
    where = f"{problem.where}: " if problem.where else ""
    text = f"{where}{problem.what}" + (f"\n{problem.fix}" if problem.fix else "")
    lines = [line.strip() if line.startswith("    ") else line for line in text.split("\n")]
    return f"\n{indent}".join(lines)


class ConfigError(AccelRunError):
    """The configuration is invalid; carries all problems that were found, not only the first.

    of_known_keys  the keys are known settings, so a name such as `pin` does not mark its value as a secret
    """

    exit_code = Exit.CONFIG

    def __init__(self, problems: Problem | Iterable[Problem], *, of_known_keys: bool = False) -> None:
        found = (problems,) if isinstance(problems, Problem) else tuple(problems)
        if not of_known_keys:
            found = tuple(map(_redact_value, found))
        Exception.__init__(self, "\n".join(str(problem) for problem in found))
        self.problems = found


def _redact_value(problem: Problem) -> Problem:
    """Return the problem without the value of an argument whose name may denote a secret."""
    end = find_secret_name(problem.where)
    if end is None:
        return problem
    fix = "pass secrets in environment variables, which the task can read"
    return Problem(problem.what, problem.where[:end], f"{problem.fix}\n{fix}" if problem.fix else fix)


class SharedConfigError(ConfigError):
    """A ConfigError that every rank raises, and that is reported once."""


class RepeatedConfigError(ConfigError):
    """A ConfigError that the first rank of this machine reports; the others exit without a message."""


class UsageError(AccelRunError):
    """The command line cannot be parsed."""

    exit_code = Exit.USAGE


class DataError(AccelRunError):
    """Data or a checkpoint exists but is damaged or has an unexpected format."""

    exit_code = Exit.BAD_DATA


class InputMissing(AccelRunError):
    """A path, run or checkpoint does not exist."""

    exit_code = Exit.NO_INPUT


class MissingPackage(ConfigError):
    """A requested feature needs a package that is not installed, or that cannot be imported."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(Problem(what, where, fix))


class DeviceMissing(AccelRunError):
    """A requested device is not available, or was lost."""

    exit_code = Exit.NO_DEVICE


class TaskFault(AccelRunError):
    """The user's task raised an exception or violated its contract."""

    exit_code = Exit.SOFTWARE


class CannotCreate(AccelRunError):
    """The run directory cannot be created."""

    exit_code = Exit.CANNOT_CREATE


class StorageError(AccelRunError):
    """Reading or writing the run directory failed."""

    exit_code = Exit.INPUT_OUTPUT


class NumericError(AccelRunError):
    """The loss is not finite, or the loss scale has collapsed."""

    exit_code = Exit.NUMERIC


class RunInUse(AccelRunError):
    """Another process has locked this run directory."""

    exit_code = Exit.IN_USE


class IncompatibleResume(AccelRunError):
    """The checkpoint belongs to another run, or its settings differ in a way that changes results."""

    exit_code = Exit.INCOMPATIBLE_RESUME


class SecurityRefusal(AccelRunError):
    """The request would execute untrusted code or access files outside the run directory."""

    exit_code = Exit.SECURITY


class DeviceMemoryError(AccelRunError):
    """The GPU is out of memory."""

    exit_code = Exit.GPU_MEMORY


class HostMemoryError(AccelRunError):
    """The host is out of memory."""

    exit_code = Exit.HOST_MEMORY


class DataWorkerLost(AccelRunError):
    """A data worker process died."""

    exit_code = Exit.DATA_WORKER


class RankLost(AccelRunError):
    """A rank failed, was killed, or can no longer reach the others."""

    exit_code = Exit.RANK_LOST


class Hang(AccelRunError):
    """A wait exceeded its timeout."""

    exit_code = Exit.HANG


class SystemLimit(AccelRunError):
    """A system limit was reached: shared memory, open files."""

    exit_code = Exit.SYSTEM


def find_system_limit(error: BaseException) -> SystemLimit | None:
    """Return the error for a system limit that made an import or a call fail; None for other errors.

    Modules are imported lazily, so a limit may be reached at any point of the program.
    """
    if isinstance(error, AccelRunError):
        return None
    for exception in exception_chain(error):
        if isinstance(exception, OSError) and exception.errno in (errno.EMFILE, errno.ENFILE):
            where = os.fsdecode(exception.filename) if exception.filename is not None else ""
            return SystemLimit("too many files are open", where=where, fix="raise the limit with ulimit -n")
        if isinstance(exception, ImportError):
            text = " ".join(str(exception).split())
            if "too many open files" in text.lower():
                return SystemLimit(text, fix="raise the limit with ulimit -n")
            if any(message in text.lower() for message in _MAPPING_ERRORS):
                return SystemLimit(
                    f"a library does not fit into the address space: {text}", fix="raise the limit with ulimit -v"
                )
    return None


def exception_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, because compilers wrap the errors of the code that they call."""
    seen: list[BaseException] = []
    while error not in seen:  # `raise error from error` is a cycle
        seen.append(error)
        yield error
        inner = getattr(error, "inner_exception", None)  # torch._dynamo hides the cause here
        context = None if error.__suppress_context__ else error.__context__
        error = (inner if isinstance(inner, BaseException) else None) or error.__cause__ or context or error


_MAPPING_ERRORS = (  # messages of the dynamic linker
    "failed to map segment from shared object",
    "cannot map zero-fill pages",
    "cannot allocate memory",
    "cannot create shared object descriptor",
)
