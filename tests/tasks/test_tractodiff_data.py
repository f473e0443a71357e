"""Segments of streamlines are held out correctly, use one space, and have the history that a tracker would know."""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runner.tasks.tractodiff import data, sources
from runner.tasks.tractodiff.data import SPLITS, SegmentDataset, prepare
from runner.tasks.tractodiff.fields import CONDITION_SIZE, NUM_CHANNELS, NUM_SH, Fields
from runner.tasks.tractodiff.lines import length, mdf, resample_by_step, trk, unit_steps
from torch import Tensor

from runner.base.errors import DataError, InputMissing
from tests.forkserver import ForkServer
from tests.rounding import assert_close
from tests.tasks.few_streamlines import few_streamlines

pytest.importorskip("dipy")
nibabel = pytest.importorskip("nibabel")

AFFINE = np.array([[0.0, -2.0, 0.0, 30.0], [-2.0, 0.0, 0.0, 5.0], [0.0, 0.0, 2.5, -7.0], [0.0, 0.0, 0.0, 1.0]])
SHAPE = (12, 11, 10)
M_PERTURB = -6  # parameter of mallopt(3)


@pytest.fixture(scope="module")
def traced() -> Any:
    """The traced subject of dipy's volume."""
    with few_streamlines():
        (result,) = sources.volume()
    return result


@pytest.fixture(scope="module")
def volume(traced: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "volume", lambda: [traced])
        return prepare(None, tmp_path_factory.mktemp("cache"), data="volume", step=1.0)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared bundles; network access fails the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", lambda *_, **__: pytest.fail("asked the network"))
        return prepare(None, tmp_path_factory.mktemp("cache"), data="bundles", step=4.0)


def make_subject(folder: Path, *, num_lines: int = 40, seed: int = 0) -> None:
    """Write a subject with fast diffusion along the axis A, and slightly wavy streamlines along A."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((30, 3))
    vectors = np.concatenate([np.zeros((2, 3)), vectors / np.linalg.norm(vectors, axis=1, keepdims=True)])
    bvals = np.array([0.0] * 2 + [1000.0] * 30)
    fibre = np.linalg.inv(AFFINE[:3, :3] / np.linalg.norm(AFFINE[:3, :3], axis=0)) @ [0.0, 1.0, 0.0]
    signal = 1000 * np.exp(-bvals * (3e-4 + 1.4e-3 * (vectors @ fibre) ** 2))
    data = np.broadcast_to(signal, (*SHAPE, len(bvals))).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(data, AFFINE), folder / "dwi.nii.gz")
    nibabel.save(nibabel.Nifti1Image(np.ones(SHAPE, np.uint8), AFFINE), folder / "mask.nii.gz")
    np.savetxt(folder / "dwi.bval", bvals[None], fmt="%g")
    np.savetxt(folder / "dwi.bvec", vectors.T, fmt="%.6f")
    along = np.linspace(-16, 4, 41)
    starts = rng.uniform([12, 0, -5], [28, 0, 12], (num_lines, 3))
    lines = [start + np.stack([np.sin(along / 9), along, np.cos(along / 9)], axis=1) for start in starts]
    (folder / "tracts.trk").write_bytes(trk([line.astype(np.float32) for line in lines], AFFINE, SHAPE))


@pytest.fixture(scope="module")
def one_subject(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("brains")
    make_subject(folder / "anna")
    return folder


@pytest.fixture
def damaged(one_subject: Path, tmp_path: Path) -> Path:
    """A copy of the subject's folder, which a test may damage."""
    shutil.copytree(one_subject, tmp_path / "brains")
    return tmp_path / "brains" / "anna"


# Distances


def test_the_distance_does_not_depend_on_directions() -> None:
    one, other = torch.randn(2, 5, 16, 3, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(mdf(one, other), mdf(one.flip(1), other))
    assert torch.allclose(mdf(one, other), mdf(other, one))
    assert torch.equal(mdf(one, one.flip(1)), torch.zeros(5))


def test_the_distance_of_a_shifted_line_is_the_shift() -> None:
    line = torch.arange(48.0).view(1, 16, 3)
    torch.testing.assert_close(mdf(line, line + torch.tensor([3.0, 0.0, 4.0])), torch.tensor([5.0]))


def test_points_are_evenly_spaced() -> None:
    line = np.array([[0.0, 0, 0], [1, 0, 0], [1, 3, 0], [1, 3, 0.5]])
    points = resample_by_step(line, 0.5)
    assert len(points) == 10
    assert points[0].tolist() == [0, 0, 0]
    assert np.linalg.norm(np.diff(points, axis=0), axis=1) == pytest.approx(0.5)
    assert length(line) == 4.5


def test_a_repeated_point_has_no_direction() -> None:
    points = torch.tensor([[1.0, 2, 3], [1, 2, 3], [1, 2, 5]])
    assert unit_steps(points).tolist() == [[0, 0, 0], [0, 0, 1]]


# The field


def make_fields(*shapes: tuple[int, int, int], channels: int = 3) -> Fields:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(int(np.prod(shape)) for shape in shapes), channels, generator=generator)
    return Fields(values, torch.tensor(shapes), torch.eye(4).expand(len(shapes), 4, 4).contiguous())


def sample_with_torch(image: Tensor, points: Tensor) -> Tensor:
    """Return the values (N, C) of an image (X, Y, Z, C) at points (N, 3) in voxels, computed by torch's grid_sample."""
    sizes = torch.tensor(image.shape[:3])
    grid = (2 * points / (sizes - 1) - 1).flip(-1).view(1, 1, 1, -1, 3)
    return F.grid_sample(image.permute(3, 0, 1, 2)[None], grid, align_corners=True)[0, :, 0, 0].T


def test_interpolated_values_match_grid_sample() -> None:
    fields = make_fields((4, 5, 6), (7, 3, 2))
    points = 8 * torch.rand(500, 3, generator=torch.Generator().manual_seed(1)) - 1.5
    for subject in (0, 1):
        expected = sample_with_torch(fields.image(subject), points)
        result = fields.sample(points, torch.full((500,), subject))
        assert_close(result, expected, terms=8, growth=8)
    assert fields.sample(torch.tensor([[-1e9, 0, 1e9]]), torch.tensor([1])).tolist() == [[0, 0, 0]]


def test_the_mask_has_a_gradient_at_its_edge() -> None:
    mask = torch.zeros(5, 5, 5)
    mask[:3] = 1
    fields = Fields(mask.view(-1, 1), torch.tensor([[5, 5, 5]]), torch.eye(4)[None])
    points = torch.tensor([[2.4, 2.0, 2.0]], requires_grad=True)
    fields.sample(points, torch.tensor([0])).sum().backward()
    assert points.grad is not None
    assert points.grad.tolist() == [[-1, 0, 0]]


def test_a_condition_has_seven_places_and_eight_directions() -> None:
    fields = make_fields((9, 9, 9), channels=NUM_CHANNELS)
    points, directions = torch.tensor([[4.0, 4.0, 4.0]]), torch.arange(24.0).view(1, 8, 3)
    condition = fields.condition(points, directions, torch.tensor([0]))
    assert condition.shape == (1, CONDITION_SIZE) == (1, 346)
    places = condition[0, :322].view(7, NUM_CHANNELS)
    assert torch.equal(places[0], fields.image(0)[4, 4, 4])
    torch.testing.assert_close(places[3], fields.image(0)[4, 4, 5:7].mean(dim=0))  # 1.5 voxels up
    assert torch.equal(condition[0, 322:], directions.flatten())


# The volume


@pytest.mark.slow
def test_streamlines_are_inside_the_mask(volume: Path) -> None:
    tracts = SegmentDataset(volume, "train").tracts
    inside = tracts.fields.mask.sample(tracts.points, torch.zeros(len(tracts.points), dtype=torch.long))
    assert len(tracts.ends) > 1000
    assert (inside >= 0.5).float().mean() > 0.95  # tracking stopped at the last points, which are just outside


def test_the_direction_field_follows_the_streamlines(one_subject: Path, tmp_path: Path) -> None:
    """Diffusion is fast along A, so the signal is low in this direction, for any orientation of the image."""
    from dipy.reconst.shm import real_sh_descoteaux

    pieces = SegmentDataset(prepare(one_subject, tmp_path, data="volume", step=1.0), "train")
    coefficients = pieces.tracts.fields.image(0)[5, 5, 5, :NUM_SH].numpy().astype(np.float64)
    axes = np.eye(3)
    theta, phi = np.arccos(axes[:, 2]), np.arctan2(axes[:, 1], axes[:, 0])
    right, front, up = real_sh_descoteaux(8, theta, phi, legacy=False)[0] @ coefficients
    assert front < 0.5 * min(right, up)
    latest = pieces.spread(50)["condition"][:, -3:].abs()
    assert (latest[latest.any(dim=1), 1] > 0.99).all()  # streamlines run along A


def test_positive_determinants_negate_the_first_fsl_axis(one_subject: Path, tmp_path: Path) -> None:
    """An image has the same dwi.bvec whether it is stored from left to right or from right to left."""
    fields = []
    for name, sign in (("radiological", -1.0), ("neurological", 1.0)):
        folder = tmp_path / name / "anna"
        shutil.copytree(one_subject / "anna", folder)
        affine = np.diag([2.0, 2.0, 2.0, 1.0])
        angle = np.pi / 6
        affine[:2, :2] = 2 * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        affine[:, 0] *= sign
        for file in ("dwi.nii.gz", "mask.nii.gz"):
            image = nibabel.load(folder / file)
            nibabel.save(nibabel.Nifti1Image(np.asarray(image.dataobj), affine), folder / file)
        center = affine[:3, :3] @ [6.0, 5.0, 5.0]
        line = np.linspace(center - 1, center + 1, 8).astype(np.float32)
        (folder / "tracts.trk").write_bytes(trk([line] * 20, affine, SHAPE))
        fields.append(sources.read_subjects(folder.parent)[0].field)
    assert np.array_equal(fields[0], fields[1][::-1])  # measurements are equal in all voxels


def digest_of(subject: sources.Subject) -> str:
    return hashlib.sha256(b"".join(line.tobytes() for line in subject.streamlines)).hexdigest()


def digest_in_filled_memory() -> str:
    """Trace the volume while malloc fills new memory with a pattern."""
    assert ctypes.CDLL(None).mallopt(M_PERTURB, 165)
    with few_streamlines():
        (result,) = sources.volume()
    return digest_of(result)


@pytest.mark.slow
def test_tracking_is_deterministic(traced: Any, server: ForkServer) -> None:
    assert digest_of(traced) == server.call(digest_in_filled_memory)


@pytest.mark.slow
def test_splits_share_no_streamline(volume: Path) -> None:
    tracts = SegmentDataset(volume, "train").tracts
    for split in SPLITS:
        assert len(SegmentDataset(volume, split)) > 100
    firsts = {split: {tuple(line[0].tolist()) for line in tracts.streamlines(split, 0)} for split in SPLITS}
    assert not firsts["train"] & firsts["val"]
    assert not firsts["train"] & firsts["test"]
    assert not firsts["val"] & firsts["test"]


@pytest.mark.slow
def test_bundles_are_held_out_by_subject(bundles: Path) -> None:
    tracts = SegmentDataset(bundles, "train").tracts
    assert [[tracts.names[subject] for subject in tracts.subjects(split)] for split in SPLITS] == [
        ["sub_1", "sub_2", "sub_3"],
        ["sub_4"],
        ["sub_5"],
    ]
    amounts = [float((tracts.fields.image(subject)[..., 0]).abs().sum()) for subject in range(5)]
    assert (
        amounts[3] == amounts[4] > max(amounts[:3])
        # the atlas of a held-out subject is from three subjects, that of a training subject from two
    )


# The pieces


@pytest.mark.slow
def test_a_piece_contains_the_points_after_its_start(volume: Path) -> None:
    pieces = SegmentDataset(volume, "val")
    tracts = pieces.tracts
    count = len(pieces) // 2
    line = tracts.streamlines("val", 0)[0]
    places = len(line) - 17
    for index in range(places):  # forward: the start is point index + 1
        piece = pieces[index]
        assert torch.equal(piece["start"], line[index + 1])
        torch.testing.assert_close(piece["start"] + piece["points"], line[index + 2 : index + 18])
        known = unit_steps(line[max(0, index - 7) : index + 2])
        torch.testing.assert_close(piece["condition"][322:].view(8, 3)[-len(known) :], known)
        assert not piece["condition"][322:].view(8, 3)[: -len(known)].any()
    back = pieces[count]  # backward, from the other end
    torch.testing.assert_close(back["start"] + back["points"], line.flip(0)[2:18])
    torch.testing.assert_close(back["condition"][-3:], unit_steps(line.flip(0)[:2])[0])


@pytest.mark.slow
def test_training_pieces_are_extrapolated_beyond_streamlines(volume: Path) -> None:
    pieces = SegmentDataset(volume, "train")
    line = pieces.tracts.streamlines("train", 0)[0]
    last = pieces[len(line) - 2]  # only one real point is left
    step = line[-1] - line[-2]
    assert_close(last["points"], step * torch.arange(1, 17)[:, None], terms=16, growth=16)


@pytest.mark.slow
def test_only_training_pieces_may_lack_a_history(volume: Path) -> None:
    train, val = SegmentDataset(volume, "train").spread(2000), SegmentDataset(volume, "val").spread(2000)
    directions = train["condition"][:, 322:].view(-1, 8, 3).norm(dim=2)
    known = (directions > 0.5).sum(dim=1)
    share = torch.bincount(known, minlength=9) / len(known)
    assert share[0] > 0.08
    assert share[8] > 0.3
    assert (share > 0).all()
    assert (val["condition"][:, -3:].norm(dim=1) > 0.99).all()


@pytest.mark.slow
def test_dropped_histories_depend_only_on_the_epoch(volume: Path) -> None:
    pieces, same = SegmentDataset(volume, "train", 3), pickle.loads(pickle.dumps(SegmentDataset(volume, "train", 3)))
    first = pieces.spread(300)["condition"]
    pieces.set_epoch(1)
    second = pieces.spread(300)["condition"]
    same.set_epoch(1)
    assert not torch.equal(first, second)
    assert torch.equal(second, same.spread(300)["condition"])
    assert torch.equal(first[:, :322], second[:, :322])


@pytest.mark.slow
def test_only_the_folder_name_is_sent_to_worker_processes(volume: Path) -> None:
    assert len(pickle.dumps(SegmentDataset(volume, "train"))) < 1000


# The user's brains


@pytest.mark.parametrize("is_link", [False, True])
def test_data_is_prepared_again_after_a_change(one_subject: Path, is_link: bool, tmp_path: Path) -> None:
    shutil.copytree(one_subject, tmp_path / "brains")
    if is_link:
        (tmp_path / "brains" / "anna").rename(tmp_path / "anna")
        (tmp_path / "brains" / "anna").symlink_to(tmp_path / "anna")
    first = prepare(tmp_path / "brains", tmp_path / "cache", data="volume", step=1.0)
    stamp = (first / "values.npy").stat().st_mtime_ns
    assert prepare(tmp_path / "brains", tmp_path / "cache", data="volume", step=1.0) == first
    assert (first / "values.npy").stat().st_mtime_ns == stamp
    file = tmp_path / "brains" / "anna" / "tracts.trk"
    file.write_bytes(file.read_bytes()[: -(41 * 12 + 4)])  # remove one streamline
    changed = prepare(tmp_path / "brains", tmp_path / "cache", data="volume", step=1.0)
    assert changed != first
    make_subject(tmp_path / "brains" / "ben", num_lines=3)
    second = prepare(tmp_path / "brains", tmp_path / "cache", data="volume", step=1.0)
    assert second not in (first, changed)
    assert SegmentDataset(second, "train").tracts.names == ["anna", "ben"]
    assert SegmentDataset(second, "val").tracts.subjects("val") == [1]


def expect(damaged: Path, error: type[Exception], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match) as caught:
        prepare(damaged.parent, damaged.parent.parent / "cache", **{"data": "volume", "step": 1.0, **options})
    assert "dwi.nii.gz" in str(caught.value) or "step_mm" in str(caught.value)  # the message states what is expected
    assert not list((damaged.parent.parent / "cache").glob("*"))


@pytest.mark.parametrize("file", ["dwi.nii.gz", "dwi.bval", "dwi.bvec", "mask.nii.gz", "tracts.trk"])
def test_a_missing_file_is_reported_by_name(damaged: Path, file: str) -> None:
    (damaged / file).unlink()
    expect(damaged, InputMissing, "has no streamlines" if file == "tracts.trk" else f"anna has no {file}")


@pytest.mark.parametrize("file", ["dwi.nii.gz", "dwi.bval", "dwi.bvec", "mask.nii.gz", "tracts.trk"])
def test_a_damaged_file_is_reported_by_name(damaged: Path, file: str) -> None:
    (damaged / file).write_bytes(b"what is this?")
    expect(damaged, DataError, f"anna/{file}.*cannot be read")


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("file", ["dwi.nii.gz", "mask.nii.gz", "dwi.bval", "dwi.bvec", "tracts.trk"])
def test_invalid_numbers_are_reported_with_the_file(damaged: Path, file: str, number: float) -> None:
    path = damaged / file
    if path.suffix == ".gz":
        values = nibabel.load(path).get_fdata().astype(np.float32)
        values[2, 3, 4] = number
        nibabel.save(nibabel.Nifti1Image(values, AFFINE), path)
    elif path.suffix == ".trk":
        line = np.zeros((30, 3), np.float32)
        line[5, 1] = number
        with np.errstate(invalid="ignore"):
            path.write_bytes(trk([line], AFFINE, SHAPE))
    else:
        rows = np.atleast_2d(np.loadtxt(path))
        rows[-1, 7] = number
        np.savetxt(path, rows)
    expect(damaged, DataError, f"anna/{file}.*(finite|unit)")


@pytest.mark.parametrize("file", ["dwi.bval", "dwi.bvec"])
def test_a_short_gradient_file_is_reported_by_name(damaged: Path, file: str) -> None:
    np.savetxt(damaged / file, np.atleast_2d(np.loadtxt(damaged / file))[:, :-1])
    expect(damaged, DataError, f"anna/{file}.* must have ")


def test_directions_of_unweighted_volumes_may_be_nan(damaged: Path) -> None:
    rows = np.loadtxt(damaged / "dwi.bvec")
    rows[:, 0] = np.nan
    np.savetxt(damaged / "dwi.bvec", rows)
    prepare(damaged.parent, damaged.parent.parent / "cache", data="volume", step=1.0)


def test_a_mask_of_another_shape_is_rejected(damaged: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.ones((4, 5, 6), np.uint8), AFFINE), damaged / "mask.nii.gz")
    expect(damaged, DataError, r"shape of the image, \(12, 11, 10\), but has \(4, 5, 6\)")


def test_an_image_with_missing_volumes_is_rejected(damaged: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.ones((*SHAPE, 5), np.float32), AFFINE), damaged / "dwi.nii.gz")
    expect(damaged, DataError, "one volume for each of 32 b-values")


def test_streamlines_outside_the_image_are_rejected(damaged: Path) -> None:
    lines = [np.full((30, 3), 500, np.float32)]
    (damaged / "tracts.trk").write_bytes(trk(lines, AFFINE, SHAPE))
    expect(damaged, DataError, "streamline 0 leaves the image")


def test_too_short_streamlines_are_rejected(damaged: Path) -> None:
    expect(damaged, DataError, "no train streamline is at least 170 mm", step=10.0)


def test_a_path_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="nowhere is not a folder"):
        prepare(tmp_path / "nowhere", tmp_path, data="volume", step=1.0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputMissing, match="no subject folder"):
        prepare(tmp_path / "empty", tmp_path / "cache", data="volume", step=1.0)


@pytest.mark.slow
def test_nothing_is_downloaded(bundles: Path) -> None:
    assert bundles.exists()
