"""`scripts/measure/leakage.py` counts held-out items that are also in training, for each task."""

from __future__ import annotations

from pathlib import Path

from scripts.measure.leakage import ROWS, VARIANTS, compare

TASKS = {file.stem for file in (Path(__file__).parents[2] / "tasks").iterdir() if (file / "task.py").is_file()}


def test_leakage_is_reported_for_every_task() -> None:
    assert ROWS.keys() == {name for name, _ in VARIANTS} == TASKS


def test_the_fraction_counts_duplicate_held_out_items() -> None:
    items = {"train": ["a", "b", "b"], "val": ["b", "b", "c", "d"], "test": ["e"]}
    _, found = compare("letters", lambda split: items[split])
    assert [text.split()[0] for text in found.values()] == ["50.000%", "0.000%"]
