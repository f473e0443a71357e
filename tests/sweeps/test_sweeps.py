"""Sweeps and searches with stand-ins for training: kills, resuming and rejected commands."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from runner.base.errors import ConfigError, DataError
from runner.base.text import NOT_MEASURED
from runner.cli import main
from runner.commands.arguments import parse_arguments
from runner.config.configuration import compose
from runner.config.request import Request
from runner.durable.directory import RunDirectory
from runner.records.sweep_record import Goal, SweepRecord
from runner.sweeps import sweep
from runner.sweeps.sweep import Packing, SweepOptions, assign_slots, divide_resources, open_sweep
from runner.sweeps.sweep_syntax import SearchSpace
from runner.sweeps.trials import Result, Sweep, Trial, find_best, format_result, format_trial_table, to_csv
from tests.faults.tallies import SEED
from tests.forkserver import ForkServer
from tests.waiting import wait_until

KILLS = 2
ROOT = Path(__file__).parents[2]
TASK = ["--task", str(Path(__file__).parent / "task_of_trials.py"), "run=mine"]
GRID = ["train", "-m", "optimizer.lr=0.001,0.01", "task.hidden=8,16", *TASK]
SEARCH = ["search", "optimizer.lr=log(1e-5,1e-1)", "task.hidden=range(8,33,8)", "trials=5", *TASK]


BEFORE = """
import os, sys
sys.path[1:1] = os.environ["PYTHONPATH"].split(":")
from tests.sweeps.stand_in import stand_in
stand_in()
"""


def start(server: ForkServer, args: Sequence[str], folder: Path, **more: str) -> int:
    env = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **more}
    return server.start(list(args), folder, env, BEFORE)


def run(server: ForkServer, args: Sequence[str], folder: Path, **more: str) -> tuple[int, str, str]:
    start(server, args, folder, **more)
    result = server.wait()
    return result.code, result.out, result.err


def rows(folder: Path, *, without: Sequence[str] = ("seconds",)) -> list[dict[str, str]]:
    with (folder / "outputs" / "mine" / "results.csv").open() as file:
        return [{key: value for key, value in row.items() if key not in without} for row in csv.DictReader(file)]


def record(folder: Path, number: int) -> dict[str, Any]:
    result = json.loads((folder / "outputs" / "mine" / f"mine-{number}" / "run.json").read_text())
    assert isinstance(result, dict)
    return result


def resume_until_done(server: ForkServer, args: Sequence[str], folder: Path, dice: random.Random) -> int:
    """Kill the sweep at random moments after its start and resume it. Return the number of kills before it ended."""
    file = folder / "outputs" / "mine" / "sweep.json"
    for kills in range(KILLS):
        before = file.stat().st_mtime_ns if file.exists() else 0
        pid = start(server, args, folder)
        wait_until(lambda before=before: file.exists() and file.stat().st_mtime_ns > before)
        time.sleep(dice.random() * 0.4)  # lint-tests: sleep: any moment is suitable
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if server.wait().code >= 0:
            return kills
    code, _, err = run(server, args, folder)
    assert code == 0, err
    return KILLS


def needs_optuna() -> None:
    pytest.importorskip("optuna")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("args", [GRID, SEARCH], ids=["sweep", "search"])
def test_resuming_after_kills_gives_the_same_table(args: list[str], server: ForkServer, tmp_path: Path) -> None:
    if args is SEARCH:
        needs_optuna()
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    code, _, err = run(server, args, whole)
    assert code == 0, err
    seed = SEED
    kills = resume_until_done(server, args, cut, random.Random(seed))
    assert rows(cut) == rows(whole), f"seed {seed}, {kills} kills"
    for number in range(1, len(rows(cut)) + 1):  # finished trials must not be repeated, and checkpoints must be kept
        began = record(cut, number)["began"]
        assert began == sorted(began), f"seed {seed}"
        assert 3 not in began, f"seed {seed}"


@pytest.mark.slow
def test_a_stopped_sweep_leaves_a_table(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the sweep runs, a second sweep with the same name is rejected."""
    args = [*GRID, "task.act=hang"]
    pid = start(server, args, tmp_path)
    wait_until((tmp_path / "outputs/mine/mine-1/run.json").exists)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "check_plannable", lambda configurations: None)
    assert main(args) == 87
    assert str(pid) in capsys.readouterr().err
    os.kill(pid, signal.SIGINT)
    result = server.wait()
    assert result.code == 75, result.err
    assert "run=mine" in result.out, "the output must show how to resume"
    assert [row["state"] for row in rows(tmp_path)] == ["stopped", "waiting", "waiting", "waiting"]
    assert Sweep.read(tmp_path / "outputs" / "mine").record.process.state == "preempted"


@pytest.mark.slow
def test_a_third_signal_stops_a_trial_without_failing_it(server: ForkServer, tmp_path: Path) -> None:
    pid = start(server, [*GRID, "task.act=deaf", "together=2"], tmp_path, SAVED="never")
    trials = [tmp_path / f"outputs/mine/mine-{number}" for number in (1, 2)]
    wait_until(lambda: all((trial / "run.json").exists() for trial in trials))
    for number in (1, 2, 3):
        os.kill(pid, signal.SIGTERM)
        if number < 3:
            wait_until(lambda n=number: all((trial / f"asked-{n}").exists() for trial in trials))
    result = server.wait()
    assert result.code == 130, result.err
    assert [row["state"] for row in rows(tmp_path)] == ["stopped", "stopped", "waiting", "waiting"]


@pytest.mark.slow
def test_a_trial_without_its_folder_is_run_again(server: ForkServer, tmp_path: Path) -> None:
    """The same holds if the folder contains another run."""
    assert run(server, GRID, tmp_path)[0] == 0
    shutil.rmtree(tmp_path / "outputs" / "mine" / "mine-2")
    other = record(tmp_path, 3) | {"overrides": ["optimizer.lr=5"]}
    (tmp_path / "outputs" / "mine" / "mine-3" / "run.json").write_text(json.dumps(other))
    code, out, err = run(server, GRID, tmp_path)
    assert code == 0, err
    lines = [line[:5] for line in out.splitlines() if line.startswith("[")]
    assert lines == ["[2/4]", "[2/4]", "[3/4]", "[3/4]"], "the trial must be printed at its start and its end"


def base_run(folder: Path, name: str) -> str:
    """Create a run that trials can start from, and return its path."""
    path = folder / "outputs" / name
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"name": name, "state": "done"}))
    (path / "metrics.jsonl").write_text('{"update": 1, "phase": "train", "train/loss": 1.0}\n')
    return str(path)


def test_a_sweep_can_vary_the_run_whose_weights_are_used(server: ForkServer, tmp_path: Path) -> None:
    """`last` is the newest run when the sweep starts, not one of the trials."""
    paths = [base_run(tmp_path, name) for name in ("old", "new")]
    os.utime(Path(paths[0]) / "metrics.jsonl", (1.7e9, 1.7e9))
    os.utime(Path(paths[0]) / "run.json", (1.7e9, 1.7e9))
    code, _, err = run(server, ["train", "-m", "weights=old,last", "task.hidden=8,16", *TASK], tmp_path)
    assert code == 0, err
    assert [row["state"] for row in rows(tmp_path)] == ["finished"] * 4
    overrides = [record(tmp_path, number)["overrides"] for number in (1, 2, 3, 4)]
    assert [next(word for word in given if word.startswith("weights=")) for given in overrides] == [
        f"weights={path}" for path in paths for _ in range(2)
    ]


def test_a_resumed_sweep_starts_trials_from_the_same_run(server: ForkServer, tmp_path: Path) -> None:
    args = ["train", "-m", "weights=last", "resume=other", "task.hidden=8,16", *TASK]
    other, base = base_run(tmp_path, "other"), base_run(tmp_path, "base")
    for name in ("metrics.jsonl", "run.json"):
        os.utime(Path(other) / name, (1.7e9, 1.7e9))
    assert run(server, args, tmp_path)[0] == 0
    shutil.rmtree(tmp_path / "outputs" / "mine" / "mine-2")
    code, out, err = run(server, args, tmp_path)
    assert code == 0, err
    assert "[1/2]" not in out
    for number in (1, 2):
        assert {f"weights={base}", f"resume={other}"} <= set(record(tmp_path, number)["overrides"])


@pytest.mark.slow
def test_failed_trials_do_not_stop_the_rest(server: ForkServer, tmp_path: Path) -> None:
    """The trials exit with an error, are killed, or report no usable metric."""
    args = ["train", "-m", "task.act=fail,killed,bad,other,good", *TASK]
    code, _, err = run(server, args, tmp_path)
    assert code == 70, err
    stored = {row["task.act"]: (row["state"], row["exit_code"], row["is_best"]) for row in rows(tmp_path)}
    assert stored == {
        "fail": ("failed", "70", "0"), "killed": ("failed", "137", "0"), "bad": ("finished", "0", "0"),
        "other": ("finished", "0", "0"), "good": ("finished", "0", "1"),
    }  # fmt: skip
    code, out, err = run(server, [*args, "retry=true"], tmp_path, MENDED="1")
    assert [line[:5] for line in out.splitlines() if line.startswith("[")] == ["[1/5]", "[1/5]", "[2/5]", "[2/5]"], err
    assert record(tmp_path, 1)["began"] == [0, 1], "the trial must resume where it failed"
    assert [row["state"] for row in rows(tmp_path)][:2] == ["finished", "failed"]


@pytest.mark.slow
def test_changed_common_settings_are_reported_on_resume(server: ForkServer, tmp_path: Path) -> None:
    assert run(server, [*GRID, "updates=10"], tmp_path)[0] == 0
    code, _, err = run(server, [*GRID, "updates=20"], tmp_path)
    assert code == 88
    assert "updates=10" in err
    assert "updates=20" in err


@pytest.mark.slow
def test_an_unknown_metric_is_reported_after_the_first_trial(server: ForkServer, tmp_path: Path) -> None:
    code, _, err = run(server, [*GRID, "metric=val/los"], tmp_path)
    assert code == 0, err
    assert len([line for line in err.splitlines() if "val/los;" in line]) == 1


@pytest.mark.slow
def test_resuming_waits_for_trials_that_are_still_saving(server: ForkServer, tmp_path: Path) -> None:
    """The trials belong to a killed sweep."""
    args, saved = [*GRID, "task.act=deaf"], tmp_path / "saved"
    pid = start(server, args, tmp_path, SAVED=str(saved))
    wait_until((tmp_path / "outputs" / "mine" / "mine-1" / "run.json").exists)
    os.kill(pid, signal.SIGKILL)
    server.wait()
    saves = record(tmp_path, 1)["pid"]
    assert run(server, [*args, "task.seconds=0.2"], tmp_path)[0] == 88, "a different task.seconds must be rejected"
    start(server, args, tmp_path, SAVED=str(saved))
    wait_until(lambda: str(saves) in (tmp_path / ".out").read_text(), "the message that it is waiting")
    saved.touch()
    result = server.wait()
    assert result.code == 0, result.err
    assert result.out.count(str(saves)) == 1


@pytest.mark.slow
def test_output_of_concurrent_trials_names_the_trial(server: ForkServer, tmp_path: Path) -> None:
    code, out, err = run(
        server, [*GRID, "together=2", "task.act=meet"], tmp_path, WANDB_RUN_ID="abc", WANDB_MODE="offline"
    )
    assert code == 0, err
    spans = [(record(tmp_path, number)["since"], record(tmp_path, number)["until"]) for number in (1, 2, 3, 4)]
    at_once = [sum(begin <= since < end for begin, end in spans) for since, _ in spans]
    assert max(at_once) == 2
    assert all(f"mine-{number} | trains mine-{number}\n" in out for number in (1, 2, 3, 4))
    assert out.splitlines()[1].startswith("2 trials at once, ")
    counted = [int(record(tmp_path, number)["threads"]) for number in (1, 2, 3, 4)]
    assert [record(tmp_path, number)["cores"] for number in (1, 2, 3, 4)] == counted
    assert {tuple(record(tmp_path, number)["wandb"]) for number in (1, 2, 3, 4)} == {("WANDB_MODE",)}


@pytest.mark.slow
@pytest.mark.parametrize(("requested", "expected"), [(3, "3"), (9, "5")])
def test_a_search_runs_as_many_trials_at_once_as_requested(
    requested: int, expected: str, server: ForkServer, tmp_path: Path
) -> None:
    needs_optuna()
    code, out, err = run(server, [*SEARCH, f"together={requested}"], tmp_path)
    assert code == 0, err
    assert Sweep.read(tmp_path / "outputs" / "mine").record.together.split()[0] == expected, out


@pytest.mark.parametrize(
    ("args", "options", "goal"),
    [
        ("", SweepOptions(), "min of val/loss"),
        ("checkpoint.best=val/acc checkpoint.best_is=max", SweepOptions(), "max of val/acc"),
        ("checkpoint.best=val/acc checkpoint.best_is=max", SweepOptions("val/loss"), "min of val/loss"),
        ("checkpoint.best=val/acc checkpoint.best_is=max", SweepOptions(best_is="min"), "min of val/acc"),
        ("checkpoint.best=val/acc early_stopping.metric=val/f1", SweepOptions(), "min of val/f1"),
        ("checkpoint.best=val/acc checkpoint.best_is=max early_stopping.metric=val/f1", SweepOptions("val/acc"),
         "max of val/acc"),
        ("checkpoint.best=null early_stopping.best_is=max", SweepOptions(), "max of val/loss"),
    ],
)  # fmt: skip
def test_settings_select_the_metric_that_compares_trials(
    args: str, options: SweepOptions, goal: str, tmp_path: Path
) -> None:
    request = Request((*args.split(), f"output_root={tmp_path}", "run=mine"), Path(TASK[1]))
    with open_sweep("sweep", request, compose(request), options) as (_, opened):
        assert str(opened.goal) == goal


@pytest.mark.slow
def test_a_search_can_be_extended_with_the_same_space_and_goal(server: ForkServer, tmp_path: Path) -> None:
    needs_optuna()
    few = ["trials=2" if word.startswith("trials") else word for word in SEARCH]
    assert run(server, few, tmp_path)[0] == 0
    before = rows(tmp_path)
    code, _, err = run(server, SEARCH, tmp_path)
    assert code == 0, err
    assert [row["name"] for row in rows(tmp_path)] == [f"mine-{n}" for n in range(1, 6)]
    assert [{**row, "is_best": ""} for row in rows(tmp_path)[:2]] == [{**row, "is_best": ""} for row in before]
    assert all(1e-5 <= float(row["optimizer.lr"]) <= 1e-1 for row in rows(tmp_path))
    assert {int(row["task.hidden"]) for row in rows(tmp_path)} <= {8, 16, 24, 32}
    assert run(server, [*SEARCH, "goal=max"], tmp_path)[0] == 88
    wider = [word.replace("1e-5", "1e-6") for word in SEARCH]
    code, _, err = run(server, wider, tmp_path)
    assert code == 88
    assert "optimizer.lr" in err
    assert "1e-05" in err


@pytest.mark.slow
def test_a_search_of_an_earlier_version_keeps_its_notation(server: ForkServer, tmp_path: Path) -> None:
    """Earlier versions passed 1e-3 to a string setting as 0.001."""
    needs_optuna()
    assert run(server, ["search", "task.act=0.001,2.5", "trials=1", *TASK], tmp_path)[0] == 0
    code, _, err = run(server, ["search", "task.act=1e-3,2.50", "trials=2", *TASK], tmp_path)
    assert code == 0, err
    assert {row["task.act"] for row in rows(tmp_path)} <= {"0.001", "2.5"}


@pytest.mark.slow
def test_failed_and_non_finite_trials_do_not_stop_a_search(server: ForkServer, tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    args = ["search", "task.act=fail,bad,good", "trials=8", "seed=1", "task.seconds=0.01", *TASK]
    code, _, err = run(server, args, tmp_path)
    assert code == 0, err
    journal = optuna.storages.journal.JournalFileBackend(str(tmp_path / "outputs/mine/optuna.journal"))
    study = optuna.load_study(study_name="search", storage=optuna.storages.JournalStorage(journal))
    states = [trial.state.name for trial in study.trials]
    acts = [row["task.act"] for row in rows(tmp_path)]
    assert {"fail", "bad", "good"} == set(acts), "choose a seed with which the search tries each value"
    assert "trials=8" in err, "the message must state that there are more trials than combinations"
    assert states == ["COMPLETE" if act == "good" else "FAIL" for act in acts]


@pytest.mark.slow
def test_a_search_with_an_unknown_metric_ends_with_a_suggestion(server: ForkServer, tmp_path: Path) -> None:
    needs_optuna()
    code, out, err = run(server, [*SEARCH, "metric=val/los"], tmp_path)
    assert code == 78
    assert "metric=val/los" in err
    assert "val/loss?" in err
    code, out, err = run(server, SEARCH, tmp_path)
    assert code == 0, err
    assert "[1/5]" not in out, "the first trial is complete, and must not be repeated"


@pytest.mark.slow
def test_a_search_whose_trials_all_fail_exits_with_their_code(server: ForkServer, tmp_path: Path) -> None:
    needs_optuna()
    assert run(server, ["search", "optimizer.lr=log(1e-5,1e-1)", "task.act=fail", "trials=1", *TASK], tmp_path)[0] == 70


@pytest.mark.slow
def test_without_optuna_the_install_command_is_shown(tmp_path: Path) -> None:
    (tmp_path / "optuna.py").write_text("raise ModuleNotFoundError('no optuna', name='optuna')")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    line = [sys.executable, "-m", "runner", *SEARCH]
    result = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 78
    line = 'pip install "accel-run[search]"'
    assert line in result.stderr
    assert not (tmp_path / "outputs").exists()


def best_of(results: Sequence[Result], goal: Goal) -> list[Result]:
    best = find_best(results, goal)
    return [] if best is None else [*best.results]


def test_the_first_of_equally_good_trials_is_the_best() -> None:
    results = [
        Result(Trial(1, "a-1", ()), "failed", 70, 0.1),
        Result(Trial(2, "a-2", ()), "finished", 0, float("nan")),
        Result(Trial(3, "a-3", ()), "finished", 0, 2.0),
        Result(Trial(4, "a-4", ()), "finished", 0, 2.0),
        Result(Trial(5, "a-5", ()), "finished", 0, 3.0),
    ]
    assert best_of(results, Goal()) == [results[2]]
    assert best_of(results, Goal(best_is="max")) == [results[4]]
    assert best_of(results[:2], Goal()) == []
    assert [line.endswith("<- best") for line in format_trial_table(results, Goal())] == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]


def test_a_trial_without_the_last_metric_is_not_the_best(tmp_path: Path) -> None:
    """After a divergence, run.json has null for the metric of the last evaluation."""
    trials = [{"number": number, "name": f"mine-{number}", "words": [], "exit_code": 0} for number in (1, 2)]
    (tmp_path / "sweep.json").write_text(json.dumps({"trials": trials, "goal": {"metric": "val/loss"}}))
    for number, last in ((1, None), (2, 2.0)):
        run = tmp_path / f"mine-{number}"
        run.mkdir()
        (run / "metrics.jsonl").write_text(
            "".join(json.dumps({"update": at, "val/loss": loss}) + "\n" for at, loss in ((1, 0.5 * number), (2, last)))
        )
        (run / "run.json").write_text(json.dumps({"state": "done", "exit_code": 0, "metrics": {"val/loss": last}}))
    sweep = Sweep.read(tmp_path)
    results = sweep.results()
    assert [each.value for each in results] == [None, 2.0]
    assert best_of(results, sweep.goal) == [results[1]]
    assert f"val/loss {NOT_MEASURED}" in format_result(results[0], sweep.goal)
    assert [NOT_MEASURED in line for line in format_trial_table(results, sweep.goal)] == [False, True, False]
    assert "nan" not in to_csv(results, sweep.goal)


def test_a_damaged_sweep_file_is_read_as_far_as_possible(tmp_path: Path) -> None:
    for text in (
        "",
        "[]",
        "{",
        '{"trials": 3, "goal": [], "space": 1, "fixed": null}',
        '{"trials": [{"number": "x"}, 4]}',
    ):
        (tmp_path / "sweep.json").write_text(text)
        assert Sweep.read(tmp_path).trials == []
    (tmp_path / "sweep.json").write_text('{"trials": [{"number": 1, "name": "../../etc", "words": []}]}')
    assert Sweep.read(tmp_path).trials == []


def test_trials_of_an_earlier_version_keep_their_notation(tmp_path: Path) -> None:
    """Earlier versions passed 1e-3 to a string setting as 0.001."""
    old = [Trial(1, "mine-1", ("task.act=0.001",)), Trial(2, "mine-2", ("task.act=2.5",))]
    result = Sweep(tmp_path, SweepRecord(fixed=()), [*old], earlier=SweepRecord(fixed=()))
    sweep.add_trials(result, [("task.act=1e-3",), ("task.act=2.50",), ("task.act=3e-3",)], "mine")
    assert result.trials == [*old, Trial(3, "mine-3", ("task.act=3e-3",))]


STRANGE = (None, True, 2**70, math.inf, math.nan, "\x1b[31mred", [], {}, [[]], {"a": {"b": None}}, {"a": 3})


@pytest.mark.slow
def test_malformed_sweep_files_do_not_crash_or_print_escape_codes(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "mine" / "mine-1"
    run.mkdir(parents=True)
    trial = {"number": 1, "name": "mine-1", "words": ["seed=1"], "exit_code": 0}
    stored = {
        "kind": "sweep",
        "trials": [trial],
        "fixed": [],
        "goal": {"metric": "val/loss"},
        "space": {"seed": "0, 1"},
        "state": "done",
    }
    made = {
        "state": "done",
        "overrides": ["seed=1"],
        "metrics": {"val/loss": 1.0},
        "phases": {"train": {"seconds": 1}},
        "evidence": {},
    }
    with RunDirectory.create_or_open(tmp_path, "copy", for_sweep=True) as copy:
        for file, good in ((run.parent / "sweep.json", stored), (run / "run.json", made)):
            (run.parent / "sweep.json").write_text(json.dumps(stored))
            (run / "run.json").write_text(json.dumps(made))
            hostile = [good | {key: value} for key in (*good, "task", "pid", "host") for value in STRANGE]
            hostile += [stored | {"trials": [trial | {key: value}]} for key in trial for value in STRANGE]
            for record in hostile:
                file.write_text(json.dumps(record))
                result = Sweep.read(run.parent)
                saves = record.get("phases", made["phases"]) != made["phases"]
                results = result.save(copy, "running") if saves else result.results()
                assert "\x1b" not in "".join(format_trial_table(results, result.goal)), record


@pytest.mark.parametrize(
    "damage",
    ["{", '{"fixed": []}', '{"trials": [], "fixed": 3}', '{"fixed": [], "trials": [{"number": 2, "name": "b"}]}'],
)
def test_a_damaged_sweep_is_not_restarted(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "check_plannable", lambda configurations: None)
    file = tmp_path / "outputs" / "mine" / "sweep.json"
    file.parent.mkdir(parents=True)
    file.write_text(damage)
    assert main(GRID) == 65
    assert "sweep.json" in capsys.readouterr().err
    assert file.read_text() == damage
    RunDirectory.create_or_open(tmp_path / "outputs", "mine", for_sweep=True).release()  # the lock has been released


@pytest.mark.parametrize("num_left", [0, 1, 2, 3])
def test_a_killed_search_chooses_the_same_values(tmp_path: Path, num_left: int) -> None:
    """The search is killed while it chooses the values of a trial."""
    needs_optuna()
    from runner.sweeps.study import JOURNAL, Study

    axes = (
        SearchSpace("optimizer.lr", (), 1e-5, 1e-1, is_log=True),
        SearchSpace("task.act", ("task.act=a", "task.act=b", "task.act=c")),
        SearchSpace("task.hidden", (), 8, 512, is_integer=True),
    )
    result = Sweep(tmp_path, SweepRecord(kind="search"))

    def complete_to_two_trials(study: Study) -> list[Trial]:
        known = study.load_trials([])
        return [*known, *(study.ask() for _ in range(2 - len(known)))]

    whole = complete_to_two_trials(Study(result, axes, "mine", seed=3))
    file = tmp_path / JOURNAL
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[: len(lines) - len(axes) + num_left]))  # the last values are those of trial 2
    assert complete_to_two_trials(Study(result, axes, "mine", seed=3)) == whole
    assert len({trial.words for trial in whole}) == 2


def test_a_damaged_journal_ends_a_search_with_a_message(tmp_path: Path) -> None:
    needs_optuna()
    from runner.sweeps.study import JOURNAL, Study

    axes = (
        SearchSpace("optimizer.lr", (), 1e-5, 1e-1, is_log=True),
        SearchSpace("task.act", ("task.act=a", "task.act=b")),
    )
    result = Sweep(tmp_path, SweepRecord(kind="search"))
    study = Study(result, axes, "mine", seed=0)
    known = [study.ask(), study.ask()]
    study.report_value(known[0], 1.0)
    file = tmp_path / JOURNAL
    whole = file.read_bytes()
    assert Study(result, axes, "mine", seed=0).load_trials(known) == known
    lines = whole.splitlines(keepends=True)
    damaged = [b"", *(lines[0] + line for line in lines[1:2])]
    damaged += [
        b"".join([*lines[:at], junk, *lines[at + 1 :]])
        for at in range(len(lines))
        for junk in (b"junk\n", b"[]\n", b"[" * 10000 + b"\n")
    ]
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(DataError, match="is damaged"):
            Study(result, axes, "mine", seed=0).load_trials(known)
    file.write_bytes(whole + b'{"op_code": 4, "half')  # a crash may leave a partial line
    assert Study(result, axes, "mine", seed=0).load_trials(known) == known
    file.write_bytes(whole.replace(b"task.act", b"task.odd"))
    with pytest.raises(DataError, match="mine-1 differs from the trial in sweep"):
        Study(result, axes, "mine", seed=0).load_trials(known)


# ---------------------------------------------------------------- W&B sweeps


@pytest.mark.slow
def test_arguments_of_wandb_sweeps_are_accepted() -> None:
    import yaml
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    text = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    sweep = yaml.safe_load(text.partition("```yaml")[2].partition("```")[0])
    chosen = {
        name: {"value": parameter.get("min") or parameter["values"][-1]}
        for name, parameter in sweep["parameters"].items()
    }
    program, command, *args = sweep["command"]
    assert (program, command, args[-1]) == ("accel-run", "train", "${args_no_hyphens}")
    made = create_sweep_command_args({"args": chosen})["args_no_hyphens"]
    configuration = compose(parse_arguments([*args[:-1], *made]).request)
    assert configuration.flat()["optimizer.lr"] == 0.0001
    assert configuration.settings.global_batch_size == 64
    assert configuration.choices["scheduler"].name == "linear"


@pytest.mark.slow
def test_list_boolean_and_null_values_of_wandb_are_accepted() -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    values = {
        "optimizer.betas": [0.9, 0.99],
        "dataloader.pin_memory": False,
        "max_grad_norm": "null",
        "phases": ["train"],
    }
    made = create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    result = compose(parse_arguments(made["args_no_hyphens"]).request).flat()
    assert {key: result[key] for key in values} == {**values, "max_grad_norm": None}


# ---------------------------------------------------------------- concurrent trials


def test_concurrent_trials_divide_devices_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.sweeps.sweep.affinity", lambda: {1, 2, 3, 5, 6, 7, 8, 9})
    slots = divide_resources(["GPU-a", "GPU-b"], 6, 3).slots  # a quota leaves 6 of the 8 cores
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["GPU-a", "GPU-b", "GPU-a"]
    assert {slot.environment["OMP_NUM_THREADS"] for slot in slots} == {"2"}
    assert [sorted(slot.cores) for slot in slots] == [[1, 2], [3, 5], [6, 7]]
    assert [slot.environment for slot in divide_resources([""], 4, 2).slots] == [{"OMP_NUM_THREADS": "2"}] * 2


@pytest.mark.slow
def test_trials_that_use_all_devices_run_alone() -> None:
    several = [compose(Request(("parallelism=ddp",)))]
    assert assign_slots(several, 1) == Packing()
    with pytest.raises(ConfigError) as caught:
        assign_slots(several, 2)
    assert [problem.where for problem in caught.value.problems] == ["together=2"]
    alone = [compose(Request(("hardware=pair_11gb_8gb", f"seed={seed}"))) for seed in (0, 1)]
    assert len(assign_slots(alone, 2).slots) == 2, "auto must select one device here"


@pytest.mark.slow
def test_planning_a_sweep_does_not_import_torch(tmp_path: Path) -> None:
    task = ROOT / "tests" / "end_to_end" / "task_with_everything.py"
    main = (
        "from runner.cli import main; from runner.sweeps import pool; from tests.sweeps.stand_in import trial_command; "
    )
    main += (
        "import sys; pool.child_command = trial_command; code = main(sys.argv[1:]); assert 'torch' not in sys.modules; "
    )
    main += "sys.exit(code)"
    args = ["train", "-m", "seed=0,1", "together=2", "device=cpu", "run=mine", "--task", str(task)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", main, *args]
    result = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.partition("\n")[2].startswith("2 trials at once, ")
