"""Planted bottlenecks that occur only on a GPU are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forkserver import ForkServer

pytestmark = [pytest.mark.gpu, pytest.mark.long]
PLANTED = Path(__file__).parents[1] / "measure" / "planted"


@pytest.mark.parametrize(
    ("task", "words", "rule"),
    [
        ("lengths", ["backend=fast"], "varying shapes"),
        ("layers", ["task.width=4096", "global_batch_size=4096", "dataloader.pin_memory=false"], "unpinned"),
    ],
)
def test_a_bottleneck_of_a_gpu_is_found_and_its_fix_tried(
    server: ForkServer, tmp_path: Path, task: str, words: list[str], rule: str
) -> None:
    ended = server.run(["advise", "--task", str(PLANTED / f"{task}.py"), *words, "budget_s=90", "--json"], tmp_path)

    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert rule in [finding["rule"] for finding in found["findings"]]
    assert any(each["rule"] == rule and each["speedup"] for each in found["tried"])
