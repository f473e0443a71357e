"""Five text tasks with one frozen encoder: LoRA adapters, then a router that selects among them, then joint training.

Items are masked tokens in the phase pretrain, and records in the others, whose samples are rounds: one record of each
task.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.base.errors import ConfigError, Problem
from runner.base.picture import encode_png, new_figure
from runner.base.task import Context, Dataset, Prediction, Progress, Sum, Task
from runner.base.values import Annotated, Factor, PositiveInt, Range

from .data import (
    GENERATION,
    IGNORED,
    Batch,
    Corpus,
    MaskedTexts,
    Rounds,
    encode_source,
    limit_records,
    open_corpus,
    source_text,
    target_text,
)
from .model import Dynamo, Routing, Shape
from .text import TASKS
from .tokenizer import PAD

PHASES = {
    "pretrain": {"trains": ["base", "lm_head"]},
    "lora": {"needs": ["pretrain"], "trains": ["adapters", "heads"]},
    "router": {"needs": ["lora"], "trains": ["router"]},
    "joint": {
        "needs": ["router"],
        "trains": ["base", "adapters", "heads", "router"],
        "optimizer.lr_scales": {"adapters": 0.1},
    },
}
# Defaults of each size; settings on the command line take precedence.
SIZES = {
    "tiny": {
        "max_grad_norm": 1.0,
        "evaluate.samples": 100,
        "phase.pretrain.updates": 800,
        "phase.pretrain.global_batch_size": 16,
        "phase.pretrain.optimizer.lr": 0.003,
        "phase.pretrain.scheduler.warmup": 0.05,
        "phase.pretrain.evaluate.every": 400,
        "phase.pretrain.evaluate.samples": 256,
        "phase.lora.updates": 600,
        "phase.lora.global_batch_size": 6,
        "phase.lora.optimizer.lr": 0.003,
        "phase.lora.evaluate.every": 300,
        "phase.router.updates": 100,
        "phase.router.global_batch_size": 4,
        "phase.router.optimizer.lr": 0.005,
        "phase.router.evaluate.every": 0,
        "phase.joint.updates": 120,
        "phase.joint.global_batch_size": 4,
        "phase.joint.optimizer.lr": 0.0003,
        "phase.joint.evaluate.every": 60,
    },
    "full": {
        "cpu_micro_batch_size": 8,
        "evaluate.samples": 256,
        "phase.pretrain.updates": 20000,
        "phase.pretrain.global_batch_size": 256,
        "phase.pretrain.optimizer.lr": 0.0004,
        "phase.pretrain.early_stopping.patience": 5,
        "phase.lora.updates": 5000,
        "phase.lora.global_batch_size": 16,
        "phase.lora.optimizer.lr": 0.0003,
        "phase.lora.early_stopping.patience": 3,
        "phase.router.updates": 1000,
        "phase.router.global_batch_size": 16,
        "phase.router.optimizer.lr": 0.0005,
        "phase.router.early_stopping.patience": 3,
        "phase.joint.updates": 1200,
        "phase.joint.global_batch_size": 16,
        "phase.joint.optimizer.lr": 0.00003,
        "phase.joint.early_stopping.patience": 3,
    },
}


def build(
    context: Context,
    *,
    size: Literal["tiny", "full"] = "tiny",
    routing: Literal["hard", "soft"] = "hard",
    rank: PositiveInt | None = None,
    vocab_size: Annotated[int, Range("an integer from 300 to 4096", low=300, high=4096)] | None = None,
    dropout: Factor = 0.1,
    limits: Mapping[str, PositiveInt] = {},
    requests: Literal["shared", "held_out"] = "shared",
) -> Task:
    """Five text tasks with LoRA adapters in one encoder, and a router that selects among them.

    size        tiny: 4 layers of width 128, for two CPU cores; full: 12 layers of width 768
    routing     hard: the router selects one adapter; soft: it mixes all of them
    rank        rank of the adapters; alpha is twice the rank; null: depends on size (tiny 16, full 32)
    vocab_size  tokens in the vocabulary; null: depends on size (tiny 2048, full 4096)
    dropout     dropout probability of the adapter inputs
    limits      task -> maximum number of training records, taken from the beginning of its file: {qa: 1000, code: 500}
    requests    wordings of the built-in records: shared by all splits, which makes routing easy; held_out: each wording
                occurs in only one split
    """
    shape = SHAPES[size]
    shape = replace(shape, rank=rank or shape.rank, vocab_size=vocab_size or shape.vocab_size)
    corpus = open_corpus(
        context.data_path,
        context.cache / "dynamo",
        vocab_size=shape.vocab_size,
        max_length=shape.max_length,
        max_target_length=shape.max_target_length,
        held_out=requests == "held_out",
    )
    corpus = limit_records(corpus, limits)
    return DynamoTask(corpus, shape, seed=context.seed, hard=routing == "hard", dropout=dropout)


class DynamoTask(Task):
    """Trains on masked tokens, then on five tasks with one adapter each, then with a router.

    teacher  fraction of the records that use the adapter of their true task in phase joint; falls from 0.8 to 0.2
    """

    phase = "pretrain"
    model: Dynamo

    def __init__(self, corpus: Corpus, shape: Shape, *, seed: int = 0, hard: bool = True, dropout: float = 0.1) -> None:
        self.corpus, self.seed = corpus, seed
        self.shape = replace(shape, vocab_size=corpus.tokenizer.num_tokens, num_labels=len(corpus.labels))
        self.model = Dynamo(self.shape, dropout=dropout, hard=hard)
        self.teacher = FIRST_TEACHER

    @property
    def item(self) -> str:  # type: ignore[override]  # depends on the phase
        return "token" if self.phase == "pretrain" else "record"

    @property
    def items_per_sample(self) -> float:  # type: ignore[override]  # depends on the phase
        return self._hidden_per_text if self.phase == "pretrain" else float(len(TASKS))

    @property
    def losses(self) -> Mapping[str, Callable[[nn.Module, Any], Sum]]:
        return {
            "pretrain": self.masked_loss,
            "lora": self.adapter_loss,
            "router": lambda model, batch: self.routed_loss(model, batch, "router"),
            "joint": lambda model, batch: self.routed_loss(model, batch, "mixed"),
        }

    def blocks(self) -> Sequence[nn.Module]:
        return list(self.model.base.blocks)

    def layers(self) -> Sequence[nn.Module]:
        """Raise ConfigError: the model is not a sequence, see docs/decisions/0032-dynamo-has-no-layers.md."""
        what = "task=dynamo cannot be divided into layers, because its router reads the output of a first encoder pass"
        fix = "use parallelism=ddp, or parallelism=fsdp if the model does not fit on a device"
        raise ConfigError(Problem(what, "parallelism=pipeline", fix))

    def dataset(self, split: str) -> Dataset:
        tables = self.corpus.tables[split]
        if self.phase == "pretrain":
            return MaskedTexts(tables, self.seed, self.shape.vocab_size, fixed=split != "train")
        return Rounds(tables, cycle=split == "train")

    def begin_update(self, progress: Progress) -> None:
        """Decrease the fraction of records with the true adapter in the phase joint."""
        self.teacher = FIRST_TEACHER + (LAST_TEACHER - FIRST_TEACHER) * progress.share

    # Losses

    def loss(self, model: nn.Module, batch: Batch) -> Sum:
        return self.losses[self.phase](model, batch)

    def masked_loss(self, model: nn.Module, batch: Batch) -> Sum:
        """Return the cross-entropy of the masked tokens."""
        logits = model(batch, "base")["mlm_logits"].float()
        hidden = batch["hidden"]
        loss = F.cross_entropy(logits.flatten(0, 1), hidden.flatten(), ignore_index=IGNORED, reduction="sum")
        return loss, (hidden != IGNORED).sum()

    def adapter_loss(self, model: nn.Module, batch: Batch) -> Sum:
        """Return the loss of the tasks with the adapter of each record's task."""
        return tasks_loss(model(batch, "true"), batch), len(batch["task"])

    def routed_loss(self, model: nn.Module, batch: Batch, routing: Routing) -> Sum:
        """Return the loss of the tasks with the adapters selected by the router, plus the routing loss."""
        made = model(batch, routing, teacher=self.teacher)
        loss = tasks_loss(made, batch) + routing_loss(made["router"], batch["task"], made["temperature"])
        return loss, len(batch["task"])

    # Metrics

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Sum]:
        """Return the metrics of the tasks, comparable between phases.

        In phase lora, the model gets the true task of each record; in later phases, the router selects it. A record
        that is routed to another task counts as wrong, because another head answers.
        """
        if self.phase == "pretrain":
            logits = model(batch, "base")["mlm_logits"].float()
            hidden = batch["hidden"]
            loss = F.cross_entropy(logits.flatten(0, 1), hidden.flatten(), ignore_index=IGNORED, reduction="sum")
            count = (hidden != IGNORED).sum()
            return {"loss": (loss, count), "accuracy": ((logits.argmax(-1) == hidden).sum(), count)}
        routed = self.phase != "lora"
        made = model(batch, "router" if routed else "true", generate=("translation",))
        metrics: dict[str, Sum] = {"loss": (tasks_loss(made, batch), len(batch["task"]))}
        if not routed:
            return metrics | measured(made, batch, None)
        right = made["router"].argmax(dim=-1) == batch["task"]
        metrics["routing"] = (right.sum(), len(right))
        metrics |= measured(made, batch, right)
        for other in ("oracle", "uniform"):
            found = measured(model(batch, "true" if other == "oracle" else "uniform"), batch, None)
            metrics |= {f"{other}.{name}": value for name, value in found.items() if name in TASKS}
        return metrics

    def summarize(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Add `score`, the mean of the tasks' metrics, and the same mean for the true task and for equal weights."""
        shown = {name: value for name, value in metrics.items() if "." not in name}
        for lead, name in (("", "score"), ("oracle.", "score_oracle"), ("uniform.", "score_uniform")):
            values = [metrics[lead + task] for task in TASKS if lead + task in metrics]
            if len(values) == len(TASKS):
                shown[name] = sum(values) / len(values)
        return shown

    def baselines(self) -> Mapping[str, float]:
        """Return baselines on the validation data that ignore the input.

        They predict the most frequent token, label or answer of the training data; for generated text, the most
        frequent token at each position; for routing, always the same task.
        """
        train, val = self.corpus.tables["train"], self.corpus.tables["val"]
        if self.phase == "pretrain":
            return self._masked_baselines()
        found: dict[str, float] = {}
        label = np.bincount(train["classification"].answer).argmax()
        found["classification"] = float((val["classification"].answer == label).mean())
        answers = {
            split: [record["answer"] for record in self.corpus.records(split, "qa")] for split in ("train", "val")
        }
        usual = Counter(answers["train"]).most_common(1)[0][0]
        found["qa"] = found["qa_exact"] = answers["val"].count(usual) / len(answers["val"])
        for task in GENERATION:
            table, real = val[task].answer, val[task].answer != IGNORED
            usual_tokens = [np.bincount(column[column >= 0], minlength=1).argmax() for column in train[task].answer.T]
            found[task] = float((table == np.array(usual_tokens))[real].mean())
        found["score"] = sum(found[task] for task in TASKS) / len(TASKS)
        if self.phase != "lora":
            sizes = [len(table.source) for table in val.values()]
            found["routing"] = max(sizes) / sum(sizes)
        return found

    # Inference

    def predict(  # type: ignore[override]  # options of the contract as named parameters
        self,
        model: nn.Module,
        generator: torch.Generator,
        *,
        samples: PositiveInt = 5,
        text: str | None = None,
    ) -> Iterator[Prediction]:
        """Yield the routing and the outputs for held-out records of each task, then the routing matrix.

        The file of a task is task-NAME.json, because the runner writes a summary.json to the same folder.

        samples  number of test records of each task
        text     text to process instead of test records; the router selects its task; null: the test records
        """
        if self.phase == "pretrain" or (self.phase == "lora" and text is not None):
            what = "answers need adapters" if self.phase == "pretrain" else "a text of your own needs the router"
            raise ConfigError(Problem(f"{what}, but phase {self.phase} is the last one trained", "inference"))
        device = generator.device
        if text is not None:
            (answer,) = self._answers(model, [text], None, device)
            yield Prediction({"text.json": _json(answer)}, _shown(answer))
            return
        for task in TASKS:
            records = self.corpus.records("test", task)[:samples]
            known = task if self.phase == "lora" else None
            answers = self._answers(model, [source_text(record, task) for record in records], known, device)
            found = [
                {"task": task, **answer, "right": target_text(record, task)}
                for record, answer in zip(records, answers, strict=True)
            ]
            yield Prediction({f"task-{task}.json": _json(found)}, "\n\n".join(map(_shown, found)), items=len(found))
        if self.phase != "lora":
            yield self._routing(model, device)

    def _answers(
        self, model: nn.Module, texts: Sequence[str], known: str | None, device: torch.device
    ) -> list[dict[str, Any]]:
        """Return the selected task, its probability and the output for each text; `known`: task to use, or None."""
        source = self._source(texts).to(device)
        if known is None:
            confidence, chosen = model({"source": source}, "router")["router"].softmax(dim=-1).max(dim=-1)
        else:
            confidence, chosen = torch.ones(len(texts)), torch.full((len(texts),), TASKS.index(known))
        found: list[dict[str, Any]] = []
        for i, (number, share) in enumerate(zip(chosen.tolist(), confidence.tolist(), strict=True)):
            task, own = TASKS[number], source[i : i + 1]
            batch = {"source": own, "task": torch.tensor([number], device=device)}
            # The weights of the router are one-hot if routing is hard, and a mixture if it is soft.
            made = model(batch, "true" if known is not None else "router", head=task)[task]
            output = self._text(task, made, texts[i])
            found.append({"source": texts[i], "chosen": task, "confidence": round(share, 4), "output": output})
        return found

    def _text(self, task: str, made: Tensor, text: str) -> str:
        """Return the output of a head for one text, as text."""
        if task == "classification":
            return self.corpus.labels[int(made.argmax())]
        if task == "qa":
            first, last = (int(token) - 1 for token in best_spans(made)[0])
            _, offsets = self.corpus.tokenizer.encode_with_offsets(text)
            inside = offsets[max(0, first) : last + 1]  # BEGIN and END have no text
            return text[inside[0][0] : inside[-1][1]] if inside else ""
        return self.corpus.tokenizer.decode(made[0].tolist())

    def _source(self, texts: Sequence[str]) -> Tensor:
        rows = [encode_source(self.corpus.tokenizer, text, self.shape.max_length) for text in texts]
        source = torch.full((len(rows), max(map(len, rows))), PAD)
        for row, tokens in zip(source, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        return source

    def _routing(self, model: nn.Module, device: torch.device) -> Prediction:
        """Return the routing matrix of the test records: rows are true tasks, columns are selected ones."""
        matrix = np.zeros((len(TASKS), len(TASKS)), dtype=np.int64)
        for number, table in enumerate(self.corpus.tables["test"].values()):
            for rows in np.array_split(table.source[:MOST_ROUTED], -(-len(table.source[:MOST_ROUTED]) // 32)):
                source = torch.from_numpy(rows.astype(np.int64)).to(device)
                chosen = model({"source": source}, "router")["router"].argmax(dim=-1)
                matrix[number] += np.bincount(chosen.cpu().numpy(), minlength=len(TASKS))
        share = matrix.trace() / matrix.sum()
        text = f"Routing of {matrix.sum()} test records: {share:.1%} to their own task."
        files = {"routing.json": json.dumps({"tasks": TASKS, "true_by_chosen": matrix.tolist()}, indent=1)}
        plots = {"routing.png": routing_picture(matrix)}
        return Prediction(files, text, items=int(matrix.sum()), plots=plots)

    # Counting

    @cached_property
    def _hidden_per_text(self) -> float:
        texts = MaskedTexts(self.corpus.tables["train"], 0, self.shape.vocab_size, fixed=True)
        return float(texts.num_hidden(texts.lengths).mean())

    def _masked_baselines(self) -> dict[str, float]:
        counts = np.ones(self.shape.vocab_size)
        for table in self.corpus.tables["train"].values():
            counts += np.bincount(table.source.flatten(), minlength=len(counts))
        counts[:4] = 1  # padding, BEGIN, END and MASK are never masked
        val = MaskedTexts(self.corpus.tables["val"], self.seed, self.shape.vocab_size, fixed=True)
        hidden = val.__getitems__(range(len(val)))["hidden"].numpy()
        hidden = hidden[hidden != IGNORED]
        nats = -np.log(counts / counts.sum())
        return {"loss": float(nats[hidden].mean()), "accuracy": float((hidden == counts.argmax()).mean())}


def tasks_loss(made: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Return the sum of the losses of the records, in nats.

    Cross-entropy of labels; mean over first and last token of answers; mean over the tokens of generated text. Padding
    and truncated answers have no loss.
    """
    losses = []
    for task in TASKS:
        if task not in made:
            continue
        given, answer = made[task].float(), batch[task]
        if task == "classification":
            losses.append(F.cross_entropy(given, answer, reduction="sum"))
        elif task == "qa":
            losses.append(F.cross_entropy(given.transpose(1, 2), answer, ignore_index=IGNORED, reduction="sum") / 2)
        else:
            real = answer != IGNORED
            nats = -given.gather(2, answer.clamp_min(0)[:, :, None])[:, :, 0]
            losses.append(((nats * real).sum(dim=1) / real.sum(dim=1)).sum())
    return torch.stack(losses).sum()


def routing_loss(logits: Tensor, task: Tensor, temperature: Tensor) -> Tensor:
    """Return the routing loss, summed over records, from logits (N, E) and tasks (N,); the records are whole rounds.

    2.0 x cross-entropy of the task + 0.1 x balance + 0.5 x hinge on the margin between the first and the second choice
    (0.2) + 0.01 x entropy + 0.01 x temperature. The last three make the router decisive. The balance is computed per
    round: the mean weights of its records, one of each task, should be equal. It is therefore a sum over samples like
    the other terms, and does not depend on the batch size.
    """
    N, E = logits.shape
    shares = logits.softmax(dim=-1)
    best = shares.topk(2, dim=-1).values
    entropy = -(shares * logits.log_softmax(dim=-1)).sum()
    shortfall = F.relu(LEAD - (best[:, 0] - best[:, 1])).sum()
    loss = 2.0 * F.cross_entropy(logits, task, reduction="sum") + 0.5 * shortfall + 0.01 * (entropy + N * temperature)
    uneven = shares.view(E, N // E, E).mean(dim=0) - 1 / E
    return loss + 0.1 * E * E * uneven.square().sum()


def measured(made: Mapping[str, Tensor], batch: Batch, right: Tensor | None) -> dict[str, Sum]:
    """Return the metrics of the tasks; records whose routing was not `right` (N,) count as wrong.

    classification: accuracy; qa: F1 over tokens, and exact spans; summary, code, translation: next-token accuracy with
    teacher forcing; translation_exact: fraction that the decoder generates exactly.
    """
    found: dict[str, Sum] = {}
    counts = [len(batch[task]) for task in TASKS]
    routed = [None] * len(TASKS) if right is None else list(torch.split(right, counts))
    for task, own in zip(TASKS, routed, strict=True):
        answer = batch[task]
        if task not in made:  # a validation batch may have no record of a task
            zero = batch["task"].new_zeros(())
            names = {"qa": ("qa", "qa_exact"), "translation": ("translation", "translation_exact")}.get(task, (task,))
            found |= dict.fromkeys(names, (zero, 0))
            continue
        counted = torch.ones(len(answer), device=answer.device) if own is None else own.float()
        if task == "classification":
            found[task] = ((counted * (made[task].argmax(dim=-1) == answer)).sum(), len(answer))
        elif task == "qa":
            spans = best_spans(made[task])
            found[task] = ((counted * overlap(spans, answer)).sum(), len(answer))
            found["qa_exact"] = ((counted * (spans == answer).all(dim=-1)).sum(), len(answer))
        else:
            real = answer != IGNORED
            hits = (made[task].argmax(dim=-1) == answer) & real
            found[task] = ((counted[:, None] * hits).sum(), real.sum())
        if f"generated.{task}" in made:
            generated = made[f"generated.{task}"][:, : answer.shape[1]]
            same = ((generated == answer) | (answer == IGNORED)).all(dim=1)
            found[f"{task}_exact"] = ((counted * same).sum(), len(answer))
    return found


def best_spans(logits: Tensor) -> Tensor:
    """Return first and last token (n, 2) of the most probable span for logits (n, 2, T) of first and last."""
    first, last = logits.float().unbind(dim=1)
    scores = first[:, :, None] + last[:, None, :]
    length = scores.shape[1]
    forward = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu()
    best = scores.masked_fill(~forward, float("-inf")).flatten(1).argmax(dim=1)
    return torch.stack([best // length, best % length], dim=1)


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """Return the F1 of the tokens (n,) in two spans (n, 2) of first and last token."""
    shared = (torch.minimum(one[:, 1], other[:, 1]) - torch.maximum(one[:, 0], other[:, 0]) + 1).clamp_min(0)
    lengths = one[:, 1] - one[:, 0] + other[:, 1] - other[:, 0] + 2
    return 2 * shared / lengths


def routing_picture(matrix: np.ndarray[Any, Any]) -> bytes:
    """Return a plot of the routing matrix: true task (rows) by selected task (columns)."""
    figure = new_figure(7.8, 5.6)
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)  # inches; else labels touch the edge
    axes = figure.add_subplot()
    shares = matrix / np.maximum(1, matrix.sum(axis=1, keepdims=True))
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, column in np.ndindex(*matrix.shape):
        dark = shares[row, column] > 0.5
        words = f"{shares[row, column]:.0%}\n{matrix[row, column]}" if matrix[row, column] else "0"
        axes.text(column, row, words, ha="center", va="center", fontsize=9, color="white" if dark else "#333333")
    axes.set_xticks(range(len(TASKS)), TASKS, rotation=25, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(TASKS)), TASKS)
    axes.set_xlabel("task selected by the router")
    axes.set_ylabel("true task of the record")
    axes.set_title(f"Routing of {matrix.sum()} test records: {matrix.trace() / matrix.sum():.1%} correct")
    figure.colorbar(image, shrink=0.9, label="share of the records of a task").ax.yaxis.set_major_formatter("{x:.0%}")
    return encode_png(figure)


def _json(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _shown(answer: Mapping[str, Any]) -> str:
    source = " ".join(answer["source"].split())
    lines = [f"{source[:100]}{'...' if len(source) > 100 else ''}"]
    wrong = "" if answer.get("task", answer["chosen"]) == answer["chosen"] else f", but it is {answer['task']}"
    lines.append(f"  {answer['chosen']} ({answer['confidence']:.2f}{wrong}): {' '.join(answer['output'].split())}")
    if "right" in answer:
        lines.append(f"  right: {' '.join(answer['right'].split())}")
    return "\n".join(lines)


FIRST_TEACHER, LAST_TEACHER = 0.8, 0.2
LEAD = 0.2
MOST_ROUTED = 200  # test records of each task in the routing matrix
SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(
        num_layers=4,
        num_heads=4,
        width=128,
        rank=16,
        router=(128, 64),
        decoder_layers=1,
        max_length=64,
        max_target_length=28,
        vocab_size=2048,
        num_labels=2,
    ),
    "full": Shape(
        num_layers=12,
        num_heads=12,
        width=768,
        rank=32,
        router=(512, 256),
        decoder_layers=2,
        max_length=512,
        max_target_length=128,
        vocab_size=4096,
        num_labels=2,
    ),
}
