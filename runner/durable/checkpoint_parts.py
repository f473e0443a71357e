"""Sharded checkpoints, which several ranks write together: each writes its shards, and rank 0 also the manifest.

    model-part00000.safetensors  model-part00001.safetensors ...

Each part contains one rank's rows (along the first dimension) of every sharded tensor; parts are in the order of the
ranks. If several groups of ranks each hold a copy of the model, the first group writes. Tensors that are not sharded
are only in part 0. So each tensor is either in all parts or in one of them, and no index is needed.

All ranks write into the same temporary folder. Once its files are durable, a rank writes a report there with their
sizes and hashes. Rank 0 waits for all reports, and only then writes the manifest and renames the folder: until every
part is durable, there is no checkpoint. The reports are files instead of messages, because parts are written by
background threads, and a process group may only be used by one thread.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.errors import DataError, StorageError
from runner.durable import files
from runner.durable.safetensors_header import InvalidFormat

if TYPE_CHECKING:  # `status` verifies checkpoints without importing torch
    from torch import Tensor

    from runner.tensors.stored_tensor import StoredTensor

Entry = dict[str, Any]  # name, size and sha256 of a file


@dataclass(frozen=True)
class CheckpointPart:
    """The part of a checkpoint that a snapshot contains.

    num_ranks  ranks that write parts
    token      random name of this save, the same on all ranks
    """

    rank: int
    num_ranks: int
    token: str


def part_stem(stem: str, rank: int) -> str:
    """Return the file stem of a rank's part."""
    return f"{stem}-part{rank:05}"


def file_stem(name: str) -> str:
    """Return the stem of a tensor file, without the number of a part; empty for other files."""
    return _PART.sub("", name.removesuffix(_SUFFIX)) if name.endswith(_SUFFIX) else ""


def is_part_stem(stem: str) -> bool:
    """Return whether a file stem belongs to a rank's part."""
    return _PART.search(stem) is not None


def write_files(temporary: Path, stems: Mapping[str, Sequence[bytes | memoryview]]) -> Iterator[Entry]:
    """Write files durably, given their content by name; yield their entries for the manifest."""
    for name, chunks in stems.items():
        size, sha256 = files.write_new(temporary / name, chunks)
        yield {"name": name, "size": size, "sha256": sha256}


def report_part(temporary: Path, rank: int, entries: Sequence[Entry]) -> None:
    """Report to rank 0 that the part of this rank is durable."""
    files.fsync_directory(temporary)
    files.atomic_write(temporary / _report_name(rank), json.dumps({"files": [*entries]}))


def report_failure(temporary: Path, rank: int, reason: str) -> None:
    """Report to rank 0 that this rank cannot write its part; never raises."""
    with suppress(StorageError):
        files.atomic_write(temporary / _report_name(rank), json.dumps({"error": reason}))


def collect_parts(temporary: Path, part: CheckpointPart, timeout_s: float = 600.0) -> list[Entry]:
    """Wait on rank 0 until the parts of all other ranks are durable; remove the reports and return the entries.

    timeout_s  seconds to wait for the next report

    Raises StorageError if a rank failed, does not report, or reports a file that differs from the one on disk.
    """
    missing, entries = set(range(1, part.num_ranks)), list[Entry]()
    deadline = time.monotonic() + timeout_s
    while missing:
        for rank in sorted(missing):
            if not files.exists(temporary / _report_name(rank)):
                continue
            report = files.read_object(temporary / _report_name(rank))
            if "files" not in report:
                raise StorageError(f"rank {rank} cannot write its part: {report.get('error')}", where=str(temporary))
            entries += report["files"]
            missing.discard(rank)
            deadline = time.monotonic() + timeout_s
        if missing and time.monotonic() > deadline:
            raise StorageError(f"rank {min(missing)} has not written its part", where=str(temporary))
        if missing:
            time.sleep(_POLL_S)
    for entry in entries:
        if files.file_size(temporary / entry["name"]) != entry["size"]:
            raise StorageError(f"{entry['name']} does not have the size that its rank reported", where=str(temporary))
    for rank in range(1, part.num_ranks):
        files.remove(temporary / _report_name(rank))
    return entries


def open_files(paths: Sequence[Path], check: Callable[[Path], None] | None = None) -> dict[str, StoredTensor]:
    """Return the tensors of a file, or of all parts, by name; only headers are read.

    check  verifies a file: immediately if it is the only one, a part before its values are read for the first time

    Raises DataError if a file is not in the safetensors format, or if the parts are inconsistent.
    """
    from runner.durable.safetensors_reader import join_parts, open_tensors

    if check and len(paths) == 1:
        check(paths[0])
    parts = []
    for path in paths:
        try:
            tensors = open_tensors(path)
        except InvalidFormat as error:  # valid hashes, but untrusted content
            what = f"{path.name} is not in the safetensors format: {error}"
            raise DataError(what, where=str(path.parent), fix="use another checkpoint of the run") from error
        if check and len(paths) > 1:
            checked = cache(partial(check, path))
            tensors = {name: _read_after(checked, tensor) for name, tensor in tensors.items()}
        parts.append(tensors)
    return join_parts(parts, paths[0].parent)


def _read_after(check: Callable[[], None], tensor: StoredTensor) -> StoredTensor:
    def fill(start: int, rows: Tensor) -> None:
        check()
        tensor.fill(start, rows)

    return replace(tensor, fill=fill)


def _report_name(rank: int) -> str:
    return f"part{rank:05}.json"


_PART = re.compile(r"-part\d{5}$", re.ASCII)
_SUFFIX = ".safetensors"
_POLL_S = 0.02
