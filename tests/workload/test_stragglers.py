"""Injected delays are attributed correctly; noise and balanced ranks are not reported as stragglers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from runner.workload.stragglers import PARTS, Straggler, StragglerDetector, find_straggler

Times = list[dict[str, float]]

USUAL = {"data": 0.002, "transfer": 0.001, "forward": 0.010, "backward": 0.020, "optimizer": 0.003}
EXCHANGE_S = 0.004


def update(
    rng: random.Random, parts: Sequence[dict[str, float]], noise: float = 0.10, exchange_s: float = EXCHANGE_S
) -> Times:
    """Return the times of one update: noisy parts of every rank, and the resulting wait."""
    ranks = [{part: max(0.0, rng.gauss(1, noise)) * seconds for part, seconds in each.items()} for each in parts]
    busy = [sum(times.values()) for times in ranks]
    exchange_s *= rng.gauss(1, noise)
    return [{**times, "wait": max(busy) - own + exchange_s} for times, own in zip(ranks, busy, strict=True)]


def updates(seed: int, parts: Sequence[dict[str, float]], num: int = 20, noise: float = 0.10) -> list[Times]:
    rng = random.Random(seed)
    return [update(rng, parts, noise) for _ in range(num)]


def delayed(world_size: int, rank: int, part: str, seconds: float) -> list[dict[str, float]]:
    return [{**USUAL, part: USUAL[part] + seconds * (other == rank)} for other in range(world_size)]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("part", PARTS)
def test_an_injected_straggler_is_named_in_95_of_100_trials(world_size: int, part: str) -> None:
    """The part that is slow is named, too."""
    named = 0
    for seed in range(100):
        rank = seed % world_size
        result = find_straggler(updates(seed, delayed(world_size, rank, part, 0.010)))
        named += result is not None and (result.rank, result.part) == (rank, part)
    assert named >= 95


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_without_injection_99_of_100_trials_name_no_rank(world_size: int) -> None:
    quiet = sum(find_straggler(updates(seed, [USUAL] * world_size)) is None for seed in range(100))
    assert quiet >= 99


def test_lost_time_is_the_wait_beyond_the_exchange() -> None:
    """The lost time is the waiting time of the other ranks."""
    result = find_straggler(updates(0, delayed(2, 1, "backward", 0.020), noise=0.0))
    assert result is not None
    assert result.lost_s == pytest.approx(0.020)
    assert result.lost == pytest.approx(0.020 / (sum(USUAL.values()) + 0.020 + EXCHANGE_S))
    for part in ("rank 1", "backward", "40 ms", "20 ms", "33 %"):
        assert part in str(result)


def test_balanced_ranks_are_not_reported() -> None:
    """Rank 1 is 3 times slower per sample but has a third of the samples, so no rank waits."""
    assert find_straggler(updates(0, [USUAL, USUAL], noise=0.0)) is None


def test_a_long_part_without_waiting_ranks_is_not_named() -> None:
    """Rank 0 reads longer and computes less, so all ranks finish at the same time."""
    parts = [{**USUAL, "data": 0.012, "backward": 0.010}, USUAL]
    assert find_straggler(updates(0, parts, noise=0.0)) is None


def test_a_small_loss_is_not_reported() -> None:
    assert find_straggler(updates(0, delayed(2, 1, "data", 0.003), noise=0.0)) is None
    assert find_straggler(updates(0, delayed(2, 1, "data", 0.006), noise=0.0)) is not None


def test_a_common_wait_for_the_exchange_names_no_rank() -> None:
    rng = random.Random(0)
    assert find_straggler([update(rng, [USUAL] * 2, 0.0, exchange_s=0.5) for _ in range(20)]) is None


def test_a_busy_rank_without_waiting_ranks_is_not_named() -> None:
    """A rank that is busy longer is not a straggler if no other rank waits for it."""
    rng = random.Random(0)
    window = [update(rng, delayed(2, 1, "optimizer", 0.020), 0.0, exchange_s=0.050) for _ in range(20)]
    for each in window:
        each[0]["wait"] = each[1]["wait"]
    assert find_straggler(window) is None


def test_one_slow_update_neither_names_nor_hides_a_straggler() -> None:
    quiet = updates(0, [USUAL] * 2, num=19, noise=0.02)
    loud = updates(0, delayed(2, 1, "data", 0.020), num=19, noise=0.02)
    hiccup = updates(0, delayed(2, 0, "data", 5.0), num=1)
    assert find_straggler(quiet + hiccup) is None
    result = find_straggler(loud + hiccup)
    assert result is not None
    assert (result.rank, result.part) == (1, "data")


def test_ranks_that_are_slow_in_turn_are_not_named() -> None:
    window = [updates(n, delayed(3, n % 3, "forward", 0.020), num=1, noise=0.0)[0] for n in range(21)]
    assert find_straggler(window) is None


def test_two_equally_slow_ranks_are_not_named() -> None:
    one, other = (updates(0, delayed(2, rank, "forward", 0.020), num=12, noise=0.0) for rank in (0, 1))
    assert find_straggler(one[:11] + other[:9]) is None
    assert find_straggler(one[:12] + other[:8]) is not None


def test_a_single_rank_or_no_updates_name_no_rank() -> None:
    assert find_straggler(updates(0, [USUAL])) is None
    assert find_straggler([]) is None


# ---------------------------------------------------------------- the detector across updates


def heard(watch: StragglerDetector, window: list[Times], samples: tuple[int, ...] = (16, 16)) -> list[Straggler]:
    return [result for each in window if (result := watch.observe(each, samples))]


def test_the_first_updates_are_ignored() -> None:
    start = updates(0, delayed(2, 1, "forward", 3.0), num=5)
    assert heard(StragglerDetector(window=5, warm_up=5), start + updates(1, [USUAL] * 2, num=5, noise=0.01)) == []
    assert heard(StragglerDetector(window=5, warm_up=0), start) == []
    assert len(heard(StragglerDetector(window=5, warm_up=0), start * 2)) == 1


def test_delays_below_a_millisecond_are_not_reported() -> None:
    tiny = [{part: seconds / 100 for part, seconds in times.items()} for times in delayed(2, 1, "forward", 0.020)]
    assert heard(StragglerDetector(warm_up=0), updates(0, tiny, num=80)) == []


def test_a_rank_is_named_once_until_the_situation_changes() -> None:
    """The situation changes if the rank recovers, or another rank is slow."""
    watch = StragglerDetector(warm_up=0)
    rank_1 = updates(0, delayed(2, 1, "data", 0.020), num=60)
    rank_0 = updates(1, delayed(2, 0, "backward", 0.020), num=40)
    quiet = updates(2, [USUAL] * 2, num=20)
    assert [(result.rank, result.part) for result in heard(watch, rank_1)] == [(1, "data")]
    assert [(result.rank, result.part) for result in heard(watch, rank_0)] == [(0, "backward")]
    assert heard(watch, quiet) == []
    assert watch.found is None
    assert [result.rank for result in heard(watch, rank_0)] == [0]


def test_incomplete_windows_are_ignored() -> None:
    """New shares start a new window."""
    watch = StragglerDetector(window=10, warm_up=0)
    window = updates(0, delayed(2, 1, "data", 0.020), num=20)
    assert heard(watch, window[:5]) == []
    assert heard(watch, updates(0, delayed(2, 0, "data", 0.5), num=30), (3, 2)) == []
    assert [result.rank for result in heard(watch, window[5:])] == [1]
    fresh = StragglerDetector(window=10, warm_up=0)
    assert heard(fresh, window[:9]) + heard(fresh, window[:9], (20, 12)) == []
