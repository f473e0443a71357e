"""memory=budget recomputes as few blocks as are needed to fit."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.plan.memory_trace import Layer, choose_recomputed_blocks

BLOCKS = st.lists(st.builds(Layer, st.just("block"), st.integers(1, 1000), st.integers(0, 1000)), max_size=12)


def make_peak(blocks, fixed=500):
    """Return a function that computes the peak memory of a backward pass from the numbers of the recomputed blocks.

    The peak is the largest sum of the activations saved up to a block and all activations of that block.
    """

    def peak_bytes(recomputed):
        kept = [block.activations for block in blocks]
        for number in recomputed:
            kept[number] = 1
        before = list(accumulate(kept, initial=0))
        at_each = [saved + block.activations for saved, block in zip(before, blocks, strict=False)]
        return fixed + max([before[-1], *at_each])

    return peak_bytes


@pytest.mark.slow
@given(BLOCKS, st.integers(0, 13_000))
def test_the_chosen_blocks_fit_if_possible(blocks, limit):
    peak_bytes = make_peak(blocks)
    everything = tuple(range(len(blocks)))
    chosen = choose_recomputed_blocks(blocks, peak_bytes, limit)
    assert peak_bytes(chosen) <= limit or chosen == everything


@given(BLOCKS, st.integers(0, 13_000), st.integers(0, 13_000))
def test_more_memory_never_recomputes_more_blocks(blocks, one, other):
    alike = [Layer("block", 100, 100) for _ in blocks]
    small, large = sorted((one, other))
    counts = [len(choose_recomputed_blocks(alike, make_peak(alike), limit)) for limit in (small, large)]
    assert counts[0] >= counts[1]


def test_nothing_is_recomputed_if_everything_fits():
    blocks = [Layer("block", 100, 100)] * 4
    assert choose_recomputed_blocks(blocks, make_peak(blocks), 900) == ()
    assert choose_recomputed_blocks(blocks, make_peak(blocks), 899) != ()


def test_blocks_are_chosen_by_memory_freed_per_operation():
    blocks = [
        Layer("expensive", 100, 900),
        Layer("cheap", 100, 100),
        Layer("cheap", 100, 100),
        Layer("cheap", 100, 100),
    ]
    assert choose_recomputed_blocks(blocks, make_peak(blocks), 801) == (1,)
    assert choose_recomputed_blocks(blocks, make_peak(blocks), 800) == (1, 2)


class Counting:
    """Counts the calls of a function."""

    def __init__(self, function):
        self.function, self.count = function, 0

    def __call__(self, *args):
        self.count += 1
        return self.function(*args)


@pytest.mark.parametrize(
    ("limit", "count"), [(2900, 1), (100, 2)], ids=["fits without recomputing", "too large even if all are recomputed"]
)
def test_recomputing_no_block_or_all_blocks_needs_no_search(limit, count):
    """A search would be slow, because each call of the function traces the run."""
    blocks = [Layer("block", 100, 100)] * 24
    peak_bytes = Counting(make_peak(blocks))
    choose_recomputed_blocks(blocks, peak_bytes, limit)
    assert peak_bytes.count == count


@given(st.integers(1, 200), st.integers(0, 13_000))
def test_the_search_needs_at_most_one_bisection(number, limit):
    """The first four calls are those for no block, all blocks and two guesses."""
    blocks = [Layer("block", 100, 100)] * number
    peak_bytes = Counting(make_peak(blocks))
    chosen = choose_recomputed_blocks(blocks, peak_bytes, limit)
    fitting = (count for count in range(number) if peak_bytes.function(tuple(range(count))) <= limit)
    assert chosen == tuple(range(next(fitting, number)))
    assert peak_bytes.count <= 4 + number.bit_length()


def test_a_linear_peak_needs_no_bisection():
    """The sizes of blocks may differ, as in a model with an encoder and a decoder."""
    blocks = [Layer("block", 100, 100)] * 12 + [Layer("larger", 300, 300)] * 12
    peak_bytes = Counting(lambda recomputed: 5000 - sum(blocks[number].activations for number in recomputed))
    assert choose_recomputed_blocks(blocks, peak_bytes, 2500) == tuple(range(17))
    assert peak_bytes.count == 4
