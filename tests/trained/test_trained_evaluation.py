"""`accel-run evaluate` gives the same result as evaluation during training, and counts each sample once."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runner import open_run
from runner.base.errors import AccelRunError, ConfigError, InputMissing, TaskFault
from runner.cli import main
from runner.config.request import Request
from runner.distributed.world import World
from runner.durable import checkpoint
from runner.durable.directory import RunDirectory
from runner.engine.checkpoints.oom_history import ReducedMicroBatch, write_reductions
from runner.plan.planner import plan_this_process
from runner.records.events import Console
from runner.trained import trained_evaluation
from runner.trained.trained_evaluation import evaluate_run
from runner.trained.trained_run import find_source
from tests.commands_here import run_here
from tests.engine.task_of_averages import build
from tests.forkserver import CompletedCommand

TASK = Path(__file__).parents[1] / "engine" / "task_of_averages.py"
ON_CPU = ("device=cpu", "monitor=off", "backend.threads=1", "evaluate.every=2")
TWO_RANKS = ("parallelism=ddp", "parallelism.world_size=2")
EMA = ("averaging=ema", "averaging.decay=0.9")
EPS = torch.finfo(torch.float64).eps


def train(folder: Path, *args: str) -> dict[str, float]:
    result = run_here(["train", "--task", str(TASK), "run=mine", "updates=6", *ON_CPU, *args], folder)
    assert result.code == 0, result.err
    metrics = json.loads((folder / "outputs" / "mine" / "run.json").read_text())["metrics"]
    assert isinstance(metrics, dict)
    return metrics


def evaluate(folder: Path, *args: str) -> dict[str, Any]:
    result = run_here(["evaluate", *args, "--json"], folder)
    assert result.code == 0, result.err
    record = json.loads(result.out)
    assert isinstance(record, dict)
    return record


def loss_by_hand(folder: Path, update: int, split: str) -> float:
    """Return the loss of a checkpoint on a split, computed without the runner's loops."""
    task = build()
    task.model.load_state_dict(
        checkpoint.load(checkpoint.checkpoint_path(folder / "outputs/mine/checkpoints", update)).tensors("model")
    )
    with torch.no_grad():
        total, items = task.loss(task.model, task.dataset(split).tensors)
    return float(total) / float(items)


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("args", [(), TWO_RANKS, EMA, (*EMA, *TWO_RANKS), ("precision=bf16",)], ids=" ".join)
def test_evaluate_equals_the_evaluation_inside_training_bit_for_bit(args: tuple[str, ...], tmp_path: Path) -> None:
    metrics = train(tmp_path, *args)
    record = evaluate(tmp_path, "checkpoint=last")
    assert record["metrics"] == metrics
    assert record["update"] == 6


def test_evaluate_from_another_folder_finds_the_data_of_the_run(tmp_path: Path) -> None:
    task = """import torch, runner
class Mine(runner.Task):
    def __init__(self, context):
        self.model, self.numbers = torch.nn.Linear(1, 1), torch.load(context.data_path)
    def dataset(self, split):
        return torch.utils.data.TensorDataset(self.numbers)
    def loss(self, model, batch):
        return model(batch[0]).square().sum(), len(batch[0])
def build(context):
    return Mine(context)
"""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (here / "reads_numbers.py").write_text(task)
    torch.save(torch.ones(32, 1), here / "numbers.pt")
    args = ["train", "--task", "reads_numbers.py", "run=mine", "data.path=numbers.pt", "updates=2", *ON_CPU]
    result = run_here(args, here)
    assert result.code == 0, result.err
    arguments = [f"output_root={here / 'outputs'}", "run=mine", "checkpoint=last"]
    assert evaluate(there, *arguments)["metrics"] == evaluate(here, *arguments)["metrics"]


def test_evaluating_a_resumed_run_gives_uninterrupted_metrics(tmp_path: Path) -> None:
    (tmp_path / "resumed").mkdir()
    uninterrupted = train(tmp_path, "scheduler=constant")
    train(tmp_path / "resumed", "scheduler=constant", "updates=3")
    train(tmp_path / "resumed", "scheduler=constant", "resume_allow=[updates]")
    for folder in (tmp_path, tmp_path / "resumed"):
        assert evaluate(folder, "mine", "checkpoint=last")["metrics"] == uninterrupted


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("args", [(), TWO_RANKS], ids=["one", "two"])
def test_every_sample_of_a_split_counts_once(args: tuple[str, ...], tmp_path: Path) -> None:
    train(tmp_path, *args)
    record = evaluate(tmp_path, "split=test", "checkpoint=last")
    assert record["samples"] == 37
    assert record["metrics"]["test/loss"] == pytest.approx(loss_by_hand(tmp_path, 6, "test"), rel=2 * 37 * EPS)
    assert record["metrics"]["test/largest"] == float(build().dataset("test").tensors[1].max()), (
        "metrics() must receive the split that is evaluated"
    )
    written = tmp_path / "outputs/mine/evaluations/test-update-0000000006.json"
    assert json.loads(written.read_text()) == record


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "args",
    [
        ("parallelism=ddp", "parallelism.world_size=3"),
        (*TWO_RANKS, "parallelism.shares=[1,1,1]"),
        (*TWO_RANKS, "micro_batch_size=2"),
        ("micro_batch_size=7",),
        ("parallelism=fsdp", "parallelism.world_size=3"),
    ],
    ids=" ".join,
)
def test_evaluate_accepts_settings_that_cannot_divide_the_global_batch(args: tuple[str, ...], tmp_path: Path) -> None:
    train(tmp_path, "global_batch_size=2")
    loss = evaluate(tmp_path, "checkpoint=last", "split=test", *args)["metrics"]["test/loss"]
    assert loss == pytest.approx(loss_by_hand(tmp_path, 6, "test"), rel=2 * 37 * EPS)


def test_one_process_can_evaluate_a_run_with_uneven_micro_batches(tmp_path: Path) -> None:
    train(tmp_path, *TWO_RANKS, "global_batch_size=10", "micro_batch_size=4")
    loss = evaluate(tmp_path, "checkpoint=last", "split=test", "parallelism=single")["metrics"]["test/loss"]
    assert loss == pytest.approx(loss_by_hand(tmp_path, 6, "test"), rel=2 * 37 * EPS)
    opened = open_run("--task", TASK, tmp_path / "outputs" / "mine").model("last")
    saved = checkpoint.load(checkpoint.checkpoint_path(tmp_path / "outputs/mine/checkpoints", 6)).tensors("model")
    assert all(torch.equal(value, saved[name]) for name, value in opened.state_dict().items())


def test_evaluate_uses_the_best_checkpoint_by_default(tmp_path: Path) -> None:
    args = ("evaluate.every=1", "checkpoint.every=1updates", "checkpoint.keep=9", "checkpoint.best_is=max")
    train(tmp_path, *args)
    rows = [json.loads(line) for line in (tmp_path / "outputs/mine/metrics.jsonl").read_text().splitlines()]
    losses = {row["update"]: row["val/loss"] for row in rows if "val/loss" in row}
    best = max(losses, key=lambda update: losses[update])
    assert best != 6, "the test needs a run whose last checkpoint is not its best"
    result = evaluate(tmp_path)
    assert (result["update"], result["marks"][0]) == (best, "best")
    assert result["metrics"]["val/loss"] == losses[best]
    assert evaluate(tmp_path, "checkpoint=5")["metrics"]["val/loss"] == losses[5]
    assert evaluate(tmp_path, "checkpoint=last")["metrics"]["val/loss"] == losses[6]


def test_the_recorded_duration_covers_the_whole_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path)
    clock = SimpleNamespace(perf_counter=itertools.count(100, 5).__next__)
    monkeypatch.setattr(trained_evaluation, "time", clock)
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "mine", "checkpoint=last"]) == 0
    (written,) = (tmp_path / "outputs/mine/evaluations").iterdir()
    assert json.loads(written.read_text())["seconds"] == 5


def test_evaluate_needs_no_run_if_weights_are_given(tmp_path: Path) -> None:
    train(tmp_path)
    path = checkpoint.checkpoint_path(tmp_path / "outputs/mine/checkpoints", 6)
    save_file(checkpoint.load(path).tensors("model"), tmp_path / "w.safetensors")
    args = ["--task", str(TASK), "weights=w.safetensors", "run=given", "split=test", *ON_CPU]
    record = evaluate(tmp_path, *args)
    assert record["metrics"] == evaluate(tmp_path, "mine", "split=test", "checkpoint=last")["metrics"]
    assert (tmp_path / "outputs/given/evaluations/test-weights.json").is_file()
    assert evaluate_with_error(tmp_path, "mine", "weights=w.safetensors").code == 78, (
        "weights= must be rejected with the name of a trained run"
    )


def test_given_weights_are_evaluated_with_the_final_progress(tmp_path: Path) -> None:
    save_file(build().model.state_dict(), tmp_path / "w.safetensors")
    begun = (
        "    def begin_update(self, progress):\n        self.begun = progress.phase, progress.update - progress.total\n"
    )
    text = TASK.read_text().replace("    def loss(", f"{begun}\n    def loss(")
    shown = '"begun": (float(self.begun == ("train", 0)) * len(batch[0]), len(batch[0]))'
    (tmp_path / TASK.name).write_text(text.replace('        return {"loss"', f'        return {{{shown}, "loss"'))
    given = ("--task", TASK.name, "weights=w.safetensors", *ON_CPU)
    assert evaluate(tmp_path, *given, "run=given")["metrics"]["val/begun"] == 1


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    "method", ["evaluate(self, model, batch)", "begin_update(self, progress)", "begin_phase(self, phase)"]
)
def test_an_error_in_the_task_is_reported_with_its_line(method: str, tmp_path: Path) -> None:
    train(tmp_path)
    text, place = TASK.read_text(), f"    def {method}:\n"
    if place not in text:
        text = text.replace("    def loss(", f"{place}        pass\n\n    def loss(")
    (tmp_path / TASK.name).write_text(text.replace(place, f"{place}        self.undefined.clear()\n"))
    result = evaluate_with_error(tmp_path, "mine", "--task", TASK.name)
    assert result.code == 70
    assert f"{TASK.name}:" in result.err
    assert "self.undefined.clear()" in result.err


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("args", [(), TWO_RANKS], ids=["one", "two"])
def test_task_output_is_not_in_the_json(args: tuple[str, ...], tmp_path: Path) -> None:
    text = TASK.read_text().replace("    return Regression", '    print("loading")\n    return Regression')
    (tmp_path / TASK.name).write_text(text)
    train(tmp_path, "--task", TASK.name, *args)
    result = run_here(["evaluate", "--json"], tmp_path)
    assert json.loads(result.out)["split"] == "val"
    assert "loading" in result.err


def evaluate_with_error(folder: Path, *args: str) -> CompletedCommand:
    result = run_here(["evaluate", *args], folder)
    assert "Traceback" not in result.err
    return result


@pytest.mark.slow
def test_a_misspelled_split_is_a_configuration_error(tmp_path: Path) -> None:
    lacks = "if split not in ('train', 'val'): raise InputMissing('there is none', where='data.path', fix='add it')"
    text = TASK.read_text().replace("def dataset(self, split):\n", f"def dataset(self, split):\n        {lacks}\n")
    own = tmp_path / "own.py"
    own.write_text(text.replace("import torch\n", "import torch\nfrom runner.base.errors import InputMissing\n", 1))
    result = run_here(["train", "--task", str(own), "run=mine", "updates=2", *ON_CPU], tmp_path)
    assert result.code == 0, result.err
    misspelled = evaluate_with_error(tmp_path, "split=vall")
    assert misspelled.code == 78
    assert "val?" in misspelled.err
    assert evaluate_with_error(tmp_path, "split=test").code == 66


MISSING: list[tuple[str, str, type[AccelRunError]]] = [
    ("test", "NotImplementedError()", ConfigError),
    ("vall", "NotImplementedError()", ConfigError),
    ("test", "KeyError('test')", ConfigError),
    ("test", "KeyError('column')", TaskFault),
    ("test", "KeyError('test', 1)", TaskFault),
    ("test", "ValueError('test')", TaskFault),
    ("test", "InputMissing('there is none')", InputMissing),
    ("dev", "InputMissing('there is none')", ConfigError),
    ("rare", "KeyError('rare')", ConfigError),
]


def test_a_missing_split_is_distinguished_from_an_error_in_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks = "if split not in ('train', 'val'): raise eval(os.environ['FAULT'])"
    text = TASK.read_text().replace("def dataset(self, split):\n", f"def dataset(self, split):\n        {lacks}\n")
    text = text.replace("import torch\n", "import os, torch\nfrom runner.base.errors import InputMissing\n", 1)
    (tmp_path / "own.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--task", "own.py", "run=mine", "updates=1", *ON_CPU]) == 0
    source = find_source(Request(("run=mine",)), Console())
    plan, _ = plan_this_process(source.configuration)
    for split, fault, kind in MISSING:
        monkeypatch.setenv("FAULT", fault)
        with pytest.raises(AccelRunError) as caught:
            evaluate_run(source, split, None, plan, World(torch.device("cpu")))
        assert type(caught.value) is kind, (split, fault)
        assert ("val?" in caught.value.problems[0].fix) == (split == "vall")


def test_a_custom_split_is_evaluated_only_if_the_task_declares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This task's `dataset` returns the validation samples for every name except train."""
    monkeypatch.chdir(tmp_path)
    text = TASK.read_text().replace('{"train": 0, "val": 1, "test": 2}[split]', '0 if split == "train" else 1')
    (tmp_path / "own.py").write_text(text)
    assert main(["train", "--task", "own.py", "run=mine", "updates=1", *ON_CPU]) == 0
    assert main(["evaluate", "split=rare"]) == 78
    declared = text.replace("class Regression(Task):\n", 'class Regression(Task):\n    splits = ("rare",)\n')
    (tmp_path / "own.py").write_text(declared)
    sys.modules.pop("own", None)
    assert main(["evaluate", "split=rare"]) == 0


def test_invalid_splits_and_checkpoints_are_rejected(tmp_path: Path) -> None:
    train(tmp_path, "checkpoint.every=2updates", "checkpoint.keep=5")
    assert evaluate_with_error(tmp_path, "split=dev").code == 78
    assert evaluate_with_error(tmp_path, "split=../x").code == 78
    assert evaluate_with_error(tmp_path, "checkpoint=bset").code == 78
    missing = evaluate_with_error(tmp_path, "checkpoint=5")
    assert missing.code == 66
    assert all(number in missing.err for number in ("2", "4", "6 (")), missing.err
    path = checkpoint.checkpoint_path(tmp_path / "outputs/mine/checkpoints", 4)
    (path / "model.safetensors").write_bytes(b"damaged")
    damaged = evaluate_with_error(tmp_path, "checkpoint=4")
    assert damaged.code == 65
    assert "damaged: 4" in damaged.err


def test_evaluate_continues_with_smaller_batches_when_out_of_memory(tmp_path: Path) -> None:
    raises = "        if self.split == 'test' and len(batch[0]) > 2:\n            raise ERROR\n"
    text = TASK.read_text().replace('        return {"loss"', f'{raises}        return {{"loss"')
    (tmp_path / TASK.name).write_text(text.replace("raise ERROR", 'raise torch.OutOfMemoryError("CUDA out of memory")'))
    train(tmp_path, "--task", TASK.name, "micro_batch_size=8")
    record = evaluate(tmp_path, "split=test", "checkpoint=last")
    assert record["metrics"]["test/loss"] == pytest.approx(loss_by_hand(tmp_path, 6, "test"), rel=2 * 37 * EPS)
    assert evaluate_with_error(tmp_path, "split=test", "on_oom=stop").code == 80
    (tmp_path / TASK.name).write_text(text.replace("raise ERROR", 'raise ValueError("of the task")'))
    assert run_here(["evaluate", "split=test"], tmp_path).code == 70, "other errors are not retried"


def test_evaluate_starts_with_the_reduced_size_of_an_earlier_evaluation(tmp_path: Path) -> None:
    sizes = tmp_path / "sizes"
    written = f'        with open({str(sizes)!r}, "a") as file:\n            file.write(f"{{len(batch[0])}} ")\n'
    counted = f'{written}        return {{"loss"'
    (tmp_path / TASK.name).write_text(TASK.read_text().replace('        return {"loss"', counted))
    train(tmp_path, "--task", TASK.name, "micro_batch_size=8")
    before = evaluate(tmp_path)["metrics"]["val/loss"]
    row = ReducedMicroBatch("train", 2, None, 4, 8, 1, "evaluation")
    others = (
        replace(row, use="training", size=1), replace(row, asked=4, size=1), replace(row, world_size=2, size=1),
        replace(row, rank=1, size=1), replace(row, phase="other", size=1),
    )  # fmt: skip
    least = replace(row, size=2)
    for rows, largest in (((), 8), (others, 8), ((row, *others), 4), ((row, least), 2), ((least, row), 2)):
        sizes.write_text("")
        with RunDirectory.create_or_open(tmp_path / "outputs", "mine") as run:
            write_reductions(run, list(rows))
        result = evaluate(tmp_path)["metrics"]["val/loss"]
        assert max(map(int, sizes.read_text().split())) == largest
        assert result == pytest.approx(before, rel=2 * 64 * EPS)
