"""Imports go down only; axes do not know each other; tasks know the task contract and nothing else of the runner."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {
    "base": 0,
    "distributed": 1,
    "axes": 2, "observe": 2, "durable": 2, "interface": 2,
    "plan": 3,
    "engine": 4,
    "doctor": 5,
    "launch": 5,
    "measure": 6,
    "report": 7,
    "commands": 8,
    "cli": 9, "__main__": 10,
}  # fmt: skip


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def floor_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "runner" and len(parts) > 1 else None


FILES = sorted(
    path for path in (ROOT / "runner").rglob("*.py") if path.parent.name != "runner" or path.stem != "__init__"
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_down_only(file: Path) -> None:
    inner = file.relative_to(ROOT / "runner")
    mine = inner.parts[0].removesuffix(".py")
    for module in imports(file):
        floor = floor_of(module)
        if floor is None:
            continue
        assert floor in FLOORS, f"{module} is on no floor"
        assert FLOORS[floor] < FLOORS[mine] or floor == mine, (
            f"{inner} imports {module}, which is above it or beside it"
        )
        if mine == floor == "axes":
            pytest.fail(f"{inner} imports {module}: axes do not know each other")


@pytest.mark.parametrize("file", sorted((ROOT / "tasks").rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_tasks_know_the_contract_only(file: Path) -> None:
    allowed = {f"runner.base.{name}" for name in ("task", "values", "errors", "noise", "packages", "picture")}
    allowed.add("runner.axes.attention")  # nmt tells which kernel ran each of its calls
    used = {module for module in imports(file) if module.startswith("runner")}
    assert {module for module in used if not module.startswith("runner.tasks.")} <= allowed


def uses_of_cuda(source: str) -> Iterator[int]:
    """Yield the lines that name the module torch.cuda, in whatever way."""
    for node in ast.walk(ast.parse(source)):
        is_attribute = isinstance(node, ast.Attribute) and node.attr == "cuda" and ast.unparse(node.value) == "torch"
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if is_attribute or any(f"{module}.{name}".lstrip(".").startswith("torch.cuda") for name in names):
            yield node.lineno  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "source",
    ["torch.cuda.synchronize()", "a = torch.cuda", "import torch.cuda as c", "from torch import cuda",
     "from torch.cuda import Stream"],
)  # fmt: skip
def test_each_way_to_name_torch_cuda_is_seen(source: str) -> None:
    assert list(uses_of_cuda(source)) == [1]
    assert not list(uses_of_cuda("torch.backends.cuda.is_built()\ntorch.device('cuda')\ntorch.version.cuda"))


def test_torch_cuda_is_named_in_one_file() -> None:
    """Vendors differ: what accel-run asks of a device is a method there, with an answer for each."""
    files = [*FILES, *(ROOT / "tasks").rglob("*.py")]
    found = {str(file.relative_to(ROOT)) for file in files if any(uses_of_cuda(file.read_text()))}
    assert found == {"runner/base/accelerator.py"}


def test_every_floor_has_files() -> None:
    assert {file.relative_to(ROOT / "runner").parts[0].removesuffix(".py") for file in FILES} == set(FLOORS)


def test_modules_of_the_engine_do_not_import_each_other_in_a_circle() -> None:
    """Imports for type checkers and those inside functions count too."""
    engine = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in FILES
        if file.is_relative_to(ROOT / "runner" / "engine")
    }
    TopologicalSorter({name: engine.keys() & {*imports(file)} for name, file in engine.items()}).prepare()


def test_names_of_modules_and_public_classes_are_unique() -> None:
    """So a search for a name finds one thing. Suites have the names that are typed: suite=batch."""
    modules = Counter(file.stem for file in FILES if file.stem != "__init__" and file.parent.name != "suites")
    classes = Counter(
        node.name
        for file in FILES
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in (modules + classes).items() if count > 1] == []
