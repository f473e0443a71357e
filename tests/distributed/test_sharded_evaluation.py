"""parallelism.evaluation=sharded: ranks evaluate a model of which no rank ever has all parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from runner.base.errors import TaskFault
from runner.base.world import World
from runner.distributed.sharded import Sharded
from runner.plan.planning_rules import why_no_fsdp
from tests.distributed.ranks import CPU, run_ranks
from tests.distributed.test_sharded import Run, listed, samples
from tests.rounding import allowed, distance

pytestmark = pytest.mark.skipif(bool(why_no_fsdp(torch.__version__)), reason="the plan refuses this version of torch")
RANKS = 3
DOUBLE = torch.float64
keeps_shards = partial(Sharded, gathers_model=False)
SHARES = {2: (19, 13), RANKS: (11, 10, 11)}


class Gathered:
    """Counts the parameters that this rank holds at once, besides its shards."""

    def __init__(self, model: nn.Module) -> None:
        self.most = 0
        for part in model.modules():
            part.register_forward_pre_hook(lambda *_: self.look(model))

    def look(self, model: nn.Module) -> None:
        held = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
        self.most = max(self.most, sum(weight.numel() for weight in held if weight.dim()))


def run_of(world: World, **options: Any) -> Run:
    return Run(world, shares=SHARES[world.world_size], micro=4, strategy=partial(Sharded, **options))


def outputs_of(run: Run, calls: int) -> list[Any]:
    x, _ = samples(DOUBLE)
    with run.parallel.gather_parameters(run.model), torch.no_grad():
        return [run.model(x[first : first + 2]).tolist() for first in range(calls)]


def walk(world: World) -> dict[str, Any]:
    """Evaluate between updates; each rank calls the model a different number of times."""
    run = run_of(world, gathers_model=False)
    gathered = Gathered(run.model)
    run.advance(2)
    outputs = outputs_of(run, 1 + 2 * world.rank)
    most, kinds = gathered.most, {type(weight) for weight in run.model.parameters()}
    run.advance(4)
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


def test_ranks_call_the_model_different_numbers_of_times(results: list[dict[str, Any]]) -> None:
    run = Run(World(CPU))
    run.advance(2)
    expected = outputs_of(run, 1 + 2 * RANKS)
    for rank, result in enumerate(results):
        assert len(result["outputs"]) == 1 + 2 * rank
        tolerance = allowed(DOUBLE, terms=sum(SHARES[RANKS]))
        assert distance(expected[: 1 + 2 * rank], result["outputs"]) <= tolerance


def test_training_goes_on_as_without_an_evaluation(results: list[dict[str, Any]]) -> None:
    def without(world: World) -> Any:
        run = run_of(world, gathers_model=False)
        run.advance(4)
        return listed(run.parallel.gather_full(run.model.state_dict()))

    assert results[0]["model"] == run_ranks(without, RANKS)[0]
    assert all(result["is sharded"] for result in results)
    assert len({result["hooks"] for result in results}) == 1


def test_no_rank_has_the_whole_model(results: list[dict[str, Any]]) -> None:
    whole = sum(weight.numel() for weight in Run(World(CPU)).model.parameters())
    for result in results:
        assert 0 < result["most"] < whole


class Stepping(nn.Module):
    """Counts its passes in a buffer, in eval mode too, and draws noise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor, *, shift: float) -> Tensor:
        self.passes += 1
        for block in self.blocks:
            x = block(x)
        return x + shift


def repeated(world: World) -> list[float]:
    model = Stepping()
    parallel = keeps_shards(world)
    wrapped = parallel.wrap(model, list, list(model.blocks))
    assert isinstance(wrapped, FSDPModule)
    formats = []
    model.blocks[0].register_forward_hook(lambda module, args, output: formats.append(str(output.dtype)))
    with parallel.gather_parameters(wrapped), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(1 + world.rank):
            wrapped(torch.ones(1, 4), shift=1.0)
    return [float(model.passes), len(formats), len(set(formats))]


def test_a_repeated_call_has_no_side_effects_and_the_same_format() -> None:
    assert run_ranks(repeated, 2) == [[1.0, 2, 1], [2.0, 2, 1]]


def uncalled(world: World) -> str:
    model = Stepping()
    parallel = keeps_shards(world)
    wrapped = parallel.wrap(model, list, list(model.blocks))
    try:
        with parallel.gather_parameters(wrapped), torch.no_grad():
            if world.rank:
                wrapped(torch.ones(1, 4), shift=1.0)
    except TaskFault as error:
        return error.problems[0].where
    except Exception as error:
        return type(error).__name__
    return "no error"


def test_a_rank_that_never_calls_the_model_gets_a_message() -> None:
    assert "parallelism.evaluation=sharded" in run_ranks(uncalled, 2)


def test_the_weights_of_a_fit_are_written_in_the_whole_model() -> None:
    def edited(world: World) -> Any:
        run = run_of(world, gathers_model=False)
        with run.parallel.edit_parameters(run.model), torch.no_grad():
            run.model.head.weight.fill_(2.0)  # type: ignore[union-attr,operator]
        return listed(run.parallel.gather_full(run.model.state_dict()))

    assert {value for row in run_ranks(edited, 2)[0]["head.weight"] for value in row} == {2.0}
