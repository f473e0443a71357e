"""Where things that are not code lie: the shipped configuration, the tasks, the user's cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from runner.base.errors import ConfigError, Problem
from runner.base.values import LOCAL_PATH, URL

PACKAGE = Path(__file__).resolve().parent.parent


def shipped(name: str) -> Path:
    """Return the folder `conf` or `tasks`: inside the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def cache_folder() -> Path:
    """Return the folder for prepared data that outlives a run: $ACCEL_RUN_CACHE, else the XDG cache folder.

    A user without a home, as in some containers, has it where the command is given.
    """
    chosen = os.environ.get("ACCEL_RUN_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home raises where there is none
    return (Path(base) if base else Path("" if home == "~" else home).absolute() / ".cache") / "accel-run"


def as_path(text: str) -> Path:
    """Return the path that a setting names; ~ is the home folder, as a shell leaves it where it follows =.

    Raises ConfigError for a URL.
    """
    if re.match(URL, text):
        raise ConfigError(Problem(f"must be {LOCAL_PATH}", text, "name a local folder, or mount the remote one"))
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises where there is none
