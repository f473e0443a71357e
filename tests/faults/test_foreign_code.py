"""Regression tests with files of an untrusted folder that could once execute a shell command or Python code."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from runner.base.errors import ConfigError, SecurityRefusal
from runner.commands.complete import candidates
from runner.config.configuration import compose
from runner.config.request import Request
from runner.durable.run_request import load_run_request
from runner.launch.launcher import submit
from tests.faults.tallies import Tally
from tests.forkserver import ForkServer

TASK = Path(__file__).with_name("task_to_attack.py")
SBATCH = '#!/bin/bash\ncp -- "$1" "$PLAYED/script"\nbash -- "$1"\necho "Submitted batch job 42"\n'


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with an `sbatch` that runs its script, and return the folder."""
    for name in ("sbatch", "srun"):
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(SBATCH if name == "sbatch" else "#!/bin/bash\n")
        file.chmod(0o755)
    monkeypatch.setenv("PLAYED", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.sampled(2)
@pytest.mark.parametrize("key", ["output_root", "data.path", "weights", "launcher.partition", "launcher.account"])
def test_settings_cannot_inject_commands_into_job_scripts(cluster: Path, key: str, tally: Tally) -> None:
    for end in ("\n", "\r", "\x0b", "\x85", "\u2028"):
        for word in (f'{key}="x{end}touch PWNED{end}#"', f"{key}='x{end}touch PWNED{end}#'"):
            with pytest.raises(ConfigError) as caught:
                submit(compose(Request(("launcher=slurm", "run=a", word))))
            assert key in str(caught.value)
            tally.tried += 1
    assert not (cluster / "PWNED").exists()


def test_config_files_cannot_inject_commands_into_job_scripts(cluster: Path) -> None:
    (cluster / "conf" / "hardware").mkdir(parents=True)
    text = '# @package _global_\noutput_root: "o\\ntouch PWNED\\n#x"\nhardware: {title: x, devices: []}\n'
    file = cluster / "conf" / "hardware" / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        submit(compose(Request(("launcher=slurm", "run=a", "hardware=mine"), None, cluster / "conf")))
    assert [problem.where.partition("=")[0] for problem in caught.value.problems] == [f"{file}: output_root"]
    assert not (cluster / "PWNED").exists()


def test_folder_names_cannot_inject_commands_into_job_scripts(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cluster / "o\ntouch PWNED\n#x").mkdir()
    monkeypatch.chdir(cluster / "o\ntouch PWNED\n#x")
    with pytest.raises(ConfigError, match="printable"):
        submit(compose(Request(("launcher=slurm", "run=a"))))
    assert not list(cluster.rglob("PWNED"))


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["outputs/b/mt.py", "outputs/mt.py", "outputs/a/mt.py", "outputs/b/link.py"])
def test_a_run_cannot_load_a_task_file_below_the_output_root(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    args = f"train --task {TASK} device=cpu monitor=off updates=1 run=a"
    assert server.run(args, tmp_path).code == 0
    code = tmp_path / place
    code.parent.mkdir(exist_ok=True)
    evil = f"open({str(tmp_path / 'PWNED')!r}, 'w')\n{TASK.read_text()}"
    if code.name == "link.py":
        (tmp_path / "elsewhere.py").write_text(evil)
        code.symlink_to("../../elsewhere.py")
    else:
        code.write_text(evil)
    run_json = tmp_path / "outputs" / "a" / "run.json"
    for named in (str(code), place):
        run_json.write_text(json.dumps(json.loads(run_json.read_text()) | {"task_file": named}))
        result = server.run("inference run=a device=cpu", tmp_path)
        assert result.code == 89, result
        assert not (tmp_path / "PWNED").exists()
    shutil.rmtree(tmp_path / "outputs" / "b", ignore_errors=True)
    run_json.write_text(json.dumps(json.loads(run_json.read_text()) | {"task_file": str(TASK)}))
    monkeypatch.chdir(tmp_path)
    from runner.durable.directory import RunDirectory

    directory = RunDirectory.find(Path("outputs"), "a")
    assert load_run_request(directory, Path("outputs"), Request()).task_file == TASK
    with pytest.raises(SecurityRefusal):
        load_run_request(directory, tmp_path, Request())  # the run is not in this output root


HOSTILE = (
    "mine$(touch X)",
    "a`id`",
    "a;id",
    "\x1b[2Jx",
    "a\nb",
    "-rf",
    "a b",
    "a|b",
    "a&b",
    "a'b",
    'a"b',
    "$HOME",
    "a*",
)


def test_completion_offers_shell_safe_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "optimizer").mkdir(parents=True)
    for name in (*HOSTILE, "good-1.0"):
        (tmp_path / "conf" / "optimizer" / f"{name}.yaml").write_text("option: adamw\n")
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / name / "run.json").write_text("{}")
    kinds = ", ".join(map(repr, (*HOSTILE, "good-1.0")))
    (tmp_path / "task.py").write_text(f"from typing import Literal\ndef build(*, kind: Literal[{kinds}] = 'x'): ...\n")
    for args in (
        ["train", "--config-dir", "conf", "optimizer="],
        ["train", "resume="],
        ["train", "--task", "task.py", "task.kind="],
        ["inference", "run="],
        ["status", ""],
    ):
        offered = candidates(args)
        assert any("good-1.0" in word for word in offered), args
        for word in offered:
            assert not set(word) & set("$`;|&'\"\\\n\x1b* "), (args, word)
            assert not word.startswith("-"), (args, word)
            tally.tried += 1
