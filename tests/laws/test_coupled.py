"""A loss that couples all samples of an update does not depend on how ranks and micro-batches divide them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.axes.optimizer import adamw
from runner.axes.parallelism import ddp
from runner.axes.precision import bf16, fp16, fp32
from runner.axes.scheduler import constant
from runner.base import noise
from runner.base.batch import BatchSamples, MicroBatch
from runner.base.errors import ConfigError, TaskFault
from runner.base.noise import per_sample_noise
from runner.base.order import Order
from runner.base.task import Task
from runner.config.configuration import Choice
from runner.distributed.parallel import Discarded, ForwardPasses, Parallel
from runner.distributed.replicated import Replicated
from runner.distributed.world import World
from runner.engine.update.coupled import CoupledSource, check_strategy, is_coupled, validate_embedding
from runner.engine.update.loop import Position, Training, train_updates
from tests.distributed.ranks import CPU, run_ranks
from tests.rounding import PROMISED, distance

ALONE = World(CPU)
GLOBAL, NUM_SAMPLES, WIDTH, UPDATES = 32, 45, 6, 4  # the second update of an epoch has 13 samples
HERE = Path(__file__)


class Towers(nn.Module):
    """Two encoders and a temperature, with dropout that depends on the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 8))
        self.text = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        dropped = per_sample_noise(x).dropout(x, 0.3) if self.training else x
        return self.image(dropped), self.text(y)


class Clip(Task):
    """A contrastive loss in both directions, as in CLIP. `couple` uses the temperature."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = Towers().to(dtype)

    def embed(self, model: nn.Module, batch: Any) -> Any:
        return model(*batch[:2])

    def couple(self, embeddings: Any) -> tuple[Tensor, int]:
        image, text = (F.normalize(each.float() if each.dtype is torch.bfloat16 else each) for each in embeddings)
        logits = self.model.scale.exp() * image @ text.T  # type: ignore[operator]
        labels = torch.arange(len(logits))
        both = F.cross_entropy(logits, labels, reduction="sum") + F.cross_entropy(logits.T, labels, reduction="sum")
        return both / 2, len(logits)


class Triplets(Task):
    """Batch-hard triplet loss: the farthest positive against the nearest negative."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = Towers().to(dtype)

    def embed(self, model: nn.Module, batch: Any) -> Any:
        return {"code": model.image(batch[0]), "label": batch[2]}  # type: ignore[operator]

    def couple(self, embeddings: Any) -> tuple[Tensor, Tensor]:
        code, label = F.normalize(embeddings["code"]), embeddings["label"]
        distances = torch.cdist(code, code, compute_mode="donot_use_mm_for_euclid_dist")
        same = label[:, None] == label
        positive = distances.masked_fill(~same, 0.0).amax(1)
        negative = distances.masked_fill(same, float("inf")).amin(1)
        return F.softplus(positive - negative).sum(), same.any(1).sum()


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return x, y, torch.randint(0, 4, (NUM_SAMPLES,), generator=generator)


def batches_of(order: Order, dtype: torch.dtype) -> Iterator[MicroBatch]:
    tensors = data(dtype)
    for key in order.from_update(0):
        samples = BatchSamples(key.seed, key.epoch, key.indices, range(key.first, key.first + len(key.indices)))
        noise.start_pass(samples)
        batch = tuple(tensor[key.indices] for tensor in tensors) if key.indices else None
        yield MicroBatch(batch, key.last, is_counted=key.is_counted, samples=samples)


def training(
    task: Task, parallel: Parallel, precision: Any = fp32, embed: Callable[..., Any] | None = None
) -> Training:
    model = task.model
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    parallel.wrap(model, lambda: list(model.children()), [])
    parameters = [weight for _, weight in named]
    parallel.begin(parameters)
    position = Position("train")

    def embedded(model: nn.Module, batch: Any) -> Any:
        return validate_embedding((embed or task.embed)(model, batch), task.embed, HERE)

    return Training(
        position=position, model=model, loss=task.loss, parameters=parameters, optimizer=adamw(named, lr=0.01),
        schedule=constant(100), precision=precision(parallel.world, model), parallel=parallel, per_item=1 / 32,
        max_grad_norm=0.5,
        gradients=CoupledSource(embedded, task.couple, HERE, 3, lambda: position.update),
    )  # fmt: skip


def trained(
    world: World, kind: type[Any], *, shares: tuple[int, ...], micro: int, dtype: torch.dtype, precision: Any = fp32,
    drop_last: bool = False,
) -> dict[str, Any]:  # fmt: skip
    parallel = ddp(world)
    order = Order(
        NUM_SAMPLES, GLOBAL, micro, seed=3, shares=shares if world.world_size > 1 else (), rank=world.rank,
        is_lockstep=parallel.is_lockstep, drop_last=drop_last,
    )  # fmt: skip
    run = training(kind(dtype), parallel, precision)
    steps = list(train_updates(run, batches_of(order, dtype), UPDATES))
    return result(run.model, steps)


def result(model: nn.Module, steps: Any) -> dict[str, Any]:
    return {
        "losses": [float(step.loss_sum) / float(step.items) for step in steps],
        "norms": [float(step.grad_norm) for step in steps],
        "weights": {name: tensor.double().flatten().tolist() for name, tensor in model.state_dict().items()},
    }


def train_by_hand(kind: type[Any], dtype: torch.dtype) -> dict[str, Any]:
    """Train with a plain PyTorch loop over complete batches."""
    task = kind(dtype)
    optimizer = adamw(list(task.model.named_parameters()), lr=0.01)
    losses, norms = [], []
    batches = batches_of(Order(NUM_SAMPLES, GLOBAL, GLOBAL, seed=3), dtype)
    for _ in range(UPDATES):
        batch = next(batches)
        loss, count = task.couple(task.embed(task.model, batch.batch))
        (loss / count).backward()
        losses.append(float(loss.detach()) / float(count))
        norms.append(float(nn.utils.clip_grad_norm_(task.model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: tensor.double().flatten().tolist() for name, tensor in task.model.state_dict().items()}
    return {"losses": losses, "norms": norms, "weights": weights}


class Scaled(Clip):
    """Changes the embeddings in place, as a loss may change the outputs of its model."""

    def couple(self, embeddings: Any) -> tuple[Tensor, int]:
        for each in embeddings:
            each.div_(each.detach().norm(dim=1, keepdim=True)).add_(0.1)
        return super().couple(embeddings)


@pytest.mark.parametrize(("shares", "micro"), [((32,), 32), ((32,), 8), ((19, 13), 4)], ids=str)
def test_couple_may_modify_the_embeddings_in_place(shares: tuple[int, ...], micro: int) -> None:
    test_losses_norms_and_weights_match_a_plain_loop(Scaled, torch.float64, shares, micro)


@pytest.mark.slow_beyond(2)
@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", [Clip, Triplets])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(
    ("shares", "micro"),
    [((32,), 32), ((32,), 8), ((32,), 5), ((16, 16), 16), ((19, 13), 4), ((11, 8, 13), 5), ((31, 1), 8)],
    ids=str,
)
def test_losses_norms_and_weights_match_a_plain_loop(
    kind: type[Any], dtype: torch.dtype, shares: tuple[int, ...], micro: int
) -> None:
    actual = (
        [trained(ALONE, kind, shares=shares, micro=micro, dtype=dtype)]
        if len(shares) == 1
        else run_ranks(lambda world: trained(world, kind, shares=shares, micro=micro, dtype=dtype), len(shares))
    )
    plain = train_by_hand(kind, dtype)
    for one in actual:
        for key in ("losses", "norms", "weights"):
            assert distance(plain[key], one[key]) <= PROMISED[dtype], key


def train_by_hand_in_16_bits(
    kind: type[Any], dtype: torch.dtype, shares: tuple[int, ...], micro: int, *, is_scaled: bool
) -> dict[str, Any]:
    """Train with autocast and a GradScaler.

    Embed the micro-batches of all ranks one after another, then compute one loss over the concatenated embeddings.
    """
    task = kind(torch.float32)
    optimizer = adamw(list(task.model.named_parameters()), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, enabled=is_scaled)
    ranks = [
        batches_of(
            Order(NUM_SAMPLES, GLOBAL, micro, seed=3, shares=shares[1:] and shares, rank=rank, drop_last=True),
            torch.float32,
        )
        for rank in range(len(shares))
    ]
    losses, norms = [], []
    for _ in range(UPDATES):
        embedded = []
        for batches in ranks:
            is_last = False
            while not is_last:
                batch = next(batches)
                is_last = batch.last
                with torch.autocast("cpu", dtype):
                    embedded.append(task.embed(task.model, batch.batch))
        with torch.autocast("cpu", dtype):
            if isinstance(embedded[0], dict):
                loss, count = task.couple({key: torch.cat([each[key] for each in embedded]) for key in embedded[0]})
            else:
                loss, count = task.couple(tuple(map(torch.cat, zip(*embedded, strict=True))))
        scaler.scale(loss / count).backward()
        losses.append(float(loss.detach()) / float(count))
        scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(task.model.parameters(), 0.5)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    weights = {name: tensor.double().flatten().tolist() for name, tensor in task.model.state_dict().items()}
    return {"losses": losses, "norms": norms, "weights": weights}


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("kind", [Clip, Triplets])
@pytest.mark.parametrize(("precision", "dtype"), [(fp16, torch.float16), (bf16, torch.bfloat16)])
@pytest.mark.parametrize(("shares", "micro"), [((32,), 32), ((32,), 5), ((19, 13), 4)], ids=str)
def test_half_precision_matches_a_loop_with_grad_scaler(
    kind: type[Any], precision: Any, dtype: torch.dtype, shares: tuple[int, ...], micro: int
) -> None:
    """The plain loop uses the same micro-batches, because gradients of each micro-batch are rounded to 16 bits."""
    actual = run_ranks(
        lambda world: trained(
            world, kind, shares=shares, micro=micro, dtype=torch.float32, precision=precision, drop_last=True
        ),
        len(shares),
    )
    plain = train_by_hand_in_16_bits(kind, dtype, shares, micro, is_scaled=precision is fp16)
    for one in actual:
        for key in ("losses", "norms", "weights"):
            assert distance(plain[key], one[key]) <= PROMISED[torch.float32], key


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("place", [0, 1])
def test_unreadable_micro_batches_change_nothing(place: int) -> None:
    def weights(world: World) -> list[Any]:
        actual = []
        for is_inserted in (False, True):
            order = Order(NUM_SAMPLES, GLOBAL, 8, seed=3, drop_last=True, shares=(16, 16), rank=world.rank)
            batches = list(itertools.islice(batches_of(order, torch.float64), 2))
            if is_inserted and world.rank == 1:
                batches.insert(place, MicroBatch(None, last=False, is_counted=False))
            run = training(Triplets(torch.float64), ddp(world))
            (step,) = train_updates(run, iter(batches), 1)
            actual.append([float(step.items), *(weight.tolist() for weight in run.parameters)])
        return actual

    for plain, inserted in run_ranks(weights, 2):
        assert plain == inserted
        assert plain[0] == GLOBAL


def test_all_ranks_discard_an_update_that_fails_on_one() -> None:
    """The failing rank records its error before the collective. The other ranks have none."""

    def outcome(world: World) -> Any:
        def embed(model: nn.Module, batch: Any) -> Any:
            if world.rank == 1:
                raise MemoryError("planted")
            return task.embed(model, batch)

        task, parallel, recorded = Triplets(torch.float64), ddp(world), list[Exception]()
        run = training(task, parallel, embed=embed)
        precision = run.precision
        functions = precision.forward, precision.backward, precision.scale_loss
        passes = ForwardPasses(run.model, run.loss, *functions, failed=recorded.append)
        order = Order(NUM_SAMPLES, GLOBAL, 8, seed=3, shares=(16, 16), rank=world.rank)
        with pytest.raises(Discarded):
            run.gradients.accumulate(parallel, passes, batches_of(order, torch.float64))
        return [str(error) for error in recorded]

    assert run_ranks(outcome, 2) == [[], ["planted"]]


def test_only_one_micro_batch_of_activations_is_stored() -> None:
    """Hooks on saved tensors measure the peak of saved bytes, which must not grow with the number of micro-batches."""

    def peak_saved_bytes(micro: int, num: int) -> int:
        alive = largest = 0

        class Saved:
            def __init__(self, tensor: Tensor) -> None:
                nonlocal alive, largest
                self.tensor = tensor.detach()  # the autograd graph would keep it alive
                alive += tensor.nbytes
                largest = max(largest, alive)

            def __del__(self) -> None:
                nonlocal alive
                alive -= self.tensor.nbytes

        task = Triplets(torch.float32)
        task.couple = lambda codes: (codes["code"].sum(), len(codes["code"]))  # type: ignore[method-assign]
        run = training(task, ddp(ALONE))
        order = Order(NUM_SAMPLES, micro * num, micro, seed=3)
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            next(train_updates(run, batches_of(order, torch.float32), 1))
        return largest

    assert peak_saved_bytes(8, 1) == peak_saved_bytes(8, 4) < peak_saved_bytes(32, 1)


def test_couple_draws_the_same_numbers_on_all_ranks() -> None:
    class Drawn(Clip):
        def couple(self, embeddings: Any) -> tuple[Tensor, int]:
            weights = torch.rand(len(embeddings[0]), 1, dtype=embeddings[0].dtype)
            return (weights * embeddings[0] * embeddings[1]).sum(), len(weights)

    alone = trained(ALONE, Drawn, shares=(32,), micro=8, dtype=torch.float64)
    for one in run_ranks(lambda world: trained(world, Drawn, shares=(19, 13), micro=4, dtype=torch.float64), 2):
        assert distance(alone["weights"], one["weights"]) <= PROMISED[torch.float64]


@pytest.mark.parametrize(
    "answer", [3.0, torch.zeros(()), (torch.zeros(2, 2), None), {"x": 1}, torch.zeros(2, 2)], ids=repr
)
def test_embeddings_without_rows_or_gradient_are_rejected(answer: Any) -> None:
    with pytest.raises(TaskFault):
        validate_embedding(answer, Clip.embed, HERE)


def test_more_rows_than_samples_are_rejected() -> None:
    """The order of concatenated views would depend on the micro-batches."""

    class Views(Clip):
        def embed(self, model: nn.Module, batch: Any) -> Any:
            return torch.cat(model(*batch[:2]))

        def couple(self, embeddings: Any) -> tuple[Tensor, int]:
            return super().couple(embeddings.chunk(2))

    with pytest.raises(TaskFault):
        trained(ALONE, Views, shares=(32,), micro=8, dtype=torch.float64)


def test_embed_must_not_change_batches_in_place() -> None:
    """With several micro-batches, each batch is embedded twice."""

    class Scaled(Clip):
        def embed(self, model: nn.Module, batch: Any) -> Any:
            return model(batch[0].mul_(0.5), batch[1])

    with pytest.raises(TaskFault, match="in place"):
        trained(ALONE, Scaled, shares=(32,), micro=8, dtype=torch.float64)
    trained(ALONE, Scaled, shares=(32,), micro=32, dtype=torch.float64)


def test_tasks_define_either_a_loss_or_a_coupled_loss() -> None:
    with pytest.raises(TaskFault):
        is_coupled(type("Half", (Task,), {"embed": Clip.embed})(), "train")
    with pytest.raises(TaskFault):
        is_coupled(type("Both", (Clip,), {"loss": lambda *_: None})(torch.float32), "train")
    assert is_coupled(Clip(torch.float32), "train")
    assert not is_coupled(Task(), "train")


def test_collectives_inside_forward_passes_are_rejected() -> None:
    with pytest.raises(ConfigError) as actual:
        check_strategy(Replicated(World(CPU, 0, 0, 2), is_lockstep=True), Choice("ddp", "ddp", {"batch_norm": "sync"}))
    assert actual.value.exit_code == 78
