"""Where things that are not code lie: the shipped configuration, the tasks, the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

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
    """Return the path that a setting names; ~ is the home folder, as a shell leaves it where it follows =."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises where there is none
