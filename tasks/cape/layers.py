"""The model as a sequence of layers, for a pipeline.

The layers pass floating-point tensors only. Masks are 0 and 1, and the feature maps of each level are separate tensors,
whose shapes the next layer reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from runner.base.task import FunctionLayer

from .attention import Maps
from .model import DecoderContext, Decoding, PoseTransformer

Values = tuple[Tensor, ...]


def split_layers(model: PoseTransformer) -> list[nn.Module]:
    """Return modules whose composition is the model; they share its parameters.

    With a cache of predictions, they recompute everything, starting from the images, at each step.
    """
    return [*_backbone_layers(model), *_encoder_layers(model), *_support_layers(model), *_decoder_layers(model)]


def _backbone_layers(model: PoseTransformer) -> list[nn.Module]:
    """Return layers from a batch to (coordinates, visibility, presence of the support, decoder inputs, *maps)."""
    backbone = model.backbone

    def begin(batch: Mapping[str, Tensor], cache: Decoding | None = None) -> Values:
        images = torch.cat([batch["support_image"][:, None], batch["query_image"]], dim=1).flatten(0, 1)
        places = (batch["support_xy"], batch["support_visible"].float(), batch["present"].float())
        return backbone.begin(images), *places, model.previous(batch, cache)

    def convolve(block: nn.Module, project: nn.Module | None, values: Values) -> Values:
        x, *rest = values
        x = block(x)
        return (x, *rest) if project is None else (x, *rest, project(x))

    layers: list[nn.Module] = [
        FunctionLayer(begin, *backbone.first_modules, model.coordinates, model.begin, model.unknown)
    ]
    unread = len(backbone.stages) - len(model.inputs)
    projections = [None] * unread + list(model.inputs)
    for stage, projection in zip(backbone.stages, projections, strict=True):
        blocks = list(stage.children())
        for block in blocks:
            project = projection if block is blocks[-1] else None
            layers.append(FunctionLayer(partial(convolve, block, project), block, *filter(None, [project])))
    return layers


def _encoder_layers(model: PoseTransformer) -> list[nn.Module]:
    """Return layers that encode the maps."""

    def merge(values: Values) -> Values:
        _, *places, inputs = values[:5]
        return *places, inputs, *model.merge_levels(values[5:]).levels()

    def encode(layer: nn.Module, values: Values) -> Values:
        maps = Maps.of(values[4:])
        return *values[:4], *maps.levels(layer(maps))

    return [
        FunctionLayer(merge, model.level),
        *(FunctionLayer(partial(encode, layer), layer) for layer in model.encoder),
    ]


def _support_layers(model: PoseTransformer) -> list[nn.Module]:
    """Return layers from the encoded maps to (decoder inputs, support tokens, presence, *maps, proposals)."""

    def begin(values: Values) -> Values:
        xy, visible, present, inputs, *levels = values
        support, query = model.divide(Maps.of(levels), len(xy))
        batch = {"support_xy": xy, "support_visible": visible > 0}
        return model.begin_support(batch, support), present, inputs, *query.levels()

    def attend(layer: nn.Module, values: Values) -> Values:
        tokens, present, *rest = values
        return layer(tokens, present[:, None, None] > 0), present, *rest

    def end(values: Values) -> Values:
        tokens, present, inputs, *levels = values
        tokens, present = model.end_support(tokens, present, len(inputs) // len(present))
        steps, proposals = model.steps(Maps.of(levels), tokens, present > 0)
        count = inputs.shape[1]
        return steps[:, :count] + inputs, tokens, present, *levels, proposals[:, :count]

    return [
        FunctionLayer(begin, model.encoder_norm, model.coordinates, model.invisible),
        *(FunctionLayer(partial(attend, layer), layer) for layer in model.support),
        FunctionLayer(end, model.support_norm, model.likeness, model.end),
    ]


def _decoder_layers(model: PoseTransformer) -> list[nn.Module]:
    """Return layers that append coordinates and types to the proposals, and one that returns the predictions."""
    first = 3 + len(model.inputs)  # number of the values before the proposals

    def decode(layer: nn.Module, values: Values) -> Values:
        x, tokens, present, *levels = values[:first]
        results: Sequence[Tensor] = values[first:]
        places = results[-2] if len(results) > 1 else results[0]
        context = DecoderContext(tokens, present[:, None, None] > 0, Maps.of(levels))
        x, moved, kinds = layer(x, places.detach(), context, None)
        return x, *values[1:], moved, kinds

    def end(values: Values) -> Values:
        proposals, *results = values[first:]
        return proposals, torch.stack(results[::2], dim=1), torch.stack(results[1::2], dim=1)

    return [*(FunctionLayer(partial(decode, layer), layer) for layer in model.decoder), FunctionLayer(end)]
