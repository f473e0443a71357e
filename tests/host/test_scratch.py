"""The cache of compiled code is never in a folder where another user could plant code."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from runner.base.errors import CannotCreate, Exit
from runner.host.scratch import check_compile_cache, private_compile_cache, private_folder

ROOT = Path(__file__).parents[2]
VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a private cache folder. Temporary files go to a folder that all users can write to."""
    made = tmp_path / "home"
    made.mkdir(mode=0o700)
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    for name in (*VARIABLES, "ACCEL_RUN_CACHE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(made))
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return made


def chosen() -> list[Path]:
    for name in VARIABLES:
        os.environ[name] = ""
    with private_compile_cache():
        return [Path(os.environ[name]) for name in VARIABLES]


def nearest(path: Path) -> os.stat_result:
    return next(each for each in (path, *path.parents) if each.exists()).stat()


def test_compiled_code_is_kept_in_the_users_cache(home: Path) -> None:
    first = chosen()
    assert all(path.is_relative_to(home) for path in first)
    assert len(set(first)) == 2
    assert chosen() == first
    first[0].mkdir(parents=True)
    assert chosen() == first


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_cache_writable_by_others_is_not_used(home: Path, mode: int) -> None:
    home.chmod(mode)
    with private_folder() as folder:
        for path in chosen():
            assert path.is_relative_to(folder)
    for path in chosen():  # holds even without a private folder
        assert stat.S_IMODE(nearest(path).st_mode) == 0o700
        assert not path.is_relative_to(home)


def test_a_folder_created_by_another_user_is_not_used(home: Path) -> None:
    elsewhere = home.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    inside = chosen()[0].parent
    inside.rmdir()
    inside.symlink_to(elsewhere)
    for path in chosen():
        assert not path.resolve().is_relative_to(elsewhere)
    inside.unlink()
    inside.mkdir()
    inside.chmod(0o777)
    for path in chosen():
        assert not path.is_relative_to(home)


def test_a_given_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    with private_compile_cache():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")


def test_the_cache_is_set_only_in_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/given")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    with private_compile_cache():
        assert os.environ["TRITON_CACHE_DIR"]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/given"
    assert "TRITON_CACHE_DIR" not in os.environ


def test_sharing_tensors_with_a_worker_ends_without_an_error() -> None:
    """The socket of torch's queues is in the folder, and multiprocessing removes it when the process ends."""
    program = "from multiprocessing.resource_sharer import DupFd; from runner.host.scratch import private_folder\n"
    program += "with private_folder(): DupFd(2)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not done.stderr


@pytest.mark.slow
def test_the_default_folder_of_torch_does_not_count_as_given(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch._dynamo sets the variable; parallelism=fsdp imports it before the ranks start."""
    monkeypatch.delenv(VARIABLES[0])
    program = "import os, torch._dynamo; from runner.host.scratch import check_compile_cache, private_compile_cache\n"
    program += "print(os.environ['TORCHINDUCTOR_CACHE_DIR']); check_compile_cache('TORCHINDUCTOR_CACHE_DIR')\n"
    program += "with private_compile_cache(): print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    by_torch, used = map(Path, done.stdout.split())
    assert not by_torch.is_relative_to(home)
    assert used.is_relative_to(home)


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_given_folder_must_be_writable(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable."""
    check_compile_cache(variable)  # accepted, because no folder is given
    monkeypatch.setenv(variable, str(tmp_path / "new" / "folder"))
    check_compile_cache(variable)
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(variable, str(tmp_path / "file" / "folder"))
    with pytest.raises(CannotCreate) as refused:
        check_compile_cache(variable)
    assert refused.value.exit_code == Exit.CANNOT_CREATE
    assert refused.value.problems[0].where == f"{variable}={tmp_path / 'file' / 'folder'}"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EACCES, Exit.PERMISSION),
        (errno.EPERM, Exit.PERMISSION),
        (errno.EROFS, Exit.CANNOT_CREATE),
        (errno.ENOSPC, Exit.CANNOT_CREATE),
        (errno.EMFILE, Exit.SYSTEM),
    ],
)
def test_an_unusable_folder_has_the_exit_code_of_its_error(
    number: int, code: Exit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(CannotCreate) as refused:
        check_compile_cache("TORCHINDUCTOR_CACHE_DIR")
    assert refused.value.exit_code == code


def test_the_cache_is_private_with_any_umask(home: Path) -> None:
    before = os.umask(0)
    try:
        folder = chosen()[0].parent
        for path in (folder, folder.parent):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        folder.chmod(0o755)  # as earlier versions of Inductor create it
        assert chosen()[0].parent == folder
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_cache_replaceable_by_others_is_not_used(home: Path) -> None:
    folder = chosen()[0].parent
    folder.parent.chmod(0o777)
    assert not any(path.is_relative_to(home) for path in chosen())


def test_without_a_cache_a_private_folder_is_used(home: Path) -> None:
    (home / "accel-run").write_text("no folder\n")
    for path in chosen():
        assert stat.S_IMODE(nearest(path).st_mode) == 0o700
        assert not path.is_relative_to(home)
