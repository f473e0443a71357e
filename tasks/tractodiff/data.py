"""Segments of streamlines, each with the condition at its start: from dipy's data, or from a folder.

Data is prepared once: points every `step` mm in RAS and, for each subject, a field of spherical harmonics and a mask.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from runner.tasks.gpt.data import prepared
from torch import Tensor

from runner.base.errors import DataError, InputMissing
from runner.base.packages import require

from .fields import NUM_CHANNELS, NUM_DIRECTIONS, Fields
from .lines import resample_by_step, unit_steps
from .model import NUM_POINTS
from .sources import FORMATS, Subject, bundles, read_subjects, volume

Array = np.ndarray[Any, Any]
Batch = dict[str, Tensor]  # condition (B, 346), points (B, 16, 3) mm from the start, start (B, 3) mm, subject (B,)
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Tracts:
    """Streamlines of several subjects, and their fields.

    points    (N, 3) mm, concatenated streamlines; streamline i is points[ends[i - 1] : ends[i]]
    subject   (M,) index of each streamline's subject
    split     (M,) index into SPLITS for each streamline
    bundle    (M,) index into `bundles` for each streamline
    bundles   names of the bundles
    affines   (S, 4, 4) from voxels to RAS mm
    """

    names: Sequence[str]
    fields: Fields
    affines: Array
    points: Tensor
    ends: Tensor
    subject: Tensor
    split: Tensor
    bundle: Tensor
    bundles: Sequence[str]

    def streamlines(self, split: str, subject: int) -> list[Tensor]:
        """Return the streamlines (n, 3) of a subject in a split."""
        starts = torch.cat([self.ends.new_zeros(1), self.ends])
        return [self.points[starts[i] : starts[i + 1]] for i in self._chosen(split, subject)]

    def bundles_of(self, split: str, subject: int) -> list[str]:
        """Return the bundle of each streamline of a subject in a split."""
        return [self.bundles[number] for number in self.bundle[self._chosen(split, subject)].tolist()]

    def _chosen(self, split: str, subject: int) -> list[int]:
        chosen: list[int] = ((self.split == SPLITS.index(split)) & (self.subject == subject)).nonzero()[:, 0].tolist()
        return chosen

    def subjects(self, split: str) -> list[int]:
        """Return the subjects that have streamlines in a split."""
        return sorted(set(self.subject[self.split == SPLITS.index(split)].tolist()))


class SegmentDataset:
    """Sample i is 16 consecutive points of a streamline, relative to the point before them, and the condition there.

    Each point of a streamline gives two samples, one per direction. In training, one sample in ten has no history, so
    that the model learns to start at a seed, and one in ten has a random part of it. A training segment may also
    continue straight beyond the end of its streamline, so that generated streamlines leave the mask. Held-out segments
    have only real points, and always have a known direction.
    """

    def __init__(self, folder: Path, split: str, seed: int = 0) -> None:
        self.folder, self.split, self.seed = folder, split, seed
        self.tracts = read(folder)
        trains = split == "train"
        lengths = self.tracts.ends.diff(prepend=self.tracts.ends.new_zeros(1))
        firsts = self.tracts.ends - lengths
        in_split = self.tracts.split == SPLITS.index(split)
        skipped, needed = (0, 1) if trains else (1, NUM_POINTS)  # points before the start and after it
        counts = (lengths - needed - skipped).clamp(min=0) * in_split
        line = torch.arange(len(lengths)).repeat_interleave(counts)
        number = torch.arange(len(line)) - (counts.cumsum(0) - counts)[line] + skipped
        self._line = line.repeat(2)
        self.num_known = number.repeat(2)  # points before the start
        self.num_left = (lengths[line] - 1 - number).repeat(2)  # and after it
        self._sense = torch.tensor([1, -1]).repeat_interleave(len(line))
        self._start = torch.cat([firsts[line] + number, self.tracts.ends[line] - 1 - number])
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the length of the known history of each sample."""
        self.num_remembered = torch.full((len(self),), NUM_DIRECTIONS)
        if self.split == "train":
            rng = np.random.default_rng([self.seed, epoch])
            missing = rng.choice(3, size=len(self), p=[0.8, 0.1, 0.1])
            some = rng.integers(0, NUM_DIRECTIONS, size=len(self))
            self.num_remembered = torch.from_numpy(np.select([missing == 0, missing == 1], [NUM_DIRECTIONS, 0], some))

    def __len__(self) -> int:
        return len(self._line)

    def __getitem__(self, index: int) -> Batch:
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the collated batch."""
        return self.compose(self.load_fixed, indices)

    def load_fixed(self, indices: Sequence[int]) -> Batch:
        """Return a batch without the condition, but with image values and all known points before each start."""
        at = torch.as_tensor(indices)
        start, sense, line = self._start[at], self._sense[at], self._line[at]
        back = torch.minimum(torch.arange(NUM_DIRECTIONS, -1, -1)[None], self.num_known[at, None])
        points, subject = self.tracts.points, self.tracts.subject[line]
        left, ahead = self.num_left[at, None], torch.arange(1, NUM_POINTS + 1)
        end = start[:, None] + left * sense[:, None]
        beyond = (ahead - left).clamp(min=0)[..., None] * (points[end] - points[end - sense[:, None]])
        after = points[start[:, None] + torch.minimum(ahead, left) * sense[:, None]] + beyond
        origin = points[start]
        return {
            "values": self.tracts.fields.around(origin, subject),
            "before": points[start[:, None] - back * sense[:, None]],
            "points": after - origin[:, None],
            "start": origin,
            "subject": subject,
        }

    def compose(self, load: Callable[[Sequence[int]], Any], indices: Sequence[int]) -> Batch:
        """Return a batch of loaded segments with a part of their history."""
        at = torch.as_tensor(indices)
        loaded = dict(load(indices))
        values, before = loaded.pop("values"), loaded.pop("before")
        known = torch.minimum(self.num_known[at], self.num_remembered[at])
        oldest = torch.maximum(torch.arange(NUM_DIRECTIONS + 1), NUM_DIRECTIONS - known[:, None])
        before = before.gather(1, oldest[..., None].expand(-1, -1, 3))
        return {"condition": torch.cat([values, unit_steps(before).flatten(1)], dim=1), **loaded}

    def nearest(self, batch: Batch) -> Tensor:
        """Return the points (B, 16, 3) after the training point that is most similar to the start of each sample.

        The distance combines the position, in mm from the image center, and the last direction: a difference of
        directions counts as the distance to which it leads over half a segment. Candidates have a step before them, and
        16 real points after them.
        """
        places = ((self.num_left >= NUM_POINTS) & (self.num_known >= 1)).nonzero()[:, 0]
        start, sense, points = self._start[places], self._sense[places], self.tracts.points
        steps = points[start] - points[start - sense]
        reach = NUM_POINTS / 2 * steps.norm(dim=1).mean()
        to_mm = torch.from_numpy(self.tracts.affines).float()
        middle = (to_mm[:, :3, :3] @ ((self.tracts.fields.shapes - 1) / 2)[:, :, None])[:, :, 0] + to_mm[:, :3, 3]
        place, last = points[start] - middle[self.tracts.subject[self._line[places]]], F.normalize(steps, dim=1)
        known = torch.cat([place, reach * last], dim=1)
        queries = torch.cat([batch["start"] - middle[batch["subject"]], reach * batch["condition"][:, -3:]], dim=1)
        tree = require("scipy.spatial", "tractodiff").cKDTree(known.numpy())
        found = torch.from_numpy(tree.query(queries.numpy())[1])
        after = start[found, None] + torch.arange(1, NUM_POINTS + 1) * sense[found, None]
        return points[after] - points[start[found], None]

    def spread(self, count: int) -> Batch:
        """Return at most `count` samples, evenly spaced."""
        return self.__getitems__(np.linspace(0, len(self) - 1, min(count, len(self))).astype(int).tolist())

    def __reduce__(self) -> tuple[Any, ...]:
        """Send only the name of the folder to a worker process."""
        return SegmentDataset, (self.folder, self.split, self.seed)


def prepare(data_path: Path | None, cache: Path, *, data: Literal["volume", "bundles"], step: float) -> Path:
    """Return the folder with prepared data, created atomically if it does not exist."""
    make: Callable[[], list[Subject]]
    content: list[str]
    if data_path is None:
        make, content = (volume if data == "volume" else bundles), [data]
    else:
        if not data_path.is_dir():
            raise InputMissing(f"{data_path} is not a folder", where="data.path", fix=FORMATS)
        files = sorted(path for path in data_path.glob("*/*") if path.is_file())  # rglob would not follow links
        content = [
            str(data_path.resolve()),
            *(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files),
        ]
        make = partial(read_subjects, data_path)
    key = hashlib.sha256(json.dumps([VERSION, step, *content]).encode()).hexdigest()[:12]
    name = f"{data if data_path is None else data_path.name}-{key}"
    folder: Path = prepared(cache / name, lambda draft: write(make(), step, draft))
    return folder


def write(subjects: Sequence[Subject], step: float, folder: Path) -> None:
    """Write the prepared data. Raises DataError if no streamline is long enough for a segment."""
    lines, owner, split, bundle = [], [], [], []
    names = sorted({name for subject in subjects for name in subject.bundle})
    for number, subject in enumerate(subjects):
        for streamline, part, name in zip(subject.streamlines, subject.split, subject.bundle, strict=True):
            line = resample_by_step(streamline, step)
            if len(line) > NUM_POINTS + 1:
                lines.append(line)
                owner.append(number)
                split.append(SPLITS.index(part))
                bundle.append(names.index(name))
    for part in ("train", "val"):
        if SPLITS.index(part) not in split:
            what = f"no {part} streamline is at least {(NUM_POINTS + 1) * step:g} mm long (16 points every {step:g} mm)"
            raise DataError(what, where="data.path", fix="use longer streamlines, or a smaller task.step_mm")
    values = np.concatenate([subject.field.reshape(-1, NUM_CHANNELS) for subject in subjects])
    np.save(folder / "values.npy", values.astype(np.float16))
    np.savez(
        folder / "tracts.npz",
        names=np.array([subject.name for subject in subjects]),
        shapes=np.array([subject.field.shape[:3] for subject in subjects]),
        affines=np.array([subject.affine for subject in subjects]),
        points=np.concatenate(lines).astype(np.float32),
        ends=np.cumsum([len(line) for line in lines]),
        subject=np.array(owner),
        split=np.array(split),
        bundle=np.array(bundle),
        bundles=np.array(names),
    )


def read(folder: Path) -> Tracts:
    """Return prepared data; the fields stay on disk until they are read."""
    with np.load(folder / "tracts.npz") as file:
        parts = dict(file)
    values = torch.from_numpy(np.asarray(np.load(folder / "values.npy", mmap_mode="c")))
    to_voxel = torch.from_numpy(np.linalg.inv(parts["affines"])).float()
    fields = Fields(values, torch.from_numpy(parts["shapes"]), to_voxel)
    tensors = {name: torch.from_numpy(parts[name]) for name in ("points", "ends", "subject", "split", "bundle")}
    bundles = [str(name) for name in parts["bundles"]]
    return Tracts([str(name) for name in parts["names"]], fields, parts["affines"], **tensors, bundles=bundles)


VERSION = 5  # version of the prepared files; increase it when their content changes
