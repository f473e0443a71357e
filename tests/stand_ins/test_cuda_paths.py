"""What accel-run does on a GPU, run on the stand-in: contexts, page-locked memory, and runs in which nothing races."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.stand_ins.cuda.build import why_not
from tests.stand_ins.cuda.devices import MACHINES
from tests.stand_ins.cuda.environment import environment
from tests.stand_ins.test_cuda_stand_in import on_stand_in

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built")

NEEDS = """
import torch
from runner.base.configuration import Request, compose
from runner.launch.needs import needs_in_subprocess
from runner.plan.inventory import take_inventory
configuration = compose(Request(("task=gpt", "task.size=tiny", "device=cuda:0")))
inventory = take_inventory()
assert [device.kind for device in inventory.usable] == ["cuda"], inventory
assert not torch.cuda.is_initialized()
needs = needs_in_subprocess(configuration, inventory)
assert needs.demands and not needs.why_not, needs.why_not
torch.ones(1, device="cuda")
assert take_inventory().devices == inventory.devices
"""


def test_memory_of_one_gpu_is_predicted_and_cuda_is_not_initialized_before_the_run() -> None:
    on_stand_in("t4", "-c", NEEDS)


ROOM = """
import torch, _stand_in
from runner.durable import tensors
tensors._WORTH_A_THREAD = 0
device = torch.device("cuda", 1)
torch.cuda.set_device(device)
room = tensors.Room()
room.prepare(4 << 20, device)
room.clear()
weight = torch.randn(1 << 20, device=device)
kept = room.copy(weight)
assert torch.equal(kept, weight.cpu())
assert _stand_in.contexts() == [1], _stand_in.contexts()
"""


def test_the_thread_that_prepares_host_memory_opens_no_context_on_another_device() -> None:
    on_stand_in("a100x2", "-c", ROOM)


REFUSED = """
import torch
from runner.durable.tensors import Room
weight, room = torch.randn(1 << 20, device="cuda"), Room()
kept = room.copy(weight)
assert torch.equal(kept + 1, (weight + 1).cpu()), "the refusal is not raised by the next kernel"
"""


def test_page_locking_that_is_refused_makes_copies_slower_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_REFUSES_REGISTRATION", "1")
    on_stand_in("a100", "-c", REFUSED)


RELEASED = """
import gc, torch
from runner.durable.tensors import Room
room = Room()
address = room.copy(torch.randn(1 << 20, device="cuda")).data_ptr()
del room
gc.collect()
assert torch.cuda.cudart().cudaHostUnregister(address) != 0, "it was unregistered when it was freed"
"""


def test_page_locked_memory_is_unregistered_when_it_is_freed() -> None:
    on_stand_in("a100", "-c", RELEASED)


def trained(machine: str, words: str, folder: Path) -> list[dict[str, Any]]:
    """Train on a machine of the stand-in; return what each process that computed has counted."""
    counted = folder / "counted"
    counted.mkdir()
    line = [sys.executable, "-m", "runner", *f"train task=gpt evaluate.samples=16 run=r {words}".split()]
    env = environment(MACHINES[machine], counted)
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(path.read_text()) for path in sorted(counted.iterdir())]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("machine", "words", "contexts"),
    [
        ("t4", "+hardware=t4 prefetch=stream", [[0]]),
        ("a100", "prefetch=stream dataloader.num_workers=2 memory=checkpoint", [[0]]),
        ("a100x2", "parallelism=ddp prefetch=stream", [[0], [1]]),
        ("a100x2", "parallelism=fsdp precision=bf16", [[0], [1]]),
        ("pair", "parallelism=pipeline", [[0], [1]]),
    ],
)
def test_a_run_on_gpus_has_no_race_and_one_context_for_each_process(
    machine: str, words: str, contexts: list[list[int]], tmp_path: Path
) -> None:
    counted = trained(machine, f"updates=4 checkpoint.every=2 device=cuda {words}", tmp_path)
    assert [each["misuses"] for each in counted] == [{}] * len(contexts)
    assert sorted(each["contexts"] for each in counted) == contexts
    assert list((tmp_path / "outputs/r/checkpoints").iterdir())


FAILING = Path(__file__).with_name("task_that_fails.py")


@pytest.mark.parametrize(("words", "rank"), [("parallelism=ddp", 0), ("parallelism=fsdp", 1)])
def test_a_rank_that_fails_over_nccl_is_named_and_nobody_is_left(words: str, rank: int, tmp_path: Path) -> None:
    """Destroying an NCCL process group waits for kernels that the failed rank never joins: for `timeout_s`."""
    task = f"train --task {FAILING} task.rank={rank} updates=6 global_batch_size=16 run=r device=cuda {words}"
    line = [sys.executable, "-m", "runner", *task.split()]
    env = environment(MACHINES["a100x2"])
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 70, done.stdout + done.stderr
    error = json.loads((tmp_path / "outputs/r/error.json").read_text())
    assert error["place"]["rank"] == rank
    assert "planted" in done.stderr


def test_tests_of_a_gpu_that_need_no_times_pass_on_the_stand_in() -> None:
    """So that they do not rot where nobody has a GPU."""
    tests = [
        "tests/gpu/test_stream_and_precision.py",
        "tests/gpu/test_parts.py::test_marks_cost_no_wait_and_tell_what_the_device_did",
    ]
    out = on_stand_in("a100", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert "skipped" not in out.splitlines()[-1]
