"""The report of a sweep or a search, and the output of other commands for its folder."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path

import pytest

from runner.cli import main
from runner.tools.report.watch import watch
from tests.tools.report.runs import make_run, record, rows
from tests.tools.report.test_report import Page, assert_is_sound, labelled

GOAL = {"metric": "val/loss", "best_is": "min"}


def sweep_of(folder: Path, count: int, *, kind: str = "search") -> Path:
    """Create the folder of a search. Trial 7 has the lowest loss, trial 2 failed, and the last trial is pending."""
    path = folder / "outputs" / "lr"
    trials = []
    for number in range(1, count + 1):
        name, loss = f"lr-{number}", 1 + abs(number - 7) / 10
        args = [f"optimizer.lr={10 ** -(number % 5 + 1)}", f"optimizer={'adam' if number % 2 else 'sgd'}"]
        trials.append({"number": number, "name": name, "words": args, "exit_code": 70 if number == 2 else 0})
        if number == count:
            trials[-1]["exit_code"] = None
            break
        output = record(name, metrics={"val/loss": loss}, state="failed" if number == 2 else "done", overrides=args)
        metrics = [{**row, "val/loss": loss + 1 / row["update"]} if "val/loss" in row else row for row in rows(10)]
        make_run(path, name, run__json=output, metrics__jsonl=metrics, config__yaml=f"optimizer:\n  lr: {number}\n")
    content = {"kind": kind, "name": "lr", "state": "done", "task": "gpt", "goal": GOAL, "trials": trials}
    content |= {"space": {"optimizer.lr": "1e-05 to 0.1 on a log scale"}, "command": "accel-run search ... run=lr"}
    (path / "sweep.json").write_text(json.dumps(content))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return sweep_of(tmp_path, 20)


@pytest.mark.slow
def test_a_search_page_compares_the_best_trials(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "lr"]) == 0
    assert capsys.readouterr().out.split()[2] == "outputs/lr/report.html"
    page = Page((folder / "report.html").read_text())
    assert_is_sound(page)
    assert "lr-7" in page.words
    assert "<- best" in page.words
    assert re.search(r"lr-2 .*\(exit 70\)", page.words)
    assert "12 best" in page.words
    charts = labelled(page)
    assert re.findall(r"[\d.]+", charts["trials0"]) == ["18", "1", "1.6"]
    assert re.findall(r"[\d.e-]+\b", charts["trials1"])[:3] == ["1e-05", "0.1", "0.001"]
    assert main(["report", str(folder), "out=here.html"]) == 0
    assert Path("here.html").is_file()


@pytest.mark.slow
def test_a_page_about_500_trials_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = sweep_of(tmp_path, 500)
    assert main(["report", "lr"]) == 0
    text = (path / "report.html").read_text()
    assert len(text.encode()) < 500_000
    assert "trials0" in text


@pytest.mark.slow
@pytest.mark.parametrize(("job", "num_waits"), [("7_12", 1), (None, 0)])
def test_a_page_is_rewritten_while_jobs_are_in_the_queue(
    job: str | None, num_waits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []

    def interrupt(seconds: float) -> None:
        waits.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "lr").mkdir(parents=True)
    folder = sweep_of(tmp_path, 1)
    content = json.loads((folder / "sweep.json").read_text())
    content["trials"][0]["job"] = job
    (folder / "sweep.json").write_text(json.dumps(content))
    monkeypatch.setattr("runner.tools.report.watch.watch", partial(watch, wait=interrupt))
    assert main(["report", "lr", "--watch"]) == 0
    assert len(waits) == num_waits


@pytest.mark.slow
def test_invalid_sweep_files_do_not_break_the_page(folder: Path) -> None:
    (folder / "lr-3" / "run.json").write_text(
        '{"state": 3, "metrics": [], "phases": {"train": {"seconds": "x"}}, "exit_code": "a"}'
    )
    (folder / "lr-4" / "metrics.jsonl").write_text('{"update": 1, "val/loss": 1e999}\n{"val/loss": "x"}\nnonsense')
    (folder / "lr-5" / "run.json").write_text(json.dumps(record("lr-5", metrics={"val/loss": math.nan}, overrides=[])))
    content = json.loads((folder / "sweep.json").read_text())
    content["together"] = content["command"] = content["trials"][0]["words"][0] = (
        "<script>alert(1)</script>\x1b[31m=\x00"
    )
    (folder / "sweep.json").write_text(json.dumps(content))
    assert main(["report", "lr"]) == 0
    page = Page((folder / "report.html").read_text())
    assert_is_sound(page)
    assert main(["status", "lr"]) == 0
    assert main(["runs"]) == 0


def test_a_sweep_is_listed_as_one_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(folder.parent, "alone", run__json=record("alone"))
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert {line.split()[0] for line in lines} == {"alone", "lr"}
    (line,) = [line for line in lines if line.startswith("lr ")]
    assert "trials 19/20" in line
    assert "val/loss 1 " in line
    assert main(["status", "lr"]) == 0
    summary = capsys.readouterr().out
    assert "18 finished, 1 failed, 1 waiting;" in summary
    assert re.search(r" 1, lr-7 +optimizer\.lr=0\.001", summary)
    assert main(["status", "lr-7"]) == 0
    assert capsys.readouterr().out.startswith("lr-7: finished")
    assert main(["inference", "run=lr", "device=cpu"]) == 66
    assert " 19 runs" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train run=lr", "train -m seed=1,2 run=alone"])
def test_a_run_and_a_sweep_do_not_share_a_folder(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.sweeps import sweep

    monkeypatch.setattr(sweep, "check_plannable", lambda configurations: None)
    make_run(folder.parent, "alone", run__json=record("alone"))
    before = sorted(path.name for path in folder.iterdir())
    assert main([*command.split(), "device=cpu"]) == 78
    assert "run=" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == before
