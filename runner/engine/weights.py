"""Load initial weights into a model: all of them, or those that match, with a table of the result."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from runner.base.errors import ConfigError, DataError, IncompatibleResume, Problem, SecurityRefusal
from runner.base.text import abbreviate
from runner.config.schema import did_you_mean
from runner.config.settings import Settings, WeightsSettings
from runner.distributed.parallel import Parallel
from runner.durable import files
from runner.durable.weight_source import WeightSource, find_weights
from runner.engine.adapter import Adapter

NO_ADAPTER = Adapter()


@dataclass
class WeightMatch:
    """Match of the tensors of a source and a model.

    taken      names in the model that are loaded, including tied ones
    missing    names of the model that the source lacks; they keep their initialization
    ignored    names of the source that the model lacks, or that `weights.only` excludes
    different  descriptions of names with another shape or kind of number
    stripped   prefix that was removed from all names of the source, such as "module."
    cast       number of tensors in another precision
    """

    taken: dict[str, Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    stripped: str = ""
    cast: int = 0


def begin_with(settings: Settings, model: nn.Module, parallel: Parallel, adapter: Adapter = NO_ADAPTER) -> str:
    """Load the weights that the settings name; return a message for the user.

    adapter  of the model; the weights are those of the model without it

    Floating-point weights take the model's type. Raises InputMissing, DataError for files that are damaged,
    SecurityRefusal for one that could run code, IncompatibleResume with what is missing, unexpected, of another shape,
    ConfigError for names in `weights.only` and `weights.rename` that do not exist.
    """
    options, names = settings.weights, {adapter.base_name(name): name for name in model.state_dict()}
    wanted = {
        base_name: tensor
        for name, tensor in model.state_dict().items()
        if (base_name := adapter.base_name(name)) is not None
    }
    source = find_weights(str(options.source), settings.root)
    tensors = _renamed(read_tensors(source, f"weights={options.source}"), options.rename)
    found = match(tensors, model, wanted, options, adapter)
    problems = [
        f"{len(names)} {what}: {abbreviate(names, _NUM_SHOWN)}"
        for what, names in (
            ("missing", found.missing),
            ("unexpected", [] if options.only else found.ignored),
            ("of another shape", found.different),
        )
        if names
    ]
    if (problems and options.strict) or not found.taken:
        raise IncompatibleResume(
            f"these are weights of another model; {'; '.join(problems)}",
            where=f"weights={options.source}",
            fix="use the task options they were trained with; to load what matches: weights.strict=false, "
            "weights.only=[MODULE] or weights.rename={OLD: NEW}",
        )
    parallel.load(model, {names[name]: tensor.to(wanted[name].dtype) for name, tensor in found.taken.items()})
    return _table(found, source.shown)


def match(
    tensors: dict[str, Tensor],
    model: nn.Module,
    wanted: Mapping[str, Tensor],
    options: WeightsSettings,
    adapter: Adapter = NO_ADAPTER,
) -> WeightMatch:
    """Match the tensors with the model by name and shape.

    wanted  the model's state_dict: of a sharded model, shapes are those of the full tensors
    Raises ConfigError for modules in `weights.only` that the model lacks.
    """
    _check_modules(options.only, wanted)
    found, stripped = named_as(tensors, wanted)
    is_used = {name: not options.only or _under(name, options.only) for name in {*wanted, *found}}
    result = WeightMatch(
        stripped=stripped, ignored=sorted(name for name in found if name not in wanted or not is_used[name])
    )
    for name, tensor in wanted.items():
        if not is_used[name]:
            continue
        given = found.get(name)
        if given is None:
            result.missing.append(name)
        elif given.shape != tensor.shape or given.is_floating_point() != tensor.is_floating_point():
            result.different.append(f"{name} is {_shape(given)}, must be {_shape(tensor)}")
        else:
            result.taken[name] = given
            result.cast += given.dtype != tensor.dtype
    _add_tied(result, model, adapter)
    return result


def _add_tied(result: WeightMatch, model: nn.Module, adapter: Adapter) -> None:
    """Fill a missing tensor from a parameter that it is tied to: files store a shared tensor once."""
    shared: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(weight), []).append(adapter.base_name(name) or name)
    for names in shared.values():
        there = next((name for name in names if name in result.taken), None)
        for name in names if there else ():
            if name in result.missing:
                result.missing.remove(name)
                result.taken[name] = result.taken[str(there)]


def read_tensors(source: WeightSource, where: str) -> dict[str, Tensor]:
    """Return all tensors of the source. Raises DataError if shards lack a tensor, or have it twice."""
    found: dict[str, Tensor] = {}
    for file in source.files:
        for name, tensor in read_weights(file, where if len(source.files) == 1 else f"{where}: {file.name}").items():
            if name in found:
                raise DataError(
                    f"two shards have the tensor {name}", where=where, fix="keep the files of one model in a folder"
                )
            found[name] = tensor
    lacking = [name for name in source.index or () if name not in found]
    if lacking:
        what = f"the shards lack {len(lacking)} tensors of their index: {abbreviate(lacking, _NUM_SHOWN)}"
        raise DataError(what, where=where, fix="fetch the folder again, with all its files")
    return found | (read_weights(source.average, where) if source.average else {})


def read_weights(file: Path, where: str = "") -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    where  the setting to name in errors; empty: the file
    """
    from safetensors.torch import load

    content = files.read(file)
    try:
        return load(content)
    except Exception as error:  # the reader does not document its exceptions
        where = where or str(file)
        if content.startswith(
            _PICKLES
        ):  # checked only now: a valid file with a header of 640 bytes starts like a pickle
            raise SecurityRefusal(
                "is a pickle, which may run code when it is read",
                where=where,
                fix=f"convert it to safetensors without executing it: accel-run import {file}",
            ) from None
        fix = "it may be truncated: download it again"
        raise DataError(f"is not in the safetensors format: {error}", where=where, fix=fix) from error


def named_as(tensors: dict[str, Tensor], wanted: Collection[str]) -> tuple[dict[str, Tensor], str]:
    """Return the tensors by the names of the model, and the prefix that was removed from all of them.

    Wrappers such as DDP add a prefix to all names. It is removed if more names match without it.
    """
    found, stripped = tensors, ""
    best, num_best = (tensors, ""), len(found.keys() & set(wanted))
    while lead := next((lead for lead in _PREFIXES if found and all(name.startswith(lead) for name in found)), ""):
        found = {name.removeprefix(lead): tensor for name, tensor in found.items()}
        stripped += lead
        num_fitting = len(found.keys() & set(wanted))
        if num_fitting > num_best:
            best, num_best = (found, stripped), num_fitting
    return best


def _renamed(tensors: dict[str, Tensor], given: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors with `weights.rename` applied: {old: new} for modules and tensors, the longest old first."""
    rename = {str(old): str(new) for old, new in given.items()}
    if problems := _unknown(rename, tensors):
        raise ConfigError(problems)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        old = max((old for old in rename if _under(name, [old])), key=len, default=None)
        new = name if old is None else f"{rename[old]}{name.removeprefix(old)}".removeprefix(".")
        if new in found:
            what = f"two tensors would be named {new}"
            raise ConfigError(Problem(what, "weights.rename", "rename one of them to another name"))
        found[new] = tensor
    return found


def check_names(source: WeightSource, options: WeightsSettings) -> None:
    """Raise ConfigError for names in `weights.rename` that the source lacks; only headers are read.

    A file that is not in the safetensors format is reported when it is loaded.
    """
    from safetensors import SafetensorError, safe_open

    names: set[str] = set()
    for file in source.files if options.rename else ():
        try:
            with safe_open(str(file), framework="pt") as opened:
                names.update(opened.keys())
        except (SafetensorError, OSError):
            return
    if problems := _unknown([str(old) for old in options.rename], names):
        raise ConfigError(problems)


def _unknown(renamed: Collection[str], names: Collection[str]) -> list[Problem]:
    """Return a problem for each module or tensor that is not the longest one above any of the names."""
    used = {max((old for old in renamed if _under(name, [old])), key=len, default=None) for name in names}
    return [
        Problem(
            f"the weights have no {old}; they have {abbreviate(sorted(names), _NUM_SHOWN)}",
            f"weights.rename.{old}",
            did_you_mean(old, _modules(names)),
        )
        for old in sorted(renamed)
        if old not in used
    ]


def _check_modules(only: Iterable[str], wanted: Collection[str]) -> None:
    """Raise ConfigError for names in `weights.only` under which the model has no tensor."""
    problems = [
        Problem(
            f"the model has no {name}; it has {abbreviate(sorted({each.partition('.')[0] for each in wanted}), 8)}",
            "weights.only",
            did_you_mean(name, _modules(wanted)),
        )
        for name in only
        if not any(_under(each, [name]) for each in wanted)
    ]
    if problems:
        raise ConfigError(problems)


def _modules(names: Iterable[str]) -> list[str]:
    """Return the names and those of all modules above them."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        found |= dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return list(found)


def _under(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _table(found: WeightMatch, shown: str) -> str:
    """Return a summary line of the loaded tensors, followed by a row for each other case that occurred."""
    changed = f", {found.cast} of them in another precision" if found.cast else ""
    stripped = f"; the prefix {found.stripped} was removed from their names" if found.stripped else ""
    rows = [
        ("missing", found.missing, "keep their initialization"),
        ("ignored", found.ignored, "not used by the model"),
        ("other shape", found.different, "keep their initialization"),
    ]
    lines = [f"initial weights: {len(found.taken)} tensors of {shown}{changed}{stripped}"]
    if any(names for _, names, _ in rows):
        lines.append(f"  {'taken':<12}{len(found.taken):>5}  {abbreviate(_summary(found.taken), _NUM_SHOWN)}")
    lines += [
        f"  {what:<12}{len(names):>5}  {abbreviate(names, _NUM_SHOWN)}: {meaning}"
        for what, names, meaning in rows
        if names
    ]
    return "\n".join(lines)


def _summary(names: Iterable[str]) -> list[str]:
    """Return the top modules of the names, each with its number of tensors."""
    counts: dict[str, int] = {}
    for name in names:
        top = name.partition(".")[0]
        counts[top] = counts.get(top, 0) + 1
    return [f"{top} ({count})" for top, count in counts.items()]


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


_NUM_SHOWN = 5
_PREFIXES = ("module.", "_orig_mod.", "model.")  # prefixes of DataParallel and DDP, torch.compile, Lightning
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
