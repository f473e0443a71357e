"""Evaluate and save the weight average of optimizers that keep one, such as schedule-free optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from runner.base.errors import ConfigError, Problem
from runner.durable.checkpoint import LoadedCheckpoint
from runner.engine.hooks.averaging import Averaging
from runner.engine.hooks.hook import Hook
from runner.engine.parts.assemble import Parts
from runner.engine.parts.phase_kinds import GradientPhase
from runner.tensors.shared_names import expand_shared_names, names_of_parameters


class OptimizerAverage(Hook):
    """Uses the averaged weights in evaluations and inference if the optimizer has `eval` and `train` methods.

    The training weights are restored from copies: switching to eval mode and back would round them.
    """

    name = "optimizer_average"

    def begin(self) -> None:
        averaging = self.phase.run.plan.choices[Averaging.name]
        if self._averaging_optimizers() and not averaging.uses("none"):
            what = "the optimizer already keeps an average, which evaluations use"
            raise ConfigError(Problem(what, f"averaging={averaging.name}", "use averaging=none"))

    def state_dict(self) -> dict[str, Tensor]:
        if not self._averaging_optimizers():
            return {}
        with self.during_evaluation():
            return {name: weight.detach().clone() for name, weight in self.phase.work.owned.items()}

    @staticmethod
    def load_for_inference(parts: Parts, checkpoint: LoadedCheckpoint) -> None:
        if OptimizerAverage.name in checkpoint.stems:
            averaged = expand_shared_names(names_of_parameters(parts.bare), checkpoint.stored(OptimizerAverage.name))
            parts.parallel.load(parts.bare, {**checkpoint.stored("model"), **averaged})

    def _averaging_optimizers(self) -> list[Any]:
        work = self.phase.work
        optimizers = work.inputs.optimizers if isinstance(work, GradientPhase) else []
        return [optimizer for optimizer in optimizers if hasattr(optimizer, "eval") and hasattr(optimizer, "train")]

    @contextmanager
    def during_evaluation(self) -> Iterator[None]:
        optimizers = self._averaging_optimizers()
        weights = [weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]]
        training_weights = [weight.detach().clone() for weight in weights]
        for optimizer in optimizers:
            optimizer.eval()
        try:
            yield
        finally:
            for optimizer in optimizers:
                optimizer.train()
            with torch.no_grad():
                for weight, before in zip(weights, training_weights, strict=True):
                    weight.copy_(before)
