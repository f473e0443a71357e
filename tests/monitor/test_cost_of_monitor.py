"""scripts/measure/monitor.py names the targets that were missed."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure" / "monitor.py"


def test_only_missed_targets_are_named(screen: Callable[..., None]) -> None:
    missed = runpy.run_path(str(SCRIPT))["missed"]
    within = {"2 GPUs": 0.0049}, {"1 samples a second": 0.0099}, {"2 GPUs": (28, 30.0)}
    assert missed(*within) == []
    (sampler,) = missed({"8 GPUs": 0.005}, *within[1:])
    (loop,) = missed(within[0], {"50 samples a second": 0.02}, within[2])
    (rows,) = missed(*within[:2], {"2 GPUs": (27, 30.0)})
    screen("\n".join([sampler, loop, rows]))
