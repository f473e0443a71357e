"""State that a forward pass keeps for later passes must be in buffers; attributes that no pass uses are ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forkserver import CompletedCommand, ForkServer

TASK = """
import torch
from torch import nn
from runner import Task

SETTINGS = {"updates": 4, "global_batch_size": 8, "evaluate.every": 2}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.kept, self.table = nn.Linear(3, 1), KEPT, None
    def forward(self, x):
        BODY
        return self.net(x)

def drop(state):
    state.pop("1.late", None)

def build():
    return Mine()

class Mine(Task):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(3, 3), Model())
    def dataset(self, split):
        generator = torch.Generator().manual_seed(len(split))
        return [(torch.randn(3, generator=generator), float(index % 2)) for index in range(24)]
    def loss(self, model, batch):
        x, y = batch
        return (model(x)[:, 0] - y).square().sum(), len(x)
    def begin_update(self, progress):
        self.model[1].scale = 1 + progress.update
"""
OF_TASK = (
    TASK.replace("        BODY\n", "")
    .replace("KEPT", "None")
    .replace("        self.model =", "        self.kept = KEPT\n        self.model =")
    .replace("        x, y = batch\n", "        x, y = batch\n        BODY\n")
)
MEAN = "x.detach().mean(0)"
USED = {
    "a counter": ("0", "self.kept += 1; x = x + 0.1 * self.kept"),
    "a tensor that is replaced": ("torch.zeros(3)", f"self.kept = 0.9 * self.kept + {MEAN}; x = x - self.kept"),
    "a tensor changed in place": ("torch.zeros(3)", f"self.kept.mul_(0.9).add_({MEAN}); x = x - self.kept"),
    "a list": ("[]", f"self.kept.append({MEAN}); x = x - torch.stack(self.kept).mean(0)"),
    "an array": ("__import__('numpy').zeros(3)", "self.kept += 1; x = x + torch.from_numpy(self.kept).float()"),
    "changed in evaluations": ("0", "self.kept += not self.training; x = x + 0.1 * self.kept"),
}
UNUSED = {
    "a counter": ("0", "self.kept += 1"),
    "activations for later": ("None", "self.kept = x"),
    "an auxiliary loss": ("[]", "self.kept.append(x.mean().item())"),
    "a cache": ("None", "self.kept = torch.ones(3) if self.kept is None else self.kept; x = x + self.kept"),
    "set by the task before updates": ("0", "x = x * self.scale"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "body"), USED.values(), ids=USED)
def test_attributes_used_by_later_passes_stop_the_run(kept: str, body: str, server: ForkServer, tmp_path: Path) -> None:
    result = trained(kept, body, server, tmp_path)
    assert result.code == 70, result.err
    assert "1.kept" in result.err
    assert 'self.register_buffer("kept"' in result.err


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("kept", "body"), USED.values(), ids=USED)
def test_task_attributes_count_as_state(kept: str, body: str, server: ForkServer, tmp_path: Path) -> None:
    """After a resume, a center as in DINO or an annealing counter would silently start from scratch."""
    result = trained(kept, body.replace("self.training", "model.training"), server, tmp_path, task=OF_TASK)
    assert result.code == 70, result
    assert "task.kept" in result.err
    assert 'self.model.register_buffer("kept"' in result.err


UNCOPIED = '{"__copy__": lambda self: 1 / 0}'
DATA = {
    "an array larger than memory": "__import__('numpy').broadcast_to(1.0, (1 << 58,))",
    "a memory map": f"type('Rows', (__import__('numpy').memmap,), {UNCOPIED})('rows.bin', mode='w+', shape=(9,))",
    "a list of many samples": f"type('Rows', (list,), {UNCOPIED})([0] * (1 << 21))",
}


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kept", DATA.values(), ids=DATA)
def test_data_stored_in_the_task_is_not_copied(kept: str, server: ForkServer, tmp_path: Path) -> None:
    """Copying a memory map of a file larger than memory would end the process."""
    result = trained(kept, "x = x * (1 + 0 * float(self.kept[0]))", server, tmp_path, task=OF_TASK)
    assert result.code == 0, result.err


TEACHER = "nn.Linear(3, 1)"
COPIED = OF_TASK.replace(
    "Model())\n", "Model())\n        self.kept = __import__('copy').deepcopy(self.model[0])\n"
).replace(
    "        generator =",
    "        if split != 'train': raise NotImplementedError  # evaluations call the loss, too\n        generator =",
)
AVERAGE = "[kept.WRITE.lerp_(new.WRITE, 0.1) for kept, new in zip(self.kept.parameters(), model[0].parameters())]"


@pytest.mark.parametrize("write", ["detach()", "data"])
def test_a_teacher_copied_from_the_student_stops_the_run(write: str, server: ForkServer, tmp_path: Path) -> None:
    """After the first pass, only its version differs. Its values may change in the second update."""
    result = trained("None", AVERAGE.replace("WRITE", write), server, tmp_path, task=COPIED)
    assert result.code == 70, result
    assert "task.kept.bias" in result.err


CONVERSIONS = {
    "dtype": "self.kept.double()",
    "memory format": "self.kept.to(memory_format=torch.channels_last)",
    "a copy": "__import__('copy').deepcopy(self.kept)",
}


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("conversion", CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_converted_frozen_network_is_accepted(conversion: str, server: ForkServer, tmp_path: Path) -> None:
    frozen = "nn.Sequential(*[nn.Conv2d(64, 128, 3) for _ in range(8)]).requires_grad_(False)"
    # so that the check of the loss runs no earlier pass
    task = OF_TASK.replace("class Mine(Task):", "class Mine(Task):\n    loss_is_additive = False")
    result = trained(frozen, f"self.kept = {conversion}", server, tmp_path, task=task)
    assert result.code == 0, result.err


def test_moving_averages_outside_of_the_model_stop_the_run(server: ForkServer, tmp_path: Path) -> None:
    """After a resume, a mean teacher stored in the task would start from scratch."""
    body = "[kept.data.lerp_(new.data[:1], 0.1) for kept, new in zip(self.kept.parameters(), model[0].parameters())]"
    result = trained(TEACHER, body, server, tmp_path, task=OF_TASK)
    assert result.code == 70, result
    assert "task.kept.bias" in result.err
    assert "self.model.kept" in result.err


@pytest.mark.parametrize("is_used", [False, True])
def test_outside_parameters_with_gradients_are_named(is_used: bool, server: ForkServer, tmp_path: Path) -> None:
    body = "x = x * self.kept(x).mean()" if is_used else "x = x * self.kept(x).mean().detach()"
    result = trained(
        TEACHER,
        body,
        server,
        tmp_path,
        task=OF_TASK.replace("class Mine(Task):", "class Mine(Task):\n    loss_is_additive = False"),
    )
    assert result.code == 0, result
    assert ("task.kept.weight" in result.out) == is_used


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(("kept", "body"), UNUSED.values(), ids=UNUSED)
def test_unused_attributes_are_ignored(kept: str, body: str, server: ForkServer, tmp_path: Path) -> None:
    result = trained(kept, body, server, tmp_path)
    assert result.code == 0, result.err


@pytest.mark.parametrize("first", [0, 3])
def test_a_growing_buffer_stops_the_run(first: int, server: ForkServer, tmp_path: Path) -> None:
    """The checkpoints could not be loaded, because the buffer of a new model has a different shape."""
    grow = f"self.bank = torch.cat([self.bank, self.bank]) if self.scale > {first} else self.bank"
    built = TASK.replace("        BODY", f"        {grow}").replace(
        "        super().__init__()\n",
        "        super().__init__()\n        self.register_buffer('bank', torch.zeros(1))\n",
    )
    result = trained("None", "", server, tmp_path, "checkpoint.every=2", task=built)
    assert result.code == 70, result
    assert "1.bank" in result.err
    saved = [path.name for path in (tmp_path / "outputs" / "mine" / "checkpoints").glob("update-*")]
    assert saved == (["update-0000000002"] if first else [])


STATES = {
    "a sparse buffer": ("self.register_buffer('odd', torch.eye(3).to_sparse())", 70),
    "a complex128 buffer": ("self.register_buffer('odd', torch.zeros(3, dtype=torch.complex128))", 70),
    "a sparse buffer, not saved": (
        "self.register_buffer('odd', torch.eye(3).to_sparse(), persistent=False)", 0,
    ),
    "a float8 buffer": ("self.register_buffer('odd', torch.ones(3).to(torch.float8_e4m3fn))", 0),
}  # fmt: skip


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(("made", "code"), STATES.values(), ids=STATES)
def test_state_that_cannot_be_saved_is_rejected(made: str, code: int, server: ForkServer, tmp_path: Path) -> None:
    built = TASK.replace("        super().__init__()\n", f"        super().__init__()\n        {made}\n")
    result = trained("None", "", server, tmp_path, task=built)
    assert result.code == code, result
    assert ("1.odd" in result.err) == bool(code)
    assert "please report" not in result.err
    assert ("update=1 " in result.out) == (not code)


ADDED = {
    "saved, on two ranks": (True, "0", "parallelism=ddp parallelism.world_size=2"),
    "not persistent": (False, "0", ""),
    "removed by a hook": (
        False,
        "self.register_state_dict_post_hook(lambda _, state, *rest: drop(state)) and 0",
        "",
    ),
}


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("how", ADDED)
def test_saved_buffers_added_in_training_stop_the_run(how: str, server: ForkServer, tmp_path: Path) -> None:
    """A resumed run builds the model without the buffer, so no checkpoint could be loaded."""
    is_saved, kept, args = ADDED[how]
    adds = f"self.register_buffer('late', torch.zeros(3), persistent={how != 'not persistent'})"
    result = trained(kept, f"hasattr(self, 'late') or {adds}; x = x + self.late", server, tmp_path, args)
    assert result.code == (70 if is_saved else 0), result.err
    assert ('self.register_buffer("late"' in result.err) == is_saved


def trained(
    kept: str, body: str, server: ForkServer, folder: Path, args: str = "", task: str = TASK
) -> CompletedCommand:
    (folder / "mine.py").write_text(task.replace("KEPT", kept).replace("BODY", body))
    return server.run(f"train --task mine.py run=mine device=cpu monitor=off dataloader.num_workers=0 {args}", folder)
