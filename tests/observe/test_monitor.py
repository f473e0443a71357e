"""Laws of the monitor: it writes what it read and nothing else, and it can neither raise into a run nor hold it up."""

from __future__ import annotations

import csv
import inspect
import io
import itertools
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from runner.observe import monitor as module
from runner.observe.monitor import COLUMNS, MONITORS, Monitor, NoMonitor, as_line
from runner.observe.nvml import Nvml
from tests.nvml_stub import PAIR, ROOT, T4, NvmlStub, build_stub

WATCH = """
import json, os, pathlib, time
from runner.observe.monitor import Monitor
path = pathlib.Path("gpu.csv")
path.unlink(missing_ok=True)
monitor = Monitor(path, 0.02, uuids=json.loads(os.environ.get("WATCH", "null")))
before = [monitor.line(), dict(monitor.latest())]
monitor.enter_phase("train")
with monitor:
    until = time.monotonic() + 20
    while len(path.read_text().splitlines() if path.exists() else []) < 7 and time.monotonic() < until:
        time.sleep(0.01)
print(json.dumps({
    "before": before, "latest": dict(monitor.latest()), "line": monitor.line(), "notes": monitor.notes,
    "csv": path.read_text(),
}))
"""


@pytest.fixture(scope="module")
def nvml_stub(tmp_path_factory: pytest.TempPathFactory) -> NvmlStub:
    return build_stub(tmp_path_factory.mktemp("nvml_stub"))


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    return bool(condition())


def test_a_t4_is_in_the_file_the_metrics_and_the_line(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.run(WATCH, T4)
    row = rows_of(seen["csv"])[0]

    assert seen["before"] == ["", {}]
    assert tuple(row) == COLUMNS
    assert float(row.pop("timestamp")) == pytest.approx(time.time(), abs=60)
    assert 0 <= float(row.pop("cpu_percent")) <= 100
    assert 0 < float(row.pop("ram_percent")) <= 100
    assert row == {
        "phase": "train", "device": "gpu0", "uuid": T4["0.uuid"], "util_percent": "85", "memory_used_gib": "8",
        "memory_total_gib": "15", "temperature_c": "61", "power_w": "54.321", "clock_mhz": "1590",
    }  # fmt: skip
    assert (seen["latest"]["gpu0/util"], seen["latest"]["gpu0/memory_gib"]) == (85.0, 8.0)
    assert {"cpu/percent", "ram/percent", "process/cpu_percent", "process/memory_gib"} < set(seen["latest"])
    assert seen["line"].startswith("GPU: 8.0/15.0GB (53%) | Util: 85% | CPU: ")
    assert seen["notes"] == []


def test_each_gpu_has_its_row_in_the_order_asked_for(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.run(
        WATCH, PAIR, WATCH='["3070bbbb-2222-4000-8000-000000000000", "GPU-2080aaaa-1111-4000-8000-000000000000"]'
    )
    first, second = rows_of(seen["csv"])[:2]

    assert first["timestamp"] == second["timestamp"]
    assert (first["device"], first["uuid"]) == ("gpu0", PAIR["1.uuid"])
    assert (second["device"], second["uuid"]) == ("gpu1", PAIR["0.uuid"])
    assert seen["line"].startswith("GPU0: 1.0/8.0GB (12%) | Util: 40% | GPU1: 2.0/11.0GB (18%) | Util: 90% | CPU: ")


def test_only_visible_gpus_are_watched(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.run(WATCH, PAIR, CUDA_VISIBLE_DEVICES="GPU-3070")

    assert {row["uuid"] for row in rows_of(seen["csv"])} == {PAIR["1.uuid"]}


def test_a_missing_reading_is_an_empty_cell_and_never_0(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.run(WATCH, T4 | {"0.err.power": 3, "0.err.util": 15})
    row = rows_of(seen["csv"])[0]

    assert (row["power_w"], row["util_percent"]) == ("", "")
    assert "gpu0/power_w" not in seen["latest"]
    assert "Util" not in seen["line"]


def test_a_reading_of_0_is_a_0(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.run(WATCH, T4 | {"0.util": 0})

    assert rows_of(seen["csv"])[0]["util_percent"] == "0"
    assert "Util: 0%" in seen["line"]


def test_without_a_gpu_the_cpu_is_watched_and_the_reason_noted(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.run(WATCH, None)
    row = rows_of(seen["csv"])[0]

    assert (row["device"], row["uuid"], row["util_percent"]) == ("cpu", "", "")
    assert float(row["ram_percent"]) > 0
    assert seen["line"].startswith("CPU: ")
    assert "no NVIDIA driver is installed" in seen["notes"][0]


def test_the_line_reads_as_promised() -> None:
    machine = {"cpu/percent": 45.3, "ram/percent": 67.2}
    sample = {"gpu0/memory_gib": 8.2, "gpu0/memory_total_gib": 16.0, "gpu0/util": 85.0} | machine

    assert as_line(sample) == "GPU: 8.2/16.0GB (51%) | Util: 85% | CPU: 45.3% | RAM: 67.2%"
    assert as_line(machine) == "CPU: 45.3% | RAM: 67.2%"


def test_samples_come_at_the_interval_without_drift(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    with Monitor(path, 0.05):
        assert wait_for(lambda: path.exists() and len(rows_of(path.read_text())) >= 12)
    times = [float(row["timestamp"]) for row in rows_of(path.read_text())]
    steps = sorted(later - earlier for earlier, later in itertools.pairwise(times))

    assert steps[len(steps) // 2] == pytest.approx(0.05, abs=0.03), "a busy machine may delay single samples"
    assert steps[0] > 0


def test_a_second_run_adds_to_the_file_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    path.write_text(",".join(COLUMNS) + "\n1.0,train,cp")
    with Monitor(path, 0.01) as monitor:
        assert wait_for(monitor.latest)
    lines = path.read_text().splitlines()

    assert lines[:2] == [",".join(COLUMNS), "1.0,train,cp"]
    assert len(lines) > 2
    assert all(line.count(",") == len(COLUMNS) - 1 for line in lines[2:])


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    with Monitor(path, 0.01):
        assert wait_for(path.exists)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "gpu.csv").symlink_to(tmp_path / "elsewhere")
    with Monitor(tmp_path / "gpu.csv", 0.01) as monitor:
        assert wait_for(monitor.latest)

    assert not (tmp_path / "elsewhere").exists()
    assert any("is not written" in note for note in monitor.notes)


def test_a_file_that_cannot_be_written_is_noted_once_and_the_watch_goes_on(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, a device that is always full")
    with Monitor(Path("/dev/full"), 0.01) as full, Monitor(tmp_path / "missing" / "gpu.csv", 0.01) as missing:
        assert wait_for(lambda: full.latest() and missing.latest())
        time.sleep(0.1)

    assert [note for note in full.notes if "/dev/full" in note] == [
        "/dev/full is no longer written: No space left on device"
    ]
    assert len([note for note in missing.notes if "is not written" in note]) == 1


def test_a_monitor_that_fails_inside_is_a_note_and_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ValueError("nobody expects this")

    monkeypatch.setattr(module, "open_nvml", broken)
    with Monitor(None, 0.01) as monitor:
        assert wait_for(lambda: monitor.notes)

    assert monitor.notes == ("monitor stopped: ValueError: nobody expects this",)
    assert monitor.latest() == {}


def test_a_driver_that_hangs_holds_up_neither_start_nor_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(module, "open_nvml", lambda: release.wait(20) and Nvml())
    monitor = Monitor(None, 0.01)
    begin = time.monotonic()
    monitor.start()
    started = time.monotonic()
    monitor.stop()
    stopped = time.monotonic()
    release.set()

    assert started - begin < 0.5
    assert stopped - started < 3.0
    assert wait_for(lambda: all(thread.name != "accel-run monitor" for thread in threading.enumerate()))


def test_starting_and_stopping_twice_leaves_no_thread() -> None:
    monitor = Monitor(None, 0.01)
    for _ in range(2):
        monitor.start()
        monitor.start()
        assert sum(thread.name == "accel-run monitor" for thread in threading.enumerate()) == 1
        monitor.stop()
        monitor.stop()

    assert all(thread.name != "accel-run monitor" for thread in threading.enumerate())
    assert monitor.latest(), "even the shortest run leaves one sample"


def test_the_children_of_the_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Sampler, "REFRESH", 1)
    hungry = "import sys; held = bytearray(b'x') * (200 << 20); print('up', flush=True); sys.stdin.read()"

    with Monitor(None, 0.02) as monitor:
        assert wait_for(monitor.latest)
        alone = monitor.latest()["process/memory_gib"]
        with subprocess.Popen([sys.executable, "-c", hungry], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert wait_for(lambda: monitor.latest()["process/memory_gib"] > alone + 0.15)
            child.communicate(b"")
        assert wait_for(lambda: monitor.latest()["process/memory_gib"] < alone + 0.15), "the dead count nothing"


def test_off_has_the_same_verbs() -> None:
    monitor = MONITORS["off"](Path("gpu.csv"))
    with monitor:
        monitor.enter_phase("train")

    assert type(monitor) is NoMonitor
    assert (monitor.latest(), monitor.line(), monitor.notes) == ({}, "", ())
    public = {name for name in vars(Monitor) if not name.startswith("_")}
    assert public <= set(vars(NoMonitor))


def test_the_yaml_files_are_the_table_and_their_keys_the_signature() -> None:
    folder = ROOT / "conf" / "monitor"

    assert {path.stem for path in folder.glob("*.yaml")} == set(MONITORS)
    for name, function in MONITORS.items():
        keys = {
            key: parameter.default
            for key, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        assert OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml")) == keys


def test_watching_does_not_import_torch(nvml_stub: NvmlStub) -> None:
    assert (
        nvml_stub.run("import json, sys, runner.observe.monitor; print(json.dumps('torch' in sys.modules))", None)
        is False
    )
