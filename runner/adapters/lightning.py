"""Train a LightningModule with its steps, the datasets of its data loaders, its optimizer and its schedule.

The task file needs only a few lines: see docs/examples/own_lightning.py. Lightning need not be installed: any nn.Module
with these methods works. Methods that accel-run would never call are rejected by name when the task is built.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from runner.adapters.lightning_objectives import suggest_objectives
from runner.adapters.logged_metrics import LoggedMetrics, MetricRecorder
from runner.base.errors import TaskFault
from runner.base.foreign_methods import LIGHTNING_UNSUPPORTED
from runner.base.task import Dataset, Progress, Sum, Task
from runner.distributed.join import current_rank

_LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.", "lightning_fabric.")
_LOGGED = "logged"  # key of the logged torchmetrics objects in what `metrics` and `evaluate` return
_modules: WeakSet[nn.Module] = WeakSet()  # modules of the tasks of this process
_configured: dict[nn.Module, bool] = {}  # module whose optimizer was configured last -> its schedule is still unused


class LightningTask(Task):
    """A task from a LightningModule.

    The loss of `training_step` is a mean over the samples of the batch: it becomes a sum and a count, so the update
    does not depend on micro-batches, ranks and shares.

    Args:
        module: the LightningModule.
        items: batch -> number of items that the loss is a mean over, such as tokens; default: the samples.

    Raises TaskFault for methods that would never be called, and if training_step, train_dataloader or
    configure_optimizers is missing.
    """

    def __init__(self, module: nn.Module, *, items: Callable[[Any], int] | None = None) -> None:
        needed = ("training_step", "train_dataloader", "configure_optimizers")
        missing = [name for name in needed if not _has(module, name)]
        if missing:
            fix = "define it"
            if missing[0] == "train_dataloader":
                fix += "; if a LightningDataModule has it, set module.train_dataloader = data.train_dataloader"
            raise TaskFault(f"{type(module).__name__} has no {missing[0]}", fix=fix)
        if not getattr(module, "automatic_optimization", True):
            what = f"{type(module).__name__}.automatic_optimization is False, but accel-run steps the optimizer itself"
            raise TaskFault(what, fix=suggest_objectives(module))
        for name, fix in LIGHTNING_UNSUPPORTED.items():
            if _has(module, name):
                raise TaskFault(f"accel-run never calls {type(module).__name__}.{name}", fix=fix)
        self.module, self.items = module, items or count_samples
        self.trainer = TrainerStub()
        self.recorder = MetricRecorder(module)
        self.model = LightningSteps(module, self.trainer, self.recorder)
        self._collects = False  # whether the runner requested the metrics that steps log
        self._metric_names: dict[str, int] = {}  # reported name -> index of the metric, known after the first batch
        self._not_logged: set[int] = set()  # indices of metrics that a step of this evaluation has not logged
        self._num_begun = 0  # calls of `begin_update`
        self._epoch: int | None = None  # epoch of the last `begin_update` of this phase
        self._uses_weights = False
        self._loaders: dict[str, Any] = {}
        self._loader_collate: Callable[[Sequence[Any]], Any] | None = None  # what `collate` was set to
        _modules.add(module)
        self._call("prepare_data")
        self._call("setup", "fit")
        self._use_collate(self._loader("train"))

    def dataset(self, split: str) -> Dataset:
        loader = self._loader(split)
        if loader is None:
            raise NotImplementedError(f"the module has no {split}_dataloader")
        self._use_collate(loader)
        dataset: Dataset = loader.dataset
        return dataset

    def sample_weights(self, dataset: Any) -> Sequence[float]:
        """Return the weights of the WeightedRandomSampler of `train_dataloader`."""
        sampler = getattr(self._loaders.get("train"), "sampler", None)
        if not isinstance(sampler, WeightedRandomSampler):
            what = f"sampler=weighted: {type(self.module).__name__}.train_dataloader has no WeightedRandomSampler"
            raise TaskFault(what, fix="pass one to the DataLoader, or define sample_weights(self, dataset)")
        self._uses_weights = True
        weights: Sequence[float] = sampler.weights.tolist()
        return weights

    def loss(self, model: nn.Module, batch: Any) -> Sum:
        mean, logged = model("training_step", batch)
        if not isinstance(mean, Tensor):
            what = f"training_step must return the loss, a tensor, but returned {type(mean).__name__}"
            raise TaskFault(what, fix="return a loss for every batch; to skip a batch, return 0 times its loss")
        count = self.items(batch)
        named = {name: pair for name, pair in self._sums(logged, batch, "train").items() if name != "loss"}
        return (mean * count, count, named) if named else (mean * count, count)  # type: ignore[return-value]

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Sum]:
        step = "test_step" if self.split == "test" and _has(self.module, "test_step") else "validation_step"
        if not _has(self.module, step):
            return {"loss": self.loss(model, batch)[:2], **self._contribution()}
        mean, logged = model(step, batch)
        count = self.items(batch)
        sums: dict[str, Sum] = {} if mean is None else {"loss": (mean * count, count)}
        # A test_step may call validation_step, which logs with the prefix val.
        prefixes = ("test", "val") if step == "test_step" else ("val",)
        sums |= self._sums(logged, batch, *prefixes)
        for name, (short, _) in _shorten(self.recorder.logged, prefixes).items():
            self._metric_names[name if short in sums else short] = self.recorder.logged[name]
        return {**sums, **self._contribution()}

    def predict_batch(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:  # type: ignore[override]
        predicted, _ = model("predict_step", batch)
        if isinstance(predicted, Tensor):
            return {"prediction": predicted}
        if not isinstance(predicted, Mapping):
            what = f"predict_step must return a tensor or a dictionary, but returned {type(predicted).__name__}"
            raise TaskFault(what, fix='return {"label": scores.argmax(-1)}, with a value per sample')
        return predicted

    @property
    def predicts(self) -> Literal["predict", "predict_batch", ""]:
        is_own = type(self).predict_batch is not LightningTask.predict_batch
        is_missing = super().predicts == "predict_batch" and not is_own and not _has(self.module, "predict_step")
        return "" if is_missing else super().predicts

    def metrics(self, split: str) -> Mapping[str, Any]:
        metrics = self.recorder.metrics
        self._collects, self._metric_names, self._not_logged = bool(metrics), {}, set()
        names = self._metric_names
        return {_LOGGED: LoggedMetrics(metrics, lambda: names)} if metrics else {}

    def summarize(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        return {name.removeprefix(f"{_LOGGED}."): value for name, value in metrics.items()}

    def _contribution(self) -> dict[str, Any]:
        recorder = self.recorder
        if recorder.logged and not self._collects:
            what = f"self.log({next(iter(recorder.logged))!r}) received a metric that metrics(split) does not return"
            raise TaskFault(what, fix="return {**super().metrics(split), ...} from metrics(split)")
        # Only calls of logged metrics are repeated: if a step logs values that a metric has returned, but not the
        # metric, it need not be merged over ranks.
        logged = {*self._metric_names.values()}
        for name, index in recorder.logged.items():
            if index in self._not_logged:
                what = f"self.log({name!r}) received a metric that was also updated in a batch that did not log it"
                raise TaskFault(what, fix="log the metric in each step that updates it")
        self._not_logged |= {index for index, *_ in recorder.calls} - logged
        calls = [call for call in recorder.calls if call[0] in logged]
        return {_LOGGED: {"calls": calls}} if self._collects else {}

    def begin_phase(self, phase: str) -> None:
        super().begin_phase(phase)
        self._epoch = None
        _set_device(self.module)
        self._call("on_fit_start")
        self._call("on_train_start")

    def begin_update(self, progress: Progress) -> None:
        self._num_begun += 1
        if self._num_begun == 2:  # not at the first call: inference calls it, too, and has no optimizer
            self._warn_unused()
        is_new, self._epoch = int(progress.epoch) != self._epoch, int(progress.epoch)
        self.trainer.current_epoch, self.trainer.global_step = self._epoch, progress.update
        if is_new:
            self._call("on_train_epoch_start")

    def _warn_unused(self) -> None:
        """Warn if training does not use the optimizer, the schedule or the sampler of the module."""
        name, unused = type(self.module).__name__, "" if self.module in _configured else "optimizer"
        if unused or _configured[self.module]:
            warnings.warn(
                f"the {unused or 'schedule'} of {name}.configure_optimizers is not used, because the settings name"
                " another one; to use it, define OPTIMIZERS and SCHEDULERS as docs/examples/own_lightning.py does",
                stacklevel=2,
            )
        sampler = _find_sampler(self._loaders.get("train"))
        if sampler and not self._uses_weights:
            is_weighted = sampler == WeightedRandomSampler.__name__
            use = "use sampler=weighted, which draws with its weights" if is_weighted else "see docs/data.md#samplers"
            warnings.warn(
                f"the {sampler} of {name}.train_dataloader is not used, because the setting sampler determines the"
                f" order of the samples; {use}",
                stacklevel=2,
            )

    @property
    def split(self) -> str:
        """The split whose dataset was requested last."""
        return next(reversed(self._loaders), "train")

    def _sums(self, logged: Mapping[str, tuple[Tensor, int | None]], batch: Any, *prefixes: str) -> dict[str, Sum]:
        """Return logged means as sums and counts, without the prefix of their split where names remain unique."""
        shortened = _shorten(logged, prefixes)
        sums: dict[str, Sum] = {}
        for name in sorted(logged, key=lambda name: shortened[name][1]):
            value, size = logged[name]
            count = self.items(batch) if size is None else size
            short = shortened[name][0]
            sums[name if short in sums else short] = value * count, count
        return sums

    def _loader(self, split: str) -> Any:
        loader = self._loaders.pop(split, None)
        if loader is None:
            name = f"{split}_dataloader"
            if split == "test":
                self._call("setup", "test")
            loader = getattr(self.module, name)() if _has(self.module, name) else None
            if isinstance(loader, (list, tuple)):
                what = f"{split}_dataloader must return one loader, but returned {len(loader)}"
                raise TaskFault(what, fix="return one loader of a torch.utils.data.ConcatDataset")
        self._loaders[split] = loader
        return loader

    def _use_collate(self, loader: Any) -> None:
        """Set `collate` to the `collate_fn` of the loader, unless a subclass defines or has set its own.

        The runner reads the attribute for each split, directly after it has called `dataset(split)`.
        """
        current = vars(self).get("collate")
        if current is not self._loader_collate or type(self).collate is not Task.collate:
            return
        vars(self).pop("collate", None)
        collate = getattr(loader, "collate_fn", None)
        self._loader_collate = None if collate is torch.utils.data.default_collate else collate
        if self._loader_collate is not None:
            self.collate = self._loader_collate  # type: ignore[method-assign]

    def _call(self, name: str, *args: Any) -> None:
        if _has(self.module, name):
            getattr(self.module, name)(*args)


class LightningSteps(nn.Module):
    """Call a step of the module through `forward`, to which wrappers of the model and compilation apply."""

    def __init__(self, module: nn.Module, trainer: TrainerStub, recorder: MetricRecorder) -> None:
        super().__init__()
        self.module = module
        self.recorder = recorder
        self._step = ""
        self._logged: dict[str, tuple[Tensor, int | None]] = {}
        module.log = self._log  # type: ignore[assignment]
        module.log_dict = self._log_dict  # type: ignore[assignment]
        if any(kind.__name__ == "LightningModule" for kind in type(module).__mro__):
            module._trainer = trainer  # type: ignore[assignment]  # lightning 2.0 to 2.6: the setter wants a Trainer
        else:
            module.trainer = trainer  # type: ignore[assignment]

    def forward(self, step: str, batch: Any) -> tuple[Any, dict[str, tuple[Tensor, int | None]]]:
        self._logged.clear()
        self.recorder.begin(evaluates=step != "training_step")
        self._step = step
        method = getattr(self.module, step)
        args = (batch, 0)[: len(inspect.signature(method).parameters)]
        returned = method(*args)
        if isinstance(returned, Mapping) and step != "predict_step":
            returned = returned.get("loss")  # Lightning ignores other outputs
        return returned, dict(self._logged)

    def _log(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **options: Any) -> None:
        if options.get("reduce_fx", "mean") not in ("mean", torch.mean):
            what = f"self.log({name!r}) is reduced by {options['reduce_fx']}, but accel-run reports the mean"
            raise TaskFault(what, fix="define the methods metrics and evaluate in a subclass of LightningTask")
        index = self.recorder.find(value)
        if index is not None and self._step != "training_step":
            self.recorder.logged[name] = index
            return
        if index is not None:
            value = self.recorder.pop_batch_value(index)
            if value is None:
                what = f"self.log({name!r}) received a metric that training_step has updated, but not called"
                raise TaskFault(what, fix="call the metric, self.metric(predictions, labels), to log its batch value")
        if isinstance(value, nn.Module) or not isinstance(value, (Tensor, float, int)):
            what = f"self.log({name!r}) received {type(value).__name__}, but only numbers can be summed over batches"
            raise TaskFault(what, fix="define the methods metrics and evaluate in a subclass of LightningTask")
        self._logged[name] = torch.as_tensor(value).detach(), batch_size

    def _log_dict(self, values: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in values.items():
            self._log(name, value, **options)


class TrainerStub:
    """Replaces the trainer of a module. Accessing a trainer attribute that this class lacks raises AttributeError."""

    def __getattr__(self, name: str) -> Any:
        properties = (key for key, value in vars(TrainerStub).items() if isinstance(value, property))
        known = ", ".join(sorted([*vars(self), *properties]))
        raise AttributeError(f"accel-run replaces the trainer; the replacement has no {name!r}, only {known}")

    def __init__(self) -> None:
        self.estimated_stepping_batches = self.max_steps = 1  # until the length of the run is known
        self.max_epochs: float | None = None
        self.current_epoch = self.global_step = 0
        self.training, self.sanity_checking, self.logger = True, False, None
        self.progress_bar_callback = None  # LightningModule.print uses it

    @property
    def global_rank(self) -> int:
        """Number of this rank."""
        return current_rank()[0]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return current_rank()[1]

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0


def configured_optimizer(parameters: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return the optimizer of the module's configure_optimizers for these parameters."""
    ids = {id(parameter) for _, parameter in parameters}
    owner = next((module for module in _modules if any(id(weight) in ids for weight in module.parameters())), None)
    if owner is None:
        raise TaskFault("the parameters do not belong to a LightningTask", fix="return a LightningTask from build")
    optimizer, schedule = configure(owner)
    _configured.clear()
    _configured[owner] = schedule is not None
    for group in optimizer.param_groups:
        group["lr"] = group.pop("initial_lr", group["lr"])  # a schedule has set the first rate
        group["params"] = [weight for weight in group["params"] if id(weight) in ids]
    vars(optimizer).pop("step", None)  # a schedule has wrapped `step` to count its calls
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def configured_schedule(updates: int, epochs: float | None = None) -> Callable[[int], float]:
    """Return the learning rate schedule of the module's configure_optimizers, as factors on the rates.

    updates  number of updates of the run
    epochs   number of epochs of the run; needed for a schedule that steps once per epoch, as Lightning's do by default
    """
    module: Any = next(iter(_configured), None)
    if module is None:
        what = "the schedule of configure_optimizers can only be used with its optimizer"
        raise TaskFault(what, fix="select configured_optimizer as the optimizer as well")
    _configured[module] = False
    module.trainer.estimated_stepping_batches = module.trainer.max_steps = updates
    module.trainer.max_epochs = epochs
    optimizer, config = configure(module)
    if config is None:
        return lambda update: 1.0
    scheduler, per_update = config["scheduler"], config.get("interval", "epoch") == "step"
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        what = "ReduceLROnPlateau from configure_optimizers is not supported"
        raise TaskFault(what, fix="use scheduler=plateau")
    if not per_update and epochs is None:
        what = "the schedule of configure_optimizers steps once per epoch, but the number of epochs is unknown"
        raise TaskFault(what, fix="pass it: configured_schedule(updates, epochs)")
    every = int(config.get("frequency", 1)) * (1 if per_update else max(1, round(updates / (epochs or 1))))
    return _factors(optimizer, scheduler, updates // every + 1, every)


def _factors(optimizer: Optimizer, scheduler: Any, steps: int, every: int) -> Callable[[int], float]:
    """Return update -> factor, by stepping the schedule `steps` times."""
    factors, options = [], _options(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the optimizer was not stepped
        for step in range(steps):
            if step:  # not after the last factor, because OneCycleLR raises an error for too many steps
                scheduler.step()
            if _options(optimizer) != options:
                what = (
                    "the schedule of configure_optimizers must change only the learning rate, but changes other options"
                )
                raise TaskFault(what, fix="pass cycle_momentum=False to a cyclic schedule")
            ratios = {round(group["lr"] / group["initial_lr"], 12) for group in optimizer.param_groups}
            if len(ratios) > 1:
                what = "the schedule of configure_optimizers must scale all parameter groups by the same factor"
                raise TaskFault(what, fix="set optimizer.lr_scales, and select a schedule with scheduler=NAME")
            group = optimizer.param_groups[0]
            factors.append(group["lr"] / group["initial_lr"])
    return lambda update: factors[min(update // every, steps - 1)]


def _options(optimizer: Optimizer) -> list[Any]:
    """Return the options that OneCycleLR and CyclicLR change by default, besides the learning rate."""
    return [group.get(name) for group in optimizer.param_groups for name in ("momentum", "betas", "weight_decay")]


def configure(module: nn.Module) -> tuple[Optimizer, dict[str, Any] | None]:
    """Return the only optimizer of configure_optimizers, and the configuration of its schedule. Raises TaskFault."""
    answer: Any = module.configure_optimizers()  # type: ignore[operator]
    config: Any = None
    if isinstance(answer, Mapping):
        answer, config = answer.get("optimizer"), answer.get("lr_scheduler")
    elif isinstance(answer, (list, tuple)) and answer and isinstance(answer[0], (list, tuple)):
        optimizers, schedules = answer
        if len(optimizers) != 1 or len(schedules) > 1:
            answer = optimizers
        else:
            answer, config = optimizers[0], next(iter(schedules), None)
    elif isinstance(answer, (list, tuple)) and len(answer) == 1:
        (answer,) = answer
    if not isinstance(answer, Optimizer):
        several = isinstance(answer, (list, tuple)) and len(answer) > 1
        found = f"{len(answer)} optimizers" if several else "no optimizer" if answer is None else type(answer).__name__
        what = f"configure_optimizers must return one optimizer, alone or with one schedule, but returned {found}"
        fix = "return an optimizer, such as torch.optim.Adam(self.parameters())"
        raise TaskFault(what, fix=suggest_objectives(module) if several else fix)
    return answer, config if config is None or isinstance(config, Mapping) else {"scheduler": config}  # type: ignore[return-value]


def _shorten(names: Iterable[str], prefixes: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return name -> (name without the prefix of its split, rank of that prefix in `prefixes`, 0 without a prefix)."""
    starts = ("", *(f"{prefix}{separator}" for prefix in prefixes for separator in "_/"))
    found = {name: next((start for start in starts[1:] if name.startswith(start)), "") for name in names}
    return {name: (name.removeprefix(start), starts.index(start)) for name, start in found.items()}


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor in the batch. Raises TaskFault if there is none."""
    count = _first_length(batch)
    if count is None:
        what = f"the number of samples of a batch is not known: its type is {type(batch).__name__}"
        raise TaskFault(what, fix="pass items=function to LightningTask, where function(batch) returns the number")
    return count


def _first_length(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return len(value) if value.dim() else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return next((count for count in map(_first_length, parts) if count is not None), None)


def _find_sampler(loader: Any) -> str:
    """Return the name of the class of a sampler that does more than shuffle; "" if there is none."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return ""
    batches, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    if type(batches) not in (BatchSampler, type(None)):
        return type(batches).__name__
    if type(sampler) is RandomSampler and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        return RandomSampler.__name__
    is_plain = type(sampler) in (SequentialSampler, RandomSampler, DistributedSampler, type(None))
    return "" if is_plain else type(sampler).__name__


def _set_device(module: nn.Module) -> None:
    """Set `device` and `dtype` of LightningModules, which only their own `to` sets, not that of an enclosing module."""
    weight = next((weight for weight in module.parameters() if not weight.is_meta), None)
    for part in module.modules():
        if weight is not None and any(kind.__name__ == "LightningModule" for kind in type(part).__mro__):
            part._device, part._dtype = weight.device, weight.dtype  # type: ignore[assignment]  # lightning 2.0 to 2.6


def _has(module: nn.Module, name: str) -> bool:
    """Return whether the module or a class of the user defines the method; LightningModule defines all of them."""
    kinds = [kind for kind in type(module).__mro__ if not f"{kind.__module__}.".startswith(_LIBRARIES)]
    return name in vars(module) or any(name in vars(kind) for kind in kinds)
