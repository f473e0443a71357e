"""Laws of `accel-run benchmark suite=before_after`: what is the same is no gain, what is faster is one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from runner.base.configuration import Request, compose, merge_overrides
from runner.base.errors import ConfigError
from runner.measure.suite import Report
from runner.measure.suites.before_after import Biggest, _largest, plain, run, watched
from tests.measure.suites import asked

TASK = Path(__file__).parent / "task_of_sizes.py"
SETTINGS = ("updates=64", "device=cpu", "backend.threads=1", "global_batch_size=16")


def report(tmp_path: Path, *words: str, **options: str) -> Report:
    return run(asked("before_after", tmp_path, TASK, *SETTINGS, *words, **options))


def rows(found: Report) -> dict[str, dict[str, Any]]:
    table = found.tables[0]
    return {str(row[0]): dict(zip(table.columns, row, strict=True)) for row in table.rows}


@pytest.mark.usefixtures("few_rounds")
def test_settings_that_are_faster_than_plain_ones_are_said_to_be(tmp_path: Path) -> None:
    """Reading 16 samples sleeps for 16 ms; what is kept in memory is not read again. 256 samples are 16 updates."""
    found = report(
        tmp_path,
        "task.read_ms=1",
        "task.pass_ms=2",
        "dataloader.cache=memory",
        "task.most=32",
        biggest="64",
    )

    assert "make updates faster than plain ones" in found.headline
    told = rows(found)
    epoch, speed = told["time per epoch, s"], told["updates per second"]
    assert epoch["sure"] == speed["sure"] == "better"
    assert epoch["before"] == pytest.approx(16 / speed["before"])
    assert epoch["after"] == pytest.approx(16 / speed["after"])
    biggest = told["biggest batch, samples"]
    assert (biggest["before"], biggest["after"], biggest["sure"]) == (32, 32, "no clear change")
    assert any("memory is used up" in note for note in found.notes)
    assert 1.9 < told["inference, ms per row"]["before"] < 20, "each of 4 rows sleeps for 2 ms when it is predicted"
    assert told["peak memory, GiB"]["after"] > 0.05
    assert told["GPU busy, %"]["sure"] == "not measured"
    assert "no GPU" in found.skipped["GPU busy"]
    differ = {row[0]: row[1:] for row in found.tables[1].rows}
    assert differ["dataloader.cache"] == ("none", "memory")
    assert json.loads(found.files[0].read_text())["biggest"]["after"]["size"] == 32


@pytest.mark.usefixtures("few_rounds")
def test_plain_settings_against_plain_settings_are_no_clear_change(tmp_path: Path) -> None:
    words = plain(compose(Request(SETTINGS, TASK)))

    found = report(tmp_path, "task.pass_ms=20", *words, biggest="0")

    assert found.headline.startswith("no clear change")
    assert rows(found)["time per epoch, s"]["sure"] == "no clear change"
    assert rows(found)["biggest batch, samples"]["before"] is None
    assert "none was tried" in found.skipped["biggest batch, before"]
    assert not any("biggest batch" in note for note in found.notes)


@pytest.mark.parametrize(
    ("before", "after", "sure"),
    [
        (Biggest(64, "", True), Biggest(128, "no time"), "better"),
        (Biggest(64, "no time"), Biggest(128, "no time"), "not known"),
        (Biggest(64, "no time"), Biggest(128, "", True), "not known"),
        (Biggest(64, "", True), Biggest(64, "no time"), "not known"),
        (Biggest(64, "", True), Biggest(64, "", True), "no clear change"),
        (Biggest(128, "no time"), Biggest(64, "", True), "worse"),
        (Biggest(None, "an error"), Biggest(64, "", True), "not measured"),
    ],
)
def test_a_batch_that_nobody_has_tried_to_double_is_not_the_biggest(before: Biggest, after: Biggest, sure: str) -> None:
    row = _largest(before, after)

    assert row[:3] == ("biggest batch, samples", before.size, after.size)
    assert str(row[4]).startswith(sure)


def test_plain_keeps_what_is_mathematics_of_the_loader() -> None:
    words = ("dataloader=thread", "dataloader.drop_last=true", *SETTINGS)

    configuration = compose(Request(merge_overrides(words, plain(compose(Request(words, TASK)))), TASK))

    loader = configuration.choices["dataloader"]
    assert (loader.name, loader.options["drop_last"], loader.options["num_workers"]) == ("default", True, 0)


def test_an_optimizer_without_kernels_has_none_to_be_plain() -> None:
    configuration = compose(Request(("optimizer=adamw8bit", *SETTINGS), TASK))
    has_kernel = "kernel" in configuration.choices["optimizer"].options

    assert ("optimizer.kernel=for-loop" in plain(configuration)) == has_kernel


def test_how_busy_a_gpu_is_is_read_while_it_computes() -> None:
    class Driver:
        def read(self, gpu: object, names: list[str]) -> dict[str, float | None]:
            return {"util_percent": 75.0}

    with watched(Driver(), object()) as seen:  # type: ignore[arg-type]
        time.sleep(0.35)

    assert len(seen) >= 2
    assert set(seen) == {75.0}


@pytest.mark.parametrize(("key", "text"), [("biggest", "-1"), ("biggest", "1e3")])
def test_numbers_that_are_none_are_refused(tmp_path: Path, key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}={text}.*whole numbers"):
        report(tmp_path, **{key: text})
