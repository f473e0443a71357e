"""Planted bottlenecks that occur only on a GPU are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forkserver import ForkServer

pytestmark = [pytest.mark.gpu, pytest.mark.long]
PLANTED = Path(__file__).parents[1] / "tools" / "measure" / "planted"


@pytest.mark.parametrize(
    ("task", "args", "rule"),
    [
        ("lengths", ["backend=fast"], "varying shapes"),
        ("layers", ["task.width=4096", "global_batch_size=4096", "dataloader.pin_memory=false"], "unpinned"),
    ],
)
def test_a_gpu_bottleneck_is_found_and_its_fix_is_tried(
    server: ForkServer, tmp_path: Path, task: str, args: list[str], rule: str
) -> None:
    result = server.run(["advise", "--task", str(PLANTED / f"{task}.py"), *args, "budget_s=90", "--json"], tmp_path)

    assert result.code == 0, result.err
    actual = json.loads(result.out)
    assert rule in [finding["rule"] for finding in actual["findings"]]
    assert any(each["rule"] == rule and each["ratio"] for each in actual["tried"])
