"""DDP exchanges gradients during the backward pass, whatever the order in which layers are used. The order does not
change a bit of the result.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runner.base.batch import MicroBatch
from runner.base.errors import TaskFault
from runner.config.request import Request
from runner.distributed import reducer
from runner.distributed.parallel import ForwardPasses
from runner.distributed.reducer import BUCKET_BYTES, CustomSum, bucket_sizes
from runner.distributed.replicated import Replicated
from runner.distributed.world import World
from runner.engine.opening import open_phase
from tests.distributed.ranks import run_ranks

WIDTH, LAYERS, UPDATES = 16, 12, 4
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)


class Layers(nn.Module):
    """Layers that are registered in the order 0, 1, 2, ... and can be used in any order."""

    def __init__(self, used: Sequence[int], registered: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(registered))
        self.used = list(used)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.used:
            x = torch.tanh(self.layers[index](x))
        return x


class Traffic:
    """Count the bytes of exchanged gradients. Gradients are float32; other sums are float64.

    late  bytes sent after the last gradient of the backward pass was ready
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self.sent = self.late = 0
        for weight in weights:
            weight.register_post_accumulate_grad_hook(self.arrival)

    def arrival(self, weight: Tensor) -> None:
        self.late = 0

    @contextmanager
    def count(self) -> Iterator[None]:
        plain = dist.all_reduce

        def all_reduce(tensor: Tensor, *given: Any, **options: Any) -> Any:
            if tensor.dtype == torch.float32:
                self.sent += tensor.nbytes
                self.late += tensor.nbytes
            return plain(tensor, *given, **options)

        dist.all_reduce = all_reduce
        try:
            yield
        finally:
            dist.all_reduce = plain

    def take(self) -> tuple[int, int]:
        result = self.sent, self.late
        self.sent = self.late = 0
        return result


def test_bucket_sizes_are_sums_of_parameter_groups() -> None:
    parameters = list(Layers(range(LAYERS)).parameters())
    assert bucket_sizes(parameters, LAYER_BYTES) == (LAYER_BYTES,) * LAYERS
    assert bucket_sizes(parameters) == (LAYERS * LAYER_BYTES,), "one bucket of up to 25 MiB"
    assert bucket_sizes([]) == ()


Choice = Callable[[Layers, World, int], None]


def run_updates(
    world: World,
    model: Layers,
    choose: Choice = lambda *_: None,
    again: bool = False,
    bucket_bytes: int = LAYER_BYTES,
) -> dict[str, Any]:
    """For each update, return the bytes sent, the bytes sent late and the gradients.

    choose  called before each update, to change which layers the model uses
    again   begin a new phase before each update, so that nothing is known from previous updates
    """
    torch.manual_seed(world.rank)
    parallel = Replicated(world, bucket_bytes=bucket_bytes)
    parallel.wrap(model, list, [])
    weights = list(model.parameters())
    traffic = Traffic(weights)  # the hooks of `traffic` run before those of the reducer
    passes = ForwardPasses(model, lambda net, x: (net(x).square().sum(), len(x)), nullcontext, Tensor.backward)
    result: dict[str, Any] = {"bytes": [], "gradients": []}
    parallel.begin(weights)
    with traffic.count():
        for update in range(UPDATES):
            if again:
                parallel.end()
                parallel.begin(weights)
            choose(model, world, update)
            x = torch.randn(8, WIDTH)
            parallel.reduce(parallel.accumulate(passes, iter([MicroBatch(x[:4], False), MicroBatch(x[4:], True)])))
            result["bytes"].append(traffic.take())
            result["gradients"].append([None if each.grad is None else each.grad.tolist() for each in weights])
            for each in weights:
                each.grad = None
    parallel.end()
    return result


USED = {
    "in order": [*range(LAYERS)],
    "registered last but used first": [LAYERS - 1, *range(LAYERS - 1)],
    "every second one first": [*range(0, LAYERS, 2), *range(1, LAYERS, 2)],
    "last unused": [*range(LAYERS - 1)],
    "first unused": [*range(1, LAYERS)],
    "one used twice": [*range(LAYERS), 3],
}


def leave_out_layers(model: Layers, world: World, update: int) -> None:
    """Leave out a different layer on each rank in the second update, and layer 7 on all ranks in the third."""
    model.used = [index for index in range(LAYERS) if (update, index) not in ((1, 4 + world.rank), (2, 7))]


@pytest.mark.parametrize("choose", [lambda *_: None, leave_out_layers])
def test_one_message_or_buckets_give_equal_gradients(choose: Choice) -> None:
    """The sum of two float32 numbers is the same whether computed in float32, or in float64 and then rounded."""

    def both(world: World) -> list[Any]:
        sizes = (LAYER_BYTES, BUCKET_BYTES)
        return [run_updates(world, Layers(range(LAYERS)), choose, bucket_bytes=size) for size in sizes]

    for in_buckets, together in run_ranks(both, 2):
        assert together["gradients"] == in_buckets["gradients"]
        assert [sent for sent, _ in together["bytes"]] == [0] * UPDATES, "gradients must not have a separate message"
    absent = [each is None for each in together["gradients"][2]]
    assert sum(absent) == (2 if choose is leave_out_layers else 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", USED)
def test_gradients_are_exchanged_before_the_backward_pass_ends(name: str) -> None:
    """At most the gradients of the last of the twelve layers are exchanged afterwards."""
    for result in run_ranks(lambda world: run_updates(world, Layers(USED[name])), 2):
        for sent, late in result["bytes"][1:]:
            assert late <= 0.1 * sent


def test_exchange_overlaps_backward_if_ranks_use_different_layers() -> None:
    def choose(model: Layers, world: World, update: int) -> None:
        model.used = [*range(LAYERS - 2), LAYERS - 2 + world.rank]

    for result in run_ranks(lambda world: run_updates(world, Layers([]), choose), 2):
        for sent, late in result["bytes"][1:]:
            assert late <= 0.1 * sent


def test_gradients_of_unused_layers_are_not_exchanged() -> None:
    for result in run_ranks(lambda world: run_updates(world, Layers([0, 1, 2])), 2):
        assert [sent // LAYER_BYTES for sent, _ in result["bytes"]] == [LAYERS] + [3] * (UPDATES - 1)


def change_layers(model: Layers, world: World, update: int) -> None:
    """Use other layers in each update, in another order, and different ones on each rank."""
    ways = [[0, 1, 2, 3], [5, 1, 0], [2, 3, 4, 0, 2], [4, 5, 1, 3, 0, 2], [1]]
    model.used = ways[(update + 2 * world.rank) % len(ways)]


def recompute_layer(model: Layers, world: World, update: int) -> None:
    """Accumulate the gradient of a layer in several parts: reentrant checkpoints run separate backward passes."""
    layer = model.layers[0]

    def forward(x: Tensor) -> Tensor:
        for _ in range(1 + update % 3):
            x = checkpoint(layer, x.requires_grad_() if x.is_leaf else x, use_reentrant=True)
        return model.layers[1](x)

    model.forward = forward


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("choose", [change_layers, recompute_layer])
def test_gradients_do_not_depend_on_the_exchange_order(choose: Choice, num_ranks: int) -> None:
    """Wrong predictions of the order have no effect: compare updates with and without knowledge of previous ones."""
    known = run_ranks(lambda world: run_updates(world, Layers([], 6), choose), num_ranks)
    unknown = run_ranks(lambda world: run_updates(world, Layers([], 6), choose, again=True), num_ranks)
    assert [result["gradients"] for result in known] == [result["gradients"] for result in unknown]
    assert all(result["gradients"] == known[0]["gradients"] for result in known)


TASK = '''
"""A small model."""
import torch
from torch import nn
from runner import Task

def build() -> Task:
    return Small()

class Small(Task):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.arange(512.0).view(128, 4) / 512)
    def loss(self, model, batch):
        return model(batch[0]).square().sum(), len(batch[0])
'''


def record_calls(name: str, plain: Callable[..., Any], calls: list[tuple[str, str]]) -> Callable[..., Any]:
    def call(*given: Any, **options: Any) -> Any:
        calls.append((name, str(getattr(given[0], "dtype", "")) if given else ""))
        return plain(*given, **options)

    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("small_bytes", "collectives"),
    [
        (0, [["all_reduce", "torch.float32"], ["all_reduce", "torch.float64"]]),
        (reducer.SMALL_BYTES, [["all_reduce", "torch.float64"]]),
    ],
)
def test_an_update_has_one_collective_besides_gradients(
    small_bytes: int, collectives: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This collective carries sums, flags, times and the requests of hooks; for a small model, also the gradients."""
    monkeypatch.setattr(reducer, "SMALL_BYTES", small_bytes)
    (tmp_path / "task.py").write_text(TASK)
    args = ("updates=30", "global_batch_size=8", "device=cpu", "monitor=off", "parallelism=ddp", "evaluate.every=0")

    def count_collectives(world: World) -> list[list[tuple[str, str]]]:
        calls: list[tuple[str, str]] = []
        for name in ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "barrier"):
            setattr(dist, name, record_calls(name, getattr(dist, name), calls))
        result = []
        with ExitStack() as stack:
            request = Request((*args, f"output_root={tmp_path}", "run=counted"), tmp_path / "task.py")
            stack.enter_context(redirect_stdout(io.StringIO()))
            phase = stack.enter_context(open_phase(request, world))
            for _ in phase.updates():
                result.append([*calls])
                calls.clear()
        return result[2:-1]  # the first two updates exchange more; the last one ends the phase

    for updates in run_ranks(count_collectives, 2):
        assert updates == [collectives] * 27


def test_a_custom_all_reduce_is_checked_in_each_bucket() -> None:
    """Gradients of the first updates may overflow or be zero, so each bucket is checked until its sum is finite and not
    zero.
    """

    def halve(gradients: Tensor) -> None:
        dist.all_reduce(gradients)
        gradients /= 2

    def find_faults(world: World) -> list[str]:
        custom, faults = CustomSum(halve, world, "halve", "task.py"), []
        for value in (float("inf"), float("nan"), 0.0, 2.0):
            custom(torch.full((3,), value, device=world.device))
            try:
                custom.raise_if_wrong()
            except TaskFault:
                faults.append(f"{value}")
        return faults

    assert run_ranks(find_faults, 2) == [["2.0"]] * 2


def test_a_custom_all_reduce_must_not_turn_finite_into_nan() -> None:
    def erase(gradients: Tensor) -> None:
        gradients.fill_(float("nan"))

    def find_fault(world: World) -> str:
        custom = CustomSum(erase, world, "erase", "task.py")
        custom(torch.ones(3, device=world.device))
        with pytest.raises(TaskFault) as caught:
            custom.raise_if_wrong()
        return str(caught.value)

    assert all("100 %" in fault for fault in run_ranks(find_fault, 2))


def test_a_custom_strategy_that_averages_gradients_is_rejected(tmp_path: Path) -> None:
    """The check of the first update detects a mean over two ranks, because it is half of the sum."""
    text = "def mean(gradients):\n    torch.distributed.all_reduce(gradients)\n    gradients /= 2\n"
    (tmp_path / "task.py").write_text(f"{TASK}\n{text}\nPARALLELISMS = {{'mean': ('ddp', mean)}}\n")
    args = ("updates=2", "global_batch_size=8", "device=cpu", "monitor=off", "parallelism=mean", "evaluate.every=0")

    def find_fault(world: World) -> str:
        request = Request((*args, f"output_root={tmp_path}", "run=mean"), tmp_path / "task.py")
        with redirect_stdout(io.StringIO()), open_phase(request, world) as phase:
            with pytest.raises(TaskFault) as caught:
                next(phase.updates())
            return str(caught.value)

    assert all("50 %" in fault and "parallelism=mean" in fault for fault in run_ranks(find_fault, 2))
