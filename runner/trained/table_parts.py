"""Keep the finished batches of a table on disk until it is complete, so that a stopped command can be continued."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from typing import Any

from runner.base.errors import StorageError
from runner.base.json_values import parse_object
from runner.base.text import abbreviate
from runner.distributed.world import World
from runner.durable import files
from runner.durable.checkpoint import MANIFEST
from runner.durable.directory import INCOMPLETE, RunDirectory
from runner.durable.weight_source import find_weights
from runner.engine.checkpoints.resumption import select_mathematics
from runner.engine.sources.training_identity import fingerprint_code, fingerprint_data
from runner.plan.run_plan import Plan
from runner.records.events import Console
from runner.trained.batch_predictions import PredictedBatch, PredictedRows, SplitBatches, open_batches
from runner.trained.trained_run import ModelSource, TrainedModel
from runner.version import __version__


def open_table(source: ModelSource, trained: TrainedModel, plan: Plan, world: World, console: Console) -> TableParts:
    """Open the batches of the table that the plan selects, with the rows of an earlier command with the same identity.

    Rank 0 reads these rows and prints their number. Raises ConfigError if the task has no such split.
    """
    options = {key: value for key, value in plan.inference.items() if key != "seed"}
    split = open_batches(trained.parts, plan.inference["seed"], **options)
    is_shard = world.world_size == 1 and split.num_shards > 1
    suffix = f"-{split.shard}-of-{split.num_shards}" if is_shard else ""
    name = f"{options.get('split', 'val')}{suffix}.csv"
    identity = world.broadcast(_identify(source, trained, plan, split) if world.is_first else {})
    table = TableParts(trained.directory, name, split, identity, console.info)
    if world.is_first:
        table.read()
        for folder, keys in table.find_others():
            console.info(
                f"{folder} has rows of {name} that are not used, because they were predicted with other values of"
                f" {abbreviate(keys)}; if you do not need them, delete the folder"
            )
        if table.batches:
            console.info(f"{name}: {table.num_kept:,} rows of an earlier command are used; the others are predicted")
    table.finished = frozenset(world.broadcast(sorted(table.batches)))
    return table


def _identify(source: ModelSource, trained: TrainedModel, plan: Plan, split: SplitBatches) -> dict[str, Any]:
    """Return what the rows of a table depend on, as JSON. The device and the number of ranks are not part of it."""
    parts, settings = trained.parts, plan.settings
    inference = {key: value for key, value in plan.inference.items() if key not in ("shard", "num_shards")}
    identity: dict[str, Any] = {f"inference.{key}": value for key, value in inference.items()}
    identity |= select_mathematics(plan.values())
    if source.checkpoint is not None:
        identity["checkpoint"] = files.read_object(source.checkpoint / MANIFEST)["sha256"]
    elif settings.weights.source:
        found = find_weights(str(settings.weights.source), settings.root)
        stats = [(str(file), file.stat()) for file in (*found.files, *found.average)]
        identity["weights"] = [
            dataclasses.asdict(settings.weights),
            [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        ]
    with closing(parts.splits.evaluation_loader(split.fetcher)) as loader:
        data, varying = fingerprint_data({"split": split.fetcher}, loader)
    # Only the first sample, because how many others are read depends on how fast they can be read.
    first = None if varying else next(iter(data["split"]["hashes"].values()), None)
    identity |= {"samples": [len(split.fetcher), first], "version of accel-run": __version__}
    identity |= fingerprint_code(parts.source)  # path -> hash
    content: dict[str, Any] = json.loads(json.dumps(identity, default=str))  # as it would be read from a file
    return content


class TableParts:
    """The finished batches of a table, by number, in memory and as parts on disk.

    A part is a JSON file with several batches. Parts are never changed, and their names are random, so ranks and
    commands that predict the same table at the same time can write to one folder.

    name      file name of the table
    split     the batches that the shards divide
    identity  JSON; what the rows depend on. Only a command with the same identity uses the parts
    report    called with a message once rows are on disk
    finished  numbers of the batches that are on disk at the start; their rows may be in memory on rank 0 only
    num_kept  number of rows that `read` has found
    """

    def __init__(
        self,
        directory: RunDirectory,
        name: str,
        split: SplitBatches,
        identity: Mapping[str, Any],
        report: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.directory, self.name, self.split, self.identity, self._report = directory, name, split, identity, report
        digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8).hexdigest()
        self.folder = f"predictions/{INCOMPLETE}/{name.removesuffix('.csv')}-{digest}"
        self.batches: dict[int, PredictedBatch] = {}
        self.finished: frozenset[int] = frozenset()
        self.num_kept = 0
        self._unfinished: list[PredictedRows] = []  # parts of the current batch, after an out-of-memory error
        self._unwritten: list[int] = []  # numbers of finished batches
        self._unwritten_size = 0
        self._has_written = False
        self._tenths = 0  # tenths of the batches that were finished at the last report
        self._last_write = time.monotonic()

    @property
    def num_rows(self) -> int:
        return sum(batch.num_rows for batch in self.batches.values())

    def read(self) -> None:
        """Read the parts of earlier commands; damaged ones are ignored. Raises StorageError."""
        folder = self.directory.path / self.folder
        for name in files.list_names(folder):
            if name.startswith("part-"):
                with suppress(StorageError):  # another command may have completed the table
                    self.batches |= decode_batches(parse_object(files.read(folder / name)) or {})
        self.num_kept = self.num_rows

    def find_others(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the folders with parts of the same table that this command cannot use, and the keys that differ."""
        folder = self.directory.path / self.folder
        prefix = folder.name[: folder.name.rindex("-") + 1]
        for name in files.list_names(folder.parent):
            if name != folder.name and name.startswith(prefix) and len(name) == len(folder.name):
                other = files.read_object(folder.parent / name / _IDENTITY)
                keys = [key for key in {**self.identity, **other} if self.identity.get(key) != other.get(key)]
                yield f"predictions/{INCOMPLETE}/{name}", keys

    def restart(self) -> frozenset[int]:
        """Drop an unfinished batch, which is predicted again; return the numbers of all finished ones."""
        self._unfinished.clear()
        return self.finished | self.batches.keys()

    def add(self, rows: PredictedRows) -> None:
        """Add the next rows; write the finished batches if they are many or the last write was some time ago."""
        self._unfinished.append(rows)
        if not rows.is_last:
            return
        parts, self._unfinished = self._unfinished, []
        text = "".join(part.rows for part in parts)
        self.batches[rows.batch] = PredictedBatch(sum(part.items for part in parts), rows.names, text)
        self._unwritten.append(rows.batch)
        self._unwritten_size += len(text)
        if self._unwritten_size >= MAX_PART_SIZE or time.monotonic() - self._last_write >= MAX_WRITE_DELAY_S:
            self.write()

    def write(self) -> None:
        """Write the finished batches that are not on disk yet. Raises StorageError."""
        numbers, self._unwritten, self._unwritten_size = self._unwritten, [], 0
        self._last_write = time.monotonic()
        if numbers:
            content = {number: self.batches[number] for number in numbers}
            # As bytes, because the strings are already redacted; together, they could look like another secret.
            part = json.dumps(content, ensure_ascii=False).encode()
            try:
                self._write_part(part)
            except StorageError:
                if files.exists(self.directory.path / self.folder):
                    raise
                self._write_part(part)  # another command has completed the same table and removed the folder
            self._report_progress()

    def _write_part(self, part: bytes) -> None:
        data: dict[str, bytes | str] = {f"{self.folder}/part-{secrets.token_hex(8)}.json": part}
        if not files.exists(self.directory.path / self.folder / _IDENTITY):
            data[f"{self.folder}/{_IDENTITY}"] = json.dumps(self.identity, indent=2)
        self.directory.write_all(data)

    def _report_progress(self) -> None:
        """Report that rows are being saved, and then each further tenth of this shard."""
        own = range(self.split.shard, len(self.split.keys), self.split.num_shards)
        tenths = 10 * sum(number in self.batches for number in own) // len(own)
        if not self._has_written:
            continues = f"if the command is stopped, run it again with run={self.directory.name} to continue"
            self._report(f"{self.name}: finished rows are being saved; {continues}")
        elif tenths > self._tenths:
            self._report(f"{self.name}: {10 * tenths} % of the rows are saved")
        self._has_written, self._tenths = True, tenths

    def remove(self) -> None:
        """Remove the parts, once the table is on disk."""
        self._unwritten.clear()
        folder = self.directory.path / self.folder
        with suppress(StorageError):  # another command may be writing the same table
            if files.exists(folder):
                files.remove(folder)
                if not files.list_names(folder.parent):
                    files.remove(folder.parent)

    def __enter__(self) -> TableParts:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """After an error, write what is not on disk yet, unless the command has just started: then little is lost."""
        if kind and self._has_written:
            with suppress(StorageError):
                self.write()


def decode_batches(content: Mapping[str, Any]) -> dict[int, PredictedBatch]:
    """Return the batches in a part; none if it is damaged."""
    with suppress(TypeError, ValueError):
        return {
            int(number): PredictedBatch(int(num_rows), [*map(str, names)], str(rows))
            for number, (num_rows, names, rows) in content.items()
        }
    return {}


MAX_PART_SIZE, MAX_WRITE_DELAY_S = 16 << 20, 2.0  # characters, and seconds between two parts
_IDENTITY = "identity.json"
