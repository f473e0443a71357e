"""Evaluate and save the average that an optimizer itself keeps, as schedule-free optimizers do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from runner.base.errors import ConfigError, Problem
from runner.durable.checkpoint import Loaded
from runner.engine.assemble import Parts
from runner.engine.hooks.averaging import Averaging, expand_shared_names
from runner.engine.hooks.hook import Hook
from runner.engine.phase_kinds import GradientPhase


class OptimizerAverage(Hook):
    """Uses the weights of the optimizer's eval mode in evaluations and inference, if it has one: `eval` and `train`.

    Training continues with the bits that it had: switching to eval mode and back would round.
    """

    name = "optimizer_average"

    def begin(self) -> None:
        averaging = self.phase.run_.plan.choices[Averaging.name]
        if self._optimizers() and averaging.function != "none":
            what = "the optimizer keeps an average already, which evaluations use"
            raise ConfigError(Problem(what, f"averaging={averaging.name}", "use averaging=none"))

    @contextmanager
    def during_evaluation(self) -> Iterator[None]:
        with self._averaged():
            yield

    def state_dict(self) -> dict[str, Tensor]:
        if not self._optimizers():
            return {}
        with self._averaged():
            return {name: weight.detach().clone() for name, weight in self.phase.work.owned.items()}

    @staticmethod
    def load_for_inference(parts: Parts, checkpoint: Loaded) -> None:
        if OptimizerAverage.name in checkpoint.stems:
            averaged = expand_shared_names(parts.bare, checkpoint.tensors(OptimizerAverage.name))
            parts.parallel.load(parts.bare, {**checkpoint.tensors("model"), **averaged})

    def _optimizers(self) -> list[Any]:
        work = self.phase.work
        found = work.inputs.optimizers if isinstance(work, GradientPhase) else []
        return [optimizer for optimizer in found if hasattr(optimizer, "eval") and hasattr(optimizer, "train")]

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        optimizers = self._optimizers()
        weights = [weight for each in optimizers for group in each.param_groups for weight in group["params"]]
        kept = [weight.detach().clone() for weight in weights]
        for optimizer in optimizers:
            optimizer.eval()
        try:
            yield
        finally:
            for optimizer in optimizers:
                optimizer.train()
            with torch.no_grad():
                for weight, before in zip(weights, kept, strict=True):
                    weight.copy_(before)
