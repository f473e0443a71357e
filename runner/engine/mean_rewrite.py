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


def find_mean_call(loss: Callable[..., Any], source: Path, name: str = "") -> tuple[str, str]:
    """Return the location of the call that averages, and the change that makes it a sum.

    name  key in the returned dictionary whose value is searched first
    """
    try:
        lines, first = inspect.getsourcelines(loss)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = inspect.getsourcefile(loss)
    except (OSError, TypeError, SyntaxError):
        return str(source), _GENERAL_ADVICE
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
    for call in (node for root in nodes for node in ast.walk(root) if isinstance(node, ast.Call)):
        before, after = ast.unparse(call), _rewrite_as_sum(call)
        if after is not None:
            return f"{file}:{first + call.lineno - 1}", f"replace {before} by {after}"
    return locate_definition(loss, source), _GENERAL_ADVICE


def _rewrite_as_sum(call: ast.Call) -> str | None:
    """Return a call that averages over all elements rewritten as a sum, or None for any other call."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "mean" and isinstance(call.func, ast.Attribute):
        is_function = ast.unparse(call.func.value) == "torch"  # torch.mean(x), not x.mean()
        is_over_all = len(call.args) == is_function and not call.keywords
        call.func.attr = "sum"
        return ast.unparse(call) if is_over_all else None
    reduction = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "reduction"]
    if not _has_reduction(vars(nn.functional).get(name)) or reduction in (["'none'"], ["'sum'"]):
        return None
    call.keywords = [keyword for keyword in call.keywords if keyword.arg != "reduction"]
    call.keywords.append(ast.keyword("reduction", ast.Constant("sum")))
    return ast.unparse(call).replace(chr(39) + "sum" + chr(39), _SUM)


def _has_reduction(function: Any) -> bool:
    try:
        return "reduction" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


_SUM = '"sum"'
_GENERAL_ADVICE = (
    'use reduction="sum", as in F.cross_entropy(logits, y, reduction="sum") or nn.MSELoss(reduction="sum")'
)
