"""Arguments, exit codes and JSON of `accel-run doctor`, and cleanup when it is stopped."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.cli import main
from runner.host.process_tree import process_state
from runner.plan.inventory import Inventory
from runner.tools.doctor.checks import CHECKS
from runner.tools.doctor.findings import CheckResult
from tests.forkserver import ForkServer
from tests.nvml_stub import PAIR, NvmlStub
from tests.waiting import wait_until

# A check that hangs and leaves a process in a separate session and a file in the scratch folder.
HANGING = """
import os, signal, subprocess
from runner.tools.doctor import checks
from runner.tools.doctor.findings import DoctorCheck, ok

def hang(context):
    yield ok("", "began")
    sleeper = subprocess.Popen(["sleep", "601"], start_new_session=True)
    print("hanging", flush=True)
    (context.scratch / f"made-{sleeper.pid}").touch()
    while True:
        signal.pause()

checks.CHECKS["hang"] = DoctorCheck(hang, "because", 60.0)
"""
# Time limits that no check exceeds on a busy machine.
PATIENT = """
import dataclasses
from runner.tools.doctor import checks

for name, check in checks.CHECKS.items():
    checks.CHECKS[name] = dataclasses.replace(check, limit_s=200.0)
"""
FAILING = """
from runner.tools.doctor import checks
from runner.tools.doctor.findings import DoctorCheck, failed, warn, ok

checks.CHECKS["bad"] = DoctorCheck(lambda context: [failed("x", "is bad", "mend it")], "because")
checks.CHECKS["odd"] = DoctorCheck(lambda context: [warn("", "is odd", "look at it")], "because")
"""


def test_a_complete_run_has_a_finding_for_every_check(server: ForkServer, tmp_path: Path) -> None:
    names = ",".join(CHECKS)
    result = server.run(["doctor", "--json", f"checks=[{names}]"], tmp_path, before=PATIENT)
    report = json.loads(result.out)
    findings = [CheckResult(**values) for values in report["findings"]]

    assert result.err == ""
    assert result.code == report["exit_code"] == (69 if report["counts"]["FAIL"] else 0)
    assert {finding.check for finding in findings} == set(names.split(","))
    assert all(finding.why and finding.seen for finding in findings)
    assert all(finding.fix for finding in findings if finding.state in ("warn", "FAIL"))
    assert sum(report["counts"].values()) == len(findings)
    assert Inventory.from_json(json.dumps(report["hardware"])).cpu.logical_cores >= 1
    assert [finding.seen for finding in findings if finding.state == "FAIL"] == []
    assert {finding.subject for finding in findings if finding.check == "matmul"} >= {
        "cpu fp32",
        "cpu bf16",
        "cpu fp64",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == [".err", ".out"]


@pytest.mark.parametrize("args", ["checks=[]"])
def test_no_requested_check_is_skipped_silently(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *args.split()]) == 78
    assert capsys.readouterr().err.startswith("accel-run: checks: ")


def test_a_failed_check_exits_with_69_and_prints_fixes(
    server: ForkServer, tmp_path: Path, screen: Callable[..., None]
) -> None:
    result = server.run("doctor checks=[odd,bad]", tmp_path, before=FAILING)

    assert result.code == 69
    assert result.err == ""
    screen(result.out, replace={r"in \d+\.\d s": "in N s", r"  \(\d+\.\d s\)": ""})


def test_warnings_exit_with_0(server: ForkServer, tmp_path: Path) -> None:
    assert server.run("doctor checks=[odd]", tmp_path, before=FAILING).code == 0


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_leaves_nothing(
    server: ForkServer, tmp_path: Path, short: Path, number: signal.Signals
) -> None:
    pid = server.start(["doctor", "checks=[hang]"], tmp_path, {"TMPDIR": str(short)}, HANGING)
    (made,) = wait_until(lambda: list(short.glob("*/made-*")), "the check hangs")
    sleeper = int(made.name.partition("-")[2])
    assert is_running(sleeper)
    os.kill(pid, number)
    result = server.wait()

    assert result.code == (130 if number == signal.SIGINT else 128 + number)
    assert result.err == "\naccel-run: interrupted\n"
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".err", ".out"]
    assert not list(short.iterdir())
    wait_until(lambda: not is_running(sleeper), "the process of the check has ended")


def test_a_read_only_folder_fails_with_an_alternative(server: ForkServer, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may change the user")
    result = server.run("doctor checks=[disk] --json", tmp_path, before="import os; os.setuid(65534)")
    (actual,) = json.loads(result.out)["findings"]

    assert (result.code, actual["state"]) == (69, "FAIL")
    assert str(tmp_path) in actual["seen"]
    assert " output_root=" in actual["fix"]


@pytest.mark.slow
def test_unusable_gpus_fail_with_the_reason(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    import subprocess
    import sys

    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA, which does not use the NVML stub")
    done = subprocess.run(
        [sys.executable, "-m", "runner", "doctor", "--json", "checks=[gpus,driver,numbering,processes]"],
        env=nvml_stub.environment(PAIR), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    gpus = [each for each in report["findings"] if each["check"] == "gpus"]

    assert done.returncode == 69
    assert [each["state"] for each in gpus] == ["FAIL", "FAIL"]
    assert "pytorch.org" in gpus[0]["fix"]
    assert [each["uuid"] for each in report["hardware"]["devices"]] == [PAIR["0.uuid"], PAIR["1.uuid"]]


def test_a_missing_device_fails(server: ForkServer, tmp_path: Path) -> None:
    result = server.run("doctor checks=[gpus] device=cuda:7", tmp_path)
    assert result.code == 69
    assert "FAIL  gpus           cuda:7: " in result.out


SLIPS = {
    "doctor --jsn": "accel-run: --jsn: unknown option\n           did you mean --json?\n",
    "doctor disk": (
        "accel-run: disk: is not a setting; settings have the form key=value\n           use checks=[disk]\n"
    ),
    "doctor check=disk": "accel-run: check=disk: unknown key\n           did you mean checks?\n",
    "doctor checks=[matmull]": "accel-run: checks: unknown check matmull\n           did you mean matmul?\n",
    "doctor device=gpu": 'accel-run: device=gpu: must be auto, cpu, cuda, cuda:N, mps or xpu, but is "gpu"\n',
}


@pytest.mark.parametrize("args", SLIPS)
def test_a_typo_gets_a_suggestion(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args.split()) == 78
    assert capsys.readouterr() == ("", SLIPS[args])


def test_the_checks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "checks=help"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(CHECKS)


def test_the_running_check_is_shown_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.tools.doctor.display import DoctorDisplay
    from runner.tools.doctor.findings import ok

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    reader, writer = pty.openpty()
    with open(writer, "w") as terminal:  # noqa: PTH123 - a descriptor
        screen = DoctorDisplay(terminal, terminal)
        screen.show_status("matmul", "cpu fp32", 3.2)
        screen.show(ok("cpu fp32", "95 GFLOP/s"))
        shown = ""
        while "95 GFLOP/s" not in shown:  # split, because the output arrives in pieces
            shown += os.read(reader, 65536).decode()
    os.close(reader)

    assert "matmul         cpu fp32 ... 3 s" in shown
    assert shown.index("... 3 s") < shown.index("\r\x1b[K", 5) < shown.index("95 GFLOP/s")
    assert "\x1b[32mok" in shown


def test_findings_are_wrapped_but_commands_are_not() -> None:
    from runner.tools.doctor.display import DoctorDisplay
    from runner.tools.doctor.findings import warn

    fix = f"pip install {'package ' * 12}".strip()
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with open(writer, "w") as terminal:  # noqa: PTH123 - a descriptor
        finding = warn("disk", "a file system without space " * 4, fix, why="checkpoints need space " * 4)
        display = DoctorDisplay(terminal)
        display.show(finding)
        display.show_summary([finding], 1.0)
        shown = ""
        while "skip, in" not in shown:
            shown += os.read(reader, 65536).decode()
    os.close(reader)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert [line.strip() for line in lines if len(line) > 60] == [f"fix  {fix}"]


def test_a_closed_pipe_is_not_an_error() -> None:
    from runner.tools.doctor.display import DoctorDisplay
    from runner.tools.doctor.findings import ok

    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:  # noqa: PTH123 - a descriptor
        with pytest.raises(BrokenPipeError):  # the command line ignores SIGPIPE
            DoctorDisplay(pipe).show(ok("cpu fp32", "95 GFLOP/s"))
        os.dup2(os.open(os.devnull, os.O_WRONLY), pipe.fileno())  # so that closing the stream can flush it


def is_running(pid: int) -> bool:
    return process_state(pid) not in ("", "Z")
