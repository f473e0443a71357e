"""A run accepts connections only from its own machine, whatever network interfaces this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.tallies import Tally
from tests.forkserver import CompletedCommand, ForkServer
from tests.waiting import wait_until

TASK = Path(__file__).with_name("task_to_attack.py")

LINKS = (
    "ip link set lo up && ip link add d0 type veth peer name d1 && ip addr add 10.9.8.7/24 dev d0"
    " && ip link set d0 up && ip link set d1 up"
)
# Code that moves a forked command to a network namespace with a second interface.
ISOLATE = f"""
import ctypes, subprocess
from pathlib import Path
CLONE_NEWNET = 0x40000000
assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0
subprocess.run({LINKS!r}, shell=True, check=True)
Path("isolated").touch()
"""
LISTENING = """
import signal, socket
one = socket.create_server(("", 0))
Path("listening").touch()
while True:
    signal.pause()
"""
LOCAL = {
    ("tcp", "0100007F"),
    ("tcp6", "0" * 24 + "01000000"),
    ("tcp6", "0000000000000000FFFF00000100007F"),
    ("udp", "0100007F"),
}
STATES = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # of a listening socket


def addresses(pid: int) -> set[tuple[str, str]]:
    """Return the addresses of listening sockets in the network namespace of a process."""
    found = set()
    for kind, state in STATES.items():
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state:
                found.add((kind, fields[1].partition(":")[0]))
    return found


def record_addresses(server: ForkServer, args: str, folder: Path) -> tuple[CompletedCommand, set[tuple[str, str]]]:
    """Run a command in a network namespace; return its result and all addresses on which it listened."""
    seen: set[tuple[str, str]] = set()
    pid = server.start(args.split(), folder, before=ISOLATE)
    wait_until((folder / "isolated").exists, "the network namespace")
    with suppress(OSError):  # the process has ended
        while True:
            seen |= addresses(pid)
            time.sleep(0.002)  # lint-tests: sleep: polling interval; no order depends on it
    return server.wait(), seen


def has_networks() -> bool:
    if os.geteuid() or not shutil.which("unshare") or not shutil.which("ip"):
        return False
    return subprocess.run(["unshare", "-n", "sh", "-c", LINKS], capture_output=True, check=False).returncode == 0


@pytest.fixture
def network(tally: Tally) -> Tally:
    if not has_networks():
        tally.skip("needs root, and a network namespace with a second address")
        pytest.skip("needs root, and a network namespace with a second address")
    return tally


def test_the_check_detects_listening_sockets(network: Tally, server: ForkServer, tmp_path: Path) -> None:
    pid = server.start([], tmp_path, before=ISOLATE + LISTENING)
    wait_until((tmp_path / "listening").exists, "the socket")
    assert addresses(pid) - LOCAL == {("tcp", "00000000")}
    server.clear()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "args",
    [
        "dataloader.num_workers=2 tracker=wandb tracker.mode=offline parallelism=ddp parallelism.world_size=2",
        "dataloader.num_workers=2 tracker=wandb tracker.mode=offline",
        "parallelism=fsdp parallelism.world_size=2",
        "parallelism=pipeline parallelism.world_size=2",
    ],
    ids=["ddp", "one process", "fsdp", "pipeline"],
)
def test_a_run_listens_only_on_the_loopback_interface(
    network: Tally, server: ForkServer, tmp_path: Path, args: str
) -> None:
    result, seen = record_addresses(server, f"train --task {TASK} device=cpu updates=4 run=r {args}", tmp_path)
    assert result.code == 0, result.err
    assert seen <= LOCAL, seen
    if "world_size" in args:
        assert seen, "ranks listen on a socket during the rendezvous, but none was recorded"
    network.tried += 1
