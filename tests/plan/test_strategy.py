"""parallelism=auto takes the simplest strategy that fits, and says why in numbers."""

from __future__ import annotations

import pytest

from runner.base.errors import Problem
from runner.plan.ranks import RankDevice
from runner.plan.strategy import GIB, Footprint, choose


def devices(*gib: float) -> list[RankDevice]:
    return [RankDevice(f"cuda:{index}", f"a GPU of {size} GiB", "", int(size * GIB)) for index, size in enumerate(gib)]


def model(gib: float, *, activations: float = 0.05, layers: int | None = 24) -> Footprint:
    """A model that takes `gib` in all but activations, as float32 with AdamW: a quarter each, twice for the state."""
    quarter = int(gib * GIB / 4)
    return Footprint(quarter, quarter, 2 * quarter, int(activations * GIB), largest=quarter // 24, num_layers=layers)


@pytest.mark.parametrize(
    ("need", "there", "micro", "name", "options", "words"),
    [
        (model(4), devices(24), None, "single", {}, "one device"),
        (model(4), devices(16, 16), None, "ddp", {}, "fits each of 2 devices"),
        (model(4), devices(11, 8), None, "ddp", {"shares": "speed"}, "even shares fit"),
        (model(4, activations=0.3), devices(11, 8), None, "ddp", {"shares": "memory"}, "even shares do not fit"),
        (model(4, activations=0.3), devices(11, 8), 4, "ddp", {"shares": "speed"}, "even shares fit"),
        (model(20), devices(16, 16), None, "fsdp", {}, "a part of it fits"),
        (model(14), devices(11, 8), None, "pipeline", {}, "fsdp cuts evenly"),
        (model(12, layers=None), devices(11, 8), None, "fsdp", {}, "even parts of it fit"),
        (model(24), devices(16, 16), None, "fsdp", {}, "a part of it fits"),
    ],
)
def test_the_simplest_that_fits_is_taken(
    need: Footprint, there: list[RankDevice], micro: int | None, name: str, options: dict[str, str], words: str
) -> None:
    found = choose(need, there, 32, micro)
    assert not isinstance(found, Problem)
    assert (found.name, found.options) == (name, options), found.reason
    assert found.reason.startswith("auto: ")
    assert words in found.reason


def test_what_fits_nowhere_is_said_with_what_would_help() -> None:
    found = choose(model(40, layers=None), devices(11, 8), 32, None)
    assert isinstance(found, Problem)
    assert "needs 40" in found.what
    assert "11 GiB + 8 GiB" in found.what
    assert "memory=checkpoint" in found.fix
    assert "layers()" in found.fix


def test_shares_that_follow_speed_pass_what_the_smallest_device_holds() -> None:
    """Whatever the shares become, no pass is larger than that."""
    need = model(4, activations=0.3)
    fits = need.samples_on(8 * GIB)
    assert need.model + fits * need.activations <= 8 * GIB * 0.9 < need.model + (fits + 1) * need.activations
    assert model(20).samples_on(8 * GIB) == 1
