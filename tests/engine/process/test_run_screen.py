"""What each rank prints and records: messages, the first update, and alerts of its machine."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.base.order import Order
from runner.console.run_summary import MAX_METRICS
from runner.durable.directory import RunDirectory
from runner.engine.process.run_screen import SLOW_START_S, Screen, warnings_on
from runner.monitor.alerts import Alert

ORDER = Order(64, 8, 4, seed=0)
CALLS = {("forward", "flash_kernel"): 3, ("backward", "math_kernel"): 2}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    with RunDirectory.create_or_open(tmp_path, "mine") as directory:
        return directory


def events_of(run: RunDirectory, name: str = "events.jsonl") -> list[dict[str, Any]]:
    file = run.path / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize(
    ("name", "kernels", "reason", "is_warned"),
    [
        ("flash", ("flash",), "", False),
        ("cudnn", ("cudnn",), "needs-cuda", True),
        ("cudnn", ("cudnn",), "", True),
        ("auto", (), "", False),
    ],
)
def test_an_attention_kernel_that_did_not_run_is_reported(
    name: str, kernels: tuple[str, ...], reason: str, is_warned: bool, run: RunDirectory,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    attention: Any = SimpleNamespace(name=name, kernels=kernels, reason=reason)
    with Screen(run) as screen:
        screen.show_first_update(1, SLOW_START_S, attention, CALLS)
    output = capsys.readouterr()
    assert "3 x flash_kernel" in output.out
    assert "2 x math_kernel" in output.out
    found = [event for event in events_of(run) if event["kind"] == "warning"]
    assert bool(found) == is_warned
    assert all("attention=cudnn" in event["text"] for event in found)
    assert all((reason in event["text"]) and (event["text"].endswith("run") == (not reason)) for event in found)


def test_only_a_slow_start_is_reported_without_attention_calls(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    attention: Any = SimpleNamespace(name="cudnn", kernels=("cudnn",), reason="")
    with Screen(run) as screen:
        screen.show_first_update(1, SLOW_START_S, attention, {})
        assert capsys.readouterr().out == ""
        screen.show_first_update(1, SLOW_START_S + 2.5, attention, {})
    assert f"{SLOW_START_S + 2.5}" in capsys.readouterr().out
    assert [event["seconds"] for event in events_of(run) if "seconds" in event] == [SLOW_START_S, SLOW_START_S + 2.5]


@pytest.mark.parametrize("has_several", [True, False])
@pytest.mark.parametrize("level", ["warning", "info"])
def test_the_progress_display_names_the_phase_if_the_log_level_hides_messages(
    level: str, has_several: bool, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    display = SimpleNamespace(note=notes.append, start=lambda *_: None, due=lambda _: False, finish=lambda: None)
    monkeypatch.setattr("runner.engine.process.run_screen.make_progress", lambda *_: display)
    monkeypatch.setenv("ACCEL_RUN_LOG_LEVEL", level)
    with Screen(run) as screen:
        screen.has_several_phases = has_several
        screen.begin("pretrain", 0, 16, ORDER, "sample")
        assert ("pretrain" in notes) == (level == "warning" and has_several)


@pytest.mark.parametrize(
    ("done", "total", "texts"),
    [
        (0, 8, ["8", "1 epoch "]),
        (4, 16, ["12 of 16", "2 epochs"]),
        (0, 12_000, ["1,500 epochs"]),
        (0, 0, ["under 0.001 epochs"]),
    ],
)
def test_the_start_of_a_phase_reports_its_updates_and_epochs(
    done: int, total: int, texts: list[str], run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with Screen(run) as screen:
        screen.begin("train", done, total, ORDER, "sample")
    out = capsys.readouterr().out
    assert all(text in out for text in texts)
    (event,) = [event for event in events_of(run) if event["kind"] == "phase"]
    assert (event["phase"], event["update"], event["total"], event["samples"]) == ("train", done, total, 64)


def test_the_first_rank_of_another_machine_reports_only_alerts(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    alert = Alert(level="warning", kind="hot", text="the-gpu-is-hot", facts={"gpu": 3})
    for options in ({}, {"speaks": False}, {"speaks": False, "machine": "rank8"}):
        with Screen(run, **options) as screen:  # type: ignore[arg-type]
            screen.info("text-of-a-rank")
            screen.show_alerts([alert])
        output = capsys.readouterr()
        printed = output.out + output.err
        assert ("text-of-a-rank" in printed) == (not options)
        assert ("the-gpu-is-hot" in printed) == (len(options) != 1)
    for name in ("events.jsonl", "events-rank8.jsonl"):
        (event,) = [event for event in events_of(run, name) if event["kind"] == "machine"]
        assert (event["what"], event["text"], event["gpu"]) == ("hot", "the-gpu-is-hot", 3)


def test_python_warnings_are_printed_without_their_location(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with Screen(run) as screen, warnings_on(screen):
        warnings.simplefilter("default")
        warnings.warn("text-of-a-library", UserWarning, stacklevel=1)
    output = capsys.readouterr()
    assert "text-of-a-library" in output.out + output.err
    assert "test_run_screen" not in output.out + output.err


def test_a_long_list_of_metrics_is_truncated(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """If there are no metrics, nothing is printed."""
    metrics = {f"val/m{number}": float(number) for number in range(3000)}
    with Screen(run) as screen:
        screen.show_metrics(2, {})
        assert not capsys.readouterr().out
        screen.show_metrics(4, metrics, first=("val/m2999", "val/unknown"))
    shown = re.findall(r"val/m(\d+)", capsys.readouterr().out)
    assert shown == ["2999", *map(str, range(MAX_METRICS - 1))]


def test_bad_samples_cause_one_message_and_are_all_recorded(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with Screen(run) as screen:
        for sample in (3, 7):
            screen.record_event("bad sample", sample=sample)
        screen.show_metrics(4, {"val/loss": 0.25, "val/x": float("nan")}, empty=("val/x",))
    output = capsys.readouterr()
    assert (output.out + output.err).count("events.jsonl") == 1
    assert [event["sample"] for event in events_of(run) if "sample" in event] == [3, 7]
    assert "0.25" in output.out
