"""The shell scripts: output, exit codes, and the environment, which is created once."""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from runner.commands import COMMANDS
from tests.waiting import wait_until

MODES = [name for name, (_, summary) in COMMANDS.items() if summary]
ROOT = Path(__file__).parents[2]
SCRIPTS = [
    *sorted((ROOT / "scripts").glob("*.sh")),
    ROOT / "scripts" / "check",
    ROOT / "scripts" / "task_table",
    ROOT / ".ci" / "run",
]

# A stub for Python. It creates an "environment" of itself and accel-run, and logs calls of venv and pip. A file named
# `break` or `hang` beside the stub makes pip fail or hang; a file named `go` ends the hang.
FAKE_PYTHON = """#!/bin/bash
here=@HERE@
case "$1 ${2:-}" in
"--version ") echo "Python 3.12.0 (stub)" ;;
"-c "*) [[ ! -e $here/old ]] ;;
"-m venv")
    echo "venv" >>"$here/calls"
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    cp "$here/accel-run" "$3/bin/accel-run"
    ;;
"-m pip")
    echo "pip ${*: -1}" >>"$here/calls"
    if [[ -e $here/break ]]; then echo "no such version" >&2; exit 1; fi
    if [[ -e $here/hang ]]; then echo $$ >"$here/hanging"; until [[ -e $here/go ]]; do sleep 0.01; done; fi
    ;;
*) exit 99 ;;
esac
"""
FAKE_ACCEL_RUN = """#!/bin/bash
printf '%s\\n' "$PWD" "${OMP_NUM_THREADS-unset}" "$@"
case "${2:-}" in
exit=*) exit "${2#exit=}" ;;
wait) trap 'exit 75' TERM; echo ready; while :; do sleep 0.02; done ;;
esac
"""


@dataclass(frozen=True)
class Checkout:
    """A copy of the scripts with a stub instead of Python."""

    root: Path
    stub: Path
    elsewhere: Path

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.root / "scripts" / script, *arguments],
            cwd=self.elsewhere,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def start(self, script: str, *arguments: str, **streams: int) -> subprocess.Popen[bytes]:
        path = self.root / "scripts" / script
        return subprocess.Popen([path, *arguments], cwd=self.elsewhere, env=self.environment, **streams)

    @property
    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ACCEL_RUN", "OMP"))}
        return inherited | {"ACCEL_RUN_PYTHON": str(self.stub / "python")}

    def calls(self) -> list[str]:
        """Return and clear the log of the stub."""
        calls = self.stub / "calls"
        messages = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return messages


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout_copy = Checkout(tmp_path / "a check out", tmp_path / "stub", tmp_path / "a folder")
    for folder in (checkout_copy.root, checkout_copy.stub, checkout_copy.elsewhere):
        folder.mkdir()
    shutil.copytree(ROOT / "scripts", checkout_copy.root / "scripts")
    shutil.copy(ROOT / "pyproject.toml", checkout_copy.root)
    for name, text in {
        "python": FAKE_PYTHON.replace("@HERE@", str(checkout_copy.stub)),
        "accel-run": FAKE_ACCEL_RUN,
    }.items():
        (checkout_copy.stub / name).write_text(text)
        (checkout_copy.stub / name).chmod(0o755)
    return checkout_copy


# Creating the environment


def test_the_environment_is_created_once_with_torch_first(checkout: Checkout) -> None:
    first = checkout.run("setup.sh", "dev")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "", "scripts print only the output of accel-run"
    assert all(line.startswith("setup: ") for line in first.stderr.splitlines())
    assert checkout.calls() == ["venv", "pip torch", f"pip {checkout.root}[dev]"]
    assert checkout.run("setup.sh", "dev").returncode == 0
    assert checkout.calls() == []


def test_a_second_setup_only_compares_the_stamp(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run("setup.sh", "dev")
    checkout.calls()
    few = tmp_path / "few"
    few.mkdir()
    for command in ("cat", "dirname", "readlink", "sha256sum"):
        (few / command).symlink_to(shutil.which(command) or "")
    done = subprocess.run(
        [shutil.which("bash") or "", checkout.root / "scripts" / "setup.sh", "--quiet", "dev"],
        env={**checkout.environment, "PATH": str(few)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert checkout.calls() == []


def test_new_extras_are_added_to_installed_extras(checkout: Checkout) -> None:
    checkout.run("setup.sh", "dev")
    checkout.calls()
    checkout.run("setup.sh", "plots")
    assert checkout.calls() == ["pip torch", f"pip {checkout.root}[dev,plots]"]
    checkout.run("setup.sh", "dev")
    checkout.run("setup.sh")
    assert checkout.calls() == []


def test_a_matching_torch_is_not_installed_again(checkout: Checkout) -> None:
    checkout.run("setup.sh")
    version = re.search(r"^torch==(.*)$", (ROOT / "scripts" / "constraints.txt").read_text(), re.MULTILINE)
    assert version is not None
    packages = checkout.root / ".venv" / "lib" / "python3.12" / "site-packages"
    packages.mkdir(parents=True)
    other = packages / f"torch-{version[1]}9.dist-info"
    other.mkdir()
    checkout.calls()
    assert "installing torch" in checkout.run("setup.sh", "plots").stderr
    assert checkout.calls() == ["pip torch", f"pip {checkout.root}[plots]"]
    other.rename(packages / f"torch-{version[1]}+cpu.dist-info")
    assert "installing torch" not in checkout.run("setup.sh", "dev").stderr
    assert checkout.calls() == [f"pip {checkout.root}[dev,plots]"]


def test_run_installs_packages_for_task_data(checkout: Checkout) -> None:
    assert checkout.run("run.sh", "train", "task=cape", "updates=1").returncode == 0
    assert checkout.calls() == ["venv", "pip torch", f"pip {checkout.root}[cape]"]
    for word in ("task=gpt", "task=c.pe", "updates=2"):
        assert checkout.run("run.sh", "train", word).returncode == 0
    assert checkout.calls() == []


@pytest.mark.parametrize(("mode", "extra"), [("search", "search")])
def test_run_installs_packages_for_a_command(checkout: Checkout, mode: str, extra: str) -> None:
    assert checkout.run("run.sh", mode).returncode == 0
    assert checkout.calls() == ["venv", "pip torch", f"pip {checkout.root}[{extra}]"]


def test_the_help_of_setup_lists_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    head = (ROOT / "scripts" / "setup.sh").read_text().partition("\nset -")[0]
    assert set(extras) <= set(re.findall(r"[a-z0-9]+", head))


def test_an_unknown_extra_is_rejected(checkout: Checkout) -> None:
    done = checkout.run("setup.sh", "plot")
    assert done.returncode == 64
    assert "plots" in done.stderr
    assert checkout.calls() == []


@pytest.mark.parametrize("changed", ["pyproject.toml", "scripts/constraints.txt"])
def test_a_changed_dependency_is_installed(checkout: Checkout, changed: str) -> None:
    checkout.run("setup.sh")
    checkout.calls()
    with (checkout.root / changed).open("a") as file:
        file.write("# another\n")
    checkout.run("setup.sh")
    assert checkout.calls() == ["pip torch", f"pip {checkout.root}"]


def test_a_moved_checkout_is_reinstalled(checkout: Checkout) -> None:
    checkout.run("setup.sh", "dev")
    checkout.calls()
    moved = Checkout(checkout.root.rename(checkout.root.parent / "moved"), checkout.stub, checkout.elsewhere)
    moved.run("setup.sh")
    assert moved.calls() == ["pip torch", f"pip {moved.root}[dev]"]


def test_the_next_call_repairs_a_failed_install(checkout: Checkout) -> None:
    (checkout.stub / "break").touch()
    done = checkout.run("setup.sh")
    assert done.returncode == 71
    assert "no such version" in done.stderr
    (checkout.stub / "break").unlink()
    checkout.calls()
    assert checkout.run("setup.sh").returncode == 0
    assert checkout.calls() == ["pip torch", f"pip {checkout.root}"]


def test_a_killed_install_is_restarted(checkout: Checkout) -> None:
    (checkout.stub / "hang").touch()
    killed = checkout.start("setup.sh", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    hanging = checkout.stub / "hanging"
    wait_until(lambda: hanging.exists() and hanging.read_text().strip() != "")
    killed.kill()
    killed.wait()
    os.kill(int(hanging.read_text()), signal.SIGKILL)
    (checkout.stub / "hang").unlink()
    checkout.calls()
    assert checkout.run("setup.sh").returncode == 0
    assert checkout.calls() == ["pip torch", f"pip {checkout.root}"]


def test_two_concurrent_calls_install_once(checkout: Checkout) -> None:
    (checkout.stub / "hang").touch()
    first = checkout.start("setup.sh", stderr=subprocess.DEVNULL)
    wait_until((checkout.stub / "hanging").exists)
    second = checkout.start("setup.sh", stderr=subprocess.PIPE)
    assert second.stderr is not None
    with second.stderr:
        assert second.stderr.readline(), "the second call prints that it waits"
        (checkout.stub / "go").touch()
        assert [process.wait(timeout=60) for process in (first, second)] == [0, 0]
    assert checkout.calls() == ["venv", "pip torch", f"pip {checkout.root}"]


def test_an_outdated_python_is_reported(checkout: Checkout) -> None:
    (checkout.stub / "old").touch()
    done = checkout.run("setup.sh")
    assert done.returncode == 71
    assert str(checkout.stub / "python") in done.stderr


# run.sh


def test_usage_is_printed_without_a_mode_or_terminal(checkout: Checkout) -> None:
    done = checkout.run("run.sh")
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith("usage: ")
    assert checkout.calls() == []


@pytest.mark.parametrize("mode", ["trian", "@", "*", "task=gpt", "--version", "train inference"])
def test_an_unknown_mode_is_rejected(checkout: Checkout, mode: str) -> None:
    done = checkout.run("run.sh", mode)
    assert (done.returncode, done.stdout) == (64, "")
    first, *others = done.stderr.splitlines()
    assert f" {mode};" in first
    assert len(others) < 10, "the message must fit a small terminal"
    assert set(MODES) <= set(" ".join(others).split()) or ["train", mode] in [line.split()[1:] for line in others]
    assert checkout.calls() == []


def test_a_mode_is_suggested_for_settings_without_a_mode(checkout: Checkout) -> None:
    done = checkout.run("run.sh", "+hardware=t4", "run=a b")
    assert done.returncode == 64
    lines = [shlex.split(line)[1:] for line in done.stderr.splitlines()]
    assert ["train", "+hardware=t4", "run=a b"] in lines


def test_help_installs_nothing(checkout: Checkout) -> None:
    done = checkout.run("run.sh", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert checkout.calls() == []


def test_every_command_of_accel_run_is_a_mode(checkout: Checkout) -> None:
    shown = checkout.run("run.sh", "--help").stdout
    for command in MODES:
        assert f"\n  {command} " in shown


def test_the_first_call_runs_setup_and_the_command(checkout: Checkout) -> None:
    done = checkout.run("run.sh", "train", "task.name=a b", "+hardware=t4", "x=*")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(checkout.elsewhere),
        "unset",
        *("train", "task.name=a b", "+hardware=t4", "x=*"),
    ]


def test_the_mode_infer_runs_inference(checkout: Checkout) -> None:
    assert checkout.run("run.sh", "infer").stdout.splitlines()[2:] == ["inference"]


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("code", [0, 1, 75, 78, 130])
def test_exit_codes_are_passed_on(checkout: Checkout, code: int) -> None:
    assert checkout.run("run.sh", "status", f"exit={code}").returncode == code


def test_a_failed_setup_ends_the_run(checkout: Checkout) -> None:
    (checkout.stub / "break").touch()
    done = checkout.run("run.sh", "train")
    assert (done.returncode, done.stdout) == (71, "")


def test_signals_reach_accel_run(checkout: Checkout) -> None:
    process = checkout.start("run.sh", "train", "wait", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    with process.stdout:
        assert any(line == b"ready\n" for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 75


@pytest.mark.parametrize("answer", [str(MODES.index("inference") + 1), "inference"])
def test_on_a_terminal_a_menu_is_shown(checkout: Checkout, answer: str) -> None:
    shown, code = run_at_a_terminal(checkout, f"99\nnonsense\n\n{answer}\n")
    assert code == 0
    assert " 1  train " in shown
    assert shown.count("scripts/run.sh") == 1, "the equivalent command"
    assert shown.splitlines()[-1] == "inference"


def test_leaving_the_menu_selects_no_mode(checkout: Checkout) -> None:
    shown, code = run_at_a_terminal(checkout, "\x04")
    assert code == 64
    assert "usage: " in shown
    assert checkout.calls() == []


# prove_tests.sh

FAKE_TEST = """#!/bin/bash
printf '%s %s\\n' "$(nproc)" "$(wc -w </proc/$PPID/task/$PPID/children)" >>"$PWD/seen"
echo "$*" >>"$PWD/given"
[[ $(wc -l <"$PWD/seen") != 2 ]] || { echo "FAILED tests/test_x.py::test_y - no"; exit 1; }
"""


@pytest.fixture
def proved(checkout: Checkout) -> Checkout:
    (checkout.root / "scripts" / "test.sh").write_text(FAKE_TEST)
    return checkout


def test_prove_tests_repeats_tests_under_different_loads(proved: Checkout) -> None:
    done = proved.run("prove_tests.sh", "5", "tests/plan", "-x")
    seen = [tuple(map(int, line.split())) for line in (proved.root / "seen").read_text().splitlines()]
    assert [children for _, children in seen] == [1, 1, 1, 4, 1], (
        "the test process and the processes that generate load"
    )
    assert seen[-1][0] == 1
    assert (proved.root / "given").read_text() == "tests/plan -x\n" * 5
    assert done.returncode == 1
    assert done.stdout.count("test_y") == 1
    assert len([line for line in done.stdout.splitlines() if line.startswith("run ")]) == 5
    log = Path(done.stdout.partition("log: ")[2].splitlines()[0])
    assert "test_y" in log.read_text()
    shutil.rmtree(log.parent)


def test_prove_tests_leaves_no_log_if_all_tests_pass(
    proved: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "logs"))
    done = proved.run("prove_tests.sh", "1")
    assert done.returncode == 0, done.stdout
    assert not list((tmp_path / "logs").iterdir())


@pytest.mark.parametrize("number", ["0", "ten", "-1"])
def test_invalid_repetitions_are_rejected(number: str, proved: Checkout) -> None:
    assert proved.run("prove_tests.sh", number).returncode == 64
    assert not (proved.root / "seen").exists()


# File modes and run.sh at a terminal


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_reports_nothing() -> None:
    command = ["shellcheck", "--external-sources", *SCRIPTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_are_executable(script: Path) -> None:
    assert os.access(script, os.X_OK)


def run_at_a_terminal(checkout: Checkout, typed: str) -> tuple[str, int]:
    """Run run.sh without arguments on a terminal with this input; return its output and exit code."""
    ours, theirs = pty.openpty()
    process = checkout.start("run.sh", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, typed.encode())
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # EIO: the last process has closed the terminal
            break
    os.close(ours)
    return shown.decode().replace("\r\n", "\n"), process.wait(timeout=60)
