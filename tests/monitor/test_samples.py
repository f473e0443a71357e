"""Samples of the machine: reading the file, time-weighted means, energy and gaps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.base.errors import DataError, InputMissing
from runner.monitor import sample_columns, thinning
from runner.monitor.sample_columns import METRICS, PIECE_SAMPLES, summarize_samples
from runner.monitor.samples import COLUMNS, MachineSamples, SampledGpu, SampleTally, Summary, SummaryPart
from runner.monitor.samples_file import read_samples
from runner.monitor.thinning import MAX_GROUPS, read_thinned


def write(path: Path, *rows: dict[str, object], columns: tuple[str, ...] = COLUMNS) -> Path:
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


def test_energy_is_the_increase_of_the_counter_during_monitoring() -> None:
    tally = SampleTally()
    for joules, after_gap in ((1000, False), (1300, False), (9000, True), (9100, False), (50, False), (60, False)):
        tally.add("train", 1.0, {"gpu0/energy_j": joules, "gpu0/power_w": 1.0}, after_gap=after_gap)
    summary = tally.summary({})

    assert summary.whole.energy_j == {"gpu0": 300 + 100 + 10}, (
        "energy in the gap, and resets of the counter, must not count"
    )
    assert "gpu0/energy_j" not in summary.whole.metrics


def test_without_a_counter_energy_is_the_integral_of_power() -> None:
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


def test_no_samples_give_an_empty_summary() -> None:
    assert SampleTally().summary({}) == Summary(SummaryPart())


def test_rows_with_the_same_timestamp_are_one_sample(tmp_path: Path) -> None:
    path = write(
        tmp_path / "gpu.csv",
        row(10, util_percent=50, cpu_percent=5, name="Tesla T4"),
        row(10, "gpu1", util_percent=70, cpu_percent=5),
        row(11, util_percent="", cpu_percent=6),
        row(11, "gpu1", util_percent=71, cpu_percent=6),
    )
    samples = read_samples(path)

    assert len(samples) == 2
    assert samples.times_s.tolist() == [10, 11]
    assert samples.values["cpu/percent"].tolist() == [5, 6]
    assert samples.values["gpu1/util"].tolist() == [70, 71]
    assert samples.values["gpu0/util"][0] == 50
    assert math.isnan(samples.values["gpu0/util"][1]), "an empty cell must not count as 0"
    assert samples.devices == {"gpu0": SampledGpu("Tesla T4", "GPU-a"), "gpu1": SampledGpu("", "GPU-b")}
    assert "gpu0/power_w" not in samples.values


def test_unmonitored_time_is_a_gap(tmp_path: Path) -> None:
    path = write(tmp_path / "gpu.csv", *(row(second, energy_j=100 * second) for second in (10, 11, 60, 61)))
    samples = read_samples(path)

    assert samples.gaps().tolist() == [False, False, True, False]
    assert summarize_samples(samples).whole.seconds == 4.0
    assert summarize_samples(samples).whole.energy_j == {"gpu0": 200.0}


def test_a_file_of_an_older_version_is_read(tmp_path: Path) -> None:
    columns = COLUMNS[:12]
    path = write(tmp_path / "gpu.csv", *(row(second, util_percent=9) for second in (0, 1, 2, 500)), columns=columns)
    samples = read_samples(path)

    assert samples.spans_s.tolist() == [0, 1, 1, 3], "a gap must count as at most three samples"
    assert summarize_samples(samples).whole.metrics["gpu0/util"].mean == 9.0


def test_incomplete_or_damaged_rows_are_skipped_and_reported(tmp_path: Path, screen: Callable[..., None]) -> None:
    path = write(tmp_path / "gpu.csv", row(1, util_percent=5), row(2, util_percent="seven"), row(3, util_percent=6))
    path.write_bytes(path.read_bytes() + b"4.000,train,gp\n\0\0\0\n" + b"nan" + b"," * (len(COLUMNS) - 1))
    samples = read_samples(path)

    assert samples.times_s.tolist() == [1, 3]
    screen("\n".join(samples.notes))


def test_another_gpu_with_the_same_index_is_reported(tmp_path: Path, screen: Callable[..., None]) -> None:
    path = write(tmp_path / "gpu.csv", row(1), row(2, uuid="GPU-new"))

    screen("\n".join(read_samples(path).notes))


def test_another_gpu_is_summarized_separately(tmp_path: Path) -> None:
    before = [
        row(second, util_percent=10, memory_used_gib=8, memory_total_gib=10, energy_j=second) for second in (1, 2)
    ]
    after = [
        row(second, uuid="GPU-new", util_percent=90, memory_used_gib=16, memory_total_gib=80, energy_j=1000 + second)
        for second in (3, 4)
    ]
    summary = summarize_samples(read_samples(write(tmp_path / "gpu.csv", *before, *after)))
    metrics = summary.whole.metrics

    assert summary.devices == {"gpu0": SampledGpu("", "GPU-new"), "gpu1": SampledGpu("", "GPU-a")}
    assert [metrics[f"gpu{n}/memory_total_gib"].max for n in (0, 1)] == [80, 10]
    assert [metrics[f"gpu{n}/util"].mean for n in (0, 1)] == [90, 10]
    assert summary.whole.energy_j == {"gpu0": 1, "gpu1": 1}


def test_reordered_gpus_keep_their_identity(tmp_path: Path) -> None:
    rows = [row(1, util_percent=1), row(1, "gpu1", util_percent=2), row(2, uuid="GPU-b", util_percent=2)]
    samples = read_samples(write(tmp_path / "gpu.csv", *rows, row(2, "gpu1", uuid="GPU-a", util_percent=1)))

    assert {name: device.uuid for name, device in samples.devices.items()} == {"gpu0": "GPU-b", "gpu1": "GPU-a"}
    assert (samples.values["gpu0/util"].tolist(), samples.values["gpu1/util"].tolist()) == ([2, 2], [1, 1])


def test_only_memory_errors_while_monitored_count(tmp_path: Path) -> None:
    counts = {1: 5, 2: 5, 50: 0, 51: 0, 99: 0, 100: 2, 101: 3}
    path = write(tmp_path / "gpu.csv", *(row(second, ecc_uncorrected=count) for second, count in counts.items()))
    stat = summarize_samples(read_samples(path)).whole.metrics["gpu0/ecc_uncorrected"]

    assert (stat.min, stat.max) == (0, 3)


def test_time_stays_monotonic_if_a_clock_is_set_back(tmp_path: Path, screen: Callable[..., None]) -> None:
    """The change of the clock is a gap."""
    path = write(tmp_path / "gpu.csv", *(row(second, energy_j=100 + n) for n, second in enumerate((50, 51, 20, 21))))
    samples = read_samples(path)

    assert samples.gaps().tolist() == [False, False, True, False]
    assert samples.times_s.tolist() == sorted(samples.times_s.tolist())
    assert summarize_samples(samples).whole.energy_j == {"gpu0": 2.0}, "the counter was not sampled during the gap"
    screen("\n".join(samples.notes))


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


def test_invalid_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="there is no such file"):
        read_samples(tmp_path / "gpu.csv")
    with pytest.raises(InputMissing, match="cannot be read"):
        read_samples(tmp_path)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="was not written by the monitor"):
        read_samples(tmp_path / "other.csv")
    (tmp_path / "empty.csv").touch()
    with pytest.raises(DataError, match="was not written by the monitor"):
        read_samples(tmp_path / "empty.csv")


def test_a_too_long_row_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "gpu.csv", row(1))
    path.write_bytes(path.read_bytes() + b"9" * 200_000 + b"\n")

    with pytest.raises(DataError, match="is damaged: field larger than field limit"):
        read_samples(path)


def test_a_file_with_only_a_header_has_no_samples(tmp_path: Path) -> None:
    samples = read_samples(write(tmp_path / "gpu.csv"))

    assert len(samples) == 0
    assert samples.gaps().tolist() == []
    assert summarize_samples(samples) == Summary()


@pytest.mark.parametrize("seed", range(8))
def test_adding_columns_or_single_samples_gives_the_same_sums(seed: int) -> None:
    """The samples have phases that return, gaps, missing readings, counter resets, and changing throttle reasons."""
    random = np.random.default_rng(seed)
    num = 60
    spans = random.uniform(0.5, 2.0, num)
    times = np.cumsum(spans + random.choice([0.0, 30.0], num, p=[0.9, 0.1]))
    steps = random.integers(0, 50, num) * random.choice([1, -20], num, p=[0.9, 0.1])
    values: dict[str, Any] = {
        "cpu/percent": random.uniform(0, 100, num),
        "gpu0/power_w": random.uniform(50, 300, num),
        "gpu0/energy_j": 1000.0 + np.cumsum(steps),
        "gpu0/ecc_corrected": np.cumsum(random.integers(0, 2, num)).astype(float),
        "gpu0/throttle_reasons": random.choice([0.0, 4.0, 36.0], num),
        "gpu1/power_w": random.uniform(50, 300, num),
    }
    for column in values.values():
        column[random.random(num) < 0.3] = math.nan
    phases = tuple(random.choice(["", "fit", "train"], num).tolist())
    samples = MachineSamples(times, spans, phases, values)

    tally = SampleTally()
    for row, after_gap in enumerate(samples.gaps().tolist()):
        readings = {name: float(column[row]) for name, column in values.items() if not math.isnan(column[row])}
        tally.add(phases[row], float(spans[row]), readings, after_gap=after_gap)
    single, by_columns = (one.to_json() for one in (tally.summary({}), summarize_samples(samples)))
    assert by_columns == single, "sums must agree to six digits, because the order of additions differs"


def test_a_damaged_cell_loses_only_its_row(tmp_path: Path) -> None:
    num = 2 * PIECE_SAMPLES
    rows = [row(second, util_percent=second % 7, cpu_percent=second % 5) for second in range(num)]
    damaged = {3: {"util_percent": "x"}, PIECE_SAMPLES: {"timestamp": ""}, num - 1: {"cpu_percent": "nan"}}
    samples = read_samples(write(tmp_path / "gpu.csv", *(one | damaged.get(at, {}) for at, one in enumerate(rows))))
    kept = [second for second in range(num) if second not in damaged]
    assert samples.times_s.tolist() == kept
    assert samples.values["gpu0/util"].tolist() == [second % 7 for second in kept]
    assert samples.values["cpu/percent"].tolist() == [second % 5 for second in kept]
    assert len(samples.notes) == 1


def test_damaged_cells_that_are_not_read_lose_no_row(tmp_path: Path) -> None:
    rows = [
        row(10, util_percent=50, cpu_percent=5), row(10, "gpu1", util_percent=70, cpu_percent="x"),
        row(11, "cpu", util_percent="x", cpu_percent=6),
    ]  # fmt: skip
    samples = read_samples(write(tmp_path / "gpu.csv", *rows))
    assert samples.values["cpu/percent"].tolist() == [5, 6]
    assert samples.values["gpu1/util"].tolist()[0] == 70
    assert samples.notes == ()


def long_file(path: Path) -> Path:
    """Write three pieces of samples with a gap, a clock that is set back, and a GPU that another one replaces."""
    random = np.random.default_rng(0)
    rows, energy_j, second = [], 0, 0
    for index in range(3 * PIECE_SAMPLES):
        second += {1000: 500, PIECE_SAMPLES: -50}.get(index, 1)
        energy_j += int(random.integers(50, 300))
        uuid = "GPU-a" if index < 20_000 else "GPU-b"
        cells = {} if index % 10 == 3 else {"util_percent": random.integers(0, 100), "energy_j": energy_j}
        phase = "tune" if index < 3000 else "train"
        rows.append(row(second, uuid=uuid, phase=phase, power_w=random.integers(50, 300), cpu_percent=7, **cells))
    return write(path, *rows)


def test_thinned_samples_keep_the_summary(tmp_path: Path) -> None:
    """The summary has the same extremes and means."""
    path = long_file(tmp_path / "gpu.csv")
    samples, thinned = read_samples(path), read_thinned(path, METRICS)

    assert len(thinned) <= MAX_GROUPS
    assert thinned.counts.sum() == len(samples)
    assert thinned.summary.to_json() == summarize_samples(samples).to_json()
    assert set(thinned.values) == set(samples.values)
    for name, column in samples.values.items():
        num, lowest, highest = thinned.ranges[name]
        assert num.sum() == np.isfinite(column).sum()
        assert np.nanmin(lowest) == np.nanmin(column)
        assert np.nanmax(highest) == np.nanmax(column)
        assert math.isclose(thinned.mean(name), np.nanmean(column), rel_tol=1e-12)


def test_thinned_samples_keep_gaps_phases_and_end_times(tmp_path: Path) -> None:
    path = long_file(tmp_path / "gpu.csv")
    samples, thinned = read_samples(path), read_thinned(path, METRICS)
    changes = [at for at in range(1, len(samples)) if samples.phases[at] != samples.phases[at - 1]]
    of_groups = [at for at in range(1, len(thinned)) if thinned.phases[at] != thinned.phases[at - 1]]

    assert thinned.times_s[thinned.gaps()].tolist() == samples.times_s[samples.gaps()].tolist()
    assert thinned.times_s[of_groups].tolist() == samples.times_s[changes].tolist()
    assert (thinned.times_s[0], thinned.ends_s[-1]) == (samples.times_s[0], samples.times_s[-1])
    assert thinned.notes == samples.notes
    assert thinned.devices == samples.devices


def test_only_the_requested_metrics_are_read(tmp_path: Path) -> None:
    path = long_file(tmp_path / "gpu.csv")

    assert set(read_thinned(path, {"util", "cpu/percent"}).values) == {"gpu0/util", "gpu1/util", "cpu/percent"}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of a few rows, pieces of 8 samples, and about 16 groups."""
    monkeypatch.setattr(sample_columns, "BLOCK_BYTES", 300)
    monkeypatch.setattr(sample_columns, "PIECE_SAMPLES", 8)
    monkeypatch.setattr(thinning, "MAX_GROUPS", 16)


@pytest.mark.usefixtures("small_pieces")
def test_readings_of_a_gpu_may_end_before_the_file(tmp_path: Path) -> None:
    rows = [
        row(second, "gpu0", util_percent=50, power_w=60 if second < 5 else "") if second < 20 else row(second, "cpu")
        for second in range(200)
    ]
    path = write(tmp_path / "gpu.csv", *rows)
    samples = read_samples(path)

    assert samples.times_s.tolist() == list(range(200))
    assert np.flatnonzero(samples.values["gpu0/util"] == 50).tolist() == list(range(20))
    assert np.flatnonzero(samples.values["gpu0/power_w"] == 60).tolist() == list(range(5))
    assert read_thinned(path, METRICS).summary.to_json() == summarize_samples(samples).to_json()


@pytest.mark.parametrize("num_zeros", [1, 70_000, 200_000])
def test_zero_bytes_left_by_a_crash_lose_no_samples(tmp_path: Path, num_zeros: int) -> None:
    path = write(tmp_path / "gpu.csv", row(1), row(2))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"\0" * num_zeros, b"\n", b"\0" * num_zeros, *lines[2:]]))
    samples = read_samples(path)

    assert samples.times_s.tolist() == [1, 2]
    assert len(samples.notes) == 1


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("quote", "end"), [("", "\r\n"), ('"', "\n"), ('"', "\r\n")])
def test_a_file_rewritten_by_other_programs_is_read(tmp_path: Path, quote: str, end: str) -> None:
    """The rewritten file has the same samples."""
    columns = (*(name for name in COLUMNS if name != "name"), "name")  # of which the last cell contains text
    path = write(
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


def test_a_quoted_comma_does_not_end_a_cell(tmp_path: Path) -> None:
    samples = read_samples(write(tmp_path / "gpu.csv", row(1, phase='"train, then ""test"""'), row(2)))

    assert samples.phases == ('train, then "test"', "train")


def test_a_carriage_return_within_a_line_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is damaged"):
        read_samples(write(tmp_path / "gpu.csv", row(1, phase="one\rtwo")))


@pytest.mark.parametrize("num_cells", range(1, len(COLUMNS), 5))
def test_both_parts_of_an_interrupted_line_are_skipped(tmp_path: Path, num_cells: int) -> None:
    """Together, the two parts have as many cells as a row."""
    path = write(tmp_path / "gpu.csv", row(1), row(2, util_percent=50), row(3))
    lines = path.read_text().splitlines()
    cells = lines[2].split(",")
    lines[2] = ",".join(cells[:num_cells]) + "\n" + ",".join(cells[num_cells:])
    path.write_text("\n".join(lines) + "\n")
    samples = read_samples(path)

    assert samples.times_s.tolist() == [1, 3]
    assert samples.phases == ("train", "train")
    assert samples.notes[0].split()[0] == "2"


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("num", range(9, 40))
def test_spans_of_older_files_do_not_depend_on_piece_size(tmp_path: Path, num: int) -> None:
    """This holds for any number of samples in the last piece. The last interval is a gap."""
    times = [*range(num), num + 500]
    columns = tuple(name for name in COLUMNS if name != "span_s")
    samples = read_samples(write(tmp_path / "gpu.csv", *(row(second) for second in times), columns=columns))

    assert samples.spans_s.tolist() == [0, *[1] * (num - 1), 3]
    assert np.flatnonzero(samples.gaps()).tolist() == [num]


@pytest.mark.usefixtures("small_pieces")
def test_many_gaps_do_not_reduce_the_detail_of_samples(tmp_path: Path) -> None:
    """Twice as many gaps as groups, in more pieces than an integer has bits, precede samples without gaps."""
    second, rows = 0, []
    for index in range(1000):
        second += 10 if index < 700 and index % 20 == 0 else 1
        rows.append(row(second, util_percent=index % 7))
    path = write(tmp_path / "gpu.csv", *rows)
    samples, thinned = read_samples(path), read_thinned(path, METRICS)

    num_gaps = int(samples.gaps().sum())
    assert num_gaps > 2 * thinning.MAX_GROUPS
    assert thinned.counts.sum() == 1000
    assert len(thinned) < 4 * num_gaps
    assert thinned.times_s[thinned.gaps()].tolist() == samples.times_s[samples.gaps()].tolist()
    assert thinned.counts[thinned.times_s > samples.times_s[700]].max() <= 64
    assert thinned.summary.to_json() == summarize_samples(samples).to_json()
