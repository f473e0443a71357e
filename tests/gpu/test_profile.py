"""A profile on a GPU: kernels, waits of the host, module times."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from runner.base.loaded_torch import is_stand_in
from tests.commands.test_profile import TASK
from tests.forkserver import ForkServer

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(is_stand_in(), reason="the stand-in has no kernels that a profiler could record")
def test_a_profile_on_a_gpu_finds_planted_waits(server: ForkServer, tmp_path: Path) -> None:
    args = "run=p device=cuda monitor=off skip=2 updates=4 task.forward_s=0.01 task.backward_s=0.02 task.waits=true"
    result = server.run(f"profile --task {TASK} {args}", tmp_path)
    assert result.code == 0, result.err
    actual = json.loads((tmp_path / "outputs/profiles/p/profile/summary.json").read_text())
    assert actual["operators"][0]["self_device_ms"] > 0
    rows = list(csv.DictReader((tmp_path / "outputs/profiles/p/profile/operators.csv").read_text().splitlines()))
    kernels = list(csv.DictReader((tmp_path / "outputs/profiles/p/profile/kernels.csv").read_text().splitlines()))
    whole = sum(float(row["ms"]) for row in kernels)
    # lint-tests: measured: both are sums of the same kernels, each of which counts once
    assert 0 < sum(float(row["self_device_ms"]) for row in rows) <= 1.001 * whole
    assert whole <= actual["update_ms"]["operators recorded"]
    assert not {row["name"] for row in rows} & {row["name"] for row in kernels}
    lines = TASK.read_text().splitlines()
    loss, begin = (
        1 + next(index for index, line in enumerate(lines) if comment in line)
        for comment in ("# waits in loss", "# waits in begin_update")
    )
    named = {wait["place"].rpartition("/")[2]: wait["per_update"] for wait in actual["waits"] if wait["in_task"]}
    assert named[f"task_to_profile.py:{loss} in loss"] == 1.0
    assert named[f"task_to_profile.py:{begin} in begin_update"] == 1.0
    rows = {row["path"]: row for row in actual["modules"]}
    assert max(rows.values(), key=lambda row: row["own"]["median"])["path"] == "inner.1"
