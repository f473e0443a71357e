"""Acknowledged data survive power cuts, which are simulated by shutting down an ext4 file system during operations.

By default, the power of a saving process is cut 40 times, with several mount options, and that of a complete run once;
with ACCEL_RUN_FAULTS=long, 10,000 and 300 times.
Variants of `System` that skip fsync must lose data; otherwise the test could not detect lost data.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults import power_cuts
from tests.faults.disk import reason_to_skip
from tests.faults.tallies import Tally
from tests.forkserver import ForkServer

Amount = Callable[[int, int], int]


@pytest.fixture(scope="module")
def why_skipped(server: ForkServer) -> str:
    return server.call(reason_to_skip)


@pytest.fixture
def count(amount: Amount, tally: Tally, why_skipped: str) -> int:
    """Return the number of power cuts. Where they are impossible, count them as skipped and skip the test."""
    wanted = amount(40, 10_000)
    if why_skipped:
        tally.skip(why_skipped, wanted)
        pytest.skip(why_skipped)
    return wanted


def test_an_acknowledged_checkpoint_survives_a_power_cut(
    count: int, server: ForkServer, seed: int, tally: Tally
) -> None:
    campaign = server.call(power_cuts.cut_saves, count, seed)
    tally.tried += campaign.cuts
    tally.notes |= {
        "inside a save": campaign.inside, "saves": campaign.saves,
        "slowest recovery": f"{campaign.slowest_recovery_s * 1000:.0f} ms",
    }  # fmt: skip
    assert campaign.cuts == count
    assert not campaign.lost, "\n".join(campaign.lost)


@pytest.mark.slow
def test_a_run_that_loses_power_ends_bitwise_equal(
    server: ForkServer, amount: Amount, seed: int, tally: Tally, why_skipped: str
) -> None:
    count = amount(1, 300)
    if why_skipped:
        tally.skip(why_skipped, count)
        pytest.skip(why_skipped)
    campaign = server.call(power_cuts.cut_runs, count, seed)
    tally.tried += campaign.cuts
    tally.notes["at an operation"] = campaign.inside
    assert not campaign.lost, "\n".join(campaign.lost)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("careless", [name for name in power_cuts.SYSTEMS if name != "real"])
def test_the_test_detects_a_save_that_does_not_wait_for_the_disk(
    careless: str, server: ForkServer, amount: Amount, seed: int, tally: Tally, why_skipped: str
) -> None:
    if why_skipped:
        pytest.skip(why_skipped)
    num_lost = amount(1, 5)
    campaign = server.call(power_cuts.cut_saves, 40, seed, careless, num_lost)
    tally.tried += campaign.cuts
    tally.notes["caught"] = len(campaign.lost)
    assert len(campaign.lost) == num_lost, f"{careless}: only {campaign.lost}"


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("write", [power_cuts.write_in_place, power_cuts.write_and_rename], ids=["in place", "renamed"])
def test_the_test_detects_that_torch_save_is_not_durable(
    write: Callable[..., None], server: ForkServer, amount: Amount, seed: int, tally: Tally, why_skipped: str
) -> None:
    if why_skipped:
        pytest.skip(why_skipped)
    campaign = server.call(power_cuts.cut_saves_in_place, amount(3, 20), seed, write)
    tally.tried += campaign.cuts
    tally.notes["caught"] = len(campaign.lost)
    assert campaign.lost, "nothing was lost"
