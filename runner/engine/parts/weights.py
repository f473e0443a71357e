"""Load initial weights into a model: all of them, or those that match, with a table of the result."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from runner.base.errors import ConfigError, DataError, IncompatibleResume, Problem, StorageError
from runner.base.text import abbreviate, dtype_name
from runner.config.module_names import is_under, module_prefixes
from runner.config.schema import did_you_mean
from runner.config.settings import Settings, WeightsSettings
from runner.distributed.parallel import Parallel
from runner.durable.safetensors_header import InvalidFormat, refusal
from runner.durable.safetensors_reader import join_parts, open_tensors
from runner.durable.weight_source import WeightSource, find_weights
from runner.engine.contract.lora import Adapter
from runner.tensors.shared_names import expand_shared_names, names_of_parameters
from runner.tensors.stored_tensor import StoredTensor

NO_ADAPTER = Adapter()
Value = TypeVar("Value")


@dataclass
class WeightMatch:
    """Result of matching the tensors of a source with those of a model.

    matched    name -> tensor to load, including tied ones
    missing    names of the model that the source lacks; they keep their initialization
    ignored    names of the source that the model lacks
    excluded   names of the source that `weights.only` does not select
    different  descriptions of tensors that differ in shape, or in whether they are floating-point
    stripped   prefix that was removed from all names of the source, such as "module."
    num_cast   number of matched tensors whose dtype differs from the model's
    """

    matched: dict[str, StoredTensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    stripped: str = ""
    num_cast: int = 0


def load_initial_weights(
    settings: Settings, model: nn.Module, parallel: Parallel, adapter: Adapter = NO_ADAPTER
) -> str:
    """Load the weights that the settings name; return a message for the user.

    adapter  adapter of the model; the source has the weights of the model without it

    Floating-point weights are converted to the model's dtype. Raises InputMissing, DataError for damaged files,
    SecurityRefusal for a file that could run code, IncompatibleResume listing the tensors that do not match,
    ConfigError for names in `weights.only` and `weights.rename` that do not exist.
    """
    options, names = settings.weights, {adapter.base_name(name): name for name in model.state_dict()}
    model_tensors = {
        base_name: tensor
        for name, tensor in model.state_dict().items()
        if (base_name := adapter.base_name(name)) is not None
    }
    source = find_weights(str(options.source), settings.root)
    weights, averages = read_tensors(source, f"weights={options.source}")
    tensors = _apply_renames(weights | averages, options.rename)
    result = match_weights(tensors, model, model_tensors, options, adapter, averages={*averages.values()})
    problems = [
        f"{len(names)} {what}: {abbreviate(names, _MAX_NAMES)}"
        for what, names in (
            ("missing", result.missing),
            ("unexpected", [] if options.only else result.ignored),
            ("of another shape", result.different),
        )
        if names
    ]
    if (problems and options.strict) or not result.matched:
        is_renamed = bool(options.rename) or bool(result.stripped)  # `result` has other names than the source
        fix = (not is_renamed and _suggest_rename(result)) or (
            "use the task options that the weights were trained with, and their precision if a task file defines it; to"
            " load only matching tensors: weights.strict=false or weights.only=[MODULE]; to rename tensors:"
            " weights.rename={OLD: NEW}"
        )
        what = f"the weights do not match the model: {'; '.join(problems)}"
        raise IncompatibleResume(what, where=f"weights={options.source}", fix=fix)
    parallel.load(model, {names[name]: tensor for name, tensor in result.matched.items()})
    return _format_table(result, source.shown)


def match_weights(
    tensors: dict[str, StoredTensor],
    model: nn.Module,
    model_tensors: Mapping[str, Tensor],
    options: WeightsSettings,
    adapter: Adapter = NO_ADAPTER,
    *,
    averages: Collection[StoredTensor] = (),
) -> WeightMatch:
    """Match the tensors with the model by name and shape.

    model_tensors  state_dict of the model; sharded tensors have the shape of the full tensor
    averages       those of the tensors that are averages; a tied weight has one under only one of its names
    Raises ConfigError for modules in `weights.only` that the model lacks.
    """
    _check_modules(options.only, model_tensors)
    found, stripped = strip_prefixes(tensors, model_tensors)
    names = [[adapter.base_name(name) or name for name in group] for group in names_of_parameters(model)]
    found |= expand_shared_names(names, {name: tensor for name, tensor in found.items() if tensor in averages})
    is_used = {
        name: not options.only or any(is_under(name, module) for module in options.only)
        for name in {*model_tensors, *found}
    }
    result = WeightMatch(
        stripped=stripped,
        ignored=sorted(name for name in found if name not in model_tensors),
        excluded=sorted(name for name in found if name in model_tensors and not is_used[name]),
    )
    for name, tensor in model_tensors.items():
        if not is_used[name]:
            continue
        loaded = found.get(name)
        if loaded is None:
            result.missing.append(name)
        elif loaded.shape != tensor.shape or loaded.is_floating_point() != tensor.is_floating_point():
            result.different.append(f"{name} is {_describe_tensor(loaded)} instead of {_describe_tensor(tensor)}")
        else:
            result.matched[name] = loaded
            result.num_cast += loaded.dtype != tensor.dtype
    _add_tied(result, names)
    return result


def _add_tied(result: WeightMatch, shared: Iterable[Sequence[str]]) -> None:
    """Fill a missing tensor from a parameter that it is tied to: files store a shared tensor once."""
    for names in shared:
        stored = next((name for name in names if name in result.matched), None)
        for name in names if stored else ():
            if name in result.missing:
                result.missing.remove(name)
                result.matched[name] = result.matched[str(stored)]


def read_tensors(source: WeightSource, where: str) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Return all weights of the source, and the averages that replace some of them; values are read when needed.

    Raises DataError if a tensor of the index is in no shard, or a tensor is in two shards.
    """
    average = _read_files(source.average, where, is_joined=source.is_joined) if source.average else {}
    tensors = _read_files(source.files, where, is_joined=source.is_joined)
    missing = [name for name in source.index or () if name not in tensors]
    if missing:
        what = f"{len(missing)} tensors in the index are missing from the shards: {abbreviate(missing, _MAX_NAMES)}"
        raise DataError(what, where=where, fix="download the folder again, with all its files")
    return tensors, average


def _read_files(paths: Sequence[Path], where: str, *, is_joined: bool) -> dict[str, StoredTensor]:
    """Return the tensors of several files.

    is_joined  each file has some rows of each tensor; False: each file has different tensors
    """
    shards = [read_weights(file, where if len(paths) == 1 else f"{where}: {file.name}") for file in paths]
    if is_joined:
        return join_parts(shards, paths[0].parent)
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for name in shard.keys() & tensors.keys():
            raise DataError(
                f"the tensor {name} is in two shards", where=where, fix="keep only the files of one model in the folder"
            )
        tensors |= shard
    return tensors


def read_weights(file: Path, where: str = "") -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file; only its header is read.

    where  the setting to name in errors; empty: the file
    """
    try:
        return open_tensors(file)
    except InvalidFormat as error:
        raise refusal(file, error, where or str(file)) from None


def strip_prefixes(tensors: dict[str, Value], names: Collection[str]) -> tuple[dict[str, Value], str]:
    """Return the tensors without the prefix of a wrapper, and that prefix.

    names  names of the tensors of the model

    Wrappers such as DDP add a prefix to all names. It is removed if more names match without it.
    """
    current, stripped = tensors, ""
    best, num_best = (tensors, ""), len(current.keys() & set(names))
    while prefix := next((prefix for prefix in _WRAPPER_PREFIXES if _is_common(prefix, current)), ""):
        current = {name.removeprefix(prefix): tensor for name, tensor in current.items()}
        stripped += prefix
        num_matches = len(current.keys() & set(names))
        if num_matches > num_best:
            best, num_best = (current, stripped), num_matches
    return best


def _is_common(prefix: str, names: Collection[str]) -> bool:
    return bool(names) and all(name.startswith(prefix) for name in names)


def _apply_renames(tensors: Mapping[str, Value], setting: Mapping[str, str]) -> dict[str, Value]:
    """Return the tensors with `weights.rename` applied: {old: new} for modules and tensors; the longest match wins."""
    rename = {str(old): str(new) for old, new in setting.items()}
    if problems := _find_unmatched(rename, tensors):
        raise ConfigError(problems)
    renamed: dict[str, Value] = {}
    for name, tensor in tensors.items():
        old = max((old for old in rename if is_under(name, old)), key=len, default=None)
        new = name if old is None else f"{rename[old]}{name.removeprefix(old)}".removeprefix(".")
        if new in renamed:
            what = f"two tensors would be named {new}"
            raise ConfigError(Problem(what, "weights.rename", "use another new name for one of them"))
        renamed[new] = tensor
    return renamed


def _suggest_rename(result: WeightMatch) -> str:
    """Return settings that rename ignored tensors so that most missing ones match; empty if there are none.

    The names may have an extra prefix in the source, such as `model.` in Lightning checkpoints, or in the model.
    """
    stored, missing = dict.fromkeys([*result.matched, *result.ignored]), {*result.missing}
    renames = [({prefix: ""}, names) for prefix, names in _find_prefixes(result.ignored, missing).items()]
    for prefix, names in _find_prefixes(result.missing, {*result.ignored}).items():
        renames.append(({(top := name.partition(".")[0]): f"{prefix}.{top}" for name in names}, names))
    settings, most = [], len(missing) // 2
    for rename, names in renames:
        if len(names) <= most:  # no more can match; there may be as many candidates as modules
            continue
        renamed: Collection[str] = ()
        with suppress(ConfigError):  # two tensors would have the same name
            renamed = _apply_renames(stored, rename)
        if (count := len(missing.intersection(renamed))) > most and result.matched.keys() <= {*renamed}:
            most, is_complete = count, len(missing) == count == len(result.ignored) and not result.different
            pairs = ", ".join(f"{old}: {new or chr(34) * 2}" for old, new in rename.items())
            settings = [f"weights.rename={{{pairs}}}", *([] if is_complete else ["weights.strict=false"])]
    return f"use {' '.join(map(shlex.quote, settings))}" if settings else ""


def _find_prefixes(names: Iterable[str], wanted: Collection[str]) -> dict[str, list[str]]:
    """Return prefix -> wanted names that are among `names` with this prefix."""
    found: dict[str, list[str]] = {}
    for name in names:
        for end in (index for index, character in enumerate(name) if character == "."):
            if name[end + 1 :] in wanted:
                found.setdefault(name[:end], []).append(name[end + 1 :])
    return found


def check_names(source: WeightSource, options: WeightsSettings) -> None:
    """Raise ConfigError for names in `weights.rename` that the source lacks; only headers are read.

    A file that is not in the safetensors format is reported when it is loaded.
    """
    names: set[str] = set()
    for file in source.files if options.rename else ():
        try:
            names.update(open_tensors(file))
        except (InvalidFormat, StorageError):
            return
    if problems := _find_unmatched([str(old) for old in options.rename], names):
        raise ConfigError(problems)


def _find_unmatched(renamed: Collection[str], names: Collection[str]) -> list[Problem]:
    """Return a problem for each renamed module or tensor that is not the longest match of any name."""
    used = {max((old for old in renamed if is_under(name, old)), key=len, default=None) for name in names}
    return [
        Problem(
            f"the weights have no {old}; they have {abbreviate(sorted(names), _MAX_NAMES)}",
            f"weights.rename.{old}",
            did_you_mean(old, module_prefixes([*names])),
        )
        for old in sorted(renamed)
        if old not in used
    ]


def _check_modules(only: Iterable[str], names: Collection[str]) -> None:
    """Raise ConfigError for names in `weights.only` under which the model has no tensor."""
    top_modules = sorted({tensor.partition(".")[0] for tensor in names})
    problems = [
        Problem(
            f"the model has no module or tensor {name}; at the top level, it has {abbreviate(top_modules, 8)}",
            "weights.only",
            did_you_mean(name, module_prefixes([*names])),
        )
        for name in only
        if not any(is_under(tensor, name) for tensor in names)
    ]
    if problems:
        raise ConfigError(problems)


def _format_table(result: WeightMatch, source: str) -> str:
    """Return a summary line of the loaded tensors, followed by a row for each kind of other tensors."""
    changed = f", {result.num_cast} of them in another precision" if result.num_cast else ""
    stripped = f"; the prefix {result.stripped} was removed from their names" if result.stripped else ""
    rows = [
        ("missing", result.missing, "keep their initialization"),
        ("ignored", result.ignored, "not used by the model"),
        ("excluded", result.excluded, "not in weights.only"),
        ("other shape", result.different, "keep their initialization"),
    ]
    lines = [f"initial weights: {len(result.matched)} tensors of {source}{changed}{stripped}"]
    if any(names for _, names, _ in rows):
        lines.append(
            f"  {'loaded':<12}{len(result.matched):>5}  {abbreviate(_count_by_module(result.matched), _MAX_NAMES)}"
        )
    lines += [
        f"  {what:<12}{len(names):>5}  {abbreviate(names, _MAX_NAMES)}: {meaning}"
        for what, names, meaning in rows
        if names
    ]
    return "\n".join(lines)


def _count_by_module(names: Iterable[str]) -> list[str]:
    counts: dict[str, int] = {}
    for name in names:
        top = name.partition(".")[0]
        counts[top] = counts.get(top, 0) + 1
    return [f"{top} ({count})" for top, count in counts.items()]


def _describe_tensor(tensor: Tensor | StoredTensor) -> str:
    return f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)}"


_MAX_NAMES = 5
_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "model.")  # prefixes of DataParallel and DDP, torch.compile, Lightning
