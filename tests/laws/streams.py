"""Streams of numbers for tests: with and without state, in files of unequal lengths, some intentionally broken."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

FILES = [list(range(17)), list(range(17, 40)), list(range(40, 45)), list(range(45, 61)), list(range(61, 71))]
NUMBERS = [*chain(*FILES)]


class Files:
    """Numbers of some files, in order, each with a draw from the global generators of torch and Python."""

    def __init__(self, files: list[list[int]]) -> None:
        self.files, self.epoch = files, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in [*chain(*self.files)]:
            yield torch.tensor([float(number), float(self.epoch), random.random(), float(torch.rand(()))])


class WithLength(Files):
    def __len__(self) -> int:
        return sum(map(len, self.files))


class Stateful(Files):
    """Resumes at its position without reading earlier samples."""

    def __init__(self, files: list[list[int]]) -> None:
        super().__init__(files)
        self.position, self.opened = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        start, self.opened = self.position, self.opened + 1
        for place, number in enumerate([*chain(*self.files)][start:]):
            self.position = start + place + 1
            yield torch.tensor([float(number), float(self.epoch), random.random(), float(torch.rand(()))])
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class StatefulWithLength(Stateful):
    def __len__(self) -> int:
        return sum(map(len, self.files))


class Liar(StatefulWithLength):
    """Ignores its saved state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = 0


class Shuffled(WithLength):
    """Shuffles with a buffer and Python's global generator."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer: list[torch.Tensor] = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 6:
                yield buffer.pop(random.randrange(6))
        random.shuffle(buffer)
        yield from buffer


KINDS: dict[str, type[Files]] = {
    "plain": Files,
    "length": WithLength,
    "state": Stateful,
    "state_and_length": StatefulWithLength,
    "lying_state": Liar,
    "shuffled": Shuffled,
}


class ByWorker(IterableDataset):  # type: ignore[type-arg]
    """A dataset that divides itself among workers, as in torch's documentation."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from (torch.tensor([float(number)]) for number in NUMBERS[first::step])


class Undivided(IterableDataset):  # type: ignore[type-arg]
    """A dataset that every worker reads completely."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.tensor([float(number)]) for number in NUMBERS)


class Unseeded(IterableDataset):  # type: ignore[type-arg]
    """A dataset with an unseeded generator."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = list(NUMBERS)
        random.Random().shuffle(numbers)
        yield from (torch.tensor([float(number)]) for number in numbers)
