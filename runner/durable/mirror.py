"""Copies of a run's checkpoints in object storage.

    owner.json                             uid of the run, and the process that may write to the mirror
    UID/update-0000001200-3f2a.../         one checkpoint; the suffix is from the hash of its manifest
        model.safetensors ... state.json   as on the local disk
        metrics.jsonl                      the rows that the checkpoint covers
        MANIFEST.json                      uploaded last: without it, the folder is not a checkpoint

Object storage has neither locks nor atomic renames. So the name of a folder depends on its content: two processes that
save different states of the same update never mix their files. An upload is read back and compared with the hashes of
the manifest before the manifest itself is uploaded, and a download is verified before it gets its final name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from runner.base.errors import DataError, IncompatibleResume
from runner.base.json_values import as_dict, as_list, parse_object
from runner.base.text import abbreviate
from runner.durable import files
from runner.durable.checkpoint import MANIFEST, LoadedCheckpoint, checkpoint_path, install, load, load_newest
from runner.durable.directory import RunDirectory
from runner.durable.manifest import has_valid_hash
from runner.durable.mirror_store import MirrorError, MirrorStore
from runner.durable.run_identity import is_valid_uid, manifest_uid

METRICS = "metrics.jsonl"


class OwnerChanged(Exception):
    """Another process writes to the mirror now."""


@dataclass(frozen=True)
class MirrorOwner:
    """The run of a mirror, and the process that may write to it.

    uid     uid of the run; None: the mirror is new
    writer  random name of the process that started last
    """

    uid: str | None
    writer: str | None = None


class Mirror:
    """The copies of one run's checkpoints in a store. All methods raise MirrorError if the store fails."""

    def __init__(self, store: MirrorStore) -> None:
        self.store = store

    # ------------------------------------------------------------ ownership

    def owner(self) -> MirrorOwner:
        """Return whose checkpoints the mirror holds. Raises DataError if that cannot be determined."""
        content = self.store.read(_OWNER, _MAX_SMALL_BYTES)
        record = as_dict(parse_object(content) if content is not None else None)
        uid, writer = record.get("run_uid"), record.get("writer")
        if is_valid_uid(uid):
            return MirrorOwner(uid, writer if isinstance(writer, str) else None)
        uids = [name for name in self.store.names() if is_valid_uid(name)]
        if len(uids) > 1 or (content is not None and not uids):
            what = f"the run to resume is unknown: {_OWNER} is missing or damaged, and {len(uids)} runs have this name"
            raise DataError(what, where=self.store.shown, fix="use another run=NAME, or resume=fresh")
        return MirrorOwner(uids[0] if uids else None)

    def claim(self, uid: str, writer: str) -> None:
        """Record this process as the only one that may write."""
        self.store.write(_OWNER, json.dumps({"run_uid": uid, "writer": writer}).encode())

    def check_owner(self, uid: str, writer: str) -> None:
        """Raise OwnerChanged if another process has claimed the mirror."""
        if self.owner() != MirrorOwner(uid, writer):
            raise OwnerChanged

    # ------------------------------------------------------------ contents

    def checkpoints(self, uid: str) -> list[str]:
        """Return the names of the complete checkpoints of a run, newest first."""
        return [name for name in self._folders(uid) if self.is_complete(uid, name)]

    def candidates(self, uid: str) -> list[str]:
        """Return the names of the checkpoints of a run that have a manifest, newest first, damaged or not."""
        return [name for name in self._folders(uid) if self.store.size(f"{uid}/{name}/{MANIFEST}") is not None]

    def is_complete(self, uid: str, name: str) -> bool:
        """Return whether a checkpoint has a valid manifest; some stores keep a part of an interrupted upload."""
        content = self.store.read(f"{uid}/{name}/{MANIFEST}", _MAX_SMALL_BYTES) or b""
        manifest = parse_object(content) or {}
        return str(manifest.get("sha256"))[:_NUM_DIGITS] == name[-_NUM_DIGITS:] and has_valid_hash(manifest, content)

    def _folders(self, uid: str) -> list[str]:
        return [name for name in reversed(self.store.names(uid)) if _NAME.fullmatch(name)]

    def upload(self, path: Path, metrics: Path, uid: str) -> str:
        """Copy a local checkpoint, verify the copy and return its name; `metrics` are the rows of the run.

        Raises DataError if the local checkpoint is damaged, and StorageError if it was removed meanwhile.
        """
        checkpoint = load(path)
        name = mirrored_name(checkpoint.path)
        folder = f"{uid}/{name}"
        for entry in checkpoint.manifest["files"]:
            target = f"{folder}/{entry['name']}"
            if self._find_difference(target, entry["size"], entry["sha256"]):  # otherwise an earlier attempt copied it
                self.store.upload(path / entry["name"], target)
                self._check_equal(target, entry["size"], entry["sha256"])
        rows = files.read(metrics)[: checkpoint.manifest.get("metrics_bytes", 0)] if files.exists(metrics) else b""
        self._write_verified(f"{folder}/{METRICS}", rows)
        self._write_verified(f"{folder}/{MANIFEST}", files.read(path / MANIFEST))
        return name

    def _write_verified(self, name: str, data: bytes) -> None:
        sha256 = hashlib.sha256(data).hexdigest()
        if self._find_difference(name, len(data), sha256):
            self.store.write(name, data)
            self._check_equal(name, len(data), sha256)

    def _check_equal(self, name: str, size: int, sha256: str) -> None:
        difference = self._find_difference(name, size, sha256)
        if difference:
            raise MirrorError(f"{name} {difference}", where=self.store.shown)

    def _find_difference(self, name: str, size: int, sha256: str) -> str:
        size_in_store = self.store.size(name)
        if size_in_store != size:
            return f"must have {size} bytes, but has {size_in_store}"
        digest = hashlib.sha256()
        for chunk in self.store.chunks(name):
            digest.update(chunk)
        return "" if digest.hexdigest() == sha256 else "was corrupted in transfer"

    def download(self, uid: str, name: str, directory: Path) -> LoadedCheckpoint:
        """Copy a checkpoint to the local folder `directory`, where it appears only once it is verified.

        Raises DataError if it is damaged, and StorageError if it cannot be written.
        """
        folder = f"{uid}/{name}"

        def fill(temporary: Path) -> None:
            content = self.store.read(f"{folder}/{MANIFEST}", _MAX_SMALL_BYTES) or b""
            for entry in _parse_entries(content, f"{self.store.shown}/{folder}"):
                source = f"{folder}/{entry['name']}"
                if self.store.size(source) != entry["size"]:
                    raise DataError(f"{entry['name']} is missing or has the wrong size", where=self.store.shown)
                files.write_stream(temporary / entry["name"], self.store.chunks(source))
            files.write_new(temporary / MANIFEST, [content])

        return install(checkpoint_path(directory, mirrored_update(name)), fill)

    def metrics(self, uid: str, name: str, size: int) -> bytes | None:
        """Return the rows that a checkpoint covers; None if they are not complete."""
        rows = self.store.read(f"{uid}/{name}/{METRICS}", _MAX_METRICS_BYTES)
        return rows if rows is not None and len(rows) == size else None

    # ------------------------------------------------------------ retention

    def prune(self, uid: str, kept: Collection[str], keep_last: int) -> list[str]:
        """Remove all checkpoints older than the newest complete one, except for `kept` and the `keep_last` newest ones.

        Incomplete checkpoints are removed too, and do not count as one of the newest. Call it only when no upload is
        running. Returns the removed names.
        """
        folders = self._folders(uid)
        if set(folders) <= set(kept):
            return []
        # Each check is a request, so older checkpoints, of which there may be many, are not checked.
        complete = list(
            islice((name for name in folders if self.is_complete(uid, name)), max(keep_last, _MIN_COMPLETE))
        )
        keep, newest = {*kept, *complete}, max(complete, default="")
        superfluous = [name for name in folders if name not in keep and name < newest]
        for name in superfluous:
            self.store.remove(f"{uid}/{name}/{MANIFEST}")  # first: after a crash, the folder must not look complete
            self.store.remove(f"{uid}/{name}")
        return superfluous


def fetch_checkpoints(
    mirror: Mirror, run: RunDirectory, report: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Download what the run needs to resume, if the mirror is ahead of the local disk.

    The run needs the newest valid checkpoint, the metrics, and the best checkpoints and those of earlier phases to
    which that checkpoint refers.
    Raises MirrorError, IncompatibleResume if the mirror belongs to another run of this name, and DataError if neither
    the mirror nor the local disk has a valid checkpoint, but the mirror has damaged ones: a run never silently
    restarts at update 0.
    """
    mirror_owner, identity = mirror.owner(), run.owner
    local = load_newest(run.checkpoints, identity)
    uid = identity.uid or (manifest_uid(local.manifest) if local else None)
    if mirror_owner.uid is None:
        return
    if uid is not None and uid != mirror_owner.uid:
        raise IncompatibleResume(
            f"the mirror holds checkpoints of another run of this name: {mirror_owner.uid}; this run is {uid}",
            where=mirror.store.shown,
            fix="use another run=NAME or checkpoint.mirror=URL; or resume=fresh, which starts a new run",
        )
    newer = [
        name for name in mirror.candidates(mirror_owner.uid) if local is None or mirrored_update(name) > local.update
    ]
    rejected = []
    for name in newer:
        try:
            start = mirror.download(mirror_owner.uid, name, run.checkpoints)
        except DataError as error:
            rejected.append(name)
            warn(f"{name} of the mirror is skipped: {error.problems[0].what}")
            continue
        report(f"downloaded {start.path.name} from {mirror.store.shown}")
        _fetch_referenced(mirror, mirror_owner.uid, start, name, run, warn)
        return
    if rejected and local is None:
        what = f"none of its checkpoints is valid: {abbreviate(rejected, 5)}"
        raise DataError(what, where=mirror.store.shown, fix="use another run=NAME, or resume=fresh")


def _fetch_referenced(
    mirror: Mirror, uid: str, start: LoadedCheckpoint, name: str, run: RunDirectory, warn: Callable[[str], None]
) -> None:
    """Download the metrics of the checkpoint `name`, and the other checkpoints that it refers to."""
    size = start.manifest.get("metrics_bytes", 0)
    rows = mirror.metrics(uid, name, size) if isinstance(size, int) else None
    if rows is None:
        warn(f"{METRICS} of the mirror is incomplete: its rows are lost, the checkpoint is valid")
    else:
        run.write(METRICS, rows)
    mirrored = {mirrored_update(name): name for name in reversed(mirror.checkpoints(uid))}
    for number in _referenced_updates(start):
        if number in mirrored and not files.exists(checkpoint_path(run.checkpoints, number)):
            try:
                mirror.download(uid, mirrored[number], run.checkpoints)
            except DataError as error:
                warn(f"{mirrored[number]} of the mirror is skipped: {error.problems[0].what}")


def _parse_entries(manifest: bytes, where: str) -> list[dict[str, Any]]:
    entries = [as_dict(entry) for entry in as_list(as_dict(parse_object(manifest)).get("files"))]
    for entry in entries:
        name, size = entry.get("name"), entry.get("size")
        if not isinstance(name, str) or name != Path(name).name or name.startswith(".") or not isinstance(size, int):
            raise DataError(f"its {MANIFEST} is damaged", where=where)
    return entries


def _referenced_updates(start: LoadedCheckpoint) -> Iterator[int]:
    bests = [pair[1] for pair in as_list(start.state.get("bests")) if isinstance(pair, list) and len(pair) == 2]
    for number in (*bests, *as_list(start.state.get("kept"))):
        if type(number) is int and 0 <= number < start.update:
            yield number


def mirrored_name(path: Path) -> str:
    """Return the name of a local checkpoint in the mirror."""
    sha256 = files.read_object(path / MANIFEST).get("sha256")
    if not isinstance(sha256, str) or not sha256:
        raise DataError(f"its {MANIFEST} is damaged", where=str(path))
    return f"{path.name}-{sha256[:_NUM_DIGITS]}"


def mirrored_update(name: str) -> int:
    """Return the update of a checkpoint, given its name in the mirror."""
    return int(name.split("-")[1])


_OWNER = "owner.json"
_NUM_DIGITS = 16
_NAME = re.compile(r"update-\d{10}-[0-9a-f]{16}", re.ASCII)
_MAX_SMALL_BYTES = 16 << 20
_MAX_METRICS_BYTES = 1 << 30
_MIN_COMPLETE = 2  # complete checkpoints that are never removed
