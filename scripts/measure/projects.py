"""Count the lines of each project in tests/projects with accel-run, Lightning, transformers' Trainer and a plain loop.

    python scripts/measure/projects.py

Blank lines, comments, imports and docstrings do not count. The model and the data do not count either, because they are
the same in all variants. In a project, the settings, tables, hooks and the class of the task without `dataset` count;
for a plain loop, its function and the helpers of `plain_loops.py` that it calls; in with_lightning and with_trainer,
the rest of the file. `tests/projects/test_other_trainers.py` shows that they train in the same way. A plain loop has no
micro-batches, ranks, precision, checkpoints, resuming, logging or evaluation during training.
"""

from __future__ import annotations

import ast
from pathlib import Path

PROJECTS = Path(__file__).parents[2] / "tests" / "projects"
TABLES = ("SETTINGS", "OBJECTIVES", "OPTIMIZERS", "SCHEDULERS", "HOOKS")
FUNCTIONS = ("build", "optimizer", "schedule", "accuracy")
DATA = ("dataset", "stream", "collate", "sample_lengths")
NOT_FOR_THE_TRAINER = {
    ("actor_critic", "dcgan"): "the Trainer has only one optimizer",
    ("lightning_module",): "the model is a LightningModule",
    ("nano_gpt",): "the Trainer saves tied weights only for a PreTrainedModel, such as the model of hf_gpt2",
    ("unet_diffusion",): "the Trainer does not support weight averaging",
}


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
    """Return the number of lines that accel-run requires: settings, tables, `build`, hooks and the task."""
    tree = ast.parse(file.read_text())
    found: set[int] = set()
    for node in tree.body:
        is_table = isinstance(node, ast.Assign) and all(
            isinstance(target, ast.Name) and target.id in TABLES for target in node.targets
        )
        is_task = isinstance(node, ast.ClassDef) and any(ast.unparse(base) in ("Task", "Hook") for base in node.bases)
        is_option = isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS
        if is_table or is_option:
            found |= lines_of(node)
        elif is_task and isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if getattr(each, "name", "") not in DATA]
            found |= {node.lineno}.union(*map(lines_of, methods))
    return len(found)


def of_loops(file: Path) -> dict[str, int]:
    """Return function -> number of its lines, including those of the helpers that it calls."""
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


def of_script(file: Path) -> int | None:
    """Return the number of lines of a script for another trainer; None if there is no script."""
    if not file.exists():
        return None
    body = [node for node in ast.parse(file.read_text()).body[1:] if not isinstance(node, (ast.Import, ast.ImportFrom))]
    return len(set[int]().union(*map(lines_of, body)))


def table() -> str:
    """Return the table in Markdown, with sums and the reasons for missing projects."""
    loops = of_loops(PROJECTS / "plain_loops.py")
    files = [file for file in sorted(PROJECTS.glob("*.py")) if file.stem in loops]
    counts = {
        file.stem: (
            of_project(file),
            *(of_script(PROJECTS / folder / file.name) for folder in ("with_lightning", "with_trainer")),
            loops[file.stem],
        )
        for file in files
    }
    rows = ["| project | accel-run | Lightning | Trainer | plain loop |", "|---|---|---|---|---|"]
    rows += [
        f"| {name} | {' | '.join('' if each is None else str(each) for each in row)} |" for name, row in counts.items()
    ]
    for title, column_needed in ((f"all {len(files)} projects", 0), ("the projects with a Trainer version", 2)):
        columns = list(zip(*(row for row in counts.values() if row[column_needed] is not None), strict=True))
        cells = ["" if None in column else str(sum(column)) for column in columns]
        rows.append(f"| total of {title} | {' | '.join(cells)} |")
    missing = [f"- {', '.join(names)}: {reason}" for names, reason in NOT_FOR_THE_TRAINER.items()]
    return "\n".join([*rows, "", "These projects have no Trainer version:", "", *missing])


if __name__ == "__main__":
    print(table())
