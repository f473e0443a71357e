"""Check the shape of the project: sizes are limited, imports go down only, names are unique, the top level is fixed.

    python scripts/lint_shape.py

Each finding is one line `rule: subject: detail`. Rules:

file         a file has at most 600 lines
class        a class has at most 30 methods
dataclass    a dataclass has at most 14 fields
function     a function has at most 6 positional parameters; settings after `*` are not counted
layer        imports go down only; axes do not import each other; tasks import only the task contract
cycle        modules do not import each other in a cycle, including imports for type checkers and inside functions
name         names of modules and of public classes are unique, so that a search finds one thing
late         the number of imports inside functions does not grow; imports in commands/ and cli.py do not count, because
             they make commands start fast
top          the top level has only the names in TOP_LEVEL, so that a file created by a mistyped redirection is found

NOT_YET lists the current exceptions. It may only shrink: an entry that is no longer needed is also a finding.
Exit 0: nothing found. 1: findings.
"""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 600
MAX_METHODS = 30
MAX_FIELDS = 14
MAX_POSITIONAL = 6
SETTINGS = "runner/config/settings.py"  # its dataclasses have a field per key
# Number of imports inside functions, which keep modules importable without torch, Hydra or numpy. Never raise it.
MAX_LATE = 56
MAY_IMPORT_LATE = ("runner/commands/", "runner/cli.py")
# A package imports only packages with a smaller number.
FLOORS = {
    "base": 0, "version": 0,
    "host": 1, "tensors": 1, "trackers": 1, "workload": 1,
    "config": 2, "console": 2, "distributed": 2, "loading": 2, "profiling": 2, "records": 2,
    "adapters": 3, "axes": 3, "durable": 3, "auto_parallel": 3, "monitor": 3,
    "plan": 4,
    "engine.contract": 5, "engine.process": 5,
    "engine.checkpoints": 6, "engine.sources": 6, "engine.update": 6,
    "engine.parts": 7,
    "engine.evaluation": 8, "forecast": 8,
    "engine.checks": 9, "tools.doctor": 9,
    "engine": 10,
    "trained": 11,
    "launch": 12,
    "sweeps": 13, "tools.measure": 13,
    "tools.report": 14,
    "commands": 15,
    "api": 16, "cli": 16,
    "__main__": 17,
}  # fmt: skip
CONTRACT = {f"runner.base.{name}" for name in ("task", "values", "errors", "noise", "packages", "picture")}
CONTRACT.add("runner.axes.attention")  # nmt reports which kernel ran each of its calls
TOP_LEVEL = frozenset({
    ".ci", ".dockerignore", ".editorconfig", ".gitattributes", ".github", ".gitignore", ".gitmessage",
    ".pre-commit-config.yaml", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "Dockerfile", "LICENSE",
    "README.md", "SECURITY.md", "changelog.d", "conf", "docs", "pyproject.toml", "runner", "scripts", "tasks",
    "tests",
})  # fmt: skip
NOT_YET: frozenset[tuple[str, str]] = frozenset()  # (rule, subject)


@dataclass(frozen=True)
class Finding:
    rule: str
    subject: str
    detail: str

    @property
    def key(self) -> tuple[str, str]:
        return self.rule, self.subject


@dataclass(frozen=True)
class Module:
    """The facts about a file that the rules need. The tree is not kept: 300 trees slow down garbage collection."""

    path: str
    name: str
    imports: frozenset[str]  # dotted names, anywhere in the file; the last part may be a class or a function
    classes: tuple[str, ...]  # public classes at the top level
    num_late: int  # number of imports inside functions
    too_large: tuple[Finding, ...]


def main() -> int:
    """Print each finding; return the exit code."""
    modules = parse_all()
    found = {finding.key: finding for finding in (*findings(modules), *late_imports(modules), *top_level(tracked()))}
    for key, finding in sorted(found.items()):
        if key not in NOT_YET:
            print(f"{finding.rule}: {finding.subject}: {finding.detail}")
    stale = sorted(NOT_YET - found.keys())
    for rule, subject in stale:
        print(f"{rule}: {subject}: no longer an exception; remove it from NOT_YET")
    return int(bool(stale or found.keys() - NOT_YET))


def tracked() -> list[str]:
    """Return the paths that git tracks, relative to the root of the checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return listed.stdout.split("\0")[:-1]


def top_level(paths: Iterable[str]) -> Iterator[Finding]:
    """Yield each name at the top level that TOP_LEVEL does not contain."""
    for name in sorted({path.partition("/")[0] for path in paths} - TOP_LEVEL):
        yield Finding("top", name, "not a name of the top level")


@cache
def parse_all() -> tuple[Module, ...]:
    """Parse the files of runner/ and tasks/, once each."""
    files = sorted(path for folder in ("runner", "tasks") for path in (ROOT / folder).rglob("*.py"))
    was_enabled = gc.isenabled()
    gc.disable()  # trees have cycles, and collecting while they grow takes three times as long as parsing
    try:
        return tuple(parse(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")) for file in files)
    finally:
        if was_enabled:
            gc.enable()


def parse(path: str, text: str) -> Module:
    """Parse one file; `path` is relative to the root of the checkout."""
    tree = ast.parse(text)
    statements = tuple(_statements(tree))
    classes = tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")
    return Module(
        path,
        ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__"),
        frozenset(_imports(statements)),
        classes,
        _count_late_imports(statements),
        tuple(_too_large(path, len(text.splitlines()), statements)),
    )


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Walk the tree without expressions, which the rules do not need: 5 times as fast."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, field, ()):
            if isinstance(each, ast.stmt):
                yield each
            yield from _statements(each)


def _imports(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield each import: a module, or `module.name` for `from module import name`."""
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _count_late_imports(statements: Iterable[ast.stmt]) -> int:
    functions = [node for node in statements if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inner = (node for function in functions for node in _statements(function))
    return len({node.lineno for node in inner if isinstance(node, (ast.Import, ast.ImportFrom))})


def findings(modules: Iterable[Module]) -> Iterator[Finding]:
    """Yield each violation, including those in NOT_YET."""
    runner = [module for module in modules if module.name.partition(".")[0] == "runner"]
    for module in runner:
        yield from module.too_large
        yield from layers(module)
    for module in modules:
        if module.name.partition(".")[0] == "tasks":
            yield from contract(module)
    yield from cycles({module.name: module.imports for module in runner})
    yield from names(runner)


def _too_large(path: str, num_lines: int, statements: Iterable[ast.stmt]) -> Iterator[Finding]:
    """Yield a finding for the file, each class and each function that is too large."""
    if num_lines > MAX_LINES:
        yield Finding("file", path, f"{num_lines} lines, at most {MAX_LINES}")
    for node in statements:
        if isinstance(node, ast.ClassDef):
            yield from _class_sizes(path, node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parameters = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
            count = len(parameters) - (parameters[:1] in (["self"], ["cls"]))
            if count > MAX_POSITIONAL:
                detail = f"{count} positional parameters, at most {MAX_POSITIONAL}"
                yield Finding("function", f"{path}::{node.name}", detail)


def _class_sizes(path: str, node: ast.ClassDef) -> Iterator[Finding]:
    methods = sum(isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) for each in node.body)
    if methods > MAX_METHODS:
        yield Finding("class", f"{path}::{node.name}", f"{methods} methods, at most {MAX_METHODS}")
    fields = sum(isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.dump(each.annotation) for each in node.body)
    if path != SETTINGS and fields > MAX_FIELDS and any("dataclass" in ast.dump(each) for each in node.decorator_list):
        yield Finding("dataclass", f"{path}::{node.name}", f"{fields} fields, at most {MAX_FIELDS}")


def package_of(module: str) -> str | None:
    """Return the package of a module of the runner, a key of FLOORS: `runner.engine.update.loop` -> `engine.update`.

    If FLOORS does not contain the package, its first name is returned; None if the module is in no package.
    """
    parts = module.split(".")
    if parts[0] != "runner" or len(parts) < 2 or parts[1:] == ["tools"]:
        return None
    inner = ".".join(parts[1:3])
    return inner if inner in FLOORS else parts[1]


def layers(module: Module) -> Iterator[Finding]:
    """Yield each import of a module of the runner that does not go down."""
    mine = package_of(module.name)
    if mine is None:
        return
    if mine not in FLOORS:
        yield Finding("layer", module.path, f"{mine} is missing from FLOORS")
        return
    for imported in sorted(module.imports):
        package = package_of(imported)
        if package not in FLOORS:  # `from runner import __version__`
            continue
        subject = f"{module.path} -> {imported}"
        if package == mine == "axes" and imported != module.name:
            yield Finding("layer", subject, "axes do not import each other")
        elif package != mine and FLOORS[package] >= FLOORS[mine]:
            yield Finding("layer", subject, "the imported package is at the same level or above")


def contract(module: Module) -> Iterator[Finding]:
    """Yield each import of a task that is neither a task nor part of the task contract."""
    for imported in sorted(module.imports):
        known = CONTRACT | {"runner.tasks"}
        is_known = any(imported == each or imported.startswith(f"{each}.") for each in known)
        if imported.partition(".")[0] == "runner" and not is_known:
            yield Finding("layer", f"{module.path} -> {imported}", "tasks import only the task contract")


def cycles(imports: Mapping[str, Iterable[str]]) -> Iterator[Finding]:
    """Yield each group of modules that import each other, by Tarjan's algorithm for strongly connected components."""
    graph = {
        name: {each if each in imports else each.rpartition(".")[0] for each in found} & imports.keys() - {name}
        for name, found in imports.items()
    }
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for each in graph[name]:
            if each not in order:
                visit(each)
            if each in stack:
                low[name] = min(low[name], low[each])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            groups.append(sorted(group))

    for name in graph:
        if name not in order:
            visit(name)
    for group in groups:
        if len(group) > 1:
            yield Finding("cycle", " ".join(group), "these modules import each other")


def names(modules: Iterable[Module]) -> Iterator[Finding]:
    """Yield names of modules or public classes that occur twice, except modules of suites, named as in suite=NAME."""
    places = defaultdict(list)
    for module in modules:
        stem = module.name.rpartition(".")[2]
        if not module.path.endswith("__init__.py") and ".suites." not in module.name:
            places[stem].append(module.path)
        for each in module.classes:
            places[each].append(module.path)
    for name, paths in places.items():
        if len(paths) > 1:
            yield Finding("name", name, f"in {', '.join(paths)}")


def late_imports(modules: Iterable[Module]) -> Iterator[Finding]:
    """Yield a finding if the number of imports inside functions is not MAX_LATE."""
    counts = {
        module.path: module.num_late
        for module in modules
        if module.path.startswith("runner/") and not module.path.startswith(MAY_IMPORT_LATE)
    }
    total = sum(counts.values())
    if total > MAX_LATE:
        most = sorted(counts, key=lambda path: -counts[path])[:5]
        detail = f"{total} inside functions, at most {MAX_LATE}: move them to the top; most are in {', '.join(most)}"
        yield Finding("late", "imports", detail)
    elif total < MAX_LATE:
        yield Finding("late", "imports", f"{total} inside functions; lower MAX_LATE, which is {MAX_LATE}")


if __name__ == "__main__":
    sys.exit(main())
