"""memory=budget recomputes enough blocks to fit if possible, and no more than needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.plan.memory_trace import Layer, choose_recomputed_blocks

BLOCKS = st.lists(st.builds(Layer, st.just("block"), st.integers(1, 1000), st.integers(0, 1000)), max_size=12)


def taking(blocks, fixed=500):
    """Return the peak memory of a backward pass: saved activations, and at each block its recomputed ones."""

    def takes(again):
        kept = [1 if number in again else block.activations for number, block in enumerate(blocks)]
        at_each = [sum(kept[:number]) + block.activations for number, block in enumerate(blocks)]
        return fixed + max([sum(kept), *at_each])

    return takes


@pytest.mark.slow
@given(BLOCKS, st.integers(0, 13_000))
def test_it_fits_whenever_recomputing_everything_does(blocks, limit):
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


def test_blocks_are_chosen_by_freed_memory_per_operation_then_by_position():
    blocks = [Layer("dear", 100, 900), Layer("cheap", 100, 100), Layer("cheap", 100, 100), Layer("cheap", 100, 100)]
    assert choose_recomputed_blocks(blocks, taking(blocks), 801) == (1,)
    assert choose_recomputed_blocks(blocks, taking(blocks), 800) == (1, 2)
