"""Episodes of pose estimation from COCO-keypoint files: one support image and queries of the same category.

A folder contains images/ and annotations/{train,val,test}.json, or mp100_split{fold}_{split}.json as in MP-100.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from runner.base.errors import ConfigError, DataError, InputMissing, Problem
from runner.base.packages import require
from runner.base.task import sample_rng

SPLITS = ("train", "val", "test")
FORMAT = (
    "a folder with images/ and annotations/train.json, val.json (and test.json) in the COCO-keypoint format, "
    "or annotations/mp100_split1_train.json and so on; see docs/tasks/cape.md"
)
BOX_MARGIN = (
    1.25  # side of a crop relative to the longer side of the box, as in Xu et al., Pose for Everything, ECCV 2022
)
MAX_CACHE_BYTES = 2**29  # maximum size of cached crops
Array = np.ndarray[Any, Any]
Crop = Literal["box", "image"]
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Category:
    """The keypoints of a category. `mirrored`: index of each one's counterpart in a mirror image; None if unknown."""

    id: int
    name: str
    num_keypoints: int
    skeleton: tuple[tuple[int, int], ...]
    mirrored: tuple[int, ...] | None


@dataclass(frozen=True)
class Annotation:
    """One object in one image.

    box        x, y, width, height in pixels
    keypoints  (K, 2) in pixels, zeros where invisible
    visible    (K,) bool
    outside    indices of the keypoints that are annotated as visible, but outside the image
    """

    id: int
    image: Path
    image_id: int
    image_size: tuple[int, int]
    category: Category
    box: tuple[float, float, float, float]
    keypoints: Array
    visible: Array
    outside: tuple[int, ...] = ()

    def square(self, crop: Crop) -> tuple[float, float, float]:
        """Return the crop: left, top and side in pixels."""
        x, y, width, height = (0.0, 0.0, *map(float, self.image_size)) if crop == "image" else self.box
        side = max(width, height) * (BOX_MARGIN if crop == "box" else 1.0)
        return x + (width - side) / 2, y + (height - side) / 2, side

    def visible_keypoints(self, crop: Crop) -> tuple[Array, Array]:
        """Return the keypoints (K, 2) relative to the crop, and whether each is visible and inside it (K,)."""
        left, top, side = self.square(crop)
        shares = (self.keypoints - [left, top]) / side
        within = self.visible & (shares >= 0).all(axis=1) & (shares <= 1).all(axis=1)
        return np.where(within[:, None], shares, 0.0), within


@dataclass(frozen=True)
class PoseSet:
    """The usable objects of a split, and the categories with at least two of them.

    left_out  number of other objects: crowds, and those without a box or a visible keypoint
    outside   number of visible keypoints outside their image, which count as invisible
    cut_off   number of visible keypoints outside the crop, which count as invisible
    """

    path: Path
    categories: tuple[Category, ...]
    annotations: tuple[Annotation, ...]
    left_out: int
    outside: int = 0
    cut_off: int = 0

    @property
    def max_keypoints(self) -> int:
        return max(category.num_keypoints for category in self.categories)


@dataclass(frozen=True)
class Augmentation:
    """Image augmentation: maximum angle in degrees, scale factor, shift relative to the side, and probabilities."""

    rotation: float = 30.0
    scale: float = 1.25
    translation: float = 0.1
    light: float = 0.2
    flip: float = 0.5


def read_pose_set(folder: Path, split: str, *, fold: int = 1, crop: Crop = "image") -> PoseSet:
    """Read a split of a folder. Raises InputMissing for missing files, DataError for invalid ones.

    crop  region of the image to use

    A warning counts the objects, categories and keypoints that are not used.
    """
    path = _find_annotations(folder, split, fold)
    content = _read_json(path)
    categories = {row["id"]: _category(path, row) for row in content["categories"]}
    images = {row["id"]: row for row in content["images"]}
    reasons: Counter[str] = Counter()
    annotations: list[Annotation] = []
    for row in content["annotations"]:
        if reason := _why_unusable(row):
            reasons[reason] += 1
        else:
            annotations.append(_annotation(path, row, images, categories, folder / "images"))
    within = [annotation.visible_keypoints(crop)[1] for annotation in annotations]
    usable = [annotation for annotation, seen in zip(annotations, within, strict=True) if seen.any()]
    reasons["without a visible keypoint"] += len(annotations) - len(usable)
    counts = Counter(annotation.category.id for annotation in usable)
    kept = tuple(category for category in categories.values() if counts[category.id] >= 2)
    if not kept:
        what = "must have at least one category with 2 objects, a support and a query"
        raise _fault(path, f"{what}, but has {len(categories)} categories and {len(usable)} usable objects")
    alone = [annotation for annotation in usable if counts[annotation.category.id] < 2]
    reasons["alone in their category"] += len(alone)
    poses = PoseSet(
        path,
        kept,
        tuple(annotation for annotation in usable if counts[annotation.category.id] >= 2),
        left_out=reasons.total(),
        outside=sum(len(annotation.outside) for annotation in annotations),
        cut_off=sum(int((one.visible & ~seen).sum()) for one, seen in zip(annotations, within, strict=True)),
    )
    _warn_about_unused(poses, reasons, len(categories) - len(kept), annotations, within)
    for image in {annotation.image for annotation in poses.annotations}:
        if not image.is_file():
            raise InputMissing(f"{image} is listed in {path.name}, but does not exist", where="data.path", fix=FORMAT)
    return poses


def _find_annotations(folder: Path, split: str, fold: int) -> Path:
    if not folder.is_dir():
        what = f"{folder} must be a folder" if folder.exists() else f"{folder} does not exist"
        raise InputMissing(what, where="data.path", fix=FORMAT)
    paths = _annotation_paths(folder, split, fold)
    found = [path for path in paths if path.is_file()]
    if not found:
        what = f"{folder / 'annotations'} has neither {paths[0].name} nor {paths[1].name}"
        raise InputMissing(what, where="data.path", fix=FORMAT)
    return found[0]


def has_split(folder: Path, split: str, fold: int) -> bool:
    """Return whether the folder has annotations for a split."""
    return any(path.is_file() for path in _annotation_paths(folder, split, fold))


def _annotation_paths(folder: Path, split: str, fold: int) -> list[Path]:
    return [folder / "annotations" / name for name in (f"{split}.json", f"mp100_split{fold}_{split}.json")]


def check_disjoint(sets: Sequence[PoseSet]) -> None:
    """Raise DataError if a category is in two splits."""
    for one, other in itertools.combinations(sets, 2):
        if both := {category.name for category in one.categories} & {category.name for category in other.categories}:
            what = f"must have no category in common with {one.path.name}, but has {', '.join(sorted(both)[:5])}"
            raise _fault(other.path, what)


def select_categories(poses: PoseSet, names: Sequence[str], where: str = "task.categories") -> PoseSet:
    """Return the set restricted to these categories. Raises ConfigError if a name is unknown or there is none.

    where  the setting with the names, for the message
    """
    known = {category.name for category in poses.categories}
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = f"{unknown[0]!r} is not a category of {poses.path}" if unknown else "must name at least one category"
        raise ConfigError(Problem(what, where, f"known are {', '.join(sorted(known)[:20])}"))
    kept = tuple(category for category in poses.categories if category.name in names)
    annotations = tuple(annotation for annotation in poses.annotations if annotation.category.name in names)
    return replace(poses, categories=kept, annotations=annotations)


class Episodes:
    """Sample i has object i as the support, and other objects of its category as queries.

    A batch is a dict of tensors; images are float32 from 0 to 1, coordinates are x, y relative to the image size:
    support_image (B, 3, S, S), support_xy (B, K, 2), support_visible (B, K), present (B, K), padded to the K keypoints
    of the largest category; query_image (B, Q, 3, S, S), query_xy (B, Q, K, 2), query_visible (B, Q, K),
    query_size (B, Q): longer side of the object; object (B, 1 + Q): positions in the set's annotations;
    pushed_out (B,) and redrawn (B,): numbers of keypoints moved out of the image, and of rejected poses.

    With augmentation, queries and transforms depend on seed, epoch and index; without it, queries depend on the index.
    """

    def __init__(
        self,
        poses: PoseSet,
        *,
        image_size: int,
        max_keypoints: int,
        queries: int = 2,
        crop: Crop = "image",
        augmentation: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        self.poses, self.image_size, self.max_keypoints, self.queries = poses, image_size, max_keypoints, queries
        self.crop, self.augmentation, self.seed, self.epoch = crop, augmentation, seed, 0
        self._members: dict[int, list[int]] = defaultdict(list)
        for position, annotation in enumerate(poses.annotations):
            self._members[annotation.category.id].append(position)
        self.pictures: dict[int, Tensor] = {}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.poses.annotations)

    def __getitem__(self, index: int) -> Batch:
        return {name: value[0] for name, value in self.__getitems__([index]).items()}

    def places(self, indices: Sequence[int]) -> Batch:
        """Return a batch without images and without augmentation."""
        rows = [self._objects(index, self._rng(index)) for index in indices]
        return self._as_batch(rows, *self._take(self._keypoints, rows))

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        return self.compose(self.load_fixed, indices)

    def load_fixed(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the crops (N, 3, S, S) of objects as uint8, and what `_keypoints` returns."""
        return torch.stack([self._picture(position) for position in indices]), *self._keypoints(indices)

    def compose(self, load: Callable[[Sequence[int]], Any], indices: Sequence[int]) -> Batch:
        """Draw the queries of each support, load all objects, and return them as a batch, with augmented images."""
        rngs = [self._rng(index) for index in indices]
        rows = [self._objects(index, rng) for index, rng in zip(indices, rngs, strict=True)]
        pictures, xy, visible, size = self._take(load, rows)
        pushed_out = redrawn = torch.zeros(len(rows), dtype=torch.int64)
        if self.augmentation is None:
            images = _as_floats(pictures)
        else:
            mirrored = [self.poses.annotations[row[0]].category.mirrored for row in rows]
            images, xy, visible, size, pushed_out, redrawn = augment(
                self.augmentation, rngs, pictures, xy, visible, size, mirrored
            )
        return {
            "support_image": images[:, 0],
            "query_image": images[:, 1:],
            **self._as_batch(rows, xy, visible, size),
            "pushed_out": pushed_out,
            "redrawn": redrawn,
        }

    def _take(self, load: Callable[[Sequence[int]], Any], rows: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Load the objects (B, 1 + Q) of episodes; return tensors (B, 1 + Q, ...)."""
        loaded = load([position for row in rows for position in row])
        return tuple(values.unflatten(0, (len(rows), 1 + self.queries)) for values in loaded)

    def _rng(self, index: int) -> np.random.Generator:
        return sample_rng(self.seed, self.epoch, index) if self.augmentation else sample_rng(0, 0, index)

    def _objects(self, index: int, rng: np.random.Generator) -> list[int]:
        others = [member for member in self._members[self.poses.annotations[index].category.id] if member != index]
        chosen = rng.choice(len(others), self.queries, replace=len(others) < self.queries)
        return [index, *(others[number] for number in chosen)]

    def _keypoints(self, positions: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return keypoints (N, K, 2) relative to the crop, their visibility in it (N, K), and object sizes (N,)."""
        xy = np.zeros((len(positions), self.max_keypoints, 2), dtype=np.float32)
        visible = np.zeros(xy.shape[:-1], dtype=np.bool_)
        size = np.zeros(len(positions), dtype=np.float32)
        for row, position in enumerate(positions):
            annotation = self.poses.annotations[position]
            shares, seen = annotation.visible_keypoints(self.crop)
            visible[row, : len(seen)] = seen
            xy[row, : len(seen)] = shares
            size[row] = max(annotation.box[2:]) / annotation.square(self.crop)[2]
        return torch.from_numpy(xy), torch.from_numpy(visible), torch.from_numpy(size)

    def _as_batch(self, rows: Sequence[Sequence[int]], xy: Tensor, visible: Tensor, size: Tensor) -> Batch:
        counts = torch.tensor([self.poses.annotations[row[0]].category.num_keypoints for row in rows])
        return {
            "support_xy": xy[:, 0],
            "support_visible": visible[:, 0],
            "present": torch.arange(self.max_keypoints) < counts[:, None],
            "query_xy": xy[:, 1:],
            "query_visible": visible[:, 1:],
            "query_size": size[:, 1:],
            "object": torch.tensor(rows),
        }

    def _picture(self, position: int) -> Tensor:
        """Return the crop (3, S, S) as uint8; pixels outside the image are gray."""
        if (kept := self.pictures.get(position)) is not None:
            return kept
        picture = read_crop(self.poses.annotations[position], self.crop, self.image_size)
        if (len(self.pictures) + 1) * picture.numel() <= MAX_CACHE_BYTES:
            self.pictures[position] = picture
        return picture

    def __getstate__(self) -> dict[str, Any]:
        """Do not send cached images to a worker process."""
        return {**self.__dict__, "pictures": {}}


def read_crop(annotation: Annotation, crop: Crop, image_size: int) -> Tensor:
    """Return the crop of the object (3, S, S) as uint8. Raises DataError for an invalid file or a wrong size."""
    pillow = require("PIL.Image", "cape")
    try:
        with pillow.open(annotation.image) as file:
            image = file.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise _fault(annotation.image, f"must be an image, but cannot be read: {error}") from error
    if image.size != annotation.image_size:
        expected, given = ("{} x {}".format(*size) for size in (annotation.image_size, image.size))
        raise _fault(annotation.image, f"must be {expected} pixels, as in the annotations, but is {given}")
    left, top, side = annotation.square(crop)
    if (left, top, side) != (0.0, 0.0, float(image_size)) or image.size != (image_size, image_size):
        scale = side / image_size
        # Pillow's affine transform does not filter, so a larger image is downscaled first.
        if (shrink := int(scale)) > 1:
            image = image.reduce(shrink)
            left, top, scale = left / shrink, top / shrink, scale / shrink
        matrix = (scale, 0.0, left, 0.0, scale, top)
        image = image.transform(
            (image_size, image_size),
            pillow.Transform.AFFINE,
            matrix,
            resample=pillow.Resampling.BILINEAR,
            fillcolor=(128, 128, 128),
        )
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def augment(
    augmentation: Augmentation,
    rngs: Sequence[np.random.Generator],
    pictures: Tensor,
    xy: Tensor,
    visible: Tensor,
    size: Tensor,
    mirrored: Sequence[Sequence[int] | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Augment pictures (B, N, 3, S, S) of uint8 independently.

    Returns pictures as float32 from 0 to 1; the new xy, visible and size; and, for each sample, the number of keypoints
    that left the image and the number of rejected poses.
    A flip exchanges left and right keypoints, so only categories with left and right keypoints are flipped.
    A pose with less than half of the visible keypoints inside the image is rejected and drawn again, at most ten times;
    then the image is not changed. Keypoints that leave the image become invisible.
    """
    B, N = xy.shape[:2]
    xy, visible, size = xy.clone(), visible.clone(), size.clone()
    back = torch.empty(B, N, 2, 3)  # transforms coordinates in the new image to those in the old one, both from -1 to 1
    lights = torch.empty(B, N, 3, 1, 1)
    pushed_out, redrawn = (torch.zeros(B, dtype=torch.int64) for _ in range(2))
    for b, n in itertools.product(range(B), range(N)):
        rng = rngs[b]
        lights[b, n] = torch.from_numpy(rng.uniform(1 - augmentation.light, 1 + augmentation.light, (3, 1, 1)))
        places, seen = 2 * xy[b, n].numpy().astype(np.float64) - 1, visible[b, n].numpy()
        for _ in range(11):
            flip = mirrored[b] is not None and rng.random() < augmentation.flip
            matrix, offset = _affine(augmentation, rng, flip=flip)
            moved = places @ matrix.T + offset
            inside = seen & (np.abs(moved) <= 1).all(axis=1)
            if inside.sum() * 2 >= seen.sum():
                break
            redrawn[b] += 1
        else:
            flip, matrix, offset, moved, inside = False, np.eye(2), np.zeros(2), places, seen
        pushed_out[b] += int(seen.sum() - inside.sum())
        moved = np.where(inside[:, None], (moved + 1) / 2, 0.0)
        if flip:
            order = list(mirrored[b] or ())
            order += range(len(order), len(moved))
            moved, inside = moved[order], inside[order]
        xy[b, n], visible[b, n] = torch.from_numpy(moved).float(), torch.from_numpy(inside)
        size[b, n] *= math.sqrt(abs(np.linalg.det(matrix)))
        inverse = np.linalg.inv(matrix)
        back[b, n] = torch.from_numpy(np.concatenate([inverse, -(inverse @ offset)[:, None]], axis=1))
    images = torch.empty(pictures.shape)
    for b in range(B):  # sample by sample, because the pictures of one sample fit into the CPU cache
        grid = F.affine_grid(back[b], list(pictures[b].shape), align_corners=False)
        warped = F.grid_sample(_as_floats(pictures[b]), grid, padding_mode="reflection", align_corners=False)
        torch.mul(warped, lights[b], out=images[b]).clamp_(0, 1)
    return images, xy, visible, size, pushed_out, redrawn


def _as_floats(pictures: Tensor) -> Tensor:
    return pictures.float().div_(255)


def copy_support(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the support's keypoints (B, Q, K, 2) as predictions; an invisible one is the mean of the visible ones."""
    xy, visible = batch["support_xy"], batch["support_visible"][..., None]
    mean = (xy * visible).sum(dim=1, keepdim=True) / visible.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(visible, xy, mean)[:, None].expand_as(batch["query_xy"])


def _affine(augmentation: Augmentation, rng: np.random.Generator, *, flip: bool) -> tuple[Array, Array]:
    angle = math.radians(rng.uniform(-augmentation.rotation, augmentation.rotation))
    scale = augmentation.scale ** rng.uniform(-1, 1)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    offset = 2 * rng.uniform(-augmentation.translation, augmentation.translation, 2)
    return scale * turn @ np.diag([-1.0 if flip else 1.0, 1.0]), offset


def mirrored_keypoints(names: Sequence[str]) -> tuple[int, ...] | None:
    """Return the index of each keypoint's counterpart in a mirrored image, from names such as left_eye and R_Knee.

    Returns None if no name has a side.
    """
    places = {name.lower(): index for index, name in enumerate(names)}
    order = [places.get(_other_side(name.lower()), index) for index, name in enumerate(names)]
    return tuple(order) if order != list(range(len(names))) else None


def _other_side(name: str) -> str:
    exchange = {"left": "right", "right": "left", "l": "r", "r": "l"}
    # Single letters count only as separate words: L_Eye, eye.l
    return re.sub(r"left|right|(?<![a-z])[lr](?![a-z])", lambda found: exchange[found[0]], name)


# Reading


def _fault(path: Path, what: str) -> DataError:
    return DataError(what, where=str(path), fix=FORMAT)


def _read_json(path: Path) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _fault(path, f"must be JSON, but is not: {error}") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise _fault(path, f"must be a COCO-keypoint file with a list of {key}, but has none")
        for number, row in enumerate(content[key]):
            if not isinstance(row, dict) or not _is_integer(row.get("id")):
                raise _fault(path, f"{key}[{number}] must be an object with an integer as id")
    return content


def _category(path: Path, row: Mapping[str, Any]) -> Category:
    names = row.get("keypoints")
    if not isinstance(names, list) or not names or not isinstance(row.get("name"), str):
        raise _fault(path, f"category {row['id']} must have a name and a list of at least one keypoint name")
    pairs = [] if row.get("skeleton") is None else row["skeleton"]
    count = len(names)
    are_pairs = isinstance(pairs, list) and all(
        _is_number_list(pair, 2) and all(map(_is_integer, pair)) for pair in pairs
    )
    ends = [end for pair in pairs for end in pair] if are_pairs else [-1]
    first = 0 if 0 in ends else 1  # MP-100 counts from 0, COCO from 1
    if not all(first <= end < first + count for end in ends):
        raise _fault(
            path, f"skeleton of category {row['id']} must hold pairs of numbers from {first} to {first + count - 1}"
        )
    skeleton = tuple((start - first, end - first) for start, end in pairs)
    return Category(row["id"], row["name"], len(names), skeleton, mirrored_keypoints(list(map(str, names))))


def _annotation(
    path: Path,
    row: Mapping[str, Any],
    images: Mapping[int, Mapping[str, Any]],
    categories: Mapping[int, Category],
    folder: Path,
) -> Annotation:
    name = f"annotation {row['id']}"
    image = images.get(row["image_id"]) if _is_integer(row.get("image_id")) else None
    category = categories.get(row["category_id"]) if _is_integer(row.get("category_id")) else None
    if image is None or category is None:
        missing = "image_id" if image is None else "category_id"
        raise _fault(path, f"{name} must have the {missing} of an entry of this file, but has {row.get(missing)!r}")
    size: list[Any] = [image.get("width"), image.get("height")]
    if (
        not isinstance(image.get("file_name"), str)
        or not _is_number_list(size, 2)
        or not all(_is_integer(side) and side > 0 for side in size)
    ):
        raise _fault(path, f"image {image['id']} must have file_name, and width and height as integers above 0")
    points = _keypoints_of(row.get("keypoints"), category.num_keypoints)
    if points is None:
        length = len(row["keypoints"]) if isinstance(row.get("keypoints"), list) else 0
        count = category.num_keypoints
        what = f"must have x, y, visibility for each of the {count} keypoints of category {category.name!r}"
        raise _fault(path, f"{name} {what}: {3 * count} numbers, but has {length}")
    if not _is_number_list(row.get("bbox"), 4):
        raise _fault(path, f"{name} must have a bbox of x, y, width, height above 0, but has {row.get('bbox')}")
    visible = points[:, 2] > 0
    outside = visible & ((points[:, :2] < 0) | (points[:, :2] > size)).any(axis=1)
    visible &= ~outside
    # The coordinates of an invisible point are undefined, so they are masked.
    keypoints = np.where(visible[:, None], points[:, :2], 0.0)
    left_out = tuple(outside.nonzero()[0].tolist())
    file, width, height = folder / image["file_name"], size[0], size[1]
    box = tuple(map(float, row["bbox"]))
    return Annotation(row["id"], file, image["id"], (width, height), category, box, keypoints, visible, left_out)  # type: ignore[arg-type]


def _why_unusable(row: Mapping[str, Any]) -> str:
    """Return why an object of a valid file is not used, or an empty string."""
    if row.get("iscrowd") in (1, True):
        return "marked as a crowd"
    keypoints = row.get("keypoints", [])
    if keypoints is None or (keypoints == [] and not row.get("num_keypoints")):
        return "without keypoints"
    if _is_number_list(row.get("bbox"), 4) and min(row["bbox"][2:]) <= 0:
        return "with an empty box"
    return ""


def _keypoints_of(values: Any, count: int) -> Array | None:
    """Return keypoints (K, 3): x, y, visibility; None if `values` are not `count` keypoints.

    A keypoint whose visibility is null is invisible. If `values` have no visibilities, keypoints at (0, 0) are
    invisible, as in COCO.
    """
    if _is_number_list(values, 2 * count):
        xy = np.array(values, dtype=np.float64).reshape(-1, 2)
        return np.concatenate([xy, xy.any(axis=1, keepdims=True)], axis=1)
    if isinstance(values, list):
        values = [0 if value is None and place % 3 == 2 else value for place, value in enumerate(values)]
    return np.array(values, dtype=np.float64).reshape(-1, 3) if _is_number_list(values, 3 * count) else None


def _warn_about_unused(
    poses: PoseSet,
    reasons: Mapping[str, int],
    num_categories: int,
    annotations: Sequence[Annotation],
    within: Sequence[Array],
) -> None:
    """Warn about unused objects, categories and keypoints, and name the first keypoint outside its image or crop."""
    lines = []
    if poses.left_out:
        parts = ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
        lines.append(f"{poses.left_out} of {len(poses.annotations) + poses.left_out} objects are not used: {parts}")
    if num_categories:
        lines.append(f"{num_categories} categories with fewer than 2 objects are not used")
    if poses.outside:
        first = next(one for one in annotations if one.outside)
        where = f"the first is keypoint {first.outside[0] + 1} of annotation {first.id}"
        lines.append(f"{poses.outside} visible keypoints are outside their image and count as invisible; {where}")
    if poses.cut_off:
        # Not an error: occluded keypoints may be annotated outside the box of the visible part of an object.
        first, point = next(
            (one, point)
            for one, seen in zip(annotations, within, strict=True)
            for point in (one.visible & ~seen).nonzero()[0]
        )
        x, y = first.keypoints[point]
        lines.append(
            f"{poses.cut_off} visible keypoints lie outside {BOX_MARGIN:g} times the box of their object "
            f"and count as invisible; the first is keypoint {point + 1} of annotation {first.id} at {x:g}, {y:g}, "
            f"box {', '.join(f'{value:g}' for value in first.box)}"
        )
    if lines:
        warnings.warn(f"{poses.path}: {'. '.join(lines)}", stacklevel=3)


def _is_number_list(value: Any, count: int) -> bool:
    if not isinstance(value, list) or len(value) != count:
        return False
    # The comparison is false for NaN, and exact for integers that no float can hold.
    return all((_is_integer(item) or isinstance(item, float)) and abs(item) <= sys.float_info.max for item in value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
