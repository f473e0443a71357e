"""Cubes and masks of hyperspectral are exact, reproducible, split by photograph, and validated if read from files."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner.tasks.hyperspectral import envi, scenes
from runner.tasks.hyperspectral.data import open_folder
from runner.tasks.hyperspectral.metrics import UNKNOWN
from runner.tasks.hyperspectral.scenes import PHOTOGRAPHS, SyntheticScenes, photograph_scenes
from runner.tasks.hyperspectral.statistics import PixelStatistics
from runner.tasks.hyperspectral.task import AnomalyTask, build

from runner.base.errors import ConfigError, DataError, InputMissing
from runner.base.task import Context
from runner.cli import main
from tests.rounding import assert_close, distance
from tests.tasks.test_hyperspectral_statistics import whitening_tolerance


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def make(kind: str, cache: Path, split: str = "train", num_cubes: int = 6, channels: int = 24) -> Any:
    if kind == "synthetic":
        return SyntheticScenes(split, num_cubes, 40, 48, channels)
    pytest.importorskip("skimage")
    return photograph_scenes(cache, split, num_cubes, 40, 48, channels)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kind", ["photographs", "synthetic"])
def test_samples_do_not_depend_on_the_batch(kind: str, cache: Path) -> None:
    data = make(kind, cache)
    batch = data.__getitems__([3, 1])
    assert batch["cube"].shape == (2, 40, 48, 24)
    assert batch["cube"].dtype == torch.float32
    assert batch["cube"].is_contiguous()
    assert batch["index"].tolist() == [3, 1]
    again = make(kind, cache)[1]
    for name in ("cube", "mask"):
        assert torch.equal(batch[name][1], again[name])
    assert not torch.equal(batch["cube"][0], batch["cube"][1])
    assert not torch.equal(make(kind, cache, "val")[1]["cube"], again["cube"])
    assert len(pickle.dumps(data)) < 10_000, "data workers receive names, not pixels"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["photographs", "synthetic"])
def test_a_mask_covers_its_targets_exactly(kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make(kind, cache)
    monkeypatch.setattr(scenes, "NOISE", 0.0)
    monkeypatch.setattr(scenes, "draw_decoy_lines", lambda rng: [(-9.0, 1.0), (-9.0, 1.0)])  # decoys absorb nothing
    data.num_cubes = 60  # so many that some decoys cover a target
    whole = data.__getitems__(range(60))
    monkeypatch.setattr(scenes, "implant", lambda cube, mask, rng: None)
    bare = data.__getitems__(range(60))
    changed = (whole["cube"] - bare["cube"]).abs().amax(-1) > 0
    assert torch.equal(changed, whole["mask"] == 1)
    assert 0.005 < changed.float().mean() < 0.2


def test_decoys_absorb_at_other_wavelengths_than_targets(cache: Path) -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        for at, _ in scenes.draw_decoy_lines(rng):
            assert all(abs(at - line) > 2 * scenes.LINE_WIDTH for line, _ in scenes.LINES)


@pytest.mark.slow
def test_each_photograph_is_in_only_one_split(cache: Path) -> None:
    names = [name for split in PHOTOGRAPHS.values() for name in split]
    assert len(names) == len(set(names)) == 8
    for split in ("train", "val", "test"):
        data = make("photographs", cache, split, num_cubes=12)
        assert {file.stem for file in data.files} == {Path(name).stem for name in PHOTOGRAPHS[split]}


def test_photographs_come_from_the_package_without_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("skimage")
    monkeypatch.setitem(sys.modules, "pooch", None)
    monkeypatch.setattr("skimage.data._fetchers._fetch", lambda *_: pytest.fail("asked to fetch"))
    assert make("photographs", tmp_path)[0]["cube"].isfinite().all()
    monkeypatch.setitem(scenes.PHOTOGRAPHS, "val", ("no_such.png",))
    with pytest.raises(InputMissing, match=r"no_such\.png"):
        make("photographs", tmp_path, "val")


def test_spectral_filters_are_smooth_and_sum_to_1(cache: Path) -> None:
    bank = make("photographs", cache, channels=100).filters()
    assert bank.shape == (12, 100)
    assert_close(bank.sum(0), np.ones(100, bank.dtype), terms=12)
    assert np.abs(np.diff(bank, axis=1)).max() < 0.05


def test_cubes_are_generated_without_a_loop_over_pixels() -> None:
    data, fit = SyntheticScenes("train", 10, 128, 128, 50), PixelStatistics(50)
    data[0]
    num_calls = 0

    def count(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1

    sys.setprofile(count)
    try:
        fit.add(torch.nn.Identity(), fit.start(), data.__getitems__([1, 2]))
    finally:
        sys.setprofile(None)
    assert num_calls < 128 * 128


# Files


def write_cubes(folder: Path, count: int = 6, shape: tuple[int, int, int] = (8, 9, 5)) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        np.save(folder / f"cube-{number}.npy", rng.random(shape, dtype=np.float32))
        np.save(folder / f"cube-{number}_mask.npy", rng.random(shape[:2]) < 0.1)
    return sorted(folder.glob("cube-?.npy"))


def write_envi(folder: Path, name: str, shape: tuple[int, int, int] = (30, 20, 6)) -> None:
    """Write a cube (float32, bil) with dark targets, and its mask."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    mask = rng.random(shape[:2]) < 0.1
    cube = rng.random(shape, dtype=np.float32) + 1
    cube[mask, 2] -= 0.8
    (folder / f"{name}.img").write_bytes(cube.transpose(0, 2, 1).tobytes())
    lines, samples, bands = shape
    (folder / f"{name}.hdr").write_text(
        f"ENVI\nsamples = {samples}\nlines = {lines}\nbands = {bands}\nheader offset = 0\nfile type = ENVI Standard\n"
        "data type = 4\ninterleave = bil\nbyte order = 0\n"
    )
    np.save(folder / f"{name}_mask.npy", mask)


def test_a_folder_is_split_by_file(tmp_path: Path) -> None:
    files = write_cubes(tmp_path, 10)
    splits = open_folder(tmp_path, None)
    assert sorted(file for split in splits.values() for file in split.files) == files
    assert {split: len(data) for split, data in splits.items()} == {"train": 6, "val": 2, "test": 2}
    sample = splits["val"][1]
    file = splits["val"].files[1]
    assert np.array_equal(sample["cube"].numpy(), np.load(file))
    assert np.array_equal(sample["mask"].numpy(), np.load(file.with_name(f"{file.stem}_mask.npy")))


def test_subfolders_are_splits(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write_cubes(tmp_path / split, 2)
    (tmp_path / "train" / "cube-1_mask.npy").unlink()
    splits = open_folder(tmp_path, 5)
    assert {len(data) for data in splits.values()} == {2}
    assert splits["train"].has_masks
    assert (splits["train"][1]["mask"] == UNKNOWN).all()


def test_a_file_name_may_contain_undecodable_bytes(tmp_path: Path) -> None:
    files = write_cubes(tmp_path, 5)
    files[0].rename(tmp_path / os.fsdecode(b"cube-\xe9.npy"))
    assert sum(map(len, open_folder(tmp_path, None).values())) == 5


@pytest.mark.parametrize("interleave", ["bsq", "bil", "bip"])
@pytest.mark.parametrize(("code", "kind"), [(4, "<f4"), (12, ">u2"), (2, "<i2")])
def test_envi_files_with_any_interleave_are_read(tmp_path: Path, interleave: str, code: int, kind: str) -> None:
    cube = np.random.default_rng(0).integers(0, 1000, (4, 5, 6)).astype(kind)
    axes = {"bsq": (2, 0, 1), "bil": (0, 2, 1), "bip": (0, 1, 2)}[interleave]
    (tmp_path / "scene.raw").write_bytes(b"head" + cube.transpose(axes).tobytes())
    (tmp_path / "scene.hdr").write_text(
        "ENVI\ndescription = {a = b\n over two lines}\nsamples = 5\nlines = 4\nbands   = 6\nheader offset = 4\n"
        f"data type = {code}\ninterleave = {interleave.upper()}\nbyte order = {int(kind[0] == '>')}\n"
        "wavelength = {400.0, 500.0,\n 600.0}\n"
    )
    assert np.array_equal(envi.open_cube(tmp_path / "scene.hdr"), cube)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("a.npy", b"not an array", DataError, r"a\.npy: is not an array"),
        ("a.npy", None, DataError, r"a\.npy: must be a cube \(H, W, C\).*\(8, 9\)"),
        ("a.hdr", b"nothing", DataError, r"a\.hdr: is not an ENVI header"),
        ("a.hdr", b"ENVI\nsamples = 3\n", DataError, r"a\.hdr: must have lines"),
        (
            "a.hdr",
            b"ENVI\nsamples=3\nlines=2\nbands=4\ndata type=4\ninterleave=bsq\n",
            InputMissing,
            r"a\.hdr has no data file",
        ),
    ],
)
def test_an_invalid_file_is_reported_with_the_expected_format(
    tmp_path: Path, name: str, content: bytes | None, error: type[Exception], message: str
) -> None:
    if content is None:
        np.save(tmp_path / name, np.zeros((8, 9), dtype=np.float32))
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        envi.open_cube(tmp_path / name)


def test_truncated_envi_data_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.hdr").write_text("ENVI\nsamples=3\nlines=2\nbands=4\ndata type=4\ninterleave=bsq\n")
    (tmp_path / "a.img").write_bytes(bytes(95))
    with pytest.raises(DataError, match=r"a\.img: must have 96 bytes for 2 x 3 x 4 float32, but has 95"):
        envi.open_cube(tmp_path / "a.hdr")


def test_cubes_and_masks_must_have_equal_shapes(tmp_path: Path) -> None:
    files = write_cubes(tmp_path)
    with pytest.raises(DataError, match=r"must have 6 channels \(task.channels\), but has 5"):
        open_folder(tmp_path, 6)
    splits = open_folder(tmp_path, None)
    mask = tmp_path / f"{splits['val'].files[0].stem}_mask.npy"
    np.save(mask, np.zeros((9, 8), dtype=np.uint8))
    with pytest.raises(DataError, match=r"_mask\.npy: must be a mask \(8, 9\)"):
        splits["val"][0]
    np.save(mask, np.full((8, 9), 7, dtype=np.uint8))
    with pytest.raises(DataError, match="values from 7 to 7"):
        splits["val"][0]
    np.save(files[3], np.zeros((8, 9, 4), dtype=np.float32))
    with pytest.raises(DataError, match=r"\(8, 9, [45]\), like the other cubes, but has \(8, 9, [45]\)"):
        open_folder(tmp_path, None)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_non_finite_values_are_rejected(tmp_path: Path, split: str, value: float) -> None:
    write_cubes(tmp_path)
    splits = open_folder(tmp_path, None)
    file = splits[split].files[0]
    cube = np.load(file).astype(np.float64)
    cube[2, 3, 4] = value
    np.save(file, cube)
    with pytest.raises(DataError, match="finite numbers, but 1 of 360 are not") as caught:
        splits[split].__getitems__([0])
    assert str(file) in str(caught.value)
    assert caught.value.exit_code == 65
    splits["train" if split == "val" else "val"].__getitems__([0])


def test_every_split_needs_cubes(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="is not a folder"):
        open_folder(tmp_path / "nowhere", None)
    write_cubes(tmp_path, 2)
    with pytest.raises(InputMissing, match="at least three are needed"):
        open_folder(tmp_path, None)


# The task


def fitted(task: AnomalyTask) -> AnomalyTask:
    fit = task.fits["fit"]
    train = task.dataset("train")
    state, _ = fit.add(task.model, fit.start(), train.__getitems__(list(range(len(train)))))
    fit.finish(task.model, state)
    return task


@pytest.mark.slow
def test_cubes_without_masks_can_only_be_scored(tmp_path: Path) -> None:
    write_cubes(tmp_path)
    for mask in tmp_path.glob("*_mask.npy"):
        mask.unlink()
    task = build(Context(0, tmp_path, tmp_path / "cache"))
    assert isinstance(task, AnomalyTask)
    fitted(task).begin_phase("fit")
    with pytest.raises(InputMissing, match="epochs=0"):
        task.begin_phase("train")
    assert task.baselines() == {}
    with torch.no_grad():
        assert set(task.evaluate(task.model, task.dataset("val").__getitems__([0]))) == {"explained_variance"}
        (prediction,) = task.predict(task.model, torch.Generator())
    assert "above 0" in prediction.text
    other = build(Context(0, tmp_path, tmp_path / "cache"), head="svdd")
    other.begin_phase("train")


@pytest.mark.parametrize("head", ["rx", "svdd"])
def test_only_svdd_trains_on_cubes_without_masks(tmp_path: Path, head: Any) -> None:
    for split in ("train", "val", "test"):
        write_cubes(tmp_path / split, 3)
        (tmp_path / split / "cube-1_mask.npy").unlink()
    task = build(Context(0, tmp_path, tmp_path / "cache"), head=head)
    task.begin_phase("fit")
    assert len(task.dataset("train")) == 3
    task.begin_phase("train")
    cubes = task.dataset("train")
    assert [cubes.title(index) for index in range(len(cubes))] == [  # type: ignore[attr-defined]
        f"cube-{number}" for number in range(3) if number != 1 or head == "svdd"
    ]
    assert len(task.dataset("val")) == len(task.dataset("test")) == 3


@pytest.mark.slow
def test_auroc_is_undefined_without_known_background_pixels(tmp_path: Path) -> None:
    write_cubes(tmp_path)
    for mask in tmp_path.glob("*_mask.npy"):
        np.save(mask, np.where(np.load(mask), 1, UNKNOWN))
    task = build(Context(0, tmp_path, tmp_path / "cache"))
    assert isinstance(task, AnomalyTask)
    with torch.no_grad():
        (prediction,) = fitted(task).predict(task.model, torch.Generator())
    assert "iou" in prediction.text
    assert "auroc" not in prediction.text


def test_simulation_settings_with_a_data_path_are_rejected(tmp_path: Path) -> None:
    write_cubes(tmp_path)
    with pytest.raises(ConfigError, match=r"task\.height"):
        build(Context(0, tmp_path, tmp_path), height=5)


@pytest.mark.slow
def test_inference_batch_size_does_not_change_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.tasks.hyperspectral.task.maps_picture", lambda maps, unit: b"")  # slow to draw
    task = build(Context(0, None, tmp_path), data="synthetic", num_cubes=20, height=8, width=10, channels=12)
    fitted(task)
    count = min(3, len(task.dataset("test")))
    calls: list[int] = []
    with torch.no_grad():
        one_by_one = list(task.predict(task.model, torch.Generator(), samples=count))
    assert count > 1
    task.model.register_forward_hook(lambda _, given, __: calls.append(len(given[0])))
    for batch_size in (1, 2, 3, 9):
        calls.clear()
        with torch.no_grad():
            result = list(task.predict(task.model, torch.Generator(), samples=count, batch_size=batch_size))
        assert calls == [min(batch_size, count - at) for at in range(0, count, batch_size)]
        for ours, theirs in zip(result, one_by_one, strict=True):
            (name,) = [each for each in ours.files if each.endswith(".npy")]
            assert_close(ours.files[name], theirs.files[name], terms=12**2)
            assert ours.items == theirs.items


@pytest.mark.slow
def test_inference_writes_maps_of_test_cubes(tmp_path: Path) -> None:
    task = build(Context(0, None, tmp_path), data="synthetic", num_cubes=8, height=20, width=24, channels=12)
    assert isinstance(task, AnomalyTask)
    fitted(task)
    with torch.no_grad():
        first, last = task.predict(task.model, torch.Generator(), samples=2)
        expected = task.model(task.dataset("test")[1]["cube"])[0]
    score = last.files["score-0001.npy"]
    assert isinstance(score, np.ndarray)
    assert_close(score, expected, terms=12**2)
    assert first.items == 480
    assert "auroc" in first.text
    assert str(last.files["score-0001.png"])[2:8] == "\\x89PN"
    assert list(last.plots) == ["maps.png"]
    assert not first.plots


@pytest.mark.parametrize("interleave", ["bsq", "bil", "bip"])
@pytest.mark.parametrize("byte_order", [0, 1])
@pytest.mark.parametrize("kind", [np.float32, np.int16, np.uint16, np.float64])
def test_files_of_the_spectral_package_are_read(tmp_path: Path, interleave: str, byte_order: int, kind: type) -> None:
    package = pytest.importorskip("spectral.io.envi", reason="spectral is not installed")
    cube = np.random.default_rng(0).integers(0, 1000, (4, 5, 6)).astype(kind)
    header = tmp_path / "scene.hdr"
    package.save_image(
        str(header), cube, interleave=interleave, byteorder=byte_order, metadata={"wavelength": [400] * 6}
    )
    ours = envi.open_cube(header)
    assert np.array_equal(ours, cube)
    assert np.array_equal(ours, package.open(str(header)).load(dtype=kind))


def test_envi_scores_match_those_of_the_spectral_package(tmp_path: Path) -> None:
    """The package divides the co-moment by n - 1, the task divides it by n, for n pixels."""
    spectral = pytest.importorskip("spectral", reason="spectral is not installed")
    for split in ("train", "val", "test"):
        write_envi(tmp_path / split, "scene")
    task = build(Context(0, tmp_path, tmp_path / "cache"), statistics="float64")
    assert isinstance(task, AnomalyTask)
    fitted(task)
    cube = spectral.io.envi.open(str(tmp_path / "train" / "scene.hdr")).load()
    expected = spectral.rx(np.asarray(cube, dtype=np.float64)) * (30 * 20) / (30 * 20 - 1)
    with torch.no_grad():
        ours = task.model.rx(task.dataset("train")[0]["cube"][None])[0]
    assert distance(expected, ours) <= whitening_tolerance(
        np.asarray(cube, dtype=np.float64).reshape(-1, cube.shape[-1])
    )


@pytest.mark.slow
def test_training_starts_from_the_statistics_of_envi_cubes(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write_envi(tmp_path / "cubes" / split, "scene")
    settings = ["updates=3", "global_batch_size=1", "micro_batch_size=1", "device=cpu", "run=envi"]
    folders = [f"data.path={tmp_path / 'cubes'}", f"output_root={tmp_path}"]
    assert main(["train", "task=hyperspectral", *settings, *folders]) == 0
    phases = json.loads((tmp_path / "envi" / "run.json").read_text())["phases"]
    assert [(name, phase["finished"]) for name, phase in phases.items()] == [("fit", True), ("train", True)]
    assert all(phase["peak_host_gib"] > 0 and phase["seconds"] > 0 for phase in phases.values())
    rows = [json.loads(line) for line in (tmp_path / "envi" / "metrics.jsonl").read_text().splitlines()]
    found = {row["phase"]: row["val/auroc"] for row in rows if "val/auroc" in row}
    pixels = np.fromfile(tmp_path / "cubes" / "val" / "scene.img", "<f4").reshape(30, 6, 20).transpose(0, 2, 1)
    away = pixels.reshape(-1, 6).astype(np.float64) - pixels.reshape(-1, 6).mean(axis=0)
    scores = np.einsum("nc,cd,nd->n", away, np.linalg.inv(away.T @ away / len(away)), away)
    mask = np.load(tmp_path / "cubes" / "val" / "scene_mask.npy").ravel()
    pairs = scores[mask][:, None] - scores[~mask]
    assert found["fit"] == pytest.approx((pairs > 0).mean(), abs=1e-3)
    assert found["train"] > found["fit"]
