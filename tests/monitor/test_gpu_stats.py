"""GPUStats monitors any code without disturbing it, and writes its files even after an error."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from runner import GPUStats
from runner.base.errors import ConfigError, InputMissing
from runner.monitor.samples_file import read_samples
from tests.nvml_stub import PAIR, ROOT, T4, NvmlStub
from tests.waiting import wait_until


def watch(stats: GPUStats, num_samples: int = 2) -> None:
    wait_until(lambda: stats.get_summary()["whole"]["samples"] >= num_samples)


def is_watching() -> bool:
    return any(thread.name == "accel-run monitor" for thread in threading.enumerate())


def test_a_with_block_writes_samples_and_a_summary(tmp_path: Path) -> None:
    with GPUStats(log_dir=tmp_path / "logs", interval_s=0.02) as stats:
        watch(stats)
    summary = json.loads((tmp_path / "logs" / "monitor.json").read_text())

    assert not is_watching()
    assert summary == stats.get_summary()
    assert len(read_samples(tmp_path / "logs" / "gpu.csv")) == summary["whole"]["samples"] == len(stats.samples())
    assert 0 < summary["whole"]["metrics"]["ram/percent"]["mean"] <= 100
    assert stat.S_IMODE((tmp_path / "logs" / "gpu.csv").stat().st_mode) == 0o600


def test_start_stop_and_plot_work_without_a_block(tmp_path: Path) -> None:
    stats = GPUStats(str(tmp_path / "logs"), 0.02)
    stats.start_monitoring()
    stats.start_monitoring()
    watch(stats)
    stats.stop_monitoring()
    stats.stop_monitoring()

    assert stats.get_summary()["whole"]["samples"] >= 2
    assert [path.name for path in sorted((tmp_path / "logs").iterdir())] == ["gpu.csv", "monitor.json"]


def test_monitoring_stops_when_the_block_raises(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), GPUStats(tmp_path, 0.02):
        print(1 / 0)

    assert not is_watching()
    assert (tmp_path / "monitor.json").is_file()


def test_concurrent_and_repeated_monitors_have_separate_files(tmp_path: Path) -> None:
    with GPUStats(tmp_path, 0.02) as one, GPUStats(tmp_path, 0.02) as other:
        watch(one)
        watch(other)
    with one:
        watch(one)

    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["gpu-2.csv", "gpu-3.csv", "gpu.csv", "monitor-2.json", "monitor-3.json", "monitor.json"]
    assert one.path_csv.name == "gpu-3.csv"
    assert len(read_samples(other.path_csv)) >= 2


def test_an_unwritable_folder_only_causes_a_warning(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with (
        pytest.warns(
            RuntimeWarning, match="cannot be written to: File exists; samples are kept in memory only"
        ) as warned,
        GPUStats(tmp_path / "logs", 0.02) as stats,
    ):
        watch(stats)

    assert len(warned) == 1
    assert warned[0].filename == __file__, "the warning must point to the user's line"
    assert stats.get_summary()["whole"]["samples"] >= 2


@pytest.mark.parametrize("interval_s", [0, -1.0, float("nan")])
def test_an_invalid_interval_is_reported_at_once(interval_s: float) -> None:
    with pytest.raises(ConfigError, match="a number of seconds from"):
        GPUStats(interval_s=interval_s)


def test_a_forked_child_does_not_sample_or_write(tmp_path: Path) -> None:
    with GPUStats(tmp_path, 0.02) as stats:
        watch(stats)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                stats.stop_monitoring()
                stats.start_monitoring()
                code = int(is_watching() or (tmp_path / "monitor.json").exists())
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        before = stats.get_summary()["whole"]["samples"]
        watch(stats, before + 2)
    assert stats.get_summary()["whole"]["samples"] >= before + 2, "the monitor of the parent must continue"


AROUND = """
import json, os, time
from runner import GPUStats
from runner.base.errors import ConfigError
try:
    with GPUStats("logs", 0.02, devices=json.loads(os.environ["DEVICES"])) as stats:
        while not stats.latest():
            time.sleep(0.01)
    print(json.dumps([each["uuid"] for each in stats.get_summary()["devices"].values()]))
except ConfigError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("null", [PAIR["0.uuid"], PAIR["1.uuid"]]),
        ("[1]", [PAIR["1.uuid"]]),
        ("[1, 0]", [PAIR["1.uuid"], PAIR["0.uuid"]]),
        ('["GPU-3070bbbb-2222-4000-8000-000000000000"]', [PAIR["1.uuid"]]),
        ('"3070bbbb-2222-4000-8000-000000000000"', [PAIR["1.uuid"]]),
        ("1", [PAIR["1.uuid"]]),
    ],
)
def test_devices_can_be_numbers_or_uuids(nvml_stub: NvmlStub, devices: str, expected: list[str]) -> None:
    assert nvml_stub.run(AROUND, PAIR, DEVICES=devices, CUDA_DEVICE_ORDER="PCI_BUS_ID") == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("[]", "[]"),
        ("[true]", "[True]"),
        ("[null, 0.5]", "[None, 0.5]"),
        ("[0, 1, 0]", "[0, 1, 0]"),
        ("-1", "[-1]"),
    ],
)
def test_invalid_devices_are_reported(nvml_stub: NvmlStub, devices: str, expected: str) -> None:
    text = nvml_stub.run(AROUND, PAIR, DEVICES=devices, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert text.startswith("devices: ")
    assert f" {expected}; " in text


@pytest.mark.slow
def test_a_numpy_integer_is_accepted_as_device(nvml_stub: NvmlStub) -> None:
    code = AROUND.replace('json.loads(os.environ["DEVICES"])', "__import__('numpy').arange(1, 2)")
    assert nvml_stub.run(code, PAIR, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [PAIR["1.uuid"]]


def test_the_summary_is_private_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    with GPUStats(tmp_path / "logs", 0.02) as stats:
        watch(stats)
        (tmp_path / "logs" / "monitor.json").symlink_to(tmp_path / "elsewhere")
    path = tmp_path / "logs" / "monitor.json"

    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in sorted((tmp_path / "logs").iterdir())] == ["gpu.csv", "monitor.json"]


def test_an_existing_summary_is_not_overwritten(tmp_path: Path) -> None:
    text = "of a table that was moved away"
    (tmp_path / "monitor.json").write_text(text)
    with GPUStats(tmp_path, 0.02) as stats:
        watch(stats)

    assert (tmp_path / "monitor.json").read_text() == text
    assert stats.path_csv.name == "gpu-2.csv"


def test_plotting_without_samples_suggests_monitoring(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match=r"there is no such file\n.*start_monitoring"):
        GPUStats(tmp_path).plot_stats()


@pytest.mark.slow
def test_a_missing_device_is_reported_with_existing_ones(nvml_stub: NvmlStub) -> None:
    message = nvml_stub.run(AROUND, PAIR, DEVICES="[0, 7]", CUDA_DEVICE_ORDER="PCI_BUS_ID")

    assert message.startswith("devices: ")
    assert "[0, 7]; " in message
    assert " 0 (GPU-2080aaaa-1111-4000-8000-000000000000), 1 (" in message
    assert "NVIDIA driver" in nvml_stub.run(AROUND, None, DEVICES="[0]")


def test_device_0_is_cuda_0_if_torch_is_initialized(nvml_stub: NvmlStub) -> None:
    code = """
import json, sys, time, types
class Torch(types.ModuleType):  # CUDA numbers the faster GPU first
    class cuda:
        is_initialized = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 2)
        get_device_properties = staticmethod(lambda index: types.SimpleNamespace(uuid=[
            "3070bbbb-2222-4000-8000-000000000000", "2080aaaa-1111-4000-8000-000000000000"][index]))
sys.modules["torch"] = Torch("torch")
from runner import GPUStats
found = []
for devices in (None, [0]):
    with GPUStats("logs", 0.02, devices=devices) as stats:
        while not stats.latest():
            time.sleep(0.01)
    found.append([each["uuid"] for each in stats.get_summary()["devices"].values()])
print(json.dumps(found))
"""
    assert nvml_stub.run(code, PAIR) == [[PAIR["1.uuid"], PAIR["0.uuid"]], [PAIR["1.uuid"]]]


def test_monitoring_needs_neither_torch_nor_a_gpu(tmp_path: Path) -> None:
    code = """
import sys
from runner import GPUStats
with GPUStats(interval_s=0.02) as stats:
    pass
assert "torch" not in sys.modules and "matplotlib" not in sys.modules
assert stats.get_summary()["whole"]["samples"] == 1, "even the shortest block leaves one"
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert (tmp_path / "gpu_logs" / "gpu.csv").is_file()


@pytest.mark.slow
def test_the_summary_includes_each_gpu_with_its_energy(nvml_stub: NvmlStub) -> None:
    code = """
import json, time
from runner import GPUStats
from tests.nvml_stub import change
with GPUStats("logs", 0.02) as stats:
    while not stats.latest():
        time.sleep(0.01)
    change({"0.energy": 1734000})
    while stats.latest().get("gpu0/energy_j", 0) < 1700:
        time.sleep(0.01)
print(json.dumps(stats.get_summary()))
"""
    summary: Any = nvml_stub.run(code, T4)

    assert summary["whole"]["energy_j"] == {"gpu0": 500.0}
    assert summary["whole"]["metrics"]["gpu0/util"]["mean"] == 85.0
    assert summary["whole"]["slowed"] == {"gpu0": {"power limit": 1.0}}


@pytest.mark.slow
def test_each_start_has_its_own_folder_for_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    stats = GPUStats(tmp_path / "logs", 0.02)
    for folder in ("plots", "plots-2"):
        with stats:
            watch(stats)
        assert tmp_path / "logs" / folder / "machine.png" in stats.plot_stats()
    assert (tmp_path / "logs" / "plots" / "machine.png").read_bytes().startswith(b"\x89PNG")
