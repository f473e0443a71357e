"""Python and the packages that accel-run needs: imported, not listed."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from packaging.requirements import Requirement
from packaging.version import Version

from runner.base.secret import sanitize
from runner.base.text import error_line
from runner.tools.doctor.findings import Answer, CheckContext, CheckResult, failed, ok, skip

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
    needed = [each for each in required_packages() if each.name != "torch"]
    if not needed:
        yield skip("", f"{DISTRIBUTION} is not installed, so nothing says what it needs", "pip install -e .")
    for package in context.each(needed, lambda package: package.name):
        yield _required(package)


def torch(context: CheckContext) -> Iterator[CheckResult | Answer]:
    """Torch: import, version."""
    needed = next((each for each in required_packages() if each.name == "torch"), None)
    broken = import_error("torch")
    if broken:
        again = f'pip install --force-reinstall "torch{needed.specifier if needed else ""}"'
        yield failed("", f"cannot be imported: {broken}", again)
        return
    import torch

    yield Answer("imported")
    built = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "no CUDA"
    )
    seen = f"{torch.__version__} ({built})"
    if needed and not needed.fits(torch.__version__):
        yield failed("", f"torch must be {needed.specifier}, but is {seen}", _line("torch", str(needed.specifier)))
    else:
        yield ok("", f"{seen}{f', {needed.specifier} needed' if needed else ''}")


# ---------------------------------------------------------------- what is needed


@dataclass(frozen=True)
class Package:
    """A line of the dependencies in pyproject.toml."""

    name: str
    specifier: str

    @property
    def module(self) -> str:
        return _MODULES.get(self.name, self.name.replace("-", "_"))

    def fits(self, version: str) -> bool:
        """A build of 2.13.0+cu130 is 2.13.0, and a pre-release is assumed to be intended."""
        return Requirement(f"x{self.specifier}").specifier.contains(version, prereleases=True)


def required_packages() -> list[Package]:
    """Return what the installed metadata of accel-run requires, without extras; nothing if it is not installed."""
    found = []
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    for requirement in map(Requirement, lines):
        if "extra" not in str(requirement.marker or ""):
            found.append(Package(requirement.name, str(requirement.specifier)))
    return found


def required_python() -> Requirement:
    """Return the versions of Python that the installed metadata asks for."""
    try:
        stated = importlib.metadata.metadata(DISTRIBUTION)["Requires-Python"]
    except importlib.metadata.PackageNotFoundError:
        stated = None
    return Requirement(f"python{stated or '>=3.11'}")


def _required(package: Package) -> CheckResult:
    version = _version_of(package.name)
    if version is None:
        return failed(package.name, "is not installed", _line(package.name, package.specifier))
    broken = import_error(package.module)
    if broken:
        again = f'pip install --force-reinstall "{package.name}{package.specifier}"'
        return failed(package.name, f"{version} cannot be imported: {broken}", again)
    if not package.fits(version):
        must = f"must be {package.specifier}, but is {version}"
        return failed(package.name, must, _line(package.name, package.specifier))
    return ok(package.name, f"{version} ({package.specifier})")


def import_error(module: str) -> str:
    """Return why a module cannot be imported: the last line of its traceback."""
    try:
        import_module(module)
    except BaseException as error:  # whatever a package does when it is imported
        return sanitize(error_line(error))
    return ""


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _line(name: str, specifier: str) -> str:
    return f'pip install "{name}{specifier}"'


# Where the module has another name; of packages that load their parts when they are used, a part that accel-run uses.
_MODULES = {
    "dipy": "dipy.reconst.dti",
    "hydra-core": "hydra",
    "matplotlib": "matplotlib.figure",
    "nvidia-ml-py": "pynvml",
    "scikit-image": "skimage.filters",
}
