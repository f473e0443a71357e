"""Settings that name a metric: unknown names are reported early, and each phase ranks by its own metric."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.cli import main
from runner.config.request import Request
from runner.console.run_summary import MAX_METRICS
from runner.durable.checkpoint import load, load_newest, newest_first
from runner.durable.checkpoint_choice import choose_checkpoint, find_best_checkpoints, read_ranking
from runner.durable.directory import RunDirectory
from runner.engine.hooks.evaluation import Evaluation
from runner.engine.opening import open_phase
from tests.commands_here import run_here

TASK = Path(__file__).parents[1] / "task_of_metrics.py"
COMMON = ("global_batch_size=8", "device=cpu", "monitor=off", "tracker=none", "updates=2", "run=small")
BEST, STOPPING, PLATEAU = "checkpoint.best", "early_stopping.metric", "scheduler.metric"


@contextmanager
def opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *args: str, task: Path = TASK
) -> Iterator[tuple[Any, list[str]]]:
    """Yield the phase and the warnings of the run."""
    warned: list[str] = []
    with open_phase(Request((*COMMON, f"output_root={folder}", "backend.threads=1", *args), task)) as phase:
        monkeypatch.setattr(phase.run.observers.screen, "warn", warned.append)
        yield phase, warned


@pytest.mark.parametrize(
    ("args", "key", "similar"),
    [
        ([], "", ""),
        (["checkpoint.best=val/acuracy"], BEST, "val/accuracy"),
        (["checkpoint.best=accuracy"], BEST, "val/accuracy"),
        (["checkpoint.best=val/accuracy"], "", ""),
        (["checkpoint.best=val/recall.1"], "", ""),
        (["checkpoint.best=val/recall.2"], BEST, "val/recall.1"),
        (["early_stopping.metric=val/f1", "early_stopping.patience=3"], STOPPING, "val/accuracy"),
        (["early_stopping.metric=val/f1"], "", ""),  # it has no effect without a patience
        (["scheduler=plateau"], PLATEAU, "val/accuracy"),  # the default is val/loss, which this task does not return
        (["scheduler=plateau", "scheduler.metric=val/accuracy"], "", ""),
        (["task.gathered=true", "checkpoint.best=val/spread.std"], "", ""),
        (["task.gathered=true", "checkpoint.best=val/sprad.std"], BEST, "val/spread"),
        (["task.summarized=true", "checkpoint.best=val/error"], "", ""),
        (["task.summarized=true", "checkpoint.best=val/accuracy"], BEST, "val/error"),
        (["task.val=false", "checkpoint.best=val/accuracy"], BEST, ""),
        (["task.val=false", "scheduler=plateau"], PLATEAU, ""),
        (["task.val=false"], "", ""),
    ],
)
def test_an_unknown_metric_is_reported_before_the_first_update(
    args: list[str], key: str, similar: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, monkeypatch, *args) as (phase, warned):
        phase.hook(Evaluation).begin()
        assert phase.position.update == 0
    assert [text.startswith(key) and similar in text for text in warned] == [True] * bool(key)


def test_an_unknown_early_stopping_metric_of_another_phase_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, checkpoint.best is the metric of early stopping; the user has not set it."""
    phases = {"first": {}, "second": {"early_stopping.metric": "val/f1", "early_stopping.patience": 3}}
    task = tmp_path / "phases.py"
    task.write_text(f"{TASK.read_text(encoding='utf-8')}\nPHASES = {phases}\n", encoding="utf-8")
    with opened(tmp_path, monkeypatch, task=task) as (phase, warned):
        assert phase.name == "first"
        phase.hook(Evaluation).begin()
    assert warned == []


@pytest.mark.parametrize("args", [[], ["task.gathered=true", "task.summarized=true"]])
def test_the_first_evaluation_reports_an_unknown_metric_once(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If `summarize` needs metrics of all samples, the names are known only after the first evaluation."""
    plateau = ["scheduler=plateau", "scheduler.metric=val/f1"]
    with opened(tmp_path, monkeypatch, *args, *plateau) as (phase, warned):
        phase.hook(Evaluation).begin()
        known = [text for text in warned if text.startswith(PLATEAU)]
        assert len(known) == (0 if args else 1)
        for _ in phase.updates():
            pass
        phase.close()
    assert len([text for text in warned if text.startswith(PLATEAU)]) == (1 if args else 3)


def test_checking_metric_names_changes_neither_the_task_nor_the_generators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, monkeypatch, "checkpoint.best=val/f1") as (phase, warned):
        state = torch.get_rng_state()
        modes = [module.training for module in phase.model.modules()]
        phase.hook(Evaluation).begin()
        assert torch.equal(torch.get_rng_state(), state)
        assert [module.training for module in phase.model.modules()] == modes
    assert len(warned) == 1


def test_all_ranks_check_metric_names_with_the_same_batch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    two = ["parallelism=ddp", "parallelism.world_size=2"]
    args = ["train", "--task", str(TASK), *COMMON, *two, f"output_root={tmp_path}", "checkpoint.best=val/acuracy"]
    assert main(args) == 0
    shown = "".join(capfd.readouterr())
    assert shown.count("checkpoint.best=val/acuracy") == 2, "before the first update and after the first evaluation"


@pytest.mark.parametrize(("late", "expected"), [(1, [4]), (3, [4]), (4, [4]), (5, [])])
def test_a_metric_of_later_evaluations_selects_the_best_checkpoint(
    late: int, expected: list[int], tmp_path: Path
) -> None:
    best = ["updates=4", f"task.late={late}", "checkpoint.best=val/late", "checkpoint.every=1"]
    args = ["train", "--task", str(TASK), *COMMON, *best, f"output_root={tmp_path}"]
    assert main(args) == 0
    newest = load_newest(tmp_path / "small" / "checkpoints")
    assert newest is not None
    assert [number for _, number in find_best_checkpoints(newest)] == expected


def test_ranking_by_a_new_metric_on_resume_includes_earlier_checkpoints(tmp_path: Path) -> None:
    args = ["train", "--task", str(TASK), *COMMON, "task.late=1", "checkpoint.every=1", f"output_root={tmp_path}"]
    assert main([*args, "updates=4", "checkpoint.keep=9"]) == 0
    other = ["checkpoint.best=val/late", "checkpoint.best_is=max", "checkpoint.keep=2"]
    assert main([*args, "updates=8", "resume_allow=[updates]", *other]) == 0
    newest = load_newest(tmp_path / "small" / "checkpoints")
    assert newest is not None
    assert find_best_checkpoints(newest) == [(1.0, 1)], "the metric decreases"


STOPS = {"early_stopping.patience": 9, "early_stopping.best_is": "max"}
LATE, ACCURACY, LOSS = ("val/late", "max"), ("val/accuracy", "max"), ("val/loss", "min")


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ({"one": {}, "two": {**STOPS, "early_stopping.metric": "val/late"}}, {"one": LOSS, "two": LATE}),
        (
            {
                "one": {**STOPS, "early_stopping.metric": "val/accuracy"},
                "two": {**STOPS, "early_stopping.metric": "val/late"},
            },
            {"one": ACCURACY, "two": LATE},
        ),
        (
            {
                "one": {**STOPS, "early_stopping.metric": "val/late"},
                "two": {**STOPS, "early_stopping.metric": "val/late"},
            },
            {"one": LATE, "two": LATE},
        ),
        (
            {"one": {"early_stopping.metric": "val/late"}, "two": {**STOPS, "early_stopping.metric": "val/late"}},
            {"one": LOSS, "two": LATE},
        ),
    ],
    ids=["only two", "different metrics", "same metric", "one without patience"],
)
def test_a_phase_ranks_checkpoints_by_its_early_stopping_metric(
    phases: dict[str, Any], expected: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    task = tmp_path / f"{tmp_path.name}_phases.py"
    task.write_text(f"{TASK.read_text(encoding='utf-8')}\nPHASES = {phases}\n", encoding="utf-8")
    settings = ["updates=3", "task.late=1", "checkpoint.every=1", "checkpoint.keep=9", f"output_root={tmp_path}"]
    assert main(["train", "--task", str(task), *COMMON, *settings]) == 0
    run = RunDirectory.find(tmp_path, "small")
    states = [load(path).state for path in newest_first(run.checkpoints)]
    rankings = {state["phase"]: read_ranking(state) for state in states}
    assert {name: (ranking.metric, ranking.better) for name, ranking in rankings.items()} == expected
    best = choose_checkpoint(run, "best").checkpoint
    assert (best.state["phase"], best.state["phase_update"]) == ("two", 1), "the metric decreases"


FITS = """
import torch
from torch import nn
from runner import Fit, Task

PHASES = {"fit": {"kind": "fit"},
          "train": {"needs": ["fit"], "early_stopping.patience": 9, "early_stopping.metric": "val/accuracy",
                    "early_stopping.best_is": "max"}}

def build() -> Task:
    return Centered()

class Mean(Fit):
    def start(self):
        return {"sum": torch.zeros(4), "count": torch.zeros(())}

    def add(self, model, state, batch):
        x, _ = batch
        return {"sum": state["sum"] + x.sum(0), "count": state["count"] + len(x)}, len(x)

    def merge(self, one, other):
        return {name: one[name] + other[name] for name in one}

    def finish(self, model, state):
        model.mean.copy_(state["sum"] / state["count"])
        return {}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(x - self.mean)

class Centered(Task):
    fits = {"fit": Mean()}

    def __init__(self):
        self.model = Model()

    def begin_phase(self, phase):
        self.is_fit = phase == "fit"

    def dataset(self, split):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)

    def evaluate(self, model, batch):
        x, y = batch
        if self.is_fit:
            return {"norm": (model.mean.norm() * len(x), len(x))}
        return {"loss": self.loss(model, batch), "accuracy": ((model(x).argmax(1) == y).sum(), len(y))}
"""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["checkpoint.best=val/accuracy", "checkpoint.best_is=max"], ACCURACY),
        (["checkpoint.best_is=max"], ("val/loss", "max")),
        (["checkpoint.best=null"], (None, "min")),
    ],
    ids=["metric", "only best_is", "none"],
)
def test_explicit_settings_override_the_early_stopping_metric(
    overrides: list[str], expected: tuple[str | None, str], tmp_path: Path
) -> None:
    stops = ["early_stopping.patience=9", "early_stopping.metric=val/late", "early_stopping.best_is=max"]
    settings = ["updates=2", "task.late=1", "checkpoint.every=1", f"output_root={tmp_path}", *stops]
    assert main(["train", "--task", str(TASK), *COMMON, *settings, *overrides]) == 0
    newest = load_newest(tmp_path / "small" / "checkpoints")
    assert newest is not None
    ranking = read_ranking(newest.state)
    assert (ranking.metric, ranking.better) == expected


def test_a_fit_phase_ignores_the_early_stopping_metric_of_another_phase(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The evaluation of the fit phase does not return that metric, and the user has not set one."""
    task = tmp_path / f"{tmp_path.name}_fit.py"
    task.write_text(FITS, encoding="utf-8")
    assert main(["train", "--task", str(task), *COMMON, "updates=2", f"output_root={tmp_path}"]) == 0
    run = RunDirectory.find(tmp_path, "small")
    rankings = {
        state["phase"]: read_ranking(state) for state in (load(path).state for path in newest_first(run.checkpoints))
    }
    assert (rankings["train"].metric, rankings["fit"].metric) == ("val/accuracy", "val/loss")
    assert "val/norm" not in capsys.readouterr().err


MANY = """
class Many(Measured):
    late = 0

    def evaluate(self, model, batch):
        accuracy = super().evaluate(model, batch)["accuracy"]
        return {f"m{number}": accuracy for number in range(99)} | {"accuracy": accuracy}


def build():
    return Many(False, True)
"""


def test_the_metric_of_the_best_checkpoint_is_shown_if_there_are_too_many_to_show_all(tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text(TASK.read_text() + MANY)
    result = run_here(["train", "--task", "many.py", *COMMON, "checkpoint.best=val/accuracy"], tmp_path)
    assert result.code == 0, result.err
    assert re.findall(r"^(?:update \d+: |validation +)(\S+)", result.out, re.MULTILINE) == ["val/accuracy"] * 3
    assert result.out.count("val/m") == 3 * (MAX_METRICS - 1)
