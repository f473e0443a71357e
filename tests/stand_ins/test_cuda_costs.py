"""Costs of an update on a GPU, counted on the stand-in: waits of the host, kernels, copied bytes and overlap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.stand_ins.cuda.build import why_not
from tests.stand_ins.forked import StandIn, read

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built")

TASK = Path(__file__).with_name("task_that_fails.py")
UPDATES = 8  # updates of the short run; the long run has twice as many
BYTES_OF_A_BATCH = 16 * (6 * 4 + 8)  # float32 inputs (16, 6) and int64 targets (16,)
COPY = "aten::copy_"


Counted = dict[str, Any]


def counts_of_ranks(folder: Path, out: str = "") -> list[Counted]:
    """Return the counts of each process that ran an operator, and the number of progress lines of the first process."""
    ranks = sorted(read(folder), key=lambda rank: rank["contexts"])
    assert not any(rank["misuses"] for rank in ranks)
    drawn = sum(line.startswith("update=") for line in out.splitlines())
    return [{**rank, "drawn": 0 if number else drawn} for number, rank in enumerate(ranks)]


def run(stand_in: StandIn, args: str, folder: Path) -> list[Counted]:
    """Run a command in a new folder, and return the counts of each rank."""
    (folder / "counted").mkdir(parents=True)
    result = stand_in.command("a100x2" if "ddp" in args else "a100", args, folder, folder / "counted")
    assert result.code == 0, result.out + result.err
    return counts_of_ranks(folder / "counted", result.out)


def subtract(counts: Mapping[str, int], others: Mapping[str, int]) -> Counter[str]:
    """Return the differences, including negative ones, which the operator of `Counter` drops."""
    differences = Counter(counts)
    differences.subtract(others)
    return Counter({name: number for name, number in differences.items() if number})


def count_additional_updates(short: Counted, long: Counted, key: str) -> Counter[str]:
    """Return the counts of the additional updates of the longer run."""
    return subtract(long[key], short[key])


@pytest.fixture(scope="module")
def plain(stand_in: StandIn, tmp_path_factory: pytest.TempPathFactory) -> tuple[Counted, Counted]:
    def counted(number: int) -> Counted:
        folder = tmp_path_factory.mktemp(f"plain-{number}")
        text = f"from tests.stand_ins.plain_loop import main; main({number})"
        stand_in.program("a100", text, counted=folder)
        (only,) = counts_of_ranks(folder)
        return only

    return counted(UPDATES), counted(2 * UPDATES)


@dataclass(frozen=True)
class Cost:
    """Cost that an update of accel-run adds to that of a plain loop, on each rank.

    kernels  additional kernels, minus those that only the plain loop launches
    waits    waits for a kernel
    events   waits for an event; one of them is for the update before the last
    to_host  bytes copied to the host; a plain loop copies none
    line     waits of a progress line, each with a kernel: loss, gradient norm and, with several ranks, items
    """

    kernels: int
    waits: int = 0
    events: int = 1
    to_host: int = 2 * 8  # loss and gradient norm in float64
    line: int = 2


DDP = "prefetch=none precision=fp32 parallelism=ddp"
STREAM = "prefetch=stream precision=bf16"
COSTS = {
    STREAM: Cost(21),
    "prefetch=none precision=fp32": Cost(10),
    "prefetch=none precision=fp32 log_every=1": Cost(13, events=2, to_host=3 * 8),
    "prefetch=none precision=fp32 averaging=ema": Cost(10 + 4),  # the stand-in averages one parameter at a time
    "prefetch=none precision=fp16": Cost(33),
    "prefetch=none precision=fp16 optimizer.kernel=foreach": Cost(53, waits=1),
    DDP: Cost(23, to_host=3 * 8, line=3),
}


@pytest.mark.parametrize("args", [pytest.param(args, marks=[pytest.mark.slow] * (args != STREAM)) for args in COSTS])
def test_an_update_has_the_documented_costs(
    args: str, plain: tuple[Counted, Counted], stand_in: StandIn, tmp_path: Path
) -> None:
    """An update waits for no kernel, except with a loss scale and an optimizer that is not fused."""
    given = (
        f"train --task {TASK} task.rank=-1 run=r device=cuda global_batch_size=16 max_grad_norm=1 checkpoint=off"
        f" evaluate.every=1000 monitor=off {args}" + ("" if "log_every" in args else " log_every=1000")
    )
    cost, num_ranks = COSTS[args], 2 if args == DDP else 1
    short, long = (run(stand_in, f"{given} updates={num}", tmp_path / str(num)) for num in (UPDATES, 2 * UPDATES))
    assert len(short) == len(long) == num_ranks
    for before, after in zip(short, long, strict=True):
        waits = count_additional_updates(before, after, "host_waits")
        assert abs(waits.pop("cudaEventSynchronize") - UPDATES * cost.events) <= 1, "one may be of another update"
        of_lines = (after["drawn"] - before["drawn"]) * cost.line
        assert waits.total() == UPDATES * cost.waits + of_lines, waits
        assert after["bytes_to_device"] - before["bytes_to_device"] == UPDATES * BYTES_OF_A_BATCH // num_ranks
        assert after["bytes_to_host"] - before["bytes_to_host"] == UPDATES * cost.to_host
        more = subtract(
            count_additional_updates(before, after, "launches"), count_additional_updates(*plain, "launches")
        )
        print(
            f"\n{args}: {(more.total() - of_lines) / UPDATES:.2f} kernels an update beyond a plain loop: {dict(more)}"
        )
        assert more.total() == UPDATES * cost.kernels + of_lines, more
        _check_side_streams(
            args,
            count_additional_updates(before, after, "side_launches"),
            count_additional_updates(before, after, "overlapped"),
            plain,
        )


def _check_side_streams(
    args: str, launched: Counter[str], overlapped: Counter[str], plain: tuple[Counted, Counted]
) -> None:
    """Check that nothing else runs beside the default stream, and that each copy overlaps with an entire update."""
    if args == STREAM:
        kernels_of_update = count_additional_updates(*plain, "launches").total() / UPDATES
        assert launched == {COPY: 2 * UPDATES}, "only inputs and targets of each batch are copied"
        assert overlapped[COPY] >= launched[COPY] * kernels_of_update
    else:
        assert launched == ({"nccl::ALLREDUCE": 2 * UPDATES} if args == DDP else {}), (
            "gradients, and the loss with items"
        )


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
    """This includes the copy of a batch to the device."""
    given = (
        f"train {args} run=r device=cuda precision=bf16 checkpoint=off evaluate.every=0 evaluate.samples=8"
        " log_every=1000 monitor=off"
    )

    key = "updates" if phase == "train" else f"phase.{phase}.updates"
    (short,), (long,) = (run(stand_in, f"{given} {key}={num}", tmp_path / str(num)) for num in (2, 4))
    waits = count_additional_updates(short, long, "host_waits")
    assert waits.pop("cudaEventSynchronize") <= 2, "the only wait must be for the update before the last"
    assert (+waits).total() <= 2 * (long["drawn"] - short["drawn"]), f"the host waited for the device: {waits}"


@pytest.mark.slow
def test_gradients_are_exchanged_during_the_backward_pass(stand_in: StandIn, tmp_path: Path) -> None:
    """Buckets are reduced on NCCL's own stream while earlier layers are still computing."""
    args = "task=gpt evaluate.samples=16 precision=fp32 parallelism=ddp updates=2 micro_batch_size=4 checkpoint=off"
    for rank in run(stand_in, f"train {args} run=r device=cuda monitor=off", tmp_path):
        assert rank["side_launches"]["nccl::ALLREDUCE"] > 0
        assert rank["overlapped"]["nccl::ALLREDUCE"] > 0
