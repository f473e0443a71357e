"""scripts/compare.py: identical means bitwise equal, and missing values count as a difference."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import compare  # noqa: E402 - a script outside of any package

sys.path.remove(str(ROOT / "scripts"))

MakeRun = Callable[..., str]
LOSSES = [2.0, 1.5, 1.25, 1.125]


def row(update: int, loss: float | None, **more: Any) -> dict[str, Any]:
    return {"update": update, "phase": "train", "lr": 0.1, "train/loss": loss, "perf/step_time_ms": 1.0, **more}


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """Return a function that writes a run with rows, or with raw lines, and returns its name."""
    monkeypatch.chdir(tmp_path)

    def make(name: str, rows: list[Any]) -> str:
        folder = tmp_path / "outputs" / name
        folder.mkdir(parents=True)
        lines = [each if isinstance(each, str) else json.dumps(each) for each in rows]
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return name

    return make


def rows_of_losses(losses: list[float]) -> list[Any]:
    return [row(number, loss) for number, loss in enumerate(losses, 1)]


def test_timings_do_not_affect_the_comparison(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    slower = [{**each, "perf/step_time_ms": 9.0, "gpu0/util": 50.0} for each in rows_of_losses(LOSSES)]

    assert compare.main([make_run("a", rows_of_losses(LOSSES)), make_run("b", slower)]) == 0
    assert "identical   4 updates" in capsys.readouterr().out


def test_a_difference_of_one_bit_is_reported(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    changed = [*LOSSES[:2], math.nextafter(LOSSES[2], 2.0), LOSSES[3]]

    assert compare.main([make_run("a", rows_of_losses(LOSSES)), make_run("b", rows_of_losses(changed))]) == 1
    messages = capsys.readouterr().out
    assert re.search(r"^first +update 3 .* 1\.25 in A", messages, re.M)
    assert re.search(r"^different .* 1 of the 4 ", messages, re.M)


def test_the_first_and_the_largest_difference_are_reported(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = [2.0, 1.5015, 2.5, 1.125]

    assert compare.main([make_run("a", rows_of_losses(LOSSES)), make_run("b", rows_of_losses(changed))]) == 1
    messages = capsys.readouterr().out
    assert re.search(r"^first +update 2 .* 1\.5 .* 1\.5015 .*\(0\.001", messages, re.M)
    assert re.search(r"^largest +update 3 .* 1\.25 .* 2\.5 .*\(0\.5", messages, re.M)


def test_common_updates_of_a_shorter_run_are_compared(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([make_run("a", rows_of_losses(LOSSES)), make_run("b", rows_of_losses(LOSSES[:2]))]) == 1
    messages = capsys.readouterr().out
    assert re.search(r"^B lacks +2 updates .* 3 to 4", messages, re.M)
    assert re.search(r"^identical +2 updates", messages, re.M)


def test_damaged_rows_are_counted_as_missing_updates(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of_losses(LOSSES)
    damaged = [rows[0], '{"update": 2, "phase": "tr', {**rows[2], "train/loss": "1.25"}, "[]", rows[3]]

    assert compare.main([make_run("a", rows), make_run("b", damaged)]) == 1
    messages = capsys.readouterr().out
    assert re.search(r"run b: 2 .* 3 damaged", messages)
    assert re.search(r"^B lacks +2 updates .* 2 to 3", messages, re.M)


def test_a_resumed_run_is_compared_by_its_last_rows(make_run: MakeRun) -> None:
    rows = rows_of_losses(LOSSES)
    resumed = [*rows[:2], row(3, 7.0), *rows[2:]]

    assert compare.main([make_run("a", rows), make_run("b", resumed)]) == 0


def test_rows_of_an_evaluation_belong_to_their_update(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of_losses(LOSSES)
    evaluated = [*rows, {"update": 4, "phase": "train", "val/loss": 1.0}]

    assert compare.main([make_run("a", rows), make_run("b", evaluated)]) == 1
    assert "A lacks     val/loss " in capsys.readouterr().out
    assert compare.main([make_run("c", evaluated), "b"]) == 0


def test_updates_of_two_phases_are_distinguished(make_run: MakeRun) -> None:
    one = [row(1, 2.0), {**row(1, 1.0), "phase": "second"}]
    other = [{**row(1, 1.0), "phase": "second"}, row(1, 2.0)]

    assert compare.main([make_run("a", one), make_run("b", other)]) == 0


@pytest.mark.parametrize(("theirs", "code"), [(None, 0), (1.0, 1)])
def test_a_non_finite_value_equals_only_the_same_value(make_run: MakeRun, theirs: float | None, code: int) -> None:
    assert compare.main([make_run("a", [row(1, None)]), make_run("b", [row(1, theirs)])]) == code


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    ("args", "code", "output"),
    [
        (["a", "missing"], 66, "there is no run 'missing'"),
        (["a", "empty"], 66, "must have rows with losses"),
        (["a"], 64, "required"),
        (["a", "b", "c"], 64, "unrecognized"),
        (["a", "a", "--", "updates=3"], 64, "already trained"),
        (["--commits", "HEAD", "no-such-commit", "--", "updates=3"], 66, "there is no commit"),
        (["--commits", "HEAD", "HEAD", "--", "run=mine"], 64, "run cannot be set"),
    ],
)
def test_invalid_input_is_reported(
    make_run: MakeRun,
    repository: Path,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    code: int,
    output: str,
) -> None:
    make_run("a", rows_of_losses(LOSSES))
    make_run("empty", [])

    assert compare.main(args) == code
    messages = capsys.readouterr().err
    assert output in messages
    assert "training at" not in messages, "nothing is trained if a commit is missing"


# ---------------------------------------------------------------- commits

RUNNER = """
import json, sys
from pathlib import Path
given = dict(word.split("=") for word in sys.argv[2:])
assert sys.argv[1] == "train" and given["log_every"] == "1"
if "fails" in given:
    sys.exit(int(given["fails"]))
folder = Path(given["output_root"], given["run"])
folder.mkdir(parents=True)
rows = [{"update": n, "phase": "train", "train/loss": FACTOR / n} for n in range(1, int(given["updates"]) + 1)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\\n" for each in rows))
"""


def git(folder: Path, *args: str) -> str:
    named = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *named, *args], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the tags `one`, `same` and `other`, and a stub of `train` that only writes losses."""
    folder = tmp_path / "repository"
    package = folder / "runner"
    package.mkdir(parents=True)
    git(tmp_path, "init", "--quiet", str(folder))
    for tag, factor in (("one", "3.0"), ("same", "(1.0 + 2.0)"), ("other", "3.5")):
        (package / "__init__.py").write_text("")
        (package / "__main__.py").write_text(RUNNER.replace("FACTOR", factor))
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "--message", tag)
        git(folder, "tag", tag)
    monkeypatch.setattr(compare, "ROOT", folder)
    return folder


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("commit", "code"), [("same", 0), ("other", 1)])
def test_each_commit_trains_with_its_own_code(
    repository: Path, capsys: pytest.CaptureFixture[str], commit: str, code: int
) -> None:
    assert compare.main(["--commits", "one", commit, "--", "updates=3"]) == code
    assert "A           commit one: 3 updates" in capsys.readouterr().out


def test_worktrees_of_commits_are_removed(repository: Path) -> None:
    compare.main(["--commits", "one", "same", "--", "updates=3"])
    compare.main(["--commits", "one", "same", "--", "updates=3", "fails=80"])

    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert git(repository, "status", "--porcelain") == ""


@pytest.mark.parametrize(("fails", "code"), [("78", 78), ("1", 70)])
def test_a_failed_run_is_not_reported_as_a_difference(
    repository: Path, capsys: pytest.CaptureFixture[str], fails: str, code: int
) -> None:
    assert compare.main(["--commits", "one", "same", "--", "updates=3", f"fails={fails}"]) == code
    assert f" one ended with {fails}" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the history of the project")
def test_a_real_run_is_reproducible_at_the_same_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["task=gpt", "task.size=tiny", "updates=2", "global_batch_size=4", "device=cpu", "monitor=off"]

    assert compare.main(["--commits", "HEAD", "HEAD", "--", *settings]) == 0
