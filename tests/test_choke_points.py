"""Functions are looked up by name, and text is run as code, only at the places listed here, each with a reason."""

# ruff: noqa: E501 - a table of places

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted([*(ROOT / "runner").rglob("*.py"), *(ROOT / "tasks").rglob("*.py")])

# (file, enclosing function, called name) -> why the looked-up name cannot be arbitrary
PLACES: dict[tuple[str, str, str], str] = {
    ("runner/cli.py", "_dispatch", "import_module"): "names of the table COMMANDS",
    ("runner/commands/complete.py", "candidates", "import_module"): "names of the table COMMANDS",
    ("runner/commands/benchmark.py", "run", "import_module"): "names of the table SUITES",
    ("runner/__init__.py", "__getattr__", "getattr"): "names compared with a tuple in the line above",
    ("runner/__init__.py", "__dir__", "globals"): "only the names are listed",
    ("runner/engine/contract/task_loading.py", "_import", "import_module"): "a shipped task, named after an existing file in conf/task",
    ("runner/config/option_table.py", "load_file", "exec_module"): "the only place that executes a user's file: --task on the command line",
    ("runner/config/option_table.py", "import_packaged", "import_module"): "a module that an installed package names as its entry point",
    ("runner/config/option_table.py", "find_entry", "getattr"): "a table of custom_tables.py, in the task's file or an installed package",
    ("runner/engine/hooks/custom.py", "_build_hook", "getattr"): "methods of Hook that the file spells out",
    ("runner/engine/hooks/custom.py", "_build_hook", "setattr"): "methods of Hook that the file spells out",
    ("runner/tools/doctor/findings.py", "check", "import_module"): "modules that the tables of checks spell out",
    ("runner/tools/doctor/findings.py", "check", "getattr"): "functions that the tables of checks spell out",
    ("runner/tools/doctor/software.py", "import_error", "import_module"): "packages that accel-run's metadata requires",
    ("runner/engine/evaluation/undeclared_states.py", "_is_used", "setattr"): "attributes that a metric itself has set",
    ("runner/base/json_converter.py", "encode", "getattr"): "the fields of a dataclass",
    ("runner/adapters/lightning.py", "*", "getattr"): "methods of a LightningModule that the file spells out",
    ("runner/base/packages.py", "require", "import_module"): "names that tasks and axes spell out",
    ("runner/launch/on_ranks.py", "import_before_fork", "import_module"): "one of three names in a table in the line above",
    ("runner/axes/optimizer.py", "_import_quietly", "import_module"): "names that the file spells out",
    ("runner/tensors/optimizer_state.py", "_plain_tensors", "getattr"): "attributes that a tensor subclass itself lists",
    ("runner/axes/memory.py", "selective", "getattr"): "operations of torch that the file spells out",
    ("runner/forecast/cuda_autocast.py", "_find_functions", "getattr"): "functions of torch that the file spells out",
    ("runner/config/configuration.py", "_only_phase", "getattr"): "fields of Settings that the function spells out",
    ("runner/config/schema.py", "<module>", "getattr"): "names in values.__all__",
    ("runner/distributed/stages.py", "*", "getattr"): "dtypes that a rank of ours sent",
    ("runner/distributed/p2p_messages.py", "*", "getattr"): "dtypes that a rank of ours sent",
    ("runner/engine/evaluation/metric_states.py", "*", "setattr"): "states that a metric of torchmetrics itself lists",
    ("runner/distributed/agreement.py", "*", "getattr"): "dtypes that a rank of ours sent",
    ("runner/engine/contract/contract_checks.py", "*", "getattr"): "members of Task and Hook that the file spells out",
    ("runner/engine/update/coupled.py", "is_coupled", "getattr"): "methods of Task that the line spells out",
    ("runner/engine/update/objectives.py", "parse_objectives", "getattr"): "two groups that the file spells out",
    ("runner/distributed/shared_calls.py", "watched", "getattr"): "functions of torch that the file spells out",
    ("runner/distributed/shared_calls.py", "watched", "setattr"): "functions of torch that the file spells out, put back at the end",
    ("runner/distributed/sharded.py", "*", "getattr"): "a literal of the option communicate",
    ("runner/engine/hooks/hook.py", "hooks_with", "getattr"): "a method of Hook that the callers spell out",
    ("runner/engine/hooks/forward_state.py", "*", "getattr"): "parameters and buffers that a module itself lists",
    ("runner/engine/update/non_finite.py", "_unpack", "getattr"): "fields that a dataclass itself lists",
    ("runner/host/output.py", "__getattr__", "getattr"): "attributes that code reads from sys.stdout, delegated to the wrapped stream",
    ("runner/axes/backend.py", "*", "setattr"): "two switches of cuDNN that the lines spell out, put back at the end",
    ("tasks/dynamo/model.py", "*", "getattr"): "heads of the model, checked when it is built",
    ("tasks/hyperspectral/task.py", "fits", "getattr"): "a literal of the option statistics",
}  # fmt: skip
CALLS = {"eval", "exec", "compile", "__import__", "import_module", "exec_module", "run_path", "run_module", "getattr", "setattr",
         "attrgetter", "methodcaller", "instantiate", "get_class", "get_method", "globals", "load_module"}  # fmt: skip
ALIASED = {"eval", "exec", "compile", "__import__", "getattr", "setattr", "globals", "locals", "import_module"}
OF_BUILTINS = {"eval", "exec", "compile", "getattr", "setattr", "globals"}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy", "code", "codeop"}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call, str]]:
    """Yield (enclosing function, call, called name)."""

    def walk(node: ast.AST, around: str) -> Iterator[tuple[str, ast.Call, str]]:
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else around
            if isinstance(child, ast.Call):
                if isinstance(child.func, ast.Name):
                    yield around, child, child.func.id
                elif isinstance(child.func, ast.Attribute) and (
                    child.func.attr not in OF_BUILTINS or ast.unparse(child.func.value) in ("builtins", "__builtins__")
                ):  # model.eval(), re.compile
                    yield around, child, child.func.attr
            yield from walk(child, inner)

    yield from walk(tree, "<module>")


def is_literal(call: ast.Call, name: str) -> bool:
    position = 1 if name in ("getattr", "setattr") else 0
    return len(call.args) > position and isinstance(call.args[position], ast.Constant)


def found_in(source: str, file: str) -> set[tuple[str, str, str]]:
    tree = ast.parse(source)
    result = {
        (file, around, name) for around, call, name in calls(tree) if name in CALLS and not is_literal(call, name)
    }
    return result | {(file, "*", name) for name in aliases(tree)}


def aliases(tree: ast.AST) -> Iterator[str]:
    """Yield aliases of these functions, and look-ups in a namespace: f = getattr, __dict__[x]()."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in called:
            if node.id in ALIASED:
                yield node.id
        elif isinstance(node, ast.ImportFrom) and node.module == "builtins":
            yield "builtins"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            space = ast.unparse(node.func.value)
            if space.endswith("__dict__") or space.startswith(("globals(", "locals(", "vars(", "sys.modules")):
                yield "__dict__"


def starts_a_shell(call: ast.Call) -> bool:
    """Return whether a program is started through a shell: ["sh", "-c", ...]."""
    first = call.args[0] if call.args else None
    args = [item.value for item in first.elts if isinstance(item, ast.Constant)] if isinstance(first, ast.List) else []
    return "-c" in args and any(str(word).rsplit("/", 1)[-1] in ("sh", "bash", "zsh", "dash") for word in args)


@pytest.mark.slow
def test_functions_are_looked_up_only_at_listed_places() -> None:
    used = set()
    for path in FILES:
        file = str(path.relative_to(ROOT))
        for place in found_in(path.read_text(encoding="utf-8"), file):
            known = [key for key in (place, (place[0], "*", place[2])) if key in PLACES]
            assert known, (
                f"{place}: choose from a table (runner/config/option_table.py), or list the place here with its reason"
            )
            used.update(known)
    assert set(PLACES) == used, f"listed here, but no longer in the code: {set(PLACES) - used}"


@pytest.mark.slow
def test_no_module_imports_pickle_or_starts_a_shell() -> None:
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        file = str(path.relative_to(ROOT))
        for node in ast.walk(tree):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not FORBIDDEN_MODULES & {name.split(".")[0] for name in names}, (
                f"{file}:{getattr(node, 'lineno', 0)}"
            )
            if not isinstance(node, ast.Call):
                continue
            where = f"{file}:{node.lineno}"
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            called = ast.unparse(node.func)
            assert not (isinstance(keywords.get("shell"), ast.Constant) and keywords["shell"].value), where  # type: ignore[attr-defined]
            assert not starts_a_shell(node), where
            assert called not in (
                "os.system",
                "os.popen",
                "yaml.load",
                "yaml.unsafe_load",
                "yaml.full_load",
                "torch.save",
            ), where
            if called == "torch.load":
                assert file == "runner/trained/pickle_import.py", where
                assert ast.unparse(keywords["weights_only"]) == "True", where
            if called in ("np.load", "numpy.load"):
                allowed = keywords.get("allow_pickle")
                assert allowed is None or ast.unparse(allowed) == "False", where  # numpy's default is False


@pytest.mark.slow
def test_options_are_called_only_through_call_option() -> None:
    for path in FILES:
        if path.name == "choice.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                table = ast.unparse(node.func.value)
                assert not table.isupper() or table in KNOWN_TABLES, (
                    f"{path}:{node.lineno}: {table}[...] is called, use call_option()"
                )


KNOWN_TABLES = {
    "ACTIONS": "functions of one suite, not options; the key was found in the table",
    "SINKS": "used in the tracker process, which does not import the runner; trackers.py chooses the sink",
    "_NEW_STATES": "indexed by the class of an optimizer",
    "_NAMESPACE": "Range and Matches; the name is checked in the line above",
}


@pytest.mark.parametrize(
    "source",
    ["getattr(os, name)", "import_module(f'x.{name}')", "eval(text)", "exec(code)", "__import__(name)", "importlib.import_module(name)",
     "hydra.utils.instantiate(config)", "spec.loader.exec_module(module)", "compile(text, 'x', 'exec')",
     "f = getattr", "builtins.eval(text)", "map(eval, texts)", "module.__dict__[name]()", "globals()[name]()", "vars(m)[name](1)",
     "from builtins import eval as f", "sys.modules[name].__dict__[x]()"],
)  # fmt: skip
def test_each_way_to_look_up_a_function_is_detected(source: str) -> None:
    assert found_in(source, "somewhere.py")


def test_each_way_to_start_a_shell_is_detected() -> None:
    for source in ("run(['sh', '-c', x])", "Popen(['/bin/bash', '-e', '-c', x])"):
        statement = ast.parse(source).body[0]
        assert isinstance(statement, ast.Expr)
        assert isinstance(statement.value, ast.Call)
        assert starts_a_shell(statement.value)
