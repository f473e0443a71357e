"""Letters are drawn, written and read back consistently; splits are disjoint; invalid data is rejected."""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runner.tasks.cape.data import (
    Annotation,
    Augmentation,
    Category,
    Episodes,
    augment,
    check_disjoint,
    copy_support,
    mirrored_keypoints,
    read_crop,
    read_pose_set,
    select_categories,
)
from runner.tasks.cape.glyphs import KEYPOINTS, Letter, draw, find_resembling, letters_by_split, write_glyphs
from runner.tasks.cape.task import build

from runner.base.errors import AccelRunError, ConfigError, DataError, InputMissing
from runner.base.task import Context, sample_rng
from tests.rounding import assert_close

SIDE = 32
Splits = dict[str, list[Letter]]
Content = dict[str, Any]


@pytest.fixture(scope="module")
def letters() -> Splits:
    made: Splits = letters_by_split()
    return made


@pytest.fixture(scope="module")
def few(letters: Splits) -> Splits:
    return {"train": letters["train"][:6], "val": letters["val"][:3], "test": letters["test"][:2]}


@pytest.fixture(scope="module")
def written(few: Splits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glyphs")
    write_glyphs(folder, few, image_size=SIDE)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "glyphs"))


def episodes(folder: Path, split: str = "train", **options: Any) -> Episodes:
    return Episodes(read_pose_set(folder, split), **{"image_size": SIDE, "max_keypoints": 12, **options})


def changed(folder: Path, change: Callable[[Content], object], split: str = "train") -> Path:
    path = folder / "annotations" / f"{split}.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return folder


# The letters


@pytest.mark.slow
def test_letters_have_the_same_points_in_every_font(letters: Splits) -> None:
    every = [letter for split in letters.values() for letter in split]
    assert len(every) > 400
    assert min(map(len, letters.values())) > 30
    for letter in every:
        assert len(letter.outlines) >= 4
        assert KEYPOINTS[0] <= len(letter.keypoints) <= KEYPOINTS[1]
        assert all(shape.shape == (len(letter.codes), 2) for shape in letter.outlines.values())
        places = np.stack(list(letter.outlines.values()))[:, list(letter.keypoints)]
        assert np.abs(places - places.mean(axis=0)).max() < 0.3, "the keypoint must be the same corner in every font"


@pytest.mark.slow
def test_similar_letters_are_in_the_same_split(letters: Splits) -> None:
    names = {split: {letter.name for letter in members} for split, members in letters.items()}
    assert sum(map(len, names.values())) == len(set.union(*names.values()))
    where = {name: split for split, members in names.items() for name in members}
    for kin in ("Hhʜɥɦ", "Kkʞ", "Aaɐ", "EƎǝɘ", "Łł"):
        assert len({where[name] for name in kin if name in where}) == 1, kin


@pytest.mark.slow
def test_held_out_letters_do_not_resemble_training_letters(letters: Splits) -> None:
    assert find_resembling([*letters["val"], *letters["test"]], letters["train"]) == set()
    where = {letter.name: split for split, members in letters.items() for letter in members}
    for likenesses in ("F\ua7fb\u2132\U00010305", "S\u01a7", "s\u01a8", "\u0394\u1401", "M\u01a9", "v\u039b"):
        assert len({where[name] for name in likenesses if name in where}) == 1, likenesses


@pytest.mark.slow
def test_letters_resemble_their_mirror_images(letters: Splits) -> None:
    letter = next(letter for letter in letters["train"] if letter.name == "F")
    points = [point for point, code in enumerate(letter.codes) if code != 79]
    assert letter.codes[:-1] == (1, *[2] * (len(points) - 1)), "one contour of straight lines"
    skewed = np.array([[-0.9, 0.3], [0.2, 1.1]])
    for start in (0, 3):
        order = np.roll(points[::-1], start)
        outlines = {
            font: np.append(shape[order], shape[order[:1]], axis=0) @ skewed for font, shape in letter.outlines.items()
        }
        mirrored = replace(letter, name="mirrored", outlines=outlines, keypoints=tuple(points))
        assert find_resembling([mirrored], [letter]) == {"mirrored"}
    bent = {font: shape + 0.3 * np.sin(9 * shape[:, ::-1]) for font, shape in letter.outlines.items()}
    assert find_resembling([replace(letter, name="bent", outlines=bent)], [letter]) == set()


@pytest.mark.slow
def test_letters_are_drawn_at_their_keypoints(few: Splits) -> None:
    letter = next(letter for letter in few["train"] if letter.name == "1")
    drawing = draw(letter, "DejaVuSans-Bold.ttf", image_size=64, rng=sample_rng(0, 0, 1))
    picture = drawing.picture.astype(float)
    places = drawing.keypoints[drawing.keypoints[:, 2] > 0, :2]
    assert drawing.picture.shape == (64, 64, 3)
    assert (places >= drawing.box[:2] - 0.01).all()
    assert (places <= drawing.box[:2] + drawing.box[2:] + 0.01).all()
    # both colors occur around each corner of the letter
    for column, row in places:
        top, left = (int(min(max(value - 2, 0), 60)) for value in (row, column))
        assert np.ptp(picture[top : top + 4, left : left + 4], axis=(0, 1)).max() > 60


@pytest.mark.slow
def test_keypoints_outside_of_a_posed_picture_are_counted(written: Path) -> None:
    for split in ("train", "val", "test"):
        content = json.loads((written / "annotations" / f"{split}.json").read_text())
        triples = [np.array(row["keypoints"]).reshape(-1, 3) for row in content["annotations"]]
        outside = sum(int((points[:, 2] == 0).sum()) for points in triples)
        assert content["info"]["keypoints_outside"] == outside
        assert all((points[:, 2] > 0).mean() >= 0.75 for points in triples)
        assert [row["num_keypoints"] for row in content["annotations"]] == [(p[:, 2] > 0).sum() for p in triples]


@pytest.mark.slow
def test_written_records_are_read_back(written: Path, few: Splits) -> None:
    number = 0
    for split, letters in few.items():
        poses = read_pose_set(written, split)
        assert [category.name for category in poses.categories] == [letter.name for letter in letters]
        assert [category.skeleton for category in poses.categories] == [letter.skeleton for letter in letters]
        assert poses.left_out == 0
        pairs = [(letter, font) for letter in letters for font in letter.outlines]
        for annotation, (letter, font) in zip(poses.annotations, pairs, strict=True):
            number += 1
            drawing = draw(letter, font, image_size=SIDE, rng=sample_rng(0, 0, number))
            assert annotation.category.name == letter.name
            assert np.array_equal(annotation.keypoints, drawing.keypoints[:, :2])
            assert np.array_equal(annotation.visible, drawing.keypoints[:, 2] > 0)
            assert annotation.box == tuple(drawing.box)
            picture = read_crop(annotation, "image", SIDE).permute(1, 2, 0).numpy()
            assert np.array_equal(picture, drawing.picture)


# Episodes


@pytest.mark.slow
def test_a_batch_equals_its_stacked_samples(written: Path) -> None:
    for augmentation in (None, Augmentation()):
        data = episodes(written, augmentation=augmentation)
        batch = data.__getitems__([4, 0, 4])
        for row, index in enumerate([4, 0, 4]):
            for name, value in data[index].items():
                assert torch.equal(batch[name][row], value), name


@pytest.mark.slow
def test_support_and_queries_are_different_objects(written: Path) -> None:
    data = episodes(written, "val", queries=3)
    objects = data.__getitems__(range(len(data)))["object"]
    assert objects[:, 0].tolist() == list(range(len(data)))
    for row in objects.tolist():
        assert len(set(row)) == 4
        assert len({data.poses.annotations[position].category.name for position in row}) == 1


@pytest.mark.slow
def test_only_training_episodes_depend_on_the_epoch(written: Path) -> None:
    for augmentation in (Augmentation(), None):
        data = episodes(written, augmentation=augmentation)
        first = data[3]["query_xy"]
        data.set_epoch(1)
        assert torch.equal(data[3]["query_xy"], first) == (augmentation is None)
        data.set_epoch(0)
        assert torch.equal(data[3]["query_xy"], first)


@pytest.mark.slow
def test_categories_are_padded_to_the_same_number_of_keypoints(written: Path) -> None:
    data = episodes(written, max_keypoints=20)
    batch = data.__getitems__(range(len(data)))
    counts = [annotation.category.num_keypoints for annotation in data.poses.annotations]
    assert batch["present"].sum(dim=1).tolist() == counts
    for name in ("support_visible", "query_visible"):
        padding = ~batch["present"] if name[0] == "s" else ~batch["present"][:, None].expand_as(batch[name])
        assert not batch[name][padding].any()
    assert not batch["query_xy"][~batch["query_visible"]].any()


def test_keypoints_follow_an_augmented_picture() -> None:
    images = torch.zeros(4, 3, 3, 64, 64, dtype=torch.uint8)
    xy = (torch.tensor([[28, 32], [36, 30], [32, 38]]) / 64).expand(
        4,
        3,
        3,
        2,
        # central, so that the border does not mirror them
    )
    for point in range(3):
        column, row = (xy[0, 0, point] * 64).int().tolist()
        images[:, :, point, row - 2 : row + 2, column - 2 : column + 2] = 255  # a channel for each point
    seen, size = torch.ones(4, 3, 3, dtype=torch.bool), torch.full((4, 3), 0.5)
    rngs = [sample_rng(0, 0, index) for index in range(4)]
    options = Augmentation(light=0.0, scale=1.1, translation=0.05)
    made, moved, visible, sizes, pushed_out, redrawn = augment(options, rngs, images, xy, seen, size, [None] * 4)
    weight = made / made.sum(dim=(-1, -2), keepdim=True)
    middle = (torch.arange(64) + 0.5) / 64
    result = torch.stack([(weight.sum(-2) * middle).sum(-1), (weight.sum(-1) * middle).sum(-1)], dim=-1)
    torch.testing.assert_close(result, moved, atol=0.012, rtol=0)
    assert visible.all()
    assert (pushed_out == 0).all()
    assert (redrawn == 0).all()
    spread = (moved[..., 0, :] - moved[..., 1, :]).norm(dim=-1) / (xy[..., 0, :] - xy[..., 1, :]).norm(dim=-1)
    assert_close(sizes, 0.5 * spread, terms=4, growth=8)
    assert sizes.unique().numel() == 12


def test_keypoints_outside_of_an_augmented_picture_are_invisible() -> None:
    places = torch.tensor([[0.02, 0.02], [0.98, 0.98], [0.5, 0.5], [0.4, 0.5]])
    xy, seen = places.expand(30, 1, 4, 2), torch.tensor([True, True, True, False]).expand(30, 1, 4)
    rngs = [sample_rng(0, 0, index) for index in range(30)]
    wild = Augmentation(rotation=180.0, scale=1.5, translation=0.4)
    _, moved, visible, _, pushed_out, redrawn = augment(
        wild, rngs, torch.zeros(30, 1, 3, 8, 8, dtype=torch.uint8), xy, seen, torch.ones(30, 1), [None] * 30
    )
    assert torch.equal(pushed_out, (seen & ~visible).sum(dim=(1, 2)))
    assert pushed_out.sum() > 10
    assert redrawn.sum() > 5
    assert (visible.sum(dim=-1) * 2 >= 3).all()
    assert not visible[..., 3].any()
    assert (moved[visible] >= 0).all()
    assert (moved[visible] <= 1).all()
    assert not moved[~visible].any()


def test_a_flip_exchanges_left_and_right_keypoints() -> None:
    names = ["nose", "left_eye", "right_eye", "L_Knee", "R_Knee", "tail"]
    mirrored = mirrored_keypoints(names)
    assert mirrored == (0, 2, 1, 4, 3, 5)
    assert mirrored_keypoints(["Left Shoulder", "Right Shoulder"]) == (1, 0)
    assert mirrored_keypoints(["collar", "lapel", "left"]) is None
    xy = torch.tensor([[0.5, 0.3], [0.3, 0.2], [0.7, 0.25], [0.4, 0.8], [0.6, 0.9], [0.2, 0.6]])
    image = torch.randint(256, (1, 1, 3, 8, 8), dtype=torch.uint8)
    only_flips = Augmentation(rotation=0.0, scale=1.0, translation=0.0, light=0.0, flip=1.0)
    seen = torch.tensor([[[True, True, False, True, True, True]]])
    given = (torch.where(seen[..., None], xy, 0.0), seen, torch.ones(1, 1))
    made, moved, visible, _, _, _ = augment(only_flips, [sample_rng(0, 0, 0)], image, *given, [mirrored])
    torch.testing.assert_close(made, image.flip(-1) / 255)
    assert visible.flatten().tolist() == [True, False, True, True, True, True]
    expected = xy[[0, 2, 1, 4, 3, 5]] * torch.tensor([-1.0, 1.0]) + torch.tensor([1.0, 0.0])
    torch.testing.assert_close(moved[visible], expected[visible[0, 0]])
    assert moved[0, 0, 2, 0] > moved[0, 0, 0, 0], "the right eye stays to the right of the nose"
    as_given, stayed, _, _, _, _ = augment(only_flips, [sample_rng(0, 0, 0)], image, *given, [None])
    torch.testing.assert_close(as_given, image / 255)
    torch.testing.assert_close(stayed, given[0])


@pytest.mark.parametrize("crop", ["box", "image"])
def test_crops_keep_keypoints_on_their_pixels(crop: Any, tmp_path: Path) -> None:
    pixels = np.zeros((120, 200, 3), dtype=np.uint8)
    pixels[66:74, 126:134] = 255
    Image.fromarray(pixels).save(tmp_path / "dot.png")
    category = Category(1, "dot", 1, (), None)
    keypoints = np.array([[130.0, 70.0]])
    annotation = Annotation(
        7, tmp_path / "dot.png", 1, (200, 120), category, (100.0, 40.0, 60.0, 50.0), keypoints, np.array([True])
    )
    left, top, side = annotation.square(crop)
    picture = read_crop(annotation, crop, 40).float().mean(dim=0)
    weight = torch.where(picture > 140, picture - 128, 0.0)  # gray outside the picture
    middle = torch.arange(40) + 0.5
    result = torch.stack([(weight.sum(0) * middle).sum(), (weight.sum(1) * middle).sum()]) / weight.sum()
    expected = torch.tensor([130 - left, 70 - top]) / side * 40
    torch.testing.assert_close(result.double(), expected.double(), atol=0.35, rtol=0)


def test_copied_supports_have_mean_positions_for_hidden_keypoints() -> None:
    batch = {
        "support_xy": torch.tensor([[[0.2, 0.4], [0.4, 0.8], [0.0, 0.0]]]),
        "support_visible": torch.tensor([[True, True, False]]),
        "query_xy": torch.zeros(1, 2, 3, 2),
    }
    expected = torch.tensor([[0.2, 0.4], [0.4, 0.8], [0.3, 0.6]]).expand(1, 2, 3, 2)
    torch.testing.assert_close(copy_support(batch), expected)


# Invalid data


def keypoints_of(content: Content, number: int = 0) -> list[float]:
    result: list[float] = content["annotations"][number]["keypoints"]
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: c.pop("categories"), "list of categories"),
        (lambda c: c["images"][0].pop("id"), r"images\[0\] must be an object with an integer as id"),
        (lambda c: c["annotations"][2].update(image_id=999), "annotation 3 .* image_id .* has 999"),
        (lambda c: c["annotations"][2].update(category_id=999), "annotation 3 .* category_id .* has 999"),
        (lambda c: c["annotations"][2].update(bbox=[0, 0, 5]), "annotation 3 must have a bbox"),
        (lambda c: keypoints_of(c).pop(), r"annotation 1 must have x, y, visibility .*: 33 numbers, but has 32"),
        (lambda c: c["categories"][0].update(keypoints=[]), "category 1 must have a name and a list"),
        (lambda c: c["categories"][0].update(skeleton=[[1, 99]]), "skeleton of category 1"),
        (lambda c: c["categories"][0].update(skeleton=5), "skeleton of category 1"),
        (lambda c: c["categories"][0].update(skeleton=[[1, 1.5]]), "skeleton of category 1"),
        (lambda c: c["annotations"][2].update(image_id=[1]), r"annotation 3 .* image_id .* has \[1\]"),
        (lambda c: c["annotations"][2].update(category_id={}), r"annotation 3 .* category_id .* has \{\}"),
        (lambda c: c["images"][0].update(width=True), "image 1 must have file_name, and width"),
        (lambda c: c.update(categories=[], annotations=[]), "at least one category"),
    ],
)
def test_an_invalid_file_is_rejected(folder: Path, change: Callable[[Content], object], match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        read_pose_set(changed(folder, change), "train")
    assert "train.json" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["images", "annotations", "categories"])
def test_a_field_of_any_type_is_read_or_rejected(written: Path, tmp_path: Path, key: str) -> None:
    (tmp_path / "images").symlink_to(written / "images")
    (tmp_path / "annotations").mkdir()
    content = json.loads((written / "annotations" / "val.json").read_text())
    refused: list[tuple[str, AccelRunError]] = []
    for field, given in content[key][0].items():
        inside = [[wrong, *given[1:]] for wrong in (None, "x", [], {})] if isinstance(given, list) else []
        for wrong in (None, True, 5, -1, 1.5, "x", [], [1], [[1]], {}, 10**400, math.nan, *inside):
            rows = [{**content[key][0], field: wrong}, *content[key][1:]]
            (tmp_path / "annotations" / "val.json").write_text(json.dumps({**content, key: rows}))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # fields of objects that are not used
                    read_pose_set(tmp_path, "val")
            except (DataError, InputMissing) as error:
                refused.append((field, error))
    assert len(refused) > 10
    for field, error in refused:
        assert "val.json" in str(error)
        if isinstance(error, DataError):
            assert re.search(rf"{key}\[0\]|(image|annotation|category) \S*\d", str(error)), (field, error)
        else:
            assert field == "file_name"


@pytest.mark.slow
def test_a_category_needs_two_objects(folder: Path) -> None:
    """MP-100 lists categories with a single object or of another split; both are left out."""

    def keep_one(content: Content) -> None:
        rows = content["annotations"]
        first = next(row for row in rows if row["category_id"] == 2)
        content["annotations"] = [row for row in rows if row["category_id"] != 2 or row is first]
        content["categories"].append({"id": 99, "name": "x", "keypoints": ["a"]})

    def keep_none(content: Content) -> None:
        content["annotations"] = [row for row in content["annotations"] if row["category_id"] == 2]

    before = read_pose_set(folder, "train")
    with pytest.warns(UserWarning, match=r"train.json: 1 of \d+ objects .*: 1 alone .* 2 categories"):
        poses = read_pose_set(changed(folder, keep_one), "train")
    assert poses.left_out == 1
    assert poses.categories == tuple(category for category in before.categories if category.id != 2)
    with pytest.raises(DataError, match=r"at least one category with 2 objects.* \d+ categories and 1 "):
        read_pose_set(changed(folder, keep_none), "train")


@pytest.mark.slow
def test_objects_without_visible_keypoints_are_skipped(folder: Path) -> None:
    def hide(content: Content) -> None:
        content["annotations"][0]["keypoints"] = [-5.0, 900.0, 0.0] * (len(keypoints_of(content)) // 3)
        content["annotations"][1].update(keypoints=[], num_keypoints=0)

    whole = read_pose_set(folder, "train")
    with pytest.warns(UserWarning, match="1 without keypoints, 1 without a visible keypoint"):
        poses = read_pose_set(changed(folder, hide), "train")
    assert poses.left_out == 2
    assert len(poses.annotations) == len(whole.annotations) - 2


@pytest.mark.slow
def test_visible_keypoints_outside_the_crop_are_reported(folder: Path) -> None:
    def shrink(content: Content) -> None:
        for row in content["annotations"][1:3]:
            x, y, _ = row["keypoints"][-3:]
            row["keypoints"] = [0.0] * (len(row["keypoints"]) - 3) + [x, y, 2]
        content["annotations"][1]["bbox"] = [30.0, 30.0, 1.0, 1.0]
        content["annotations"][1]["keypoints"][-3:] = [3.0, 4.0, 2]

    changed(folder, shrink)
    whole = read_pose_set(folder, "train", crop="image")
    with pytest.warns(UserWarning, match=r"1 visible keypoints .* of annotation 2 at 3, 4, box 30, 30, 1, 1") as warned:
        poses = read_pose_set(folder, "train", crop="box")
    assert len(warned) == 1
    assert (whole.cut_off, whole.left_out, poses.cut_off, poses.left_out) == (0, 0, 1, 1)
    data = Episodes(poses, image_size=SIDE, max_keypoints=12, crop="box")
    assert data.places(range(len(data)))["query_visible"].any(dim=-1).all()


@pytest.mark.slow
def test_invisible_keypoints_may_have_any_coordinates(folder: Path) -> None:
    poses = read_pose_set(
        changed(folder, lambda c: keypoints_of(c).__setitem__(slice(0, 3), [-7.0, 1e9, 0.0])), "train"
    )
    assert not poses.annotations[0].visible[0]
    assert not poses.annotations[0].keypoints[0].any()


def write_mp100(folder: Path) -> None:
    """Write a split as in MP-100, with crowds, points outside of the image, and skeleton links counted from 0."""
    (folder / "annotations").mkdir(parents=True)
    (folder / "images" / "animal_face").mkdir(parents=True)
    images = [
        {"id": 900 + n, "file_name": f"animal_face/{n}.jpg", "width": 40, "height": 30, "license": 1} for n in range(6)
    ]
    for image in images:
        Image.new("RGB", (40, 30)).save(folder / "images" / str(image["file_name"]))
    usual = [10, 10, 2, 30, 10, 1, 20, 25, 2]
    special: list[dict[str, Any]] = [
        {"keypoints": [10, 10, 2, 40.4, 10, 2, 20, -3, 1]},  # two points outside of the image
        {"keypoints": [10, 10, None, 30, 10, 2, 0, 0, 0]},  # no visibility of the first point
        {"keypoints": [10, 10, 30, 10, 0, 0]},  # no visibilities
        {"iscrowd": 1, "keypoints": [], "segmentation": {"counts": [1200], "size": [30, 40]}},
        {"bbox": [5, 5, 0, 20]},
        {"keypoints": None, "num_keypoints": 0},
        {"keypoints": [0] * 9, "num_keypoints": 0},
    ]
    common = {"category_id": 7, "bbox": [5, 5, 30, 22], "area": 660, "iscrowd": 0, "num_keypoints": 3}
    rows = [
        {**common, "id": 10 + n, "image_id": 900 + n % 6, "keypoints": usual, **change}
        for n, change in enumerate([{}, {}, *special])
    ]
    names = ["left_eye", "right_eye", "nose"]
    categories = [
        {"id": 7, "name": "fox_face", "supercategory": "animal", "keypoints": names, "skeleton": [[0, 2], [1, 2]]},
        {"id": 8, "name": "elsewhere", "supercategory": "animal", "keypoints": names, "skeleton": []},
    ]
    content = {"info": {}, "licenses": [], "images": images, "annotations": rows, "categories": categories}
    (folder / "annotations" / "mp100_split1_train.json").write_text(json.dumps(content))


def test_mp100_is_read_without_conversion(tmp_path: Path) -> None:
    write_mp100(tmp_path)
    counts = r"4 of 9 objects .*: 1 marked as a crowd, 1 with an empty box, 1 without keypoints, 1 without a visible"
    with pytest.warns(UserWarning, match=rf"{counts}.* 1 categories .* 2 visible keypoints .* annotation 12"):
        poses = read_pose_set(tmp_path, "train", crop="box")
    assert [annotation.id for annotation in poses.annotations] == [10, 11, 12, 13, 14]
    assert (poses.left_out, poses.outside, poses.cut_off) == (4, 2, 0)
    (fox,) = poses.categories
    assert fox.skeleton == ((0, 2), (1, 2))
    assert fox.mirrored == (1, 0, 2)
    visible = [annotation.visible.tolist() for annotation in poses.annotations[2:]]
    assert visible == [[True, False, False], [False, True, False], [True, True, False]]
    batch = Episodes(poses, image_size=SIDE, max_keypoints=3, crop="box").__getitems__(range(5))
    assert batch["query_visible"].any(dim=-1).all()
    assert batch["query_xy"].min() >= 0
    assert batch["query_xy"].max() <= 1


@pytest.mark.slow
def test_missing_files_are_reported_by_name(folder: Path) -> None:
    with pytest.raises(InputMissing, match="nowhere does not exist") as caught:
        read_pose_set(folder / "nowhere", "train")
    assert "images/" in caught.value.problems[0].fix
    with pytest.raises(InputMissing, match="must be a folder"):
        read_pose_set(folder / "annotations" / "val.json", "train")
    picture = read_pose_set(folder, "val").annotations[0].image
    picture.unlink()
    with pytest.raises(InputMissing, match=picture.name):
        read_pose_set(folder, "val")
    (folder / "annotations" / "val.json").unlink()
    with pytest.raises(InputMissing, match=r"neither val\.json nor mp100_split1_val\.json"):
        read_pose_set(folder, "val")


@pytest.mark.slow
def test_invalid_json_and_images_are_rejected(folder: Path) -> None:
    annotations = read_pose_set(folder, "train").annotations
    annotations[0].image.write_bytes(b"no picture")
    Image.new("RGB", (8, 8)).save(annotations[1].image)
    for annotation, match in zip(
        annotations, ["must be an image", "must be 32 x 32 pixels.* but is 8 x 8"], strict=False
    ):
        with pytest.raises(DataError, match=match) as caught:
            read_crop(annotation, "image", SIDE)
        assert annotation.image.name in str(caught.value)
    (folder / "annotations" / "train.json").write_text("{")
    with pytest.raises(DataError, match="must be JSON"):
        read_pose_set(folder, "train")


@pytest.mark.slow
def test_validation_and_training_categories_are_disjoint(folder: Path) -> None:
    train, val = read_pose_set(folder, "train"), read_pose_set(folder, "val")
    check_disjoint([train, val])
    name = train.categories[0].name
    poses = read_pose_set(changed(folder, lambda c: c["categories"][0].update(name=name), "val"), "val")
    with pytest.raises(DataError, match=f"val.json.* train.json.* {name}"):
        check_disjoint([train, poses])


@pytest.mark.slow
def test_mp100_folds_are_read_by_number(folder: Path, tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        path = folder / "annotations" / f"{split}.json"
        path.rename(path.with_name(f"mp100_split3_{split}.json"))
    assert read_pose_set(folder, "val", fold=3).path.name == "mp100_split3_val.json"
    with pytest.raises(InputMissing, match="mp100_split1_val"):
        read_pose_set(folder, "val")
    for split in ("train", "val"):  # fold 1 must not use the test split of fold 3
        path = folder / "annotations" / f"mp100_split3_{split}.json"
        shutil.copy(path, path.with_name(f"mp100_split1_{split}.json"))
    assert "test" not in build(Context(0, folder, tmp_path), image_size=SIDE).sets  # type: ignore[attr-defined]
    assert len(build(Context(0, folder, tmp_path), image_size=SIDE, fold=3).dataset("test"))


@pytest.mark.slow
def test_training_uses_only_selected_categories(folder: Path) -> None:
    poses = read_pose_set(folder, "train")
    name = poses.categories[1].name
    few = select_categories(poses, [name])
    assert {annotation.category.name for annotation in few.annotations} == {name}
    with pytest.raises(ConfigError, match=r"task\.categories: '\?' is not a category"):
        select_categories(poses, ["?"])
    with pytest.raises(ConfigError, match="at least one category"):
        select_categories(poses, [])


@pytest.mark.slow
def test_an_invalid_image_size_is_rejected(folder: Path) -> None:
    with pytest.raises(AccelRunError, match="multiple of 32"):
        build(Context(0, folder, folder), image_size=50)


@pytest.mark.slow
def test_cached_pictures_are_not_sent_to_worker_processes(written: Path) -> None:
    data = episodes(written)
    data.__getitems__([0, 1])
    assert data.pictures
    assert not pickle.loads(pickle.dumps(data)).pictures
