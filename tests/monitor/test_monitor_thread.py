"""The monitor thread writes only what it reads, never raises an error into a run, and never blocks it."""

from __future__ import annotations

import csv
import errno
import inspect
import io
import itertools
import os
import stat
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil
import pytest
from omegaconf import OmegaConf

from runner.base.errors import ConfigError
from runner.monitor import monitor_thread as module
from runner.monitor.machine_sample import Host, QuotaCpuLoad
from runner.monitor.monitor_thread import MONITORS, Monitor, NoMonitor, format_line
from runner.monitor.nvml import Gpu, Nvml
from runner.monitor.sample_columns import summarize_samples
from runner.monitor.samples import COLUMNS, Summary, SummaryPart
from runner.monitor.samples_file import read_samples
from tests.nvml_stub import PAIR, ROOT, SLICED, T4, NvmlStub
from tests.waiting import wait_until

ROUNDING_S = 0.5e-3  # spans in the file are rounded to milliseconds

WATCH = """
import json, os, pathlib, time
from runner.monitor.monitor_thread import Monitor
from tests.waiting import wait_until
path = pathlib.Path("gpu.csv")
path.unlink(missing_ok=True)
monitor = Monitor(path, 0.02, uuids=json.loads(os.environ.get("WATCH", "null")))
before = [monitor.line(), dict(monitor.latest())]
monitor.enter_phase("train")
with monitor:
    wait_until(lambda: path.exists() and len(path.read_text().splitlines()) >= 7)
print(json.dumps({
    "before": before, "latest": dict(monitor.latest()), "line": monitor.line(), "notes": monitor.notes,
    "csv": path.read_text(), "now": time.time(),
}))
"""


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_readings_of_a_t4_are_written_and_shown(nvml_stub: NvmlStub) -> None:
    """The readings appear in the file, the metrics and the status line."""
    seen = nvml_stub.run(WATCH, T4)
    rows = rows_of(seen["csv"])
    row, last = rows[0], rows[-1]

    assert seen["before"] == ["", {}]
    assert tuple(row) == COLUMNS
    assert float(row.pop("timestamp")) == pytest.approx(seen["now"], abs=60)
    # The kernel counts CPU time in units of 10 ms, so two samples may have the same time, and thus no percentage.
    assert all(0 <= float(one["cpu_percent"]) <= 100 for one in rows if one["cpu_percent"])
    assert ("cpu/percent" in seen["latest"]) == bool(last["cpu_percent"])
    del row["cpu_percent"]
    assert 0 < float(row.pop("ram_percent")) <= 100
    assert float(row.pop("span_s")) > 0
    assert float(row.pop("process_memory_gib")) > 0
    for name in ("process_cpu_percent", "disk_free_gib", "disk_read_mb_s", "disk_write_mb_s", "other_memory_gib"):
        del row[name]
    assert row == {
        "phase": "train", "device": "gpu0", "uuid": T4["0.uuid"], "util_percent": "85", "memory_used_gib": "8",
        "memory_total_gib": "15", "temperature_c": "61", "power_w": "54.321", "clock_mhz": "1590", "name": "Tesla T4",
        "memory_util_percent": "40", "memory_reserved_gib": "0.391", "memory_free_gib": "6.609",
        "temperature_limit_c": "93", "power_limit_w": "70", "energy_j": "1234", "memory_clock_mhz": "5000",
        "throttle_reasons": "4", "pcie_generation": "3", "pcie_width": "16", "ecc_corrected": "0",
        "ecc_uncorrected": "0", "other_processes": row["other_processes"],
    }  # fmt: skip
    assert (seen["latest"]["gpu0/util"], seen["latest"]["gpu0/memory_gib"]) == (85.0, 8.0)
    assert {"ram/percent", "process/cpu_percent", "process/memory_gib"} < set(seen["latest"])
    assert seen["line"].split(" | ")[:2] == ["GPU: 8.0/15.0GB (53%)", "Util: 85%"]
    assert [note for note in seen["notes"] if "also used" not in note and "power limit" not in note] == []


def test_each_gpu_has_a_row_in_the_requested_order(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.run(
        WATCH, PAIR, WATCH='["3070bbbb-2222-4000-8000-000000000000", "GPU-2080aaaa-1111-4000-8000-000000000000"]'
    )
    first, second = rows_of(seen["csv"])[:2]

    assert first["timestamp"] == second["timestamp"]
    assert (first["device"], first["uuid"]) == ("gpu0", PAIR["1.uuid"])
    assert (second["device"], second["uuid"]) == ("gpu1", PAIR["0.uuid"])
    parts = seen["line"].split(" | ")
    assert parts[:2] == ["GPU0: 1.0/8.0GB (12%)", "Util: 40%"]
    assert parts[2:4] == ["GPU1: 2.0/11.0GB (18%)", "Util: 90%"]


def test_only_visible_gpus_are_monitored(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.run(WATCH, PAIR, CUDA_VISIBLE_DEVICES="GPU-3070")

    assert {row["uuid"] for row in rows_of(seen["csv"])} == {PAIR["1.uuid"]}


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("name", [f"MIG-{SLICED['0.uuid']}/2/0", "MIG-0000bbbb"])
def test_a_mig_instance_can_be_selected_by_both_names(nvml_stub: NvmlStub, name: str) -> None:
    row = rows_of(nvml_stub.run(WATCH, SLICED, CUDA_VISIBLE_DEVICES=name)["csv"])[0]

    assert (row["device"], row["uuid"]) == ("gpu0", SLICED["0.mig.1.uuid"])
    assert row["memory_total_gib"] == "39.25"
    assert row["util_percent"] == "", "an instance does not report this reading"


def test_missing_readings_are_empty_cells_never_0(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.run(WATCH, T4 | {"0.err.power": 3, "0.err.util": 15})
    row = rows_of(seen["csv"])[0]

    assert (row["power_w"], row["util_percent"]) == ("", "")
    assert "gpu0/power_w" not in seen["latest"]
    assert "Util" not in seen["line"]


def test_a_reading_of_0_is_written_as_0(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.run(WATCH, T4 | {"0.util": 0})

    assert rows_of(seen["csv"])[0]["util_percent"] == "0"
    assert "Util: 0%" in seen["line"]


def test_without_a_gpu_the_cpu_is_monitored_with_a_note(nvml_stub: NvmlStub, screen: Callable[..., None]) -> None:
    seen = nvml_stub.run(WATCH, None)
    row = rows_of(seen["csv"])[0]

    assert (row["device"], row["uuid"], row["util_percent"]) == ("cpu", "", "")
    assert float(row["ram_percent"]) > 0
    assert seen["line"].startswith("CPU: ")
    screen(seen["notes"][0])


def test_the_status_line_has_its_documented_form(screen: Callable[..., None]) -> None:
    machine = {"cpu/percent": 45.3, "ram/percent": 67.2}
    sample = {"gpu0/memory_gib": 8.2, "gpu0/memory_total_gib": 16.0, "gpu0/util": 85.0} | machine

    screen(format_line(sample))
    assert format_line(machine) == "CPU: 45.3% | RAM: 67.2%"
    assert format_line(sample, num_gpus=2).startswith("GPU0: "), "the lost GPU must still be counted"


def test_samples_are_taken_at_the_interval_without_drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The virtual clock advances by 4 ms more than requested in each wait."""
    path, waited = tmp_path / "gpu.csv", [0.0]

    class Late(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is None or len(waited) == 12:
                return super().wait()
            waited.append(timeout + 0.004)
            return self.is_set()

    clock = SimpleNamespace(monotonic=lambda: sum(waited), time=lambda: 1e9 + sum(waited))
    monkeypatch.setattr(module, "threading", SimpleNamespace(**{**vars(threading), "Event": Late}))
    monkeypatch.setattr(module, "time", clock)
    with Monitor(path, 0.05):
        wait_until(lambda: len(waited) == 12)
    times = [float(row["timestamp"]) for row in rows_of(path.read_text())]
    steps = [later - earlier for earlier, later in itertools.pairwise(times[1:])]

    assert len(steps) >= 8
    assert steps == pytest.approx([0.05] * len(steps), abs=2 * ROUNDING_S)


def test_a_second_run_appends_after_an_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    path.write_text(",".join(COLUMNS) + "\n1.0,train,cp")
    with Monitor(path, 0.01) as monitor:
        wait_until(monitor.latest)
    lines = path.read_text().splitlines()

    assert lines[:2] == [",".join(COLUMNS), "1.0,train,cp"]
    assert len(lines) > 2
    assert all(line.count(",") == len(COLUMNS) - 1 for line in lines[2:])


def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    with Monitor(path, 0.01):
        wait_until(path.exists)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_instead_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "gpu.csv").symlink_to(tmp_path / "elsewhere")
    with Monitor(tmp_path / "gpu.csv", 0.01) as monitor:
        wait_until(monitor.latest)

    assert not (tmp_path / "elsewhere").exists()
    assert any("is not written" in note for note in monitor.notes)


def test_an_unwritable_file_is_reported_once(tmp_path: Path, screen: Callable[..., None]) -> None:
    """Monitoring continues."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, a device that is always full")
    with Monitor(Path("/dev/full"), 0.01) as full, Monitor(tmp_path / "missing" / "gpu.csv", 0.01) as missing:
        wait_until(lambda: full.summary().whole.samples > 3 and missing.summary().whole.samples > 3)

    (note,) = [note for note in full.notes if "/dev/full" in note]
    screen(note)
    assert full.lost == note
    assert "is not written" in missing.lost
    assert len([note for note in missing.notes if "is not written" in note]) == 1


def test_a_row_is_written_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk becomes full while the row is written."""
    path, write, num_rows = tmp_path / "gpu.csv", os.write, itertools.count()

    def on_a_disk_that_fills_up(descriptor: int, content: bytes) -> int:
        number = next(num_rows)
        if number > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content[:20] if number == 3 else content)

    monkeypatch.setattr(os, "write", on_a_disk_that_fills_up)
    with Monitor(path, 0.01) as monitor:
        wait_until(lambda: monitor.lost)

    assert os.strerror(errno.ENOSPC) in monitor.lost
    assert len(read_samples(path)) == 2
    assert path.read_text().endswith("\n")


def test_an_exception_in_the_monitor_is_reported_as_a_note(
    monkeypatch: pytest.MonkeyPatch, screen: Callable[..., None]
) -> None:
    def broken() -> None:
        raise ValueError("unexpected")

    monkeypatch.setattr(module, "open_driver", broken)
    with Monitor(None, 0.01) as monitor:
        wait_until(lambda: monitor.notes)

    (note,) = monitor.notes
    screen(note)
    assert monitor.latest() == {}


def test_a_hanging_driver_delays_neither_start_nor_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, release, answered = threading.Event(), threading.Event(), threading.Event()

    def hang() -> Nvml:
        asked.set()
        release.wait(120)
        answered.set()
        return Nvml()

    monkeypatch.setattr(module, "open_driver", hang)
    monitor = Monitor(None, 0.01)
    monitor.start()
    wait_until(asked.is_set)
    monitor.stop()
    assert not answered.is_set()
    release.set()

    wait_until(lambda: all(thread.name != "accel-run monitor" for thread in threading.enumerate()))


def test_starting_and_stopping_twice_leaves_no_thread() -> None:
    monitor = Monitor(None, 0.01)
    for _ in range(2):
        monitor.start()
        monitor.start()
        assert sum(thread.name == "accel-run monitor" for thread in threading.enumerate()) == 1
        monitor.stop()
        monitor.stop()

    assert all(thread.name != "accel-run monitor" for thread in threading.enumerate())
    assert monitor.latest(), "even the shortest run must have one sample"


@pytest.mark.slow
def test_child_processes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "SELDOM_S", 0.0)
    monkeypatch.setattr(Host, "SEARCH_SHARE", 1.0)
    hungry = "import sys; held = bytearray(b'x') * (200 << 20); print('up', flush=True); sys.stdin.read()"

    with Monitor(None, 0.02) as monitor:
        wait_until(monitor.latest)
        alone = monitor.latest()["process/memory_gib"]
        with subprocess.Popen([sys.executable, "-c", hungry], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            wait_until(lambda: monitor.latest()["process/memory_gib"] > alone + 0.15)
            child.communicate(b"")
        wait_until(lambda: monitor.latest()["process/memory_gib"] < alone + 0.15)  # ended processes must not count


def test_the_disabled_monitor_has_the_same_methods() -> None:
    monitor = MONITORS["off"](Path("gpu.csv"))
    with monitor:
        monitor.enter_phase("train")

    assert type(monitor) is NoMonitor
    assert (monitor.latest(), monitor.line(), monitor.notes, monitor.new_alerts()) == ({}, "", (), ())
    assert monitor.summary() == Summary()
    public = {name for name in vars(Monitor) if not name.startswith("_")}
    assert public <= set(vars(NoMonitor))


def test_yaml_files_match_option_table_and_signatures() -> None:
    folder = ROOT / "conf" / "monitor"

    assert {path.stem for path in folder.glob("*.yaml")} == set(MONITORS)
    for name, function in MONITORS.items():
        keys = {
            key: parameter.default
            for key, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        assert OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml")) == keys


def test_monitoring_does_not_import_torch(nvml_stub: NvmlStub) -> None:
    imported = "import json, sys, runner.monitor.monitor_thread; print(json.dumps(list(sys.modules)))"
    assert "torch" not in nvml_stub.run(imported, None)


@pytest.mark.parametrize("interval_s", [0, -1, float("nan"), float("inf"), 1e-9, 3601, "one"])
def test_an_invalid_interval_is_reported(interval_s: Any) -> None:
    with pytest.raises(ConfigError, match=r"a number of seconds from 0\.01 to 3600, but is"):
        Monitor(None, interval_s)


OLD = (
    "timestamp,phase,device,uuid,util_percent,memory_used_gib,memory_total_gib,temperature_c,power_w,clock_mhz,"
    "cpu_percent,ram_percent"
)


def test_files_of_older_versions_keep_their_columns(tmp_path: Path, screen: Callable[..., None]) -> None:
    """A note reports this."""
    path = tmp_path / "gpu.csv"
    path.write_text(f"{OLD}\n100.0,train,cpu,,,,,,,,12.5,50\n101.0,train,cpu,,,,,,,,37.5,50\n")
    with Monitor(path, 0.01) as monitor:
        wait_until(monitor.latest)
    lines = path.read_text().splitlines()

    assert {line.count(",") for line in lines} == {11}
    assert len(lines) > 3
    (note,) = [note for note in monitor.notes if "columns" in note]
    screen(note)
    assert monitor.summary().phases["train"].metrics["cpu/percent"].max == 37.5, "the earlier rows must be counted, too"


def test_a_file_of_another_program_is_not_changed(tmp_path: Path, screen: Callable[..., None]) -> None:
    path = tmp_path / "gpu.csv"
    path.write_text("my,own,table\n1,2,3\n")
    with Monitor(path, 0.01) as monitor:
        wait_until(monitor.latest)

    assert path.read_text() == "my,own,table\n1,2,3\n"
    screen("\n".join(note for note in monitor.notes if str(path) in note))


def test_the_live_summary_equals_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    with Monitor(path, 0.1) as monitor:
        monitor.enter_phase("one")
        wait_until(lambda: "one" in monitor.summary().phases and monitor.summary().whole.samples > 3)
        monitor.enter_phase("two, or three")
        wait_until(lambda: "two, or three" in monitor.summary().phases)
    mine, read = monitor.summary().whole, summarize_samples(read_samples(path))

    assert mine.samples == read.whole.samples
    assert mine.seconds == pytest.approx(read.whole.seconds, abs=ROUNDING_S * mine.samples)
    assert {"one", "two  or three"} <= set(read.phases)
    for name, own in mine.metrics.items():
        assert read.whole.metrics[name].mean == pytest.approx(own.mean, abs=0.06, rel=0.01), name
    assert sum(part.samples for part in read.phases.values()) == read.whole.samples


LOSE = """
import json, pathlib
from runner.monitor.monitor_thread import Monitor
from tests.nvml_stub import change
from tests.waiting import wait_until
path = pathlib.Path("gpu.csv")
path.unlink(missing_ok=True)
monitor = Monitor(path, 0.02)
with monitor:
    wait_until(monitor.latest)
    change({"1.err.all": 15})
    wait_until(lambda: monitor.notes)
    rows = len(path.read_text().splitlines())
    wait_until(lambda: len(path.read_text().splitlines()) > rows + 6)
print(json.dumps({"csv": path.read_text(), "notes": monitor.notes, "latest": dict(monitor.latest())}))
"""


@pytest.mark.slow
def test_a_lost_gpu_has_empty_cells_and_others_continue(nvml_stub: NvmlStub, screen: Callable[..., None]) -> None:
    seen = nvml_stub.run(LOSE, PAIR, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    rows = rows_of(seen["csv"])

    (note,) = seen["notes"]
    screen(note)
    assert rows[1]["util_percent"] == "40"
    assert rows[-1]["device"] == "gpu1"
    measured = [name for name in rows[-1] if name.endswith(("_gib", "_percent", "_c", "_w", "_mhz"))]
    of_gpu = [name for name in measured if not name.startswith(("cpu", "ram", "process", "disk"))]
    assert {rows[-1][name] for name in of_gpu} == {""}
    assert rows[-2]["util_percent"] == "90"
    assert not [name for name in seen["latest"] if name.startswith("gpu1/")]


def test_each_device_has_a_row_per_interval(nvml_stub: NvmlStub) -> None:
    code = """
import json, pathlib, time
from runner.monitor.monitor_thread import Monitor
path = pathlib.Path("gpu.csv")
path.unlink(missing_ok=True)
began = time.monotonic()
with Monitor(path, 0.1):
    while not path.exists() or path.read_text().count("gpu1") < 2:
        time.sleep(0.01)
passed = time.monotonic() - began
print(json.dumps([passed / 0.1, [line.split(",")[2] for line in path.read_text().splitlines()[1:]]]))
"""
    passed, devices = nvml_stub.run(code, PAIR, CUDA_DEVICE_ORDER="PCI_BUS_ID")

    assert devices.count("gpu0") == devices.count("gpu1")
    assert 2 <= devices.count("gpu0") <= passed + 2


def test_the_time_after_the_last_interval_is_sampled(tmp_path: Path) -> None:
    with Monitor(None, 60.0) as monitor:
        wait_until(monitor.latest)
        began = time.monotonic()
        wait_until(lambda: time.monotonic() > began + 0.4)
    whole = monitor.summary().whole

    assert whole.samples == 2
    assert whole.seconds > 0.4


def test_a_forked_child_does_not_monitor(nvml_stub: NvmlStub) -> None:
    code = """
import json, os, threading, time
from runner.monitor.monitor_thread import Monitor
with Monitor(None, 0.01) as monitor:
    while not monitor.latest():
        time.sleep(0.01)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        before = monitor.latest()
        monitor.start()
        time.sleep(0.1)
        monitor.stop()
        known = [threading.active_count(), monitor.latest() is before, monitor.summary().whole.samples]
        os.write(write, json.dumps(known).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    alive = monitor.latest()
    while monitor.latest() is alive:
        time.sleep(0.01)
print(os.read(read, 1000).decode())
"""
    assert nvml_stub.run(code, T4) == [1, True, 0]


USERS = """
import json, os, pathlib, time
from runner.monitor import machine_sample
from runner.monitor.monitor_thread import Monitor
from tests.nvml_stub import change
mine = os.environ.get("MINE", "yes") == "yes"
others = [os.getppid(), 1]
ours = [os.getpid()] if mine else []
listed = ",".join(f"{pid}:{(n + 1) << 30}" for n, pid in enumerate([*others, *ours, *range(4000000, 4000007)]))
change({"0.processes": listed})
machine_sample._FIRST_PID_NAMESPACE = None  # as in a container
with Monitor(None, 0.02) as monitor:
    while not monitor.users():
        time.sleep(0.01)
    time.sleep(0.1)
users = [[user.pid, user.name, user.memory_gib, user.is_ours] for user in monitor.users()["gpu0"]]
print(json.dumps({"users": users, "mine": os.getpid(), "parent": os.getppid(), "notes": monitor.notes,
                  "latest": dict(monitor.latest())}))
"""


@pytest.mark.slow
def test_processes_of_the_run_are_distinguished_from_others(nvml_stub: NvmlStub, screen: Callable[..., None]) -> None:
    seen = nvml_stub.run(USERS, T4 | {"0.throttle": 0})
    by_pid = {pid: rest for pid, *rest in seen["users"]}

    assert len(by_pid) == 10
    assert by_pid[seen["mine"]][1:] == [3.0, True]
    assert by_pid[seen["parent"]][2] is False
    assert by_pid[4000000][0] == "", "a process that is not in /proc must have no name"
    assert seen["latest"]["gpu0/other_processes"] == 9
    (note,) = seen["notes"]
    screen(note)


def write_cgroup(root: Path, seconds: float, used: float) -> Path:
    """Write /proc and /sys for a cgroup limited to half a core and 4 MiB, with this CPU time and memory use."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("0::/\n")
    files = {
        "cpu.max": "50000 100000",
        "cpu.stat": f"usage_usec {int(seconds * 1e6)}",
        "memory.max": f"{2**22}",
        "memory.current": f"{int(used * 2**22)}",
        "memory.stat": "inactive_file 0",
    }
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name).write_text(f"{text}\n")
    return root


def test_cpu_load_is_relative_to_the_cgroup_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 104.0])
    monkeypatch.setattr(QuotaCpuLoad, "now", staticmethod(lambda: next(clock)))
    host = Host(system=write_cgroup(tmp_path, 10.0, 0.25))
    write_cgroup(tmp_path, 11.5, 0.75)
    result = host.sample()

    assert result["cpu/percent"] == pytest.approx(75), "the load is 1.5 s of the 2 s that half a core has in 4 s"
    assert result["ram/percent"] == pytest.approx(75)


def test_cpu_load_is_relative_to_the_affinity_mask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cores = [(1.0, 9.0)] * 4
    times = namedtuple("times", "user idle")
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: len(cores))
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu=False: [times(*each) for each in cores])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2})
    host = Host(system=tmp_path)
    cores = [(1.0, 10.0), (1.0, 10.0), (1.75, 9.25), (1.0, 10.0)]

    assert host.sample()["cpu/percent"] == pytest.approx(75)


@pytest.mark.slow
def test_new_descendants_belong_to_the_run(nvml_stub: NvmlStub) -> None:
    """The child is started after the last scan of the processes."""
    code = """
import json, os, pathlib, subprocess, sys
from runner.monitor import machine_sample
from runner.monitor.nvml import open_nvml
from tests.nvml_stub import change
host = machine_sample.Host()
host.sample()
# a child of a child, as a data worker of a rank is
code = "import subprocess, sys; p = subprocess.Popen(['cat'], stdin=0); print(p.pid, flush=True); p.wait()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
pid = int(child.stdout.readline())
change({"0.processes": f"{os.getpid()}:1,{pid}:1,{os.getppid()}:1"})
with open_nvml() as nvml:
    gpus = machine_sample.Gpus(nvml, nvml.gpus, host.process_tree)
    gpus.sample()
print(json.dumps([pid in host.process_tree.pids, [user.is_ours for user in gpus.users[0]]]))
child.communicate(b"")
"""
    assert nvml_stub.run(code, T4) == [False, [True, True, False]]


@pytest.mark.slow
def test_pids_of_another_namespace_are_unknown(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.run(USERS, T4 | {"0.throttle": 0}, MINE="no")

    assert {ours for *_, ours in seen["users"]} == {None}
    assert seen["notes"] == []
    assert "gpu0/other_processes" not in seen["latest"]


HANG = """
import json, os, pathlib
from runner.monitor import monitor_thread as module
from runner.monitor.monitor_thread import Monitor
from tests.nvml_stub import change
from tests.waiting import wait_until
path = pathlib.Path("gpu.csv")
path.unlink(missing_ok=True)
with Monitor(path, 0.02) as monitor:
    wait_until(lambda: "gpu0/util" in monitor.latest())
    monitor.new_alerts()
    change({"0.wait_ms": 10**6})
    module.STALE_S = 0.3  # not before: a busy machine may take longer for a reading
    alerts = []
    wait_until(lambda: alerts.extend(alert.text for alert in monitor.new_alerts()) or alerts)
    seen = [dict(monitor.row()), monitor.line(), alerts]
print(json.dumps(seen), flush=True)
os._exit(0)  # the driver sleeps on: the monitor has stopped without it
"""


@pytest.mark.slow
def test_a_hanging_driver_is_reported_once(nvml_stub: NvmlStub) -> None:
    """The readings of the GPUs are empty."""
    readings, line, news = nvml_stub.run(HANG, T4 | {"0.processes": ""})

    assert (readings, line) == ({}, "")
    assert len([text for text in news if "driver" in text]) == 1


def test_a_driver_hanging_on_open_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(module, "OPEN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(module, "RECOVERY_S", 0.1)
    monkeypatch.setattr(module, "open_driver", lambda: release.wait(120) and Nvml())
    with Monitor(None, 0.02) as monitor:
        alerts: list[Any] = []
        wait_until(lambda: alerts.extend(monitor.new_alerts()) or alerts)
        assert "driver" in alerts[0].text
        release.set()


def test_a_stalled_sampler_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All readings are empty."""
    stuck, release = threading.Event(), threading.Event()
    real = Host.sample

    def sample(self: Host) -> dict[str, float]:
        if stuck.is_set():
            release.wait(120)
        return real(self)

    monkeypatch.setattr(Host, "sample", sample)
    monkeypatch.setattr(module, "STALE_S", 0.1)
    with Monitor(None, 0.02) as monitor:
        wait_until(monitor.latest)
        stuck.set()
        wait_until(lambda: not monitor.latest() and not monitor.row() and not monitor.line())
        alerts: list[Any] = []
        wait_until(lambda: alerts.extend(monitor.new_alerts()) or alerts)
        began = time.monotonic()
        wait_until(lambda: alerts.extend(monitor.new_alerts()) or time.monotonic() > began + 15 * module.STALE_S)
        release.set()
        wait_until(monitor.latest)

    assert len([notice for notice in alerts if "not been sampled" in notice.text]) == 1


def run_monitor(path: Path, samples: int = 3) -> Monitor:
    """Return a stopped monitor that has taken at least this many samples."""
    with Monitor(path, 0.01) as monitor:
        monitor.enter_phase("train")
        wait_until(lambda: monitor.summary().phases.get("train", SummaryPart()).samples >= samples)
    return monitor


def test_the_summary_of_a_resumed_run_has_earlier_samples(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    first, second = run_monitor(path).summary().whole, run_monitor(path).summary().whole

    assert second.samples == len(read_samples(path)) > first.samples
    read_s = summarize_samples(read_samples(path)).whole.seconds
    assert second.seconds == pytest.approx(read_s, abs=ROUNDING_S * second.samples)


def test_a_run_resumed_on_another_gpu_summarizes_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu.csv"
    path.write_text("timestamp,phase,device,uuid\n1.0,train,gpu0,GPU-1\n2.0,train,gpu0,GPU-1\n")
    nvml = Nvml()
    nvml.gpus = (Gpu(0, "GPU-2", "H100"),)
    monkeypatch.setattr(module, "open_driver", lambda: nvml)
    devices = run_monitor(path).summary().devices

    assert {device.uuid for device in devices.values()} == {"GPU-1", "GPU-2"}
    assert devices["gpu0"].uuid == "GPU-2"


def test_a_summary_without_earlier_samples_is_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary is marked as incomplete."""
    path = tmp_path / "gpu.csv"
    run_monitor(path)
    monkeypatch.setattr(module, "MAX_EARLIER_BYTES", 10)
    before = len(read_samples(path))
    summary = run_monitor(path).summary()

    assert summary.whole.samples == len(read_samples(path)) - before
    assert any(str(path) in note for note in summary.notes)


def test_an_error_in_reading_earlier_samples_is_an_alert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> NoReturn:
        raise ValueError(f"{path.name} has no shape")

    path = tmp_path / "gpu.csv"
    run_monitor(path)
    monitor = run_monitor(path)
    monkeypatch.setattr(module, "read_samples", fail)
    monitor.new_alerts()
    summary = monitor.summary()

    assert summary.whole.samples
    (alert,) = monitor.new_alerts()
    assert alert.level == "warning"
    assert alert.text in summary.notes
