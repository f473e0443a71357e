"""Log a run: console output with a copy in console.log, and events.jsonl for programs."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from runner.base.errors import ConfigError, Problem
from runner.base.secret import sanitize
from runner.base.text import wrap_for_terminal
from runner.host.dirfd import open_parent

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")
LEVEL_VARIABLE = "ACCEL_RUN_LOG_LEVEL"
OLD_LEVEL_VARIABLE = "ACCEL_RUN_SAYS"  # its name until version 0.2, accepted for one more release


def terminal_log_level() -> Level:
    """Return the minimum log level of the terminal, from $ACCEL_RUN_LOG_LEVEL; the default is info.

    Raises ConfigError for an unknown level.
    """
    name = OLD_LEVEL_VARIABLE if uses_old_level_variable() else LEVEL_VARIABLE
    requested = os.environ.get(name, "").lower() or "info"
    for level in LEVELS:
        if level == requested:
            return level
    what = f"must be one of {', '.join(LEVELS)}, but is {requested}"
    raise ConfigError(Problem(what, name, f"export {LEVEL_VARIABLE}=info, the default"))


def uses_old_level_variable() -> bool:
    """Return whether the log level is set only by the old name of the variable."""
    return OLD_LEVEL_VARIABLE in os.environ and LEVEL_VARIABLE not in os.environ


class Console:
    """Print to the terminal and to console.log; silent ranks do neither.

    Levels below `level` go to the file only. Warnings and errors go to standard error. A full disk or a closed
    terminal disables the output, but does not stop the run.
    """

    def __init__(self, path: Path | None = None, *, level: Level = "info", is_enabled: bool = True) -> None:
        self._file = _Appender(path if is_enabled else None)
        self._min_level = LEVELS.index(level) if is_enabled else len(LEVELS)
        self._printer: Callable[[str], None] | None = None
        self._warned: set[str] = set()

    def info(self, text: str) -> None:
        """Log an informational message."""
        self.log("info", text)

    def warning(self, text: str) -> None:
        self.log("warning", text)

    def warn_once(self, text: str) -> None:
        """Log a warning unless the same text was logged before."""
        if text not in self._warned:
            self._warned.add(text)
            self.warning(text)

    def error(self, text: str) -> None:
        self.log("error", text)

    def print_through(self, note: Callable[[str], None] | None) -> None:
        """Print through `note` from now on, as a progress bar requires; None: print directly again."""
        self._printer = note

    def close(self) -> None:
        """Close the copy in the file; the terminal stays open."""
        self._file.close()

    def log(self, level: Level, text: str) -> None:
        text = sanitize(text)
        self._file.append(f"{_now()} {level:<7} {text}\n")
        if LEVELS.index(level) < self._min_level:
            return
        shown = f"{level}: {text}" if level in ("warning", "error") else text
        stream = sys.stderr if level in ("warning", "error") else sys.stdout
        if self._printer is not None:
            self._printer(shown)
        else:
            with contextlib.suppress(OSError, ValueError):  # the reader is gone or the stream is closed
                print(wrap_for_terminal(_encodable(shown, stream.encoding or "utf-8"), stream), file=stream, flush=True)


class Events:
    """Append rows to events.jsonl, one write per row; never raises."""

    def __init__(self, path: Path | None) -> None:
        self._file = _Appender(path)

    def record(self, kind: str, **fields: Any) -> None:
        """Append an event with the time in UTC. Values that are not JSON-serializable become strings."""
        self._file.append(sanitize(json.dumps({"time": _now(), "kind": kind, **fields}, default=str)) + "\n")

    @property
    def num_lost(self) -> int:
        """Number of rows that could not be written."""
        return self._file.num_lost

    def close(self) -> None:
        self._file.close()


class _Appender:
    """Append-only file, readable only by its owner; None: nothing is written.

    A file of more than 16 MiB is renamed to `...-earlier` when it is opened, replacing the previous one, so that a run
    that restarts often does not fill the disk. An incomplete last line, left by a crash, is terminated.
    """

    def __init__(self, path: Path | None) -> None:
        self.num_lost = 0
        self._descriptor = -1
        self._is_open = path is not None
        self._is_torn = False  # the file ends with part of a line, because the disk became full
        if path is not None:
            with contextlib.suppress(OSError), open_parent(path) as (folder, name):
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_size > MAX_LOG_BYTES:
                    earlier = path.with_name(f"{path.stem}-earlier{path.suffix}")
                    os.replace(name, earlier.name if folder else earlier, src_dir_fd=folder, dst_dir_fd=folder)
            # O_NONBLOCK: opening a named pipe would otherwise block forever without a reader.
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            with contextlib.suppress(OSError), open_parent(path) as (folder, name):
                self._descriptor = os.open(name, flags, 0o600, dir_fd=folder)
                size = os.fstat(self._descriptor).st_size
                if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                    os.write(self._descriptor, b"\n")

    def append(self, text: str) -> None:
        if not self._is_open:
            return
        try:
            data = b"\n" * self._is_torn + text.encode(errors="backslashreplace")
            self._is_torn = os.write(self._descriptor, data) != len(data)
            self.num_lost += self._is_torn
        except OSError:
            self.num_lost += 1

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._is_open = -1, False


def _encodable(text: str, encoding: str) -> str:
    """Return the text with replacements for the characters that the encoding lacks."""
    try:
        return text.encode(encoding).decode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, errors="replace").decode(encoding)


_PLAIN = str.maketrans({"✓": "+", "–": "-", "—": "-"})  # noqa: RUF001 - the symbols of reports


MAX_LOG_BYTES = 16 << 20  # size at which a log is rotated when opened


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
