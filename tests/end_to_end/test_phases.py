"""Runs with two phases: rows, evaluations, schedules, rejected attempts, kept checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from runner.config.request import Request
from runner.durable.checkpoint import newest_valid
from runner.engine.opening import open_phase
from tests.forkserver import ForkServer

TASK = Path(__file__).with_name("task_of_two_phases.py")
BASE = ["train", "--task", str(TASK), "run=mine", "device=cpu", "monitor=off"]
SHARDED = ["parallelism=fsdp", "parallelism.world_size=2"]


def rows(folder: Path, run: str = "mine") -> list[dict[str, Any]]:
    lines = (folder / "outputs" / run / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith("perf/")} for line in lines]


def evaluations(folder: Path, phase: str, run: str = "mine") -> list[int]:
    return [row["update"] for row in rows(folder, run) if row["phase"] == phase and any("val/" in key for key in row)]


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("every", [10, 7, 20])
def test_no_row_is_lost_at_the_last_update(every: int, server: ForkServer, tmp_path: Path) -> None:
    args = [*BASE, f"checkpoint.every={every}"]
    assert server.run(args, tmp_path).code == 0
    before = rows(tmp_path)
    assert evaluations(tmp_path, "one") == evaluations(tmp_path, "two") == [7, 14, 20]
    assert server.run(args, tmp_path).code == 0
    assert rows(tmp_path) == before


def test_skipped_updates_do_not_advance_the_next_schedule(server: ForkServer, tmp_path: Path) -> None:
    args = [*BASE, "precision=fp16", "precision.init_scale=1e8", "scheduler.warmup=10", "log_every=1"]
    done = server.run(args, tmp_path)
    assert done.code == 0, done.err
    trained = [row for row in rows(tmp_path) if "lr" in row]
    skipped = max(row["precision/skipped_updates"] for row in trained if row["phase"] == "one")
    assert skipped > 0
    second = [row["lr"] for row in trained if row["phase"] == "two"]
    assert second[:3] == pytest.approx([0.001, 0.002, 0.003])
    assert min(row["lr"] for row in trained) > 0
    before = rows(tmp_path)
    fault = {"at": "update", "number": 5, "phase": "two", "by": "SIGTERM"}
    env = {"IMPORT_FIRST": "tests.faults.ending", "FAULT": json.dumps(fault)}
    assert server.run([*args, "run=stopped"], tmp_path, env).code == 75
    assert server.run([*args, "run=stopped"], tmp_path).code == 0
    assert rows(tmp_path, "stopped") == before, "a resumed second phase must have the same rows"


def test_a_changed_precision_does_not_advance_the_schedule(server: ForkServer, tmp_path: Path) -> None:
    half = ["precision=fp16", "precision.init_scale=1e8"]
    args = [*BASE, "log_every=1", "scheduler=linear", "updates=12"]
    fault = {"at": "update", "number": 5, "phase": "two", "by": "SIGTERM"}
    env = {"IMPORT_FIRST": "tests.faults.ending", "FAULT": json.dumps(fault)}
    assert server.run([*args, *half], tmp_path, env).code == 75
    trained = [row for row in rows(tmp_path) if "lr" in row]
    assert trained[-1]["precision/skipped_updates"] > 0
    resumed = server.run([*args, "precision=fp32", "resume_allow=[precision]"], tmp_path)
    assert resumed.code == 0, resumed.err
    assert server.run([*args, "precision=fp32", "run=other"], tmp_path).code == 0
    rates, expected = (
        [row["lr"] for row in rows(tmp_path, run) if "lr" in row and row["phase"] == "two"] for run in ("mine", "other")
    )
    assert rates == expected


def test_skipping_every_update_is_an_error(server: ForkServer, tmp_path: Path) -> None:
    result = server.run([*BASE, "precision=fp16", "precision.init_scale=1e36", "precision.max_skips=30"], tmp_path)
    assert result.code == 82
    assert "nothing was learned" in result.err


@pytest.mark.parametrize(
    "wrong",
    [
        ["scheduler.warmup=21"],
        ["scheduler.warmup=9", "phase.two.epochs=1"],  # 8 updates
        ["optimizer.lr_scales={head:2}"],
        ["optimizer=muon", *SHARDED],
        ["optimizer.kernel=fused", "phase.two.optimizer=sgd", *SHARDED],
    ],
    ids=lambda wrong: wrong[0],
)
def test_invalid_options_of_later_phases_are_reported_first(
    wrong: list[str], server: ForkServer, tmp_path: Path
) -> None:
    first, *others = wrong
    result = server.run([*BASE, f"phase.two.{first}", *others], tmp_path)
    assert result.code == 78
    key = first.partition("=")[0]
    assert f"phase.two.{key}" in result.err
    assert not list(tmp_path.glob("outputs/mine/checkpoints/update-*"))


FROZEN = """
class Frozen(TwoPhases):
    def __init__(self):
        super().__init__(True, "loss", 8)
        self.model[0].requires_grad_(False)


def build():
    return Frozen()
"""


@pytest.mark.parametrize(
    ("options", "more", "code"),
    [('{"optimizer.lr_scales": {"0": 0.1}}', FROZEN, 78), ('{"kind": "fit"}', "", 70)],
    ids=["frozen", "no fit"],
)
def test_invalid_later_phases_are_reported_first(
    options: str, more: str, code: int, server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(TASK.read_text().replace('"two": {}', f'"two": {options}') + more)
    result = server.run(["train", "--task", "task.py", "run=mine", "device=cpu", "monitor=off"], tmp_path)
    assert result.code == code, result.err
    assert not list(tmp_path.glob("outputs/mine/checkpoints/update-*"))


LATER_DATA = """
from torch.utils.data import ConcatDataset

from runner import Fit


class Longer(TwoPhases):
    def begin_phase(self, phase):
        self.repeats = 2 if phase == "two" else 1

    def dataset(self, split):
        return ConcatDataset([super().dataset(split)] * self.repeats)


class Weighted(TwoPhases, Fit):
    weights = None

    @property
    def fits(self):
        return {"one": self}

    def start(self):
        return {"count": torch.zeros(())}

    def add(self, model, state, batch):
        return {"count": state["count"] + len(batch[1])}, len(batch[1])

    def finish(self, model, state):
        self.weights = [1.0] * int(state["count"])
        return {}

    def sample_weights(self, dataset):
        return self.weights


def build(*, kind: str = "Longer") -> Task:
    return globals()[kind](True, "loss", 8)
"""


@pytest.mark.parametrize("words", [[], ["task.kind=Weighted", "sampler=weighted", "sampler.num_samples=128"]])
def test_data_of_a_later_phase_that_depends_on_an_earlier_one_may_have_any_length(
    words: list[str], server: ForkServer, tmp_path: Path
) -> None:
    text = TASK.read_text().replace('"two": {}', '"two": {"epochs": 1, "scheduler.warmup": 16}')
    text = text.replace('"one": {}', '"one": {"kind": "fit"}') if words else text
    (tmp_path / "task.py").write_text(text + LATER_DATA)
    result = server.run(["train", "--task", "task.py", "device=cpu", "monitor=off", "run=mine", *words], tmp_path)
    assert result.code == 0, result.err
    assert rows(tmp_path)[-1]["update"] == 16


CHANGED = """
class Changed(TwoPhases):
    def __init__(self):
        super().__init__(True, "loss", 8)
        self.model[0].weight.requires_grad_(False)

    def begin_phase(self, phase):
        if phase == "two":
            self.model[0].weight.requires_grad_(True)
            if not OBJECTIVES:
                self.model.append(nn.Linear(2, 2))

    @property
    def losses(self):
        return {"one": super().loss}

    def loss(self, model, batch, objective=None):
        return super().loss(model, batch)


def build():
    return Changed()


OBJECTIVES = {}
"""
OBJECTIVES = 'OBJECTIVES = {"all": {"trains": ["0"], "optimizer": "adam", "optimizer.lr_scales": {"0.weight": 2.0}}}\n'


@pytest.mark.parametrize(("more", "scales"), [("", ["phase.two.optimizer.lr_scales={3: 2}"]), (OBJECTIVES, [])])
def test_options_can_name_parameters_added_by_begin_phase(
    more: str, scales: list[str], server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(TASK.read_text() + CHANGED + more)
    args = ["train", "--task", "task.py", "device=cpu", "monitor=off", "updates=2", *scales]
    result = server.run(args, tmp_path)
    assert result.code == 0, result.err


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_checkpoint_with_other_trained_parameters_is_refused(
    is_frozen: bool, server: ForkServer, tmp_path: Path
) -> None:
    base = ["train", "--task", "task.py", "run=mine", "device=cpu", "monitor=off", "phases=[one]"]
    base += ["optimizer=sgd", "optimizer.momentum=0"]  # no optimizer state, which would not fit either
    for is_now_frozen, length, code in ((is_frozen, 2, 0), (not is_frozen, 4, 88), (is_frozen, 4, 0)):
        flag = f"self.model[0].requires_grad_({not is_now_frozen})"
        (tmp_path / "task.py").write_text(TASK.read_text() + LASTING.format("one", flag))
        result = server.run([*base, f"updates={length}", "resume_allow=[updates]"], tmp_path)
        assert result.code == code, result.err
        assert ("0.bias, 0.weight" in result.err and "begin_phase" in result.err) == (code != 0)


LASTING = """
class Lasting(TwoPhases):
    def __init__(self):
        super().__init__(True, "loss", 8)
        self.model[0].requires_grad_(False)

    def begin_phase(self, phase):
        super().begin_phase(phase)
        if phase == "{}":
            {}


def build():
    return Lasting()
"""


@pytest.mark.parametrize("change", ["self.model[0].requires_grad_(True)", "self.model.append(nn.Linear(2, 2))"])
def test_changes_of_begin_phase_survive_a_resume(change: str, server: ForkServer, tmp_path: Path) -> None:
    phases = TASK.read_text().replace('"two": {}', '"two": {}, "three": {}')
    (tmp_path / "task.py").write_text(phases + LASTING.format("two", change))
    base = ["--task", "task.py", "device=cpu", "monitor=off", "updates=2", "optimizer=sgd", "optimizer.momentum=0"]
    assert server.run(["train", *base, "run=straight"], tmp_path).code == 0
    for phase in ("one", "two"):
        assert server.run(["train", *base, "run=apart", f"phases=[{phase}]"], tmp_path).code == 0
    fault = {"at": "update", "number": 2, "phase": "three", "by": "SIGTERM"}
    env = {"IMPORT_FIRST": "tests.faults.ending", "FAULT": json.dumps(fault)}
    stopped = server.run(["train", *base, "run=apart"], tmp_path, env)
    assert stopped.code == 75, stopped.err
    resumed = server.run(["train", *base, "run=apart"], tmp_path)
    assert resumed.code == 0, resumed.err
    assert rows(tmp_path, "apart") == rows(tmp_path, "straight")
    evaluated = server.run(["evaluate", "run=apart", "split=val", "--json"], tmp_path)
    assert evaluated.code == 0, evaluated.err
    assert json.loads(evaluated.out)["metrics"]["val/loss"] == rows(tmp_path, "straight")[-1]["val/loss"]


def test_phases_can_run_separately(server: ForkServer, tmp_path: Path) -> None:
    together, apart = tmp_path / "together", tmp_path / "apart"
    together.mkdir()
    apart.mkdir()
    assert server.run(BASE, together).code == 0
    assert server.run([*BASE, "phases=[one]"], apart).code == 0
    second = server.run([*BASE, "phases=[two]"], apart)
    assert second.code == 0, second.err
    assert rows(apart) == rows(together)
    assert server.run([*BASE, "phases=[one]"], apart).code == 88
    assert server.run([*BASE, "phases=[]"], apart).code == 78
    wrong = server.run([*BASE, "phases=[tow]"], apart)
    assert wrong.code == 78
    assert "two" in wrong.err


def test_open_phase_runs_the_updates_of_a_phase(tmp_path: Path) -> None:
    args = ("run=opened", f"output_root={tmp_path}", "device=cpu", "monitor=off", "updates=3")
    with open_phase(Request(args, TASK)) as phase:
        assert list(phase.updates()) == [1, 2, 3]


@pytest.mark.slow
def test_a_rejected_attempt_adds_only_an_error_record(server: ForkServer, tmp_path: Path) -> None:
    assert server.run(BASE, tmp_path).code == 0
    run = tmp_path / "outputs" / "mine"
    kept = ("run.json", "config.yaml", "overrides.yaml", "plan.json", "metrics.jsonl")
    before = {name: (run / name).read_bytes() for name in kept}
    assert server.run([*BASE, "task.hidden=16"], tmp_path).code == 88
    assert before == {name: (run / name).read_bytes() for name in kept}
    assert json.loads((run / "error.json").read_text())["exit_code"] == 88


STALE = '{"update": 999, "phase": "one"}\n'  # a row after the last checkpoint


def test_rejected_phases_change_neither_rows_nor_checkpoints(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK.read_text().replace('"two": {}', '"two": {"needs": ["one"]}'))
    base = [arg if arg != str(TASK) else "task.py" for arg in BASE]
    assert server.run(base, tmp_path).code == 0
    metrics, checkpoints = (tmp_path / "outputs" / "mine" / name for name in ("metrics.jsonl", "checkpoints"))
    expected = rows(tmp_path)
    with metrics.open("a") as file:
        file.write(STALE)

    def assert_rejected(*args: str) -> None:
        before = metrics.read_bytes(), sorted(checkpoints.rglob("*"))
        assert server.run([*base, *args], tmp_path).code in (66, 88)
        assert (metrics.read_bytes(), sorted(checkpoints.rglob("*"))) == before

    assert_rejected("phases=[two]", "resume=fresh")
    assert_rejected("phases=[one]")
    shutil.rmtree(checkpoints)
    assert_rejected("phases=[two]")
    assert server.run(base, tmp_path).code == 0
    assert rows(tmp_path) == expected, "rows after the last checkpoint are removed"


@pytest.mark.slow
def test_a_run_with_lost_rows_can_be_resumed(server: ForkServer, tmp_path: Path) -> None:
    assert server.run(BASE, tmp_path).code == 0
    metrics = tmp_path / "outputs" / "mine" / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-40])
    again = server.run(BASE, tmp_path)
    assert again.code == 0, again.err
    assert "metrics.jsonl" in again.out + again.err


def test_a_run_can_start_from_another_run(server: ForkServer, tmp_path: Path) -> None:
    assert server.run([*BASE, "phases=[one]", "checkpoint.every=10"], tmp_path).code == 0
    other = [word if word != "run=mine" else "run=other" for word in BASE]
    assert server.run([*other, "resume=mine", "optimizer.lr=0.5"], tmp_path).code == 88
    metrics = tmp_path / "outputs" / "other" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text(STALE)
    unfinished = "resume=outputs/mine/checkpoints/update-0000000010"
    assert server.run([*other, unfinished, "phases=[two]"], tmp_path).code == 88
    assert metrics.read_text() == STALE, "a rejected attempt must not remove rows"
    done = server.run([*other, "resume=mine"], tmp_path)
    assert done.code == 0, done.err
    checkpoint = newest_valid(tmp_path / "outputs" / "other" / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.name == "update-0000000040"
    assert 999 not in [row["update"] for row in rows(tmp_path, "other")]
    finished = [word if word != "run=mine" else "run=copy" for word in BASE]
    assert server.run([*finished, "resume=other"], tmp_path).code == 0
    assert newest_valid(tmp_path / "outputs" / "copy" / "checkpoints") is not None


def test_repeated_phases_can_be_resumed(server: ForkServer, tmp_path: Path) -> None:
    """The run starts from another run in which both phases are finished."""
    base = [*BASE, "updates=5"]
    assert server.run(base, tmp_path).code == 0
    again = [*base, "resume=mine", "phases=[one,two]"]
    assert server.run([*again, "run=straight"], tmp_path).code == 0
    fault = {"at": "update", "number": 3, "phase": "one", "by": "SIGTERM"}
    env = {"IMPORT_FIRST": "tests.faults.ending", "FAULT": json.dumps(fault)}
    assert server.run([*again, "run=stopped"], tmp_path, env).code == 75
    resumed = server.run([*again, "run=stopped"], tmp_path)
    assert resumed.code == 0, resumed.err
    assert rows(tmp_path, "stopped") == rows(tmp_path, "straight")


def test_evaluating_a_removed_phase_is_an_error(server: ForkServer, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(TASK.read_text())
    base = ["--task", "task.py", "run=mine", "device=cpu"]
    assert server.run(["train", *base, "monitor=off", "updates=2"], tmp_path).code == 0
    task.write_text(TASK.read_text().replace('"two": {}', '"three": {}'))
    assert server.run(["evaluate", *base], tmp_path).code == 88


def test_a_metric_is_suggested_if_there_is_no_loss(server: ForkServer, tmp_path: Path) -> None:
    done = server.run([*BASE, "task.metric=accuracy"], tmp_path)
    assert done.code == 0, done.err
    assert "checkpoint.best=val/accuracy" in done.out + done.err, "the suggested metric"
    assert evaluations(tmp_path, "two") == [7, 14, 20]


def test_a_task_without_validation_data_trains(server: ForkServer, tmp_path: Path) -> None:
    done = server.run([*BASE, "task.val=false"], tmp_path)
    assert done.code == 0, done.err
    assert evaluations(tmp_path, "two") == []


def test_too_large_global_batches_are_reported(server: ForkServer, tmp_path: Path) -> None:
    done = server.run([*BASE, "global_batch_size=1000"], tmp_path)
    assert done.code == 0, done.err
    assert "1000" in done.out + done.err
    assert "64" in done.out + done.err


@pytest.mark.slow
def test_old_best_checkpoints_are_kept(server: ForkServer, tmp_path: Path) -> None:
    args = ["checkpoint.keep=2", "checkpoint.keep_best=2", "checkpoint.best_is=max", "checkpoint.every=1"]
    done = server.run([*BASE, "phases=[one]", "evaluate.every=1", *args], tmp_path)
    assert done.code == 0, done.err
    losses = [(row["val/loss"], row["update"]) for row in rows(tmp_path) if "val/loss" in row]
    highest = {update for _, update in sorted(losses, reverse=True)[:2]}
    kept = {int(path.name.removeprefix("update-")) for path in (tmp_path / "outputs/mine/checkpoints").glob("update-*")}
    assert kept == highest | {19, 20}
