"""Checkpoints, written atomically and verified before they are loaded.

    update-0000001200/  model.safetensors  optimizer.safetensors  random.safetensors  state.json  MANIFEST.json

Tensors are stored as safetensors, everything else as JSON; nothing is pickled. MANIFEST.json is written last and holds
its own hash and those of all other files. There is no pointer to the latest checkpoint: the newest valid one is used.
"""

from __future__ import annotations

import hashlib
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
from runner.durable import files
from runner.durable.checkpoint_parts import PartOf, collect, is_part, joined, part_name, report, stem_of_part, written
from runner.durable.manifest import SAFE_NAME, is_entry, is_sealed, parse, sealed
from runner.durable.run_identity import RunIdentity, uid_of

if TYPE_CHECKING:  # `status` verifies checkpoints without importing torch
    from torch import Tensor

FORMAT_VERSION = 1
FORMAT_OF_PARTS = 2  # several ranks have written it; earlier versions of this program would not find its tensors
MANIFEST = "MANIFEST.json"
STATE = "state.json"
ANY_RUN = RunIdentity()  # accepts checkpoints of any run
ANOTHER = "name another checkpoint of the run: accel-run status lists them, valid or damaged"


@dataclass(frozen=True)
class Snapshot:
    """State of a run at an update boundary, in host memory; must not change until it is written.

    part  which part of the state these tensors are; None: all of it
    """

    update: int
    tensors: Mapping[str, Mapping[str, Tensor]]  # file stem -> name -> CPU tensor
    state: Mapping[str, Any]  # JSON; stored in state.json
    facts: Mapping[str, Any]  # JSON; stored in the manifest: epoch, samples, phase, world_size, run_id, run_uid, ...
    part: PartOf | None = None


@dataclass(frozen=True)
class Loaded:
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
        names = (entry["name"] for entry in self.manifest["files"])
        stems = (stem_of_part(name.removesuffix(_SUFFIX)) for name in names if name.endswith(_SUFFIX))
        return tuple(dict.fromkeys(stems))

    def tensors(self, stem: str) -> dict[str, Tensor]:
        """Return the CPU tensors of one file by name, verified against their hash.

        Raises DataError if there is no such file, or if it has changed since the verification.
        """
        names = (entry["name"].removesuffix(_SUFFIX) for entry in self.manifest["files"])
        parts = sorted(name for name in names if name != stem and stem_of_part(name) == stem)
        if parts:
            return joined([self._file(part) for part in parts], self.path)
        return self._file(stem)

    def _file(self, stem: str) -> dict[str, Tensor]:
        from safetensors.torch import load as load_tensors

        name = stem + _SUFFIX
        recorded = {entry["name"]: entry for entry in self.manifest["files"]}
        if name not in recorded:
            what = f"the checkpoint has no {name}; it has {', '.join(self.stems)}"
            raise DataError(what, where=str(self.path), fix=ANOTHER)
        content = files.read(self.path / name)
        if hashlib.sha256(content).hexdigest() != recorded[name]["sha256"]:
            raise DataError(
                f"{name} has changed since it was verified", where=str(self.path), fix="do not modify checkpoints"
            )
        try:
            return load_tensors(content)
        except Exception as error:  # valid hashes, but untrusted content; the reader may raise anything
            what = f"{name} is not in the safetensors format: {error}"
            raise DataError(what, where=str(self.path), fix=ANOTHER) from error


@dataclass(frozen=True)
class Recovery:
    """The checkpoint to resume from, and the rejected ones: (name, reasons), newest first."""

    checkpoint: Loaded | None
    skipped: tuple[tuple[str, tuple[str, ...]], ...] = ()


def path_of(directory: Path, update: int) -> Path:
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
    _check(snapshot)
    target = path_of(directory, snapshot.update)
    try:
        files.make_directory(directory)
        if files.exists(target):
            if verify(target):
                _move_aside(target, "damaged")
            elif not overwrite:
                sync_first()
                files.fsync_directory(directory)
                return target
        has_the_place = False
        temporary = _temporary(directory, snapshot)
        try:
            _write(temporary, snapshot)
            sync_first()
            if files.exists(target):
                files.rename(target, directory / f"{_REPLACED}{target.name}")
                files.fsync_directory(directory)
            has_the_place = True
            files.rename(temporary, target)
            files.fsync_directory(directory)
        except Exception:
            with suppress(Exception):  # removed when the run is opened again
                _discard(temporary, target if has_the_place else None)
            with suppress(Exception):
                _settle_replaced(directory)
            raise
        if overwrite:
            with suppress(StorageError):  # not visible as a checkpoint; the next recovery removes it
                _settle_replaced(directory)
    except StorageError:
        raise
    except Exception as error:
        raise StorageError(f"cannot save the checkpoint: {error}", where=str(target)) from error
    return target


def install(target: Path, fill: Callable[[Path], None]) -> Loaded:
    """Create the checkpoint `target` from files that `fill` writes durably into a temporary folder.

    An existing one of this name is moved aside. Raises DataError if the files are no valid checkpoint of this name,
    StorageError, and what `fill` raises; no name has then changed.
    """
    directory = target.parent
    files.make_directory(directory)
    temporary = directory / f"{files.TEMPORARY}{target.name}-{secrets.token_hex(4)}"
    try:
        files.new_directory(temporary)
        fill(temporary)
        files.fsync_directory(temporary)
        if path_of(directory, load(temporary).update) != target:
            raise DataError("it belongs to another update", where=str(target))
        if files.exists(target):
            _move_aside(target, "damaged")
        files.rename(temporary, target)
        files.fsync_directory(directory)
    except BaseException:
        with suppress(StorageError):  # removed when the run is opened again
            files.remove(temporary)
        raise
    return load(target)


def load(path: Path) -> Loaded:
    """Load and verify the checkpoint at `path`.

    Raises DataError if it is damaged, StorageError if it cannot be read.
    """
    try:
        return _examine(path)
    except _Damaged as damage:
        raise DataError(f"the checkpoint is damaged: {damage}", where=str(path), fix=ANOTHER) from None


def verify(path: Path, run: RunIdentity = ANY_RUN) -> list[str]:
    """Return the problems of the checkpoint at `path`, empty if it is valid.

    run  see `recover`
    """
    try:
        _must_be_of(_examine(path), run)
    except _Damaged as damage:
        return list(damage.reasons)
    except StorageError as error:
        return [error.problems[0].what]
    return []


def recover(directory: Path, run: RunIdentity = ANY_RUN, *, allows_others: bool = False) -> Recovery:
    """Find the newest valid checkpoint, remove incomplete ones and move invalid newer ones aside.

    run            checkpoints of another run name, copied in, are moved aside like damaged ones
    allows_others  accept a checkpoint with the uid of another run

    The caller must hold the lock of the run. An unreadable checkpoint may be intact: it is read a second time, and
    moved aside only if there is another one to resume from, since under its name it would later be taken for one that
    the run has written since.
    Raises DataError if there are checkpoints but none is valid, on every call, so that a run never silently restarts at
    update 0 (see `set_aside`), IncompatibleResume if the newest has the uid of another run with the same name,
    and StorageError if an unreadable one cannot be moved either.
    """
    unswept = [(name, (f"cannot be removed: {reason}",)) for name, reason in files.sweep(directory)]
    try:
        _settle_replaced(directory)
    except StorageError as error:
        unswept.append((_REPLACED, (error.problems[0].what,)))
    skipped: list[tuple[str, tuple[str, ...]]] = []
    unread: list[Path] = []
    for path in newest_first(directory):
        try:
            found = _examine_twice(path)
            _must_be_of(found, run, allows_others=allows_others)
        except _Namesake:
            raise _of_a_namesake(found, run) from None
        except StorageError as error:
            unread.append(path)
            skipped.append((path.name, (error.problems[0].what,)))
        except _Damaged as damage:
            skipped.append((path.name, damage.reasons))
            try:
                _move_aside(path, "foreign" if isinstance(damage, _Foreign) else "damaged")
            except StorageError as error:
                skipped.append((path.name, (error.problems[0].what,)))
        else:
            for newer in unread:
                _move_aside(newer, "unreadable")
            return Recovery(found, (*skipped, *unswept))
    damaged = [name for name in files.names(directory) if name.startswith(_ASIDE)]
    if skipped or damaged:
        raise _none_valid(directory, skipped, damaged)
    return Recovery(None, tuple(unswept))


def newest_valid(directory: Path, run: RunIdentity = ANY_RUN) -> Path | None:
    """Return the path of the newest valid checkpoint, None if there is none; needs no lock."""
    found = load_newest(directory, run)
    return found.path if found else None


def load_newest(directory: Path, run: RunIdentity = ANY_RUN) -> Loaded | None:
    """Return the newest valid checkpoint, None if there is none; read-only, so it needs no lock.

    The owner of the lock may save and remove checkpoints concurrently.

    run  see `recover`; checkpoints of other runs are skipped
    """
    for _ in range(_NUM_LOOKS):
        before = newest_first(directory)
        for path in before:
            with suppress(_Damaged, StorageError):
                found = _examine(path)
                _must_be_of(found, run)
                return found
        if newest_first(directory) == before:
            break
    return None


def newest(directory: Path) -> str | None:
    """Return the name of the newest checkpoint, None if there is none; does not verify it."""
    return next((path.name for path in newest_first(directory)), None)


def set_aside(directory: Path) -> int:
    """Move all checkpoints, damaged or not, out of sight of `recover`; return their number.

    For a run that restarts from scratch (resume=fresh). The folders remain, renamed to `earlier-...`.
    """
    found = [name for name in files.names(directory) if _NAME.fullmatch(name) or name.startswith((*_ASIDE, _REPLACED))]
    for name in found:
        _move_aside(directory / name, "earlier")
    return len(found)


def set_aside_newer(directory: Path, number: int) -> list[tuple[Path, Path]]:
    """Move the checkpoints with more updates than `number` out of sight of `recover`; return (from, to) of each."""
    newer = [path for path in newest_first(directory) if path.name > path_of(directory, number).name]
    return [(path, _move_aside(path, "earlier")) for path in newer]


def restore_moved(moved: Iterable[tuple[Path, Path]]) -> None:
    """Undo `set_aside_newer`, except for names that were taken since."""
    for path, aside in moved:
        if not files.exists(path):
            files.rename(aside, path)
            files.fsync_directory(path.parent)


def retain(
    directory: Path, keep_last: int, best: Path | Collection[Path] | None = None, *, known: set[Path] | None = None
) -> None:
    """Remove all checkpoints except the newest `keep_last` and the `best` ones; always keep at least two valid ones.

    A crash leaves each checkpoint either complete or invisible. Raises StorageError.

    known  checkpoints that this process has written or verified, and does not read again; those
           verified now are added
    """
    known = set() if known is None else known
    left_over = [name for name in files.names(directory) if name.startswith(_OUTGOING)]
    if left_over:
        files.fsync_directory(directory)  # this may be the call that failed
    for name in left_over:
        files.remove(directory / name)
    kept = {path.name for path in ((best,) if isinstance(best, Path) else best or ())}
    outgoing = [path for path in _superfluous(directory, keep_last, known) if path.name not in kept]
    for path in outgoing:
        hidden = directory / f"{_OUTGOING}{path.name}-{secrets.token_hex(4)}"
        files.rename(path, hidden)
        files.fsync_directory(directory)  # else a power failure may leave the name with only part of its files
        files.remove(hidden)


def _check(snapshot: Snapshot) -> None:
    """Raise TypeError or ValueError if the format cannot represent the snapshot."""
    from runner.durable.tensors import fault

    json.dumps([snapshot.state, snapshot.facts])
    taken = _OWN_KEYS & snapshot.facts.keys()
    assert not taken, f"the manifest has its own {', '.join(sorted(taken))}"
    for stem, tensors in snapshot.tensors.items():
        assert SAFE_NAME.fullmatch(stem), f"must be a plain file stem, but is {stem!r}"
        for name, tensor in tensors.items():
            reason = fault(tensor)
            if reason:
                raise TypeError(f"{stem}: {name} cannot be saved: {reason}")


def save_part(directory: Path, snapshot: Snapshot) -> None:
    """Write the part of a rank other than 0, durably, and report it to rank 0, which calls `save`.

    Raises StorageError; rank 0 then fails too (see `report_failure`).
    """
    assert snapshot.part is not None
    _check(snapshot)
    temporary = _temporary(directory, snapshot)
    files.make_directory(temporary)
    contents = {name: chunks for name, chunks in _contents(snapshot) if name != STATE}
    report(temporary, snapshot.part.rank, [*written(temporary, contents)])


def part_folder(directory: Path, snapshot: Snapshot) -> Path:
    """Return the temporary folder in which all ranks write their parts."""
    return _temporary(directory, snapshot)


def _temporary(directory: Path, snapshot: Snapshot) -> Path:
    token = snapshot.part.token if snapshot.part else secrets.token_hex(4)
    return directory / f"{files.TEMPORARY}{path_of(directory, snapshot.update).name}-{token}"


def _write(temporary: Path, snapshot: Snapshot) -> None:
    """Write the folder `temporary` durably, except for its own name."""
    if snapshot.part:
        files.make_directory(temporary)  # the first rank creates it
    else:
        files.new_directory(temporary)
    entries = [*written(temporary, dict(_contents(snapshot)))]
    if snapshot.part:
        entries += collect(temporary, snapshot.part)
    version = FORMAT_OF_PARTS if snapshot.part else FORMAT_VERSION
    manifest = {"format_version": version, "update": snapshot.update, **snapshot.facts, "files": entries}
    files.write_new(temporary / MANIFEST, [sealed(manifest)])
    files.fsync_directory(temporary)


def _discard(temporary: Path, target: Path | None) -> None:
    """Remove a failed save; if it may have the final name, rename it away atomically and durably first."""
    if target is not None and files.exists(target):
        files.rename(target, temporary)
        files.fsync_directory(target.parent)  # else a power failure may leave the name with only part of its files
    files.remove(temporary)


def _settle_replaced(directory: Path) -> None:
    """Remove replaced checkpoints, and durably restore the name of one that has no replacement yet."""
    for name in files.names(directory):
        if not name.startswith(_REPLACED):
            continue
        target = directory / name.removeprefix(_REPLACED)
        if not files.exists(target):
            files.rename(directory / name, target)
            files.fsync_directory(directory)
        elif not verify(target):
            files.fsync_directory(directory)
            files.remove(directory / name)


def _contents(snapshot: Snapshot) -> Iterator[tuple[str, Sequence[bytes | memoryview]]]:
    """Yield the files before the manifest, in chunks."""
    from runner.durable.tensors import pieces

    for stem, tensors in snapshot.tensors.items():
        name = part_name(stem, snapshot.part.rank) if snapshot.part else stem
        yield name + _SUFFIX, pieces(tensors)
    yield STATE, [json.dumps(snapshot.state, indent=1).encode()]


class _Damaged(Exception):
    """A readable but damaged checkpoint."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class _Foreign(_Damaged):
    """A checkpoint of another run."""


class _Namesake(_Foreign):
    """A checkpoint of another run with the same name, such as one in another output_root."""


def _must_be_of(found: Loaded, run: RunIdentity, *, allows_others: bool = False) -> None:
    """Raise _Foreign if the checkpoint belongs to another run, whose update numbers are unrelated.

    The uid takes precedence if both have one: a renamed run keeps it.
    """
    has_other_uid = run.has_other_uid(found.manifest)
    if has_other_uid is False or (has_other_uid and allows_others):
        return
    if run.has_other_name(found.manifest):
        name = found.manifest["run_id"]
        raise _Foreign(f"it belongs to another run, {name}; to start from it: resume=FOLDER in a new run")
    if has_other_uid:
        raise _Namesake(
            f"it belongs to another run with the same name, {uid_of(found.manifest)}; this one is {run.uid}"
        )


def _of_a_namesake(found: Loaded, run: RunIdentity) -> IncompatibleResume:
    return IncompatibleResume(
        f"{found.path.name} belongs to another run with the same name: {uid_of(found.manifest)}; this run is {run.uid}",
        where=str(found.path.parent),
        fix="move it out of this folder, or continue from it with resume_allow=[run]; to start a new run from it: "
        f"run=NAME resume={found.path}",
    )


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Damaged(otherwise)


def _examine(path: Path) -> Loaded:
    """Return the checkpoint at `path`. Raises _Damaged, and StorageError if it cannot be read."""
    _must(files.is_plain_directory(path), "it must be a folder, but is a link, a file or missing")
    present = files.names(path)
    for name in present:
        _must(files.is_plain_file(path / name), f"{name} must be a plain file")
    _must(MANIFEST in present, f"{MANIFEST} is missing")
    manifest = _read_manifest(path / MANIFEST)
    named = _NAME.fullmatch(path.name)
    _must(not named or int(named[1]) == manifest["update"], f"{MANIFEST} belongs to update {manifest['update']}")
    problems = tuple(_file_problems(path, manifest["files"], set(present)))
    if problems:
        raise _Damaged(*problems)
    state = parse(files.read(path / STATE, at_most=_STATE_BYTES))
    _must(isinstance(state, dict), f"{STATE} does not hold a JSON object")
    return Loaded(path, manifest, state)


def _examine_twice(path: Path) -> Loaded:
    """Like `_examine`, with a second attempt after a transient read error."""
    try:
        return _examine(path)
    except StorageError:
        time.sleep(_MOMENT_S)
        return _examine(path)


def _read_manifest(path: Path) -> dict[str, Any]:
    """Parse and validate the manifest. Raises _Damaged."""
    _must(files.size_of(path) <= _MANIFEST_BYTES, f"{MANIFEST} must have at most {_MANIFEST_BYTES} bytes")
    text = files.read(path, at_most=_MANIFEST_BYTES)
    manifest = parse(text)
    if not isinstance(manifest, dict):
        raise _Damaged(f"{MANIFEST} does not hold a JSON object")
    _must(is_sealed(manifest, text), f"{MANIFEST} does not match its own hash")
    version, update, entries = (manifest.get(key) for key in ("format_version", "update", "files"))
    _must(version in _VERSIONS, f"format_version must be one of {_VERSIONS}, but is {version!r}")
    _must(
        type(update) is int and 0 <= update < 10**_NUM_DIGITS,
        f"update must be a whole number of at most {_NUM_DIGITS} digits, but is {update!r}",
    )
    if not isinstance(entries, list) or not all(is_entry(entry) for entry in entries):
        raise _Damaged("files must be a list of plain names, sizes and hashes")
    listed = [entry["name"] for entry in entries]
    has_parts = any(is_part(name.removesuffix(_SUFFIX)) for name in listed)
    _must(has_parts == (version == FORMAT_OF_PARTS), f"format_version {version} does not fit its files")
    _must(
        STATE in listed and MANIFEST not in listed and len(set(listed)) == len(listed),
        f"files must name {STATE}, not {MANIFEST}, and each file once",
    )
    return manifest


def _file_problems(path: Path, entries: list[dict[str, Any]], present: set[str]) -> Iterator[str]:
    listed = {entry["name"] for entry in entries}
    for name in sorted(present - listed - {MANIFEST}):
        yield f"{name} is not in {MANIFEST}"
    for entry in entries:
        name = entry["name"]
        if name not in present:
            yield f"{name} is missing"
        elif (size := files.size_of(path / name)) != entry["size"]:
            yield f"{name} must have {entry['size']} bytes, but has {size}"
        elif files.digest_of(path / name) != entry["sha256"]:
            yield f"{name} does not match its hash"


def newest_first(directory: Path) -> list[Path]:
    return [directory / name for name in reversed(files.names(directory)) if _NAME.fullmatch(name)]


def _superfluous(directory: Path, keep_last: int, known: set[Path]) -> list[Path]:
    """Return checkpoints older than both the newest `keep_last` and the two newest valid ones."""
    paths = newest_first(directory)
    if len(paths) <= max(keep_last, _NUM_VALID):
        return []
    num_valid = 0
    for position, path in enumerate(paths):
        if position >= keep_last and num_valid >= _NUM_VALID:
            return paths[position:]
        if num_valid < _NUM_VALID:  # no need to verify more
            if path not in known and not verify(path):
                known.add(path)
            num_valid += path in known
    return []


def _move_aside(path: Path, word: str) -> Path:
    """Durably rename `path` to `<word>-<name>-<n>` with the first free n; return the new path."""
    number = 1
    while files.exists(aside := path.with_name(f"{word}-{path.name}-{number}")):
        number += 1
    files.rename(path, aside)
    files.fsync_directory(path.parent)
    return aside


def _none_valid(directory: Path, skipped: list[tuple[str, tuple[str, ...]]], damaged: list[str]) -> DataError:
    found = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in skipped) or ", ".join(damaged)
    return DataError(
        f"there are checkpoints, but none is valid ({found})",
        where=str(directory),
        fix="restore a good copy, or restart at update 0 with resume=fresh, which keeps these folders",
    )


_VERSIONS = (FORMAT_VERSION, FORMAT_OF_PARTS)
_NUM_DIGITS = 10
_NUM_VALID = 2  # minimum number to keep
_MOMENT_S = 0.1  # s for a disk or a limit to recover
_NUM_LOOKS = 10  # attempts while another process saves and removes checkpoints
_MANIFEST_BYTES = 16 << 20  # a manifest has about 200 bytes per file
_STATE_BYTES = 256 << 20  # no tensors, but the generators of every rank
_SUFFIX = ".safetensors"
_OUTGOING = f"{files.TEMPORARY}old-"
_REPLACED = "replaced-"
_ASIDE = ("damaged-", "foreign-", "unreadable-")
_NAME = re.compile(rf"update-(\d{{{_NUM_DIGITS}}})", re.ASCII)
_OWN_KEYS = frozenset({"sha256", "format_version", "update", "files"})
