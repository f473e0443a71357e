"""Metric states: declarations, inputs, names, ranks and coupled losses. See also tests/laws/test_metrics.py."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from runner import Gather
from runner.base.batch import BatchSamples, MicroBatch
from runner.base.errors import TaskFault
from runner.base.task import Task
from runner.distributed.world import World
from runner.engine.evaluation.metric_states import MAX_NUMBERS, MetricStates, split_positions
from tests.distributed.ranks import CPU, run_ranks

ALONE = World(CPU)
HERE = Path(__file__)


class Mean(nn.Module):
    """A metric with the interface of torchmetrics and no declared states."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls: list[tuple[Any, ...]] = []

    def reset(self) -> None:
        self.calls = []

    def update(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append((args, kwargs))

    def compute(self) -> Any:
        return float(len(self.calls))


class Returned(Mean):
    """Returns a fixed result."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def compute(self) -> Any:
        return self.result


def states_of(
    metrics: Any, evaluate: Any = None, *, world: World = ALONE, samples_per_loss: int = 0, **members: Any
) -> MetricStates:
    """Return the states of a task that declares these metrics, and whose `evaluate` returns the batch by default."""

    class Own(Task):
        def __init__(self) -> None:
            self.model = nn.Linear(1, 1)

        def metrics(self, split: str) -> Any:
            return metrics

    if evaluate is not None:
        members["evaluate"] = lambda self, model, batch: evaluate(batch)
    states = MetricStates(type("Task", (Own,), members)(), "val", world, HERE, samples_per_loss)
    states.begin()
    return states


def batch_of(batch: Any, first: int = 0, *, is_counted: bool = True, size: int = 2) -> MicroBatch:
    places = list(range(first, first + size))
    return MicroBatch(batch, last=True, is_counted=is_counted, samples=BatchSamples(0, 0, places, places))


def evaluate(states: MetricStates, *batches: MicroBatch) -> list[Any]:
    with torch.no_grad():
        return [states.evaluate_batch(nn.Linear(1, 1), each) for each in batches]


# ---------------------------------------------------------------- declarations


@pytest.mark.parametrize("missing", ["update", "compute", "reset"])
def test_a_module_without_the_interface_of_a_metric_is_rejected(missing: str) -> None:
    members = {name: lambda self: None for name in ("update", "compute", "reset") if name != missing}
    with pytest.raises(TaskFault) as caught:
        states_of({"own": type("Part", (nn.Module,), members)()})
    assert "own" in caught.value.problems[0].fix


def test_a_metric_that_is_not_a_module_is_rejected() -> None:
    with pytest.raises(TaskFault):
        states_of({"own": type("Plain", (), dict.fromkeys(("update", "compute", "reset"), len))()})


def test_missing_declared_metrics_are_rejected_by_name() -> None:
    states = states_of({"a": Mean(), "b": Mean(), "c": Mean()}, lambda batch: {"b": 1, "sum": (1, 2)})
    with pytest.raises(TaskFault) as caught:
        evaluate(states, batch_of(None))
    (problem,) = caught.value.problems
    assert "a, c" in problem.what
    assert "b, sum" in problem.what
    assert '"a"' in problem.fix


def test_results_without_declared_metrics_are_returned_unchanged() -> None:
    assert evaluate(states_of({}, lambda batch: "anything"), batch_of(None)) == ["anything"]
    assert evaluate(states_of({"own": Mean()}, lambda batch: 3), batch_of(None)) == [3]


def test_metrics_accumulate_in_sample_order_and_sums_are_returned() -> None:
    states = states_of(
        {"own": Gather(lambda rows: {"sum": rows.sum(), "first": rows[0]})},
        lambda batch: {"own": batch, "mean": (batch.sum(), len(batch))},
    )
    late, early = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0])
    result = evaluate(states, batch_of(late, 2), batch_of(early, 0), batch_of(late, 4, is_counted=False))
    assert [list(sums) for sums in result] == [["mean"]] * 3
    assert states.results() == {"own.sum": 10.0, "own.first": 1.0}


def test_metrics_start_empty_and_are_nan_without_samples() -> None:
    own = Mean()
    states = states_of({"own": own, "rows": Gather(len)}, lambda batch: {"own": batch, "rows": torch.ones(2)})
    evaluate(states, batch_of(1))
    assert states.results() == {"own": 1.0, "rows": 2.0}
    states.begin()
    result = states.results()
    assert all(math.isnan(value) for value in result.values())
    assert list(result) == ["own", "rows"]
    assert own.calls == [], "the metric of the task is copied"


@pytest.mark.parametrize("value", [0.5, (0.5, 1), torch.tensor(0.5), None])
def test_the_error_for_a_value_without_rows_names_the_metric(value: Any) -> None:
    """An example is an F1 score of the batch instead of its predictions and labels."""
    states = states_of({"f1_macro": Gather(len)}, lambda batch: {"f1_macro": value})
    with pytest.raises(TaskFault) as caught:
        evaluate(states, batch_of(None))
    assert "f1_macro" in caught.value.problems[0].what


@pytest.mark.parametrize(
    ("rows", "result"),
    [
        (torch.ones(2, 3), ((2, 3), None)),
        ((torch.ones(2), torch.zeros(2, 1)), ((2,), (2, 1))),
        ({"b": torch.zeros(2, 1), "a": torch.ones(2)}, ((2,), (2, 1))),
    ],
    ids=["tensor", "tuple", "mapping"],
)
def test_rows_are_passed_as_arguments_of_compute(rows: Any, result: Any) -> None:
    given: list[Any] = []

    def compute(a: Tensor, b: Tensor | None = None) -> float:
        given.append((tuple(a.shape), None if b is None else tuple(b.shape)))
        return 1.0

    states = states_of({"own": Gather(compute)}, lambda batch: {"own": batch})
    evaluate(states, batch_of(rows))
    states.results()
    assert given == [result]


# ---------------------------------------------------------------- metrics with the interface of torchmetrics


@pytest.mark.parametrize(
    ("contribution", "call"),
    [
        ((1, 2), ((1, 2), {})), ([1, 2], ((1, 2), {})), (3, ((3,), {})),
        ({"preds": 1, "target": 2}, ((), {"preds": 1, "target": 2})), ({}, (({},), {})),
    ],
    ids=str,
)  # fmt: skip
def test_evaluate_returns_the_arguments_of_update(contribution: Any, call: Any) -> None:
    class Recorded(Mean):
        def compute(self) -> Any:
            assert self.calls == [call]
            return 1.0

    states = states_of({"own": Recorded()}, lambda batch: {"own": batch})
    evaluate(states, batch_of(contribution))
    assert states.results() == {"own": 1.0}


def test_the_error_of_a_failing_update_names_the_metric() -> None:
    class Fails(Mean):
        def update(self, error: Exception) -> None:
            raise error

    states = states_of({"own": Fails()}, lambda batch: {"own": batch})
    with pytest.raises(TaskFault) as caught:
        evaluate(states, batch_of(ValueError("too few classes")))
    assert "own" in caught.value.problems[0].what
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(states, batch_of(torch.OutOfMemoryError("CUDA out of memory")))


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (2.0, {"own": 2.0}),
        (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), {"own.0.0": 1.0, "own.0.1": 2.0, "own.1.0": 3.0, "own.1.1": 4.0}),
        ({"a": {"b": torch.tensor([5.0])}, "c": 1}, {"own.a.b.0": 5.0, "own.c": 1.0}),
    ],
    ids=["number", "matrix", "mapping"],
)
def test_each_number_of_a_result_has_a_name(result: Any, named: Mapping[str, float]) -> None:
    states = states_of({"own": Returned(result)}, lambda batch: {"own": batch})
    evaluate(states, batch_of(1))
    assert states.results() == named


@pytest.mark.parametrize("number", [MAX_NUMBERS, MAX_NUMBERS + 1])
def test_the_number_of_results_is_limited(number: int) -> None:
    states = states_of({"own": Returned(torch.arange(number))}, lambda batch: {"own": batch})
    evaluate(states, batch_of(1))
    if number > MAX_NUMBERS:
        with pytest.raises(TaskFault):
            states.results()
    else:
        assert len(states.results()) == number


def test_a_result_that_is_not_a_number_is_rejected() -> None:
    states = states_of({"own": Returned("large")}, lambda batch: {"own": batch})
    evaluate(states, batch_of(1))
    with pytest.raises(TaskFault):
        states.results()


def test_a_metric_with_uncopyable_parts_is_partly_copied() -> None:
    class Locked(Mean):
        def __init__(self) -> None:
            super().__init__()
            self.lock, self.part, self.none = threading.Lock(), Mean(), None
            self.register_module("absent", None)
            self.seen: list[Any] = []

        def update(self, *args: Any) -> None:
            self.seen.append(args)
            self.part.calls.append(args)

        def compute(self) -> Any:
            return {
                "seen": len(self.seen), "part": len(self.part.calls), "lock": int(self.lock is kept.lock),
                "shared": int(self.weight is kept.weight and self.part.weight is kept.part.weight),
                "absent": int(self.absent is None),
            }  # fmt: skip

    kept = Locked()
    states = states_of({"own": kept}, lambda batch: {"own": batch})
    for _ in range(2):
        states.begin()
        evaluate(states, batch_of(1), batch_of(1))
        assert states.results() == {
            "own.seen": 2.0, "own.part": 2.0, "own.lock": 1.0, "own.shared": 1.0, "own.absent": 1.0,
        }  # fmt: skip
    assert (kept.seen, kept.part.calls) == ([], [])


def test_every_metric_that_rejects_its_input_is_reported() -> None:
    class Fails(Mean):
        def update(self, *args: Any) -> None:
            raise ValueError

    states = states_of({"a": Fails(), "b": Mean(), "c": Gather(len), "d": Gather(len)})
    with torch.no_grad():
        faults = [*states.find_faults({"a": 1, "b": 1, "c": 1, "d": torch.ones(2), "sum": (1, 2)}, {})]
    assert len(faults) == 2
    assert sum("metric a " in str(fault) for fault in faults) == 1


# ---------------------------------------------------------------- ranks


def test_mixed_list_states_are_rejected_with_several_ranks() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Mixed(torchmetrics.Metric):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.add_state("seen", [], dist_reduce_fx=None)

        def update(self, x: Tensor) -> None:
            self.seen += [x, "word"]

        def compute(self) -> float:
            return float(len(self.seen))

    states = states_of({"own": Mixed()}, lambda batch: {"own": batch}, world=replace(ALONE, world_size=2))
    with pytest.raises(TaskFault) as caught:
        evaluate(states, batch_of(torch.ones(2)))
    assert "seen" in caught.value.problems[0].what
    alone = states_of({"own": Mixed()}, lambda batch: {"own": batch})
    evaluate(alone, batch_of(torch.ones(2)))
    assert alone.results() == {"own": 2.0}


def test_metrics_combine_ranks_with_and_without_samples() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def measure(world: World) -> dict[str, float]:
        metrics = {
            "mean": torchmetrics.MeanMetric(), "cat": torchmetrics.CatMetric(),
            "rows": Gather(lambda rows: {"first": rows[0], "number": len(rows)}),
        }  # fmt: skip
        states = states_of(metrics, lambda batch: dict.fromkeys(metrics, batch), world=world)
        for first in range(3 * world.rank, 3 * world.rank + 3) if world.rank < 2 else ():
            evaluate(states, batch_of(torch.arange(2.0) + 2 * first, 2 * first))
        return states.results()

    expected = {"mean": 5.5, "rows.first": 0.0, "rows.number": 12.0}
    expected |= {f"cat.{number}": float(number) for number in range(12)}
    assert run_ranks(measure, 3) == [expected] * 3


def test_a_metric_is_nan_if_no_rank_has_samples() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def measure(world: World) -> bool:
        states = states_of({"mean": torchmetrics.MeanMetric(), "rows": Gather(len)}, world=world)
        result = states.results()
        return list(result) == ["mean", "rows"] and all(map(math.isnan, result.values()))

    assert run_ranks(measure, 2) == [True, True]


# ---------------------------------------------------------------- coupled losses


def coupled_states(size: int, factor: float = 1.0) -> MetricStates:
    members: dict[str, Any] = {
        "embed": lambda self, model, batch: batch,
        "couple": lambda self, codes: (factor * codes.sum() * len(codes), len(codes)),
    }
    return states_of({}, samples_per_loss=size, **members)


def measure_loss(states: MetricStates) -> dict[str, float]:
    batches = [batch_of(torch.full((2,), 1.0 + first), 2 * first) for first in range(4)]
    assert evaluate(states, *batches) == [{}] * 4
    return states.results()


@pytest.mark.parametrize(
    ("size", "loss"),
    [(0, 8 * 20 / 8), (8, 8 * 20 / 8), (4, (4 * 6 + 4 * 14) / 8), (6, (6 * 12 + 2 * 8) / 8)],
)
def test_a_coupled_loss_is_computed_over_groups_of_samples(size: int, loss: float) -> None:
    states = coupled_states(size)
    assert measure_loss(states) == {"loss": loss}
    assert states.nonfinite == set()
    states.begin()
    assert math.isnan(states.results()["loss"])
    assert states.nonfinite == set(), "no samples"


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_coupled_loss_that_is_not_finite_is_reported(factor: float) -> None:
    states = coupled_states(0, factor)
    measure_loss(states)
    assert states.nonfinite == {"loss"}


def test_an_embedding_with_more_rows_than_samples_is_rejected() -> None:
    with pytest.raises(TaskFault):
        evaluate(coupled_states(0), batch_of(torch.ones(3), size=2))


# ---------------------------------------------------------------- batches


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 20))
def test_batches_are_consecutive_and_do_not_cross_groups(num_samples: int, batch: int, group: int) -> None:
    parts = split_positions(num_samples, batch, group)
    assert [position for part in parts for position in part] == list(range(num_samples))
    size = group or max(1, num_samples)
    for part in parts:
        assert 1 <= len(part) <= batch
        assert part[0] // size == part[-1] // size
        is_cut = (part[-1] + 1) % size == 0 or part[-1] + 1 == num_samples
        assert len(part) == batch or is_cut, "every batch is as large as possible"
