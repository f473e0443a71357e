"""Laws of the look at a task's code: lines that wait are told from those that do not, and from what they compute."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from runner.measure.probe import Computing, probe
from runner.measure.variant_process import TrainingVariant

TASK = Path(__file__).parent / "planted" / "fetches.py"


def test_every_way_to_fetch_numbers_of_the_device_is_found_and_what_stays_on_the_host_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # the cell sets it
    words = [f"output_root={tmp_path}", "device=cpu", "dataloader.num_workers=0", "tracker=none", "monitor=off"]
    with ExitStack() as stack:
        cell = TrainingVariant(stack)
        cell.begin(words, str(TASK), None, str(tmp_path / "compiled"), None, evaluates=False)
        next(cell.updates)
        feed = cell.phase.feed.batches
        found = probe(cell.run, cell.phase, cell.updates)["waits"]
        assert cell.phase.feed.batches is feed
    expected = {
        number: 4 if "four times" in line else 1
        for number, line in enumerate(TASK.read_text().splitlines(), 1)
        if "  # waits" in line
    }
    assert {wait["line"]: wait["times"] for wait in found} == expected
    assert {wait["file"] for wait in found} == {str(TASK)}
    assert all(0 <= wait["share"] < 1 for wait in found)


def test_what_a_line_computes_is_told_from_what_it_reads() -> None:
    rows, line = torch.ones(256, 256), test_what_a_line_computes_is_told_from_what_it_reads.__code__.co_firstlineno
    computes, views, other = ((__file__, line + after) for after in (5, 6, 7))

    with Computing([computes, views]) as computing:
        (rows @ rows).sum().item()
        [row.item() for row in rows[0]]
        rows.sum()

    assert computing.seconds[computes] > 0
    assert computing.seconds[views] == 0
    assert other not in computing.seconds
