"""The stand-in reports every planted misuse by its kind, and none in correct programs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from tests.stand_ins.cuda.build import why_not
from tests.stand_ins.cuda.devices import MACHINES
from tests.stand_ins.cuda.environment import environment
from tests.stand_ins.forked import StandIn
from tests.stand_ins.planted import PLANTED

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built")
Seen = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def seen(stand_in: StandIn) -> Seen:
    lines = stand_in.program("a100x2", "from tests.stand_ins.planted import main; main()").splitlines()
    return {result["name"]: result for result in map(json.loads, lines)}


@pytest.mark.parametrize("name", [name for name, (kind, _) in PLANTED.items() if kind])
def test_planted_misuses_are_reported_by_kind(name: str, seen: Seen) -> None:
    kinds = {text.partition(":")[0] for text in seen[name]["misuses"]}
    assert kinds == {PLANTED[name][0]}


@pytest.mark.parametrize("name", [name for name, (kind, _) in PLANTED.items() if kind is None])
def test_planted_errors_are_raised(name: str, seen: Seen) -> None:
    assert seen[name]["raised"] in ("RuntimeError", "AcceleratorError")
    assert not seen[name]["misuses"]


def test_at_least_twenty_planted_misuses_have_a_kind() -> None:
    assert sum(kind is not None for kind, _ in PLANTED.values()) >= 20


RIGHT = """
import json, torch, _stand_in
side = torch.cuda.Stream()
buffers = [torch.zeros(65536).pin_memory() for _ in range(2)]
free = [torch.cuda.Event() for _ in buffers]
snapshot, arrived = torch.zeros(65536).pin_memory(), torch.cuda.Event()
weight = torch.zeros(65536, device="cuda")
for update in range(6):
    buffer, event = buffers[update % 2], free[update % 2]
    event.synchronize()
    buffer.fill_(update)
    with torch.cuda.stream(side):
        batch = buffer.to("cuda", non_blocking=True)
        event.record()
    torch.cuda.current_stream().wait_stream(side)
    batch.record_stream(torch.cuda.current_stream())
    weight += batch
    del batch
snapshot.copy_(weight, non_blocking=True)
arrived.record()
arrived.synchronize()
assert snapshot.sum().item() == 65536 * 15
print(json.dumps(_stand_in.misuses()))
"""


def test_correct_programs_are_reported_without_hazards(stand_in: StandIn) -> None:
    assert json.loads(stand_in.program("a100", RIGHT)) == {}


LATE = """
import torch
snapshot = torch.zeros(100).pin_memory()
snapshot.copy_(torch.ones(100, device="cuda"), non_blocking=True)
early = snapshot.tolist()
torch.cuda.synchronize()
assert (early, snapshot.tolist()) == ([0.0] * 100, [1.0] * 100)
"""


def test_an_async_copy_to_the_host_needs_synchronization(stand_in: StandIn) -> None:
    stand_in.program("a100", LATE)


FRAGMENTS = """
import torch
MiB = 2**20
total = torch.cuda.mem_get_info()[1]
keep = [torch.empty(12 * MiB, dtype=torch.uint8, device="cuda") for _ in range(8)]
assert torch.cuda.memory_reserved() == 8 * 12 * MiB
del keep[::2]
stats = torch.cuda.memory_stats()
assert stats["inactive_split_bytes.all.current"] == 0
torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")
split = torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_stats()["inactive_split_bytes.all.current"] == 9 * MiB
rest = torch.cuda.mem_get_info()[0]
try:
    torch.empty(rest + 30 * MiB, dtype=torch.uint8, device="cuda")
    raise SystemExit("it fitted after freeing three segments of 12 MiB")
except torch.OutOfMemoryError:
    pass
assert torch.cuda.memory_stats()["num_alloc_retries"] == 1, "cached segments must be freed before the error"
assert torch.cuda.memory_stats()["num_ooms"] == 1
assert torch.cuda.memory_reserved() == 5 * 12 * MiB
"""


def test_cached_segments_are_split_and_freed_before_an_oom_error(stand_in: StandIn) -> None:
    stand_in.program("rtx3050ti", FRAGMENTS.replace("rest + 30", "rest + 37"))


STREAMS = """
import torch
MiB = 2**20
device, side = torch.device("cuda", 1), torch.cuda.Stream(1)
torch.cuda.set_device(device)

def block():
    return torch.empty(12 * MiB, dtype=torch.uint8, device=device)

def read(name):
    return torch.cuda.memory_stats(device)[name] // (12 * MiB if "bytes" in name else 1)

def counts():
    names = ("allocated_bytes.all", "active_bytes.all", "reserved_bytes.all", "segment.large_pool")
    return tuple(read(f"{name}.current") for name in names)

first = block()
address = first.data_ptr()
del first
assert counts() == (0, 0, 1, 1)
with torch.cuda.stream(side):
    other = block()
assert other.data_ptr() != address, "a stream has no access to the free memory of another one"
assert counts() == (1, 1, 2, 2)
assert {each["stream"] for each in torch.cuda.memory_snapshot()} == {0, side.stream_id}
again = block()
assert again.data_ptr() == address
assert counts() == (2, 2, 2, 2)

side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    again.add_(1)
again.record_stream(side)
del again
assert counts() == (1, 2, 2, 2), "the block is not allocated, but active until the other stream is done"
torch.cuda.current_stream().wait_stream(side)
new = block()
assert new.data_ptr() != address, "wait_stream makes only the device wait, so the block is not free yet"
assert counts() == (2, 3, 3, 3)
done = side.record_event()
done.synchronize()
assert block().data_ptr() == address
assert counts() == (2, 2, 3, 3)
new.record_stream(side)
with torch.cuda.stream(side):
    new.add_(1)
del new, other
torch.cuda.empty_cache()
assert counts() == (0, 0, 0, 0), "empty_cache must wait for the other stream"
assert torch.cuda.memory_reserved(0) == torch.cuda.max_memory_reserved(0) == 0
"""


def test_each_stream_has_its_own_memory_pool(stand_in: StandIn) -> None:
    """A block is reused only when the streams recorded for it are done."""
    stand_in.program("a100x2", STREAMS)


GENERATORS = """
import torch
torch.manual_seed(1)
here, there = torch.rand(4, device="cuda:0"), torch.rand(4, device="cuda:1")
assert torch.equal(here.cpu(), there.cpu())
host = torch.get_rng_state()
state = torch.cuda.get_rng_state(0)
first = torch.nn.functional.dropout(torch.ones(64, device="cuda"))
assert torch.equal(torch.get_rng_state(), host), "the device draws from its own generator"
torch.cuda.set_rng_state(state, 0)
assert torch.equal(first, torch.nn.functional.dropout(torch.ones(64, device="cuda")))
assert state.numel() == 16
"""


def test_each_device_has_its_own_random_number_generator(stand_in: StandIn) -> None:
    stand_in.program("a100x2", GENERATORS)


SOFTMAX = """
import torch
for function in (torch.softmax, torch.log_softmax):
    x = torch.randn(6, 50, device="cuda", dtype=torch.float16, requires_grad=True)
    results, gradients = [], []
    for fused in (True, False):
        results.append(function(x, -1, dtype=torch.float32) if fused else function(x.float(), -1))
        gradients += torch.autograd.grad((results[-1] ** 2).sum(), x)
    assert torch.equal(*results) and torch.equal(*gradients), (results, gradients)
    assert results[0].dtype == torch.float32 and gradients[0].dtype == torch.float16
"""


def test_softmax_in_float32_equals_softmax_of_a_copy(stand_in: StandIn) -> None:
    """The input is float16, or a float32 copy of it."""
    stand_in.program("t4", SOFTMAX)


def test_collectives_are_correct_on_a_separate_stream(stand_in: StandIn) -> None:
    stand_in.program("a100x2", "from tests.stand_ins.collectives import run_ranks, collect; run_ranks(collect)")


def test_destroying_a_process_group_waits_until_all_ranks_destroy_it(stand_in: StandIn) -> None:
    stand_in.program("a100x2", "from tests.stand_ins.collectives import run_ranks, leave; run_ranks(leave)")


def test_destroying_a_process_group_waits_for_kernels_that_another_rank_never_joins(stand_in: StandIn) -> None:
    """As with NCCL, only the watchdog ends this wait: by ending the process."""
    text = "from tests.stand_ins.collectives import run_ranks, leave_early; run_ranks(leave_early, [-SIGABRT, 0])"
    stand_in.program("a100x2", f"from signal import SIGABRT; {text}")


VISIBLE = """
import os, torch
assert torch.cuda.device_count() == 1
assert torch.cuda.get_device_name() == "NVIDIA GeForce RTX 3070"
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("named", ["1", "GPU-00000000-0000-4000-8000-000000000001"])
def test_only_devices_in_cuda_visible_devices_exist(named: str, stand_in: StandIn) -> None:
    stand_in.program("pair", VISIBLE, {"CUDA_VISIBLE_DEVICES": named})


RANGES = """
import torch, _stand_in
with torch.autograd.profiler.emit_nvtx(), torch.cuda.nvtx.range("update"):
    with torch.profiler.record_function("forward"):
        torch.ones(2, 2, device="cuda").mul(3)
    torch.zeros(2, device="cuda")
assert torch.cuda.nvtx.range_push("after") == torch.cuda.nvtx.range_pop() == 0
paths = {tuple(name.partition(",")[0] for name in path.split("/")) for path in _stand_in.ranges()}
assert paths >= {("update",), ("update", "forward"), ("update", "forward", "aten::mul"), ("after",)}, paths
assert ("update", "aten::zeros") in paths and ("update", "aten::mul") not in paths, paths
"""


def test_nvtx_ranges_contain_the_operators_that_they_enclose(stand_in: StandIn) -> None:
    stand_in.program("a100", RANGES)


@pytest.mark.slow
def test_processes_started_with_the_stand_in_see_its_devices() -> None:
    """In all other tests, forks get their devices after torch has been imported."""
    line = [sys.executable, "-c", VISIBLE]
    env = {**environment(MACHINES["pair"]), "CUDA_VISIBLE_DEVICES": "1"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
