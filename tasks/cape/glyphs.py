"""Glyphs as pose estimation data: the fonts of matplotlib, written in the COCO-keypoint format.

A letter is a category, and each font draws it in a different shape. If the outlines of a letter in two fonts have equal
path codes, their points correspond, and the keypoints are selected from them. Every image shows one letter with a
random pose, color and background.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from runner.tasks.gpt.data import prepared

from runner.base.packages import require
from runner.base.task import sample_rng

VERSION = 4  # increase it when the images change
FONTS = [
    f"DejaVu{family}{style}.ttf"
    for family, styles in {
        "Sans": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "SansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "Serif": ("", "-Bold", "-Italic", "-BoldItalic"),
    }.items()
    for style in styles
]
MIN_FONTS = 4  # minimum number of fonts in which the points of a letter correspond
KEYPOINTS = (5, 12)  # minimum and maximum per letter; bars and blocks have fewer
MIN_INSIDE = 0.75  # minimum fraction of the keypoints inside the image; with fewer, another pose is drawn
HELD_OUT = {"val": 0.2, "test": 0.1}  # fraction of the letters
# Two letters are similar if the residual of the best affine map, relative to the letter size, is at most this: it is
# 0.074 for M and a rotated Σ, and 0.089 for Latin w and Cyrillic м, which differ in their angles.
LIKENESS = 0.08
MAX_ORDERS = 500  # maximum number of starting-point combinations; if there are more, only the original one is tried
# Words in Unicode names that distinguish the forms of one letter.
FORMS = r"\b(CAPITAL|SMALL|LETTER|TURNED|REVERSED|INVERTED|SIDEWAYS|OPEN|LONG|SCRIPT)\b ?| WITH .*"
MOVE, LINE, CURVE, END = 1, 2, 3, 79  # path codes of matplotlib
SUPERSAMPLING = 2  # drawn pixels per pixel and axis
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Letter:
    """A category: the outlines of a letter in the fonts with corresponding points.

    codes      path codes (P,)
    outlines   font -> points (P, 2), centered at 0, with a longer side of 1, y upwards
    keypoints  indices of the keypoints, in the order of the outline
    skeleton   pairs of consecutive keypoints on the outline
    """

    name: str
    codes: tuple[int, ...]
    outlines: Mapping[str, Array]
    keypoints: tuple[int, ...]
    skeleton: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Drawing:
    """An image of a letter.

    picture    (S, S, 3) uint8
    keypoints  (K, 3): x and y in pixels, visibility 2; all 0 outside the image
    box        x, y, width and height in pixels
    redrawn    number of rejected poses
    """

    picture: Array
    keypoints: Array
    box: Array
    redrawn: int


def write_glyphs(folder: Path, splits: Mapping[str, Sequence[Letter]], *, image_size: int, seed: int = 0) -> None:
    """Write images/ and annotations/{train,val,test}.json to `folder`: each letter once in each of its fonts.

    splits      the letters of each split, as returned by `letters_by_split`
    image_size  height and width of the images in pixels
    """
    pillow = require("PIL.Image", "cape")
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "annotations").mkdir(exist_ok=True)
    numbers = itertools.count(1)
    for split, letters in splits.items():
        images, annotations, drawings = [], [], []
        for category, letter in enumerate(letters, 1):
            for font, number in zip(letter.outlines, numbers, strict=False):
                drawing = draw(letter, font, image_size=image_size, rng=sample_rng(seed, 0, number))
                file_name = f"{ord(letter.name):04x}-{font.removesuffix('.ttf')}.png"
                pillow.fromarray(drawing.picture).save(folder / "images" / file_name, compress_level=1)
                images.append({"id": number, "file_name": file_name, "width": image_size, "height": image_size})
                annotations.append({"id": number, "image_id": number, "category_id": category, **_coco(drawing)})
                drawings.append(drawing)
        info = {
            "description": f"letters of the DejaVu fonts, version {VERSION}",
            "keypoints_outside": sum(int((drawing.keypoints[:, 2] == 0).sum()) for drawing in drawings),
            "poses_redrawn": sum(drawing.redrawn for drawing in drawings),
        }
        categories = [_category(number, letter) for number, letter in enumerate(letters, 1)]
        content = {"info": info, "images": images, "categories": categories, "annotations": annotations}
        (folder / "annotations" / f"{split}.json").write_text(json.dumps(content), encoding="utf-8")


def prepare_glyphs(cache: Path, *, image_size: int, seed: int = 0) -> Path:
    """Return a folder in `cache` with the output of `write_glyphs`; it is created atomically if it does not exist."""
    folder: Path = prepared(
        cache / f"glyphs-v{VERSION}-{image_size}-{seed}",
        lambda draft: write_glyphs(draft, letters_by_split(), image_size=image_size, seed=seed),
    )
    return folder


def letters_by_split() -> dict[str, list[Letter]]:
    """Return the letters of train, val and test; no letter of val or test resembles one of train.

    Related letters are in the same split: forms of one letter by their Unicode names (case, small capitals, turned,
    with a hook), letters with a common contour, and affine images of each other, such as the same letter in Latin,
    Greek and Cyrillic. Letters of val and test that still resemble one of train, for example mirrored, are omitted.
    """
    letters = all_letters()
    kin = {letter.name: letter.name for letter in letters}

    def root(name: str) -> str:
        while kin[name] != name:
            name = kin[name]
        return name

    for one, other in _similar_pairs(letters):
        first, second = sorted((root(one), root(other)))
        kin[second] = first
    splits: dict[str, list[Letter]] = {"train": [], "val": [], "test": []}
    for letter in letters:
        digest = hashlib.sha256(root(letter.name).encode()).digest()
        share = int.from_bytes(digest[:8], "big") / 2**64
        val, test = HELD_OUT["val"], HELD_OUT["test"]
        splits["val" if share < val else "test" if share < val + test else "train"].append(letter)
    for split in HELD_OUT:
        alike = find_resembling(splits[split], splits["train"])
        splits[split] = [letter for letter in splits[split] if letter.name not in alike]
    return splits


def find_resembling(letters: Sequence[Letter], others: Sequence[Letter]) -> set[str]:
    """Return the names of the letters that are an affine image, possibly mirrored, of one of the others in any font.

    Compares keypoints and all corners, for all pairs of fonts, all directions and all starting points of the outlines.
    """
    found: set[str] = set()
    for chosen in (lambda letter: letter.keypoints, lambda letter: _corners(letter.codes)):
        shapes: dict[tuple[int, ...], list[Array]] = defaultdict(list)
        for other in others:
            for counts, orders in _orders(_by_contour(other.codes, chosen(other))):
                shapes[counts] += [outline[orders] for outline in other.outlines.values()]
        table = {counts: np.concatenate(places) for counts, places in shapes.items()}
        for letter in letters:
            contours = _by_contour(letter.codes, chosen(letter))
            if (targets := table.get(tuple(map(len, contours)))) is not None:
                for outline in letter.outlines.values():
                    lifted = np.insert(outline[list(itertools.chain(*contours))], 2, 1.0, axis=1)
                    # The residual of this projection is the part that no affine map of the points explains.
                    left = targets - lifted @ (np.linalg.pinv(lifted) @ targets)
                    if (left**2).sum(axis=2).max(axis=1).min() < LIKENESS**2:
                        found.add(letter.name)
    return found


def all_letters() -> list[Letter]:
    """Return the letters and digits for which enough fonts have corresponding points, each shape once."""
    import matplotlib as mpl  # slow to import
    from matplotlib import ft2font

    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    drawn: dict[str, dict[str, tuple[tuple[int, ...], Array]]] = defaultdict(dict)
    for name in FONTS:
        font = ft2font.FT2Font(str(folder / name))
        font.set_size(1000, 72)  # large, so that hinting, which rounds points to pixels, has no visible effect
        for code in sorted(font.get_charmap()):
            letter = chr(code)
            if letter.isalnum() and not unicodedata.decomposition(letter) and unicodedata.category(letter) != "Cn":
                font.load_char(code)
                points, codes = font.get_path()
                drawn[letter][name] = _close_contours(tuple(map(int, codes)), np.array(points, dtype=np.float64))
    letters: list[Letter] = []
    seen: set[bytes] = set()
    for name, outlines in sorted(drawn.items()):
        made = _letter(name, outlines)
        if made is not None and not seen & (shapes := _shapes(made)):
            seen |= shapes
            letters.append(made)
    return letters


def _letter(name: str, outlines: Mapping[str, tuple[tuple[int, ...], Array]]) -> Letter | None:
    """Return the letter in the largest set of fonts whose points correspond; None if there is none."""
    fonts: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for font, (codes, _) in outlines.items():
        fonts[codes].append(font)
    codes = max(fonts, key=lambda key: len(fonts[key]))
    if len(fonts[codes]) < MIN_FONTS or len(codes) < KEYPOINTS[0]:
        return None
    shapes = {font: _center(outlines[font][1]) for font in fonts[codes]}
    reference = next(iter(shapes.values()))
    # Outlines with equal codes may start at different corners. Then the shapes are not even roughly affine images of
    # each other, or only after a rotation, as with X and И.
    shapes = {
        font: shape
        for font, shape in shapes.items()
        if _affine_error(reference, shape) < 0.15 and np.abs(reference - shape).max() < 0.3
    }
    keypoints = _select_keypoints(codes, np.mean(list(shapes.values()), axis=0))
    if len(shapes) < MIN_FONTS or len(keypoints) < KEYPOINTS[0]:
        return None
    return Letter(name, codes, shapes, keypoints, _skeleton(codes, keypoints))


def _close_contours(codes: tuple[int, ...], points: Array) -> tuple[tuple[int, ...], Array]:
    """Return the outline with each closing point, which matplotlib ignores, moved to the start of its contour."""
    for contour in _contours(codes):
        ends = [index for index in contour if codes[index] == END]
        points[ends] = points[contour.start]
    return codes, points


def _center(points: Array) -> Array:
    low, high = points.min(axis=0), points.max(axis=0)
    shape: Array = (points - (low + high) / 2) / max((high - low).max(), 1e-9)
    return shape


def _affine_error(one: Array, other: Array) -> float:
    """Return the maximum distance between two outlines after the best affine map."""
    lifted = np.concatenate([one, np.ones((len(one), 1))], axis=1)
    solution = np.linalg.lstsq(lifted, other, rcond=None)[0]
    return float(np.abs(lifted @ solution - other).max())


def _corners(codes: Sequence[int]) -> list[int]:
    """Return the points on the outline, without the control points of curves."""
    on_outline, curve = [], 0
    for index, code in enumerate(codes):
        curve = curve + 1 if code == CURVE else 0
        if code in (MOVE, LINE) or (code == CURVE and curve % 2 == 0):
            on_outline.append(index)
    return on_outline


def _select_keypoints(codes: Sequence[int], shape: Array) -> tuple[int, ...]:
    """Return up to twelve distant points of the outline, in the order of the outline.

    Farthest-point sampling; it ends if the next point is closer than 0.12 of the letter size to a selected one.
    """
    corners = _corners(codes)
    places = shape[corners]
    distances = np.linalg.norm(places - places.mean(axis=0), axis=1)
    chosen = [int(distances.argmax())]
    distances = np.linalg.norm(places - places[chosen[0]], axis=1)
    while len(chosen) < KEYPOINTS[1] and distances.max() > 0.12:
        chosen.append(int(distances.argmax()))
        distances = np.minimum(distances, np.linalg.norm(places - places[chosen[-1]], axis=1))
    return tuple(sorted(corners[index] for index in chosen))


def _contours(codes: Sequence[int]) -> list[range]:
    starts = [index for index, code in enumerate(codes) if code == MOVE]
    return [range(start, end) for start, end in itertools.pairwise([*starts, len(codes)])]


def _by_contour(codes: Sequence[int], points: Sequence[int]) -> list[list[int]]:
    found = [[point for point in points if point in contour] for contour in _contours(codes)]
    return [members for members in found if members]


def _orders(contours: Sequence[Sequence[int]]) -> Iterator[tuple[tuple[int, ...], Array]]:
    """Yield the points in other orders (N, P): contours in any order, in both directions, from any starting point.

    Each element also contains the number of points of its contours.
    """
    for order in itertools.permutations(contours) if len(contours) <= 3 else [tuple(contours)]:
        counts = tuple(map(len, order))
        starts = [range(count if math.prod(counts) <= MAX_ORDERS else 1) for count in counts]
        for step in (1, -1):
            walked = [list(contour)[::step] for contour in order]
            yield (
                counts,
                np.array(
                    [
                        [
                            point
                            for contour, start in zip(walked, chosen, strict=True)
                            for point in contour[start:] + contour[:start]
                        ]
                        for chosen in itertools.product(*starts)
                    ]
                ),
            )


def _skeleton(codes: Sequence[int], keypoints: Sequence[int]) -> tuple[tuple[int, int], ...]:
    pairs: list[tuple[int, int]] = []
    for contour in _contours(codes):
        members = [number for number, point in enumerate(keypoints) if point in contour]
        pairs += itertools.pairwise(members)
        if len(members) > 2:
            pairs.append((members[-1], members[0]))
    return tuple(pairs)


def _shapes(letter: Letter) -> set[bytes]:
    """Return keys that are equal for letters with the same shape in a font."""
    return {
        f"{font}{letter.codes}".encode() + np.round(shape, 2).astype(np.float32).tobytes()
        for font, shape in letter.outlines.items()
    }


def _similar_pairs(letters: Sequence[Letter]) -> Iterator[tuple[str, str]]:
    forms: dict[str, str] = {}
    contours: dict[tuple[Any, ...], str] = {}
    alike: dict[tuple[int, ...], list[Letter]] = defaultdict(list)
    for letter in letters:
        base = re.sub(FORMS, "", unicodedata.name(letter.name))
        yield letter.name, forms.setdefault(base, letter.name)
        for font, shape in letter.outlines.items():
            for contour in _contours(letter.codes):
                piece = _center(shape[contour.start : contour.stop])
                if len(piece) > 6:
                    key = (font, len(piece), np.round(piece, 1).astype(np.float32).tobytes())
                    yield letter.name, contours.setdefault(key, letter.name)
        for other_letter in alike[letter.codes]:
            one, other_shape = (next(iter(each.outlines.values())) for each in (letter, other_letter))
            if min(_affine_error(one, other_shape), _affine_error(other_shape, one)) < LIKENESS:
                yield letter.name, other_letter.name
        alike[letter.codes].append(letter)


# Drawing


def draw(letter: Letter, font: str, *, image_size: int, rng: np.random.Generator) -> Drawing:
    """Draw the letter in this font with a random pose, color and background."""
    shape, chosen = letter.outlines[font], list(letter.keypoints)
    redrawn, pixels = 0, _random_pose(rng, shape, image_size)
    while (visible := _inside(pixels[chosen], image_size)).mean() < MIN_INSIDE:
        redrawn, pixels = redrawn + 1, _random_pose(rng, shape, image_size)
    picture = _render(rng, letter.codes, pixels, image_size)
    keypoints = np.where(visible[:, None], np.insert(pixels[chosen].round(2), 2, 2.0, axis=1), 0.0)
    low, high = pixels.min(axis=0).clip(0, image_size), pixels.max(axis=0).clip(0, image_size)
    return Drawing(picture, keypoints, np.concatenate([low, high - low]).round(2), redrawn)


def _random_pose(rng: np.random.Generator, shape: Array, image_size: int) -> Array:
    """Return the points in pixels, with random rotation, scale, shear, stretch and position."""
    angle, shear = rng.uniform(-math.pi / 4, math.pi / 4), rng.uniform(-0.25, 0.25)
    stretch = math.exp(rng.uniform(-0.2, 0.2))
    size = image_size * rng.uniform(0.42, 0.8)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    flip_y = np.diag([1.0, -1.0])  # rows of pixels go downwards
    matrix = size * turn @ np.array([[stretch, shear], [0.0, 1 / stretch]]) @ flip_y
    extent = np.abs(shape @ matrix.T).max(axis=0)
    margin = np.maximum(image_size / 2 - 0.9 * extent, 0.0)
    pixels: Array = shape @ matrix.T + image_size / 2 + rng.uniform(-margin, margin)
    return pixels


def _inside(points: Array, image_size: int) -> Array:
    return np.all((points >= 0) & (points < image_size), axis=1)  # type: ignore[no-any-return]


def _render(rng: np.random.Generator, codes: Sequence[int], pixels: Array, image_size: int) -> Array:
    """Draw the letter in one color on a background of smooth spots: (S, S, 3) uint8."""
    from matplotlib.path import Path as Outline

    images, draws = require("PIL.Image", "cape"), require("PIL.ImageDraw", "cape")
    fine = image_size * SUPERSAMPLING
    winding = np.zeros((fine, fine), dtype=np.int8)
    for polygon in Outline(pixels * SUPERSAMPLING, list(codes)).to_polygons(closed_only=True):
        mask = images.new("1", (fine, fine))
        draws.Draw(mask).polygon([tuple(point) for point in polygon.tolist()], fill=1)
        x, y = polygon[:-1].T
        area = float((x * np.roll(y, -1) - y * np.roll(x, -1)).sum())
        winding += np.where(np.asarray(mask), 1 if area > 0 else -1, 0).astype(
            np.int8
        )  # holes have the opposite orientation
    cover = (winding != 0).reshape(image_size, SUPERSAMPLING, image_size, SUPERSAMPLING).mean(axis=(1, 3))[..., None]
    light = rng.uniform(0.0, 0.35, 3) if rng.random() < 0.5 else rng.uniform(0.65, 1.0, 3)
    dark = 1.0 - light + rng.uniform(-0.15, 0.15, 3)
    blotches = images.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
    background = light + 0.3 * (np.asarray(blotches.resize((image_size, image_size), images.BICUBIC)) / 255.0 - 0.5)
    picture = background * (1 - cover) + dark * cover + rng.normal(0.0, 0.03, (image_size, image_size, 3))
    painted: Array = (picture.clip(0.0, 1.0) * 255).round().astype(np.uint8)
    return painted


def _coco(drawing: Drawing) -> dict[str, Any]:
    x, y, width, height = drawing.box.tolist()
    return {
        "keypoints": drawing.keypoints.reshape(-1).tolist(),
        "num_keypoints": int((drawing.keypoints[:, 2] > 0).sum()),
        "bbox": [x, y, width, height],
        "area": width * height,
        "iscrowd": 0,
    }


def _category(number: int, letter: Letter) -> dict[str, Any]:
    return {
        "id": number,
        "name": letter.name,
        "supercategory": unicodedata.name(letter.name).split()[0].lower(),
        "keypoints": [f"point {point}" for point in range(1, len(letter.keypoints) + 1)],
        "skeleton": [[start + 1, end + 1] for start, end in letter.skeleton],
    }
