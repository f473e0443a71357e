"""Remember micro-batch sizes that were reduced after out of memory, so that a resumed run starts with them.

`passes.json` of the run directory has a row for each time. A row holds for the settings under which memory ran out:
with another micro_batch_size, or on other ranks, a run begins with what is asked for.
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
    """From an update on, passes have fewer samples.

    update      number of updates made before it, in this phase
    rank        whose passes; None: those of all ranks
    size        most samples of a pass
    asked       most samples of a pass that the settings asked for
    world_size  number of ranks
    in_place    the process went on; else it ended, and the run goes on from its last checkpoint
    """

    phase: str
    update: int
    rank: int | None
    size: int
    asked: int
    world_size: int
    use: Use = "training"
    in_place: bool = True

    def is_of(self, rank: int) -> bool:
        """Tell whether it holds for this rank."""
        return self.rank is None or self.rank == rank


def remembered(folder: Path) -> list[ReducedMicroBatch]:
    """Return what a run remembers; what cannot be understood is left out."""
    rows = read_object(folder / FILE).get("smaller")
    return [ReducedMicroBatch(**row) for row in rows if _is_row(row)] if isinstance(rows, list) else []


def num_restarts(folder: Path) -> int:
    """Return how often a run wanted to go on from its last checkpoint in smaller passes."""
    return sum(not row.in_place for row in remembered(folder))


def remember(directory: RunDirectory, rows: list[ReducedMicroBatch]) -> None:
    """The run remembers these rows, and no others. Raises StorageError."""
    directory.write(FILE, json.dumps({"smaller": [asdict(row) for row in rows]}, indent=2) + "\n")


def forget(directory: RunDirectory) -> None:
    """The run remembers nothing."""
    if exists(directory.path / FILE):
        remove(directory.path / FILE)


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or row.keys() != ReducedMicroBatch.__dataclass_fields__.keys():
        return False
    counts = [row["update"], row["size"], row["asked"], row["world_size"], 0 if row["rank"] is None else row["rank"]]
    are_counts = all(type(count) is int and count >= 0 for count in counts) and row["size"] > 0
    are_counts = are_counts and isinstance(row["in_place"], bool)
    return are_counts and isinstance(row["phase"], str) and row["use"] in ("training", "evaluation")
