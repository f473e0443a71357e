"""Tractography by diffusion: predict the next 16 points of a streamline from local image data and previous steps.

Items are segments of streamlines. The metric is the minimum average direct-flip distance (MDF) to the true points;
the baseline continues straight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from runner.base.errors import ConfigError, Problem
from runner.base.noise import per_sample_noise
from runner.base.task import Context, Prediction, Sum, Task
from runner.base.values import Count, Positive, PositiveInt

from .data import Batch, SegmentDataset, Tracts, prepare
from .fields import Fields
from .generation import SegmentSampler, sample_segments
from .lines import mdf
from .model import NUM_POINTS, Shape, StreamlineDiffusion
from .tracking import Seeds, Tracking

SETTINGS = {
    "optimizer": "adam",
    "checkpoint.best": "val/mdf_mm",
    "checkpoint.best_is": "min",
}

# Defaults of each size; settings on the command line take precedence.
SIZES = {
    "tiny": {
        "updates": 4000,
        "global_batch_size": 64,
        "optimizer.lr": 0.001,
        "scheduler.warmup": 0.02,
        "scheduler.final_factor": 0.01,
        "evaluate.every": 1000,
        "evaluate.samples": 512,
    },
    "full": {
        "updates": 50000,
        "global_batch_size": 256,
        "optimizer.lr": 0.00005,
        "scheduler.warmup": 0.02,
        "evaluate.every": 5000,
        "evaluate.samples": 2048,
    },
}


def build(
    context: Context,
    *,
    size: Literal["tiny", "full"] = "tiny",
    denoiser: Literal["gru", "unet"] = "gru",
    data: Literal["volume", "bundles"] = "volume",
    step_mm: Positive | None = None,
    diffusion_steps: PositiveInt | None = None,
) -> Task:
    """Diffusion of streamline segments, conditioned on the data around their start.

    size             tiny: for two CPU cores; full: the published sizes
    denoiser         gru: a GRU with one time step per point; unet: a 1-D U-Net along the points
    data             volume: dipy's small_64D, tracked on its tensors, with held-out streamlines; bundles: dipy's
                     minimal bundles of five subjects, one for val and one for test; ignored with data.path
    step_mm          distance between two points in mm; null: 4 for bundles, 1 otherwise
    diffusion_steps  number of diffusion steps T; null: depends on size (tiny 50, full 200)
    """
    step = step_mm or (4.0 if data == "bundles" and context.data_path is None else 1.0)
    folder = prepare(context.data_path, context.cache / "tractodiff", data=data, step=step)
    shape = SHAPES[size]
    model = StreamlineDiffusion(shape, diffusion_steps or shape.num_steps, denoiser)
    return TractoDiff(SegmentDataset(folder, "train", context.seed), model)


class TractoDiff(Task):
    """Samples the next 16 points of a streamline."""

    item = "segment"
    baseline_name = "straight line"

    def __init__(self, train: SegmentDataset, model: StreamlineDiffusion) -> None:
        self.train = train
        self.tracts: Tracts = train.tracts
        self.model: StreamlineDiffusion = model
        self.mask = self.tracts.fields.mask
        seen = train.spread(4096)
        model.center.copy_(seen["condition"].mean(dim=0))
        # Coefficients of high order are mostly noise, which must not be amplified.
        model.spread.copy_(seen["condition"].std(dim=0).clamp(min=0.05))
        model.scale.copy_(seen["points"].square().mean().sqrt())
        self.mean_step = float(seen["points"].diff(dim=1).norm(dim=-1).mean())

    @property
    def packages(self) -> Mapping[str, Mapping[str, str]]:
        return {"train": {"scipy": "tractodiff"}, "infer": {"nibabel": "tractodiff"}}  # the baseline, and .trk files

    def dataset(self, split: str) -> SegmentDataset:
        return self.train if split == "train" else SegmentDataset(self.train.folder, split)

    def loss(self, model: nn.Module, batch: Batch) -> Sum:
        """Return 20 MDF + 10 collision, summed over the segments, MDF in units of the model's scale.

        Every second segment is evaluated again at the least noisy 5 % of the steps, where the prediction is close to a
        sample. The collision is the fraction of predicted points that are outside the mask while the true ones are
        inside. It is counted twice, to represent all segments.
        """
        schedule, points, condition = self.model.schedule, batch["points"] / self.model.scale, batch["condition"]
        noise, count = per_sample_noise(batch), len(points)
        again = noise.every(2)
        x0, known = torch.cat([points, points[again]]), torch.cat([condition, condition[again]])
        little = noise.integers(0, max(1, schedule.num_steps // 20))
        step = torch.cat([noise.integers(0, schedule.num_steps), little[again]])
        drawn = [noise.normal(*points.shape[1:], dtype=points.dtype) for _ in range(2)]
        noisy = schedule.add_noise(x0, step, torch.cat([drawn[0], drawn[1][again]]))
        predicted = model(noisy, step, known).float()
        distance = mdf(predicted[:count], points).sum()
        half = {name: part[again] for name, part in batch.items()}
        leaves = self.inside(half["points"], half) - self.inside(predicted[count:] * self.model.scale, half)
        collision = 2 * leaves.relu().mean(dim=1).sum()
        return 20 * distance + 10 * collision, count

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Sum]:
        """Return the loss, and for sampled segments the MDF in mm and the fraction of their points in the mask."""
        noise, dtype = per_sample_noise(batch), batch["points"].dtype
        drawn = sample_segments(model, self.model, batch["condition"], lambda: noise.normal(NUM_POINTS, 3, dtype=dtype))
        return {"loss": self.loss(model, batch)} | self._measured(drawn, batch)

    def baselines(self) -> Mapping[str, float]:
        """Return the metrics of continuing straight: the last known direction, with the mean step of the training data.

        `mdf_mm_nearest_piece` is the result of copying the training segment with the nearest start and last direction.
        """
        batch = self.dataset("val").spread(4096)
        direction = batch["condition"][:, -3:]
        straight = direction[:, None] * torch.arange(1, NUM_POINTS + 1)[:, None] * self.mean_step
        sums = self._measured(straight, batch)
        sums["mdf_mm_nearest_piece"] = self._measured(self.train.nearest(batch), batch)["mdf_mm"]
        return {name: float(total) / float(count) for name, (total, count) in sums.items()}

    def example(self) -> tuple[Tensor, ...]:
        """Return noisy points (2, 16, 3), the diffusion step of each (2,), and two held-out conditions (2, 346)."""
        batch, schedule = self.dataset("val").spread(2), self.model.schedule
        step = torch.arange(2) * (schedule.num_steps // 2)
        noise = torch.randn(batch["points"].shape, generator=torch.Generator().manual_seed(0))
        return schedule.add_noise(batch["points"] / self.model.scale, step, noise), step, batch["condition"]

    def layers(self) -> list[nn.Module]:
        return self.model.layers()

    def predict(  # type: ignore[override]  # options of the contract as named parameters
        self,
        model: nn.Module,
        generator: torch.Generator,
        *,
        split: Literal["val", "test"] = "test",
        seeds: PositiveInt = 200,
        seeds_from: Literal["streamlines", "mask"] = "streamlines",
        steps: PositiveInt | None = None,
        batch_size: PositiveInt | None = None,
        advance: PositiveInt = 8,
        max_points: PositiveInt = 100,
        shard: Count = 0,
        num_shards: PositiveInt = 1,
    ) -> Iterator[Prediction]:
        """Yield the streamlines generated in each held-out subject, as .trk and .tck.

        split       test: streamlines that were not used to select the checkpoint, or val if there are none; val:
                    streamlines that were used to select it
        seeds       streamlines per subject
        seeds_from  streamlines: points of held-out streamlines, which are compared with the generated streamlines;
                    mask: random points in the mask
        steps       null: ancestral sampling with all diffusion steps; otherwise DDIM with this number of steps
        batch_size  seeds tracked at once; each batch has separate files, and ranks divide the batches; null: all seeds
                    of a subject
        advance     points to keep of each segment of 16 points before the next segment is sampled
        max_points  maximum number of points on each side of a seed
        shard       track only batches b with b % num_shards == shard
        num_shards  number of shards into which the batches are divided
        """
        if advance > NUM_POINTS:
            what = f"must be at most {NUM_POINTS}, the points of a segment, but is {advance}"
            raise ConfigError(Problem(what, "inference.advance"))
        if steps is not None and steps > self.model.schedule.num_steps:
            what = f"must be at most {self.model.schedule.num_steps}, the diffusion steps of the model, but is {steps}"
            raise ConfigError(Problem(what, "inference.steps"))
        note = ""
        if not self.tracts.subjects(split):
            split, note = "val", f"no {split} streamlines: these are from val, which also selects the checkpoint"
        fields = self.tracts.fields.to(generator.device)
        mask = fields.mask
        tracking = Tracking(self.tracts, split)
        batches = [
            batch
            for subject in self.tracts.subjects(split)
            for batch in _divided(self._seeds(split, subject, seeds, seeds_from, generator), batch_size or seeds)
        ]
        # One generator per batch, so that the random numbers do not depend on the rank.
        drawn = torch.randint(2**63 - 1, (len(batches),), generator=generator, device=generator.device).tolist()
        for batch, seed in list(zip(batches, drawn, strict=True))[shard::num_shards]:

            def inside(points: Tensor, subject: int = batch.subject) -> Tensor:
                of = torch.full((len(points),), subject, device=points.device)
                return mask.sample(points, of)[:, 0] >= 0.5

            own = torch.Generator(generator.device).manual_seed(seed)
            draw = SegmentSampler(model, self.model, fields, batch.subject, own, steps)
            made = tracking.prediction(batch, draw, inside, advance=advance, max_points=max_points)
            yield replace(made, text=note)
            note = ""

    def combine_predictions(self, parts: Sequence[Mapping[str, Any]]) -> Iterator[Prediction]:
        """Yield the statistics and a plot of each subject."""
        for subject in sorted({part["subject"] for part in parts}):
            own = [part for part in parts if part["subject"] == subject]
            yield Tracking(self.tracts, own[0]["split"]).combined(own)

    def _seeds(self, split: str, subject: int, count: int, origin: str, generator: torch.Generator) -> Seeds:
        """Return seeds of a subject on the generator's device: in the mask, or on random held-out streamlines."""
        if origin == "mask":
            return Seeds(subject, self._in_mask(self.tracts.fields.mask, subject, count, generator), None, None)
        real = self.tracts.streamlines(split, subject)
        partners = torch.randint(len(real), (count,), generator=generator, device=generator.device).tolist()
        share = torch.rand(count, generator=generator, device=generator.device).tolist()
        start = torch.stack([real[i][int(s * len(real[i]))] for i, s in zip(partners, share, strict=True)])
        return Seeds(subject, start.to(generator.device), partners, None)

    def _measured(self, points: Tensor, batch: Batch) -> dict[str, Sum]:
        inside = self.inside(points, batch)
        return {
            "mdf_mm": (mdf(points, batch["points"]).sum(), len(points)),
            "inside": ((inside >= 0.5).sum(), inside.numel()),
        }

    def inside(self, points: Tensor, batch: Batch) -> Tensor:
        """Return the interpolated mask (B, P), from 0 to 1, at points (B, P, 3) in mm from the start."""
        self.mask = self.mask.to(points.device)
        at = (points + batch["start"][:, None]).flatten(0, 1)
        return self.mask.sample(at, batch["subject"].repeat_interleave(points.shape[1])).view(points.shape[:2])

    def _in_mask(self, mask: Fields, subject: int, count: int, generator: torch.Generator) -> Tensor:
        """Return random points (N, 3) in voxels of the mask."""
        device = generator.device
        voxels = mask.image(subject)[..., 0].nonzero()
        chosen = voxels[torch.randint(len(voxels), (count,), generator=generator, device=device)]
        within = chosen + 0.98 * (torch.rand(count, 3, generator=generator, device=device) - 0.5)
        affine = torch.as_tensor(self.tracts.affines[subject], dtype=torch.float32, device=device)
        return within @ affine[:3, :3].T + affine[:3, 3]


def _divided(seeds: Seeds, size: int) -> list[Seeds]:
    """Return batches of at most `size` seeds."""
    if len(seeds.start) <= size:
        return [seeds]
    return [
        Seeds(
            seeds.subject,
            seeds.start[first : first + size],
            None if seeds.partners is None else seeds.partners[first : first + size],
            first // size,
        )
        for first in range(0, len(seeds.start), size)
    ]


SHAPES: Mapping[str, Shape] = {
    "tiny": Shape((256, 256, 128, 128), time=64, hidden=96, head=(64, 32), channels=(16, 32, 64), num_steps=50),
    "full": Shape(
        (1024, 2048, 512, 512), 256, hidden=512, head=(512, 256, 64), channels=(512, 1024, 2048), num_steps=200
    ),
}
