"""A decoder-only transformer of the GPT-2 family, with a key-value cache for decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.base.noise import SampleNoise, per_sample_noise


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; `width` is the embedding dimension C, `block_size` the maximum context length in tokens."""

    num_layers: int
    num_heads: int
    width: int
    block_size: int
    vocab_size: int

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: a multiple of 64, which tensor cores need for the output projection."""
        return -(-self.vocab_size // 64) * 64


class DropoutRates(NamedTuple):
    """Dropout probabilities.

    residual   for the embedding, and for the outputs of attention and MLP before they are added to the residual stream
    attention  for the attention weights
    """

    residual: float = 0.0
    attention: float = 0.0

    def noise(self, x: Tensor, layer: int, training: bool) -> SampleNoise | None:
        """Return the random numbers for dropout in a layer, for the samples of x (B, ...); None if p is 0.

        layer  0 for the embedding, 1 for the first block. The numbers depend on it, not on the order of the calls,
               because the ranks of a pipeline each run only some of the layers
        """
        return per_sample_noise(x, f"layer {layer}") if training and any(self) else None


class Transformer(nn.Module):
    """Map tokens (B, T) to logits (B, T, V): pre-norm blocks, learned positions, output tied to the embedding.

    Weights are initialized from a normal distribution with standard deviation 0.02. The projections whose output is
    added to the residual stream use 0.02 / sqrt(2 L), so that its variance does not grow with the number of layers L.
    Sources: Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section 2.3; dropout as in
    Vaswani et al., Attention Is All You Need, NIPS 2017, section 5.4, with random numbers per sample.
    """

    def __init__(self, shape: Shape, *, dropout: float = 0.0, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.rates = shape, DropoutRates(dropout, attention_dropout)
        self.embedding = nn.Embedding(shape.padded_vocab_size, shape.width)
        self.positions = nn.Embedding(shape.block_size, shape.width)
        self.blocks = nn.ModuleList(Block(shape, self.rates) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(_init_weights)
        for name, weight in self.named_parameters():
            if name.endswith(("attention.output.weight", "mlp.output.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.num_layers))

    def noise(self, tokens: Tensor) -> list[SampleNoise | None]:
        """Return the random numbers for dropout in one forward pass: for the embedding, then for each block."""
        return [self.rates.noise(tokens, layer, self.training) for layer in range(1 + len(self.blocks))]

    def forward(
        self, tokens: Tensor, cache: Cache | None = None, noise: Sequence[SampleNoise | None] | None = None
    ) -> Tensor:
        """Return the next-token logits (B, T, V) for `tokens` (B, T); with a cache, only the last ones, (B, 1, V).

        cache  keys and values of the tokens before `tokens`, to which those of `tokens` are appended. The first call
               passes the prompt, each later call one token
        noise  the result of self.noise(tokens); None: computed here, which causes a graph break in a compiled model
        """
        start = 0 if cache is None else cache.length
        end = start + tokens.shape[1]
        assert end <= self.shape.block_size, f"{end} tokens exceed the context of {self.shape.block_size}"
        noise = self.noise(tokens) if noise is None else noise
        x: Tensor = self.embedding(tokens) + self.positions.weight[start:end]
        x = apply_dropout(x, self.rates.residual, noise[0])
        if cache is None:
            for block, block_noise in zip(self.blocks, noise[1:], strict=True):
                x = block(x, noise=block_noise)
        else:
            assert start == 0 or end == start + 1, "a filled cache takes one token at a time"
            for block, past_kv in zip(self.blocks, cache.layers, strict=True):
                x = block(x, past_kv)
            cache.length = end
            x = x[:, -1:]
        return F.linear(self.norm(x), self.embedding.weight)

    def layers(self) -> list[nn.Module]:
        """Return the model, without a cache, as a sequence of modules that share its parameters."""
        middle = [MiddleLayer(block, self.rates, layer) for layer, block in enumerate(self.blocks, start=1)]
        return [InputLayer(self), *middle, OutputLayer(self)]


class InputLayer(nn.Module):
    """Map tokens (B, T) to embeddings (B, T, C), the input of the first block."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.embedding, self.positions, self.rates = model.embedding, model.positions, model.rates

    def forward(self, tokens: Tensor, noise: object = None) -> Tensor:
        """Return the embeddings. `noise` is ignored: it is accepted to match `Transformer.forward`."""
        x: Tensor = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return apply_dropout(x, self.rates.residual, self.rates.noise(tokens, 0, self.training))


class MiddleLayer(nn.Module):
    """A block that generates its own random numbers for dropout, as layer number `layer` of the model."""

    def __init__(self, block: nn.Module, rates: DropoutRates, layer: int) -> None:
        super().__init__()
        self.block, self.rates, self.layer = block, rates, layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(x, noise=self.rates.noise(x, self.layer, self.training))
        return result


class OutputLayer(nn.Module):
    """Map the output of the last block (B, T, C) to logits (B, T, V), with the weights of the embedding."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.norm, self.embedding = model.norm, model.embedding

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embedding.weight)


class Block(nn.Module):
    """Self-attention and an MLP, each preceded by a layer norm and added to the residual stream."""

    def __init__(self, shape: Shape, rates: DropoutRates) -> None:
        super().__init__()
        self.rates = rates
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape, rates.attention)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, past_kv: KeyValues | None = None, noise: SampleNoise | None = None) -> Tensor:
        attended: Tensor = self.attention(self.attention_norm(x), past_kv, noise)
        x = x + apply_dropout(attended, self.rates.residual, noise)
        transformed: Tensor = self.mlp(self.mlp_norm(x))
        return x + apply_dropout(transformed, self.rates.residual, noise)


class Attention(nn.Module):
    """Causal self-attention (B, T, C) with one projection for queries, keys and values.

    dropout  dropout probability of the attention weights. Above 0, training does not use fused kernels: they take
             random numbers from the device's generator, so the result would depend on the micro-batch size
    """

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = shape.num_heads, dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, past_kv: KeyValues | None = None, noise: SampleNoise | None = None) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        if past_kv is not None:
            k, v = past_kv.extend(k, v)
        if noise is not None and self.dropout > 0:
            future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).masked_fill(future, float("-inf"))
            y = noise.dropout(scores.softmax(dim=-1), self.dropout) @ v
        else:
            # A single token attends to all keys; is_causal=True, aligned top-left, would mask all but the first.
            y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        projected: Tensor = self.output(y.transpose(1, 2).reshape(B, T, C))
        return projected


class FeedForward(nn.Module):
    """An MLP with one hidden layer of four times the width, and GELU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input = nn.Linear(shape.width, 4 * shape.width)
        self.output = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        transformed: Tensor = self.output(F.gelu(self.input(x), approximate="tanh"))
        return transformed


class Cache:
    """A key-value cache: for each layer, the keys and values of the first `length` tokens."""

    def __init__(self, shape: Shape) -> None:
        self.length = 0
        self.layers = [KeyValues(shape.block_size) for _ in range(shape.num_layers)]


class KeyValues:
    """The keys and values of one layer (B, H, T, C / H); the first `extend` allocates memory for `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor
        self.values: Tensor

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values; return all of them so far."""
        B, H, T, D = keys.shape
        if self.length == 0:
            self.keys = keys.new_empty(B, H, self.capacity, D)
            self.values = values.new_empty(B, H, self.capacity, D)
        start, self.length = self.length, self.length + T
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


def apply_dropout(x: Tensor, p: float, noise: SampleNoise | None) -> Tensor:
    """Return x (B, ...) after dropout with probability p, or x itself if `noise` is None."""
    return x if noise is None else noise.dropout(x, p)


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
