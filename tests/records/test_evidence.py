"""The evidence of a run is read back as it was written, and missing values are unknown."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from runner.base.json_converter import encode
from runner.durable.record_files import read_record
from runner.records.evidence import Evidence, choose_evidence
from runner.records.phase_record import PhaseRecord

FULL = Evidence(
    task="gpt", device="cuda:0", capability=(7, 5), parts_s={"data": 1.5, "forward": 2.0}, updates=10,
    ranks_s=({"data": 1.0}, {"data": 2.0}), odd_sizes=("head: 50257",), data_wait=0.25,
    phases=(PhaseRecord("train", "train", updates=10, parts_s={"data": 1.5}),),
)  # fmt: skip


def read_back(folder: Path, content: Any) -> Evidence | None:
    (folder / "run.json").write_text(json.dumps(content))
    return read_record(folder).evidence


def test_evidence_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_back(tmp_path, {"evidence": encode(FULL)}) == FULL


def test_update_times_are_stored_once() -> None:
    """Fields that phases and runs share are defined once, and their keys are compatible with earlier versions."""
    fields = [set(kind.__annotations__) for kind in (*Evidence.__mro__[:-1],)]

    assert sum(map(len, fields)) == len(set().union(*fields))
    assert {"updates", "parts_s", "epochs", "accumulation_steps"} <= encode(FULL).keys()
    assert {"updates", "parts_s", "epochs", "accumulation_steps"} <= encode(FULL)["phases"][0].keys()


def test_missing_evidence_is_none(tmp_path: Path) -> None:
    assert read_record(tmp_path).evidence is None
    assert read_back(tmp_path, {"name": "first"}) is None


def test_missing_values_are_unknown_and_never_zero(tmp_path: Path) -> None:
    result = read_back(tmp_path, {"evidence": {}})
    assert result is not None
    assert all(getattr(result, each.name) in (None, {}, ()) for each in fields(result))


@pytest.mark.parametrize("wrong", ["many", True, [1], {"a": 1}, 0.5])
def test_impossible_values_are_unknown(tmp_path: Path, wrong: Any) -> None:
    result = read_back(tmp_path, {"evidence": {"updates": wrong, "parts_s": {"data": "long"}, "phases": [{"x": 1}]}})
    assert result == Evidence()


@pytest.mark.parametrize(
    ("evidence", "label"),
    [
        (Evidence(world_size=1, attempt="a"), "host"),
        (Evidence(world_size=2, attempt="a"), "host, highest of 2 ranks"),
        (Evidence(world_size=2, attempt="a", unfinished=True), "host, one of 2 ranks"),
        (Evidence(world_size=2), "host, rank 0"),
        (Evidence(world_size=2, unfinished=True), "host, rank 0"),
    ],
)
def test_the_label_of_host_memory_names_what_was_measured(evidence: Evidence, label: str) -> None:
    assert evidence.host_label == label


@pytest.mark.parametrize("updates", [None, 0, 3])
def test_few_updates_do_not_replace_many_measured_ones(updates: int | None) -> None:
    many = replace(FULL, updates=100)
    few = replace(FULL, updates=updates, parts_s={"closing": 0.1}, phases=(PhaseRecord("train", "train"),))

    assert choose_evidence(many, few) == replace(many, phases=few.phases)
    assert choose_evidence(None, few) == few


def test_the_newest_process_determines_whether_the_run_failed() -> None:
    many, few = replace(FULL, updates=100), replace(FULL, updates=3)

    assert choose_evidence(replace(many, unfinished=True), few).unfinished is None
    assert choose_evidence(many, replace(few, unfinished=True)).unfinished


def test_measurements_with_other_settings_are_replaced() -> None:
    """Measurements of similar length are replaced, too."""
    many = replace(FULL, updates=100)

    for now in (replace(FULL, updates=20), replace(FULL, updates=3, num_workers=8), replace(FULL, device="cpu")):
        assert choose_evidence(many, now) == now
