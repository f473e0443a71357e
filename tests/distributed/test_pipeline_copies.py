"""Several pipelines give the results of one process, and their copies of the model stay bitwise equal.

The tests share one run of four ranks, two pipelines of two stages, because starting ranks is expensive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.axes.precision import fp16
from runner.base.batch import MicroBatch
from runner.base.order import MicroBatchKey
from runner.distributed import reducer
from runner.distributed.pipelined import Pipelined
from runner.distributed.world import World
from runner.engine.update.loop import train_updates
from tests.distributed.ranks import run_ranks
from tests.distributed.test_pipelined import (
    ALONE,
    CLASSES,
    WIDTH,
    Tied,
    batches,
    layers_of,
    passes_of,
    token_loss,
    tokens_loss,
    training,
)
from tests.rounding import allowed, distance

RANKS, STAGES, UPDATES = 4, 2, 3
SIZES = ([3, 3, 1], [2, 2])  # of each pipeline; the pipelines have different numbers of micro-batches
LAST = ([3, 3, 1], [])  # the last update of an epoch may leave a pipeline without samples
DOUBLE = torch.float64


def updates_of(pipeline: int | None) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a pipeline, or those of all pipelines if `pipeline` is None."""
    for number, sizes in enumerate([*[SIZES] * (UPDATES - 1), LAST]):
        micros = batches([*sizes[0], *sizes[1]], DOUBLE, seed=number, tokens=True)
        if pipeline is not None:
            first = pipeline * len(sizes[0])
            micros = micros[first : first + len(sizes[pipeline])] or [micros[0]._replace(is_counted=False)]
        micros = [micro._replace(last=micro is micros[-1], bad=()) for micro in micros]
        yield from micros


def run_of(world: World) -> dict[str, Any]:
    torch.manual_seed(world.rank)  # all ranks start from the weights of rank 0
    if world.rank == 0:
        torch.manual_seed(0)
    made = training(
        world, lambda: Tied(4).double(), loss=tokens_loss, **({"stages": STAGES} if world.world_size > 1 else {})
    )
    pipeline = made.parallel.batch_rank if world.world_size > 1 else None
    steps = list(train_updates(made, updates_of(pipeline), UPDATES))
    own = {name: tensor for name, tensor in made.model.state_dict().items() if not tensor.is_meta}
    return {
        "losses": [float(step.loss_sum) for step in steps if step.loss_sum is not None],
        "items": [float(step.items) for step in steps],
        "norms": [float(step.grad_norm) for step in steps if step.grad_norm is not None],
        "own": listed(own),
        "gathered": listed(made.parallel.gather_full(made.model.state_dict())),
    }


def listed(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}


class Normalized(nn.Module):
    """A model with a batch norm in each stage, and one outside the layers that the loss updates."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(3), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(3)
        )
        self.inputs = nn.BatchNorm1d(3, affine=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y

    def layers(self) -> list[nn.Module]:
        return list(self.body)


def normalized_loss(model: Any, batch: Any) -> tuple[Tensor, int]:
    y = model(batch["x"])
    if torch.is_grad_enabled():
        model.seen += len(y)
        model.inputs(batch["x"])
    return y.square().sum(), len(y)


def buffers_of(world: World, stages: int) -> dict[str, Any]:
    """Return this rank's buffers after two updates and a check that copies of a buffer are equal."""
    torch.manual_seed(0)
    model = Normalized().double()
    parallel = Pipelined(world, stages=stages, split=[2, 2])
    wrapped = parallel.wrap(model, lambda: layers_of(model), [])
    parallel.begin(list(parallel.owned_parameters(dict(model.named_parameters())).values()))
    for update in range(2):
        micros = batches(SIZES[parallel.batch_rank], DOUBLE, seed=10 * update + parallel.batch_rank)
        parallel.reduce(parallel.accumulate(passes_of(wrapped, normalized_loss), iter(micros)))
    parallel.check_buffers()
    return listed({name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta})


def fitted_buffers(world: World) -> dict[str, Any]:
    """Return the buffers after a phase without gradients, in which all ranks of a pipeline read the same data."""
    torch.manual_seed(0)
    model = Normalized().double()
    parallel = Pipelined(world, stages=STAGES, split=[2, 2])
    parallel.wrap(model, lambda: layers_of(model), [])
    with parallel.buffer_update(), torch.no_grad():
        for micro in batches([4], DOUBLE, seed=parallel.batch_rank):
            model.inputs(micro.batch["x"])
            model.seen += 1 + parallel.batch_rank
    parallel.check_buffers()
    return listed({name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta})


class Overflowing(nn.Module):
    """A layer that multiplies its input so that it overflows in the call with the given number."""

    def __init__(self, call: int | None) -> None:
        super().__init__()
        self.calls, self.call = 0, call

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.calls += 1
        return x * 1e30 if self.calls == self.call and torch.is_grad_enabled() else x


def skipped_update(world: World) -> list[Any]:
    """Run an update in which the first pipeline overflows and the second one has no samples."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        Overflowing(1 if world.rank < STAGES else None),
        nn.BatchNorm1d(3),
        nn.Linear(WIDTH, CLASSES),
    )
    made = training(
        world, lambda: model, precision=lambda *args: fp16(*args, init_scale=256.0), stages=STAGES, split=[2, 2]
    )
    micros = batches([3], torch.float32)
    if made.parallel.batch_rank:
        micros = [micro._replace(is_counted=False) for micro in micros]
    list(train_updates(made, iter(micros), 1))
    statistics = model[2].running_mean
    return [made.precision.num_skipped(), statistics.is_meta or statistics.isfinite().all().item()]


def fail(world: World, phase: str) -> str:
    """Fail in the last stage of the last pipeline; return what this rank reports.

    phase  first: in the first micro-batch, while this pipeline infers shapes; later: in a micro-batch of another shape
    """
    calls = []

    def loss(model: nn.Module, batch: Any) -> Any:
        result = token_loss(model, batch)
        calls.append(len(batch["x"]))
        if world.rank == RANKS - 1 and calls[-1] == {"first": 2, "later": 1}[phase]:
            raise ValueError("planted")
        return result

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
    parallel = Pipelined(world, stages=STAGES)
    wrapped = parallel.wrap(model, lambda: list(model), [])
    parallel.begin(list(parallel.owned_parameters(dict(model.named_parameters())).values()))
    try:
        parallel.accumulate(passes_of(wrapped, loss), iter(batches([2, 1], DOUBLE)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def of_rank(world: World) -> dict[str, Any]:
    parallel = Pipelined(world, stages=STAGES)
    keys = [MicroBatchKey(0, [number], number == 4) for number in range(5)]
    state = {"sum": torch.tensor([10.0**parallel.batch_rank + 100 * (world.rank % STAGES)])}
    return {
        "run": run_of(world),
        "buffers": buffers_of(world, STAGES),
        "fitted": fitted_buffers(world),
        "skipped": skipped_update(world),
        "evaluated": [[*key.indices, key.is_counted] for key in parallel.evaluation_batches(keys)],
        "merged": parallel.merge_state(lambda one, other: {"sum": one["sum"] + other["sum"]}, state)["sum"].tolist(),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(of_rank, RANKS)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_of(ALONE)


def test_several_pipelines_do_not_change_the_updates(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """The pipelines have different numbers of micro-batches, and one has no samples in the last update."""
    tolerance = allowed(DOUBLE, terms=sum(alone["items"]))
    for result in results:
        run = result["run"]
        assert run["items"] == alone["items"]
        for key in ("losses", "norms"):
            assert distance(alone[key], run[key]) <= tolerance, key
    assert list(results[0]["run"]["gathered"]) == list(alone["own"])
    assert distance(alone["own"], results[0]["run"]["gathered"]) <= tolerance


def test_copies_of_a_stage_are_bitwise_equal(results: list[dict[str, Any]]) -> None:
    for stage in range(STAGES):
        assert results[stage]["run"]["own"] == results[stage + STAGES]["run"]["own"]
        assert results[stage]["buffers"] == results[stage + STAGES]["buffers"]
    assert results[0]["run"]["own"] != results[1]["run"]["own"], "stages must have different layers"


def test_only_the_first_rank_gathers_a_checkpoint(results: list[dict[str, Any]]) -> None:
    assert [bool(result["run"]["gathered"]) for result in results] == [True, False, False, False]


def test_buffers_outside_the_layers_come_from_the_last_stage(results: list[dict[str, Any]]) -> None:
    for name in ("seen", "inputs.running_mean", "inputs.num_batches_tracked"):
        assert all(result["buffers"][name] == results[0]["buffers"][name] for result in results)
    assert results[0]["buffers"]["inputs.num_batches_tracked"] == [2 * len(SIZES[0])]


def test_fitted_buffers_are_the_same_on_all_ranks(results: list[dict[str, Any]]) -> None:
    for result in results:
        for name in ("seen", "inputs.running_mean", "inputs.num_batches_tracked"):
            assert result["fitted"][name] == results[0]["fitted"][name]
    assert results[0]["fitted"]["seen"] == [1], "that of the first pipeline, as ddp uses that of rank 0"


def test_an_overflow_skips_the_update_on_idle_pipelines_too(results: list[dict[str, Any]]) -> None:
    assert [result["skipped"] for result in results] == [[1, True]] * RANKS


@pytest.mark.parametrize("phase", ["first", "later"])
def test_an_error_in_one_pipeline_is_raised_on_all_ranks(phase: str) -> None:
    *others, failed = run_ranks(lambda world: fail(world, phase), RANKS)
    assert failed == "ValueError: planted"
    for other in others:
        assert other.startswith("RankLost")
        assert f"rank {RANKS - 1} failed: ValueError: planted" in other


def test_running_statistics_of_the_loss_come_from_its_stage() -> None:
    expected = buffers_of_one_process()
    for result in run_ranks(lambda world: buffers_of(world, STAGES), STAGES):
        for name in ("inputs.running_mean", "inputs.running_var"):
            assert distance(expected[name], result[name]) <= allowed(DOUBLE, terms=sum(SIZES[0]))


def buffers_of_one_process() -> dict[str, Any]:
    norm = nn.BatchNorm1d(3, affine=False).double()
    for update in range(2):
        for micro in batches(SIZES[0], DOUBLE, seed=10 * update):
            norm(micro.batch["x"])
    return {f"inputs.{name}": buffer.tolist() for name, buffer in norm.named_buffers()}


def test_each_evaluated_batch_is_counted_once(results: list[dict[str, Any]]) -> None:
    counted = [index for result in results for index, counts in result["evaluated"] if counts]
    assert sorted(counted) == list(range(5))
    assert [[index for index, _ in result["evaluated"]] for result in results] == [[0, 2, 4], [0, 2, 4], [1, 3], [1, 3]]


def test_data_statistics_are_merged_over_first_stages(results: list[dict[str, Any]]) -> None:
    assert [result["merged"] for result in results] == [[11.0]] * RANKS


def count_reduced_bytes(world: World, sizes: Sequence[int]) -> list[int]:
    """Return the bytes of gradients that were all-reduced when each step of the schedule ended."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).double()
    parallel = Pipelined(world, stages=STAGES, split=[4, 4])
    wrapped = parallel.wrap(model, lambda: list(model), [])
    parallel.begin(list(parallel.owned_parameters(dict(model.named_parameters())).values()))
    launched: list[int] = []
    plain, ended = World.sum_async, parallel.stage.end

    def sum_async(self: World, tensor: Tensor) -> Any:
        launched.append(tensor.nbytes)
        return plain(self, tensor)

    during: list[int] = []
    World.sum_async = sum_async  # type: ignore[method-assign]
    parallel.stage.end = lambda: (during.append(sum(launched)), ended())  # type: ignore[method-assign,assignment]
    parallel.reduce(parallel.accumulate(passes_of(wrapped, token_loss), iter(batches(sizes, DOUBLE))))
    return during


def test_gradients_are_exchanged_during_the_last_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "SMALL_BYTES", 0)  # otherwise, gradients are sent together with the sums
    for before_end in run_ranks(lambda world: count_reduced_bytes(world, [2, 2, 1]), RANKS):
        assert before_end == [0, 4 * 8 * WIDTH * (WIDTH + 1)], (
            "one step for two equal micro-batches, one for the smaller"
        )
