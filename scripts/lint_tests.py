"""Check that tests do not depend on clocks, order events by sleeping, or use private names.

    python scripts/lint_tests.py [PATH ...]      # default: tests/

Each finding is one line `path:line: rule: what`. Rules:

sleep      time.sleep: order events with pipes, barriers and `tests.waiting.wait_until`
clock      an assertion about a value read from a clock: count costs instead; durations belong to scripts/measure
measured   an assertion that compares a duration, rate or ratio in a report, recognized by its key, with a number
timeout    a timeout below 30 s, which a busy machine may exceed; includes `wait`, `join` and `time.monotonic() + 20`
private    a private name of another module: if a test needs one, the code lacks an interface
tolerance  a literal tolerance below 0.001: derive it from the number format and the sum, as in tests/rounding.py
phrase     an assertion with a sentence of a message: use snapshots for screens; else check codes, keys and structure

A line may state why it is an exception: `# lint-tests: RULE: reason`. Exit 0: nothing found. 1: findings.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

ROOT = Path(__file__).resolve().parents[1]
CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "thread_time", "time_ns"}
MIN_TIMEOUT_S = 30
# Underscored names that are documented API: of named tuples, of the interpreter and of torch.
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit", "_getframe", "_MEIPASS", "_C", "_dynamo", "_inductor"}
FOREIGN = {"torch", "os", "sys", "ctypes", "pytest", "F", "dist", "threading", "signal", "_pytest"}
WORDS_OF_A_PHRASE = 4
TOLERANCES = {"rel", "abs", "rtol", "atol"}
MAX_ROUNDING = 1e-3  # larger tolerances are for statistics, printed figures or measured values
MEASURED = re.compile(r"(_ms|_us|_s|seconds|speedup|overhead)$|/s$|^(ratios?|shares?|middle)$")  # keys of reports
DEADLINE = re.compile(r"= time\.(?:monotonic|perf_counter|time)\(\) \+ (\d+(?:\.\d+)?)\b")
EXCEPTION = re.compile(r"#\s*lint-tests:\s*([a-z, ]+):\s*\S")

Finding = tuple[int, str, str]
Constants = Mapping[str, ast.expr]  # of a module, by name


def main(arguments: list[str]) -> int:
    """Print each finding; return the exit code."""
    paths = [Path(each) for each in arguments] or [ROOT / "tests"]
    files = sorted(file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path]))
    num_found = 0
    for file in files:
        text = file.read_text()
        lines = text.splitlines()
        for line, rule, what in sorted({*findings(ast.parse(text)), *_short_deadlines(lines)}):
            if rule not in _excused(lines, line):
                num_found += 1
                print(f"{file}:{line}: {rule}: {what}")
    return int(num_found > 0)


def _excused(lines: list[str], line: int) -> set[str]:
    """Return the rules from which a comment on this line, or on the line above, exempts the line."""
    found = [EXCEPTION.search(lines[at]) for at in (line - 1, line - 2) if 0 <= at < len(lines)]
    return {rule.strip() for each in found if each for rule in each[1].split(",")}


def findings(tree: ast.Module) -> Iterator[Finding]:
    """Return (line, rule, what) for each violation in a module."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    durations = {each.name for each in tree.body if isinstance(each, ast.FunctionDef) and _returns_duration(each)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _of_call(node)
            yield from _tolerances_of_call(node, constants)
        elif isinstance(node, ast.Attribute):
            yield from _of_attribute(node)
        elif isinstance(node, ast.ImportFrom):
            yield from _of_import(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _clocks_compared(node, durations)
        elif isinstance(node, ast.Assert):
            yield from _phrases(node)
            yield from _measured(node)
            yield from _tolerances_compared(node, constants)


def _of_call(call: ast.Call) -> Iterator[Finding]:
    name = ast.unparse(call.func)
    if name in ("time.sleep", "sleep", "asyncio.sleep"):
        yield call.lineno, "sleep", ast.unparse(call)
    limits = [word.value for word in call.keywords if word.arg in ("timeout", "timeout_s", "deadline_s")]
    if name in ("pytest.mark.timeout", "faulthandler.dump_traceback_later") or name.endswith((".wait", ".join")):
        limits += call.args[:1]
    for limit in limits:
        if (
            isinstance(limit, ast.Constant)
            and isinstance(limit.value, (int, float))
            and 0 < limit.value < MIN_TIMEOUT_S
        ):
            yield call.lineno, "timeout", ast.unparse(call)[:100]
    if name.endswith((".setattr", ".delattr", "patch.object")) and len(call.args) > 1:
        target = call.args[1]
        if isinstance(target, ast.Constant) and _is_private(str(target.value)) and not _is_foreign(call.args[0]):
            yield call.lineno, "private", f"{ast.unparse(call.args[0])}.{target.value}"


def _short_deadlines(lines: list[str]) -> Iterator[Finding]:
    """Find short deadlines, including those in programs that tests contain as strings."""
    for number, line in enumerate(lines, 1):
        found = DEADLINE.search(line)
        if found and float(found[1]) < MIN_TIMEOUT_S:
            yield number, "timeout", found[0]


def _of_attribute(node: ast.Attribute) -> Iterator[Finding]:
    if _is_private(node.attr) and not _is_foreign(node.value):
        yield node.lineno, "private", ast.unparse(node)[:100]


def _of_import(node: ast.ImportFrom) -> Iterator[Finding]:
    if (node.module or "").split(".")[0] in ("runner", "tasks", "scripts"):
        for each in node.names:
            if _is_private(each.name):
                yield node.lineno, "private", f"{node.module}.{each.name}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def _is_foreign(value: ast.expr) -> bool:
    """Return whether the object belongs to the test or to a third-party package."""
    root = value
    while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
        root = root.func if isinstance(root, ast.Call) else root.value
    return isinstance(root, ast.Name) and (root.id in ("self", "cls", "super") or root.id in FOREIGN)


def _returns_duration(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Return) and node.value and _reads_clock(node.value) for node in ast.walk(function))


def _reads_clock(node: ast.AST) -> bool:
    names = [ast.unparse(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(name.split(".")[-1] in CLOCKS or name == "time.time" for name in names)


def _clocks_compared(function: ast.FunctionDef | ast.AsyncFunctionDef, durations: set[str]) -> Iterator[Finding]:
    """Trace values from clocks, or from functions in `durations`, which read clocks, to assertions of a function."""
    tainted: set[str] = set()

    def reads_clock(node: ast.AST) -> bool:
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return _reads_clock(node) or bool(names & (tainted | durations))

    for _ in range(3):
        for node in ast.walk(function):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if reads_clock(node.value):
                    tainted |= {
                        each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
                    }
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and reads_clock(node.test):
            yield node.lineno, "clock", ast.unparse(node.test)[:100]


def _measured(node: ast.Assert) -> Iterator[Finding]:
    """Find a comparison of a figure of a report, which depends on the machine, with a number other than 0."""
    for each in ast.walk(node.test):
        if isinstance(each, ast.Compare) and any(isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for op in each.ops):
            keys = [part.slice.value for part in ast.walk(each) if _is_keyed(part)]
            sides = (each.left, *each.comparators)
            has_number = any(isinstance(side, ast.Constant) and side.value for side in sides)
            if has_number and any(MEASURED.search(key) for key in keys):
                yield node.lineno, "measured", ast.unparse(node.test)[:100]


def _is_keyed(node: ast.AST) -> TypeGuard[Any]:
    """Return whether this is `content["key"]`."""
    return (
        isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
    )


def _tolerances_of_call(call: ast.Call, constants: Constants) -> Iterator[Finding]:
    """Find a literal tolerance of pytest.approx, assert_close, allclose and the like."""
    for keyword in call.keywords:
        if keyword.arg in TOLERANCES and _is_rounding(keyword.value, constants):
            yield call.lineno, "tolerance", ast.unparse(call)[-100:]


def _tolerances_compared(node: ast.Assert, constants: Constants) -> Iterator[Finding]:
    """Find a literal tolerance as an upper bound, or as a term or factor of one."""
    for each in ast.walk(node.test):
        if isinstance(each, ast.Compare):
            for op, bound in zip(each.ops, each.comparators, strict=True):
                if isinstance(op, (ast.Lt, ast.LtE)) and any(_is_rounding(part, constants) for part in _terms(bound)):
                    yield node.lineno, "tolerance", ast.unparse(each)[:100]


def _terms(value: ast.expr) -> Iterator[ast.expr]:
    if isinstance(value, ast.BinOp):
        yield from _terms(value.left)
        yield from _terms(value.right)
    else:
        yield value


def _is_rounding(value: ast.expr, constants: Constants) -> bool:
    """Return whether this is a small number, or the name of a constant of the module that is one."""
    literal = constants.get(value.id) if isinstance(value, ast.Name) else value
    number = literal.value if isinstance(literal, ast.Constant) else None
    return isinstance(number, float) and 0 < number < MAX_ROUNDING


def _phrases(node: ast.Assert) -> Iterator[Finding]:
    for each in ast.walk(node.test):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            words = re.findall(r"[A-Za-z]{2,}", each.value)
            if len(words) >= WORDS_OF_A_PHRASE and " " in each.value:
                yield each.lineno, "phrase", each.value[:80].replace("\n", "\\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
