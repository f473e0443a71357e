"""Adapters are part of the model, only the parameters that a phase trains get gradients, and the decoder is causal."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runner.tasks.dynamo.data import IGNORED, Batch, Rounds
from runner.tasks.dynamo.model import TARGETS, Dynamo, Memory, Shape
from runner.tasks.dynamo.task import (
    PHASES,
    SHAPES,
    DynamoTask,
    best_spans,
    build,
    measured,
    overlap,
    routing_loss,
    tasks_loss,
)
from runner.tasks.dynamo.text import HELD_OUT, LARGEST_FILE, LONGEST_TEXT, SPLITS, TASKS, WANTED
from runner.tasks.dynamo.tokenizer import BEGIN, PAD
from torch import nn

from runner.base.errors import ConfigError
from runner.base.noise import per_sample_noise
from runner.base.task import Context, Progress
from tests.rounding import assert_close

SMALL = Shape(2, 2, 16, 4, (12, 8), 1, 24, 10, 300, 2)
PARTS = ("base", "lm_head", "adapters", "heads", "router")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six records of each task in each split."""
    folder = tmp_path_factory.mktemp("records") / "data"
    names = ["alpha", "beta", "gamma", "delta", "eps", "zeta"]
    made: dict[str, list[Any]] = {
        "classification": [{"text": f"{n} it.", "label": ("class", "function")[i % 2]} for i, n in enumerate(names)],
        "qa": [{"question": f"{n}?", "context": f"f({n}={i}2)", "answer": f"{i}2", "start": 3 + len(n)}
               for i, n in enumerate(names)],
        "summary": [{"source": f"Long words on {n}.", "target": f"{n} it."} for n in names],
        "code": [{"source": f"Find {n}", "target": f"def {n}():"} for n in names],
        "translation": [{"source": f"{n} + b * 2", "target": f"{n} b 2 * +"} for n in names],
    }  # fmt: skip
    for task, records in made.items():
        (folder / task).mkdir(parents=True)
        for name in SPLITS.values():
            (folder / task / f"{name}.json").write_text(json.dumps(records))
    return folder


@pytest.fixture
def task(data: Path) -> DynamoTask:
    torch.manual_seed(0)
    made = build(Context(0, data, data.parent / "cache"), vocab_size=300, dropout=0.0)
    assert isinstance(made, DynamoTask)
    task = DynamoTask(made.corpus, SMALL, dropout=0.0)
    for weight in task.model.parameters():  # not small or zero, so that differences are visible
        if weight.ndim > 0:
            nn.init.normal_(weight, std=0.3)
    return task


def batch_of(task: DynamoTask, rounds: int = 4, split: str = "train") -> Batch:
    return Rounds(task.corpus.tables[split], cycle=True).__getitems__(range(rounds))


# LoRA


def test_zero_adapters_do_not_change_the_output(task: DynamoTask) -> None:
    model = task.model
    for layer in model.adapters:
        for target in TARGETS:
            nn.init.zeros_(layer[target].B)
    batch = batch_of(task)
    real = batch["source"] != PAD
    weights = torch.rand(len(real), len(TASKS))
    plain = model.base(batch["source"], real)
    assert torch.equal(model.base(batch["source"], real, model.adapters, weights), plain)
    assert not torch.count_nonzero(Dynamo(SMALL).adapters[0]["q"].B)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("target", TARGETS)
def test_an_adapter_affects_only_its_records(task: DynamoTask, target: str) -> None:
    model = task.model
    batch = batch_of(task, 1)
    real = batch["source"] != PAD
    weights = torch.eye(len(TASKS))
    before = model.base(batch["source"], real, model.adapters, weights)
    with torch.no_grad():
        model.adapters[0][target].B[3] += 0.5
    after = model.base(batch["source"], real, model.adapters, weights)
    changed = [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert changed == [False, False, False, True, False]


def test_lora_is_the_weighted_sum_of_its_products(task: DynamoTask) -> None:
    lora = task.model.adapters[0]["q"]
    x, weights = torch.randn(2, 3, 16), torch.rand(2, len(TASKS))
    expected = torch.zeros(2, 3, 16)
    for n, e in itertools.product(range(2), range(len(TASKS))):
        expected[n] += 2.0 * weights[n, e] * x[n] @ lora.A[e].T @ lora.B[e].T
    assert_close(lora(x, weights), expected, terms=16 * len(TASKS))


# Phases


def test_each_parameter_is_in_one_part(task: DynamoTask) -> None:
    assert [name for name, _ in task.model.named_children()] == list(PARTS)
    for phase, keys in PHASES.items():
        assert set(keys["trains"]) <= set(PARTS), phase
    assert set().union(*(keys["trains"] for keys in PHASES.values())) == set(PARTS)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("phase", PHASES)
def test_only_trained_parameters_get_gradients(task: DynamoTask, phase: str) -> None:
    task.begin_phase(phase)
    dataset = task.dataset("train")
    for name, weight in task.model.named_parameters():
        weight.requires_grad_(name.split(".")[0] in PHASES[phase]["trains"])
    for start in (0, 2):  # hard routing sends the batches to different adapters
        batch = dataset.__getitems__([*range(start, start + 4)] if phase != "pretrain" else list(range(30)))  # type: ignore[attr-defined]
        task.loss(task.model, batch)[0].backward()
    for name, weight in task.model.named_parameters():
        if weight.requires_grad:
            assert weight.grad is not None, name
            assert weight.grad.abs().sum() > 0, name
            if phase == "lora" and name.startswith("adapters"):  # of every task
                assert (weight.grad.abs().sum(dim=(1, 2)) > 0).all(), name
        else:
            assert weight.grad is None, name
    if phase in ("router", "joint"):
        gradient = task.model.router.raw_temperature.grad
        assert gradient is not None
        assert gradient.abs() > 0


def test_the_curriculum_follows_progress(task: DynamoTask) -> None:
    shares = []
    for update in (0, 50, 100):
        task.begin_update(Progress("joint", update, 100, 0.0))
        shares.append(task.teacher)
    assert shares == pytest.approx([0.8, 0.5, 0.2])


def test_the_teacher_forcing_ratio_selects_the_router(task: DynamoTask) -> None:
    model, batch = task.model.eval(), batch_of(task)
    true, routed = model(batch, "true"), model(batch, "router")
    assert not torch.equal(true["code"], routed["code"])
    assert torch.equal(model(batch, "mixed", teacher=1.0)["code"], true["code"])
    assert torch.equal(model(batch, "mixed", teacher=0.0)["code"], routed["code"])


# The router


def test_the_temperature_stays_above_a_tenth(task: DynamoTask) -> None:
    router = task.model.router
    given = torch.randn(3, 5, 32), torch.ones(3, 5, dtype=torch.bool)
    logits = router(*given) * router.temperature
    with torch.no_grad():
        router.raw_temperature.fill_(-100.0)
    assert router.temperature.item() == pytest.approx(0.1)
    torch.testing.assert_close(router(*given), logits / 0.1)
    assert Dynamo(SMALL).router.temperature.item() == pytest.approx(1.0)


def test_the_router_ignores_padding(task: DynamoTask) -> None:
    batch = batch_of(task)
    wide = {"source": nn.functional.pad(batch["source"], (0, 3), value=PAD)}
    torch.testing.assert_close(task.model(wide, "router")["router"], task.model(batch, "router")["router"])


@pytest.mark.parametrize("training", [True, False])
def test_soft_routing_mixes_adapters(task: DynamoTask, training: bool) -> None:
    model = task.model.train(training)
    logits = {"router": torch.randn(6, len(TASKS))}
    noise = per_sample_noise(logits)
    weights = model.routing_weights(torch.zeros(6, dtype=torch.long), "router", 0.0, logits, noise)
    assert weights.max(dim=1).values.tolist() == pytest.approx([1.0] * 6)
    model.hard = False
    mixed = model.routing_weights(torch.zeros(6, dtype=torch.long), "router", 0.0, logits, noise)
    torch.testing.assert_close(mixed, logits["router"].softmax(dim=1))


def test_a_confident_correct_router_has_the_lowest_loss() -> None:
    task = torch.arange(5).repeat_interleave(2)
    right = nn.functional.one_hot(task, 5) * 20.0
    cold = torch.tensor(0.1)
    assert routing_loss(right, task, cold).item() == pytest.approx(10 * 0.001, rel=0.01)
    for worse in (right.roll(1, dims=0), right * 0, right * 0 + torch.tensor([20.0, 0, 0, 0, 0])):
        assert routing_loss(worse, task, cold) > 1.0
    assert routing_loss(right, task, torch.tensor(1.0)) > routing_loss(right, task, cold)


# The loss


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("phase", PHASES)
def test_the_loss_is_a_sum_over_samples(task: DynamoTask, phase: str) -> None:
    task.begin_phase(phase)
    task.model.eval()
    task.teacher = 1.0
    dataset: Any = task.dataset("train")
    whole, items = task.loss(task.model, dataset.__getitems__([0, 1, 2]))
    parts = [task.loss(task.model, dataset.__getitems__([i])) for i in range(3)]
    assert_close(whole, torch.stack([loss for loss, _ in parts]).sum(), terms=int(items) * 300)
    assert int(items) == sum(int(count) for _, count in parts)


def test_padding_does_not_affect_loss_and_metrics(task: DynamoTask) -> None:
    task.model.eval()
    batch = batch_of(task)
    wide = dict(batch)
    wide["source"] = nn.functional.pad(batch["source"], (0, 3), value=PAD)
    for name in ("summary", "code", "translation"):
        extra = min(2, SMALL.max_target_length - batch[name].shape[1])
        wide[name] = nn.functional.pad(batch[name], (0, extra), value=IGNORED)
    made, more = task.model(batch, "true"), task.model(wide, "true")
    torch.testing.assert_close(tasks_loss(more, wide), tasks_loss(made, batch))
    for name, (value, count) in measured(made, batch, None).items():
        assert measured(more, wide, None)[name][0] == pytest.approx(float(value)), name
        assert measured(more, wide, None)[name][1] == count


def test_the_loss_is_float32_under_autocast(task: DynamoTask) -> None:
    for phase in PHASES:
        task.begin_phase(phase)
        batch = task.dataset("train").__getitems__([0, 1])  # type: ignore[attr-defined]
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = task.loss(task.model, batch)
        assert loss.dtype == torch.float32
        assert loss.isfinite()


# Decoding


@pytest.fixture
def memory(task: DynamoTask) -> Memory:
    batch = batch_of(task)
    real = batch["source"] != PAD
    return Memory(task.model.base(batch["source"], real), batch["source"], real, task.model.base.embedding.weight)


def test_the_decoder_is_causal(task: DynamoTask, memory: Memory) -> None:
    decoder: Any = task.model.heads["code"]
    before = torch.randint(4, 300, (len(memory.source), 8))
    first = decoder(before, memory)
    for position in range(1, 8):
        changed = before.clone()
        changed[:, position:] = 5
        torch.testing.assert_close(decoder(changed, memory)[:, :position], first[:, :position])
    assert_close(first.exp().sum(-1), torch.ones(before.shape), terms=first.shape[-1])


def test_greedy_decoding_chooses_the_most_likely_token(task: DynamoTask, memory: Memory) -> None:
    decoder: Any = task.model.heads["code"]
    generated = decoder.generate(memory)
    assert generated.shape == (len(memory.source), SMALL.max_target_length)
    before = nn.functional.pad(generated[:, :-1], (1, 0), value=BEGIN)
    assert torch.equal(decoder(before, memory).argmax(dim=-1), generated)


def test_the_decoder_reads_the_source(task: DynamoTask, memory: Memory) -> None:
    decoder: Any = task.model.heads["code"]
    before = torch.full((len(memory.source), 1), BEGIN)
    other = Memory(memory.states.roll(1, 0), memory.source.roll(1, 0), memory.real.roll(1, 0), memory.embedding)
    assert not torch.allclose(decoder(before, memory), decoder(before, other))


# Metrics


def test_best_spans_are_the_most_likely_valid_ones() -> None:
    logits = torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(0))
    for row, (first, last) in zip(logits, best_spans(logits).tolist(), strict=True):
        pairs = [(i, j) for i in range(6) for j in range(i, 6)]
        assert (first, last) == max(pairs, key=lambda pair: float(row[0, pair[0]] + row[1, pair[1]]))


def test_overlap_is_the_token_f1_score() -> None:
    one, other = torch.tensor([[2, 4], [2, 4], [0, 1], [3, 3]]), torch.tensor([[2, 4], [4, 5], [3, 4], [-100, -100]])
    assert overlap(one, other).tolist() == pytest.approx([1.0, 0.4, 0.0, 0.0])


def test_a_misrouted_record_counts_as_wrong(task: DynamoTask) -> None:
    batch = batch_of(task)
    made = task.model.eval()(batch, "true")
    right = torch.zeros(len(batch["task"]), dtype=torch.bool)
    assert all(float(value) == 0 for value, _ in measured(made, batch, right).values())
    all_right = measured(made, batch, ~right)
    assert all(float(value) == float(all_right[name][0]) for name, (value, _) in measured(made, batch, None).items())


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_every_baseline_has_a_metric(task: DynamoTask, phase: str) -> None:
    task.begin_phase(phase)
    with torch.no_grad():
        metrics = task.evaluate(task.model.eval(), task.dataset("val").__getitems__([0, 1]))  # type: ignore[attr-defined]
    shown = task.summarize({name: float(value) / max(1, int(count)) for name, (value, count) in metrics.items()})
    assert set(task.baselines()) <= set(shown)
    assert not [name for name in shown if "." in name]
    if phase != "pretrain":
        assert shown["score"] == pytest.approx(sum(shown[name] for name in TASKS) / len(TASKS))
        assert task.baselines()["classification"] == 0.5


# Inference


def predictions(task: DynamoTask, phase: str, **options: Any) -> list[Any]:
    task.begin_phase(phase)
    with torch.no_grad():
        return list(task.predict(task.model.eval(), torch.Generator().manual_seed(0), **options))


@pytest.mark.slow
def test_inference_answers_records_and_reports_the_routing(task: DynamoTask) -> None:
    made = predictions(task, "joint", samples=2)
    names = [name for prediction in made for name in prediction.files]
    assert names == [f"task-{t}.json" for t in TASKS] + ["routing.json"]
    assert len({*names, "summary.json"}) == len(TASKS) + 2  # the runner writes its own summary.json beside them
    for prediction, name in zip(made, TASKS, strict=False):
        (content,) = prediction.files.values()
        records = json.loads(content)
        assert [record["task"] for record in records] == [name] * 2
        assert all(record["chosen"] in TASKS and 0 < record["confidence"] <= 1 for record in records)
    matrix = json.loads(made[-1].files["routing.json"])["true_by_chosen"]
    assert [sum(row) for row in matrix] == [6] * len(TASKS)
    assert made[-1].plots["routing.png"].startswith(b"\x89PNG")


def test_inference_routes_any_text(task: DynamoTask) -> None:
    (made,) = predictions(task, "joint", text="a + b")
    assert json.loads(made.files["text.json"])["chosen"] in TASKS


def test_inference_without_a_router_uses_the_known_task(task: DynamoTask) -> None:
    made = predictions(task, "lora", samples=1)
    assert [
        json.loads(prediction.files[f"task-{t}.json"])[0]["chosen"] for prediction, t in zip(made, TASKS, strict=True)
    ] == [*TASKS]
    for phase, options in (("pretrain", {}), ("lora", {"text": "a"})):
        with pytest.raises(ConfigError):
            predictions(task, phase, **options)


# Sizes


def test_the_full_size_has_the_original_shape(task: DynamoTask) -> None:
    shape = SHAPES["full"]
    with torch.device("meta"):
        model = Dynamo(shape)
    sizes = {name: sum(weight.numel() for weight in part.parameters()) for name, part in model.named_children()}
    assert (shape.num_layers, shape.width, shape.rank, shape.router) == (12, 768, 32, (512, 256))
    assert sizes["adapters"] == 12 * 4 * 2 * 5 * 32 * 768
    assert 85e6 < sizes["base"] < 95e6
    assert [layer.out_features for layer in model.router.layers if isinstance(layer, nn.Linear)] == [512, 256, 5]


def test_numbers_in_the_documentation_match_the_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tasks" / "dynamo.md").read_text(encoding="utf-8")
    text = " ".join(text.split())
    for sentence in (
        f"files larger than {LARGEST_FILE // 1000} kB",
        f"{HELD_OUT:.0%}".replace("%", " % each"),
        f"truncated to {LONGEST_TEXT} characters",
        f"(tiny: {SHAPES['tiny'].max_length} tokens, full: {SHAPES['full'].max_length})",
    ):
        assert sentence in text
    assert "two wordings" in text
    assert {len(ways) for ways in WANTED.values()} == {2}
