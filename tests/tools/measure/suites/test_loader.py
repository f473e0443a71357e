"""`accel-run benchmark suite=loader` finds waits for data, and reports impossible variants without measuring them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.base.errors import ConfigError
from runner.tools.measure.suite import SuiteReport
from runner.tools.measure.suites.loader import LoaderVariant, run, why_not
from tests.tools.measure.suites.asked import asked

TASK = Path(__file__).parents[1] / "task_of_sizes.py"
SETTINGS = ("updates=100", "device=cpu", "backend.threads=1", "global_batch_size=8", "dataloader.num_workers=0")


def report(tmp_path: Path, *args: str, **options: str) -> SuiteReport:
    return run(asked("loader", tmp_path, TASK, *SETTINGS, *args, **options))


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_a_cache_is_faster_if_reading_is_slow(tmp_path: Path) -> None:
    """Reading a batch takes 24 ms, at 3 ms per sample, and an update takes 6 ms, so 24 of 30 ms are data wait."""
    result = report(
        tmp_path,
        "task.read_ms=3",
        "task.pass_ms=6",
        workers="0",
        prefetch="2",
        pin="false,true",
        cache="none,memory,device",
    )

    (table,) = result.tables
    named = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["loader"] for row in named] == ["0 workers, cache memory", "as it is"]
    cached, now = named
    assert 60 < now["waits for data, %"] < 95  # type: ignore[operator]
    assert cached["waits for data, %"] < 30  # type: ignore[operator]
    assert now["extra start-up, s"] == 0
    assert cached["extra start-up, s"] is not None
    assert cached["sure"] == "better"
    assert "dataloader.cache=memory" in result.headline
    assert "dataloader.cache=memory" in result.data["recommended"]
    assert json.loads(result.files[0].read_text())["is_clear"] is True
    left_out = LoaderVariant(0, 0, pin=True, cache="none"), LoaderVariant(0, 0, pin=False, cache="device")
    assert set(map(str, left_out)) <= set(result.skipped)


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_a_loader_without_effect_shows_no_clear_change(tmp_path: Path) -> None:
    """Reading is fast, so prefetching has no effect. Without a cache, a thread counts as one worker process."""
    result = report(tmp_path, "task.pass_ms=20", workers="0,thread,1", prefetch="2", cache="none")

    assert result.headline.startswith("no clear change")
    assert result.data["recommended"] == []
    (table,) = result.tables
    assert {row[0] for row in table.rows} == {"as it is", str(LoaderVariant(1, 2, pin=False, cache="none"))}


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_without_a_comparison_nothing_is_recommended(tmp_path: Path) -> None:
    result = report(tmp_path, workers="0", prefetch="2", cache="none")

    assert [len(table.rows) for table in result.tables] == [1]
    assert result.data["is_clear"] is False
    assert result.data["recommended"] == []


def test_workers_cannot_read_a_cache_on_the_device() -> None:
    assert len(list(why_not(LoaderVariant(2, 2, pin=False, cache="device"), has_gpu=True))) == 1
    assert list(why_not(LoaderVariant(0, 0, pin=False, cache="device"), has_gpu=True)) == []
    assert list(why_not(LoaderVariant(2, 2, pin=True, cache="memory"), has_gpu=True)) == []


def test_loaders_without_prefetch_are_measured_once(tmp_path: Path) -> None:
    assert str(LoaderVariant(0, 0, pin=False, cache="none")) == "0 workers, cache none"
    assert LoaderVariant("thread", 4, pin=True, cache="none").overrides == (
        "dataloader=thread", "dataloader.depth=4", "dataloader.pin_memory=true", "dataloader.cache=none",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("workers", "-1"),
        ("workers", "two"),
        ("workers", ""),
        ("prefetch", "0"),
        ("prefetch", "1.5"),
        ("pin", "maybe"),
        ("cache", "disk"),
    ],
)
def test_invalid_loader_values_are_rejected(tmp_path: Path, key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}={text}.*must be"):
        report(tmp_path, **{key: text})


def test_custom_loaders_are_rejected(tmp_path: Path) -> None:
    task = tmp_path / "own_loader.py"
    task.write_text(
        f"{TASK.read_text()}\n\ndef plain(read, requests):\n"
        '    """Read in this process."""\n    return map(read, requests)\n\n\nDATALOADERS = {"plain": plain}\n'
    )
    with pytest.raises(ConfigError, match="dataloader=plain"):
        run(asked("loader", tmp_path, task, *SETTINGS[:-1], "dataloader=plain"))
