"""Costs of an update on a GPU, counted on the stand-in: waits of the host, kernels, copied bytes, overlap."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.stand_ins.cuda.build import why_not
from tests.stand_ins.forked import StandIn, read

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built")

TASK = Path(__file__).with_name("task_that_fails.py")
UPDATES = 8  # of the short run; the long run has twice as many
BYTES_OF_A_BATCH = 16 * (6 * 4 + 8)  # float32 inputs (16, 6) and int64 targets (16,)
BYTES_OF_AN_UPDATE = 3 * 8  # to the host: loss, gradient norm and items in float64
BYTES_OF_A_LINE = 8  # a progress line: loss and gradient norm in float32
COPY = "aten::copy_"


Counted = dict[str, Any]


def only(folder: Path, out: str) -> Counted:
    """Return the counts of the only process that ran an operator, and the number of its progress lines."""
    (result,) = read(folder)
    assert not result["misuses"]
    return {**result, "drawn": sum(line.startswith("update=") for line in out.splitlines())}


def run(stand_in: StandIn, args: str, folder: Path) -> Counted:
    """Run a command of one process in a new folder; return its counts."""
    (folder / "counted").mkdir(parents=True)
    result = stand_in.command("a100", args, folder, folder / "counted")
    assert result.code == 0, result.out + result.err
    return only(folder / "counted", result.out)


def of_updates(short: Counted, long: Counted, key: str) -> Counter[str]:
    """Return the counts of the additional updates of the longer run."""
    return Counter(long[key]) - Counter(short[key])


@pytest.fixture(scope="module")
def plain(stand_in: StandIn, tmp_path_factory: pytest.TempPathFactory) -> tuple[Counted, Counted]:
    def counted(number: int) -> Counted:
        folder = tmp_path_factory.mktemp(f"plain-{number}")
        text = f"from tests.stand_ins.plain_loop import main; main({number})"
        return only(folder, stand_in.program("a100", text, counted=folder))

    return counted(UPDATES), counted(2 * UPDATES)


# settings -> kernels per update that accel-run launches in addition to those of a plain loop
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("args", "kernels"),
    [
        ("prefetch=none precision=fp32", 14),
        ("prefetch=stream precision=bf16", 25),
        ("prefetch=none averaging=ema precision=fp32", 14 + 4),  # the stand-in averages one parameter at a time
    ],
)
def test_an_update_waits_for_nothing_and_launches_little_beyond_a_plain_loop(
    args: str, kernels: int, plain: tuple[Counted, Counted], stand_in: StandIn, tmp_path: Path
) -> None:
    given = (
        f"train --task {TASK} task.rank=-1 run=r device=cuda global_batch_size=16 max_grad_norm=1 checkpoint=off"
        f" evaluate.every=1000 log_every=1000 monitor=off {args}"
    )

    short, long = (run(stand_in, f"{given} updates={num}", tmp_path / str(num)) for num in (UPDATES, 2 * UPDATES))
    waits = of_updates(short, long, "host_waits")
    assert waits.pop("cudaEventSynchronize") <= UPDATES + 1, "only for the update before the last"
    num_drawn = long["drawn"] - short["drawn"]  # progress lines; each reads the loss and the norm
    assert waits.total() <= 2 * num_drawn, f"the host waited for the device: {waits}"
    assert long["bytes_to_device"] - short["bytes_to_device"] == UPDATES * BYTES_OF_A_BATCH
    to_host = long["bytes_to_host"] - short["bytes_to_host"]
    assert to_host <= UPDATES * BYTES_OF_AN_UPDATE + num_drawn * BYTES_OF_A_LINE
    copies = of_updates(short, long, "side_launches")
    assert copies.keys() <= {COPY}, "nothing else runs beside the default stream"
    if "prefetch=stream" in args:
        kernels_of_update = of_updates(*plain, "launches").total() / UPDATES
        assert copies[COPY] == 2 * UPDATES, "inputs and targets of each batch are copied beside the computation"
        assert of_updates(short, long, "overlapped")[COPY] >= copies[COPY] * kernels_of_update, "of a whole update"
    else:
        assert not copies
    more = of_updates(short, long, "launches") - of_updates(*plain, "launches")
    print(f"\n{args}: {more.total() / UPDATES:.2f} kernels an update beyond a plain loop: {dict(more)}")
    assert more.total() <= kernels * UPDATES, more


NMT_RANDOM = "task=nmt task.data=random"
ONE_EACH = "phase.pretrain.updates=1 phase.lora.updates=1 phase.router.updates=1"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("args", "phase"),
    [
        ("task=gpt", "train"),
        ("task=cape task.attention=dense", "train"),
        ("task=cape task.attention=deformable", "train"),
        ("task=tractodiff", "train"),
        ("task=tractodiff task.denoiser=unet", "train"),
        ("task=nmt", "train"),
        (NMT_RANDOM, "train"),
        (f"{NMT_RANDOM} task.packed=false", "train"),
        ("task=dynamo phases=[pretrain]", "pretrain"),
        (f"task=dynamo phases=[pretrain,lora] {ONE_EACH}", "lora"),
        (f"task=dynamo phases=[pretrain,lora,router] {ONE_EACH}", "router"),
        (f"task=dynamo {ONE_EACH}", "joint"),
        ("task=hyperspectral task.data=synthetic", "train"),
    ],
)
def test_no_task_waits_for_the_device(args: str, phase: str, stand_in: StandIn, tmp_path: Path) -> None:
    """Nor for a copy of its batch to the device."""
    given = (
        f"train {args} run=r device=cuda precision=bf16 checkpoint=off evaluate.every=0 evaluate.samples=8"
        " log_every=1000 monitor=off"
    )

    key = "updates" if phase == "train" else f"phase.{phase}.updates"
    short, long = (run(stand_in, f"{given} {key}={num}", tmp_path / str(num)) for num in (2, 4))
    waits = of_updates(short, long, "host_waits")
    assert waits.pop("cudaEventSynchronize") <= 2, "only for the update before the last"
    assert waits.total() <= 2 * (long["drawn"] - short["drawn"]), f"the host waited for the device: {waits}"


@pytest.mark.slow
def test_gradients_are_exchanged_during_the_backward_pass(stand_in: StandIn, tmp_path: Path) -> None:
    """On NCCL's own stream: buckets are reduced while earlier layers still compute."""
    (tmp_path / "counted").mkdir()
    args = "task=gpt evaluate.samples=16 precision=fp32 parallelism=ddp updates=2 micro_batch_size=4 checkpoint=off"
    result = stand_in.command("a100x2", f"train {args} run=r device=cuda monitor=off", tmp_path, tmp_path / "counted")
    assert result.code == 0, result.out + result.err
    for rank in read(tmp_path / "counted"):
        assert not rank["misuses"]
        assert rank["side_launches"]["nccl::ALLREDUCE"] > 0
        assert rank["overlapped"]["nccl::ALLREDUCE"] > 0
