"""The bottleneck of a run is reported with evidence, and only if the measured times show one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.stopwatch import BETWEEN, PARTS
from runner.console.bottleneck import KINDS, MEANINGS, describe_bottleneck, format_time_table, summarize_shares

ALL = ("starting", "first_update", *PARTS, *BETWEEN, "closing")


def test_each_timed_part_has_a_kind_with_a_description() -> None:
    assert sorted(part for parts in KINDS.values() for part in parts) == sorted(ALL)
    assert KINDS.keys() == MEANINGS.keys()


@pytest.mark.parametrize(
    ("parts_s", "says"),
    [
        (
            {"forward": 3.0, "backward": 6.0, "data": 0.5},
            "compute: 90% of the time (9.0 of 10.0 s) was spent computing (forward 30%, backward 60%)",
        ),
        (
            {"forward": 3.0, "backward": 4.0, "wait": 3.0},
            (
                "compute: 70% of the time (7.0 of 10.0 s) was spent computing (forward 30%, backward 40%)"
                "; also other ranks 30%"
            ),
        ),
        (
            {"forward": 2.0, "data": 8.0},
            "data: 80% of the time (8.0 of 10.0 s) was spent waiting for the next batch; also compute 20%",
        ),
        ({"forward": 0.5}, "the rest: 95% of the time (9.5 of 10.0 s) was not accounted for"),
        (
            {"forward": 4.0, "data": 3.5, "evaluation": 2.0, "hooks": 0.5},
            "no single bottleneck: compute 40%, data 35%, evaluation 20%",
        ),
        (
            {"starting": 2.0, "forward": 3.0, "data": 5.0},
            (
                "data: 62% of the time after the first update (5.0 of 8.0 s) was spent waiting for the next batch"
                "; also compute 38%; starting and the first update took 2.0 s"
            ),
        ),
        (
            {"first_update": 2.0, "forward": 3.9, "data": 3.1, "saving": 1.0},
            (
                "no single bottleneck after the first update: compute 49%, data 39%, saving 12%"
                "; starting and the first update took 2.0 s"
            ),
        ),
        ({}, "unknown: the time was not measured"),
    ],
)
def test_the_bottleneck_is_reported_with_its_evidence(parts_s: dict[str, float], says: str) -> None:
    assert describe_bottleneck(parts_s, 10.0) == says
    assert describe_bottleneck(parts_s, 0.0) == describe_bottleneck({}, 10.0)


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("transfer", "transfer"), ("wait", "other ranks"), ("saving", "saving"), ("drawing", "logging"),
        ("first_update", "start-up"), ("evaluation", "evaluation"), ("hooks", "hooks"), ("closing", "the end"),
    ],
)  # fmt: skip
def test_every_kind_of_work_can_be_the_bottleneck(part: str, kind: str) -> None:
    says = describe_bottleneck({part: 6.0, "forward": 4.0}, 10.0)
    assert says.startswith(f"{kind}: 60% ")
    assert " (6.0 of 10.0 s) " in says
    assert MEANINGS[kind] in says
    assert says.endswith(" compute 40%")


@pytest.mark.parametrize(
    ("parts_s", "busy", "ends"),
    [
        ({"forward": 9.5}, {"gpu0": 93.4}, "; the GPU was busy 93% of the time"),
        ({"forward": 9.5}, {"gpu0": 31.0}, "; the GPU was busy 31% of the time: it waits for the host's commands"),
        ({"data": 9.5}, {"gpu0": 5.0}, "; the GPU was busy 5% of the time"),
        ({"forward": 9.5}, {"gpu0": 93.0, "gpu1": 12.0}, "; gpu0, gpu1 were busy 93%, 12% of the time"),
        ({"forward": 9.5}, {"gpu0": 9.0, "gpu1": 12.0},
         "; gpu0, gpu1 were busy 9%, 12% of the time: they wait for the host's commands"),
    ],
)  # fmt: skip
def test_gpu_utilization_is_shown_if_known(parts_s: dict[str, float], busy: Mapping[str, float], ends: str) -> None:
    assert describe_bottleneck(parts_s, 10.0, busy).endswith(ends)
    assert "busy" not in describe_bottleneck(parts_s, 10.0)


@given(st.dictionaries(st.sampled_from(ALL), st.floats(0.0, 100.0), min_size=1), st.floats(0.0, 50.0))
def test_the_shares_in_the_table_add_up(parts_s: dict[str, float], rest_s: float) -> None:
    total_s = sum(parts_s.values()) + rest_s + 1.0
    lines = format_time_table(parts_s, total_s, updates=3)
    shares = [float(line.partition("%")[0].rpartition(" ")[2]) for line in lines]
    assert sum(shares) == pytest.approx(100.0, abs=0.5 + 0.051 * len(lines)), (
        "shares may differ by rounding, and a remainder below 0.5 % is not shown"
    )
    assert all(len(line) <= 80 for line in lines)


def test_a_one_time_part_is_not_shown_per_update(screen: Callable[..., None]) -> None:
    parts_s = {"starting": 2.0, "forward": 4.0, "evaluation": 4.0}
    screen("\n".join(format_time_table(parts_s, 10.0, updates=8)))
    assert format_time_table(parts_s, 10.0)[0] == "forward     40.0%  4.00 s"


def test_a_phase_is_summarized_briefly(screen: Callable[..., None]) -> None:
    screen(summarize_shares({"forward": 5.0, "data": 3.0, "hooks": 0.5, "starting": 1.5}, 10.0))
    assert summarize_shares({}, 10.0) == ""
