"""Options of task files and packages behave like shipped options, and are listed without running code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.base.errors import ConfigError, Problem
from runner.cli import main
from runner.commands.complete import candidates
from runner.config import custom_options
from runner.config.configuration import compose
from runner.config.option_table import call_option
from runner.config.options import find_signature
from runner.config.request import Request
from runner.config.schema import did_you_mean
from tests.suggestions import suggested

TABLES = '''
def signed(parameters, *, lr: float = 0.125, beta: float = 0.5):
    """The sign of a mean.

    lr    learning rate
    beta  decay of the mean per update
    """
    import torch

    return torch.optim.SGD([weight for _, weight in parameters], lr=lr, momentum=beta)


def halving(updates, *, every: int = 2):
    """Halve the rate.

    every  updates between two steps
    """
    return lambda update: 0.5 ** (update // every)


OPTIMIZERS = {"signed": signed}
SCHEDULERS: dict = {"halving": halving}
'''
NEVER_RUN = TABLES + "\ndef build(): ...\nraise SystemExit('a task file is not executed to list its options')\n"
TASK = (
    TABLES
    + """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from runner import Task

SETTINGS = {"updates": 6, "optimizer": "signed", "scheduler": "halving", "evaluate.every": 3, "checkpoint.every": 3}


def build(*, hidden: int = 4):
    return Mine()


class Mine(Task):
    def __init__(self):
        self.model = nn.Linear(2, 1)

    def dataset(self, split):
        return TensorDataset(torch.arange(128.0).view(64, 2) / 128)

    def loss(self, model, batch):
        return model(batch[0]).square().sum(), len(batch[0])
"""
)


KEEPS_A_LIST = """

class Listed(torch.optim.Optimizer):
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state.setdefault("means", [torch.zeros_like(weight), torch.zeros(3)])
                state["means"][0].mul_(0.5).add_(weight.grad)
                state["means"][1].add_(weight.grad.sum())
                weight.data -= group["lr"] * (state["means"][0] + 1e-3 * state["means"][1][0])
"""


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


def test_a_custom_option_has_the_keys_of_its_signature(write: Callable[[str], Path]) -> None:
    file = write(NEVER_RUN)
    configuration = compose(Request(("optimizer=signed", "scheduler=halving", "optimizer.beta=0.75"), file))
    chosen = configuration.choices["optimizer"]
    assert (chosen.name, chosen.options) == ("signed", {"lr": 0.125, "beta": 0.75})
    assert configuration.choices["scheduler"].options == {"every": 2}
    assert configuration.sources["optimizer.beta"] == configuration.sources["optimizer"] == "command line"
    signature = find_signature("optimizer", chosen.function)
    assert signature is not None
    assert [key for key in signature.keys if signature.keys[key].help] == ["lr", "beta"]
    assert [note for note in configuration.notes if "optimizer=signed" in note and str(file) in note]


def test_typos_in_custom_options_and_their_keys_get_suggestions(write: Callable[[str], Path]) -> None:
    file = write(NEVER_RUN)
    assert [problem.fix for problem in problems_of(file, "optimizer=signd")] == [did_you_mean("signd", ["signed"])]
    (problem,) = problems_of(file, "optimizer=signed", "optimizer.bet=1")
    assert problem.fix == did_you_mean("optimizer.bet", ["optimizer.beta"])
    (problem,) = problems_of(file, "scheduler.every=3")
    assert suggested(problem.fix) == ["scheduler=step"], "the shipped option must be suggested first"


def test_completion_offers_custom_options_and_their_keys(write: Callable[[str], Path]) -> None:
    before = ["train", "--task", str(write(NEVER_RUN))]
    assert "optimizer=signed" in candidates([*before, "optimizer=s"])
    assert "optimizer.beta=" in candidates([*before, "optimizer=signed", "optimizer.b"])


def test_help_lists_what_the_task_file_defines(
    write: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    hook = "class Log(Hook):\n    def __init__(self, phase, *, every: int = 5): ...\nHOOKS = [Log]\n"
    file = write(f"{hook}{NEVER_RUN.replace('def build()', 'def build(*, hidden: int = 64, data)')}")
    assert main(["train", "--help"]) == 0
    without = capsys.readouterr().out
    assert main(["train", "--help", "--task", str(file)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.removeprefix(without).splitlines()]
    assert [row[0] for row in rows if row and "=" in row[0]] == [
        "task.hidden=64", "task.data=VALUE", "hook.log.enabled=true", "hook.log.every=5", "optimizer=signed",
        "optimizer.lr=0.125", "optimizer.beta=0.5", "scheduler=halving", "scheduler.every=2",
    ]  # fmt: skip
    assert ["optimizer.beta=0.5", "decay", "of", "the", "mean", "per", "update"] in rows
    assert main(["train", f"--task={file}", "--help"]) == 0
    assert "optimizer=signed" in capsys.readouterr().out
    broken = file.with_name("broken.py")
    broken.write_text("def broken(:")
    for task in ("missing.py", str(broken)):
        assert main(["train", "--help", "--task", task]) == 0
        assert capsys.readouterr().out == without


def test_explain_names_the_file_of_a_custom_option(
    write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(NEVER_RUN)
    assert main(["explain", "optimizer.beta", "optimizer=signed", "--task", str(file)]) == 0
    assert f"the default ({file})" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("table", "where"),
    [
        ("OPTIMIZERS = [signed]", ""),
        ("OPTIMIZERS = dict(signed=signed)", ""),
        ("OPTIMIZERS = {'Signed!': signed}", ": OPTIMIZERS['Signed!']"),
        ("OPTIMIZERS = {1: signed}", ": OPTIMIZERS[1]"),
        ("OPTIMIZERS = {'true': signed}", ": OPTIMIZERS['true']"),
        ("OPTIMIZERS = {**others}", ": OPTIMIZERS[**]"),
        ("OPTIMIZERS = {'mine': lambda parameters: None}", ": OPTIMIZERS['mine']"),
        ("OPTIMIZERS = {'mine': nothing}", ": OPTIMIZERS['mine']"),
        ("OPTIMIZERS = {'adamw': signed}", ": OPTIMIZERS['adamw']"),
        ("OPTIMIZERS = {'mine': build}", ": OPTIMIZERS['mine']"),
        ("def own(parameters, *, lr=1 + 1): ...\nOPTIMIZERS = {'mine': own}", ": OPTIMIZERS['mine']"),
        ("OPTIMIZERS = {'mine': ('sgd', signed)}", ": OPTIMIZERS['mine']"),
        ("SCHEDULERS = (halving,)", ""),
        ("SCHEDULERS = {'mine': lambda updates: updates}", ": SCHEDULERS['mine']"),
        ("SCHEDULERS = {'cosine': halving}", ": SCHEDULERS['cosine']"),
        ("SCHEDULERS = {'mine': 'halving'}", ": SCHEDULERS['mine']"),
        ("SCHEDULERS = {'mine': ('cosine', halving)}", ": SCHEDULERS['mine']"),
        ("def own(updates, warmup): ...\nSCHEDULERS = {'mine': own}", ": SCHEDULERS['mine']"),
        ("def own(updates, *, every=2 * 3): ...\nSCHEDULERS = {'mine': own}", ": SCHEDULERS['mine']"),
        ("SAMPLERS = {halving}", ""),
        ("SAMPLERS = {'mine': lambda samples: []}", ": SAMPLERS['mine']"),
        ("SAMPLERS = {'weighted': halving}", ": SAMPLERS['weighted']"),
        ("SAMPLERS = {'mine': halving(2)}", ": SAMPLERS['mine']"),
        ("SAMPLERS = {'mine': ('weighted', halving)}", ": SAMPLERS['mine']"),
        ("def own(*, power=1.0): ...\nSAMPLERS = {'mine': own}", ": SAMPLERS['mine']"),
        ("def own(samples, *, power=1.0 / 2): ...\nSAMPLERS = {'mine': own}", ": SAMPLERS['mine']"),
        ("DATALOADERS = {'mine': signed}", ": DATALOADERS['mine']"),
        ("DATALOADERS = {'thread': signed}", ": DATALOADERS['thread']"),
        ("def own(read, requests, *, drop_last=True): ...\nDATALOADERS = {'mine': own}", ": DATALOADERS['mine']"),
        ("PRECISIONS = {'mine': signed}", ": PRECISIONS['mine']"),
        ("PRECISIONS = {'mine': ('fp8', signed)}", ": PRECISIONS['mine']"),
        ("PRECISIONS = {'float16': ('fp16', signed)}", ": PRECISIONS['float16']"),
        ("def own(model, *, keep_fp32=1): ...\nPRECISIONS = {'mine': ('bf16', own)}", ": PRECISIONS['mine']"),
        ("PARALLELISMS = {'mine': ('fsdp', signed)}", ": PARALLELISMS['mine']"),
        ("PARALLELISMS = [signed]", ""),
        ("TECHNIQUES = [signed]", ""),
        ("TECHNIQUES = {'mine': signed}", ""),
        ("TECHNIQUES = {[1]: ['precision=bf16']}", ""),
        ("TECHNIQUES = {{1}: 2}", ""),
        ("TECHNIQUES = {'mine': 'precision=bf16'}", ": TECHNIQUES['mine']"),
        ("TECHNIQUES = {'mine': ['bf16']}", ": TECHNIQUES['mine']"),
        ("TECHNIQUES = {'mine': {'needs': {}}}", ": TECHNIQUES['mine']"),
        ("TECHNIQUES = {'bf16': ['precision=bf16']}", ": TECHNIQUES['bf16']"),
        ("TECHNIQUES = {'plots': ['precision=bf16']}", ": TECHNIQUES['plots']"),
    ],
)
def test_an_invalid_option_table_is_one_problem_with_its_location(
    table: str, where: str, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(f"{NEVER_RUN}\n{table}\n")
    assert [problem.where for problem in problems_of(file)] == [f"{file}{where}"]
    assert main(["plan", "--task", str(file)]) == 78
    assert capsys.readouterr().err.count("accel-run:") == 1


def test_selecting_an_invalid_entry_is_one_problem(write: Callable[[str], Path]) -> None:
    """The entry is not also reported as an unknown option on the command line or in SETTINGS."""
    table = "def own(parameters, more): ...\nOPTIMIZERS = {'own': own}\n"
    where = "OPTIMIZERS['own']"
    settings = "SETTINGS = {'optimizer': 'own'}\n"
    for text, args in ((table, ("optimizer=own",)), (settings + table, ())):
        (problem,) = problems_of(write(f"{text}\ndef build(): ...\n"), *args)
        assert problem.where.endswith(where)
        custom_options.forget_parsed_files()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("SETTING = {'updates': 3}", "SETTINGS"),
        ("OPTIMISERS = {'signed': signed}", "OPTIMIZERS"),
        ("HOOK = []", "HOOKS"),
        ("class Mine(Task):\n    def metric(self, split): ...", "metrics"),
        ("class Mine(Task):\n    def evalute(self, model, batch): ...", "evaluate"),
    ],
)
def test_unused_names_similar_to_known_ones_are_noted(line: str, name: str, write: Callable[[str], Path]) -> None:
    text = f"def build(): ...\n\n{line}\n"
    (note,) = (note for note in compose(Request((), write(text))).notes if "not read" in note)
    assert note.endswith(did_you_mean(name, [name]))
    word = line.split(maxsplit=1)[0] if "class" not in line else f"x.{line.split('def ')[1].split('(', maxsplit=1)[0]}"
    used = write(f"{text}print({word})\n")
    custom_options.forget_parsed_files()
    assert not [note for note in compose(Request((), used)).notes if "not read" in note]


def test_an_extended_option_has_base_and_own_keys(write: Callable[[str], Path]) -> None:
    own = "def rounded(model, *, bits: int = 8): ...\nPRECISIONS = {'rounded': ('fp16', rounded)}\n"
    file = write(own + NEVER_RUN)
    chosen = compose(Request(("precision=rounded", "precision.init_scale=4.0"), file)).choices["precision"]
    assert (chosen.name, chosen.function, chosen.extension) == ("rounded", "fp16", f"{file}:PRECISIONS:rounded")
    assert (chosen.options["init_scale"], chosen.options["bits"]) == (4.0, 8)
    (problem,) = problems_of(file, "precision=rounded", "precision.bit=1")
    assert problem.fix == did_you_mean("precision.bit", ["precision.bits"])


def test_option_keys_can_have_any_name() -> None:
    keys = {"table": 1, "option": 2, "given": 3, "keys": 4}
    assert call_option({"any": lambda *given, **result: (given, result)}, "any", "parameters", **keys) == (
        ("parameters",),
        keys,
    )


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.mark.parametrize("keeps_a_list", [False, True])
def test_a_run_with_custom_options_resumes_bitwise_equal(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, keeps_a_list: bool
) -> None:
    """The custom options are an optimizer and a schedule."""
    listed = TASK.replace("lr=lr, momentum=beta", "{'lr': lr}").replace("torch.optim.SGD", "Listed") + KEEPS_A_LIST
    file = write(listed if keeps_a_list else TASK)
    monkeypatch.chdir(tmp_path)
    args = ["train", "--task", str(file), "device=cpu", "monitor=off", "log_every=1"]
    assert main([*args, "run=straight", "updates=12"]) == 0
    assert main([*args, "run=parts", "updates=6"]) == 0
    assert main([*args, "run=parts", "updates=12", "resume_allow=[updates]"]) == 0
    uninterrupted, parts = losses(tmp_path / "outputs" / "straight"), losses(tmp_path / "outputs" / "parts")
    assert len(uninterrupted) == 12
    assert parts == uninterrupted
    assert uninterrupted[0] > uninterrupted[-1]


def test_an_optimizer_of_a_package_is_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note names its package. The module is parsed, not imported."""
    name = f"package_{tmp_path.name}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise SystemExit('a package is not imported to list its options')")
    (tmp_path / name / "rules.py").write_text(TABLES)
    metadata = tmp_path / f"{name}-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (metadata / "entry_points.txt").write_text(f"[accel_run.options]\nmine = {name}.rules\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    custom_options.clear_package_cache()
    try:
        configuration = compose(Request(("optimizer=signed",)))
    finally:
        monkeypatch.undo()
        custom_options.clear_package_cache()
    assert configuration.choices["optimizer"].function == f"{name}.rules:OPTIMIZERS:signed"
    assert [note for note in configuration.notes if f"{name} 1.5" in note]
    assert name not in sys.modules


def test_a_config_file_hiding_a_custom_option_is_noted(write: Callable[[str], Path], tmp_path: Path) -> None:
    file, folder = write(NEVER_RUN), tmp_path / "conf"
    (folder / "optimizer").mkdir(parents=True)
    (folder / "optimizer" / "signed.yaml").write_text("beta: 0.25\n")
    configuration = compose(Request(("optimizer=signed",), file, folder))
    assert configuration.choices["optimizer"].options["beta"] == 0.25
    (note,) = (note for note in configuration.notes if "optimizer=signed" in note)
    assert str(file) in note
    assert str(folder / "optimizer" / "signed.yaml") in note


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("word", ["scheduler=wsd scheduler.decay=0", "scheduler=warm_restarts scheduler.period=0.0"])
def test_an_interval_of_zero_is_rejected_with_its_type(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(Request(tuple(word.split())))
    assert [problem.where for problem in caught.value.problems] == [word.split()[1]]
