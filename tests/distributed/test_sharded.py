"""Sharded training gives the results and the checkpoints of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from runner.axes.optimizer import adamw, sgd
from runner.axes.precision import bf16, fp16, fp32
from runner.axes.scheduler import constant
from runner.base.batch import MicroBatch
from runner.base.errors import ConfigError, TaskFault
from runner.base.order import MicroBatchKey, Order
from runner.distributed.batch_norm import synchronize_batch_norms
from runner.distributed.parallel import ForwardPasses, Parallel
from runner.distributed.sharded import Sharded
from runner.distributed.world import World
from runner.engine.update.loop import Position, StepInfo, Training, train_updates
from runner.plan.planning_rules import why_no_fsdp
from runner.tensors.optimizer_state import export_state, import_state
from tests.distributed.ranks import CPU, run_ranks
from tests.rounding import PROMISED, allowed, distance, distance_of_each

pytestmark = pytest.mark.skipif(bool(why_no_fsdp(torch.__version__)), reason="the plan refuses this version of torch")
ALONE = World(CPU)
NUM_SAMPLES, WIDTH, TOKENS, CLASSES = 45, 6, 4, 5


class Block(nn.Module):
    """A block whose odd sizes cause padded shards. `gain` is 0-dimensional; `unused` has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 5)
        self.outer = nn.Linear(5, 7)
        self.gain = nn.Parameter(torch.tensor(0.8))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x))) * self.gain


class Model(nn.Module):
    """A model whose `temperature` has one element, so most ranks have an empty shard of it."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 7)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(7, CLASSES)
        self.temperature = nn.Parameter(torch.tensor([1.3]))
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits: Tensor = self.head(x) * self.temperature
        return logits


def make_model(dtype: torch.dtype, **options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).to(dtype)


def samples(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    # -1 marks padding, which the loss ignores
    y = torch.randint(-1, CLASSES, (NUM_SAMPLES, TOKENS), generator=generator)
    return x, y


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, y = batch
    return F.cross_entropy(model(x).transpose(1, 2), y, reduction="sum", ignore_index=-1), (y >= 0).sum()


def batches_of(order: Order, dtype: torch.dtype, start: int = 0) -> Iterator[MicroBatch]:
    x, y = samples(dtype)
    for key in order.from_update(start):
        yield MicroBatch((x[key.indices], y[key.indices]), key.last, is_counted=key.is_counted)


def sharded(world: World, **options: Any) -> Parallel:
    return Sharded(world, **options) if world.world_size > 1 else Parallel(world)


class Run:
    """The model, strategy and training loop of this rank; a checkpoint is complete on rank 0."""

    def __init__(
        self,
        world: World,
        *,
        shares: tuple[int, ...] = (32,),
        micro: int = 32,
        dtype: torch.dtype = torch.float64,
        loss: Any = token_loss,
        precision: Any = fp32,
        optimizer: Any = adamw,
        strategy: Callable[[World], Parallel] = sharded,
        trains: str = "",
        model: nn.Module | None = None,
    ) -> None:
        self.world, self.dtype = world, dtype
        self.parallel = strategy(world)
        bare = model or make_model(dtype)
        self.model = self.parallel.wrap(bare, list, list(getattr(bare, "blocks", [])))
        self.order = Order(
            NUM_SAMPLES, sum(shares), micro, seed=3, shares=shares if world.world_size > 1 else (),
            rank=world.rank, is_lockstep=self.parallel.is_lockstep,
        )  # fmt: skip
        for name, weight in self.model.named_parameters():
            weight.requires_grad_(trains in name)
        self.named = [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]
        parameters = [weight for _, weight in self.named]
        self.parallel.begin(parameters)
        self.training = Training(
            position=Position("train"),
            model=self.model,
            loss=loss,
            parameters=parameters,
            optimizer=optimizer(self.named, lr=0.01),
            schedule=constant(100),
            precision=precision(world, self.model),
            parallel=self.parallel,
            per_item=1 / 128,
            max_grad_norm=0.5,
        )

    def advance(self, until: int) -> list[StepInfo]:
        batches = batches_of(self.order, self.dtype, self.training.position.update)
        return list(train_updates(self.training, batches, until))

    def saved(self) -> dict[str, Any]:
        """Return the content of a checkpoint as JSON, which is empty on ranks other than 0."""
        tensors, numbers = export_state(self.training.optimizer)
        files = {
            "model": self.parallel.gather_full(self.model.state_dict()),
            "optimizer": self.parallel.gather_full(tensors),
        }
        update = self.training.position.update
        return {name: listed(file) for name, file in files.items()} | {"numbers": numbers, "update": update}

    def restore(self, saved: Mapping[str, Any]) -> None:
        current = self.model.state_dict()
        whole = {name: torch.tensor(value, dtype=current[name].dtype) for name, value in saved["model"].items()}
        assert whole.keys() == current.keys()
        self.parallel.load(self.model, whole)
        steps = {name: torch.float32 for name in saved["optimizer"] if name.endswith(".step")}
        import_state(
            self.training.optimizer,
            {
                name: torch.tensor(value, dtype=steps.get(name, self.dtype))
                for name, value in saved["optimizer"].items()
            },
            saved["numbers"],
        )
        self.training.position.update = saved["update"]


def listed(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def train_run(world: World, *, updates: int = 4, **options: Any) -> dict[str, Any]:
    """Train for `updates` updates, and return losses, norms, counts and weights."""
    run = Run(world, **options)
    steps = run.advance(updates)
    return {
        "losses": [float(step.loss_sum) / float(step.items) for step in steps if step.loss_sum is not None],
        "items": [float(step.items) for step in steps],
        "norms": [float(step.grad_norm) for step in steps if step.grad_norm is not None],
        "skipped": run.training.precision.num_skipped(),
        "scale": run.training.precision.values().get("precision/loss_scale"),
        **run.saved(),
    }


SPLITS = [((16, 16), 16), ((19, 13), 4), ((31, 1), 8), ((11, 8, 13), 5), ((1, 30, 1), 7)]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("shares", "micro"), SPLITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["64", "32"])
def test_shares_and_ranks_do_not_change_the_updates(shares: tuple[int, ...], micro: int, dtype: torch.dtype) -> None:
    """The second update of each epoch has 13 samples, so its shares are unequal, and a rank may have none."""
    alone = train_run(ALONE, shares=shares, micro=sum(shares), dtype=torch.float64)
    tolerance = allowed(dtype, terms=sum(alone["items"]))  # rounding errors of all updates accumulate
    results = run_ranks(lambda world: train_run(world, shares=shares, micro=micro, dtype=dtype), len(shares))
    for result in results:
        assert result["items"] == alone["items"]
        for key in ("losses", "norms"):
            assert distance(alone[key], result[key]) <= tolerance, key
    assert distance_of_each(alone["model"], results[0]["model"]) <= tolerance
    for kind, factor in (("exp_avg", 1), ("exp_avg_sq", 2), ("step", 0)):  # a square has twice the relative error
        one, other = ({name: value for name, value in run["optimizer"].items() if name.endswith(f".{kind}")}
                      for run in (alone, results[0]))  # fmt: skip
        assert one, kind
        assert distance(one, other) <= factor * tolerance, kind


def gradient(world: World, shares: tuple[int, ...], micro: int, update: int, dtype: torch.dtype) -> dict[str, Any]:
    run = Run(world, shares=shares, micro=micro, dtype=dtype)
    passes = ForwardPasses(run.model, token_loss, torch.enable_grad, torch.autograd.backward)
    sums = run.parallel.reduce(run.parallel.accumulate(passes, batches_of(run.order, dtype, update)))
    parameters = [weight for _, weight in run.named]
    local = run.parallel.gradients(parameters)
    norm = run.parallel.global_norm(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(local))))
    result = {name: weight.grad for name, weight in run.named if weight.grad is not None}
    return {"grads": listed(run.parallel.gather_full(result)), "norm": float(norm), "items": int(sums.items)}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["64", "32"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_random_splits_give_gradients_of_one_process(world_size: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(world_size)
    cuts = [np.diff(np.sort([0, *rng.choice(np.arange(1, 32), world_size - 1, replace=False), 32])) for _ in range(6)]
    splits = [(tuple(map(int, cut)), int(rng.integers(1, 12)), int(rng.integers(0, 2))) for cut in cuts]
    results = run_ranks(lambda world: [gradient(world, *split, dtype) for split in splits], world_size)
    for number, (shares, _, update) in enumerate(splits):
        alone = gradient(ALONE, shares, 32, update, torch.float64)
        tolerance = allowed(dtype, terms=alone["items"])
        assert distance(alone["grads"], results[0][number]["grads"]) <= tolerance
        for result in results:
            assert result[number]["items"] == alone["items"]
            assert abs(result[number]["norm"] / alone["norm"] - 1) <= tolerance


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [{"reshard_after_forward": False}, {"reshard_after_forward": True}, {"shards_gradients": True}],
    ids=str,
)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_resharding_parameters_does_not_change_the_updates(options: dict[str, Any], checkpointed: bool) -> None:
    def learn(world: World) -> dict[str, Any]:
        model = make_model(torch.float64, checkpointed=checkpointed)
        return train_run(world, shares=(19, 13), micro=5, model=model, strategy=partial(sharded, **options))

    assert distance_of_each(train_run(ALONE)["model"], run_ranks(learn, 2)[0]["model"]) < PROMISED[torch.float64]


# ---------------------------------------------------------------- dummy passes and unused parameters


@pytest.mark.slow
def test_dummy_passes_do_not_change_gradients_or_buffers() -> None:
    """This holds even if the loss of the dummy pass is infinite."""

    def learn(world: World) -> list[Any]:
        x, y = samples(torch.float64)
        run = Run(world)
        good = [MicroBatch((x[:20], y[:20]), False), MicroBatch((x[20:], y[20:]), True)]
        bad = [
            MicroBatch((x[:1] * float(what), y[:1]), last, ((1, "bad"),), is_counted=False)
            for what, last in (("inf", False), ("nan", True))
        ]
        steps = list(train_updates(run.training, iter(bad if world.rank else good), 1))
        return [float(steps[0].loss_sum), float(steps[0].items), steps[0].bad, run.saved()]  # type: ignore[arg-type]

    alone, first, second = learn(ALONE), *run_ranks(learn, 2)
    assert first[:2] == second[:2] == pytest.approx(alone[:2])
    assert second[2] == []
    assert distance_of_each(alone[3]["model"], first[3]["model"]) < PROMISED[torch.float64]


@pytest.mark.slow
def test_parameters_unused_on_all_ranks_do_not_decay() -> None:
    def find_unchanged(world: World) -> list[Any]:
        run = Run(world, shares=(19, 13), micro=8)
        before = run.parallel.gather_full(run.model.state_dict())
        run.advance(3)
        after = run.parallel.gather_full(run.model.state_dict())
        states = export_state(run.training.optimizer)[0]
        same = [name for name, tensor in after.items() if torch.equal(tensor, before[name])]
        return [same, [name for name in states if "unused" in name]]

    expected = [f"blocks.{number}.unused.{kind}" for number in range(3) for kind in ("weight", "bias")]
    assert find_unchanged(ALONE) == [expected, []]
    assert run_ranks(find_unchanged, 2) == [[expected, []], [[], []]]


class Choosing(nn.Module):
    """A model in which the sample determines the parameter that is used."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ParameterList([torch.full((3, 2), float(number)) for number in range(3)])
        self.gains = nn.ParameterList([torch.tensor(1.0 + number) for number in range(3)])

    def forward(self, x: Tensor, way: int) -> Tensor:
        return (x @ self.ways[way]).sum() * self.gains[way]


def test_ranks_may_use_different_parameters() -> None:
    def learn(world: World) -> list[Any]:
        torch.manual_seed(0)
        model = Choosing().double()
        parallel = sharded(world)
        model = parallel.wrap(model, list, [])  # type: ignore[assignment]
        named = dict(model.named_parameters())
        parallel.begin(list(named.values()))

        def loss(model: nn.Module, way: int) -> tuple[Tensor, int]:
            return model(torch.ones(1, 3).double(), way), 1

        passes = ForwardPasses(model, loss, torch.enable_grad, torch.autograd.backward)
        ways = [0, 1] if world.world_size == 1 else [world.rank]
        keys = [MicroBatch(way, number == len(ways) - 1) for number, way in enumerate(ways)]
        parallel.reduce(parallel.accumulate(passes, iter(keys)))
        return [listed(parallel.gather_full({n: w.grad for n, w in named.items() if w.grad is not None}))]

    alone, first = learn(ALONE), run_ranks(learn, 2)[0]
    assert sorted(alone[0]) == ["gains.0", "gains.1", "ways.0", "ways.1"]
    assert alone == first


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", [sharded, partial(sharded, communicate="bfloat16")], ids=["float32", "bfloat16"])
def test_successive_phases_can_train_different_parameters(strategy: Any) -> None:
    def walk(world: World) -> dict[str, Any]:
        run = Run(world, shares=(19, 13), micro=8, strategy=strategy, trains="blocks.1", dtype=torch.float32)
        initial = run.parallel.gather_full(run.model.state_dict())
        run.advance(2)
        first = run.parallel.gather_full(run.model.state_dict())
        run.parallel.end()
        for name, weight in run.model.named_parameters():
            weight.requires_grad_("head" in name or "gain" in name or "blocks.0" in name)
            weight.grad = None
        named = [(name, weight) for name, weight in run.model.named_parameters() if weight.requires_grad]
        parameters = [weight for _, weight in named]
        run.parallel.begin(parameters)
        object.__setattr__(run.training, "parameters", parameters)
        object.__setattr__(run.training, "optimizer", adamw(named, lr=0.01))
        run.advance(4)
        second = run.parallel.gather_full(run.model.state_dict())
        changed = [
            [name for name in before if not torch.equal(before[name], after[name])]
            for before, after in ((initial, first), (first, second))
        ]
        return {"changed": changed, "model": listed(second)}

    alone, result = walk(ALONE), run_ranks(walk, 2)[0]
    assert all(".1." in name for name in alone["changed"][0])
    assert result["changed"] == alone["changed"]
    # The first steps of AdamW depend only on signs: if a gradient is near zero, bfloat16 may change its sign.
    assert distance_of_each(alone["model"], result["model"]) <= (
        allowed(torch.float32, 32, growth=10) if strategy is sharded else 0.2
    )


# ---------------------------------------------------------------- dtypes


def test_an_overflow_on_one_rank_skips_the_update_on_all_ranks() -> None:
    y = samples(torch.float32)[1]
    first = next(iter(Order(NUM_SAMPLES, 32, 32, seed=3).micro_batches(0))).indices
    trigger = int(y[first[19:]].sum())  # identifies the batch of rank 1 in the first update

    def explosive(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        total, count = token_loss(model, batch)
        return total * (1e9 if int(batch[1].sum()) == trigger else 1.0), count

    results = run_ranks(
        lambda world: train_run(
            world, shares=(19, 13), micro=32, dtype=torch.float32, loss=explosive, precision=fp16, updates=4
        ),
        2,
    )
    assert [result["skipped"] for result in results] == [1, 1]
    assert [result["scale"] for result in results] == [32768.0, 32768.0]
    assert results[0]["norms"][1:] == results[1]["norms"][1:]
    assert np.isfinite(results[0]["norms"][1:]).all()


@pytest.mark.slow
def test_an_overflow_in_one_shard_skips_the_update_on_all_ranks() -> None:
    class Struck(Sharded):
        def reduce(self, sums: Any) -> Any:
            result = super().reduce(sums)
            if self.world.rank == 1:
                next(part for part in self.gradients(self._trained) if part.dim() == 2)[0, 0] = float("inf")
            return result

    def learn(world: World) -> list[Any]:
        flags = [float(Sharded(world).any_overflow(torch.tensor(float(world.rank == rank)))) for rank in range(3)]
        result = train_run(world, dtype=torch.float32, precision=fp16, strategy=Struck, shares=(16, 16), updates=3)
        return [flags, result["skipped"], result["scale"]]

    assert run_ranks(learn, 2) == [[[1.0, 1.0, 0.0], 3, 8192.0]] * 2


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", [bf16, fp16])
def test_half_precision_trains_like_one_process(precision: Any) -> None:
    alone = train_run(ALONE, dtype=torch.float32, precision=precision)
    results = run_ranks(
        lambda world: train_run(world, shares=(19, 13), micro=8, dtype=torch.float32, precision=precision), 2
    )
    assert distance(alone["losses"], results[0]["losses"]) <= torch.finfo(torch.bfloat16).eps


class GatheredDtypes(TorchDispatchMode):
    """Record the dtypes of the tensors that ranks gather in forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in str(func):
            self.dtypes |= {each.dtype for each in args[:2] if isinstance(each, Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize(("communicate", "precision"), [("bfloat16", bf16), ("bfloat16", fp32), ("float16", fp16)])
def test_parameters_can_be_communicated_in_half_precision(communicate: str, precision: Any) -> None:
    """Communicated weights have 8 bits (bfloat16) or 11 bits (float16); gradients and stored weights stay float32."""
    alone = train_run(ALONE, dtype=torch.float32)

    def learn(world: World) -> dict[str, Any]:
        strategy = partial(sharded, communicate=communicate)
        with GatheredDtypes() as gathered:
            result = train_run(
                world, shares=(19, 13), micro=8, dtype=torch.float32, precision=precision, strategy=strategy
            )
        assert gathered.dtypes == {getattr(torch, communicate)}
        run = Run(world, dtype=torch.float32, strategy=strategy)
        assert {weight.dtype for weight in run.model.parameters()} == {torch.float32}
        assert run.model(samples(torch.float32)[0][:2]).dtype == torch.float32
        return result

    results = run_ranks(learn, 2)
    tolerance = 0.02 if communicate == "bfloat16" else 0.005
    for result in results:
        assert distance(alone["losses"], result["losses"]) < tolerance
        assert distance(alone["norms"], result["norms"]) < 0.05


# ---------------------------------------------------------------- checkpoints


OPTIMIZERS = {
    "fused": partial(adamw, kernel="fused"),
    "foreach": partial(adamw, kernel="foreach"),
    "for-loop": partial(adamw, kernel="for-loop"),
    "momentum": partial(sgd, momentum=0.9, kernel="foreach"),  # torch has no fused SGD for sharded parameters
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_runs_resume_on_another_number_of_ranks(name: str) -> None:
    """The run has two ranks, then one, then two: checkpoints do not depend on the number of ranks."""
    options: dict[str, Any] = {"optimizer": OPTIMIZERS[name]}

    def start(world: World) -> dict[str, Any]:
        run = Run(world, shares=(19, 13), micro=8, **options)
        run.advance(1)
        return run.saved()

    def reduce(saved: dict[str, Any], until: int, world: World) -> dict[str, Any]:
        run = Run(world, shares=(30, 2) if world.world_size > 1 else (32,), micro=32, **options)
        run.restore(saved)
        again = run.saved()
        for file in ("model", "optimizer"):
            assert again[file] == (saved[file] if world.is_first else {})
        run.advance(until)
        return run.saved()

    uninterrupted = Run(ALONE, **options)
    uninterrupted.advance(3)
    expected = uninterrupted.saved()
    on_one = reduce(run_ranks(start, 2)[0], 2, ALONE)
    result = run_ranks(partial(reduce, on_one, 3), 2)[0]
    assert result["optimizer"].keys() == expected["optimizer"].keys()
    assert distance_of_each(expected["model"], result["model"]) < PROMISED[torch.float64]
    assert distance_of_each(expected["optimizer"], result["optimizer"]) < PROMISED[torch.float64]
    assert result["numbers"] == expected["numbers"]


@pytest.mark.slow
def test_ranks_hold_their_shards_of_the_weights_of_rank_0() -> None:
    def held(world: World) -> list[Any]:
        torch.manual_seed(world.rank)
        model = Model()
        run = Run(world, model=model, dtype=torch.float32)
        local = sum(weight.to_local().numel() for weight in run.model.parameters() if isinstance(weight, DTensor))
        return [local, listed(run.parallel.gather_full(run.model.state_dict()))]

    torch.manual_seed(0)
    model = Model()
    results = run_ranks(held, 3)
    assert results[0][1] == listed(model.state_dict())
    total = sum(weight.numel() for weight in model.parameters())
    assert max(result[0] for result in results) < 0.45 * total
    assert sum(result[0] for result in results) == total + 2 * 4  # four 0-dimensional parameters, which are replicated


# ---------------------------------------------------------------- between updates


@pytest.mark.slow
def test_a_model_without_blocks_is_reported() -> None:
    """Each rank of such a model holds all parameters at once in the forward and backward pass."""

    def describe(world: World, num_blocks: int) -> list[str]:
        model, parallel = Model(), Sharded(world)
        parallel.wrap(model, list, list(model.blocks)[:num_blocks])
        return parallel.describe_placement()

    assert run_ranks(lambda world: [describe(world, 0) != [], describe(world, 3)], 2) == [[True, []]] * 2


def test_evaluations_between_updates_keep_parameters_sharded() -> None:
    def walk(world: World) -> list[Any]:
        run = Run(world, shares=(19, 13), micro=8)
        x, _ = samples(torch.float64)
        run.advance(1)
        with torch.no_grad():
            run.model(x)
        kinds = {type(weight) for weight in run.model.parameters()}
        run.advance(2)
        run.restore(saved) if saved else None
        with torch.no_grad():
            output = run.model(x[:2]).tolist()
        return [len(kinds), isinstance(next(run.model.parameters()), DTensor), output, run.saved()["model"]]

    saved: dict[str, Any] = {}
    alone = walk(ALONE)
    result = run_ranks(walk, 2)[0]
    assert result[:2] == [1, True]
    assert distance(alone[2], result[2]) < PROMISED[torch.float64]
    run = Run(ALONE)
    run.advance(5)
    saved = run.saved()
    loaded = run_ranks(walk, 2)[1]
    # stale gathered copies would give other outputs
    assert distance(run.model(samples(torch.float64)[0][:2]).tolist(), loaded[2]) < PROMISED[torch.float64]


@pytest.mark.slow
def test_ranks_with_gathered_weights_run_independently() -> None:
    def walk(world: World) -> list[Any]:
        run = Run(world, shares=(19, 13), micro=8)
        assert isinstance(run.parallel, Sharded) or world.world_size == 1
        x, _ = samples(torch.float64)
        run.advance(2)
        outputs: list[Any] = []
        with (
            run.parallel.gather_parameters(run.model) if isinstance(run.parallel, Sharded) else torch.no_grad(),
            torch.no_grad(),
        ):
            for _ in range(1 + world.rank):  # no collective in this block, so ranks may diverge
                outputs.append(run.model(x[:2]).tolist())
            outputs.append(run.model.head(run.model.embed(x[:2]) * run.model.scale).tolist())  # type: ignore[operator]
        assert world.world_size == 1 or {type(weight) for weight in run.model.parameters()} == {DTensor}
        run.advance(4)
        return [outputs[0], outputs[-1], run.saved()["model"]]

    alone = walk(ALONE)
    first, second = run_ranks(walk, 2)
    assert distance_of_each(alone[2], first[2]) < PROMISED[torch.float64]
    for result in (first, second):
        assert distance(alone[:2], result[:2]) < PROMISED[torch.float64]


@pytest.mark.slow
def test_blocks_can_return_views_modified_in_place() -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (2, 2))) for _ in "ab"])
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                x += 1.0
                x = x.flatten(1, 2)
            logits: Tensor = self.head(x)
            return logits

    def learn(world: World) -> Any:
        torch.manual_seed(0)
        return train_run(world, shares=(19, 13), micro=8, model=Viewing().double())["model"]

    assert distance_of_each(learn(ALONE), run_ranks(learn, 2)[0]) < PROMISED[torch.float64]


@pytest.mark.parametrize("num_keys", [0, 1, 2, 5, 6])
def test_ranks_evaluate_equally_often_and_count_batches_once(num_keys: int) -> None:
    keys = [MicroBatchKey(0, [number], last=number == num_keys - 1) for number in range(num_keys)]
    dealt = [Sharded(World(CPU, rank, rank, 3, 3)).evaluation_batches(keys) for rank in range(3)]
    assert {len(mine) for mine in dealt} == {-(-num_keys // 3)}
    assert sorted(key.indices[0] for mine in dealt for key in mine if key.is_counted) == list(range(num_keys))


def test_statistics_and_buffers_are_merged_over_ranks() -> None:
    def gathered(world: World) -> list[Any]:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        parallel = Sharded(world)
        model = parallel.wrap(model, list, [])  # type: ignore[assignment]
        with parallel.buffer_update():
            model.get_buffer("1.running_mean").fill_(float(world.rank))
        state = {"text": torch.tensor([1.0 + world.rank])}
        merged = parallel.merge_state(lambda one, other: {"text": torch.cat([one["text"], other["text"]])}, state)
        return [model.get_buffer("1.running_mean").tolist(), merged["text"].tolist()]

    assert run_ranks(gathered, 3) == [[[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]]] * 3


@pytest.mark.slow
def test_synchronized_norms_train_like_one_process() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(TOKENS), nn.Tanh()) for _ in range(2)]
            )
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            logits: Tensor = self.head(x)
            return logits

    def learn(world: World, shares: Sequence[int], micro: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = synchronize_batch_norms(Normed().double(), world)
        result = train_run(world, shares=tuple(shares), micro=micro, model=model)
        return {"losses": result["losses"], "model": result["model"]}

    # Every update is one pass per rank. With shares (1, 31), rank 0 runs a dummy pass in updates of 13 samples.
    alone = learn(ALONE, (32,), 32)
    assert distance_of_each(alone, run_ranks(lambda world: learn(world, (19, 13), 19), 2)[0]) < PROMISED[torch.float64]
    assert distance_of_each(alone, run_ranks(lambda world: learn(world, (1, 31), 31), 2)[0]) < PROMISED[torch.float64]


# ---------------------------------------------------------------- refusals


def refusal(function: Callable[[World], Any], world: World) -> str:
    try:
        function(world)
    except (ConfigError, TaskFault) as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_all_obstacles_to_sharding_are_reported_together() -> None:
    def wrap(world: World) -> None:
        model = Model().to(torch.float32)
        model.blocks[1].inner.weight = model.head.weight  # type: ignore[assignment, union-attr]
        model.blocks[2].double()
        model.blocks[2].inner.float()  # type: ignore[operator, union-attr]
        model.embed.weight.data = model.embed.weight.data.t().contiguous().t()
        model.add_module("norm", nn.BatchNorm1d(3))
        Sharded(world, communicate="bfloat16").wrap(model, list, list(model.blocks))

    for messages in run_ranks(partial(refusal, wrap), 2):
        assert messages.startswith("ConfigError")
        for result in (
            "row-major",
            "embed.weight",
            "blocks.2 have float32 and float64",
            "blocks.1.inner.weight is in",
            "is bfloat16",
        ):
            assert result in messages


def test_a_loss_that_bypasses_the_model_is_rejected() -> None:
    def learn(world: World) -> None:
        train_run(world, shares=(16, 16), loss=lambda model, batch: (model.head(model.embed(batch[0])).sum(), 1))

    for messages in run_ranks(partial(refusal, learn), 2):
        assert "outside of model(...)" in messages


@pytest.mark.slow
def test_gradients_are_exchanged_per_update_or_micro_batch() -> None:
    def count_exchanges(world: World) -> list[int]:
        result = []
        for micro, options in ((16, {}), (4, {}), (4, {"shards_gradients": True})):
            run = Run(world, shares=(16, 16), micro=micro, strategy=partial(sharded, **options))
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                run.advance(1)
            result.append(sum(event.count for event in seen.key_averages() if "reduce_scatter" in event.key))
        return result

    for once, accumulated, each in run_ranks(count_exchanges, 2):
        assert once == accumulated > 0
        assert each == 4 * once


@pytest.mark.slow
def test_tensors_are_loaded_even_if_others_are_missing() -> None:
    def load_all(world: World) -> list[Any]:
        result = []
        for missing in ("temperature", "embed.weight", "head.bias"):
            run, other = Run(world), Model().double()
            before = dict(make_model(torch.float64).state_dict())
            given = {name: tensor for name, tensor in other.state_dict().items() if name != missing}
            run.parallel.load(run.model, given)
            after = {
                name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                for name, tensor in run.model.state_dict().items()
            }
            result.append([name for name in after if not torch.equal(after[name], ({**before, **given})[name])])
        return result

    torch.manual_seed(4)
    assert run_ranks(load_all, 2) == [[[], [], []]] * 2
