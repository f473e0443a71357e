"""State that forward passes change (the forward state) is saved, and restored in resumed runs and evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.durable.checkpoint import checkpoint_path, load, newest_valid
from tests.forkserver import ForkServer
from tests.laws.test_buffers import result

TEXT = (Path(__file__).parents[2] / "laws/task_of_buffers.py").read_text()
ENDS = {
    "fails": {"at": "update", "number": 6, "by": "raise"},
    "stopped in its last update": {"at": "update", "number": 7, "by": "SIGTERM"},
    "stopped in its last evaluation": {"at": "evaluation", "number": 8, "by": "SIGTERM"},
}
ANSWER = 'return {"accuracy"'
EXPANDED = {
    "torch.ones(4), persistent": "torch.ones(1).expand(4), persistent",
    "self.used.index_add_(": "self.used = self.used.index_add(",
}
BANK = """        if self.training:
            APPEND
        if len(self.bank):
            x = x - 0.1 * self.bank.mean(0)
"""
BUFFER = '        self.register_buffer("used", torch.ones(4), persistent=False)\n'
CODES = "        nearest = torch.cdist("
GROWING = {
    BUFFER: BUFFER + BUFFER.replace("used", "bank").replace("torch.ones(4)", "torch.zeros(0, 12)"),
    CODES: BANK.replace("APPEND", "self.bank = torch.cat([self.bank, x.detach()])") + CODES,
}
IN_PLACE = "self.bank.resize_(len(self.bank) + len(x), 12)[-len(x):] = x.detach()"
KINDS = {
    "frozen parameter": ("task.frozen=true", {}),
    "buffer": ("", {}),
    "new tensor for a view": ("", EXPANDED),
    "buffer that grows": ("", GROWING),
    "buffer that grows in place": ("", GROWING | {CODES: BANK.replace("APPEND", IN_PLACE) + CODES}),
}


@pytest.fixture(params=KINDS, scope="module")
def args(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the arguments for a task whose loss depends on frozen state or on state outside the state dict."""
    settings, changes = KINDS[request.param]
    text, called = TEXT, 'reached("evaluation", self.update)'
    measured = f'{called}\n        return {{"loss": self.loss(model, batch), "accuracy"'
    for old, new in ({ANSWER: measured} | changes).items():
        assert old in text
        text = text.replace(old, new)
    path = tmp_path_factory.mktemp("task") / "task_of_buffers.py"
    path.write_text(text)
    return f"--task {path} device=cpu monitor=off dataloader.num_workers=0 checkpoint.every=3 run=mine {settings}"


def run_training(server: ForkServer, folder: Path, args: str, fault: dict[str, Any] | None = None) -> Any:
    folder.mkdir(exist_ok=True)
    env = {"IMPORT_FIRST": "tests.faults.ending", "FAULT": json.dumps(fault or {})}
    completed = server.run(f"train {args}", folder, env)
    assert (completed.code == 0) is (fault is None), completed.err
    return json.loads((folder / "outputs/mine/run.json").read_text())["metrics"]


@pytest.fixture(scope="module")
def straight(args: str, server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return the folder and the metrics of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, run_training(server, folder, args)


def forward_state(folder: Path) -> dict[str, Tensor]:
    """Return the tensors that the last checkpoint has in addition to the state dict."""
    path = newest_valid(folder / "outputs/mine/checkpoints")
    assert path is not None
    return load(path).tensors("forward_state")


@pytest.mark.slow_beyond(2)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("end", ENDS)
def test_a_resumed_run_restores_the_forward_state(
    end: str, args: str, straight: tuple[Path, Any], server: ForkServer, tmp_path: Path
) -> None:
    folder, metrics = straight
    run_training(server, tmp_path, args, ENDS[end])
    assert run_training(server, tmp_path, args) == metrics
    (weights, losses), (actual, found_losses) = result(folder), result(tmp_path)
    assert found_losses == losses
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, actual[name])] == []
    kept, kept_found = forward_state(folder), forward_state(tmp_path)
    assert kept.keys() == kept_found.keys()
    assert all(torch.equal(tensor, kept_found[name]) for name, tensor in kept.items())


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
def test_a_phase_run_in_a_later_command_restores_the_forward_state(
    args: str, server: ForkServer, tmp_path: Path
) -> None:
    task = next(word for word in args.split() if word.endswith(".py"))
    text = Path(task).read_text() + '\n\nPHASES = {"one": {"updates": 4}, "two": {"updates": 4}}\n'
    (tmp_path / "phases.py").write_text(text)
    args = args.replace(task, str(tmp_path / "phases.py"))
    together, apart = tmp_path / "together", tmp_path / "apart"
    expected = run_training(server, together, args)
    run_training(server, apart, f"{args} phases=[one]")
    assert run_training(server, apart, f"{args} phases=[two]") == expected
    saved, states = forward_state(apart), forward_state(together)
    assert saved.keys() == states.keys()
    assert all(torch.equal(saved[name], state) for name, state in states.items())


def test_an_evaluation_of_a_checkpoint_uses_the_forward_state(straight: tuple[Path, Any], server: ForkServer) -> None:
    folder, metrics = straight
    completed = server.run("evaluate mine checkpoint=last --json", folder, {"IMPORT_FIRST": "tests.faults.ending"})
    assert completed.code == 0, completed.err
    assert json.loads(completed.out)["metrics"] == metrics


LATE = {
    "class Codebook(nn.Module):": "class Codebook(nn.Module):\n    is_open = False",
    "self.used.index_add_(": "if self.is_open: self.used.index_add_(",
    "self.update = progress.update": "self.update = progress.update\n        self.model[3].is_open = self.update >= 2",
}


def test_a_buffer_that_first_changes_in_a_later_update_is_saved(server: ForkServer, tmp_path: Path) -> None:
    text = TEXT
    for old, new in LATE.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "late.py").write_text(text)
    args = f"--task {tmp_path / 'late.py'} device=cpu monitor=off dataloader.num_workers=0 run=mine"
    run_training(server, tmp_path, f"{args} updates=4 checkpoint.every=3 evaluate.every=0")
    saved = load(checkpoint_path(tmp_path / "outputs/mine/checkpoints", 3)).tensors("forward_state")
    (used,) = (tensor for name, tensor in saved.items() if name.endswith("used"))
    assert used.sum() == 4 + 8, "the third update has counted its 8 samples"
