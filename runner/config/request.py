"""What the user requested: overrides, task file and config folder, and how overrides are written and merged."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    """Arguments of a command line, before they are parsed.

    command_keys  keys and flags of the command besides settings; they are also suggested for typos
    command       the command with all its arguments, as recorded with the run; empty: `train` with this request
    """

    overrides: tuple[str, ...] = ()
    task_file: Path | None = None
    config_dir: Path | None = None
    command_keys: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    @property
    def command_line(self) -> str:
        """Return the shell command that made this request, or would make it."""
        return shlex.join(["accel-run", *(self.command or self.train_arguments())])

    def train_arguments(self, new_overrides: Iterable[str] = ()) -> list[str]:
        """Return the command-line arguments of `accel-run` that train with this request and the new overrides."""
        argv = ["train"]
        argv += ["--task", str(self.task_file)] if self.task_file else []
        argv += ["--config-dir", str(self.config_dir)] if self.config_dir else []
        return [*argv, *merge_overrides(self.overrides, new_overrides)]


def merge_overrides(old: Iterable[str], new: Iterable[str]) -> tuple[str, ...]:
    """Return the old overrides without those of the new keys and their subkeys, followed by the new ones."""
    new = tuple(new)
    roots = tuple(f"{override_key(argument)}." for argument in new)
    return (*(argument for argument in old if not f"{override_key(argument)}.".startswith(roots)), *new)


def format_override(key: str, text: str) -> str:
    """Return the command-line argument that sets the key to this text.

    Text such as `12` is not quoted, so it is parsed as a number.
    """
    is_word = re.fullmatch(r"[\w./@:+-]+", text, re.ASCII)
    if is_word and not re.fullmatch("null|true|false|[+-]?(nan|inf)", text, re.IGNORECASE):
        return f"{key}={text}"
    escaped = re.sub(r'(\\*)("|$)', lambda match: match[1] * 2 + ('\\"' if match[2] else ""), text)
    return f'{key}="{escaped}"'


def unquote(text: str) -> str:
    """Return the text that a quoted value of an override stands for; text without quotes is returned unchanged."""
    quote = text[:1]
    if len(text) < 2 or quote not in "'\"" or text[-1] != quote:
        return text
    return re.sub(rf"(\\+)({quote}|$)", lambda match: match[1][: len(match[1]) // 2] + match[2], text[1:-1])


def override_key(argument: str) -> str:
    """Return the key of an argument without the prefixes + and ~."""
    return argument.partition("=")[0].lstrip("+~")


def format_value(value: Any) -> str:
    """Format a value as on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{format_value(item)}' for key, item in value.items())}}}"
    return f"[{','.join(format_value(item) for item in value)}]" if isinstance(value, (list, tuple)) else str(value)
