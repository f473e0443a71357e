"""What a run leaves for those who watch it: tracker, monitor, profiler, benchmark, console and events."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.forkserver import Ended, ForkServer

TASK = Path(__file__).parents[1] / "end_to_end" / "task_with_everything.py"
KEY = "0123456789abcdef0123456789abcdef01234567"


def train(server: ForkServer, folder: Path, *words: str, env: dict[str, str] | None = None) -> Ended:
    given = ["train", "--task", str(TASK), "run=mine", "device=cpu", *words]
    if not any(word.startswith("monitor") for word in words):
        given.append("monitor=off")
    return server.run(given, folder, env=env)


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def tracked(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A run tracked by wandb, offline, by a person who has a key."""
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("tracked")
    env = {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY, "HOME": str(folder)}
    return folder / "outputs" / "mine", train(server, folder, "tracker=wandb", "updates=30", env=env)


def test_wandb_offline_writes_its_folder_into_the_run(tracked: tuple[Path, Ended]) -> None:
    run, ended = tracked
    assert ended.code == 0, ended.err
    (folder,) = (run / "wandb").glob("offline-run-*")
    (record,) = folder.glob("run-*.wandb")
    assert record.stat().st_size > 0
    assert folder.name.endswith(f"-{json.loads((run / 'run.json').read_text())['tracker_id']}")
    assert "upload with: wandb sync outputs/mine/wandb/offline-run-" in ended.out
    assert not [path for path in run.parents[1].iterdir() if path.name == "wandb"]


def test_wandb_has_every_row_of_metrics_jsonl(tracked: tuple[Path, Ended]) -> None:
    run, _ = tracked
    (record,) = run.glob("wandb/offline-run-*/run-*.wandb")
    content = record.read_bytes()
    for row in rows(run / "metrics.jsonl"):
        for name in ("train/loss", "val/loss"):
            if name in row:
                assert repr(row[name]).encode() in content, (row["update"], name)


def test_the_key_of_wandb_is_nowhere(tracked: tuple[Path, Ended]) -> None:
    run, ended = tracked
    assert KEY not in ended.out + ended.err
    files = [path for path in run.parents[1].rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for path in files:
        assert KEY.encode() not in path.read_bytes(), path


def test_the_monitor_writes_gpu_csv(server: ForkServer, tmp_path: Path) -> None:
    ended = train(server, tmp_path, "monitor=on", "monitor.interval_s=0.1", "task.sleep_s=0.01")
    assert ended.code == 0, ended.err
    with (tmp_path / "outputs" / "mine" / "gpu.csv").open() as file:
        samples = list(csv.DictReader(file))
    assert len(samples) >= 3
    assert samples[0].keys() >= {"timestamp", "phase", "device", "cpu_percent", "ram_percent"}
    assert {sample["phase"] for sample in samples} == {"train"}
    times = [float(sample["timestamp"]) for sample in samples]
    assert all(before < after for before, after in pairwise(times))
    assert all(0 < float(sample["ram_percent"]) < 100 for sample in samples)


def test_without_the_monitor_there_is_no_gpu_csv(server: ForkServer, tmp_path: Path) -> None:
    assert train(server, tmp_path, "updates=5").code == 0
    assert not (tmp_path / "outputs" / "mine" / "gpu.csv").exists()


def test_the_profiler_writes_a_trace_and_the_operators(server: ForkServer, tmp_path: Path) -> None:
    ended = train(server, tmp_path, "profiler=trace", "updates=20")
    assert ended.code == 0, ended.err
    profile = tmp_path / "outputs" / "mine" / "profile"
    names = {event.get("name") for event in json.loads((profile / "trace.json").read_text())["traceEvents"]}
    assert "aten::linear" in names
    operators = (profile / "operators.txt").read_text()
    assert "aten::" in operators
    assert "Self CPU time total" in operators
    assert "profile of 10 updates: outputs/mine/profile/trace.json" in ended.out


def test_a_run_shorter_than_the_profiler_still_writes_what_it_saw(server: ForkServer, tmp_path: Path) -> None:
    ended = train(server, tmp_path, "profiler=trace", "updates=8")
    assert ended.code == 0, ended.err
    assert (tmp_path / "outputs" / "mine" / "profile" / "trace.json").is_file()


def test_the_benchmark_writes_the_step_times(server: ForkServer, tmp_path: Path) -> None:
    ended = train(server, tmp_path, "benchmark=blocks", "updates=40")
    assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "outputs" / "mine" / "benchmark.json").read_text())
    times = found["step_time_ms"]
    assert len(times["blocks"]) == 3  # ten updates pass first, then ten per block
    assert 0 < times["min"] <= times["median"] <= times["max"]
    assert (found["warmup_updates"], found["updates_per_block"]) == (10, 10)
    assert "step time" in ended.out


def test_console_log_holds_what_the_terminal_showed(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"{TASK.read_text()}\n__import__('warnings').warn('mind the gap')\n")
    ended = server.run("train --task mine.py run=mine device=cpu monitor=off updates=20", tmp_path)
    assert ended.code == 0, ended.err
    log = (tmp_path / "outputs" / "mine" / "console.log").read_text()
    shown = [
        line for line in ended.out.splitlines() if line and not line.startswith("update=")
    ]  # the progress is not kept
    assert [line for line in shown if line not in log] == []
    assert ended.err == "warning: mind the gap\n"  # without the place in the code
    assert "mind the gap" in log


def test_events_tell_the_story_of_a_run(server: ForkServer, tmp_path: Path) -> None:
    assert train(server, tmp_path, "updates=50", "task.fail_at=45").code == 70
    assert train(server, tmp_path, "updates=50", "task.fail_at=45", env={"NO_KILL": "1"}).code == 0
    events = rows(tmp_path / "outputs" / "mine" / "events.jsonl")
    assert [event["kind"] for event in events] == [
        "start", "phase", "first update", "resume", "phase", "first update", "end",
    ]  # fmt: skip
    assert events[1]["total"] == 50
    assert events[3] == {**events[3], "update": 40, "checkpoint": "update-0000000040"}
    assert events[-1] == {**events[-1], "update": 50, "stopped_by": None}
    times = [event["time"] for event in events]
    assert times == sorted(times)
