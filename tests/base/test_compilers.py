"""Missing requirements of compilation are found without importing torch."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from runner.base import compilers
from runner.base.compilers import MIN_CAPABILITY, check_capability, find_missing_compiler


def install_triton(monkeypatch: pytest.MonkeyPatch, is_installed: bool) -> None:
    monkeypatch.setattr(compilers, "find_spec", lambda name: ModuleSpec(name, None) if is_installed else None)


def program(path: Path) -> Path:
    path.write_text("")
    path.chmod(0o755)
    return path


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the only folder on PATH, which is empty."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_compiling_for_a_cpu_needs_a_cpp_compiler(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("g++", "other"):
        missing = find_missing_compiler("cpu")
        assert missing is not None
        assert name in missing.what
        program(path / name)
        assert find_missing_compiler("cpu") is None
        monkeypatch.setenv("CXX", "other")


def test_compiling_for_a_cpu_needs_a_path_without_spaces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch must be installed at such a path."""
    program(path / "g++")
    for folder, is_usable in (("/checkout/torch", True), ("/my checkout/torch", False)):
        spec = ModuleSpec("torch", None, origin=f"{folder}/__init__.py")
        monkeypatch.setattr(compilers, "find_spec", {"torch": spec}.get)
        missing = find_missing_compiler("cpu")
        assert (missing is None) == is_usable
        assert missing is None or folder in missing.what


def test_compiling_for_a_gpu_needs_triton(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path / "gcc")
    for is_installed in (False, True):
        install_triton(monkeypatch, is_installed)
        assert (find_missing_compiler("cuda") is None) == is_installed


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_compiling_for_a_gpu_needs_a_c_compiler(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_triton(monkeypatch, True)
    missing = find_missing_compiler("cuda")
    assert missing is not None
    assert "gcc" in missing.fix
    program(path / name)
    assert find_missing_compiler("cuda") is None


def test_the_compiler_in_the_variable_cc_must_exist(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton uses this compiler even if gcc is installed."""
    install_triton(monkeypatch, True)
    program(path / "gcc")
    monkeypatch.setenv("CC", "other")
    missing = find_missing_compiler("cuda")
    assert missing is not None
    assert "other" in missing.what
    program(path / "other")
    assert find_missing_compiler("cuda") is None


def test_compiling_for_a_gpu_needs_the_python_headers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_triton(monkeypatch, True)
    program(path / "gcc")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(path)})
    missing = find_missing_compiler("cuda")
    assert missing is not None
    assert str(path / "Python.h") in missing.what
    program(path / "Python.h")
    assert find_missing_compiler("cuda") is None


def test_gpus_below_the_minimum_compute_capability_are_too_old() -> None:
    assert check_capability("cuda:1", None) is None
    assert check_capability("cuda:1", MIN_CAPABILITY) is None
    old = check_capability("cuda:1", (6, 1))
    assert old is not None
    assert {"cuda:1", "6.1"} <= set(old.what.split())


def test_checking_compilers_does_not_import_torch() -> None:
    code = """if True:
        import sys
        from runner.base.compilers import find_missing_compiler
        for kind in ("cpu", "cuda"): find_missing_compiler(kind)
        sys.exit("torch" in sys.modules or "triton" in sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True)
