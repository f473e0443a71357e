"""Data workers that cannot all be started."""

from __future__ import annotations

import errno
import gc
import sys
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from torch.utils.data import DataLoader

from runner.host.loader_processes import kill_on_partial_start


@pytest.mark.parametrize("first", [1, 2])
def test_workers_that_cannot_all_start_leave_nothing_behind(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process or traceback is left, although torch's iterator then lacks attributes that its destructor uses."""
    errors: list[Any] = []
    starts: list[BaseProcess] = []

    def start(self: BaseProcess, real: Any = BaseProcess.start) -> None:
        starts.append(self)
        if len(starts) >= first:
            raise OSError(errno.EMFILE, "too many open files")
        real(self)

    monkeypatch.setattr(BaseProcess, "start", start)
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    with pytest.raises(OSError, match="too many open files"), kill_on_partial_start():
        iter(DataLoader(range(8), num_workers=2, multiprocessing_context="fork"))  # type: ignore[arg-type]
    gc.collect()
    assert not active_children()
    assert not errors
