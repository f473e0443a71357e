"""Convert pickle checkpoints to safetensors, without executing what they contain."""

from __future__ import annotations

import os
import re
import resource
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.base.errors import (
    AccelRunError,
    CannotCreate,
    ConfigError,
    DataError,
    HostMemoryError,
    Problem,
    SecurityRefusal,
    StorageError,
    to_one_line,
)
from runner.base.secret import sanitize
from runner.config.schema import did_you_mean
from runner.durable import files
from runner.durable.safetensors_writer import serialize_tensors, unsupported_reason


@dataclass(frozen=True)
class Imported:
    """Result of converting a foreign file.

    entry        key path to the mapping that contains the tensors
    num_skipped  number of its entries that are not tensors
    """

    num_tensors: int
    num_bytes: int
    entry: str
    num_skipped: int


def convert(source: Path, target: Path, key: str | None) -> Imported:
    """Write the tensors of a torch.save file to the new safetensors file `target`.

    Call it in a separate process, because it first limits the memory of the process. Only tensors and plain data are
    constructed, never objects of other types that the file names. Raises SecurityRefusal if the file requests such
    objects, CannotCreate if the target exists, DataError, ConfigError and HostMemoryError.
    """
    warnings.simplefilter("ignore")  # torch's warnings assume a trusted file
    size = source.stat().st_size
    limit_resources(size)
    content = _unpickle(source)
    state, entry = _find_tensors(content, key, source)
    named_tensors = [(str(name), value.detach()) for name, value in state.items() if isinstance(value, Tensor)]
    tensors = dict(named_tensors)
    problems = [
        f"{to_one_line(name, 80)}: {reason}"
        for name, tensor in named_tensors
        if (reason := _explain_invalid(name, tensor))
    ]
    problems += [
        f"{to_one_line(name, 80)}: the name occurs twice"
        for name, tensor in named_tensors
        if tensors[name] is not tensor
    ]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if not problems and nbytes > 4 * (size + _FREE_BYTES):
        problems = [f"its tensors would take {nbytes / 2**30:,.1f} GiB, which the file's size does not explain"]
    if problems:
        what = f"cannot be stored as safetensors: {'; '.join(problems[:_MAX_SHOWN])}"
        fix = "save plain tensors in the program that created the file"
        raise DataError(what, where=str(source), fix=fix)
    try:
        size, _ = files.write_new(target, serialize_tensors(tensors))
    except StorageError as error:
        if isinstance(error.__cause__, FileExistsError):
            raise _exists_error(target) from None
        raise CannotCreate(error.problems[0].what, where=str(target), fix=error.problems[0].fix) from error
    return Imported(len(tensors), size, entry, len(state) - len(tensors))


def _explain_invalid(name: str, tensor: Tensor) -> str | None:
    if tensor.is_nested or tensor.device.type != "cpu":
        return "it is nested" if tensor.is_nested else f"it is on {tensor.device} and has no values"
    if name == "__metadata__":
        return "the name is reserved by the format"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "its name is not valid text"
    return unsupported_reason(tensor)


def refuse_existing(target: Path) -> None:
    """Raise an error with exit code 73 if the name exists."""
    if files.exists(target):
        raise _exists_error(target)


def publish(temporary: Path, target: Path) -> None:
    """Move the temporary file to `target`, flushed to disk, without replacing an existing file."""
    try:
        os.link(temporary, target, follow_symlinks=False)
    except FileExistsError:
        raise _exists_error(target) from None
    except OSError:  # a file system without hard links: check and rename are not atomic
        refuse_existing(target)
        files.rename(temporary, target)
    files.fsync_directory(target.parent)


def _exists_error(target: Path) -> AccelRunError:
    return CannotCreate("already exists and is not overwritten", where=str(target), fix="pass another name after FILE")


def limit_resources(size: int) -> None:
    """Limit memory and CPU time of this process, for a file of `size` bytes that may request any amount."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for kind, limit in ((resource.RLIMIT_AS, in_use + 4 * size + (1 << 30)), (resource.RLIMIT_CPU, 3600)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _unpickle(source: Path) -> Any:
    """Unpickle the file, allowing only tensors and plain data."""
    try:
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=True)  # noqa: TID251 - the one place
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(source, map_location="cpu", weights_only=True)  # noqa: TID251 - the older format
    except MemoryError as error:
        fix = "download it again from a trusted source, because it is damaged or malicious"
        raise HostMemoryError("requests more memory than its size can justify", where=str(source), fix=fix) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(source), fix="check its permissions") from error
    except Exception as error:  # any exception type: the content of the file decides where the reader fails
        requested = _REQUESTED_GLOBAL.search(str(error))
        if requested:
            raise SecurityRefusal(
                f"requests {sanitize(requested[1])}, which is code and not a weight",
                where=str(source),
                fix="ask for a file with a plain mapping of names to tensors: torch.save(model.state_dict(), file)",
            ) from None
        operand = _UNSUPPORTED_OPERAND.search(str(error))
        first = operand[0] if operand else (str(error) or type(error).__name__).splitlines()[0][:120]
        what = f"was not written by torch.save, or is damaged: {sanitize(first)}"
        raise DataError(what, where=str(source), fix="download it again, or use another file") from None


def _find_tensors(content: Any, key: str | None, source: Path) -> tuple[Mapping[Any, Any], str]:
    path: list[str] = []
    rest = key or ""
    while rest:
        # Entries may be numbered, or contain dots.
        names = {str(name): name for name in content} if isinstance(content, Mapping) else {}
        part = max((name for name in names if f"{rest}.".startswith(f"{name}.")), key=len, default="")
        if not part:
            part = rest.partition(".")[0]
            raise ConfigError(Problem(f"has no entry {part}", str(source), _suggest_entry(content, path, part)))
        content, rest = content[names[part]], rest[len(part) + 1 :]
        path.append(part)
    while isinstance(content, Mapping):
        inner = [name for name in _WRAPPERS if isinstance(content.get(name), Mapping)]
        # Wrappers come first: a checkpoint has other tensors, such as its step, next to the weights.
        if not inner and any(isinstance(value, Tensor) for value in content.values()):
            break
        if not inner or len(path) > _MAX_DEPTH:
            raise ConfigError(Problem("contains no named tensors", str(source), _suggest_entry(content, path, "")))
        content = content[inner[0]]
        path.append(inner[0])
    if not isinstance(content, Mapping):
        what = f"must contain a mapping of names to tensors, but contains {type(content).__name__}"
        raise DataError(what, where=str(source), fix="use a file saved with torch.save(model.state_dict(), file)")
    return content, ".".join(path)


def _suggest_entry(content: Any, path: Sequence[str], part: str) -> str:
    """Return which keys exist in the entry with this path, in the form that `key=` accepts."""
    names = [".".join((*path, str(name))) for name in content] if isinstance(content, Mapping) else []
    suggestion = did_you_mean(".".join((*path, part)), names) if part else ""
    return suggestion or (f"choose an entry with key=NAME; available: {', '.join(names[:_MAX_SHOWN])}" if names else "")


_MAX_SHOWN = 5
_FREE_BYTES = 16 << 20  # added to the size of a file before it is compared with the size of its tensors
_MAX_DEPTH = 4
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net", "weights")
_REQUESTED_GLOBAL = re.compile(r"GLOBAL\s+([\w.]+)")
_UNSUPPORTED_OPERAND = re.compile(r"Unsupported operand \d+")
