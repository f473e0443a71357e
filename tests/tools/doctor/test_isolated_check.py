"""A crash or hang of a check process is a finding with the name of the check, and does not affect other checks."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from runner.base.errors import ConfigError, Problem
from runner.host.process_tree import children, subreaper
from runner.tools.doctor.examine import Examination
from runner.tools.doctor.findings import CheckContext, CheckResult, DoctorCheck, failed, ok, skip, warn

SUBJECTS = ("one", "two", "three")
LIMIT_S = 10.0
HERE = "doctor/test_isolated_check.py"


class Clock:
    """A clock that advances only if the second subject of a check hangs, so no check times out on a busy machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def watch(self, name: str, subject: str, took_s: float) -> None:
        """Advance the clock. An examination calls this while it waits for a check."""
        if name.startswith("hang") and subject == "two":
            self.now += LIMIT_S


def check(function: Callable[[CheckContext], Iterator[CheckResult]]) -> DoctorCheck:
    return DoctorCheck(function, "because", LIMIT_S)


def run_all(folder: Path, **functions: Callable[[CheckContext], Iterator[CheckResult]]) -> dict[str, list[CheckResult]]:
    """Run these checks and return their findings. Fails if processes or files are left."""
    before, clock = children(), Clock()
    checks = {name: check(function) for name, function in functions.items()}
    examination = Examination(checks, "auto", folder / "outputs", checks=checks, clock=clock)
    findings = list(examination.findings(clock.watch))
    assert children() <= before
    assert list(folder.iterdir()) == []
    return {name: [finding for finding in findings if finding.check == name] for name in checks}


def breaking(end: Callable[[], object]) -> Callable[[CheckContext], Iterator[CheckResult]]:
    """Return a check of three subjects that calls `end` at the second subject."""

    def function(context: CheckContext) -> Iterator[CheckResult]:
        for subject in context.each(SUBJECTS, str):
            if subject == "two":
                end()
            yield ok(subject, "fine", size=1.0)

    return function


def fine(context: CheckContext) -> Iterator[CheckResult]:
    yield ok("", "fine")


def crash() -> None:
    ctypes.string_at(0)


def refuse() -> None:
    raise ConfigError(Problem("needs a compiler", "compile", "apt install g++"))


def hang() -> None:
    while True:
        signal.pause()


def with_a_child() -> None:
    """Crash, leaving two processes in separate sessions, one of which ignores signals."""
    for args in (["sleep", "600"], ["sh", "-c", "trap '' TERM INT; sleep 600"]):
        subprocess.Popen(args, start_new_session=True, stdout=subprocess.DEVNULL)
    crash()


ENDS: dict[str, tuple[Callable[[], object], str]] = {
    "raises": (lambda: {}["key"], "KeyError: 'key', at doctor/test_isolated_check.py:"),
    "rejects the machine": (refuse, "compile: needs a compiler"),
    "exits": (lambda: sys.exit(3), "SystemExit: 3"),
    "exits immediately": (lambda: os._exit(3), "exited with code 3"),
    "exits without a message": (lambda: os._exit(0), "exited with code 0"),
    "crashes": (crash, "crashed (SIGSEGV), at"),
    "aborts": (os.abort, "crashed (SIGABRT), at doctor/test_isolated_check.py:"),
    "is killed": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        "was killed by another process, possibly out of memory",
    ),
    "is stopped by a signal": (lambda: os.kill(os.getpid(), signal.SIGTERM), "crashed (SIGTERM)"),
    "leaves processes": (with_a_child, "crashed (SIGSEGV), at"),
}


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ENDS)
def test_an_early_exit_is_a_finding(name: str, tmp_path: Path) -> None:
    end, expected = ENDS[name]
    findings = run_all(tmp_path, broken=breaking(end), after=fine)
    one, two = findings["broken"]

    assert [(each.subject, each.state) for each in (one, two)] == [("one", "ok"), ("two", "FAIL")]
    assert [each.state for each in findings["after"]] == ["ok"]
    assert expected in two.seen
    assert two.fix
    assert two.why == "because"


@pytest.mark.slow
def test_a_crashing_check_does_not_end_other_checks(tmp_path: Path) -> None:
    findings = run_all(tmp_path, crashes=breaking(crash), hangs=breaking(hang), after=fine)

    assert [each.state for each in findings["after"]] == ["ok"]


def test_a_hang_is_reported_with_duration_and_line(tmp_path: Path) -> None:
    """By the real clock, the process writes its stack before the limit. Then the virtual clock reaches the limit."""
    written = tmp_path / "written"

    class Late(Clock):
        def watch(self, name: str, subject: str, took_s: float) -> None:
            self.now += 3.0 * written.exists()

    def hang() -> None:
        while True:
            signal.sigtimedwait([signal.SIGUSR2], 0.05)
            if os.fstat(2).st_size:
                written.touch()

    clock, checks = Late(), {"hangs": DoctorCheck(breaking(hang), "because", limit_s=3.0)}
    one, two = Examination(checks, "auto", tmp_path, checks=checks, clock=clock).findings(clock.watch)

    assert (one.state, two.state, two.subject) == ("ok", "FAIL", "two")
    assert re.search(r"\b3 s\b", two.seen)
    assert re.search(rf" {HERE}:\d+ \(hang\)$", two.seen)


def test_a_check_times_out_at_its_limit(tmp_path: Path) -> None:
    took = []

    class Slow(Clock):
        def watch(self, name: str, subject: str, took_s: float) -> None:
            took.append(took_s)
            self.now += LIMIT_S / 4

    clock = Slow()
    checks = {"hangs": check(breaking(hang))}
    findings = list(Examination(checks, "auto", tmp_path, checks=checks, clock=clock).findings(clock.watch))
    assert [each.state for each in findings] == ["ok", "FAIL"]
    assert took == [0.0, LIMIT_S / 4, LIMIT_S / 2, 3 * LIMIT_S / 4]


def test_a_process_that_ignores_signals_is_killed(tmp_path: Path) -> None:
    def deaf() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        hang()

    assert run_all(tmp_path, hangs=breaking(deaf))["hangs"][1].state == "FAIL"


def test_the_last_output_before_a_crash_is_reported(tmp_path: Path) -> None:
    def complain() -> None:
        os.write(2, b"CUDA error: device-side assert\nterminate called\n")
        os.abort()

    seen = run_all(tmp_path, broken=breaking(complain))["broken"][1].seen
    assert "(SIGABRT): terminate called" in seen
    assert f" {HERE}:" in seen


def test_output_of_checks_is_captured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def prints(context: CheckContext) -> Iterator[CheckResult]:
        print("out")
        os.write(2, b"err")
        yield ok("", f"reads {sys.stdin.read()!r}" if False else "fine")

    run_all(tmp_path, chatty=prints)
    assert capfd.readouterr() == ("", "")


def test_findings_have_a_check_reason_and_duration(tmp_path: Path) -> None:
    def slow(context: CheckContext) -> Iterator[CheckResult]:
        yield ok("one", "fine")
        context.clock.now += 0.25  # type: ignore[attr-defined]
        yield CheckResult("warn", "two", "odd", "fix it", "for another reason")

    one, two = run_all(tmp_path, slow=slow)["slow"]
    assert (one.why, two.why) == ("because", "for another reason")
    assert (one.took_s, two.took_s) == (0.0, 0.25)


def test_a_finding_survives_serialization_to_json() -> None:
    for finding in (ok("a", "b", rate=1.5), warn("", "x", "y"), failed("ü", "\x1b", "z", "w", {"n": 1}), skip("", "q")):
        assert CheckResult(**finding.to_json()) == finding


def test_a_process_that_cannot_start_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to_fork() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", refuse_to_fork)
    (finding,) = run_all(tmp_path, any=fine)["any"]
    assert finding.state == "FAIL"
    assert "Resource temporarily unavailable" in finding.seen


def test_checks_that_need_torch_are_skipped_without_torch(tmp_path: Path) -> None:
    checks = {
        "torch": check(breaking(crash)),
        "matmul": DoctorCheck(fine, "because", needs="torch"),
        "disk": check(fine),
    }
    findings = list(Examination(["matmul", "disk"], "auto", tmp_path, checks=checks).findings(lambda *_: None))

    assert [each.check for each in findings if each.state == "FAIL"] == ["torch"]
    assert [each.state for each in findings if each.check == "matmul"] == ["skip"]
    assert [each.state for each in findings if each.check == "disk"] == ["ok"]


@pytest.mark.slow
def test_a_crashing_gpu_check_does_not_prevent_cpu_checks(tmp_path: Path) -> None:
    from runner.tools.doctor.software import torch

    def devices(context: CheckContext) -> Iterator[CheckResult]:
        yield from (ok(device.torch_name, "fine") for device in context.devices)

    checks = {
        "torch": check(torch),  # type: ignore[arg-type]
        "gpus": DoctorCheck(breaking(crash), "because", needs="torch"),
        "matmul": DoctorCheck(devices, "because", needs="gpus"),
    }
    findings = list(Examination(["matmul"], "auto", tmp_path, checks=checks).findings(lambda *_: None))
    assert [(each.subject, each.state) for each in findings if each.check == "matmul"] == [("cpu", "ok")]


def test_the_process_of_an_abandoned_check_is_ended(tmp_path: Path) -> None:
    checks = {"hangs": check(breaking(hang))}
    before = children()
    with subreaper():
        findings = Examination(checks, "auto", tmp_path, checks=checks).findings(lambda *_: None)
        next(findings)
        assert any(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in children() - before)
        findings.close()  # type: ignore[attr-defined]
    assert children() <= before
