"""Packages that define options, hooks or tasks. An invalid one ends the command with one message, before training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.base.errors import Exit
from runner.cli import main
from runner.config import custom_options
from tests.engine.test_own_hooks import OVERRIDES, TASK, rows

BROKEN = "raise ImportError('libmissing.so')\n"
OPTIMIZER = """
def signed(parameters, *, lr: float = 0.1):
    import torch
    return torch.optim.SGD([weight for _, weight in parameters], lr=lr)


OPTIMIZERS = {"signed": signed}
"""
HOOK = "import runner\n\nclass Quiet2(runner.Hook):\n    '''Do nothing.'''\n\nHOOKS = [Quiet2]\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str], str]]:
    """Return a function (group, entry point, text of the module) that installs a package and returns its name."""
    monkeypatch.chdir(tmp_path)
    name = f"package_{tmp_path.name}"

    def install(group: str, point: str, text: str, name: str = name) -> str:
        site = tmp_path / "site-packages"
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").touch()
        (site / name / "mine.py").write_text(text)
        metadata = site / f"{name}-1.5.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (metadata / "entry_points.txt").write_text(f"[accel_run.{group}]\n{point.format(name)}\n")
        monkeypatch.syspath_prepend(str(site))
        custom_options.clear_package_cache()
        return name

    yield install
    monkeypatch.undo()
    custom_options.clear_package_cache()


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("group", "text", "args"),
    [
        ("options", BROKEN + OPTIMIZER, ["optimizer=signed", "optimizer.lr=0.1"]),
        ("hooks", BROKEN + HOOK, ["hook.quiet2.enabled=true"]),
        ("tasks", BROKEN + TASK, ["task=mine"]),
        ("options", "raise SystemExit(0)\n" + OPTIMIZER, ["optimizer=signed", "optimizer.lr=0.1"]),
    ],
    ids=["optimizer", "hook", "task", "exits"],
)
def test_a_package_that_fails_to_import_ends_the_run_before_training(
    group: str, text: str, args: list[str], install: Callable[[str, str, str], str],
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = tmp_path / f"{tmp_path.name}_task.py"
    file.write_text(TASK)
    name = install(group, "mine = {}.mine", text)
    task = [] if group == "tasks" else ["--task", str(file)]
    assert main(["train", *task, *args, *OVERRIDES, "run=mine"]) == Exit.CONFIG
    shown = capsys.readouterr().err
    assert shown.count("accel-run:") == 1
    assert f"{name}/mine.py:1" in shown
    assert not (tmp_path / "outputs" / "mine").exists(), "there is nothing to resume"


@pytest.mark.parametrize(
    ("group", "point", "text"),
    [
        ("options", "mine = {}.missing", OPTIMIZER),
        ("options", "mine = {}.mine", "def broken(:\n"),
        ("options", "mine = {}.mine", "OPTIMIZERS = [1]\n"),
        ("hooks", "mine = {}.mine", "HOOKS = {}\n"),
        ("tasks", "mine = {}.missing", TASK),
        ("tasks", "mine = {}.mine", "def make(): ...\n"),
        ("tasks", "gpt = {}.mine", TASK),
    ],
    ids=["module", "syntax", "table", "hooks", "module of a task", "no build", "name"],
)
def test_an_invalid_entry_point_is_reported_once_with_its_package(
    group: str, point: str, text: str, install: Callable[[str, str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = install(group, point, text)
    assert main(["plan", "task=gpt", "device=cpu"]) == Exit.CONFIG
    shown = capsys.readouterr().err
    assert shown.count("accel-run:") == 1
    assert f"{name} 1.5" in shown


@pytest.mark.parametrize(
    ("group", "text", "settings"),
    [
        ("options", OPTIMIZER, ["optimizer=signed", "optimizer.lr=0.1"]),
        ("hooks", HOOK, ["hook.quiet2.enabled=false"]),
        ("tasks", TASK, ["task=mine"]),
    ],
    ids=["optimizer", "hook", "task"],
)
def test_help_lists_the_settings_of_installed_packages(
    group: str, text: str, settings: list[str], install: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The list is the same with and without a task file, and the package is not imported."""
    assert main(["train", "--help"]) == 0
    before = capsys.readouterr().out.split()
    name = install(group, "mine = {}.mine", BROKEN + text)
    Path("task.py").write_text(TASK)
    for args in (["train", "--help"], ["train", "--help", "--task", "task.py"]):
        assert main(args) == 0
        added = set(capsys.readouterr().out.split()) - {*before}
        assert {name, *settings} <= added
    assert main(["status", "--help"]) == 0
    assert name not in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("group", "text", "args"),
    [
        ("options", OPTIMIZER, ["optimizer=signed", "--task", "task.py"]),
        ("hooks", HOOK, ["hook.quiet2.enabled=true", "--task", "task.py"]),
        ("tasks", TASK, ["task=mine"]),
    ],
    ids=["optimizer", "hook", "task"],
)
def test_a_definition_hidden_by_another_package_is_reported(
    group: str, text: str, args: list[str], install: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("task.py").write_text(TASK)
    for name in ("other_b", "other_a"):
        install(group, "mine = {}.mine", text, name)
    assert main(["plan", "device=cpu", *args]) == 0
    (note,) = (line for line in capsys.readouterr().out.splitlines() if "other_a.mine" in line)
    assert note.index("other_a.mine") < note.index("other_b.mine")


def test_a_module_named_by_two_entry_points_does_not_hide_itself(
    install: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("task.py").write_text(TASK)
    install("options", "a = {0}.mine\nb = {0}.mine", OPTIMIZER + HOOK)
    assert main(["plan", "device=cpu", "optimizer=signed", "--task", "task.py"]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if ".mine" in line]
    assert [line.count(".mine") for line in notes] == [1, 1]


EXTENSIONS = '''
import torch


def backwards(samples, *, step: int = 1):
    """Visit the samples in reverse order.

    step  stride
    """
    order = range(samples.num_samples)[::-1][::step]
    return samples.in_order(lambda seed, epoch: order, len(order))


def halved(model, *, factor: float = 0.5):
    """Multiply the weights by a factor.

    factor  factor of the weights
    """
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(factor)


SAMPLERS = {"backwards": backwards}
PRECISIONS = {"halved": ("fp32", halved)}
'''


def test_a_package_can_define_a_sampler_and_a_precision(
    install: Callable[[str, str, str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training is bitwise equal to training with the same options in a task file."""
    files = [tmp_path / f"{tmp_path.name}_{name}.py" for name in ("plain", "own")]
    files[0].write_text(TASK)
    files[1].write_text(f"{TASK}\n{EXTENSIONS}")
    args = [*OVERRIDES, "updates=3", "sampler=backwards", "sampler.step=2", "precision=halved", "precision.factor=0.25"]
    assert main(["train", "--task", str(files[1]), *args, "run=own"]) == 0
    name = install("options", "mine = {}.mine", EXTENSIONS)
    capsys.readouterr()
    assert main(["plan", "--task", str(files[0]), *args]) == 0
    assert capsys.readouterr().out.count(f"{name} 1.5") >= 2
    assert main(["train", "--task", str(files[0]), *args, "run=package"]) == 0
    assert main(["train", "--task", str(files[0]), *OVERRIDES, "updates=3", "run=default"]) == 0
    own, package, default = (rows(tmp_path / "outputs" / run, "train/loss") for run in ("own", "package", "default"))
    assert own == package
    assert own != default
