"""Sources of subjects: dipy's small volume, its minimal bundles, or a folder."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runner.base.errors import DataError, InputMissing
from runner.base.packages import require

from .fields import NUM_SH, SH_ORDER
from .lines import resample_by_step

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Subject:
    """A brain.

    field        (X, Y, Z, 46): 45 spherical-harmonic coefficients (order 8) in RAS axes, then the mask, 0 or 1
    affine       (4, 4) from voxels to RAS mm
    streamlines  each (n, 3) in RAS mm
    split        split of each streamline: train, val or test
    bundle       name of the bundle of each streamline
    """

    name: str
    field: Array
    affine: Array
    streamlines: Sequence[Array]
    split: Sequence[str]
    bundle: Sequence[str]


def volume() -> list[Subject]:
    """Return dipy's small_64D volume (10 x 10 x 10 voxels of 2 mm) as one subject, tracked from 64 seeds per voxel.

    EuDX follows the peaks of the tensors in steps of 0.5 mm until the fractional anisotropy is below 0.2. Streamlines
    are held out by the voxel of their seed: training streamlines may pass nearby, so the metrics measure
    generalization within this volume, not to another brain.
    Source: Garyfallidis, Towards an accurate brain tractography, thesis, University of Cambridge, 2012.
    """
    fnames = _dipy("data").get_fnames(name="small_64D")
    data, affine, gradients = _diffusion(*map(Path, fnames))
    tensor = _dipy("reconst.dti").TensorModel(gradients)
    anisotropy = tensor.fit(data).fa
    mask = anisotropy > MIN_ANISOTROPY
    peaks = _dipy("direction").peaks_from_model(
        tensor,
        data,
        _dipy("data").get_sphere(name="repulsion724"),
        relative_peak_threshold=0.5,
        min_separation_angle=45,
        mask=mask,
        npeaks=1,
        return_sh=False,
    )
    # dipy 1.12 recommends eudx_tracking instead, which reads uninitialized memory: its streamlines differ
    # from process to process.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using EuDXDirectionGetter-based objects", DeprecationWarning)
        tracked = _dipy("tracking.local_tracking").LocalTracking(
            peaks,
            _dipy("tracking.stopping_criterion").ThresholdStoppingCriterion(anisotropy, MIN_ANISOTROPY),
            _dipy("tracking.utils").seeds_from_mask(mask, affine, density=4),
            affine,
            step_size=0.5,
            max_cross=1,
            random_seed=1,
            save_seeds=True,
        )
        streamlines, seeds = zip(*tracked, strict=True)
    voxels = np.round((np.asarray(seeds) - affine[:3, 3]) @ np.linalg.inv(affine[:3, :3]).T).astype(int)
    part = np.random.default_rng(0).choice(["train", "val", "test"], size=mask.shape, p=[0.8, 0.1, 0.1])
    split = part[tuple(voxels.T)].tolist()
    bundle = ["small_64D"] * len(streamlines)
    return [Subject("small_64D", _field(data, mask, affine, gradients), affine, streamlines, split, bundle)]


def _field(data: Array, mask: Array, affine: Array, gradients: Any) -> Array:
    """Return SH coefficients of the attenuation, fitted in RAS axes, and the mask (X, Y, Z, 46)."""
    weighted = ~gradients.b0s_mask
    axes = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    # FSL stores directions along the axes of the voxels, but with the first one negated if the determinant is positive.
    signs = [-1.0 if np.linalg.det(axes) > 0 else 1.0, 1.0, 1.0]
    directions = gradients.bvecs[weighted] * signs @ axes.T
    baseline = data[..., ~weighted].mean(axis=-1, keepdims=True)
    attenuation = np.clip(data[..., weighted] / np.maximum(baseline, 1e-6), 0, 1)
    sphere = _dipy("core.sphere").Sphere(xyz=directions)
    coefficients = _dipy("reconst.shm").sf_to_sh(
        attenuation, sphere, sh_order_max=SH_ORDER, basis_type="descoteaux07", legacy=False, smooth=0.006
    )
    return np.concatenate([coefficients, mask[..., None]], axis=-1).astype(np.float32)


def _diffusion(image: Path, bvals: Path, bvecs: Path) -> tuple[Array, Array, Any]:
    """Return the data (X, Y, Z, N), the affine and the gradients. Raises DataError, naming the invalid file."""
    read = _dipy("io.gradients").read_bvals_bvecs
    with _readable(image):
        loaded = require("nibabel", "tractodiff").load(image)
        data = loaded.get_fdata(dtype=np.float32)
    with _readable(bvals):
        values = np.atleast_1d(read(str(bvals), None)[0])
    with _readable(bvecs):
        vectors = read(None, str(bvecs))[1]
    _check_finite(data, image)
    _check_finite(values, bvals)
    if values.ndim != 1 or len(values) != len(vectors):
        # The file that does not match the image is the invalid one.
        fits, shape = len(vectors) == data.shape[-1], values.shape
        what = f"must have one row of {len(vectors)} b-values, as many as there are directions, but has shape {shape}"
        if values.ndim == 1 and not fits:
            what = f"must have a direction for each of {len(values)} b-values, but has {len(vectors)}"
        raise DataError(what, where=str(bvals if values.ndim != 1 or fits else bvecs), fix=FORMATS)
    with _readable(bvecs):
        gradients = _dipy("core.gradients").gradient_table(values, bvecs=vectors)
    return data, loaded.affine, gradients


def _check_finite(values: Array, file: Path) -> None:
    wrong = ~np.isfinite(values)
    if wrong.any():
        first = tuple(np.argwhere(wrong)[0].tolist())
        what = f"must hold finite numbers, but {wrong.sum()} are NaN or infinite, the first at index {first}"
        raise DataError(what, where=str(file), fix=FORMATS)


def bundles() -> list[Subject]:
    """Return five subjects: three to train with, one for val and one for test.

    Each has 50 streamlines of the left arcuate fasciculus, the right corticospinal tract and the forceps major.
    The data has no image. Instead, the field is an atlas: the distribution of the directions of the training subjects'
    streamlines in each voxel, as spherical harmonics. Subjects are aligned by the mean of their streamline points. The
    atlas for a training subject excludes its own streamlines.
    Source: Dhollander et al., Track Orientation Density Imaging, NeuroImage 94, 2014.
    """
    subjects, labels = [], []
    load = require("nibabel", "tractodiff").streamlines.load
    with zipfile.ZipFile(_dipy("data").get_fnames(name="minimal_bundles")) as archive:
        for name in BUNDLES_SPLIT:
            files = sorted(file for file in archive.namelist() if file.startswith(f"{name}/") and file.endswith(".trk"))
            loaded = {Path(file).stem: load(io.BytesIO(archive.read(file))).streamlines for file in files}
            subjects.append([np.asarray(line) for lines in loaded.values() for line in lines])
            labels.append([bundle for bundle, lines in loaded.items() for _ in lines])
    centres = [np.mean([line.mean(axis=0) for line in lines], axis=0) for lines in subjects]
    aligned = [[line - centre for line in lines] for lines, centre in zip(subjects, centres, strict=True)]
    found = []
    for number, (name, split) in enumerate(BUNDLES_SPLIT.items()):
        others = [
            line
            for other, part in enumerate(BUNDLES_SPLIT.values())
            if part == "train" and other != number
            for line in aligned[other]
        ]
        affine = np.diag([ATLAS_VOXEL, ATLAS_VOXEL, ATLAS_VOXEL, 1.0])
        affine[:3, 3] = centres[number] - ATLAS_VOXEL * (ATLAS_SIZE - 1) / 2
        lines = subjects[number]
        found.append(Subject(name, _atlas(others), affine, lines, [split] * len(lines), labels[number]))
    return found


def _atlas(lines: Sequence[Array]) -> Array:
    """Return mean spherical harmonics and a mask (X, Y, Z, 46) for each voxel of a cube around the origin.

    The harmonics are those of the streamline segments near a voxel. The mask is 1 where there are any.
    """
    lines = [resample_by_step(line, 1.0) for line in lines]
    steps = np.concatenate([np.diff(line, axis=0) for line in lines])
    middles = np.concatenate([(line[:-1] + line[1:]) / 2 for line in lines])
    x, y, z = (steps / np.linalg.norm(steps, axis=1, keepdims=True)).T
    harmonics, _, _ = _dipy("reconst.shm").real_sh_descoteaux(SH_ORDER, np.arccos(z), np.arctan2(y, x), legacy=False)
    voxels = np.round(middles / ATLAS_VOXEL + (ATLAS_SIZE - 1) / 2).astype(int)
    sums = np.zeros((ATLAS_SIZE,) * 3 + (NUM_SH + 1,))
    np.add.at(sums, tuple(voxels.T), np.column_stack([harmonics, np.ones(len(steps))]))
    sums = require("scipy.ndimage", "tractodiff").gaussian_filter(sums, sigma=1.0, axes=(0, 1, 2))
    density = sums[..., -1:]
    # + 1 mm shrinks the mean of voxels with few segments towards zero.
    return np.concatenate([sums[..., :-1] / (density + 1), density > MIN_DENSITY], axis=-1).astype(np.float32)


def read_subjects(path: Path) -> list[Subject]:
    """Return the subjects of a folder, in order of their names.

    The last tenth of the subjects, at least one, is the validation split. With three or more subjects, as many before
    them are the test split. A single subject is split by streamlines.
    Raises DataError if a file is damaged or has the wrong shape, InputMissing if a subject, an image or its
    streamlines are missing.
    """
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if not folders:
        raise InputMissing(f"{path} contains no subject folder", where="data.path", fix=FORMATS)
    held_out = max(1, len(folders) // 10)
    parts = ["train"] * len(folders)
    if len(folders) > 1:
        parts[-held_out:] = ["val"] * held_out
    if len(folders) > 2:
        parts[-2 * held_out : -held_out] = ["test"] * held_out
    return [_subject(folder, part, alone=len(folders) == 1) for folder, part in zip(folders, parts, strict=True)]


def _subject(folder: Path, part: str, *, alone: bool) -> Subject:
    image, mask_file = _file(folder, "dwi.nii.gz", "dwi.nii"), _file(folder, "mask.nii.gz", "mask.nii")
    bvals, bvecs = _file(folder, "dwi.bval"), _file(folder, "dwi.bvec")
    data, affine, gradients = _diffusion(image, bvals, bvecs)
    with _readable(mask_file):
        white_matter = np.asarray(require("nibabel", "tractodiff").load(mask_file).dataobj)
    _check_finite(white_matter, mask_file)
    mask = white_matter > 0
    if data.ndim != 4 or data.shape[3] != len(gradients.bvals):
        what = f"must be 4-D with one volume for each of {len(gradients.bvals)} b-values, but has shape {data.shape}"
        raise DataError(what, where=str(image), fix=FORMATS)
    if mask.shape != data.shape[:3]:
        what = f"must have the shape of the image, {data.shape[:3]}, but has {mask.shape}"
        raise DataError(what, where=str(mask_file), fix=FORMATS)
    if not mask.any():
        raise DataError("contains no white matter voxel", where=str(mask_file), fix=FORMATS)
    if not gradients.b0s_mask.any() or gradients.b0s_mask.all():
        what = "must contain b-values of at most 50 (without diffusion weighting) and above 50"
        raise DataError(what, where=str(bvals), fix=FORMATS)
    tractograms = sorted([*folder.glob("*.trk"), *folder.glob("*.tck")])
    if not tractograms:
        raise InputMissing(f"{folder} has no streamlines: *.trk or *.tck", where="data.path", fix=FORMATS)
    loaded = {file: _streamlines(file, np.linalg.inv(affine), mask.shape) for file in tractograms}
    lines = [line for found in loaded.values() for line in found]
    bundle = [file.stem for file, found in loaded.items() for _ in found]
    split = [part] * len(lines)
    if alone:
        split = np.random.default_rng(0).choice(["train", "val", "test"], size=len(lines), p=[0.8, 0.1, 0.1]).tolist()
    return Subject(folder.name, _field(data, mask, affine, gradients), affine, lines, split, bundle)


def _streamlines(file: Path, to_voxel: Array, shape: tuple[int, ...]) -> list[Array]:
    """Return the streamlines of a file. Raises DataError if they are not in the space of the image."""
    with _readable(file), np.errstate(invalid="ignore"):  # infinite coordinates are refused below
        lines = [np.asarray(line) for line in require("nibabel", "tractodiff").streamlines.load(file).streamlines]
    for number, line in enumerate(lines):
        if not np.isfinite(line).all():
            what = f"streamline {number} must have finite coordinates, but has NaN or infinite ones"
            raise DataError(what, where=str(file), fix=FORMATS)
        voxels = line @ to_voxel[:3, :3].T + to_voxel[:3, 3]  # may be outside by up to a voxel
        if (voxels < -1).any() or (voxels > np.array(shape)).any():
            what = f"streamline {number} leaves the image of shape {shape}: points must be in RAS mm of dwi.nii.gz"
            raise DataError(what, where=str(file), fix=FORMATS)
    return [line for line in lines if len(line) > 1]


def _file(folder: Path, *names: str) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise InputMissing(f"{folder} has no {' or '.join(names)}", where="data.path", fix=FORMATS)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Convert exceptions about a damaged file to DataError."""
    nibabel = require("nibabel", "tractodiff")
    try:
        yield
    except (OSError, EOFError, ValueError, TypeError, IndexError, nibabel.filebasedimages.ImageFileError) as error:
        raise DataError(f"cannot be read: {error}", where=str(file), fix=FORMATS) from error
    except (nibabel.streamlines.tractogram_file.HeaderError, nibabel.streamlines.tractogram_file.DataError) as error:
        raise DataError(f"cannot be read: {error}", where=str(file), fix=FORMATS) from error


def _dipy(module: str) -> Any:
    return require(f"dipy.{module}", "tractodiff")


MIN_ANISOTROPY = 0.2
BUNDLES_SPLIT = {"sub_1": "train", "sub_2": "train", "sub_3": "train", "sub_4": "val", "sub_5": "test"}
ATLAS_VOXEL = 4.0  # mm
ATLAS_SIZE = 48  # voxels, wide enough for the largest of the five
MIN_DENSITY = 0.02  # mm of streamline per voxel, smoothed over a voxel
FORMATS = (
    "data.path takes a folder of subjects, each a folder with dwi.nii.gz (4-D), dwi.bval, dwi.bvec, mask.nii.gz (3-D, "
    "white matter) and streamlines in RAS mm: *.trk or *.tck"
)
