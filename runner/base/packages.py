"""Packages that only some tasks and options need: imported here, and named with their extra where they are missing."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from runner.base.errors import MissingPackage


def require(module: str, extra: str) -> Any:
    """Return an imported module. Raises MissingPackage, with the command that installs it, where it is not there.

    module  such as "skimage.data"
    extra   the extra of accel-run that brings it
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None:
            raise
        raise _missing(error.name, extra) from error  # perhaps of a package that this one needs


def check_installed(module: str, extra: str) -> None:
    """Raise MissingPackage as `require` does, without importing anything: what is needed late must not fail late."""
    try:
        is_there = importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):  # a package that is half removed
        is_there = False
    if not is_there:
        raise _missing(module, extra)


def _missing(module: str, extra: str) -> MissingPackage:
    package = module.partition(".")[0]
    ours = f'pip install "accel-run[{extra}]"; in a checkout: scripts/setup.sh {extra}'
    return MissingPackage(
        f"needs the package {package}, which is not installed",
        where=f"extra {extra}" if extra else "",
        fix=ours if extra else f"pip install {package}",
    )
