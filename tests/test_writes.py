"""Files are created, changed, renamed or removed only in runner/durable, and at the places listed here with a reason."""

# ruff: noqa: E501 - a table of places

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "runner").rglob("*.py"))  # not tasks: they do not know their run directory
SYSTEM = "runner/durable/system.py"  # a thin wrapper of system calls

# (file, enclosing function, called name) -> why runner/durable does not do it
PLACES: dict[tuple[str, str, str], str] = {
    # In the run directory: files that no run resumes from, and that must never end a run.
    ("runner/durable/files.py", "__init__", "os.open"): "the lock file: its descriptor is the lock",
    ("runner/durable/files.py", "__init__", "os.ftruncate"): "the text in the lock file, for users",
    ("runner/durable/files.py", "__init__", "os.write"): "the text in the lock file, for users",
    ("runner/records/events.py", "__init__", "os.open"): "console.log and events.jsonl, which are appended to, one write per line; opened without following links",
    ("runner/records/events.py", "__init__", "os.replace"): "renames a log of more than 16 MiB when it is opened",
    ("runner/records/events.py", "__init__", "os.write"): "the newline that a line lacks after a crash",
    ("runner/records/events.py", "append", "os.write"): "a line; the run continues if one is lost, and counts it",
    ("runner/monitor/samples_file.py", "_open", "os.open"): "gpu.csv, which is appended to, one write per line; opened without following links",
    ("runner/monitor/samples_file.py", "_write", "os.write"): "a line; if one is lost, no more are written and the run continues",
    ("runner/monitor/samples_file.py", "_write", "os.ftruncate"): "removes an incomplete line if the disk is full",
    ("runner/monitor/gpu_stats.py", "_reserve_path", ".mkdir"): "the folder that the caller of GPUStats chose",
    ("runner/monitor/gpu_stats.py", "_reserve_path", ".touch"): "a new gpu.csv in it each time",
    ("runner/monitor/gpu_stats.py", "_replace", "os.open"): "monitor.json beside it, under a temporary name until it is complete",
    ("runner/monitor/gpu_stats.py", "_replace", "os.fdopen"): "the descriptor of the line above",
    ("runner/monitor/gpu_stats.py", "_replace", ".replace"): "renames the temporary file to monitor.json, which replaces a link",
    ("runner/monitor/gpu_stats.py", "_replace", ".unlink"): "removes the temporary file after an error",
    ("runner/monitor/gpu_stats.py", "plot_stats", ".mkdir"): "a folder for plots beside it",
    ("runner/trained/export_model.py", "export", "tempfile.TemporaryDirectory"): "writers of other libraries follow links, so they write to a private folder; removed after a crash",
    ("runner/trained/export_model.py", "_save_and_load", "safetensors.torch.save_model"): "writes to the folder of the line above",
    ("runner/launch/slurm.py", "_submit_job", ".unlink"): "scripts that submitit wrote for a rejected job",
    ("runner/launch/slurm.py", "_submit_job", ".rmdir"): "the empty folder of a run that does not exist",
    ("runner/durable/mirror_store.py", "_open", ".open"): "a file in object storage, to read it",
    # In the private folder in TMPDIR that the processes of one command share; removed when they end.
    ("runner/host/scratch.py", "_create_locked", "tempfile.mkdtemp"): "the folder itself",
    ("runner/host/scratch.py", "check_compile_cache", ".mkdir"): "the folder of compiled code that the user chose",
    ("runner/host/scratch.py", "check_compile_cache", "tempfile.TemporaryFile"): "an unnamed file in it",
    ("runner/host/scratch.py", "_create_private", ".mkdir"): "the folder of compiled code, of mode 0700",
    ("runner/host/scratch.py", "_create_private", ".chmod"): "sets the mode of an existing folder",
    ("runner/host/scratch.py", "_remove_stale", "shutil.rmtree"): "folders of killed commands",
    ("runner/host/scratch.py", "private_folder", "shutil.rmtree"): "the folder itself, when the command ends",
    ("runner/tools/measure/compare.py", "_discard", "shutil.rmtree"): "runs of ended trials, in the folder of the command",
    ("runner/engine/hooks/attribute_check.py", "_copy", "numpy.memmap"): "only an isinstance check; such arrays are not copied",
    ("runner/engine/process/watchdog.py", "_end_process", "shutil.rmtree"): "the folder itself, when a hang ends the process immediately",
    ("runner/host/heartbeat.py", "__init__", "os.open"): "memory that two processes share",
    ("runner/host/heartbeat.py", "__init__", "os.ftruncate"): "memory that two processes share",
    ("runner/host/stacks.py", "dump_on_signal", "os.open"): "the file to which a signal handler writes stacks",
    ("runner/host/stacks.py", "request_stacks", ".write_bytes"): "removes the stacks of the previous request",
    ("runner/launch/rank_process.py", "run_rank_process", ".write_text"): "the report of a rank to its supervisor",
    ("runner/launch/rank_process.py", "_set_up", "os.open"): "the file to which faulthandler writes when Python crashes",
    ("runner/tools/measure/fork_server.py", "__init__", "tempfile.TemporaryFile"): "an unnamed file for the standard error of a variant",
    ("runner/tools/doctor/isolated_check.py", "__init__", "tempfile.TemporaryFile"): "an unnamed file for the output of a check",
    ("runner/tools/doctor/storage.py", "disk", "tempfile.TemporaryFile"): "an unnamed file, to test writing and fsync",
    ("runner/tools/doctor/examine.py", "leave", "shutil.rmtree"): "the folder itself, when a signal ends the process immediately",
    ("runner/profiling/instruments.py", "_export_trace", "tempfile.TemporaryDirectory"): "a folder for the trace in it",
    ("runner/profiling/instruments.py", "_export_trace", ".export_chrome_trace"): "torch can only write to a path; the caller gets the content",
    # Elsewhere.
    ("runner/tools/doctor/examine.py", "leave", "os.write"): "standard error, in a signal handler",
    ("runner/base/picture.py", "encode_png", ".savefig"): "into memory",
    ("runner/tools/report/svg.py", "render_svg", ".savefig"): "into memory",
    ("runner/trained/infer.py", "_encode", "numpy.save"): "into memory",
    ("runner/cli.py", "_drop_output", "os.open"): "/dev/null",
    ("runner/host/output.py", "open_closed_streams", "os.open"): "/dev/null, instead of a closed standard stream",
    ("runner/host/output.py", "open_closed_streams", "os.fdopen"): "the same",
    ("runner/host/output.py", "_reopen_nonblocking", "os.open"): "the terminal or pipe behind standard output, without blocking",
    ("runner/host/output.py", "write_if_ready", "os.write"): "standard error, in a signal handler",
    ("runner/host/output.py", "write_nonblocking", "os.write"): "standard output and standard error",
    ("runner/host/output.py", "write_chunks", "os.write"): "the same",
    ("runner/host/output.py", "_write_all", "os.write"): "the same, if they are files",
    ("runner/engine/process/watchdog.py", "_leave", "os.write"): "standard error, where another thread may hold its lock",
    ("runner/engine/process/watchdog.py", "_report", "os.write"): "standard error, where another thread may hold its lock",
    ("runner/profiling/peak_memory.py", "restart_host_peak", ".write_text"): "a file in /proc that resets the peak memory",
    ("runner/host/command_process.py", "send_error", "os.fdopen"): "a pipe to the process that started this one",
    ("runner/engine/parts/weights.py", "load_initial_weights", ".rename"): "the setting weights.rename, which is no call",
    ("runner/engine/parts/weights.py", "check_names", ".rename"): "the setting weights.rename, which is no call",
    ("runner/trained/pickle_import.py", "publish", "os.link"): "gives the new file the name that the user chose, unless it exists",
    ("runner/commands/new.py", "run", ".open"): "the task file that the user requested; never replaces an existing file",
}  # fmt: skip

OF_MODULES = {
    "os": {
        "open", "write", "pwrite", "writev", "pwritev", "sendfile", "copy_file_range", "splice", "truncate", "ftruncate",
        "posix_fallocate", "rename", "renames", "replace", "unlink", "remove", "rmdir", "removedirs", "mkdir", "makedirs",
        "mkfifo", "mknod", "link", "symlink", "chmod", "fchmod", "lchmod", "chown", "fchown", "lchown", "utime",
        "setxattr", "removexattr", "fdopen",
    },
    "shutil": {
        "copyfile", "copyfileobj", "copymode", "copystat", "copy", "copy2", "copytree", "rmtree", "move", "chown",
        "make_archive", "unpack_archive",
    },
    "tempfile": {
        "TemporaryFile", "NamedTemporaryFile", "SpooledTemporaryFile", "TemporaryDirectory", "mkstemp", "mkdtemp", "mktemp",
    },
    "torch": {"save"}, "numpy": {"save", "savez", "savez_compressed", "savetxt", "memmap"},
    "safetensors.torch": {"save_file", "save_model"}, "safetensors.numpy": {"save_file"}, "onnx": {"save", "save_model"},
    "logging": {"FileHandler"}, "zipfile": {"ZipFile"}, "sqlite3": {"connect"},
    "io": {"open", "FileIO"}, "codecs": {"open"}, "gzip": {"open", "GzipFile"}, "bz2": {"open"}, "lzma": {"open"}, "tarfile": {"open"},
}  # fmt: skip
METHODS = {
    "write_text", "write_bytes", "unlink", "rename", "replace", "mkdir", "touch", "rmdir", "symlink_to", "hardlink_to",
    "chmod", "lchmod", "tofile", "savefig", "save_pretrained", "export_chrome_trace", "export_stacks", "copy_into", "move_into",
}  # fmt: skip
READING_MODES = {"r", "rb", "rt"}
READING_FLAGS = {
    f"os.O_{name}" for name in ("RDONLY", "DIRECTORY", "NOFOLLOW", "CLOEXEC", "NONBLOCK", "PATH", "NOATIME")
}


def names_of_modules(tree: ast.AST) -> dict[str, str]:
    """Resolve the imported names of a file: "np" -> "numpy", "rmtree" -> "shutil.rmtree"."""
    result = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                result[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            result |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return result


def mode_of(call: ast.Call, position: int) -> ast.expr | None:
    """Return the mode in which a file is opened; None if it is not given and so defaults to "r"."""
    if len(call.args) > position:
        return call.args[position]
    return next((keyword.value for keyword in call.keywords if keyword.arg == "mode"), None)


def only_reads(call: ast.Call, name: str) -> bool:
    """Return whether a call opens a file only for reading."""
    if name == "os.open":
        return {part.strip() for part in ast.unparse(call.args[1]).split("|")} <= READING_FLAGS
    is_method = isinstance(call.func, ast.Attribute) and name == "open"
    mode = mode_of(call, 0 if is_method else 1)
    return mode is None or (isinstance(mode, ast.Constant) and mode.value in READING_MODES)


def is_of_a_path(call: ast.Call, method: str) -> bool:
    """Return whether the object may be a path: `str.replace` has two arguments, `date.replace` has keyword arguments."""
    return method != "replace" or (len(call.args) == 1 and not call.keywords)


def found_in(source: str, file: str) -> set[tuple[str, str, str]]:
    """Return (file, enclosing function, called name) of each place that may write."""
    tree = ast.parse(source)
    return {(file, around, name) for around, name in writes(tree, names_of_modules(tree), file, "<module>")}


def writes(node: ast.AST, modules: dict[str, str], file: str, around: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inner = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else around
        called = child.func if isinstance(child, ast.Call) else child
        name = name_of(called, modules)
        if name is not None and not (isinstance(child, ast.Call) and may_be(child, name, file)):
            yield around, name
        if isinstance(child, ast.Call) and name is not None:  # the function was checked, its arguments were not
            for given in [*child.args, *(keyword.value for keyword in child.keywords)]:
                yield from writes(ast.Expr(given), modules, file, inner)
            if isinstance(called, ast.Attribute):
                yield from writes(ast.Expr(called.value), modules, file, inner)
        else:
            yield from writes(child, modules, file, inner)


def name_of(node: ast.AST, modules: dict[str, str]) -> str | None:
    """Return the name of a function that may write ("os.rename", ".write_text", "open"), else None."""
    if isinstance(node, ast.Name):
        dotted = modules.get(node.id)
        if node.id == "open" and dotted is None:
            return "open"
        return dotted if dotted and is_of_module(dotted) else None
    if not isinstance(node, ast.Attribute):
        return None
    root, _, rest = ast.unparse(node).partition(".")
    if root in modules:
        dotted = f"{modules[root]}.{rest}"
        return dotted if is_of_module(dotted) else f".{node.attr}" if is_class(root, rest) else None
    return f".{node.attr}" if node.attr in METHODS or node.attr == "open" else None


def is_of_module(dotted: str) -> bool:
    module, _, name = dotted.rpartition(".")
    return name in OF_MODULES.get(module, ())


def is_class(root: str, rest: str) -> bool:
    """Return whether the name is a method of a class, as in `Path.unlink`, not a function of a module."""
    return root[:1].isupper() and rest in METHODS


def may_be(call: ast.Call, name: str, file: str) -> bool:
    """Return whether the call changes no file, or changes it in the one allowed way."""
    if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "_system":
        return file == "runner/durable/files.py"
    if name in ("os.open", "os.fdopen") or name.rpartition(".")[2] == "open":
        return only_reads(call, name.removeprefix("."))
    return name.startswith(".") and not is_of_a_path(call, name[1:])


@pytest.mark.slow
def test_files_are_written_only_at_listed_places() -> None:
    result = {
        place
        for path in FILES
        if (file := str(path.relative_to(ROOT))) != SYSTEM
        for place in found_in(path.read_text(encoding="utf-8"), file)
    }
    assert not result - PLACES.keys(), (
        f"{sorted(result - PLACES.keys())}: use RunDirectory.write, files.atomic_write, files.AppendLog or "
        "files.remove, or list the place here with its reason"
    )
    assert not PLACES.keys() - result, f"listed here, but no longer in the code: {sorted(PLACES.keys() - result)}"


@pytest.mark.parametrize(
    "source",
    ["open(path, 'w')", "open(path, mode='a')", "open(path, mode)", "path.open('xb')", "Path(path).open(mode='r+')", "path.write_text('')",
     "path.write_bytes(b'')", "path.unlink()", "path.unlink(missing_ok=True)", "Path.unlink(path)", "from pathlib import Path\nPath.unlink(path)",
     "path.rename(other)", "path.replace(other)", "path.mkdir()", "path.touch()", "path.rmdir()", "path.symlink_to(other)", "path.hardlink_to(other)",
     "import os\nos.open(path, os.O_WRONLY | os.O_CREAT)", "import os\nos.open(path, flags)", "import os as o\no.rename(a, b)", "from os import replace\nreplace(a, b)",
     "import os\nos.unlink(path)", "import os\nos.mkdir(path)", "import os\nos.truncate(path, 0)", "import os\ncall(os.remove, path)",
     "import shutil\nshutil.rmtree(path)", "from shutil import copy as c\nc(a, b)", "import tempfile\ntempfile.mkstemp()",
     "from tempfile import TemporaryDirectory\nwith TemporaryDirectory() as made: pass", "import os\nos.fdopen(descriptor, 'wb')", "import io\nio.open(path, 'w')",
     "import gzip\ngzip.open(path, 'wb')", "import torch\ntorch.save(state, path)", "import numpy as np\nnp.savez(path)", "print(path.write_text(''))",
     "import os\nos.fsencode(path.rename(other))", "import os\nos.open(path.replace(other), os.O_RDONLY)", "_system.unlink(path)",
     "from safetensors.torch import save_file\nsave_file(tensors, path)", "figure.savefig(path)"],
)  # fmt: skip
def test_each_way_to_write_a_file_is_detected(source: str) -> None:
    assert found_in(source, "somewhere.py")


@pytest.mark.parametrize(
    "source",
    ["open(path)", "open(path, 'rb')", "path.open()", "path.open('rb')", "text.replace('a', 'b')", "import dataclasses\ndataclasses.replace(one, key=2)",
     "from dataclasses import replace\nreplace(one, key=2)", "moment.replace(tzinfo=None)", "import os\nos.open(path, os.O_RDONLY | os.O_CLOEXEC)",
     "import shutil\nshutil.which('gcc')", "import tempfile\ntempfile.gettempdir()", "import os\nos.fdopen(descriptor, 'rb')",
     "from runner.durable.files import rename\nrename(a, b)", "from runner.durable import files\nfiles.rename(a, b)", "path.read_text()"],
)  # fmt: skip
def test_reading_calls_are_ignored(source: str) -> None:
    assert not found_in(source, "somewhere.py")
