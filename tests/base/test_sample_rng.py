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

    def draw(self) -> int:
        self.state += 1
        return self.state


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    found = [Counted() for _ in range(3)]
    monkeypatch.setattr(sample_rng, "global_generators", lambda: found)
    return found


@pytest.mark.parametrize("drawn", [(), (0,), (1, 2), (0, 1, 2)])
def test_a_generator_is_seeded_once_for_a_sample_and_not_at_all_if_it_is_not_used(
    drawn: Sequence[int], generators: list[Counted]
) -> None:
    streams, num_read = SampleStreams("train"), 0

    def read(index: int) -> None:
        nonlocal num_read
        num_read += 1
        streams.begin("sample", 0, 0, [index])
        for place in drawn:
            generators[place].draw()

    for index in range(NUM_SAMPLES):
        streams.read(read, index)
    assert num_read == NUM_SAMPLES, "the first samples show what is drawn, so none is read twice"
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


def test_a_generator_that_is_used_late_is_seeded_from_that_sample_on(generators: list[Counted]) -> None:
    streams, late = SampleStreams("train"), SampleStreams("train")

    def read(index: int) -> int:
        streams.begin("sample", 0, 0, [index])
        return generators[1].draw()

    def read_late(index: int) -> int:
        late.begin("sample", 0, 0, [index])
        return generators[1].draw() if index >= NUM_SAMPLES - 10 else 0

    found = [late.read(read_late, index) for index in range(NUM_SAMPLES)]
    expected = [streams.read(read, index) for index in range(NUM_SAMPLES)]
    assert found[-10:] == expected[-10:]
    assert late.has_drawn


@pytest.mark.parametrize("num_read", [0, NUM_SAMPLES])
def test_generators_are_restored_when_reading_is_interrupted(num_read: int, generators: list[Counted]) -> None:
    streams = SampleStreams("train")
    for index in range(num_read):
        streams.read(lambda index: streams.begin("sample", 0, 0, [index]), index)

    def interrupted(index: int) -> None:
        streams.begin("sample", 0, 0, [index])
        for generator in generators:
            generator.draw()
        raise KeyboardInterrupt

    for generator in generators:
        generator.state = 5
    with pytest.raises(KeyboardInterrupt):
        streams.read(interrupted, NUM_SAMPLES)
    assert [each.state for each in generators] == [5, 5, 5]
    assert not streams.is_seeding
