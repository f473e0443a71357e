"""Search test files for tests in which ranks of a process group fail."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

# Matches code that starts several ranks: command-line arguments, or calls that join a process group.
HAS_RANKS = re.compile(r"world_size=(?!1\b)|nproc-per-node|\brank_function\(|\bjoin_process_group\(")
HELPERS = {  # imported module: code that a test with several ranks contains
    "tests.distributed.ranks": "run_ranks(",
    "tests.faults.cells": "cells(",
}
# Matches code that ends a rank, or that expects a nonzero exit code.
FAILS = re.compile(
    r"\braise\b|\bos\.(kill|killpg|_exit|abort)\b|\bsys\.exit\b|\bSIG(KILL|TERM|INT|STOP|USR1)\b|\bfault=|\bassert_error\("
    r"|\bcode == [1-9]|\bcode=[1-9]|\bExit\.(?!DONE)|\brestarts"
)


def find_failing(root: Path, *folders: str) -> Iterator[str]:
    """Yield `path::test` for each test with several ranks that ends a process.

    The code that ends it may also be in a function, class or variable of the same file that the test uses.
    """
    for folder in folders:
        for path in sorted((root / folder).glob("test_*.py")):
            text = path.read_text()
            for test, source in _test_sources(text).items():
                has_helper = any(f"from {name} import" in text and call in source for name, call in HELPERS.items())
                if (has_helper or HAS_RANKS.search(source)) and FAILS.search(source):
                    yield f"{path.relative_to(root).as_posix()}::{test}"


def _test_sources(text: str) -> Mapping[str, str]:
    """Return the source of each test, with that of all names of the same file that it uses, even indirectly."""
    parts: dict[str, ast.stmt] = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            parts[node.name] = node
        elif isinstance(node, ast.Assign):
            parts.update({target.id: node for target in node.targets if isinstance(target, ast.Name)})
    uses = {name: _names(node) & parts.keys() for name, node in parts.items()}
    return {
        name: "\n".join(ast.unparse(parts[each]) for each in sorted(_reached(name, uses)))
        for name in parts
        if name.startswith("test_")
    }


def _names(node: ast.AST) -> set[str]:
    """Return the names that the code reads, and its parameters, which may be fixtures."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found | {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}


def _reached(name: str, uses: Mapping[str, set[str]]) -> set[str]:
    found, new = set[str](), {name}
    while new:
        found |= new
        new = {used for each in new for used in uses[each]} - found
    return found
