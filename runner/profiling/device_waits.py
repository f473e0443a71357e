"""Find the lines of the task at which the host synchronizes with the device, and count them per update.

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


@dataclass(frozen=True)
class Wait:
    """Line of the task at which the host waits for the device.

    place      "my_task.py:31 in loss"
    per_update average count per update
    """

    place: str
    per_update: float


class DeviceWaits:
    """Record device synchronizations between `start` and `stop`; evaluations are excluded."""

    def __init__(self, model: nn.Module, is_task_file: IsTaskFile) -> None:
        self.model, self.is_task_file = model, is_task_file
        self._is_excluded = False
        self._counts: Counter[str] = Counter()
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
        """Return the recorded lines, most frequent first."""
        rows = [Wait(place, count / max(1, self._num_updates)) for place, count in self._counts.items()]
        return sorted(rows, key=lambda row: (-row.per_update, row.place))

    def _record(self) -> None:
        """Record a synchronization at the current line of the task; those of accel-run and of torch are not counted."""
        if self.model.training and not self._is_excluded and (line := _task_line(self.is_task_file)):
            self._counts[line] += 1


@contextmanager
def _intercept_warnings(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` for each synchronization that torch reports in the context."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=SYNC_WARNING)
        warnings.filterwarnings("ignore", message=PROTOTYPE_WARNING)  # the report covers it
        show = warnings.showwarning

        def show_warning(message: Any, *args: Any, **kwargs: Any) -> None:
            if SYNC_WARNING in str(message):
                callback()
            else:
                show(message, *args, **kwargs)

        warnings.showwarning = show_warning
        with warn_on_synchronization():
            yield


def _task_line(is_task_file: IsTaskFile) -> str:
    """Return the innermost running line of the task, "file:line in function"; empty if there is none."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_task_file(file):
            return f"{shorten_path(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
        if frame.f_code.co_name == BACKWARD_ENTRY and file.startswith(_TORCH):  # on CUDA, torch warns after the pass
            return ""
        frame = frame.f_back
    return ""


_TORCH = str(Path(torch.__file__).parent)
SYNC_WARNING = "called a synchronizing"
PROTOTYPE_WARNING = "Synchronization debug mode"
BACKWARD_ENTRY = "_engine_run_backward"
