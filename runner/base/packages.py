"""Packages that only some tasks and options need: imported here, and named with their extra where they are missing."""

from __future__ import annotations

import importlib
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
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingPackage(
            f"needs the package {package}, which is not installed",
            where=f"extra {extra}",
            fix=f'pip install "accel-run[{extra}]"; in a checkout: scripts/setup.sh {extra}',
        ) from error
