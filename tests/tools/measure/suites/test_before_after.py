"""`accel-run benchmark suite=before_after` reports only faster settings as a gain."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.base.errors import ConfigError
from runner.base.paths import shipped_path
from runner.config.configuration import Configuration, compose
from runner.config.request import Request, merge_overrides
from runner.monitor.monitor_thread import NoMonitor
from runner.monitor.samples import Stat, Summary, SummaryPart
from runner.tools.measure.suite import SuiteReport
from runner.tools.measure.suites import before_after
from runner.tools.measure.suites.before_after import Biggest, largest_row, plain_overrides, run
from tests.tools.measure.suites.asked import asked

TASK = Path(__file__).parents[1] / "task_of_sizes.py"
SETTINGS = ("updates=64", "device=cpu", "backend.threads=1", "global_batch_size=16")


def report(tmp_path: Path, *args: str, **options: str) -> SuiteReport:
    return run(asked("before_after", tmp_path, TASK, *SETTINGS, *args, **options))


def rows(result: SuiteReport) -> dict[str, dict[str, Any]]:
    table = result.tables[0]
    return {str(row[0]): dict(zip(table.columns, row, strict=True)) for row in table.rows}


def profile(folder: Path, *settings: str) -> Path:
    """Return a configuration folder with a hardware profile `mine` that contains these settings."""
    (folder / "hardware").mkdir(parents=True)
    text = "# @package _global_\n# Mine.\n" + "".join(f"{line}\n" for line in settings)
    (folder / "hardware" / "mine.yaml").write_text(text)
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_faster_settings_are_reported_as_faster(tmp_path: Path) -> None:
    """Reading 16 samples takes 16 ms. Samples cached in memory are not read again. 256 samples are 16 updates."""
    args = ("task.read_ms=1", "task.pass_ms=2", "task.most=32", "+hardware=mine")
    wanted = asked("before_after", tmp_path, TASK, *SETTINGS, *args, biggest="64")
    folder = profile(tmp_path / "conf", "dataloader:", "  cache: memory")
    result = run(dataclasses.replace(wanted, request=dataclasses.replace(wanted.request, config_dir=folder)))

    table = rows(result)
    epoch, speed = table["time per epoch, s"], table["updates per second"]
    assert epoch["sure"] == speed["sure"] == "better"
    assert epoch["before"] == pytest.approx(16 / speed["before"])
    assert epoch["after"] == pytest.approx(16 / speed["after"])
    biggest = table["largest batch, samples"]
    assert (biggest["before"], biggest["after"], biggest["sure"]) == (32, 32, "no clear change")
    inference = table["inference, ms per row"]["before"]
    assert 1.9 < inference < 20, "predicting each of the 4 rows takes 2 ms"
    assert table["peak memory, GiB"]["after"] > 0.05
    assert table["GPU busy, %"]["sure"] == "not measured"
    assert "no GPU" in result.skipped["GPU busy"]
    differ = {row[0]: row[1:] for row in result.tables[1].rows}
    assert differ["dataloader.cache"] == ("none", "memory")
    assert json.loads(result.files[0].read_text())["biggest"]["after"]["size"] == 32


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_batch_predictions_are_timed_per_sample(tmp_path: Path) -> None:
    batched = """
    def predict_batch(self, model, batch):
        time.sleep(self.sample_ms * len(batch) / 1000)  # lint-tests: sleep: planted
        return {"row": model(batch)}
"""
    task = tmp_path / "batched.py"
    task.write_text(TASK.read_text(encoding="utf-8").partition("\n    def predict(")[0] + batched, encoding="utf-8")
    result = run(asked("before_after", tmp_path, task, *SETTINGS, "task.sample_ms=2", biggest="0"))
    inference = rows(result)["inference, ms per sample"]["before"]
    assert 1.9 < inference < 20, "predicting each sample takes 2 ms"


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_equal_settings_show_no_clear_change(tmp_path: Path) -> None:
    args = plain_overrides(compose(Request(SETTINGS, TASK)))

    result = report(tmp_path, "task.pass_ms=20", *args, biggest="0")

    assert result.headline.startswith("no clear change")
    assert rows(result)["time per epoch, s"]["sure"] == "no clear change"
    assert rows(result)["largest batch, samples"]["before"] is None
    assert "none was tried" in result.skipped["largest batch, before"]
    assert not any("largest batch" in note for note in result.notes)


@pytest.mark.parametrize(
    ("before", "after", "sure"),
    [
        (Biggest(64, "", True), Biggest(128, "no time"), "better"),
        (Biggest(64, "no time"), Biggest(128, "no time"), "unknown"),
        (Biggest(64, "no time"), Biggest(128, "", True), "unknown"),
        (Biggest(64, "", True), Biggest(64, "no time"), "unknown"),
        (Biggest(64, "", True), Biggest(64, "", True), "no clear change"),
        (Biggest(128, "no time"), Biggest(64, "", True), "worse"),
        (Biggest(None, "an error"), Biggest(64, "", True), "not measured"),
    ],
)
def test_largest_batches_need_a_failed_larger_one(before: Biggest, after: Biggest, sure: str) -> None:
    row = largest_row(before, after)

    assert row[:3] == ("largest batch, samples", before.size, after.size)
    assert str(row[4]).startswith(sure)


def before(request: Request) -> Configuration:
    """Return the configuration that is measured as `before`."""
    return compose(
        dataclasses.replace(request, overrides=merge_overrides(request.overrides, plain_overrides(compose(request))))
    )


@pytest.mark.slow
def test_plain_settings_keep_loader_options_with_effect(tmp_path: Path) -> None:
    lines = ("defaults:", "  - override /dataloader: thread", "dataloader:", "  drop_last: true")

    configuration = before(Request(("+hardware=mine", *SETTINGS), TASK, profile(tmp_path, *lines)))

    loader = configuration.choices["dataloader"]
    assert (loader.name, loader.options["drop_last"], loader.options["num_workers"]) == ("default", True, 0)


OPTIONS = [
    f"{group}={file.stem}"
    for group in ("precision", "prefetch", "compile", "attention", "backend", "memory", "dataloader", "optimizer")
    for file in sorted((shipped_path("conf") / group).glob("*.yaml"))
]
KEYS = (
    "backend.threads=1", "dataloader.num_workers=3", "dataloader.cache=memory", "dataloader.pin_memory=true",
    "dataloader.prefetch_factor=4", "memory.channels_last=true", "optimizer.kernel=fused", "optimizer.lr=0.5",
    "+memory=checkpoint memory.channels_last=true", "dataloader=thread dataloader.drop_last=true",
    "backend=deterministic backend.warn_only=true", "optimizer=sgd optimizer.momentum=0.5", "global_batch_size=8",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize("typed", [*OPTIONS, *KEYS])
def test_command_line_settings_apply_before_and_after(typed: str) -> None:
    request = Request(("device=cpu", *typed.replace("+", "").split()), TASK)

    after, result = compose(request).flat(), before(request).flat()

    for word in request.overrides:
        key = word.partition("=")[0]
        assert result[key] == after[key], key


@pytest.mark.slow
def test_other_settings_have_plain_values_in_before() -> None:
    result = before(Request(("device=cpu", "backend.threads=1"), TASK)).flat()

    expected = {"precision": "fp32", "compile": "off", "attention": "math", "dataloader.num_workers": 0}
    assert {key: result[key] for key in expected} == expected


def test_an_optimizer_without_kernel_option_is_unchanged() -> None:
    configuration = compose(Request(("optimizer=adamw8bit", *SETTINGS), TASK))
    has_kernel = "kernel" in configuration.choices["optimizer"].options

    assert ("optimizer.kernel=for-loop" in plain_overrides(configuration)) == has_kernel


def test_gpu_utilization_is_measured_during_computation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class Watch(NoMonitor):
        def __init__(self, *_: object, uuids: list[str]) -> None:
            calls.append(uuids)

        def stop(self) -> None:
            calls.append("stop")

        def summary(self) -> Summary:
            return Summary(SummaryPart(metrics={"gpu0/util": Stat(75.0, 50.0, 100.0, 3.0)}))

    monkeypatch.setattr(before_after, "Monitor", Watch)
    comparison = SimpleNamespace(open_variant=lambda *_: nullcontext((calls.append, None)))
    context: Any = SimpleNamespace(plan=SimpleNamespace(device_uuid="GPU-1"), comparison=comparison)
    timed = SimpleNamespace(name="after", blocks=[1], median_ms=100.0, variant=None)
    result: Any = SimpleNamespace(variants=[SimpleNamespace(name="before", blocks=[]), timed])

    busy = before_after.measure_gpu_busy(context, result, asked("before_after", tmp_path, TASK))

    assert busy == {"before": None, "after": 75.0}
    assert calls == [["GPU-1"], {"do": "run", "updates": 30}, "stop"]


@pytest.mark.parametrize(("key", "text"), [("biggest", "-1"), ("biggest", "1e3")])
def test_invalid_numbers_are_rejected(tmp_path: Path, key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}={text}.*integers"):
        report(tmp_path, **{key: text})
