"""Comparisons stay within their budget, whatever the start-up times."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.base.errors import AccelRunError
from runner.config.request import Request
from runner.tools.measure import compare, comparison_result
from runner.tools.measure.compare import MIN_ROUNDS, SHORT_BUDGET, CompareLimits, Comparison
from runner.tools.measure.comparison_result import (
    NO_TIME_LEFT,
    START_TIMED_OUT,
    ComparisonResult,
    Variant,
    VariantResult,
    merge_reports,
)
from runner.tools.measure.fork_server import ReplyTimeout, VariantProcess
from runner.tools.measure.statistics import Ratio

LIMITS = CompareLimits(budget_s=60, rounds=(6, 12))


class Clock:
    """A clock that only fake processes advance."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeProcess(VariantProcess):
    """A variant whose overrides set its times: `start_s`, `compile` (a start 10 times as long), `update_s`, `noise`."""

    def __init__(self, number: int, clock: Clock, until: float) -> None:  # no process is forked
        self.number, self.clock, self._clock, self.deadline, self.order = number, clock, clock, until, dict[str, Any]()
        self.random, self.words = random.Random(0), dict[str, str]()
        self._connection: Any = self

    def send(self, command: dict[str, Any]) -> None:
        self.order = command

    def of(self, name: str) -> float:
        return float(self.words.get(name, 0.0))

    def receive(self, timeout_s: float) -> dict[str, Any]:
        seconds, answer = 0.0, dict[str, Any]()
        what = self.order.get("do")
        if what == "begin":
            self.words = dict(word.split("=") for word in self.order["overrides"])
            seconds = self.of("start_s") * (10 if "compile" in self.words else 1)
            answer = {"values": {}, "periods": {}, "readers": 0, "ahead": 0, "updates": 10**6}
        elif what == "run":
            seconds = self.order["updates"] * self.of("update_s") * (1 + self.of("noise") * self.random.random())
            messages = {"parts_s": {}, "updates_ms": [], "throttled": []}
            answer = {"seconds": seconds, "run_queue_wait_s": 0.0, **messages}
        elif what == "report":
            answer = {"peak_host_gib": 0.0, "losses": [1.0] * 8, "grad_norms": [1.0]}
        self.clock.now += min(seconds, timeout_s)
        if seconds > timeout_s:
            raise ReplyTimeout("nothing")
        return answer

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def end(self) -> None: ...


class FakeProcesses(Comparison):
    """A comparison of fake processes, with a separate clock."""

    def __init__(self) -> None:
        self.fake_clock = Clock()
        super().__init__(Request(), clock=self.fake_clock)

    def fork(self, variant: Variant, number: int, deadline: float) -> VariantProcess:
        return FakeProcess(number, self.fake_clock, deadline)


def interval(ours_ms: Sequence[float], theirs_ms: Sequence[float], half_width: float) -> Ratio:
    """Return an interval of `half_width` if all blocks are equal, otherwise a wide one."""
    is_even = max(ours_ms) - min(ours_ms) < 1e-6 * max(ours_ms)
    return (
        Ratio(1.0, 1.0 - half_width, 1.0 + half_width, len(ours_ms))
        if is_even
        else Ratio(1.0, 0.5, 2.0, len(theirs_ms))
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Comparison]:
    """Return a function that creates comparisons with fake processes."""
    monkeypatch.setattr(compare, "IDLE_SAMPLE_S", 0.0)
    monkeypatch.setattr(comparison_result, "paired_ratio", interval)
    return FakeProcesses


def make_variant(
    name: str, start_s: float, update_s: float = 0.01, *, noise: float = 0.0, compiles: bool = False
) -> Variant:
    args = (f"start_s={start_s}", f"update_s={update_s}", f"noise={noise}")
    return Variant(name, (*args, "compile=default") if compiles else args)


def measured(comparison: Comparison, variants: Sequence[Variant], budget_s: float, **more: Any) -> ComparisonResult:
    with comparison:
        return comparison.compare(variants, dataclasses.replace(LIMITS, budget_s=budget_s, **more), lambda _: None)


def untried(trials: ComparisonResult) -> list[str]:
    return [each.name for each in trials.variants if each.is_untried]


def processes_of(measured: VariantResult) -> list[int]:
    return [block.process for block in measured.blocks.values()]


ALIKE = st.floats(0.5, 20.0).flatmap(lambda s: st.lists(st.floats(0.9 * s, 1.1 * s), min_size=2, max_size=8))
OTHERS = (
    st.floats(0.001, 0.5),  # seconds per update
    st.sampled_from([0.0, 0.3]),  # noise of blocks
    st.integers(0, 2),  # number of variants that compile
    st.booleans(),  # interleaved
)
COSTS = st.tuples(ALIKE, *OTHERS)
UNLIKE = st.tuples(st.lists(st.floats(0.5, 20.0), min_size=2, max_size=8), *OTHERS)
ON_FAKES = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make_variants(starts: list[float], update_s: float, noise: float, compiling: int) -> list[Variant]:
    return [
        make_variant(f"variant {at}", start_s, update_s, noise=noise, compiles=0 < at <= compiling)
        for at, start_s in enumerate(starts)
    ]


@pytest.mark.slow
@ON_FAKES
@given(UNLIKE, st.floats(5.0, 200.0))
def test_no_variant_exceeds_the_budget(
    fake: Callable[[], Comparison], costs: tuple[list[float], float, float, int, bool], budget_s: float
) -> None:
    """Only the start of the baseline, which is always needed, and the last block may exceed the budget."""
    starts, update_s, noise, compiling, together = costs

    trials = measured(fake(), make_variants(starts, update_s, noise, compiling), budget_s, interleave=together)

    last = max(each.turn_s for each in trials.variants) * (1 + noise)
    assert trials.seconds <= max(budget_s, trials.baseline.startup.taken_s) + last
    assert all(
        each.why_not in ("", NO_TIME_LEFT) or each.why_not.startswith(START_TIMED_OUT) for each in trials.variants
    )


def test_compiled_variants_start_last(fake: Callable[[], Comparison]) -> None:
    """Starting a compiled variant takes the time of many others."""
    begun: list[str] = []
    variants = [
        make_variant("base", 1),
        make_variant("compiles", 1, compiles=True),
        make_variant("a", 1),
        make_variant("b", 1),
    ]

    with fake() as comparison:
        trials = comparison.compare(variants, dataclasses.replace(LIMITS, budget_s=90.0), begun.append)

    assert begun == ["starting a", "starting b", "starting compiles"]
    assert [each.name for each in trials.variants] == [each.name for each in variants], (
        "results must be in the given order"
    )
    assert untried(trials) == []


def test_spare_time_is_used_for_waiting_variants(fake: Callable[[], Comparison]) -> None:
    """Half of the budget is reserved for rounds. If intervals become narrow early, waiting variants use the rest."""
    variants = [make_variant(f"variant {at}", 5.0) for at in range(8)]

    assert untried(measured(fake(), variants, 80.0)) == []
    restless = [make_variant(f"variant {at}", 5.0, 0.1, noise=0.5) for at in range(8)]
    assert untried(measured(fake(), restless, 80.0, rounds=(6, 60))) != []


def test_slow_starts_are_ended(
    fake: Callable[[], Comparison],
) -> None:
    variants = [make_variant("base", 1.0), make_variant("slow", 1000.0), make_variant("quick", 1.0)]

    trials = measured(fake(), variants, 60.0)

    assert trials.of("slow").why_not.startswith(f"{START_TIMED_OUT}: not ready after 2")
    assert trials.seconds < 60.0
    assert len(trials.of("quick").blocks) >= 6
    assert SHORT_BUDGET in trials.notes


def test_at_most_half_of_the_time_is_spent_on_restarts(fake: Callable[[], Comparison]) -> None:
    comparison = fake()

    trials = measured(
        comparison, [make_variant(name, 2.0, 0.1, noise=0.5) for name in ("base", "other")], 120.0, rounds=(6, 600)
    )

    assert 100 < trials.seconds <= 121
    assert all(4 <= len(set(processes_of(each))) <= 16 for each in trials.variants)
    assert 8 <= comparison.num_started <= 60 / 2.0 + 2


def test_all_variants_restart_together(fake: Callable[[], Comparison]) -> None:
    """Otherwise, a change could not be attributed to a variant."""
    variants = [
        make_variant("base", 2.0, 0.1, noise=0.5),
        make_variant("other", 2.7, 0.1, noise=0.5),
        make_variant("third", 3.0, 0.1, noise=0.5),
    ]

    trials = measured(fake(), variants, 120.0, rounds=(6, 600))

    lives = [processes_of(each) for each in trials.variants]
    changes = [[at for at in range(1, len(makers)) if makers[at] != makers[at - 1]] for makers in lives]
    assert changes[0] == changes[1] == changes[2]
    assert len(changes[0]) >= 3
    assert trials.measured_spread.freedom >= 4


def test_variants_that_cannot_restart_keep_their_blocks(
    fake: Callable[[], Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No blocks are lost if the restart of a process fails."""
    full = "the disk is full"
    for name in ("other", "base"):
        begun: Counter[str] = Counter()
        start = Comparison.start

        def fails_later(self: Comparison, measured: VariantResult, until: float, name: str = name) -> Any:
            begun[measured.name] += 1  # noqa: B023
            if measured.name == name and begun[name] > 1:  # noqa: B023
                self.last_error, measured.why_not = AccelRunError("the disk is full"), "the disk is full"
                return None
            return start(self, measured, until)  # noqa: B023

        with monkeypatch.context() as patched:
            patched.setattr(Comparison, "start", fails_later)
            variants = [make_variant(each, 2.0, 0.1, noise=0.5) for each in ("base", "other", "third")]
            trials = measured(fake(), variants, 120.0, rounds=(6, 600))

        assert all(each.why_not == "" and len(each.blocks) >= 6 for each in trials.variants)
        assert trials.notes[0].startswith(f"{name} ")
        assert trials.notes[0].endswith(full)
        assert trials.ratio(trials.of("other")) is not None
        lives = len(set(processes_of(trials.of("third"))))
        assert lives == 1 if name == "base" else lives > 2


def test_no_variant_restarts_if_its_baseline_has_ended(
    fake: Callable[[], Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: Counter[str] = Counter()
    start = Comparison.start

    def fails_later(self: Comparison, measured: VariantResult, until: float) -> Any:
        begun[measured.name] += 1
        if measured.name == "rival" and begun["rival"] > 1:
            self.last_error, measured.why_not = AccelRunError("the disk is full"), "the disk is full"
            return None
        return start(self, measured, until)

    monkeypatch.setattr(Comparison, "start", fails_later)
    own = dataclasses.replace(make_variant("own", 2.0, 0.1, noise=0.5), against="rival")
    variants = [make_variant("base", 2.0, 0.1, noise=0.5), make_variant("rival", 2.0, 0.1, noise=0.5), own]

    trials = measured(fake(), variants, 120.0, rounds=(6, 600))

    assert begun["rival"] == 2
    assert trials.of("rival").why_not == ""
    assert trials.ratio(trials.of("own")) is not None


def test_suspended_variants_are_measured_again(fake: Callable[[], Comparison]) -> None:
    """Until all variants have started, each has blocks of only one process, which do not show the process spread."""
    variants = [make_variant(f"variant {at}", 5.0, 0.1) for at in range(8)]

    trials = measured(fake(), variants, 90.0, rounds=(6, 60))
    longer = measured(fake(), variants, 400.0, rounds=(6, 60))

    assert untried(trials) == []
    assert all(8 <= len(each.blocks) <= 20 for each in trials.variants), "rounds must not be left to the last variant"
    assert all(len(set(processes_of(each))) >= 2 for each in longer.variants)
    assert all(len(each.blocks) <= 60 for each in longer.variants[1:])


def test_time_too_short_for_a_start_is_used_for_rounds(fake: Callable[[], Comparison]) -> None:
    variants = [make_variant(f"variant {at}", 20.0, 0.1, noise=0.0) for at in range(6)]

    trials = measured(fake(), variants, 130.0, rounds=(6, 60))

    assert untried(trials) != []
    assert trials.seconds > 120
    assert all(len(each.blocks) > 12 for each in trials.variants if not each.why_not), "more blocks than needed"
    assert not any(each.is_short for each in trials.variants)


def test_blocks_reported_by_a_lost_process_are_kept() -> None:
    first = {"losses": [1.0, 2.0, 3.0], "moved": [1.0], "peak_host_gib": 1.0}
    young = {"losses": [1.0], "moved": None, "peak_host_gib": 2.0}

    assert merge_reports(first, young) == {**first, "peak_host_gib": 2.0}
    assert merge_reports(young, first) == {**first, "peak_host_gib": 2.0}
    assert merge_reports({}, young) == young


def test_slow_starting_variants_continue_while_others_restart(fake: Callable[[], Comparison]) -> None:
    variants = [
        make_variant("base", 1.0, 0.1, noise=0.5),
        make_variant("quick", 1.0, 0.1, noise=0.5),
        make_variant("long", 40.0, 0.1, noise=0.5),
    ]

    trials = measured(fake(), variants, 160.0, rounds=(6, 600))

    lives = {each.name: len(set(processes_of(each))) for each in trials.variants}
    assert lives["long"] <= 2
    assert min(lives["base"], lives["quick"]) >= 4
    assert trials.of("long").startup.taken_s > 40, "the duration of the first start"
    assert trials.seconds <= 161


@pytest.mark.parametrize("start_s", [25.0, 290.0])
def test_a_slow_start_of_the_baseline_is_awaited(start_s: float, fake: Callable[[], Comparison]) -> None:
    """The start limit of variants does not apply to the baseline, without which nothing can be compared."""
    result = measured(fake(), [make_variant("baseline", start_s), make_variant("quick", 1.0)], 900.0, start_s=20.0)
    assert all(len(each.blocks) >= MIN_ROUNDS for each in result.variants)


def test_the_baseline_has_at_least_the_start_limit(fake: Callable[[], Comparison]) -> None:
    result = measured(fake(), [make_variant("baseline", 400.0), make_variant("other", 400.0)], 4000.0, start_s=500.0)
    assert all(each.blocks for each in result.variants)
