"""Training and fit phases: the parameters that they change, their state, and what their release frees."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.axes.precision import fp32
from runner.base.batch import MicroBatch
from runner.base.errors import ConfigError, NumericError, TaskFault
from runner.base.task import Fit, State, Task
from runner.config.configuration import compose
from runner.config.request import Request
from runner.distributed.parallel import Parallel
from runner.distributed.pipelined import PLACEHOLDER
from runner.distributed.replicated import Replicated
from runner.distributed.world import World
from runner.engine.parts.phase_kinds import (
    GradientPhase,
    LossPhase,
    PhaseKind,
    StatisticsPhase,
    check_parameters,
    count_updates,
    weight_per_item,
)
from runner.engine.update.loop import Position, StepInfo, UpdateWrapper
from runner.plan.inventory import Cpu, Inventory
from runner.plan.planner import make_plan
from runner.plan.run_plan import PhasePlan, Plan
from tests.distributed.ranks import CPU, run_ranks

HERE = Path(__file__)
ALONE = World(CPU)
TASK = Path(__file__).parents[1] / "task_that_is_saved.py"


@cache
def plan_of(*settings: str) -> Plan:
    args = ("device=cpu", "global_batch_size=8", "updates=4", *settings)
    return make_plan(compose(Request(args, TASK)), Inventory((), Cpu("a processor", 2, 4, 0)))


class Points(Task):
    """A model with two layers, the second without a bias, and a layer that gets no gradient."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict(
            {"body": nn.Linear(3, 2), "head": nn.Linear(2, 1, bias=False), "spare": nn.Linear(1, 1)}
        )
        self.model["spare"].bias.requires_grad_(False)

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        parts: Any = model
        return parts["head"](parts["body"](batch)).square().sum(), len(batch)


def parts_of(task: Task, *settings: str, world: World = ALONE, **others: Any) -> Any:
    given = {"model": task.model, "bare": task.model, "precision": fp32(world, task.model), "parallel": Parallel(world)}
    return SimpleNamespace(task=task, source=HERE, plan=plan_of(*settings), world=world, **{**given, **others})


def order(updates_per_epoch: int = 3, num_samples: int = 20, shares: tuple[int, ...] = ()) -> Any:
    return SimpleNamespace(updates_per_epoch=updates_per_epoch, num_samples=num_samples, shares=shares)


def training(
    trains: list[str] | None = None, *settings: str, task: Task | None = None, update: int = 0, **others: Any
) -> tuple[GradientPhase, Any]:
    """Return a training phase at this update, and its parts."""
    parts = parts_of(task or Points(), *settings, **others)
    phase = replace(parts.plan.phases[0], trains=trains)
    return LossPhase(phase, parts, order(), Position("train", update)), parts


def micro(batch: Any, *, last: bool = True, **others: Any) -> MicroBatch:
    return MicroBatch(batch, last, **others)


def points(number: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(number, 3, generator=torch.Generator().manual_seed(seed))


def loss_of(info: StepInfo) -> float:
    assert info.loss_sum is not None
    return float(info.loss_sum)


def save_and_read(phase: PhaseKind) -> Any:
    """Return the state of the phase as read from a checkpoint."""
    tensors, numbers = phase.state(lambda tensor: tensor.clone())
    copies = {stem: dict(named) for stem, named in tensors.items()}
    state = {**numbers, "values": {"scheduler": phase.parts.plan.choices["scheduler"].name}}
    return SimpleNamespace(tensors=copies.__getitem__, stored=copies.__getitem__, state=state)


# ---------------------------------------------------------------- training


def test_only_parameters_of_the_phase_are_trained_until_its_release() -> None:
    phase, parts = training(["head"])
    named = dict(parts.bare.named_parameters())
    assert [*phase.trained_names] == ["head.weight"]
    assert [name for name, weight in named.items() if weight.requires_grad] == ["head.weight"]
    before = {name: weight.detach().clone() for name, weight in named.items()}
    info = next(phase.updates(iter([micro(points())])))
    assert (info.update, int(info.items)) == (1, 8)
    assert [name for name, weight in named.items() if not torch.equal(weight, before[name])] == ["head.weight"]
    phase.release()
    assert [name for name, weight in named.items() if not weight.requires_grad] == ["spare.bias"]
    assert all(weight.grad is None for weight in named.values())
    assert all(not optimizer.state for optimizer in phase.inputs.optimizers)


def test_the_first_update_records_which_parameters_have_gradients() -> None:
    phase, _ = training()
    next(phase.updates(iter([micro(points())])))
    assert phase.first_gradients() == {
        "body.weight": True, "body.bias": True, "head.weight": True, "spare.weight": False,
    }  # fmt: skip
    assert not has_hooks(phase.trained.values())  # hooks would run in every backward pass


def has_hooks(weights: Iterable[Any]) -> bool:
    return any(weight._post_accumulate_grad_hooks for weight in weights)  # lint-tests: private: torch has no public way


def test_a_released_phase_leaves_no_hooks() -> None:
    phase, parts = training()
    for weights in (phase.trained.values(), parts.bare.parameters()):
        assert has_hooks(weights)
    phase.release()
    assert not has_hooks(parts.bare.parameters())


@pytest.mark.parametrize(
    ("trains", "lines"),
    [
        (None, []),
        (["head", "body.bias"], ["trains head (2), body.bias (2): 4 of 12 parameters (33.3%)"]),
    ],
)
def test_the_share_of_trained_parameters_is_printed(trains: list[str] | None, lines: list[str]) -> None:
    phase, _ = training(trains)
    assert phase.start_lines() == lines


@pytest.mark.parametrize("trains", [["hed"], ["head", "body.w"], []])
def test_unknown_parameters_are_rejected_before_any_phase(trains: list[str]) -> None:
    task, phase = Points(), replace(plan_of().phases[0], trains=trains)
    with pytest.raises(ConfigError) as caught:
        check_parameters([phase], task.model)
    assert len(caught.value.problems) == 1
    if trains == ["hed"]:
        assert "head" in caught.value.problems[0].fix
    check_parameters([replace(phase, kind="fit"), replace(phase, trains=["head"])], task.model)


def test_a_phase_cannot_train_parameters_that_the_task_freezes() -> None:
    with pytest.raises(ConfigError) as caught:
        training(["spare.bias"])
    (problem,) = caught.value.problems
    assert "adapter.train=[spare.bias]" in problem.fix, "the fix must not suggest another name"


class Tied(Task):
    """A language model whose output layer shares the weight of the embedding."""

    def __init__(self) -> None:
        self.model = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "body": nn.Linear(3, 3), "head": nn.Linear(3, 4)})
        self.model["head"].weight = self.model["embedding"].weight

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        parts: Any = model
        return parts["head"](parts["body"](parts["embedding"](batch))).square().sum(), len(batch)


def test_a_phase_trains_a_tied_parameter_by_any_of_its_names() -> None:
    for trains, size in (("head", 16), ("head.weight", 12), ("embedding", 12)):
        phase, _ = training([trains], task=Tied())
        assert [*phase.trained_names] == ["embedding.weight", *(["head.bias"] if trains == "head" else [])]
        assert phase.start_lines() == [f"trains {trains} ({size}): {size} of 28 parameters ({size / 28:.1%})"]


@pytest.mark.parametrize(
    ("scales", "scale"),
    [
        ("head:2", 2.0),
        ("head.weight:2", 2.0),
        ("embedding:3,head:2", 3.0),
        ("embedding:3,head.weight:2", 2.0),
        ("embedding.weight:3,head:2", 3.0),
        ("body:2", 1.0),
    ],
)
def test_the_longest_name_of_a_tied_parameter_scales_its_learning_rate(scales: str, scale: float) -> None:
    phase, _ = training(None, f"optimizer.lr_scales={{{scales}}}", task=Tied())
    groups = phase.training.optimizer.param_groups
    assert [group["lr_scale"] for group in groups if "embedding.weight" in group["names"]] == [scale]


@pytest.mark.parametrize("name", ["head", "head.weight", "embedding"])
def test_adamw_for_selects_a_tied_parameter_by_any_of_its_names(name: str) -> None:
    phase, _ = training(None, "optimizer=muon", f"optimizer.adamw_for=[{name}]", task=Tied())
    rules = {each: group["rule"] for group in phase.training.optimizer.param_groups for each in group["names"]}
    assert (rules["embedding.weight"], rules["body.weight"]) == ("adamw", "muon")


class Stage(Parallel):
    """A stage of a pipeline, which updates the parameters of the head."""

    def owned_parameters(self, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        return {name: weight for name, weight in named.items() if name.startswith("head")}


def test_optimizer_options_can_name_parameters_of_other_stages() -> None:
    names = ("optimizer=muon", "optimizer.lr_scales={body:3,body.bias:5,head:2}", "optimizer.adamw_for=[body]")
    phase, _ = training(None, *names, parallel=Stage(ALONE))
    (group,) = phase.training.optimizer.param_groups
    assert (group["names"], group["lr_scale"], group["rule"]) == (["head.weight"], 2.0, "muon")
    with pytest.raises(ConfigError):
        training(None, "optimizer.lr_scales={bodies:3}", parallel=Stage(ALONE))


def test_optimizer_options_can_name_tied_parameters_of_other_stages() -> None:
    names = ("optimizer=muon", "optimizer.lr_scales={head.weight:3,head.bias:2}", "optimizer.adamw_for=[head.weight]")
    phase, _ = training(None, *names, task=Tied(), parallel=Stage(ALONE))
    (group,) = phase.training.optimizer.param_groups
    assert (group["names"], group["lr_scale"]) == (["head.bias"], 2.0)


def test_the_placeholder_of_an_idle_stage_is_only_in_its_optimizer() -> None:
    class Idle(Parallel):
        def owned_parameters(self, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
            return {PLACEHOLDER: nn.Parameter(torch.zeros(1))}

    phase, _ = training(None, "optimizer.lr_scales={body:3}", parallel=Idle(ALONE))
    next(phase.updates(iter([micro(points())])))
    assert not phase.owned, "hooks would save the placeholder"
    assert not phase.first_gradients(), "the run would warn that the placeholder has no gradient"
    (group,) = phase.training.optimizer.param_groups
    assert group["names"] == [PLACEHOLDER]


def test_a_resumed_phase_continues_like_an_uninterrupted_one() -> None:
    batches = [micro(points(seed=number)) for number in range(4)]
    phase, parts = training()
    updates = phase.updates(iter(batches))
    next(updates)
    next(updates)
    weights = {name: weight.detach().clone() for name, weight in parts.bare.named_parameters()}
    start = save_and_read(phase)
    expected = [*map(loss_of, updates)]
    again, parts_again = training(update=2)
    parts_again.bare.load_state_dict(weights)
    again.load(start)
    result = [*map(loss_of, again.updates(iter(batches[2:])))]
    assert result == expected
    assert len(result) == 2
    for one, other in zip(parts.bare.parameters(), parts_again.bare.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_state_of_a_phase_contains_only_trained_parameters() -> None:
    phase, _ = training(["head"])
    next(phase.updates(iter([micro(points())])))
    start = save_and_read(phase)
    assert {name.partition(".")[0] for name in start.tensors("optimizer")} == {"head"}
    expected, actual = phase.state_bytes()
    assert expected > 0
    assert actual >= expected


def test_a_phase_restores_only_the_states_of_its_rank() -> None:
    """Another rank owns the other parameters. The checkpoint contains the state of both ranks."""

    class Half(Parallel):
        def owned_parameters(self, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
            return {name: weight for name, weight in named.items() if name.startswith("head")}

    phase, _ = training()
    next(phase.updates(iter([micro(points())])))
    start = save_and_read(phase)
    again, _ = training(update=1, parallel=Half(ALONE))
    again.load(start)
    assert {*again.owned} == {"head.weight"}
    mine = save_and_read(again)
    assert {name.partition(".")[0] for name in mine.tensors("optimizer")} == {"head"}
    for name, tensor in mine.tensors("optimizer").items():
        assert torch.equal(tensor, start.tensors("optimizer")[name])


@pytest.mark.parametrize(
    ("skipped", "skipped_before", "update", "fails"),
    [(4, 0, 4, True), (5, 1, 4, True), (1, 0, 1, True), (4, 1, 4, False), (3, 0, 4, False), (0, 0, 0, False)],
)
def test_skipping_all_updates_of_a_phase_is_an_error(
    skipped: int, skipped_before: int, update: int, fails: bool
) -> None:
    phase, parts = training(update=update)
    phase.position.skipped_before = skipped_before
    parts.precision.num_skipped = lambda: skipped
    if fails:
        with pytest.raises(NumericError):
            phase.close()
    else:
        assert phase.close() == {}


@pytest.mark.parametrize(("name", "factor"), [("val/accuracy", 0.5), ("val/loss", 1.0)])
def test_a_schedule_observes_only_its_metric(name: str, factor: float) -> None:
    phase, _ = training(
        None, "scheduler=plateau", "scheduler.metric=val/accuracy", "scheduler.gamma=0.5", "scheduler.patience=0"
    )
    for _ in range(2):
        phase.observe({name: 1.0})
    assert phase.training.schedule.factor(4) == factor


def test_the_state_of_a_schedule_is_restored() -> None:
    settings = ("scheduler=plateau", "scheduler.gamma=0.5", "scheduler.patience=0")
    phase, _ = training(None, *settings, update=3)
    next(phase.updates(iter([micro(points())])))
    for _ in range(2):
        phase.observe({"val/loss": 1.0})
    again, _ = training(None, *settings)
    assert again.training.schedule.factor(4) == 1.0
    again.load(save_and_read(phase))
    assert again.training.schedule.factor(4) == 0.5
    assert again.training.schedule.state() == phase.training.schedule.state()


@pytest.mark.parametrize("has_phase_values", [False, True])
def test_a_plateau_state_of_an_earlier_version_keeps_its_level(has_phase_values: bool) -> None:
    """This state does not name the metric. If the task declares phases, the values have no key `scheduler`."""
    phase, _ = training(None, "scheduler=plateau")
    start = save_and_read(phase)
    start.state["schedule"] = {"level": 0.5, "best": 1.0, "num_bad": 0, "rest": 0}
    start.state["values"] = {"phase.train.scheduler" if has_phase_values else "scheduler": "plateau"}
    phase.load(start)
    assert phase.training.schedule.factor(4) == 0.5


def test_the_strategy_is_notified_of_trained_parameters_and_phase_end() -> None:
    class Recorded(Parallel):
        calls: list[Any]

        def begin(self, parameters: Sequence[nn.Parameter]) -> None:
            self.calls = [[weight.shape for weight in parameters]]

        def end(self) -> None:
            self.calls.append("end")

    parallel = Recorded(ALONE)
    phase, parts = training(["body"], parallel=parallel)
    assert parallel.calls == [[(2, 3), (2,)]]
    next(phase.updates(iter([micro(points())])))
    for weight in phase.owned.values():
        weight.grad = torch.zeros_like(weight)
    phase.release()
    assert parallel.calls[1:] == ["end"]
    assert all(weight.grad is None for weight in parts.bare.parameters())


def test_a_phase_without_a_length_setting_has_one_epoch() -> None:
    parts = parts_of(Points())
    phase = replace(parts.plan.phases[0], updates=None, epochs=None)
    kind = LossPhase(phase, parts, order(3), Position("train"))
    assert kind.total == 3
    assert kind.attention == {}
    assert type(kind.training.update_wrapper) is UpdateWrapper


def test_a_loss_of_the_phase_replaces_the_loss_of_the_task() -> None:
    class Named(Points):
        @property
        def losses(self) -> Any:
            return {"train": self.other}

        def other(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
            total, count = self.loss(model, batch)
            return total * 0.0 + 3.0 * count, count

    phase, _ = training(task=Named())
    assert phase.task_losses.keys() == {""}
    assert loss_of(next(phase.updates(iter([micro(points())])))) == 24.0


def test_a_coupled_loss_is_not_additive() -> None:
    class Pairs(Task):
        def __init__(self) -> None:
            self.model = nn.Linear(3, 2)

        def embed(self, model: nn.Module, batch: Tensor) -> Tensor:
            result: Tensor = model(batch)
            return result

        def couple(self, embeddings: Tensor) -> tuple[Tensor, int]:
            return (embeddings @ embeddings.T).square().sum(), len(embeddings)

    phase, parts = training(task=Pairs())
    assert not phase.is_additive
    assert training()[0].is_additive
    codes = parts.model(points()).detach()
    info = next(phase.updates(iter([micro(points()[:3], last=False), micro(points()[3:])])))
    assert loss_of(info) == pytest.approx(float((codes @ codes.T).square().sum()))
    assert int(info.items) == 8


# ---------------------------------------------------------------- statistics


class Mean(Fit):
    def start(self) -> State:
        return {"total": torch.zeros(3), "count": torch.zeros(())}

    def add(self, model: nn.Module, state: State, batch: Tensor) -> tuple[State, int]:
        assert not torch.is_grad_enabled()
        return {"total": state["total"] + batch.sum(0), "count": state["count"] + len(batch)}, len(batch)

    def merge(self, one: State, other: State) -> State:
        return {name: one[name] + other[name] for name in one}

    def finish(self, model: nn.Module, state: State) -> Mapping[str, float]:
        return {"first": float(state["total"][0] / state["count"]), "count": state["count"]}  # type: ignore[dict-item]


def fit_phase(
    fit: Any, *, updates: int = 2, update: int = 0, world: World = ALONE, shares: tuple[int, ...] = (), **others: Any
) -> StatisticsPhase:
    class Fitted(Points):
        @property
        def fits(self) -> Mapping[str, Fit]:
            return {"statistics": fit} if fit is not None else {}

    task, phase = Fitted(), SimpleNamespace(name="statistics")
    position = Position("statistics", update)
    parts, updates_of = parts_of(task, world=world, **others), order(updates, shares=shares)
    return StatisticsPhase(phase, parts, updates_of, position)  # type: ignore[arg-type]


def batches_of(world: World = ALONE) -> Iterator[MicroBatch]:
    """Yield two updates: two micro-batches with a bad sample each, then a dummy micro-batch and another one."""
    x = points(20, seed=world.rank)
    yield micro(x[:4], last=False, bad=((4, "is damaged"),))
    yield micro(x[4:8], bad=((9, "is damaged"),))
    yield micro(x[8:12], last=False, is_counted=False)
    yield micro(x[12:15])


def items(info: StepInfo) -> float:
    return float(info.items)


def test_a_fit_reads_the_data_once_and_returns_its_result() -> None:
    phase = fit_phase(Mean())
    result = [*phase.updates(batches_of())]
    assert [(info.update, items(info), info.loss_sum, info.lr, info.grad_norm) for info in result] == [
        (1, 8.0, None, None, None), (2, 3.0, None, None, None),
    ]  # fmt: skip
    assert [info.bad for info in result] == [((4, "is damaged"), (9, "is damaged")), ()]
    x = torch.cat([points(20)[:8], points(20)[12:15]])
    assert phase.close() == {"first": pytest.approx(float(x.mean(0)[0])), "count": 11.0}
    assert (phase.total, phase.has_interim_evaluation) == (2, False)
    assert phase.start_lines() == []
    assert (phase.state_bytes(), phase.first_gradients(), [*phase.trained_names], phase.attention) == (
        (0, 0),
        {},
        [],
        {},
    )


def test_the_parts_of_a_fit_are_timed() -> None:
    laps: list[Any] = []
    parallel: Any = Parallel(ALONE)
    parallel.stopwatch = SimpleNamespace(lap=laps.append, stop=laps.append)
    next(fit_phase(Mean(), parallel=parallel).updates(batches_of()))
    assert laps == ["hooks", "data", "forward", "data", "forward", "forward", 1]


def test_a_resumed_fit_restores_its_state_only_on_the_first_rank() -> None:
    phase = fit_phase(Mean())
    all_batches = [*batches_of()]
    next(phase.updates(iter(all_batches)))
    start = save_and_read(phase)
    again = fit_phase(Mean(), update=1)
    again.load(start)
    assert [info.update for info in again.updates(iter(all_batches[2:]))] == [2]
    assert float(again.close()["count"]) == 11.0
    other = fit_phase(Mean(), world=replace(ALONE, rank=1))
    other.load(start)
    assert float(other.gathered["count"]) == 0.0
    phase.release()
    assert phase.gathered == {}


@pytest.mark.parametrize(("update", "expected"), [(1, [[1.0, 4.0], [3.0, 0.0]]), (2, [[4.0, 4.0], [0.0, 0.0]])])
def test_a_fit_resumed_on_equally_many_ranks_restores_each_rank(update: int, expected: list[list[float]]) -> None:
    """Continuing from merged sums would change the order of additions and thus the rounding.

    The checkpoint of a finished phase, after two updates, has only the merged state.
    """

    def read_counts(world: World) -> list[float]:
        phase = fit_phase(Mean(), world=world, parallel=Replicated(world), shares=(1, 1), update=update)
        phase.gathered["count"] += 1 + 2 * world.rank
        tensors, state = phase.state(lambda tensor: tensor.clone())
        values = {stem: {name: tensor.tolist() for name, tensor in named.items()} for stem, named in tensors.items()}
        values, state = world.broadcast([values, state])  # all ranks read the checkpoint of rank 0
        stored = {stem: {name: torch.tensor(value) for name, value in named.items()} for stem, named in values.items()}
        start: Any = SimpleNamespace(tensors=stored.__getitem__, state=state)
        resumed = []
        for shares in ((1, 1), (1, 1, 1)):
            again = fit_phase(Mean(), world=world, parallel=Replicated(world), shares=shares, update=update)
            again.load(start)
            resumed.append(float(again.gathered["count"]))
        return resumed

    assert run_ranks(read_counts, 2) == expected


@pytest.mark.parametrize("others_count", [True, False])
def test_fit_items_are_summed_over_ranks_that_count_samples(others_count: bool) -> None:
    def run_fit(world: World) -> list[Any]:
        parallel = Parallel(world)
        parallel.counts_samples = others_count or world.is_first
        result = [*fit_phase(Mean(), world=world, parallel=parallel).updates(batches_of(world))]
        return [[items(info) for info in result], [len(info.bad) for info in result]]

    factor = 1 + others_count
    first, second = run_ranks(run_fit, 2)
    assert first[0] == second[0] == [8.0 * factor, 3.0 * factor]
    assert (first[1], second[1]) == ([2, 0], [2, 0] if others_count else [0, 0])


def test_a_fit_missing_from_the_task_is_rejected() -> None:
    with pytest.raises(TaskFault) as caught:
        fit_phase(None)
    assert "statistics" in caught.value.problems[0].fix


@pytest.mark.parametrize("answer", [None, ({},), ({}, 1, 2), ([], 1), ({}, 1.0)], ids=str)
def test_an_invalid_return_value_of_add_is_rejected(answer: Any) -> None:
    class Wrong(Mean):
        def add(self, model: nn.Module, state: State, batch: Tensor) -> Any:
            return answer

    with pytest.raises(TaskFault):
        next(fit_phase(Wrong()).updates(batches_of()))


@pytest.mark.parametrize("state", [None, [torch.zeros(3)], {"total": 1.0}, {0: torch.zeros(3)}], ids=str)
def test_fit_states_other_than_dicts_of_tensors_are_rejected(state: Any) -> None:
    class Start(Mean):
        def start(self) -> Any:
            return state

    class Add(Mean):
        def add(self, model: nn.Module, state_before: State, batch: Tensor) -> Any:
            return state, len(batch)

    class Merge(Mean):
        def merge(self, one: State, other: State) -> Any:
            return state

    class TwoStates(Parallel):
        def merge_state(self, merge: Callable[[State, State], State], mine: State) -> State:
            return merge(mine, mine)

    with pytest.raises(TaskFault):
        fit_phase(Start())
    with pytest.raises(TaskFault):
        next(fit_phase(Add()).updates(batches_of()))
    merged = fit_phase(Merge(), parallel=TwoStates(ALONE))
    with pytest.raises(TaskFault):
        merged.close()


def test_a_count_of_items_for_each_sample_is_rejected() -> None:
    class PerSample(Mean):
        def add(self, model: nn.Module, state: State, batch: Tensor) -> Any:
            return state, torch.ones(len(batch))

    with pytest.raises(TaskFault):
        next(fit_phase(PerSample()).updates(batches_of()))


def test_the_number_of_items_can_be_a_tensor() -> None:
    class Counted(Mean):
        def add(self, model: nn.Module, state: State, batch: Tensor) -> Any:
            return state, torch.tensor(len(batch))

    assert [items(info) for info in fit_phase(Counted()).updates(batches_of())] == [8.0, 3.0]


@pytest.mark.parametrize("answer", [{"mean": "large"}, {"mean": torch.zeros(2)}, 3.0, {"mean": None}], ids=str)
def test_an_invalid_return_value_of_finish_is_rejected(answer: Any) -> None:
    class Wrong(Mean):
        def finish(self, model: nn.Module, state: State) -> Any:
            return answer

    with pytest.raises(TaskFault):
        fit_phase(Wrong()).close()


def test_the_finish_method_of_a_fit_can_return_none() -> None:
    class Silent(Mean):
        def finish(self, model: nn.Module, state: State) -> Any:
            return None

    assert fit_phase(Silent()).close() == {}


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("epochs", "updates_per_epoch", "updates"), [(1, 7, 7), (1.1, 100, 110), (0.5, 3, 2), (1e-9, 10, 1), (2.01, 10, 21)]
)
def test_epochs_are_converted_to_updates_in_decimal_and_rounded_up(
    epochs: float, updates_per_epoch: int, updates: int
) -> None:
    assert count_updates(epochs, updates_per_epoch) == updates


@pytest.mark.parametrize(("settings", "total"), [((), 4), (("updates=null", "epochs=2.5"), 8)])
def test_phase_length_is_set_in_updates_or_epochs(settings: tuple[str, ...], total: int) -> None:
    assert training(None, *settings)[0].total == total


@pytest.mark.parametrize(
    ("num_samples", "items_per_sample", "weight"), [(20, 1.0, 1 / 8), (20, 4.0, 1 / 32), (5, 2.0, 0.1)]
)
def test_gradients_are_scaled_by_the_items_of_an_update(
    num_samples: int, items_per_sample: float, weight: float
) -> None:
    task = Points()
    task.items_per_sample = items_per_sample
    phase: PhasePlan = plan_of().phases[0]
    result = weight_per_item(phase, parts_of(task), order(num_samples=num_samples))
    assert math.isclose(result, weight)


@pytest.mark.parametrize(
    "call", [lambda kind: kind.updates(iter(())), lambda kind: kind.state(Tensor.clone), lambda kind: kind.load(None)]
)
def test_a_phase_kind_must_define_updates_state_and_load(call: Callable[[PhaseKind], object]) -> None:
    with pytest.raises(NotImplementedError):
        call(PhaseKind())
