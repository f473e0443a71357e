"""Average the weights over updates: exponential moving average, or equal weights (SWA)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from runner.base.values import Factor
from runner.config.chosen_option import make_chosen
from runner.durable.checkpoint import LoadedCheckpoint
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.parts.assemble import Parts
from runner.engine.update.loop import StepInfo
from runner.tensors.optimizer_state import copy_values
from runner.tensors.shared_names import expand_shared_names, names_of_parameters

Rule = Callable[[list[Tensor], list[Tensor], int], None]  # (averages, weights, updates averaged so far); in place


class Averaging(Hook):
    """Averages the trained weights of a phase, starting after the first update or after a fraction of the updates.

    The average is on the device, has the dtype of the weights, and is sharded like them. Buffers are not averaged. An
    update skipped because of an overflow counts as an update with unchanged weights.
    """

    name = "averaging"

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self._choice = phase.run.plan.choices[self.name]
        self._rule: Rule | None = make_chosen(AVERAGINGS, self._choice)
        self._num_averaged = 0
        self._averages: dict[str, Tensor] = {}

    def after_update(self, step: StepInfo) -> None:
        start = self._choice.options.get("start", 0.0) * self.phase.total
        if self._rule is None or (not self._num_averaged and step.update <= start):
            return
        weights = self._weights()
        if not self._num_averaged:
            self._averages = {name: weight.clone() for name, weight in weights.items()}
        elif weights:
            self._rule([*self._averages.values()], [*weights.values()], self._num_averaged)
        self._num_averaged += 1

    @contextmanager
    def during_evaluation(self) -> Iterator[None]:
        """Swap weights and averages in place: compiled models and optimizers keep references to the tensors."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Any]:
        return {"num_averaged": self._num_averaged, **self._averages}

    def load_state_dict(self, state: Any) -> None:
        if self._rule is None or state is None or not state["num_averaged"]:
            return
        if self.phase.start is not None and self.phase.start.state["values"].get(self.name) != self._choice.name:
            return  # an EMA cannot be continued as an equally weighted mean, or vice versa
        self._num_averaged = state["num_averaged"]
        self._averages = {name: weight.clone() for name, weight in self._weights().items()}
        for name, average in self._averages.items():
            copy_values(average, state[name])

    def close(self, error: BaseException | None) -> None:
        """Free the averages: they are saved, and the next phase needs the memory."""
        self._averages = {}

    @staticmethod
    def load_for_inference(parts: Parts, checkpoint: LoadedCheckpoint) -> None:
        if _evaluates_average(parts.plan.choices[Averaging.name].options) and Averaging.name in checkpoint.stems:
            averaged = expand_shared_names(names_of_parameters(parts.bare), checkpoint.stored(Averaging.name))
            parts.parallel.load(parts.bare, {**checkpoint.stored("model"), **averaged})

    def _weights(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self.phase.work.owned.items()}

    @torch.no_grad()
    def _swap(self) -> None:
        if _evaluates_average(self._choice.options):
            weights = self._weights()
            for name, average in self._averages.items():
                before = weights[name].clone()
                weights[name].copy_(average)
                average.copy_(before)


def _evaluates_average(options: Mapping[str, Any]) -> bool:
    return bool(options.get("evaluate"))


def none() -> None:
    """Keep no average."""


def ema(*, decay: Factor = 0.999, evaluate: bool = True) -> Rule:
    """Exponential moving average: after each update, average = decay * average + (1 - decay) * weights.

    decay     decay factor of the average per update
    evaluate  evaluation, inference and export use the average; false: it is only stored in checkpoints
    Source: Polyak and Juditsky, Acceleration of stochastic approximation by averaging, 1992; `torch.optim.swa_utils`.
    """
    rule: Rule = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    return rule


def swa(*, start: Factor = 0.0, evaluate: bool = True) -> Rule:
    """Stochastic weight averaging: the mean of the weights after each update of the phase.

    start     averaging starts after this fraction of the updates of the phase
    evaluate  evaluation, inference and export use the average; false: it is only stored in checkpoints
    Source: Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, UAI 2018.
    """
    rule: Rule = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
    return rule


AVERAGINGS: Mapping[str, Callable[..., Rule | None]] = {"none": none, "ema": ema, "swa": swa}
