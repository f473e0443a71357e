"""Sharded checkpoints equal gathered ones, and each rank needs memory only for its own part."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.distributed.parallel import Parallel
from runner.distributed.world import World
from runner.durable.checkpoint import Snapshot, checkpoint_path, load, save, save_part
from runner.durable.checkpoint_parts import CheckpointPart
from runner.durable.safetensors_writer import HostBuffer
from runner.profiling.peak_memory import host_peak_gib, restart_host_peak
from runner.tensors.optimizer_state import export_state
from runner.tensors.stored_tensor import StoredTensor
from tests.distributed.ranks import run_ranks
from tests.distributed.test_sharded import Run, sharded

SLACK = 2 << 20  # in bytes, because memory is allocated in huge pages
LARGE = 6144  # rows and columns of a weight of 144 MiB, so large that buffers of constant size hardly count


def in_parts(world: World) -> Parallel:
    return sharded(world, saves_parts=True)


def train(world: World) -> Run:
    shares = tuple(32 // world.world_size + (rank < 32 % world.world_size) for rank in range(world.world_size))
    run = Run(world, shares=shares, strategy=in_parts)
    run.advance(3)
    return run


def snapshot_of(run: Run, world: World, copy: Any) -> Snapshot:
    tensors, _ = export_state(run.training.optimizer)
    files = {
        "model": run.parallel.checkpoint_tensors(run.model.state_dict(), copy),
        "optimizer": run.parallel.checkpoint_tensors(tensors, copy),
    }
    part = CheckpointPart(world.rank, world.world_size, "0") if world.world_size > 1 else None
    return Snapshot(3, files, {}, {"world_size": world.world_size}, part)


def write(folder: str, world: World) -> list[Any]:
    """Save a sharded checkpoint. Return the state that rank 0 would gather, and the sizes of the buffer and of the
    part.
    """
    run, buffer = train(world), HostBuffer()
    given = snapshot_of(run, world, buffer.copy)
    nbytes = sum(tensor.nbytes for tensors in given.tensors.values() for tensor in tensors.values())
    if world.is_first:
        save(Path(folder), given)
    else:
        save_part(Path(folder), given)
    expected = run.parallel.checkpoint_bytes(run.model.state_dict().values())
    assert expected == sum(tensor.nbytes for tensor in given.tensors["model"].values())
    tensors, _ = export_state(run.training.optimizer)
    whole = {"model": run.parallel.gather_full(run.model.state_dict()), "optimizer": run.parallel.gather_full(tensors)}
    listed = {stem: {name: each.tolist() for name, each in tensors.items()} for stem, tensors in whole.items()}
    return [listed, buffer.nbytes, nbytes]


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_shards_are_bitwise_equal_to_gathered_state(num_ranks: int, tmp_path: Path) -> None:
    messages = run_ranks(partial(write, str(tmp_path)), num_ranks)
    result = load(checkpoint_path(tmp_path, 3))
    for stem, expected in messages[0][0].items():
        tensors = result.tensors(stem)
        assert tensors.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(tensors[name], torch.tensor(value, dtype=tensors[name].dtype).view_as(tensors[name])), (
                name
            )
    sizes = [nbytes for _, _, nbytes in messages]
    total = sum(tensor.nbytes for stem in result.stems for tensor in result.tensors(stem).values())
    assert sum(sizes) == total, "every byte must be saved once"
    for _, buffer, nbytes in messages:
        assert buffer <= 1.2 * nbytes + SLACK


def memory_of_save(folder: str, world: World) -> tuple[float, int]:
    """Return the peak growth of the process in bytes while it saves its part, and the size of this part."""
    parallel = in_parts(world)
    model = parallel.wrap(nn.Linear(LARGE, LARGE, bias=False), list, [])
    restart_host_peak()
    before = host_peak_gib()
    tensors = parallel.checkpoint_tensors(model.state_dict(), HostBuffer().copy)
    given = Snapshot(3, {"model": tensors}, {}, {}, CheckpointPart(world.rank, world.world_size, "0"))
    (save if world.is_first else save_part)(Path(folder), given)
    return (host_peak_gib() - before) * 2**30, sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.slow
def test_saving_shards_needs_one_copy_in_memory(tmp_path: Path) -> None:
    for grown, nbytes in run_ranks(partial(memory_of_save, str(tmp_path)), 2):
        assert nbytes == LARGE * LARGE * 4 // 2
        assert nbytes <= grown <= 1.2 * nbytes


def read(folder: str, world: World) -> list[Any]:
    """Load the model. Return the bytes that were read, and those of this rank's part."""
    run = train(world)
    checkpoint = load(checkpoint_path(Path(folder), 3))
    num_read = 0

    def count_reads(tensor: StoredTensor) -> StoredTensor:
        def fill(start: int, rows: Tensor) -> None:
            nonlocal num_read
            num_read += rows.nbytes
            tensor.fill(start, rows)

        return replace(tensor, fill=fill)

    with torch.no_grad():
        for tensor in run.model.state_dict().values():
            tensor.zero_()
    stored = {name: count_reads(tensor) for name, tensor in checkpoint.stored("model").items()}
    run.parallel.load(run.model, stored)
    held = sum(local(tensor).nbytes for tensor in run.model.state_dict().values())
    saved = checkpoint.tensors("model")
    again: dict[str, Tensor] = run.parallel.gather_full(run.model.state_dict())
    assert all(torch.equal(again[name], saved[name]) for name in again)
    return [len(again), num_read, held]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("readers", [1, 2, 4])
def test_shards_can_be_loaded_by_any_number_of_ranks(readers: int, tmp_path: Path) -> None:
    run_ranks(partial(write, str(tmp_path)), 3)
    results = run_ranks(partial(read, str(tmp_path)), readers)
    assert results[0][0] > 10
    for _, num_read, held in results:
        assert num_read == held, "a rank must read only its own rows"
