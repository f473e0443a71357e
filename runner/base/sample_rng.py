"""Seed the global random generators for each sample that is read, from seed, split, epoch and index.

torch's, NumPy's and Python's global generators belong to a process. A dataset that draws from them, as the transforms
of torchvision do, would draw different numbers in another worker, rank or resumed run. In the training process, it
would also change the draws of the model's dropout. So dataset code runs inside `SampleSeeding.read`, where the
generators are seeded for each sample and restored afterwards.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from runner.base.accelerator import current_device, default_generator, is_initialized

Key = TypeVar("Key")
Read = TypeVar("Read")


class GlobalGenerator(Protocol):
    """A random generator that belongs to the process."""

    def get_state(self) -> Any:
        """Return the state in a form that is cheap to copy and compare."""

    def set_state(self, state: Any) -> None:
        """Restore a state returned by `get_state`."""

    def seed(self, key: bytes) -> None:
        """Seed with a key of 8 bytes."""


class SampleSeeding:
    """Seed the global generators of this process for dataset code, and restore them afterwards.

    The use of generators is detected, not assumed. All are seeded for the first samples; later, only those that were
    used are seeded. The others are compared before and after each batch: if one has changed, that batch is read again
    with this generator seeded, too. A dataset that does not draw thus costs one comparison per batch.

    Not thread-safe: while one thread reads, no other may draw.
    """

    def __init__(self, split: str = "") -> None:
        self.split = split
        self._num_to_learn = _LEARNING_SAMPLES
        self._is_learning = False  # all generators are seeded for this batch, to detect which are used
        self._used: list[int] = []  # indices of generators that the dataset used
        self._seeded: Sequence[int] = ()  # indices of those seeded for the samples of this batch
        self._generators: Sequence[GlobalGenerator] = ()  # determined per batch: a dataset may change the current GPU
        self._seeded_states: list[Any] = []  # while learning: states of all generators after seeding

    @property
    def has_drawn(self) -> bool:
        """True once the dataset has used a global generator."""
        return bool(self._used)

    @property
    def is_seeding(self) -> bool:
        """True inside `read` if `begin` has to be called."""
        return bool(self._seeded)

    def read(self, reading: Callable[[Key], Read], key: Key) -> Read:
        """Return reading(key); `reading` must call `begin` before each sample.

        `reading` is called again if it used a generator that was not seeded.
        """
        generators = self._generators = global_generators()
        before = _get_states(generators)
        self._is_learning = self._num_to_learn > 0
        while True:
            self._seeded = range(len(generators)) if self._is_learning else tuple(self._used)
            try:
                result = reading(key)
            except BaseException as error:
                if self._restore(before) and isinstance(error, Exception):  # the error may depend on what was drawn
                    continue
                raise
            if not self._restore(before):
                return result

    def begin(self, operation: str, seed: int, epoch: int, indices: Sequence[int]) -> None:
        """Seed the generators for an operation on these samples; called by the function passed to `read`."""
        if not self._seeded:
            return
        generators = self._generators
        self._learn(generators)
        self._num_to_learn -= len(indices)
        seeds = _derive_seeds(seed, self.split, operation, epoch, *indices)
        for index in self._seeded:
            generators[index].seed(seeds[8 * index : 8 * index + 8])
        if self._is_learning:
            self._seeded_states = _get_states(generators)

    def number(self, *what: object) -> int:
        """Return a 63-bit number derived from `what`."""
        return int.from_bytes(_derive_seeds(0, self.split, *what)[:8], "little") >> 1

    def _learn(self, generators: Sequence[GlobalGenerator]) -> None:
        for index, state in enumerate(self._seeded_states):
            if index not in self._used and generators[index].get_state() != state:
                self._used.append(index)

    def _restore(self, before: list[Any]) -> bool:
        """Restore the generators; return whether one that was not seeded has changed."""
        generators, has_missed = self._generators, False
        if not self._seeded and _get_states(generators) == before:
            return False
        self._learn(generators)
        for index, state in enumerate(before):
            if index in self._seeded:
                generators[index].set_state(state)
            elif generators[index].get_state() != state:
                generators[index].set_state(state)
                self._used.append(index)
                has_missed = True
        self._seeded, self._seeded_states = (), []
        return has_missed

    def __getstate__(self) -> dict[str, Any]:
        """Omit the learned state: a spawned worker has other generators."""
        return vars(type(self)(self.split))


class NoSeeding(SampleSeeding):
    """Seed nothing: for cached samples, which are read without running task code."""

    def read(self, reading: Callable[[Key], Read], key: Key) -> Read:
        return reading(key)


class SeedEverySample(SampleSeeding):
    """For iterable datasets, which cannot be read again: all generators are seeded for every sample, used or not."""

    def read(self, reading: Callable[[Key], Read], key: Key) -> Read:
        with keyed_generators() as self._seed:
            try:
                return reading(key)
            finally:
                del self._seed  # it cannot be pickled

    def begin(self, operation: str, seed: int, epoch: int, indices: Sequence[int]) -> None:
        self._seed(seed, self.split, operation, epoch, *indices)


@contextmanager
def keyed_generators() -> Iterator[Callable[..., None]]:
    """Yield a function that seeds the global generators from its arguments; restore them on exit."""
    generators = global_generators()
    before = _get_states(generators)

    def seed(number: int, *what: object) -> None:
        seeds = _derive_seeds(number, *what)
        for index, generator in enumerate(generators):
            generator.seed(seeds[8 * index : 8 * index + 8])

    try:
        yield seed
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


@contextmanager
def seeded_generators(seed: int, *what: object) -> Iterator[None]:
    """Seed the global generators from `seed` and `what` inside the context; restore them on exit."""
    with keyed_generators() as seed_all:
        seed_all(seed, *what)
        yield


def global_generators() -> Sequence[GlobalGenerator]:
    """Return the global generators of this process: torch's, NumPy's, Python's, and the current GPU's, if any."""
    if is_initialized():  # not in forked workers: no CUDA there
        return _host_and_gpu_generators(current_device().index)
    return _HOST_GENERATORS


@lru_cache
def _host_and_gpu_generators(device: int) -> Sequence[GlobalGenerator]:
    return *_HOST_GENERATORS, TorchGenerator(default_generator(device))


class TorchGenerator:
    """A torch generator. Its `manual_seed` takes 1 us; torch.manual_seed seeds all device types and takes 100 us."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._words_at = (ctypes.c_char * generator.get_state().numel()).from_address

    def get_state(self) -> bytes:
        state = self._generator.get_state()
        return self._words_at(state.data_ptr()).raw  # ctypes.string_at takes three times as long

    def set_state(self, state: bytes) -> None:
        self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def seed(self, key: bytes) -> None:
        self._generator.manual_seed(int.from_bytes(key, "little"))


class NumpyGenerator:
    """NumPy's generator. Its `get_state` takes 27 us, so the state is read directly from memory.

    That memory does not include the cached second value of a pair of normal draws. While a value is cached, the full
    state is read.
    """

    def __init__(self) -> None:
        self._bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._words = (ctypes.c_char * (4 * _WORDS)).from_address(self._bits.ctypes.state_address)
        self._seen = b""
        self._pair: tuple[int, float] = (0, 0.0)

    def get_state(self) -> tuple[bytes, tuple[int, float]]:
        words = self._words.raw
        if words != self._seen or self._pair[0]:
            state: Any = np.random.get_state(legacy=False)
            self._seen, self._pair = words, (state["has_gauss"], state["gauss"])
        return words, self._pair

    def set_state(self, state: tuple[bytes, tuple[int, float]]) -> None:
        words, (has_second, second) = state
        key = np.frombuffer(words, dtype=np.uint32, count=_WORDS - 1)
        np.random.set_state(("MT19937", key, struct.unpack_from("i", words, 4 * (_WORDS - 1))[0], has_second, second))
        self._seen, self._pair = state

    def seed(self, key: bytes) -> None:
        np.random.seed(int.from_bytes(key[:4], "little"))


class PythonGenerator:
    """Python's generator. Its `getstate` takes 6 us, comparing two states another 6 us; reading the memory, 0.4 us.

    CPython stores the state behind the object header: index, then 624 words. If the layout differs, `getstate` is
    used.
    """

    def __init__(self) -> None:
        self._instance: random.Random = random.random.__self__  # type: ignore[attr-defined]
        has_expected_layout = type(self._instance).__basicsize__ >= object.__basicsize__ + 4 * _WORDS
        address = id(self._instance) + object.__basicsize__
        self._words = (ctypes.c_char * (4 * _WORDS)).from_address(address) if has_expected_layout else None
        if has_expected_layout and _to_state(*self.get_state()) != random.getstate():
            self._words = None

    def get_state(self) -> Any:
        if self._words is None:
            return random.getstate()
        return self._words.raw, self._instance.gauss_next  # type: ignore[attr-defined]

    def set_state(self, state: Any) -> None:
        random.setstate(state if self._words is None else _to_state(*state))

    def seed(self, key: bytes) -> None:
        random.seed(int.from_bytes(key, "little"))


def _to_state(words: bytes, gauss_next: float | None) -> tuple[int, tuple[int, ...], float | None]:
    """Return an argument for random.setstate."""
    index, *state = struct.unpack(f"{_WORDS}I", words)
    return 3, (*state, index), gauss_next


def _get_states(generators: Sequence[GlobalGenerator]) -> list[Any]:
    """Return the state of each generator; called twice per batch, so the first three are unrolled."""
    of_torch, of_numpy, of_python = generators[:3]
    states = [of_torch.get_state(), of_numpy.get_state(), of_python.get_state()]
    if len(generators) > len(states):
        states += [generator.get_state() for generator in generators[len(states) :]]
    return states


def _derive_seeds(seed: int, *what: object) -> bytes:
    """Derive 8 bytes for each generator by hashing the arguments."""
    return hashlib.blake2b(repr((seed, *what)).encode(), digest_size=8 * (len(_HOST_GENERATORS) + 1)).digest()


_WORDS = 625  # words of a Mersenne Twister: state and position
_LEARNING_SAMPLES = 64
_HOST_GENERATORS = (TorchGenerator(torch.default_generator), NumpyGenerator(), PythonGenerator())
