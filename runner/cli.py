"""From the words of a command line to an exit code. Loads only what the command needs: `--help` loads nothing."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from runner import __version__
from runner.base.errors import AccelRunError, Exit, UsageError, as_told, readable
from runner.base.output import never_waiting, open_closed_streams, write_at_once
from runner.base.secret import fit_to_show, refuse_secrets
from runner.base.words import first_line, for_terminal, help_page, message_of, words_of
from runner.commands import COMMANDS, TRAINING


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; nobody sees a traceback but for a fault of this program."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        # Imports make objects that stay: collecting garbage among them is a quarter of torch's 2.5 s. Whoever goes on
        # for long enables it again (engine/hooks/first_update.py, engine/infer.py).
        gc.disable()
        open_closed_streams()
    trains = bool(words) and words[0] in TRAINING
    ended: list[int] = []
    with _leaving_when_asked(ended, for_good=argv is None), never_waiting() if trains else nullcontext():
        try:
            code = _dispatch(words)
        except AccelRunError as error:
            print_problems(error)
            code = int(error.exit_code)
        except BrokenPipeError:  # the reader of a pipe went away, as in `accel-run plan | head`
            code = int(Exit.DONE)
        except OSError as error:
            code = _told_where(error)
        except KeyboardInterrupt:
            _say("accel-run: interrupted")
            code = int(Exit.INTERRUPTED)
        except MemoryError:
            _say("accel-run: the machine's memory is used up\n           free some, or raise the limit with ulimit -v")
            code = int(Exit.HOST_MEMORY)
        except Exception as error:
            code = _fault(error)
        ended.append(_flushed(code))
        return ended[0]


def print_problems(error: AccelRunError) -> None:
    """Print every problem on stderr, one paragraph each, numbered when there are several."""
    _say(as_told(error))


def overview() -> str:
    """Return what `accel-run --help` prints."""
    rows = "\n".join(f"  {name:<11}{summary}" for name, (_, summary) in COMMANDS.items() if summary)
    return f"""\
accel-run {__version__}: train PyTorch models as fast as the machine at hand allows, with the same numbers anywhere.

usage: accel-run COMMAND [key=value ...]

commands
{rows}

examples
  accel-run train                              the default task, on real text, on any machine
  accel-run train +hardware=t4 updates=1000    options that suit a T4
  accel-run plan precision=bf16                what would be done, and why
  accel-run train --task ./my_task.py          a task of your own, made by: accel-run new my_task.py

accel-run COMMAND --help tells more. Exit codes: 0 done, 75 saved and stopped (run it again), 78 wrong configuration.
"""


def _dispatch(words: list[str]) -> int:
    if not words:
        print(for_terminal(overview(), sys.stderr), end="", file=sys.stderr)
        return int(Exit.USAGE)
    first = words[0]
    if first in ("--help", "-h", "help"):
        if len(words) == 2 and words[1] in COMMANDS:
            return _dispatch([words[1], "--help"])
        print(help_page(overview()), end="")
        return int(Exit.DONE)
    if first in ("--version", "-V"):
        print(f"accel-run {__version__}")
        return int(Exit.DONE)
    if first not in COMMANDS:
        refuse_secrets(words)
        raise _unknown(words)
    if first != "complete":  # that one prints nothing of what it is given
        refuse_secrets(words[1:], partial(_options, words))
    if first != "new":  # which writes a file of the user's own
        os.umask(0o077)  # the one place: libraries that write into the run directory know no modes
    module = import_module(f"runner.commands.{COMMANDS[first][0]}")
    ours = words[1 : words.index("--")] if "--" in words else words[1:]  # after -- stand words of another line
    if {"--help", "-h"} & set(ours):
        print(help_page(module.HELP), end="")
        return int(Exit.DONE)
    run: Callable[[list[str]], int] = module.run
    return run(words[1:])


def _options(words: Sequence[str]) -> Collection[str]:
    """Return the names of options, those of the task's file and the config folder in the line among them."""
    from runner.base.configuration import names_of_options

    given: dict[str, Path] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, has_value, value = word.partition("=")
        if flag in ("--task", "--config-dir"):
            with suppress(RuntimeError):  # ~nobody
                given[flag] = Path(value if has_value else following).expanduser()
    return names_of_options(given.get("--task"), given.get("--config-dir"))


def _unknown(words: Sequence[str]) -> AccelRunError:
    import difflib

    from runner.base.configuration import options_of_groups, proper_word
    from runner.base.foreign import fix_of_command
    from runner.base.schema import MAX_SHOWN

    word = words[0]
    known = fix_of_command([readable(each, MAX_SHOWN) for each in words[:6]], proper_word, options_of_groups())
    close = difflib.get_close_matches(word.lower(), [name for name in COMMANDS if COMMANDS[name][1]], n=1, cutoff=0.6)
    if not known and close:
        known = f"did you mean accel-run {close[0]}?"
    fix = known or f"commands: {', '.join(name for name, (_, summary) in COMMANDS.items() if summary)}"
    error = UsageError("unknown command", where=word, fix=fix)
    error.exit_code = Exit.CONFIG
    return error


# ---------------------------------------------------------------- ends that nobody asked for


@contextmanager
def _leaving_when_asked(ended: list[int], *, for_good: bool) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the program at once with 130, also in an import, where an exception may be lost.

    A run that has something to save takes the signals over; a shell that starts us in the background ignores the first.
    ended     the exit code, once the command has ended: from then on they end the program with this one
    for_good  nothing of Python comes back, so that the interpreter, which takes its time to end, does so quietly too
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    previous = {number: signal.getsignal(number) for number in usual}
    taken = [number for number, handler in usual.items() if previous[number] is handler]
    if threading.current_thread() is not threading.main_thread():
        taken = []
    leave = partial(_leave, os.getpid(), ended)
    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL if for_good else previous[number])


def _leave(asked: int, ended: list[int], number: int, _: object) -> None:
    """Leave with 130, or as the command has ended.

    A child that was forked meanwhile ends by the signal, as whoever sent it expects.
    """
    signal.signal(number, signal.SIG_DFL)  # should the lines below block on a full pipe, a second one ends it
    if number != signal.SIGINT and os.getpid() != asked:
        os.kill(os.getpid(), number)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it may have come in the middle of a print
            stream.flush()
    if not ended:
        write_at_once("\naccel-run: interrupted\n")
    os._exit(ended[0] if ended else Exit.INTERRUPTED)


def _fault(error: Exception) -> int:
    """Print the cause in a line, and the traceback below one that says whose fault it is."""
    import traceback

    whose = "this is a fault of accel-run, not yours; please report it with what follows"
    _say(f"accel-run: {words_of(error)}\n           {whose}")
    _say("".join(traceback.format_exception(error)))
    return int(Exit.SOFTWARE)


def _told_where(error: OSError) -> int:
    """Print what the system refused: an error of writing that names no file is that of standard output."""
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        _say(f"accel-run: standard output cannot be written: {error.strerror}")
        return int(Exit.INPUT_OUTPUT)
    code = _REFUSED.get(error.errno or 0)
    if code is None or (error.filename is None and code not in (Exit.SYSTEM, Exit.HOST_MEMORY)):
        return _fault(error)
    where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
    reason = error.strerror or first_line(message_of(error))
    _say(f"accel-run: {where}the system refuses: {reason}{_WAYS_OUT.get(code, '')}")
    return int(code)


_WAYS_OUT = {Exit.SYSTEM: "\n           raise the limits on open files (ulimit -n) and processes (ulimit -u)"}
_REFUSED = {
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


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it, or the stream is closed
        if sys.stderr is not None:  # print would take standard output instead
            print(for_terminal(fit_to_show(text), sys.stderr), file=sys.stderr, flush=True)


def _flushed(code: int) -> int:
    """Return the code once all is written, or that of a full disk; a reader that went away changes nothing."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        _drop_output()
        return code or _told_where(error)
    return code


def _drop_output() -> None:
    """What is left in the buffer would be tried again at exit, and fail with a message of the interpreter."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
