"""Call the function of a chosen option: shipped tables, and those of a task file or a package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from runner.base.errors import AccelRunError, TaskFault
from runner.config.own_tables import HOOK_TABLE, hook_name

Made = TypeVar("Made")


def make(table: Mapping[str, Callable[..., Made]], option: str, /, *given: Any, **keys: Any) -> Made:
    """Call the function of `option` in `table` with the runner's arguments and the user's settings.

    option  name in the table, or `PLACE:TABLE:NAME` for an option of a task file or a package
    Raises TaskFault if a function of a task file or a package raises.
    """
    if ":" not in option:
        assert option in table, f"{option} is not in the table {sorted(table)}"
        return table[option](*given, **keys)
    place, of_place, name = option.rsplit(":", 2)
    try:
        entries = getattr(_module(place), of_place)
        if of_place == HOOK_TABLE:  # a list of classes
            entries = {hook_name(kind.__name__): kind for kind in entries}
        function: Callable[..., Made] = entries[name]
        return function(*given, **keys)
    except AccelRunError:
        raise
    except Exception as error:
        fix = "fix the function, or use another option"
        raise TaskFault(f"{type(error).__name__}: {error}", where=f"{place}: {of_place}[{name!r}]", fix=fix) from error


def file_of_reference(reference: str) -> Path:
    """Return the file of the module that `PLACE:TABLE:NAME` names, which is loaded."""
    module = _module(reference.rsplit(":", 2)[0])
    return Path(str(module.__file__))


class UncachedLoader(SourceFileLoader):
    """Compiles a file at each start: kept bytecode is stale if an edit keeps second and size of the file."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def load_file(file: Path) -> ModuleType:
    """Execute a Python file as a module of its name, which data workers can import from the file's folder.

    Raises TaskFault if the name is taken.
    """
    loader = UncachedLoader(file.stem, str(file)) if file.suffix == ".py" else None
    spec = importlib.util.spec_from_file_location(file.stem, file, loader=loader)
    if spec is None or spec.loader is None:
        raise TaskFault("is not a Python file", where=str(file), fix="its name must end with .py")
    if file.stem in sys.modules and getattr(sys.modules[file.stem], "__file__", None) != str(file):
        raise TaskFault(
            f"has the name of a module in use, {file.stem}", where=str(file), fix=f"call it my_{file.stem}.py"
        )
    sys.path.insert(0, str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    loaded = sys.modules.get(Path(place).stem)
    return loaded if loaded is not None and getattr(loaded, "__file__", None) == place else load_file(Path(place))
