"""Shell completion: which candidates are offered, without an import of torch, and completion in real shells."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runner.cli import main
from runner.commands import COMMANDS
from runner.commands.benchmark import COMMAND_KEYS
from runner.commands.complete import candidates
from runner.commands.completion import SCRIPTS
from runner.config.options import GROUPS, list_options
from runner.tools.measure.suites import SUITES, ladder
from runner.tools.measure.technique import load_techniques

TASK = """
SETTINGS = {}
def build(*, hidden: int = 8, kind: Literal["wide", "deep"] = "wide"): ...
class Mine:
    def predict(self, model, generator, *, colour: bool = True): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a task, two runs and the user's configuration files."""
    for name, record in {"first": {}, "second": {"task_file": str(tmp_path / "my_task.py")}}.items():
        run = tmp_path / "outputs" / name
        run.mkdir(parents=True)
        (run / "run.json").write_text(json.dumps(record))
        os.utime(run / "run.json", (1e9 + len(name), 1e9 + len(name)))
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "with space").mkdir()
    (tmp_path / "mine" / "optimizer").mkdir(parents=True)
    (tmp_path / "mine" / "benchmark" / "technique").mkdir(parents=True)
    (tmp_path / "mine" / "benchmark" / "technique" / "quick.yaml").write_text("overrides: [precision=bf16]\n")
    (tmp_path / "mine" / "optimizer" / "heavy.yaml").write_text("option: sgd\nmomentum: 0.99\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complete_line(line: str) -> list[str]:
    """Return the candidates for the last word of a line whose arguments contain no spaces."""
    return candidates(line.split(" ")[1:])


# line: its candidates
OFFERS = {
    "accel-run t": "train tune",
    "accel-run in": "inference",
    "accel-run search tri": "trials=",
    "accel-run search goal=": "goal=min goal=max",
    "accel-run i": "inference import",
    "accel-run com": "completion",
    "accel-run r": "resume runs report",
    "accel-run --": "--help --version",
    "accel-run frobnicate x": "",
    "accel-run completion ": "bash zsh fish",
    "accel-run completion bash ": "",
    "accel-run new ": "",
    "accel-run train --": "--task --config-dir --help",
    "accel-run train -": "--task --config-dir -m --help",
    "accel-run status -": "--help",
    "accel-run train prec": "precision= precision.",
    "accel-run train precision=fp16 prec": "precision.",
    "accel-run train precision=": "precision=auto precision=bf16 precision=fp16 precision=fp32 precision=tf32",
    "accel-run train precision=f": "precision=fp16 precision=fp32",
    "accel-run train +hardware=t": "+hardware=t4",
    "accel-run train +hard": "+hardware=",
    "accel-run train optimizer.l": "optimizer.lr= optimizer.lr_scales= optimizer.library=",
    "accel-run train optimizer.kernel=f": "optimizer.kernel=fused optimizer.kernel=foreach optimizer.kernel=for-loop",
    "accel-run train optimizer.decay_1d=": "optimizer.decay_1d=true optimizer.decay_1d=false",
    "accel-run train optimizer.m": "optimizer.max_update= optimizer.momentum= optimizer.momentum_decay=",
    "accel-run train precision=fp16 precision.g": "precision.growth_factor= precision.growth_interval=",
    "accel-run train hardware=t4 precision.g": "precision.growth_factor= precision.growth_interval=",
    "accel-run train --config-dir mine optimizer=h": "optimizer=heavy",
    "accel-run train --config-dir=mine optimizer=h": "optimizer=heavy",
    "accel-run train ep": "epochs=",
    "accel-run train --task ": "",
    "accel-run infer --task my_task.py inference.c": "inference.colour=",
    "accel-run infer --task my_task.py inference.colour=t": "inference.colour=true",
    "accel-run train updates=1 upd": "",
    "accel-run train micro_batch_size=": "micro_batch_size=auto",
    "accel-run train device=c": "device=cpu device=cuda",
    "accel-run train max_grad_norm=": "max_grad_norm=null",
    "accel-run train dataloader.num_workers=": "dataloader.num_workers=auto",
    "accel-run train task.si": "task.size=",
    "accel-run train task.size=t": "task.size=tiny",
    "accel-run train --task my_task.py task.": "task.hidden= task.kind=",
    "accel-run train --task my_task.py task.kind=": "task.kind=wide task.kind=deep",
    "accel-run train run=": "run=second run=first",
    "accel-run train run=f": "run=first",
    "accel-run train resume=": "resume=auto resume=fresh resume=second resume=first",
    "accel-run train -m precision=fp32,b": "precision=fp32,bf16",
    "accel-run monitor ": "seconds= interval_s= log_dir= run=",
    "accel-run monitor --": "--json --help",
    "accel-run monitor --json seconds=3 --": "--help",
    "accel-run monitor run=": "run=last run=second run=first",
    "accel-run status ": "last second first output_root=",
    "accel-run status first ": "output_root=",
    "accel-run status output_root=elsewhere ": "last",
    "accel-run runs ": "output_root=",
    "accel-run resume se": "second seed=",
    "accel-run resume run=": "run=last run=second run=first",
    "accel-run resume -": "--task --config-dir --help",
    "accel-run runs -": "--json --help",
    "accel-run report ": "last second first out= output_root= every_s=",
    "accel-run report first ": "out= output_root= every_s=",
    "accel-run export ": "last second first format= checkpoint= output_root=",
    "accel-run evaluate first checkpoint=": "checkpoint=best checkpoint=last",
    "accel-run doctor -": "--task --config-dir --json --help",
    "accel-run doctor f": "first_contact",
    "accel-run doctor first_contact optimizer.l": "optimizer.lr= optimizer.lr_scales= optimizer.library=",
    "accel-run doctor checks=[disk,m": "checks=[disk,memory checks=[disk,matmul",
    "accel-run inference run=": "run=last run=second run=first",
    "accel-run infer run=first inference.p": "inference.prompt=",
    "accel-run infer run=first run": "",
    "accel-run infer s": "second sampler= scheduler= sharpness= seed= sampler. scheduler. sharpness.",
    "accel-run explain optim": "optimizer optimizer.",
    "accel-run benchmark f": "fp16 flash fused folder=",
    "accel-run benchmark fp16 f": "flash fused folder=",
    "accel-run benchmark re": "reset resume= resume_allow=",
    "accel-run benchmark --config-dir mine qui": "quick",
    "accel-run benchmark suite=l": "suite=ladder suite=loader",
    "accel-run benchmark suite=loader w": "workers= watchdog= weights= watchdog. weights.",
    "accel-run benchmark st": "steps=",
    "accel-run benchmark precision=f": "precision=fp16 precision=fp32",
    "accel-run benchmark --j": "--json",
    "accel-run explain optimizer.lr": "optimizer.lr optimizer.lr_scales",
    "accel-run explain optimizer.lr +hardware=a": "+hardware=a100 +hardware=auto",
}


def test_training_commands_complete_only_resumable_runs(folder: Path) -> None:
    """`train run=TRIAL` would start the trial again, outside its sweep."""
    trial = folder / "outputs" / "grid" / "grid-1"
    trial.mkdir(parents=True)
    (trial / "run.json").write_text("{}")
    (trial.parent / "sweep.json").write_text("{}")
    both = ["second", "first"]
    for line, runs in {"resume run=g": ["grid-1"], "train run=": both, "both run=": both}.items():
        assert complete_line(f"accel-run {line}") == [f"run={run}" for run in runs]
    for line in ("train -m seed=1,2 run=", "search optimizer.lr=log(1e-4,1e-2) run="):
        assert complete_line(f"accel-run {line}") == ["run=grid"]


@pytest.mark.parametrize("line", OFFERS)
def test_completion_offers_all_candidates(line: str, folder: Path) -> None:
    assert " ".join(complete_line(line)) == OFFERS[line]


def test_completion_offers_exactly_the_listed_commands() -> None:
    assert complete_line("accel-run ") == [name for name, (_, summary) in COMMANDS.items() if summary]


@pytest.mark.parametrize("suite", SUITES)
def test_arguments_and_keys_of_a_suite_are_completed(suite: str, folder: Path) -> None:
    result = complete_line(f"accel-run benchmark suite={suite} ")

    own = result[: result.index("precision=")]
    args = [word for word in own if not word.endswith("=")]
    assert args == [*SUITES[suite].positional, *(load_techniques(None) if suite == "ladder" else [])]
    assert set(own) - set(args) == {f"{key}=" for key in (*COMMAND_KEYS, *SUITES[suite].options)} - {"suite="}


def test_ladder_arguments_match_its_techniques() -> None:
    assert ("all", *ladder.ACTIONS) == SUITES["ladder"].positional


@pytest.mark.parametrize("group", GROUPS)
def test_all_options_of_a_group_are_completed(group: str) -> None:
    assert complete_line(f"accel-run train {group}=") == [f"{group}={option}" for option in list_options(group)]


def test_arguments_may_be_quoted(folder: Path) -> None:
    (folder / "with space" / "task.py").write_text(TASK)
    file = "with space/task.py"
    assert candidates(["train", "--task", f"'{file}'", "task.k"]) == ["task.kind="]


@pytest.mark.parametrize("content", ["def build(", "\0", "build = 3"])
def test_completion_ignores_an_invalid_task_file(
    content: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my_task.py").write_text(content)
    assert main(["complete", "--", "train", "--task", "my_task.py", "task."]) == 0
    assert capsys.readouterr() == ("", "")


def test_completion_ignores_help_flags_on_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "--", "train", "--help", "precision=b"]) == 0
    assert capsys.readouterr() == ("precision=bf16\n", "")


def test_the_internal_completion_command_is_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    assert "\n  complete " not in capsys.readouterr().out


@pytest.mark.parametrize("args", ["", "zhs", "bash zsh"])
def test_exit_code_is_78_for_an_unknown_shell(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *args.split()]) == 78
    assert "zsh" in capsys.readouterr().err


LINES = (
    "train optim", "train precision=", "train optimizer.", "inference inference.", "status ", "train --task ",
    "benchmark ",
)  # fmt: skip


def test_completion_imports_no_library_and_reads_few_files(folder: Path) -> None:
    """Users wait for completions, whose time depends on what is loaded and read (scripts/measure/command_line.py)."""
    code = """if True:
        import collections, contextlib, io, json, sys
        import runner.cli as cli
        events, found = collections.Counter(), {}
        sys.addaudithook(lambda event, _: events.update([event]))
        for line in json.loads(sys.argv[1]):
            events.clear()
            with contextlib.redirect_stdout(io.StringIO()):
                cli.main(["complete", "--", *line.split(" ")])
            heavy = [name for name in ("torch", "hydra", "omegaconf", "numpy", "rich") if name in sys.modules]
            found[line] = [heavy, events["open"], events["subprocess.Popen"]]
        print(json.dumps(found))
    """
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(LINES)], cwd=folder, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    for line, (heavy, opened, started) in json.loads(done.stdout).items():
        assert (heavy, started) == ([], 0), line
        assert opened < 400, line


# ---------------------------------------------------------------- in shells


def run_in_shell(shell: str, script: str, folder: Path) -> str:
    """Return the output of a script in a shell that has the completion file, and accel-run on its PATH."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    places = folder / "bin"
    places.mkdir()
    root = Path(__file__).parents[2]
    (places / "accel-run").write_text(f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} -m runner "$@"\n')
    (places / "accel-run").chmod(0o755)
    (folder / f"completion.{shell}").write_text(SCRIPTS[shell])
    plain = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    environment = {"PATH": f"{places}:{os.environ['PATH']}", "HOME": str(folder), "TERM": "dumb"}
    done = subprocess.run(
        [program, *plain, "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


# readline also splits words at = and :, and replaces only the last piece.
IN_BASH = {
    "accel-run t": (["accel-run", "t"], "train tune"),
    "accel-run ": (["accel-run", ""], " ".join(name for name, (_, summary) in COMMANDS.items() if summary)),
    "accel-run train optim": (["accel-run", "train", "optim"], "optimizer= optimizer."),
    "accel-run train precision=": (["accel-run", "train", "precision", "="], "auto bf16 fp16 fp32 tf32"),
    "accel-run train precision=f": (["accel-run", "train", "precision", "=", "f"], "fp16 fp32"),
    "accel-run train optimizer=sgd optimizer.m": (
        ["accel-run", "train", "optimizer", "=", "sgd", "optimizer.m"],
        "optimizer.max_update= optimizer.momentum= optimizer.momentum_decay=",
    ),
    "accel-run train device=cuda:0 optimizer=sg": (
        ["accel-run", "train", "device", "=", "cuda", ":", "0", "optimizer", "=", "sg"], "sgd",
    ),
    "accel-run train updates= ": (["accel-run", "train", "updates", "=", ""], None),
    "accel-run inference run=": (["accel-run", "inference", "run", "="], "last second first"),
    "accel-run status fi": (["accel-run", "status", "fi"], "first"),
    "accel-run train frob": (["accel-run", "train", "frob"], ""),
}  # fmt: skip


@pytest.mark.slow
def test_completion_works_in_bash(folder: Path) -> None:
    script = "source ./completion.bash\n"
    for args, _ in IN_BASH.values():
        quoted = " ".join(f"'{word}'" for word in args)
        script += f"COMP_WORDS=({quoted}); COMP_CWORD={len(args) - 1}; _accel_run accel-run '{args[-1]}' '{args[-2]}'\n"
        script += 'echo "${COMPREPLY[*]}"\n'
    answers = run_in_shell("bash", script, folder).splitlines()
    assert len(answers) == len(IN_BASH)
    for (line, (_, expected)), answer in zip(IN_BASH.items(), answers, strict=True):
        if expected is None:
            assert "precision= parallelism= " in answer, line
        else:
            assert answer == expected, line


def test_bash_registers_the_completion_for_accel_run(folder: Path) -> None:
    shown = run_in_shell("bash", "source ./completion.bash; complete -p accel-run", folder)
    assert shown.split()[-3:] == ["-F", "_accel_run", "accel-run"]


def test_completion_works_in_zsh(folder: Path) -> None:
    """The test replaces compadd, because real completion needs a terminal."""
    script = "compdef() { registered=$2 }\nsource ./completion.zsh\necho $registered\n"
    script += 'compadd() { while [[ $1 != -- ]]; do shift; done; shift; print -rn -- "${@:+$* }" }\n'
    lines = {
        "accel-run t": "train tune",
        "accel-run train precision=f": "precision=fp16 precision=fp32",
        "accel-run train optim": "optimizer= optimizer.",
        "accel-run frobnicate x": "",
    }
    for line in lines:
        *before, last = line.split(" ")
        script += (
            f"words=({' '.join(before)} '{last}'); CURRENT={len(before) + 1}; PREFIX='{last}'; _accel_run; print\n"
        )
    registered, *answers = run_in_shell("zsh", script, folder).splitlines()
    assert registered == "accel-run"
    assert [answer.strip() for answer in answers] == list(lines.values())


def test_completion_works_in_fish(folder: Path) -> None:
    lines = {
        "accel-run t": "train tune",
        "accel-run train precision=f": "precision=fp16 precision=fp32",
        "accel-run train ": None,
        "accel-run train optim": "optimizer= optimizer.",
        "accel-run frobnicate x": "",
    }
    script = "source ./completion.fish\n"
    script += "".join(f"echo (complete -C '{line}' | string join ' ')\n" for line in lines)
    answers = run_in_shell("fish", script, folder).splitlines()
    for (line, expected), answer in zip(lines.items(), answers, strict=True):
        assert sorted(answer.split()) == sorted(expected.split()) if expected is not None else "precision=" in answer, (
            line
        )
