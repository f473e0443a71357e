"""Checkpoints, written atomically and verified before they are loaded.

    update-0000001200/  model.safetensors  optimizer.safetensors  random.safetensors  state.json  MANIFEST.json

Tensors are stored as safetensors, everything else as JSON; nothing is pickled. MANIFEST.json is written last and holds
its own hash and those of all other files. There is no pointer to the latest checkpoint: the newest valid one is used.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.errors import DataError, IncompatibleResume, StorageError
from runner.durable import checkpoint_parts, files
from runner.durable.manifest import SAFE_NAME, has_valid_hash, is_entry, parse_json, serialize_manifest
from runner.durable.run_identity import RunIdentity, manifest_uid

if TYPE_CHECKING:  # `status` verifies checkpoints without importing torch
    from torch import Tensor

    from runner.tensors.stored_tensor import StoredTensor

FORMAT_VERSION = 1
FORMAT_OF_PARTS = 2  # written by several ranks; earlier versions of accel-run would not find its tensors
MANIFEST = "MANIFEST.json"
STATE = "state.json"
ANY_RUN = RunIdentity()  # accepts checkpoints of any run
FIX_ANOTHER = "use another checkpoint of the run: accel-run status lists them, valid or damaged"


@dataclass(frozen=True)
class Snapshot:
    """State of a run at an update boundary, in host memory; must not change until it is written.

    part  part of the state to which the tensors belong; None: they are the complete state
    """

    update: int
    tensors: Mapping[str, Mapping[str, Tensor]]  # file stem -> name -> CPU tensor
    state: Mapping[str, Any]  # JSON; stored in state.json
    facts: Mapping[str, Any]  # JSON; stored in the manifest: epoch, samples, phase, world_size, run_id, run_uid, ...
    part: checkpoint_parts.CheckpointPart | None = None


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A valid checkpoint; its tensors are read lazily."""

    path: Path
    manifest: Mapping[str, Any]
    state: Mapping[str, Any]

    @property
    def update(self) -> int:
        """Number of optimizer steps of the checkpoint."""
        return int(self.manifest["update"])

    @property
    def stems(self) -> tuple[str, ...]:
        """Valid arguments of `tensors`: "model", "optimizer", "random", ..."""
        stems = (checkpoint_parts.file_stem(entry["name"]) for entry in self.manifest["files"])
        return tuple(dict.fromkeys(stem for stem in stems if stem))

    def tensors(self, stem: str) -> dict[str, Tensor]:
        """Return the CPU tensors of one file by name; see `stored`."""
        return {name: tensor.read() for name, tensor in self.stored(stem).items()}

    def stored(self, stem: str) -> dict[str, StoredTensor]:
        """Return the tensors of one file by name, verified against its hash; their values are read when needed.

        A part is verified when it is read for the first time: ranks do not read the parts of others.
        Raises DataError if there is no such file, or if it has changed since the verification.
        """
        return checkpoint_parts.open_files(self.file_paths(stem), self._check_hash)

    def _check_hash(self, path: Path) -> None:
        if files.file_sha256(path) != next(e["sha256"] for e in self.manifest["files"] if e["name"] == path.name):
            raise DataError(f"{path.name} has changed since it was verified", where=str(path), fix=FIX_ANOTHER)

    def names(self, stem: str) -> frozenset[str]:
        """Return the names of the tensors of one file."""
        return frozenset(checkpoint_parts.open_files(self.file_paths(stem)))

    def file_paths(self, stem: str) -> tuple[Path, ...]:
        """Return the path of one file, or those of its parts. Raises DataError if it is missing."""
        names = (entry["name"] for entry in self.manifest["files"])
        paths = sorted(self.path / name for name in names if checkpoint_parts.file_stem(name) == stem)
        if not paths:
            what = f"the checkpoint has no {stem}{_SUFFIX}; it has {', '.join(self.stems)}"
            raise DataError(what, where=str(self.path), fix=FIX_ANOTHER)
        return tuple(paths)


@dataclass(frozen=True)
class Recovery:
    """The checkpoint to resume from, and the rejected ones: (name, reasons), newest first."""

    checkpoint: LoadedCheckpoint | None
    skipped: tuple[tuple[str, tuple[str, ...]], ...] = ()


def checkpoint_path(directory: Path, update: int) -> Path:
    """Return the path of the checkpoint of `update` in `directory`."""
    assert 0 <= update < 10**_NUM_DIGITS
    return directory / f"update-{update:0{_NUM_DIGITS}}"


def rank_stem(stem: str, rank: int) -> str:
    """Return the file stem of per-rank content, such as the random state."""
    return f"{stem}-rank{rank:05}"


def save(
    directory: Path, snapshot: Snapshot, *, overwrite: bool = False, sync_first: Callable[[], None] = lambda: None
) -> Path:
    """Write the checkpoint of `snapshot.update` durably and return its path.

    An existing valid one is kept; a damaged one is moved aside.

    overwrite   replace an existing valid one; after a crash `recover` finds one of the two
    sync_first  syncs the files that the checkpoint depends on; called before the final rename

    Raises StorageError if writing fails, which leaves older checkpoints unchanged, and
    TypeError or ValueError, before anything is written, if the format cannot represent the snapshot.
    """
    _check_snapshot(snapshot)
    target = checkpoint_path(directory, snapshot.update)
    try:
        files.make_directory(directory)
        if files.exists(target):
            if verify(target):
                _move_aside(target, "damaged")
            elif not overwrite:
                sync_first()
                files.fsync_directory(directory)
                return target
        may_have_final_name = False
        temporary = temporary_path(directory, snapshot)
        try:
            _write_checkpoint(temporary, snapshot)
            sync_first()
            if files.exists(target):
                files.rename(target, directory / f"{_REPLACED}{target.name}")
                files.fsync_directory(directory)
            may_have_final_name = True
            files.rename(temporary, target)
            files.fsync_directory(directory)
        except Exception:
            with suppress(Exception):  # removed when the run is opened again
                _discard(temporary, target if may_have_final_name else None)
            with suppress(Exception):
                _finish_replacement(directory)
            raise
        if overwrite:
            with suppress(StorageError):  # not visible as a checkpoint; the next recovery removes it
                _finish_replacement(directory)
    except StorageError:
        raise
    except Exception as error:
        raise StorageError(f"cannot save the checkpoint: {error}", where=str(target)) from error
    return target


def install(target: Path, fill: Callable[[Path], None]) -> LoadedCheckpoint:
    """Create the checkpoint `target` from files that `fill` writes durably into a temporary folder.

    An existing one of this name is moved aside. Raises DataError if the files are not a valid checkpoint of this name,
    StorageError, and any error of `fill`; after an error, there is no new checkpoint.
    """
    directory = target.parent
    files.make_directory(directory)
    temporary = directory / f"{files.TEMPORARY}{target.name}-{secrets.token_hex(4)}"
    try:
        files.new_directory(temporary)
        fill(temporary)
        files.fsync_directory(temporary)
        if checkpoint_path(directory, load(temporary).update) != target:
            raise DataError("its update number does not match the name of its folder", where=str(target))
        if files.exists(target):
            _move_aside(target, "damaged")
        files.rename(temporary, target)
        files.fsync_directory(directory)
    except BaseException:
        with suppress(StorageError):  # removed when the run is opened again
            files.remove(temporary)
        raise
    return load(target)


def load(path: Path, *, hashes_tensors: bool = True) -> LoadedCheckpoint:
    """Load and verify the checkpoint at `path`.

    hashes_tensors  False: another rank has verified the tensor files; this rank reads only those that it needs
    Raises DataError if it is damaged, StorageError if it cannot be read.
    """
    try:
        return _read_and_verify(path, hashes_tensors=hashes_tensors)
    except _Damaged as damage:
        raise DataError(f"the checkpoint is damaged: {damage}", where=str(path), fix=FIX_ANOTHER) from None


def verify(path: Path, run: RunIdentity = ANY_RUN) -> list[str]:
    """Return the problems of the checkpoint at `path`, empty if it is valid.

    run  see `recover`
    """
    try:
        _check_owner(_read_and_verify(path), run)
    except _Damaged as damage:
        return list(damage.reasons)
    except StorageError as error:
        return [error.problems[0].what]
    return []


def recover(directory: Path, run: RunIdentity = ANY_RUN, *, allows_others: bool = False) -> Recovery:
    """Find the newest valid checkpoint, remove incomplete ones and move invalid newer ones aside.

    run            identity of the run; checkpoints with the name of another run, which were copied to `directory`, are
                   moved aside like damaged ones
    allows_others  accept a checkpoint with the uid of another run

    The caller must hold the lock of the run. An unreadable checkpoint may be intact, so it is read a second time, and
    moved aside only if there is an older one to resume from. It is moved because otherwise it could later be mistaken
    for a checkpoint that the resumed run has written.
    Raises DataError if there are checkpoints but none is valid, on every call, so that a run never silently restarts at
    update 0 (see `set_aside`), IncompatibleResume if the newest has the uid of another run with the same name,
    and StorageError if an unreadable one cannot be moved either.
    """
    leftover = [(name, (f"cannot be removed: {reason}",)) for name, reason in files.remove_temporary_files(directory)]
    try:
        _finish_replacement(directory)
    except StorageError as error:
        leftover.append((_REPLACED, (error.problems[0].what,)))
    skipped: list[tuple[str, tuple[str, ...]]] = []
    unreadable: list[Path] = []
    for path in newest_first(directory):
        try:
            checkpoint = _read_with_retry(path)
            _check_owner(checkpoint, run, allows_others=allows_others)
        except _SameName:
            raise _same_name_error(checkpoint, run) from None
        except StorageError as error:
            unreadable.append(path)
            skipped.append((path.name, (error.problems[0].what,)))
        except _Damaged as damage:
            skipped.append((path.name, damage.reasons))
            try:
                _move_aside(path, "foreign" if isinstance(damage, _Foreign) else "damaged")
            except StorageError as error:
                skipped.append((path.name, (error.problems[0].what,)))
        else:
            for newer in unreadable:
                _move_aside(newer, "unreadable")
            return Recovery(checkpoint, (*skipped, *leftover))
    damaged = [name for name in files.list_names(directory) if name.startswith(_ASIDE_PREFIXES)]
    if skipped or damaged:
        raise _none_valid_error(directory, skipped, damaged)
    return Recovery(None, tuple(leftover))


def newest_valid(directory: Path, run: RunIdentity = ANY_RUN) -> Path | None:
    """Return the path of the newest valid checkpoint, None if there is none; needs no lock."""
    checkpoint = load_newest(directory, run)
    return checkpoint.path if checkpoint else None


def load_newest(directory: Path, run: RunIdentity = ANY_RUN) -> LoadedCheckpoint | None:
    """Return the newest valid checkpoint, None if there is none; read-only, so it needs no lock.

    The owner of the lock may save and remove checkpoints concurrently.

    run  see `recover`; checkpoints of other runs are skipped
    """
    for _ in range(_MAX_ATTEMPTS):
        paths = newest_first(directory)
        for path in paths:
            with suppress(_Damaged, StorageError):
                checkpoint = _read_and_verify(path)
                _check_owner(checkpoint, run)
                return checkpoint
        if newest_first(directory) == paths:
            break
    return None


def newest_name(directory: Path) -> str | None:
    """Return the name of the newest checkpoint, None if there is none; does not verify it."""
    return next((path.name for path in newest_first(directory)), None)


def set_aside(directory: Path) -> int:
    """Rename all checkpoints, damaged or not, so that `recover` ignores them; return their number.

    Used for a run that restarts from scratch (resume=fresh). The folders remain, with the names `earlier-...`.
    """
    prefixes = (*_ASIDE_PREFIXES, _REPLACED)
    selected = [name for name in files.list_names(directory) if _NAME.fullmatch(name) or name.startswith(prefixes)]
    for name in selected:
        _move_aside(directory / name, "earlier")
    return len(selected)


def set_aside_newer(directory: Path, number: int) -> list[tuple[Path, Path]]:
    """Rename checkpoints with more updates than `number` so that `recover` ignores them; return (from, to) of each."""
    newer = [path for path in newest_first(directory) if path.name > checkpoint_path(directory, number).name]
    return [(path, _move_aside(path, "earlier")) for path in newer]


def restore_moved(moved: Iterable[tuple[Path, Path]]) -> None:
    """Undo `set_aside_newer`, except for names that exist again."""
    for path, new_path in moved:
        if not files.exists(path):
            files.rename(new_path, path)
            files.fsync_directory(path.parent)


def retain(
    directory: Path, keep_last: int, best: Path | Collection[Path] | None = None, *, verified: set[Path] | None = None
) -> None:
    """Remove all checkpoints except the newest `keep_last` and the `best` ones; always keep at least two valid ones.

    A crash leaves each checkpoint either complete or invisible. Raises StorageError.

    verified  checkpoints that this process has written or verified and need not be read again; newly verified ones
              are added
    """
    verified = set() if verified is None else verified
    leftovers = [name for name in files.list_names(directory) if name.startswith(_OUTGOING)]
    if leftovers:
        files.fsync_directory(directory)  # an earlier call may have failed between the rename and the sync below
    for name in leftovers:
        files.remove(directory / name)
    kept = {path.name for path in ((best,) if isinstance(best, Path) else best or ())}
    outgoing = [path for path in _find_superfluous(directory, keep_last, verified) if path.name not in kept]
    for path in outgoing:
        hidden_path = directory / f"{_OUTGOING}{path.name}-{secrets.token_hex(4)}"
        files.rename(path, hidden_path)
        files.fsync_directory(directory)  # else a power failure may leave the name with only part of its files
        files.remove(hidden_path)


def _check_snapshot(snapshot: Snapshot) -> None:
    from runner.durable.safetensors_writer import unsupported_reason

    json.dumps([snapshot.state, snapshot.facts])  # raises before anything is written
    reserved = _RESERVED_KEYS & snapshot.facts.keys()
    assert not reserved, f"the manifest has its own {', '.join(sorted(reserved))}"
    for stem, tensors in snapshot.tensors.items():
        assert SAFE_NAME.fullmatch(stem), f"must be a plain file stem, but is {stem!r}"
        for name, tensor in tensors.items():
            reason = unsupported_reason(tensor)
            if reason:
                raise TypeError(f"{stem}: {name} cannot be saved: {reason}")


def save_part(directory: Path, snapshot: Snapshot) -> None:
    """Write the part of a rank other than 0 durably, and report it to rank 0, which calls `save`.

    Raises StorageError; rank 0 then fails too (see `report_failure`).
    """
    assert snapshot.part is not None
    _check_snapshot(snapshot)
    temporary = temporary_path(directory, snapshot)
    files.make_directory(temporary)
    contents = {name: chunks for name, chunks in _file_contents(snapshot) if name != STATE}
    checkpoint_parts.report_part(temporary, snapshot.part.rank, [*checkpoint_parts.write_files(temporary, contents)])


def temporary_path(directory: Path, snapshot: Snapshot) -> Path:
    """Return the temporary folder of a save, in which all ranks write their parts."""
    token = snapshot.part.token if snapshot.part else secrets.token_hex(4)
    return directory / f"{files.TEMPORARY}{checkpoint_path(directory, snapshot.update).name}-{token}"


def _write_checkpoint(temporary: Path, snapshot: Snapshot) -> None:
    if snapshot.part:
        files.make_directory(temporary)  # may exist: the rank that writes first creates it
    else:
        files.new_directory(temporary)
    entries = [*checkpoint_parts.write_files(temporary, dict(_file_contents(snapshot)))]
    if snapshot.part:
        entries += checkpoint_parts.collect_parts(temporary, snapshot.part)
    version = FORMAT_OF_PARTS if snapshot.part else FORMAT_VERSION
    manifest = {"format_version": version, "update": snapshot.update, **snapshot.facts, "files": entries}
    files.write_new(temporary / MANIFEST, [serialize_manifest(manifest)])
    files.fsync_directory(temporary)


def _discard(temporary: Path, target: Path | None) -> None:
    """Remove a failed save; if it may have the final name, rename it away atomically and durably first."""
    if target is not None and files.exists(target):
        files.rename(target, temporary)
        files.fsync_directory(target.parent)  # else a power failure may leave the name with only part of its files
    files.remove(temporary)


def _finish_replacement(directory: Path) -> None:
    for name in files.list_names(directory):
        if not name.startswith(_REPLACED):
            continue
        target = directory / name.removeprefix(_REPLACED)
        if not files.exists(target):
            files.rename(directory / name, target)
            files.fsync_directory(directory)
        elif not verify(target):  # valid: it has no problems
            files.fsync_directory(directory)
            files.remove(directory / name)


def _file_contents(snapshot: Snapshot) -> Iterator[tuple[str, Sequence[bytes | memoryview]]]:
    """Yield the name and the content, in chunks, of each file except the manifest."""
    from runner.durable.safetensors_writer import serialize_tensors

    for stem, tensors in snapshot.tensors.items():
        name = checkpoint_parts.part_stem(stem, snapshot.part.rank) if snapshot.part else stem
        yield name + _SUFFIX, serialize_tensors(tensors)
    yield STATE, [json.dumps(snapshot.state).encode()]  # an indent would use the slow encoder, which holds the GIL


class _Damaged(Exception):
    """A readable but damaged checkpoint."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class _Foreign(_Damaged):
    """A checkpoint of another run."""


class _SameName(_Foreign):
    """A checkpoint of another run with the same name, such as one in another output_root."""


def _check_owner(checkpoint: LoadedCheckpoint, run: RunIdentity, *, allows_others: bool = False) -> None:
    """Raise _Foreign if the checkpoint belongs to another run, whose updates are unrelated to those of this run.

    The uid takes precedence if both have one: a renamed run keeps it.
    """
    has_other_uid = run.has_other_uid(checkpoint.manifest)
    if has_other_uid is False or (has_other_uid and allows_others):
        return
    if run.has_other_name(checkpoint.manifest):
        name = checkpoint.manifest["run_id"]
        raise _Foreign(f"it belongs to another run, {name}; to start from it, use resume=FOLDER in a new run")
    if has_other_uid:
        raise _SameName(
            f"it belongs to another run with the same name, {manifest_uid(checkpoint.manifest)}; this run is {run.uid}"
        )


def _same_name_error(checkpoint: LoadedCheckpoint, run: RunIdentity) -> IncompatibleResume:
    uid = manifest_uid(checkpoint.manifest)
    return IncompatibleResume(
        f"{checkpoint.path.name} belongs to another run with the same name: {uid}; this run is {run.uid}",
        where=str(checkpoint.path.parent),
        fix="move it out of this folder, or continue from it with resume_allow=[run]; to start a new run from it, use "
        f"run=NAME resume={checkpoint.path}",
    )


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise _Damaged(reason)


def _read_and_verify(path: Path, *, hashes_tensors: bool = True) -> LoadedCheckpoint:
    """Return the checkpoint at `path`. Raises _Damaged, and StorageError if it cannot be read."""
    _require(files.is_plain_directory(path), "it must be a folder, but is a link, a file or missing")
    file_names = files.list_names(path)
    for name in file_names:
        _require(files.is_plain_file(path / name), f"{name} must be a plain file")
    _require(MANIFEST in file_names, f"{MANIFEST} is missing")
    manifest = _read_manifest(path / MANIFEST)
    match = _NAME.fullmatch(path.name)
    _require(not match or int(match[1]) == manifest["update"], f"{MANIFEST} belongs to update {manifest['update']}")
    problems = tuple(_file_problems(path, manifest["files"], set(file_names), hashes_tensors=hashes_tensors))
    if problems:
        raise _Damaged(*problems)
    state = parse_json(files.read(path / STATE, at_most=_MAX_STATE_BYTES))
    _require(isinstance(state, dict), f"{STATE} does not hold a JSON object")
    return LoadedCheckpoint(path, manifest, state)


def _read_with_retry(path: Path) -> LoadedCheckpoint:
    """Read and verify a checkpoint, with a second attempt after a transient read error."""
    try:
        return _read_and_verify(path)
    except StorageError:
        time.sleep(_RETRY_DELAY_S)
        return _read_and_verify(path)


def _read_manifest(path: Path) -> dict[str, Any]:
    _require(files.file_size(path) <= _MAX_MANIFEST_BYTES, f"{MANIFEST} must be at most {_MAX_MANIFEST_BYTES} bytes")
    text = files.read(path, at_most=_MAX_MANIFEST_BYTES)
    manifest = parse_json(text)
    if not isinstance(manifest, dict):
        raise _Damaged(f"{MANIFEST} does not hold a JSON object")
    _require(has_valid_hash(manifest, text), f"{MANIFEST} does not match its own hash")
    version, update, entries = (manifest.get(key) for key in ("format_version", "update", "files"))
    _require(version in _VERSIONS, f"format_version must be one of {_VERSIONS}, but is {version!r}")
    _require(
        type(update) is int and 0 <= update < 10**_NUM_DIGITS,
        f"update must be an integer of at most {_NUM_DIGITS} digits, but is {update!r}",
    )
    if not isinstance(entries, list) or not all(is_entry(entry) for entry in entries):
        raise _Damaged("files must be a list of plain names, sizes and hashes")
    file_names = [entry["name"] for entry in entries]
    has_parts = any(checkpoint_parts.is_part_stem(name.removesuffix(_SUFFIX)) for name in file_names)
    _require(has_parts == (version == FORMAT_OF_PARTS), f"its files do not belong to format_version {version}")
    _require(
        STATE in file_names and MANIFEST not in file_names and len(set(file_names)) == len(file_names),
        f"the list of files must contain {STATE}, must not contain {MANIFEST}, and must name each file once",
    )
    return manifest


def _file_problems(
    path: Path, entries: list[checkpoint_parts.Entry], present: set[str], *, hashes_tensors: bool
) -> Iterator[str]:
    for name in sorted(present - {entry["name"] for entry in entries} - {MANIFEST}):
        yield f"{name} is not in {MANIFEST}"
    for entry in entries:
        name = entry["name"]
        if name not in present:
            yield f"{name} is missing"
        elif (size := files.file_size(path / name)) != entry["size"]:
            yield f"{name} must have {entry['size']} bytes, but has {size}"
        elif (hashes_tensors or not name.endswith(_SUFFIX)) and files.file_sha256(path / name) != entry["sha256"]:
            yield f"{name} does not match its hash"


def newest_first(directory: Path) -> list[Path]:
    """Return the paths of all checkpoints, valid or not, the newest first."""
    return [directory / name for name in reversed(files.list_names(directory)) if _NAME.fullmatch(name)]


def _find_superfluous(directory: Path, keep_last: int, verified: set[Path]) -> list[Path]:
    """Return checkpoints older than both the newest `keep_last` and the two newest valid ones."""
    paths = newest_first(directory)
    if len(paths) <= max(keep_last, _MIN_VALID):
        return []
    num_valid = 0
    for position, path in enumerate(paths):
        if position >= keep_last and num_valid >= _MIN_VALID:
            return paths[position:]
        if num_valid < _MIN_VALID:  # no need to verify more
            if path not in verified and not verify(path):
                verified.add(path)
            num_valid += path in verified
    return []


def _move_aside(path: Path, prefix: str) -> Path:
    number = 1
    while files.exists(new_path := path.with_name(f"{prefix}-{path.name}-{number}")):
        number += 1
    files.rename(path, new_path)
    files.fsync_directory(path.parent)
    return new_path


def _none_valid_error(directory: Path, skipped: list[tuple[str, tuple[str, ...]]], damaged: list[str]) -> DataError:
    details = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in skipped) or ", ".join(damaged)
    return DataError(
        f"there are checkpoints, but none is valid ({details})",
        where=str(directory),
        fix="restore a valid copy, or restart at update 0 with resume=fresh, which keeps these folders",
    )


_VERSIONS = (FORMAT_VERSION, FORMAT_OF_PARTS)
_NUM_DIGITS = 10
_MIN_VALID = 2  # newest valid checkpoints that are always kept
_RETRY_DELAY_S = 0.1  # for a disk or a limit to recover
_MAX_ATTEMPTS = 10  # attempts while another process saves and removes checkpoints
_MAX_MANIFEST_BYTES = 16 << 20  # a manifest has about 200 bytes per file
_MAX_STATE_BYTES = 256 << 20  # state.json has no tensors, but the state of each rank's random generators
_SUFFIX = ".safetensors"
_OUTGOING = f"{files.TEMPORARY}old-"
_REPLACED = "replaced-"
_ASIDE_PREFIXES = ("damaged-", "foreign-", "unreadable-")
_NAME = re.compile(rf"update-(\d{{{_NUM_DIGITS}}})", re.ASCII)
_RESERVED_KEYS = frozenset({"sha256", "format_version", "update", "files"})
