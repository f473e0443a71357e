"""The task contract: model, data, loss as a sum and a count, and predictions.

A task never deals with devices, ranks, autocast, loss scaling, accumulation or trackers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

Sum = tuple[Tensor, "Tensor | int | float"]  # (sum over items, number of items)


class Dataset(Protocol):
    """A map from sample index to sample.

    Optionally defines `__getitems__(indices: list[int])`, which returns either a list of samples (to be collated) or
    the batch itself, of any other type, such as a tuple or dict of tensors (faster: no separate samples are created).
    Optionally defines `set_epoch(epoch: int)`, called before samples of that epoch are read: random augmentation should
    draw from `sample_rng(seed, epoch, index)`, so that a sample is the same in every worker.
    `dataloader.cache` requires samples without a random part, and batches with one row per sample. A dataset with other
    samples or batches can be cached if its `__getitems__` returns `self.compose(self.load_fixed, indices)`. What
    `load_fixed(indices)` returns is cached: a tensor, or a tuple or dict of tensors, with one row per index. The row
    of an index must be the same in every call. `compose(load, indices)` returns the batch, and calls `load` with any
    indices of the dataset.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class Context:
    """Arguments for building a task.

    seed       seed of the run; torch's global generator, which initializes the weights, is already seeded with it
    data_path  the user's `data.path`, or None for the task's own data
    cache      folder for prepared data that persists between runs; safe to delete
    """

    seed: int
    data_path: Path | None
    cache: Path


@dataclass(frozen=True)
class Progress:
    """Progress of a training phase before its next update.

    update  completed updates of this phase, out of `total`
    epoch   number of passes over the training data so far, with a fractional part, such as 1.5
    """

    phase: str
    update: int
    total: int
    epoch: float

    @property
    def share(self) -> float:
        """Return the completed fraction of the phase, in [0, 1)."""
        return self.update / max(1, self.total)


Content = str | bytes | np.ndarray[Any, Any]


@dataclass(frozen=True)
class Prediction:
    """One result of inference: `files` maps a file name to text, bytes, or an array (written as .npy).

    text   text to print, may be empty
    items  number of generated items (tokens, samples), for the throughput; 0: a plot or table of earlier
           results, which does not count as a prediction
    plots  images for plots/ in the run directory: file name (such as maps.png) -> its bytes; see runner.base.picture
    part   a JSON-serializable value for `Task.combine_predictions`
    """

    files: Mapping[str, Content]
    text: str = ""
    items: int = 1
    plots: Mapping[str, bytes] = field(default_factory=dict)
    part: Any = None


State = dict[str, Tensor]


class Fit:
    """Statistics of the training data, collected without gradients in a phase of kind "fit".

    The state is a dict of tensors on the model's device. Its size does not depend on the data, so any amount of data
    can be processed, and the state can be saved at any time. `merge` combines two states; the result must not depend on
    how the data is divided, except for rounding. Accumulate quantities that can be merged: float64 sums, counts,
    moments as in Welford's algorithm.
    """

    def start(self) -> State:
        """Return the state before any data is added, on the CPU; the runner moves it to the model's device."""
        raise NotImplementedError(f"{type(self).__name__} must define start() -> dict of tensors")

    def add(self, model: nn.Module, state: State, batch: Any) -> tuple[State, int]:
        """Return the state with this batch added, and the number of items (see Task.item) in the batch."""
        raise NotImplementedError(f"{type(self).__name__} must define add(model, state, batch) -> (state, items)")

    def merge(self, one: State, other: State) -> State:
        """Return the state of the combined data."""
        raise NotImplementedError(f"{type(self).__name__} must define merge(one, other) -> state")

    def finish(self, model: nn.Module, state: State) -> Mapping[str, float]:
        """Store the result in the model, once all data has been read; return metrics to display, if any."""
        raise NotImplementedError(f"{type(self).__name__} must define finish(model, state)")


class Gather:
    """A metric that is computed from all samples of an evaluation at once, such as AUROC.

    compute  function that receives the rows of all samples, in sample order, and returns a number, or a mapping of
             names to numbers. `evaluate` returns the rows of a batch under the name of the metric: a tensor, or a tuple
             or dict of tensors, which become the arguments of `compute`
    """

    def __init__(self, compute: Callable[..., Any]) -> None:
        self.compute = compute


if TYPE_CHECKING:
    default = property
else:

    class default:  # noqa: N801 - a decorator, like `property`
        """A property that a task may also set as an attribute: `self.fits = {...}` in `__init__`."""

        def __init__(self, function):
            self.function = function
            self.__doc__ = function.__doc__

        def __get__(self, task, owner):
            return self if task is None else self.function(task)


class Task:
    """Base class of tasks: set `model`, and define `loss` and `dataset`. Everything else has defaults.

    item              name of the unit that the loss averages over, e.g. "token"
    items_per_sample  expected number of items per sample; the loss is divided by it before the backward pass, which
                      keeps float16 gradients in range and does not change results
    baseline_name     name of the trivial model whose metrics `baselines` returns, e.g. "byte bigram model"
    phase             current phase; in inference, the phase that trained the model. dataset, evaluate, baselines,
                      items_per_sample and baseline_name may depend on it
    losses            phase name -> loss function, for tasks with several phases; phases without an entry use `loss`
    fits              phase name -> Fit, for phases of kind "fit"
    splits            names of the splits besides train, val and test that `dataset` returns; the command `evaluate`
                      accepts no others
    loss_is_additive  False: the loss of a batch is not the sum over its samples, as in a contrastive loss; the loss
                      then depends on the split into micro-batches, and the check that it is a sum is skipped

    A task with several phases declares them in PHASES, a literal mapping in its file: see docs/phases.md.
    """

    model: nn.Module
    item: str = "sample"
    baseline_name: str = "trivial model"
    items_per_sample: float = 1.0
    phase: str = "train"
    splits: Collection[str] = ()
    loss_is_additive: bool = True

    def loss(self, model: nn.Module, batch: Any) -> Sum:
        """Return the loss summed over the items of this batch, and the number of items.

        A third element of the tuple may map names to (sum, count) of further training metrics, reported as train/NAME.
        A task whose loss couples the samples of a batch defines `embed` and `couple` instead.
        """
        if type(self).embed is not Task.embed:
            return self.couple(self.embed(model, batch))
        raise NotImplementedError(f"{type(self).__name__} must define loss(model, batch) -> (loss_sum, num_items)")

    @default
    def objectives(self) -> Mapping[str, Mapping[str, Any]]:
        """Objectives of an update, in order: name -> its settings.

        By default, this is OBJECTIVES of the task file. If that file defines none, it is OBJECTIVES of the file that
        defines the task's class, or a base class.

        A task with objectives defines `loss(model, batch, objective)`, which is called for each. Settings: `trains`
        (names or prefixes of parameters), `every`, `shares`, `optimizer` and `scheduler` with their settings,
        `max_grad_norm`.
        """
        modules = (sys.modules.get(kind.__module__) for kind in type(self).__mro__)
        return next((module.OBJECTIVES for module in modules if hasattr(module, "OBJECTIVES")), {})  # type: ignore[union-attr]

    def embed(self, model: nn.Module, batch: Any) -> Any:
        """Return the embeddings of this batch: a tensor with a row per sample, or a tuple or dict of such tensors.

        It may be called twice for a batch of an update, with the same random numbers.
        """
        raise NotImplementedError(f"{type(self).__name__} must define embed(model, batch) -> tensors")

    def couple(self, embeddings: Any) -> Sum:
        """Return the loss of all samples of an update, summed over the items, and the number of items.

        embeddings  results of `embed` for all micro-batches of all ranks, concatenated in sample order
        """
        raise NotImplementedError(f"{type(self).__name__} must define couple(embeddings) -> (loss_sum, num_items)")

    def dataset(self, split: str) -> Dataset:
        """Return the samples of `split`: "train", "val" or "test"."""
        raise NotImplementedError(f"{type(self).__name__} must define dataset(split)")

    def stream(self, split: str, shard: int, num_shards: int) -> Iterable[Any]:
        """Return an iterable over the samples of a shard of `split`, in a fixed order; used instead of `dataset`.

        Each sample belongs to one of the `num_shards` shards (`data.shards`). Called again for each pass over a shard.
        The iterable may define `len()`, `set_epoch(epoch)`, and `state_dict` and `load_state_dict`.
        """
        raise NotImplementedError

    def sample_weights(self, dataset: Any) -> Sequence[float]:
        """Return the weight of each training sample; for `sampler=weighted`."""
        raise NotImplementedError

    def sample_lengths(self, dataset: Any) -> Sequence[int]:
        """Return the length of each training sample, such as its number of tokens; for samplers that sort by length."""
        raise NotImplementedError

    @default
    def losses(self) -> Mapping[str, Callable[[nn.Module, Any], Sum]]:
        """Phase name -> loss function, with the arguments and result of `loss`. Phases without an entry use `loss`."""
        return {}

    @default
    def fits(self) -> Mapping[str, Fit]:
        """Phase name -> statistics to collect, for each phase of kind "fit"."""
        return {}

    @default
    def packages(self) -> Mapping[str, Mapping[str, str]]:
        """Packages imported lazily: phase name, or "infer" -> package -> extra of accel-run that installs it.

        They are checked before the first update, because a run should not fail after hours of training. The extra is ""
        for a package that is installed by its own name.
        """
        return {}

    def begin_phase(self, phase: str) -> None:
        """Called when a phase starts, before its data, loss and metrics are requested; the base class sets `phase`."""
        self.phase = phase

    def begin_update(self, progress: Progress) -> None:
        """Called with the training progress before each update, e.g. to set temperatures and curricula.

        Values set here must depend on `progress` only, so that a resumed run continues identically.
        """

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Sum]:
        """Return metrics of one batch as (sum, count), which are added over batches and ranks, then divided once.

        By default, these are the loss and the metrics that `loss` returns as its third element; with OBJECTIVES, they
        are named OBJECTIVE/loss and so on.
        """
        if not self.objectives:
            return _as_metrics(self.loss(model, batch))
        losses = {name: self.loss(model, batch, name) for name in self.objectives}  # type: ignore[call-arg]
        return {f"{name}/{key}": pair for name, loss in losses.items() for key, pair in _as_metrics(loss).items()}

    def metrics(self, split: str) -> Mapping[str, Any]:
        """Return the metrics of `split` that are not sums: name -> torchmetrics.Metric or `Gather`.

        For these, `evaluate` returns the arguments of `Metric.update` for a batch, or the rows of a `Gather`, instead
        of (sum, count). The states of a metric are merged over batches and ranks, and its value is computed once.
        """
        return {}

    def summarize(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Derive the displayed metrics from the averaged ones, e.g. bits per byte from the loss."""
        return metrics

    def baselines(self) -> Mapping[str, float]:
        """Return metric name -> value of a trivial model, displayed next to the metric of that name.

        For further models, add a suffix to the name of the metric, as in `bits_per_byte_unigram`.
        """
        return {}

    def collate(self, samples: Sequence[Any]) -> Any:
        """Collate samples into a batch."""
        return torch.utils.data.default_collate(list(samples))

    def blocks(self) -> Sequence[nn.Module]:
        """Return the repeated blocks of the model: units of checkpointing, sharding and regional compilation.

        By default, these are the modules in each ModuleList at any depth, and in each Sequential of at least two
        modules that are all of one class and each have submodules and parameters. Blocks within blocks are not
        returned.
        """
        return repeated_blocks(self.model)

    def layers(self) -> Sequence[nn.Module]:
        """Return modules whose sequential composition equals the model; for pipelines.

        Together they contain all parameters of the model itself, not copies. The first layer receives the arguments of
        the model; floating-point tensors, or tuples of them, are passed between the layers.
        """
        if isinstance(self.model, nn.Sequential):
            return list(self.model)
        raise NotImplementedError(
            f"for a pipeline, {type(self).__name__} must define layers() -> modules whose composition is the model"
        )

    def example(self) -> tuple[Any, ...]:
        """Return example arguments of one call of the model, with a batch of two samples on the CPU.

        Tensors may be nested in tuples, lists and dictionaries. `export` traces the call: the first dimension of each
        tensor that contains the batch becomes dynamic, and other values are constants of the exported model.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define example()")

    def predict(self, model: nn.Module, generator: torch.Generator, /, **options: Any) -> Iterator[Prediction]:
        """Yield predictions with the trained model, in eval mode and without gradients.

        Define it as `def predict(self, model, generator, *, samples: int = 3, ...)`: parameters after `*` are the keys
        of `inference` in the configuration, with these types and defaults.

        generator  on the model's device, with the same seed on every rank: draw the numbers of all predictions from it
                   at once, or seed another generator for each prediction
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define predict_batch(model, batch) or predict(...), which `inference` calls"
        )

    def combine_predictions(self, parts: Sequence[Any]) -> Iterable[Prediction]:
        """Return predictions, such as a table, computed from the `part` of each prediction of `predict`.

        Called once, after all predictions, on rank 0 and with the parts of all ranks in the order of a single process.
        Not called if no prediction has a part, or if `inference.num_shards` selects some of the predictions.
        """
        return ()

    def predict_batch(self, model: nn.Module, batch: Any, /, **options: Any) -> Mapping[str, Any]:
        """Return a prediction for each sample of a batch, as columns of a table: name -> one value per sample.

        A value is a number, a string, or a vector of numbers; a column is a tensor, an array or a list. `inference`
        calls it for the batches of `inference.split` and writes predictions/SPLIT.csv, unless `predict` is defined.
        Parameters after `*` are further keys of `inference`.
        """
        raise NotImplementedError

    @property
    def predicts(self) -> Literal["predict", "predict_batch", ""]:
        """The method that `inference` calls; empty if the task defines neither."""
        if type(self).predict is not Task.predict:
            return "predict"
        return "predict_batch" if type(self).predict_batch is not Task.predict_batch else ""


class FunctionLayer(nn.Module):
    """A layer for `Task.layers` that calls a function.

    function  maps the output of the previous layer (for the first layer, the model's arguments) to the output of this
              layer
    used      modules and parameters of the model that the function uses
    """

    def __init__(self, function: Callable[..., Any], *used: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        self.used_modules = nn.ModuleList(each for each in used if isinstance(each, nn.Module))
        self.used_parameters = nn.ParameterList(each for each in used if isinstance(each, nn.Parameter))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(*inputs, **named)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost repeated modules in `model`, in the order of their registration."""
    if isinstance(model, nn.ModuleList) or (isinstance(model, nn.Sequential) and _has_repeated_blocks(model)):
        lists = (nn.ModuleList, nn.ModuleDict)
        blocks = [block for item in model for block in (repeated_blocks(item) if isinstance(item, lists) else [item])]
    else:
        blocks = [block for child in model.children() for block in repeated_blocks(child)]
    return list(dict.fromkeys(blocks))


def _has_repeated_blocks(modules: nn.Sequential) -> bool:
    return (
        len(modules) > 1
        and len({type(module) for module in modules}) == 1
        and all(any(True for _ in module.children()) for module in modules)
        and all(any(True for _ in module.parameters()) for module in modules)
    )


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random generator of a sample in an epoch: the same for any worker, rank or share.

    The streams of different keys are independent of each other, and of the stream that shuffles an epoch.
    """
    # Always two 32-bit words per number: SeedSequence splits only numbers from 2**32 on, so different keys could
    # give the same words.
    words = [word for number in (epoch, index) for word in divmod(number, 2**32)]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(_SAMPLE_STREAM, *words))))


def _as_metrics(answer: Any) -> dict[str, Sum]:
    if isinstance(answer, tuple) and len(answer) == 3:
        return {"loss": answer[:2], **answer[2]}
    return {"loss": answer}


_SAMPLE_STREAM = 0x73616D70  # separate from other streams of the same seed
