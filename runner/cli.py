"""The command line: parse the arguments, run a command, return its exit code.

Imports only what the command needs; `--help` imports nothing.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from runner.base.errors import (
    AccelRunError,
    Exit,
    RepeatedConfigError,
    UsageError,
    find_system_limit,
    format_error,
)
from runner.base.rank_env import remove_default_threads
from runner.base.secret import sanitize
from runner.base.secret_refusal import refuse_secrets
from runner.base.text import error_line, error_message, first_line, wrap_for_terminal, wrap_help
from runner.commands import COMMANDS, FOREIGN_NAMES, RESUMABLE, TRAINING
from runner.host.address_space import prepare_for_limit
from runner.host.gc_pause import paused_collection
from runner.host.output import nonblocking_streams, open_closed_streams, write_if_ready
from runner.host.thread_start import limit_thread_starts
from runner.version import __version__


def main(argv: Sequence[str] | None = None, report: Callable[[AccelRunError], object] | None = None) -> int:
    """Run one command and return its exit code. Tracebacks are printed only for internal errors.

    report  function that receives an expected error; default: print it on stderr
    """
    report = report or print_problems
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        open_closed_streams()
        remove_default_threads()
        limit_thread_starts()
        prepare_for_limit()
    is_training = bool(arguments) and arguments[0] in TRAINING
    is_resumable = bool(arguments) and arguments[0] in RESUMABLE
    final_code: list[int] = []
    with (
        paused_collection() if argv is None else nullcontext(),  # a long-running command ends the pause earlier
        _exit_on_signals(final_code, is_resumable=is_resumable, for_good=argv is None),
        nonblocking_streams() if is_training else nullcontext(),
    ):
        try:
            code = _dispatch(arguments)
        except RepeatedConfigError as error:
            code = int(error.exit_code)
        except AccelRunError as error:
            report(error)
            code = int(error.exit_code)
        except BrokenPipeError:  # the reader closed the pipe, as in `accel-run plan | head`
            code = int(Exit.DONE)
        except OSError as error:
            code = _report_os_error(error)
        except KeyboardInterrupt:
            _print_error("accel-run: interrupted")
            code = int(Exit.INTERRUPTED)
        except MemoryError:
            _print_error(
                "accel-run: out of host memory\n           free some memory, or raise the limit with ulimit -v"
            )
            code = int(Exit.HOST_MEMORY)
        except Exception as error:
            limit = find_system_limit(error)
            code = _report_internal_error(error) if limit is None else int(limit.exit_code)
            if limit is not None:
                report(limit)
        final_code.append(_flush_stdout(code))
        if argv is None:
            _end_daemons()
        return final_code[0]


def print_problems(error: AccelRunError) -> None:
    """Print every problem on stderr, one paragraph each, numbered when there are several."""
    _print_error(format_error(error))


def overview() -> str:
    """Return what `accel-run --help` prints."""
    rows = "\n".join(f"  {name:<12}{summary}" for name, (_, summary) in COMMANDS.items() if summary)
    return f"""\
accel-run {__version__}: train PyTorch models as fast as the machine allows, on one device or several.

usage: accel-run COMMAND [key=value ...]

commands
{rows}

examples
  accel-run train                              train the default task, a language model
  accel-run train +hardware=t4 updates=1000    use the options of the T4 profile
  accel-run plan precision=bf16                show what would run, and why
  accel-run train --task ./my_task.py          train your own task; create one with: accel-run new my_task.py

Run accel-run COMMAND --help for details. Exit codes: 0 done, 75 saved and stopped (run it again to resume),
78 invalid configuration.
"""


def _dispatch(argv: list[str]) -> int:
    if not argv:
        print(wrap_for_terminal(overview(), sys.stderr), end="", file=sys.stderr)
        return int(Exit.USAGE)
    first = argv[0]
    if first in ("--help", "-h", "help"):
        if len(argv) == 2 and argv[1] in COMMANDS:
            return _dispatch([argv[1], "--help"])
        print(wrap_help(overview()), end="")
        return int(Exit.DONE)
    if first in ("--version", "-V"):
        print(f"accel-run {__version__}")
        return int(Exit.DONE)
    if first not in COMMANDS:
        refuse_secrets(argv)
        raise _unknown_command(argv)
    if first != "complete":  # `complete` never prints its arguments
        refuse_secrets(argv[1:], partial(_option_names, argv))
    if first != "new":  # `new` creates a source file, which gets the usual permissions
        os.umask(0o077)  # set here once: libraries that write to the run directory do not set file modes
    module = import_module(f"runner.commands.{COMMANDS[first][0]}")
    arguments = argv[1 : argv.index("--")] if "--" in argv else argv[1:]  # after --: another command line
    if {"--help", "-h"} & set(arguments):
        print(wrap_help(module.HELP + _custom_settings(argv, module.HELP)), end="")
        return int(Exit.DONE)
    _warn_of_old_variables()
    run: Callable[[list[str]], int] = module.run
    return run(argv[1:])


def _warn_of_old_variables() -> None:
    from runner.records.events import LEVEL_VARIABLE, OLD_LEVEL_VARIABLE, uses_old_level_variable

    if uses_old_level_variable():
        _print_error(f"note: {OLD_LEVEL_VARIABLE} is now called {LEVEL_VARIABLE}; the old name works until version 0.4")


def _option_names(argv: Sequence[str]) -> Collection[str]:
    """Return all option names, including those of the given task file and config folder."""
    from runner.config.options import collect_option_names

    return collect_option_names(_path_argument(argv, "--task"), _path_argument(argv, "--config-dir"))


def _path_argument(argv: Sequence[str], flag: str) -> Path | None:
    """Return the path after a flag, before the arguments are parsed."""
    path: Path | None = None
    for arg, following in zip(argv, [*argv[1:], ""], strict=True):
        name, has_value, value = arg.partition("=")
        if name == flag:
            with suppress(RuntimeError):  # ~ of an unknown user
                path = Path(value if has_value else following).expanduser()
    return path


def _custom_settings(argv: Sequence[str], text: str) -> str:
    """Return a table of the settings from the task file and from installed packages; empty if the command uses none."""
    task_file = _path_argument(argv, "--task")
    if task_file is None and "--task" not in text:
        return ""
    from runner.config.task_help import describe_settings

    return describe_settings(task_file)


def _unknown_command(argv: Sequence[str]) -> AccelRunError:
    import difflib

    arg = argv[0]
    names = [name for name, (_, summary) in COMMANDS.items() if summary]
    if arg.startswith("-") or "=" in arg:
        fix = "put a command first, such as accel-run train"
    elif foreign := FOREIGN_NAMES.get(arg.lower()):
        fix = foreign
    elif close := difflib.get_close_matches(arg.lower(), names, n=1, cutoff=0.7):
        fix = f"did you mean accel-run {close[0]}?"
    else:
        fix = f"commands: {', '.join(names)}"
    error = UsageError("unknown command", where=arg, fix=fix)
    error.exit_code = Exit.CONFIG
    return error


# ---------------------------------------------------------------- signals and unexpected errors


@contextmanager
def _exit_on_signals(final_code: list[int], *, is_resumable: bool, for_good: bool) -> Iterator[None]:
    """Make Ctrl-C, SIGTERM, SIGHUP and, unless the command is resumable, SIGUSR1 exit at once with code 130.

    This also works during imports, where a KeyboardInterrupt may be lost. A run installs its own handlers before it
    has anything to save. SIGINT remains ignored if a shell has started the program in the background.
    final_code    the exit code once the command has ended; signals then exit with this code
    is_resumable  leave SIGUSR1 at its default action until the run installs its handlers: the signal then ends the
                  process with 138, and the SLURM job script requeues the job
    for_good      the process exits after the command, so the default handlers are left in place for the interpreter's
                  shutdown
    """
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
        **({} if is_resumable else {signal.SIGUSR1: signal.SIG_DFL}),
    }
    previous = {number: signal.getsignal(number) for number in defaults}
    handled = [number for number, handler in defaults.items() if previous[number] is handler]
    if threading.current_thread() is not threading.main_thread():
        handled = []
    exit_now = partial(_exit_at_signal, os.getpid(), final_code)
    for number in handled:
        signal.signal(number, exit_now)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL if for_good else previous[number])


def _exit_at_signal(main_pid: int, final_code: list[int], number: int, _: object) -> None:
    """Exit with 130, or with the final exit code if the command has already ended.

    A forked child, which inherits this handler, is ended by the signal itself, as the sender of a SIGTERM expects.
    """
    signal.signal(number, signal.SIG_DFL)  # if the lines below block on a full pipe, a second signal ends the process
    if number != signal.SIGINT and os.getpid() != main_pid:
        os.kill(os.getpid(), number)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the signal may interrupt a print
            stream.flush()
    if not final_code:
        write_if_ready("\naccel-run: interrupted\n")
    os._exit(final_code[0] if final_code else Exit.INTERRUPTED)


def _report_internal_error(error: Exception) -> int:
    """Print an internal error: the cause, a request to report it, and the traceback."""
    import traceback

    request = "this is a bug in accel-run; please report it with the traceback below"
    _print_error(f"accel-run: {error_line(error)}\n           {request}")
    _print_error("".join(traceback.format_exception(error)))
    return int(Exit.SOFTWARE)


def _report_os_error(error: OSError) -> int:
    """Print a system error and return its exit code; a write error without a file name comes from standard output."""
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        _print_error(f"accel-run: standard output cannot be written: {error.strerror}")
        return int(Exit.INPUT_OUTPUT)
    code = _EXIT_CODES.get(error.errno or 0)
    if code is None or (error.filename is None and code not in (Exit.SYSTEM, Exit.HOST_MEMORY)):
        return _report_internal_error(error)
    where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
    reason = error.strerror or first_line(error_message(error))
    _print_error(f"accel-run: {where}system error: {reason}{_FIXES.get(code, '')}")
    return int(code)


_FIXES = {Exit.SYSTEM: "\n           raise the limits on open files (ulimit -n) and processes (ulimit -u)"}
_DAEMON_TIMEOUT_S = 2.0  # for all daemonic children together
_EXIT_CODES = {
    errno.EACCES: Exit.PERMISSION,
    errno.EPERM: Exit.PERMISSION,
    errno.EROFS: Exit.INPUT_OUTPUT,
    errno.ENOSPC: Exit.INPUT_OUTPUT,
    errno.EDQUOT: Exit.INPUT_OUTPUT,
    errno.EIO: Exit.INPUT_OUTPUT,
    errno.ESTALE: Exit.INPUT_OUTPUT,
    errno.ENAMETOOLONG: Exit.NO_INPUT,
    errno.ENOTDIR: Exit.NO_INPUT,
    errno.EMFILE: Exit.SYSTEM,
    errno.ENFILE: Exit.SYSTEM,
    errno.EAGAIN: Exit.SYSTEM,
    errno.ENOMEM: Exit.HOST_MEMORY,
}


def _print_error(text: str) -> None:
    with suppress(OSError, ValueError):  # broken pipe or closed stream
        if sys.stderr is not None:  # print(file=None) would write to standard output
            # A single write, including the newline: ranks of torchrun print their errors at the same time.
            sys.stderr.write(wrap_for_terminal(sanitize(text), sys.stderr) + "\n")
            sys.stderr.flush()


def _flush_stdout(code: int) -> int:
    """Flush standard output. Return `code`, or if it is 0 and writing fails, the exit code of the error.

    A broken pipe is ignored.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        _drop_output()
        return code or _report_os_error(error)
    return code


def _end_daemons() -> None:
    """End daemonic child processes. At exit, Python would send SIGTERM, which data workers ignore, and wait forever.

    Such children remain if the host was out of memory while a loader was being closed.
    """
    if "multiprocessing" not in sys.modules:
        return
    children = [child for child in sys.modules["multiprocessing"].active_children() if child.daemon]
    for child in children:
        child.terminate()
    deadline = time.monotonic() + _DAEMON_TIMEOUT_S
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        child.kill()


def _drop_output() -> None:
    """Discard buffered output; otherwise the interpreter retries at exit and prints an error."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
