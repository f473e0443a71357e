"""The transformer is causal, decodes equally with and without a cache, and samples from its distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner.tasks.gpt.data import Corpus
from runner.tasks.gpt.model import Cache, Shape, Transformer
from runner.tasks.gpt.sampling import generate
from runner.tasks.gpt.task import GPT, SHAPES, build
from runner.tasks.gpt.tokenizer import Bytes
from torch import Tensor, nn
from torch._dynamo.utils import counters

from runner.axes.compile import default, regional
from runner.axes.memory import checkpoint
from runner.base import noise
from runner.base.batch import BatchSamples
from runner.base.task import Context
from tests.rounding import assert_close

SMALL = Shape(num_layers=2, num_heads=2, width=16, block_size=8, vocab_size=256)
TERMS = (5 * SMALL.num_layers + 1) * 4 * SMALL.width  # five sums per layer, and that of the output layer


def make_model(shape: Shape = SMALL, **options: Any) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(shape, **options)
    for weight in model.parameters():  # larger than the initial weights, so that differences are visible
        nn.init.normal_(weight, std=0.3)
    return model


def make_task(shape: Shape = SMALL, **rates: float) -> GPT:
    torch.manual_seed(0)
    return GPT(Corpus({}, np.uint8, Bytes(), None, Path()), shape, **rates)


def make_batch(size: int, shape: Shape = SMALL) -> tuple[Tensor, Tensor]:
    text = torch.randint(256, (size, shape.block_size + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def sample(task: GPT, seed: int = 0, **options: Any) -> list[str]:
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        return [prediction.text for prediction in task.predict(task.model.eval(), generator, **options)]


# The model


@pytest.mark.parametrize(("size", "published"), [("124m", 124_439_808), ("350m", 354_823_168)])
def test_shapes_have_the_published_numbers_of_parameters(size: str, published: int) -> None:
    shape = SHAPES[size]
    with torch.device("meta"):
        model = Transformer(shape)
    padding = (shape.padded_vocab_size - shape.vocab_size) * shape.width
    assert sum(weight.numel() for weight in model.parameters()) == published + padding
    assert shape.padded_vocab_size == 50304


def test_every_parameter_gets_a_gradient() -> None:
    task = make_task()
    task.loss(task.model, make_batch(4))[0].backward()
    for name, weight in task.model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


def test_the_model_is_causal() -> None:
    model = make_model()
    x, _ = make_batch(2)
    for position in range(1, SMALL.block_size):
        changed = x.clone()
        changed[:, position:] = (changed[:, position:] + 1) % 256
        before, after = model(x), model(changed)
        assert torch.equal(before[:, :position], after[:, :position])
        assert not torch.allclose(before[:, position], after[:, position])


@pytest.mark.parametrize("prompt_length", [1, 3, 8])
def test_cached_decoding_gives_the_same_logits(prompt_length: int) -> None:
    model = make_model()
    x, _ = make_batch(3)
    expected = model(x)
    cache = Cache(SMALL)
    assert_close(model(x[:, :prompt_length], cache)[:, 0], expected[:, prompt_length - 1], TERMS)
    for position in range(prompt_length, SMALL.block_size):
        logits = model(x[:, position : position + 1], cache)
        assert_close(logits[:, 0], expected[:, position], TERMS)
    assert cache.length == SMALL.block_size


def test_weights_are_initialized_as_published() -> None:
    torch.manual_seed(0)
    model = Transformer(replace(SMALL, num_layers=8, width=64))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    assert weights["embedding.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["blocks.3.mlp.input.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    for branch in ("attention", "mlp"):
        assert weights[f"blocks.3.{branch}.output.weight"].std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert all(not weight.any() for name, weight in weights.items() if name.endswith("bias"))


# Dropout


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    noise.start_pass(None)


def update(task: GPT, epoch: int = 0) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss and gradients of one forward and backward pass over six samples."""
    noise.start_pass(BatchSamples(0, epoch, range(6), range(6)))
    loss, _ = task.loss(task.model, make_batch(6))
    loss.backward()
    return loss.detach(), [weight.grad for weight in task.model.parameters()]


RATES: list[dict[str, float]] = [
    {"dropout": 0.5},
    {"attention_dropout": 0.5},
    {"dropout": 0.2, "attention_dropout": 0.2},
]


@pytest.mark.parametrize("rates", RATES, ids=str)
def test_dropout_acts_only_in_training(rates: dict[str, float]) -> None:
    model = make_model(**rates)
    x, _ = make_batch(2)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_each_layer_drops_different_elements() -> None:
    first, *others = make_model(dropout=0.5).noise(torch.zeros(4, 8))
    assert first is not None
    drawn = first.bernoulli(0.5, 100)
    for other in others:
        assert other is not None
        assert (drawn == other.bernoulli(0.5, 100)).float().mean() == pytest.approx(0.5, abs=0.1)


def test_fused_and_explicit_attention_are_equal_without_drops() -> None:
    # An element is dropped if its random number is below 1e-12. Only the number 0 is (probability 6e-8).
    fused, explicit = (update(make_task(attention_dropout=rate)) for rate in (0.0, 1e-12))
    assert_close(explicit, fused, TERMS)


@pytest.mark.parametrize("rates", RATES, ids=str)
def test_recomputed_blocks_drop_the_same_elements(rates: dict[str, float]) -> None:
    kept, again = make_task(**rates), make_task(**rates)
    checkpoint(again.model, again.blocks(), torch.device("cpu"))
    torch.testing.assert_close(update(again), update(kept), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo accesses .grad of non-leaf inputs
@pytest.mark.sampled(1)
@pytest.mark.parametrize("compiled", [default, regional])
def test_compiled_models_drop_the_same_elements(compiled: Callable[..., None]) -> None:
    rates = {"dropout": 0.2, "attention_dropout": 0.2}
    plain, task = make_task(**rates), make_task(**rates)
    torch.compiler.reset()
    compiled(task.model, task.blocks(), torch.device("cpu"), backend="eager", fullgraph=True)
    before = counters["stats"]["unique_graphs"]
    for epoch in range(2):
        assert_close(update(task, epoch), update(plain, epoch), TERMS)
    assert counters["stats"]["unique_graphs"] == before + 1  # one graph for all blocks and updates


# The loss


def test_the_loss_is_a_sum_over_samples() -> None:
    task = make_task()
    x, y = make_batch(4)
    whole, items = task.loss(task.model, (x, y))
    parts = [task.loss(task.model, (x[i : i + 1], y[i : i + 1]))[0] for i in range(4)]
    assert items == x.numel() == 4 * task.items_per_sample
    torch.testing.assert_close(whole, torch.stack(parts).sum())


def test_an_untrained_model_has_the_loss_of_uniform_guessing() -> None:
    task = make_task()
    loss, items = task.loss(task.model, make_batch(32))
    assert loss.item() / int(items) == pytest.approx(math.log(256), rel=0.01)


def test_the_loss_is_float32_under_autocast() -> None:
    task = make_task()
    with torch.autocast("cpu", torch.bfloat16):
        assert task.model(make_batch(1)[0]).dtype == torch.bfloat16
        assert task.loss(task.model, make_batch(1))[0].dtype == torch.float32


def test_the_model_overfits_one_batch() -> None:
    task = make_task()
    batch = make_batch(2)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=3e-2)
    for _ in range(40):
        loss, items = task.loss(task.model, batch)
        optimizer.zero_grad()
        (loss / items).backward()
        optimizer.step()
    assert loss.item() / int(items) < 0.1


def test_bits_per_byte_equals_the_loss_in_bits() -> None:
    task = make_task()
    with torch.no_grad():
        metrics = task.evaluate(task.model, make_batch(4))
    (nats, items), (bits, num_bytes) = metrics["loss"], metrics["bits_per_byte"]
    assert items == num_bytes
    assert float(bits) == pytest.approx(float(nats) / math.log(2))


# Sampling


@pytest.mark.slow
def test_generated_samples_depend_only_on_the_seed() -> None:
    task = make_task()
    options: dict[str, Any] = {"samples": 5, "max_new_tokens": 20, "prompt": "def "}
    first = sample(task, 1, **options)
    assert len(set(first)) == 5
    assert all(text.startswith("def ") for text in first)
    assert sample(task, 1, **options) == first
    assert sample(task, 1, **options, batch_size=2) == first
    assert sample(task, 2, **options) != first


def test_temperature_zero_is_greedy_decoding() -> None:
    task = make_task()
    options: dict[str, Any] = {"samples": 1, "max_new_tokens": 20, "prompt": "x"}
    greedy = sample(task, 1, **options, temperature=0.0)
    assert sample(task, 2, **options, temperature=0.0) == greedy
    assert sample(task, 3, **options, top_k=1) == greedy


def test_tokens_are_sampled_with_their_probability() -> None:
    task = make_task()
    prompt = torch.tensor([65, 66])
    draws = ((torch.arange(10_000) + 0.5) / 10_000)[:, None]
    options: dict[str, Any] = {"num_tokens": 200, "temperature": 0.01, "top_k": 7}
    with torch.no_grad():
        chosen = generate(task.model, SMALL, prompt, draws, **options)
        logits = task.model(prompt[None])[0, -1, :200] / 0.01
    best = logits.topk(7)
    expected = torch.zeros(200).scatter(0, best.indices, best.values.softmax(0))
    shares = chosen.flatten().bincount(minlength=200) / len(draws)
    # the numbers are evenly spaced, so the count in an interval differs from the expected count by at most one
    assert float((shares - expected).abs().max()) <= 2 / len(draws)


@pytest.mark.parametrize("prompt_length", [1, 5, 8, 20])
def test_sampling_continues_beyond_the_context_length(prompt_length: int) -> None:
    model = make_model()
    prompt = torch.randint(256, (prompt_length,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        made = generate(model, SMALL, prompt, torch.zeros(1, 30), num_tokens=256, temperature=0.0, top_k=None)
        text, start = prompt.tolist(), 0
        for _ in range(30):
            if len(text) - start > SMALL.block_size:
                start = len(text) - SMALL.block_size // 2
            text.append(int(model(torch.tensor([text[start:]]))[0, -1].argmax()))
    assert made[0].tolist() == text[prompt_length:]


def test_a_sample_ends_at_the_end_of_document_token() -> None:
    task = make_task()

    class AlwaysEnd(nn.Module):
        def forward(self, tokens: Tensor, cache: Cache) -> Tensor:
            cache.length += tokens.shape[1]
            return torch.nn.functional.one_hot(torch.tensor([[task.corpus.tokenizer.end]]), 256).float()

    options: dict[str, Any] = {"samples": 1, "max_new_tokens": 5, "prompt": "pass", "temperature": 0.0}
    (prediction,) = task.predict(AlwaysEnd(), torch.Generator(), **options)
    assert prediction.text == "pass"
    assert prediction.items == 1
    assert prediction.files == {"sample-0000.txt": "pass"}


# The options


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, SHAPES["tiny"]),
        ({"block_size": 32, "vocab_size": 300}, replace(SHAPES["tiny"], block_size=32, vocab_size=300)),
        ({"size": "124m"}, SHAPES["124m"]),
        ({"size": "124m", "vocab_size": 256}, replace(SHAPES["124m"], vocab_size=256)),
        ({"size": "350m"}, SHAPES["350m"]),
    ],
)
def test_task_options_set_the_model_shape(options: dict[str, Any], shape: Shape, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n" * 100)
    with torch.device("meta"):
        task = build(Context(0, text, tmp_path / "cache"), **options)
    assert isinstance(task, GPT)
    assert task.shape == shape
    assert task.items_per_sample == shape.block_size
    assert len(task.blocks()) == shape.num_layers
