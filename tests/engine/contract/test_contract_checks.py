"""An invalid return value of a task raises TaskFault, which names the method, the value and a fix."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from runner.axes.precision import fp32
from runner.base.errors import Exit, TaskFault
from runner.base.task import Prediction, Task
from runner.base.text import NOT_MEASURED
from runner.distributed.world import World
from runner.engine.contract.contract_checks import validate_example
from runner.engine.contract.task_loading import CheckedLoss
from runner.engine.evaluation.evaluate import BatchSizes, EvaluationResult, evaluate
from runner.engine.run import Observers
from runner.loading.fetcher import Fetcher
from runner.loading.loaders import Loader
from runner.trained import infer
from tests.distributed.ranks import run_ranks
from tests.forkserver import ForkServer
from tests.parts import parts_of

WORLD = World(torch.device("cpu"))
HERE = Path(__file__)
one = torch.ones(())
three = torch.ones(3)


class Wrong(Task):
    """A task whose methods return what the test specifies; the loss has a gradient."""

    def __init__(self, **returns: Callable[[Tensor], Any]) -> None:
        self.model = nn.Linear(1, 1)
        self.returns = returns

    def loss(self, model: nn.Module, batch: Tensor) -> Any:
        return self.returns["loss"](model(batch).square())

    def evaluate(self, model: nn.Module, batch: Tensor) -> Any:
        return self.returns["evaluate"](batch)

    def summarize(self, metrics: Any) -> Any:
        return self.returns.get("summarize", lambda _: metrics)(metrics)

    def predict(self, model: nn.Module, generator: torch.Generator, /) -> Any:
        return self.returns["predict"](one)

    def example(self) -> Any:
        return self.returns["example"](torch.ones(2, 4))


def loss_of(task: Task) -> Any:
    return CheckedLoss(task.loss, HERE, records_operations=False)(task.model, torch.ones(4, 1))


def metrics_of(task: Task, world: World = WORLD, num_samples: int = 4, batch_size: int = 2) -> EvaluationResult:
    samples = [torch.tensor(float(number)) for number in range(num_samples)]
    loader = Loader(Fetcher(samples, task.collate, bad_samples="stop"))  # type: ignore[arg-type]
    result = evaluate(parts_of(task, HERE, world), loader, list(range(num_samples)), BatchSizes(batch_size, 0))
    assert result is not None
    return result


def iterate_predictions(task: Task) -> list[Prediction]:
    parts: Any = SimpleNamespace(
        task=task, source=HERE, world=WORLD, bare=task.model, model=task.model, precision=fp32(WORLD, task.model)
    )
    plan: Any = SimpleNamespace(inference={"seed": 0})
    return list(infer.iterate_predictions(plan, parts))


def example_of(task: Task) -> tuple[Any, ...]:
    return validate_example(task.example(), task.example, HERE, min_samples=2)


LOSSES: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda x: None,
    "only a sum": lambda x: x.sum(),
    "a number": lambda x: 3.5,
    "text": lambda x: "loss",
    "a mapping": lambda x: {"loss": x.sum()},
    "a list": lambda x: [x.sum(), 4],
    "three values": lambda x: (x.sum(), 4, 4),
    "one value": lambda x: (x.sum(),),
    "no reduction": lambda x: (x, 4),
    "a sum that is a number": lambda x: (float(x.sum().detach()), 4),
    "a sum without gradient": lambda x: (x.sum().detach(), 4),
    "a complex sum": lambda x: (x.sum() * 1j, 4),
    "no count": lambda x: (x.sum(), None),
    "a count that is text": lambda x: (x.sum(), "4"),
    "a count per sample": lambda x: (x.sum(), three),
    "a count that is a flag": lambda x: (x.sum(), True),
    "a negative count": lambda x: (x.sum(), -4),
    "a negative count in a tensor": lambda x: (x.sum(), torch.tensor(-4)),
    "a NaN count": lambda x: (x.sum(), math.nan),
    "an infinite count": lambda x: (x.sum(), torch.tensor(math.inf)),
}
METRICS: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda x: None,
    "a tensor": lambda x: one,
    "text": lambda x: "accuracy",
    "a pair": lambda x: (one, 4),
    "a list": lambda x: [("accuracy", (one, 4))],
    "a metric that is a tensor": lambda x: {"accuracy": one},
    "a metric that is a number": lambda x: {"accuracy": 0.5},
    "a metric that is two letters": lambda x: {"accuracy": "ab"},
    "a metric of three values": lambda x: {"accuracy": (one, 4, 4)},
    "a sum per sample": lambda x: {"accuracy": (three, 3)},
    "a count per sample": lambda x: {"accuracy": (one, three)},
    "a missing sum": lambda x: {"accuracy": (None, 4)},
    "a sum of flags": lambda x: {"accuracy": (torch.tensor(True), 4)},
    "a name that is a number": lambda x: {1: (one, 4)},
    "no name": lambda x: {"": (one, 4)},
    "a negative count": lambda x: {"accuracy": (one, -1)},
    "a negative count in a tensor": lambda x: {"accuracy": (one, torch.tensor(-1))},
}
SUMMARIES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda metrics: None,
    "a metric that is text": lambda metrics: {"accuracy": "high"},
    "a metric per sample": lambda metrics: {"accuracy": three},
}
PREDICTIONS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda _: None,
    "a prediction that is not yielded": lambda _: Prediction({"a.txt": "a"}),
    "text": lambda _: "answer",
    "a mapping": lambda _: {"a.txt": "a"},
    "text in a list": lambda _: ["answer"],
    "a tensor in a file": lambda _: [Prediction({"a": one})],  # type: ignore[dict-item]
    "a number in a file": lambda _: [Prediction({"a": 3})],  # type: ignore[dict-item]
    "objects in a file": lambda _: [Prediction({"a": np.array([{}])})],
    "no files": lambda _: [Prediction("a.txt")],  # type: ignore[arg-type]
    "a file outside the folder": lambda _: [Prediction({"../a.txt": "a"})],
    "a name with a space": lambda _: [Prediction({"my answer.txt": "a"})],
    "a text that is a number": lambda _: [Prediction({"a": "a"}, text=3)],  # type: ignore[arg-type]
    "negative items": lambda _: [Prediction({"a": "a"}, items=-1)],
    "items in a tensor": lambda _: [Prediction({"a": "a"}, items=one)],  # type: ignore[arg-type]
    "a plot that is a path": lambda _: [Prediction({"a": "a"}, plots={"a.png": "a.png"})],  # type: ignore[dict-item]
}
EXAMPLES: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda x: None,
    "a tensor": lambda x: x,
    "keyword arguments": lambda x: {"x": x},
    "one sample": lambda x: (x[:1],),
    "one sample in a dictionary": lambda x: (True, {"x": x[:1]}),
    "no argument": lambda x: (),
    "no batch dimension": lambda x: (one, 3),
}
TABLES: dict[str, tuple[dict[str, Callable[[Any], Any]], Callable[[Task], Any]]] = {
    "loss": (LOSSES, loss_of),
    "evaluate": (METRICS, metrics_of),
    "summarize": (SUMMARIES, metrics_of),
    "predict": (PREDICTIONS, iterate_predictions),
    "example": (EXAMPLES, example_of),
}
CASES = [(method, name) for method, (table, _) in TABLES.items() for name in table]


@pytest.mark.parametrize(("method", "name"), CASES, ids=[" returns ".join(case) for case in CASES])
def test_the_error_for_an_invalid_value_names_the_method_and_a_fix(method: str, name: str) -> None:
    table, use = TABLES[method]
    right = {"evaluate": lambda x: {"accuracy": (x.sum(), len(x))}}
    with pytest.raises(TaskFault) as result:
        use(Wrong(**{**right, method: table[name]}))
    (problem,) = result.value.problems
    assert result.value.exit_code == Exit.SOFTWARE
    assert method in problem.what or "Prediction" in problem.what
    assert problem.fix
    line = getattr(Wrong, method).__code__.co_firstlineno
    assert problem.where == f"{__file__}:{line}"


@pytest.mark.parametrize("value", [torch.tensor(True), torch.tensor(1j)], ids=["bool", "complex64"])
def test_the_error_names_an_unsupported_metric_dtype(value: Tensor) -> None:
    with pytest.raises(TaskFault) as result:
        metrics_of(Wrong(evaluate=lambda x: {"accuracy": (value, len(x))}))
    assert str(value.dtype).removeprefix("torch.") in str(result.value)


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: (x.sum(), 4),
        lambda x: (x.sum().reshape(1), torch.tensor([4])),
        lambda x: (x.sum(), np.int64(4)),
        lambda x: (x.sum(), 2.5),
        lambda x: (x.sum(), 0),
        lambda x: (x.sum(), torch.tensor(2.5, requires_grad=True)),
    ],
)
def test_a_sum_and_a_count_of_one_element_are_accepted(answer: Callable[[Tensor], Any]) -> None:
    total, count = loss_of(Wrong(loss=answer))
    assert total.shape == ()
    assert total.requires_grad
    assert not (isinstance(count, Tensor) and (count.shape or count.requires_grad))


def test_valid_predictions_are_accepted() -> None:
    right = [Prediction({"a/b.txt": "a", "c": b"c", "d": np.zeros(2)}, text="a", items=0, plots={"e.png": b""})]
    assert iterate_predictions(Wrong(predict=lambda _: right)) == right
    assert iterate_predictions(Wrong(predict=lambda _: iter(right))) == right


# ---------------------------------------------------------------- a metric without items


def test_a_metric_without_items_is_nan_and_listed_as_empty() -> None:
    answer = {"rare": (torch.tensor(0.0), 0), "odd": (torch.tensor(math.nan), 0), "often": (one, 2)}
    result = metrics_of(Wrong(evaluate=lambda x: answer))
    assert math.isnan(result.metrics["rare"])
    assert set(result.empty) == {"rare", "odd"}
    assert result.measured() == {"often": 0.5}


def test_a_metric_with_a_nan_sum_counts_as_measured() -> None:
    result = metrics_of(Wrong(evaluate=lambda x: {"loss": (torch.tensor(math.nan), 2)}))
    assert math.isnan(result.measured()["loss"])


def test_a_metric_without_items_is_distinguished_from_a_nan_metric() -> None:
    answer = {"loss": (torch.tensor(math.nan), 2), "rare": (torch.tensor(0.0), 0)}
    result = metrics_of(Wrong(evaluate=lambda x: answer))
    assert result.empty == ("rare",)
    assert set(result.measured()) == {"loss"}


def test_a_tracker_receives_the_same_rows_as_the_metrics_file() -> None:
    """After a stop, rows are sent again from the file, so both must be equal."""
    written: list[str] = []
    logged: list[Any] = []
    metrics = SimpleNamespace(write=written.append, flush=lambda: None)
    observers: Any = SimpleNamespace(metrics=metrics, tracker=SimpleNamespace(log=logged.append))
    Observers.write(observers, {"update": 2, "val/rare": math.nan, "val/loss": 0.5})
    assert logged == [{"update": 2, "val/rare": None, "val/loss": 0.5}] == [json.loads(each) for each in written]


def test_a_metric_is_measured_if_any_rank_has_items() -> None:
    def rank(world: World) -> list[Any]:
        count = 2 * world.rank
        result = metrics_of(Wrong(evaluate=lambda x: {"rare": (torch.tensor(float(count)) / 4, count)}), world)
        return [result.metrics, list(result.empty)]

    assert run_ranks(rank, 2) == [[{"rare": 0.25}, []]] * 2


# ---------------------------------------------------------------- end to end

TASK = """
import torch
import torch.nn.functional as F
from torch import nn
from runner import Task
from runner.base.task import Prediction

SETTINGS = {"updates": 6, "global_batch_size": 8, "evaluate.every": 2, "checkpoint.best": "val/rare",
            "checkpoint.every": 2, "early_stopping.patience": 1, "early_stopping.metric": "val/rare"}

def build(*, wrong: str = "", sparse: bool = False) -> Task:
    return Mine(wrong, sparse)

class Mine(Task):
    def __init__(self, wrong, sparse):
        self.wrong, self.evaluated = wrong, 0
        self.model = nn.Sequential(nn.Embedding(5, 4, sparse=sparse), nn.Linear(4, 2))
    def dataset(self, split):
        return [(number % 5, number % 2) for number in range(16)]
    def loss(self, model, batch):
        x, y = batch
        if self.wrong == "loss": return F.cross_entropy(model(x), y), len(y)
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)
    def evaluate(self, model, batch):
        if self.wrong == "evaluate": return torch.zeros(())
        return {"rare": (torch.tensor(0.0), 0), "loss": self.loss(model, batch)}
    def baselines(self):
        return None if self.wrong == "baselines" else {"rare": 0.5}
    def predict(self, model, generator, *, samples: int = 1):
        return 3 if self.wrong == "predict" else [Prediction({"a.txt": "a"})]
"""
ON_CPU = "--task mine.py run=mine device=cpu monitor=off dataloader.num_workers=0"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("train task.wrong=loss", 'reduction="sum"'),
        ("train task.wrong=evaluate", "evaluate"),
        ("train task.wrong=baselines", "baselines"),
        ("train task.sparse=true", "sparse=False"),
        ("both task.wrong=predict updates=1", "predict"),
    ],
)
def test_errors_of_a_task_are_not_reported_as_internal_errors(
    args: str, named: str, server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    result = server.run(f"{args} {ON_CPU}", tmp_path)
    assert result.code == 70
    assert named in result.err
    assert "of accel-run" not in result.err
    assert "Traceback" not in result.err


@pytest.mark.slow
def test_metrics_without_items_are_shown_consistently(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK.replace('"rare"', '"rare_loss"').replace(', "loss": self.loss(', "} or {("))
    shown = {args: server.run(args, tmp_path) for args in (f"train {ON_CPU}", "runs", "status mine", "report mine")}
    assert server.run(f"train {ON_CPU} run=other".replace("run=mine ", ""), tmp_path).code == 0
    shown["compared"] = server.run("report mine other out=compared.html", tmp_path)
    assert {result.code for result in shown.values()} == {0}
    texts = {args: result.out for args, result in shown.items() if not args.startswith(("report", "compared"))}
    texts |= {
        page.name: page.read_text() for page in (tmp_path / "outputs/mine/report.html", tmp_path / "compared.html")
    }
    for where, text in texts.items():
        plain = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text))
        assert f"rare_loss {NOT_MEASURED}" in plain, where
        assert not {"nan", "None", "null"} & set(re.findall(r"\w+", plain.partition("key requested used")[0])), where
    records = json.loads(server.run("runs --json", tmp_path).out)
    assert [row["metrics"] for row in records] == [{"val/rare_loss": None}] * 2


def test_a_metric_without_items_is_null_and_never_the_best(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    for args in ("", "updates=8 resume_allow=[updates]"):  # the second run reads the metric from the checkpoint
        result = server.run(f"train {ON_CPU} {args}", tmp_path)
        assert result.code == 0, result.err
    run = tmp_path / "outputs" / "mine"

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not valid JSON")

    actual = [json.loads(path.read_text(), parse_constant=refuse) for path in run.rglob("*.json")]
    assert actual
    rows = [json.loads(row, parse_constant=refuse) for row in (run / "metrics.jsonl").read_text().splitlines()]
    assert {row["val/rare"] for row in rows if "val/rare" in row} == {None}
    record = json.loads((run / "run.json").read_text())
    assert record["metrics"]["val/rare"] is None
    assert record["update"] == 8  # early stopping ignores the metric
    states = [json.loads(path.read_text()) for path in run.glob("checkpoints/*/state.json")]
    assert states
    assert all(state["bests"] == [] for state in states)
