"""`accel-run benchmark suite=devices` reports the faster device for each size, with uncertainty."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.base.errors import ConfigError
from runner.plan.inventory import Cpu, Device, Inventory
from runner.tools.measure.statistics import Ratio
from runner.tools.measure.suites.devices import describe_crossover, parse_devices, run
from tests.tools.measure.shared_virtual_time import READ_S, SharedVirtualTime
from tests.tools.measure.suites.asked import asked

NAMES = ("cpu", "cuda:0")
SETTINGS = ("task.num_cubes=32", "task.channels=4")


FASTER, SLOWER, SAME = Ratio(1.5, 1.4, 1.6, 9), Ratio(0.5, 0.4, 0.6, 9), Ratio(1.0, 0.9, 1.1, 9)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([SLOWER, SLOWER, FASTER, FASTER], "cuda:0 is faster from 8 samples, cpu up to 4"),
        ([FASTER, SLOWER, SLOWER, SLOWER], "cpu is faster from 4 samples, cuda:0 up to 2"),
        ([SLOWER, SAME, FASTER, FASTER], "cuda:0 is faster from 8 samples, unclear below"),
        ([SLOWER, None, FASTER, FASTER], "cuda:0 is faster from 8 samples, cpu up to 2"),
        ([FASTER] * 4, "cuda:0 is faster from 2 to 16 samples"),
        ([SLOWER] * 4, "cpu is faster from 2 to 16 samples"),
        ([SAME] * 4, "no clear change at 16 samples"),
        ([FASTER, FASTER, FASTER, SAME], "no clear change at 16 samples"),
        ([None, None, None, FASTER], "too few sizes were measured"),
    ],
)
def test_the_faster_device_is_reported_for_each_measured_size(ratios: list[Ratio | None], expected: str) -> None:
    """Only clear ratios of measured sizes count, without extrapolation."""
    assert describe_crossover(NAMES, ratios, "samples", (2, 4, 8, 16)) == expected


def test_two_names_of_a_gpu_are_one_device() -> None:
    gpu = Device("cuda", 0, "a GPU", "GPU-0", 2**30, capability=(8, 0))
    here = Inventory((gpu,), Cpu("a CPU", 1, 2, 2**30))

    assert list(parse_devices("cpu,cuda", here)) == ["cpu", "cuda:0"]
    with pytest.raises(ConfigError, match="two different devices"):
        parse_devices("cuda,cuda:0", here)


@pytest.fixture
def slow_clock(virtual_time: SharedVirtualTime) -> Iterator[None]:
    """Make clock readings slow, so that blocks have few updates although updates take no other time."""
    virtual_time.read_s = 5e-3
    yield
    virtual_time.read_s = READ_S


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds", "slow_clock")
def test_both_phases_are_measured_with_small_and_large_batches(tmp_path: Path) -> None:
    result = run(asked("devices", tmp_path, None, *SETTINGS, devices="cpu:1,cpu:2", batches="2,8", sides="16,8"))

    table, series, rules = result.tables
    assert [row[:2] for row in table.rows] == [
        ("statistics, small", 8), ("statistics, large", 16), ("gradients, small", 8), ("gradients, large", 16),
    ]  # fmt: skip
    times = {row[0]: row[2:4] for row in table.rows}
    for phase in ("statistics", "gradients"):
        for small, large in zip(times[f"{phase}, small"], times[f"{phase}, large"], strict=True):
            assert small > 0, phase  # type: ignore[operator]
            assert large > 0, phase  # type: ignore[operator]
    assert [row[:3] for row in series.rows] == [["batch", 2, 8], ["batch", 8, 8], ["size", 2, 8], ["size", 2, 16]]
    criteria = {row[0]: row[2:] for row in rules.rows}
    assert criteria["channels"] == [4, "CPU", 4, "CPU"]
    assert criteria["pixels per side"] == [8, "CPU", 16, "CPU"]
    assert criteria["samples per update"] == [2, "CPU", 2, "CPU"]
    assert result.headline.startswith("cpu:2 against cpu:1: ")
    assert set(json.loads(result.files[0].read_text())["crossovers"]) == {"batch", "size"}
    assert not result.skipped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cpu,tpu", "tpu is not a device of this machine"),
        ("cpu,cuda:99", "cuda:99 is not a device of this machine"),
        ("cpu:0,cpu:1", "cpu:0 is not a device"),
        ("cpu", "two different devices"),
        ("cpu,cpu", "two different devices"),
        ("cpu,", "nothing is not a device"),
        ("cpu:1,cpu:99999", "cpu:99999 is not a device of this machine"),
        (f"cpu:1,cpu:{'9' * 5000}", "is not a device of this machine"),
    ],
)
def test_a_missing_device_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(asked("devices", tmp_path, None, *SETTINGS, devices=text))


@pytest.mark.parametrize(("key", "text"), [("batches", "0"), ("batches", "-2"), ("sides", "1.5")])
def test_invalid_numbers_are_rejected(tmp_path: Path, key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}={text}.*must be"):
        run(asked("devices", tmp_path, None, **{key: text}))


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds", "slow_clock")
def test_any_task_can_be_compared_by_batch_size(tmp_path: Path) -> None:
    """The task has no fit phase, and all samples have the same size."""
    task = tmp_path / "plain.py"
    task.write_text(PLAIN)
    found = run(asked("devices", tmp_path, task, devices="cpu:1,cpu:2", batches="8,2"))

    table, series, rules = found.tables
    assert [row[:2] for row in table.rows] == [("gradients, small", 2), ("gradients, large", 8)]
    assert table.columns[1] == "samples"
    assert [row[:3] for row in series.rows] == [["batch", 2, None], ["batch", 8, None]]
    assert {row[0]: row[2] for row in rules.rows}["samples per update"] == 2
    assert set(json.loads(found.files[0].read_text())["crossovers"]) == {"batch"}
    assert not found.skipped


PLAIN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from runner import Task

class Plain(Task):
    def __init__(self):
        self.model = nn.Linear(4, 1)

    def dataset(self, split):
        return TensorDataset(torch.ones(32, 4))

    def loss(self, model, batch):
        return model(batch[0]).square().sum(), len(batch[0])

def build():
    return Plain()
"""
