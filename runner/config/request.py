"""What the user requested: overrides, task file and config folder, and how overrides are written and merged."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line, before it is understood.

    own_keys  of the command, besides settings: a slip may have meant one of them
    """

    overrides: tuple[str, ...] = ()
    task_file: Path | None = None
    config_dir: Path | None = None
    own_keys: tuple[str, ...] = ()


def merge_overrides(old: Iterable[str], new: Iterable[str]) -> tuple[str, ...]:
    """Return the old overrides with those replaced whose key is given anew, and with it all that stands under it."""
    new = tuple(new)
    roots = tuple(f"{plain_key_of(word)}." for word in new)
    return (*(word for word in old if not f"{plain_key_of(word)}.".startswith(roots)), *new)


def word_of(key: str, text: str) -> str:
    """Return the word of a command line that gives the key exactly this text."""
    if re.fullmatch(r"[\w./@:+-]+", text, re.ASCII):
        return f"{key}={text}"
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), text)
    return f'{key}="{escaped}"'


def key_of(word: str) -> str:
    """Return the key of a setting as it is typed; the ~ of a word that deletes one stays, for it is refused."""
    return word.partition("=")[0].lstrip("+")


def plain_key_of(word: str) -> str:
    return key_of(word).lstrip("+~")


def text_of_value(value: Any) -> str:
    """Return a value as it is typed on a command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(text_of_value(item) for item in value)}]" if isinstance(value, (list, tuple)) else str(value)
