"""Load balancing: each sample goes to one rank, and batches that were prefetched for old shares are read again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.base.order import Order
from runner.base.stopwatch import PARTS
from runner.engine.update.balance import FixedShares, make_shares

TOTAL = 32
ORDER = Order(TOTAL * 400, TOTAL, 8, seed=0, shares=(16, 16))
SLOWNESS = (3.0, 1.0)  # milliseconds per sample, of each rank


def seconds_of(samples: tuple[int, ...]) -> tuple[dict[str, float], ...]:
    """Return the times of both ranks; the faster one waits for the other, and both communicate for 1 ms."""
    busy = [1e-3 * slow * count for slow, count in zip(SLOWNESS, samples, strict=True)]
    return tuple(dict.fromkeys(PARTS, 0.0) | {"forward": spent, "wait": 1e-3 + max(busy) - spent} for spent in busy)


def run(shares: FixedShares, first: int, last: int, ahead: int) -> list[tuple[int, ...]]:
    """Run updates from `first` to before `last`, prefetching `ahead` of them; return the shares of each update."""
    read: dict[int, Any] = {}
    dealt = []
    for update in range(first, last):
        for number in range(update, update + ahead):
            if number not in read:
                read[number] = shares.of(number)
        dealt.append(read.pop(update))
        if update > first:  # the times of an update arrive on all ranks one update later
            samples = shares.samples_per_rank(update - 1)
            assert samples == dealt[-2]
            change = shares.observe(update + 1, seconds_of(samples), samples)
            stale = any(read[number] != shares.of(number) for number in read)
            assert change.reread or not stale
            if change.reread:
                read.clear()
    return dealt


@pytest.mark.parametrize("ahead", [1, 3, 8])
def test_shares_follow_rank_speeds_with_any_prefetch(ahead: int) -> None:
    dealt = run(make_shares("speed", ORDER), 0, 120, ahead)
    assert {sum(each) for each in dealt} == {TOTAL}
    assert dealt[0] == (16, 16)
    assert dealt[-1] == (8, 24)
    assert len({*dealt[-80:]}) == 1


def test_shares_are_restored_from_a_checkpoint() -> None:
    uninterrupted = make_shares("speed", ORDER)
    run(uninterrupted, 0, 120, 3)
    resumed = make_shares("speed", ORDER)
    resumed.load(json.loads(json.dumps(uninterrupted.state())), 120)
    assert run(resumed, 120, 160, 3) == [(8, 24)] * 40


def test_a_run_stopped_before_the_first_solution_repeats_its_probes() -> None:
    fresh, resumed = make_shares("speed", ORDER), make_shares("speed", ORDER)
    resumed.load({}, 50)
    assert [resumed.of(50 + number) for number in range(8)] == [fresh.of(number) for number in range(8)]
    tried = run(fresh, 0, 10, 4)
    assert len({*tried}) > 1
    assert run(resumed, 50, 60, 4) == tried


@pytest.mark.parametrize(("wanted", "order"), [("equal", ORDER), ([16, 16], ORDER), ("speed", Order(64, TOTAL, 8, 0))])
def test_fixed_shares_are_not_changed(wanted: Any, order: Order) -> None:
    shares = make_shares(wanted, order)
    assert shares.of(0) is None
    assert sum(shares.samples_per_rank(1)) == TOTAL
    assert shares.observe(2, seconds_of((16, 16)), (16, 16)).decision is None
    assert shares.state() == {}
