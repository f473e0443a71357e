"""Paths of the shipped configuration and tasks, and of the user's cache."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runner.base.errors import ConfigError, Problem
from runner.base.values import LOCAL_PATH, URL

_left_folders: list[str] = []  # working directories to which active `working_folder` calls return, outermost first
PACKAGE = Path(__file__).resolve().parent.parent


def shipped_path(name: str) -> Path:
    """Return the path of the shipped `conf` or `tasks`: inside the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def cache_folder() -> Path:
    """Return the cache folder for prepared data: $ACCEL_RUN_CACHE, else the XDG cache folder.

    Without a home folder, as in some containers, it is in the current directory.
    """
    chosen = os.environ.get("ACCEL_RUN_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home raises without a home folder
    return (Path(base) if base else Path("" if home == "~" else home).absolute() / ".cache") / "accel-run"


def parse_path(text: str) -> Path:
    """Return the path in a setting, with ~ expanded: shells do not expand it after `=`.

    Raises ConfigError for a URL.
    """
    if re.match(URL, text):
        raise ConfigError(Problem(f"must be {LOCAL_PATH}", text, "use a local folder, or mount the remote one"))
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises without a home folder


@contextmanager
def working_folder(folder: Path) -> Iterator[None]:
    """Change the working directory inside the context; `path_for_user` returns paths that remain valid outside."""
    try:
        previous = os.getcwd()  # noqa: PTH109 - `is_elsewhere` compares it
    except FileNotFoundError:  # it was removed
        previous = ""
    os.chdir(folder)
    _left_folders.append(previous)
    try:
        yield
    finally:
        _left_folders.pop()
        with suppress(OSError):
            os.chdir(previous)


def is_elsewhere() -> bool:
    """Return whether the working directory differs from that of the user's shell."""
    return bool(_left_folders) and _left_folders[0] != os.getcwd()  # noqa: PTH109


def path_for_user(path: Path) -> Path:
    """Return the path as the user can use it: absolute if the working directory is not the user's."""
    return path.absolute() if is_elsewhere() else path
