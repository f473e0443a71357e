"""`accel-run train -m` runs every combination of values, each in a separate process.

Unless a test is about starting Python, trials are forks of a process that has loaded torch (tests/forked_trials.py).
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner.base.errors import ConfigError, Problem
from runner.cli import main
from runner.sweeps import sweep
from runner.sweeps.pool import LocalPool
from runner.sweeps.sweep import add_trials
from runner.sweeps.trials import Sweep, Trial
from tests.forkserver import CompletedCommand, ForkServer
from tests.suggestions import suggested
from tests.waiting import wait_until

TASK = Path(__file__).parents[1] / "end_to_end" / "task_with_everything.py"
FORKED = {"IMPORT_FIRST": "tests.forked_trials"}
ON_CPU = ["--task", str(TASK), "device=cpu", "monitor=off", "evaluate.every=0"]


def record(folder: Path, name: str) -> dict[str, Any]:
    content = json.loads((folder / "outputs" / "mine" / name / "run.json").read_text())
    assert isinstance(content, dict)
    return content


@dataclass(frozen=True)
class Swept:
    """Results of a sweep whose first trial fails, of the same command again, and of a retry without the fault."""

    folder: Path
    words: list[str]
    first: CompletedCommand
    pids: list[int]
    unasked: CompletedCommand
    again: CompletedCommand


@pytest.fixture(scope="module")
def swept(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    folder = tmp_path_factory.mktemp("swept")
    args = ["train", "-m", "run=mine", "task.fail_at=15,0", "updates=20,10", *ON_CPU]
    first = server.run(args, folder, env=FORKED)
    (folder / "outputs" / "mine" / "mine-1" / "kept").write_text("")
    pids = [record(folder, f"mine-{number}")["pid"] for number in (1, 2, 3, 4)]
    unasked = server.run(args, folder, env=FORKED | {"NO_KILL": "1"})
    again = server.run([*args, "retry=true"], folder, env=FORKED | {"NO_KILL": "1"})
    return Swept(folder, args, first, pids, unasked, again)


def rows(text: str) -> list[list[str]]:
    """Return the rows of the table of trials that was printed last."""
    return [re.split(r"  +", line) for line in text.splitlines() if re.match(r"mine-\d+  ", line)]


def test_every_combination_trains_in_a_subfolder_of_the_sweep(swept: Swept) -> None:
    names = [path.name for path in (swept.folder / "outputs" / "mine").iterdir() if path.is_dir()]
    assert sorted(names) == [f"mine-{n}" for n in (1, 2, 3, 4)]
    for number, (fail_at, updates) in enumerate([(15, 20), (15, 10), (0, 20), (0, 10)], 1):
        overrides = record(swept.folder, f"mine-{number}")["overrides"]
        assert {f"task.fail_at={fail_at}", f"updates={updates}", f"run=mine-{number}"} <= set(overrides)


def test_a_failed_trial_does_not_stop_the_sweep(swept: Swept) -> None:
    """The exit code of the failed trial becomes that of the sweep."""
    assert swept.first.code == swept.unasked.code == 70
    assert [row[3] for row in rows(swept.first.out)] == ["failed (70)", "finished", "finished", "finished"]
    assert swept.first.err.count("raised KeyError: 'points'") == 1
    assert "3 finished, 1 failed" in swept.first.out


def test_the_table_has_overrides_states_and_metrics(swept: Swept) -> None:
    """The best value is marked."""
    losses = {f"mine-{n}": record(swept.folder, f"mine-{n}")["metrics"]["val/loss"] for n in (1, 2, 3, 4)}
    best = min(losses, key=lambda name: losses[name])
    messages = rows(swept.again.out)
    assert [row[0] for row in messages] == list(losses)
    for row in messages:
        assert row[3:6] == ["finished", f"{losses[row[0]]:.5g}", f"{losses[row[0]]:.5g}"]
        assert (row[-1] == "<- best") == (row[0] == best)
    with (swept.folder / "outputs" / "mine" / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["name"] for row in table if row["is_best"] == "1"] == [best]
    assert [float(row["val/loss"]) for row in table] == list(losses.values())
    assert [(row["task.fail_at"], row["updates"]) for row in table][:2] == [("15", "20"), ("15", "10")]


def test_trials_print_only_problems_by_default(swept: Swept) -> None:
    lines = swept.first.out.splitlines()
    own = [line for line in lines if re.match(r"\[\d/4\] ", line)]
    assert [line.split()[1] for line in own] == [f"mine-{n}" for n in (1, 1, 2, 2, 3, 3, 4, 4)]
    assert own[1].split("  ")[1] == "failed (70)"
    assert lines[1 : len(own) + 1] == own, "trials must print nothing between these lines"
    for number in (1, 2, 3, 4):
        kept = (swept.folder / "outputs" / "mine" / f"mine-{number}" / "console.log").read_text()
        assert " updates, " in kept


@pytest.mark.slow
def test_trials_print_everything_on_request(server: ForkServer, tmp_path: Path) -> None:
    args = ["train", "-m", "run=mine", "seed=1,2", "updates=10", *ON_CPU]
    result = server.run(args, tmp_path, env=FORKED | {"ACCEL_RUN_LOG_LEVEL": "info"})
    assert result.code == 0, result.err
    assert result.out.count(" updates, ") == 2


def test_repeating_the_command_retries_only_on_request(swept: Swept) -> None:
    assert not [line for line in swept.unasked.out.splitlines() if line.startswith("[")]
    assert [row[3] for row in rows(swept.unasked.out)] == ["failed (70)", "finished", "finished", "finished"]
    assert swept.again.code == 0, swept.again.err
    begins, ends = [line.split("  ") for line in swept.again.out.splitlines() if line.startswith("[")]
    assert (begins[0], begins[1].split()) == ("[1/4] mine-1", ["task.fail_at=15", "updates=20"])
    assert ends[:2] == ["[1/4] mine-1", "finished"]
    assert re.fullmatch(r"val/loss [\d.e-]+", ends[2])
    pids = [record(swept.folder, f"mine-{number}")["pid"] for number in (1, 2, 3, 4)]
    assert [new == old for new, old in zip(pids, swept.pids, strict=True)] == [False, True, True, True]
    assert (swept.folder / "outputs" / "mine" / "mine-1" / "kept").exists()


def test_values_can_be_added_to_a_sweep_not_removed(swept: Swept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(swept.folder)
    fewer = [word.replace("updates=20,10", "updates=20") for word in swept.words]
    before = (swept.folder / "outputs" / "mine" / "sweep.json").read_bytes()
    assert main(fewer) == 88
    assert (swept.folder / "outputs" / "mine" / "sweep.json").read_bytes() == before
    result = Sweep.read(swept.folder / "outputs" / "mine")
    old = list(result.trials)
    add_trials(
        result, [("task.fail_at=15", f"updates={n}") for n in (20, 10, 5)] + [old[2].words, old[3].words], "mine"
    )
    assert result.trials[:4] == old
    assert result.trials[4:] == [Trial(5, "mine-5", ("task.fail_at=15", "updates=5"))]


PROBLEMS = [
    "updates=0,10 optimizer.lr=-1,0.1 precision=fp32,bf17",
    "micro_batch_size=7,5,12",
    "run=mine,yours",
    "output_root=a,b",
    "run=../mine seed=1,2",
    "device=cuda,cpu",
    "seed=1,2 lrr=3",
]


@pytest.mark.parametrize("args", PROBLEMS)
def test_all_problems_are_reported_before_any_trial_starts(
    args: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    on_cpu = [word for word in ON_CPU if not (word.startswith("device") and "device" in args)]
    if "device=cuda" in args:
        import torch

        if torch.cuda.is_available():
            pytest.skip("device=cuda is right here")
    code = main(["train", "-m", *on_cpu, *args.split()])
    assert code in (69, 78)
    out, err = capsys.readouterr()
    assert re.fullmatch(r"(sweep over \d+ trials: .*\n)?", out)
    assert "Traceback" not in err
    for key in (word.partition("=")[0] for word in args.split()):
        assert key in err or key in ("seed", "run")
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("args", ["train -m seed=1,2,3", "search trials=3 seed=1,2,3", "train -m seed=1"])
def test_the_first_line_is_printed_before_torch_is_loaded(
    args: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if args.startswith("search"):
        pytest.importorskip("optuna")
    printed = []

    def check_plannable(configurations: object) -> None:
        printed.append(capsys.readouterr())
        raise ConfigError(Problem("ends the test"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "check_plannable", check_plannable)
    assert main([*args.split(), *ON_CPU]) == 78
    (lines,) = printed
    if args.endswith("=1"):
        assert (lines.out, lines.err.count("\n")) == ("", 1)
        assert "optimizer.lr=0.001,0.003" in lines.err
    else:
        assert (lines.out.count("\n"), lines.err) == (1, "")
        assert "3" in lines.out, "the line lacks the number of trials"


def test_problems_shared_by_trials_are_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-m", *ON_CPU, "seed=1,2,3,4", "optimizer.lr=-1"]) == 78
    assert capsys.readouterr().err.count("optimizer.lr=-1: ") == 1


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("number", "to_group"),
    [(signal.SIGINT, True), (signal.SIGTERM, False)],
    ids=["as a terminal does", "to the sweep alone"],
)
def test_a_signal_saves_the_trial_and_ends_the_sweep(
    number: signal.Signals, to_group: bool, server: ForkServer, tmp_path: Path
) -> None:
    args = ["train", "-m", "run=mine", "seed=1,2", "task.sleep_s=0.02", "updates=1000", "log_every=1", *ON_CPU]
    pid = server.start(args, tmp_path, FORKED)
    metrics = tmp_path / "outputs" / "mine" / "mine-1" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size)
    (os.killpg if to_group else os.kill)(pid, number)
    result = server.wait()
    assert result.code == 75, result.err
    assert suggested(result.out.splitlines()[-1]) == ["run=mine"]
    assert record(tmp_path, "mine-1")["state"] == "preempted"
    assert list((tmp_path / "outputs" / "mine" / "mine-1" / "checkpoints").glob("update-*"))
    assert not (tmp_path / "outputs" / "mine" / "mine-2").exists()


def test_a_signal_while_a_trial_starts_ends_the_sweep(server: ForkServer, tmp_path: Path) -> None:
    pid = server.start(["train", "-m", "run=mine", "seed=1,2", *ON_CPU], tmp_path)
    out = tmp_path / ".out"
    wait_until(lambda: out.exists() and "[1/2]" in out.read_text())
    children = Path(f"/proc/{pid}/task/{pid}/children")  # the trial has started, but cannot save yet
    wait_until(children.read_text if children.exists() else lambda: True)
    os.kill(pid, signal.SIGTERM)
    result = server.wait()
    assert result.code == 75, result.err
    assert "[2/2]" not in result.out
    assert suggested(result.out.splitlines()[-1]) == ["run=mine"]


def test_no_trial_starts_after_a_signal_between_trials() -> None:
    with LocalPool() as pool:
        assert pool.has_free_slot
        os.kill(os.getpid(), signal.SIGTERM)
        assert not pool.has_free_slot


def test_signal_handlers_are_restored_after_a_sweep() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with LocalPool():
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before


SLIPS = [
    "train -m seed=1,2 together=0",
    "train -m seed=1,2 goal=up",
    "train -m seed=1,2 goal",
    "train -m seed=1,2 retry=maybe",
    "train seed=1 together=2",
    "search trials=0 seed=1,2",
    "search budget_s=0 seed=1,2",
    "search n_trials=5 seed=1,2",
    "search direction=minimize seed=1,2",
    "search trails=5 seed=1,2",
]


def test_typos_in_a_sweep_get_suggestions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], screen: Callable[..., None]
) -> None:
    monkeypatch.chdir(tmp_path)
    messages = []
    for args in SLIPS:
        assert main(args.split()) == 78, args
        messages.append(f"$ accel-run {args}\n{capsys.readouterr().err}")
    assert not list(tmp_path.iterdir())
    screen("\n".join(messages))
