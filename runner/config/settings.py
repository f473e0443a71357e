"""Top-level settings: length, batch size, device, folders and seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runner.base.paths import parse_path
from runner.base.values import (
    Count,
    DeviceName,
    EvaluationInterval,
    LocalPath,
    NonNegative,
    Positive,
    PositiveInt,
    RunsFolder,
    Seed,
)


@dataclass(frozen=True)
class DataSettings:
    """Where the samples come from.

    path               folder or file in the task's own format; null: the task's own data
    train_samples      maximum number of training samples, taken from the beginning; null: all
    shards             number of shards into which a stream is divided; null: the stream's own number, or 1
    shards_per_update  number of shards of a stream from which each update takes its samples; null: all
    """

    path: LocalPath | None = None
    train_samples: PositiveInt | None = None
    shards: PositiveInt | None = None
    shards_per_update: PositiveInt | None = None


@dataclass(frozen=True)
class EvaluateSettings:
    """When, and on how many samples, the model is evaluated during training.

    every    evaluation interval: 200 or 200updates, 2epochs; auto: ten per phase; 0: only at the end of each phase
    samples  number of validation samples, evenly spaced and always the same; null: all
    """

    every: Count | EvaluationInterval = "auto"
    samples: PositiveInt | None = None


@dataclass(frozen=True)
class EarlyStoppingSettings:
    """When a phase ends before its last update.

    patience   consecutive evaluations without improvement after which the phase ends; null: never
    metric     evaluation metric to monitor
    best_is    min or max: whether lower or higher values are better
    min_delta  minimum improvement over the best value
    """

    patience: PositiveInt | None = None
    metric: str = "val/loss"
    best_is: Literal["min", "max"] = "min"
    min_delta: NonNegative = 0.0


@dataclass(frozen=True)
class WeightsSettings:
    """The initial weights of a new run; `weights=X` is short for `weights.source=X`.

    source  a run, a checkpoint, a safetensors file, or a folder with a safetensors file or its shards; null: random
            weights
    strict  true: every tensor must match; false: load the tensors that match, and print the missing and the ignored
            ones
    only    modules or tensors of the model to load, e.g. [backbone]; []: all
    rename  names in the source -> names in the model, for modules or tensors, e.g. {encoder: backbone}
    """

    source: LocalPath | None = None
    strict: bool = True
    only: list[str] = field(default_factory=list)
    rename: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """Top-level keys of the configuration.

    updates            number of optimizer steps of the run; null: epochs sets the length
    epochs             number of passes over the training data; null: updates sets the length; 0: run only phases
                       without gradients
    global_batch_size  samples per update over all ranks and micro-batches
    micro_batch_size   samples per forward and backward pass on a device; auto: chosen by the plan
    cpu_micro_batch_size  upper limit of micro_batch_size=auto on a CPU, where memory is not predicted before a run;
                          null: no limit
    max_grad_norm      maximum gradient norm for clipping; null: no clipping
    seed               random seed of weights, data order and dropout
    device             auto, cpu, cuda, cuda:N, mps or xpu
    phases             names of the phases to run; null: all phases of the task except infer
    run                for train: name of the run, which is resumed if it exists; for other commands: last, a name or a
                       folder
    output_root        folder that holds the runs
    resume             auto: resume the run named by `run`; fresh: start from scratch; or a run folder to start from
    resume_allow       keys whose values may differ from those of the checkpoint in this command, e.g. [optimizer.lr]
    log_every          updates between rows of metrics.jsonl
    on_oom             retry: after an out-of-memory error, repeat the update with smaller micro-batches and keep that
                       size; stop: end the run
    """

    updates: PositiveInt | None = None
    epochs: NonNegative | None = None
    global_batch_size: PositiveInt = 32
    micro_batch_size: PositiveInt | Literal["auto"] = "auto"
    cpu_micro_batch_size: PositiveInt | None = None
    max_grad_norm: Positive | None = 1.0
    seed: Seed = 0
    device: DeviceName = "auto"
    phases: list[str] | None = None
    run: str | None = None
    output_root: RunsFolder = "outputs"
    resume: str = "auto"
    resume_allow: list[str] = field(default_factory=list)
    log_every: PositiveInt = 10
    on_oom: Literal["retry", "stop"] = "retry"
    weights: WeightsSettings = field(default_factory=WeightsSettings)
    data: DataSettings = field(default_factory=DataSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    early_stopping: EarlyStoppingSettings = field(default_factory=EarlyStoppingSettings)

    @property
    def root(self) -> Path:
        """Return the folder that holds the runs."""
        return parse_path(self.output_root)


# The name of a group of settings is an alias of its main key: weights=FILE sets weights.source.
MAIN_KEYS: Mapping[str, str] = {"weights": "weights.source"}
