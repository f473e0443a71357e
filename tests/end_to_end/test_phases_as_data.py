"""Phases: statistics, prerequisites, trained parameters, optimizer and schedule, early stopping, resume, records."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.cli import main
from runner.durable.checkpoint import LoadedCheckpoint, checkpoint_path, load, newest_valid
from tests.forkserver import CompletedCommand, ForkServer
from tests.rounding import allowed

TASK = Path(__file__).with_name("task_of_phases.py")
BASE = ["--task", str(TASK), "run=mine", "device=cpu", "monitor=off"]
# Total updates at the end of each phase. 33 samples are 4 batches of 10; then 12, 9, and 8 until early stopping.
STATISTICS, PRETRAIN, ADAPTER, PATIENT = 4, 16, 25, 33


def train(server: ForkServer, folder: Path, *args: str, env: dict[str, str] | None = None) -> CompletedCommand:
    return server.run(["train", *BASE, *args], folder, env=env)


def checkpoint(folder: Path, update: int) -> LoadedCheckpoint:
    return load(checkpoint_path(folder / "outputs" / "mine" / "checkpoints", update))


def weights(folder: Path, update: int) -> dict[str, torch.Tensor]:
    return dict(checkpoint(folder, update).tensors("model"))


def rows(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "outputs" / "mine" / "metrics.jsonl").read_text()
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith("perf/")}
        for line in text.splitlines()
    ]


def run_json(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "outputs" / "mine" / "run.json").read_text()))


@pytest.fixture(scope="module")
def whole(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompletedCommand]:
    """An uninterrupted run of all phases."""
    folder = tmp_path_factory.mktemp("whole")
    result = train(server, folder)
    assert result.code == 0, result.err
    return folder, result


def test_statistics_count_every_sample_exactly_once(whole: tuple[Path, CompletedCommand]) -> None:
    from tests.end_to_end.task_of_phases import Samples

    samples = Samples(33)
    mean = torch.stack([samples[index][0].double() for index in range(33)]).mean(0)
    assert torch.allclose(weights(whole[0], STATISTICS)["mean"], mean, rtol=allowed(torch.float64, 33), atol=0)
    result = [row for row in rows(whole[0]) if "fit/mean" in row]
    assert [row["fit/mean"] for row in result] == [pytest.approx(float(mean.mean()))]
    assert not any("train/loss" in row or "lr" in row for row in rows(whole[0]) if row["phase"] == "statistics")


def test_a_phase_changes_only_its_parameters(whole: tuple[Path, CompletedCommand]) -> None:
    folder, result = whole
    after = {number: weights(folder, number) for number in (STATISTICS, PRETRAIN, ADAPTER, PATIENT)}
    changed = {
        number: {name for name, weight in after[number].items() if not torch.equal(weight, after[before][name])}
        for before, number in ((STATISTICS, PRETRAIN), (PRETRAIN, ADAPTER), (ADAPTER, PATIENT))
    }
    head, adapter = {"head.weight", "head.bias"}, {"adapter.weight", "adapter.bias"}
    assert changed[PRETRAIN] == head | adapter | {"base.weight", "base.bias"}
    assert changed[ADAPTER] == head | adapter
    assert changed[PATIENT] <= head
    assert "56 of 86" in result.out
    names = {name.rpartition(".")[0] for name in checkpoint(folder, ADAPTER).tensors("optimizer")}
    assert names == head | adapter


def test_each_phase_uses_its_own_optimizer_and_schedule(whole: tuple[Path, CompletedCommand]) -> None:
    rates = {phase: [row["lr"] for row in rows(whole[0]) if row["phase"] == phase and "lr" in row] for phase in
             ("pretrain", "adapter", "patient")}  # fmt: skip
    assert len(rates["pretrain"]) == 12
    assert rates["pretrain"][0] == pytest.approx(0.1)
    assert rates["pretrain"][-1] == pytest.approx(0.01, rel=0.5)  # cosine decay to a tenth of the learning rate
    assert rates["adapter"][0] == pytest.approx(0.002)
    assert rates["adapter"][-1] == pytest.approx(0.002 / 8)  # one warm-up update, then linear decay to zero
    assert max(rates["patient"]) == pytest.approx(1e-12)
    assert checkpoint(whole[0], PRETRAIN).state["optimizer"]["optimizer"] == "torch.SGD"
    assert checkpoint(whole[0], ADAPTER).state["optimizer"]["optimizer"] == "torch.Adam"


def test_early_stopping_is_recorded_and_saved(whole: tuple[Path, CompletedCommand]) -> None:
    folder, _ = whole
    assert run_json(folder)["phases"]["patient"]["updates"] == 8
    assert newest_valid(folder / "outputs" / "mine" / "checkpoints") == checkpoint_path(
        folder / "outputs" / "mine" / "checkpoints", PATIENT
    )


def test_time_and_memory_are_reported_by_phase(
    whole: tuple[Path, CompletedCommand], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = whole
    phases = run_json(folder)["phases"]
    assert [(name, one["kind"], one["updates"], one["finished"]) for name, one in phases.items()] == [
        ("statistics", "fit", 4, True), ("pretrain", "train", 12, True),
        ("adapter", "train", 9, True), ("patient", "train", 8, True),
    ]  # fmt: skip
    assert all(one["seconds"] > 0 and one["peak_host_gib"] > 0.05 for one in phases.values())
    assert "fit/mean" in phases["statistics"]["metrics"]
    assert "val/loss" in phases["adapter"]["metrics"]
    monkeypatch.chdir(folder)
    assert main(["status", "mine"]) == 0
    status = capsys.readouterr().out
    assert "statistics" in status
    assert "4 of 4" in status


def test_every_evaluation_draws_the_same_random_numbers(whole: tuple[Path, CompletedCommand]) -> None:
    noise = {row["val/noise"] for row in rows(whole[0]) if "val/noise" in row}
    assert len(noise) == 1


def test_final_checkpoints_of_phases_are_kept(whole: tuple[Path, CompletedCommand]) -> None:
    names = {path.name for path in (whole[0] / "outputs" / "mine" / "checkpoints").glob("update-*")}
    assert {f"update-{number:010d}" for number in (STATISTICS, PRETRAIN, ADAPTER, PATIENT)} <= names


@pytest.mark.sampled(1)
# The batch at which the process is killed, and the update of a checkpoint that must exist before.
@pytest.mark.parametrize(
    ("stop_at", "wait_for"),
    [
        ("statistics:5", 1),
        ("pretrain:3", 4),
        ("pretrain:15", 9),
        ("adapter:1", 16),
        ("adapter:11", 19),
        ("patient:9", 28),
    ],
)
def test_resume_after_a_kill_in_any_phase(
    stop_at: str, wait_for: int, whole: tuple[Path, CompletedCommand], server: ForkServer, tmp_path: Path
) -> None:
    place = tmp_path / "outputs" / "mine" / "checkpoints" / f"update-{wait_for:010d}"
    args = [f"task.stop_at={stop_at}", f"task.wait_for={place}", "checkpoint.every=1"]
    result = train(server, tmp_path, *args)
    assert result.code == -signal.SIGKILL, result.err
    again = train(server, tmp_path, *args, env={"NO_KILL": "1"})
    assert again.code == 0, again.err
    assert rows(tmp_path) == rows(whole[0])
    mine, theirs = checkpoint(tmp_path, PATIENT), checkpoint(whole[0], PATIENT)
    for stem in theirs.stems:
        for name, tensor in theirs.tensors(stem).items():
            assert torch.equal(tensor, mine.tensors(stem)[name]), f"{stem}/{name}"


@pytest.mark.slow
def test_running_each_phase_separately_gives_the_same_result(
    whole: tuple[Path, CompletedCommand], server: ForkServer, tmp_path: Path
) -> None:
    for phase in ("statistics", "pretrain", "adapter", "patient"):
        result = train(server, tmp_path, f"phases=[{phase}]")
        assert result.code == 0, result.err
    assert rows(tmp_path) == rows(whole[0])
    for name, weight in weights(whole[0], PATIENT).items():
        assert torch.equal(weight, weights(tmp_path, PATIENT)[name]), name
    assert [one["finished"] for one in run_json(tmp_path)["phases"].values()] == [True] * 4


@pytest.mark.slow
def test_settings_of_a_finished_phase_can_change(server: ForkServer, tmp_path: Path) -> None:
    assert train(server, tmp_path, "phases=[pretrain]", "updates=3", "optimizer.lr=0.3").code == 0
    result = train(server, tmp_path, "phases=[adapter]", "updates=2", "phase.adapter.optimizer=sgd")
    assert result.code == 0, result.err
    assert checkpoint(tmp_path, 5).state["optimizer"]["optimizer"] == "torch.SGD"
    changed = train(server, tmp_path, "phases=[adapter]", "updates=4", "phase.adapter.optimizer=sgd")
    assert changed.code == 88
    assert "phase.adapter.updates" in changed.err
    allowed = train(
        server, tmp_path, "phases=[adapter]", "updates=4", "phase.adapter.optimizer=sgd", "resume_allow=[updates]"
    )
    assert allowed.code == 0, allowed.err
    assert run_json(tmp_path)["phases"]["adapter"]["updates"] == 4


@pytest.mark.slow
def test_a_phase_needs_its_prerequisite(server: ForkServer, tmp_path: Path) -> None:
    """Either this run or the run from which it starts must have finished the prerequisite."""
    result = train(server, tmp_path, "phases=[adapter]")
    assert result.code == 66
    assert "phases=[pretrain,adapter]" in result.err
    assert "phases=[pretrain,adapter,patient]" in train(server, tmp_path, "phases=[patient]").err
    assert not (tmp_path / "outputs" / "mine" / "checkpoints").exists() or not newest_valid(
        tmp_path / "outputs" / "mine" / "checkpoints"
    )
    other = [word for word in BASE if word != "run=mine"]
    assert server.run(["train", *other, "run=first", "phases=[pretrain]"], tmp_path).code == 0
    result = train(server, tmp_path, "phases=[adapter]", "resume=first")
    assert result.code == 0, result.err
    started = load(checkpoint_path(tmp_path / "outputs" / "first" / "checkpoints", 12)).tensors("model")
    assert torch.equal(started["base.weight"], weights(tmp_path, 21)["base.weight"])


@pytest.mark.slow
def test_epochs_0_runs_only_the_statistics(server: ForkServer, tmp_path: Path) -> None:
    result = train(server, tmp_path, "epochs=0")
    assert result.code == 0, result.err
    assert list(run_json(tmp_path)["phases"]) == ["statistics"]
    later = train(server, tmp_path, "epochs=1", "phases=[pretrain]")
    assert later.code == 0, later.err
    assert run_json(tmp_path)["phases"]["pretrain"]["updates"] == 5


@pytest.mark.slow
def test_the_phase_infer_runs_inference(server: ForkServer, tmp_path: Path) -> None:
    result = train(server, tmp_path, "updates=2", "phases=[statistics,pretrain,infer]")
    assert result.code == 0, result.err
    run = tmp_path / "outputs" / "mine"
    assert (run / "predictions" / "0.txt").read_text().startswith("pretrain 2.00 ")
    assert (run / "predictions" / "1.bin").read_bytes() == b"\x00\x01"
    assert (run / "plots" / "1.png").read_bytes() == b"\x89PNG"
    before = (run / "predictions" / "0.txt").read_bytes()
    both = server.run(["both", *BASE, "updates=2", "phases=[statistics,pretrain,infer]"], tmp_path)
    assert both.code == 0, both.err
    assert (run / "predictions" / "0.txt").read_bytes() == before
    assert both.out.count("predictions,") == 1
    alone = train(server, tmp_path, "phases=[infer]", "inference.samples=3")
    assert alone.code == 0, alone.err
    assert (run / "predictions" / "2.txt").exists()


@pytest.mark.parametrize(
    ("args", "suggested"),
    [
        (["phases=[adaptor]"], "patient"),
        (["phases=[]"], "phases"),
        (["phase.adapter.trains=[adaptor]"], "adaptor"),
        (["phase.adapter.trains=[]"], "phase.adapter.trains"),
        (["phase.statistics.updates=4"], "phase.statistics.updates"),
        (["phase.adapter.optimizer=adma"], "adam"),
        (["phase.adapter.optimizer.lr=fast"], "phase.adapter.optimizer.lr"),
        (["phase.adapter.updates=4", "phase.adapter.epochs=1"], "phase.adapter.epochs"),
        (["phases=[pretrain]", "phase.pretrain.epochs=0"], "epochs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_typos_in_phases_are_reported_before_training(
    args: list[str],
    suggested: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *BASE, *args]) == 78
    assert suggested in capsys.readouterr().err
    assert never_trained(tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("word", "named"),
    [("task.losses=pretrian", "pretrian"), ("task.added=x", "dict"), ("task.fits=false", "statistics")],
)
def test_errors_of_the_task_are_reported_before_training(
    word: str, named: str, server: ForkServer, tmp_path: Path
) -> None:
    result = train(server, tmp_path, word)
    assert result.code == 70, result.err
    assert named in result.err
    assert "Traceback" not in result.err
    assert never_trained(tmp_path)


def never_trained(folder: Path) -> bool:
    checkpoints = folder / "outputs" / "mine" / "checkpoints"
    return not checkpoints.exists() or newest_valid(checkpoints) is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro", [1, 2, 10])
def test_statistics_do_not_depend_on_the_micro_batch(
    micro: int, whole: tuple[Path, CompletedCommand], server: ForkServer, tmp_path: Path
) -> None:
    result = train(server, tmp_path, "phases=[statistics]", f"phase.statistics.micro_batch_size={micro}")
    assert result.code == 0, result.err
    wanted = weights(whole[0], STATISTICS)["mean"]
    assert torch.allclose(weights(tmp_path, STATISTICS)["mean"], wanted, rtol=allowed(torch.float64, 33), atol=0)


@pytest.mark.slow
def test_the_precision_applies_to_every_training_phase(server: ForkServer, tmp_path: Path) -> None:
    result = train(server, tmp_path, "precision=fp16", "precision.init_scale=8", "updates=2")
    assert result.code == 0, result.err
    scaled = {row["phase"] for row in rows(tmp_path) if row.get("precision/loss_scale") == 8 and "lr" in row}
    assert scaled == {"pretrain", "adapter", "patient"}


def finished(folder: Path) -> dict[str, bool]:
    last = newest_valid(folder / "outputs" / "mine" / "checkpoints")
    assert last is not None
    return {name: record["finished"] for name, record in load(last).state["records"].items()}


STOPS = ["pretrain:1", "pretrain:22", "pretrain:eval", "patient:eval"]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("stop_at", STOPS)
def test_resume_after_a_stop_in_any_phase(
    stop_at: str, whole: tuple[Path, CompletedCommand], server: ForkServer, tmp_path: Path
) -> None:
    stop_and_resume(stop_at, whole[0], server, tmp_path)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("stop_at", ["statistics:3", "statistics:eval"])
def test_statistics_of_a_stopped_run_are_stored_once(
    stop_at: str, whole: tuple[Path, CompletedCommand], server: ForkServer, tmp_path: Path
) -> None:
    """The run is stopped while statistics are computed or after they are stored in the model."""
    stop_and_resume(stop_at, whole[0], server, tmp_path)


def stop_and_resume(stop_at: str, whole: Path, server: ForkServer, tmp_path: Path) -> None:
    args = [f"task.stop_at={stop_at}", "task.by=SIGTERM"]
    result = train(server, tmp_path, *args)
    assert result.code == 75, result.err
    again = train(server, tmp_path, *args, env={"NO_KILL": "1"})
    assert again.code == 0, again.err
    assert rows(tmp_path) == rows(whole)
    for name, weight in weights(whole, PATIENT).items():
        assert torch.equal(weight, weights(tmp_path, PATIENT)[name]), name
    assert int(weights(tmp_path, PATIENT)["times"]) == 1


@pytest.mark.slow
def test_an_extended_phase_is_unfinished(server: ForkServer, tmp_path: Path) -> None:
    args = ["phases=[pretrain]", "task.stop_at=pretrain:5", "task.by=SIGTERM"]
    assert train(server, tmp_path, *args, "updates=3", env={"NO_KILL": "1"}).code == 0
    assert finished(tmp_path) == {"pretrain": True}
    extended = [*args, "updates=9", "resume_allow=[updates]"]
    result = train(server, tmp_path, *extended)
    assert result.code == 75, result.err
    assert finished(tmp_path) == {"pretrain": False}
    assert train(server, tmp_path, *extended, env={"NO_KILL": "1"}).code == 0
    assert finished(tmp_path) == {"pretrain": True}


def test_a_rejected_attempt_changes_nothing(server: ForkServer, tmp_path: Path) -> None:
    assert train(server, tmp_path, "phases=[pretrain,adapter]", "updates=3").code == 0
    run = tmp_path / "outputs" / "mine"
    kept = ("run.json", "config.yaml", "overrides.yaml", "plan.json", "metrics.jsonl")
    before = {name: (run / name).read_bytes() for name in kept}
    checkpoints = {path.name for path in (run / "checkpoints").iterdir()}
    for args, code in (
        (["phases=[pretrain]", "updates=7"], 88),
        (["phases=[patient]", "resume=fresh"], 66),
        (["phases=[adapter]", "phase.adapter.trains=[base]"], 88),
    ):
        assert train(server, tmp_path, *args).code == code
        assert before == {name: (run / name).read_bytes() for name in kept}, args
        assert checkpoints == {path.name for path in (run / "checkpoints").iterdir()}, args


@pytest.mark.slow
def test_an_early_stopped_phase_is_finished(server: ForkServer, tmp_path: Path) -> None:
    args = [
        "phases=[pretrain,adapter]", "phase.pretrain.updates=2", "evaluate.every=2", "phase.adapter.updates=30",
        "phase.adapter.early_stopping.patience=2", "phase.adapter.early_stopping.min_delta=10",
    ]  # fmt: skip
    result = train(server, tmp_path, *args)
    assert result.code == 0, result.err
    assert run_json(tmp_path)["phases"]["adapter"]["updates"] == 6
    assert finished(tmp_path) == {"pretrain": True, "adapter": True}
    again = train(server, tmp_path, *args)
    assert again.code == 0, again.err
    assert run_json(tmp_path)["phases"]["adapter"]["updates"] == 6
    assert train(server, tmp_path, "phases=[patient]", "updates=2").code == 0


@pytest.mark.slow
def test_phases_can_run_in_any_permitted_order(server: ForkServer, tmp_path: Path) -> None:
    assert train(server, tmp_path, "phases=[pretrain]", "updates=2").code == 0
    result = train(server, tmp_path, "phases=[statistics,adapter]", "updates=2")
    assert result.code == 0, result.err
    assert finished(tmp_path) == {"pretrain": True, "statistics": True, "adapter": True}


@pytest.mark.slow
def test_a_run_can_start_from_a_finished_phase(server: ForkServer, tmp_path: Path) -> None:
    args = ["phases=[pretrain]", "optimizer.lr=10", "evaluate.every=1"]
    assert train(server, tmp_path, *args).code == 0
    losses = [row["val/loss"] for row in rows(tmp_path) if "val/loss" in row]
    best = 1 + losses.index(min(losses))
    assert best < 12, "the best checkpoint must not be the last one"
    assert train(server, tmp_path, "phases=[adapter,patient]", "updates=6").code == 0
    place = checkpoint_path(tmp_path / "outputs" / "mine" / "checkpoints", best)
    other = [word for word in BASE if word != "run=mine"]
    result = server.run(["train", *other, "run=second", *args, f"resume={place}"], tmp_path)
    assert result.code == 0, result.err
    again = server.run(["train", *other, "run=third", "resume=mine", "phases=[adapter]", "updates=2"], tmp_path)
    assert again.code == 0, again.err  # `mine` has finished the phase, but `third` runs it again
    third = json.loads((tmp_path / "outputs" / "third" / "run.json").read_text())
    assert third["phases"]["adapter"]["updates"] == 2


@pytest.mark.slow
def test_a_config_folder_can_set_options_of_a_phase(server: ForkServer, tmp_path: Path) -> None:
    from runner.base.paths import shipped_path

    folder = tmp_path / "conf"
    folder.mkdir()
    text = (shipped_path("conf") / "config.yaml").read_text() + "phase:\n  pretrain:\n    updates: 3\n"
    (folder / "config.yaml").write_text(text)
    args = ["--config-dir", str(folder), "phases=[pretrain,adapter]"]
    result = train(server, tmp_path, *args)
    assert result.code == 0, result.err
    assert [one["updates"] for one in run_json(tmp_path)["phases"].values()] == [3, 9]
    messages = server.run(["explain", "phase.pretrain.updates", *BASE, *args], tmp_path)
    assert "phase.pretrain.updates = 3" in messages.out, messages.err


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    ("key", "word", "value"),
    [
        ("phase.adapter.updates", "updates=3", "3"),
        ("phase.adapter.updates", "epochs=2", "null"),
        ("phase.adapter.optimizer.lr", "phase.adapter.optimizer.lr=0.5", "0.5"),
        ("phase.adapter.optimizer", "optimizer=adamw", "adamw"),
        ("phase.adapter.evaluate.every", "evaluate.every=3", "3"),
    ],
)
def test_explain_names_the_override_of_a_phase(
    key: str, word: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", key, *BASE, word]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first == f"{key} = {value}"
    assert f"({word})" in second


def test_parameters_without_gradients_are_reported(server: ForkServer, tmp_path: Path) -> None:
    result = train(server, tmp_path, "task.unused=true", "phases=[pretrain]", "updates=2")
    assert result.code == 0, result.err
    assert "head.extra" in result.out + result.err


@pytest.mark.slow
def test_phase_overrides_take_precedence(server: ForkServer, tmp_path: Path) -> None:
    args = ["updates=3", "phase.adapter.updates=2", "optimizer.lr=0.05", "phases=[pretrain,adapter]"]
    result = train(server, tmp_path, *args)
    assert result.code == 0, result.err
    phases = run_json(tmp_path)["phases"]
    assert (phases["pretrain"]["updates"], phases["adapter"]["updates"]) == (3, 2)
    first = {row["phase"]: row["lr"] for row in reversed(rows(tmp_path)) if "lr" in row}
    # optimizer.lr=0.05 applies to the run's optimizer, sgd; the adapter phase uses adam
    assert first == {"pretrain": pytest.approx(0.05), "adapter": pytest.approx(0.002)}
