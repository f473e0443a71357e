"""The observers of a run: tracker, monitor, profiler, console log and events."""

from __future__ import annotations

import csv
import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.forkserver import CompletedCommand, ForkServer
from tests.nvml_stub import PAIR, T4, NvmlStub
from tests.waiting import wait_until

TASK = Path(__file__).parents[1] / "end_to_end" / "task_with_everything.py"
KEY = "0123456789abcdef0123456789abcdef01234567"


def train(server: ForkServer, folder: Path, *args: str, env: dict[str, str] | None = None) -> CompletedCommand:
    given = ["train", "--task", str(TASK), "run=mine", "device=cpu", *args]
    if not any(word.startswith("monitor") for word in args):
        given.append("monitor=off")
    return server.run(given, folder, env=env)


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def tracked(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompletedCommand]:
    """Run a command that wandb tracks in offline mode, with an API key set."""
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("tracked")
    env = {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY, "HOME": str(folder)}
    run, result = folder / "outputs" / "mine", train(server, folder, "tracker=wandb", "updates=30", env=env)
    last = next(row["train/loss"] for row in reversed(rows(run / "metrics.jsonl")) if "train/loss" in row)
    # the background process of the tracker writes the last rows after the run has ended
    wait_until(
        lambda: any(repr(last).encode() in file.read_bytes() for file in run.glob("wandb/offline-run-*/*.wandb"))
    )
    return run, result


def test_wandb_offline_writes_into_the_run_folder(tracked: tuple[Path, CompletedCommand]) -> None:
    run, result = tracked
    assert result.code == 0, result.err
    (folder,) = (run / "wandb").glob("offline-run-*")
    (record,) = folder.glob("run-*.wandb")
    assert record.stat().st_size > 0
    assert folder.name.endswith(f"-{json.loads((run / 'run.json').read_text())['tracker_id']}")
    assert f" wandb sync {run}/wandb/offline-run-" in result.out
    assert not [path for path in run.parents[1].iterdir() if path.name == "wandb"]


def test_wandb_has_every_row_of_metrics_jsonl(tracked: tuple[Path, CompletedCommand]) -> None:
    run, _ = tracked
    (record,) = run.glob("wandb/offline-run-*/run-*.wandb")
    content = record.read_bytes()
    for row in rows(run / "metrics.jsonl"):
        for name in ("train/loss", "val/loss"):
            if name in row:
                assert repr(row[name]).encode() in content, (row["update"], name)


def test_the_wandb_key_is_not_written_to_files(tracked: tuple[Path, CompletedCommand]) -> None:
    run, result = tracked
    assert KEY not in result.out + result.err
    files = [path for path in run.parents[1].rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for path in files:
        assert KEY.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_the_monitor_writes_gpu_csv(server: ForkServer, tmp_path: Path) -> None:
    result = train(server, tmp_path, "monitor=on", "monitor.interval_s=0.1", "task.sleep_s=0.01")
    assert result.code == 0, result.err
    with (tmp_path / "outputs" / "mine" / "gpu.csv").open() as file:
        samples = list(csv.DictReader(file))
    assert len(samples) >= 3
    assert samples[0].keys() >= {"timestamp", "phase", "device", "cpu_percent", "ram_percent"}
    assert {sample["phase"] for sample in samples} == {"train"}
    times = [float(sample["timestamp"]) for sample in samples]
    assert all(before < after for before, after in pairwise(times))
    assert all(0 < float(sample["ram_percent"]) < 100 for sample in samples)


@pytest.mark.slow
def test_the_monitor_summary_includes_the_time_before_a_resume(server: ForkServer, tmp_path: Path) -> None:
    args = ("monitor=on", "monitor.interval_s=0.05", "task.sleep_s=0.01")
    path, seen = tmp_path / "outputs" / "mine" / "monitor.json", []
    for updates in (60, 120):
        result = train(server, tmp_path, *args, f"updates={updates}", "resume_allow=[updates]")
        assert result.code == 0, result.err
        seen.append(json.loads(path.read_text()))
    with path.with_name("gpu.csv").open() as file:
        rows_written = len(list(csv.DictReader(file)))

    assert {"cpu/percent", "ram/percent", "process/memory_gib"} <= set(seen[0]["whole"]["metrics"])
    assert list(seen[1]["phases"]) == ["train"]
    assert rows_written == seen[1]["whole"]["samples"] > seen[0]["whole"]["samples"]


def driver(nvml_stub: NvmlStub) -> str:
    """Return code that loads the NVML stub when a process starts."""
    return f"import ctypes; ctypes.CDLL({str(nvml_stub.folder / 'new' / 'libnvidia-ml.so.1')!r})\n"


@pytest.mark.slow
def test_a_cpu_run_does_not_monitor_gpus(server: ForkServer, nvml_stub: NvmlStub, tmp_path: Path) -> None:
    # both GPUs are throttled, and other processes use one of them
    env = {"NVML_STUB": str(nvml_stub.write(T4 | {"0.throttle": 64}))}
    args = ["run=mine", "device=cpu", "monitor=on", "monitor.interval_s=0.05", "--task", str(TASK)]
    run, printed = tmp_path / "outputs" / "mine", ""
    for command, path in (("train", run / "gpu.csv"), ("inference", run / "predictions" / "gpu.csv")):
        more = ["task.sleep_s=0.01", "updates=50"] if command == "train" else []
        result = server.run([command, *args, *more], tmp_path, env=env, before=driver(nvml_stub))
        assert result.code == 0, result.err
        printed += result.out + result.err
        with path.open() as file:
            samples = list(csv.DictReader(file))
        assert samples
        assert {sample["device"] for sample in samples} == {"cpu"}, command
        assert {sample["uuid"] for sample in samples} == {""}, command
        assert all(sample["ram_percent"] for sample in samples)

    assert "gpu0" not in printed
    assert "another process" not in printed
    assert not [row for row in rows(run / "events.jsonl") if row["kind"] == "machine"]


def test_a_gpu_event_is_reported_once_and_training_continues(
    server: ForkServer, nvml_stub: NvmlStub, tmp_path: Path
) -> None:
    state = PAIR | {"event_types": 11, "events": "0:8:48,0:8:48", "0.throttle": 64, "1.err.util": 15}
    env = {"NVML_STUB": str(nvml_stub.write(state)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    args = ["monitor.interval_s=0.05", "task.sleep_s=0.01", "updates=100"]
    as_on_gpus = "import runner.engine.opening as module; module.monitored_gpus = lambda uuids, device: None"
    result = server.run(
        ["train", "--task", str(TASK), "run=mine", "device=cpu", *args],
        tmp_path,
        env=env,
        before=driver(nvml_stub) + as_on_gpus,
    )
    assert result.code == 0, result.err
    run = tmp_path / "outputs" / "mine"
    messages = [row for row in rows(run / "events.jsonl") if row["kind"] == "machine"]

    assert sorted(row["what"] for row in messages) == ["lost", "slowed", "xid"]
    assert {row["what"]: row["device"] for row in messages} == {"lost": "gpu1", "slowed": "gpu0", "xid": "gpu0"}
    assert "busy" not in result.out, "GPU activity must not be attributed to a run on the CPU"
    for row in messages:
        assert (result.out + result.err).count(f"warning: {row['text']}") == 1
    notes = json.loads((run / "monitor.json").read_text())["notes"]
    assert sorted(notes) == sorted(row["text"] for row in messages)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "often"])
def test_an_invalid_monitor_interval_is_rejected(server: ForkServer, tmp_path: Path, value: str) -> None:
    result = train(server, tmp_path, "monitor=on", f"monitor.interval_s={value}")

    assert result.code == 78
    assert f"monitor.interval_s={value}: " in result.err
    assert not (tmp_path / "outputs").exists()


def test_without_the_monitor_there_is_no_gpu_csv(server: ForkServer, tmp_path: Path) -> None:
    assert train(server, tmp_path, "updates=5").code == 0
    assert not (tmp_path / "outputs" / "mine" / "gpu.csv").exists()


@pytest.mark.slow
def test_the_profiler_writes_a_trace_and_the_operators(server: ForkServer, tmp_path: Path) -> None:
    result = train(server, tmp_path, "profiler=trace", "updates=20")
    assert result.code == 0, result.err
    profile = tmp_path / "outputs" / "mine" / "profile"
    trace = json.loads(gzip.decompress((profile / "trace.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert "aten::linear" in names
    operators = (profile / "operators.csv").read_text()
    assert "aten::" in operators
    assert f"profile: {profile}/report.txt" in result.out


def test_a_short_run_writes_a_partial_profile(server: ForkServer, tmp_path: Path) -> None:
    result = train(server, tmp_path, "profiler=trace", "updates=8")
    assert result.code == 0, result.err
    assert (tmp_path / "outputs" / "mine" / "profile" / "trace.json.gz").is_file()


def test_console_log_contains_the_terminal_output(server: ForkServer, tmp_path: Path) -> None:
    text = "mind the gap"
    (tmp_path / "mine.py").write_text(f"{TASK.read_text()}\n__import__('warnings').warn({text!r})\n")
    result = server.run("train --task mine.py run=mine device=cpu monitor=off updates=20", tmp_path)
    assert result.code == 0, result.err
    log = (tmp_path / "outputs" / "mine" / "console.log").read_text()
    # Progress lines are not logged.
    shown = [line for line in result.out.splitlines() if line and not line.startswith("update=")]
    assert [line for line in shown if line not in log] == []
    assert result.err == f"warning: {text}\n"  # without the source location
    assert text in log


def test_events_record_the_history_of_a_run(server: ForkServer, tmp_path: Path) -> None:
    assert train(server, tmp_path, "updates=50", "task.fail_at=45").code == 70
    assert train(server, tmp_path, "updates=50", "task.fail_at=45", env={"NO_KILL": "1"}).code == 0
    events = rows(tmp_path / "outputs" / "mine" / "events.jsonl")
    assert [event["kind"] for event in events] == [
        "start", "phase", "first update", "saving", "resume", "phase", "first update", "end",
    ]  # fmt: skip
    assert events[1]["total"] == 50
    assert events[4] == {**events[4], "update": 40, "checkpoint": "update-0000000040"}
    assert events[-1] == {**events[-1], "update": 50, "stopped_by": None}
    times = [event["time"] for event in events]
    assert times == sorted(times)
