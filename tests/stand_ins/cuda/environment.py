"""The environment of a process that uses the stand-in's devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.stand_ins.cuda.build import PRELOADED, built
from tests.stand_ins.cuda.devices import VARIABLE, Device, encode
from tests.stand_ins.cuda.install import REPORT

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def environment(devices: Sequence[Device], report: Path | None = None) -> dict[str, str]:
    """Return os.environ with the variables of the stand-in.

    report  folder to which each process writes its counts and the detected misuses
    """
    folder = built()
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    added = {
        VARIABLE: encode(devices),
        "LD_PRELOAD": str(folder / PRELOADED),
        "PYTHONPATH": os.pathsep.join([str(HERE / "site"), str(ROOT), str(folder), *inherited]),
    }
    if report is not None:
        added[REPORT] = str(report)
    return {**os.environ, **added}
