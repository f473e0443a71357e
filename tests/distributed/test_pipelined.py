"""A pipeline computes the same as the unsplit model, whatever the split and the schedule."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runner.tasks.gpt.model import Shape, Transformer
from torch import Tensor, nn

from runner.axes.optimizer import adamw
from runner.axes.precision import Precision, bf16, fp16, fp32
from runner.axes.scheduler import constant
from runner.base import noise
from runner.base.batch import BatchSamples, MicroBatch
from runner.base.errors import ConfigError, RankLost, TaskFault
from runner.base.order import MicroBatchKey
from runner.base.stopwatch import Lap
from runner.distributed import layer_placement
from runner.distributed.parallel import ForwardPasses, Parallel
from runner.distributed.pipelined import KEPT_STEPS, PLACEHOLDER, Pipelined
from runner.distributed.world import World
from runner.engine.update.loop import Position, StepInfo, Training, train_updates
from runner.tensors.optimizer_state import export_state
from tests.distributed.ranks import CPU, run_ranks
from tests.rounding import ADAPTIVE, PROMISED, allowed, distance

ALONE = World(CPU)
WIDTH, CLASSES, TOKENS = 6, 5, 3
GIB = 2**30


class Clock:
    """A clock that advances by a millisecond each time it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


# ---------------------------------------------------------------- models


def plain(num_layers: int, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(num_layers)
    layers: list[nn.Module] = []
    for number in range(num_layers - 1):
        linear = nn.Linear(WIDTH, WIDTH)
        # works in place on the output of the previous layer, which is a leaf of the autograd graph if it starts a stage
        layers.append(linear if number % 2 or not number else nn.Sequential(nn.ELU(inplace=True), linear))
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).to(dtype)


class Tied(nn.Module):
    """A model from tokens to logits whose first and last layer share the embedding."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x).tanh()
        return F.linear(x, self.embedding.weight)

    def layers(self) -> list[nn.Module]:
        return [self.embedding, *(nn.Sequential(block, nn.Tanh()) for block in self.blocks), Head(self.embedding)]


class Head(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding.weight)


class Pair(nn.Module):
    """A layer from (x, y) to (x, y); the first layer takes x and a keyword argument instead."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.linear = first, nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any, *, shift: float = 0.0) -> tuple[Tensor, Tensor]:
        x, y = (given, given + shift) if self.first else given
        return self.linear(y).tanh(), x.transpose(0, 1).transpose(0, 1) + y


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair(number == 0) for number in range(4))
        self.end = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, *, shift: float) -> dict[str, Any]:
        x, y = self.pairs[0](x, shift=shift)
        for pair in self.pairs[1:]:
            x, y = pair((x, y))
        return {"logits": [self.end(x + y)], "name": "pairs"}

    def layers(self) -> list[nn.Module]:
        return [*self.pairs, End(self.end)]


class End(nn.Module):
    def __init__(self, end: nn.Linear) -> None:
        super().__init__()
        self.end = end

    def forward(self, pair: tuple[Tensor, Tensor]) -> dict[str, Any]:
        return {"logits": [self.end(pair[0] + pair[1])], "name": "pairs"}


def layers_of(model: Any) -> list[nn.Module]:
    return list(model) if isinstance(model, nn.Sequential) else model.layers()


# ---------------------------------------------------------------- batches and losses


def batches(sizes: Sequence[int], dtype: torch.dtype, *, seed: int = 1, tokens: bool = False) -> list[MicroBatch]:
    """Return the micro-batches of one update, with the given numbers of samples."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, size in enumerate(sizes):
        x = torch.randn(size, TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        if tokens:
            x = torch.randint(0, CLASSES, (size, TOKENS), generator=generator)
        y = torch.randint(-1, CLASSES, (size, TOKENS), generator=generator)
        made.append(MicroBatch({"x": x, "y": y}, number == len(sizes) - 1, ((number, "bad"),)))
    return made


def token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model(batch["x"])
    return F.cross_entropy(logits.transpose(1, 2), batch["y"], reduction="sum", ignore_index=-1), (
        batch["y"] >= 0
    ).sum()


def pairs_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    made = model(batch["x"], shift=0.5)
    assert made["name"] == "pairs"
    return made["logits"][0].square().sum(), len(batch["x"])


def noisy_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """The loss is zero if the model and the loss see the same noise."""
    noise = torch.randn_like(batch["x"])
    return (model(noise) - noise).square().sum(), len(noise)


# ---------------------------------------------------------------- running


def passes_of(model: nn.Module, loss: Any) -> ForwardPasses:
    precision = fp32(ALONE, model)
    return ForwardPasses(model, loss, precision.forward, precision.backward, precision.scale_loss)


def one_update(
    world: World,
    make: Callable[[], Any],
    micros: Callable[[], list[MicroBatch]],
    loss: Any = token_loss,
    **options: Any,
) -> dict[str, Any]:
    """Return the sums, the gradients by name and their norm after one update."""
    model = make()
    parallel = Parallel(world) if world.world_size == 1 else Pipelined(world, **options)
    wrapped = parallel.wrap(model, lambda: layers_of(model), [])
    own = parallel.owned_parameters({name: weight for name, weight in model.named_parameters() if weight.requires_grad})
    parallel.begin(list(own.values()))
    sums = parallel.reduce(parallel.accumulate(passes_of(wrapped, loss), iter(micros())))
    gradients = parallel.gradients(list(own.values()))
    norm = parallel.global_norm(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
    result = {name: weight.grad for name, weight in own.items() if weight.grad is not None}
    return {
        "loss": float(sums.loss_sum),
        "items": float(sums.items),
        "bad": [list(one) for one in sums.bad],
        "gradients": {name: grad.flatten().tolist() for name, grad in result.items()},
        "norm": float(norm),
        "split": list(parallel.placement.split.sizes) if isinstance(parallel, Pipelined) else [],
    }


def assert_same_update(alone: dict[str, Any], ranks: list[dict[str, Any]], tolerance: float) -> None:
    union: dict[str, Any] = {}
    for result in ranks:
        assert result["items"] == alone["items"]
        for key in ("loss", "norm"):
            assert result[key] == pytest.approx(alone[key], rel=tolerance), key
        assert result["bad"] == (alone["bad"] if result is ranks[0] else [])  # only rank 0 reports bad samples
        union |= {name: grad for name, grad in result["gradients"].items() if name != PLACEHOLDER}
    assert union.keys() == alone["gradients"].keys()  # no layer is missing
    for result in ranks:
        own = {name: grad for name, grad in result["gradients"].items() if name != PLACEHOLDER}
        assert distance(alone["gradients"], alone["gradients"] | own) <= tolerance


def random_cases(count: int) -> list[dict[str, Any]]:
    """Return random but reproducible splits, schedules and micro-batches."""
    draw = random.Random(7)
    cases = []
    for number in range(count):
        world_size = draw.choice([2, 2, 3])
        schedule = ["1f1b", "gpipe"][number % 2]
        num_layers = draw.randint(world_size, world_size + 6)
        cuts = sorted(draw.sample(range(1, num_layers), world_size - 1))
        split = [stop - start for start, stop in zip([0, *cuts], [*cuts, num_layers], strict=True)]
        sizes = [draw.randint(1, 4)] * draw.randint(1, 7)
        if draw.random() < 0.6 and sizes[-1] > 1:
            sizes[-1] -= 1  # smaller than the others
        cases.append(
            {
                "world_size": world_size,
                "num_layers": num_layers,
                "sizes": sizes,
                "options": {"schedule": schedule, "split": draw.choice([split, split, None])},
            }
        )
    return cases


def name_of(case: dict[str, Any]) -> str:
    options = case["options"]
    return f"{options['schedule']}-{case['world_size']}-{options['split']}-{case['num_layers']}-{case['sizes']}"


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", random_cases(24), ids=name_of)
def test_splitting_a_model_changes_neither_loss_nor_gradients(case: dict[str, Any]) -> None:
    def update(world: World) -> list[dict[str, Any]]:
        made = []
        for dtype in (torch.float64, torch.float32):
            torch.manual_seed(0)
            model = plain(case["num_layers"], dtype)
            made.append(one_update(world, lambda model=model: model, micros(dtype), **case["options"]))
        return made

    def micros(dtype: torch.dtype) -> Callable[[], list[MicroBatch]]:
        return lambda: batches(case["sizes"], dtype)

    ranks = run_ranks(update, case["world_size"])
    alone = update(ALONE)[0]
    for number, dtype in enumerate((torch.float64, torch.float32)):
        terms = alone["items"] + case["num_layers"] * WIDTH  # terms of the layers and of the sum
        assert_same_update(alone, [of_rank[number] for of_rank in ranks], allowed(dtype, terms))
        if case["options"]["split"]:
            assert ranks[0][number]["split"] == case["options"]["split"]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"schedule": "gpipe"}], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_tied_weights_have_the_gradient_of_both_stages(options: dict[str, Any], world_size: int) -> None:
    def update(world: World) -> dict[str, Any]:
        micros = lambda: batches([2, 2, 1], torch.float64, tokens=True)  # noqa: E731
        torch.manual_seed(0)
        return one_update(world, lambda: Tied(5).double(), micros, **options)

    ranks = run_ranks(update, world_size)
    alone = update(ALONE)
    assert_same_update(alone, ranks, PROMISED[torch.float64])
    holders = [result["gradients"]["embedding.weight"] for result in (ranks[0], ranks[-1])]
    assert holders[0] == holders[1]  # bitwise equal, otherwise the copies would diverge


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_layers_pass_tuples_and_models_return_any_structure(schedule: str) -> None:
    def update(world: World) -> dict[str, Any]:
        torch.manual_seed(0)
        return one_update(
            world, lambda: Pairs().double(), lambda: batches([3, 3, 2], torch.float64), pairs_loss, schedule=schedule
        )

    assert_same_update(update(ALONE), run_ranks(update, 2), PROMISED[torch.float64])


def test_varying_micro_batch_shapes_give_results_of_one_process() -> None:
    sizes = [1, 1, *range(2, KEPT_STEPS + 4), 1, 2]

    def updates(world: World) -> list[float]:
        made = training(world, lambda: plain(4, torch.float64), schedule="1f1b")
        return run_updates(made, sizes, torch.float64, 2)["norms"]

    np.testing.assert_allclose(run_ranks(updates, 2)[1], updates(ALONE), rtol=2 * PROMISED[torch.float64])


@pytest.mark.slow
def test_first_and_last_stage_draw_the_same_numbers() -> None:
    def update(world: World) -> float:
        torch.manual_seed(100 + world.rank)
        model = nn.Sequential(nn.Identity(), nn.Linear(WIDTH, WIDTH, bias=False), nn.Identity())
        nn.init.eye_(model[1].weight)
        return one_update(world, lambda: model, lambda: batches([2, 2, 2], torch.float32), noisy_loss)["loss"]

    assert run_ranks(update, 3) == [0.0, 0.0, 0.0]


@pytest.mark.slow
def test_a_pipeline_uses_the_random_generator_of_rank_0() -> None:
    def update(world: World) -> list[float]:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, CLASSES), nn.Dropout(0.5))
        parallel = Pipelined(world)
        parallel.wrap(model, lambda: list(model), [])
        parallel.begin([])
        losses = []
        for number in (5, 5, 6):
            torch.manual_seed(number if world.is_first else world.rank)
            sums = parallel.accumulate(passes_of(model, token_loss), iter(batches([2, 2], torch.float32)))
            losses.append(float(parallel.reduce(sums).loss_sum))
        return losses

    one, again, other = run_ranks(update, 2)[0]
    assert one == again != other


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("frozen", [(0, 1, 2, 3), (3, 4, 5), (1, 4)], ids=str)
def test_frozen_layers_do_not_change_the_updates(frozen: tuple[int, ...]) -> None:
    def make() -> nn.Sequential:
        model = plain(6, torch.float64)
        for number in frozen:
            model[number].requires_grad_(False)
        return model

    def update(world: World) -> dict[str, Any]:
        options = {} if world.world_size == 1 else {"split": [3, 3]}
        return one_update(world, make, lambda: batches([2, 2, 1], torch.float64), **options)

    assert_same_update(update(ALONE), run_ranks(update, 2), PROMISED[torch.float64])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_unused_parameters_do_not_change_the_gradient_norm(dtype: torch.dtype) -> None:
    stored = torch.float32 if dtype == torch.float16 else dtype

    def make() -> nn.Sequential:
        model = plain(2, stored)
        model[0].requires_grad_(False)
        model[0].register_parameter("unused", nn.Parameter(torch.ones(1, dtype=stored)))
        return model

    def precision(world: World, model: nn.Module) -> Precision:
        return fp16(world, model, init_scale=256.0) if dtype == torch.float16 else fp32(world, model)

    def run(world: World) -> dict[str, Any]:
        options = {} if world.world_size == 1 else {"split": [1, 1]}
        return run_updates(training(world, make, precision=precision, **options), [2, 2], stored, updates=3)

    assert_same_run(run(ALONE), run_ranks(run, 2)[0], PROMISED[stored])


class Centered(nn.Module):
    """A layer that subtracts a moving average of its inputs, which is a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.5)
        return x - self.mean.clone()


@pytest.mark.slow
def test_layers_can_work_in_place_and_keep_statistics() -> None:
    def update(world: World) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(inplace=True),
            nn.BatchNorm1d(TOKENS),
            Centered(),
            nn.Linear(WIDTH, CLASSES),
        ).double()
        result = one_update(world, lambda: model, lambda: batches([3, 3, 2], torch.float64), split=[2, 4])
        mean, tracked, center = model[3].running_mean, model[3].num_batches_tracked, model[4].mean
        return result, None if mean.is_meta else [mean.tolist(), int(tracked), center.tolist()]

    (one, nothing), (two, statistics) = run_ranks(update, 2)
    alone, expected = update(ALONE)
    assert_same_update(alone, [one, two], PROMISED[torch.float64])
    assert nothing is None
    assert statistics[1] == expected[1] == 3
    np.testing.assert_allclose(statistics[0], expected[0], rtol=PROMISED[torch.float64])
    assert distance(statistics[2], expected[2]) <= PROMISED[torch.float64]


class Shifted(nn.Module):
    """A layer that subtracts a constant and a running mean of its inputs."""

    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.learns = learns
        self.register_buffer("shift", torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.learns and torch.is_grad_enabled():
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean((0, 1))
        shifted: Tensor = x - self.shift - self.mean
        return shifted


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(("split", "is_apart"), [([2, 3], True), ([4, 1], False)])
def test_a_module_on_two_ranks_must_have_equal_buffers(learns: bool, split: list[int], is_apart: bool) -> None:
    """A checkpoint contains the buffers of only one rank, with which both ranks would resume."""

    def check(world: World) -> bool:
        torch.manual_seed(0)
        shared = Shifted(learns)
        model = nn.Sequential(shared, nn.Linear(WIDTH, WIDTH), nn.Tanh(), shared, nn.Linear(WIDTH, CLASSES))
        parallel = Pipelined(world, split=split)
        wrapped = parallel.wrap(model, lambda: list(model), [])
        parallel.begin(list(parallel.owned_parameters(dict(model.named_parameters())).values()))
        parallel.reduce(parallel.accumulate(passes_of(wrapped, token_loss), iter(batches([3, 2], torch.float32))))
        try:
            parallel.check_buffers()
        except TaskFault:
            return True
        return False

    assert run_ranks(check, 2) == [learns and is_apart] * 2


# ---------------------------------------------------------------- the training loop


def stream(sizes: Sequence[int], dtype: torch.dtype) -> Iterator[MicroBatch]:
    seed = 0
    while True:
        yield from batches(sizes, dtype, seed=seed)
        seed += 1


def training(
    world: World, make: Callable[[], Any], *, precision: Any = fp32, loss: Any = token_loss, **options: Any
) -> Training:
    model = make()
    parallel = Parallel(world) if world.world_size == 1 else Pipelined(world, **options)
    wrapped = parallel.wrap(model, lambda: layers_of(model), [])
    own = parallel.owned_parameters({name: weight for name, weight in model.named_parameters() if weight.requires_grad})
    parallel.begin(list(own.values()))
    return Training(
        position=Position("train"),
        model=wrapped,
        loss=loss,
        parameters=list(own.values()),
        optimizer=adamw(list(own.items()), lr=0.01),
        schedule=constant(100),
        precision=precision(world, model),
        parallel=parallel,
        per_item=1 / 30,
        max_grad_norm=0.1,
    )


def run_updates(run: Training, sizes: Sequence[int], dtype: torch.dtype, updates: int = 6) -> dict[str, Any]:
    steps: list[StepInfo] = list(train_updates(run, stream(sizes, dtype), updates))
    weights = run.parallel.gather_full(run.model.state_dict())
    states = run.parallel.gather_full(export_state(run.optimizer)[0])
    return {
        "losses": [float(step.loss_sum) / float(step.items) for step in steps if step.loss_sum is not None],
        "norms": [float(step.grad_norm) for step in steps if step.grad_norm is not None],
        "weights": {name: tensor.flatten().tolist() for name, tensor in weights.items()},
        "states": {name: tensor.flatten().tolist() for name, tensor in states.items()},
        "skipped": run.precision.num_skipped(),
        "scale": run.precision.values().get("precision/loss_scale"),
    }


def assert_same_run(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> None:
    for key in ("losses", "norms"):
        np.testing.assert_allclose(other[key], one[key], rtol=tolerance)
    assert list(other["weights"]) == list(one["weights"])  # names and order as in a single process
    assert sorted(other["states"]) == sorted(one["states"])
    for key in ("weights", "states"):
        for name in one[key]:
            np.testing.assert_allclose(other[key][name], one[key][name], rtol=tolerance, atol=tolerance)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("schedule", "world_size"), [("1f1b", 3), ("gpipe", 2)])
def test_clipped_updates_equal_those_of_one_process(schedule: str, world_size: int) -> None:
    def run(world: World) -> dict[str, Any]:
        made = training(world, lambda: plain(7, torch.float64), schedule=schedule)
        return run_updates(made, [3, 3, 3, 1], torch.float64)

    ranks = run_ranks(run, world_size)
    alone = run(ALONE)
    assert min(alone["norms"]) > 0.1  # gradients are clipped
    assert_same_run(alone, ranks[0], ADAPTIVE)
    for result in ranks[1:]:
        assert result["norms"] == ranks[0]["norms"]
        assert result["weights"] == result["states"] == {}  # rank 0 gathers everything


@pytest.mark.slow
def test_half_precision_gives_the_results_of_one_process() -> None:
    def run(world: World) -> dict[str, Any]:
        made = training(world, lambda: plain(6, torch.float32), precision=bf16)
        return run_updates(made, [4, 4], torch.float32, 3)

    ranks = run_ranks(run, 2)
    np.testing.assert_allclose(ranks[1]["losses"], run(ALONE)["losses"], rtol=PROMISED[torch.float32])


@pytest.mark.slow
def test_an_overflow_on_one_stage_skips_the_update_everywhere() -> None:
    class Large(nn.Module):
        """Scales the gradient of the preceding layers once, in a micro-batch of the third update."""

        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                self.count = getattr(self, "count", 0) + 1
                if self.count == 5:
                    x.register_hook(lambda grad: grad * 1e30)
            return x

    def run(world: World) -> dict[str, Any]:
        def make() -> nn.Sequential:
            model = plain(5, torch.float32)
            return nn.Sequential(*model[:3], Large(), *model[3:])

        made = training(world, make, precision=lambda world, model: fp16(world, model, init_scale=256.0), split=[4, 2])
        return run_updates(made, [3, 3], torch.float32, 5)

    one, two = run_ranks(run, 2)
    alone = run(ALONE)
    assert one["skipped"] == two["skipped"] == alone["skipped"] == 1
    assert one["scale"] == two["scale"] == alone["scale"] == 128.0
    np.testing.assert_allclose(one["losses"], alone["losses"], rtol=torch.finfo(torch.float16).eps)


@pytest.mark.slow
def test_a_stage_without_parameters_takes_part_in_everything() -> None:
    def run(world: World) -> dict[str, Any]:
        made = training(
            world,
            lambda: nn.Sequential(*plain(3, torch.float32), nn.Tanh()),
            precision=lambda world, model: fp16(world, model, init_scale=256.0),
            split=[3, 1],
        )
        return run_updates(made, [3, 2], torch.float32, 3) | {"own": len(made.parameters)}

    one, two = run_ranks(run, 2)
    assert two["own"] == 1
    assert not any(name.startswith(PLACEHOLDER) for name in one["states"])
    np.testing.assert_allclose(one["losses"], run(ALONE)["losses"], rtol=torch.finfo(torch.float16).eps)


@pytest.mark.slow
def test_checkpoints_can_be_loaded_by_any_number_of_ranks() -> None:
    saved: dict[str, Tensor] = {}

    def save(world: World) -> dict[str, Any]:
        made = training(world, lambda: Tied(4).double(), loss=tokens_loss)
        list(train_updates(made, token_stream(), 2))
        return {name: tensor.tolist() for name, tensor in made.parallel.gather_full(made.model.state_dict()).items()}

    def reduce(world: World) -> list[float]:
        made = training(world, lambda: Tied(4).double(), loss=tokens_loss)
        made.parallel.load(made.model, saved)
        return [float(step.grad_norm) for step in train_updates(made, token_stream(), 3) if step.grad_norm is not None]

    saved |= {name: torch.tensor(value, dtype=torch.float64) for name, value in run_ranks(save, 3)[0].items()}
    assert list(saved) == list(Tied(4).state_dict())
    on_three, on_two = run_ranks(reduce, 3)[0], run_ranks(reduce, 2)[1]
    alone = reduce(ALONE)
    np.testing.assert_allclose(on_three, alone, rtol=PROMISED[torch.float64])
    np.testing.assert_allclose(on_two, alone, rtol=PROMISED[torch.float64])


def tokens_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return token_loss(model, batch)


def token_stream() -> Iterator[MicroBatch]:
    seed = 0
    while True:
        yield from batches([2, 2, 1], torch.float64, seed=seed, tokens=True)
        seed += 1


# ---------------------------------------------------------------- evaluation


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_evaluation_on_every_rank_equals_that_of_one_process(schedule: str) -> None:
    def run(world: World) -> list[Any]:
        torch.manual_seed(0)
        model = Pairs().double()
        parallel = Parallel(world) if world.world_size == 1 else Pipelined(world, schedule=schedule)
        wrapped = parallel.wrap(model, model.layers, []).eval()
        with torch.no_grad():
            values = [float(pairs_loss(wrapped, batch.batch)[0]) for batch in batches([3, 2], torch.float64)]
        keys = [MicroBatchKey(0, [0, 1], False), MicroBatchKey(0, [2], True)]
        mine = parallel.evaluation_batches(keys)
        return [values, [key.is_counted for key in mine], len(mine)]

    alone = run(ALONE)
    for rank, result in enumerate(run_ranks(run, 2)):
        assert result == [alone[0], [rank == 0] * 2, 2]


@pytest.mark.slow
def test_evaluation_between_updates_does_not_change_them() -> None:
    def run(world: World, evaluates: bool) -> list[float]:
        made = training(world, lambda: plain(5, torch.float64))
        norms = []
        for step in train_updates(made, stream([3, 3], torch.float64), 3):
            norms.append(float(step.grad_norm))  # type: ignore[arg-type]
            if evaluates:
                with torch.no_grad():
                    token_loss(made.model, batches([4], torch.float64)[0].batch)
        return norms

    assert run_ranks(lambda world: run(world, True), 2) == run_ranks(lambda world: run(world, False), 2)


def test_data_statistics_come_from_rank_0() -> None:
    def merge(world: World) -> list[float]:
        parallel = Pipelined(world)
        state = {"sum": torch.tensor([3.0 - world.rank])}
        return parallel.merge_state(lambda one, other: one, state)["sum"].tolist()

    assert run_ranks(merge, 2) == [[3.0], [3.0]]


# ---------------------------------------------------------------- errors


def refuse(world: World, function: Callable[[Pipelined], Any], **options: Any) -> str:
    """Return the type, exit code and text of the error that `function` raises."""
    try:
        function(Pipelined(world, **options))
    except (ConfigError, TaskFault, RankLost) as error:
        return f"{type(error).__name__} {int(error.exit_code)}: {error}"
    return "no error"


def wrapping(model: Any) -> Callable[[Pipelined], Any]:
    return lambda parallel: parallel.wrap(model, lambda: layers_of(model), [])


@pytest.mark.slow
def test_fewer_layers_than_stages_are_rejected() -> None:
    for result in run_ranks(lambda world: refuse(world, wrapping(plain(2, torch.float32))), 3):
        assert "ConfigError 78" in result
        assert "stages (3)" in result
        assert "has 2" in result


@pytest.mark.slow
def test_splits_must_fit_the_model_and_the_memory() -> None:
    model = plain(5, torch.float32)
    for options, text in (
        ({"split": [2, 2]}, "add up to the model's 5 layers, but is [2,2]"),
        ({"split": [1, 1, 3]}, "one size for each of the 2 stages, but has 3"),
    ):
        for result in run_ranks(lambda world, options=options: refuse(world, wrapping(model), **options), 2):
            assert "ConfigError 78" in result, result
            assert text in result, result

    def split_with_little_memory(world: World) -> str:
        # the two ranks share the memory of the host
        layer_placement.device_bytes = lambda _: 2 * [2000, 1000][world.rank]
        return refuse(world, wrapping(model))

    for result in run_ranks(split_with_little_memory, 2):
        assert "ConfigError 78" in result, result
        assert "the devices have" in result, result


@pytest.mark.slow
def test_layers_that_omit_parameters_are_rejected() -> None:
    model = plain(5, torch.float32)
    lost = lambda parallel: parallel.wrap(model, lambda: list(model)[:4], [])  # noqa: E731
    for result in run_ranks(lambda world: refuse(world, lost), 2):
        assert "lacks 4.weight, 4.bias" in result


@pytest.mark.slow
def test_a_task_without_layers_is_reported() -> None:
    def unknown(parallel: Pipelined) -> None:
        def layers() -> list[nn.Module]:
            raise NotImplementedError("Mine must define layers()")

        parallel.wrap(plain(3, torch.float32), layers, [])

    for result in run_ranks(lambda world: refuse(world, unknown), 2):
        assert result.startswith("TaskFault 70: parallelism=pipeline: ")
        assert "define layers()" in result


def fail_at(world: World, where: str) -> list[str]:
    """Return the errors that this rank raises in an update and in an evaluation, for a fault at `where`."""

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("this layer")

    def loss(model: nn.Module, batch: Any) -> Any:
        if where == "before":
            raise ValueError("before the model")
        if where == "never":
            return batch["x"].sum(), 1
        total, count = token_loss(model, batch)
        if where == "twice":
            model(batch["x"])
        if where == "after":
            raise ValueError("after the model")
        return total, count

    def read() -> Iterator[MicroBatch]:
        made = batches([2, 2], torch.float32)
        yield made[0]
        if where == "data" and world.rank == 1:
            raise ValueError("the data")
        if where == "count" and world.rank == 1:
            yield made[0]
        yield made[1]

    model = plain(4, torch.float32)
    if where in BROKEN_LAYERS:
        model[BROKEN_LAYERS[where]] = nn.Sequential(Broken(), model[BROKEN_LAYERS[where]])
    parallel = Pipelined(world)
    parallel.wrap(model, lambda: list(model), [])
    texts = []
    for attempt in range(2):
        try:
            if attempt and where in BROKEN_LAYERS:  # an evaluation
                with torch.no_grad():
                    model(batches([2], torch.float32)[0].batch["x"])
            else:
                parallel.accumulate(passes_of(model, loss), read())
            texts.append("no error")
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


ERRORS = {  # place of the fault: the rank that fails, and the text of its error
    "before": (0, "ValueError: before the model"),
    "never": (0, "must call model(...)"),
    "twice": (1, "must call the model once"),
    "after": (1, "ValueError: after the model"),
    "data": (1, "ValueError: the data"),
    "layer": (0, "ValueError: this layer"),
    "last layer": (1, "ValueError: this layer"),
    "count": (0, "different numbers of micro-batches, from 2 to 3"),
}
BROKEN_LAYERS = {"layer": 1, "last layer": 3}


def test_an_error_of_one_rank_is_raised_on_all_ranks() -> None:
    """All ranks end well within 30 s, the timeout of collectives, so none hangs."""
    results = run_ranks(lambda world: {where: fail_at(world, where) for where in ERRORS}, 2)
    for where, (rank, text) in ERRORS.items():
        for attempt in range(2):
            own = results[rank][where][attempt]
            assert own.startswith(text) if text.startswith("ValueError") else text in own, where
            other = results[1 - rank][where][attempt]
            assert text.rsplit(": ", maxsplit=1)[-1] in other, (where, other)


def fail_in_third_micro_batch(world: World, where: str, stages: int) -> str:
    """Return what a rank raises in an update of five micro-batches, if the third one of the first pipeline fails."""
    calls = []

    def fail() -> None:
        calls.append(1)
        if len(calls) == 3 and world.rank < stages:
            raise TaskFault(f"in the {where}")

    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            if "layer" in where and torch.is_grad_enabled():
                fail()
            if where == "backward pass" and result.requires_grad:
                result.register_hook(lambda _: fail())
            return result

    class RejectsZeros(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not x.any():
                raise ValueError("received zeros")
            return super().forward(x)

    def loss(model: nn.Module, batch: Any) -> Any:
        total, count = token_loss(model, batch)
        if where == "loss" and total.grad_fn is not None and not is_first_call.pop():
            fail()
        return total, count

    class FirstOnly(list[bool]):
        def pop(self, _: Any = -1) -> bool:  # the first call infers the shapes, before the schedule starts
            result, self[:] = self[0], [False]
            return result

    is_first_call = FirstOnly([True])
    model = plain(4, torch.float32)
    if where == "layer before one that rejects zeros":
        model[1], model[2] = Broken(WIDTH, WIDTH), RejectsZeros(WIDTH, WIDTH)
    else:
        model[2] = Broken(WIDTH, WIDTH)
    parallel = Pipelined(world, stages=stages, split=[2, 1, 1] if stages == 3 else [2, 2])
    parallel.wrap(model, lambda: list(model), [])
    parallel.begin(list(parallel.owned_parameters(dict(model.named_parameters())).values()))
    try:
        parallel.accumulate(passes_of(model, loss), iter(batches([2] * 5, torch.float32)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("where", ["backward pass", "layer", "layer before one that rejects zeros", "loss"])
@pytest.mark.parametrize(("num_ranks", "stages"), [(3, 3), (4, 2)])
def test_an_error_in_a_scheduled_pass_is_raised_on_all_ranks(where: str, num_ranks: int, stages: int) -> None:
    """The other ranks raise its text, not the error of a lost connection, or one caused by zeros that were sent after
    it.
    """
    results = run_ranks(lambda world: fail_in_third_micro_batch(world, where, stages), num_ranks)
    for text in results:
        assert f"in the {where}" in text
    assert sorted(text.partition(":")[0] for text in results) == ["RankLost"] * (num_ranks - 1) + ["TaskFault"]


@pytest.mark.slow
def test_calling_the_model_outside_the_loss_is_an_error() -> None:
    def call(world: World) -> str:
        model = plain(3, torch.float32)
        Pipelined(world).wrap(model, lambda: list(model), [])
        with pytest.raises(TaskFault, match="no_grad"):
            model(torch.zeros(1, TOKENS, WIDTH))
        return "refused"

    assert run_ranks(call, 2) == ["refused"] * 2


# ---------------------------------------------------------------- splits and stage times


@pytest.mark.slow
def test_equal_layers_are_split_by_memory_of_ranks() -> None:
    def splits(world: World) -> list[Any]:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
        layer_placement.device_bytes = lambda _: 2 * [11 * GIB, 8 * GIB][world.rank]  # two ranks share the host
        parallel = Pipelined(world)
        parallel.expect_inputs(lambda: (torch.zeros(2, 8),), samples=4, num_microbatches=3)
        parallel.wrap(model, lambda: list(model), [])
        elsewhere = [weight.is_meta for weight in model.parameters()]
        return [list(parallel.placement.split.sizes), elsewhere, str(parallel.placement)]

    (one, here, table), (two, there, _) = run_ranks(splits, 2)
    assert one == two == [6, 4]
    assert here == [not is_meta for is_meta in there] == [False] * 12 + [True] * 8
    assert len(table.splitlines()) == 1 + 10 + 2
    assert "rank 1" in table
    assert table.splitlines()[1].startswith("0 ")


@pytest.mark.slow
def test_balance_time_gives_a_slow_layer_its_own_stage() -> None:
    clock = Clock()

    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            clock.now += 0.02
            return super().forward(x)

    def splits(world: World) -> list[int]:
        time.perf_counter = clock
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), Slow(8, 8))
        parallel = Pipelined(world, balance="time")
        parallel.expect_inputs(lambda: (torch.zeros(2, 8),), samples=2, num_microbatches=3)
        parallel.wrap(model, lambda: list(model), [])
        return list(parallel.placement.split.sizes)

    assert run_ranks(splits, 2) == [[3, 1], [3, 1]]


@pytest.mark.slow
def test_all_ranks_start_from_the_weights_of_rank_0() -> None:
    def weights(world: World) -> dict[str, Any]:
        torch.manual_seed(world.rank)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        parallel = Pipelined(world)
        parallel.wrap(model, lambda: list(model), [])
        return {name: tensor.tolist() for name, tensor in parallel.gather_full(model.state_dict()).items()}

    result = run_ranks(weights, 2)[0]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert result == {name: tensor.tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stage_times_are_the_times_of_their_layers(schedule: str) -> None:
    clock = Clock()

    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            clock.now += 0.03 * torch.is_grad_enabled()
            return super().forward(x)

    def run(world: World) -> dict[str, float]:
        time.perf_counter = clock  # on this rank only, because the clock does not advance while the rank waits
        model = nn.Sequential(*(Slow(WIDTH, WIDTH) for _ in range(2)), nn.Linear(WIDTH, CLASSES))
        made = training(world, lambda: model, schedule=schedule, split=[1, 2])
        assert not made.parallel.idle_fractions()
        assert len(list(train_updates(made, stream([2] * 4, torch.float32), 2))) == 2
        assert made.parallel.idle_fractions()
        return dict(made.parallel.stopwatch.last.seconds)

    for seconds in run_ranks(run, 2):
        assert seconds["forward"] == pytest.approx(4 * 0.03, abs=0.02)
        assert seconds["backward"] < 0.02, "the time differs from that of the clock"


# Seconds of the first and of the last stage, and three idle fractions: as measured, ideal for equal stages, and ideal
# for these stages.
BUBBLES: list[tuple[dict[str, float], dict[str, float], tuple[float, float, float]]] = [
    ({"forward": 0.12, "wait": 0.03}, {"forward": 0.12, "wait": 0.03}, (1 / 5, 1 / 5, 1 / 5)),
    ({"forward": 0.04, "wait": 0.12}, {"forward": 0.12, "wait": 0.04}, (1 / 2, 1 / 5, 1 - 0.08 / 0.13)),
    ({"backward": 0.06}, {"backward": 0.06, "wait": 0.06}, (1 / 2, 1 / 5, 1 / 5)),
]


def test_pipeline_bubbles_are_the_idle_fractions() -> None:
    """The bubbles of four micro-batches are measured, and computed for ideal schedules of equal stages and of these
    stages.
    """

    def run(world: World) -> list[list[float]]:
        def idle(first: dict[str, float], last: dict[str, float]) -> list[float]:
            measuring = made.parallel.stopwatch
            made.parallel.stopwatch = SimpleNamespace(last=Lap(1, (first, last)[world.rank]))
            try:
                return list(made.parallel.idle_fractions().values())
            finally:
                made.parallel.stopwatch = measuring

        made = training(world, lambda: plain(3, torch.float32), split=[1, 2])
        assert idle(*BUBBLES[0][:2]) == [], "a bubble is reported before any step was timed"
        next(train_updates(made, stream([2] * 4, torch.float32), 1))
        assert idle({"data": 1.0}, {"data": 1.0}) == [], "a bubble is reported although no stage has computed"
        return [idle(first, last) for first, last, _ in BUBBLES]

    for results in run_ranks(run, 2):
        for result, (_, _, expected) in zip(results, BUBBLES, strict=True):
            assert result == pytest.approx(expected)


# ---------------------------------------------------------------- the gpt task


def gpt(dtype: torch.dtype = torch.float64, **rates: float) -> Transformer:
    torch.manual_seed(0)
    shape = Shape(num_layers=3, num_heads=2, width=8, block_size=6, vocab_size=50)
    return Transformer(shape, **rates).to(dtype)


def test_layers_of_gpt_equal_its_model_bitwise() -> None:
    for training in (True, False):
        model = gpt(torch.float32, dropout=0.3, attention_dropout=0.3).train(training)
        tokens = torch.randint(0, 50, (4, 6))
        noise.start_pass(BatchSamples(0, 0, range(4), range(4)))
        value: Any = tokens
        for layer in model.layers():
            value = layer.train(training)(value)
        noise.start_pass(BatchSamples(0, 0, range(4), range(4)))
        assert torch.equal(value, model(tokens))
        noise.start_pass(None)
    named = {id(weight) for layer in model.layers() for weight in layer.parameters()}
    assert named == {id(weight) for weight in model.parameters()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_gpt_in_a_pipeline_trains_like_one_process(schedule: str) -> None:
    def text(seed: int) -> list[MicroBatch]:
        windows = torch.randint(0, 50, (8, 7), generator=torch.Generator().manual_seed(seed))
        parts = windows.split(3)
        return [MicroBatch((part[:, :-1], part[:, 1:]), part is parts[-1]) for part in parts]

    def stream_of_text() -> Iterator[MicroBatch]:
        for seed in range(100):
            yield from text(seed)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        x, y = batch
        logits = model(x)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1), reduction="sum"), y.numel()

    def run(world: World) -> dict[str, Any]:
        made = training(world, gpt, loss=loss, schedule=schedule)
        steps = list(train_updates(made, stream_of_text(), 5))
        weights = made.parallel.gather_full(made.model.state_dict())
        return {
            "losses": [float(step.loss_sum) for step in steps],  # type: ignore[arg-type]
            "norms": [float(step.grad_norm) for step in steps],  # type: ignore[arg-type]
            "weights": {name: tensor.flatten().tolist() for name, tensor in weights.items()},
        }

    alone = run(ALONE)
    for rank, result in enumerate(run_ranks(run, 2)):
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=5 * PROMISED[torch.float64])
        np.testing.assert_allclose(result["norms"], alone["norms"], rtol=5 * PROMISED[torch.float64])
        assert list(result["weights"]) == (list(alone["weights"]) if rank == 0 else [])
        for name, weight in result["weights"].items():
            np.testing.assert_allclose(weight, alone["weights"][name], rtol=0, atol=ADAPTIVE)
