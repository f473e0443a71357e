"""Find the settings `inference.KEY` of a task file, without importing it or the files of its base classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from runner.base.paths import PACKAGE
from runner.config.schema import Key, Keys, list_nodes, read_classes, read_functions, read_module


def inference_keys(source: Path) -> Keys:
    """Return the keys `inference.KEY` of a task file: the parameters of `predict`, or those for `predict_batch`.

    All classes that the file defines or calls are searched, with the methods that they inherit from files in the same
    folder and from adapters. Classes of modules are excluded, because `inference` calls the methods of the task.
    """
    keys: dict[str, Key] = {}
    calls = (node.func for node in list_nodes(source) if isinstance(node, ast.Call))
    for name in dict.fromkeys([*read_classes(source), *map(ast.unparse, calls)]):
        found = _locate(source, name)
        if found is None or _is_module(*found):
            continue
        predict, batched = (_find_method(*found, method) for method in ("predict", "predict_batch"))
        if predict is None and batched is not None:
            keys |= read_functions(PACKAGE / "trained" / "batch_predictions.py")["open_batches"].keys
        keys |= (batched or {}) if predict is None else predict
    return keys


def _find_method(source: Path, name: str, method: str) -> Keys | None:
    """Return the keys of a method of a class or of the first base that has it; None if none of these files has it."""
    for file, kind in _lineage(source, name):
        functions = read_functions(file)
        if f"{kind}.{method}" in functions:
            return functions[f"{kind}.{method}"].keys
    return None


def _is_module(source: Path, name: str) -> bool:
    """Return whether a class derives from a class whose name ends with Module: nn.Module or LightningModule."""
    bases = (ast.unparse(base) for file, kind in _lineage(source, name) for base in read_classes(file)[kind].bases)
    return any(base.endswith("Module") for base in bases)


def _lineage(source: Path, name: str) -> Iterator[tuple[Path, str]]:
    """Yield file and name of a class, then those of its bases, as far as their files are known."""
    left, seen = [(source, name)], set()
    while left:
        file, kind = left.pop(0)
        if (file, kind) not in seen:
            seen.add((file, kind))
            yield file, kind
            bases = (_locate(file, ast.unparse(base)) for base in read_classes(file)[kind].bases)
            left += [base for base in bases if base is not None]


def _locate(source: Path, name: str) -> tuple[Path, str] | None:
    """Return file and name of the class that is called `name` in a file; None if its file is not known."""
    if name in read_classes(source):
        return source, name
    folder, _, kind = name.rpartition(".")  # Base, or my_module.Base
    for node in read_module(source).body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        lead = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            if (alias.asname or alias.name) != (folder or kind) or not (folder or lead):
                continue
            module, imported = (lead + alias.name, kind) if folder else (lead[:-1], alias.name)
            file = _find_file(source, module, getattr(node, "level", 0))
            with suppress(SyntaxError, ValueError, RecursionError, OSError):
                return _locate(file, imported) if file and file != source else None
    return None


def _find_file(source: Path, module: str, level: int) -> Path | None:
    """Return the file of a module of the adapters, or in the folder of `source`; None for other modules."""
    is_adapter = level == 0 and module.startswith("runner.adapters.")
    folder = PACKAGE.parent if is_adapter else source.parents[max(level - 1, 0)]
    path = folder.joinpath(*module.removeprefix("None.").split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)
