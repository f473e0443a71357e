"""Each check of `accel-run doctor` finds its fault, and nothing on a healthy machine."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.plan.inventory import GIB, Cpu, Device, Inventory
from runner.tools.doctor import arithmetic, host_checks, software, storage
from runner.tools.doctor.checks import CHECKS
from runner.tools.doctor.findings import CheckContext, CheckResult

ROOT = Path(__file__).parents[3]
CPU = Cpu("a CPU", 1, 1, 4 * GIB, "AVX2", ("avx2",))


@pytest.fixture
def context(tmp_path: Path) -> CheckContext:
    return CheckContext(tmp_path / "outputs", tmp_path, inventory=Inventory((), CPU))


def by_subject(findings: Iterator[Any]) -> dict[str, CheckResult]:
    return {finding.subject: finding for finding in findings}


# ---------------------------------------------------------------- arithmetic


WRONG = {
    "zeros": lambda one, other: torch.zeros_like(one),
    "swapped factors": lambda one, other: other @ one,
    "NaN": lambda one, other: (one @ other).fill_(float("nan")),
    "one wrong number": lambda one, other: (one @ other).index_put_(
        (torch.tensor(3), torch.tensor(5)), torch.tensor(10.0), True
    ),
    "an incomplete sum": lambda one, other: one[:, :-1] @ other[:-1],
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp64"])
def test_a_wrong_matrix_product_fails(what: str, name: str) -> None:
    def call(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return WRONG[what](one.float(), other.float()).to(one.dtype)  # type: ignore[no-untyped-call]

    (number,) = [each for each in arithmetic.formats(CPU.device, Inventory((), CPU)) if each.name == name]
    assert arithmetic.check_format(number, call).state == "FAIL"


def test_float32_computed_in_tf32_fails() -> None:
    def rounded(factor: torch.Tensor) -> torch.Tensor:
        return (factor.view(torch.int32) & ~0x1FFF).view(torch.float32)  # a mantissa of 10 bits

    fp32 = arithmetic.formats(CPU.device, Inventory((), CPU))[0]

    def product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return rounded(one) @ rounded(other)

    assert arithmetic.check_format(fp32, product).state == "FAIL"
    tf32 = dataclasses.replace(fp32, name="tf32", digits=11)
    assert arithmetic.measure_error(tf32, product) <= arithmetic.allowed_error(tf32)


def test_reported_formats_depend_on_the_device() -> None:
    t4, h200 = (Device("cuda", 0, name, capability=result) for name, result in (("Tesla T4", (7, 5)), ("H200", (9, 0))))
    there = {
        device.name: {
            each.name: (not each.why_not, each.is_native) for each in arithmetic.formats(device, Inventory((), CPU))
        }
        for device in (t4, h200, CPU.device)
    }

    assert there["Tesla T4"] == {
        "fp32": (True, False), "tf32": (False, True), "bf16": (True, False), "fp16": (True, True), "fp64": (True, False)
    }  # fmt: skip
    assert there["H200"]["tf32"] == there["H200"]["bf16"] == (True, True)
    assert list(there["a CPU"]) == ["fp32", "bf16", "fp16", "fp64"]


# ---------------------------------------------------------------- the machine


@pytest.mark.slow
def test_a_low_limit_of_open_files_is_reported() -> None:
    finding = limits_under(
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))"
    )["open files"]
    assert (finding["state"], finding["figures"]) == ("warn", {"open_files": 300})
    assert finding["fix"].startswith("ulimit -n ")

    finding = limits_under("resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))")["open files"]
    assert (finding["state"], "/etc/security/limits.conf" in finding["fix"]) == ("FAIL", True)


def limits_under(before: str) -> dict[str, Any]:
    """Run the check of limits in a process that first runs `before`; return its findings."""
    if os.geteuid() != 0:
        pytest.skip("only root may raise limits")
    code = (
        "import json, os, pathlib, resource\nfrom runner.tools.doctor import host_checks\nimport psutil\n"
        "from runner.tools.doctor.findings import CheckContext\n"
        f"{before}\n"
        "found = host_checks.limits(CheckContext(pathlib.Path('.'), pathlib.Path('.')))\n"
        "print(json.dumps({each.subject: each.to_json() for each in found}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_variables_that_slow_torch_down_are_reported(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in host_checks.SLOWING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert [each.state for each in host_checks.environment(context)] == ["ok"]
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert [each.state for each in host_checks.environment(context)] == ["ok"]
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    (result,) = host_checks.environment(context)
    assert (result.state, result.fix.split()) == ("warn", ["unset", "CUDA_LAUNCH_BLOCKING"])


# ---------------------------------------------------------------- storage


def test_the_disk_check_writes_syncs_and_removes_its_file(context: CheckContext) -> None:
    result = by_subject(storage.disk(context))

    assert {each.state for each in result.values()} <= {"ok", "warn"}
    assert {"space", "write"} == set(result)
    assert not context.root.exists()
    assert list(context.root.parent.iterdir()) == []


def test_a_file_in_place_of_the_output_folder_fails(context: CheckContext) -> None:
    context.root.write_text("")
    (result,) = storage.disk(context)
    assert (result.state, " output_root=" in result.fix) == ("FAIL", True)


def test_a_full_disk_fails(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs(context.scratch)
    usage = type("Usage", (), {"total": full.f_blocks, "used": full.f_blocks, "free": 1000})
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: usage)
    (result,) = storage.disk(context)
    assert result.state == "FAIL"
    assert list(context.root.parent.iterdir()) == []


def test_little_shared_memory_is_reported(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"total": 64 * 2**20, "used": 0, "free": 1 * 2**20})
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: usage)
    (result,) = storage.shared_memory(context)
    assert result.state == "warn"
    assert "--shm-size" in result.fix


# ---------------------------------------------------------------- packages


def needing(monkeypatch: pytest.MonkeyPatch, *packages: software.Requirement) -> None:
    monkeypatch.setattr(software, "required_packages", lambda: list(packages))


def test_a_failing_import_is_reported_with_its_last_line(
    context: CheckContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    why = "libcudart.so.12: cannot open shared object file"
    (tmp_path / "brokenpack.py").write_text(f"raise ImportError({why!r})")
    info = tmp_path / "brokenpack-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brokenpack\nVersion: 1.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    needing(monkeypatch, software.Requirement("brokenpack>=1"))
    (needed,) = software.packages(context)

    assert needed.state == "FAIL"
    assert needed.seen.startswith("1.5 ")
    assert needed.seen.endswith(f"ImportError: {why}")


def test_a_failing_torch_import_is_reported_with_a_fix(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    needing(monkeypatch, software.Requirement("torch>=2.11"))
    monkeypatch.setattr(software, "import_error", lambda module: "OSError: libcudart.so.13: cannot open it")
    (result,) = software.torch(context)
    assert isinstance(result, CheckResult)
    assert (result.state, shlex.split(result.fix)) == ("FAIL", ["pip", "install", "--force-reinstall", "torch>=2.11"])


def test_an_unsupported_version_is_reported(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    needing(monkeypatch, software.Requirement("psutil>=999"), software.Requirement("torch>=999"))
    (psutil,) = software.packages(context)
    _, torch_found = software.torch(context)

    assert (psutil.state, psutil.fix) == ("FAIL", 'pip install "psutil>=999"')
    assert isinstance(torch_found, CheckResult)
    assert (torch_found.state, torch_found.fix) == ("FAIL", 'pip install "torch>=999"')


def test_required_packages_match_pyproject() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = {line.partition(">")[0].partition("<")[0] for line in project["dependencies"]}
    result = software.required_packages()

    assert {each.name for each in result} == stated
    assert software.required_python().specifier == software.Requirement(f"x{project['requires-python']}").specifier


# ---------------------------------------------------------------- the table


def test_the_doctor_page_has_a_row_for_every_check() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    rows = [f"| `{name}` | {check.summary} | {check.why} |" for name, check in CHECKS.items()]
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows
