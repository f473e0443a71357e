"""Combine the torchmetrics that a LightningModule logs into one metric, which the runner merges over all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class MetricRecorder:
    """Record the calls of a module's torchmetrics objects in a step, so that the runner can repeat them on copies.

    In each evaluation step, a metric starts from an empty state at its first call, so that `compute` in the step
    returns the value of this batch. In training steps, a metric accumulates over updates unless it is logged.

    metrics  the metrics of the module, including members of collections, but not metrics inside other metrics
    calls    (index of the metric, positional arguments, keyword arguments) of the last step
    logged   logged name -> index of the metric, in the last step
    """

    def __init__(self, module: nn.Module) -> None:
        self.metrics: list[Any] = []
        self.calls: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []
        self.logged: dict[str, int] = {}
        self._returned: dict[int, Any] = {}  # value of the last call of each metric in a training step
        self._is_recording = False
        self._attach(module)

    def begin(self, *, evaluates: bool) -> None:
        self.calls, self.logged, self._returned, self._is_recording = [], {}, {}, evaluates

    def pop_batch_value(self, index: int) -> Any:
        """Return what a metric has returned for the batch of a training step, or None if it was not called.

        The state of the metric is then reset, as Lightning does for a logged metric. Otherwise, list states, such as
        collected predictions, would grow with each update.
        """
        self.metrics[index].reset()
        return self._returned.get(index)

    def find(self, value: Any) -> int | None:
        return next((index for index, metric in enumerate(self.metrics) if metric is value), None)

    def _attach(self, module: Any) -> None:
        if hasattr(module, "_reductions"):  # a torchmetrics.Metric; checked with 1.5 to 1.9
            index = len(self.metrics)
            self.metrics.append(module)
            module.update, module.forward = (self._recording(index, call) for call in (module.update, module.forward))
            return
        # A collection updates only one of several members with equal states, so calls of the others would be missing.
        if isinstance(module, nn.ModuleDict) and hasattr(module, "compute"):
            collection: Any = module

            def update(*args: Any, **kwargs: Any) -> None:
                for member in collection.values(copy_state=False):
                    member.update(*args, **member._filter_kwargs(**kwargs))

            collection.update = update
        for child in module.children():
            self._attach(child)

    def _recording(self, index: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            if not self._is_recording:  # in a training step, or when `forward`, which is recorded, calls `update`
                value = call(*args, **kwargs)
                if value is not None:  # `update` returns None
                    self._returned[index] = value
                return value
            if all(other != index for other, *_ in self.calls):
                self.metrics[index].reset()
            self.calls.append((index, args, kwargs))
            self._is_recording = False
            try:
                return call(*args, **kwargs)
            finally:
                self._is_recording = True

        return record


class LoggedMetrics(nn.Module):
    """The metrics of a module as one metric, whose `update` repeats the recorded calls of a batch.

    The value of a metric that no batch on any rank has updated is NaN.

    names  function that returns reported name -> index of the metric
    """

    metrics: Any
    num_updates: Tensor  # number of updates of each metric; merged over ranks, like a metric state

    def __init__(self, metrics: Sequence[nn.Module], names: Callable[[], Mapping[str, int]]) -> None:
        super().__init__()
        # torchmetrics restores the original `update` in a copy, but not `forward`, which MetricRecorder has replaced.
        copies = [copy.deepcopy(metric) for metric in metrics]
        for metric in copies:
            vars(metric).pop("forward")
        self.metrics, self.names = nn.ModuleList(copies), names
        self.register_buffer("num_updates", torch.zeros(len(copies), dtype=torch.int64), persistent=False)
        self._reductions = {"num_updates": lambda stacked: stacked.sum(0)}  # as in torchmetrics

    @property
    def metric_state(self) -> dict[str, Tensor]:
        return {"num_updates": self.num_updates}

    def update(self, calls: Sequence[tuple[int, tuple[Any, ...], dict[str, Any]]]) -> None:
        for index, args, kwargs in calls:
            self.metrics[index].update(*args, **kwargs)
            self.num_updates[index] += 1

    def compute(self) -> dict[str, Any]:
        updated = self.num_updates.tolist()
        names = self.names().items()
        return {name: self.metrics[index].compute() if updated[index] else torch.nan for name, index in names}

    def reset(self) -> None:
        self.num_updates.zero_()
        for metric in self.metrics:
            metric.reset()
