"""Call the function of a chosen option, from a shipped table or from a table of a task file or a package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from runner.base.errors import AccelRunError, MissingPackage, TaskFault
from runner.config.custom_tables import HOOK_TABLE, hook_name

Result = TypeVar("Result")
executing_files: list[Path] = []  # task files that are being imported


def call_option(table: Mapping[str, Callable[..., Result]], option: str, /, *args: Any, **keys: Any) -> Result:
    """Call the function of `option` in `table` with the runner's arguments and the user's settings.

    option  name in the table, or `PLACE:TABLE:NAME` for an option of a task file (PLACE: its path) or a package (PLACE:
            its module)
    Raises TaskFault if a function of a task file or a package raises.
    """
    if ":" not in option:
        assert option in table, f"{option} is not in the table {sorted(table)}"
        return table[option](*args, **keys)
    location, table_name, name = option.rsplit(":", 2)
    try:
        function: Callable[..., Result] = find_entry(option)
        return function(*args, **keys)
    except AccelRunError:
        raise
    except Exception as error:
        fix = "fix the function, or use another option"
        raise TaskFault(
            f"{type(error).__name__}: {error}", where=f"{location}: {table_name}[{name!r}]", fix=fix
        ) from error


def find_entry(reference: str) -> Any:
    """Return the function or class that `PLACE:TABLE:NAME` names; its module is imported if it is not loaded."""
    location, table_name, name = reference.rsplit(":", 2)
    entries = getattr(_import_module(location), table_name)
    if table_name == HOOK_TABLE:  # a list of classes
        entries = {hook_name(kind.__name__): kind for kind in entries}
    entry = entries[name]
    return entry[1] if isinstance(entry, tuple) else entry  # ("bf16", function)


def reference_file(reference: str) -> Path:
    """Load the module that `PLACE:TABLE:NAME` names, and return its file."""
    module = _import_module(reference.rsplit(":", 2)[0])
    return Path(str(module.__file__))


class UncachedLoader(SourceFileLoader):
    """Compile a file at each start: cached bytecode hides edits that change neither size nor mtime (whole seconds)."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def load_file(file: Path) -> ModuleType:
    """Execute a Python file as a module named after it, which data workers can import from the file's folder.

    Raises TaskFault if another module has this name.
    """
    loader = UncachedLoader(file.stem, str(file)) if file.suffix == ".py" else None
    spec = importlib.util.spec_from_file_location(file.stem, file, loader=loader)
    if spec is None or spec.loader is None:
        raise TaskFault("is not a Python file", where=str(file), fix="use a file name that ends with .py")
    if file.stem in sys.modules and getattr(sys.modules[file.stem], "__file__", None) != str(file):
        raise TaskFault(
            f"has the name of an imported module, {file.stem}", where=str(file), fix=f"rename it to my_{file.stem}.py"
        )
    folder = str(file.parent)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    executing_files.append(file)
    try:
        spec.loader.exec_module(module)
    finally:
        executing_files.remove(file)
    return module


def _import_module(location: str) -> ModuleType:
    if location.endswith(".py"):
        loaded = sys.modules.get(Path(location).stem)
        is_loaded = loaded is not None and getattr(loaded, "__file__", None) == location
        return loaded if loaded is not None and is_loaded else load_file(Path(location))
    return import_packaged(location)


def import_packaged(module: str) -> ModuleType:
    """Import a module of a package that defines options, hooks or a task. Raises MissingPackage if that fails."""
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise MissingPackage(
            f"cannot be imported: {type(error).__name__}: {error}, in {frame.filename}:{frame.lineno}",
            where=module,
            fix="repair or uninstall the package, or use another option",
        ) from error
