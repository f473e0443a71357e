"""Metrics, baselines and splits of the task, and the results of inference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner.tasks.cape.data import Episodes
from runner.tasks.cape.glyphs import all_letters, write_glyphs
from runner.tasks.cape.metrics import copy_baseline
from runner.tasks.cape.pictures import category_table, coco_results
from runner.tasks.cape.task import CategoryAgnosticPose, build

from runner.base.errors import ConfigError, InputMissing
from runner.base.task import Context, Prediction

SIDE = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    letters = all_letters()[:9]  # any letters, because searching for dissimilar ones takes seconds
    made = tmp_path_factory.mktemp("glyphs")
    write_glyphs(
        made,
        {"train": letters[:4], "val": letters[4:7], "test": letters[7:]},
        image_size=SIDE,
    )
    return made


def make_task(folder: Path, **options: Any) -> CategoryAgnosticPose:
    torch.manual_seed(0)
    task = build(Context(0, folder, folder / "cache"), **{"image_size": SIDE, "crop": "image", **options})
    assert isinstance(task, CategoryAgnosticPose)
    return task


def predictions(task: CategoryAgnosticPose, seed: int = 0, **options: Any) -> list[Prediction]:
    with torch.no_grad():
        return list(task.predict(task.model.eval(), torch.Generator().manual_seed(seed), **options))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("attention", ["dense", "deformable"])
def test_loss_and_metrics_are_sums_with_counts(folder: Path, attention: str) -> None:
    task = make_task(folder, attention=attention)
    data = task.dataset("train")
    batch = data.__getitems__(range(len(data)))
    loss, items = task.loss(task.model, batch)
    loss.backward()
    with torch.no_grad():
        metrics = task.evaluate(task.model.eval(), batch)
    assert set(metrics) == {"loss", "pck", "distance", "ended"}
    assert int(items) == int(metrics["pck"][1]) == int(batch["query_visible"].sum())
    assert 0 <= float(metrics["pck"][0]) <= float(items)
    assert task.items_per_sample == pytest.approx(float(items) / len(data), rel=0.15)
    assert len(task.blocks()) == 4


@pytest.mark.slow
def test_baselines_use_the_evaluated_episodes(folder: Path) -> None:
    task = make_task(folder)
    data = task.dataset("val")
    batch = data.__getitems__(range(len(data)))
    hits = seen = 0
    for row in range(len(data)):
        for query in range(2):
            for point in batch["query_visible"][row, query].nonzero().flatten().tolist():
                shown = batch["support_visible"][row]
                guess = batch["support_xy"][row, point] if shown[point] else batch["support_xy"][row][shown].mean(dim=0)
                away = (guess - batch["query_xy"][row, query, point]).norm() / batch["query_size"][row, query]
                hits, seen = hits + int(away <= 0.2), seen + 1
    assert task.baselines()["pck"] == pytest.approx(hits / seen)
    assert set(task.baselines()) == {"pck", "distance"}
    assert copy_baseline(data) == task.baselines()


def test_splits_have_disjoint_categories(folder: Path) -> None:
    task = make_task(
        folder, categories=(json.loads((folder / "annotations/train.json").read_text())["categories"][0]["name"],)
    )
    names = {
        split: {annotation.category.name for annotation in task.dataset(split).poses.annotations}
        for split in ("train", "val", "test")
    }
    assert len(names["train"]) == 1
    assert len(names["val"]) == 3
    assert not names["train"] & (names["val"] | names["test"])
    assert task.dataset("train").augmentation is not None
    assert task.dataset("val").augmentation is None


@pytest.mark.slow
def test_inference_writes_coco_results_and_pictures(folder: Path) -> None:
    task = make_task(folder)
    *single, last = predictions(task, samples=5, batch_size=2, pictures=2)
    assert len(single) == 5
    assert [len(prediction.plots) for prediction in single] == [1, 1, 0, 0, 0]
    assert all(data.startswith(b"\x89PNG") for prediction in single for data in prediction.plots.values())
    rows = json.loads(str(last.files["keypoints.json"]))
    assert rows == [
        row for prediction in single for content in prediction.files.values() for row in json.loads(str(content))
    ]
    annotations = {annotation.image_id: annotation for annotation in task.dataset("val").poses.annotations}
    assert len(rows) == 10
    for row in rows:
        annotation = annotations[row["image_id"]]
        points = np.array(row["keypoints"]).reshape(-1, 3)
        assert set(row) == {"image_id", "category_id", "keypoints", "score"}
        assert row["category_id"] == annotation.category.id
        assert len(points) == annotation.category.num_keypoints
        assert ((points[:, :2] >= 0) & (points[:, :2] <= SIDE)).all()
    assert last.text.splitlines()[-1].startswith("all")
    assert all("within 0.2" in prediction.text for prediction in single)


@pytest.mark.parametrize("split", ["val", "test"])
def test_inference_results_name_their_split(folder: Path, split: str) -> None:
    assert split in predictions(make_task(folder), samples=1, pictures=0, split=split)[-1].text


@pytest.mark.slow
def test_inference_depends_on_the_seed_but_not_the_batch(folder: Path) -> None:
    task = make_task(folder)
    first = predictions(task, 1, samples=4, batch_size=1, pictures=0)
    assert [p.text for p in predictions(task, 1, samples=4, batch_size=3, pictures=0)] == [p.text for p in first]
    assert [p.files for p in predictions(task, 2, samples=4, pictures=0)] != [p.files for p in first]


def test_inference_can_be_limited_to_one_category(folder: Path) -> None:
    task = make_task(folder)
    name = task.sets["test"].categories[1].name
    *single, _ = predictions(task, split="test", category=name, samples=None, pictures=0)
    assert len(single) == sum(annotation.category.name == name for annotation in task.sets["test"].annotations)
    assert all(prediction.text.startswith(f"{name}:") for prediction in single)
    with pytest.raises(ConfigError, match=r"inference\.category: 'no such' is not a category"):
        predictions(task, category="no such")


def test_inference_needs_annotations_of_the_split(folder: Path) -> None:
    task = make_task(folder)
    task.sets = {split: poses for split, poses in task.sets.items() if split != "test"}  # test.json may be missing
    with pytest.raises(InputMissing, match=r"inference\.split=val"):
        predictions(task, split="test")


def test_results_are_in_pixels_of_the_full_image(folder: Path) -> None:
    poses = make_task(folder).sets["val"]
    for crop in ("box", "image"):
        data = Episodes(poses, image_size=SIDE, max_keypoints=12, crop=crop)  # type: ignore[arg-type]
        batch = data.places([0])
        objects = batch["object"][0].tolist()
        rows = coco_results(data, objects[1:], batch["query_xy"][0], torch.ones(2, 12))
        for row, position in zip(rows, objects[1:], strict=True):
            annotation = poses.annotations[position]
            points = np.array(row["keypoints"]).reshape(-1, 3)[annotation.visible]
            np.testing.assert_allclose(points[:, :2], annotation.keypoints[annotation.visible], atol=0.011)


def test_the_table_lists_the_worst_categories_first() -> None:
    table = category_table({"A": [9, 1, 10], "B": [1, 2, 10]}).splitlines()
    assert [line.split() for line in table[1:]] == [
        ["B", "10.0", "20.0", "10"],
        ["A", "90.0", "10.0", "10"],
        ["all", "50.0", "15.0", "20"],
    ]
