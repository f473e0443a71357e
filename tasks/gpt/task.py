"""A language model of the GPT-2 family on real text: the default task.

Items are tokens. The metric is bits per byte, which does not depend on the tokenizer; the baselines count bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.base.errors import ConfigError, Problem
from runner.base.task import Context, Prediction, Sum, Task
from runner.base.values import Factor, NonNegative, PositiveInt

from .baselines import bits_per_byte_baselines
from .data import Corpus, Windows, open_corpus
from .model import Shape, Transformer
from .sampling import generate

# Defaults of each size; settings on the command line take precedence.
SIZES = {
    "tiny": {
        "updates": 1500,
        "global_batch_size": 16,
        "optimizer.lr": 0.004,
        "scheduler.warmup": 0.06,
        "evaluate.every": 500,
        "evaluate.samples": 2048,
    },
    # Tokens per update and learning rate of Brown et al., Language Models are Few-Shot Learners, 2020, table 2.1.
    "124m": {
        "updates": 20000,
        "global_batch_size": 480,
        "cpu_micro_batch_size": 8,
        "optimizer.lr": 0.0006,
        "scheduler.warmup": 0.03,
        "evaluate.every": 1000,
        "evaluate.samples": 512,
    },
    "350m": {
        "updates": 40000,
        "global_batch_size": 480,
        "cpu_micro_batch_size": 4,
        "optimizer.lr": 0.0003,
        "scheduler.warmup": 0.03,
        "evaluate.every": 1000,
        "evaluate.samples": 512,
    },
}


def build(
    context: Context,
    *,
    size: Literal["tiny", "124m", "350m"] = "tiny",
    tokenizer: Literal["byte", "bpe"] = "byte",
    vocab_size: PositiveInt | None = None,
    block_size: PositiveInt | None = None,
    dropout: Factor = 0.0,
    attention_dropout: Factor = 0.0,
) -> Task:
    """A decoder-only transformer that predicts the next token of real text.

    size               tiny: for two CPU cores; 124m, 350m: the published sizes
    tokenizer          byte: 256 tokens; bpe: byte-pair encoding, trained once on the text; needs the package tokenizers
    vocab_size         tokens in the vocabulary; null: that of the tokenizer for tiny, else 50257 as published
    block_size         context length: tokens per sample; null: depends on size (tiny 64, others 1024)
    dropout            dropout probability after the embedding and at the end of each branch
    attention_dropout  dropout probability of attention weights; above 0, training uses no fused attention kernel
    """
    if vocab_size is None and size != "tiny":
        vocab_size = PUBLISHED_VOCAB_SIZE
    corpus = open_corpus(context.data_path, context.cache / "gpt", tokenizer=tokenizer, vocab_size=vocab_size)
    shape = replace(
        SHAPES[size],
        vocab_size=vocab_size or corpus.tokenizer.num_tokens,
        block_size=block_size or SHAPES[size].block_size,
    )
    return GPT(corpus, shape, dropout=dropout, attention_dropout=attention_dropout)


class GPT(Task):
    """Next-token prediction on the windows of a corpus."""

    item = "token"
    baseline_name = "byte bigram model"
    model: Transformer

    def __init__(self, corpus: Corpus, shape: Shape, *, dropout: float = 0.0, attention_dropout: float = 0.0) -> None:
        self.corpus = corpus
        self.shape = shape
        self.model = Transformer(shape, dropout=dropout, attention_dropout=attention_dropout)
        self.items_per_sample = float(shape.block_size)
        num_bytes = corpus.tokenizer.num_bytes
        self._num_bytes = None if num_bytes is None else torch.from_numpy(num_bytes)

    def dataset(self, split: str) -> Windows:
        return self.corpus.windows(split, self.shape.block_size)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sum:
        """Return the cross-entropy in nats summed over the tokens y (B, T), always in float32."""
        x, y = batch
        # The random numbers are created here and not in the model, so that torch.compile captures it in one graph.
        logits = model(x, noise=self.model.noise(x))
        # Not F.cross_entropy: autocast runs it in half precision, and a float32 copy of the logits would be large.
        # On a GPU, log_softmax reads float16 and writes float32.
        log_probabilities = F.log_softmax(logits.view(-1, logits.shape[-1]), dim=-1, dtype=torch.float32)
        return F.nll_loss(log_probabilities, y.view(-1), reduction="sum"), y.numel()

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Sum]:
        """Return the loss per token and, if the text is known, in bits per byte."""
        loss, items = self.loss(model, batch)
        metrics: dict[str, Sum] = {"loss": (loss, items)}
        if self._num_bytes is not None:
            self._num_bytes = self._num_bytes.to(loss.device)
            metrics["bits_per_byte"] = (loss / math.log(2), self._num_bytes[batch[1]].sum())
        return metrics

    def baselines(self) -> Mapping[str, float]:
        """Return the bits per byte of a bigram and of a unigram model of bytes."""
        if self.corpus.text is None:
            return {}
        figures = bits_per_byte_baselines(self.corpus.text, self.corpus.cache)
        return {"bits_per_byte": figures["bigram"], "bits_per_byte_unigram": figures["unigram"]}

    def layers(self) -> list[nn.Module]:
        return self.model.layers()

    def example(self) -> tuple[Tensor]:
        """Return tokens (2, T)."""
        return (torch.arange(2 * self.shape.block_size).view(2, -1) % self.corpus.tokenizer.num_tokens,)

    def predict(  # type: ignore[override]  # options of the contract as named parameters
        self,
        model: nn.Module,
        generator: torch.Generator,
        *,
        prompt: str = "def ",
        samples: PositiveInt = 3,
        max_new_tokens: PositiveInt = 256,
        temperature: NonNegative = 0.8,
        top_k: PositiveInt | None = None,
        batch_size: PositiveInt = 1,
    ) -> Iterator[Prediction]:
        """Yield continuations of a prompt.

        prompt          text to continue; empty: the beginning of a document. With token shards, whose encoding is
                        unknown, use token IDs
        samples         number of continuations
        max_new_tokens  maximum number of new tokens per continuation; generation also ends at the end of a document
        temperature     divides the logits: below 1 favors likely tokens, 0 is greedy decoding
        top_k           sample only from the k most likely tokens; null: from all
        batch_size      continuations generated at once; affects throughput and latency, not the results
        """
        tokenizer = self.corpus.tokenizer
        prompt_tokens = tokenizer.encode(prompt)
        if not prompt_tokens and tokenizer.end is None:
            what = "must not be empty: the token that separates documents is unknown, so no new document can be started"
            raise ConfigError(Problem(what, "inference.prompt", "start with the number of a token"))
        start = torch.tensor(prompt_tokens or [tokenizer.end], device=generator.device)
        # All random numbers at once, so that a sample does not depend on the batch size.
        draws = torch.rand(samples, max_new_tokens, generator=generator, device=generator.device)
        numbers = iter(range(samples))
        for rows in torch.split(draws, batch_size):
            generated = generate(
                model, self.shape, start, rows, num_tokens=tokenizer.num_tokens, temperature=temperature, top_k=top_k
            )
            for tokens in generated.tolist():
                length = tokens.index(tokenizer.end) if tokenizer.end in tokens else len(tokens)
                text = tokenizer.decode(prompt_tokens + tokens[:length])
                yield Prediction({f"sample-{next(numbers):04d}.txt": text}, text, items=min(length + 1, len(tokens)))


PUBLISHED_VOCAB_SIZE = 50257
# Radford et al., Language Models are Unsupervised Multitask Learners, 2019, table 2; 124 and 350 million parameters.
SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(num_layers=4, num_heads=4, width=128, block_size=64, vocab_size=256),
    "124m": Shape(num_layers=12, num_heads=12, width=768, block_size=1024, vocab_size=PUBLISHED_VOCAB_SIZE),
    "350m": Shape(num_layers=24, num_heads=16, width=1024, block_size=1024, vocab_size=PUBLISHED_VOCAB_SIZE),
}
