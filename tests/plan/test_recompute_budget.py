"""What is computed again fits whenever anything does, and is no more than that takes."""

from hypothesis import given
from hypothesis import strategies as st

from runner.plan.memory_trace import Layer
from runner.plan.recompute_budget import computed_again

BLOCKS = st.lists(st.builds(Layer, st.just("block"), st.integers(1, 1000), st.integers(0, 1000)), max_size=12)


def taking(blocks, fixed=500):
    """Return what a backward pass takes: what is kept, and at each block what comes back there."""

    def takes(again):
        kept = [1 if number in again else block.activations for number, block in enumerate(blocks)]
        at_each = [sum(kept[:number]) + block.activations for number, block in enumerate(blocks)]
        return fixed + max([sum(kept), *at_each])

    return takes


@given(BLOCKS, st.integers(0, 13_000))
def test_it_fits_whenever_recomputing_everything_does(blocks, limit):
    takes = taking(blocks)
    everything = tuple(range(len(blocks)))
    chosen = computed_again(blocks, takes, limit)
    assert takes(chosen) <= limit or chosen == everything


@given(BLOCKS, st.integers(0, 13_000), st.integers(0, 13_000))
def test_more_memory_never_asks_for_more_blocks(blocks, one, other):
    alike = [Layer("block", 100, 100) for _ in blocks]
    small, large = sorted((one, other))
    counts = [len(computed_again(alike, taking(alike), limit)) for limit in (small, large)]
    assert counts[0] >= counts[1]


def test_nothing_is_recomputed_if_everything_fits():
    blocks = [Layer("block", 100, 100)] * 4
    assert computed_again(blocks, taking(blocks), 900) == ()
    assert computed_again(blocks, taking(blocks), 899) != ()


def test_blocks_are_chosen_by_freed_memory_per_operation_then_by_position():
    blocks = [Layer("dear", 100, 900), Layer("cheap", 100, 100), Layer("cheap", 100, 100), Layer("cheap", 100, 100)]
    assert computed_again(blocks, taking(blocks), 801) == (1,)
    assert computed_again(blocks, taking(blocks), 800) == (1, 2)
