"""Find the network interface that reaches the other ranks, because gloo often selects the loopback."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address

import psutil  # type: ignore[import-untyped]

from runner.base.rank_env import RankInfo


def choose_interface(rank_info: RankInfo) -> None:
    """Set gloo's network interface to the one that reaches the other ranks, unless `GLOO_SOCKET_IFNAME` is set.

    On a single machine that is the loopback, so that no port is open to others. Otherwise it is the interface towards
    rank 0. Many systems resolve the host name to 127.0.0.1: gloo would listen there, and the others would wait.
    """
    name = find_interface(rank_info)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def find_interface(rank_info: RankInfo) -> str:
    """Return the name of the interface, empty if the routes do not determine it."""
    if rank_info.num_local_ranks == rank_info.world_size or rank_info.store.startswith("file:"):
        return _interface_name("127.0.0.1")
    host, _, port = rank_info.store.partition("://")[2].rpartition(":")
    address = _route_address(host, int(port))
    if not address or ip_address(address).is_loopback:  # rank 0 resolved its own name
        address = _route_address(_EXTERNAL_ADDRESS, int(port))
    return _interface_name(address)


def _route_address(host: str, port: int) -> str:
    """Return this machine's address on the route to a host; sends nothing."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _interface_name(address: str) -> str:
    names = [name for name, rows in psutil.net_if_addrs().items() if any(row.address == address for row in rows)]
    return names[0] if names else ""


_EXTERNAL_ADDRESS = "192.0.2.1"  # reserved for documentation (RFC 5737), so it is reached by the default route
