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
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.errors import DataError, IncompatibleResume, StorageError
from runner.durable import files
from runner.durable.owner import Owner, uid_of

if TYPE_CHECKING:  # to tell valid from damaged, as `status` does, takes no torch
    from torch import Tensor

FORMAT_VERSION = 1
MANIFEST = "MANIFEST.json"
STATE = "state.json"
ANY_RUN = Owner()  # where it is not asked which run a checkpoint is of
ANOTHER = "name another checkpoint of the run: accel-run status lists them, valid or damaged"


@dataclass(frozen=True)
class Snapshot:
    """A run at an update boundary, in host memory; nothing that changes before it is written."""

    update: int
    tensors: Mapping[str, Mapping[str, Tensor]]  # file stem -> name -> CPU tensor
    state: Mapping[str, Any]  # JSON; becomes state.json
    facts: Mapping[str, Any]  # JSON; go into the manifest: epoch, samples, phase, world_size, run_id, run_uid, ...


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was found valid; its tensors are read when asked for."""

    path: Path
    manifest: Mapping[str, Any]
    state: Mapping[str, Any]

    @property
    def update(self) -> int:
        """The number of optimizer steps behind it."""
        return int(self.manifest["update"])

    @property
    def stems(self) -> tuple[str, ...]:
        """What `tensors` can be asked for: "model", "optimizer", "random", ..."""
        names = (entry["name"] for entry in self.manifest["files"])
        return tuple(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))

    def tensors(self, stem: str) -> dict[str, Tensor]:
        """Return the CPU tensors of one file by name; what is returned is what was hashed.

        Raises DataError where there is no such file, or where it changed since it was checked.
        """
        from safetensors.torch import load as load_tensors

        name = stem + _SUFFIX
        recorded = {entry["name"]: entry for entry in self.manifest["files"]}
        if name not in recorded:
            what = f"the checkpoint has no {name}; it has {', '.join(self.stems)}"
            raise DataError(what, where=str(self.path), fix=ANOTHER)
        content = files.read(self.path / name)
        if hashlib.sha256(content).hexdigest() != recorded[name]["sha256"]:
            raise DataError(
                f"{name} changed since it was checked", where=str(self.path), fix="do not write into checkpoints"
            )
        try:
            return load_tensors(content)
        except Exception as error:  # hashes agree, so a stranger wrote it; the reader promises no class of error
            what = f"{name} is not in the safetensors format: {error}"
            raise DataError(what, where=str(self.path), fix=ANOTHER) from error


@dataclass(frozen=True)
class Recovery:
    """Where to go on from, and what was passed over on the way: (name, reasons), the newest first."""

    checkpoint: Loaded | None
    skipped: tuple[tuple[str, tuple[str, ...]], ...] = ()


def path_of(directory: Path, update: int) -> Path:
    """Return where the checkpoint of `update` lies in `directory`."""
    assert 0 <= update < 10**_NUM_DIGITS
    return directory / f"update-{update:0{_NUM_DIGITS}}"


def states_before(start: Loaded) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, state) of each older checkpoint of its run beside `start`; they are not verified."""
    for other in newest_first(start.path.parent):
        if other.name >= start.path.name:
            continue
        if uid_of(files.read_object(other / MANIFEST)) in (None, uid_of(start.manifest)):
            yield int(other.name.removeprefix("update-")), files.read_object(other / STATE)


def rank_stem(stem: str, rank: int) -> str:
    """Return the file stem for what every rank has its own of, such as the random state."""
    return f"{stem}-rank{rank:05}"


def save(
    directory: Path, snapshot: Snapshot, *, anew: bool = False, sync_first: Callable[[], None] = lambda: None
) -> Path:
    """The checkpoint of `snapshot.update` is whole and on disk; returns its path.

    One that is there already and valid is kept; a damaged one is moved aside.

    anew        a valid one is replaced; after a crash `recover` finds one of the two
    sync_first  puts on disk what the checkpoint counts on: called before it gets its name

    Raises StorageError for whatever goes wrong on the way, which leaves the older checkpoints as they were, and
    TypeError or ValueError, before anything is written, where the snapshot holds what the format cannot.
    """
    _check(snapshot)
    target = path_of(directory, snapshot.update)
    try:
        files.make_directory(directory)
        if files.exists(target):
            if verify(target):
                _move_aside(target, "damaged")
            elif not anew:
                sync_first()
                files.fsync_directory(directory)
                return target
        has_the_place = False
        temporary = directory / f"{files.TEMPORARY}{target.name}-{secrets.token_hex(4)}"
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
            with suppress(Exception):  # what cannot be removed now is swept when the run is opened again
                _discard(temporary, target if has_the_place else None)
            with suppress(Exception):
                _settle_replaced(directory)
            raise
        if anew:
            with suppress(StorageError):  # it is out of sight; the next recovery removes it
                _settle_replaced(directory)
    except StorageError:
        raise
    except Exception as error:
        raise StorageError(f"cannot save the checkpoint: {error}", where=str(target)) from error
    return target


def load(path: Path) -> Loaded:
    """Return the checkpoint at `path` after checking all of it.

    Raises DataError where it is damaged, StorageError where it cannot be read.
    """
    try:
        return _examine(path)
    except _Damaged as damage:
        raise DataError(f"the checkpoint is damaged: {damage}", where=str(path), fix=ANOTHER) from None


def verify(path: Path, run: Owner = ANY_RUN) -> list[str]:
    """Return what is wrong with the checkpoint at `path`; nothing where it is valid.

    run  as for `recover`
    """
    try:
        _must_be_of(_examine(path), run)
    except _Damaged as damage:
        return list(damage.reasons)
    except StorageError as error:
        return [error.problems[0].what]
    return []


def recover(directory: Path, run: Owner = ANY_RUN, *, allows_others: bool = False) -> Recovery:
    """The newest valid checkpoint is found, half written ones are swept, newer ones moved aside.

    run            one of a run with another name, copied in, is moved aside as a damaged one is
    allows_others  a checkpoint with the uid of another run is accepted

    To be called by who holds the lock of the run. What cannot be read may be good: it is read once more, and moved
    aside only where there is another one to go on from, since under its name it would later be taken for one that the
    run has written since.
    Raises DataError where there are checkpoints and none is valid, on every call, so that a run never starts again at
    0 in silence (see `set_aside`), IncompatibleResume where the newest has the uid of another run with the same name,
    and StorageError where one that cannot be read cannot be moved either.
    """
    unswept = [(name, (f"cannot be removed: {reason}",)) for name, reason in files.sweep(directory)]
    try:
        _settle_replaced(directory)
    except StorageError as error:
        unswept.append((_REPLACED, (error.problems[0].what,)))
    passed_over: list[tuple[str, tuple[str, ...]]] = []
    unread: list[Path] = []
    for path in newest_first(directory):
        try:
            found = _examine_twice(path)
            _must_be_of(found, run, allows_others=allows_others)
        except _Namesake:
            raise _of_a_namesake(found, run) from None
        except StorageError as error:
            unread.append(path)
            passed_over.append((path.name, (error.problems[0].what,)))
        except _Damaged as damage:
            passed_over.append((path.name, damage.reasons))
            try:
                _move_aside(path, "foreign" if isinstance(damage, _Foreign) else "damaged")
            except StorageError as error:
                passed_over.append((path.name, (error.problems[0].what,)))
        else:
            for newer in unread:
                _move_aside(newer, "unreadable")
            return Recovery(found, (*passed_over, *unswept))
    damaged = [name for name in files.names(directory) if name.startswith(_ASIDE)]
    if passed_over or damaged:
        raise _none_valid(directory, passed_over, damaged)
    return Recovery(None, tuple(unswept))


def newest_valid(directory: Path, run: Owner = ANY_RUN) -> Path | None:
    """Return where the newest valid checkpoint is, None where there is none; needs no lock."""
    found = load_newest(directory, run)
    return found.path if found else None


def load_newest(directory: Path, run: Owner = ANY_RUN) -> Loaded | None:
    """Return the newest valid checkpoint, None where there is none; changes nothing, so it needs no lock.

    Who holds the lock may save and remove older ones meanwhile.

    run  as for `recover`; one of another run is passed over
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
    """Return the name of the newest checkpoint, None where there is none; that it is whole is not looked at."""
    return next((path.name for path in newest_first(directory)), None)


def set_aside(directory: Path) -> int:
    """No checkpoint is left for `recover` to find, damaged or not; returns how many there were.

    For a run that is told to start afresh (resume=fresh). The folders stay, named `earlier-...`.
    """
    found = [name for name in files.names(directory) if _NAME.fullmatch(name) or name.startswith((*_ASIDE, _REPLACED))]
    for name in found:
        _move_aside(directory / name, "earlier")
    return len(found)


def retain(
    directory: Path, keep_last: int, best: Path | Collection[Path] | None = None, *, known: set[Path] | None = None
) -> None:
    """The newest `keep_last` checkpoints and the `best` ones are left, and never fewer than two valid ones.

    A crash at any moment leaves each checkpoint whole or out of sight. Raises StorageError.

    known  checkpoints that were written or found valid by this process, and are not read from end to end once more;
           those found valid now are added
    """
    known = set() if known is None else known
    left_over = [name for name in files.names(directory) if name.startswith(_OUTGOING)]
    if left_over:
        files.fsync_directory(directory)  # it may be this that failed
    for name in left_over:
        files.remove(directory / name)
    kept = {path.name for path in ((best,) if isinstance(best, Path) else best or ())}
    outgoing = [path for path in _superfluous(directory, keep_last, known) if path.name not in kept]
    for path in outgoing:
        hidden = directory / f"{_OUTGOING}{path.name}-{secrets.token_hex(4)}"
        files.rename(path, hidden)
        files.fsync_directory(directory)  # else a power cut may leave the name with half of its files
        files.remove(hidden)


@dataclass(frozen=True)
class Saved:
    """What a checkpoint took to write.

    nbytes   of its tensors
    write_s  until it was on disk under its name
    total_s  until those that it replaces were gone, too
    """

    path: Path
    update: int
    nbytes: int
    write_s: float
    total_s: float


class Writer:
    """Saves snapshots on a thread of its own, one at a time, so that training goes on.

    sync_first  puts on disk what a checkpoint counts on, before it gets its name

    A save is tried three times, each time in a new folder: a failure before the last is told to `on_retry`.
    One that fails for good is told to `on_failure`, and training goes on; after three in a row `submit` and `wait`
    raise. What `check` raises keeps a snapshot from being saved. All callbacks run on the writer's thread. Anything but
    a StorageError is raised from the next `submit` or `wait`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int = 2,
        on_saved: Callable[[Path], None] = lambda _: None,
        on_retry: Callable[[StorageError], None] = lambda _: None,
        on_failure: Callable[[StorageError], None] = lambda _: None,
        sync_first: Callable[[], None] = lambda: None,
        check: Callable[[Snapshot], None] = lambda _: None,
    ) -> None:
        self.directory = directory
        self.keep_last = keep_last
        self.acknowledged: int | None = None  # the last update that is on disk
        self.last: Saved | None = None  # the last one that was written and cleared up after
        self.failures: list[StorageError] = []  # all of them, those of retention too
        self._in_a_row = 0
        self._on_saved = on_saved
        self._on_retry = on_retry
        self._on_failure = on_failure
        self._sync_first = sync_first
        self._valid: set[Path] = set()
        self._began, self._update = 0.0, 0
        self._check = check
        self._fault: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, snapshot: Snapshot, *, best: Collection[Path] = (), anew: bool = False) -> None:
        """`snapshot` is being saved; waits only where the one before is still being written, or there is no thread.

        best  checkpoints that are kept whatever their age; the new one may be among them
        anew  it takes the place of one of the same update

        Raises StorageError where the last three saves failed; `snapshot` is then not saved.
        """
        self.wait()
        self._began, self._update = time.monotonic(), snapshot.update
        thread = threading.Thread(target=self._work, args=(snapshot, best, anew), name="checkpoint-writer")
        try:
            thread.start()
        except RuntimeError:  # the system gives no more threads: training waits instead
            self._work(snapshot, best, anew)
        else:
            self._thread = thread

    @property
    def busy_s(self) -> float | None:
        """For how many seconds a snapshot has been being written, None where none is."""
        is_alive = self._thread is not None and self._thread.is_alive()
        return time.monotonic() - self._began if is_alive else None

    @property
    def under_way(self) -> tuple[int, int, int] | None:
        """The update that is being written, and what changes with each step of the disk; None where none is."""
        thread = self._thread
        if thread is None or thread.ident is None or not thread.is_alive():
            return None
        return self._update, thread.ident, files.answers_to(thread.ident)

    def wait(self) -> int | None:
        """Nothing is being written any more; returns the last update on disk. Raises as `submit` does."""
        self.close()
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        if self._in_a_row >= _NUM_FAILURES:
            last = self.failures[-1].problems[0]
            lasting = StorageError(
                f"{self._in_a_row} saves in a row failed, the last one: {last.what}",
                where=last.where,
                fix=last.fix or "see that the disk can be written, then run the same command again",
            )
            lasting.exit_code = self.failures[-1].exit_code
            raise lasting
        return self.acknowledged

    def close(self) -> None:
        """The thread has ended. Raises nothing, so that it can be called while another error is on its way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.wait()
        self.close()

    def _work(self, snapshot: Snapshot, best: Collection[Path], anew: bool) -> None:
        try:
            try:
                self._check(snapshot)
                path = self._saved(snapshot, anew)
            except StorageError as error:
                self._in_a_row += 1
                self._report(error)
                return
            self._in_a_row = 0
            self.acknowledged = snapshot.update
            self._valid.add(path)
            write_s = time.monotonic() - self._began
            self._on_saved(path)
            try:
                retain(self.directory, self.keep_last, best, known=self._valid)
            except StorageError as error:  # too many checkpoints are no reason to stop saving
                self._report(error)
            nbytes = sum(tensor.nbytes for tensors in snapshot.tensors.values() for tensor in tensors.values())
            self.last = Saved(path, snapshot.update, nbytes, write_s, time.monotonic() - self._began)
        except BaseException as fault:  # carried to the thread that trains
            self._fault = fault

    def _saved(self, snapshot: Snapshot, anew: bool) -> Path:
        """The snapshot is on disk; returns its path. Raises the StorageError of the last attempt."""
        for pause_s in PAUSES_S:
            try:
                return save(self.directory, snapshot, anew=anew, sync_first=self._sync_first)
            except StorageError as error:
                self._on_retry(error)
                time.sleep(pause_s)
        return save(self.directory, snapshot, anew=anew, sync_first=self._sync_first)

    def _report(self, error: StorageError) -> None:
        self.failures.append(error)
        self._on_failure(error)


class NoWriter:
    """Saves nothing: what a rank has in the place of a Writer where another one writes."""

    failures: tuple[StorageError, ...] = ()
    last: Saved | None = None
    busy_s: float | None = None
    under_way: tuple[int, int, int] | None = None

    def __init__(self) -> None:
        self.acknowledged: int | None = None

    def submit(self, snapshot: Snapshot, *, best: Collection[Path] = (), anew: bool = False) -> None:
        """Take the snapshot for saved."""
        self.acknowledged = snapshot.update

    def wait(self) -> int | None:
        """Return the last update that was submitted."""
        return self.acknowledged

    def close(self) -> None:
        """Do nothing."""


def _check(snapshot: Snapshot) -> None:
    """Raise TypeError or ValueError where the format cannot hold the snapshot."""
    from runner.durable.tensors import fault

    json.dumps([snapshot.state, snapshot.facts])
    taken = _OWN_KEYS & snapshot.facts.keys()
    assert not taken, f"the manifest has its own {', '.join(sorted(taken))}"
    for stem, tensors in snapshot.tensors.items():
        assert _SAFE_NAME.fullmatch(stem), f"must be a plain file stem, but is {stem!r}"
        for name, tensor in tensors.items():
            reason = fault(tensor)
            if reason:
                raise TypeError(f"{stem}: {name} cannot be saved: {reason}")


def _write(temporary: Path, snapshot: Snapshot) -> None:
    """The folder `temporary` is whole and on disk, except for its own name."""
    files.new_directory(temporary)
    entries = []
    for name, chunks in _contents(snapshot):
        size, sha256 = files.write_new(temporary / name, chunks)
        entries.append({"name": name, "size": size, "sha256": sha256})
    manifest = {"format_version": FORMAT_VERSION, "update": snapshot.update, **snapshot.facts, "files": entries}
    files.write_new(temporary / MANIFEST, [sealed(manifest)])
    files.fsync_directory(temporary)


def _discard(temporary: Path, target: Path | None) -> None:
    """A save that failed is gone; from under the final name, if it may have it, first, in one step, and on disk."""
    if target is not None and files.exists(target):
        files.rename(target, temporary)
        files.fsync_directory(target.parent)  # else a power cut may leave the name with half of its files
    files.remove(temporary)


def _settle_replaced(directory: Path) -> None:
    """A checkpoint that is replaced is gone; one whose place nothing has taken has its name again, on disk."""
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
    """Yield the files before the manifest, in pieces."""
    from runner.durable.tensors import pieces

    for stem, tensors in snapshot.tensors.items():
        yield stem + _SUFFIX, pieces(tensors)
    yield STATE, [json.dumps(snapshot.state, indent=1).encode()]


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """Return the text of a manifest, its first key the hash of all the rest in canonical JSON."""
    rest = json.loads(json.dumps(manifest))  # as a reader will see it: keys are text, tuples are lists
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({"sha256": hashlib.sha256(canonical).hexdigest(), **rest}, indent=1).encode() + b"\n"


class _Damaged(Exception):
    """What is wrong with a checkpoint that can be read."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class _Foreign(_Damaged):
    """That a checkpoint is of another run."""


class _Namesake(_Foreign):
    """That a checkpoint is of another run with the same name, such as one in another output_root."""


def _must_be_of(found: Loaded, run: Owner, *, allows_others: bool = False) -> None:
    """Raise _Foreign where the checkpoint is of another run; the numbers of updates would be its own.

    The uid decides where both have one: a run that was renamed keeps it.
    """
    has_other_uid = run.has_other_uid(found.manifest)
    if has_other_uid is False or (has_other_uid and allows_others):
        return
    if run.has_other_name(found.manifest):
        name = found.manifest["run_id"]
        raise _Foreign(f"it is of another run, {name}; to begin with it: resume=FOLDER in a new run")
    if has_other_uid:
        raise _Namesake(f"it is of another run with the same name, {uid_of(found.manifest)}; this one is {run.uid}")


def _of_a_namesake(found: Loaded, run: Owner) -> IncompatibleResume:
    return IncompatibleResume(
        f"{found.path.name} is of another run with the same name: {uid_of(found.manifest)}, and this run is {run.uid}",
        where=str(found.path.parent),
        fix="move it out of this folder, or continue from it with resume_allow=[run]; to begin a new run with it: "
        f"run=NAME resume={found.path}",
    )


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Damaged(otherwise)


def _examine(path: Path) -> Loaded:
    """Return the checkpoint at `path`. Raises _Damaged, and StorageError where it cannot be read."""
    _must(files.is_plain_directory(path), "it must be a folder, but is a link, a file or not there")
    present = files.names(path)
    for name in present:
        _must(files.is_plain_file(path / name), f"{name} must be a plain file")
    _must(MANIFEST in present, f"{MANIFEST} is missing")
    manifest = _read_manifest(path / MANIFEST)
    named = _NAME.fullmatch(path.name)
    _must(not named or int(named[1]) == manifest["update"], f"{MANIFEST} is that of update {manifest['update']}")
    problems = tuple(_file_problems(path, manifest["files"], set(present)))
    if problems:
        raise _Damaged(*problems)
    state = _parse(files.read(path / STATE, at_most=_STATE_BYTES))
    _must(isinstance(state, dict), f"{STATE} does not hold a JSON object")
    return Loaded(path, manifest, state)


def _examine_twice(path: Path) -> Loaded:
    """Return the checkpoint, also where the system could not read it for a moment. Raises as `_examine` does."""
    try:
        return _examine(path)
    except StorageError:
        time.sleep(_MOMENT_S)
        return _examine(path)


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest, every field of which can be relied on. Raises _Damaged."""
    _must(files.size_of(path) <= _MANIFEST_BYTES, f"{MANIFEST} must have at most {_MANIFEST_BYTES} bytes")
    text = files.read(path, at_most=_MANIFEST_BYTES)
    manifest = _parse(text)
    if not isinstance(manifest, dict):
        raise _Damaged(f"{MANIFEST} does not hold a JSON object")
    _must(_is_sealed(manifest, text), f"{MANIFEST} does not agree with its own hash")
    version, update, entries = (manifest.get(key) for key in ("format_version", "update", "files"))
    _must(version == FORMAT_VERSION, f"format_version must be {FORMAT_VERSION}, but is {version!r}")
    _must(
        type(update) is int and 0 <= update < 10**_NUM_DIGITS,
        f"update must be a whole number of at most {_NUM_DIGITS} digits, but is {update!r}",
    )
    if not isinstance(entries, list) or not all(_is_entry(entry) for entry in entries):
        raise _Damaged("files must be a list of plain names, sizes and hashes")
    listed = [entry["name"] for entry in entries]
    _must(
        STATE in listed and MANIFEST not in listed and len(set(listed)) == len(listed),
        f"files must name {STATE}, not {MANIFEST}, and each file once",
    )
    return manifest


def _is_sealed(manifest: Mapping[str, Any], text: bytes) -> bool:
    """Tell whether `text` is, byte for byte, what `sealed` makes of it: even a changed space is noticed."""
    try:
        return sealed({key: value for key, value in manifest.items() if key != "sha256"}) == text
    except RecursionError:
        return False


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"name", "size", "sha256"}
        and isinstance(entry["name"], str)
        and _SAFE_NAME.fullmatch(entry["name"]) is not None
        and type(entry["size"]) is int
        and isinstance(entry["sha256"], str)
    )


def _file_problems(path: Path, entries: list[dict[str, Any]], present: set[str]) -> Iterator[str]:
    listed = {entry["name"] for entry in entries}
    for name in sorted(present - listed - {MANIFEST}):
        yield f"{name} is there but not in {MANIFEST}"
    for entry in entries:
        name = entry["name"]
        if name not in present:
            yield f"{name} is missing"
        elif (size := files.size_of(path / name)) != entry["size"]:
            yield f"{name} must have {entry['size']} bytes, but has {size}"
        elif files.digest_of(path / name) != entry["sha256"]:
            yield f"{name} does not agree with its hash"


def _parse(text: bytes) -> Any:
    """Return what the JSON `text` holds, None where it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def newest_first(directory: Path) -> list[Path]:
    return [directory / name for name in reversed(files.names(directory)) if _NAME.fullmatch(name)]


def _superfluous(directory: Path, keep_last: int, known: set[Path]) -> list[Path]:
    """Return what is older than both the newest `keep_last` checkpoints and the two newest valid ones."""
    paths = newest_first(directory)
    if len(paths) <= max(keep_last, _NUM_VALID):
        return []
    num_valid = 0
    for position, path in enumerate(paths):
        if position >= keep_last and num_valid >= _NUM_VALID:
            return paths[position:]
        if num_valid < _NUM_VALID:  # two are enough to know
            if path not in known and not verify(path):
                known.add(path)
            num_valid += path in known
    return []


def _move_aside(path: Path, word: str) -> None:
    """`path` is called `<word>-<name>-<n>` with the first n that is free, on disk."""
    number = 1
    while files.exists(aside := path.with_name(f"{word}-{path.name}-{number}")):
        number += 1
    files.rename(path, aside)
    files.fsync_directory(path.parent)


def _none_valid(directory: Path, passed_over: list[tuple[str, tuple[str, ...]]], damaged: list[str]) -> DataError:
    found = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in passed_over) or ", ".join(damaged)
    return DataError(
        f"there are checkpoints, but none is valid ({found})",
        where=str(directory),
        fix="put a good copy back, or start again at update 0 with resume=fresh, which keeps these folders",
    )


_NUM_DIGITS = 10
_NUM_VALID = 2  # never fewer are kept
_MOMENT_S = 0.1  # for a disk or a limit to recover
_NUM_LOOKS = 10  # for one that is there from the first look at its name to the last
_NUM_FAILURES = 3  # in a row, then saving is given up
PAUSES_S = (0.5, 1.0)  # before the second and the third attempt at one save
_MANIFEST_BYTES = 16 << 20  # a manifest has about 200 bytes per file
_STATE_BYTES = 256 << 20  # it has no tensors, but the generators of every rank
_SUFFIX = ".safetensors"
_OUTGOING = f"{files.TEMPORARY}old-"
_REPLACED = "replaced-"
_ASIDE = ("damaged-", "foreign-", "unreadable-")
_NAME = re.compile(rf"update-(\d{{{_NUM_DIGITS}}})", re.ASCII)
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OWN_KEYS = frozenset({"sha256", "format_version", "update", "files"})
