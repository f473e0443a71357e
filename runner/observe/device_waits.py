"""Find the source lines at which the host synchronizes with the device, and count them per update.

On CUDA torch itself tells (`set_sync_debug_mode`). On a CPU nothing waits; there the same places are found by following
what would lie on a GPU: parameters, the batch, and all that is computed from them.
"""

from __future__ import annotations

import ast
import linecache
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from runner.base.accelerator import warning_of_waits
from runner.base.batch import map_tensors
from runner.observe.module_times import tensors_in

IsOfTask = Callable[[str], bool]  # of a file's name
Line = tuple[str, int]  # file, number


@dataclass(frozen=True)
class Wait:
    """Source line at which the host waits for the device.

    place      "my_task.py:31 in loss"
    what       the call, such as "item"
    per_update average count per update
    in_task    True for a task line, False for one of accel-run or a library
    """

    place: str
    what: str
    per_update: float
    in_task: bool


class Waits:
    """Record device synchronizations between `start` and `stop`; evaluations are excluded."""

    def __init__(self, model: nn.Module, is_of_task: IsOfTask) -> None:
        self.model, self.is_of_task = model, is_of_task
        self.is_only_here = False  # True if a call synchronizes only in its CPU implementation
        self._is_aside = False
        self._found: Counter[tuple[_Place, str]] = Counter()
        self._open = ExitStack()
        self._num_updates = 0

    def start(self) -> None:
        """Start recording."""
        self._open.enter_context(self._watched())

    def stop(self) -> None:
        """Stop recording."""
        self._open.close()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude synchronizations inside the context."""
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False

    def batch(self, batch: Any) -> Any:
        """Register a batch copied to the device; return it as stored there."""
        return batch

    def update(self) -> None:
        """End an update."""
        self._num_updates += 1

    def table(self) -> list[Wait]:
        """Return the recorded lines: task lines first, most frequent first."""
        rows = [
            Wait(place.shown, what, count / max(1, self._num_updates), place.line is not None)
            for (place, what), count in self._found.items()
        ]
        return sorted(rows, key=lambda row: (not row.in_task, -row.per_update, row.place))

    def lines(self) -> dict[Line, float]:
        """Return task lines -> average synchronizations per update, most frequent first."""
        counts: Counter[Line] = Counter()
        for (place, _), count in self._found.items():
            if place.line is not None:
                counts[place.line] += count
        return {line: count / max(1, self._num_updates) for line, count in counts.most_common()}

    def note(self, what: str) -> None:
        """Record a synchronization at the current task line, or at the current library if there is none."""
        if not self.model.training or self.is_only_here or self._is_aside:
            return
        place = _place(self.is_of_task)
        if place.line is not None or self.tells_of(place.shown):
            self._found[place, what] += 1

    def tells_of(self, place: str) -> bool:
        """Return True if a synchronization outside the task is reported."""
        return True

    @contextmanager
    def _watched(self) -> Iterator[None]:
        raise NotImplementedError


class RealWaits(Waits):
    """Record CUDA synchronizations from torch's warnings."""

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=_SYNCHRONIZING)
            warnings.filterwarnings("ignore", message=_PROTOTYPE)  # the report covers it
            show = warnings.showwarning

            def noted(message: Any, *rest: Any, **named: Any) -> None:
                if _SYNCHRONIZING in str(message):
                    self.note("")
                else:
                    show(message, *rest, **named)

            warnings.showwarning = noted
            with warning_of_waits():
                yield


class WouldWait(Waits):
    """Find on a CPU the synchronizations that a GPU would cause, except those of accel-run itself."""

    def __init__(self, model: nn.Module, is_of_task: IsOfTask) -> None:
        super().__init__(model, is_of_task)
        self.is_copied_to_host = False  # what is called fills a tensor of the host
        self._on_device = WeakIdKeyDictionary()  # storages
        self._on_host = WeakIdKeyDictionary()  # storages made since, from nothing that would lie on the device
        self._fetched = WeakIdKeyDictionary()  # those of them that were copied to the host in this update
        for tensor in (*model.parameters(), *model.buffers()):
            self.settle(tensor)

    def batch(self, batch: Any) -> Any:
        # A copy, as a GPU would have: the batch may be a view of what the data set goes on reading from on the host.
        there = map_tensors(Tensor.clone, batch)
        for tensor in _tensors(list(tensors_in(there))):
            self.settle(tensor)
        return there

    def update(self) -> None:
        super().update()
        self._fetched = WeakIdKeyDictionary()

    def tells_of(self, place: str) -> bool:
        return place.endswith(_IN_BACKWARD)

    def settle(self, tensor: Tensor) -> None:
        """Mark the tensor as stored on the device."""
        storage = tensor.untyped_storage()
        if storage not in self._on_host or not self.is_copied_to_host:
            self._on_device[storage] = True
            if storage in self._on_host:
                del self._on_host[storage]

    def made_on_host(self, tensor: Tensor) -> None:
        """Mark the tensor as created on the host only."""
        storage = tensor.untyped_storage()
        if storage not in self._on_device:
            self._on_host[storage] = True

    def is_on_host(self, value: Any) -> bool:
        """Return True if the value is a tensor known to be on the host."""
        return isinstance(value, Tensor) and value.untyped_storage() in self._on_host

    def is_there(self, values: Any) -> bool:
        """Return True if one of the tensors would be on the device."""
        return any(tensor.untyped_storage() in self._on_device for tensor in _tensors(values))

    def fetch(self, tensor: Tensor, what: str) -> None:
        """Record a copy of the tensor to the host, unless it was already copied."""
        storage = tensor.untyped_storage()
        if storage in self._on_device and storage not in self._fetched:
            self.note(what)
            self._fetched[storage] = True

    def read(self, tensor: Tensor, what: str) -> None:
        """Record that a value of the tensor is read on the host."""
        storage = tensor.untyped_storage()
        if storage in self._on_device and storage not in self._fetched:
            self.note(what)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with _Calls(self), _Operators(self):
            yield


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercept operators: `.item()`, also inside other calls, and value-dependent shapes."""

    def __init__(self, waits: WouldWait) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        name = func.overloadpacket.__name__
        is_there = self.waits.is_there(given)
        if is_there and name == "_local_scalar_dense":
            self.waits.read(args[0], "item")
        elif is_there and (name in _SIZED_BY_VALUES or _is_masked(name, args)):
            self.waits.note(_SIZED_BY_VALUES.get(name, "indexing by a mask"))
        output = func(*args, **(kwargs or {}))
        for tensor in _tensors(output):
            (self.waits.settle if is_there else self.waits.made_on_host)(tensor)
        return output


class _Calls(TorchFunctionMode):
    """Intercept calls that reach no CPU kernel: copies to the host and tensors created on the device."""

    def __init__(self, waits: WouldWait) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", ""))
        if name in _FETCHING or (
            name == "to" and self._is_to_host(*args[1:2], kwargs.get("device"), kwargs.get("other"))
        ):
            self.waits.fetch(args[0], name.strip("_"))
        self.waits.is_copied_to_host = name == "copy_" and self.waits.is_on_host(args[0])
        if self.waits.is_copied_to_host and self.waits.is_there(args[1:]) and not _may_return_early(args, kwargs):
            self.waits.note("copy_ to the host")
        # Given the number of classes, its values are looked at on a CPU only (torch, aten/src/ATen/native/Onehot.cpp).
        self.waits.is_only_here = name == "one_hot" and (len(args) > 1 or "num_classes" in kwargs)
        try:
            output = func(*args, **kwargs)
        finally:
            self.waits.is_only_here = self.waits.is_copied_to_host = False
        if kwargs.get("device") is not None and name != "to" and isinstance(output, Tensor):
            self.waits.settle(output)
            if name in ("tensor", "as_tensor"):
                self.waits.note(f"{name} of numbers on the device")
        return output

    def _is_to_host(self, *targets: Any) -> bool:
        """Return True if an argument is a host tensor, or names the host explicitly."""
        return any(
            self.waits.is_on_host(target)
            or (isinstance(target, (str, torch.device)) and str(target) in ("cpu", "cpu:0") and _names_the_host())
            for target in targets
        )


def _may_return_early(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a copy is non-blocking."""
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def _tensors(values: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.layout is torch.strided)


def _is_masked(name: str, args: tuple[Any, ...]) -> bool:
    """Return True for indexing whose output size depends on a mask; assigning one scalar needs no size."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    if name != "index" and args[2].numel() == 1:
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


@dataclass(frozen=True)
class _Place:
    """Code that makes the host wait, and its line if it is in the task."""

    shown: str
    line: Line | None = None


def _place(is_of_task: IsOfTask) -> _Place:
    """Return the innermost current task line, or a description of the running code if there is none."""
    frame: Any = sys._getframe(2)
    other = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_task(file):
            return _Place(f"{_shown(file)}:{frame.f_lineno} in {frame.f_code.co_name}", (file, frame.f_lineno))
        if frame.f_code.co_name == _ENGINE and file.startswith(_TORCH):  # on CUDA torch tells of it afterwards
            return _Place(other or _of_backward())
        if not other and not _is_between(file):
            other = f"{_shown(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return _Place(_of_backward() if torch._C._current_graph_task_id() != -1 else other)


def _of_backward() -> str:
    """Return the current node of torch's backward pass, if known."""
    node: Any = torch._C._current_autograd_node()  # typed as if there always were one
    return f"{'an operator' if node is None else node.name()}{_IN_BACKWARD}"


def _is_between(file: str) -> bool:
    """Return True if a file only forwards calls: torch, this file, the standard library."""
    return file == __file__ or file.startswith((_TORCH, "<")) or "/contextlib.py" in file or "/warnings.py" in file


def _names_the_host() -> bool:
    """Return True if the current call names the CPU explicitly, not through a device variable.

    It does by `"cpu"`, by `torch.device("cpu")`, and by a name that its file sets to one of these and to nothing else.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return False
    first, last, begin, end = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    source = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    lines = [line.encode() for line in source[first - 1 : last]]
    if not lines or None in (begin, end):
        return False
    lines[-1] = lines[-1][:end]  # before the beginning: both may be in one line
    lines[0] = lines[0][begin:]
    try:
        call = ast.parse(b"".join(lines), mode="eval").body
    except SyntaxError:
        return False
    given = [*call.args, *(word.value for word in call.keywords)] if isinstance(call, ast.Call) else []
    names = _names_of_the_host("".join(source))
    return any(_is_the_host(each) or ast.unparse(each) in names for each in given)


def _is_the_host(value: ast.AST | None) -> bool:
    return value is not None and ast.unparse(value) in ("'cpu'", "torch.device('cpu')", "device('cpu')")


@lru_cache(maxsize=64)
def _names_of_the_host(source: str) -> frozenset[str]:
    """Return the names that a file assigns only to the CPU, including attributes such as `self.host`."""
    given: dict[str, list[bool]] = defaultdict(list)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            targets = [(target, _is_the_host(node.value)) for target in node.targets]
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            targets = [(node.target, _is_the_host(node.value))]
        elif isinstance(node, ast.arg):
            given[node.arg].append(False)
            continue
        else:
            continue
        for target, is_the_host in targets:
            for part in ast.walk(target):
                if isinstance(part, (ast.Name, ast.Attribute)):
                    given[ast.unparse(part)].append(is_the_host and part is target)
    return frozenset(name for name, found in given.items() if all(found))


def _shown(file: str) -> str:
    """Return a file path relative to the working directory, or the file with its parent folder."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else "/".join(path.parts[-2:])


_TORCH = str(Path(torch.__file__).parent)
_SYNCHRONIZING = "called a synchronizing"
_PROTOTYPE = "Synchronization debug mode"
_IN_BACKWARD = " in the backward pass"
_ENGINE = "_engine_run_backward"
_FETCHING = {"cpu", "tolist", "numpy", "__array__"}
_SIZED_BY_VALUES = {
    "nonzero": "nonzero", "masked_select": "masked_select", "_unique": "unique", "_unique2": "unique",
    "unique_dim": "unique", "unique_consecutive": "unique_consecutive", "unique_dim_consecutive": "unique_consecutive",
    "repeat_interleave": "repeat_interleave", "equal": "equal", "is_nonzero": "bool", "allclose": "allclose",
    "bincount": "bincount", "_linalg_check_errors": "linalg", "_assert_scalar": "assert",
}  # fmt: skip


def waits(model: nn.Module, device: torch.device, is_of_task: IsOfTask) -> Waits:
    """Return the recorder of synchronizations for this device."""
    return RealWaits(model, is_of_task) if device.type == "cuda" else WouldWait(model, is_of_task)
