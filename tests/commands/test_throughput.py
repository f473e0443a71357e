"""A run has one throughput, which is the same on every screen, in every file and on every page."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.base.text import format_rate
from runner.host.process_tree import process_identity
from tests.commands_here import run_here
from tests.forkserver import ForkServer
from tests.rounding import allowed

TASK = Path(__file__).parents[1] / "end_to_end" / "task_with_everything.py"
UPDATES, EVERY = 30, 4


@pytest.fixture(scope="module")
def screen(folder: Path) -> str:
    """Return the output of a short run whose first update and evaluations are much slower than the other updates."""
    args = ["train", "--task", str(TASK), "device=cpu", "monitor=off", f"updates={UPDATES}", f"log_every={EVERY}"]
    result = run_here([*args, "run=one", "evaluate.every=10"], folder)
    assert result.code == 0, result.err
    return result.out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("throughput")


@pytest.fixture(scope="module")
def known(screen: str, folder: Path) -> float:
    """Return the throughput in run.json."""
    result = record(folder)["evidence"]["items_per_s"]
    assert isinstance(result, float)
    assert result > 0
    return result


def record(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "outputs" / "one" / "run.json").read_text()))


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "outputs" / "one" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "perf/step_time_ms" in row]


@pytest.mark.slow
def test_throughput_excludes_the_first_update(known: float, folder: Path) -> None:
    evidence = record(folder)["evidence"]
    between = ("hooks", "logging", "drawing", "evaluation", "saving")
    updates = ("data", "transfer", "forward", "backward", "optimizer", "wait")
    of_updates = sum(evidence["parts_s"].get(part, 0.0) for part in updates)
    seconds = of_updates + sum(evidence["parts_s"].get(part, 0.0) for part in between)
    items = evidence["items_per_update"] * (UPDATES - 1)
    # `parts_s` also contains work after the last update, such as the last evaluation, which does not count here.
    rounded = allowed(torch.float64, len(updates) + len(between))
    assert items / seconds * (1 - rounded) <= known <= items / of_updates * (1 + rounded)


def test_metric_rows_give_the_same_throughput(known: float, folder: Path) -> None:
    assert rows(folder)[-1]["perf/throughput"] == rows(folder)[-1]["perf/items_per_s"] == known


def test_progress_lines_show_the_throughput_of_their_rows(screen: str, folder: Path) -> None:
    shown = [float(result) for result in re.findall(r"items_per_s=([\d.e+-]+)", screen)]
    assert shown
    for figure in shown:  # shown with four digits
        assert any(row["perf/throughput"] == pytest.approx(figure, rel=1e-3) for row in rows(folder))


def test_the_end_summary_shows_the_throughput(known: float, screen: str) -> None:
    (line,) = [line for line in screen.splitlines() if line.startswith("finished ")]
    assert re.search(r"([\d.,]+) \w+s/s", line)[1] == format_rate(known)  # type: ignore[index]


def test_runs_and_status_show_the_throughput(known: float, folder: Path) -> None:
    (row,) = json.loads(run_here("runs --json", folder).out)
    assert row["items_per_s"] == known
    _, line = run_here("runs", folder).out.splitlines()
    assert format_rate(known) in line.split()
    assert re.search(rf" {re.escape(format_rate(known))} \w+s/s", run_here("status", folder).out)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("args", ["report one", "report one two out=both.html"])
def test_html_reports_show_the_throughput(args: str, known: float, folder: Path) -> None:
    shutil.copytree(folder / "outputs" / "one", folder / "outputs" / "two", dirs_exist_ok=True)
    result = run_here(args, folder)
    shutil.rmtree(folder / "outputs" / "two")
    assert result.code == 0, result.err
    out = folder / ("both.html" if "both" in args else "outputs/one/report.html")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", out.read_text()))
    assert f" {format_rate(known)} " in text


@pytest.mark.parametrize(
    "evidence",
    [{"evidence": None}, {"state": "running", "pid": 0, "evidence": {"items_per_s": 1.0}}],
    ids=["first process", "resumed: evidence of an earlier process"],
)
def test_an_unfinished_run_shows_the_throughput_of_its_last_row(
    evidence: dict[str, Any], known: float, folder: Path
) -> None:
    path = folder / "outputs" / "one" / "run.json"
    kept = path.read_text()
    path.write_text(json.dumps(record(folder) | evidence))
    try:
        (row,) = json.loads(run_here("runs --json", folder).out)
        assert row["items_per_s"] == rows(folder)[-1]["perf/throughput"]
    finally:
        path.write_text(kept)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("kill_at", "is_known"), [(2, False), (20, True)])
def test_a_running_process_hides_the_throughput_of_earlier_ones(
    kill_at: int, is_known: bool, tmp_path: Path, server: ForkServer
) -> None:
    """Kill the resumed run before or after its first metric row, and show it as if it were still running."""
    train = ["train", "--task", str(TASK), "device=cpu", "monitor=off", "run=one", f"log_every={EVERY}"]
    train += [f"task.kill_at={kill_at}", f"task.wait_for={tmp_path}"]
    assert run_here([*train, f"updates={UPDATES}"], tmp_path, {"NO_KILL": "1"}).code == 0
    plant_throughput(tmp_path, earlier := 987_654.0)
    result = server.run([*train, "updates=60", "resume_allow=[updates]"], tmp_path)
    assert result.code == -signal.SIGKILL, result.err
    last = rows(tmp_path)[-1]
    assert (last["update"] > UPDATES) == is_known
    own = last["perf/throughput"] if is_known else None
    (row,) = json.loads(run_here("runs --json", tmp_path).out)
    assert row["items_per_s"] == (own or earlier), "while no process runs, the last known throughput must be shown"
    alive = {"pid": os.getpid(), "birth": process_identity(os.getpid())}
    (tmp_path / "outputs" / "one" / "run.json").write_text(json.dumps(record(tmp_path) | alive))
    (row,) = json.loads(run_here("runs --json", tmp_path).out)
    assert (row["state"], row["items_per_s"]) == ("running", own)
    assert ("throughput" in run_here("status", tmp_path).out) == is_known
    assert run_here("report one", tmp_path).code == 0
    page = (tmp_path / "outputs" / "one" / "report.html").read_text()
    assert is_known or f"{format_rate(earlier)} " not in page


def plant_throughput(folder: Path, figure: float) -> None:
    """Replace the measured throughput, because its digits might also occur in another figure of a page."""
    content = record(folder)
    content["evidence"]["items_per_s"] = figure
    run = folder / "outputs" / "one"
    (run / "run.json").write_text(json.dumps(content))
    planted = [row | {"perf/throughput": figure} if "perf/throughput" in row else row for row in rows(folder)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in planted))


def write_run(folder: Path, rows: Sequence[Mapping[str, Any]], **record: Any) -> Path:
    """Write a run with these metric rows and this run.json, and return its folder."""
    run = folder / "outputs" / "one"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run / "run.json").write_text(json.dumps({"name": "one", **record}))
    return run


@pytest.mark.parametrize(("state", "figure"), [("running", None), ("failed", 123.0)])
def test_a_process_without_rows_shows_the_earlier_throughput(state: str, figure: float | None, tmp_path: Path) -> None:
    row = {"phase": "train", "update": 10, "perf/throughput": 123.0}
    process = {"pid": os.getpid(), "birth": process_identity(os.getpid()), "metrics_bytes": len(json.dumps(row)) + 1}
    write_run(tmp_path, [row], state=state, **process)
    (found,) = json.loads(run_here("runs --json", tmp_path).out)
    assert (found["state"], found["items_per_s"]) == (state, figure)


def test_throughput_has_the_unit_of_its_phase(tmp_path: Path) -> None:
    run = write_run(tmp_path, [{"phase": "text", "update": 10, "perf/throughput": 1000.0}], state="failed")
    starts = [{"kind": "phase", "phase": name, "item": item} for name, item in (("text", "token"), ("images", "image"))]
    (run / "events.jsonl").write_text("".join(f"{json.dumps(start)}\n" for start in starts))
    assert "tokens/s" in run_here("status one", tmp_path).out
