"""Run programs of two ranks over the NCCL of the stand-in: every collective of strategies, and the end of a group."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from tests.waiting import wait_until


def join(rank: int, store: Path) -> torch.device:
    """Join a process group of two ranks; return the rank's device."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl", store=FileStore(str(store), 2), rank=rank, world_size=2)
    return device


def collect(rank: int, store: Path) -> None:
    """Check the result of each collective."""
    import _stand_in

    other, device = 1 - rank, join(rank, store)

    def numbers(*values: float) -> torch.Tensor:
        return torch.tensor(values, device=device)

    mine, both = numbers(1.0 + rank, 10.0 + rank), [[1.0, 10.0], [2.0, 11.0]]

    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device)

    tensor = mine.clone()
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0, 21.0]
    tensor = mine.clone()
    dist.reduce(tensor, dst=0)
    assert rank or tensor.tolist() == [3.0, 21.0]
    tensor = mine.clone()
    dist.broadcast(tensor, src=1)
    assert tensor.tolist() == both[1]
    parts = [empty(2), empty(2)]
    dist.all_gather(parts, mine)
    assert [part.tolist() for part in parts] == both
    whole = empty(4)
    dist.all_gather_into_tensor(whole, mine)
    assert whole.tolist() == [*both[0], *both[1]]
    parts = [empty(2), empty(2)]
    dist.gather(mine, parts if rank == 0 else None, dst=0)
    assert rank or [part.tolist() for part in parts] == both
    tensor = empty(2)
    dist.scatter(tensor, [mine, 2 * mine] if rank == 0 else None, src=0)
    assert tensor.tolist() == ([2.0, 20.0] if rank else [1.0, 10.0])
    share = empty(1)
    dist.reduce_scatter_tensor(share, mine)
    assert share.tolist() == [[3.0], [21.0]][rank]
    dist.reduce_scatter(share, [mine[:1].clone(), mine[1:].clone()])
    assert share.tolist() == [[3.0], [21.0]][rank]
    wholes, shares = [empty(4), empty(2)], [empty(1), empty(2)]
    # lint-tests: private: fsdp and DTensor use it
    with dist.distributed_c10d._coalescing_manager(device=device):
        dist.all_gather_into_tensor(wholes[0], mine)
        dist.all_gather_into_tensor(wholes[1], mine[:1])
    assert [whole.tolist() for whole in wholes] == [[*both[0], *both[1]], [both[0][0], both[1][0]]]
    with dist.distributed_c10d._coalescing_manager(device=device):  # lint-tests: private: as above
        dist.reduce_scatter_tensor(shares[0], mine)
        dist.reduce_scatter_tensor(shares[1], mine.repeat(2))
    assert [share.tolist() for share in shares] == [[[3.0], [21.0]][rank], [3.0, 21.0]]
    tensor = empty(2)
    dist.all_to_all_single(tensor, mine)
    assert tensor.tolist() == [pair[rank] for pair in both]
    tensor = empty(2)
    if rank:
        dist.recv(tensor, src=other)
        assert tensor.tolist() == both[0]
    else:
        dist.send(mine, dst=other)
    exchanged = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, tensor, other)]
    for work in dist.batch_isend_irecv(exchanged):
        work.wait()
    assert tensor.tolist() == both[other]
    first, second = mine.clone(), 2 * mine
    dist.all_reduce_coalesced([first, second])
    assert second.tolist() == [6.0, 42.0]
    dist.barrier()
    torch.cuda.synchronize()
    assert not _stand_in.misuses(), _stand_in.misuses()
    assert _stand_in.contexts() == [rank]
    counted = _stand_in.counts()
    launched = {name: number for name, number in counted["launches"].items() if name.startswith("nccl::")}
    assert launched == counted["side_launches"], "all collectives must run on the stream of the group"
    dist.destroy_process_group()


def leave(rank: int, store: Path) -> None:
    """Rank 1 destroys the group only once rank 0 waits for it."""
    join(rank, store)
    is_leaving = store.with_name("rank 1 is leaving")
    if rank:
        wait_until(lambda: b"destroyed/0" in store.read_bytes(), "rank 0")
        is_leaving.touch()
    dist.destroy_process_group()
    assert is_leaving.exists()


def leave_early(rank: int, store: Path) -> None:
    """Rank 0 destroys the group after a collective that rank 1 does not join."""
    device = join(rank, store)
    if rank == 0:
        # lint-tests: private: torch has no public function that sets the timeout of an existing group
        dist.distributed_c10d._set_pg_timeout(timedelta(milliseconds=100))
        dist.all_reduce(torch.ones(1, device=device), async_op=True)
        dist.destroy_process_group()


def run_ranks(program: Callable[[int, Path], None], expected: Sequence[int] = (0, 0)) -> None:
    """Run a program in a fork for each rank; exit with a message if the exit codes are not the expected ones."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                program(rank, Path(folder) / "store")
                os._exit(0)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if codes != [*expected]:
        sys.exit(f"exit codes by rank: {codes}")
