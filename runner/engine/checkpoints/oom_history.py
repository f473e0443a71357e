"""Record reductions of the micro-batch size after out-of-memory errors; a resumed run starts with the reduced size.

`passes.json` in the run directory has a row per reduction. A row applies only to the micro_batch_size and the number of
ranks with which it was recorded; if either differs, the run starts with the requested size.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from runner.durable.directory import RunDirectory
from runner.durable.files import exists, read_object, remove

FILE = "passes.json"
Use = Literal["training", "evaluation"]


@dataclass(frozen=True)
class ReducedMicroBatch:
    """A reduction of the micro-batch size.

    update      number of updates of the phase that were completed before the reduction
    rank        rank to which it applies; None: all ranks
    size        maximum number of samples of a micro-batch after the reduction
    asked       maximum number of samples that the settings request
    world_size  number of ranks
    in_place    True: the process continued; False: it ended, and the run resumed from its last checkpoint
    """

    phase: str
    update: int
    rank: int | None
    size: int
    asked: int
    world_size: int
    use: Use = "training"
    in_place: bool = True

    def applies_to(self, rank: int) -> bool:
        """Return whether the reduction applies to this rank."""
        return self.rank is None or self.rank == rank


def read_reductions(folder: Path) -> list[ReducedMicroBatch]:
    """Return the rows of a run; invalid ones are omitted."""
    rows = read_object(folder / FILE).get("smaller")
    return [ReducedMicroBatch(**row) for row in rows if _is_row(row)] if isinstance(rows, list) else []


def num_restarts(folder: Path) -> int:
    """Return the number of times that a run was restarted from its last checkpoint with smaller micro-batches."""
    return sum(not row.in_place for row in read_reductions(folder))


def write_reductions(directory: RunDirectory, rows: list[ReducedMicroBatch]) -> None:
    """Write these rows, replacing all others. Raises StorageError."""
    directory.write(FILE, json.dumps({"smaller": [asdict(row) for row in rows]}, indent=2) + "\n")


def remove_reductions(directory: RunDirectory) -> None:
    """Remove all rows."""
    if exists(directory.path / FILE):
        remove(directory.path / FILE)


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or row.keys() != ReducedMicroBatch.__dataclass_fields__.keys():
        return False
    counts = [row["update"], row["size"], row["asked"], row["world_size"], 0 if row["rank"] is None else row["rank"]]
    are_valid = all(type(count) is int and count >= 0 for count in counts) and row["size"] > 0
    are_valid = are_valid and isinstance(row["in_place"], bool)
    return are_valid and isinstance(row["phase"], str) and row["use"] in ("training", "evaluation")
