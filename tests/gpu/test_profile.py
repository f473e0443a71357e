"""A profile on a GPU lists operators, kernels, waits of the host, and module times."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from runner.base.loaded_torch import is_stand_in
from tests.commands.test_profile import TASK
from tests.gpu.runs import Runs

pytestmark = pytest.mark.gpu


def test_a_gpu_profile_lists_operators_modules_and_waits(runs: Runs) -> None:
    args = "run=p device=cuda monitor=off skip=2 updates=4 task.forward_s=0.01 task.backward_s=0.02 task.waits=true"
    result = runs.end(f"profile --task {TASK} {args}")
    assert result.code == 0, result.err
    folder = runs.folder / "outputs/profiles/p/profile"
    actual = json.loads((folder / "summary.json").read_text())
    operators = {row["name"]: row for row in read_table(folder / "operators.csv")}
    assert {"aten::addmm", "aten::_fused_adamw_"} <= operators.keys()
    lines = TASK.read_text().splitlines()
    loss, begin = (
        1 + next(index for index, line in enumerate(lines) if comment in line)
        for comment in ("# waits in loss", "# waits in begin_update")
    )
    named = {wait["place"].rpartition("/")[2]: wait["per_update"] for wait in actual["waits"] if wait["in_task"]}
    assert named == {f"task_to_profile.py:{loss} in loss": 1.0, f"task_to_profile.py:{begin} in begin_update": 1.0}
    rows = {row["path"]: row for row in actual["modules"]}
    assert rows.keys() >= {"", "first", "inner", "inner.0", "inner.1", "inner.2", "last"}
    if is_stand_in():  # the stand-in has no kernels that a profiler could record, and its CPU computes beside the tests
        assert rows["inner.1"]["own"]["min"] >= 0.01 + 0.02
        return
    assert_kernels_add_up(actual, operators, read_table(folder / "kernels.csv"))
    assert max(rows.values(), key=lambda row: row["own"]["median"])["path"] == "inner.1"


def read_table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def assert_kernels_add_up(summary: Any, operators: dict[str, dict[str, str]], kernels: list[dict[str, str]]) -> None:
    assert summary["operators"][0]["self_device_ms"] > 0
    whole = sum(float(row["ms"]) for row in kernels)
    # lint-tests: measured: both are sums of the same kernels, each of which is counted once
    assert 0 < sum(float(row["self_device_ms"]) for row in operators.values()) <= 1.001 * whole
    assert whole <= summary["update_ms"]["operators recorded"]
    assert not operators.keys() & {row["name"] for row in kernels}
