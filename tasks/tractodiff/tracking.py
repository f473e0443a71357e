"""Output of inference for the streamlines of a subject: tractograms, statistics by bundle, and a plot."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.base.task import Content, Prediction

from .data import Tracts
from .generation import SegmentSampler, generate_streamlines
from .lines import Array, connects, ends_of, length, mdf, resample_by_count, tck, trk, voxels
from .pictures import draw_side_by_side

NUM_COMPARED_POINTS = 12  # points for the comparison of complete streamlines, as in QuickBundles


@dataclass(frozen=True)
class Seeds:
    """Seeds of one subject, generated together.

    start     (N, 3) mm
    partners  number of the held-out streamline of each seed; None: random seeds in the mask
    number    number of this batch among those of its subject, None if there is only one
    """

    subject: int
    start: Tensor
    partners: list[int] | None
    number: int | None


class Tracking:
    """Grows streamlines, and compares them with the held-out ones of a split."""

    def __init__(self, tracts: Tracts, split: str) -> None:
        self.tracts, self.split = tracts, split

    def prediction(
        self,
        seeds: Seeds,
        draw: SegmentSampler,
        inside: Callable[[Tensor], Tensor],
        *,
        advance: int,
        max_points: int,
    ) -> Prediction:
        """Return the tractograms of one batch of seeds, and its streamlines as a part for `combined`."""
        start = time.perf_counter()
        generated = generate_streamlines(draw, inside, seeds.start, advance=advance, max_points=max_points)
        lines = [line.cpu().numpy() for line in generated]  # waits for the device
        part = {
            "subject": seeds.subject,
            "split": self.split,
            "partners": seeds.partners,
            "streamlines": [line.tolist() for line in lines],
            "seconds": time.perf_counter() - start,
        }
        name = self.tracts.names[seeds.subject]
        name = name if seeds.number is None else f"{name}-{seeds.number:03d}"
        extended = [line for line in lines if len(line) > 1]
        shape = self.tracts.fields.shapes[seeds.subject].tolist()
        files: dict[str, Content] = {
            f"{name}.trk": trk(extended, self.tracts.affines[seeds.subject], shape),
            f"{name}.tck": tck(extended),
        }
        return Prediction(files, items=draw.count, part=part)

    def combined(self, parts: Sequence[Mapping[str, Any]]) -> Prediction:
        """Return the statistics of a subject and a plot, from the parts of all its batches."""
        subject = parts[0]["subject"]
        generated = [np.array(line, np.float32) for part in parts for line in part["streamlines"]]
        with_partners = [part["partners"] for part in parts if part["partners"] is not None]
        partners = [partner for each in with_partners for partner in each] if with_partners else None
        figures = self.figures(subject, partners, generated)
        figures["seconds_per_streamline"] = sum(part["seconds"] for part in parts) / len(generated)
        name = self.tracts.names[subject]
        files: dict[str, Content] = {f"{name}.json": json.dumps(figures, indent=2) + "\n"}
        lines = [line for line in generated if len(line) > 1]
        plots = {}
        if lines:
            real = self._real(subject)
            shown = real if partners is None else [real[partner] for partner in dict.fromkeys(partners)]
            title = "held out" if partners is None else "held out, through the seeds"
            plots[f"{name}.png"] = draw_side_by_side({title: shown, "generated": lines}, f"Streamlines of {name}")
        return Prediction(files, _format_figures(figures), items=0, plots=plots)

    def figures(self, subject: int, partners: list[int] | None, generated: list[Array]) -> dict[str, Any]:
        """Return lengths, and by bundle the distance to the held-out streamlines and the voxels of both.

        partners   number of the held-out streamline of each seed; None: random seeds in the mask
        generated  a line (n, 3) per seed; a single point if it was not extended
        """
        real = self._real(subject)
        lines = [line for line in generated if len(line) > 1]
        found: dict[str, Any] = {
            "subject": self.tracts.names[subject],
            "split": self.split,
            "seeds": len(generated),
            "streamlines": len(lines),
            "mean_length_mm": _mean([length(line) for line in lines]),
            "real_streamlines": len(real),
            "real_mean_length_mm": _mean([length(line) for line in real]),
        }
        if partners is not None:
            pairs = [(line, real[partner]) for line, partner in zip(generated, partners, strict=True)]
            found["mdf_to_real_through_seed_mm"] = _mean(_distances(pairs))
            found["bundles"] = self._by_bundle(subject, partners, generated, real)
        return found

    def _by_bundle(
        self, subject: int, partners: Sequence[int], generated: list[Array], real: list[Array]
    ) -> dict[str, dict[str, float]]:
        """Return the statistics of each bundle in which there are seeds.

        overlap and overreach are the numbers of voxels of generated lines inside and outside of the held-out lines of
        the bundle, relative to the number of voxels of the held-out lines. valid_connections is the share of the seeds
        whose lines have both ends within two voxels of the two ends of one held-out line of the bundle.
        Source: Cote et al., Tractometer, Medical Image Analysis 17, 2013, which draws end regions by hand.
        """
        reach = 2 * float(self.tracts.fields.voxel_size[subject])
        labels = self.tracts.bundles_of(self.split, subject)
        affine = self.tracts.affines[subject]
        found = {}
        for bundle in sorted({labels[partner] for partner in partners}):
            pairs = [
                (line, real[partner])
                for line, partner in zip(generated, partners, strict=True)
                if labels[partner] == bundle
            ]
            held_out = [line for line, label in zip(real, labels, strict=True) if label == bundle]
            truth, ends = voxels(held_out, affine), ends_of(held_out)
            seen = voxels([line for line, _ in pairs], affine)
            found[bundle] = {
                "seeds": len(pairs),
                "mdf_to_real_through_seed_mm": _mean(_distances(pairs)),
                "overlap": len(seen & truth) / len(truth),
                "overreach": len(seen - truth) / len(truth),
                "valid_connections": _mean([float(len(line) > 1 and connects(line, ends, reach)) for line, _ in pairs]),
            }
        return found

    def _real(self, subject: int) -> list[Array]:
        return [line.numpy() for line in self.tracts.streamlines(self.split, subject)]


def _format_figures(figures: Mapping[str, Any]) -> str:
    text = (
        f"{figures['subject']}: {figures['streamlines']} streamlines from {figures['seeds']} seeds,"
        f" {1e3 * figures['seconds_per_streamline']:.3g} ms per streamline;"
        f" mean length {figures['mean_length_mm']:.1f} mm"
        f" (held-out streamlines of {figures['split']}: {figures['real_mean_length_mm']:.1f} mm)"
    )
    if "mdf_to_real_through_seed_mm" in figures:
        text += f"; MDF to the held-out streamline of the seed: {figures['mdf_to_real_through_seed_mm']:.2f} mm"
    if bundles := figures.get("bundles"):
        parts = [
            f"{name}: overlap {found['overlap']:.0%}, overreach {found['overreach']:.0%},"
            f" valid connections {found['valid_connections']:.0%}"
            for name, found in bundles.items()
        ]
        text += "\n" + "; ".join(parts)
    return text


def _distances(pairs: Sequence[tuple[Array, Array]]) -> list[float]:
    """Return the MDF of pairs of lines, without seeds that were not extended."""
    even = [
        tuple(torch.from_numpy(resample_by_count(line, NUM_COMPARED_POINTS)) for line in pair)
        for pair in pairs
        if len(pair[0]) > 1
    ]
    return [float(mdf(one, other)) for one, other in even]


def _mean(values: list[float]) -> float:
    """Return the mean; 0 if there are no values."""
    return sum(values) / max(1, len(values))
