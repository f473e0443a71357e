"""An encoder-decoder transformer that writes a function's signature from its description.

Items are target tokens. The metrics are token accuracy with teacher forcing, and exact match of the decoded targets;
the baselines predict the most frequent token or target.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.base.task import Context, Prediction, Sum, Task
from runner.base.values import Factor, PositiveInt

from .attention import format_summary, picture, record_training_calls, to_json
from .data import Batch, Corpus, PairData, Sequences, baselines, check_no_data_path, open_pairs, random_pairs
from .decoding import translate
from .layers import split_layers
from .model import Rows, Shape, Transformer
from .vocabulary import END, PAD

# Defaults of all sizes, and of each size; settings on the command line take precedence.
SETTINGS = {
    "updates": 2000,
    "global_batch_size": 256,
    "optimizer.lr": 0.0003,
    "scheduler.warmup": 0.05,
    "evaluate.every": 200,
    "evaluate.samples": 512,
}
SIZES = {
    "tiny": {
        "updates": 1200,
        "global_batch_size": 32,
        "optimizer.lr": 0.002,
        "scheduler.warmup": 0.1,
        "evaluate.every": 300,
    },
    "full": {"optimizer": "adamw"},
    "gpt2": {"optimizer": "adamw"},
}


def build(
    context: Context,
    *,
    size: Literal["tiny", "full", "gpt2"] = "tiny",
    data: Literal["pairs", "random"] = "pairs",
    packed: bool = True,
    vocab_size: PositiveInt | None = None,
    source_length: PositiveInt = 50,
    target_length: PositiveInt = 20,
    dropout: Factor | None = None,
    attention_dropout: Factor = 0.0,
) -> Task:
    """A transformer that writes a function's signature from its description.

    size               tiny: width 128, for two CPU cores; full: the published width 512; both have 3 + 3 layers;
                       gpt2: 12 + 12 layers of width 768, as in GPT-2 small
    data               pairs: from the standard library, or from data.path; random: random tokens, to measure speed
    packed             true: several pairs per row, no masks; false: as published, one padded pair per row, with masks
    vocab_size         tokens in the shared vocabulary; null: 5000 as published, 2000 for tiny
    source_length      maximum number of source tokens; longer sources are truncated
    target_length      maximum number of target tokens, including the end token; longer targets are truncated
    dropout            dropout probability after the embeddings, in each feed-forward layer and at the end of each
                       branch; null: 0.1 as published, 0 for tiny
    attention_dropout  dropout probability of attention weights; above 0, training uses no fused attention kernel
    """
    shape = replace(
        SHAPES[size],
        vocab_size=vocab_size or SHAPES[size].vocab_size,
        source_length=source_length,
        target_length=target_length,
    )
    if data == "random":
        check_no_data_path(context.data_path)
        corpus = random_pairs(
            context.seed, vocab_size=shape.vocab_size, source_length=source_length, target_length=target_length
        )
    else:
        corpus = open_pairs(context.data_path, context.cache / "nmt", vocab_size=shape.vocab_size)
    if dropout is None:
        dropout = 0.0 if size == "tiny" else 0.1
    return Translation(corpus, shape, dropout=dropout, attention_dropout=attention_dropout, packed=packed)


class Translation(Task):
    """Predicts target tokens from source tokens, on the pairs of a corpus."""

    item = "token"
    baseline_name = "most frequent output"

    model: Transformer

    def __init__(
        self,
        corpus: Corpus,
        shape: Shape,
        *,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        packed: bool = False,
    ) -> None:
        self.corpus, self.shape, self.packed = corpus, shape, packed
        self.model = Transformer(shape, dropout=dropout, attention_dropout=attention_dropout, packed=packed)
        self.items_per_sample = float(self._data("train").labels.lengths.mean())

    def dataset(self, split: str) -> PairData:
        """Return the samples; training samples are packed if requested, others have one pair per row."""
        return self._data(split, packed=self.packed and split == "train")

    def loss(self, model: nn.Module, batch: Batch) -> Sum:
        """Return the cross-entropy in nats summed over the target tokens, always in float32."""
        # Random numbers are created outside of the model, so that torch.compile can capture it in one graph.
        logits = model(batch.source, batch.target, noise=self.model.noise(batch.places))
        return _cross_entropy(logits, batch.labels), (batch.labels != PAD).sum()

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Sum]:
        """Return the loss and accuracy per token, and the fraction of targets that greedy decoding reproduces exactly.

        A truncated target has no end, so it is never reproduced.
        """
        logits = model(batch.source, batch.target)
        real = batch.labels != PAD
        right = (logits.argmax(dim=-1) == batch.labels) & real
        exact = (translate(model, self.shape, batch.source) == batch.labels).all(dim=-1)
        is_complete = (batch.labels == END).any(dim=-1)
        return {
            "loss": (_cross_entropy(logits, batch.labels), real.sum()),
            "token_accuracy": (right.sum(), real.sum()),
            "exact_match": ((exact & is_complete).sum(), len(exact)),
        }

    def baselines(self) -> Mapping[str, float]:
        """Return the results of the most frequent token and target, token frequencies, and the rule `name(self)`."""
        return baselines(self.corpus, self.shape.source_length, self.shape.target_length)

    def blocks(self) -> Sequence[nn.Module]:
        return [*self.model.encoder, *self.model.decoder]

    def layers(self) -> list[nn.Module]:
        return split_layers(self.model)

    def predict(  # type: ignore[override]  # options of the contract as named parameters
        self,
        model: nn.Module,
        generator: torch.Generator,
        *,
        source: str = "",
        split: Literal["val", "test"] = "val",
        samples: PositiveInt = 32,
        beam: PositiveInt = 1,
        batch_size: PositiveInt = 32,
    ) -> Iterator[Prediction]:
        """Yield translations, then a report on the attention calls of training.

        source      text to translate; empty: held-out pairs
        split       split of the held-out pairs
        samples     number of held-out pairs
        beam        number of candidates kept during decoding; 1: greedy
        batch_size  sources decoded at once
        """
        device = generator.device
        data = self._given(source) if source.strip() else self._data(split)
        table, report, num_exact, num_tokens, seconds = "source\treference\toutput\n", "", 0, 0, 0.0
        for indices in torch.split(torch.arange(min(samples, len(data))), batch_size):
            began = time.perf_counter()
            rows = Rows(*(field.to(device) for field in data.__getitems__(indices.tolist()).source))
            made = translate(model, self.shape, rows, beam=beam).tolist()  # waits for the device
            seconds += time.perf_counter() - began
            text = ""
            for index, tokens in zip(indices.tolist(), made, strict=True):
                given, reference, output = (
                    " ".join(self.corpus.vocabulary.decode(each).split())
                    for each in (data.whole_sources[index].tolist(), data.whole_targets[index].tolist(), tokens)
                )
                table += f"{given}\t{reference}\t{output}\n"
                text += (
                    f"source     {given}\n" + f"reference  {reference}\n" * bool(reference) + f"output     {output}\n\n"
                )
                num_exact += output == reference
            items = sum(token != PAD for tokens in made for token in tokens)
            num_tokens, report = num_tokens + items, report + text
            yield Prediction({"translations.tsv": table, "translations.txt": report}, text.rstrip(), items=items)
        found = f"{num_tokens / seconds:.0f} tokens/s in decoding"
        if not source.strip():
            found += f"; {num_exact} of {min(samples, len(data))} pairs of {split} match the reference exactly"
            found += "; val also selects the best checkpoint" if split == "val" else ""
        yield self._attention_report(model, device, found)

    def _attention_report(self, model: nn.Module, device: torch.device, found: str) -> Prediction:
        """Return the attention calls of training, and a description of them and of the results."""
        if self.model.rates.attention > 0:
            why = "attention in training: no kernel can be chosen, because task.attention_dropout is above 0"
            return Prediction({}, f"{found}\n{why}", items=0)
        data = self.dataset("train")
        batch = data.__getitems__(range(min(OBSERVED_PAIRS, len(data))))
        calls = record_training_calls(self, model, batch, num_layers=self.shape.num_layers, device=device)
        plots, words = {"attention.png": picture(calls, packed=self.packed)}, f"{found}\n{format_summary(calls)}"
        return Prediction({"attention.json": to_json(calls, packed=self.packed)}, words, items=0, plots=plots)

    def _data(self, split: str, *, packed: bool = False) -> PairData:
        return self.corpus.data(split, self.shape.source_length, self.shape.target_length, packed=packed)

    def _given(self, source: str) -> PairData:
        """Return the pair of a text without a reference."""
        sides = (Sequences.of([self.corpus.vocabulary.encode(source.strip())]), Sequences.of([[]]))
        return PairData(*sides, self.shape.source_length, self.shape.target_length)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    # Computes in float32. On a GPU, it does not copy float16 logits, as F.cross_entropy(logits.float()) would.
    log_probabilities = F.log_softmax(logits.flatten(0, 1), dim=-1, dtype=torch.float32)
    return F.nll_loss(log_probabilities, labels.flatten(), ignore_index=PAD, reduction="sum")


OBSERVED_PAIRS = 64  # training pairs in the report on attention
SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(
        num_layers=3,
        num_heads=4,
        width=128,
        feed_forward=512,
        vocab_size=2000,
        source_length=50,
        target_length=20,
        initial_std=0.08,
    ),
    "full": Shape(
        num_layers=3,
        num_heads=8,
        width=512,
        feed_forward=2048,
        vocab_size=5000,
        source_length=50,
        target_length=20,
        initial_std=0.02,
    ),
    "gpt2": Shape(
        num_layers=12,
        num_heads=12,
        width=768,
        feed_forward=3072,
        vocab_size=5000,
        source_length=50,
        target_length=20,
        initial_std=0.02,
    ),
}
