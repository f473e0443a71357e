"""Import optional packages; if one is missing, the error names the extra that installs it."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from runner.base.errors import MissingPackage


def require(module: str, extra: str) -> Any:
    """Import and return a module. Raises MissingPackage, with the command that installs it, if it is missing.

    module  name of the module, such as "skimage.data"
    extra   extra of accel-run that installs it
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None:
            raise
        raise _missing(error.name, extra) from error  # error.name may be a dependency of the module


def check_installed(module: str, extra: str) -> None:
    """Raise MissingPackage as `require` does, without importing the module, which is imported later."""
    try:
        is_installed = importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):  # a partially removed package
        is_installed = False
    if not is_installed:
        raise _missing(module, extra)


def _missing(module: str, extra: str) -> MissingPackage:
    package = module.partition(".")[0]
    install = f'pip install "accel-run[{extra}]"; in a checkout: scripts/setup.sh {extra}'
    return MissingPackage(
        f"needs the package {package}, which is not installed",
        where=f"extra {extra}" if extra else "",
        fix=install if extra else f"pip install {package}",
    )
