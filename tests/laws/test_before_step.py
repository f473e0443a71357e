"""A hook may change gradients before the optimizer step, with any micro-batches, ranks, retries and resumes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.base.errors import TaskFault
from runner.base.order import permutation
from runner.config.request import Request
from runner.distributed.world import World
from runner.durable import checkpoint
from runner.engine.hooks.checkpointing import Checkpointing
from runner.engine.hooks.hook import Hook
from runner.engine.hooks.rank_sync import RankSync
from runner.engine.opening import open_phase
from runner.engine.phase import Phase
from tests.distributed.ranks import run_ranks
from tests.laws.task_of_clipping import LIMIT
from tests.rounding import PROMISED

TASK = Path(__file__).parent / "task_of_clipping.py"
UPDATES, SIZE = 6, 8
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
OBJECTIVES = """

class Regression(Regression):
    objectives = {"first": {"trains": ["0"], "max_grad_norm": 0.5}, "last": {"trains": ["2"], "every": 2}}
"""


def request_of(folder: Path, *args: str, task: Path = TASK) -> Request:
    settings = (
        f"updates={UPDATES}", "device=cpu", "run=mine", "monitor=off", "backend.threads=1", "checkpoint=off",
        "evaluate.every=0", "optimizer.kernel=foreach", f"output_root={folder}",
    )  # fmt: skip
    return Request((*settings, *args), task)


def recorded(phase: Phase) -> list[Any]:
    (calls,) = [vars(hook)["calls"] for hook in phase.hooks if type(hook).__name__ == "Record"]
    return list(calls)


def saved(folder: Path) -> dict[str, Tensor]:
    return dict(checkpoint.load(checkpoint.checkpoint_path(folder / "mine" / "checkpoints", UPDATES)).tensors("model"))


def trained(folder: Path, *args: str, world: World | None = None, task: Path = TASK) -> list[Any]:
    """Train and save a run; return the recorded calls."""
    with open_phase(request_of(folder, *args, task=task), world) as phase:
        assert phase.run_updates() is None
        return recorded(phase)


def train_by_hand(folder: Path, sizes: Sequence[int], *, limit: float = LIMIT) -> dict[str, Tensor]:
    """Train with a plain loop: sum gradients over micro-batches of these sizes, divide once, clip each gradient."""
    with open_phase(request_of(folder)) as phase:
        task, model = phase.run.parts.task, phase.run.parts.bare
        x, y = task.dataset("train").tensors  # type: ignore[attr-defined]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
        for update in range(UPDATES):
            epoch, number = divmod(update, len(x) // SIZE)
            rows = permutation(0, epoch, len(x))[number * SIZE : (number + 1) * SIZE]
            for part in torch.as_tensor(rows).split(list(sizes)):
                task.loss(model, (x[part], y[part]))[0].backward()
            for weight in model.parameters():
                assert weight.grad is not None
                weight.grad /= SIZE
                weight.grad *= (limit / weight.grad.norm()).clamp(max=1.0)
            optimizer.step()
            optimizer.zero_grad()
        return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("sizes", [[8], [2, 2, 2, 2]], ids=str)
def test_clipping_each_parameter_matches_a_plain_loop(sizes: list[int], tmp_path: Path) -> None:
    calls = trained(tmp_path / "run", f"micro_batch_size={sizes[0]}")
    expected = train_by_hand(tmp_path / "hand", sizes)
    assert_equal(saved(tmp_path / "run"), expected)
    unclipped = train_by_hand(tmp_path / "unclipped", sizes, limit=1e9)
    assert not any(torch.equal(expected[name], unclipped[name]) for name in NAMES)
    assert [call[:3] for call in calls] == [(update, "", NAMES) for update in range(UPDATES)]


def test_ranks_with_unequal_shares_match_a_plain_loop(tmp_path: Path) -> None:
    def rank(world: World) -> list[Any]:
        ranks = ("parallelism=ddp", "parallelism.world_size=2", "parallelism.shares=[7,1]")
        return trained(tmp_path / "ranks", *ranks, world=world)

    first, second = run_ranks(rank, 2)
    assert first == second
    assert len(first) == UPDATES
    assert_equal(saved(tmp_path / "ranks"), train_by_hand(tmp_path / "hand", [7, 1]))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_sharded_and_pipelined_updates_are_equal(strategy: str, tmp_path: Path) -> None:
    def rank(world: World) -> list[Any]:
        ranks = (f"parallelism={strategy}", "parallelism.world_size=2", "hook.record.enabled=false")
        with open_phase(request_of(tmp_path / "ranks", *ranks), world) as phase:
            seen: list[str] = []
            (hook,) = [hook for hook in phase.hooks if type(hook).__name__ == "ClipEach"]
            clip = hook.before_step

            def before_step(parameters: Any, objective: str) -> None:
                seen.extend(parameters)
                clip(parameters, objective)

            hook.before_step = before_step  # type: ignore[method-assign]
            assert phase.run_updates() is None
            return seen

    names = run_ranks(rank, 2)
    assert {name for of_rank in names for name in of_rank} == set(NAMES)
    assert_equal(saved(tmp_path / "ranks"), train_by_hand(tmp_path / "hand", [8]), PROMISED[torch.float64])


def test_a_resumed_run_is_bitwise_equal(tmp_path: Path) -> None:
    trained(tmp_path / "straight", "micro_batch_size=2")
    with open_phase(request_of(tmp_path / "parts", "micro_batch_size=2")) as phase:
        for update in phase.updates():
            if update == 3:
                break
        phase.hook(RankSync).exchange.close()
        phase.hook(Checkpointing).save()
    calls = trained(tmp_path / "parts", "micro_batch_size=2")
    assert [update for update, *_ in calls] == [3, 4, 5]
    assert_equal(saved(tmp_path / "parts"), saved(tmp_path / "straight"))


def test_before_step_receives_clipped_gradients(tmp_path: Path) -> None:
    args = ("max_grad_norm=0.125", "hook.clip_each.enabled=false", "hook.record.decays=true")
    norms = [norm for *_, norm in trained(tmp_path, *args)]
    assert 0.1249 < max(norms) < 0.125  # clip_grad_norm_ adds 1e-6 to the norm


def test_before_step_receives_the_parameters_of_the_objective(tmp_path: Path) -> None:
    task = tmp_path / "task_of_two.py"
    task.write_text(TASK.read_text() + OBJECTIVES)
    calls = trained(tmp_path, "hook.clip_each.enabled=false", task=task)
    both = [[(update, "first", NAMES[:2])] + [(update, "last", NAMES[2:])] * (update % 2 == 0) for update in range(6)]
    assert [call[:3] for call in calls] == [call for update in both for call in update]
    assert max(norm for _, name, _, norm in calls if name == "first") <= 0.5


def test_an_overflowing_update_is_skipped(tmp_path: Path) -> None:
    task = tmp_path / "task_of_overflows.py"
    task.write_text(TASK.read_text().replace(".double()", "").replace("float64", "float32"))
    calls = trained(tmp_path, "precision=fp16", "precision.init_scale=1.0e7", "updates=40", task=task)
    assert len(calls) == 40
    assert not torch.tensor([norm for *_, norm in calls]).isfinite().all()
    assert calls[-1][-1] < float("inf")
    weights = checkpoint.load(checkpoint.checkpoint_path(tmp_path / "mine" / "checkpoints", 40)).tensors("model")
    assert all(bool(weight.isfinite().all()) for weight in weights.values())


@pytest.mark.parametrize("place", ["loss", "step"])
def test_before_step_is_called_once_despite_oom_retries(place: str, tmp_path: Path) -> None:
    trained(tmp_path / "one")
    with open_phase(request_of(tmp_path / "short")) as phase:
        work: Any = phase.work
        owner, name = (work.loss, "loss") if place == "loss" else (work.training.optimizer, "step")
        function, calls = getattr(owner, name), []

        def short(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 2:
                raise torch.OutOfMemoryError
            return function(*args)

        setattr(owner, name, short)
        assert phase.run_updates() is None
        assert [update for update, *_ in recorded(phase)] == [*range(UPDATES)]
    assert_equal(saved(tmp_path / "short"), saved(tmp_path / "one"), PROMISED[torch.float64])


def test_only_hooks_with_before_step_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(Hook, "before_step", lambda *args: calls.append(args))
    with open_phase(request_of(tmp_path, "hook.clip_each.enabled=false", "hook.record.enabled=false")) as phase:
        assert phase.run_updates() is None
    assert not calls


def test_a_parameter_without_gradient_is_not_updated(tmp_path: Path) -> None:
    task = tmp_path / "task_of_frozen_parts.py"
    removed = "weight.grad = None if len(weight.shape) < 2 else weight.grad * (LIMIT"
    task.write_text(TASK.read_text().replace("weight.grad *= (LIMIT", removed))
    with open_phase(request_of(tmp_path, "hook.record.enabled=false", task=task)) as phase:
        before = {name: weight.detach().clone() for name, weight in phase.model.named_parameters()}
        assert phase.run_updates() is None
        unchanged = [name for name, weight in phase.model.named_parameters() if torch.equal(weight, before[name])]
    assert unchanged == ["0.bias", "2.bias"]


def test_errors_in_before_step_name_file_and_line(tmp_path: Path) -> None:
    task = tmp_path / "task_with_error.py"
    text = TASK.read_text().replace("weight.grad *= (LIMIT", "weight.gradient *= (LIMIT")
    task.write_text(text)
    line = next(number for number, row in enumerate(text.splitlines(), 1) if "weight.gradient" in row)
    with pytest.raises(TaskFault) as caught, open_phase(request_of(tmp_path, task=task)) as phase:
        phase.run_updates()
    assert f"{task.name}:{line}" in caught.value.problems[0].where


def test_before_step_must_have_the_objective_parameter(tmp_path: Path) -> None:
    task = tmp_path / "task_without_objective.py"
    task.write_text(
        TASK.read_text().replace("def before_step(self, parameters, objective)", "def before_step(self, parameters)")
    )
    with pytest.raises(TaskFault) as caught, open_phase(request_of(tmp_path, task=task)):
        pass
    assert task.name in caught.value.problems[0].where


def test_before_step_receives_only_trained_parameters(tmp_path: Path) -> None:
    task = tmp_path / "task_whose_hook_sees_two_phases.py"
    task.write_text(TASK.read_text() + '\n\nPHASES = {"head": {"trains": ["2"]}}\n')
    calls = trained(tmp_path, "hook.clip_each.enabled=false", task=task)
    assert [names for _, _, names, _ in calls] == [NAMES[2:]] * UPDATES
