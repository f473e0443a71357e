"""An encoder-decoder transformer whose rows may hold several pairs, separated with or without masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.base.noise import SampleNoise, per_sample_noise

MAX_SEGMENTS = 8  # maximum pairs per row; as many channels are appended to each head, and kernels prefer multiples of 8


@dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    source_length, target_length  the longest sequences in tokens
    initial_std                   initial standard deviation of the weights
    """

    num_layers: int
    num_heads: int
    width: int
    feed_forward: int
    vocab_size: int
    source_length: int
    target_length: int
    initial_std: float


class Rows(NamedTuple):
    """Sequences packed into rows; all three are (R, L) and int64.

    tokens     0 for padding
    segments   the number of the sequence in its row, from 1; 0 for padding
    positions  the position within its sequence, from 0
    """

    tokens: Tensor
    segments: Tensor
    positions: Tensor


class AttentionMask(NamedTuple):
    """The keys that a query may attend to: given by a mask of padding or by codes; without either, all keys.

    padding     (R, 1, 1, K), True for visible keys
    query_code  (R, 1, Q, E): 1 in the channel of the query's segment, else 0
    key_code    (R, 1, K, E): 0 in the channel of the key's segment, else a large negative number
    """

    padding: Tensor | None = None
    query_code: Tensor | None = None
    key_code: Tensor | None = None


ALL_VISIBLE = AttentionMask()


class DropoutRates(NamedTuple):
    """Dropout probabilities.

    residual   for the embeddings, inside each feed-forward network, and for the output of each branch
    attention  for the attention weights
    """

    residual: float = 0.0
    attention: float = 0.0


class PairNoise(NamedTuple):
    """Random numbers of N pairs, independent of their position in the rows.

    pairs   random numbers of the N pairs
    places  (N, 2): see Batch
    """

    pairs: SampleNoise
    places: Tensor

    def of_tokens(self, rows: Rows) -> SampleNoise:
        """Return random numbers for the tokens (R, L), by pair and position."""
        return self.pairs.rows(self._pair_of(rows), rows.positions)

    def of_weights(self, queries: Rows, keys: Rows) -> SampleNoise:
        """Return random numbers for the attention weights (R, Q, K), by pair and both positions."""
        positions = queries.positions[:, :, None] * _MOST_POSITIONS + keys.positions[:, None, :]
        return self.pairs.rows(self._pair_of(queries)[:, :, None], positions)

    def _pair_of(self, rows: Rows) -> Tensor:
        """Return the number of the pair to which each token (R, L) belongs; arbitrary for padding."""
        number = torch.arange(len(self.places), device=self.places.device)
        table = number.new_zeros(len(rows.segments), MAX_SEGMENTS + 1)
        table[number + self.places[:, 0], self.places[:, 1]] = number
        return table.gather(1, rows.segments)


class Draws(NamedTuple):
    """Dropout noise of a layer; None: no dropout.

    tokens  for the tokens (R, L)
    own     for the weights of self-attention (R, L, L)
    across  for the weights of attention to the source (R, T, S)
    """

    tokens: SampleNoise | None = None
    own: SampleNoise | None = None
    across: SampleNoise | None = None

    def of_layer(self, number: int) -> Draws:
        """Return separate noise for each layer."""
        return Draws(*(None if each is None else each.named(number) for each in self))


NOTHING = Draws()


def apply_dropout(x: Tensor, p: float, noise: SampleNoise | None) -> Tensor:
    """Return x (R, L, ...) after dropout with probability p, or x itself if `noise` is None."""
    return x if noise is None else noise.dropout(x, p)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    noise: SampleNoise | None = None,
) -> Tensor:
    """Return the attention (R, H, Q, D) of queries (R, H, Q, D) to the keys that the mask allows.

    Codes are appended to queries and keys as channels. They add exactly 0 to the score of a query and a key of the same
    segment, and subtract FAR from all other scores, including those of padding, whose exponential is then exactly 0. So
    the result equals that with a mask up to rounding, and every kernel accepts the call.

    noise  random numbers for dropout of the weights (R, Q, K). Fused kernels are not used with it: they draw from the
           device's generator, so the result would depend on the micro-batch
    """
    size, heads = q.shape[-1], q.shape[1]
    scale = None
    if mask.query_code is not None and mask.key_code is not None:
        q = torch.cat([q, mask.query_code.to(q.dtype).expand(-1, heads, -1, -1)], dim=-1)
        k = torch.cat([k, mask.key_code.to(k.dtype).expand(-1, heads, -1, -1)], dim=-1)
        scale = size**-0.5
    if noise is not None:
        scores = (q @ k.transpose(-2, -1)) * size**-0.5
        if mask.padding is not None:
            scores = scores.masked_fill(~mask.padding, float("-inf"))
        if causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        weights = scores.softmax(dim=-1).permute(0, 2, 3, 1)  # (R, Q, K, H)
        return noise.dropout(weights, dropout).permute(0, 3, 1, 2) @ v
    if scale is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.padding, is_causal=causal)
    v = F.pad(v, (0, MAX_SEGMENTS))  # the flash kernel needs one head size for all three
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)[..., :size]


class Transformer(nn.Module):
    """Map source and target rows to the logits (R, T, V) of the token after each target token.

    Pre-norm layers, learned positions, one embedding for both sides and the output. Weights are initialized from
    a normal distribution, biases with zero. Dropout is drawn per pair and position.

    packed  separate segments and padding by codes, without masks; otherwise a row has one pair, and only the padding of
            the source is masked, because the padding of the target comes last and attention is causal
    Source: Vaswani et al., Attention Is All You Need, NIPS 2017; Press and Wolf, Using the Output Embedding, EACL 2017.
    """

    def __init__(
        self, shape: Shape, *, dropout: float = 0.0, attention_dropout: float = 0.0, packed: bool = False
    ) -> None:
        super().__init__()
        self.shape, self.rates, self.packed = shape, DropoutRates(dropout, attention_dropout), packed
        self.embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.source_positions = nn.Embedding(shape.source_length, shape.width)
        self.target_positions = nn.Embedding(shape.target_length, shape.width)
        self.encoder = nn.ModuleList(EncoderLayer(shape, self.rates) for _ in range(shape.num_layers))
        self.encoder_norm = nn.LayerNorm(shape.width)
        self.decoder = nn.ModuleList(DecoderLayer(shape, self.rates) for _ in range(shape.num_layers))
        self.decoder_norm = nn.LayerNorm(shape.width)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=shape.initial_std)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def noise(self, places: Tensor) -> PairNoise | None:
        """Return the random numbers of one forward pass for pairs at these places (N, 2); None without dropout."""
        return PairNoise(per_sample_noise(places), places) if self.training and any(self.rates) else None

    def forward(self, source: Rows, target: Rows, cache: Cache | None = None, noise: PairNoise | None = None) -> Tensor:
        """Return the logits (R, T, V).

        cache  keys and values of the previous target tokens; `target` is then the next one, (R, 1), with one pair per
               row. The source is encoded in the first call; later calls use only its segments
        noise  self.noise(batch.places)
        Raises ValueError if dropout needs noise, but there is none: rows do not identify their samples.
        """
        if noise is None and self.training and any(self.rates):
            raise ValueError("dropout needs random numbers: model(source, target, noise=model.noise(places))")
        memory = self._encode(source, noise) if cache is None or cache.length == 0 else None
        draws = target_draws(self.rates, noise, source, target)
        x = embed(self.embedding, self.target_positions, target, self.rates.residual, draws)
        own = make_attention_mask(target, target, packed=self.packed) if self.packed and cache is None else ALL_VISIBLE
        across = make_attention_mask(target, source, packed=self.packed)
        for number, layer in enumerate(self.decoder):
            past = None if cache is None else cache.layers[number]
            x = layer(x, memory, own, across, past, draws.of_layer(number))
        if cache is not None:
            cache.length += 1
        return F.linear(self.decoder_norm(x), self.embedding.weight)

    def _encode(self, source: Rows, noise: PairNoise | None) -> Tensor:
        draws = source_draws(self.rates, noise, source)
        x = embed(self.embedding, self.source_positions, source, self.rates.residual, draws)
        mask = make_attention_mask(source, source, packed=self.packed)
        for number, layer in enumerate(self.encoder):
            x = layer(x, mask, draws.of_layer(number))
        memory: Tensor = self.encoder_norm(x)
        return memory


def embed(embedding: nn.Embedding, positions: nn.Embedding, rows: Rows, dropout: float, draws: Draws) -> Tensor:
    """Return the embeddings (R, L, C) of tokens and positions."""
    return apply_dropout(embedding(rows.tokens) + positions(rows.positions), dropout, draws.tokens)


def source_draws(rates: DropoutRates, noise: PairNoise | None, source: Rows) -> Draws:
    """Return the dropout noise of the encoder, from which that of its layers is derived."""
    return _draws(rates, noise, "source", source, source)


def target_draws(rates: DropoutRates, noise: PairNoise | None, source: Rows, target: Rows) -> Draws:
    """Return the dropout noise of the decoder, from which that of its layers is derived."""
    return _draws(rates, noise, "target", target, target, source)


def _draws(rates: DropoutRates, noise: PairNoise | None, name: str, tokens: Rows, *keys: Rows) -> Draws:
    """Return the dropout noise of one side: for its tokens, and for its attention to each of `keys`."""
    if noise is None:
        return NOTHING
    weights = keys if rates.attention > 0 else ()
    return Draws(
        noise.of_tokens(tokens).named(name),
        *(noise.of_weights(tokens, each).named(f"{name} {number}") for number, each in enumerate(weights)),
    )


def make_attention_mask(queries: Rows, keys: Rows, *, packed: bool) -> AttentionMask:
    """Return codes that mask other segments if rows are packed, otherwise a padding mask."""
    if not packed:
        return AttentionMask(padding=(keys.segments != 0)[:, None, None])
    numbers = torch.arange(1, MAX_SEGMENTS + 1, device=keys.segments.device)
    own = queries.segments[:, None, :, None] == numbers
    other = keys.segments[:, None, :, None] != numbers
    return AttentionMask(query_code=own.float(), key_code=other.float() * -FAR)


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each added to the residual stream (R, S, C)."""

    def __init__(self, shape: Shape, rates: DropoutRates) -> None:
        super().__init__()
        self.rates = rates
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = SelfAttention(shape, rates.attention)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = FeedForward(shape, rates.residual)

    def forward(self, x: Tensor, mask: AttentionMask, draws: Draws = NOTHING) -> Tensor:
        attended: Tensor = self.attention(self.attention_norm(x), mask, noise=draws.own)
        x = x + apply_dropout(attended, self.rates.residual, draws.tokens)
        transformed: Tensor = self.mlp(self.mlp_norm(x), draws.tokens)
        return x + apply_dropout(transformed, self.rates.residual, draws.tokens)


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoded source, and a feed-forward network, each added to (R, T, C)."""

    def __init__(self, shape: Shape, rates: DropoutRates) -> None:
        super().__init__()
        self.rates = rates
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = SelfAttention(shape, rates.attention)
        self.cross_norm = nn.LayerNorm(shape.width)
        self.cross = CrossAttention(shape, rates.attention)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = FeedForward(shape, rates.residual)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None,
        own: AttentionMask,
        across: AttentionMask,
        past: LayerCache | None = None,
        draws: Draws = NOTHING,
    ) -> Tensor:
        rate, tokens = self.rates.residual, draws.tokens
        attended: Tensor = self.attention(self.attention_norm(x), own, causal=past is None, past=past, noise=draws.own)
        x = x + apply_dropout(attended, rate, tokens)
        found: Tensor = self.cross(self.cross_norm(x), memory, across, past, draws.across)
        x = x + apply_dropout(found, rate, tokens)
        transformed: Tensor = self.mlp(self.mlp_norm(x), tokens)
        return x + apply_dropout(transformed, rate, tokens)


class SelfAttention(nn.Module):
    """Self-attention of (R, T, C) with one projection for queries, keys and values."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = shape.num_heads, dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)

    def forward(
        self,
        x: Tensor,
        mask: AttentionMask,
        *,
        causal: bool = False,
        past: LayerCache | None = None,
        noise: SampleNoise | None = None,
    ) -> Tensor:
        q, k, v = _heads(self.qkv(x), 3, self.num_heads)
        if past is not None:
            k, v = past.extend(k, v)
        y = attend(q, k, v, mask, causal=causal, dropout=self.dropout, noise=noise)
        projected: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return projected


class CrossAttention(nn.Module):
    """Attention of (R, T, C) to the encoded source (R, S, C), whose keys and values are cached."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = shape.num_heads, dropout
        self.query = nn.Linear(shape.width, shape.width)
        self.kv = nn.Linear(shape.width, 2 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None,
        mask: AttentionMask,
        past: LayerCache | None = None,
        noise: SampleNoise | None = None,
    ) -> Tensor:
        (q,) = _heads(self.query(x), 1, self.num_heads)
        if memory is None:
            assert past is not None, "without a cache the source must be given"
            k, v = past.source
        else:
            k, v = _heads(self.kv(memory), 2, self.num_heads)
            if past is not None:
                past.source = k, v
        y = attend(q, k, v, mask, dropout=self.dropout, noise=noise)
        projected: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return projected


class FeedForward(nn.Module):
    """Two projections with a ReLU and dropout between them."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input = nn.Linear(shape.width, shape.feed_forward)
        self.output = nn.Linear(shape.feed_forward, shape.width)
        self.dropout = dropout

    def forward(self, x: Tensor, noise: SampleNoise | None = None) -> Tensor:
        transformed: Tensor = self.output(apply_dropout(F.relu(self.input(x)), self.dropout, noise))
        return transformed


class Cache:
    """Keys and values of the first `length` target tokens, and of the source, in every decoder layer.

    A model split into layers keeps no keys and values: it recomputes all previous target `rows` at each step.
    """

    def __init__(self, shape: Shape) -> None:
        self.length = 0
        self.layers = [LayerCache(shape.target_length) for _ in range(shape.num_layers)]
        self.rows: Rows | None = None

    def append(self, target: Rows) -> Rows:
        """Append the next token of each row, and return all tokens so far."""
        parts = [target] if self.rows is None else [self.rows, target]
        self.rows = Rows(*(torch.cat(fields, dim=1) for fields in zip(*parts, strict=True)))
        return self.rows

    def select(self, rows: Tensor) -> None:
        """Select these rows; each must have the same source as the row that it replaces."""
        if self.rows is not None:
            self.rows = Rows(*(field[rows] for field in self.rows))
        for layer in self.layers if self.length else ():
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


class LayerCache:
    """Keys and values (R, H, T, D) of one layer, for up to `capacity` target tokens, and for the source."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor
        self.values: Tensor
        self.source: tuple[Tensor, Tensor]

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of one token; return all of them so far."""
        if self.length == 0:
            R, H, _, D = keys.shape
            self.keys = keys.new_empty(R, H, self.capacity, D)
            self.values = values.new_empty(R, H, self.capacity, D)
        self.keys[:, :, self.length] = keys[:, :, 0]
        self.values[:, :, self.length] = values[:, :, 0]
        self.length += 1
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


def _heads(x: Tensor, count: int, num_heads: int) -> tuple[Tensor, ...]:
    """Split (R, T, count x H x D) into `count` tensors (R, H, T, D)."""
    R, T, C = x.shape
    return x.view(R, T, count, num_heads, C // count // num_heads).permute(2, 0, 3, 1, 4).unbind(0)


# Subtracted from the scores of other segments. After division by the square root of the head size, it is at least 1000
# for heads of up to 100 channels: so much larger than differences of scores that the exponential is 0, but within the
# range of float16 and bfloat16.
FAR = 1e4
_MOST_POSITIONS = 2**24  # more than in any sequence
