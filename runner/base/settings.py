"""The settings that belong to no group: how long, how much at once, where, and from which seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runner.base.places import as_path
from runner.base.values import Count, DeviceName, NonNegative, Place, Positive, PositiveInt, Seed


@dataclass(frozen=True)
class DataSettings:
    """Where the samples come from.

    path           folder or file in the task's own format; null: the task's own data
    train_samples  at most so many training samples are used, the first ones; null: all
    """

    path: Place | None = None
    train_samples: PositiveInt | None = None


@dataclass(frozen=True)
class EvaluateSettings:
    """When and on how much the model is evaluated while it trains.

    every    updates between evaluations; auto: ten times in a phase; 0: only at the end of a phase
    samples  validation samples used, spread evenly and always the same; null: all of them
    """

    every: Count | Literal["auto"] = "auto"
    samples: PositiveInt | None = None


@dataclass(frozen=True)
class EarlyStoppingSettings:
    """When a phase ends before its last update.

    patience   evaluations in a row without improvement after which the phase ends; null: never
    metric     metric of the evaluation that is watched
    best_is    min or max: which values of it are better
    min_delta  how much better than the best a value must be
    """

    patience: PositiveInt | None = None
    metric: str = "val/loss"
    best_is: Literal["min", "max"] = "min"
    min_delta: NonNegative = 0.0


@dataclass(frozen=True)
class Settings:
    """Top-level keys of the configuration.

    updates            optimizer steps of the run (or give epochs)
    epochs             passes over the training data (or give updates); 0: only phases without gradients
    global_batch_size  samples per update over all ranks and micro-batches
    micro_batch_size   samples per device and pass; auto: derived; accumulation follows from it
    max_grad_norm      gradients are scaled down to this norm; null: not clipped
    seed               of weights, order of data and dropout
    device             auto, cpu, cuda, cuda:N or mps
    phases             names of the phases to run; null: all of the task's but infer
    run                train: name of the run, an existing name resumes; others: last, a name or a folder
    output_root        folder that holds the runs
    resume             auto: continue the run of that name; fresh: start it anew; or a run folder to start from
    weights            safetensors file whose weights a new run begins with; null: the task's own
    resume_allow       keys that may differ from the checkpoint, e.g. [optimizer.lr]
    log_every          updates between rows of metrics.jsonl
    on_oom             where memory runs out: retry, the update is made again in smaller passes, which stay so; or stop
    """

    updates: PositiveInt | None = None
    epochs: NonNegative | None = None
    global_batch_size: PositiveInt = 32
    micro_batch_size: PositiveInt | Literal["auto"] = "auto"
    max_grad_norm: Positive | None = 1.0
    seed: Seed = 0
    device: DeviceName = "auto"
    phases: list[str] | None = None
    run: str | None = None
    output_root: Place = "outputs"
    resume: str = "auto"
    weights: Place | None = None
    resume_allow: list[str] = field(default_factory=list)
    log_every: PositiveInt = 10
    on_oom: Literal["retry", "stop"] = "retry"
    data: DataSettings = field(default_factory=DataSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    early_stopping: EarlyStoppingSettings = field(default_factory=EarlyStoppingSettings)

    @property
    def root(self) -> Path:
        """Return the folder that holds the runs."""
        return as_path(self.output_root)
