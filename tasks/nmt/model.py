"""An encoder-decoder transformer whose rows may hold several pairs, kept apart with masks or without any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_SEGMENTS = 8  # pairs in a row: so many channels are appended to each head, and kernels like multiples of 8


@dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    source_length, target_length  the longest sequences in tokens
    initial_std                   standard deviation of the weights at the start
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
    """Sequences laid into rows, each of the three (R, L) and int64.

    tokens     0 where there is nothing
    segments   the number of the sequence in its row, from 1; 0 where there is nothing
    positions  the place in its sequence, from 0
    """

    tokens: Tensor
    segments: Tensor
    positions: Tensor


class Fence(NamedTuple):
    """Which keys a query may see: those of a mask, those whose code agrees with its own, or all (neither is given).

    mask        (R, 1, 1, K), True where a key may be seen
    query_code  (R, 1, Q, E): 1 in the channel of the query's segment, else 0
    key_code    (R, 1, K, E): 0 in the channel of the key's segment, else a large negative number
    """

    mask: Tensor | None = None
    query_code: Tensor | None = None
    key_code: Tensor | None = None


OPEN = Fence()


def attend(q: Tensor, k: Tensor, v: Tensor, fence: Fence, *, causal: bool = False, dropout: float = 0.0) -> Tensor:
    """Return the attention of queries (R, H, Q, D) to the keys that the fence lets them see, (R, H, Q, D).

    Codes are appended to queries and keys as channels. The product of a query and a key of its own segment gains
    exactly 0; that with any other key, padding too, falls by FAR, and the exponential of it is exactly 0. So nothing
    but rounding differs from a mask, and no mask is given: every kernel takes such a call.
    """
    if fence.query_code is None or fence.key_code is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=fence.mask, dropout_p=dropout, is_causal=causal)
    size, heads = q.shape[-1], q.shape[1]
    q = torch.cat([q, fence.query_code.to(q.dtype).expand(-1, heads, -1, -1)], dim=-1)
    k = torch.cat([k, fence.key_code.to(k.dtype).expand(-1, heads, -1, -1)], dim=-1)
    v = F.pad(v, (0, MOST_SEGMENTS))  # the flash kernel wants one head size for all three
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal, scale=size**-0.5)[..., :size]


class Transformer(nn.Module):
    """Source and target rows to the logits (R, T, V) of the token after each target token.

    Pre-norm layers, learned positions, one embedding for both sides and the output. Weights are drawn from a
    normal distribution, biases start at zero.

    packed  keep segments and padding apart by codes, without masks; otherwise a row holds one pair, padding of the
            source is masked, and that of the target needs nothing, because it comes last and attention is causal
    Source: Vaswani et al., Attention Is All You Need, NIPS 2017; Press and Wolf, Using the Output Embedding, EACL 2017.
    """

    def __init__(self, shape: Shape, *, dropout: float = 0.0, packed: bool = False) -> None:
        super().__init__()
        self.shape, self.dropout, self.packed = shape, dropout, packed
        self.embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.source_positions = nn.Embedding(shape.source_length, shape.width)
        self.target_positions = nn.Embedding(shape.target_length, shape.width)
        self.encoder = nn.ModuleList(EncoderLayer(shape, dropout) for _ in range(shape.num_layers))
        self.encoder_norm = nn.LayerNorm(shape.width)
        self.decoder = nn.ModuleList(DecoderLayer(shape, dropout) for _ in range(shape.num_layers))
        self.decoder_norm = nn.LayerNorm(shape.width)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=shape.initial_std)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, source: Rows, target: Rows, cache: Cache | None = None) -> Tensor:
        """Return the logits (R, T, V).

        cache  of the target tokens before `target`, which then is the next one, (R, 1), of one pair per row; the
               source is encoded at the first and only its segments are read at the others
        """
        memory = self._encoded(source) if cache is None or cache.length == 0 else None
        x = self._embedded(target, self.target_positions)
        own = self._fence(target, target) if self.packed and cache is None else OPEN
        across = self._fence(target, source)
        for number, layer in enumerate(self.decoder):
            x = layer(x, memory, own, across, None if cache is None else cache.layers[number])
        if cache is not None:
            cache.length += 1
        return F.linear(self.decoder_norm(x), self.embedding.weight)

    def _encoded(self, source: Rows) -> Tensor:
        x = self._embedded(source, self.source_positions)
        fence = self._fence(source, source)
        for layer in self.encoder:
            x = layer(x, fence)
        memory: Tensor = self.encoder_norm(x)
        return memory

    def _embedded(self, rows: Rows, positions: nn.Embedding) -> Tensor:
        x = self.embedding(rows.tokens) + positions(rows.positions)
        return F.dropout(x, self.dropout, self.training)

    def _fence(self, queries: Rows, keys: Rows) -> Fence:
        if not self.packed:
            return Fence(mask=(keys.segments != 0)[:, None, None])
        numbers = torch.arange(1, MOST_SEGMENTS + 1, device=keys.segments.device)
        own = queries.segments[:, None, :, None] == numbers
        other = keys.segments[:, None, :, None] != numbers
        return Fence(query_code=own.float(), key_code=other.float() * -FAR)


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward, each added to the residual stream (R, S, C)."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = SelfAttention(shape, dropout)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = FeedForward(shape, dropout)

    def forward(self, x: Tensor, fence: Fence) -> Tensor:
        x = x + self.attention(self.attention_norm(x), fence)
        transformed: Tensor = self.mlp(self.mlp_norm(x))
        return x + transformed


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoded source, and a feed-forward, each added to (R, T, C)."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = SelfAttention(shape, dropout)
        self.cross_norm = nn.LayerNorm(shape.width)
        self.cross = CrossAttention(shape, dropout)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = FeedForward(shape, dropout)

    def forward(
        self, x: Tensor, memory: Tensor | None, own: Fence, across: Fence, past: LayerCache | None = None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), own, causal=past is None, past=past)
        x = x + self.cross(self.cross_norm(x), memory, across, past)
        transformed: Tensor = self.mlp(self.mlp_norm(x))
        return x + transformed


class SelfAttention(nn.Module):
    """Attention of (R, T, C) to itself with one projection for queries, keys and values."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = shape.num_heads, dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, fence: Fence, *, causal: bool = False, past: LayerCache | None = None) -> Tensor:
        q, k, v = _heads(self.qkv(x), 3, self.num_heads)
        if past is not None:
            k, v = past.extend(k, v)
        y = attend(q, k, v, fence, causal=causal, dropout=self.dropout if self.training else 0.0)
        return F.dropout(self.output(y.transpose(1, 2).flatten(2)), self.dropout, self.training)


class CrossAttention(nn.Module):
    """Attention of (R, T, C) to the encoded source (R, S, C), whose keys and values a cache keeps."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = shape.num_heads, dropout
        self.query = nn.Linear(shape.width, shape.width)
        self.kv = nn.Linear(shape.width, 2 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, memory: Tensor | None, fence: Fence, past: LayerCache | None = None) -> Tensor:
        (q,) = _heads(self.query(x), 1, self.num_heads)
        if memory is None:
            assert past is not None, "without a cache the source must be given"
            k, v = past.source
        else:
            k, v = _heads(self.kv(memory), 2, self.num_heads)
            if past is not None:
                past.source = k, v
        y = attend(q, k, v, fence, dropout=self.dropout if self.training else 0.0)
        return F.dropout(self.output(y.transpose(1, 2).flatten(2)), self.dropout, self.training)


class FeedForward(nn.Module):
    """Two projections with a ReLU between them."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input = nn.Linear(shape.width, shape.feed_forward)
        self.output = nn.Linear(shape.feed_forward, shape.width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.relu(self.input(x)), self.dropout, self.training)
        return F.dropout(self.output(hidden), self.dropout, self.training)


class Cache:
    """The keys and values of the `length` target tokens seen so far, and of the source, in every decoder layer."""

    def __init__(self, shape: Shape) -> None:
        self.length = 0
        self.layers = [LayerCache(shape.target_length) for _ in range(shape.num_layers)]

    def select(self, rows: Tensor) -> None:
        """Go on with these rows, which must have the same sources as those they replace."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


class LayerCache:
    """One layer's keys and values (R, H, T, D) of target tokens, in room for `capacity` of them, and of the source."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor
        self.values: Tensor
        self.source: tuple[Tensor, Tensor]

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append those of one token, and return all up to now."""
        if self.length == 0:
            R, H, _, D = keys.shape
            self.keys = keys.new_empty(R, H, self.capacity, D)
            self.values = values.new_empty(R, H, self.capacity, D)
        self.keys[:, :, self.length] = keys[:, :, 0]
        self.values[:, :, self.length] = values[:, :, 0]
        self.length += 1
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


def _heads(x: Tensor, count: int, num_heads: int) -> tuple[Tensor, ...]:
    """Return `count` tensors (R, H, T, D) of (R, T, count x H x D)."""
    R, T, C = x.shape
    return x.view(R, T, count, num_heads, C // count // num_heads).permute(2, 0, 3, 1, 4).unbind(0)


# After division by the root of the head size, a thousand or more for heads of up to 100 channels: above any difference
# of scores that occurs, by far enough for its exponential to be 0; and float16 and bfloat16 can still write it.
FAR = 1e4
