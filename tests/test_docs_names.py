"""docs/one-update.md names existing code, and its table lists the hooks in order."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "one-update.md").read_text(encoding="utf-8")
NOT_OURS = (".jsonl", ".json", ".md", ".py", ".yaml")


@cache
def defined(source: Path) -> Mapping[str, set[str]]:
    """Return the names that a module defines: name -> names in the class body, empty for anything else."""
    return names_in(ast.parse(source.read_text(encoding="utf-8")).body)


def names_in(body: Sequence[ast.stmt]) -> dict[str, set[str]]:
    result: dict[str, set[str]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            result[node.name] = set(names_in(node.body))
        elif isinstance(node, ast.FunctionDef):
            result[node.name] = set()
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            result |= {target.id: set() for target in targets if isinstance(target, ast.Name)}
    return result


def exists(name: str) -> bool:
    """Return whether `folder.module.name` or `Class.name` exists in the runner."""
    parts = name.split(".")
    place, depth = ROOT / "runner", 0
    while depth < len(parts) and (place / parts[depth]).is_dir():
        place, depth = place / parts[depth], depth + 1
    module = place / f"{parts[depth]}.py" if depth < len(parts) else place / "__init__.py"
    depth += module.is_file()
    modules = [module] if module.is_file() else [place / "__init__.py"] if depth else (ROOT / "runner").rglob("*.py")
    rest = parts[depth:]
    return not rest or any(rest[0] in result and {*rest[1:]} <= result[rest[0]] for result in map(defined, modules))


@pytest.mark.slow
def test_code_names_exist() -> None:
    named = set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)+)`", PAGE))
    ours = {name for name in named if not name.endswith(NOT_OURS)}
    assert len(ours) > 40
    assert {name for name in ours if not exists(name)} == set()


def test_hooks_are_listed_in_call_order() -> None:
    tree = ast.parse((ROOT / "runner" / "engine" / "hooks" / "__init__.py").read_text(encoding="utf-8"))
    (table,) = (node.value for node in tree.body if isinstance(node, ast.AnnAssign))
    assert isinstance(table, ast.List)
    order = [each.id for each in table.elts if isinstance(each, ast.Name)]
    rows = re.findall(r"^\| `engine\.hooks\.\w+\.(\w+)` \|", PAGE, re.MULTILINE)
    assert rows == order


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    "name", ["engine.update.loop.gone", "engine.gone.train", "Phase.gone", "Gone.run", "gone.main"]
)
def test_a_removed_name_is_detected(name: str) -> None:
    assert not exists(name)
