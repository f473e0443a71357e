"""Find the source lines at which the host synchronizes with the device, and count them per update.

torch reports synchronizations on CUDA (`set_sync_debug_mode`); on a CPU there are none.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.base.accelerator import warn_on_synchronization
from runner.host.stacks import shorten_path

IsTaskFile = Callable[[str], bool]  # path of a file -> whether it belongs to the task
Line = tuple[str, int]  # file, number


@dataclass(frozen=True)
class Wait:
    """Source line at which the host waits for the device.

    place      "my_task.py:31 in loss"
    per_update average count per update
    in_task    True if the line belongs to the task, False if it belongs to accel-run or a library
    """

    place: str
    per_update: float
    in_task: bool


class DeviceWaits:
    """Record device synchronizations between `start` and `stop`; evaluations are excluded."""

    def __init__(self, model: nn.Module, is_task_file: IsTaskFile) -> None:
        self.model, self.is_task_file = model, is_task_file
        self._is_excluded = False
        self._counts: Counter[_Location] = Counter()
        self._open = ExitStack()
        self._num_updates = 0

    def start(self) -> None:
        self._open.enter_context(_intercept_warnings(self._record))

    def stop(self) -> None:
        self._open.close()

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Exclude synchronizations inside the context."""
        self._is_excluded = True
        try:
            yield
        finally:
            self._is_excluded = False

    def update(self) -> None:
        """End an update."""
        self._num_updates += 1

    def table(self) -> list[Wait]:
        """Return the recorded lines: task lines first, most frequent first."""
        rows = [
            Wait(place.text, count / max(1, self._num_updates), place.line is not None)
            for place, count in self._counts.items()
        ]
        return sorted(rows, key=lambda row: (not row.in_task, -row.per_update, row.place))

    def _record(self) -> None:
        """Record a synchronization at the current task line, or at the current library line if there is none."""
        if self.model.training and not self._is_excluded:
            self._counts[_locate(self.is_task_file)] += 1


@contextmanager
def _intercept_warnings(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` for each synchronization that torch reports in the context."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=SYNC_WARNING)
        warnings.filterwarnings("ignore", message=PROTOTYPE_WARNING)  # says that some waits are not reported
        show = warnings.showwarning

        def show_warning(message: Any, *args: Any, **kwargs: Any) -> None:
            if SYNC_WARNING in str(message):
                callback()
            else:
                show(message, *args, **kwargs)

        warnings.showwarning = show_warning
        with warn_on_synchronization():
            yield


@dataclass(frozen=True)
class _Location:
    """Description of the code that synchronizes, and its line if it is in the task."""

    text: str
    line: Line | None = None


def _locate(is_task_file: IsTaskFile) -> _Location:
    """Return the innermost current task line, or a description of the running code if there is none."""
    frame: Any = sys._getframe(2)
    other = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_task_file(file):
            return _Location(_describe_frame(frame), (file, frame.f_lineno))
        # On CUDA, torch emits the warnings of a backward pass when the pass has ended.
        if frame.f_code.co_name == BACKWARD_ENTRY and file.startswith(_TORCH):
            return _Location(other or _describe_backward_node())
        only_forwards_calls = (
            file == __file__ or file.startswith((_TORCH, "<")) or "/contextlib.py" in file or "/warnings.py" in file
        )
        if not other and not only_forwards_calls:
            other = _describe_frame(frame)
        frame = frame.f_back
    return _Location(_describe_backward_node() if torch._C._current_graph_task_id() != -1 else other)


def _describe_frame(frame: Any) -> str:
    return f"{shorten_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _describe_backward_node() -> str:
    """Return the current node of torch's backward pass, if known."""
    node: Any = torch._C._current_autograd_node()  # may be None, although its annotation excludes that
    return f"{'an operator' if node is None else node.name()}{_IN_BACKWARD}"


_TORCH = str(Path(torch.__file__).parent)
SYNC_WARNING = "called a synchronizing"
PROTOTYPE_WARNING = "Synchronization debug mode"
_IN_BACKWARD = " in the backward pass"
BACKWARD_ENTRY = "_engine_run_backward"
