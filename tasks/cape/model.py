"""A transformer that predicts the keypoints of a query image one by one, given a support image with keypoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention, FeedForward, Kind, Maps, map_attention, sample, sine_embedding
from .backbone import PretrainedResNet50, ResNet

COORDINATE, END = 0, 1  # types of tokens


@dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    stages      channels and blocks of the backbone's stages; the last `num_levels` are used
    published   the backbone has the layout of ResNet-50
    grid        cells per axis of the coordinate embedding table
    pretrained  the backbone is torchvision's ResNet-50 with frozen batch norms; stem and stages are ignored
    """

    stem: int
    stages: tuple[tuple[int, int], ...]
    published: bool
    num_levels: int
    width: int
    num_heads: int
    feed_forward: int
    support_layers: int
    encoder_layers: int
    decoder_layers: int
    grid: int = 44
    attention: Kind = "dense"
    pretrained: bool = False


class KeypointPredictions(NamedTuple):
    """Predictions for T = K + 1 tokens of N queries: K keypoints and an end token.

    proposals  (N, T, 2) coordinates from feature similarity alone
    xy         (N, L, T, 2) coordinates after each of the L layers, relative to the image size
    types      (N, L, T, 2) logits of COORDINATE and END
    """

    proposals: Tensor
    xy: Tensor
    types: Tensor


class PoseTransformer(nn.Module):
    """Map support and query images to predictions for each query.

    A residual network and a transformer encoder process all images. The features at the support's keypoints, with
    their coordinates and order, are the support tokens. Their similarity to the query's features gives an initial
    proposal for each keypoint. The decoder refines it layer by layer, from the previous keypoints, the support tokens
    and the query.
    Sources: Xu et al., Pose for Everything, ECCV 2022; Shi et al., Matching Is Not Enough, CVPR 2023, section 3.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        C = shape.width
        self.backbone: ResNet | PretrainedResNet50 = (
            PretrainedResNet50(shape.num_levels)
            if shape.pretrained
            else ResNet(shape.stem, shape.stages, published=shape.published, num_levels=shape.num_levels)
        )
        self.inputs = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, C, 1), nn.GroupNorm(min(32, C // 4), C)) for width in self.backbone.widths
        )
        self.level = nn.Parameter(torch.randn(shape.num_levels, C) * 0.02)
        self.encoder = nn.ModuleList(EncoderLayer(shape) for _ in range(shape.encoder_layers))
        self.encoder_norm = nn.LayerNorm(C)
        self.coordinates = CoordinateEmbedding(shape.grid, C)
        self.invisible, self.unknown, self.begin, self.end = (nn.Parameter(torch.randn(C) * 0.02) for _ in range(4))
        self.support = nn.ModuleList(SupportLayer(shape) for _ in range(shape.support_layers))
        self.support_norm = nn.LayerNorm(C)
        self.likeness = nn.ModuleList(nn.Linear(C, C) for _ in range(2))
        self.decoder = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.decoder_layers))

    def forward(self, batch: Mapping[str, Tensor], cache: Decoding | None = None) -> KeypointPredictions:
        """Return the predictions for the N = B Q queries of a batch of episodes (see data.Episodes).

        cache  None: predict each keypoint from the true previous ones; otherwise predict only the next token, from the
               predictions in the cache
        """
        if cache is not None:
            return self._next(batch, cache)
        query, tokens, present = self.read(batch)
        steps, proposals = self.steps(query, tokens, present)
        context = DecoderContext(tokens, present[:, None, None], query)
        return self._through_layers(steps + self.previous(batch), proposals, context)

    def _next(self, batch: Mapping[str, Tensor], cache: Decoding) -> KeypointPredictions:
        if cache.read is None:
            query, tokens, present = self.read(batch)
            context = DecoderContext(tokens, present[:, None, None], query)
            cache.read = (*self.steps(query, tokens, present), context)
            cache.layers = [DecoderCache() for _ in self.decoder]
        steps, proposals, context = cache.read
        done = len(cache.predicted)
        now = slice(done, done + 1)
        inputs = self.coordinates(cache.predicted[-1]) if done else self.begin.expand(len(steps), 1, -1)
        return self._through_layers(steps[:, now] + inputs, proposals[:, now], context, cache.layers)

    def read(self, batch: Mapping[str, Tensor]) -> tuple[Maps, Tensor, Tensor]:
        """Return the features of the queries (N, P, C), the support tokens (N, K, C) and which exist (N, K)."""
        images = torch.cat([batch["support_image"][:, None], batch["query_image"]], dim=1)
        features = self.backbone(images.flatten(0, 1))
        maps = self.merge_levels([layer(level) for layer, level in zip(self.inputs, features, strict=True)])
        for layer in self.encoder:
            maps = replace(maps, tokens=layer(maps))
        support, query = self.divide(maps, len(images))
        tokens, present = self.begin_support(batch, support), batch["present"]
        for layer in self.support:
            tokens = layer(tokens, present[:, None, None])
        return query, *self.end_support(tokens, present, images.shape[1] - 1)

    def merge_levels(self, maps: Sequence[Tensor]) -> Maps:
        """Return the maps (N, C, h, w) of all levels as tokens, each with the embedding of its level."""
        return Maps.of([level + own[:, None, None] for level, own in zip(maps, self.level, strict=True)])

    def divide(self, maps: Maps, num_episodes: int) -> tuple[Maps, Maps]:
        """Return the features of the support images (B, P, C) and of the query images (B Q, P, C)."""
        tokens = self.encoder_norm(maps.tokens).unflatten(0, (num_episodes, -1))
        return replace(maps, tokens=tokens[:, 0]), replace(maps, tokens=tokens[:, 1:].flatten(0, 1))

    def begin_support(self, batch: Mapping[str, Tensor], support: Maps) -> Tensor:
        """Return a token for each of the support's keypoints (B, K, C)."""
        visible = batch["support_visible"][..., None]
        xy = torch.where(visible, batch["support_xy"], 0.5)
        looks = sample(support.levels(), xy) + self.coordinates(xy)
        return torch.where(visible, looks, self.invisible) + order_embedding(visible.shape[1], looks)

    def end_support(self, tokens: Tensor, present: Tensor, num_queries: int) -> tuple[Tensor, Tensor]:
        """Return the support tokens of each query (B Q, K, C), and which of them exist (B Q, K)."""
        tokens = self.support_norm(tokens).repeat_interleave(num_queries, dim=0)
        return tokens, present.repeat_interleave(num_queries, dim=0)

    def steps(self, query: Maps, tokens: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Return the query vector of each token (N, T, C), and its proposed coordinates (N, T, 2).

        Token t is the query for keypoint t; tokens after the last keypoint are queries for the end.
        """
        vectors = torch.where(present[..., None], tokens, self.end)
        vectors = torch.cat([vectors, self.end.expand(len(vectors), 1, -1)], dim=1)
        vectors = vectors + order_embedding(vectors.shape[1], vectors)
        of_support, of_query = self.likeness
        likeness = of_support(vectors) @ of_query(query.tokens).transpose(1, 2) / vectors.shape[-1] ** 0.5
        proposals = likeness.float().softmax(dim=-1) @ query.positions.float()
        return vectors, proposals

    def previous(self, batch: Mapping[str, Tensor], cache: Decoding | None = None) -> Tensor:
        """Return the input of each token (N, T, C): a start vector, then the previous keypoint.

        Without a cache, that is the true keypoint, unknown if it is not visible; with one, the predicted keypoint.
        """
        start = self.begin.expand(batch["query_xy"].shape[:2].numel(), 1, -1)
        if cache is not None:
            return torch.cat([start, *map(self.coordinates, cache.predicted)], dim=1)
        seen = batch["query_visible"].flatten(0, 1)[..., None]
        tokens = self.coordinates(torch.where(seen, batch["query_xy"].flatten(0, 1), 0.5))
        return torch.cat([start, torch.where(seen, tokens, self.unknown)], dim=1)

    def _through_layers(
        self, x: Tensor, proposals: Tensor, context: DecoderContext, caches: Sequence[DecoderCache] | None = None
    ) -> KeypointPredictions:
        places, types = [proposals], []
        kept: Sequence[DecoderCache | None] = caches or [None] * len(self.decoder)
        for layer, cache in zip(self.decoder, kept, strict=True):
            # As in Deformable DETR, a layer learns to refine the given coordinates, not to predict them.
            x, moved, kinds = layer(x, places[-1].detach(), context, cache)
            places.append(moved)
            types.append(kinds)
        return KeypointPredictions(proposals, torch.stack(places[1:], dim=1), torch.stack(types, dim=1))


def decode(model: nn.Module, batch: Mapping[str, Tensor]) -> KeypointPredictions:
    """Return the predictions of autoregressive decoding of all queries in parallel."""
    cache, tokens = Decoding(), []
    for _ in range(batch["present"].shape[1] + 1):
        predictions = KeypointPredictions(*(part[..., -1:, :] for part in model(batch, cache)))
        cache.predicted.append(predictions.xy[:, -1])
        tokens.append(predictions)
    return KeypointPredictions(*(torch.cat(parts, dim=-2) for parts in zip(*tokens, strict=True)))


def order_embedding(count: int, like: Tensor) -> Tensor:
    """Return the embedding (count, C) of the order of keypoints, for tokens like (..., C)."""
    number = torch.arange(count, device=like.device) / 64
    return sine_embedding(torch.stack([number, number], dim=-1), like.shape[-1])


class CoordinateEmbedding(nn.Module):
    """Map coordinates (N, K, 2) to (N, K, C): bilinear interpolation of a table that covers the image.

    The table is initialized with sinusoids, so that close points have similar embeddings before training.
    """

    def __init__(self, grid: int, width: int) -> None:
        super().__init__()
        lines = torch.linspace(0, 1, grid)
        y, x = torch.meshgrid(lines, lines, indexing="ij")
        self.table = nn.Parameter(sine_embedding(torch.stack([x, y], dim=-1), width).permute(2, 0, 1).contiguous())

    def forward(self, xy: Tensor) -> Tensor:
        N, K, _ = xy.shape
        grid = (2 * xy.to(self.table.dtype) - 1).view(1, N * K, 1, 2)
        found: Tensor = F.grid_sample(self.table[None], grid, padding_mode="border", align_corners=True)
        return found[0, :, :, 0].transpose(0, 1).reshape(N, K, -1)


class EncoderLayer(nn.Module):
    """Self-attention of the features of an image, and a feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(2))
        self.attention = map_attention(shape.attention, shape.width, shape.num_heads, shape.num_levels)
        self.feed_forward = FeedForward(shape.width, shape.feed_forward)

    def forward(self, maps: Maps) -> Tensor:
        first, second = self.norms
        x = maps.tokens
        normed = replace(maps, tokens=first(x))
        places = maps.positions.expand(len(x), -1, -1)
        attended: Tensor = self.attention(normed.tokens, places, self.attention.prepare(normed))
        x = x + attended
        transformed: Tensor = self.feed_forward(second(x))
        return x + transformed


class SupportLayer(nn.Module):
    """Self-attention of the support's keypoints, and a feed-forward network; padding is masked."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(2))
        self.attention = Attention(shape.width, shape.num_heads)
        self.feed_forward = FeedForward(shape.width, shape.feed_forward)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first, second = self.norms
        normed = first(x)
        x = x + self.attention(normed, self.attention.prepare(normed, normed), mask=mask)
        transformed: Tensor = self.feed_forward(second(x))
        return x + transformed


class DecoderContext(NamedTuple):
    """Inputs of every decoder layer: support tokens (N, K, C), which of them exist (N, 1, 1, K), and the query."""

    tokens: Tensor
    mask: Tensor
    query: Maps


class DecoderCache:
    """Keys and values of a decoder layer for decoding token by token: of support, query, and previous tokens."""

    def __init__(self) -> None:
        self.support: tuple[Tensor, Tensor] | None = None
        self.query: tuple[Tensor, ...] | None = None
        self.past: tuple[Tensor, Tensor] | None = None

    def extend(self, prepared: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Append keys and values; return all of them so far."""
        if self.past is not None:
            prepared = torch.cat([self.past[0], prepared[0]], dim=2), torch.cat([self.past[1], prepared[1]], dim=2)
        self.past = prepared
        return prepared


class Decoding:
    """State of autoregressive decoding: the predictions so far, and what the next step reuses.

    predicted  coordinates (N, 1, 2) of each token
    read       query vectors and proposals of all tokens, and the context of the decoder; None before the first step
    layers     keys and values of the decoder layers
    """

    def __init__(self) -> None:
        self.predicted: list[Tensor] = []
        self.read: tuple[Tensor, Tensor, DecoderContext] | None = None
        self.layers: list[DecoderCache] = []


class DecoderLayer(nn.Module):
    """Attention to previous tokens, to the support, and to the query around a point; then refines the point."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        C = shape.width
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(5))
        self.past = Attention(C, shape.num_heads)
        self.support = Attention(C, shape.num_heads)
        self.query = map_attention(shape.attention, C, shape.num_heads, shape.num_levels)
        self.feed_forward = FeedForward(C, shape.feed_forward)
        last = nn.Linear(C, 2)
        self.move = nn.Sequential(nn.Linear(C, C), nn.GELU(), last)
        self.kind = nn.Linear(C, 2)
        nn.init.normal_(last.weight, std=0.01)
        nn.init.zeros_(last.bias)

    def forward(
        self, x: Tensor, places: Tensor, context: DecoderContext, cache: DecoderCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens (N, T, C), their refined coordinates (N, T, 2) and the logits of their types (N, T, 2).

        cache  filled at the first token; x is then the single next token
        """
        of_past, of_support, of_query, of_feed_forward, of_heads = self.norms
        support = cache.support if cache and cache.support else self.support.prepare(context.tokens, context.tokens)
        query = cache.query if cache and cache.query else self.query.prepare(context.query)
        normed = of_past(x)
        past = self.past.prepare(normed, normed)
        if cache is not None:
            cache.support, cache.query, past = support, query, cache.extend(past)
        x = x + self.past(normed, past, is_causal=x.shape[1] > 1)
        x = x + self.support(of_support(x), support, mask=context.mask)
        x = x + self.query(of_query(x), places, query)
        x = x + self.feed_forward(of_feed_forward(x))
        normed = of_heads(x)
        moved = (torch.logit(places.float(), eps=1e-3) + self.move(normed).float()).sigmoid()
        return x, moved, self.kind(normed).float()
