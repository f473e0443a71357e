"""A run is reachable only from its own machine, on any network interface."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.tallies import Tally

ROOT = Path(__file__).parents[2]
TASK = Path(__file__).with_name("task_to_attack.py")

# Runs a command in a network namespace, and records every address with a listening socket.
DRIVER = """
import json, subprocess, sys, time
def listening():
    found = set()
    for kind, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in open(f"/proc/net/{kind}").read().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state:
                found.add((kind, fields[1].split(":")[0]))
    return found
seen = set()
process = subprocess.Popen(json.loads(sys.argv[1]), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
while process.poll() is None:
    seen |= listening()
    time.sleep(0.002)
print(json.dumps({"code": process.returncode, "seen": sorted(seen), "out": process.stdout.read()[-3000:]}))
"""
NETWORK = (
    "ip link set lo up && ip link add d0 type veth peer name d1 && ip addr add 10.9.8.7/24 dev d0"
    " && ip link set d0 up && ip link set d1 up && exec "
)
LOCAL = {
    ("tcp", "0100007F"),
    ("tcp6", "0" * 24 + "01000000"),
    ("tcp6", "0000000000000000FFFF00000100007F"),
    ("udp", "0100007F"),
}


def watched(folder: Path, args: list[str]) -> dict[str, object]:
    driver = [sys.executable, "-c", DRIVER, json.dumps(args)]
    script = NETWORK + '"$@"'
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", script, "sh", *driver],
        cwd=folder, capture_output=True, text=True, check=False, timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


def has_networks() -> bool:
    if os.geteuid() or not shutil.which("unshare") or not shutil.which("ip"):
        return False
    return (
        subprocess.run(["unshare", "-n", "sh", "-c", NETWORK + "true"], capture_output=True, check=False).returncode
        == 0
    )


def addresses(result: dict[str, object]) -> set[tuple[str, str]]:
    seen = result["seen"]
    assert isinstance(seen, list)
    return {(kind, address) for kind, address in seen}


@pytest.fixture
def network(tally: Tally) -> Tally:
    if not has_networks():
        tally.skip("needs root, and a network namespace with a second address")
        pytest.skip("needs root, and a network namespace with a second address")
    return tally


def test_the_check_detects_listening_sockets(network: Tally, tmp_path: Path) -> None:
    code = "import socket, time; one = socket.create_server(('', 0)); time.sleep(0.3)"
    assert addresses(watched(tmp_path, [sys.executable, "-c", code])) - LOCAL == {("tcp", "00000000")}


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
def test_a_run_has_no_socket_open_to_others(network: Tally, tmp_path: Path, args: str) -> None:
    train = f"train --task {TASK} device=cpu updates=4 run=r {args}"
    run = [sys.executable, "-m", "runner", *train.split()]
    result = watched(tmp_path, run)
    assert result["code"] == 0, result["out"]
    assert addresses(result) <= LOCAL, result
    if "world_size" in args:
        assert addresses(result), "ranks at the rendezvous listen on a socket, which was not recorded"
    network.tried += 1
