"""Hooks of a task file: their state is restored on resume, their errors name the task file, and media are logged."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from runner.cli import main
from runner.config import custom_options
from runner.durable.checkpoint import Snapshot
from runner.durable.checkpoint_writer import CheckpointWriter
from runner.engine.evaluation.media import encode_png, histogram
from runner.trackers import tracker_process
from tests.rounding import PROMISED, assert_close
from tests.waiting import wait_until
from tests.wandb_server import MARK, marked, offline_rows

TASK = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset

import runner

SETTINGS = {
    "updates": 6, "optimizer": "sgd", "optimizer.lr": 0.1, "scheduler": "constant", "evaluate.every": 3,
    "checkpoint.every": 3,
}


class Drift(runner.Hook):
    """Add a value that depends on the updates so far to the weights.

    size  value per update
    """

    def __init__(self, phase, *, size: float = 0.125):
        super().__init__(phase)
        self.size, self.seen, self.sum = size, 0, torch.zeros(())

    def after_update(self, step):
        self.seen += 1
        self.sum += self.size * self.seen
        with torch.no_grad():
            self.phase.model.weight += self.sum
        self.phase.log({"drift/sum": self.sum, "drift/seen": self.seen})

    def after_evaluation(self, result):
        self.phase.log({"drift/evaluated": result.metrics["val/loss"]})

    def state_dict(self):
        return {"seen": self.seen, "sum": self.sum}

    def load_state_dict(self, state):
        self.seen, self.sum = state["seen"], state["sum"]


class Quiet(runner.Hook):
    """Do nothing."""


HOOKS = [Drift, Quiet]


def build():
    return Mine()


class Mine(runner.Task):
    def __init__(self):
        self.model = nn.Linear(2, 1)

    def dataset(self, split):
        return TensorDataset(torch.arange(128.0).view(64, 2) / 128)

    def loss(self, model, batch):
        return model(batch[0]).square().sum(), len(batch[0])
'''
OVERRIDES = ["device=cpu", "monitor=off", "tracker=none", "log_every=1", "global_batch_size=16", "max_grad_norm=null"]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        file = tmp_path / f"{tmp_path.name}_task.py"
        file.write_text(text)
        return file

    return write


def rows(folder: Path, column: str) -> list[Any]:
    result = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[column] for row in result if column in row]


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    from runner.durable.checkpoint import load, newest_first

    return load(newest_first(folder / "checkpoints")[0]).tensors("model")


def test_a_hook_can_change_weights_after_an_update(write: Callable[[str], Path], tmp_path: Path) -> None:
    file = write(TASK)
    train = ["train", "--task", str(file), *OVERRIDES, "hook.drift.size=0.25"]
    assert main([*train, "run=own", "updates=1"]) == 0
    assert main([*train, "run=none", "updates=1", "hook.drift.enabled=false"]) == 0
    own, none = final_weights(tmp_path / "outputs" / "own"), final_weights(tmp_path / "outputs" / "none")
    assert_close(own["weight"], none["weight"] + 0.25, terms=1)
    assert rows(tmp_path / "outputs" / "own", "drift/sum") == [0.25]
    assert not rows(tmp_path / "outputs" / "none", "drift/sum")


def test_the_state_of_a_hook_is_restored_bitwise_on_resume(write: Callable[[str], Path], tmp_path: Path) -> None:
    train = ["train", "--task", str(write(TASK)), *OVERRIDES]
    assert main([*train, "run=straight", "updates=8"]) == 0
    assert main([*train, "run=parts", "updates=4"]) == 0
    assert main([*train, "run=parts", "updates=8", "resume_allow=[updates]"]) == 0
    uninterrupted, parts = tmp_path / "outputs" / "straight", tmp_path / "outputs" / "parts"
    for column in ("drift/seen", "drift/sum", "train/loss"):
        assert rows(uninterrupted, column) == rows(parts, column)
    assert rows(uninterrupted, "drift/seen") == [*range(1, 9)]
    assert len(rows(uninterrupted, "drift/evaluated")) == len(rows(uninterrupted, "val/loss")) > 1
    for name, weight in final_weights(uninterrupted).items():
        assert torch.equal(weight, final_weights(parts)[name])


def test_hooks_run_identically_on_one_and_two_ranks(write: Callable[[str], Path], tmp_path: Path) -> None:
    train = ["train", "--task", str(write(TASK)), *OVERRIDES, "updates=4"]
    two = ["parallelism=ddp", "parallelism.world_size=2", "parallelism.shares=[11,5]"]
    assert main([*train, "run=one"]) == 0
    assert main([*train, "run=two", *two]) == 0
    one, two_ranks = tmp_path / "outputs" / "one", tmp_path / "outputs" / "two"
    assert rows(one, "drift/sum") == rows(two_ranks, "drift/sum")
    for name, weight in final_weights(one).items():
        torch.testing.assert_close(final_weights(two_ranks)[name], weight, rtol=PROMISED[torch.float32], atol=0)


@pytest.mark.parametrize("draws", [True, False])
def test_changing_weights_differently_on_each_rank_causes_a_warning(
    draws: bool, write: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """Only the weights of rank 0 are saved and evaluated."""
    text = TASK.replace("+= self.sum\n", "+= self.sum * torch.rand(())\n", 1) if draws else TASK
    train = ["train", "--task", str(write(text)), *OVERRIDES, "updates=1"]
    assert main([*train, "parallelism=ddp", "parallelism.world_size=2"]) == 0
    assert ("torch.Generator" in "".join(capfd.readouterr())) == draws


def test_a_changed_hook_setting_must_be_allowed_on_resume(write: Callable[[str], Path]) -> None:
    train = ["train", "--task", str(write(TASK)), *OVERRIDES, "run=first"]
    assert main([*train, "updates=2"]) == 0
    longer = [*train, "updates=3", "hook.drift.size=0.5"]
    assert main([*longer, "resume_allow=[updates]"]) == 88
    assert main([*longer, "resume_allow=[updates,hook.drift.size]"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("self.seen += 1", "self.seen += self.unknown"),
        ("super().__init__(phase)\n        self.size", "self.size"),
        ('return {"seen": self.seen, "sum": self.sum}', "raise ValueError(self.seen)"),
        ('return {"seen": self.seen, "sum": self.sum}', 'return {"seen": object()}'),
        ('"drift/seen": self.seen}', '"drift/seen": "many"}'),
        ('"drift/seen": self.seen}', '"update": self.seen}'),
        ("def after_update(self, step)", "def after_update(self)"),
        ("def state_dict", "def wants(self):\n        return None\n    def state_dict"),
        ("def state_dict", "def readings(self):\n        return 1\n    def state_dict"),
        ("def state_dict", "def readings(self):\n        return {'mine': object()}\n    def state_dict"),
        ("def state_dict", "def readings(self):\n        return {'phase': 1.0}\n    def state_dict"),
    ],
)
def test_errors_in_hooks_are_reported_as_task_errors(
    before: str, after: str, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert before in TASK
    file = write(TASK.replace(before, after))
    assert main(["train", "--task", str(file), *OVERRIDES, "run=faulty"]) == 70
    assert file.name in capsys.readouterr().err


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    "state",
    [
        '{"seen": object()}',
        "{1: self.seen}",
        '{"sum": self.sum[None].to_sparse()}',
        '{"sum": self.sum.to(torch.complex128)}',
        '{"sum": self.sum.to("meta")}',
    ],
)
def test_unsupported_hook_state_is_rejected_before_the_first_update(
    state: str, write: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(TASK.replace('{"seen": self.seen, "sum": self.sum}', state))
    assert main(["train", "--task", str(file), *OVERRIDES, "run=faulty"]) == 70
    assert file.name in capsys.readouterr().err
    metrics = tmp_path / "outputs" / "faulty" / "metrics.jsonl"
    assert not metrics.exists() or not metrics.read_text()


def test_hook_state_created_by_the_first_update_is_accepted(write: Callable[[str], Path], tmp_path: Path) -> None:
    text = TASK.replace('"sum": self.sum}', '"sum": self.sum, "mean": float(self.sum) / self.seen}')
    assert main(["train", "--task", str(write(text)), *OVERRIDES, "run=mean"]) == 0
    assert rows(tmp_path / "outputs" / "mean", "drift/seen") == [*range(1, 7)]


def test_readings_can_be_numbers_of_any_library(write: Callable[[str], Path], tmp_path: Path) -> None:
    readings = "{'one': 1, 'two': torch.tensor([2.0]), 'three': numpy.float32(3.0), 'four': None}"
    text = TASK.replace("def state_dict", f"def readings(self):\n        return {readings}\n    def state_dict")
    assert main(["train", "--task", str(write(f"import numpy\n{text}")), *OVERRIDES, "run=own", "updates=2"]) == 0
    for name, number in (("one", 1.0), ("two", 2.0), ("three", 3.0), ("four", None)):
        assert rows(tmp_path / "outputs" / "own", name) == [number, number]


@pytest.mark.parametrize("name", ["train/loss", "perf/items_per_s", "precision/loss_scale"])
def test_readings_cannot_replace_built_in_columns(name: str, write: Callable[[str], Path], tmp_path: Path) -> None:
    text = TASK.replace("def state_dict", f"def readings(self):\n        return {{{name!r}: 1.0}}\n    def state_dict")
    assert main(["train", "--task", str(write(text)), *OVERRIDES, "run=own", "updates=2", "precision=fp16"]) == 70
    (problem,) = json.loads((tmp_path / "outputs" / "own" / "error.json").read_text())["problems"]
    assert name in problem["what"]


def test_a_checkpoint_has_the_hook_state_of_its_update(
    write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is written by a thread while training continues and changes it."""
    snapshots, submit = [], CheckpointWriter.submit

    def submit_and_keep(self: CheckpointWriter, snapshot: Snapshot, **keys: Any) -> None:
        snapshots.append(snapshot)
        submit(self, snapshot, **keys)

    monkeypatch.setattr(CheckpointWriter, "submit", submit_and_keep)
    text = TASK.replace("self.seen, self.sum = size, 0,", "self.numbers, self.seen, self.sum = size, [], 0,")
    text = text.replace("self.seen += 1", "self.seen += 1\n        self.numbers.append(self.seen)")
    text = text.replace('return {"seen": self.seen,', 'return {"numbers": {"all": self.numbers}, "seen": self.seen,')
    assert main(["train", "--task", str(write(text)), *OVERRIDES, "run=own", "updates=4", "checkpoint.every=1"]) == 0
    states = {snapshot.state["phase_update"]: snapshot.state["hook.drift"] for snapshot in snapshots}
    assert {update: state["numbers"]["all"] for update, state in states.items()} == {
        update: [*range(1, update + 1)] for update in range(1, 5)
    }


def test_a_stop_signal_in_a_hook_ends_the_run_after_that_update(write: Callable[[str], Path], tmp_path: Path) -> None:
    """Hooks of the task run between the decision to stop and the save, for which there is no time here."""
    text = TASK.replace(
        "self.seen += 1", "self.seen += 1\n        if self.seen == 3: signal.raise_signal(signal.SIGTERM)"
    )
    more = ["updates=9", "evaluate.every=0", "checkpoint.every=1", "checkpoint.grace_s=0.0001"]
    assert main(["train", "--task", str(write(f"import signal\n{text}")), *OVERRIDES, "run=own", *more]) == 75
    assert rows(tmp_path / "outputs" / "own", "drift/seen") == [1, 2, 3]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hook_can_end_a_phase_early(ranks: int, write: Callable[[str], Path], tmp_path: Path) -> None:
    """The phase is evaluated and finished, the next one follows, and a resumed run does not continue the first one."""
    text = TASK.replace("HOOKS =", 'PHASES = {"one": {}, "two": {"needs": ["one"]}}\nHOOKS =')
    ends = 'if self.phase.name == "one" and self.seen == 2:\n            self.phase.stop()'
    stops = 'if self.phase.name == "two" and self.seen == 4:\n            signal.raise_signal(signal.SIGTERM)'
    text = text.replace("self.seen += 1", f"self.seen += 1\n        {ends}\n        {stops}")
    parallelism = ["parallelism=ddp", f"parallelism.world_size={ranks}"] if ranks > 1 else []
    train = [
        "train",
        "--task",
        str(write(f"import signal\n{text}")),
        *OVERRIDES,
        "run=own",
        "evaluate.every=0",
        *parallelism,
    ]
    assert main(train) == 75
    assert main(train) == 0
    folder = tmp_path / "outputs" / "own"
    phases = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for column in ("train/loss", "val/loss"):
        wanted = [1, 2] if column == "train/loss" else [2]
        assert [row["update"] for row in phases if column in row and row["phase"] == "one"] == wanted
    assert [row["update"] for row in phases if "train/loss" in row and row["phase"] == "two"] == [*range(1, 7)]
    records = json.loads((folder / "run.json").read_text())["phases"]
    assert {name: record["updates"] for name, record in records.items()} == {"one": 2, "two": 6}
    assert main(train) == 0
    assert rows(folder, "drift/seen") == [1, 2, *range(1, 7)]


@pytest.mark.parametrize(
    ("more", "allow", "seen"),
    [
        (["updates=6", "hook.drift.size=3"], "", [1, 2, 3]),
        (["updates=8", "hook.drift.size=3"], "updates", [1, 2, 3, 4, 5, 6, 7, 8]),
        (["updates=6", "hook.drift.size=5"], "hook", [1, 2, 3, 4, 5]),
    ],
)
def test_a_phase_ended_by_a_hook_continues_only_with_changed_settings(
    more: list[str], allow: str, seen: list[int], write: Callable[[str], Path], tmp_path: Path
) -> None:
    text = TASK.replace(
        "self.seen += 1", "self.seen += 1\n        if self.seen == self.size:\n            self.phase.stop()"
    )
    train = ["train", "--task", str(write(text)), *OVERRIDES, "run=own"]
    assert main([*train, "updates=6", "hook.drift.size=3"]) == 0
    assert main([*train, *more, f"resume_allow=[{allow}]"]) == 0
    assert rows(tmp_path / "outputs" / "own", "drift/seen") == seen


def test_a_phase_ended_by_a_hook_at_its_start_has_one_update(write: Callable[[str], Path], tmp_path: Path) -> None:
    begin = "def begin(self):\n        self.phase.stop()\n    def state_dict"
    train = ["train", "--task", str(write(TASK.replace("def state_dict", begin))), *OVERRIDES, "run=own"]
    assert main(train) == 0
    assert rows(tmp_path / "outputs" / "own", "drift/seen") == [1]


def test_a_hook_can_change_the_model_for_evaluation(
    write: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = """@staticmethod
    def load_for_inference(parts, checkpoint):
        assert checkpoint.state["hook.drift"]["seen"] == 2
        with torch.no_grad():
            for weight in parts.bare.parameters():
                weight.copy_(checkpoint.tensors("hook.drift")["sum"])

    def state_dict"""
    file = write(TASK.replace("def state_dict", load))
    assert main(["train", "--task", str(file), *OVERRIDES, "run=own", "updates=2", "hook.drift.size=0.25"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "own", "--json"]) == 0
    x = torch.arange(128.0, dtype=torch.float64).view(64, 2) / 128
    wanted = (x.sum(1) * 0.75 + 0.75).square().mean()  # the weights and the bias are 0.25 + 2 * 0.25
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert_close(torch.tensor(metrics["val/loss"]), wanted.float(), terms=64)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_gradients_left_by_a_hook_do_not_change_the_next_update(
    strategy: str, write: Callable[[str], Path], tmp_path: Path
) -> None:
    backward = """self.phase.parts.bare(torch.ones(1, 2)).sum().backward()

    def after_evaluation(self, result):
        pass"""
    before, rest = TASK.split("        self.seen += 1\n")
    file = write(f"{before}        {backward}\n\n    def state_dict{rest.partition('    def state_dict')[2]}")
    train = ["train", "--task", str(file), *OVERRIDES, "updates=3", f"parallelism={strategy}"]
    train += [] if strategy == "single" else ["parallelism.world_size=2"]
    assert main([*train, "run=own"]) == 0
    assert main([*train, "run=none", "hook.drift.enabled=false"]) == 0
    own, none = (final_weights(tmp_path / "outputs" / run) for run in ("own", "none"))
    assert all(torch.equal(weight, none[name]) for name, weight in own.items())


TEACHER = (
    TASK.replace(
        "        self.model = nn.Linear(2, 1)\n",
        """        layers = lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        student, teacher = layers(), layers()
        self.model = nn.ModuleDict({"student": student, "teacher": teacher.requires_grad_(False)})
""",
    )
    .replace(
        "return model(batch[0]).square().sum()",
        'return (model["student"](batch[0]) - model["teacher"].eval()(batch[0]) - 1).square().sum()',
    )
    .replace(
        "            self.phase.model.weight += self.sum\n",
        """            student, teacher = self.phase.model["student"], self.phase.model["teacher"]
            for copy, weight in zip(teacher.parameters(), student.parameters(), strict=True):
                copy.copy_(weight)
            for copy, buffer in zip(teacher.buffers(), student.buffers(), strict=True):
                copy.copy_(buffer)
""",
    )
)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hook_can_copy_the_parameters_and_buffers_of_a_student(
    ranks: int, write: Callable[[str], Path], tmp_path: Path
) -> None:
    """Frozen parameters that the hook changes are treated as buffers, but `buffers()` does not return them."""
    parallelism = ["parallelism=ddp", f"parallelism.world_size={ranks}"] if ranks > 1 else []
    train = ["train", "--task", str(write(TEACHER)), *OVERRIDES, "run=own", *parallelism]
    assert main([*train, "updates=3"]) == 0
    assert main([*train, "updates=6", "resume_allow=[updates]"]) == 0
    weights = final_weights(tmp_path / "outputs" / "own")
    teacher = {name.removeprefix("teacher."): weight for name, weight in weights.items() if "teacher" in name}
    assert len(teacher) == 9
    for name, weight in teacher.items():
        assert torch.equal(weight, weights[f"student.{name}"]), name


@pytest.mark.slow
def test_hooks_of_a_packaged_task_are_off_until_enabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"package_{tmp_path.name}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    (tmp_path / name / "line.py").write_text(TASK)
    metadata = tmp_path / f"{name}-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    points = f"[accel_run.tasks]\nline = {name}.line\n[accel_run.hooks]\nline = {name}.line\n"
    (metadata / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    custom_options.clear_package_cache()
    try:
        assert main(["plan", "task=line", "device=cpu"]) == 0
        assert f"{name} 1.5" in capsys.readouterr().out
        assert main(["train", "task=line", *OVERRIDES, "updates=2", "run=fine"]) == 0
        assert not rows(tmp_path / "outputs" / "fine", "drift/sum"), "hooks of a package are off until enabled"
        train = ["train", "task=line", *OVERRIDES, "updates=2", "run=on", "hook.drift.enabled=true"]
        assert main(train) == 0
        assert len(rows(tmp_path / "outputs" / "on", "drift/sum")) == 2
    finally:
        monkeypatch.undo()
        custom_options.clear_package_cache()


def test_an_error_in_a_packaged_hook_names_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], write: Callable[[str], Path]
) -> None:
    name = f"package_{tmp_path.name}"
    (tmp_path / "site-packages" / name).mkdir(parents=True)
    (tmp_path / "site-packages" / name / "__init__.py").touch()
    faulty = "import runner\nclass Faulty(runner.Hook):\n    def after_update(self, step):\n        raise KeyError(1)\n"
    (tmp_path / "site-packages" / name / "mine.py").write_text(f"{faulty}HOOKS = [Faulty]\n")
    metadata = tmp_path / "site-packages" / f"{name}-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (metadata / "entry_points.txt").write_text(f"[accel_run.hooks]\nmine = {name}.mine\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    custom_options.clear_package_cache()
    try:
        train = ["train", "--task", str(write(TASK)), *OVERRIDES, "run=faulty", "hook.faulty.enabled=true"]
        assert main(train) == 70
    finally:
        monkeypatch.undo()
        custom_options.clear_package_cache()
    assert f"{name}/mine.py:4" in capsys.readouterr().err


MEDIA = TASK.replace(
    '        self.phase.log({"drift/sum": self.sum, "drift/seen": self.seen})\n',
    """        self.phase.log_images("samples", torch.full((2, 3, 4, 5), step.update / 5))
        self.phase.log_text("text", f"update {step.update}")
        self.phase.log_histogram("weights", self.phase.model.weight)
""",
)


@pytest.mark.filterwarnings("default")  # tensorboard issues warnings
def test_images_text_and_histograms_are_logged_to_tensorboard(write: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = [word for word in OVERRIDES if not word.startswith("tracker=")]
    train = ["train", "--task", str(write(MEDIA)), *args, "tracker=tensorboard", "run=media", "updates=2"]
    assert main(train) == 0
    result = EventAccumulator(str(tmp_path / "outputs" / "media" / "tensorboard"), {"histograms": 0})
    result.Reload()
    assert [(image.step, image.height, image.width) for image in result.Images("samples/1")] == [(1, 4, 5), (2, 4, 5)]
    texts = [event.tensor_proto.string_val for event in result.Tensors("text/text_summary")]
    assert texts == [[b"update 1"], [b"update 2"]]
    assert [event.histogram_value.num for event in result.Histograms("weights")] == [2.0, 2.0]
    assert not rows(tmp_path / "outputs" / "media", "samples")


@pytest.mark.slow
def test_images_text_and_histograms_are_logged_to_wandb(
    write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(MARK, tmp_path.name)
    args = [word for word in OVERRIDES if not word.startswith("tracker=")]
    tracker = ["tracker=wandb", "tracker.mode=offline"]
    assert main(["train", "--task", str(write(MEDIA)), *args, *tracker, "run=media", "updates=2"]) == 0
    wait_until(lambda: not marked(tmp_path.name), "the processes of wandb")
    folder = tmp_path / "outputs" / "media"
    (files,) = folder.glob("wandb/offline-run-*/files")
    logged = [(step, row) for step, row in offline_rows(folder) if "weights" in row]
    assert [(step, row["update"], row["text"]) for step, row in logged] == [(1, 1, "update 1"), (2, 2, "update 2")]
    for step, row in logged:
        assert row["weights"]["_type"] == "histogram"
        assert sum(row["weights"]["values"]) == 2
        assert (row["samples"]["_type"], len(row["samples"]["filenames"])) == ("images/separated", 2)
        for name in row["samples"]["filenames"]:
            assert pixels_of((files / name).read_bytes()) == [51 * step] * 60


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (3, 4, 5), (1, 4, 5), (4, 5)])
def test_a_png_has_the_pixels_of_the_tensor(shape: tuple[int, ...]) -> None:
    values = torch.arange(float(torch.tensor(shape).prod())).view(shape) / 255
    images = encode_png(values)
    planes = values.mul(255).round().to(torch.uint8)
    expected = planes if planes.ndim == 4 else planes[None] if planes.ndim == 3 else planes[None, None]
    assert [pixels_of(image) for image in images] == [image.permute(1, 2, 0).flatten().tolist() for image in expected]
    assert [pixels_of(image) for image in encode_png(planes)] == [pixels_of(image) for image in images]


def pixels_of(image: bytes) -> list[int]:
    """Return the bytes of a PNG, whose channels are gray or RGB."""
    with Image.open(io.BytesIO(image), formats=["PNG"]) as opened:
        assert opened.mode in ("L", "RGB")
        return list(opened.tobytes())


def test_a_histogram_counts_every_finite_value_once() -> None:
    values = torch.tensor([0.0, 1.0, 1.0, 2.0, float("nan"), float("inf")])
    edges, counts = histogram(values, bins=4)
    assert counts == [1, 0, 2, 1]
    assert (edges[0], edges[-1]) == (0.0, 2.0)
    assert histogram(torch.tensor([3.0, 3.0]), bins=2)[1] == [0, 2]
    assert histogram(torch.tensor([float("nan")]), bins=2)[1] == [0, 0]


@pytest.mark.parametrize("shape", [(2, 2, 4, 5), (2, 3, 0, 5), (0, 3, 4, 5), (7,)])
def test_a_tensor_that_is_not_an_image_is_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        encode_png(torch.zeros(shape))


def test_media_are_converted_to_the_types_of_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    image = base64.b64encode(encode_png(torch.zeros(1, 2, 3))[0]).decode()
    converted = tracker_process.wandb_value({"kind": "images", "png": [image]})
    assert [(type(one).__name__, one.image.size) for one in converted] == [("Image", (3, 2))]
    bins = tracker_process.wandb_value({"kind": "histogram", "edges": [0.0, 1.0, 2.0], "counts": [3, 4]})
    assert (type(bins).__name__, bins.histogram) == ("Histogram", [3, 4])
    assert tracker_process.wandb_value({"kind": "text", "text": "words"}) == "words"
    assert tracker_process.wandb_value(0.5) == 0.5
