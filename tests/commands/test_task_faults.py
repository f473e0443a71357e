"""An error in a user's task is reported with its cause and its line in the task file, without an internal traceback."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner.durable.record_files import read_record
from runner.durable.run_state import resume_command
from tests.forkserver import CompletedCommand, ForkServer
from tests.suggestions import suggested

TASK = """\
import os
import signal
import sys
import torch
import torch.nn.functional as F
from runner import Task

SETTINGS = {"updates": 30, "global_batch_size": 4, "checkpoint.every": 5, "optimizer.lr": 0.01}

def build(*, size: int = 4) -> Task:
    return Mine(size)

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        x = torch.full((2,), float(index))
        return x, index % 2

class Mine(Task):
    def __init__(self, size):
        self.model = torch.nn.Sequential(torch.nn.Linear(2, size), torch.nn.ReLU(), torch.nn.Linear(size, 2))
        self.calls = 0
    def dataset(self, split):
        return Points()
    def loss(self, model, batch):
        x, y = batch
        self.calls += model.training
        total = F.cross_entropy(model(x), y, reduction="sum")
        return total, len(y)
"""
AT_12 = "if model.training and self.calls == 12: "  # at this point, there are two checkpoints


@dataclass(frozen=True)
class Fault:
    """A change to the task, and the error that this must cause.

    line   text of the line that the error must name; if empty, only the file is known
    saved  whether there is a checkpoint, so that error.json must contain its name
    """

    old: str
    new: str
    code: int
    cause: str
    line: str = ""
    words: str = ""
    saved: bool = False


LOSS = "        total = F.cross_entropy"
CONTRACT = "loss() must return (the sum over items as a scalar tensor, the number of items), but returned "
FAULTS = {
    "the file raises": Fault(
        "import sys\n", "import sys, nowhere\n", 70, "No module named 'nowhere'", "import sys, nowhere"
    ),
    "build raises": Fault(
        "return Mine(size)", "return {}['size']", 70, "build() raised KeyError: 'size'", "return {}['size']"
    ),
    "build leaves": Fault("return Mine(size)", "sys.exit('no')", 70, "build() raised SystemExit: no", "sys.exit('no')"),
    "build returns nothing": Fault(
        "return Mine(size)", "Mine(size)", 70, "build() must return a runner.Task, but returned NoneType", "def build("
    ),
    "build returns a model": Fault(
        "return Mine(size)",
        "return torch.nn.Linear(2, 2)",
        70,
        "must return a runner.Task, but returned Linear",
        "def build(",
    ),
    "settings before the star": Fault(
        "(*, size: int = 4)", "(size: int = 4)", 70, "the settings of build() must come after *, but size", "def build("
    ),
    "no model": Fault("self.model =", "self.net =", 70, "Mine.model must be a torch.nn.Module", "class Mine(Task)"),
    "a model whose state is no tensor": Fault(
        "        self.calls = 0\n",
        "        self.calls = 0\n        torch.nn.Sequential.get_extra_state = lambda self: {'calls': 0}\n",
        70,
        "the model's state contains _extra_state, a dict: a checkpoint can store only tensors",
    ),
    "no loss": Fault("def loss", "def los", 70, "Mine must define loss(model, batch) -> (loss_sum, num_items)"),
    "no dataset": Fault("def dataset", "def data", 70, "Mine must define dataset(split)"),
    "the loss is one tensor": Fault(
        "return total, len(y)", "return total / len(y)", 70, CONTRACT + "a tensor of shape ()", "def loss("
    ),
    "the loss is a number": Fault("return total, len(y)", "return total.item(), len(y)", 70, CONTRACT, "def loss("),
    "the loss is three": Fault(
        "return total, len(y)",
        "return total, len(y), 3",
        70,
        CONTRACT + "(a tensor of shape (), 4, 3)",
        "def loss(",
    ),
    "the loss is not reduced": Fault(
        'reduction="sum"', 'reduction="none"', 70, CONTRACT + "(a tensor of shape (4,), 4)", "def loss("
    ),
    "the loss is detached": Fault(
        "return total, len(y)",
        "return total.detach(), len(y)",
        70,
        "loss must return a sum that has a gradient",
        "def loss(",
    ),
    "the loss counts nothing": Fault("return total, len(y)", "return total, 0", 70, "a count of 0", "def loss("),
    "the loss counts nothing in a tensor": Fault(
        "return total, len(y)", "return total, total.long() * 0", 70, "a count of 0", "def loss("
    ),
    "the loss counts nothing later": Fault(
        "return total, len(y)",
        f"return total, {'0 if self.model.training else len(y)'}",
        70,
        "a count of 0",
        "def loss(",
    ),
    "the model is lazy": Fault("torch.nn.Linear(2, size)", "torch.nn.LazyLinear(size)", 70, "0.weight, 0.bias"),
    "the model grows": Fault(
        LOSS,
        f"        self.model.register_parameter('late', torch.nn.Parameter(torch.zeros(1)))\n{LOSS}",
        70,
        "new parameters after the first update: late",
    ),
    "the state is renamed": Fault(
        "        self.calls = 0\n",
        "        self.calls = 0\n"
        "        rename = lambda module, state, *_: state.update(w=state.pop('0.bias'))\n"
        "        self.model.register_state_dict_post_hook(rename)\n",
        70,
        "omits or renames 0.bias",
    ),
    "the loss raises": Fault(
        LOSS, f"        {AT_12}{{}}['points']\n{LOSS}", 70, "raised KeyError: 'points'", "{}['points']", saved=True
    ),
    "the loss stops an iteration": Fault(
        LOSS, f"        {AT_12}next(iter(()))\n{LOSS}", 70, "raised StopIteration", "next(iter(()))", saved=True
    ),
    "the loss leaves": Fault(
        LOSS,
        f"        {AT_12}sys.exit(3)\n{LOSS}",
        70,
        "update 12 of phase train raised SystemExit: 3",
        "sys.exit(3)",
        saved=True,
    ),
    "the loss is not a number": Fault(
        "return total, len(y)",
        f"{AT_12}total = total * float('nan')\n        return total, len(y)",
        82,
        "the loss is not finite at update 12",
        saved=True,
    ),
    "the shapes do not fit": Fault(
        "Linear(size, 2))", "Linear(size + 1, 2))", 70, "shapes cannot be multiplied", "total = F.cross_entropy"
    ),
    "the evaluation raises": Fault(
        "    def loss",
        "    def evaluate(self, model, batch):\n        return {}['x']\n    def loss",
        70,
        "raised KeyError: 'x'",
        "return {}['x']",
    ),
    "the dataset is empty": Fault("return 64", "return 0", 65, "the dataset of split train is empty"),
    "the dataset is nothing": Fault(
        "return Points()", "Points()", 70, 'dataset("train") must return samples with len() and [index]', "def dataset("
    ),
    "the dataset has no length": Fault(
        "def __len__", "def length", 70, 'dataset("train") must return samples with len() and [index]', "def dataset("
    ),
    "the dataset raises": Fault(
        "return Points()", "raise OSError('the disk is gone')", 70, "raised OSError: the disk is gone", "raise OSError"
    ),
    "a sample raises": Fault(
        "        x = torch", "        {}['x']\n        x = torch", 65, "cannot be read: KeyError: 'x'"
    ),
    "a sample raises in a worker": Fault(
        "        x = torch",
        "        {}['x']\n        x = torch",
        65,
        "cannot be read: KeyError: 'x'",
        words="dataloader.num_workers=2",
    ),
    "a sample raises in a thread": Fault(
        "        x = torch",
        "        {}['x']\n        x = torch",
        65,
        "cannot be read: KeyError: 'x'",
        words="dataloader=thread",
    ),
    "a data worker is killed": Fault(
        "        x = torch",
        "        if index == 40 and torch.utils.data.get_worker_info():\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n        x = torch",
        85,
        "a data worker died",
        words="dataloader.num_workers=2",
    ),
    "the memory is used up": Fault(
        LOSS,
        f"        {AT_12.replace('==', '>=')}raise MemoryError\n{LOSS}",
        81,
        "the machine is out of memory",
        saved=True,
    ),
}


def run_with(fault: Fault, server: ForkServer, folder: Path) -> tuple[CompletedCommand, dict[str, Any]]:
    """Run the task with the fault. Return the result of the command and the content of error.json."""
    changed = TASK.replace(fault.old, fault.new, 1)
    assert changed != TASK
    (folder / "mine.py").write_text(changed)
    args = ["train", "--task", "./mine.py", "run=mine", "device=cpu", "monitor=off", *fault.words.split()]
    result = server.run(args, folder)
    return result, json.loads((folder / "outputs" / "mine" / "error.json").read_text())


@pytest.mark.slow_beyond(2)
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FAULTS)
def test_task_errors_are_explained(name: str, server: ForkServer, tmp_path: Path) -> None:
    fault = FAULTS[name]
    result, error = run_with(fault, server, tmp_path)
    assert result.code == fault.code, result.err
    assert fault.cause in result.err
    assert "Traceback" not in result.err
    assert "please report" not in result.err
    file = tmp_path / "mine.py"
    if fault.line:
        lines = file.read_text().splitlines()
        number = next(number for number, text in enumerate(lines, 1) if fault.line in text)
        assert error["where"] == f"{file}:{number}"
        assert result.err.startswith(f"accel-run: {file}:{number}: ")
    assert error.keys() >= {"cause", "where", "fix", "exit_code", "last_checkpoint", "traceback"}
    assert fault.cause in error["cause"]
    assert error["exit_code"] == fault.code
    if fault.saved:
        assert error["last_checkpoint"] == "update-0000000010"
        assert (tmp_path / "outputs" / "mine" / "checkpoints" / error["last_checkpoint"]).is_dir()


def test_a_run_without_checkpoint_cannot_be_evaluated(server: ForkServer, tmp_path: Path) -> None:
    """The message repeats the error of the run, which failed before its first checkpoint."""
    _, error = run_with(FAULTS["the loss counts nothing"], server, tmp_path)
    result = server.run("evaluate mine", tmp_path)
    assert result.code == 66
    assert result.err.startswith(f"accel-run: {error['where']}: ")
    assert error["cause"] in result.err
    assert result.err.rstrip().endswith(resume_command(read_record(tmp_path / "outputs" / "mine")))


@pytest.mark.slow
def test_a_run_resumes_from_the_checkpoint_before_the_error(server: ForkServer, tmp_path: Path) -> None:
    run_with(FAULTS["the loss raises"], server, tmp_path)
    (tmp_path / "mine.py").write_text(TASK)
    again = server.run("train --task ./mine.py run=mine device=cpu monitor=off", tmp_path)
    assert again.code == 0, again.err
    assert "resumes after update 10" in again.out


@pytest.mark.slow
def test_changing_the_working_directory_does_not_move_the_run(server: ForkServer, tmp_path: Path) -> None:
    """The task changes the directory in `build`."""
    (tmp_path / "elsewhere").mkdir()
    went = f"    import os\n    os.chdir({str(tmp_path / 'elsewhere')!r})\n    return Mine(size)\n"
    (tmp_path / "mine.py").write_text(TASK.replace("    return Mine(size)\n", went, 1))
    assert "os.chdir" in (tmp_path / "mine.py").read_text()
    for updates in (10, 20):
        result = server.run(
            f"train --task ./mine.py run=mine device=cpu monitor=off updates={updates} resume_allow=[updates]", tmp_path
        )
        assert result.code == 0, result.err
    assert (tmp_path / "outputs" / "mine" / "checkpoints" / "update-0000000020").is_dir()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_setting_without_default_must_be_given(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK.replace("size: int = 4", "size: int"))
    args = "train --task ./mine.py run=mine device=cpu monitor=off"
    refused = server.run(args, tmp_path)
    assert (refused.code, suggested(refused.err)) == (78, ["task.size=..."])
    assert not (tmp_path / "outputs").exists()
    assert server.run(f"{args} task.size=4", tmp_path).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(("value", "code"), [("3", 0), ("big", 78)])
@pytest.mark.parametrize("annotation", ["", ": int"])
def test_a_setting_without_a_type_accepts_any_value(
    annotation: str, value: str, code: int, server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(TASK.replace("size: int", f"size{annotation}").replace("Mine(size)", "Mine(4)"))
    result = server.run(f"train --task ./mine.py run=mine device=cpu monitor=off task.size={value}", tmp_path)
    assert result.code == (code if annotation else 0), result.err


def test_a_task_without_validation_data_is_trained(server: ForkServer, tmp_path: Path) -> None:
    missing = "if split != 'train':\n            raise NotImplementedError\n        return Points()"
    (tmp_path / "mine.py").write_text(TASK.replace("return Points()", missing))
    result = server.run("train --task ./mine.py run=mine device=cpu monitor=off", tmp_path)
    assert result.code == 0, result.err
    assert "val/loss" not in result.out


def test_internal_errors_are_not_attributed_to_the_task() -> None:
    """If the task is in the root of a checkout, its folder contains the runner and perhaps a virtual environment."""
    from runner.engine.contract.error_diagnosis import is_task_file

    root = Path(__file__).parents[2]
    task = root / "my_task.py"
    assert is_task_file(str(task), task)
    assert is_task_file(str(root / "helpers" / "mine.py"), task)
    assert not is_task_file(str(root / "runner" / "engine" / "update" / "loop.py"), task)
    assert not is_task_file(str(root / ".venv" / "lib" / "site-packages" / "torch" / "nn.py"), task)
    ours = root / "tasks" / "gpt" / "task.py"
    assert is_task_file(str(root / "tasks" / "gpt" / "model.py"), ours)
    assert not is_task_file(str(root / "runner" / "engine" / "update" / "loop.py"), ours)


def test_a_missing_package_of_the_task_creates_no_run(server: ForkServer, tmp_path: Path) -> None:
    """`last` still selects the earlier run, and a resumed run keeps its checkpoints."""
    needs = "from runner.base.packages import require\n"
    missing = 'require("no_such_package", "tasks"); '
    (tmp_path / "mine.py").write_text(needs + TASK)
    args = ["train", "--task", "mine.py", "device=cpu", "monitor=off", "run=first"]
    assert server.run([*args, "updates=10"], tmp_path).code == 0
    (tmp_path / "mine.py").write_text(needs + TASK.replace("return Points()", missing + "return Points()"))
    result = server.run([*args[:-1], "run=second"], tmp_path)
    assert result.code == 78
    assert "accel-run[tasks]" in result.err
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["first"]
    assert server.run([*args, "updates=20", "resume_allow=[updates]"], tmp_path).code == 78
    assert (tmp_path / "outputs" / "first" / "checkpoints" / "update-0000000010").is_dir()


@pytest.mark.parametrize(
    "statement", ["from runner.utils import scale", "import runner.utils.more", "from runner import scale"]
)
def test_a_user_package_named_runner_gets_a_hint(statement: str, server: ForkServer, tmp_path: Path) -> None:
    package = tmp_path / "project" / "runner"
    package.mkdir(parents=True)
    for name in ("__init__.py", "utils.py"):
        (package / name).write_text("scale = 2\n")
    (package / "task.py").write_text(f"{TASK}\n{statement}\n")
    result = server.run("train --task project/runner/task.py updates=1 device=cpu monitor=off", tmp_path)
    assert result.code == 70
    assert str(package) in result.err
    assert "my_runner" in result.err


def test_a_user_module_named_runner_gets_a_hint(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "runner.py").write_text("scale = 2\n")
    (tmp_path / "task.py").write_text(f"{TASK}\nfrom runner import scale\n")
    result = server.run("train --task task.py updates=1 device=cpu monitor=off", tmp_path)
    assert result.code == 70
    assert "my_runner.py" in result.err
