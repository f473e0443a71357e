"""Category-agnostic pose estimation: keypoints of categories not seen in training, defined by one image.

Items are visible keypoints. The metric is PCK@0.2 of autoregressively decoded keypoints, on held-out categories; the
baseline copies the keypoints of the support.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.base.errors import ConfigError, InputMissing, Problem
from runner.base.noise import per_sample_noise
from runner.base.task import Context, Prediction, Sum, Task
from runner.base.values import Count, Factor, Fraction, PositiveInt

from .data import (
    Augmentation,
    Batch,
    Episodes,
    PoseSet,
    check_disjoint,
    copy_support,
    has_split,
    read_pose_set,
    select_categories,
)
from .glyphs import prepare_glyphs
from .layers import split_layers
from .metrics import THRESHOLD, copy_baseline, score_keypoints, score_predictions, target_types
from .model import COORDINATE, KeypointPredictions, PoseTransformer, Shape, decode
from .pictures import category_table, coco_results, episode_picture

SETTINGS = {
    "checkpoint.best": "val/pck",
    "checkpoint.best_is": "max",
    "max_grad_norm": 0.1,
    "optimizer": "adamw",
}

# Defaults of each size; settings on the command line take precedence.
SIZES = {
    "tiny": {
        "updates": 800,
        "global_batch_size": 16,
        "cpu_micro_batch_size": 4,
        "optimizer.lr": 0.001,
        "scheduler.warmup": 0.05,
        "evaluate.every": 200,
    },
    "full": {
        "updates": 60000,
        "global_batch_size": 16,
        "cpu_micro_batch_size": 4,
        "optimizer.lr": 0.0001,
        "scheduler.warmup": 0.02,
        "evaluate.every": 2000,
        "evaluate.samples": 1024,
    },
}
COORDINATE_WEIGHT = 5.0


def build(
    context: Context,
    *,
    size: Literal["tiny", "full"] = "tiny",
    attention: Literal["dense", "deformable"] | None = None,
    backbone: Literal["group_norm", "torchvision"] = "group_norm",
    image_size: PositiveInt | None = None,
    grid: PositiveInt = 44,
    queries: PositiveInt = 2,
    crop: Literal["box", "image"] | None = None,
    augment: bool = True,
    flip: Fraction = 0.5,
    forget: Factor = 0.3,
    categories: tuple[str, ...] | None = None,
    fold: PositiveInt = 1,
) -> Task:
    """A transformer that finds the keypoints of a category not seen in training, given one annotated image.

    size        tiny: a small residual network on 64 x 64 images, for two CPU cores; full: ResNet-50 and 6 + 6 layers
    attention   attention to image features: dense or deformable; null: dense for tiny, deformable for full
    backbone    group_norm: network selected by size, trained from scratch; torchvision: ResNet-50 with frozen batch
                norms and torchvision's names, for `weights`
    image_size  image height and width in pixels; null: 64 for tiny, 256 for full
    grid        bins per axis of the coordinate embedding table
    queries     query images per episode, in addition to the support image
    crop        box: crop to the object with a margin; image: use the entire image; null: box with data.path, else image
    augment     rotate, scale, translate and flip images in training, and change their brightness
    flip        probability of a flip, in categories that name left and right keypoints
    forget      share of the previous keypoints hidden in training, so that decoding is robust to its own errors
    categories  names of the categories to train on; null: all of the training split
    fold        MP-100 fold: selects annotations/mp100_split{fold}_{split}.json
    """
    shape, side = SHAPES[size], image_size or IMAGE_SIZES[size]
    if side % 32:
        raise ConfigError(Problem(f"must be a multiple of 32, but is {side}", "task.image_size"))
    folder = context.data_path or prepare_glyphs(context.cache / "cape", image_size=side)
    crop = crop or ("box" if context.data_path else "image")
    splits = ("train", "val", *["test"] * has_split(folder, "test", fold))
    sets = {split: read_pose_set(folder, split, fold=fold, crop=crop) for split in splits}
    check_disjoint(list(sets.values()))
    if categories is not None:
        sets["train"] = select_categories(sets["train"], categories)
    return CategoryAgnosticPose(
        sets,
        replace(shape, grid=grid, attention=attention or shape.attention, pretrained=backbone == "torchvision"),
        seed=context.seed,
        forget=forget,
        augmentation=Augmentation(flip=flip) if augment else None,
        episodes={"image_size": side, "queries": queries, "crop": crop},
    )


class CategoryAgnosticPose(Task):
    """Predicts keypoints as tokens, given a support image of the same category."""

    item = "visible keypoint"
    baseline_name = "support keypoints copied"
    model: PoseTransformer

    def __init__(
        self,
        sets: Mapping[str, PoseSet],
        shape: Shape,
        *,
        seed: int,
        forget: float,
        augmentation: Augmentation | None,
        episodes: Mapping[str, Any],
    ) -> None:
        self.sets, self.shape, self.seed, self.augmentation = sets, shape, seed, augmentation
        self.max_keypoints = max(poses.max_keypoints for poses in sets.values())
        self._episodes, self.forget = episodes, forget
        self.model = PoseTransformer(shape)
        annotations = sets["train"].annotations
        visible = sum(int(annotation.visible.sum()) for annotation in annotations)
        self.items_per_sample = episodes["queries"] * visible / len(annotations)

    def dataset(self, split: str) -> Episodes:
        if split not in self.sets:
            raise NotImplementedError(f"there is no split {split!r}")
        return Episodes(
            self.sets[split],
            max_keypoints=self.max_keypoints,
            augmentation=self.augmentation if split == "train" else None,
            seed=self.seed,
            **self._episodes,
        )

    def blocks(self) -> Sequence[nn.Module]:
        model: Any = self.model
        return [*model.encoder, *model.support, *model.decoder]

    def layers(self) -> list[nn.Module]:
        return split_layers(self.model)

    def loss(self, model: nn.Module, batch: Batch) -> Sum:
        """Return the sum over the visible keypoints of the cross-entropy of the type and 5 x the L1 error.

        Every decoder layer contributes this loss. The L1 error of the proposals from feature similarity and the
        cross-entropy of the end token of each query are added.
        """
        predictions = model(self._hide_keypoints(batch) if self.model.training else batch)
        return self._loss(KeypointPredictions(*predictions), batch)  # a pipeline returns a plain tuple

    def _hide_keypoints(self, batch: Batch) -> Batch:
        """Return the batch with a fraction `forget` of the query's keypoints hidden from the model."""
        visible = batch["query_visible"]
        hidden = per_sample_noise(batch).bernoulli(self.forget, *visible.shape[1:])
        return {**batch, "query_visible": visible & ~hidden}

    def _loss(self, predictions: KeypointPredictions, batch: Batch) -> Sum:
        visible = batch["query_visible"].flatten(0, 1)
        true = torch.where(visible[..., None], batch["query_xy"].flatten(0, 1), 0.0)
        places = torch.cat([predictions.proposals[:, None], predictions.xy], dim=1)[:, :, :-1].float()
        missed = torch.where(visible[:, None, :, None], (places - true[:, None]).abs(), 0.0).sum()
        types, counted = target_types(batch)
        logits = predictions.types.float()
        types = types[:, None].expand(logits.shape[:-1])
        each = F.cross_entropy(logits.flatten(0, 2), types.flatten(), reduction="none").view(types.shape)
        return COORDINATE_WEIGHT * missed + (each * counted[:, None]).sum(), visible.sum()

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Sum]:
        """Return the loss, and the metrics of keypoints decoded autoregressively.

        pck       fraction of the visible keypoints predicted within 0.2 of the object's longer side
        distance  mean distance relative to that side
        ended     fraction of the queries that end right after the last keypoint
        """
        predictions = decode(model, batch)
        hits, distances, ended = score_predictions(predictions, batch)
        visible = batch["query_visible"]
        return {
            "loss": self.loss(model, batch),
            "pck": (hits.sum(), visible.sum()),
            "distance": (distances.sum(), visible.sum()),
            "ended": (ended.sum(), ended.numel()),
        }

    def baselines(self) -> Mapping[str, float]:
        """Return PCK and distance of copying the support's keypoints, over all episodes of validation."""
        return copy_baseline(self.dataset("val"))

    def predict(  # type: ignore[override]  # options of the contract as named parameters
        self,
        model: nn.Module,
        generator: torch.Generator,
        *,
        split: Literal["val", "test"] = "val",
        samples: PositiveInt | None = 32,
        category: str | None = None,
        batch_size: PositiveInt = 16,
        pictures: Count = 6,
    ) -> Iterator[Prediction]:
        """Yield keypoints of episodes of held-out categories.

        split       held-out categories to choose from
        samples     number of episodes; null: all
        category    the only category to use; null: all of the split
        batch_size  episodes decoded at once
        pictures    number of episodes to plot
        """
        if split not in self.sets:
            raise InputMissing(f"there are no {split} annotations", where="data.path", fix="use inference.split=val")
        episodes = self.dataset(split)
        annotations = episodes.poses.annotations
        if category is not None:
            select_categories(episodes.poses, [category], "inference.category")
        order = torch.randperm(len(episodes), generator=generator, device=generator.device).tolist()
        chosen = [index for index in order if category in (None, annotations[index].category.name)][:samples]
        results: list[dict[str, Any]] = []
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for number, (batch, row, xy, scores, hits) in enumerate(
            decode_episodes(model, episodes, chosen, batch_size, generator.device)
        ):
            objects = batch["object"][row].tolist()
            found = coco_results(episodes, objects[1:], xy, scores)
            shown = annotations[objects[0]].category
            seen = int(batch["query_visible"][row].sum())
            copied = score_keypoints(copy_support(batch), batch)[0][row]
            figures = (int(hits.sum()), int(copied.sum()), seen)
            counts[shown.name] = [sum(pair) for pair in zip(counts[shown.name], figures, strict=True)]
            name = f"episode-{number:04d}"
            plots = {}
            text = f"{shown.name}: {figures[0]} of {seen} keypoints within {THRESHOLD:g} of the object's longer side"
            if number < pictures:
                plots[f"{name}.png"] = episode_picture(batch, row, xy, hits, shown)
            results += found
            yield Prediction({f"{name}.json": json.dumps(found)}, text, items=seen, plots=plots)
        table = category_table(counts)
        used = f"{len(chosen)} episodes of {split}" + ", which also selects the best checkpoint" * (split == "val")
        yield Prediction({"keypoints.json": json.dumps(results), "pck.txt": table}, f"{used}\n{table}", items=0)


def decode_episodes(
    model: nn.Module, episodes: Episodes, indices: Sequence[int], batch_size: int, device: torch.device
) -> Iterator[tuple[Batch, int, Tensor, Tensor, Tensor]]:
    """Yield the batch and row of each episode, coordinates (Q, K, 2), scores (Q, K) and hits (Q, K), all on the CPU."""
    for start in range(0, len(indices), batch_size):
        batch = episodes.__getitems__(indices[start : start + batch_size])
        moved = {name: value.to(device) for name, value in batch.items()}
        predictions = decode(model, moved)
        hits = score_predictions(predictions, moved)[0].cpu()
        xy = predictions.xy[:, -1, :-1].float().cpu().view_as(batch["query_xy"])
        scores = predictions.types[:, -1, :-1].float().softmax(dim=-1)[..., COORDINATE].cpu().view_as(hits)
        for row in range(len(hits)):
            yield batch, row, xy[row], scores[row], hits[row]


IMAGE_SIZES = {"tiny": 64, "full": 256}
SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(
        stem=16,
        stages=((32, 1), (64, 2)),
        published=False,
        num_levels=1,
        width=64,
        num_heads=4,
        feed_forward=128,
        support_layers=1,
        encoder_layers=1,
        decoder_layers=2,
    ),
    # ResNet-50 of He et al., CVPR 2016, table 1; the transformer of Zhu et al., Deformable DETR, ICLR 2021.
    "full": Shape(
        stem=64,
        stages=((256, 3), (512, 4), (1024, 6), (2048, 3)),
        published=True,
        num_levels=3,
        width=256,
        num_heads=8,
        feed_forward=1024,
        support_layers=3,
        encoder_layers=6,
        decoder_layers=6,
        attention="deformable",
    ),
}
