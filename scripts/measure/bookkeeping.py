"""Measure how the cost of supervision, flags, checkpoints and reporting a failing rank grows with the number of ranks.

Ranks are processes that the local launcher forks and supervises, without a process group: heartbeats, exit reports,
parts of a checkpoint and its manifest are those of a run. The flags that the ranks exchange after each update are also
those of a run, but another process sums them over Unix sockets. Each rank runs the watchdog of a run, saves its rows of
a tensor and reads them, as when a run resumes.

complete   all ranks finish: seconds; the largest number of descriptors, bytes sent and bytes read of a rank; bytes of
           the manifest; bytes that the times of the ranks take in a row of metrics.jsonl
failing    rank n/2 raises while the others wait for it: seconds from the error to the report, and until all have ended
hanging    rank n/2 hangs while the others wait for it: seconds from its timeout to the report, and until all have
           ended; bytes of the error and of stacks.txt
supervisor CPU seconds of this process in all runs, and the largest increase of its peak resident memory

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
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from runner.base.errors import Exit, format_error
from runner.base.rank_env import RankInfo
from runner.base.stopwatch import PARTS
from runner.config.configuration import Choice
from runner.distributed.world import World
from runner.durable.checkpoint import Snapshot, checkpoint_path, load, save, save_part
from runner.durable.checkpoint_parts import CheckpointPart
from runner.engine.hooks.hook import Wants
from runner.engine.hooks.load_balance import time_columns
from runner.engine.hooks.rank_sync import Exchange
from runner.engine.process.watchdog import CHECKPOINT, UPDATE, HangTraces, ProgressMark, run_watchdog
from runner.launch.local import run_ranks, to_error

UPDATES, ROWS, WIDTH = 5, 4, 256
TIMEOUT_S = 10.0  # timeout of an update; longer than an update of 256 ranks on a busy machine
PLAN: Any = SimpleNamespace(
    choices={
        "watchdog": Choice(
            "default",
            "default",
            {"update_s": TIMEOUT_S, "first_update_s": 600.0, "data_s": 600.0, "checkpoint_s": 600.0},
        ),
        "compile": Choice("off", "off", {}),
    }
)


class SocketWorld(World):
    """A world whose sums are computed by another process."""

    def connect(self, folder: Path) -> None:
        """Connect to the process that computes the sums."""
        link = socket.socket(socket.AF_UNIX)
        link.connect(str(folder / "sums"))
        object.__setattr__(self, "link", link)
        object.__setattr__(self, "num_sent", 0)

    def sum_async(self, tensor: torch.Tensor) -> Any:
        """Send the numbers; the result is received into the tensor by `wait()`.

        `wait` is a C function, so that the innermost Python frame of a waiting rank is the caller's, as in a run.
        """
        content = tensor.numpy()
        self.link.sendall(content.tobytes())  # type: ignore[attr-defined]
        object.__setattr__(self, "num_sent", self.num_sent + content.nbytes)  # type: ignore[attr-defined]
        content.fill(np.nan)  # remains if the sums never arrive; reading the flags then fails
        buffer = content.data.cast("B")
        return SimpleNamespace(
            wait=partial(self.link.recv_into, buffer, content.nbytes, socket.MSG_WAITALL)  # type: ignore[attr-defined]
        )


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
    """Return the bytes that this thread has read; the watchdog reads the state of the process."""
    fields = dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())
    return int(fields["rchar"])


def rank_main(folder: Path, fault: str, member: RankInfo) -> tuple[int, Any]:
    """Run the updates of a rank, then save and read its part of a checkpoint."""
    rank, count = member.rank, member.world_size
    torch.set_num_threads(1)
    heartbeats = Path(member.store.removeprefix("file://")).parent
    world = SocketWorld(torch.device("cpu"), rank, rank, count, count, heartbeat_folder=heartbeats)
    world.connect(folder)
    with run_watchdog(PLAN, world, HangTraces(lambda _: None)) as mark:
        return 0, run_updates(folder, fault, world, mark)


def run_updates(folder: Path, fault: str, world: SocketWorld, mark: ProgressMark) -> dict[str, Any]:
    """Run the updates, save and read; return the measurements. `fault` happens on rank n/2 before the last update."""
    rank, count = world.rank, world.world_size
    exchange = Exchange(world, Alone())  # type: ignore[arg-type]
    mark.begin("train")
    for update in range(1, UPDATES + 1):
        mark.advance(UPDATE, update)
        if fault and update == UPDATES - 1 and rank == count // 2:  # the others wait for it in the next update
            if fault == "raises":
                raise RuntimeError("this rank fails")
            (folder / "hang").write_text(str(time.monotonic()))
            threading.Event().wait()
        exchange(Wants(), num_bad=0, seconds=dict.fromkeys(PARTS, 0.1), samples=4)
        mark.num_updates.value = update
        if update > 1:  # all ranks have completed the first update
            mark.completed_kinds.add(UPDATE)
    mark.advance(CHECKPOINT, UPDATES)
    rows = torch.full((ROWS, WIDTH), float(rank))
    snapshot = Snapshot(1, {"model": {"weight": rows}}, {}, {"world_size": count}, CheckpointPart(rank, count, "0"))
    (save_part if rank else save)(folder / "checkpoints", snapshot)
    exchange(Wants(), num_bad=0, seconds=None, samples=0)
    exchange.settle()  # until all ranks have written their parts
    sent, before = world.num_sent, read_bytes()  # type: ignore[attr-defined]
    path = checkpoint_path(folder / "checkpoints", 1)
    again = load(path, hashes_tensors=rank == 0).stored("model")["weight"].read(rank * ROWS, (rank + 1) * ROWS)
    assert torch.equal(again, rows)
    return {
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "sent": sent // (UPDATES + 1),
        "read": read_bytes() - before,
        "manifest": (path / "MANIFEST.json").stat().st_size,
        "is_first": rank == 0,
    }


def run(num_ranks: int, fault: str = "") -> dict[str, float]:
    """Run this number of ranks once; return the measurements.

    fault  what rank n/2 does before the last update: "raises", "hangs" or nothing ("")
    """
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
        partial(rank_main, folder, fault), num_ranks, on_notice=lambda *_: named.append(time.monotonic())
    )
    ended, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    os.waitpid(hub, 0)
    result: dict[str, float] = {
        "seconds": ended - started,
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "rss": (after.ru_maxrss - before.ru_maxrss) / 1024,
    }
    hung_at = float((folder / "hang").read_text()) if fault == "hangs" else 0.0
    shutil.rmtree(folder)
    if fault:
        assert ending.cause is not None
        assert ending.cause.rank == num_ranks // 2, ending.cause
        assert (ending.cause.exit_code == Exit.HANG) == (fault == "hangs"), ending.cause
        failed = hung_at + TIMEOUT_S if hung_at else started + ending.cause.seconds
        result |= {"named": named[0] - failed, "ended": ended - failed}
        return result | {"error": len(format_error(to_error(ending))), "stacks": len(ending.cause.traceback)}
    ranks: list[dict[str, Any]] = list(ending.results)
    result["read by rank 0"] = ranks[0]["read"]
    result["row"] = len(json.dumps(time_columns([dict.fromkeys(PARTS, 1 / 3)] * num_ranks, 7)))
    return result | {
        name: max(rank[name] for rank in ranks[1:]) for name in ("descriptors", "sent", "read", "manifest")
    }


def main() -> None:
    """Print two tables with a row per number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 256])
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print("complete\nranks  seconds  descriptors  bytes/update  bytes read  by rank 0  manifest   row")
    runs = {}
    for num_ranks in options.ranks:
        runs[num_ranks] = [done := run(num_ranks)]
        print(
            f"{num_ranks:5}  {done['seconds']:7.1f}  {done['descriptors']:11}  {done['sent']:12}  {done['read']:10}"
            f"  {done['read by rank 0']:9}  {done['manifest']:8}  {done['row']:4}",
            flush=True,
        )
    print("       failing             hanging                                  supervisor")
    print("ranks  named in s  end in s  named in s  end in s  error   stacks  CPU s   MiB")
    for num_ranks in options.ranks:
        runs[num_ranks] += [failed := run(num_ranks, "raises"), hung := run(num_ranks, "hangs")]
        cpu, rss = sum(each["cpu"] for each in runs[num_ranks]), max(each["rss"] for each in runs[num_ranks])
        print(
            f"{num_ranks:5}  {failed['named']:10.2f}  {failed['ended']:8.1f}  {hung['named']:10.2f}"
            f"  {hung['ended']:8.1f}  {hung['error']:5}  {hung['stacks']:7}  {cpu:5.1f}  {rss:4.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
