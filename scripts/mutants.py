"""Mutation testing: change the runner in one place at a time, and count the changes that the tests detect.

    python scripts/mutants.py collect              # once: which tests execute which statements, and how long they take
    python scripts/mutants.py run --count 140      # a random selection, and every restored field of a checkpoint
    python scripts/mutants.py run --only runner/durable --count 30 --seed 1
    python scripts/mutants.py run --keys KEY --tests tests/base/test_batch.py  # with chosen tests, without a map
    python scripts/mutants.py run --resume FILE    # only those that FILE does not list as killed
    python scripts/mutants.py page FILE            # the table for docs/results

A mutant is one change of one expression or statement, applied in a copy of the checkout, never in the checkout.
Messages and asserts are not changed, nor is the `strict=True` of `zip`, which is an assertion. Tests that execute the
changed statement run in a fork of a process that has imported torch, but not the runner. Tests that have killed another
mutant of the function come first, then those in the file that mirrors the module, then the others, the fastest first,
up to `--budget` seconds of recorded test time. A test that fails for the first time runs again, once with the mutant
and once without it; it counts only if it fails with the mutant and passes without it. The "not restored" mutants are
made from the functions that restore state (RESTORING): each assignment and each call in them is removed in turn, so a
new field gets its mutant without an edit here.

The map of statements and the copy are kept in --cache (default ~/.cache/accel-run/mutants). Statements are matched by
their text, so the map survives edits elsewhere in a file; `collect` runs only test files that have changed since the
last call. Equivalent mutants, which no test can detect, are listed with a reason in scripts/mutants_equivalent.toml.

Exit 0: at least --least percent of the mutants that are not equivalent were killed. 1: fewer. 2: invalid command line.
"""

from __future__ import annotations

import argparse
import ast
import copy
import ctypes
import hashlib
import importlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGETS = (
    "runner/durable", "runner/engine", "runner/trained", "runner/distributed", "runner/axes", "runner/loading",
    "runner/tensors", "runner/workload", "runner/base/order.py", "runner/base/batch.py", "runner/base/sample_rng.py",
)  # fmt: skip
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.toml")

# Functions that restore state, given as a bare name, which matches in every module, or as module.qualified_name.
RESTORING = {
    "load", "load_state_dict", "import_state", "load_model", "restore_random_state", "restore_rank_random_state",
    "restore_handlers", "_restore_generators", "_restore_progress", "_load_finished_phase", "_restore",
    "_restore_buffer", "restore", "set_state",
    "load_for_inference", "checkpoint.restore_moved",
    "forward_state._load", "forward_state.ForwardState._convert_to_buffers",
    "metric_states.MetricStates.results", "metric_states._TorchMetricState.__init__",
    "oom_retry.OomRetry._restore_and_reduce", "resumption.find_resume_point", "rewind._undo_rewind",
    "trained_evaluation._make_sizes", "trained_run.open_source", "trained_run._open_weights",
    "trained_run.load_trained_model", "weights._add_tied", "weights.load_initial_weights",
}  # fmt: skip
# Fields that are restored inside an expression, so that no statement can be left out to test them: path, old, new.
BY_HAND = (
    (
        "runner/engine/phase.py",
        "seed_everything(rank_seed(seed, world.rank, start.update))",
        "seed_everything(seed)",
    ),
    ("runner/engine/phase.py", "rest = there[world.rank - 1]", "rest = there[0]"),
    ("runner/base/order.py", "if rank == 0 and update == 0:", "if update == 0:"),
    ("runner/engine/checkpoints/checkpoint_saver.py", "self.bests = list(bests)", "self.bests = []"),
    ("runner/engine/hooks/checkpointing.py", "(start.update, find_best_checkpoints(", "(None, find_best_checkpoints("),
    ("runner/engine/hooks/checkpointing.py", "find_best_checkpoints(start, policy.ranking))", "[])"),
    ("runner/durable/checkpoint_choice.py", "in found.items() if key == number", "in ()"),
    (
        "runner/durable/checkpoint_choice.py",
        "{newest.update, *(number for _, number in find_best_checkpoints(newest))}",
        "{newest.update}",
    ),
    ("runner/durable/rewind.py", "None if is_last else copy_metrics(directory)", "None"),
    ("runner/engine/run.py", 'int(state["updates_before"]), records', "0, records"),
    ("runner/engine/run.py", 'none_to_nan(state["metrics"]), kept)', "{}, kept)"),
    ("runner/engine/run.py", '(state["metrics"]), kept)', '(state["metrics"]), [])'),
    ("runner/durable/weight_source.py", "index)", "None)"),
    ("runner/durable/weight_source.py", "average=average", "average=None"),
    ("runner/engine/parts/objective_phase.py", 'selected, saved["optimizer"])', '{}, saved["optimizer"])'),
)  # fmt: skip
# Fields of a checkpoint, in the dicts of the function SAVING -> their values in a new run.
SAVING = "Checkpointing.snapshot"
FRESH = {
    "skipped_before": "0", "closed": "False", "bests": "[]", "changes": "[]", "code": "{}",
}  # fmt: skip
SIGNATURES = "tests/axes/test_yaml_is_signature.py::"
# This test detects most fields that are not restored.
RESUME_LAWS = ("tests/faults/test_resume_state.py::test_checkpoints_of_a_resumed_run",)
UNKNOWN_S = 120.0
NONE_LEFT = 5  # pytest: all tests were deselected
PROCESS_LIMIT_S = 45.0  # in addition to four times the recorded time, because tests are slower on a busy machine
WARM = (
    "torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.utils.data", "numpy", "numpy.testing", "safetensors.torch", "hydra", "omegaconf", "rich.live", "rich.table",
    "psutil", "pytest", "hypothesis", "hypothesis.strategies", "yaml", "jinja2", "wandb", "multiprocessing.pool",
    "torch.profiler._cupti_monitor",
)  # fmt: skip


# ---------------------------------------------------------------- mutants


@dataclass(frozen=True)
class Mutant:
    """One change of one place.

    function, statement  where it is: qualified name of the function, and text of the innermost statement
    start, stop          range of bytes of the source that `after` replaces
    """

    path: str
    line: int
    function: str
    statement: str
    operator: str
    before: str
    after: str
    start: int
    stop: int
    number: int  # distinguishes mutants with the same text in the same function

    @property
    def key(self) -> str:
        """Return an identifier that does not depend on the line, so that edits elsewhere do not change it."""
        text = "\0".join([self.path, self.function, self.operator, self.before, self.after, str(self.number)])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.operator}: {abbreviate(self.before)} -> {abbreviate(self.after)}"


COMPARISONS: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}
MESSAGES = {
    "say", "info", "warning", "warn", "warn_once", "_warn_once", "event", "print", "Problem", "did_you_mean",
    "abbreviate", "write_line",
}  # fmt: skip


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    tree = ast.parse(source)
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    counted: Counter[tuple[str, ...]] = Counter()

    def span(node: ast.AST) -> tuple[int, int]:
        place: Any = node
        return starts[place.lineno - 1] + place.col_offset, starts[place.end_lineno - 1] + place.end_col_offset

    for node, statement, function in places(tree):
        for operator, new, whole in changes(node, statement, function, restores=is_restoring(path, function)):
            start, stop = span(whole)
            before, after = data[start:stop].decode(), new if isinstance(new, str) else f"({ast.unparse(new)})"
            same = (function, operator, before, after)
            text = ast.unparse(statement).splitlines()[0] if statement is not None else ""
            yield Mutant(path, whole.lineno, function, text, operator, before, after, start, stop, counted[same])
            counted[same] += 1
    for other, old, new in BY_HAND:
        if other == path:
            assert source.count(old) == 1, f"{path} has {old!r} {source.count(old)} times: correct BY_HAND"
            start = source.encode().index(old.encode())
            line = data[:start].count(b"\n") + 1
            found = [(s, f) for n, s, f in places(tree) if s is not None and s.lineno <= line <= (s.end_lineno or 0)]
            inner, function = min(found, key=lambda pair: (pair[0].end_lineno or 0) - pair[0].lineno)
            text = ast.unparse(inner).splitlines()[0]
            yield Mutant(
                path,
                line,
                function,
                text,
                "not restored",
                old.strip(),
                new.strip(),
                start,
                start + len(old.encode()),
                0,
            )


def places(tree: ast.Module) -> Iterator[tuple[Any, Any, str]]:
    """Yield (node, innermost statement, qualified name of the function) of code that is neither type nor message."""

    def walk(node: Any, statement: Any, function: str) -> Iterator[tuple[Any, Any, str]]:
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            statement = node
        yield node, statement, function
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if (
                    not isinstance(child, ast.AST)
                    or isinstance(child, (ast.Assert, ast.JoinedStr))
                    or is_message(child)
                    or (is_zip(node) and isinstance(child, ast.keyword))
                ):
                    continue
                inside = function
                if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    inside = f"{function}.{child.name}".lstrip(".")
                yield from walk(child, statement, inside)

    yield from walk(tree, None, "")


def is_zip(node: ast.AST) -> bool:
    """Return whether a node calls zip, whose `strict=True` is an assertion: it changes no result of a valid program."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip"


def is_message(node: ast.AST) -> bool:
    """Return whether a node only produces a message, such as an error or a warning, or only serves type checkers."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value) in ("Annotated", "Literal", "Callable", "Mapping", "Sequence")
    call = node.exc if isinstance(node, ast.Raise) else node.value if isinstance(node, ast.Expr) else node
    if isinstance(call, ast.Call):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        return name in MESSAGES or name.endswith(("Error", "Fault", "Missing", "Refusal", "IncompatibleResume"))
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_restoring(path: str, function: str) -> bool:
    """Return whether a function restores state, see RESTORING."""
    return not RESTORING.isdisjoint((function.rpartition(".")[2], f"{Path(path).stem}.{function}"))


def changes(node: Any, statement: Any, function: str, *, restores: bool) -> Iterator[tuple[str, Any, Any]]:
    """Yield (operator, new text or node, node replaced) for each change of a node.

    restores  whether the function restores state
    """
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            new = copy.deepcopy(node)
            new.ops = [COMPARISONS[type(op)]()]
            yield "comparison", new, node
        case ast.BoolOp():
            new = copy.deepcopy(node)
            new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and/or", new, node
        case ast.UnaryOp(op=ast.Not()):
            yield "not removed", node.operand, node
        case ast.BinOp(op=op) if type(op) in ARITHMETIC and not isinstance(node.left, (ast.Constant, ast.JoinedStr)):
            new = copy.deepcopy(node)
            new.op = ARITHMETIC[type(op)]()
            yield "arithmetic", new, node
        case ast.Constant(value=bool()):
            yield "constant", str(not node.value), node
        case ast.Constant(value=int()):
            yield "off by one", str(node.value + 1), node
        case ast.Constant(value=float()):
            yield "constant", repr(node.value * 2 + 1), node
        case ast.Call(func=ast.Name(id=name)) if name in OPPOSITES:
            new = copy.deepcopy(node)
            new.func.id = OPPOSITES[name]
            yield "opposite", new, node
        case ast.Call(args=[first, second, *rest]) if not isinstance(first, ast.Starred) and not (
            isinstance(second, ast.Starred) or ast.unparse(node.func) == "isinstance"
        ):
            new = copy.deepcopy(node)
            new.args = [second, first, *rest]
            yield "swapped arguments", new, node
    match node:
        case ast.Dict(keys=keys, values=values) if function == SAVING:
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and key.value in FRESH:
                    yield "not restored", str(FRESH[key.value]), value
    match node:
        case ast.Call(keywords=[*_, ast.keyword(arg=str())]) if not restores and not is_zip(node):
            new = copy.deepcopy(node)
            new.keywords.pop()
            yield "argument removed", new, node
        case ast.If() | ast.While():
            yield "condition negated", f"not ({ast.unparse(node.test)})", node.test
        case ast.IfExp():
            new = ast.IfExp(node.test, node.orelse, node.body)
            yield "branches swapped", new, node
        case ast.Return(value=value) if value is not None and not is_none(value):
            yield "returned value", "return None", node
        case ast.Break():
            yield "break/continue", "continue", node
        case ast.Continue():
            yield "break/continue", "break", node
        case ast.Raise():
            yield "error not raised", "pass", node
        case ast.Expr(value=ast.Call() as call) if not is_message(node):
            kind = (
                "not restored" if restores else "sync removed" if "sync" in ast.unparse(call.func) else "call removed"
            )
            yield kind, "pass", node
        case ast.AugAssign():
            yield "not restored" if restores else "assignment removed", "pass", node
        case ast.Assign(targets=[ast.Subscript()]) if restores:
            yield "not restored", "pass", node
        case ast.Assign(targets=[ast.Attribute()]):
            if restores or not function.endswith("__init__"):
                yield "not restored" if restores else "assignment removed", "pass", node
        case ast.Assign(targets=[ast.Tuple(elts=elements)], value=ast.Tuple(elts=values)) if restores:
            for index, target in enumerate(elements):
                if isinstance(target, ast.Attribute) and len(elements) == len(values):
                    kept = [f"{ast.unparse(t)} = {ast.unparse(v)}" for t, v in zip(elements, values, strict=True)]
                    yield "not restored", "; ".join(kept[:index] + kept[index + 1 :]), node


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def abbreviate(text: str) -> str:
    """Return the text on one line of at most 70 characters."""
    text = re.sub(r"\s+", " ", text)
    return text if len(text) < 70 else text[:67] + "..."


def target_files(root: Path, only: Sequence[str] = ()) -> list[str]:
    """Return the files to change, relative to the checkout."""
    found = []
    for target in TARGETS:
        path = root / target
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    names = [str(path.relative_to(root)) for path in found if path.name != "__init__.py"]
    return [name for name in names if not only or any(name.startswith(one) for one in only)]


def selection(every: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return all "not restored" mutants, and about `count` others.

    Targets get shares in proportion to the square root of their number of mutants. Within a target, operators are
    interleaved, so that frequent ones do not crowd out the rest.
    """
    restoring = [mutant for mutant in every if mutant.operator == "not restored"]
    strata: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in every:
        if mutant.operator != "not restored":
            strata[next(target for target in TARGETS if mutant.path.startswith(target))].append(mutant)
    rng, chosen = random.Random(seed), []
    weights = {target: len(group) ** 0.5 for target, group in strata.items()}
    for target, group in sorted(strata.items()):
        by_operator: dict[str, list[Mutant]] = defaultdict(list)
        for mutant in group:
            by_operator[mutant.operator].append(mutant)
        decks = [rng.sample(deck, len(deck)) for _, deck in sorted(by_operator.items())]
        rng.shuffle(decks)
        wanted = max(1, round(count * weights[target] / sum(weights.values())))
        turns = [deck[turn] for turn in range(max(map(len, decks))) for deck in decks if turn < len(deck)]
        chosen += turns[:wanted]
    return [*chosen, *restoring]


# ---------------------------------------------------------------- the copy of the checkout


def copy_checkout(tree: Path) -> None:
    """Make `tree` a copy of the tracked files and of the untracked files that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    for path in [path for path in tree.rglob("*") if path.is_file() or path.is_symlink()]:
        if str(path.relative_to(tree)) not in names:
            path.unlink()
    for name in names:
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def write_bytecode(path: Path, code: Any, source: bytes, *, is_checked: bool) -> None:
    """Write the code as cached bytecode. Unless `is_checked`, Python imports it even if the source differs."""
    external: Any = importlib.import_module("_frozen_importlib_external")
    cache = Path(importlib.util.cache_from_source(str(path)))
    cache.parent.mkdir(exist_ok=True)
    cache.write_bytes(external._code_to_hash_pyc(code, importlib.util.source_hash(source), is_checked))


def apply(tree: Path, path: str, source: bytes) -> None:
    """Replace the source of a file of the copy; bytecode is validated by content, because file times are too coarse."""
    (tree / path).write_bytes(source)
    write_bytecode(tree / path, compile(source, str(tree / path), "exec", dont_inherit=True), source, is_checked=True)


# ---------------------------------------------------------------- which tests execute what


def statements_of(path: str, tree: ast.Module) -> Iterator[tuple[list[ast.stmt], int, str]]:
    """Yield (body, index, key) of every statement inside functions; the key is its place and its text."""
    counted: Counter[str] = Counter()
    for node, _, function in all_nodes(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if not isinstance(body, list) or not function or isinstance(node, (ast.Module, ast.ClassDef)):
                continue
            for index, statement in enumerate(body):
                key = statement_key(path, function, ast.unparse(statement).splitlines()[0])
                yield body, index, f"{key}\0{counted[key]}"
                counted[key] += 1


def all_nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, None, str]]:
    def walk(node: ast.AST, function: str) -> Iterator[tuple[ast.AST, None, str]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            function = f"{function}.{node.name}".lstrip(".")
        yield node, None, function
        for child in ast.iter_child_nodes(node):
            yield from walk(child, function)

    yield from walk(tree, "")


def statement_key(path: str, function: str, text: str) -> str:
    return f"{path}\0{function}\0{text}"


def instrument(tree: Path, hits: Path) -> list[str]:
    """Make the targets in the copy mark each statement that they execute; return the keys by number.

    Only the bytecode is changed, and it keeps the line numbers, so code that reads sources sees the originals. A mark
    is a byte of a file that all processes map, so forks and subprocesses set marks, too.
    """
    keys: list[str] = []
    for path in target_files(tree):
        source = (tree / path).read_bytes()
        module = ast.parse(source)
        found = list(statements_of(path, module))
        inserted: dict[int, list[tuple[int, ast.stmt]]] = defaultdict(list)
        bodies = {}
        for body, index, key in found:
            if is_docstring(body[index]) or isinstance(body[index], (ast.Global, ast.Nonlocal)):
                continue
            mark = ast.parse(f"_reached[{len(keys)}] = 1").body[0]
            for inner in ast.walk(mark):
                if isinstance(inner, (ast.stmt, ast.expr)):
                    ast.copy_location(inner, body[index])
                    inner.end_lineno, inner.end_col_offset = inner.lineno, inner.col_offset
            bodies[id(body)] = body
            inserted[id(body)].append((index, mark))
            keys.append(key)
        for which, marks in inserted.items():
            for index, mark in reversed(marks):
                bodies[which].insert(index, mark)
        first = next((i for i, one in enumerate(module.body) if not is_docstring(one) and not is_future(one)), 0)
        module.body.insert(
            first, ast.copy_location(ast.parse("from runner._reached import _reached").body[0], module.body[first])
        )
        code = compile(ast.fix_missing_locations(module), str(tree / path), "exec", dont_inherit=True)
        write_bytecode(tree / path, code, source, is_checked=False)
    hits.write_bytes(bytes(len(keys)))
    (tree / "runner/_reached.py").write_text(
        f"import mmap\n\nwith open({str(hits)!r}, 'r+b') as _file:\n    _reached = mmap.mmap(_file.fileno(), 0)\n"
    )
    return keys


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


class Recorder:
    """Records for each test what it executed, how long it took, and whether it passed."""

    def __init__(self, hits: Path) -> None:
        import mmap

        with hits.open("r+b") as file:
            self.marks = mmap.mmap(file.fileno(), 0)
        self.tests: dict[str, dict[str, Any]] = {}
        self.fixtures: dict[str, set[int]] = defaultdict(set)

    def take_marks(self) -> set[int]:
        data = self.marks[:]
        self.marks[:] = bytes(len(data))
        return {found.start() for found in re.finditer(b"\1", data)}

    def hooks(self) -> Any:
        import pytest

        recorder = self

        class Hooks:
            @pytest.hookimpl(hookwrapper=True)
            def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
                if fixturedef.scope == "function":
                    yield
                    return
                before = recorder.take_marks()
                yield
                recorder.fixtures[fixturedef.argname] |= recorder.take_marks()
                for number in before:
                    recorder.marks[number] = 1

            @pytest.hookimpl(hookwrapper=True)
            def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
                recorder.take_marks()
                yield
                found = recorder.take_marks().union(*(recorder.fixtures[name] for name in item.fixturenames))
                recorder.tests.setdefault(item.nodeid, {})["hits"] = sorted(found)
                recorder.tests[item.nodeid]["alone"] = bool(item.get_closest_marker("alone"))

            def pytest_runtest_logreport(self, report: Any) -> None:
                test = recorder.tests.setdefault(report.nodeid, {})
                test["seconds"] = test.get("seconds", 0.0) + report.duration
                test["passed"] = test.get("passed", True) and report.outcome == "passed"

        return Hooks()


def collect(cache: Path, only: Sequence[str], *, is_slow: bool) -> None:
    """Run each test file whose map is missing or outdated, and store its map; `is_slow` includes slow tests."""
    tree, maps = cache / "collected", cache / "maps"
    maps.mkdir(parents=True, exist_ok=True)
    tree.mkdir(exist_ok=True)
    copy_checkout(tree)
    keys = instrument(tree, cache / "reached")
    warm()
    for name in list_test_files(tree, only):
        digest, kept = digest_of(tree / name), map_of(maps, name)
        if kept.exists() and json.loads(kept.read_text())["digest"] == digest:
            continue
        began = time.monotonic()

        def record(name: str = name, digest: str = digest, kept: Path = kept) -> int:
            recorder = Recorder(cache / "reached")
            code = run_pytest(tree, [name, "-m", "not gpu" if is_slow else "not gpu and not slow"], [recorder.hooks()])
            used = sorted({number for test in recorder.tests.values() for number in test.get("hits", ())})
            place = {number: index for index, number in enumerate(used)}
            for test in recorder.tests.values():
                test["hits"] = [place[number] for number in test.get("hits", ())]
            sources = {path: digest_of(tree / path) for path in target_files(tree)}
            row = {
                "digest": digest,
                "sources": sources,
                "statements": [keys[number] for number in used],
                "tests": recorder.tests,
            }
            kept.write_text(json.dumps(row))
            return code

        code, _ = in_fork(record, cache / "collect.log", 3600.0)
        print(f"{name}: {time.monotonic() - began:.0f} s, pytest exit {code}", flush=True)


def map_of(maps: Path, name: str) -> Path:
    """Return the file with the map of a test file."""
    return maps / (name.replace("/", "+") + ".json")


def list_test_files(tree: Path, only: Sequence[str] = ()) -> list[str]:
    names = sorted(str(path.relative_to(tree)) for path in (tree / "tests").rglob("test_*.py"))
    ranked = sorted(names, key=lambda name: not any(f"tests/{Path(target).name}/" in name for target in TARGETS))
    return [name for name in ranked if not only or any(name.startswith(one) for one in only)]


def mirror_of(tree: Path, path: str) -> str:
    """Return the test file that mirrors a module; else the closest folder with tests, with a final slash."""
    module = Path("tests", *Path(path).parts[1:])
    file = module.with_name(f"test_{module.name}")
    if (tree / file).exists():
        return str(file)
    return f"{next(folder for folder in module.parents if any((tree / folder).glob('test_*.py')))}/"


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class Known:
    """Which tests execute a statement, and how long they take."""

    def __init__(self, cache: Path, tree: Path) -> None:
        self.seconds: dict[str, float] = {}
        self.by_statement: dict[str, set[str]] = defaultdict(set)
        self.by_function: dict[str, set[str]] = defaultdict(set)
        self.by_function_before: dict[str, set[str]] = defaultdict(set)  # from maps that are older than the file
        self.by_file: dict[str, set[str]] = defaultdict(set)
        self.stale: list[str] = []
        sources = {path: digest_of(tree / path) for path in target_files(tree)}
        for name in list_test_files(tree):
            kept = map_of(cache / "maps", name)
            if not kept.exists():
                self.stale.append(name)
                continue
            row = json.loads(kept.read_text())
            if row["digest"] != digest_of(tree / name):
                self.stale.append(name)
            for test, found in row["tests"].items():
                if found.get("passed") and not found.get("alone"):
                    self.seconds[test] = found["seconds"]
                    for number in found["hits"]:
                        path, function, text, _ = row["statements"][number].split("\0")
                        if row.get("sources", {}).get(path) != sources.get(path):
                            self.by_function_before[f"{path}\0{function}"].add(test)
                        self.by_statement[statement_key(path, function, text)].add(test)
                        self.by_function[f"{path}\0{function}"].add(test)
                        self.by_file[path].add(test)

    def tests_of(self, mutant: Mutant) -> set[str]:
        """Return the tests that execute the changed statement.

        For code that runs only at import, these are all tests that execute a function of the file.
        """
        place = f"{mutant.path}\0{mutant.function}"
        if not mutant.function:
            return self.by_file[mutant.path]
        if place not in self.by_function:  # a class, or a function that no test called when the map was made
            inside = (tests for key, tests in self.by_function.items() if key.startswith(f"{place}."))
            return set().union(*inside) or self.by_file[mutant.path]
        if not mutant.statement:  # a default value, which the tests of signatures read without calling the function
            return self.by_function[place] | {test for test in self.seconds if test.startswith(SIGNATURES)}
        # A test whose map was made from another version of the file may execute the statement if it calls the function.
        key = statement_key(mutant.path, mutant.function, mutant.statement)
        return self.by_statement[key] | self.by_function_before[place]


# ---------------------------------------------------------------- running


def warm() -> None:
    """Import the third-party packages that tests need, but not the runner: each fork imports its current source."""
    os.environ.update(OMP_NUM_THREADS="1", HYPOTHESIS_STORAGE_DIRECTORY="/nonexistent")
    for name in WARM:
        with suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans of a test become our children
    assert not any(name == "runner" or name.startswith("runner.") for name in sys.modules)


def enter(tree: Path) -> None:
    """Import from the copy from now on."""
    os.chdir(tree)
    sys.path[:] = [str(tree), *(one for one in sys.path if one not in ("", str(ROOT), str(ROOT / "scripts")))]
    os.environ["PYTHONPATH"] = str(tree)


def run_pytest(tree: Path, arguments: Sequence[str], plugins: Sequence[Any]) -> int:
    """Run pytest in the copy, in this process."""
    import pytest

    enter(tree)
    common = [
        "-q",
        "-W",
        "ignore:Module already imported",
        "-p",
        "no:cacheprovider",
        "--hypothesis-seed=0",
        "--rootdir",
        str(tree),
        "--tb=short",
    ]
    return int(pytest.main([*common, *arguments], plugins=plugins))


def in_fork(function: Any, log: Path, limit_s: float) -> tuple[int | None, float]:
    """Run a function in a fork that logs to a file; return its exit code (None after a timeout) and duration."""
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setsid()
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(descriptor, number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            code = function()
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    code = None
    while time.monotonic() < began + limit_s:
        ended, status = os.waitpid(-1, os.WNOHANG)  # also reaps orphans, because a test may wait until they are gone
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            break
        if not ended:
            time.sleep(0.01)
    else:
        os.kill(pid, signal.SIGKILL)
    end_children()
    return code, time.monotonic() - began


def end_children() -> None:
    """Kill and reap the remaining processes of a test; as the subreaper, this process is their parent."""
    for _ in range(200):
        children = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
        if not children:
            return
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


class Ordered:
    """Runs the tests in the given order, regardless of the conftest's order, and records the first failure."""

    def __init__(self, wanted: Sequence[str], failure_file: Path) -> None:
        self.place, self.failure_file = {name: number for number, name in enumerate(wanted)}, failure_file

    def hooks(self) -> Any:
        import pytest

        ordered = self

        class Hooks:
            @pytest.hookimpl(trylast=True)
            def pytest_collection_modifyitems(self, items: list[Any]) -> None:
                items.sort(key=lambda item: ordered.place.get(item.nodeid, len(ordered.place)))

            def pytest_runtest_logreport(self, report: Any) -> None:
                if report.failed and not ordered.failure_file.exists():
                    ordered.failure_file.write_text(report.nodeid)

        return Hooks()


@dataclass
class Result:
    """The result of the tests of a mutant.

    status    killed, survived, not reached (by any test), no verdict (the budget was too small),
              invalid (cannot be compiled)
    by        the test that failed in two runs
    """

    key: str
    path: str
    line: int
    function: str
    operator: str
    before: str
    after: str
    status: str
    by: str = ""
    num_tests: int = 0
    num_left: int = 0
    seconds: float = 0.0


class Judge:
    """Runs tests on mutants, one mutant after the other."""

    def __init__(self, cache: Path, budget_s: float) -> None:
        self.cache, self.tree, self.budget_s = cache, cache / "tree", budget_s
        self.tree.mkdir(parents=True, exist_ok=True)
        copy_checkout(self.tree)
        self.known = Known(cache, self.tree)
        self.chosen: Sequence[str] = ()  # tests or test files to run instead of those that the map selects
        self.sound: dict[str, bool] = {}  # failed test -> whether it fails again, and passes without the mutant
        self.killers: dict[str, Counter[str]] = defaultdict(Counter)  # function -> tests that killed a mutant of it
        for path in target_files(self.tree):
            apply(self.tree, path, (self.tree / path).read_bytes())
        warm()

    def judge(self, mutant: Mutant) -> Result:
        """Apply a mutant, run its tests, and revert it."""
        began = time.monotonic()
        result = Result(
            mutant.key, mutant.path, mutant.line, mutant.function, mutant.operator, mutant.before, mutant.after, ""
        )
        source = (self.tree / mutant.path).read_bytes()
        changed = source[: mutant.start] + mutant.after.encode() + source[mutant.stop :]
        try:
            compile(changed, mutant.path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            result.status = "invalid"
            return result
        try:
            apply(self.tree, mutant.path, changed)
            self._run(mutant, result, source, changed)
        finally:
            apply(self.tree, mutant.path, source)
        result.seconds = round(time.monotonic() - began, 1)
        if result.status == "killed":
            self.killers[f"{mutant.path}\0{mutant.function}"][result.by.rpartition(" (")[0] or result.by] += 1
        return result

    def _run(self, mutant: Mutant, result: Result, source: bytes, changed: bytes) -> None:
        tests = [test for test in self.chosen or self.known.tests_of(mutant) if self.sound.get(test, True)]
        left = tests if self.chosen else self._in_order(mutant, tests)
        result.status = "survived" if left else "not reached"
        spent = 0.0
        while left:
            most_s = min(self.budget_s - spent, 60.0 if result.num_tests else 10.0)
            stage, stage_s = [], 0.0
            if self.chosen:  # all of them, regardless of the budget
                stage, left = left, []
            while left and (stage_s + self.seconds_of(left[0]) <= most_s or not result.num_tests + len(stage)):
                stage_s += self.seconds_of(left[0])
                stage.append(left.pop(0))
            if not stage:
                result.num_left, result.status = len(left), "no verdict"
                return
            spent += stage_s
            result.num_tests += len(stage)
            while stage:
                failed = self._failed(stage)
                if failed is None:
                    break
                by, is_certain = failed
                if is_certain or self._is_sound(by, mutant.path, source, changed):
                    result.status, result.by = "killed", by
                    return
                stage = [test for test in stage if test != by]  # its failure proves nothing, because it is not reliable

    def seconds_of(self, test: str) -> float:
        """Return the recorded seconds of a test or of the tests in a file; UNKNOWN_S if there are none."""
        if test in self.known.seconds:
            return self.known.seconds[test]
        inside = (f"{test}::", f"{test}[")
        return sum(s for name, s in self.known.seconds.items() if name.startswith(inside)) or UNKNOWN_S

    def _is_sound(self, test: str, path: str, source: bytes, changed: bytes) -> bool:
        """Return whether a test that failed fails again, and passes without the mutant; tried once for each test."""
        if test not in self.sound:
            fails_again = self._failed([test]) is not None
            apply(self.tree, path, source)
            self.sound[test] = fails_again and self._failed([test]) is None
            apply(self.tree, path, changed)
        return self.sound[test]

    def _in_order(self, mutant: Mutant, tests: Iterable[str]) -> list[str]:
        seen = self.killers[f"{mutant.path}\0{mutant.function}"]
        mirror = mirror_of(self.tree, mutant.path)
        resumes = mutant.operator == "not restored"

        def rank(test: str) -> tuple[float, ...]:
            is_likely = test.startswith((mirror, *RESUME_LAWS) if resumes else mirror)
            is_mirror = mirror.endswith(".py") and test.startswith(mirror)
            # A likely test may take longer, but not so long that it takes the budget of all the others.
            return -min(seen[test], 3), not is_mirror, self.known.seconds[test] * (0.2 if is_likely else 1.0)

        return sorted(tests, key=rank)

    def _failed(self, tests: Sequence[str]) -> tuple[str, bool] | None:
        """Return the first test that fails, and whether that is certain without a second run; None if all pass."""
        failure_file, log = self.cache / "failed", self.cache / "run.log"
        failure_file.unlink(missing_ok=True)
        expected_s = sum(map(self.seconds_of, tests))
        unsound = [f"--deselect={test}" for test, is_sound in self.sound.items() if not is_sound]
        arguments = [*unsound, *tests]  # `tests` may be files, which contain unsound tests

        def run() -> int:
            return run_pytest(self.tree, ["-x", *arguments], [Ordered(tests, failure_file).hooks()])

        code, _ = in_fork(run, log, PROCESS_LIMIT_S + 4 * expected_s)
        if code in (0, NONE_LEFT):
            return None
        if failure_file.exists():
            return failure_file.read_text(), False
        if code is None:
            return (f"{tests[0]} (time limit)", True)
        output = log.read_text(errors="replace")
        if code == 4 and "ERROR collecting" not in output:  # the test file has changed since the map was made
            there = [test for test in tests if f"not found: {self.tree}/{test}" not in output]
            return self._failed(there) if there and len(there) < len(tests) else None
        how = "cannot be imported" if "ERROR collecting" in output else f"ended with {code}"
        return (f"{tests[0].partition('::')[0]} ({how})", True)


# ---------------------------------------------------------------- results


def reasons() -> dict[tuple[str, str, str, str], str]:
    """Return why survivors cannot be detected, by path, function, old and new text."""
    rows = tomllib.loads(EQUIVALENT.read_text())["mutant"] if EQUIVALENT.exists() else []
    return {(row["path"], row["function"], row["before"], row["after"]): row["why"] for row in rows}


def reason_of(row: Mapping[str, Any], known: Mapping[tuple[str, str, str, str], str]) -> str:
    return known.get((row["path"], row["function"], abbreviate(row["before"]), abbreviate(row["after"])), "")


def is_equivalent(row: Mapping[str, Any], known: Mapping[tuple[str, str, str, str], str]) -> bool:
    """Return whether no test can kill a mutant, because it is not a valid program or behaves like the original."""
    why = reason_of(row, known)
    return row["status"] == "invalid" or (bool(why) and not why.startswith("not equivalent"))


def tables(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page: a table of results per target, and one of the survivors with their reasons."""
    rows = [row for row in rows if row["status"] != "invalid"]
    known = reasons()
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        target = next(target for target in TARGETS if row["path"].startswith(target))
        groups["fields of a checkpoint, not restored" if row["operator"] == "not restored" else target].append(row)
    yield "| changed in | mutants | killed | survived | of which equivalent |"
    yield "|---|---|---|---|---|"
    for name, group in [*sorted(groups.items()), ("all", list(rows))]:
        alive = [row for row in group if row["status"] != "killed"]
        killed, explained = len(group) - len(alive), sum(is_equivalent(row, known) for row in alive)
        share = f" ({killed / len(group):.1%})" if group else ""
        yield f"| {name} | {len(group)} | {killed}{share} | {len(alive)} | {explained} |"
    alive = [row for row in rows if row["status"] != "killed"]
    if alive:
        yield ""
        yield "| survivor | change | reason |"
        yield "|---|---|---|"
        for row in alive:
            change = f"{abbreviate(row['before'])} -> {abbreviate(row['after'])}".replace("|", "\\|")
            why = reason_of(row, known) or f"{row['status']}: no reason known"
            yield f"| {row['path']}, {row['function'] or 'module'} | `{change}` | {why} |"


def run(options: argparse.Namespace) -> int:
    """Judge the selected mutants and write the result after each."""
    cache, out = options.cache, options.out
    judge = Judge(cache, options.budget)
    judge.chosen = options.tests
    if judge.known.stale:
        stale = judge.known.stale
        print(f"{len(stale)} test files, such as {stale[0]}, lack an up-to-date map: run `collect`")
    every = [
        mutant for path in target_files(judge.tree, options.only)
        for mutant in mutants_of(path, (judge.tree / path).read_text())
    ]  # fmt: skip
    chosen = selection(every, options.count, options.seed)
    if options.no_fields:
        chosen = [mutant for mutant in chosen if mutant.operator != "not restored"]
    if options.operator:
        chosen = [mutant for mutant in chosen if mutant.operator == options.operator]
    if options.keys:
        chosen = [mutant for mutant in every if mutant.key in options.keys]
    before = {row["key"]: row for row in json.loads(options.resume.read_text())["mutants"]} if options.resume else {}
    if options.again:
        chosen = [mutant for mutant in every if mutant.key in before]
    print(f"{len(every)} places to change; {len(chosen)} selected by seed {options.seed}", flush=True)
    rows: list[dict[str, Any]] = []
    for number, mutant in enumerate(chosen, start=1):
        done = before.get(mutant.key)
        if done is not None and done["status"] in ("killed", "invalid"):
            rows.append(done)
            continue
        row = asdict(judge.judge(mutant))
        rows.append(row)
        row_of_log = [row["status"], row["by"], f"({row['num_tests']} tests, {row['seconds']} s)", str(mutant)]
        print(f"{number}/{len(chosen)} {mutant.key}", *filter(None, row_of_log), flush=True)
        head = {"seed": options.seed, "count": options.count, "hardware": processor(), "budget_s": options.budget}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**head, "mutants": rows}, indent=1))
    print("\n".join(tables(rows)))
    known = reasons()
    counted = [row for row in rows if row["status"] == "killed" or not is_equivalent(row, known)]
    killed = sum(row["status"] == "killed" for row in counted)
    return 0 if killed * 100 >= options.least * len(counted) else 1


def processor() -> str:
    """Return the model and number of processors."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else 'unknown'}, {os.cpu_count()} cores"


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/accel-run/mutants").expanduser())
    verbs = parser.add_subparsers(dest="verb", required=True)
    mapped = verbs.add_parser("collect", help="map statements to tests")
    mapped.add_argument("--only", action="append", default=[], metavar="PATH", help="test files or folders")
    mapped.add_argument("--slow", action="store_true", help="include tests marked slow; use another --cache for them")
    runs = verbs.add_parser("run", help="apply mutants and run tests")
    runs.add_argument("--seed", type=int, default=0)
    runs.add_argument(
        "--count", type=int, default=140, help="number of mutants in addition to those of restored fields"
    )
    runs.add_argument("--only", action="append", default=[], metavar="PATH", help="files or folders to change")
    runs.add_argument("--no-fields", action="store_true", help="leave out the mutants of restored fields")
    runs.add_argument("--operator", help="only mutants of this kind, such as 'not restored'")
    runs.add_argument("--keys", nargs="+", default=[], help="only these mutants, as printed")
    runs.add_argument(
        "--tests", nargs="+", default=[], help="tests or test files to run instead of those that the map selects"
    )
    runs.add_argument("--budget", type=float, default=120.0, metavar="S", help="seconds of test time per mutant")
    runs.add_argument(
        "--resume", type=Path, metavar="FILE", help="a result file: mutants that it lists as killed are not run again"
    )
    runs.add_argument("--again", action="store_true", help="with --resume: only the mutants of that result")
    runs.add_argument("--least", type=float, default=95.0, metavar="PERCENT", help="share that must be killed")
    runs.add_argument("--out", type=Path, default=Path("mutants.json"))
    verbs.add_parser("page", help="print the tables of a result").add_argument("file", type=Path)
    options = parser.parse_args()
    if options.verb == "collect":
        collect(options.cache.resolve(), options.only, is_slow=options.slow)
        return 0
    if options.verb == "page":
        print("\n".join(tables(json.loads(options.file.read_text())["mutants"])))
        return 0
    if missing := [test for test in options.tests if not (ROOT / test.partition("::")[0]).exists()]:
        parser.error(f"no such test file: {', '.join(missing)}")
    options.cache, options.out = options.cache.resolve(), options.out.resolve()
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
