"""The network interface that ranks use to communicate."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from runner.base.errors import DeviceMissing
from runner.base.rank_env import RankInfo
from runner.distributed import join
from runner.distributed.join import choose_interface, find_interface
from tests.suggestions import suggested

ADDRESSES = {
    "lo": ["127.0.0.1", "::1", "00:00:00:00:00:00"],
    "eth0": ["10.0.0.5", "fe80::1"],
    "eth1": ["10.0.0.6"],
}


@pytest.mark.parametrize("store", ["tcp://127.0.0.1:29500", "file:///tmp/store"])
def test_ranks_of_one_machine_use_the_loopback_interface(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interface with several addresses is selected if one of them matches."""
    rows = {name: [SimpleNamespace(address=address) for address in result] for name, result in ADDRESSES.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: rows)
    assert find_interface(RankInfo(0, 0, 2, 2, store)) == "lo"


@pytest.mark.parametrize(
    ("num_local_ranks", "given", "expected"), [(2, "", "=lo"), (2, "eth1", "eth1"), (1, "", ""), (1, "eth1", "eth1")]
)
def test_nccl_uses_loopback_on_a_single_machine(
    num_local_ranks: int, given: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"NCCL_SOCKET_IFNAME": given} if given else {}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(join, "find_interface", lambda rank_info: "lo")
    choose_interface(RankInfo(0, 0, 2, num_local_ranks, "tcp://127.0.0.1:29500"))
    assert environment.get("NCCL_SOCKET_IFNAME", "") == expected


def test_a_shared_gpu_is_not_reported_as_a_network_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "NCCL error: invalid usage\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
        )

    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    monkeypatch.setattr(join, "choose_interface", lambda rank_info: None)
    member = RankInfo(1, 1, 2, 2, f"file://{tmp_path}/store")
    with pytest.raises(DeviceMissing) as caught, join.join_process_group(member, torch.device("cpu")):
        pass
    assert suggested(caught.value.problems[0].fix) == ["device=cpu"]


def test_no_interface_is_selected_for_an_unknown_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    assert find_interface(RankInfo(0, 0, 2, 2, "tcp://127.0.0.1:29500")) == ""


class Probe:
    """A socket on a machine with the given routes: from the host that it connects to, to the local address."""

    routes: ClassVar[dict[str, str]] = {}

    def __init__(self, *_: object) -> None:
        self.host = ""

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None: ...

    def connect(self, place: tuple[str, int]) -> None:
        self.host = place[0]

    def getsockname(self) -> tuple[str, int]:
        if self.host not in self.routes:
            raise OSError("network is unreachable")
        return self.routes[self.host], 4000


@pytest.mark.parametrize(
    ("towards_rank_0", "expected"), [("10.0.0.6", "eth1"), ("127.0.0.1", "eth0"), ("127.0.1.1", "eth0"), (None, "eth0")]
)
def test_ranks_on_several_machines_use_the_interface_to_rank_0(
    towards_rank_0: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If rank 0 resolves its own name to loopback, the interface of the default route, here eth0, is used."""
    rows = {name: [SimpleNamespace(address=address) for address in result] for name, result in ADDRESSES.items()}
    routes = {} if towards_rank_0 is None else {"node0": towards_rank_0}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: rows)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **_: [(2, 2, 17, "", (host, port))])
    monkeypatch.setattr(socket, "socket", type("Routed", (Probe,), {"routes": {"192.0.2.1": "10.0.0.5"} | routes}))
    assert find_interface(RankInfo(1, 0, 1, 2, "tcp://node0:29500")) == expected
