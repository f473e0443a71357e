"""Samples of the machine: reading the file, time-weighted means, energy and gaps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runner.base.errors import DataError, InputMissing
from runner.monitor.samples import (
    COLUMNS,
    SampledGpu,
    SampleTally,
    Summary,
    SummaryPart,
    summarize_samples,
)
from runner.monitor.samples_file import read_samples


def written(path: Path, *rows: dict[str, object], columns: tuple[str, ...] = COLUMNS) -> Path:
    lines = [",".join(columns), *(",".join(str(row.get(name, "")) for name in columns) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def row(second: float, device: str = "gpu0", **values: object) -> dict[str, object]:
    uuid = {"gpu0": "GPU-a", "gpu1": "GPU-b"}.get(device, "")
    return {"timestamp": f"{second:.3f}", "device": device, "uuid": uuid, "phase": "train", "span_s": 1} | values


def test_a_mean_is_weighted_by_time() -> None:
    tally = SampleTally()
    tally.add("train", 1.0, {"gpu0/util": 100.0})
    tally.add("train", 9.0, {"gpu0/util": 0.0})
    stat = tally.summary({}).whole.metrics["gpu0/util"]

    assert (stat.mean, stat.min, stat.max, stat.seconds) == (10.0, 0.0, 100.0, 10.0)


def test_time_without_readings_does_not_count_in_the_mean() -> None:
    tally = SampleTally()
    tally.add("train", 1.0, {"gpu0/util": 80.0, "cpu/percent": 1.0})
    tally.add("train", 5.0, {"cpu/percent": 1.0})
    metrics = tally.summary({}).whole.metrics

    assert (metrics["gpu0/util"].mean, metrics["gpu0/util"].seconds) == (80.0, 1.0)
    assert metrics["cpu/percent"].seconds == 6.0


def test_the_summary_of_a_run_combines_its_phases() -> None:
    tally = SampleTally()
    tally.add("fit", 1.0, {"cpu/percent": 10.0})
    tally.add("train", 3.0, {"cpu/percent": 50.0})
    summary = tally.summary({"gpu0": SampledGpu("T4", "GPU-a")}, ["a note"])

    assert {name: part.metrics["cpu/percent"].mean for name, part in summary.phases.items()} == {"fit": 10, "train": 50}
    assert summary.whole.metrics["cpu/percent"].mean == 40.0
    assert (summary.whole.seconds, summary.whole.samples) == (4.0, 2)
    assert summary.to_json()["devices"] == {"gpu0": {"name": "T4", "uuid": "GPU-a"}}


def test_energy_is_the_counter_increase_while_monitored() -> None:
    tally = SampleTally()
    for joules, after_gap in ((1000, False), (1300, False), (9000, True), (9100, False), (50, False), (60, False)):
        tally.add("train", 1.0, {"gpu0/energy_j": joules, "gpu0/power_w": 1.0}, after_gap=after_gap)
    summary = tally.summary({})

    assert summary.whole.energy_j == {"gpu0": 300 + 100 + 10}, (
        "without the energy in the gap, and without a counter reset"
    )
    assert "gpu0/energy_j" not in summary.whole.metrics


def test_without_a_counter_energy_is_power_over_time() -> None:
    tally = SampleTally()
    tally.add("train", 2.0, {"gpu0/power_w": 50.0})
    tally.add("train", 1.0, {"gpu0/power_w": 100.0})
    tally.add("train", 1.0, {})

    assert tally.summary({}).whole.energy_j == {"gpu0": 200.0}


def test_throttling_is_a_share_of_the_time_with_readings() -> None:
    tally = SampleTally()
    tally.add("train", 3.0, {"gpu0/throttle_reasons": 4 + 64})
    tally.add("train", 1.0, {"gpu0/throttle_reasons": 1})
    tally.add("train", 6.0, {})
    slowed = tally.summary({}).whole.slowed

    assert slowed == {"gpu0": {"power limit": 0.75, "hardware temperature limit": 0.75}}


def test_nothing_sampled_is_an_empty_summary() -> None:
    assert SampleTally().summary({}) == Summary(SummaryPart())


def test_rows_of_one_moment_are_one_sample(tmp_path: Path) -> None:
    path = written(
        tmp_path / "gpu.csv",
        row(10, util_percent=50, cpu_percent=5, name="Tesla T4"),
        row(10, "gpu1", util_percent=70, cpu_percent=5),
        row(11, util_percent="", cpu_percent=6, name="Tesla T4"),
        row(11, "gpu1", util_percent=71, cpu_percent=6),
    )
    samples = read_samples(path)

    assert len(samples) == 2
    assert samples.times_s.tolist() == [10, 11]
    assert samples.values["cpu/percent"].tolist() == [5, 6]
    assert samples.values["gpu1/util"].tolist() == [70, 71]
    assert samples.values["gpu0/util"][0] == 50
    assert math.isnan(samples.values["gpu0/util"][1]), "an empty cell is not a 0"
    assert samples.devices == {"gpu0": SampledGpu("Tesla T4", "GPU-a"), "gpu1": SampledGpu("", "GPU-b")}
    assert "gpu0/power_w" not in samples.values


def test_unmonitored_time_is_a_gap(tmp_path: Path) -> None:
    path = written(tmp_path / "gpu.csv", *(row(second, energy_j=100 * second) for second in (10, 11, 60, 61)))
    samples = read_samples(path)

    assert samples.gaps().tolist() == [False, False, True, False]
    assert summarize_samples(samples).whole.seconds == 4.0
    assert summarize_samples(samples).whole.energy_j == {"gpu0": 200.0}


def test_a_torn_or_damaged_row_is_skipped_and_reported(tmp_path: Path, screen: Callable[..., None]) -> None:
    path = written(tmp_path / "gpu.csv", row(1, util_percent=5), row(2, util_percent="seven"), row(3, util_percent=6))
    path.write_bytes(path.read_bytes() + b"4.000,train,gp\n\0\0\0\n" + b"nan" + b"," * (len(COLUMNS) - 1))
    samples = read_samples(path)

    assert samples.times_s.tolist() == [1, 3]
    screen("\n".join(samples.notes))


def test_only_memory_errors_while_monitored_count(tmp_path: Path) -> None:
    counts = {1: 5, 2: 5, 50: 0, 51: 0, 99: 0, 100: 2, 101: 3}
    path = written(tmp_path / "gpu.csv", *(row(second, ecc_uncorrected=count) for second, count in counts.items()))
    stat = summarize_samples(read_samples(path)).whole.metrics["gpu0/ecc_uncorrected"]

    assert (stat.min, stat.max) == (0, 3)


def test_the_energy_of_a_run_is_the_sum_over_phases() -> None:
    tally = SampleTally()
    for phase, power, counter in (("fit", 100, None), ("fit", 100, None), ("train", 50, 10), ("train", 50, 70)):
        readings = {"gpu0/power_w": power} | ({} if counter is None else {"gpu0/energy_j": counter})
        tally.add(phase, 1.0, readings)
    tally.add("test", 1.0, {"gpu0/power_w": 30.0}, after_gap=True)
    summary = tally.summary({})

    assert {name: part.energy_j for name, part in summary.phases.items()} == {
        "fit": {"gpu0": 200}, "train": {"gpu0": 60}, "test": {"gpu0": 30},
    }  # fmt: skip
    assert summary.whole.energy_j == {"gpu0": 290}


def test_invalid_files_get_a_message(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="there is no such file"):
        read_samples(tmp_path / "gpu.csv")
    with pytest.raises(InputMissing, match="cannot be read"):
        read_samples(tmp_path)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="is not a table of the monitor"):
        read_samples(tmp_path / "other.csv")
    (tmp_path / "empty.csv").touch()
    with pytest.raises(DataError, match="is not a table of the monitor"):
        read_samples(tmp_path / "empty.csv")


def test_a_row_of_unlimited_length_gets_a_message(tmp_path: Path) -> None:
    path = written(tmp_path / "gpu.csv", row(1))
    path.write_bytes(path.read_bytes() + b"9" * 200_000 + b"\n")

    with pytest.raises(DataError, match="is damaged: field larger than field limit"):
        read_samples(path)


def test_a_file_with_only_a_header_has_no_samples(tmp_path: Path) -> None:
    samples = read_samples(written(tmp_path / "gpu.csv"))

    assert len(samples) == 0
    assert samples.gaps().tolist() == []
    assert summarize_samples(samples) == Summary()


def test_a_damaged_cell_costs_its_row_only(tmp_path: Path) -> None:
    num = 50
    rows = [row(second, util_percent=second % 7, cpu_percent=second % 5) for second in range(num)]
    damaged = {3: {"util_percent": "x"}, 20: {"timestamp": ""}, num - 1: {"cpu_percent": "nan"}}
    samples = read_samples(written(tmp_path / "gpu.csv", *(one | damaged.get(at, {}) for at, one in enumerate(rows))))
    kept = [second for second in range(num) if second not in damaged]
    assert samples.times_s.tolist() == kept
    assert samples.values["gpu0/util"].tolist() == [second % 7 for second in kept]
    assert samples.values["cpu/percent"].tolist() == [second % 5 for second in kept]
    assert len(samples.notes) == 1


def test_readings_may_end(tmp_path: Path) -> None:
    rows = [
        row(second, "gpu0", util_percent=50, power_w=60 if second < 5 else "") if second < 20 else row(second, "cpu")
        for second in range(200)
    ]
    path = written(tmp_path / "gpu.csv", *rows)
    samples = read_samples(path)

    assert samples.times_s.tolist() == list(range(200))
    assert np.flatnonzero(samples.values["gpu0/util"] == 50).tolist() == list(range(20))
    assert np.flatnonzero(samples.values["gpu0/power_w"] == 60).tolist() == list(range(5))


@pytest.mark.parametrize("num_zeros", [1, 70_000, 200_000])
def test_zero_bytes_that_a_crash_leaves_cost_no_samples(tmp_path: Path, num_zeros: int) -> None:
    path = written(tmp_path / "gpu.csv", row(1), row(2))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"\0" * num_zeros, b"\n", b"\0" * num_zeros, *lines[2:]]))
    samples = read_samples(path)

    assert samples.times_s.tolist() == [1, 2]
    assert samples.notes == ()


@pytest.mark.parametrize(("quote", "end"), [("", "\r\n"), ('"', "\n"), ('"', "\r\n")])
def test_a_file_that_another_program_wrote_again_has_the_same_samples(tmp_path: Path, quote: str, end: str) -> None:
    columns = (*(name for name in COLUMNS if name != "name"), "name")  # in the last cell, a text
    path = written(
        tmp_path / "gpu.csv",
        *(row(second, phase="\u00fcben", name="L4", util_percent=second % 7) for second in range(30)),
        columns=columns,
    )
    expected = read_samples(path)
    lines = [
        ",".join(f"{quote}{cell}{quote}" for cell in line.split(",")) for line in path.read_text().split("\n")[:-1]
    ]
    path.write_bytes("".join(line + end for line in lines).encode())
    samples = read_samples(path)

    assert samples.times_s.tolist() == list(range(30))
    assert samples.values["gpu0/util"].tolist() == expected.values["gpu0/util"].tolist()
    assert (samples.phases, samples.devices, samples.notes) == (expected.phases, expected.devices, ())


def test_a_comma_in_a_quoted_cell_belongs_to_the_cell(tmp_path: Path) -> None:
    samples = read_samples(written(tmp_path / "gpu.csv", row(1, phase='"train, then ""test"""'), row(2)))

    assert samples.phases == ('train, then "test"', "train")


@pytest.mark.parametrize("num_cells", range(1, len(COLUMNS), 5))
def test_both_parts_of_a_torn_line_are_left_out(tmp_path: Path, num_cells: int) -> None:
    """Together they have the number of cells of a row."""
    path = written(tmp_path / "gpu.csv", row(1), row(2, util_percent=50), row(3))
    lines = path.read_text().splitlines()
    cells = lines[2].split(",")
    lines[2] = ",".join(cells[:num_cells]) + "\n" + ",".join(cells[num_cells:])
    path.write_text("\n".join(lines) + "\n")
    samples = read_samples(path)

    assert samples.times_s.tolist() == [1, 3]
    assert samples.phases == ("train", "train")
    assert samples.notes[0].split()[0] == "2"
