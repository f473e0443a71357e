"""Padding and other pairs in a row have no effect, with and without masks. Cached and uncached decoding are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from runner.tasks.nmt.data import Batch, Corpus, PairData, Sequences, random_pairs
from runner.tasks.nmt.decoding import translate
from runner.tasks.nmt.model import Cache, Rows, Shape, Transformer
from runner.tasks.nmt.task import SHAPES, Translation, build
from runner.tasks.nmt.vocabulary import BEGIN, END, PAD
from torch import Tensor, nn
from torch._dynamo.utils import counters

from runner.axes.attention import AttentionCall, record_calls
from runner.axes.compile import default, regional
from runner.base import noise
from runner.base.batch import BatchSamples
from runner.base.task import Context
from tests.rounding import assert_close

SMALL = Shape(
    num_layers=3,
    num_heads=2,
    width=16,
    feed_forward=32,
    vocab_size=40,
    source_length=10,
    target_length=6,
    initial_std=0.02,
)
# A value passes five sums per layer of the encoder and decoder, each with at most `vocab_size` terms.
TERMS = 2 * SMALL.num_layers * 5 * SMALL.vocab_size
# amplification of rounding errors in gradients, because weights are far from their initial values
GROWTH = 16.0 * 2 * SMALL.num_layers


def small_corpus() -> Corpus:
    return random_pairs(0, vocab_size=SMALL.vocab_size, source_length=10, target_length=6)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    noise.start_pass(None)


def make_task(*, packed: bool, far: bool = True, **rates: float) -> Translation:
    torch.manual_seed(0)
    task = Translation(small_corpus(), SMALL, packed=packed, **rates)
    if far:  # from the small initial values, so that differences are visible
        for weight in task.model.parameters():
            nn.init.normal_(weight, std=0.3)
    return task


def batch_of(task: Translation, count: int = 12, split: str = "train") -> Batch:
    return task.dataset(split).__getitems__(range(count))


def change(rows: Rows, where: Tensor) -> Rows:
    """Return the rows with different tokens where `where` is true."""
    return rows._replace(tokens=torch.where(where, (rows.tokens + 7) % (SMALL.vocab_size - 3) + 3, rows.tokens))


def calls_of(task: Translation) -> tuple[AttentionCall, ...]:
    batch = batch_of(task)
    return record_calls(lambda: task.loss(task.model, batch))


@pytest.fixture(params=[False, True], ids=["padded", "packed"])
def task(request: pytest.FixtureRequest) -> Translation:
    return make_task(packed=request.param)


# The published model and its attention masks


@pytest.mark.parametrize(
    ("size", "num_layers", "width", "expected"), [("full", 3, 512, 24_667_136), ("gpt2", 12, 768, 202_372_608)]
)
def test_sizes_have_the_published_numbers_of_parameters(size: str, num_layers: int, width: int, expected: int) -> None:
    with torch.device("meta"):
        model = Transformer(SHAPES[size])
    embedding, positions = 5000 * width, (50 + 20) * width
    attention, norm, feed_forward = 4 * (width * width + width), 2 * width, 8 * width * width + 5 * width
    layers = num_layers * (attention + feed_forward + 2 * norm) + num_layers * (2 * attention + feed_forward + 3 * norm)
    count = sum(weight.numel() for weight in model.parameters())
    assert count == embedding + positions + layers + 2 * norm == expected


def test_only_padded_rows_need_attention_masks() -> None:
    padded, packed = calls_of(make_task(packed=False)), calls_of(make_task(packed=True))
    assert [call.masked for call in padded] == [True] * 3 + [False, True] * 3
    assert [call.masked for call in packed] == [False] * 9
    for calls in (padded, packed):
        assert [call.causal for call in calls] == [False] * 3 + [True, False] * 3


def test_weights_are_initialized_as_published() -> None:
    torch.manual_seed(0)
    model = Transformer(replace(SHAPES["tiny"], num_layers=1))
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            assert weight.std().item() == pytest.approx(model.shape.initial_std, rel=0.05), name
        elif name.endswith("bias"):
            assert not weight.any(), name
    assert SHAPES["full"].initial_std == 0.02


def test_encoder_decoder_and_output_share_one_embedding() -> None:
    model = make_task(packed=False).model
    tables = [name for name, weight in model.named_parameters() if SMALL.vocab_size in weight.shape]
    assert tables == ["embedding.weight"]


# Properties of the model


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_parameter_gets_a_gradient(task: Translation, dropout: float) -> None:
    task = make_task(packed=task.packed, dropout=dropout, far=False)
    task.loss(task.model, batch_of(task, 64))[0].backward()
    for name, weight in task.model.named_parameters():
        assert weight.grad is not None, name
        assert (weight.grad != 0).any(), name


def test_the_source_changes_the_output(task: Translation) -> None:
    source, target, _, _ = batch_of(task)
    other = change(source, source.segments == 1)
    before, after = task.model(source, target), task.model(other, target)
    assert not torch.isclose(before, after)[(target.segments == 1)].any(dim=-1).all()


def test_padding_does_not_change_the_output(task: Translation) -> None:
    source, target, _, _ = batch_of(task)
    assert (source.segments == 0).any()
    assert (target.segments == 0).any()
    expected = task.model(source, target)
    result = task.model(change(source, source.segments == 0), change(target, target.segments == 0))
    real = target.segments != 0
    assert torch.equal(result[real], expected[real])


def test_target_tokens_do_not_attend_to_later_ones(task: Translation) -> None:
    source, target, _, _ = batch_of(task)
    before = task.model(source, target)
    for position in range(1, SMALL.target_length):
        after = task.model(source, change(target, target.positions >= position))
        past = (target.positions < position) & (target.segments != 0)
        assert torch.equal(before[past], after[past])
        here = (target.positions == position) & (target.segments != 0)
        assert not torch.isclose(before[here], after[here]).all(dim=-1).any()


def test_pairs_in_a_row_do_not_attend_to_each_other() -> None:
    task = make_task(packed=True)
    source, target, _, _ = batch_of(task)
    assert source.segments.max() > 2
    before = task.model(source, target)
    after = task.model(change(source, source.segments == 2), change(target, target.segments == 2))
    assert torch.equal(before[target.segments == 1], after[target.segments == 1])
    assert torch.equal(before[target.segments == 3], after[target.segments == 3])
    assert not torch.isclose(before, after)[target.segments == 2].all(dim=-1).any()


@pytest.mark.parametrize("count", [1, 5, 64])
def test_packing_changes_neither_loss_nor_gradient(count: int) -> None:
    result = []
    for packed in (False, True):
        task = make_task(packed=packed)
        loss, items = task.loss(task.model, batch_of(task, count))
        loss.backward()
        result.append((loss / items, items, {name: weight.grad for name, weight in task.model.named_parameters()}))
    assert result[0][1] == result[1][1]
    assert_close(result[0][0], result[1][0], TERMS)
    for name, gradient in result[0][2].items():
        assert_close(gradient, result[1][2][name], TERMS, GROWTH)


def test_packed_and_padded_models_give_equal_outputs() -> None:
    logits = []
    for packed in (False, True):
        task = make_task(packed=packed)
        source, target, labels, _ = batch_of(task)
        result = task.model(source, target)
        whose = torch.stack(
            [labels.flatten(), target.positions.flatten()],
            dim=1,
            # sort keys that are equal in both layouts
        )
        real = labels.flatten() != PAD
        order = sorted(
            range(int(real.sum())),
            key=lambda row: (*whose[real][row].tolist(), result.flatten(0, 1)[real][row].sum().item()),
        )
        logits.append(result.flatten(0, 1)[real][order])
    assert_close(logits[0], logits[1], TERMS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positional_encodings_are_exact_in_half_precision(dtype: torch.dtype) -> None:
    task = make_task(packed=True)
    source, target, _, _ = batch_of(task)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        before = task.model(source, target)
        after = task.model(change(source, source.segments != 1), change(target, target.segments != 1))
    assert before.isfinite().all()
    assert torch.equal(before[target.segments == 1], after[target.segments == 1])


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("rates", [{"dropout": 0.5}, {"attention_dropout": 0.5}], ids=str)
def test_dropout_acts_only_in_training(task: Translation, rates: dict[str, float]) -> None:
    task = make_task(packed=task.packed, **rates)
    source, target, _, places = batch_of(task)

    def logits() -> Tensor:
        result: Tensor = task.model(source, target, noise=task.model.noise(places))
        return result

    assert not torch.equal(logits(), logits())
    with pytest.raises(ValueError, match="noise"):
        task.model(source, target)
    task.model.eval()
    assert torch.equal(logits(), logits())
    assert torch.equal(logits(), task.model(source, target))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo accesses .grad of non-leaf inputs
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("compiled", "graphs"), [(default, 1), (regional, 2)])
def test_compiled_models_drop_the_same_elements(compiled: Callable[..., None], graphs: int) -> None:
    """With compile=regional, all encoder layers share one graph, and all decoder layers share another one."""

    def loss(task: Translation, epoch: int) -> tuple[Tensor, Tensor | None]:
        noise.start_pass(BatchSamples(0, epoch, range(20), range(20)))
        result, _ = task.loss(task.model, batch_of(task, 20))
        result.backward()
        return result.detach(), task.model.embedding.weight.grad

    plain, task = (make_task(packed=True, dropout=0.2, attention_dropout=0.2) for _ in range(2))
    torch.compiler.reset()
    compiled(task.model, task.blocks(), torch.device("cpu"), backend="eager", fullgraph=True)
    before = counters["stats"]["unique_graphs"]
    for epoch in range(2):
        assert_close(loss(task, epoch), loss(plain, epoch), TERMS, GROWTH)
    assert counters["stats"]["unique_graphs"] == before + graphs


@pytest.mark.parametrize("rates", [{"dropout": 0.3}, {"dropout": 0.1, "attention_dropout": 0.3}], ids=str)
def test_packing_does_not_change_dropped_elements(rates: dict[str, float]) -> None:
    result = []
    for packed in (False, True):
        task = make_task(packed=packed, **rates)
        task.model.double()
        noise.start_pass(BatchSamples(0, 0, range(20), range(20)))
        loss, _ = task.loss(task.model, batch_of(task, 20))
        loss.backward()
        result.append((loss.detach(), [weight.grad for weight in task.model.parameters()]))
    # Positional encodings and the loss are computed in float32.
    assert_close(result[0], result[1], TERMS, GROWTH, torch.float32)


def test_fused_and_explicit_attention_are_equal_without_drops(task: Translation) -> None:
    result = []
    for rate in (0.0, 1e-12):  # only the random number 0 is below 1e-12; its probability is 6e-8
        other = make_task(packed=task.packed, attention_dropout=rate)
        loss, _ = other.loss(other.model, batch_of(other, 20))
        loss.backward()
        result.append((loss.detach(), [weight.grad for weight in other.model.parameters()]))
    assert_close(result[0], result[1], TERMS, GROWTH)


# Layers


def composed(task: Translation) -> Callable[..., Tensor]:
    first, *rest = task.layers()

    def call(*inputs: Any, **named: Any) -> Tensor:
        value = first(*inputs, **named)
        for layer in rest:
            value = layer(value)
        return value

    return call


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("rates", [{}, {"dropout": 0.3}, {"dropout": 0.1, "attention_dropout": 0.3}], ids=str)
def test_composed_layers_equal_the_model(task: Translation, rates: dict[str, float]) -> None:
    task = make_task(packed=task.packed, **rates)
    batch = batch_of(task, 20)
    drawn = task.model.noise(batch.places)
    assert (drawn is None) == (not rates)
    whole = task.model(batch.source, batch.target, noise=drawn)
    assert torch.equal(composed(task)(batch.source, batch.target, noise=drawn), whole)
    held = {weight for layer in task.layers() for weight in layer.parameters()}
    assert held == set(task.model.parameters())


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("beam", [1, 3])
def test_layers_decode_like_the_model(task: Translation, beam: int) -> None:
    source = batch_of(task, 40, "val").source
    with torch.no_grad():
        task.model.embedding.weight[END] *= 3  # so that some translations end early
        expected = translate(task.model, SMALL, source, beam=beam)
        assert torch.equal(translate(composed(task), SMALL, source, beam=beam), expected)  # type: ignore[arg-type]


# Decoding


def greedy_without_cache(task: Translation, source: Rows) -> Tensor:
    made = torch.full((len(source.tokens), SMALL.target_length), PAD)
    given = torch.full((len(source.tokens), 1), BEGIN)
    for position in range(SMALL.target_length):
        positions = torch.arange(position + 1).expand(len(given), -1)
        logits = task.model(source, Rows(given, torch.ones_like(given), positions))[:, -1]
        logits[:, [PAD, BEGIN]] = float("-inf")
        made[:, position] = logits.argmax(dim=-1)
        given = torch.cat([given, made[:, position : position + 1]], dim=1)
    result = (made == END).cumsum(dim=1) - (made == END).long() > 0
    return made.masked_fill(result, PAD)


def test_greedy_decoding_does_not_depend_on_the_cache(task: Translation) -> None:
    source = batch_of(task, 40, "val").source
    with torch.no_grad():
        task.model.embedding.weight[END] *= 3  # so that some translations end early
        assert torch.equal(translate(task.model, SMALL, source), greedy_without_cache(task, source))


def test_cached_decoding_gives_the_logits_of_one_pass(task: Translation) -> None:
    source, target, _, _ = batch_of(task, 5, "val")
    expected, cache = task.model(source, target), Cache(SMALL)
    for position in range(SMALL.target_length):
        step = Rows(*(field[:, position : position + 1] for field in target))
        step = step._replace(
            segments=torch.ones_like(step.segments), positions=torch.full_like(step.positions, position)
        )
        result = task.model(source, step, cache)[:, 0]
        real = target.segments[:, position] != 0
        assert_close(result[real], expected[real, position], TERMS)


def score(task: Translation, source: Rows, made: Tensor) -> Tensor:
    """Return the mean log probability (B,) of decoded targets."""
    given = torch.cat([torch.full((len(made), 1), BEGIN), made[:, :-1]], dim=1)
    target = Rows(given, torch.ones_like(given), torch.arange(made.shape[1]).expand_as(made))
    logits = task.model(source, target)
    logits[..., [PAD, BEGIN]] = float("-inf")
    chosen = logits.log_softmax(-1).gather(-1, made[..., None])[..., 0].masked_fill(made == PAD, 0)
    mean: Tensor = chosen.sum(dim=1) / (made != PAD).sum(dim=1)
    return mean


@pytest.mark.slow_beyond(1)
def test_a_beam_of_vocabulary_size_finds_the_best_output(task: Translation) -> None:
    shape = replace(SMALL, target_length=2)
    source = batch_of(task, 6, "val").source
    ordinary = [token for token in range(SMALL.vocab_size) if token not in (PAD, BEGIN)]
    all_targets = torch.tensor(
        [[END, PAD]] + [[first, second] for first in ordinary if first != END for second in ordinary]
    )
    with torch.no_grad():
        result = translate(task.model, shape, source, beam=SMALL.vocab_size)
        for row in range(6):
            one = Rows(*(field[row : row + 1].expand(len(all_targets), -1) for field in source))
            best = score(task, one, all_targets).max()
            alone = Rows(*(field[row : row + 1] for field in source))
            torch.testing.assert_close(score(task, alone, result[row : row + 1])[0], best)


@pytest.mark.slow_beyond(1)
def test_beam_search_does_not_depend_on_the_batch(task: Translation) -> None:
    source = batch_of(task, 9, "val").source
    with torch.no_grad():
        together = translate(task.model, SMALL, source, beam=3)
        alone = [
            translate(task.model, SMALL, Rows(*(field[row : row + 1] for field in source)), beam=3) for row in range(9)
        ]
    assert torch.equal(together, torch.cat(alone))


# The task


@pytest.mark.slow_beyond(1)
def test_metrics_do_not_depend_on_the_batch(task: Translation) -> None:
    data = task.dataset("val")
    with torch.no_grad():
        whole = task.evaluate(task.model, data.__getitems__(range(8)))
        parts = [task.evaluate(task.model, data.__getitems__([index])) for index in range(8)]
    for name, (total, count) in whole.items():
        torch.testing.assert_close(total.float(), sum(part[name][0] for part in parts).float())
        assert count == sum(part[name][1] for part in parts)


@pytest.mark.slow
def test_an_overfitted_batch_is_decoded_exactly() -> None:
    task = make_task(packed=True, far=False)
    batch, held = batch_of(task, 4), PairData(*sides(task, 4), SMALL.source_length, SMALL.target_length)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=2e-2)
    for _ in range(80):
        loss, items = task.loss(task.model, batch)
        optimizer.zero_grad()
        (loss / items).backward()
        optimizer.step()
    with torch.no_grad():
        metrics = task.evaluate(task.model, held.__getitems__(range(4)))
    assert metrics["exact_match"][0] == 4
    assert metrics["token_accuracy"][0] == metrics["token_accuracy"][1]


def sides(task: Translation, count: int) -> tuple[Sequences, Sequences]:
    train = task.dataset("train")
    return tuple(
        Sequences.of([side[index].tolist() for index in range(count)])
        for side in (train.whole_sources, train.whole_targets)
    )


def test_a_truncated_target_is_never_an_exact_match() -> None:
    task = make_task(packed=False)
    data = PairData(Sequences.of([[5, 6]]), Sequences.of([list(range(5, 15))]), 10, 6)
    batch = data.__getitems__([0])
    assert not (batch.labels == END).any()
    with torch.no_grad():
        task.model.embedding.weight.zero_()
        assert task.evaluate(task.model, batch)["exact_match"][0] == 0


def test_the_loss_is_float32_under_autocast(task: Translation) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert task.loss(task.model, batch_of(task))[0].dtype == torch.float32


@pytest.mark.slow
def test_inference_writes_pairs_and_attention_report(task: Translation) -> None:
    with torch.no_grad():
        made = list(task.predict(task.model.eval(), torch.Generator(), samples=5, batch_size=2, beam=2))
    table = made[2].files["translations.tsv"]
    assert isinstance(table, str)
    lines = table.splitlines()
    assert lines[0] == "source\treference\toutput"
    assert [line.count("\t") for line in lines] == [2] * 6
    assert sum(each.items for each in made) >= 5
    assert made[3].plots["attention.png"].startswith(b"\x89PNG")
    assert f'"with_mask": {0 if task.packed else 6}' in str(made[3].files["attention.json"])
    assert not task.model.training


def test_inference_reports_the_effect_of_attention_dropout() -> None:
    task = make_task(packed=True, attention_dropout=0.1)
    with torch.no_grad():
        (*_, last) = task.predict(task.model.eval(), torch.Generator(), samples=2)
    assert "task.attention_dropout" in last.text
    assert not last.plots


@pytest.mark.parametrize("split", ["val", "test"])
def test_inference_results_name_their_split(split: Literal["val", "test"]) -> None:
    task = make_task(packed=True)
    with torch.no_grad():
        (*_, last) = task.predict(task.model.eval(), torch.Generator(), samples=2, split=split)
    assert split in last.text


@pytest.mark.slow
def test_user_text_is_translated(task: Translation) -> None:
    with torch.no_grad():
        made = list(task.predict(task.model.eval(), torch.Generator(), source=" 5 6 7 "))
    assert len(made) == 2
    assert str(made[0].files["translations.txt"]).startswith("source     5 6 7\noutput ")


def test_the_task_can_be_built_for_random_pairs(tmp_path: Path) -> None:
    built: Any = build(Context(0, None, tmp_path), data="random", vocab_size=100)
    assert built.shape.vocab_size == 100
    assert len(built.blocks()) == 2 * built.shape.num_layers
    assert set(built.baselines()) == set(built.evaluate(built.model.eval(), batch_of(built, 2, "val")))
