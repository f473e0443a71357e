"""A language model of the GPT-2 family on real text: the default task.

Items are tokens. The metric is bits per byte, which does not depend on the tokenizer; the baselines count bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.base.task import Context, Prediction, Sum, Task
from runner.base.values import Factor, PositiveInt

from .baselines import bits_per_byte_baselines
from .data import Corpus, Windows, open_corpus
from .model import Shape, Transformer
from .sampling import Sampling, continuations


def build(
    context: Context,
    *,
    size: Literal["auto", "tiny", "124m", "350m", "full"] = "auto",
    tokenizer: Literal["byte", "bpe"] = "byte",
    vocab_size: PositiveInt | None = None,
    block_size: PositiveInt | None = None,
    dropout: Factor = 0.0,
) -> Task:
    """A decoder-only transformer that predicts the next token of real text.

    size        tiny: for two CPU cores; 124m, 350m: the published shapes; full: 124m; auto: full on a GPU, else tiny
    tokenizer   byte: 256 tokens; bpe: a byte-pair encoding trained on the text once, needs the package tokenizers
    vocab_size  tokens in the vocabulary; null: the published 50257, in tiny only what the tokenizer needs
    block_size  tokens in a sample, the longest context; null: that of the size (tiny 128, published 1024)
    dropout     share of activations dropped after the embedding, in attention and at the end of each branch
    """
    name = {"auto": "tiny", "full": "124m"}.get(size, size)
    if vocab_size is None and name != "tiny":
        vocab_size = PUBLISHED_VOCAB_SIZE
    corpus = open_corpus(context.data_path, context.cache / "gpt", tokenizer=tokenizer, vocab_size=vocab_size)
    shape = replace(
        SHAPES[name],
        vocab_size=vocab_size or corpus.tokenizer.num_tokens,
        block_size=block_size or SHAPES[name].block_size,
    )
    return GPT(corpus, shape, dropout=dropout)


class GPT(Task):
    """Next-token prediction on the windows of a corpus."""

    item = "token"

    def __init__(self, corpus: Corpus, shape: Shape, *, dropout: float = 0.0) -> None:
        self.corpus = corpus
        self.shape = shape
        self.model = Transformer(shape, dropout=dropout)
        self.items_per_sample = float(shape.block_size)
        num_bytes = corpus.tokenizer.num_bytes
        self._num_bytes = None if num_bytes is None else torch.from_numpy(num_bytes)

    def dataset(self, split: str) -> Windows:
        return self.corpus.windows(split, self.shape.block_size)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sum:
        """Return the cross-entropy in nats summed over the tokens y (B, T), in float32 whatever the model runs in."""
        x, y = batch
        logits = model(x).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1), reduction="sum"), y.numel()

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Sum]:
        """Return the loss per token and, where the text is known, the same in bits per byte of that text."""
        loss, items = self.loss(model, batch)
        metrics: dict[str, Sum] = {"loss": (loss, items)}
        if self._num_bytes is not None:
            self._num_bytes = self._num_bytes.to(loss.device)
            metrics["bits_per_byte"] = (loss / math.log(2), self._num_bytes[batch[1]].sum())
        return metrics

    def baselines(self) -> Mapping[str, float]:
        """Return the bits per byte of counting pairs of bytes, and of counting single ones."""
        if self.corpus.text is None:
            return {}
        figures = bits_per_byte_baselines(self.corpus.text, self.corpus.cache)
        return {"bits_per_byte": figures["bigram"], "bits_per_byte_unigram": figures["unigram"]}

    def predict(self, model: nn.Module, options: Mapping[str, Any], generator: torch.Generator) -> Iterator[Prediction]:
        """Yield continuations of a prompt; the options are those of `Sampling`.

        Raises ConfigError if one of them is out of range.
        """
        sampling = Sampling.of(options)
        tokenizer = self.corpus.tokenizer
        given = tokenizer.encode(sampling.prompt)
        prompt = torch.tensor(given or [tokenizer.end], device=generator.device)
        # All random numbers at once, so that a sample does not depend on how many are made beside it.
        size = (sampling.samples, sampling.max_new_tokens)
        draws = torch.rand(size, generator=generator, device=generator.device)
        for first in range(0, sampling.samples, sampling.batch_size):
            made = continuations(
                model,
                self.shape,
                prompt,
                draws[first : first + sampling.batch_size],
                num_tokens=tokenizer.num_tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
            )
            for number, tokens in enumerate(made.tolist(), start=first):
                length = tokens.index(tokenizer.end) if tokenizer.end in tokens else len(tokens)
                text = tokenizer.decode(given + tokens[:length])
                yield Prediction({f"sample-{number:04d}.txt": text}, text, items=min(length + 1, len(tokens)))


PUBLISHED_VOCAB_SIZE = 50257
# Radford et al., Language Models are Unsupervised Multitask Learners, 2019, table 2; 124 and 350 million parameters.
SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(num_layers=4, num_heads=4, width=128, block_size=128, vocab_size=256),
    "124m": Shape(num_layers=12, num_heads=12, width=768, block_size=1024, vocab_size=PUBLISHED_VOCAB_SIZE),
    "350m": Shape(num_layers=24, num_heads=16, width=1024, block_size=1024, vocab_size=PUBLISHED_VOCAB_SIZE),
}
