"""Open the splits of a task: its datasets and streams, and the loaders that read them."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from runner.axes.dataloader import DATALOADERS
from runner.base.errors import ConfigError, DataError, Problem, TaskFault
from runner.base.rank_env import patched_environment
from runner.base.sample_rng import seeded_generators
from runner.base.task import Task
from runner.config.chosen_option import make_chosen, own_function
from runner.distributed.world import World
from runner.engine.contract.contract_checks import check_length
from runner.engine.contract.error_diagnosis import locate_definition
from runner.engine.contract.task_loading import task_errors
from runner.engine.sources.custom_loader import CustomLoader
from runner.engine.sources.stream_reader import StreamFetcher, StreamSamples, read_all_samples
from runner.engine.sources.stream_source import StreamSource, is_exhaustible, is_stream, undivided
from runner.loading.fetcher import Fetcher
from runner.loading.loaders import Loader
from runner.plan.run_plan import Plan


@dataclass(frozen=True)
class Splits:
    """The splits of a task: its training data, its validation data, and others that it names.

    source  the task's file
    model   the task's model, which `collate` may refer to; it is not sent to spawned processes
    """

    plan: Plan
    world: World
    task: Task
    source: Path
    model: nn.Module

    def fetcher(self, split: str, *, evaluates: bool = False) -> Fetcher:
        """Return the samples of a split. Those of a stream are kept in memory, except for training.

        evaluates  True: read the training split for an evaluation
        Raises DataError if the split is empty, NotImplementedError if the task lacks a split other than `train`.
        """
        dataset = self._dataset(split)
        limit = self.plan.settings.data.train_samples if split == "train" else None
        options = self.plan.choices["dataloader"].options
        if isinstance(dataset, StreamSource) and split == "train" and not evaluates:
            self._check_options()
            stream = replace(dataset, limit=limit)
            with task_errors(self.source, 'stream("train")'):
                lengths = stream.lengths()
            samples = StreamSamples(stream, lengths, self.plan.settings.seed)
            return StreamFetcher(samples, self.task.collate, model=self.model)
        if isinstance(dataset, StreamSource):
            dataset = self._load_stream(dataset)
        bad = str(options["bad_samples"])
        fetcher = Fetcher(dataset, self.task.collate, bad_samples=bad, num_samples=limit, model=self.model, split=split)
        if not len(fetcher):
            where = str(self.plan.settings.data.path or self.source)
            fix = f"return samples from dataset({split!r}), and check data.path and data.train_samples"
            raise DataError(f"the dataset of split {split} is empty", where=where, fix=fix)
        return fetcher

    def _dataset(self, split: str) -> Any:
        """Return the dataset of a split, or the source of a stream."""
        task, wanted = self.task, self.plan.settings.data.shards
        allowed = () if split == "train" else NotImplementedError
        # Use the same seed on every rank: a dataset that is split at random must be split identically.
        draws = seeded_generators(self.plan.settings.seed, split, "dataset")
        if type(task).stream is not Task.stream and (split == "train" or type(task).dataset is Task.dataset):
            return StreamSource(split, wanted or 1, make=task.stream)
        with draws, self._rank_variables(), task_errors(self.source, f'dataset("{split}")', allow=allowed):
            dataset = undivided(task.dataset(split))
        if isinstance(dataset, DataLoader) and dataset.batch_sampler is not None:
            raise TaskFault(
                f'dataset("{split}") returned a DataLoader, which yields batches instead of samples',
                where=locate_definition(task.dataset, self.source),
                fix="return its dataset, and define collate(samples) instead of collate_fn",
            )
        if is_exhaustible(dataset):
            raise TaskFault(
                f'dataset("{split}") returned a {type(dataset).__name__}, which can be read only once',
                where=locate_definition(task.dataset, self.source),
                fix="return a list of samples, or define stream(self, split, shard, num_shards), which yields them",
            )
        if is_stream(dataset):
            return StreamSource(split, wanted or int(getattr(dataset, "num_shards", 1)), dataset)
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            what = (
                f'dataset("{split}") must return samples with len() and [index], or a stream to iterate over, but'
                f" returned {type(dataset).__name__}"
            )
            raise TaskFault(
                what, where=locate_definition(task.dataset, self.source), fix="return, for example, a list of samples"
            )
        check_length(dataset, f'dataset("{split}")', task.dataset, self.source)
        return dataset

    def _rank_variables(self) -> AbstractContextManager[None]:
        """Set torchrun's environment variables, which mosaicml-streaming needs to share its state between local ranks.

        They are set only if the task has imported that package: another dataset might read them and shard itself.
        """
        world = self.world
        if world.world_size == 1 or "streaming.base.dataset" not in sys.modules:
            return nullcontext()
        ranks = {"RANK": world.rank, "WORLD_SIZE": world.world_size}
        ranks |= {"LOCAL_RANK": world.local_rank, "LOCAL_WORLD_SIZE": world.num_local_ranks}
        return patched_environment({name: str(value) for name, value in ranks.items()})

    def _load_stream(self, stream: StreamSource) -> list[Any]:
        """Read the samples of a stream for evaluation. Raises NotImplementedError if the task lacks the split."""
        settings = self.plan.settings
        with task_errors(self.source, f'stream("{stream.split}")', allow=NotImplementedError):
            return read_all_samples(replace(stream, num_shards=1), settings.evaluate.samples, settings.seed)

    def _check_options(self) -> None:
        """Raise ConfigError for options of the data loader that do not work with a stream."""
        choice = self.plan.choices["dataloader"]
        problems = []
        if choice.location:
            what = "is not supported for a stream: only the built-in loaders read it in order"
            problems.append(Problem(what, f"dataloader={choice.name}", "use dataloader=default"))
        elif choice.options["cache"] != "none":
            where = f"dataloader.cache={choice.options['cache']}"
            problems.append(Problem("is not supported for a stream", where, "use dataloader.cache=none"))
        if choice.options["bad_samples"] != "stop":
            what = "is not supported for a stream, which cannot continue after an error"
            problems.append(
                Problem(
                    what,
                    "dataloader.bad_samples=skip",
                    "use dataloader.bad_samples=stop, and skip bad samples in the stream",
                )
            )
        if problems:
            raise ConfigError(problems)

    def loader(self, fetcher: Fetcher) -> Loader:
        """Return the data loader that the group `dataloader` selects."""
        choice = self.plan.choices["dataloader"]
        if choice.location:
            pins = bool(choice.options["pin_memory"])
            return CustomLoader(fetcher, own_function(choice), choice.name, choice.location, pins=pins)
        return make_chosen(DATALOADERS, choice, fetcher, self.world.device)

    def evaluation_loader(self, fetcher: Fetcher) -> Loader:
        """Return the loader for an evaluation outside of training. It has no cache: each sample is read once."""
        choice = self.plan.choices["dataloader"]
        if choice.location:  # custom loaders read training data only
            return Loader(fetcher)
        uncached = replace(choice, options={**choice.options, "cache": "none"})
        return make_chosen(DATALOADERS, uncached, fetcher, self.world.device)
