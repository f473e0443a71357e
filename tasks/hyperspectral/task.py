"""Hyperspectral anomaly detection in two phases: statistics of all pixels in one pass, then gradients.

Items are pixels. After the first phase the model is the RX detector; `epochs=0` stops there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.base.errors import ConfigError, InputMissing, Problem
from runner.base.task import Content, Context, Prediction, Progress, Sum, Task
from runner.base.values import NonNegative, PositiveInt

from .data import Cubes, open_folder
from .envi import FORMATS
from .metrics import UNKNOWN, detection
from .model import NU, DeepSVDD, Detector, TrainableRX
from .pictures import Map, maps_picture, score_picture
from .scenes import Scenes, SyntheticScenes, photograph_scenes
from .statistics import PixelStatistics

PHASES = {
    "fit": {"kind": "fit"},
    "train": {"needs": ["fit"]},
}
SETTINGS = {
    "optimizer": "adam",
    "optimizer.lr": 0.01,
    "scheduler.warmup": 0.02,
    "phase.train.epochs": 40,  # the temperature of the selector, 5 x 0.9^epoch, falls to 0.1 in 37 epochs
    "checkpoint.best": "val/iou",
    "checkpoint.best_is": "max",
}
SIZES = {
    "tiny": {"global_batch_size": 8},
    "small": {"global_batch_size": 8},
    "full": {"global_batch_size": 8, "cpu_micro_batch_size": 4},
}


def build(
    context: Context,
    *,
    size: Literal["tiny", "small", "full"] = "tiny",
    head: Literal["rx", "svdd"] = "rx",
    data: Literal["photographs", "synthetic"] = "photographs",
    num_cubes: PositiveInt | None = None,
    height: PositiveInt | None = None,
    width: PositiveInt | None = None,
    channels: PositiveInt | None = None,
    components: PositiveInt | None = None,
    orthogonality: NonNegative = 0.1,
    entropy: NonNegative = 0.05,
    diversity: NonNegative = 0.05,
    statistics: Literal["float32", "float64"] = "float32",
) -> Task:
    """Compute statistics of all pixels in one pass, then train a target detector that starts from them.

    size           number of cubes x height x width x channels: tiny 96 x 64 x 64 x 24, small 200 x 128 x 128 x 50, full
                   1000 x 256 x 256 x 100
    head           rx: RX score of learned components, trained on masks; svdd: Deep SVDD, trained on all but targets
    data           photographs: from scikit-image, expanded to channels by a filter bank; synthetic: generated spectra
    num_cubes      number of training cubes; null: depends on size. The validation and test splits have a quarter of
                   that number each, from 8 to 64
    height         cube height in pixels; null: depends on size
    width          cube width in pixels; null: depends on size
    channels       channels of a cube, at least 3; null: depends on size, or on the cubes in data.path
    components     number of learned principal components; null: a third of the channels
    orthogonality  weight of the penalty for components that are not orthonormal: squared distance of W W^T from I,
                   per component
    entropy        weight of the entropy penalty of the channel selector: 1 - entropy / log(channels)
    diversity      weight of the concentration penalty of the selector: 0 for uniform weights, 1 for a single channel
    statistics     dtype of products over 4096 pixels in the phase fit on a CPU; sums use float64. float32 takes half
                   the time
    """
    shape = SHAPES[size]
    if context.data_path is not None:
        given = {"num_cubes": num_cubes, "height": height, "width": width}
        problems = [
            Problem("has no effect on the cubes of data.path", f"task.{name}", "leave it out")
            for name, value in given.items()
            if value is not None
        ]
        if problems:
            raise ConfigError(problems)
        splits: Mapping[str, Cubes] = open_folder(context.data_path, channels)
    else:
        wanted = (num_cubes or shape[0], height or shape[1], width or shape[2], channels or shape[3])
        splits = _scenes(context, data, *wanted)
    channels = splits["train"].shape[2]
    components = components or max(1, channels // 3)
    if channels < 3 or components > channels:
        what = f"must have at least 3 channels and no more components than channels, not {channels} and {components}"
        raise ConfigError(Problem(what, "task.components"))
    if head == "svdd":
        return OneClass(splits, DeepSVDD(channels), statistics)
    return Detection(splits, TrainableRX(channels, components), statistics, (orthogonality, entropy, diversity))


@dataclass
class AnomalyTask(Task):
    """Base class of both heads: data, statistics, metrics, maps."""

    cubes: Mapping[str, Cubes]
    model: Detector
    statistics: Literal["float32", "float64"]

    item = "pixel"
    baseline_name = "RX detector"
    unit = ""  # unit of the score

    def __post_init__(self) -> None:
        height, width, self.channels = self.cubes["train"].shape
        self.items_per_sample = float(height * width)

    def dataset(self, split: str) -> Cubes:
        return self.cubes[split]

    @property
    def fits(self) -> Mapping[str, PixelStatistics]:
        return {"fit": PixelStatistics(self.channels, getattr(torch, self.statistics))}

    def layers(self) -> list[nn.Module]:
        return self.model.layers()

    def begin_update(self, progress: Progress) -> None:
        """Update the temperature of the selector and the center, but not in phase `fit`, whose result is plain RX."""
        if progress.phase == "train":
            self.model.begin_update(progress)

    def evaluate(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Sum]:
        """Return IoU, F1 and AUROC if there are masks, and the loss if it is defined."""
        if not self.cubes["val"].has_masks:
            return {}
        logits, _ = model(batch["cube"])
        return detection(logits, batch["mask"])

    @torch.no_grad()
    def baselines(self) -> Mapping[str, float]:
        """Return IoU, F1 and AUROC of RX alone, fitted to the training pixels, at mean + 2 sigma."""
        val = self.cubes["val"]
        if not bool(self.model.fitted) or not val.has_masks:
            return {}
        device = self.model.mean.device
        sums: dict[str, list[float]] = {}
        for first in range(0, len(val), 8):
            batch = val.__getitems__(list(range(first, min(first + 8, len(val)))))
            found = detection(self.model.rx_logit(batch["cube"].to(device)), batch["mask"].to(device))
            for name, (total, count) in found.items():
                before = sums.get(name, [0.0, 0.0])
                sums[name] = [before[0] + float(total), before[1] + float(count)]
        return {name: total / max(count, 1.0) for name, (total, count) in sums.items()}

    def example(self) -> tuple[Tensor]:
        """Return cubes (2, H, W, C)."""
        val = self.cubes["val"]
        return (val.__getitems__([0, len(val) - 1])["cube"],)

    def predict(  # type: ignore[override]  # options of the contract as named parameters
        self,
        model: nn.Module,
        generator: torch.Generator,
        *,
        samples: PositiveInt = 8,
        batch_size: PositiveInt = 1,
        rows: PositiveInt = 4,
    ) -> Iterator[Prediction]:
        """Yield the score maps of test cubes.

        samples     maximum number of test cubes
        batch_size  cubes in one call of the model
        rows        number of cubes in plots/maps.png
        """
        test = self.cubes["test"]
        maps: list[Map] = []
        count = min(samples, len(test))
        for index in range(count):
            at = index % batch_size
            if at == 0:
                batch = test.__getitems__(list(range(index, min(index + batch_size, count))))
                cubes = batch["cube"].to(generator.device)
                many, _ = model(cubes)
            cube, logits, mask = (each[at : at + 1] for each in (cubes, many, batch["mask"]))
            rx = self.model.rx_logit(cube)
            arrays = [part[0].float().cpu().numpy() for part in (cube, rx, logits, mask)]
            one = Map(test.title(index), arrays[0], arrays[1], arrays[2], arrays[3])
            maps = [*maps, one][:rows]
            files: dict[str, Content] = {f"score-{index:04d}.npy": one.score}
            plots: dict[str, bytes] = {}
            text = f"{one.title}: {self._verdict(logits.float(), rx, mask.to(rx.device))}"
            files[f"score-{index:04d}.png"] = score_picture(one, self.unit)
            if index == count - 1:
                plots["maps.png"] = maps_picture(maps, self.unit)
            yield Prediction(files, text, items=one.score.size, plots=plots)

    def _verdict(self, logits: Tensor, rx: Tensor, mask: Tensor) -> str:
        if not bool((mask == 1).any()):
            return f"{float((logits > 0).float().mean()):.1%} of the pixels are above 0"
        mine, alone = (  # without known background there is no AUROC
            {name: float(s) / float(n) for name, (s, n) in detection(of, mask).items() if n} for of in (logits, rx)
        )
        return ", ".join(f"{name} {value:.3f} (RX {alone[name]:.3f})" for name, value in mine.items())


@dataclass
class Detection(AnomalyTask):
    """Trains on masks of targets; the logit is the log-odds that a pixel is a target.

    weights  weights of orthogonality, entropy and concentration, see TrainableRX.penalties
    """

    weights: tuple[float, float, float]
    unit = "log-odds of a target"

    def dataset(self, split: str) -> Cubes:
        """Return the cubes of a split; in phase `train`, without training cubes that have no mask and so no loss."""
        cubes = self.cubes[split]
        return cubes.labeled() if (split, self.phase) == ("train", "train") and cubes.has_masks else cubes

    def begin_phase(self, phase: str) -> None:
        """Raise InputMissing if the training data has no masks."""
        super().begin_phase(phase)
        if phase == "train" and not self.cubes["train"].has_masks:
            what = "head=rx learns from masks, but the training cubes have none"
            raise InputMissing(what, where="data.path", fix=f"use epochs=0 for RX alone, or task.head=svdd; {FORMATS}")

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Sum:
        """Return the weighted cross-entropy summed over known pixels, and the penalties once per pixel.

        Targets have the same total weight as the background (pos_weight), so the network would learn the odds for equal
        frequencies. Adding log pos_weight before the loss makes the logit the odds at the true frequency, so that
        0 means even odds.
        """
        logits, penalties = model(batch["cube"])
        known = (batch["mask"] != UNKNOWN).float()
        target = (batch["mask"] == 1).float()
        weight = self.model.pos_weight
        losses = F.binary_cross_entropy_with_logits(
            logits.float() + weight.clamp(min=1e-6).log(), target, weight=known, pos_weight=weight, reduction="sum"
        )
        # torch.tensor(self.weights, device=...) would wait for the device
        penalty = sum(weight * each for weight, each in zip(self.weights, penalties[0].float().unbind(), strict=True))
        count = known.sum()
        return losses + count * penalty, count

    def evaluate(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Sum]:
        """Also return the loss, and the fraction of the variance that the components explain."""
        metrics = {**super().evaluate(model, batch), "explained_variance": self.explained(batch["cube"])}
        return {"loss": self.loss(model, batch), **metrics} if self.cubes["val"].has_masks else metrics

    def explained(self, cubes: Tensor) -> Sum:
        assert isinstance(self.model, TrainableRX)
        return self.model.explained(cubes)


@dataclass
class OneClass(AnomalyTask):
    """Detects pixels outside the sphere of normal pixels; known targets are excluded from training."""

    unit = "distance to the sphere, sigmas"

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Sum:
        """Return squared radius + max(0, squared distance - squared radius) / nu, summed over pixels except targets."""
        logits, square = model(batch["cube"])
        normal = (batch["mask"] != 1).float()
        count = normal.sum()
        return (logits.relu() * normal).sum() / NU + count * square[0], count

    def evaluate(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Sum]:
        return {"loss": self.loss(model, batch), **super().evaluate(model, batch)}


def _scenes(
    context: Context, data: str, num_cubes: int, height: int, width: int, channels: int
) -> Mapping[str, Scenes]:
    held_out = min(64, max(8, num_cubes // 4))
    sizes = {"train": num_cubes, "val": held_out, "test": held_out}
    shape = (height, width, channels)
    if data == "synthetic":
        return {split: SyntheticScenes(split, count, *shape) for split, count in sizes.items()}
    cache = context.cache / "hyperspectral"
    return {split: photograph_scenes(cache, split, count, *shape) for split, count in sizes.items()}


# num_cubes, height, width, channels
SHAPES: Mapping[str, tuple[int, int, int, int]] = {
    "tiny": (96, 64, 64, 24),
    "small": (200, 128, 128, 50),
    "full": (1000, 256, 256, 100),
}
