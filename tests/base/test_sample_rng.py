"""Random generators are seeded for a sample only if reading it draws numbers."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest

from runner.base import sample_rng
from runner.base.sample_rng import SampleStreams

NUM_SAMPLES = 400  # more than the first samples, for which all generators are seeded


class Counted:
    """A generator that counts how often it is seeded."""

    def __init__(self) -> None:
        self.state, self.num_seeds = 0, 0

    def get_state(self) -> int:
        return self.state

    def set_state(self, state: int) -> None:
        self.state = state

    def seed(self, key: bytes) -> None:
        self.state, self.num_seeds = int.from_bytes(key, "little"), self.num_seeds + 1

    def draw(self) -> None:
        self.state += 1


@pytest.mark.parametrize("drawn", [(), (0,), (1, 2), (0, 1, 2)])
def test_a_generator_is_seeded_once_for_a_sample_and_not_at_all_if_it_is_not_used(
    drawn: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generators = [Counted() for _ in range(3)]
    monkeypatch.setattr(sample_rng, "global_generators", lambda: generators)
    streams = SampleStreams("train")

    def read(index: int) -> None:
        streams.begin("sample", 0, 0, [index])
        for place in drawn:
            generators[place].draw()

    for index in range(NUM_SAMPLES):
        streams.read(read, index)
    before = [each.num_seeds for each in generators]
    for index in range(NUM_SAMPLES):
        streams.read(read, index)
    result = [each.num_seeds - num for each, num in zip(generators, before, strict=True)]
    assert result == [NUM_SAMPLES if place in drawn else 0 for place in range(3)]
    assert [each.state for each in generators] == [0, 0, 0]
    assert streams.has_drawn is bool(drawn)


def test_a_spawned_worker_learns_again_which_generators_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no generator of a GPU, for example."""
    generators = [Counted() for _ in range(4)]
    monkeypatch.setattr(sample_rng, "global_generators", lambda: generators)
    streams = SampleStreams("train")

    def read(index: int) -> None:
        streams.begin("sample", 0, 0, [index])
        generators[3].draw()

    for index in range(NUM_SAMPLES):
        streams.read(read, index)
    assert streams.has_drawn
    sent = pickle.loads(pickle.dumps(streams))
    assert vars(sent) == vars(SampleStreams("train"))
