"""The precedence of settings, their sources, and the suggestions for invalid settings."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from runner.base.errors import AccelRunError, ConfigError, InputMissing, Problem
from runner.base.paths import shipped_path
from runner.commands.arguments import parse_command_keys, parse_options
from runner.commands.runs import RunsOptions
from runner.config.aliases import FOREIGN_KEYS, PRECISION_NAMES
from runner.config.config_files import selected_options, shipped_options
from runner.config.configuration import Configuration, compose, to_yaml
from runner.config.options import AXES, GROUPS, find_signature, list_options
from runner.config.request import Request, format_override, merge_overrides
from runner.config.schema import did_you_mean, settings_keys
from runner.config.settings import MAIN_KEYS, Settings
from runner.config.suggestions import MAX_HINTS, translate_key
from runner.config.task_file import find_changed_declarations
from runner.sweeps.sweep_syntax import expand_sweep
from tests.suggestions import suggested

TASK = """
from typing import Literal

SETTINGS = {"updates": 40, "optimizer.lr": 0.02, "scheduler": {"warmup": 5}, "evaluate": {"samples": 8}}

def build(context, *, hidden: int = 4, kind: Literal["round", "flat"] = "round"):
    '''A task.'''

class Mine:
    def predict(self, model, generator, *, samples: int = 3): ...

raise SystemExit("a task file is not run to learn its settings")
"""


def compose_task(*args: str, task: Path | None = None, folder: Path | None = None) -> Configuration:
    return compose(Request(args, task, folder))


def find_problems(*args: str, task: Path | None = None, folder: Path | None = None) -> list[Problem]:
    """Compose, and return the reported problems."""
    with pytest.raises(ConfigError) as caught:
        compose_task(*args, task=task, folder=folder)
    return list(caught.value.problems)


def where(problems: Iterable[Problem]) -> list[str]:
    return [problem.where for problem in problems]


def join_problems(problems: Iterable[Problem]) -> str:
    return "\n".join(map(str, problems))


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write(tmp_path, {"mine.py": TASK}) / "mine.py"


# ---------------------------------------------------------------- precedence and sources


def test_a_plus_before_a_group_has_no_effect() -> None:
    plain, plus = compose_task("hardware=t4"), compose_task("+hardware=t4")
    assert plus.flat() == plain.flat()
    assert plus.sources == plain.sources
    assert (plus.profile, plus.hardware) == (plain.profile, plain.hardware)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("args", "precision", "source"),
    [
        ((), "auto", None),
        (("hardware=t4",), "fp16", "profile t4"),
        (("precision=fp32",), "fp32", "command line"),
        (("hardware=t4", "precision=fp32"), "fp32", "command line"),
    ],
)
def test_profiles_override_defaults_and_are_overridden(
    args: tuple[str, ...], precision: str, source: str | None
) -> None:
    """The command line overrides profiles."""
    configuration = compose_task(*args)
    assert configuration.choices["precision"].name == precision
    assert configuration.sources.get("precision") == source
    assert configuration.is_set_by_user("precision") == (source == "command line")


def test_the_order_of_arguments_does_not_matter() -> None:
    args = ("hardware=t4", "precision=bf16", "precision.keep_fp32=[head]")
    answers = [compose_task(*order) for order in permutations(args)]
    flat = answers[0].flat()
    assert {key: flat[key] for key in ("precision", "precision.keep_fp32", "attention")} == {
        "precision": "bf16",
        "precision.keep_fp32": ["head"],
        "attention": "efficient",
    }
    assert all(answer.flat() == flat and answer.sources == answers[0].sources for answer in answers)


def test_task_settings_override_only_defaults(task: Path) -> None:
    """The command line overrides task settings."""
    of_task, typed = compose_task(task=task), compose_task("optimizer.lr=0.1", "updates=7", "task.hidden=9", task=task)
    keys = ("updates", "optimizer.lr", "scheduler.warmup", "evaluate.samples", "task.hidden")
    assert [of_task.flat()[key] for key in keys] == [40, 0.02, 5, 8, 4]
    assert [of_task.sources.get(key) for key in keys] == ["task mine.py"] * 4 + [None]
    assert [typed.flat()[key] for key in keys] == [7, 0.1, 5, 8, 9]
    assert [typed.sources[key] for key in keys] == [
        "command line", "command line", "task mine.py", "task mine.py", "command line",
    ]  # fmt: skip


def test_a_task_file_defines_task_and_inference_keys(task: Path) -> None:
    configuration = compose_task("task.kind=flat", "inference.samples=9", task=task)
    assert configuration.choices["task"].name == "mine"
    assert configuration.choices["task"].options == {"hidden": 4, "kind": "flat"}
    assert configuration.inference == {"samples": 9, "seed": 0}
    (problem,) = find_problems("task.kind=flatt", task=task)
    assert (problem.where, problem.fix) == ("task.kind=flatt", did_you_mean("flatt", ["flat"]))
    assert where(find_problems("task=gpt", task=task)) == ["task=gpt"]


@pytest.mark.parametrize(
    ("args", "settings", "expected"),
    [
        ((), '{"updates": 40}', (40, None)),
        ((), '{"epochs": 3}', (None, 3)),
        (("updates=7",), '{"epochs": 3}', (7, None)),
        (("epochs=2",), '{"updates": 40}', (None, 2)),
        (("epochs=2", "updates=null"), '{"updates": 40}', (None, 2)),
    ],
)
def test_epochs_override_updates_of_lower_precedence(
    args: tuple[str, ...], settings: str, expected: tuple[int | None, int | None], tmp_path: Path
) -> None:
    write(tmp_path, {"mine.py": f"SETTINGS: dict = {settings}\ndef build(): ...\n"})
    result = compose_task(*args, task=tmp_path / "mine.py").settings
    assert (result.updates, result.epochs) == expected


@pytest.mark.slow
def test_tuned_values_apply_only_to_the_tuned_option(tmp_path: Path) -> None:
    settings = '{"optimizer.betas": [0.8, 0.9], "optimizer.lr": 0.5, "precision.keep_fp32": ["head"], "seed": 3}'
    task = write(tmp_path, {"mine.py": f"SETTINGS = {settings}\ndef build(): ...\n"}) / "mine.py"
    tuned, other = (
        compose_task("optimizer=adamw", task=task),
        compose_task("optimizer=sgd", "precision=bf16", task=task),
    )
    assert (tuned.flat()["optimizer.betas"], tuned.flat()["optimizer.lr"]) == ([0.8, 0.9], 0.5)
    assert (tuned.notes, tuned.for_auto) == ((), {"precision.keep_fp32": ["head"]})
    assert other.choices["optimizer"].options == compose_task("optimizer=sgd").choices["optimizer"].options
    assert (other.flat()["precision.keep_fp32"], other.settings.seed) == (["head"], 3)
    assert [suggested(note) for note in other.notes] == [
        ["optimizer.betas=[0.8,0.9]", "optimizer=sgd"],
        ["optimizer.lr=0.5", "optimizer=adamw"],
    ]
    assert "optimizer.lr" not in other.sources


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("name", PRECISION_NAMES)
def test_precision_names_of_other_trainers_are_accepted(name: str) -> None:
    assert compose_task(f"precision={name}").choices["precision"].name == PRECISION_NAMES[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("checkpoint=none", "off"), ("checkpoint=null", "off"), ("checkpoint=false", "off"), ("monitor=off", "off"),
        ("monitor=true", "on"), ("tracker=off", "none"), ("tracker=null", "none"), ("+tracker=none", "none"),
    ],
)  # fmt: skip
def test_none_null_and_off_are_all_accepted(word: str, option: str) -> None:
    assert compose_task(word).choices[word.strip("+").split("=")[0]].name == option


@pytest.mark.parametrize(
    ("args", "scales"),
    [
        (("optimizer.lr_scales={head:0.1}",), {"head": 0.1}),
        (("optimizer.lr_scales.head=0.1", "optimizer.lr_scales.body.0=2"), {"head": 0.1, "body.0": 2}),
        (("optimizer.lr_scales={0:0.1}",), {"0": 0.1}),
    ],
)
def test_a_mapping_can_be_set_at_once_or_by_entry(args: tuple[str, ...], scales: dict[str, float]) -> None:
    configuration = compose_task(*args)
    assert configuration.choices["optimizer"].options["lr_scales"] == scales
    assert configuration.sources["optimizer.lr_scales"] == "command line"


# ---------------------------------------------------------------- the user's config folder


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Return a task without settings."""
    return write(tmp_path, {"bare.py": "def build(): ...\n"}) / "bare.py"


@pytest.mark.slow
@pytest.mark.parametrize("content", ["option: adamw\nlr: 0.25\n", "defaults:\n  - adamw\nlr: 0.25\n"])
def test_a_config_folder_adds_a_variant_of_an_option(content: str, bare: Path, tmp_path: Path) -> None:
    folder = write(tmp_path, {"optimizer/brisk.yaml": content})
    configuration = compose_task("optimizer=brisk", task=bare, folder=folder)
    shipped_one = compose_task(task=bare).choices["optimizer"]
    chosen = configuration.choices["optimizer"]
    assert list_options("optimizer", folder) == sorted([*list_options("optimizer"), "brisk"])
    assert (chosen.name, chosen.function) == ("brisk", "adamw")
    assert chosen.options == {**shipped_one.options, "lr": 0.25}
    assert configuration.sources["optimizer.lr"] == "config folder"
    assert compose_task("optimizer=brisk", "optimizer.lr=1", folder=folder).flat()["optimizer.lr"] == 1
    assert configuration.notes == ()


def test_a_variant_can_extend_another_variant(tmp_path: Path) -> None:
    files = {"optimizer/a.yaml": "defaults:\n  - sgd\nlr: 0.25\n", "optimizer/b.yaml": "defaults: [a]\nmomentum: 0.5\n"}
    chosen = compose_task("optimizer=b", folder=write(tmp_path, files)).choices["optimizer"]
    assert chosen.function == "sgd"
    assert (chosen.options["lr"], chosen.options["momentum"]) == (0.25, 0.5)


def test_a_config_folder_that_shadows_a_file_is_reported(bare: Path, tmp_path: Path) -> None:
    folder = write(tmp_path, {"optimizer/adamw.yaml": "lr: 7\n"})
    configuration = compose_task(task=bare, folder=folder)
    assert configuration.flat()["optimizer.lr"] == 7
    (note,) = configuration.notes
    assert note.startswith(f"{folder}/optimizer/adamw.yaml ")
    assert compose_task(task=bare).flat()["optimizer.lr"] != 7, (
        "the next request, without the folder, must not use its files"
    )


@pytest.mark.parametrize("text", ["/data/year=2024", "epoch=3-step=10.safetensors", "a==b"])
def test_equals_signs_in_string_settings_need_no_quotes(text: str) -> None:
    assert compose(Request((f"data.path={text}", f"weights={text}"))).settings.data.path == text
    assert compose(Request((f"weights={text}",))).settings.weights.source == text


@pytest.mark.parametrize("argument", ["updates==10", "updates=5=10", "updates=a=1,b=2", "data.path=[a=b]"])
def test_a_second_equals_sign_is_rejected_for_other_settings(argument: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose(Request((argument,)))
    assert [problem.where for problem in error.value.problems] == [argument]


ANY_STRING = ["/plain/x", "a b", "é/ü x", 'a"b', "a\\", 'a\\"b', "a,b", "(x)", "[1,2]", "it's", "x=y", "#a"]


@pytest.mark.parametrize("text", ANY_STRING)
def test_any_string_can_be_given_as_an_override(text: str) -> None:
    assert compose(Request((format_override("output_root", text),))).settings.output_root == text


@pytest.mark.parametrize(
    "argument", [*(format_override("output_root", text) for text in ANY_STRING), "output_root='b'"]
)
def test_options_of_commands_are_quoted_like_settings(argument: str) -> None:
    text = compose(Request((argument,))).settings.output_root
    assert parse_command_keys([argument], {"output_root": ""})[0] == {"output_root": text}
    assert parse_options([argument], RunsOptions, ())[0].given == {"output_root": text}


@pytest.mark.parametrize("text", ["2026", "007", "1e-3", "2.50", "-1", "nan"])
def test_a_number_is_a_valid_string_setting(text: str) -> None:
    """The number is used as written."""
    settings = compose(Request((f"run={text}", f"weights={text}"))).settings
    assert (settings.run, settings.weights.source) == (text, text)


@pytest.mark.parametrize("text", ["true", "null", "[1,2]"])
def test_other_literals_are_invalid_string_settings(text: str) -> None:
    assert where(find_problems(f"output_root={text}")) == [f"output_root={text}"]


def test_modules_may_have_numbers_as_names(tmp_path: Path) -> None:
    """The modules of nn.Sequential have such names."""
    task = tmp_path / "task.py"
    task.write_text('PHASES = {"one": {}, "two": {}}\ndef build(): ...\n')
    configuration = compose_task("weights.only=[0]", "phase.two.trains=[0,3]", task=task)
    assert configuration.settings.weights.only == ["0"]
    assert configuration.phases[1].trains == ["0", "3"]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
def test_windows_line_endings_and_byte_order_marks_are_accepted(mark: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "my cönf"
    for name, text in (("optimizer/slow", OPTION), ("hardware/mine", TO_BF16)):
        file = folder / f"{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_bytes(mark + text.replace("\n", "\r\n").encode())
    result = compose_task("optimizer=slow", "hardware=mine", folder=folder)
    assert result.choices["optimizer"].options["lr"] == 0.00001
    assert result.choices["precision"].name == "bf16"


def test_non_ascii_letters_need_no_quotes() -> None:
    path = "/home/josé/meine Bäume"
    assert compose(Request((f"data.path={path}",))).settings.data.path == path


def test_a_config_folder_overrides_task_settings(task: Path, tmp_path: Path) -> None:
    file = write(tmp_path, {"conf/optimizer/adamw.yaml": "lr: 7\n"}) / "conf/optimizer/adamw.yaml"
    configuration = compose_task(task=task, folder=tmp_path / "conf")
    assert (configuration.flat()["optimizer.lr"], configuration.sources["optimizer.lr"]) == (7, "config folder")
    assert [note for note in configuration.notes if "optimizer.lr=0.02 " in note and str(file) in note]


def test_a_users_config_yaml_replaces_the_defaults_list(bare: Path, tmp_path: Path) -> None:
    ours = (shipped_path("conf") / "config.yaml").read_text()
    folder = write(
        tmp_path, {"config.yaml": ours.replace("seed: 0", "seed: 5").replace("precision: auto", "precision: fp32")}
    )
    configuration = compose_task(task=bare, folder=folder)
    assert configuration.settings.seed == 5
    assert configuration.choices["precision"].name == "fp32"
    assert configuration.sources["seed"] == "config folder"
    (note,) = configuration.notes
    assert note.startswith(f"{folder}/config.yaml ")


PROFILE = """\
# @package _global_
defaults:
  - override /precision: fp32
  - override /dataloader: thread

hardware:
  title: my machine
  devices:
    - {name: My GPU, memory_gib: 10, capability: [8, 6]}
"""


def test_a_users_profile_selects_options_and_describes_devices(tmp_path: Path) -> None:
    folder = write(tmp_path, {"hardware/mine.yaml": PROFILE})
    configuration = compose_task("+hardware=mine", "precision=bf16", folder=folder)
    assert (configuration.choices["precision"].name, configuration.choices["dataloader"].name) == ("bf16", "thread")
    assert configuration.sources["dataloader"] == "profile mine"
    assert configuration.hardware["devices"] == [{"name": "My GPU", "memory_gib": 10, "capability": [8, 6]}]
    assert selected_options("hardware", "mine", folder) == {"precision": "fp32", "dataloader": "thread"}


OF_TASK_AND_PROFILE = """
SETTINGS = {"micro_batch_size": 4, "optimizer.kernel": "foreach", "dataloader.num_workers": 1, "updates": 50}
PHASES = {"first": {"micro_batch_size": 2}, "second": {}}

def build(*, a: int = 1):
    pass
"""
OF_PROFILE = """\
# @package _global_
micro_batch_size: 8
dataloader: {num_workers: 2}
phase: {first: {micro_batch_size: 16}}
hardware: {title: mine, devices: []}
"""


@pytest.mark.slow
def test_a_profile_overrides_task_settings(tmp_path: Path) -> None:
    """Otherwise, a setting of the task would override the tuning for a machine. The command line overrides profiles."""
    folder = write(tmp_path, {"hardware/mine.yaml": OF_PROFILE, "two.py": OF_TASK_AND_PROFILE})
    configuration = compose(Request(("+hardware=mine", "global_batch_size=16"), folder / "two.py", folder))
    messages = compose(
        Request(("hardware=mine", "global_batch_size=16", "micro_batch_size=1"), folder / "two.py", folder)
    )

    result, own = configuration.flat(), ("phase.first.micro_batch_size", "phase.second.micro_batch_size")
    assert [result[key] for key in ("micro_batch_size", "dataloader.num_workers", *own)] == [8, 2, 16, 8]
    assert result["phase.first.optimizer.kernel"] == "foreach", (
        "keys that the profile does not set must come from the task"
    )
    assert {configuration.sources[key] for key in ("micro_batch_size", "dataloader.num_workers", *own)} == {
        "profile mine"
    }
    assert [messages.flat()[key] for key in ("micro_batch_size", *own)] == [1, 1, 1]
    assert any("mine.yaml" in note for note in configuration.notes)


OPTION = "# mine\noption: adamw\nlr: 0.00001\n"
TO_BF16 = "# @package _global_\ndefaults:\n  - override /precision: bf16\nhardware:\n  title: mine\n  devices: []\n"
# files of the folder, overrides, places of the problems; {folder} is the folder that contains the files
FAULTS: dict[str, tuple[dict[str, str], tuple[str, ...], list[str]]] = {
    "unknown key": (
        {"optimizer/mine.yaml": "option: sgd\nlrr: 3\n"},
        ("optimizer=mine",),
        ["{folder}/optimizer/mine.yaml: optimizer.lrr=3"],
    ),
    "wrong type": (
        {"optimizer/mine.yaml": "option: sgd\nlr: fast\n"},
        ("optimizer=mine",),
        ["{folder}/optimizer/mine.yaml: optimizer.lr=fast"],
    ),
    "no variant": (
        {"optimizer/adamm.yaml": "lr: 3\n"},
        ("optimizer=adamm",),
        ["optimizer/adamm.yaml"],
    ),
    "variant of nothing": (
        {"optimizer/mine.yaml": "option: adamm\n"},
        ("optimizer=mine",),
        ["optimizer/mine.yaml"],
    ),
    "two variants of nothing": (
        {"optimizer/mine.yaml": "lr: 3\n", "memory/mine.yaml": ""},
        ("optimizer=mine", "memory=mine"),
        ["optimizer/mine.yaml", "memory/mine.yaml"],
    ),
    "a list": (
        {"optimizer/mine.yaml": "- 1\n"},
        ("optimizer=mine",),
        ["optimizer/mine.yaml"],
    ),
    "an empty list": (
        {"precision/fp16.yaml": "[]\n"},
        ("precision=fp16",),
        ["precision/fp16.yaml"],
    ),
    "a task that is a list": (
        {"task/mine.yaml": "- lr: 1\n"},
        ("task=mine",),
        ["task/mine.yaml"],
    ),
    "not YAML": (
        {"optimizer/mine.yaml": "option: sgd\nlr: [1\n"},
        ("optimizer=mine",),
        ["{folder}/optimizer/mine.yaml:3"],
    ),
    "a circle": (
        {"optimizer/mine.yaml": "defaults:\n  - mine\n"},
        ("optimizer=mine",),
        ["optimizer/mine.yaml"],
    ),
    "builds on nothing": (
        {"optimizer/mine.yaml": "defaults:\n  - nothing\n"},
        ("optimizer=mine",),
        ["{folder}/optimizer/mine.yaml"],
    ),
    "incomplete config.yaml": (
        {"config.yaml": "seed: 5\n"},
        (),
        ["{folder}/config.yaml"],
    ),
    "profile without package": (
        {"hardware/mine.yaml": "hardware:\n  devices: []\n"},
        ("hardware=mine",),
        ["{folder}/hardware/mine.yaml"],
    ),
}


@pytest.mark.slow
def test_an_error_in_a_config_folder_names_file_or_key(tmp_path: Path, screen: Callable[..., None]) -> None:
    messages = []
    for number, (name, (files, args, places)) in enumerate(FAULTS.items()):
        folder = write(tmp_path / str(number), files)
        problems = find_problems(*args, folder=folder)
        assert where(problems) == [place.format(folder=folder) for place in places], name
        messages.append(f"{name}\n{join_problems(problems)}")
    screen("\n\n".join(messages), replace={r"<folder>/\d+": "<folder>"})


def test_an_unresolved_interpolation_is_reported(tmp_path: Path) -> None:
    folder = write(tmp_path, {"optimizer/mine.yaml": "option: sgd\nlr: ${nowhere}\n"})
    problem, where = find_problems("optimizer=mine", folder=folder)[0], f"{folder}/optimizer/mine.yaml: optimizer.lr"
    assert str(problem).startswith(where)
    assert "'nowhere'" in problem.what


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("SETTINGS = [1]\n", "SETTINGS"),
        ("SETTINGS = dict(seed=1)\n", "SETTINGS"),
        ("SETTINGS = {[]: 1}\n", "SETTINGS"),
        ("def build(*, a: int = 1 + 1): ...\n", "1 + 1"),
        ("\0", "null bytes"),
    ],
)
def test_errors_in_a_task_file_are_reported_without_running_it(text: str, problem: str, tmp_path: Path) -> None:
    file = write(tmp_path, {"mine.py": text if "build" in text else f"def build(): ...\n{text}"}) / "mine.py"
    (result,) = find_problems(task=file)
    assert str(result).startswith(f"{file}: ")
    assert problem in result.what or problem in str(result)


@pytest.mark.parametrize(
    ("entries", "shown"),
    [
        ('"seed": 1,\n"updates": LENGTH', "LENGTH"),
        ('"optimizer.betas": [0.9,\n1 - 0.1]', "1 - 0.1"),
        ('"seed": 1,\n**SHARED', "SHARED"),
    ],
)
def test_an_entry_that_is_not_a_literal_is_reported(entries: str, shown: str, tmp_path: Path) -> None:
    """The error names its line."""
    file = write(tmp_path, {"mine.py": f"def build(): ...\nSETTINGS = {{{entries}}}\n"}) / "mine.py"
    (problem,) = find_problems(task=file)
    assert problem.what.endswith(f" {shown}")
    assert str(problem).startswith(f"{file}:3: ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SETTINGS", "SIZES", "PHASES"])
@pytest.mark.parametrize(
    "text",
    [
        "from common import {0}",
        "from common import *",
        "{0} = {{}}\n{0}['seed'] = 1",
        "{0} = {{}}\n{0} |= {{'seed': 1}}",
        "{0} = {{'seed': {{}}}}\n{0}['seed'].update(a=1)",
        "if True:\n    {0} = {{'seed': 1}}",
        "{0} = {{}}\ndef change():\n    global {0}\n    {0}['seed'] = 1\nchange()",
    ],
)
def test_dynamic_declarations_are_detected_on_execution(
    text: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing the file cannot see them."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "common", raising=False)
    common = f"{name} = {{'seed': 1}}\n"
    file = write(tmp_path, {"mine.py": f"{text.format(name)}\n", "common.py": common}) / "mine.py"
    assert [*find_changed_declarations(runpy.run_path(str(file)), file)] == [name]


def test_declared_names_can_also_be_used_in_other_ways(tmp_path: Path) -> None:
    uses = """
from math import *
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    PHASES: dict
SETTINGS = {"seed": 3}
SIZES: dict = {}
class Net:
    SIZES = (64, 128)
def build(*, size: str = "a"):
    PHASES = []
    PHASES.append(SETTINGS.copy())
SEEDS = [SETTINGS.get("seed"), *SETTINGS.values()]
"""
    file = write(tmp_path, {"mine.py": uses}) / "mine.py"
    assert compose_task(task=file).settings.seed == 3
    assert not [*find_changed_declarations(runpy.run_path(str(file)), file)]


def test_settings_of_a_task_are_validated(tmp_path: Path, screen: Callable[..., None]) -> None:
    settings = '{"sead": 1, "compile": "off", "optimizer": "adma", "precision.keep_fp32": "head", "optimizer.lr": 0}'
    file = write(tmp_path, {"mine.py": f"SETTINGS = {settings}\ndef build(): ...\n"}) / "mine.py"
    problems = find_problems(task=file)
    assert where(problems) == [
        "SETTINGS['optimizer']",
        "SETTINGS['compile']",
        "SETTINGS['precision.keep_fp32']",
        "SETTINGS['sead']",
        "optimizer.lr=0",
    ]
    screen(join_problems(problems))


@pytest.mark.slow
def test_users_can_override_the_optimizer_of_a_task(tmp_path: Path) -> None:
    settings = '{"optimizer": "adam", "optimizer.lr": 0.5, "scheduler": "linear", "scheduler.warmup": 7}'
    file = write(tmp_path, {"mine.py": f"SETTINGS = {settings}\ndef build(): ...\n"}) / "mine.py"
    tuned = compose_task(task=file)
    assert (tuned.choices["optimizer"].name, tuned.choices["scheduler"].name) == ("adam", "linear")
    assert (tuned.flat()["optimizer.lr"], tuned.flat()["scheduler.warmup"]) == (0.5, 7)
    assert tuned.sources["optimizer"] == "task mine.py"
    other = compose_task("optimizer=sgd", task=file)
    assert (other.choices["optimizer"].name, other.flat()["optimizer.lr"]) == ("sgd", 0.01)
    assert ["optimizer.lr=0.5", "optimizer=adam"] in [suggested(note) for note in other.notes]
    folder = write(
        tmp_path / "conf",
        {"hardware/mine.yaml": "# @package _global_\ndefaults:\n  - override /optimizer: adamw8bit\n"},
    )
    small = compose_task("hardware=mine", task=file, folder=folder)
    assert small.choices["optimizer"].name == "adamw8bit"


PHASED = """
PHASES = {"a": {"updates": 5, "optimizer": "adam", "optimizer.lr": 0.25}, "b": {"kind": "fit", "micro_batch_size": 4}}
SETTINGS = {"optimizer.lr": 0.5, "phase.b.global_batch_size": 8, "phase.c.updates": 3}
SIZES = {"tiny": {"phase.a.max_grad_norm": 3.0}}
def build(*, size: str = "tiny"): ...
"""


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.lr=null", "optimizer.lr=0.5"),
        ("phase.a.optimizer.lr=null", "phase.a.optimizer.lr=0.25"),
        ("phase.b.global_batch_size=0", "phase.b.global_batch_size=8"),
    ],
)
def test_the_suggested_value_applies_without_the_override(override: str, value: str, tmp_path: Path) -> None:
    file = write(tmp_path, {"mine.py": PHASED.replace(', "phase.c.updates": 3', "")}) / "mine.py"
    (problem,) = find_problems(override, task=file)
    assert f" {value}," in problem.fix


@pytest.mark.parametrize("override", ["optimizer.lr=null", "seed=0"])
def test_an_invalid_value_of_the_task_is_not_suggested(override: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("SETTINGS = {'optimizer.lr': 'high'}\ndef build(): ...\n")
    (problem,) = find_problems(override, task=tmp_path / "mine.py")
    assert f" optimizer.lr={find_signature('optimizer', 'adamw').keys['lr'].default}," in problem.fix


def test_phase_settings_override_run_settings(tmp_path: Path) -> None:
    file = write(tmp_path, {"mine.py": PHASED.replace(', "phase.c.updates": 3', "")}) / "mine.py"
    a, b = compose_task(task=file).phases
    assert (a.kind, a.updates, a.optimizer.name, a.optimizer.options["lr"], a.max_grad_norm) == (
        "train", 5, "adam", 0.25, 3.0,
    )  # fmt: skip
    assert a.optimizer.options["weight_decay"] == 0.0  # the default of adam, not the value for adamw that the run uses
    assert (b.kind, b.global_batch_size, b.micro_batch_size, b.updates) == ("fit", 8, 4, None)
    typed = compose_task("updates=9", "max_grad_norm=1.5", "phase.a.optimizer.lr=0.125", task=file).phases[0]
    assert (typed.updates, typed.max_grad_norm, typed.optimizer.options["lr"]) == (9, 1.5, 0.125)
    longer = compose_task("phase.a.epochs=2", "updates=9", task=file).phases[0]
    assert (longer.updates, longer.epochs) == (None, 2)
    swapped = compose_task("optimizer=sgd", "optimizer.lr=0.0625", task=file).phases[0]
    assert (swapped.optimizer.name, swapped.optimizer.options["lr"]) == ("sgd", 0.0625)


def test_invalid_phases_are_reported_with_their_location(tmp_path: Path, screen: Callable[..., None]) -> None:
    text = """
PHASES = {"a": {"needs": ["z"], "lr": 1}, "b": {"kind": "fitt"}, "infer": {}, "c": {"kind": "fit", "updates": 3}}
SETTINGS = {"phase.d.updates": 3}
def build(): ...
"""
    file = write(tmp_path, {"mine.py": text}) / "mine.py"
    problems = find_problems(task=file)
    places = [
        "mine.py: PHASES['a']",
        "mine.py: PHASES['b']",
        "mine.py: PHASES['infer']",
        "SETTINGS['phase.d.updates']",
        "PHASES['a']['lr']",
        "PHASES['c']['updates']",
    ]
    assert where(problems) == places
    screen(join_problems(problems))


def test_parameters_of_helper_functions_are_not_settings(tmp_path: Path) -> None:
    text = "def build(*, a: int = 1): ...\ndef helper(*, device=cpu()): ...\n"
    assert compose_task(task=write(tmp_path, {"mine.py": text}) / "mine.py").flat()["task.a"] == 1


def test_missing_files_and_folders_are_reported_early(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="does not exist"):
        compose_task(task=tmp_path / "none.py")
    with pytest.raises(InputMissing, match="is a folder; expected a file"):
        compose_task(task=tmp_path)
    with pytest.raises(InputMissing, match="is not a folder"):
        compose_task(folder=tmp_path / "none")


@pytest.mark.parametrize(
    "url", ["s3://bucket/runs", "gs://b", "file:///tmp/runs", "abfs+x.y-z://b/c", "S3:/b", "hf:/x/y"]
)
@pytest.mark.parametrize("key", ["output_root", "data.path", "weights"])
def test_a_url_is_not_a_local_path(key: str, url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_task(f'{key}="{url}"')
    assert [problem.where.partition("=")[0] for problem in caught.value.problems] == [MAIN_KEYS.get(key, key)]


@pytest.mark.parametrize(
    "url", ["s3://bucket/runs", "gs://b", "file:///tmp/runs", "abfs://box@account.dfs.core.windows.net/x", "memory://x"]
)
def test_a_mirror_must_be_a_url(url: str) -> None:
    assert compose_task(f'checkpoint.mirror="{url}"').flat()["checkpoint.mirror"] == url


@pytest.mark.parametrize(
    "url", ["/mnt/x", "s3:/b", "s3://user@b/x", "https://u:pw@h/x", "abfs://u:pw@h/x", "s3://b/x?key=1", "s3://b/x#y",
            "simplecache::s3://b", "s3://b c"]
)  # fmt: skip
def test_a_mirror_with_credentials_or_options_is_rejected(url: str) -> None:
    with pytest.raises(AccelRunError):
        compose_task(f'checkpoint.mirror="{url}"')


@pytest.mark.parametrize("path", ["x9:/b", "a/b:c", "://b", "1x://b", "./s3://b"])
def test_a_path_that_resembles_a_url_is_local(path: str) -> None:
    assert compose_task(f'output_root="{path}"').settings.output_root == path


@pytest.mark.parametrize("word", ["task.x=1", "task.zzz=1"])
def test_an_unknown_task_key_lists_the_keys_of_the_task(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_task(word)
    (problem,) = caught.value.problems
    assert "task.size" in problem.what
    assert "task?" not in problem.fix


def test_all_problems_are_reported_together(screen: Callable[..., None]) -> None:
    args = ("--lr", "3", "optimizer=adamm", "seed=-1", "extra=1", "~tracker", "hardware@x=t4", "seed")
    more = ("updates=5", "epochs=5", "global_batch_size=2", "micro_batch_size=3", "backend.threads=2000")
    problems = find_problems(*args, *more)
    assert where(problems) == [
        "--lr 3",
        "seed",
        "optimizer=adamm",
        "~tracker",
        "hardware@x=t4",
        "extra=1",
        "seed=-1",
        "backend.threads=2000",
        "micro_batch_size=3",
        "updates=5 epochs=5",
    ]
    screen(join_problems(problems))


def test_too_long_warmups_are_rejected_early() -> None:
    """No run is created."""
    (problem,) = find_problems("updates=2", "scheduler.warmup=40")
    assert problem.where == "scheduler.warmup"
    assert "scheduler.warmup=2 " in problem.fix
    for accepted in (["scheduler.warmup=2"], ["scheduler.warmup=0.9"], ["scheduler.warmup=40", "epochs=1"]):
        compose_task(*([] if "epochs=1" in accepted else ["updates=2"]), *accepted)


def test_warmup_is_compared_with_the_length_of_its_phase(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text('PHASES = {"one": {}, "two": {}}\ndef build(): ...\n')
    args = ("updates=2", "phase.one.updates=100", "scheduler.warmup=40")
    assert where(find_problems(*args, task=file)) == ["phase.two.scheduler.warmup"]
    compose_task(*args, "phases=[one]", task=file)


@pytest.mark.slow
def test_setting_names_of_other_trainers_get_suggestions() -> None:
    known = [key for key in FOREIGN_KEYS if key not in GROUPS]  # an unknown option of a group is a different error
    for keys in (known[at : at + MAX_HINTS] for at in range(0, len(known), MAX_HINTS)):
        result = find_problems(*(f"{key}=1" for key in keys))
        suggestions = [translate_key(key, "1", ()) for key in keys]
        expected = [(f"{key}=1", text) for key, text in zip(keys, suggestions, strict=True)]
        assert [(problem.where, problem.fix) for problem in result] == expected


@pytest.mark.parametrize("messages", sorted(set(FOREIGN_KEYS.values())))
def test_suggested_setting_names_exist(messages: str) -> None:
    for key, value in re.findall(
        r"(?<![A-Z_])([a-z][\w.]*)=([^\s;,:]+)",
        "" if messages.startswith(("goal=", "trials=")) else messages.partition("accel-run")[0],
    ):
        if key not in GROUPS:
            group, _, name = key.partition(".")
            options = list_options(group) if group in AXES else ()
            signatures = [find_signature(group, option) for option in options]
            own = {"size"} if group == "task" else {key for made in signatures if made for key in made.keys}
            assert key in {*settings_keys(Settings), *MAIN_KEYS} or name in own, key
        elif value not in ("{}", "NAME"):
            assert value in list_options(key), key


@pytest.mark.parametrize("arg", ["max_grad_norm=0", "max_grad_norm=none", "early_stopping.patience=0"])
def test_null_is_suggested_for_settings_disabled_with_0(arg: str) -> None:
    """Other tools disable these settings with 0."""
    (problem,) = find_problems(arg)
    assert f"{arg.partition('=')[0]}=null" in problem.fix


# ---------------------------------------------------------------- sweeps and merged overrides


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("seed=1,2", "run=a"), [("seed=1", "run=a"), ("seed=2", "run=a")]),
        (("seed=choice(1,2)",), [("seed=1",), ("seed=2",)]),
        (("seed=range(1,4)",), [("seed=1",), ("seed=2",), ("seed=3",)]),
        (("precision=fp32,16-mixed", "+hardware=t4,a100"), [
            ("precision=fp32", "+hardware=t4"), ("precision=fp32", "+hardware=a100"),
            ("precision=16-mixed", "+hardware=t4"), ("precision=16-mixed", "+hardware=a100"),
        ]),
        (("phases=[a,b]", "data.path='x,y'"), [("phases=[a,b]", "data.path='x,y'")]),
        ((), [()]),
    ],
)  # fmt: skip
def test_a_sweep_has_every_combination_in_order(args: tuple[str, ...], expected: list[tuple[str, ...]]) -> None:
    request = Request(args, Path("task.py"), Path("folder"))
    assert expand_sweep(request) == [Request(each, Path("task.py"), Path("folder")) for each in expected]


@pytest.mark.parametrize("word", ["seed=interval(0,1)", "run=glob(*)"])
def test_a_sweep_without_values_is_rejected(word: str) -> None:
    with pytest.raises(ConfigError, match="must list its values"):
        expand_sweep(Request((word,)))


def test_a_trial_is_composed_like_a_single_run() -> None:
    seeds = [compose(request).settings.seed for request in expand_sweep(Request(("seed=3,4",)))]
    assert seeds == [3, 4]
    (problem,) = find_problems("seed=3,4")
    assert problem.where == "seed=3,4"
    assert "accel-run train -m" in problem.fix


@pytest.mark.parametrize(
    ("old", "new", "merged"),
    [
        (["seed=1", "run=a"], ["seed=2"], ("run=a", "seed=2")),
        (["+hardware=t4"], ["hardware=a100"], ("hardware=a100",)),
        (["precision=fp16", "precision.init_scale=8"], ["precision=fp32"], ("precision=fp32",)),
        (["precision=fp16"], ["precision.init_scale=8"], ("precision=fp16", "precision.init_scale=8")),
        (["run=a", "runs=b"], ["run=c"], ("runs=b", "run=c")),
        (
            ["optimizer.lr=1", "optimizer.lr_scales.a=2"],
            ["optimizer.lr=3"],
            ("optimizer.lr_scales.a=2", "optimizer.lr=3"),
        ),
        (["optimizer.lr_scales.a=2", "seed=1"], ["optimizer.lr_scales={}"], ("seed=1", "optimizer.lr_scales={}")),
        ([], [], ()),
    ],
)
def test_new_overrides_replace_old_ones_of_the_same_key(
    old: list[str], new: list[str], merged: tuple[str, ...]
) -> None:
    assert merge_overrides(old, new) == merged


# ---------------------------------------------------------------- shipped files


def test_all_shipped_options_can_be_composed() -> None:
    options = {group: list_options(group) for group in GROUPS}
    assert all(options.values())
    for number in range(max(map(len, options.values()))):
        args = {group: names[number % len(names)] for group, names in options.items()}
        configuration = compose_task(*(f"{group}={name}" for group, name in args.items()))
        chosen = {group: choice.name for group, choice in configuration.choices.items()}
        assert {**chosen, "hardware": configuration.profile} == args
        for group in AXES:
            signature = find_signature(group, args[group])
            assert set(configuration.choices[group].options) == set(signature.keys if signature else ())


def test_the_defaults_list_has_all_groups_and_ends_with_the_profile() -> None:
    entries = OmegaConf.to_container(OmegaConf.load(shipped_path("conf") / "config.yaml"))["defaults"]  # type: ignore[call-overload,index]
    groups = [next(iter(entry)) for entry in entries[1:]]
    assert entries[0] == "_self_", "a group after the profile would override its values"
    assert sorted(groups) == sorted(GROUPS)
    assert groups[-1] == "hardware"
    assert shipped_options() == {
        group: next(iter(entry.values())) for group, entry in zip(groups, entries[1:], strict=True)
    }


def test_config_yaml_has_exactly_the_settings_of_the_code() -> None:
    content: Any = OmegaConf.to_container(OmegaConf.load(shipped_path("conf") / "config.yaml"))
    written = {
        f"{key}.{name}" if name else key: item
        for key, value in content.items()
        if key != "defaults"
        for name, item in (value.items() if isinstance(value, dict) else [("", value)])
    }
    in_code = {name: key.default for name, key in settings_keys(Settings).items()}
    assert list(written) == list(in_code)
    assert {key for key in written if written[key] != in_code[key]} == {"updates"}, (
        "the number of updates or epochs must have no default"
    )


def test_all_folders_of_options_are_known_groups() -> None:
    folders = {path.name for path in shipped_path("conf").iterdir() if path.is_dir()}
    assert folders - {"benchmark"} == set(GROUPS), "the only other folder must be that of the techniques"


def test_the_yaml_of_a_configuration_can_be_read_back() -> None:
    args = (
        "resume_allow=[off,'1']",
        'data.path="1e-3"',
        "optimizer.lr_scales={0:0.1}",
        "optimizer.eps=1e-9",
        "compile=off",
    )
    configuration = compose_task(*args, "+hardware=t4", "checkpoint.best=null", "run='null'")
    result: Any = OmegaConf.to_container(OmegaConf.create(to_yaml(configuration)))
    for group, choice in configuration.choices.items():
        assert result.pop(group) == {"option": choice.name, **choice.options}
    assert result.pop("hardware") == {"profile": "t4", **configuration.hardware}
    assert result.pop("inference") == configuration.inference
    assert {name: key for name, key in result.items() if not isinstance(key, dict)} == {
        key: value for key, value in configuration.flat().items() if key in result
    }
    assert (result["resume_allow"], result["data"]["path"], result["run"]) == (["off", "1"], "1e-3", "null")


@pytest.mark.slow
def test_composing_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import sys; from runner.config.configuration import *; compose(Request()); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
