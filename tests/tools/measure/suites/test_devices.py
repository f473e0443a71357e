"""Laws of `accel-run benchmark suite=devices`: lines cross where they were planted, and doubt is said."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from runner.base.errors import ConfigError
from runner.plan.inventory import Cpu, Device, Inventory
from runner.tools.measure.comparison_result import ComparisonResult, Variant, VariantResult
from runner.tools.measure.suite_common import limits_of
from runner.tools.measure.suites.devices import Blocks, blocks_of, crossing, devices_of, run
from tests.tools.measure.planted_time import READ_S, Planted
from tests.tools.measure.suites.asked import asked

NAMES = ("cpu", "cuda:0")
SETTINGS = ("task.num_cubes=32", "task.channels=4")


def taken(
    fixed_s: float, per_sample_s: float, noise: float, seed: int = 0, batches: Sequence[int] = (2, 4, 8, 16, 32)
) -> Blocks:
    """Return nine blocks of a device at each of the batches."""
    rng = np.random.default_rng(seed)
    return {
        batch: [(fixed_s + per_sample_s * batch) * float(np.exp(noise * rng.standard_normal())) for _ in range(9)]
        for batch in batches
    }


def test_lines_cross_where_they_were_planted() -> None:
    """1 ms per sample without more, against 6 ms and 0.25 ms per sample: the same at 8 samples."""
    found = crossing(NAMES, taken(0.0, 1e-3, 0.02), taken(6e-3, 0.25e-3, 0.02, 1), "samples")

    assert found is not None
    assert found.at == pytest.approx(8, rel=0.1)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 8 < found.high
    assert found.said.startswith("cuda:0 ")
    assert max(found.residuals) < 0.05
    assert found.lines[1].fixed_s == pytest.approx(6e-3, rel=0.1)


def test_what_is_slower_everywhere_is_said_to_be() -> None:
    found = crossing(NAMES, taken(1e-3, 1e-4, 0.02), taken(5e-3, 2e-4, 0.02, 1), "samples")

    assert found is not None
    assert found.at is None
    assert found.said.startswith("no crossing: cpu ")


def test_devices_that_take_the_same_have_no_crossing() -> None:
    for seed in range(20):
        found = crossing(NAMES, taken(1e-3, 1e-3, 0.05, 2 * seed), taken(1e-3, 1e-3, 0.05, 2 * seed + 1), "samples")
        assert found is not None
        assert found.at is None, seed


def test_times_that_are_no_line_are_said_to_be_none() -> None:
    bent = {batch: [batch**3 / 1e5] * 9 for batch in (2, 4, 8, 16, 32)}

    found = crossing(NAMES, bent, taken(5e-3, 2e-4, 0.0), "samples")

    assert found is not None
    assert found.at is None
    assert "does not fit" in found.said


def test_one_point_is_no_line() -> None:
    assert crossing(NAMES, {2: [1.0]}, taken(1.0, 1.0, 0.0), "samples") is None


def test_two_points_tell_nothing_of_how_well_a_line_fits() -> None:
    found = crossing(NAMES, taken(1e-3, 4e-4, 0.0, batches=(2, 16)), taken(5e-3, 2e-4, 0.0, batches=(2, 16)), "samples")

    assert found is not None
    assert all(map(math.isnan, found.residuals))


def test_devices_that_were_not_measured_at_the_same_points_have_no_crossing() -> None:
    assert (
        crossing(NAMES, taken(1.0, 1.0, 0.0, batches=(2, 4)), taken(1.0, 1.0, 0.0, batches=(4, 8)), "samples") is None
    )


def test_a_point_of_too_few_blocks_is_none() -> None:
    """Of one block or two nobody knows the spread, and the bootstrap would be sure of them."""
    least, _ = limits_of(1.0).rounds
    cells = [
        VariantResult(Variant(f"cpu, batch {batch}, side 8"), dict.fromkeys(range(num), 5.0))
        for batch, num in ((2, least), (4, least - 1))
    ]

    assert blocks_of(ComparisonResult(cells, "interleaved"), "cpu", [(2, 8), (4, 8)], 0) == {2: [0.005] * least}


def test_a_gpu_by_two_names_is_one_device() -> None:
    gpu = Device("cuda", 0, "a GPU", "GPU-0", 2**30, capability=(8, 0))
    here = Inventory((gpu,), Cpu("a CPU", 1, 2, 2**30))

    assert list(devices_of("cpu,cuda", here)) == ["cpu", "cuda:0"]
    with pytest.raises(ConfigError, match="two different devices"):
        devices_of("cuda,cuda:0", here)


@pytest.fixture
def slow_clock(planted: Planted) -> Iterator[None]:
    """A block of what takes no time but that of looking at the clock has few updates."""
    planted.read_s = 5e-3
    yield
    planted.read_s = READ_S


@pytest.mark.usefixtures("few_rounds", "slow_clock")
def test_both_phases_are_measured_small_and_large(tmp_path: Path) -> None:
    found = run(asked("devices", tmp_path, None, *SETTINGS, devices="cpu:1,cpu:2", batches="2,8", sides="16,8"))

    table, fits, rules = found.tables
    assert [row[:2] for row in table.rows] == [
        ("statistics, small", 8), ("statistics, large", 16), ("gradients, small", 8), ("gradients, large", 16),
    ]  # fmt: skip
    times = {row[0]: row[2:4] for row in table.rows}
    for phase in ("statistics", "gradients"):
        for small, large in zip(times[f"{phase}, small"], times[f"{phase}, large"], strict=True):
            assert small > 0, phase  # type: ignore[operator]
            assert large > 0, phase  # type: ignore[operator]
    assert [row[:2] for row in fits.rows] == [
        ("batch", "cpu:1"), ("batch", "cpu:2"), ("size", "cpu:1"), ("size", "cpu:2"),
    ]  # fmt: skip
    told = {row[0]: row[2:] for row in rules.rows}
    assert told["channels"] == [4, "CPU", 4, "CPU"]
    assert told["pixels of a side"] == [8, "CPU", 16, "CPU"]
    assert told["samples per update"] == [2, "CPU", 2, "CPU"]
    assert found.headline.startswith("cpu:2 against cpu:1: ")
    assert set(json.loads(found.files[0].read_text())["crossings"]) == {"batch", "size"}
    assert not found.skipped


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cpu,tpu", "tpu is no device of this machine"),
        ("cpu,cuda:99", "cuda:99 is no device of this machine"),
        ("cpu:0,cpu:1", "cpu:0 is no device"),
        ("cpu", "two different devices"),
        ("cpu,cpu", "two different devices"),
        ("cpu,", "nothing is no device"),
        ("cpu:1,cpu:99999", "cpu:99999 is no device of this machine"),
        (f"cpu:1,cpu:{'9' * 5000}", "is no device of this machine"),
    ],
)
def test_a_device_that_is_not_here_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(asked("devices", tmp_path, None, *SETTINGS, devices=text))


@pytest.mark.parametrize(("key", "text"), [("batches", "0"), ("batches", "-2"), ("sides", "1.5"), ("by", "color")])
def test_numbers_that_are_none_are_refused(tmp_path: Path, key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}={text}.*must be"):
        run(asked("devices", tmp_path, None, **{key: text}))


def test_another_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="task=gpt: is not measured by this suite"):
        run(asked("devices", tmp_path, None, "task=gpt"))
