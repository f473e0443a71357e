"""Ranks on two machines that share only a network, simulated by two network namespaces and a veth pair."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.base.errors import Exit
from runner.base.rank_env import RankInfo
from runner.distributed.join import choose_interface, find_interface, join_process_group
from tests.forkserver import ForkServer
from tests.launch.forked import CompletedFork, rank_function, run_forks
from tests.rounding import PROMISED

CPU = torch.device("cpu")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 29500
CABLE = "cable"  # the name of both ends of the veth pair
GIVES_UP_S = 2.0  # a timeout for waiting for ranks that do not come


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with one address each, connected only by a veth pair."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    names = (f"accel-run-{os.getpid()}-a", f"accel-run-{os.getpid()}-b")
    made = subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip("-n", names[0], "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            ip("-n", name, "link", "set", CABLE, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


def run_in(spaces: tuple[str, ...], function: Callable[[int], Any], folder: Path) -> list[CompletedFork]:
    """Run `function(rank)` in a forked process in each network namespace, and return the results."""
    return run_forks([partial(function, rank) for rank in range(len(spaces))], folder, spaces)


def join_as(member: RankInfo) -> None:
    """Join the process group with a short timeout."""
    with join_process_group(member, CPU, timeout_s=GIVES_UP_S):
        pass


def sum_tensors(rank: int) -> list[float]:
    member = RankInfo(rank, 0, 2, 1, f"tcp://{ADDRESSES[0]}:{PORT}")
    with join_process_group(member, CPU, timeout_s=120.0) as world:
        mine = torch.arange(5, dtype=torch.float64) * (rank + 1)
        result: list[float] = world.sum(mine).tolist()
        assert world.gather(rank) == [0, 1]
        assert world.broadcast(rank) == 0
        return result


def test_ranks_on_two_machines_sum_their_tensors(namespaces: tuple[str, str], tmp_path: Path) -> None:
    result = run_in(namespaces, sum_tensors, tmp_path)
    assert [one.error for one in result] == ["", ""]
    assert [one.value for one in result] == [[0.0, 3.0, 6.0, 9.0, 12.0]] * 2


@pytest.mark.parametrize("given", ["", "other"])
def test_the_interface_towards_rank_0_is_the_default(given: str, namespaces: tuple[str, str], tmp_path: Path) -> None:
    def chosen(rank: int) -> str:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        os.environ.update({"GLOO_SOCKET_IFNAME": given} if given else {})
        choose_interface(RankInfo(rank, 0, 2, 1, f"tcp://{ADDRESSES[0]}:{PORT}"))
        return os.environ["GLOO_SOCKET_IFNAME"]

    assert [one.value for one in run_in(namespaces, chosen, tmp_path)] == [given or CABLE] * 2


def test_rank_0_uses_the_outgoing_interface_not_loopback(namespaces: tuple[str, str], tmp_path: Path) -> None:
    """The name of rank 0 resolves to loopback."""

    def chosen(rank: int) -> str:
        subprocess.run(["ip", "route", "add", "default", "dev", CABLE], check=True, capture_output=True)
        return find_interface(RankInfo(0, 0, 2, 1, f"tcp://127.0.0.1:{PORT}"))

    assert run_in(namespaces[:1], chosen, tmp_path)[0].value == CABLE


def test_ranks_of_one_machine_listen_only_on_loopback() -> None:
    assert find_interface(RankInfo(1, 1, 2, 2, f"tcp://{ADDRESSES[0]}:{PORT}")) == "lo"
    assert find_interface(RankInfo(1, 1, 2, 2, "file:///tmp/store")) == "lo"


def test_the_machines_share_only_the_network(namespaces: tuple[str, str], tmp_path: Path) -> None:
    """Otherwise, test_ranks_on_two_machines_sum_their_tensors could pass over a shared loopback."""

    def interfaces(rank: int) -> list[str]:
        return sorted(name for _, name in socket.if_nameindex())

    result = run_in(namespaces, interfaces, tmp_path)
    assert [one.value for one in result] == [[CABLE, "lo"]] * 2

    def over_loopback(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        join_as(RankInfo(rank, 0, 2, 1, f"tcp://127.0.0.1:{PORT}"))

    result = run_in(namespaces, over_loopback, tmp_path)
    assert [one.code for one in result] == [Exit.SYSTEM] * 2


def test_a_machine_without_peers_times_out(namespaces: tuple[str, str], tmp_path: Path) -> None:
    def alone(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = CABLE
        join_as(RankInfo(rank, 0, 2, 1, f"tcp://{ADDRESSES[0]}:{PORT}"))

    (result,) = run_in(namespaces[:1], alone, tmp_path)
    assert result.code == Exit.SYSTEM


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reports_a_port_used_by_another_program(rank: int, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        store = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        (result,) = run_forks([partial(join_as, RankInfo(rank, rank, 2, 2, store))], tmp_path)
    assert result.code == Exit.SYSTEM
    assert store in result.error
    assert "MASTER_PORT" in result.error


def test_ranks_join_with_different_restart_counts(tmp_path: Path) -> None:
    """A node that rejoins has a new agent, whose restart count begins at 0 again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{probe.getsockname()[1]}"

    def join(rank: int) -> None:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # as with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
        with join_process_group(RankInfo(rank, rank, 2, 2, store, attempt=rank), CPU, timeout_s=60.0) as world:
            assert world.gather(rank) == [0, 1]

    result = run_forks([partial(join, rank) for rank in range(2)], tmp_path)
    assert [one.error for one in result] == [""] * 2


@pytest.mark.slow
@pytest.mark.parametrize("shares", ["equal", "speed", "[11,5]"])
def test_two_machines_train_like_one_process(
    shares: str, namespaces: tuple[str, str], server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", CABLE)
    args = ["train", "device=cpu", "task.size=tiny", "updates=5", "log_every=1", "evaluate.every=0", "monitor=off"]
    args += ["evaluate.samples=4", "micro_batch_size=4", "global_batch_size=16", f"output_root={tmp_path}"]
    two = [*args, "run=two", "parallelism=ddp", f"parallelism.shares={shares}"]
    ranks = [rank_function(two, tmp_path, rank, 2, f"{ADDRESSES[0]}:{PORT}") for rank in (0, 1)]
    result = run_forks(ranks, tmp_path, namespaces)
    assert [rank.value for rank in result] == [0, 0], result
    alone = server.run([*args, "run=one"], tmp_path)
    assert alone.code == 0, alone.err
    assert losses(tmp_path / "two") == pytest.approx(
        losses(tmp_path / "one"), rel=5 * PROMISED[torch.float32]
    )  # one rounding error per update
    assert len(losses(tmp_path / "two")) == 5


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["train/loss"] for row in rows if "train/loss" in row]
