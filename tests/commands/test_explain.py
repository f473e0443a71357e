"""`accel-run explain` prints the source of a value, and the value that would apply without this source."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.cli import main

TASK = """
SETTINGS = {"optimizer.lr": 0.02}
OBJECTIVES = {"generator": {"trains": ["generator"], "optimizer": "adam", "optimizer.lr": 0.5}}

def build(*, hidden: int = 8):
    '''Build it.

    hidden  width of the model
    '''

class Mine:
    def predict(self, model, generator, *, samples: int = 3): ...
"""

# arguments: exact output
EXPLAINED = {
    "precision +hardware=t4": """\
precision = fp16
  set by the profile t4 (conf/hardware/t4.yaml)
  without +hardware=t4: auto, set by the default (conf/config.yaml)
  options: auto, bf16, fp16, fp32, tf32
""",
    "precision hardware=t4 precision=fp32": """\
precision = fp32
  set by the command line (precision=fp32)
  without precision=fp32: fp16, set by the profile t4 (conf/hardware/t4.yaml)
  without precision=fp32 and hardware=t4: auto, set by the default (conf/config.yaml)
  options: auto, bf16, fp16, fp32, tf32
""",
    "precision.init_scale +hardware=t4 precision.init_scale=1024": """\
precision.init_scale = 1024
  set by the command line (precision.init_scale=1024)
  without precision.init_scale=1024: 65536.0, set by the default (conf/precision/fp16.yaml)
  without precision.init_scale=1024 and +hardware=t4: not defined, because precision=auto has no such key
  meaning: initial loss scale
""",
    "optimizer.lr optimizer.lr=0.01 optimizer=sgd": """\
optimizer.lr = 0.01
  set by the command line (optimizer.lr=0.01)
  without optimizer.lr=0.01: 0.01, set by the default (conf/optimizer/sgd.yaml)
  without optimizer.lr=0.01 and optimizer=sgd: 0.004, set by the task gpt (tasks/gpt/task.py)
  meaning: learning rate at the peak of the schedule
""",
    "optimizer.lr_scales optimizer=adamw optimizer.lr_scales.head=0.1": """\
optimizer.lr_scales = {head:0.1}
  set by the command line (optimizer.lr_scales.head=0.1)
  meaning: module or parameter name -> factor on its learning rate; the longest matching name applies
""",
    "phase.train.updates task=hyperspectral phase.train.epochs=3 epochs=4": """\
phase.train.updates = null
  set by the command line (phase.train.epochs=3)
""",
    "optimizer.lr --task my_task.py": """\
optimizer.lr = 0.02
  set by the task (FOLDER/my_task.py)
  without the task: 0.0003, the default
  meaning: learning rate at the peak of the schedule
""",
    "optimizer.lr --task my_task.py optimizer.lr=1": """\
optimizer.lr = 1
  set by the command line (optimizer.lr=1)
  without optimizer.lr=1: 0.02, set by the task (FOLDER/my_task.py)
  meaning: learning rate at the peak of the schedule
""",
    "optimizer.eps": """\
optimizer.eps = 1e-08
  set by the default (conf/optimizer/adamw.yaml)
  meaning: added to the square root of the second moment
""",
    "dataloader.num_workers": """\
dataloader.num_workers = auto
  set by the default (conf/dataloader/default.yaml)
  meaning: worker processes; 0 reads in this process; auto: chosen by device and number of cores
  accel-run plan shows what auto selects, unless that is decided during the run
""",
    "seed seed=3": """\
seed = 3
  set by the command line (seed=3)
  without seed=3: 0, set by the default (conf/config.yaml)
  meaning: random seed of weights, data order and dropout
""",
    "objective.generator.optimizer.lr --task my_task.py": """\
objective.generator.optimizer.lr = 0.5
  set by the task (FOLDER/my_task.py)
  meaning: learning rate at the peak of the schedule; null: not set
""",
    "objective.generator.every --task my_task.py": """\
objective.generator.every = 1
  set by the default (conf/config.yaml)
  meaning: train the objective in the first update and every n-th one after it
""",
    "task --task my_task.py": """\
task = my_task
  set by the command line (--task FOLDER/my_task.py)
  options: cape, dynamo, gpt, hyperspectral, nmt, tractodiff
""",
    "task": """\
task = gpt
  set by the default (conf/config.yaml)
  options: cape, dynamo, gpt, hyperspectral, nmt, tractodiff
""",
    "task.hidden --task my_task.py": """\
task.hidden = 8
  set by the task (FOLDER/my_task.py)
  meaning: width of the model
""",
    "inference.samples --task my_task.py inference.samples=5": """\
inference.samples = 5
  set by the command line (inference.samples=5)
  without inference.samples=5: 3, set by the task (FOLDER/my_task.py)
""",
    "hardware +hardware=t4": """\
hardware = t4
  set by the command line (+hardware=t4)
  without +hardware=t4: auto, set by the default (conf/config.yaml)
  options: a100, auto, cpu, h100, h200, pair_11gb_8gb, rtx3050ti_4gb, rtx_entry, rtx_high, rtx_mid, t4
""",
    "global_batch_size global_batch_size=512 micro_batch_size=512": """\
global_batch_size = 512
  set by the command line (global_batch_size=512)
  without global_batch_size=512: invalid, must be at most global_batch_size (16), but is 512
  meaning: samples per update over all ranks and micro-batches
""",
    "optimizer.momentum --config-dir mine optimizer=heavy": """\
optimizer.momentum = 0.99
  set by your folder (FOLDER/mine/optimizer/heavy.yaml)
  without optimizer=heavy: not defined, because optimizer=adamw has no such key
  meaning: momentum factor; 0: none
""",
    "optimizer.nesterov --config-dir mine optimizer=heavy": """\
optimizer.nesterov = false
  set by the default (conf/optimizer/sgd.yaml)
  without optimizer=heavy: not defined, because optimizer=adamw has no such key
  meaning: use Nesterov momentum
""",
}

REFUSED = {
    "": "explain: needs a key\n           use accel-run explain optimizer.lr",
    "optimizer.momentum": (
        "optimizer.momentum: unknown key\n"
        "           use accel-run explain optimizer.momentum optimizer=sgd, the option that has this key"
    ),
    "lr": "lr: unknown key\n           use optimizer.lr",
    "precsion": "precsion: unknown key\n           did you mean precision?",
    "precision precision=bf17": (
        "precision=bf17: unknown precision; must be one of auto, bf16, fp16, fp32, tf32\n           did you mean bf16?"
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "mine" / "optimizer").mkdir(parents=True)
    (tmp_path / "mine" / "optimizer" / "heavy.yaml").write_text("option: sgd\nmomentum: 0.99\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("args", EXPLAINED)
def test_the_source_of_a_value_has_its_file(args: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *args.split()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.replace(str(folder), "FOLDER") == EXPLAINED[args]


@pytest.mark.parametrize("args", REFUSED)
def test_explain_suggests_a_key_for_a_typo(args: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *args.split()]) == 78
    assert capsys.readouterr() == ("", f"accel-run: {REFUSED[args]}\n")


def test_source_files_of_values_exist(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The test checks every key of the default configuration and of two hardware profiles."""
    from runner.config.configuration import compose
    from runner.config.request import Request

    root = Path(__file__).parents[2]
    from runner.commands.explain import describe_source

    for overrides in ((), ("hardware=t4",), ("hardware=rtx3050ti_4gb",)):
        configuration = compose(Request(overrides))
        for key in configuration.flat():
            file = describe_source(key, configuration).rpartition("(")[2].rstrip(")")
            assert "=" in file or (root / file).is_file(), key
