"""What the random draws of a sample depend on, and their statistical quality."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from runner import SampleNoise, per_sample_noise
from runner.base import noise
from runner.base.batch import BatchSamples
from tests.operations import Operations
from tests.rounding import allowed

SEED = 7
INDICES = list(range(100, 164))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    noise.start_pass(None)


def samples(indices: list[int], epoch: int = 0, seed: int = SEED, first: int = 0) -> BatchSamples:
    return BatchSamples(seed, epoch, indices, range(first, first + len(indices)))


def draws_for(indices: list[int], epoch: int = 0, seed: int = SEED) -> SampleNoise:
    noise.start_pass(samples(indices, epoch, seed))
    return per_sample_noise(torch.zeros(len(indices), 3))


KINDS: dict[str, Callable[[SampleNoise], Tensor]] = {
    "normal": lambda draws: draws.normal(5, 3),
    "uniform": lambda draws: draws.uniform(5, 3),
    "integers": lambda draws: draws.integers(-3, 1000, 5, 3),
    "bernoulli": lambda draws: draws.bernoulli(0.3, 5, 3),
    "dropout": lambda draws: draws.dropout(torch.ones(len(draws.keys), 5, 3), 0.3),
    "scalars": lambda draws: draws.normal(),
}


# A normal number is the product of a logarithm and a cosine, whose SIMD and scalar versions differ in the last bits.
LAST_BITS = 8 * torch.finfo(torch.float32).eps


# ---------------------------------------------------------------- what draws depend on


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_draw_does_not_depend_on_other_samples(kind: Callable[[SampleNoise], Tensor]) -> None:
    whole = kind(draws_for(INDICES))
    parts = [kind(draws_for(INDICES[first:stop])) for first, stop in ((0, 1), (1, 20), (20, 64))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=LAST_BITS, atol=LAST_BITS)
    order = np.random.default_rng(0).permutation(64).tolist()
    shuffled = kind(draws_for([INDICES[place] for place in order]))
    torch.testing.assert_close(shuffled, whole[order], rtol=LAST_BITS, atol=LAST_BITS)


@pytest.mark.parametrize("kind", ["normal", "uniform", "integers"])
def test_seed_epoch_index_and_draw_number_change_the_draw(kind: str) -> None:
    draw = KINDS[kind]
    first = draws_for(INDICES)
    drawn = [
        draw(first),
        draw(first),
        draw(per_sample_noise(torch.zeros(64))),
        draw(per_sample_noise(torch.zeros(64), "layer")),
        draw(draws_for(INDICES, epoch=1)),
        draw(draws_for(INDICES, epoch=noise.EVALUATION)),
        draw(draws_for(INDICES, seed=SEED + 1)),
        draw(draws_for(INDICES, seed=SEED + 2**32)),
        draw(draws_for([index + 64 for index in INDICES])),
        draw(draws_for(INDICES).named("part")),
        draw(draws_for(INDICES).named("part").named("part")),
        draw(draws_for(INDICES).named(0)),
        draw(draws_for(INDICES).rows(torch.arange(64), 0)),
        draw(draws_for(INDICES).rows(torch.arange(64), 1)),
    ]
    for number, one in enumerate(drawn):
        for other in drawn[:number]:
            assert (one == other).float().mean() < 0.02


def test_a_draw_does_not_depend_on_padding() -> None:
    narrow, wide = draws_for(INDICES).uniform(4, 5), draws_for(INDICES).uniform(9, 11)
    assert torch.equal(narrow, wide[:, :4, :5])


def test_draws_in_lower_precision_are_rounded() -> None:
    """The draws are rounded from the numbers of higher precision."""
    for kind in ("uniform", "normal"):
        exact = getattr(draws_for(INDICES), kind)(100, dtype=torch.float64)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            drawn = getattr(draws_for(INDICES), kind)(100, dtype=dtype)
            assert drawn.dtype == dtype
            spacing = torch.finfo(dtype).eps * exact.abs().clamp(min=1)
            assert ((drawn.double() - exact).abs() <= 4 * spacing).all()
            if kind == "uniform":
                assert float(drawn.min()) >= 0
                assert float(drawn.max()) < 1


def test_records_of_a_sample_have_independent_draws() -> None:
    """Each sample has three records, which are ordered by record number, as in a batch of several tables."""
    of, number = torch.arange(4).repeat(3), torch.arange(3).repeat_interleave(4)
    whole = draws_for([5, 6, 7, 8]).rows(of, number).normal(50)
    alone = draws_for([7]).rows(torch.zeros(3, dtype=torch.int64), torch.arange(3)).normal(50)
    torch.testing.assert_close(whole[of == 2], alone, rtol=LAST_BITS, atol=LAST_BITS)
    assert len(torch.unique(whole)) > 0.99 * whole.numel()
    in_rows = draws_for([5, 6]).rows(torch.tensor([[0, 0, 1], [1, 1, 1]]), torch.tensor([[0, 1, 0], [1, 2, 3]]))
    assert in_rows.uniform(8).shape == (2, 3, 8)


def test_every_selects_samples_by_position_in_the_epoch() -> None:
    noise.start_pass(BatchSamples(SEED, 0, [9, 4, 7, 1, 3], range(11, 16)))
    assert per_sample_noise(torch.zeros(5)).every(2).tolist() == [1, 3]  # keeps positions 12 and 14
    noise.start_pass(BatchSamples(SEED, 0, [9, 7, 3], [11, 14, 15]))  # two samples were skipped
    assert per_sample_noise(torch.zeros(3)).every(2).tolist() == [1]


def test_draws_outside_a_run_follow_manual_seed() -> None:
    def drawn() -> tuple[Tensor, Tensor]:
        return tuple(per_sample_noise({"x": torch.zeros(6, 2)}).normal(4) for _ in range(2))  # type: ignore[return-value]

    torch.manual_seed(3)
    first, second = drawn()
    assert first.shape == (6, 4)
    assert not torch.isclose(first, second).any()
    torch.manual_seed(3)
    again = drawn()
    assert torch.equal(again[0], first)
    assert torch.equal(again[1], second)
    with pytest.raises(TypeError):
        per_sample_noise({"names": ["a", "b"]})


def test_the_state_of_a_run_ends_with_the_run() -> None:
    with noise.without_samples():
        noise.start_pass(samples(INDICES))
        assert len(per_sample_noise(torch.zeros(2)).keys) == 64
    assert len(per_sample_noise(torch.zeros(2)).keys) == 2


# ---------------------------------------------------------------- recomputation and compilation


class Noisy(nn.Module):
    """Draws in three ways: in its own call, from draws passed as an argument, and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor, given: SampleNoise) -> Tensor:
        x = self.layer(x) * per_sample_noise(x).normal(4, dtype=torch.float64)
        x = torch.tanh(x) * given.normal(4, dtype=torch.float64)
        return given.named("end").dropout(torch.tanh(self.layer(x)), 0.5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("known", [False, True], ids=["outside", "in a run"])
def test_recomputed_draws_are_the_same(reentrant: bool, known: bool) -> None:
    """One block is called three times, and the backward pass recomputes the calls in reverse order."""

    def gradient(recompute: bool) -> Tensor:
        torch.manual_seed(0)
        block = Noisy()
        x = torch.ones(8, 4, dtype=torch.float64, requires_grad=True)
        noise.start_pass(samples(INDICES[:8]) if known else None)
        given = per_sample_noise(x)
        for number in range(3):
            part = given.named(f"block {number}")
            x = checkpoint(block, x, part, use_reentrant=reentrant) if recompute else block(x, part)
        if known:
            noise.switch_pass(samples(INDICES[8:16]))  # as in a pipeline, the next forward pass comes first
        per_sample_noise(x).normal(4)
        x.sum().backward()
        assert block.layer.weight.grad is not None
        return block.layer.weight.grad

    torch.testing.assert_close(gradient(True), gradient(False), rtol=0, atol=allowed(torch.float64, 8 * 4, growth=3))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model_has_the_same_draws(fullgraph: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, given: SampleNoise) -> Tensor:
            x = x + given.normal(4) + given.normal(4)
            return given.named("end").dropout(x, 0.5)

    def passes(model: nn.Module) -> list[Tensor]:
        result = []
        for epoch in range(3):
            noise.start_pass(samples(INDICES[:8], epoch))
            given = per_sample_noise(torch.zeros(8, 4))
            result.append(model(torch.zeros(8, 4), given))
        return result

    torch.compiler.reset()
    plain, compiled = Model(), Model()
    noise.exclude_from_graphs()
    compiled.compile(backend="aot_eager", fullgraph=fullgraph)
    with torch.compiler.set_stance("default"):
        for one, other in zip(passes(plain), passes(compiled), strict=True):
            torch.testing.assert_close(one, other, rtol=LAST_BITS, atol=LAST_BITS)


@pytest.mark.slow
def test_a_compiled_model_may_draw_inside_its_graph() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x) + per_sample_noise(x, "model").normal(4)

    torch.compiler.reset()
    noise.exclude_from_graphs()
    plain, compiled = Model(), Model()
    compiled.compile(backend="aot_eager")
    for epoch in range(12):  # more layers than the recompilation limit of the compiler
        result = []
        for model in (plain, compiled):
            noise.start_pass(samples(INDICES[:8], epoch))
            result.append(model(torch.zeros(8, 4)))
        torch.testing.assert_close(*result, rtol=LAST_BITS, atol=LAST_BITS)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["by the layer's name", "by the layer's number"])
def test_layers_with_independent_draws_share_compiled_code(asked: str) -> None:
    """As with compile=regional, all layers, epochs and sample positions share one graph."""

    class Layer(nn.Module):
        def forward(self, x: Tensor, given: SampleNoise) -> Tensor:
            return given.named("end").dropout(x + given.normal(4), 0.5)

    torch.compiler.reset()
    noise.exclude_from_graphs()
    programs = CompileCounter()
    layers = [Layer() for _ in range(10)]  # more layers than the recompilation limit of the compiler
    for layer in layers:
        layer.compile(backend=programs, fullgraph=True)
    for epoch in range(2):
        noise.start_pass(samples(INDICES[:8], epoch, first=8 * epoch))
        x = torch.zeros(8, 4)
        whole = per_sample_noise(x)
        for number, layer in enumerate(layers):
            layer(x, per_sample_noise(x, f"layer {number}") if "name" in asked else whole.named(number))
    assert programs.frame_count == 1


# ---------------------------------------------------------------- statistical quality
# The seed is fixed, so these tests are deterministic. The limits are 4 to 5 standard errors.

NUM, SIZE = 2000, 250


def many(epoch: int = 0, indices: range = range(NUM)) -> SampleNoise:
    return draws_for(list(indices), epoch)


def test_normal_numbers_are_normally_distributed() -> None:
    drawn = many().normal(SIZE, dtype=torch.float64).flatten().numpy()
    n = len(drawn)
    assert abs(drawn.mean()) < 4 / math.sqrt(n)
    assert abs(drawn.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((drawn**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((drawn**4).mean() - 3) < 4 * math.sqrt(96 / n)
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert 4.3 < np.abs(drawn).max() < 6.7


def test_uniform_numbers_are_uniformly_distributed() -> None:
    drawn = many().uniform(SIZE, dtype=torch.float64).flatten().numpy()
    assert stats.kstest(drawn, "uniform").pvalue > 1e-3
    assert drawn.min() >= 0
    assert drawn.max() < 1


def test_integers_are_uniformly_distributed() -> None:
    drawn = many().integers(-3, 7, SIZE).flatten()
    counts = torch.bincount(drawn + 3, minlength=10).numpy()
    assert len(counts) == 10
    assert stats.chisquare(counts).pvalue > 1e-3
    with pytest.raises(ValueError, match="low < high"):
        many().integers(3, 3)


@pytest.mark.parametrize("p", [0.0, 0.01, 0.5, 1.0])
def test_booleans_are_true_with_the_given_probability(p: float) -> None:
    share = float(many().bernoulli(p, SIZE).double().mean())
    assert abs(share - p) <= 4.5 * math.sqrt(p * (1 - p) / (NUM * SIZE))


@pytest.mark.parametrize("p", [0.0, 1e-50, 1e-9, 2.0**-24, 0.1, 0.3, 0.5, 0.7, 1 - 2.0**-24, 1 - 1e-9, 1.0])
def test_booleans_are_uniform_numbers_below_the_probability(p: float) -> None:
    uniform = many().uniform(SIZE, dtype=torch.float32)
    for limit in (p, *uniform.flatten()[:3].tolist()):  # includes probabilities that equal a drawn number
        assert torch.equal(many().bernoulli(limit, SIZE), uniform < limit)


def test_draws_of_the_same_shape_share_work() -> None:
    """The shared work is that which does not depend on the sample."""
    noise.start_pass(samples(INDICES))
    first, second = (per_sample_noise(torch.ones(len(INDICES), 1), name) for name in ("first", "second"))
    with Operations() as of_first:
        first.bernoulli(0.1, 7, 5)
    with Operations() as of_second:
        second.bernoulli(0.1, 7, 5)
    assert Counter(of_first.names)["arange"] == 2
    assert "arange" not in of_second.names
    assert Counter(of_second.names)["mul_"] == 2, "sample and element numbers must be hashed together, once"


def test_operators_do_not_depend_on_known_samples() -> None:
    """Predictions of memory and time run without known samples."""
    names = []
    for known in (samples(INDICES), None):
        noise.start_pass(known)
        batch = torch.ones(len(INDICES), 1)
        layers = [per_sample_noise(batch, name) for name in "abc"]
        with Operations() as seen:
            for layer in layers:
                layer.dropout(torch.ones(len(INDICES), 7, 5), 0.1)
        names.append([name for name in seen.names if name != "randint"])
    assert names[0] == names[1]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("shape", "num", "max_kept"), [((512, 512), 40, 4), ((), 400, 32)])
def test_the_cache_of_hashed_elements_is_bounded(shape: tuple[int, ...], num: int, max_kept: int) -> None:
    noise.start_pass(samples(INDICES[:2]))
    draws = per_sample_noise(torch.ones(2, 1))
    made: list[weakref.ref[Tensor]] = []

    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            result = function(*given, **(named or {}))
            made.extend([weakref.ref(result)] if isinstance(result, Tensor) else [])
            return result

    with Watching():  # type: ignore[no-untyped-call]
        for _ in range(num):
            draws.normal(*shape)
    gc.collect()
    kept = {tensor.data_ptr(): tensor.nbytes for one in made if (tensor := one()) is not None}
    assert 0 < len(kept) <= max_kept + 8, (
        "the cache holds too many tensors, not counting the constants of the last draw"
    )
    assert sum(kept.values()) <= (8 << 20) + 1024


def test_a_model_is_compiled_once_with_or_without_samples() -> None:
    counter = CompileCounter()

    @torch.compile(backend=counter)
    def draw(keys: Tensor) -> Tensor:
        return SampleNoise(keys).dropout(torch.ones(4, 5), 0.3)

    for known in (samples(INDICES), None, samples(INDICES)):
        noise.start_pass(known)
        draw(torch.arange(4))
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout_preserves_the_mean_and_the_dtype(dtype: torch.dtype) -> None:
    dropped = many().dropout(torch.full((NUM, SIZE), 3.0, dtype=dtype), 0.1)
    assert dropped.dtype == dtype
    assert abs(float((dropped == 0).double().mean()) - 0.1) < 4.5 * math.sqrt(0.09 / (NUM * SIZE))
    kept = dropped[dropped != 0].double()
    assert float((kept - 3 / 0.9).abs().max()) <= 3 / 0.9 * torch.finfo(dtype).eps
    assert not many().dropout(torch.ones(NUM, 2), 1.0).any()


def correlation(one: Tensor, other: Tensor) -> float:
    return float(np.corrcoef(one.flatten().numpy(), other.flatten().numpy())[0, 1])


def test_neighboring_draws_are_not_correlated() -> None:
    """Neighbors differ in the seed, epoch, sample or element."""
    draws = many()
    x = draws.normal(SIZE, dtype=torch.float64)
    again = draws.normal(SIZE, dtype=torch.float64)
    other_call = per_sample_noise(torch.zeros(NUM)).normal(SIZE, dtype=torch.float64)
    shape = many().normal(10, 25, dtype=torch.float64)
    pairs = {
        "adjacent indices": (x[1:], x[:-1]),
        "adjacent elements": (x[:, 1:], x[:, :-1]),
        "adjacent draws": (x, again),
        "adjacent calls": (x, other_call),
        "adjacent epochs": (x, many(epoch=1).normal(SIZE, dtype=torch.float64)),
        "training and evaluation": (x, many(epoch=noise.EVALUATION).normal(SIZE, dtype=torch.float64)),
        "indices that differ in a high bit": (
            x,
            many(indices=range(2**31, 2**31 + NUM)).normal(SIZE, dtype=torch.float64),
        ),
        "one axis": (shape[:, 1:], shape[:, :-1]),
        "the other axis": (shape[:, :, 1:], shape[:, :, :-1]),
        "across axes": (shape[:, 1:, :-1], shape[:, :-1, 1:]),
    }
    for name, (one, other) in pairs.items():
        for what, a, b in (("value", one, other), ("size", one.abs(), other.abs())):
            assert abs(correlation(a, b)) < 4.5 / math.sqrt(one.numel()), (name, what)


def test_no_two_samples_have_correlated_draws() -> None:
    """The correlations of 499,500 pairs (1,000 samples of 1,000 elements) are as small as for independent numbers."""
    x = many(indices=range(1000)).normal(1000, dtype=torch.float64)
    off = torch.corrcoef(x).fill_diagonal_(0).abs()
    assert float(off.max()) < 6.0 / math.sqrt(1000)
    assert abs(float(off.square().sum() / (1000 * 999)) * 1000 - 1) < 0.02


def test_every_bit_is_fair_and_depends_on_all_index_bits() -> None:
    """This is the avalanche effect: if two indices differ in one bit, half of the bits of their draws differ."""
    base = torch.from_numpy(np.random.default_rng(0).integers(0, 2**40, 2000))
    shifts = torch.arange(64)

    def bits(indices: Tensor) -> Tensor:
        high, low = (draws_for(indices.tolist()).integers(0, 2**32).long() for _ in range(2))
        return ((torch.stack([high, low], 1)[:, :, None] >> torch.arange(32)) & 1).flatten(1)

    plain = bits(base)
    assert len(shifts) == plain.shape[1]
    assert float((plain.double().mean(0) - 0.5).abs().max()) < 4.5 * 0.5 / math.sqrt(2000)
    for bit in range(0, 40, 3):
        flipped = (plain != bits(base ^ (1 << bit))).double().mean(0)
        assert float((flipped - 0.5).abs().max()) < 4.5 * 0.5 / math.sqrt(2000), bit


def test_draws_do_not_repeat() -> None:
    """1.5 million draws of 63 random bits collide with a probability of 1e-7."""
    draws = many()
    drawn = torch.cat([draws.integers(0, 2**63 - 1, SIZE).flatten() for _ in range(3)])
    assert len(torch.unique(drawn)) == len(drawn)
