"""Measure how the cost of supervision, flags, checkpoints and reporting a failing rank grows with the number of ranks.

Ranks are processes that the local launcher forks and supervises, without a process group: heartbeats, exit reports,
parts of a checkpoint and its manifest are those of a run. The flags that the ranks exchange after each update are also
those of a run, but another process sums them over Unix sockets. Each rank saves its rows of a tensor and reads them, as
when a run resumes.

complete   all ranks finish: seconds; the largest number of descriptors, bytes sent and bytes read of a rank; bytes of
           the manifest; bytes that the times of the ranks take in a row of metrics.jsonl
failing    rank n/2 raises while the others wait for it: seconds until it is reported, and until all have ended
supervisor CPU seconds of this process in both runs, and the larger of the two increases of its peak resident memory

Run: python scripts/measure/bookkeeping.py --ranks 8 32 128 256
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.base.rank_env import RankInfo
from runner.base.stopwatch import PARTS
from runner.distributed.world import World
from runner.durable.checkpoint import Snapshot, checkpoint_path, load, save, save_part
from runner.durable.checkpoint_parts import CheckpointPart
from runner.engine.hooks.hook import Wants
from runner.engine.hooks.load_balance import time_columns
from runner.engine.hooks.rank_sync import Exchange
from runner.host.heartbeat import Heartbeat, HeartbeatTable
from runner.launch.local import run_ranks

UPDATES, ROWS, WIDTH = 5, 4, 256


class SocketWorld(World):
    """A world whose sums are computed by another process."""

    def connect(self, folder: Path) -> None:
        """Connect to the process that computes the sums."""
        link = socket.socket(socket.AF_UNIX)
        link.connect(str(folder / "sums"))
        object.__setattr__(self, "link", link)
        object.__setattr__(self, "num_sent", 0)

    def sum_async(self, tensor: torch.Tensor) -> Any:
        """Return a completed sum."""
        content = tensor.numpy().tobytes()
        self.link.sendall(content)  # type: ignore[attr-defined]
        object.__setattr__(self, "num_sent", self.num_sent + len(content))  # type: ignore[attr-defined]
        tensor.copy_(torch.from_numpy(np.frombuffer(receive(self.link, len(content))).copy()))  # type: ignore[attr-defined]
        return _Done()


class _Done:
    def wait(self) -> None:
        """Return immediately."""


class Alone:
    """A strategy that sends no numbers together with gradients."""

    def attached_sums(self) -> None:
        """Return None: there are no such numbers."""

    def attach_numbers(self, vector: torch.Tensor | None) -> bool:
        """Return False: the numbers are not sent."""
        return False


def receive(link: socket.socket, size: int) -> bytes:
    """Return exactly this many bytes."""
    content = bytearray(size)
    view = memoryview(content)
    while view:
        count = link.recv_into(view)
        if not count:
            raise EOFError("the other end is closed")
        view = view[count:]
    return bytes(content)


def add_for_all(folder: Path, num_ranks: int, size: int) -> None:
    """Compute sums for all ranks until one of them ends."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / "sums.new"))
    server.listen(num_ranks)
    (folder / "sums.new").rename(folder / "sums")
    links = [server.accept()[0] for _ in range(num_ranks)]
    while True:
        total = np.zeros(size // 8)
        for link in links:
            total += np.frombuffer(receive(link, size))
        for link in links:
            link.sendall(total.tobytes())


def read_bytes() -> int:
    """Return the bytes that this process has read."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def rank_main(folder: Path, fails: bool, member: RankInfo) -> tuple[int, Any]:
    """Run the updates of a rank, then save and read its part of a checkpoint."""
    rank, count = member.rank, member.world_size
    torch.set_num_threads(1)
    table = HeartbeatTable(Path(member.store.removeprefix("file://")).parent, rank)
    world = SocketWorld(torch.device("cpu"), rank, rank, count, count)
    world.connect(folder)
    exchange = Exchange(world, Alone())  # type: ignore[arg-type]
    for update in range(1, UPDATES + 1):
        table.publish(Heartbeat(update, 0.1, 600.0, True, "update", False, update, "train"))
        table.num_updates().value = update
        if fails and update == UPDATES and rank == count // 2:
            raise RuntimeError("this rank fails")
        exchange(Wants(), num_bad=0, seconds=dict.fromkeys(PARTS, 0.1), samples=4)
    rows = torch.full((ROWS, WIDTH), float(rank))
    snapshot = Snapshot(1, {"model": {"weight": rows}}, {}, {"world_size": count}, CheckpointPart(rank, count, "0"))
    (save_part if rank else save)(folder / "checkpoints", snapshot)
    exchange(Wants(), num_bad=0, seconds=None, samples=0)  # waits until all ranks have written their parts
    sent, before = world.num_sent, read_bytes()  # type: ignore[attr-defined]
    path = checkpoint_path(folder / "checkpoints", 1)
    again = load(path, hashes_tensors=rank == 0).stored("model")["weight"].read(rank * ROWS, (rank + 1) * ROWS)
    assert torch.equal(again, rows)
    return 0, {
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "sent": sent // (UPDATES + 1),
        "read": read_bytes() - before,
        "manifest": (path / "MANIFEST.json").stat().st_size,
        "is_first": rank == 0,
    }


def run(num_ranks: int, *, fails: bool) -> dict[str, float]:
    """Run this number of ranks once; return the measurements."""
    folder = Path(tempfile.mkdtemp())
    size = 8 * (len(Wants._fields) + 1 + num_ranks * (2 + len(PARTS)))
    hub = os.fork()
    if hub == 0:
        try:
            add_for_all(folder, num_ranks, size)
        finally:
            os._exit(0)
    while not (folder / "sums").exists():
        time.sleep(0.01)
    named: list[float] = []
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    ending = run_ranks(
        partial(rank_main, folder, fails),
        num_ranks,
        on_notice=lambda *_: named.append(time.monotonic()),
    )
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_SELF)
    os.waitpid(hub, 0)
    shutil.rmtree(folder)
    result: dict[str, float] = {
        "seconds": seconds,
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "rss": (after.ru_maxrss - before.ru_maxrss) / 1024,
    }
    if fails:
        assert ending.cause is not None
        assert ending.cause.rank == num_ranks // 2, ending.cause
        return result | {"named": named[0] - started - ending.cause.seconds}
    ranks: list[dict[str, Any]] = list(ending.results)
    result["read by rank 0"] = ranks[0]["read"]
    result["row"] = len(json.dumps(time_columns([dict.fromkeys(PARTS, 1 / 3)] * num_ranks, 7)))
    return result | {
        name: max(rank[name] for rank in ranks[1:]) for name in ("descriptors", "sent", "read", "manifest")
    }


def main() -> None:
    """Print a table with a row per number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 256])
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print("       complete                                                                failing           supervisor")
    print(
        "ranks  seconds  descriptors  bytes/update  bytes read  by rank 0  manifest   row"
        "  named in s  end in s  CPU s   MiB"
    )
    for num_ranks in options.ranks:
        done, failed = run(num_ranks, fails=False), run(num_ranks, fails=True)
        print(
            f"{num_ranks:5}  {done['seconds']:7.1f}  {done['descriptors']:11}  {done['sent']:12}  {done['read']:10}"
            f"  {done['read by rank 0']:9}  {done['manifest']:8}  {done['row']:4}"
            f"  {failed['named']:10.2f}  {failed['seconds']:8.1f}"
            f"  {done['cpu'] + failed['cpu']:5.1f}  {max(done['rss'], failed['rss']):4.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
