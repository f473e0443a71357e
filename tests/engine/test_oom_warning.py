"""The warning about reduced micro-batches states their number and size on the rank that is out of memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.distributed.world import World
from runner.engine.hooks.oom import OutOfMemory
from tests.opened import opened


class Ranks(World):
    """The first of several ranks; `reports` contains the cause of the rank that is out of memory."""

    def __init__(self, reports: list[Any]) -> None:
        super().__init__(torch.device("cpu"), world_size=len(reports))
        self.reports = reports

    def gather(self, value: Any) -> list[Any]:
        return self.reports


@pytest.mark.parametrize(("shares", "rank"), [((2, 6), 1), ((5, 3), 0), ((1, 6, 1), 1)])
def test_micro_batches_are_counted_in_the_share_of_the_rank(
    shares: tuple[int, ...], rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    with opened(tmp_path, "checkpoint=off") as phase:
        hook = phase.hook(OutOfMemory)
        hook.world = Ranks([[[4, 2, "forward", "all of it", "device"] if each == rank else None, ""]
                            for each in range(len(shares))])  # fmt: skip
        phase.order = replace(phase.order, shares=shares)
        monkeypatch.setattr(phase.run.observers.screen, "warn", warnings.append)
        hook.reduce(None, "")
    (warning,) = warnings
    counted = re.search(r"(\d+) micro-batches of (\d+) instead of (\d+) of (\d+)", warning)
    assert counted is not None
    share = shares[rank]
    assert [int(number) for number in counted.groups()] == [-(-share // 2), 2, -(-share // 4), 4]
