"""A killed process loses nothing that it acknowledged, and the same command resumes with bitwise equal results.

By default, a saving process is killed 40 times, at and between operations, and a complete run a few times, alone or
with workers; with ACCEL_RUN_FAULTS=long, 10,000 and 1,000 times.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import kills
from tests.faults.tallies import Tally
from tests.forkserver import ForkServer

Amount = Callable[[int, int], int]


def test_an_acknowledged_checkpoint_survives_a_kill(
    server: ForkServer, tmp_path: Path, amount: Amount, seed: int, tally: Tally
) -> None:
    count = amount(40, 10_000)
    campaign = server.call(kills.kill_saves, tmp_path, count, seed)
    tally.tried += campaign.kills
    tally.notes |= {"inside a save": campaign.inside, "saves": campaign.saves}
    assert campaign.kills == count
    assert not campaign.bad, "\n".join(campaign.bad)


def test_the_test_detects_that_torch_save_does_not_survive_a_kill(
    server: ForkServer, tmp_path: Path, amount: Amount, seed: int, tally: Tally
) -> None:
    campaign = server.call(kills.kill_in_place, tmp_path, amount(3, 20), seed)
    tally.tried += campaign.kills
    tally.notes["caught"] = len(campaign.bad)
    assert len(campaign.bad) == campaign.kills, f"only {campaign.bad}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("args", "share"),
    [((), 0.7), (("dataloader.num_workers=2", "dataloader.start_method=fork"), 0.3)],
    ids=["alone", "workers"],
)
def test_a_repeatedly_killed_run_ends_bitwise_equal(
    args: tuple[str, ...], share: float, server: ForkServer, tmp_path: Path, amount: Amount, seed: int, tally: Tally
) -> None:
    count = round(share * amount(4, 1000))
    campaign = server.call(kills.kill_runs, tmp_path, count, seed, args)
    tally.tried += campaign.kills
    tally.notes |= {"runs": campaign.runs, **{f"by {kind}": number for kind, number in campaign.moments.items()}}
    assert campaign.kills >= count
    assert not campaign.bad, "\n".join(campaign.bad)
