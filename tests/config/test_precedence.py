"""One function decides the precedence of settings, and each request is composed once."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import hydra
import pytest

from runner.base.errors import ConfigError
from runner.base.paths import shipped_path
from runner.cli import main
from runner.config import composition
from runner.config.configuration import compose
from runner.config.layers import Rank, Setting, merge
from runner.config.request import Request

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from runner import Task

SETTINGS = {"optimizer": "sgd", "scheduler": "linear", "updates": 2}


def build(*, hidden: int = 4):
    return Mine(hidden)


class Mine(Task):
    def __init__(self, hidden):
        self.model = nn.Linear(1, 1)

    def dataset(self, split):
        return TensorDataset(torch.ones(64, 1))

    def loss(self, model, batch):
        return model(batch[0]).square().sum(), len(batch[0])
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    file = tmp_path / f"{tmp_path.name}_task.py"  # with a module name unique to the test
    file.write_text(TASK)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a config folder with unique content, because compositions are cached across tests."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "own").write_text(str(tmp_path))
    return tmp_path / "conf"


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the overrides of each call of hydra.compose."""
    calls: list[list[str]] = []
    real = hydra.compose

    def counted(*args: object, overrides: list[str], **options: object) -> object:
        calls.append(overrides)
        return real(*args, overrides=overrides, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(composition, "hydra_compose", counted)
    return calls


# ---------------------------------------------------------------- the order of sources


def settings() -> list[Setting]:
    """Return a setting of each precedence rank, for the run and for a phase. The value identifies the source."""
    return [
        Setting("seed", (for_phase, rank), rank, for_phase=for_phase) for for_phase in (False, True) for rank in Rank
    ]


def test_the_order_of_sources_does_not_matter() -> None:
    """The source with the highest precedence wins."""
    for order in permutations([Setting("seed", rank, rank) for rank in (Rank.DEFAULT, Rank.TASK, Rank.COMMAND_LINE)]):
        assert merge(order)["seed"].value == Rank.COMMAND_LINE


def test_only_keys_of_phases_override_the_command_line() -> None:
    order = []
    rest = settings()
    while rest:
        winner = merge(rest)["seed"]
        order.append(winner.value)
        rest = [setting for setting in rest if setting.value != winner.value]
    of_phase = [(True, rank) for rank in sorted(Rank, reverse=True)]
    of_run = [(False, rank) for rank in sorted(Rank, reverse=True)]
    assert order == [of_phase[0], of_run[0], *of_phase[1:], *of_run[1:]]


@pytest.mark.parametrize("stronger", [rank for rank in Rank if rank > Rank.TASK])
def test_a_length_resets_the_other_of_lower_precedence(stronger: Rank) -> None:
    merged = merge([Setting("updates", 5, Rank.TASK), Setting("epochs", 2.0, stronger, "who")])
    assert (merged["updates"].value, merged["epochs"].value) == (None, 2.0)
    assert merged["updates"].source == "who"


def test_a_null_length_does_not_reset_the_other_length() -> None:
    merged = merge([Setting("updates", 5, Rank.TASK), Setting("epochs", None, Rank.COMMAND_LINE)])
    assert (merged["updates"].value, merged["epochs"].value) == (5, None)


def test_an_entry_is_added_to_a_mapping_of_lower_precedence() -> None:
    key = "optimizer.lr_scales"
    merged = merge(
        [
            Setting(key, 2.0, Rank.COMMAND_LINE, entry="head"),
            Setting(key, {"body": 1.0}, Rank.TASK),
            Setting(key, 3.0, Rank.COMMAND_LINE, entry="tail"),
        ]
    )
    assert merged[key].value == {"body": 1.0, "head": 2.0, "tail": 3.0}


# ---------------------------------------------------------------- one composition per request


def test_a_task_that_selects_options_is_composed_once(task: Path, folder: Path, composed: list[list[str]]) -> None:
    configuration = compose(Request((), task, folder))
    assert configuration.choices["optimizer"].name == "sgd"
    assert len(composed) == 1
    assert {"optimizer=sgd", "scheduler=linear"} <= set(composed[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [["train", "monitor=off", "device=cpu"], ["plan", "device=cpu"], ["explain", "optimizer.lr"]],
    ids=["train", "plan", "explain"],
)
def test_a_command_composes_its_request_once(
    args: list[str],
    task: Path,
    folder: Path,
    composed: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(task.parent)
    assert main([*args, "--task", str(task), "--config-dir", str(folder)]) == 0, capsys.readouterr().err
    assert len(composed) == 1


def test_the_last_of_repeated_keys_applies(task: Path) -> None:
    repeated = ("optimizer.lr=0.5", "seed=3", "optimizer.lr=0.25", "updates=4", "+updates=5", "seed=3")
    configuration = compose(Request(repeated, task))
    assert configuration.choices["optimizer"].options["lr"] == 0.25
    assert (configuration.settings.seed, configuration.settings.updates) == (3, 5)


# ---------------------------------------------------------------- files and options


OWN = """
def halved(parameters, *, lr: float = 0.5):
    import torch

    return torch.optim.SGD(parameters, lr=lr)


OPTIMIZERS = {"halved": halved}
"""


def profile(folder: Path, option: str, **keys: float) -> None:
    """Write a hardware profile `box` that selects an optimizer and sets its keys."""
    (folder / "hardware").mkdir()
    lines = "".join(f"  {key}: {value}\n" for key, value in keys.items())
    text = f"# @package _global_\ndefaults:\n  - override /optimizer: {option}\noptimizer:\n{lines}"
    (folder / "hardware" / "box.yaml").write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("args", [*permutations(["hardware=box", "optimizer=nadam"])], ids=" ".join)
def test_keys_of_a_profile_apply_only_to_its_option(task: Path, folder: Path, args: tuple[str, ...]) -> None:
    profile(folder, "sgd", lr=0.25, momentum=0.5)
    assert compose(Request(("hardware=box",), task, folder)).choices["optimizer"].options["momentum"] == 0.5
    typed = compose(Request(args, task, folder))
    default = compose(Request(("optimizer=nadam",), task, folder))
    assert typed.choices["optimizer"] == default.choices["optimizer"]
    assert "optimizer.lr" not in typed.sources
    assert {word for note in typed.notes for word in note.split()} >= {"optimizer.lr=0.25", "optimizer.momentum=0.5"}


@pytest.mark.slow
def test_a_profile_does_not_override_files_of_other_options(task: Path, folder: Path) -> None:
    profile(folder, "sgd", lr=0.25)
    (folder / "optimizer").mkdir()
    (folder / "optimizer" / "slow.yaml").write_text("option: nadam\nlr: 0.125\n")
    (folder / "optimizer" / "slower.yaml").write_text("defaults: [slow, _self_]\neps: 0.5\n")
    for option in ("slow", "slower"):
        result = compose(Request((f"optimizer={option}", "hardware=box"), task, folder))
        assert result.choices["optimizer"].options["lr"] == 0.125
        assert result.sources.get("optimizer.lr") != "profile box"


def test_a_typo_in_a_profile_is_reported(task: Path, folder: Path) -> None:
    profile(folder, "sgd", momentm=0.5)
    with pytest.raises(ConfigError):
        compose(Request(("hardware=box",), task, folder))


@pytest.mark.slow
def test_profiles_and_config_folders_can_select_custom_options(task: Path, folder: Path) -> None:
    task.write_text(OWN + TASK.replace('"optimizer": "sgd", ', ""))
    profile(folder, "halved", lr=0.25)
    shipped_config = (shipped_path("conf") / "config.yaml").read_text()
    chosen = compose(Request(("hardware=box",), task, folder)).choices["optimizer"]
    assert (chosen.name, chosen.options) == ("halved", {"lr": 0.25})
    (folder / "config.yaml").write_text(shipped_config.replace("optimizer: adamw", "optimizer: halved"))
    chosen = compose(Request((), task, folder)).choices["optimizer"]
    assert (chosen.name, chosen.options) == ("halved", {"lr": 0.5})
    assert compose(Request(("optimizer=sgd", "hardware=box"), task, folder)).choices["optimizer"].name == "sgd"


def test_option_keys_in_config_yaml_are_rejected_if_options_override_them(task: Path, folder: Path) -> None:
    shipped_config = (shipped_path("conf") / "config.yaml").read_text()
    (folder / "config.yaml").write_text(f"{shipped_config}optimizer:\n  lr: 0.5\n")
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        compose(Request((), task, folder))
    selected = shipped_config.replace("optimizer: adamw", "optimizer: sgd")
    after_options = selected.replace("  - _self_\n", "").replace("  - task: gpt", "  - _self_\n  - task: gpt")
    (folder / "config.yaml").write_text(f"{after_options}optimizer:\n  momentum: 0.5\n")
    assert compose(Request((), task, folder)).choices["optimizer"].options["momentum"] == 0.5
