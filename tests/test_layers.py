"""The structure of runner/: imports follow the layers, sizes are limited, names are unique (scripts/lint_shape.py)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.lint_shape import FLOORS, NOT_YET, ROOT, findings, late_imports, package_of, parse_all

PLACES = [ROOT / module.path for module in parse_all()]


def test_files_have_the_required_shape() -> None:
    result = {finding.key: finding for finding in findings(parse_all())}
    assert [finding for key, finding in result.items() if key not in NOT_YET] == []
    assert list(late_imports(parse_all())) == []


def test_every_known_exception_is_still_needed() -> None:
    assert NOT_YET - {finding.key for finding in findings(parse_all())} == set()


def test_every_layer_has_files() -> None:
    packages = {package_of(module.name) for module in parse_all() if not module.name.startswith("tasks")}
    assert packages - {None} == set(FLOORS)


VENDORS = ("cuda", "xpu")  # modules of torch


def uses_of_vendors(source: str) -> Iterator[int]:
    """Yield the lines that use the module torch.cuda or torch.xpu in any way."""
    if "torch" not in source or not any(vendor in source for vendor in VENDORS):
        return
    modules = tuple(f"torch.{vendor}" for vendor in VENDORS)
    for node in ast.walk(ast.parse(source)):
        is_attribute = isinstance(node, ast.Attribute) and node.attr in VENDORS and ast.unparse(node.value) == "torch"
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if is_attribute or any(f"{module}.{name}".lstrip(".").startswith(modules) for name in names):
            yield node.lineno  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "source",
    ["torch.cuda.synchronize()", "a = torch.cuda", "import torch.cuda as c", "from torch import cuda",
     "from torch.cuda import Stream", "torch.xpu.synchronize()"],
)  # fmt: skip
def test_every_way_to_use_a_vendor_module_is_detected(source: str) -> None:
    assert list(uses_of_vendors(source)) == [1]
    assert not list(uses_of_vendors("torch.backends.cuda.is_built()\ntorch.device('cuda')\ntorch.version.cuda"))


def test_vendor_modules_are_used_in_one_file_only() -> None:
    """In this file, each device operation of accel-run has a method with an implementation for each vendor."""
    result = {str(file.relative_to(ROOT)) for file in PLACES if any(uses_of_vendors(file.read_text(encoding="utf-8")))}
    assert result == {"runner/base/accelerator.py"}


def test_module_paths_named_in_text_exist() -> None:
    """A renamed module must not leave stale paths in code, comments or docs."""
    pages: list[Path] = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "decisions").glob("*.md"), ROOT / "README.md"]
    packages = "|".join(sorted({floor.split(".")[0] for floor in FLOORS} - {"cli", "auto_parallel", "__main__"}))
    named = re.compile(rf"(?<![\w/.-])(?:runner/)?((?:{packages})/[a-z_/]+\.py)\b")
    missing = {
        f"{file.relative_to(ROOT)}: {result}"
        for file in [*(place for place in PLACES if place.is_relative_to(ROOT / "runner")), *pages]
        for result in named.findall(file.read_text(encoding="utf-8"))
        if not (ROOT / "runner" / result).is_file()
    }
    assert not missing


@pytest.mark.parametrize("folder", ["tests", "docs", "scripts", "conf", "runner"])
def test_only_the_tasks_folder_is_packaged(folder: str) -> None:
    assert find_spec("runner.tasks.gpt.data") is not None
    assert find_spec(f"runner.{folder}") is None
