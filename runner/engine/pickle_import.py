"""Convert pickle checkpoints to safetensors, without executing what they contain."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
import warnings
from collections.abc import Mapping
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
from runner.durable.tensors import fault, pieces


@dataclass(frozen=True)
class Imported:
    """Result of converting a foreign file: its tensors, omitted entries, and whether the reader had network access."""

    num_tensors: int
    num_bytes: int
    entry: str
    left_out: int
    had_network: bool


def convert(source: Path, target: Path, key: str | None) -> Imported:
    """Write the tensors of a torch.save file to the new safetensors file `target`.

    Call it in a separate process, because it drops network access, starting of programs and most memory first. Only
    tensors and plain data are constructed, never objects that the file names. Raises SecurityRefusal if the file
    requests other objects, CannotCreate if the target exists, DataError, ConfigError and HostMemoryError.
    """
    warnings.simplefilter("ignore")  # torch's warnings assume a trusted file
    size = source.stat().st_size
    had_network = not confine(size)
    content = _unpickled(source)
    state, entry = _descended(content, key, source)
    given = [(str(name), value.detach()) for name, value in state.items() if isinstance(value, Tensor)]
    tensors = dict(given)
    problems = [f"{to_one_line(name, 80)}: {why}" for name, tensor in given if (why := _why_not(name, tensor))]
    problems += [
        f"{to_one_line(name, 80)}: the name occurs twice" for name, tensor in given if tensors[name] is not tensor
    ]
    if not problems and (written := sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())) > 4 * (
        size + _SMALL
    ):
        problems = [f"its tensors would take {written / 2**30:,.1f} GiB, which the file's size does not explain"]
    if problems:
        what = f"cannot be stored as safetensors: {'; '.join(problems[:_NUM_SHOWN])}"
        fix = "save plain tensors in the program that created the file"
        raise DataError(what, where=str(source), fix=fix)
    try:
        size, _ = files.write_new(target, pieces(tensors))
    except StorageError as error:
        if isinstance(error.__cause__, FileExistsError):
            raise _taken(target) from None
        raise CannotCreate(error.problems[0].what, where=str(target), fix=error.problems[0].fix) from error
    return Imported(len(tensors), size, entry, len(state) - len(tensors), had_network)


def _why_not(name: str, tensor: Tensor) -> str | None:
    """Return why a file cannot store this tensor under this name, or None if it can."""
    if tensor.is_nested or tensor.device.type != "cpu":
        return "it is nested" if tensor.is_nested else f"it is on {tensor.device} and has no values"
    if name == "__metadata__":
        return "the name is reserved by the format"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "its name is not valid text"
    return fault(tensor)


def refuse_taken(target: Path) -> None:
    """Raise an error with exit code 73 if the name exists."""
    if files.exists(target):
        raise _taken(target)


def settle(temporary: Path, target: Path) -> None:
    """Move the temporary file to `target`, flushed to disk, without replacing an existing file."""
    try:
        os.link(temporary, target, follow_symlinks=False)
    except FileExistsError:
        raise _taken(target) from None
    except OSError:  # a file system without hard links: check and rename are not atomic
        refuse_taken(target)
        files.rename(temporary, target)
    files.fsync_directory(target.parent)


def _taken(target: Path) -> AccelRunError:
    return CannotCreate("exists already and is not overwritten", where=str(target), fix="give another name after FILE")


def confine(size: int) -> bool:
    """Drop privileges: no subprocesses and limited memory; return whether network access was removed too."""
    is_alone = False
    if sys.platform == "linux":
        is_alone = int(ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER | _CLONE_NEWNET)) == 0
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for what, most in ((resource.RLIMIT_AS, taken + 4 * size + (1 << 30)), (resource.RLIMIT_CPU, 3600)):
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    sys.addaudithook(_refuse)
    return is_alone


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _REFUSED:
        raise PermissionError(f"{event} is not allowed during an import")


def _unpickled(source: Path) -> Any:
    """Unpickle the file, allowing only tensors and plain data."""
    try:
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=True)  # noqa: TID251 - the one place
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(source, map_location="cpu", weights_only=True)  # noqa: TID251 - the older format
    except MemoryError as error:
        fix = "it is damaged or malicious: download it again from a trusted source"
        raise HostMemoryError("requests more memory than its size explains", where=str(source), fix=fix) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(source), fix="check its permissions") from error
    except Exception as error:  # any exception type: the content of the file decides where the reader fails
        asked = _ASKED.search(str(error))
        if asked:
            raise SecurityRefusal(
                f"requests {sanitize(asked[1])}, which is code and not a weight",
                where=str(source),
                fix="ask for a file with a plain mapping of names to tensors: torch.save(model.state_dict(), file)",
            ) from None
        operand = _OPERAND.search(str(error))
        first = operand[0] if operand else (str(error) or type(error).__name__).splitlines()[0][:120]
        what, fix = (
            f"is not a file of torch.save, or damaged: {sanitize(first)}",
            "download it again, or use another file",
        )
        raise DataError(what, where=str(source), fix=fix) from None


def _descended(content: Any, key: str | None, source: Path) -> tuple[Mapping[Any, Any], str]:
    """Return the mapping that contains the tensors, and the key path to it."""
    way: list[str] = []
    for part in key.split(".") if key else ():
        if not isinstance(content, Mapping) or part not in content:
            raise ConfigError(Problem(f"has no entry {part}", str(source), _offer(content, part)))
        content = content[part]
        way.append(part)
    while isinstance(content, Mapping):
        inner = [name for name in _WRAPPERS if isinstance(content.get(name), Mapping)]
        if not inner and any(isinstance(value, Tensor) for value in content.values()):
            break  # checked last: a checkpoint has other tensors, such as its step, next to the weights
        if not inner or len(way) > _NUM_WRAPPERS:
            raise ConfigError(Problem("contains no named tensors", str(source), _offer(content, "")))
        content = content[inner[0]]
        way.append(inner[0])
    if not isinstance(content, Mapping):
        what = f"must contain a mapping of names to tensors, but contains {type(content).__name__}"
        raise DataError(what, where=str(source), fix="ask for a file saved with torch.save(model.state_dict(), file)")
    return content, ".".join(way)


def _offer(content: Any, wanted: str) -> str:
    known = [str(name) for name in content] if isinstance(content, Mapping) else []
    near = did_you_mean(wanted, known) if wanted else ""
    return near or (f"choose an entry with key=NAME; available: {', '.join(known[:_NUM_SHOWN])}" if known else "")


_NUM_SHOWN = 5
_SMALL = 16 << 20  # bytes that are allowed for any file
_NUM_WRAPPERS = 4
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net", "weights")
_ASKED = re.compile(r"GLOBAL\s+([\w.]+)")
_OPERAND = re.compile(r"Unsupported operand \d+")
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
_REFUSED = frozenset(
    {
        "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "socket.connect",
        "socket.bind", "os.remove", "os.rename", "os.rmdir", "os.chmod", "os.symlink", "os.link", "shutil.rmtree",
    }
)  # fmt: skip
