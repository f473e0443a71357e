"""A package that a later step of a command needs is reported before the first update, with the extra to install."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.forkserver import CompletedCommand, ForkServer

ROOT = Path(__file__).parents[2]
HIDE = """
import os, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == os.environ["HIDDEN"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in [name for name in sys.modules if name.partition(".")[0] == os.environ["HIDDEN"]]:
    del sys.modules[name]
sys.meta_path.insert(0, Hidden())
"""
FEW = (
    HIDE
    + """
from tests.tasks.few_streamlines import few_streamlines
few = few_streamlines()
few.__enter__()
"""
)
# Packages that are imported only to build the task, and only if the prepared data is not cached.
WHILE_BUILDING = {("tractodiff", "dipy"), ("hyperspectral", "skimage"), ("gpt", "tokenizers")}
CORE = {"matplotlib", "mpl_toolkits", "PIL"}  # matplotlib needs PIL
OWN = """
import torch
from torch import nn
from runner import Task

def build():
    return Mine()

class Mine(Task):
    packages = {"train": {}, "infer": {"some_package.inner": ""}}
    def __init__(self):
        self.model = nn.Linear(2, 1)
    def dataset(self, split):
        return [torch.ones(2)] * 20
    def loss(self, model, batch, objective=""):
        return model(batch).square().sum(), len(batch)
    def predict(self, model, generator):
        import some_package.inner
        yield
"""


def hidden(server: ForkServer, args: str, folder: Path, package: str, before: str = HIDE) -> CompletedCommand:
    server.start(args.split(), folder, {"HIDDEN": package, "ACCEL_RUN_CACHE": str(folder / "cache")}, before)
    return server.wait()


@pytest.fixture(scope="module")
def prepared(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained tractodiff run and its prepared data in the cache."""
    pytest.importorskip("dipy")
    folder = tmp_path_factory.mktemp("prepared")
    args = "train task=tractodiff device=cpu monitor=off updates=1 evaluate.samples=1"
    result = hidden(server, args, folder, "none", FEW)
    assert result.code == 0, result.err
    return folder


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("args", "package"),
    [
        ("both run=mine task=tractodiff device=cpu", "scipy"), ("both run=mine task=tractodiff device=cpu", "nibabel"),
        ("train run=mine task=tractodiff device=cpu", "scipy"), ("inference", "nibabel"),
    ],
)  # fmt: skip
def test_a_missing_package_is_reported_before_training(
    server: ForkServer, prepared: Path, args: str, package: str
) -> None:
    result = hidden(server, args, prepared, package)
    assert result.code == 78, result.err
    assert package in result.err
    assert "accel-run[tractodiff]" in result.err
    assert not (prepared / "outputs" / "mine").exists(), "no run must be created"


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("task", "package"), [*sorted(WHILE_BUILDING), ("tractodiff", "scipy")])
def test_packages_for_building_a_task_are_reported(server: ForkServer, tmp_path: Path, task: str, package: str) -> None:
    extra, args = ("bpe", "task.tokenizer=bpe") if task == "gpt" else (task, "")
    result = hidden(server, f"both run=mine task={task} device=cpu {args}", tmp_path, package)
    assert result.code == 78, result.err
    assert f"accel-run[{extra}]" in result.err
    assert not (tmp_path / "outputs" / "mine").exists()


def test_declared_packages_are_checked_before_training(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    args = "--task mine.py run=mine device=cpu monitor=off updates=2 global_batch_size=10"
    stopped = hidden(server, f"both {args}", tmp_path, "none")
    assert stopped.code == 78, stopped.err
    assert "some_package" in stopped.err
    trained = hidden(server, f"train {args}", tmp_path, "none")
    assert trained.code == 0, trained.err


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ("phase.late.optimizer=schedulefree", ""),
        ("", 'OBJECTIVES = {"all": {"trains": ["weight", "bias"], "optimizer": "schedulefree"}}'),
    ],
    ids=["phase", "objective"],
)
def test_libraries_of_later_optimizers_are_checked(args: str, code: str, server: ForkServer, tmp_path: Path) -> None:
    losses = 'PHASES = {"early": {}, "late": {}}\nMine.losses = property(lambda self: {"early": self.loss})\n'
    (tmp_path / "mine.py").write_text(f"{OWN}\n{losses if code else losses.splitlines()[0]}\n{code}\n")
    command = f"train --task mine.py run=mine device=cpu monitor=off updates=2 global_batch_size=10 {args}"
    result = hidden(server, command, tmp_path, "schedulefree")
    assert result.code == 78, result.err
    assert "accel-run[schedulefree]" in result.err
    assert not (tmp_path / "outputs" / "mine").exists(), "no run must be created"


def test_tasks_declare_all_extra_packages() -> None:
    for source in sorted((ROOT / "tasks").glob("*/task.py")):
        text = "".join(file.read_text() for file in source.parent.glob("*.py"))
        required = {name.partition(".")[0] for name in re.findall(r'require\(f?"([\w.]+)', text)} - CORE
        declared = set(re.findall(r'"(\w+)"', "".join(re.findall(r"def packages.*?\n\n", text, re.DOTALL))))
        late = {name for name in required if (source.parent.name, name) not in WHILE_BUILDING}
        assert late <= declared, source


def test_extras_of_earlier_versions_are_valid() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(each.startswith("matplotlib") for each in project["dependencies"])
    assert {"cape", "hyperspectral", "plots", "tasks", "tractodiff"} <= set(project["optional-dependencies"])
