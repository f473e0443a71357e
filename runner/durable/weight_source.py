"""Find the safetensors files that `weights=` names: a run, a checkpoint, a file, shards, or a Hugging Face folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.base.errors import AccelRunError, ConfigError, DataError, InputMissing, Problem, SecurityRefusal
from runner.base.json_values import as_dict
from runner.base.text import abbreviate
from runner.config.request import override_of
from runner.durable import files
from runner.durable.checkpoint import FORMAT_OF_PARTS, MANIFEST, Loaded, load
from runner.durable.checkpoint_choice import choose
from runner.durable.directory import LAST, RunDirectory, is_name, is_run


@dataclass(frozen=True)
class WeightSource:
    """Source of tensors.

    shown    its name in messages
    files    safetensors files; several for shards
    index    tensor name -> file name, for shards with an index
    average  file of averaged weights that replace those of the same name, as evaluation does; None: none
    """

    shown: str
    files: tuple[Path, ...]
    index: Mapping[str, str] | None = None
    average: Path | None = None


def find_weights(value: str, root: Path, warn: Callable[[str], None] = lambda _: None) -> WeightSource:
    """Return the files behind `weights=value`; nothing is read but manifests and indexes.

    root  folder in which a run is found by name
    warn  called with a message about each damaged checkpoint of a run that was skipped
    Raises InputMissing if nothing has this name, ConfigError for a folder without weights, DataError for shards that
    are missing or a damaged checkpoint, SecurityRefusal for a folder with pickles only.
    """
    where, path = f"weights={value}", Path(value).expanduser()
    if path.is_file():
        return _of_index(path, where) if path.name.endswith(_INDEX) else WeightSource(str(path), (path.resolve(),))
    if path.is_dir() and not is_run(path):
        return _of_folder(path, where)
    if path.is_dir() or value == LAST or is_name(value):
        try:
            run = RunDirectory.find(root, value)
        except InputMissing as error:
            raise _nothing(where, error.problems[0].fix) from None
        chosen = choose(run, None, warn)
        marks = f" ({', '.join(chosen.marks)})" if chosen.marks else ""
        return _of_checkpoint(chosen.checkpoint, f"run {run.name}, {chosen.checkpoint.path.name}{marks}")
    raise _nothing(where, "")


def with_run_directory(words: Iterable[str], root: Path) -> tuple[str, ...]:
    """Return the overrides with the run that `weights=` names as a path, for a run in another output_root.

    root  folder in which the run is found by name
    """
    return tuple(_with_run_directory(word, root) for word in words)


def _with_run_directory(word: str, root: Path) -> str:
    key, _, value = word.partition("=")
    value = value.strip("'\"")
    path = Path(value).expanduser()
    is_run_name = value == LAST or is_name(value)
    if key not in ("weights", "weights.source") or not is_run_name or path.is_file() or path.is_dir():
        return word
    try:
        return override_of(key, str(RunDirectory.find(root, value).path.absolute()))
    except InputMissing:  # reported by the run that uses it
        return word


def _nothing(where: str, runs: str) -> InputMissing:
    fix = "name a run, a checkpoint, a .safetensors file, or a folder with model.safetensors or its shards"
    return InputMissing("does not exist", where=where, fix=f"{fix}\n{runs}".strip())


def _of_checkpoint(checkpoint: Loaded, shown: str) -> WeightSource:
    values = as_dict(checkpoint.state.get("values"))
    if values.get("adapter", "none") != "none" and values.get("adapter.checkpoint") == "adapter":
        what = "holds an adapter without the weights of its model"
        fix = "export them together: accel-run export RUN format=safetensors, then weights=RUN/export/model.safetensors"
        raise ConfigError(Problem(what, shown, fix))
    if checkpoint.manifest["format_version"] == FORMAT_OF_PARTS:
        what, fix = "is stored in parts, one of each rank", "accel-run export RUN format=safetensors"
        raise ConfigError(
            Problem(what, shown, f"make one file of it: {fix}, then weights=RUN/export/model.safetensors")
        )
    is_used = {"averaging": values.get("averaging.evaluate") is True, "optimizer_average": True}
    stem = next((stem for stem, used in is_used.items() if used and stem in checkpoint.stems), None)
    average = checkpoint.path / f"{stem}.safetensors" if stem else None
    return WeightSource(shown, (checkpoint.path / "model.safetensors",), average=average)


def _of_folder(path: Path, where: str) -> WeightSource:
    if (path / MANIFEST).is_file():
        return _of_checkpoint(load(path.absolute()), f"checkpoint {path.name}")
    names = sorted(each.name for each in path.iterdir() if each.is_file())
    indexes = [name for name in names if name.endswith(_INDEX)]
    if indexes:
        return _of_index(
            path / (_PREFERRED + ".index.json" if _PREFERRED + ".index.json" in indexes else indexes[0]), where
        )
    tensors = [name for name in names if name.endswith(".safetensors")]
    shards = [found for name in tensors if (found := _SHARD.fullmatch(name))]
    if _PREFERRED in tensors or (len(tensors) == 1 and not shards):
        name = _PREFERRED if _PREFERRED in tensors else tensors[0]
        return WeightSource(str(path / name), ((path / name).resolve(),))
    if shards and len(shards) == len(tensors):
        _must_be_complete(shards, where)
        return WeightSource(f"{path} ({len(tensors)} shards)", tuple((path / name).resolve() for name in tensors))
    if tensors:
        fix = f"name one of them: weights={path / tensors[0]}"
        raise ConfigError(Problem(f"has several safetensors files and no index: {abbreviate(tensors, 5)}", where, fix))
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        raise SecurityRefusal(
            f"has only pickles, which may run code when they are loaded: {abbreviate(pickles, 5)}",
            where=where,
            fix=f"convert one without executing it: accel-run import {path / pickles[0]}",
        )
    what = "has no weights: it is not a run or a checkpoint, and has no .safetensors file"
    fix = "name a folder with model.safetensors, or with model.safetensors.index.json and its shards"
    raise ConfigError(Problem(what, where, fix))


def _of_index(path: Path, where: str) -> WeightSource:
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
        fix = 'it must map tensor names to files: {"weight_map": {NAME: FILE}}'
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


def _must_be_complete(shards: list[re.Match[str]], where: str) -> None:
    """Raise DataError unless the names model-00001-of-00003.safetensors are those of one complete set."""
    sets = {(found["stem"], int(found["total"])) for found in shards}
    if len(sets) > 1:
        what = f"has shards of different sets: {abbreviate(sorted(found[0] for found in shards), 5)}"
        raise DataError(what, where=where, fix="keep the files of one model in a folder")
    total = sets.pop()[1]
    lacking = sorted(set(range(1, total + 1)) - {int(found["number"]) for found in shards})
    if lacking:
        what = f"{len(lacking)} of {total} shards are missing: number {abbreviate(list(map(str, lacking)), 5)}"
        raise DataError(what, where=where, fix="download the folder again, with all its files")


_INDEX = ".safetensors.index.json"
_PREFERRED = "model.safetensors"
_INDEX_BYTES = 64 << 20
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors", re.ASCII)
