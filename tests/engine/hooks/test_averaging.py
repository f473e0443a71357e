"""Weight averaging follows its formula and does not depend on resuming, gradient accumulation or ranks."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.base.errors import IncompatibleResume
from runner.config.request import Request
from runner.config.settings import Settings, WeightsSettings
from runner.distributed.parallel import Parallel
from runner.distributed.world import World
from runner.durable import checkpoint
from runner.durable.directory import RunDirectory
from runner.engine.checkpoints.resumption import ADDED_KEYS, check_resume
from runner.engine.hooks.checkpointing import Checkpointing
from runner.engine.hooks.rank_sync import RankSync
from runner.engine.opening import open_phase
from runner.engine.parts.weights import load_initial_weights
from runner.records.events import Console
from runner.trained.trained_run import open_trained
from tests.distributed.ranks import run_ranks
from tests.engine.task_of_tied import Tied
from tests.forkserver import ForkServer
from tests.rounding import PROMISED

TASK = Path(__file__).parents[1] / "task_of_averages.py"
UPDATES, DECAY = 6, 0.9
TOLERANCE = PROMISED[torch.float64]
EMA = ("averaging=ema", f"averaging.decay={DECAY}")


def request_of(folder: Path, *args: str) -> Request:
    settings = (f"updates={UPDATES}", "device=cpu", "run=mine", "monitor=off", "backend.threads=1", "checkpoint=off")
    return Request((*settings, f"output_root={folder}", *args), TASK)


def weights_of(phase: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in phase.run.parts.bare.named_parameters()}


def load_saved(folder: Path, stem: str = "averaging", update: int = UPDATES) -> dict[str, Tensor]:
    return dict(checkpoint.load(checkpoint.checkpoint_path(folder / "mine" / "checkpoints", update)).tensors(stem))


def run_training(folder: Path, *args: str, world: World | None = None) -> dict[str, float]:
    with open_phase(request_of(folder, *args), world) as phase:
        assert phase.run_updates() is None
        return dict(phase.run.progress.metrics)


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert float((tensor - other[name]).abs().max()) <= tolerance, name


def average_by_hand(seen: list[dict[str, Tensor]], option: str) -> dict[str, Tensor]:
    average = seen[0]
    for number, weights in enumerate(seen[1:], 1):
        kept = DECAY if option == "ema" else number / (number + 1)
        average = {name: kept * average[name] + (1 - kept) * weights[name] for name in weights}
    return average


@pytest.mark.slow
@pytest.mark.parametrize(("option", "args"), [("ema", EMA), ("swa", ("averaging=swa",))])
def test_the_average_equals_that_of_a_plain_loop(option: str, args: tuple[str, ...], tmp_path: Path) -> None:
    with open_phase(request_of(tmp_path, *args)) as phase:
        seen = [weights_of(phase) for _ in phase.updates()]
        phase.close()
    assert_close(load_saved(tmp_path), average_by_hand(seen, option))
    assert_close(load_saved(tmp_path, "model"), seen[-1], 0.0)


def test_an_average_with_a_late_start_covers_only_the_last_updates(tmp_path: Path) -> None:
    with open_phase(request_of(tmp_path, "averaging=swa", "averaging.start=0.5")) as phase:
        seen = [weights_of(phase) for _ in phase.updates()]
        phase.close()
    assert_close(load_saved(tmp_path), average_by_hand(seen[UPDATES // 2 :], "swa"))


def test_a_run_stopped_before_averaging_starts_resumes_exactly(tmp_path: Path) -> None:
    args = ("averaging=swa", "averaging.start=0.5")
    with open_phase(request_of(tmp_path / "stopped", *args)) as phase:
        for update in phase.updates():
            if update == 2:
                break
        phase.hook(RankSync).exchange.close()
        phase.hook(Checkpointing).save()
    path = checkpoint.checkpoint_path(tmp_path / "stopped" / "mine" / "checkpoints", 2)
    assert "averaging" not in checkpoint.load(path).stems, "before averaging starts, predictions use the weights"
    run_training(tmp_path / "stopped", *args)
    run_training(tmp_path / "straight", *args)
    for stem in ("averaging", "model"):
        assert_close(load_saved(tmp_path / "stopped", stem), load_saved(tmp_path / "straight", stem), 0.0)


def test_a_changed_average_starts_with_the_first_resumed_update(tmp_path: Path) -> None:
    run_training(tmp_path, *EMA)
    more = ("averaging=swa", f"updates={UPDATES + 3}", "resume_allow=[averaging,updates]")
    with open_phase(request_of(tmp_path, *more)) as phase:
        seen = [weights_of(phase) for _ in phase.updates()]
        phase.close()
    assert_close(load_saved(tmp_path, update=UPDATES + 3), average_by_hand(seen, "swa"))


def test_averaging_does_not_change_training(tmp_path: Path) -> None:
    run_training(tmp_path / "with", *EMA, "evaluate.every=2")
    run_training(tmp_path / "without", "evaluate.every=2")
    assert_close(load_saved(tmp_path / "with", "model"), load_saved(tmp_path / "without", "model"), 0.0)
    assert_close(load_saved(tmp_path / "with", "optimizer"), load_saved(tmp_path / "without", "optimizer"), 0.0)


SAMPLING = """
import torch
import runner
from tests.engine.task_of_averages import Regression

SETTINGS = {"global_batch_size": 8, "scheduler": "constant", "scheduler.warmup": 0, "optimizer.lr": 0.01}

class Samples(runner.Hook):
    def __init__(self, phase):
        super().__init__(phase)
        self.seen, self.drawn = [], []
    def after_evaluation(self, result):
        model = self.phase.model
        with self.phase.evaluation_mode(), self.phase.evaluation_mode():  # the inner one has no effect
            assert not model.training and not torch.is_grad_enabled()
            self.seen.append({name: weight.clone() for name, weight in model.named_parameters()})
            self.drawn.append(model(torch.randn(3, 4, dtype=torch.float64)))
        assert model.training and torch.is_grad_enabled()

HOOKS = [Samples]

def build():
    return Own()

class Own(Regression):
    def __init__(self):
        super().__init__()
        self.model.insert(2, torch.nn.Dropout(0.5))
"""


def test_a_hook_can_use_the_average_without_changing_training(tmp_path: Path) -> None:
    """For example, a hook samples images from a diffusion model. This hook draws from the same generator as dropout."""
    task = tmp_path / "own.py"
    task.write_text(SAMPLING)
    runs: dict[bool, tuple[Any, list[dict[str, Tensor]]]] = {}
    for enabled in (True, False):
        args = (*EMA, "evaluate.every=1", f"hook.samples.enabled={str(enabled).lower()}")
        request = request_of(tmp_path / str(enabled), *args)
        with open_phase(Request(request.overrides, task)) as phase:
            weights = [weights_of(phase) for _ in phase.updates()]
            phase.close()
            runs[enabled] = [hook for hook in phase.hooks if type(hook).__name__ == "Samples"], weights
    (hook,), weights = runs[True]
    assert len(hook.seen) == UPDATES
    for number, seen in enumerate(hook.seen, 1):
        assert_close(seen, average_by_hand(weights[:number], "ema"))
    first, second = hook.drawn[:2]
    assert not torch.equal(first, second), "the weights differ between updates"
    for here, there in zip(weights, runs[False][1], strict=True):
        assert_close(here, there, 0.0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "pipeline"])
def test_the_average_of_a_resumed_run_is_bitwise_equal(strategy: str, tmp_path: Path) -> None:
    args = (*EMA, f"parallelism={strategy}", *([] if strategy == "single" else ["parallelism.world_size=2"]))

    def stop_after_three(world: World | None) -> None:
        with open_phase(request_of(tmp_path / "stopped", *args), world) as phase:
            for update in phase.updates():
                if update == 3:
                    break
            phase.hook(RankSync).exchange.close()
            phase.hook(Checkpointing).save()

    for act in (
        lambda world: run_training(tmp_path / "straight", *args, world=world),
        stop_after_three,
        lambda world: run_training(tmp_path / "stopped", *args, world=world),
    ):
        act(None) if strategy == "single" else run_ranks(act, 2)
    for stem in ("averaging", "model", "optimizer"):
        assert_close(load_saved(tmp_path / "stopped", stem), load_saved(tmp_path / "straight", stem), 0.0)


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("args", "world_size"), [("micro_batch_size=2", 1), ("ddp", 2), ("fsdp", 2), ("pipeline", 2)])
def test_neither_accumulation_nor_ranks_change_the_average(args: str, world_size: int, tmp_path: Path) -> None:
    expected = run_training(tmp_path / "straight", *EMA, "micro_batch_size=8")
    folder = tmp_path / "other"

    def rank(world: World) -> dict[str, float]:
        return run_training(folder, *EMA, f"parallelism={args}", f"parallelism.world_size={world_size}", world=world)

    result = run_ranks(rank, world_size) if world_size > 1 else [run_training(folder, *EMA, args)]
    assert all(of_rank["val/loss"] == pytest.approx(expected["val/loss"], rel=TOLERANCE) for of_rank in result)
    assert_close(load_saved(folder), load_saved(tmp_path / "straight"))


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_evaluation_and_inference_use_the_average_if_requested(
    is_evaluated: bool, server: ForkServer, tmp_path: Path
) -> None:
    request = request_of(tmp_path, *EMA, f"averaging.evaluate={str(is_evaluated).lower()}")
    assert server.run(["train", "--task", str(TASK), *request.overrides], tmp_path).code == 0
    result = json.loads((tmp_path / "mine" / "run.json").read_text())["metrics"]
    used = load_saved(tmp_path, "averaging" if is_evaluated else "model")
    with ExitStack() as stack:
        parts = open_trained(Request(("run=mine", f"output_root={tmp_path}"), TASK), Console(), stack).parts
        assert_close(weights_of(SimpleNamespace(run=SimpleNamespace(parts=parts))), used, 0.0)
        with torch.no_grad():
            total, items = parts.task.loss(parts.bare, parts.task.dataset("val").tensors)
        assert result["val/loss"] == pytest.approx(float(total) / items, rel=TOLERANCE)


def test_averaging_added_on_resume_must_be_allowed_by_name(tmp_path: Path) -> None:
    run_training(tmp_path, "updates=3", "optimizer.lr=0.01")
    longer = (*EMA, "resume_allow=[updates]")
    with pytest.raises(IncompatibleResume), open_phase(request_of(tmp_path, *longer)):
        pass
    with open_phase(request_of(tmp_path, *EMA, "resume_allow=[updates,averaging]")) as phase:
        seen = [weights_of(phase) for _ in phase.updates()]
        phase.close()
    assert len(seen) == 3
    assert_close(load_saved(tmp_path), average_by_hand(seen, "ema"))


@pytest.mark.parametrize("option", ["none", "swa"])
def test_a_run_resumes_from_an_older_checkpoint_without_newer_keys(option: str, tmp_path: Path) -> None:
    with open_phase(request_of(tmp_path, f"averaging={option}")) as phase:
        plan = phase.run.plan
    absent = {*ADDED_KEYS, "averaging.start"} - ({"averaging"} if option == "swa" else set())
    values = {key: value for key, value in plan.values().items() if key not in absent}
    start: Any = SimpleNamespace(state={"phase": "train", "phase_update": 1, "values": values})
    messages: list[str] = []
    check_resume(plan, start, RunDirectory.join(tmp_path), messages.append)
    assert not messages


FROZEN = """
from tests.engine.task_of_averages import Regression

SETTINGS = {"global_batch_size": 8, "scheduler": "constant", "scheduler.warmup": 0, "optimizer.lr": 0.01}

def build():
    return Frozen()

class Frozen(Regression):
    def __init__(self):
        super().__init__()
        self.model[0].requires_grad_(False)
"""


@pytest.mark.slow
def test_a_pipeline_stage_without_trained_parameters_averages_nothing(tmp_path: Path) -> None:
    """The pipeline resumes from a checkpoint of a single process, and saves the same tensors."""
    task = tmp_path / "frozen.py"
    task.write_text(FROZEN)

    def train(name: str, *args: str, world: World | None = None) -> None:
        request = Request(request_of(tmp_path / name, *EMA, "resume_allow=[updates]", *args).overrides, task)
        with open_phase(request, world) as phase:
            assert phase.run_updates() is None

    train("one", "updates=3")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    train("one")
    run_ranks(lambda world: train("two", "parallelism=pipeline", "parallelism.world_size=2", world=world), 2)
    assert {*load_saved(tmp_path / "two")} == {"2.weight", "2.bias"}
    assert_close(load_saved(tmp_path / "two"), load_saved(tmp_path / "one"))


def test_the_average_of_a_tied_weight_is_loaded_under_all_names(server: ForkServer, tmp_path: Path) -> None:
    """A checkpoint has the weight under both names but its average only under the first; loading keeps the last."""
    task = Path(__file__).parents[1] / "task_of_tied.py"
    assert server.run(["train", "--task", str(task), *request_of(tmp_path, *EMA).overrides], tmp_path).code == 0
    average, weights = load_saved(tmp_path), load_saved(tmp_path, "model")
    assert weights.keys() - average.keys() == {"2.weight"}
    assert not torch.equal(average["0.weight"], weights["0.weight"])
    everything = {**average, "2.weight": average["0.weight"]}

    with ExitStack() as stack:
        parts = open_trained(Request(("run=mine", f"output_root={tmp_path}"), task), Console(), stack).parts
        assert_close(dict(parts.bare.state_dict()), everything, 0.0)

    def load(model: nn.Module, **options: Any) -> dict[str, Tensor]:
        settings = Settings(weights=WeightsSettings(source="mine", **options), output_root=str(tmp_path))
        load_initial_weights(settings, model, Parallel(World(torch.device("cpu"))))
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    assert_close(load(Tied().model), everything, 0.0)
    moved = load(nn.ModuleDict({"net": Tied().model}), rename={"0": "net.0", "2": "net.2"})
    assert_close(moved, {f"net.{name}": tensor for name, tensor in everything.items()}, 0.0)
    selected = {name: everything[name] for name in ("0.weight", "2.weight", "2.bias")}
    assert_close(
        {name: tensor for name, tensor in load(Tied().model, only=["2"]).items() if name in selected}, selected, 0.0
    )
