"""memory=budget recomputes enough blocks to fit if possible, and no more than needed."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.plan.memory_trace import Layer, choose_recomputed_blocks

BLOCKS = st.lists(st.builds(Layer, st.just("block"), st.integers(1, 1000), st.integers(0, 1000)), max_size=12)


def taking(blocks, fixed=500):
    """Return the peak memory of a backward pass: saved activations, and at each block its recomputed ones."""

    def takes(again):
        kept = [block.activations for block in blocks]
        for number in again:
            kept[number] = 1
        before = list(accumulate(kept, initial=0))
        at_each = [saved + block.activations for saved, block in zip(before, blocks, strict=False)]
        return fixed + max([before[-1], *at_each])

    return takes


@pytest.mark.slow
@given(BLOCKS, st.integers(0, 13_000))
def test_the_chosen_blocks_fit_whenever_recomputing_all_blocks_fits(blocks, limit):
    takes = taking(blocks)
    everything = tuple(range(len(blocks)))
    chosen = choose_recomputed_blocks(blocks, takes, limit)
    assert takes(chosen) <= limit or chosen == everything


@given(BLOCKS, st.integers(0, 13_000), st.integers(0, 13_000))
def test_more_memory_never_requires_more_blocks(blocks, one, other):
    alike = [Layer("block", 100, 100) for _ in blocks]
    small, large = sorted((one, other))
    counts = [len(choose_recomputed_blocks(alike, taking(alike), limit)) for limit in (small, large)]
    assert counts[0] >= counts[1]


def test_nothing_is_recomputed_if_everything_fits():
    blocks = [Layer("block", 100, 100)] * 4
    assert choose_recomputed_blocks(blocks, taking(blocks), 900) == ()
    assert choose_recomputed_blocks(blocks, taking(blocks), 899) != ()


def test_blocks_are_chosen_by_memory_freed_per_operation_then_by_position():
    blocks = [Layer("dear", 100, 900), Layer("cheap", 100, 100), Layer("cheap", 100, 100), Layer("cheap", 100, 100)]
    assert choose_recomputed_blocks(blocks, taking(blocks), 801) == (1,)
    assert choose_recomputed_blocks(blocks, taking(blocks), 800) == (1, 2)


class Counting:
    """Count the calls of a function."""

    def __init__(self, function):
        self.function, self.count = function, 0

    def __call__(self, *args):
        self.count += 1
        return self.function(*args)


@pytest.mark.parametrize(("limit", "count"), [(2900, 1), (100, 2)], ids=["nothing to recompute", "not even all"])
def test_recomputing_no_block_or_all_blocks_needs_no_search(limit, count):
    """Each call traces the run."""
    blocks = [Layer("block", 100, 100)] * 24
    takes = Counting(taking(blocks))
    choose_recomputed_blocks(blocks, takes, limit)
    assert takes.count == count


@given(st.integers(1, 200), st.integers(0, 13_000))
def test_the_smallest_number_of_blocks_needs_at_most_a_bisection(number, limit):
    """The first four calls are those for no block, all blocks and two guesses."""
    blocks = [Layer("block", 100, 100)] * number
    takes = Counting(taking(blocks))
    chosen = choose_recomputed_blocks(blocks, takes, limit)
    fitting = (count for count in range(number) if takes.function(tuple(range(count))) <= limit)
    assert chosen == tuple(range(next(fitting, number)))
    assert takes.count <= 4 + number.bit_length()


def test_a_peak_proportional_to_saved_activations_needs_no_bisection():
    """Blocks save different numbers of bytes, as in an encoder and a decoder."""
    blocks = [Layer("block", 100, 100)] * 12 + [Layer("larger", 300, 300)] * 12
    takes = Counting(lambda again: 5000 - sum(blocks[number].activations for number in again))
    assert choose_recomputed_blocks(blocks, takes, 2500) == tuple(range(17))
    assert takes.count == 4
