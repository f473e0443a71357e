"""CUDA code paths of accel-run on the stand-in: contexts, page-locked memory, failing ranks and first contact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from runner.base.errors import Exit
from runner.durable.checkpoint import newest_valid
from runner.durable.record_files import read_error
from tests.gpu.runs import TASK
from tests.stand_ins.cuda.build import why_not
from tests.stand_ins.forked import StandIn

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built")

NEEDS = """
import torch
from pathlib import Path
from runner.config.configuration import compose
from runner.config.request import Request
from runner.forecast.demand import trace_memory_needs
from runner.plan.inventory import take_inventory
configuration = compose(Request(("device=cuda:0",), Path({task!r})))
inventory = take_inventory()
assert [device.kind for device in inventory.usable] == ["cuda"], inventory
assert not torch.cuda.is_initialized()
needs = trace_memory_needs(configuration, inventory)
assert needs.demands and not needs.why_not, needs.why_not
torch.ones(1, device="cuda")
assert take_inventory().devices == inventory.devices
"""


@pytest.mark.slow
def test_memory_is_predicted_without_initializing_cuda(stand_in: StandIn) -> None:
    """The process that predicts the memory must not initialize CUDA before the run starts."""
    stand_in.program("t4", NEEDS.format(task=str(TASK)))


ROOM = """
import torch, _stand_in
from runner.durable import safetensors_writer
device = torch.device("cuda", 1)
torch.cuda.set_device(device)
buffer = safetensors_writer.HostBuffer()
buffer.prepare(safetensors_writer._MIN_THREAD_BYTES, device)
assert buffer._allocator is not None, "no thread was started"
buffer.clear()
weight = torch.randn(1 << 20, device=device)
kept = buffer.copy(weight)
assert torch.equal(kept, weight.cpu())
assert _stand_in.contexts() == [1], _stand_in.contexts()
"""


def test_pinning_host_memory_creates_no_other_context(stand_in: StandIn) -> None:
    stand_in.program("a100x2", ROOM)


REFUSED = """
import torch
from runner.durable.safetensors_writer import HostBuffer
weight, room = torch.randn(1 << 20, device="cuda"), HostBuffer()
kept = room.copy(weight)
assert torch.equal(kept + 1, (weight + 1).cpu()), "the refusal is not raised by the next kernel"
"""


def test_copies_are_correct_if_page_locking_is_refused(stand_in: StandIn) -> None:
    stand_in.program("a100", REFUSED, {"STAND_IN_REFUSES_REGISTRATION": "1"})


RELEASED = """
import gc, torch
from runner.durable.safetensors_writer import HostBuffer
room = HostBuffer()
address = room.copy(torch.randn(1 << 20, device="cuda")).data_ptr()
del room
gc.collect()
assert torch.cuda.cudart().cudaHostUnregister(address) != 0, "it was unregistered when it was freed"
"""


def test_page_locked_memory_is_unregistered_when_it_is_freed(stand_in: StandIn) -> None:
    stand_in.program("a100", RELEASED)


FAILING = Path(__file__).with_name("task_that_fails.py")


@pytest.mark.slow
@pytest.mark.parametrize(("args", "rank"), [("parallelism=ddp", 0), ("parallelism=fsdp", 1)])
def test_a_failing_rank_is_named_while_others_wait(args: str, rank: int, stand_in: StandIn, tmp_path: Path) -> None:
    """Destroying an NCCL process group waits up to `timeout_s` for kernels that the failed rank never joins."""
    task = f"train --task {FAILING} task.rank={rank} updates=6 global_batch_size=16 run=r device=cuda {args}"
    result = stand_in.command("a100x2", task, tmp_path)
    assert result.code == 70, result.out + result.err
    error = json.loads((tmp_path / "outputs/r/error.json").read_text())
    assert error["place"]["rank"] == rank
    assert "planted" in result.err


@pytest.mark.slow  # waits for the timeout
def test_a_hanging_rank_is_named_not_the_aborted_one(stand_in: StandIn, tmp_path: Path) -> None:
    """NCCL's watchdog ends the waiting rank after the timeout of its collective."""
    args = f"train --task {FAILING} task.how=stop updates=6 global_batch_size=16 micro_batch_size=8 run=r device=cuda"
    result = stand_in.command(
        "a100x2", f"{args} parallelism=ddp parallelism.timeout_s=45 watchdog=off monitor=off", tmp_path
    )
    assert result.code == Exit.HANG, result.out + result.err
    error = read_error(tmp_path / "outputs/r")
    assert error is not None
    assert (error.exit_code, error.place["rank"]) == (Exit.HANG, 1)
    assert "rank 1 of 2" in (tmp_path / "outputs/r/stacks.txt").read_text()


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("args", "rank"),
    [("parallelism=single", 0), ("parallelism=ddp", 1), ("parallelism=fsdp", 0), ("parallelism=pipeline", 1)],
)
def test_an_asynchronous_device_error_names_its_rank(args: str, rank: int, stand_in: StandIn, tmp_path: Path) -> None:
    """Checkpoints stay valid. A failed assertion of a kernel is raised by a later call, here while other ranks wait."""
    task = f"train --task {FAILING} task.how=assert task.rank={rank} updates=6 global_batch_size=16 micro_batch_size=8"
    result = stand_in.command("a100x2", f"{task} run=r device=cuda checkpoint.every=1 monitor=off {args}", tmp_path)
    assert result.code == Exit.NO_DEVICE, result.out + result.err
    error = read_error(tmp_path / "outputs/r")
    assert error is not None
    assert (error.place["rank"], error.reached) == (rank, 3)
    assert "CUDA_LAUNCH_BLOCKING=1" in error.fix
    found = newest_valid(tmp_path / "outputs/r/checkpoints")
    assert found is not None
    assert found.name == error.last_checkpoint


SMALL = f"--task {FAILING} task.rank=-1"


@pytest.mark.slow
def test_first_contact_prints_json_with_the_gpu_name(stand_in: StandIn, tmp_path: Path) -> None:
    args = f"doctor first_contact --json {SMALL} updates=4 global_batch_size=16 micro_batch_size=8"
    result = stand_in.command("t4", args, tmp_path)
    assert result.code == 0, result.out + result.err
    content = json.loads(result.out)
    assert content == json.loads((tmp_path / "outputs/first_contact.json").read_text())
    _check_contact(content)
    assert "Tesla T4 (simulated)" in (tmp_path / "outputs/first_contact.md").read_text()


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(f"{SMALL} precision=fp16", marks=pytest.mark.long),
        pytest.param("task=gpt precision=fp16", marks=pytest.mark.long),
    ],
)
def test_first_contact_compares_predictions_with_the_device(task: str, stand_in: StandIn, tmp_path: Path) -> None:
    """The command writes a page with the results."""
    args = f"doctor first_contact {task} updates=4 global_batch_size=16 micro_batch_size=8"
    result = stand_in.command("t4", args, tmp_path)
    assert result.code == 0, result.out + result.err
    _check_contact(json.loads((tmp_path / "outputs/first_contact.json").read_text()))
    assert "Tesla T4 (simulated)" in (tmp_path / "outputs/first_contact.md").read_text()


def _check_contact(content: Mapping[str, Any]) -> None:
    actual = {finding["subject"]: finding for finding in content["findings"]}
    assert {"cuda:0", "cuda:0 waits", "cuda:0 math float16"} <= actual.keys()
    for subject in ("cuda:0 waits", "cuda:0 allocated memory", "cuda:0 reserved memory"):
        assert actual[subject]["state"] == "ok", actual[subject]
    assert actual["cuda:0 allocated memory"]["figures"]["measured_mib"] > 0
    assert content["is_stand_in"]


GRAPHS = """
import os, torch
os.chdir({folder!r})
from runner.base import compilers
events = []
torch.compiler.cudagraph_mark_step_begin = lambda: events.append("iteration")
def compiled(function, **options):  # without Triton
    def call(*args, **kwargs):
        events.append("call")
        return function(*args, **kwargs)
    return call
torch.compile = compiled
compilers.find_spec = lambda name: torch.__spec__
from runner.cli import main
words = "train --task {task} run=r device=cuda precision=fp32 compile={option} updates=3 global_batch_size=16 "
words += "micro_batch_size=4 evaluate.samples=8 evaluate.every=3 checkpoint=off monitor=off dataloader.num_workers=0"
assert main(words.split()) == 0
print("events", *events)
"""


@pytest.mark.slow
@pytest.mark.parametrize("option", ["reduce-overhead", "off"])
def test_each_forward_pass_starts_a_cuda_graph_iteration(option: str, stand_in: StandIn, tmp_path: Path) -> None:
    """This holds for training and evaluation. The stand-in has no graphs, so the test records calls."""
    out = stand_in.program("a100", GRAPHS.format(folder=str(tmp_path), task=TASK, option=option))
    (line,) = [line for line in out.splitlines() if line.startswith("events")]
    events = line.split()[1:]
    assert events == ["iteration", "call"] * (len(events) // 2)
    assert len(events) // 2 >= 3 * 4 + 2 or (option == "off" and not events)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "train run=r"])
def test_a_compiled_run_without_triton_is_rejected_early(command: str, stand_in: StandIn, tmp_path: Path) -> None:
    before = "from runner.base import compilers; compilers.find_spec = lambda name: None\n"
    args = f"{command} --task {TASK} compile=default"
    result = stand_in.command("t4", args, tmp_path, before=before)
    assert result.code == Exit.CONFIG, result.out + result.err
    assert "pip install triton" in result.err
    assert not list((tmp_path / "outputs").glob("*")), "no run must start"


@pytest.mark.long
def test_the_benchmark_ladder_runs_on_a_gpu(stand_in: StandIn, tmp_path: Path) -> None:
    """Variants are forked before they use CUDA, paused with SIGSTOP, and fork data workers after they have used it."""
    args = f"benchmark --task {TASK} device=cuda dataloader.num_workers=2 techniques=[prefetch] steps=8 rounds=3"
    result = stand_in.command("a100", f"{args} budget_s=240 --json", tmp_path)
    assert result.code == 0, result.out + result.err
    rows = {row["variant"]: row for row in json.loads(result.out)["rows"]}
    assert len(rows) >= 2
    assert all(row["update_ms"] for row in rows.values()), result.out
    assert "NVIDIA A100" in (tmp_path / "benchmarks/results.json").read_text()
