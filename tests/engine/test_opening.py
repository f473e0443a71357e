"""What a rank other than the first opens: the checkpoint of the first rank, weights, and its own monitor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runner.config.configuration import compose
from runner.config.request import Request
from runner.distributed.world import World
from runner.durable import files
from runner.durable.checkpoint import LoadedCheckpoint, checkpoint_path
from runner.durable.signals import StopRequest
from runner.engine import opening
from runner.engine.opening import open_other_rank
from runner.engine.process.job import Job
from runner.engine.run import TrainingRun
from runner.engine.session import run_rank
from runner.plan.inventory import Cpu, Inventory
from runner.plan.planner import make_plan
from tests.faults.recording import Quick

TASK = Path(__file__).with_name("task_of_averages.py")
CPU = torch.device("cpu")


class Other(World):
    """Rank 1 with the path of the checkpoint that rank 0 would broadcast."""

    def __init__(self, path: Path | None, local_rank: int) -> None:
        super().__init__(CPU, rank=1, local_rank=local_rank)
        self.path = path

    def broadcast(self, value: Any) -> Any:
        assert value is None
        return str(self.path) if self.path else None


def job_of(folder: Path, *args: str) -> Job:
    overrides = ("device=cpu", "monitor=off", f"output_root={folder}", "updates=2", "backend.threads=1", *args)
    configuration, inventory = compose(Request(overrides, TASK)), Inventory((), Cpu("a processor", 4, 8, 0))
    return Job(configuration.request, configuration, make_plan(configuration, inventory), inventory, "mine")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The last checkpoint of a run."""
    with files.use_system(Quick()):
        run_rank(job_of(tmp_path), World(CPU))
    return checkpoint_path(tmp_path / "mine" / "checkpoints", 2)


@contextmanager
def opened(
    folder: Path, path: Path | None, *args: str, local_rank: int = 1
) -> Iterator[tuple[TrainingRun, LoadedCheckpoint | None]]:
    with files.use_system(Quick()), ExitStack() as stack:
        yield open_other_rank(job_of(folder, *args), Other(path, local_rank), stack, stack.enter_context(StopRequest()))


def test_other_ranks_read_the_checkpoint_without_hashing_it(checkpoint: Path, tmp_path: Path) -> None:
    content = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with opened(tmp_path, checkpoint) as (run, start):
        assert start is not None
        assert start.path == checkpoint
        assert start.update == 2
        assert run.directory.path == tmp_path / "mine"
    with opened(tmp_path, None) as (_, start):
        assert start is None


def test_every_rank_of_a_new_run_loads_the_weights_file(checkpoint: Path, tmp_path: Path) -> None:
    with opened(tmp_path, None) as (run, _):
        given = {name: torch.full_like(tensor, 0.25) for name, tensor in run.parts.bare.state_dict().items()}
    save_file(given, tmp_path / "w.safetensors")
    for path in (None, checkpoint):
        with opened(tmp_path, path, f"weights={tmp_path / 'w.safetensors'}") as (run, _):
            is_given = all(torch.equal(tensor, given[name]) for name, tensor in run.parts.bare.state_dict().items())
            assert is_given == (path is None)


def test_other_ranks_print_and_write_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    capsys.readouterr()
    with opened(tmp_path, checkpoint) as (run, _):
        run.observers.screen.info("of another rank")
        run.observers.write({"update": 1})
    assert capsys.readouterr().out == ""
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "mine").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("local_rank", [0, 1])
@pytest.mark.parametrize("num_samples", [0, 3])
def test_the_first_rank_of_another_machine_monitors_that_machine(
    local_rank: int, num_samples: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[tuple[Any, ...]] = []
    stopped: list[str] = []
    summary = SimpleNamespace(whole=SimpleNamespace(samples=num_samples), to_json=lambda: {"samples": num_samples})
    monitor = SimpleNamespace(
        stop=lambda: stopped.append("stopped"), new_alerts=list, summary=lambda: summary, name="own"
    )

    def create(*args: Any, **_: Any) -> Any:
        created.append(args)
        return monitor

    monkeypatch.setitem(opening.MONITORS, "off", create)
    with opened(tmp_path, checkpoint, local_rank=local_rank) as (run, _):
        assert (run.observers.monitor is monitor) == (local_rank == 0)
        assert stopped == []
    file = tmp_path / "mine" / "monitor-rank1.json"
    if local_rank:
        assert created == []
        assert not file.exists()
        return
    ((path, _, root),) = created
    assert (path, root) == (tmp_path / "mine" / "gpu-rank1.csv", None)
    assert stopped == ["stopped"]
    assert file.exists() == bool(num_samples)
    if num_samples:
        assert json.loads(file.read_text()) == {"samples": num_samples}
