"""Members of a LightningModule that the adapter does not use are reported by name before training."""

from __future__ import annotations

import ast
import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from runner.adapters import lightning as adapter
from runner.adapters.lightning import (
    LightningTask,
    configure,
    configured_optimizer,
    configured_schedule,
    count_samples,
)
from runner.base.errors import TaskFault
from runner.base.foreign_methods import LIGHTNING_UNSUPPORTED
from runner.distributed.world import World
from tests.distributed.ranks import CPU, run_ranks
from tests.rounding import allowed

# members that the adapter calls
CALLED = {
    "forward", "training_step", "validation_step", "test_step", "predict_step", "configure_optimizers",
    "train_dataloader", "val_dataloader", "test_dataloader", "prepare_data", "setup", "on_fit_start",
    "on_train_start", "on_train_epoch_start", "log", "log_dict",
}  # fmt: skip
# `accel-run inference` reads the loaders of the other splits
PREDICTION = {
    "predict_dataloader", "on_predict_start", "on_predict_end", "on_predict_batch_start",
    "on_predict_batch_end", "on_predict_model_eval", "on_predict_epoch_start", "on_predict_epoch_end",
}  # fmt: skip
# methods that a module calls but does not define
TOOLS = {
    "optimizers", "lr_schedulers", "print", "all_gather", "toggle_optimizer", "untoggle_optimizer",
    "toggled_optimizer", "freeze", "unfreeze", "to_onnx", "to_torchscript", "to_tensorrt",
}  # fmt: skip


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        result: Tensor = self.net(batch).square().mean()
        return result

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(list(torch.ones(8, 2)), batch_size=4)


def with_methods(**methods: Any) -> nn.Module:
    module: nn.Module = type("Lit", (Module,), methods)()
    return module


@pytest.mark.parametrize("name", LIGHTNING_UNSUPPORTED)
def test_a_method_that_is_never_called_is_named(name: str) -> None:
    with pytest.raises(TaskFault) as caught:
        LightningTask(with_methods(**{name: lambda self, *args: None}))
    (problem,) = caught.value.problems
    assert f"Lit.{name}" in problem.what
    assert problem.fix == LIGHTNING_UNSUPPORTED[name]


def test_all_lightning_methods_are_called_or_rejected() -> None:
    hooks = pytest.importorskip("lightning.pytorch.core.hooks", reason="the package lightning is not installed")
    lightning = pytest.importorskip("lightning")
    kinds = (hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks, lightning.LightningModule)
    names = {
        name for kind in kinds for name, value in vars(kind).items() if callable(value) and not name.startswith("_")
    }
    assert names - CALLED - PREDICTION - TOOLS == {name for name in LIGHTNING_UNSUPPORTED if name in names}


def test_hooks_are_called_as_often_as_by_the_trainer_of_lightning() -> None:
    """Hooks before training are called once, and `on_train_epoch_start` at the first update of each epoch."""
    from runner.base.task import Progress

    calls: list[str] = []
    names = ("prepare_data", "setup", "on_fit_start", "on_train_start", "on_train_epoch_start")
    task = LightningTask(with_methods(**{name: lambda self, *args, name=name: calls.append(name) for name in names}))
    configured_optimizer(list(task.model.named_parameters()))
    task.begin_phase("train")
    for update, epoch in enumerate((0.0, 0.5, 1.0, 1.5)):
        task.begin_update(Progress("train", update, 4, epoch))
    assert calls == [*names, "on_train_epoch_start"]


def test_on_train_epoch_start_is_called_once_after_a_resume() -> None:
    """The run is resumed within an epoch."""
    from runner.base.task import Progress

    calls: list[int] = []
    task = LightningTask(with_methods(on_train_epoch_start=lambda self: calls.append(self.trainer.global_step)))
    configured_optimizer(list(task.model.named_parameters()))
    task.begin_phase("train")
    for update in (1, 1, 2):
        task.begin_update(Progress("train", update, 4, update / 4))
    assert calls == [1]


def test_an_unused_optimizer_of_the_module_is_reported_once() -> None:
    from runner.base.task import Progress

    task = LightningTask(Module())
    task.begin_update(Progress("train", 0, 2, 0.0))  # inference calls begin_update once; a warning would fail the test
    with pytest.warns(UserWarning, match="Module.configure_optimizers"):
        task.begin_update(Progress("train", 1, 2, 0.5))
    task.begin_update(Progress("train", 2, 2, 1.0))


@pytest.mark.parametrize("uses_schedule", [True, False])
def test_an_unused_schedule_of_the_module_is_reported(uses_schedule: bool) -> None:
    from runner.base.task import Progress

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halve(optimizer), "interval": "step"}}

    def halve(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    task = LightningTask(with_methods(configure_optimizers=configure_optimizers))
    configured_optimizer(list(task.model.named_parameters()))
    with contextlib.ExitStack() as stack:
        if uses_schedule:
            configured_schedule(2)  # from here on, a warning fails the test
        else:
            stack.enter_context(pytest.warns(UserWarning, match="schedule of Lit.configure_optimizers"))
        for update in range(2):
            task.begin_update(Progress("train", update, 2, update / 2))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sampler": WeightedRandomSampler([1.0, 2.0], 8)}, "WeightedRandomSampler.*use sampler=weighted"),
        ({"batch_sampler": type("Buckets", (BatchSampler,), {})(range(8), 2, False)}, "the Buckets of"),
        ({"sampler": RandomSampler(range(8), num_samples=4)}, "RandomSampler"),
        ({"shuffle": True}, ""),
        ({}, ""),
    ],
)
def test_an_unused_sampler_of_the_module_is_reported(options: dict[str, Any], named: str) -> None:
    from runner.base.task import Progress

    data = list(torch.ones(8, 2))
    task = LightningTask(with_methods(train_dataloader=lambda self: DataLoader(data, **options)))
    configured_optimizer(list(task.model.named_parameters()))
    with pytest.warns(UserWarning, match=named) if named else contextlib.nullcontext():
        for update in range(2):
            task.begin_update(Progress("train", update, 2, update / 2))


def test_weights_of_the_modules_sampler_are_used() -> None:
    from runner.base.task import Progress

    def train_dataloader(self: Any) -> Any:
        return DataLoader(list(torch.ones(2, 2)), sampler=WeightedRandomSampler([1.0, 3.0], 8))

    task = LightningTask(with_methods(train_dataloader=train_dataloader))
    configured_optimizer(list(task.model.named_parameters()))
    assert task.sample_weights(task.dataset("train")) == [1.0, 3.0]
    for update in range(2):  # a warning would fail the test
        task.begin_update(Progress("train", update, 2, update / 2))
    with pytest.raises(TaskFault, match="no WeightedRandomSampler"):
        LightningTask(Module()).sample_weights([])


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(3, 2),
        {"names": ["a", "b", "c"], "number": torch.tensor(7), "picture": torch.ones(3, 2)},
        (["a", "b", "c"], 5, None, [torch.ones(3), torch.ones(3)]),
    ],
)
def test_the_first_tensor_of_a_batch_counts_its_samples(batch: Any) -> None:
    assert count_samples(batch) == 3


@pytest.mark.parametrize("batch", [["a", "b"], {}, object()])
def test_a_batch_without_a_tensor_needs_a_number_of_items(batch: Any) -> None:
    with pytest.raises(TaskFault, match="items=function"):
        count_samples(batch)


def test_device_and_dtype_of_a_module_are_those_of_its_weights() -> None:
    """In Lightning, `to` of the module sets them. The runner moves the module that contains it instead."""
    lightning = pytest.importorskip("lightning", reason="the package lightning is not installed")
    task = LightningTask(type("Lit", (Module, lightning.LightningModule), {})())
    task.model.to(torch.float64)
    task.begin_phase("train")
    assert (task.module.device, task.module.dtype) == (torch.device("cpu"), torch.float64)


def test_a_missing_trainer_attribute_lists_the_available_ones() -> None:
    task = LightningTask(Module())
    with pytest.raises(AttributeError, match=r"callback_metrics.*is_global_zero.*max_epochs"):
        task.trainer.callback_metrics  # noqa: B018


def test_the_trainer_reports_rank_and_world_size() -> None:
    def describe(world: World) -> list[Any]:
        trainer = LightningTask(Module()).trainer
        return [trainer.global_rank, trainer.world_size, trainer.is_global_zero]

    assert describe(World(CPU)) == [0, 1, True]
    assert run_ranks(describe, 2) == [[0, 2, True], [1, 2, False]]


def test_the_schedule_of_the_module_requires_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    # lint-tests: private: forgets an optimizer that earlier tests have configured
    monkeypatch.setattr(adapter, "_configured", {})
    with pytest.raises(TaskFault):
        configured_schedule(2)


@pytest.mark.parametrize(
    ("methods", "named"),
    [
        ({"automatic_optimization": False}, "automatic_optimization"),
        ({"train_dataloader": lambda self: [Module().train_dataloader()] * 2}, "train_dataloader"),
    ],
)
def test_an_unsupported_module_is_rejected_by_its_constructor(methods: dict[str, Any], named: str) -> None:
    with pytest.raises(TaskFault, match=named):
        LightningTask(with_methods(**methods))


@pytest.mark.parametrize("name", ["training_step", "train_dataloader", "configure_optimizers"])
def test_a_missing_method_is_named(name: str) -> None:
    methods = {key: value for key, value in vars(Module).items() if callable(value) and key not in (name, "__init__")}
    with pytest.raises(TaskFault, match=name):
        LightningTask(type("Lit", (nn.Module,), methods)())


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "answer",
    [
        lambda self: [sgd(self), sgd(self)],
        lambda self: ([sgd(self), sgd(self)], []),
        lambda self: None,
        lambda self: {"lr_scheduler": None},
    ],
    ids=["two", "two with schedules", "none", "no optimizer"],
)
def test_configure_optimizers_must_return_one_optimizer(answer: Any) -> None:
    with pytest.raises(TaskFault):
        configure(with_methods(configure_optimizers=answer))


@pytest.mark.parametrize("is_manual", [True, False])
def test_several_optimizers_suggest_objectives(is_manual: bool) -> None:
    def configure_optimizers(self: Any) -> Any:
        adam = torch.optim.Adam(self.net.parameters(), lr=0.5, betas=(0.5, 0.9), weight_decay=0.25)
        sgd = torch.optim.SGD(self.other.parameters(), lr=0.25)
        schedule = torch.optim.lr_scheduler.StepLR(adam, 10)
        return ([adam, sgd], [schedule]) if is_manual else [{"optimizer": adam, "lr_scheduler": schedule}, sgd]

    module = with_methods(configure_optimizers=configure_optimizers)
    module.other, module.automatic_optimization = nn.Linear(2, 1), not is_manual  # type: ignore[assignment]
    with pytest.raises(TaskFault) as caught:
        configure(LightningTask(module).module)
    declared = caught.value.problems[0].fix.partition("OBJECTIVES = ")[2]
    assert ast.literal_eval(declared) == {
        "net": {
            "trains": ["net"],
            "optimizer": "adam",
            "optimizer.lr": 0.5,
            "optimizer.betas": [0.5, 0.9],
            "optimizer.weight_decay": 0.25,
            "optimizer.decay_1d": True,
        },
        "other": {"trains": ["other"], "optimizer": "sgd", "optimizer.lr": 0.25, "optimizer.momentum": 0},
    }


def test_suggested_objectives_name_the_trained_submodules() -> None:
    def configure_optimizers(self: Any) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.5) for part in (self.net[0], self.net[1], self.other)]

    module = with_methods(configure_optimizers=configure_optimizers)
    module.net, module.other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), nn.Linear(1, 1)  # type: ignore[assignment]
    with pytest.raises(TaskFault) as caught:
        configure(LightningTask(module).module)
    declared = ast.literal_eval(caught.value.problems[0].fix.partition("OBJECTIVES = ")[2])
    assert {name: options["trains"] for name, options in declared.items()} == {
        "net_0": ["net.0"], "net_1": ["net.1"], "other": ["other"],
    }  # fmt: skip


def test_suggested_objectives_list_unsupported_settings() -> None:
    """Options cannot express these settings."""

    def configure_optimizers(self: Any) -> Any:
        groups = [{"params": self.net.weight}, {"params": self.net.bias, "lr": 0.125}]
        adam = torch.optim.Adam(groups, lr=0.5, amsgrad=True, foreach=False)
        sgd = torch.optim.SGD([{"params": self.other.parameters(), "momentum": 0.75}], lr=0.5, maximize=False)
        torch.optim.lr_scheduler.OneCycleLR(rmsprop := torch.optim.RMSprop(self.third.parameters(), lr=0.5), 1.0, 8)
        return [adam, sgd, rmsprop]

    module = with_methods(configure_optimizers=configure_optimizers)
    module.other, module.third = nn.Linear(1, 1), nn.Linear(1, 1)  # type: ignore[assignment]
    with pytest.raises(TaskFault) as caught:
        configure(LightningTask(module).module)
    fix = caught.value.problems[0].fix
    notes = [line.partition("#")[2] for line in fix.splitlines() if '"trains"' in line]
    words = ("amsgrad", "lr", "foreach", "momentum", "maximize")
    assert [{word for word in words if word in note} for note in notes] == [{"amsgrad", "lr"}, set(), set()]
    declared = ast.literal_eval(fix.partition("OBJECTIVES = ")[2])
    assert declared["other"]["optimizer.momentum"] == 0.75


def test_a_template_is_suggested_if_optimizers_share_a_parameter() -> None:
    def configure_optimizers(self: Any) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.5), torch.optim.SGD(self.net.parameters(), lr=0.5)]

    with pytest.raises(TaskFault) as caught:
        configure(LightningTask(with_methods(configure_optimizers=configure_optimizers)).module)
    declared = ast.literal_eval(caught.value.problems[0].fix.partition("OBJECTIVES = ")[2])
    assert [*declared] == ["NAME"]


def by_epoch(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def different(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5**step])


def one_cycle(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=4, **options)


def test_a_schedule_with_one_step_per_update_is_used() -> None:
    def configure_optimizers(self: Any) -> Any:
        optimizer = sgd(self)
        return [optimizer], [{"scheduler": one_cycle(optimizer, cycle_momentum=False), "interval": "step"}]

    task = LightningTask(with_methods(configure_optimizers=configure_optimizers))
    rate = configured_optimizer(list(task.model.named_parameters())).param_groups[0]["lr"]
    factor = configured_schedule(4)
    optimizer = sgd(Module())
    schedule = one_cycle(optimizer, cycle_momentum=False)
    for update in range(4):  # the factor is a quotient, so there are two rounding errors
        wanted = optimizer.param_groups[0]["lr"]
        assert rate * factor(update) == pytest.approx(wanted, rel=allowed(torch.float64, 2))
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(
    ("schedule", "epochs"),
    [(torch.optim.lr_scheduler.ReduceLROnPlateau, 2.0), (by_epoch, None), (different, 2.0), (one_cycle, 4.0)],
    ids=["plateau", "epochs unknown", "factors of groups", "momentum"],
)
def test_unsupported_schedules_are_rejected(schedule: Any, epochs: float | None) -> None:
    def configure_optimizers(self: Any) -> Any:
        groups = [{"params": [weight]} for weight in self.net.parameters()]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return [optimizer], [schedule(optimizer)]

    task = LightningTask(with_methods(configure_optimizers=configure_optimizers))
    configured_optimizer(list(task.model.named_parameters()))
    with pytest.raises(TaskFault):
        configured_schedule(4, epochs)


@pytest.mark.parametrize("value", [nn.Linear(1, 1), "text", None], ids=["module", "text", "none"])
def test_only_numbers_can_be_logged(value: Any) -> None:
    def training_step(self: Any, batch: Any, batch_index: int) -> Any:
        self.log("score", value)
        return self.net(batch).mean()

    task = LightningTask(with_methods(training_step=training_step))
    with pytest.raises(TaskFault, match="score"):
        task.loss(task.model, torch.ones(4, 2))


@pytest.mark.parametrize("result", [None, 1.0, {"preds": 1}], ids=["none", "number", "no loss"])
def test_a_training_step_without_a_loss_is_rejected(result: Any) -> None:
    task = LightningTask(with_methods(training_step=lambda self, batch, batch_index: result))
    with pytest.raises(TaskFault, match="training_step"):
        task.loss(task.model, torch.ones(4, 2))


@pytest.mark.parametrize("log", ["log", "log_dict"])
def test_a_reduction_other_than_the_mean_is_rejected(log: str) -> None:
    def training_step(self: Any, batch: Any, batch_index: int) -> Any:
        values: Any = {"score": 1.0}
        getattr(self, log)(*(["score", 1.0] if log == "log" else [values]), reduce_fx="max")
        return self.net(batch).mean()

    task = LightningTask(with_methods(training_step=training_step))
    with pytest.raises(TaskFault, match="score"):
        task.loss(task.model, torch.ones(4, 2))


def test_test_metrics_have_no_prefix() -> None:
    """The test split must be set up."""

    def setup(self: Any, stage: str) -> None:
        setattr(self, f"{stage}_set", list(torch.ones(8, 2)))

    def test_step(self: Any, batch: Any, batch_index: int) -> Any:
        self.log("test_mean", batch.mean())
        return self.validation_step(batch, batch_index)

    def validation_step(self: Any, batch: Any, batch_index: int) -> Any:
        self.log("val_sum", batch.sum())
        return {"predictions": self.net(batch)}

    methods = {"setup": setup, "test_step": test_step, "validation_step": validation_step}
    loader = {"test_dataloader": lambda self: DataLoader(self.test_set, batch_size=4)}
    task = LightningTask(with_methods(**methods, **loader))
    dataset = task.dataset("test")
    evaluated = task.evaluate(task.model, torch.stack([dataset[0], dataset[1]]))
    assert {name: float(total / count) for name, (total, count) in evaluated.items()} == {"mean": 1.0, "sum": 4.0}


def test_metrics_that_differ_only_in_their_prefix_are_reported() -> None:
    def test_step(self: Any, batch: Any, batch_index: int) -> Any:
        for name, value in (("val_x", 1.0), ("test_x", 2.0), ("val_y", 3.0), ("y", 4.0)):
            self.log(name, value)

    task = LightningTask(with_methods(test_step=test_step, test_dataloader=lambda self: DataLoader([torch.ones(2)])))
    task.dataset("test")
    evaluated = task.evaluate(task.model, torch.ones(2, 2))
    values = {name: float(total / count) for name, (total, count) in evaluated.items()}
    assert values == {"x": 2.0, "val_x": 1.0, "y": 4.0, "val_y": 3.0}


class Overridden(LightningTask):
    def metrics(self, split: str) -> dict[str, Any]:
        return {}


def build_logging_module(step: str) -> nn.Module:
    """Return a module that logs a metric of torchmetrics in `step`."""
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

    def log(self: Any, batch: Any, batch_index: int) -> Any:
        self.score.update(batch.mean())
        self.log("val_score", self.score)
        return self.net(batch).mean()

    module = with_methods(**{step: log})
    module.score = torchmetrics.MeanMetric()
    return module


def test_a_metric_only_updated_in_training_is_rejected() -> None:
    task = LightningTask(build_logging_module("training_step"))
    with pytest.raises(TaskFault, match="val_score"):
        task.loss(task.model, torch.ones(4, 2))


@pytest.mark.parametrize("is_collection", [False, True])
def test_training_metrics_log_batch_values_without_state(is_collection: bool) -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

    def training_step(self: Any, batch: Any, batch_index: int) -> Any:
        self.score(batch.mean())
        if is_collection:
            self.log_dict(self.score)
        else:
            self.log("MeanMetric", self.score)
        return self.net(batch).mean()

    module = with_methods(training_step=training_step)
    members = [torchmetrics.MeanMetric(), torchmetrics.MaxMetric()][: 1 + is_collection]
    module.score = torchmetrics.MetricCollection(members) if is_collection else members[0]
    task = LightningTask(module)
    for value in (4.0, 1.0):
        _, _, logged = task.loss(task.model, torch.full((3, 2), value))  # type: ignore[misc]
        assert len(logged) == len(members)
        assert {float(total / count) for total, count in logged.values()} == {value}
        assert not any(member.update_called for member in members)


def test_a_metric_missing_from_metrics_is_rejected() -> None:
    for kind in (LightningTask, Overridden):
        task = kind(build_logging_module("validation_step"))
        metrics = task.metrics("val")
        if metrics:
            assert metrics.keys() <= task.evaluate(task.model, torch.ones(4, 2)).keys()
        else:
            with pytest.raises(TaskFault, match="val_score"):
                task.evaluate(task.model, torch.ones(4, 2))


def test_a_step_leaves_no_state_in_the_metrics() -> None:
    """Otherwise, lists of predictions would grow, and `compute` in a step would include earlier batches."""
    module = build_logging_module("validation_step")
    task = LightningTask(module)
    task.metrics("val")
    for value in (1.0, 3.0):
        task.evaluate(task.model, torch.full((4, 2), value))
    assert float(module.score.compute()) == 3.0  # type: ignore[operator, union-attr]


def test_an_evaluation_does_not_reset_training_metrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

    def training_step(self: Any, batch: Any, batch_index: int) -> Any:
        self.running.update(batch.mean())
        self.log("running", self.running.compute())
        return self.net(batch).mean()

    def validation_step(self: Any, batch: Any, batch_index: int) -> None:
        self.score.update(batch.mean())
        self.log("score", self.score)

    module = with_methods(training_step=training_step, validation_step=validation_step)
    module.running, module.score = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
    task = LightningTask(module)
    task.metrics("val")
    for value, mean in ((1.0, 1.0), (3.0, 2.0), (5.0, 3.0)):
        task.loss(task.model, torch.full((4, 2), value))
        assert float(module.running.compute()) == mean
        task.evaluate(task.model, torch.ones(4, 2))


def test_a_metric_with_logged_values_need_not_be_mergeable() -> None:
    """Calls of such a metric are not repeated, so it need not be possible to merge its states across ranks."""
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

    def validation_step(self: Any, batch: Any, batch_index: int) -> None:
        value = self.score(batch.mean())
        self.log("val_score", self.score if batch.mean() > 1 else value)

    module = with_methods(validation_step=validation_step)
    module.score = torchmetrics.MeanMetric()
    task = LightningTask(module)
    (name,) = task.metrics("val")
    evaluated: Any = task.evaluate(task.model, torch.ones(4, 2))
    assert not evaluated[name]["calls"]
    assert float(evaluated["score"][0]) == 4.0
    with pytest.raises(TaskFault, match="val_score"):
        task.evaluate(task.model, torch.full((4, 2), 2.0))
    task.metrics("val")  # starts another evaluation
    evaluated = task.evaluate(task.model, torch.full((4, 2), 2.0))
    assert len(evaluated[name]["calls"]) == 1
