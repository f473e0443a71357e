"""The global generators of torch, NumPy, Python and the device are saved, restored and seeded together."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from runner.tensors.global_rng import random_state, restore_random_state, seed_everything

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.randn(3).tolist(),
    "numpy": lambda: np.random.standard_normal(3).tolist(),  # NumPy caches the second normal number of a pair
    "python": lambda: [random.gauss(0, 1), random.random()],
}


def draw_all() -> dict[str, Any]:
    return {name: draw() for name, draw in DRAWS.items()}


@pytest.fixture(autouse=True)
def restore_generators() -> Any:
    tensors, rest = random_state(CPU)
    yield
    restore_random_state(tensors, rest, CPU)


@pytest.mark.parametrize("name", DRAWS)
def test_restored_generators_continue_their_sequences(name: str) -> None:
    seed_everything(5)
    draw_all()
    tensors, rest = random_state(CPU)
    rest = json.loads(json.dumps(rest))
    expected = draw_all()
    draw_all()
    restore_random_state(tensors, rest, CPU)
    assert DRAWS[name]() == expected[name]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("seed", [0, 7, 2**32 + 7, 2**63 - 1])
def test_seeding_affects_each_generator(name: str, seed: int) -> None:
    seed_everything(seed)
    first = DRAWS[name]()
    assert DRAWS[name]() != first
    seed_everything(seed)
    assert DRAWS[name]() == first
    seed_everything(seed ^ 1)
    assert DRAWS[name]() != first


def test_a_seed_gives_the_same_sequence_as_torch_manual_seed() -> None:
    seed_everything(7)
    drawn = torch.randn(3)
    torch.manual_seed(7)
    assert torch.equal(torch.randn(3), drawn)


@pytest.mark.parametrize("is_available", [False, True])
def test_generators_of_gpus_are_seeded_if_there_are_any(is_available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    # lint-tests: private: true in a worker process of a CUDA build
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    seed_everything(7)
    assert seeds == [7] * is_available


def test_the_device_generator_is_saved_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the device of the run matters if there are several."""
    states = {"cuda:0": torch.tensor([10]), "cuda:1": torch.tensor([11])}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[str(device)].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({str(device): state}))
    device = torch.device("cuda:1")
    tensors, rest = random_state(device)
    states["cuda:1"] = torch.tensor([99])
    restore_random_state(tensors, rest, device)
    assert {name: int(state) for name, state in states.items()} == {"cuda:0": 10, "cuda:1": 11}


def test_a_gpu_checkpoint_resumes_on_a_cpu_and_vice_versa(monkeypatch: pytest.MonkeyPatch) -> None:
    """State that exists on only one of the two devices is ignored."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor([1]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *given: calls.append(given))
    cuda = torch.device("cuda:0")
    for saved_on, resumed_on in ((cuda, CPU), (CPU, cuda)):
        seed_everything(3)
        state = random_state(saved_on)
        expected = draw_all()
        restore_random_state(*state, resumed_on)
        assert draw_all() == expected
    assert calls == []
