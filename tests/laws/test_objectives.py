"""An update with several objectives matches a plain loop, however ranks and micro-batches divide its samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.axes.optimizer import adam
from runner.axes.parallelism import ddp
from runner.axes.precision import Precision, fp16, fp32
from runner.axes.scheduler import constant
from runner.base import noise
from runner.base.batch import BatchSamples, MicroBatch
from runner.base.errors import ConfigError, TaskFault
from runner.base.noise import per_sample_noise
from runner.base.order import Order
from runner.base.task import Task
from runner.config.configuration import Choice
from runner.distributed.world import World
from runner.engine.parts.objective_phase import bind_objective, check_loss_signature
from runner.engine.update.loop import Position, Training, train_updates
from runner.engine.update.objectives import ObjectivePosition, Objectives, ObjectiveSpec, parse_objectives
from tests.distributed.ranks import CPU, run_ranks
from tests.rounding import PROMISED, distance

ALONE = World(CPU)
GLOBAL, NUM_SAMPLES, WIDTH, UPDATES = 32, 45, 6, 4
LR = 0.01
Declared = Mapping[str, Mapping[str, Any]]


def half(world: World, model: nn.Module) -> Precision:
    return fp16(world, model, init_scale=256.0)


class Parts(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


class Adversarial(Task):
    """A generator and a discriminator, as in DCGAN."""

    declared: ClassVar[Declared] = {"disc": {"trains": ["disc"]}, "gen": {"trains": ["gen"]}}

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = Parts(gen=mlp(3, WIDTH), disc=mlp(WIDTH, 1)).to(dtype)

    @property
    def objectives(self) -> Mapping[str, Mapping[str, Any]]:
        return self.declared

    def loss(self, model: Any, batch: Any, objective: str = "") -> tuple[Tensor, int]:
        real = batch[0]
        fake = model.gen(per_sample_noise(batch).normal(3, dtype=real.dtype))
        if objective == "gen":
            return F.softplus(-model.disc(fake)).sum(), len(real)
        return (F.softplus(-model.disc(real)) + F.softplus(model.disc(fake.detach()))).sum(), len(real)


class ActorCritic(Task):
    """A critic that regresses returns and an actor that uses the advantage. The critic has more frequent updates."""

    declared: ClassVar[Declared] = {"critic": {"trains": ["critic"]}, "actor": {"trains": ["actor"], "every": 2}}
    objectives = Adversarial.objectives

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = Parts(critic=mlp(WIDTH, 1), actor=mlp(WIDTH, 3)).to(dtype)

    def loss(self, model: Any, batch: Any, objective: str = "") -> tuple[Tensor, int]:
        state, reward, action = batch[0], batch[1][:, 0], batch[2]
        value = model.critic(state).flatten()
        if objective == "critic":
            return (value - reward).square().sum(), len(state)
        chosen = F.log_softmax(model.actor(state), 1).gather(1, action[:, None]).flatten()
        return -(chosen * (reward - value).detach()).sum(), len(state)


class Distilled(Task):
    """A student follows a frozen teacher, and a head is trained on its features."""

    declared: ClassVar[Declared] = {"student": {"trains": ["student"]}, "head": {"trains": ["head"]}}
    objectives = Adversarial.objectives

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = Parts(teacher=mlp(WIDTH, 4), student=mlp(WIDTH, 4), head=nn.Linear(4, 3)).to(dtype)

    def loss(self, model: Any, batch: Any, objective: str = "") -> tuple[Tensor, int]:
        if objective == "student":
            return (model.student(batch[0]) - model.teacher(batch[0])).square().sum(), len(batch[0])
        return F.cross_entropy(model.head(model.student(batch[0])), batch[2], reduction="sum"), len(batch[0])


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return x, y, torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)


def batches_of(order: Order, dtype: torch.dtype) -> Iterator[MicroBatch]:
    tensors = data(dtype)
    for key in order.from_update(0):
        samples = BatchSamples(key.seed, key.epoch, key.indices, range(key.first, key.first + len(key.indices)))
        noise.start_pass(samples)
        batch = tuple(tensor[key.indices] for tensor in tensors) if key.indices else None
        yield MicroBatch(batch, key.last, is_counted=key.is_counted, samples=samples)


def specs_of(task: Task) -> list[ObjectiveSpec]:
    phase: Any = SimpleNamespace(
        name="train", max_grad_norm=0.5, optimizer=Choice("adam", "adam", {}),
        scheduler=Choice("constant", "constant", {}), objectives={},
    )  # fmt: skip
    return parse_objectives(task, phase)


def objectives(task: Task, world: World, precision: Any = fp32) -> Objectives:
    parallel, model = ddp(world), task.model
    parallel.wrap(model, list, [])
    specs = specs_of(task)
    weights = [spec.select_parameters(model) for spec in specs]
    parallel.begin([weight for each in weights for weight in each.values()])
    parallel.set_groups([list(each.values()) for each in weights])
    position, first = Position("train"), precision(world, model)
    parts = [
        (
            spec,
            Training(
                position=ObjectivePosition(position, spec.every, keeps_precision=False),
                model=model, loss=bind_objective(task, spec.name),
                parameters=list(named.values()), optimizer=adam(list(named.items()), lr=LR), schedule=constant(100),
                precision=first if index == 0 else first.fork(model), parallel=parallel, per_item=1 / 32,
                max_grad_norm=spec.max_grad_norm,
            ),
        )
        for index, (spec, named) in enumerate(zip(specs, weights, strict=True))
    ]  # fmt: skip
    return Objectives(position, model, parallel, parts)


def trained(
    world: World, kind: type[Any], *, shares: tuple[int, ...], micro: int, dtype: torch.dtype, precision: Any = fp32,
    drop_last: bool = False,
) -> dict[str, Any]:  # fmt: skip
    order = Order(
        NUM_SAMPLES, GLOBAL, micro, seed=3, shares=shares if world.world_size > 1 else (), rank=world.rank,
        drop_last=drop_last,
    )  # fmt: skip
    run = objectives(kind(dtype), world, precision)
    steps = list(train_updates(run, batches_of(order, dtype), UPDATES))
    losses = [
        float(total) / float(count)
        for step in steps
        for name, (total, count) in step.extra.items()
        if name.endswith("/loss")
    ]
    return {"losses": losses, "weights": weights_of(run.model)}


def weights_of(model: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.double().flatten().tolist() for name, tensor in model.state_dict().items()}


def train_by_hand(
    kind: type[Any], dtype: torch.dtype, *, shares: tuple[int, ...] = (GLOBAL,), micro: int = GLOBAL,
    is_half: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train with a plain PyTorch loop over the micro-batches of all ranks; `is_half` drops incomplete batches."""
    task = kind(dtype)
    parts = {
        name: (
            [weight for key, weight in task.model.named_parameters() if key.startswith(content["trains"][0])],
            content.get("every", 1),
        )
        for name, content in kind.declared.items()
    }
    optimizers = {name: torch.optim.Adam(weights, lr=LR) for name, (weights, _) in parts.items()}
    scalers = {name: torch.amp.GradScaler("cpu", init_scale=256.0, enabled=is_half) for name in parts}
    orders = [
        Order(
            NUM_SAMPLES, GLOBAL, micro, seed=3, shares=shares if len(shares) > 1 else (), rank=rank, drop_last=is_half
        )
        for rank in range(len(shares))
    ]
    batches, losses = [batches_of(order, dtype) for order in orders], []
    for update in range(UPDATES):
        micro_batches = [each for of_rank in batches for each in next_update(of_rank)]
        items = sum(len(each.batch[0]) for each in micro_batches)
        for name, (weights, every) in parts.items():
            if update % every:
                continue
            task.model.zero_grad()
            loss = 0.0
            for each in micro_batches:
                noise.start_pass(each.samples)
                with torch.autocast("cpu", torch.float16, enabled=is_half):
                    total, _ = task.loss(task.model, each.batch, name)
                scalers[name].scale(total / items).backward()
                loss += float(total.detach())
            scalers[name].unscale_(optimizers[name])
            nn.utils.clip_grad_norm_(weights, 0.5)
            scalers[name].step(optimizers[name])
            scalers[name].update()
            losses.append(loss / items)
    return {"losses": losses, "weights": weights_of(task.model)}


def next_update(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield the micro-batches of the next update."""
    for each in batches:
        yield each
        if each.last:
            return


@pytest.mark.slow_beyond(2)
@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", [Adversarial, ActorCritic, Distilled])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("shares", "micro"), [((32,), 32), ((32,), 5), ((19, 13), 4), ((11, 8, 13), 5)], ids=str)
def test_losses_norms_and_weights_match_a_plain_loop(
    kind: type[Any], dtype: torch.dtype, shares: tuple[int, ...], micro: int
) -> None:
    result = run_ranks(lambda world: trained(world, kind, shares=shares, micro=micro, dtype=dtype), len(shares))
    plain = train_by_hand(kind, dtype)
    for one in result:
        assert distance(plain["losses"], one["losses"]) <= PROMISED[dtype]
        assert distance(plain["weights"], one["weights"]) <= PROMISED[dtype]


def test_parameters_without_an_objective_do_not_change() -> None:
    before = weights_of(Distilled(torch.float32).model)
    after = trained(ALONE, Distilled, shares=(32,), micro=8, dtype=torch.float32)["weights"]
    same = {name for name in before if before[name] == after[name]}
    assert same == {name for name in before if name.startswith("teacher")}


def test_an_overflow_of_one_objective_skips_only_its_step() -> None:
    """Each objective has a separate loss scale."""
    task = Adversarial(torch.float32)
    run = objectives(task, ALONE, half)
    before = weights_of(task.model)
    loss = run.parts[0][1].loss
    exploding = [
        (run.parts[0][0], run.parts[0][1].wrap_forward(lambda _: lambda model, batch: _times(loss(model, batch))))
    ]
    run = Objectives(run.position, run.model, run.parallel, [*exploding, run.parts[1]])
    next(train_updates(run, batches_of(Order(NUM_SAMPLES, GLOBAL, 8, seed=3), torch.float32), 1))
    after = weights_of(task.model)
    assert {name.split(".")[0] for name in before if before[name] != after[name]} == {"gen"}
    assert [training.precision.num_skipped() for _, training in run.parts] == [1, 0]


def _times(answer: tuple[Tensor, int]) -> tuple[Tensor, int]:
    return answer[0] * float("inf"), answer[1]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kind", [Adversarial, ActorCritic, Distilled])
@pytest.mark.parametrize(("shares", "micro"), [((32,), 32), ((32,), 8), ((19, 13), 4)], ids=str)
def test_half_precision_matches_a_loop_with_grad_scalers(kind: type[Any], shares: tuple[int, ...], micro: int) -> None:
    """The plain loop uses the same micro-batches, because gradients of each micro-batch are rounded to float16."""
    result = run_ranks(
        lambda world: trained(
            world, kind, shares=shares, micro=micro, dtype=torch.float32, precision=half, drop_last=True
        ),
        len(shares),
    )
    plain = train_by_hand(kind, torch.float32, shares=shares, micro=micro, is_half=True)
    for one in result:
        assert distance(plain["losses"], one["losses"]) <= PROMISED[torch.float32]
        assert distance(plain["weights"], one["weights"]) <= PROMISED[torch.float32]


WRONG: dict[str, dict[str, Any]] = {
    "trains nothing": {"disc": {"trains": ["critic"]}},
    "not a list": {"disc": {"trains": []}},
    "shared": {"disc": {"trains": ["disc"]}, "gen": {"trains": ["gen", "disc.0"]}},
    "unknown key": {"disc": {"trains": ["disc"], "lr": 1e-3}},
    "unknown optimizer": {"disc": {"trains": ["disc"], "optimizer": "adamm"}},
    "unknown key of an optimizer": {"disc": {"trains": ["disc"], "optimizer.beta": 0.5}},
    "wrong value": {"disc": {"trains": ["disc"], "optimizer.lr": "fast"}},
    "never": {"disc": {"trains": ["disc"], "every": 0}},
    "invalid name": {"the disc.": {"trains": ["disc"]}},
    "not in every update": {"disc": {"trains": ["disc"], "every": 2}},
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_objectives_are_rejected(name: str) -> None:
    task = type("Wrong", (Adversarial,), {"declared": WRONG[name]})(torch.float32)
    with pytest.raises(ConfigError) as result:
        specs_of(task)
    assert result.value.exit_code == 78


def test_unknown_modules_are_reported_with_existing_ones() -> None:
    task = type("Wrong", (Adversarial,), {"declared": {"critic": {"trains": ["value_function"]}}})(torch.float32)
    with pytest.raises(ConfigError) as result:
        specs_of(task)
    (problem,) = result.value.problems
    assert {"gen", "disc"} <= set(problem.fix.replace(",", " ").split())


def test_frozen_modules_are_reported_without_suggestion() -> None:
    task = Adversarial(torch.float32)
    for weight in task.model.disc.parameters():
        weight.requires_grad_(False)
    with pytest.raises(ConfigError) as result:
        specs_of(task)
    (problem,) = result.value.problems
    assert problem.where == "OBJECTIVES['disc']"
    assert "adapter.train=[disc]" in problem.fix
    assert "gen" not in problem.fix


def test_problems_of_all_objectives_are_reported_together() -> None:
    declared = {
        "first": ["disc"],
        "second": {"trains": ["disc"], "every": 0},
        "third": {"trains": []},
        "fourth": {"trains": ["disc"], "optimizer": "adamm"},
        "fifth": {"trains": ["disc"], "scheduler.warmap": 3},
    }
    task = type("Wrong", (Adversarial,), {"declared": declared})(torch.float32)
    with pytest.raises(ConfigError) as result:
        specs_of(task)
    assert {problem.where for problem in result.value.problems} == {f"OBJECTIVES[{name!r}]" for name in declared}


def test_objectives_may_share_declared_parameters() -> None:
    shares = {"shares": ["disc.0"]}
    shared = {"disc": {"trains": ["disc"], **shares}, "gen": {"trains": ["gen", "disc.0"], **shares}}
    task = type("Shared", (Adversarial,), {"declared": shared})(torch.float32)
    assert [len(spec.select_parameters(task.model)) for spec in specs_of(task)] == [4, 6]


def test_tied_parameters_belong_to_several_objectives() -> None:
    for shares in ([], ["disc.2.bias"], ["disc.2.bias", "gen.extra"]):
        declared = {
            name: {"trains": [name], "shares": [each for each in shares if name in each]} for name in ("disc", "gen")
        }
        task = type("Tied", (Adversarial,), {"declared": declared})(torch.float32)
        task.model.gen.extra = task.model.disc[2].bias
        if len(shares) < 2:
            with pytest.raises(ConfigError, match="several objectives"):
                specs_of(task)
        else:
            disc, gen = (spec.select_parameters(task.model) for spec in specs_of(task))
            assert [name for name in disc if name in gen] == ["gen.extra"]
            assert (len(disc), len(gen)) == (4, 5)


def test_earlier_skipped_updates_are_known_after_a_resume() -> None:
    """A checkpoint restores the position of the phase after the objectives are built."""
    whole = Position("train")
    first, second = (ObjectivePosition(whole, 1, keeps_precision=keeps) for keeps in (True, False))
    whole.update, whole.skipped_before = 7, 3
    assert (first.skipped_before, second.skipped_before) == (3, 0)


def test_wrong_loss_signatures_are_rejected() -> None:
    source = Path(__file__)

    class Whole(Task):
        def loss(self, model: nn.Module, batch: Any) -> Any: ...

    class OfObjectives(Task):
        def loss(self, model: nn.Module, batch: Any, objective: str) -> Any: ...

    class Coupled(Task):
        def embed(self, model: nn.Module, batch: Any) -> Any: ...

    check_loss_signature(Whole(), source, has_objectives=False)
    check_loss_signature(OfObjectives(), source, has_objectives=True)
    check_loss_signature(Coupled(), source, has_objectives=False)
    for task, several in ((Whole(), True), (OfObjectives(), False), (Coupled(), True)):
        with pytest.raises(TaskFault):
            check_loss_signature(task, source, has_objectives=several)
