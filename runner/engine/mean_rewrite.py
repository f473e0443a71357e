"""Find the call in a task method that averages over the batch, and rewrite it as a sum."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from runner.engine.error_diagnosis import locate_definition


def line_to_change(loss: Callable[..., Any], source: Path, name: str = "") -> tuple[str, str]:
    """Return the location of the call that takes the mean, and its replacement.

    name  key in the returned dictionary whose value is searched first
    """
    try:
        lines, first = inspect.getsourcelines(loss)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = inspect.getsourcefile(loss)
    except (OSError, TypeError, SyntaxError):
        return str(source), _ANYWHERE
    # Search backwards from the last statement: an earlier mean may normalize the input.
    statements = tree.body[0].body if isinstance(tree.body[0], ast.FunctionDef) else tree.body
    nodes: list[ast.AST] = [
        value
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == name
    ]
    nodes += reversed(statements)
    for call in (node for each in nodes for node in ast.walk(each) if isinstance(node, ast.Call)):
        before, after = ast.unparse(call), _as_sum(call)
        if after is not None:
            return f"{file}:{first + call.lineno - 1}", f"replace {before} by {after}"
    return locate_definition(loss, source), _ANYWHERE


def _as_sum(call: ast.Call) -> str | None:
    """Return a call that averages over all elements rewritten as a sum, or None for any other call."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "mean" and isinstance(call.func, ast.Attribute):
        is_of_torch = ast.unparse(call.func.value) == "torch"
        is_over_all = len(call.args) == is_of_torch and not call.keywords
        call.func.attr = "sum"
        return ast.unparse(call) if is_over_all else None
    given = [ast.unparse(word.value) for word in call.keywords if word.arg == "reduction"]
    if not _reduces(vars(nn.functional).get(name)) or given in (["'none'"], ["'sum'"]):
        return None
    call.keywords = [word for word in call.keywords if word.arg != "reduction"]
    call.keywords.append(ast.keyword("reduction", ast.Constant("sum")))
    return ast.unparse(call).replace(chr(39) + "sum" + chr(39), _SUM)


def _reduces(function: Any) -> bool:
    """Return True if the function is a torch loss with a `reduction` argument."""
    try:
        return "reduction" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


_SUM = '"sum"'
_ANYWHERE = 'use reduction="sum", as in F.cross_entropy(logits, y, reduction="sum") or nn.MSELoss(reduction="sum")'
