"""The wheel is complete, and runs in an empty folder without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import runner

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (result,) = built.glob("*.whl")
    return result


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel installed, without the checkout."""
    environment = tmp_path_factory.mktemp("fresh") / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=environment)
    # Use torch and other dependencies from the environment of the tests. Python ignores .pth files in folders that a
    # .pth file adds, so an editable install of the checkout is not found.
    schemes = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (fresh,) = environment.glob("lib/python*/site-packages")
    (fresh / "borrowed.pth").write_text("".join(f"{path}\n" for path in sorted(schemes)))
    return environment


@pytest.mark.slow
def test_the_wheel_is_complete(wheel: Path) -> None:
    expected = {
        *(f"runner/{path}" for path in files("conf", "*.yaml")),
        *(f"runner/{path}" for path in files("tasks", "*.py")),
        *files("runner", "*.py"),
        "runner/tools/report/page.html.jinja",
        "runner/tools/report/page.css",
        "runner/py.typed",
    }
    assert "runner/conf/config.yaml" in expected
    assert any(path.startswith("runner/tasks/") for path in expected)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected <= names, f"missing in the wheel: {sorted(expected - names)}"


@pytest.mark.slow
def test_the_wheel_contains_no_other_files(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"runner", "accel_run"}
    assert not [name for name in names if "test_" in name or "__pycache__" in name]
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_the_wheel_metadata_match_the_project(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
        licences = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert metadata["Version"] == runner.__version__
    assert metadata["Summary"] == project["description"]
    assert metadata["License-Expression"] == "MIT"
    assert licences
    assert set(metadata.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    assert str(metadata.get_payload()).startswith("# accel-run\n")


@pytest.mark.slow
def test_the_sdist_contains_the_files_of_the_checks(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    around = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "Dockerfile", ".dockerignore"}
    expected = {
        "pyproject.toml",
        ".ci/run",
        *around,
        *files("changelog.d", "*"),
        *files("scripts", "*"),
        *files("tests", "*.py"),
        *files("conf", "*.yaml"),
    }
    assert expected <= names, f"missing in the sdist: {sorted(expected - names)}"


@pytest.mark.slow
def test_the_package_is_imported_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = "import runner, sys; print(runner.__file__, *runner.__path__, *sys.path, sep='\\n')"
    where, package, *search_path = run(installed / "bin" / "python", "-c", code, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(installed)
    assert Path(where).parent == Path(package)
    assert str(ROOT) not in search_path


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("argv", [["--help"], ["plan"], ["explain", "precision", "+hardware=t4"]])
def test_the_console_script_runs(installed: Path, tmp_path: Path, argv: list[str]) -> None:
    assert run(installed / "bin" / "accel-run", *argv, cwd=tmp_path).strip()


@pytest.mark.slow
def test_installed_versions_agree(installed: Path, tmp_path: Path) -> None:
    code = "from importlib.metadata import version; print(version('accel-run'))"
    messages = run(installed / "bin" / "python", "-c", code, cwd=tmp_path).strip()
    assert run(installed / "bin" / "accel-run", "--version", cwd=tmp_path) == f"accel-run {messages}\n"
    assert messages == runner.__version__


@pytest.mark.slow
def test_the_module_runs(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "bin" / "python", "-m", "runner", "--help", cwd=tmp_path).strip()


@pytest.mark.slow
def test_a_first_run_prints_no_library_warnings(installed: Path, tmp_path: Path) -> None:
    args = "both device=cpu updates=2 evaluate.samples=32 tracker=wandb inference.samples=1"
    log = tmp_path / "log"
    run("sh", "-c", f"{installed / 'bin' / 'accel-run'} {args} 2> {log}", cwd=tmp_path)
    assert log.read_text() == ""


def files(folder: str, pattern: str) -> set[str]:
    """Return the paths of files below `folder`, relative to the checkout."""
    result = (path.relative_to(ROOT) for path in (ROOT / folder).rglob(pattern) if path.is_file())
    return {path.as_posix() for path in result if "__pycache__" not in path.parts}


def run(*argv: str | Path, cwd: Path) -> str:
    """Return the output of a command. If the command fails, fail with its output."""
    # Variables such as PYTHONPATH could make the checkout importable.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{argv} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
