"""Ranks meet on the interface that leads to each other."""

from __future__ import annotations

from types import SimpleNamespace

import psutil  # type: ignore[import-untyped]
import pytest

from runner.base.rank_env import RankInfo
from runner.distributed.network_interface import interface_of

ADDRESSES = {
    "lo": ["127.0.0.1", "::1", "00:00:00:00:00:00"],
    "eth0": ["10.0.0.5", "fe80::1"],
    "eth1": ["10.0.0.6"],
}


@pytest.mark.parametrize("store", ["tcp://127.0.0.1:29500", "file:///tmp/store"])
def test_on_one_machine_ranks_meet_on_the_loopback(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has addresses of several kinds, one of which is the one that is looked for."""
    rows = {name: [SimpleNamespace(address=address) for address in found] for name, found in ADDRESSES.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: rows)
    assert interface_of(RankInfo(0, 0, 2, 2, store)) == "lo"


def test_where_no_interface_has_the_address_none_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    assert interface_of(RankInfo(0, 0, 2, 2, "tcp://127.0.0.1:29500")) == ""
