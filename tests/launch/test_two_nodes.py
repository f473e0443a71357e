"""Ranks on machines that share a network and nothing else: two network namespaces, joined by a cable of their own."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.base.errors import AccelRunError, Exit
from runner.base.ranks import Member
from runner.distributed.interface import choose_interface, interface_of
from runner.distributed.join import joined
from tests.forkserver import ForkServer

CPU = torch.device("cpu")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 29500
CABLE = "cable"  # the name of either end
NEW_NETWORK = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True)
class Ended:
    """How a rank ended: what it returned, or its exit code and what it said."""

    value: Any
    code: int
    error: str


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces, with one address each and nothing but a cable between them."""
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


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def run_in(
    spaces: tuple[str | None, ...], function: Callable[[int], Any], folder: Path, *, limit_s: float = 60.0
) -> list[Ended]:
    """Return how `function(rank)` ended in a forked process for each network namespace; all have ended."""
    torch.set_num_threads(1)
    pids = [_forked(function, rank, space, folder) for rank, space in enumerate(spaces)]
    codes: dict[int, int] = {}
    limit = time.monotonic() + limit_s
    while len(codes) < len(pids) and time.monotonic() < limit:
        for rank, pid in enumerate(pids):
            if rank not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    late = [rank for rank in range(len(pids)) if rank not in codes]
    for rank in late:
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    assert not late, f"ranks {late} did not end within {limit_s:g} s"
    return [Ended(**json.loads((folder / f"{rank}.json").read_text())) for rank in range(len(pids))]


def _forked(function: Callable[[int], Any], rank: int, space: str | None, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    ended: dict[str, Any] = {"value": None, "code": 1, "error": ""}
    try:
        if space is not None:
            enter(space)
        ended |= {"value": function(rank), "code": 0}
    except AccelRunError as error:
        ended |= {"code": int(error.exit_code), "error": str(error)}
    except BaseException as error:
        ended["error"] = repr(error)
    finally:
        (folder / f"{rank}.json").write_text(json.dumps(ended))
        os._exit(0)  # nothing of pytest's may run at exit


def enter(space: str) -> None:
    """This process sees the network of that namespace only."""
    with Path(f"/run/netns/{space}").open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def summed(rank: int) -> list[float]:
    member = Member(rank, 0, 2, 1, f"tcp://{ADDRESSES[0]}:{PORT}")
    with joined(member, CPU, timeout_s=20.0) as world:
        mine = torch.arange(5, dtype=torch.float64) * (rank + 1)
        found: list[float] = world.sum(mine).tolist()
        assert world.gather(rank) == [0, 1]
        assert world.from_first(rank) == 0
        return found


def test_ranks_on_two_machines_add_their_tensors(namespaces: tuple[str, str], tmp_path: Path) -> None:
    ended = run_in(namespaces, summed, tmp_path)
    assert [one.error for one in ended] == ["", ""]
    assert [one.value for one in ended] == [[0.0, 3.0, 6.0, 9.0, 12.0]] * 2


@pytest.mark.parametrize("given", ["", "other"])
def test_the_interface_is_the_one_towards_rank_0_unless_it_was_given(
    given: str, namespaces: tuple[str, str], tmp_path: Path
) -> None:
    def chosen(rank: int) -> str:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        os.environ.update({"GLOO_SOCKET_IFNAME": given} if given else {})
        choose_interface(Member(rank, 0, 2, 1, f"tcp://{ADDRESSES[0]}:{PORT}"))
        return os.environ["GLOO_SOCKET_IFNAME"]

    assert [one.value for one in run_in(namespaces, chosen, tmp_path)] == [given or CABLE] * 2


def test_a_first_rank_that_knows_itself_as_loopback_takes_the_way_out(
    namespaces: tuple[str, str], tmp_path: Path
) -> None:
    def chosen(rank: int) -> str:
        subprocess.run(["ip", "route", "add", "default", "dev", CABLE], check=True, capture_output=True)
        return interface_of(Member(0, 0, 2, 1, f"tcp://127.0.0.1:{PORT}"))

    assert run_in(namespaces[:1], chosen, tmp_path)[0].value == CABLE


def test_ranks_of_one_machine_listen_for_nobody_else() -> None:
    assert interface_of(Member(1, 1, 2, 2, f"tcp://{ADDRESSES[0]}:{PORT}")) == "lo"
    assert interface_of(Member(1, 1, 2, 2, "file:///tmp/store")) == "lo"


def test_the_machines_share_nothing_but_the_cable(namespaces: tuple[str, str], tmp_path: Path) -> None:
    """So that the test above cannot pass by a loopback that both would share."""

    def interfaces(rank: int) -> list[str]:
        return sorted(name for _, name in socket.if_nameindex())

    ended = run_in(namespaces, interfaces, tmp_path)
    assert [one.value for one in ended] == [[CABLE, "lo"]] * 2

    def over_loopback(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        with joined(Member(rank, 0, 2, 1, f"tcp://127.0.0.1:{PORT}"), CPU, timeout_s=2.0):
            pass

    ended = run_in(namespaces, over_loopback, tmp_path)
    assert [one.code for one in ended] == [Exit.SYSTEM] * 2


def test_a_machine_that_is_alone_gives_up_in_time_and_says_so(namespaces: tuple[str, str], tmp_path: Path) -> None:
    def alone(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = CABLE
        with joined(Member(rank, 0, 2, 1, f"tcp://{ADDRESSES[0]}:{PORT}"), CPU, timeout_s=2.0):
            pass

    began = time.monotonic()
    (ended,) = run_in(namespaces[:1], alone, tmp_path)
    assert time.monotonic() - began < 20
    assert ended.code == Exit.SYSTEM
    assert "rank 0 of 2 cannot meet the others" in ended.error


def test_a_port_that_is_taken_ends_with_71_and_says_which(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        def first(rank: int) -> None:
            with joined(Member(rank, rank, 2, 2, f"tcp://127.0.0.1:{port}"), CPU, timeout_s=5.0):
                pass

        began = time.monotonic()
        (ended,) = run_in((None,), first, tmp_path)
    assert time.monotonic() - began < 20
    assert ended.code == Exit.SYSTEM
    assert f"tcp://127.0.0.1:{port}" in ended.error
    assert "rank 0 of 2 cannot meet the others" in ended.error
    assert "MASTER_PORT" in ended.error


def test_a_rank_that_finds_somebody_else_at_the_port_gives_up_in_time(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        def second(rank: int) -> None:
            with joined(Member(1, 1, 2, 2, f"tcp://127.0.0.1:{port}"), CPU, timeout_s=2.0):
                pass

        began = time.monotonic()
        (ended,) = run_in((None,), second, tmp_path)
    assert time.monotonic() - began < 20
    assert ended.code == Exit.SYSTEM
    assert "rank 1 of 2 cannot meet the others" in ended.error


@pytest.mark.slow
def test_torchrun_on_two_machines_trains_as_one_process_does(
    namespaces: tuple[str, str], server: ForkServer, tmp_path: Path
) -> None:
    train = ["-m", "runner", "train", "device=cpu", "task.size=tiny", "updates=10", "log_every=1", "evaluate.every=0"]
    train += ["evaluate.samples=4", "micro_batch_size=4", f"output_root={tmp_path}"]
    torchrun = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--master-addr={ADDRESSES[0]}"]
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": CABLE,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    train += ["run=two", "parallelism=ddp"]
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", space, sys.executable, "-m", *torchrun, f"--node-rank={number}", *train],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, space in enumerate(namespaces)
    ]
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    alone = server.run([*train[2:-2], "run=one"], tmp_path)
    assert alone.code == 0, alone.err
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert len(losses(tmp_path / "two")) == 10


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["train/loss"] for row in rows if "train/loss" in row]
