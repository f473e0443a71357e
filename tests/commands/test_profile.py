"""`accel-run profile` finds planted bottlenecks and does not change training."""

from __future__ import annotations

import csv
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.forkserver import CompletedCommand, ForkServer
from tests.suggestions import suggested

TASK = Path(__file__).parent / "task_to_profile.py"
ROOT = TASK.parents[2]
VIRTUAL = {"IMPORT_FIRST": "tests.engine.virtual_time"}  # each sleep and each reading advances the clock
TICKS_S = 1e-3  # per update: reading the clock takes a microsecond, and an update reads it fewer than 1,000 times


def profile(server: ForkServer, folder: Path, *args: str, updates: int = 2) -> CompletedCommand:
    given = [
        "profile",
        "--task",
        str(TASK),
        "run=p",
        "device=cpu",
        "monitor=off",
        "skip=1",
        f"updates={updates}",
        *args,
    ]
    return server.run(given, folder, VIRTUAL)


def read_output(folder: Path, name: str = "summary.json") -> Any:
    text = (folder / "outputs" / "profiles" / "p" / "profile" / name).read_text()
    return json.loads(text) if name.endswith(".json") else list(csv.DictReader(text.splitlines()))


@pytest.fixture(scope="module")
def planted(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompletedCommand]:
    """Profile a task that has two lines that synchronize and a module that is slow in both passes."""
    folder = tmp_path_factory.mktemp("planted")
    result = profile(
        server, folder, "task.forward_s=0.01", "task.backward_s=0.02", "task.waits=true", "with_stack=true", updates=3
    )
    assert result.code == 0, result.err
    return folder, result


@pytest.mark.slow
def test_a_slow_module_has_the_longest_self_time(planted: tuple[Path, CompletedCommand]) -> None:
    """This holds for the forward and the backward pass."""
    folder, result = planted
    rows = {row["module"]: row for row in read_output(folder, "modules.csv")}
    slow = rows["inner.1"]
    assert max(rows.values(), key=lambda row: float(row["own_median_ms"])) is slow
    for figure in ("min", "median", "max"):
        assert float(slow[f"forward_{figure}_ms"]) == pytest.approx(10, abs=1e3 * TICKS_S)
        assert float(slow[f"backward_{figure}_ms"]) == pytest.approx(20, abs=1e3 * TICKS_S)
    assert " inner.1 (Sleeper)" in result.out


@pytest.mark.slow
def test_module_times_add_up(planted: tuple[Path, CompletedCommand]) -> None:
    summary = read_output(planted[0])
    rows = {row["path"]: row for row in summary["modules"]}
    inner = [rows[path] for path in ("inner", "inner.0", "inner.1", "inner.2")]
    assert rows["inner"]["total"]["mean"] == pytest.approx(sum(row["own"]["mean"] for row in inner))
    for row in rows.values():
        assert row["total"]["mean"] == pytest.approx(row["forward"]["mean"] + row["backward"]["mean"])
    whole = sum(row["own"]["mean"] for row in rows.values())
    assert whole == pytest.approx(summary["update_ms"]["modules timed"] / 1e3, abs=TICKS_S)


def test_no_synchronizing_lines_are_reported_on_a_cpu(planted: tuple[Path, CompletedCommand]) -> None:
    assert read_output(planted[0])["waits"] is None


def test_the_trace_contains_the_operators_of_each_update(planted: tuple[Path, CompletedCommand]) -> None:
    folder, result = planted
    content = (folder / "outputs" / "profiles" / "p" / "profile" / "trace.json.gz").read_bytes()
    names = [event.get("name") for event in json.loads(gzip.decompress(content))["traceEvents"]]
    assert "aten::addmm" in names
    assert sum(str(name).startswith("ProfilerStep#") for name in names) == 3
    assert "ui.perfetto.dev" in result.out


def test_operators_are_named_with_their_calling_line(planted: tuple[Path, CompletedCommand]) -> None:
    folder, _ = planted
    rows = read_output(folder, "operators.csv")
    assert any(row["name"] == "aten::addmm" and "task_to_profile.py" in row["place"] for row in rows)
    assert len(read_output(folder)["operators"]) == 10


def test_the_table_has_no_python_functions(planted: tuple[Path, CompletedCommand]) -> None:
    """No share exceeds 100 %."""
    rows = read_output(planted[0], "operators.csv")  # with_stack=true adds a row for each Python function in torch
    assert not [row["name"] for row in rows if ".py(" in row["name"] or row["name"].startswith("<built-in")]
    assert "aten::addmm" in {row["name"] for row in rows}
    own = [float(row["self_cpu_ms"]) for row in rows]
    assert min(own) >= 0
    shares = re.findall(r"(\d+\.\d)%", planted[1].out.partition("operators by")[2].partition("modules:")[0])
    assert shares
    assert max(map(float, shares)) <= 100


def test_the_overhead_of_profiling_is_reported(planted: tuple[Path, CompletedCommand]) -> None:
    folder, _ = planted
    times = read_output(folder)["update_ms"]
    assert list(times) == ["uninstrumented", "operators recorded", "modules timed"]
    planted_ms = pytest.approx(30, abs=1e3 * TICKS_S)
    assert all(milliseconds == planted_ms for milliseconds in times.values())


def test_no_line_is_wider_than_the_screen(planted: tuple[Path, CompletedCommand]) -> None:
    text = (planted[0] / "outputs" / "profiles" / "p" / "profile" / "report.txt").read_text()
    assert text in planted[1].out
    assert max(map(len, text.splitlines())) <= 140


def test_profiling_does_not_change_the_losses(server: ForkServer, tmp_path: Path) -> None:
    shared_settings = "device=cpu monitor=off log_every=1 epochs=3 global_batch_size=6 micro_batch_size=2"
    plain = [str(TASK), *shared_settings.split()]
    assert server.run(["train", "--task", *plain, "run=plain"], tmp_path).code == 0
    result = server.run(["profile", "--task", *plain, "run=p", "skip=1", "updates=2", "accumulate=1"], tmp_path)
    assert result.code == 78  # unknown setting
    result = server.run(["profile", "--task", *plain, "run=p", "skip=1", "updates=2"], tmp_path)
    assert result.code == 0, result.err

    def losses(folder: str) -> list[tuple[float, float]]:
        rows = (tmp_path / "outputs" / folder / "metrics.jsonl").read_text().splitlines()
        return [(row["train/loss"], row["train/grad_norm"]) for row in map(json.loads, rows) if "train/loss" in row]

    assert len(losses("profiles/p")) == 10
    assert losses("profiles/p") == losses("plain")[:10]


def test_profiled_runs_are_stored_separately_without_checkpoints(server: ForkServer, tmp_path: Path) -> None:
    trained = server.run(f"train --task {TASK} run=p device=cpu monitor=off updates=2", tmp_path)
    assert trained.code == 0, trained.err
    result = profile(server, tmp_path, "checkpoint.every=1", "resume=p", "tracker=wandb", updates=1)
    assert result.code == 0, result.err
    assert [suggested(line) for line in result.err.splitlines() if "checkpoint.every" in line] == [
        ["checkpoint.every=1", "tracker=wandb"]
    ]
    assert not list((tmp_path / "outputs" / "profiles" / "p" / "checkpoints").glob("update-*"))
    status = server.run(["status"], tmp_path)
    assert "p: finished   (outputs/p)" in status.out


def test_ctrl_c_writes_a_partial_profile(server: ForkServer, tmp_path: Path) -> None:
    result = profile(server, tmp_path, "task.stop_at=6", updates=3)
    assert result.code == 130, result.err
    assert read_output(tmp_path)["num_updates"] == {"uninstrumented": 3, "operators recorded": 1}
    assert read_output(tmp_path)["modules"] == []
    assert "aten::addmm" in {row["name"] for row in read_output(tmp_path, "operators.csv")}


def test_ctrl_c_before_profiling_reports_an_empty_profile(server: ForkServer, tmp_path: Path) -> None:
    result = profile(server, tmp_path, "task.stop_at=2", "skip=5")
    assert result.code == 130, result.err
    assert "nothing was profiled" in result.out


def test_evaluations_and_saves_are_not_profiled(server: ForkServer, tmp_path: Path) -> None:
    args = (
        "device=cpu monitor=off updates=12 evaluate.every=4 evaluate.samples=8 checkpoint.every=1 task.evaluation_s=2"
    )
    options = "profiler=trace profiler.skip=1 profiler.updates=2"
    result = server.run(["train", "--task", str(TASK), "run=p", *args.split(), *options.split()], tmp_path, VIRTUAL)
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "outputs/p/profile/summary.json").read_text())
    assert summary["num_updates"]["uninstrumented"] == 2
    assert all(milliseconds < 1e3 * TICKS_S for milliseconds in summary["update_ms"].values()), (
        "a profiled update contains an evaluation, which takes 2 s"
    )
    assert sum(row["own"]["mean"] for row in summary["modules"]) < TICKS_S


def test_invalid_arguments_are_reported(server: ForkServer, tmp_path: Path) -> None:
    for args, answer in (
        (["updates=1000"], "updates=1000"),
        (["sort_by=memory"], "sort_by=memory"),
        (["profiler=off"], "profiler=trace"),
        (["deepth=3"], "deepth"),
    ):
        result = server.run(["profile", "--task", str(TASK), *args], tmp_path)
        assert result.code == 78, (args, result.out, result.err)
        assert answer in result.err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_a_compiled_graph_is_timed_as_one_module(server: ForkServer, tmp_path: Path) -> None:
    result = profile(server, tmp_path, "compile=default", "compile.backend=aot_eager", updates=1)
    assert result.code == 0, result.err
    rows = read_output(tmp_path, "modules.csv")
    (model,) = (row for row in rows if not row["module"].startswith("("))
    assert model["class"] == "Net, one graph"
    assert float(model["forward_mean_ms"]) > 0
    assert float(model["backward_mean_ms"]) > 0


@pytest.mark.slow
def test_each_phase_and_rank_has_a_profile(server: ForkServer, tmp_path: Path) -> None:
    args = "parallelism=ddp parallelism.world_size=2 device=cpu monitor=off run=p skip=1 updates=1 global_batch_size=2"
    result = server.run(
        f"profile task=hyperspectral {args} task.num_cubes=24 task.height=16 task.width=16 task.data=synthetic",
        tmp_path,
    )
    assert result.code == 0, result.err
    for phase in ("fit", "train"):
        summary = json.loads((tmp_path / f"outputs/profiles/p/profile/{phase}/summary.json").read_text())
        assert summary["ranks"] == 2
        assert "(communication)" in {row["path"] for row in summary["modules"]}
    assert "rank 0 of 2" in result.out
