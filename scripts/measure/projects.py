"""Count the lines of each project of tests/projects beside those of its plain loop.

    python scripts/measure/projects.py

Lines of code without blank lines, comments and docstrings. The model and the data are the same in both and are not
counted: of a project, the settings, tables and the class of the task without `dataset`; of a plain loop, its function
and the helpers of `plain_loops.py` that it calls. A plain loop has no micro-batches, ranks, precision, checkpoints,
resuming, logging or evaluation during training.
"""

from __future__ import annotations

import ast
from pathlib import Path

PROJECTS = Path(__file__).parents[2] / "tests" / "projects"
DATA = ("dataset", "stream", "collate", "sample_lengths")


def lines_of(node: ast.AST) -> set[int]:
    """Return the numbers of the lines of a statement, without docstrings."""
    found = {
        line
        for inner in ast.walk(node)
        if hasattr(inner, "lineno")
        for line in range(inner.lineno, (inner.end_lineno if not hasattr(inner, "body") else inner.lineno) + 1)
    }
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(inner) is not None:
            text = inner.body[0]
            found -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return found


def of_project(file: Path) -> int:
    """Return the lines that the runner asks for: settings, tables, `build` and the task."""
    tree = ast.parse(file.read_text())
    found: set[int] = set()
    for node in tree.body:
        is_table = isinstance(node, ast.Assign) and all(
            isinstance(target, ast.Name) and target.id in ("SETTINGS", "OBJECTIVES", "OPTIMIZERS", "SCHEDULERS")
            for target in node.targets
        )
        is_task = isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Task" for base in node.bases)
        is_option = isinstance(node, ast.FunctionDef) and node.name in ("build", "optimizer", "schedule")
        if is_table or is_option:
            found |= lines_of(node)
        elif is_task and isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if getattr(each, "name", "") not in DATA]
            found |= {node.lineno}.union(*map(lines_of, methods))
    return len(found)


def of_loops(file: Path) -> dict[str, int]:
    """Return function -> lines with those of the helpers that it calls."""
    functions = {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}

    def called(name: str) -> set[str]:
        found, left = {name}, [name]
        while left:
            calls = (each for each in ast.walk(functions[left.pop()]) if isinstance(each, ast.Call))
            new = {each.func.id for each in calls if isinstance(each.func, ast.Name)} & functions.keys() - found
            found |= new
            left += new
        return found

    return {name: len(set[int]().union(*(lines_of(functions[each]) for each in called(name)))) for name in functions}


def main() -> None:
    """Print the table."""
    loops = of_loops(PROJECTS / "plain_loops.py")
    files = [file for file in sorted(PROJECTS.glob("*.py")) if file.stem in loops]
    print("| project | task | plain loop |\n|---|---|---|")
    for file in files:
        print(f"| {file.stem} | {of_project(file)} | {loops[file.stem]} |")
    total = sum(map(of_project, files)), sum(loops[file.stem] for file in files)
    print(f"| all {len(files)} | {total[0]} | {total[1]} |")


if __name__ == "__main__":
    main()
