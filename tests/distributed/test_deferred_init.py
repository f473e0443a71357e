"""Shards of a model built without memory are bitwise equal to those of a model that is built as usual."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runner.tasks.gpt.model import Shape, Transformer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.axes.optimizer import sgd
from runner.distributed.deferred_init import DeferredInit, TensorRef
from runner.distributed.parallel import Parallel
from runner.distributed.pipelined import Pipelined
from runner.distributed.shard_init import DeferredModel
from runner.distributed.sharded import Sharded
from runner.distributed.world import World
from runner.plan.planning_rules import why_no_fsdp
from tests.distributed.ranks import run_ranks
from tests.distributed.test_sharded import ALONE, CLASSES, TOKENS, WIDTH, Run, listed, samples, token_loss
from tests.rounding import PROMISED, distance


class Tied(nn.Module):
    """Tied weights, buffers computed from other tensors, and weights initialized in full or in part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True) for _ in "ab")
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.down.weight = self.up.weight
        self.head = nn.Linear(8, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.register_buffer("mask", torch.triu(torch.full((TOKENS, TOKENS), -1e9), 1))
        self.register_buffer("angles", torch.outer(torch.arange(TOKENS), 1.0 / torch.arange(1, 9)), persistent=False)
        self.apply(self.reset)

    def reset(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.5)
            with torch.no_grad():
                module.weight[1:3] = 2 * module.weight[:2] - module.weight.mean()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.angles.cos()
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        logits: Tensor = self.head(self.down(torch.tanh(self.up(x)))) * self.scale
        return logits


class Normed(nn.Module):
    """Batch norms, weight norm, orthogonal initialization, copied layers, and rates that are read as Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        nn.init.orthogonal_(layer[0].weight)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 9, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.norm, self.first = nn.BatchNorm1d(WIDTH), layer
        self.last = parametrizations.weight_norm(nn.Linear(WIDTH, CLASSES))
        self.rates = [rate.item() for rate in torch.linspace(0.1, 0.3, 5)] + torch.rand(2).tolist()
        self.order = torch.randperm(WIDTH)  # neither a parameter nor a buffer

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x[..., self.order]) * sum(self.rates)
        x = self.first(self.norm(x.transpose(1, 2)).transpose(1, 2))
        logits: Tensor = self.last(x)
        return logits


def gpt() -> nn.Module:
    return Transformer(Shape(num_layers=2, num_heads=2, width=16, block_size=TOKENS, vocab_size=CLASSES))


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    _, y = batch
    return F.cross_entropy(model(y.clamp(min=0)).transpose(1, 2), y, reduction="sum", ignore_index=-1), (y >= 0).sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "gpt": (gpt, next_token_loss),
    "tied": (Tied, token_loss),
    "normed": (Normed, token_loss),
}


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(11)
    return make()


def build_deferred(make: Callable[[], nn.Module], min_bytes: int = 0) -> tuple[nn.Module, DeferredInit]:
    with DeferredInit(min_bytes) as recording:
        model = build(make)
    recording.replace_leaked(model)
    return model, recording


def values(model: nn.Module, recording: DeferredInit | None = None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, recording.value(tensor) if recording and recording.is_deferred(tensor) else tensor.detach()


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("min_bytes", [0, 300])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_later_random_numbers_are_unchanged(name: str, min_bytes: int) -> None:
    make, _ = MODELS[name]
    ordinary = build(make)
    state = torch.get_rng_state()
    model, recording = build_deferred(make, min_bytes)
    assert torch.equal(torch.get_rng_state(), state)
    for (one, expected), (other, value) in zip(values(ordinary), values(model, recording), strict=True):
        assert one == other
        assert expected.dtype == value.dtype
        assert torch.equal(expected, value), one
    assert torch.equal(torch.get_rng_state(), state), "computing values must not draw random numbers"
    if isinstance(model, Normed) and isinstance(ordinary, Normed):
        assert model.rates == ordinary.rates
        assert torch.equal(model.order, ordinary.order)


def test_values_can_be_computed_in_any_order_and_twice() -> None:
    model, recording = build_deferred(Tied)
    forward, backward = dict(values(model, recording)), dict(reversed([*values(model, recording)]))
    assert all(torch.equal(forward[name], backward[name]) for name in forward)


def test_a_value_used_several_times_is_computed_once() -> None:
    def make() -> nn.Module:
        layer = nn.Linear(4, 4)
        early, late = torch.rand(4, 4), torch.rand(4, 4)
        with torch.no_grad():
            layer.weight.copy_(late * 2 + late * 3 + early)
        return layer

    model, recording = build_deferred(make)
    assert torch.equal(recording.value(model.weight), build(make).weight)


def test_equal_constructions_have_equal_digests() -> None:
    _, one = build_deferred(Tied)
    _, same = build_deferred(Tied)
    with DeferredInit(0) as other:
        torch.manual_seed(12)
        Tied()
    assert one.digest() == same.digest() != other.digest()


def test_discarded_random_numbers_reuse_memory() -> None:
    """If each draw stored the state of the generator, malloc could not reuse the memory of discarded tensors."""
    with torch.profiler.profile(profile_memory=True) as profiler, DeferredInit():
        layers = [nn.Linear(256, 256, bias=False) for _ in range(20)]
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profiler.events() or ())
    assert layers[0].weight.nbytes <= allocated < 2 * layers[0].weight.nbytes


def test_explicit_generators_and_captured_numbers_are_replayed() -> None:
    def make() -> nn.Module:
        layer = nn.Linear(9, 9)
        numbers = torch.tensor([[float(n) for n in range(9)]] * 9)
        with torch.no_grad():
            layer.weight.copy_(numbers).add_(torch.rand(9, 9, generator=torch.Generator().manual_seed(4)))
        numbers.zero_()
        return layer

    model, recording = build_deferred(make)
    assert torch.equal(recording.value(model.weight), build(make).weight)


@pytest.mark.parametrize(
    "use",
    [
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.data_ptr(),
        lambda tensor: tensor.resize_(20).zero_(),
        lambda tensor: torch._foreach_zero_([tensor, torch.tensor([1.0, 2.0])]),
    ],
)
def test_unrecordable_operations_are_rejected(use: Callable[[Tensor], object]) -> None:
    with DeferredInit(0), pytest.raises((RuntimeError, TypeError)):
        use(torch.zeros(10))


def shards(world: World, recording: DeferredInit, **options: Any) -> Parallel:
    parallel = Sharded(world)
    parallel.deferred = DeferredModel(recording, **options)
    return parallel


def run_of(name: str, world: World) -> Run:
    make, loss = MODELS[name]
    count = world.world_size
    shares = tuple(32 // count + (rank < 32 % count) for rank in range(count))
    options: dict[str, Any] = {"shares": shares, "dtype": torch.float32, "loss": loss, "optimizer": sgd}
    if count == 1:
        return Run(world, model=build(make), **options)
    model, recording = build_deferred(make)
    assert any(weight.is_meta for weight in model.parameters())
    return Run(world, model=model, strategy=partial(shards, recording=recording), **options)


def start_and_train(names: list[str], world: World) -> list[Any]:
    """Return the model's tensors before and after three updates, by model.

    The optimizer is SGD, because Adam amplifies gradients that are only rounding errors, such as those of key biases.
    """
    results = []
    for name in names:
        run = run_of(name, world)
        first = listed(run.parallel.gather_full(run.model.state_dict()))
        run.advance(3)
        results.append([first, listed(run.parallel.gather_full(run.model.state_dict()))])
    return results


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_fsdp(torch.__version__)), reason="the plan refuses this version of torch")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_start_and_train_like_one_process(num_ranks: int) -> None:
    names = ["gpt", "tied"]
    alone = start_and_train(names, ALONE)
    together = run_ranks(partial(start_and_train, names), num_ranks)[0]
    for name, expected, found in zip(names, alone, together, strict=True):
        assert expected[0] == found[0], f"{name}: not bitwise equal"
        assert distance(expected[1], found[1]) <= PROMISED[torch.float32], name


def test_gradients_of_key_biases_are_only_rounding_errors() -> None:
    """Softmax ignores a constant added to all scores. Adam divides a gradient by its magnitude, so it amplifies
    rounding.
    """
    model = build(Tied).double()
    loss, _ = token_loss(model, tuple(tensor[:32] for tensor in samples(torch.float64)))  # type: ignore[arg-type]
    loss.backward()  # type: ignore[no-untyped-call]
    for name, weight in model.named_parameters():
        if name.endswith("in_proj_bias"):
            assert weight.grad is not None
            query, key, value = (part.abs().max() for part in weight.grad.chunk(3))
            assert key <= PROMISED[torch.float64] * max(query, value), name


def first_weights(world: World) -> Any:
    run = run_of("normed", world)
    return listed(run.parallel.gather_full(run.model.state_dict()))


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_fsdp(torch.__version__)), reason="the plan refuses this version of torch")
def test_batch_norm_models_start_from_weights_of_one_process() -> None:
    assert run_ranks(first_weights, 3)[0] == first_weights(ALONE)


def find_uninitialized(world: World) -> list[bool]:
    """Return whether the initial value was computed, for each loaded name."""
    computed: list[Any] = []
    model, recording = build_deferred(Tied)
    names = frozenset({"up.weight", "blocks.0.linear1.weight"})
    refs = {recording.ref(weight): name for name, weight in model.named_parameters() if weight.is_meta}
    value = recording.value
    recording.value = lambda tensor: computed.append(refs.get(tensor)) or value(tensor)  # type: ignore[method-assign]
    shards(world, recording, loaded=names).wrap(model, list, list(model.blocks))  # type: ignore[arg-type]
    return [name in computed for name in sorted(names)] + ["head.weight" in computed]


@pytest.mark.skipif(bool(why_no_fsdp(torch.__version__)), reason="the plan refuses this version of torch")
def test_parameters_from_a_checkpoint_are_not_initialized() -> None:
    assert run_ranks(find_uninitialized, 2) == [[False, False, True]] * 2


class LargestInUse(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measure the peak bytes of the tensors that are created in the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.in_use: dict[int, int] = {}
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # The storage of a DTensor has the size of all shards, but no memory.
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                key = storage._cdata  # lint-tests: private: torch has no public identity of a storage
                if key not in self.in_use:
                    self.in_use[key] = storage.nbytes()
                    weakref.finalize(storage, self.in_use.pop, key)
        self.largest = max(self.largest, sum(self.in_use.values()))
        return result


WIDE_LAYERS, WIDE = 8, 256


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(WIDE_LAYERS)))


def wrap_stage(make: Callable[[], nn.Module], layers: Callable[[Any], Any], example: Any, world: World) -> Any:
    """Return this rank's weights by name, whether the layers were measured, and the peak bytes in use during `wrap`."""
    model, recording = build_deferred(make)
    assert all(weight.is_meta for weight in model.parameters())
    parallel = Pipelined(world)
    parallel.deferred = DeferredModel(recording)
    parallel.expect_inputs(lambda: example, len(example[0]), 4)
    with LargestInUse() as memory:
        parallel.wrap(model, partial(layers, model), [])
    own = {name: weight.tolist() for name, weight in model.state_dict().items() if not weight.is_meta}
    return own, all(cost.activation_bytes for cost in parallel.placement.costs[:-1]), memory.largest


@pytest.mark.slow
def test_pipeline_ranks_start_from_weights_of_one_process() -> None:
    """The layers are measured, and the first and the last stage share a tied embedding."""
    expected = {name: weight.tolist() for name, weight in build(gpt).state_dict().items()}
    tokens = torch.zeros(2, TOKENS, dtype=torch.int64)
    ranks = run_ranks(partial(wrap_stage, gpt, lambda model: model.layers(), (tokens,)), 2)
    found: set[str] = set()
    for own, is_measured, _ in ranks:
        assert is_measured
        assert own == {name: expected[name] for name in own}
        found |= set(own)
    assert found == set(expected)
    assert "embedding.weight" in ranks[0][0]
    assert "embedding.weight" in ranks[1][0]


@pytest.mark.slow
def test_peak_memory_of_a_pipeline_rank() -> None:
    layer = 4 * (WIDE * WIDE + WIDE)
    example = (torch.zeros(1, WIDE),)
    ranks = run_ranks(partial(wrap_stage, wide, list, example), 4)
    for own, _, largest in ranks:
        assert len(own) == 2 * WIDE_LAYERS // 4
        assert largest <= (WIDE_LAYERS // 4 + 1) * layer, "a rank holds its stage, and at most one layer more"


def measure_sharding(world: World) -> int:
    """Return the peak bytes in use while the wide model is sharded and its shards are initialized."""
    model, recording = build_deferred(wide)
    with LargestInUse() as memory:
        shards(world, recording).wrap(model, list, list(model.children()))
    return memory.largest


@pytest.mark.slow
def test_a_rank_needs_memory_for_shards_and_one_layer() -> None:
    layer = 4 * (WIDE * WIDE + WIDE)
    for largest in run_ranks(measure_sharding, 4):
        assert WIDE_LAYERS // 4 * layer <= largest <= (WIDE_LAYERS // 4 + 1) * layer


@pytest.mark.parametrize(
    ("size", "stride", "offset", "is_whole"),
    [
        ((2, 3), (3, 1), 0, True), ((2, 3), (1, 2), 0, True), ((1, 6), (77, 1), 0, True), ((6,), (1,), 0, True),
        ((6,), (2,), 0, False), ((2, 3), (3, 2), 0, False), ((5,), (1,), 0, False), ((6,), (1,), 1, False),
    ],
)  # fmt: skip
def test_tensor_reference_detects_whole_storages(
    size: tuple[int, ...], stride: tuple[int, ...], offset: int, is_whole: bool
) -> None:
    assert TensorRef(0, 24, torch.float32, size, stride, offset).is_whole == is_whole
