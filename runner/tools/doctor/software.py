"""Check Python and the packages that accel-run needs by importing them."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from importlib import import_module

from packaging.requirements import Requirement
from packaging.version import Version

from runner.base.secret import sanitize
from runner.base.text import error_line
from runner.tools.doctor.findings import CheckContext, CheckResult, SharedResult, failed, ok, skip

DISTRIBUTION = "accel-run"


def python(context: CheckContext) -> Iterator[CheckResult]:
    """Python version."""
    needed, found = required_python(), platform.python_version()
    if Version(found) in needed.specifier:
        yield ok("", f"{found} ({needed.specifier}), {sys.executable}")
    else:
        fix = f"install Python {needed.specifier}, then scripts/setup.sh"
        yield failed("", f"Python must be {needed.specifier}, but is {found}", fix)


def packages(context: CheckContext) -> Iterator[CheckResult]:
    """Required packages: import, version."""
    needed = [package for package in required_packages() if package.name != "torch"]
    if not needed:
        yield skip("", f"{DISTRIBUTION} is not installed, so its requirements are unknown", "pip install -e .")
    for package in context.each(needed, lambda package: package.name):
        yield _check_package(package)


def torch(context: CheckContext) -> Iterator[CheckResult | SharedResult]:
    """Torch: import, version."""
    needed = next((package for package in required_packages() if package.name == "torch"), None)
    error = import_error("torch")
    if error:
        fix = f'pip install --force-reinstall "torch{needed.specifier if needed else ""}"'
        yield failed("", f"cannot be imported: {error}", fix)
        return
    import torch

    yield SharedResult("imported")
    built = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "no CUDA"
    )
    seen = f"{torch.__version__} ({built})"
    if needed and not _accepts(needed, torch.__version__):
        yield failed("", f"torch must be {needed.specifier}, but is {seen}", _install_command(needed))
    else:
        yield ok("", f"{seen}{f', {needed.specifier} needed' if needed else ''}")


# ---------------------------------------------------------------- requirements


def required_packages() -> list[Requirement]:
    """Return the dependencies in the installed metadata of accel-run, without extras; empty if it is not installed."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [item for item in map(Requirement, lines) if "extra" not in str(item.marker or "")]


def required_python() -> Requirement:
    """Return the Python versions that the installed metadata requires."""
    try:
        specifier = importlib.metadata.metadata(DISTRIBUTION)["Requires-Python"]
    except importlib.metadata.PackageNotFoundError:
        specifier = None
    return Requirement(f"python{specifier or '>=3.11'}")


def _check_package(package: Requirement) -> CheckResult:
    version = _installed_version(package.name)
    if version is None:
        return failed(package.name, "is not installed", _install_command(package))
    error = import_error(_MODULES.get(package.name, package.name.replace("-", "_")))
    if error:
        fix = f'pip install --force-reinstall "{package.name}{package.specifier}"'
        return failed(package.name, f"{version} cannot be imported: {error}", fix)
    if not _accepts(package, version):
        return failed(package.name, f"must be {package.specifier}, but is {version}", _install_command(package))
    return ok(package.name, f"{version} ({package.specifier})")


def _accepts(package: Requirement, version: str) -> bool:
    """Return whether a version satisfies the specifier; local versions (+cu130) and pre-releases are accepted."""
    return package.specifier.contains(version, prereleases=True)


def import_error(module: str) -> str:
    """Return why a module cannot be imported: the last line of its traceback; empty if it can."""
    try:
        import_module(module)
    except BaseException as error:  # a package may raise anything, even SystemExit
        return sanitize(error_line(error))
    return ""


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _install_command(package: Requirement) -> str:
    return f'pip install "{package.name}{package.specifier}"'


# package -> module to import, if the names differ; a submodule that accel-run uses, if the package imports lazily
_MODULES = {
    "dipy": "dipy.reconst.dti",
    "hydra-core": "hydra",
    "matplotlib": "matplotlib.figure",
    "nvidia-ml-py": "pynvml",
    "pillow": "PIL",
    "scikit-image": "skimage.filters",
}
