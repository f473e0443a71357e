"""scripts/lint_shape.py reports each violation, and nothing in a module that follows the rules."""

from __future__ import annotations

import pytest

from scripts.lint_shape import MAX_LATE, findings, late_imports, parse, top_level

METHODS = "".join(f"    def f{number}(self): ...\n" for number in range(31))
FIELDS = "".join(f"    f{number}: int\n" for number in range(15))
PLANTED = {
    "file": ("runner/base/a.py", "\n" * 601),
    "class": ("runner/base/a.py", f"class A:\n{METHODS}"),
    "dataclass": ("runner/base/a.py", f"@dataclass(frozen=True)\nclass A:\n{FIELDS}"),
    "function": ("runner/base/a.py", "class A:\n    def f(self, a, b, c, d, e, f, g): ..."),
    "layer": ("runner/base/a.py", "def f():\n    from runner.engine.update.loop import train"),
    "layer (import for type checking)": ("runner/base/a.py", "if TYPE_CHECKING:\n    import runner.engine.update.loop"),
    "layer (task imports more than its contract)": ("tasks/mine/task.py", "from runner.base import world"),
    "layer (axis imports an axis)": ("runner/axes/precision.py", "from runner.axes.memory import MEMORY"),
    "layer (package missing from FLOORS)": ("runner/elsewhere/a.py", ""),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_each_violation_is_found(planted: str) -> None:
    assert {finding.rule for finding in findings([parse(*PLANTED[planted])])} == {planted.split(maxsplit=1)[0]}


def test_import_cycles_are_found() -> None:
    """Cycles may have any length. A package that imports its own modules is not a cycle."""
    texts = {
        "runner/base/a.py": "from runner.base import b",
        "runner/base/b.py": "if TYPE_CHECKING:\n    from runner.base.c import C",
        "runner/base/c.py": "def f():\n    import runner.base.a",
        "runner/base/d.py": "import runner.base.a",
        "runner/base/__init__.py": "from runner.base.d import D",
    }
    (result,) = findings([parse(path, text) for path, text in texts.items()])
    assert (result.rule, result.subject.split()) == ("cycle", [f"runner.base.{name}" for name in "abc"])


def test_duplicate_names_are_found() -> None:
    texts = {
        "runner/base/a.py": "class One: ...\nclass _Private: ...",
        "runner/config/a.py": "class One: ...\nclass _Private: ...",
        "runner/tools/measure/suites/one.py": "",
        "runner/tools/measure/one.py": "",
    }
    result = list(findings([parse(path, text) for path, text in texts.items()]))
    assert sorted(finding.key for finding in result) == [("name", "One"), ("name", "a")]


def test_code_within_the_limits_is_allowed() -> None:
    texts = {
        "runner/base/a.py": "def f(a, b, c, d, e, f, *, g, h): ...\nclass A:\n    def g(self, a, b, c, d, e, f): ...",
        "runner/base/b.py": f"class B:\n{FIELDS}",
        "runner/base/c.py": "\n" * 600,
        "runner/engine/d.py": "from runner import __version__\nfrom runner.base import a\nimport torch.nn",
        "tasks/mine/task.py": "from runner.base.task import Task\nfrom runner.tasks.gpt.data import prepared",
    }
    assert list(findings([parse(path, text) for path, text in texts.items()])) == []


def test_the_number_of_local_imports_must_equal_the_limit() -> None:
    """Imports inside functions of commands are not counted."""
    late = "def f():\n    import a\n    def g():\n        from b import c, d\n"
    modules = [parse("runner/base/a.py", late * MAX_LATE), parse("runner/commands/b.py", late)]
    (found,) = late_imports(modules)
    assert found.rule == "late"
    assert str(2 * MAX_LATE) in found.detail
    exact = "def f():\n" + "    import a\n" * MAX_LATE + "import b\n"
    assert list(late_imports([parse("runner/base/a.py", exact)])) == []
    assert [each.rule for each in late_imports([parse("runner/base/a.py", "")])] == ["late"]


def test_unexpected_top_level_entries_are_found() -> None:
    found = top_level(["--task", "README.md", "runner/base/a.py", "out/a.txt", "out/b.txt"])
    assert [each.subject for each in found] == ["--task", "out"]
