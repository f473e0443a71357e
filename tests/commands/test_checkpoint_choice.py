"""`checkpoint=best|last|N` selects the checkpoint that a command uses, or to which a run is rewound."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from runner.durable.checkpoint import checkpoint_path, load
from tests.commands_here import run_here
from tests.forkserver import CompletedCommand

TASK = Path(__file__).parents[1] / "engine" / "task_of_averages.py"
EXPORT = "export mine format=safetensors"
WORDS = (
    "device=cpu", "monitor=off", "backend.threads=1", "updates=6", "evaluate.every=1", "checkpoint.every=1updates",
    "checkpoint.keep=9", "checkpoint.best_is=max",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    result = run_here(["train", "--task", str(TASK), "run=mine", *WORDS], folder)
    assert result.code == 0, result.err
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "outputs/mine/metrics.jsonl").read_text().splitlines()]
    return {row["update"]: row["val/loss"] for row in rows if "val/loss" in row}


def best(folder: Path) -> int:
    result = losses(folder)
    return max(result, key=lambda update: result[update])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "outputs/mine/checkpoints").iterdir())


def run_successfully(folder: Path, args: str) -> CompletedCommand:
    result = run_here(args, folder)
    assert result.code == 0, result.err
    return result


def test_export_writes_the_weights_of_the_chosen_checkpoint(folder: Path) -> None:
    from safetensors.torch import load_file

    for word, number in (
        ("", best(folder)),
        ("checkpoint=best", best(folder)),
        ("checkpoint=last", 6),
        ("checkpoint=4", 4),
    ):
        messages = run_successfully(folder, f"export mine format=safetensors {word}".strip()).out
        assert checkpoint_path(Path(), number).name in messages
        assert f"val/loss {losses(folder)[number]:.4g}" in messages
        wanted = load(checkpoint_path(folder / "outputs/mine/checkpoints", number)).tensors("model")
        result = load_file(folder / "outputs/mine/export/model.safetensors")
        assert all(bool((result[name] == wanted[name]).all()) for name in wanted)


def test_evaluate_and_inference_use_the_chosen_checkpoint(folder: Path) -> None:
    for word, number in (("", best(folder)), ("checkpoint=last", 6), ("checkpoint=4", 4)):
        record = json.loads(run_successfully(folder, f"evaluate mine --json {word}".strip()).out)
        assert (record["update"], record["metrics"]["val/loss"]) == (number, losses(folder)[number])
        shown = run_successfully(folder, f"inference mine {word}".strip()).out
        assert checkpoint_path(Path(), number).name in shown
        assert f"val/loss {losses(folder)[number]:.4g}" in shown
        weights = load(checkpoint_path(folder / "outputs/mine/checkpoints", number)).tensors("model")
        (predicted,) = (folder / "outputs/mine/predictions").glob("bias.txt")
        assert float(predicted.read_text()) == weights["2.bias"].item()


@pytest.mark.slow
def test_status_and_report_mark_best_and_last_checkpoint(folder: Path) -> None:
    lines = {
        line.split(":")[0].split()[-1]: line
        for line in run_successfully(folder, "status mine").out.splitlines()
        if "valid" in line
    }
    marked = {name: word for name, line in lines.items() for word in ("best", "last") if word in line}
    assert marked == {checkpoint_path(Path(), best(folder)).name: "best", checkpoint_path(Path(), 6).name: "last"}
    run_successfully(folder, "report mine")
    page = (folder / "outputs/mine/report.html").read_text()
    assert f"best, val/loss {losses(folder)[best(folder)]:.4g}" in page


def test_a_rewound_run_reproduces_its_earlier_results(folder: Path) -> None:
    before, weights = losses(folder), load(checkpoint_path(folder / "outputs/mine/checkpoints", 6)).tensors("model")
    result = run_successfully(folder, "resume mine checkpoint=3")
    assert "resumes after update 3" in result.out
    assert losses(folder) == before
    again = load(checkpoint_path(folder / "outputs/mine/checkpoints", 6)).tensors("model")
    assert all(bool((again[name] == weights[name]).all()) for name in weights)
    assert [name for name in names(folder) if name.startswith("earlier-")] == [
        f"earlier-update-{number:010}-1" for number in (4, 5, 6)
    ]
    assert (folder / "outputs/mine/metrics-earlier-1.jsonl").is_file()


def test_a_rejected_resume_does_not_rewind(folder: Path) -> None:
    before = names(folder)
    for args, code in (("seed=5", 88), ("optimizer.lr=2.0", 88), ("no_such_key=1", 78)):
        assert run_here(f"resume mine checkpoint=3 {args}", folder).code == code
        assert names(folder) == before
    assert not (folder / "outputs/mine/metrics-earlier-1.jsonl").exists()


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("4, 6), nn.Tanh(), nn.Linear(6", "4, 7), nn.Tanh(), nn.Linear(7"),  # detected when the weights are loaded
        ("self.model =", "raise RuntimeError; self.model ="),
        ("return (model(x)", "raise RuntimeError; return (model(x)"),
    ],
    ids=["other model", "fails in build", "fails in the first update"],
)
def test_a_failed_resume_without_updates_keeps_all_checkpoints(old: str, new: str, folder: Path) -> None:
    before, metrics = names(folder), (folder / "outputs/mine/metrics.jsonl").read_bytes()
    (folder / TASK.name).write_text(TASK.read_text().replace(old, new))
    result = run_here(f"resume mine checkpoint=3 --task {TASK.name}", folder)
    assert (result.code, result.out.count("resumes after update 3")) in ((70, 1), (88, 1)), result.err
    assert names(folder) == before
    assert (folder / "outputs/mine/metrics.jsonl").read_bytes() == metrics
    assert not (folder / "outputs/mine/metrics-earlier-1.jsonl").exists()


def test_a_failed_resume_keeps_its_new_checkpoints(folder: Path) -> None:
    """The run fails after some updates."""
    before = (folder / "outputs/mine/metrics.jsonl").read_bytes()
    count = "if model.training: counted.append(1)\n        if len(counted) > 2: raise RuntimeError\n        return (mod"
    text = TASK.read_text().replace("return (mod", count).replace("SETTINGS =", "counted = []\nSETTINGS =")
    (folder / TASK.name).write_text(text)
    result = run_here(f"resume mine checkpoint=3 --task {TASK.name}", folder)
    assert result.code == 70, result.err
    there = [f"update-{number:010}" for number in (1, 2, 3, 4, 5)]
    assert names(folder) == [*(f"earlier-update-{number:010}-1" for number in (4, 5, 6)), *there]
    assert (folder / "outputs/mine/metrics-earlier-1.jsonl").read_bytes() == before


def test_checkpoint_off_and_keep_can_be_given_on_resume(folder: Path) -> None:
    longer = "updates=7 resume_allow=[updates]"
    run_successfully(folder, f"resume mine checkpoint=off checkpoint.keep=9 {longer}")
    assert checkpoint_path(Path(), 7).name in names(folder)


def test_the_last_checkpoint_is_used_without_a_watched_metric(tmp_path: Path) -> None:
    args = ["train", "--task", str(TASK), "run=mine", *WORDS, "checkpoint.best=null"]
    assert run_here(args, tmp_path).code == 0
    assert checkpoint_path(Path(), 6).name in run_successfully(tmp_path, EXPORT).out
    assert run_here(f"{EXPORT} checkpoint=best", tmp_path).code == 66


def test_a_damaged_best_checkpoint_is_skipped_unless_requested(folder: Path) -> None:
    path = checkpoint_path(folder / "outputs/mine/checkpoints", best(folder))
    (path / "model.safetensors").write_bytes(b"damaged")
    result = run_successfully(folder, EXPORT)
    assert path.name in result.err
    assert checkpoint_path(Path(), 6).name in result.out
    assert run_here(f"{EXPORT} checkpoint=best", folder).code == 65
