"""Typos and invalid arguments are reported with their place and a suggestion, exit code 78, and without torch."""

# ruff: noqa: E501 - the texts are compared exactly

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.cli import main
from runner.commands import COMMANDS, FOREIGN_NAMES
from runner.config.options import list_options
from runner.tools.measure.technique import SHIPPED_ORDER, find_techniques

# arguments: exact stderr
SLIPS: dict[str, str] = {
    "trian": """\
accel-run: trian: unknown command
           did you mean accel-run train?
""",
    "frobnicate": f"""\
accel-run: frobnicate: unknown command
           commands: {", ".join(name for name, (_, summary) in COMMANDS.items() if summary)}
""",
    "TRAIN": """\
accel-run: TRAIN: unknown command
           did you mean accel-run train?
""",
    "train help": """\
accel-run: help: is not a setting; settings have the form key=value
           use accel-run train --help
""",
    "train import nosuch.pt": """\
accel-run: import: is a command, not a setting
           use accel-run import nosuch.pt
""",
    "train train --task mine.py updates=3": """\
accel-run: train: is a command, not a setting
           use accel-run train --task mine.py
""",
    "status one two three": """\
accel-run: two: this command takes a single run, but one is also given
           run the command once for each run
""",
    "evaluate one splt test": """\
accel-run: splt test: is not a setting; settings have the form key=value
           use split=test
""",
    "evaluate --jsn": """\
accel-run: --jsn: unknown option; settings have the form key=value
           did you mean --json?
""",
    "import --jsn model.pt": """\
accel-run: --jsn model.pt: unknown option; settings have the form key=value
           run accel-run plan to see every key
""",
    "search --json optimizer.lr=log(1e-4,1e-2)": """\
accel-run: --json: unknown option here
           remove it; accel-run runs --json and accel-run evaluate --json print JSON
""",
    "report --wach": """\
accel-run: --wach: unknown option
           did you mean --watch?
""",
    "train --tsk ./mine.py": """\
accel-run: --tsk ./mine.py: unknown option; settings have the form key=value
           use --task ./mine.py
""",
    "train nosuch.pt": """\
accel-run: nosuch.pt: is not a setting; settings have the form key=value
           use accel-run import nosuch.pt, then weights=FILE.safetensors
""",
    "train optimizer.lr 0.1 precision bf17 updates": """\
accel-run: 3 problems
  1. optimizer.lr 0.1: is not a setting; settings have the form key=value
     use optimizer.lr=0.1
  2. precision bf17: is not a setting; settings have the form key=value
     use precision=...
  3. updates: is not a setting; settings have the form key=value
     use updates=...
""",
    "train resume ../other": """\
accel-run: resume ../other: is not a setting; settings have the form key=value
           use accel-run resume ../other; to start a new run from another one, use resume=../other
""",
    "train task mytask.py": """\
accel-run: task mytask.py: is not a setting; settings have the form key=value
           use --task mytask.py
""",
    "train weights mine.pt": """\
accel-run: 2 problems
  1. weights: is not a setting; settings have the form key=value
     use weights=...
  2. mine.pt: is not a setting; settings have the form key=value
     use accel-run import mine.pt, then weights=FILE.safetensors
""",
    "train -m precision bf17,fp32": """\
accel-run: precision bf17,fp32: is not a setting; settings have the form key=value
           use precision=...
""",
    "train -m optimizer.momentum choice(0.8,0.9)": """\
accel-run: optimizer.momentum choice(0.8,0.9): is not a setting; settings have the form key=value
           use optimizer=sgd optimizer.momentum=choice(0.8,0.9)
""",
    "train -m lr 0.1,0.2": """\
accel-run: lr 0.1,0.2: is not a setting; settings have the form key=value
           use optimizer.lr=0.1,0.2
""",
    "train --hlep": """\
accel-run: --hlep: unknown option; settings have the form key=value
           did you mean --help?
""",
    "train t4": """\
accel-run: t4: is not a setting; settings have the form key=value
           use +hardware=t4
""",
    "train cuda": """\
accel-run: cuda: is not a setting; settings have the form key=value
           use device=cuda
""",
    "train my.yaml": """\
accel-run: my.yaml: is not a setting; settings have the form key=value
           use --config-dir DIR, the folder that holds the file, and GROUP=NAME for the file in it
""",
    "train task=dynamo --phase 2": """\
accel-run: --phase 2: unknown option; settings have the form key=value
           use phases=[NAME]; the phases of the task, in this order, are pretrain, lora, router, joint
""",
    "train --phase=router task=dynamo": """\
accel-run: --phase=router: unknown option; settings have the form key=value
           use phases=[router]
""",
    "train phase=2 task=hyperspectral": """\
accel-run: phase=2: unknown key
           use phases=[NAME]; the phases of the task, in this order, are fit, train
""",
    "train task=nmt --phase 2": """\
accel-run: --phase 2: unknown option; settings have the form key=value
           use phases=[NAME], where NAME is one of the task's phases, which accel-run plan lists
""",
    "train model=resnet50": """\
accel-run: model=resnet50: unknown key
           use task=NAME for a built-in task; define your model in a task file: accel-run new my_task.py, then --task ./my_task.py
""",
    "train task=./my_task.py": """\
accel-run: task=./my_task.py: unknown task; must be one of cape, dynamo, gpt, hyperspectral, nmt, tractodiff
           use --task ./my_task.py
""",
    "train train.py --batch-size 32": """\
accel-run: 2 problems
  1. train.py: is not a setting; settings have the form key=value
     use --task train.py
  2. --batch-size 32: unknown option; settings have the form key=value
     use global_batch_size=32 (samples per update) or micro_batch_size=32 (samples per forward and backward pass)
""",
    "train --epochs=3": """\
accel-run: --epochs=3: unknown option; settings have the form key=value
           use epochs=3
""",
    "train amp=true": """\
accel-run: amp=true: unknown key
           use precision=bf16, or precision=fp16 if the GPU has no bfloat16
""",
    "train fp16=true": """\
accel-run: fp16=true: unknown key
           use precision=fp16
""",
    "train num_workers=4": """\
accel-run: num_workers=4: unknown key
           use dataloader.num_workers=4
""",
    "train accelerator=gpu devices=2": """\
accel-run: 2 problems
  1. accelerator=gpu: unknown key
     use device=...
  2. devices=2: unknown key
     use parallelism=ddp parallelism.world_size=2, or device=cuda:0 for a single GPU
""",
    "train resume=last": """\
accel-run: resume=last: does not name a run to start from
           use accel-run resume to resume the last run, or resume=NAME to start a new run from another one
""",
    "train --resume": """\
accel-run: --resume: unknown option; settings have the form key=value
           use accel-run resume
""",
    "train updates=1e3": """\
accel-run: updates=1000.0: must be an integer of at least 1 or null, but is 1000.0
           use updates=1000
""",
    "train scheduler=CosineAnnealingLR": """\
accel-run: scheduler=CosineAnnealingLR: unknown scheduler; must be one of constant, cosine, linear, multistep, one_cycle, plateau, step, warm_restarts
           use scheduler=cosine
""",
    "train optimizer.betas=(0.9,0.95)": """\
accel-run: optimizer.betas=(0.9,0.95): must be KEY=VALUE, but cannot be parsed
           write lists as KEY=[1,2], and quote text with special characters: 'KEY="a (b)"'
""",
    "train lrr=3": """\
accel-run: lrr=3: unknown key
           did you mean optimizer.lr?
""",
    "train lr=abc": """\
accel-run: lr=abc: unknown key
           use optimizer.lr=...
""",
    "train optimizer.lr=abc": """\
accel-run: optimizer.lr=abc: must be a number above 0, but is "abc"
           use optimizer.lr=0.004, from task gpt
""",
    "train --lr 0.1": """\
accel-run: --lr 0.1: unknown option; settings have the form key=value
           use optimizer.lr=0.1
""",
    "train --global-batch-size=64": """\
accel-run: --global-batch-size=64: unknown option; settings have the form key=value
           use global_batch_size=64
""",
    "train fast": """\
accel-run: fast: is not a setting; settings have the form key=value
           run accel-run plan to see every key
""",
    "monitor json": """\
accel-run: json: is not a setting; settings have the form key=value
           use --json
""",
    "monitor run": """\
accel-run: run: is not a setting; settings have the form key=value
           use run=...
""",
    "monitor first": """\
accel-run: first: is not a setting; settings have the form key=value
           use run=first
""",
    "benchmark bf15": """\
accel-run: bf15: must be a technique, one of baseline, tf32, bf16, fp16, channels_last, compile, flash, fused, 8bit, autotune, non_blocking, prefetch
           did you mean bf16?
""",
    "benchmark steps=0": """\
accel-run: steps=0: must be an integer above 0
           use steps=50
""",
    "benchmark suite=laddr": """\
accel-run: suite=laddr: must be one of ladder, machine, batch, loader, before_after, parallelism, devices
           did you mean ladder?
""",
    "benchmark suite=batch micro=x": """\
accel-run: micro=x: must be integers of at least 1, separated by commas
           use micro=1,2
""",
    "benchmark suite=loader cache=disk": """\
accel-run: cache=disk: must be values from none, memory, device, but disk is not one of them
           use cache=none,memory,device
""",
    "benchmark suite=parallelism forms=ddp": """\
accel-run: forms=ddp: must be values from single, equal, shares, pipeline, but ddp is not one of them
           use forms=single,equal,shares,pipeline
""",
    "tune budgets=3": """\
accel-run: budgets=3: unknown key
           did you mean budget_s?
""",
    "tune --budget 5": """\
accel-run: --budget 5: unknown option; settings have the form key=value
           use budget_s=5
""",
    "train x=[1,2": """\
accel-run: x=[1,2: must be KEY=VALUE, but cannot be parsed
           write lists as KEY=[1,2], and quote text with special characters: 'KEY="a (b)"'
""",
    "train optimizer=adamm": """\
accel-run: optimizer=adamm: unknown optimizer; must be one of adam, adamw, adamw8bit, sgd
           did you mean adam?
""",
    "train optimiser=adamw": """\
accel-run: optimiser=adamw: unknown key
           did you mean optimizer?
""",
    "train optimizer.momentum=0.9": """\
accel-run: optimizer.momentum=0.9: unknown key of optimizer=adamw; known: optimizer.lr, optimizer.weight_decay, optimizer.betas, optimizer.eps, optimizer.kernel, optimizer.decay_1d, optimizer.lr_scales
           use optimizer=sgd, which has this key
""",
    "train +optimizer.lrr=1": """\
accel-run: +optimizer.lrr=1: unknown key of optimizer=adamw; known: optimizer.lr, optimizer.weight_decay, optimizer.betas, optimizer.eps, optimizer.kernel, optimizer.decay_1d, optimizer.lr_scales
           did you mean optimizer.lr?
""",
    "train +extra=1": """\
accel-run: +extra=1: unknown key
           run accel-run plan to see every key
""",
    "train global_batch_size=64 micro_batch_size=12": """\
accel-run: micro_batch_size=12: must divide global_batch_size (64), but is 12
           use micro_batch_size=8 or micro_batch_size=16, or change the update: global_batch_size=60 or global_batch_size=72
""",
    "train micro_batch_size=64": """\
accel-run: micro_batch_size=64: must be at most global_batch_size (16), but is 64
           use micro_batch_size=16, or global_batch_size=64
""",
    "plan precision=bf16 +hardware=t4": """\
accel-run: precision=bf16: needs a GPU of capability 8.0 or above; Tesla T4 has capability 7.5 and only emulates bfloat16
           use precision=fp16, or precision=auto
""",
    "train precision=bf17": """\
accel-run: precision=bf17: unknown precision; must be one of auto, bf16, fp16, fp32, tf32
           did you mean bf16?
""",
    "train hardware=t4 +hardware=a100": """\
accel-run: +hardware=a100: hardware is given twice, t4 and a100
           remove one of them
""",
    "train hardware=t5": """\
accel-run: hardware=t5: unknown hardware; must be one of a100, auto, cpu, h100, h200, pair_11gb_8gb, rtx3050ti_4gb, rtx_entry, rtx_high, rtx_mid, t4
           did you mean t4?
""",
    "train run=../elsewhere": """\
accel-run: run=../elsewhere: a run name may contain only letters, digits, '.', '_' and '-', and must begin with a letter or digit, but is '../elsewhere'
           use run=elsewhere
""",
    f"train run={'a' * 201}": f"""\
accel-run: run={"a" * 201}: a run name must have at most 200 characters, but has 201
           use, for example, run={"a" * 20}
""",
    "train batch_size=32": """\
accel-run: batch_size=32: unknown key
           use global_batch_size=32 (samples per update) or micro_batch_size=32 (samples per forward and backward pass)
""",
    "train accumulate_grad_batches=4": """\
accel-run: accumulate_grad_batches=4: unknown key
           use global_batch_size=64 micro_batch_size=16, which accumulates the gradients of 64 / 16 = 4 micro-batches
""",
    "train clip_max_norm=0.1": """\
accel-run: clip_max_norm=0.1: unknown key
           use max_grad_norm=0.1
""",
    "train checkpoint.every=5days": """\
accel-run: checkpoint.every=5days: must be an integer of at least 1 or 200updates, 2epochs, 10min, auto, but is "5days"
           use checkpoint.every=auto, the default
""",
    "train device=gpu": """\
accel-run: device=gpu: must be auto, cpu, cuda, cuda:N, mps or xpu, but is "gpu"
           use device=cuda
""",
    "train updates=10 epochs=2": """\
accel-run: updates=10 epochs=2: both are set
           set only one of them
""",
    "train optimizer.lr=0.1,0.2": """\
accel-run: optimizer.lr=0.1,0.2: is a sweep over several values; to pass a list, write [1,2]
           use accel-run train -m to train each value
""",
    "train ~tracker": """\
accel-run: ~tracker: settings cannot be deleted
           leave it out, or set another value
""",
    "train hydra.run.dir=x": """\
accel-run: hydra.run.dir=x: Hydra's own settings cannot be changed: it only composes the configuration
           leave it out
""",
    "train --task": """\
accel-run: --task: needs a path
           use --task ./my_task.py
""",
    "train --task ./without_build.py": """\
accel-run: FOLDER/without_build.py: has no function build()
           define it; accel-run new my_task.py writes an example
""",
    "train --task ./broken.py": """\
accel-run: FOLDER/broken.py: is not valid Python, line 1: '(' was never closed
           fix that line
""",
    "train run=": """\
accel-run: run=: needs a value
           use run=NAME, or leave it out
""",
    "inference run=": """\
accel-run: run=: needs a value
           use run=NAME, or leave it out
""",
    "report run=": """\
accel-run: run=: needs a value
           use run=NAME, or leave it out
""",
    "report first out=x.pdf": """\
accel-run: out=x.pdf: must end with .html
           use out=x.html
""",
    "train task=broken": """\
accel-run: task=broken: unknown task; must be one of cape, dynamo, gpt, hyperspectral, nmt, tractodiff
           use --task ./broken.py
""",
    "explain optimizer.lrr": """\
accel-run: optimizer.lrr: unknown key
           did you mean optimizer.lr?
""",
    "explain": """\
accel-run: explain: needs a key
           use accel-run explain optimizer.lr
""",
    "train updates=0 seed=-1 optimizer.lr=-1 precsion=fp32": """\
accel-run: 4 problems
  1. precsion=fp32: unknown key
     did you mean precision?
  2. updates=0: must be an integer of at least 1 or null, but is 0
     use updates=1500, from task gpt
  3. seed=-1: must be an integer from 0 to 2**64 - 1, but is -1
     use seed=0, the default
  4. optimizer.lr=-1: must be a number above 0, but is -1
     use optimizer.lr=0.004, from task gpt
""",
}

ASK = """
import contextlib, io, json, sys
from runner.cli import main
answers = {}
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words.split())
    answers[words] = [code, out.getvalue(), err.getvalue(), "torch" in sys.modules]
json.dump(answers, sys.stdout)
"""


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str, str, bool]]:
    """Return the results of the command lines that selected tests need; composing each takes a third of a second."""
    test = test_invalid_arguments_print_the_expected_message
    items = [item for item in request.session.items if getattr(item, "function", None) is test]
    asked = {item.callspec.params["args"] for item in items}
    folder = tmp_path_factory.mktemp("slips")
    (folder / "without_build.py").write_text("model = None\n")
    (folder / "broken.py").write_text("def build(\n")
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=folder,
        input=json.dumps([args for args in SLIPS if args in asked]),
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout)
    return {
        args: (code, out, err.replace(str(folder), "FOLDER"), torch) for args, (code, out, err, torch) in result.items()
    }


def extend_option_lists(answer: str) -> str:
    """Return the answer, with each list of a group's options extended to all installed options."""
    for group, listed in re.findall(r"unknown (\w+); must be one of (.*)", answer):
        assert set(listed.split(", ")) <= set(list_options(group)), "the table names an option that no longer exists"
        answer = answer.replace(listed, ", ".join(list_options(group)))
    ours = ", ".join(SHIPPED_ORDER)
    return answer.replace(ours, ", ".join(find_techniques(None)))


@pytest.mark.slow
@pytest.mark.sampled(12)
@pytest.mark.parametrize("args", SLIPS)
def test_invalid_arguments_print_the_expected_message(
    args: str, answers: dict[str, tuple[int, str, str, bool]]
) -> None:
    code, out, err, torch_is_loaded = answers[args]
    assert err == extend_option_lists(SLIPS[args])
    assert (code, out, torch_is_loaded) == (78, "", False)


def test_foreign_command_names_get_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for name in FOREIGN_NAMES:
        assert main([name, "-m", "seed=0,1"]) == 78
        message = capsys.readouterr().err
        suggested = set(re.findall(r"accel-run ([\w-]+)", message))
        assert suggested <= {*COMMANDS, "--version"}, name
        assert "commands:" not in message, name
        assert name not in COMMANDS
    assert main(["clean"]) == 78
    assert "accel-run plan?" not in capsys.readouterr().err, "a name that only shares letters must not be suggested"


def test_a_missing_task_file_suggests_the_most_similar_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "my_task.py").write_text("")
    assert main(["train", "--task", str(folder / "my_tsk.py")]) == 66
    assert capsys.readouterr().err.endswith(f" use --task '{folder / 'my_task.py'}'\n")
    assert main(["train", "--task", str(folder / "other.py")]) == 66
    assert capsys.readouterr().err.endswith(f" accel-run new '{folder / 'other.py'}'\n")


@pytest.mark.parametrize("name", ["package.part.task", "package/part/task"])
def test_a_dotted_module_name_suggests_its_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "package" / "part" / "task.py"
    file.parent.mkdir(parents=True)
    file.write_text("")
    assert main(["train", "--task", str(tmp_path / name)]) == 66
    assert capsys.readouterr().err.endswith(f" use --task {file}\n")


def test_spaces_around_an_equals_sign_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "optimizer.lr = 0.1"]) == 78
    assert "optimizer.lr" in capsys.readouterr().err


@pytest.mark.parametrize("args", ["--help plan", "help plan"])
def test_help_may_precede_the_command(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args.split()) == 0
    assert capsys.readouterr().out.split()[:3] == ["usage:", "accel-run", "plan"]


def loaded_by(lines: list[str], folder: Path, *names: str) -> dict[str, list[str]]:
    """Run the commands one after another in one process, and return which of these modules each one has loaded.

    The number of modules determines the time of a command (measured by scripts/measure/command_line.py).
    """
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *names], cwd=folder, input=json.dumps(lines), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    result: dict[str, list[str]] = json.loads(done.stdout)
    return result


LOADED = """
import contextlib, io, json, sys
from runner.cli import main
found = {}
for words in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main(words.split())
    found[words] = [name for name in sys.argv[1:] if name in sys.modules] + ["nothing"] * (not out.getvalue())
json.dump(found, sys.stdout)
"""


def test_help_imports_no_library(tmp_path: Path) -> None:
    lines = ["--help", *(f"{name} --help" for name in COMMANDS if name != "complete"), "completion zsh", "--version"]
    heavy = ("torch", "numpy", "hydra", "omegaconf", "rich", "psutil", "matplotlib", "yaml")
    assert loaded_by(lines, tmp_path, *heavy) == {line: [] for line in lines}


@pytest.mark.slow
def test_commands_without_need_for_torch_do_not_import_it(tmp_path: Path) -> None:
    lines = ["explain precision", "train lrr=3", "train updates=0 seed=-1 optimizer.lr=-1 precsion=fp32"]
    assert loaded_by(lines, tmp_path, "torch", "numpy", "matplotlib") == {line: [] for line in lines}


@pytest.mark.slow
def test_runs_and_status_do_not_import_torch(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "mine"
    (run / "checkpoints" / "update-0000000001").mkdir(parents=True)
    (run / "run.json").write_text('{"state": "done"}')
    code = "import sys; from runner.cli import main; main(['runs']); main(['status']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"update-0000000001: .*MANIFEST\.json", done.stdout)


@pytest.mark.slow
def test_exit_code_is_66_for_a_missing_task_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runner", "train", "--task", "./mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 66
    assert done.stderr.endswith(f" accel-run new {tmp_path}/mine.py\n")
