"""Random generators are seeded for a sample only if reading it draws numbers."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from runner.base import sample_rng
from runner.base.sample_rng import SampleSeeding, SeedEverySample, global_generators, seeded_generators

NUM_SAMPLES = 400  # more than the number of first samples, for which all generators are seeded


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
def test_only_used_generators_are_seeded_once_per_sample(drawn: Sequence[int], generators: list[Counted]) -> None:
    streams, num_read = SampleSeeding("train"), 0

    def read(index: int) -> None:
        nonlocal num_read
        num_read += 1
        streams.begin("sample", 0, 0, [index])
        for place in drawn:
            generators[place].draw()

    for index in range(NUM_SAMPLES):
        streams.read(read, index)
    assert num_read == NUM_SAMPLES, "no sample must be read twice, because the first ones show what is drawn"
    before = [each.num_seeds for each in generators]
    for index in range(NUM_SAMPLES):
        streams.read(read, index)
    result = [each.num_seeds - num for each, num in zip(generators, before, strict=True)]
    assert result == [NUM_SAMPLES if place in drawn else 0 for place in range(3)]
    assert [each.state for each in generators] == [0, 0, 0]
    assert streams.has_drawn is bool(drawn)


def test_a_spawned_worker_detects_used_generators_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spawned worker may have fewer generators, for example none of a GPU."""
    generators = [Counted() for _ in range(4)]
    monkeypatch.setattr(sample_rng, "global_generators", lambda: generators)
    streams = SampleSeeding("train")

    def read(index: int) -> None:
        streams.begin("sample", 0, 0, [index])
        generators[3].draw()

    for index in range(NUM_SAMPLES):
        streams.read(read, index)
    assert streams.has_drawn
    sent = pickle.loads(pickle.dumps(streams))
    assert vars(sent) == vars(SampleSeeding("train"))


def test_a_generator_is_seeded_from_its_first_use(generators: list[Counted]) -> None:
    """The first sample that uses it is already seeded."""
    streams, late = SampleSeeding("train"), SampleSeeding("train")

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
    streams = SampleSeeding("train")
    for index in range(num_read):
        streams.read(lambda index: streams.begin("sample", 0, 0, [index]), index)

    def interrupt(index: int) -> None:
        streams.begin("sample", 0, 0, [index])
        for generator in generators:
            generator.draw()
        raise KeyboardInterrupt

    for generator in generators:
        generator.state = 5
    with pytest.raises(KeyboardInterrupt):
        streams.read(interrupt, NUM_SAMPLES)
    assert [each.state for each in generators] == [5, 5, 5]
    assert not streams.is_seeding


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.randint(2**62, (3,)).tolist(),
    "torch pair": lambda: torch.randn(3).tolist(),
    "numpy": lambda: np.random.randint(2**31, size=3).tolist(),
    "numpy pair": lambda: np.random.standard_normal(
        3
    ).tolist(),  # NumPy generates normal numbers in pairs, and keeps the second
    "python": lambda: [random.getrandbits(60) for _ in range(3)],
    "python pair": lambda: [random.gauss(0, 1) for _ in range(3)],
}

# for seed 3, split train, and sample 17 of epoch 1
GOLDEN_DRAWS = [
    [4181575970471210357, 2499153151618107939, 1729531373716167401],
    [1623631425, 1316085987, 2051300262],
    [216631969345778328, 946277726734259621, 188319575857926800],
]
GOLDEN_NUMBER = 881212424532767265


def test_draws_for_a_key_do_not_change_between_versions() -> None:
    """A run that is resumed with a newer version draws the same numbers as without the change."""
    with seeded_generators(3, "train", "sample", 1, 17):
        drawn = [DRAWS[name]() for name in ("torch", "numpy", "python")]
    assert drawn == GOLDEN_DRAWS
    assert SampleSeeding("train").number("sample", 1, 17) == GOLDEN_NUMBER
    numbers = [SampleSeeding(split).number(number) for split in ("train", "val") for number in range(200)]
    assert len(set(numbers)) == 400
    assert 2**62 < max(numbers) < 2**63


@pytest.mark.parametrize("name", DRAWS)
def test_draws_depend_only_on_the_key(name: str) -> None:
    """Draws for a key change no state outside."""
    draw = DRAWS[name]
    outside = []
    for is_interrupted in (False, True):
        with seeded_generators(1, "outside"):
            outside.append(draw())  # keeps the second number of a pair
            if is_interrupted:
                with seeded_generators(2, "inside"):
                    draw()
            outside.append([draw(), draw()])
    assert outside[:2] == outside[2:]
    results = []
    for key in ((2, "a"), (2, "b"), (3, "a"), (2, "a")):
        draw()  # starts from an unknown state
        with seeded_generators(*key):
            results.append(draw())
    assert results[0] == results[3]
    assert results[0] != results[1] != results[2] != results[0]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("kind", ["", " pair"])
def test_generators_continue_from_a_restored_state(number: int, kind: str) -> None:
    generator, draw = global_generators()[number], DRAWS[("torch", "numpy", "python")[number] + kind]
    outer = generator.get_state()
    draw()
    state = generator.get_state()
    assert generator.get_state() == state, "reading the state must not change it"
    first = draw()
    assert generator.get_state() != state
    draw()
    generator.set_state(state)
    assert generator.get_state() == state
    assert draw() == first
    generator.set_state(outer)
    assert generator.get_state() == outer


@pytest.mark.parametrize("is_used", [False, True])
def test_unused_generators_are_seeded_only_for_first_samples(is_used: bool) -> None:
    streams: SampleSeeding = SampleSeeding("train")
    seeding = []

    def read(index: int) -> None:
        seeding.append(streams.is_seeding)
        streams.begin("sample", 0, 0, [index])
        if is_used and index == 5:
            random.random()

    assert not streams.has_drawn
    for index in range(66):
        streams.read(read, index)
        assert not streams.is_seeding
    assert streams.has_drawn == is_used
    assert seeding == [True] * 64 + [is_used] * 2


def test_streams_seed_every_sample_and_restore_generators() -> None:
    streams = SeedEverySample("train")

    def read(index: int) -> list[float]:
        streams.begin("sample", 3, 1, [index])
        return [random.random(), torch.rand(1).item(), np.random.random()]

    before = [generator.get_state() for generator in global_generators()]
    first = [streams.read(read, index) for index in (4, 5, 4)]
    assert [generator.get_state() for generator in global_generators()] == before
    assert first[0] == first[2] != first[1]
    with seeded_generators(3, "train", "sample", 1, 4):
        assert [random.random(), torch.rand(1).item(), np.random.random()] == first[0]


def test_draws_while_reading_depend_on_seed_split_and_sample() -> None:
    """The draws depend on nothing else."""
    streams = SampleSeeding("train")

    def read(indices: list[int]) -> list[Any]:
        streams.begin("sample", 3, 1, indices)
        return [random.random(), torch.rand(1).item(), np.random.random()]

    found = [
        streams.read(read, [index]) for index in range(70)
    ]  # more samples than the first ones, for which all generators are seeded
    for index in (0, 1, 63, 64, 69):
        with seeded_generators(3, "train", "sample", 1, index):
            assert [random.random(), torch.rand(1).item(), np.random.random()] == found[index]


def test_draws_by_any_sample_of_a_batch_are_detected() -> None:
    streams = SampleSeeding("train")

    def read(indices: list[int]) -> None:
        for index in indices:
            streams.begin("sample", 0, 0, [index])
            if index == 0:
                random.random()

    streams.read(read, [0, 1])
    assert streams.has_drawn


@pytest.mark.parametrize(("error", "num_read"), [(ValueError("odd"), 2), (KeyboardInterrupt(), 1)])
def test_an_error_recurring_with_seeded_generators_is_raised(error: BaseException, num_read: int) -> None:
    """An error that depends on drawn numbers must be the same in every worker."""
    streams = SampleSeeding("train")
    for index in range(64):
        streams.read(lambda index: streams.begin("sample", 0, 0, [index]), index)
    drawn = []

    def read(index: int) -> None:
        streams.begin("sample", 0, 0, [index])
        drawn.append(random.random())
        raise error

    with pytest.raises(type(error)) as caught:
        streams.read(read, 64)
    assert caught.value is error
    assert len(drawn) == num_read
    with seeded_generators(0, "train", "sample", 0, 64):
        assert (drawn[-1] == random.random()) == (num_read == 2)


def test_an_error_before_any_draw_is_raised_without_a_retry() -> None:
    streams, calls = SampleSeeding("train"), []

    def read(index: int) -> None:
        streams.begin("sample", 0, 0, [index])
        calls.append(index)
        raise ValueError("odd")

    for index in (0, 64):
        with pytest.raises(ValueError, match="odd"):
            streams.read(read, index)
    assert calls == [0, 64]
