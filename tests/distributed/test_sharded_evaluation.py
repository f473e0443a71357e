"""With parallelism.evaluation=sharded, ranks evaluate a model of which no rank holds all parameters."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.base.errors import TaskFault
from runner.distributed.sharded import Sharded
from runner.distributed.world import World
from runner.plan.planning_rules import why_no_fsdp
from tests.distributed.ranks import CPU, run_ranks
from tests.distributed.test_sharded import Run, listed, make_model, samples
from tests.rounding import allowed, distance

pytestmark = pytest.mark.skipif(bool(why_no_fsdp(torch.__version__)), reason="the plan refuses this version of torch")
RANKS = 3
DOUBLE = torch.float64
SHARES = {2: (19, 13), RANKS: (11, 10, 11), 4: (8, 8, 8, 8)}


class Gathered:
    """Count the parameters that this rank holds at once besides its shards."""

    def __init__(self, model: nn.Module) -> None:
        self.most = 0
        for part in model.modules():
            part.register_forward_pre_hook(lambda *_: self.look(model))

    def look(self, model: nn.Module) -> None:
        held = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
        self.most = max(self.most, sum(weight.numel() for weight in held if weight.dim()))


def run_of(world: World, **options: Any) -> Run:
    return Run(world, shares=SHARES[world.world_size], micro=8, strategy=partial(Sharded, **options))


def outputs_of(run: Run, calls: int) -> list[Any]:
    x, _ = samples(DOUBLE)
    with run.parallel.gather_parameters(run.model), torch.no_grad():
        return [run.model(x[first : first + 2]).tolist() for first in range(calls)]


def walk(world: World) -> dict[str, Any]:
    """Evaluate between updates; each rank calls the model a different number of times."""
    run = run_of(world, gathers_model=False)
    gathered = Gathered(run.model)
    run.advance(1)
    outputs = outputs_of(run, 1 + 2 * world.rank)
    most, kinds = gathered.most, {type(weight) for weight in run.model.parameters()}
    run.advance(2)
    return {
        "outputs": outputs,
        "most": most,
        "is sharded": kinds == {DTensor},
        "model": listed(run.parallel.gather_full(run.model.state_dict())),
        "hooks": len(run.model._forward_pre_hooks),  # lint-tests: private: torch has no other way to count them
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(walk, RANKS)


def test_ranks_can_make_different_numbers_of_model_calls(results: list[dict[str, Any]]) -> None:
    run = Run(World(CPU))
    run.advance(1)
    expected = outputs_of(run, 1 + 2 * RANKS)
    for rank, result in enumerate(results):
        assert len(result["outputs"]) == 1 + 2 * rank
        tolerance = allowed(DOUBLE, terms=sum(SHARES[RANKS]))
        assert distance(expected[: 1 + 2 * rank], result["outputs"]) <= tolerance


def test_an_evaluation_does_not_change_training(results: list[dict[str, Any]]) -> None:
    def without(world: World) -> Any:
        run = run_of(world, gathers_model=False)
        run.advance(2)
        return listed(run.parallel.gather_full(run.model.state_dict()))

    assert results[0]["model"] == run_ranks(without, RANKS)[0]
    assert all(result["is sharded"] for result in results)
    assert len({result["hooks"] for result in results}) == 1


def test_no_rank_ever_holds_the_whole_model(results: list[dict[str, Any]]) -> None:
    whole = sum(weight.numel() for weight in Run(World(CPU)).model.parameters())
    for result in results:
        assert 0 < result["most"] < whole


class Stepping(nn.Module):
    """A model that counts its passes, appends to a cache that it receives, and fails on request."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.passes = 0

    def forward(self, x: Tensor, *, cache: list[Tensor], fails: bool = False) -> Tensor:
        self.passes += 1
        for number, block in enumerate(self.blocks):
            x = block(x)
            if fails and number == 1:
                raise ValueError("planted")
        cache.append(x)
        return x + torch.randn(())


def stepping(world: World, **options: Any) -> tuple[Stepping, Sharded, Any]:
    torch.manual_seed(0)
    model = Stepping()
    parallel = Sharded(world, gathers_model=False, **options)
    return model, parallel, parallel.wrap(model, list, list(model.blocks))


def join_calls(world: World, **options: Any) -> list[Any]:
    model, parallel, wrapped = stepping(world, **options)
    cache: list[Tensor] = []
    before = torch.get_rng_state()
    with parallel.gather_parameters(wrapped), torch.no_grad():
        for _ in range(2 * world.rank):  # rank 0 does not make the call
            wrapped(torch.ones(1, 4), cache=cache)
    return [model.passes, len(cache), torch.equal(before, torch.get_rng_state())]


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
def test_a_finished_rank_joins_calls_without_side_effects(options: dict[str, Any]) -> None:
    assert run_ranks(partial(join_calls, **options), 2) == [[0, 0, True], [2, 2, False]]


def catch_errors(world: World) -> list[float]:
    """Catch an error of one rank in a call, then change the weights and evaluate again."""
    _, parallel, wrapped = stepping(world)
    for fails in (world.rank == 1, False):
        with parallel.gather_parameters(wrapped), torch.no_grad():
            for _ in range(2):
                with suppress(ValueError):
                    wrapped(torch.ones(1, 4), cache=[], fails=fails)
        with torch.no_grad():
            for weight in wrapped.parameters():
                weight.zero_()
    outputs: list[Tensor] = []
    with parallel.gather_parameters(wrapped):
        wrapped(torch.ones(1, 4), cache=outputs)  # with gradients, and without a backward pass
    with parallel.gather_parameters(wrapped), torch.no_grad():
        wrapped(torch.ones(1, 4), cache=outputs)
    return [float(output.detach().abs().sum()) for output in outputs]


def test_failed_calls_leave_no_rank_waiting_or_weights_gathered() -> None:
    assert run_ranks(catch_errors, 2) == [[0.0, 0.0]] * 2


def infer(world: World) -> list[float]:
    run = run_of(world, gathers_model=False)
    x, _ = samples(DOUBLE)
    with run.parallel.gather_parameters(run.model), torch.inference_mode():
        for _ in range(1 + world.rank):
            run.model(x[:2])
    return [float(step.loss_sum) for step in run.advance(2) if step.loss_sum is not None]


def test_inference_mode_is_possible_before_the_first_update() -> None:
    run = Run(World(CPU))
    expected = [float(step.loss_sum) for step in run.advance(2) if step.loss_sum is not None]
    for losses in run_ranks(infer, 2):
        assert distance(expected, losses) <= allowed(DOUBLE, terms=32)


@pytest.mark.parametrize("name", ["block", "root"])
def test_calling_a_submodule_directly_is_an_error(name: str) -> None:
    def call_submodule(world: World) -> str:
        run = run_of(world, gathers_model=False)
        x, _ = samples(DOUBLE)
        with pytest.raises(TaskFault) as catch_errors, run.parallel.gather_parameters(run.model), torch.no_grad():
            {"block": run.model.blocks[0], "root": run.model.embed}[name](x)  # type: ignore[index,operator]
        return catch_errors.value.problems[0].where

    assert run_ranks(call_submodule, 2) == ["parallelism.evaluation=sharded"] * 2


def run_compiled(world: World) -> list[Any]:
    """Train and evaluate twice, with a different number of calls of the compiled blocks on each rank."""
    model = make_model(DOUBLE)
    warnings.filterwarnings("ignore", message="The .grad attribute")  # dynamo inspects all attributes of tensors
    if world.world_size > 1:
        for block in model.blocks:
            block.compile(backend="eager")  # type: ignore[no-untyped-call]
    run = Run(
        world, shares=SHARES[world.world_size], micro=4, model=model, strategy=partial(Sharded, gathers_model=False)
    )
    run.advance(1)
    first = outputs_of(run, 1 + world.rank)
    run.advance(2)
    return [first[0], outputs_of(run, 3 - 2 * world.rank)[0]]


@pytest.mark.slow
def test_ranks_can_make_different_numbers_of_compiled_calls() -> None:
    run = Run(World(CPU))
    expected = []
    for update in (1, 2):
        run.advance(update)
        expected.append(outputs_of(run, 1)[0])
    for outputs in run_ranks(run_compiled, 2):
        assert distance(expected, outputs) <= allowed(DOUBLE, terms=32)


def test_ranks_join_only_calls_of_their_group() -> None:
    outputs = run_ranks(lambda world: outputs_of(run_of(world, gathers_model=False, shard_size=2), world.rank), 4)
    expected = outputs_of(Run(World(CPU)), 4)
    for rank, of_rank in enumerate(outputs):
        assert len(of_rank) == rank
        assert not rank or distance(expected[:rank], of_rank) <= allowed(DOUBLE, terms=32)


def test_fit_phases_can_write_weights_of_the_whole_model() -> None:
    def edit(world: World) -> Any:
        run = run_of(world, gathers_model=False)
        with run.parallel.edit_parameters(run.model), torch.no_grad():
            run.model.head.weight.fill_(2.0)  # type: ignore[union-attr,operator]
        return listed(run.parallel.gather_full(run.model.state_dict()))

    assert {value for row in run_ranks(edit, 2)[0]["head.weight"] for value in row} == {2.0}


def sum_after_calls(world: World, calls: int, style: str) -> str:
    """Call the model, then a collective, then the model again. Return the sum or the error."""
    model, parallel, wrapped = stepping(world)
    total = torch.tensor([world.rank + 1.0])
    alone = dist.new_group([0])
    try:
        with parallel.gather_parameters(wrapped), torch.no_grad():
            for _ in range(calls):
                wrapped(torch.ones(1, 4), cache=[])
            if style == "sum":
                dist.all_reduce(total)
            elif style == "objects":
                results: list[Any] = [None] * world.world_size
                dist.all_gather_object(results, world.rank)
                total = torch.tensor([sum(results) + 3.0 - len(results) / 2])
            elif style == "group of one rank":
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # an error of torch on the other rank
                    dist.all_reduce(total, group=alone)
            elif world.is_first:
                dist.all_reduce(total)
            wrapped(torch.ones(1, 4), cache=[])
    except TaskFault as fault:
        return fault.problems[0].what
    assert model.passes == calls + 1
    return str(float(total))


@pytest.mark.parametrize("style", ["sum", "objects"])
def test_tasks_can_use_collectives_after_equal_numbers_of_calls(style: str) -> None:
    assert run_ranks(lambda world: sum_after_calls(world, 2, style), 2) == [{"sum": "3.0", "objects": "3.0"}[style]] * 2


def test_collectives_of_groups_without_this_rank_are_not_counted() -> None:
    found = run_ranks(lambda world: sum_after_calls(world, 2, "group of one rank"), 2)
    assert found == ["1.0", "2.0"]


@pytest.mark.parametrize("style", ["sum", "objects", "sum on rank 0"])
def test_a_collective_during_other_ranks_calls_is_an_error(style: str) -> None:
    calls = 1 if style == "sum on rank 0" else None
    what = "a rank calls a collective of torch.distributed while another rank calls the model"
    found = run_ranks(lambda world: sum_after_calls(world, calls or 1 + world.rank, style), 2)
    assert found == [what] * 2


def test_a_collective_after_other_ranks_finished_is_an_error() -> None:
    def late(world: World) -> str:
        _, parallel, wrapped = stepping(world)
        with pytest.raises(TaskFault) as catch_errors, parallel.gather_parameters(wrapped), torch.no_grad():
            wrapped(torch.ones(1, 4), cache=[])
            if world.is_first:
                dist.barrier()
        dist.barrier()  # the functions of torch are back
        return catch_errors.value.problems[0].what

    what = "a rank calls a collective of torch.distributed while another rank has finished its batches"
    assert run_ranks(late, 2) == [what] * 2
