"""Hooks of task files and packages have settings, which are read from signatures without running code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.base.errors import ConfigError, Problem
from runner.cli import main
from runner.commands.complete import candidates
from runner.config import custom_options
from runner.config.configuration import compose
from runner.config.custom_tables import hook_name
from runner.config.request import Request
from runner.config.schema import did_you_mean

HOOKS = '''
import runner

class Base(runner.Hook):
    """What the others share.

    every  updates between two actions
    """

    def __init__(self, phase, *, every: int = 500):
        super().__init__(phase)


class LogImages(Base):
    """Log generated images."""


class FreezeAfter(Base):
    """Stop training a module.

    update  after this update
    """

    def __init__(self, phase, *, update: int = 3):
        super().__init__(phase)


HOOKS = [LogImages, FreezeAfter]
'''
NEVER_RUN = HOOKS + "\ndef build(): ...\nraise SystemExit('a task file is not executed to list its hooks')\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a task file with a module name unique to the test."""

    def write(text: str) -> Path:
        file = tmp_path / f"{tmp_path.name}_task.py"
        file.write_text(text)
        return file

    return write


def problems_of(file: Path, *args: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        compose(Request(args, file))
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("name", "key"),
    [("LogImages", "log_images"), ("EMA", "ema"), ("EMAHook", "ema_hook"), ("Log2D", "log2_d"), ("_Own", "own")],
)
def test_hook_names_are_class_names_in_snake_case(name: str, key: str) -> None:
    assert hook_name(name) == key


def test_a_hook_has_the_keys_of_its_constructor(write: Callable[[str], Path]) -> None:
    """The constructor may be inherited."""
    file = write(NEVER_RUN)
    configuration = compose(Request(("hook.log_images.every=7",), file))
    assert {hook.name: hook.options for hook in configuration.hooks} == {
        "log_images": {"enabled": True, "every": 7},
        "freeze_after": {"enabled": True, "update": 3},
    }
    assert configuration.sources["hook.log_images.every"] == "command line"
    assert configuration.flat()["hook.freeze_after.update"] == 3
    assert [note for note in configuration.notes if "freeze_after" in note and str(file) in note]


def test_a_task_can_set_the_keys_of_its_hooks(write: Callable[[str], Path]) -> None:
    file = write(NEVER_RUN.replace("HOOKS = [", "SETTINGS = {'hook.log_images.every': 9}\nHOOKS = ["))
    assert compose(Request((), file)).hooks[0].options["every"] == 9


def test_keys_of_a_disabled_hook_are_noted(write: Callable[[str], Path]) -> None:
    """A note reports that they have no effect."""
    args = ("hook.log_images.enabled=false", "hook.log_images.every=7")
    configuration = compose(Request(args, write(NEVER_RUN)))
    assert [hook.name for hook in configuration.hooks if hook.options["enabled"]] == ["freeze_after"]
    assert [note for note in configuration.notes if "hook.log_images.every=7" in note]


def test_typos_in_hooks_and_their_keys_get_suggestions(write: Callable[[str], Path]) -> None:
    file = write(NEVER_RUN)
    for typo, meant in (
        ("hook.log_images.evry", "hook.log_images.every"),
        ("hook.log_image.every", "hook.log_images.every"),
        ("hook.log_images.enable", "hook.log_images.enabled"),
    ):
        (problem,) = problems_of(file, f"{typo}=1")
        assert problem.fix == did_you_mean(typo, [meant])
    (problem,) = problems_of(file, "hook.log_images.every=often")
    assert problem.where == "hook.log_images.every=often"


def test_completion_offers_hooks_and_their_keys(write: Callable[[str], Path]) -> None:
    before = ["train", "--task", str(write(NEVER_RUN))]
    assert "hook." in candidates([*before, "ho"])
    assert candidates([*before, "hook.log_images.ev"]) == ["hook.log_images.every="]
    assert candidates([*before, "hook.log_images.enabled="]) == [
        "hook.log_images.enabled=true",
        "hook.log_images.enabled=false",
    ]


def test_explain_names_a_hooks_file_and_describes_its_key(
    write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(NEVER_RUN)
    assert main(["explain", "hook.log_images.every", "--task", str(file)]) == 0
    shown = capsys.readouterr().out
    assert f"the default ({file})" in shown
    assert len(shown.splitlines()) == 3, "the output must have a value, a source and a help text"


@pytest.mark.parametrize(
    ("table", "where"),
    [
        ("HOOKS = {'log': LogImages}", ""),
        ("HOOKS = [hook() for hook in ()]", ""),
        ("HOOKS = [Missing]", ": HOOKS[Missing]"),
        ("HOOKS = [LogImages()]", ": HOOKS[LogImages()]"),
        ("class Plain: ...\nHOOKS = [Plain]", ": HOOKS[Plain]"),
        ("HOOKS = [LogImages, LogImages]", ": HOOKS[LogImages]"),
        ("class A(Base):\n    def __init__(self): ...\nHOOKS = [A]", ": HOOKS[A]"),
        ("class A(Base):\n    def __init__(self, phase, lr=1): ...\nHOOKS = [A]", ": HOOKS[A]"),
        ("class A(Base):\n    def __init__(self, phase, *, lr=1 + 1): ...\nHOOKS = [A]", ": HOOKS[A]"),
        ("class A(Base):\n    def __init__(self, phase, *, enabled=True): ...\nHOOKS = [A]", ": HOOKS[A]"),
    ],
)
def test_an_invalid_hook_table_is_one_problem_with_its_location(
    table: str, where: str, write: Callable[[str], Path]
) -> None:
    text = NEVER_RUN.replace("HOOKS = [LogImages, FreezeAfter]\n", "\n")
    file = write(f"{text}\n{table}\n")
    assert [problem.where.replace(str(file), "") for problem in problems_of(file)] == [where]


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("HOOKS", "HOOKS.append(FreezeAfter)"),
        ("HOOKS", "HOOKS += [FreezeAfter]"),
        ("OPTIMIZERS", "OPTIMIZERS = {}\nOPTIMIZERS['mine'] = build"),
        ("SCHEDULERS", "def make(updates): ...\nif True:\n    SCHEDULERS = {'mine': make}"),
    ],
)
def test_a_hook_table_modified_by_code_is_an_error(
    table: str,
    change: str,
    write: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The modification is detected when the file is executed."""
    monkeypatch.chdir(tmp_path)
    file = write(f"{HOOKS}\ndef build(): ...\n{change}\n")
    assert main(["train", "--task", str(file), "device=cpu", "monitor=off"]) == 78
    message = capsys.readouterr().err
    assert str(file) in message
    assert table in message


def test_a_packages_hook_is_disabled_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note names its package."""
    name = f"package_{tmp_path.name}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise SystemExit('a package is not imported to list its hooks')")
    (tmp_path / name / "hooks.py").write_text(HOOKS)
    metadata = tmp_path / f"{name}-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (metadata / "entry_points.txt").write_text(f"[accel_run.hooks]\nmine = {name}.hooks\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    custom_options.clear_package_cache()
    try:
        off = compose(Request(("task=gpt",)))
        on = compose(Request(("task=gpt", "hook.log_images.enabled=true")))
    finally:
        monkeypatch.undo()
        custom_options.clear_package_cache()
    assert not [hook for hook in off.hooks if hook.options["enabled"]]
    (hook,) = (hook for hook in on.hooks if hook.options["enabled"])
    assert hook.function == f"{name}.hooks:HOOKS:log_images"
    assert [note for note in off.notes if f"{name} 1.5" in note and "log_images" in note]
    assert name not in sys.modules


@pytest.mark.parametrize(
    ("method", "fix"),
    [("on_train_batch_end(self, trainer)", "after_update"), ("after_updat(self, step)", "did you mean after_update?")],
)
def test_a_hook_method_that_is_never_called_is_rejected(method: str, fix: str, write: Callable[[str], Path]) -> None:
    text = HOOKS.replace("class LogImages(Base):", f"class LogImages(Base):\n    def {method}: ...")
    (problem,) = problems_of(write(f"{text}\ndef build(): ...\n"))
    assert problem.where.endswith("HOOKS[LogImages]")
    assert method.split("(", maxsplit=1)[0] in problem.what
    assert fix in problem.fix


def test_helper_methods_that_a_hook_calls_are_accepted(write: Callable[[str], Path]) -> None:
    more = "def after_updates(self): ...\n    def begin(self): self.after_updates()"
    text = HOOKS.replace("class LogImages(Base):", f"class LogImages(Base):\n    {more}")
    assert len(compose(Request((), write(f"{text}\ndef build(): ...\n"))).hooks) == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # the `after_update` of EveryN calls `on_step`
        ("class Base(runner.Hook):", "from base import EveryN\nclass Base(EveryN):"),
        ("class Base(runner.Hook):", "from other import runner\nclass Base(runner.Hook):"),
        ("super().__init__(phase)", "super().__init__(phase)\n        phase.listen(self)"),
        ("super().__init__(phase)", "super().__init__(phase)\n        getattr(self, 'on_step')()"),
        ("    def on_step", "    @register\n    def on_step"),
        ("def on_step(self)", "def __iter__(self)"),
        ("def on_step(self)", "def __exit__(self)"),
    ],
)
def test_methods_called_by_other_code_are_accepted(old: str, new: str, write: Callable[[str], Path]) -> None:
    method = "class LogImages(Base):\n    def on_step(self): ...\n"
    text = HOOKS.replace("import runner\n", "") if "other" in new else HOOKS
    text = text.replace("class LogImages(Base):", method).replace(old, new)
    configuration = compose(Request((), write(f"{text}\ndef build(): ...\n")))
    assert len(configuration.hooks) == 2
    assert not [note for note in configuration.notes if "did you mean" in note]


def test_possible_typos_in_callable_methods_are_noted(write: Callable[[str], Path]) -> None:
    """Other code may call these methods, so they are no errors."""
    text = HOOKS.replace("class Base(runner.Hook):", "from base import EveryN\nclass Base(EveryN):")
    text = text.replace("class LogImages(Base):", "class LogImages(Base):\n    def after_updat(self, step): ...\n")
    notes = compose(Request((), write(f"{text}\ndef build(): ...\n"))).notes
    assert [note for note in notes if "after_updat is" in note]
