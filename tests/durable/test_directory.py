"""The run directory: its names, its lock, and how runs are found."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.base.errors import AccelRunError, CannotCreate, ConfigError, Exit, InputMissing, RunInUse, SecurityRefusal
from runner.durable.directory import RunDirectory, generate_run_name, is_safe_path, last_modified, list_runs
from runner.durable.weight_source import find_start

ROOT = Path(__file__).parents[2]


def make_run(root: Path, name: str, age: float = 0.0) -> Path:
    """Create a run whose run.json was written `age` seconds ago."""
    with RunDirectory.create_or_open(root, name) as run:
        run.write("run.json", "{}")
        then = run.run_json.stat().st_mtime - age
        os.utime(run.run_json, (then, then))
    return run.path


@pytest.mark.parametrize("name", ["gpt", "a", "0", "gpt-20260131-142530-ab12", "A.b_c-d", "a..b"])
def test_plain_names_are_allowed(tmp_path: Path, name: str) -> None:
    with RunDirectory.create_or_open(tmp_path / "outputs", name) as run:
        assert run.path == tmp_path / "outputs" / name
        assert run.checkpoints.is_dir()
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
        assert stat.S_IMODE(run.write("plan.json", "{}").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../a", "a/b", "/tmp/a", ".hidden", "-a", "_a", "a b", "a\n", "a\0", "ä", "~", "last"]
)
def test_invalid_names_are_rejected_without_creating_anything(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunDirectory.create_or_open(tmp_path / "outputs", name)
    assert caught.value.exit_code == Exit.CONFIG
    assert caught.value.problems[0].where == f"run={name!r}".replace("'", "")
    assert list(tmp_path.iterdir()) == []


def test_a_run_outside_the_root_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "gpt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SecurityRefusal):
        RunDirectory.create_or_open(tmp_path / "outputs", "gpt")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_two_processes_never_share_a_run(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from runner.durable.directory import RunDirectory
run = RunDirectory.create_or_open(Path({str(tmp_path)!r}), "gpt")
print("held", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunInUse, match=rf"process {holder.pid} on .* since 20\d\d-") as caught:
            RunDirectory.create_or_open(tmp_path, "gpt")
        assert caught.value.exit_code == Exit.IN_USE
        holder.kill()
        holder.wait(timeout=60)
    RunDirectory.create_or_open(tmp_path, "gpt").release()


def test_an_invalid_lock_file_does_not_prevent_locking(tmp_path: Path) -> None:
    first = RunDirectory.create_or_open(tmp_path, "gpt")
    for note in ("", "[]", "{}", "\ufffd", '{"pid": null, "host": 1, "started": 2}'):
        (first.path / ".lock").write_text(note)
        with pytest.raises(RunInUse, match="another process"):
            RunDirectory.create_or_open(tmp_path, "gpt")
    first.release()
    first.release()
    RunDirectory.create_or_open(tmp_path, "gpt").release()


def test_opening_removes_only_leftovers_of_a_crash(tmp_path: Path) -> None:
    path = make_run(tmp_path, "gpt")
    (path / ".tmp-run.json-0a1b").write_text("{")
    RunDirectory.create_or_open(tmp_path, "gpt").release()
    assert sorted(entry.name for entry in path.iterdir()) == [".lock", "checkpoints", "run.json"]


def test_exit_code_is_73_if_the_run_folder_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root, name in ((tmp_path / "file", "gpt"), (tmp_path, "file"), (tmp_path / ("n" * 300), "gpt")):
        with pytest.raises(CannotCreate) as caught:
            RunDirectory.create_or_open(root, name)
        assert caught.value.exit_code == Exit.CANNOT_CREATE


def test_exit_code_is_77_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object, **__: object) -> Any:  # chmod does not restrict root
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "mkdir", deny)
    with pytest.raises(AccelRunError) as caught:
        RunDirectory.create_or_open(tmp_path, "gpt")
    assert caught.value.exit_code == Exit.PERMISSION
    assert AccelRunError("another").exit_code == Exit.SOFTWARE


def test_last_selects_the_run_written_most_recently(tmp_path: Path) -> None:
    make_run(tmp_path, "old", age=100)
    make_run(tmp_path, "new", age=10)
    make_run(tmp_path, "older", age=200)
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "file").write_text("")
    assert RunDirectory.find(tmp_path, "last").name == "new"
    assert [path.name for path in list_runs(tmp_path)] == ["new", "old", "older"]
    (tmp_path / "old" / "metrics.jsonl").write_text("{}\n")
    assert RunDirectory.find(tmp_path).name == "old"


@pytest.mark.parametrize("sign", ["metrics.jsonl", "events.jsonl", "checkpoints/update-0000000003"])
def test_last_skips_runs_without_an_update(tmp_path: Path, sign: str) -> None:
    """A start that failed, for example because of a wrong data.path, does not hide the run before it."""
    trained = make_run(tmp_path, "trained", age=100)
    for age, name in ((50, "failed-1"), (10, "failed-2")):
        path = make_run(tmp_path, name, age=age)
        (path / "metrics.jsonl").touch()
        os.utime(path / "metrics.jsonl", (0, 0))
        (path / "events.jsonl").write_text('{"kind": "start", "update": 0}\n')
    assert RunDirectory.find(tmp_path).name == "failed-2", "all runs failed, so the last one must be found"
    if sign.startswith("checkpoints"):
        (trained / sign).mkdir()
    else:
        (trained / sign).write_text('{"kind": "first update", "update": 1}\n')
        os.utime(trained / sign, (0, 0))
    result = RunDirectory.find(tmp_path)
    assert (result.name, result.skipped) == ("trained", ("failed-2", "failed-1"))
    assert RunDirectory.find(tmp_path, "failed-2").skipped == ()
    assert [path.name for path in list_runs(tmp_path)] == ["failed-2", "failed-1", "trained"]


def test_finding_a_run_takes_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is found by its name or its path."""
    make_run(tmp_path / "outputs", "gpt")
    with RunDirectory.create_or_open(tmp_path / "outputs", "gpt"):
        assert RunDirectory.find(tmp_path / "outputs", "gpt").name == "gpt"
        assert RunDirectory.find(tmp_path / "none", str(tmp_path / "outputs" / "gpt")).name == "gpt"
        monkeypatch.chdir(tmp_path)
        assert RunDirectory.find(Path("elsewhere"), "outputs/gpt").name == "gpt"


@pytest.mark.parametrize("run", ["gbt-1", "/nowhere", "..", "a\0b", "n" * 300, ""])
def test_a_missing_run_lists_existing_runs(tmp_path: Path, run: str) -> None:
    make_run(tmp_path, "gpt-1", age=5)
    make_run(tmp_path, "cape")
    with pytest.raises(InputMissing, match="runs, newest first: cape, gpt-1") as caught:
        RunDirectory.find(tmp_path, run)
    assert caught.value.exit_code == Exit.NO_INPUT
    assert ("mean gpt-1?" in str(caught.value)) == (run == "gbt-1")


def test_the_error_states_that_there_are_no_runs(tmp_path: Path) -> None:
    for run in ("last", "gpt"):
        with pytest.raises(InputMissing, match="accel-run train"):
            RunDirectory.find(tmp_path / "outputs", run)
    assert not (tmp_path / "outputs").exists()


def test_only_reproducible_files_are_written_without_the_lock(tmp_path: Path) -> None:
    make_run(tmp_path, "gpt")
    result = RunDirectory.find(tmp_path, "gpt")
    result.write("report.html", "<p>")
    assert result.write("predictions/val/0.txt", "text") == result.predictions / "val" / "0.txt"
    for name in ("run.json", "checkpoints/x"):
        with pytest.raises(AssertionError):
            result.write(name, "{}")
    RunDirectory.join(result.path).write("run.json", "{}")


@pytest.mark.parametrize("name", ["../run.json", "/etc/x", "a//b", "", "plots/../../x", ".lock"])
def test_nothing_is_written_outside_the_run(tmp_path: Path, name: str) -> None:
    with RunDirectory.create_or_open(tmp_path, "gpt") as run, pytest.raises(AssertionError):
        run.write(name, "x")


def test_default_names_are_allowed_and_differ(tmp_path: Path) -> None:
    assert re.fullmatch(r"gpt-\d{8}-\d{6}-[0-9a-f]{6}", generate_run_name("gpt"))
    assert len({generate_run_name("gpt") for _ in range(20)}) > 15
    for task in ("my task.py", "../x", "ä", "", "-"):
        RunDirectory.create_or_open(tmp_path, generate_run_name(task)).release()


@pytest.mark.parametrize(
    ("path", "is_plain"),
    [
        ("mine.py", True), ("helpers/unit.py", True), ("a/b/c-1.txt", True), ("", False), ("/etc/passwd", False),
        ("a//b", False), ("a/../b", False), ("../b", False), ("a/", False), ("a/b c", False), ("a\n", False),
        ("a/" + "x" * 300, False), ("x" * 300 + "/a", False),
    ],
)  # fmt: skip
def test_path_components_in_a_run_must_be_plain_names(path: str, is_plain: bool) -> None:
    assert is_safe_path(path) == is_plain


def test_a_run_ends_if_its_lock_file_was_replaced(tmp_path: Path) -> None:
    """Another process has locked the run."""
    with RunDirectory.create_or_open(tmp_path, "one") as first:
        first.check_location(pytest.fail)
        for lock in first.path.glob("*lock*"):
            lock.unlink()
        with RunDirectory.create_or_open(tmp_path, "one"), pytest.raises(RunInUse):
            first.check_location(pytest.fail)


@pytest.mark.parametrize("missing", ["run.json", "metrics.jsonl"])
def test_a_run_was_modified_when_its_newest_file_was(missing: str, tmp_path: Path) -> None:
    for number, name in enumerate(("run.json", "metrics.jsonl"), start=1):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (number, number))
    assert last_modified(tmp_path) == 2
    (tmp_path / missing).unlink()
    assert last_modified(tmp_path) == (2 if missing == "run.json" else 1)
    (tmp_path / "run.json").unlink(missing_ok=True)
    (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
    assert last_modified(tmp_path) == 0


def test_last_does_not_select_a_run_being_created(tmp_path: Path) -> None:
    make_run(tmp_path, "earlier", age=60.0)
    with RunDirectory.create_or_open(tmp_path, "later") as later:
        later.write("run.json", "{}")
        later.write("metrics.jsonl", '{"update": 1}\n')
        found = [find_start("last", tmp_path, created) for created in (later, None)]
    assert [run.name for run in found if isinstance(run, RunDirectory)] == ["earlier", "later"]
