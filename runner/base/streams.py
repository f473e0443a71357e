"""What the global random generators give while a sample is read: a function of seed, split, epoch and index.

torch's, NumPy's and Python's global generators belong to a process. A data set that draws from them, as every transform
of torchvision does, would draw other numbers in another worker, rank or resumed run, and in the process that trains it
would take numbers from the model's dropout. So code of a data set runs inside of `SampleStreams.read`: the generators
are seeded for each sample, and are back where they were afterwards.
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

from runner.base.accelerator import cuda_is_initialized, current_device, default_generator

Key = TypeVar("Key")
Read = TypeVar("Read")


class GlobalGenerator(Protocol):
    """A random generator that belongs to the process."""

    def mark(self) -> Any:
        """Return its state; equal marks are equal states."""

    def put_back(self, mark: Any) -> None:
        """Put it back to where it was when it gave this mark."""

    def seed(self, key: bytes) -> None:
        """Begin the sequence of a key of 8 bytes."""


class SampleStreams:
    """Gives the global generators of this process to the code of a data set, and puts them back.

    Whether a data set draws is seen, not assumed. All generators are seeded for the first samples; from then on, only
    those from which it drew. The others are compared before and after each batch: where one has moved, that batch is
    read again with it seeded. So a data set that does not draw pays for one comparison a batch.

    Not for two threads at once: while one reads, no other may draw.
    """

    def __init__(self, split: str = "") -> None:
        self.split = split
        self._left = _SAMPLES_TO_LEARN_FROM
        self._is_learning = False  # all generators are seeded for this batch, to see which are used
        self._drawn: list[int] = []  # places of generators from which the data set drew
        self._seeded: Sequence[int] = ()  # places of those that are seeded for the samples of this batch
        self._generators: Sequence[GlobalGenerator] = ()  # of this batch: its code may make another GPU the current one
        self._marks: list[Any] = []  # while learning: of all generators, after they were seeded last

    @property
    def draws(self) -> bool:
        """True once the data set was seen to draw from a global generator."""
        return bool(self._drawn)

    @property
    def is_seeding(self) -> bool:
        """True inside of `read` where `begin` has to be called."""
        return bool(self._seeded)

    def read(self, reading: Callable[[Key], Read], key: Key) -> Read:
        """Return reading(key), which calls `begin` before each sample. It is perhaps called twice."""
        generators = self._generators = global_generators()
        before = _marks(generators)
        self._is_learning = self._left > 0
        while True:
            self._seeded = range(len(generators)) if self._is_learning else tuple(self._drawn)
            try:
                found = reading(key)
            except BaseException as error:
                if self._put_back(before) and isinstance(error, Exception):  # it may be due to what was drawn
                    continue
                raise
            if not self._put_back(before):
                return found

    def begin(self, what: str, seed: int, epoch: int, indices: Sequence[int]) -> None:
        """Seed the generators for `what` is done next with these samples; called by what `read` is given."""
        if not self._seeded:
            return
        generators = self._generators
        self._learn(generators)
        self._left -= len(indices)
        seeds = _seeds(seed, self.split, what, epoch, *indices)
        for place in self._seeded:
            generators[place].seed(seeds[8 * place : 8 * place + 8])
        if self._is_learning:
            self._marks = _marks(generators)

    def number(self, *what: object) -> int:
        """Return a number of 63 bits that follows from `what`."""
        return int.from_bytes(_seeds(0, self.split, *what)[:8], "little") >> 1

    def _learn(self, generators: Sequence[GlobalGenerator]) -> None:
        for place, mark in enumerate(self._marks):
            if place not in self._drawn and generators[place].mark() != mark:
                self._drawn.append(place)

    def _put_back(self, before: list[Any]) -> bool:
        """Return whether a generator has moved that was not seeded."""
        generators, has_missed = self._generators, False
        if not self._seeded and _marks(generators) == before:
            return False
        self._learn(generators)
        for place, mark in enumerate(before):
            if place in self._seeded:
                generators[place].put_back(mark)
            elif generators[place].mark() != mark:
                generators[place].put_back(mark)
                self._drawn.append(place)
                has_missed = True
        self._seeded, self._marks = (), []
        return has_missed

    def __getstate__(self) -> dict[str, Any]:
        """A worker that is spawned learns by itself: it has other generators."""
        return {**self.__dict__, "_drawn": [], "_left": _SAMPLES_TO_LEARN_FROM, "_generators": ()}


class NoStreams(SampleStreams):
    """For samples that are kept, and read without any code of the task: nothing can draw."""

    def read(self, reading: Callable[[Key], Read], key: Key) -> Read:
        return reading(key)


@contextmanager
def drawing_apart(seed: int, *what: object) -> Iterator[None]:
    """The global generators give what follows from seed and `what`; afterwards they are where they were."""
    generators = global_generators()
    before = _marks(generators)
    seeds = _seeds(seed, *what)
    for place, generator in enumerate(generators):
        generator.seed(seeds[8 * place : 8 * place + 8])
    try:
        yield
    finally:
        for generator, mark in zip(generators, before, strict=True):
            generator.put_back(mark)


def global_generators() -> Sequence[GlobalGenerator]:
    """Return the global generators of this process: torch's, NumPy's, Python's, and that of the GPU in use, if any."""
    if cuda_is_initialized():  # not in forked workers: no CUDA there
        return _with_gpu(current_device().index)
    return _OF_HOST


@lru_cache
def _with_gpu(device: int) -> Sequence[GlobalGenerator]:
    return *_OF_HOST, TorchGenerator(default_generator(device))


class TorchGenerator:
    """One of torch's. Its `manual_seed` takes 1 us, torch.manual_seed 100 us: that asks for every kind of device."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._words_at = (ctypes.c_char * generator.get_state().numel()).from_address

    def mark(self) -> bytes:
        state = self._generator.get_state()
        return self._words_at(state.data_ptr()).raw  # ctypes.string_at takes three times as long

    def put_back(self, mark: bytes) -> None:
        self._generator.set_state(torch.frombuffer(bytearray(mark), dtype=torch.uint8))

    def seed(self, key: bytes) -> None:
        self._generator.manual_seed(int.from_bytes(key, "little"))


class NumpyGenerator:
    """NumPy's. Its `get_state` takes 27 us, so its state is read from where it lies, as C code does it.

    That place does not hold the second number of a pair of normal ones, which is drawn with the first: while there is
    one, the whole state is asked for.
    """

    def __init__(self) -> None:
        self._bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._words = (ctypes.c_char * (4 * _WORDS)).from_address(self._bits.ctypes.state_address)
        self._seen = b""
        self._pair: tuple[int, float] = (0, 0.0)

    def mark(self) -> tuple[bytes, tuple[int, float]]:
        words = self._words.raw
        if words != self._seen or self._pair[0]:
            state: Any = np.random.get_state(legacy=False)
            self._seen, self._pair = words, (state["has_gauss"], state["gauss"])
        return words, self._pair

    def put_back(self, mark: tuple[bytes, tuple[int, float]]) -> None:
        words, (has_second, second) = mark
        key = np.frombuffer(words, dtype=np.uint32, count=_WORDS - 1)
        np.random.set_state(("MT19937", key, struct.unpack_from("i", words, 4 * (_WORDS - 1))[0], has_second, second))
        self._seen, self._pair = mark

    def seed(self, key: bytes) -> None:
        np.random.seed(int.from_bytes(key[:4], "little"))


class PythonGenerator:
    """Python's. Its `getstate` takes 6 us, and comparing two of them as long; reading the memory takes 0.4 us.

    CPython keeps the state behind the head of the object: index, then 624 words. Where that is not so, `getstate` is
    asked after all.
    """

    def __init__(self) -> None:
        self._instance: random.Random = random.random.__self__  # type: ignore[attr-defined]
        has_room = type(self._instance).__basicsize__ >= object.__basicsize__ + 4 * _WORDS
        place = id(self._instance) + object.__basicsize__
        self._words = (ctypes.c_char * (4 * _WORDS)).from_address(place) if has_room else None
        if has_room and _as_state(*self.mark()) != random.getstate():
            self._words = None

    def mark(self) -> Any:
        if self._words is None:
            return random.getstate()
        return self._words.raw, self._instance.gauss_next  # type: ignore[attr-defined]

    def put_back(self, mark: Any) -> None:
        random.setstate(mark if self._words is None else _as_state(*mark))

    def seed(self, key: bytes) -> None:
        random.seed(int.from_bytes(key, "little"))


def _as_state(words: bytes, gauss_next: float | None) -> tuple[int, tuple[int, ...], float | None]:
    """Return what random.setstate takes."""
    index, *state = struct.unpack(f"{_WORDS}I", words)
    return 3, (*state, index), gauss_next


def _marks(generators: Sequence[GlobalGenerator]) -> list[Any]:
    """Return a mark of each; called twice for each batch, so the first three are no loop."""
    of_torch, of_numpy, of_python = generators[:3]
    found = [of_torch.mark(), of_numpy.mark(), of_python.mark()]
    if len(generators) > len(found):
        found += [generator.mark() for generator in generators[len(found) :]]
    return found


def _seeds(seed: int, *what: object) -> bytes:
    """Return 8 bytes for each generator, which nothing but a key of the same words gives."""
    return hashlib.blake2b(repr((seed, *what)).encode(), digest_size=8 * (len(_OF_HOST) + 1)).digest()


_WORDS = 625  # of a Mersenne twister: its state and the place in it
_SAMPLES_TO_LEARN_FROM = 64
_OF_HOST = (TorchGenerator(torch.default_generator), NumpyGenerator(), PythonGenerator())
