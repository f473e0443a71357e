"""The written bytes are those of the safetensors library, and a save needs only one copy of the state."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from safetensors.torch import save as bytes_of
from torch import Tensor

from runner.durable.safetensors_writer import DTYPES, HostBuffer, serialize_tensors
from tests.faults.tallies import IS_LONG

ROOT = Path(__file__).parents[2]
WORDS = sorted(DTYPES)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter("__metadata__".__ne__)


def some_tensor(word: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 2, shape, dtype=torch.uint8).to(getattr(torch, word))


@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(WORDS), st.lists(st.integers(0, 3), max_size=3)), max_size=12))
@settings(max_examples=200 if IS_LONG else 50)
def test_the_bytes_equal_those_of_the_safetensors_library(drawn: dict[str, tuple[str, list[int]]]) -> None:
    tensors = {name: some_tensor(word, tuple(shape)) for name, (word, shape) in drawn.items()}
    assert b"".join(serialize_tensors(tensors)) == bytes_of(tensors)


def test_tensor_names_are_ordered_as_by_the_library() -> None:
    """The order matters for large models, which have many names."""
    names = [f"blocks.{number}.{part}" for number in range(24) for part in ("weight", "bias", "running_mean")]
    random.Random(0).shuffle(names)
    tensors = {name: torch.full((2, 3), index, dtype=torch.float32) for index, name in enumerate(names)}
    assert b"".join(serialize_tensors(tensors)) == bytes_of(tensors)


@pytest.mark.parametrize("word", WORDS)
def test_views_of_any_kind_are_written_by_value(word: str) -> None:
    square = some_tensor(word, (4, 4))
    tensors = {"tied": square, "again": square, "part": square[1:3], "turned": square.t(), "one": square[0, 0]}
    tensors["many"] = square[0, :1].expand(5)
    if word == "complex64":
        tensors |= {"conjugated": torch.randn(3, dtype=torch.complex64).conj(), "imaginary": square.conj().imag}
    back = load(b"".join(serialize_tensors(tensors)))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name].to(torch.complex64), tensor.to(torch.complex64)), name


def test_dense_tensors_are_written_without_a_copy() -> None:
    weight = torch.zeros(1000, 1000)
    _, memory = serialize_tensors({"weight": weight})
    weight[0, 0] = 1.0
    assert bytes(memory[:4]) == b"\x00\x00\x80\x3f"


# The buffer for a copy of the state


def test_a_copy_is_not_changed_by_training() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    room = HostBuffer()
    kept, tail = room.copy(weight), room.copy(weight.detach()[1:])
    with torch.no_grad():
        weight.add_(1)
    assert torch.equal(kept, torch.zeros(3))
    assert torch.equal(tail, torch.zeros(2))
    assert not kept.requires_grad


@pytest.mark.parametrize("word", WORDS)
def test_a_copy_is_contiguous_and_equal(word: str) -> None:
    room, square = HostBuffer(), some_tensor(word, (5, 7))
    for one in (square, square.t(), square[1::2], square[0, 0], square[:0], square[0].expand(3, 7)):
        copy = room.copy(one)
        assert copy.is_contiguous()
        assert (copy.dtype, copy.shape) == (one.dtype, one.shape)
        assert torch.equal(copy.to(torch.complex64), one.to(torch.complex64))
    conjugated = torch.randn(4, dtype=torch.complex64).conj()
    assert torch.equal(room.copy(conjugated), conjugated)


@pytest.mark.slow
def test_copies_of_one_save_do_not_overlap() -> None:
    generator, room = random.Random(0), HostBuffer()
    for _ in range(3):
        room.clear()
        given = [torch.randn(generator.choice([1, 17, 1000, 300_000])) for _ in range(200)]
        kept = [room.copy(tensor) for tensor in given]
        assert all(torch.equal(copy, tensor) for copy, tensor in zip(kept, given, strict=True))


def test_later_saves_reuse_the_memory_of_the_first() -> None:
    room, given = HostBuffer(), [torch.randn(size) for size in (10, 2_000_000, 3, 700_000, 5_000_000, 1)]
    places = []
    for _ in range(3):
        room.clear()
        places.append([room.copy(tensor).data_ptr() for tensor in given])
    assert places[0] == places[1] == places[2]
    assert room.nbytes < 3 * sum(tensor.nbytes for tensor in given)


def test_the_first_copy_uses_preallocated_memory() -> None:
    tensors = [torch.randn(3 << 20), torch.randn(1 << 20), torch.randn(())]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    room = HostBuffer()
    room.prepare(int(1.01 * nbytes), torch.device("cpu"))
    room.clear()  # this waits for the allocation
    before = room.nbytes
    assert before >= nbytes
    copies = [room.copy(tensor) for tensor in tensors]
    assert room.nbytes == before
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))
    assert not [thread for thread in threading.enumerate() if thread.name == "host-buffer"]


def test_the_first_copy_allocates_memory_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system may refuse to start a thread."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    room, given = HostBuffer(), torch.randn(1 << 20)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refused)
        room.prepare(32 << 20, torch.device("cpu"))
    room.clear()
    assert torch.equal(room.copy(given), given)


def test_small_states_are_not_preallocated() -> None:
    room = HostBuffer()
    room.prepare(1 << 20, torch.device("cpu"))
    room.clear()
    assert room.nbytes == 0


def test_forked_children_do_not_inherit_the_copy() -> None:
    kept, flags = HostBuffer().copy(torch.ones(4_000_000)), [""]
    place = kept.data_ptr()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, end = (int(word, 16) for word in first.split("-"))
        elif first == "VmFlags:" and start <= place < end:
            flags = line.split()
    assert "dc" in flags, "a fork must not copy the memory"


@pytest.mark.slow
def test_a_save_makes_only_one_copy_of_the_state(tmp_path: Path) -> None:
    script = f"""
import torch
from pathlib import Path
from runner.durable.checkpoint import Snapshot, load, save
from runner.durable.safetensors_writer import HostBuffer
from runner.profiling.peak_memory import host_peak_gib, restart_host_peak
torch.set_num_threads(1)
state = {{str(index): torch.full((2_500_000,), float(index)) for index in range(20)}}
turned = {{"turned": torch.randn(2500, 1000).t()}}
save(Path({str(tmp_path)!r}), Snapshot(0, {{"model": {{"a": torch.zeros(2)}}}}, {{}}, {{}}))
room = HostBuffer()
restart_host_peak()
before = host_peak_gib()
copies = {{name: room.copy(tensor) for name, tensor in {{**state, **turned}}.items()}}
save(Path({str(tmp_path)!r}), Snapshot(1, {{"model": copies}}, {{}}, {{}}))
print((host_peak_gib() - before) * 2**30 / sum(tensor.nbytes for tensor in copies.values()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # of the 210 MB of state, memory holds one copy and some blocks of 8 MiB
    assert 0.95 < float(done.stdout) < 1.2
