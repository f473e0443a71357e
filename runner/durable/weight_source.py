"""Find the files that `weights=` and `resume=` name: a run, a checkpoint, a file, shards, or a Hugging Face folder."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.base.errors import (
    AccelRunError,
    ConfigError,
    DataError,
    InputMissing,
    Problem,
    SecurityRefusal,
    StorageError,
)
from runner.base.json_values import as_dict
from runner.base.text import abbreviate
from runner.config.request import format_override
from runner.config.settings import Settings
from runner.durable import files
from runner.durable.checkpoint import FORMAT_OF_PARTS, MANIFEST, LoadedCheckpoint, load
from runner.durable.checkpoint_choice import choose_checkpoint
from runner.durable.directory import LAST, RunDirectory, is_run, is_run_name
from runner.durable.safetensors_header import InvalidFormat, read_header, refusal


@dataclass(frozen=True)
class WeightSource:
    """Source of tensors.

    shown      its name in messages
    files      safetensors files; several for shards
    index      tensor name -> file name, for shards with an index
    average    files of averaged weights, which replace the weights of the same names, as in evaluation
    is_joined  the files are the parts of a checkpoint: each has some rows of each tensor
    """

    shown: str
    files: tuple[Path, ...]
    index: Mapping[str, str] | None = None
    average: tuple[Path, ...] = ()
    is_joined: bool = False


def find_weights(value: str, root: Path) -> WeightSource:
    """Return the files behind `weights=value`. A checkpoint is verified; of other files, only an index is read.

    root  folder in which a run is found by name
    Raises InputMissing if nothing has this name, ConfigError for a folder without weights, DataError for shards that
    are missing or a damaged checkpoint, SecurityRefusal for a folder with pickles only.
    """
    where, path = f"weights={value}", Path(value).expanduser()
    if path.is_file():
        return _find_in_index(path, where) if path.name.endswith(_INDEX) else WeightSource(str(path), (path.resolve(),))
    if path.is_dir() and not is_run(path):
        return _find_in_folder(path, where)
    if path.is_dir() or value == LAST or is_run_name(value):
        try:
            run = RunDirectory.find(root, value)
        except InputMissing as error:
            raise _not_found_error(where, error.problems[0].fix) from None
        chosen = choose_checkpoint(run, None, lambda _: None)
        labels = f" ({', '.join(chosen.labels)})" if chosen.labels else ""
        return _find_in_checkpoint(chosen.checkpoint, f"run {run.name}, {chosen.checkpoint.path.name}{labels}")
    raise _not_found_error(where, "")


def check_start(settings: Settings, name: str) -> None:
    """Check, without torch, that `weights=` and `resume=` of a new run name valid sources.

    Raises AccelRunError as loading them would, if a source does not exist or weights are not in the safetensors format.
    Of files other than checkpoints, only headers and indexes are read.
    """
    try:
        if files.exists(settings.root / name):
            return  # it resumes from its own checkpoints
    except StorageError:
        return  # creating the run reports it
    if source := settings.weights.source:
        weights = find_weights(str(source), settings.root)
        for file in (*weights.files, *weights.average):
            try:
                read_header(file)
            except InvalidFormat as error:
                where = f"weights={source}"
                where = where if len(weights.files) == 1 else f"{where}: {file.name}"
                raise refusal(file, error, where) from None
    if settings.resume not in ("auto", "fresh"):
        find_start(settings.resume, settings.root)


def find_start(requested: str, root: Path, created: RunDirectory | None = None) -> RunDirectory | Path:
    """Return what `resume=` names: the folder of a checkpoint, or a run.

    created  run that this process has created, to which "last" does not refer
    """
    path = Path(requested).expanduser()
    if (path / MANIFEST).is_file():
        return path.absolute()
    try:
        return RunDirectory.find(root, requested, created=created)
    except InputMissing as error:
        (problem,) = error.problems
        raise InputMissing(problem.what, where=f"resume={requested}", fix=problem.fix) from None


def resolve_run_names(overrides: Iterable[str], root: Path) -> tuple[str, ...]:
    """Replace the run name in `weights=NAME` and `resume=NAME` by its path, for a run with another output_root.

    root  folder in which the run is found by name
    """
    return tuple(_resolve_run_name(override, root) for override in overrides)


def _resolve_run_name(override: str, root: Path) -> str:
    key, _, value = override.partition("=")
    value = value.strip("'\"")
    path = Path(value).expanduser()
    is_name = (value == LAST or is_run_name(value)) and not (key == "resume" and value in ("auto", "fresh"))
    if key not in RUN_KEYS or not is_name or path.is_file() or path.is_dir():
        return override
    try:
        return format_override(key, str(RunDirectory.find(root, value).path.absolute()))
    except InputMissing:  # reported by the run that uses it
        return override


RUN_KEYS = ("weights", "weights.source", "resume")  # settings that may name another run


def _not_found_error(where: str, runs: str) -> InputMissing:
    fix = "use a run, a checkpoint, a .safetensors file, or a folder with model.safetensors or its shards"
    return InputMissing("does not exist", where=where, fix=f"{fix}\n{runs}".strip())


def _find_in_checkpoint(checkpoint: LoadedCheckpoint, shown: str) -> WeightSource:
    values = as_dict(checkpoint.state.get("values"))
    if values.get("adapter", "none") != "none" and values.get("adapter.checkpoint") == "adapter":
        what = "contains an adapter without the weights of its model"
        fix = (
            "export them together: accel-run export RUN format=safetensors, then use"
            " weights=RUN/export/model.safetensors"
        )
        raise ConfigError(Problem(what, shown, fix))
    stem = averaged_stem(checkpoint)
    is_joined = checkpoint.manifest["format_version"] == FORMAT_OF_PARTS
    average = checkpoint.file_paths(stem) if stem else ()
    return WeightSource(shown, checkpoint.file_paths("model"), average=average, is_joined=is_joined)


def averaged_stem(checkpoint: LoadedCheckpoint) -> str | None:
    """Return the stem of the averaged weights that evaluation uses, if the checkpoint has some."""
    values = as_dict(checkpoint.state.get("values"))
    averages = {"averaging": values.get("averaging.evaluate") is True, "optimizer_average": True}
    return next((stem for stem, is_used in averages.items() if is_used and stem in checkpoint.stems), None)


def _find_in_folder(path: Path, where: str) -> WeightSource:
    if (path / MANIFEST).is_file():
        return _find_in_checkpoint(load(path.absolute()), f"checkpoint {path.name}")
    names = sorted(path.name for path in path.iterdir() if path.is_file())
    tensors = [name for name in names if name.endswith(".safetensors")]
    indexes = [name for name in names if name.endswith(_INDEX)]
    if indexes and _DEFAULT_FILE not in tensors:  # as in transformers, which prefers the single file
        name = _DEFAULT_FILE + ".index.json"
        return _find_in_index(path / (name if name in indexes else indexes[0]), where)
    shards = [match for name in tensors if (match := _SHARD.fullmatch(name))]
    if _DEFAULT_FILE in tensors or (len(tensors) == 1 and not shards):
        name = _DEFAULT_FILE if _DEFAULT_FILE in tensors else tensors[0]
        return WeightSource(str(path / name), ((path / name).resolve(),))
    if shards and len(shards) == len(tensors):
        _check_complete(shards, where)
        return WeightSource(f"{path} ({len(tensors)} shards)", tuple((path / name).resolve() for name in tensors))
    if tensors:
        fix = f"use one of them: {shlex.quote(format_override('weights', str(path / tensors[0])))}"
        raise ConfigError(Problem(f"has several safetensors files and no index: {abbreviate(tensors, 5)}", where, fix))
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        raise SecurityRefusal(
            f"contains only pickle files, which may execute code when loaded: {abbreviate(pickles, 5)}",
            where=where,
            fix=f"convert one without executing it: accel-run import {shlex.quote(str(path / pickles[0]))}",
        )
    what = "has no weights: it is not a run or a checkpoint, and has no .safetensors file"
    fix = "use a folder with model.safetensors, or with model.safetensors.index.json and its shards"
    raise ConfigError(Problem(what, where, fix))


def _find_in_index(path: Path, where: str) -> WeightSource:
    """Return the shards of an index as Hugging Face writes it: {"weight_map": {tensor name: file name}}."""
    try:
        content: Any = json.loads(files.read(path.resolve(), at_most=_INDEX_BYTES))
        index = content["weight_map"]
        assert isinstance(index, dict)
        assert index
        assert all(isinstance(name, str) for pair in index.items() for name in pair)
    except AccelRunError:
        raise
    except (ValueError, LookupError, TypeError, AssertionError, RecursionError) as error:
        fix = 'use an index that maps tensor names to files: {"weight_map": {NAME: FILE}}'
        raise DataError("is not an index of shards", where=f"{where}: {path.name}", fix=fix) from error
    names = sorted(set(index.values()))
    for name in names:
        if Path(name).name != name or name in (".", ".."):
            raise SecurityRefusal(
                f"names a file outside its folder: {name}", where=f"{where}: {path.name}", fix="do not use this folder"
            )
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        what = f"{len(missing)} of {len(names)} shards are missing: {abbreviate(missing, 5)}"
        raise DataError(what, where=where, fix="download the folder again, with all its files")
    shown = f"{path.parent} ({len(names)} shards)"
    return WeightSource(shown, tuple((path.parent / name).resolve() for name in names), index)


def _check_complete(shards: list[re.Match[str]], where: str) -> None:
    sets = {(match["stem"], int(match["total"])) for match in shards}
    if len(sets) > 1:
        what = f"has shards of different sets: {abbreviate(sorted(match[0] for match in shards), 5)}"
        raise DataError(what, where=where, fix="keep only the files of one model in the folder")
    total = sets.pop()[1]
    missing = sorted(set(range(1, total + 1)) - {int(match["number"]) for match in shards})
    if missing:
        what = f"{len(missing)} of {total} shards are missing: number {abbreviate(list(map(str, missing)), 5)}"
        raise DataError(what, where=where, fix="download the folder again, with all its files")


_INDEX = ".safetensors.index.json"
_DEFAULT_FILE = "model.safetensors"
_INDEX_BYTES = 64 << 20
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors", re.ASCII)
